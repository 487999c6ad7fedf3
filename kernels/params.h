// The parameter blocks of src/kernel/params.rs, which documents every field. Passed by value; pointers are addresses.

struct DecodeParams {
    uint64 q, kv, k_rope, block_table, seq_lens, out, lse, partial_out, partial_lse, schedule;
    int64 q_stride_batch, q_stride_token, q_stride_head, kv_stride_page, kv_stride_token, rope_stride_page;
    int64 rope_stride_token, table_stride, out_stride_batch, out_stride_token, out_stride_head, lse_stride_batch;
    int64 lse_stride_token, num_pages;
    int batch, query_len, query_group, num_heads, kv_lora_rank, rope_dim, page_size, table_width, causal;
    int schedule_kind, num_kv_splits, split_tokens, num_parts, tile_tokens;
    float sm_scale, softcap, kv_scale;
    int fixed_cost, num_groups, few_parts, few_unit, few_tokens, few_blocks, settled, merged_pieces;
    int partial_order, share_blocks;
    uint32 groups_inverse, heads_inverse, page_inverse, share_inverse, reserved;
};
static_assert(sizeof(DecodeParams) == 320, "as in params.rs");

struct CacheWriteParams {
    uint64 kv_c, k_pe, slot_mapping, kv, k_rope;
    int64 kv_c_stride, k_pe_stride, kv_stride_page, kv_stride_token, rope_stride_page, rope_stride_token;
    int64 num_pages;
    int num_tokens, kv_lora_rank, rope_dim, page_size, layout;
    float kv_scale;
};
static_assert(sizeof(CacheWriteParams) == 120, "as in params.rs");

struct CacheGatherParams {
    uint64 kv, k_rope, block_table, cu_seq_lens, seq_starts, out;
    int64 kv_stride_page, kv_stride_token, rope_stride_page, rope_stride_token, table_stride, out_stride;
    int64 num_pages;
    int batch, num_tokens, kv_lora_rank, rope_dim, page_size, table_width, layout;
    float kv_scale;
};
static_assert(sizeof(CacheGatherParams) == 136, "as in params.rs");

struct MergeParams {
    uint64 prefix_out, prefix_lse, suffix_out, suffix_lse, out, out_lse;
    int num_tokens, num_heads, head_dim, tokens_with_context;
};
static_assert(sizeof(MergeParams) == 64, "as in params.rs");

struct DcpCombineParams {
    uint64 partial_out, partial_lse, out, out_lse;
    int64 out_stride_rank, lse_stride_rank;
    int num_ranks, num_rows, num_heads, head_dim, natural_log, reserved;
};
static_assert(sizeof(DcpCombineParams) == 72, "as in params.rs");

struct ProbeParams {
    uint64 source, out;
    int64 bytes;
    int iterations, reserved;
};
static_assert(sizeof(ProbeParams) == 32, "as in params.rs");

/// Values of `DecodeParams::schedule_kind`.
enum ScheduleKind { BALANCED = 0, EVEN = 1, CHUNKED = 2, OWN = 3, EITHER = 4 };

/// Values of `DecodeParams::partial_order`.
enum PartialOrder { IN_ORDER = 0, DEALT_PAIRS = 1 };

/// Values of the `layout` fields.
enum CacheLayout { PLAIN = 0, FP8_DS_MLA = 1 };

/// Values of `DecodeParams::settled`.
enum Settled { NONE_SETTLED = 0, LENGTHS_SETTLED = 1, HISTORY_SETTLED = 2 };

/// Codes of Q_DTYPE and KV_DTYPE.
enum DTypeCode { F32 = 0, F16 = 1, BF16 = 2, FP8_E4M3 = 3, FP8_E4M3FNUZ = 4, U8 = 5 };
