// The emulated multiprocessor, as the instructions in device/ use it, and as the driver launches on it.
//
// One block runs at a time. Its threads are coroutines of the host thread that launched it; which one goes on is decided by chance
// wherever one waits. Shared memory is a window between guard pages; addresses in it are offsets from the block's dynamic part, and have
// the block's rank in its cluster from bit 24 up.
#pragma once

#include <cstddef>
#include <cstdint>

namespace machine {

constexpr int WARP = 32;

/// Where the running thread is.
struct Here {
    int thread, threads;  // of the block
    int block, blocks;    // of the grid
    int rank;             // of the block in its cluster
    unsigned char* shared;
};
extern Here here;

inline int lane() { return here.thread % WARP; }

/// Ends the process, and says which kernel, block and thread did what.
[[noreturn, gnu::format(printf, 1, 2)]] void fail(const char* format, ...);

/// Address of a pointer to shared memory, static arrays included; fails for any other.
uint32_t shared_address(const void* pointer);
/// Pointer to `bytes` of the block's dynamic shared memory at an address that is a multiple of `alignment`.
unsigned char* shared_at(uint32_t address, size_t bytes, size_t alignment);

// ---- meetings ----

/// All lanes of a warp meet: the last one that comes runs the action over what the lanes have given, then all go on. Lanes that
/// meet for different things fail.
using Action = void (*)(void* const* given, int lanes);
void meet(const char* what, void* given, Action action);

/// Waits for `threads` threads of whole warps that name the same barrier; whether any of them says so. Name 0 is the block's own.
bool named_barrier(int name, int threads, bool condition);
/// As one of the threads that `named_barrier` waits for, without waiting itself.
void named_arrive(int name, int threads);

/// Barriers in shared memory that count arrivals and bytes.
void barrier_init(uint32_t at, int arrivals);
void barrier_arrive(uint32_t at);
void barrier_expect(uint32_t at, int bytes);
void barrier_wait(uint32_t at, int parity);
bool barrier_passed(uint32_t at, int parity);

// ---- copies ----

/// 16 bytes to shared memory, zeros if not `valid`. They come at once, at some time, or not before they are waited for.
void copy16(uint32_t to, const void* from, bool valid);
void copy_commit();
void copy_wait(int pending);
/// Arrives at a barrier when this thread's copies so far have come, at some time.
void arrive_with_copies(uint32_t at);

/// Copies a box of a tensor that a map of the driver's describes; adds its bytes to the barrier when it has come.
void copy_box(uint32_t to, const void* map, int column, int row, int page, uint32_t full);

// ---- matrices ----

enum class Format { F16, BF16 };

/// ldmatrix and stmatrix: up to four matrices of 8 x 8 16-bit values, one row of a matrix at each of the first lanes' addresses.
void load_matrix(uint32_t* word, uint32_t row, int matrices, bool transposed);
void store_matrix(uint32_t row, const uint32_t* word, int matrices, bool transposed);

/// mma.sync m16n8k16.
void multiply(float* sums, const uint32_t* a, const uint32_t* b, Format format);

/// wgmma m64nNk16, of which each warp computes its sixteen rows: from its commit on, and at the latest when it is waited for.
struct Product {
    float* const* sums;    // of this lane: columns / 2, an array
    const uint32_t* held;  // operand a in this lane's registers; null if it is in shared memory
    uint64_t a, b;         // descriptors
    int columns;
    bool a_by_depth, b_by_depth;  // rows of the operand in shared memory are the depth
    bool add;
    Format format;
};
void products_begin();
void product(const Product& of);
void products_commit();
void products_wait(int pending);

// ---- kernels ----

/// Waits for the kernels before this one; lets the next one begin.
void grid_wait();
void grid_let_go();

/// What a compiled kernel tells of itself, under its name and `_entry`.
struct Entry {
    void (*call)(void* const* parameters);
    const size_t* parameter_bytes;
    int parameters, threads, arch;
    unsigned char *static_begin, *static_end;
};

/// How a grid is launched: in clusters of so many blocks; in what order, whose address is its name; and whether it may begin before the
/// grid that was launched before it in that order has ended.
struct Shape {
    int blocks, cluster, threads;
    size_t shared_bytes;
    const void* order;
    bool may_overlap;
};

/// Runs a grid; returns when it has ended.
void run(const Entry& entry, const char* name, const Shape& shape, void* const* parameters);
/// What runs next does not overlap what has run.
void grids_apart();

}  // namespace machine
