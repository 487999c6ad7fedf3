// The block of the wide form: 64 query rows over an fp8 cache. Who works in it, where shared memory has what, and what a side knows of
// a piece.

constexpr int ROWS = BLOCK_ROWS;
constexpr int QUERY_UNITS = LATENT_UNITS + (ROPE_DIM > 0);
constexpr int QUERY_UNIT_BYTES = ROWS * UNIT_COLUMNS * 2;
constexpr int WEIGHTS_BYTES = ROWS * TILE_TOKENS * 2;
constexpr int WEIGHTS_PLACES = 3;
constexpr int SUMS = ROWS / 2;       // of a product, in a lane's registers
constexpr int LANE_ROWS = ROWS / 4;  // query rows of which a lane holds logits and sums: 8 (i / 2) + lane % 4 * 2 + i % 2
constexpr int SIDES = 2;
constexpr int SIDE_THREADS = 128;
constexpr int SIDE_WARPS = 4;
constexpr int SIDE_UNITS = CACHED_UNITS / SIDES;  // of a tile, whose columns a side sums up
constexpr int HALF = KV_LORA_RANK / SIDES;
constexpr int LOADER_REGISTERS = 24;
constexpr int SIDE_REGISTERS = 240;
constexpr int LOADERS = 2;
constexpr int RING_TILES = STAGES / TILE_UNITS;
static_assert(FP8 && ROWS == 64 && THREADS == 3 * SIDE_THREADS, "two sides and a loader");
static_assert(STAGES % TILE_UNITS == 0 && RING_TILES >= 3, "a tile is always in the same places");

/// Shared memory, in bytes from its beginning. What describes a piece is there twice, for this one and the next.
constexpr int QUERY_AT = UNITS_BYTES;
constexpr int WEIGHTS_AT = QUERY_AT + QUERY_UNITS * QUERY_UNIT_BYTES;
constexpr int FACTOR_AT = WEIGHTS_AT + WEIGHTS_PLACES * WEIGHTS_BYTES;  // of each row, for what was summed before a place's tile
constexpr int ROWS_AT = FACTOR_AT + WEIGHTS_PLACES * ROWS * 4;          // `RowState` of each row
constexpr int EXCHANGE_AT = ROWS_AT + 2 * ROWS * 8;                     // a value per side, warp and row
constexpr int SCALE_AT = EXCHANGE_AT + SIDES * SIDE_WARPS * ROWS * 4;   // of the result's rows, for each side
constexpr int LIMIT_AT = SCALE_AT + SIDES * ROWS * 4;
constexpr int ADDRESSES_AT = LIMIT_AT + 2 * ROWS * 4;
constexpr int RAISED_AT = ADDRESSES_AT + 2 * 2 * ROWS * 8;  // whether a place's tile raised maxima
constexpr int ALONE_AT = RAISED_AT + WEIGHTS_PLACES * 4;    // whether a piece is its sequence's only one
constexpr int BARRIERS_AT = ALONE_AT + 2 * 4 + 4;
constexpr int READY_AT = BARRIERS_AT + UNITS_BARRIERS_BYTES;  // when a place's weights are there
constexpr int SHARED_BYTES = READY_AT + WEIGHTS_PLACES * 8;
static_assert(SHARED_BYTES <= MOST_SHARED_BYTES && BARRIERS_AT % 8 == 0, "a unit's shared memory");

/// What turns products with a query row into logits, and the maximum that weights are relative to: 0 before the first tile.
struct alignas(8) RowState {
    float scale, maximum;
};

/// Query row of a lane's `i`-th column.
DEVICE int lane_row(int lane, int i) { return i / 2 * 8 + lane % 4 * 2 + i % 2; }

/// Waits for both sides.
DEVICE void pair_barrier() { named_barrier(1, SIDES * SIDE_THREADS); }
/// Waits for one of them.
DEVICE void side_barrier(int side) { named_barrier(2 + side, SIDE_THREADS); }

