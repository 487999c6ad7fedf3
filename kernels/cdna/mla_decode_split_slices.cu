// Stage 1 of MLA decode for CDNA, few query rows: 16 in a block, tiles of 64 tokens, four waves of 64 lanes.
//
// With few rows the cache is what takes time. Each wave has a slice of every token's row: a quarter of its latent columns,
// which serve it as keys and as values, and a quarter of its rope (of one of 32 columns: half, of half the tokens). It goes from
// device memory straight into registers, and the next tile's is asked for as soon as a register is free, so that memory never waits:
//
//   logits    products over the wave's columns, tokens x queries, from the registers that were loaded; the waves' sums meet in
//             shared memory
//   softmax   each wave adds up the logits of a quarter of the query rows and leaves their weights for all; a row's maximum is
//             raised only when a logit exceeds it by LAZY_MAX, which is rare enough to be the only time that lanes ask each other
//   output    the wave's columns x queries. Values change lanes through the wave's own shared memory, as soon as the logits are
//             done with them
//
// A lane loads tokens 16 apart, for which its share of a column makes one operand, in whatever order columns come: queries are
// loaded to match. kernels/cdna/lanes.h says how operands and results lie.

constexpr int WAVES = THREADS / WAVE;
constexpr int TOKENS = TILE_TOKENS / 16;  // of a lane
constexpr int COLUMNS = KV_LORA_RANK / WAVES;
constexpr int CHUNK = 64 / ELEM;  // columns that four lanes load at once
constexpr int CHUNKS = COLUMNS / CHUNK;
constexpr int STEPS = COLUMNS / 32;  // in which they are multiplied, eight columns of a lane
constexpr int CHUNK_STEPS = CHUNK / 32;
constexpr bool HAS_ROPE = ROPE_DIM > 0;
constexpr int ROPE_COLUMNS = 16;  // of a wave; where there are too few for all, waves share out the tokens as well
constexpr int ROPE_SLICES = HAS_ROPE ? ROPE_DIM / ROPE_COLUMNS : 1;
constexpr int ROPE_TOKENS = HAS_ROPE ? TOKENS * ROPE_SLICES / WAVES : TOKENS;  // of a wave
static_assert(BLOCK_ROWS == 16 && WAVE == 64 && WAVES == 4 && TOKENS == 4 && COLUMNS % CHUNK == 0, "waves and lanes divide a tile");
static_assert(ROPE_DIM % 32 == 0 && (ROPE_TOKENS == 2 || ROPE_TOKENS == 4), "waves divide the rope");

// Shared memory: a wave's area holds a step's values on their way between lanes, then its share of the tile's logits; behind the
// areas are weights, and what rows' outputs are multiplied by when their maximum is raised and when they end. Pairs of columns
// lie so that neither lanes that write nor lanes that read at a time meet in a bank.
constexpr int PAIR_STRIDE = 74 * 16;
constexpr int AREA_BYTES = 4 * PAIR_STRIDE + 128;  // whole rounds of banks, for two reads of an instruction
constexpr int WEIGHTS_AT = WAVES * AREA_BYTES;
constexpr int WEIGHTS_BYTES = TILE_TOKENS * BLOCK_ROWS * 2;
constexpr int ORDERS = TOKENS / ROPE_TOKENS;  // of tokens, in which waves want them
constexpr int FACTORS_AT = WEIGHTS_AT + ORDERS * WEIGHTS_BYTES;
constexpr int SCALES_AT = FACTORS_AT + BLOCK_ROWS * 4;
constexpr int SHARED_BYTES = SCALES_AT + BLOCK_ROWS * 4;
static_assert(AREA_BYTES >= TOKENS * WAVE * 16 && AREA_BYTES % 256 == 0, "logits fit");
#ifdef SPLIT_SHARED_BYTES
static_assert(SHARED_BYTES == SPLIT_SHARED_BYTES, "select.rs counts the same");
#endif

/// Which 16 tokens of a tile are a wave's `t`-th: first come those whose rope it multiplies.
DEVICE int first_tokens() { return ROPE_TOKENS == TOKENS ? 0 : wave_index() / ROPE_SLICES * ROPE_TOKENS; }

