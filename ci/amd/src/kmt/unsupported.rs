//! Functions for what the emulated device does not have.

use std::ffi::c_void;

use super::types::Status;
use super::{output, topology};

/// Functions that answer `NotSupported` whatever they are asked; C callers may pass any arguments.
macro_rules! not_supported {
    ($($name:ident)*) => {
        $(
            /// Not supported.
            #[unsafe(no_mangle)]
            pub extern "C" fn $name() -> Status {
                Status::NotSupported
            }
        )*
    };
}

not_supported! {
    hsaKmtDbgDisable hsaKmtDbgEnable hsaKmtDbgGetDeviceData hsaKmtDbgGetQueueData hsaKmtExportDMABufHandle hsaKmtRegisterGraphicsHandleToNodes
    hsaKmtRegisterSharedHandle hsaKmtReplaceAsanHeaderPage hsaKmtReturnAsanHeaderPage hsaKmtRuntimeEnable hsaKmtSPMAcquire hsaKmtSPMRelease
    hsaKmtSPMSetDestBuffer hsaKmtSVMGetAttr hsaKmtSVMSetAttr hsaKmtShareMemory
}

/// Functions that have nothing to do.
macro_rules! nothing_to_do {
    ($($name:ident)*) => {
        $(
            /// Nothing to do.
            #[unsafe(no_mangle)]
            pub extern "C" fn $name() -> Status {
                Status::Success
            }
        )*
    };
}

nothing_to_do! {
    hsaKmtGetTileConfig hsaKmtRuntimeDisable hsaKmtSetMemoryPolicy hsaKmtSetTrapHandler
}

/// Page faults are not retried.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hsaKmtGetXNACKMode(enabled: *mut i32) -> Status {
    // SAFETY: the caller gives a writable pointer or null.
    unsafe { output(enabled, 0) }
}

/// Page faults cannot be retried.
#[unsafe(no_mangle)]
pub extern "C" fn hsaKmtSetXNACKMode(enabled: i32) -> Status {
    if enabled == 0 { Status::Success } else { Status::NotSupported }
}

/// No debugger's capabilities.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hsaKmtGetRuntimeCapabilities(capabilities: *mut u32) -> Status {
    // SAFETY: the caller gives a writable pointer or null.
    unsafe { output(capabilities, 0) }
}

/// There is no system management interface.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hsaKmtOpenSMI(_node: u32, file: *mut i32) -> Status {
    // SAFETY: the caller gives a writable pointer or null.
    unsafe { output(file, -1) };
    Status::NotSupported
}

/// A handle for [`amdgpu_query_gpu_info`] only.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hsaKmtGetAMDGPUDeviceHandle(_node: u32, handle: *mut *mut c_void) -> Status {
    // SAFETY: the caller gives a writable pointer or null.
    unsafe { output(handle, std::ptr::dangling_mut::<c_void>()) }
}

/// libdrm's query, which the HSA runtime makes for the chip's id: this library stands before libdrm in the search order.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn amdgpu_query_gpu_info(_device: *mut c_void, info: *mut u32) -> i32 {
    // SAFETY: the first dword of the caller's struct is the chip's id.
    match unsafe { output(info, topology::DEVICE_ID.into()) } {
        Status::Success => 0,
        _ => -libc::EINVAL,
    }
}
