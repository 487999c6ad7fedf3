//! What the GPU backends share: device memory, streams and small uploads, written once over a vendor's raw calls.
//!
//! A vendor implements [`RawDevice`]; [`Arena`] makes of it memory with deferred frees and [`Queue`] a stream with a staging
//! ring. Neither calls the driver where a capture forbids it.

mod arena;
#[cfg(test)]
mod fake;
mod queue;

pub(crate) use arena::{Arena, Block};
pub(crate) use queue::Queue;

use std::ptr::NonNull;

use crate::error::Result;

/// The driver calls under memory and streams. Every call binds the device's context itself and may be made while any stream
/// is being captured, by any thread; handles come from this device and are destroyed once.
pub(crate) trait RawDevice: Send + Sync + 'static {
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
