// The stream of tiles that a block of stage 1 works through, and the warp that loads it.
//
// Tiles begin at multiples of TILE_TOKENS, where a page or an eighth of a tile begins as well, so boxes of 64 columns x 8 to 64
// tokens cover them. A piece that begins or ends inside a tile leaves tokens that are not its own to be masked.

constexpr int UNIT_COLUMNS = 64;
constexpr int UNIT_BYTES = TILE_TOKENS * UNIT_COLUMNS * 2;
constexpr int LATENT_UNITS = KV_LORA_RANK / UNIT_COLUMNS;
constexpr int HALF_UNITS = LATENT_UNITS / 2;
constexpr int HALF_BYTES = HALF_UNITS * UNIT_BYTES;
static_assert(TILE_TOKENS == 64 && KV_LORA_RANK == 512 && (ROPE_DIM == 64 || ROPE_DIM == 0), "units of 64 x 64");

/// A cache of 8-bit floats, which become f16 on the way to the products.
constexpr bool FP8 = bytes_of(KV_DTYPE) == 1;
static_assert(!FP8 || KV_DTYPE == FP8_E4M3, "the device's own 8-bit floats");

constexpr float LAZY_MAX = 8.0f;        // 2^8 times the running scale fits f16 and bf16
constexpr float NO_MAXIMUM = -1.0e30f;  // finite: exp2(-inf - NO_MAXIMUM) is 0, not NaN

/// The block's share of the schedule: from `token` of `seq` up to `end_token` of `end_seq`.
struct Part {
    int seq, token, end_seq, end_token, split;

    DEVICE bool empty() const { return seq > end_seq || (seq == end_seq && token >= end_token); }
};

DEVICE Part find_part(const DecodeParams& p, int item) {
    if (p.schedule_kind == BALANCED) {
        const int GLOBAL* words = schedule_of(p).parts + (int64)item * PART_WORDS;
        Word4 ends = *(const Word4 GLOBAL*)words;
        return {(int)ends.x, (int)ends.y * TILE_TOKENS, (int)ends.z, (int)ends.w * TILE_TOKENS, words[4]};
    }
    int seq = item / p.num_kv_splits;
    int split = item % p.num_kv_splits;
    int tokens = extent(p, seq);
    int64 begin = (int64)split_length(p, tokens) * split;
    int64 end = begin + split_length(p, tokens);
    if (begin >= tokens) return {seq, 0, seq, 0, 0};
    return {seq, (int)begin, seq, end < tokens ? (int)end : tokens, split};
}

/// A position in the stream: the tile that begins at `token` of `seq`, whose piece ends at `end`.
struct Cursor {
    int seq, token, end, split;
    bool more;

    DEVICE Cursor(const DecodeParams& p, const Part& part) : seq(part.seq), token(part.token), end(0), split(part.split) {
        settle(p, part);
        token &= -TILE_TOKENS;
    }

    /// Moves to the first piece with tokens at or after the current `seq` and `token`.
    DEVICE void settle(const DecodeParams& p, const Part& part) {
        more = false;
        NO_UNROLL while (seq < part.end_seq || (seq == part.end_seq && token < part.end_token)) {
            end = extent(p, seq);
            if (seq == part.end_seq) end = smaller(end, part.end_token);
            more = token < end;
            if (more) break;
            seq++;
            token = 0;
            split = 0;
        }
    }

    /// Whether the tile is the last of its piece.
    DEVICE bool last() const { return token + TILE_TOKENS >= end; }

    DEVICE void advance(const DecodeParams& p, const Part& part) {
        token += TILE_TOKENS;
        if (token < end) return;
        seq++;
        token = 0;
        split = 0;
        settle(p, part);
    }
};

/// Where the block table has the page of a token.
DEVICE const int GLOBAL* page_entry(const DecodeParams& p, int seq, int token) {
    return global_pointer<const int>(p.block_table) + quotient(seq, num_groups(p)) * p.table_stride + token / p.page_size;
}
/// The page of a token before `end`, the end of a piece: what lies past it is not looked up.
DEVICE int page_of(const DecodeParams& p, int seq, int token, int end) {
    return token < end ? load_now(page_entry(p, seq, token)) : -1;
}

/// A place in a ring of `count`, and the parity of its present phase.
template <int count>
struct Place {
    int index, parity;

