//! Devices: opened by backend and index, described, closed.

use std::ffi::{c_char, c_void};

use super::args::{block, naming, out_block, out_pointer};
use super::decode::Plans;
use super::status::{guard, lw_status};
use crate::Host;
use crate::backend::{Backend, DeviceInfo, GraphBackend};
use crate::error::{Error, Result};
use crate::stream::Stream;

/// Backends.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum lw_backend {
    /// The processor; one device, 0.
    LW_HOST = 0,
    /// NVIDIA GPUs. The driver is opened at run time.
    LW_CUDA = 1,
    /// AMD GPUs. HIP is opened at run time.
    LW_ROCM = 2,
}

/// An open device, with the kernels loaded on it. Any number of threads may use it at once.
pub struct lw_device(pub(super) Device);

/// A device whose backend is known at run time.
pub(super) enum Device {
    Host(Opened<Host>),
    #[cfg(feature = "cuda")]
    Cuda(Opened<crate::Cuda>),
    #[cfg(feature = "rocm")]
    Rocm(Opened<crate::Rocm>),
}

/// A backend, and what calls without a handle of their own share.
pub(super) struct Opened<B: GraphBackend> {
    pub(super) backend: B,
    pub(super) plans: Plans<B>,
}

impl<B: GraphBackend> Opened<B> {
    fn new(backend: B) -> Self {
        Self { backend, plans: Plans::default() }
    }

    /// A caller's stream, for work over the caller's memory.
    ///
    /// # Safety
    /// `stream` is NULL or a live stream of the device, and outlives the result.
    pub(super) unsafe fn stream(&self, stream: *mut c_void) -> Result<Stream<B>> {
        // SAFETY: the caller's promise.
        unsafe { Stream::visit(&self.backend, stream.addr() as u64) }.map_err(naming("stream"))
    }
}

/// `on!(device, opened => body)`: the body for whichever backend it is.
macro_rules! on {
    ($device:expr, $opened:ident => $body:expr) => {
        match &$device.0 {
            $crate::capi::device::Device::Host($opened) => $body,
            #[cfg(feature = "cuda")]
            $crate::capi::device::Device::Cuda($opened) => $body,
            #[cfg(feature = "rocm")]
            $crate::capi::device::Device::Rocm($opened) => $body,
        }
    };
}
pub(super) use on;

/// What is known of a device.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct lw_device_info {
    /// `sizeof(lw_device_info)`, set by the caller.
    pub struct_size: usize,
    /// Device memory in bytes.
    pub memory_bytes: u64,
    /// Shared memory (LDS) that one block may use, in bytes.
    pub shared_bytes_per_block: u64,
    /// Streaming multiprocessors (NVIDIA), compute units (AMD), threads (host).
    pub num_compute_units: i32,
    /// Lanes that run in lockstep: 32, 64, or 1 on the host.
    pub wave_size: i32,
    /// An `lw_backend`.
    pub backend: i32,
    /// Index among the backend's devices.
    pub index: i32,
    /// The device's own name, terminated; longer ones are cut, as the following are.
    pub name: [c_char; 128],
    /// Architecture as its compiler names it: `sm_90a`, `gfx942:sramecc+:xnack-`, `x86_64`.
    pub arch: [c_char; 64],
    /// Driver or runtime version, as that vendor writes it.
    pub driver_version: [c_char; 64],
}

block!(lw_device_info);

fn text<const N: usize>(text: &str) -> [c_char; N] {
    let mut to = [0; N];
    to.iter_mut().take(N - 1).zip(text.bytes()).for_each(|(to, byte)| *to = byte as c_char);
    to
}

fn describe(info: &DeviceInfo) -> lw_device_info {
    lw_device_info {
        struct_size: 0,
        memory_bytes: info.memory_bytes,
        shared_bytes_per_block: info.shared_bytes_per_block as u64,
        num_compute_units: info.num_compute_units as i32,
        wave_size: info.wave_size as i32,
        backend: match info.backend {
            "cuda" => lw_backend::LW_CUDA,
            "rocm" => lw_backend::LW_ROCM,
            _ => lw_backend::LW_HOST,
        } as i32,
        index: info.index as i32,
        name: text(&info.name),
        arch: text(&info.arch),
        driver_version: text(&info.driver_version),
    }
}

fn backend(number: i32) -> Result<lw_backend> {
    use lw_backend::*;
    let known = [LW_HOST, LW_CUDA, LW_ROCM].into_iter().find(|&known| known as i32 == number);
    known.ok_or_else(|| Error::argument("backend", format!("{number}: LW_HOST, LW_CUDA and LW_ROCM are possible")))
}

