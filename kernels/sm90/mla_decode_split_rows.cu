// Stage 1 of MLA decode for Hopper, query rows as the rows of the products: 64 of them in a block, tiles of 64 tokens.
//
// Four warpgroups, each with its own work and its own share of the registers:
//
//   loader   one warp keeps a ring of tiles filled, in units of 64 columns
//   logits   queries in registers x tile, softmax; the weights take the place of the tile's rotary unit, which is then done with
//   output   two warpgroups: weights x half of the tile's columns each, sums in registers
//
// The weights of a tile are handed on before the logits of the next one begin, so that its output runs beside them and its place
// in the ring is free early. Logits begun before the softmax were slower: a warp that begins products of operands in registers
// waits for them. A row's maximum is raised only when a logit exceeds it by LAZY_MAX.

constexpr int ROWS = 64;
constexpr int LOADER_REGISTERS = 24;
constexpr int LOGITS_REGISTERS = 168;
constexpr int OUTPUT_REGISTERS = 160;
constexpr int QUERY_UNITS = LATENT_UNITS + (ROPE_DIM > 0);
#ifndef HELD_UNITS
#define HELD_UNITS 4  // of a query row in registers; the others are read from shared memory
#endif
constexpr int HALF = KV_LORA_RANK / 2;
static_assert(BLOCK_ROWS == ROWS && THREADS == 512, "one loader, one logits, two output warpgroups");
static_assert(LOADER_REGISTERS + LOGITS_REGISTERS + 2 * OUTPUT_REGISTERS <= 512, "registers of a quarter of the unit");

/// What the logits warpgroup says about a tile.
struct alignas(16) Note {
    int flags;  // FIRST, LAST and FINAL
    int valid;  // tokens of the tile before the end of its piece
    int seq;
    int pad;
    int64 slot;  // of the piece's result, or negative for the output; with LAST
};
enum NoteFlags { FIRST = 1, LAST = 2, FINAL = 4 };

/// Shared memory, in bytes from its beginning.
constexpr int QUERY_AT = RING_BYTES;
constexpr int RESCALE_AT = QUERY_AT + (LATENT_UNITS + 1 - HELD_UNITS) * UNIT_BYTES;
constexpr int SCALE_AT = RESCALE_AT + STAGES * ROWS * 4;
constexpr int NOTE_AT = SCALE_AT + STAGES * ROWS * 4;
constexpr int BARRIERS_AT = NOTE_AT + STAGES * (int)sizeof(Note);
constexpr int READY_AT = BARRIERS_AT + RING_BARRIERS * 8;
constexpr int SHARED_BYTES = READY_AT + STAGES * 8;
static_assert(SHARED_BYTES <= 232448, "a unit's shared memory");
#ifdef SPLIT_SHARED_BYTES
static_assert(SHARED_BYTES == SPLIT_SHARED_BYTES, "select.rs counts the same");
#endif

/// A warp's sixteen query rows: units in registers, the others in shared memory.
struct Queries {
    uint32 word[HELD_UNITS][16];