    DEVICE void advance(int by = 1) {
        index += by;
        if (index >= count) {
            index -= count;
            parity ^= 1;
        }
    }
};
/// The place of the ring's `n`th filling.
template <int count>
DEVICE Place<count> place_of(int n) {
    return {n % count, n / count & 1};
}

/// The tiles in shared memory: a ring of half tiles, and one of rotary units. Every unit of columns has a barrier that ends a phase
/// when it has come, every half and every rotary unit one that does when its readers are done with it. Rotary units of even and of
/// odd tiles have barriers of their own also where they share a place: who waits for one need not have seen the one before.
///
/// Who waits for a phase must know that the one before has ended, or takes an older one of the same parity for it. The loader and
/// the sides of form 1 do: places are emptied and filled in order, and what was in the place of a side's tile before is of the tile
/// two or three earlier, whose weights it has made or taken over; it waits for each rotary unit of its tiles, and takes over every
/// tile of the other side.
constexpr int HALVES = 2 * STAGES - !FP8;
constexpr int ROTARY_AT = HALVES * HALF_BYTES;
constexpr int ROTARIES = FORM == 1 ? 1 : STAGES - 1;
constexpr int RING_BYTES = ROTARY_AT + ROTARIES * UNIT_BYTES;
constexpr int RING_BARRIERS = HALVES * (HALF_UNITS + 1) + 2 + ROTARIES;
using HalfPlace = Place<HALVES>;
using TilePlace = Place<ROTARIES>;

struct Ring {
    uint32 base, barriers;

    DEVICE uint32 half(int index) const { return base + index * HALF_BYTES; }
    DEVICE uint32 rotary(int index) const { return base + ROTARY_AT + index * UNIT_BYTES; }
    DEVICE uint32 half_full(int index) const { return barriers + index * HALF_UNITS * 8; }
    DEVICE uint32 half_empty(int index) const { return barriers + (HALVES * HALF_UNITS + index) * 8; }
    DEVICE uint32 rotary_full(int odd) const { return barriers + (HALVES * (HALF_UNITS + 1) + odd) * 8; }
    DEVICE uint32 rotary_empty(int index) const { return barriers + (HALVES * (HALF_UNITS + 1) + 2 + index) * 8; }

    /// The parity of the phase of a half's `empty` to wait for before a filling: form 1 keeps the last two places at first, which
    /// puts their phases one ahead.
    DEVICE int parity_of_room(const HalfPlace& half) const { return half.parity ^ !(FORM == 1 && half.index >= HALVES - 2); }

    /// To be called by one thread, with how many warps read a half and a rotary unit, and how many arrivals fill a unit.
    DEVICE void init(int half_readers, int rotary_readers, int writers) const {
        for (int i = 0; i < HALVES * HALF_UNITS; i++) barrier_init(barriers + i * 8, writers);
        for (int i = 0; i < HALVES; i++) barrier_init(half_empty(i), half_readers);
        for (int i = 0; i < 2; i++) barrier_init(rotary_full(i), writers);
        for (int i = 0; i < ROTARIES; i++) barrier_init(rotary_empty(i), rotary_readers);
    }
};

/// Which of the cache's tokens a lane loads of the tile at a cursor: BOX rows of a page. Lanes beyond the tile's boxes load none.
struct Box {
    int rows, page, entry;

    /// Of the first tile of a part, before lengths tell where that is: most often where the part begins.
    DEVICE Box(const DecodeParams& p, const Part& part) : rows(smaller(p.page_size & -p.page_size, TILE_TOKENS)) {
        look_up(p, part.seq, part.token & -TILE_TOKENS, p.table_width * p.page_size);
    }

    /// A page past the piece's end is not looked up, and one outside the cache is not followed: their rows become zeros.
    DEVICE void look_up(const DecodeParams& p, int seq, int first, int end) {
        int token = first + lane_index() * rows;
        page = -1;
        if (token < end && lane_index() * rows < TILE_TOKENS) page = *page_entry(p, seq, token);
        entry = token % p.page_size;
    }

    /// Sees to it that these are of the part's first tile, now that lengths tell where that is.
    DEVICE void confirm(const DecodeParams& p, const Part& part, const Cursor& at) {
        if (at.seq != part.seq) {
            if (at.more) look_up(p, at.seq, at.token, at.end);
        } else if (at.token + lane_index() * rows >= at.end) {
            page = -1;
        }
    }

