// Stage 1 of MLA decode for few tokens: one piece of one sequence in a block, most often a single tile.
//
// What takes time is the way from the lengths to the first tile, and what comes after the last: a block cuts its piece out by
// itself, and its work on a tile is divided so that no wave waits for long.
//
//   logits    wave (key slice, depth): all rows x KEYS keys over every DEPTH-th 16-wide step of the row; the sums of the depths
//             meet in `scores`
//   softmax   ROW_LANES neighbouring lanes per row; a row's maximum is raised only when a logit exceeds it by LAZY_MAX
//   output    every wave: all rows x its own columns, accumulators in registers
//
// While a tile is worked on the next one is on its way. Keys are loaded in sixteens: a piece may be that short.
//
// Before this kernel may rely on what others have written it finds its piece by lengths and pages that may be out of date, and
// asks for its first tile to come near. Afterwards they only need to be looked at once more: most often they are the same.

constexpr int TILE = 64;  // tokens; TILE_TOKENS is the unit in which sequences are cut
constexpr int SLOTS = 2;
constexpr int WAVES = THREADS / WAVE;
constexpr int ROW_TILES = BLOCK_ROWS / 16;
constexpr int DEPTH = 128 / BLOCK_ROWS;
constexpr int KEY_SLICES = WAVES / DEPTH;
constexpr int KEYS = TILE / KEY_SLICES;
constexpr int WIDTH = KV_LORA_RANK + ROPE_DIM;
constexpr int STEPS = WIDTH / 16;
constexpr int WAVE_STEPS = divide_up(STEPS, DEPTH);
constexpr int COLUMNS = KV_LORA_RANK / WAVES;
constexpr int ROW_LANES = THREADS / BLOCK_ROWS;
constexpr int LANE_KEYS = TILE / ROW_LANES;
static_assert(DEPTH * KEY_SLICES == WAVES && KEYS % 16 == 0 && COLUMNS % 16 == 0 && WIDTH % 16 == 0, "tiles of 16");
static_assert(ROW_LANES <= WAVE && LANE_KEYS >= 1, "a row's softmax stays in a wave");
static_assert(TILE % TILE_TOKENS == 0 && TILE_TOKENS % 16 == 0 && bytes_of(KV_DTYPE) == 2, "units of whole sixteens, 16 bits");

constexpr float LAZY_MAX = 8.0f;        // 2^8 times the running scale fits f16 and bf16
constexpr float NO_MAXIMUM = -1.0e30f;  // finite: exp2(-inf - NO_MAXIMUM) is 0, not NaN

// Shared memory, as `few_shared_bytes` of src/kernel/select_few.rs counts it. Rows are padded by 16 bytes against bank conflicts.
constexpr int ROW_STRIDE = WIDTH + 8;
constexpr int SCORE_STRIDE = TILE + SCORE_PAD;
constexpr int OUT_STRIDE = KV_LORA_RANK + 8;
constexpr int TILE_ELEMS = TILE * ROW_STRIDE;
constexpr int TILES_BYTES = SLOTS * TILE_ELEMS * 2;
constexpr int QUERY_BYTES = BLOCK_ROWS * ROW_STRIDE * 2;
constexpr int SCORES_BYTES = DEPTH * BLOCK_ROWS * SCORE_STRIDE * 4;
constexpr int WEIGHTS_BYTES = BLOCK_ROWS * SCORE_STRIDE * 2;
constexpr int SHARED_BYTES = TILES_BYTES + QUERY_BYTES + SCORES_BYTES + WEIGHTS_BYTES + 2 * BLOCK_ROWS * 4;
static_assert(BLOCK_ROWS * OUT_STRIDE * 2 <= SCORES_BYTES, "results pass through the scores' place");
#ifdef SPLIT_SHARED_BYTES
static_assert(SHARED_BYTES == SPLIT_SHARED_BYTES, "select_few.rs counts the same");
#endif

