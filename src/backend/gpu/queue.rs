//! A stream, own or borrowed, with a ring of pinned memory for uploads.

use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Arena, RawDevice};
use crate::error::{Error, Result};

/// Bytes of one segment of a ring; a larger upload goes through in pieces.
const SEGMENT: usize = 256 << 10;
/// Segments of a ring: while one is filled, the others may still be read.
const SEGMENTS: usize = 4;
/// Uploads begin at multiples of this, which the copy engines like.
const ALIGN: usize = 256;

/// A queue of work of one device.
pub(crate) struct Queue<D: RawDevice> {
    arena: Arc<Arena<D>>,
    stream: D::Stream,
    tenure: Tenure,
    // Made by the first upload and given to the arena when the queue is dropped.
    staging: Mutex<Option<Staging<D>>>,
    // The first call that the capture under way could not record.
    refused: Mutex<Option<&'static str>>,
}

/// Whose stream a queue is over.
#[derive(Clone, Copy, PartialEq)]
enum Tenure {
    /// The arena's own.
    Owned,
    /// A caller's, known to the arena's fences meanwhile.
    Borrowed,
    /// A caller's, whose work touches nothing of the arena's.
    Visited,
}

fn cannot_capture(call: &'static str) -> Error {
    Error::CaptureFailed { reason: format!("{call} cannot be captured; call it before or after the capture") }
}

impl<D: RawDevice> Queue<D> {
    pub(crate) fn new(arena: &Arc<Arena<D>>) -> Result<Self> {
        let stream = arena.acquire_stream()?;
        Ok(Self::over(arena, stream, Tenure::Owned))
    }

    /// # Safety
    /// `stream` is a live stream of the arena's device and outlives the result.
    pub(crate) unsafe fn borrow(arena: &Arc<Arena<D>>, stream: D::Stream) -> Self {
        arena.borrow_stream(stream);
        Self::over(arena, stream, Tenure::Borrowed)
    }

    /// # Safety
    /// As [`Queue::borrow`]; the work enqueued touches no memory of the arena.
    pub(crate) unsafe fn visit(arena: &Arc<Arena<D>>, stream: D::Stream) -> Self {
        Self::over(arena, stream, Tenure::Visited)
    }

    fn over(arena: &Arc<Arena<D>>, stream: D::Stream, tenure: Tenure) -> Self {
        Self { arena: arena.clone(), stream, tenure, staging: Mutex::new(None), refused: Mutex::new(None) }
    }

    fn refused(&self) -> MutexGuard<'_, Option<&'static str>> {
        self.refused.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn raw(&self) -> D::Stream {
        self.stream
    }

    /// Starts a capture by `begin`.
    pub(crate) fn begin_capture<T>(&self, begin: impl FnOnce() -> T) -> T {
        *self.refused() = None;
        self.arena.begin_capture(begin)
    }

    /// Ends a capture by `end`. Fails also if a call was refused meanwhile: its effect is missing from what was recorded.
    pub(crate) fn end_capture<G>(&self, end: impl FnOnce() -> Result<G>) -> Result<G> {
        let graph = end()?;
        self.refused().take().map_or(Ok(graph), |call| Err(cannot_capture(call)))
    }

    /// Refuses a call that a capture cannot record, and fails the capture. The driver is not asked: some would not notice.
    pub(crate) fn require_idle(&self, call: &'static str) -> Result<()> {
        if self.arena.device().is_capturing(self.stream) {
            self.refused().get_or_insert(call);
            return Err(cannot_capture(call));
        }
        Ok(())
    }

    /// Copies host bytes to the device in stream order; `src` is free again on return. Allocates nothing but the ring, once.
    ///
    /// # Safety
    /// `dst..dst + src.len()` is device memory that no other work uses meanwhile.
    pub(crate) unsafe fn upload(&self, dst: u64, src: &[u8]) -> Result<()> {
        self.require_idle("upload")?;
        let device = self.arena.device();
        let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        let staging = match &mut *staging {
            Some(staging) => staging,
            none => none.insert(self.arena.acquire_staging()?),
        };
        for (index, piece) in src.chunks(SEGMENT).enumerate() {
            let pinned = staging.reserve(device, self.stream, piece.len())?;
            // SAFETY: the ring handed out `piece.len()` bytes that nothing reads; the destination is the caller's promise.
            unsafe {
                pinned.copy_from_nonoverlapping(NonNull::from(piece).cast(), piece.len());
                device.copy_in(self.stream, dst + (index * SEGMENT) as u64, pinned, piece.len())?;
            }
        }
        Ok(())
    }
}

impl<D: RawDevice> Drop for Queue<D> {
    fn drop(&mut self) {
        let device = self.arena.device();
        if self.tenure == Tenure::Owned && device.is_capturing(self.stream) {
            device.abort_capture(self.stream);
        }
        let staging = self.staging.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(mut staging) = staging.take() {
            // A ring whose last reads cannot be marked (its owner captures the stream) is left alone for good.
            if !device.is_capturing(self.stream) && staging.turn(device, self.stream).is_ok() {
                self.arena.release_staging(staging);
            }
        }
        match self.tenure {
            Tenure::Owned => self.arena.release_stream(self.stream),
            Tenure::Borrowed => self.arena.give_back_stream(self.stream),
            Tenure::Visited => {}
        }
    }
}

/// A ring of pinned memory. Each segment ends with a mark; a segment is filled again once its mark has been passed.
pub(super) struct Staging<D: RawDevice> {
    base: NonNull<u8>,
    events: [D::Event; SEGMENTS],
    marked: [bool; SEGMENTS],
    current: usize,
    used: usize,
}

// SAFETY: it owns its pinned memory, which every thread may use.
unsafe impl<D: RawDevice> Send for Staging<D> {}

impl<D: RawDevice> Staging<D> {
    pub(super) fn new(device: &D) -> Result<Self> {
        let mut events = Vec::with_capacity(SEGMENTS);
        let made = (0..SEGMENTS).try_for_each(|_| device.create_event().map(|event| events.push(event)));
        let made = made.and_then(|()| device.alloc_pinned(SEGMENT * SEGMENTS));
        match (made, <[D::Event; SEGMENTS]>::try_from(events.as_slice())) {
            (Ok(base), Ok(events)) => Ok(Self { base, events, marked: [false; SEGMENTS], current: 0, used: 0 }),
            (made, _) => {
                events.into_iter().for_each(|event| device.destroy_event(event));
                Err(made.err().unwrap_or(Error::Capacity { what: "staging events", asked: SEGMENTS, limit: 0 }))
            }
        }
    }

