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
constexpr int PIECE_BYTES = 32;
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
constexpr int TOTAL_AT = EXCHANGE_AT + SIDES * SIDE_WARPS * ROWS * 4;   // of each row's weights
constexpr int SCALE_AT = TOTAL_AT + ROWS * 4;                           // of the result's rows, for each side
constexpr int LIMIT_AT = SCALE_AT + SIDES * ROWS * 4;
constexpr int ADDRESSES_AT = LIMIT_AT + 2 * ROWS * 4;
constexpr int RAISED_AT = ADDRESSES_AT + 2 * 2 * ROWS * 8;  // whether a place's tile raised maxima
constexpr int ALONE_AT = RAISED_AT + WEIGHTS_PLACES * 4;    // whether a piece is its sequence's only one
constexpr int PIECE_AT = divide_up(ALONE_AT + 2 * 4, 16) * 16;
constexpr int ITEM_AT = PIECE_AT + 2 * PIECE_BYTES;
constexpr int CAP_AT = ITEM_AT + 2 * 4;  // what undoes the scaling of queries, where logits are capped
constexpr int BARRIERS_AT = CAP_AT + 2 * ROWS * 4;
constexpr int READY_AT = BARRIERS_AT + UNITS_BARRIERS_BYTES;
constexpr int BEGUN_AT = READY_AT + SIDES * 8;
constexpr int ASKED_AT = BEGUN_AT + 8;
constexpr int LIMITED_AT = ASKED_AT + 8;
constexpr int ADDED_AT = LIMITED_AT + 8;
constexpr int SHARED_BYTES = ADDED_AT + 8;
static_assert(SHARED_BYTES <= MOST_SHARED_BYTES && BARRIERS_AT % 8 == 0, "a unit's shared memory");

/// What turns products with a query row into logits, and the maximum that weights are relative to: 0 before the first tile.
struct alignas(8) RowState {
    float scale, maximum;
};

/// Query row of a lane's `i`-th column.
DEVICE int lane_row(int lane, int i) { return i / 2 * 8 + lane % 4 * 2 + i % 2; }

constexpr int ADDERS = 2;  // warps that add up weights, a lane for each row
static_assert(ADDERS * 32 == ROWS && LOADERS + ADDERS == SIDE_WARPS, "the third warpgroup");
/// Waits for one of the sides.
DEVICE void side_barrier(int side) { named_barrier(1 + side, SIDE_THREADS); }

/// Where sides and adders wait for each other, besides what is in the ring. Each lane arrives for itself, which is how racecheck
/// follows it.
struct Meetings {
    uint32 barriers;  // those of the ring

    DEVICE uint32 at(int place) const { return barriers - BARRIERS_AT + place; }
    /// Of the weights of a tile: its side arrives when they are there, and the adders when they have added those of the tile before the
    /// last, in whose place the next ones will be.
    DEVICE uint32 ready(int n) const { return at(READY_AT + n % SIDES * 8); }

    /// To be called by one warp, a lane for each.
    DEVICE void init() const {
        static_assert(BEGUN_AT == READY_AT + SIDES * 8 && SHARED_BYTES == READY_AT + (SIDES + 4) * 8, "one behind the other");
        int lane = lane_index(), place = READY_AT + lane * 8, adders = ADDERS * 32;
        int threads = lane < SIDES ? SIDE_THREADS + adders : place < LIMITED_AT ? SIDES * SIDE_THREADS : SIDES * SIDE_THREADS + adders;
        if (place < SHARED_BYTES) barrier_init(at(place), threads);
        barrier_publish_init();
    }

    /// The sides meet at such a place.
    DEVICE void meet(int place, int parity) const {
        barrier_arrive(at(place));
        barrier_wait(at(place), parity);
    }
    /// Says that this lane's weights of a tile are there, or that it has added those of the tile two before.
    DEVICE void tell(int n) const { barrier_arrive(ready(n)); }
    /// Waits for the weights of a tile.
    DEVICE void wait_for_weights(int n) const { barrier_wait(ready(n), n / SIDES & 1); }
};

