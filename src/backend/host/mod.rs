//! The host backend: the same plan, workspace, parameter blocks, capture and replay, with kernels written in Rust.
//!
//! Launches run when they are enqueued, on a pool of threads that is the device's own. The same plan gives the same bits on any
//! number of threads ([`SplitPolicy::Auto`](crate::SplitPolicy::Auto) makes its plan by that number, the other policies of
//! [`Even`](crate::kernel::params::ScheduleKind::Even) and [`Chunked`](crate::kernel::params::ScheduleKind::Chunked) kind do not). A page id or a length that the block table or the cache does not have is an error of the launch or of
//! the replay ([`Error::PageOutOfRange`], [`Error::SeqLenOutOfRange`]) and is never followed.

mod cache;
mod convert;
mod decode_reduce;
mod decode_split;
mod device;
mod graph;
mod memory;
mod merge;
mod plan;
mod pool;
mod simd;
mod step;

use std::sync::{Arc, Mutex, PoisonError};

pub use graph::{HostGraph, HostStream};
pub use memory::HostBuffer;

use crate::backend::{Backend, DecodeKernels, DecodeShape, DeviceInfo, GraphBackend};
use crate::error::{Error, Result};
use crate::fp8::ds_mla;
use crate::kernel::params::PartialOrder;
use crate::kernel::{Entry, Launch, Params, Variant};
use crate::tensor::DType;
use graph::Node;
use memory::{Budget, element};
use pool::Pool;
use simd::Simd;

/// Most query rows that one work item of stage 1 handles: its queries, outputs and tile then fit in a second-level cache.
const BLOCK_ROWS: usize = 64;

/// Cached tokens that are turned into float32 at a time.
const TILE_TOKENS: u32 = 64;

/// Most query tokens that are packed into one group.
const MAX_QUERY_GROUP: usize = 16;

/// The processor as a device. Clones share its threads and its memory limit.
#[derive(Clone)]
pub struct Host {
    inner: Arc<Inner>,
}

struct Inner {
    info: DeviceInfo,
    pool: Pool,
    simd: &'static Simd,
    budget: Arc<Budget>,
    // Scratch of the plan kernel, kept so that a step allocates nothing.
    plan_tiles: Mutex<Vec<i32>>,
}

/// A kernel of the host: its constants. The code is this crate's own.
#[derive(Debug, Clone, Copy)]
pub struct HostKernel {
    variant: Variant,
}

impl std::fmt::Debug for Host {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Host").field("info", &self.inner.info).finish_non_exhaustive()
    }
}

impl Default for Host {
    fn default() -> Self {
        Self::new()
    }
}

impl Host {
    /// A device with one thread per processor that this process may use.
    pub fn new() -> Self {
        Self::with_threads(std::thread::available_parallelism().map_or(1, usize::from))
    }

    /// A device with `threads` threads, at least 1; fewer if the system gives no more.
    pub fn with_threads(threads: usize) -> Self {
        Self::make(threads, None)
    }

    /// The same number of threads, but a device of its own that has `bytes` of memory and then reports
    /// [`Error::OutOfMemory`]. Without this the limit is the machine's memory.
    pub fn with_memory_limit(&self, bytes: usize) -> Self {
        Self::make(self.inner.pool.threads(), Some(bytes))
    }

    fn make(threads: usize, limit: Option<usize>) -> Self {
        let (pool, simd) = (Pool::new(threads), Simd::detect());
        let mut info = device::info(pool.threads(), simd);
        if let Some(limit) = limit {
            info.memory_bytes = limit as u64;
        }
        let budget = Budget::new(usize::try_from(info.memory_bytes).unwrap_or(usize::MAX));
        Self { inner: Arc::new(Inner { info, pool, simd, budget, plan_tiles: Mutex::new(Vec::new()) }) }
    }

    fn unsupported(&self, what: String) -> Error {
        Error::Unsupported { backend: "host", arch: self.inner.info.arch.clone(), what }
    }

