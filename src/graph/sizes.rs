//! Which batch sizes, in tokens, are captured.
//!
//! Source of the grid and of the rounding: vLLM, `VllmConfig._set_cudagraph_sizes` and
//! `CompilationConfig.adjust_cudagraph_sizes_for_spec_decode`. Where those lose a batch or take nonsense, this module does not:
//! see [`SizeRequest::resolve`] and [`round_to_query_len`].

use std::collections::BTreeSet;
use std::fmt;

use super::mode::{GraphMode, RuntimeMode};
use crate::backend::DeviceInfo;
use crate::error::{Error, Result};

/// Largest size captured by default.
pub const DEFAULT_CEILING: usize = 512;

/// As [`DEFAULT_CEILING`], on devices large enough to gain from graphs at larger sizes.
pub const LARGE_DEVICE_CEILING: usize = 1024;

/// Largest size that can be captured at all: tables are made of every number of tokens up to it.
pub const MAX_CAPTURE_SIZE: usize = 1 << 20;

/// The ceiling that suits a device: [`LARGE_DEVICE_CEILING`] for NVIDIA's data-centre Blackwell (`sm_100` family).
pub fn default_ceiling(device: &DeviceInfo) -> usize {
    if device.arch.starts_with("sm_10") { LARGE_DEVICE_CEILING } else { DEFAULT_CEILING }
}

/// What decides the sizes.
#[derive(Debug, Clone, Copy)]
pub struct SizeRequest<'a> {
    /// The graph mode; `NONE` has no sizes.
    pub mode: GraphMode,
    /// Most sequences in a batch.
    pub max_num_seqs: usize,
    /// Most tokens in a batch.
    pub max_num_tokens: usize,
    /// Query length of a uniform decode batch: one, and the draft tokens.
    pub query_len: usize,
    /// Sizes that the user wants, instead of the grid.
    pub sizes: Option<&'a [usize]>,
    /// Largest size that the user wants.
    pub max_size: Option<usize>,
    /// Largest size if the user names none.
    pub ceiling: usize,
    /// Every size up to 32, for short steps at small batches.
    pub every_small_size: bool,
}

impl SizeRequest<'_> {
    /// The defaults for an engine's limits.
    pub fn new(mode: GraphMode, max_num_seqs: usize, max_num_tokens: usize, query_len: usize) -> Self {
        Self {
            mode,
            max_num_seqs,
            max_num_tokens,
            query_len,
            sizes: None,
            max_size: None,
            ceiling: DEFAULT_CEILING,
            every_small_size: false,
        }
    }
}

/// The sizes to capture, ascending and distinct, and what a person should know of them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CaptureSizes {
    /// The sizes.
    pub sizes: Vec<usize>,
    /// What was changed or lost.
    pub because: Vec<SizeReason>,
}

impl CaptureSizes {
    /// The largest size, 0 if there is none.
    pub fn max_size(&self) -> usize {
        self.sizes.last().copied().unwrap_or(0)
    }
}

/// Something changed or lost on the way from a request to its sizes. It prints as a sentence.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum SizeReason {
    /// The user's largest size exceeds the tokens of a batch.
    MaximumLowered {
        /// The size wanted.
        asked: usize,
        /// The largest possible.
        to: usize,
    },
    /// Some of the user's sizes are not captured: they exceed the tokens of a batch, or stand there twice.
    SizesDropped {
        /// Those sizes.
        dropped: Vec<usize>,
        /// Most tokens in a batch.
        max_num_tokens: usize,
    },
    /// The widest decode batches fit no captured size, so they have no full decode graph.
    WidestDecodeLost {
        /// Fewest sequences of such a batch.
        from_seqs: usize,
        /// Most sequences of such a batch.
        to_seqs: usize,
    },
}

