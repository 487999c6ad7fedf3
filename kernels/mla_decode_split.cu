// Stage 1 of MLA decode: attention of BLOCK_ROWS query rows over the tiles of one part of the schedule.
//
// Tiles stream through a ring in shared memory. Step i computes the logits of tile i + 1 and the output of tile i between
// two barriers, so matrix work of both overlaps, then the softmax of tile i + 1 while loads run:
//
//   logits    wave (row tile, key tile, depth slice): 16 rows x KEYS keys over every DEPTH-th 16-wide step of the row,
//             queries in registers; the slices' sums meet in `scores`
//   softmax   THREADS / BLOCK_ROWS neighbouring lanes per row; a row's maximum is raised only when a logit exceeds it by
//             LAZY_MAX, so most tiles rescale nothing
//   output    every wave: all rows x its own columns, accumulators in registers, probabilities from shared memory
//
// A part may span several sequences: the ring runs on, and queries, maximum and accumulators start afresh.

constexpr int WAVES = THREADS / WAVE;
constexpr int ROW_TILES = BLOCK_ROWS / 16;
constexpr int KEY_TILES = TILE_TOKENS / 16;
constexpr int WAVES_PER_ROW_TILE = WAVES / ROW_TILES;
constexpr int KEY_SLICES = WAVES_PER_ROW_TILE / 2 < 1           ? 1
                           : WAVES_PER_ROW_TILE / 2 < KEY_TILES ? WAVES_PER_ROW_TILE / 2
                                                                : KEY_TILES;
constexpr int DEPTH = WAVES_PER_ROW_TILE / KEY_SLICES;
constexpr int KEYS = TILE_TOKENS / KEY_SLICES;
constexpr int WIDTH = KV_LORA_RANK + ROPE_DIM;
constexpr int STEPS = WIDTH / 16;
constexpr int WAVE_STEPS = divide_up(STEPS, DEPTH);
constexpr int COLUMNS = KV_LORA_RANK / WAVES;
constexpr int ROW_LANES = THREADS / BLOCK_ROWS;
constexpr int LANE_KEYS = TILE_TOKENS / ROW_LANES;
static_assert(WAVES % ROW_TILES == 0 && ROW_TILES * KEY_SLICES * DEPTH == WAVES, "waves divide the logits");
static_assert(KEYS % 16 == 0 && COLUMNS % 16 == 0 && WIDTH % 16 == 0, "tiles of 16");
static_assert(ROW_LANES <= WAVE && LANE_KEYS >= 1, "a row's softmax stays in a wave");

constexpr float LAZY_MAX = 8.0f;        // 2^8 times the running scale fits f16 and bf16
constexpr float NO_MAXIMUM = -1.0e30f;  // finite: exp2(-inf - NO_MAXIMUM) is 0, not NaN

// Shared memory, as `split_shared_bytes` of src/kernel/select.rs counts it. Rows are padded by 16 bytes against bank conflicts.
constexpr bool FP8 = bytes_of(KV_DTYPE) == 1;
constexpr int ROW_STRIDE = WIDTH + 8;
constexpr int SCORE_STRIDE = TILE_TOKENS + 8;
constexpr int TILE_ELEMS = TILE_TOKENS * ROW_STRIDE;
constexpr int TILES = FP8 ? 2 : STAGES;             // tiles of Q_DTYPE
constexpr int RAW_BYTES = TILE_TOKENS * WIDTH;      // a tile of a quantised cache as it is loaded
constexpr int RAW_TILES = FP8 ? STAGES : 0;
constexpr int QUERY_BYTES = BLOCK_ROWS * ROW_STRIDE * 2;
constexpr int TILES_BYTES = TILES * TILE_ELEMS * 2;
constexpr int SCORES_BYTES = DEPTH * BLOCK_ROWS * SCORE_STRIDE * 4;
constexpr int WEIGHTS_BYTES = BLOCK_ROWS * SCORE_STRIDE * 2;
constexpr int SHARED_BYTES =
    QUERY_BYTES + TILES_BYTES + RAW_TILES * RAW_BYTES + SCORES_BYTES + WEIGHTS_BYTES + 2 * BLOCK_ROWS * 4;
