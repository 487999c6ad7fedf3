// What the forms of stage 1 share that stream tiles from any token on: a block's part of the schedule, and the walk through it.
// Rows of queries and of the cache begin at multiples of 16 bytes, rows of the output at multiples of 8.

constexpr float LAZY_MAX = 8.0f;        // 2^8 times the running scale fits f16 and bf16
constexpr float NO_MAXIMUM = -1.0e30f;  // finite: exp2(-inf - NO_MAXIMUM) is 0, not NaN

/// The block's share of the schedule: from `token` of `seq` up to `end_token` of `end_seq`.
struct Part {
    int seq, token, end_seq, end_token, split;

    DEVICE bool empty() const { return seq == end_seq && token >= end_token; }
};

DEVICE Part find_part(const DecodeParams& p, int item) {
    if (p.schedule_kind == BALANCED) {
        const int GLOBAL* words = schedule_of(p).parts + (int64)item * PART_WORDS;
        Word4 ends = *(const Word4 GLOBAL*)words;
        return {(int)ends.x, (int)ends.y * TILE_TOKENS, (int)ends.z, (int)ends.w * TILE_TOKENS, words[4]};
    }
    int seq = quotient(item, p.num_kv_splits);
    int split = item - seq * p.num_kv_splits;
    int tokens = extent(p, seq);
    int64 begin = (int64)split_length(p, tokens) * split;
    int64 end = begin + split_length(p, tokens);
    if (begin >= tokens) return {seq, 0, seq, 0, 0};
    return {seq, (int)begin, seq, end < tokens ? (int)end : tokens, split};
}

/// A position in the stream of tiles of a part: the tile at `token` of `seq`, whose piece ends at `end`; past the last tile
/// `end` is 0.
struct Cursor {
    int seq, token, end;

    DEVICE bool more() const { return end > 0; }

    /// Moves to the first piece with tokens at or after the current `seq` and `token`.
    DEVICE void settle(const DecodeParams& p, const Part& part) {
        NO_UNROLL while (seq < part.end_seq || (seq == part.end_seq && token < part.end_token)) {
            end = extent(p, seq);
            if (seq == part.end_seq) end = smaller(end, part.end_token);
            if (token < end) return;
            seq++;
            token = 0;
        }
        end = 0;
    }

    /// Moves to the next tile; true if it is of another sequence, or there is none.
    DEVICE bool advance(const DecodeParams& p, const Part& part) {
        token += TILE_TOKENS;
        if (!unlikely(token >= end)) return false;
        seq++;
        token = 0;
        settle(p, part);
        return true;
    }
};

/// Slot of the block's piece of a sequence, or -1 if it is the sequence's only one.
DEVICE int64 slot_of(const DecodeParams& p, const Part& part, int seq) {
    Slots slots = slots_of(p, seq);
    return slots.count == 0 ? -1 : slots.begin + (seq == part.seq ? part.split : 0);
}

/// First element of a query row; of some row that is there if this one is not.
DEVICE const uint16 GLOBAL* query_row(const DecodeParams& p, const Row& at) {
    const uint16 GLOBAL* q = global_pointer<const uint16>(p.q);
    return at.valid ? q + at.seq * p.q_stride_batch + at.token * p.q_stride_token + at.head * p.q_stride_head : q;
}
