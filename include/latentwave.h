/* Decode attention for models with multi-head latent attention (MLA), on NVIDIA and AMD GPUs and on the host.
 *
 * Made by cbindgen of src/capi/; edit that instead.
 *
 * Status     Every call returns an lw_status; lw_last_error() has the text of the last failure on the calling thread. No panic and
 *            no exception comes out of this library. A call that fails because of its arguments has enqueued nothing.
 * Arguments  Structures begin with struct_size, which the caller sets to sizeof the structure: that says which version of it is
 *            meant. Clear a structure before filling it in; a field of 0 means the usual value wherever there is one.
 * Pointers   Tensors are device memory of the device that the call names (host memory on the host), aligned to their elements.
 *            Strides count elements; a stride of 0 means packed, and the last dimension is always packed.
 * Streams    Raw handles: CUstream, cudaStream_t, hipStream_t. NULL is the default stream, and the only one on the host. Work is only
 *            enqueued, so anyone's graph can capture it; the host runs it at once. Memory stays valid until that work has ended, and
 *            as long as a graph that captured it; so does the device handle, whose kernels the graph holds.
 * Threads    A device may be used by any number of threads at once. A session serves one call at a time, from any thread, and
 *            refuses a second. A step belongs to the callback that it was given to.
 * Handles    are closed once, after the last call that uses them; NULL is ignored there and an error elsewhere.
 */

#ifndef LATENTWAVE_H
#define LATENTWAVE_H

#include <stddef.h>
#include <stdint.h>

// Version of the functions and structures of this header. It changes when something that was there is changed; what is only
// added leaves it.
#define LW_ABI_VERSION 1

// How a call ended. 0 is success; what is not listed here will be an error, too.
enum lw_status
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // Done, or enqueued.
  LW_OK = 0,
  // An argument has a value that no such call can take; the text names it.
  LW_ERROR_ARGUMENT = 1,
  // Shapes do not fit each other.
  LW_ERROR_SHAPE = 2,
  // An element type that this call does not take.
  LW_ERROR_DTYPE = 3,
  // A page id or a length outside the cache or the block table (where the host can see them).
  LW_ERROR_OUT_OF_RANGE = 4,
  // More than was declared or reserved.
  LW_ERROR_CAPACITY = 5,
  // The backend or its kernels cannot do this on this device.
  LW_ERROR_UNSUPPORTED = 6,
  // A vendor's library is missing or too old, or this library was built without that backend.
  LW_ERROR_UNAVAILABLE = 7,
  // The library is there, the device is not.
  LW_ERROR_NO_DEVICE = 8,
  // Device or host memory ran out.
  LW_ERROR_OUT_OF_MEMORY = 9,
  // A kernel could not be compiled; the text has the compiler's log.
  LW_ERROR_COMPILE = 10,
  // A graph could not be captured, or a call came in a state of capture that does not allow it.
  LW_ERROR_GRAPH = 11,
  // The vendor's driver refused a call; the text has its name and code.
  LW_ERROR_DRIVER = 12,
  // A file could not be read, written or understood.
  LW_ERROR_FILE = 13,
  // The caller's own callback returned something else than 0.
  LW_ERROR_CALLBACK = 14,
  // A defect of this library. The handles of the call should be closed.
  LW_ERROR_INTERNAL = 15,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum lw_status lw_status;
#else
typedef int32_t lw_status;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Element types. 0 is none, so that a field that was forgotten shows.
enum lw_dtype
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // 32-bit float (queries, outputs and caches on the host only).
  LW_F32 = 1,
  // IEEE 16-bit float.
  LW_F16 = 2,
  // bfloat16.
  LW_BF16 = 3,
  // OCP float8 e4m3 (`torch.float8_e4m3fn`), caches only.
  LW_FP8_E4M3 = 4,
  // float8 e4m3 of gfx942 (`torch.float8_e4m3fnuz`), caches only.
  LW_FP8_E4M3FNUZ = 5,
  // 656-byte rows of vLLM's `fp8_ds_mla` (latent 512, rope 64), caches on the host only.
  LW_FP8_DS_MLA = 6,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum lw_dtype lw_dtype;