static_assert(STAGES >= (FP8 ? 2 : 3), "two tiles are in use while another loads");
#ifdef SPLIT_SHARED_BYTES
static_assert(SHARED_BYTES == SPLIT_SHARED_BYTES, "select.rs counts the same");
#endif

/// The block's share of the schedule: from `token` of `seq` up to `end_token` of `end_seq`.
struct Part {
    int seq, token, end_seq, end_token, split;
};

DEVICE Part find_part(const DecodeParams& p, int item) {
    if (p.schedule_kind == BALANCED) {
        const int GLOBAL* words = schedule_of(p).parts + (int64)item * PART_WORDS;
        Word4 ends = *(const Word4 GLOBAL*)words;
        return {(int)ends.x, (int)ends.y * TILE_TOKENS, (int)ends.z, (int)ends.w * TILE_TOKENS, words[4]};
    }
    int seq = item / p.num_kv_splits;
    int split = item % p.num_kv_splits;
    int tokens = extent(p, seq);
    int64 begin = (int64)split_length(p, tokens) * split;
    int64 end = begin + split_length(p, tokens);
    if (begin >= tokens) return {seq, 0, seq, 0, 0};
    return {seq, (int)begin, seq, end < tokens ? (int)end : tokens, split};
}

/// A position in the stream of tiles of a part: the tile at `token` of `seq`, whose piece ends at `end`.
struct Cursor {
    int seq, token, end, split;
    bool more;

    /// Moves to the first piece with tokens at or after the current `seq` and `token`.
    DEVICE void settle(const DecodeParams& p, const Part& part) {
        more = false;
        NO_UNROLL while (seq < part.end_seq || (seq == part.end_seq && token < part.end_token)) {
            end = extent(p, seq);
            if (seq == part.end_seq) end = smaller(end, part.end_token);
            more = token < end;
            if (more) break;
            seq++;
            token = 0;
            split = 0;
        }
    }

    /// Moves to the next tile.
    DEVICE void advance(const DecodeParams& p, const Part& part) {
        token += TILE_TOKENS;
        if (token < end) return;
        seq++;
        token = 0;
        split = 0;
        settle(p, part);
    }
};

/// Loads tiles of the cache: every thread copies the same 16-byte words of the same tile rows each time.
struct Loader {
    static constexpr int ELEM = bytes_of(KV_DTYPE);
    static constexpr int LATENT_WORDS = KV_LORA_RANK * ELEM / 16;
    static constexpr int ROPE_WORDS = ROPE_DIM * ELEM / 16;
    static constexpr int LANES = FP8 ? 4 : 8;
    static constexpr int ROWS = THREADS / LANES;
    static constexpr int PASSES = divide_up(TILE_TOKENS, ROWS);

    Cursor at;
    int page[PASSES];   // of this thread's rows of the tile at the cursor, or -1 for rows that are not to be read
    int entry[PASSES];  // within the page

    DEVICE void look_up(const DecodeParams& p) {
        int row = thread_index() / LANES;
        const int GLOBAL* table = global_pointer<const int>(p.block_table) + at.seq / num_groups(p) * p.table_stride;
        UNROLL for (int i = 0; i < PASSES; i++) {
            int token = at.token + row + i * ROWS;
            bool inside = at.more && token < at.end && row + i * ROWS < TILE_TOKENS;
            page[i] = inside ? table[token / p.page_size] : -1;
            entry[i] = token % p.page_size;
        }
    }

