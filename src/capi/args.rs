//! Argument blocks as C hands them over, and what becomes of them: sizes, element types, tensors, layers, caches.

use std::ffi::c_void;
use std::mem::{MaybeUninit, size_of};
use std::ptr::NonNull;

use crate::backend::Backend;
use crate::config::MlaConfig;
use crate::error::{Error, Result};
use crate::fp8::ds_mla;
use crate::ops::KvCache;
use crate::plan::SplitPolicy;
use crate::tensor::{DType, MAX_RANK, Tensor};

/// Element types. 0 is none, so that a field that was forgotten shows.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum lw_dtype {
    /// 32-bit float (queries, outputs and caches on the host only).
    LW_F32 = 1,
    /// IEEE 16-bit float.
    LW_F16 = 2,
    /// bfloat16.
    LW_BF16 = 3,
    /// OCP float8 e4m3 (`torch.float8_e4m3fn`), caches only.
    LW_FP8_E4M3 = 4,
    /// float8 e4m3 of gfx942 (`torch.float8_e4m3fnuz`), caches only.
    LW_FP8_E4M3FNUZ = 5,
    /// 656-byte rows of vLLM's `fp8_ds_mla` (latent 512, rope 64), caches on the host only.
    LW_FP8_DS_MLA = 6,
}

/// How sequences are split over the device.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum lw_split {
    /// Balanced by the lengths of each step.
    LW_SPLIT_AUTO = 0,
    /// Balanced likewise, with splits down to `split_value` tokens.
    LW_SPLIT_MIN_TOKENS = 1,
    /// Exactly `split_value` equal splits of every sequence.
    LW_SPLIT_FIXED = 2,
    /// Splits of exactly `split_value` tokens: a row's result is bit-equal alone, in any batch, and as a verify row.
    LW_SPLIT_INVARIANT = 3,
}

/// One attention layer as the kernels see it: queries already absorbed into latent space, one latent row per cached token.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct lw_layer {
    /// Query heads on this device, 1 to 65536.
    pub num_heads: i64,
    /// Width of the latent part of a cached row, and of an output row.
    pub kv_lora_rank: i64,
    /// Width of the rotary part of a cached row; 0 for models without.
    pub qk_rope_head_dim: i64,
    /// Tokens per page of the cache, from 1.
    pub page_size: i64,
    /// For `split`; 0 with `LW_SPLIT_AUTO`.
    pub split_value: i64,
    /// An `lw_split`.
    pub split: i32,
    /// An `lw_dtype`: of queries, outputs, and new rows of the cache.
    pub q_dtype: i32,
    /// An `lw_dtype`: of the cache.
    pub kv_dtype: i32,
    /// Softmax scale: `1 / sqrt(qk_nope_head_dim + qk_rope_head_dim)` of the model, times its YaRN factor if it has one. There is no
    /// usual value; 0 is refused.
    pub sm_scale: f32,
    /// Logit soft cap `c`, `x -> c * tanh(x / c)`; 0 for none.
    pub softcap: f32,
    /// Scale of an fp8 cache: a cached value is its byte's times this. 0 and 1 mean 1, which other caches must have.
    pub kv_scale: f32,
}

/// The pages of one layer's cache.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct lw_kv_cache {
    /// `[num_pages, page_size, kv_lora_rank + qk_rope_head_dim]`, or the latent part alone where `k_rope` is given.
    pub kv: *mut c_void,
    /// `[num_pages, page_size, qk_rope_head_dim]`; NULL where `kv` holds both parts.
    pub k_rope: *mut c_void,
    /// Pages.
    pub num_pages: i64,
    /// From page to page and from token to token of `kv`, in elements; 0 for packed.
    pub kv_strides: [i64; 2],
    /// The same of `k_rope`.
    pub k_rope_strides: [i64; 2],
}

/// A structure that begins with its size, all of whose fields may be zero.
///
/// # Safety
/// `repr(C)`, the first field is `struct_size: usize`, and bytes of zero make a valid value.
pub(super) unsafe trait Block: Copy {
    /// Bytes of its first version: when a field is appended, the size before it stays here.
    const LEAST: usize = size_of::<Self>();
}

/// `block!(NAME)` says that a structure of this ABI begins with its size.
macro_rules! block {
    ($($name:ident),+) => {$(
        // SAFETY: `repr(C)`, made of numbers and raw pointers, and the assertion.
        unsafe impl $crate::capi::args::Block for $name {}
        const _: () = assert!(std::mem::offset_of!($name, struct_size) == 0);
    )+};
}
pub(super) use block;

