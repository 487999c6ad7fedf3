// Stage 1 of MLA decode for Hopper over an fp8 cache, tokens as the rows of the products: 64 query rows in a block, tiles of 64 tokens.
//
// As in the keys form, e4m3 becomes f16 on its way from shared memory into the registers of an operand, so shared memory holds bytes
// alone. One or two warps, the loaders, keep the ring filled. Two warpgroups, the sides, compute: of every second tile, its own, a side
// computes logits and weights, and of every tile it multiplies the values of its half of the columns with the weights. A side
//
//   computes the logits of its tile n and, from the maxima that the other side left with tile n - 1, its weights, which it hands over;
//   adds the values of tile n - 1, weighed by the other side, and those of tile n.
//
// So the sides are half a period apart, and one's softmax runs beside the other's products. A row's maximum is raised only when a logit
// exceeds it by LAZY_MAX. What has been summed is then multiplied by a factor, which goes with the tile's weights: each side does so
// before it adds that tile.
//
// Weights have three places, by tile. That of tile n is written again with tile n + 3, by the other side: when it has seen the weights
// of tile n + 2, which this side hands over after it has added tile n; itself it has, too.

using Sums = float[2 * SIDE_UNITS][SUMS];

struct Side {
    int side;
    unsigned char SHARED* shared;
    const Units& units;
    float sum[LANE_ROWS];  // this lane's share, of the side's own tiles

    DEVICE uint32 ready(int n) const { return units.barriers - BARRIERS_AT + READY_AT + n % WEIGHTS_PLACES * 8; }
    DEVICE void wait_ready(int n) const { barrier_wait(ready(n), n / WEIGHTS_PLACES & 1); }
    DEVICE int SHARED& raised(int n) const { return ((int SHARED*)(shared + RAISED_AT))[n % WEIGHTS_PLACES]; }
    /// What was summed before a tile is multiplied by this, for a lane's rows `2 j` and `2 j + 1`.
    DEVICE Word2 SHARED& factors(int n, int j) const {
        return ((Word2 SHARED*)(shared + FACTOR_AT))[(n % WEIGHTS_PLACES * ROWS + j * 8) / 2 + unhoisted(lane_index()) % 4];
    }

    /// Starts the logits of the tile at a place: its tokens x the queries, unit by unit as they come in.
    DEVICE void multiply_keys(float (&x)[SUMS], uint32 queries, UnitPlace place) const {
        auto load = [&](Bytes& bytes, int part) {
            int unit = place.index + part / 2;
            if (part % 2 == 0) barrier_wait(units.full(unit), place.parity);
            load_keys(bytes, shared + unit * UNIT_BYTES, part % 2, part == LATENT_UNITS);
        };
        auto multiply = [&](int part, int step, const uint32* a) {
            product_64_held(x, a, rows_operand(queries + part * QUERY_UNIT_BYTES + step * 32), part + step > 0);
        };
        multiply_widened<QUERY_UNITS>(load, [](uint32 (&a)[4], const uint32 (&bytes)[2]) { widen_keys(a, bytes); }, multiply);
    }

    /// Adds this side's columns of the tile's values, weighed.
    DEVICE void multiply_values(Sums& o, uint32 weights, UnitPlace place) const {
        int first = place.index + side * SIDE_UNITS;
        auto load = [&](Bytes& bytes, int part) { load_values(bytes, shared_address(shared) + (first + part / 2) * UNIT_BYTES, part % 2); };
        auto multiply = [&](int part, int step, const uint32* a) { product_64_held(o[part], a, rows_operand(weights + step * 32), 1); };
        multiply_widened<2 * SIDE_UNITS>(load, [](uint32 (&a)[4], const uint32 (&bytes)[2]) { widen_values(a, bytes); }, multiply);
    }

    /// Turns products into logits, less the maxima so far.
    DEVICE void subtract_maxima(const DecodeParams& p, float (&x)[SUMS], const RowState SHARED* states) const {
        const Float4 SHARED* pairs = (const Float4 SHARED*)states + unhoisted(lane_index()) % 4;
        float factor = p.sm_scale * p.kv_scale * LOG2_E;
        if (p.softcap != 0.0f) {
            UNROLL for (int i = 0; i < SUMS; i++) x[i] *= i % 2 == 0 ? pairs[i / 4 * 4].x : pairs[i / 4 * 4].z;
            scale_logits(p, x);
            UNROLL for (int i = 0; i < SUMS; i++) x[i] -= i % 2 == 0 ? pairs[i / 4 * 4].y : pairs[i / 4 * 4].w;
            return;
        }
        UNROLL for (int j = 0; j < SUMS / 4; j++) {
            Float4 pair = pairs[j * 4];
            pair.x *= factor;
            pair.z *= factor;
            UNROLL for (int i = 4 * j; i < 4 * j + 4; i++) x[i] = i % 2 == 0 ? x[i] * pair.x - pair.y : x[i] * pair.z - pair.w;
        }
    }