    /// Starts loading the tile at the cursor and moves on. Rows past the piece become zeros: what lies in unused cache slots,
    /// NaN included, is never read.
    template <typename Place>
    DEVICE void load(const DecodeParams& p, const Part& part, Place place) {
        int row = thread_index() / LANES;
        int lane = thread_index() % LANES;
        UNROLL for (int i = 0; i < PASSES; i++) {
            int tile_row = row + i * ROWS;
            if (ROWS * PASSES != TILE_TOKENS && tile_row >= TILE_TOKENS) break;
            bool valid = page[i] >= 0 && page[i] < p.num_pages;
            int64 index = valid ? page[i] : 0;
            const uint8 GLOBAL* latent =
                global_pointer<const uint8>(p.kv) + (index * p.kv_stride_page + entry[i] * p.kv_stride_token) * ELEM;
            UNROLL for (int word = 0; word < LATENT_WORDS; word += LANES) {
                copy16_async(place(tile_row, word + lane), latent + (word + lane) * 16, valid);
            }
            if constexpr (ROPE_WORDS > 0) {
                const uint8 GLOBAL* rope = global_pointer<const uint8>(p.k_rope) +
                                           (index * p.rope_stride_page + entry[i] * p.rope_stride_token) * ELEM;
                UNROLL for (int word = 0; word < ROPE_WORDS; word += LANES) {
                    if (ROPE_WORDS % LANES != 0 && word + lane >= ROPE_WORDS) break;
                    copy16_async(place(tile_row, LATENT_WORDS + word + lane), rope + (word + lane) * 16, valid);
                }
            }
        }
        if (at.more) {
            at.advance(p, part);
            look_up(p);
        }
    }

    /// Widens the words that this thread loaded itself.
    static DEVICE void widen(const uint8 SHARED* raw, uint16 SHARED* tile) {
        int row = thread_index() / LANES;
        int lane = thread_index() % LANES;
        UNROLL for (int i = 0; i < PASSES; i++) {
            int tile_row = row + i * ROWS;
            if (ROWS * PASSES != TILE_TOKENS && tile_row >= TILE_TOKENS) break;
            UNROLL for (int word = 0; word < WIDTH / 16; word += LANES) {
                if (WIDTH / 16 % LANES != 0 && word + lane >= WIDTH / 16) break;
                Word4 bytes = *(const Word4 SHARED*)(raw + tile_row * WIDTH + (word + lane) * 16);
                Word4 low, high;
                widen_fp8x4(bytes.x, low.x, low.y);
                widen_fp8x4(bytes.y, low.z, low.w);
                widen_fp8x4(bytes.z, high.x, high.y);
                widen_fp8x4(bytes.w, high.z, high.w);
                uint16 SHARED* to = tile + tile_row * ROW_STRIDE + (word + lane) * 16;
                *(Word4 SHARED*)to = low;
                *(Word4 SHARED*)(to + 8) = high;
            }
        }
    }
};

/// Loads the block's query rows of a virtual sequence; rows that do not exist become zeros.
DEVICE void load_queries(const DecodeParams& p, uint16 SHARED* queries, int virtual_seq, int first_row) {
    constexpr int LANES = 8;
    constexpr int WORDS = WIDTH / 8;
    NO_UNROLL for (int row = thread_index() / LANES; row < BLOCK_ROWS; row += THREADS / LANES) {
        Row at = row_of(p, virtual_seq, first_row + row);
        const uint16 GLOBAL* from = global_pointer<const uint16>(p.q);
        if (at.valid) from += at.seq * p.q_stride_batch + at.token * p.q_stride_token + at.head * p.q_stride_head;
        for (int word = thread_index() % LANES; word < WORDS; word += LANES) {
            copy16_async(queries + row * ROW_STRIDE + word * 8, from + word * 8, at.valid);
        }
    }
}

// Steps of a row whose queries stay in registers; the others are read from shared memory at every tile.
constexpr int HELD_STEPS = WAVE_STEPS * FRAG_A_WORDS <= QUERY_WORDS ? WAVE_STEPS : QUERY_WORDS / FRAG_A_WORDS;

struct Queries {
    FragA step[HELD_STEPS];
};

/// First query of this wave's row tile, and depth of its `j`-th step.
DEVICE int wave_row_tile() { return thread_index() / WAVE % ROW_TILES; }
DEVICE int wave_key_slice() { return thread_index() / WAVE / ROW_TILES % KEY_SLICES; }
DEVICE int wave_depth() { return thread_index() / WAVE / (ROW_TILES * KEY_SLICES); }

DEVICE void read_queries(Queries& held, const uint16 SHARED* queries) {
    queries += wave_row_tile() * 16 * ROW_STRIDE + wave_depth() * 16;
    UNROLL for (int j = 0; j < HELD_STEPS; j++) {
        if (STEPS % DEPTH != 0 && wave_depth() + j * DEPTH >= STEPS) break;
        load_a(held.step[j], queries + j * DEPTH * 16, ROW_STRIDE);
    }
}

