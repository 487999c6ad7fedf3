//! C's types and constants, under C's names. Enumerations are integers, handles pointers to opaque structs.
#![allow(non_camel_case_types, non_snake_case, non_upper_case_globals)]

use std::ffi::{c_char, c_int, c_uint, c_void};

pub use crate::properties::{hipDeviceArch_t, hipDeviceProp_tR0000, hipDeviceProp_tR0600, hipUUID};

macro_rules! handles {
    ($($(#[$doc:meta])* $handle:ident = $opaque:ident;)*) => {$(
        #[doc = concat!("What [`", stringify!($handle), "`] points to.")]
        #[repr(C)]
        #[derive(Debug)]
        pub struct $opaque {
            _opaque: [u8; 0],
        }
        $(#[$doc])*
        pub type $handle = *mut $opaque;
    )*};
}

handles! {
    /// A queue of work; null is the default stream.
    hipStream_t = ihipStream_t;
    /// A point in a stream.
    hipEvent_t = ihipEvent_t;
    /// A loaded code object.
    hipModule_t = ihipModule_t;
    /// A kernel of a module.
    hipFunction_t = ihipModuleSymbol_t;
    /// A pool that `hipMallocAsync` takes from.
    hipMemPool_t = ihipMemPoolHandle_t;
    /// A captured graph.
    hipGraph_t = ihipGraph;
    /// A node of a graph.
    hipGraphNode_t = hipGraphNode;
    /// An instantiated graph.
    hipGraphExec_t = hipGraphExec;
    /// A program of the run-time compiler.
    hiprtcProgram = _hiprtcProgram;
}

/// Index of a device.
pub type hipDevice_t = c_int;
/// A device address.
pub type hipDeviceptr_t = *mut c_void;
/// What is asked of `hipDeviceGetAttribute`.
pub type hipDeviceAttribute_t = c_int;
/// Direction of a copy.
pub type hipMemcpyKind = c_int;
/// Which calls of which threads break a capture.
pub type hipStreamCaptureMode = c_int;
/// Whether a stream is captured.
pub type hipStreamCaptureStatus = c_int;
/// Kind of a graph node, numbered differently by release: see [`GraphNodeKind`](crate::GraphNodeKind).
pub type hipGraphNodeType = c_int;
/// Outcome of an update of an instantiated graph.
pub type hipGraphExecUpdateResult = c_int;
/// What is asked of a memory pool.
pub type hipMemPoolAttr = c_int;
/// What is asked of the memory that graphs hold.
pub type hipGraphMemAttributeType = c_int;
/// What is asked of `hipFuncGetAttribute`.
pub type hipFunction_attribute = c_int;
/// What is set by `hipFuncSetAttribute`.
pub type hipFuncAttribute = c_int;
/// An option of `hipModuleLoadDataEx`.
pub type hipJitOption = c_int;
/// A function run on the host in stream order.
pub type hipHostFn_t = Option<unsafe extern "C" fn(*mut c_void)>;

/// Three extents.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct dim3 {
    /// Along x, at least 1.
    pub x: u32,
    /// Along y, at least 1.
    pub y: u32,
    /// Along z, at least 1.
    pub z: u32,
}

/// What a kernel node launches.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct hipKernelNodeParams {
    /// Threads of a block.
    pub blockDim: dim3,
    /// Packed arguments in place of `kernelParams`, or null.
    pub extra: *mut *mut c_void,
    /// The kernel, a [`hipFunction_t`].
    pub func: *mut c_void,
    /// Blocks.
    pub gridDim: dim3,
    /// A pointer to each argument.
    pub kernelParams: *mut *mut c_void,
    /// Dynamic LDS of a block, in bytes.
    pub sharedMemBytes: c_uint,
}