    /// Room for `bytes`, at most a segment.
    fn reserve(&mut self, device: &D, stream: D::Stream, bytes: usize) -> Result<NonNull<u8>> {
        if self.used + bytes > SEGMENT {
            self.turn(device, stream)?;
        }
        if self.used == 0 && self.marked[self.current] {
            device.wait(self.events[self.current])?;
            self.marked[self.current] = false;
        }
        let at = self.current * SEGMENT + self.used;
        self.used += bytes.next_multiple_of(ALIGN);
        // SAFETY: `at + bytes` lies within the ring: the segment had room.
        Ok(unsafe { self.base.add(at) })
    }

    /// Marks the current segment and goes on to the next.
    fn turn(&mut self, device: &D, stream: D::Stream) -> Result<()> {
        if self.used > 0 {
            device.record(self.events[self.current], stream)?;
            self.marked[self.current] = true;
            self.current = (self.current + 1) % SEGMENTS;
            self.used = 0;
        }
        Ok(())
    }

    /// Waits for the last reads and frees the ring.
    pub(super) fn destroy(self, device: &D) {
        let passed = self.events.iter().zip(self.marked).all(|(&event, marked)| !marked || device.wait(event).is_ok());
        self.events.into_iter().for_each(|event| device.destroy_event(event));
        if passed {
            // SAFETY: it came from this device, and every copy out of it has ended.
            unsafe { device.free_pinned(self.base) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::fake::Fake;
    use super::*;

    #[test]
    fn uploads_arrive_whole_and_no_segment_is_overwritten_while_it_is_read() {
        let arena = Arena::new(Fake::default());
        let queue = Queue::new(&arena).unwrap();
        let sizes = [1, 255, 256, 4096, SEGMENT - 1, SEGMENT, SEGMENT + 1, 5 * SEGMENT + 77, 3];
        let data: Vec<Vec<u8>> = sizes.iter().map(|&n| (0..n).map(|i| (i * 31 + n) as u8).collect()).collect();
        for bytes in &data {
            // SAFETY: the fake device takes any address.
            unsafe { queue.upload(0, bytes).unwrap() };
        }
        // The fake reads the ring only when it must: at a wait, or at the end.
        arena.device().finish(queue.raw());
        assert_eq!(arena.device().uploaded(queue.raw()), data.concat());
    }

    #[test]
    fn small_uploads_allocate_once_and_the_ring_outlives_the_queue() {
        let arena = Arena::new(Fake::default());
        for round in 0..3 {
            let queue = Queue::new(&arena).unwrap();
            for _ in 0..2000 {
                // SAFETY: the fake device takes any address.
                unsafe { queue.upload(64, &[round; 700]).unwrap() };
            }
        }
        assert_eq!(arena.device().pinned_allocs(), 1);
    }

    #[test]
    fn an_upload_into_a_capture_is_refused_and_fails_that_capture_only() {
        let arena = Arena::new(Fake::default());
        let queue = Queue::new(&arena).unwrap();
        let capture = |upload: bool| {
            queue.begin_capture(|| arena.device().set_capturing(queue.raw(), true));
            if upload {
                // SAFETY: the fake device takes any address.
                let refused = unsafe { queue.upload(0, &[1]) };
                assert!(matches!(refused, Err(Error::CaptureFailed { .. })), "{refused:?}");
            }
            queue.end_capture(|| {
                arena.device().set_capturing(queue.raw(), false);
                Ok(())
            })
        };
        let failed = capture(true);
        assert!(matches!(&failed, Err(Error::CaptureFailed { reason }) if reason.contains("upload")), "{failed:?}");
        capture(false).unwrap();
    }

    #[test]
    fn a_queue_dropped_in_a_capture_leaves_it() {
        let arena = Arena::new(Fake::default());
        let queue = Queue::new(&arena).unwrap();
        let stream = queue.raw();
        arena.device().set_capturing(stream, true);
        drop(queue);
        assert!(Queue::new(&arena).unwrap().raw() == stream);
        assert!(!arena.device().is_capturing(stream));
    }
}
