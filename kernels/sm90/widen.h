// The loader of form 1 for a cache of 8-bit floats. One warp keeps a small ring of bytes filled, the staging; the other three of
// its warpgroup, the converters, widen them exactly to f16, into the ring of tiles. The sides work as for a cache of f16.
//
// A staged unit is 64 tokens x 128 columns, two units of a tile. Of each of those two the converters take blocks of eight tokens
// in turn, a lane sixteen columns of a token: eight lanes that access shared memory together have the four shares of tokens r and
// r ^ 5, which lie in all banks both as bytes and as f16.

constexpr int STAGED_COLUMNS = 128;
constexpr int STAGING_UNITS = 4;
constexpr int STAGING_AT = RING_BYTES;
constexpr int STAGING_BYTES = FP8 ? STAGING_UNITS * UNIT_BYTES : 0;
constexpr int STAGING_BARRIERS = FP8 ? 2 * STAGING_UNITS : 0;
constexpr int STAGING_WORDS_BYTES = FP8 ? STAGING_BARRIERS * 8 + 8 : 0;
constexpr int CONVERTERS = 3;
constexpr int BLOCK_TOKENS = 8;
constexpr int BLOCK_BYTES = BLOCK_TOKENS * 128;
constexpr int BLOCKS = TILE_TOKENS / BLOCK_TOKENS;

/// The staging: a barrier of each unit ends a phase when it has come, one when the converters have read it.
struct Staging {
    uint32 base, barriers;

    DEVICE uint32 unit(int index) const { return base + index * UNIT_BYTES; }
    DEVICE uint32 full(int index) const { return barriers + index * 8; }
    DEVICE uint32 empty(int index) const { return barriers + (STAGING_UNITS + index) * 8; }

    /// Whether what has come is the end of the part.
    DEVICE int SHARED& ended(unsigned char SHARED* shared) const { return *(int SHARED*)(shared + (barriers - base) + STAGING_AT + STAGING_BARRIERS * 8); }

    /// To be called by one thread.
    DEVICE void init(unsigned char SHARED* shared) const {
        ended(shared) = 0;
        for (int i = 0; i < STAGING_UNITS; i++) {
            barrier_init(full(i), 1);
            barrier_init(empty(i), CONVERTERS);
        }
    }
};

/// The warp that keeps the staging filled, in the order in which tiles are wanted: rotary columns, then the half of the tile's
/// own side.
DEVICE void stage_tiles(const DecodeParams& p, const Part& part, Cursor at, const TensorMap& latent, const TensorMap& rope,
                        unsigned char SHARED* shared, const Staging& staging) {
    Place<STAGING_UNITS> place = {0, 1};
    int own = 0;  // first staged unit of the half that comes first
    Box box;
    box.look_up(p, at);
    NO_UNROLL while (at.more) {
        NO_UNROLL for (int i = ROPE_DIM > 0 ? -1 : 0; i < LATENT_UNITS / 2; i++) {
            uint32 full = staging.full(place.index);
            barrier_wait(staging.empty(place.index), place.parity);
            if (lane_index() == 0) barrier_expect(full, UNIT_BYTES);
            warp_barrier();
            int column = (i ^ own) * (STAGED_COLUMNS / UNIT_COLUMNS);
            box.copy(i < 0 ? rope : latent, i < 0 ? 0 : column, staging.unit(place.index), 1, full);
            place.advance();
        }
        at.advance(p, part);
        box.look_up(p, at);
        own ^= HALF_UNITS / 2;
    }
    barrier_wait(staging.empty(place.index), place.parity);
    if (lane_index() == 0) {
        staging.ended(shared) = 1;
        barrier_arrive(staging.full(place.index));
    }
}

