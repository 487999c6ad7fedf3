//! The kernel driver's user library, as AMD's HSA runtime calls it: `libhsakmt.so.1`.
//!
//! The functions' contracts are those of AMD's `hsakmt.h`. What the emulated device lacks (SVM, IPC, graphics interop, debugger,
//! profiler, SDMA) answers `HSAKMT_STATUS_NOT_SUPPORTED`.
#![allow(non_snake_case, reason = "the names of the C interface")]
#![allow(clippy::missing_safety_doc, reason = "the contracts are the C interface's")]

pub mod events;
pub mod memory;
pub mod queue;
pub mod topology;
pub mod types;
pub mod unsupported;

use std::sync::OnceLock;

use crate::device::{Config, Device};
use types::{ClockCounters, Status, VersionInfo};

/// The process's one emulated GPU with its driver state.
pub(crate) struct Driver {
    pub(crate) device: Device,
    memory: memory::Allocations,
    events: events::Events,
    queues: queue::Queues,
}

static DRIVER: OnceLock<Driver> = OnceLock::new();

impl Driver {
    /// The driver, once it is open.
    fn get() -> Option<&'static Self> {
        DRIVER.get()
    }
}

/// Prints a line when the configuration asks for a log.
macro_rules! log {
    ($driver:expr, $($text:tt)*) => {
        if $driver.device.config.log {
            eprintln!("[amd emulator] {}", format_args!($($text)*));
        }
    };
}
use log;

/// Runs `f` on the open driver; without one answers that it is not open.
fn with(f: impl FnOnce(&'static Driver) -> Status) -> Status {
    Driver::get().map_or(Status::KernelIoChannelNotOpened, f)
}

/// Writes `x` to an output argument that may be null.
///
/// # Safety
/// `to` is null or writable.
unsafe fn output<T>(to: *mut T, x: T) -> Status {
    if to.is_null() {
        return Status::InvalidParameter;
    }
    // SAFETY: by the contract of this function. The interface packs its structs to 4 bytes.
    unsafe { to.write_unaligned(x) };
    Status::Success
}

/// Opens the driver.
#[unsafe(no_mangle)]
pub extern "C" fn hsaKmtOpenKFD() -> Status {
    if Driver::get().is_some() {
        return Status::Success;
    }
    let config = match Config::from_environment() {
        Ok(config) => config,
        Err(text) => {
            eprintln!("[amd emulator] {text}");
            return Status::KernelIoChannelNotOpened;
        }
    };
    DRIVER.get_or_init(|| {
        // SAFETY: the function is a plain C function with no arguments.
        unsafe { libc::atexit(write_statistics) };
        Driver {
            device: Device::new(config),
            memory: memory::Allocations::default(),
            events: events::Events::default(),
            queues: queue::Queues::default(),
        }
    });
    Status::Success
}

/// Appends what was executed to the file that the configuration names.
extern "C" fn write_statistics() {
    use std::io::Write;
    let Some(driver) = Driver::get() else { return };
    let Some(path) = &driver.device.config.statistics else { return };
    let written = std::fs::OpenOptions::new().create(true).append(true).open(path);
    let text = driver.device.statistics().lines();
    if let Err(error) = written.and_then(|mut file| file.write_all(text.as_bytes())) {
        eprintln!("[amd emulator] {}: {error}", path.display());
    }
}

/// Closes the driver; what is open stays so until the process ends.
#[unsafe(no_mangle)]
pub extern "C" fn hsaKmtCloseKFD() -> Status {
    Status::Success
}

/// The driver's version: the first with event ages.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hsaKmtGetVersion(version: *mut VersionInfo) -> Status {
    // SAFETY: the caller gives a writable pointer or null.
    unsafe { output(version, VersionInfo { major: 1, minor: 14 }) }
}

/// Nanoseconds of the clock that all counters show.
fn nanoseconds() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is valid.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// All clocks, in nanoseconds.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hsaKmtGetClockCounters(_node: u32, counters: *mut ClockCounters) -> Status {
    let now = nanoseconds();
    let clocks = ClockCounters { gpu: now, cpu: now, system: now, system_frequency_hz: 1_000_000_000 };
    // SAFETY: the caller gives a writable pointer or null.
    unsafe { output(counters, clocks) }
}
