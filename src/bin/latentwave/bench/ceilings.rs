//! What the device can do at most, measured in the same run, so that a point can be given as a share of it.

use std::time::Instant;

use latentwave::ops::Probe;
use latentwave::{Error, GraphBackend, Result, Stream};
use serde::Serialize;

use super::measure::after_rests;

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
    /// The same after a rest, if it was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) matmul_burst: Option<f64>,
}

/// Measures the ceilings of a backend's device.
///
/// # Errors
/// What its probes return, but for a backend that has none.
pub(crate) fn measure<B: GraphBackend>(backend: &B, burst: bool) -> Result<Ceilings> {
    if B::NAME == "host" {
        return Ok(Ceilings { read: Some(host_read(backend.device().num_compute_units)), ..Ceilings::default() });
    }
    let rates = |probe: Result<Probe<B>>, burst| match probe {
        Ok(probe) => rates(backend, &probe, burst),
        Err(Error::Unsupported { .. }) => Ok((None, None)),
        Err(error) => Err(error),
    };
    let (read, _) = rates(Probe::read(backend, 2 * READ_BYTES), false)?;
    let (matmul, matmul_burst) = rates(Probe::matmul(backend), burst)?;
    let tera = |rate: f64| rate / 1e12;
    Ok(Ceilings { read: read.map(|rate| rate / 1e9), matmul: matmul.map(tera), matmul_burst: matmul_burst.map(tera) })
}

/// Work per second of a probe, launched many times in a graph: the median over replays and, if asked for, after rests.
fn rates<B: GraphBackend>(backend: &B, probe: &Probe<B>, burst: bool) -> Result<(Option<f64>, Option<f64>)> {
    let stream = Stream::new(backend)?;
    let graph = stream.capture(|| (0..LAUNCHES).try_for_each(|_| probe.enqueue(&stream)))?;
    let replay = || -> Result<f64> {
        let start = Instant::now();
        // SAFETY: the graph owns the probe's memory.
        unsafe { stream.replay(&graph)? };
        stream.synchronize()?;
        Ok(start.elapsed().as_secs_f64())
    };
    let mut seconds = (0..2 * PASSES).map(|_| replay()).collect::<Result<Vec<_>>>()?;
    seconds.sort_by(f64::total_cmp);
    let after_rests = if burst { Some(after_rests(replay)?) } else { None };
    let rate = |seconds: f64| probe.work * LAUNCHES as f64 / seconds;
    Ok((Some(rate(seconds[PASSES])), after_rests.map(rate)))
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
