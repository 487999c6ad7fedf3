// Stage 1 of MLA decode for few tokens on Hopper: one piece of one sequence in a block, most often a single tile.
//
// What takes time is the way from the lengths to the first tile, and what comes after the last: a block cuts its piece out by
// itself, and both of its warpgroups work on every step of a tile. The products are transposed: tokens are their rows.
//
//   logits    each group: all tokens x all query rows over half of the depth; then each adds up half of the query rows
//   softmax   each group: its half of the query rows, down the columns of its products
//   output    each group: its half of the columns x all query rows
//
// While a tile is worked on the next one is on its way. Tokens are loaded in sixteens: a piece may be that short.
//
// Before this kernel may rely on what others have written it finds its piece by lengths and pages that may be out of date, and
// asks for its first tiles to come near. Afterwards it copies them and looks at lengths and pages once more: most often they are
// the same.

constexpr int TILE = 64;  // tokens; TILE_TOKENS is the unit in which sequences are cut
constexpr int SLOTS = STAGES;
constexpr int GROUPS = 2;
constexpr int GROUP_THREADS = 128;
constexpr int GROUP_WARPS = 4;
constexpr int ROWS = BLOCK_ROWS;
constexpr int GROUP_ROWS = ROWS / GROUPS;
constexpr int LATENT_UNITS = KV_LORA_RANK / 64;
constexpr int UNITS = LATENT_UNITS + ROPE_DIM / 64;
constexpr int GROUP_UNITS = LATENT_UNITS / GROUPS;
constexpr int SUMS = ROWS / 2;            // of a product, in a lane's registers
constexpr int LOGITS = SUMS / GROUPS;     // that a lane is left with
constexpr int LANE_ROWS = ROWS / 4;       // query rows of which a lane holds sums: see `lane_row`
constexpr int OWN_ROWS = GROUP_ROWS / 4;  // and logits
static_assert(THREADS == GROUPS * GROUP_THREADS && SLOTS == 2 && (ROWS == 16 || ROWS == 32), "two warpgroups, two tiles");
static_assert(TILE % TILE_TOKENS == 0 && TILE_TOKENS % 16 == 0 && bytes_of(KV_DTYPE) == 2, "units of whole sixteens, 16 bits");
static_assert(KV_LORA_RANK == 512 && ROPE_DIM % 64 == 0, "units of 64 columns");

// A row's maximum begins at 0 and is raised, to the highest logit so far, only when a logit exceeds it by LAZY_MAX (powers of two) or,
// in the first tile, lies more than LAZY_MIN below. Weights far from 1 cost nothing where they have the range of floats.
constexpr float LAZY_MAX = Q_IS_BF16 ? 32.0f : 8.0f;
constexpr float LAZY_MIN = Q_IS_BF16 ? 64.0f : 0.0f;

// Shared memory, in bytes from its beginning, as `shared_bytes` of src/kernel/select_few.rs counts it.
constexpr int UNIT_BYTES = TILE * 128;
constexpr int TILE_BYTES = UNITS * UNIT_BYTES;
constexpr int QUERY_UNIT_BYTES = ROWS * 128;
constexpr int QUERY_AT = SLOTS * TILE_BYTES;
constexpr int EXCHANGE_AT = QUERY_AT + UNITS * QUERY_UNIT_BYTES;
constexpr int WEIGHTS_AT = EXCHANGE_AT + THREADS * LOGITS * 4;
constexpr int SUMS_AT = WEIGHTS_AT + QUERY_UNIT_BYTES;
constexpr int FACTOR_AT = SUMS_AT + GROUP_WARPS * ROWS * 4;
constexpr int SHARED_BYTES = FACTOR_AT + ROWS * 4;
constexpr int RESULT_STRIDE = KV_LORA_RANK * 2 + 16;
static_assert(ROWS * RESULT_STRIDE <= WEIGHTS_AT - QUERY_AT, "results pass through the place of queries and logits");
#ifdef SPLIT_SHARED_BYTES
static_assert(SHARED_BYTES == SPLIT_SHARED_BYTES, "select_few.rs counts the same");
#endif

/// Copies tiles of a piece: every thread the same 16 bytes of each unit of the same rows each time.
struct Loader {
    static constexpr int LANES = 8;
    static constexpr int PASSES = TILE * LANES / THREADS;

