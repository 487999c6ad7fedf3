//! Graph modes.

use std::fmt;
use std::str::FromStr;

use super::parse_name;
use crate::error::{Error, Result};

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

/// How one batch is served: the part of a [`GraphMode`] that concerns it. Ordered from least to most captured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RuntimeMode {
    /// Eagerly.
    None,
    /// By graphs around the attention.
    Piecewise,
    /// By one full graph.
    Full,
}

impl GraphMode {
    /// All modes.
    pub const ALL: [Self; 5] = [Self::None, Self::Piecewise, Self::Full, Self::FullDecodeOnly, Self::FullAndPiecewise];

    /// How uniform decode batches are served.
    pub const fn decode_mode(self) -> RuntimeMode {
        match self {
            Self::None => RuntimeMode::None,
            Self::Piecewise => RuntimeMode::Piecewise,
            Self::Full | Self::FullDecodeOnly | Self::FullAndPiecewise => RuntimeMode::Full,
        }
    }

    /// How all other batches are served.
    pub const fn mixed_mode(self) -> RuntimeMode {
        match self {
            Self::None | Self::FullDecodeOnly => RuntimeMode::None,
            Self::Piecewise | Self::FullAndPiecewise => RuntimeMode::Piecewise,
            Self::Full => RuntimeMode::Full,
        }
    }

    /// Whether decode batches and mixed batches are served differently, so that decode has graphs of its own.
    pub fn separate_routine(self) -> bool {
        self.decode_mode() != self.mixed_mode()
    }

    /// Whether one of the two parts is `part`. `FULL_DECODE_ONLY` has the part `NONE`.
    pub fn has(self, part: RuntimeMode) -> bool {
        self.decode_mode() == part || self.mixed_mode() == part
    }

    /// The larger of the two parts.
    pub fn max_mode(self) -> RuntimeMode {
        self.decode_mode().max(self.mixed_mode())
    }

    /// The mode with its piecewise part served eagerly instead.
    pub const fn without_piecewise(self) -> Self {
        match self {
            Self::Piecewise => Self::None,
            Self::FullAndPiecewise => Self::FullDecodeOnly,
            Self::None | Self::Full | Self::FullDecodeOnly => self,
        }
    }

    /// The mode as that of a single batch, if both its parts are the same.
    pub fn runtime(self) -> Option<RuntimeMode> {
        (!self.separate_routine()).then(|| self.decode_mode())
    }
}

impl From<RuntimeMode> for GraphMode {
    fn from(mode: RuntimeMode) -> Self {
        match mode {
            RuntimeMode::None => Self::None,
            RuntimeMode::Piecewise => Self::Piecewise,
            RuntimeMode::Full => Self::Full,
        }
    }
}

impl fmt::Display for GraphMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::None => "NONE",
            Self::Piecewise => "PIECEWISE",
            Self::Full => "FULL",
            Self::FullDecodeOnly => "FULL_DECODE_ONLY",
            Self::FullAndPiecewise => "FULL_AND_PIECEWISE",
        })
    }
}

/// From the name, whatever its case.
///
/// ```
/// use latentwave::GraphMode;
/// assert_eq!("full_and_piecewise".parse::<GraphMode>()?, GraphMode::FullAndPiecewise);
/// assert!("graphs".parse::<GraphMode>().is_err());
/// # Ok::<(), latentwave::Error>(())
/// ```
impl FromStr for GraphMode {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        parse_name("graph mode", text, &Self::ALL)
    }
}

impl fmt::Display for RuntimeMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        GraphMode::from(*self).fmt(f)
    }
}
