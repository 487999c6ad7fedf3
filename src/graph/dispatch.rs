//! Which graphs are captured, and which of them serves a batch.
//!
//! Source: vLLM, `CudaGraphManager` of model runner V2. Its LoRA count is an opaque `variant` here: a number by which an engine
//! tells apart graphs of equal size. A lookup reads a table made in advance; it allocates nothing and takes a few nanoseconds
//! per kind of graph.

use std::collections::BTreeSet;
use std::fmt;

use super::mode::{GraphMode, RuntimeMode};
use super::sizes::{MAX_CAPTURE_SIZE, decode_size, refuse_zero};
use crate::error::{Error, Result};

/// What a graph was captured for, or, with mode `NONE`, what a batch runs as eagerly.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BatchDescriptor {
    /// What kind of graph it is.
    pub mode: RuntimeMode,
    /// Query tokens, padding included.
    pub num_tokens: usize,
    /// Requests, padding included; absent where any number will do.
    pub num_reqs: Option<usize>,
    /// The query length common to all requests; absent where they may differ.
    pub uniform_query_len: Option<usize>,
    /// Longest query that may come; absent for no limit.
    pub max_query_len: Option<usize>,
    /// The engine's own distinction between graphs of equal size.
    pub variant: u32,
}

/// A batch that is about to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Batch {
    /// Query tokens.
    pub num_tokens: usize,
    /// Requests.
    pub num_reqs: usize,
    /// The query length common to all requests, if there is one.
    pub uniform_query_len: Option<usize>,
    /// Longest query, if known. Graphs with a limit serve only batches that give it.
    pub max_query_len: Option<usize>,
    /// The engine's own distinction between graphs of equal size.
    pub variant: u32,
}

impl Batch {
    /// A decode batch of `num_reqs` requests with `query_len` tokens each, variant 0.
    pub fn uniform(num_reqs: usize, query_len: usize) -> Self {
        Self {
            num_tokens: num_reqs.saturating_mul(query_len),
            num_reqs,
            uniform_query_len: Some(query_len),
            max_query_len: Some(query_len),
            variant: 0,
        }
    }

    /// A batch whose requests may have any query lengths, variant 0.
    pub fn mixed(num_reqs: usize, num_tokens: usize) -> Self {
        Self { num_tokens, num_reqs, uniform_query_len: None, max_query_len: None, variant: 0 }
    }
}

/// What decides which graphs are captured.
#[derive(Debug, Clone, Copy)]
pub struct KeyRequest<'a> {
    /// The resolved graph mode.
    pub mode: GraphMode,
    /// Capture sizes, in any order.
    pub sizes: &'a [usize],
    /// Most sequences in a batch.
    pub max_num_seqs: usize,
    /// Query lengths of decode batches: usually one; several where the number of draft tokens changes from step to step.
    pub query_lens: &'a [usize],
    /// The decode kernel takes a length per sequence, up to the largest of `query_lens`: one decode graph per size.
    pub varlen_decode: bool,
    /// The engine's variants, each with graphs of its own.
    pub variants: &'a [u32],
}

/// The graphs to capture, in the order of capture: `PIECEWISE` before `FULL`, and the largest first, so that all graphs can
/// share the memory of the largest.
///
/// # Errors
/// [`Error::Argument`] for a size, query length or number of sequences of 0, or no query length or variant at all.
pub fn graph_keys(request: &KeyRequest<'_>) -> Result<Vec<BatchDescriptor>> {
    let &KeyRequest { mode, max_num_seqs, varlen_decode, variants, .. } = request;
    let sizes = distinct("sizes", request.sizes)?;
    let query_lens = distinct("query_lens", request.query_lens)?;
    let (Some(&max_query_len), false) = (query_lens.last(), variants.is_empty()) else {
        return Err(Error::argument("query_lens", "no query length or no variant; at least one of each"));
    };
    if max_num_seqs == 0 {
        return Err(Error::argument("max_num_seqs", "0; at least 1"));
    }

    let max_size = sizes.last().copied().unwrap_or(0);
    // Only full decode graphs are ever separate.
    let separate_decode = mode.separate_routine();
    let mut keys: Vec<BatchDescriptor> = Vec::new();
    for &size in &sizes {
        for &variant in variants {
            let key = |num_tokens, num_reqs, uniform_query_len| BatchDescriptor {
                mode: RuntimeMode::Full,
                num_tokens,
                num_reqs,
                uniform_query_len,
                max_query_len: None,
                variant,
            };
            if separate_decode && varlen_decode {
                if size <= max_num_seqs.saturating_mul(max_query_len) {
                    let any = key(size, Some(size.min(max_num_seqs)), None);
                    keys.push(BatchDescriptor { max_query_len: Some(max_query_len), ..any });
                }
            } else if separate_decode {
                for &query_len in &query_lens {
                    let decode = decode_size(size, query_len, max_num_seqs, max_size)
                        .map(|tokens| key(tokens, Some(tokens / query_len), Some(query_len)));
                    keys.extend(decode.filter(|decode| !keys.contains(decode)));
                }
            }
            match mode.mixed_mode() {
                RuntimeMode::None => {}
                RuntimeMode::Full => keys.push(key(size, Some(size.min(max_num_seqs)), None)),
                RuntimeMode::Piecewise => {
                    keys.push(BatchDescriptor { mode: RuntimeMode::Piecewise, ..key(size, None, None) });
                }
            }
        }
    }
    keys.sort_by_key(|key| (key.mode, std::cmp::Reverse(key.num_tokens)));
    Ok(keys)
}

