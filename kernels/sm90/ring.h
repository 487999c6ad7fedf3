// The rows form's tiles in shared memory, and the warps that fill them: by boxes of a page, or gathered row by row.

/// Whether a block has one piece at most, as where all are of one sequence.
constexpr bool ONE_PIECE = FORM == 9;

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
/// the sides do: places are emptied and filled in order, and what was in the place of a side's tile before is of the tile
/// two or three earlier, whose weights it has made or taken over; it waits for each rotary unit of its tiles, and takes over every
/// tile of the other side.
constexpr int HALVES = 2 * STAGES - 1;
constexpr int ROTARY_AT = HALVES * HALF_BYTES;
constexpr int RING_BYTES = ROTARY_AT + UNIT_BYTES;
constexpr int RING_BARRIERS = HALVES * (HALF_UNITS + 1) + 3;
using HalfPlace = Place<HALVES>;

struct Ring {
    uint32 base, barriers;

    /// The ring of those that multiply: its tiles are operands.
    DEVICE Ring of_operands() const { return {operand_address(base), barriers}; }

    DEVICE uint32 half(int index) const { return base + index * HALF_BYTES; }
    DEVICE uint32 rotary() const { return base + ROTARY_AT; }
    DEVICE uint32 half_full(int index) const { return barriers + index * HALF_UNITS * 8; }
    DEVICE uint32 half_empty(int index) const { return barriers + (HALVES * HALF_UNITS + index) * 8; }
    DEVICE uint32 rotary_full(int odd) const { return barriers + (HALVES * (HALF_UNITS + 1) + odd) * 8; }
    DEVICE uint32 rotary_empty() const { return barriers + (HALVES * (HALF_UNITS + 1) + 2) * 8; }

    /// The parity of the phase of a half's `empty` to wait for before a filling: the sides keep the last two places at first, which
    /// puts their phases one ahead.
    DEVICE int parity_of_room(const HalfPlace& half) const { return half.parity ^ (half.index < HALVES - 2); }

    /// To be called by one thread, with how many warps read a half and a rotary unit, and how many arrivals fill a unit.
    DEVICE void init(int half_readers, int rotary_readers, int writers) const {
        for (int i = 0; i < HALVES * HALF_UNITS; i++) barrier_init(barriers + i * 8, writers);
        for (int i = 0; i < HALVES; i++) barrier_init(half_empty(i), half_readers);
        for (int i = 0; i < 2; i++) barrier_init(rotary_full(i), writers);
        barrier_init(rotary_empty(), rotary_readers);
    }
};

/// The warp of the loaders' group that prepares the block, and tells the sides and the loaders, which wait in places of their own: by then
/// all have found what follows from schedule and lengths. The kernel of two forms has met before.
constexpr int PREPARING_WARP = 3;
constexpr int SIDES_PREPARED = 4, LOADERS_PREPARED = 5;  // named barriers
constexpr int SIDES_THREADS = 256;
constexpr int WAITING_LOADERS = GATHERS || SMALL_BOXES ? PREPARING_WARP : 1;
DEVICE void tell_prepared() {
    if constexpr (ONE_PIECE) return;
    warp_barrier();
    named_barrier_arrive(SIDES_PREPARED, WAVE + SIDES_THREADS);
    named_barrier_arrive(LOADERS_PREPARED, WAVE + WAITING_LOADERS * WAVE);
}
DEVICE void await_prepared(bool loads) {
    if constexpr (ONE_PIECE) return;
    if (!loads) {
        named_barrier(SIDES_PREPARED, WAVE + SIDES_THREADS);
    } else if (warp_of_group() < WAITING_LOADERS) {
        named_barrier(LOADERS_PREPARED, WAVE + WAITING_LOADERS * WAVE);
    }
}

/// Warps that copy boxes, every so manieth of a tile each: one issues large ones fast enough.
constexpr int LOADERS = SMALL_BOXES ? 4 : 1;
/// Most boxes of a tile that one of them copies: those of 8 tokens are the smallest.
constexpr int SHARE = SMALL_BOXES ? TILE_TOKENS / 8 / LOADERS : 1;

/// The boxes of a part's pieces, as many rows of a page each as its size allows. The lanes take those of a piece in turn, so that page
/// ids are read 32 at a time, and as far ahead.
struct Boxes {
    int shift;              // of two, that is a box's tokens
    int token, page_ahead;  // of this lane's next box
    int page, entry;        // of the one it has taken
    int used;               // lanes whose boxes were of tiles before
    int its_page[SHARE], its_entry[SHARE];  // of the boxes that this warp copies of the tile at hand

    /// Of a part, before lengths tell where its first piece is, most often where the part begins, and perhaps before tables stand.
    DEVICE Boxes(const DecodeParams& p, const Part& part) : shift(highest_bit(smaller(p.page_size & -p.page_size, TILE_TOKENS))) {
        begin_at(part.token & -TILE_TOKENS);
        page_ahead = column_of(p, token) < p.table_width ? load_now(page_entry(p, part.seq, token)) : -1;
    }

    /// Of a tile: one, unless they are small.
    DEVICE int boxes() const { return TILE_TOKENS >> shift; }

    DEVICE void begin_at(int first) {
        token = first + (lane_index() << shift);
        used = 32;
    }

    /// A page past the piece's end is not looked up, and one outside the cache is not followed: their rows become zeros.
    DEVICE int look_up(const DecodeParams& p, int seq, int end) const { return token < end ? *page_entry(p, seq, token) : -1; }

    /// Begins the piece at a cursor.
    DEVICE void begin(const DecodeParams& p, const Cursor& at) {
        begin_at(at.token);
        page_ahead = look_up(p, at.seq, at.end);
    }

