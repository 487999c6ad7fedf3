// Stage 1 of MLA decode for CDNA, many query rows: 64 in a block, or 128 of the whole width, tiles of 16 tokens, waves of 64 lanes.
//
// With many rows the products take the time, and registers are what is short: queries and outputs fill most of them.
//
//   loading   a wave has a slice of the columns of every tile; it goes to shared memory by way of registers
//   logits    a wave has its own query rows, in registers, and all tokens; so softmax stays within the wave
//   output    a wave has the columns that it loaded, of all query rows: its lanes read back what they stored themselves, for
//             four tokens of a column are one operand. Weights pass through shared memory
//
// The output of tile i and the logits of tile i + 1 are computed in turns, so that neither waits for its own results, and a
// tile takes one barrier. A row's maximum is raised only when a logit exceeds it by LAZY_MAX, so most tiles rescale nothing.
// kernels/cdna/lanes.h says how operands and results lie.

constexpr int WAVES = THREADS / WAVE;
constexpr int ROW_TILES = BLOCK_ROWS / 16;
constexpr int WAVE_TILES = ROW_TILES / WAVES;
constexpr int COLUMNS = KV_LORA_RANK / WAVES;
constexpr int LANE_COLUMNS = COLUMNS / 16;
constexpr int LANE_TOKENS = 4;
constexpr int WIDTH = KV_LORA_RANK + ROPE_DIM;
constexpr int ROW_BYTES = divide_up(WIDTH, 64) * 128;  // of a token in shared memory
constexpr int CHUNKS = WIDTH / 32;                     // of columns that a wave multiplies at once
constexpr int STAGED = KV_LORA_RANK < 512 ? 0 : BLOCK_ROWS == 64 ? 5 : 2;  // chunks of queries that a lane keeps in shared memory
constexpr int HELD = CHUNKS - STAGED;                                      // and in registers
constexpr bool HAS_ROPE = ROPE_DIM > 0;
constexpr int ROPE_WAVES = TILE_TOKENS * ROPE_DIM / 4 / WAVE;  // the first waves load the rope, four columns a lane
static_assert(WAVE == 64 && TILE_TOKENS == 16 && WAVE_TILES >= 1 && ROW_TILES % 2 == 0, "waves divide the rows");
static_assert((LANE_COLUMNS == 4 || LANE_COLUMNS == 8) && WIDTH % 32 == 0, "lanes divide the columns");
static_assert(TILE_TOKENS * ROPE_DIM == ROPE_WAVES * WAVE * 4 && ROPE_WAVES <= WAVES, "lanes divide the rope");

/// Where a token's row is, in bytes; negative if it is not to be read.
struct alignas(16) Place {
    int64 latent, rope;
};

// Shared memory, in bytes from its beginning. Even and odd tiles have their own of what is twice there: tiles, weights, places,
// and the last tile at which each wave raised a maximum. A tile takes the place of the one before last, of which lanes read only
// what they stored themselves.
constexpr int TILE_BYTES = TILE_TOKENS * ROW_BYTES;
constexpr int WEIGHTS_BYTES = ROW_TILES * WAVE * 8;
constexpr int WEIGHTS_AT = 2 * TILE_BYTES;
constexpr int PLACES_AT = WEIGHTS_AT + 2 * WEIGHTS_BYTES;
constexpr int RAISED_AT = PLACES_AT + 2 * TILE_TOKENS * 16;
constexpr int FACTORS_AT = RAISED_AT + 2 * WAVES * 4;   // what each row's earlier sums are multiplied by then
constexpr int SCALES_AT = FACTORS_AT + BLOCK_ROWS * 4;  // of each row's result
constexpr int QUERIES_AT = SCALES_AT + BLOCK_ROWS * 4;
constexpr int SHARED_BYTES = QUERIES_AT + STAGED * WAVE_TILES * THREADS * 16;
#ifdef SPLIT_SHARED_BYTES
static_assert(SHARED_BYTES == SPLIT_SHARED_BYTES, "select.rs counts the same");
#endif

