//! Which graph mode a session gets, and why.
//!
//! Source of the rules: vLLM, `CompilationConfig.resolve_cudagraph_mode_and_sizes`. What is added: the device's and the
//! driver's limits count like a builder's, and every step that weakens the mode is a [`Reason`].

use std::fmt;

use super::mode::{GraphMode, RuntimeMode};
use super::support::{DriverRule, GraphSupport, MinimumSupport};
use crate::backend::DeviceInfo;
use crate::error::{Error, Result};

/// What the engine says of its own graphs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineFacts {
    /// Attention can be taken out of the graph: a mode that must be weakened may become piecewise.
    pub attention_separable: bool,
    /// The pieces around the attention can be captured now. Without it no mode keeps a piecewise part.
    pub piecewise_capture: bool,
}

/// The device and the known defects of its drivers.
#[derive(Debug, Clone, Copy)]
pub struct DriverFacts<'a> {
    /// The device.
    pub device: &'a DeviceInfo,
    /// Rules that may concern it: the backend's, and the user's own.
    pub rules: &'a [DriverRule],
    /// The user has decided to run in spite of the rules; those that would have applied are reported all the same.
    pub ignore_rules: bool,
}

/// Everything that decides the mode.
#[derive(Debug, Clone, Copy)]
pub struct ResolveRequest<'a> {
    /// The mode asked for; unset means no graphs.
    pub requested: Option<GraphMode>,
    /// The least support among builders.
    pub minimum: &'a MinimumSupport,
    /// Query length of a uniform decode batch: one, and the draft tokens.
    pub query_len: usize,
    /// What the engine can do.
    pub engine: EngineFacts,
    /// The device, if its driver's defects are to count.
    pub driver: Option<DriverFacts<'a>>,
}

/// The mode, and how it came about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resolved {
    /// The mode.
    pub mode: GraphMode,
    /// The support it was resolved with, the driver's limits included.
    pub minimum: MinimumSupport,
    /// The steps, in the order they were taken.
    pub because: Vec<Reason>,
}

/// One step of a resolution. It prints as a sentence.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// No mode, or `NONE`, was asked for.
    NotRequested,
    /// A known defect of the driver limits graphs.
    DriverLimit {
        /// The most that graphs may do.
        limit: GraphSupport,
        /// Architecture and driver version.
        device: String,
        /// The defect and its source.
        defect: &'static str,
    },
    /// A known defect of the driver was overridden by the user.
    DriverLimitIgnored {
        /// The limit that was not applied.
        limit: GraphSupport,
        /// Architecture and driver version.
        device: String,
        /// The defect and its source.
        defect: &'static str,
    },
    /// Full graphs for mixed batches need [`GraphSupport::Always`].
    MixedNeedsAlways {
        /// The mode before and after.
        change: Change,
        /// Who has less.
        minimum: MinimumSupport,
    },
    /// A builder has no full graphs at all.
    NoFullGraphs {
        /// The mode before and after.
        change: Change,
        /// Who has none.
        minimum: MinimumSupport,
    },
    /// Full graphs at several query tokens per sequence need [`GraphSupport::UniformBatch`].
    QueryLenNeedsUniformBatch {
        /// The mode before and after.
        change: Change,
        /// Who has less.
        minimum: MinimumSupport,
        /// Query length of a uniform decode batch.
        query_len: usize,
    },
    /// The engine cannot capture pieces.
    NoPiecewiseCapture {
        /// The mode before and after.
        change: Change,
    },
    /// The mode asked for is kept.
    Kept {
        /// The mode.
        mode: GraphMode,
        /// The support that suffices for it.
        support: GraphSupport,
    },
}

/// A mode weakened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Change {
    /// The mode before.
    pub from: GraphMode,
    /// The mode after.
    pub to: GraphMode,
}