    int token, end;                       // of the tile, of the piece
    const int GLOBAL* page_at[PASSES];    // where the pages of this thread's rows are told; null past the piece or the table
    int page[PASSES];                     // what was told, -1 if nothing
    int entry[PASSES];                    // within the page
    const uint16 GLOBAL* latent[PASSES];  // this thread's words of its rows
    const uint16 GLOBAL* rope[PASSES];
    bool valid[PASSES];

    static DEVICE int row(int pass) { return thread_index() / LANES + pass * (THREADS / LANES); }

    /// The pages as of now.
    DEVICE void look(int (&now)[PASSES]) const {
        UNROLL for (int i = 0; i < PASSES; i++) now[i] = page_at[i] ? load_now(page_at[i]) : -1;
    }

    /// Turns to the tile at a token of a piece, well before it is needed.
    DEVICE void turn(const DecodeParams& p, const OwnPiece& piece, int to) {
        token = to;
        end = piece.end;
        const int GLOBAL* table = global_pointer<const int>(p.block_table) + quotient(piece.seq, num_groups(p)) * p.table_stride;
        bool shifts = (p.page_size & (p.page_size - 1)) == 0;
        UNROLL for (int i = 0; i < PASSES; i++) {
            int at = token + row(i);
            int column = shifts ? at >> highest_bit(p.page_size) : quotient(at, p.page_size);
            entry[i] = at - column * p.page_size;
            page_at[i] = at < end && column < p.table_width ? table + column : nullptr;
        }
        look(page);
    }

    /// Finds the rows, once the pages have been told.
    DEVICE void locate(const DecodeParams& p) {
        int lane = thread_index() % LANES;
        UNROLL for (int i = 0; i < PASSES; i++) {
            valid[i] = page[i] >= 0 && page[i] < p.num_pages;
            int64 index = valid[i] ? page[i] : 0;
            latent[i] = global_pointer<const uint16>(p.kv) + index * p.kv_stride_page + entry[i] * p.kv_stride_token + lane * 8;
            rope[i] = global_pointer<const uint16>(p.k_rope) + index * p.rope_stride_page + entry[i] * p.rope_stride_token + lane * 8;
        }
    }

    /// Starts to copy the tile's tokens, whole sixteens of them, and closes the group of these copies. Those past the piece's end
    /// become zeros: what lies in unused cache slots, NaN included, is never read.
    DEVICE void copy(unsigned char SHARED* tile) const {
        int rows = (smaller(end - token, TILE) + 15) / 16 * 16;
        UNROLL for (int i = 0; i < PASSES; i++) {
            if (row(i) >= rows) continue;
            unsigned char SHARED* to = tile + row(i) * 128 + (thread_index() % LANES ^ row(i) % 8) * 16;
            UNROLL for (int unit = 0; unit < UNITS; unit++) {
                const uint16 GLOBAL* from = unit < LATENT_UNITS ? latent[i] + unit * 64 : rope[i];
                copy16_async(to + unit * UNIT_BYTES, from, valid[i]);
            }
        }
        copy_commit();
    }

    /// Asks for the tile's rows: the lanes of a row for a line each.
    DEVICE void fetch() const {
        int lane = thread_index() % LANES;
        UNROLL for (int i = 0; i < PASSES; i++) {
            if (!valid[i]) continue;
            fetch_near(latent[i] + lane * 56);
            if (ROPE_DIM > 0 && lane == 0) fetch_near(rope[i]);
        }
    }
};
static_assert(LATENT_UNITS == Loader::LANES, "a lane's line of a row");

/// This thread's words of the block's query rows; rows that do not exist become zeros.
struct Queries {
    static constexpr int UNIT_THREADS = ROWS * 8;
    static constexpr int SHARES = THREADS / UNIT_THREADS;  // of the units

    const uint16 GLOBAL* from;
    bool valid;

    DEVICE void find(const DecodeParams& p, const OwnPiece& piece, int first_row) {
        Row at = row_of(p, piece.seq, first_row + thread_index() / 8 % ROWS);
        valid = at.valid;
        from = global_pointer<const uint16>(p.q) + thread_index() % 8 * 8;
        if (valid) from += at.seq * p.q_stride_batch + at.token * p.q_stride_token + at.head * p.q_stride_head;
    }

