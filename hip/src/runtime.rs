//! The HIP runtime: a method for each call, with typed errors.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::OnceLock;

use crate::api::HipApi;
use crate::error::{Error, HipError, Result};
use crate::graph::{GraphNodeKind, KernelNode};
use crate::loader::{self, Search};
use crate::types::*;

/// A version of HIP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// First number.
    pub major: u32,
    /// Second number.
    pub minor: u32,
    /// AMD's build number: not ROCm's third number.
    pub patch: u32,
}

impl Version {
    // The runtime packs its version as major * 10^7 + minor * 10^5 + patch.
    fn from_packed(packed: c_int) -> Self {
        let packed = u32::try_from(packed).unwrap_or(0);
        Self { major: packed / 10_000_000, minor: packed / 100_000 % 100, patch: packed % 100_000 }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// The opened HIP runtime.
///
/// Methods may be called from any thread. Those that allocate, create or load act on the thread's current device
/// ([`Hip::set_device`]). Handles are C's; a method that takes one is `unsafe`, since nothing here knows whether it is live.
#[derive(Debug)]
pub struct Hip {
    api: HipApi,
    path: PathBuf,
}

// Calls a function of the table and checks what it returns.
macro_rules! call {
    ($hip:expr, optional $symbol:ident($($arg:expr),*)) => {
        match $hip.api.$symbol {
            Some(function) => {
                // SAFETY: pointers made here are valid for the call; handles and pointers passed in are the caller's promise.
                let code = unsafe { function($($arg),*) };
                $hip.check(stringify!($symbol), code)
            }
            None => Err(Error::Unsupported { symbol: stringify!($symbol) }),
        }
    };
    ($hip:expr, $symbol:ident($($arg:expr),*)) => {{
        // SAFETY: as above.
        let code = unsafe { ($hip.api.$symbol)($($arg),*) };
        $hip.check(stringify!($symbol), code)
    }};
}

// As `call`, for functions that write their result through their first pointers.
macro_rules! get {
    ($hip:expr, optional $symbol:ident($init:expr $(, $arg:expr)*)) => {{
        let mut value = $init;
        call!($hip, optional $symbol(&mut value $(, $arg)*)).map(|()| value)
    }};
    ($hip:expr, $symbol:ident($init:expr $(, $arg:expr)*)) => {{
        let mut value = $init;
        call!($hip, $symbol(&mut value $(, $arg)*)).map(|()| value)
    }};
}

pub(crate) fn c_string(argument: &'static str, text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| Error::InteriorNul { argument })
}

/// Text of a static C string that a library gave.
///
/// # Safety
/// `text` is null or a C string that is never freed.
pub(crate) unsafe fn static_text(text: *const c_char) -> Option<&'static str> {
    if text.is_null() {
        return None;
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_str().ok()
}

mod queue;

impl Hip {
    /// The process's HIP runtime, opened on the first call from [`Search::from_env`]'s places and never closed.
    ///
    /// # Errors
    /// [`Error::Unavailable`], the same at every call.
    pub fn load() -> Result<&'static Self> {
        static HIP: OnceLock<Result<Hip>> = OnceLock::new();
        HIP.get_or_init(|| Self::open(&Search::from_env())).as_ref().map_err(Clone::clone)
    }

    /// Opens a runtime from other places. Two runtimes in one process do not know of each other.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub fn open(search: &Search) -> Result<Self> {
        let (api, path) = loader::open("libamdhip64", &["libamdhip64"], search, HipApi::bind)?;
        Ok(Self { api, path })
    }

    /// The functions, for calls that have no method.
    pub fn api(&self) -> &HipApi {
        &self.api
    }

