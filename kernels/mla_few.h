// How few sequences are cut (schedule OWN): by every block of both stages for itself, one lane a sequence, from the lengths alone.
//
// Pieces have as many units of `few_unit`, a power of two, as leave at most `few_parts` pieces wherever the sequences end. There
// are more than FULL_PIECES only once they are FULL_TOKENS long: shorter ones would cost stage 2 more than they win.
//
// A step of schedule EITHER has a kernel of two forms of stage 1, of which the lengths choose one: few tokens are cut this way and the
// plan kernel writes a schedule without work, more are cut by that schedule. All kernels ask `are_few`.
constexpr int FULL_PIECES = 64;
constexpr int FULL_TOKENS = 64;

/// Lanes that share out the sequences.
DEVICE int few_width(const DecodeParams& p) { return ONE_SEQUENCE ? 1 : 1 << highest_bit(2 * p.batch * num_groups(p) - 1); }

/// Sum of what the lanes of the sequences have. All lanes of a wave must ask.
DEVICE int few_sum(const DecodeParams& p, int value) {
    NO_UNROLL for (int mask = few_width(p) / 2; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
    return value;
}

/// Where the length of this lane's sequence stands; null if it has none.
DEVICE const int GLOBAL* few_length(const DecodeParams& p) {
    int virtual_seq = thread_index() & (few_width(p) - 1);
    if (virtual_seq >= p.batch * num_groups(p)) return nullptr;
    return global_pointer<const int>(p.seq_lens) + seq_of(p, virtual_seq);
}

/// Tokens of this lane's sequence, of that length; of the length that stands there now.
DEVICE int few_tokens(const DecodeParams& p, int length) {
    return visible_tokens(p, usable_length(p, length), last_token(p, thread_index() & (few_width(p) - 1)));
}
DEVICE int few_tokens_now(const DecodeParams& p) {
    const int GLOBAL* length_at = few_length(p);
    return few_tokens(p, length_at ? load_now(length_at) : 0);
}

/// Whether sequences of each lane's `tokens` are cut this way. All lanes of a wave must ask.
DEVICE bool are_few(const DecodeParams& p, int tokens) {
    // Each is cut off above the bound, which keeps the sum small.
    return (!ONE_SEQUENCE && p.schedule_kind == OWN) || few_sum(p, smaller(tokens, p.few_tokens + 1)) <= p.few_tokens;
}

/// A sequence among the pieces of all: `count` of them from `first` on.
struct FewPieces {
    int seq, tokens, first, count;
};

/// The sequence that piece `item` belongs to, or that is `seq` if `item` is negative; 0 pieces if there is none. All lanes of a
/// wave must ask, each with its `tokens`.
DEVICE FewPieces few_pieces(const DecodeParams& p, int tokens, int item, int seq) {
    int width = few_width(p);
    int lane = thread_index() & (width - 1);
    int units = are_few(p, tokens) ? (tokens + p.few_unit - 1) >> highest_bit(p.few_unit) : 0;
    int all = few_sum(p, units);
    int most = p.few_parts - p.batch * num_groups(p);
    int full = FULL_TOKENS >> highest_bit(p.few_unit);
    int limit = larger(quotient_up(all, most), 1);
    if (limit < full) limit = larger(limit, smaller(full, quotient_up(all, FULL_PIECES)));
    int count = quotient_up(units, limit);
    int end = count;
    NO_UNROLL for (int delta = 1; delta < width; delta *= 2) {
        int below = shuffle_up(end, delta);
        if (lane >= delta) end += below;
    }
    bool found = item < 0 ? lane == seq : item >= end - count && item < end;
    FewPieces pieces = {0, 0, 0, 0};
    if (found) pieces = {lane, tokens, end - count, count};
    NO_UNROLL for (int mask = width / 2; mask > 0; mask /= 2) {
        pieces.seq += shuffle_xor(pieces.seq, mask);
        pieces.tokens += shuffle_xor(pieces.tokens, mask);
        pieces.first += shuffle_xor(pieces.first, mask);
        pieces.count += shuffle_xor(pieces.count, mask);
    }
    return pieces;
}

/// A block's piece: tokens [begin, end) of `tokens` of `seq`. Pieces and slots have the same numbers; the slot is negative if the
/// sequence has no other piece.
struct OwnPiece {
    int seq, tokens, begin, end, slot;
};
DEVICE OwnPiece own_piece(const DecodeParams& p, int tokens, int item) {
    FewPieces pieces = few_pieces(p, tokens, item, 0);
    int units = (pieces.tokens + p.few_unit - 1) >> highest_bit(p.few_unit);
    // The first pieces have a unit more where they do not come out even.
    int least = quotient(units, larger(pieces.count, 1));
    int longer = units - least * pieces.count;
    int split = item - pieces.first;
    int begin = split * least + smaller(split, longer);
    int end = begin + least + (split < longer);
    if (pieces.count == 0) begin = end = 0;
    return {pieces.seq, pieces.tokens, begin * p.few_unit, smaller(end * p.few_unit, pieces.tokens),
            pieces.count > 1 ? item : -1};
}

/// Where the partial results of a virtual sequence begin, as `slots_of`. All lanes of a wave must ask, each with its `tokens`.
DEVICE Slots own_slots(const DecodeParams& p, int tokens, int virtual_seq) {
    FewPieces pieces = few_pieces(p, tokens, -1, virtual_seq);
    return {pieces.first, pieces.count > 1 ? pieces.count : 0};
}
