//! What a session says of its steps and captures.

use std::fmt;

use crate::error::{Error, Result};
use crate::graph::{BatchDescriptor, Misfit, RuntimeMode};

/// How a step was served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepReport {
    /// `FULL` if a graph was replayed; otherwise what the engine may do around the attention, which ran eagerly.
    pub mode: RuntimeMode,
    /// Tokens that the step ran with, padding included.
    pub num_tokens: usize,
    /// Tokens of padding among them.
    pub padding: usize,
    /// Longest sequence that the replayed graph, or the eager attention, was planned for, in tokens.
    pub max_seq_len: usize,
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

/// What [`DecodeSession::capture`](super::DecodeSession::capture) did.
#[derive(Debug, Default)]
pub struct CaptureReport {
    /// Sizes captured now, in order.
    pub captured: Vec<BatchDescriptor>,
    /// Sizes of which a graph could not be captured, and why. Their batches use the size's other graph, the next larger one, or run
    /// eagerly.
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
