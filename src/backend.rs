//! The device seam: what a vendor must supply, and nothing else.
//!
//! Everything above this module is written once and serves every vendor. The traits promise the following.
//!
//! - **No validation below the seam.** Shapes, types, ranges and states were checked by the caller; a check down here would
//!   be a bug above. Errors are for what a caller cannot foresee: a driver, a device, memory.
//! - **No panics**: not for a missing library, not for a failed call.
//! - **Addresses are plain `u64`.** Tensors and streams may be borrowed from raw handles, so no foreign crate's type shows.
//! - **Compile early.** [`Backend::prepare`] does all the compiling and loading; [`Backend::launch`] only enqueues and may
//!   be called while a stream is being captured.
//! - **A failed capture leaves the stream usable**, and nothing half-captured.
//!
//! The host is a backend like the others: same plan, workspace, parameter blocks, capture and replay.

#[cfg(feature = "cuda")]
pub mod cuda;
#[cfg(any(feature = "cuda", feature = "rocm"))]
mod gpu;
pub mod host;
#[cfg(feature = "rocm")]
pub mod rocm;

#[cfg(any(feature = "cuda", feature = "rocm"))]
#[cfg_attr(docsrs, doc(cfg(any(feature = "cuda", feature = "rocm"))))]
pub use gpu::{Gpu, GpuBuffer, GpuGraph, GpuKernel, GpuStream};

use crate::error::Result;
use crate::graph::{DriverRule, GraphSupport};
use crate::kernel::params::PartialOrder;
use crate::kernel::{Launch, Params, Variant};
use crate::tensor::DType;

/// What is known of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Name of the backend: `host`, `cuda` or `rocm`.
    pub backend: &'static str,
    /// The device's own name.
    pub name: String,
    /// Architecture as its compiler names it: `sm_90a`, `gfx942:sramecc+:xnack-`, `x86_64`.
    pub arch: String,
    /// Index among the backend's devices.
    pub index: usize,
    /// Streaming multiprocessors (NVIDIA), compute units (AMD), threads (host): the `U` of `num_kv_splits`.
    pub num_compute_units: usize,
    /// Lanes that run in lockstep: 32, 64, or 1 on the host.
    pub wave_size: usize,
    /// Shared memory (LDS) that one block may use, in bytes.
    pub shared_bytes_per_block: usize,
    /// Device memory in bytes.
    pub memory_bytes: u64,
    /// Driver or runtime version, as that vendor writes it.
    pub driver_version: String,
}

/// The problem that a decode kernel variant is chosen for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DecodeShape {
    /// Element type of queries and outputs.
    pub q_dtype: DType,
    /// Element type of the cache.
    pub kv_dtype: DType,
    /// Query heads.
    pub num_heads: usize,
    /// Query tokens per sequence.
    pub query_len: usize,
    /// Width of the latent part.
    pub kv_lora_rank: usize,
    /// Width of the rotary part.
    pub rope_dim: usize,
    /// Tokens per page.
    pub page_size: usize,
    /// Sequences in the batch.
    pub batch: usize,
    /// Longest sequence that the plan must serve, in tokens.
    pub max_seq_len: usize,
    /// Whether forms made for this architecture alone are left out, to compare them with what serves the others.
    pub portable: bool,
    /// Whether stage 1 may choose how sequences are split, as under [`SplitPolicy::Auto`](crate::SplitPolicy::Auto).
    pub free_splits: bool,
}

