// Stage 2 of MLA decode: merges the partial results of virtual sequences that have two or more splits, and clears the rows
// of empty ones. A sequence in one piece was written by stage 1 and costs only a look at the schedule.
//
// A block merges BLOCK_ROWS rows x COLUMNS columns. Its teams of LANES threads share out rows and splits by the number of
// splits: few splits, a row per team; many, several teams per row, which then add up through shared memory. Every team looks
// at all log-sum-exps of its row while its values are on their way, so nothing is scaled twice.

constexpr int COLUMNS = TILE_TOKENS;  // stage 2 has no tiles: the constant gives its columns
constexpr int LANE_COLUMNS = 8;       // 16 bytes of a partial result
constexpr int LANES = COLUMNS / LANE_COLUMNS;
constexpr int TEAMS = THREADS / LANES;
constexpr int LOOKERS = LANES < WAVE ? LANES : WAVE;
constexpr int IN_FLIGHT = 4;
static_assert(THREADS % LANES == 0 && LOOKERS >= 8, "whole teams");

/// What the splits of a row add up to: weights are relative to `maximum`.
struct Total {
    float maximum, weight;

    /// Weight of a split; 0 for an empty one.
    DEVICE float weight_of(float lse) const { return lse == NEGATIVE_INFINITY ? 0.0f : exp2((lse - maximum) * LOG2_E); }

    DEVICE void raise(float raised) {
        // Both are -inf as long as every split was empty.
        if (maximum != raised) weight *= exp2((maximum - raised) * LOG2_E);
        maximum = raised;
    }

    /// Over `count` log-sum-exps, `stride` apart, by LOOKERS neighbouring threads; the result is in all of them.
    static DEVICE Total look(const float GLOBAL* lse_of, int count, int64 stride) {
        Total total = {NEGATIVE_INFINITY, 0.0f};
        NO_UNROLL for (int split = thread_index() % LOOKERS; split < count; split += LOOKERS * IN_FLIGHT) {
            float lse[IN_FLIGHT];
            float highest = total.maximum;
            UNROLL for (int j = 0; j < IN_FLIGHT; j++) {
                lse[j] = split + j * LOOKERS < count ? lse_of[(split + j * LOOKERS) * stride] : NEGATIVE_INFINITY;
                highest = ::maximum(highest, lse[j]);
            }
            total.raise(highest);
            UNROLL for (int j = 0; j < IN_FLIGHT; j++) total.weight += total.weight_of(lse[j]);
        }
        total.raise(lanes_maximum<LOOKERS>(total.maximum));
        total.weight = lanes_sum<LOOKERS>(total.weight);
        return total;
    }
};

/// Adds the eight columns of a split.
DEVICE void add_columns(float (&sum)[LANE_COLUMNS], float weight, const Word4& word) {
    uint32 pair[4] = {word.x, word.y, word.z, word.w};
    UNROLL for (int i = 0; i < 4; i++) {
        float low, high;
        unpack(pair[i], low, high);
        sum[2 * i] += weight * low;
        sum[2 * i + 1] += weight * high;
    }
}

/// Clears rows of an empty virtual sequence.
DEVICE void clear_rows(const DecodeParams& p, int virtual_seq, int first_row, int end_row, int column) {
    NO_UNROLL for (int r = first_row + thread_index() / LANES; r < end_row; r += TEAMS) {
        Row row = row_of(p, virtual_seq, r);
        if (!row.valid || column >= p.kv_lora_rank) continue;
        Word2 GLOBAL* to = (Word2 GLOBAL*)(output_row(p, row) + column);
        to[0] = to[1] = {0, 0};
        if (column == 0) write_lse(p, row, NEGATIVE_INFINITY);
    }
}