/// Loads tiles of a piece: every thread copies the same 16-byte words of the same tile rows each time.
struct Loader {
    static constexpr int LANES = 8;
    static constexpr int ROWS = THREADS / LANES;
    static constexpr int PASSES = divide_up(TILE, ROWS);
    static constexpr int LATENT_WORDS = KV_LORA_RANK / 8;
    static constexpr int ROPE_WORDS = ROPE_DIM / 8;
    static_assert(LATENT_WORDS % LANES == 0 && ROPE_WORDS % LANES == 0 && TILE % ROWS == 0, "lanes divide a row");

    int token, end;                      // of the tile, of the piece
    const int GLOBAL* page_at[PASSES];   // where the pages of this thread's rows are told; null past the piece or the table
    int page[PASSES];                    // what was told, -1 if nothing
    int entry[PASSES];                   // within the page
    const uint16 GLOBAL* latent[PASSES];  // this thread's words of its rows
    const uint16 GLOBAL* rope[PASSES];
    bool valid[PASSES];

    DEVICE int page_now(int i) const { return page_at[i] ? load_now(page_at[i]) : -1; }

    /// Whether the pages are others by now.
    DEVICE bool moved() const {
        int now[PASSES];
        UNROLL for (int i = 0; i < PASSES; i++) now[i] = page_now(i);
        bool moved = false;
        UNROLL for (int i = 0; i < PASSES; i++) moved |= now[i] != page[i];
        return moved;
    }

    /// Turns to the tile at a token of a piece, well before it is needed.
    DEVICE void turn(const DecodeParams& p, const OwnPiece& piece, int to) {
        token = to;
        end = piece.end;
        const int GLOBAL* table = global_pointer<const int>(p.block_table) + seq_of(p, piece.seq) * p.table_stride;
        UNROLL for (int i = 0; i < PASSES; i++) {
            int at = token + thread_index() / LANES + i * ROWS;
            int column = column_of(p, at);
            entry[i] = at - column * p.page_size;
            page_at[i] = at < end && column < p.table_width ? table + column : nullptr;
            page[i] = page_now(i);
        }
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

    /// Starts to copy the tile's tokens, whole sixteens of them. Those past the piece's end become zeros: what lies in unused cache
    /// slots, NaN included, is never read.
    DEVICE void copy(uint16 SHARED* tile) const {
        int rows = (smaller(end - token, TILE) + 15) / 16 * 16;
        UNROLL for (int i = 0; i < PASSES; i++) {
            int row = thread_index() / LANES + i * ROWS;
            if (row >= rows) continue;
            uint16 SHARED* to = tile + row * ROW_STRIDE + thread_index() % LANES * 8;
            UNROLL for (int word = 0; word < LATENT_WORDS * 8; word += LANES * 8) copy16_async(to + word, latent[i] + word, valid[i]);
            UNROLL for (int word = 0; word < ROPE_WORDS * 8; word += LANES * 8) {
                copy16_async(to + KV_LORA_RANK + word, rope[i] + word, valid[i]);
            }
        }
    }

    /// Asks for the tile's rows: the lanes of a row for a line each.
    DEVICE void fetch() const {
        int lane = thread_index() % LANES;
        UNROLL for (int i = 0; i < PASSES; i++) {
            if (!valid[i]) continue;
            if (lane < KV_LORA_RANK / 64) fetch_near(latent[i] + lane * 56);
            if (ROPE_DIM > 0 && lane == 0) fetch_near(rope[i]);
        }
    }
};

/// Loads the block's query rows; those that do not exist become zeros.
DEVICE void load_queries(const DecodeParams& p, uint16 SHARED* queries, int virtual_seq, int first_row) {
    constexpr int WORDS = WIDTH / 8;
    constexpr int LANES = THREADS / 16;
    NO_UNROLL for (int row = thread_index() / LANES; row < BLOCK_ROWS; row += 16) {
        Row at = row_of(p, virtual_seq, first_row + row);
        const uint16 GLOBAL* from = global_pointer<const uint16>(p.q);
        if (at.valid) from += at.seq * p.q_stride_batch + at.token * p.q_stride_token + at.head * p.q_stride_head;
        UNROLL for (int i = 0; i < divide_up(WORDS, LANES); i++) {
            int word = thread_index() % LANES + i * LANES;
            if (WORDS % LANES != 0 && word >= WORDS) break;
            copy16_async(queries + row * ROW_STRIDE + word * 8, from + word * 8, at.valid);
        }
    }
}

DEVICE int wave_depth() { return wave_index() % DEPTH; }
DEVICE int wave_key_slice() { return wave_index() / DEPTH; }

/// Stores this wave's share of the logits of the tile's first `sixteens` sixteens of keys, two at a time.
DEVICE void push_logits(const uint16 SHARED* queries, const uint16 SHARED* tile, float SHARED* scores, int sixteens) {
    int first_key = wave_key_slice() * KEYS;
    int end_key = smaller(sixteens * 16, first_key + KEYS);
    for (int key = first_key; wave_agrees(key < end_key); key += 32) {
        Accum sum[ROW_TILES][2] = {};
        UNROLL for (int j = 0; j < WAVE_STEPS; j++) {
            int column = (wave_depth() + j * DEPTH) * 16;
            if (STEPS % DEPTH != 0 && wave_agrees(column >= WIDTH)) continue;
            FragB keys[2];
            UNROLL for (int n = 0; n < 2; n++) load_b(keys[n], tile + (key + n * 16) * ROW_STRIDE + column, ROW_STRIDE);
            UNROLL for (int m = 0; m < ROW_TILES; m++) {
                FragA a;
                load_a(a, queries + m * 16 * ROW_STRIDE + column, ROW_STRIDE);
                UNROLL for (int n = 0; n < 2; n++) mma<Q_IS_BF16>(sum[m][n], a, keys[n]);
            }
        }
        float SHARED* to = scores + wave_depth() * BLOCK_ROWS * SCORE_STRIDE + key;
        UNROLL for (int m = 0; m < ROW_TILES; m++) {
            UNROLL for (int n = 0; n < 2; n++) store_accum(sum[m][n], to + m * 16 * SCORE_STRIDE + n * 16, SCORE_STRIDE);
        }
    }
}

/// Softmax of one row by ROW_LANES neighbouring lanes.
struct Softmax {
    float maximum, sum;  // the sum is this lane's share
    int limit;           // tokens that the row sees of this piece

