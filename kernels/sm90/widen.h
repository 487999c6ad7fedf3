// The loader of form 1 for a cache of 8-bit floats. One warp keeps a small ring of bytes filled, the staging; the other three of
// its warpgroup, the converters, widen them exactly to f16, into the ring of tiles. The sides work as for a cache of f16.
//
// A staged unit is 64 tokens x 128 columns, two units of a tile; rotary columns have one of their own. Converters take staged units
// in turn, eight tokens x 64 columns at a time, a lane sixteen columns of a token: eight lanes that access shared memory together
// have the four shares of tokens r and r ^ 5, which lie in all banks both as bytes and as f16.

constexpr int STAGING_UNITS = 4;
constexpr int PAIR = 2;  // units of the ring that a staged one makes
constexpr int HALF_PAIRS = HALF_UNITS / PAIR;
constexpr int CONVERTERS = 3;
constexpr int ROTARY_STAGED = ROPE_DIM > 0;
constexpr int TILE_STAGED = 2 * HALF_PAIRS + ROTARY_STAGED;  // staged units of a tile, rotary columns first
constexpr int STAGING_AT = RING_BYTES;
constexpr int STAGING_BYTES = FP8 ? STAGING_UNITS * UNIT_BYTES : 0;
// A converter that waits for a unit need not have seen the one before it in the same place come: it has a barrier of its own for that.
constexpr int STAGED_BARRIERS = STAGING_UNITS * CONVERTERS;
constexpr int STAGING_STATE_BYTES = FP8 ? (STAGED_BARRIERS + STAGING_UNITS) * 8 + 8 : 0;
constexpr int BLOCK_TOKENS = 8;
constexpr int BLOCK_BYTES = BLOCK_TOKENS * 128;

/// The staging. Barriers end a phase when a unit has come, and when a converter has read it.
struct Staging {
    unsigned char SHARED* units;
    unsigned char SHARED* state;  // barriers, then how many units there are in the part, once that is known

    DEVICE uint32 unit(int index) const { return shared_address(units) + index * UNIT_BYTES; }
    DEVICE uint32 full(int index) const { return shared_address(state) + index * 8; }
    DEVICE uint32 empty(int index) const { return full(STAGED_BARRIERS + index); }
    DEVICE int SHARED& count() const { return *(int SHARED*)(state + (STAGED_BARRIERS + STAGING_UNITS) * 8); }

    /// To be called by one thread.
    DEVICE void init() const {
        for (int i = 0; i < STAGED_BARRIERS + STAGING_UNITS; i++) barrier_init(full(i), 1);
        count() = 0x7fffffff;
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
        entry = entry_of(p, token);
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
            // What was asked for before must not be gone again.
            copy_box<false>(to + unit * UNIT_BYTES, map, (column + unit) * UNIT_COLUMNS, entry, page, full + unit * 8);
        }
    }
};

/// The warp that keeps the staging filled, in the order in which units are wanted: rotary columns, then the half of the tile's
/// own side. What the next tile needs is asked for a tile ahead, to be near.
DEVICE void stage_tiles(const DecodeParams& p, const Part& part, const TensorMap& latent, const TensorMap& rope,
                        const Staging& staging) {
    int count = 0;
    auto wait = [&] { barrier_wait(staging.empty(count % STAGING_UNITS), count / STAGING_UNITS & 1 ^ 1); };
    int own = 0;  // first staged unit of the half that comes first
    Box next(p, part);
    Cursor at(p, part);
    next.confirm(p, part, at);
    NO_UNROLL while (at.more) {
        Box box = next;
        at.advance(p, part);
        next.look_up(p, at.seq, at.token, at.more ? at.end : 0);
        NO_UNROLL for (int i = -ROTARY_STAGED; i < 2 * HALF_PAIRS; i++) {
            const TensorMap& map = i < 0 ? rope : latent;
            uint32 full = staging.full(count % STAGED_BARRIERS);
            wait();
            if (lane_index() == 0) barrier_expect(full, UNIT_BYTES);
            warp_barrier();
            box.copy(map, i < 0 ? 0 : (i ^ own) * PAIR, staging.unit(count % STAGING_UNITS), 1, full);
            next.fetch(map, i < 0 ? 0 : i * PAIR);
            count++;
        }
        own ^= HALF_PAIRS;
    }
    if (lane_index() == 0) staging.count() = count;
    // Every converter waits for one more.
    NO_UNROLL for (int i = 0; i < CONVERTERS; i++) {
        wait();
        if (lane_index() == 0) barrier_arrive(staging.full(count % STAGED_BARRIERS));
        count++;
    }
}

