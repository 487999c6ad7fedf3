//! Parameter blocks: plain structs passed by value to every kernel of every vendor.
//!
//! Pointers are device addresses (`u64`), strides count elements of their tensor, shapes are in the comments. The same
//! structs are declared in `kernels/params.h`; both sides assert their sizes. 64-bit strides keep every offset right past
//! 2^31 elements.

use bytemuck::{Pod, Zeroable};

/// How the work of stage 1 is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum ScheduleKind {
    /// Parts of equal cost from the table that the plan kernel wrote; a part may span several sequences.
    Balanced = 0,
    /// `num_kv_splits` equal splits of every sequence: split `s` covers tokens `[c*s, min(c*s + c, n))`, `c = ceil(n / splits)`.
    Even = 1,
    /// Splits of `split_tokens` tokens each, whatever the batch: rows do not depend on their neighbours.
    Chunked = 2,
    /// Few sequences, cut into at most `few_parts` pieces of about equal length that every block finds by itself from the
    /// lengths: needs no table.
    Own = 3,
    /// As `Own` while the sequences have at most `few_tokens` tokens in all, else as `Balanced`, by a form of stage 1 that serves both.
    Either = 4,
}

/// What was final before the kernel before a layer's stage 1 began, and may be read before that one has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(i32)]
pub enum Settled {
    /// Nothing: a step's first layer.
    Nothing = 0,
    /// Lengths and schedule.
    Lengths = 1,
    /// Block tables, too, and rows of the cache that are of no token of this step.
    History = 2,
}

/// Which columns the 16-byte words of a row of [`DecodeParams::partial_out`] have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum PartialOrder {
    /// Eight neighbouring columns.
    InOrder = 0,
    /// Pairs of neighbours as lanes of stage 1 have them after their last products, so that nothing but a conversion stands between those
    /// and the store: of each half of a row, 256 columns in 32 words, the word `x` has columns `64 u + 2 x` and the next, `u` from 0 to 3.
    /// Stage 2 adds word to word whatever they hold, and puts pairs in their places when it writes the output.
    DealtPairs = 1,
}

