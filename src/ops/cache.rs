//! The paged latent cache: its views, its writer and its reader.

use super::check;
use crate::backend::Backend;
use crate::config::MlaConfig;
use crate::error::{Error, Result};
use crate::kernel::params::{CacheGatherParams, CacheLayout, CacheWriteParams};
use crate::kernel::{Entry, Launch, Params, Variant};
use crate::stream::Stream;
use crate::tensor::{DType, Tensor};

/// Latent width, rope width and row bytes of [`CacheLayout::Fp8DsMla`].
const DS_MLA: (usize, usize, usize) = (512, 64, 656);

/// Element types that rows come from and go to.
const ROW_TYPES: &[DType] = &[DType::F32, DType::F16, DType::BF16];

/// The pages of one layer: a latent row and a rope row per cached token. Cloning shares the memory.
#[derive(Debug, Clone)]
pub struct KvCache<B: Backend> {
    latent: Tensor<B>,
    rope: Option<Tensor<B>>,
    layout: CacheLayout,
}

impl<B: Backend> KvCache<B> {
    /// One tensor `[num_pages, page_size, kv_lora_rank + qk_rope_head_dim]` (vLLM, FlashMLA). Pages and tokens may be strided.
    ///
    /// # Errors
    /// [`Error::Shape`] if the tensor does not fit the configuration.
    pub fn joined(cache: &Tensor<B>, config: &MlaConfig) -> Result<Self> {
        match cache.shape() {
            [_, page_size, width] if *page_size == config.page_size && *width == config.head_dim() => {}
            got => {
                return Err(Error::Shape {
                    arg: "kv_cache",
                    expected: format!("[num_pages, {}, {}]", config.page_size, config.head_dim()),
                    got: got.to_vec(),
                });
            }
        }
        let rope = match config.qk_rope_head_dim {
            0 => None,
            _ => Some(cache.columns(config.kv_lora_rank..config.head_dim())?),
        };
        Self::split(&cache.columns(0..config.kv_lora_rank)?, rope.as_ref())
    }

    /// Two tensors `[num_pages, page_size, kv_lora_rank]` and `[num_pages, page_size, qk_rope_head_dim]` (FlashInfer), or the first
    /// alone for a model without rope.
    ///
    /// # Errors
    /// [`Error::Shape`] if they have not three dimensions, differ in pages or have pages of no token; [`Error::DType`]; [`Error::Argument`] for rows with gaps.
    pub fn split(latent: &Tensor<B>, rope: Option<&Tensor<B>>) -> Result<Self> {
        const TYPES: &[DType] = &[DType::F32, DType::F16, DType::BF16, DType::Fp8E4m3, DType::Fp8E4m3Fnuz];
        check::dtype("kv_cache", latent, TYPES)?;
        check::dense_rows("kv_cache", latent)?;
        if !matches!(latent.shape(), [_, (1..), _]) {
            let expected = "[num_pages, page_size >= 1, kv_lora_rank]".to_owned();
            return Err(Error::Shape { arg: "kv_cache", expected, got: latent.shape().to_vec() });
        }
        if let Some(rope) = rope {
            check::dense_rows("k_rope", rope)?;
            if rope.dtype() != latent.dtype() || rope.shape().len() != 3 || rope.shape()[..2] != latent.shape()[..2] {
                let expected =
                    format!("{} [{}, {}, qk_rope_head_dim]", latent.dtype(), latent.shape()[0], latent.shape()[1]);
                return Err(Error::Shape { arg: "k_rope", expected, got: rope.shape().to_vec() });
            }
        }
        Ok(Self { latent: latent.clone(), rope: rope.cloned(), layout: CacheLayout::Plain })
    }

