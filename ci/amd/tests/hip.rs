//! AMD's HIP runtime on a gfx942: whatever the loader finds. `ci/rocm.sh` runs this with the emulator as driver library.
//!
//! Without a device every test prints `not run: REASON`; `LATENTWAVE_REQUIRE=rocm` makes that a failure.

mod common;

use std::ffi::c_void;
use std::sync::{Mutex, MutexGuard, PoisonError};

use common::{Arguments, Gpu};
use hip_sys::types::{
    hipDeviceAttributeMultiprocessorCount, hipFunction_t, hipMemcpyDeviceToDevice, hipMemcpyDeviceToHost,
    hipMemcpyHostToDevice, hipModule_t, hipStream_t, hipStreamCaptureModeThreadLocal, hipStreamNonBlocking,
};
use hip_sys::{Hip, KernelNode};

/// A device with the test kernels loaded, and a stream.
struct Amd {
    hip: &'static Hip,
    module: hipModule_t,
    stream: hipStream_t,
    buffers: Mutex<Vec<u64>>,
    // Tests share one device; the compiler is run by one of them at a time.
    _turn: MutexGuard<'static, ()>,
}

static TURN: Mutex<()> = Mutex::new(());

fn open() -> Result<Amd, String> {
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let hip = Hip::load().map_err(|e| e.to_string())?;
    if hip.device_count().map_err(|e| e.to_string())? == 0 {
        return Err("no AMD device".into());
    }
    let arch = hip.arch_name(0).map_err(|e| e.to_string())?;
    if !arch.starts_with("gfx942") {
        return Err(format!("the device is a {arch}, the kernels are for gfx942"));
    }
    let file = common::compile("test.hip", &[])?;
    hip.set_device(0).map_err(|e| e.to_string())?;
    // SAFETY: the file is a code object for this device.
    let module = unsafe { hip.module_load(&file) }.expect("the code object loads");
    let stream = hip.stream_create(hipStreamNonBlocking).expect("a stream");
    Ok(Amd { hip, module, stream, buffers: Mutex::default(), _turn: turn })
}

/// Runs a test where there is a device.
fn on_device(test: impl FnOnce(&Amd)) {
    match open() {
        Ok(amd) => test(&amd),
        Err(reason) => {
            let required = std::env::var("LATENTWAVE_REQUIRE").is_ok_and(|list| list.split(',').any(|x| x == "rocm"));
            assert!(!required, "a device is required: {reason}");
            println!("not run: {reason}");
        }
    }
}

impl Drop for Amd {
    fn drop(&mut self) {
        // SAFETY: everything was made by this object and nothing is in flight after the synchronisation.
        unsafe {
            let _ended = self.hip.stream_synchronize(self.stream);
            for buffer in self.buffers.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
                let _freed = self.hip.free(buffer as *mut c_void);
            }
            let _destroyed = self.hip.stream_destroy(self.stream);
            let _unloaded = self.hip.module_unload(self.module);
        }
    }
}

impl Amd {
    fn enqueue(&self, function: hipFunction_t, blocks: u32, threads: u32, arguments: &Arguments) {
        let mut bytes = arguments.bytes.clone();
        let mut params: Vec<*mut c_void> = arguments.offsets.iter().map(|at| (&raw mut bytes[*at]).cast()).collect();
        let node = KernelNode {
            function,
            grid: [blocks, 1, 1],
            block: [threads, 1, 1],
            shared_bytes: 0,
            params: params.as_mut_ptr(),
        };
        // SAFETY: the arguments are those of the kernel.
        unsafe { self.hip.launch(&node, self.stream) }.expect("the launch is accepted");
    }

    fn finish(&self) {
        // SAFETY: the stream is alive.
        unsafe { self.hip.stream_synchronize(self.stream) }.expect("the stream ends well");
    }

