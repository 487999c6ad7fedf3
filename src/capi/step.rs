//! One step of a session, as the engine's callback sees it.

use std::ffi::c_void;

use super::args::{block, lw_kv_cache, out_block, read_block, tensor};
use super::status::{guard, lw_status};
use crate::backend::GraphBackend;
use crate::error::{Error, Result};
use crate::session::Step;
use crate::tensor::DType;

/// A step while it is being enqueued, eagerly or into a graph. It belongs to the callback that it was given to.
pub struct lw_step {
    _opaque: [u8; 0],
}

impl lw_step {
    /// A step as C holds it.
    pub(super) fn handle(step: &mut &mut dyn Erased) -> *mut Self {
        (&raw mut *step).cast()
    }
}

/// What to enqueue in a step. When a graph serves a batch, sequences past the batch are padding: their lengths are 0 and their
/// slots -1, so they write nothing to the cache and their outputs are 0.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct lw_step_info {
    /// `sizeof(lw_step_info)`, set by the caller.
    pub struct_size: usize,
    /// Rows to enqueue work for: decode tokens, padding included, then the engine's own prefill tokens.
    pub num_tokens: i64,
    /// Decoding sequences, padding included.
    pub num_seqs: i64,
    /// Query tokens per decoding sequence; the first `num_seqs * query_len` rows are theirs.
    pub query_len: i64,
    /// Columns of `block_table`.
    pub table_width: i64,
    /// The raw stream that everything must be enqueued on.
    pub stream: *mut c_void,
    /// Cached tokens per sequence, `[num_seqs]`, on the device.
    pub seq_lens: *const i32,
    /// Page ids, `[num_seqs, table_width]`, on the device.
    pub block_table: *const i32,
    /// Cache slot of each decode token, `[num_seqs * query_len]`, on the device.
    pub slot_mapping: *const i64,
}

/// Attention of one layer in a step. Clear it, then fill it in.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct lw_step_decode_args {
    /// `sizeof(lw_step_decode_args)`.
    pub struct_size: usize,
    /// The layer's pages.
    pub cache: lw_kv_cache,
    /// `[num_seqs * query_len, num_heads, kv_lora_rank + qk_rope_head_dim]` of `q_dtype`.
    pub q: *const c_void,
    /// `[num_seqs * query_len, num_heads, kv_lora_rank]` of `q_dtype`.
    pub out: *mut c_void,
    /// Natural-log LSE, `[num_seqs * query_len, num_heads]`; NULL if it is not wanted.
    pub lse: *mut f32,
    /// From token to token and head to head of `q`, in elements; 0 for packed.
    pub q_strides: [i64; 2],
    /// The same of `out`.
    pub out_strides: [i64; 2],
    /// From token to token of `lse`, in elements; 0 for packed.
    pub lse_stride: i64,
}

/// New rows of one layer in a step. Clear it, then fill it in.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct lw_step_write_cache_args {
    /// `sizeof(lw_step_write_cache_args)`.
    pub struct_size: usize,
    /// The layer's pages.
    pub cache: lw_kv_cache,
    /// New latent rows, `[num_seqs * query_len, kv_lora_rank]` of `q_dtype`.
    pub kv_c: *const c_void,
    /// New rope rows, `[num_seqs * query_len, qk_rope_head_dim]` of `q_dtype`; NULL for a model without rope.
    pub k_pe: *const c_void,
    /// From row to row of `kv_c`, in elements; 0 for packed.
    pub kv_c_stride: i64,
    /// The same of `k_pe`.
    pub k_pe_stride: i64,
}

block!(lw_step_info, lw_step_decode_args, lw_step_write_cache_args);

/// A step whose backend is known at run time.
pub(super) trait Erased {
    fn info(&self) -> lw_step_info;
    /// # Safety
    /// As [`lw_step_decode`].
    unsafe fn decode(&mut self, args: &lw_step_decode_args) -> Result<()>;
    /// # Safety
    /// As [`lw_step_write_cache`].
    unsafe fn write_cache(&mut self, args: &lw_step_write_cache_args) -> Result<()>;
}

