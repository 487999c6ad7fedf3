//! Graphs: ending a capture, instantiating, replaying.

use std::ptr::null_mut;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{CUgraph, CUgraphExec, CUgraphNode, CUstreamCaptureMode};

use super::device::{Device, StreamHandle};
use super::driver::{Driver, cu};
use crate::backend::gpu::Arena;
use crate::error::{Error, Result};

/// CUgraphNodeType: a graph inside the graph.
const CHILD_GRAPH: i32 = 4;
/// CUgraphNodeType: an allocation, a free.
const MEMORY: [i32; 2] = [10, 11];

/// An instantiated graph.
pub struct Executable {
    arena: Arc<Arena<Device>>,
    executable: CUgraphExec,
    /// Device memory by which the free memory shrank over instantiation and upload. The driver's own count
    /// (`cuDeviceGetGraphMemAttribute`) knows only of memory nodes, which no graph here has.
    pub(super) bytes: usize,
    // The driver does not guard an executable against two launches at a time.
    launching: Mutex<()>,
}

// SAFETY: a handle of the driver, which every thread may use; launches are serialised.
unsafe impl Send for Executable {}
// SAFETY: as above.
unsafe impl Sync for Executable {}

impl Drop for Executable {
    fn drop(&mut self) {
        let device = self.arena.device();
        let Ok(_bound) = device.bind_relaxed() else { return };
        // SAFETY: instantiated once; the driver lets a replay under way end first.
        let _ = unsafe { cu!(device.driver, cuGraphExecDestroy(self.executable)) };
    }
}

/// What was recorded; destroyed on drop.
struct Recorded<'a> {
    driver: &'a Driver,
    graph: CUgraph,
}

impl Drop for Recorded<'_> {
    fn drop(&mut self) {
        if !self.graph.is_null() {
            // SAFETY: the capture made it for us, destroyed once.
            let _ = unsafe { cu!(self.driver, cuGraphDestroy(self.graph)) };
        }
    }
}

pub(super) fn begin(device: &Device, stream: StreamHandle) -> Result<()> {
    let _bound = device.bind()?;
    // Only this thread's calls can break the capture, not those of other threads.
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    // SAFETY: the stream is live.
    unsafe { cu!(device.driver, cuStreamBeginCapture_v2(stream.0, mode)) }
}

/// Takes the stream out of capture, and what was recorded.
fn end(device: &Device, stream: StreamHandle) -> Result<Recorded<'_>> {
    let mut recorded = Recorded { driver: device.driver, graph: null_mut() };
    // SAFETY: the stream is live, the pointer is valid for the call.
    unsafe { cu!(device.driver, cuStreamEndCapture(stream.0, &mut recorded.graph)) }?;
    Ok(recorded)
}

pub(super) fn abort(device: &Device, stream: StreamHandle) {
    if let Ok(_bound) = device.bind() {
        // A broken capture reports its breaking here, which is of no interest any more.
        drop(end(device, stream));
    }
}

pub(super) fn finish(arena: &Arc<Arena<Device>>, stream: StreamHandle) -> Result<Executable> {
    let device = arena.device();
    let driver = device.driver;
    let broken = |error: Error| Error::CaptureFailed { reason: error.to_string() };
    let _bound = device.bind()?;
    let recorded = end(device, stream).map_err(broken)?;
    if recorded.graph.is_null() {
        return Err(Error::CaptureFailed { reason: "the driver ended the capture without a graph".into() });
    }
    if holds_memory_nodes(driver, recorded.graph).map_err(broken)? {
        let reason =
            "an allocation or a free was captured; such a graph runs once and fails ever after, so allocate before";
        return Err(Error::CaptureFailed { reason: reason.into() });
    }
    let before = device.free_memory()?;
    let mut executable = null_mut();
    // SAFETY: the graph is live, the pointer is valid for the call.
    unsafe { cu!(driver, cuGraphInstantiateWithFlags(&mut executable, recorded.graph, 0)) }.map_err(broken)?;
    let mut graph = Executable { arena: arena.clone(), executable, bytes: 0, launching: Mutex::new(()) };
    // SAFETY: both are live.
    unsafe { cu!(driver, cuGraphUpload(executable, stream.0)) }.map_err(broken)?;
    graph.bytes = before.saturating_sub(device.free_memory()?);
    Ok(graph)
}

fn holds_memory_nodes(driver: &Driver, graph: CUgraph) -> Result<bool> {
    let mut count = 0;
    // SAFETY: without an array the call gives the number of nodes.
    unsafe { cu!(driver, cuGraphGetNodes(graph, null_mut(), &mut count)) }?;
    let mut nodes: Vec<CUgraphNode> = vec![null_mut(); count];
    if count > 0 {
        // SAFETY: the array has room for `count` nodes.
        unsafe { cu!(driver, cuGraphGetNodes(graph, nodes.as_mut_ptr(), &mut count)) }?;
    }
    for node in nodes {
        let mut kind = 0;
        // SAFETY: a node of a live graph; the pointer is valid for the call.
        unsafe { cu!(driver, cuGraphNodeGetType(node, &mut kind)) }?;
        if kind == CHILD_GRAPH {
            let mut child = null_mut();
            // SAFETY: as above; the child belongs to its parent.
            unsafe { cu!(driver, cuGraphChildGraphNodeGetGraph(node, &mut child)) }?;
            if holds_memory_nodes(driver, child)? {
                return Ok(true);
            }
        }
        if MEMORY.contains(&kind) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Enqueues a graph on any stream of its device.
///
/// # Safety
/// Every address that was captured is still valid.
pub(super) unsafe fn replay(device: &Device, stream: StreamHandle, graph: &Executable) -> Result<()> {
    let _bound = device.bind()?;
    let _launching = graph.launching.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: the stream is live, the addresses are the caller's promise.
    unsafe { cu!(device.driver, cuGraphLaunch(graph.executable, stream.0)) }
}
