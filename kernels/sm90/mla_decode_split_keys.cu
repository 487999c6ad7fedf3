// Stage 1 of MLA decode for Hopper, tokens as the rows of the products: 16 or 32 query rows in a block, tiles of 64 tokens.
//
// With few query rows the cache is what takes time. The products are transposed, so that no row of them is wasted:
//
//   groups   two warpgroups take a piece's tiles in turn: logits = tile x queries, softmax down the columns,
//            sums += tile' x weights. Each has sums and maxima of its own; at the end of a piece they are put together
//   loader   one warp keeps the ring filled
//
// While one group waits for its weights the other's products run, and the ring has time to be filled. A query row's maximum is
// raised only when a logit exceeds it by LAZY_MAX, which warps need not tell each other before: the barrier after the weights says
// whether any logit did, and then they are computed again.

constexpr int ROWS = BLOCK_ROWS;
constexpr int QUERY_UNITS = LATENT_UNITS + (ROPE_DIM > 0);
constexpr int QUERY_UNIT_BYTES = ROWS * UNIT_COLUMNS * 2;
constexpr int WEIGHTS_BYTES = ROWS * TILE_TOKENS * 2;
constexpr int SUMS = ROWS / 2;        // of a product, in a lane's registers
constexpr int LANE_ROWS = ROWS / 4;   // query rows of which a lane holds logits and sums: 8 (i / 2) + lane % 4 * 2 + i % 2
constexpr int GROUPS = 2;
constexpr int GROUP_THREADS = 128;
constexpr int GROUP_WARPS = 4;
// Twice the sums of 16 rows need more registers than an equal share: the loader's warpgroup gives up most of its own.
constexpr bool SHARES_REGISTERS = ROWS == 32;
constexpr int LOADER_REGISTERS = 24;
constexpr int GROUP_REGISTERS = 240;
static_assert(ROWS == 16 || ROWS == 32, "columns of the products");
static_assert(THREADS == GROUPS * GROUP_THREADS + (SHARES_REGISTERS ? GROUP_THREADS : 32), "two warpgroups and a loader");

/// Shared memory, in bytes from its beginning. What the groups tell each other, and results, pass through the queries' place.
constexpr int QUERY_AT = UNITS_BYTES;
constexpr int WEIGHTS_AT = QUERY_AT + (LATENT_UNITS + 1) * QUERY_UNIT_BYTES;
constexpr int EXCHANGE_AT = WEIGHTS_AT + 2 * GROUPS * WEIGHTS_BYTES;  // a value per group, warp and row
constexpr int MAXIMA_AT = EXCHANGE_AT + GROUPS * GROUP_WARPS * ROWS * 4;
constexpr int LIMIT_AT = MAXIMA_AT + GROUPS * ROWS * 4;
constexpr int SLOT_AT = LIMIT_AT + ROWS * 4;
constexpr int BARRIERS_AT = SLOT_AT + 8;
constexpr int SHARED_BYTES = BARRIERS_AT + UNITS_BARRIERS_BYTES;
static_assert(SHARED_BYTES <= 232448, "a unit's shared memory");
#ifdef SPLIT_SHARED_BYTES
static_assert(SHARED_BYTES == SPLIT_SHARED_BYTES, "select.rs counts the same");
#endif

/// Query row of a lane's `i`-th column.
DEVICE int lane_row(int lane, int i) { return i / 2 * 8 + lane % 4 * 2 + i % 2; }

/// Waits for both warpgroups.
DEVICE void pair_barrier() { named_barrier(1, GROUPS * GROUP_THREADS); }
/// Waits for one of them.
DEVICE void group_barrier(int group) { named_barrier(2 + group, GROUP_THREADS); }

