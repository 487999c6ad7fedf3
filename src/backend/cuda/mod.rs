//! NVIDIA GPUs. The driver and NVRTC are opened at run time, so a build needs no CUDA and a machine without it gets an error.
//!
//! `probe -> context -> prepare -> launch -> capture -> replay`: `driver.rs` opens the library, `device.rs` holds the context
//! and the calls under memory and streams, `module.rs` loads and launches, `tensor_map.rs` describes the cache to bulk copies, `graph.rs` captures and replays, `nvrtc.rs`
//! compiles. Memory and streams themselves are in `backend/gpu/`, for all vendors.

mod device;
mod driver;
mod graph;
mod library;
mod module;
mod nvrtc;
mod tensor_map;

use std::sync::Arc;

use super::gpu::{Arena, Block, Queue};
use super::{Backend, DecodeKernels, DecodeShape, DeviceInfo, GraphBackend};
use crate::error::{Error, Result};
use crate::kernel::cache::DiskCache;
use crate::kernel::{self, Launch, Params, Variant};
use device::{Device, StreamHandle};
use driver::cu;

pub use graph::CudaGraph;
pub use module::CudaKernel;
pub(crate) use nvrtc::nvrtc;

/// An NVIDIA GPU. Cloning is cheap and refers to the same device, its memory and its kernels.
#[derive(Clone)]
pub struct Cuda {
    inner: Arc<Inner>,
}

struct Inner {
    arena: Arc<Arena<Device>>,
    kernels: kernel::Loaded<CudaKernel>,
    cache: DiskCache,
}

impl Drop for Inner {
    fn drop(&mut self) {
        // A kernel is not unloaded under work that runs it.
        self.arena.settle();
    }
}

/// Device memory. Dropping it calls no driver: the memory serves again once the work enqueued before the drop has ended.
pub struct CudaBuffer(Block<Device>);

/// A stream. It does not synchronise with the default stream.
pub struct CudaStream(Queue<Device>);

impl CudaStream {
    /// The driver's handle (`CUstream`), for other libraries of the process.
    pub fn handle(&self) -> u64 {
        self.0.raw().0 as u64
    }
}

impl Cuda {
    /// Opens device `index` (as `CUDA_VISIBLE_DEVICES` numbers them) and its primary context.
    ///
    /// # Errors
    /// [`Error::Unavailable`] without a driver or with one older than CUDA 12.0, [`Error::NoDevice`], [`Error::Unsupported`]
    /// below compute capability 8.0, [`Error::OutOfMemory`] where the context does not fit.
    pub fn new(index: usize) -> Result<Self> {
        Self::with_cache(index, DiskCache::from_env())
    }

    /// As [`Cuda::new`], with a disk cache of one's own for compiled kernels.
    ///
    /// # Errors
    /// As [`Cuda::new`].
    pub fn with_cache(index: usize, cache: DiskCache) -> Result<Self> {
        let arena = Arena::new(Device::open(index)?);
        Ok(Self { inner: Arc::new(Inner { arena, kernels: kernel::Loaded::new(), cache }) })
    }

    /// The facts of all devices. Makes no context. Empty where there is a driver but no GPU.
    ///
    /// # Errors
    /// [`Error::Unavailable`] without a usable driver.
    pub fn devices() -> Result<Vec<DeviceInfo>> {
        device::probe_all()
    }

    /// Waits for the work that may use dropped buffers, and returns all memory that no buffer holds to the driver, where other
    /// libraries of the process can have it.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn trim(&self) -> Result<()> {
        self.inner.arena.trim()
    }

    fn raw(&self) -> &Device {
        self.inner.arena.device()
    }
}

impl std::fmt::Debug for Cuda {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Cuda").field(self.device()).finish()
    }
}

impl Backend for Cuda {
    const NAME: &'static str = driver::NAME;

    type Buffer = CudaBuffer;
    type Stream = CudaStream;
    type Kernel = CudaKernel;

    fn device(&self) -> &DeviceInfo {
        &self.raw().info
    }

