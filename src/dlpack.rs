//! Tensors from and to other libraries, without copies, by [DLPack](https://dmlc.github.io/dlpack/latest/).
//!
//! [`Tensor::from_dlpack`] takes over a managed tensor (of a Python capsule, of another crate) and calls its deleter when the last
//! clone and the last graph that use it are gone; [`Tensor::to_dlpack`] hands one out that keeps the memory until its own deleter is
//! called. Both take either kind: [`DLManagedTensorVersioned`] (DLPack 1) and [`DLManagedTensor`]. The structures are this
//! crate's own because the ABI is fixed; pointers of another crate's may be cast.
//!
//! DLPack says nothing about streams: work that was enqueued on a tensor before it changes hands must be waited for, or be on one
//! stream with what follows.

use std::ffi::c_void;
use std::ptr::NonNull;

use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::tensor::{DType, MAX_RANK, Tensor};

/// Version of the structures here. Another major version may be laid out otherwise.
pub const VERSION: DLPackVersion = DLPackVersion { major: 1, minor: 1 };

/// Version of a [`DLManagedTensorVersioned`].
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DLPackVersion {
    /// Changes with the layout.
    pub major: u32,
    /// Changes when types and devices are added.
    pub minor: u32,
}

/// Where memory lies.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DLDevice {
    /// Kind of device: [`CPU`], [`CUDA`], [`ROCM`] or another.
    pub device_type: i32,
    /// Index among those of its kind.
    pub device_id: i32,
}

/// Ordinary memory.
pub const CPU: i32 = 1;
/// Memory of an NVIDIA GPU.
pub const CUDA: i32 = 2;
/// Pinned host memory of CUDA.
pub const CUDA_HOST: i32 = 3;
/// Memory of an AMD GPU.
pub const ROCM: i32 = 10;
/// Pinned host memory of HIP.
pub const ROCM_HOST: i32 = 11;
/// Managed memory of CUDA.
pub const CUDA_MANAGED: i32 = 13;

/// Element type.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DLDataType {
    /// Kind of number.
    pub code: u8,
    /// Bits of one.
    pub bits: u8,
    /// Numbers of one element, 1 but for vector types.
    pub lanes: u16,
}

/// A tensor that says nothing of its owner.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct DLTensor {
    /// Begin of the memory.
    pub data: *mut c_void,
    /// Its device.
    pub device: DLDevice,
    /// Dimensions.
    pub ndim: i32,
    /// Element type.
    pub dtype: DLDataType,
    /// `ndim` extents.
    pub shape: *mut i64,
    /// `ndim` strides in elements; NULL for row-major without gaps.
    pub strides: *mut i64,
    /// Bytes from `data` to the first element.
    pub byte_offset: u64,
}

/// A tensor and how to give it back.
#[repr(C)]
#[derive(Debug)]
pub struct DLManagedTensor {
    /// The tensor.
    pub dl_tensor: DLTensor,
    /// The producer's own.
    pub manager_ctx: *mut c_void,
    /// Gives the tensor back; called once. NULL if there is nothing to be done.
    pub deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

/// A tensor, how to give it back, and what may be done with it.
#[repr(C)]
#[derive(Debug)]
pub struct DLManagedTensorVersioned {
    /// Version of this structure.
    pub version: DLPackVersion,
    /// The producer's own.
    pub manager_ctx: *mut c_void,
    /// Gives the tensor back; called once. NULL if there is nothing to be done.
    pub deleter: Option<unsafe extern "C" fn(*mut Self)>,
    /// Bit 0: read-only. Bit 1: a copy that the consumer alone holds.
    pub flags: u64,
    /// The tensor.
    pub dl_tensor: DLTensor,
}

/// How a managed tensor is given back.
type Deleter<M> = unsafe extern "C" fn(*mut M);

mod sealed {
    use std::ffi::c_void;

    use super::{DLManagedTensor, DLManagedTensorVersioned, DLPackVersion, DLTensor, Deleter, VERSION};

    /// What both kinds of managed tensor have.
    pub trait Sealed: Sized + 'static {
        fn new(tensor: DLTensor, context: *mut c_void, deleter: Deleter<Self>) -> Self;
        fn version(&self) -> DLPackVersion;
        fn parts(&self) -> (DLTensor, *mut c_void, Option<Deleter<Self>>);
    }