/// No structure of any version is larger: a size beyond is one that was not set.
const LARGEST: usize = 4096;

/// Gives an argument's error the name that C knows the argument by.
pub(super) fn naming(arg: &'static str) -> impl FnOnce(Error) -> Error {
    move |error| match error {
        Error::Argument { problem, .. } => Error::Argument { arg, problem },
        other => other,
    }
}

fn null(arg: &'static str) -> Error {
    Error::argument(arg, "NULL")
}

/// Where a call writes a result.
pub(super) fn out_pointer<T>(arg: &'static str, pointer: *mut T) -> Result<NonNull<T>> {
    let pointer = NonNull::new(pointer).ok_or_else(|| null(arg))?;
    match pointer.is_aligned() {
        true => Ok(pointer),
        false => Err(Error::argument(arg, format!("{pointer:p} is not aligned to {}", align_of::<T>()))),
    }
}

/// The size that a block says it has.
///
/// # Safety
/// `pointer` is NULL or a size can be read there.
unsafe fn block_size<T: Block>(arg: &'static str, pointer: *const T) -> Result<usize> {
    if pointer.is_null() {
        return Err(null(arg));
    }
    // SAFETY: the caller's promise; a block begins with its size.
    let size = unsafe { pointer.cast::<usize>().read_unaligned() };
    if !(T::LEAST..=LARGEST).contains(&size) {
        let problem =
            format!("struct_size is {size}; set it to sizeof the structure, {} in this version", size_of::<T>());
        return Err(Error::argument(arg, problem));
    }
    Ok(size)
}

/// Reads a block of this version or another.
///
/// # Safety
/// `pointer` is NULL or as many bytes can be read there as its `struct_size` says.
pub(super) unsafe fn read_block<T: Block>(arg: &'static str, pointer: *const T) -> Result<T> {
    // SAFETY: the caller's promise.
    let size = unsafe { block_size(arg, pointer) }?;
    let known = size.min(size_of::<T>());
    let bytes = pointer.cast::<u8>();
    // SAFETY: the caller's promise; what the block lacks stays zero.
    let (later, block) = unsafe {
        let mut block = MaybeUninit::<T>::zeroed();
        bytes.copy_to_nonoverlapping(block.as_mut_ptr().cast(), known);
        (std::slice::from_raw_parts(bytes.add(known), size - known), block.assume_init())
    };
    match later.iter().all(|&byte| byte == 0) {
        true => Ok(block),
        false => Err(Error::argument(arg, "sets fields that this version of the library does not know; leave them 0")),
    }
}

/// Writes a result into a block of this version or another; its size stays.
///
/// # Safety
/// `pointer` is NULL or as many bytes can be read and written there as its `struct_size` says.
pub(super) unsafe fn out_block<T: Block>(arg: &'static str, pointer: *mut T, value: T) -> Result<()> {
    // SAFETY: the caller's promise; the size comes first and is skipped.
    unsafe {
        let known = block_size(arg, pointer)?.min(size_of::<T>());
        let (from, to) = ((&raw const value).cast::<u8>(), pointer.cast::<u8>());
        let first = size_of::<usize>();
        from.add(first).copy_to_nonoverlapping(to.add(first), known - first);
    }
    Ok(())
}

/// A caller's array on the host.
///
/// # Safety
/// `pointer` is NULL or has `len` elements, which stay as they are for as long as the result is used.
pub(super) unsafe fn array<'a, T>(arg: &'static str, pointer: *const T, len: usize) -> Result<&'a [T]> {
    if len == 0 {
        return Ok(&[]);
    }
    let pointer = out_pointer(arg, pointer.cast_mut())?;
    if len > isize::MAX as usize / size_of::<T>() {
        return Err(Error::argument(arg, format!("{len} elements overflow")));
    }
    // SAFETY: the caller's promise; not NULL, aligned, and of a length that can be.
    Ok(unsafe { std::slice::from_raw_parts(pointer.as_ptr(), len) })
}

/// A count or an extent.
pub(super) fn size(arg: &'static str, value: i64) -> Result<usize> {
    usize::try_from(value).map_err(|_| Error::argument(arg, format!("{value}: negative")))
}