    /// One tensor of bytes `[num_pages, page_size, 656]`: vLLM's `fp8_ds_mla` rows (latent 512, rope 64).
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::DType`], [`Error::Argument`].
    pub fn ds_mla(cache: &Tensor<B>) -> Result<Self> {
        check::dtype("kv_cache", cache, &[DType::U8])?;
        check::dense_rows("kv_cache", cache)?;
        // Their rope values are of 16 bits.
        check::aligned("kv_cache", cache, 2)?;
        match cache.shape() {
            [_, (1..), width] if *width == DS_MLA.2 => {
                Ok(Self { latent: cache.clone(), rope: None, layout: CacheLayout::Fp8DsMla })
            }
            got => Err(Error::Shape {
                arg: "kv_cache",
                expected: format!("[num_pages, page_size >= 1, {}]", DS_MLA.2),
                got: got.to_vec(),
            }),
        }
    }

    /// Allocates pages of zeros for a layer.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Argument`].
    pub fn zeros(backend: &B, num_pages: usize, config: &MlaConfig, dtype: DType) -> Result<Self> {
        match dtype {
            DType::U8 => Self::ds_mla(&Tensor::zeros(backend, [num_pages, config.page_size, DS_MLA.2], dtype)?),
            _ => {
                Self::joined(&Tensor::zeros(backend, [num_pages, config.page_size, config.head_dim()], dtype)?, config)
            }
        }
    }

    /// Pages.
    pub fn num_pages(&self) -> usize {
        self.latent.shape()[0]
    }

    /// Tokens per page.
    pub fn page_size(&self) -> usize {
        self.latent.shape()[1]
    }

    /// Element type; [`DType::U8`] for `fp8_ds_mla` rows.
    pub fn dtype(&self) -> DType {
        self.latent.dtype()
    }

    /// How a row's bytes are laid out.
    pub fn layout(&self) -> CacheLayout {
        self.layout
    }

    /// Width of the latent part.
    pub fn kv_lora_rank(&self) -> usize {
        match self.layout {
            CacheLayout::Plain => self.latent.shape()[2],
            CacheLayout::Fp8DsMla => DS_MLA.0,
        }
    }

    /// Width of the rope part.
    pub fn rope_dim(&self) -> usize {
        match self.layout {
            CacheLayout::Plain => self.rope.as_ref().map_or(0, |rope| rope.shape()[2]),
            CacheLayout::Fp8DsMla => DS_MLA.1,
        }
    }

    /// The latent part (the whole row for `fp8_ds_mla`).
    pub fn latent(&self) -> &Tensor<B> {
        &self.latent
    }

    /// The rope part, where it is a tensor of its own.
    pub fn rope(&self) -> Option<&Tensor<B>> {
        self.rope.as_ref()
    }

    pub(super) fn addresses(&self) -> CacheAddresses {
        let strides = |tensor: &Tensor<B>| [tensor.strides()[0] as i64, tensor.strides()[1] as i64];
        CacheAddresses {
            kv: self.latent.addr(),
            kv_strides: strides(&self.latent),
            k_rope: self.rope.as_ref().map_or(0, Tensor::addr),
            rope_strides: self.rope.as_ref().map_or([0, 0], strides),
        }
    }
}

/// Where a cache lies, as the parameter blocks hold it.
pub(super) struct CacheAddresses {
    pub(super) kv: u64,
    pub(super) kv_strides: [i64; 2],
    pub(super) k_rope: u64,
    pub(super) rope_strides: [i64; 2],
}

/// Inputs of [`write_cache`].
#[derive(Debug)]
pub struct CacheWrite<'a, B: Backend> {
    /// New latent rows, `[>= num_tokens, kv_lora_rank]`, f32, f16 or bf16.
    pub kv_c: &'a Tensor<B>,
    /// New rope rows, `[>= num_tokens, qk_rope_head_dim]`, of the same type; `None` for a model without rope.
    pub k_pe: Option<&'a Tensor<B>>,
    /// Slot of each row, i64 `[num_tokens]`: `page * page_size + entry`; a negative slot is skipped
    /// (padding), and so is one past the cache.
    pub slot_mapping: &'a Tensor<B>,
    /// Scale of an fp8 cache: the byte is the value over the scale, rounded to nearest even, saturating. 1 for others.
    pub kv_scale: f32,
}

fn variant<B: Backend>(entry: Entry, rows: DType, cache: &KvCache<B>) -> Variant {
    Variant {
        kv_dtype: cache.dtype(),
        kv_lora_rank: cache.kv_lora_rank() as u32,
        rope_dim: cache.rope_dim() as u32,
        threads: 256,
        ..Variant::simple(entry, rows)
    }
}