/// Stores this wave's share of the logits of a tile.
DEVICE void logits(const Queries& held, const uint16 SHARED* queries, const uint16 SHARED* tile, float SHARED* scores) {
    queries += wave_row_tile() * 16 * ROW_STRIDE + wave_depth() * 16;
    tile += wave_key_slice() * KEYS * ROW_STRIDE + wave_depth() * 16;
    scores += (wave_depth() * BLOCK_ROWS + wave_row_tile() * 16) * SCORE_STRIDE + wave_key_slice() * KEYS;
    Accum sum[KEYS / 16] = {};
    UNROLL for (int j = 0; j < WAVE_STEPS; j++) {
        if (STEPS % DEPTH != 0 && wave_depth() + j * DEPTH >= STEPS) break;
        FragA a;
        if (j < HELD_STEPS) {
            a = held.step[j];
        } else {
            load_a(a, queries + j * DEPTH * 16, ROW_STRIDE);
        }
        UNROLL for (int n = 0; n < KEYS / 16; n++) {
            FragB b;
            load_b(b, tile + n * 16 * ROW_STRIDE + j * DEPTH * 16, ROW_STRIDE);
            mma<Q_IS_BF16>(sum[n], a, b);
        }
    }
    UNROLL for (int n = 0; n < KEYS / 16; n++) store_accum(sum[n], scores + n * 16, SCORE_STRIDE);
}

/// Softmax of one row by ROW_LANES neighbouring lanes.
struct Softmax {
    float maximum, sum;  // the sum is this lane's share
    int limit;           // tokens that the row sees of this piece

    DEVICE void start(const DecodeParams& p, const Cursor& at, int row) {
        maximum = NO_MAXIMUM;
        sum = 0.0f;
        Row of = row_of(p, at.seq, row);
        int visible = visible_tokens(p, sequence_length(p, of.seq), of.token);
        limit = of.valid ? smaller(visible, at.end) : 0;
    }

    /// Turns the logits of the tile at `token` into weights, and says what the row's earlier sums are to be multiplied by.
    DEVICE float push(const DecodeParams& p, const float SHARED* scores, uint16 SHARED* weights, int token) {
        int row = thread_index() / ROW_LANES;
        int key = thread_index() % ROW_LANES * LANE_KEYS;
        float x[LANE_KEYS] = {};
        UNROLL for (int d = 0; d < DEPTH; d++) {
            read_floats<LANE_KEYS>(x, scores + (d * BLOCK_ROWS + row) * SCORE_STRIDE + key);
        }
        float scale = p.sm_scale * p.kv_scale * LOG2_E;
        float highest = NEGATIVE_INFINITY;
        UNROLL for (int j = 0; j < LANE_KEYS; j++) {
            if (p.softcap != 0.0f) {
                // c tanh(y) = c (1 - 2 / (exp(2 y) + 1))
                float power = exp2(x[j] * scale * 2.0f / p.softcap);
                x[j] = p.softcap * LOG2_E * (1.0f - 2.0f / (power + 1.0f));
            } else {
                x[j] *= scale;
            }
            if (token + key + j >= limit) x[j] = NEGATIVE_INFINITY;
            highest = ::maximum(highest, x[j]);
        }
        highest = lanes_maximum<ROW_LANES>(highest);
        float factor = 1.0f;
        if (highest > maximum + LAZY_MAX || maximum == NO_MAXIMUM) {
            float raised = ::maximum(highest, NO_MAXIMUM);
            factor = exp2(maximum - raised);
            maximum = raised;
            sum *= factor;
        }
        UNROLL for (int j = 0; j < LANE_KEYS; j++) {
            x[j] = exp2(x[j] - maximum);
            sum += x[j];
        }
        write_weights<LANE_KEYS>(weights + row * SCORE_STRIDE + key, x);
        return factor;
    }