    /// Hides what a row does not see of the tile that begins at a token.
    DEVICE void mask(float (&x)[SUMS], const int SHARED* limit, int token, int begin) const {
        int lane = unhoisted(lane_index());
        int warp = warp_of_group();
        UNROLL for (int i = 0; i < SUMS; i++) {
            int at = token + warp * 16 + lane / 4 + i / 2 % 2 * 8;
            if (at >= limit[lane_row(lane, i / 4 * 2 + i % 2)] || at < begin) x[i] = NEGATIVE_INFINITY;
        }
    }

    /// Raises the maxima that need it; those of a piece's first tile become what they are.
    DEVICE void raise(float (&x)[SUMS], RowState SHARED* states, int n, bool first) {
        int lane = unhoisted(lane_index());
        int warp = warp_of_group();
        float SHARED* exchange = (float SHARED*)(shared + EXCHANGE_AT) + side * SIDE_WARPS * ROWS;
        UNROLL for (int i = 0; i < LANE_ROWS; i++) {
            float highest = maximum(x[i / 2 * 4 + i % 2], x[i / 2 * 4 + i % 2 + 2]);
            UNROLL for (int mask = 4; mask < 32; mask *= 2) highest = maximum(highest, shuffle_xor(highest, mask));
            if (lane < 4) exchange[warp * ROWS + lane_row(lane, i)] = highest;
        }
        side_barrier(side);
        UNROLL for (int i = 0; i < LANE_ROWS; i++) {
            int row = lane_row(lane, i);
            float highest = exchange[row];
            UNROLL for (int other = 1; other < SIDE_WARPS; other++) highest = maximum(highest, exchange[other * ROWS + row]);
            float by = highest > (first ? NO_MAXIMUM : LAZY_MAX) ? highest : 0.0f;
            float factor = first ? 1.0f : exp2(-by);
            x[i / 2 * 4 + i % 2] -= by;
            x[i / 2 * 4 + i % 2 + 2] -= by;
            sum[i] *= factor;
            if (warp == 0 && lane < 4) {
                states[row].maximum += by;
                ((float SHARED*)(shared + FACTOR_AT))[n % WEIGHTS_PLACES * ROWS + row] = factor;
            }
        }
    }

    /// Stores the weights of this warp's sixteen tokens, and adds them up.
    DEVICE void store_weights(float (&x)[SUMS], uint32 weights) {
        uint32 word[SUMS / 2];
        UNROLL for (int i = 0; i < SUMS; i++) {
            x[i] = exp2(x[i]);
            sum[i / 4 * 2 + i % 2] += x[i];
        }
        UNROLL for (int i = 0; i < SUMS; i += 2) word[i / 2] = pack_f16(x[i], x[i + 1]);
        int lane = unhoisted(lane_index());
        int chunk = warp_of_group() * 2 + lane / 8 % 2;
        UNROLL for (int i = 0; i < SUMS / 2; i += 4) {
            int row = (i / 2 + lane / 16) * 8 + lane % 8;
            store_matrix_trans(weights + row * 128 + (chunk ^ lane % 8) * 16, word[i], word[i + 1], word[i + 2], word[i + 3]);
        }
        publish_to_async();
    }

    /// Waits for the other side's weights of a tile, and multiplies this side's sums of weights as they ask.
    DEVICE void take_over(int n) {
        wait_ready(n);
        if (!warp_any(raised(n))) return;
        UNROLL for (int j = 0; j < LANE_ROWS / 2; j++) {
            Word2 factor = factors(n, j);
            sum[2 * j] *= bits_float(factor.x);
            sum[2 * j + 1] *= bits_float(factor.y);
        }
    }

    /// Adds a tile to the sums of the result.
    DEVICE void add(Sums& o, int n) {
        wait_ready(n);
        if (warp_any(raised(n))) {
            UNROLL for (int j = 0; j < LANE_ROWS / 2; j++) {
                Word2 factor = factors(n, j);
                UNROLL for (int part = 0; part < 2 * SIDE_UNITS; part++) {
                    o[part][4 * j] *= bits_float(factor.x);
                    o[part][4 * j + 1] *= bits_float(factor.y);
                    o[part][4 * j + 2] *= bits_float(factor.x);
                    o[part][4 * j + 3] *= bits_float(factor.y);
                }
            }
        }
        UnitPlace place = place_of(n);
        multiply_values(o, operand_address(units.base) + WEIGHTS_AT + n % WEIGHTS_PLACES * WEIGHTS_BYTES, place);
        warp_barrier();
        int lane = lane_index();
        if (lane < SIDE_UNITS) barrier_arrive(units.empty(place.index + side * SIDE_UNITS + lane));
        products_wait<0>();
        UNROLL for (int part = 0; part < 2 * SIDE_UNITS; part++) settle(o[part]);
    }
};

