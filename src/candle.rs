//! Decode attention for [candle](candle_core), on the CPU.
//!
//! [`CandleMla`] is one attention layer over candle tensors; queries, caches and outputs are read and written where they lie. Shapes,
//! types and meanings are those of [`DecodeArgs`] and [`KvCache`]; lengths are given as a slice, since an engine has them on the
//! host. `examples/candle_decoder.rs` is a whole decoder layer with it.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use latentwave::{MlaConfig, candle::CandleMla};
//!
//! # fn main() -> candle_core::Result<()> {
//! let config = MlaConfig::deepseek(16, 64); // 16 heads, pages of 64 tokens
//! let mla = CandleMla::new(config, DType::F32, DType::F32)?;
//! let kv_cache = Tensor::rand(-1f32, 1., (4, 64, 576), &Device::Cpu)?;
//! let q = Tensor::rand(-1f32, 1., (2, 1, 16, 576), &Device::Cpu)?;
//! let block_table = Tensor::new(&[[3u32, 0], [1, 2]], &Device::Cpu)?;
//! let out = mla.attend(&q, &kv_cache, &block_table, &[100, 7])?;
//! assert_eq!(out.dims(), [2, 1, 16, 512]);
//! # Ok(())
//! # }
//! ```

use std::sync::{Mutex, PoisonError};

use candle_core::{
    CpuStorage, CustomOp3, DType as CandleDType, InplaceOp3, Layout, Result, Shape, Tensor as CandleTensor,
};
use half::{bf16, f16};

use crate::backend::host::Host;
use crate::config::MlaConfig;
use crate::error::Error;
use crate::ops::{CacheWrite, DecodeArgs, KvCache, MlaDecode, check_batch, write_cache};
use crate::plan::SplitPolicy;
use crate::stream::Stream;
use crate::tensor::{DType, Tensor};
use crate::workspace::Workspace;

/// Decode attention of one layer shape over candle tensors.
pub struct CandleMla {
    decode: MlaDecode<Host>,
    /// Scratch grows to the largest step seen.
    workspace: Mutex<Workspace<Host>>,
    stream: Stream<Host>,
    policy: SplitPolicy,
    kv_scale: f32,
}

impl CandleMla {
    /// Attention with queries and outputs of `q_dtype` (f32, f16, bf16) over a cache of `kv_dtype` (those, or f8e4m3).
    ///
    /// # Errors
    /// As [`MlaDecode::new`].
    pub fn new(config: MlaConfig, q_dtype: CandleDType, kv_dtype: CandleDType) -> Result<Self> {
        let host = Host::new();
        let decode = MlaDecode::new(&host, config, dtype("q", q_dtype)?, dtype("kv_cache", kv_dtype)?).map_err(wrap)?;
        let workspace = Mutex::new(Workspace::new(&host, 1).map_err(wrap)?);
        let stream = Stream::new(&host).map_err(wrap)?;
        Ok(Self { decode, workspace, stream, policy: SplitPolicy::Auto, kv_scale: 1.0 })
    }

    /// The same with sequences split in another way.
    pub fn with_policy(self, policy: SplitPolicy) -> Self {
        Self { policy, ..self }
    }

    /// The same with a scale of an f8e4m3 cache: a cached value is its byte's times this.
    pub fn with_kv_scale(self, kv_scale: f32) -> Self {
        Self { kv_scale, ..self }
    }

    /// Attention of `q` `[batch, query_len, num_heads, kv_lora_rank + qk_rope_head_dim]`, absorbed latent part then rope part, over
    /// `kv_cache` `[num_pages, page_size, kv_lora_rank + qk_rope_head_dim]`. Gives `[batch, query_len, num_heads, kv_lora_rank]` of
    /// `q`'s type; gradients are not supported.
    ///
    /// `block_table` is u32 or i32 `[batch, table_width]`; `seq_lens` counts cached tokens per sequence, this step's own included, whose
    /// rows must have been [written](Self::write_cache). Several query tokens attend causally.
    ///
    /// # Errors
    /// A wrapped [`Error`]: [`Error::Shape`], [`Error::DType`], [`Error::Argument`] naming the tensor; [`Error::SeqLenOutOfRange`],
    /// [`Error::PageOutOfRange`].
    pub fn attend(
        &self,
        q: &CandleTensor,
        kv_cache: &CandleTensor,
        block_table: &CandleTensor,
        seq_lens: &[i32],
    ) -> Result<CandleTensor> {
        q.apply_op3_no_bwd(kv_cache, block_table, &Attend { mla: self, seq_lens })
    }

