// Devices, contexts, memory, status codes.

#include <cstdlib>
#include <cstring>
#include <map>

#include "../machine/inner.h"
#include "cuda.h"

std::recursive_mutex driver_lock;

namespace {

constexpr int VERSION = 13000;

struct Context {
} the_context;

bool initialised = false;
int retained = 0;
thread_local std::vector<Context*> contexts;

size_t used_bytes = 0;
std::map<uint64_t, size_t> allocations, pinned;

/// A number of the environment's.
size_t setting(const char* name, size_t usual) {
    const char* text = getenv(name);
    return text ? strtoull(text, nullptr, 10) : usual;
}

size_t shared_bytes_of(int capability) {
    switch (capability) {
        case 80: return 163 << 10;
        case 90:
        case 100: return 227 << 10;
        default: return 99 << 10;
    }
}

const std::pair<const char*, const char*>* words(int code) {
    static const std::map<int, std::pair<const char*, const char*>> all = {
        {SUCCESS, {"CUDA_SUCCESS", "no error"}},
        {INVALID_VALUE, {"CUDA_ERROR_INVALID_VALUE", "invalid argument"}},
        {OUT_OF_MEMORY, {"CUDA_ERROR_OUT_OF_MEMORY", "out of memory"}},
        {NOT_INITIALIZED, {"CUDA_ERROR_NOT_INITIALIZED", "initialization error"}},
        {100, {"CUDA_ERROR_NO_DEVICE", "no device is there"}},
        {INVALID_DEVICE, {"CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"}},
        {INVALID_IMAGE, {"CUDA_ERROR_INVALID_IMAGE", "the kernel image is invalid"}},
        {INVALID_CONTEXT, {"CUDA_ERROR_INVALID_CONTEXT", "invalid device context"}},
        {NO_BINARY_FOR_GPU, {"CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image for this device"}},
        {INVALID_HANDLE, {"CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"}},
        {ILLEGAL_STATE, {"CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"}},
        {NOT_FOUND, {"CUDA_ERROR_NOT_FOUND", "named symbol not found"}},
        {NOT_SUPPORTED, {"CUDA_ERROR_NOT_SUPPORTED", "operation not supported"}},
        {CAPTURE_UNSUPPORTED, {"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"}},
        {CAPTURE_INVALIDATED, {"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "an earlier operation broke the capture"}},
        {CAPTURE_UNMATCHED, {"CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "the capture did not begin on this stream"}},
        {CAPTURE_UNJOINED, {"CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "another stream's work was not joined to the capture's"}},
        {CAPTURED_EVENT, {"CUDA_ERROR_CAPTURED_EVENT", "the event was last recorded in a capture"}},
        {CAPTURE_WRONG_THREAD, {"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", "another thread began the capture"}},
    };
    auto found = all.find(code);
    return found == all.end() ? nullptr : &found->second;
}

}  // namespace

const Facts& facts() {
    static const Facts facts = [] {
        int capability = (int)setting("NVIDIA_EMULATOR_CAPABILITY", 90);
        return Facts{capability, (int)setting("NVIDIA_EMULATOR_SMS", 8), shared_bytes_of(capability),
                     setting("NVIDIA_EMULATOR_MEMORY_MIB", 8192) << 20};
    }();
    return facts;
}

Status current() {
    if (!initialised) return NOT_INITIALIZED;
    return contexts.empty() || !contexts.back() || retained == 0 ? INVALID_CONTEXT : SUCCESS;
}

extern "C" {

int cuInit(unsigned flags) {
    if (flags != 0) return INVALID_VALUE;
    initialised = true;
    return SUCCESS;
}

int cuDriverGetVersion(int* version) {
    *version = VERSION;
    return SUCCESS;
}

int cuGetErrorName(int code, const char** text) {
    auto found = words(code);
    *text = found ? found->first : nullptr;
    return found ? SUCCESS : INVALID_VALUE;
}

int cuGetErrorString(int code, const char** text) {
    auto found = words(code);
    *text = found ? found->second : nullptr;
    return found ? SUCCESS : INVALID_VALUE;
}

// ---- devices and contexts ----

int cuDeviceGetCount(int* count) {
    *count = 1;
    return initialised ? SUCCESS : NOT_INITIALIZED;
}

int cuDeviceGet(int* device, int ordinal) {
    if (ordinal != 0) return INVALID_DEVICE;
    *device = 0;
    return initialised ? SUCCESS : NOT_INITIALIZED;
}

int cuDeviceGetName(char* name, int length, int device) {
    if (device != 0 || length <= 0) return INVALID_VALUE;
    std::string text = "emulated GPU of compute capability " + std::to_string(facts().capability / 10) + "." +
                       std::to_string(facts().capability % 10);
    strncpy(name, text.c_str(), length);
    name[length - 1] = 0;
    return SUCCESS;
}

int cuDeviceGetAttribute(int* value, int attribute, int device) {
    if (device != 0) return INVALID_DEVICE;
    switch (attribute) {
        case 1: *value = 1024; break;                                 // MAX_THREADS_PER_BLOCK
        case 10: *value = machine::WARP; break;                       // WARP_SIZE
        case 16: *value = facts().multiprocessors; break;             // MULTIPROCESSOR_COUNT
        case 75: *value = facts().capability / 10; break;             // COMPUTE_CAPABILITY_MAJOR
        case 76: *value = facts().capability % 10; break;             // COMPUTE_CAPABILITY_MINOR
        case 97: *value = (int)facts().shared_bytes; break;           // MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        default: return INVALID_VALUE;
    }
    return SUCCESS;
}

int cuDeviceTotalMem_v2(size_t* bytes, int device) {
    *bytes = facts().memory_bytes;
    return device == 0 ? SUCCESS : INVALID_DEVICE;
}

int cuDevicePrimaryCtxRetain(Context** context, int device) {
    if (device != 0) return INVALID_DEVICE;
    std::lock_guard lock(driver_lock);
    retained++;
    *context = &the_context;
    return SUCCESS;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
    std::lock_guard lock(driver_lock);
    if (device != 0 || retained == 0) return INVALID_CONTEXT;
    retained--;
    return SUCCESS;
}

int cuCtxGetCurrent(Context** context) {
    *context = contexts.empty() ? nullptr : contexts.back();
    return SUCCESS;
}

int cuCtxSetCurrent(Context* context) {
    if (!contexts.empty()) contexts.pop_back();
    if (context) contexts.push_back(context);
    return SUCCESS;
}

int cuCtxPushCurrent_v2(Context* context) {
    if (!context) return INVALID_CONTEXT;
    contexts.push_back(context);
    return SUCCESS;
}

int cuCtxPopCurrent_v2(Context** context) {
    if (contexts.empty()) return INVALID_CONTEXT;
    *context = contexts.back();
    contexts.pop_back();
    return SUCCESS;
}

// ---- memory ----

int cuMemGetInfo_v2(size_t* free, size_t* total) {
    std::lock_guard lock(driver_lock);
    *total = facts().memory_bytes;
    *free = *total - used_bytes;
    return current();
}

int cuMemAlloc_v2(uint64_t* address, size_t bytes) {
    std::lock_guard lock(driver_lock);
    if (Status status = outside_capture()) return status;
    if (bytes == 0) return INVALID_VALUE;
    if (bytes > facts().memory_bytes - used_bytes) return OUT_OF_MEMORY;
    void* memory = machine::device_alloc(bytes);
    if (!memory) return OUT_OF_MEMORY;
    used_bytes += bytes;
    *address = (uint64_t)memory;
    allocations[*address] = bytes;
    return SUCCESS;
}

int cuMemFree_v2(uint64_t address) {
    std::lock_guard lock(driver_lock);
    if (Status status = outside_capture()) return status;
    auto found = allocations.find(address);
    if (found == allocations.end()) return INVALID_VALUE;
    used_bytes -= found->second;
    allocations.erase(found);
    machine::device_free((void*)address);
    return SUCCESS;
}

int cuMemAllocAsync(uint64_t* address, size_t bytes, Stream* stream) {
    std::lock_guard lock(driver_lock);
    Stream* of = stream_of(stream);
    if (!of) return INVALID_HANDLE;
    if (!of->capture) return cuMemAlloc_v2(address, bytes);
    return enqueue(stream, ALLOC_NODE, [] {});
}

int cuMemHostAlloc(void** memory, size_t bytes, unsigned) {
    std::lock_guard lock(driver_lock);
    if (Status status = outside_capture()) return status;
    *memory = malloc(bytes);
    if (!*memory) return OUT_OF_MEMORY;
    pinned[(uint64_t)*memory] = bytes;
    return SUCCESS;
}

int cuMemFreeHost(void* memory) {
    std::lock_guard lock(driver_lock);
    if (Status status = outside_capture()) return status;
    if (pinned.erase((uint64_t)memory) == 0) return INVALID_VALUE;
    free(memory);
    return SUCCESS;
}

}  // extern "C"

namespace {

/// Whether `bytes` from an address on are of one allocation.
bool is_device(uint64_t address, size_t bytes) {
    auto next = allocations.upper_bound(address);
    if (next == allocations.begin()) return false;
    auto [begin, size] = *std::prev(next);
    return address - begin <= size && bytes <= size - (address - begin);
}

}  // namespace

extern "C" {

int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, Stream* stream) {
    std::lock_guard lock(driver_lock);
    if (!is_device(to, bytes)) return INVALID_VALUE;
    return enqueue(stream, COPY_NODE, [=] { memcpy((void*)to, from, bytes); });
}

int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, Stream* stream) {
    std::lock_guard lock(driver_lock);
    if (!is_device(from, bytes)) return INVALID_VALUE;
    return enqueue(stream, COPY_NODE, [=] { memcpy(to, (const void*)from, bytes); });
}

int cuMemsetD8Async(uint64_t at, unsigned char byte, size_t bytes, Stream* stream) {
    std::lock_guard lock(driver_lock);
    if (!is_device(at, bytes)) return INVALID_VALUE;
    return enqueue(stream, FILL_NODE, [=] { memset((void*)at, byte, bytes); });
}

}  // extern "C"
