//! Tensors: an address, a shape, strides and an element type, owned or borrowed.
//!
//! A [`Tensor`] is cheap to clone and to cut ([`Tensor::narrow`], [`Tensor::columns`]): the pieces share one buffer, which is freed when
//! the last of them and the last graph that uses it are gone. A tensor over a caller's raw device pointer
//! ([`Tensor::from_raw`]) frees nothing.

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use bytemuck::Pod;
use half::{bf16, f16};

use crate::backend::Backend;
use crate::error::{Error, Result};

/// Element types.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum DType {
    /// 32-bit float.
    F32,
    /// IEEE 16-bit float.
    F16,
    /// bfloat16.
    BF16,
    /// OCP float8 e4m3 (`e4m3fn`): no infinities, largest value 448. NVIDIA, gfx950, gfx12.
    Fp8E4m3,
    /// float8 e4m3 with one zero and one NaN, largest value 240. gfx942.
    Fp8E4m3Fnuz,
    /// Bytes: the rows of [`CacheLayout::Fp8DsMla`](crate::kernel::params::CacheLayout::Fp8DsMla).
    U8,
    /// 32-bit integer: lengths, block tables.
    I32,
    /// 64-bit integer: cache slots.
    I64,
}

impl DType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::Fp8E4m3 | Self::Fp8E4m3Fnuz | Self::U8 => 1,
            Self::F16 | Self::BF16 => 2,
            Self::F32 | Self::I32 => 4,
            Self::I64 => 8,
        }
    }

    /// Whether the type is an 8-bit float, and so carries a scale.
    pub const fn is_fp8(self) -> bool {
        matches!(self, Self::Fp8E4m3 | Self::Fp8E4m3Fnuz)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::Fp8E4m3 => "fp8_e4m3",
            Self::Fp8E4m3Fnuz => "fp8_e4m3fnuz",
            Self::U8 => "u8",
            Self::I32 => "i32",
            Self::I64 => "i64",
        })
    }
}

mod sealed {
    pub trait Sealed {}
}

/// Host types that a tensor can be filled from and read into.
pub trait Element: Pod + Send + Sync + sealed::Sealed {
    /// The tensor element type with this layout. A `u8` also fills and reads the 8-bit floats.
    const DTYPE: DType;
}

macro_rules! element {
    ($($rust:ty => $dtype:ident),*) => {$(
        impl sealed::Sealed for $rust {}
        impl Element for $rust {
            const DTYPE: DType = DType::$dtype;
        }
    )*};
}
element!(f32 => F32, f16 => F16, bf16 => BF16, u8 => U8, i32 => I32, i64 => I64);

/// Most dimensions that a tensor can have.
pub const MAX_RANK: usize = 4;

/// What frees a tensor's memory when the last that holds it is gone: a backend's buffer, or another library's tensor.
pub(crate) type Owner = Arc<dyn Any + Send + Sync>;

/// A tensor on one device.
pub struct Tensor<B: Backend> {
    owner: Option<Owner>,
    addr: u64,
    dtype: DType,
    rank: usize,
    shape: [usize; MAX_RANK],
    strides: [usize; MAX_RANK],
    backend: PhantomData<B>,
}

impl<B: Backend> Clone for Tensor<B> {
    fn clone(&self) -> Self {
        Self { owner: self.owner.clone(), ..*self }
    }
}

impl<B: Backend> fmt::Debug for Tensor<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Tensor<{}>({} {:?} strides {:?} at {:#x})",
            B::NAME,
            self.dtype,
            self.shape(),
            self.strides(),
            self.addr
        )
    }
}

/// Row-major strides of a shape.
fn contiguous(shape: &[usize]) -> Result<[usize; MAX_RANK]> {
    let mut strides = [0; MAX_RANK];
    let mut step = 1_usize;
    for (stride, &extent) in strides[..shape.len()].iter_mut().zip(shape).rev() {
        *stride = step;
        step =
            step.checked_mul(extent.max(1)).ok_or_else(|| Error::argument("shape", format!("{shape:?} overflows")))?;
    }
    Ok(strides)
}

