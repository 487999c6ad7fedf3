// The end of a piece in the keys form: the groups exchange halves of their sums, and each writes half of the result's columns.

/// Where the LSE of a row goes, to `slot` or, if negative, to the output; 0 if it is not wanted.
DEVICE uint64 lse_address(const DecodeParams& p, const Row& of, int64 slot, int group_row) {
    if (slot >= 0) return p.partial_lse + (slot * group_rows(p) + group_row) * 4;
    return p.lse == 0 ? 0 : p.lse + (of.seq * p.lse_stride_batch + of.token * p.lse_stride_token + of.head) * 4;
}

/// A row's maximum and sum over both groups, and what each group's sums are to be multiplied by before they are added.
struct Total {
    float maximum, sum, factor[GROUPS];

    DEVICE Total(int row, const unsigned char SHARED* shared) {
        const float SHARED* sums = (const float SHARED*)(shared + EXCHANGE_AT) + row;
        const float SHARED* maxima = (const float SHARED*)(shared + MAXIMA_AT) + row;
        maximum = ::maximum(maxima[0], maxima[ROWS]);
        sum = 0.0f;
        UNROLL for (int group = 0; group < GROUPS; group++) {
            float its_sum = 0.0f;
            UNROLL for (int warp = 0; warp < GROUP_WARPS; warp++) its_sum += sums[(group * GROUP_WARPS + warp) * ROWS];
            factor[group] = exp2(maxima[group * ROWS] - maximum);
            sum += its_sum * factor[group];
        }
    }

    /// Emptiness is a sum of zero: a NaN must show.
    DEVICE float lse() const { return sum == 0.0f ? NEGATIVE_INFINITY : (maximum + log2(sum)) * LN_2; }
};

/// Sums of a group: the result's columns by units, transposed.
using Sums = float[LATENT_UNITS][SUMS];

/// Units of a group's last tile of a piece that are not given back at once: half of its sums pass through them to the other group,
/// and then that group's half of the result to memory.
constexpr int EXCHANGED_UNITS = HALF_UNITS * SUMS * GROUP_THREADS * 4 / UNIT_BYTES;
static_assert(EXCHANGED_UNITS <= CACHED_UNITS, "half of the sums fit into a tile");

/// Where a lane's sums `i` to `i + 3` of a unit of the half are handed over, in the units of the tile at a place.
DEVICE Float4 SHARED& handed_over(unsigned char SHARED* shared, UnitPlace place, int unit, int i) {
    int word = (unit * SUMS + i) / 4 * GROUP_THREADS;
    constexpr int UNIT_WORDS = UNIT_BYTES / 16;
    return ((Float4 SHARED*)(shared + place.after(word / UNIT_WORDS).index * UNIT_BYTES))[word % UNIT_WORDS +
                                                                                       thread_index() % GROUP_THREADS];
}

/// Hands the half of the sums over that the other group writes.
DEVICE void hand_over(const Sums& o, int group, UnitPlace place, unsigned char SHARED* shared) {
    auto sum = [&](int unit, int i) { return group == 0 ? o[unit + HALF_UNITS][i] : o[unit][i]; };
    UNROLL for (int unit = 0; unit < HALF_UNITS; unit++) {
        UNROLL for (int i = 0; i < SUMS; i += 4) {
            handed_over(shared, place, unit, i) = {sum(unit, i), sum(unit, i + 1), sum(unit, i + 2), sum(unit, i + 3)};
        }
    }
    publish_to_async();
}

/// Says what a group's sums of each row are to be multiplied by, and the other's; writes the LSE. A thread for each row, and one that
/// asks how many of the sequence's pieces are there.
DEVICE void weigh_groups(const DecodeParams& p, int group, int turn, unsigned char SHARED* shared) {
    int row = thread_index() % GROUP_THREADS;
    const Piece SHARED& piece = Piece::of(turn, shared);
    if (row == GROUP_THREADS - 1 && piece.merged()) look_for_others(piece, group, shared);
    if (row >= ROWS) return;
    Total total(row, shared);
    float result = result_scale(p, total.sum, piece.alone() ? -1 : 0);
    float SHARED* scale = (float SHARED*)(shared + SCALE_AT) + group * GROUPS * ROWS + row;
    scale[0] = result * (group == 0 ? total.factor[0] : total.factor[1]);
    scale[ROWS] = result * (group == 0 ? total.factor[1] : total.factor[0]);
    float lse = total.lse();
    own_lse(group, shared)[row] = lse;
    uint64 to = addresses(turn, TO_LSE, shared)[row];
    if (group == 0 && to != 0 && !piece.merged()) *global_pointer<float>(to) = lse;
}

