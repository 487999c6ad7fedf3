//! Devices: their facts, and the calls under memory and streams.

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};

use hip_sys::Hip;
use hip_sys::types::{
    hipDeviceAttributeMaxSharedMemoryPerBlock, hipDeviceAttributeMultiprocessorCount, hipDeviceAttributeWarpSize,
    hipEvent_t, hipEventDisableTiming, hipHostMallocDefault, hipMemcpyHostToDevice, hipStream_t, hipStreamCaptureMode,
    hipStreamCaptureModeRelaxed, hipStreamCaptureStatusNone, hipStreamNonBlocking,
};

use super::driver::{NAME, hip, is_out_of_memory, typed};
use crate::backend::DeviceInfo;
use crate::backend::gpu::RawDevice;
use crate::error::{Error, Result};

/// A device. HIP keeps one context per device, which all libraries of the process share.
pub struct Device {
    pub(super) hip: &'static Hip,
    pub(super) info: DeviceInfo,
    launching: Mutex<()>,
}

/// Facts of all devices.
pub(super) fn probe_all() -> Result<Vec<DeviceInfo>> {
    let hip = hip()?;
    match hip.device_count() {
        Ok(count) => (0..count).map(|index| probe(hip, index)).collect(),
        Err(hip_sys::Error::NoDevice { .. }) => Ok(Vec::new()),
        Err(error) => Err(typed(error)),
    }
}

fn probe(hip: &Hip, index: usize) -> Result<DeviceInfo> {
    let attribute = |attribute| -> Result<usize> {
        let value = hip.device_attribute(attribute, index).map_err(typed)?;
        Ok(usize::try_from(value).unwrap_or(0))
    };
    Ok(DeviceInfo {
        backend: NAME,
        name: hip.device_name(index).map_err(typed)?,
        arch: hip.arch_name(index).map_err(typed)?,
        index,
        num_compute_units: attribute(hipDeviceAttributeMultiprocessorCount)?,
        wave_size: attribute(hipDeviceAttributeWarpSize)?,
        shared_bytes_per_block: attribute(hipDeviceAttributeMaxSharedMemoryPerBlock)?,
        memory_bytes: hip.device_memory(index).map_err(typed)? as u64,
        driver_version: hip.runtime_version().map_err(typed)?.to_string(),
    })
}

impl Device {
    pub(super) fn open(index: usize) -> Result<Self> {
        let hip = hip()?;
        let count = hip.device_count().map_err(|error| match typed(error) {
            Error::NoDevice { backend, reason, .. } => Error::NoDevice { backend, index, reason },
            other => other,
        })?;
        if index >= count {
            let reason = format!("the runtime sees {count}, numbered from 0");
            return Err(Error::NoDevice { backend: NAME, index, reason });
        }
        Ok(Self { hip, info: probe(hip, index)?, launching: Mutex::new(()) })
    }

    /// Makes this the thread's current device until the guard is dropped; the thread's own device then comes back.
    pub(super) fn bind(&self) -> Result<Bound> {
        let hip = self.hip;
        let current = hip.current_device().map_err(typed)?;
        let previous = (current != self.info.index).then_some(current);
        if previous.is_some() {
            hip.set_device(self.info.index).map_err(typed)?;
        }
        Ok(Bound { hip, previous, relaxed: None, thread: PhantomData })
    }

    /// As [`Device::bind`], and lifts the prohibitions that a capture lays on its thread.
    ///
    /// Allocating, querying an event and loading a module do not touch the captured stream, but the runtime would refuse them
    /// and break the capture; ours are harmless there, so they are let through.
    pub(super) fn bind_relaxed(&self) -> Result<Bound> {
        let mut bound = self.bind()?;
        bound.relaxed = Some(self.hip.exchange_capture_mode(hipStreamCaptureModeRelaxed).map_err(typed)?);
        Ok(bound)
    }

    /// To be held over every launch and replay. HIP keeps the arguments of a kernel in the kernel until a launch has copied them:
    /// of a launch and a replay by two threads at a time, one ran with the other's arguments (seen in 5.7.1).
    pub(super) fn lock_launches(&self) -> MutexGuard<'_, ()> {
        self.launching.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Free device memory in bytes.
    pub(super) fn free_memory(&self) -> Result<usize> {
        let _bound = self.bind_relaxed()?;
        Ok(self.hip.memory_info().map_err(typed)?.0)
    }
}

/// The device is current on this thread; the thread's own device and capture mode come back on drop.
pub(super) struct Bound {
    hip: &'static Hip,
    previous: Option<usize>,
    relaxed: Option<hipStreamCaptureMode>,
    // Not to be dropped on another thread.
    thread: PhantomData<*const ()>,
}

impl Drop for Bound {
    fn drop(&mut self) {
        if let Some(mode) = self.relaxed {
            let _ = self.hip.exchange_capture_mode(mode);
        }
        if let Some(device) = self.previous {
            let _ = self.hip.set_device(device);
        }
    }
}