    /// The row's natural-log LSE; `sum` becomes the whole row's. Emptiness is a sum of zero: a NaN must show.
    DEVICE float finish() {
        sum = lanes_sum<ROW_LANES>(sum);
        return sum == 0.0f ? NEGATIVE_INFINITY : (maximum + log2(sum)) * LN_2;
    }
};

/// Accumulated outputs of all rows, this wave's columns.
struct Output {
    Accum tile[ROW_TILES][COLUMNS / 16];

    DEVICE void push(const uint16 SHARED* weights, const uint16 SHARED* values, const float SHARED* rescale) {
        UNROLL for (int m = 0; m < ROW_TILES; m++) {
            float factor[ROW_SLOTS];
            bool any = false;
            UNROLL for (int s = 0; s < ROW_SLOTS; s++) {
                factor[s] = rescale[m * 16 + accum_row(row_slot_element[s])];
                any |= factor[s] != 1.0f;
            }
            if (!wave_any(any)) continue;
            UNROLL for (int n = 0; n < COLUMNS / 16; n++) {
                UNROLL for (int i = 0; i < MMA_ELEMS; i++) tile[m][n].value[i] *= factor[row_slot(i)];
            }
        }
        values += thread_index() / WAVE * COLUMNS;
        UNROLL for (int k = 0; k < KEY_TILES; k++) {
            FragA a[ROW_TILES];
            UNROLL for (int m = 0; m < ROW_TILES; m++) {
                load_a(a[m], weights + m * 16 * SCORE_STRIDE + k * 16, SCORE_STRIDE);
            }
            UNROLL for (int n = 0; n < COLUMNS / 16; n++) {
                FragB b;
                load_b_trans(b, values + k * 16 * ROW_STRIDE + n * 16, ROW_STRIDE);
                UNROLL for (int m = 0; m < ROW_TILES; m++) mma<Q_IS_BF16>(tile[m][n], a[m], b);
            }
        }
    }

    /// Writes the piece's result, to `slot` or, if that is negative, to the output, and starts afresh.
    DEVICE void finish(const DecodeParams& p, int virtual_seq, int first_row, int64 slot, const float SHARED* scale) {
        UNROLL for (int m = 0; m < ROW_TILES; m++) {
            UNROLL for (int s = 0; s < ROW_SLOTS; s++) {
                int local = m * 16 + accum_row(row_slot_element[s]);
                Row row = row_of(p, virtual_seq, first_row + local);
                float factor = scale[local];
                uint16 GLOBAL* out = output_row(p, row);
                float GLOBAL* partial = global_pointer<float>(p.partial_out) +
                                        (slot * group_rows(p) + first_row + local) * KV_LORA_RANK;
                UNROLL for (int n = 0; n < COLUMNS / 16; n++) {
                    UNROLL for (int i = 0; i < MMA_ELEMS; i += MMA_VECTOR) {
                        if (row_slot(i) != s) continue;
                        int column = thread_index() / WAVE * COLUMNS + n * 16 + accum_column(i);
                        float value[MMA_VECTOR];
                        // A row that saw nothing is zero even beside values that are not finite.
                        UNROLL for (int j = 0; j < MMA_VECTOR; j++) {
                            value[j] = factor == 0.0f ? 0.0f : tile[m][n].value[i + j] * factor;
                        }
                        if (!row.valid) continue;
                        if (slot < 0) {
                            store_narrow<MMA_VECTOR>(out + column, value);
                        } else {
                            store_floats<MMA_VECTOR>(partial + column, value);
                        }
                    }
                }
            }
        }
        *this = {};
    }
};

