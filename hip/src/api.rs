//! The functions of both libraries as C has them, in tables filled when a library is opened.

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

use libloading::Library;

use crate::error::{HipError, HiprtcError};
use crate::types::*;

/// A function's name and its C signature in Rust's spelling, for checks against headers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Signature {
    /// Name of the function.
    pub symbol: &'static str,
    /// Whether every supported release has it.
    pub required: bool,
    /// Types of the arguments.
    pub arguments: &'static [&'static str],
    /// Type of the result.
    pub result: &'static str,
}

macro_rules! table {
    (
        $(#[$doc:meta])* $table:ident;
        required { $($(#[$rdoc:meta])* fn $rname:ident($($rarg:ident: $rty:ty),* $(,)?) -> $rret:ty;)* }
        optional { $($(#[$odoc:meta])* fn $oname:ident($($oarg:ident: $oty:ty),* $(,)?) -> $oret:ty;)* }
    ) => {
        $(#[$doc])*
        #[allow(non_snake_case)]
        #[derive(Debug, Clone, Copy)]
        pub struct $table {
            $($(#[$rdoc])* pub $rname: unsafe extern "C" fn($($rarg: $rty),*) -> $rret,)*
            $($(#[$odoc])* pub $oname: Option<unsafe extern "C" fn($($oarg: $oty),*) -> $oret>,)*
        }

        impl $table {
            /// Every function of the table.
            pub const SIGNATURES: &[Signature] = &[
                $(Signature {
                    symbol: stringify!($rname),
                    required: true,
                    arguments: &[$(stringify!($rty)),*],
                    result: stringify!($rret),
                },)*
                $(Signature {
                    symbol: stringify!($oname),
                    required: false,
                    arguments: &[$(stringify!($oty)),*],
                    result: stringify!($oret),
                },)*
            ];

            /// Finds the functions in an opened library, or says which required one is not there.
            pub(crate) fn bind(library: &Library) -> Result<Self, &'static str> {
                Ok(Self {
                    $($rname: {
                        // SAFETY: the signature is the one of AMD's headers; `ci/hip_abi.sh` compares them.
                        match unsafe { library.get(concat!(stringify!($rname), "\0")) } {
                            Ok(symbol) => *symbol,
                            Err(_) => return Err(stringify!($rname)),
                        }
                    },)*
                    // SAFETY: as above.
                    $($oname: unsafe { library.get(concat!(stringify!($oname), "\0")) }.ok().map(|symbol| *symbol),)*
                })
            }
        }
    };
}

table! {
    /// Functions of libamdhip64. Those that HIP 5.2 lacks are `Option`, and so are pools, which a build may lack.
    HipApi;
    required {
        /// Initialises the runtime.
        fn hipInit(flags: c_uint) -> HipError;
        /// Version of the runtime, `major * 10^7 + minor * 10^5 + patch`.
        fn hipRuntimeGetVersion(version: *mut c_int) -> HipError;
        /// Version of the driver, written like the runtime's.
        fn hipDriverGetVersion(version: *mut c_int) -> HipError;
        /// Name of a code.
        fn hipGetErrorName(code: HipError) -> *const c_char;
        /// Text for a code.
        fn hipGetErrorString(code: HipError) -> *const c_char;
        /// Returns and clears this thread's last error.
        fn hipGetLastError() -> HipError;

        /// Number of devices.
        fn hipGetDeviceCount(count: *mut c_int) -> HipError;
        /// Makes a device this thread's current one.
        fn hipSetDevice(device: c_int) -> HipError;
        /// This thread's current device.
        fn hipGetDevice(device: *mut c_int) -> HipError;
        /// One fact of a device.
        fn hipDeviceGetAttribute(value: *mut c_int, attribute: hipDeviceAttribute_t, device: c_int) -> HipError;
        /// A device's name.
        fn hipDeviceGetName(name: *mut c_char, len: c_int, device: hipDevice_t) -> HipError;
        /// A device's memory in bytes.
        fn hipDeviceTotalMem(bytes: *mut usize, device: hipDevice_t) -> HipError;
        /// A device's place on the PCI bus.
        fn hipDeviceGetPCIBusId(id: *mut c_char, len: c_int, device: c_int) -> HipError;
        /// Waits for all work of the current device.
        fn hipDeviceSynchronize() -> HipError;
        /// Whether one device reaches another's memory.
        fn hipDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int) -> HipError;
        /// Lets the current device reach another's memory.
        fn hipDeviceEnablePeerAccess(peer: c_int, flags: c_uint) -> HipError;

        /// Allocates device memory.
        fn hipMalloc(ptr: *mut *mut c_void, bytes: usize) -> HipError;
        /// Frees device memory, once the device is idle.
        fn hipFree(ptr: *mut c_void) -> HipError;
        /// Allocates pinned host memory.
        fn hipHostMalloc(ptr: *mut *mut c_void, bytes: usize, flags: c_uint) -> HipError;
        /// Frees pinned host memory.
        fn hipHostFree(ptr: *mut c_void) -> HipError;
        /// Free and total memory of the current device.
        fn hipMemGetInfo(free: *mut usize, total: *mut usize) -> HipError;
        /// Copies and waits.
        fn hipMemcpy(dst: *mut c_void, src: *const c_void, bytes: usize, kind: hipMemcpyKind) -> HipError;
        /// Copies in stream order.
        fn hipMemcpyAsync(
            dst: *mut c_void, src: *const c_void, bytes: usize, kind: hipMemcpyKind, stream: hipStream_t,
        ) -> HipError;
        /// Sets bytes and waits.
        fn hipMemset(dst: *mut c_void, value: c_int, bytes: usize) -> HipError;
        /// Sets bytes in stream order.
        fn hipMemsetAsync(dst: *mut c_void, value: c_int, bytes: usize, stream: hipStream_t) -> HipError;

        /// Makes a stream.
        fn hipStreamCreateWithFlags(stream: *mut hipStream_t, flags: c_uint) -> HipError;
        /// Makes a stream with a priority.
        fn hipStreamCreateWithPriority(stream: *mut hipStream_t, flags: c_uint, priority: c_int) -> HipError;
        /// Destroys a stream, once its work has ended.
        fn hipStreamDestroy(stream: hipStream_t) -> HipError;
        /// Waits for a stream's work.
        fn hipStreamSynchronize(stream: hipStream_t) -> HipError;
        /// Whether a stream's work has ended.
        fn hipStreamQuery(stream: hipStream_t) -> HipError;
        /// Makes a stream wait for an event.
        fn hipStreamWaitEvent(stream: hipStream_t, event: hipEvent_t, flags: c_uint) -> HipError;
        /// Makes an event.
        fn hipEventCreateWithFlags(event: *mut hipEvent_t, flags: c_uint) -> HipError;
        /// Destroys an event.
        fn hipEventDestroy(event: hipEvent_t) -> HipError;
        /// Puts an event into a stream.
        fn hipEventRecord(event: hipEvent_t, stream: hipStream_t) -> HipError;
        /// Waits for an event.
        fn hipEventSynchronize(event: hipEvent_t) -> HipError;
        /// Whether an event has come.
        fn hipEventQuery(event: hipEvent_t) -> HipError;
        /// Milliseconds between two events.
        fn hipEventElapsedTime(ms: *mut f32, start: hipEvent_t, stop: hipEvent_t) -> HipError;

        /// Loads a code object from memory.
        fn hipModuleLoadData(module: *mut hipModule_t, image: *const c_void) -> HipError;
        /// Unloads a module.
        fn hipModuleUnload(module: hipModule_t) -> HipError;
        /// Finds a kernel.
        fn hipModuleGetFunction(function: *mut hipFunction_t, module: hipModule_t, name: *const c_char) -> HipError;
        /// Finds a global variable.
        fn hipModuleGetGlobal(
            ptr: *mut hipDeviceptr_t, bytes: *mut usize, module: hipModule_t, name: *const c_char,
        ) -> HipError;
        /// Enqueues a kernel.
        fn hipModuleLaunchKernel(
            function: hipFunction_t,
            grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
            block_x: c_uint, block_y: c_uint, block_z: c_uint,
            shared_bytes: c_uint, stream: hipStream_t,
            params: *mut *mut c_void, extra: *mut *mut c_void,
        ) -> HipError;
        /// One fact of a kernel.
        fn hipFuncGetAttribute(value: *mut c_int, attribute: hipFunction_attribute, function: hipFunction_t) -> HipError;
        /// Sets a limit of a kernel that the host program holds (not of a module's).
        fn hipFuncSetAttribute(function: *const c_void, attribute: hipFuncAttribute, value: c_int) -> HipError;
        /// Blocks of a kernel that are resident on one compute unit.
        fn hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(
            blocks: *mut c_int, function: hipFunction_t, threads: c_int, shared_bytes: usize,
        ) -> HipError;

        /// Starts recording a stream.
        fn hipStreamBeginCapture(stream: hipStream_t, mode: hipStreamCaptureMode) -> HipError;
        /// Ends recording and gives the graph.
        fn hipStreamEndCapture(stream: hipStream_t, graph: *mut hipGraph_t) -> HipError;
        /// Whether a stream is recorded.
        fn hipStreamIsCapturing(stream: hipStream_t, status: *mut hipStreamCaptureStatus) -> HipError;
        /// Whether a stream is recorded, and in which capture.
        fn hipStreamGetCaptureInfo(
            stream: hipStream_t, status: *mut hipStreamCaptureStatus, id: *mut c_ulonglong,
        ) -> HipError;
        /// Swaps this thread's capture mode.
        fn hipThreadExchangeStreamCaptureMode(mode: *mut hipStreamCaptureMode) -> HipError;
        /// Makes a graph executable.
        fn hipGraphInstantiate(
            exec: *mut hipGraphExec_t, graph: hipGraph_t, error_node: *mut hipGraphNode_t, log: *mut c_char, len: usize,
        ) -> HipError;
        /// Enqueues an executable graph.
        fn hipGraphLaunch(exec: hipGraphExec_t, stream: hipStream_t) -> HipError;
        /// Destroys a graph.
        fn hipGraphDestroy(graph: hipGraph_t) -> HipError;
        /// Destroys an executable graph.
        fn hipGraphExecDestroy(exec: hipGraphExec_t) -> HipError;
        /// A graph's nodes.
        fn hipGraphGetNodes(graph: hipGraph_t, nodes: *mut hipGraphNode_t, count: *mut usize) -> HipError;
        /// A node's kind.
        fn hipGraphNodeGetType(node: hipGraphNode_t, kind: *mut hipGraphNodeType) -> HipError;
        /// The graph inside a graph node.
        fn hipGraphChildGraphNodeGetGraph(node: hipGraphNode_t, graph: *mut hipGraph_t) -> HipError;
        /// What a kernel node launches.
        fn hipGraphKernelNodeGetParams(node: hipGraphNode_t, params: *mut hipKernelNodeParams) -> HipError;
        /// Changes what a kernel node launches.
        fn hipGraphKernelNodeSetParams(node: hipGraphNode_t, params: *const hipKernelNodeParams) -> HipError;
        /// Changes what a kernel node of an executable graph launches.
        fn hipGraphExecKernelNodeSetParams(
            exec: hipGraphExec_t, node: hipGraphNode_t, params: *const hipKernelNodeParams,
        ) -> HipError;
        /// Changes an executable graph into another of the same shape.
        fn hipGraphExecUpdate(
            exec: hipGraphExec_t, graph: hipGraph_t, error_node: *mut hipGraphNode_t,
            result: *mut hipGraphExecUpdateResult,
        ) -> HipError;
    }
    optional {
        /// Properties in the old layout.
        fn hipGetDeviceProperties(properties: *mut hipDeviceProp_tR0000, device: c_int) -> HipError;
        /// Properties in the new layout (HIP 6).
        fn hipGetDevicePropertiesR0600(properties: *mut hipDeviceProp_tR0600, device: c_int) -> HipError;
        /// Identifier of a device.
        fn hipDeviceGetUuid(uuid: *mut hipUUID, device: hipDevice_t) -> HipError;

        /// Allocates from the current device's pool, in stream order.
        fn hipMallocAsync(ptr: *mut *mut c_void, bytes: usize, stream: hipStream_t) -> HipError;
        /// Allocates from a pool, in stream order.
        fn hipMallocFromPoolAsync(
            ptr: *mut *mut c_void, bytes: usize, pool: hipMemPool_t, stream: hipStream_t,
        ) -> HipError;
        /// Frees in stream order.
        fn hipFreeAsync(ptr: *mut c_void, stream: hipStream_t) -> HipError;
        /// A device's own pool.
        fn hipDeviceGetDefaultMemPool(pool: *mut hipMemPool_t, device: c_int) -> HipError;
        /// Sets one of a pool's attributes.
        fn hipMemPoolSetAttribute(pool: hipMemPool_t, attribute: hipMemPoolAttr, value: *mut c_void) -> HipError;
        /// One of a pool's attributes.
        fn hipMemPoolGetAttribute(pool: hipMemPool_t, attribute: hipMemPoolAttr, value: *mut c_void) -> HipError;
        /// Gives a pool's free memory back.
        fn hipMemPoolTrimTo(pool: hipMemPool_t, keep_bytes: usize) -> HipError;

        /// Runs a function on the host in stream order (not in HIP 5.2).
        fn hipLaunchHostFunc(stream: hipStream_t, function: hipHostFn_t, data: *mut c_void) -> HipError;
        /// Enqueues a kernel whose blocks are all resident together (not in HIP 5.2).
        fn hipModuleLaunchCooperativeKernel(
            function: hipFunction_t,
            grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
            block_x: c_uint, block_y: c_uint, block_z: c_uint,
            shared_bytes: c_uint, stream: hipStream_t, params: *mut *mut c_void,
        ) -> HipError;

        /// Makes a graph executable, with flags.
        fn hipGraphInstantiateWithFlags(exec: *mut hipGraphExec_t, graph: hipGraph_t, flags: c_ulonglong) -> HipError;
        /// Moves an executable graph to the device before its first launch (not in HIP 5.2).
        fn hipGraphUpload(exec: hipGraphExec_t, stream: hipStream_t) -> HipError;
        /// Writes a graph as a dot file (not in HIP 5.2).
        fn hipGraphDebugDotPrint(graph: hipGraph_t, path: *const c_char, flags: c_uint) -> HipError;
        /// Memory that a device's graphs hold (not in HIP 5.2).
        fn hipDeviceGetGraphMemAttribute(
            device: c_int, attribute: hipGraphMemAttributeType, value: *mut c_void,
        ) -> HipError;
        /// Gives back memory that a device's graphs do not use (not in HIP 5.2).
        fn hipDeviceGraphMemTrim(device: c_int) -> HipError;
        /// Address that a memory node frees; only releases whose graphs have memory nodes have it.
        fn hipGraphMemFreeNodeGetParams(node: hipGraphNode_t, ptr: *mut c_void) -> HipError;
    }
}

table! {
    /// Functions of hipRTC.
    HiprtcApi;
    required {
        /// Version of the compiler's interface.
        fn hiprtcVersion(major: *mut c_int, minor: *mut c_int) -> HiprtcError;
        /// Text for a code.
        fn hiprtcGetErrorString(code: HiprtcError) -> *const c_char;
        /// Makes a program from source and headers.
        fn hiprtcCreateProgram(
            program: *mut hiprtcProgram, source: *const c_char, name: *const c_char, num_headers: c_int,
            headers: *mut *const c_char, include_names: *mut *const c_char,
        ) -> HiprtcError;
        /// Compiles.
        fn hiprtcCompileProgram(program: hiprtcProgram, num_options: c_int, options: *mut *const c_char) -> HiprtcError;
        /// Destroys a program.
        fn hiprtcDestroyProgram(program: *mut hiprtcProgram) -> HiprtcError;
        /// Bytes of the log, its zero byte included.
        fn hiprtcGetProgramLogSize(program: hiprtcProgram, bytes: *mut usize) -> HiprtcError;
        /// The log.
        fn hiprtcGetProgramLog(program: hiprtcProgram, log: *mut c_char) -> HiprtcError;
        /// Bytes of the code object.
        fn hiprtcGetCodeSize(program: hiprtcProgram, bytes: *mut usize) -> HiprtcError;
        /// The code object.
        fn hiprtcGetCode(program: hiprtcProgram, code: *mut c_char) -> HiprtcError;
    }
    optional {
        /// Registers a name to be looked up after compilation.
        fn hiprtcAddNameExpression(program: hiprtcProgram, expression: *const c_char) -> HiprtcError;
        /// The symbol of a registered name.
        fn hiprtcGetLoweredName(
            program: hiprtcProgram, expression: *const c_char, lowered: *mut *const c_char,
        ) -> HiprtcError;
        /// Bytes of the bitcode, when compiled with `-fgpu-rdc` (not in HIP 5.2).
        fn hiprtcGetBitcodeSize(program: hiprtcProgram, bytes: *mut usize) -> HiprtcError;
        /// The bitcode (not in HIP 5.2).
        fn hiprtcGetBitcode(program: hiprtcProgram, bitcode: *mut c_char) -> HiprtcError;
    }
}