    /// Sees to it that these are of the part's first piece, now that lengths tell where that is, and as tables are if that was `early`.
    DEVICE void confirm(const DecodeParams& p, const Part& part, const Cursor& at, bool early) {
        if (early || at.seq != part.seq) {
            if (at.more) begin(p, at);
        } else if (token >= at.end) {
            page_ahead = -1;
        }
    }

    /// The lanes take a box each, from the tile at a cursor on, and ask for the pages of their next ones.
    DEVICE void take(const DecodeParams& p, const Cursor& at) {
        used = 0;
        page = page_ahead;
        entry = entry_of(p, token);
        token += 32 << shift;
        page_ahead = look_up(p, at.seq, at.end);
    }

    /// Goes on to the piece's next tile.
    DEVICE void advance() { used += boxes(); }
    DEVICE bool used_up() const { return used >= 32; }

    /// Finds this warp's boxes of the tile at hand, before their places are free: clocks between that and a copy are waited for.
    DEVICE void find(int warp) {
        UNROLL for (int i = 0; i < SHARE; i++) {
            its_page[i] = from_lane(page, used + warp + i * LOADERS);
            its_entry[i] = from_lane(entry, used + warp + i * LOADERS);
        }
    }

    /// Copies them, of `count` units of columns: the unit first that is multiplied first.
    template <int count>
    DEVICE void copy(const TensorMap& map, int column, uint32 to, uint32 full, int warp) const {
        UNROLL for (int unit = 0; unit < count; unit++) {
            UNROLL for (int i = 0; i < SHARE; i++) {
                int box = warp + i * LOADERS;
                if ((SMALL_BOXES && box >= boxes()) || !elected()) continue;
                copy_box(to + unit * UNIT_BYTES + (box << shift) * UNIT_COLUMNS * 2, map, (column + unit) * UNIT_COLUMNS, its_entry[i],
                         its_page[i], full + unit * 8);
            }
        }
    }
};

/// Arrivals of a warp that is done with a place of the ring. Where lanes will write there each lane arrives, which is how racecheck
/// follows it.
constexpr int RELEASES = GATHERS ? 32 : 1;

/// This warp is done with a place of the ring.
DEVICE void release(uint32 barrier) {
    if constexpr (RELEASES == 1) warp_barrier();
    if (RELEASES > 1 || lane_index() == 0) barrier_arrive(barrier);
}

/// The loader: its warps keep the ring filled, once the block is prepared. It takes its turn if that is `due`. `ahead` is told when a
/// tile of another sequence is next.
template <typename Ahead>
DEVICE void load_tiles(const DecodeParams& p, const Part& part, Cursor at, const TensorMap& latent, const TensorMap& rope,
                       const Ring& ring, bool due, Ahead ahead) {
    int warp = LOADERS == 1 ? 0 : warp_of_group();
    Boxes boxes(p, part);
    if (warp == 0) fetch_later_pages(p, part);
    await_prepared(true);
    LoadersTurn own(p, due);
    boxes.confirm(p, part, at, due && own.has_come);
    HalfPlace half = {0, 0};
    NO_UNROLL for (int odd = 0; at.more; odd ^= 1) {
        if (boxes.used_up()) boxes.take(p, at);
        boxes.find(warp);
        own.await(p, at);
        if (ROPE_DIM > 0) {
            uint32 full = ring.rotary_full(odd);
            barrier_wait(ring.rotary_empty(), odd ^ 1);
            if (warp == 0 && lane_index() == 0) barrier_expect(full, UNIT_BYTES);
            warp_barrier();
            boxes.copy<1>(rope, 0, ring.rotary(), full, warp);
        }
        NO_UNROLL for (int i = 0; i < 2; i++) {
            int column = (i ^ odd) * HALF_UNITS;  // the half of the tile's own side is done with first, and comes first
            uint32 full = ring.half_full(half.index);
            barrier_wait(ring.half_empty(half.index), ring.parity_of_room(half));
            if (warp == 0 && lane_index() < HALF_UNITS) barrier_expect(full + lane_index() * 8, UNIT_BYTES);
            warp_barrier();
            boxes.copy<HALF_UNITS>(latent, column, ring.half(half.index), full, warp);
            half.advance();
        }
        int seq = at.seq;
        at.advance(p, part);
        boxes.advance();
        if (!ONE_PIECE && at.more && at.seq != seq) {
            boxes.begin(p, at);
            if (warp == 0) ahead(at.seq);
        }
    }
}

/// The loader of the rows form, as `load_tiles`, where rows are gathered: a warpgroup, each of its warps at its own pace.
DEVICE void gather_tiles(const DecodeParams& p, const Part& part, Cursor at, const Ring& ring, LoadersTurn own) {
    Gather rows;
    HalfPlace half = {0, 0};
    rows.ask(p, at);
    NO_UNROLL for (int odd = 0; at.more; odd ^= 1) {
        own.await(p, at);
        rows.find(p, at);
        at.advance(p, part);
        rows.ask(p, at);
        if constexpr (ROPE_DIM > 0) {
            Gather::Sources sources(rows.rope, 0);
            barrier_wait(ring.rotary_empty(), odd ^ 1);
            sources.copy<1>(ring.rotary());
            arrive_with_copies(ring.rotary_full(odd));
        }
        NO_UNROLL for (int i = 0; i < 2; i++) {
            Gather::Sources sources(rows.latent, (i ^ odd) * HALF_UNITS * 128);
            barrier_wait(ring.half_empty(half.index), ring.parity_of_room(half));
            sources.copy<HALF_UNITS>(ring.half(half.index));
            arrive_with_copies(ring.half_full(half.index));
            half.advance();
        }
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
