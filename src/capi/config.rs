//! What a session is made for.

use std::ffi::c_void;

use super::args::{array, block, lw_layer, size};
use super::decode::flag;
use crate::error::{Error, Result};
use crate::graph::GraphMode;
use crate::session::SessionConfig;

/// How batches are served.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum lw_graph_mode {
    /// As `LW_GRAPH_FULL_AND_PIECEWISE`.
    LW_GRAPH_DEFAULT = 0,
    /// Everything runs eagerly.
    LW_GRAPH_NONE = 1,
    /// The engine's own graphs around the attention, which runs eagerly.
    LW_GRAPH_PIECEWISE = 2,
    /// One full graph per size for all batches.
    LW_GRAPH_FULL = 3,
    /// Full graphs for decode batches, mixed batches run eagerly.
    LW_GRAPH_FULL_DECODE_ONLY = 4,
    /// Full graphs for decode batches, piecewise ones for mixed batches.
    LW_GRAPH_FULL_AND_PIECEWISE = 5,
}

use lw_graph_mode::*;

/// What a session is made for. Clear it, then fill it in.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct lw_session_config {
    /// `sizeof(lw_session_config)`.
    pub struct_size: usize,
    /// All attention layers.
    pub layer: lw_layer,
    /// Most sequences in one step.
    pub max_num_seqs: i64,
    /// Longest sequence, in tokens.
    pub max_seq_len: i64,
    /// Pages of each layer's cache.
    pub num_pages: i64,
    /// Most tokens in one step, prompts included; 0 for 8192 or `max_num_seqs`, whichever is more.
    pub max_num_batched_tokens: i64,
    /// Draft tokens that a step verifies per sequence. Graphs are captured for `1 + num_spec_tokens` query tokens.
    pub num_spec_tokens: i64,
    /// Sizes to capture, in tokens, `num_capture_sizes` of them, on the host; NULL for the usual ones.
    pub capture_sizes: *const i64,
    /// Number of `capture_sizes`.
    pub num_capture_sizes: i64,
    /// Largest size to capture, in tokens; 0 for the usual one.
    pub max_capture_size: i64,
    /// The stream that steps are enqueued on, which must live as long as the session; NULL for one of the session's own.
    pub stream: *mut c_void,
    /// An `lw_graph_mode`. What can be had is in `lw_session_info`, and why in `lw_session_reasons`.
    pub graph_mode: i32,
    /// 1 if the engine cannot take attention out of its graphs.
    pub no_piecewise: i32,
    /// 1 to use graphs even on drivers known to corrupt them.
    pub ignore_driver_rules: i32,
    /// 1 if from a step's first layer to its last nothing is written to a block table, nor to any sequence's rows before its last tokens,
    /// as many as it has queries, also not as tokens of another sequence (a prefix that is shared in the step that computes it): kernels may
    /// then copy these rows while the layer before still runs.
    pub history_final: i32,
}

block!(lw_session_config);

const MODES: [(lw_graph_mode, GraphMode); 6] = [
    (LW_GRAPH_DEFAULT, GraphMode::FullAndPiecewise),
    (LW_GRAPH_NONE, GraphMode::None),
    (LW_GRAPH_PIECEWISE, GraphMode::Piecewise),
    (LW_GRAPH_FULL, GraphMode::Full),
    (LW_GRAPH_FULL_DECODE_ONLY, GraphMode::FullDecodeOnly),
    (LW_GRAPH_FULL_AND_PIECEWISE, GraphMode::FullAndPiecewise),
];

/// The mode of a number.
fn mode(number: i32) -> Result<GraphMode> {
    let known = MODES.iter().find(|(known, _)| *known as i32 == number);
    known.map(|known| known.1).ok_or_else(|| Error::argument("graph_mode", format!("{number} is no lw_graph_mode")))
}

/// The number of a mode.
pub(super) fn mode_number(mode: GraphMode) -> lw_graph_mode {
    let mut named = MODES.iter().skip(1);
    named.find(|known| known.1 == mode).map_or(LW_GRAPH_NONE, |known| known.0)
}

/// # Safety
/// As [`lw_session_create`](super::lw_session_create).
pub(super) unsafe fn config(args: &lw_session_config) -> Result<SessionConfig> {
    let layer = args.layer.check()?;
    let [max_num_seqs, max_seq_len, num_pages] = [
        size("max_num_seqs", args.max_num_seqs)?,
        size("max_seq_len", args.max_seq_len)?,
        size("num_pages", args.num_pages)?,
    ];
    let usual = SessionConfig::new(layer.config, max_num_seqs, max_seq_len, num_pages);
    let or = |arg, value, usual| if value == 0 { Ok(usual) } else { size(arg, value) };
    let capture_sizes = match args.capture_sizes.is_null() {
        true => None,
        false => {
            // SAFETY: the caller's promise.
            let sizes = unsafe {
                array("capture_sizes", args.capture_sizes, size("num_capture_sizes", args.num_capture_sizes)?)?
            };
            Some(sizes.iter().map(|&tokens| size("capture_sizes", tokens)).collect::<Result<_>>()?)
        }
    };
    Ok(SessionConfig {
        q_dtype: layer.q_dtype,
        kv_dtype: layer.kv_dtype,
        kv_scale: layer.kv_scale,
        max_num_batched_tokens: or(
            "max_num_batched_tokens",
            args.max_num_batched_tokens,
            usual.max_num_batched_tokens,
        )?,
        num_spec_tokens: size("num_spec_tokens", args.num_spec_tokens)?,
        policy: layer.policy,
        graph_mode: mode(args.graph_mode)?,
        capture_sizes,
        max_capture_size: Some(size("max_capture_size", args.max_capture_size)?).filter(|&most| most > 0),
        piecewise: !flag("no_piecewise", args.no_piecewise)?,
        ignore_driver_rules: flag("ignore_driver_rules", args.ignore_driver_rules)?,
        history_final: flag("history_final", args.history_final)?,
        ..usual
    })
}
