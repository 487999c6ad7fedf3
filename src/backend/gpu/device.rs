//! The backend of a GPU, written once over what its [`Vendor`] supplies.

use std::sync::Arc;

use super::{Arena, Block, Queue, Vendor};
use crate::backend::{Backend, DecodeKernels, DecodeShape, DeviceInfo, GraphBackend};
use crate::error::{Error, Result};
use crate::graph::DriverRule;
use crate::kernel::cache::DiskCache;
use crate::kernel::{self, Launch, Origin, Params, Variant};

/// A GPU. Cloning is cheap and refers to the same device, its memory and its kernels.
pub struct Gpu<V: Vendor> {
    inner: Arc<Inner<V>>,
}

struct Inner<V: Vendor> {
    arena: Arc<Arena<V>>,
    kernels: kernel::Loaded<GpuKernel<V>>,
    cache: DiskCache,
}

impl<V: Vendor> Drop for Inner<V> {
    fn drop(&mut self) {
        // A kernel is not unloaded under work that runs it.
        self.arena.settle();
    }
}

/// Device memory. Dropping it calls no driver: the memory serves again once the work enqueued before the drop has ended.
pub struct GpuBuffer<V: Vendor>(Block<V>);

/// A stream. It does not synchronise with the default stream.
pub struct GpuStream<V: Vendor>(Queue<V>);

impl<V: Vendor> GpuStream<V> {
    /// The driver's handle (`CUstream`, `hipStream_t`), for other libraries of the process.
    pub fn handle(&self) -> u64 {
        V::raw_stream(self.0.raw())
    }
}

/// A kernel that is loaded on a device. Cloning is cheap.
pub struct GpuKernel<V: Vendor> {
    module: Arc<V::Module>,
    variant: Variant,
    origin: Origin,
}

impl<V: Vendor> GpuKernel<V> {
    /// Where its code came from.
    pub fn origin(&self) -> Origin {
        self.origin
    }
}

impl<V: Vendor> Clone for GpuKernel<V> {
    fn clone(&self) -> Self {
        Self { module: self.module.clone(), ..*self }
    }
}

/// An instantiated graph.
pub struct GpuGraph<V: Vendor>(V::Graph);

impl<V: Vendor> Gpu<V> {
    /// Opens device `index`, as the vendor's own variable (`CUDA_VISIBLE_DEVICES`, `HIP_VISIBLE_DEVICES`) numbers them, in the
    /// context that all libraries of the process share.
    ///
    /// # Errors
    /// [`Error::Unavailable`] without a driver or with one that is too old, [`Error::NoDevice`], [`Error::Unsupported`] for a
    /// device that no kernel serves, [`Error::OutOfMemory`] where the context does not fit.
    pub fn new(index: usize) -> Result<Self> {
        Self::with_cache(index, DiskCache::from_env())
    }

    /// As [`Gpu::new`], with a disk cache of one's own for compiled kernels.
    ///
    /// # Errors
    /// As [`Gpu::new`].
    pub fn with_cache(index: usize, cache: DiskCache) -> Result<Self> {
        let arena = Arena::new(V::open(index)?);
        Ok(Self { inner: Arc::new(Inner { arena, kernels: kernel::Loaded::new(), cache }) })
    }

    /// The facts of all devices. Makes no context. Empty where there is a driver but no GPU.
    ///
    /// # Errors
    /// [`Error::Unavailable`] without a usable driver.
    pub fn devices() -> Result<Vec<DeviceInfo>> {
        V::probe_all()
    }

    /// Waits for the work that may use dropped buffers, and returns all memory that no buffer holds to the driver, where other
    /// libraries of the process can have it.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn trim(&self) -> Result<()> {
        self.inner.arena.trim()
    }

    fn vendor(&self) -> &V {
        self.inner.arena.device()
    }
}

impl<V: Vendor> Clone for Gpu<V> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone() }
    }
}

impl<V: Vendor> std::fmt::Debug for Gpu<V> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Gpu").field(self.device()).finish()
    }
}

impl<V: Vendor> Backend for Gpu<V> {
    const NAME: &'static str = V::NAME;

    type Buffer = GpuBuffer<V>;
    type Stream = GpuStream<V>;
    type Kernel = GpuKernel<V>;

    fn device(&self) -> &DeviceInfo {
        self.vendor().info()
    }