    fn decode_kernels(&self, shape: &DecodeShape) -> Result<DecodeKernels> {
        kernel::select::decode_kernels(shape, self.device())
    }

    fn prepare(&self, variant: &Variant) -> Result<CudaKernel> {
        self.inner.kernels.get_or_load(variant, || {
            let device = self.device();
            let (module, origin) = kernel::load(
                &kernel::source::CUDA,
                variant,
                (&device.arch, device.wave_size),
                &self.inner.cache,
                || Ok(nvrtc()?),
                |code| module::Module::load(&self.inner.arena, code, variant.entry.symbol()),
            )?;
            Ok(CudaKernel::new(module, origin, variant))
        })
    }

    fn alloc(&self, bytes: usize, purpose: &'static str) -> Result<CudaBuffer> {
        self.inner.arena.alloc(bytes, purpose).map(CudaBuffer)
    }

    fn addr(&self, buffer: &CudaBuffer) -> u64 {
        buffer.0.addr()
    }

    fn create_stream(&self) -> Result<CudaStream> {
        Queue::new(&self.inner.arena).map(CudaStream)
    }

    unsafe fn borrow_stream(&self, raw: u64) -> Result<CudaStream> {
        // CU_STREAM_PER_THREAD
        if raw == 2 {
            let problem =
                "the per-thread default stream is another one on every thread; give a stream that was created";
            return Err(Error::argument("raw", problem));
        }
        // SAFETY: the caller's promise.
        Ok(CudaStream(unsafe { Queue::borrow(&self.inner.arena, StreamHandle(raw as *mut _)) }))
    }

    unsafe fn upload(&self, stream: &CudaStream, dst: u64, src: &[u8]) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { stream.0.upload(dst, src) }
    }

    unsafe fn download(&self, stream: &CudaStream, src: u64, dst: &mut [u8]) -> Result<()> {
        stream.0.require_idle("download")?;
        let _bound = self.raw().bind_relaxed()?;
        let handle = stream.0.raw().0;
        // SAFETY: the source is the caller's promise; the destination is borrowed until the stream has been waited for.
        unsafe {
            cu!(self.raw().driver, cuMemcpyDtoHAsync_v2(dst.as_mut_ptr().cast(), src, dst.len(), handle))?;
            cu!(self.raw().driver, cuStreamSynchronize(handle))
        }
    }

    unsafe fn fill(&self, stream: &CudaStream, dst: u64, byte: u8, bytes: usize) -> Result<()> {
        let _bound = self.raw().bind()?;
        // SAFETY: the caller's promise.
        unsafe { cu!(self.raw().driver, cuMemsetD8Async(dst, byte, bytes, stream.0.raw().0)) }
    }

    unsafe fn launch(&self, stream: &CudaStream, kernel: &CudaKernel, launch: &Launch, params: &Params) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { module::launch(self.raw(), stream.0.raw(), kernel, launch, params) }
    }

    fn synchronize(&self, stream: &CudaStream) -> Result<()> {
        stream.0.require_idle("synchronize")?;
        let _bound = self.raw().bind_relaxed()?;
        // SAFETY: the stream is live.
        unsafe { cu!(self.raw().driver, cuStreamSynchronize(stream.0.raw().0)) }
    }
}

impl GraphBackend for Cuda {
    type Graph = CudaGraph;

    fn begin_capture(&self, stream: &CudaStream) -> Result<()> {
        stream.0.begin_capture(|| graph::begin(self.raw(), stream.0.raw()))
    }

    fn end_capture(&self, stream: &CudaStream) -> Result<CudaGraph> {
        stream.0.end_capture(|| graph::finish(&self.inner.arena, stream.0.raw()))
    }

    fn abort_capture(&self, stream: &CudaStream) {
        graph::abort(self.raw(), stream.0.raw());
    }

    unsafe fn replay(&self, stream: &CudaStream, graph: &CudaGraph) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { graph::replay(self.raw(), stream.0.raw(), graph) }
    }

    fn graph_bytes(&self, graph: &CudaGraph) -> usize {
        graph.bytes()
    }
}
