// Modules, whose images are shared objects; launches; tensor maps.

#include <dlfcn.h>
#include <elf.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "../machine/tensor_map.h"
#include "cuda.h"

Handles<Module> modules;

namespace {

constexpr int DEFAULT_DYNAMIC = 48 << 10;  // shared memory that a launch may ask for unless more was allowed
constexpr uint32_t MOST_THREADS = 1024, MOST_ROWS = 65535;

/// CUfunction_attribute
enum { SHARED_SIZE_BYTES = 1, MAX_DYNAMIC_SHARED_SIZE_BYTES = 8 };
/// CUlaunchAttributeID
constexpr int CLUSTER_DIMENSION = 4, PROGRAMMATIC_STREAM_SERIALIZATION = 6;
constexpr uint32_t MOST_CLUSTERED = 8;  // blocks, unless more are allowed

/// Bytes of a shared object, whose section headers are its end; 0 for anything else.
size_t image_bytes(const void* image) {
    auto header = (const Elf64_Ehdr*)image;
    if (memcmp(header->e_ident, ELFMAG, SELFMAG) != 0 || header->e_machine != EM_X86_64) return 0;
    return header->e_shoff + (size_t)header->e_shentsize * header->e_shnum;
}

/// Opens a library that lies in memory, by way of a file: the loader takes a name that it has seen for the library of then.
void* open_image(const void* image, size_t bytes) {
    char path[] = "/tmp/emulated-kernel-XXXXXX";
    int file = mkstemp(path);
    if (file < 0) return nullptr;
    bool written = write(file, image, bytes) == (ssize_t)bytes;
    void* library = written ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : nullptr;
    close(file);
    unlink(path);
    return library;
}

int static_bytes(const Function& function) { return (int)(function.entry->static_end - function.entry->static_begin); }

/// As much of a parameter as alignment asks for.
struct alignas(64) Line {
    unsigned char bytes[64];
};

/// A launch with a copy of its parameters.
struct Launch {
    const machine::Entry* entry;
    std::string name;
    machine::Shape shape;
    std::vector<std::vector<Line>> parameters;

    void run() {
        std::vector<void*> pointers;
        for (auto& parameter : parameters) pointers.push_back(parameter.data());
        machine::run(*entry, name.c_str(), shape, pointers.data());
    }
};

}  // namespace

