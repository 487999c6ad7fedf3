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

/// The block's share of the schedule: from `token` of `seq` up to `end_token` of `end_seq`.
struct Part {
    int seq, token, end_seq, end_token, split;
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

/// Which of the cache's tokens a lane loads of the tile at a cursor: BOX rows of a page. Lanes beyond the tile's boxes load none.
struct Box {
    int rows, page, entry;

    DEVICE void look_up(const DecodeParams& p, const Cursor& at) {
        rows = smaller(p.page_size & -p.page_size, TILE_TOKENS);
        int token = at.token + lane_index() * rows;
        // A page past the piece's end is not looked up, and one outside the cache is not followed: their rows become zeros.
        page = -1;
        if (at.more && token < at.end && lane_index() * rows < TILE_TOKENS) {
            const int GLOBAL* table = global_pointer<const int>(p.block_table) + at.seq / num_groups(p) * p.table_stride;
            page = table[token / p.page_size];
        }
        entry = token % p.page_size;
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
