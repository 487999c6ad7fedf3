//! Host memory that behaves like a device's: aligned, limited, and running out is an error.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::error::{Error, Result};

const ALIGN: usize = 256;

/// Larger allocations are not poisoned, so that a test can have an address space without the memory.
const MAX_POISONED: usize = 1 << 30;

/// How many bytes may be allocated, and how many are.
#[derive(Debug)]
pub(super) struct Budget {
    limit: usize,
    used: AtomicUsize,
}

impl Budget {
    pub(super) fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { limit, used: AtomicUsize::new(0) })
    }

    fn take(&self, bytes: usize) -> bool {
        let grown = |used: usize| used.checked_add(bytes).filter(|&used| used <= self.limit);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, grown).is_ok()
    }
}

/// Memory of the host backend. Debug builds fill it with bytes that are NaN in every float type, so that a read of something
/// never written shows, up to a gigabyte; beyond, and in release builds, it is zero pages, which cost nothing until touched.
#[derive(Debug)]
pub struct HostBuffer {
    data: NonNull<u8>,
    layout: Layout,
    budget: Arc<Budget>,
}

// SAFETY: the memory belongs to the buffer; all access goes through the seam's unsafe calls, which put exclusion on the caller.
unsafe impl Send for HostBuffer {}
// SAFETY: as above.
unsafe impl Sync for HostBuffer {}

/// Byte that makes a NaN of f32, f16, bf16 and both 8-bit floats but e4m3fnuz, and -1 of integers.
pub(super) const POISON: u8 = 0xFF;

impl HostBuffer {
    pub(super) fn new(bytes: usize, purpose: &'static str, budget: &Arc<Budget>) -> Result<Self> {
        let out_of_memory = || Error::OutOfMemory { backend: "host", bytes, purpose };
        let layout = Layout::from_size_align(bytes.max(1), ALIGN).map_err(|_| out_of_memory())?;
        if !budget.take(layout.size()) {
            return Err(out_of_memory());
        }
        // SAFETY: the layout is not empty.
        let Some(data) = NonNull::new(unsafe { alloc_zeroed(layout) }) else {
            budget.used.fetch_sub(layout.size(), Ordering::Relaxed);
            return Err(out_of_memory());
        };
        if cfg!(debug_assertions) && layout.size() < MAX_POISONED {
            // SAFETY: the allocation has this size.
            unsafe { data.as_ptr().write_bytes(POISON, layout.size()) };
        }
        data.as_ptr().expose_provenance();
        Ok(Self { data, layout, budget: budget.clone() })
    }

    pub(super) fn addr(&self) -> u64 {
        self.data.as_ptr().addr() as u64
    }

    pub(super) fn as_ptr<T>(&self) -> *mut T {
        self.data.as_ptr().cast()
    }

    pub(super) fn len(&self) -> usize {
        self.layout.size()
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.layout.size(), Ordering::Relaxed);
        // SAFETY: allocated with this layout in `new`.
        unsafe { dealloc(self.data.as_ptr(), self.layout) }
    }
}

/// The element at index `offset` of what lies at an address of a parameter block.
pub(super) fn element<T>(addr: u64, offset: i64) -> *mut T {
    std::ptr::with_exposed_provenance_mut::<T>(addr as usize).wrapping_offset(offset as isize)
}
