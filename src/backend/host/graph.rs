//! Streams that record instead of running, and what they recorded.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::{Error, Result};
use crate::graph::CaptureState;
use crate::kernel::{Params, Variant};

/// One recorded piece of work.
#[derive(Debug, Clone, Copy)]
#[allow(clippy::large_enum_variant)] // Nearly all nodes are launches.
pub(super) enum Node {
    Launch(Variant, Params),
    Fill { dst: u64, byte: u8, bytes: usize },
}

#[derive(Debug)]
enum State {
    Idle,
    // What was recorded, and the first forbidden call that broke the capture.
    Capturing(Vec<Node>, Option<&'static str>),
}

/// A queue of host work. Work runs when it is enqueued, on the caller's thread and the device's pool.
#[derive(Debug)]
pub struct HostStream {
    state: Mutex<State>,
}

/// Recorded work. Each replay runs it over the same addresses, with whatever lengths and tables then stand there.
#[derive(Debug)]
pub struct HostGraph {
    pub(super) nodes: Vec<Node>,
}

impl HostStream {
    pub(super) fn new() -> Self {
        Self { state: Mutex::new(State::Idle) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the node if the stream is being captured. False if it must run now.
    pub(super) fn record(&self, node: impl FnOnce() -> Node) -> bool {
        match &mut *self.state() {
            State::Idle => false,
            State::Capturing(nodes, _) => {
                nodes.push(node());
                true
            }
        }
    }

    /// For calls that cannot be captured: an error, and the capture is broken, as it is with a vendor's driver.
    pub(super) fn forbid(&self, call: &'static str) -> Result<()> {
        match &mut *self.state() {
            State::Idle => Ok(()),
            State::Capturing(_, broken) => {
                broken.get_or_insert(call);
                Err(failed(call))
            }
        }
    }

    pub(super) fn begin(&self) -> Result<()> {
        let mut state = self.state();
        if !matches!(*state, State::Idle) {
            return Err(Error::GraphState { call: "begin capture", state: CaptureState::Capturing });
        }
        *state = State::Capturing(Vec::new(), None);
        Ok(())
    }

    pub(super) fn end(&self) -> Result<HostGraph> {
        match std::mem::replace(&mut *self.state(), State::Idle) {
            State::Idle => Err(Error::GraphState { call: "end capture", state: CaptureState::Idle }),
            State::Capturing(_, Some(call)) => Err(failed(call)),
            State::Capturing(nodes, None) => Ok(HostGraph { nodes }),
        }
    }

    pub(super) fn abort(&self) {
        *self.state() = State::Idle;
    }
}

fn failed(call: &'static str) -> Error {
    Error::CaptureFailed { reason: format!("{call} cannot be captured; call it before or after the capture") }
}