/// Byte of a tile that holds a column of a token: words of 16 bytes lie so that neither lanes that write nor lanes that read at
/// a time meet in a bank.
DEVICE int tile_byte(int token, int column) {
    return token * ROW_BYTES + (column / 8 ^ token % 8) * 16 + column % 8 * 2;
}

/// Looks up where the tokens of a tile are; one wave does it for all.
struct Pages {
    Cursor at;
    int page;  // of this lane's token of the tile at the cursor; -1 past the table

    DEVICE int token() const { return at.token + (int)(unhoisted((uint32)lane_index()) % TILE_TOKENS); }

    DEVICE void look_up(const DecodeParams& p) {
        int column = column_of(p, token());
        const int GLOBAL* table = global_pointer<const int>(p.block_table) + seq_of(p, at.seq) * p.table_stride;
        page = token() < at.end && column < p.table_width ? table[column] : -1;
    }

    DEVICE void write(const DecodeParams& p, Place SHARED* places) const {
        bool valid = page >= 0 && page < p.num_pages;
        int64 entry = entry_of(p, token());
        int64 latent = (page * p.kv_stride_page + entry * p.kv_stride_token) * ELEM;
        int64 rope = (page * p.rope_stride_page + entry * p.rope_stride_token) * ELEM;
        if (lane_index() < TILE_TOKENS) places[lane_index()] = {valid ? latent : -1, valid ? rope : -1};
    }
};

/// What a lane loads of a tile: a few columns of four tokens, and of the rope of one.
struct Slice {
    using Latent = Words<LANE_COLUMNS * ELEM / 4>;
    using Rope = Words<ELEM>;
    Latent latent[LANE_TOKENS];
    Rope rope[1];
    bool valid[LANE_TOKENS], rope_valid;

    /// First token and column of a thread; token and column of its rope.
    static DEVICE uint32 token(uint32 thread) { return thread % WAVE / 16 * LANE_TOKENS; }
    static DEVICE uint32 column(uint32 thread) { return thread / WAVE * COLUMNS + thread % 16 * LANE_COLUMNS; }
    static DEVICE uint32 rope_token(uint32 thread) { return thread * 4 / (HAS_ROPE ? ROPE_DIM : 1); }
    static DEVICE uint32 rope_column(uint32 thread) { return thread * 4 % (HAS_ROPE ? ROPE_DIM : 1); }
    static DEVICE bool has_rope() { return HAS_ROPE && wave_agrees(wave_index() < ROPE_WAVES); }

    /// Where the columns of the `t`-th token are in a tile.
    static DEVICE int byte(int t) {
        return (tile_byte(token(thread_index()), column(thread_index())) ^ t * 16) + t * ROW_BYTES;
    }

    /// Rows that are not to be read give way to something that is surely there, the queries.
    DEVICE void load(const DecodeParams& p, const Place SHARED* places) {
        uint32 thread = unhoisted((uint32)thread_index());
        UNROLL for (int t = 0; t < LANE_TOKENS; t++) {
            int64 from = places[token(thread) + t].latent;
            valid[t] = from >= 0;
            const uint8 GLOBAL* row = from >= 0 ? global_pointer<const uint8>(p.kv) + from : global_pointer<const uint8>(p.q);
            latent[t] = *(const Latent GLOBAL*)(row + column(thread) * ELEM);
        }
        rope_valid = true;
        if (!has_rope()) return;
        int64 from = places[rope_token(thread)].rope;
        rope_valid = from >= 0;
        const uint8 GLOBAL* row = from >= 0 ? global_pointer<const uint8>(p.k_rope) + from : global_pointer<const uint8>(p.q);
        rope[0] = *(const Rope GLOBAL*)(row + rope_column(thread) * ELEM);
    }

    /// Makes zeros of rows that were not read: a weight of zero does not undo a NaN.
    DEVICE void clear_invalid() {
        UNROLL for (int t = 0; t < LANE_TOKENS; t++) {
            if (!valid[t]) latent[t] = {};
        }
        if (!rope_valid) rope[0] = {};
    }

