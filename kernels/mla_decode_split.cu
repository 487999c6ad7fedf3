// Stage 1 of MLA decode: attention of BLOCK_ROWS query rows over the tiles of one part of the schedule.
//
// Tiles stream through a ring in shared memory. Step i turns the logits of tile i into weights; then, between two barriers,
// the logits of tile i + 1 and the output of tile i are computed in turns, so that neither waits for its own results:
//
//   logits    wave (row tile, key tile, depth slice): 16 rows x KEYS keys over every DEPTH-th 16-wide step of the row,
//             queries in registers; the slices' sums meet in `scores`
//   softmax   THREADS / BLOCK_ROWS neighbouring lanes per row; a row's maximum is raised only when a logit exceeds it by
//             LAZY_MAX, so most tiles rescale nothing
//   output    every wave: all rows x its own columns, accumulators in registers, probabilities from shared memory
//
// A part may span several sequences: the ring runs on, and queries, maximum and accumulators start afresh.
// kernels/mla_stream.h has the constants and the loading, kernels/mla_softmax.h the softmax and the writing.

// Steps of a row whose queries stay in registers; the others are read from shared memory at every tile.
constexpr int HELD_STEPS = WAVE_STEPS * FRAG_A_WORDS <= QUERY_WORDS ? WAVE_STEPS : QUERY_WORDS / FRAG_A_WORDS;

struct Queries {
    FragA step[HELD_STEPS];
};

/// First query of this wave's row tile, and depth of its `j`-th step.
DEVICE int wave_row_tile() { return wave_index() % ROW_TILES; }
DEVICE int wave_key_slice() { return wave_index() / ROW_TILES % KEY_SLICES; }
DEVICE int wave_depth() { return wave_index() / (ROW_TILES * KEY_SLICES); }

DEVICE void read_queries(const DecodeParams& p, Queries& held, const uint16 SHARED* queries, int virtual_seq, int first_row) {
    if constexpr (!QUERIES_STAGED) {
        static_assert(HELD_STEPS == WAVE_STEPS || QUERIES_STAGED, "registers hold all queries");
        Row at = row_of(p, virtual_seq, first_row + wave_row_tile() * 16 + frag_a_row());
        const uint16 GLOBAL* row = query_row(p, at) + wave_depth() * 16;
        UNROLL for (int j = 0; j < HELD_STEPS; j++) {
            if (STEPS % DEPTH != 0 && wave_agrees(wave_depth() + j * DEPTH >= STEPS)) break;
            load_a_row(held.step[j], at.valid ? row + j * DEPTH * 16 : nullptr);
        }
        return;
    }
    queries += wave_row_tile() * 16 * ROW_STRIDE + wave_depth() * 16;
    UNROLL for (int j = 0; j < HELD_STEPS; j++) {
        if (STEPS % DEPTH != 0 && wave_agrees(wave_depth() + j * DEPTH >= STEPS)) break;
        load_a(held.step[j], queries + j * DEPTH * 16, ROW_STRIDE);
    }
}

/// This wave's share of the logits of a tile.
struct Logits {
    // Chains of accumulators, so that a step need not wait for the one before.
    static constexpr int CHAINS = KEYS == 16 ? 2 : 1;
    Accum sum[CHAINS][KEYS / 16];

    /// What step `j` multiplies; loaded one step ahead.
    struct Operands {
        FragA a;
        FragB b[KEYS / 16];
    };

    static DEVICE bool has_step(int j) { return STEPS % DEPTH == 0 || wave_agrees(wave_depth() + j * DEPTH < STEPS); }

    static DEVICE void load(Operands& to, int j, const uint16 SHARED* queries, const uint16 SHARED* tile) {
        if (!has_step(j)) return;
        queries += wave_row_tile() * 16 * ROW_STRIDE + wave_depth() * 16;
        tile += wave_key_slice() * KEYS * ROW_STRIDE + wave_depth() * 16;
        if (j >= HELD_STEPS) load_a(to.a, queries + j * DEPTH * 16, ROW_STRIDE);
        UNROLL for (int n = 0; n < KEYS / 16; n++) {
            load_b(to.b[n], tile + n * 16 * ROW_STRIDE + j * DEPTH * 16, ROW_STRIDE);
        }
    }

