//! The CUDA backend on real devices: memory, streams, kernels, captures, and every way they fail. Each test runs on each
//! device seen.
#![cfg(feature = "cuda")]

mod require;

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use latentwave::backend::cuda::{CudaBuffer, CudaKernel, CudaStream};
use latentwave::kernel::cache::DiskCache;
use latentwave::kernel::params::MergeParams;
use latentwave::kernel::{Entry, Launch, Origin, Params, Variant};
use latentwave::{Backend, Cuda, DType, Error, GraphBackend, Result, Stream};
use require::not_run;

fn on_each_device(test: impl Fn(&Cuda)) {
    match Cuda::devices() {
        Ok(devices) if devices.is_empty() => not_run("cuda", "the driver sees no GPU"),
        Ok(devices) => (0..devices.len()).for_each(|index| test(&Cuda::new(index).unwrap())),
        Err(error) => not_run("cuda", &error.to_string()),
    }
}

/// Reproducible bytes that differ from seed to seed.
fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    std::iter::repeat_with(next).take(bytes).collect()
}

/// Reproducible finite bf16 values, as bytes.
fn noise_bf16(seed: u64, count: usize) -> Vec<u8> {
    noise(seed, count).iter().flat_map(|&byte| half::bf16::from_f32(f32::from(byte) - 128.0).to_le_bytes()).collect()
}

fn upload(cuda: &Cuda, stream: &CudaStream, buffer: &CudaBuffer, bytes: &[u8]) {
    // SAFETY: the buffers of these tests are as long as what is copied, and each test's streams are its own.
    unsafe { cuda.upload(stream, cuda.addr(buffer), bytes).unwrap() };
}

fn download(cuda: &Cuda, stream: &CudaStream, buffer: &CudaBuffer, bytes: usize) -> Vec<u8> {
    let mut data = vec![0; bytes];
    // SAFETY: as above; the tests write before they read.
    unsafe { cuda.download(stream, cuda.addr(buffer), &mut data).unwrap() };
    data
}

/// A kernel of the library used as a device copy: a merge in which no token has a prefix copies the suffix.
struct Copy {
    kernel: CudaKernel,
    src: CudaBuffer,
    dst: CudaBuffer,
    lse: CudaBuffer,
}

const TOKENS: usize = 37;
const HEADS: usize = 5;
const WIDTH: usize = 512;
const ELEMENTS: usize = TOKENS * HEADS * WIDTH;
const BYTES: usize = ELEMENTS * 2;

fn copy_variant() -> Variant {
    Variant { threads: 128, ..Variant::simple(Entry::MergeStates, DType::BF16) }
}