/// Sixteen bytes of shared memory.
DEVICE void load_words(uint32 (&word)[4], const unsigned char SHARED* from) {
    Word4 words = *(const Word4 SHARED*)from;
    word[0] = words.x;
    word[1] = words.y;
    word[2] = words.z;
    word[3] = words.w;
}

/// Where a tile of the block lies in the ring.
DEVICE UnitPlace place_of(int n) { return {n % RING_TILES * TILE_UNITS, n / RING_TILES & 1}; }

/// The order in which the units of a tile come: rotary columns, then the half of the columns of the side whose tile it is not. What was in
/// its places is free in this order, too: that side has added the tile before last, whose own side it was, earlier than the other.
DEVICE int unit_of(int n, int i) {
    if (ROPE_DIM > 0 && i == 0) return CACHED_UNITS;
    return (i - (ROPE_DIM > 0)) ^ (n % SIDES == 0 ? SIDE_UNITS : 0);
}

/// Where a piece's rows go, and their LSEs: to its slot, or to the output where it is its sequence's only one. 0 for none.
enum Address { TO_RESULT, TO_LSE };
DEVICE uint64 SHARED* addresses(int turn, Address of, unsigned char SHARED* shared) {
    return (uint64 SHARED*)(shared + ADDRESSES_AT) + (turn * 2 + of) * ROWS;
}
DEVICE RowState SHARED* row_states(int turn, unsigned char SHARED* shared) { return (RowState SHARED*)(shared + ROWS_AT) + turn * ROWS; }
/// Whether the tile `n` raised maxima, and what then was summed before is multiplied by, for each row.
DEVICE int SHARED& raised(int n, unsigned char SHARED* shared) { return ((int SHARED*)(shared + RAISED_AT))[n % WEIGHTS_PLACES]; }
DEVICE float SHARED* factors(int n, unsigned char SHARED* shared) {
    return (float SHARED*)(shared + FACTOR_AT) + n % WEIGHTS_PLACES * ROWS;
}
DEVICE float SHARED* cap_scales(int turn, unsigned char SHARED* shared) { return (float SHARED*)(shared + CAP_AT) + turn * ROWS; }
DEVICE int SHARED* limits(int turn, unsigned char SHARED* shared) { return (int SHARED*)(shared + LIMIT_AT) + turn * ROWS; }
DEVICE int SHARED& alone(int turn, unsigned char SHARED* shared) { return ((int SHARED*)(shared + ALONE_AT))[turn]; }

/// What a block computes of a sequence: the tiles from `token` to `end`, of which tokens before `begin` are another block's. `end` is 0
/// where there is none.
struct alignas(16) Piece {
    int seq, token, end, begin, split;
};
DEVICE Piece SHARED& piece_of(int turn, unsigned char SHARED* shared) { return ((Piece SHARED*)(shared + PIECE_AT))[turn]; }
static_assert(sizeof(Piece) == PIECE_BYTES, "two of them in shared memory");

/// The block's item of the schedule, and its first query row in the group.
DEVICE int SHARED& item_of(unsigned char SHARED* shared) { return ((int SHARED*)(shared + ITEM_AT))[0]; }
DEVICE int SHARED& first_row_of(unsigned char SHARED* shared) { return ((int SHARED*)(shared + ITEM_AT))[1]; }

/// Writes how many tokens each row sees of the piece that is this turn's, by the adders.
DEVICE void describe_limits(const DecodeParams& p, int turn, unsigned char SHARED* shared) {
    int local = thread_index() % ROWS;
    Row of = row_of(p, piece_of(turn, shared).seq, first_row_of(shared) + local);
    int visible = visible_tokens(p, sequence_length(p, of.seq), of.token);
    limits(turn, shared)[local] = of.valid ? smaller(visible, piece_of(turn, shared).end) : 0;
}