    impl Sealed for DLManagedTensor {
        fn new(dl_tensor: DLTensor, manager_ctx: *mut c_void, deleter: Deleter<Self>) -> Self {
            Self { dl_tensor, manager_ctx, deleter: Some(deleter) }
        }

        fn version(&self) -> DLPackVersion {
            VERSION
        }

        fn parts(&self) -> (DLTensor, *mut c_void, Option<Deleter<Self>>) {
            (self.dl_tensor, self.manager_ctx, self.deleter)
        }
    }

    impl Sealed for DLManagedTensorVersioned {
        fn new(dl_tensor: DLTensor, manager_ctx: *mut c_void, deleter: Deleter<Self>) -> Self {
            Self { version: VERSION, manager_ctx, deleter: Some(deleter), flags: 0, dl_tensor }
        }

        fn version(&self) -> DLPackVersion {
            self.version
        }

        fn parts(&self) -> (DLTensor, *mut c_void, Option<Deleter<Self>>) {
            (self.dl_tensor, self.manager_ctx, self.deleter)
        }
    }
}

/// Either kind of managed tensor.
pub trait Managed: sealed::Sealed {}

impl Managed for DLManagedTensor {}
impl Managed for DLManagedTensorVersioned {}

/// Element types as DLPack has them: code and bits.
const TYPES: [(u8, u8, DType); 8] = [
    (2, 32, DType::F32),
    (2, 16, DType::F16),
    (4, 16, DType::BF16),
    (10, 8, DType::Fp8E4m3),
    (11, 8, DType::Fp8E4m3Fnuz),
    (1, 8, DType::U8),
    (0, 32, DType::I32),
    (0, 64, DType::I64),
];

/// Kinds of memory that a backend's kernels reach, its own first.
fn kinds(backend: &str) -> &'static [i32] {
    match backend {
        "cuda" => &[CUDA, CUDA_MANAGED],
        "rocm" => &[ROCM],
        _ => &[CPU, CUDA_HOST, ROCM_HOST],
    }
}

/// Another library's tensor, given back when dropped.
struct Foreign<M: Managed>(NonNull<M>);

// SAFETY: it is only held and given back, and DLPack's deleters may be called by any thread.
unsafe impl<M: Managed> Send for Foreign<M> {}
// SAFETY: as above.
unsafe impl<M: Managed> Sync for Foreign<M> {}

impl<M: Managed> Drop for Foreign<M> {
    fn drop(&mut self) {
        // SAFETY: it was taken over by `from_dlpack`, whose caller promised that it can be given back once.
        unsafe {
            let (.., deleter) = self.0.as_ref().parts();
            if let Some(delete) = deleter {
                delete(self.0.as_ptr());
            }
        }
    }
}

/// A tensor handed out: what its deleter frees.
struct Exported<B: Backend, M: Managed> {
    managed: Option<M>,
    shape: [i64; MAX_RANK],
    strides: [i64; MAX_RANK],
    _tensor: Tensor<B>,
}

unsafe extern "C" fn delete<B: Backend, M: Managed>(managed: *mut M) {
    // SAFETY: `to_dlpack` made both, and a deleter is called once.
    drop(unsafe {
        let (_, context, _) = (*managed).parts();
        Box::from_raw(context.cast::<Exported<B, M>>())
    });
}

fn host_size(arg: &'static str, value: i64) -> Result<usize> {
    usize::try_from(value).map_err(|_| Error::argument(arg, format!("{value}: no negative one is possible")))
}