impl Copy {
    fn new(cuda: &Cuda) -> Option<Self> {
        match cuda.prepare(&copy_variant()) {
            Ok(kernel) => Some(Self::with_kernel(cuda, kernel)),
            // Neither code carried for this device nor a compiler.
            Err(error @ Error::Unavailable { .. }) => {
                not_run("nvrtc", &error.to_string());
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn with_kernel(cuda: &Cuda, kernel: CudaKernel) -> Self {
        let alloc = |bytes| cuda.alloc(bytes, "a copy").unwrap();
        let copy = Self { kernel, src: alloc(BYTES), dst: alloc(BYTES), lse: alloc(TOKENS * HEADS * 4) };
        let stream = cuda.create_stream().unwrap();
        // SAFETY: the buffer has these bytes.
        unsafe { cuda.fill(&stream, cuda.addr(&copy.lse), 0, TOKENS * HEADS * 4).unwrap() };
        cuda.synchronize(&stream).unwrap();
        copy
    }

    fn enqueue(&self, cuda: &Cuda, stream: &CudaStream, dependent: bool) -> Result<()> {
        let (src, dst, lse) = (cuda.addr(&self.src), cuda.addr(&self.dst), cuda.addr(&self.lse));
        let params = Params::Merge(MergeParams {
            prefix_out: src,
            prefix_lse: lse,
            suffix_out: src,
            suffix_lse: lse,
            out: dst,
            out_lse: 0,
            num_tokens: TOKENS as i32,
            num_heads: HEADS as i32,
            head_dim: WIDTH as i32,
            tokens_with_context: 0,
        });
        let launch = Launch { grid: [(TOKENS * HEADS) as u32, 1, 1], threads: 128, shared_bytes: 0, dependent };
        // SAFETY: the buffers have the extents that the block states.
        unsafe { cuda.launch(stream, &self.kernel, &launch, &params) }
    }

    /// Sets the source to fresh data, poisons the destination, and gives what the destination must become.
    fn refresh(&self, cuda: &Cuda, stream: &CudaStream, seed: u64) -> Vec<u8> {
        let data = noise_bf16(seed, ELEMENTS);
        upload(cuda, stream, &self.src, &data);
        // SAFETY: the buffer has these bytes.
        unsafe { cuda.fill(stream, cuda.addr(&self.dst), 0xff, BYTES).unwrap() };
        data
    }

    fn result(&self, cuda: &Cuda, stream: &CudaStream) -> Vec<u8> {
        download(cuda, stream, &self.dst, BYTES)
    }
}

/// Driver functions that a caller may use beside this library, on the same streams.
struct Raw {
    library: libloading::Library,
}

impl Raw {
    fn open() -> Self {
        // SAFETY: the backend has opened the same library before.
        Self { library: unsafe { libloading::Library::new("libcuda.so.1").unwrap() } }
    }

    fn synchronize(&self, stream: &CudaStream) -> i32 {
        // SAFETY: the function's published type; the stream is live.
        unsafe {
            let call = self.library.get::<unsafe extern "C" fn(u64) -> i32>("cuStreamSynchronize").unwrap();
            call(stream.handle())
        }
    }

    fn mem_alloc(&self) -> i32 {
        let mut addr = 0_u64;
        // SAFETY: the function's published type. The call is expected to fail; otherwise the memory is lost to the test.
        unsafe {
            let call = self.library.get::<unsafe extern "C" fn(*mut u64, usize) -> i32>("cuMemAlloc_v2").unwrap();
            call(&mut addr, 4096)
        }
    }

    fn mem_alloc_async(&self, stream: &CudaStream) -> i32 {
        let mut addr = 0_u64;
        // SAFETY: the function's published type; the stream is live.
        unsafe {
            type Call = unsafe extern "C" fn(*mut u64, usize, *mut c_void) -> i32;
            let call = self.library.get::<Call>("cuMemAllocAsync").unwrap();
            call(&mut addr, 4096, stream.handle() as *mut c_void)
        }
    }
}

#[test]
fn a_machine_without_a_driver_or_device_gets_a_typed_error() {
    match Cuda::new(0) {
        Ok(cuda) => assert_eq!(cuda.device().backend, "cuda"),
        Err(Error::Unavailable { backend: "cuda", reason, .. }) => assert!(reason.contains("driver"), "{reason}"),
        Err(Error::NoDevice { backend: "cuda", index: 0, .. }) => {}
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn a_device_that_is_not_there_is_named_in_the_error() {
    on_each_device(|_| {
        let count = Cuda::devices().unwrap().len();
        for index in [count, count + 99, usize::MAX] {
            match Cuda::new(index) {
                Err(Error::NoDevice { index: named, reason, .. }) => {
                    assert!(named == index && reason.contains(&count.to_string()), "{named} {reason}");
                }
                other => panic!("{other:?}"),
            }
        }
    });
}

#[test]
fn devices_tell_their_facts() {
    on_each_device(|cuda| {
        let device = cuda.device();
        assert_eq!(Some(device), Cuda::devices().unwrap().get(device.index));
        assert!(device.arch.starts_with("sm_") && !device.name.is_empty() && !device.driver_version.is_empty());
        assert!(device.num_compute_units > 0 && device.wave_size == 32);
        assert!(device.shared_bytes_per_block >= 48 << 10 && device.memory_bytes >= 1 << 30);
        if device.name.contains("H200") {
            assert_eq!(
                (device.num_compute_units, &*device.arch, device.shared_bytes_per_block),
                (132, "sm_90a", 232_448)
            );
        }
    });
}

#[test]
fn memory_that_ran_out_is_typed_and_the_device_is_usable_after() {
    on_each_device(|cuda| {
        let total = cuda.device().memory_bytes as usize;
        for asked in [total * 2, usize::MAX, usize::MAX - 300] {
            match cuda.alloc(asked, "the scratch").map(|_| ()) {
                Err(Error::OutOfMemory { backend: "cuda", bytes, purpose: "the scratch" }) => assert_eq!(bytes, asked),
                other => panic!("{other:?}"),
            }
        }
        let most = cuda.alloc(total / 10 * 6, "most of it").unwrap();
        assert!(matches!(cuda.alloc(total / 10 * 6, "as much again"), Err(Error::OutOfMemory { .. })));
        drop(most);
        // Freed, but of another size: it goes back to the driver first.
        drop(cuda.alloc(total / 10 * 7, "more").unwrap());
        cuda.trim().unwrap();

        let stream = cuda.create_stream().unwrap();
        let buffer = cuda.alloc(4096, "a check").unwrap();
        let data = noise(1, 4096);
        upload(cuda, &stream, &buffer, &data);
        assert_eq!(download(cuda, &stream, &buffer, 4096), data);
    });
}

#[test]
fn bytes_come_back_as_they_were_sent() {
    on_each_device(|cuda| {
        let stream = cuda.create_stream().unwrap();
        for (seed, bytes) in [1, 3, 255, 4097, 262_143, 262_144, 262_145, 5_000_001].into_iter().enumerate() {
            let buffer = cuda.alloc(bytes + 7, "a copy").unwrap();
            assert_eq!(cuda.addr(&buffer) % 256, 0);
            let addr = cuda.addr(&buffer) + 7;
            let mut src = noise(seed as u64, bytes);
            let data = src.clone();
            let mut back = vec![0; bytes + 7];
            // SAFETY: the buffer has these bytes.
            unsafe {
                cuda.fill(&stream, cuda.addr(&buffer), 0xab, bytes + 7).unwrap();
                cuda.upload(&stream, addr, &src).unwrap();
                // The source may be changed as soon as the call is back.
                src.fill(0);
                cuda.download(&stream, cuda.addr(&buffer), &mut back).unwrap();
            }
            assert_eq!(back[..7], [0xab; 7]);
            assert!(back[7..] == data, "{bytes} bytes");
        }
        // Many small ones, as a step makes them, through a ring that wraps.
        let buffer = cuda.alloc(4000 * 512, "a table").unwrap();
        let data = noise(9, 4000 * 512);
        for (row, bytes) in data.chunks(512).enumerate() {
            // SAFETY: the row lies in the buffer.
            unsafe { cuda.upload(&stream, cuda.addr(&buffer) + row as u64 * 512, bytes).unwrap() };
        }
        assert!(download(cuda, &stream, &buffer, data.len()) == data);
    });
}

#[test]
fn a_graph_replays_over_changed_data_on_any_stream_and_thread() {
    on_each_device(|cuda| {
        let Some(copy) = Copy::new(cuda) else { return };
        let stream = Stream::new(cuda).unwrap();
        let raw = stream.raw();
        let data = copy.refresh(cuda, raw, 1);
        copy.enqueue(cuda, raw, false).unwrap();
        assert!(copy.result(cuda, raw) == data, "an eager launch");

        let data = copy.refresh(cuda, raw, 2);
        let graph = stream.capture(|| (0..61).try_for_each(|layer| copy.enqueue(cuda, raw, layer > 0))).unwrap();
        assert!(copy.result(cuda, raw) == vec![0xff; BYTES], "recording runs nothing");
        for seed in 3..6 {
            let data = copy.refresh(cuda, raw, seed);
            // SAFETY: the buffers live on.
            unsafe { stream.replay(&graph).unwrap() };
            assert!(copy.result(cuda, raw) == data, "replay {seed}");
        }
        let other = Stream::new(cuda).unwrap();
        std::thread::scope(|scope| {
            let (copy, graph, other) = (&copy, &graph, &other);
            scope.spawn(move || {
                let data = copy.refresh(cuda, other.raw(), 7);
                // SAFETY: the buffers live on.
                unsafe { other.replay(graph).unwrap() };
                assert!(copy.result(cuda, other.raw()) == data, "another stream and thread");
            });
        });
        println!("a graph of 61 kernels holds {} bytes by the free memory", graph.bytes());
        drop(data);
    });
}

#[test]
fn a_call_that_cannot_be_recorded_is_refused_and_does_not_break_the_capture() {
    on_each_device(|cuda| {
        let Some(copy) = Copy::new(cuda) else { return };
        let stream = Stream::new(cuda).unwrap();
        let raw = stream.raw();
        let data = copy.refresh(cuda, raw, 1);
        let graph = stream.capture(|| {
            copy.enqueue(cuda, raw, false)?;
            let addr = cuda.addr(&copy.dst);
            // SAFETY: the addresses are those of a buffer.
            let refused = unsafe {
                [
                    cuda.synchronize(raw),
                    cuda.upload(raw, addr, &[0; 8]),
                    cuda.download(raw, addr, &mut [0; 8]),
                    stream.synchronize(),
                ]
            };
            assert!(refused.iter().all(|call| matches!(call, Err(Error::GraphState { .. }))), "{refused:?}");
            assert!(matches!(stream.capture(|| Ok(())), Err(Error::GraphState { .. })));
            Ok(())
        });
        // SAFETY: the buffers live on.
        unsafe { stream.replay(&graph.unwrap()).unwrap() };
        assert!(copy.result(cuda, raw) == data);
    });
}

#[test]
fn memory_may_come_and_go_during_a_capture_without_entering_the_graph() {
    on_each_device(|cuda| {
        let Some(copy) = Copy::new(cuda) else { return };
        let stream = Stream::new(cuda).unwrap();
        let data = copy.refresh(cuda, stream.raw(), 1);
        let mut kept = Vec::new();
        let graph = stream.capture(|| {
            for round in 1..20 {
                // Sizes that no dropped block has, so that the driver is asked each time.
                drop(cuda.alloc(round * 3_000_001, "dropped at once")?);
                kept.push(cuda.alloc(round * 1_000_003, "kept")?);
            }
            cuda.prepare(&Variant { form: 4242, ..copy_variant() }).map(drop).or_else(|error| match error {
                Error::Unavailable { .. } => Ok(()),
                other => Err(other),
            })?;
            copy.enqueue(cuda, stream.raw(), false)
        });
        // SAFETY: the buffers live on.
        let graph = graph.unwrap();
        for _ in 0..3 {
            // SAFETY: as above.
            unsafe { stream.replay(&graph).unwrap() };
        }
        assert!(copy.result(cuda, stream.raw()) == data);
    });
}

#[test]
fn a_broken_capture_is_reported_and_the_stream_works_after() {
    on_each_device(|cuda| {
        let Some(copy) = Copy::new(cuda) else { return };
        let driver = Raw::open();
        let stream = Stream::new(cuda).unwrap();
        let raw = stream.raw();
        type Breaker<'a> = (&'a str, &'a dyn Fn() -> i32, &'a str);
        let breakers: [Breaker; 3] = [
            ("a synchronize inside", &|| driver.synchronize(raw), "INVALIDATED"),
            ("an allocation inside", &|| driver.mem_alloc(), "INVALIDATED"),
            ("a captured allocation", &|| driver.mem_alloc_async(raw), "runs once"),
        ];
        for (name, break_it, words) in breakers {
            let broken = stream.capture(|| {
                copy.enqueue(cuda, raw, false)?;
                println!("{name}: the driver answered {}", break_it());
                Ok(())
            });
            match broken.map(|_| ()) {
                Err(Error::CaptureFailed { reason }) => assert!(reason.contains(words), "{name}: {reason}"),
                other => panic!("{name}: {other:?}"),
            }
            let data = copy.refresh(cuda, raw, 3);
            let graph = stream.capture(|| copy.enqueue(cuda, raw, false)).unwrap();
            // SAFETY: the buffers live on.
            unsafe { stream.replay(&graph).unwrap() };
            assert!(copy.result(cuda, raw) == data, "after {name}");
        }
    });
}

#[test]
fn an_abandoned_capture_leaves_the_stream_usable_and_runs_nothing() {
    on_each_device(|cuda| {
        let Some(copy) = Copy::new(cuda) else { return };
        let stream = Stream::new(cuda).unwrap();
        let raw = stream.raw();
        copy.refresh(cuda, raw, 1);
        let failed = stream.capture(|| {
            copy.enqueue(cuda, raw, false)?;
            Err(Error::argument("x", "the caller's own error"))
        });
        assert!(matches!(failed.map(|_| ()), Err(Error::Argument { arg: "x", .. })));
        let unwound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            stream.capture(|| {
                copy.enqueue(cuda, raw, false)?;
                panic!("in the middle")
            })
        }));
        assert!(unwound.is_err());
        // Outside of any capture there is nothing to end.
        cuda.abort_capture(raw);
        assert!(matches!(cuda.end_capture(raw).map(|_| ()), Err(Error::CaptureFailed { .. })));
        assert!(copy.result(cuda, raw) == vec![0xff; BYTES]);
        let data = copy.refresh(cuda, raw, 2);
        copy.enqueue(cuda, raw, false).unwrap();
        assert!(copy.result(cuda, raw) == data);
    });
}

#[test]
fn threads_share_a_device_while_one_of_them_captures() {
    on_each_device(|cuda| {
        let Some(first) = Copy::new(cuda) else { return };
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for thread in 0..3 {
                let done = &done;
                scope.spawn(move || {
                    let copy = Copy::new(cuda).unwrap();
                    let stream = cuda.create_stream().unwrap();
                    let mut seed = thread * 1000;
                    while !done.load(Ordering::Relaxed) {
                        seed += 1;
                        let data = copy.refresh(cuda, &stream, seed);
                        copy.enqueue(cuda, &stream, false).unwrap();
                        drop(cuda.alloc(1 + (seed as usize * 77_777) % (8 << 20), "churn").unwrap());
                        assert!(copy.result(cuda, &stream) == data, "thread {thread}");
                    }
                });
            }
            let stream = Stream::new(cuda).unwrap();
            for seed in 0..50 {
                let graph = stream.capture(|| first.enqueue(cuda, stream.raw(), false)).unwrap();
                let data = first.refresh(cuda, stream.raw(), seed);
                // SAFETY: the buffers live on.
                unsafe { stream.replay(&graph).unwrap() };
                assert!(first.result(cuda, stream.raw()) == data);
            }
            done.store(true, Ordering::Relaxed);
        });
    });
}

