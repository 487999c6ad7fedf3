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

/// Products whose first operand is widened on its way into registers: what is read for four of them, of depth 64 together, is widened
/// one product ahead. Each is commited by itself: a warp that begins products of registers waits until the one before has read its own,
/// so more at once would only keep it from widening.
template <typename Widen, typename Multiply>
DEVICE void multiply_part(uint32 (&a)[4][4], const Bytes& bytes, Widen widen, Multiply multiply) {
    UNROLL for (int step = 0; step < 4; step++) {
        products_wait<3>();
        widen(a[step], bytes[step]);
        products_begin();
        multiply(step, a[step]);
        products_commit();
    }
}

/// Computes products of a tile's keys with the queries, unit by unit as they come in.
DEVICE void multiply_keys(float (&x)[SUMS], int n, const unsigned char SHARED* shared, const Units& units) {
    UnitPlace place = place_of(n);
    int lane = lane_index();
    const unsigned char SHARED* line = shared + place.index * UNIT_BYTES + (warp_of_group() * 16 + lane / 4) * 128;
    int chunk = lane % 4 * 2 ^ lane / 4;
    uint32 queries = operand_address(units.base) + QUERY_AT;
    uint32 full = units.full(place.index);
    uint32 a[4][4];
    Bytes bytes[2];
    auto load = [&](Bytes& to, const unsigned char SHARED* from) {
        Word4 low = *(const Word4 SHARED*)from;
        Word4 high = *(const Word4 SHARED*)(from + 8 * 128);
        uint32 words[2][4] = {{low.x, low.y, low.z, low.w}, {high.x, high.y, high.z, high.w}};
        UNROLL for (int step = 0; step < 4; step++) {
            to[step][0] = words[0][step];
            to[step][1] = words[1][step];
        }
    };
    UNROLL for (int i = 0; i < SUMS; i++) x[i] = 0.0f;
    auto multiply = [&](const Bytes& from, int part) {
        multiply_part(a, from, [](uint32 (&a)[4], const uint32 (&bytes)[2]) { widen_keys(a, bytes); }, [&](int step, const uint32* a) {
            product_64_held(x, a, rows_operand(queries + part * QUERY_UNIT_BYTES, step * 32), 1);
        });
    };
    barrier_wait(full, place.parity);
    load(bytes[0], line + chunk * 16);
    bool there = TILE_UNITS > 1 && barrier_passed(full + 8, place.parity);
    NO_UNROLL for (int unit = 0; unit < CACHED_UNITS; unit++) {
        load(bytes[1], line + (chunk ^ 1) * 16);
        multiply(bytes[0], 2 * unit);
        line += UNIT_BYTES;
        full += 8;
        if (unit + 1 < TILE_UNITS) {
            if (!there) barrier_wait(full, place.parity);
            if (unit + 1 == CACHED_UNITS) chunk = lane % 4 ^ lane / 4;  // rotary
            load(bytes[0], line + chunk * 16);
            there = unit + 2 < TILE_UNITS && barrier_passed(full + 8, place.parity);
        }
        multiply(bytes[1], 2 * unit + 1);
    }
    if constexpr (ROPE_DIM > 0) {
        multiply(bytes[0], LATENT_UNITS);
        warp_barrier();
        if (lane == 0) barrier_arrive(units.empty(place.index + CACHED_UNITS));
    }
    products_wait<0>();
    settle(x);
}

/// Starts to add a side's columns of a tile's values, weighed.
DEVICE void multiply_values(Sums& o, int n, int side, const Units& units) {
    int first = place_of(n).index + side * SIDE_UNITS;
    uint32 weights = operand_address(units.base) + WEIGHTS_AT + n % WEIGHTS_PLACES * WEIGHTS_BYTES;
    uint32 a[4][4];
    Bytes bytes[2];
    load_values(bytes[0], units.unit(first), 0);
    UNROLL for (int part = 0; part < 2 * SIDE_UNITS; part++) {
        if (part + 1 < 2 * SIDE_UNITS) load_values(bytes[(part + 1) % 2], units.unit(first + (part + 1) / 2), (part + 1) % 2);
        multiply_part(a, bytes[part % 2], [](uint32 (&a)[4], const uint32 (&bytes)[2]) { widen_values(a, bytes); },
                      [&](int step, const uint32* a) { product_64_held(o[part], a, rows_operand(weights, step * 32), 1); });
    }
    warp_barrier();
    if (lane_index() < SIDE_UNITS) barrier_arrive(units.empty(first + lane_index()));
}
/// Waits for them.
DEVICE void settle_values(Sums& o) {
    products_wait<0>();
    UNROLL for (int part = 0; part < 2 * SIDE_UNITS; part++) settle(o[part]);
}

