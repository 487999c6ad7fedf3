//! What is known of the machine.

use super::simd::Simd;
use crate::backend::DeviceInfo;

/// Facts for a device of `threads` threads.
pub(super) fn info(threads: usize, simd: &Simd) -> DeviceInfo {
    DeviceInfo {
        backend: "host",
        name: value_in("/proc/cpuinfo", "model name").unwrap_or_else(|| std::env::consts::ARCH.to_owned()),
        arch: std::env::consts::ARCH.to_owned(),
        index: 0,
        num_compute_units: threads,
        wave_size: 1,
        // Scratch is ordinary memory: there is no limit of this kind, and no kernel asks for any.
        shared_bytes_per_block: 0,
        memory_bytes: memory_bytes().unwrap_or(isize::MAX as u64),
        driver_version: format!("{} ({})", env!("CARGO_PKG_VERSION"), simd.name),
    }
}

/// Physical memory, where the system tells it in a file.
fn memory_bytes() -> Option<u64> {
    let text = value_in("/proc/meminfo", "MemTotal")?;
    text.strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The first `key : value` line of a system file.
fn value_in(path: &str, key: &str) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    text.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        (name.trim() == key).then(|| value.trim().to_owned())
    })
}