    DEVICE void copy(unsigned char SHARED* queries) const {
        int row = thread_index() / 8 % ROWS;
        unsigned char SHARED* to = queries + row * 128 + (thread_index() % 8 ^ row % 8) * 16;
        int share = thread_index() / UNIT_THREADS;
        UNROLL for (int i = 0; i < divide_up(UNITS, SHARES); i++) {
            int unit = i * SHARES + share;
            if (unit < UNITS) copy16_async(to + unit * QUERY_UNIT_BYTES, from + unit * 64, valid);
        }
    }
};

/// Query row of a lane's `i`-th column of sums.
DEVICE int lane_row(int i) { return i / 2 * 8 + lane_index() % 4 * 2 + i % 2; }

/// The group's part of the tile's logits: every second pair of the depth's steps.
DEVICE void multiply_keys(float (&x)[SUMS], uint32 tile, uint32 queries) {
    products_begin();
    UNROLL for (int unit = 0; unit < UNITS; unit++) {
        UNROLL for (int step = 0; step < 2; step++) {
            product_keys<false>(x, rows_operand(tile, unit * UNIT_BYTES + step * 32),
                                rows_operand(queries, unit * QUERY_UNIT_BYTES + step * 32), unit + step > 0);
        }
    }
    products_commit();
}

using Sums = float[GROUP_UNITS][SUMS];

/// Adds `count` sixteens of the tile's tokens, weighed, to the group's columns of the output.
template <int count>
DEVICE void multiply_values(Sums& o, uint32 values, uint32 weights) {
    products_begin();
    UNROLL for (int unit = 0; unit < GROUP_UNITS; unit++) {
        UNROLL for (int step = 0; step < count; step++) {
            product_keys<true>(o[unit], columns_operand<UNIT_BYTES>(values, unit * UNIT_BYTES + step * 2048),
                               rows_operand(weights, step * 32), 1);
        }
    }
    products_commit();
}

/// Softmax of the group's query rows: lane `l` of warp `w` holds tokens 16 w + l / 4 and 8 further on.
struct Softmax {
    float maximum[OWN_ROWS], sum[OWN_ROWS];  // the sums are this lane's share
    int limit[OWN_ROWS];                     // tokens that each row sees of this piece

    DEVICE void start(const DecodeParams& p, const OwnPiece& piece, int first_row) {
        UNROLL for (int i = 0; i < OWN_ROWS; i++) {
            maximum[i] = sum[i] = 0.0f;
            Row of = row_of(p, piece.seq, first_row + lane_row(i));
            int unseen = p.causal ? last_token(p, piece.seq) - of.token : 0;  // of what the sequence's last row sees
            limit[i] = of.valid ? smaller(piece.tokens - unseen, piece.end) : 0;
        }
    }

    /// Turns products into logits, in powers of two. Whether a maximum is to be raised.
    DEVICE bool mask(const DecodeParams& p, float (&x)[LOGITS], int token, bool first) const {
        float scale = p.sm_scale * p.kv_scale * LOG2_E;
        UNROLL for (int i = 0; i < LOGITS; i++) x[i] *= scale;
        if (unlikely(p.softcap != 0.0f)) {
            // c tanh(y) = c (1 - 2 / (exp(2 y) + 1))
            UNROLL for (int i = 0; i < LOGITS; i++) {
                float power = exp2(x[i] * (2.0f / p.softcap));
                x[i] = p.softcap * LOG2_E * (1.0f - 2.0f / (power + 1.0f));
            }
        }
        token += warp_of_group() * 16 + lane_index() / 4;
        bool raises = false;
        UNROLL for (int i = 0; i < LOGITS; i++) {
            int row = i / 4 * 2 + i % 2;
            bool sees = token + i / 2 % 2 * 8 < limit[row];
            raises |= sees && (x[i] > maximum[row] + LAZY_MAX || (first && x[i] < -LAZY_MIN));
            if (!sees) x[i] = NEGATIVE_INFINITY;
        }
        return raises;
    }

