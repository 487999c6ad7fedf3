//! Allocations: host pages that kernels may touch, at the same address on host and device.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

use super::topology::GPU;
use super::types::{PointerInfo, Status};
use super::{Driver, log, output, with};

/// `HsaMemFlags`: scratch memory, which this device does not use.
const SCRATCH: u32 = 1 << 9;
/// `HsaMemFlags`: the address is given.
const FIXED_ADDRESS: u32 = 1 << 15;

const POINTER_UNKNOWN: u32 = 0;
const POINTER_ALLOCATED: u32 = 1;
const POINTER_REGISTERED_USER: u32 = 2;

#[derive(Clone, Copy)]
struct Allocation {
    len: u64,
    node: u32,
    flags: u32,
    // Host memory of the program's own.
    registered: bool,
    user_data: usize,
    count: u32,
}

/// Allocations and registered host memory, by their first byte.
#[derive(Default)]
pub(super) struct Allocations(Mutex<State>);

#[derive(Default)]
struct State {
    by_base: BTreeMap<u64, Allocation>,
    device_bytes: u64,
}

impl Allocations {
    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn find(&mut self, address: u64) -> Option<(u64, &mut Allocation)> {
        let (base, allocation) = self.by_base.range_mut(..=address).next_back()?;
        (address - base < allocation.len).then_some((*base, allocation))
    }
}

/// Anonymous pages, at an address that large pages could have.
fn map(len: u64, at: Option<u64>) -> Option<u64> {
    const LARGE: u64 = 2 << 20;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let (hint, extra, flags) = match at {
        Some(at) => (at, 0, flags | libc::MAP_FIXED_NOREPLACE),
        None => (0, if len >= LARGE { LARGE } else { 0 }, flags),
    };
    let total = len.checked_add(extra)?;
    // SAFETY: an anonymous mapping that replaces no other.
    let base = unsafe { libc::mmap(hint as *mut c_void, total as usize, protection, flags, -1, 0) };
    if base == libc::MAP_FAILED {
        return None;
    }
    let (start, end) = (base as u64, base as u64 + total);
    let aligned = if extra == 0 { start } else { start.next_multiple_of(LARGE) };
    for (from, to) in [(start, aligned), (aligned + len, end)] {
        if to > from {
            // SAFETY: the range is a part of the new mapping that nothing uses.
            unsafe { libc::munmap(from as *mut c_void, (to - from) as usize) };
        }
    }
    Some(aligned)
}

/// Allocates memory of a node.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hsaKmtAllocMemory(node: u32, len: u64, flags: u32, address: *mut *mut c_void) -> Status {
    with(|driver| {
        if node > GPU || len == 0 || address.is_null() {
            return Status::InvalidParameter;
        }
        // SAFETY: the pointer was checked, and holds an address when the flag says so.
        let at = (flags & FIXED_ADDRESS != 0).then(|| unsafe { address.read() } as u64);
        let Some(len) = len.checked_next_multiple_of(4096) else { return Status::NoMemory };
        let counts = node == GPU && flags & SCRATCH == 0;
        let mut state = driver.memory.lock();
        let limit = driver.device.config.memory_mib << 20;
        if counts && state.device_bytes.saturating_add(len) > limit {
            log!(driver, "{len} bytes of device memory refused: {} of {limit} are in use", state.device_bytes);
            return Status::NoMemory;
        }
        let Some(base) = map(len, at) else { return Status::NoMemory };
        if counts {
            state.device_bytes += len;
        }
        let allocation = Allocation { len, node, flags, registered: false, user_data: 0, count: 1 };
        state.by_base.insert(base, allocation);
        drop(state);
        driver.device.memory.insert(base, len);
        if counts {
            driver.device.poison(base, len);
        }
        log!(driver, "node {node}: {len} bytes at {base:#x}, flags {flags:#x}");
        // SAFETY: the pointer was checked.
        unsafe { output(address, base as *mut c_void) }
    })
}

/// Frees an allocation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hsaKmtFreeMemory(address: *mut c_void, _len: u64) -> Status {
    with(|driver| {
        let base = address as u64;
        let mut state = driver.memory.lock();
        let Some(allocation) = state.by_base.get(&base).copied().filter(|a| !a.registered) else {
            return Status::InvalidHandle;
        };
        state.by_base.remove(&base);
        if allocation.node == GPU && allocation.flags & SCRATCH == 0 {
            state.device_bytes -= allocation.len;
        }
        drop(state);
        driver.device.memory.remove(base);
        // SAFETY: the pages are this allocation's, which the caller gives up.
        unsafe { libc::munmap(address, allocation.len as usize) };
        Status::Success
    })
}

