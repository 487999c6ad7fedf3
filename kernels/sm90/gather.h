// A source of tiles for pages of any size: a warpgroup copies the rows of a tile one by one, 16 bytes a lane, to where a box of a
// larger page would have put them.
//
// Each warp copies sixteen rows, four at a time. A lane knows where one of them lies, and asks for its page a tile ahead.

#ifdef GATHER
constexpr bool GATHERS = true;
#else
constexpr bool GATHERS = false;
#endif
constexpr int GATHER_THREADS = 128;
/// Arrivals at a unit's barrier that say that it has come.
constexpr int UNIT_ARRIVALS = GATHERS ? GATHER_THREADS : 1;

struct Gather {
    static constexpr int ELEM = bytes_of(KV_DTYPE);
    static constexpr int ROTARY = KV_LORA_RANK * ELEM / 128;  // the unit after those of the latent part
    static constexpr int STEP = 8;                            // rows from one of a lane's to the next

    int seq;              // whose pages have been asked for
    int page_ahead;       // of this lane's row of its next tile
    uint64 latent, rope;  // where this lane's row of the tile at hand lies; 0 if it is to become zeros

    /// Row of a tile that is this warp's `i`-th. They are chosen so that all rows that a lane copies are swizzled alike.
    static DEVICE int row(int i) {
        int warp = thread_index() / 32 % 4;
        return warp / 2 * 32 + warp % 2 * 4 + i / 4 * STEP + i % 4;
    }
    /// Row of a tile whose page a lane looks up.
    static DEVICE int looked_up() { return row(lane_index() % 16); }

    /// Finds the rows of the tile at a cursor. Pages past the piece's end are not looked up, and those outside the cache not followed.
    DEVICE void look_up(const DecodeParams& p, const Cursor& at) {
        auto page_of = [&](int token) {
            if (!at.more || token >= at.end) return -1;
            const int GLOBAL* table = global_pointer<const int>(p.block_table) + quotient(at.seq, num_groups(p)) * p.table_stride;
            return table[token / p.page_size];
        };
        int token = at.token + looked_up();
        int page = at.seq == seq ? page_ahead : page_of(token);
        seq = at.seq;
        page_ahead = page_of(token + TILE_TOKENS);
        bool valid = at.more && token < at.end && page >= 0 && page < p.num_pages;
        int entry = token % p.page_size;
        latent = valid ? p.kv + (page * p.kv_stride_page + entry * p.kv_stride_token) * ELEM : 0;
        rope = valid ? p.k_rope + (page * p.rope_stride_page + entry * p.rope_stride_token) * ELEM : 0;
    }

    /// Copies this warp's rows of `count` units from `unit` on, and has their barriers, from `full` on, told when they have come.
    template <int count>
    DEVICE void copy(int unit, uint32 to, uint32 full) const {
        int lane = lane_index();
        int first = row(lane / 8);
        int chunk = lane % 8;
        to += first * 128 + (chunk ^ first % 8) * 16;
        bool rotary = unit == ROTARY;
        bool there = !rotary || chunk * 16 < ROPE_DIM * ELEM;
        UNROLL for (int i = 0; i < 4; i++) {
            uint64 from = from_lane(rotary ? rope : latent, i * 4 + lane / 8);
            bool valid = from != 0 && there;
            from += (rotary ? 0 : unit * 128) + chunk * 16;
            UNROLL for (int u = 0; u < count; u++) copy16_async_at(to + i * STEP * 128 + u * UNIT_BYTES, from + u * 128, valid);
        }
        UNROLL for (int u = 0; u < count; u++) arrive_with_copies(full + u * 8);
    }
};