/// Writes a group's half of a piece's result: its own sums and, if the other had tiles, those handed over in the tile at `other`,
/// whose place the result then takes on its way. The weights' place serves the group that had all tiles.
DEVICE void write_half(const DecodeParams& p, const Sums& o, int group, bool alone, int turn, UnitPlace other,
                       unsigned char SHARED* shared) {
    int lane = unhoisted(lane_index());
    int warp = warp_of_group();
    const float SHARED* scales = (const float SHARED*)(shared + SCALE_AT) + group * GROUPS * ROWS;
    float scale[LANE_ROWS], other_scale[LANE_ROWS];
    UNROLL for (int i = 0; i < LANE_ROWS; i++) {
        scale[i] = scales[lane_row(lane, i)];
        other_scale[i] = scales[ROWS + lane_row(lane, i)];
    }
    float half[HALF_UNITS][SUMS];
    UNROLL for (int unit = 0; unit < HALF_UNITS; unit++) {
        UNROLL for (int i = 0; i < SUMS; i++) {
            half[unit][i] = (group == 0 ? o[unit][i] : o[unit + HALF_UNITS][i]) * scale[i / 4 * 2 + i % 2];
        }
        if (alone) continue;
        UNROLL for (int i = 0; i < SUMS; i += 4) {
            Float4 more = handed_over(shared, other, unit, i);
            half[unit][i] += more.x * other_scale[i / 2];
            half[unit][i + 1] += more.y * other_scale[i / 2 + 1];
            half[unit][i + 2] += more.z * other_scale[i / 2];
            half[unit][i + 3] += more.w * other_scale[i / 2 + 1];
        }
    }
    group_barrier(group);  // all have been taken
    constexpr int ROW_BYTES = KV_LORA_RANK;
    constexpr int UNIT_ROWS = UNIT_BYTES / ROW_BYTES;
    static_assert(ROWS * ROW_BYTES <= EXCHANGED_UNITS * UNIT_BYTES && ROWS * ROW_BYTES <= 2 * GROUPS * WEIGHTS_BYTES, "staging");
    auto staged = [&](int row) {
        return shared + (alone ? WEIGHTS_AT + row * ROW_BYTES
                               : other.after(row / UNIT_ROWS).index * UNIT_BYTES + row % UNIT_ROWS * ROW_BYTES);
    };
    if constexpr (FP8) {
        UNROLL for (int i = 0; i < SUMS; i += 4) {
            UNROLL for (int e = 0; e < 2; e++) {
                int row = lane % 4 * 2 + e;
                unsigned char SHARED* to = staged(i * 2 + row) + ((warp * 2 + lane / 16) ^ row) * 16 + lane / 4 % 4 * 4;
                UNROLL for (int unit = 0; unit < HALF_UNITS; unit++) {
                    *(uint32 SHARED*)(to + unit * 128) = pack(half[unit][i + e], half[unit][i + e + 2]);
                }
            }
        }
    } else {
        UNROLL for (int block = 0; block < SUMS / 8; block++) {
            uint32 to = shared_address(staged((block * 2 + lane / 16) * 8 + lane % 8)) + ((warp * 2 + lane / 8 % 2) ^ lane % 8) * 16;
            UNROLL for (int unit = 0; unit < HALF_UNITS; unit++) {
                const float* x = half[unit] + block * 8;
                store_matrix_trans(to + unit * 128, pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
            }
        }
    }
    publish_to_async();
    group_barrier(group);
    Word4 word[WARP_ROWS];
    UNROLL for (int i = 0; i < WARP_ROWS; i++) {
        int row = i * GROUP_WARPS + warp;
        word[i] = *(const Word4 SHARED*)(staged(row) + (lane ^ row % 8) * 16);
    }
    const Piece SHARED& piece = Piece::of(turn, shared);
    float lse[WARP_ROWS];
    UNROLL for (int i = 0; i < WARP_ROWS; i++) lse[i] = own_lse(group, shared)[i * GROUP_WARPS + warp];
    if (piece.merged() && !merge_with_others(p, word, lse, piece, group, turn, shared)) return;
    UNROLL for (int i = 0; i < WARP_ROWS; i++) {
        uint64 to = addresses(turn, TO_RESULT, shared)[i * GROUP_WARPS + warp];
        if (to != 0) store_output(global_pointer<uint16>(to) + group * KV_LORA_RANK / 2 + lane * 8, word[i]);
    }
}
