// Stage 1 of MLA decode for few tokens on Hopper: one piece of one sequence in a block, most often a single tile.
//
// What takes time is the way from the lengths to the first tile, and what comes after the last: a block cuts its piece out by
// itself, and two warpgroups work on every step of a tile. The products are transposed: tokens are their rows.
//
//   loader    one warp copies the tiles, and at last adds up the weights of each row
//   logits    each group: all tokens x all query rows over half of the depth; then each adds up half of the query rows
//   softmax   each group: its half of the query rows, down the columns of its products
//   output    each group: its half of the columns x all query rows
//
// Before this kernel may rely on what others have written it finds its piece by lengths and pages that may be out of date, and
// asks for its first tiles to come near. Afterwards it works on them, and the loader looks at lengths and pages once more meanwhile:
// most often they are the same, else the block begins again.

namespace few {

/// Begins the group's part of the tile's logits, every second pair of the depth's steps, as the tile comes in.
DEVICE void multiply_keys(float (&x)[SUMS], uint32 depth, uint32 queries, const Tiles& tiles, int slot, int parity) {
    uint32 keys = tiles.tile(slot) + depth;
    UNROLL for (int unit = 0; unit < UNITS; unit++) {
        if (unit % PART_UNITS == 0) {
            barrier_wait(tiles.full(slot, unit / PART_UNITS), parity);
            products_begin();
        }
        UNROLL for (int step = 0; step < 2; step++) {
            product_keys<false>(x, rows_operand(keys, unit * UNIT_BYTES + step * 32),
                                rows_operand(queries + depth, unit * QUERY_UNIT_BYTES + step * 32), unit + step > 0);
        }
    }
    products_commit();
}

using Sums = float[GROUP_UNITS][SUMS];

/// Adds the tile's values, weighed, to the group's columns of the output.
DEVICE void multiply_values(Sums& o, uint32 values, uint32 weights) {
    products_begin();
    UNROLL for (int step = 0; step < TILE_TOKENS / 16; step++) {
        UNROLL for (int unit = 0; unit < GROUP_UNITS; unit++) {
            product_keys<true>(o[unit], columns_operand<UNIT_BYTES>(values, unit * UNIT_BYTES + step * 2048),
                               rows_operand(weights, step * 32), 1);
        }
    }
    products_commit();
}

/// Clears the values of a tile from token `valid` on, by both warpgroups: weights of zero do not undo a NaN.
DEVICE void clear_values(unsigned char SHARED* tile, int valid) {
    int thread = unhoisted(thread_index());
    NO_UNROLL for (int row = valid + thread / 64; row < TILE_TOKENS; row += WORKERS / 64) {
        *(Word4 SHARED*)(tile + thread % 64 / 8 * UNIT_BYTES + row * 128 + thread % 8 * 16) = {0, 0, 0, 0};
    }
}

/// What the lanes that have logits of a row add to its sums: of weights, and of weights as values are multiplied by them.
struct alignas(8) Summand {
    float exact, rounded;
};
constexpr int SUMMANDS_OF_ROW = GROUP_WARPS * WAVE / 4;
struct Summands {
    Summand of[SUMMANDS_OF_ROW];
};
static_assert(ROWS * sizeof(Summands) <= WEIGHTS_AT - EXCHANGE_AT, "summands pass through the place of logits");

/// Softmax of the group's query rows: lane `l` of warp `w` holds tokens 16 w + l / 4 and 8 further on.
struct Softmax {
    int lane, warp;  // unhoisted: a block may begin again, and what it computes of them would else be kept from before it begins
    float maximum[OWN_ROWS];
    float sum[OWN_ROWS], rounded[OWN_ROWS];  // this lane's summands
    int limit[OWN_ROWS];                     // tokens that each row sees of this piece

    DEVICE void start(const DecodeParams& p, const OwnPiece& piece, int first_row) {
        UNROLL for (int i = 0; i < OWN_ROWS; i++) {
            maximum[i] = sum[i] = rounded[i] = 0.0f;
            Row of = row_of(p, piece.seq, first_row + lane_row(lane, i));
            int unseen = p.causal ? last_token(p, piece.seq) - of.token : 0;  // of what the sequence's last row sees
            limit[i] = of.valid ? smaller(piece.tokens - unseen, piece.end) : 0;
        }
    }

