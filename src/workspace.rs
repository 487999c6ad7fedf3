//! The scratch memory of decode steps: reserved once for the worst case, then locked.
//!
//! A workspace has a number of slots, one for each step that may be in flight at once. A slot is one buffer; the views of a step
//! are laid out in it from the start, each on a multiple of [`ALIGNMENT`] bytes. Views of later steps overlap those of earlier
//! ones, so nothing is kept from step to step.
//!
//! [`SlotTable`] is the bookkeeping, free of any device; [`Workspace`] adds the buffers. Source of the rules: vLLM,
//! `WorkspaceManager`. Beyond it: a request for no bytes always works, and a buffer that a captured graph uses is never freed
//! under it, locked or not.

use std::panic::Location;
use std::sync::Arc;

use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::observe::event;

/// Most slots of a workspace: one serves each stream that runs at a time.
const MAX_SLOTS: usize = 1 << 16;

/// Every view begins on a multiple of this many bytes.
pub const ALIGNMENT: usize = 256;

/// Lays out views of the given sizes, in bytes: the offset of each, and the bytes of all.
///
/// # Errors
/// [`Error::Argument`] if the sizes overflow.
pub fn layout<const N: usize>(sizes: &[usize; N]) -> Result<([usize; N], usize)> {
    let mut offsets = [0; N];
    let mut total = 0_usize;
    for (offset, &size) in offsets.iter_mut().zip(sizes) {
        *offset = total;
        total = size
            .checked_next_multiple_of(ALIGNMENT)
            .and_then(|size| total.checked_add(size))
            .ok_or_else(|| Error::argument("sizes", format!("{sizes:?} bytes overflow")))?;
    }
    Ok((offsets, total))
}

/// What a request means for its slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fit {
    /// The slot is large enough.
    Fits,
    /// The slot must grow to this many bytes.
    Grow(usize),
}

#[derive(Debug, Clone, Copy, Default)]
struct Slot {
    bytes: usize,
    generation: u64,
}

/// The sizes of the slots and the lock.
#[derive(Debug, Clone)]
pub struct SlotTable {
    slots: Vec<Slot>,
    locked: bool,
}

impl SlotTable {
    /// Slots of no bytes, unlocked.
    ///
    /// # Errors
    /// [`Error::Argument`] for no slots.
    pub fn new(num_slots: usize) -> Result<Self> {
        if !(1..=MAX_SLOTS).contains(&num_slots) {
            return Err(Error::argument("num_slots", format!("{num_slots}: 1 to {MAX_SLOTS} are possible")));
        }
        Ok(Self { slots: vec![Slot::default(); num_slots], locked: false })
    }

    fn slot(&self, slot: usize) -> Result<&Slot> {
        self.slots
            .get(slot)
            .ok_or_else(|| Error::argument("slot", format!("{slot}, but the workspace has {}", self.slots.len())))
    }

    /// Whether a slot can serve views of `need` bytes altogether. Changes nothing.
    ///
    /// # Errors
    /// [`Error::WorkspaceLocked`] if the slot would have to grow and may not, naming `caller`. [`Error::Argument`] for a slot
    /// that is not there.
    pub fn fit(&self, slot: usize, need: usize, caller: &'static Location<'static>) -> Result<Fit> {
        let have = self.slot(slot)?.bytes;
        if need <= have {
            Ok(Fit::Fits)
        } else if self.locked {
            Err(Error::WorkspaceLocked { slot, need, have, caller })
        } else {
            Ok(Fit::Grow(need))
        }
    }

    /// Notes that a slot has another buffer now, or none: its generation goes up.
    ///
    /// # Errors
    /// [`Error::Argument`] for a slot that is not there.
    pub fn replaced(&mut self, slot: usize, bytes: usize) -> Result<()> {
        self.slot(slot)?;
        let entry = &mut self.slots[slot];
        *entry = Slot { bytes, generation: entry.generation + 1 };
        Ok(())
    }

    /// Bytes of each slot.
    pub fn bytes(&self) -> impl Iterator<Item = usize> + '_ {
        self.slots.iter().map(|slot| slot.bytes)
    }

    /// How often a slot's buffer was replaced: unchanged as long as its addresses hold.
    ///
    /// # Errors
    /// [`Error::Argument`] for a slot that is not there.
    pub fn generation(&self, slot: usize) -> Result<u64> {
        Ok(self.slot(slot)?.generation)
    }

    /// Forbids growth. May be repeated.
    pub fn lock(&mut self) {
        self.locked = true;
    }

    /// Allows growth again. May be repeated.
    pub fn unlock(&mut self) {
        self.locked = false;
    }

    /// Whether growth is forbidden.
    pub fn is_locked(&self) -> bool {
        self.locked
    }
}

