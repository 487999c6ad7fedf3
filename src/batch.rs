//! The shape of a batch: which requests are decodes, how a block of query tokens becomes rows, how a batch is padded to a
//! captured size, and what one rank of decode context parallelism (DCP) holds.

use crate::error::{Error, Result};

/// What decides the longest query that still counts as decode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReorderThreshold {
    /// The kernel's own threshold in tokens; absent if it does not reorder batches at all.
    pub class_threshold: Option<usize>,
    /// The decode path takes the tokens of a speculative block.
    pub spec_as_decode: bool,
    /// Draft tokens per step, if the engine speculates.
    pub draft_tokens: Option<usize>,
    /// Drafts are made in parallel, which doubles the draft tokens of a block.
    pub parallel_drafting: bool,
    /// Ranks of decode context parallelism.
    pub dcp_size: usize,
    /// The decode path takes several query tokens per sequence under DCP.
    pub multi_token_dcp: bool,
}

impl ReorderThreshold {
    /// The threshold in tokens, or `None` for no limit.
    ///
    /// Source: vLLM, `AttentionMetadataBuilder._init_reorder_batch_threshold`.
    pub fn tokens(&self) -> Option<usize> {
        if self.dcp_limits() {
            return Some(1);
        }
        let drafts = self.draft_tokens.filter(|_| self.spec_as_decode);
        self.class_threshold.map(|threshold| match drafts {
            Some(drafts) if self.parallel_drafting => threshold.max(drafts.saturating_mul(2).saturating_add(1)),
            Some(drafts) => threshold.max(drafts.saturating_add(1)),
            None => threshold,
        })
    }

    /// Whether DCP forces the threshold to one token.
    pub fn dcp_limits(&self) -> bool {
        self.dcp_size > 1 && !self.multi_token_dcp
    }
}

/// A batch to be divided into decodes and prefills. Requests come in the order decode, short extend, long extend, prefill.
#[derive(Debug, Clone, Copy)]
pub struct SplitRequest<'a> {
    /// Query tokens per request; 0 for a padding request.
    pub query_lens: &'a [usize],
    /// Tokens of the batch, those of padding included.
    pub num_tokens: usize,
    /// An upper bound of the query lengths.
    pub max_query_len: usize,
    /// Longest query that counts as decode.
    pub decode_threshold: usize,
    /// Decodes must all have the same query length.
    pub require_uniform: bool,
    /// Whether each request is still prefilling. If given, those are prefills however short their query is; if absent, a short
    /// extend counts as decode.
    pub is_prefilling: Option<&'a [bool]>,
}

/// A batch divided into decodes, which come first, and prefills.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BatchSplit {
    /// Decode requests.
    pub num_decodes: usize,
    /// Prefill requests.
    pub num_prefills: usize,
    /// Tokens of the decode requests.
    pub num_decode_tokens: usize,
    /// Tokens of the prefill requests.
    pub num_prefill_tokens: usize,
}

impl SplitRequest<'_> {
    /// Divides the batch at its first prefill. An empty batch is all decode.
    ///
    /// Source: vLLM, `split_decodes_and_prefills` (0.33.0: a padding request never counts as a prefill).
    ///
    /// # Errors
    /// [`Error::Argument`] if `is_prefilling` has another length than `query_lens`, or the queries before the first prefill
    /// hold more than `num_tokens`.
    pub fn split(&self) -> Result<BatchSplit> {
        let num_reqs = self.query_lens.len();
        if let Some(flags) = self.is_prefilling.filter(|flags| flags.len() != num_reqs) {
            return Err(Error::argument(
                "is_prefilling",
                format!("{} flags for {num_reqs} requests; one per request", flags.len()),
            ));
        }
        let num_decodes = self.first_prefill().unwrap_or(num_reqs);
        let num_decode_tokens = match num_decodes {
            all if all == num_reqs => Some(self.num_tokens),
            some => self.query_lens[..some].iter().try_fold(0, |sum: usize, &len| sum.checked_add(len)),
        };
        let fits = num_decode_tokens.filter(|&tokens| tokens <= self.num_tokens);
        let num_decode_tokens = fits.ok_or_else(|| {
            Error::argument(
                "num_tokens",
                format!("{} tokens, but the {num_decodes} decodes alone have more", self.num_tokens),
            )
        })?;
        let num_prefill_tokens = self.num_tokens - num_decode_tokens;
        Ok(BatchSplit { num_decodes, num_prefills: num_reqs - num_decodes, num_decode_tokens, num_prefill_tokens })
    }

    fn first_prefill(&self) -> Option<usize> {
        let threshold = self.decode_threshold;
        let short_extends = self.is_prefilling.is_none();
        // The bound alone settles the common case.
        if self.max_query_len <= threshold && (!self.require_uniform || threshold <= 1) && short_extends {
            return None;
        }
        let common = *self.query_lens.first()?;
        if common > threshold {
            return Some(0);
        }
        let still_prefilling = |i: usize| self.is_prefilling.is_some_and(|flags| flags[i]);
        let too_long = |len: usize| match self.require_uniform {
            true => len != common && len != 0,
            false => len > threshold,
        };
        (0..self.query_lens.len()).find(|&i| too_long(self.query_lens[i]) || still_prefilling(i))
    }
}

