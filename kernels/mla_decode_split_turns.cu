// Stage 1 of MLA decode for many query rows. The waves of a block form two halves with half of the rows each, which take
// turns: while one turns the logits of a tile into weights, the other does its matrix products. A turn ends at a barrier of the
// whole block; the second half is one turn behind the first.
//
//   logits    wave: the half's rows x all tokens over every HALF_WAVES-th 16-wide step of the row, so that every fragment is
//             multiplied with two; the waves' sums meet in `scores`, in the order in which accumulators hold them
//   softmax   wave: those rows of one row tile that one slot of its accumulators holds
//   output    wave: the half's rows x its own columns
//
// Turn of the first half, at tile i:   weights of i | logits of i + 1, output of i | weights of i + 1 | ...
// Turn of the second half:             output of i - 1, logits of i | weights of i | logits of i + 1, output of i | ...
// The second half loads all tiles, i + 2 in its turn of the weights of i: the place of i - 1 is free from then on, and it has
// until the end of its next turn to arrive.
// mla_decode_split.cu says what a part is; kernels/mla_stream.h and kernels/mla_softmax.h are shared with it.

constexpr int HALF_THREADS = THREADS / 2;
constexpr int HALF_WAVES = HALF_THREADS / WAVE;
constexpr int HALF_ROWS = BLOCK_ROWS / 2;
constexpr int HALF_ROW_TILES = HALF_ROWS / 16;
constexpr int HALF_STEPS = divide_up(STEPS, HALF_WAVES);
constexpr int HALF_COLUMNS = KV_LORA_RANK / HALF_WAVES;
constexpr int SLOT_ELEMS = MMA_ELEMS / ROW_SLOTS;  // accumulators of a row that a lane holds
static_assert(!FP8 && STAGES == 3, "a ring of three tiles of 16 bits");
static_assert(HALF_ROW_TILES * ROW_SLOTS == HALF_WAVES && SLOT_ELEMS == 4, "a wave weighs the rows of one slot");
static_assert(LANE_KEYS == KEY_TILES * SLOT_ELEMS && HALF_COLUMNS % 16 == 0, "waves divide logits and output");

// How many steps, and units of output, their operands are loaded ahead: only one wave of a SIMD multiplies at a time.
constexpr int LOGITS_AHEAD = 1;
constexpr int OUTPUT_AHEAD = 2;

constexpr int HALF_SCORES = HALF_WAVES * HALF_ROW_TILES * ROW_SLOTS * KEY_TILES * WAVE;  // words of SLOT_ELEMS floats
constexpr int TURN_BYTES = QUERY_BYTES + TILES_BYTES + 2 * HALF_SCORES * 16 + WEIGHTS_ELEMS * 2 + 2 * BLOCK_ROWS * 4 + 32;
#ifdef SPLIT_SHARED_BYTES
static_assert(TURN_BYTES == SPLIT_SHARED_BYTES, "select.rs counts the same");
#endif

/// The wave within its half.
DEVICE int half_wave() { return wave_index() % HALF_WAVES; }

/// Whether this wave has a `j`-th step of a row.
DEVICE bool has_step(int j) { return STEPS % HALF_WAVES == 0 || wave_agrees(half_wave() + j * HALF_WAVES < STEPS); }

/// Queries of the half's rows at a step of this wave.
struct Queries {
    FragA row_tile[HALF_ROW_TILES];

    /// `queries` is where the wave's first step begins.
    DEVICE void load(const uint16 SHARED* queries, int j) {
        queries += j * HALF_WAVES * 16;
        UNROLL for (int m = 0; m < HALF_ROW_TILES; m++) load_a(row_tile[m], queries + m * 16 * ROW_STRIDE, ROW_STRIDE);
    }
};

/// Loads the half's query rows of a virtual sequence; rows that do not exist become zeros.
DEVICE void load_half_queries(const DecodeParams& p, uint16 SHARED* queries, int virtual_seq, int first_row) {
    constexpr int LANES = 8;
    int thread = thread_index() % HALF_THREADS;
    NO_UNROLL for (int row = thread / LANES; row < HALF_ROWS; row += HALF_THREADS / LANES) {
        Row at = row_of(p, virtual_seq, first_row + row);
        const uint16 GLOBAL* from = query_row(p, at);
        for (int word = thread % LANES; word < WIDTH / 8; word += LANES) {
            copy16_async(queries + row * ROW_STRIDE + word * 8, from + word * 8, at.valid);
        }
    }
}