    /// Loads the rows of a virtual sequence; those that do not exist become zeros. Units for registers pass through the
    /// warp's rows of the first unit in shared memory, where they take the arrangement that the products expect.
    DEVICE void load(const DecodeParams& p, int virtual_seq, int first_row, unsigned char SHARED* shared) {
        int lane = unhoisted(lane_index());
        int warp_row = warp_of_group() * 16;
        unsigned char SHARED* place[4];
        const uint16 GLOBAL* from[4];
        bool valid[4];
        UNROLL for (int i = 0; i < 4; i++) {
            int local = lane / 8 + i * 4;
            Row row = row_of(p, virtual_seq, first_row + warp_row + local);
            valid[i] = row.valid;
            from[i] = global_pointer<const uint16>(p.q) + lane % 8 * 8;
            if (row.valid) from[i] += row.seq * p.q_stride_batch + row.token * p.q_stride_token + row.head * p.q_stride_head;
            place[i] = shared + (warp_row + local) * 128 + (lane % 8 ^ local % 8) * 16;
        }
        auto fetch = [&](uint32* to, int unit) {
            UNROLL for (int i = 0; i < 4; i++) {
                Word4 raw = {0, 0, 0, 0};
                if (valid[i]) raw = *(const Word4 GLOBAL*)(from[i] + unit * UNIT_COLUMNS);
                to[i * 4] = raw.x;
                to[i * 4 + 1] = raw.y;
                to[i * 4 + 2] = raw.z;
                to[i * 4 + 3] = raw.w;
            }
        };
        auto stage = [&](const uint32* raw) {
            UNROLL for (int i = 0; i < 4; i++) {
                *(Word4 SHARED*)place[i] = {raw[i * 4], raw[i * 4 + 1], raw[i * 4 + 2], raw[i * 4 + 3]};
            }
        };
        UNROLL for (int unit = 0; unit < HELD_UNITS; unit++) fetch(word[unit], unit);
        uint32 first[16];
        fetch(first, HELD_UNITS);
        UNROLL for (int unit = HELD_UNITS + 1; unit < QUERY_UNITS; unit++) {
            UNROLL for (int i = 0; i < 4; i++) {
                copy16_async(place[i] + (unit - HELD_UNITS) * UNIT_BYTES, from[i] + unit * UNIT_COLUMNS, valid[i]);
            }
        }
        copy_commit();
        UNROLL for (int unit = 0; unit < HELD_UNITS; unit++) {
            stage(word[unit]);
            warp_barrier();
            UNROLL for (int step = 0; step < 4; step++) {
                int row = lane % 16;
                load_matrix_at(word[unit] + step * 4,
                               shared_address(shared) + (warp_row + row) * 128 + ((step * 2 + lane / 16) ^ row % 8) * 16);
            }
            warp_barrier();
        }
        stage(first);
        copy_wait<0>();
        publish_to_async();
    }
};

/// Softmax of a lane's two rows; the four lanes of a row hold sixteen tokens each.
struct Softmax {
    float maximum[2], sum[2];  // the sum is this lane's share
    int limit[2];              // tokens that the row sees of this piece
    int begin;                 // first token of this piece

    DEVICE void start(const DecodeParams& p, const Cursor& at, int first_row) {
        int row = first_row + warp_of_group() * 16 + lane_index() / 4;
        UNROLL for (int r = 0; r < 2; r++) {
            maximum[r] = NO_MAXIMUM;
            sum[r] = 0.0f;
            Row of = row_of(p, at.seq, row + r * 8);
            int visible = visible_tokens(p, sequence_length(p, of.seq), of.token);
            limit[r] = of.valid ? smaller(visible, at.end) : 0;
        }
    }

    /// Turns the logits of the tile at `token` into weights, and says what each row's earlier sums are to be multiplied by.
    DEVICE void push(const DecodeParams& p, float (&x)[32], int token, float (&factor)[2]) {
        scale_logits(p, x);
        if (token + TILE_TOKENS > smaller(limit[0], limit[1]) || token < begin) {
            UNROLL for (int i = 0; i < 32; i++) {
                int at = token + i / 4 * 8 + lane_index() % 4 * 2 + i % 2;
                if (at >= limit[i / 2 % 2] || at < begin) x[i] = NEGATIVE_INFINITY;
            }
        }
        UNROLL for (int r = 0; r < 2; r++) {
            float highest = x[2 * r];
            UNROLL for (int j = 0; j < 8; j++) {
                highest = ::maximum(highest, ::maximum(x[4 * j + 2 * r], x[4 * j + 2 * r + 1]));
            }
            highest = lanes_maximum<4>(highest);
            factor[r] = 1.0f;
            if (highest > maximum[r] + LAZY_MAX || maximum[r] == NO_MAXIMUM) {
                float raised = ::maximum(highest, NO_MAXIMUM);
                factor[r] = exp2(maximum[r] - raised);
                maximum[r] = raised;
                sum[r] *= factor[r];
            }
            UNROLL for (int j = 0; j < 8; j++) {
                UNROLL for (int e = 0; e < 2; e++) {
                    float& value = x[4 * j + 2 * r + e];
                    value = exp2(value - maximum[r]);
                    sum[r] += value;
                }
            }
        }
    }

