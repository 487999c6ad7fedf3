//! A device in host memory whose work ends when the test says so.

use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard};

use super::RawDevice;
use crate::error::Result;

#[derive(Clone, Default)]
pub(super) struct Fake(Arc<Mutex<Inner>>);

#[derive(Default)]
struct Inner {
    limit: Option<usize>,
    next: u64,
    calls: usize,
    records: usize,
    pinned_allocs: usize,
    blocks: HashMap<u64, usize>,
    streams: HashMap<u64, Work>,
    /// Event -> the stream and the amount of work that it marks.
    events: HashMap<u64, (u64, usize)>,
    capturing: Vec<u64>,
}

#[derive(Default)]
struct Work {
    enqueued: usize,
    done: usize,
    /// Copies not yet carried out: position in the stream's work, source, bytes.
    copies: Vec<(usize, usize, usize)>,
    uploaded: Vec<u8>,
}

impl Work {
    fn run_to(&mut self, end: usize) {
        self.done = self.done.max(end);
        let done = self.done;
        let (now, later) = std::mem::take(&mut self.copies).into_iter().partition(|copy| copy.0 <= done);
        self.copies = later;
        let now: Vec<(usize, usize, usize)> = now;
        for (_, src, bytes) in now {
            // SAFETY: the ring under test promises that the bytes stay until the copy has been marked as ended.
            let bytes = unsafe { std::slice::from_raw_parts(src as *const u8, bytes) };
            self.uploaded.extend_from_slice(bytes);
        }
    }
}

impl Fake {
    pub(super) fn with_memory(bytes: usize) -> Self {
        let fake = Self::default();
        fake.inner().limit = Some(bytes);
        fake
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        let mut inner = self.0.lock().unwrap();
        inner.calls += 1;
        inner
    }

    pub(super) fn enqueue(&self, stream: u64) {
        self.inner().streams.get_mut(&stream).unwrap().enqueued += 1;
    }

    pub(super) fn finish(&self, stream: u64) {
        let mut inner = self.inner();
        let work = inner.streams.get_mut(&stream).unwrap();
        work.run_to(work.enqueued);
    }

    pub(super) fn set_capturing(&self, stream: u64, capturing: bool) {
        let mut inner = self.inner();
        inner.capturing.retain(|&other| other != stream);
        if capturing {
            inner.capturing.push(stream);
        }
    }

    pub(super) fn calls(&self) -> usize {
        self.0.lock().unwrap().calls
    }

    pub(super) fn records(&self) -> usize {
        self.inner().records
    }

    pub(super) fn used(&self) -> usize {
        self.inner().blocks.values().sum()
    }

    pub(super) fn streams(&self) -> usize {
        self.inner().streams.len()
    }

    pub(super) fn live_events(&self) -> usize {
        self.inner().events.len()
    }

    pub(super) fn pinned_allocs(&self) -> usize {
        self.inner().pinned_allocs
    }

    pub(super) fn uploaded(&self, stream: u64) -> Vec<u8> {
        self.inner().streams[&stream].uploaded.clone()
    }
}

impl RawDevice for Fake {
    const NAME: &'static str = "fake";
    type Stream = u64;
    type Event = u64;

    fn alloc(&self, bytes: usize) -> Result<Option<u64>> {
        let mut inner = self.inner();
        let used: usize = inner.blocks.values().sum();
        if inner.limit.is_some_and(|limit| bytes > limit - used) {
            return Ok(None);
        }
        inner.next += 1;
        let addr = inner.next << 40;
        inner.blocks.insert(addr, bytes);
        Ok(Some(addr))
    }

    unsafe fn free(&self, addr: u64) {
        self.inner().blocks.remove(&addr).unwrap();
    }

    fn alloc_pinned(&self, bytes: usize) -> Result<NonNull<u8>> {
        self.inner().pinned_allocs += 1;
        Ok(NonNull::from(Box::leak(vec![0_u8; bytes].into_boxed_slice())).cast())
    }

    // Leaked: a test process is short.
    unsafe fn free_pinned(&self, _: NonNull<u8>) {}

    fn create_stream(&self) -> Result<u64> {
        let mut inner = self.inner();
        inner.next += 1;
        let stream = inner.next;
        inner.streams.insert(stream, Work::default());
        Ok(stream)
    }

    fn destroy_stream(&self, stream: u64) {
        self.inner().streams.remove(&stream).unwrap();
    }

    fn is_capturing(&self, stream: u64) -> bool {
        self.inner().capturing.contains(&stream)
    }

    fn abort_capture(&self, stream: u64) {
        self.set_capturing(stream, false);
    }

    fn create_event(&self) -> Result<u64> {
        let mut inner = self.inner();
        inner.next += 1;
        let event = inner.next;
        inner.events.insert(event, (0, 0));
        Ok(event)
    }

    fn destroy_event(&self, event: u64) {
        self.inner().events.remove(&event).unwrap();
    }

    fn record(&self, event: u64, stream: u64) -> Result<()> {
        let mut inner = self.inner();
        assert!(!inner.capturing.contains(&stream), "an event recorded into a capture");
        inner.records += 1;
        let enqueued = inner.streams[&stream].enqueued;
        inner.events.insert(event, (stream, enqueued));
        Ok(())
    }

    fn has_ended(&self, event: u64) -> bool {
        let inner = self.inner();
        let (stream, end) = inner.events[&event];
        inner.streams.get(&stream).is_none_or(|work| work.done >= end)
    }

    fn wait(&self, event: u64) -> Result<()> {
        let mut inner = self.inner();
        let (stream, end) = inner.events[&event];
        if let Some(work) = inner.streams.get_mut(&stream) {
            work.run_to(end);
        }
        Ok(())
    }

    unsafe fn copy_in(&self, stream: u64, _: u64, src: NonNull<u8>, bytes: usize) -> Result<()> {
        let mut inner = self.inner();
        let work = inner.streams.get_mut(&stream).unwrap();
        work.enqueued += 1;
        let at = work.enqueued;
        work.copies.push((at, src.as_ptr() as usize, bytes));
        Ok(())
    }
}
