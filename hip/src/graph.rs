//! Graph nodes: their kinds across releases, and what a kernel node launches.

use std::ffi::{c_int, c_void};

use crate::types::{dim3, hipFunction_t, hipKernelNodeParams};

/// Kind of a graph node, whatever number the release gives it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GraphNodeKind {
    /// Launches a kernel.
    Kernel,
    /// Copies.
    Memcpy,
    /// Sets bytes.
    Memset,
    /// Calls a function on the host.
    Host,
    /// Runs a graph.
    Graph,
    /// Joins and forks.
    Empty,
    /// Waits for an event.
    WaitEvent,
    /// Records an event.
    EventRecord,
    /// Signals an external semaphore.
    SemaphoreSignal,
    /// Waits for an external semaphore.
    SemaphoreWait,
    /// Allocates: a graph with such nodes may run once only.
    MemAlloc,
    /// Frees.
    MemFree,
    /// Copies from a device symbol.
    MemcpyFromSymbol,
    /// Copies to a device symbol.
    MemcpyToSymbol,
    /// A number that this crate does not know.
    Other(i32),
}

impl GraphNodeKind {
    /// Reads the number of a release: HIP 5.2 counts from 1, and memory nodes, which came after HIP 5.4, moved the symbol copies.
    pub(crate) fn from_raw(raw: c_int, one_based: bool, has_memory_nodes: bool) -> Self {
        match raw - c_int::from(one_based) {
            0 => Self::Kernel,
            1 => Self::Memcpy,
            2 => Self::Memset,
            3 => Self::Host,
            4 => Self::Graph,
            5 => Self::Empty,
            6 => Self::WaitEvent,
            7 => Self::EventRecord,
            // HIP 5.2 has a second kind of copy where later releases have semaphores.
            8 if one_based => Self::Memcpy,
            9 if one_based => Self::MemcpyFromSymbol,
            10 if one_based => Self::MemcpyToSymbol,
            8 => Self::SemaphoreSignal,
            9 => Self::SemaphoreWait,
            10 if has_memory_nodes => Self::MemAlloc,
            11 if has_memory_nodes => Self::MemFree,
            10 => Self::MemcpyFromSymbol,
            11 => Self::MemcpyToSymbol,
            12 => Self::MemcpyFromSymbol,
            13 => Self::MemcpyToSymbol,
            _ => Self::Other(raw),
        }
    }

    /// Whether the node allocates or frees memory.
    pub fn is_memory(self) -> bool {
        matches!(self, Self::MemAlloc | Self::MemFree)
    }
}

/// What a kernel node launches. Arguments are given as pointers to their values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelNode {
    /// The kernel.
    pub function: hipFunction_t,
    /// Blocks along x, y, z.
    pub grid: [u32; 3],
    /// Threads of a block along x, y, z.
    pub block: [u32; 3],
    /// Dynamic LDS of a block, in bytes.
    pub shared_bytes: u32,
    /// A pointer to each argument, in order.
    pub params: *mut *mut c_void,
}

impl From<KernelNode> for hipKernelNodeParams {
    fn from(node: KernelNode) -> Self {
        let dim = |[x, y, z]: [u32; 3]| dim3 { x, y, z };
        Self {
            blockDim: dim(node.block),
            extra: std::ptr::null_mut(),
            func: node.function.cast(),
            gridDim: dim(node.grid),
            kernelParams: node.params,
            sharedMemBytes: node.shared_bytes,
        }
    }
}

impl From<hipKernelNodeParams> for KernelNode {
    fn from(params: hipKernelNodeParams) -> Self {
        let array = |dim: dim3| [dim.x, dim.y, dim.z];
        Self {
            function: params.func.cast(),
            grid: array(params.gridDim),
            block: array(params.blockDim),
            shared_bytes: params.sharedMemBytes,
            params: params.kernelParams,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::GraphNodeKind::{self, *};

    #[test]
    fn numbers_of_each_release() {
        // Headers of HIP 5.2.3, 5.4 (published hip-runtime-sys) and 5.7.1, which 6.4.3 repeats.
        let hip_5_2 = [(1, Kernel), (2, Memcpy), (3, Memset), (6, Empty), (8, EventRecord), (10, MemcpyFromSymbol)];
        let hip_5_4 = [(0, Kernel), (1, Memcpy), (2, Memset), (5, Empty), (9, SemaphoreWait), (10, MemcpyFromSymbol)];
        let hip_5_7 = [(0, Kernel), (1, Memcpy), (2, Memset), (10, MemAlloc), (11, MemFree), (12, MemcpyFromSymbol)];
        for (table, one_based, memory) in [(hip_5_2, true, false), (hip_5_4, false, false), (hip_5_7, false, true)] {
            for (raw, kind) in table {
                assert_eq!(GraphNodeKind::from_raw(raw, one_based, memory), kind, "{raw}");
            }
        }
        assert_eq!(GraphNodeKind::from_raw(99, false, true), Other(99));
        assert!(MemAlloc.is_memory() && MemFree.is_memory() && !Memset.is_memory());
    }
}
