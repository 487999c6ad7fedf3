// The rings between the loaders and the warpgroups of form 2: units of a tile, 64 tokens x 128 bytes, each with a barrier that ends
// a phase when it has come and one that does when its readers are done with it.
//
// A group has a ring of its own, and a loader that fills no other. So whoever waits for a barrier's phases waits for all of them:
// of a place that two groups had in turn, one that began to wait early would take the phase before the other's for its own.

constexpr int UNIT_VALUES = 128 / bytes_of(KV_DTYPE);  // columns of a unit
constexpr int CACHED_UNITS = KV_LORA_RANK / UNIT_VALUES;
constexpr int TILE_UNITS = CACHED_UNITS + (ROPE_DIM > 0);
constexpr int GROUPS = 2;
constexpr int RING_UNITS = STAGES / GROUPS;
constexpr int UNIT_RING_BYTES = RING_UNITS * UNIT_BYTES;
constexpr int UNIT_RING_BARRIERS_BYTES = 2 * RING_UNITS * 8;
static_assert(STAGES % GROUPS == 0 && RING_UNITS >= TILE_UNITS, "a tile passes the ring's end once at most");

/// A place in a ring, and the parity of its present phase.
struct UnitPlace {
    int index, parity;

    DEVICE void advance(int by = 1) {
        index += by;
        if (index >= RING_UNITS) {
            index -= RING_UNITS;
            parity ^= 1;
        }
    }

    DEVICE UnitPlace after(int by) const {
        UnitPlace place = *this;
        place.advance(by);
        return place;
    }

    /// Moves on by as many tiles.
    DEVICE void skip(int tiles) {
        index += tiles * TILE_UNITS;
        parity ^= index / RING_UNITS & 1;
        index %= RING_UNITS;
    }
};

struct UnitRing {
    unsigned char SHARED* units;
    uint32 base, barriers;

    DEVICE unsigned char SHARED* at(int index) const { return units + index * UNIT_BYTES; }
    DEVICE uint32 unit(int index) const { return base + index * UNIT_BYTES; }
    DEVICE uint32 full(int index) const { return barriers + index * 8; }
    DEVICE uint32 empty(int index) const { return barriers + (RING_UNITS + index) * 8; }

    /// To be called by the first threads, with how many arrivals fill a unit, and how many warps read it.
    DEVICE void init(int arrivals, int readers) const {
        if (thread_index() >= RING_UNITS) return;
        barrier_init(full(thread_index()), arrivals);
        barrier_init(empty(thread_index()), readers);
        barrier_publish_init();
    }
};

/// Tiles of a piece that are a group's.
DEVICE int tiles_of(int tiles, int group) { return (tiles + GROUPS - 1 - group) / GROUPS; }

/// Tokens of a box: the largest power of two that divides a page, up to a tile.
DEVICE int box_tokens(const DecodeParams& p) { return smaller(p.page_size & -p.page_size, TILE_TOKENS); }

/// Where the first of a lane's boxes begins: the lanes of a loader take the boxes of its tiles in turn, in a piece from `begin` on.
DEVICE int lane_token(const DecodeParams& p, int begin, int group) {
    int rows = box_tokens(p);
    int boxes = TILE_TOKENS / rows;
    int tile = quotient(lane_index(), boxes);
    return begin + (tile * GROUPS + group) * TILE_TOKENS + (lane_index() - tile * boxes) * rows;
}

/// Tiles of a group that are asked for ahead.
constexpr int TILES_AHEAD = 2;

/// Asks for a group's first tiles to come near, by its loader, given the page of each lane's first box.
DEVICE void fetch_units(const DecodeParams& p, int page, int token, const TensorMap& latent, const TensorMap& rope) {
    if (page < 0 || page >= p.num_pages || lane_index() * box_tokens(p) >= TILES_AHEAD * TILE_TOKENS) return;
    NO_UNROLL for (int unit = 0; unit < CACHED_UNITS; unit++) fetch_box(latent, unit * UNIT_VALUES, token % p.page_size, page);
    if constexpr (ROPE_DIM > 0) fetch_box(rope, 0, token % p.page_size, page);
}

