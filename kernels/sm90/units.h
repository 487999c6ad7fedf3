// The ring between the loader and the warpgroups of the forms whose products have tokens as their rows: units of a tile, 64 tokens x
// 128 bytes, each with a barrier that ends a phase when it has come and one that does when its readers are done with it.

constexpr int UNIT_VALUES = 128 / bytes_of(KV_DTYPE);  // columns of a unit
constexpr int CACHED_UNITS = KV_LORA_RANK / UNIT_VALUES;
constexpr int TILE_UNITS = CACHED_UNITS + (ROPE_DIM > 0);
constexpr int UNITS_BYTES = STAGES * UNIT_BYTES;
constexpr int UNITS_BARRIERS_BYTES = 2 * STAGES * 8;
static_assert(STAGES >= 2 * TILE_UNITS, "a step of two tiles passes the ring's end once at most");

/// A place in the ring, and the parity of its present phase.
struct UnitPlace {
    int index, parity;

    DEVICE void advance(int by = 1) {
        index += by;
        if (index >= STAGES) {
            index -= STAGES;
            parity ^= 1;
        }
    }

    /// Likewise, over any distance.
    DEVICE void skip(int by) {
        index += by;
        parity ^= index / STAGES & 1;
        index %= STAGES;
    }

    DEVICE UnitPlace after(int by) const {
        UnitPlace place = *this;
        place.advance(by);
        return place;
    }
};

struct Units {
    uint32 base, barriers;

    DEVICE uint32 unit(int index) const { return base + index * UNIT_BYTES; }
    DEVICE uint32 full(int index) const { return barriers + index * 8; }
    DEVICE uint32 empty(int index) const { return barriers + (STAGES + index) * 8; }

    /// By one thread, with how many warps read a unit, and how many arrivals fill it. Lanes would take turns, in a loop: a barrier is set up
    /// at an address of the whole warp.
    DEVICE void init(int readers, int writers) const {
        UNROLL for (int i = 0; i < STAGES; i++) {
            barrier_init(full(i), writers);
            barrier_init(empty(i), readers);
        }
        barrier_publish_init();
    }
};

/// Tokens of a box: the largest power of two that divides a page, up to a tile.
DEVICE int box_tokens(const DecodeParams& p) { return smaller(p.page_size & -p.page_size, TILE_TOKENS); }

/// The page of a lane's box, or row, of a part's first tiles, asked for before the lengths tell where the part begins and ends.
DEVICE int early_page(const DecodeParams& p, const Part& part) {
    int token = GATHERS ? Gather::known() : lane_index() * box_tokens(p);
    int column = column_of(p, (part.token & -TILE_TOKENS) + token);
    if (part.seq >= p.batch * num_groups(p) || column >= p.table_width) return -1;
    return load_now(global_pointer<const int>(p.block_table) + seq_of(p, part.seq) * p.table_stride + column);
}

/// A loader: a warp that keeps the ring filled. Its lanes take the boxes of a piece in turn, so that page ids are read 32 at a time, and
/// as far ahead. Of `loaders` warps, this one fills every so manieth place. The units of the block's tile `n` come in order, or as
/// `unit_of(n, i)` says, and `after_tile(n)` is called after them. Rows of 8 bits begin within the second-level cache's lines, so what
/// one box has read its neighbours need, too: whether it is kept all the same as what is read `once` is to be measured.
template <bool once, bool in_order, typename UnitOf, typename AfterTile>
DEVICE void load_units(const DecodeParams& p, int item, int loader, int loaders, const TensorMap& latent, const TensorMap& rope,
                       const Units& units, UnitOf unit_of, AfterTile after_tile) {
    Part part = find_part(p, item);
    int early = early_page(p, part);
    if (loader == 0) fetch_later_pages(p, part);
    Cursor at(p, part);
    LoadersTurn own(p, p.settled);
    int lane = lane_index();
    int rows = box_tokens(p);
    int boxes = TILE_TOKENS / rows;
    bool as_part = p.settled != LENGTHS_SETTLED && at.seq == part.seq;  // else what is early has made the page's entry come near
    int seq = -1;
    int first = 0;  // lane of the tile's first box
    int token = 0;  // of this lane's next box
    int page = -1, entry = 0, page_ahead = -1;
    UnitPlace place = {0, 1};
    NO_UNROLL for (int n = 0; at.more; n++) {
        // A page past the piece's end is not looked up, and one outside the cache is not followed: their rows become zeros.
        auto look_up = [&] {
            const int GLOBAL* table = global_pointer<const int>(p.block_table) + seq_of(p, at.seq) * p.table_stride;
            return token < at.end ? table[column_of(p, token)] : -1;
        };
        if (at.seq != seq) {
            seq = at.seq;
            first = 0;
            token = at.token + lane * rows;
            page_ahead = !as_part ? look_up() : token < at.end ? early : -1;
            as_part = false;
        }
        if (first == 0) {
            page = page_ahead;
            entry = entry_of(p, token);
            token += 32 * rows;
            page_ahead = look_up();
        }
        own.await(p, at);
        int box = lane - first;
        auto fill = [&](int unit, const UnitPlace& place) {
            if (place.index % loaders != loader) return;
            uint32 full = units.full(place.index);
            barrier_wait(units.empty(place.index), place.parity);
            if (box == 0) barrier_expect(full, UNIT_BYTES);
            warp_barrier();
            if (box < 0 || box >= boxes) return;
            bool rotary = unit == CACHED_UNITS;
            copy_box<once>(units.unit(place.index) + box * rows * 128, rotary ? rope : latent, rotary ? 0 : unit * UNIT_VALUES, entry, page,
                           full);
        };
        if constexpr (in_order) {
            NO_UNROLL for (int unit = 0; unit < TILE_UNITS; unit++, place.advance()) fill(unit, place);
        } else {
            NO_UNROLL for (int i = 0; i < TILE_UNITS; i++) fill(unit_of(n, i), place.after(unit_of(n, i)));
            place.advance(TILE_UNITS);
        }
        after_tile(n);
        first = (first + boxes) % 32;
        at.advance(p, part);
    }
}

/// The loader where rows are gathered: a warpgroup, each of its warps at its own pace.
DEVICE void gather_units(const DecodeParams& p, int item, const Units& units) {
    Part part = find_part(p, item);
    Gather rows;
    rows.page_ahead = early_page(p, part);
    Cursor at(p, part);
    LoadersTurn own(p, p.settled);
    if (p.settled == LENGTHS_SETTLED || at.seq != part.seq) rows.ask(p, at);
    UnitPlace place = {0, 1};
    NO_UNROLL while (at.more) {
        own.await(p, at);
        rows.find(p, at);
        at.advance(p, part);
        rows.ask(p, at);
        // The groups give half of a tile back at once.
        constexpr int HALF = CACHED_UNITS / 2;
        NO_UNROLL for (int unit = 0; unit < CACHED_UNITS; unit += HALF, place.advance(HALF)) {
            UNROLL for (int i = 0; i < HALF; i++) barrier_wait(units.empty(place.after(i).index), place.after(i).parity);
            rows.copy_latent<HALF>(unit, [&](int i) { return units.unit(place.after(i).index); });
            UNROLL for (int i = 0; i < HALF; i++) arrive_with_copies(units.full(place.after(i).index));
        }
        if constexpr (ROPE_DIM > 0) {
            barrier_wait(units.empty(place.index), place.parity);
            rows.copy_rotary([&](int) { return units.unit(place.index); });
            arrive_with_copies(units.full(place.index));
            place.advance();
        }
    }
}
