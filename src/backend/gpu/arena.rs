//! Device memory with deferred frees.
//!
//! Dropping a [`Block`] calls no driver: it only notes the block as freed. The next allocation marks the end of all work on
//! all known streams behind it (a fence); once the marks have been passed, the block is ready to serve again. No block is
//! therefore reused or returned while work may still touch it, and nothing is freed inside a capture.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::RawDevice;
use super::queue::Staging;
use crate::error::{Error, Result};

/// Memory and streams of one device.
pub struct Arena<D: RawDevice> {
    device: D,
    state: Mutex<State<D>>,
}

struct State<D: RawDevice> {
    /// Streams whose work may use the arena's memory: all own ones, and the borrowed ones while they are borrowed.
    streams: Vec<D::Stream>,
    /// Own streams that nobody holds at present.
    idle_streams: Vec<D::Stream>,
    /// Marks of the last work of streams that were borrowed and have been given back.
    departed: Vec<D::Event>,
    /// Blocks dropped since the last fence.
    freed: Vec<Extent>,
    /// In order of time: one is passed only after those before it.
    fences: VecDeque<Fence<D>>,
    /// Blocks that no work uses, by size.
    ready: BTreeMap<usize, Vec<u64>>,
    idle_events: Vec<D::Event>,
    idle_staging: Vec<Staging<D>>,
}

#[derive(Clone, Copy)]
struct Extent {
    addr: u64,
    size: usize,
}

struct Fence<D: RawDevice> {
    events: Vec<D::Event>,
    blocks: Vec<Extent>,
}

/// Device memory of an [`Arena`], noted as freed when dropped.
pub(crate) struct Block<D: RawDevice> {
    arena: Arc<Arena<D>>,
    extent: Extent,
}

impl<D: RawDevice> Block<D> {
    pub(crate) fn addr(&self) -> u64 {
        self.extent.addr
    }
}

impl<D: RawDevice> Drop for Block<D> {
    fn drop(&mut self) {
        self.arena.state().freed.push(self.extent);
    }
}

/// Sizes are rounded so that blocks fit again: to 512 bytes, and to the drivers' 2 MiB pages from 1 MiB on.
fn round(bytes: usize) -> Option<usize> {
    bytes.checked_next_multiple_of(if bytes < 1 << 20 { 512 } else { 2 << 20 })
}

impl<D: RawDevice> Arena<D> {
    pub(crate) fn new(device: D) -> Arc<Self> {
        let state = State {
            streams: Vec::new(),
            idle_streams: Vec::new(),
            departed: Vec::new(),
            freed: Vec::new(),
            fences: VecDeque::new(),
            ready: BTreeMap::new(),
            idle_events: Vec::new(),
            idle_staging: Vec::new(),
        };
        Arc::new(Self { device, state: Mutex::new(state) })
    }

    pub(crate) fn device(&self) -> &D {
        &self.device
    }

    fn state(&self) -> MutexGuard<'_, State<D>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Allocates a block, waiting for freed ones only when memory has run out.
    pub(crate) fn alloc(self: &Arc<Self>, bytes: usize, purpose: &'static str) -> Result<Block<D>> {
        let out_of_memory = Error::OutOfMemory { backend: D::NAME, bytes, purpose };
        let Some(size) = round(bytes.max(1)) else { return Err(out_of_memory) };
        let mut state = self.state();
        let extent = match state.reuse(&self.device, size) {
            Some(extent) => extent,
            None => match self.device.alloc(size)? {
                Some(addr) => Extent { addr, size },
                None => {
                    state.reclaim(&self.device)?;
                    let addr = self.device.alloc(size)?.ok_or(out_of_memory)?;
                    Extent { addr, size }
                }
            },
        };
        drop(state);
        Ok(Block { arena: self.clone(), extent })
    }

    /// Waits for the work that may use freed blocks, and returns every block not in use to the driver.
    pub(crate) fn trim(&self) -> Result<()> {
        self.state().reclaim(&self.device)
    }

    /// Waits for all work of the known streams, as far as that can be done.
    pub(crate) fn settle(&self) {
        self.state().settle(&self.device);
    }

    /// An own stream, to be given back with [`Arena::release_stream`].
    pub(super) fn acquire_stream(&self) -> Result<D::Stream> {
        let mut state = self.state();
        if let Some(stream) = state.idle_streams.pop() {
            return Ok(stream);
        }
        let stream = self.device.create_stream()?;
        state.streams.push(stream);
        Ok(stream)
    }

    /// Streams are kept and used again, so that the work of each stays known to the fences. One that cannot be taken out of a
    /// capture (which another thread began) is of no use to anyone.
    pub(super) fn release_stream(&self, stream: D::Stream) {
        let mut state = self.state();
        match self.device.is_capturing(stream) {
            false => state.idle_streams.push(stream),
            true => {
                state.streams.retain(|known| *known != stream);
                self.device.destroy_stream(stream);
            }
        }
    }