    DEVICE bool all_valid() const { return valid[0] && valid[1] && valid[2] && valid[3] && rope_valid; }

    DEVICE void store(uint8 SHARED* tile) {
        if (unlikely(wave_any(!all_valid()))) clear_invalid();
        Words<LANE_COLUMNS / 2> columns[LANE_TOKENS];
        widen(latent, columns);
        UNROLL for (int t = 0; t < LANE_TOKENS; t++) *(Words<LANE_COLUMNS / 2> SHARED*)(tile + byte(t)) = columns[t];
        uint32 thread = unhoisted((uint32)thread_index());
        if (!has_rope()) return;
        Words<2> rope_columns[1];
        widen(rope, rope_columns);
        *(Words<2> SHARED*)(tile + tile_byte(rope_token(thread), KV_LORA_RANK + rope_column(thread))) = rope_columns[0];
    }
};

/// This wave's query rows, as the lane multiplies them: a row of each of its row tiles, or some row that is there for one that is
/// not, whose result goes nowhere.
struct Queries {
    Words<4> held[WAVE_TILES][HELD];

    static DEVICE Words<4> SHARED* staged(uint8 SHARED* shared, int r, int j) {
        return (Words<4> SHARED*)(shared + QUERIES_AT) + ((j - HELD) * WAVE_TILES + r) * THREADS + thread_index();
    }

    DEVICE void read(const DecodeParams& p, int virtual_seq, int row, uint8 SHARED* shared) {
        UNROLL for (int r = 0; r < WAVE_TILES; r++) {
            Row at = row_of(p, virtual_seq, row + r * 16);
            const uint16 GLOBAL* row = query_row(p, at) + unhoisted((uint32)lane_index()) / 16 * 8;
            UNROLL for (int j = 0; j < CHUNKS; j++) {
                Words<4> word = *(const Words<4> GLOBAL*)(row + j * 32);
                if (j < HELD) {
                    held[r][j] = word;
                } else {
                    *staged(shared, r, j) = word;
                }
            }
        }
    }
};

/// Products of a tile's tokens with this wave's query rows.
struct Logits {
    Accum sum[WAVE_TILES];

    DEVICE void push(uint8 SHARED* shared, const uint8 SHARED* tile, const Queries& q, int j) {
        int first = tile_byte(lane_index() % 16, lane_index() / 16 * 8);
        Words<4> key = *(const Words<4> SHARED*)(tile + (first ^ j % 2 * 64) + j / 2 * 128);
        UNROLL for (int r = 0; r < WAVE_TILES; r++) {
            Words<4> query;
            if (j < HELD) {
                query = q.held[r][j];
            } else {
                query = *Queries::staged(shared, r, j);
            }
            multiply(sum[r], key, query);
        }
    }
};

/// Outputs of all rows, this wave's columns: a lane has LANE_COLUMNS x 4 neighbouring columns of a query row of each row tile.
struct Output {
    Accum tile[ROW_TILES][LANE_COLUMNS];

    /// Columns of a lane whose values are in registers at a time.
    static constexpr int AT_ONCE = 4;
    static constexpr int UNITS = ROW_TILES / 2 * LANE_COLUMNS;

    struct Operands {
        Words<2> values[AT_ONCE];
        Words<4> weights;  // of two row tiles

        DEVICE void load_values(const uint8 SHARED* stored, int first) {
            Words<2> token[LANE_TOKENS];
            UNROLL for (int t = 0; t < LANE_TOKENS; t++) token[t] = *(const Words<2> SHARED*)(stored + Slice::byte(t) + first * 2);
            Words<4> pair = transpose_pairs(token[0].word[0], token[1].word[0], token[2].word[0], token[3].word[0]);
            values[0] = {{pair.word[0], pair.word[1]}};
            values[1] = {{pair.word[2], pair.word[3]}};
            pair = transpose_pairs(token[0].word[1], token[1].word[1], token[2].word[1], token[3].word[1]);
            values[2] = {{pair.word[0], pair.word[1]}};
            values[3] = {{pair.word[2], pair.word[3]}};
        }
    };