    /// Stores the weights of this warp's sixteen tokens for the products.
    DEVICE void store_weights(const float (&x)[LOGITS], uint32 weights) const {
        uint32 word[LOGITS / 2];
        UNROLL for (int i = 0; i < LOGITS; i += 2) {
            word[i / 2] = pack(exp2(x[i] - maximum[i / 4 * 2]), exp2(x[i + 1] - maximum[i / 4 * 2 + 1]));
        }
        int lane = lane_index();
        int chunk = warp_of_group() * 2 + lane / 8 % 2;
        uint32 to = weights + lane % 8 * 128 + (chunk ^ lane % 8) * 16;
        if constexpr (LOGITS == 4) {
            store_matrix_trans(to, word[0], word[1]);
        } else {
            store_matrix_trans(to + lane / 16 * 1024, word[0], word[1], word[2], word[3]);
        }
        publish_to_async();
    }

    /// Raises the maxima that need it; `factors` tells what each row's earlier sums are to be multiplied by. All threads must ask.
    DEVICE void raise(const float (&x)[LOGITS], bool first, float SHARED* highest_of, float SHARED* factors) {
        float highest[OWN_ROWS];
        int own_warp = warp_of_group();
        UNROLL for (int i = 0; i < OWN_ROWS; i++) {
            highest[i] = ::maximum(x[i / 2 * 4 + i % 2], x[i / 2 * 4 + i % 2 + 2]);
            UNROLL for (int mask = 4; mask < 32; mask *= 2) highest[i] = ::maximum(highest[i], shuffle_xor(highest[i], mask));
            if (lane_index() < 4) highest_of[own_warp * ROWS + lane_row(i)] = highest[i];
        }
        barrier();
        UNROLL for (int i = 0; i < OWN_ROWS; i++) {
            UNROLL for (int warp = 0; warp < GROUP_WARPS; warp++) {
                highest[i] = ::maximum(highest[i], highest_of[warp * ROWS + lane_row(i)]);
            }
            float factor = 1.0f;
            if (first ? highest[i] != NEGATIVE_INFINITY : highest[i] > maximum[i] + LAZY_MAX) {
                if (!first) factor = exp2(maximum[i] - highest[i]);
                maximum[i] = highest[i];
                sum[i] *= factor;
            }
            if (lane_index() < 4 && own_warp == 0) factors[lane_row(i)] = factor;
        }
    }

    DEVICE void add(const float (&x)[LOGITS]) {
        UNROLL for (int i = 0; i < LOGITS; i++) sum[i / 4 * 2 + i % 2] += exp2(x[i] - maximum[i / 4 * 2 + i % 2]);
    }

    /// Tells this warp's sums, and the maxima. To be followed by a barrier.
    DEVICE void tell(float SHARED* sums, float SHARED* maxima) {
        int warp = warp_of_group();
        UNROLL for (int i = 0; i < OWN_ROWS; i++) {
            UNROLL for (int mask = 4; mask < 32; mask *= 2) sum[i] += shuffle_xor(sum[i], mask);
            if (lane_index() >= 4) continue;
            sums[warp * ROWS + lane_row(i)] = sum[i];
            if (warp == 0) maxima[lane_row(i)] = maximum[i];
        }
    }
};

/// Turns a row's maximum into what its result is to be multiplied by, and writes its LSE.
DEVICE void finish_row(const DecodeParams& p, const OwnPiece& piece, int row, const float SHARED* sums, float SHARED& factor) {
    float sum = 0.0f;
    UNROLL for (int warp = 0; warp < GROUP_WARPS; warp++) sum += sums[warp * ROWS];
    // Emptiness is a sum of zero: a NaN must show.
    float lse = sum == 0.0f ? NEGATIVE_INFINITY : (factor + log2(sum)) * LN_2;
    factor = result_scale(p, sum, piece.slot);
    if (piece.slot < 0) {
        Row of = row_of(p, piece.seq, row);
        if (of.valid) write_lse(p, of, lse);
    } else if (row < group_rows(p)) {
        global_pointer<float>(p.partial_lse)[(int64)piece.slot * group_rows(p) + row] = lse;
    }
}