    fn decode_kernels(&self, shape: &DecodeShape) -> Result<DecodeKernels> {
        kernel::select::decode_kernels(shape, self.device())
    }

    fn prepare(&self, variant: &Variant) -> Result<GpuKernel<V>> {
        self.inner.kernels.get_or_load(variant, || {
            let device = self.device();
            let (module, origin) = kernel::load(
                &V::DIALECT,
                variant,
                (&device.arch, device.wave_size),
                &self.inner.cache,
                V::compiler,
                |code| V::load(&self.inner.arena, code, variant.entry.symbol()),
            )?;
            Ok(GpuKernel { module: Arc::new(module), variant: *variant, origin })
        })
    }

    fn alloc(&self, bytes: usize, purpose: &'static str) -> Result<GpuBuffer<V>> {
        self.inner.arena.alloc(bytes, purpose).map(GpuBuffer)
    }

    fn addr(&self, buffer: &GpuBuffer<V>) -> u64 {
        buffer.0.addr()
    }

    fn create_stream(&self) -> Result<GpuStream<V>> {
        Queue::new(&self.inner.arena).map(GpuStream)
    }

    unsafe fn borrow_stream(&self, raw: u64) -> Result<GpuStream<V>> {
        // CU_STREAM_PER_THREAD, hipStreamPerThread
        if raw == 2 {
            let problem =
                "the per-thread default stream is another one on every thread; give a stream that was created";
            return Err(Error::argument("raw", problem));
        }
        // SAFETY: the caller's promise.
        Ok(GpuStream(unsafe { Queue::borrow(&self.inner.arena, V::stream(raw)) }))
    }

    unsafe fn visit_stream(&self, raw: u64) -> Result<GpuStream<V>> {
        // SAFETY: the caller's promise.
        Ok(GpuStream(unsafe { Queue::visit(&self.inner.arena, V::stream(raw)) }))
    }

    fn raw_stream(&self, stream: &GpuStream<V>) -> u64 {
        stream.handle()
    }

    unsafe fn upload(&self, stream: &GpuStream<V>, dst: u64, src: &[u8]) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { stream.0.upload(dst, src) }
    }

    unsafe fn download(&self, stream: &GpuStream<V>, src: u64, dst: &mut [u8]) -> Result<()> {
        stream.0.require_idle("download")?;
        // SAFETY: the source is the caller's promise; the destination is borrowed until the copy has ended.
        unsafe { self.vendor().copy_out(stream.0.raw(), src, dst) }
    }

    unsafe fn fill(&self, stream: &GpuStream<V>, dst: u64, byte: u8, bytes: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.vendor().fill(stream.0.raw(), dst, byte, bytes) }
    }

    unsafe fn launch(
        &self,
        stream: &GpuStream<V>,
        kernel: &GpuKernel<V>,
        launch: &Launch,
        params: &Params,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.vendor().launch(stream.0.raw(), (&kernel.module, &kernel.variant), launch, params) }
    }

    fn synchronize(&self, stream: &GpuStream<V>) -> Result<()> {
        stream.0.require_idle("synchronize")?;
        self.vendor().synchronize(stream.0.raw())
    }
}

impl<V: Vendor> GraphBackend for Gpu<V> {
    type Graph = GpuGraph<V>;

    fn driver_rules(&self) -> &'static [DriverRule] {
        V::DRIVER_RULES
    }

    fn begin_capture(&self, stream: &GpuStream<V>) -> Result<()> {
        stream.0.begin_capture(|| self.vendor().begin_capture(stream.0.raw()))
    }

    fn end_capture(&self, stream: &GpuStream<V>) -> Result<GpuGraph<V>> {
        stream.0.end_capture(|| V::end_capture(&self.inner.arena, stream.0.raw())).map(GpuGraph)
    }

    fn abort_capture(&self, stream: &GpuStream<V>) {
        self.vendor().abort_capture(stream.0.raw());
    }

    unsafe fn replay(&self, stream: &GpuStream<V>, graph: &GpuGraph<V>) -> Result<()> {
        if !V::CAPTURES_REPLAYS {
            stream.0.require_idle("replay")?;
        }
        // SAFETY: the caller's promise.
        unsafe { self.vendor().replay(stream.0.raw(), &graph.0) }
    }

    fn graph_bytes(&self, graph: &GpuGraph<V>) -> usize {
        V::graph_bytes(&graph.0)
    }
}
