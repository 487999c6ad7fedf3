//! The ROCm backend on devices, real or emulated: memory, streams, kernels, captures, and every way they fail. Each test runs
//! on each device seen. `tests/gpu` holds what both vendors are tested for.
//!
//! `LATENTWAVE_ROCM_EXPECT` (`unavailable`, `no-device` or `device`) makes any other state of the machine a failure;
//! `ci/hip_runtimes.sh` sets it.
#![cfg(feature = "rocm")]

mod compile;
#[path = "../engine/mod.rs"]
mod engine;
#[path = "../gpu/graphs.rs"]
mod graphs;
#[path = "../gpu/kernels.rs"]
mod kernels;
#[path = "../gpu/memory.rs"]
mod memory;
#[path = "../gpu/sessions.rs"]
mod sessions;
#[path = "../gpu/support.rs"]
mod support;
mod vendor;

use latentwave::{Backend, Error, GraphBackend, Rocm, Stream};
use support::{Copy, on_each_device};
use vendor::Raw;

#[test]
fn a_machine_without_a_runtime_or_device_gets_a_typed_error() {
    let state = match Rocm::new(0) {
        Ok(rocm) => {
            assert_eq!(rocm.device().backend, "rocm");
            "device"
        }
        Err(error @ Error::Unavailable { backend: "rocm", .. }) => {
            let text = error.to_string();
            println!("{text}");
            for file in ["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5", "libamdhip64.so:", "ROCM_PATH"] {
                assert!(text.contains(file), "{file} not named in: {text}");
            }
            assert!(matches!(Rocm::devices(), Err(Error::Unavailable { .. })));
            "unavailable"
        }
        Err(error @ Error::NoDevice { backend: "rocm", index: 0, .. }) => {
            println!("{error}");
            assert!(error.to_string().contains("hipError"), "{error}");
            assert_eq!(Rocm::devices().unwrap(), []);
            assert!(matches!(Rocm::new(7), Err(Error::NoDevice { index: 7, .. })));
            "no-device"
        }
        Err(other) => panic!("{other}"),
    };
    if let Ok(expected) = std::env::var("LATENTWAVE_ROCM_EXPECT") {
        assert_eq!(state, expected);
    }
}

#[test]
fn a_device_that_is_not_there_is_named_in_the_error() {
    on_each_device(|_| {
        let count = Rocm::devices().unwrap().len();
        for index in [count, count + 99, usize::MAX] {
            match Rocm::new(index) {
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
    on_each_device(|rocm| {
        let device = rocm.device();
        println!("{device:?}");
        assert_eq!(Some(device), Rocm::devices().unwrap().get(device.index));
        assert!(device.arch.starts_with("gfx") && !device.name.is_empty() && !device.driver_version.is_empty());
        assert!(device.num_compute_units > 0);
        assert_eq!(device.wave_size, if device.arch.starts_with("gfx9") { 64 } else { 32 }, "{}", device.arch);
        assert!(device.shared_bytes_per_block >= 64 << 10 && device.memory_bytes >= 1 << 30);
        assert!(rocm.driver_rules().iter().all(|rule| rule.backend == Rocm::NAME));
    });
}

/// HIP 5.7 never lets go of such a stream, whatever is tried; the error says so, and the device is whole.
#[test]
fn a_stream_drawn_into_a_capture_and_not_joined_is_reported_and_another_stream_works() {
    on_each_device(|rocm| {
        let Some(copy) = Copy::new(rocm) else { return };
        let driver = Raw::open();
        let stuck = Stream::new(rocm).unwrap();
        let broken = stuck.capture(|| {
            copy.enqueue(rocm, stuck.raw(), false)?;
            driver.fork(stuck.raw()).unwrap();
            Ok(())
        });
        match broken.map(|_| ()) {
            Err(Error::CaptureFailed { reason }) => assert!(reason.contains("Unjoined"), "{reason}"),
            other => panic!("{other:?}"),
        }
        let stream = Stream::new(rocm).unwrap();
        let data = copy.refresh(rocm, stream.raw(), 1);
        let graph = stream.capture(|| copy.enqueue(rocm, stream.raw(), false)).unwrap();
        // SAFETY: the buffers live on.
        unsafe { stream.replay(&graph).unwrap() };
        assert!(copy.result(rocm, stream.raw()) == data);
        // It must not serve another test.
        std::mem::forget(stuck);
    });
}

#[cfg(feature = "cuda")]
#[test]
fn both_vendors_live_in_one_program() {
    // Neither loads the other's libraries, and the absence of one is no matter to the other.
    let states = [latentwave::Cuda::devices().map(|d| d.len()), Rocm::devices().map(|d| d.len())];
    for (state, name) in states.iter().zip(["cuda", "rocm"]) {
        match state {
            Ok(count) => println!("{name}: {count} devices"),
            Err(Error::Unavailable { backend, .. }) => assert_eq!(*backend, name),
            Err(other) => panic!("{other}"),
        }
    }
}
