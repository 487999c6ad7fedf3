// How the keys form merges the pieces of a sequence that has few of them. Each group has half of the columns, and knows nothing of the
// other.
//
// Who comes last merges: the others put their results into memory, count themselves, and go on to other work, so nobody waits for
// anybody. Pieces are added in their order, the last one to come rounded like the others: the outcome is the same whoever that is.
// Counters are back at zero for the next layer. The schedule says whether this is done: where a sequence has many pieces stage 2, which
// has blocks for each, is quicker, and it takes as long for one sequence as for all.

constexpr int WARP_ROWS = ROWS / GROUP_WARPS;  // of a group's half result that a warp has: row `i * GROUP_WARPS + warp`
constexpr bool MERGES = ROWS == 16 && !FP8;  // for others it is slower than stage 2
constexpr int ROW_STEP = GROUP_WARPS * KV_LORA_RANK;

/// What all threads need to know of a piece: the slot of its sequence's first one, which piece of how many it is, 0 if it is the only
/// one, and where those are counted that are there, by group; whether those of this step are merged here.
struct Piece {
    int64 first_slot;
    uint32 GLOBAL* arrivals;
    int split, count, merges;

    static DEVICE Piece SHARED& of(int turn, unsigned char SHARED* shared) { return ((Piece SHARED*)(shared + PIECE_AT))[turn]; }
    DEVICE bool alone() const { return count == 0; }
    DEVICE bool merged() const { return MERGES && count > 0 && merges; }
};
static_assert(sizeof(Piece) == PIECE_BYTES, "two of them in shared memory");

/// Where a piece's rows go, and their LSEs: to its slot, or to the output where it is its sequence's only one or is merged here. 0 for
/// none.
enum Address { TO_RESULT, TO_LSE };
DEVICE uint64 SHARED* addresses(int turn, Address of, unsigned char SHARED* shared) {
    return (uint64 SHARED*)(shared + ADDRESSES_AT) + (turn * 2 + of) * ROWS;
}

/// The LSE of each row of a group's piece, and how many of the sequence's pieces had come when the group last looked.
DEVICE float SHARED* own_lse(int group, unsigned char SHARED* shared) { return (float SHARED*)(shared + LSE_AT) + group * ROWS; }
DEVICE int SHARED& arrived(int group, unsigned char SHARED* shared) { return ((int SHARED*)(shared + ARRIVED_AT))[group]; }

/// Looks how many are there, by one thread.
DEVICE void look_for_others(const Piece SHARED& piece, int group, unsigned char SHARED* shared) {
    arrived(group, shared) = (int)load_acquire(piece.arrivals + group);
}

/// Counts the group's half, which was stored before; whether it is the last to come.
DEVICE bool comes_last(const Piece SHARED& piece, int group, unsigned char SHARED* shared) {
    group_barrier(group);
    if (thread_index() % GROUP_THREADS == 0) arrived(group, shared) = (int)count_up(piece.arrivals + group, piece.count - 1);
    group_barrier(group);
    return arrived(group, shared) == piece.count - 1;
}

/// Merges a group's half of a piece, given as a warp's rows and their LSEs, with its sequence's others; whether it came last, and the
/// rows have become the sequence's.
DEVICE bool merge_with_others(const DecodeParams& p, Word4 (&word)[WARP_ROWS], const float (&lse)[WARP_ROWS], const Piece SHARED& piece,
                              int group, int turn, unsigned char SHARED* shared) {
    int warp = warp_of_group();
    int group_rows = ::group_rows(p);
    int rows = (group_rows - warp + GROUP_WARPS - 1) / GROUP_WARPS;  // of the group, that are this warp's
    uint16 GLOBAL* out = global_pointer<uint16>(p.partial_out) + (piece.first_slot * group_rows + warp) * KV_LORA_RANK +
                         group * KV_LORA_RANK / 2 + lane_index() * 8;
    float GLOBAL* lse_of = global_pointer<float>(p.partial_lse) + piece.first_slot * group_rows + warp;
    // Most often the last one has seen all others come, and need not store its own.
    if (arrived(group, shared) < piece.count - 1) {
        UNROLL for (int i = 0; i < WARP_ROWS; i++) {
            if (i >= rows) continue;
            *(Word4 GLOBAL*)(out + (int64)piece.split * group_rows * KV_LORA_RANK + i * ROW_STEP) = word[i];
            // By both groups: each counts its own stores.
            if (lane_index() == 0) lse_of[piece.split * group_rows + i * GROUP_WARPS] = lse[i];
        }
        if (!comes_last(piece, group, shared)) return false;
    }
    float sum[WARP_ROWS][8] = {}, highest[WARP_ROWS], weight[WARP_ROWS] = {};
    UNROLL for (int i = 0; i < WARP_ROWS; i++) highest[i] = NEGATIVE_INFINITY;
    NO_UNROLL for (int other = 0; other < piece.count; other++) {
        Word4 its_word[WARP_ROWS];
        float its_lse[WARP_ROWS];
        UNROLL for (int i = 0; i < WARP_ROWS; i++) {
            its_word[i] = word[i];
            its_lse[i] = lse[i];
            if (other == piece.split || i >= rows) continue;
            its_word[i] = load_word_now(out + i * ROW_STEP);
            its_lse[i] = load_float_now(lse_of + i * GROUP_WARPS);
        }
        UNROLL for (int i = 0; i < WARP_ROWS; i++) {
            if (its_lse[i] == NEGATIVE_INFINITY) continue;  // what an empty one holds may be anything
            float raised = maximum(highest[i], its_lse[i]);
            float factor = exp2((highest[i] - raised) * LOG2_E), share = exp2((its_lse[i] - raised) * LOG2_E);
            highest[i] = raised;
            weight[i] = weight[i] * factor + share;
            uint32 pair[4] = {its_word[i].x, its_word[i].y, its_word[i].z, its_word[i].w};
            UNROLL for (int c = 0; c < 8; c += 2) {
                float low, high;
                unpack(pair[c / 2], low, high);
                sum[i][c] = sum[i][c] * factor + share * low;
                sum[i][c + 1] = sum[i][c + 1] * factor + share * high;
            }
        }
        out += group_rows * KV_LORA_RANK;
        lse_of += group_rows;
    }
    UNROLL for (int i = 0; i < WARP_ROWS; i++) {
        float scale = result_scale(p, weight[i], -1);
        const float* x = sum[i];
        word[i] = {pack(x[0] * scale, x[1] * scale), pack(x[2] * scale, x[3] * scale), pack(x[4] * scale, x[5] * scale),
                   pack(x[6] * scale, x[7] * scale)};
        uint64 to = addresses(turn, TO_LSE, shared)[i * GROUP_WARPS + warp];
        float total = weight[i] == 0.0f ? NEGATIVE_INFINITY : highest[i] + log2(weight[i]) * LN_2;
        if (group == 0 && lane_index() == 0 && to != 0) *global_pointer<float>(to) = total;
    }
    if (thread_index() % GROUP_THREADS == 0) piece.arrivals[group] = 0;
    return true;
}
