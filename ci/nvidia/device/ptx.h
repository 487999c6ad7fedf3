// PTX instructions as functions, under their names with underscores; operands in their order. To add one, write its function:
// the compiler names those that are missing.
#pragma once

#include "../machine/machine.h"

namespace ptx {

template <typename To, typename From>
inline To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    __builtin_memcpy(&to, &from, sizeof to);
    return to;
}

/// Operands in braces.
template <typename T, int count>
struct Group {
    T* at[count];
};
template <typename T, typename... Rest>
inline Group<T, 1 + sizeof...(Rest)> group(T& first, Rest&... rest) {
    return {{&first, &rest...}};
}
template <typename T, int count>
struct Values {
    uint32_t value[count];
    template <typename Of>  // operands of the statement, which are constant, or its own registers
    Values(const Group<Of, count>& of) {
        for (int i = 0; i < count; i++) value[i] = *of.at[i];
    }
};
constexpr struct Sink {
} sink;

// ---- numbers ----

inline void ex2_approx_ftz_f32(float& d, float a) { d = __builtin_exp2f(a); }
inline void lg2_approx_f32(float& d, float a) { d = __builtin_log2f(a); }
inline void rcp_approx_ftz_f32(float& d, float a) { d = 1.0f / a; }

inline float bf16_to_float(uint32_t bits) { return bits_as<float>(bits << 16); }
inline float f16_to_float(uint32_t bits) { return bits_as<_Float16>((uint16_t)bits); }
/// Rounded to nearest, ties to even; NaN has one form.
inline uint32_t to_bf16(float x) {
    uint32_t bits = bits_as<uint32_t>(x);
    return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline uint32_t to_f16(float x) { return x != x ? 0x7fff : bits_as<uint16_t>((_Float16)x); }

inline void cvt_rn_bf16x2_f32(uint32_t& d, float high, float low) { d = to_bf16(high) << 16 | to_bf16(low); }
inline void cvt_rn_f16x2_f32(uint32_t& d, float high, float low) { d = to_f16(high) << 16 | to_f16(low); }
inline void cvt_f32_f16(float& d, uint16_t a) { d = f16_to_float(a); }

inline uint32_t e4m3_to_f16(uint32_t byte) {
    if ((byte & 0x7f) == 0x7f) return 0x7fff;
    // The bits where f16 has them, and 2^8 for the difference of the exponents' biases.
    return to_f16(f16_to_float((byte & 0x80) << 8 | (byte & 0x7f) << 7) * 256.0f);
}
inline void cvt_rn_f16x2_e4m3x2(uint32_t& d, uint16_t a) { d = e4m3_to_f16(a & 0xff) | e4m3_to_f16(a >> 8) << 16; }

inline void prmt_b32(uint32_t& d, uint32_t a, uint32_t b, uint32_t selector) {
    if (selector & 0x8888) machine::fail("prmt with signs");
    uint64_t bytes = (uint64_t)b << 32 | a;
    d = 0;
    for (int i = 0; i < 4; i++) d |= (uint32_t)(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
}

inline void mov_b32(Group<uint16_t, 2> d, uint32_t a) {
    *d.at[0] = (uint16_t)a;
    *d.at[1] = (uint16_t)(a >> 16);
}
inline void fma_rn_bf16x2(uint32_t& d, uint32_t a, uint32_t b, uint32_t c) {
    auto fused = [&](int shift) {
        return to_bf16(__builtin_fmaf(bf16_to_float(a >> shift & 0xffff), bf16_to_float(b >> shift & 0xffff), bf16_to_float(c >> shift & 0xffff)));
    };
    d = fused(16) << 16 | fused(0);
}
inline void mul_rn_f16x2(uint32_t& d, uint32_t a, uint32_t b) {
    d = to_f16(f16_to_float(a >> 16) * f16_to_float(b >> 16)) << 16 | to_f16(f16_to_float(a) * f16_to_float(b));
}
inline void max_u16x2(uint32_t& d, uint32_t a, uint32_t b) {
    auto larger = [](uint32_t x, uint32_t y) { return x > y ? x : y; };
    d = larger(a >> 16, b >> 16) << 16 | larger(a & 0xffff, b & 0xffff);
}
inline void mov_b64(uint64_t& d, uint64_t a) { d = a; }
inline void add_s64(uint64_t& d, uint64_t a, uint64_t b) { d = a + b; }
inline void setp_ne_b32(bool& d, uint32_t a, uint32_t b) { d = a != b; }
inline void setp_eq_b32(bool& d, uint32_t a, uint32_t b) { d = a == b; }
template <typename T>
inline void selp_b32(T& d, uint32_t a, uint32_t b, bool first) {
    d = (T)(first ? a : b);
}

// ---- memory ----

template <typename T>
inline void ld_global_cg_b32(T& d, uint64_t from) {
    d = *(const volatile T*)from;
}
inline void ld_global_cg_v4_b32(Group<uint32_t, 4> d, uint64_t from) {
    if (from % 16 != 0) machine::fail("16 bytes loaded from %#llx", (unsigned long long)from);
    for (int i = 0; i < 4; i++) *d.at[i] = ((const volatile uint32_t*)from)[i];
}
// Blocks take turns only where a thread waits, so these are whole, and in order.
inline void ld_acquire_gpu_global_b32(uint32_t& d, uint64_t from) { d = *(const volatile uint32_t*)from; }
inline void atom_acq_rel_gpu_global_inc_u32(uint32_t& d, uint64_t at, uint32_t last) {
    auto& word = *(volatile uint32_t*)at;
    d = word;
    word = d >= last ? 0 : d + 1;
}
// A prefetch may name any address.
inline void prefetch_global_L2(uint64_t) {}
inline void prefetch_tensormap(uint64_t) {}
inline void cp_async_bulk_prefetch_tensor_3d_L2_global(uint64_t, Group<const uint32_t, 3>) {}
inline void cp_async_bulk_prefetch_tensor_3d_L2_global_tile(uint64_t, Group<const uint32_t, 3>) {}

inline void cp_async_cg_shared_global(uint32_t to, uint64_t from, int bytes, bool ignored) {
    if (bytes != 16) machine::fail("cp.async of %d bytes", bytes);
    machine::copy16(to, (const void*)from, !ignored);
}
inline void cp_async_cg_shared_global(uint32_t to, uint64_t from, int bytes, uint32_t read) {
    if (read != 0 && read != 16) machine::fail("cp.async of %u of %d bytes", read, bytes);
    cp_async_cg_shared_global(to, from, bytes, read == 0);
}
// How the second-level cache is to keep it changes nothing here.
inline void cp_async_cg_shared_global_L2_cache_hint(uint32_t to, uint64_t from, int bytes, bool ignored, uint64_t) {
    cp_async_cg_shared_global(to, from, bytes, ignored);
}
inline void cp_async_commit_group() { machine::copy_commit(); }
inline void cp_async_wait_group(int pending) { machine::copy_wait(pending); }
inline void cp_async_mbarrier_arrive_noinc_shared_cta_b64(uint32_t at) { machine::arrive_with_copies(at); }
inline void cp_async_bulk_tensor_3d_shared_cluster_global_mbarrier_complete_tx_bytes(uint32_t to, uint64_t map,
                                                                                     Group<const uint32_t, 3> at, uint32_t full) {
    machine::copy_box(to, (const void*)map, (int)*at.at[0], (int)*at.at[1], (int)*at.at[2], full);
}

inline void cp_async_bulk_tensor_3d_shared_cluster_global_mbarrier_complete_tx_bytes_L2_cache_hint(uint32_t to, uint64_t map,
                                                                                                   Group<const uint32_t, 3> at,
                                                                                                   uint32_t full, uint64_t) {
    machine::copy_box(to, (const void*)map, (int)*at.at[0], (int)*at.at[1], (int)*at.at[2], full);
}

// Stores are seen at once by all.
inline void fence_proxy_async_shared_cta() {}
inline void fence_mbarrier_init_release_cluster() {}

inline void griddepcontrol_wait() { machine::grid_wait(); }
inline void griddepcontrol_launch_dependents() { machine::grid_let_go(); }

// ---- barriers ----

inline void barrier_sync_aligned(uint32_t name, uint32_t threads) { machine::named_barrier((int)name, (int)threads, false); }
inline void barrier_arrive_aligned(uint32_t name, uint32_t threads) { machine::named_arrive((int)name, (int)threads); }
inline void barrier_cta_red_or_pred_aligned(bool& d, uint32_t name, uint32_t threads, bool condition) {
    d = machine::named_barrier((int)name, (int)threads, condition);
}
inline void mbarrier_init_shared_cta_b64(uint32_t at, uint32_t arrivals) { machine::barrier_init(at, (int)arrivals); }
inline void mbarrier_arrive_shared_cta_b64(Sink, uint32_t at) { machine::barrier_arrive(at); }
inline void mbarrier_arrive_expect_tx_shared_cta_b64(Sink, uint32_t at, uint32_t bytes) { machine::barrier_expect(at, (int)bytes); }
/// Waits as long as it takes.
inline void mbarrier_try_wait_parity_shared_cta_b64(bool& done, uint32_t at, uint32_t parity) {
    machine::barrier_wait(at, (int)parity);
    done = true;
}
inline void mbarrier_test_wait_parity_shared_cta_b64(bool& done, uint32_t at, uint32_t parity) {
    done = machine::barrier_passed(at, (int)parity);
}

/// Any one lane of the warp may be chosen.
inline void elect_sync(bool& is, uint32_t) {
    machine::meet("elect.sync", nullptr, [](void* const*, int) {});
    is = machine::lane() == 0;
}

inline void setmaxnreg_dec_sync_aligned_u32(int) {
    machine::meet("setmaxnreg.dec", nullptr, [](void* const*, int) {});
}
inline void setmaxnreg_inc_sync_aligned_u32(int) {
    machine::meet("setmaxnreg.inc", nullptr, [](void* const*, int) {});
}

// ---- matrices ----

template <int count>
inline void load_matrix(const Group<uint32_t, count>& d, uint32_t row, bool transposed) {
    uint32_t word[count];
    machine::load_matrix(word, row, count, transposed);
    for (int i = 0; i < count; i++) *d.at[i] = word[i];
}
#define MATRICES(count)                                                                                                              \
    inline void ldmatrix_sync_aligned_m8n8_x##count##_shared_b16(Group<uint32_t, count> d, uint32_t row) {                           \
        load_matrix(d, row, false);                                                                                                  \
    }                                                                                                                                \
    inline void ldmatrix_sync_aligned_m8n8_x##count##_trans_shared_b16(Group<uint32_t, count> d, uint32_t row) {                     \
        load_matrix(d, row, true);                                                                                                   \
    }                                                                                                                                \
    inline void stmatrix_sync_aligned_m8n8_x##count##_shared_b16(uint32_t row, Values<const uint32_t, count> a) {                    \
        machine::store_matrix(row, a.value, count, false);                                                                           \
    }                                                                                                                                \
    inline void stmatrix_sync_aligned_m8n8_x##count##_trans_shared_b16(uint32_t row, Values<const uint32_t, count> a) {              \
        machine::store_matrix(row, a.value, count, true);                                                                            \
    }