#else
typedef int32_t lw_dtype;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// How sequences are split over the device.
enum lw_split
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // Balanced by the lengths of each step.
  LW_SPLIT_AUTO = 0,
  // Balanced likewise, with splits down to `split_value` tokens.
  LW_SPLIT_MIN_TOKENS = 1,
  // Exactly `split_value` equal splits of every sequence.
  LW_SPLIT_FIXED = 2,
  // Splits of exactly `split_value` tokens: a row's result is bit-equal alone, in any batch, and as a verify row.
  LW_SPLIT_INVARIANT = 3,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum lw_split lw_split;
#else
typedef int32_t lw_split;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Backends.
enum lw_backend
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // The processor; one device, 0.
  LW_HOST = 0,
  // NVIDIA GPUs. The driver is opened at run time.
  LW_CUDA = 1,
  // AMD GPUs. HIP is opened at run time.
  LW_ROCM = 2,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum lw_backend lw_backend;
#else
typedef int32_t lw_backend;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// How batches are served.
enum lw_graph_mode
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // As `LW_GRAPH_FULL_AND_PIECEWISE`.
  LW_GRAPH_DEFAULT = 0,
  // Everything runs eagerly.
  LW_GRAPH_NONE = 1,
  // The engine's own graphs around the attention, which runs eagerly.
  LW_GRAPH_PIECEWISE = 2,
  // One full graph per size for all batches.
  LW_GRAPH_FULL = 3,
  // Full graphs for decode batches, mixed batches run eagerly.
  LW_GRAPH_FULL_DECODE_ONLY = 4,
  // Full graphs for decode batches, piecewise ones for mixed batches.
  LW_GRAPH_FULL_AND_PIECEWISE = 5,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum lw_graph_mode lw_graph_mode;
#else
typedef int32_t lw_graph_mode;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// An open device, with the kernels loaded on it. Any number of threads may use it at once.
typedef struct lw_device lw_device;

// Decode attention of an engine. It serves one call at a time.
typedef struct lw_session lw_session;

// A step while it is being enqueued, eagerly or into a graph. It belongs to the callback that it was given to.
typedef struct lw_step lw_step;

// What is known of a device.
typedef struct {
  // `sizeof(lw_device_info)`, set by the caller.
  size_t struct_size;
  // Device memory in bytes.
  uint64_t memory_bytes;
  // Shared memory (LDS) that one block may use, in bytes.
  uint64_t shared_bytes_per_block;
  // Streaming multiprocessors (NVIDIA), compute units (AMD), threads (host).
  int32_t num_compute_units;
  // Lanes that run in lockstep: 32, 64, or 1 on the host.
  int32_t wave_size;
  // An `lw_backend`.
  int32_t backend;
  // Index among the backend's devices.
  int32_t index;
  // The device's own name, terminated; longer ones are cut, as the following are.
  char name[128];
  // Architecture as its compiler names it: `sm_90a`, `gfx942:sramecc+:xnack-`, `x86_64`.
  char arch[64];
  // Driver or runtime version, as that vendor writes it.
  char driver_version[64];
} lw_device_info;

// One attention layer as the kernels see it: queries already absorbed into latent space, one latent row per cached token.
typedef struct {
  // Query heads on this device, 1 to 65536.
  int64_t num_heads;
  // Width of the latent part of a cached row, and of an output row.
  int64_t kv_lora_rank;
  // Width of the rotary part of a cached row; 0 for models without.
  int64_t qk_rope_head_dim;
  // Tokens per page of the cache, from 1.
  int64_t page_size;
  // For `split`; 0 with `LW_SPLIT_AUTO`.
  int64_t split_value;
  // An `lw_split`.
  int32_t split;
  // An `lw_dtype`: of queries, outputs, and new rows of the cache.
  int32_t q_dtype;
  // An `lw_dtype`: of the cache.
  int32_t kv_dtype;
  // Softmax scale: `1 / sqrt(qk_nope_head_dim + qk_rope_head_dim)` of the model, times its YaRN factor if it has one. There is no
  // usual value; 0 is refused.
  float sm_scale;
  // Logit soft cap `c`, `x -> c * tanh(x / c)`; 0 for none.
  float softcap;
  // Scale of an fp8 cache: a cached value is its byte's times this. 0 and 1 mean 1, which other caches must have.
  float kv_scale;
} lw_layer;

