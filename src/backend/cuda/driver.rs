//! The CUDA driver library: opened at run time, its status codes as plain integers.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::path::Path;
use std::sync::OnceLock;

use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUfunction, CUfunction_attribute, CUgraph,
    CUgraphExec, CUgraphNode, CUlaunchConfig, CUmodule, CUstream, CUstreamCaptureMode, CUtensorMap,
    CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave, CUtensorMapL2promotion, CUtensorMapSwizzle,
};

use super::library::{function_table, open};
use crate::error::{Error, Result};

/// Name of the backend.
pub(super) const NAME: &str = "cuda";

/// Oldest driver whose functions are all used: graphs and launch attributes as they are since CUDA 12.0.
const MIN_VERSION: i32 = 12_000;

const LIBRARY: &str = if cfg!(windows) { "nvcuda.dll" } else { "libcuda.so.1" };

pub(super) const OUT_OF_MEMORY: i32 = 2;
const NO_DEVICE: i32 = 100;

function_table! {
    /// What is used of the driver.
    struct Driver {
        fn cuInit(c_uint);
        fn cuDriverGetVersion(*mut c_int);
        fn cuGetErrorName(i32, *mut *const c_char);
        fn cuGetErrorString(i32, *mut *const c_char);
        fn cuDeviceGet(*mut CUdevice, c_int);
        fn cuDeviceGetCount(*mut c_int);
        fn cuDeviceGetName(*mut c_char, c_int, CUdevice);
        fn cuDeviceGetAttribute(*mut c_int, CUdevice_attribute, CUdevice);
        fn cuDeviceTotalMem_v2(*mut usize, CUdevice);
        fn cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice);
        fn cuDevicePrimaryCtxRelease_v2(CUdevice);
        fn cuCtxGetCurrent(*mut CUcontext);
        fn cuCtxSetCurrent(CUcontext);
        fn cuCtxPushCurrent_v2(CUcontext);
        fn cuCtxPopCurrent_v2(*mut CUcontext);
        fn cuThreadExchangeStreamCaptureMode(*mut CUstreamCaptureMode);
        fn cuMemGetInfo_v2(*mut usize, *mut usize);
        fn cuMemAlloc_v2(*mut CUdeviceptr, usize);
        fn cuMemFree_v2(CUdeviceptr);
        fn cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
        fn cuMemFreeHost(*mut c_void);
        fn cuMemcpyHtoDAsync_v2(CUdeviceptr, *const c_void, usize, CUstream);
        fn cuMemcpyDtoHAsync_v2(*mut c_void, CUdeviceptr, usize, CUstream);
        fn cuMemsetD8Async(CUdeviceptr, u8, usize, CUstream);
        fn cuStreamCreate(*mut CUstream, c_uint);
        fn cuStreamDestroy_v2(CUstream);
        fn cuStreamSynchronize(CUstream);
        fn cuStreamIsCapturing(CUstream, *mut i32);
        fn cuStreamBeginCapture_v2(CUstream, CUstreamCaptureMode);
        fn cuStreamEndCapture(CUstream, *mut CUgraph);
        fn cuEventCreate(*mut CUevent, c_uint);
        fn cuEventDestroy_v2(CUevent);
        fn cuEventRecord(CUevent, CUstream);
        fn cuEventQuery(CUevent);
        fn cuEventSynchronize(CUevent);
        fn cuModuleLoadData(*mut CUmodule, *const c_void);
        fn cuModuleUnload(CUmodule);
        fn cuModuleGetFunction(*mut CUfunction, CUmodule, *const c_char);
        fn cuFuncGetAttribute(*mut c_int, CUfunction_attribute, CUfunction);
        fn cuFuncSetAttribute(CUfunction, CUfunction_attribute, c_int);
        fn cuLaunchKernelEx(*const CUlaunchConfig, CUfunction, *mut *mut c_void, *mut *mut c_void);
        fn cuTensorMapEncodeTiled(
            *mut CUtensorMap,
            CUtensorMapDataType,
            c_uint,
            *mut c_void,
            *const u64,
            *const u64,
            *const c_uint,
            *const c_uint,
            CUtensorMapInterleave,
            CUtensorMapSwizzle,
            CUtensorMapL2promotion,
            CUtensorMapFloatOOBfill,
        );
        fn cuGraphGetNodes(CUgraph, *mut CUgraphNode, *mut usize);
        fn cuGraphNodeGetType(CUgraphNode, *mut i32);
        fn cuGraphChildGraphNodeGetGraph(CUgraphNode, *mut CUgraph);
        fn cuGraphDestroy(CUgraph);
        fn cuGraphInstantiateWithFlags(*mut CUgraphExec, CUgraph, c_ulonglong);
        fn cuGraphUpload(CUgraphExec, CUstream);
        fn cuGraphLaunch(CUgraphExec, CUstream);
        fn cuGraphExecDestroy(CUgraphExec);
    }
}