MATRICES(1)
MATRICES(2)
MATRICES(4)
#undef MATRICES

inline void multiply(const Group<float, 4>& d, const uint32_t* a, const uint32_t* b, const Group<float, 4>& c, machine::Format format) {
    float sums[4];
    for (int i = 0; i < 4; i++) sums[i] = *c.at[i];
    machine::multiply(sums, a, b, format);
    for (int i = 0; i < 4; i++) *d.at[i] = sums[i];
}
inline void mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(Group<float, 4> d, Values<const uint32_t, 4> a, Values<const uint32_t, 2> b,
                                                              Group<float, 4> c) {
    multiply(d, a.value, b.value, c, machine::Format::F16);
}
inline void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(Group<float, 4> d, Values<const uint32_t, 4> a,
                                                                Values<const uint32_t, 2> b, Group<float, 4> c) {
    multiply(d, a.value, b.value, c, machine::Format::BF16);
}

inline void wgmma_fence_sync_aligned() { machine::products_begin(); }
inline void wgmma_commit_group_sync_aligned() { machine::products_commit(); }
inline void wgmma_wait_group_sync_aligned(int pending) { machine::products_wait(pending); }

template <int count>
inline void product(const Group<float, count>& d, uint64_t a, const uint32_t* held, uint64_t b, bool add, int scale_a, int scale_b,
                    int transposed_a, int transposed_b, machine::Format format) {
    if (scale_a != 1 || scale_b != 1) machine::fail("wgmma with an operand's sign changed");
    machine::product({d.at, held, a, b, 2 * count, transposed_a != 0, transposed_b != 0, add, format});
}