// The pages of one layer's cache.
typedef struct {
  // `[num_pages, page_size, kv_lora_rank + qk_rope_head_dim]`, or the latent part alone where `k_rope` is given.
  void *kv;
  // `[num_pages, page_size, qk_rope_head_dim]`; NULL where `kv` holds both parts.
  void *k_rope;
  // Pages.
  int64_t num_pages;
  // From page to page and from token to token of `kv`, in elements; 0 for packed.
  int64_t kv_strides[2];
  // The same of `k_rope`.
  int64_t k_rope_strides[2];
} lw_kv_cache;

// Decode attention of one layer over a batch. Clear it, then fill it in.
typedef struct {
  // `sizeof(lw_decode_args)`.
  size_t struct_size;
  // The layer.
  lw_layer layer;
  // The layer's pages. Rows of this step's own tokens must have been written.
  lw_kv_cache cache;
  // Sequences; 0 is allowed.
  int64_t batch;
  // Query tokens per sequence, from 1: 1, or 1 plus the drafts to verify.
  int64_t query_len;
  // Longest sequence that may come, in tokens. It sizes the workspace and the grids; lengths on the device may be anything up to it.
  int64_t max_seq_len;
  // Columns of the block table.
  int64_t table_width;
  // From row to row of the block table, in elements; 0 for packed.
  int64_t table_stride;
  // Queries, absorbed latent part then rope part: `[batch, query_len, num_heads, kv_lora_rank + qk_rope_head_dim]` of `q_dtype`.
  const void *q;
  // Page ids, `[batch, table_width]`, on the device. What lies behind a sequence's pages may be anything.
  const int32_t *block_table;
  // Cached tokens per sequence, this step's own included, `[batch]`, on the device. 0 is an empty (padding) sequence. A GPU
  // cuts lengths to what a row of the table addresses and follows no page id outside the cache; the host answers
  // `LW_ERROR_OUT_OF_RANGE`.
  const int32_t *seq_lens;
  // Attention output in latent space, `[batch, query_len, num_heads, kv_lora_rank]` of `q_dtype`. 0 for rows that see no token.
  void *out;
  // Natural-log LSE, `[batch, query_len, num_heads]`, minus infinity for rows that see no token; NULL if it is not wanted.
  float *lse;
  // Device memory of `workspace_bytes`, which nothing else uses until the step's work has ended. Nothing is kept in it from step
  // to step; NULL where none is needed.
  void *workspace;
  // At least what `lw_decode_workspace_bytes` says.
  size_t workspace_bytes;
  // From sequence to sequence, token to token and head to head of `q`, in elements; 0 for packed.
  int64_t q_strides[3];
  // The same of `out`.
  int64_t out_strides[3];
  // From sequence to sequence and token to token of `lse`, in elements; 0 for packed.
  int64_t lse_strides[2];
  // Whether query token `t` of `query_len` sees only the first `seq_len - query_len + 1 + t` cached tokens (verification of
  // drafts); 0 or 1. Indifferent for a `query_len` of 1.
  int32_t causal;
  // 1 if `lw_decode_plan` was called for this step with the same arguments (`q`, `cache`, `out`, `lse` and their strides
  // may differ), so that many layers share one schedule; 0 to make the schedule, too.
  int32_t scheduled;
  // Of a layer that is `scheduled`: 1 if another layer of the same step was enqueued before it on this stream, by the same schedule;
  // 2 if so, and from the step's first layer to its last nothing is written to a block table, nor to any sequence's rows before its last
  // `query_len`, also not as tokens of another sequence (a prefix that is shared in the step that computes it): kernels may then copy these
  // rows while the layer before still runs. 0 is never wrong, and slower.
  int32_t settled;
} lw_decode_args;

// New rows for a layer's cache. Clear it, then fill it in.
typedef struct {
  // `sizeof(lw_cache_write_args)`.
  size_t struct_size;
  // The layer.
  lw_layer layer;
  // The layer's pages.
  lw_kv_cache cache;
  // Rows; 0 is allowed.
  int64_t num_tokens;
  // New latent rows, `[num_tokens, kv_lora_rank]` of `q_dtype`.
  const void *kv_c;
  // New rope rows, `[num_tokens, qk_rope_head_dim]` of `q_dtype`; NULL for a model without rope.
  const void *k_pe;
  // Slot of each row, `[num_tokens]`: `page * page_size + entry`; a negative slot is skipped (padding), and so is one past the cache.
  const int64_t *slot_mapping;
  // From row to row of `kv_c`, in elements; 0 for packed.
  int64_t kv_c_stride;
  // The same of `k_pe`.
  int64_t k_pe_stride;
} lw_cache_write_args;

