//! What a kernel takes, and what its graphs can therefore do.

use std::fmt;
use std::str::FromStr;

use super::parse_name;
use crate::backend::DeviceInfo;
use crate::error::{Error, Result};

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

impl QueryLenSupport {
    /// All values, from least to most.
    pub const ALL: [Self; 3] = [Self::SingleOnly, Self::Uniform, Self::Varlen];

    /// The most graph support that a kernel with these query lengths can honestly have.
    ///
    /// A full graph for uniform batches is captured at the common query length, so a kernel that takes single tokens only
    /// has full graphs for single tokens only. Claiming more is the defect of vLLM PR 47144.
    pub const fn allowed_support(self) -> GraphSupport {
        match self {
            Self::SingleOnly => GraphSupport::UniformSingleTokenDecode,
            Self::Uniform => GraphSupport::UniformBatch,
            Self::Varlen => GraphSupport::Always,
        }
    }
}

impl fmt::Display for QueryLenSupport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::SingleOnly => "SINGLE_ONLY",
            Self::Uniform => "UNIFORM",
            Self::Varlen => "VARLEN",
        })
    }
}

/// From the name, whatever its case.
impl FromStr for QueryLenSupport {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        parse_name("query length support", text, &Self::ALL)
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

impl GraphSupport {
    /// All values, from least to most.
    pub const ALL: [Self; 4] = [Self::Never, Self::UniformSingleTokenDecode, Self::UniformBatch, Self::Always];
}

impl fmt::Display for GraphSupport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Never => "NEVER",
            Self::UniformSingleTokenDecode => "UNIFORM_SINGLE_TOKEN_DECODE",
            Self::UniformBatch => "UNIFORM_BATCH",
            Self::Always => "ALWAYS",
        })
    }
}

/// From the name, whatever its case.
impl FromStr for GraphSupport {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        parse_name("graph support", text, &Self::ALL)
    }
}

/// The least support among everything that takes part in a step, and who set it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MinimumSupport {
    /// The least support.
    pub support: GraphSupport,
    /// The first that has it; absent while nothing is below [`GraphSupport::Always`].
    pub set_by: Option<String>,
}

impl MinimumSupport {
    /// The minimum over builders (and whatever else limits graphs, such as the device). Only a strictly smaller support takes
    /// over, so the first of several equals is named.
    ///
    /// ```
    /// use latentwave::graph::{GraphSupport, MinimumSupport};
    /// let minimum = MinimumSupport::over([("mla", GraphSupport::UniformBatch), ("draft", GraphSupport::Never)]);
    /// assert_eq!(minimum.support, GraphSupport::Never);
    /// assert_eq!(minimum.set_by.as_deref(), Some("draft"));
    /// ```
    pub fn over<'a>(supports: impl IntoIterator<Item = (&'a str, GraphSupport)>) -> Self {
        let mut minimum = Self { support: GraphSupport::Always, set_by: None };
        for (name, support) in supports {
            minimum.lower(name, support);
        }
        minimum
    }

    /// Takes one more into account.
    pub fn lower(&mut self, name: &str, support: GraphSupport) {
        if support < self.support {
            *self = Self { support, set_by: Some(name.to_owned()) };
        }
    }

    /// Who set it, or words for nobody.
    pub fn name(&self) -> &str {
        self.set_by.as_deref().unwrap_or("(no builder)")
    }
}

/// A known defect of some drivers, and the most that graphs may do there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DriverRule {
    /// Backend it concerns.
    pub backend: &'static str,
    /// Architectures it concerns, as prefixes of [`DeviceInfo::arch`].
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

impl DriverRule {
    /// Whether the rule concerns this device and its driver. A driver whose version cannot be read is taken to have the defect.
    pub fn matches(&self, device: &DeviceInfo) -> bool {
        self.backend == device.backend
            && self.arch_prefixes.iter().any(|prefix| device.arch.starts_with(prefix))
            && parse_version(&device.driver_version).is_none_or(|version| (self.first..=self.last).contains(&version))
    }
}

/// The leading numbers of a version as vendors write them: `7.2.1`, `12.8`, `570.86.15`, `ROCm 7.2.0-rc1`.
///
/// Missing numbers are 0. `None` if there is no number at all.
pub fn parse_version(text: &str) -> Option<(u32, u32, u32)> {
    let start = text.find(|c: char| c.is_ascii_digit())?;
    let digits = text[start..].split(|c: char| !c.is_ascii_digit() && c != '.').next().unwrap_or_default();
    let mut numbers = digits.split('.').map_while(|part| part.parse().ok());
    Some((numbers.next()?, numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_as_vendors_write_them() {
        assert_eq!(parse_version("7.2.1"), Some((7, 2, 1)));
        assert_eq!(parse_version("12.8"), Some((12, 8, 0)));
        assert_eq!(parse_version("ROCm 7.2.0-rc1"), Some((7, 2, 0)));
        assert_eq!(parse_version("570.86.15.01"), Some((570, 86, 15)));
        assert_eq!(parse_version("13"), Some((13, 0, 0)));
        assert_eq!(parse_version("unknown"), None);
        assert_eq!(parse_version("99999999999.1"), None);
    }

    #[test]
    fn names_parse_back_in_any_case() {
        for support in GraphSupport::ALL {
            assert_eq!(support.to_string().to_lowercase().parse::<GraphSupport>().unwrap(), support);
        }
        for support in QueryLenSupport::ALL {
            assert_eq!(support.to_string().parse::<QueryLenSupport>().unwrap(), support);
        }
        let error = "sometimes".parse::<GraphSupport>().unwrap_err().to_string();
        assert!(error.contains("sometimes") && error.contains("UNIFORM_BATCH"), "{error}");
    }
}
