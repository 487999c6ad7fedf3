//! The stateless decode call: plain arguments, a caller's memory, a caller's stream.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, PoisonError, RwLock};

use super::args::{block, lw_kv_cache, lw_layer, out_pointer, read_block, size, tensor};
use super::device::{self, Opened, lw_device, on};
use super::status::{guard, lw_status};
use crate::backend::GraphBackend;
use crate::error::{Error, Result};
use crate::kernel::params::Settled;
use crate::ops::{DecodeArgs, MlaDecode, Plan, Scratch};
use crate::tensor::DType;
use crate::workspace::{ALIGNMENT, layout};

/// Decode attention of one layer over a batch. Clear it, then fill it in.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct lw_decode_args {
    /// `sizeof(lw_decode_args)`.
    pub struct_size: usize,
    /// The layer.
    pub layer: lw_layer,
    /// The layer's pages. Rows of this step's own tokens must have been written.
    pub cache: lw_kv_cache,
    /// Sequences; 0 is allowed.
    pub batch: i64,
    /// Query tokens per sequence, from 1: 1, or 1 plus the drafts to verify.
    pub query_len: i64,
    /// Longest sequence that may come, in tokens. It sizes the workspace and the grids; lengths on the device may be anything up to it.
    pub max_seq_len: i64,
    /// Columns of the block table.
    pub table_width: i64,
    /// From row to row of the block table, in elements; 0 for packed.
    pub table_stride: i64,
    /// Queries, absorbed latent part then rope part: `[batch, query_len, num_heads, kv_lora_rank + qk_rope_head_dim]` of `q_dtype`.
    pub q: *const c_void,
    /// Page ids, `[batch, table_width]`, on the device. What lies behind a sequence's pages may be anything.
    pub block_table: *const i32,
    /// Cached tokens per sequence, this step's own included, `[batch]`, on the device. 0 is an empty (padding) sequence. A GPU
    /// cuts lengths to what a row of the table addresses and follows no page id outside the cache; the host answers
    /// `LW_ERROR_OUT_OF_RANGE`.
    pub seq_lens: *const i32,
    /// Attention output in latent space, `[batch, query_len, num_heads, kv_lora_rank]` of `q_dtype`. 0 for rows that see no token.
    pub out: *mut c_void,
    /// Natural-log LSE, `[batch, query_len, num_heads]`, minus infinity for rows that see no token; NULL if it is not wanted.
    pub lse: *mut f32,
    /// Device memory of `workspace_bytes`, which nothing else uses until the step's work has ended. Nothing is kept in it from step
    /// to step; NULL where none is needed.
    pub workspace: *mut c_void,
    /// At least what `lw_decode_workspace_bytes` says.
    pub workspace_bytes: usize,
    /// From sequence to sequence, token to token and head to head of `q`, in elements; 0 for packed.
    pub q_strides: [i64; 3],
    /// The same of `out`.
    pub out_strides: [i64; 3],
    /// From sequence to sequence and token to token of `lse`, in elements; 0 for packed.
    pub lse_strides: [i64; 2],
    /// Whether query token `t` of `query_len` sees only the first `seq_len - query_len + 1 + t` cached tokens (verification of
    /// drafts); 0 or 1. Indifferent for a `query_len` of 1.
    pub causal: i32,
    /// 1 if `lw_decode_plan` was called for this step with the same arguments (`q`, `cache`, `out`, `lse` and their strides
    /// may differ), so that many layers share one schedule; 0 to make the schedule, too.
    pub scheduled: i32,
    /// Of a layer that is `scheduled`: 1 if another layer of the same step was enqueued before it on this stream, by the same schedule;
    /// 2 if so, and from the step's first layer to its last nothing is written to a block table, nor to any sequence's rows before its last
    /// `query_len`, also not as tokens of another sequence (a prefix that is shared in the step that computes it): kernels may then copy these
    /// rows while the layer before still runs. 0 is never wrong, and slower.
    pub settled: i32,
}

block!(lw_decode_args);

/// Plans kept per device, with their kernels; beyond, all are dropped and made anew as they are asked for.
const MAX_PLANS: usize = 4096;

/// A layer planned for a batch.
pub(super) struct Planned<B: GraphBackend> {
    decode: MlaDecode<B>,
    plan: Plan<B>,
}

/// Everything that a plan depends on.
type Key = [i64; 13];

/// The plans that stateless calls of one device made. A call that finds its plan allocates nothing.
pub(super) struct Plans<B: GraphBackend>(RwLock<HashMap<Key, Arc<Planned<B>>>>);

impl<B: GraphBackend> Default for Plans<B> {
    fn default() -> Self {
        Self(RwLock::default())
    }
}