// Cached rows to copy out. Clear it, then fill it in.
typedef struct {
  // `sizeof(lw_cache_gather_args)`.
  size_t struct_size;
  // The layer.
  lw_layer layer;
  // The layer's pages.
  lw_kv_cache cache;
  // Sequences; 0 is allowed.
  int64_t batch;
  // Rows of `out`.
  int64_t num_tokens;
  // Columns of the block table.
  int64_t table_width;
  // From row to row of the block table, in elements; 0 for packed.
  int64_t table_stride;
  // Page ids, `[batch, table_width]`, on the device.
  const int32_t *block_table;
  // First row of `out` of each sequence, ascending from 0, `[batch + 1]`, on the device.
  const int32_t *cu_seq_lens;
  // First cached token to copy of each sequence, `[batch]`, on the device; NULL for all from 0.
  const int32_t *seq_starts;
  // `[num_tokens, kv_lora_rank + qk_rope_head_dim]` of `q_dtype`.
  void *out;
  // From row to row of `out`, in elements; 0 for packed.
  int64_t out_stride;
} lw_cache_gather_args;

// Two attention results of the same queries over different keys, all packed. Clear it, then fill it in.
typedef struct {
  // `sizeof(lw_merge_states_args)`.
  size_t struct_size;
  // Query tokens; 0 is allowed.
  int64_t num_tokens;
  // Query heads.
  int64_t num_heads;
  // Width of an output row.
  int64_t head_dim;
  // Tokens at or past this one have no prefix and copy the suffix; negative if all have one.
  int64_t tokens_with_context;
  // `[num_tokens, num_heads, head_dim]` of `dtype`.
  const void *prefix_out;
  // Natural log, `[num_heads, num_tokens]`. An infinite LSE of either sign means no keys.
  const float *prefix_lse;
  // As `prefix_out`.
  const void *suffix_out;
  // As `prefix_lse`.
  const float *suffix_lse;
  // As `prefix_out`.
  void *out;
  // `[num_heads, num_tokens]`; NULL if it is not wanted.
  float *out_lse;
  // An `lw_dtype`: `LW_F32`, `LW_F16` or `LW_BF16`.
  int32_t dtype;
} lw_merge_states_args;

// What each decode-context-parallel rank found over its shard of the cache. Clear it, then fill it in.
typedef struct {
  // `sizeof(lw_dcp_combine_args)`.
  size_t struct_size;
  // Ranks, from 1.
  int64_t num_ranks;
  // Query rows; 0 is allowed.
  int64_t num_rows;
  // Query heads.
  int64_t num_heads;
  // Width of an output row.
  int64_t head_dim;
  // `[num_ranks, num_rows, num_heads, head_dim]` of `dtype`; each rank's part is packed.
  const void *partial_out;
  // `[num_ranks, num_rows, num_heads]`; each rank's part is packed. NaN and infinities mean an empty shard, whose output is ignored.
  const float *partial_lse;
  // From rank to rank of `partial_out`, in elements; 0 for packed.
  int64_t partial_out_stride;
  // The same of `partial_lse`.
  int64_t partial_lse_stride;
  // `[num_rows, num_heads, head_dim]` of `dtype`, packed.
  void *out;
  // `[num_rows, num_heads]`, packed; NULL if it is not wanted.
  float *out_lse;
  // An `lw_dtype`: `LW_F32`, `LW_F16` or `LW_BF16`.
  int32_t dtype;
  // 1 if the LSE are natural logarithms, 0 if they are to base 2.
  int32_t natural_log;
} lw_dcp_combine_args;