    /// The row's natural-log LSE; `sum` becomes the whole row's. Emptiness is a sum of zero: a NaN must show.
    DEVICE float finish(int r) {
        sum[r] = lanes_sum<4>(sum[r]);
        return sum[r] == 0.0f ? NEGATIVE_INFINITY : (maximum[r] + log2(sum[r])) * LN_2;
    }
};

/// Starts the products of the queries with a tile, unit by unit as they come in.
DEVICE void start_logits(float (&x)[32], const Queries& q, uint32 queries, const Ring& ring, HalfPlace half, TilePlace tile) {
    UNROLL for (int unit = 0; unit < QUERY_UNITS; unit++) {
        if (unit == HALF_UNITS) half.advance();
        bool rotary = unit == LATENT_UNITS;
        uint32 full = rotary ? ring.rotary_full(tile.index) : ring.half_full(half.index) + unit % HALF_UNITS * 8;
        uint32 keys = rotary ? ring.rotary(tile.index) : ring.half(half.index) + unit % HALF_UNITS * UNIT_BYTES;
        barrier_wait(full, rotary ? tile.parity : half.parity);
        products_begin();
        UNROLL for (int step = 0; step < 4; step++) {
            uint64 b = rows_operand(keys + step * 32);
            if (unit < HELD_UNITS) {
                product_64_held(x, q.word[unit % HELD_UNITS] + step * 4, b, unit + step > 0);
            } else {
                product_64(x, rows_operand(queries + (unit - HELD_UNITS) * UNIT_BYTES + step * 32), b, 1);
            }
        }
    }
    products_commit();
}

/// The logits warpgroup: the weights of a tile, then the logits of the next one.
struct Weigher {
    const DecodeParams& p;
    const Part& part;
    int first_row;
    unsigned char SHARED* shared;
    Ring ring;
    Cursor ahead;    // tile whose products are started next
    HalfPlace half;  // its places in the rings
    TilePlace tile;
    bool turn;       // it is the first of its piece
    Queries queries;
    Softmax softmax;
    static constexpr int NAME = 1;

    DEVICE Note SHARED* note(int place) const { return (Note SHARED*)(shared + NOTE_AT) + place; }

    DEVICE void load_queries() {
        named_barrier(NAME, 128);  // no warp reads queries any more
        queries.load(p, ahead.seq, first_row, shared + QUERY_AT);
        named_barrier(NAME, 128);
    }

    /// Says what the other warpgroups need to know of the tile ahead, whose place is free now that it has come.
    DEVICE void describe() {
        if (thread_index() % 128 != 0) return;
        Note SHARED* to = note(tile.index);
        to->flags = (turn ? FIRST : 0) | (ahead.last() ? LAST : 0);
        to->valid = ahead.end - ahead.token;
        to->seq = ahead.seq;
        if (ahead.last()) {
            Slots slots = slots_of(p, ahead.seq);
            to->slot = slots.count == 0 ? -1 : slots.begin + ahead.split;
        }
    }