/// The half's logits of a tile, as far as this wave's steps go.
struct Logits {
    struct Operands {
        Queries a;
        FragB b[KEY_TILES];
    };

    const uint16 SHARED* queries;
    const uint16 SHARED* keys;
    Accum sum[HALF_ROW_TILES][KEY_TILES];
    Operands operands[LOGITS_AHEAD + 1];

    /// Begins with the rows of `queries` and of `keys`.
    DEVICE void start(const uint16 SHARED* query_rows, const uint16 SHARED* key_rows) {
        queries = query_rows + half_wave() * 16;
        keys = key_rows + half_wave() * 16;
        UNROLL for (int m = 0; m < HALF_ROW_TILES; m++) {
            UNROLL for (int n = 0; n < KEY_TILES; n++) sum[m][n] = {};
        }
        UNROLL for (int j = 0; j < LOGITS_AHEAD; j++) load(j);
    }

    DEVICE void load(int j) {
        if (!has_step(j)) return;
        Operands& to = operands[j % (LOGITS_AHEAD + 1)];
        to.a.load(queries, j);
        UNROLL for (int n = 0; n < KEY_TILES; n++) load_b(to.b[n], keys + n * 16 * ROW_STRIDE + j * HALF_WAVES * 16, ROW_STRIDE);
    }

    DEVICE void push(int j) {
        if (j + LOGITS_AHEAD < HALF_STEPS) load(j + LOGITS_AHEAD);
        if (!has_step(j)) return;
        const Operands& now = operands[j % (LOGITS_AHEAD + 1)];
        UNROLL for (int m = 0; m < HALF_ROW_TILES; m++) {
            UNROLL for (int n = 0; n < KEY_TILES; n++) mma<Q_IS_BF16>(sum[m][n], now.a.row_tile[m], now.b[n]);
        }
    }

    DEVICE void store(Float4 SHARED* scores) const {
        scores += half_wave() * HALF_ROW_TILES * ROW_SLOTS * KEY_TILES * WAVE + lane_index();
        UNROLL for (int m = 0; m < HALF_ROW_TILES; m++) {
            UNROLL for (int s = 0; s < ROW_SLOTS; s++) {
                UNROLL for (int n = 0; n < KEY_TILES; n++) {
                    float x[SLOT_ELEMS];
                    int count = 0;
                    UNROLL for (int i = 0; i < MMA_ELEMS; i++) {
                        if (row_slot(i) == s) x[count++] = sum[m][n].value[i];
                    }
                    scores[((m * ROW_SLOTS + s) * KEY_TILES + n) * WAVE] = {x[0], x[1], x[2], x[3]};
                }
            }
        }
    }
};

/// Which logits of the half's scores a lane weighs: one row, so many tokens of each key tile.
struct Weighed {
    int row, column[SLOT_ELEMS];

    DEVICE Weighed() {
        bool second = half_wave() % ROW_SLOTS != 0;
        row = half_wave() / ROW_SLOTS * 16 + (second ? accum_row(row_slot_element[1]) : accum_row(row_slot_element[0]));
        int count = 0;
        UNROLL for (int i = 0; i < MMA_ELEMS; i++) {
            if (row_slot(i) == 0) column[count++] = accum_column(i);  // the same in every slot
        }
    }

    DEVICE void read(float (&x)[LANE_KEYS], const Float4 SHARED* scores) const {
        scores += half_wave() * KEY_TILES * WAVE + lane_index();
        UNROLL for (int wave = 0; wave < HALF_WAVES; wave++) {
            UNROLL for (int n = 0; n < KEY_TILES; n++) {
                Float4 part = scores[(wave * HALF_ROW_TILES * ROW_SLOTS * KEY_TILES + n) * WAVE];
                x[n * SLOT_ELEMS] += part.x;
                x[n * SLOT_ELEMS + 1] += part.y;
                x[n * SLOT_ELEMS + 2] += part.z;
                x[n * SLOT_ELEMS + 3] += part.w;
            }
        }
    }