    fn check_variant(&self, variant: &Variant) -> Result<()> {
        let float = |dtype| matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
        if !float(variant.q_dtype) {
            return Err(
                self.unsupported(format!("queries or outputs of type {}; use f32, f16 or bf16", variant.q_dtype))
            );
        }
        let (rank, rope) = (variant.kv_lora_rank as usize, variant.rope_dim as usize);
        let rope_fits = rope == ds_mla::ROPE || (rope == 0 && variant.entry == Entry::CacheWrite);
        match variant.kv_dtype {
            DType::U8 if rank == ds_mla::LATENTS && rope_fits => Ok(()),
            DType::U8 => Err(self.unsupported(format!("656-byte rows of {rank} + {rope} values; they hold 512 + 64"))),
            dtype if float(dtype) || dtype.is_fp8() => Ok(()),
            dtype => {
                Err(self.unsupported(format!("a cache of type {dtype}; use f32, f16, bf16, an fp8 type or u8 rows")))
            }
        }
    }

    /// Runs one kernel now.
    ///
    /// # Safety
    /// As [`Backend::launch`].
    unsafe fn run(&self, variant: &Variant, params: &Params) -> Result<()> {
        let Inner { pool, simd, .. } = &*self.inner;
        // SAFETY: the caller's promise, for every arm.
        let completed = unsafe {
            match (variant.entry, params) {
                (Entry::Plan, Params::Decode(p)) => {
                    let mut tiles = self.inner.plan_tiles.lock().unwrap_or_else(PoisonError::into_inner);
                    plan::run(p, &mut tiles).map(|()| true)
                }
                (Entry::DecodeSplit, Params::Decode(p)) => decode_split::run(p, variant, simd, pool),
                (Entry::DecodeReduce, Params::Decode(p)) => decode_reduce::run(p, variant, pool),
                (Entry::CacheWrite, Params::CacheWrite(p)) => cache::write(p, variant, pool),
                (Entry::CacheGather, Params::CacheGather(p)) => cache::gather(p, variant, pool),
                (Entry::MergeStates, Params::Merge(p)) => Ok(merge::merge_states(p, variant, pool)),
                (Entry::DcpCombine, Params::DcpCombine(p)) => Ok(merge::dcp_combine(p, variant, pool)),
                (entry, _) => Err(Error::argument("params", format!("not a parameter block of {}", entry.symbol()))),
            }
        }?;
        if completed {
            return Ok(());
        }
        Err(Error::Driver {
            backend: "host",
            call: variant.entry.symbol(),
            code: -1,
            message: "a thread of the kernel panicked".to_owned(),
        })
    }

    unsafe fn run_node(&self, node: &Node) -> Result<()> {
        match node {
            // SAFETY: the caller's promise.
            Node::Launch(variant, params) => unsafe { self.run(variant, params) },
            Node::Fill { dst, byte, bytes } => {
                // SAFETY: the caller's promise.
                unsafe { element::<u8>(*dst, 0).write_bytes(*byte, *bytes) };
                Ok(())
            }
        }
    }

    /// Grows what a recorded launch will need, so that its replay allocates nothing.
    fn reserve_for_replay(&self, params: &Params) {
        if let Params::Decode(p) = params {
            let virtual_seqs = (p.batch * (p.query_len + p.query_group - 1) / p.query_group.max(1)) as usize;
            let mut tiles = self.inner.plan_tiles.lock().unwrap_or_else(PoisonError::into_inner);
            tiles.clear();
            tiles.reserve(virtual_seqs);
        }
    }
}

impl Backend for Host {
    const NAME: &'static str = "host";
    type Buffer = HostBuffer;
    type Stream = HostStream;
    type Kernel = HostKernel;

    fn device(&self) -> &DeviceInfo {
        &self.inner.info
    }

    fn decode_kernels(&self, shape: &DecodeShape) -> Result<DecodeKernels> {
        let query_group = shape.query_len.clamp(1, MAX_QUERY_GROUP);
        let rows = query_group * shape.num_heads;
        let variant = |entry| Variant {
            entry,
            kv_dtype: shape.kv_dtype,
            kv_lora_rank: shape.kv_lora_rank as u32,
            rope_dim: shape.rope_dim as u32,
            block_rows: rows.clamp(1, BLOCK_ROWS) as u32,
            tile_tokens: TILE_TOKENS,
            stages: 1,
            threads: 1,
            ..Variant::simple(entry, shape.q_dtype)
        };
        let split = variant(Entry::DecodeSplit);
        self.check_variant(&split)?;
        Ok(DecodeKernels {
            split,
            reduce: variant(Entry::DecodeReduce),
            plan: variant(Entry::Plan),
            query_group,
            // Two parts per thread even out what else the machine is doing.
            blocks_per_unit: 2,
            fixed_cost: crate::plan::FIXED_COST,
            split_shared_bytes: 0,
            own_pieces: false,
            few: None,
            short_seq_len: None,
            merged_pieces: 0,
            partial_dtype: DType::F32,
            partial_order: PartialOrder::InOrder,
            reduce_blocks: 1,
            row_alignment: 1,
            max_query_len: i32::MAX as usize,
        })
    }

