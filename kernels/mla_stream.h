// What stage 1 works on (kernels/mla_decode_split.cu says how): the division of a block's work among its waves, the layout
// of its shared memory, and the loading of tiles.

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

// Shared memory, as `split_shared_bytes` of src/kernel/select.rs counts it. Rows are padded by 16 bytes against bank conflicts.
constexpr bool FP8 = bytes_of(KV_DTYPE) == 1;
constexpr int ROW_STRIDE = WIDTH + 8;
constexpr int SCORE_STRIDE = TILE_TOKENS + SCORE_PAD;
constexpr int TILE_ELEMS = TILE_TOKENS * ROW_STRIDE;
constexpr int TILES = FP8 ? 2 : STAGES;             // tiles of Q_DTYPE
constexpr int RAW_BYTES = TILE_TOKENS * WIDTH;      // a tile of a quantised cache as it is loaded
constexpr int RAW_TILES = FP8 ? STAGES : 0;
constexpr int QUERY_BYTES = QUERIES_STAGED ? BLOCK_ROWS * ROW_STRIDE * 2 : 0;
constexpr int TILES_BYTES = TILES * TILE_ELEMS * 2;
constexpr int SCORES_BYTES = DEPTH * BLOCK_ROWS * SCORE_STRIDE * 4;
constexpr int WEIGHTS_ELEMS = BLOCK_ROWS * SCORE_STRIDE;
constexpr int WEIGHTS_BYTES = 2 * WEIGHTS_ELEMS * 2;  // of two tiles
constexpr int SHARED_BYTES =
    QUERY_BYTES + TILES_BYTES + RAW_TILES * RAW_BYTES + SCORES_BYTES + WEIGHTS_BYTES + 2 * BLOCK_ROWS * 4 + 16;
static_assert(STAGES >= (FP8 ? 2 : 3), "two tiles are in use while another loads");
#ifdef SPLIT_SHARED_BYTES
static_assert(FORM != 0 || SHARED_BYTES == SPLIT_SHARED_BYTES, "select.rs counts the same");
#endif

// Threads that load tiles: all, or the second half of a block whose halves take turns.
constexpr int LOAD_THREADS = FORM == 0 ? THREADS : THREADS / 2;
DEVICE int load_thread() { return LOAD_THREADS == THREADS ? thread_index() : thread_index() % LOAD_THREADS; }

/// Loads tiles of the cache: every thread copies the same 16-byte words of the same tile rows each time.
struct Loader {
    static constexpr int ELEM = bytes_of(KV_DTYPE);
    static constexpr int LATENT_WORDS = KV_LORA_RANK * ELEM / 16;
    static constexpr int ROPE_WORDS = ROPE_DIM * ELEM / 16;
    static constexpr int LANES = 8;
    static constexpr int ROWS = LOAD_THREADS / LANES;
    static constexpr int PASSES = divide_up(TILE_TOKENS, ROWS);
    static constexpr int ROW_COPIES = LATENT_WORDS / LANES + divide_up(ROPE_WORDS, LANES);
    static constexpr int COPIES = PASSES * ROW_COPIES;
    static_assert(LATENT_WORDS % LANES == 0, "lanes divide the latent part");

    Cursor at;
    const int GLOBAL* table;  // the sequence's row
    int page_shift;           // of a page size that is a power of two, else -1
    int page[PASSES];         // of this thread's rows of the tile at the cursor; -1 past the table
    int entry[PASSES];        // within the page

    DEVICE void start(const DecodeParams& p, const Cursor& first) {
        at = first;
        page_shift = -1;
        if ((p.page_size & (p.page_size - 1)) == 0) page_shift = highest_bit(p.page_size);
        turn(p);
        look_up(p);
    }

    /// Turns to the cursor's sequence.
    DEVICE void turn(const DecodeParams& p) {
        table = global_pointer<const int>(p.block_table) + seq_of(p, at.seq) * p.table_stride;
    }