/// Number of elements of a shape.
fn elements(shape: &[usize]) -> Result<usize> {
    let count = shape.iter().try_fold(1_usize, |count, &extent| count.checked_mul(extent));
    count.ok_or_else(|| Error::argument("shape", format!("{shape:?} overflows")))
}

/// The end of a tensor's memory, if its elements are aligned and neither their number nor their addresses overflow.
fn reach(addr: u64, dtype: DType, shape: &[usize], strides: &[usize]) -> Option<u64> {
    let mut extents = shape.iter().map(|extent| (*extent).max(1));
    let count = extents.clone().try_fold(1_usize, usize::checked_mul)?;
    let last = strides.iter().try_fold(0_usize, |last, stride| {
        let reach = stride.checked_mul(extents.next()? - 1)?;
        last.checked_add(reach)
    })?;
    let elements = last.checked_add(1)?.max(count);
    let bytes = elements.checked_mul(dtype.size()).filter(|&bytes| isize::try_from(bytes).is_ok())?;
    addr.checked_add(bytes as u64).filter(|_| addr.is_multiple_of(dtype.size() as u64))
}

/// Host memory for `len` elements.
fn host_memory<T>(len: usize) -> Result<Vec<T>> {
    let mut data = Vec::new();
    data.try_reserve_exact(len).map_err(|_| Error::OutOfMemory {
        backend: "host",
        bytes: len.saturating_mul(size_of::<T>()),
        purpose: "the host's copy of a tensor",
    })?;
    Ok(data)
}

impl<B: Backend> Tensor<B> {
    /// Allocates a contiguous tensor. Its content is undefined until written.
    ///
    /// # Errors
    /// [`Error::Argument`] for more than four dimensions or a size past `usize`; [`Error::OutOfMemory`].
    pub fn empty<const N: usize>(backend: &B, shape: [usize; N], dtype: DType) -> Result<Self> {
        if N > MAX_RANK {
            return Err(Error::argument("shape", format!("{N} dimensions, at most {MAX_RANK} are possible")));
        }
        let strides = contiguous(&shape)?;
        let mut full = [0; MAX_RANK];
        full[..N].copy_from_slice(&shape);
        let bytes = shape
            .iter()
            .try_fold(dtype.size(), |bytes, &extent| bytes.checked_mul(extent))
            .ok_or_else(|| Error::argument("shape", format!("{shape:?} overflows")))?;
        let buffer = Arc::new(backend.alloc(bytes.max(1), "a tensor")?);
        let addr = backend.addr(&buffer);
        Ok(Self { owner: Some(buffer), addr, dtype, rank: N, shape: full, strides, backend: PhantomData })
    }

    /// Allocates a tensor of zeros.
    ///
    /// # Errors
    /// As [`Tensor::empty`]; [`Error::Driver`].
    pub fn zeros<const N: usize>(backend: &B, shape: [usize; N], dtype: DType) -> Result<Self> {
        let tensor = Self::empty(backend, shape, dtype)?;
        tensor.fill_bytes(backend, 0)?;
        Ok(tensor)
    }

    /// Allocates a tensor and copies `data` into it, row-major.
    ///
    /// # Errors
    /// As [`Tensor::empty`]; [`Error::Shape`] if the lengths differ.
    pub fn from_slice<T: Element, const N: usize>(backend: &B, shape: [usize; N], data: &[T]) -> Result<Self> {
        let tensor = Self::empty(backend, shape, T::DTYPE)?;
        tensor.write(backend, data)?;
        Ok(tensor)
    }

    /// As [`Tensor::from_slice`], from bytes of any element type (8-bit floats, for one).
    ///
    /// # Errors
    /// As [`Tensor::from_slice`].
    pub fn from_bytes<const N: usize>(backend: &B, shape: [usize; N], dtype: DType, bytes: &[u8]) -> Result<Self> {
        let tensor = Self::empty(backend, shape, dtype)?;
        tensor.write_bytes(backend, bytes)?;
        Ok(tensor)
    }

