//! The bindings on a device, real or emulated, wherever one is seen.

use std::ffi::c_void;
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use hip_sys::types::*;
use hip_sys::{Error, GraphNodeKind, Hip, HipError, Hiprtc, KernelNode};

/// The runtime with device 0 current, one test at a time: captures of one thread meet allocations of another.
fn device() -> Option<(&'static Hip, MutexGuard<'static, ()>)> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let found = Hip::load().and_then(|hip| hip.device_count().map(|_| hip));
    match found {
        Ok(hip) => {
            let guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
            hip.set_device(0).unwrap();
            Some((hip, guard))
        }
        Err(error) => {
            println!("not run: {error}");
            None
        }
    }
}

fn code<T: std::fmt::Debug>(result: hip_sys::Result<T>) -> HipError {
    match result {
        Err(Error::Hip { code, .. }) => code,
        other => panic!("{other:?}"),
    }
}

#[test]
fn facts_are_plausible_and_both_property_layouts_agree_with_the_attributes() {
    let Some((hip, _guard)) = device() else { return };
    let attribute = |attribute| hip.device_attribute(attribute, 0).unwrap();
    let arch = hip.arch_name(0).unwrap();
    println!("{} {arch}, HIP {}", hip.device_name(0).unwrap(), hip.runtime_version().unwrap());
    assert!(arch.starts_with("gfx"), "{arch}");
    assert!(matches!(attribute(hipDeviceAttributeWarpSize), 32 | 64));
    assert!(attribute(hipDeviceAttributeMultiprocessorCount) > 0);
    assert!(attribute(hipDeviceAttributeMaxSharedMemoryPerBlock) >= 65_536);
    assert!(hip.device_memory(0).unwrap() > 0 && hip.device_pci_bus_id(0).unwrap().contains(':'));

    // SAFETY: structs of integers and pointers, for which zeros are values; each function is given its own layout.
    unsafe {
        if let Some(get) = hip.api().hipGetDevicePropertiesR0600 {
            let mut properties: hipDeviceProp_tR0600 = std::mem::zeroed();
            hip.check("hipGetDevicePropertiesR0600", get(&mut properties, 0)).unwrap();
            assert_eq!(properties.warpSize, attribute(hipDeviceAttributeWarpSize));
            assert_eq!(properties.multiProcessorCount, attribute(hipDeviceAttributeMultiprocessorCount));
            assert_eq!(text(&properties.gcnArchName), arch);
        }
        if let Some(get) = hip.api().hipGetDeviceProperties {
            let mut properties: hipDeviceProp_tR0000 = std::mem::zeroed();
            hip.check("hipGetDeviceProperties", get(&mut properties, 0)).unwrap();
            assert_eq!(properties.warpSize, attribute(hipDeviceAttributeWarpSize));
            assert_eq!(properties.multiProcessorCount, attribute(hipDeviceAttributeMultiprocessorCount));
            assert_eq!(text(&properties.gcnArchName), arch);
        }
    }
}

#[test]
fn mistakes_are_codes_and_leave_the_device_usable() {
    let Some((hip, _guard)) = device() else { return };
    assert_eq!(code(hip.set_device(99)), HipError::INVALID_DEVICE);
    assert_eq!(code(hip.device_attribute(hipDeviceAttributeWarpSize, usize::MAX)), HipError::INVALID_DEVICE);
    assert_eq!(code(hip.malloc(1 << 60)), HipError::OUT_OF_MEMORY);
    // SAFETY: not a code object, with room behind it for a header that the library may look at.
    let refused = unsafe { hip.module_load(&[0; 4096]) };
    println!("zeros as a module: {:?}", code(refused));
    let ptr = hip.malloc(1 << 20).unwrap();
    // SAFETY: just allocated, unused.
    unsafe { hip.free(ptr).unwrap() };
}

#[test]
fn a_broken_capture_is_reported_and_the_stream_can_be_freed() {
    let Some((hip, _guard)) = device() else { return };
    let stream = hip.stream_create(hipStreamNonBlocking).unwrap();
    // SAFETY: the stream is live until it is destroyed at the end.
    unsafe {
        hip.begin_capture(stream, hipStreamCaptureModeThreadLocal).unwrap();
        assert_eq!(hip.capture_status(stream), Ok(hipStreamCaptureStatusActive));
        // Allowed for a thread that says so.
        let mode = hip.exchange_capture_mode(hipStreamCaptureModeRelaxed).unwrap();
        let ptr = hip.malloc(4096).unwrap();
        hip.free(ptr).unwrap();
        hip.exchange_capture_mode(mode).unwrap();
        assert_eq!(hip.capture_status(stream), Ok(hipStreamCaptureStatusActive));
        // Not allowed, and breaks the capture.
        let refused = hip.malloc(4096);
        println!("hipMalloc while capturing: {refused:?}, then status {:?}", hip.capture_status(stream));
        let ended = hip.end_capture(stream);
        println!("end: {ended:?}, then status {:?}", hip.capture_status(stream));
        match (refused, ended) {
            (Err(_), Err(Error::Hip { code, .. })) => assert_eq!(code, HipError::STREAM_CAPTURE_INVALIDATED),
            (_, Ok(graph)) => hip.graph_destroy(graph).unwrap(),
            other => panic!("{other:?}"),
        }
        assert_eq!(hip.reset_capture(stream), Ok(hipStreamCaptureStatusNone));

        // The stream records and waits as before.
        hip.begin_capture(stream, hipStreamCaptureModeThreadLocal).unwrap();
        let graph = hip.end_capture(stream).unwrap();
        assert_eq!(hip.graph_nodes(graph), Ok(Vec::new()));
        hip.graph_destroy(graph).unwrap();
        assert_eq!(hip.capture_status(stream), Ok(hipStreamCaptureStatusNone));
        hip.stream_synchronize(stream).unwrap();
        assert_eq!(hip.stream_is_idle(stream), Ok(true));
        hip.stream_destroy(stream).unwrap();
    }
}