/// Looks up where the tokens of a tile are, a tile before they are loaded.
struct Pages {
    Cursor at;
    const int GLOBAL* table;  // the sequence's row
    int end;                  // of what is both in the piece and in the table
    int page_shift;           // of a page size that is a power of two, else -1
    int page[TOKENS];         // of this lane's tokens of the tile at the cursor; -1 past the end

    DEVICE void start(const DecodeParams& p, const Cursor& first) {
        at = first;
        page_shift = (p.page_size & (p.page_size - 1)) == 0 ? highest_bit(p.page_size) : -1;
        turn(p);
        look_up(p);
    }

    /// Turns to the cursor's sequence.
    DEVICE void turn(const DecodeParams& p) {
        make_scalar(at);
        table = global_pointer<const int>(p.block_table) + seq_of(p, at.seq) * p.table_stride;
        int64 tokens = (int64)p.table_width * p.page_size;
        end = at.end < tokens ? at.end : (int)tokens;
    }

    DEVICE int token_of(int t) const { return at.token + (t ^ first_tokens()) * 16 + lane_row(); }

    /// Pages of the sequence that the tokens are in, and their places there.
    DEVICE void divide(const DecodeParams& p, int (&column)[TOKENS], int (&entry)[TOKENS]) const {
        if (page_shift >= 0) {
            UNROLL for (int t = 0; t < TOKENS; t++) {
                column[t] = token_of(t) >> page_shift;
                entry[t] = token_of(t) & (p.page_size - 1);
            }
        } else {
            UNROLL for (int t = 0; t < TOKENS; t++) {
                column[t] = token_of(t) / unhoisted(p.page_size);
                entry[t] = token_of(t) % unhoisted(p.page_size);
            }
        }
    }

    DEVICE void look_up(const DecodeParams& p) {
        int column[TOKENS], entry[TOKENS];
        divide(p, column, entry);
        if (unlikely(at.token + TILE_TOKENS > end)) {
            UNROLL for (int t = 0; t < TOKENS; t++) page[t] = token_of(t) < end ? table[column[t]] : -1;
        } else {
            UNROLL for (int t = 0; t < TOKENS; t++) page[t] = table[column[t]];
        }
    }

    DEVICE void advance(const DecodeParams& p, const DecodeParams& rare, const Part& part) {
        if (at.more() && at.advance(rare, part)) turn(rare);
        look_up(p);
    }
};

/// First column of a step for the first quarter of lanes; those of other quarters follow in whole loads.
DEVICE int step_column(int step) { return step / CHUNK_STEPS * CHUNK + step % CHUNK_STEPS * 8; }

/// This lane's share of a tile: 16 bytes of every chunk, of tokens 16 apart.
struct Tile {
    Words<4> latent[CHUNKS][TOKENS];
    Words<ELEM> rope[ROPE_TOKENS];
    LaneFlags valid[TOKENS];

    /// Where the tokens' rows begin for this lane.
    struct Rows {
        const uint8 GLOBAL* latent[TOKENS];
        const uint8 GLOBAL* rope[TOKENS];
        LaneFlags valid[TOKENS];
    };

    /// Rows past the piece's end or outside the cache give way to something that is surely there: the first page or, of a cache
    /// without pages, the queries.
    static DEVICE Rows rows(const DecodeParams& p, const Pages& pages) {
        const uint8 GLOBAL* kv = global_pointer<const uint8>(p.num_pages > 0 ? p.kv : p.q);
        const uint8 GLOBAL* k_rope = global_pointer<const uint8>(p.num_pages > 0 ? p.k_rope : p.q);
        uint32 lane = unhoisted((uint32)lane_index()), wave = (uint32)wave_index();
        kv += wave * COLUMNS * ELEM + lane / 16 * 16;
        k_rope += wave % ROPE_SLICES * ROPE_COLUMNS * ELEM + lane / 16 * 4 * ELEM;
        int page[TOKENS], column[TOKENS], entry[TOKENS];
        pages.divide(p, column, entry);
        Rows rows;
        UNROLL for (int t = 0; t < TOKENS; t++) {
            bool valid = is_page(p, pages.page[t]);
            page[t] = valid ? pages.page[t] : 0;
            rows.valid[t] = lane_flags(valid);
        }
        auto latent = [&](int t, int64 bytes) { rows.latent[t] = kv + bytes; };
        auto rope = [&](int t, int64 bytes) { rows.rope[t] = k_rope + bytes; };
        row_offsets(page, entry, p.kv_stride_page, p.kv_stride_token, latent);
        if (!HAS_ROPE) return rows;
        if (p.kv_stride_page == p.rope_stride_page && p.kv_stride_token == p.rope_stride_token) {
            UNROLL for (int t = 0; t < ROPE_TOKENS; t++) rows.rope[t] = rows.latent[t] + (k_rope - kv);
        } else {
            row_offsets(page, entry, p.rope_stride_page, p.rope_stride_token, rope);
        }
        return rows;
    }