    /// Writes new rows `[num_tokens, kv_lora_rank + qk_rope_head_dim]` (normalised latent part, then rope part with its position) into
    /// their slots of `kv_cache`, in place. `slot_mapping` is i64 `[num_tokens]`: `page * page_size + entry`; negative slots are skipped.
    ///
    /// # Errors
    /// A wrapped [`Error`] naming the tensor.
    pub fn write_cache(&self, kv_cache: &CandleTensor, rows: &CandleTensor, slot_mapping: &CandleTensor) -> Result<()> {
        kv_cache.inplace_op3(rows, slot_mapping, &Write { mla: self })
    }
}

struct Attend<'a> {
    mla: &'a CandleMla,
    seq_lens: &'a [i32],
}

impl CustomOp3 for Attend<'_> {
    fn name(&self) -> &'static str {
        "latentwave-mla-decode"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        kv_cache: &CpuStorage,
        kv_layout: &Layout,
        table: &CpuStorage,
        table_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (batch, query_len, heads, _) = q_layout.shape().dims4()?;
        let shape = [batch, query_len, heads, self.mla.decode.config().kv_lora_rank];
        let len = shape.iter().product();
        let mut out = match q {
            CpuStorage::F32(_) => CpuStorage::F32(vec![0.0; len]),
            CpuStorage::F16(_) => CpuStorage::F16(vec![f16::ZERO; len]),
            CpuStorage::BF16(_) => CpuStorage::BF16(vec![bf16::ZERO; len]),
            other => return Err(unsupported("q", other)),
        };
        let out_layout = Layout::contiguous(shape.to_vec());
        // SAFETY: candle's layouts stay within their storages, which outlive the call: it waits for the work.
        let (q, kv_cache, table, mut out_view) = unsafe {
            let q = view("q", q, q_layout)?;
            let kv_cache = view("kv_cache", kv_cache, kv_layout)?;
            (q, kv_cache, view("block_table", table, table_layout)?, view("out", &mut out, &out_layout)?)
        };
        self.run(&q, &kv_cache, &table, &mut out_view, [batch, query_len]).map_err(wrap)?;
        Ok((out, shape.to_vec().into()))
    }
}

impl Attend<'_> {
    fn run(
        &self,
        q: &Tensor<Host>,
        kv_cache: &Tensor<Host>,
        block_table: &Tensor<Host>,
        out: &mut Tensor<Host>,
        [batch, query_len]: [usize; 2],
    ) -> crate::Result<()> {
        let CandleMla { decode, workspace, stream, policy, kv_scale } = self.mla;
        let (seq_lens, host) = (self.seq_lens, stream.backend());
        let kv_cache = KvCache::joined(kv_cache, decode.config())?;
        if seq_lens.len() != batch {
            return Err(Error::argument("seq_lens", format!("{} lengths for a batch of {batch}", seq_lens.len())));
        }
        if block_table.dtype() != DType::I32 {
            return Err(Error::DType { arg: "block_table", expected: &[DType::I32], got: block_table.dtype() });
        }
        // The table's rows as the host sees them.
        let table: Vec<i32> = match block_table.shape() {
            [rows, _] if *rows == batch => rows_of(block_table),
            got => {
                let expected = format!("[{batch}, table_width]");
                return Err(Error::Shape { arg: "block_table", expected, got: got.to_vec() });
            }
        };
        let width = block_table.shape()[1];
        let row = |seq: usize| &table[seq * width..][..width];
        check_batch(seq_lens, row, decode.config().page_size, kv_cache.num_pages(), usize::MAX)?;

        let longest = seq_lens.iter().copied().max().unwrap_or(0).max(1) as usize;
        let plan = decode.plan(batch, query_len, longest, *policy)?;
        let mut workspace = workspace.lock().unwrap_or_else(PoisonError::into_inner);
        workspace.reserve(0, &plan.decode().workspace_views())?;
        let args = DecodeArgs {
            q,
            kv_cache: &kv_cache,
            block_table: &Tensor::from_slice(host, [batch, width], &table)?,
            seq_lens: &Tensor::from_slice(host, [batch], seq_lens)?,
            out,
            lse: None,
            kv_scale: *kv_scale,
            causal: true,
        };
        decode.run(stream, &plan, &mut workspace, args)?;
        stream.synchronize()
    }
}

/// The elements of an i32 tensor `[rows, columns]` of the host, in order.
fn rows_of(tensor: &Tensor<Host>) -> Vec<i32> {
    let (shape, strides) = (tensor.shape(), tensor.strides());
    let at = |row: usize, column: usize| {
        let word = tensor.addr() as usize + 4 * (row * strides[0] + column * strides[1]);
        // SAFETY: the tensor is a live view of host memory, its elements are 32 bits wide, and these are its own indices.
        unsafe { (word as *const i32).read() }
    };
    (0..shape[0]).flat_map(|row| (0..shape[1]).map(move |column| at(row, column))).collect()
}