/// The kernels chosen for a [`DecodeShape`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DecodeKernels {
    /// Stage 1.
    pub split: Variant,
    /// Stage 2.
    pub reduce: Variant,
    /// The plan kernel.
    pub plan: Variant,
    /// Query tokens that one group packs; more are served by further groups. At least 1, at most `query_len`.
    pub query_group: usize,
    /// Blocks of stage 1 that are resident on one compute unit.
    pub blocks_per_unit: usize,
    /// Cost of starting a sequence in a balanced schedule, in tiles of stage 1.
    pub fixed_cost: i32,
    /// Dynamic shared memory of a block of stage 1, in bytes.
    pub split_shared_bytes: u32,
    /// Whether blocks of stage 1 are to find their pieces by themselves where the policy leaves it open
    /// ([`ScheduleKind::Own`](crate::kernel::params::ScheduleKind::Own)).
    pub own_pieces: bool,
    /// A second form of stage 1, for steps of few tokens, where neither is best for all lengths
    /// ([`ScheduleKind::Either`](crate::kernel::params::ScheduleKind::Either)).
    pub few: Option<FewTokens>,
    /// Longest sequence for which a graph of its own is worth having, in tokens: planned for no longer ones, the same batch has other
    /// kernels, which are faster. `None` if these serve short sequences as well as any.
    pub short_seq_len: Option<usize>,
    /// Most pieces of a sequence of a balanced schedule that stage 1 merges itself where one of its blocks has all rows of a group. Where
    /// a sequence of a step may have more, or this is 0, stage 2 merges those of all.
    pub merged_pieces: i32,
    /// Element type of the partial outputs of pieces.
    pub partial_dtype: DType,
    /// How stage 1 orders their columns, but for pieces that its blocks find by themselves, which are in order.
    pub partial_order: PartialOrder,
    /// Blocks of stage 2 that are worth having: fewer leave the device idle, more cost more to start than they win.
    pub reduce_blocks: usize,
    /// Rows of queries and cache begin on multiples of this many bytes, rows of outputs on multiples of half as many.
    pub row_alignment: usize,
    /// The longest uniform query that the stage-1 kernel takes natively; 1 means single tokens only.
    pub max_query_len: usize,
}

/// How a stage-1 kernel of two forms serves few tokens, whose blocks find their pieces by themselves: the lengths of a step choose the
/// form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FewTokens {
    /// Most tokens of all sequences of such a step.
    pub max_tokens: usize,
    /// Query rows that a block then handles.
    pub block_rows: u32,
    /// Pieces are multiples of this many tokens.
    pub tile_tokens: u32,
    /// As [`DecodeKernels::reduce_blocks`], for its steps.
    pub reduce_blocks: usize,
}