/// Resolves the mode.
///
/// 1. Nothing or `NONE` asked for gives `NONE`.
/// 2. `FULL` needs [`GraphSupport::Always`]: with less it becomes `FULL_AND_PIECEWISE` where attention can be taken out of the
///    graph, else `FULL_DECODE_ONLY`; with none it is an error.
/// 3. Full decode graphs with [`GraphSupport::Never`], or at several query tokens with less than
///    [`GraphSupport::UniformBatch`], become `PIECEWISE` where attention can be taken out, else `NONE`.
/// 4. A piecewise part that cannot be captured is dropped.
///
/// # Errors
/// [`Error::GraphModeUnsupported`] in case 2, naming who has no full graphs. [`Error::Argument`] for a query length of 0.
pub fn resolve(request: &ResolveRequest<'_>) -> Result<Resolved> {
    if request.query_len == 0 {
        return Err(Error::argument("query_len", "0 tokens; at least 1"));
    }
    let mut because = Vec::new();
    let minimum = with_driver_limits(request, &mut because);
    let requested = match request.requested {
        None | Some(GraphMode::None) => {
            because.push(Reason::NotRequested);
            return Ok(Resolved { mode: GraphMode::None, minimum, because });
        }
        Some(mode) => mode,
    };
    let support = minimum.support;
    let (separable, piecewise) = (request.engine.attention_separable, request.engine.piecewise_capture);
    let without_full = if separable { GraphMode::Piecewise } else { GraphMode::None };
    let mut mode = requested;

    if mode.mixed_mode() == RuntimeMode::Full && support != GraphSupport::Always {
        if support == GraphSupport::Never {
            return Err(Error::GraphModeUnsupported {
                requested,
                builder: minimum.name().to_owned(),
                support,
                instead: if piecewise { without_full } else { GraphMode::None },
            });
        }
        let to = if separable { GraphMode::FullAndPiecewise } else { GraphMode::FullDecodeOnly };
        because.push(Reason::MixedNeedsAlways { change: replace(&mut mode, to), minimum: minimum.clone() });
    }
    if mode.decode_mode() == RuntimeMode::Full && support == GraphSupport::Never {
        because.push(Reason::NoFullGraphs { change: replace(&mut mode, without_full), minimum: minimum.clone() });
    }
    if mode.decode_mode() == RuntimeMode::Full && request.query_len > 1 && support < GraphSupport::UniformBatch {
        because.push(Reason::QueryLenNeedsUniformBatch {
            change: replace(&mut mode, without_full),
            minimum: minimum.clone(),
            query_len: request.query_len,
        });
    }
    if !piecewise && mode.has(RuntimeMode::Piecewise) {
        let to = mode.without_piecewise();
        because.push(Reason::NoPiecewiseCapture { change: replace(&mut mode, to) });
    }
    if mode == requested {
        because.push(Reason::Kept { mode, support });
    }
    Ok(Resolved { mode, minimum, because })
}

fn replace(mode: &mut GraphMode, to: GraphMode) -> Change {
    Change { from: std::mem::replace(mode, to), to }
}

/// The minimum over builders and the driver rules that match, with a reason for each of those.
fn with_driver_limits(request: &ResolveRequest<'_>, because: &mut Vec<Reason>) -> MinimumSupport {
    let mut minimum = request.minimum.clone();
    let Some(facts) = request.driver else { return minimum };
    for rule in facts.rules.iter().filter(|rule| rule.matches(facts.device)) {
        let device = format!("{}, driver {}", facts.device.arch, facts.device.driver_version);
        let (limit, defect) = (rule.limit, rule.reason);
        if facts.ignore_rules {
            because.push(Reason::DriverLimitIgnored { limit, device, defect });
        } else {
            minimum.lower(&format!("driver of {}", facts.device.arch), limit);
            because.push(Reason::DriverLimit { limit, device, defect });
        }
    }
    minimum
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} becomes {}", self.from, self.to)
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotRequested => f.write_str("no graph mode was asked for, everything runs eagerly"),
            Self::DriverLimit { limit, device, defect } => {
                write!(f, "graphs on {device} are limited to {limit}: {defect}")
            }
            Self::DriverLimitIgnored { limit, device, defect } => {
                write!(f, "graphs on {device} should be limited to {limit}, overridden by the user: {defect}")
            }
            Self::MixedNeedsAlways { change, minimum } => write!(
                f,
                "{change}: full graphs for mixed batches need ALWAYS, and `{}` has {}",
                minimum.name(),
                minimum.support
            ),
            Self::NoFullGraphs { change, minimum } => {
                write!(f, "{change}: `{}` has {}, so there are no full graphs", minimum.name(), minimum.support)
            }
            Self::QueryLenNeedsUniformBatch { change, minimum, query_len } => write!(
                f,
                "{change}: full graphs at {query_len} query tokens per sequence need UNIFORM_BATCH, and `{}` has {}",
                minimum.name(),
                minimum.support
            ),
            Self::NoPiecewiseCapture { change } => {
                write!(f, "{change}: the engine cannot capture the pieces around the attention")
            }
            Self::Kept { mode, support } => write!(f, "{mode} is kept: the least support, {support}, allows it"),
        }
    }
}