/// A block of query tokens laid out with one token per row.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FlatRows {
    /// Cached tokens that each row attends to.
    pub extents: Vec<usize>,
    /// Request whose block table row each row reads.
    pub requests: Vec<usize>,
}

/// Gives each query token of a uniform block a row of its own, for a kernel that takes single tokens only.
///
/// `seq_lens` has one length per request, the block's own tokens included, and `num_rows` is the number of query tokens of all
/// requests. A causal row `t` of `query_len` attends to `max(seq_len - query_len + 1 + t, 0)` tokens, any other row to all.
///
/// Source: vLLM, `TritonMLAImpl.forward_mqa`.
///
/// # Errors
/// [`Error::UnevenRows`] if the rows cannot be shared out evenly. [`Error::CausalDcp`] for a causal block of several tokens
/// when the cache is sharded over `dcp_size > 1` ranks: the extents of its rows on one rank do not follow from the last one.
pub fn flatten_rows(seq_lens: &[usize], num_rows: usize, causal: bool, dcp_size: usize) -> Result<FlatRows> {
    let num_reqs = seq_lens.len();
    if num_reqs == 0 && num_rows == 0 {
        return Ok(FlatRows::default());
    }
    if num_reqs == 0 || !num_rows.is_multiple_of(num_reqs) {
        return Err(Error::UnevenRows { num_rows, num_reqs });
    }
    let query_len = num_rows / num_reqs;
    if causal && query_len > 1 && dcp_size > 1 {
        return Err(Error::CausalDcp { query_len, dcp_size });
    }
    let mut rows = FlatRows::default();
    let room = rows.extents.try_reserve_exact(num_rows).and_then(|()| rows.requests.try_reserve_exact(num_rows));
    room.map_err(|_| Error::argument("num_rows", format!("{num_rows} rows do not fit the host's memory")))?;
    for (request, &len) in seq_lens.iter().enumerate() {
        for t in 0..query_len {
            rows.extents.push(if causal { len.saturating_add(1 + t).saturating_sub(query_len) } else { len });
            rows.requests.push(request);
        }
    }
    Ok(rows)
}

/// One rank's share of a cache that is sharded over `size` ranks in turns of `interleave` tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DcpShard {
    rank: usize,
    size: usize,
    interleave: usize,
}

impl DcpShard {
    /// The share of `rank`, counted from 0, among `size` ranks; each holds `interleave` consecutive tokens per turn.
    ///
    /// # Errors
    /// [`Error::Argument`] for no ranks, no interleave, a rank that is not there, or a turn of all ranks that overflows.
    pub fn new(rank: usize, size: usize, interleave: usize) -> Result<Self> {
        if interleave == 0 {
            return Err(Error::argument("interleave", "0 tokens; at least 1"));
        }
        if rank >= size {
            return Err(Error::argument("rank", format!("rank {rank} of {size}; ranks count from 0")));
        }
        if size.checked_mul(interleave).is_none() {
            return Err(Error::argument("interleave", format!("{interleave} tokens on each of {size} ranks overflow")));
        }
        Ok(Self { rank, size, interleave })
    }

    /// Tokens of a sequence of `seq_len` that lie on this rank. Over all ranks they add up to `seq_len`.
    ///
    /// Source: vLLM, `get_dcp_local_seq_lens`.
    pub fn local_len(&self, seq_len: usize) -> usize {
        let rounds = seq_len / self.interleave / self.size;
        let rest = seq_len - rounds * self.size * self.interleave;
        rounds * self.interleave + rest.saturating_sub(self.rank * self.interleave).min(self.interleave)
    }

    /// A bound of [`local_len`](Self::local_len) that holds on every rank for every sequence up to `max_seq_len`.
    ///
    /// Source: vLLM, `MLACommonMetadataBuilder.build`.
    pub fn max_local_len(&self, max_seq_len: usize) -> usize {
        max_seq_len.div_ceil(self.size * self.interleave) * self.interleave
    }
}

/// Which rows of a rank's LSE must become `-inf` before the ranks are combined: those of requests with nothing on this rank,
/// and those past the last request, which no kernel wrote.
///
/// `query_offsets` has one entry more than `local_lens`: the rows of request `i` are `query_offsets[i]..query_offsets[i + 1]`.
///
/// Source: vLLM, `mask_dcp_empty_shards_`.
///
/// # Errors
/// [`Error::Argument`] if the offsets do not fit the lengths or decrease.
pub fn dcp_empty_rows(local_lens: &[usize], query_offsets: &[usize], num_rows: usize) -> Result<Vec<bool>> {
    if query_offsets.len() != local_lens.len() + 1 || query_offsets.windows(2).any(|pair| pair[0] > pair[1]) {
        return Err(Error::argument(
            "query_offsets",
            format!("{query_offsets:?} for {} requests; one more entry, ascending", local_lens.len()),
        ));
    }
    let mut empty = Vec::new();
    let Ok(()) = empty.try_reserve_exact(num_rows) else {
        return Err(Error::argument("num_rows", format!("{num_rows}: no memory for so many rows")));
    };
    empty.resize(num_rows, true);
    for (rows, _) in query_offsets.windows(2).zip(local_lens).filter(|&(_, &len)| len > 0) {
        empty[rows[0].min(num_rows)..rows[1].min(num_rows)].fill(false);
    }
    Ok(empty)
}

