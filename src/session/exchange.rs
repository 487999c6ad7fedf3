//! What an engine hands to a session, and what it is told.

use std::fmt;

use crate::error::{Error, Result};
use crate::graph::{BatchDescriptor, Misfit, RuntimeMode};

/// The sequences of one step.
#[derive(Debug, Clone, Copy)]
pub struct StepBatch<'a, T> {
    /// Query tokens per decoding sequence: 1, or 1 plus the drafts to verify.
    pub query_len: usize,
    /// Cached tokens of each decoding sequence, this step's own included.
    pub seq_lens: &'a [i32],
    /// Pages of each decoding sequence, in order; more than its length needs are allowed.
    pub block_tables: &'a [T],
    /// Further tokens that the engine handles itself in this step (prefill); with any, the batch is mixed.
    pub prefill_tokens: usize,
    /// Requests that those belong to.
    pub prefill_reqs: usize,
}

impl<'a, T> StepBatch<'a, T> {
    /// A batch that only decodes.
    pub fn decode(query_len: usize, seq_lens: &'a [i32], block_tables: &'a [T]) -> Self {
        Self { query_len, seq_lens, block_tables, prefill_tokens: 0, prefill_reqs: 0 }
    }
}

/// How a step was served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepReport {
    /// `FULL` if a graph was replayed; otherwise what the engine may do around the attention, which ran eagerly.
    pub mode: RuntimeMode,
    /// Tokens that the step ran with, padding included.
    pub num_tokens: usize,
    /// Tokens of padding among them.
    pub padding: usize,
    /// Why no full graph served it, if none did.
    pub misfit: Option<Misfit>,
}

impl fmt::Display for StepReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.mode, self.num_tokens)?;
        match (self.misfit, self.padding) {
            (Some(misfit), _) => write!(f, ", eager: {misfit}"),
            (None, 0) => Ok(()),
            (None, padding) => write!(f, ", {padding} of padding"),
        }
    }
}

/// What [`DecodeSession::capture`] did.
#[derive(Debug, Default)]
pub struct CaptureReport {
    /// Graphs captured now, in order.
    pub captured: Vec<BatchDescriptor>,
    /// Sizes that could not be captured, and why. Their batches use the next larger graph, or run eagerly.
    pub failed: Vec<(BatchDescriptor, Error)>,
    /// Device bytes that the graphs hold, as far as the driver tells.
    pub graph_bytes: usize,
}

impl CaptureReport {
    /// The report if all sizes were captured, else the first failure.
    ///
    /// # Errors
    /// The first of `failed`.
    pub fn all(mut self) -> Result<Self> {
        match self.failed.is_empty() {
            true => Ok(self),
            false => Err(self.failed.swap_remove(0).1),
        }
    }
}