/// Loads the query rows of a virtual sequence; those that do not exist become zeros.
DEVICE void load_queries(const DecodeParams& p, int virtual_seq, int first_row, unsigned char SHARED* queries) {
    NO_UNROLL for (int local = thread_index() / 8; local < ROWS; local += GROUPS * GROUP_THREADS / 8) {
        Row row = row_of(p, virtual_seq, first_row + local);
        int chunk = thread_index() % 8;
        const uint16 GLOBAL* from = global_pointer<const uint16>(p.q) + chunk * 8;
        if (row.valid) from += row.seq * p.q_stride_batch + row.token * p.q_stride_token + row.head * p.q_stride_head;
        UNROLL for (int unit = 0; unit < QUERY_UNITS; unit++) {
            copy16_async(queries + unit * QUERY_UNIT_BYTES + local * 128 + (chunk ^ local % 8) * 16, from + unit * UNIT_COLUMNS,
                         row.valid);
        }
    }
    copy_commit();
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

    /// Writes what all threads need to know of a piece. To be followed by a barrier, and `begin_piece`.
    static DEVICE void describe(const DecodeParams& p, const Cursor& at, int first_row, unsigned char SHARED* shared) {
        int SHARED* limit = (int SHARED*)(shared + LIMIT_AT);
        int local = thread_index();
        if (local == ROWS) {
            Slots slots = slots_of(p, at.seq);
            *(int64 SHARED*)(shared + SLOT_AT) = slots.count == 0 ? -1 : slots.begin + at.split;
        }
        if (local >= ROWS) return;
        Row of = row_of(p, at.seq, first_row + local);
        int visible = visible_tokens(p, sequence_length(p, of.seq), of.token);
        limit[local] = of.valid ? smaller(visible, at.end) : 0;
    }

    DEVICE void begin_piece() {
        int lane = unhoisted(lane_index());
        least = limit[lane_row(lane, 0)];
        UNROLL for (int i = 0; i < LANE_ROWS; i++) {
            maximum[i] = NO_MAXIMUM;
            sum[i] = 0.0f;
            least = smaller(least, limit[lane_row(lane, i)]);
        }
    }

    /// Turns products into logits.
    DEVICE void mask(const DecodeParams& p, float (&x)[SUMS], int token) const {
        scale_logits(p, x);
        int warp = warp_of_group();
        if (token + TILE_TOKENS <= least && token >= begin) return;
        int lane = unhoisted(lane_index());
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
            word[i / 2] = pack(exp2(x[i] - maximum[i / 4 * 2]), exp2(x[i + 1] - maximum[i / 4 * 2 + 1]));
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

    /// Puts the groups' sums together: `scale` is what this group's are to be multiplied by, and the LSE of this lane's rows comes back.
    DEVICE void join(const DecodeParams& p, int group, float (&scale)[LANE_ROWS], float (&lse)[LANE_ROWS],
                     unsigned char SHARED* shared) {
        float SHARED* exchange = (float SHARED*)(shared + EXCHANGE_AT);
        float SHARED* maxima = (float SHARED*)(shared + MAXIMA_AT);
        int lane = unhoisted(lane_index());
        int warp = warp_of_group();
        UNROLL for (int i = 0; i < LANE_ROWS; i++) {
            int row = lane_row(lane, i);
            UNROLL for (int mask = 4; mask < 32; mask *= 2) sum[i] += shuffle_xor(sum[i], mask);
            if (lane >= 4) continue;
            exchange[(group * GROUP_WARPS + warp) * ROWS + row] = sum[i];
            if (warp == 0) maxima[group * ROWS + row] = maximum[i];
        }
        pair_barrier();
        UNROLL for (int i = 0; i < LANE_ROWS; i++) {
            int row = lane_row(lane, i);
            float highest = ::maximum(maxima[row], maxima[ROWS + row]);
            float total = 0.0f;
            UNROLL for (int other = 0; other < GROUPS; other++) {
                float its_sum = 0.0f;
                UNROLL for (int w = 0; w < GROUP_WARPS; w++) its_sum += exchange[(other * GROUP_WARPS + w) * ROWS + row];
                total += its_sum * exp2(maxima[other * ROWS + row] - highest);
            }
            // Emptiness is a sum of zero: a NaN must show.
            bool empty = total == 0.0f;
            scale[i] = empty ? 0.0f : exp2(maximum[i] - highest) * p.kv_scale / total;
            lse[i] = empty ? NEGATIVE_INFINITY : (highest + log2(total)) * LN_2;
        }
    }
};

/// Columns of the result that a group writes: HALF_UNITS units of 64.
using Half = float[HALF_UNITS][SUMS];

/// Scales a group's sums, and adds the groups': each ends up with its half of the columns.
DEVICE void exchange_halves(const float (&o)[LATENT_UNITS][SUMS], const float (&scale)[LANE_ROWS], int group, Half& own,
                            unsigned char SHARED* staging) {
    auto scaled = [&](int unit, int i) {
        // A row that saw nothing is zero even beside values that are not finite.
        float factor = scale[i / 4 * 2 + i % 2];
        float value = group == 0 ? o[unit][i] : o[(unit + HALF_UNITS) % LATENT_UNITS][i];
        return factor == 0.0f ? 0.0f : value * factor;
    };
    // A lane of the other group holds the very rows and columns of the same lane here.
    constexpr int ROUND_UNITS = 2;
    Float4 SHARED* words = (Float4 SHARED*)staging + thread_index() % GROUP_THREADS;
    auto place = [&](int of, int unit, int i) -> Float4 SHARED& {
        return words[((of * ROUND_UNITS + unit) * SUMS + i) / 4 * GROUP_THREADS];
    };
    UNROLL for (int first = 0; first < HALF_UNITS; first += ROUND_UNITS) {
        if (first > 0) pair_barrier();
        UNROLL for (int unit = 0; unit < ROUND_UNITS; unit++) {
            UNROLL for (int i = 0; i < SUMS; i += 4) {
                int theirs = first + unit + HALF_UNITS;
                place(group, unit, i) = {scaled(theirs, i), scaled(theirs, i + 1), scaled(theirs, i + 2), scaled(theirs, i + 3)};
            }
        }
        pair_barrier();
        UNROLL for (int unit = 0; unit < ROUND_UNITS; unit++) {
            UNROLL for (int i = 0; i < SUMS; i += 4) {
                Float4 more = place(1 - group, unit, i);
                float* to = own[first + unit] + i;
                to[0] = scaled(first + unit, i) + more.x;
                to[1] = scaled(first + unit, i + 1) + more.y;
                to[2] = scaled(first + unit, i + 2) + more.z;
                to[3] = scaled(first + unit, i + 3) + more.w;
            }
        }
    }
    pair_barrier();
}

/// Writes a group's half of a piece's result by way of its own `staging`, to `slot` or, if negative, to the output.
DEVICE void write_half(const DecodeParams& p, const Half& own, int group, int seq, int64 slot, int first_row,
                       unsigned char SHARED* staging) {
    constexpr int ROW_BYTES = KV_LORA_RANK;  // of half the columns in 16 bits, a quarter in float32
    int lane = unhoisted(lane_index());
    int warp = warp_of_group();
    if (slot < 0) {
        UNROLL for (int block = 0; block < SUMS / 8; block++) {
            int row = (block * 2 + lane / 16) * 8 + lane % 8;
            uint32 to = shared_address(staging) + row * ROW_BYTES + ((warp * 2 + lane / 8 % 2) ^ lane % 8) * 16;
            UNROLL for (int unit = 0; unit < HALF_UNITS; unit++) {
                const float* x = own[unit] + block * 8;
                store_matrix_trans(to + unit * 128, pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
            }
        }
        group_barrier(group);
        NO_UNROLL for (int r = warp; r < ROWS; r += GROUP_WARPS) {
            Row of = row_of(p, seq, first_row + r);
            if (!of.valid) continue;
            store_output(output_row(p, of) + group * KV_LORA_RANK / 2 + lane * 8,
                         *(const Word4 SHARED*)(staging + r * ROW_BYTES + (lane ^ r % 8) * 16));
        }
        return;
    }
    UNROLL for (int pass = 0; pass < 2; pass++) {
        UNROLL for (int unit = 0; unit < HALF_UNITS / 2; unit++) {
            UNROLL for (int i = 0; i < SUMS; i++) {
                int row = i / 4 * 8 + lane % 4 * 2 + i % 2;
                int column = warp * 16 + lane / 4 + i / 2 % 2 * 8;
                *(float SHARED*)(staging + row * ROW_BYTES + unit * 256 + (column / 4 ^ lane % 4 * 2) * 16 + column % 4 * 4) =
                    own[pass * HALF_UNITS / 2 + unit][i];
            }
        }
        group_barrier(group);
        NO_UNROLL for (int r = warp; r < ROWS; r += GROUP_WARPS) {
            if (!row_of(p, seq, first_row + r).valid) continue;
            float GLOBAL* to = global_pointer<float>(p.partial_out) + (slot * group_rows(p) + first_row + r) * KV_LORA_RANK;
            *(Float4 GLOBAL*)(to + (group * 2 + pass) * KV_LORA_RANK / 4 + lane * 4) =
                *(const Float4 SHARED*)(staging + r * ROW_BYTES + (lane ^ r / 2 % 4 * 2) * 16);
        }
        group_barrier(group);
    }
}

/// Writes outputs and LSE of a piece.
DEVICE void finish(const DecodeParams& p, const float (&o)[LATENT_UNITS][SUMS], Softmax& softmax, int group, int seq, int first_row,
                   unsigned char SHARED* shared) {
    float scale[LANE_ROWS], lse[LANE_ROWS];
    softmax.join(p, group, scale, lse, shared);
    int64 slot = *(const int64 SHARED*)(shared + SLOT_AT);
    int lane = unhoisted(lane_index());
    UNROLL for (int i = 0; i < LANE_ROWS; i++) {
        int row = first_row + lane_row(lane, i);
        Row of = row_of(p, seq, row);
        if (thread_index() >= 4 || !of.valid) continue;
        if (slot < 0) {
            write_lse(p, of, lse[i]);
        } else {
            global_pointer<float>(p.partial_lse)[slot * group_rows(p) + row] = lse[i];
        }
    }
    Half own;
    exchange_halves(o, scale, group, own, shared + QUERY_AT);
    write_half(p, own, group, seq, slot, first_row, shared + QUERY_AT + group * (QUERY_UNIT_BYTES * LATENT_UNITS / 2));
}

/// A warpgroup: every second tile of each piece.
DEVICE void attend(const DecodeParams& p, const Part& part, Cursor at, int first_row, int group, unsigned char SHARED* shared,
                   const Units& units) {
    int lane = lane_index();
    uint32 queries = units.base + QUERY_AT;
    // Chosen, not computed: the compiler then keeps operands in registers of the whole warp.
    uint32 group_weights = units.base + (group == 0 ? WEIGHTS_AT : WEIGHTS_AT + 2 * WEIGHTS_BYTES);
    float SHARED* exchange = (float SHARED*)(shared + EXCHANGE_AT) + group * GROUP_WARPS * ROWS;
    UnitPlace piece = {0, 0};
    Softmax softmax;
    softmax.limit = (const int SHARED*)(shared + LIMIT_AT);
    softmax.begin = at.seq == part.seq ? part.token : 0;
    float o[LATENT_UNITS][SUMS];
    NO_UNROLL while (true) {
        load_queries(p, at.seq, first_row, shared + QUERY_AT);
        Softmax::describe(p, at, first_row, shared);
        copy_wait<0>();
        publish_to_async();
        pair_barrier();
        softmax.begin_piece();
        int tiles = uniform(divide_up(at.end - at.token, TILE_TOKENS));
        UnitPlace place = piece.after(group * TILE_UNITS);
        NO_UNROLL for (int tile = group; tile < tiles; tile += GROUPS) {
            int token = at.token + tile * TILE_TOKENS;
            bool first = tile < GROUPS;
            // Those of the tile before may still be read by other warps.
            uint32 weights = group_weights + (tile / GROUPS % 2 == 0 ? 0 : WEIGHTS_BYTES);
            float x[SUMS];
            UNROLL for (int unit = 0; unit < TILE_UNITS; unit++) {
                UnitPlace keys = place.after(unit);
                barrier_wait(units.full(keys.index), keys.parity);
                products_begin();
                UNROLL for (int step = 0; step < 4; step++) {
                    product_keys<false>(x, rows_operand(units.unit(keys.index) + step * 32),
                                        rows_operand(queries + unit * QUERY_UNIT_BYTES + step * 32), unit + step > 0);
                }
            }
            products_commit();
            products_wait<0>();
            if (ROPE_DIM > 0 && lane == 0) barrier_arrive(units.empty(place.after(CACHED_UNITS).index));

            softmax.mask(p, x, token);
            if (at.end - token < TILE_TOKENS) clear_tile(shared, place, at.end - token);
            softmax.store_weights(x, weights);
            if (named_barrier_any(2 + group, GROUP_THREADS, softmax.exceeds(x))) {
                float factor[LANE_ROWS];
                softmax.raise(x, factor, group, exchange);
                if (!first) {
                    UNROLL for (int unit = 0; unit < LATENT_UNITS; unit++) {
                        UNROLL for (int i = 0; i < SUMS; i++) o[unit][i] *= factor[i / 4 * 2 + i % 2];
                    }
                }
                softmax.store_weights(x, weights);
                group_barrier(group);
            }
            products_begin();
            UNROLL for (int unit = 0; unit < LATENT_UNITS; unit++) {
                uint32 values = units.unit(place.after(unit).index);
                UNROLL for (int step = 0; step < TILE_TOKENS / 16; step++) {
                    product_keys<true>(o[unit], columns_operand<UNIT_BYTES>(values + step * 2048), rows_operand(weights + step * 32),
                                       step > 0 || !first);
                }
                if (unit == HALF_UNITS - 1) products_commit();
            }
            products_commit();
            softmax.add(x);
            products_wait<1>();
            if (lane < HALF_UNITS) barrier_arrive(units.empty(place.after(lane).index));
            products_wait<0>();
            if (lane < HALF_UNITS) barrier_arrive(units.empty(place.after(HALF_UNITS + lane).index));
            place.advance(GROUPS * TILE_UNITS);
        }
        finish(p, o, softmax, group, at.seq, first_row, shared);
        piece.skip(tiles * TILE_UNITS);
        at.token += (tiles - 1) * TILE_TOKENS;
        at.advance(p, part);
        if (!warp_any(at.more)) break;
        pair_barrier();
        softmax.begin = 0;
    }
}

KERNEL_ONE_BLOCK(THREADS)
mla_decode_split(const __grid_constant__ DecodeParams p, const __grid_constant__ TensorMap latent,
                 const __grid_constant__ TensorMap rope) {
    SHARED_MEMORY_1024(shared);
    Units units = {shared_address(shared), shared_address(shared) + BARRIERS_AT};
    units.init(GROUP_WARPS);
    if (thread_index() == 0) {
        prefetch_map(latent);
        if constexpr (ROPE_DIM > 0) prefetch_map(rope);
    }
    grid_dependency_wait();
    grid_dependency_launch();
    barrier();

    int row_blocks = divide_up(group_rows(p), BLOCK_ROWS);
    int first_row = block_index() % row_blocks * BLOCK_ROWS;
    Part part = find_part(p, block_index() / row_blocks);
    prefetch_pages(p, part);
    Cursor at(p, part);
    if (!at.more) return;
    int role = warpgroup_index();
    if (role < GROUPS) {
        if constexpr (SHARES_REGISTERS) grow_registers<GROUP_REGISTERS>();
        // So does knowing that there are two.
        attend(p, part, at, first_row, role & 1, shared, units);
    } else {
        if constexpr (SHARES_REGISTERS) shrink_registers<LOADER_REGISTERS>();
        if (warp_of_group() == 0) load_units(p, part, at, latent, rope, units);
    }
}
