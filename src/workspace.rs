//! Scratch memory that is reserved once and then locked (provisional).

use std::panic::Location;
use std::sync::Arc;

use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::stream::Stream;

/// Alignment of a view, in bytes.
pub const ALIGN: usize = 256;

/// Scratch memory: one growing buffer per slot, until it is locked.
#[derive(Debug)]
pub struct Workspace<B: Backend> {
    backend: B,
    slots: Vec<Option<(Arc<B::Buffer>, usize)>>,
    locked: bool,
}

impl<B: Backend> Workspace<B> {
    /// A workspace of one slot.
    pub fn new(backend: &B) -> Self {
        Self { backend: backend.clone(), slots: vec![None], locked: false }
    }

    /// Grows a slot to hold these views at once.
    ///
    /// # Errors
    /// [`Error::WorkspaceLocked`], [`Error::OutOfMemory`].
    #[track_caller]
    pub fn reserve(&mut self, slot: usize, bytes: &[usize]) -> Result<()> {
        let need: usize = bytes.iter().map(|b| b.next_multiple_of(ALIGN)).sum();
        let have = self.slots[slot].as_ref().map_or(0, |(_, bytes)| *bytes);
        if need <= have {
            return Ok(());
        }
        if self.locked {
            return Err(Error::WorkspaceLocked { slot, need, have, caller: Location::caller() });
        }
        self.slots[slot] = None;
        self.slots[slot] = Some((Arc::new(self.backend.alloc(need, "the workspace")?), need));
        Ok(())
    }

    /// Addresses of views of these sizes, in one slot.
    ///
    /// # Errors
    /// As [`Workspace::reserve`].
    #[track_caller]
    pub fn views<const N: usize>(&mut self, slot: usize, bytes: [usize; N]) -> Result<[u64; N]> {
        self.reserve(slot, &bytes)?;
        let mut at = self.slots[slot].as_ref().map_or(0, |(buffer, _)| self.backend.addr(buffer));
        Ok(bytes.map(|bytes| {
            let view = at;
            at += bytes.next_multiple_of(ALIGN) as u64;
            view
        }))
    }

    /// Forbids growth.
    pub fn lock(&mut self) {
        self.locked = true;
    }

    /// Keeps the buffers alive for the graph being captured on the stream.
    pub(crate) fn retain(&self, stream: &Stream<B>) {
        for (buffer, _) in self.slots.iter().flatten() {
            stream.retain_buffer(buffer);
        }
    }
}
