//! Devices: their facts, their contexts, and the calls under memory and streams.

use std::ffi::{c_int, c_void};
use std::marker::PhantomData;
use std::ptr::{NonNull, null_mut};

use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdevice_attribute as Attribute, CUevent, CUstream, CUstreamCaptureMode,
};

use super::driver::{Driver, NAME, OUT_OF_MEMORY, cu, driver, version_text};
use crate::backend::DeviceInfo;
use crate::backend::gpu::RawDevice;
use crate::error::{Error, Result};

/// CU_STREAM_NON_BLOCKING
const NON_BLOCKING: u32 = 1;
/// CU_EVENT_DISABLE_TIMING
const DISABLE_TIMING: u32 = 2;

/// A device with its primary context, which it shares with the CUDA runtime and so with other libraries of the process.
pub struct Device {
    pub(super) driver: &'static Driver,
    pub(super) info: DeviceInfo,
    /// Compute capability as `90` for 9.0.
    pub(super) capability: i32,
    device: CUdevice,
    context: CUcontext,
}

// SAFETY: handles of the driver, which every thread may use.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

/// Facts of all devices, without making a context on any.
pub(super) fn probe_all() -> Result<Vec<DeviceInfo>> {
    let driver = match driver() {
        Err(Error::NoDevice { .. }) => return Ok(Vec::new()),
        driver => driver?,
    };
    (0..count(driver)?).map(|index| Ok(probe(driver, index)?.1)).collect()
}

fn count(driver: &Driver) -> Result<usize> {
    let mut count = 0;
    // SAFETY: the pointer is valid for the call.
    unsafe { cu!(driver, cuDeviceGetCount(&mut count)) }?;
    Ok(usize::try_from(count).unwrap_or(0))
}

fn probe(driver: &Driver, index: usize) -> Result<(CUdevice, DeviceInfo, i32)> {
    let mut device = 0;
    let ordinal = c_int::try_from(index).unwrap_or(c_int::MAX);
    // SAFETY: the pointer is valid for the call.
    unsafe { cu!(driver, cuDeviceGet(&mut device, ordinal)) }?;
    let attribute = |attribute: Attribute| {
        let mut value = 0;
        // SAFETY: the pointer is valid for the call.
        unsafe { cu!(driver, cuDeviceGetAttribute(&mut value, attribute, device)) }?;
        Result::Ok(value)
    };
    let capability = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? * 10
        + attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;

    let mut name = [0_u8; 256];
    let mut memory = 0;
    // SAFETY: the name's length is given and covers the terminating zero; the pointers are valid for the calls.
    unsafe {
        cu!(driver, cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as c_int - 1, device))?;
        cu!(driver, cuDeviceTotalMem_v2(&mut memory, device))?;
    }
    let name = name.split(|&byte| byte == 0).next().unwrap_or_default();
    let size = |value: c_int| usize::try_from(value).unwrap_or(0);
    let info = DeviceInfo {
        backend: NAME,
        name: String::from_utf8_lossy(name).into_owned(),
        arch: arch(capability),
        index,
        num_compute_units: size(attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?),
        wave_size: size(attribute(Attribute::CU_DEVICE_ATTRIBUTE_WARP_SIZE)?),
        shared_bytes_per_block: size(attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?),
        memory_bytes: memory as u64,
        driver_version: version_text(driver.version()?),
    };
    Ok((device, info, capability))
}

/// The compiler's name of a compute capability. From 9.0 on it is the architecture-specific one, which has wgmma and the like.
fn arch(capability: i32) -> String {
    format!("sm_{capability}{}", if capability >= 90 { "a" } else { "" })
}