    DEVICE int token(int j) const { return j / SLOT_ELEMS * 16 + column[j % SLOT_ELEMS]; }

    DEVICE void write(uint16 SHARED* weights, const float (&x)[LANE_KEYS]) const {
        UNROLL for (int j = 0; j < LANE_KEYS; j += MMA_VECTOR) {
            float pair[MMA_VECTOR];
            UNROLL for (int i = 0; i < MMA_VECTOR; i++) pair[i] = x[j + i];
            write_weights<MMA_VECTOR>(weights + row * SCORE_STRIDE + token(j), pair);
        }
    }
};

/// Accumulated outputs of the half's rows, this wave's columns.
struct Output {
    static constexpr int COLUMN_TILES = HALF_COLUMNS / 16;
    // Products that a tile takes: 16 tokens times 16 columns, for all rows.
    static constexpr int UNITS = KEY_TILES * COLUMN_TILES;
    // Those that lie among the steps of the logits; the others give the logits time to be stored.
    static constexpr int AMONG = UNITS * 3 / 4;

    Accum tile[HALF_ROW_TILES][COLUMN_TILES];
    const uint16 SHARED* weights;
    const uint16 SHARED* values;
    FragA a[2][HALF_ROW_TILES];
    FragB b[OUTPUT_AHEAD + 1];

    DEVICE void start(const uint16 SHARED* weight_rows, const uint16 SHARED* value_rows) {
        weights = weight_rows;
        values = value_rows + half_wave() * HALF_COLUMNS;
        UNROLL for (int unit = 0; unit < OUTPUT_AHEAD; unit++) load(unit);
    }

    DEVICE void load(int unit) {
        int step = unit / COLUMN_TILES;
        if (unit % COLUMN_TILES == 0) {
            UNROLL for (int m = 0; m < HALF_ROW_TILES; m++) {
                load_a(a[step % 2][m], weights + m * 16 * SCORE_STRIDE + step * 16, SCORE_STRIDE);
            }
        }
        int column = unit % COLUMN_TILES * 16;
        load_b_trans(b[unit % (OUTPUT_AHEAD + 1)], values + step * 16 * ROW_STRIDE + column, ROW_STRIDE);
    }

    DEVICE void push(int unit) {
        if (unit + OUTPUT_AHEAD < UNITS) load(unit + OUTPUT_AHEAD);
        UNROLL for (int m = 0; m < HALF_ROW_TILES; m++) {
            mma<Q_IS_BF16>(tile[m][unit % COLUMN_TILES], a[unit / COLUMN_TILES % 2][m], b[unit % (OUTPUT_AHEAD + 1)]);
        }
    }

    DEVICE void clear() {
        UNROLL for (int m = 0; m < HALF_ROW_TILES; m++) {
            UNROLL for (int n = 0; n < COLUMN_TILES; n++) tile[m][n] = {};
        }
    }
};

