// Stage 1 of MLA decode for Hopper, tokens as the rows of the products: 16 or 32 query rows in a block, tiles of 64 tokens.
//
// With few query rows the cache is what takes time. The products are transposed, so that no row of them is wasted:
//
//   groups   two warpgroups take a piece's tiles in turn: logits = tile x queries, softmax down the columns,
//            sums += tile' x weights. Each has sums and maxima of its own; at the end of a piece they exchange halves of the
//            sums, and each writes half of the result's columns
//   loaders  one or two warps keep the ring filled
//
// A barrier's phase is waited for by its parity, so whoever waits must not be a phase behind. A place of the ring is loaded by one
// warp, which waits for all its phases; it is read by both groups, so a group begins to wait for a tile only when the other has
// seen all of the tile before. All other barriers count threads.
//
// A query row's maximum is raised only when a logit exceeds it by LAZY_MAX, which warps need not tell each other before: the
// barrier after the weights says whether any logit did, and then they are computed again.

/// Where a thread's words of the query rows of a virtual sequence lie, which may be found before its turn.
struct QuerySource {
    static constexpr int STEP = GROUP_THREADS / 8;  // rows at a time
    const uint16 GLOBAL* from[ROWS / STEP];
    bool valid[ROWS / STEP];  // rows that do not exist become zeros

    DEVICE QuerySource(const DecodeParams& p, int virtual_seq, int first_row) {
        int thread = unhoisted(thread_index());
        UNROLL for (int i = 0; i < ROWS / STEP; i++) {
            Row row = row_of(p, virtual_seq, first_row + thread % GROUP_THREADS / 8 + i * STEP);
            from[i] = global_pointer<const uint16>(p.q) + thread % 8 * 8;
            valid[i] = row.valid;
            if (row.valid) from[i] += row.seq * p.q_stride_batch + row.token * p.q_stride_token + row.head * p.q_stride_head;
        }
    }

    /// Asks for them, by one warpgroup.
    DEVICE void load(unsigned char SHARED* shared) const {
        int thread = unhoisted(thread_index());
        int row = thread % GROUP_THREADS / 8;
        unsigned char SHARED* to = shared + QUERY_AT + row * 128 + (thread % 8 ^ row % 8) * 16;
        UNROLL for (int i = 0; i < ROWS / STEP; i++) {
            UNROLL for (int unit = 0; unit < QUERY_UNITS; unit++) {
                copy16_async(to + unit * QUERY_UNIT_BYTES + i * STEP * 128, from[i] + unit * UNIT_COLUMNS, valid[i]);
            }
        }
        copy_commit();
    }
};

/// Waits for them, by the same warpgroup. For an fp8 cache they become f16 in the order in which keys are read; every thread begins
/// with the words that it loaded itself, and the eight that share a row are of one warp.
DEVICE void receive_queries(unsigned char SHARED* shared) {
    copy_wait<0>();
    if constexpr (FP8) {
        int chunk = unhoisted(thread_index()) % 8;
        NO_UNROLL for (int local = thread_index() % GROUP_THREADS / 8; local < ROWS; local += GROUP_THREADS / 8) {
            unsigned char SHARED* block = shared + QUERY_AT;
            const unsigned char SHARED* own = block + local * 128 + (chunk ^ local % 8) * 16;
            uint32 largest = 0;
            UNROLL for (int unit = 0; unit < QUERY_UNITS; unit++) {
                largest = largest_of(*(const Word4 SHARED*)(own + unit * QUERY_UNIT_BYTES), largest);
            }
            UNROLL for (int mask = 1; mask < 8; mask *= 2) {
                uint32 other = shuffle_xor(largest, mask);
                if (other > largest) largest = other;
            }
            float scale = fitting_scale(largest);
            if (chunk == 0) ((float SHARED*)(shared + QUERY_SCALE_AT))[local] = 1.0f / scale;
            NO_UNROLL for (int unit = 0; unit < QUERY_UNITS; unit += 2) {
                bool rotary = unit == LATENT_UNITS;
                Word4 first = *(const Word4 SHARED*)(own + unit * QUERY_UNIT_BYTES);
                Word4 second = {0, 0, 0, 0};
                if (!rotary) second = *(const Word4 SHARED*)(own + (unit + 1) * QUERY_UNIT_BYTES);
                warp_barrier();
                store_query(block + unit * QUERY_UNIT_BYTES, QUERY_UNIT_BYTES, local, chunk * 4, rotary ? 8 : 16, first, scale);
                if (!rotary) store_query(block + unit * QUERY_UNIT_BYTES, QUERY_UNIT_BYTES, local, 32 + chunk * 4, 16, second, scale);
            }
        }
    }
    publish_to_async();
}