#[test]
fn dropped_memory_is_not_reused_under_work_that_reads_it() {
    on_each_device(|cuda| {
        let Some(copy) = Copy::new(cuda) else { return };
        let stream = cuda.create_stream().unwrap();
        for seed in 0..30 {
            let data = copy.refresh(cuda, &stream, seed);
            let src = cuda.alloc(BYTES, "a source that goes away").unwrap();
            upload(cuda, &stream, &src, &data);
            let copy = Copy { kernel: copy.kernel.clone(), src, ..Copy::with_kernel(cuda, copy.kernel.clone()) };
            // Much work ahead of the read, then the memory is dropped and another stream writes over what it gets.
            for _ in 0..50 {
                copy.enqueue(cuda, &stream, false).unwrap();
            }
            let Copy { src, dst, .. } = copy;
            drop(src);
            let other = cuda.create_stream().unwrap();
            let thieves: Vec<_> = (0..4).map(|_| cuda.alloc(BYTES, "another").unwrap()).collect();
            for thief in &thieves {
                // SAFETY: the buffer has these bytes.
                unsafe { cuda.fill(&other, cuda.addr(thief), 0x55, BYTES).unwrap() };
            }
            assert!(download(cuda, &stream, &dst, BYTES) == data, "round {seed}");
            cuda.synchronize(&other).unwrap();
        }
    });
}

