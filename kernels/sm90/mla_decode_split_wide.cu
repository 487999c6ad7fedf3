// Stage 1 of MLA decode for Hopper over an fp8 cache, tokens as the rows of the products: 64 query rows in a block, tiles of 64 tokens.
//
// As in the keys form, e4m3 becomes f16 on its way from shared memory into the registers of an operand, so shared memory holds bytes
// alone.
//
//   sides    two warpgroups. Of every second tile, its own, a side computes logits and weights; of every tile it multiplies the values
//            of its half of the columns with the weights. It computes the logits of its tile n; adds the values of tile n - 1, weighed
//            by the other side, and between those products makes its own weights, which it hands over; and adds the values of tile n
//   loaders  two warps keep the ring filled
//   adders   two warps add up weights, and look up what is to be known of a piece
//
// So the sides are half a period apart. Weights are relative to the maxima that the tile before has left; where one shows that it exceeds
// its row's by LAZY_MAX, maxima are raised and the tile's weights made again. What was summed before is then multiplied by a factor, which
// goes with the tile: each side does so before it adds that.
//
// Weights have three places, by tile. That of tile n is written again for tile n + 3, by the other side: when it has seen the weights
// of tile n + 2, which this side hands over after it has added tile n; itself it has, too, and so have the adders, without whose word
// for tile n the weights of tile n + 2 are not there. A unit of the ring is given back by the side that reads its values: the other has
// read its keys before it handed the tile's weights over. Who waits for a unit of a tile has seen the weights of the one before in its
// place, and so has not missed a phase.

using Sums = float[2 * SIDE_UNITS][SUMS];

/// Computes products of a tile's keys with the queries, unit by unit as they come in, and waits for all products.
DEVICE void multiply_keys(float (&x)[SUMS], Sums& o, int n, const unsigned char SHARED* shared, const Units& units) {
    constexpr int ROTARY = ROPE_DIM > 0;
    UnitPlace place = place_of(n);
    uint32 operands = operand_address(units.base) + QUERY_AT;
    uint32 flip = from_lane(n % SIDES == 0 ? SIDE_UNITS : 0, 0);
    // Parts are rotary columns first, then halves of units in the order in which these come.
    auto unit_of_part = [&](int part) { return part < ROTARY ? CACHED_UNITS : (part - ROTARY) / 2 ^ flip; };
    Bytes bytes[2];
    bool there = false;
    auto load = [&](int part) {
        int half = part < ROTARY ? 0 : (part - ROTARY) % 2;
        int unit = place.index + unit_of_part(part);
        if (half == 0 && !there) barrier_wait(units.full(unit), place.parity);
        load_keys(bytes[part % 2], shared + unit * UNIT_BYTES, half, part < ROTARY);
        int next = part + (part < ROTARY ? 1 : 2);
        if (half == 0 && next < QUERY_UNITS) there = barrier_passed(units.full(place.index + unit_of_part(next)), place.parity);
    };
    load(0);
    UNROLL for (int part = 0; part < QUERY_UNITS; part++) {
        if (part + 1 < QUERY_UNITS) load(part + 1);
        if (part == ROTARY && ROTARY) {
            warp_barrier();
            if (lane_index() == 0) barrier_arrive(units.empty(place.index + CACHED_UNITS));
        }
        uint32 queries = operands + (part < ROTARY ? LATENT_UNITS : unit_of_part(part) * 2 + (part - ROTARY) % 2) * QUERY_UNIT_BYTES;
        multiply_part<false>(x, bytes[part % 2], rows_operand(queries), part > 0);
    }
    products_wait<0>();
    settle(x);
    UNROLL for (int part = 0; part < 2 * SIDE_UNITS; part++) settle(o[part]);
}

/// Where products find the weights of a tile.
DEVICE uint32 weights_operand(const Units& units, int n) {
    return from_lane(operand_address(units.base) + WEIGHTS_AT + n % WEIGHTS_PLACES * WEIGHTS_BYTES, 0);
}