/// Clears the cached rows of a tile from `valid` on, by one warpgroup: weights of zero do not undo a NaN.
DEVICE void clear_tile(unsigned char SHARED* ring, UnitPlace place, int valid) {
    NO_UNROLL for (int unit = 0; unit < CACHED_UNITS; unit++) {
        unsigned char SHARED* rows = ring + place.after(unit).index * UNIT_BYTES;
        NO_UNROLL for (int word = valid * 8 + thread_index() % GROUP_THREADS; word < TILE_TOKENS * 8; word += GROUP_THREADS) {
            *(Word4 SHARED*)(rows + word * 16) = {0, 0, 0, 0};
        }
    }
    publish_to_async();
}

struct Softmax {
    const int SHARED* limit;                   // tokens that each row sees of this piece
    int least;                                 // of the limits of this lane's rows
    int begin;                                 // first token of this piece
    float maximum[LANE_ROWS], sum[LANE_ROWS];  // the sums are this lane's share
    const float SHARED* query_scales;          // of queries that were scaled to fit f16

    /// Writes what all threads need to know of a piece, by one warpgroup. To be followed by a barrier, and `begin_piece`.
    static DEVICE void describe(const DecodeParams& p, int item, const Part& part, const Cursor& at, int first_row, int turn,
                                unsigned char SHARED* shared) {
        int local = thread_index() % GROUP_THREADS;
        if (local >= ROWS) return;
        int row = first_row + local;
        Row of = row_of(p, at.seq, row);
        int visible = visible_tokens(p, at.length, of.token);
        Slots slots = at.slots(p, part);
        int64 slot = slots.count == 0 ? -1 : slots.begin + at.split;
        ((int SHARED*)(shared + LIMIT_AT))[turn * ROWS + local] = of.valid ? smaller(visible, at.end) : 0;
        // The pieces of a sequence lie in parts that follow each other; the first of those has the counters.
        int GLOBAL* first_part = (int GLOBAL*)schedule_of(p).parts + (int64)(item - at.split) * PART_WORDS;
        Piece SHARED& piece = Piece::of(turn, shared);
        int merges = p.merged_pieces > 0 ? schedule_of(p).parts[(int64)item * PART_WORDS + MERGES_WORD] : 0;
        piece = {slots.begin, (uint32 GLOBAL*)first_part + ARRIVAL_WORD, at.split, slots.count, merges};
        if (piece.merged()) slot = -1;
        addresses(turn, TO_RESULT, shared)[local] = of.valid ? (uint64)result_row(p, of, slot, row) : 0;
        addresses(turn, TO_LSE, shared)[local] = of.valid ? lse_address(p, of, slot, row) : 0;
    }

    DEVICE void begin_piece(int turn, const unsigned char SHARED* shared) {
        int lane = unhoisted(lane_index());
        limit = (const int SHARED*)(shared + LIMIT_AT) + turn * ROWS;
        query_scales = (const float SHARED*)(shared + QUERY_SCALE_AT);
        least = limit[lane_row(lane, 0)];
        UNROLL for (int i = 0; i < LANE_ROWS; i++) {
            maximum[i] = NO_MAXIMUM;
            sum[i] = 0.0f;
            least = smaller(least, limit[lane_row(lane, i)]);
        }
    }

    /// Turns products into logits.
    DEVICE void mask(const DecodeParams& p, float (&x)[SUMS], int token) const {
        int lane = unhoisted(lane_index());
        if constexpr (FP8) {
            UNROLL for (int i = 0; i < SUMS; i++) x[i] *= query_scales[lane_row(lane, i / 4 * 2 + i % 2)];
        }
        scale_logits(p, x);
        int warp = warp_of_group();
        if (token + TILE_TOKENS <= least && token >= begin) return;
        UNROLL for (int i = 0; i < SUMS; i++) {
            int at = token + warp * 16 + lane / 4 + i / 2 % 2 * 8;
            if (at >= limit[lane_row(lane, i / 4 * 2 + i % 2)] || at < begin) x[i] = NEGATIVE_INFINITY;
        }
    }

    /// Whether a logit of this lane is too large for its row's maximum.
    DEVICE bool exceeds(const float (&x)[SUMS]) const {
        bool any = false;
        UNROLL for (int i = 0; i < SUMS; i++) any |= x[i] > maximum[i / 4 * 2 + i % 2] + LAZY_MAX;
        return any;
    }