#[test]
fn an_allocation_in_a_capture_shows_as_a_memory_node() {
    let Some((hip, _guard)) = device() else { return };
    if hip.api().hipGraphMemFreeNodeGetParams.is_none() {
        return println!("not run: this release has no memory nodes");
    }
    if hip.device_attribute(hipDeviceAttributeMemoryPoolsSupported, 0) != Ok(1) {
        return println!("not run: no memory pools on this device");
    }
    let stream = hip.stream_create(hipStreamNonBlocking).unwrap();
    // SAFETY: the stream is live until it is destroyed; nothing uses the memory.
    unsafe {
        hip.begin_capture(stream, hipStreamCaptureModeThreadLocal).unwrap();
        let ptr = hip.malloc_async(4096, stream).unwrap();
        hip.free_async(ptr, stream).unwrap();
        let graph = hip.end_capture(stream).unwrap();
        let nodes = hip.graph_nodes(graph).unwrap();
        let kinds: Vec<_> = nodes.iter().map(|&node| hip.node_kind(node).unwrap()).collect();
        assert_eq!(kinds, [GraphNodeKind::MemAlloc, GraphNodeKind::MemFree]);
        hip.graph_destroy(graph).unwrap();
        hip.stream_destroy(stream).unwrap();
    }
}

const ADD: &str =
    "extern \"C\" __global__ void add(int* x, int value) { x[blockIdx.x * blockDim.x + threadIdx.x] += value; }";
const COUNT: usize = 256;

/// A stream with the kernel above, and memory for it, freed on drop.
struct Bench {
    hip: &'static Hip,
    stream: hipStream_t,
    module: hipModule_t,
    function: hipFunction_t,
    // The library reads it for as long as the module is loaded.
    _code: Vec<u8>,
    x: *mut c_void,
}

impl Bench {
    fn new(hip: &'static Hip) -> Self {
        let target = format!("--offload-arch={}", hip.arch_name(0).unwrap());
        let code = Hiprtc::load().unwrap().compile("add.cu", ADD, &[], &[&target]).unwrap().code;
        // SAFETY: a code object that is kept; the module is live.
        unsafe {
            let module = hip.module_load(&code).unwrap();
            let function = hip.module_function(module, "add").unwrap();
            let (stream, x) = (hip.stream_create(hipStreamNonBlocking).unwrap(), hip.malloc(COUNT * 4).unwrap());
            Self { hip, stream, module, function, _code: code, x }
        }
    }

    /// Calls `use_node` with a launch that adds `value`.
    fn adding<T>(&mut self, mut value: i32, use_node: impl FnOnce(&Self, &KernelNode) -> T) -> T {
        let mut params = [(&raw mut self.x).cast(), (&raw mut value).cast()];
        let (grid, block) = ([COUNT as u32 / 64, 1, 1], [64, 1, 1]);
        let node = KernelNode { function: self.function, grid, block, shared_bytes: 0, params: params.as_mut_ptr() };
        use_node(self, &node)
    }

    fn values(&self) -> Vec<i32> {
        let mut values = vec![0; COUNT];
        let to = values.as_mut_ptr().cast();
        // SAFETY: both sides have the bytes, and the stream is waited for.
        unsafe {
            self.hip.memcpy_async(to, self.x, COUNT * 4, hipMemcpyDeviceToHost, self.stream).unwrap();
            self.hip.stream_synchronize(self.stream).unwrap();
        }
        values
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        // SAFETY: each was made once, and the device is waited for.
        unsafe {
            self.hip.device_synchronize().unwrap();
            self.hip.free(self.x).unwrap();
            self.hip.module_unload(self.module).unwrap();
            self.hip.stream_destroy(self.stream).unwrap();
        }
    }
}