/// Starts to add a side's columns of the values in a ring's place, weighed, to what there is, or to nothing if `fresh`: clearing
/// registers takes longer. What is read for four products is read as many parts ahead as there are buffers but one. Of the first parts
/// `beside` is called after each product with its number.
template <int buffers, int beside_parts, typename Beside>
DEVICE void multiply_values(Sums& o, UnitPlace place, uint32 weights, bool fresh, int side, const Units& units, Beside beside) {
    int first = place.index + side * SIDE_UNITS;
    Bytes bytes[buffers];
    auto load = [&](int part) { load_values(bytes[part % buffers], units.unit(first + part / 2), part % 2); };
    constexpr int AHEAD = buffers - 1;
    UNROLL for (int part = 0; part < AHEAD; part++) load(part);
    UNROLL for (int part = 0; part < 2 * SIDE_UNITS; part++) {
        if (part + AHEAD < 2 * SIDE_UNITS) load(part + AHEAD);
        if (part >= beside_parts) {
            multiply_part<true>(o[part], bytes[part % buffers], rows_operand(weights), !fresh);
            continue;
        }
        UNROLL for (int step = 0; step < 4; step++) {
            uint32 a[4];
            products_wait<2>();
            widen_values(a, bytes[part % buffers][step]);
            products_begin();
            product_64_held(o[part], a, rows_operand(weights, step * 32), step > 0 || !fresh);
            products_commit();
            beside(part * 4 + step);
        }
    }
}
/// Gives this side's units of a tile back, whose values have been read.
DEVICE void release_values(UnitPlace place, int side, const Units& units) {
    warp_barrier();
    if (lane_index() < SIDE_UNITS) barrier_arrive(units.empty(place.index + side * SIDE_UNITS + lane_index()));
}
/// Waits for products with values.
DEVICE void settle_values(Sums& o) {
    products_wait<0>();
    UNROLL for (int part = 0; part < 2 * SIDE_UNITS; part++) settle(o[part]);
}

/// Whether a weight of such pairs says that its row's maximum is to be raised.
DEVICE bool exceeds(uint32 largest) {
    constexpr uint32 MOST = 0x5c00;  // 2^LAZY_MAX in f16, whose bits have the order of what is not negative
    static_assert(LAZY_MAX == 8.0f, "as said");
    return (largest & 0xffff) > MOST || largest >> 16 > MOST;
}

/// Brings together what a lane has of its sixteen rows and the seven others that share them, by `both`: each keeps the half of the rows
/// that the bits of its number say. Says which of its rows the first two values, which are then of all eight lanes, are of.
template <typename Both>
DEVICE int halve(float (&value)[LANE_ROWS], Both both) {
    int lane = unhoisted(lane_index());
    int kept = 0;
    UNROLL for (int step = 0; step < 3; step++) {
        const int count = LANE_ROWS / 2 >> step, mask = 16 >> step;
        bool upper = (lane & mask) != 0;
        kept += upper ? count : 0;
        UNROLL for (int i = 0; i < LANE_ROWS / 2; i++) {
            if (i >= count) continue;
            float other = shuffle_xor(upper ? value[i] : value[i + count], mask);
            value[i] = both(upper ? value[i + count] : value[i], other);
        }
    }
    return lane_row(lane, kept);
}

struct Side {
    int side;
    unsigned char SHARED* shared;
    uint32 weights;  // where this lane stores its first, of the first place: found once, since what is done between products is dear
    float exact[2];  // this warp's sums of two rows' weights before they are rounded, for an LSE that is asked for

