//! AMD GPUs. The HIP runtime and hipRTC are opened at run time, so a build needs no ROCm and a machine without it gets an error.
//!
//! `probe -> prepare -> launch -> capture -> replay`: `driver.rs` opens the library, `device.rs` holds the calls under memory
//! and streams, `module.rs` loads and launches, `graph.rs` captures and replays, `hiprtc.rs` compiles (`clang.rs` ahead of time). Memory and streams
//! themselves are in `backend/gpu/`, for all vendors.

mod clang;
mod device;
mod driver;
mod graph;
mod hiprtc;
mod module;

use std::sync::Arc;

use hip_sys::types::hipMemcpyDeviceToHost;

use super::gpu::{Arena, Block, Queue};
use super::{Backend, DecodeKernels, DecodeShape, DeviceInfo, GraphBackend};
use crate::error::{Error, Result};
use crate::graph::DriverRule;
use crate::kernel::cache::DiskCache;
use crate::kernel::{self, Launch, Params, Variant};
use device::{Device, StreamHandle};
use driver::typed;

pub use graph::RocmGraph;
pub(crate) use hiprtc::{ahead, hiprtc};
pub use module::RocmKernel;

/// An AMD GPU. Cloning is cheap and refers to the same device, its memory and its kernels.
#[derive(Clone)]
pub struct Rocm {
    inner: Arc<Inner>,
}

struct Inner {
    arena: Arc<Arena<Device>>,
    kernels: kernel::Loaded<RocmKernel>,
    cache: DiskCache,
}

impl Drop for Inner {
    fn drop(&mut self) {
        // A kernel is not unloaded under work that runs it.
        self.arena.settle();
    }
}

/// Device memory. Dropping it calls no driver: the memory serves again once the work enqueued before the drop has ended.
pub struct RocmBuffer(Block<Device>);

/// A stream. It does not synchronise with the default stream.
pub struct RocmStream(Queue<Device>);

impl RocmStream {
    /// The runtime's handle (`hipStream_t`), for other libraries of the process.
    pub fn handle(&self) -> u64 {
        self.0.raw().0 as u64
    }
}

impl Rocm {
    /// Opens device `index`, as `HIP_VISIBLE_DEVICES` numbers them.
    ///
    /// # Errors
    /// [`Error::Unavailable`] without a HIP runtime, [`Error::NoDevice`].
    pub fn new(index: usize) -> Result<Self> {
        Self::with_cache(index, DiskCache::from_env())
    }

    /// As [`Rocm::new`], with a disk cache of one's own for compiled kernels.
    ///
    /// # Errors
    /// As [`Rocm::new`].
    pub fn with_cache(index: usize, cache: DiskCache) -> Result<Self> {
        let arena = Arena::new(Device::open(index)?);
        Ok(Self { inner: Arc::new(Inner { arena, kernels: kernel::Loaded::new(), cache }) })
    }

    /// The facts of all devices. Empty where there is a runtime but no GPU.
    ///
    /// # Errors
    /// [`Error::Unavailable`] without a HIP runtime.
    pub fn devices() -> Result<Vec<DeviceInfo>> {
        device::probe_all()
    }

    /// Waits for the work that may use dropped buffers, and returns all memory that no buffer holds to the runtime, where other
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

impl std::fmt::Debug for Rocm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Rocm").field(self.device()).finish()
    }
}

impl Backend for Rocm {
    const NAME: &'static str = driver::NAME;

    type Buffer = RocmBuffer;
    type Stream = RocmStream;
    type Kernel = RocmKernel;

    fn device(&self) -> &DeviceInfo {
        &self.raw().info
    }

    fn decode_kernels(&self, shape: &DecodeShape) -> Result<DecodeKernels> {
        kernel::select::decode_kernels(shape, self.device())
    }