extern "C" {

int cuModuleLoadData(Module** module, const void* image) {
    {
        std::lock_guard lock(driver_lock);
        if (Status status = outside_capture()) return status;
    }
    size_t bytes = image_bytes(image);
    if (bytes == 0) return INVALID_IMAGE;
    void* library = open_image(image, bytes);
    if (!library) {
        fprintf(stderr, "emulated driver: %s\n", dlerror());
        return INVALID_IMAGE;
    }
    std::lock_guard lock(driver_lock);
    *module = modules.add(std::make_unique<Module>(Module{library, {}}));
    return SUCCESS;
}

int cuModuleUnload(Module* module) {
    std::lock_guard lock(driver_lock);
    if (Status status = outside_capture()) return status;
    if (!modules.has(module)) return INVALID_HANDLE;
    dlclose(module->library);
    modules.remove(module);
    return SUCCESS;
}

int cuModuleGetFunction(Function** function, Module* module, const char* name) {
    std::lock_guard lock(driver_lock);
    if (!modules.has(module)) return INVALID_HANDLE;
    auto entry = (const machine::Entry*)dlsym(module->library, (std::string(name) + "_entry").c_str());
    if (!entry) return NOT_FOUND;
    if (entry->arch != facts().capability) return NO_BINARY_FOR_GPU;
    module->functions.push_back(std::make_unique<Function>(Function{module, entry, name, DEFAULT_DYNAMIC}));
    *function = module->functions.back().get();
    return SUCCESS;
}

int cuFuncGetAttribute(int* value, int attribute, Function* function) {
    std::lock_guard lock(driver_lock);
    if (!modules.has(function->module)) return INVALID_HANDLE;
    switch (attribute) {
        case SHARED_SIZE_BYTES: *value = static_bytes(*function); return SUCCESS;
        case MAX_DYNAMIC_SHARED_SIZE_BYTES: *value = function->dynamic_bytes; return SUCCESS;
        default: return INVALID_VALUE;
    }
}

int cuFuncSetAttribute(Function* function, int attribute, int value) {
    std::lock_guard lock(driver_lock);
    if (!modules.has(function->module)) return INVALID_HANDLE;
    if (attribute != MAX_DYNAMIC_SHARED_SIZE_BYTES) return INVALID_VALUE;
    if (value < 0 || (size_t)(value + static_bytes(*function)) > facts().shared_bytes) return INVALID_VALUE;
    function->dynamic_bytes = value;
    return SUCCESS;
}

int cuLaunchKernelEx(const LaunchConfig* config, Function* function, void** parameters, void** extra) {
    std::unique_lock lock(driver_lock);
    if (Status status = current()) return status;
    Stream* stream = stream_of(config->stream);
    if (!stream || !function || !modules.has(function->module)) return INVALID_HANDLE;
    const machine::Entry& entry = *function->entry;
    uint32_t cluster[3] = {1, 1, 1};
    int may_overlap = 0;
    for (uint32_t i = 0; i < config->num_attributes; i++) {
        const LaunchAttribute& attribute = config->attributes[i];
        if (attribute.id != CLUSTER_DIMENSION && attribute.id != PROGRAMMATIC_STREAM_SERIALIZATION) return INVALID_VALUE;
        if (facts().capability < 90) return NOT_SUPPORTED;
        if (attribute.id == CLUSTER_DIMENSION) memcpy(cluster, attribute.value, sizeof cluster);
        if (attribute.id == PROGRAMMATIC_STREAM_SERIALIZATION) memcpy(&may_overlap, attribute.value, sizeof may_overlap);
    }
    const uint32_t *grid = config->grid, *block = config->block;
    // Kernels here number their blocks and threads along one axis.
    if (extra || grid[1] != 1 || grid[2] != 1 || block[1] != 1 || block[2] != 1) return INVALID_VALUE;
    if (cluster[0] == 0 || cluster[1] != 1 || cluster[2] != 1) return INVALID_VALUE;
    if (cluster[0] > MOST_CLUSTERED || grid[0] % cluster[0] != 0) return INVALID_CLUSTER_SIZE;
    if (grid[0] == 0 || grid[0] > INT32_MAX || block[0] == 0 || block[0] > MOST_THREADS) return INVALID_VALUE;
    if ((int)block[0] > entry.threads || config->shared_bytes > (uint32_t)function->dynamic_bytes) return INVALID_VALUE;

    machine::Shape shape = {(int)grid[0], (int)cluster[0], (int)block[0], config->shared_bytes, stream, may_overlap != 0};
    auto launch = std::make_shared<Launch>(Launch{&entry, function->name, shape, {}});
    for (int i = 0; i < entry.parameters; i++) {
        launch->parameters.emplace_back((entry.parameter_bytes[i] + sizeof(Line) - 1) / sizeof(Line));
        memcpy(launch->parameters.back().data(), parameters[i], entry.parameter_bytes[i]);
    }
    if (stream->capture) return enqueue(config->stream, KERNEL_NODE, [launch] { launch->run(); });
    // Other threads may use the driver while this one runs a kernel.
    lock.unlock();
    launch->run();
    return SUCCESS;
}

int cuTensorMapEncodeTiled(machine::TensorMap* map, int data_type, uint32_t rank, void* address, const uint64_t* sizes,
                           const uint64_t* strides, const uint32_t* box, const uint32_t* steps, int interleave, int swizzle, int,
                           int out_of_bounds) {
    constexpr int UINT8 = 0, FLOAT16 = 6, BFLOAT16 = 9, SWIZZLE_128B = 3;
    // What the kernels' copies need; of this, what the real driver refuses.
    if (rank != 3 || interleave != 0 || swizzle != SWIZZLE_128B || out_of_bounds != 0) return NOT_SUPPORTED;
    if (data_type != UINT8 && data_type != FLOAT16 && data_type != BFLOAT16) return NOT_SUPPORTED;
    uint32_t element = data_type == UINT8 ? 1 : 2;
    if ((uint64_t)address % 16 != 0) return INVALID_VALUE;
    for (uint32_t i = 0; i < rank; i++) {
        if (sizes[i] == 0 || sizes[i] > 1ull << 32 || box[i] == 0 || box[i] > 256 || steps[i] != 1) return INVALID_VALUE;
        if (i > 0 && (strides[i - 1] % 16 != 0 || strides[i - 1] >= 1ull << 40)) return INVALID_VALUE;
    }
    if (box[0] * element != machine::BOX_ROW_BYTES || box[2] != 1) return NOT_SUPPORTED;
    memset((void*)map, 0, 128);
    *map = {machine::TENSOR_MAP_MARK, (uint64_t)address, strides[0],      strides[1],   (int64_t)sizes[0],
            (int64_t)sizes[1],        (int64_t)sizes[2], (int32_t)box[1], (int32_t)element};
    return SUCCESS;
}

}  // extern "C"
