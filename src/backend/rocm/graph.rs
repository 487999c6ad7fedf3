//! Graphs: ending a capture, instantiating, replaying, and the releases whose graphs are broken.

use std::sync::Arc;

use hip_sys::types::{hipGraph_t, hipGraphExec_t, hipStreamCaptureModeThreadLocal, hipStreamCaptureStatusNone};
use hip_sys::{GraphNodeKind, Hip};

use super::device::{Device, StreamHandle};
use super::driver::{NAME, typed};
use crate::backend::gpu::Arena;
use crate::error::{Error, Result};
use crate::graph::{DriverRule, GraphSupport};

/// Releases whose graphs are known to be wrong. HIP's first two version numbers are ROCm's, its third is a build number, so a
/// rule covers all patches of a minor release.
pub(super) const RULES: &[DriverRule] = &[
    DriverRule {
        backend: NAME,
        arch_prefixes: &["gfx942"],
        first: (7, 2, 0),
        last: (7, 2, u32::MAX),
        limit: GraphSupport::Never,
        reason: "graph replay corrupts outputs in about one process of five with ROCm 7.2.0 to 7.2.3; 7.1 and 7.13 are right \
                 (ROCm/clr#279)",
    },
    DriverRule {
        backend: NAME,
        arch_prefixes: &["gfx11", "gfx12"],
        first: (0, 0, 0),
        last: (u32::MAX, u32::MAX, u32::MAX),
        limit: GraphSupport::Never,
        reason: "attention inside full graphs ends in memory faults on RDNA3 and RDNA4 (vLLM issue 34154), and long graphs read \
                 stale pointers (ROCm/hip#3887)",
    },
];

/// An instantiated graph.
pub struct Executable {
    arena: Arc<Arena<Device>>,
    executable: hipGraphExec_t,
    /// Device memory by which the free memory shrank over instantiation and upload. The runtime's own count
    /// (`hipDeviceGetGraphMemAttribute`) knows only of memory nodes, which no graph here has.
    pub(super) bytes: usize,
}

// SAFETY: a handle of the runtime, which every thread may use; launches are serialised.
unsafe impl Send for Executable {}
// SAFETY: as above.
unsafe impl Sync for Executable {}

impl Drop for Executable {
    fn drop(&mut self) {
        // Unlike CUDA, HIP frees a graph's arguments at once, under a replay that still runs.
        self.arena.settle();
        let device = self.arena.device();
        let Ok(_bound) = device.bind_relaxed() else { return };
        // SAFETY: instantiated once, and the streams have been waited for.
        let _ = unsafe { device.hip.graph_exec_destroy(self.executable) };
    }
}

/// What was recorded; destroyed on drop.
struct Recorded {
    hip: &'static Hip,
    graph: hipGraph_t,
}

impl Drop for Recorded {
    fn drop(&mut self) {
        if !self.graph.is_null() {
            // SAFETY: the capture made it for us, destroyed once.
            let _ = unsafe { self.hip.graph_destroy(self.graph) };
        }
    }
}

pub(super) fn begin(device: &Device, stream: StreamHandle) -> Result<()> {
    let _bound = device.bind()?;
    // Only this thread's calls can break the capture, not those of other threads.
    let mode = hipStreamCaptureModeThreadLocal;
    // SAFETY: the stream is live.
    unsafe { device.hip.begin_capture(stream.0, mode) }.map_err(typed)
}

/// Takes the stream out of capture, and what was recorded.
fn end(device: &Device, stream: StreamHandle) -> Result<Recorded> {
    let hip = device.hip;
    // SAFETY: the stream is live.
    let broken = match unsafe { hip.end_capture(stream.0) } {
        Ok(graph) => return Ok(Recorded { hip, graph }),
        Err(error) => typed(error).to_string(),
    };
    // HIP leaves the stream of a broken capture as it is, where it refuses all work.
    // SAFETY: the stream is live.
    let freed = unsafe { hip.reset_capture(stream.0) } == Ok(hipStreamCaptureStatusNone);
    let stuck =
        if freed { "" } else { "; HIP does not let go of the stream, which takes no work any more: make another" };
    Err(Error::CaptureFailed { reason: format!("{broken}{stuck}") })
}

