// Merging attention results of the same rows by their LSE: two states of one device, or one of each context-parallel rank.
// Any grid does: teams of threads take rows in turn. Outputs are of Q_DTYPE.

constexpr int TEAM = 32;  // threads of a row
constexpr int TEAMS = THREADS / TEAM;

DEVICE float to_float(uint16 bits) { return Q_IS_BF16 ? bits_float((uint32)bits << 16) : f16_to_float(bits); }
DEVICE uint16 to_bits(float value) { return (uint16)pack(value, 0.0f); }

KERNEL(THREADS) merge_states(const MergeParams p) {
    grid_dependency_wait();
    grid_dependency_launch();
    const uint16 GLOBAL* prefix = global_pointer<const uint16>(p.prefix_out);
    const uint16 GLOBAL* suffix = global_pointer<const uint16>(p.suffix_out);
    uint16 GLOBAL* out = global_pointer<uint16>(p.out);
    int64 rows = (int64)p.num_tokens * p.num_heads;
    int lane = thread_index() % TEAM;
    for (int64 row = (int64)block_index() * TEAMS + thread_index() / TEAM; row < rows; row += (int64)grid_blocks() * TEAMS) {
        int64 token = row / p.num_heads;
        int64 at = row % p.num_heads * p.num_tokens + token;
        float suffix_lse = global_pointer<const float>(p.suffix_lse)[at];
        if (token >= p.tokens_with_context) {
            for (int i = lane; i < p.head_dim; i += TEAM) out[row * p.head_dim + i] = suffix[row * p.head_dim + i];
            if (lane == 0 && p.out_lse) global_pointer<float>(p.out_lse)[at] = suffix_lse;
            continue;
        }
        float prefix_lse = global_pointer<const float>(p.prefix_lse)[at];
        if (prefix_lse == -NEGATIVE_INFINITY) prefix_lse = NEGATIVE_INFINITY;
        if (suffix_lse == -NEGATIVE_INFINITY) suffix_lse = NEGATIVE_INFINITY;
        float largest = maximum(prefix_lse, suffix_lse);
        bool empty = largest == NEGATIVE_INFINITY;
        float prefix_weight = exp2((prefix_lse - largest) * LOG2_E);
        float suffix_weight = exp2((suffix_lse - largest) * LOG2_E);
        float sum = prefix_weight + suffix_weight;
        prefix_weight = empty ? 0.0f : prefix_weight / sum;
        suffix_weight = empty ? 0.0f : suffix_weight / sum;
        for (int i = lane; i < p.head_dim; i += TEAM) {
            float value = to_float(prefix[row * p.head_dim + i]) * prefix_weight;
            value += to_float(suffix[row * p.head_dim + i]) * suffix_weight;
            out[row * p.head_dim + i] = empty ? 0 : to_bits(value);
        }
        if (lane == 0 && p.out_lse) {
            global_pointer<float>(p.out_lse)[at] = empty ? NEGATIVE_INFINITY : largest + log2(sum) * LN_2;
        }
    }
}

/// LSE of a rank in base 2; NaN and infinities mean an empty shard.
DEVICE float rank_lse(const DcpCombineParams& p, int rank, int64 row) {
    float lse = global_pointer<const float>(p.partial_lse)[rank * p.lse_stride_rank + row];
    if (lse != lse || lse == -NEGATIVE_INFINITY) return NEGATIVE_INFINITY;
    return p.natural_log ? lse * LOG2_E : lse;
}

KERNEL(THREADS) dcp_combine(const DcpCombineParams p) {
    grid_dependency_wait();
    grid_dependency_launch();
    const uint16 GLOBAL* partial = global_pointer<const uint16>(p.partial_out);
    uint16 GLOBAL* out = global_pointer<uint16>(p.out);
    int64 rows = (int64)p.num_rows * p.num_heads;
    int lane = thread_index() % TEAM;
    for (int64 row = (int64)block_index() * TEAMS + thread_index() / TEAM; row < rows; row += (int64)grid_blocks() * TEAMS) {
        float largest = NEGATIVE_INFINITY;
        for (int rank = 0; rank < p.num_ranks; rank++) largest = maximum(largest, rank_lse(p, rank, row));
        bool empty = largest == NEGATIVE_INFINITY;
        float sum = 0.0f;
        for (int rank = 0; rank < p.num_ranks; rank++) {
            sum += empty ? 0.0f : exp2(rank_lse(p, rank, row) - largest);
        }
        for (int i = lane; i < p.head_dim; i += TEAM) {
            float value = 0.0f;
            for (int rank = 0; rank < p.num_ranks; rank++) {
                float weight = empty ? 0.0f : exp2(rank_lse(p, rank, row) - largest) / sum;
                // The output of an empty shard may be anything.
                if (weight != 0.0f) value += weight * to_float(partial[rank * p.out_stride_rank + row * p.head_dim + i]);
            }
            out[row * p.head_dim + i] = to_bits(value);
        }
        if (lane == 0 && p.out_lse) {
            float lse = largest + log2(sum);
            global_pointer<float>(p.out_lse)[row] = empty ? NEGATIVE_INFINITY : p.natural_log ? lse * LN_2 : lse;
        }
    }
}
