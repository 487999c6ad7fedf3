// A source of tiles for pages of any size: warps that copy the rows of a tile one by one, 16 bytes a lane, to where a box of a larger
// page would have put them.

#ifdef GATHER
constexpr bool GATHERS = true;
#else
constexpr bool GATHERS = false;
#endif

/// What a warp of the gathering warpgroup copies: sixteen rows of each tile, four at a time. A lane knows where one of them lies.
struct Gather {
    static constexpr int ARRIVALS = 128;  // that fill a unit
    static constexpr int PASSES = TILE_TOKENS / 16;
    static constexpr int STEP = 8;  // rows from one pass to the next
    static constexpr int ELEM = bytes_of(KV_DTYPE);
    static constexpr bool ONCE = ELEM > 1;  // else slower

    int page_ahead;       // of this lane's row of the tile that was asked for
    uint64 latent, rope;  // where this lane's row of the tile at hand lies; 0 if it is to become zeros

    /// The tile's row that a lane copies sixteen bytes of in the first pass. Those of the others are swizzled alike.
    static DEVICE int first_row(int thread) { return thread / 64 % 2 * 32 + thread / 32 % 2 * 4 + thread / 8 % 4; }
    /// The tile's row that a lane knows: of each eight lanes, which copy a row together, every one that of another pass.
    static DEVICE int known() {
        int thread = unhoisted(thread_index());
        return first_row(thread) + thread % PASSES * STEP;
    }

    /// Asks for the pages of the tile at a cursor, and for those of tiles after it to come near: while much is being read they take
    /// longer to come than a tile.
    DEVICE void ask(const DecodeParams& p, const Cursor& at) {
        constexpr int LINE_TOKENS = 8;  // whose pages lie in 32 bytes if it has one token each
        int end = at.more ? at.end : 0;
        page_ahead = page_of(p, at.seq, at.token + known(), end);
        int later = at.token + TILE_TOKENS + unhoisted(thread_index()) % 128 * LINE_TOKENS;
        if (later < end) fetch_near(page_entry(p, at.seq, later));
    }

    /// Finds the rows of the tile at a cursor, that was asked for last. A page outside the cache is not followed.
    DEVICE void find(const DecodeParams& p, const Cursor& at) {
        int token = at.token + known();
        int64 page = page_ahead, entry = entry_of(p, token);
        bool valid = token < at.end && page >= 0 && page < p.num_pages;
        latent = valid ? p.kv + (page * p.kv_stride_page + entry * p.kv_stride_token) * ELEM : 0;
        rope = valid ? p.k_rope + (page * p.rope_stride_page + entry * p.rope_stride_token) * ELEM : 0;
    }

    /// What a lane copies of this warp's rows, that begin at `rows` as lanes know them, of what follows `begin` bytes. Found before the
    /// place is free that it is for, so that nothing but copies comes after: where products wait for them.
    struct Sources {
        uint64 from[PASSES];
        bool valid[PASSES];  // else zeros
        int place;           // of the first pass, in a unit

        DEVICE Sources(uint64 rows, int begin) {
            int thread = unhoisted(thread_index());
            int first = first_row(thread);
            place = unhoisted(first * 128 + (thread % 8 ^ first % 8) * 16);
            UNROLL for (int pass = 0; pass < PASSES; pass++) {
                uint64 row = from_lane_of_8(rows, pass);
                valid[pass] = row != 0;
                from[pass] = row + begin + thread % 8 * 16;
            }
        }

        /// Copies to `count` units from `to` on, 128 bytes of each row to each.
        template <int count>
        DEVICE void copy(uint32 to) const {
            uint32 unit[count];
            UNROLL for (int i = 0; i < count; i++) {
                unit[i] = to + i * UNIT_BYTES + place;
                if constexpr (ONCE) unit[i] = (uint32)unhoisted((int)unit[i]) & ~15u;  // in one register
            }
            UNROLL for (int pass = 0; pass < PASSES; pass++) {
                UNROLL for (int i = 0; i < count; i++) {
                    copy16_gathered<ONCE>(unit[i] + pass * STEP * 128, from[pass] + i * 128, valid[pass]);
                }
            }
        }
    };

    /// Copies of this warp's rows, that begin at `rows` as lanes know them, what follows `begin` bytes, in `count` units: each `to(i)`.
    template <int count, typename To>
    static DEVICE void copy(uint64 rows, int begin, int width, To to) {
        int thread = unhoisted(thread_index());
        int first = first_row(thread);
        int chunk = thread % 8;
        int place = first * 128 + (chunk ^ first % 8) * 16;
        uint32 unit[count];
        UNROLL for (int i = 0; i < count; i++) {
            unit[i] = to(i) + place;
            if constexpr (ONCE) unit[i] = (uint32)unhoisted((int)unit[i]) & ~15u;  // in one register
        }
        UNROLL for (int pass = 0; pass < PASSES; pass++) {
            uint64 from = from_lane_of_8(rows, pass);
            bool valid = from != 0 && chunk * 16 < width;
            from += begin + chunk * 16;
            UNROLL for (int i = 0; i < count; i++) copy16_gathered<ONCE>(unit[i] + pass * STEP * 128, from + i * 128, valid);
        }
    }

    /// Likewise of the latent part, from a unit on, and of the rotary part.
    template <int count, typename To>
    DEVICE void copy_latent(int unit, To to) const {
        copy<count>(latent, unit * 128, 128, to);
    }
    template <typename To>
    DEVICE void copy_rotary(To to) const {
        copy<1>(rope, 0, ROPE_DIM * ELEM, to);
    }
};