/// Puts the group's columns of the result, of which each row is to be scaled, into rows.
DEVICE void transpose_result(const Sums& o, const float (&scale)[LANE_ROWS], uint32 result, int group) {
    int lane = lane_index();
    uint32 to = result + (lane / 16 * 8 + lane % 8) * RESULT_STRIDE + (group * GROUP_UNITS * 64 + warp_of_group() * 16 + lane / 8 % 2 * 8) * 2;
    UNROLL for (int unit = 0; unit < GROUP_UNITS; unit++) {
        UNROLL for (int i = 0; i < SUMS; i += 8) {
            uint32 word[4];
            UNROLL for (int j = 0; j < 8; j += 2) {
                float low = scale[(i + j) / 4 * 2], high = scale[(i + j) / 4 * 2 + 1];
                // A row that saw nothing is zero even beside values that are not finite.
                word[j / 2] = pack(low == 0.0f ? 0.0f : o[unit][i + j] * low, high == 0.0f ? 0.0f : o[unit][i + j + 1] * high);
            }
            store_matrix_trans(to + i * 2 * RESULT_STRIDE + unit * 128, word[0], word[1], word[2], word[3]);
        }
    }
}

/// Writes the result's rows, by all threads.
DEVICE void write_result(const DecodeParams& p, const OwnPiece& piece, int first_row, const unsigned char SHARED* result) {
    constexpr int WORDS = KV_LORA_RANK / 8;
    int rows = smaller(group_rows(p) - first_row, ROWS);
    // A block's rows of a slot lie one after the other.
    uint16 GLOBAL* partial = global_pointer<uint16>(p.partial_out) + ((int64)piece.slot * group_rows(p) + first_row) * KV_LORA_RANK;
    UNROLL for (int i = 0; i < ROWS * WORDS / THREADS; i++) {
        int word = i * THREADS + thread_index();
        int local = word / WORDS;
        if (local >= rows) break;
        Word4 from = *(const Word4 SHARED*)(result + local * RESULT_STRIDE + word % WORDS * 16);
        if (piece.slot >= 0) {
            *(Word4 GLOBAL*)(partial + word * 8) = from;
            continue;
        }
        Row row = row_of(p, piece.seq, first_row + local);
        if (!row.valid) continue;
        // Rows of the output begin at multiples of 8 bytes.
        Word2 GLOBAL* to = (Word2 GLOBAL*)(output_row(p, row) + word % WORDS * 8);
        to[0] = {from.x, from.y};
        to[1] = {from.z, from.w};
    }
}