/// An element type.
pub(super) fn dtype(arg: &'static str, number: i32) -> Result<DType> {
    use lw_dtype::*;
    let types = [
        (LW_F32, DType::F32),
        (LW_F16, DType::F16),
        (LW_BF16, DType::BF16),
        (LW_FP8_E4M3, DType::Fp8E4m3),
        (LW_FP8_E4M3FNUZ, DType::Fp8E4m3Fnuz),
        (LW_FP8_DS_MLA, DType::U8),
    ];
    let known = types.into_iter().find(|(known, _)| *known as i32 == number);
    known.map(|(_, dtype)| dtype).ok_or_else(|| Error::argument(arg, format!("{number} is no lw_dtype")))
}

/// How sequences are split.
fn policy(split: i32, value: i64) -> Result<SplitPolicy> {
    use lw_split::*;
    let count = size("split_value", value)?;
    let policies = [
        (LW_SPLIT_AUTO, SplitPolicy::Auto),
        (LW_SPLIT_MIN_TOKENS, SplitPolicy::MinTokens(count)),
        (LW_SPLIT_FIXED, SplitPolicy::Fixed(count)),
        (LW_SPLIT_INVARIANT, SplitPolicy::Invariant(count)),
    ];
    let known = policies.into_iter().find(|(known, _)| *known as i32 == split);
    known.map(|(_, policy)| policy).ok_or_else(|| Error::argument("split", format!("{split} is no lw_split")))
}

/// A caller's memory as a tensor whose last dimension is packed. `strides` are those of the other dimensions; 0 means packed.
///
/// # Safety
/// Every element that shape and strides reach is memory of the device that the tensor is used with, and outlives its use.
pub(super) unsafe fn tensor<B: Backend>(
    arg: &'static str,
    pointer: *const c_void,
    dtype: DType,
    shape: &[i64],
    strides: &[i64],
) -> Result<Tensor<B>> {
    let (mut extents, mut steps) = ([0; MAX_RANK], [1; MAX_RANK]);
    // From the last dimension on: `packed` is the stride that follows from the dimensions below.
    let mut packed = 1_usize;
    for dim in (0..shape.len()).rev() {
        extents[dim] = size(arg, shape[dim])?;
        steps[dim] = match strides.get(dim) {
            Some(0) | None => packed,
            Some(&stride) => size(arg, stride)?,
        };
        packed = steps[dim].saturating_mul(extents[dim].max(1));
    }
    let (extents, steps) = (&extents[..shape.len()], &steps[..shape.len()]);
    if pointer.is_null() && !extents.contains(&0) {
        return Err(null(arg));
    }
    // SAFETY: the caller's promise.
    unsafe { Tensor::from_raw(pointer.addr() as u64, dtype, extents, steps) }.map_err(naming(arg))
}

/// A layer, checked.
#[derive(Debug, Clone, Copy)]
pub(super) struct Layer {
    pub(super) config: MlaConfig,
    pub(super) q_dtype: DType,
    pub(super) kv_dtype: DType,
    pub(super) kv_scale: f32,
    pub(super) policy: SplitPolicy,
}

impl lw_layer {
    /// # Errors
    /// [`Error::Argument`] naming the field.
    pub(super) fn check(&self) -> Result<Layer> {
        let config = MlaConfig {
            num_heads: size("num_heads", self.num_heads)?,
            kv_lora_rank: size("kv_lora_rank", self.kv_lora_rank)?,
            qk_rope_head_dim: size("qk_rope_head_dim", self.qk_rope_head_dim)?,
            page_size: size("page_size", self.page_size)?,
            sm_scale: self.sm_scale,
            softcap: self.softcap,
        };
        config.validate()?;
        if self.sm_scale == 0.0 {
            return Err(Error::argument("sm_scale", "0: there is no usual value, it follows from the model"));
        }
        Ok(Layer {
            config,
            q_dtype: dtype("q_dtype", self.q_dtype)?,
            kv_dtype: dtype("kv_dtype", self.kv_dtype)?,
            kv_scale: self.kv_scale(),
            policy: policy(self.split, self.split_value)?,
        })
    }

    /// The scale of cached values, 1 where none is set.
    pub(super) fn kv_scale(&self) -> f32 {
        if self.kv_scale == 0.0 { 1.0 } else { self.kv_scale }
    }
}

