// Stage 2 of MLA decode: merges the partial results of virtual sequences that have two or more splits, and clears the rows
// of empty ones. A sequence in one piece was written by stage 1 and costs only a look at the schedule.
//
// A block merges BLOCK_ROWS rows x COLUMNS columns. Its teams of LANES threads share out rows and splits by the number of
// splits: few splits, a row per team; many, several teams per row, which then add up through shared memory.

constexpr int COLUMNS = TILE_TOKENS;  // stage 2 has no tiles: the constant gives its columns
constexpr int LANES = COLUMNS / 4;
constexpr int TEAMS = THREADS / LANES;
constexpr int IN_FLIGHT = 8;
static_assert(LANES % 32 == 0 && THREADS % LANES == 0, "teams of whole half-waves");

/// Largest value, and sum of exponentials relative to it, of the LSE of a row's splits: in every lane.
struct Normaliser {
    float maximum, inverse, lse;

    DEVICE void find(const float GLOBAL* lse_of, int count, int stride) {
        maximum = NEGATIVE_INFINITY;
        float sum = 0.0f;
        int lane = thread_index() % 32;
        for (int s = lane; s < count; s += 32) maximum = ::maximum(maximum, lse_of[(int64)s * stride]);
        maximum = lanes_maximum<32>(maximum);
        if (maximum == NEGATIVE_INFINITY) maximum = 0.0f;  // every split is empty, or NaN
        for (int s = lane; s < count; s += 32) sum += weight(lse_of[(int64)s * stride]);
        sum = lanes_sum<32>(sum);
        inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
        lse = sum == 0.0f ? NEGATIVE_INFINITY : maximum + log2(sum) * LN_2;
    }

    DEVICE float weight(float split_lse) const { return exp2((split_lse - maximum) * LOG2_E); }
};

DEVICE void write_columns(const DecodeParams& p, const Row& row, int column, const Float4& value) {
    *(Word2 GLOBAL*)(output_row(p, row) + column) = {pack(value.x, value.y), pack(value.z, value.w)};
}

KERNEL(THREADS) mla_decode_reduce(const DecodeParams p) {
    SHARED_ARRAY(Float4, team_sum, THREADS);
    grid_dependency_wait();
    grid_dependency_launch();

    int column_blocks = divide_up(p.kv_lora_rank, COLUMNS);
    int row_blocks = divide_up(group_rows(p), BLOCK_ROWS);
    int block = block_index() / column_blocks;
    int virtual_seq = block / row_blocks;
    int first_row = block % row_blocks * BLOCK_ROWS;
    int end_row = smaller(first_row + BLOCK_ROWS, group_rows(p));
    int lane = thread_index() % LANES;
    int team = thread_index() / LANES;
    int column = block_index() % column_blocks * COLUMNS + lane * 4;
    bool writes_lse = column == 0;

    int tokens = extent(p, virtual_seq);
    if (tokens == 0) {
        for (int r = first_row + team; r < end_row; r += TEAMS) {
            Row row = row_of(p, virtual_seq, r);
            if (!row.valid || column >= p.kv_lora_rank) continue;
            write_columns(p, row, column, {0.0f, 0.0f, 0.0f, 0.0f});
            if (writes_lse) write_lse(p, row, NEGATIVE_INFINITY);
        }
        return;
    }
    Slots slots = slots_of(p, virtual_seq, tokens);
    if (slots.count == 0) return;

    // Teams per row: enough that each has at most IN_FLIGHT splits, as far as there are teams; at least so many that no team
    // is idle for want of rows.
    int share = 1;
    while (share < TEAMS && (share * IN_FLIGHT < slots.count || TEAMS / share > BLOCK_ROWS)) share *= 2;
    int64 rows = group_rows(p);
    for (int r = first_row; r < end_row; r += TEAMS / share) {
        int at = r + team / share;
        bool inside = at < end_row && column < p.kv_lora_rank;
        const float GLOBAL* lse_of = global_pointer<const float>(p.partial_lse) + slots.begin * rows + smaller(at, end_row - 1);
        const float GLOBAL* out_of = global_pointer<const float>(p.partial_out) +
                                     (slots.begin * rows + smaller(at, end_row - 1)) * p.kv_lora_rank + (inside ? column : 0);
        Normaliser normal;
        normal.find(lse_of, slots.count, (int)rows);
        Float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
        NO_UNROLL for (int first = team % share; first < slots.count; first += share * IN_FLIGHT) {
            Float4 part[IN_FLIGHT];
            float weight[IN_FLIGHT];
            UNROLL for (int j = 0; j < IN_FLIGHT; j++) {
                int64 split = smaller(first + j * share, slots.count - 1);
                part[j] = *(const Float4 GLOBAL*)(out_of + split * rows * p.kv_lora_rank);
                weight[j] = lse_of[split * rows];
            }
            UNROLL for (int j = 0; j < IN_FLIGHT; j++) {
                float w = first + j * share < slots.count ? normal.weight(weight[j]) : 0.0f;
                if (w == 0.0f) continue;
                sum.x += w * part[j].x;
                sum.y += w * part[j].y;
                sum.z += w * part[j].z;
                sum.w += w * part[j].w;
            }
        }
        if (share > 1) {
            team_sum[thread_index()] = sum;
            barrier();
            if (team % share == 0) {
                for (int other = 1; other < share; other++) {
                    Float4 more = team_sum[thread_index() + other * LANES];
                    sum.x += more.x;
                    sum.y += more.y;
                    sum.z += more.z;
                    sum.w += more.w;
                }
            }
            barrier();
        }
        Row row = row_of(p, virtual_seq, at);
        if (team % share != 0 || !inside || !row.valid) continue;
        float inverse = normal.inverse;
        write_columns(p, row, column, {sum.x * inverse, sum.y * inverse, sum.z * inverse, sum.w * inverse});
        if (writes_lse) write_lse(p, row, normal.lse);
    }
}