    /// What the loader was given when it found the library.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The library's name for a code, or this crate's.
    pub fn error_name(&self, code: HipError) -> &'static str {
        // SAFETY: takes any integer and gives a static string.
        unsafe { static_text((self.api.hipGetErrorName)(code)) }.unwrap_or(code.name())
    }

    /// The library's text for a code, or this crate's where the library only repeats the name (HIP 5.2).
    pub fn error_message(&self, code: HipError) -> &'static str {
        // SAFETY: takes any integer and gives a static string.
        let text = unsafe { static_text((self.api.hipGetErrorString)(code)) };
        text.filter(|text| *text != code.name()).unwrap_or(code.message())
    }

    /// Makes a [`Result`] of what a call returned, for calls made through [`Hip::api`].
    ///
    /// # Errors
    /// [`Error::Hip`] unless the code is 0.
    pub fn check(&self, call: &'static str, code: HipError) -> Result<()> {
        if code.is_success() {
            return Ok(());
        }
        let message = self.error_message(code).to_owned();
        Err(Error::Hip { call, code, message })
    }

    // --- versions and devices ---

    /// Version of the runtime.
    ///
    /// # Errors
    /// [`Error::Hip`].
    pub fn runtime_version(&self) -> Result<Version> {
        get!(self, hipRuntimeGetVersion(0)).map(Version::from_packed)
    }

    /// Version of the driver, which HIP gives as its own.
    ///
    /// # Errors
    /// [`Error::Hip`].
    pub fn driver_version(&self) -> Result<Version> {
        get!(self, hipDriverGetVersion(0)).map(Version::from_packed)
    }

    /// Number of devices, at least 1.
    ///
    /// # Errors
    /// [`Error::NoDevice`] if there is none, as far as this process may see; [`Error::Hip`].
    pub fn device_count(&self) -> Result<usize> {
        let no_device = |code| Error::NoDevice { code, message: self.error_message(code).to_owned() };
        match get!(self, hipGetDeviceCount(0)) {
            Ok(count) if count > 0 => Ok(count as usize),
            Ok(_) => Err(no_device(HipError::NO_DEVICE)),
            // HIP 5.2 has the second code for a machine without a GPU.
            Err(Error::Hip { code: code @ (HipError::NO_DEVICE | HipError::INVALID_DEVICE), .. }) => {
                Err(no_device(code))
            }
            Err(error) => Err(error),
        }
    }

    /// Makes `device` this thread's current device. Makes no context: HIP has one per device, of its own.
    ///
    /// # Errors
    /// [`Error::Hip`].
    pub fn set_device(&self, device: usize) -> Result<()> {
        call!(self, hipSetDevice(index(device)))
    }

    /// This thread's current device.
    ///
    /// # Errors
    /// [`Error::Hip`].
    pub fn current_device(&self) -> Result<usize> {
        get!(self, hipGetDevice(0)).map(|device: c_int| device as usize)
    }

    /// One fact of a device.
    ///
    /// # Errors
    /// [`Error::Hip`].
    pub fn device_attribute(&self, attribute: hipDeviceAttribute_t, device: usize) -> Result<i32> {
        get!(self, hipDeviceGetAttribute(0, attribute, index(device)))
    }

    /// A device's name.
    ///
    /// # Errors
    /// [`Error::Hip`].
    pub fn device_name(&self, device: usize) -> Result<String> {
        let mut name = [0; 256];
        call!(self, hipDeviceGetName(name.as_mut_ptr(), name.len() as c_int, index(device)))?;
        Ok(text(&name))
    }

    /// A device's memory in bytes.
    ///
    /// # Errors
    /// [`Error::Hip`].
    pub fn device_memory(&self, device: usize) -> Result<usize> {
        get!(self, hipDeviceTotalMem(0, index(device)))
    }

    /// A device's place on the PCI bus, `0000:c1:00.0`.
    ///
    /// # Errors
    /// [`Error::Hip`].
    pub fn device_pci_bus_id(&self, device: usize) -> Result<String> {
        let mut id = [0; 64];
        call!(self, hipDeviceGetPCIBusId(id.as_mut_ptr(), id.len() as c_int, index(device)))?;
        Ok(text(&id))
    }

    /// A device's architecture with the features that its code objects must match: `gfx942:sramecc+:xnack-`.
    ///
    /// # Errors
    /// [`Error::Hip`]; [`Error::Unsupported`] if the library has neither function for properties.
    pub fn arch_name(&self, device: usize) -> Result<String> {
        // Zeroed room for layouts that may grow: no known one exceeds a third of this.
        #[repr(C)]
        union Room {
            new: hipDeviceProp_tR0600,
            old: hipDeviceProp_tR0000,
            bytes: [u8; 4096],
        }
        let mut room = Room { bytes: [0; 4096] };
        let new = self.api.hipGetDevicePropertiesR0600.is_some();
        if new {
            call!(self, optional hipGetDevicePropertiesR0600((&raw mut room).cast(), index(device)))?;
        } else {
            call!(self, optional hipGetDeviceProperties((&raw mut room).cast(), index(device)))?;
        }
        // SAFETY: both are structs of integers and pointers, for which zeros and what the library wrote are values.
        Ok(unsafe { if new { text(&room.new.gcnArchName) } else { text(&room.old.gcnArchName) } })
    }

    /// Waits for all work of the current device.
    ///
    /// # Errors
    /// [`Error::Hip`], those of earlier work included.
    pub fn device_synchronize(&self) -> Result<()> {
        call!(self, hipDeviceSynchronize())
    }

    // --- memory ---

    /// Free and total memory of the current device, in bytes.
    ///
    /// # Errors
    /// [`Error::Hip`].
    pub fn memory_info(&self) -> Result<(usize, usize)> {
        let (mut free, mut total) = (0, 0);
        call!(self, hipMemGetInfo(&mut free, &mut total))?;
        Ok((free, total))
    }

    /// Allocates device memory.
    ///
    /// # Errors
    /// [`Error::Hip`] with [`HipError::OUT_OF_MEMORY`].
    pub fn malloc(&self, bytes: usize) -> Result<*mut c_void> {
        get!(self, hipMalloc(ptr::null_mut(), bytes))
    }

    /// Frees device memory, waiting for the device first.
    ///
    /// # Errors
    /// [`Error::Hip`].
    ///
    /// # Safety
    /// `ptr` came from [`Hip::malloc`] or [`Hip::malloc_async`] and no work uses it any more.
    pub unsafe fn free(&self, ptr: *mut c_void) -> Result<()> {
        call!(self, hipFree(ptr))
    }

    /// Allocates device memory in stream order from the current device's pool.
    ///
    /// # Errors
    /// [`Error::Hip`], [`Error::Unsupported`].
    ///
    /// # Safety
    /// `stream` is live. The memory is used after this point of the stream only.
    pub unsafe fn malloc_async(&self, bytes: usize, stream: hipStream_t) -> Result<*mut c_void> {
        get!(self, optional hipMallocAsync(ptr::null_mut(), bytes, stream))
    }

    /// Frees device memory in stream order.
    ///
    /// # Errors
    /// [`Error::Hip`], [`Error::Unsupported`].
    ///
    /// # Safety
    /// `ptr` came from [`Hip::malloc_async`], `stream` is live, and no work after this point of the stream uses the memory.
    pub unsafe fn free_async(&self, ptr: *mut c_void, stream: hipStream_t) -> Result<()> {
        call!(self, optional hipFreeAsync(ptr, stream))
    }

    /// A device's own pool.
    ///
    /// # Errors
    /// [`Error::Hip`], [`Error::Unsupported`].
    pub fn default_pool(&self, device: usize) -> Result<hipMemPool_t> {
        get!(self, optional hipDeviceGetDefaultMemPool(ptr::null_mut(), index(device)))
    }

    /// Sets how many bytes of free memory a pool keeps at a synchronisation.
    ///
    /// # Errors
    /// [`Error::Hip`], [`Error::Unsupported`].
    ///
    /// # Safety
    /// `pool` is live.
    pub unsafe fn set_pool_threshold(&self, pool: hipMemPool_t, mut bytes: u64) -> Result<()> {
        let value = (&raw mut bytes).cast();
        call!(self, optional hipMemPoolSetAttribute(pool, hipMemPoolAttrReleaseThreshold, value))
    }

    /// Gives a pool's free memory back, but for `keep_bytes`.
    ///
    /// # Errors
    /// [`Error::Hip`], [`Error::Unsupported`].
    ///
    /// # Safety
    /// `pool` is live.
    pub unsafe fn trim_pool(&self, pool: hipMemPool_t, keep_bytes: usize) -> Result<()> {
        call!(self, optional hipMemPoolTrimTo(pool, keep_bytes))
    }

    /// Allocates pinned host memory, with flags `hipHostMalloc*`.
    ///
    /// # Errors
    /// [`Error::Hip`].
    pub fn host_malloc(&self, bytes: usize, flags: c_uint) -> Result<*mut c_void> {
        get!(self, hipHostMalloc(ptr::null_mut(), bytes, flags))
    }

    /// Frees pinned host memory.
    ///
    /// # Errors
    /// [`Error::Hip`].
    ///
    /// # Safety
    /// `ptr` came from [`Hip::host_malloc`] and no work uses it any more.
    pub unsafe fn host_free(&self, ptr: *mut c_void) -> Result<()> {
        call!(self, hipHostFree(ptr))
    }

    /// Copies `bytes` and waits.
    ///
    /// # Errors
    /// [`Error::Hip`].
    ///
    /// # Safety
    /// Both ranges are valid on the sides that `kind` names, and nothing else writes them meanwhile.
    pub unsafe fn memcpy(&self, dst: *mut c_void, src: *const c_void, bytes: usize, kind: hipMemcpyKind) -> Result<()> {
        call!(self, hipMemcpy(dst, src, bytes, kind))
    }

    /// Copies `bytes` in stream order.
    ///
    /// # Errors
    /// [`Error::Hip`].
    ///
    /// # Safety
    /// As [`Hip::memcpy`], until the stream has passed the copy; `stream` is live.
    pub unsafe fn memcpy_async(
        &self,
        dst: *mut c_void,
        src: *const c_void,
        bytes: usize,
        kind: hipMemcpyKind,
        stream: hipStream_t,
    ) -> Result<()> {
        call!(self, hipMemcpyAsync(dst, src, bytes, kind, stream))
    }

    /// Sets `bytes` bytes and waits.
    ///
    /// # Errors
    /// [`Error::Hip`].
    ///
    /// # Safety
    /// The range is device memory that nothing else uses meanwhile.
    pub unsafe fn memset(&self, dst: *mut c_void, byte: u8, bytes: usize) -> Result<()> {
        call!(self, hipMemset(dst, c_int::from(byte), bytes))
    }

    /// Sets `bytes` bytes in stream order.
    ///
    /// # Errors
    /// [`Error::Hip`].
    ///
    /// # Safety
    /// As [`Hip::memset`], until the stream has passed the call; `stream` is live.
    pub unsafe fn memset_async(&self, dst: *mut c_void, byte: u8, bytes: usize, stream: hipStream_t) -> Result<()> {
        call!(self, hipMemsetAsync(dst, c_int::from(byte), bytes, stream))
    }
}

// An index past C's range becomes one that no device has, so the library itself refuses it.
fn index(device: usize) -> c_int {
    c_int::try_from(device).unwrap_or(c_int::MAX)
}