/// Writes new rows into their cache slots (vLLM's `concat_and_cache_mla`).
///
/// # Errors
/// [`Error::Shape`], [`Error::DType`], [`Error::Argument`] naming the argument; what the backend's launch returns.
pub fn write_cache<B: Backend>(stream: &Stream<B>, cache: &KvCache<B>, write: &CacheWrite<'_, B>) -> Result<()> {
    let CacheWrite { kv_c, k_pe, slot_mapping, kv_scale } = *write;
    check::dtype("kv_c", kv_c, ROW_TYPES)?;
    check::dense_rows("kv_c", kv_c)?;
    check::dtype("slot_mapping", slot_mapping, &[DType::I64])?;
    check::contiguous("slot_mapping", slot_mapping)?;
    check::kv_scale(kv_scale, cache.dtype())?;
    let num_tokens = match slot_mapping.shape() {
        [num_tokens] => *num_tokens,
        got => {
            return Err(Error::Shape { arg: "slot_mapping", expected: "[num_tokens]".to_owned(), got: got.to_vec() });
        }
    };
    let rows = |arg, tensor: &Tensor<B>, width: usize| match tensor.shape() {
        [rows, got] if *rows >= num_tokens && *got == width => Ok(tensor.strides()[0] as i64),
        got => Err(Error::Shape { arg, expected: format!("[>= {num_tokens}, {width}]"), got: got.to_vec() }),
    };
    let kv_c_stride = rows("kv_c", kv_c, cache.kv_lora_rank())?;
    let k_pe_stride = match (k_pe, cache.rope_dim()) {
        (None, 0) => 0,
        (Some(k_pe), width) if width > 0 => {
            check::dense_rows("k_pe", k_pe)?;
            if k_pe.dtype() != kv_c.dtype() {
                return Err(Error::argument("k_pe", format!("{} beside a kv_c of {}", k_pe.dtype(), kv_c.dtype())));
            }
            rows("k_pe", k_pe, width)?
        }
        (given, width) => {
            let given = if given.is_some() { "given" } else { "missing" };
            return Err(Error::argument("k_pe", format!("{given}, but the cache's rope width is {width}")));
        }
    };
    if num_tokens == 0 {
        return Ok(());
    }
    let rope = cache.rope.as_ref().unwrap_or(&cache.latent);
    for (arg, source) in [("kv_c", Some(kv_c)), ("k_pe", k_pe), ("slot_mapping", Some(slot_mapping))] {
        if let Some(source) = source {
            check::disjoint(arg, source, &[("kv_cache", &cache.latent), ("k_rope", rope)])?;
        }
    }

    let at = cache.addresses();
    let params = CacheWriteParams {
        kv_c: kv_c.addr(),
        k_pe: k_pe.map_or(0, Tensor::addr),
        slot_mapping: slot_mapping.addr(),
        kv: at.kv,
        k_rope: at.k_rope,
        kv_c_stride,
        k_pe_stride,
        kv_stride_page: at.kv_strides[0],
        kv_stride_token: at.kv_strides[1],
        rope_stride_page: at.rope_strides[0],
        rope_stride_token: at.rope_strides[1],
        num_pages: cache.num_pages() as i64,
        num_tokens: check::int("slot_mapping", num_tokens)?,
        kv_lora_rank: check::int("kv_cache", cache.kv_lora_rank())?,
        rope_dim: check::int("kv_cache", cache.rope_dim())?,
        page_size: check::int("kv_cache", cache.page_size())?,
        layout: cache.layout as i32,
        kv_scale,
    };
    let variant = variant(Entry::CacheWrite, kv_c.dtype(), cache);
    let kernel = stream.backend().prepare(&variant)?;
    let launch = Launch {
        grid: [num_tokens as u32, 1, 1],
        threads: variant.threads,
        shared_bytes: 0,
        dependent: true,
        cluster: 1,
    };
    stream.retain(&[Some(kv_c), k_pe, Some(slot_mapping), Some(&cache.latent), cache.rope.as_ref()]);
    // SAFETY: shapes and types were checked against each other above; slots outside the cache are skipped by the kernel.
    unsafe { stream.launch(&kernel, &launch, &Params::CacheWrite(params)) }
}