// What a session is made for. Clear it, then fill it in.
typedef struct {
  // `sizeof(lw_session_config)`.
  size_t struct_size;
  // All attention layers.
  lw_layer layer;
  // Most sequences in one step.
  int64_t max_num_seqs;
  // Longest sequence, in tokens.
  int64_t max_seq_len;
  // Pages of each layer's cache.
  int64_t num_pages;
  // Most tokens in one step, prompts included; 0 for 8192 or `max_num_seqs`, whichever is more.
  int64_t max_num_batched_tokens;
  // Draft tokens that a step verifies per sequence. Graphs are captured for `1 + num_spec_tokens` query tokens.
  int64_t num_spec_tokens;
  // Sizes to capture, in tokens, `num_capture_sizes` of them, on the host; NULL for the usual ones.
  const int64_t *capture_sizes;
  // Number of `capture_sizes`.
  int64_t num_capture_sizes;
  // Largest size to capture, in tokens; 0 for the usual one.
  int64_t max_capture_size;
  // The stream that steps are enqueued on, which must live as long as the session; NULL for one of the session's own.
  void *stream;
  // An `lw_graph_mode`. What can be had is in `lw_session_info`, and why in `lw_session_reasons`.
  int32_t graph_mode;
  // 1 if the engine cannot take attention out of its graphs.
  int32_t no_piecewise;
  // 1 to use graphs even on drivers known to corrupt them.
  int32_t ignore_driver_rules;
  // 1 if from a step's first layer to its last nothing is written to a block table, nor to any sequence's rows before its last tokens,
  // as many as it has queries, also not as tokens of another sequence (a prefix that is shared in the step that computes it): kernels may
  // then copy these rows while the layer before still runs.
  int32_t history_final;
} lw_session_config;

// What a session is.
typedef struct {
  // `sizeof(lw_session_info)`, set by the caller.
  size_t struct_size;
  // Device bytes reserved: scratch and step inputs.
  uint64_t reserved_bytes;
  // Device bytes that captured graphs hold, as far as the driver tells.
  uint64_t graph_bytes;
  // The raw stream that steps are enqueued on.
  void *stream;
  // Graphs that there are keys for; `lw_session_capture` captures them.
  int32_t num_graphs;
  // The `lw_graph_mode` that could be had.
  int32_t graph_mode;
} lw_session_info;

// The engine's whole step: enqueues its model on the step's stream, calling `lw_step_decode` once per layer, and returns 0, or
// anything else to give the step up. It is called eagerly and while graphs are captured. It must not throw, jump out or keep `step`.
typedef int32_t (*lw_enqueue_fn)(void *user, lw_step *step);

// What `lw_session_capture` did.
typedef struct {
  // `sizeof(lw_capture_report)`, set by the caller.
  size_t struct_size;
  // Graphs captured now.
  int64_t num_captured;
  // Sizes that could not be captured; their batches use the next larger graph, or run eagerly.
  int64_t num_failed;
  // Device bytes that the new graphs hold, as far as the driver tells.
  uint64_t graph_bytes;
} lw_capture_report;

// The sequences of one step. Everything is on the host and free again when the call returns. Clear it, then fill it in.
typedef struct {
  // `sizeof(lw_step_batch)`.
  size_t struct_size;
  // Decoding sequences; 0 is allowed.
  int64_t num_seqs;
  // Query tokens per decoding sequence: 1, or 1 plus the drafts to verify.
  int64_t query_len;
  // Cached tokens of each decoding sequence, this step's own included, `[num_seqs]`.
  const int32_t *seq_lens;
  // Page ids of each decoding sequence, in order, `[num_seqs, table_width]`; what lies behind a sequence's pages may be anything.
  const int32_t *block_table;
  // Columns of `block_table`.
  int64_t table_width;
  // From row to row of `block_table`, in elements; 0 for packed.
  int64_t table_stride;
  // Further tokens that the engine handles itself in this step (prefill); with any, the batch is mixed.
  int64_t prefill_tokens;
  // Requests that those belong to.
  int64_t prefill_reqs;
} lw_step_batch;

// How a step was served.
typedef struct {
  // `sizeof(lw_step_report)`, set by the caller.
  size_t struct_size;
  // Tokens that the step ran with, padding included.
  int64_t num_tokens;
  // Tokens of padding among them.
  int64_t padding;
  // `LW_GRAPH_FULL` if a graph was replayed; otherwise what the engine may do around the attention, which ran eagerly:
  // `LW_GRAPH_PIECEWISE` or `LW_GRAPH_NONE`.
  int32_t mode;
} lw_step_report;

