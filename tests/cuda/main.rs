//! The CUDA backend on real devices: memory, streams, kernels, captures, and every way they fail. Each test runs on each
//! device seen. `tests/gpu` holds what both vendors are tested for.
#![cfg(feature = "cuda")]

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

use latentwave::{Backend, Cuda, Error};
use support::on_each_device;

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
