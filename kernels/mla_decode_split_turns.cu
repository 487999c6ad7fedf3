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
// Tile i + 2 is loaded in the turn in which the first half multiplies by tile i: the place of tile i - 1 is free from then on.
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

// Steps of a row whose queries stay in registers.
#ifndef HALF_HELD
#define HALF_HELD 2
#endif
constexpr int HELD_STEPS = HALF_HELD < HALF_STEPS ? HALF_HELD : HALF_STEPS;

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

DEVICE void read_queries(Queries (&held)[HELD_STEPS], const uint16 SHARED* queries) {
    queries += half_wave() * 16;
    UNROLL for (int j = 0; j < HELD_STEPS; j++) {
        if (has_step(j)) held[j].load(queries, j);
    }
}

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

/// The half's logits of a tile, summed over this wave's steps. `beside(j)` is done beside step `j`.
template <typename Beside>
DEVICE void logits(Float4 SHARED* scores, const Queries (&held)[HELD_STEPS], const uint16 SHARED* queries,
                   const uint16 SHARED* keys, Beside beside) {
    queries += half_wave() * 16;
    keys += half_wave() * 16;
    struct Operands {
        Queries a;
        FragB b[KEY_TILES];
    };
    auto load = [&](Operands& to, int j) {
        if (!has_step(j)) return;
        if (j >= HELD_STEPS) to.a.load(queries, j);
        UNROLL for (int n = 0; n < KEY_TILES; n++) {
            load_b(to.b[n], keys + n * 16 * ROW_STRIDE + j * HALF_WAVES * 16, ROW_STRIDE);
        }
    };
    Accum sum[HALF_ROW_TILES][KEY_TILES] = {};
    Operands operands[2];  // one is loaded while the other is multiplied
    load(operands[0], 0);
    UNROLL for (int j = 0; j < HALF_STEPS; j++) {
        if (j + 1 < HALF_STEPS) load(operands[(j + 1) % 2], j + 1);
        if (has_step(j)) {
            const Queries& a = j < HELD_STEPS ? held[j < HELD_STEPS ? j : 0] : operands[j % 2].a;
            UNROLL for (int m = 0; m < HALF_ROW_TILES; m++) {
                UNROLL for (int n = 0; n < KEY_TILES; n++) mma<Q_IS_BF16>(sum[m][n], a.row_tile[m], operands[j % 2].b[n]);
            }
        }
        beside(j);
    }
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
    Accum tile[HALF_ROW_TILES][HALF_COLUMNS / 16];

    DEVICE void push(const uint16 SHARED* weights, const uint16 SHARED* values) {
        constexpr int COLUMN_TILES = HALF_COLUMNS / 16;
        constexpr int UNITS = KEY_TILES * COLUMN_TILES;
        values += half_wave() * HALF_COLUMNS;
        FragA a[HALF_ROW_TILES];
        FragB b[2];  // one is loaded while the other is multiplied
        load_b_trans(b[0], values, ROW_STRIDE);
        UNROLL for (int unit = 0; unit < UNITS; unit++) {
            int n = unit % COLUMN_TILES;
            if (n == 0) {
                UNROLL for (int m = 0; m < HALF_ROW_TILES; m++) {
                    load_a(a[m], weights + m * 16 * SCORE_STRIDE + unit / COLUMN_TILES * 16, SCORE_STRIDE);
                }
            }
            int next = unit + 1;
            if (next < UNITS) {
                load_b_trans(b[next % 2], values + next / COLUMN_TILES * 16 * ROW_STRIDE + next % COLUMN_TILES * 16, ROW_STRIDE);
            }
            UNROLL for (int m = 0; m < HALF_ROW_TILES; m++) mma<Q_IS_BF16>(tile[m][n], a[m], b[unit % 2]);
        }
    }

    DEVICE void clear() {
        UNROLL for (int m = 0; m < HALF_ROW_TILES; m++) {
            UNROLL for (int n = 0; n < HALF_COLUMNS / 16; n++) tile[m][n] = {};
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
    auto turn = [&] { barrier_any(false); };

    load_half_queries(p, queries, at.seq, first_row);
    load_tile();
    load_tile();
    Weighed own;
    Softmax softmax;
    softmax.start(p, at, first_row + own.row);
    int sequences = 0;
    if (thread_index() % HALF_THREADS == 0) slots[0] = slot_of(p, part, at.seq);
    copy_wait<1>();
    turn();
    Queries held[HELD_STEPS];
    read_queries(held, queries);
    logits(scores, held, queries, tiles, [](int) {});
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
        }
        if (!second || last) copy_wait<0>();
        bool rescales = barrier_any(factor != 1.0f);

        // The turn of the products.
        const uint16 SHARED* values = tiles + tile * TILE_ELEMS;
        tile = tile + 1 == STAGES ? 0 : tile + 1;
        if (at.more()) {
            if (unlikely(last)) {
                read_queries(held, queries);
                softmax.start(p, at, first_row + own.row);
            }
            if (second) {
                logits(scores, held, queries, tiles + tile * TILE_ELEMS, [](int) {});
            } else {
                Loader::Rows rows = loader.rows(p);
                logits(scores, held, queries, tiles + tile * TILE_ELEMS, [&](int j) {
                    UNROLL for (int c = Loader::COPIES * j / HALF_STEPS; c < Loader::COPIES * (j + 1) / HALF_STEPS; c++) {
                        Loader::copy(rows, c, place);
                    }
                });
                next_stage();
            }
        }
        if (unlikely(rescales)) rescale_rows(output.tile, rescale);
        output.push(weights, values);
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
