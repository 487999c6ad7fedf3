//! Allocation, deferred frees, copies, threads.

use std::sync::atomic::{AtomicBool, Ordering};

use latentwave::kernel::Variant;
use latentwave::{Backend, Error, Stream};

use super::support::{BYTES, Copy, copy_variant, download, noise, on_each_device, upload};
use super::vendor::Gpu;

#[test]
fn memory_that_ran_out_is_typed_and_the_device_is_usable_after() {
    on_each_device(|gpu| {
        let total = gpu.device().memory_bytes as usize;
        for asked in [total * 2, usize::MAX, usize::MAX - 300] {
            match gpu.alloc(asked, "the scratch").map(|_| ()) {
                Err(Error::OutOfMemory { backend, bytes, purpose: "the scratch" }) => {
                    assert_eq!((backend, bytes), (Gpu::NAME, asked));
                }
                other => panic!("{other:?}"),
            }
        }
        let most = gpu.alloc(total / 10 * 6, "most of it").unwrap();
        assert!(matches!(gpu.alloc(total / 10 * 6, "as much again"), Err(Error::OutOfMemory { .. })));
        drop(most);
        // Freed, but of another size: it goes back to the driver first.
        drop(gpu.alloc(total / 10 * 7, "more").unwrap());
        gpu.trim().unwrap();

        let stream = gpu.create_stream().unwrap();
        let buffer = gpu.alloc(4096, "a check").unwrap();
        let data = noise(1, 4096);
        upload(gpu, &stream, &buffer, &data);
        assert_eq!(download(gpu, &stream, &buffer, 4096), data);
    });
}

#[test]
fn bytes_come_back_as_they_were_sent() {
    on_each_device(|gpu| {
        let stream = gpu.create_stream().unwrap();
        for (seed, bytes) in [1, 3, 255, 4097, 262_143, 262_144, 262_145, 5_000_001].into_iter().enumerate() {
            let buffer = gpu.alloc(bytes + 7, "a copy").unwrap();
            assert_eq!(gpu.addr(&buffer) % 256, 0);
            let addr = gpu.addr(&buffer) + 7;
            let mut src = noise(seed as u64, bytes);
            let data = src.clone();
            let mut back = vec![0; bytes + 7];
            // SAFETY: the buffer has these bytes.
            unsafe {
                gpu.fill(&stream, gpu.addr(&buffer), 0xab, bytes + 7).unwrap();
                gpu.upload(&stream, addr, &src).unwrap();
                // The source may be changed as soon as the call is back.
                src.fill(0);
                gpu.download(&stream, gpu.addr(&buffer), &mut back).unwrap();
            }
            assert_eq!(back[..7], [0xab; 7]);
            assert!(back[7..] == data, "{bytes} bytes");
        }
        // Many small ones, as a step makes them, through a ring that wraps.
        let buffer = gpu.alloc(4000 * 512, "a table").unwrap();
        let data = noise(9, 4000 * 512);
        for (row, bytes) in data.chunks(512).enumerate() {
            // SAFETY: the row lies in the buffer.
            unsafe { gpu.upload(&stream, gpu.addr(&buffer) + row as u64 * 512, bytes).unwrap() };
        }
        assert!(download(gpu, &stream, &buffer, data.len()) == data);
    });
}

#[test]
fn memory_may_come_and_go_during_a_capture_without_entering_the_graph() {
    on_each_device(|gpu| {
        let Some(copy) = Copy::new(gpu) else { return };
        let stream = Stream::new(gpu).unwrap();
        let data = copy.refresh(gpu, stream.raw(), 1);
        let mut kept = Vec::new();
        let graph = stream.capture(|| {
            for round in 1..20 {
                // Sizes that no dropped block has, so that the driver is asked each time.
                drop(gpu.alloc(round * 3_000_001, "dropped at once")?);
                kept.push(gpu.alloc(round * 1_000_003, "kept")?);
            }
            gpu.prepare(&Variant { form: 4242, ..copy_variant() }).map(drop).or_else(|error| match error {
                Error::Unavailable { .. } => Ok(()),
                other => Err(other),
            })?;
            copy.enqueue(gpu, stream.raw(), false)
        });
        // SAFETY: the buffers live on.
        let graph = graph.unwrap();
        for _ in 0..3 {
            // SAFETY: as above.
            unsafe { stream.replay(&graph).unwrap() };
        }
        assert!(copy.result(gpu, stream.raw()) == data);
    });
}