impl<B: GraphBackend> Erased for Step<'_, B> {
    fn info(&self) -> lw_step_info {
        let raw = self.stream().backend().raw_stream(self.stream().raw());
        let at = |addr: u64| std::ptr::with_exposed_provenance(addr as usize);
        lw_step_info {
            struct_size: 0,
            num_tokens: self.num_tokens() as i64,
            num_seqs: self.num_seqs() as i64,
            query_len: self.query_len() as i64,
            table_width: self.block_table().shape()[1] as i64,
            stream: std::ptr::without_provenance_mut(raw as usize),
            seq_lens: at(self.seq_lens().addr()),
            block_table: at(self.block_table().addr()),
            slot_mapping: std::ptr::with_exposed_provenance(self.slot_mapping().addr() as usize),
        }
    }

    unsafe fn decode(&mut self, args: &lw_step_decode_args) -> Result<()> {
        let (config, rows) = (*self.layer().config(), self.num_decode_tokens() as i64);
        let (q_dtype, heads) = (self.layer().q_dtype(), config.num_heads as i64);
        // SAFETY: the caller's promises.
        let (q, mut out, mut lse, cache) = unsafe {
            let lse = (!args.lse.is_null())
                .then(|| tensor("lse", args.lse.cast(), DType::F32, &[rows, heads], &[args.lse_stride]))
                .transpose()?;
            (
                tensor("q", args.q, q_dtype, &[rows, heads, config.head_dim() as i64], &args.q_strides)?,
                tensor("out", args.out, q_dtype, &[rows, heads, config.kv_lora_rank as i64], &args.out_strides)?,
                lse,
                args.cache.pages(&config, self.layer().kv_dtype())?,
            )
        };
        Step::decode(self, &q, &cache, &mut out, lse.as_mut())
    }

    unsafe fn write_cache(&mut self, args: &lw_step_write_cache_args) -> Result<()> {
        let (config, rows) = (*self.layer().config(), self.num_decode_tokens() as i64);
        let q_dtype = self.layer().q_dtype();
        // SAFETY: the caller's promises.
        let (kv_c, k_pe, cache) = unsafe {
            let [latent, rope] = [config.kv_lora_rank as i64, config.qk_rope_head_dim as i64];
            (
                tensor("kv_c", args.kv_c, q_dtype, &[rows, latent], &[args.kv_c_stride])?,
                (!args.k_pe.is_null())
                    .then(|| tensor("k_pe", args.k_pe, q_dtype, &[rows, rope], &[args.k_pe_stride]))
                    .transpose()?,
                args.cache.pages(&config, self.layer().kv_dtype())?,
            )
        };
        Step::write_cache(self, &kv_c, k_pe.as_ref(), &cache)
    }
}

/// A caller's step.
///
/// # Safety
/// `step` is NULL or was given to the callback that is running, which does not use it twice at once.
unsafe fn step<'a>(step: *mut lw_step) -> Result<&'a mut dyn Erased> {
    // SAFETY: the caller's promise; `lw_step::handle` made it of a reference to this type.
    let step = unsafe { step.cast::<&mut dyn Erased>().as_mut() };
    step.map(|step| &mut **step).ok_or_else(|| Error::argument("step", "NULL"))
}

/// What to enqueue. `info->struct_size` must be set.
///
/// # Safety
/// `step` was given to the running callback; `info` is NULL or can be read and written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lw_step_get_info(step: *mut lw_step, info: *mut lw_step_info) -> lw_status {
    // SAFETY: the caller's promises.
    guard(|| Ok(unsafe { out_block("info", info, self::step(step)?.info()) }?))
}

/// Enqueues attention of this step's decode tokens over one layer's cache. The first call of a step enqueues the schedule, too, which
/// all its layers share.
///
/// Errors as `lw_decode`.
///
/// # Safety
/// `step` was given to the running callback, `args` is NULL or a block of its size. Every tensor is memory of the device of the
/// shape and strides given, aligned to its elements, which stays so as long as the session.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lw_step_decode(step: *mut lw_step, args: *const lw_step_decode_args) -> lw_status {
    // SAFETY: the caller's promises.
    guard(|| Ok(unsafe { self::step(step)?.decode(&read_block("args", args)?) }?))
}

/// Enqueues the writing of this step's decode tokens into one layer's cache.
///
/// Errors as `lw_cache_write`.
///
/// # Safety
/// As `lw_step_decode`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lw_step_write_cache(step: *mut lw_step, args: *const lw_step_write_cache_args) -> lw_status {
    // SAFETY: the caller's promises.
    guard(|| Ok(unsafe { self::step(step)?.write_cache(&read_block("args", args)?) }?))
}