    DEVICE void load_chunk(const Rows& rows, int j) {
        UNROLL for (int t = 0; t < TOKENS; t++) latent[j][t] = *(const Words<4> GLOBAL*)(rows.latent[t] + j * 64);
    }

    DEVICE void load_rope(const Rows& rows) {
        UNROLL for (int t = 0; t < TOKENS; t++) {
            if (HAS_ROPE && t < ROPE_TOKENS) rope[t] = *(const Words<ELEM> GLOBAL*)rows.rope[t];
            valid[t] = rows.valid[t];
        }
    }

    /// Makes zeros of rows that were not read: a weight of zero does not undo a NaN.
    DEVICE void clear_invalid() {
        UNROLL for (int t = 0; t < TOKENS; t++) {
            if (valid[t].mine()) continue;
            UNROLL for (int j = 0; j < CHUNKS; j++) latent[j][t] = {};
            if (t < ROPE_TOKENS) rope[t] = {};
        }
    }

    /// What a step multiplies.
    DEVICE void read_step(int step, Words<4> (&token)[TOKENS]) const {
        Words<2 * ELEM> loaded[TOKENS];
        UNROLL for (int t = 0; t < TOKENS; t++) {
            UNROLL for (int i = 0; i < 2 * ELEM; i++) {
                loaded[t].word[i] = latent[step / CHUNK_STEPS][t].word[step % CHUNK_STEPS * 2 * ELEM + i];
            }
        }
        widen(loaded, token);
    }

    DEVICE bool all_valid() const { return valid[0].all() && valid[1].all() && valid[2].all() && valid[3].all(); }
};

/// The query row of this lane, the columns that it multiplies; of some row that is there if this one is not, for its result goes
/// nowhere.
struct Queries {
    Words<4> latent[STEPS];
    Words<2> rope;

    DEVICE void read(const DecodeParams& p, int virtual_seq, int row) {
        Row at = row_of(p, virtual_seq, row);
        int quarter = unhoisted(lane_quarter());
        const uint16 GLOBAL* from = query_row(p, at) + wave_index() * COLUMNS + quarter * CHUNK_STEPS * 8;
        UNROLL for (int j = 0; j < STEPS; j++) latent[j] = *(const Words<4> GLOBAL*)(from + step_column(j));
        if (!HAS_ROPE) return;
        rope = *(const Words<2> GLOBAL*)(query_row(p, at) + KV_LORA_RANK + wave_index() % ROPE_SLICES * ROPE_COLUMNS + quarter * 4);
    }
};

/// Values of a step: operands of 16 tokens x 16 columns. The `n`-th holds columns 2 (row % 4) + n of lane quarter row / 4, by the
/// row of the product; the `u`-th tokens 16 t + 4 quarter + u, all t.
struct Values {
    Words<2> step[4][2];

    DEVICE void exchange(const Words<4> (&token)[TOKENS], uint8 SHARED* area) {
        int lane = lane_index();
        uint8 SHARED* to = area + (lane + lane / 16) * 16;
        const uint8 SHARED* from = area + lane % 4 * PAIR_STRIDE + (lane % 16 / 4 * 17 + lane / 16 * 4) * 16;
        UNROLL for (int i = 0; i < 4; i++) {
            *(Words<4> SHARED*)(to + i * PAIR_STRIDE) =
                transpose_pairs(token[0].word[i], token[1].word[i], token[2].word[i], token[3].word[i]);
        }
        wave_barrier();
        UNROLL for (int u = 0; u < 4; u++) {
            Words<4> pair = *(const Words<4> SHARED*)(from + u * 16);
            step[u][0] = {{pair.word[0], pair.word[1]}};
            step[u][1] = {{pair.word[2], pair.word[3]}};
        }
        wave_barrier();
    }
};