    /// Turns the logits of the tile at `token`, at a place of the ring, into weights.
    DEVICE void weigh(float (&x)[32], int token, int place, bool last) {
        int lane = lane_index();
        float factor[2];
        softmax.push(p, x, token, factor);

        // Weights go where the rotary unit was.
        int warp_row = warp_of_group() * 16;
        int matrix_row = lane % 16;
        uint32 to = ring.rotary(place) + (warp_row + matrix_row) * 128;
        UNROLL for (int j = 0; j < 8; j += 2) {
            store_matrix(to + ((j + lane / 16) ^ matrix_row % 8) * 16, pack(x[4 * j], x[4 * j + 1]),
                         pack(x[4 * j + 2], x[4 * j + 3]), pack(x[4 * j + 4], x[4 * j + 5]), pack(x[4 * j + 6], x[4 * j + 7]));
        }
        int row = warp_row + lane / 4;
        if (lane % 4 == 0) {
            float SHARED* rescale = (float SHARED*)(shared + RESCALE_AT) + place * ROWS + row;
            rescale[0] = factor[0];
            rescale[8] = factor[1];
        }
        if (last) finish_piece(place, row);
        publish_to_async();
        warp_barrier();
        if (lane == 0) barrier_arrive(ring.base + READY_AT + place * 8);
    }

    DEVICE void finish_piece(int place, int row) {
        float SHARED* scale = (float SHARED*)(shared + SCALE_AT) + place * ROWS + row;
        int64 slot = note(place)->slot;
        UNROLL for (int r = 0; r < 2; r++) {
            float lse = softmax.finish(r);
            if (lane_index() % 4 != 0) continue;
            scale[r * 8] = result_scale(p, softmax.sum[r], slot);
            int group_row = first_row + row + r * 8;
            Row of = row_of(p, note(place)->seq, group_row);
            if (!of.valid) continue;
            if (slot < 0) {
                write_lse(p, of, lse);
            } else {
                global_pointer<float>(p.partial_lse)[slot * group_rows(p) + group_row] = lse;
            }
        }
    }

    DEVICE void run() {
        float x[32];
        int token = -1;  // of the tile whose logits are in `x`; none yet
        softmax.begin = ahead.seq == part.seq ? part.token : 0;
        NO_UNROLL while (true) {
            float ahead_x[32];
            int place = tile.index == 0 ? STAGES - 1 : tile.index - 1;
            if (token >= 0) weigh(x, token, place, turn);
            if (turn) load_queries();
            start_logits(ahead_x, queries, ring.base + QUERY_AT, ring, half, tile);
            describe();
            if (token >= 0 && turn) softmax.begin = 0;
            if (turn) softmax.start(p, ahead, first_row);
            products_wait<0>();
            named_barrier(NAME, 128);  // no warp reads the rotary unit any more
            copy_floats(x, ahead_x);
            half.advance(2);
            tile.advance();
            token = ahead.token;
            turn = ahead.last();
            ahead.advance(p, part);
            if (!warp_any(ahead.more)) break;
        }
        int place = tile.index == 0 ? STAGES - 1 : tile.index - 1;
        if (thread_index() % 128 == 0) note(place)->flags |= FINAL;
        weigh(x, token, place, true);
    }
};