// What to enqueue in a step. When a graph serves a batch, sequences past the batch are padding: their lengths are 0 and their
// slots -1, so they write nothing to the cache and their outputs are 0.
typedef struct {
  // `sizeof(lw_step_info)`, set by the caller.
  size_t struct_size;
  // Rows to enqueue work for: decode tokens, padding included, then the engine's own prefill tokens.
  int64_t num_tokens;
  // Decoding sequences, padding included.
  int64_t num_seqs;
  // Query tokens per decoding sequence; the first `num_seqs * query_len` rows are theirs.
  int64_t query_len;
  // Columns of `block_table`.
  int64_t table_width;
  // The raw stream that everything must be enqueued on.
  void *stream;
  // Cached tokens per sequence, `[num_seqs]`, on the device.
  const int32_t *seq_lens;
  // Page ids, `[num_seqs, table_width]`, on the device.
  const int32_t *block_table;
  // Cache slot of each decode token, `[num_seqs * query_len]`, on the device.
  const int64_t *slot_mapping;
} lw_step_info;

// Attention of one layer in a step. Clear it, then fill it in.
typedef struct {
  // `sizeof(lw_step_decode_args)`.
  size_t struct_size;
  // The layer's pages.
  lw_kv_cache cache;
  // `[num_seqs * query_len, num_heads, kv_lora_rank + qk_rope_head_dim]` of `q_dtype`.
  const void *q;
  // `[num_seqs * query_len, num_heads, kv_lora_rank]` of `q_dtype`.
  void *out;
  // Natural-log LSE, `[num_seqs * query_len, num_heads]`; NULL if it is not wanted.
  float *lse;
  // From token to token and head to head of `q`, in elements; 0 for packed.
  int64_t q_strides[2];
  // The same of `out`.
  int64_t out_strides[2];
  // From token to token of `lse`, in elements; 0 for packed.
  int64_t lse_stride;
} lw_step_decode_args;

// New rows of one layer in a step. Clear it, then fill it in.
typedef struct {
  // `sizeof(lw_step_write_cache_args)`.
  size_t struct_size;
  // The layer's pages.
  lw_kv_cache cache;
  // New latent rows, `[num_seqs * query_len, kv_lora_rank]` of `q_dtype`.
  const void *kv_c;
  // New rope rows, `[num_seqs * query_len, qk_rope_head_dim]` of `q_dtype`; NULL for a model without rope.
  const void *k_pe;
  // From row to row of `kv_c`, in elements; 0 for packed.
  int64_t kv_c_stride;
  // The same of `k_pe`.
  int64_t k_pe_stride;
} lw_step_write_cache_args;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Text of the last call that failed on the calling thread, UTF-8; empty if none has. Valid until the next failure on that thread
// or its end. Never NULL.
const char *lw_last_error(void);

// Name of a status as this header spells it, `LW_ERROR_SHAPE` for instance; "unknown status" for numbers that are none. Static.
const char *lw_status_name(int32_t status);

// Version of the library, `0.1.0` for instance. Static.
const char *lw_version(void);

// The `LW_ABI_VERSION` that the library was built with. Use no other function of a library where it is not that of the header.
uint32_t lw_abi_version(void);

// Number of a backend's devices; 0 where there is a driver but no GPU. Makes no context on any.
//
// `LW_ERROR_UNAVAILABLE` where the vendor's library is missing, too old or not built in; the text says what was tried.
//
// # Safety
// `count` is NULL or can be written.
lw_status lw_device_count(int32_t backend, int32_t *count);

// Opens device `index` (as `CUDA_VISIBLE_DEVICES` or `HIP_VISIBLE_DEVICES` numbers them) in the context that all libraries of the
// process share. Close it with `lw_device_close`.
//
// `LW_ERROR_UNAVAILABLE`, `LW_ERROR_NO_DEVICE`, `LW_ERROR_UNSUPPORTED` for a device that no kernel serves, `LW_ERROR_OUT_OF_MEMORY`.
//
// # Safety
// `device` is NULL or can be written.
lw_status lw_device_open(int32_t backend,
                         int32_t index,
                         lw_device **device);