/// Clears the cached rows of a tile from `valid` on, by one side: weights of zero do not undo a NaN.
DEVICE void clear_tile(unsigned char SHARED* tile, int valid) {
    NO_UNROLL for (int unit = 0; unit < CACHED_UNITS; unit++) {
        NO_UNROLL for (int word = valid * 8 + thread_index() % SIDE_THREADS; word < TILE_TOKENS * 8; word += SIDE_THREADS) {
            *(Word4 SHARED*)(tile + unit * UNIT_BYTES + word * 16) = {0, 0, 0, 0};
        }
    }
    publish_to_async();
}

/// Tells the other side a side's sums of weights. To be followed by a barrier of both.
DEVICE void tell_sums(const float (&sum)[LANE_ROWS], int side, unsigned char SHARED* shared) {
    int lane = unhoisted(lane_index());
    float SHARED* told = (float SHARED*)(shared + EXCHANGE_AT) + (side * SIDE_WARPS + warp_of_group()) * ROWS;
    UNROLL for (int i = 0; i < LANE_ROWS; i++) {
        float share = sum[i];
        UNROLL for (int mask = 4; mask < 32; mask *= 2) share += shuffle_xor(share, mask);
        if (lane < 4) told[lane_row(lane, i)] = share;
    }
}

/// Says what each row's sums are to be multiplied by, and writes the LSE: a thread for each row.
DEVICE void weigh_rows(const DecodeParams& p, int side, int turn, unsigned char SHARED* shared) {
    int row = thread_index() % SIDE_THREADS;
    if (row >= ROWS) return;
    float total = 0.0f;
    UNROLL for (int i = 0; i < SIDES * SIDE_WARPS; i++) total += ((const float SHARED*)(shared + EXCHANGE_AT))[i * ROWS + row];
    ((float SHARED*)(shared + SCALE_AT))[side * ROWS + row] = result_scale(p, total, alone(turn, shared) ? -1 : 0);
    uint64 to = addresses(turn, TO_LSE, shared)[row];
    // Emptiness is a sum of zero: a NaN must show.
    float lse = total == 0.0f ? NEGATIVE_INFINITY : (row_states(turn, shared)[row].maximum + log2(total)) * LN_2;
    if (side == 0 && to != 0) *global_pointer<float>(to) = lse;
}

/// Writes a side's half of a piece's result.
DEVICE void write_half(const Sums& o, int side, int turn, unsigned char SHARED* shared) {
    int lane = unhoisted(lane_index());
    int column = side * HALF + warp_of_group() * 16 + lane / 4 * 2;
    UNROLL for (int i = 0; i < LANE_ROWS; i++) {
        int row = lane_row(lane, i);
        float scale = ((const float SHARED*)(shared + SCALE_AT))[side * ROWS + row];
        uint64 to = addresses(turn, TO_RESULT, shared)[row];
        if (to == 0) continue;
        UNROLL for (int part = 0; part < 2 * SIDE_UNITS; part++) {
            float low = o[part][i / 2 * 4 + i % 2] * scale, high = o[part][i / 2 * 4 + i % 2 + 2] * scale;
            // A row that saw nothing is zero even beside values that are not finite.
            global_pointer<uint32>(to)[(column + part * UNIT_COLUMNS) / 2] = scale == 0.0f ? 0 : pack(low, high);
        }
    }
}