/// The logits' products of a tile: tokens 16 t + 4 quarter + i x query rows.
struct Logits {
    Accum sum[TOKENS];

    template <int tokens, typename Word>
    DEVICE void push(const Word (&token)[tokens], const Word& query) {
        UNROLL for (int t = 0; t < tokens; t++) multiply(sum[t], token[t], query);
    }

    /// Leaves this wave's share for all: four tokens of a query row in 16 bytes, a place of their own.
    DEVICE void write(uint8 SHARED* area) const {
        uint8 SHARED* mine = area + place(lane_quarter(), lane_row());
        UNROLL for (int t = 0; t < TOKENS; t++) {
            const float (&of)[MMA_ELEMS] = sum[t].value;
            *(Float4 SHARED*)(mine + (t ^ first_tokens()) * WAVE * 16) = {of[0], of[1], of[2], of[3]};
        }
    }

    /// Bytes before the place of 16 tokens' `quarter` of a query row: of four rows and two quarters no two meet in a bank.
    static DEVICE int place(int quarter, int row) { return (quarter * 16 + (row ^ quarter % 2 * 4)) * 16; }
};

/// Softmax of a quarter of the query rows, a lane the `lane % 4`-th of its wave's and tokens 16 apart: the `u`-th of each quarter.
struct Weights {
    Softmax<BLOCK_ROWS / WAVES, 16> softmax;

    static DEVICE int row() { return wave_index() * 4 + lane_index() % 4; }

    /// Adds up the waves' shares of the logits of the tile at `token`, and leaves weights and factors of its rows.
    DEVICE void push(const DecodeParams& p, uint8 SHARED* shared, int token) {
        int quarter = lane_quarter(), u = lane_index() / 4 % 4;
        const uint8 SHARED* shares = shared + Logits::place(quarter, row()) + u * 4;
        auto logit = [&](int wave, int t) { return *(const float SHARED*)(shares + wave * AREA_BYTES + t * WAVE * 16); };
        float x[TOKENS];
        UNROLL for (int t = 0; t < TOKENS; t++) x[t] = (logit(0, t) + logit(1, t)) + (logit(2, t) + logit(3, t));
        float factor = softmax.push(p, x, token);
        uint32 first = pack_weights(x[0], x[1]), second = pack_weights(x[2], x[3]);
        uint8 SHARED* to = shared + WEIGHTS_AT + place(u / 2, quarter, row()) + u % 2 * 8;
        *(Words<2> SHARED*)to = {{first, second}};
        if (ORDERS == 2) *(Words<2> SHARED*)(to + WEIGHTS_BYTES) = {{second, first}};
        ((float SHARED*)(shared + FACTORS_AT))[row()] = factor;
    }

    /// Ends the rows.
    DEVICE void finish(const DecodeParams& p, uint8 SHARED* shared, int virtual_seq, int first_row, int64 slot) {
        ((float SHARED*)(shared + SCALES_AT))[row()] = softmax.finish(p, virtual_seq, first_row + row(), slot);
    }

    /// Bytes before the weights of a quarter's tokens, two of each 16, of a query row.
    static DEVICE int place(int half, int quarter, int row) {
        return half * WAVE * 16 + Logits::place(quarter, row ^ half * 4);
    }
};

/// Output of the lane's query row.
struct Output {
    Accum sum[STEPS][2];

    DEVICE void clear() {
        UNROLL for (int j = 0; j < STEPS; j++) sum[j][0] = sum[j][1] = {};
    }