/// Handle of a stream.
#[derive(Clone, Copy, PartialEq)]
pub struct StreamHandle(pub(super) hipStream_t);

// SAFETY: a handle of the runtime, which every thread may use.
unsafe impl Send for StreamHandle {}
// SAFETY: as above.
unsafe impl Sync for StreamHandle {}

/// Handle of an event.
#[derive(Clone, Copy)]
pub struct EventHandle(hipEvent_t);

// SAFETY: a handle of the runtime, which every thread may use.
unsafe impl Send for EventHandle {}
// SAFETY: as above.
unsafe impl Sync for EventHandle {}

impl RawDevice for Device {
    const NAME: &'static str = NAME;
    type Stream = StreamHandle;
    type Event = EventHandle;

    fn alloc(&self, bytes: usize) -> Result<Option<u64>> {
        // For absurd sizes drivers report other errors than that of memory.
        if bytes as u64 > self.info.memory_bytes {
            return Ok(None);
        }
        let _bound = self.bind_relaxed()?;
        match self.hip.malloc(bytes) {
            Ok(ptr) => Ok(Some(ptr as u64)),
            Err(error) if is_out_of_memory(&error) => Ok(None),
            Err(error) => Err(typed(error)),
        }
    }

    unsafe fn free(&self, addr: u64) {
        let Ok(_bound) = self.bind_relaxed() else { return };
        // SAFETY: the caller's promise.
        let _ = unsafe { self.hip.free(addr as *mut _) };
    }

    fn alloc_pinned(&self, bytes: usize) -> Result<NonNull<u8>> {
        let _bound = self.bind_relaxed()?;
        let ptr = self.hip.host_malloc(bytes, hipHostMallocDefault).map_err(typed)?;
        let purpose = "pinned memory for uploads";
        NonNull::new(ptr.cast()).ok_or(Error::OutOfMemory { backend: NAME, bytes, purpose })
    }

    unsafe fn free_pinned(&self, ptr: NonNull<u8>) {
        let Ok(_bound) = self.bind_relaxed() else { return };
        // SAFETY: the caller's promise.
        let _ = unsafe { self.hip.host_free(ptr.as_ptr().cast()) };
    }

    fn create_stream(&self) -> Result<StreamHandle> {
        let _bound = self.bind_relaxed()?;
        self.hip.stream_create(hipStreamNonBlocking).map(StreamHandle).map_err(typed)
    }

    fn destroy_stream(&self, stream: StreamHandle) {
        let Ok(_bound) = self.bind_relaxed() else { return };
        // SAFETY: the arena destroys its own streams once.
        let _ = unsafe { self.hip.stream_destroy(stream.0) };
    }

    fn is_capturing(&self, stream: StreamHandle) -> bool {
        let Ok(_bound) = self.bind() else { return true };
        // SAFETY: the stream is live.
        let told = unsafe { self.hip.capture_status(stream.0) };
        told != Ok(hipStreamCaptureStatusNone)
    }

    fn abort_capture(&self, stream: StreamHandle) {
        super::graph::abort(self, stream);
    }

    fn create_event(&self) -> Result<EventHandle> {
        let _bound = self.bind_relaxed()?;
        self.hip.event_create(hipEventDisableTiming).map(EventHandle).map_err(typed)
    }

    fn destroy_event(&self, event: EventHandle) {
        let Ok(_bound) = self.bind_relaxed() else { return };
        // SAFETY: the arena destroys its own events once.
        let _ = unsafe { self.hip.event_destroy(event.0) };
    }

    fn record(&self, event: EventHandle, stream: StreamHandle) -> Result<()> {
        let _bound = self.bind_relaxed()?;
        // SAFETY: both are live.
        unsafe { self.hip.event_record(event.0, stream.0) }.map_err(typed)
    }

    fn has_ended(&self, event: EventHandle) -> bool {
        let Ok(_bound) = self.bind_relaxed() else { return false };
        // SAFETY: the event is live.
        let come = unsafe { self.hip.event_has_come(event.0) };
        come == Ok(true)
    }

    fn wait(&self, event: EventHandle) -> Result<()> {
        let _bound = self.bind_relaxed()?;
        // SAFETY: the event is live.
        unsafe { self.hip.event_synchronize(event.0) }.map_err(typed)
    }

    unsafe fn copy_in(&self, stream: StreamHandle, dst: u64, src: NonNull<u8>, bytes: usize) -> Result<()> {
        let _bound = self.bind()?;
        let (dst, src) = (dst as *mut _, src.as_ptr().cast_const().cast());
        // SAFETY: the caller's promise.
        unsafe { self.hip.memcpy_async(dst, src, bytes, hipMemcpyHostToDevice, stream.0) }.map_err(typed)
    }
}