    /// Turns eight products, from `first` on, into logits, less the maxima so far.
    DEVICE void subtract_maxima(float (&x)[SUMS], int first, const RowState SHARED* states) const {
        const Float4 SHARED* pairs = (const Float4 SHARED*)states + unhoisted(lane_index()) % 4;
        UNROLL for (int j = first / 4; j < first / 4 + 2; j++) {
            Float4 pair = pairs[j * 4];
            UNROLL for (int i = 4 * j; i < 4 * j + 4; i++) x[i] = i % 2 == 0 ? x[i] * pair.x - pair.y : x[i] * pair.z - pair.w;
        }
    }
    /// Likewise of capped logits, before: turns products into what the above takes for products.
    DEVICE void cap(const DecodeParams& p, float (&x)[SUMS], const float SHARED* scales) const {
        int lane = unhoisted(lane_index());
        UNROLL for (int i = 0; i < SUMS; i++) x[i] *= scales[lane_row(lane, i / 4 * 2 + i % 2)];
        scale_logits(p, x);
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
        float highest[LANE_ROWS];
        UNROLL for (int i = 0; i < LANE_ROWS; i++) highest[i] = maximum(x[i / 2 * 4 + i % 2], x[i / 2 * 4 + i % 2 + 2]);
        int row_kept = halve(highest, [](float a, float b) { return maximum(a, b); });
        float SHARED* own = exchange + warp_of_group() * ROWS + row_kept;
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
            factors(n, shared)[row] = exp2(-by);
        }
        side_barrier(side);
        UNROLL for (int j = 0; j < SUMS / 4; j++) {
            Word2 by = *(const Word2 SHARED*)(exchange + j * 8 + lane % 4 * 2);
            UNROLL for (int e = 0; e < 4; e++) x[4 * j + e] -= bits_float(e % 2 == 0 ? by.x : by.y);
        }
    }

    /// Where this lane's first weights go, of those in the first place.
    static DEVICE uint32 weights_of_lane(const unsigned char SHARED* shared) {
        int lane = unhoisted(lane_index());
        int row = lane / 16 * 8 + lane % 8, chunk = (warp_of_group() * 2 + lane / 8 % 2) ^ lane % 8;
        return shared_address(shared) + WEIGHTS_AT + row * 128 + chunk * 16;
    }
    /// Stores weights of eight logits, from `first` on, of this warp's sixteen tokens.
    DEVICE void store_weights(const float (&x)[SUMS], int first, int n, uint32& largest) const {
        uint32 to = weights + n % WEIGHTS_PLACES * WEIGHTS_BYTES;
        uint32 pairs[4];
        UNROLL for (int j = 0; j < 4; j++) {
            pairs[j] = pack_f16(exp2(x[first + 2 * j]), exp2(x[first + 2 * j + 1]));
            largest = larger_pair(largest, pairs[j]);
        }
        store_matrix_trans(to + first / 4 * 1024, pairs[0], pairs[1], pairs[2], pairs[3]);
    }

    /// Adds up a tile's weights as they are. Products take them rounded, and so does the sum that results are divided by; an LSE would be
    /// off by up to 2^-12 where few tokens count.
    DEVICE void add_exact(const float (&x)[SUMS]) {
        float sum[LANE_ROWS];
        UNROLL for (int i = 0; i < LANE_ROWS; i++) sum[i] = exp2(x[i / 2 * 4 + i % 2]) + exp2(x[i / 2 * 4 + i % 2 + 2]);
        halve(sum, [](float a, float b) { return a + b; });
        exact[0] += sum[0];
        exact[1] += sum[1];
    }
    /// The first of the two rows whose exact sums this lane has.
    DEVICE int exact_row() const {
        float none[LANE_ROWS] = {};
        return halve(none, [](float a, float) { return a; });
    }
    /// Tells them. To be followed by a meeting.
    DEVICE void tell_exact() const {
        float SHARED* own = (float SHARED*)(shared + EXCHANGE_AT) + (side * SIDE_WARPS + warp_of_group()) * ROWS + exact_row();
        own[0] = exact[0];
        own[1] = exact[1];
    }

    /// Multiplies what has been summed of the result as a tile asks.
    DEVICE void rescale(Sums& o, int n) {
        int lane = unhoisted(lane_index());
        const float SHARED* factor_of_exact = factors(n, shared) + exact_row();
        exact[0] *= factor_of_exact[0];
        exact[1] *= factor_of_exact[1];
        UNROLL for (int j = 0; j < LANE_ROWS / 2; j++) {
            Word2 factor = *(const Word2 SHARED*)(factors(n, shared) + j * 8 + lane % 4 * 2);
            UNROLL for (int part = 0; part < 2 * SIDE_UNITS; part++) {
                UNROLL for (int e = 0; e < 4; e++) o[part][4 * j + e] *= bits_float(e % 2 == 0 ? factor.x : factor.y);
            }
        }
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

/// An adder: adds up each row's weights, of all tiles. It also looks up what is to be known of a piece. It waits for weights alone: of a
/// piece there are none before both sides are done with the piece before it and have met, and what is described anew is of that one's
/// predecessor, or read before they meet, or read only to make weights, all of which it has seen.
DEVICE void add_weights(const DecodeParams& p, unsigned char SHARED* shared, const Meetings& meetings) {
    for (int n = 0; n < SIDES; n++) meetings.tell(n);
    barrier_wait(meetings.at(BEGUN_AT), 0);
    if (warp_any(piece_of(0, shared).end == 0)) return;
    int n = 0;
    NO_UNROLL for (int turn = 0;; turn ^= 1) {
        describe_limits(p, turn, shared);
        barrier_arrive(meetings.at(LIMITED_AT));
        describe(p, turn, shared);
        int end = n + divide_up(piece_of(turn, shared).end - piece_of(turn, shared).token, TILE_TOKENS);
        float total = 0.0f;
        int row = unhoisted(thread_index()) % ROWS;
        NO_UNROLL for (; warp_any(n < end); n++) {
            meetings.wait_for_weights(n);
            if (raised(n, shared)) total *= factors(n, shared)[row];
            UNROLL for (int word = 0; word < 8; word++) {
                uint32 pairs[4];
                load_words(pairs, shared + WEIGHTS_AT + row * 128 + n % WEIGHTS_PLACES * WEIGHTS_BYTES + (word ^ row % 8) * 16);
                UNROLL for (int i = 0; i < 4; i++) {
                    float low, high;
                    unpack_f16(pairs[i], low, high);
                    total += low + high;
                }
            }
            meetings.tell(n + SIDES);
        }
        ((float SHARED*)(shared + TOTAL_AT))[row] = total;
        barrier_arrive(meetings.at(ADDED_AT));
        named_barrier(1 + SIDES, ADDERS * 32);
        if (!warp_any(piece_of(turn ^ 1, shared).end > 0)) return;
    }
}

/// Says what each row's sums are to be multiplied by, and writes the LSE: a thread for each row.
DEVICE void weigh_rows(const DecodeParams& p, int side, int turn, unsigned char SHARED* shared) {
    int row = thread_index() % SIDE_THREADS;
    if (row >= ROWS) return;
    float total = ((const float SHARED*)(shared + TOTAL_AT))[row];
    ((float SHARED*)(shared + SCALE_AT))[side * ROWS + row] = result_scale(p, total, alone(turn, shared) ? -1 : 0);
    uint64 to = addresses(turn, TO_LSE, shared)[row];
    if (p.lse != 0) {
        const float SHARED* exact = (const float SHARED*)(shared + EXCHANGE_AT) + row;
        total = 0.0f;
        UNROLL for (int warp = 0; warp < SIDES * SIDE_WARPS; warp++) total += exact[warp * ROWS];
    }
    // Emptiness is a sum of zero: a NaN must show.
    float lse = total == 0.0f ? NEGATIVE_INFINITY : (row_states(turn, shared)[row].maximum + log2(total)) * LN_2;
    if (side == 0 && to != 0) *global_pointer<float>(to) = lse;
}

/// Writes a side's half of a piece's result.
DEVICE void write_half(Sums& o, int side, int turn, unsigned char SHARED* shared) {
    int lane = unhoisted(lane_index());
    const float SHARED* scales = (const float SHARED*)(shared + SCALE_AT) + side * ROWS + lane % 4 * 2;
    int column = side * HALF + warp_of_group() * 16 + lane / 4 * 2;
    UNROLL for (int i = 0; i < LANE_ROWS; i++) {
        float scale = scales[i / 2 * 8 + i % 2];
        uint32 kept = scale == 0.0f ? 0u : ~0u;  // a row that saw nothing is zero even beside values that are not finite
        uint32 words[2 * SIDE_UNITS];
        UNROLL for (int part = 0; part < 2 * SIDE_UNITS; part++) {
            const float* x = o[part] + i / 2 * 4 + i % 2;
            words[part] = pack(x[0] * scale, x[2] * scale) & kept;
        }
        uint64 to = addresses(turn, TO_RESULT, shared)[lane_row(lane, i)];
        if (to == 0) continue;
        uint32 GLOBAL* row = global_pointer<uint32>(to + column * 2);
        UNROLL for (int part = 0; part < 2 * SIDE_UNITS; part++) row[part * UNIT_COLUMNS / 2] = words[part];
    }
}

/// A warpgroup of the two.
DEVICE void attend(const DecodeParams& p, int side, unsigned char SHARED* shared, const Units& units, const Meetings& meetings) {
    begin_part(p, shared);
    meetings.meet(BEGUN_AT, 0);
    if (warp_any(piece_of(0, shared).end == 0)) return;
    int turn = 0;  // of two descriptions of a piece
    int base = 0;  // the piece's first tile among the block's
    NO_UNROLL while (true) {
        receive_queries(p, turn, shared, [&] {
            if (base == 0) barrier_arrive(meetings.at(ASKED_AT));
        });
        const Piece SHARED& piece = piece_of(turn, shared);
        // Before the other side can be done with a piece of one tile, and the adders put another in its place.
        int tiles = from_lane(divide_up(piece.end - piece.token, TILE_TOKENS), 0);
        meetings.meet(LIMITED_AT, turn);
        RowState SHARED* states = row_states(turn, shared);
        Sums o;
        float x[SUMS];
        Side self = {side, shared, Side::weights_of_lane(shared), {0.0f, 0.0f}};
        // Of whose tokens all rows see all: the first row sees least, but for those that do not exist, which come last.
        int seen = (smaller(limits(turn, shared)[0], limits(turn, shared)[ROWS - 1]) - piece.token) / TILE_TOKENS;
        NO_UNROLL for (int i = (base ^ side) & 1; i <= tiles; i += 2) {
            int n = base + i;
            bool own = i < tiles, first = i == 0;
            bool raised = false, raised_before = false;
            if (own) multiply_keys(x, o, n, shared, units);
            if (!first) {
                meetings.wait_for_weights(n - 1);
                raised_before = ::raised(n - 1, shared);
            }
            if (warp_any(raised_before)) {
                settle_values(o);
                self.rescale(o, n - 1);
            }
            if (own) {
                if (unlikely(p.softcap != 0.0f)) self.cap(p, x, cap_scales(turn, shared));
                // A piece's first tile has none before it: it is multiplied itself, with what was there, for nothing.
                UnitPlace before = place_of(first ? n : n - 1);
                uint32 largest = 0;  // of the weights, as pairs
                multiply_values<2, 3>(o, before, weights_operand(units, n + 2), i <= 1, side, units, [&](int product) {
                    if (product < 4) self.subtract_maxima(x, product * 8, states);
                    if (product == 4 && (first || i >= seen)) {
                        self.mask(x, limits(turn, shared), piece.token + i * TILE_TOKENS, piece.begin);
                        if (i + 1 == tiles) {
                            clear_tile(shared + place_of(n).index * UNIT_BYTES, piece.end - piece.token - i * TILE_TOKENS, side);
                        }
                    }
                    if (product > 4 && product % 2 == 1) self.store_weights(x, (product - 5) * 4, n, largest);
                    if (product == 11) publish_to_async();
                });
                if (!first) release_values(before, side, units);
                // All of this side's weights are there. Where one shows that a maximum is to be raised, they are made again.
                if (named_barrier_any(1 + side, SIDE_THREADS, first || exceeds(largest))) {
                    self.raise(x, states, n, first);
                    UNROLL for (int j = 0; j < SUMS; j += 8) self.store_weights(x, j, n, largest);
                    publish_to_async();
                    side_barrier(side);
                    raised = !first;
                }
                if (thread_index() % SIDE_THREADS == 0) ::raised(n, shared) = raised;
                meetings.tell(n);
                if (raised) {
                    settle_values(o);
                    self.rescale(o, n);
                }
                if (unlikely(p.lse != 0)) self.add_exact(x);
            }
            int last = own ? n : n - 1;
            multiply_values<3, 0>(o, place_of(last), weights_operand(units, last), last == base, side, units, [](int) {});
            release_values(place_of(last), side, units);
        }
        settle_values(o);
        if (p.lse != 0) self.tell_exact();
        meetings.meet(ADDED_AT, turn);
        bool more = warp_any(piece_of(turn ^ 1, shared).end > 0);
        if (more) QuerySource(p, piece_of(turn ^ 1, shared).seq, shared).load(shared);
        weigh_rows(p, side, turn, shared);
        side_barrier(side);
        write_half(o, side, turn, shared);
        if (!more) break;
        base += tiles;
        turn ^= 1;
    }
}

#ifdef SPLIT_SHARED_BYTES
static_assert(SHARED_BYTES == SPLIT_SHARED_BYTES, "select_sm90.rs counts the same");
#endif

KERNEL_ONE_BLOCK(THREADS)
mla_decode_split(const __grid_constant__ DecodeParams p, const __grid_constant__ TensorMap latent,
                 const __grid_constant__ TensorMap rope) {
    SHARED_MEMORY_1024(shared);
    Units units = {shared_address(shared), shared_address(shared) + BARRIERS_AT};
    Meetings meetings = {units.barriers};
    if (thread_index() == 0) units.init(SIDE_WARPS, 1);
    // Text that is executed once takes some 20 clocks an instruction, so warps share it.
    int warp = thread_index() / 32;
    if (warp == THREADS / 32 - 1) meetings.init();
    if (thread_index() == SIDES * SIDE_THREADS) {
        prefetch_map(latent);
        if constexpr (ROPE_DIM > 0) prefetch_map(rope);
    }
    if (thread_index() == SIDE_THREADS) {
        int row_blocks = divide_up(group_rows(p), BLOCK_ROWS);
        item_of(shared) = quotient(block_index(), row_blocks);
        first_row_of(shared) = (block_index() - item_of(shared) * row_blocks) * BLOCK_ROWS;
    }
    if (!p.settled) take_turn();
    // Lengths are looked up once the schedule has told which: by then they are near.
    if (thread_index() * 32 < p.batch) prefetch(global_pointer<const int>(p.seq_lens) + thread_index() * 32);
    barrier();

    int role = warpgroup_index();
    if (role < SIDES) {
        grow_registers<SIDE_REGISTERS>();
        // Knowing that there are two keeps operands in registers of the whole warp.
        attend(p, role & 1, shared, units, meetings);
    } else {
        shrink_registers<LOADER_REGISTERS>();
        int loader = warp_of_group();
        if (loader >= LOADERS) {
            add_weights(p, shared, meetings);
        } else {
            load_units<true, false>(p, item_of(shared), loader, LOADERS, latent, rope, units, unit_of, [&](int n) {
                // Queries would come late behind a whole ring.
                if (n == 0) barrier_wait(meetings.at(ASKED_AT), 0);
            });
        }
    }
}
