// Merging attention results of the same rows by their LSE: two states of one device, or one of each context-parallel rank.
// Any grid does: teams of threads take rows in turn. Outputs are of Q_DTYPE.

constexpr int TEAM = 32;  // threads of a row
constexpr int TEAMS = THREADS / TEAM;

KERNEL(THREADS) merge_states(const MergeParams p) {
    grid_dependency_wait();
    grid_dependency_launch();
    int64 rows = (int64)p.num_tokens * p.num_heads;
    int lane = thread_index() % TEAM;
    for (int64 row = (int64)block_index() * TEAMS + thread_index() / TEAM; row < rows; row += (int64)grid_blocks() * TEAMS) {
        int64 token = row / p.num_heads;
        int64 at = row % p.num_heads * p.num_tokens + token;
        float suffix_lse = global_pointer<const float>(p.suffix_lse)[at];
        if (token >= p.tokens_with_context) {
            for (int i = lane; i < p.head_dim; i += TEAM) {
                write_element<Q_DTYPE>(p.out, row * p.head_dim + i, read_element<Q_DTYPE>(p.suffix_out, row * p.head_dim + i));
            }
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
            float value = 0.0f;
            // The output of a side without keys may be anything.
            if (prefix_weight != 0.0f) value += prefix_weight * read_element<Q_DTYPE>(p.prefix_out, row * p.head_dim + i);
            if (suffix_weight != 0.0f) value += suffix_weight * read_element<Q_DTYPE>(p.suffix_out, row * p.head_dim + i);
            write_element<Q_DTYPE>(p.out, row * p.head_dim + i, value);
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
        float inverse = empty ? 0.0f : 1.0f / sum;
        for (int i = lane; i < p.head_dim; i += TEAM) {
            float value = 0.0f;
            for (int rank = 0; rank < p.num_ranks; rank++) {
                float weight = empty ? 0.0f : exp2(rank_lse(p, rank, row) - largest) * inverse;
                // The output of an empty shard may be anything.
                if (weight == 0.0f) continue;
                value += weight * read_element<Q_DTYPE>(p.partial_out, rank * p.out_stride_rank + row * p.head_dim + i);
            }
            write_element<Q_DTYPE>(p.out, row * p.head_dim + i, value);
        }
        if (lane == 0 && p.out_lse) {
            float lse = largest + log2(sum);
            global_pointer<float>(p.out_lse)[row] = empty ? NEGATIVE_INFINITY : p.natural_log ? lse * LN_2 : lse;
        }
    }
}