    DEVICE void start(const DecodeParams& p, const OwnPiece& piece, int row) {
        maximum = NO_MAXIMUM;
        sum = 0.0f;
        Row of = row_of(p, piece.seq, row);
        int unseen = p.causal ? last_token(p, piece.seq) - of.token : 0;  // of what the sequence's last row sees
        limit = of.valid ? smaller(piece.tokens - unseen, piece.end) : 0;
    }

    /// Turns the logits of the tile at `token` into weights, and says what the row's earlier sums are to be multiplied by.
    DEVICE float push(const DecodeParams& p, const float SHARED* scores, uint16 SHARED* weights, int token) {
        int row = thread_index() / ROW_LANES;
        int key = thread_index() % ROW_LANES * LANE_KEYS;
        float x[LANE_KEYS] = {};
        if (token + key < limit) {
            UNROLL for (int d = 0; d < DEPTH; d++) {
                read_floats<LANE_KEYS>(x, scores + (d * BLOCK_ROWS + row) * SCORE_STRIDE + key);
            }
        }
        float scale = p.sm_scale * p.kv_scale * LOG2_E;
        float highest = NEGATIVE_INFINITY;
        UNROLL for (int j = 0; j < LANE_KEYS; j++) x[j] *= scale;
        if (unlikely(p.softcap != 0.0f)) {
            float twice = 2.0f * reciprocal(p.softcap);
            UNROLL for (int j = 0; j < LANE_KEYS; j++) x[j] = capped(p.softcap, x[j] * twice);
        }
        UNROLL for (int j = 0; j < LANE_KEYS; j++) {
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

    /// What the row's output is to be multiplied by.
    DEVICE float result(const DecodeParams& p, const OwnPiece& piece) {
        sum = lanes_sum<ROW_LANES>(sum);
        return result_scale(p, sum, piece.slot);
    }

    /// Writes the row's LSE, once `sum` is the whole row's.
    DEVICE void finish(const DecodeParams& p, const OwnPiece& piece, int row) const {
        if (thread_index() % ROW_LANES != 0) return;
        float lse = sum == 0.0f ? NEGATIVE_INFINITY : (maximum + log2(sum)) * LN_2;
        if (piece.slot < 0) {
            Row of = row_of(p, piece.seq, row);
            if (of.valid) write_lse(p, of, lse);
        } else if (row < group_rows(p)) {
            global_pointer<float>(p.partial_lse)[(int64)piece.slot * group_rows(p) + row] = lse;
        }
    }
};

/// Accumulated outputs of all rows, this wave's columns.
struct Output {
    Accum tile[ROW_TILES][COLUMNS / 16];

    DEVICE void rescale(const float SHARED* factors) {
        UNROLL for (int m = 0; m < ROW_TILES; m++) {
            UNROLL for (int i = 0; i < MMA_ELEMS; i++) {
                float factor = factors[m * 16 + accum_row(i)];
                UNROLL for (int n = 0; n < COLUMNS / 16; n++) tile[m][n].value[i] *= factor;
            }
        }
    }

    /// Adds `count` sixteens of the tile's tokens from `token` on.
    template <int count>
    DEVICE void add(const uint16 SHARED* weights, const uint16 SHARED* values, int token) {
        UNROLL for (int k = 0; k < count; k++, token += 16) {
            FragA a[ROW_TILES];
            UNROLL for (int m = 0; m < ROW_TILES; m++) load_a(a[m], weights + m * 16 * SCORE_STRIDE + token, SCORE_STRIDE);
            UNROLL for (int n = 0; n < COLUMNS / 16; n++) {
                FragB b;
                load_b_trans(b, values + token * ROW_STRIDE + wave_index() * COLUMNS + n * 16, ROW_STRIDE);
                UNROLL for (int m = 0; m < ROW_TILES; m++) mma<Q_IS_BF16>(tile[m][n], a[m], b);
            }
        }
    }

    /// Writes the piece's result by way of `staging`.
    DEVICE void finish(const DecodeParams& p, const OwnPiece& piece, int first_row, const float SHARED* scale, uint16 SHARED* staging) {
        UNROLL for (int m = 0; m < ROW_TILES; m++) {
            UNROLL for (int i = 0; i < MMA_ELEMS; i += MMA_VECTOR) {
                int row = m * 16 + accum_row(i);
                float factor = scale[row];
                UNROLL for (int n = 0; n < COLUMNS / 16; n++) {
                    float value[MMA_VECTOR];
                    // A row that saw nothing is zero even beside values that are not finite.
                    UNROLL for (int j = 0; j < MMA_VECTOR; j++) {
                        value[j] = factor == 0.0f ? 0.0f : tile[m][n].value[i + j] * factor;
                    }
                    write_weights<MMA_VECTOR>(staging + row * OUT_STRIDE + wave_index() * COLUMNS + n * 16 + accum_column(i), value);
                }
            }
        }
        barrier();
        constexpr int WORDS = KV_LORA_RANK / 8;
        int rows = smaller(group_rows(p) - first_row, BLOCK_ROWS);
        // A block's rows of a slot lie one after the other.
        uint16 GLOBAL* partial =
            global_pointer<uint16>(p.partial_out) + ((int64)piece.slot * group_rows(p) + first_row) * KV_LORA_RANK;
        UNROLL for (int i = 0; i < BLOCK_ROWS * WORDS / THREADS; i++) {
            int word = i * THREADS + thread_index();
            int local = word / WORDS;
            int column = word % WORDS * 8;
            if (local >= rows) break;
            Word4 from = *(const Word4 SHARED*)(staging + local * OUT_STRIDE + column);
            if (piece.slot >= 0) {
                *(Word4 GLOBAL*)(partial + word * 8) = from;
                continue;
            }
            Row row = row_of(p, piece.seq, first_row + local);
            if (!row.valid) continue;
            // Rows of the output begin at multiples of 8 bytes.
            Word2 GLOBAL* to = (Word2 GLOBAL*)(output_row(p, row) + column);
            to[0] = {from.x, from.y};
            to[1] = {from.z, from.w};
        }
    }
};

KERNEL(THREADS) mla_decode_split(const DecodeParams p) {
    SHARED_MEMORY(shared);
    uint16 SHARED* tiles = (uint16 SHARED*)shared;
    uint16 SHARED* queries = (uint16 SHARED*)(shared + TILES_BYTES);
    float SHARED* scores = (float SHARED*)(shared + TILES_BYTES + QUERY_BYTES);
    uint16 SHARED* weights = (uint16 SHARED*)((uint8 SHARED*)scores + SCORES_BYTES);
    float SHARED* rescale = (float SHARED*)((uint8 SHARED*)weights + WEIGHTS_BYTES);  // of each row's earlier sums
    float SHARED* scale = rescale + BLOCK_ROWS;                                     // of each row's result

    int row_blocks = divide_up(group_rows(p), BLOCK_ROWS);
    int item = quotient(block_index(), row_blocks);
    int first_row = (block_index() - item * row_blocks) * BLOCK_ROWS;
    int row = thread_index() / ROW_LANES;
    OwnPiece piece;
    Loader loader;
    Softmax softmax;
    bool waited = false;
    const int GLOBAL* length_at = few_length(p);
    int length = length_at ? load_now(length_at) : 0;
    NO_UNROLL while (true) {
        piece = own_piece(p, few_tokens(p, length), item);
        loader.turn(p, piece, piece.begin);
        softmax.start(p, piece, first_row + row);
        loader.locate(p);
        if (!waited) {
            loader.fetch();
            grid_dependency_wait();
            grid_dependency_launch();
            waited = true;
        }
        int now = length_at ? load_now(length_at) : 0;
        bool moved = loader.moved();
        if (piece.begin < piece.end) load_queries(p, queries, piece.seq, first_row);
        if (!barrier_any(now != length || moved)) break;
        length = now;
        copy_commit();
        copy_wait<0>();
    }
    if (piece.begin >= piece.end) return;

    Output output = {};
    int slot = 0;
    int token = piece.begin - SLOTS * TILE;  // of the tile whose place is filled next
    NO_UNROLL while (true) {
        if (loader.token > piece.begin && loader.token < piece.end) loader.locate(p);
        loader.copy(tiles + slot * TILE_ELEMS);
        copy_commit();
        token += TILE;
        slot ^= 1;
        loader.token += TILE;
        if (loader.token < piece.end) loader.turn(p, piece, loader.token);
        if (token < piece.begin) {
            if (loader.token < piece.end) continue;
            copy_commit();  // there is no second tile
            token = piece.begin;
            slot = 0;
        }
        copy_wait<1>();
        barrier();
        const uint16 SHARED* tile = tiles + slot * TILE_ELEMS;
        bool last = token + TILE >= piece.end;
        int sixteens = (smaller(piece.end - token, TILE) + 15) / 16;
        push_logits(queries, tile, scores, sixteens);
        barrier();
        float factor = softmax.push(p, scores, weights, token);
        if (thread_index() % ROW_LANES == 0) rescale[row] = factor;
        if (last) {
            float result = softmax.result(p, piece);
            if (thread_index() % ROW_LANES == 0) scale[row] = result;
        }
        bool rescales = barrier_any(factor != 1.0f);
        if (rescales && token > piece.begin) output.rescale(rescale);
        if (sixteens == TILE / 16) {
            output.add<TILE / 16>(weights, tile, 0);
        } else {
            NO_UNROLL for (int k = 0; k < sixteens; k++) output.add<1>(weights, tile, k * 16);
        }
        if (last) break;
        barrier();
    }
    softmax.finish(p, piece, first_row + row);
    output.finish(p, piece, first_row, scale, (uint16 SHARED*)scores);
}
