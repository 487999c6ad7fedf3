// Stage 1 of MLA decode for CDNA, 128 query rows of a latent width of 256: tiles of 32 tokens, four waves of 64 lanes.
//
// A wave has 32 query rows to itself: their queries, logits, softmax and whole outputs are in its registers, of which a lane has
// 512 with one wave on a SIMD. Weights leave the product of keys and queries where the product with the values takes them, so
// they pass through no memory. All that waves share is the tile, in shared memory.
//
//   loading   a wave has eight of the tokens of every tile; they go to shared memory by way of registers
//   logits    keys are eight neighbouring columns of a token
//   output    values are four tokens of a column: a lane reads eight columns of each and turns them
//
// Products are transposed as kernels/cdna/lanes.h says, but of 32 rows and columns: a lane is the `lane % 32`-th row of A and
// column of B, and of eight rows of a result it holds the `lane / 32`-th four.

constexpr int WAVES = THREADS / WAVE;
constexpr int WAVE_ROWS = 32;
constexpr int WIDTH = KV_LORA_RANK + ROPE_DIM;
constexpr int ROW_BYTES = divide_up(WIDTH, 64) * 128;  // of a token in shared memory
constexpr int CHUNKS = WIDTH / 16;                     // of columns that a wave multiplies at once
constexpr int LANE_COLUMNS = 8;
constexpr int LANE_TOKENS = TILE_TOKENS / WAVES / 2;  // a wave loads two tokens at a time
constexpr int ROPE_LANES = THREADS / TILE_TOKENS;     // of a token
constexpr int ROPE_COLUMNS = ROPE_DIM / ROPE_LANES;   // of a lane
static_assert(WAVE == 64 && WAVES * WAVE_ROWS == BLOCK_ROWS && TILE_TOKENS == 32, "waves divide the rows");
static_assert(KV_LORA_RANK == 32 * LANE_COLUMNS && (ROPE_COLUMNS == 4 || ROPE_COLUMNS == 8), "lanes divide the columns");

// Tokens whose values are multiplied at once. Of a 16-bit cache memory takes longer than products of either depth, and the
// shallow ones take fewer registers.
constexpr int VALUE_TOKENS = ELEM == 1 ? LARGE_DEPTH : 8;
constexpr int LANE_VALUES = VALUE_TOKENS / 2;  // of a lane
using Operand = Words<VALUE_TOKENS / 4>;

/// Addresses of a token's row; that of the queries, which are surely there, if it is not to be read.
struct alignas(16) Place {
    uint64 latent, rope;
};

// Shared memory, in bytes from its beginning: tiles, and where the tokens of the next are.
constexpr int TILES = 3, PLACES = 4;
constexpr int TILE_BYTES = TILE_TOKENS * ROW_BYTES;
constexpr int PLACES_AT = TILES * TILE_BYTES;
constexpr int SHARED_BYTES = PLACES_AT + PLACES * TILE_TOKENS * 16;
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
        uint64 latent = p.kv + (page * p.kv_stride_page + entry * p.kv_stride_token) * ELEM;
        uint64 rope = p.k_rope + (page * p.rope_stride_page + entry * p.rope_stride_token) * ELEM;
        if (lane_index() < TILE_TOKENS) places[lane_index()] = {valid ? latent : p.q, valid ? rope : p.q};
    }
};

/// What a lane loads of a tile: eight columns of a few tokens, and some of the rope of one.
struct Slice {
    using Latent = Words<LANE_COLUMNS * ELEM / 4>;
    using Rope = Words<ROPE_COLUMNS * ELEM / 4>;
    Latent latent[LANE_TOKENS];
    Rope rope[1];
    bool valid[LANE_TOKENS], rope_valid;

    /// First token of a thread, the others being eight apart, and its column; token and column of its rope.
    static DEVICE uint32 token(uint32 thread) { return thread / 32; }
    static DEVICE uint32 column(uint32 thread) { return thread % 32 * LANE_COLUMNS; }
    static DEVICE uint32 rope_token(uint32 thread) { return thread / ROPE_LANES; }
    static DEVICE uint32 rope_column(uint32 thread) { return thread % ROPE_LANES * ROPE_COLUMNS; }

    DEVICE void load(const DecodeParams& p, const Place SHARED* places) {
        uint32 thread = unhoisted((uint32)thread_index());
        UNROLL for (int t = 0; t < LANE_TOKENS; t++) {
            uint64 row = places[token(thread) + t * 8].latent;
            valid[t] = row != p.q;
            latent[t] = *(const Latent GLOBAL*)(global_pointer<const uint8>(row) + column(thread) * ELEM);
        }
        uint64 row = places[rope_token(thread)].rope;
        rope_valid = row != p.q;
        rope[0] = *(const Rope GLOBAL*)(global_pointer<const uint8>(row) + rope_column(thread) * ELEM);
    }

