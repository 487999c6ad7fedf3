// Stage 2 of MLA decode: merges the partial results of virtual sequences that have two or more splits, and clears the rows
// of empty ones. A sequence in one piece was written by stage 1.
//
// Blocks are few, as each costs time to start. Of a balanced schedule those of a part merge the sequence that the part begins
// within, or else ends within: a sequence has the more blocks the more pieces it has. Its rows, and if those are fewer its
// columns, are divided among its blocks. What takes time is waiting for values, so a thread asks for many at once:
//
//   few splits   a team of threads has all of a row, and several rows at a time
//   many         teams share a row's splits and add up through shared memory. Every team looks at all log-sum-exps of its row while
//                its values are on their way, so nothing is scaled twice

constexpr int LANE_COLUMNS = 8;    // 16 bytes of a partial result
constexpr int LEAST_COLUMNS = 64;  // of a block
constexpr int LOOKERS = LEAST_COLUMNS / LANE_COLUMNS;
constexpr int IN_FLIGHT = 4;       // splits of a thread that shares a row
constexpr int MOST_FEW = 8;        // splits, in all of its rows, of a thread that does not
constexpr int LOOKED_AT = 4;       // log-sum-exps of a thread

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
    static DEVICE Total look(const float GLOBAL* lse_of, int count, int stride) {
        Total total = {NEGATIVE_INFINITY, 0.0f};
        NO_UNROLL for (int split = thread_index() % LOOKERS; split < count; split += LOOKERS * LOOKED_AT) {
            float lse[LOOKED_AT];
            float highest = total.maximum;
            UNROLL for (int j = 0; j < LOOKED_AT; j++) {
                lse[j] = split + j * LOOKERS < count ? lse_of[(int64)(split + j * LOOKERS) * stride] : NEGATIVE_INFINITY;
                highest = ::maximum(highest, lse[j]);
            }
            total.raise(highest);
            UNROLL for (int j = 0; j < LOOKED_AT; j++) total.weight += total.weight_of(lse[j]);
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

/// What a block merges: one of `count` equal shares of a sequence whose partial results lie in `slots`, if it has any. Their words have
/// columns in an `order`.
struct Share {
    int virtual_seq, index, count;
    Slots slots;
    int order;

    /// The first pair of columns of the word `at` of a row; each next one is `pair_stride` further on.
    DEVICE int first_pair(int at) const {
        if (order == IN_ORDER) return at * 4;
        return at / 32 * 128 + at % 32;
    }
    DEVICE int pair_stride() const { return order == IN_ORDER ? 1 : 32; }
};

/// Found while the last blocks of stage 1 work, or else waited for: little is computed, and at once.
DEVICE Share share_of(const DecodeParams& p) {
    int block = block_index();
    if (p.schedule_kind >= OWN) {
        int tokens = few_tokens_now(p);
        if (are_few(p, tokens)) {
            bool one = p.schedule_kind == EITHER;
            int blocks = one ? p.few_blocks : p.share_blocks;
            int seq = one ? block >= blocks : quotient_by(block, blocks, p.share_inverse);
            if (seq >= p.batch * num_groups(p)) return {0, 0, 0, {0, 0}, IN_ORDER};
            return {seq, block - seq * blocks, blocks, own_slots(p, tokens, seq), IN_ORDER};
        }
    }
    int blocks = p.share_blocks, item = quotient_by(block, blocks, p.share_inverse);
    int index = block - item * blocks;
    if (p.schedule_kind == EVEN || p.schedule_kind == CHUNKED) {
        if (item >= p.batch * num_groups(p) || extent(p, item) == 0) return {0, 0, 0, {0, 0}, p.partial_order};
        return {item, index, blocks, slots_of(p, item), p.partial_order};
    }
    if (item >= p.num_parts) return {0, 0, 0, {0, 0}, p.partial_order};
    const int GLOBAL* part = schedule_of(p).parts + (int64)item * PART_WORDS;
    Word2 share = *(const Word2 GLOBAL*)(part + SHARE_WORD);
    Word4 merged = *(const Word4 GLOBAL*)(part + MERGED_WORD);
    Slots slots = {(int)merged.y, (int)merged.z};
    return {(int)merged.x, (int)share.x * blocks + index, (int)share.y * blocks, slots, p.partial_order};
}

/// Clears the rows of empty sequences, each by a block: by the first ones, which begin first.
DEVICE void clear_empty(const DecodeParams& p) {
    int row_words = p.kv_lora_rank / 4;
    NO_UNROLL for (int seq = block_index(); seq < p.batch * num_groups(p); seq += grid_blocks()) {
        if (extent(p, seq) > 0) continue;
        NO_UNROLL for (int at = thread_index(); at < group_rows(p) * row_words; at += THREADS) {
            Row row = row_of(p, seq, quotient(at, row_words));
            int word = at - quotient(at, row_words) * row_words;
            if (!row.valid) continue;
            *((Word2 GLOBAL*)output_row(p, row) + word) = {0, 0};
            if (word == 0) write_lse(p, row, NEGATIVE_INFINITY);
        }
    }
}

/// The rows of a group and the columns that a block merges, and how its threads divide them: a team has all of the columns.
struct Area {
    int first_row, end_row, first_column, columns;

    DEVICE int log_lanes() const { return highest_bit(columns / LANE_COLUMNS); }
    DEVICE int column() const { return first_column + (thread_index() & ((1 << log_lanes()) - 1)) * LANE_COLUMNS; }
};

/// Writes a row's log-sum-exp, by one of its threads.
DEVICE void write_total(const DecodeParams& p, const Row& row, const Total& total) {
    write_lse(p, row, total.weight == 0.0f ? NEGATIVE_INFINITY : total.maximum + log2(total.weight) * LN_2);
}
/// What a row's weighed sum is multiplied by. Emptiness is a weight of zero: a NaN must show.
DEVICE float scale_of(const DecodeParams& p, const Total& total) { return total.weight == 0.0f ? 0.0f : p.kv_scale * reciprocal(total.weight); }

/// Merges rows of up to `most` splits, MOST_FEW / most of them at a time. No thread needs another.
template <int most>
DEVICE void merge_few(const DecodeParams& p, const Share& share, const Area& area) {
    constexpr int ROWS = MOST_FEW / most;
    int group = group_rows(p);
    int column = area.column();
    int teams = THREADS >> area.log_lanes();
    bool waited = false;
    NO_UNROLL for (int r = area.first_row + (thread_index() >> area.log_lanes()); r < area.end_row; r += teams * ROWS) {
        int64 first = share.slots.begin * group + r;
        const float GLOBAL* lse_of = global_pointer<const float>(p.partial_lse) + first;
        const uint16 GLOBAL* out_of = global_pointer<const uint16>(p.partial_out) + first * p.kv_lora_rank + column;
        if (!waited) grid_dependency_wait();
        waited = true;
        Word4 word[ROWS][most];
        float lse[ROWS][most];
        UNROLL for (int i = 0; i < ROWS; i++) {
            UNROLL for (int split = 0; split < most; split++) {
                bool there = split < share.slots.count && r + i * teams < area.end_row;
                int64 at = (int64)split * group + i * teams;
                lse[i][split] = there ? lse_of[at] : NEGATIVE_INFINITY;
                word[i][split] = {0, 0, 0, 0};
                if (there) word[i][split] = *(const Word4 GLOBAL*)(out_of + at * p.kv_lora_rank);
            }
        }
        UNROLL for (int i = 0; i < ROWS; i++) {
            Total total = {NEGATIVE_INFINITY, 0.0f};
            UNROLL for (int split = 0; split < most; split++) total.maximum = ::maximum(total.maximum, lse[i][split]);
            float sum[LANE_COLUMNS] = {};
            UNROLL for (int split = 0; split < most; split++) {
                float weight = total.weight_of(lse[i][split]);
                total.weight += weight;
                if (weight != 0.0f) add_columns(sum, weight, word[i][split]);  // what an empty split holds may be anything
            }
            Row row = row_of(p, share.virtual_seq, r + i * teams);
            if (!row.valid || r + i * teams >= area.end_row) continue;
            if (column == 0) write_total(p, row, total);
            float factor = scale_of(p, total);
            uint32 pairs[LANE_COLUMNS / 2];
            UNROLL for (int c = 0; c < LANE_COLUMNS / 2; c++) pairs[c] = pack(sum[2 * c] * factor, sum[2 * c + 1] * factor);
            uint32 GLOBAL* to = (uint32 GLOBAL*)output_row(p, row) + share.first_pair(column / LANE_COLUMNS);
            if (share.order == IN_ORDER) {
                UNROLL for (int c = 0; c < LANE_COLUMNS / 2; c += 2) *(Word2 GLOBAL*)(to + c) = {pairs[c], pairs[c + 1]};
            } else {
                UNROLL for (int c = 0; c < LANE_COLUMNS / 2; c++) to[c * share.pair_stride()] = pairs[c];
            }
        }
    }
    if (!waited) grid_dependency_wait();
}

KERNEL_OF(THREADS, 3) mla_decode_reduce(const DecodeParams p) {
    SHARED_ARRAY(float, sums, THREADS * LANE_COLUMNS);
    // The next kernel may come as near as it likes. Stage 1 lets this one begin once what came before stage 1 has ended, so lengths
    // and schedule may be read, and rows cleared that stage 1 leaves alone.
    grid_dependency_launch();
    clear_empty(p);
    Share share = share_of(p);
    int group = group_rows(p);
    int log_parts = 0;  // of the columns
    while (p.kv_lora_rank >> log_parts > LEAST_COLUMNS && group << (log_parts + 1) <= share.count) log_parts++;
    int rows_each = quotient_up(group, larger(share.count >> log_parts, 1));
    int first_row = (share.index >> log_parts) * rows_each;
    int columns = p.kv_lora_rank >> log_parts;
    Area area = {first_row, smaller(first_row + rows_each, group), (share.index & ((1 << log_parts) - 1)) * columns, columns};
    if (share.slots.count == 0 || first_row >= area.end_row) {
        // One block sees to it that this kernel does not end before stage 1: the next relies on it.
        if (block_index() == 0) grid_dependency_wait();
        return;
    }

    // By the splits alone: a chunked schedule promises rows that do not depend on what is beside them.
    if (share.slots.count <= 2) return merge_few<2>(p, share, area);
    if (share.slots.count <= 4) return merge_few<4>(p, share, area);
    if (share.slots.count <= 8) return merge_few<8>(p, share, area);
    int log_lanes = area.log_lanes();
    int teams = THREADS >> log_lanes;
    int team = thread_index() >> log_lanes;
    int column = area.column();
    int end_row = area.end_row;
    // Teams per row: enough that each has at most IN_FLIGHT splits, as far as there are teams; at least so many that no team
    // is idle for want of rows. By them the order follows in which splits are added, and a chunked schedule promises rows that do
    // not depend on what is beside them: there they are a matter of the splits alone.
    bool chunked = p.schedule_kind == CHUNKED;
    int most = chunked ? THREADS * LANE_COLUMNS / p.kv_lora_rank : teams;
    int rows = chunked ? most : end_row - first_row;
    int log_spread = 0;
    while (1 << log_spread < most && (IN_FLIGHT << log_spread < share.slots.count || most >> log_spread > rows)) log_spread++;
    int spread = 1 << log_spread;
    NO_UNROLL for (int r = first_row; r < end_row; r += teams >> log_spread) {
        int at = r + (team >> log_spread);
        int64 first_slot_row = share.slots.begin * group + smaller(at, end_row - 1);
        const float GLOBAL* lse_of = global_pointer<const float>(p.partial_lse) + first_slot_row;
        const uint16 GLOBAL* out_of = global_pointer<const uint16>(p.partial_out) + first_slot_row * p.kv_lora_rank + column;
        if (r == first_row) grid_dependency_wait();
        Total total;
        float sum[LANE_COLUMNS] = {};
        int first = team & (spread - 1);
        int split = first;
        const float GLOBAL* lse_at = lse_of + first * group;
        const uint16 GLOBAL* out_at = out_of + (int64)first * group * p.kv_lora_rank;
        NO_UNROLL do {
            Word4 word[IN_FLIGHT];
            float lse[IN_FLIGHT];
            UNROLL for (int j = 0; j < IN_FLIGHT; j++) {
                word[j] = {0, 0, 0, 0};
                lse[j] = NEGATIVE_INFINITY;
                if (split < share.slots.count) {
                    word[j] = *(const Word4 GLOBAL*)out_at;
                    lse[j] = *lse_at;
                }
                split += spread;
                lse_at += spread * group;
                out_at += (int64)spread * group * p.kv_lora_rank;
            }
            if (split == first + spread * IN_FLIGHT) total = Total::look(lse_of, share.slots.count, group);
            UNROLL for (int j = 0; j < IN_FLIGHT; j++) {
                float weight = total.weight_of(lse[j]);
                if (weight != 0.0f) add_columns(sum, weight, word[j]);  // what an empty split holds may be anything
            }
        } while (split < share.slots.count);
        float factor = scale_of(p, total);
        Row row = row_of(p, share.virtual_seq, at);
        bool writes = at < end_row && row.valid;
        uint32 GLOBAL* to = (uint32 GLOBAL*)output_row(p, row);
        if (writes && column == 0 && first == 0) write_total(p, row, total);
        UNROLL for (int i = 0; i < LANE_COLUMNS; i += 4) {
            *(Float4 SHARED*)(sums + thread_index() * LANE_COLUMNS + i) = {sum[i], sum[i + 1], sum[i + 2], sum[i + 3]};
        }
        barrier();
        // The row's threads take two columns at a time.
        int row_threads = 1 << (log_lanes + log_spread);
        NO_UNROLL for (int pair = thread_index() & (row_threads - 1); pair < columns / 2; pair += row_threads) {
            const float SHARED* of = sums + (team >> log_spread << log_spread) * columns + pair * 2;
            float low = 0.0f, high = 0.0f;
#pragma unroll 4
            for (int other = 0; other < spread; other++) {
                Word2 part = *(const Word2 SHARED*)(of + other * columns);
                low += bits_float(part.x);
                high += bits_float(part.y);
            }
            int its_pair = share.first_pair(area.first_column / LANE_COLUMNS + pair / 4) + pair % 4 * share.pair_stride();
            if (writes) to[its_pair] = pack(low * factor, high * factor);
        }
        if (r + (teams >> log_spread) < end_row) barrier();
    }
}
