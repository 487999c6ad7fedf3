//! What the device can do at most, measured in the same run, so that a point can be given as a share of it.

use std::time::Instant;

use latentwave::GraphBackend;
use serde::Serialize;

/// Bytes read to measure the bandwidth: far more than any cache holds.
const READ_BYTES: usize = 512 << 20;

/// Passes over them, of which the fastest counts.
const PASSES: usize = 5;

/// Ceilings of a device; absent where this program has no way to measure one.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(crate) struct Ceilings {
    /// GB/s of reading memory.
    pub(crate) read: Option<f64>,
    /// TFLOP/s of multiplying matrices.
    pub(crate) matmul: Option<f64>,
}

/// Measures the ceilings of a backend's device.
pub(crate) fn measure<B: GraphBackend>(backend: &B) -> Ceilings {
    match B::NAME {
        "host" => Ceilings { read: Some(host_read(backend.device().num_compute_units)), matmul: None },
        _ => Ceilings::default(),
    }
}

/// GB/s at which all threads together sum numbers in memory.
fn host_read(threads: usize) -> f64 {
    let numbers: Vec<u64> = (0..READ_BYTES as u64 / 8).collect();
    let share = numbers.len().div_ceil(threads.max(1));
    let passes = (0..PASSES).map(|_| {
        let start = Instant::now();
        std::thread::scope(|scope| {
            for part in numbers.chunks(share) {
                scope.spawn(move || {
                    std::hint::black_box(part.iter().fold(0_u64, |sum, number| sum.wrapping_add(*number)));
                });
            }
        });
        start.elapsed().as_secs_f64()
    });
    READ_BYTES as f64 / passes.fold(f64::INFINITY, f64::min) / 1e9
}
