// NVIDIA's matrix vocabulary: tiles of 16 x 16 x 16 by mma.sync m16n8k16. hip/device/mma.h is AMD's.
//
// A is row-major [row][k]. B is loaded from [column][k] (load_b) or from [k][column] (load_b_trans). Strides count
// elements; tiles lie in shared memory with rows aligned to 16 bytes. Accumulators are float32.

struct FragA {
    uint32 word[4];
};
struct FragB {
    uint32 word[4];
};

constexpr int MMA_ELEMS = 8;   // accumulators of a tile that one lane holds
constexpr int MMA_VECTOR = 2;  // of which so many lie side by side in a row
constexpr int FRAG_A_WORDS = 4;
// Queries pass through shared memory, where those that registers do not hold stay.
constexpr bool QUERIES_STAGED = true;
constexpr int SCORE_PAD = 8;  // floats between rows of scores and weights: no bank conflicts, 16-byte rows
// Registers of a lane that stage 1 may spend on holding queries.
#ifndef QUERY_WORDS
#define QUERY_WORDS (BLOCK_ROWS <= 16 ? 72 : BLOCK_ROWS <= 32 ? 48 : KV_DTYPE >= FP8_E4M3 ? 8 : 12)
#endif

struct Accum {
    float value[MMA_ELEMS];
};

DEVICE int lane_index() { return thread_index() % WAVE; }

/// Row and column of accumulator `i` in its tile.
DEVICE int accum_row(int i) { return lane_index() / 4 + ((i >> 1) & 1) * 8; }
DEVICE int accum_column(int i) { return lane_index() % 4 * 2 + (i & 1) + (i >> 2) * 8; }

/// Accumulators `i` and `j` of a lane lie in the same row exactly if they have the same slot.
constexpr int ROW_SLOTS = 2;
constexpr int row_slot_element[ROW_SLOTS] = {0, 2};
CONSTANT int row_slot(int i) { return (i >> 1) & 1; }

DEVICE void load_matrix(uint32 (&word)[4], const void SHARED* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "r"((uint32)__cvta_generic_to_shared(row)));
}

DEVICE void load_matrix_trans(uint32 (&word)[4], const void SHARED* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "r"((uint32)__cvta_generic_to_shared(row)));
}

DEVICE void load_a(FragA& a, const uint16 SHARED* tile, int stride) {
    int lane = lane_index();
    load_matrix(a.word, tile + lane % 16 * stride + lane / 16 * 8);
}

/// The A fragment of rows that lie apart; only used where queries are not staged.
DEVICE int frag_a_row() { return lane_index() / 4; }
DEVICE void load_a_row(FragA&, const uint16 GLOBAL*) {}

DEVICE void load_b(FragB& b, const uint16 SHARED* tile, int stride) {
    int lane = lane_index();
    load_matrix(b.word, tile + (lane / 16 * 8 + lane % 8) * stride + lane / 8 % 2 * 8);
}

DEVICE void load_b_trans(FragB& b, const uint16 SHARED* tile, int stride) {
    int lane = lane_index();
    load_matrix_trans(b.word, tile + lane % 16 * stride + lane / 16 * 8);
}

template <bool bf16>
DEVICE void mma_half(float* c, const uint32* a, uint32 b0, uint32 b1) {
    if constexpr (bf16) {
        asm(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
            "%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
            "%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

/// c += a b, for a 16 x 16 x 16 tile.
template <bool bf16>
DEVICE void mma(Accum& c, const FragA& a, const FragB& b) {
    mma_half<bf16>(c.value, a.word, b.word[0], b.word[1]);
    mma_half<bf16>(c.value + 4, a.word, b.word[2], b.word[3]);
}

/// Stores a tile to row-major floats in shared memory; `stride` is even.
DEVICE void store_accum(const Accum& c, float SHARED* tile, int stride) {
    struct alignas(8) Pair {
        float x, y;
    };
    UNROLL for (int i = 0; i < MMA_ELEMS; i += 2) {
        *(Pair SHARED*)(tile + accum_row(i) * stride + accum_column(i)) = {c.value[i], c.value[i + 1]};
    }
}