    DEVICE void clear() {
        UNROLL for (int m = 0; m < ROW_TILES; m++) {
            UNROLL for (int n = 0; n < LANE_COLUMNS; n++) tile[m][n] = {};
        }
    }

    /// Adds the products of a column of each lane with two row tiles.
    DEVICE void push(int unit, Operands& operands, const uint8 SHARED* stored, const uint8 SHARED* weights) {
        int pair = unit / AT_ONCE % (ROW_TILES / 2);
        int n = unit / (AT_ONCE * ROW_TILES / 2) * AT_ONCE + unit % AT_ONCE;
        if (unit % (AT_ONCE * ROW_TILES / 2) == 0) operands.load_values(stored, n);
        if (unit % AT_ONCE == 0) operands.weights = *(const Words<4> SHARED*)(weights + (pair * WAVE + lane_index()) * 16);
        const uint32 (&of)[4] = operands.weights.word;
        multiply(tile[pair * 2][n], operands.values[n % AT_ONCE], {{of[0], of[1]}});
        multiply(tile[pair * 2 + 1][n], operands.values[n % AT_ONCE], {{of[2], of[3]}});
    }

    /// Multiplies the rows of waves that raised a maximum at a tile.
    DEVICE void rescale(const int SHARED* raised, int number, const float SHARED* factors) {
        UNROLL for (int m = 0; m < ROW_TILES; m++) {
            if (raised[m / WAVE_TILES] != number) continue;
            float factor = factors[m * 16 + unhoisted((uint32)lane_index()) % 16];
            UNROLL for (int n = 0; n < LANE_COLUMNS; n++) {
                UNROLL for (int i = 0; i < MMA_ELEMS; i++) tile[m][n].value[i] *= factor;
            }
        }
    }

    /// Writes the piece's result, to `slot` or, if that is negative, to the output.
    DEVICE void finish(const DecodeParams& p, int virtual_seq, int first_row, int64 slot, const float SHARED* scales) {
        uint32 thread = unhoisted((uint32)thread_index());
        uint32 column = thread / WAVE * COLUMNS + thread % WAVE / 16 * LANE_COLUMNS * 4;
        UNROLL for (int m = 0; m < ROW_TILES; m++) {
            int local = m * 16 + (int)(thread % 16);
            Row of = row_of(p, virtual_seq, first_row + local);
            float scale = scales[local];
            uint16 GLOBAL* to = result_row(p, of, slot, first_row + local) + column;
            if (!of.valid) continue;
            auto column_of = [&](int c) { return tile[m][c % LANE_COLUMNS].value[c / LANE_COLUMNS]; };
            UNROLL for (int c = 0; c < LANE_COLUMNS * 4; c += 4) {
                store_columns(to + c, column_of(c), column_of(c + 1), column_of(c + 2), column_of(c + 3), scale);
            }
        }
    }
};