/// Device memory that is left.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hsaKmtAvailableMemory(_node: u32, bytes: *mut u64) -> Status {
    with(|driver| {
        let left = (driver.device.config.memory_mib << 20) - driver.memory.lock().device_bytes;
        // SAFETY: the caller gives a writable pointer or null.
        unsafe { output(bytes, left) }
    })
}

/// Everything is mapped to the device already.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hsaKmtMapMemoryToGPU(address: *mut c_void, _len: u64, device_address: *mut u64) -> Status {
    if !device_address.is_null() {
        // SAFETY: the caller gives a writable pointer.
        unsafe { output(device_address, address as u64) };
    }
    Status::Success
}

/// Everything is mapped to the device already.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hsaKmtMapMemoryToGPUNodes(
    address: *mut c_void,
    len: u64,
    device_address: *mut u64,
    _flags: u32,
    _count: u64,
    _nodes: *const u32,
) -> Status {
    // SAFETY: the caller gives a writable pointer or null.
    unsafe { hsaKmtMapMemoryToGPU(address, len, device_address) }
}

/// Stays mapped until it is freed.
#[unsafe(no_mangle)]
pub extern "C" fn hsaKmtUnmapMemoryToGPU(_address: *mut c_void) -> Status {
    Status::Success
}

/// Lets kernels touch host memory of the program's own.
#[unsafe(no_mangle)]
pub extern "C" fn hsaKmtRegisterMemoryWithFlags(address: *mut c_void, len: u64, flags: u32) -> Status {
    with(|driver| {
        let base = address as u64;
        let mut state = driver.memory.lock();
        let fresh = Allocation { len: 0, node: 0, flags, registered: true, user_data: 0, count: 0 };
        let entry = state.by_base.entry(base).or_insert(fresh);
        entry.len = entry.len.max(len);
        entry.count += 1;
        drop(state);
        driver.device.memory.insert(base, len);
        Status::Success
    })
}

/// Takes host memory back.
#[unsafe(no_mangle)]
pub extern "C" fn hsaKmtDeregisterMemory(address: *mut c_void) -> Status {
    with(|driver| {
        let base = address as u64;
        let mut state = driver.memory.lock();
        let Some(entry) = state.by_base.get_mut(&base).filter(|a| a.registered) else {
            return Status::MemoryNotRegistered;
        };
        entry.count -= 1;
        if entry.count == 0 {
            state.by_base.remove(&base);
        }
        drop(state);
        driver.device.memory.remove(base);
        Status::Success
    })
}

static ALL_NODES: [u32; 1] = [GPU];

/// What is known about an address.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hsaKmtQueryPointerInfo(address: *const c_void, info: *mut PointerInfo) -> Status {
    with(|driver| {
        // SAFETY: the struct is plain data, for which zeros are valid.
        let mut found: PointerInfo = unsafe { std::mem::zeroed() };
        found.kind = POINTER_UNKNOWN;
        if let Some((base, allocation)) = driver.memory.lock().find(address as u64) {
            found = PointerInfo {
                kind: if allocation.registered { POINTER_REGISTERED_USER } else { POINTER_ALLOCATED },
                node: allocation.node,
                mem_flags: allocation.flags,
                cpu_address: base as *mut c_void,
                gpu_address: base,
                size_in_bytes: allocation.len,
                num_registered_nodes: 0,
                num_mapped_nodes: 1,
                registered_nodes: std::ptr::null(),
                mapped_nodes: ALL_NODES.as_ptr(),
                user_data: allocation.user_data as *mut c_void,
            };
        }
        // SAFETY: the caller gives a writable pointer or null.
        unsafe { output(info, found) }
    })
}

/// Keeps a word of the caller's with an allocation.
#[unsafe(no_mangle)]
pub extern "C" fn hsaKmtSetMemoryUserData(address: *const c_void, data: *mut c_void) -> Status {
    with(|driver: &Driver| match driver.memory.lock().find(address as u64) {
        Some((_, allocation)) => {
            allocation.user_data = data as usize;
            Status::Success
        }
        None => Status::InvalidHandle,
    })
}