    /// Turns products into logits, in powers of two. Whether a maximum is to be raised.
    DEVICE bool mask(const DecodeParams& p, float (&x)[LOGITS], int token, bool first) const {
        float scale = p.sm_scale * p.kv_scale * LOG2_E;
        if (p.softcap == 0.0f) {
            UNROLL for (int i = 0; i < LOGITS; i++) x[i] *= scale;
        } else {
            float softcap = unhoisted(p.softcap);
            scale *= 2.0f * reciprocal(softcap);
            UNROLL for (int i = 0; i < LOGITS; i++) x[i] = capped(softcap, x[i] * scale);
        }
        token += warp * 16 + lane / 4;
        float above = NEGATIVE_INFINITY, below = 0.0f;
        UNROLL for (int i = 0; i < LOGITS; i++) {
            int row = i / 4 * 2 + i % 2;
            bool sees = token + i / 2 % 2 * 8 < limit[row];
            below = ::maximum(below, sees ? -x[i] : 0.0f);
            if (!sees) x[i] = NEGATIVE_INFINITY;
            above = ::maximum(above, x[i] - maximum[row]);
        }
        return above > RAISE_ABOVE || (first && below > RAISE_BELOW);
    }

    /// Turns logits into weights.
    DEVICE void weigh(float (&weight)[LOGITS], const float (&x)[LOGITS]) const {
        UNROLL for (int i = 0; i < LOGITS; i++) weight[i] = exp2(x[i] - maximum[i / 4 * 2 + i % 2]);
    }

    /// Stores the weights of this warp's sixteen tokens for the products.
    DEVICE void store(const float (&weight)[LOGITS], uint32 weights) const {
        uint32 word[LOGITS / 2];
        UNROLL for (int i = 0; i < LOGITS; i += 2) word[i / 2] = pack(weight[i], weight[i + 1]);
        uint32 to = weights + lane % 8 * 128 + ((warp * 2 + lane / 8 % 2) ^ lane % 8) * 16;
        if constexpr (LOGITS == 4) {
            store_matrix_trans(to, word[0], word[1]);
        } else {
            store_matrix_trans(to + lane / 16 * 1024, word[0], word[1], word[2], word[3]);
        }
        publish_to_async();
    }

    /// Raises the maxima that need it; `factors` tells what each row's earlier sums are to be multiplied by. Both groups must ask.
    DEVICE void raise(const float (&x)[LOGITS], bool first, float SHARED* highest_of, float SHARED* factors) {
        float highest[OWN_ROWS];
        UNROLL for (int i = 0; i < OWN_ROWS; i++) {
            highest[i] = ::maximum(x[i / 2 * 4 + i % 2], x[i / 2 * 4 + i % 2 + 2]);
            UNROLL for (int mask = 4; mask < 32; mask *= 2) highest[i] = ::maximum(highest[i], shuffle_xor(highest[i], mask));
            if (lane < 4) highest_of[warp * ROWS + lane_row(lane, i)] = highest[i];
        }
        workers_barrier();
        UNROLL for (int i = 0; i < OWN_ROWS; i++) {
            UNROLL for (int other = 0; other < GROUP_WARPS; other++) {
                highest[i] = ::maximum(highest[i], highest_of[other * ROWS + lane_row(lane, i)]);
            }
            float factor = 1.0f;
            if (first ? highest[i] != NEGATIVE_INFINITY : highest[i] > maximum[i] + RAISE_ABOVE) {
                if (!first) factor = exp2(maximum[i] - highest[i]);
                maximum[i] = highest[i];
                sum[i] *= factor;
                rounded[i] *= factor;
            }
            if (lane < 4 && warp == 0) factors[lane_row(lane, i)] = factor;
        }
    }

    DEVICE void add(const float (&weight)[LOGITS]) {
        UNROLL for (int i = 0; i < LOGITS; i += 2) {
            float low, high;
            unpack(pack(weight[i], weight[i + 1]), low, high);
            sum[i / 4 * 2] += weight[i];
            sum[i / 4 * 2 + 1] += weight[i + 1];
            rounded[i / 4 * 2] += low;
            rounded[i / 4 * 2 + 1] += high;
        }
    }