/// A device and the work it can be given. Cloning is cheap and refers to the same device.
pub trait Backend: Clone + Send + Sync + Sized + 'static {
    /// `host`, `cuda` or `rocm`.
    const NAME: &'static str;

    /// Device memory; freed when dropped, once the work that may use it has ended.
    type Buffer: Send + Sync + 'static;
    /// A queue of work.
    type Stream: Send + Sync + 'static;
    /// A loaded kernel.
    type Kernel: Clone + Send + Sync + 'static;

    /// The device's facts.
    fn device(&self) -> &DeviceInfo;

    /// Chooses the decode kernels for a problem.
    ///
    /// # Errors
    /// [`Unsupported`](crate::Error::Unsupported) where no kernel of this backend fits, naming what does.
    fn decode_kernels(&self, shape: &DecodeShape) -> Result<DecodeKernels>;

    /// Compiles and loads a kernel, or finds it loaded.
    fn prepare(&self, variant: &Variant) -> Result<Self::Kernel>;

    /// Allocates `bytes` (at least 1) of device memory, aligned to 256 bytes. Its content is undefined.
    ///
    /// # Errors
    /// [`OutOfMemory`](crate::Error::OutOfMemory), naming `purpose`.
    fn alloc(&self, bytes: usize, purpose: &'static str) -> Result<Self::Buffer>;

    /// Device address of a buffer's first byte.
    fn addr(&self, buffer: &Self::Buffer) -> u64;

    /// Makes a stream.
    fn create_stream(&self) -> Result<Self::Stream>;

    /// Wraps a caller's raw stream (`CUstream`, `hipStream_t`); it is not destroyed on drop.
    ///
    /// # Safety
    /// `raw` is a live stream of this device's context and outlives the result.
    unsafe fn borrow_stream(&self, raw: u64) -> Result<Self::Stream>;

    /// As [`Backend::borrow_stream`], for work that touches no memory of this backend: what is enqueued is the caller's to wait
    /// for, nothing is noted of the stream, and so the call is cheap enough to be made for a single launch.
    ///
    /// # Safety
    /// As [`Backend::borrow_stream`].
    unsafe fn visit_stream(&self, raw: u64) -> Result<Self::Stream> {
        // SAFETY: the caller's promise.
        unsafe { self.borrow_stream(raw) }
    }

    /// The raw handle of a stream (`CUstream`, `hipStream_t`), for other libraries of the process; 0 where streams have none.
    fn raw_stream(&self, _stream: &Self::Stream) -> u64 {
        0
    }

    /// Copies host bytes to the device in stream order. `src` may be reused as soon as this returns.
    ///
    /// # Errors
    /// [`CaptureFailed`](crate::Error::CaptureFailed) while the stream is being captured, as for [`Backend::download`] and
    /// [`Backend::synchronize`]; the capture then fails, too.
    ///
    /// # Safety
    /// `dst..dst + src.len()` is device memory of this device that no other work writes meanwhile.
    unsafe fn upload(&self, stream: &Self::Stream, dst: u64, src: &[u8]) -> Result<()>;

    /// Copies device bytes to the host in stream order and waits for them.
    ///
    /// # Safety
    /// `src..src + dst.len()` is initialised device memory of this device that no other work writes meanwhile.
    unsafe fn download(&self, stream: &Self::Stream, src: u64, dst: &mut [u8]) -> Result<()>;

    /// Sets device bytes in stream order. May be captured.
    ///
    /// # Safety
    /// `dst..dst + bytes` is device memory of this device that no other work uses meanwhile.
    unsafe fn fill(&self, stream: &Self::Stream, dst: u64, byte: u8, bytes: usize) -> Result<()>;

    /// Enqueues a kernel. Allocates nothing.
    ///
    /// # Safety
    /// Every address in `params` is valid for the extents that the block's fields imply, and stays so until the work ends.
    unsafe fn launch(
        &self,
        stream: &Self::Stream,
        kernel: &Self::Kernel,
        launch: &Launch,
        params: &Params,
    ) -> Result<()>;

    /// Waits for all work of the stream.
    fn synchronize(&self, stream: &Self::Stream) -> Result<()>;
}

/// A backend whose streams can be captured into graphs and replayed.
pub trait GraphBackend: Backend {
    /// An instantiated graph, ready to replay on any stream of its device.
    type Graph: Send + Sync + 'static;

    /// The most that this device's graphs can do, before any builder is asked.
    fn graph_support(&self) -> GraphSupport {
        GraphSupport::Always
    }

    /// Known defects of drivers of this vendor; the resolver applies those that match [`DeviceInfo`].
    fn driver_rules(&self) -> &'static [DriverRule] {
        &[]
    }

    /// Starts recording instead of running what is enqueued on the stream.
    fn begin_capture(&self, stream: &Self::Stream) -> Result<()>;

    /// Ends recording, instantiates and uploads the graph.
    ///
    /// # Errors
    /// [`CaptureFailed`](crate::Error::CaptureFailed) when the capture was broken on the way or holds memory nodes (such a
    /// graph runs once and fails ever after). The stream is out of capture in every case.
    fn end_capture(&self, stream: &Self::Stream) -> Result<Self::Graph>;

    /// Ends recording and throws away what was recorded. Never fails to leave capture.
    fn abort_capture(&self, stream: &Self::Stream);

    /// Enqueues the whole graph. Allocates nothing.
    ///
    /// # Safety
    /// Every address that was captured is still valid.
    unsafe fn replay(&self, stream: &Self::Stream, graph: &Self::Graph) -> Result<()>;

    /// Device bytes that the graph holds, as far as the driver tells.
    fn graph_bytes(&self, graph: &Self::Graph) -> usize;
}