/// A warpgroup of the two.
DEVICE void attend(const DecodeParams& p, int item, int first_row, int side, unsigned char SHARED* shared, const Units& units) {
    Part part = find_part(p, item);
    // Queries are asked for before the loaders fill the memory's queues.
    auto ask = [&] { if (part.seq < p.batch * num_groups(p)) load_queries(p, part.seq, first_row, shared); };
    if (!p.settled) ask();
    Cursor at(p, part);
    if (p.settled) {
        take_turn();
        ask();
    }
    if (!warp_any(at.more)) return;
    if (at.seq != part.seq) {  // the part's first sequence is empty
        copy_wait<0>();
        load_queries(p, at.seq, first_row, shared);
    }
    uint32 queries = operand_address(units.base) + QUERY_AT;
    int turn = 0;  // of two descriptions of a piece
    int base = 0;  // the piece's first tile among the block's
    int begin = at.seq == part.seq ? part.token : 0;
    NO_UNROLL while (true) {
        if (side == 1) describe(p, at, first_row, turn, shared);
        receive_queries(p, turn, shared);
        pair_barrier();
        RowState SHARED* states = row_states(turn, shared);
        const int SHARED* limit = limits(turn, shared);
        int least = smaller(limit[lane_index()], limit[lane_index() + 32]);  // of all rows
        UNROLL for (int mask = 1; mask < 32; mask *= 2) least = smaller(least, shuffle_xor(least, mask));
        int tiles = from_lane(divide_up(at.end - at.token, TILE_TOKENS), 0);
        Sums o = {};
        Side self = {side, shared, units, {}};
        NO_UNROLL for (int i = (base ^ side) & 1; i <= tiles; i += 2) {
            int n = base + i;
            if (i < tiles) {
                UnitPlace place = place_of(n);
                float x[SUMS];
                self.multiply_keys(x, queries, place);
                products_wait<0>();
                settle(x);
                if constexpr (ROPE_DIM > 0) {
                    warp_barrier();
                    if (lane_index() == 0) barrier_arrive(units.empty(place.index + CACHED_UNITS));
                }
                if (i > 0) self.take_over(n - 1);
                self.subtract_maxima(p, x, states);
                int token = at.token + i * TILE_TOKENS;
                if (token + TILE_TOKENS > least || token < begin) self.mask(x, limit, token, begin);
                float highest = x[0];
                UNROLL for (int j = 1; j < SUMS; j++) highest = maximum(highest, x[j]);
                bool raises = named_barrier_any(2 + side, SIDE_THREADS, i == 0 || highest > LAZY_MAX);
                if (raises) self.raise(x, states, n, i == 0);
                self.raised(n) = raises && i > 0;
                self.store_weights(x, units.base + WEIGHTS_AT + n % WEIGHTS_PLACES * WEIGHTS_BYTES);
                if (!GATHERS && at.end - token < TILE_TOKENS) clear_tile(shared + place.index * UNIT_BYTES, at.end - token);
                barrier_arrive(self.ready(n));  // each lane for what it has stored
            } else if (i > 0) {
                self.take_over(n - 1);
            }
            NO_UNROLL for (int m = larger(n - 1, base); m <= n && m < base + tiles; m++) self.add(o, m);
        }
        tell_sums(self.sum, side, shared);
        pair_barrier();
        at.token += (tiles - 1) * TILE_TOKENS;
        at.advance(p, part);
        bool more = warp_any(at.more);
        if (more) load_queries(p, at.seq, first_row, shared);
        weigh_rows(p, side, turn, shared);
        side_barrier(side);
        write_half(o, side, turn, shared);
        if (!more) break;
        base += tiles;
        begin = 0;
        turn ^= 1;
    }
}

#ifdef SPLIT_SHARED_BYTES
static_assert(SHARED_BYTES <= SPLIT_SHARED_BYTES, "select_sm90.rs counts the same");
#endif

KERNEL_ONE_BLOCK(THREADS)
mla_decode_split(const __grid_constant__ DecodeParams p, const __grid_constant__ TensorMap latent,
                 const __grid_constant__ TensorMap rope) {
    SHARED_MEMORY_1024(shared);
    Units units = {shared_address(shared), shared_address(shared) + BARRIERS_AT};
    units.init(SIDE_WARPS, GATHERS ? Gather::ARRIVALS : 1);
    if (thread_index() == 0) {
        if constexpr (!GATHERS) prefetch_map(latent);
        if constexpr (!GATHERS && ROPE_DIM > 0) prefetch_map(rope);
        for (int place = 0; place < WEIGHTS_PLACES; place++) barrier_init(units.base + READY_AT + place * 8, SIDE_THREADS);
        barrier_publish_init();
    }
    if (!p.settled) take_turn();
    // Lengths are looked up once the schedule has told which: by then they are near.
    if (thread_index() * 32 < p.batch) prefetch(global_pointer<const int>(p.seq_lens) + thread_index() * 32);
    barrier();

    int row_blocks = divide_up(group_rows(p), BLOCK_ROWS);
    int first_row = block_index() % row_blocks * BLOCK_ROWS;
    int item = block_index() / row_blocks;
    int role = warpgroup_index();
    if (role < SIDES) {
        grow_registers<SIDE_REGISTERS>();
        // Knowing that there are two keeps operands in registers of the whole warp.
        attend(p, item, first_row, role & 1, shared, units);
    } else {
        shrink_registers<LOADER_REGISTERS>();
        int loader = warp_of_group();
        if constexpr (GATHERS) {
            gather_units(p, item, units);
        } else if (loader < LOADERS) {
            load_units(p, item, loader, LOADERS, latent, rope, units);
        }
    }
}