/// The numbers of tokens, ascending and distinct.
fn distinct(arg: &'static str, tokens: &[usize]) -> Result<Vec<usize>> {
    refuse_zero(arg, tokens)?;
    Ok(tokens.iter().copied().collect::<BTreeSet<_>>().into_iter().collect())
}

/// Why a batch is not served by a full graph. Ordered by how near it came.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Misfit {
    /// The graph mode has no full graphs.
    NoFullGraphs,
    /// The batch has no tokens.
    EmptyBatch,
    /// No full graph was captured for its variant.
    Variant,
    /// No full graph takes its query lengths.
    QueryLen,
    /// It has more tokens than the largest full graph of its kind that was captured.
    Tokens {
        /// Tokens of that graph, 0 if none was captured.
        largest: usize,
    },
    /// It has more requests than every full graph of its kind with enough tokens.
    Requests,
}

impl fmt::Display for Misfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoFullGraphs => f.write_str("the mode has no full graphs"),
            Self::EmptyBatch => f.write_str("the batch is empty"),
            Self::Variant => f.write_str("no full graph has this variant"),
            Self::QueryLen => f.write_str("no full graph takes these query lengths"),
            Self::Tokens { largest: 0 } => f.write_str("no full graph of this kind was captured"),
            Self::Tokens { largest } => write!(f, "the largest full graph of this kind has {largest} tokens"),
            Self::Requests => f.write_str("no full graph of this kind takes so many requests"),
        }
    }
}

/// How a batch runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dispatch {
    /// Index of the graph among the dispatcher's [`keys`](GraphDispatcher::keys); absent if the batch runs eagerly.
    pub graph: Option<usize>,
    /// What it runs as: that graph's key, or the batch itself with mode `NONE`.
    pub descriptor: BatchDescriptor,
    /// Tokens of padding.
    pub padding: usize,
    /// Why no full graph serves it, if none does.
    pub misfit: Option<Misfit>,
}

impl fmt::Display for Dispatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.descriptor.mode, self.descriptor.num_tokens)?;
        match (self.padding, self.misfit) {
            (padding, Some(misfit)) if padding > 0 => write!(f, " ({padding} of padding; {misfit})"),
            (_, Some(misfit)) => write!(f, " ({misfit})"),
            (0, None) => f.write_str(" (exact)"),
            (padding, None) => write!(f, " ({padding} of padding)"),
        }
    }
}

/// Graphs that differ in size only, and the smallest captured one for each number of tokens.
#[derive(Debug, Clone)]
struct Kind {
    mode: RuntimeMode,
    uniform_query_len: Option<usize>,
    max_query_len: Option<usize>,
    variant: u32,
    by_tokens: Vec<u32>,
    // Tokens of the largest one captured.
    largest: usize,
}

const NO_GRAPH: u32 = u32::MAX;

impl Kind {
    fn of(key: &BatchDescriptor) -> Self {
        let &BatchDescriptor { mode, uniform_query_len, max_query_len, variant, .. } = key;
        Self { mode, uniform_query_len, max_query_len, variant, by_tokens: Vec::new(), largest: 0 }
    }

    fn holds(&self, key: &BatchDescriptor) -> bool {
        (self.mode, self.uniform_query_len, self.max_query_len, self.variant)
            == (key.mode, key.uniform_query_len, key.max_query_len, key.variant)
    }

    fn takes_query_lens_of(&self, batch: &Batch) -> bool {
        (self.uniform_query_len.is_none() || self.uniform_query_len == batch.uniform_query_len)
            && self.max_query_len.is_none_or(|most| batch.max_query_len.is_some_and(|longest| longest <= most))
    }
}

/// Finds the graph that serves a batch.
#[derive(Debug, Clone)]
pub struct GraphDispatcher {
    keys: Vec<BatchDescriptor>,
    // Full graphs first.
    kinds: Vec<Kind>,
}