KERNEL_ONE_BLOCK(THREADS) mla_decode_split(const DecodeParams p) {
    SHARED_MEMORY_1024(shared);
    float SHARED* exchange = (float SHARED*)(shared + EXCHANGE_AT);
    float SHARED* sums = (float SHARED*)(shared + SUMS_AT);
    float SHARED* factors = (float SHARED*)(shared + FACTOR_AT);
    uint32 base = shared_address(shared);
    int group = warpgroup_index();

    int row_blocks = divide_up(group_rows(p), ROWS);
    int item = quotient(block_index(), row_blocks);
    int first_row = (block_index() - item * row_blocks) * ROWS;
    OwnPiece piece;
    Loader loader[SLOTS];
    Queries queries;
    Softmax softmax;
    bool waited = false;
    const int GLOBAL* length_at = few_length(p);
    int length = length_at ? load_now(length_at) : 0;
    NO_UNROLL while (true) {
        piece = own_piece(p, few_tokens(p, length), item);
        UNROLL for (int i = 0; i < SLOTS; i++) loader[i].turn(p, piece, piece.begin + i * TILE);
        queries.find(p, piece, first_row);
        softmax.start(p, piece, first_row + group * GROUP_ROWS);
        UNROLL for (int i = 0; i < SLOTS; i++) loader[i].locate(p);
        if (!waited) {
            UNROLL for (int i = 0; i < SLOTS; i++) loader[i].fetch();
            grid_dependency_wait();
            grid_dependency_launch();
            waited = true;
        }
        int length_now = length_at ? load_now(length_at) : 0;
        int page_now[SLOTS][Loader::PASSES];
        UNROLL for (int i = 0; i < SLOTS; i++) loader[i].look(page_now[i]);
        if (piece.begin < piece.end) queries.copy(shared + QUERY_AT);
        UNROLL for (int i = 0; i < SLOTS; i++) loader[i].copy(shared + i * TILE_BYTES);
        bool changed = length_now != length;
        UNROLL for (int i = 0; i < SLOTS; i++) {
            UNROLL for (int j = 0; j < Loader::PASSES; j++) changed |= page_now[i][j] != loader[i].page[j];
        }
        copy_wait<SLOTS - 1>();
        publish_to_async();
        if (!barrier_any(changed)) break;
        length = length_now;
        copy_wait<0>();
    }
    if (piece.begin >= piece.end) return;
    Loader& ahead = loader[0];  // of the tile after the next

    // Chosen, not computed: the compiler then keeps operands in registers of the whole warp.
    int depth = group == 0 ? 0 : 64;
    int columns = group == 0 ? 0 : GROUP_UNITS * UNIT_BYTES;
    uint32 weights = base + WEIGHTS_AT;
    Sums o = {};
    int slot = 0;
    int token = piece.begin;
    NO_UNROLL while (true) {
        uint32 tile = base + slot * TILE_BYTES;
        float product[SUMS];
        multiply_keys(product, tile + depth, base + QUERY_AT + depth);
        bool more = token + SLOTS * TILE < piece.end;
        if (more) ahead.turn(p, piece, token + SLOTS * TILE);
        products_wait<0>();
        float x[LOGITS];
        Float4 SHARED* given = (Float4 SHARED*)exchange + thread_index() % GROUP_THREADS;
        UNROLL for (int i = 0; i < LOGITS; i += 4) {
            float give[4];
            UNROLL for (int j = 0; j < 4; j++) {
                x[i + j] = group == 0 ? product[i + j] : product[LOGITS + i + j];
                give[j] = group == 0 ? product[LOGITS + i + j] : product[i + j];
            }
            given[(i / 4 * GROUPS + (group ^ 1)) * GROUP_THREADS] = {give[0], give[1], give[2], give[3]};
        }
        barrier();
        UNROLL for (int i = 0; i < LOGITS; i += 4) {
            Float4 other = given[(i / 4 * GROUPS + group) * GROUP_THREADS];
            x[i] += other.x;
            x[i + 1] += other.y;
            x[i + 2] += other.z;
            x[i + 3] += other.w;
        }
        bool first = token == piece.begin;
        uint32 own_weights = weights + (group == 0 ? 0 : GROUP_ROWS * 128);
        bool raises = softmax.mask(p, x, token, first);
        softmax.store_weights(x, own_weights);
        if (barrier_any(raises)) {
            softmax.raise(x, first, sums + group * GROUP_ROWS, factors + group * GROUP_ROWS);
            softmax.store_weights(x, own_weights);
            barrier();
            UNROLL for (int i = 0; i < SUMS; i++) {
                float factor = factors[lane_row(i / 4 * 2 + i % 2)];
                UNROLL for (int unit = 0; unit < GROUP_UNITS; unit++) o[unit][i] *= factor;
            }
        }
        int sixteens = (smaller(piece.end - token, TILE) + 15) / 16;
        if (sixteens == TILE / 16) {
            multiply_values<TILE / 16>(o, tile + columns, weights);
        } else {
            NO_UNROLL for (int k = 0; k < sixteens; k++) {
                multiply_values<1>(o, tile + columns + k * 2048, weights + k * 32);
                products_wait<0>();
            }
        }
        softmax.add(x);
        token += TILE;
        if (token >= piece.end) break;
        products_wait<0>();
        barrier();  // no warp reads the tile any more
        if (more) {
            ahead.locate(p);
            ahead.copy(shared + slot * TILE_BYTES);
        } else {
            copy_commit();
        }
        copy_wait<1>();
        publish_to_async();
        barrier();
        slot ^= 1;
    }
    softmax.tell(sums + group * GROUP_ROWS, factors + group * GROUP_ROWS);
    barrier();
    int row = thread_index();
    if (row < ROWS) finish_row(p, piece, first_row + row, sums + row, factors[row]);
    barrier();
    float scale[LANE_ROWS];
    UNROLL for (int i = 0; i < LANE_ROWS; i++) scale[i] = factors[lane_row(i)];
    products_wait<0>();
    transpose_result(o, scale, base + QUERY_AT, group);
    barrier();
    write_result(p, piece, first_row, shared + QUERY_AT);
}