    /// Stores the weights of this warp's sixteen tokens.
    DEVICE void store_weights(const float (&x)[SUMS], uint32 weights) const {
        uint32 word[SUMS / 2];
        UNROLL for (int i = 0; i < SUMS; i += 2) {
            float low = exp2(x[i] - maximum[i / 4 * 2]), high = exp2(x[i + 1] - maximum[i / 4 * 2 + 1]);
            word[i / 2] = FP8 ? pack_f16(low, high) : pack(low, high);
        }
        int lane = unhoisted(lane_index());
        int chunk = warp_of_group() * 2 + lane / 8 % 2;
        UNROLL for (int i = 0; i < SUMS / 2; i += 4) {
            int row = (i / 2 + lane / 16) * 8 + lane % 8;
            store_matrix_trans(weights + row * 128 + (chunk ^ lane % 8) * 16, word[i], word[i + 1], word[i + 2], word[i + 3]);
        }
        publish_to_async();
    }

    /// Raises the maxima that need it, and says what each row's earlier sums are to be multiplied by.
    DEVICE void raise(const float (&x)[SUMS], float (&factor)[LANE_ROWS], int group, float SHARED* exchange) {
        int lane = unhoisted(lane_index());
        int warp = warp_of_group();
        UNROLL for (int i = 0; i < LANE_ROWS; i++) {
            float highest = ::maximum(x[i / 2 * 4 + i % 2], x[i / 2 * 4 + i % 2 + 2]);
            UNROLL for (int mask = 4; mask < 32; mask *= 2) highest = ::maximum(highest, shuffle_xor(highest, mask));
            if (lane < 4) exchange[warp * ROWS + lane_row(lane, i)] = highest;
        }
        group_barrier(group);
        UNROLL for (int i = 0; i < LANE_ROWS; i++) {
            float highest = exchange[lane_row(lane, i)];
            UNROLL for (int other = 1; other < GROUP_WARPS; other++) {
                highest = ::maximum(highest, exchange[other * ROWS + lane_row(lane, i)]);
            }
            factor[i] = 1.0f;
            if (highest > maximum[i] + LAZY_MAX) {
                factor[i] = exp2(maximum[i] - highest);
                maximum[i] = highest;
                sum[i] *= factor[i];
            }
        }
    }

    DEVICE void add(const float (&x)[SUMS]) {
        UNROLL for (int i = 0; i < SUMS; i++) sum[i / 4 * 2 + i % 2] += exp2(x[i] - maximum[i / 4 * 2 + i % 2]);
    }

    /// Whether there is a row of this lane of which the group saw nothing.
    DEVICE bool lacks_rows() const {
        bool any = false;
        UNROLL for (int i = 0; i < LANE_ROWS; i++) any |= maximum[i] == NO_MAXIMUM;
        return any;
    }

    /// Tells the other group this one's maxima and sums. To be followed by a barrier.
    DEVICE void tell(int group, unsigned char SHARED* shared) {
        int lane = unhoisted(lane_index());
        int warp = warp_of_group();
        UNROLL for (int i = 0; i < LANE_ROWS; i++) {
            UNROLL for (int mask = 4; mask < 32; mask *= 2) sum[i] += shuffle_xor(sum[i], mask);
        }
        if (lane >= 4) return;
        UNROLL for (int i = 0; i < LANE_ROWS; i++) {
            int row = lane_row(lane, i);
            ((float SHARED*)(shared + EXCHANGE_AT))[(group * GROUP_WARPS + warp) * ROWS + row] = sum[i];
            if (warp == 0) ((float SHARED*)(shared + MAXIMA_AT))[group * ROWS + row] = maximum[i];
        }
    }
};

/// Who says that a unit has been read: of a unit that bulk copies and products alone know a lane for its warp, of one that lanes read
/// themselves each lane for itself, which is how racecheck follows it.
constexpr int READERS = FP8 ? GROUP_THREADS : GROUP_WARPS;

/// This warp is done with `count` units from the `first` on of those at a place, of them those from `held` on.
template <int first, int count>
DEVICE void give_back(const Units& units, UnitPlace place, int held = 0) {
    if constexpr (READERS == GROUP_WARPS) {
        int unit = first + lane_index();
        if (unit < first + count && unit >= held) barrier_arrive(units.empty(place.after(unit).index));
    } else {
        UNROLL for (int unit = first; unit < first + count; unit++) {
            if (unit >= held) barrier_arrive(units.empty(place.after(unit).index));
        }
    }
}