#define WGMMA(columns, type, format)                                                                                                    \
    inline void wgmma_mma_async_sync_aligned_m64n##columns##k16_f32_##type##_##type(                                                    \
        Group<float, columns / 2> d, uint64_t a, uint64_t b, bool add, int scale_a, int scale_b, int transposed_a, int transposed_b) {  \
        product(d, a, nullptr, b, add, scale_a, scale_b, transposed_a, transposed_b, format);                                           \
    }                                                                                                                                   \
    inline void wgmma_mma_async_sync_aligned_m64n##columns##k16_f32_##type##_##type(                                                    \
        Group<float, columns / 2> d, Values<const uint32_t, 4> a, uint64_t b, bool add, int scale_a, int scale_b, int transposed_b) {   \
        product(d, 0, a.value, b, add, scale_a, scale_b, 0, transposed_b, format);                                                      \
    }
#define WGMMA_TYPES(columns)                         \
    WGMMA(columns, f16, machine::Format::F16)        \
    WGMMA(columns, bf16, machine::Format::BF16)
WGMMA_TYPES(8)
WGMMA_TYPES(16)
WGMMA_TYPES(24)
WGMMA_TYPES(32)
WGMMA_TYPES(64)
WGMMA_TYPES(96)
WGMMA_TYPES(128)
WGMMA_TYPES(192)
WGMMA_TYPES(256)
#undef WGMMA_TYPES
#undef WGMMA

}  // namespace ptx
