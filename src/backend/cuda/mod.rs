//! NVIDIA GPUs. The driver and NVRTC are opened at run time, so a build needs no CUDA and a machine without it gets an error.
//!
//! `probe -> context -> prepare -> launch -> capture -> replay`: `driver.rs` opens the library, `device.rs` holds the context
//! and the calls under memory and streams, `module.rs` loads and launches, `tensor_map.rs` describes the cache to bulk copies,
//! `graph.rs` captures and replays, `nvrtc.rs` compiles. The backend over these calls is in `backend/gpu/`, for all vendors.

mod device;
mod driver;
mod graph;
mod library;
mod module;
mod nvrtc;
mod tensor_map;

use std::sync::Arc;

use super::DeviceInfo;
use super::gpu::{Arena, Gpu, GpuStream, Vendor};
use crate::error::Result;
use crate::graph::DriverRule;
use crate::kernel::source::{CUDA, Dialect};
use crate::kernel::{Compiler, Launch, Params, Variant};
use device::{Device, StreamHandle};
use driver::cu;
pub(crate) use nvrtc::nvrtc;

/// An NVIDIA GPU, of compute capability 8.0 or newer, under a driver for CUDA 12.0 or newer, in its primary context.
pub type Cuda = Gpu<Device>;

/// A stream of an NVIDIA GPU.
pub type CudaStream = GpuStream<Device>;

impl Vendor for Device {
    type Module = module::Module;
    type Graph = graph::Executable;

    const DIALECT: Dialect = CUDA;
    const DRIVER_RULES: &'static [DriverRule] = &[];
    const CAPTURES_REPLAYS: bool = true;

    fn open(index: usize) -> Result<Self> {
        Device::open(index)
    }

    fn probe_all() -> Result<Vec<DeviceInfo>> {
        device::probe_all()
    }

    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn compiler() -> Result<&'static dyn Compiler> {
        Ok(nvrtc()?)
    }

    fn stream(raw: u64) -> StreamHandle {
        StreamHandle(raw as *mut _)
    }

    fn raw_stream(stream: StreamHandle) -> u64 {
        stream.0 as u64
    }

    fn load(arena: &Arc<Arena<Self>>, code: &[u8], symbol: &str) -> Result<module::Module> {
        module::Module::load(arena, code, symbol)
    }

    unsafe fn launch(
        &self,
        stream: StreamHandle,
        kernel: (&module::Module, &Variant),
        launch: &Launch,
        params: &Params,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { module::launch(self, stream, kernel, launch, params) }
    }

    unsafe fn copy_out(&self, stream: StreamHandle, src: u64, dst: &mut [u8]) -> Result<()> {
        let _bound = self.bind_relaxed()?;
        // SAFETY: the source is the caller's promise; the destination is borrowed until the stream has been waited for.
        unsafe {
            cu!(self.driver, cuMemcpyDtoHAsync_v2(dst.as_mut_ptr().cast(), src, dst.len(), stream.0))?;
            cu!(self.driver, cuStreamSynchronize(stream.0))
        }
    }

    unsafe fn fill(&self, stream: StreamHandle, dst: u64, byte: u8, bytes: usize) -> Result<()> {
        let _bound = self.bind()?;
        // SAFETY: the caller's promise.
        unsafe { cu!(self.driver, cuMemsetD8Async(dst, byte, bytes, stream.0)) }
    }

    fn synchronize(&self, stream: StreamHandle) -> Result<()> {
        let _bound = self.bind_relaxed()?;
        // SAFETY: the stream is live.
        unsafe { cu!(self.driver, cuStreamSynchronize(stream.0)) }
    }

    fn begin_capture(&self, stream: StreamHandle) -> Result<()> {
        graph::begin(self, stream)
    }

    fn end_capture(arena: &Arc<Arena<Self>>, stream: StreamHandle) -> Result<graph::Executable> {
        graph::finish(arena, stream)
    }

    unsafe fn replay(&self, stream: StreamHandle, graph: &graph::Executable) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { graph::replay(self, stream, graph) }
    }

    fn graph_bytes(graph: &graph::Executable) -> usize {
        graph.bytes
    }
}