/// Parameters of `mla_plan`, `mla_decode_split` and `mla_decode_reduce`.
///
/// Terms: a *group* is `query_group` consecutive query tokens of one sequence, `num_groups = ceil(query_len / query_group)`
/// per sequence; a *virtual sequence* `v = seq * num_groups + group` is the unit that is scheduled, with
/// `group_rows = query_group * num_heads` rows packed `[token][head]`. Token `t` of a sequence of length `n` sees
/// `causal ? max(n - query_len + 1 + t, 0) : n` cached tokens; a virtual sequence's extent is that of its last token.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct DecodeParams {
    /// Queries, `[batch, query_len, num_heads, kv_lora_rank + rope_dim]`.
    pub q: u64,
    /// Latent part of the cache, `[num_pages, page_size, kv_lora_rank]`; also the values.
    pub kv: u64,
    /// Rotary part of the cache, `[num_pages, page_size, rope_dim]`; usually `kv` plus `kv_lora_rank` elements.
    pub k_rope: u64,
    /// Page ids, i32 `[batch, >= ceil(seq_len / page_size)]`.
    pub block_table: u64,
    /// Cached tokens per sequence, this step's own included, i32 `[batch]`.
    pub seq_lens: u64,
    /// Attention output, `[batch, query_len, num_heads, kv_lora_rank]`.
    pub out: u64,
    /// Natural-log LSE, f32 `[batch, query_len, num_heads]`, or 0 for none.
    pub lse: u64,
    /// Outputs of splits before `kv_scale`, each divided by its own sum of weights, `[num_slots, group_rows, kv_lora_rank]` of
    /// [`DecodeKernels::partial_dtype`](crate::backend::DecodeKernels::partial_dtype), columns in a [`PartialOrder`].
    pub partial_out: u64,
    /// Natural-log LSE of splits, f32 `[num_slots, group_rows]`.
    pub partial_lse: u64,
    /// The balanced schedule, i32; [`plan::balance`](crate::plan::balance) gives its layout. 0 unless the kind is balanced or either.
    pub schedule: u64,
    /// Elements from one sequence to the next in `q`.
    pub q_stride_batch: i64,
    /// Elements from one query token to the next in `q`.
    pub q_stride_token: i64,
    /// Elements from one head to the next in `q`.
    pub q_stride_head: i64,
    /// Elements from one page to the next in `kv`.
    pub kv_stride_page: i64,
    /// Elements from one token to the next in `kv`.
    pub kv_stride_token: i64,
    /// Elements from one page to the next in `k_rope`.
    pub rope_stride_page: i64,
    /// Elements from one token to the next in `k_rope`.
    pub rope_stride_token: i64,
    /// Elements from one sequence to the next in `block_table`.
    pub table_stride: i64,
    /// Elements from one sequence to the next in `out`.
    pub out_stride_batch: i64,
    /// Elements from one query token to the next in `out`.
    pub out_stride_token: i64,
    /// Elements from one head to the next in `out`.
    pub out_stride_head: i64,
    /// Elements from one sequence to the next in `lse`.
    pub lse_stride_batch: i64,
    /// Elements from one query token to the next in `lse`; heads are adjacent.
    pub lse_stride_token: i64,
    /// Pages in the cache: a page id outside `0..num_pages` is never dereferenced.
    pub num_pages: i64,
    /// Sequences.
    pub batch: i32,
    /// Query tokens per sequence.
    pub query_len: i32,
    /// Query tokens per group.
    pub query_group: i32,
    /// Query heads.
    pub num_heads: i32,
    /// Width of the latent part.
    pub kv_lora_rank: i32,
    /// Width of the rotary part.
    pub rope_dim: i32,
    /// Tokens per page.
    pub page_size: i32,
    /// Columns of the block table: a sequence is read to `table_width * page_size` tokens at most.
    pub table_width: i32,
    /// 1 when a query token sees only itself and what lies before it.
    pub causal: i32,
    /// A [`ScheduleKind`].
    pub schedule_kind: i32,
    /// Upper bound of splits per virtual sequence.
    pub num_kv_splits: i32,
    /// Tokens per split of a chunked schedule.
    pub split_tokens: i32,
    /// Parts of a balanced schedule.
    pub num_parts: i32,
    /// Its unit in tokens.
    pub tile_tokens: i32,
    /// Softmax scale, positive or negative, finite.
    pub sm_scale: f32,
    /// Logit soft cap `c`: `x = c * tanh(x / c)`; 0 for none.
    pub softcap: f32,
    /// Scale of a quantised cache: value = byte * scale. 1 for others.
    pub kv_scale: f32,
    /// What starting a sequence costs, in tiles: the plan kernel's `c0`.
    pub fixed_cost: i32,
    /// Groups per sequence.
    pub num_groups: i32,
    /// Most pieces that sequences are cut into where blocks find them by themselves.
    pub few_parts: i32,
    /// Tokens of the unit of those pieces, a power of two.
    pub few_unit: i32,
    /// Most tokens of all virtual sequences that are cut into those under [`ScheduleKind::Either`].
    pub few_tokens: i32,
    /// Blocks of stage 2 that merge those pieces.
    pub few_blocks: i32,
    /// A [`Settled`].
    pub settled: i32,
    /// Most pieces of a sequence that stage 1 merges itself: the plan kernel leaves a step to it or to stage 2 as a whole.
    pub merged_pieces: i32,
    /// The [`PartialOrder`] of `partial_out`, but for pieces that blocks find by themselves, which are in order.
    pub partial_order: i32,
    /// Blocks of stage 2 for each part of a balanced schedule, or else each virtual sequence; of pieces that blocks find by themselves under
    /// [`ScheduleKind::Either`], of which there is one sequence, `few_blocks`.
    pub share_blocks: i32,
    /// `2^32 / num_groups`, rounded up, or 0 of 1: kernels divide by these often. [`Self::with_inverses`] sets them.
    pub groups_inverse: u32,
    /// Likewise of `num_heads`.
    pub heads_inverse: u32,
    /// Likewise of `page_size`.
    pub page_inverse: u32,
    /// Likewise of `share_blocks`.
    pub share_inverse: u32,
    /// Zero.
    pub reserved: u32,
}

impl DecodeParams {
    /// With the inverses of the divisors that it has.
    #[must_use]
    pub const fn with_inverses(mut self) -> Self {
        self.groups_inverse = inverse_of(self.num_groups);
        self.heads_inverse = inverse_of(self.num_heads);
        self.page_inverse = inverse_of(self.page_size);
        self.share_inverse = inverse_of(self.share_blocks);
        self
    }
}

/// `2^32 / divisor`, rounded up: the upper half of a product with it is a quotient or one more. 0 of the divisor 1, which kernels ask for
/// apart.
const fn inverse_of(divisor: i32) -> u32 {
    if divisor <= 1 { 0 } else { (1_u64 << 32).div_ceil(divisor as u64) as u32 }
}