    /// Adds the values of a tile by the weights that were left for them.
    DEVICE void push(const uint8 SHARED* shared, const Values (&values)[STEPS]) {
        const uint8 SHARED* left = shared + WEIGHTS_AT + first_tokens() / 2 * WEIGHTS_BYTES;
        float factor = ((const float SHARED*)(shared + FACTORS_AT))[lane_row()];
        Words<4> weights[2];
        UNROLL for (int half = 0; half < 2; half++) {
            weights[half] = *(const Words<4> SHARED*)(left + Weights::place(half, lane_quarter(), lane_row()));
        }
        if (unlikely(wave_any(factor != 1.0f))) {
            UNROLL for (int j = 0; j < STEPS; j++) {
                UNROLL for (int n = 0; n < 2; n++) {
                    UNROLL for (int i = 0; i < MMA_ELEMS; i++) sum[j][n].value[i] *= factor;
                }
            }
        }
        UNROLL for (int u = 0; u < 4; u++) {
            const uint32 (&word)[4] = weights[u / 2].word;
            Words<2> of = {{word[u % 2 * 2], word[u % 2 * 2 + 1]}};
            UNROLL for (int j = 0; j < STEPS; j++) {
                UNROLL for (int n = 0; n < 2; n++) multiply(sum[j][n], values[j].step[u][n], of);
            }
        }
    }

    /// Writes the piece's result, to `slot` or, if that is negative, to the output.
    DEVICE void finish(const DecodeParams& p, const uint8 SHARED* shared, int virtual_seq, int row, int64 slot) const {
        float scale = ((const float SHARED*)(shared + SCALES_AT))[lane_row()];
        Row of = row_of(p, virtual_seq, row);
        if (!of.valid) return;
        int column = unhoisted(wave_index() * COLUMNS + lane_quarter() * CHUNK_STEPS * 8);
        uint16 GLOBAL* to = result_row(p, of, slot, row) + column;
        UNROLL for (int j = 0; j < STEPS; j++) {
            const float (&even)[MMA_ELEMS] = sum[j][0].value;
            const float (&odd)[MMA_ELEMS] = sum[j][1].value;
            store_columns(to + step_column(j), even[0], odd[0], even[1], odd[1], scale);
            store_columns(to + step_column(j) + 4, even[2], odd[2], even[3], odd[3], scale);
        }
    }
};

KERNEL_OF(THREADS, 2) mla_decode_split(const DecodeParams p) {
    SHARED_MEMORY(shared);
    grid_dependency_wait();
    grid_dependency_launch();

    Share share = share_of(p, block_index());
    Part part = find_part(p, share.item);
    Cursor at = {part.seq, part.token, 0};
    at.settle(p, part);
    if (!at.more()) return;

    const DecodeParams& rare = reread(p);
    Pages pages;
    pages.start(p, at);
    Tile tile;
    {
        Tile::Rows next = Tile::rows(p, pages);
        pages.advance(p, rare, part);
        tile.load_rope(next);
        UNROLL for (int j = 0; j < CHUNKS; j++) tile.load_chunk(next, j);
    }
    Queries queries;
    Weights weights;
    Output output;
    auto row = [&] { return unhoisted(share.first_row + lane_row()); };
    auto start = [&] {
        make_scalar(at);
        queries.read(rare, at.seq, row());
        weights.softmax.start(rare, at, share.first_row + Weights::row());
        output.clear();
    };
    start();
    uint8 SHARED* area = shared + wave_index() * AREA_BYTES;
    NO_UNROLL while (true) {
        if (unlikely(!tile.all_valid())) tile.clear_invalid();

        // What was loaded is used, and loaded anew.
        Tile::Rows next = Tile::rows(p, pages);
        pages.advance(p, rare, part);
        Logits logits = {};
        Values values[STEPS];
        Words<4> token[TOKENS];
        if constexpr (HAS_ROPE) {
            Words<2> rope[ROPE_TOKENS];
            widen(tile.rope, rope);
            logits.push(rope, queries.rope);
        }
        tile.load_rope(next);
        UNROLL for (int j = 0; j < STEPS; j++) {
            tile.read_step(j, token);
            logits.push(token, queries.latent[j]);
            values[j].exchange(token, area);
            if (j % CHUNK_STEPS == CHUNK_STEPS - 1) tile.load_chunk(next, j / CHUNK_STEPS);
        }
        logits.write(area);
        barrier();
        weights.push(p, shared, at.token);

        int seq = at.seq;
        bool last = at.advance(rare, part);  // of its sequence
        int64 slot = 0;
        if (unlikely(last)) {
            slot = slot_of(rare, part, seq);
            weights.finish(rare, shared, seq, share.first_row, slot);
        }
        barrier();
        output.push(shared, values);
        if (unlikely(last)) {
            output.finish(rare, shared, seq, row(), slot);
            if (!at.more()) break;
            start();
        }
    }
}
