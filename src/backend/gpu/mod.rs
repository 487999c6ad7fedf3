//! The GPU backend, written once over a vendor's raw calls.
//!
//! A vendor implements [`RawDevice`] and [`Vendor`]. [`Arena`] makes of the first memory with deferred frees and [`Queue`] a
//! stream with a staging ring, neither of which calls the driver where a capture forbids it; [`Gpu`] makes of both a
//! [`Backend`](super::Backend).

mod arena;
mod device;
#[cfg(test)]
mod fake;
mod queue;

pub use arena::Arena;
pub(crate) use arena::Block;
pub use device::{Gpu, GpuBuffer, GpuGraph, GpuKernel, GpuStream};
pub(crate) use queue::Queue;

use std::ptr::NonNull;
use std::sync::Arc;

use super::DeviceInfo;
use crate::error::Result;
use crate::graph::DriverRule;
use crate::kernel::source::Dialect;
use crate::kernel::{Compiler, Launch, Params, Variant};

/// The driver calls under memory and streams. Every call binds the device's context itself and may be made while any stream
/// is being captured, by any thread; handles come from this device and are destroyed once.
pub trait RawDevice: Send + Sync + Sized + 'static {
    /// Name of the backend.
    const NAME: &'static str;
    /// Handle of a stream.
    type Stream: Copy + PartialEq + Send + Sync + 'static;
    /// Handle of an event that keeps no time.
    type Event: Copy + Send + Sync + 'static;

    /// Allocates device memory aligned to 256 bytes; `None` when there is not enough.
    fn alloc(&self, bytes: usize) -> Result<Option<u64>>;

    /// Frees device memory.
    ///
    /// # Safety
    /// `addr` came from [`RawDevice::alloc`] and no work uses it any more.
    unsafe fn free(&self, addr: u64);

    /// Allocates host memory that the device reads directly.
    fn alloc_pinned(&self, bytes: usize) -> Result<NonNull<u8>>;

    /// Frees pinned memory.
    ///
    /// # Safety
    /// `ptr` came from [`RawDevice::alloc_pinned`] and no work uses it any more.
    unsafe fn free_pinned(&self, ptr: NonNull<u8>);

    /// Makes a stream that does not synchronise with the default stream.
    fn create_stream(&self) -> Result<Self::Stream>;

    /// Destroys a stream; its work still runs to the end.
    fn destroy_stream(&self, stream: Self::Stream);

    /// Whether the stream records what is enqueued. True also when the driver does not tell.
    fn is_capturing(&self, stream: Self::Stream) -> bool;

    /// Ends a capture and throws away what was recorded, if that can be done from this thread.
    fn abort_capture(&self, stream: Self::Stream);

    /// Makes an event.
    fn create_event(&self) -> Result<Self::Event>;

    /// Destroys an event.
    fn destroy_event(&self, event: Self::Event);

    /// Marks the end of the stream's work so far.
    fn record(&self, event: Self::Event, stream: Self::Stream) -> Result<()>;

    /// Whether the marked work has ended. False also when the driver does not tell.
    fn has_ended(&self, event: Self::Event) -> bool;

    /// Waits for the marked work.
    fn wait(&self, event: Self::Event) -> Result<()>;

    /// Copies pinned memory to the device in stream order.
    ///
    /// # Safety
    /// `src` is pinned memory that stays untouched until the copy has ended; `dst` is device memory.
    unsafe fn copy_in(&self, stream: Self::Stream, dst: u64, src: NonNull<u8>, bytes: usize) -> Result<()>;
}

/// What a vendor adds to memory and streams: devices, kernels and graphs.
pub trait Vendor: RawDevice {
    /// A kernel's code on the device; unloaded when dropped.
    type Module: Send + Sync + 'static;
    /// An instantiated graph; destroyed when dropped.
    type Graph: Send + Sync + 'static;

    /// How this vendor spells kernels.
    const DIALECT: Dialect;
    /// Known defects of its drivers.
    const DRIVER_RULES: &'static [DriverRule];
    /// Whether a replay on a stream under capture becomes part of what is recorded. If not, it is refused.
    const CAPTURES_REPLAYS: bool;

    /// Opens a device.
    fn open(index: usize) -> Result<Self>;

    /// The facts of all devices, without opening any.
    fn probe_all() -> Result<Vec<DeviceInfo>>;

    /// The facts of this device.
    fn info(&self) -> &DeviceInfo;

    /// The run-time compiler.
    fn compiler() -> Result<&'static dyn Compiler>;

    /// A caller's handle as a stream.
    fn stream(raw: u64) -> Self::Stream;

    /// A stream as a handle for others.
    fn raw_stream(stream: Self::Stream) -> u64;

    /// Loads code with one entry point, and lets its kernel use all the shared memory that a block can have.
    fn load(arena: &Arc<Arena<Self>>, code: &[u8], symbol: &str) -> Result<Self::Module>;

    /// Enqueues a kernel.
    ///
    /// # Safety
    /// As [`Backend::launch`](super::Backend::launch).
    unsafe fn launch(
        &self,
        stream: Self::Stream,
        kernel: (&Self::Module, &Variant),
        launch: &Launch,
        params: &Params,
    ) -> Result<()>;

    /// Copies device memory to the host in stream order and waits for it.
    ///
    /// # Safety
    /// `src..src + dst.len()` is device memory.
    unsafe fn copy_out(&self, stream: Self::Stream, src: u64, dst: &mut [u8]) -> Result<()>;

    /// Sets device bytes in stream order.
    ///
    /// # Safety
    /// `dst..dst + bytes` is device memory that no other work uses meanwhile.
    unsafe fn fill(&self, stream: Self::Stream, dst: u64, byte: u8, bytes: usize) -> Result<()>;

    /// Waits for all work of a stream.
    fn synchronize(&self, stream: Self::Stream) -> Result<()>;

    /// Starts recording. Only the calling thread's calls can break the capture, not those of other threads.
    fn begin_capture(&self, stream: Self::Stream) -> Result<()>;

    /// Ends recording, instantiates and uploads the graph. The stream is out of capture in every case.
    fn end_capture(arena: &Arc<Arena<Self>>, stream: Self::Stream) -> Result<Self::Graph>;

    /// Enqueues a graph on any stream of its device.
    ///
    /// # Safety
    /// Every address that was captured is still valid.
    unsafe fn replay(&self, stream: Self::Stream, graph: &Self::Graph) -> Result<()>;

    /// Device memory that a graph holds, as far as the driver tells.
    fn graph_bytes(graph: &Self::Graph) -> usize;
}
