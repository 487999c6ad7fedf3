//! AMD GPUs. The HIP runtime and hipRTC are opened at run time, so a build needs no ROCm and a machine without it gets an error.
//!
//! `probe -> prepare -> launch -> capture -> replay`: `driver.rs` opens the library, `device.rs` holds the calls under memory
//! and streams, `module.rs` loads and launches, `graph.rs` captures and replays, `hiprtc.rs` compiles (`clang.rs` ahead of time).
//! The backend over these calls is in `backend/gpu/`, for all vendors.

mod clang;
mod device;
mod driver;
mod graph;
mod hiprtc;
mod module;

use std::sync::Arc;

use hip_sys::types::hipMemcpyDeviceToHost;

use super::DeviceInfo;
use super::gpu::{Arena, Gpu, GpuStream, Vendor};
use crate::error::Result;
use crate::graph::DriverRule;
use crate::kernel::source::{Dialect, ROCM};
use crate::kernel::{Compiler, Launch, Params, Variant};
use device::{Device, StreamHandle};
use driver::typed;
pub(crate) use hiprtc::{ahead, hiprtc};

/// An AMD GPU.
pub type Rocm = Gpu<Device>;

/// A stream of an AMD GPU.
pub type RocmStream = GpuStream<Device>;

impl Vendor for Device {
    type Module = module::Module;
    type Graph = graph::Executable;

    const DIALECT: Dialect = ROCM;
    const DRIVER_RULES: &'static [DriverRule] = graph::RULES;
    // HIP would run it at once, in the middle of the capture.
    const CAPTURES_REPLAYS: bool = false;

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
        Ok(hiprtc()?)
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
        (module, _): (&module::Module, &Variant),
        launch: &Launch,
        params: &Params,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { module::launch(self, stream, module, launch, params) }
    }

    unsafe fn copy_out(&self, stream: StreamHandle, src: u64, dst: &mut [u8]) -> Result<()> {
        let _bound = self.bind_relaxed()?;
        let to = dst.as_mut_ptr().cast();
        // SAFETY: the source is the caller's promise; the destination is borrowed until the stream has been waited for.
        unsafe {
            self.hip.memcpy_async(to, src as *const _, dst.len(), hipMemcpyDeviceToHost, stream.0).map_err(typed)?;
            self.hip.stream_synchronize(stream.0).map_err(typed)
        }
    }

    unsafe fn fill(&self, stream: StreamHandle, dst: u64, byte: u8, bytes: usize) -> Result<()> {
        let _bound = self.bind()?;
        // SAFETY: the caller's promise.
        unsafe { self.hip.memset_async(dst as *mut _, byte, bytes, stream.0) }.map_err(typed)
    }

    fn synchronize(&self, stream: StreamHandle) -> Result<()> {
        let _bound = self.bind_relaxed()?;
        // SAFETY: the stream is live.
        unsafe { self.hip.stream_synchronize(stream.0) }.map_err(typed)
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