    /// Tells this lane's sums, and the maxima.
    DEVICE void tell(Summands SHARED* summands, float SHARED* maxima) const {
        UNROLL for (int i = 0; i < OWN_ROWS; i++) {
            summands[lane_row(lane, i)].of[warp * 8 + lane / 4] = {sum[i], rounded[i]};
            if (warp == 0 && lane < 4) maxima[lane_row(lane, i)] = maximum[i];
        }
    }
};

/// Adds up the weights of each row, by one warp: what results are to be multiplied by, and the LSE. A result is divided by the sum of
/// the weights as they were rounded, so that the one of a lone token is exact.
DEVICE void finish_rows(const DecodeParams& p, const OwnPiece& piece, int first_row, const Summands SHARED* summands,
                        const float SHARED* maxima, float SHARED* factors, Signals signals) {
    constexpr int SHARES = WAVE / ROWS;  // lanes of a row
    static_assert(SUMMANDS_OF_ROW == SHARES * ROWS, "as many turns as rows");
    int lane = unhoisted(lane_index());
    int row = lane % ROWS;
    barrier_wait(signals.summands(), 0);
    float sum = 0.0f, rounded = 0.0f;
    UNROLL for (int i = 0; i < SUMMANDS_OF_ROW / SHARES; i++) {
        Summand more = summands[row].of[(i ^ row) * SHARES + lane / ROWS];  // of other banks than other rows
        sum += more.exact;
        rounded += more.rounded;
    }
    UNROLL for (int mask = ROWS; mask < WAVE; mask *= 2) {
        sum += shuffle_xor(sum, mask);
        rounded += shuffle_xor(rounded, mask);
    }
    factors[row] = result_scale(p, rounded, piece.slot);
    barrier_arrive(signals.factors());
    // Emptiness is a sum of zero: a NaN must show.
    float lse = sum == 0.0f ? NEGATIVE_INFINITY : (maxima[row] + log2(sum)) * LN_2;
    if (lane >= ROWS) return;
    row += first_row;
    if (piece.slot < 0) {
        Row of = row_of(p, piece.seq, row);
        if (of.valid) write_lse(p, of, lse);
    } else if (row < group_rows(p)) {
        global_pointer<float>(p.partial_lse)[(int64)piece.slot * group_rows(p) + row] = lse;
    }
}

/// Puts the group's columns of the result, of which each row is to be scaled, into rows.
DEVICE void transpose_result(const Sums& o, const float (&scale)[LANE_ROWS], uint32 result, int first_column) {
    int lane = unhoisted(lane_index());
    uint32 to = result + (lane / 16 * 8 + lane % 8) * RESULT_STRIDE + (first_column + warp_of_group() * 16 + lane / 8 % 2 * 8) * 2;
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

/// Writes the result's rows, by both warpgroups.
DEVICE void write_result(const DecodeParams& p, const OwnPiece& piece, int first_row, const unsigned char SHARED* result) {
    constexpr int WORDS = KV_LORA_RANK / 8;
    constexpr int STEP = WORKERS / WORDS;  // rows at a time
    int thread = unhoisted(thread_index());
    int local = thread / WORDS;
    int word = thread % WORDS;
    int rows = smaller(group_rows(p) - first_row, ROWS);
    const unsigned char SHARED* from = result + local * RESULT_STRIDE + word * 16;
    if (piece.slot >= 0) {
        uint16 GLOBAL* to = global_pointer<uint16>(p.partial_out) +
                            ((int64)piece.slot * group_rows(p) + first_row + local) * KV_LORA_RANK + word * 8;
        UNROLL for (int i = 0; i < ROWS; i += STEP) {
            if (local + i < rows) *(Word4 GLOBAL*)(to + i * KV_LORA_RANK) = *(const Word4 SHARED*)(from + i * RESULT_STRIDE);
        }
        return;
    }
    NO_UNROLL for (int i = 0; local + i < rows; i += STEP) {
        Row row = row_of(p, piece.seq, first_row + local + i);
        if (row.valid) store_output(output_row(p, row) + word * 8, *(const Word4 SHARED*)(from + i * RESULT_STRIDE));
    }
}

/// The two warpgroups: all tiles of the piece. `parity` is of the present phase of the barriers of copies. False if the piece was found
/// by `stale` lengths or pages that have changed.
DEVICE bool attend(const DecodeParams& p, const OwnPiece& piece, int first_row, int group, Softmax& softmax, bool stale, int parity,
                   unsigned char SHARED* shared, const Tiles& tiles, Signals signals) {
    // Chosen, not computed: the compiler then keeps operands in registers of the whole warp.
    int depth = group == 0 ? 0 : 64;
    int first_unit = group == 0 ? 0 : GROUP_UNITS;
    uint32 weights = tiles.base + WEIGHTS_AT;
    uint32 own_weights = weights + (group == 0 ? 0 : GROUP_ROWS * 128);
    float SHARED* highest_of = (float SHARED*)(shared + HIGHEST_AT) + group * GROUP_ROWS;
    float SHARED* factors = (float SHARED*)(shared + FACTOR_AT);
    Sums o = {};
    int slot = 0;
    int token = piece.begin;
    NO_UNROLL while (true) {
        float product[SUMS];
        multiply_keys(product, depth, tiles.base + QUERY_AT, tiles, slot, parity);
        products_wait<0>();
        float x[LOGITS];
        Float4 SHARED* given = (Float4 SHARED*)(shared + EXCHANGE_AT) + softmax.warp * WAVE + softmax.lane;
        UNROLL for (int i = 0; i < LOGITS; i += 4) {
            float give[4];
            UNROLL for (int j = 0; j < 4; j++) {
                x[i + j] = group == 0 ? product[i + j] : product[LOGITS + i + j];
                give[j] = group == 0 ? product[LOGITS + i + j] : product[i + j];
            }
            given[(i / 4 * GROUPS + (group ^ 1)) * GROUP_THREADS] = {give[0], give[1], give[2], give[3]};
        }
        bool first = token == piece.begin;
        bool changed = stale && first && signals.was_changed(shared);
        workers_barrier();
        if (changed) return false;  // no warp reads queries or tiles any more
        UNROLL for (int i = 0; i < LOGITS; i += 4) {
            Float4 other = given[(i / 4 * GROUPS + group) * GROUP_THREADS];
            x[i] += other.x;
            x[i + 1] += other.y;
            x[i + 2] += other.z;
            x[i + 3] += other.w;
        }
        bool raises = softmax.mask(p, x, token, first);
        if (piece.end - token < TILE_TOKENS) clear_values(shared + slot * TILE_BYTES, piece.end - token);
        float weight[LOGITS];
        softmax.weigh(weight, x);
        softmax.store(weight, own_weights);
        if (named_barrier_any(BOTH, WORKERS, raises)) {
            softmax.raise(x, first, highest_of, factors + group * GROUP_ROWS);
            softmax.weigh(weight, x);
            softmax.store(weight, own_weights);
            workers_barrier();
            UNROLL for (int i = 0; i < SUMS; i++) {
                float factor = factors[lane_row(softmax.lane, i / 4 * 2 + i % 2)];
                UNROLL for (int unit = 0; unit < GROUP_UNITS; unit++) o[unit][i] *= factor;
            }
        }
        softmax.add(weight);
        token += TILE_TOKENS;
        bool last = token >= piece.end;
        if (last) {
            softmax.tell((Summands SHARED*)(shared + EXCHANGE_AT) + group * GROUP_ROWS,
                         (float SHARED*)(shared + MAXIMA_AT) + group * GROUP_ROWS);
            barrier_arrive(signals.summands());
        }
        multiply_values(o, tiles.tile(slot) + first_unit * UNIT_BYTES, weights);
        if (last) break;
        products_wait<0>();
        if (lane_index() == 0) barrier_arrive(tiles.empty(slot));
        slot = slot + 1 < SLOTS ? slot + 1 : 0;
        parity ^= slot == 0;
    }
    barrier_wait(signals.factors(), 0);
    float scale[LANE_ROWS];
    UNROLL for (int i = 0; i < LANE_ROWS; i++) scale[i] = factors[lane_row(softmax.lane, i)];
    products_wait<0>();
    transpose_result(o, scale, tiles.base + QUERY_AT, first_unit * UNIT_COLUMNS);
    workers_barrier();
    write_result(p, piece, first_row, shared + QUERY_AT);
    return true;
}

/// The block's piece. What was written before this kernel may be `stale` at first, until it has waited; false if it was. Barriers are in
/// the phase of `parity`.
DEVICE bool work(const DecodeParams& p, const TensorMap& latent, const TensorMap& rope, unsigned char SHARED* shared, const Tiles& tiles,
                 bool stale, int parity) {
    int group = warpgroup_index();
    Signals signals = {tiles.base + SIGNALS_AT};
    const int GLOBAL* length_at = few_length(p);
    // A block's warps must agree what they find, also while lengths change.
    const int SHARED* lengths = (const int SHARED*)(shared + LENGTHS_AT);
    int length = stale ? lengths[lane_index() & (few_width(p) - 1)] : length_at ? load_now(length_at) : 0;
    int tokens = few_tokens(p, length);
    if (BESIDE_ROWS && group == GROUPS && warp_of_group() > 0) {  // only the other form has work for so many
        return !stale || !signals.was_changed(shared);
    }
    int block = unhoisted(block_index());
    int row_blocks = divide_up(group_rows(p), ROWS);
    int item = quotient(block, row_blocks);
    int first_row = (block - item * row_blocks) * ROWS;
    OwnPiece piece = own_piece(p, tokens, item);
    int early = smaller(divide_up(piece.end - piece.begin, TILE_TOKENS), SLOTS);
    if (group == GROUPS) {
        Loader loader;
        loader.turn(p, piece, piece.begin);
        if (stale) {
            loader.fetch(early, latent, rope);
            grid_dependency_wait();
            grid_dependency_launch();
        }
        // Queries first: what is asked for after tiles waits behind them.
        barrier_wait(signals.queries(), parity);
        NO_UNROLL for (int tile = 0; tile < early; tile++) loader.copy(tile, latent, rope, tiles, tile);
        if (stale) {
            tiles.skip(early);
            bool changed = length_at && load_now(length_at) != length;
            changed |= loader.page_now() != loader.page;
            changed = warp_any(changed);
            signals.tell_changed(shared, changed);
            if (changed) return false;
        }
        if (piece.begin >= piece.end) return true;
        loader.run(p, piece, latent, rope, tiles);
        finish_rows(p, piece, first_row, (const Summands SHARED*)(shared + EXCHANGE_AT), (const float SHARED*)(shared + MAXIMA_AT),
                    (float SHARED*)(shared + FACTOR_AT), signals);
        return true;
    }
    Queries queries;
    Softmax softmax;
    softmax.lane = unhoisted(lane_index());
    softmax.warp = warp_of_group();
    queries.find(p, piece, first_row);
    softmax.start(p, piece, first_row + group * GROUP_ROWS);
    if (stale) {
        grid_dependency_wait();
        grid_dependency_launch();
    }
    if (piece.begin < piece.end) queries.copy(shared + QUERY_AT);
    barrier_arrive(signals.queries());
    if (piece.begin >= piece.end) return !stale || !signals.was_changed(shared);
    copy_wait<0>();
    publish_to_async();
    workers_barrier();
    // Knowing that there are two groups also keeps operands in those registers.
    return attend(p, piece, first_row, group & 1, softmax, stale, parity, shared, tiles, signals);
}

/// Prepares the block, and notes lengths that may be out of date, by its first two warps; all threads must meet before they go on.
DEVICE void prepare(const DecodeParams& p, const TensorMap& latent, const TensorMap& rope) {
    SHARED_MEMORY_1024(shared);
    if (thread_index() < WAVE) {
        const int GLOBAL* length_at = few_length(p);
        ((int SHARED*)(shared + LENGTHS_AT))[thread_index()] = length_at ? load_now(length_at) : 0;
    }
    if (thread_index() == WAVE) {
        Tiles tiles = {shared_address(shared), shared_address(shared) + BARRIERS_AT};
        tiles.init(GROUPS * GROUP_WARPS);
        Signals{tiles.base + SIGNALS_AT}.init();
        barrier_publish_init();
        prefetch_map(latent);
        if constexpr (ROPE_DIM > 0) prefetch_map(rope);
    }
}

/// Whether there are few tokens by the lengths that were noted: the same answer in all lanes of a warp, which the compiler knows.
DEVICE bool are_noted_few(const DecodeParams& p) {
    SHARED_MEMORY_1024(shared);
    int length = ((const int SHARED*)(shared + LENGTHS_AT))[lane_index() & (few_width(p) - 1)];
    return !warp_any(!are_few(p, few_tokens(p, length)));
}

/// The block's piece, by lengths and pages that may be out of date and, if they are, once more; or, if all threads have `waited` for what
/// came before, by what stands.
DEVICE void serve(const DecodeParams& p, const TensorMap& latent, const TensorMap& rope, bool waited) {
    SHARED_MEMORY_1024(shared);
    Tiles tiles = {shared_address(shared), shared_address(shared) + BARRIERS_AT};
    bool stale = !waited;
    int parity = 0;
    // One text serves both times: it is most of the form's.
    NO_UNROLL while (!work(p, latent, rope, shared, tiles, stale, parity)) {
        tiles.await(0);  // by all: who has not looked at every slot could take this phase for one further on
        stale = false;
        parity = 1;
    }
}

}  // namespace few