struct Side {
    int side;
    unsigned char SHARED* shared;
    float sum[LANE_ROWS];  // this lane's share, of the side's own tiles

    DEVICE int SHARED& raised(int n) const { return ((int SHARED*)(shared + RAISED_AT))[n % WEIGHTS_PLACES]; }
    /// What was summed before a tile is multiplied by this, for a lane's rows `2 j` and `2 j + 1`.
    DEVICE Word2 SHARED& factors(int n, int j) const {
        return ((Word2 SHARED*)(shared + FACTOR_AT))[(n % WEIGHTS_PLACES * ROWS + j * 8) / 2 + unhoisted(lane_index()) % 4];
    }

    /// Turns products into logits, less the maxima so far.
    DEVICE void subtract_maxima(const DecodeParams& p, float (&x)[SUMS], const RowState SHARED* states) const {
        const Float4 SHARED* pairs = (const Float4 SHARED*)states + unhoisted(lane_index()) % 4;
        if (unlikely(p.softcap != 0.0f)) {
            UNROLL for (int i = 0; i < SUMS; i++) x[i] *= i % 2 == 0 ? pairs[i / 4 * 4].x : pairs[i / 4 * 4].z;
            scale_logits(p, x);
            UNROLL for (int i = 0; i < SUMS; i++) x[i] -= i % 2 == 0 ? pairs[i / 4 * 4].y : pairs[i / 4 * 4].w;
            return;
        }
        UNROLL for (int j = 0; j < SUMS / 4; j++) {
            Float4 pair = pairs[j * 4];
            UNROLL for (int i = 4 * j; i < 4 * j + 4; i++) x[i] = i % 2 == 0 ? x[i] * pair.x - pair.y : x[i] * pair.z - pair.w;
        }
    }

    /// Hides what rows do not see of the tile that begins at a token.
    DEVICE void mask(float (&x)[SUMS], const int SHARED* limit, int token, int begin) const {
        int lane = unhoisted(lane_index());
        int at[2];
        UNROLL for (int e = 0; e < 2; e++) {
            at[e] = token + warp_of_group() * 16 + lane / 4 + e * 8;
            if (at[e] < begin) at[e] = 0x7fffffff;
        }
        UNROLL for (int j = 0; j < SUMS / 4; j++) {
            Word2 limits = *(const Word2 SHARED*)(limit + j * 8 + lane % 4 * 2);
            UNROLL for (int e = 0; e < 4; e++) {
                if (at[e / 2] >= (int)(e % 2 == 0 ? limits.x : limits.y)) x[4 * j + e] = NEGATIVE_INFINITY;
            }
        }
    }

    /// Raises the maxima that need it; those of a piece's first tile become what they are.
    DEVICE void raise(float (&x)[SUMS], RowState SHARED* states, int n, bool first) {
        int lane = unhoisted(lane_index());
        float SHARED* exchange = (float SHARED*)(shared + EXCHANGE_AT) + side * SIDE_WARPS * ROWS;
        // Eight lanes have sixteen rows in common: each keeps the half of them that the bits of its number say.
        float highest[LANE_ROWS];
        UNROLL for (int i = 0; i < LANE_ROWS; i++) highest[i] = maximum(x[i / 2 * 4 + i % 2], x[i / 2 * 4 + i % 2 + 2]);
        int kept = 0;
        UNROLL for (int step = 0; step < 3; step++) {
            const int count = LANE_ROWS / 2 >> step, mask = 16 >> step;
            bool upper = (lane & mask) != 0;
            kept += upper ? count : 0;
            UNROLL for (int i = 0; i < LANE_ROWS / 2; i++) {
                if (i >= count) continue;
                float other = shuffle_xor(upper ? highest[i] : highest[i + count], mask);
                highest[i] = maximum(upper ? highest[i + count] : highest[i], other);
            }
        }
        float SHARED* own = exchange + warp_of_group() * ROWS + lane_row(lane, kept);
        own[0] = highest[0];
        own[1] = highest[1];
        side_barrier(side);
        int row = thread_index() % SIDE_THREADS;
        if (row < ROWS) {
            float highest = exchange[row];
            UNROLL for (int other = 1; other < SIDE_WARPS; other++) highest = maximum(highest, exchange[other * ROWS + row]);
            float by = highest > (first ? NO_MAXIMUM : LAZY_MAX) ? highest : 0.0f;
            exchange[row] = by;
            states[row].maximum += by;
            ((float SHARED*)(shared + FACTOR_AT))[n % WEIGHTS_PLACES * ROWS + row] = first ? 1.0f : exp2(-by);
        }
        side_barrier(side);
        UNROLL for (int j = 0; j < SUMS / 4; j++) {
            Word2 by = *(const Word2 SHARED*)(exchange + j * 8 + lane % 4 * 2);
            UNROLL for (int e = 0; e < 4; e++) x[4 * j + e] -= bits_float(e % 2 == 0 ? by.x : by.y);
        }
        if (!first) rescale_weights(n);
    }

