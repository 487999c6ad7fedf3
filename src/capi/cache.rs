//! Writing and reading the paged cache.

use std::ffi::c_void;

use super::args::{block, lw_kv_cache, lw_layer, read_block, tensor};
use super::device::{self, Opened, lw_device, on};
use super::status::{guard, lw_status};
use crate::backend::GraphBackend;
use crate::error::Result;
use crate::ops::{CacheWrite, gather_cache, write_cache};
use crate::tensor::DType;

/// New rows for a layer's cache. Clear it, then fill it in.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct lw_cache_write_args {
    /// `sizeof(lw_cache_write_args)`.
    pub struct_size: usize,
    /// The layer.
    pub layer: lw_layer,
    /// The layer's pages.
    pub cache: lw_kv_cache,
    /// Rows; 0 is allowed.
    pub num_tokens: i64,
    /// New latent rows, `[num_tokens, kv_lora_rank]` of `q_dtype`.
    pub kv_c: *const c_void,
    /// New rope rows, `[num_tokens, qk_rope_head_dim]` of `q_dtype`; NULL for a model without rope.
    pub k_pe: *const c_void,
    /// Slot of each row, `[num_tokens]`: `page * page_size + entry`; a negative slot is skipped (padding), and so is one past the cache.
    pub slot_mapping: *const i64,
    /// From row to row of `kv_c`, in elements; 0 for packed.
    pub kv_c_stride: i64,
    /// The same of `k_pe`.
    pub k_pe_stride: i64,
}

/// Cached rows to copy out. Clear it, then fill it in.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct lw_cache_gather_args {
    /// `sizeof(lw_cache_gather_args)`.
    pub struct_size: usize,
    /// The layer.
    pub layer: lw_layer,
    /// The layer's pages.
    pub cache: lw_kv_cache,
    /// Sequences; 0 is allowed.
    pub batch: i64,
    /// Rows of `out`.
    pub num_tokens: i64,
    /// Columns of the block table.
    pub table_width: i64,
    /// From row to row of the block table, in elements; 0 for packed.
    pub table_stride: i64,
    /// Page ids, `[batch, table_width]`, on the device.
    pub block_table: *const i32,
    /// First row of `out` of each sequence, ascending from 0, `[batch + 1]`, on the device.
    pub cu_seq_lens: *const i32,
    /// First cached token to copy of each sequence, `[batch]`, on the device; NULL for all from 0.
    pub seq_starts: *const i32,
    /// `[num_tokens, kv_lora_rank + qk_rope_head_dim]` of `q_dtype`.
    pub out: *mut c_void,
    /// From row to row of `out`, in elements; 0 for packed.
    pub out_stride: i64,
}

block!(lw_cache_write_args, lw_cache_gather_args);

/// # Safety
/// As [`lw_cache_write`].
unsafe fn write<B: GraphBackend>(opened: &Opened<B>, args: &lw_cache_write_args, stream: *mut c_void) -> Result<()> {
    let layer = args.layer.check()?;
    let rows = |arg, pointer, width: usize, stride| {
        // SAFETY: the caller's promise.
        unsafe { tensor(arg, pointer, layer.q_dtype, &[args.num_tokens, width as i64], &[stride]) }
    };
    let kv_c = rows("kv_c", args.kv_c, layer.config.kv_lora_rank, args.kv_c_stride)?;
    let k_pe = (!args.k_pe.is_null())
        .then(|| rows("k_pe", args.k_pe, layer.config.qk_rope_head_dim, args.k_pe_stride))
        .transpose()?;
    // SAFETY: the caller's promises.
    let (stream, slots, cache) = unsafe {
        (
            opened.stream(stream)?,
            tensor("slot_mapping", args.slot_mapping.cast(), DType::I64, &[args.num_tokens], &[])?,
            args.cache.pages(&layer.config, layer.kv_dtype)?,
        )
    };
    let write = CacheWrite { kv_c: &kv_c, k_pe: k_pe.as_ref(), slot_mapping: &slots, kv_scale: layer.kv_scale };
    write_cache(&stream, &cache, &write)
}

/// # Safety
/// As [`lw_cache_gather`].
unsafe fn gather<B: GraphBackend>(opened: &Opened<B>, args: &lw_cache_gather_args, stream: *mut c_void) -> Result<()> {
    let layer = args.layer.check()?;
    let (config, starts) = (layer.config, args.seq_starts.cast());
    let batch_and_end = args.batch.saturating_add(1);
    // SAFETY: the caller's promises.
    let (stream, cache, table, cu_seq_lens, seq_starts, mut out) = unsafe {
        let table = args.block_table.cast();
        (
            opened.stream(stream)?,
            args.cache.pages(&config, layer.kv_dtype)?,
            tensor("block_table", table, DType::I32, &[args.batch, args.table_width], &[args.table_stride])?,
            tensor("cu_seq_lens", args.cu_seq_lens.cast(), DType::I32, &[batch_and_end], &[])?,
            (!args.seq_starts.is_null())
                .then(|| tensor("seq_starts", starts, DType::I32, &[args.batch], &[]))
                .transpose()?,
            tensor("out", args.out, layer.q_dtype, &[args.num_tokens, config.head_dim() as i64], &[args.out_stride])?,
        )
    };
    gather_cache(&stream, &cache, &table, &cu_seq_lens, seq_starts.as_ref(), layer.kv_scale, &mut out)
}

/// Enqueues the writing of new rows into their cache slots (vLLM's `concat_and_cache_mla`), rounded to nearest even and
/// saturating where the cache is fp8. May be captured.
///
/// `LW_ERROR_ARGUMENT`, `LW_ERROR_SHAPE`, `LW_ERROR_DTYPE` naming the argument, `LW_ERROR_UNSUPPORTED`, `LW_ERROR_COMPILE`, `LW_ERROR_DRIVER`.
///
/// # Safety
/// As `lw_decode`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lw_cache_write(
    device: *const lw_device,
    args: *const lw_cache_write_args,
    stream: *mut c_void,
) -> lw_status {
    guard(|| {
        // SAFETY: the caller's promises.
        unsafe {
            let device = device::device(device)?;
            let args = read_block("args", args)?;
            Ok(on!(device, opened => write(opened, &args, stream))?)
        }
    })
}

/// Enqueues the copying (and dequantising) of each sequence's cached rows into `out`, one sequence after another. May be captured.
///
/// Errors as `lw_cache_write`.
///
/// # Safety
/// As `lw_decode`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lw_cache_gather(
    device: *const lw_device,
    args: *const lw_cache_gather_args,
    stream: *mut c_void,
) -> lw_status {
    guard(|| {
        // SAFETY: the caller's promises.
        unsafe {
            let device = device::device(device)?;
            let args = read_block("args", args)?;
            Ok(on!(device, opened => gather(opened, &args, stream))?)
        }
    })
}
