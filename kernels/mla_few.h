// How few sequences are cut (schedule OWN): by every block of both stages for itself, one lane a sequence, from the lengths alone.
//
// Pieces have as many units of `tile_tokens`, a power of two, as leave at most `num_parts` pieces wherever the sequences end. There
// are more than FULL_PIECES only once they are FULL_TOKENS long: shorter ones would cost stage 2 more than they win.
constexpr int FULL_PIECES = 64;
constexpr int FULL_TOKENS = 64;

/// Lanes that share out the sequences.
DEVICE int few_width(const DecodeParams& p) { return 1 << highest_bit(2 * p.batch * num_groups(p) - 1); }

/// Where the length of this lane's sequence stands; null if it has none.
DEVICE const int GLOBAL* few_length(const DecodeParams& p) {
    int virtual_seq = thread_index() & (few_width(p) - 1);
    if (virtual_seq >= p.batch * num_groups(p)) return nullptr;
    return global_pointer<const int>(p.seq_lens) + quotient(virtual_seq, num_groups(p));
}

/// Tokens of this lane's sequence, of that length.
DEVICE int few_tokens(const DecodeParams& p, int length) {
    return visible_tokens(p, usable_length(p, length), last_token(p, thread_index() & (few_width(p) - 1)));
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
    int units = (tokens + p.tile_tokens - 1) >> highest_bit(p.tile_tokens);
    int all = units;
    NO_UNROLL for (int mask = width / 2; mask > 0; mask /= 2) all += shuffle_xor(all, mask);
    int most = p.num_parts - p.batch * num_groups(p);
    int full = FULL_TOKENS >> highest_bit(p.tile_tokens);
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
    int units = (pieces.tokens + p.tile_tokens - 1) >> highest_bit(p.tile_tokens);
    // The first pieces have a unit more where they do not come out even.
    int least = quotient(units, larger(pieces.count, 1));
    int longer = units - least * pieces.count;
    int split = item - pieces.first;
    int begin = split * least + smaller(split, longer);
    int end = begin + least + (split < longer);
    if (pieces.count == 0) begin = end = 0;
    return {pieces.seq, pieces.tokens, begin * p.tile_tokens, smaller(end * p.tile_tokens, pieces.tokens),
            pieces.count > 1 ? item : -1};
}

/// Where the partial results of a virtual sequence begin, as `slots_of`. All lanes of a wave must ask together.
DEVICE Slots own_slots(const DecodeParams& p, int virtual_seq) {
    const int GLOBAL* length_at = few_length(p);
    FewPieces pieces = few_pieces(p, few_tokens(p, length_at ? load_now(length_at) : 0), -1, virtual_seq);
    return {pieces.first, pieces.count > 1 ? pieces.count : 0};
}