/// Starts the logits of the tile at a place: its tokens x the queries, unit by unit as they come in.
DEVICE void multiply_keys(float (&x)[SUMS], uint32 queries, UnitPlace place, const unsigned char SHARED* shared,
                          const Units& units) {
    if constexpr (FP8) {
        auto load = [&](Bytes& bytes, int part) {
            UnitPlace keys = place.after(part / 2);
            if (part % 2 == 0) barrier_wait(units.full(keys.index), keys.parity);
            load_keys(bytes, shared + keys.index * UNIT_BYTES, part % 2, part == LATENT_UNITS);
        };
        auto multiply = [&](int part, int step, const uint32* a) {
            product_keys_held(x, a, rows_operand(queries + part * QUERY_UNIT_BYTES + step * 32), part + step > 0);
        };
        multiply_widened<QUERY_UNITS>(load, [](uint32 (&a)[4], const uint32 (&bytes)[2]) { widen_keys(a, bytes); }, multiply);
    } else {
        UNROLL for (int unit = 0; unit < TILE_UNITS; unit++) {
            UnitPlace keys = place.after(unit);
            barrier_wait(units.full(keys.index), keys.parity);
            if constexpr (GATHERS) publish_to_async();
            products_begin();
            UNROLL for (int step = 0; step < 4; step++) {
                product_keys<false>(x, rows_operand(units.unit(keys.index) + step * 32),
                                    rows_operand(queries + unit * QUERY_UNIT_BYTES + step * 32), unit + step > 0);
            }
        }
        products_commit();
    }
}

/// Adds the tile's values, weighed, to the sums. The first half of its units is read when one group of products
/// is still under way.
DEVICE void multiply_values(Sums& o, uint32 weights, UnitPlace place, const Units& units) {
    if constexpr (FP8) {
        auto load = [&](Bytes& bytes, int part) { load_values(bytes, units.unit(place.after(part / 2).index), part % 2); };
        auto multiply = [&](int part, int step, const uint32* a) {
            product_keys_held(o[part], a, rows_operand(weights + step * 32), 1);
        };
        multiply_widened<LATENT_UNITS>(load, [](uint32 (&a)[4], const uint32 (&bytes)[2]) { widen_values(a, bytes); }, multiply);
    } else {
        products_begin();
        UNROLL for (int unit = 0; unit < LATENT_UNITS; unit++) {
            uint32 values = units.unit(place.after(unit).index);
            UNROLL for (int step = 0; step < TILE_TOKENS / 16; step++) {
                product_keys<true>(o[unit], columns_operand<UNIT_BYTES>(values + step * 2048), rows_operand(weights + step * 32), 1);
            }
            if (unit == HALF_UNITS - 1) products_commit();
        }
        products_commit();
    }
}

