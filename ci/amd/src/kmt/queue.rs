//! User-mode AQL queues: one thread for each takes packets and runs them in order.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::topology::GPU;
use super::types::{Event, QueueResource, Status};
use super::{Driver, log, nanoseconds, output, with};
use crate::device::Dispatch;

/// `HSA_QUEUE_COMPUTE_AQL`.
const COMPUTE_AQL: u32 = 21;
/// Bytes of a packet.
const PACKET: u64 = 64;
/// Offset of `read_dispatch_id` in the queue descriptor that kernels may read.
const READ_ID_OFFSET: u64 = 128;

// Packet types.
const VENDOR_SPECIFIC: u16 = 0;
const INVALID: u16 = 1;
const KERNEL_DISPATCH: u16 = 2;
const BARRIER_AND: u16 = 3;
const BARRIER_OR: u16 = 5;

// Formats of vendor specific packets.
const FORMAT_PM4: u8 = 1;
const FORMAT_BARRIER_VALUE: u8 = 2;

struct Handle {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
    // The runtime writes to it; the thread watches the write index instead.
    _doorbell: Box<AtomicU64>,
}

/// The process's queues.
#[derive(Default)]
pub(super) struct Queues {
    handles: Mutex<HashMap<u64, Handle>>,
    last_id: AtomicU64,
}

/// What a queue's thread works on.
struct Ring {
    packets: u64,
    count: u64,
    read: &'static AtomicU64,
    write: &'static AtomicU64,
    stop: Arc<AtomicBool>,
}

/// Makes an AQL compute queue.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hsaKmtCreateQueue(
    node: u32,
    kind: u32,
    _percentage: u32,
    _priority: i32,
    packets: *mut c_void,
    len: u64,
    _event: *mut Event,
    resource: *mut QueueResource,
) -> Status {
    with(|driver| {
        log!(driver, "queue of type {kind}, {len} bytes");
        if kind != COMPUTE_AQL {
            return Status::NotSupported;
        }
        if node != GPU || packets.is_null() || resource.is_null() || !(len / PACKET).is_power_of_two() {
            return Status::InvalidParameter;
        }
        // SAFETY: the pointer was checked; the caller keeps both indices alive as long as the queue.
        let (read, write) = unsafe {
            let given = resource.read_unaligned();
            (AtomicU64::from_ptr(given.read_ptr), AtomicU64::from_ptr(given.write_ptr))
        };
        let stop = Arc::new(AtomicBool::new(false));
        let ring = Ring { packets: packets as u64, count: len / PACKET, read, write, stop: Arc::clone(&stop) };
        let thread = std::thread::Builder::new().name("amd-queue".into()).spawn(move || ring.run(driver));
        let Ok(thread) = thread else { return Status::NoMemory };
        let doorbell = Box::new(AtomicU64::new(0));
        let id = driver.queues.last_id.fetch_add(1, Ordering::Relaxed) + 1;
        // SAFETY: the pointer was checked.
        unsafe {
            (&raw mut (*resource).queue_id).write_unaligned(id);
            (&raw mut (*resource).doorbell).write_unaligned(doorbell.as_ptr());
        }
        let handle = Handle { stop, thread, _doorbell: doorbell };
        driver.queues.handles.lock().unwrap_or_else(PoisonError::into_inner).insert(id, handle);
        Status::Success
    })
}

/// Stops a queue after the packet that it is at.
#[unsafe(no_mangle)]
pub extern "C" fn hsaKmtDestroyQueue(id: u64) -> Status {
    with(|driver| {
        let handle = driver.queues.handles.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
        let Some(handle) = handle else { return Status::InvalidHandle };
        handle.stop.store(true, Ordering::Release);
        // A thread that panicked has ended too.
        let _ended = handle.thread.join();
        Status::Success
    })
}

/// Queues have no settings.
#[unsafe(no_mangle)]
pub extern "C" fn hsaKmtUpdateQueue(
    _id: u64,
    _percentage: u32,
    _priority: i32,
    _address: *mut c_void,
    _len: u64,
    _event: *mut Event,
) -> Status {
    Status::Success
}

/// All compute units are alike.
#[unsafe(no_mangle)]
pub extern "C" fn hsaKmtSetQueueCUMask(_id: u64, _count: u32, _mask: *mut u32) -> Status {
    Status::Success
}

/// There is no global wave sync.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hsaKmtAllocQueueGWS(_id: u64, _count: u32, first: *mut u32) -> Status {
    if !first.is_null() {
        // SAFETY: the caller gives a writable pointer.
        unsafe { output(first, 0) };
    }
    Status::NotSupported
}

/// Sleeps longer the longer nothing has happened.
struct Idle(Instant);

impl Idle {
    fn wait(&self) {
        let idle = self.0.elapsed();
        std::thread::sleep(if idle < Duration::from_millis(5) {
            Duration::from_micros(10)
        } else {
            Duration::from_micros(100)
        });
    }
}

/// A 64-bit field of a packet or signal.
fn field(address: u64) -> &'static AtomicI64 {
    // SAFETY: packets and signals are aligned, and the runtime keeps them alive until they are processed.
    unsafe { AtomicI64::from_ptr(address as *mut i64) }
}