/// A converter: of each unit it widens every CONVERTERSth block of eight tokens, from the `turn`th on. It has so few registers that
/// places are counted from those of tiles and units, and a lane's number is read from where its first columns go.
DEVICE void widen_tiles(int turn, unsigned char SHARED* shared, const Staging& staging, const Ring& ring) {
    constexpr int TURNS = divide_up(BLOCKS, CONVERTERS);
    constexpr int ROTARY = ROPE_DIM > 0;  // rotary columns come first and have a staged unit of their own
    int lane = lane_index();
    int row = lane / 8 ^ lane / 4 % 2 * 5;
    int bytes_at = STAGING_AT + turn * BLOCK_BYTES + row * 128 + (lane % 4 ^ row) * 16;
    int columns_at = turn * BLOCK_BYTES + row * 128 + (lane % 4 * 2 ^ row) * 16;
    NO_UNROLL for (int tile = 0;; tile++) {
        NO_UNROLL for (int unit = -ROTARY; unit < LATENT_UNITS; unit++) {
            bool rotary = unit < 0;
            bool second = !rotary && unit % 2 == 1;  // 64 columns of a staged row
            auto from = place_of<STAGING_UNITS>(tile * (LATENT_UNITS / 2 + ROTARY) + (rotary ? 0 : unit / 2 + ROTARY));
            HalfPlace half = place_of<HALVES>(2 * tile + (rotary ? 0 : unit / HALF_UNITS));
            if (!second) barrier_wait(staging.full(from.index), from.parity);
            if (unit == -ROTARY && warp_any(staging.ended(shared))) return;
            const unsigned char SHARED* bytes = shared + from.index * UNIT_BYTES + unhoisted(bytes_at ^ second * 64);
            int at = unhoisted(columns_at);
            auto mine = [&](int i) { return (i + 1) * CONVERTERS <= BLOCKS || at + i * CONVERTERS * BLOCK_BYTES < UNIT_BYTES; };
            Word4 words[2];
            auto load = [&](int i) {
                if (mine(i)) words[i % 2] = *(const Word4 SHARED*)(bytes + i * CONVERTERS * BLOCK_BYTES);
            };
            load(0);
            if (rotary) {
                barrier_wait(ring.rotary_empty(0), tile & 1 ^ 1);
            } else {
                barrier_wait(ring.half_empty(half.index), ring.parity_of_room(half));
            }
            unsigned char SHARED* to = shared + (rotary ? ROTARY_AT : half.index * HALF_BYTES + unit % HALF_UNITS * UNIT_BYTES);
            UNROLL for (int i = 0; i < TURNS; i++) {
                if (i + 1 < TURNS) load(i + 1);
                if (!mine(i)) continue;
                const Word4& word = words[i % 2];
                Word4 widened;
                e4m3x4_to_f16(word.x, widened.x, widened.y);
                e4m3x4_to_f16(word.y, widened.z, widened.w);
                *(Word4 SHARED*)(to + at + i * CONVERTERS * BLOCK_BYTES) = widened;
                e4m3x4_to_f16(word.z, widened.x, widened.y);
                e4m3x4_to_f16(word.w, widened.z, widened.w);
                *(Word4 SHARED*)(to + (at ^ 16) + i * CONVERTERS * BLOCK_BYTES) = widened;
            }
            publish_to_async();
            warp_barrier();
            bool first_lane = at % BLOCK_BYTES == 0;
            if (first_lane) barrier_arrive(rotary ? ring.rotary_full(tile & 1) : ring.half_full(half.index) + unit % HALF_UNITS * 8);
            if (first_lane && (rotary || second)) barrier_arrive(staging.empty(from.index));
        }
    }
}

/// The loader's warpgroup.
DEVICE void load_widened(const DecodeParams& p, const Part& part, const Cursor& at, const TensorMap& latent, const TensorMap& rope,
                         unsigned char SHARED* shared, const Staging& staging, const Ring& ring) {
    int warp = warp_of_group();
    if (warp == 0) {
        stage_tiles(p, part, at, latent, rope, shared, staging);
    } else {
        widen_tiles(warp - 1, shared, staging, ring);
    }
}