/// A warpgroup: every second tile of each piece.
DEVICE void attend(const DecodeParams& p, int item, int first_row, int group, unsigned char SHARED* shared, const Units& units) {
    Part part = find_part(p, item);
    Cursor at(p, part);
    QuerySource source(p, at.more ? at.seq : 0, first_row);
    if (p.settled) take_turn();
    if (!warp_any(at.more)) return;
    // As early as may be: what is asked for after tiles waits behind them.
    if (group == FIRST_AHEAD) source.load(shared);
    int lane = lane_index();
    uint32 queries = units.base + QUERY_AT;
    // Chosen, not computed: the compiler then keeps operands in registers of the whole warp.
    uint32 group_weights = units.base + (group == 0 ? WEIGHTS_AT : WEIGHTS_AT + 2 * WEIGHTS_BYTES);
    float SHARED* exchange = (float SHARED*)(shared + EXCHANGE_AT) + group * GROUP_WARPS * ROWS;
    int turn = 0;             // of two descriptions of a piece
    int ahead = FIRST_AHEAD;  // group that prepares the next piece
    UnitPlace piece = {0, 0};
    Softmax softmax;
    softmax.begin = at.seq == part.seq ? part.token : 0;
    NO_UNROLL while (true) {
        if (group == ahead) {
            Softmax::describe(p, item, part, at, first_row, turn, shared);
            receive_queries(shared);
        }
        pair_barrier();
        softmax.begin_piece(turn, shared);
        Sums o = {};
        int tiles = from_lane(divide_up(at.end - at.token, TILE_TOKENS), 0);
        UnitPlace place = piece.after(group * TILE_UNITS);
        UnitPlace last_place = place;
        NO_UNROLL for (int tile = group; tile < tiles; tile += GROUPS) {
            int token = at.token + tile * TILE_TOKENS;
            // Those of the tile before may still be read by other warps.
            uint32 weights = group_weights + (tile / GROUPS % 2 == 0 ? 0 : WEIGHTS_BYTES);
            float x[SUMS];
            if (tile > 0) wait_until_seen(group);
            multiply_keys(x, queries, place, shared, units);
            if (tile + 1 < tiles) tell_seen(group);
            products_wait<0>();
            if (ROPE_DIM > 0) give_back<CACHED_UNITS, 1>(units, place);

            softmax.mask(p, x, token);
            if (!GATHERS && at.end - token < TILE_TOKENS) {
                if constexpr (FP8) group_barrier(group);  // no warp reads keys any more
                clear_tile(shared, place, at.end - token);
            }
            softmax.store_weights(x, weights);
            if (named_barrier_any(2 + group, GROUP_THREADS, softmax.exceeds(x))) {
                float factor[LANE_ROWS];
                softmax.raise(x, factor, group, exchange);
                UNROLL for (int unit = 0; unit < LATENT_UNITS; unit++) {
                    UNROLL for (int i = 0; i < SUMS; i++) o[unit][i] *= factor[i / 4 * 2 + i % 2];
                }
                softmax.store_weights(x, weights);
                group_barrier(group);
            }
            multiply_values(o, weights, place, units);
            softmax.add(x);
            constexpr int HALF = CACHED_UNITS / 2;
            int held = tile + GROUPS >= tiles ? EXCHANGED_UNITS : 0;
            products_wait<1>();
            give_back<0, HALF>(units, place, held);
            products_wait<0>();
            give_back<HALF, HALF>(units, place, held);
            last_place = place;
            place.advance(GROUPS * TILE_UNITS);
        }
        // Weights of zero do not undo values that are not finite.
        if (warp_any(softmax.lacks_rows())) {
            UNROLL for (int unit = 0; unit < LATENT_UNITS; unit++) {
                UNROLL for (int i = 0; i < SUMS; i++) {
                    if (softmax.maximum[i / 4 * 2 + i % 2] == NO_MAXIMUM) o[unit][i] = 0.0f;
                }
            }
        }
        softmax.tell(group, shared);
        ahead = tiles % GROUPS;
        if (group < tiles) {
            group_barrier(group);  // no warp reads the tile any more
            hand_over(o, group, last_place, shared);
        }
        pair_barrier();
        at.token += (tiles - 1) * TILE_TOKENS;
        at.advance(p, part);
        bool more = warp_any(at.more);
        if (more && group == ahead) QuerySource(p, at.seq, first_row).load(shared);
        weigh_groups(p, group, turn, shared);
        group_barrier(group);
        // The other's last tile is the piece's last or the one before that.
        bool alone = group == 0 && tiles == 1;
        UnitPlace other = piece;
        other.skip((group == ahead || tiles == 1 ? tiles - 1 : tiles - 2) * TILE_UNITS);
        write_half(p, o, group, alone, turn, other, shared);
        warp_barrier();
        if (!alone) give_back<0, EXCHANGED_UNITS>(units, other);
        if (!more) break;
        piece.skip(tiles * TILE_UNITS);
        softmax.begin = 0;
        turn ^= 1;
    }
}

KERNEL_ONE_BLOCK(THREADS)
mla_decode_split(const __grid_constant__ DecodeParams p, const __grid_constant__ TensorMap latent,
                 const __grid_constant__ TensorMap rope) {
    SHARED_MEMORY_1024(shared);
    Units units = {shared_address(shared), shared_address(shared) + BARRIERS_AT};
    if (thread_index() == 0) units.init(READERS, GATHERS ? Gather::ARRIVALS : 1);
    if (!GATHERS && thread_index() == 0) {
        prefetch_map(latent);
        if constexpr (ROPE_DIM > 0) prefetch_map(rope);
    }
    if (!p.settled) take_turn();
    // Lengths are looked up once the schedule has told which: by then they are near.
    if (thread_index() * 32 < p.batch) prefetch(global_pointer<const int>(p.seq_lens) + thread_index() * 32);
    barrier();

    int row_blocks = divide_up(group_rows(p), BLOCK_ROWS);
    int item = quotient(block_index(), row_blocks);
    int first_row = (block_index() - item * row_blocks) * BLOCK_ROWS;
    int role = warpgroup_index();
    if (role < GROUPS) {
        if constexpr (SHARES_REGISTERS) grow_registers<GROUP_REGISTERS>();
        // So does knowing that there are two.
        attend(p, item, first_row, role & 1, shared, units);
    } else {
        if constexpr (SHARES_REGISTERS) shrink_registers<LOADER_REGISTERS>();
        int loader = warp_of_group();
        if constexpr (GATHERS) {
            gather_units(p, item, units);
        } else if (loader < LOADERS) {
            load_units<!FP8, true>(p, item, loader, LOADERS, latent, rope, units, [](int, int i) { return i; }, [](int) {});
        }
    }
}