impl lw_kv_cache {
    /// The cache of a layer.
    ///
    /// # Errors
    /// [`Error::Argument`], [`Error::Shape`], [`Error::DType`].
    ///
    /// # Safety
    /// As [`tensor`].
    pub(super) unsafe fn pages<B: Backend>(&self, config: &MlaConfig, kv_dtype: DType) -> Result<KvCache<B>> {
        let [rank, rope] = [config.kv_lora_rank, config.qk_rope_head_dim];
        let part = |arg, pointer, width: usize, strides: &[i64; 2]| {
            let shape = [self.num_pages, config.page_size as i64, width as i64];
            // SAFETY: the caller's promise.
            unsafe { tensor(arg, pointer, kv_dtype, &shape, strides) }
        };
        if kv_dtype == DType::U8 {
            return KvCache::ds_mla(&part("kv", self.kv, ds_mla::ROW_BYTES, &self.kv_strides)?);
        }
        if self.k_rope.is_null() {
            return KvCache::joined(&part("kv", self.kv, rank + rope, &self.kv_strides)?, config);
        }
        let latent = part("kv", self.kv, rank, &self.kv_strides)?;
        KvCache::split(&latent, Some(&part("k_rope", self.k_rope, rope, &self.k_rope_strides)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Host;

    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Old {
        struct_size: usize,
        a: i64,
    }

    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct New {
        struct_size: usize,
        a: i64,
        b: i64,
    }

    block!(Old);
    // SAFETY: as `block!` says.
    unsafe impl Block for New {
        const LEAST: usize = size_of::<Old>();
    }

    #[test]
    fn blocks_of_other_versions_are_read_as_far_as_they_are_known() {
        let old = Old { struct_size: 16, a: 5 };
        let new = New { struct_size: 24, a: 5, b: 0 };
        // SAFETY: each block is as large as it says.
        unsafe {
            assert_eq!(read_block::<New>("x", (&raw const old).cast()).unwrap(), New { struct_size: 16, a: 5, b: 0 });
            assert_eq!(read_block::<Old>("x", (&raw const new).cast()).unwrap(), Old { struct_size: 24, a: 5 });
            let unknown = New { b: 1, ..new };
            assert!(read_block::<Old>("x", (&raw const unknown).cast()).is_err());
            for struct_size in [0, 8, 15, LARGEST + 1, usize::MAX] {
                let wrong = New { struct_size, ..new };
                assert!(read_block::<New>("x", &raw const wrong).is_err(), "{struct_size}");
            }
            assert!(read_block::<New>("x", std::ptr::null()).is_err());

            let mut out = Old { struct_size: 16, a: 0 };
            out_block::<New>("x", (&raw mut out).cast(), New { struct_size: 0, a: 7, b: 8 }).unwrap();
            assert_eq!(out, Old { struct_size: 16, a: 7 });
        }
    }

    #[test]
    fn absurd_shapes_and_addresses_are_refused() {
        let at = |addr: usize| std::ptr::without_provenance::<c_void>(addr);
        // SAFETY: nothing is read.
        let make = |pointer, shape: &[i64], strides: &[i64]| unsafe {
            tensor::<Host>("x", pointer, DType::F32, shape, strides)
        };
        assert_eq!(make(at(64), &[2, 3, 4], &[0, 0]).unwrap().strides(), [12, 4, 1]);
        assert_eq!(make(at(64), &[2, 3, 4], &[0, 10]).unwrap().strides(), [30, 10, 1]);
        assert_eq!(make(at(64), &[2, 3, 4], &[5, 0]).unwrap().strides(), [5, 4, 1]);
        assert!(make(at(0), &[0, 3, 4], &[0, 0]).is_ok(), "nothing is there to be pointed at");
        let wrong: [(usize, &[i64], &[i64]); 10] = [
            (0, &[2, 3], &[0]),
            (2, &[2, 3], &[0]),
            (64, &[-1, 3], &[0]),
            (64, &[2, 3], &[-4]),
            (64, &[i64::MAX, 3], &[0]),
            (64, &[i64::MAX / 2, 1], &[1]),
            (64, &[2, 3], &[i64::MAX]),
            (64, &[1 << 31, 1 << 31, 4], &[1, 1]),
            (usize::MAX - 3, &[2, 3], &[0]),
            (64, &[i64::MIN, i64::MIN], &[i64::MIN]),
        ];
        for (addr, shape, strides) in wrong {
            assert!(make(at(addr), shape, strides).is_err(), "{addr} {shape:?} {strides:?}");
        }
    }
}