/// The host arrays of a step, as long as the captured size. Entries past the real batch are for [`StepInputs::pad`].
#[derive(Debug)]
pub struct StepInputs<'a> {
    /// First query token of each request, and the end of the last: one entry more than requests.
    pub query_offsets: &'a mut [i32],
    /// Length of each request's sequence.
    pub seq_lens: &'a mut [i32],
    /// Page ids, one row per request.
    pub block_table: &'a mut [i32],
    /// Cache slot of each query token.
    pub slots: &'a mut [i64],
}

impl StepInputs<'_> {
    /// Turns everything past `num_reqs` requests and `num_tokens` tokens into padding that reads and writes nothing: empty
    /// queries, length 0, page 0, slot -1. No entry of an earlier, larger batch stays behind.
    ///
    /// Source: vLLM, padding of decode batches for full graphs.
    ///
    /// # Errors
    /// [`Error::Capacity`] if the batch is larger than the arrays. [`Error::Shape`] if the arrays do not fit one another.
    pub fn pad(&mut self, num_reqs: usize, num_tokens: usize) -> Result<()> {
        let reqs = self.seq_lens.len();
        if self.query_offsets.len() != reqs + 1 {
            return Err(Error::Shape {
                arg: "query_offsets",
                expected: format!("[{}]", reqs + 1),
                got: vec![self.query_offsets.len()],
            });
        }
        if !self.block_table.len().is_multiple_of(reqs.max(1)) {
            return Err(Error::Shape {
                arg: "block_table",
                expected: format!("[{reqs}, pages]"),
                got: vec![self.block_table.len()],
            });
        }
        for (what, asked, limit) in
            [("requests of a step", num_reqs, reqs), ("tokens of a step", num_tokens, self.slots.len())]
        {
            if asked > limit {
                return Err(Error::Capacity { what, asked, limit });
            }
        }
        let width = self.block_table.len() / reqs.max(1);
        let end = self.query_offsets[num_reqs];
        self.query_offsets[num_reqs..].fill(end);
        self.seq_lens[num_reqs..].fill(0);
        self.block_table[num_reqs * width..].fill(0);
        self.slots[num_tokens..].fill(-1);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_empty_shards() {
        let mask = |local: &[usize], offsets: &[usize], rows| dcp_empty_rows(local, offsets, rows).unwrap();
        assert_eq!(mask(&[3, 0, 5], &[0, 1, 2, 3], 6), [false, true, false, true, true, true]);
        assert_eq!(mask(&[2, 0], &[0, 2, 4], 4), [false, false, true, true]);
        assert_eq!(mask(&[], &[0], 3), [true; 3]);
        assert_eq!(mask(&[1, 1], &[0, 0, 2], 2), [false, false]);
        assert_eq!(mask(&[0, 7], &[0, 2, 2], 4), [true; 4]);
        assert!(dcp_empty_rows(&[1], &[0], 1).is_err());
        assert!(dcp_empty_rows(&[1, 1], &[0, 2, 1], 2).is_err());
    }

    #[test]
    fn padding_leaves_nothing_of_an_earlier_batch() {
        let (mut offsets, mut lens, mut table, mut slots) = ([0, 2, 4, 6], [7; 3], [5; 6], [9; 6]);
        let mut inputs =
            StepInputs { query_offsets: &mut offsets, seq_lens: &mut lens, block_table: &mut table, slots: &mut slots };
        assert!(inputs.pad(4, 6).is_err());
        assert!(inputs.pad(3, 7).is_err());
        inputs.pad(1, 2).unwrap();
        assert_eq!((offsets, lens), ([0, 2, 2, 2], [7, 0, 0]));
        assert_eq!((table, slots), ([5, 5, 0, 0, 0, 0], [9, 9, -1, -1, -1, -1]));
    }

    #[test]
    fn split_refuses_what_does_not_fit() {
        let request = SplitRequest {
            query_lens: &[2, 2, 9],
            num_tokens: 3,
            max_query_len: 9,
            decode_threshold: 2,
            require_uniform: false,
            is_prefilling: None,
        };
        assert!(matches!(request.split(), Err(Error::Argument { arg: "num_tokens", .. })));
        let request = SplitRequest { query_lens: &[usize::MAX, 2, 9], decode_threshold: usize::MAX, ..request };
        let request = SplitRequest { is_prefilling: Some(&[false, false, true]), ..request };
        assert!(matches!(request.split(), Err(Error::Argument { arg: "num_tokens", .. })), "the sum overflows");
        let request = SplitRequest { is_prefilling: Some(&[true]), ..request };
        assert!(matches!(request.split(), Err(Error::Argument { arg: "is_prefilling", .. })));
    }
}
