//! What a session is made for.

use crate::config::MlaConfig;
use crate::error::{Error, Result};
use crate::graph::GraphMode;
use crate::ops::check;
use crate::plan::SplitPolicy;
use crate::tensor::DType;

/// Most sequences that a session may be made for: it plans for every batch size up to its own.
const MAX_NUM_SEQS: usize = 1 << 20;

/// What a [`DecodeSession`](super::DecodeSession) is made for. [`SessionConfig::new`] gives the usual values; set the fields that differ.
#[derive(Debug, Clone, PartialEq)]
pub struct SessionConfig {
    /// The attention layers.
    pub mla: MlaConfig,
    /// Element type of queries and outputs.
    pub q_dtype: DType,
    /// Element type of the cache.
    pub kv_dtype: DType,
    /// Scale of an fp8 cache; 1 for others.
    pub kv_scale: f32,
    /// Most sequences in one step.
    pub max_num_seqs: usize,
    /// Longest sequence, in tokens.
    pub max_seq_len: usize,
    /// Most tokens in one step, prompts included.
    pub max_num_batched_tokens: usize,
    /// Draft tokens that a step verifies per sequence; 0 without speculative decoding. Graphs are captured for
    /// `1 + num_spec_tokens` query tokens per sequence.
    pub num_spec_tokens: usize,
    /// Pages of each layer's cache.
    pub num_pages: usize,
    /// How sequences are split.
    pub policy: SplitPolicy,
    /// Whether history is final during a step, as [`MlaDecode::history_final`](crate::MlaDecode::history_final) says in full: not where
    /// a sequence may read rows that another one's tokens of the same step write.
    pub history_final: bool,
    /// The graph mode wanted; what can be had is [resolved](super::DecodeSession::resolved).
    pub graph_mode: GraphMode,
    /// Sizes to capture, in tokens; `None` for the default ones.
    pub capture_sizes: Option<Vec<usize>>,
    /// Largest size to capture, in tokens; `None` for the default.
    pub max_capture_size: Option<usize>,
    /// Whether the engine can take attention out of its graphs (piecewise graphs).
    pub piecewise: bool,
    /// Whether to use graphs even on drivers known to corrupt them.
    pub ignore_driver_rules: bool,
}

impl SessionConfig {
    /// A session of bf16 queries and a bf16 cache, FULL graphs for decode batches, no speculative decoding.
    pub fn new(mla: MlaConfig, max_num_seqs: usize, max_seq_len: usize, num_pages: usize) -> Self {
        Self {
            mla,
            q_dtype: DType::BF16,
            kv_dtype: DType::BF16,
            kv_scale: 1.0,
            max_num_seqs,
            max_seq_len,
            max_num_batched_tokens: max_num_seqs.max(8192),
            num_spec_tokens: 0,
            num_pages,
            policy: SplitPolicy::Auto,
            history_final: false,
            graph_mode: GraphMode::FullAndPiecewise,
            capture_sizes: None,
            max_capture_size: None,
            piecewise: true,
            ignore_driver_rules: false,
        }
    }

    /// Query tokens per sequence of a decode step: `1 + num_spec_tokens`.
    pub fn query_len(&self) -> usize {
        self.num_spec_tokens.saturating_add(1)
    }

    /// Pages that the longest sequence takes: the width of the block table.
    pub fn table_width(&self) -> usize {
        self.max_seq_len.div_ceil(self.mla.page_size.max(1))
    }

    /// Most decode tokens in one step.
    pub fn max_decode_tokens(&self) -> usize {
        self.max_num_seqs.saturating_mul(self.query_len())
    }

    /// Checks every field.
    ///
    /// # Errors
    /// [`Error::Argument`] naming the first field that cannot be.
    pub fn validate(&self) -> Result<()> {
        self.mla.validate()?;
        let counts = [
            ("max_num_seqs", self.max_num_seqs),
            ("max_seq_len", self.max_seq_len),
            ("max_num_batched_tokens", self.max_num_batched_tokens),
            ("num_pages", self.num_pages),
        ];
        for (arg, count) in counts {
            if count == 0 || i32::try_from(count).is_err() {
                return Err(Error::argument(arg, format!("{count}: 1 to {} are possible", i32::MAX)));
            }
        }
        if self.max_num_seqs > MAX_NUM_SEQS {
            return Err(Error::argument("max_num_seqs", format!("{}: at most {MAX_NUM_SEQS}", self.max_num_seqs)));
        }
        if self.num_spec_tokens >= 1 << 10 {
            return Err(Error::argument("num_spec_tokens", format!("{}: at most 1023", self.num_spec_tokens)));
        }
        if self.max_num_batched_tokens < self.max_decode_tokens() {
            let (tokens, most) = (self.max_num_batched_tokens, self.max_decode_tokens());
            let problem =
                format!("{tokens}: at least max_num_seqs * (1 + num_spec_tokens) = {most}, one full decode step");
            return Err(Error::argument("max_num_batched_tokens", problem));
        }
        check::kv_scale(self.kv_scale, self.kv_dtype)
    }
}