    fn write(&self, address: u64, bytes: &[u8]) {
        // SAFETY: the buffer has at least as many bytes.
        unsafe { self.hip.memcpy(address as *mut c_void, bytes.as_ptr().cast(), bytes.len(), hipMemcpyHostToDevice) }
            .expect("a copy to the device");
    }
}

impl Gpu for Amd {
    type Kernel = hipFunction_t;

    fn upload(&self, bytes: &[u8]) -> u64 {
        let address = self.hip.malloc(bytes.len()).expect("device memory") as u64;
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner).push(address);
        self.write(address, bytes);
        address
    }

    fn download(&self, address: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        // SAFETY: both sides have `len` bytes.
        unsafe { self.hip.memcpy(bytes.as_mut_ptr().cast(), address as *const c_void, len, hipMemcpyDeviceToHost) }
            .expect("a copy from the device");
        bytes
    }

    fn kernel(&self, name: &str) -> hipFunction_t {
        // SAFETY: the module is loaded.
        unsafe { self.hip.module_function(self.module, name) }.expect("the kernel")
    }

    fn launch(&self, kernel: &hipFunction_t, blocks: u32, threads: u32, arguments: &Arguments) -> Result<(), String> {
        self.enqueue(*kernel, blocks, threads, arguments);
        self.finish();
        Ok(())
    }
}

#[test]
fn enumeration() {
    on_device(|amd| {
        let units = amd.hip.device_attribute(hipDeviceAttributeMultiprocessorCount, 0).expect("compute units");
        println!(
            "{} ({}), {units} compute units",
            amd.hip.device_name(0).expect("a name"),
            amd.hip.arch_name(0).expect("an arch")
        );
        if let Ok(want) = std::env::var("AMD_EMULATOR_CUS") {
            assert_eq!(units.to_string(), want);
        }
        assert!(units > 0 && amd.hip.device_memory(0).expect("memory") > 0);
    });
}

#[test]
fn copies_and_fills() {
    on_device(|amd| {
        let mut random = common::Random::new();
        for len in [1usize, 63, 4096, 1 << 20] {
            let bytes: Vec<u8> = (0..len).map(|_| random.bits() as u8).collect();
            let (from, to) = (amd.upload(&bytes), amd.upload(&vec![0; len]));
            assert_eq!(amd.download(from, len), bytes);
            // SAFETY: both buffers have `len` bytes.
            unsafe { amd.hip.memcpy(to as *mut c_void, from as *const c_void, len, hipMemcpyDeviceToDevice) }
                .expect("a copy");
            assert_eq!(amd.download(to, len), bytes, "device to device, {len} bytes");
            // SAFETY: the buffer has `len` bytes.
            unsafe { amd.hip.memset(to as *mut c_void, 0xa5, len) }.expect("a fill");
            assert_eq!(amd.download(to, len), vec![0xa5; len]);
        }
    });
}

/// One test for each function of the suite that both devices run.
macro_rules! suite {
    ($($name:ident)*) => {
        $(
            #[test]
            fn $name() {
                on_device(|amd| common::$name(amd).expect("runs"));
            }
        )*
    };
}

suite! { vector_add blocks_of_grid reduce reverse shift count functions matrices gemm private_memory }