    fn prepare(&self, variant: &Variant) -> Result<RocmKernel> {
        self.inner.kernels.get_or_load(variant, || {
            let device = self.device();
            let (module, origin) = kernel::load(
                &kernel::source::ROCM,
                variant,
                (&device.arch, device.wave_size),
                &self.inner.cache,
                || Ok(hiprtc()?),
                |code| module::Module::load(&self.inner.arena, code, variant.entry.symbol()),
            )?;
            Ok(RocmKernel::new(module, origin))
        })
    }

    fn alloc(&self, bytes: usize, purpose: &'static str) -> Result<RocmBuffer> {
        self.inner.arena.alloc(bytes, purpose).map(RocmBuffer)
    }

    fn addr(&self, buffer: &RocmBuffer) -> u64 {
        buffer.0.addr()
    }

    fn create_stream(&self) -> Result<RocmStream> {
        Queue::new(&self.inner.arena).map(RocmStream)
    }

    unsafe fn borrow_stream(&self, raw: u64) -> Result<RocmStream> {
        // hipStreamPerThread
        if raw == 2 {
            let problem =
                "the per-thread default stream is another one on every thread; give a stream that was created";
            return Err(Error::argument("raw", problem));
        }
        // SAFETY: the caller's promise.
        Ok(RocmStream(unsafe { Queue::borrow(&self.inner.arena, StreamHandle(raw as *mut _)) }))
    }

    unsafe fn upload(&self, stream: &RocmStream, dst: u64, src: &[u8]) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { stream.0.upload(dst, src) }
    }

    unsafe fn download(&self, stream: &RocmStream, src: u64, dst: &mut [u8]) -> Result<()> {
        stream.0.require_idle("download")?;
        let _bound = self.raw().bind_relaxed()?;
        let (hip, handle) = (self.raw().hip, stream.0.raw().0);
        let to = dst.as_mut_ptr().cast();
        // SAFETY: the source is the caller's promise; the destination is borrowed until the stream has been waited for.
        unsafe {
            hip.memcpy_async(to, src as *const _, dst.len(), hipMemcpyDeviceToHost, handle).map_err(typed)?;
            hip.stream_synchronize(handle).map_err(typed)
        }
    }

    unsafe fn fill(&self, stream: &RocmStream, dst: u64, byte: u8, bytes: usize) -> Result<()> {
        let _bound = self.raw().bind()?;
        // SAFETY: the caller's promise.
        unsafe { self.raw().hip.memset_async(dst as *mut _, byte, bytes, stream.0.raw().0) }.map_err(typed)
    }

    unsafe fn launch(&self, stream: &RocmStream, kernel: &RocmKernel, launch: &Launch, params: &Params) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { module::launch(self.raw(), stream.0.raw(), kernel, launch, params) }
    }

    fn synchronize(&self, stream: &RocmStream) -> Result<()> {
        stream.0.require_idle("synchronize")?;
        let _bound = self.raw().bind_relaxed()?;
        // SAFETY: the stream is live.
        unsafe { self.raw().hip.stream_synchronize(stream.0.raw().0) }.map_err(typed)
    }
}

impl GraphBackend for Rocm {
    type Graph = RocmGraph;

    fn driver_rules(&self) -> &'static [DriverRule] {
        graph::RULES
    }

    fn begin_capture(&self, stream: &RocmStream) -> Result<()> {
        stream.0.begin_capture(|| graph::begin(self.raw(), stream.0.raw()))
    }

    fn end_capture(&self, stream: &RocmStream) -> Result<RocmGraph> {
        stream.0.end_capture(|| graph::finish(&self.inner.arena, stream.0.raw()))
    }

    fn abort_capture(&self, stream: &RocmStream) {
        graph::abort(self.raw(), stream.0.raw());
    }

    unsafe fn replay(&self, stream: &RocmStream, graph: &RocmGraph) -> Result<()> {
        // HIP would run it at once, in the middle of the capture.
        stream.0.require_idle("replay")?;
        // SAFETY: the caller's promise.
        unsafe { graph::replay(self.raw(), stream.0.raw(), graph) }
    }

    fn graph_bytes(&self, graph: &RocmGraph) -> usize {
        graph.bytes()
    }
}