/// Layout of the bytes of a cache row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum CacheLayout {
    /// Latent then rope, in the cache's element type, one scale for both if quantised.
    Plain = 0,
    /// 656 bytes: 512 e4m3 latents, 4 float32 scales (one per 128 latents, powers of two), 64 bf16 rope values.
    Fp8DsMla = 1,
}

/// Parameters of `mla_cache_write`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct CacheWriteParams {
    /// New latent rows, `[>= num_tokens, kv_lora_rank]`.
    pub kv_c: u64,
    /// New rotary rows, `[>= num_tokens, rope_dim]`; 0 when there are none.
    pub k_pe: u64,
    /// Cache slots, i64 `[num_tokens]`: page `slot / page_size`, entry `slot % page_size`; a negative slot is skipped.
    pub slot_mapping: u64,
    /// The cache's latent part.
    pub kv: u64,
    /// The cache's rotary part (for [`CacheLayout::Fp8DsMla`] unused: it lies inside the row).
    pub k_rope: u64,
    /// Elements from one row to the next in `kv_c`.
    pub kv_c_stride: i64,
    /// Elements from one row to the next in `k_pe`.
    pub k_pe_stride: i64,
    /// Elements from one page to the next in `kv`.
    pub kv_stride_page: i64,
    /// Elements from one token to the next in `kv`.
    pub kv_stride_token: i64,
    /// Elements from one page to the next in `k_rope`.
    pub rope_stride_page: i64,
    /// Elements from one token to the next in `k_rope`.
    pub rope_stride_token: i64,
    /// Pages in the cache; a slot past the end is skipped.
    pub num_pages: i64,
    /// Rows to write.
    pub num_tokens: i32,
    /// Width of the latent part.
    pub kv_lora_rank: i32,
    /// Width of the rotary part.
    pub rope_dim: i32,
    /// Tokens per page.
    pub page_size: i32,
    /// A [`CacheLayout`].
    pub layout: i32,
    /// Scale of a quantised cache: byte = saturating round to nearest even of value / scale.
    pub kv_scale: f32,
}

/// Parameters of `mla_cache_gather`: copies (and dequantises) each sequence's first `seq_lens[i]` rows, one after another.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct CacheGatherParams {
    /// The cache's latent part, as in [`DecodeParams`].
    pub kv: u64,
    /// The cache's rotary part.
    pub k_rope: u64,
    /// Page ids, i32 `[batch, table_width]`.
    pub block_table: u64,
    /// First output row of each sequence, i32 `[batch + 1]`, ascending from 0; sequence `i` has
    /// `cu_seq_lens[i + 1] - cu_seq_lens[i]` rows.
    pub cu_seq_lens: u64,
    /// First cached token to copy of each sequence, i32 `[batch]`, or 0 to copy from the start.
    pub seq_starts: u64,
    /// Output rows, `[num_tokens, kv_lora_rank + rope_dim]`.
    pub out: u64,
    /// Elements from one page to the next in `kv`.
    pub kv_stride_page: i64,
    /// Elements from one token to the next in `kv`.
    pub kv_stride_token: i64,
    /// Elements from one page to the next in `k_rope`.
    pub rope_stride_page: i64,
    /// Elements from one token to the next in `k_rope`.
    pub rope_stride_token: i64,
    /// Elements from one sequence to the next in `block_table`.
    pub table_stride: i64,
    /// Elements from one row to the next in `out`.
    pub out_stride: i64,
    /// Pages in the cache.
    pub num_pages: i64,
    /// Sequences.
    pub batch: i32,
    /// Rows that `out` holds; none is written past them.
    pub num_tokens: i32,
    /// Width of the latent part.
    pub kv_lora_rank: i32,
    /// Width of the rotary part.
    pub rope_dim: i32,
    /// Tokens per page.
    pub page_size: i32,
    /// Columns of the block table.
    pub table_width: i32,
    /// A [`CacheLayout`].
    pub layout: i32,
    /// Scale of a quantised cache.
    pub kv_scale: f32,
}

/// Parameters of `merge_states`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct MergeParams {
    /// `[num_tokens, num_heads, head_dim]`.
    pub prefix_out: u64,
    /// f32 `[num_heads, num_tokens]`.
    pub prefix_lse: u64,
    /// `[num_tokens, num_heads, head_dim]`.
    pub suffix_out: u64,
    /// f32 `[num_heads, num_tokens]`.
    pub suffix_lse: u64,
    /// `[num_tokens, num_heads, head_dim]`.
    pub out: u64,
    /// f32 `[num_heads, num_tokens]`, or 0.
    pub out_lse: u64,
    /// Tokens of all tensors.
    pub num_tokens: i32,
    /// Heads of all tensors.
    pub num_heads: i32,
    /// Width of an output row.
    pub head_dim: i32,
    /// Tokens at or past this one copy the suffix.
    pub tokens_with_context: i32,
}