    /// Makes zeros of rows that were not read: a weight of zero does not undo a NaN.
    DEVICE void clear_invalid() {
        UNROLL for (int t = 0; t < LANE_TOKENS; t++) {
            if (!valid[t]) latent[t] = {};
        }
        if (!rope_valid) rope[0] = {};
    }

    DEVICE bool all_valid() const {
        bool all = rope_valid;
        UNROLL for (int t = 0; t < LANE_TOKENS; t++) all = all && valid[t];
        return all;
    }

    DEVICE void store(uint8 SHARED* tile) {
        if (unlikely(wave_any(!all_valid()))) clear_invalid();
        uint32 thread = unhoisted((uint32)thread_index());
        Words<4> columns[LANE_TOKENS];
        widen(latent, columns);
        uint8 SHARED* to = tile + tile_byte(token(thread), column(thread));
        UNROLL for (int t = 0; t < LANE_TOKENS; t++) *(Words<4> SHARED*)(to + t * 8 * ROW_BYTES) = columns[t];
        Words<ROPE_COLUMNS / 2> rope_columns[1];
        widen(rope, rope_columns);
        *(Words<ROPE_COLUMNS / 2> SHARED*)(tile + tile_byte(rope_token(thread), KV_LORA_RANK + rope_column(thread))) = rope_columns[0];
    }
};

/// This wave's query rows, as the lane multiplies them: columns of one, or of some row that is there for one that is not, whose
/// result goes nowhere.
struct Queries {
    Words<4> chunk[CHUNKS];

    DEVICE void read(const DecodeParams& p, int virtual_seq, int row) {
        const uint16 GLOBAL* from = query_row(p, row_of(p, virtual_seq, row)) + unhoisted((uint32)lane_index()) / 32 * 8;
        UNROLL for (int j = 0; j < CHUNKS; j++) chunk[j] = *(const Words<4> GLOBAL*)(from + j * 16);
    }

    /// Products of a tile's tokens with them.
    DEVICE LargeAccum logits(const uint8 SHARED* tile) const {
        LargeAccum sum = {};
        int first = tile_byte(lane_index() % 32, lane_index() / 32 * 8);
        UNROLL for (int j = 0; j < CHUNKS; j++) {
            multiply(sum, *(const Words<4> SHARED*)(tile + (first ^ j % 4 * 32) + j / 4 * 128), chunk[j]);
        }
        return sum;
    }
};

/// Values that are multiplied at once: a lane has eight columns of half the tokens.
struct Values {
    Words<4> token[LANE_VALUES];

    DEVICE void load(const uint8 SHARED* stored) {
        int first = tile_byte(lane_index() / 32 * 4, lane_index() % 32 * LANE_COLUMNS);
        UNROLL for (int t = 0; t < LANE_VALUES; t++) {
            token[t] = *(const Words<4> SHARED*)(stored + (first ^ t % 4 * 16) + (t / 4 * 8 + t % 4) * ROW_BYTES);
        }
    }
};

/// Outputs of this wave's rows: a lane has half the columns of one. Of 32 times LANE_COLUMNS columns a tile has every
/// LANE_COLUMNS-th.
struct Output {
    LargeAccum tile[LANE_COLUMNS];

    DEVICE void clear() {
        UNROLL for (int n = 0; n < LANE_COLUMNS; n++) tile[n] = {};
    }

    DEVICE void push(const Values& values, const Operand& weights) {
        UNROLL for (int w = 0; w < 4; w++) {
            Operand of[2];  // neighbouring columns
            UNROLL for (int t = 0; t < LANE_VALUES; t += 4) {
                auto word = [&](int i) { return values.token[t + i].word[w]; };
                Words<4> pair = transpose_pairs(word(0), word(1), word(2), word(3));
                UNROLL for (int i = 0; i < 4; i++) of[i / 2].word[t / 2 + i % 2] = pair.word[i];
            }
            UNROLL for (int i = 0; i < 2; i++) multiply(tile[w * 2 + i], of[i], weights);
        }
    }

    DEVICE void rescale(float factor) {
        UNROLL for (int n = 0; n < LANE_COLUMNS; n++) {
            UNROLL for (int i = 0; i < 16; i++) tile[n].value[i] *= factor;
        }
    }