impl GraphDispatcher {
    /// Makes the tables for the graphs of [`graph_keys`]. No graph serves anything until it is [captured](Self::set_captured).
    ///
    /// # Errors
    /// [`Error::Argument`] for a key with mode `NONE` or above [`MAX_CAPTURE_SIZE`], or two that are the same but for the requests
    /// they take.
    pub fn new(keys: Vec<BatchDescriptor>) -> Result<Self> {
        let mut kinds: Vec<Kind> = Vec::new();
        for (i, key) in keys.iter().enumerate() {
            let same = |other: &BatchDescriptor| BatchDescriptor { num_reqs: key.num_reqs, ..*other } == *key;
            if key.mode == RuntimeMode::None || key.num_tokens > MAX_CAPTURE_SIZE || keys[..i].iter().any(same) {
                return Err(Error::argument("keys", format!("{key:?} is no graph, too large, or there twice")));
            }
            let kind = kinds.iter().position(|kind| kind.holds(key)).unwrap_or_else(|| {
                kinds.push(Kind::of(key));
                kinds.len() - 1
            });
            let table = &mut kinds[kind].by_tokens;
            table.resize(table.len().max(key.num_tokens + 1), NO_GRAPH);
        }
        kinds.sort_by_key(|kind| std::cmp::Reverse(kind.mode));
        Ok(Self { keys, kinds })
    }

    /// The graphs, in the order of capture.
    pub fn keys(&self) -> &[BatchDescriptor] {
        &self.keys
    }

    /// Lets the graph with this index in [`keys`](Self::keys) serve batches from now on. A graph whose capture failed is left
    /// out, and the next larger one serves in its place.
    ///
    /// # Errors
    /// [`Error::Argument`] for an index that is not there.
    pub fn set_captured(&mut self, graph: usize) -> Result<()> {
        if graph >= self.keys.len() {
            return Err(Error::argument("graph", format!("{graph} of {} graphs", self.keys.len())));
        }
        self.enter(graph);
        Ok(())
    }

    /// As [`set_captured`](Self::set_captured), for all graphs.
    pub fn set_all_captured(&mut self) {
        (0..self.keys.len()).for_each(|graph| self.enter(graph));
    }

    fn enter(&mut self, graph: usize) {
        let keys = &self.keys;
        let key = &keys[graph];
        for kind in self.kinds.iter_mut().filter(|kind| kind.holds(key)) {
            kind.largest = kind.largest.max(key.num_tokens);
            for entry in &mut kind.by_tokens[..=key.num_tokens] {
                if *entry == NO_GRAPH || keys[*entry as usize].num_tokens > key.num_tokens {
                    *entry = graph as u32;
                }
            }
        }
    }

    /// The graph that serves a batch: the smallest full graph that takes it, else the smallest piecewise one, else none.
    ///
    /// Allocates nothing.
    pub fn dispatch(&self, batch: &Batch) -> Dispatch {
        let mut misfit = Misfit::NoFullGraphs;
        if batch.num_tokens == 0 {
            return self.eager(batch, Misfit::EmptyBatch);
        }
        for kind in &self.kinds {
            match self.find(kind, batch) {
                Ok(graph) => {
                    let descriptor = self.keys[graph];
                    return Dispatch {
                        graph: Some(graph),
                        descriptor,
                        padding: descriptor.num_tokens - batch.num_tokens,
                        misfit: (kind.mode != RuntimeMode::Full).then_some(misfit),
                    };
                }
                Err(why) if kind.mode == RuntimeMode::Full => misfit = misfit.max(why),
                Err(_) => {}
            }
        }
        self.eager(batch, misfit)
    }

    fn eager(&self, batch: &Batch, misfit: Misfit) -> Dispatch {
        let descriptor = BatchDescriptor {
            mode: RuntimeMode::None,
            num_tokens: batch.num_tokens,
            num_reqs: Some(batch.num_reqs),
            uniform_query_len: None,
            max_query_len: None,
            variant: batch.variant,
        };
        Dispatch { graph: None, descriptor, padding: 0, misfit: Some(misfit) }
    }

    /// The smallest captured graph of one kind that takes the batch.
    fn find(&self, kind: &Kind, batch: &Batch) -> Result<usize, Misfit> {
        if kind.variant != batch.variant {
            return Err(Misfit::Variant);
        }
        if !kind.takes_query_lens_of(batch) {
            return Err(Misfit::QueryLen);
        }
        let mut tokens = batch.num_tokens;
        loop {
            match kind.by_tokens.get(tokens) {
                None | Some(&NO_GRAPH) if tokens == batch.num_tokens => {
                    return Err(Misfit::Tokens { largest: kind.largest });
                }
                None | Some(&NO_GRAPH) => return Err(Misfit::Requests),
                Some(&graph) => {
                    let key = &self.keys[graph as usize];
                    if key.num_reqs.is_none_or(|most| most >= batch.num_reqs) {
                        return Ok(graph as usize);
                    }
                    tokens = key.num_tokens + 1;
                }
            }
        }
    }
}