impl lw_decode_args {
    fn key(&self) -> Key {
        let layer = &self.layer;
        [
            layer.num_heads,
            layer.kv_lora_rank,
            layer.qk_rope_head_dim,
            layer.page_size,
            layer.split_value,
            layer.split.into(),
            layer.q_dtype.into(),
            layer.kv_dtype.into(),
            layer.sm_scale.to_bits().into(),
            layer.softcap.to_bits().into(),
            self.batch,
            self.query_len,
            self.max_seq_len,
        ]
    }
}

impl<B: GraphBackend> Opened<B> {
    /// The plan of a call: kernels chosen and loaded, scratch sized.
    fn plan(&self, args: &lw_decode_args) -> Result<Arc<Planned<B>>> {
        let key = args.key();
        if let Some(planned) = self.plans.0.read().unwrap_or_else(PoisonError::into_inner).get(&key) {
            return Ok(planned.clone());
        }
        let layer = args.layer.check()?;
        let decode = MlaDecode::new(&self.backend, layer.config, layer.q_dtype, layer.kv_dtype)?;
        let batch = size("batch", args.batch)?;
        let query_len = size("query_len", args.query_len)?;
        let plan = decode.plan(batch, query_len, size("max_seq_len", args.max_seq_len)?, layer.policy)?;
        let planned = Arc::new(Planned { decode, plan });
        let mut plans = self.plans.0.write().unwrap_or_else(PoisonError::into_inner);
        if plans.len() >= MAX_PLANS {
            plans.clear();
        }
        plans.insert(key, planned.clone());
        Ok(planned)
    }
}

impl<B: GraphBackend> Planned<B> {
    /// Bytes of workspace, with room to align its beginning.
    fn workspace_bytes(&self) -> Result<usize> {
        let (_, bytes) = layout(&self.plan.decode().workspace_views())?;
        Ok(if bytes > 0 { bytes.saturating_add(ALIGNMENT) } else { 0 })
    }

    fn scratch(&self, args: &lw_decode_args) -> Result<Scratch> {
        let (offsets, bytes) = layout(&self.plan.decode().workspace_views())?;
        if bytes == 0 {
            return Ok(Scratch { views: [0; 3], owner: None });
        }
        let need = self.workspace_bytes()?;
        if args.workspace.is_null() || args.workspace_bytes < need {
            let got = if args.workspace.is_null() { 0 } else { args.workspace_bytes };
            let problem = format!("{got} bytes; {need} are needed, as lw_decode_workspace_bytes says");
            return Err(Error::argument("workspace", problem));
        }
        let begin =
            args.workspace.addr().checked_next_multiple_of(ALIGNMENT).filter(|at| at.checked_add(bytes).is_some());
        let begin = begin.ok_or_else(|| Error::argument("workspace", "past the end of the address space"))?;
        Ok(Scratch { views: offsets.map(|offset| (begin + offset) as u64), owner: None })
    }
}

/// What a call enqueues.
#[derive(Clone, Copy, PartialEq)]
enum Part {
    Schedule,
    Layer,
    Both,
}

pub(super) fn flag(arg: &'static str, value: i32) -> Result<bool> {
    match value {
        0 | 1 => Ok(value == 1),
        _ => Err(Error::argument(arg, format!("{value}: 0 or 1 are possible"))),
    }
}

/// What the caller promises of a layer.
fn settled(args: &lw_decode_args, part: Part) -> Result<Settled> {
    match (args.settled, part) {
        (0, _) => Ok(Settled::Nothing),
        (1, Part::Layer) => Ok(Settled::Lengths),
        (2, Part::Layer) => Ok(Settled::History),
        (1 | 2, Part::Schedule) => Ok(Settled::Nothing),
        (1 | 2, Part::Both) => {
            Err(Error::argument("settled", "a layer that makes its own schedule is the first of its step"))
        }
        (other, _) => Err(Error::argument("settled", format!("{other}: 0 to 2 are possible"))),
    }
}