macro_rules! constants {
    ($($(#[$doc:meta])* $name:ident: $type:ty = $value:expr;)*) => {
        $($(#[$doc])* pub const $name: $type = $value;)*

        /// Every constant of this module, by its name in C.
        pub const CONSTANTS: &[(&str, i64)] = &[$((stringify!($name), $name as i64)),*];
    };
}

constants! {
    /// Whether memory errors are corrected.
    hipDeviceAttributeEccEnabled: hipDeviceAttribute_t = 0;
    /// Copy engines.
    hipDeviceAttributeAsyncEngineCount: hipDeviceAttribute_t = 2;
    /// Whether host memory can be mapped.
    hipDeviceAttributeCanMapHostMemory: hipDeviceAttribute_t = 3;
    /// Peak clock in kHz.
    hipDeviceAttributeClockRate: hipDeviceAttribute_t = 5;
    /// Who may use the device.
    hipDeviceAttributeComputeMode: hipDeviceAttribute_t = 6;
    /// Whether kernels run side by side.
    hipDeviceAttributeConcurrentKernels: hipDeviceAttribute_t = 8;
    /// Whether host and device may use managed memory at once.
    hipDeviceAttributeConcurrentManagedAccess: hipDeviceAttribute_t = 9;
    /// Whether cooperative launches work.
    hipDeviceAttributeCooperativeLaunch: hipDeviceAttribute_t = 10;
    /// Whether atomics work across the link to the host.
    hipDeviceAttributeHostNativeAtomicSupported: hipDeviceAttribute_t = 15;
    /// Whether the GPU shares the memory of the host.
    hipDeviceAttributeIntegrated: hipDeviceAttribute_t = 16;
    /// L2 in bytes.
    hipDeviceAttributeL2CacheSize: hipDeviceAttribute_t = 19;
    /// First number of the architecture (9 of gfx942).
    hipDeviceAttributeComputeCapabilityMajor: hipDeviceAttribute_t = 23;
    /// Whether managed memory works.
    hipDeviceAttributeManagedMemory: hipDeviceAttribute_t = 24;
    /// Blocks resident on one compute unit at most.
    hipDeviceAttributeMaxBlocksPerMultiProcessor: hipDeviceAttribute_t = 25;
    /// Threads along x at most.
    hipDeviceAttributeMaxBlockDimX: hipDeviceAttribute_t = 26;
    /// Threads along y at most.
    hipDeviceAttributeMaxBlockDimY: hipDeviceAttribute_t = 27;
    /// Threads along z at most.
    hipDeviceAttributeMaxBlockDimZ: hipDeviceAttribute_t = 28;
    /// Blocks along x at most.
    hipDeviceAttributeMaxGridDimX: hipDeviceAttribute_t = 29;
    /// Blocks along y at most.
    hipDeviceAttributeMaxGridDimY: hipDeviceAttribute_t = 30;
    /// Blocks along z at most.
    hipDeviceAttributeMaxGridDimZ: hipDeviceAttribute_t = 31;
    /// Threads of a block at most.
    hipDeviceAttributeMaxThreadsPerBlock: hipDeviceAttribute_t = 56;
    /// Threads resident on one compute unit at most.
    hipDeviceAttributeMaxThreadsPerMultiProcessor: hipDeviceAttribute_t = 57;
    /// Width of the memory bus in bits.
    hipDeviceAttributeMemoryBusWidth: hipDeviceAttribute_t = 59;
    /// Peak memory clock in kHz.
    hipDeviceAttributeMemoryClockRate: hipDeviceAttribute_t = 60;
    /// Second number of the architecture (4 of gfx942).
    hipDeviceAttributeComputeCapabilityMinor: hipDeviceAttribute_t = 61;
    /// Compute units.
    hipDeviceAttributeMultiprocessorCount: hipDeviceAttribute_t = 63;
    /// Whether the device reads ordinary host memory.
    hipDeviceAttributePageableMemoryAccess: hipDeviceAttribute_t = 65;
    /// PCI bus.
    hipDeviceAttributePciBusId: hipDeviceAttribute_t = 67;
    /// PCI device.
    hipDeviceAttributePciDeviceId: hipDeviceAttribute_t = 68;
    /// PCI domain.
    hipDeviceAttributePciDomainID: hipDeviceAttribute_t = 69;
    /// 32-bit registers of a block at most.
    hipDeviceAttributeMaxRegistersPerBlock: hipDeviceAttribute_t = 71;
    /// 32-bit registers of one compute unit.
    hipDeviceAttributeMaxRegistersPerMultiprocessor: hipDeviceAttribute_t = 72;
    /// LDS that the runtime keeps per block, in bytes.
    hipDeviceAttributeReservedSharedMemPerBlock: hipDeviceAttribute_t = 73;
    /// LDS that one block may use, in bytes.
    hipDeviceAttributeMaxSharedMemoryPerBlock: hipDeviceAttribute_t = 74;
    /// LDS that one block may use if it asks for more than the default, in bytes.
    hipDeviceAttributeSharedMemPerBlockOptin: hipDeviceAttribute_t = 75;
    /// LDS of one compute unit, in bytes.
    hipDeviceAttributeSharedMemPerMultiprocessor: hipDeviceAttribute_t = 76;
    /// Whether streams have priorities.
    hipDeviceAttributeStreamPrioritiesSupported: hipDeviceAttribute_t = 78;
    /// Constant memory in bytes.
    hipDeviceAttributeTotalConstantMemory: hipDeviceAttribute_t = 83;
    /// Whether host and device share one address space.
    hipDeviceAttributeUnifiedAddressing: hipDeviceAttribute_t = 85;
    /// Lanes of a wavefront.
    hipDeviceAttributeWarpSize: hipDeviceAttribute_t = 87;
    /// Whether `hipMallocAsync` and pools work.
    hipDeviceAttributeMemoryPoolsSupported: hipDeviceAttribute_t = 88;
    /// Rate of the device clock counter in kHz.
    hipDeviceAttributeClockInstructionRate: hipDeviceAttribute_t = 10000;
    /// LDS of one compute unit, in bytes.
    hipDeviceAttributeMaxSharedMemoryPerMultiprocessor: hipDeviceAttribute_t = 10002;
    /// Whether the host sees all device memory.
    hipDeviceAttributeIsLargeBar: hipDeviceAttribute_t = 10011;
    /// Revision of the chip.
    hipDeviceAttributeAsicRevision: hipDeviceAttribute_t = 10012;
    /// Compute units that the chip has, those masked off included.
    hipDeviceAttributePhysicalMultiProcessorCount: hipDeviceAttribute_t = 10015;
    /// Whether fine-grained memory works.
    hipDeviceAttributeFineGrainSupport: hipDeviceAttribute_t = 10016;

    /// From host memory to host memory.
    hipMemcpyHostToHost: hipMemcpyKind = 0;
    /// From host memory to device memory.
    hipMemcpyHostToDevice: hipMemcpyKind = 1;
    /// From device memory to host memory.
    hipMemcpyDeviceToHost: hipMemcpyKind = 2;
    /// From device memory to device memory.
    hipMemcpyDeviceToDevice: hipMemcpyKind = 3;
    /// As the pointers say.
    hipMemcpyDefault: hipMemcpyKind = 4;

    /// Any thread's unsafe call breaks the capture.
    hipStreamCaptureModeGlobal: hipStreamCaptureMode = 0;
    /// This thread's unsafe calls break the capture.
    hipStreamCaptureModeThreadLocal: hipStreamCaptureMode = 1;
    /// No call outside the stream breaks the capture.
    hipStreamCaptureModeRelaxed: hipStreamCaptureMode = 2;
    /// Work runs.
    hipStreamCaptureStatusNone: hipStreamCaptureStatus = 0;
    /// Work is recorded.
    hipStreamCaptureStatusActive: hipStreamCaptureStatus = 1;
    /// Work was recorded until an error; the capture must still be ended.
    hipStreamCaptureStatusInvalidated: hipStreamCaptureStatus = 2;

    /// The stream waits for the default stream and is waited for by it.
    hipStreamDefault: c_uint = 0;
    /// The stream knows nothing of the default stream.
    hipStreamNonBlocking: c_uint = 1;
    /// The event takes the time.
    hipEventDefault: c_uint = 0;
    /// Waiting threads sleep.
    hipEventBlockingSync: c_uint = 1;
    /// The event takes no time.
    hipEventDisableTiming: c_uint = 2;
    /// Host memory that is pinned, mapped and cached.
    hipHostMallocDefault: c_uint = 0;
    /// Pinned for every device.
    hipHostMallocPortable: c_uint = 1;
    /// Mapped into the device's address space.
    hipHostMallocMapped: c_uint = 2;
    /// Fast to write and slow to read for the host.
    hipHostMallocWriteCombined: c_uint = 4;
    /// Coherent with kernels that are running.
    hipHostMallocCoherent: c_uint = 0x4000_0000;
    /// Coherent at kernel boundaries only.
    hipHostMallocNonCoherent: c_uint = 0x8000_0000;

    /// Bytes of free memory that the pool keeps at a synchronisation (u64).
    hipMemPoolAttrReleaseThreshold: hipMemPoolAttr = 4;
    /// Bytes that the pool holds (u64).
    hipMemPoolAttrReservedMemCurrent: hipMemPoolAttr = 5;
    /// Most bytes that the pool held (u64).
    hipMemPoolAttrReservedMemHigh: hipMemPoolAttr = 6;
    /// Bytes of the pool in use (u64).
    hipMemPoolAttrUsedMemCurrent: hipMemPoolAttr = 7;
    /// Most bytes of the pool that were in use (u64).
    hipMemPoolAttrUsedMemHigh: hipMemPoolAttr = 8;

    /// Threads of a block at most.
    HIP_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: hipFunction_attribute = 0;
    /// Static LDS of a block, in bytes.
    HIP_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: hipFunction_attribute = 1;
    /// Constant memory in bytes.
    HIP_FUNC_ATTRIBUTE_CONST_SIZE_BYTES: hipFunction_attribute = 2;
    /// Scratch of a thread, in bytes: spilled registers and local arrays.
    HIP_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES: hipFunction_attribute = 3;
    /// Registers of a thread.
    HIP_FUNC_ATTRIBUTE_NUM_REGS: hipFunction_attribute = 4;
    /// Dynamic LDS of a block at most, in bytes.
    HIP_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: hipFunction_attribute = 8;
    /// Dynamic LDS of a block at most, in bytes.
    hipFuncAttributeMaxDynamicSharedMemorySize: hipFuncAttribute = 8;

    /// Memory that the graph did not free is freed before each launch.
    hipGraphInstantiateFlagAutoFreeOnLaunch: c_uint = 1;
    /// The update was made.
    hipGraphExecUpdateSuccess: hipGraphExecUpdateResult = 0;
    /// The update was refused.
    hipGraphExecUpdateError: hipGraphExecUpdateResult = 1;
    /// Bytes that graphs use (u64).
    hipGraphMemAttrUsedMemCurrent: hipGraphMemAttributeType = 0;
    /// Bytes that graphs hold (u64).
    hipGraphMemAttrReservedMemCurrent: hipGraphMemAttributeType = 2;
}

/// Text of a fixed-size C array, up to its first zero byte.
pub fn text(chars: &[c_char]) -> String {
    let bytes: Vec<u8> = chars.iter().map(|&c| c as u8).take_while(|&b| b != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}