fn u64_at(address: u64) -> u64 {
    field(address).load(Ordering::Relaxed).cast_unsigned()
}

fn u32_at(address: u64) -> u32 {
    // SAFETY: as `field`.
    unsafe { (address as *const u32).read_volatile() }
}

fn u16_at(address: u64) -> u16 {
    // SAFETY: as `field`.
    unsafe { (address as *const u16).read_volatile() }
}

/// The value of a signal.
fn signal_value(signal: u64) -> i64 {
    field(signal + 8).load(Ordering::Acquire)
}

impl Ring {
    fn run(&self, driver: &'static Driver) {
        let mut idle = Idle(Instant::now());
        while !self.stop.load(Ordering::Acquire) {
            let at = self.read.load(Ordering::Relaxed);
            if at >= self.write.load(Ordering::Acquire) {
                idle.wait();
                continue;
            }
            let packet = self.packets + at % self.count * PACKET;
            // SAFETY: the packet lies in the ring, which lives as long as the queue.
            let header = unsafe { AtomicU16::from_ptr(packet as *mut u16) };
            let kind = header.load(Ordering::Acquire) & 0xff;
            if kind == INVALID {
                // Its index is taken, but it is not written yet.
                idle.wait();
                continue;
            }
            let started = nanoseconds();
            if !self.process(driver, kind, packet, at) {
                return;
            }
            let completion = u64_at(packet + 56);
            header.store(INVALID, Ordering::Release);
            self.read.store(at + 1, Ordering::Release);
            complete(driver, completion, started);
            idle = Idle(Instant::now());
        }
    }

    /// Does what a packet asks for. False when the queue was stopped meanwhile.
    fn process(&self, driver: &Driver, kind: u16, packet: u64, id: u64) -> bool {
        match kind {
            KERNEL_DISPATCH => self.dispatch(driver, packet, id),
            BARRIER_AND | BARRIER_OR => {
                let signals: Vec<u64> = (0..5).map(|n| u64_at(packet + 8 + 8 * n)).filter(|s| *s != 0).collect();
                let done = |signal: &u64| signal_value(*signal) == 0;
                let any = kind == BARRIER_OR && !signals.is_empty();
                return self.wait(|| if any { signals.iter().any(done) } else { signals.iter().all(done) });
            }
            VENDOR_SPECIFIC => match (u16_at(packet + 2) & 0xff) as u8 {
                // Commands to the packet processor: cache invalidation, which needs nothing here.
                FORMAT_PM4 => {}
                FORMAT_BARRIER_VALUE => {
                    let (signal, value) = (u64_at(packet + 8), u64_at(packet + 16).cast_signed());
                    let (mask, condition) = (u64_at(packet + 24).cast_signed(), u32_at(packet + 32));
                    return self.wait(|| {
                        let now = signal_value(signal) & mask;
                        match condition {
                            0 => now == value,
                            1 => now != value,
                            2 => now < value,
                            _ => now >= value,
                        }
                    });
                }
                other => stop(&format!("vendor specific packet of format {other} is not implemented")),
            },
            other => stop(&format!("packet of type {other} is not implemented")),
        }
        true
    }

    /// Waits for a condition. False when the queue was stopped meanwhile.
    fn wait(&self, condition: impl Fn() -> bool) -> bool {
        let idle = Idle(Instant::now());
        while !condition() {
            if self.stop.load(Ordering::Acquire) {
                return false;
            }
            idle.wait();
        }
        true
    }

    fn dispatch(&self, driver: &Driver, packet: u64, id: u64) {
        let dispatch = Dispatch {
            kernel: u64_at(packet + 32),
            grid: std::array::from_fn(|n| u32_at(packet + 12 + 4 * n as u64)),
            workgroup: std::array::from_fn(|n| u16_at(packet + 4 + 2 * n as u64).into()),
            private_bytes: u32_at(packet + 24),
            group_bytes: u32_at(packet + 28),
            kernarg: u64_at(packet + 40),
            packet,
            queue: self.read.as_ptr() as u64 - READ_ID_OFFSET,
            id,
        };
        log!(driver, "{dispatch:x?}");
        if let Err(fault) = driver.device.run(&dispatch) {
            stop(&fault.to_string());
        }
    }
}

/// Sets a completion signal: timestamps, value, and the event that wakes its waiters.
fn complete(driver: &Driver, signal: u64, started: u64) {
    if signal == 0 {
        return;
    }
    field(signal + 32).store(started.cast_signed(), Ordering::Relaxed);
    field(signal + 40).store(nanoseconds().cast_signed(), Ordering::Relaxed);
    let (mailbox, event) = (u64_at(signal + 16), u32_at(signal + 24));
    // The runtime may free the signal as soon as its value has changed.
    field(signal + 8).fetch_sub(1, Ordering::AcqRel);
    if mailbox != 0 {
        field(mailbox).store(event.into(), Ordering::Release);
        driver.events.set(event);
    }
}

/// Ends the process: as with a fault of real hardware, nothing that follows could be trusted.
fn stop(reason: &str) -> ! {
    eprintln!("[amd emulator] stopped: {reason}");
    super::write_statistics();
    std::process::abort()
}