    DEVICE void push(int j, const Operands& operands, const Queries& held) {
        if (!has_step(j)) return;
        UNROLL for (int n = 0; n < KEYS / 16; n++) {
            mma<Q_IS_BF16>(sum[j % CHAINS][n], j < HELD_STEPS ? held.step[j < HELD_STEPS ? j : 0] : operands.a, operands.b[n]);
        }
    }

    DEVICE void store(float SHARED* scores) {
        scores += (wave_depth() * BLOCK_ROWS + wave_row_tile() * 16) * SCORE_STRIDE + wave_key_slice() * KEYS;
        UNROLL for (int n = 0; n < KEYS / 16; n++) {
            UNROLL for (int chain = 1; chain < CHAINS; chain++) {
                UNROLL for (int i = 0; i < MMA_ELEMS; i++) sum[0][n].value[i] += sum[chain][n].value[i];
            }
            store_accum(sum[0][n], scores + n * 16, SCORE_STRIDE);
        }
    }
};

/// This lane's logits of a row, of neighbouring tokens.
DEVICE void read_scores(float (&x)[LANE_KEYS], const float SHARED* scores) {
    scores += thread_index() / ROW_LANES * SCORE_STRIDE + thread_index() % ROW_LANES * LANE_KEYS;
    UNROLL for (int d = 0; d < DEPTH; d++) read_floats<LANE_KEYS>(x, scores + d * BLOCK_ROWS * SCORE_STRIDE);
}

/// Accumulated outputs of all rows, this wave's columns.
struct Output {
    Accum tile[ROW_TILES][COLUMNS / 16];

    // Products that a tile takes: 16 tokens times 16 columns, for all rows. The last of them are left to the next step, where
    // they fill the time that its softmax waits; not while its tile is widened into.
    static constexpr int UNITS = KEY_TILES * (COLUMNS / 16);
    static constexpr int DEFERRED = FP8 ? 0 : UNITS / 2;
    static constexpr int AT_ONCE = UNITS - DEFERRED;

    DEVICE void rescale(const float SHARED* factors) { rescale_rows(tile, factors); }

    /// What units multiply: weights of 16 tokens, and values, which are loaded one unit ahead unless registers are short.
    static constexpr int LOADED = ROW_TILES > 2 ? 1 : 2;
    struct Operands {
        FragA weights[ROW_TILES];
        FragB values[LOADED];
    };

    static DEVICE void load_values(Operands& to, int unit, const uint16 SHARED* values) {
        int token = unit / (COLUMNS / 16) * 16;
        int column = wave_index() * COLUMNS + unit % (COLUMNS / 16) * 16;
        load_b_trans(to.values[unit % LOADED], values + token * ROW_STRIDE + column, ROW_STRIDE);
    }

    /// Adds one of UNITS products, in order.
    DEVICE void push(int unit, Operands& operands, const uint16 SHARED* weights, const uint16 SHARED* values) {
        int n = unit % (COLUMNS / 16);
        if (n == 0 || unit == AT_ONCE) {
            UNROLL for (int m = 0; m < ROW_TILES; m++) {
                load_a(operands.weights[m], weights + m * 16 * SCORE_STRIDE + unit / (COLUMNS / 16) * 16, SCORE_STRIDE);
            }
        }
        if (LOADED > 1 && unit + 1 < UNITS) load_values(operands, unit + 1, values);
        UNROLL for (int m = 0; m < ROW_TILES; m++) {
            mma<Q_IS_BF16>(tile[m][n], operands.weights[m], operands.values[unit % LOADED]);
        }
        if (LOADED == 1 && unit + 1 < UNITS) load_values(operands, unit + 1, values);
    }

    /// Writes the piece's result, to `slot` or, if that is negative, to the output, and starts afresh.
    DEVICE void finish(const DecodeParams& p, int virtual_seq, int first_row, int64 slot, const float SHARED* scale) {
        write_results(p, tile, virtual_seq, first_row, wave_index() * COLUMNS, slot, scale);
        clear();
    }