struct Write<'a> {
    mla: &'a CandleMla,
}

impl InplaceOp3 for Write<'_> {
    fn name(&self) -> &'static str {
        "latentwave-mla-write-cache"
    }

    fn cpu_fwd(
        &self,
        kv_cache: &mut CpuStorage,
        kv_layout: &Layout,
        rows: &CpuStorage,
        rows_layout: &Layout,
        slots: &CpuStorage,
        slots_layout: &Layout,
    ) -> Result<()> {
        let CandleMla { decode, stream, kv_scale, .. } = self.mla;
        let config = decode.config();
        // SAFETY: candle's layouts stay within their storages, which outlive the call: it waits for the work.
        let (kv_cache, rows, slot_mapping) = unsafe {
            let kv_cache = view("kv_cache", kv_cache, kv_layout)?;
            (kv_cache, view("rows", rows, rows_layout)?, view("slot_mapping", slots, slots_layout)?)
        };
        let write = || {
            let kv_cache = KvCache::joined(&kv_cache, config)?;
            match rows.shape() {
                [_, width] if *width == config.head_dim() => {}
                got => {
                    let expected = format!("[num_tokens, {}]", config.head_dim());
                    return Err(Error::Shape { arg: "rows", expected, got: got.to_vec() });
                }
            }
            let k_pe = match config.qk_rope_head_dim {
                0 => None,
                _ => Some(rows.columns(config.kv_lora_rank..config.head_dim())?),
            };
            let write = CacheWrite {
                kv_c: &rows.columns(0..config.kv_lora_rank)?,
                k_pe: k_pe.as_ref(),
                slot_mapping: &slot_mapping,
                kv_scale: *kv_scale,
            };
            write_cache(stream, &kv_cache, &write)?;
            stream.synchronize()
        };
        write().map_err(wrap)
    }
}

fn wrap(error: Error) -> candle_core::Error {
    candle_core::Error::wrap(error)
}

fn dtype(arg: &'static str, dtype: CandleDType) -> Result<DType> {
    Ok(match dtype {
        CandleDType::F32 => DType::F32,
        CandleDType::F16 => DType::F16,
        CandleDType::BF16 => DType::BF16,
        CandleDType::F8E4M3 => DType::Fp8E4m3,
        other => return Err(wrap(Error::argument(arg, format!("{other:?}: f32, f16 and bf16 are possible")))),
    })
}

fn unsupported(arg: &'static str, storage: &CpuStorage) -> candle_core::Error {
    use candle_core::backend::BackendStorage;
    wrap(Error::argument(arg, format!("{:?} is not a type that this op takes", storage.dtype())))
}

/// A candle tensor as one of this crate's, over the same memory.
///
/// # Safety
/// `layout` stays within `storage`, which outlives the result; it is written through only if `storage` is borrowed mutably.
unsafe fn view(arg: &'static str, storage: impl Memory, layout: &Layout) -> Result<Tensor<Host>> {
    let (start, dtype) = storage.memory(arg)?;
    let addr = start + (layout.start_offset() * dtype.size()) as u64;
    // SAFETY: the caller's promise.
    unsafe { Tensor::from_raw(addr, dtype, layout.dims(), layout.stride()).map_err(wrap) }
}

/// Where a storage begins, and what it holds.
trait Memory {
    fn memory(self, arg: &'static str) -> Result<(u64, DType)>;
}

macro_rules! memory {
    ($storage:ty, $pointer:ident) => {
        impl Memory for $storage {
            fn memory(self, arg: &'static str) -> Result<(u64, DType)> {
                Ok(match self {
                    CpuStorage::F32(data) => (data.$pointer() as u64, DType::F32),
                    CpuStorage::F16(data) => (data.$pointer() as u64, DType::F16),
                    CpuStorage::BF16(data) => (data.$pointer() as u64, DType::BF16),
                    CpuStorage::F8E4M3(data) => (data.$pointer() as u64, DType::Fp8E4m3),
                    // candle's indices are u32; a page id past i32 is refused as negative.
                    CpuStorage::U32(data) => (data.$pointer() as u64, DType::I32),
                    CpuStorage::I32(data) => (data.$pointer() as u64, DType::I32),
                    CpuStorage::I64(data) => (data.$pointer() as u64, DType::I64),
                    other => return Err(unsupported(arg, other)),
                })
            }
        }
    };
}
memory!(&CpuStorage, as_ptr);
memory!(&mut CpuStorage, as_mut_ptr);