/// Scratch memory on one device.
pub struct Workspace<B: Backend> {
    backend: B,
    table: SlotTable,
    buffers: Vec<Option<Arc<B::Buffer>>>,
}

impl<B: Backend> std::fmt::Debug for Workspace<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Workspace").field("backend", &B::NAME).field("table", &self.table).finish_non_exhaustive()
    }
}

impl<B: Backend> Workspace<B> {
    /// A workspace of `num_slots` empty slots.
    ///
    /// # Errors
    /// [`Error::Argument`] for no slots.
    pub fn new(backend: &B, num_slots: usize) -> Result<Self> {
        let table = SlotTable::new(num_slots)?;
        Ok(Self { backend: backend.clone(), table, buffers: (0..num_slots).map(|_| None).collect() })
    }

    /// Grows a slot, if need be, so that it can serve views of these sizes, in bytes. Other slots are untouched.
    ///
    /// # Errors
    /// [`Error::WorkspaceLocked`] after [`lock`](Self::lock), naming the line that called; [`Error::WorkspaceInUse`] if a
    /// captured graph uses the slot's buffer: nothing changes then. [`Error::OutOfMemory`], which leaves the slot empty.
    #[track_caller]
    pub fn reserve<const N: usize>(&mut self, slot: usize, sizes: &[usize; N]) -> Result<()> {
        let (_, need) = layout(sizes)?;
        self.grow(slot, need, Location::caller())
    }

    /// Device addresses of views of these sizes, in bytes. A slot that is not locked grows as by [`reserve`](Self::reserve); a
    /// locked one never does, so a step allocates nothing, on the host neither. The address of an empty view in a slot without
    /// a buffer is 0.
    ///
    /// # Errors
    /// As [`reserve`](Self::reserve).
    #[track_caller]
    pub fn views<const N: usize>(&mut self, slot: usize, sizes: &[usize; N]) -> Result<[u64; N]> {
        let (offsets, need) = layout(sizes)?;
        self.grow(slot, need, Location::caller())?;
        let base = self.buffers[slot].as_ref().map_or(0, |buffer| self.backend.addr(buffer));
        Ok(offsets.map(|offset| base + offset as u64))
    }

    /// The buffer of a slot, for a graph to keep alive. While anything but the workspace holds it, the slot cannot grow.
    pub fn buffer(&self, slot: usize) -> Option<&Arc<B::Buffer>> {
        self.buffers.get(slot)?.as_ref()
    }

    /// Sets every byte of a slot, to poison it for instance, and waits. A slot without a buffer has none.
    ///
    /// # Errors
    /// [`Error::Driver`].
    ///
    /// # Safety
    /// No step that uses the slot is under way: one that finds its schedule overwritten reads anywhere.
    pub unsafe fn fill_bytes(&mut self, slot: usize, byte: u8) -> Result<()> {
        let Some(buffer) = self.buffer(slot) else { return Ok(()) };
        let bytes = self.table.slot(slot)?.bytes;
        let stream = self.backend.create_stream()?;
        // SAFETY: the slot's buffer has these bytes; that nothing else uses them is the caller's promise.
        unsafe { self.backend.fill(&stream, self.backend.addr(buffer), byte, bytes)? };
        self.backend.synchronize(&stream)
    }

    /// Forbids growth from now on: what was reserved is all there is.
    pub fn lock(&mut self) {
        self.table.lock();
        event!(DEBUG, bytes = self.table.bytes().sum::<usize>(), "workspace locked");
    }

    /// Allows growth again. Buffers that graphs use still cannot be replaced.
    pub fn unlock(&mut self) {
        self.table.unlock();
        event!(DEBUG, "workspace unlocked");
    }

    /// Sizes, generations and lock.
    pub fn table(&self) -> &SlotTable {
        &self.table
    }

    fn grow(&mut self, slot: usize, need: usize, caller: &'static Location<'static>) -> Result<()> {
        let Fit::Grow(bytes) = self.table.fit(slot, need, caller)? else { return Ok(()) };
        let have = self.table.bytes().nth(slot).unwrap_or(0);
        if self.buffers[slot].as_ref().is_some_and(|buffer| Arc::strong_count(buffer) > 1) {
            return Err(Error::WorkspaceInUse { slot, need, have, caller });
        }
        // The old buffer goes first: both need never fit at once.
        if self.buffers[slot].take().is_some() {
            self.table.replaced(slot, 0)?;
        }
        self.buffers[slot] = Some(Arc::new(self.backend.alloc(bytes, "the workspace")?));
        self.table.replaced(slot, bytes)?;
        event!(DEBUG, slot, from = have, to = bytes, caller = %caller, "workspace slot resized");
        Ok(())
    }
}
