//! The driver library as the runtime calls it, with no runtime.

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicI64, AtomicU16, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::types::{Event, EventDescriptor, PointerInfo, QueueResource, Status};
use super::{events, hsaKmtOpenKFD, memory, queue, topology, unsupported};

/// `HSA_QUEUE_SDMA`.
const SDMA: u32 = 2;
/// `HSA_QUEUE_COMPUTE_AQL`.
const AQL: u32 = 21;

fn open() {
    assert_eq!(hsaKmtOpenKFD(), Status::Success);
}

fn new_event() -> *mut Event {
    let descriptor = EventDescriptor { event_type: 0, node_id: 1, sync_var: [0; 2] };
    let mut event = ptr::null_mut();
    // SAFETY: both pointers are valid.
    let status = unsafe { events::hsaKmtCreateEvent(&raw const descriptor, false, false, &raw mut event) };
    assert_eq!(status, Status::Success);
    event
}

#[test]
fn memory_is_counted_and_found_again() {
    open();
    let mut left = [0u64; 2];
    let mut address: *mut c_void = ptr::null_mut();
    // SAFETY: all pointers are valid, and the allocation is freed once.
    unsafe {
        memory::hsaKmtAvailableMemory(topology::GPU, &raw mut left[0]);
        assert_eq!(memory::hsaKmtAllocMemory(topology::GPU, left[0] + 4096, 0, &raw mut address), Status::NoMemory);
        assert_eq!(memory::hsaKmtAllocMemory(7, 4096, 0, &raw mut address), Status::InvalidParameter);
        assert_eq!(memory::hsaKmtAllocMemory(topology::GPU, 5000, 0, &raw mut address), Status::Success);
        address.cast::<u8>().add(8191).write(1);
        let mut info: PointerInfo = std::mem::zeroed();
        memory::hsaKmtQueryPointerInfo(address.cast::<u8>().add(4097).cast(), &raw mut info);
        assert_eq!(({ info.cpu_address }, { info.size_in_bytes }, { info.node }), (address, 8192, topology::GPU));
        assert_eq!(memory::hsaKmtFreeMemory(address, 8192), Status::Success);
        assert_eq!(memory::hsaKmtFreeMemory(address, 8192), Status::InvalidHandle);
        memory::hsaKmtQueryPointerInfo(address, &raw mut info);
        assert_eq!({ info.kind }, 0, "unknown");
    }
    assert_eq!(memory::hsaKmtDeregisterMemory(ptr::null_mut()), Status::MemoryNotRegistered);
}

#[test]
fn waits_end_by_an_event_or_in_time() {
    open();
    let event = new_event();
    // SAFETY: the event is alive until it is destroyed at the end.
    unsafe {
        let started = Instant::now();
        assert_eq!(events::hsaKmtWaitOnEvent_Ext(event, 20, ptr::null_mut()), Status::WaitTimeout);
        assert!(started.elapsed() >= Duration::from_millis(20));
        let mut age = 1;
        events::hsaKmtSetEvent(event);
        assert_eq!(events::hsaKmtWaitOnEvent_Ext(event, 0, &raw mut age), Status::Success);
        assert_eq!(age, 2);
        // Seen already.
        assert_eq!(events::hsaKmtWaitOnEvent_Ext(event, 1, &raw mut age), Status::WaitTimeout);
        assert_eq!(events::hsaKmtDestroyEvent(event), Status::Success);
    }
}

#[test]
fn a_queue_runs_barrier_packets_and_completes_their_signals() {
    open();
    // Packets and signals: 64 bytes each, aligned.
    #[repr(align(64))]
    struct Lines([[AtomicI64; 8]; 20]);
    // The queue's thread may look at them until it is destroyed.
    let lines: &'static Lines = Box::leak(Box::new(Lines([const { [const { AtomicI64::new(0) }; 8] }; 20])));
    let [write, read]: [&'static AtomicU64; 2] = [Box::leak(Box::default()), Box::leak(Box::default())];
    let (ring, dependency, completion) = (&lines.0[..16], &lines.0[16], &lines.0[17]);
    let address = |line: &[AtomicI64; 8]| line.as_ptr() as i64;
    ring.iter().for_each(|packet| packet[0].store(1, Ordering::Relaxed));
    let mut resource = QueueResource {
        queue_id: 0,
        doorbell: ptr::null_mut(),
        write_ptr: write.as_ptr(),
        read_ptr: read.as_ptr(),
        error_reason: ptr::null_mut(),
    };
    let mut create = |kind| {
        let packets = ring.as_ptr().cast_mut().cast();
        // SAFETY: ring and indices live as long as the process.
        unsafe {
            queue::hsaKmtCreateQueue(topology::GPU, kind, 100, 0, packets, 1024, ptr::null_mut(), &raw mut resource)
        }
    };
    assert_eq!(create(SDMA), Status::NotSupported);
    assert_eq!(create(AQL), Status::Success);
    let id = resource.queue_id;
    let event = new_event();
    // SAFETY: the event is alive.
    let (event_id, mailbox) = unsafe { ((*event).event_id, (*event).hw_data2) };
    dependency[1].store(1, Ordering::Relaxed);
    completion[1].store(1, Ordering::Relaxed);
    completion[2].store(mailbox.cast_signed(), Ordering::Relaxed);
    completion[3].store(event_id.into(), Ordering::Relaxed);
    ring[0][1].store(address(dependency), Ordering::Relaxed);
    ring[0][7].store(address(completion), Ordering::Relaxed);
    write.store(1, Ordering::Release);
    // SAFETY: the packet is aligned; its header is written last.
    unsafe { AtomicU16::from_ptr(ring[0].as_ptr() as *mut u16) }.store(3, Ordering::Release);
    // SAFETY: the event is alive.
    let wait = |ms| unsafe { events::hsaKmtWaitOnEvent_Ext(event, ms, ptr::null_mut()) };
    assert_eq!(wait(20), Status::WaitTimeout, "the barrier waits for its signal");
    dependency[1].store(0, Ordering::Release);
    assert_eq!(wait(10_000), Status::Success);
    assert_eq!((completion[1].load(Ordering::Acquire), read.load(Ordering::Acquire)), (0, 1));
    assert!(completion[5].load(Ordering::Relaxed) >= completion[4].load(Ordering::Relaxed), "timestamps");
    assert_eq!(queue::hsaKmtDestroyQueue(id), Status::Success);
    assert_eq!(queue::hsaKmtDestroyQueue(id), Status::InvalidHandle);
}

#[test]
fn what_is_not_there_is_an_error() {
    open();
    assert_eq!(unsupported::hsaKmtSVMSetAttr(), Status::NotSupported);
    assert_eq!(unsupported::hsaKmtSetXNACKMode(1), Status::NotSupported);
    // SAFETY: the pointer is null, which is answered.
    let status = unsafe { topology::hsaKmtGetNodeProperties(1, ptr::null_mut()) };
    assert_eq!(status, Status::InvalidParameter);
}