/// Copies (and dequantises) each sequence's cached rows into `out`, one sequence after another.
///
/// `cu_seq_lens` is i32 `[batch + 1]`, ascending from 0, and gives each sequence's first row of `out` `[num_tokens, kv_lora_rank +
/// qk_rope_head_dim]`; `seq_starts`, if given, i32 `[batch]`, the first cached token to copy of each.
///
/// # Errors
/// [`Error::Shape`], [`Error::DType`], [`Error::Argument`] naming the argument; what the backend's launch returns.
pub fn gather_cache<B: Backend>(
    stream: &Stream<B>,
    cache: &KvCache<B>,
    block_table: &Tensor<B>,
    cu_seq_lens: &Tensor<B>,
    seq_starts: Option<&Tensor<B>>,
    kv_scale: f32,
    out: &mut Tensor<B>,
) -> Result<()> {
    check::dtype("block_table", block_table, &[DType::I32])?;
    check::dense_rows("block_table", block_table)?;
    check::dtype("cu_seq_lens", cu_seq_lens, &[DType::I32])?;
    check::contiguous("cu_seq_lens", cu_seq_lens)?;
    check::dtype("out", out, ROW_TYPES)?;
    check::dense_rows("out", out)?;
    check::kv_scale(kv_scale, cache.dtype())?;
    let [batch, table_width] = *block_table.shape() else {
        let expected = "[batch, table_width]".to_owned();
        return Err(Error::Shape { arg: "block_table", expected, got: block_table.shape().to_vec() });
    };
    check::shape("cu_seq_lens", cu_seq_lens, &[batch + 1])?;
    if let Some(starts) = seq_starts {
        check::dtype("seq_starts", starts, &[DType::I32])?;
        check::contiguous("seq_starts", starts)?;
        check::shape("seq_starts", starts, &[batch])?;
    }
    let width = cache.kv_lora_rank() + cache.rope_dim();
    let num_tokens = match out.shape() {
        [rows, got] if *got == width => *rows,
        got => return Err(Error::Shape { arg: "out", expected: format!("[num_tokens, {width}]"), got: got.to_vec() }),
    };
    let rope = cache.rope.as_ref().unwrap_or(&cache.latent);
    check::disjoint("out", out, &[("kv_cache", &cache.latent), ("k_rope", rope)])?;
    if num_tokens == 0 || batch == 0 {
        return Ok(());
    }

    let at = cache.addresses();
    let params = CacheGatherParams {
        kv: at.kv,
        k_rope: at.k_rope,
        block_table: block_table.addr(),
        cu_seq_lens: cu_seq_lens.addr(),
        seq_starts: seq_starts.map_or(0, Tensor::addr),
        out: out.addr(),
        kv_stride_page: at.kv_strides[0],
        kv_stride_token: at.kv_strides[1],
        rope_stride_page: at.rope_strides[0],
        rope_stride_token: at.rope_strides[1],
        table_stride: block_table.strides()[0] as i64,
        out_stride: out.strides()[0] as i64,
        num_pages: cache.num_pages() as i64,
        batch: check::int("block_table", batch)?,
        num_tokens: check::int("out", num_tokens)?,
        kv_lora_rank: check::int("kv_cache", cache.kv_lora_rank())?,
        rope_dim: check::int("kv_cache", cache.rope_dim())?,
        page_size: check::int("kv_cache", cache.page_size())?,
        table_width: check::int("block_table", table_width)?,
        layout: cache.layout as i32,
        kv_scale,
    };
    let variant = variant(Entry::CacheGather, out.dtype(), cache);
    let kernel = stream.backend().prepare(&variant)?;
    let launch = Launch {
        grid: [num_tokens as u32, 1, 1],
        threads: variant.threads,
        shared_bytes: 0,
        dependent: false,
        cluster: 1,
    };
    let tensors =
        [Some(&cache.latent), cache.rope.as_ref(), Some(block_table), Some(cu_seq_lens), seq_starts, Some(&*out)];
    stream.retain(&tensors);
    // SAFETY: shapes and types were checked above; the kernel clamps rows to `num_tokens` and skips pages outside the cache.
    unsafe { stream.launch(&kernel, &launch, &Params::CacheGather(params)) }
}
