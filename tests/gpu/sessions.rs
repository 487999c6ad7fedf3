//! What a session comes to when its device or its caller lets it down: a typed error each time, and right steps after it.

use latentwave::graph::{CaptureState, RuntimeMode};
use latentwave::session::{CaptureReport, DecodeSession, SessionConfig};
use latentwave::{Backend, DType, Error, Stream, Tensor};

use super::engine::{Engine, config, tables};
use super::support::{alone_on_each_device, fill, not_run, on_each_device};
use super::vendor::{COMPILER, Gpu, MAY_SURVIVE, Raw, breakers};

fn one_size() -> SessionConfig {
    SessionConfig { capture_sizes: Some(vec![2]), ..config(2, 0) }
}

/// An engine of one layer whose session has one graph, of two sequences; none without kernels for the device.
fn engine(gpu: &Gpu, stream: Stream<Gpu>) -> Option<Engine<Gpu>> {
    match DecodeSession::with_builders(stream, one_size(), Vec::new()) {
        Ok(session) => Some(Engine::new(gpu, session, 1, 1).expect("an engine")),
        Err(error @ Error::Unavailable { .. }) => {
            not_run(COMPILER, &error);
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Captures, calling `meddle` with the stream while it records.
fn capture(engine: &mut Engine<Gpu>, mut meddle: impl FnMut(&Stream<Gpu>) -> latentwave::Result<()>) -> CaptureReport {
    let report = engine.capture_with(|stream| match stream.capture_state() {
        CaptureState::Capturing => meddle(stream),
        // The eager run that comes first.
        _ => Ok(()),
    });
    report.expect("the session goes on")
}

/// Runs a step of two sequences and compares it with float64. Returns how it was served.
fn step(engine: &mut Engine<Gpu>, when: &str) -> RuntimeMode {
    let lens = [130, 37];
    let tables = tables(&lens, 16, engine.session.config().num_pages, 5);
    engine.poison().expect(when);
    let served = engine.step(1, &lens, &tables).expect(when);
    engine.verify(1, &lens, &tables, 2);
    served.mode
}

/// Captures what has no graph yet, and steps by it.
fn works(engine: &mut Engine<Gpu>, when: &str) {
    engine.capture().and_then(CaptureReport::all).expect(when);
    assert_eq!(step(engine, when), RuntimeMode::Full, "{when}");
}

#[test]
fn a_session_reports_a_capture_that_its_caller_breaks_and_captures_the_next() {
    on_each_device(|gpu| {
        let driver = Raw::open();
        for index in 0.. {
            let Some(mut engine) = engine(gpu, Stream::new(gpu).unwrap()) else { return };
            let Some((name, _, words)) = breakers(&driver, engine.session.stream().raw()).into_iter().nth(index) else {
                break;
            };
            let report = capture(&mut engine, |stream| {
                let call = breakers(&driver, stream.raw()).into_iter().nth(index).expect("as before").1;
                println!("{name}: the driver answered {}", call());
                Ok(())
            });
            match &report.failed[..] {
                [(_, Error::CaptureFailed { reason })] => assert!(reason.contains(words), "{name}: {reason}"),
                [] if MAY_SURVIVE => {}
                other => panic!("{name}: {other:?}"),
            }
            step(&mut engine, name);
            works(&mut engine, name);
        }
    });
}

#[test]
fn a_session_on_a_stream_whose_capture_was_not_ended_says_so_and_works_once_it_is() {
    on_each_device(|gpu| {
        let driver = Raw::open();
        let owner = gpu.create_stream().unwrap();
        // SAFETY: the owner outlives the engine.
        let Some(mut engine) = engine(gpu, unsafe { Stream::from_raw(gpu, owner.handle()).unwrap() }) else { return };
        works(&mut engine, "before");
        assert_eq!(driver.begin_capture(&owner), 0);
        assert!(matches!(engine.session.synchronize(), Err(Error::CaptureFailed { .. })));
        let stream = engine.session.stream();
        let nested = stream.capture(|| Ok(())).map(drop);
        assert!(matches!(nested, Err(Error::Driver { .. } | Error::CaptureFailed { .. })), "{nested:?}");
        assert_eq!(stream.capture_state(), CaptureState::Idle);
        let lens = [130];
        let tables = tables(&lens, 16, engine.session.config().num_pages, 5);
        let refused = engine.step(1, &lens, &tables).map(drop);
        assert!(matches!(refused, Err(Error::CaptureFailed { .. })), "{refused:?}");
        driver.end_capture(&owner);
        assert_eq!(step(&mut engine, "after"), RuntimeMode::Full);
    });
}

#[test]
fn memory_that_runs_out_while_a_session_reserves_is_typed_and_harms_no_other() {
    alone_on_each_device(|gpu| {
        let Some(mut engine) = engine(gpu, Stream::new(gpu).unwrap()) else { return };
        let taken = fill(gpu);
        let large =
            SessionConfig { max_num_batched_tokens: 4096, ..SessionConfig::new(one_size().mla, 64, 65_536, 64) };
        match DecodeSession::new(gpu, large.clone()).map(drop) {
            Err(Error::OutOfMemory { backend, bytes, .. }) => assert!(backend == Gpu::NAME && bytes > 0),
            other => panic!("{other:?}"),
        }
        step(&mut engine, "while memory is full");
        drop(taken);
        drop(DecodeSession::new(gpu, large).expect("memory is there again"));
        works(&mut engine, "after memory was full");
    });
}

#[test]
fn memory_that_runs_out_while_a_session_captures_is_typed_and_leaves_the_session_whole() {
    alone_on_each_device(|gpu| {
        let Some(mut engine) = engine(gpu, Stream::new(gpu).unwrap()) else { return };
        let taken = fill(gpu);
        // The engine's own allocation between two layers.
        let report = capture(&mut engine, |_| Tensor::empty(gpu, [64 << 20], DType::U8).map(drop));
        match &report.failed[..] {
            [(_, Error::OutOfMemory { bytes, .. })] => assert_eq!(*bytes, 64 << 20),
            other => panic!("{other:?}"),
        }
        step(&mut engine, "after a capture that ran out of memory");
        // The driver's own, for the graph: it may have enough put by.
        let report = capture(&mut engine, |_| Ok(()));
        match &report.failed[..] {
            [] | [(_, Error::CaptureFailed { .. } | Error::OutOfMemory { .. })] => {}
            other => panic!("{other:?}"),
        }
        println!("with memory full: {} captured, {:?}", report.captured.len(), report.failed);
        step(&mut engine, "while memory is full");
        drop(taken);
        works(&mut engine, "after memory was full");
    });
}