impl fmt::Display for SizeReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::MaximumLowered { asked, to } => {
                write!(f, "the largest size is {to}, not {asked}: no batch has more tokens")
            }
            Self::SizesDropped { dropped, max_num_tokens } => {
                write!(f, "sizes {dropped:?} are dropped: given twice, or above the {max_num_tokens} tokens of a batch")
            }
            Self::WidestDecodeLost { from_seqs: 1, to_seqs } => write!(
                f,
                "no size holds a decode batch: none, of 1 to {to_seqs} sequences, has a full graph, whatever the mode allows"
            ),
            Self::WidestDecodeLost { from_seqs, to_seqs } => {
                write!(f, "decode batches of {from_seqs} to {to_seqs} sequences have no full decode graph")
            }
        }
    }
}

impl SizeRequest<'_> {
    /// The sizes to capture.
    ///
    /// By default: a grid (1, 2, 4, steps of 8 below 256, steps of 16 above) up to `2 * max_num_seqs * query_len`, at most the
    /// ceiling; the largest batch if the grid reaches it; and the decode batches at typical numbers of sequences, the widest
    /// among them, so that those are captured exactly. A user's largest size replaces the bound and is captured itself, on the
    /// grid or off it. (vLLM cuts it back to the grid and leaves out the decode batches.)
    ///
    /// # Errors
    /// [`Error::Argument`], naming `max_size` (below 1, above [`MAX_CAPTURE_SIZE`], or not the largest of the user's own sizes),
    /// `sizes` (empty, holding 0, or one above [`MAX_CAPTURE_SIZE`]), `max_num_seqs` or `query_len` (0).
    pub fn resolve(&self) -> Result<CaptureSizes> {
        if self.mode == GraphMode::None {
            return Ok(CaptureSizes::default());
        }
        for (arg, value) in [("max_num_seqs", self.max_num_seqs), ("query_len", self.query_len)] {
            if value == 0 {
                return Err(Error::argument(arg, "0; at least 1"));
            }
        }
        let default_max = (self.max_num_seqs.saturating_mul(self.query_len).saturating_mul(2)).min(self.ceiling);
        let max = self.max_size.unwrap_or(default_max).min(self.max_num_tokens);
        if max == 0 {
            return Err(Error::argument("max_size", "no size to capture; at least 1, like the tokens of a batch"));
        }
        if max > MAX_CAPTURE_SIZE {
            return Err(Error::argument("max_size", format!("{max}; sizes up to {MAX_CAPTURE_SIZE} can be captured")));
        }
        let mut because = Vec::new();
        let sizes: Vec<usize> = match self.sizes {
            Some(sizes) => self.user_sizes(sizes, &mut because)?,
            None => self.default_sizes(max).into_iter().collect(),
        };
        if let Some(asked) = self.max_size {
            let largest = sizes.last().copied().unwrap_or(0);
            if self.sizes.is_some() && asked != largest {
                return Err(Error::argument(
                    "max_size",
                    format!("{asked}, but the largest size to capture is {largest}; leave one of the two out"),
                ));
            }
            if asked > max {
                because.push(SizeReason::MaximumLowered { asked, to: max });
            }
        }
        because.extend(self.widest_decode_lost(&sizes));
        Ok(CaptureSizes { sizes, because })
    }

    fn user_sizes(&self, sizes: &[usize], because: &mut Vec<SizeReason>) -> Result<Vec<usize>> {
        if sizes.is_empty() {
            return Err(Error::argument("sizes", "empty; leave it out to get the default, or ask for graph mode NONE"));
        }
        refuse_zero("sizes", sizes)?;
        if let Some(size) = sizes.iter().find(|&&size| size <= self.max_num_tokens && size > MAX_CAPTURE_SIZE) {
            return Err(Error::argument("sizes", format!("{size}; sizes up to {MAX_CAPTURE_SIZE} can be captured")));
        }
        let mut kept = BTreeSet::new();
        let dropped: Vec<usize> =
            sizes.iter().copied().filter(|&size| size > self.max_num_tokens || !kept.insert(size)).collect();
        if !dropped.is_empty() {
            because.push(SizeReason::SizesDropped { dropped, max_num_tokens: self.max_num_tokens });
        }
        Ok(kept.into_iter().collect())
    }

    fn default_sizes(&self, max: usize) -> BTreeSet<usize> {
        let mut sizes: BTreeSet<usize> = match self.every_small_size {
            true => (1..=max.min(32)).collect(),
            false => [1, 2, 4].into_iter().filter(|&size| size <= max).collect(),
        };
        sizes.extend((8..=max.min(255)).step_by(8));
        sizes.extend((256..=max).step_by(16));
        // Decode batches at typical numbers of sequences; with single tokens the grid has all but the widest.
        let decodes = if self.query_len > 1 { self.sequence_counts() } else { BTreeSet::from([self.max_num_seqs]) };
        sizes.extend(decodes.iter().map(|count| count.saturating_mul(self.query_len)).filter(|&size| size <= max));
        // `max` is the user's, or bounded by the largest batch: both deserve an exact graph. A default bound does not.
        if self.max_size.is_some() || max == self.max_num_tokens {
            sizes.insert(max);
        }
        sizes
    }

    /// Typical numbers of sequences, the largest included.
    fn sequence_counts(&self) -> BTreeSet<usize> {
        let most = self.max_num_seqs.min(self.ceiling);
        let mut counts: BTreeSet<usize> = [1, 2, 4].into_iter().filter(|&count| count <= most).collect();
        counts.extend((8..(most + 1).min(256)).step_by(8));
        counts.extend((256..=most).step_by(16));
        counts.insert(most);
        counts
    }

    /// Whether the widest decode batches fit no full graph, in a mode that has full decode graphs.
    fn widest_decode_lost(&self, sizes: &[usize]) -> Option<SizeReason> {
        let max = sizes.last().copied().unwrap_or(0);
        let captured = match (self.mode.decode_mode(), self.mode.separate_routine()) {
            (RuntimeMode::Full, false) => Some(max),
            (RuntimeMode::Full, true) => {
                let graphs = sizes.iter().filter_map(|&n| decode_size(n, self.query_len, self.max_num_seqs, max));
                Some(graphs.max().unwrap_or(0))
            }
            _ => None,
        };
        let seqs = captured? / self.query_len;
        // A batch of more tokens than the engine's limit cannot come.
        let to_seqs = self.max_num_seqs.min(self.max_num_tokens / self.query_len);
        (seqs < to_seqs).then_some(SizeReason::WidestDecodeLost { from_seqs: seqs + 1, to_seqs })
    }
}