    /// Allocates a tensor and fills element `i` (row-major) with `f(i)`.
    ///
    /// # Errors
    /// As [`Tensor::empty`]; [`Error::OutOfMemory`] for the host's copy.
    pub fn from_fn<T: Element, const N: usize>(
        backend: &B,
        shape: [usize; N],
        f: impl FnMut(usize) -> T,
    ) -> Result<Self> {
        let len = elements(&shape)?;
        let mut data = host_memory(len)?;
        data.extend((0..len).map(f));
        Self::from_slice(backend, shape, &data)
    }

    /// Borrows device memory that the caller owns.
    ///
    /// # Errors
    /// [`Error::Argument`] if `shape` and `strides` differ in length, have more than four dimensions or reach past what can be
    /// addressed, or if `addr` is not aligned to the element's size.
    ///
    /// # Safety
    /// Every element that shape and strides reach from `addr` is memory of the device that the tensor is used with, and outlives
    /// the tensor, its clones, and every graph captured with them.
    pub unsafe fn from_raw(addr: u64, dtype: DType, shape: &[usize], strides: &[usize]) -> Result<Self> {
        if shape.len() != strides.len() || shape.len() > MAX_RANK {
            return Err(Error::argument(
                "shape",
                format!("{shape:?} with strides {strides:?}: equal lengths up to {MAX_RANK} are possible"),
            ));
        }
        reach(addr, dtype, shape, strides).ok_or_else(|| {
            let what = format!("{shape:?} with strides {strides:?} from {addr:#x}");
            Error::argument("shape", format!("{what}: past what can be addressed, or not aligned to {dtype}"))
        })?;
        let (mut s, mut t) = ([0; MAX_RANK], [0; MAX_RANK]);
        s[..shape.len()].copy_from_slice(shape);
        t[..shape.len()].copy_from_slice(strides);
        Ok(Self { owner: None, addr, dtype, rank: shape.len(), shape: s, strides: t, backend: PhantomData })
    }