/// # Safety
/// As [`lw_decode`].
unsafe fn enqueue<B: GraphBackend>(
    opened: &Opened<B>,
    args: &lw_decode_args,
    stream: *mut c_void,
    part: Part,
) -> Result<()> {
    let planned = opened.plan(args)?;
    let Planned { decode, plan } = &*planned;
    let (config, scratch, causal) = (decode.config(), planned.scratch(args)?, flag("causal", args.causal)?);
    let table_width = size("table_width", args.table_width)?;
    let lens = args.seq_lens.cast();
    // SAFETY: the caller's promises.
    let (stream, seq_lens) =
        unsafe { (opened.stream(stream)?, tensor("seq_lens", lens, DType::I32, &[args.batch], &[])?) };
    let step = decode.step(&stream, plan, scratch, &seq_lens, table_width, causal)?;
    let mut step = step.settled(settled(args, part)?);
    if part == Part::Schedule {
        return step.cut(&seq_lens);
    }

    let rows = |width: usize| [args.batch, args.query_len, config.num_heads as i64, width as i64];
    let (q_dtype, rank) = (decode.q_dtype(), config.kv_lora_rank);
    // SAFETY: the caller's promises.
    let (q, table, mut out, mut lse, kv_cache) = unsafe {
        let lse = (!args.lse.is_null())
            .then(|| tensor("lse", args.lse.cast(), DType::F32, &rows(0)[..3], &args.lse_strides))
            .transpose()?;
        let table = args.block_table.cast();
        (
            tensor("q", args.q, q_dtype, &rows(config.head_dim()), &args.q_strides)?,
            tensor("block_table", table, DType::I32, &[args.batch, args.table_width], &[args.table_stride])?,
            tensor("out", args.out, q_dtype, &rows(rank), &args.out_strides)?,
            lse,
            args.cache.pages(config, decode.kv_dtype())?,
        )
    };
    let args = DecodeArgs {
        q: &q,
        kv_cache: &kv_cache,
        block_table: &table,
        seq_lens: &seq_lens,
        out: &mut out,
        lse: lse.as_mut(),
        kv_scale: args.layer.kv_scale(),
        causal,
    };
    if part == Part::Both {
        // Before anything is enqueued.
        decode.check_args(plan, &args)?;
        step.cut(&seq_lens)?;
    }
    step.attend(args)
}

/// Bytes of workspace that a step with these arguments takes, its alignment included. Reads `layer`, `batch`, `query_len` and
/// `max_seq_len` alone, chooses the kernels and loads them, so that the calls that follow only enqueue. A workspace made for the
/// largest batch need not serve a smaller one: ask for each that will come.
///
/// `LW_ERROR_ARGUMENT`, `LW_ERROR_UNSUPPORTED` where no kernel of the device fits, `LW_ERROR_COMPILE`.
///
/// # Safety
/// `device` is open, `args` is NULL or a block of its size, `bytes` is NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lw_decode_workspace_bytes(
    device: *const lw_device,
    args: *const lw_decode_args,
    bytes: *mut usize,
) -> lw_status {
    guard(|| {
        // SAFETY: the caller's promises.
        unsafe {
            let device = device::device(device)?;
            let args = read_block("args", args)?;
            let to = out_pointer("bytes", bytes)?;
            to.write(on!(device, opened => opened.plan(&args)?.workspace_bytes()?));
        }
        Ok(())
    })
}

/// Enqueues the schedule of a step: how its work is cut, by the lengths that stand in `seq_lens` when it runs. Call it once, then
/// `lw_decode` with `scheduled` set for every layer, on the same stream. It reads `seq_lens`, `workspace`, `table_width`, `causal` and what
/// `lw_decode_workspace_bytes` reads. Nothing to do for `LW_SPLIT_FIXED` and `LW_SPLIT_INVARIANT`, but not wrong.
///
/// Errors as `lw_decode`.
///
/// # Safety
/// As `lw_decode`, for what is read here.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lw_decode_plan(
    device: *const lw_device,
    args: *const lw_decode_args,
    stream: *mut c_void,
) -> lw_status {
    guard(|| {
        // SAFETY: the caller's promises.
        unsafe {
            let device = device::device(device)?;
            let args = read_block("args", args)?;
            Ok(on!(device, opened => enqueue(opened, &args, stream, Part::Schedule))?)
        }
    })
}

/// Enqueues decode attention of one layer on `stream`. It waits for nothing, needs no lengths on the host, and allocates nothing once
/// it (or `lw_decode_workspace_bytes`) was called with the same sizes; it can be captured by anyone's graph, which then replays over
/// whatever lengths, tables and pages stand in the same memory.
///
/// `LW_ERROR_ARGUMENT`, `LW_ERROR_SHAPE`, `LW_ERROR_DTYPE` naming the argument, `LW_ERROR_UNSUPPORTED`, `LW_ERROR_COMPILE`; `LW_ERROR_OUT_OF_RANGE`
/// on the host alone; `LW_ERROR_DRIVER`.
///
/// # Safety
/// `device` is open, `args` is NULL or a block of its size, `stream` is a live stream of the device. Every tensor is memory of the
/// device of the shape and strides given, aligned to its elements; it stays so until the work has ended, and as long as a graph
/// that captured it. Nothing else writes the inputs or touches the outputs and the workspace meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lw_decode(
    device: *const lw_device,
    args: *const lw_decode_args,
    stream: *mut c_void,
) -> lw_status {
    guard(|| {
        // SAFETY: the caller's promises.
        unsafe {
            let device = device::device(device)?;
            let args = read_block("args", args)?;
            let part = if flag("scheduled", args.scheduled)? { Part::Layer } else { Part::Both };
            Ok(on!(device, opened => enqueue(opened, &args, stream, part))?)
        }
    })
}