/// A converter: every CONVERTERSth staged unit from the `turn`th on. It has few registers, so a lane's number is read from where its
/// first columns go.
DEVICE void widen_tiles(int turn, unsigned char SHARED* shared, const Staging& staging, const Ring& ring) {
    int lane = lane_index();
    int row = lane / 8 ^ lane / 4 % 2 * 5;
    int bytes_at = row * 128 + (lane % 4 ^ row) * 16;
    int columns_at = row * 128 + (lane % 4 * 2 ^ row) * 16;
    int tile = 0;
    int i = turn;  // staged unit of the tile
    NO_UNROLL for (int n = turn;; n += CONVERTERS) {
        barrier_wait(staging.full(n % STAGED_BARRIERS), n / STAGED_BARRIERS & 1);
        if (warp_any(n >= staging.count())) return;
        bool rotary = i < ROTARY_STAGED;
        int pair = i - ROTARY_STAGED;
        HalfPlace half = place_of<HALVES>(2 * tile + (rotary ? 0 : pair / HALF_PAIRS));
        int to = rotary ? ROTARY_AT : half.index * HALF_BYTES + pair % HALF_PAIRS * PAIR * UNIT_BYTES;
        uint32 full = rotary ? ring.rotary_full(tile & 1) : ring.half_full(half.index) + pair % HALF_PAIRS * PAIR * 8;
        barrier_wait(rotary ? ring.rotary_empty() : ring.half_empty(half.index), rotary ? tile & 1 ^ 1 : ring.parity_of_room(half));
        NO_UNROLL for (int second = 0; second < PAIR - rotary; second++) {
            const unsigned char SHARED* bytes = staging.units + n % STAGING_UNITS * UNIT_BYTES + unhoisted(bytes_at ^ second * 64);
            int at = unhoisted(columns_at);
            to += second * UNIT_BYTES;
            unsigned char SHARED* low = shared + to + at;
            unsigned char SHARED* high = shared + to + (at ^ 16);
            Word4 words[2];
            words[0] = *(const Word4 SHARED*)bytes;
            UNROLL for (int block = 0; block < UNIT_BYTES; block += BLOCK_BYTES) {
                const Word4& word = words[block / BLOCK_BYTES % 2];
                if (block + BLOCK_BYTES < UNIT_BYTES) {
                    words[block / BLOCK_BYTES % 2 ^ 1] = *(const Word4 SHARED*)(bytes + block + BLOCK_BYTES);
                }
                Word4 widened;
                e4m3x4_to_f16(word.x, widened.x, widened.y);
                e4m3x4_to_f16(word.y, widened.z, widened.w);
                *(Word4 SHARED*)(low + block) = widened;
                e4m3x4_to_f16(word.z, widened.x, widened.y);
                e4m3x4_to_f16(word.w, widened.z, widened.w);
                *(Word4 SHARED*)(high + block) = widened;
            }
            publish_to_async();
            warp_barrier();
            if (at == 0) barrier_arrive(full + second * 8);
        }
        if (unhoisted(columns_at) == 0) barrier_arrive(staging.empty(n % STAGING_UNITS));
        i += CONVERTERS;
        if (i >= TILE_STAGED) {
            i -= TILE_STAGED;
            tile++;
        }
    }
}
static_assert(CONVERTERS <= TILE_STAGED, "a converter's units lie in this tile or the next");

/// The loader's warpgroup.
DEVICE void load_widened(const DecodeParams& p, const Part& part, const TensorMap& latent, const TensorMap& rope,
                         unsigned char SHARED* shared, const Staging& staging, const Ring& ring) {
    int warp = warp_of_group();
    if (warp == 0) {
        stage_tiles(p, part, latent, rope, staging);
    } else {
        widen_tiles(warp - 1, shared, staging, ring);
    }
}