    /// Device address of the first element.
    pub fn addr(&self) -> u64 {
        self.addr
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Extents.
    pub fn shape(&self) -> &[usize] {
        &self.shape[..self.rank]
    }

    /// Elements from one index to the next, per dimension.
    pub fn strides(&self) -> &[usize] {
        &self.strides[..self.rank]
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape().iter().product()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes from the first element to the end of the last.
    pub fn span_bytes(&self) -> usize {
        if self.is_empty() {
            return 0;
        }
        let last: usize = self.shape().iter().zip(self.strides()).map(|(extent, stride)| (extent - 1) * stride).sum();
        (last + 1) * self.dtype.size()
    }

    /// Whether elements lie row-major without gaps.
    pub fn is_contiguous(&self) -> bool {
        if self.is_empty() {
            return true;
        }
        let mut step = 1;
        for (&extent, &stride) in self.shape().iter().zip(self.strides()).rev() {
            if extent != 1 && stride != step {
                return false;
            }
            step *= extent;
        }
        true
    }

    /// The same tensor, whose memory is freed when the last that holds `owner` is gone.
    #[cfg(feature = "dlpack")]
    pub(crate) fn owned_by(self, owner: Owner) -> Self {
        Self { owner: Some(owner), ..self }
    }

    /// The owner of the memory, if it is known.
    pub(crate) fn owner(&self) -> Option<&Owner> {
        self.owner.as_ref()
    }

    /// The part with index `range` along dimension `dim`, sharing the memory.
    ///
    /// # Errors
    /// [`Error::Argument`] if the dimension or the range is not there.
    pub fn narrow(&self, dim: usize, range: Range<usize>) -> Result<Self> {
        if dim >= self.rank || range.start > range.end || range.end > self.shape[dim] {
            return Err(Error::argument("range", format!("{range:?} of dimension {dim} of shape {:?}", self.shape())));
        }
        let mut part = self.clone();
        part.addr += (range.start * self.strides[dim] * self.dtype.size()) as u64;
        part.shape[dim] = range.len();
        Ok(part)
    }

    /// The part with index `range` along the last dimension: the latent or the rope part of a cache, for instance.
    ///
    /// # Errors
    /// As [`Tensor::narrow`].
    pub fn columns(&self, range: Range<usize>) -> Result<Self> {
        self.narrow(self.rank.saturating_sub(1), range)
    }

    /// The same contiguous memory under another shape.
    ///
    /// # Errors
    /// [`Error::Shape`] if the tensor is not contiguous or the number of elements differs.
    pub fn reshape<const N: usize>(&self, shape: [usize; N]) -> Result<Self> {
        let count = elements(&shape)?;
        if N > MAX_RANK || !self.is_contiguous() || count != self.len() {
            return Err(Error::Shape {
                arg: "self",
                expected: format!(
                    "a contiguous tensor of {} elements to view as {shape:?}",
                    shape.iter().product::<usize>()
                ),
                got: self.shape().to_vec(),
            });
        }
        let mut view = self.clone();
        view.rank = N;
        view.shape = [0; MAX_RANK];
        view.shape[..N].copy_from_slice(&shape);
        view.strides = contiguous(&shape)?;
        Ok(view)
    }

    fn check_host_copy(&self, bytes: usize) -> Result<()> {
        if !self.is_contiguous() || bytes != self.len() * self.dtype.size() {
            return Err(Error::Shape {
                arg: "self",
                expected: format!("a contiguous tensor of {bytes} bytes"),
                got: self.shape().to_vec(),
            });
        }
        Ok(())
    }

    fn check_element<T: Element>(&self) -> Result<()> {
        let bytes_for_fp8 = T::DTYPE == DType::U8 && self.dtype.is_fp8();
        if T::DTYPE != self.dtype && !bytes_for_fp8 {
            return Err(Error::Argument {
                arg: "data",
                problem: format!("host elements are {}, the tensor is {}", T::DTYPE, self.dtype),
            });
        }
        Ok(())
    }

    /// Copies host data into a contiguous tensor and waits for it.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Argument`] for another element type, [`Error::Driver`].
    pub fn write<T: Element>(&self, backend: &B, data: &[T]) -> Result<()> {
        self.check_element::<T>()?;
        self.write_bytes(backend, bytemuck::cast_slice(data))
    }

    /// As [`Tensor::write`], from bytes.
    ///
    /// # Errors
    /// As [`Tensor::write`].
    pub fn write_bytes(&self, backend: &B, bytes: &[u8]) -> Result<()> {
        self.check_host_copy(bytes.len())?;
        if bytes.is_empty() {
            return Ok(());
        }
        let stream = backend.create_stream()?;
        // SAFETY: the tensor is contiguous and has exactly these bytes, checked above.
        unsafe { backend.upload(&stream, self.addr, bytes)? };
        backend.synchronize(&stream)
    }

    /// Sets every byte of a contiguous tensor, to poison it for instance, and waits.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Driver`].
    pub fn fill_bytes(&self, backend: &B, byte: u8) -> Result<()> {
        let bytes = self.len() * self.dtype.size();
        self.check_host_copy(bytes)?;
        if bytes == 0 {
            return Ok(());
        }
        let stream = backend.create_stream()?;
        // SAFETY: the tensor is contiguous and has exactly these bytes, checked above.
        unsafe { backend.fill(&stream, self.addr, byte, bytes)? };
        backend.synchronize(&stream)
    }

    /// Copies a contiguous tensor to the host. Work enqueued on other streams must have been waited for.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Argument`] for another element type, [`Error::Driver`].
    pub fn to_vec<T: Element>(&self, backend: &B) -> Result<Vec<T>> {
        self.check_element::<T>()?;
        self.check_host_copy(self.len() * self.dtype.size())?;
        let mut data = host_memory(self.len())?;
        data.resize(self.len(), T::zeroed());
        if data.is_empty() {
            return Ok(data);
        }
        let stream = backend.create_stream()?;
        // SAFETY: the tensor is contiguous and has exactly these bytes, checked above.
        unsafe { backend.download(&stream, self.addr, bytemuck::cast_slice_mut(&mut data))? };
        Ok(data)
    }
}