/// Writes what else is to be known of it when it ends, and which one is next, likewise.
DEVICE void describe(const DecodeParams& p, int turn, unsigned char SHARED* shared) {
    int local = thread_index() % ROWS;
    int row = first_row_of(shared) + local;
    Row of = row_of(p, piece_of(turn, shared).seq, row);
    Slots slots = slots_of(p, piece_of(turn, shared).seq);
    int64 slot = slots.count == 0 ? -1 : slots.begin + piece_of(turn, shared).split;
    addresses(turn, TO_RESULT, shared)[local] = of.valid ? (uint64)result_row(p, of, slot, row) : 0;
    uint64 lse = 0;
    if (slot >= 0) {
        lse = p.partial_lse + (slot * group_rows(p) + row) * 4;
    } else if (p.lse != 0) {
        lse = p.lse + (of.seq * p.lse_stride_batch + of.token * p.lse_stride_token + of.head) * 4;
    }
    addresses(turn, TO_LSE, shared)[local] = of.valid ? lse : 0;
    if (local > 0) return;
    alone(turn, shared) = slots.count == 0;
    Part whole = find_part(p, item_of(shared));
    Part rest = {piece_of(turn, shared).seq + 1, 0, whole.end_seq, whole.end_token, 0};
    Cursor next(p, rest);
    piece_of(turn ^ 1, shared) = {next.seq, 0, next.more ? next.end : 0, 0, 0};
}

/// The words of a query row, sixteen bytes each, that a thread loads and rearranges: of each unit of the cache (here called a block) those
/// that have a quarter of each lane's share of columns (fp8.h), and of the result a quarter of its words. Four threads share a row; eight
/// lanes that access shared memory together have eight rows. Code that is executed once is kept short: it is not near.
struct QueryWords {
    static constexpr int BLOCK_BYTES = 2 * QUERY_UNIT_BYTES;  // of a block of 128 columns
    static constexpr int BLOCKS = CACHED_UNITS + (ROPE_DIM > 0);
    int row, quarter;
    unsigned char SHARED* line;

    DEVICE QueryWords(unsigned char SHARED* shared) {
        int thread = unhoisted(thread_index());
        row = thread / 32 * 8 + thread % 8;
        quarter = thread / 8 % 4;
        line = shared + QUERY_AT + row * 128;
    }
    /// The address of a word of the row within its block.
    DEVICE unsigned char SHARED* place(int word) const { return line + word / 8 * QUERY_UNIT_BYTES + (word % 8 ^ row % 8) * 16; }
    /// The thread's words as loaded, one of each lane's share, and as products want them, in a latent block or the rotary one.
    DEVICE int loaded(int share, bool rotary) const { return rotary ? share * 2 + quarter % 2 : share * 4 + quarter; }
    DEVICE int wanted(int i) const { return quarter * 4 + i; }
};

/// Where a thread's words of the query rows of a virtual sequence lie, which may be found before its turn.
struct QuerySource {
    uint64 from;
    bool valid;  // rows that do not exist become zeros

    DEVICE QuerySource(const DecodeParams& p, int virtual_seq, unsigned char SHARED* shared) {
        QueryWords words(shared);
        Row row = row_of(p, virtual_seq, first_row_of(shared) + words.row);
        valid = row.valid;
        from = p.q + words.quarter * 16;
        if (valid) from += (row.seq * p.q_stride_batch + row.token * p.q_stride_token + row.head * p.q_stride_head) * 2;
    }

    /// Asks for them, by both sides. Each block is waited for by itself.
    DEVICE void load(unsigned char SHARED* shared) const {
        QueryWords words(shared);
        uint64 at = from;
        NO_UNROLL for (int block = 0; block < QueryWords::BLOCKS; block++, at += 256) {
            bool rotary = block == CACHED_UNITS;
            if (!rotary || words.quarter < 2) {
                UNROLL for (int share = 0; share < 4; share++) {
                    copy16_async_at(shared_address(words.place(words.loaded(share, rotary)) + block * QueryWords::BLOCK_BYTES),
                                    at + share * (rotary ? 32 : 64), valid);
                }
            }
            copy_commit();
        }
    }
};

