// Stage 1 of MLA decode for Hopper, tokens as the rows of the products: 16 or 32 query rows in a block, tiles of 64 tokens.
//
// With few query rows the cache is what takes time. The products are transposed, so that no row of them is wasted:
//
//   loader   one warp keeps a ring of tiles filled, in units of 64 columns
//   the rest one warpgroup: logits = tile x queries, softmax down the columns, sums += tile' x weights, 64 columns at a time
//
// A query row's maximum is raised only when a logit exceeds it by LAZY_MAX, which warps need not tell each other before: the
// barrier after the weights says whether any logit did, and then they are computed again.

constexpr int ROWS = BLOCK_ROWS;
constexpr int QUERY_UNITS = LATENT_UNITS + (ROPE_DIM > 0);
constexpr int QUERY_UNIT_BYTES = ROWS * UNIT_COLUMNS * 2;
constexpr int WEIGHTS_BYTES = ROWS * TILE_TOKENS * 2;
constexpr int SUMS = ROWS / 2;        // of a product, in a lane's registers
constexpr int LANE_ROWS = ROWS / 4;   // query rows of which a lane holds logits and sums: 8 (i / 2) + lane % 4 * 2 + i % 2
constexpr int GROUP_THREADS = 128;
constexpr int GROUP_WARPS = 4;
static_assert((ROWS == 16 || ROWS == 32) && THREADS == GROUP_THREADS + 32, "a warpgroup and a loader");

/// Shared memory, in bytes from its beginning. Results pass through the queries' place.
constexpr int QUERY_AT = RING_BYTES;
constexpr int WEIGHTS_AT = QUERY_AT + (LATENT_UNITS + 1) * QUERY_UNIT_BYTES;
constexpr int EXCHANGE_AT = WEIGHTS_AT + 2 * WEIGHTS_BYTES;
constexpr int LIMIT_AT = EXCHANGE_AT + GROUP_WARPS * ROWS * 4;
constexpr int SLOT_AT = LIMIT_AT + ROWS * 4;
constexpr int BARRIERS_AT = SLOT_AT + 8;
constexpr int SHARED_BYTES = BARRIERS_AT + RING_BARRIERS * 8;
static_assert(SHARED_BYTES <= 232448, "a unit's shared memory");
static_assert(ROTARIES == 2, "as many weights as rotary units");
#ifdef SPLIT_SHARED_BYTES
static_assert(SHARED_BYTES == SPLIT_SHARED_BYTES, "select.rs counts the same");
#endif

/// Query row of a lane's `i`-th column.
DEVICE int lane_row(int lane, int i) { return i / 2 * 8 + lane % 4 * 2 + i % 2; }

/// Waits for the warpgroup.
DEVICE void group_barrier() { named_barrier(1, GROUP_THREADS); }