/// Writes this warp's rows of a piece's result, HALF columns from `column` on, by way of the warp's rows of `staging`.
DEVICE void write_output(const DecodeParams& p, float (&o)[2][64], int seq, int64 slot, int first_row, int column,
                         const float (&scale)[2], unsigned char SHARED* staging) {
    constexpr int ROW_BYTES = HALF * 2;
    constexpr int WINDOW = 8;  // words of 16 bytes whose order a row's number changes
    int lane = unhoisted(lane_index());
    staging += warp_of_group() * 16 * ROW_BYTES;
    UNROLL for (int i = 0; i < 128; i++) {
        // A row that saw nothing is zero even beside values that are not finite.
        float factor = scale[i / 2 % 2];
        o[i / 64][i % 64] = factor == 0.0f ? 0.0f : o[i / 64][i % 64] * factor;
    }
    uint32 to = shared_address(staging) + lane % 16 * ROW_BYTES;
    UNROLL for (int word = 0; word < WINDOW; word += 2) {
        uint32 at = to + ((word + lane / 16) ^ lane % 8) * 16;
        UNROLL for (int window = 0; window < ROW_BYTES / 16; window += WINDOW) {
            const float* x = o[window / 16] + (window % 16 + word) * 4;
            store_matrix(at + window * 16, pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
        }
    }
    warp_barrier();
    NO_UNROLL for (int r = 0; r < 16; r++) {
        Row of = row_of(p, seq, first_row + r);
        if (!of.valid) continue;
        store_output(result_row(p, of, slot, first_row + r) + column + lane * 8,
                     *(const Word4 SHARED*)(staging + r * ROW_BYTES + (lane ^ r % 8) * 16));
    }
    publish_to_async();
}

DEVICE void sum_output(const DecodeParams& p, int side, int first_row, unsigned char SHARED* shared, const Ring& ring) {
    int lane = lane_index();
    int row = warp_of_group() * 16 + lane / 4;
    HalfPlace half = {side, 0};
    TilePlace place = {0, 0};
    float o[2][64];  // 128 columns each
    NO_UNROLL while (true) {
        barrier_wait(ring.base + READY_AT + place.index * 8, place.parity);
        const Note SHARED* note = (const Note SHARED*)(shared + NOTE_AT) + place.index;
        int flags = note->flags;
        if (!(flags & FIRST)) {
            const float SHARED* rescale = (const float SHARED*)(shared + RESCALE_AT) + place.index * ROWS + row;
            float factor[2] = {rescale[0], rescale[8]};
            if (warp_any(factor[0] != 1.0f || factor[1] != 1.0f)) {
                UNROLL for (int i = 0; i < 128; i++) o[i / 64][i % 64] *= factor[i / 2 % 2];
            }
        }
        if (note->valid < TILE_TOKENS) {
            clear_rows(shared + half.index * HALF_BYTES, note->valid);
            named_barrier(2 + side, 128);
        }
        uint32 weights = ring.rotary(place.index);
        uint32 values = ring.half(half.index);
        products_begin();
        UNROLL for (int part = 0; part < 2; part++) {
            UNROLL for (int step = 0; step < TILE_TOKENS / 16; step++) {
                product_128(o[part], rows_operand(weights + step * 32),
                            columns_operand<UNIT_BYTES>(values + part * 2 * UNIT_BYTES + step * 2048),
                            step > 0 || !(flags & FIRST));
            }
        }
        products_commit();
        products_wait<0>();

        if (flags & LAST) {
            named_barrier(2 + side, 128);  // no warp reads the values any more
            const float SHARED* scales = (const float SHARED*)(shared + SCALE_AT) + place.index * ROWS + row;
            float scale[2] = {scales[0], scales[8]};
            write_output(p, o, note->seq, note->slot, first_row + warp_of_group() * 16, side * HALF, scale,
                         shared + half.index * HALF_BYTES);
        }
        warp_barrier();
        if (lane == 0) {
            barrier_arrive(ring.half_empty(half.index));
            barrier_arrive(ring.rotary_empty(place.index));
        }
        if (flags & FINAL) break;
        half.advance(2);
        place.advance();
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
        constexpr int GROUP_WARPS = 4;
        ring.init(GROUP_WARPS, 2 * GROUP_WARPS);
        for (int place = 0; place < STAGES; place++) barrier_init(ring.base + READY_AT + place * 8, GROUP_WARPS);
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
    int role = warpgroup_index();
    if (role == 0) {
        shrink_registers<LOADER_REGISTERS>();
        if (warp_of_group() == 0) load_tiles(p, part, at, latent, rope, ring);
    } else if (role == 1) {
        grow_registers<LOGITS_REGISTERS>();
        Weigher{p, part, first_row, shared, ring, at, {0, 0}, {0, 0}, true}.run();
    } else {
        grow_registers<OUTPUT_REGISTERS>();
        sum_output(p, role - 2, first_row, shared, ring);
    }
}