    DEVICE void clear() {
        UNROLL for (int m = 0; m < ROW_TILES; m++) {
            UNROLL for (int n = 0; n < COLUMNS / 16; n++) tile[m][n] = {};
        }
    }
};

KERNEL(THREADS) mla_decode_split(const DecodeParams p) {
    SHARED_MEMORY(shared);
    uint16 SHARED* queries = (uint16 SHARED*)shared;
    uint16 SHARED* tiles = (uint16 SHARED*)(shared + QUERY_BYTES);
    uint8 SHARED* raw = shared + QUERY_BYTES + TILES_BYTES;
    float SHARED* scores = (float SHARED*)(raw + RAW_TILES * RAW_BYTES);
    uint16 SHARED* all_weights = (uint16 SHARED*)((uint8 SHARED*)scores + SCORES_BYTES);
    float SHARED* rescale = (float SHARED*)((uint8 SHARED*)all_weights + WEIGHTS_BYTES);  // of each row's earlier sums
    float SHARED* scale = rescale + BLOCK_ROWS;                                       // of each row's result
    int64 SHARED* slot = (int64 SHARED*)(scale + BLOCK_ROWS);                         // of the sequence's result

    grid_dependency_wait();
    grid_dependency_launch();

    int row_blocks = divide_up(group_rows(p), BLOCK_ROWS);
    int first_row = block_index() % row_blocks * BLOCK_ROWS;
    Part part = find_part(p, block_index() / row_blocks);
    if (part.empty()) return;  // one past the last sequence has no row in the block table
    // The first pages are looked up while the length is on its way; most often they are the right ones.
    Cursor at = {part.seq, part.token, 0};
    Loader loader;
    loader.start(p, at);
    at.settle(p, part);
    if (!at.more()) return;
    if (at.seq != part.seq) loader.start(p, at);
    loader.at = at;

    // The stage that is loaded into; a quantised tile waits there until it is widened into one of two tiles.
    int load_stage = 0;
    auto place = [&](int row, int word) -> void SHARED* {
        if constexpr (FP8) return raw + load_stage * RAW_BYTES + row * WIDTH + word * 16;
        return tiles + load_stage * TILE_ELEMS + row * ROW_STRIDE + word * 8;
    };
    auto next_stage = [&] {
        copy_commit();
        load_stage = load_stage + 1 == STAGES ? 0 : load_stage + 1;
        loader.advance(p, part);
    };
    auto load_tile = [&] {
        if (loader.at.more()) {
            Loader::Rows rows = loader.rows(p);
            UNROLL for (int c = 0; c < Loader::COPIES; c++) Loader::copy(rows, c, place);
        }
        next_stage();
    };
    auto widen_tile = [&](uint16 SHARED* to) {
        // The oldest tile in `raw` lies where the next one will be loaded.
        if constexpr (FP8) Loader::widen(raw + load_stage * RAW_BYTES, to);
    };
    int tile = 0;  // the one at `at`
    auto tile_after = [&] { return tile + 1 == TILES ? 0 : tile + 1; };
    auto tile_before = [&] { return tile == 0 ? TILES - 1 : tile - 1; };
    int parity = 0;         // which weights are this tile's
    bool deferred = false;  // whether the tile before has products left to do

    constexpr int AHEAD = FP8 ? STAGES : STAGES - 1;  // tiles that are loading when the first is waited for
    load_queries(p, queries, at.seq, first_row);
    NO_UNROLL for (int i = 0; i < AHEAD; i++) load_tile();
    int row = thread_index() / ROW_LANES;
    Softmax softmax;
    softmax.start(p, at, first_row + row);
    if (thread_index() == 0) *slot = slot_of(p, part, at.seq);
    copy_wait<AHEAD - 1>();
    if constexpr (FP8) {
        widen_tile(tiles);
        load_tile();
    }
    barrier();

    Queries held;
    read_queries(p, held, queries, at.seq, first_row);
    {
        Logits logits = {};
        Logits::Operands operands[2];
        Logits::load(operands[0], 0, queries, tiles);
        UNROLL for (int j = 0; j < WAVE_STEPS; j++) {
            if (j + 1 < WAVE_STEPS) Logits::load(operands[(j + 1) % 2], j + 1, queries, tiles);
            logits.push(j, operands[j % 2], held);
        }
        logits.store(scores);
    }
    barrier();

    Output output;
    output.clear();
    NO_UNROLL while (true) {
        // Logits of tile i to weights; what the next step reads arrives meanwhile.
        float x[LANE_KEYS] = {};
        read_scores(x, scores);
        uint16 SHARED* weights = all_weights + parity * WEIGHTS_ELEMS;
        Output::Operands products;
        if (Output::DEFERRED > 0 && deferred) {
            const uint16 SHARED* values = tiles + tile_before() * TILE_ELEMS;
            const uint16 SHARED* earlier = all_weights + (parity ^ 1) * WEIGHTS_ELEMS;
            Output::load_values(products, Output::AT_ONCE, values);
            UNROLL for (int u = Output::AT_ONCE; u < Output::UNITS; u++) output.push(u, products, earlier, values);
        }
        int key = thread_index() % ROW_LANES * LANE_KEYS;
        float factor = softmax.weigh(p, x, [&](int j) { return at.token + key + j; });
        write_weights<LANE_KEYS>(weights + row * SCORE_STRIDE + key, x);
        if (thread_index() % ROW_LANES == 0) rescale[row] = factor;
        int seq = at.seq;
        bool last = at.advance(p, part);  // of this sequence; `at` is at tile i + 1 now
        if (unlikely(last)) {
            softmax.finish(p, seq, first_row + row, *slot, scale + row);
            if (at.more()) load_queries(p, queries, at.seq, first_row);
            copy_commit();
            copy_wait<0>();
        } else {
            copy_wait<FP8 ? STAGES - 1 : STAGES - 3>();
        }
        widen_tile(tiles + tile_after() * TILE_ELEMS);
        bool rescales = barrier_any(factor != 1.0f);

        // Output of tile i and logits of tile i + 1, between which a tile starts loading.
        const uint16 SHARED* values = tiles + tile * TILE_ELEMS;
        Output::load_values(products, 0, values);
        if (unlikely(rescales)) output.rescale(rescale);
        if (at.more()) {
            if (unlikely(last)) {
                read_queries(p, held, queries, at.seq, first_row);
                softmax.start(p, at, first_row + row);
            }
            const uint16 SHARED* keys = tiles + tile_after() * TILE_ELEMS;
            Logits logits = {};
            Logits::Operands operands[2];
            Logits::load(operands[0], 0, queries, keys);
            Loader::Rows rows = loader.rows(p);
            UNROLL for (int j = 0; j < WAVE_STEPS; j++) {
                if (j + 1 < WAVE_STEPS) Logits::load(operands[(j + 1) % 2], j + 1, queries, keys);
                logits.push(j, operands[j % 2], held);
                UNROLL for (int u = Output::AT_ONCE * j / WAVE_STEPS; u < Output::AT_ONCE * (j + 1) / WAVE_STEPS; u++) {
                    output.push(u, products, weights, values);
                }
                UNROLL for (int c = Loader::COPIES * j / WAVE_STEPS; c < Loader::COPIES * (j + 1) / WAVE_STEPS; c++) {
                    Loader::copy(rows, c, place);
                }
            }
            logits.store(scores);
            next_stage();
        } else {
            UNROLL for (int u = 0; u < Output::AT_ONCE; u++) output.push(u, products, weights, values);
        }
        if (unlikely(last)) {
            UNROLL for (int u = Output::AT_ONCE; u < Output::UNITS; u++) output.push(u, products, weights, values);
            output.finish(p, seq, first_row, *slot, scale);
        }
        if (!at.more()) break;
        deferred = !last;
        parity ^= 1;
        tile = tile_after();
        if (unlikely(last)) {
            barrier();
            if (thread_index() == 0) *slot = slot_of(p, part, at.seq);
        }
        barrier();
    }
}
