// AMD's matrix vocabulary: tiles of 16 x 16 x 16 by MFMA (wave 64) or WMMA (wave 32). kernels/mma.h of the root package is
// NVIDIA's and documents it.

#if defined(__gfx90a__) || defined(__gfx942__) || defined(__gfx950__)
#define MATRIX_MFMA 1
#elif defined(__gfx1200__) || defined(__gfx1201__)
#define MATRIX_WMMA_8 1  // 8 elements a lane
#else
#define MATRIX_WMMA_16 1  // 16 elements a lane, the same in both halves of the wave
#endif

DEVICE int lane_index() { return thread_index() % WAVE; }

// Elements along k that a lane holds, and the first of them.
#if defined(MATRIX_MFMA)
constexpr int FRAG_ELEMS = 4;
constexpr int MMA_ELEMS = 4;
DEVICE int frag_k() { return lane_index() / 16 * 4; }
DEVICE int accum_row(int i) { return lane_index() / 16 * 4 + i; }
#elif defined(MATRIX_WMMA_8)
constexpr int FRAG_ELEMS = 8;
constexpr int MMA_ELEMS = 8;
DEVICE int frag_k() { return lane_index() / 16 * 8; }
DEVICE int accum_row(int i) { return lane_index() / 16 * 8 + i; }
#else
constexpr int FRAG_ELEMS = 16;
constexpr int MMA_ELEMS = 8;
DEVICE int frag_k() { return 0; }
DEVICE int accum_row(int i) { return lane_index() / 16 + i * 2; }
#endif

constexpr int MMA_VECTOR = 1;
constexpr int FRAG_A_WORDS = FRAG_ELEMS / 2;
constexpr int ROW_SLOTS = MMA_ELEMS;
constexpr int row_slot_element[8] = {0, 1, 2, 3, 4, 5, 6, 7};
CONSTANT int row_slot(int i) { return i; }
DEVICE int accum_column(int) { return lane_index() % 16; }

// Queries are read from device memory straight into registers, all of them: shared memory is short.
constexpr bool QUERIES_STAGED = false;
#if defined(MATRIX_MFMA)
constexpr int SCORE_PAD = 4;
#else
constexpr int SCORE_PAD = 0;
#endif
#ifndef QUERY_WORDS
#define QUERY_WORDS 1024
#endif

typedef short FragElems __attribute__((ext_vector_type(FRAG_ELEMS)));
struct Frag {
    FragElems elem;
};
using FragA = Frag;
using FragB = Frag;

struct Accum {
    float value[MMA_ELEMS];
};

/// FRAG_ELEMS neighbouring elements, aligned to 8 bytes.
DEVICE FragElems load_elems(const uint16* from) {
    typedef short Four __attribute__((ext_vector_type(4)));
    FragElems elem;
    UNROLL for (int i = 0; i < FRAG_ELEMS; i += 4) {
        Four part = *(const Four*)(from + i);
        UNROLL for (int j = 0; j < 4; j++) elem[i + j] = part[j];
    }
    return elem;
}

DEVICE void load_a(FragA& a, const uint16* tile, int stride) { a.elem = load_elems(tile + lane_index() % 16 * stride + frag_k()); }

/// The A fragment of rows that lie apart: `row` is this lane's, at the tile's first k, or null for a row of zeros.
DEVICE int frag_a_row() { return lane_index() % 16; }
DEVICE void load_a_row(FragA& a, const uint16 GLOBAL* row) {
    a.elem = row ? load_elems(row + frag_k()) : (FragElems)0;
}

DEVICE void load_b(FragB& b, const uint16* tile, int stride) { load_a(b, tile, stride); }

DEVICE void load_b_trans(FragB& b, const uint16* tile, int stride) {
    const uint16* from = tile + frag_k() * stride + lane_index() % 16;
    UNROLL for (int i = 0; i < FRAG_ELEMS; i++) b.elem[i] = (short)from[i * stride];
}

typedef float Floats __attribute__((ext_vector_type(MMA_ELEMS)));
typedef _Float16 Halves __attribute__((ext_vector_type(FRAG_ELEMS)));
typedef __bf16 BFloats __attribute__((ext_vector_type(FRAG_ELEMS)));

template <bool bf16>
DEVICE void mma(Accum& c, const FragA& a, const FragB& b) {
    Floats sum;
    UNROLL for (int i = 0; i < MMA_ELEMS; i++) sum[i] = c.value[i];
#if defined(MATRIX_MFMA)
    if constexpr (bf16) {
        sum = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(a.elem, b.elem, sum, 0, 0, 0);
    } else {
        sum = __builtin_amdgcn_mfma_f32_16x16x16f16(__builtin_bit_cast(Halves, a.elem), __builtin_bit_cast(Halves, b.elem), sum, 0, 0, 0);
    }
#elif defined(MATRIX_WMMA_8)
    if constexpr (bf16) {
        sum = __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32_gfx12(a.elem, b.elem, sum);
    } else {
        sum = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32_gfx12(__builtin_bit_cast(Halves, a.elem), __builtin_bit_cast(Halves, b.elem), sum);
    }
#else
    if constexpr (bf16) {
        sum = __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(a.elem, b.elem, sum);
    } else {
        sum = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(__builtin_bit_cast(Halves, a.elem), __builtin_bit_cast(Halves, b.elem), sum);
    }
#endif
    UNROLL for (int i = 0; i < MMA_ELEMS; i++) c.value[i] = sum[i];
}

