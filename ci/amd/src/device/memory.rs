//! The device's address space: which host addresses are allocations that kernels may touch.
//!
//! Device addresses are host addresses, as with AMD's unified virtual addressing.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::RwLock;

/// Dwords that a checking device fills allocations with: on a strict one a load that returns one is a finding.
/// A NaN as float32, as the high half of a dword a NaN in bfloat16 and float16 too.
pub const POISON: u32 = 0xfff5_c3a9;

/// Allocations, by their first byte.
#[derive(Default)]
pub struct Memory {
    allocations: RwLock<BTreeMap<u64, Allocation>>,
}

struct Allocation {
    len: u64,
    // The same host memory may be registered more than once.
    count: u32,
}

impl Memory {
    /// Lets kernels touch `len` bytes at `base`.
    pub fn insert(&self, base: u64, len: u64) {
        let mut allocations = self.allocations.write().unwrap_or_else(|e| e.into_inner());
        let entry = allocations.entry(base).or_insert(Allocation { len: 0, count: 0 });
        entry.len = entry.len.max(len);
        entry.count += 1;
    }

    /// Takes back one [`insert`](Self::insert) at `base`. Says whether there was one.
    pub fn remove(&self, base: u64) -> bool {
        let mut allocations = self.allocations.write().unwrap_or_else(|e| e.into_inner());
        let Some(entry) = allocations.get_mut(&base) else { return false };
        entry.count -= 1;
        if entry.count == 0 {
            allocations.remove(&base);
        }
        true
    }

    /// The allocation that holds `address`.
    pub fn find(&self, address: u64) -> Option<Range<u64>> {
        let allocations = self.allocations.read().unwrap_or_else(|e| e.into_inner());
        // Registered host memory may overlap: the nearest base need not be the one that holds the address.
        allocations
            .range(..=address)
            .rev()
            .take(64)
            .map(|(base, allocation)| *base..base + allocation.len)
            .find(|range| range.contains(&address))
    }

    /// Says where the allocation nearest below `address` ends, for messages.
    pub fn hint(&self, address: u64) -> String {
        let allocations = self.allocations.read().unwrap_or_else(|e| e.into_inner());
        match allocations.range(..=address).next_back() {
            Some((base, allocation)) => {
                format!(
                    " (the nearest below has {} bytes at {base:#x}, {} bytes before)",
                    allocation.len,
                    address - base
                )
            }
            None => String::new(),
        }
    }

    /// Copies `len` bytes at `address`, or `None` when they lie in no single allocation.
    pub fn read(&self, address: u64, len: usize) -> Option<Vec<u8>> {
        let range = self.find(address)?;
        if range.end - address < len as u64 {
            return None;
        }
        // SAFETY: the bytes lie inside a live allocation.
        Some(unsafe { std::slice::from_raw_parts(address as *const u8, len) }.to_vec())
    }
}