/// Parameters of `dcp_combine`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct DcpCombineParams {
    /// Each rank's output, `[num_ranks, num_rows, num_heads, head_dim]`.
    pub partial_out: u64,
    /// Each rank's LSE, f32 `[num_ranks, num_rows, num_heads]`. NaN and infinities are empty shards.
    pub partial_lse: u64,
    /// `[num_rows, num_heads, head_dim]`.
    pub out: u64,
    /// f32 `[num_rows, num_heads]`, in the base of the inputs, or 0.
    pub out_lse: u64,
    /// Elements from one rank to the next in `partial_out`.
    pub out_stride_rank: i64,
    /// Elements from one rank to the next in `partial_lse`.
    pub lse_stride_rank: i64,
    /// Ranks.
    pub num_ranks: i32,
    /// Query rows.
    pub num_rows: i32,
    /// Heads.
    pub num_heads: i32,
    /// Width of an output row.
    pub head_dim: i32,
    /// 1 for natural-log LSE, 0 for base 2.
    pub natural_log: i32,
    /// Zero.
    pub reserved: i32,
}

/// Parameters of `probe_read` and `probe_matmul`, which measure a device's ceilings.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct ProbeParams {
    /// What is read, or where operands come from.
    pub source: u64,
    /// Four bytes that may be written.
    pub out: u64,
    /// Bytes to read.
    pub bytes: i64,
    /// Rounds of products.
    pub iterations: i32,
    /// Zero.
    pub reserved: i32,
}

const _: () = {
    assert!(size_of::<DecodeParams>() == 320);
    assert!(size_of::<CacheWriteParams>() == 120);
    assert!(size_of::<CacheGatherParams>() == 136);
    assert!(size_of::<MergeParams>() == 64);
    assert!(size_of::<DcpCombineParams>() == 72);
    assert!(size_of::<ProbeParams>() == 32);
};

/// The parameter block of one launch.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum Params {
    /// For `mla_plan`, `mla_decode_split`, `mla_decode_reduce`.
    Decode(DecodeParams),
    /// For `mla_cache_write`.
    CacheWrite(CacheWriteParams),
    /// For `mla_cache_gather`.
    CacheGather(CacheGatherParams),
    /// For `merge_states`.
    Merge(MergeParams),
    /// For `dcp_combine`.
    DcpCombine(DcpCombineParams),
    /// For `probe_read` and `probe_matmul`.
    Probe(ProbeParams),
}

impl Params {
    /// The block as bytes, as a driver's launch call takes it.
    pub fn as_bytes(&self) -> &[u8] {
        match self {
            Self::Decode(p) => bytemuck::bytes_of(p),
            Self::CacheWrite(p) => bytemuck::bytes_of(p),
            Self::CacheGather(p) => bytemuck::bytes_of(p),
            Self::Merge(p) => bytemuck::bytes_of(p),
            Self::DcpCombine(p) => bytemuck::bytes_of(p),
            Self::Probe(p) => bytemuck::bytes_of(p),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::inverse_of;

    /// `quotient_by` of kernels/tile.h.
    fn quotient_by(a: i32, b: i32) -> i32 {
        let q = if b == 1 { a } else { ((a as u64 * u64::from(inverse_of(b))) >> 32) as i32 };
        q - i32::from(q.wrapping_mul(b) as u32 > a as u32)
    }

    #[test]
    fn inverses_give_every_quotient() {
        let divisors = (1..300).chain([511, 512, 4095, 4096, 65_535, 65_537, i32::MAX / 2, i32::MAX - 1, i32::MAX]);
        for b in divisors {
            let near = |q: i64| [q * i64::from(b) - 1, q * i64::from(b), q * i64::from(b) + 1];
            let many = [0, 1, 2, 3, 127, 128, 4096, 1 << 20, i64::from(i32::MAX / b) - 1, i64::from(i32::MAX / b)];
            for a in many.into_iter().flat_map(near).chain([0, 1, i64::from(i32::MAX)]) {
                let Ok(a @ 0..) = i32::try_from(a) else { continue };
                assert_eq!(quotient_by(a, b), a / b, "{a} / {b}");
            }
        }
    }
}