    /// Makes a caller's stream known to the fences, until [`Arena::give_back_stream`].
    pub(super) fn borrow_stream(&self, stream: D::Stream) {
        self.state().streams.push(stream);
    }

    /// Forgets a borrowed stream after a mark behind its work. A stream that its owner is capturing takes no mark; the owner's
    /// graph then holds raw addresses, and keeping them valid is the owner's part.
    pub(super) fn give_back_stream(&self, stream: D::Stream) {
        let mut state = self.state();
        if let Some(index) = state.streams.iter().position(|known| *known == stream) {
            state.streams.swap_remove(index);
        }
        let (ended, running) = state.departed.iter().partition(|&&event| self.device.has_ended(event));
        let ended: Vec<D::Event> = ended;
        state.departed = running;
        state.idle_events.extend(ended);
        if let Ok(event) = state.mark(&self.device, stream) {
            state.departed.push(event);
        }
    }

    pub(super) fn acquire_staging(&self) -> Result<Staging<D>> {
        match self.state().idle_staging.pop() {
            Some(staging) => Ok(staging),
            None => Staging::new(&self.device),
        }
    }

    pub(super) fn release_staging(&self, staging: Staging<D>) {
        self.state().idle_staging.push(staging);
    }

    /// Runs `begin`, which starts a capture, while no fence is being laid: a mark must not end up inside the capture.
    pub(super) fn begin_capture<T>(&self, begin: impl FnOnce() -> T) -> T {
        let _state = self.state();
        begin()
    }

    /// Bytes that the arena holds and nobody uses.
    #[cfg(test)]
    fn unused_bytes(&self) -> usize {
        let state = self.state();
        let fenced = state.fences.iter().flat_map(|fence| &fence.blocks);
        state.freed.iter().chain(fenced).map(|extent| extent.size).sum::<usize>()
            + state.ready.iter().map(|(size, addrs)| size * addrs.len()).sum::<usize>()
    }
}

impl<D: RawDevice> State<D> {
    /// A ready block of about this size, after a look at the fences.
    fn reuse(&mut self, device: &D, size: usize) -> Option<Extent> {
        if let Some(extent) = self.take_ready(size) {
            return Some(extent);
        }
        self.lay_fence(device);
        while self.fences.front().is_some_and(|fence| fence.events.iter().all(|&event| device.has_ended(event))) {
            self.pass_fence();
        }
        self.take_ready(size)
    }

    fn take_ready(&mut self, size: usize) -> Option<Extent> {
        // A little larger does; much larger would waste memory that another size may need.
        let (&size, addrs) = self.ready.range_mut(size..=size.saturating_add(size / 4)).next()?;
        let addr = addrs.pop();
        if addrs.is_empty() {
            self.ready.remove(&size);
        }
        addr.map(|addr| Extent { addr, size })
    }

    fn mark(&mut self, device: &D, stream: D::Stream) -> Result<D::Event> {
        let event = match self.idle_events.pop() {
            Some(event) => event,
            None => device.create_event()?,
        };
        match device.is_capturing(stream) {
            false if device.record(event, stream).is_ok() => Ok(event),
            _ => {
                self.idle_events.push(event);
                Err(Error::CaptureFailed { reason: "a stream that is being captured takes no mark".into() })
            }
        }
    }

    /// Puts a fence behind all freed blocks. While a known stream is captured none can be laid: the blocks just wait.
    fn lay_fence(&mut self, device: &D) {
        if self.freed.is_empty() || self.streams.iter().any(|&stream| device.is_capturing(stream)) {
            return;
        }
        let mut events = std::mem::take(&mut self.departed);
        for index in 0..self.streams.len() {
            match self.mark(device, self.streams[index]) {
                Ok(event) => events.push(event),
                Err(_) => {
                    // Marks of departed streams must not be lost; the others serve as well.
                    self.departed = events;
                    return;
                }
            }
        }
        self.fences.push_back(Fence { events, blocks: std::mem::take(&mut self.freed) });
    }

    fn settle(&mut self, device: &D) {
        for index in 0..self.streams.len() {
            if let Ok(event) = self.mark(device, self.streams[index]) {
                // A failed wait means a lost context, which has no work left.
                let _ = device.wait(event);
                self.idle_events.push(event);
            }
        }
    }

    fn pass_fence(&mut self) {
        if let Some(fence) = self.fences.pop_front() {
            self.idle_events.extend(fence.events);
            for Extent { addr, size } in fence.blocks {
                self.ready.entry(size).or_default().push(addr);
            }
        }
    }