    /// Asks for this lane's rows of a unit of columns.
    DEVICE void fetch(const TensorMap& map, int column) const {
        if (page >= 0) fetch_box(map, column * UNIT_COLUMNS, entry, page);
    }

    /// Copies this lane's rows of `count` units of columns.
    DEVICE void copy(const TensorMap& map, int column, uint32 to, int count, uint32 full) const {
        if (lane_index() * rows >= TILE_TOKENS) return;
        to += lane_index() * rows * UNIT_COLUMNS * 2;
        NO_UNROLL for (int unit = 0; unit < count; unit++) {
            copy_box(to + unit * UNIT_BYTES, map, (column + unit) * UNIT_COLUMNS, entry, page, full + unit * 8);
        }
    }
};

/// This warp is done with a place of the ring.
DEVICE void release(uint32 barrier) {
    warp_barrier();
    if (lane_index() == 0) barrier_arrive(barrier);
}

/// The loader: one warp keeps the ring filled. `turn` is told when a tile of another sequence is next.
template <typename Turn>
DEVICE void load_tiles(const DecodeParams& p, const Part& part, const TensorMap& latent, const TensorMap& rope, const Ring& ring,
                       Turn turn) {
    Box box(p, part);
    Cursor at(p, part);
    box.confirm(p, part, at);
    HalfPlace half = {0, 0};
    TilePlace tile = {0, 1};
    int odd = 0;  // in form 1 the right half is done with first, and comes first
    NO_UNROLL while (at.more) {
        auto load_rotary = [&] {
            if (ROPE_DIM == 0) return;
            uint32 full = ring.rotary_full(odd);
            barrier_wait(ring.rotary_empty(tile.index), tile.parity);
            if (lane_index() == 0) barrier_expect(full, UNIT_BYTES);
            warp_barrier();
            box.copy(rope, 0, ring.rotary(tile.index), 1, full);
        };
        if (FORM == 1) load_rotary();
        NO_UNROLL for (int i = 0; i < 2; i++) {
            int column = (i ^ (FORM == 1 && odd)) * HALF_UNITS;
            uint32 full = ring.half_full(half.index);
            barrier_wait(ring.half_empty(half.index), ring.parity_of_room(half));
            if (lane_index() < HALF_UNITS) barrier_expect(full + lane_index() * 8, UNIT_BYTES);
            warp_barrier();
            box.copy(latent, column, ring.half(half.index), HALF_UNITS, full);
            half.advance();
        }
        if (FORM != 1) load_rotary();
        int seq = at.seq;
        at.advance(p, part);
        if (at.more) box.look_up(p, at.seq, at.token, at.end);
        if (at.more && at.seq != seq) turn(at.seq);
        tile.advance();
        odd ^= 1;
    }
}

/// Clears a half tile's rows from `valid` on, by one warpgroup: weights of zero do not undo a NaN.
DEVICE void clear_rows(unsigned char SHARED* half, int valid) {
    int thread = thread_index() % 128;
    NO_UNROLL for (int row = valid + thread / 32; row < TILE_TOKENS; row += 4) {
        *(Word4 SHARED*)(half + thread % 32 / 8 * UNIT_BYTES + row * 128 + thread % 8 * 16) = {0, 0, 0, 0};
    }
    publish_to_async();
}

/// Products to logits, in units of powers of two; those of tokens that a row does not see are for the caller to mask.
template <int count>
DEVICE void scale_logits(const DecodeParams& p, float (&x)[count]) {
    float scale = p.sm_scale * p.kv_scale * LOG2_E;
    if (p.softcap == 0.0f) {
        UNROLL for (int i = 0; i < count; i++) x[i] *= scale;
        return;
    }
    // c tanh(y) = c (1 - 2 / (exp(2 y) + 1))
    float inner = scale * 2.0f / p.softcap;
    UNROLL for (int i = 0; i < count; i++) {
        x[i] = p.softcap * LOG2_E * (1.0f - 2.0f / (exp2(x[i] * inner) + 1.0f));
    }
}

/// Stores 16 bytes of an output row, which begins at a multiple of 8.
DEVICE void store_output(uint16 GLOBAL* to, const Word4& word) {
    if ((uint64)to % 16 == 0) {
        *(Word4 GLOBAL*)to = word;
    } else {
        *(Word2 GLOBAL*)to = {word.x, word.y};
        *(Word2 GLOBAL*)(to + 4) = {word.z, word.w};
    }
}
