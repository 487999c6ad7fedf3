//! What the device can do at most, measured in the same run, so that a point can be given as a share of it.

use std::time::Instant;

use latentwave::ops::Probe;
use latentwave::{Error, GraphBackend, Result, Stream};
use serde::Serialize;

/// Bytes read to measure the bandwidth: far more than any cache holds.
const READ_BYTES: usize = 512 << 20;

/// Passes over them, of which the fastest counts.
const PASSES: usize = 5;

/// Launches of a probe in one graph.
const LAUNCHES: usize = 20;

/// Ceilings of a device; absent where this program has no way to measure one.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(crate) struct Ceilings {
    /// GB/s of reading memory.
    pub(crate) read: Option<f64>,
    /// TFLOP/s of multiplying matrices.
    pub(crate) matmul: Option<f64>,
}

/// Measures the ceilings of a backend's device.
///
/// # Errors
/// What its probes return, but for a backend that has none.
pub(crate) fn measure<B: GraphBackend>(backend: &B) -> Result<Ceilings> {
    if B::NAME == "host" {
        return Ok(Ceilings { read: Some(host_read(backend.device().num_compute_units)), matmul: None });
    }
    let rate = |probe: Result<Probe<B>>| match probe {
        Ok(probe) => sustained(backend, &probe).map(Some),
        Err(Error::Unsupported { .. }) => Ok(None),
        Err(error) => Err(error),
    };
    let read = rate(Probe::read(backend, 2 * READ_BYTES))?;
    let matmul = rate(Probe::matmul(backend))?;
    Ok(Ceilings { read: read.map(|rate| rate / 1e9), matmul: matmul.map(|rate| rate / 1e12) })
}

/// Work per second of a probe, launched many times in a graph; the median over replays.
fn sustained<B: GraphBackend>(backend: &B, probe: &Probe<B>) -> Result<f64> {
    let stream = Stream::new(backend)?;
    let graph = stream.capture(|| (0..LAUNCHES).try_for_each(|_| probe.enqueue(&stream)))?;
    let mut seconds = Vec::new();
    for _ in 0..2 * PASSES {
        let start = Instant::now();
        // SAFETY: the graph owns the probe's memory.
        unsafe { stream.replay(&graph)? };
        stream.synchronize()?;
        seconds.push(start.elapsed().as_secs_f64());
    }
    seconds.sort_by(f64::total_cmp);
    Ok(probe.work * LAUNCHES as f64 / seconds[PASSES])
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
