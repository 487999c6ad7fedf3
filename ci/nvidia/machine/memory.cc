// Shared memory, device memory, and what touches neither.

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>

#include "inner.h"

namespace machine {

namespace {

constexpr size_t PAGE = 4096;
constexpr size_t WINDOW = 256 << 10;
constexpr size_t SHARED_ALIGNMENT = 1024, DEVICE_ALIGNMENT = 256;
constexpr size_t AROUND = 1024;            // bytes before the window that are looked at
constexpr uint32_t STATIC_AT = 1u << 20;   // addresses of static arrays
constexpr size_t MOST_POISONED = 64 << 20;  // larger allocations are too slow to fill
constexpr int POISON = 0xff;               // NaN in every float format, an index far out of bounds

constexpr size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

unsigned char* window_end;
size_t shared_bytes;
unsigned char *static_begin, *static_end;

std::mutex allocations_lock;
std::map<uintptr_t, size_t> allocations;

/// Memory whose neighbouring pages are not there; null if the host has none.
unsigned char* guarded(size_t bytes) {
    size_t whole = round_up(bytes, PAGE) + 2 * PAGE;
    void* map = mmap(nullptr, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) return nullptr;
    if (mprotect((char*)map + PAGE, whole - 2 * PAGE, PROT_READ | PROT_WRITE) != 0) {
        munmap(map, whole);
        return nullptr;
    }
    return (unsigned char*)map + PAGE;
}

void expect_poison(const unsigned char* from, const unsigned char* to, const char* where) {
    for (; from < to; from++) {
        if (*from != POISON) fail("something was written %s", where);
    }
}

struct sigaction before_segv, before_bus;

void on_fault(int signal, siginfo_t* info, void*) {
    if (!running()) {
        // Not ours: it happens again, for who was here before.
        sigaction(signal, signal == SIGSEGV ? &before_segv : &before_bus, nullptr);
        return;
    }
    fail("touches %p, %s", info->si_addr, describe(info->si_addr));
}

}  // namespace

void reset_shared(size_t bytes, unsigned char* begin, unsigned char* end) {
    if (!window_end) window_end = guarded(WINDOW) + WINDOW;
    shared_bytes = bytes;
    static_begin = begin;
    static_end = end;
    here.shared = window_end - round_up(bytes, SHARED_ALIGNMENT);
    size_t before = std::min<size_t>(AROUND, here.shared - (window_end - WINDOW));
    memset(here.shared - before, POISON, window_end - here.shared + before);
    if (begin) memset(begin, POISON, end - begin);
}

void check_shared() {
    unsigned char* begin = window_end - WINDOW;
    expect_poison(here.shared - begin > (ptrdiff_t)AROUND ? here.shared - AROUND : begin, here.shared, "before the block's shared memory");
    expect_poison(here.shared + shared_bytes, window_end, "behind the block's shared memory");
}

uint32_t shared_address(const void* pointer) {
    auto at = (const unsigned char*)pointer;
    if (at >= here.shared && at <= here.shared + shared_bytes) return with_rank((uint32_t)(at - here.shared));
    if (at >= static_begin && at < static_end) return with_rank(STATIC_AT + (uint32_t)(at - static_begin));
    fail("%p is not in shared memory", pointer);
}

unsigned char* shared_at(uint32_t address, size_t bytes, size_t alignment) {
    if (address >> RANK_SHIFT != (uint32_t)here.rank) {
        fail("address %#x of shared memory, which has the rank of another block than this one's %d", address, here.rank);
    }
    address = without_rank(address);
    if (address % alignment != 0) fail("address %u of shared memory is no multiple of %zu", address, alignment);
    if (address + bytes <= shared_bytes) return here.shared + address;
    if (address >= STATIC_AT && address - STATIC_AT + bytes <= (size_t)(static_end - static_begin)) {
        return static_begin + (address - STATIC_AT);
    }
    fail("%zu bytes at %u of shared memory, of which the block has %zu", bytes, address, shared_bytes);
}

void* device_alloc(size_t bytes) {
    size_t taken = round_up(bytes, DEVICE_ALIGNMENT);
    unsigned char* begin = guarded(taken);
    if (!begin) return nullptr;
    // Against the guard behind it.
    unsigned char* at = begin + round_up(taken, PAGE) - taken;
    if (taken <= MOST_POISONED) memset(at, POISON, taken);
    std::lock_guard lock(allocations_lock);
    allocations[(uintptr_t)at] = bytes;
    return at;
}

std::vector<Memory> device_memory() {
    std::lock_guard lock(allocations_lock);
    std::vector<Memory> all;
    for (auto& [at, bytes] : allocations) all.push_back({(unsigned char*)at, round_up(bytes, DEVICE_ALIGNMENT)});
    return all;
}

bool device_free(void* at) {
    std::lock_guard grids(one_grid_at_a_time);
    grids_apart();
    std::lock_guard lock(allocations_lock);
    auto found = allocations.find((uintptr_t)at);
    if (found == allocations.end()) return false;
    size_t bytes = found->second, taken = round_up(bytes, DEVICE_ALIGNMENT);
    if (taken <= MOST_POISONED) {
        expect_poison((unsigned char*)at + bytes, (unsigned char*)at + taken, "behind an allocation of device memory");
    }
    size_t whole = round_up(taken, PAGE);
    munmap((char*)at + taken - whole - PAGE, whole + 2 * PAGE);
    allocations.erase(found);
    return true;
}

const char* describe(const void* address) {
    static char text[160];
    auto at = (uintptr_t)address;
    auto shared = (uintptr_t)here.shared;
    if (at >= shared - WINDOW - PAGE && at < (uintptr_t)window_end + PAGE) {
        snprintf(text, sizeof text, "byte %td of shared memory, of which the block has %zu", (ptrdiff_t)(at - shared), shared_bytes);
        return text;
    }
    auto next = allocations.upper_bound(at);
    if (next != allocations.end() && next->first - at <= PAGE) {
        snprintf(text, sizeof text, "%zu bytes before device memory of %zu bytes", (size_t)(next->first - at), next->second);
    } else if (next != allocations.begin() && at >= std::prev(next)->first + std::prev(next)->second) {
        auto last = std::prev(next);
        snprintf(text, sizeof text, "%zu bytes behind device memory of %zu bytes", (size_t)(at - last->first - last->second), last->second);
    } else {
        snprintf(text, sizeof text, "or something that is not aligned as it must be");
    }
    return text;
}

FaultWatch::FaultWatch() {
    static std::once_flag once;
    std::call_once(once, [] {
        struct sigaction action = {};
        action.sa_sigaction = on_fault;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        sigaction(SIGSEGV, &action, &before_segv);
        sigaction(SIGBUS, &action, &before_bus);
    });
    static unsigned char stack[64 << 10];
    stack_t own = {};
    own.ss_sp = stack;
    own.ss_size = sizeof stack;
    sigaltstack(&own, &before);
}

FaultWatch::~FaultWatch() { sigaltstack(&before, nullptr); }

}  // namespace machine