#[test]
fn threads_share_a_device_while_one_of_them_captures() {
    on_each_device(|gpu| {
        let Some(first) = Copy::new(gpu) else { return };
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for thread in 0..3 {
                let done = &done;
                scope.spawn(move || {
                    let copy = Copy::new(gpu).unwrap();
                    let stream = gpu.create_stream().unwrap();
                    let mut seed = thread * 1000;
                    while !done.load(Ordering::Relaxed) {
                        seed += 1;
                        let data = copy.refresh(gpu, &stream, seed);
                        copy.enqueue(gpu, &stream, false).unwrap();
                        drop(gpu.alloc(1 + (seed as usize * 77_777) % (8 << 20), "churn").unwrap());
                        assert!(copy.result(gpu, &stream) == data, "thread {thread}");
                    }
                });
            }
            let stream = Stream::new(gpu).unwrap();
            for seed in 0..50 {
                let graph = stream.capture(|| first.enqueue(gpu, stream.raw(), false)).unwrap();
                let data = first.refresh(gpu, stream.raw(), seed);
                // SAFETY: the buffers live on.
                unsafe { stream.replay(&graph).unwrap() };
                assert!(first.result(gpu, stream.raw()) == data);
            }
            done.store(true, Ordering::Relaxed);
        });
    });
}

#[test]
fn dropped_memory_is_not_reused_under_work_that_reads_it() {
    on_each_device(|gpu| {
        let Some(copy) = Copy::new(gpu) else { return };
        let stream = gpu.create_stream().unwrap();
        for seed in 0..30 {
            let data = copy.refresh(gpu, &stream, seed);
            let src = gpu.alloc(BYTES, "a source that goes away").unwrap();
            upload(gpu, &stream, &src, &data);
            let copy = Copy { kernel: copy.kernel.clone(), src, ..Copy::with_kernel(gpu, copy.kernel.clone()) };
            // Much work ahead of the read, then the memory is dropped and another stream writes over what it gets.
            for _ in 0..50 {
                copy.enqueue(gpu, &stream, false).unwrap();
            }
            let Copy { src, dst, .. } = copy;
            drop(src);
            let other = gpu.create_stream().unwrap();
            let thieves: Vec<_> = (0..4).map(|_| gpu.alloc(BYTES, "another").unwrap()).collect();
            for thief in &thieves {
                // SAFETY: the buffer has these bytes.
                unsafe { gpu.fill(&other, gpu.addr(thief), 0x55, BYTES).unwrap() };
            }
            assert!(download(gpu, &stream, &dst, BYTES) == data, "round {seed}");
            gpu.synchronize(&other).unwrap();
        }
    });
}

#[test]
fn devices_and_handles_are_used_side_by_side_on_one_thread() {
    on_each_device(|gpu| {
        let count = Gpu::devices().unwrap().len();
        let handles: Vec<Gpu> = (0..count).map(|index| Gpu::new(index).unwrap()).chain([gpu.clone()]).collect();
        let data = |round: u64, handle: usize| noise(round * 100 + handle as u64, 70_000);
        let places: Vec<_> = handles
            .iter()
            .map(|gpu| (gpu, gpu.create_stream().unwrap(), gpu.alloc(70_000, "a place").unwrap()))
            .collect();
        for round in 0..3 {
            for (index, (gpu, stream, place)) in places.iter().enumerate() {
                upload(gpu, stream, place, &data(round, index));
            }
            for (index, (gpu, stream, place)) in places.iter().enumerate() {
                assert!(download(gpu, stream, place, 70_000) == data(round, index), "round {round}, handle {index}");
            }
        }
    });
}