KERNEL_OF(THREADS, 2) mla_decode_reduce(const DecodeParams p) {
    SHARED_ARRAY(float, sums, THREADS * LANE_COLUMNS);
    int column_blocks = divide_up(p.kv_lora_rank, COLUMNS);
    int row_blocks = divide_up(group_rows(p), BLOCK_ROWS);
    int block = quotient(block_index(), column_blocks);
    int virtual_seq = quotient(block, row_blocks);
    int first_row = (block - virtual_seq * row_blocks) * BLOCK_ROWS;
    int end_row = smaller(first_row + BLOCK_ROWS, group_rows(p));
    int lane = thread_index() % LANES;
    int team = thread_index() / LANES;
    int first_column = (block_index() - block * column_blocks) * COLUMNS;
    int column = first_column + lane * LANE_COLUMNS;

    // The next kernel may come as near as it likes. Stage 1 lets this one begin once what came before stage 1 has ended, so lengths
    // and schedule may be read at once.
    grid_dependency_launch();
    bool empty = extent(p, virtual_seq) == 0;
    Slots slots = {0, 0};
    if (!empty) slots = p.schedule_kind == OWN ? own_slots(p, virtual_seq) : slots_of(p, virtual_seq);
    if (slots.count == 0) {
        grid_dependency_wait();
        if (empty) clear_rows(p, virtual_seq, first_row, end_row, column);
        return;
    }

    // Teams per row: enough that each has at most IN_FLIGHT splits, as far as there are teams; at least so many that no team
    // is idle for want of rows.
    int share = 1;
    while (share < TEAMS && (share * IN_FLIGHT < slots.count || TEAMS / share > BLOCK_ROWS)) share *= 2;
    int log_share = highest_bit(share);
    int64 rows = group_rows(p);
    NO_UNROLL for (int r = first_row; r < end_row; r += TEAMS >> log_share) {
        int at = r + (team >> log_share);
        int64 first_slot_row = slots.begin * rows + smaller(at, end_row - 1);
        const float GLOBAL* lse_of = global_pointer<const float>(p.partial_lse) + first_slot_row;
        const uint16 GLOBAL* out_of =
            global_pointer<const uint16>(p.partial_out) + first_slot_row * p.kv_lora_rank + (column < p.kv_lora_rank ? column : 0);
        Row row = row_of(p, virtual_seq, at);
        bool writes = at < end_row && row.valid;
        uint16 GLOBAL* out = output_row(p, row);
        if (r == first_row) grid_dependency_wait();
        Total total;
        float sum[LANE_COLUMNS] = {};
        int first = team & (share - 1);
        int split = first;
        const float GLOBAL* lse_at = lse_of + first * rows;
        const uint16 GLOBAL* out_at = out_of + first * rows * p.kv_lora_rank;
        NO_UNROLL do {
            Word4 word[IN_FLIGHT];
            float lse[IN_FLIGHT];
            UNROLL for (int j = 0; j < IN_FLIGHT; j++) {
                word[j] = {0, 0, 0, 0};
                lse[j] = NEGATIVE_INFINITY;
                if (split < slots.count) {
                    word[j] = *(const Word4 GLOBAL*)out_at;
                    lse[j] = *lse_at;
                }
                split += share;
                lse_at += share * rows;
                out_at += share * rows * p.kv_lora_rank;
            }
            if (split == first + share * IN_FLIGHT) total = Total::look(lse_of, slots.count, rows);
            UNROLL for (int j = 0; j < IN_FLIGHT; j++) {
                float weight = total.weight_of(lse[j]);
                if (weight != 0.0f) add_columns(sum, weight, word[j]);  // what an empty split holds may be anything
            }
        } while (split < slots.count);
        // Emptiness is a weight of zero: a NaN must show.
        float factor = total.weight == 0.0f ? 0.0f : p.kv_scale / total.weight;
        if (writes && column == 0 && first == 0) {
            write_lse(p, row, total.weight == 0.0f ? NEGATIVE_INFINITY : total.maximum + log2(total.weight) * LN_2);
        }
        UNROLL for (int i = 0; i < LANE_COLUMNS; i += 4) {
            *(Float4 SHARED*)(sums + thread_index() * LANE_COLUMNS + i) = {sum[i], sum[i + 1], sum[i + 2], sum[i + 3]};
        }
        barrier();
        // The row's threads take two columns at a time.
        int row_threads = LANES << log_share;
        NO_UNROLL for (int pair = thread_index() & (row_threads - 1); pair < COLUMNS / 2; pair += row_threads) {
            const float SHARED* of = sums + (team >> log_share << log_share) * COLUMNS + pair * 2;
            float low = 0.0f, high = 0.0f;
#pragma unroll 8
            for (int other = 0; other < share; other++) {
                Word2 part = *(const Word2 SHARED*)(of + other * COLUMNS);
                low += bits_float(part.x);
                high += bits_float(part.y);
            }
            int to = first_column + pair * 2;
            if (writes && to < p.kv_lora_rank) *(uint32 GLOBAL*)(out + to) = pack(low * factor, high * factor);
        }
        if (r + (TEAMS >> log_share) < end_row) barrier();
    }
}