    fn prepare(&self, variant: &Variant) -> Result<HostKernel> {
        self.check_variant(variant)?;
        let bytes = match variant.entry {
            Entry::Plan => 0,
            Entry::DecodeSplit => decode_split::scratch_bytes(variant),
            Entry::DecodeReduce => decode_reduce::scratch_bytes(variant),
            Entry::CacheWrite | Entry::CacheGather => cache::scratch_bytes(variant),
            Entry::MergeStates | Entry::DcpCombine => merge::SCRATCH_BYTES,
            Entry::ProbeRead | Entry::ProbeMatmul => {
                return Err(self
                    .unsupported(format!("{}: a processor's ceilings are its own program's", variant.entry.symbol())));
            }
        };
        self.inner.pool.reserve(bytes, &self.inner.budget)?;
        Ok(HostKernel { variant: *variant })
    }

    fn alloc(&self, bytes: usize, purpose: &'static str) -> Result<HostBuffer> {
        HostBuffer::new(bytes, purpose, &self.inner.budget)
    }

    fn addr(&self, buffer: &HostBuffer) -> u64 {
        buffer.addr()
    }

    fn create_stream(&self) -> Result<HostStream> {
        Ok(HostStream::new())
    }

    unsafe fn borrow_stream(&self, raw: u64) -> Result<HostStream> {
        match raw {
            0 => Ok(HostStream::new()),
            _ => Err(Error::argument("raw", "the host has no raw streams; pass 0 for its default")),
        }
    }

    unsafe fn upload(&self, stream: &HostStream, dst: u64, src: &[u8]) -> Result<()> {
        stream.forbid("upload")?;
        // SAFETY: the caller's promise.
        unsafe { element::<u8>(dst, 0).copy_from(src.as_ptr(), src.len()) };
        Ok(())
    }

    unsafe fn download(&self, stream: &HostStream, src: u64, dst: &mut [u8]) -> Result<()> {
        stream.forbid("download")?;
        // SAFETY: the caller's promise.
        unsafe { element::<u8>(src, 0).copy_to(dst.as_mut_ptr(), dst.len()) };
        Ok(())
    }

    unsafe fn fill(&self, stream: &HostStream, dst: u64, byte: u8, bytes: usize) -> Result<()> {
        let node = Node::Fill { dst, byte, bytes };
        if stream.record(|| node) {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { self.run_node(&node) }
    }

    unsafe fn launch(&self, stream: &HostStream, kernel: &HostKernel, _: &Launch, params: &Params) -> Result<()> {
        // The grid follows from the parameter block, which the kernels here read instead.
        if stream.record(|| Node::Launch(kernel.variant, *params)) {
            self.reserve_for_replay(params);
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { self.run(&kernel.variant, params) }
    }

    fn synchronize(&self, stream: &HostStream) -> Result<()> {
        // Work has run when the call that enqueued it returned.
        stream.forbid("synchronize")
    }
}

impl GraphBackend for Host {
    type Graph = HostGraph;

    fn begin_capture(&self, stream: &HostStream) -> Result<()> {
        stream.begin()
    }

    fn end_capture(&self, stream: &HostStream) -> Result<HostGraph> {
        stream.end()
    }

    fn abort_capture(&self, stream: &HostStream) {
        stream.abort();
    }

    unsafe fn replay(&self, stream: &HostStream, graph: &HostGraph) -> Result<()> {
        stream.forbid("replay")?;
        // SAFETY: the caller's promise.
        graph.nodes.iter().try_for_each(|node| unsafe { self.run_node(node) })
    }

    fn graph_bytes(&self, graph: &HostGraph) -> usize {
        size_of_val(&graph.nodes[..])
    }
}