    /// Writes the piece's result, to `slot` or, if that is negative, to the output.
    DEVICE void finish(const DecodeParams& p, int virtual_seq, int row, int64 slot, float scale) {
        Row of = row_of(p, virtual_seq, row);
        if (!of.valid) return;
        uint16 GLOBAL* to = result_row(p, of, slot, row) + unhoisted((uint32)lane_index()) / 32 * 4 * LANE_COLUMNS;
        UNROLL for (int i = 0; i < 16; i++) {
            UNROLL for (int n = 0; n < LANE_COLUMNS; n += 4) {
                store_columns(to + (i / 4 * 8 + i % 4) * LANE_COLUMNS + n, tile[n].value[i], tile[n + 1].value[i],
                              tile[n + 2].value[i], tile[n + 3].value[i], scale);
            }
        }
    }
};

KERNEL_OF(THREADS, 1) mla_decode_split(const DecodeParams p) {
    SHARED_MEMORY(shared);
    Place SHARED* places = (Place SHARED*)(shared + PLACES_AT);
    grid_dependency_wait();
    grid_dependency_launch();

    Share share = share_of(p, block_index());
    Part part = find_part(p, share.item);
    Cursor keys = {part.seq, part.token, 0};  // the tile that is next
    keys.settle(p, part);
    if (!keys.more()) return;

    bool looks_up = wave_agrees(wave_index() == 0);
    Pages pages = {keys, -1};
    if (looks_up) pages.look_up(p);
    uint32 looked_up = 0, loaded = 0;  // tiles
    auto look_up = [&] {
        if (looks_up) pages.write(p, places + looked_up++ % PLACES * TILE_TOKENS);
        if (pages.at.more()) pages.at.advance(p, part);
        if (looks_up) pages.look_up(p);
    };
    Slice slice;
    auto load = [&] { slice.load(p, places + loaded++ % PLACES * TILE_TOKENS); };
    auto store = [&](int tile) { slice.store(shared + tile * TILE_BYTES); };
    look_up();
    barrier();
    load();
    look_up();
    look_up();
    barrier();
    store(0);
    load();
    look_up();

    auto row = [&] {
        uint32 thread = unhoisted((uint32)thread_index());
        return share.first_row + (int)(thread / WAVE * WAVE_ROWS + thread % WAVE_ROWS);
    };
    Queries queries;
    Softmax<WAVE_ROWS, 1, 4> softmax;
    auto start = [&] {
        queries.read(p, keys.seq, row());
        softmax.start(p, keys, row());
    };
    start();
    Output output;
    output.clear();

    // Whether there is another tile.
    auto use = [&](int number) {
        const uint8 SHARED* tile = shared + number * TILE_BYTES;
        LargeAccum logits = queries.logits(tile);
        Values values;
        values.load(tile);
        float factor = softmax.logs(p, logits.value, keys.token);
        if (unlikely(wave_any(factor != 1.0f))) output.rescale(factor);
        Operand weights[2];
        auto weigh = [&](int k) {
            UNROLL for (int i = 0; i < LANE_VALUES; i += 4) {
                const float* from = logits.value + k * LANE_VALUES + i;
                float x[MMA_ELEMS] = {from[0], from[1], from[2], from[3]};
                softmax.weigh(x);
                weights[k % 2].word[i / 2] = pack_weights(x[0], x[1]);
                weights[k % 2].word[i / 2 + 1] = pack_weights(x[2], x[3]);
            }
        };
        weigh(0);
        UNROLL for (int k = 0; k < TILE_TOKENS / VALUE_TOKENS; k++) {
            // The next weights are made while these values are multiplied.
            keep_order();
            if (k + 1 < TILE_TOKENS / VALUE_TOKENS) weigh(k + 1);
            output.push(values, weights[k % 2]);
            if (k + 1 < TILE_TOKENS / VALUE_TOKENS) values.load(tile + (k + 1) * VALUE_TOKENS * ROW_BYTES);
        }
        int seq = keys.seq;
        if (unlikely(keys.advance(p, part))) {  // it was the last of its sequence
            int64 slot = slot_of(p, part, seq);
            output.finish(p, seq, row(), slot, softmax.finish(p, seq, row(), slot));
            if (!keys.more()) return false;
            start();
            output.clear();
        }
        return true;
    };
    // Three tiles a turn. A place in shared memory is free from the barrier after its tile was used, and ready from the one after
    // it was stored: one tile is used and two are stored, then the other way round.
    NO_UNROLL while (true) {
        barrier();
        store(1);
        look_up();
        load();
        if (!use(0)) break;
        store(2);
        load();
        barrier();
        look_up();
        if (!use(1)) break;
        store(0);
        look_up();
        load();
        if (!use(2)) break;
    }
}
