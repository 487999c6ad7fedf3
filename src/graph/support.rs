//! What a kernel takes, and what its graphs can therefore do.

use std::fmt;

/// Query lengths that the decode path of a kernel variant takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum QueryLenSupport {
    /// One query token per sequence.
    SingleOnly,
    /// Any one length common to all sequences.
    Uniform,
    /// A length per sequence.
    Varlen,
}

impl fmt::Display for QueryLenSupport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SingleOnly => "SINGLE_ONLY",
            Self::Uniform => "UNIFORM",
            Self::Varlen => "VARLEN",
        })
    }
}

/// Batches that a builder can serve from a full graph, from least to most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum GraphSupport {
    /// No full graph.
    Never,
    /// Batches of one query token per sequence.
    UniformSingleTokenDecode,
    /// Batches in which every sequence has the same number of query tokens.
    UniformBatch,
    /// All batches, prefill and decode mixed.
    Always,
}

impl fmt::Display for GraphSupport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Never => "NEVER",
            Self::UniformSingleTokenDecode => "UNIFORM_SINGLE_TOKEN_DECODE",
            Self::UniformBatch => "UNIFORM_BATCH",
            Self::Always => "ALWAYS",
        })
    }
}

/// A known defect of some drivers, and the most that graphs may do there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DriverRule {
    /// Backend it concerns.
    pub backend: &'static str,
    /// Architectures it concerns, as prefixes of [`DeviceInfo::arch`](crate::backend::DeviceInfo::arch).
    pub arch_prefixes: &'static [&'static str],
    /// First driver version that has the defect, as numbers.
    pub first: (u32, u32, u32),
    /// Last driver version that has the defect.
    pub last: (u32, u32, u32),
    /// The most that graphs may do there.
    pub limit: GraphSupport,
    /// What goes wrong, with its source.
    pub reason: &'static str,
}
