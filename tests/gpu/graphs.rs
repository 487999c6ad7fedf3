//! Capture and replay, broken and abandoned captures, borrowed streams.

use latentwave::{Backend, Error, GraphBackend, Result, Stream};

use super::support::{BYTES, Copy, on_each_device};
use super::vendor::{MAY_SURVIVE, Raw, breakers};

#[test]
fn a_graph_replays_over_changed_data_on_any_stream_and_thread() {
    on_each_device(|gpu| {
        let Some(copy) = Copy::new(gpu) else { return };
        let stream = Stream::new(gpu).unwrap();
        let raw = stream.raw();
        let data = copy.refresh(gpu, raw, 1);
        copy.enqueue(gpu, raw, false).unwrap();
        assert!(copy.result(gpu, raw) == data, "an eager launch");

        let data = copy.refresh(gpu, raw, 2);
        let graph = stream.capture(|| (0..61).try_for_each(|layer| copy.enqueue(gpu, raw, layer > 0))).unwrap();
        assert!(copy.result(gpu, raw) == vec![0xff; BYTES], "recording runs nothing");
        for seed in 3..6 {
            let data = copy.refresh(gpu, raw, seed);
            // SAFETY: the buffers live on.
            unsafe { stream.replay(&graph).unwrap() };
            assert!(copy.result(gpu, raw) == data, "replay {seed}");
        }
        let other = Stream::new(gpu).unwrap();
        std::thread::scope(|scope| {
            let (copy, graph, other) = (&copy, &graph, &other);
            scope.spawn(move || {
                let data = copy.refresh(gpu, other.raw(), 7);
                // SAFETY: the buffers live on.
                unsafe { other.replay(graph).unwrap() };
                assert!(copy.result(gpu, other.raw()) == data, "another stream and thread");
            });
        });
        println!("a graph of 61 kernels holds {} bytes by the free memory", graph.bytes());
        drop(data);
    });
}

#[test]
fn a_call_that_cannot_be_recorded_is_refused_and_fails_only_its_capture() {
    on_each_device(|gpu| {
        let Some(copy) = Copy::new(gpu) else { return };
        let stream = Stream::new(gpu).unwrap();
        let (raw, addr) = (stream.raw(), gpu.addr(&copy.dst));
        type Call<'a> = (&'a str, &'a dyn Fn() -> Result<()>);
        let calls: [Call; 3] = [
            ("synchronize", &|| gpu.synchronize(raw)),
            // SAFETY: the address is that of a buffer.
            ("upload", &|| unsafe { gpu.upload(raw, addr, &[0; 8]) }),
            // SAFETY: as above.
            ("download", &|| unsafe { gpu.download(raw, addr, &mut [0; 8]) }),
        ];
        for (name, call) in calls {
            let data = copy.refresh(gpu, raw, 1);
            let broken = stream.capture(|| {
                copy.enqueue(gpu, raw, false)?;
                assert!(matches!(call(), Err(Error::CaptureFailed { .. })), "{name}");
                copy.enqueue(gpu, raw, false)
            });
            match broken.map(|_| ()) {
                Err(Error::CaptureFailed { reason }) => assert!(reason.contains(name), "{reason}"),
                other => panic!("{name}: {other:?}"),
            }
            assert!(matches!(stream.capture(|| stream.synchronize()), Err(Error::GraphState { .. })));
            let graph = stream.capture(|| copy.enqueue(gpu, raw, false)).unwrap();
            // SAFETY: the buffers live on.
            unsafe { stream.replay(&graph).unwrap() };
            assert!(copy.result(gpu, raw) == data, "after {name}");
        }
    });
}

#[test]
fn a_broken_capture_is_reported_and_the_stream_works_after() {
    on_each_device(|gpu| {
        let Some(copy) = Copy::new(gpu) else { return };
        let driver = Raw::open();
        let stream = Stream::new(gpu).unwrap();
        let raw = stream.raw();
        for (name, break_it, words) in breakers(&driver, raw) {
            let broken = stream.capture(|| {
                copy.enqueue(gpu, raw, false)?;
                println!("{name}: the driver answered {}", break_it());
                Ok(())
            });
            match broken.map(|_| ()) {
                Err(Error::CaptureFailed { reason }) => assert!(reason.contains(words), "{name}: {reason}"),
                Ok(()) if MAY_SURVIVE => {}
                other => panic!("{name}: {other:?}"),
            }
            let data = copy.refresh(gpu, raw, 3);
            let graph = stream.capture(|| copy.enqueue(gpu, raw, false)).unwrap();
            // SAFETY: the buffers live on.
            unsafe { stream.replay(&graph).unwrap() };
            assert!(copy.result(gpu, raw) == data, "after {name}");
        }
    });
}

#[test]
fn an_abandoned_capture_leaves_the_stream_usable_and_runs_nothing() {
    on_each_device(|gpu| {
        let Some(copy) = Copy::new(gpu) else { return };
        let stream = Stream::new(gpu).unwrap();
        let raw = stream.raw();
        copy.refresh(gpu, raw, 1);
        let failed = stream.capture(|| {
            copy.enqueue(gpu, raw, false)?;
            Err(Error::argument("x", "the caller's own error"))
        });
        assert!(matches!(failed.map(|_| ()), Err(Error::Argument { arg: "x", .. })));
        let unwound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            stream.capture(|| {
                copy.enqueue(gpu, raw, false)?;
                panic!("in the middle")
            })
        }));
        assert!(unwound.is_err());
        // A stream that is dropped in the middle does not stay in capture when it serves again.
        let dropped = gpu.create_stream().unwrap();
        gpu.begin_capture(&dropped).unwrap();
        copy.enqueue(gpu, &dropped, false).unwrap();
        drop(dropped);
        gpu.synchronize(&gpu.create_stream().unwrap()).unwrap();
        // Outside of any capture there is nothing to end.
        gpu.abort_capture(raw);
        assert!(matches!(gpu.end_capture(raw).map(|_| ()), Err(Error::CaptureFailed { .. })));
        assert!(copy.result(gpu, raw) == vec![0xff; BYTES]);
        let data = copy.refresh(gpu, raw, 2);
        copy.enqueue(gpu, raw, false).unwrap();
        assert!(copy.result(gpu, raw) == data);
    });
}

#[test]
fn a_borrowed_stream_runs_captures_and_is_left_alone() {
    on_each_device(|gpu| {
        let Some(copy) = Copy::new(gpu) else { return };
        let owner = gpu.create_stream().unwrap();
        for seed in 0..3 {
            // SAFETY: the owner outlives it.
            let stream = unsafe { Stream::from_raw(gpu, owner.handle()).unwrap() };
            assert_eq!(stream.raw().handle(), owner.handle());
            let data = copy.refresh(gpu, stream.raw(), seed);
            let graph = stream.capture(|| copy.enqueue(gpu, stream.raw(), false)).unwrap();
            // SAFETY: the buffers live on.
            unsafe { stream.replay(&graph).unwrap() };
            assert!(copy.result(gpu, &owner) == data);
        }
        // The legacy default stream can be used as well, though not captured.
        // SAFETY: it is always there.
        let legacy = unsafe { Stream::from_raw(gpu, 0).unwrap() };
        let data = copy.refresh(gpu, legacy.raw(), 9);
        copy.enqueue(gpu, legacy.raw(), false).unwrap();
        assert!(copy.result(gpu, legacy.raw()) == data);
        assert!(legacy.capture(|| Ok(())).is_err());
        // SAFETY: never used.
        assert!(matches!(unsafe { gpu.borrow_stream(2) }.map(|_| ()), Err(Error::Argument { .. })));
    });
}