impl<B: Backend> Tensor<B> {
    /// Takes over another library's tensor, whatever comes of it: where this fails, it has been given back. Nothing is copied.
    ///
    /// # Errors
    /// [`Error::Argument`] for another major version, another device, an element type that there is none for here, more than
    /// [`MAX_RANK`] dimensions, negative strides, and an address that is not aligned to the element.
    ///
    /// # Safety
    /// `managed` is a valid managed tensor that nobody else gives back, and may be given back by any thread. One that is marked
    /// read-only must not be used as an output.
    pub unsafe fn from_dlpack<M: Managed>(backend: &B, managed: NonNull<M>) -> Result<Self> {
        let owner = Foreign(managed);
        // SAFETY: the caller's promise; it lives until it is given back.
        let managed = unsafe { owner.0.as_ref() };
        let DLPackVersion { major, minor } = managed.version();
        if major != VERSION.major {
            return Err(Error::argument(
                "managed",
                format!("DLPack {major}.{minor}, where {} is known", VERSION.major),
            ));
        }
        let (DLTensor { data, device, ndim, dtype, shape, strides, byte_offset }, ..) = managed.parts();
        let info = backend.device();
        let on_host = B::NAME == "host";
        if !kinds(B::NAME).contains(&device.device_type) || !(on_host || device.device_id as usize == info.index) {
            let problem = format!("on {device:?}, where {} device {} is used", info.backend, info.index);
            return Err(Error::argument("managed", problem));
        }
        let known = TYPES.iter().find(|known| (known.0, known.1, 1) == (dtype.code, dtype.bits, dtype.lanes));
        let &(_, _, dtype) = known.ok_or_else(|| {
            Error::argument("managed", format!("{dtype:?} is no element type of {:?}", TYPES.map(|known| known.2)))
        })?;
        let rank = host_size("ndim", ndim.into())?;
        if rank > MAX_RANK {
            return Err(Error::argument("ndim", format!("{rank}: at most {MAX_RANK} are possible")));
        }
        let (mut extents, mut steps, mut packed) = ([0; MAX_RANK], [0; MAX_RANK], 1_usize);
        for dim in (0..rank).rev() {
            // SAFETY: a valid tensor has `ndim` of both, if strides are there.
            let stride = unsafe {
                extents[dim] = host_size("shape", *shape.add(dim))?;
                (!strides.is_null()).then(|| *strides.add(dim))
            };
            steps[dim] = stride.map_or(Ok(packed), |stride| host_size("strides", stride))?;
            packed = packed.saturating_mul(extents[dim].max(1));
        }
        let addr = (data.addr() as u64).checked_add(byte_offset);
        let addr = addr.ok_or_else(|| Error::argument("byte_offset", format!("{byte_offset}: overflows")))?;
        // SAFETY: a valid tensor's memory lives until it is given back, which the owner does.
        let tensor = unsafe { Self::from_raw(addr, dtype, &extents[..rank], &steps[..rank])? };
        Ok(tensor.owned_by(std::sync::Arc::new(owner)))
    }

    /// Hands the tensor out to another library, which must call its deleter once. The memory stays until then. Nothing is copied.
    ///
    /// # Errors
    /// [`Error::Argument`] if an extent or a stride is past what DLPack can say.
    pub fn to_dlpack<M: Managed>(&self, backend: &B) -> Result<NonNull<M>> {
        let int =
            |value: usize| i64::try_from(value).map_err(|_| Error::argument("shape", format!("{value}: too large")));
        let (mut shape, mut strides) = ([0; MAX_RANK], [0; MAX_RANK]);
        for (dim, (&extent, &stride)) in self.shape().iter().zip(self.strides()).enumerate() {
            (shape[dim], strides[dim]) = (int(extent)?, int(stride)?);
        }
        let dtype = TYPES.iter().find(|known| known.2 == self.dtype());
        let &(code, bits, _) = dtype.ok_or_else(|| Error::argument("dtype", "DLPack has no such type"))?;
        let exported = Exported::<B, M> { managed: None, shape, strides, _tensor: self.clone() };
        let exported = Box::leak(Box::new(exported));
        let context = (&raw mut *exported).cast();
        let tensor = DLTensor {
            data: std::ptr::with_exposed_provenance_mut(self.addr() as usize),
            device: DLDevice { device_type: kinds(B::NAME)[0], device_id: backend.device().index as i32 },
            ndim: self.shape().len() as i32,
            dtype: DLDataType { code, bits, lanes: 1 },
            shape: exported.shape.as_mut_ptr(),
            strides: exported.strides.as_mut_ptr(),
            byte_offset: 0,
        };
        Ok(NonNull::from(exported.managed.insert(M::new(tensor, context, delete::<B, M>))))
    }
}
