//! Constants and layouts of the published `hip-sys` (HIP 5.4), which bindgen made, against ours.

use std::mem::{align_of, offset_of, size_of};

use hip_sys::{HipError, types};
use published::hiprt;

#[test]
fn codes_have_the_published_values() {
    macro_rules! same {
        ($($ours:ident = $theirs:ident)*) => {$(
            assert_eq!(HipError::$ours.0, hiprt::hipError_t::$theirs as i32);
            assert_eq!(HipError::$ours.name(), stringify!($theirs));
        )*};
    }
    same! {
        SUCCESS = hipSuccess
        INVALID_VALUE = hipErrorInvalidValue
        OUT_OF_MEMORY = hipErrorOutOfMemory
        NOT_INITIALIZED = hipErrorNotInitialized
        INVALID_CONFIGURATION = hipErrorInvalidConfiguration
        INSUFFICIENT_DRIVER = hipErrorInsufficientDriver
        NO_DEVICE = hipErrorNoDevice
        INVALID_DEVICE = hipErrorInvalidDevice
        INVALID_IMAGE = hipErrorInvalidImage
        NO_BINARY_FOR_GPU = hipErrorNoBinaryForGpu
        INVALID_HANDLE = hipErrorInvalidHandle
        NOT_FOUND = hipErrorNotFound
        NOT_READY = hipErrorNotReady
        ILLEGAL_ADDRESS = hipErrorIllegalAddress
        LAUNCH_OUT_OF_RESOURCES = hipErrorLaunchOutOfResources
        LAUNCH_FAILURE = hipErrorLaunchFailure
        NOT_SUPPORTED = hipErrorNotSupported
        STREAM_CAPTURE_UNSUPPORTED = hipErrorStreamCaptureUnsupported
        STREAM_CAPTURE_INVALIDATED = hipErrorStreamCaptureInvalidated
        STREAM_CAPTURE_UNMATCHED = hipErrorStreamCaptureUnmatched
        STREAM_CAPTURE_UNJOINED = hipErrorStreamCaptureUnjoined
        STREAM_CAPTURE_WRONG_THREAD = hipErrorStreamCaptureWrongThread
        GRAPH_EXEC_UPDATE_FAILURE = hipErrorGraphExecUpdateFailure
        UNKNOWN = hipErrorUnknown
    }
}

#[test]
fn enumerations_have_the_published_values() {
    macro_rules! same {
        ($($of:ident: $($name:ident)*;)*) => {$($(
            assert_eq!(types::$name as i64, hiprt::$of::$name as i64, stringify!($name));
        )*)*};
    }
    same! {
        hipDeviceAttribute_t: hipDeviceAttributeMultiprocessorCount hipDeviceAttributeWarpSize
            hipDeviceAttributeMaxSharedMemoryPerBlock hipDeviceAttributeMaxSharedMemoryPerMultiprocessor
            hipDeviceAttributeMaxThreadsPerBlock hipDeviceAttributeMemoryPoolsSupported hipDeviceAttributeL2CacheSize
            hipDeviceAttributeComputeCapabilityMajor hipDeviceAttributeComputeCapabilityMinor
            hipDeviceAttributePhysicalMultiProcessorCount hipDeviceAttributeAsicRevision;
        hipMemcpyKind: hipMemcpyHostToHost hipMemcpyHostToDevice hipMemcpyDeviceToHost hipMemcpyDeviceToDevice
            hipMemcpyDefault;
        hipStreamCaptureMode: hipStreamCaptureModeGlobal hipStreamCaptureModeThreadLocal hipStreamCaptureModeRelaxed;
        hipStreamCaptureStatus: hipStreamCaptureStatusNone hipStreamCaptureStatusActive
            hipStreamCaptureStatusInvalidated;
        hipMemPoolAttr: hipMemPoolAttrReleaseThreshold hipMemPoolAttrReservedMemCurrent hipMemPoolAttrReservedMemHigh
            hipMemPoolAttrUsedMemCurrent hipMemPoolAttrUsedMemHigh;
        hipGraphInstantiateFlags: hipGraphInstantiateFlagAutoFreeOnLaunch;
        hipGraphExecUpdateResult: hipGraphExecUpdateSuccess hipGraphExecUpdateError;
        hipFunction_attribute: HIP_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK HIP_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
            HIP_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES HIP_FUNC_ATTRIBUTE_NUM_REGS
            HIP_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        hipFuncAttribute: hipFuncAttributeMaxDynamicSharedMemorySize;
    }
}

#[test]
fn structs_have_the_published_layout() {
    macro_rules! same {
        ($($ours:ident = $theirs:ident: $($field:ident)*;)*) => {$(
            assert_eq!(size_of::<types::$ours>(), size_of::<hiprt::$theirs>());
            assert_eq!(align_of::<types::$ours>(), align_of::<hiprt::$theirs>());
            $(assert_eq!(offset_of!(types::$ours, $field), offset_of!(hiprt::$theirs, $field), stringify!($field));)*
        )*};
    }
    same! {
        dim3 = dim3: x y z;
        hipKernelNodeParams = hipKernelNodeParams: blockDim extra func gridDim kernelParams sharedMemBytes;
        hipDeviceProp_tR0000 = hipDeviceProp_t: name totalGlobalMem warpSize maxGridSize totalConstMem multiProcessorCount
            arch gcnArch gcnArchName maxTexture3D hdpMemFlushCntl memPitch isLargeBar asicRevision
            pageableMemoryAccessUsesHostPageTables;
    }
    assert_eq!(size_of::<types::hipDeviceProp_tR0600>(), 1472);
}