KERNEL_OF(THREADS, 1) mla_decode_split(const DecodeParams p) {
    SHARED_MEMORY(shared);
    Place SHARED* places = (Place SHARED*)(shared + PLACES_AT);
    int SHARED* raised = (int SHARED*)(shared + RAISED_AT);
    float SHARED* factors = (float SHARED*)(shared + FACTORS_AT);
    float SHARED* scales = (float SHARED*)(shared + SCALES_AT);
    grid_dependency_wait();
    grid_dependency_launch();

    Share share = share_of(p, block_index());
    Part part = find_part(p, share.item);
    Cursor keys = {part.seq, part.token, 0};  // the tile whose logits are next
    keys.settle(p, part);
    if (!keys.more()) return;

    // Tiles are looked up, then loaded, then stored, a barrier apart.
    bool looks_up = wave_agrees(wave_index() == 0);
    Pages pages = {keys, -1};
    if (looks_up) pages.look_up(p);
    int looked_up = 0, stored = 0;  // tiles
    auto look_up = [&] {
        if (looks_up) pages.write(p, places + (looked_up & 1) * TILE_TOKENS);
        looked_up++;
        if (pages.at.more()) pages.at.advance(p, part);
        if (looks_up) pages.look_up(p);
    };
    Slice slice;
    auto load = [&] { slice.load(p, places + (looked_up & 1) * TILE_TOKENS); };
    auto tile_at = [&](int number) { return shared + (number & 1) * TILE_BYTES; };
    auto store = [&] { slice.store(tile_at(stored++)); };
    look_up();
    barrier();
    look_up();
    load();
    barrier();
    store();
    look_up();
    load();

    auto row = [&](int r) {
        uint32 thread = unhoisted((uint32)thread_index());
        return share.first_row + (int)((thread / WAVE * WAVE_TILES + r) * 16 + thread % 16);
    };
    Queries queries;
    Softmax<16, 1> softmax[WAVE_TILES];
    auto start = [&] {
        queries.read(p, keys.seq, row(0), shared);
        UNROLL for (int r = 0; r < WAVE_TILES; r++) softmax[r].start(p, keys, row(r));
    };
    start();
    Output output;
    output.clear();
    if (thread_index() < 2 * WAVES) raised[thread_index()] = -1;
    barrier();

    int number = 0;  // of the tile whose logits are there
    Logits logits = {};
    UNROLL for (int j = 0; j < CHUNKS; j++) logits.push(shared, tile_at(number), queries, j);
    NO_UNROLL while (true) {
        // Weights of the tile whose logits are there.
        uint8 SHARED* weights = shared + WEIGHTS_AT + (number & 1) * WEIGHTS_BYTES;
        UNROLL for (int r = 0; r < WAVE_TILES; r++) {
            int m = wave_index() * WAVE_TILES + r;
            float (&x)[MMA_ELEMS] = logits.sum[r].value;
            float factor = softmax[r].push(p, x, keys.token);
            *(Words<2> SHARED*)(weights + (m / 2 * WAVE + lane_index()) * 16 + m % 2 * 8) = {
                {pack_weights(x[0], x[1]), pack_weights(x[2], x[3])}};
            if (unlikely(wave_any(factor != 1.0f))) {
                uint32 thread = unhoisted((uint32)thread_index());
                if (thread % WAVE < 16) factors[(thread / WAVE * WAVE_TILES + r) * 16 + thread % 16] = factor;
                raised[(number & 1) * WAVES + thread / WAVE] = number;
            }
        }
        int seq = keys.seq;
        bool last = keys.advance(p, part);  // of its sequence; `keys` is at the next tile now
        int64 slot = 0;
        if (unlikely(last)) {
            slot = slot_of(p, part, seq);
            UNROLL for (int r = 0; r < WAVE_TILES; r++) {
                float scale = softmax[r].finish(p, seq, row(r), slot);
                uint32 thread = unhoisted((uint32)thread_index());
                if (thread % WAVE < 16) scales[(thread / WAVE * WAVE_TILES + r) * 16 + thread % 16] = scale;
            }
            if (keys.more()) start();
        }
        store();
        look_up();
        load();
        barrier();

        // Its output, and the logits of the next.
        const int SHARED* raised_now = raised + (number & 1) * WAVES;
        if (unlikely(wave_any(raised_now[lane_index() % WAVES] == number))) {
            output.rescale(raised_now, number, factors);
            barrier();
        }
        Output::Operands operands;
        logits = {};
        UNROLL for (int j = 0; j < CHUNKS; j++) {
            logits.push(shared, tile_at(number + 1), queries, j);
            UNROLL for (int u = Output::UNITS * j / CHUNKS; u < Output::UNITS * (j + 1) / CHUNKS; u++) {
                output.push(u, operands, tile_at(number), weights);
            }
        }
        if (unlikely(last)) {
            output.finish(p, seq, share.first_row, slot, scales);
            if (!keys.more()) break;
            output.clear();
            barrier();
        }
        number++;
    }
}