#[test]
fn a_borrowed_stream_runs_captures_and_is_left_alone() {
    on_each_device(|cuda| {
        let Some(copy) = Copy::new(cuda) else { return };
        let owner = cuda.create_stream().unwrap();
        for seed in 0..3 {
            // SAFETY: the owner outlives it.
            let stream = unsafe { Stream::from_raw(cuda, owner.handle()).unwrap() };
            assert_eq!(stream.raw().handle(), owner.handle());
            let data = copy.refresh(cuda, stream.raw(), seed);
            let graph = stream.capture(|| copy.enqueue(cuda, stream.raw(), false)).unwrap();
            // SAFETY: the buffers live on.
            unsafe { stream.replay(&graph).unwrap() };
            assert!(copy.result(cuda, &owner) == data);
        }
        // The legacy default stream can be used as well, though not captured.
        // SAFETY: it is always there.
        let legacy = unsafe { Stream::from_raw(cuda, 0).unwrap() };
        let data = copy.refresh(cuda, legacy.raw(), 9);
        copy.enqueue(cuda, legacy.raw(), false).unwrap();
        assert!(copy.result(cuda, legacy.raw()) == data);
        assert!(legacy.capture(|| Ok(())).is_err());
        // SAFETY: never used.
        assert!(matches!(unsafe { cuda.borrow_stream(2) }.map(|_| ()), Err(Error::Argument { .. })));
    });
}

