//! Merging partial attention results by their log-sum-exp.

use std::ffi::c_void;

use super::args::{block, dtype, read_block, size, tensor};
use super::decode::flag;
use super::device::{self, Opened, lw_device, on};
use super::status::{guard, lw_status};
use crate::backend::GraphBackend;
use crate::error::Result;
use crate::ops::{DcpCombine, MergeStates, dcp_combine, merge_states};
use crate::tensor::DType;

/// Two attention results of the same queries over different keys, all packed. Clear it, then fill it in.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct lw_merge_states_args {
    /// `sizeof(lw_merge_states_args)`.
    pub struct_size: usize,
    /// Query tokens; 0 is allowed.
    pub num_tokens: i64,
    /// Query heads.
    pub num_heads: i64,
    /// Width of an output row.
    pub head_dim: i64,
    /// Tokens at or past this one have no prefix and copy the suffix; negative if all have one.
    pub tokens_with_context: i64,
    /// `[num_tokens, num_heads, head_dim]` of `dtype`.
    pub prefix_out: *const c_void,
    /// Natural log, `[num_heads, num_tokens]`. An infinite LSE of either sign means no keys.
    pub prefix_lse: *const f32,
    /// As `prefix_out`.
    pub suffix_out: *const c_void,
    /// As `prefix_lse`.
    pub suffix_lse: *const f32,
    /// As `prefix_out`.
    pub out: *mut c_void,
    /// `[num_heads, num_tokens]`; NULL if it is not wanted.
    pub out_lse: *mut f32,
    /// An `lw_dtype`: `LW_F32`, `LW_F16` or `LW_BF16`.
    pub dtype: i32,
}

/// What each decode-context-parallel rank found over its shard of the cache. Clear it, then fill it in.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct lw_dcp_combine_args {
    /// `sizeof(lw_dcp_combine_args)`.
    pub struct_size: usize,
    /// Ranks, from 1.
    pub num_ranks: i64,
    /// Query rows; 0 is allowed.
    pub num_rows: i64,
    /// Query heads.
    pub num_heads: i64,
    /// Width of an output row.
    pub head_dim: i64,
    /// `[num_ranks, num_rows, num_heads, head_dim]` of `dtype`; each rank's part is packed.
    pub partial_out: *const c_void,
    /// `[num_ranks, num_rows, num_heads]`; each rank's part is packed. NaN and infinities mean an empty shard, whose output is ignored.
    pub partial_lse: *const f32,
    /// From rank to rank of `partial_out`, in elements; 0 for packed.
    pub partial_out_stride: i64,
    /// The same of `partial_lse`.
    pub partial_lse_stride: i64,
    /// `[num_rows, num_heads, head_dim]` of `dtype`, packed.
    pub out: *mut c_void,
    /// `[num_rows, num_heads]`, packed; NULL if it is not wanted.
    pub out_lse: *mut f32,
    /// An `lw_dtype`: `LW_F32`, `LW_F16` or `LW_BF16`.
    pub dtype: i32,
    /// 1 if the LSE are natural logarithms, 0 if they are to base 2.
    pub natural_log: i32,
}

block!(lw_merge_states_args, lw_dcp_combine_args);

/// # Safety
/// As [`lw_merge_states`].
unsafe fn merge<B: GraphBackend>(opened: &Opened<B>, args: &lw_merge_states_args, stream: *mut c_void) -> Result<()> {
    let dtype = dtype("dtype", args.dtype)?;
    let (outs, lses) = ([args.num_tokens, args.num_heads, args.head_dim], [args.num_heads, args.num_tokens]);
    // SAFETY: the caller's promises.
    let (stream, states, mut out, mut out_lse) = unsafe {
        let result = |arg, pointer| tensor(arg, pointer, dtype, &outs, &[]);
        let lse = |arg, pointer: *const f32| tensor(arg, pointer.cast(), DType::F32, &lses, &[]);
        (
            opened.stream(stream)?,
            [
                result("prefix_out", args.prefix_out)?,
                lse("prefix_lse", args.prefix_lse)?,
                result("suffix_out", args.suffix_out)?,
                lse("suffix_lse", args.suffix_lse)?,
            ],
            result("out", args.out.cast_const())?,
            (!args.out_lse.is_null()).then(|| lse("out_lse", args.out_lse)).transpose()?,
        )
    };
    let [prefix_out, prefix_lse, suffix_out, suffix_lse] = &states;
    let tokens_with_context = size("tokens_with_context", args.tokens_with_context).ok();
    let states = MergeStates { prefix_out, prefix_lse, suffix_out, suffix_lse, tokens_with_context };
    merge_states(&stream, &states, &mut out, out_lse.as_mut())
}

/// # Safety
/// As [`lw_dcp_combine`].
unsafe fn combine<B: GraphBackend>(opened: &Opened<B>, args: &lw_dcp_combine_args, stream: *mut c_void) -> Result<()> {
    let (dtype, natural_log) = (dtype("dtype", args.dtype)?, flag("natural_log", args.natural_log)?);
    let shape = [args.num_ranks, args.num_rows, args.num_heads, args.head_dim];
    let (outs, lses) = (&[args.partial_out_stride][..], &[args.partial_lse_stride][..]);
    // SAFETY: the caller's promises.
    let (stream, partial_out, partial_lse, mut out, mut out_lse) = unsafe {
        let lse = args.out_lse.cast_const().cast();
        (
            opened.stream(stream)?,
            tensor("partial_out", args.partial_out, dtype, &shape, outs)?,
            tensor("partial_lse", args.partial_lse.cast(), DType::F32, &shape[..3], lses)?,
            tensor("out", args.out, dtype, &shape[1..], &[])?,
            (!args.out_lse.is_null()).then(|| tensor("out_lse", lse, DType::F32, &shape[1..3], &[])).transpose()?,
        )
    };
    let combine = DcpCombine { partial_out: &partial_out, partial_lse: &partial_lse, natural_log };
    dcp_combine(&stream, &combine, &mut out, out_lse.as_mut())
}

/// Enqueues the merging of two attention results (vLLM's `merge_attn_states`). A side without keys contributes nothing, whatever its
/// output holds; two such sides give output 0 and LSE minus infinity. May be captured.
///
/// Errors as `lw_cache_write`.
///
/// # Safety
/// As `lw_decode`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lw_merge_states(
    device: *const lw_device,
    args: *const lw_merge_states_args,
    stream: *mut c_void,
) -> lw_status {
    guard(|| {
        // SAFETY: the caller's promises.
        unsafe {
            let device = device::device(device)?;
            let args = read_block("args", args)?;
            Ok(on!(device, opened => merge(opened, &args, stream))?)
        }
    })
}

/// Enqueues the combining of the ranks' results. Rows that are empty on all ranks give output 0 and LSE minus infinity. May be captured.
///
/// Errors as `lw_cache_write`.
///
/// # Safety
/// As `lw_decode`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lw_dcp_combine(
    device: *const lw_device,
    args: *const lw_dcp_combine_args,
    stream: *mut c_void,
) -> lw_status {
    guard(|| {
        // SAFETY: the caller's promises.
        unsafe {
            let device = device::device(device)?;
            let args = read_block("args", args)?;
            Ok(on!(device, opened => combine(opened, &args, stream))?)
        }
    })
}
