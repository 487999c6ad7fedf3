// What a CUDA compiler knows by itself, as far as kernels use it. Comes before a kernel's text.
#pragma once

#include "../machine/machine.h"
#include "ptx.h"

#define __device__
#define __host__
#define __forceinline__ inline
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __grid_constant__

struct Axis {
    unsigned x;
};
#define threadIdx (Axis{(unsigned)machine::here.thread})
#define blockIdx (Axis{(unsigned)machine::here.block})
#define gridDim (Axis{(unsigned)machine::here.blocks})

extern "C" float fmaxf(float, float) noexcept;

inline unsigned __float_as_uint(float x) { return ptx::bits_as<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return ptx::bits_as<float>(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz((unsigned)x); }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    unsigned selected;
    ptx::prmt_b32(selected, low, high, selector);
    return selected;
}
inline size_t __cvta_generic_to_shared(const void* pointer) { return machine::shared_address(pointer); }

// ---- the block's and the warp's meetings; all lanes of a warp take part ----

inline void __syncthreads() { machine::named_barrier(0, machine::here.threads, false); }
inline int __syncthreads_or(int condition) { return machine::named_barrier(0, machine::here.threads, condition != 0); }
inline void __syncwarp() {
    machine::meet("__syncwarp", nullptr, [](void* const*, int) {});
}

inline int __any_sync(unsigned, int condition) {
    struct Lane {
        bool condition, any;
    } own = {condition != 0, false};
    machine::meet("__any_sync", &own, [](void* const* given, int lanes) {
        bool any = false;
        for (int i = 0; i < lanes; i++) any |= ((const Lane*)given[i])->condition;
        for (int i = 0; i < lanes; i++) ((Lane*)given[i])->any = any;
    });
    return own.any;
}

/// Gives a lane the value of lane `from`.
template <typename T>
inline T machine_shuffle(const char* what, T value, int from) {
    struct Lane {
        T value, taken;
        int from;
    } own = {value, value, from};
    machine::meet(what, &own, [](void* const* given, int lanes) {
        for (int i = 0; i < lanes; i++) {
            Lane& lane = *(Lane*)given[i];
            if (lane.from >= lanes) machine::fail("takes the value of lane %d, which the block has not", lane.from);
            lane.taken = ((const Lane*)given[lane.from])->value;
        }
    });
    return own.taken;
}
// Lanes are taken `width` at a time; one that has no such neighbour among its own keeps its value.
template <typename T>
inline T __shfl_sync(unsigned, T value, int from, int width = machine::WARP) {
    int own = machine::lane() % width;
    return machine_shuffle("__shfl_sync", value, machine::lane() - own + from % width);
}
template <typename T>
inline T __shfl_xor_sync(unsigned, T value, int mask, int width = machine::WARP) {
    int lane = machine::lane(), from = lane ^ mask;
    return machine_shuffle("__shfl_xor_sync", value, from / width == lane / width ? from : lane);
}
template <typename T>
inline T __shfl_up_sync(unsigned, T value, int delta, int width = machine::WARP) {
    int lane = machine::lane();
    return machine_shuffle("__shfl_up_sync", value, lane % width < delta ? lane : lane - delta);
}
