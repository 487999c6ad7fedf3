// What the machine's own files share.
#pragma once

#include <signal.h>

#include <functional>
#include <mutex>
#include <vector>

#include "machine.h"

namespace machine {

/// A whole number below `bound`, by chance; the same again for the same NVIDIA_EMULATOR_SEED, launch and block.
uint32_t chance(uint32_t bound);

/// Lets other threads go on, sometimes.
void maybe_pause();

/// Suspends the running thread until `wake`; `why` is what a deadlock is reported with.
void suspend(const char* why);
void wake(int thread);

/// Does something on behalf of the running thread later: soon, late, or not before every thread of the block waits.
/// `what` must have been done when the block ends, if it is said that it must.
struct Later {
    uint64_t due;
    int thread;
    bool required;
    std::function<void()> act;
};
void later(bool required, std::function<void()> act);

/// Counts what a bulk copy has brought, and an arrival that no thread makes itself.
void barrier_complete(uint32_t at, int bytes);
void barrier_arrived(uint32_t at);

/// An address without the block's rank, and with it again.
constexpr int RANK_SHIFT = 24;
inline uint32_t without_rank(uint32_t address) { return address & ((1u << RANK_SHIFT) - 1); }
inline uint32_t with_rank(uint32_t address) { return address | (uint32_t)here.rank << RANK_SHIFT; }

/// As `shared_at`, for an instruction that reads or writes there itself: no copy to that place may be under way.
unsigned char* settled_at(uint32_t address, size_t bytes, size_t alignment);

// ---- grids that begin early ----

extern std::recursive_mutex one_grid_at_a_time;
/// Around a grid: launched in this order, and allowed or not to begin before the one before it in that order has ended.
void begin_grid(const void* order, bool may_overlap);
void end_grid();
/// Around each of its blocks.
void begin_block();
void end_block();
/// Lets threads go on that wait for the kernels before, if it is time; whether there were any.
bool catch_up(uint64_t tick);

/// Forget what an earlier block left behind.
void reset_barriers(int threads);
void reset_copies(int threads);
void reset_products(int threads);
/// What must be over when all threads have ended.
void check_products();

// ---- memory ----

/// A fresh, poisoned window for a block; `run` calls it, as well as the check of what lies around it.
void reset_shared(size_t bytes, unsigned char* static_begin, unsigned char* static_end);
void check_shared();

/// Device memory between guard pages, poisoned; null if the host has none.
void* device_alloc(size_t bytes);
/// Whether it was there.
bool device_free(void* at);

/// All of it.
struct Memory {
    unsigned char* at;
    size_t bytes;
};
std::vector<Memory> device_memory();

/// What lies around an address, in words.
const char* describe(const void* address);
/// Reports faults of the kernels that this host thread runs meanwhile.
class FaultWatch {
    stack_t before;

public:
    FaultWatch();
    ~FaultWatch();
};
/// Whether the calling host thread is running a kernel.
bool running();

}  // namespace machine