#[test]
fn a_kernel_is_captured_instantiated_and_its_node_is_read_and_changed() {
    let Some((hip, _guard)) = device() else { return };
    let mut bench = Bench::new(hip);
    // SAFETY: everything is live until the bench is dropped; the launches fit the kernel.
    unsafe {
        assert_eq!(code(hip.module_function(bench.module, "subtract")), HipError::NOT_FOUND);
        assert_eq!(hip.function_attribute(bench.function, HIP_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES), Ok(0));
        assert!(hip.function_attribute(bench.function, HIP_FUNC_ATTRIBUTE_NUM_REGS).unwrap() > 0);
        assert!(hip.blocks_per_unit(bench.function, 64, 0).unwrap() > 0);

        hip.begin_capture(bench.stream, hipStreamCaptureModeThreadLocal).unwrap();
        hip.memset_async(bench.x, 0, COUNT * 4, bench.stream).unwrap();
        bench.adding(5, |bench, node| hip.launch(node, bench.stream)).unwrap();
        let graph = hip.end_capture(bench.stream).unwrap();
        let nodes = hip.graph_nodes(graph).unwrap();
        let kinds: Vec<_> = nodes.iter().map(|&node| hip.node_kind(node).unwrap()).collect();
        assert_eq!(kinds, [GraphNodeKind::Memset, GraphNodeKind::Kernel]);

        let exec = hip.graph_instantiate(graph).unwrap();
        let uploaded = hip.graph_upload(exec, bench.stream);
        assert!(matches!(uploaded, Ok(()) | Err(Error::Unsupported { symbol: "hipGraphUpload" })), "{uploaded:?}");
        let read = hip.kernel_node(nodes[1]).unwrap();
        assert_eq!((read.grid, read.block, read.shared_bytes), ([COUNT as u32 / 64, 1, 1], [64, 1, 1], 0));
        assert_eq!(read.params.add(1).read().cast::<i32>().read(), 5);
        bench.adding(7, |_, node| hip.set_exec_kernel_node(exec, nodes[1], node)).unwrap();
        bench.adding(8, |_, node| hip.set_kernel_node(nodes[1], node)).unwrap();
        assert_eq!(hip.kernel_node(nodes[1]).unwrap().params.add(1).read().cast::<i32>().read(), 8);
        hip.graph_exec_destroy(exec).unwrap();
        hip.graph_destroy(graph).unwrap();
    }
}

#[test]
fn launches_replays_and_changed_nodes_compute() {
    let Some((hip, _guard)) = device() else { return };
    let mut bench = Bench::new(hip);
    // SAFETY: as above.
    unsafe {
        hip.memset_async(bench.x, 0, COUNT * 4, bench.stream).unwrap();
        bench.adding(3, |bench, node| hip.launch(node, bench.stream)).unwrap();
        assert_eq!(bench.values(), [3; COUNT]);

        hip.begin_capture(bench.stream, hipStreamCaptureModeThreadLocal).unwrap();
        bench.adding(10, |bench, node| hip.launch(node, bench.stream)).unwrap();
        let graph = hip.end_capture(bench.stream).unwrap();
        let exec = hip.graph_instantiate(graph).unwrap();
        assert_eq!(bench.values(), [3; COUNT], "recording runs nothing");
        hip.graph_launch(exec, bench.stream).unwrap();
        hip.graph_launch(exec, bench.stream).unwrap();
        assert_eq!(bench.values(), [23; COUNT]);
        let kernel = hip.graph_nodes(graph).unwrap()[0];
        bench.adding(100, |_, node| hip.set_exec_kernel_node(exec, kernel, node)).unwrap();
        hip.graph_launch(exec, bench.stream).unwrap();
        assert_eq!(bench.values(), [123; COUNT]);
        hip.graph_exec_destroy(exec).unwrap();
        hip.graph_destroy(graph).unwrap();
    }
}

#[test]
fn events_and_pinned_memory() {
    let Some((hip, _guard)) = device() else { return };
    let stream = hip.stream_create(hipStreamNonBlocking).unwrap();
    let (start, stop) = (hip.event_create(hipEventDefault).unwrap(), hip.event_create(hipEventDefault).unwrap());
    let pinned = hip.host_malloc(4096, hipHostMallocDefault).unwrap().cast::<u8>();
    // SAFETY: everything is live until it is destroyed; the pinned memory has 4096 bytes.
    unsafe {
        ptr::write_bytes(pinned, 0xa5, 4096);
        assert_eq!(pinned.add(4095).read(), 0xa5);
        hip.event_record(start, stream).unwrap();
        hip.event_record(stop, stream).unwrap();
        hip.stream_wait_event(stream, stop).unwrap();
        hip.event_synchronize(stop).unwrap();
        assert_eq!(hip.event_has_come(stop), Ok(true));
        assert!(hip.event_elapsed_ms(start, stop).unwrap() >= 0.0);
        hip.event_destroy(start).unwrap();
        hip.event_destroy(stop).unwrap();
        hip.host_free(pinned.cast()).unwrap();
        hip.stream_destroy(stream).unwrap();
    }
}