/// Loads the query rows of a virtual sequence; those that do not exist become zeros.
DEVICE void load_queries(const DecodeParams& p, int virtual_seq, int first_row, unsigned char SHARED* queries) {
    NO_UNROLL for (int local = thread_index() / 8; local < ROWS; local += GROUP_THREADS / 8) {
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

/// The reduction of a lane's columns over the warpgroup's 64 tokens, in all lanes.
template <typename Combine>
DEVICE void reduce_tokens(float (&value)[LANE_ROWS], float SHARED* exchange, Combine combine) {
    int lane = unhoisted(lane_index());
    int warp = warp_of_group();
    UNROLL for (int i = 0; i < LANE_ROWS; i++) {
        UNROLL for (int mask = 4; mask < 32; mask *= 2) value[i] = combine(value[i], shuffle_xor(value[i], mask));
        if (lane < 4) exchange[warp * ROWS + lane_row(lane, i)] = value[i];
    }
    group_barrier();
    UNROLL for (int i = 0; i < LANE_ROWS; i++) {
        value[i] = exchange[lane_row(lane, i)];
        UNROLL for (int other = 1; other < GROUP_WARPS; other++) {
            value[i] = combine(value[i], exchange[other * ROWS + lane_row(lane, i)]);
        }
    }
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
    DEVICE void raise(const float (&x)[SUMS], float (&factor)[LANE_ROWS], float SHARED* exchange) {
        float highest[LANE_ROWS];
        UNROLL for (int i = 0; i < LANE_ROWS; i++) highest[i] = ::maximum(x[i / 2 * 4 + i % 2], x[i / 2 * 4 + i % 2 + 2]);
        reduce_tokens(highest, exchange, [](float a, float b) { return ::maximum(a, b); });
        UNROLL for (int i = 0; i < LANE_ROWS; i++) {
            factor[i] = 1.0f;
            if (highest[i] > maximum[i] + LAZY_MAX) {
                factor[i] = exp2(maximum[i] - highest[i]);
                maximum[i] = highest[i];
                sum[i] *= factor[i];
            }
        }
    }

    DEVICE void add(const float (&x)[SUMS]) {
        UNROLL for (int i = 0; i < SUMS; i++) sum[i / 4 * 2 + i % 2] += exp2(x[i] - maximum[i / 4 * 2 + i % 2]);
    }
};

/// Writes a piece's result: LATENT_UNITS x 64 columns of this warpgroup's query rows, to `slot` or, if negative, to the output.
DEVICE void write_output(const DecodeParams& p, const float (&o)[LATENT_UNITS][SUMS], const float (&scale)[LANE_ROWS], int seq,
                         int64 slot, int first_row, unsigned char SHARED* staging) {
    constexpr int ROW_BYTES = KV_LORA_RANK * 2;
    int lane = unhoisted(lane_index());
    int warp = warp_of_group();
    auto scaled = [&](int unit, int i) {
        // A row that saw nothing is zero even beside values that are not finite.
        float factor = scale[i / 4 * 2 + i % 2];
        return factor == 0.0f ? 0.0f : o[unit][i] * factor;
    };
    UNROLL for (int block = 0; block < SUMS / 8; block++) {
        int row = (block * 2 + lane / 16) * 8 + lane % 8;
        uint32 to = shared_address(staging) + row * ROW_BYTES + ((warp * 2 + lane / 8 % 2) ^ lane % 8) * 16;
        UNROLL for (int unit = 0; unit < LATENT_UNITS; unit++) {
            uint32 word[4];
            UNROLL for (int i = 0; i < 4; i++) {
                word[i] = pack(scaled(unit, block * 8 + i * 2), scaled(unit, block * 8 + i * 2 + 1));
            }
            store_matrix_trans(to + unit * 128, word[0], word[1], word[2], word[3]);
        }
    }
    group_barrier();
    NO_UNROLL for (int r = warp; r < ROWS; r += GROUP_WARPS) {
        Row of = row_of(p, seq, first_row + r);
        if (!of.valid) continue;
        UNROLL for (int word = lane; word < ROW_BYTES / 16; word += 32) {
            store_output(result_row(p, of, slot, first_row + r) + word * 8,
                         *(const Word4 SHARED*)(staging + r * ROW_BYTES + (word ^ r % 8) * 16));
        }
    }
}

/// Writes outputs and LSE of a piece.
DEVICE void finish(const DecodeParams& p, const float (&o)[LATENT_UNITS][SUMS], Softmax& softmax, int seq, int first_row,
                   unsigned char SHARED* shared) {
    reduce_tokens(softmax.sum, (float SHARED*)(shared + EXCHANGE_AT), [](float a, float b) { return a + b; });
    int lane = unhoisted(lane_index());
    int warp = warp_of_group();
    int64 slot = *(const int64 SHARED*)(shared + SLOT_AT);
    float scale[LANE_ROWS];
    UNROLL for (int i = 0; i < LANE_ROWS; i++) {
        // Emptiness is a sum of zero: a NaN must show.
        bool empty = softmax.sum[i] == 0.0f;
        scale[i] = result_scale(p, softmax.sum[i], slot);
        float lse = empty ? NEGATIVE_INFINITY : (softmax.maximum[i] + log2(softmax.sum[i])) * LN_2;
        int row = first_row + lane_row(lane, i);
        Row of = row_of(p, seq, row);
        if (warp != 0 || lane >= 4 || !of.valid) continue;
        if (slot < 0) {
            write_lse(p, of, lse);
        } else {
            global_pointer<float>(p.partial_lse)[slot * group_rows(p) + row] = lse;
        }
    }
    write_output(p, o, scale, seq, slot, first_row, shared + QUERY_AT);
}

DEVICE void attend(const DecodeParams& p, const Part& part, Cursor at, int first_row, unsigned char SHARED* shared,
                   const Ring& ring) {
    int lane = lane_index();
    float SHARED* exchange = (float SHARED*)(shared + EXCHANGE_AT);
    HalfPlace left = {0, 0};
    TilePlace tile = {0, 0};
    bool first = true;
    Softmax softmax;
    softmax.limit = (const int SHARED*)(shared + LIMIT_AT);
    softmax.begin = at.seq == part.seq ? part.token : 0;
    float o[LATENT_UNITS][SUMS];
    load_queries(p, at.seq, first_row, shared + QUERY_AT);
    Softmax::describe(p, at, first_row, shared);
    NO_UNROLL while (at.more) {
        if (first) {
            copy_wait<0>();
            publish_to_async();
            group_barrier();
            softmax.begin_piece();
        }
        HalfPlace right = left;
        right.advance();
        float x[SUMS];
        UNROLL for (int unit = 0; unit < QUERY_UNITS; unit++) {
            bool rotary = unit == LATENT_UNITS;
            const HalfPlace& half = unit < HALF_UNITS ? left : right;
            uint32 keys = rotary ? ring.rotary(tile.index) : ring.half(half.index) + unit % HALF_UNITS * UNIT_BYTES;
            barrier_wait(rotary ? ring.rotary_full(tile.index) : ring.half_full(half.index) + unit % HALF_UNITS * 8,
                         rotary ? tile.parity : half.parity);
            products_begin();
            UNROLL for (int step = 0; step < 4; step++) {
                product_keys<false>(x, rows_operand(keys + step * 32),
                                    rows_operand(ring.base + QUERY_AT + unit * QUERY_UNIT_BYTES + step * 32), unit + step > 0);
            }
        }
        products_commit();
        products_wait<0>();
        if (ROPE_DIM > 0 && lane == 0) barrier_arrive(ring.rotary_empty(tile.index));

        softmax.mask(p, x, at.token);
        if (at.end - at.token < TILE_TOKENS) {
            clear_rows(shared + left.index * HALF_BYTES, at.end - at.token);
            clear_rows(shared + right.index * HALF_BYTES, at.end - at.token);
        }
        uint32 weights = ring.base + WEIGHTS_AT + tile.index * WEIGHTS_BYTES;
        softmax.store_weights(x, weights);
        if (named_barrier_any(1, GROUP_THREADS, softmax.exceeds(x))) {
            float factor[LANE_ROWS];
            softmax.raise(x, factor, exchange);
            if (!first) {
                UNROLL for (int unit = 0; unit < LATENT_UNITS; unit++) {
                    UNROLL for (int i = 0; i < SUMS; i++) o[unit][i] *= factor[i / 4 * 2 + i % 2];
                }
            }
            softmax.store_weights(x, weights);
            group_barrier();
        }
        products_begin();
        UNROLL for (int unit = 0; unit < LATENT_UNITS; unit++) {
            uint32 values = ring.half(unit < HALF_UNITS ? left.index : right.index) + unit % HALF_UNITS * UNIT_BYTES;
            UNROLL for (int step = 0; step < TILE_TOKENS / 16; step++) {
                product_keys<true>(o[unit], columns_operand<UNIT_BYTES>(values + step * 2048), rows_operand(weights + step * 32),
                                   step > 0 || !first);
            }
            if (unit == HALF_UNITS - 1) products_commit();
        }
        products_commit();
        softmax.add(x);
        products_wait<1>();
        if (lane == 0) barrier_arrive(ring.half_empty(left.index));
        products_wait<0>();
        if (lane == 0) barrier_arrive(ring.half_empty(right.index));
        left.advance(2);
        tile.advance();

        first = at.last();
        if (first) finish(p, o, softmax, at.seq, first_row, shared);
        at.advance(p, part);
        if (!first || !at.more) continue;
        group_barrier();
        load_queries(p, at.seq, first_row, shared + QUERY_AT);
        Softmax::describe(p, at, first_row, shared);
        softmax.begin = 0;
    }
}

KERNEL_ONE_BLOCK(THREADS)
mla_decode_split(const __grid_constant__ DecodeParams p, const __grid_constant__ TensorMap latent,
                 const __grid_constant__ TensorMap rope) {
    SHARED_MEMORY_1024(shared);
    Ring ring = {shared_address(shared), shared_address(shared) + BARRIERS_AT};
    if (thread_index() == 0) {
        prefetch_map(latent);
        if constexpr (ROPE_DIM > 0) prefetch_map(rope);
        ring.init(GROUP_WARPS, GROUP_WARPS);
        barrier_publish_init();
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
    if (warpgroup_index() == 0) {
        attend(p, part, at, first_row, shared, ring);
    } else {
        load_tiles(p, part, at, latent, rope, ring);
    }
}