#[test]
fn a_captured_graph_sees_data_that_changes_in_place() {
    on_device(|amd| {
        let mut random = common::Random::new();
        let n = 1024;
        let (a, b) = (random.units(n), random.units(n));
        let (pa, pb) = (amd.upload(&common::f32_bytes(&a)), amd.upload(&common::f32_bytes(&b)));
        let (sum, twice) = (amd.upload(&common::unwritten(n)), amd.upload(&common::unwritten(n)));
        let add = amd.kernel("vector_add");
        let arguments = |x, y, out| Arguments::default().pointer(x).pointer(y).pointer(out).int(n as i32);
        // SAFETY: the stream is alive; handles are used while they are.
        let (graph, exec) = unsafe {
            amd.hip.begin_capture(amd.stream, hipStreamCaptureModeThreadLocal).expect("a capture");
            amd.enqueue(add, 4, 256, &arguments(pa, pb, sum));
            amd.enqueue(add, 4, 256, &arguments(sum, sum, twice));
            let graph = amd.hip.end_capture(amd.stream).expect("a graph");
            assert_eq!(amd.hip.graph_nodes(graph).expect("nodes").len(), 2);
            (graph, amd.hip.graph_instantiate(graph).expect("an executable graph"))
        };
        assert_eq!(amd.download(twice, 4 * n), common::unwritten(n), "a capture runs nothing");
        for round in 0..3 {
            let a = random.units(n);
            amd.write(pa, &common::f32_bytes(&a));
            // SAFETY: the graph is alive.
            unsafe { amd.hip.graph_launch(exec, amd.stream) }.expect("a replay");
            amd.finish();
            let want: Vec<f32> = a.iter().zip(&b).map(|(a, b)| 2.0 * (a + b)).collect();
            assert_eq!(common::to_f32(&amd.download(twice, 4 * n)), want, "replay {round}");
        }
        // SAFETY: nothing is in flight.
        unsafe {
            amd.hip.graph_exec_destroy(exec).expect("destroyed");
            amd.hip.graph_destroy(graph).expect("destroyed");
        }
    });
}

#[test]
fn two_threads_with_streams_of_their_own() {
    on_device(|amd| {
        let add = amd.kernel("vector_add") as usize;
        let hip = amd.hip;
        std::thread::scope(|scope| {
            for thread in 0..2 {
                scope.spawn(move || {
                    hip.set_device(0).expect("the device");
                    let stream = hip.stream_create(hipStreamNonBlocking).expect("a stream");
                    let n = 512usize;
                    let [a, b, out] = std::array::from_fn(|_| hip.malloc(4 * n).expect("memory"));
                    for round in 0..20 {
                        let values: Vec<f32> = (0..n).map(|i| (i + 1000 * thread + round) as f32).collect();
                        let mut got = vec![0f32; n];
                        let mut arguments = (a, b, out, n as i32);
                        let mut params: [*mut c_void; 4] = [
                            (&raw mut arguments.0).cast(),
                            (&raw mut arguments.1).cast(),
                            (&raw mut arguments.2).cast(),
                            (&raw mut arguments.3).cast(),
                        ];
                        let node = KernelNode {
                            function: add as hipFunction_t,
                            grid: [2, 1, 1],
                            block: [256, 1, 1],
                            shared_bytes: 0,
                            params: params.as_mut_ptr(),
                        };
                        // SAFETY: all buffers have n values and live until the synchronisation.
                        unsafe {
                            hip.memcpy_async(a, values.as_ptr().cast(), 4 * n, hipMemcpyHostToDevice, stream)
                                .expect("copy");
                            hip.memcpy_async(b, values.as_ptr().cast(), 4 * n, hipMemcpyHostToDevice, stream)
                                .expect("copy");
                            hip.launch(&node, stream).expect("launch");
                            hip.memcpy_async(got.as_mut_ptr().cast(), out, 4 * n, hipMemcpyDeviceToHost, stream)
                                .expect("copy");
                            hip.stream_synchronize(stream).expect("ends");
                        }
                        assert!(
                            got.iter().zip(&values).all(|(got, x)| *got == 2.0 * x),
                            "thread {thread} round {round}"
                        );
                    }
                    // SAFETY: nothing is in flight.
                    unsafe {
                        for buffer in [a, b, out] {
                            hip.free(buffer).expect("freed");
                        }
                        hip.stream_destroy(stream).expect("destroyed");
                    }
                });
            }
        });
    });
}

#[test]
fn too_much_memory_is_an_error() {
    on_device(|amd| {
        let total = amd.hip.device_memory(0).expect("memory");
        assert!(amd.hip.malloc(total + (1 << 30)).is_err());
        let small = amd.upload(&[1, 2, 3, 4]);
        assert_eq!(amd.download(small, 4), [1, 2, 3, 4], "the device works on");
    });
}
