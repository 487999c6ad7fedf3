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

/// A side's stream of products: of the values of a tile `n - 1` and of `n`, with their weights, and of the keys of the tile after
/// the next, its next own one. In parts of four products, each of depth 16; parts `VALUES` to `KEYS - 1` are of the tile `n`.
struct Stream {
    static constexpr int VALUES = 2 * SIDE_UNITS, KEYS = 2 * VALUES, END = KEYS + QUERY_UNITS;

    Sums& o;
    float (&x)[SUMS];
    int side, n;
    const unsigned char SHARED* shared;
    const Units& units;

    DEVICE int tile(int part) const { return part < VALUES ? n - 1 : part < KEYS ? n : n + 2; }

    /// Reads what a part multiplies.
    DEVICE void load(Bytes& bytes, int part, bool& there) const {
        UnitPlace place = place_of(tile(part));
        if (part < KEYS) {
            int unit = place.index + side * SIDE_UNITS + part % VALUES / 2;
            load_values(bytes, shared_address(shared) + unit * UNIT_BYTES, part % 2);
        } else {
            int keys = part - KEYS;
            int unit = place.index + keys / 2;
            if (keys % 2 == 0 && !there) barrier_wait(units.full(unit), place.parity);
            load_keys(bytes, shared + unit * UNIT_BYTES, keys % 2, keys == LATENT_UNITS);
            if (keys % 2 == 0 && part + 2 < END) there = barrier_passed(units.full(unit + 1), place.parity);
        }
    }

    DEVICE void widen(uint32 (&a)[4], const uint32 (&bytes)[2], int part) const {
        if (part < KEYS) {
            widen_values(a, bytes);
        } else {
            widen_keys(a, bytes);
        }
    }

    DEVICE void multiply(const uint32* a, int part, int step) const {
        uint32 operands = operand_address(units.base);
        if (part < KEYS) {
            uint32 weights = operands + WEIGHTS_AT + tile(part) % WEIGHTS_PLACES * WEIGHTS_BYTES;
            product_64_held(o[part % VALUES], a, rows_operand(weights + step * 32), 1);
        } else {
            uint32 queries = operands + QUERY_AT + (part - KEYS) * QUERY_UNIT_BYTES;
            product_64_held(x, a, rows_operand(queries + step * 32), part > KEYS || step > 0);
        }
    }

    /// Gives back this side's units of the tile of a part.
    DEVICE void release_values(int part) const {
        warp_barrier();
        int lane = lane_index();
        if (lane < SIDE_UNITS) barrier_arrive(units.empty(place_of(tile(part)).index + side * SIDE_UNITS + lane));
    }
    DEVICE void release_keys() const {
        if constexpr (ROPE_DIM > 0) {
            warp_barrier();
            if (lane_index() == 0) barrier_arrive(units.empty(place_of(n + 2).index + CACHED_UNITS));
        }
    }

    /// Multiplies parts `from` to `to` - 1. What is read for a part is read one part ahead, and widened one product ahead. A warp that
    /// begins products of registers waits until the one before has read its own, so more at once would only keep it from widening.
    template <int from, int to>
    DEVICE void run() const {
        Bytes bytes[2];
        uint32 a[3][4];
        bool there = false;
        load(bytes[from % 2], from, there);
        UNROLL for (int part = from; part < to; part++) {
            if (part > from && part % VALUES == 0 && part <= KEYS) release_values(part - 1);
            if (part + 1 == KEYS && to > KEYS) {
                UnitPlace place = place_of(tile(KEYS));
                there = barrier_passed(units.full(place.index), place.parity);
            }
            if (part + 1 < to) load(bytes[(part + 1) % 2], part + 1, there);
            UNROLL for (int step = 0; step < 4; step++) {
                int product = part * 4 + step;
                if (product >= from * 4 + 3) products_wait<2>();
                widen(a[product % 3], bytes[part % 2][step], part);
                products_begin();
                multiply(a[product % 3], part, step);
                products_commit();
            }
        }
        if (to <= KEYS) release_values(to - 1);
        if (to == END) release_keys();
        products_wait<0>();
        if (from < KEYS) {
            UNROLL for (int block = 0; block < 2 * SIDE_UNITS; block++) settle(o[block]);
        }
        if (to > KEYS) settle(x);
    }
};

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

    /// Hides what a row does not see of the piece's tile `i`.
    DEVICE void mask(float (&x)[SUMS], const Piece SHARED& piece, const int SHARED* limit, int i) const {
        int token = piece.token + i * TILE_TOKENS, begin = piece.begin;
        // The first row sees least, but for those that do not exist, which come last.
        if (token >= begin && token + TILE_TOKENS <= smaller(limit[0], limit[ROWS - 1])) return;
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
        bool multiplied = false;  // keys of the next own tile
        NO_UNROLL for (int i = (base ^ side) & 1; i <= tiles; i += 2) {
            int n = base + i;
            if (i < tiles && !multiplied) Stream{o, x, side, n - 2, shared, units}.run<Stream::KEYS, Stream::END>();
            bool raised_before = i > 0 && self.take_over(n - 1);
            bool raised = false;
            if (i < tiles) {
                self.subtract_maxima(p, x, states);
                self.mask(x, piece, limits(turn, shared), i);
                if (!GATHERS && i + 1 == tiles) clear_tile(shared + place_of(n).index * UNIT_BYTES, piece.end - piece.token - i * TILE_TOKENS, side);
                raised = self.weigh(x, states, n, i == 0);
            }
            if (raised_before) self.rescale(o, n - 1);
            multiplied = i > 0 && i + 2 < tiles && !raised;
            if (multiplied) {
                Stream{o, x, side, n, shared, units}.run<0, Stream::END>();
            } else {
                NO_UNROLL for (int m = larger(n - 1, base); m <= n && m < base + tiles; m++) {
                    if (raised && m == n) self.rescale(o, n);
                    Stream{o, x, side, m, shared, units}.run<Stream::VALUES, Stream::KEYS>();
                }
            }
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
            gather_units(p, item_of(p), units);
        } else if (loader < LOADERS) {
            load_units(p, item_of(p), loader, LOADERS, latent, rope, units, QUERIES_BARRIER, QUERIES_BARRIER_THREADS);
        }
    }
}