KERNEL(THREADS) mla_decode_split(const DecodeParams p) {
    SHARED_MEMORY(shared);
    uint16 SHARED* queries = (uint16 SHARED*)shared;
    uint16 SHARED* tiles = (uint16 SHARED*)(shared + QUERY_BYTES);
    uint8 SHARED* raw = shared + QUERY_BYTES + TILES_BYTES;
    float SHARED* scores = (float SHARED*)(raw + RAW_TILES * RAW_BYTES);
    uint16 SHARED* weights = (uint16 SHARED*)((uint8 SHARED*)scores + SCORES_BYTES);
    float SHARED* rescale = (float SHARED*)((uint8 SHARED*)weights + WEIGHTS_BYTES);  // of each row's earlier sums
    float SHARED* scale = rescale + BLOCK_ROWS;                                       // of each row's result

    grid_dependency_wait();
    grid_dependency_launch();

    int row_blocks = divide_up(group_rows(p), BLOCK_ROWS);
    int first_row = block_index() % row_blocks * BLOCK_ROWS;
    Part part = find_part(p, block_index() / row_blocks);
    Cursor at = {part.seq, part.token, 0, part.split, false};
    at.settle(p, part);
    if (!at.more) return;

    // The tile that is loaded into; a quantised one waits in `raw` until it is widened into one of two.
    int load_stage = 0;
    Loader loader;
    loader.at = at;
    loader.look_up(p);
    auto load_tile = [&] {
        if constexpr (FP8) {
            uint8 SHARED* to = raw + load_stage * RAW_BYTES;
            loader.load(p, part, [&](int row, int word) { return to + row * WIDTH + word * 16; });
        } else {
            uint16 SHARED* to = tiles + load_stage * TILE_ELEMS;
            loader.load(p, part, [&](int row, int word) { return to + row * ROW_STRIDE + word * 8; });
        }
        copy_commit();
        load_stage = load_stage + 1 == STAGES ? 0 : load_stage + 1;
    };
    int tile = 0;  // the one at `at`
    auto next_tile = [&] { return tile + 1 == TILES ? 0 : tile + 1; };
    auto widen_tile = [&](int to) {
        // The oldest tile in `raw` lies where the next one is loaded.
        if constexpr (FP8) Loader::widen(raw + load_stage * RAW_BYTES, tiles + to * TILE_ELEMS);
    };

    constexpr int AHEAD = FP8 ? STAGES : STAGES - 1;  // tiles under way when one is waited for
    load_queries(p, queries, at.seq, first_row);
    for (int i = 0; i < AHEAD; i++) load_tile();
    copy_wait<AHEAD - 1>();
    if constexpr (FP8) {
        widen_tile(0);
        load_tile();
    }
    barrier();

    Queries held;
    read_queries(held, queries);
    logits(held, queries, tiles, scores);
    barrier();

    int row = thread_index() / ROW_LANES;
    Softmax softmax;
    softmax.start(p, at, first_row + row);
    Slots slots = slots_of(p, at.seq, at.end);
    Output output = {};
    NO_UNROLL while (true) {
        Cursor next = at;
        next.advance(p, part);
        bool last = !next.more || next.seq != at.seq;
        bool turn = next.more && last;  // the next tile is another sequence's

        if (turn) load_queries(p, queries, next.seq, first_row);
        if constexpr (!FP8) load_tile();
        float factor = softmax.push(p, scores, weights, at.token);
        if (thread_index() % ROW_LANES == 0) rescale[row] = factor;
        int64 slot = slots.count == 0 ? -1 : slots.begin + at.split;
        if (last) {
            float lse = softmax.finish();
            if (thread_index() % ROW_LANES == 0) {
                scale[row] = softmax.sum == 0.0f ? 0.0f : p.kv_scale / softmax.sum;
                Row of = row_of(p, at.seq, first_row + row);
                if (of.valid && slot < 0) write_lse(p, of, lse);
                if (of.valid && slot >= 0) {
                    global_pointer<float>(p.partial_lse)[slot * group_rows(p) + first_row + row] = lse;
                }
            }
        }
        if (turn) {
            copy_commit();
            copy_wait<0>();
        } else {
            copy_wait<AHEAD - 1>();
        }
        if constexpr (FP8) {
            widen_tile(next_tile());
            load_tile();
        }
        barrier();

        if (next.more) {
            if (turn) {
                read_queries(held, queries);
                softmax.start(p, next, first_row + row);
            }
            logits(held, queries, tiles + next_tile() * TILE_ELEMS, scores);
        }
        output.push(weights, tiles + tile * TILE_ELEMS, rescale);
        if (last) output.finish(p, at.seq, first_row, slot, scale);
        if (!next.more) break;
        if (turn) slots = slots_of(p, next.seq, next.end);
        at = next;
        tile = next_tile();
        barrier();
    }
}