#if defined(MATRIX_MFMA)
/// A fragment of the elements in two words.
DEVICE Frag frag_of(uint32 first, uint32 second) {
    typedef uint32 Words __attribute__((ext_vector_type(2)));
    return {__builtin_bit_cast(FragElems, (Words){first, second})};
}

typedef uint32 WideWords __attribute__((ext_vector_type(4)));
typedef _Float16 WideHalves __attribute__((ext_vector_type(8)));
typedef __bf16 WideBFloats __attribute__((ext_vector_type(8)));

/// c += a b, for a 16 x 16 x 32 tile: a lane holds eight neighbouring elements along k.
template <bool bf16>
DEVICE void mma_wide(Accum& c, const uint32 (&a)[4], const uint32 (&b)[4]) {
#if defined(__gfx950__)
    WideWords wide_a = {a[0], a[1], a[2], a[3]};
    WideWords wide_b = {b[0], b[1], b[2], b[3]};
    Floats sum;
    UNROLL for (int i = 0; i < MMA_ELEMS; i++) sum[i] = c.value[i];
    if constexpr (bf16) {
        sum = __builtin_amdgcn_mfma_f32_16x16x32_bf16(__builtin_bit_cast(WideBFloats, wide_a),
                                                      __builtin_bit_cast(WideBFloats, wide_b), sum, 0, 0, 0);
    } else {
        sum = __builtin_amdgcn_mfma_f32_16x16x32_f16(__builtin_bit_cast(WideHalves, wide_a),
                                                     __builtin_bit_cast(WideHalves, wide_b), sum, 0, 0, 0);
    }
    UNROLL for (int i = 0; i < MMA_ELEMS; i++) c.value[i] = sum[i];
#else
    mma<bf16>(c, frag_of(a[0], a[1]), frag_of(b[0], b[1]));
    mma<bf16>(c, frag_of(a[2], a[3]), frag_of(b[2], b[3]));
#endif
}

/// Sums of a 32 x 32 tile: of column `lane % 32` a lane has the `lane / 32`-th four of each eight rows.
struct LargeAccum {
    float value[16];
};
typedef float LargeFloats __attribute__((ext_vector_type(16)));

/// c += a b, for a 32 x 32 x 8 tile: a lane holds four neighbouring elements along k.
template <bool bf16>
DEVICE void mma_large(LargeAccum& c, const Frag& a, const Frag& b) {
    LargeFloats sum;
    UNROLL for (int i = 0; i < 16; i++) sum[i] = c.value[i];
    if constexpr (bf16) {
        sum = __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(a.elem, b.elem, sum, 0, 0, 0);
    } else {
        sum = __builtin_amdgcn_mfma_f32_32x32x8f16(__builtin_bit_cast(Halves, a.elem), __builtin_bit_cast(Halves, b.elem), sum, 0, 0, 0);
    }
    UNROLL for (int i = 0; i < 16; i++) c.value[i] = sum[i];
}

/// The deepest that a device multiplies at once.
#if defined(__gfx950__)
constexpr int LARGE_DEPTH = 16;
#else
constexpr int LARGE_DEPTH = 8;
#endif

/// The same for a 32 x 32 x 16 tile: a lane holds eight neighbouring elements along k.
template <bool bf16>
DEVICE void mma_large_wide(LargeAccum& c, const uint32 (&a)[4], const uint32 (&b)[4]) {
#if defined(__gfx950__)
    WideWords wide_a = {a[0], a[1], a[2], a[3]};
    WideWords wide_b = {b[0], b[1], b[2], b[3]};
    LargeFloats sum;
    UNROLL for (int i = 0; i < 16; i++) sum[i] = c.value[i];
    if constexpr (bf16) {
        sum = __builtin_amdgcn_mfma_f32_32x32x16_bf16(__builtin_bit_cast(WideBFloats, wide_a),
                                                      __builtin_bit_cast(WideBFloats, wide_b), sum, 0, 0, 0);
    } else {
        sum = __builtin_amdgcn_mfma_f32_32x32x16_f16(__builtin_bit_cast(WideHalves, wide_a),
                                                     __builtin_bit_cast(WideHalves, wide_b), sum, 0, 0, 0);
    }
    UNROLL for (int i = 0; i < 16; i++) c.value[i] = sum[i];
#else
    mma_large<bf16>(c, frag_of(a[0], a[1]), frag_of(b[0], b[1]));
    mma_large<bf16>(c, frag_of(a[2], a[3]), frag_of(b[2], b[3]));
#endif
}
#endif

DEVICE void store_accum(const Accum& c, float* tile, int stride) {
    UNROLL for (int i = 0; i < MMA_ELEMS; i++) tile[accum_row(i) * stride + accum_column(i)] = c.value[i];
}
