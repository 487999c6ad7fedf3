// Stage 2 of MLA decode: merges the partial results of virtual sequences that have two or more splits, and clears the rows
// of empty ones. A sequence in one piece was written by stage 1 and costs only a look at the schedule.
//
// A block merges BLOCK_ROWS rows x COLUMNS columns. Its teams of LANES threads share out rows and splits by the number of
// splits: few splits, a row per team; many, several teams per row, which then add up through shared memory.

constexpr int COLUMNS = TILE_TOKENS;  // stage 2 has no tiles: the constant gives its columns
constexpr int LANES = COLUMNS / 4;
constexpr int TEAMS = THREADS / LANES;
constexpr int IN_FLIGHT = 4;
static_assert(LANES % 32 == 0 && THREADS % LANES == 0, "teams of whole half-waves");

/// Splits merged so far: four columns of their weighted sum, with weights relative to `maximum`.
struct Merged {
    float maximum, weight;
    Float4 sum;

    DEVICE void rescale(float raised) {
        // Both are -inf as long as every split was empty.
        float factor = maximum == raised ? 1.0f : exp2((maximum - raised) * LOG2_E);
        maximum = raised;
        weight *= factor;
        sum = {sum.x * factor, sum.y * factor, sum.z * factor, sum.w * factor};
    }

    /// Adds values whose weight is `factor` already.
    DEVICE void add(float factor, float its_weight, const Float4& value) {
        weight += factor * its_weight;
        sum.x += factor * value.x;
        sum.y += factor * value.y;
        sum.z += factor * value.z;
        sum.w += factor * value.w;
    }

    /// Weight of values relative to `its_maximum`; 0 for an empty split.
    DEVICE float factor_of(float its_maximum) const {
        return its_maximum == NEGATIVE_INFINITY ? 0.0f : exp2((its_maximum - maximum) * LOG2_E);
    }
};

DEVICE void write_columns(const DecodeParams& p, const Row& row, int column, const Float4& value) {
    *(Word2 GLOBAL*)(output_row(p, row) + column) = {pack(value.x, value.y), pack(value.z, value.w)};
}

KERNEL(THREADS) mla_decode_reduce(const DecodeParams p) {
    SHARED_ARRAY(Merged, team_merged, THREADS);
    grid_dependency_wait();
    grid_dependency_launch();

    int column_blocks = divide_up(p.kv_lora_rank, COLUMNS);
    int row_blocks = divide_up(group_rows(p), BLOCK_ROWS);
    int block = block_index() / column_blocks;
    int virtual_seq = block / row_blocks;
    int first_row = (block - virtual_seq * row_blocks) * BLOCK_ROWS;
    int end_row = smaller(first_row + BLOCK_ROWS, group_rows(p));
    int lane = thread_index() % LANES;
    int team = thread_index() / LANES;
    int column = (block_index() - block * column_blocks) * COLUMNS + lane * 4;
    bool writes_lse = column == 0;

    Slots slots = slots_of(p, virtual_seq);
    if (extent(p, virtual_seq) == 0) {
        for (int r = first_row + team; r < end_row; r += TEAMS) {
            Row row = row_of(p, virtual_seq, r);
            if (!row.valid || column >= p.kv_lora_rank) continue;
            write_columns(p, row, column, {0.0f, 0.0f, 0.0f, 0.0f});
            if (writes_lse) write_lse(p, row, NEGATIVE_INFINITY);
        }
        return;
    }
    if (slots.count == 0) return;

    // Teams per row: enough that each has at most IN_FLIGHT splits, as far as there are teams; at least so many that no team
    // is idle for want of rows.
    int share = 1;
    while (share < TEAMS && (share * IN_FLIGHT < slots.count || TEAMS / share > BLOCK_ROWS)) share *= 2;
    int64 rows = group_rows(p);
    for (int r = first_row; r < end_row; r += TEAMS / share) {
        int at = r + team / share;
        bool inside = at < end_row && column < p.kv_lora_rank;
        int64 first_slot_row = slots.begin * rows + smaller(at, end_row - 1);
        const float GLOBAL* lse_of = global_pointer<const float>(p.partial_lse) + first_slot_row;
        const float GLOBAL* out_of =
            global_pointer<const float>(p.partial_out) + first_slot_row * p.kv_lora_rank + (inside ? column : 0);
        Merged merged = {NEGATIVE_INFINITY, 0.0f, {0.0f, 0.0f, 0.0f, 0.0f}};
        NO_UNROLL for (int first = team % share; first < slots.count; first += share * IN_FLIGHT) {
            Float4 part[IN_FLIGHT];
            float lse[IN_FLIGHT];
            UNROLL for (int j = 0; j < IN_FLIGHT; j++) {
                int64 offset = (first + j * share) * rows;
                part[j] = {0.0f, 0.0f, 0.0f, 0.0f};
                lse[j] = NEGATIVE_INFINITY;
                if (first + j * share < slots.count) {
                    part[j] = *(const Float4 GLOBAL*)(out_of + offset * p.kv_lora_rank);
                    lse[j] = lse_of[offset];
                }
            }
            float largest = merged.maximum;
            UNROLL for (int j = 0; j < IN_FLIGHT; j++) largest = maximum(largest, lse[j]);
            merged.rescale(largest);
            UNROLL for (int j = 0; j < IN_FLIGHT; j++) {
                float factor = merged.factor_of(lse[j]);
                // What an empty split holds may be anything.
                if (factor != 0.0f) merged.add(factor, 1.0f, part[j]);
            }
        }
        if (share > 1) {
            team_merged[thread_index()] = merged;
            barrier();
            if (team % share == 0) {
                for (int other = 1; other < share; other++) {
                    Merged more = team_merged[thread_index() + other * LANES];
                    merged.rescale(maximum(merged.maximum, more.maximum));
                    merged.add(merged.factor_of(more.maximum), more.weight, more.sum);
                }
            }
            barrier();
        }
        Row row = row_of(p, virtual_seq, at);
        if (team % share != 0 || !inside || !row.valid) continue;
        float inverse = merged.weight == 0.0f ? 0.0f : 1.0f / merged.weight;
        Float4 sum = merged.sum;
        write_columns(p, row, column, {sum.x * inverse, sum.y * inverse, sum.z * inverse, sum.w * inverse});
        if (writes_lse) {
            write_lse(p, row, merged.weight == 0.0f ? NEGATIVE_INFINITY : merged.maximum + log2(merged.weight) * LN_2);
        }
    }
}
