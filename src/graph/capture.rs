//! The states of a stream that can be captured.

use std::fmt;

use crate::error::{Error, Result};

/// Whether a stream runs or records what is enqueued.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CaptureState {
    /// Work runs.
    #[default]
    Idle,
    /// Work is recorded.
    Capturing,
}

impl CaptureState {
    /// The state after a capture has begun.
    ///
    /// # Errors
    /// [`Error::GraphState`] if one is under way: captures do not nest.
    pub fn begin(self) -> Result<Self> {
        match self {
            Self::Idle => Ok(Self::Capturing),
            Self::Capturing => Err(Error::GraphState { call: "begin capture", state: self }),
        }
    }
}

impl fmt::Display for CaptureState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Idle => "idle",
            Self::Capturing => "capturing",
        })
    }
}