    /// Looks up the pages of the tile at the cursor, well before they are needed.
    DEVICE void look_up(const DecodeParams& p) {
        UNROLL for (int i = 0; i < PASSES; i++) {
            int token = at.token + load_thread() / LANES + i * ROWS;
            int column = page_shift >= 0 ? token >> page_shift : column_of(p, token);
            entry[i] = token - column * p.page_size;
            page[i] = column < p.table_width ? table[column] : -1;
        }
    }

    /// This thread's rows of the tile that is being loaded.
    struct Rows {
        const uint8 GLOBAL* latent[PASSES];
        const uint8 GLOBAL* rope[PASSES];
        bool valid[PASSES];
    };

    /// Rows past the piece's end are not valid and become zeros: what lies in unused cache slots, NaN included, is never read.
    DEVICE Rows rows(const DecodeParams& p) const {
        Rows rows;
        int lane = load_thread() % LANES;
        UNROLL for (int i = 0; i < PASSES; i++) {
            int token = at.token + load_thread() / LANES + i * ROWS;
            rows.valid[i] = token < at.end && page[i] >= 0 && page[i] < p.num_pages;
            int64 index = rows.valid[i] ? page[i] : 0;
            rows.latent[i] = global_pointer<const uint8>(p.kv) + lane * 16 +
                             (index * p.kv_stride_page + entry[i] * p.kv_stride_token) * ELEM;
            rows.rope[i] = global_pointer<const uint8>(p.k_rope) + lane * 16 +
                           (index * p.rope_stride_page + entry[i] * p.rope_stride_token) * ELEM;
        }
        return rows;
    }

    /// Starts one of COPIES copies; `place` gives the address of a word of a row of the tile.
    template <typename Place>
    DEVICE static void copy(const Rows& rows, int c, Place place) {
        int pass = c / ROW_COPIES;
        int first = c % ROW_COPIES * LANES;
        int row = load_thread() / LANES + pass * ROWS;
        int lane = load_thread() % LANES;
        if (ROWS * PASSES != TILE_TOKENS && row >= TILE_TOKENS) return;
        if (first < LATENT_WORDS) {
            copy16_async(place(row, first + lane), rows.latent[pass] + first * 16, rows.valid[pass]);
        } else if (ROPE_WORDS % LANES == 0 || first + lane < LATENT_WORDS + ROPE_WORDS) {
            copy16_async(place(row, first + lane), rows.rope[pass] + (first - LATENT_WORDS) * 16, rows.valid[pass]);
        }
    }

    /// Moves to the next tile.
    DEVICE void advance(const DecodeParams& p, const Part& part) {
        if (!at.more()) return;
        if (at.advance(p, part)) {
            if (!at.more()) return;  // there is no row of the table to look up
            turn(p);
        }
        look_up(p);
    }

    // Accumulators of many rows leave few registers.
    static constexpr int WIDENED_AT_ONCE = ROW_TILES > 2 ? 1 : 8;

    /// Widens the words that this thread loaded itself.
    static DEVICE void widen(const uint8 SHARED* raw, uint16 SHARED* tile) {
        int row = load_thread() / LANES;
        int lane = load_thread() % LANES;
        UNROLL for (int i = 0; i < PASSES; i++) {
            int tile_row = row + i * ROWS;
            if (ROWS * PASSES != TILE_TOKENS && tile_row >= TILE_TOKENS) break;
#pragma unroll WIDENED_AT_ONCE
            for (int word = 0; word < WIDTH / 16; word += LANES) {
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
    if constexpr (!QUERIES_STAGED) return;
    constexpr int LANES = 8;
    constexpr int WORDS = WIDTH / 8;
    NO_UNROLL for (int row = thread_index() / LANES; row < BLOCK_ROWS; row += THREADS / LANES) {
        Row at = row_of(p, virtual_seq, first_row + row);
        const uint16 GLOBAL* from = query_row(p, at);
        for (int word = thread_index() % LANES; word < WORDS; word += LANES) {
            copy16_async(queries + row * ROW_STRIDE + word * 8, from + word * 8, at.valid);
        }
    }
}