#[cfg(not(all(feature = "cuda", feature = "rocm")))]
fn not_built<T>(backend: &'static str) -> Result<T> {
    let reason = format!("it was built without; build with --features capi,{backend}");
    Err(Error::Unavailable { backend, library: "this library's own support", reason })
}

fn open(number: i32, index: i32) -> Result<Device> {
    let at = usize::try_from(index).map_err(|_| Error::argument("index", format!("{index}: counted from 0")))?;
    match backend(number)? {
        lw_backend::LW_HOST if at == 0 => Ok(Device::Host(Opened::new(Host::new()))),
        lw_backend::LW_HOST => {
            Err(Error::NoDevice { backend: "host", index: at, reason: "the host is one device, 0".into() })
        }
        #[cfg(feature = "cuda")]
        lw_backend::LW_CUDA => Ok(Device::Cuda(Opened::new(crate::Cuda::new(at)?))),
        #[cfg(feature = "rocm")]
        lw_backend::LW_ROCM => Ok(Device::Rocm(Opened::new(crate::Rocm::new(at)?))),
        #[cfg(not(feature = "cuda"))]
        lw_backend::LW_CUDA => not_built("cuda"),
        #[cfg(not(feature = "rocm"))]
        lw_backend::LW_ROCM => not_built("rocm"),
    }
}

fn count(number: i32) -> Result<usize> {
    match backend(number)? {
        lw_backend::LW_HOST => Ok(1),
        #[cfg(feature = "cuda")]
        lw_backend::LW_CUDA => Ok(crate::Cuda::devices()?.len()),
        #[cfg(feature = "rocm")]
        lw_backend::LW_ROCM => Ok(crate::Rocm::devices()?.len()),
        #[cfg(not(feature = "cuda"))]
        lw_backend::LW_CUDA => not_built("cuda"),
        #[cfg(not(feature = "rocm"))]
        lw_backend::LW_ROCM => not_built("rocm"),
    }
}

/// A caller's device.
///
/// # Safety
/// `device` is NULL or an open device that stays open for as long as the result is used.
pub(super) unsafe fn device<'a>(device: *const lw_device) -> Result<&'a lw_device> {
    // SAFETY: the caller's promise.
    unsafe { device.as_ref() }.ok_or_else(|| Error::argument("device", "NULL: lw_device_open makes one"))
}

/// Number of a backend's devices; 0 where there is a driver but no GPU. Makes no context on any.
///
/// `LW_ERROR_UNAVAILABLE` where the vendor's library is missing, too old or not built in; the text says what was tried.
///
/// # Safety
/// `count` is NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lw_device_count(backend: i32, count: *mut i32) -> lw_status {
    guard(|| {
        let to = out_pointer("count", count)?;
        let number = self::count(backend)? as i32;
        // SAFETY: not NULL and aligned, and the caller's promise.
        unsafe { to.write(number) };
        Ok(())
    })
}

/// Opens device `index` (as `CUDA_VISIBLE_DEVICES` or `HIP_VISIBLE_DEVICES` numbers them) in the context that all libraries of the
/// process share. Close it with `lw_device_close`.
///
/// `LW_ERROR_UNAVAILABLE`, `LW_ERROR_NO_DEVICE`, `LW_ERROR_UNSUPPORTED` for a device that no kernel serves, `LW_ERROR_OUT_OF_MEMORY`.
///
/// # Safety
/// `device` is NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lw_device_open(backend: i32, index: i32, device: *mut *mut lw_device) -> lw_status {
    guard(|| {
        let to = out_pointer("device", device)?;
        let opened = Box::new(lw_device(open(backend, index)?));
        // SAFETY: not NULL and aligned, and the caller's promise.
        unsafe { to.write(Box::into_raw(opened)) };
        Ok(())
    })
}

/// Closes a device. Its work must have ended, and graphs that captured it and sessions on it be gone: their kernels are unloaded.
/// NULL is ignored.
///
/// # Safety
/// `device` is NULL or was opened and not closed before, and no call is using it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lw_device_close(device: *mut lw_device) {
    if !device.is_null() {
        guard(|| {
            // SAFETY: it came from `lw_device_open`, by the caller's promise for the last time.
            drop(unsafe { Box::from_raw(device) });
            Ok(())
        });
    }
}

/// The device's facts. `info->struct_size` must be set.
///
/// # Safety
/// `device` is open; `info` is NULL or can be read and written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lw_device_get_info(device: *const lw_device, info: *mut lw_device_info) -> lw_status {
    guard(|| {
        // SAFETY: the caller's promises.
        unsafe {
            let device = self::device(device)?;
            Ok(out_block("info", info, describe(on!(device, opened => opened.backend.device())))?)
        }
    })
}