/// A loader: a warp that keeps a group's ring filled. Page ids are read 32 boxes at a time, and as far ahead.
DEVICE void load_units(const DecodeParams& p, int item, int group, const TensorMap& latent, const TensorMap& rope,
                       const UnitRing& ring) {
    Start start(p, item);
    int token = start.end > 0 ? lane_token(p, start.part.token & -TILE_TOKENS, group) : 0;
    int page = page_of(p, start.part.seq, token, start.end);
    fetch_units(p, page, token, latent, rope);
    grid_dependency_wait();
    grid_dependency_launch();
    int next_page = page_of(p, start.part.seq, token, start.end);
    bool stands = start.stands(p, item);
    Cursor at = start.first_tile(p, item, stands);

    int rows = box_tokens(p);
    UnitPlace place = {0, 1};
    NO_UNROLL while (at.more) {
        token = lane_token(p, at.token, group);
        if (!stands) next_page = page_of(p, at.seq, token, at.end);
        stands = false;
        int entry = 0;
        int box = lane_index() - 32;  // of the tile; a lane loads it if the tile has so many
        at.token += group * TILE_TOKENS;
        NO_UNROLL while (at.token < at.end) {
            if (box == lane_index() - 32) {
                box = lane_index();
                page = next_page;
                entry = token % p.page_size;
                token += 32 * GROUPS * rows;
                next_page = page_of(p, at.seq, token, at.end);
            }
            auto load = [&](const TensorMap& map, int column) {
                uint32 full = ring.full(place.index);
                barrier_wait(ring.empty(place.index), place.parity);
                if (box == 0) barrier_expect(full, UNIT_BYTES);
                warp_barrier();
                // A page outside the cache is not followed: its rows become zeros.
                if (box >= 0 && box * rows < TILE_TOKENS) {
                    copy_box(ring.unit(place.index) + box * rows * 128, map, column, entry, page, full);
                }
                place.advance();
            };
            NO_UNROLL for (int column = 0; column < KV_LORA_RANK; column += UNIT_VALUES) load(latent, column);
            if constexpr (ROPE_DIM > 0) load(rope, 0);
            box -= TILE_TOKENS / rows;
            at.token += GROUPS * TILE_TOKENS;
        }
        at.advance(p, start.part);
    }
}

/// The source of a group's tiles where rows are gathered: half a warpgroup.
using UnitGather = Gather<4 / GROUPS>;

/// Loaders of rows that are gathered, one of the warps that keep a group's ring filled, each at its own pace.
DEVICE void gather_units(const DecodeParams& p, int item, int group, const UnitRing& ring) {
    UnitGather rows;
    Start start(p, item);
    Cursor at(p, start.end > 0 ? start.part : Part{}, start.part.seq, start.end);
    at.token += group * TILE_TOKENS;
    rows.ask(p, at);
    rows.find(p, at);
    rows.fetch();
    grid_dependency_wait();
    grid_dependency_launch();
    rows.ask(p, at);
    bool stands = start.stands(p, item);
    at = start.first_tile(p, item, stands);
    auto move = [&](int tiles) {
        at.token += tiles * TILE_TOKENS;
        NO_UNROLL while (at.more && at.token >= at.end) {
            at.advance(p, start.part);
            at.token += group * TILE_TOKENS;
        }
    };
    move(group);
    if (!stands || at.seq != start.part.seq) rows.ask(p, at);

    UnitPlace place = {0, 1};
    NO_UNROLL while (at.more) {
        rows.find(p, at);
        move(GROUPS);
        rows.ask(p, at);
        NO_UNROLL for (int unit = 0; unit < TILE_UNITS; unit++) {
            barrier_wait(ring.empty(place.index), place.parity);
            rows.copy<1>(unit, ring.unit(place.index), ring.full(place.index));
            place.advance();
        }
    }
}