impl Device {
    pub(super) fn open(index: usize) -> Result<Self> {
        let driver = driver().map_err(|error| match error {
            Error::NoDevice { backend, reason, .. } => Error::NoDevice { backend, index, reason },
            other => other,
        })?;
        let count = count(driver)?;
        if index >= count {
            let reason = format!("the driver sees {count}, numbered from 0");
            return Err(Error::NoDevice { backend: NAME, index, reason });
        }
        let (device, info, capability) = probe(driver, index)?;
        if capability < 80 {
            let what = "this GPU: compute capability 8.0 or newer is needed; use another device or the host backend";
            return Err(Error::Unsupported { backend: NAME, arch: info.arch, what: what.into() });
        }
        let mut context = null_mut();
        // SAFETY: the pointer is valid for the call.
        match unsafe { (driver.cuDevicePrimaryCtxRetain)(&mut context, device) } {
            // Nobody knows how much a context takes: the driver does not tell.
            OUT_OF_MEMORY => Err(Error::OutOfMemory { backend: NAME, bytes: 0, purpose: "the device's context" }),
            code => driver.check("cuDevicePrimaryCtxRetain", code),
        }?;
        Ok(Self { driver, info, capability, device, context })
    }

    /// Makes the context current on this thread until the guard is dropped. A thread that had none keeps it, which makes the
    /// next call cheaper; one that had another (another device, another library) gets that back.
    pub(super) fn bind(&self) -> Result<Bound<'_>> {
        let driver = self.driver;
        let mut current = null_mut();
        // SAFETY: the context is retained for as long as `self` lives; the pointers are valid for the calls.
        unsafe {
            cu!(driver, cuCtxGetCurrent(&mut current))?;
            let pushed = current != self.context && !current.is_null();
            if pushed {
                cu!(driver, cuCtxPushCurrent_v2(self.context))?;
            } else if current.is_null() {
                cu!(driver, cuCtxSetCurrent(self.context))?;
            }
            Ok(Bound { driver, pushed, relaxed: None, thread: PhantomData })
        }
    }

    /// As [`Device::bind`], and lifts the prohibitions that a capture lays on its thread.
    ///
    /// Allocating, querying an event and loading a module do not touch the captured stream, but the driver would refuse them
    /// and break the capture; ours are harmless there, so they are let through.
    pub(super) fn bind_relaxed(&self) -> Result<Bound<'_>> {
        let mut bound = self.bind()?;
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the pointer is valid for the call, which gives back one of the three modes.
        unsafe { cu!(self.driver, cuThreadExchangeStreamCaptureMode(&mut mode)) }?;
        bound.relaxed = Some(mode);
        Ok(bound)
    }

    /// Free device memory in bytes.
    pub(super) fn free_memory(&self) -> Result<usize> {
        let _bound = self.bind_relaxed()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the pointers are valid for the call.
        unsafe { cu!(self.driver, cuMemGetInfo_v2(&mut free, &mut total)) }?;
        Ok(free)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: retained once in `open`, and everything made in the context is gone.
        let _ = unsafe { cu!(self.driver, cuDevicePrimaryCtxRelease_v2(self.device)) };
    }
}

/// The device's context is current on this thread; the thread's own context and capture mode come back on drop.
pub(super) struct Bound<'a> {
    driver: &'a Driver,
    pushed: bool,
    relaxed: Option<CUstreamCaptureMode>,
    // Not to be dropped on another thread.
    thread: PhantomData<*const ()>,
}

impl Drop for Bound<'_> {
    fn drop(&mut self) {
        // SAFETY: undoes what `bind` and `bind_relaxed` did on this thread; the pointers are valid for the calls.
        unsafe {
            if let Some(mut mode) = self.relaxed {
                let _ = cu!(self.driver, cuThreadExchangeStreamCaptureMode(&mut mode));
            }
            if self.pushed {
                let _ = cu!(self.driver, cuCtxPopCurrent_v2(&mut null_mut()));
            }
        }
    }
}

/// Handle of a stream.
#[derive(Clone, Copy, PartialEq)]
pub struct StreamHandle(pub(super) CUstream);

// SAFETY: a handle of the driver, which every thread may use.
unsafe impl Send for StreamHandle {}
// SAFETY: as above.
unsafe impl Sync for StreamHandle {}

/// Handle of an event.
#[derive(Clone, Copy)]
pub struct EventHandle(CUevent);