KERNEL(THREADS) mla_decode_split(const DecodeParams p) {
    SHARED_MEMORY(shared);
    int half = wave_first(wave_index()) / HALF_WAVES;
    bool second = half == 1;
    uint16 SHARED* queries = (uint16 SHARED*)shared + half * HALF_ROWS * ROW_STRIDE;
    uint16 SHARED* tiles = (uint16 SHARED*)(shared + QUERY_BYTES);
    uint8 SHARED* rest = shared + QUERY_BYTES + TILES_BYTES;
    Float4 SHARED* scores = (Float4 SHARED*)rest + half * HALF_SCORES;
    rest += 2 * HALF_SCORES * 16;
    uint16 SHARED* weights = (uint16 SHARED*)rest + half * HALF_ROWS * SCORE_STRIDE;
    float SHARED* rescale = (float SHARED*)(rest + WEIGHTS_ELEMS * 2) + half * HALF_ROWS;  // of each row's earlier sums
    float SHARED* scale = rescale + BLOCK_ROWS;                                            // of each row's result
    // Of the results of this sequence and of the next.
    int64 SHARED* slots = (int64 SHARED*)((float SHARED*)(rest + WEIGHTS_ELEMS * 2) + 2 * BLOCK_ROWS) + half * 2;

    grid_dependency_wait();
    grid_dependency_launch();

    int row_blocks = divide_up(group_rows(p), BLOCK_ROWS);
    int first_row = block_index() % row_blocks * BLOCK_ROWS + half * HALF_ROWS;
    Part part = find_part(p, block_index() / row_blocks);
    if (part.empty()) return;
    Cursor at = {part.seq, part.token, 0};
    Loader loader;
    loader.start(p, at);
    at.settle(p, part);
    if (!at.more()) return;
    if (at.seq != part.seq) loader.start(p, at);
    loader.at = at;

    int load_stage = 0;
    auto place = [&](int row, int word) -> void SHARED* {
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
    int odd = 0;
    auto turn = [&] {
        meet_half(half, odd);
        odd ^= 1;
    };

    load_half_queries(p, queries, at.seq, first_row);
    copy_commit();
    if (second) {
        load_tile();
        load_tile();
    }
    Weighed own;
    Softmax softmax;
    softmax.start(p, at, first_row + own.row);
    int sequences = 0;
    if (thread_index() % HALF_THREADS == 0) slots[0] = slot_of(p, part, at.seq);
    if (second) {
        copy_wait<1>();
    } else {
        copy_wait<0>();
    }
    turn();
    Logits logits;
    logits.start(queries, tiles);
    UNROLL for (int j = 0; j < HALF_STEPS; j++) logits.push(j);
    logits.store(scores);
    turn();
    if (second) {
        copy_wait<0>();
        turn();
    }

    Output output;
    output.clear();
    int tile = 0;  // the one at `at`
    NO_UNROLL while (true) {
        // The turn of the softmax.
        if (second) load_tile();
        float x[LANE_KEYS] = {};
        own.read(x, scores);
        float factor = softmax.weigh(p, x, [&](int j) { return at.token + own.token(j); });
        own.write(weights, x);
        if (thread_index() % ROW_LANES == 0) rescale[own.row] = factor;
        int seq = at.seq;
        bool last = at.advance(p, part);  // of this sequence; `at` is at tile i + 1 now
        int64 slot = 0;
        if (unlikely(last)) {
            slot = slots[sequences & 1];
            sequences++;
            softmax.finish(p, seq, first_row + own.row, slot, scale + own.row);
            if (at.more()) {
                load_half_queries(p, queries, at.seq, first_row);
                if (thread_index() % HALF_THREADS == 0) slots[sequences & 1] = slot_of(p, part, at.seq);
            }
            copy_commit();
            copy_wait<0>();
        }
        bool rescales = half_any(half, factor != 1.0f);
        turn();

        // The turn of the products. Past the last tile there are logits of nothing, which nobody reads: a condition here would
        // keep operands from being loaded beside products.
        const uint16 SHARED* values = tiles + tile * TILE_ELEMS;
        tile = tile + 1 == STAGES ? 0 : tile + 1;
        if (unlikely(last && at.more())) softmax.start(p, at, first_row + own.row);
        if (unlikely(rescales)) rescale_rows(output.tile, rescale);
        output.start(weights, values);
        logits.start(queries, tiles + tile * TILE_ELEMS);
        UNROLL for (int j = 0; j < HALF_STEPS; j++) {
            logits.push(j);
            UNROLL for (int u = Output::AMONG * j / HALF_STEPS; u < Output::AMONG * (j + 1) / HALF_STEPS; u++) output.push(u);
        }
        logits.store(scores);
        UNROLL for (int u = Output::AMONG; u < Output::UNITS; u++) output.push(u);
        if (unlikely(last)) {
            write_results(p, output.tile, seq, first_row, half_wave() * HALF_COLUMNS, slot, scale);
            output.clear();
        }
        if (!at.more()) break;
        if (second) copy_wait<0>();
        turn();
    }
    if (!second) turn();
}