/// Where a tile of the block lies in the ring.
DEVICE UnitPlace place_of(int n) { return {n % RING_TILES * TILE_UNITS, n / RING_TILES & 1}; }

/// Where a piece's rows go, and their LSEs: to its slot, or to the output where it is its sequence's only one. 0 for none.
enum Address { TO_RESULT, TO_LSE };
DEVICE uint64 SHARED* addresses(int turn, Address of, unsigned char SHARED* shared) {
    return (uint64 SHARED*)(shared + ADDRESSES_AT) + (turn * 2 + of) * ROWS;
}
DEVICE RowState SHARED* row_states(int turn, unsigned char SHARED* shared) { return (RowState SHARED*)(shared + ROWS_AT) + turn * ROWS; }
DEVICE int SHARED* limits(int turn, unsigned char SHARED* shared) { return (int SHARED*)(shared + LIMIT_AT) + turn * ROWS; }
DEVICE int SHARED& alone(int turn, unsigned char SHARED* shared) { return ((int SHARED*)(shared + ALONE_AT))[turn]; }

/// Writes what all threads need to know of a piece, by one side. To be followed by a barrier of both.
DEVICE void describe(const DecodeParams& p, const Cursor& at, int first_row, int turn, unsigned char SHARED* shared) {
    int local = thread_index() % SIDE_THREADS;
    if (local >= ROWS) return;
    int row = first_row + local;
    Row of = row_of(p, at.seq, row);
    int visible = visible_tokens(p, sequence_length(p, of.seq), of.token);
    Slots slots = slots_of(p, at.seq);
    int64 slot = slots.count == 0 ? -1 : slots.begin + at.split;
    limits(turn, shared)[local] = of.valid ? smaller(visible, at.end) : 0;
    addresses(turn, TO_RESULT, shared)[local] = of.valid ? (uint64)result_row(p, of, slot, row) : 0;
    uint64 lse = 0;
    if (slot >= 0) {
        lse = p.partial_lse + (slot * group_rows(p) + row) * 4;
    } else if (p.lse != 0) {
        lse = p.lse + (of.seq * p.lse_stride_batch + of.token * p.lse_stride_token + of.head) * 4;
    }
    addresses(turn, TO_LSE, shared)[local] = of.valid ? lse : 0;
    if (local == 0) alone(turn, shared) = slots.count == 0;
}

/// Asks for the query rows of a virtual sequence, by both sides; those that do not exist become zeros.
DEVICE void load_queries(const DecodeParams& p, int virtual_seq, int first_row, unsigned char SHARED* shared) {
    int chunk = unhoisted(thread_index()) % 8;
    NO_UNROLL for (int local = thread_index() / 8; local < ROWS; local += SIDES * SIDE_THREADS / 8) {
        Row row = row_of(p, virtual_seq, first_row + local);
        const uint16 GLOBAL* from = global_pointer<const uint16>(p.q) + chunk * 8;
        if (row.valid) from += row.seq * p.q_stride_batch + row.token * p.q_stride_token + row.head * p.q_stride_head;
        UNROLL for (int unit = 0; unit < QUERY_UNITS; unit++) {
            copy16_async(shared + QUERY_AT + unit * QUERY_UNIT_BYTES + local * 128 + (chunk ^ local % 8) * 16,
                         from + unit * UNIT_COLUMNS, row.valid);
        }
    }
    copy_commit();
}

/// Waits for them, by both sides, and makes f16 of them in the order in which keys are read; every thread begins with the words that it
/// loaded itself, and the eight that share a row are of one warp.
DEVICE void receive_queries(const DecodeParams& p, int turn, unsigned char SHARED* shared) {
    copy_wait<0>();
    int chunk = unhoisted(thread_index()) % 8;
    NO_UNROLL for (int local = thread_index() / 8; local < ROWS; local += SIDES * SIDE_THREADS / 8) {
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
        if (chunk == 0) row_states(turn, shared)[local] = {1.0f / scale, 0.0f};
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
    publish_to_async();
}
