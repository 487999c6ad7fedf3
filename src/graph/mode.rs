//! Graph modes.

use std::fmt;

/// How decode batches and mixed batches are served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GraphMode {
    /// Everything runs eagerly.
    None,
    /// Graphs around the attention, which runs eagerly.
    Piecewise,
    /// One full graph per size for all batches.
    Full,
    /// Full graphs for decode batches, mixed batches run eagerly.
    FullDecodeOnly,
    /// Full graphs for decode batches, piecewise ones for mixed batches.
    FullAndPiecewise,
}

impl fmt::Display for GraphMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "NONE",
            Self::Piecewise => "PIECEWISE",
            Self::Full => "FULL",
            Self::FullDecodeOnly => "FULL_DECODE_ONLY",
            Self::FullAndPiecewise => "FULL_AND_PIECEWISE",
        })
    }
}