// Closes a device. Its work must have ended, and graphs that captured it and sessions on it be gone: their kernels are unloaded.
// NULL is ignored.
//
// # Safety
// `device` is NULL or was opened and not closed before, and no call is using it.
void lw_device_close(lw_device *device);

// The device's facts. `info->struct_size` must be set.
//
// # Safety
// `device` is open; `info` is NULL or can be read and written.
lw_status lw_device_get_info(const lw_device *device, lw_device_info *info);

// Bytes of workspace that a step with these arguments takes, its alignment included. Reads `layer`, `batch`, `query_len` and
// `max_seq_len` alone, chooses the kernels and loads them, so that the calls that follow only enqueue. A workspace made for the
// largest batch need not serve a smaller one: ask for each that will come.
//
// `LW_ERROR_ARGUMENT`, `LW_ERROR_UNSUPPORTED` where no kernel of the device fits, `LW_ERROR_COMPILE`.
//
// # Safety
// `device` is open, `args` is NULL or a block of its size, `bytes` is NULL or can be written.
lw_status lw_decode_workspace_bytes(const lw_device *device,
                                    const lw_decode_args *args,
                                    size_t *bytes);

// Enqueues the schedule of a step: how its work is cut, by the lengths that stand in `seq_lens` when it runs. Call it once, then
// `lw_decode` with `scheduled` set for every layer, on the same stream. It reads `seq_lens`, `workspace`, `table_width`, `causal` and what
// `lw_decode_workspace_bytes` reads. Nothing to do for `LW_SPLIT_FIXED` and `LW_SPLIT_INVARIANT`, but not wrong.
//
// Errors as `lw_decode`.
//
// # Safety
// As `lw_decode`, for what is read here.
lw_status lw_decode_plan(const lw_device *device,
                         const lw_decode_args *args,
                         void *stream);

// Enqueues decode attention of one layer on `stream`. It waits for nothing, needs no lengths on the host, and allocates nothing once
// it (or `lw_decode_workspace_bytes`) was called with the same sizes; it can be captured by anyone's graph, which then replays over
// whatever lengths, tables and pages stand in the same memory.
//
// `LW_ERROR_ARGUMENT`, `LW_ERROR_SHAPE`, `LW_ERROR_DTYPE` naming the argument, `LW_ERROR_UNSUPPORTED`, `LW_ERROR_COMPILE`; `LW_ERROR_OUT_OF_RANGE`
// on the host alone; `LW_ERROR_DRIVER`.
//
// # Safety
// `device` is open, `args` is NULL or a block of its size, `stream` is a live stream of the device. Every tensor is memory of the
// device of the shape and strides given, aligned to its elements; it stays so until the work has ended, and as long as a graph
// that captured it. Nothing else writes the inputs or touches the outputs and the workspace meanwhile.
lw_status lw_decode(const lw_device *device,
                    const lw_decode_args *args,
                    void *stream);

// Enqueues the writing of new rows into their cache slots (vLLM's `concat_and_cache_mla`), rounded to nearest even and
// saturating where the cache is fp8. May be captured.
//
// `LW_ERROR_ARGUMENT`, `LW_ERROR_SHAPE`, `LW_ERROR_DTYPE` naming the argument, `LW_ERROR_UNSUPPORTED`, `LW_ERROR_COMPILE`, `LW_ERROR_DRIVER`.
//
// # Safety
// As `lw_decode`.
lw_status lw_cache_write(const lw_device *device,
                         const lw_cache_write_args *args,
                         void *stream);

// Enqueues the copying (and dequantising) of each sequence's cached rows into `out`, one sequence after another. May be captured.
//
// Errors as `lw_cache_write`.
//
// # Safety
// As `lw_decode`.
lw_status lw_cache_gather(const lw_device *device,
                          const lw_cache_gather_args *args,
                          void *stream);

// Enqueues the merging of two attention results (vLLM's `merge_attn_states`). A side without keys contributes nothing, whatever its
// output holds; two such sides give output 0 and LSE minus infinity. May be captured.
//
// Errors as `lw_cache_write`.
//
// # Safety
// As `lw_decode`.
lw_status lw_merge_states(const lw_device *device,
                          const lw_merge_states_args *args,
                          void *stream);

