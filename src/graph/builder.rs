//! Attention builders: what an engine asks of the attention of a layer before and during capture.

use super::support::{GraphSupport, MinimumSupport, QueryLenSupport};
use crate::batch::ReorderThreshold;
use crate::error::{Error, Result};

/// The batch that a full graph is captured with: padded sizes, as replayed later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CaptureBatch {
    /// Requests.
    pub num_reqs: usize,
    /// Query tokens of all requests.
    pub num_tokens: usize,
    /// Longest query, in tokens.
    pub max_query_len: usize,
}

/// What an engine's attention builder says about itself. Implement it for other attention that takes part in the same graphs.
///
/// The engine believes `graph_support`; nothing here can make a foreign builder honest. What it can do is to refuse, as a typed
/// error before anything is enqueued, a batch that the builder's own threshold rules out: see [`check_capture`].
/// [`MlaBuilder`] cannot be made with flags that contradict each other.
///
/// [`check_capture`]: AttentionBuilder::check_capture
pub trait AttentionBuilder {
    /// Name for reasons and errors.
    fn name(&self) -> &str;

    /// Query lengths that its decode path takes.
    fn query_len_support(&self) -> QueryLenSupport;

    /// Longest query, in tokens, that counts as decode.
    fn decode_threshold(&self) -> usize;

    /// The most that its full graphs can do.
    fn graph_support(&self) -> GraphSupport;

    /// Whether the decode path can be captured with this batch.
    ///
    /// Source: vLLM, `MLACommonMetadataBuilder.build_for_cudagraph_capture`, whose two assertions these are.
    ///
    /// # Errors
    /// [`Error::CaptureTooManyRequests`], then [`Error::CaptureQueryTooLong`].
    fn check_capture(&self, batch: &CaptureBatch) -> Result<()> {
        let threshold = self.decode_threshold();
        let &CaptureBatch { num_reqs, num_tokens, max_query_len } = batch;
        if num_reqs > num_tokens.saturating_mul(threshold) {
            return Err(Error::CaptureTooManyRequests {
                builder: self.name().to_owned(),
                num_reqs,
                num_tokens,
                threshold,
            });
        }
        if max_query_len > threshold {
            return Err(Error::CaptureQueryTooLong { builder: self.name().to_owned(), max_query_len, threshold });
        }
        Ok(())
    }
}

/// The least support among builders, and which of them set it.
pub fn minimum_support<'a>(builders: impl IntoIterator<Item = &'a dyn AttentionBuilder>) -> MinimumSupport {
    MinimumSupport::over(builders.into_iter().map(|builder| (builder.name(), builder.graph_support())))
}

/// What an [`MlaBuilder`] is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BuilderSpec {
    /// Name for reasons and errors.
    pub name: String,
    /// Query lengths that the kernel takes.
    pub query_len_support: QueryLenSupport,
    /// Longest query that the kernel takes, in tokens; absent for no limit.
    pub max_query_len: Option<usize>,
    /// Queries up to this many tokens count as decode even without speculation. At least 1.
    pub class_threshold: usize,
    /// Graph support to claim; absent to claim what the kernel's query lengths allow.
    pub claim: Option<GraphSupport>,
    /// Draft tokens per step, if the engine speculates.
    pub draft_tokens: Option<usize>,
    /// Drafts are made in parallel, which doubles the draft tokens of a block.
    pub parallel_drafting: bool,
    /// Ranks of decode context parallelism.
    pub dcp_size: usize,
    /// The kernel takes several query tokens per sequence under DCP.
    pub multi_token_dcp: bool,
}

impl BuilderSpec {
    /// A builder for a kernel with these query lengths: no limit, no speculation, one rank, everything claimed that is allowed.
    pub fn new(name: impl Into<String>, query_len_support: QueryLenSupport) -> Self {
        Self {
            name: name.into(),
            query_len_support,
            max_query_len: None,
            class_threshold: 1,
            claim: None,
            draft_tokens: None,
            parallel_drafting: false,
            dcp_size: 1,
            multi_token_dcp: false,
        }
    }

    /// Query length of a uniform decode batch: one token, and the draft tokens.
    pub fn query_len(&self) -> usize {
        self.draft_tokens.unwrap_or(0).saturating_add(1)
    }
}

/// The builder of this crate's decode attention. Its graph support follows from what its kernel takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MlaBuilder {
    spec: BuilderSpec,
    threshold: usize,
    support: GraphSupport,
}

impl MlaBuilder {
    /// Derives threshold and graph support.
    ///
    /// The threshold follows [`ReorderThreshold`], capped by the kernel's own limit. Where DCP or that cap leaves it below the
    /// query length of the engine's decode batches, full graphs remain for single tokens only: vLLM lowers the threshold there
    /// and keeps the claim, and so meets its own assertion while capturing.
    ///
    /// # Errors
    /// [`Error::InconsistentGraphSupport`] for a claim above [`QueryLenSupport::allowed_support`]. [`Error::Argument`] for a
    /// threshold or limit of 0, or one above 1 for a kernel that takes single tokens only.
    pub fn new(spec: BuilderSpec) -> Result<Self> {
        let single_only = spec.query_len_support == QueryLenSupport::SingleOnly;
        if spec.class_threshold == 0 || (single_only && spec.class_threshold != 1) {
            return Err(Error::argument(
                "class_threshold",
                format!(
                    "{} for a kernel that takes {}; at least 1, and 1 for SINGLE_ONLY",
                    spec.class_threshold, spec.query_len_support
                ),
            ));
        }
        if spec.max_query_len == Some(0) {
            return Err(Error::argument("max_query_len", "0 tokens; at least 1"));
        }
        let allowed = spec.query_len_support.allowed_support();
        let claimed = spec.claim.unwrap_or(allowed);
        if claimed > allowed {
            return Err(Error::InconsistentGraphSupport {
                builder: spec.name,
                claimed,
                query_len_support: spec.query_len_support,
                allowed,
            });
        }

        let rule = ReorderThreshold {
            class_threshold: Some(spec.class_threshold),
            spec_as_decode: !single_only,
            draft_tokens: spec.draft_tokens,
            parallel_drafting: spec.parallel_drafting,
            dcp_size: spec.dcp_size,
            multi_token_dcp: spec.multi_token_dcp,
        };
        let threshold = rule.tokens().unwrap_or(usize::MAX).min(spec.max_query_len.unwrap_or(usize::MAX));
        let single_tokens_only = rule.dcp_limits() || threshold < spec.query_len();
        let support =
            if single_tokens_only { claimed.min(QueryLenSupport::SingleOnly.allowed_support()) } else { claimed };
        Ok(Self { spec, threshold, support })
    }

    /// What it was made of.
    pub fn spec(&self) -> &BuilderSpec {
        &self.spec
    }
}

impl AttentionBuilder for MlaBuilder {
    fn name(&self) -> &str {
        &self.spec.name
    }

    fn query_len_support(&self) -> QueryLenSupport {
        self.spec.query_len_support
    }

    fn decode_threshold(&self) -> usize {
        self.threshold
    }

    fn graph_support(&self) -> GraphSupport {
        self.support
    }
}
