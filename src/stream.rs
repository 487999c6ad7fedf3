//! Streams, and what a capture on them must keep alive.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::backend::{Backend, GraphBackend};
use crate::error::{Error, Result};
use crate::graph::CaptureState;
use crate::kernel::{Launch, Params};
use crate::tensor::{Owner, Tensor};

#[derive(Default)]
struct Recording {
    state: CaptureState,
    // Goes up when a capture begins or ends: equal numbers mean the same capture, or the same time between two.
    id: u64,
    // Buffers that the launches being captured touch: the graph owns them, so that no tensor can be freed under it.
    keep: Vec<Owner>,
}

/// A queue of device work. Launches on it run in order.
///
/// Threads may share a stream. While one of them captures on it, what any other enqueues there is recorded too, and does not run:
/// give threads streams of their own.
pub struct Stream<B: Backend> {
    backend: B,
    raw: B::Stream,
    recording: Mutex<Recording>,
}

/// A captured step: replays everything that was enqueued while it was recorded, over the same addresses, with whatever
/// lengths, tables and pages now stand there. It owns the buffers of this crate that it touches.
pub struct Graph<B: GraphBackend> {
    graph: B::Graph,
    keep: Vec<Owner>,
    // Replays of this graph may still be running when it is dropped; its own backend waits for them.
    backend: B,
}

impl<B: GraphBackend> Graph<B> {
    /// Device bytes that the graph itself holds, as far as the driver tells.
    pub fn bytes(&self) -> usize {
        self.backend.graph_bytes(&self.graph)
    }

    /// Buffers of this crate that the graph keeps alive.
    pub fn kept_buffers(&self) -> usize {
        self.keep.len()
    }
}

impl<B: Backend> Stream<B> {
    /// Makes a stream.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn new(backend: &B) -> Result<Self> {
        Ok(Self::wrap(backend, backend.create_stream()?))
    }

    /// Borrows a caller's raw stream.
    ///
    /// # Errors
    /// [`Error::Driver`].
    ///
    /// # Safety
    /// `raw` is a live stream of this backend's device that outlives the result.
    pub unsafe fn from_raw(backend: &B, raw: u64) -> Result<Self> {
        // SAFETY: the caller's promise.
        Ok(Self::wrap(backend, unsafe { backend.borrow_stream(raw)? }))
    }

    /// As [`Stream::from_raw`], for work over memory that the caller owns and waits for ([`Backend::visit_stream`]).
    ///
    /// # Safety
    /// As [`Stream::from_raw`].
    #[cfg(feature = "capi")]
    pub(crate) unsafe fn visit(backend: &B, raw: u64) -> Result<Self> {
        // SAFETY: the caller's promise.
        Ok(Self::wrap(backend, unsafe { backend.visit_stream(raw)? }))
    }

    fn wrap(backend: &B, raw: B::Stream) -> Self {
        Self { backend: backend.clone(), raw, recording: Mutex::default() }
    }

    fn recording(&self) -> MutexGuard<'_, Recording> {
        self.recording.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The stream's device.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// The backend's own stream.
    pub fn raw(&self) -> &B::Stream {
        &self.raw
    }

    /// Whether the stream records or runs what is enqueued.
    pub fn capture_state(&self) -> CaptureState {
        self.recording().state
    }

    /// Waits for all enqueued work.
    ///
    /// # Errors
    /// [`Error::GraphState`] while capturing; [`Error::Driver`].
    pub fn synchronize(&self) -> Result<()> {
        self.require_idle("synchronize")?;
        self.backend.synchronize(&self.raw)
    }

    /// Which capture is under way, or between which two the stream is.
    pub(crate) fn recording_id(&self) -> u64 {
        self.recording().id
    }

    pub(crate) fn require_idle(&self, call: &'static str) -> Result<()> {
        match self.capture_state() {
            CaptureState::Idle => Ok(()),
            state => Err(Error::GraphState { call, state }),
        }
    }

    /// Keeps the tensor's memory alive for as long as the graph being captured, if one is.
    pub(crate) fn retain(&self, tensors: &[Option<&Tensor<B>>]) {
        let mut recording = self.recording();
        if recording.state != CaptureState::Capturing {
            return;
        }
        for owner in tensors.iter().flatten().filter_map(|tensor| tensor.owner()) {
            recording.retain(owner);
        }
    }

    /// As [`Stream::retain`], for memory that is no tensor's.
    pub(crate) fn retain_owner(&self, owner: &Owner) {
        let mut recording = self.recording();
        if recording.state == CaptureState::Capturing {
            recording.retain(owner);
        }
    }

    /// Enqueues a kernel.
    ///
    /// # Safety
    /// As [`Backend::launch`].
    pub(crate) unsafe fn launch(&self, kernel: &B::Kernel, launch: &Launch, params: &Params) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.backend.launch(&self.raw, kernel, launch, params) }
    }
}

impl Recording {
    fn begin(&mut self) -> Result<()> {
        self.state = self.state.begin()?;
        self.id += 1;
        Ok(())
    }

    /// What was kept for the graph.
    fn end(&mut self) -> Vec<Owner> {
        self.state = CaptureState::Idle;
        self.id += 1;
        std::mem::take(&mut self.keep)
    }

    fn retain(&mut self, owner: &Owner) {
        if !self.keep.iter().any(|kept| std::ptr::addr_eq(&raw const **kept, &raw const **owner)) {
            self.keep.push(owner.clone());
        }
    }
}

impl<B: GraphBackend> Stream<B> {
    /// Records what `enqueue` puts on this stream, without running it, and makes a graph of it.
    ///
    /// When `enqueue` or the driver fails, the capture is thrown away, the stream is usable as before, and the first error
    /// is returned.
    ///
    /// # Errors
    /// [`Error::GraphState`] if a capture is under way; what `enqueue` returns; [`Error::CaptureFailed`].
    pub fn capture(&self, enqueue: impl FnOnce() -> Result<()>) -> Result<Graph<B>> {
        {
            let mut recording = self.recording();
            recording.begin()?;
            if let Err(error) = self.backend.begin_capture(&self.raw) {
                recording.end();
                return Err(error);
            }
        }
        // A panic in the caller's closure must not leave the stream recording.
        let guard = AbortOnUnwind { stream: self };
        let enqueued = enqueue();
        std::mem::forget(guard);

        let keep = self.recording().end();
        match enqueued {
            Ok(()) => {
                let graph = self.backend.end_capture(&self.raw)?;
                Ok(Graph { graph, keep, backend: self.backend.clone() })
            }
            Err(error) => {
                self.backend.abort_capture(&self.raw);
                Err(error)
            }
        }
    }

    /// Enqueues a captured graph.
    ///
    /// # Errors
    /// [`Error::GraphState`] while capturing; [`Error::Driver`].
    ///
    /// # Safety
    /// Tensors made by [`Tensor::from_raw`] that the capture used are still valid. Tensors that own their memory always are.
    pub unsafe fn replay(&self, graph: &Graph<B>) -> Result<()> {
        self.require_idle("replay")?;
        // SAFETY: owned buffers are kept by the graph, borrowed ones are the caller's promise.
        unsafe { self.backend.replay(&self.raw, &graph.graph) }
    }
}

struct AbortOnUnwind<'a, B: GraphBackend> {
    stream: &'a Stream<B>,
}

impl<B: GraphBackend> Drop for AbortOnUnwind<'_, B> {
    fn drop(&mut self) {
        self.stream.recording().end();
        self.stream.backend.abort_capture(&self.stream.raw);
    }
}