/// Sizes and query lengths are at least one token.
pub(super) fn refuse_zero(arg: &'static str, tokens: &[usize]) -> Result<()> {
    if tokens.contains(&0) {
        return Err(Error::argument(arg, format!("{tokens:?} holds 0; at least 1 token")));
    }
    Ok(())
}

/// The size in tokens of the uniform decode graph that a captured size stands for: rounded up to whole queries, unless no
/// batch is that large or it passes the largest size.
pub fn decode_size(size: usize, query_len: usize, max_num_seqs: usize, max_size: usize) -> Option<usize> {
    let rounded = size.checked_next_multiple_of(query_len)?;
    (rounded <= max_num_seqs.saturating_mul(query_len) && rounded <= max_size).then_some(rounded)
}

/// Rounds sizes to whole queries of `query_len` tokens, ascending and distinct, none above `max_size`.
///
/// A size is rounded up; where that passes `max_size`, to the largest multiple below it. (vLLM drops the size there, though
/// the smaller multiple would do: of `[1, 2, 4, 8, 16, 17]` with 3 tokens it keeps 3, 6 and 9, and this function 15 as well.)
///
/// ```
/// use latentwave::graph::sizes::round_to_query_len;
/// assert_eq!(round_to_query_len(&[1, 2, 4, 8, 16, 17], 17, 3)?, [3, 6, 9, 15]);
/// # Ok::<(), latentwave::Error>(())
/// ```
///
/// # Errors
/// [`Error::NoCaptureSizes`] if `max_size` is below one query; no sizes at all stay none. [`Error::Argument`] for a query
/// length or size of 0.
pub fn round_to_query_len(sizes: &[usize], max_size: usize, query_len: usize) -> Result<Vec<usize>> {
    if query_len == 0 {
        return Err(Error::argument("query_len", "0 tokens; at least 1"));
    }
    refuse_zero("sizes", sizes)?;
    let largest = max_size - max_size % query_len;
    if largest == 0 && !sizes.is_empty() {
        return Err(Error::NoCaptureSizes { max_size, query_len });
    }
    let rounded: BTreeSet<usize> = sizes
        .iter()
        .map(|size| size.checked_next_multiple_of(query_len).map_or(largest, |up| up.min(largest)))
        .collect();
    Ok(rounded.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn argument(request: &SizeRequest<'_>) -> &'static str {
        match request.resolve() {
            Err(Error::Argument { arg, .. }) => arg,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn nonsense_is_refused_by_name() {
        let request = SizeRequest::new(GraphMode::FullAndPiecewise, 8, 1 << 40, 1);
        assert_eq!(argument(&SizeRequest { sizes: Some(&[0, 1]), ..request }), "sizes");
        assert_eq!(argument(&SizeRequest { sizes: Some(&[]), ..request }), "sizes");
        assert_eq!(argument(&SizeRequest { sizes: Some(&[1 << 30]), ..request }), "sizes");
        assert_eq!(argument(&SizeRequest { max_size: Some(0), ..request }), "max_size");
        assert_eq!(argument(&SizeRequest { max_size: Some(1 << 30), ..request }), "max_size");
        assert_eq!(argument(&SizeRequest { max_size: Some(4), sizes: Some(&[1, 2]), ..request }), "max_size");
        assert_eq!(argument(&SizeRequest { max_num_tokens: 0, ..request }), "max_size");
        assert_eq!(argument(&SizeRequest { max_num_seqs: 0, ..request }), "max_num_seqs");
        assert_eq!(argument(&SizeRequest { query_len: 0, ..request }), "query_len");
        assert!(matches!(round_to_query_len(&[0], 4, 2), Err(Error::Argument { arg: "sizes", .. })));
        assert!(matches!(round_to_query_len(&[1], 4, 0), Err(Error::Argument { arg: "query_len", .. })));
        assert!(matches!(round_to_query_len(&[1], 4, 5), Err(Error::NoCaptureSizes { max_size: 4, query_len: 5 })));
        assert!(round_to_query_len(&[], 0, 5).unwrap().is_empty());
    }

    #[test]
    fn what_is_lost_is_named() {
        let request = SizeRequest::new(GraphMode::FullAndPiecewise, 8, 64, 1);
        let because = |request: SizeRequest<'_>| request.resolve().unwrap().because;
        let dropped = SizeReason::SizesDropped { dropped: vec![4, 100], max_num_tokens: 64 };
        assert_eq!(because(SizeRequest { sizes: Some(&[4, 4, 100, 8]), ..request }), [dropped]);
        let lowered = SizeReason::MaximumLowered { asked: 100, to: 64 };
        assert_eq!(because(SizeRequest { max_size: Some(100), ..request }), [lowered]);
        let lost = SizeReason::WidestDecodeLost { from_seqs: 5, to_seqs: 8 };
        assert_eq!(because(SizeRequest { sizes: Some(&[1, 4]), ..request }), vec![lost.clone()]);
        assert_eq!(lost.to_string(), "decode batches of 5 to 8 sequences have no full decode graph");
        // A query of three tokens fits none of these sizes.
        let none = because(SizeRequest { sizes: Some(&[1, 2]), query_len: 3, ..request });
        assert_eq!(none, [SizeReason::WidestDecodeLost { from_seqs: 1, to_seqs: 8 }]);
        assert!(none[0].to_string().starts_with("no size holds a decode batch"), "{}", none[0]);
        // Without full decode graphs there are none to lose.
        assert_eq!(because(SizeRequest { mode: GraphMode::Piecewise, sizes: Some(&[1, 4]), ..request }), []);
    }
}