/// Waits for `block` and those after it, of which each is looked at as it comes: the largest pair of sizes.
template <int block>
DEVICE void measure_blocks(const QueryWords& words, uint32& largest) {
    copy_wait<QueryWords::BLOCKS - 1 - block>();
    if (block < CACHED_UNITS || words.quarter < 2) {  // what another thread asked for may not be there
        UNROLL for (int share = 0; share < 4; share++) {
            uint32 raw[4];
            load_words(raw, words.place(words.loaded(share, block == CACHED_UNITS)) + block * QueryWords::BLOCK_BYTES);
            UNROLL for (int i = 0; i < 4; i++) largest = larger_pair(largest, raw[i] & 0x7fff7fffu);
        }
    }
    if constexpr (block + 1 < QueryWords::BLOCKS) measure_blocks<block + 1>(words, largest);
}

/// Waits for them, says so by `come`, and makes f16 of them, by both sides, in the order in which keys are read.
template <typename Come>
DEVICE void receive_queries(const DecodeParams& p, int turn, unsigned char SHARED* shared, Come come) {
    QueryWords words(shared);
    uint32 largest = 0;
    measure_blocks<0>(words, largest);
    come();
    auto load = [&](uint32 (&raw)[4][4], int block) {
        UNROLL for (int share = 0; share < 4; share++) {
            load_words(raw[share], words.place(words.loaded(share, block == CACHED_UNITS)) + block * QueryWords::BLOCK_BYTES);
        }
    };
    UNROLL for (int mask = 8; mask < 32; mask *= 2) largest = larger_pair(largest, shuffle_xor(largest, mask));
    float low, high;
    unpack(largest, low, high);
    float scale = fitting_scale(float_bits(maximum(low, high)));
    if (words.quarter == 0) {
        float undo = bits_float((254u << 23) - float_bits(scale));  // a power of two
        bool capped = p.softcap != 0.0f;  // then products become logits first
        cap_scales(turn, shared)[words.row] = undo;
        row_states(turn, shared)[words.row] = {capped ? 1.0f : undo * p.sm_scale * p.kv_scale * LOG2_E, 0.0f};
    }
    NO_UNROLL for (int block = 0; block < QueryWords::BLOCKS; block++) {
        uint32 raw[4][4];
        load(raw, block);
        warp_barrier();  // a row's words are all of this warp
        UNROLL for (int i = 0; i < 4; i++) {
            uint32 pairs[4];
            UNROLL for (int share = 0; share < 4; share++) {
                unpack(raw[share][i], low, high);
                pairs[share] = pack_f16(low * scale, high * scale);
            }
            if (block < CACHED_UNITS || words.quarter < 2) {
                *(Word4 SHARED*)(words.place(words.wanted(i)) + block * QueryWords::BLOCK_BYTES) = {pairs[0], pairs[1], pairs[2], pairs[3]};
            }
        }
    }
    publish_to_async();
}

/// Asks for the queries of the part's first piece, and says which that is; takes the turn if the schedule stands. To be followed by a
/// meeting.
DEVICE void begin_part(const DecodeParams& p, unsigned char SHARED* shared) {
    Part part = find_part(p, item_of(shared));
    // As early as may be: the loaders stop at the first tile until they have come. In a step's first layer that is before it is known
    // whether the part's first sequence is empty, which is seldom.
    int seq = part.seq, asked = -1;
    int first = -1, end = 0, split = 0, token = 0;
    NO_UNROLL for (int look = p.settled ? 1 : 0; look < 2; look++) {
        if (look) {
            Cursor at(p, part);
            seq = first = at.seq;
            token = at.token;
            split = at.split;
            end = at.more ? at.end : 0;
        }
        bool asks = seq != asked && seq < p.batch * num_groups(p) && (!look || end > 0);
        QuerySource source(p, asks ? seq : 0, shared);
        if (look && p.settled) take_turn();
        if (!asks) continue;
        copy_wait<0>();
        source.load(shared);
        asked = seq;
    }
    if (thread_index() == 0) piece_of(0, shared) = {first, token, end, first == part.seq ? part.token : 0, split};
}