// Enqueues the combining of the ranks' results. Rows that are empty on all ranks give output 0 and LSE minus infinity. May be captured.
//
// Errors as `lw_cache_write`.
//
// # Safety
// As `lw_decode`.
lw_status lw_dcp_combine(const lw_device *device,
                         const lw_dcp_combine_args *args,
                         void *stream);

// Makes a session: reserves everything for the declared maxima, loads every kernel that a step may take, and resolves which graph mode
// can be had. Close it with `lw_session_close`.
//
// `LW_ERROR_ARGUMENT` naming the field, `LW_ERROR_UNSUPPORTED`, `LW_ERROR_COMPILE`, `LW_ERROR_OUT_OF_MEMORY`, `LW_ERROR_GRAPH` where the mode
// cannot be had.
//
// # Safety
// `device` is open, `config` is NULL or a block of its size with the array that it says, `session` is NULL or can be written.
lw_status lw_session_create(const lw_device *device,
                            const lw_session_config *config,
                            lw_session **session);

// Waits for a session's work and frees it with its graphs. NULL is ignored, and so is a session in use, as `lw_last_error` then
// says.
//
// # Safety
// `session` is NULL or was created and not closed before.
void lw_session_close(lw_session *session);

// What the session is. `info->struct_size` must be set.
//
// # Safety
// `session` lives; `info` is NULL or can be read and written.
lw_status lw_session_get_info(const lw_session *session, lw_session_info *info);

// How the graph mode came about, one sentence a line, UTF-8. Valid as long as the session; empty for NULL.
//
// # Safety
// `session` is NULL or lives.
const char *lw_session_reasons(const lw_session *session);

// Captures a full graph for every size that has none yet, calling `enqueue` once per size and once before, eagerly, on padding alone.
// A size that fails leaves the others usable: it is counted in `report`, and `lw_last_error` has the first one's text.
// Pointers that `enqueue` gives to this library must stay valid as long as the session.
//
// `LW_ERROR_CALLBACK` where the eager run fails, `LW_ERROR_DRIVER`.
//
// # Safety
// `session` lives; `enqueue` is NULL or may be called with `user`; `report` is NULL or can be read and written.
lw_status lw_session_capture(const lw_session *session,
                             lw_enqueue_fn enqueue,
                             void *user,
                             lw_capture_report *report);

// Serves one step: brings lengths, tables and slots to the device, then replays the graph that fits, or calls `enqueue` to run eagerly.
// Returns once everything is enqueued. The session is usable after an error.
//
// `LW_ERROR_CAPACITY` for more than was declared, `LW_ERROR_OUT_OF_RANGE` for lengths and pages, `LW_ERROR_ARGUMENT`,
// `LW_ERROR_CALLBACK`, `LW_ERROR_DRIVER`.
//
// # Safety
// `session` lives; `batch` is NULL or a block of its size with the arrays that it says; `enqueue` is NULL or may be called with
// `user`; `report` is NULL or can be read and written.
lw_status lw_session_step(const lw_session *session,
                          const lw_step_batch *batch,
                          lw_enqueue_fn enqueue,
                          void *user,
                          lw_step_report *report);

// Waits for all enqueued steps.
//
// `LW_ERROR_DRIVER`.
//
// # Safety
// `session` lives.
lw_status lw_session_synchronize(const lw_session *session);

// What to enqueue. `info->struct_size` must be set.
//
// # Safety
// `step` was given to the running callback; `info` is NULL or can be read and written.
lw_status lw_step_get_info(lw_step *step, lw_step_info *info);

// Enqueues attention of this step's decode tokens over one layer's cache. The first call of a step enqueues the schedule, too, which
// all its layers share.
//
// Errors as `lw_decode`.
//
// # Safety
// `step` was given to the running callback, `args` is NULL or a block of its size. Every tensor is memory of the device of the
// shape and strides given, aligned to its elements, which stays so as long as the session.
lw_status lw_step_decode(lw_step *step,
                         const lw_step_decode_args *args);

// Enqueues the writing of this step's decode tokens into one layer's cache.
//
// Errors as `lw_cache_write`.
//
// # Safety
// As `lw_step_decode`.
lw_status lw_step_write_cache(lw_step *step, const lw_step_write_cache_args *args);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* LATENTWAVE_H */