#[test]
fn kernels_are_prepared_once_cached_on_disk_and_rebuilt_when_the_entry_is_corrupt() {
    on_each_device(|cuda| {
        // A constant that the kernel does not read makes code that the library does not carry.
        let variant = Variant { stages: 77, ..copy_variant() };
        let dir = std::env::temp_dir().join(format!("latentwave-cuda-test-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        let index = cuda.device().index;
        let fresh = || Cuda::with_cache(index, DiskCache::at(&dir)).unwrap();
        let check = |cuda: &Cuda, origin| {
            let start = Instant::now();
            let kernel = cuda.prepare(&variant)?;
            println!("prepared in {:?}: {:?}", start.elapsed(), kernel.origin());
            assert_eq!(kernel.origin(), origin);
            assert_eq!(cuda.prepare(&variant)?.origin(), origin, "found loaded");
            let copy = Copy::with_kernel(cuda, kernel);
            let stream = cuda.create_stream()?;
            let data = copy.refresh(cuda, &stream, 5);
            copy.enqueue(cuda, &stream, false)?;
            assert!(copy.result(cuda, &stream) == data);
            Ok(())
        };
        match check(&fresh(), Origin::Compiled) {
            Err(error @ Error::Unavailable { .. }) => return not_run("nvrtc", &error.to_string()),
            done => done.unwrap(),
        }
        check(&fresh(), Origin::Cached).unwrap();
        let entry = find_entry(&dir);
        let good = std::fs::read(&entry).unwrap();
        let mut flipped = good.clone();
        flipped[good.len() / 2] ^= 0x40;
        for bad in [&b"not an entry"[..], &good[..good.len() / 2], &flipped, b""] {
            std::fs::write(&entry, bad).unwrap();
            check(&fresh(), Origin::Compiled).unwrap();
            assert!(std::fs::read(&entry).unwrap() == good, "rebuilt");
        }
        check(&fresh(), Origin::Cached).unwrap();
        std::fs::remove_dir_all(&dir).unwrap();

        // A place that cannot be written to.
        std::fs::write(&dir, b"a file").unwrap();
        check(&fresh(), Origin::Compiled).unwrap();
        std::fs::remove_file(&dir).unwrap();

        let cuda = fresh();
        let start = Instant::now();
        std::thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(|| cuda.prepare(&variant).unwrap()))));
        println!("prepared by four threads at once in {:?}", start.elapsed());
        std::fs::remove_dir_all(&dir).unwrap();
    });
}

fn find_entry(dir: &std::path::Path) -> std::path::PathBuf {
    let mut path = dir.to_owned();
    while path.is_dir() {
        path = std::fs::read_dir(&path).unwrap().next().unwrap().unwrap().path();
    }
    path
}

#[test]
fn a_launch_that_the_driver_refuses_is_typed_and_harmless() {
    on_each_device(|cuda| {
        let Some(copy) = Copy::new(cuda) else { return };
        let stream = cuda.create_stream().unwrap();
        let params = Params::Merge(bytemuck::Zeroable::zeroed());
        for (threads, shared_bytes) in [(4096, 0), (128, 1 << 20)] {
            let launch = Launch { grid: [1, 1, 1], threads, shared_bytes, dependent: false };
            // SAFETY: the driver refuses the launch.
            let refused = unsafe { cuda.launch(&stream, &copy.kernel, &launch, &params) };
            assert!(matches!(refused, Err(Error::Driver { code: 1, .. })), "{refused:?}");
        }
        let data = copy.refresh(cuda, &stream, 1);
        copy.enqueue(cuda, &stream, true).unwrap();
        assert!(copy.result(cuda, &stream) == data);
    });
}