/// Calls a function of the table and turns its status into a [`Result`]. To be used inside `unsafe`.
macro_rules! cu {
    ($driver:expr, $function:ident($($arg:expr),* $(,)?)) => {
        $driver.check(stringify!($function), ($driver.$function)($($arg),*))
    };
}
pub(super) use cu;

/// The driver, opened and initialised once per process and never closed.
///
/// # Errors
/// [`Error::Unavailable`] without a usable driver, [`Error::NoDevice`] where it finds no GPU.
pub(super) fn driver() -> Result<&'static Driver> {
    static DRIVER: OnceLock<Driver> = OnceLock::new();
    match DRIVER.get() {
        Some(driver) => Ok(driver),
        None => {
            let driver = Driver::open(Path::new(LIBRARY))?;
            Ok(DRIVER.get_or_init(|| driver))
        }
    }
}

fn unavailable(reason: String) -> Error {
    Error::Unavailable { backend: NAME, library: LIBRARY, reason }
}

/// `13000` as `13.0`.
pub(super) fn version_text(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

impl Driver {
    fn open(path: &Path) -> Result<Self> {
        let hint = "install the NVIDIA driver, or choose the host backend";
        let library = open(path).map_err(|error| unavailable(format!("{error}; {hint}")))?;
        // SAFETY: the types are those of the driver's published interface, and the library is forgotten below.
        let driver = unsafe { Self::resolve(&library) }.map_err(|error| {
            unavailable(format!("{error}; the driver is older than CUDA {}, update it", version_text(MIN_VERSION)))
        })?;
        // Its threads and exit handlers outlive everything of ours.
        std::mem::forget(library);
        // SAFETY: the only argument must be 0.
        match unsafe { (driver.cuInit)(0) } {
            0 => {}
            NO_DEVICE => {
                return Err(Error::NoDevice { backend: NAME, index: 0, reason: driver.describe(NO_DEVICE) });
            }
            code => return Err(unavailable(format!("cuInit failed with {code} ({})", driver.describe(code)))),
        }
        let version = driver.version()?;
        if version < MIN_VERSION {
            let (has, needs) = (version_text(version), version_text(MIN_VERSION));
            return Err(unavailable(format!("the driver supports CUDA {has}, {needs} is needed; update it")));
        }
        Ok(driver)
    }

    /// The CUDA version that the driver supports: `13000` for 13.0.
    pub(super) fn version(&self) -> Result<i32> {
        let mut version = 0;
        // SAFETY: the pointer is valid for the call.
        unsafe { cu!(self, cuDriverGetVersion(&mut version)) }?;
        Ok(version)
    }

    /// A status as a typed error, with the driver's name and text for it.
    pub(super) fn check(&self, call: &'static str, code: i32) -> Result<()> {
        match code {
            0 => Ok(()),
            code => Err(Error::Driver { backend: NAME, call, code, message: self.describe(code) }),
        }
    }

    fn describe(&self, code: i32) -> String {
        let text = |function: unsafe extern "C" fn(i32, *mut *const c_char) -> i32| {
            let mut text = std::ptr::null();
            // SAFETY: takes any code; on success the text is a static string of the driver, on failure null.
            unsafe {
                let known = function(code, &mut text) == 0 && !text.is_null();
                known.then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
            }
        };
        match (text(self.cuGetErrorName), text(self.cuGetErrorString)) {
            (Some(name), Some(words)) => format!("{name}: {words}"),
            (Some(name), None) => name,
            _ => "an error that this driver has no name for".into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open_error(name: &str) -> String {
        match Driver::open(Path::new(name)).map(|_| ()) {
            Err(Error::Unavailable { backend: "cuda", reason, .. }) => reason,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_missing_library_is_a_typed_error_with_the_loaders_words() {
        let reason = open_error("libno-such-driver.so.1");
        assert!(reason.contains("libno-such-driver.so.1"), "{reason}");
        assert!(reason.contains("install the NVIDIA driver"), "{reason}");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_library_without_the_drivers_functions_is_a_typed_error() {
        let reason = open_error("libc.so.6");
        assert!(reason.contains("cuInit") && reason.contains("older than CUDA 12.0"), "{reason}");
    }
}