    /// Stores the weights of this warp's sixteen tokens, and adds them up.
    DEVICE void store_weights(const float (&x)[SUMS], int n) {
        uint32 weights = shared_address(shared) + WEIGHTS_AT + n % WEIGHTS_PLACES * WEIGHTS_BYTES;
        int lane = unhoisted(lane_index());
        uint32 to = weights + (lane / 16 * 8 + lane % 8) * 128 + ((warp_of_group() * 2 + lane / 8 % 2) ^ lane % 8) * 16;
        UNROLL for (int i = 0; i < SUMS; i += 8) {
            float weight[8];
            UNROLL for (int e = 0; e < 8; e++) {
                weight[e] = exp2(x[i + e]);
                sum[(i + e) / 4 * 2 + e % 2] += weight[e];
            }
            store_matrix_trans(to + i / 4 * 1024, pack_f16(weight[0], weight[1]), pack_f16(weight[2], weight[3]),
                               pack_f16(weight[4], weight[5]), pack_f16(weight[6], weight[7]));
        }
        publish_to_async();
    }

    /// Multiplies this side's sums of weights as a tile asks.
    DEVICE void rescale_weights(int n) {
        UNROLL for (int j = 0; j < LANE_ROWS / 2; j++) {
            Word2 factor = factors(n, j);
            sum[2 * j] *= bits_float(factor.x);
            sum[2 * j + 1] *= bits_float(factor.y);
        }
    }
    /// Likewise what it has summed of the result.
    DEVICE void rescale(Sums& o, int n) const {
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

    /// Waits for the other side's weights of a tile; whether it raised maxima. Also for this side: all of its warps are here.
    DEVICE bool take_over(int n) {
        wait_for_weights(side);
        if (!warp_any(raised(n))) return false;
        rescale_weights(n);
        return true;
    }

    /// Makes weights of a tile's logits, less the maxima so far, and hands them over; whether it raised maxima.
    DEVICE bool weigh(float (&x)[SUMS], RowState SHARED* states, int n, bool first) {
        float highest[4] = {x[0], x[1], x[2], x[3]};
        UNROLL for (int i = 4; i < SUMS; i++) highest[i % 4] = maximum(highest[i % 4], x[i]);
        bool exceeds = first || maximum(maximum(highest[0], highest[1]), maximum(highest[2], highest[3])) > LAZY_MAX;
        bool raises = named_barrier_any(2 + side, SIDE_THREADS, exceeds);
        if (raises) raise(x, states, n, first);
        store_weights(x, n);
        if (thread_index() % SIDE_THREADS == 0) raised(n) = raises && !first;
        tell_weights(side);
        side_barrier(side);
        return raises && !first;
    }
};

/// Clears the cached rows of a tile from `valid` on, by one side: weights of zero do not undo a NaN.
DEVICE void clear_tile(unsigned char SHARED* tile, int valid, int side) {
    side_barrier(side);  // no warp reads its keys any more
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
DEVICE void write_half(Sums& o, int side, int turn, unsigned char SHARED* shared) {
    int lane = unhoisted(lane_index());
    const float SHARED* scales = (const float SHARED*)(shared + SCALE_AT) + side * ROWS + lane % 4 * 2;
    float scale[LANE_ROWS];
    bool empty = false;
    UNROLL for (int i = 0; i < LANE_ROWS; i++) {
        scale[i] = scales[i / 2 * 8 + i % 2];
        empty |= scale[i] == 0.0f;
    }
    if (empty) {  // a row that saw nothing is zero even beside values that are not finite
        UNROLL for (int part = 0; part < 2 * SIDE_UNITS; part++) {
            UNROLL for (int i = 0; i < SUMS; i++) {
                if (scale[i / 4 * 2 + i % 2] == 0.0f) o[part][i] = 0.0f;
            }
        }
    }
    int column = side * HALF + warp_of_group() * 16 + lane / 4 * 2;
    UNROLL for (int i = 0; i < LANE_ROWS; i++) {
        uint64 to = addresses(turn, TO_RESULT, shared)[lane_row(lane, i)];
        if (to == 0) continue;
        uint32 GLOBAL* row = global_pointer<uint32>(to + column * 2);
        UNROLL for (int part = 0; part < 2 * SIDE_UNITS; part++) {
            const float* x = o[part] + i / 2 * 4 + i % 2;
            row[part * UNIT_COLUMNS / 2] = pack(x[0] * scale[i], x[2] * scale[i]);
        }
    }
}

/// A warpgroup of the two.
DEVICE void attend(const DecodeParams& p, int side, unsigned char SHARED* shared, const Units& units) {
    begin_part(p, shared, side);
    pair_barrier();
    if (warp_any(piece_of(0, shared).end == 0)) return;
    int turn = 0;  // of two descriptions of a piece
    int base = 0;  // the piece's first tile among the block's
    NO_UNROLL while (true) {
        if (side == 1) describe(p, turn, shared);
        copy_wait<0>();
        if (!GATHERS && base == 0) named_barrier_arrive(QUERIES_BARRIER, QUERIES_BARRIER_THREADS);
        receive_queries(p, turn, shared);
        pair_barrier();
        RowState SHARED* states = row_states(turn, shared);
        const Piece SHARED& piece = piece_of(turn, shared);
        int tiles = from_lane(divide_up(piece.end - piece.token, TILE_TOKENS), 0);
        Sums o = {};
        float x[SUMS];
        Side self = {side, shared, {}};
        // Of whose tokens all rows see all: the first row sees least, but for those that do not exist, which come last.
        int seen_from = piece.token < piece.begin, seen_to = (smaller(limits(turn, shared)[0], limits(turn, shared)[ROWS - 1]) - piece.token) / TILE_TOKENS;
        int i = (base ^ side) & 1;
        NO_UNROLL for (; i <= tiles; i += 2) {
            int n = base + i;
            bool own = i < tiles;
            if (own) multiply_keys(x, n, shared, units);
            bool raised[2] = {i > 0 && self.take_over(n - 1), false};
            if (own) {
                self.subtract_maxima(p, x, states);
                if (i < seen_from || i >= seen_to) self.mask(x, limits(turn, shared), piece.token + i * TILE_TOKENS, piece.begin);
                if (!GATHERS && i + 1 == tiles) clear_tile(shared + place_of(n).index * UNIT_BYTES, piece.end - piece.token - i * TILE_TOKENS, side);
                raised[1] = self.weigh(x, states, n, i == 0);
            }
            NO_UNROLL for (int m = i > 0 ? n - 1 : n; m < n + own; m++) {
                if (m == n ? raised[1] : raised[0]) {
                    settle_values(o);
                    self.rescale(o, m);
                }
                multiply_values(o, m, side, units);
            }
            settle_values(o);
        }
        tell_sums(self.sum, side, shared);
        pair_barrier();
        bool more = warp_any(piece_of(turn ^ 1, shared).end > 0);
        if (more) load_queries(p, piece_of(turn ^ 1, shared).seq, shared);
        weigh_rows(p, side, turn, shared);
        side_barrier(side);
        write_half(o, side, turn, shared);
        if (!more) break;
        base += tiles;
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
        int row_blocks = divide_up(group_rows(p), BLOCK_ROWS);
        item_of(shared) = quotient(block_index(), row_blocks);
        first_row_of(shared) = (block_index() - item_of(shared) * row_blocks) * BLOCK_ROWS;
        if constexpr (!GATHERS) prefetch_map(latent);
        if constexpr (!GATHERS && ROPE_DIM > 0) prefetch_map(rope);
    }
    if (!p.settled) take_turn();
    // Lengths are looked up once the schedule has told which: by then they are near.
    if (thread_index() * 32 < p.batch) prefetch(global_pointer<const int>(p.seq_lens) + thread_index() * 32);
    barrier();

    int role = warpgroup_index();
    if (role < SIDES) {
        grow_registers<SIDE_REGISTERS>();
        // Knowing that there are two keeps operands in registers of the whole warp.
        attend(p, role & 1, shared, units);
    } else {
        shrink_registers<LOADER_REGISTERS>();
        int loader = warp_of_group();
        if constexpr (GATHERS) {
            gather_units(p, item_of(shared), units);
        } else if (loader < LOADERS) {
            load_units(p, item_of(shared), loader, LOADERS, latent, rope, units, QUERIES_BARRIER, QUERIES_BARRIER_THREADS);
        }
    }
}