    fn reclaim(&mut self, device: &D) -> Result<()> {
        self.lay_fence(device);
        while let Some(fence) = self.fences.front() {
            for &event in &fence.events {
                device.wait(event)?;
            }
            self.pass_fence();
        }
        for addr in std::mem::take(&mut self.ready).into_values().flatten() {
            // SAFETY: it came from this device, and a passed fence stands behind its last use.
            unsafe { device.free(addr) };
        }
        Ok(())
    }
}

impl<D: RawDevice> Drop for Arena<D> {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        state.settle(&self.device);
        // After a failed wait the context is lost and takes its memory along.
        let _ = state.reclaim(&self.device);
        for staging in state.idle_staging.drain(..) {
            staging.destroy(&self.device);
        }
        for event in state.idle_events.drain(..).chain(state.departed.drain(..)) {
            self.device.destroy_event(event);
        }
        // Only own streams are left: the holder of a borrowed one keeps the arena alive.
        for stream in state.streams.drain(..) {
            self.device.destroy_stream(stream);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::fake::Fake;
    use super::*;

    #[test]
    fn a_freed_block_serves_again_only_after_the_work_before_the_drop() {
        let arena = Arena::new(Fake::default());
        let stream = arena.acquire_stream().unwrap();
        let first = arena.alloc(1000, "a test").unwrap();
        let addr = first.addr();
        arena.device.enqueue(stream);
        drop(first);
        let second = arena.alloc(1000, "a test").unwrap();
        assert_ne!(second.addr(), addr, "the stream's work may still use it");
        arena.device.finish(stream);
        let third = arena.alloc(900, "a test").unwrap();
        assert_eq!(third.addr(), addr);
    }

    #[test]
    fn a_drop_makes_no_driver_call_and_a_capture_lays_no_fence() {
        let arena = Arena::new(Fake::default());
        let stream = arena.acquire_stream().unwrap();
        let block = arena.alloc(1, "a test").unwrap();
        arena.device.set_capturing(stream, true);
        let calls = arena.device.calls();
        drop(block);
        assert_eq!(arena.device.calls(), calls);
        let other = arena.alloc(1, "a test").unwrap();
        assert_eq!(arena.device.records(), 0);
        arena.device.set_capturing(stream, false);
        drop(other);
        arena.alloc(1, "a test").unwrap();
        assert_eq!(arena.device.records(), 1);
    }

    #[test]
    fn memory_that_ran_out_is_reclaimed_and_a_failure_is_typed_and_leaves_the_arena_usable() {
        let arena = Arena::new(Fake::with_memory(8 << 20));
        let stream = arena.acquire_stream().unwrap();
        let a = arena.alloc(4 << 20, "a").unwrap();
        let b = arena.alloc(4 << 20, "b").unwrap();
        arena.device.enqueue(stream);
        match arena.alloc(2 << 20, "the cache").map(|_| ()) {
            Err(Error::OutOfMemory { backend: "fake", bytes, purpose: "the cache" }) => assert_eq!(bytes, 2 << 20),
            other => panic!("{other:?}"),
        }
        drop((a, b));
        // Neither block fits; both are waited for and returned.
        let whole = arena.alloc(8 << 20, "all").unwrap();
        assert_eq!(arena.device.used(), 8 << 20);
        drop(whole);
        arena.trim().unwrap();
        assert_eq!((arena.device.used(), arena.unused_bytes()), (0, 0));
        assert!(matches!(arena.alloc(usize::MAX, "too much"), Err(Error::OutOfMemory { .. })));
    }

    #[test]
    fn work_of_a_borrowed_stream_counts_after_it_was_given_back() {
        let arena = Arena::new(Fake::default());
        let stream = arena.device.create_stream().unwrap();
        arena.borrow_stream(stream);
        let block = arena.alloc(1, "a test").unwrap();
        let addr = block.addr();
        arena.device.enqueue(stream);
        arena.give_back_stream(stream);
        drop(block);
        let other = arena.alloc(1, "a test").unwrap();
        assert_ne!(other.addr(), addr);
        drop(other);
        // A later fence without that stream must not overtake the earlier one.
        let later = arena.alloc(1, "a test").unwrap();
        assert_ne!(later.addr(), addr);
        arena.device.finish(stream);
        let reused: Vec<_> = (0..2).map(|_| arena.alloc(1, "a test").unwrap()).collect();
        assert!(reused.iter().any(|block| block.addr() == addr));
    }

    #[test]
    fn nothing_is_left_when_the_last_holder_is_gone() {
        let arena = Arena::new(Fake::default());
        let device = arena.device.clone();
        let stream = arena.acquire_stream().unwrap();
        arena.release_stream(stream);
        assert!(arena.acquire_stream().unwrap() == stream, "idle streams are used again");
        let block = arena.alloc(1 << 21, "a test").unwrap();
        drop(arena);
        assert_eq!(device.used(), 2 << 20);
        drop(block);
        assert_eq!((device.used(), device.streams(), device.live_events()), (0, 0, 0));
    }
}