pub(super) fn abort(device: &Device, stream: StreamHandle) {
    if let Ok(_bound) = device.bind() {
        // A broken capture reports its breaking here, which is of no interest any more.
        drop(end(device, stream));
    }
}

pub(super) fn finish(arena: &Arc<Arena<Device>>, stream: StreamHandle) -> Result<Executable> {
    let device = arena.device();
    let hip = device.hip;
    let _bound = device.bind()?;
    let recorded = end(device, stream)?;
    if recorded.graph.is_null() {
        return Err(Error::CaptureFailed { reason: "the runtime ended the capture without a graph".into() });
    }
    if holds_memory_nodes(hip, recorded.graph).map_err(broken)? {
        let reason =
            "an allocation or a free was captured; such a graph runs once and fails ever after, so allocate before";
        return Err(Error::CaptureFailed { reason: reason.into() });
    }
    let before = device.free_memory()?;
    let executable = {
        let _alone = device.lock_launches();
        // SAFETY: the graph is live.
        unsafe { hip.graph_instantiate(recorded.graph) }.map_err(broken)?
    };
    let mut graph = Executable { arena: arena.clone(), executable, bytes: 0 };
    // SAFETY: both are live.
    match unsafe { hip.graph_upload(executable, stream.0) } {
        // HIP 5.2 has no upload: the first replay does it.
        Ok(()) | Err(hip_sys::Error::Unsupported { .. }) => {}
        Err(error) => return Err(broken(error)),
    }
    graph.bytes = before.saturating_sub(device.free_memory()?);
    Ok(graph)
}

fn broken(error: hip_sys::Error) -> Error {
    Error::CaptureFailed { reason: typed(error).to_string() }
}

fn holds_memory_nodes(hip: &Hip, graph: hipGraph_t) -> hip_sys::Result<bool> {
    // SAFETY: the graph is live.
    for node in unsafe { hip.graph_nodes(graph) }? {
        // SAFETY: a node of a live graph.
        let kind = unsafe { hip.node_kind(node) }?;
        if kind.is_memory() {
            return Ok(true);
        }
        if kind == GraphNodeKind::Graph {
            // SAFETY: as above; the child belongs to its parent.
            let child = unsafe { hip.child_graph(node) }?;
            if holds_memory_nodes(hip, child)? {
                return Ok(true);
            }
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
    let _alone = device.lock_launches();
    // SAFETY: the stream is live, the addresses are the caller's promise.
    unsafe { device.hip.graph_launch(graph.executable, stream.0) }.map_err(typed)
}

#[cfg(test)]
mod tests {
    use super::RULES;
    use crate::graph::GraphSupport;

    #[test]
    fn every_rule_limits_graphs_and_names_its_source() {
        for rule in RULES {
            assert_eq!(rule.backend, "rocm");
            assert!(rule.limit < GraphSupport::Always && rule.first <= rule.last);
            assert!(rule.reason.contains("#") || rule.reason.contains("issue"), "{}", rule.reason);
        }
        let concerned = |arch: &str, version: (u32, u32, u32)| {
            let matches = |rule: &&crate::graph::DriverRule| {
                rule.arch_prefixes.iter().any(|prefix| arch.starts_with(prefix))
                    && (rule.first..=rule.last).contains(&version)
            };
            RULES.iter().filter(matches).count()
        };
        // Versions as the runtime gives them: the third number is a build.
        assert_eq!(concerned("gfx942:sramecc+:xnack-", (7, 2, 26_015)), 1);
        assert_eq!(concerned("gfx942:sramecc+:xnack-", (7, 1, 52_802)), 0);
        assert_eq!(concerned("gfx942:sramecc+:xnack-", (7, 13, 26_193)), 0);
        assert_eq!(concerned("gfx950:sramecc+:xnack-", (7, 2, 26_015)), 0);
        assert_eq!(concerned("gfx1100", (6, 4, 43_484)), 1);
        assert_eq!(concerned("gfx1201", (7, 2, 0)), 1);
    }
}