// SAFETY: a handle of the driver, which every thread may use.
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
        let mut addr = 0;
        // SAFETY: the pointer is valid for the call.
        match unsafe { (self.driver.cuMemAlloc_v2)(&mut addr, bytes) } {
            OUT_OF_MEMORY => Ok(None),
            code => self.driver.check("cuMemAlloc", code).map(|()| Some(addr)),
        }
    }

    unsafe fn free(&self, addr: u64) {
        let Ok(_bound) = self.bind_relaxed() else { return };
        // SAFETY: the caller's promise.
        let _ = unsafe { cu!(self.driver, cuMemFree_v2(addr)) };
    }

    fn alloc_pinned(&self, bytes: usize) -> Result<NonNull<u8>> {
        let _bound = self.bind_relaxed()?;
        let mut ptr: *mut c_void = null_mut();
        // SAFETY: the pointer is valid for the call.
        unsafe { cu!(self.driver, cuMemHostAlloc(&mut ptr, bytes, 0)) }?;
        let purpose = "pinned memory for uploads";
        NonNull::new(ptr.cast()).ok_or(Error::OutOfMemory { backend: NAME, bytes, purpose })
    }

    unsafe fn free_pinned(&self, ptr: NonNull<u8>) {
        let Ok(_bound) = self.bind_relaxed() else { return };
        // SAFETY: the caller's promise.
        let _ = unsafe { cu!(self.driver, cuMemFreeHost(ptr.as_ptr().cast())) };
    }

    fn create_stream(&self) -> Result<StreamHandle> {
        let _bound = self.bind_relaxed()?;
        let mut stream = null_mut();
        // SAFETY: the pointer is valid for the call.
        unsafe { cu!(self.driver, cuStreamCreate(&mut stream, NON_BLOCKING)) }?;
        Ok(StreamHandle(stream))
    }

    fn destroy_stream(&self, stream: StreamHandle) {
        let Ok(_bound) = self.bind_relaxed() else { return };
        // SAFETY: the arena destroys its own streams once.
        let _ = unsafe { cu!(self.driver, cuStreamDestroy_v2(stream.0)) };
    }

    fn is_capturing(&self, stream: StreamHandle) -> bool {
        let Ok(_bound) = self.bind() else { return true };
        let mut status = 0;
        // SAFETY: the stream is live, the pointer is valid for the call.
        let told = unsafe { cu!(self.driver, cuStreamIsCapturing(stream.0, &mut status)) };
        told.is_err() || status != 0
    }

    fn abort_capture(&self, stream: StreamHandle) {
        super::graph::abort(self, stream);
    }

    fn create_event(&self) -> Result<EventHandle> {
        let _bound = self.bind_relaxed()?;
        let mut event = null_mut();
        // SAFETY: the pointer is valid for the call.
        unsafe { cu!(self.driver, cuEventCreate(&mut event, DISABLE_TIMING)) }?;
        Ok(EventHandle(event))
    }

    fn destroy_event(&self, event: EventHandle) {
        let Ok(_bound) = self.bind_relaxed() else { return };
        // SAFETY: the arena destroys its own events once.
        let _ = unsafe { cu!(self.driver, cuEventDestroy_v2(event.0)) };
    }

    fn record(&self, event: EventHandle, stream: StreamHandle) -> Result<()> {
        let _bound = self.bind_relaxed()?;
        // SAFETY: both are live.
        unsafe { cu!(self.driver, cuEventRecord(event.0, stream.0)) }
    }

    fn has_ended(&self, event: EventHandle) -> bool {
        let Ok(_bound) = self.bind_relaxed() else { return false };
        // SAFETY: the event is live.
        unsafe { (self.driver.cuEventQuery)(event.0) == 0 }
    }

    fn wait(&self, event: EventHandle) -> Result<()> {
        let _bound = self.bind_relaxed()?;
        // SAFETY: the event is live.
        unsafe { cu!(self.driver, cuEventSynchronize(event.0)) }
    }

    unsafe fn copy_in(&self, stream: StreamHandle, dst: u64, src: NonNull<u8>, bytes: usize) -> Result<()> {
        let _bound = self.bind()?;
        // SAFETY: the caller's promise.
        unsafe { cu!(self.driver, cuMemcpyHtoDAsync_v2(dst, src.as_ptr().cast(), bytes, stream.0)) }
    }
}

#[cfg(test)]
mod tests {
    use super::arch;

    #[test]
    fn architectures_are_named_as_the_compiler_names_them() {
        let names = [80, 86, 89, 90, 100, 120].map(arch);
        assert_eq!(names, ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"]);
    }
}
