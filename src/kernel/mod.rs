//! What is launched: entries, variants, launch shapes and parameter blocks, the same for every vendor.
//!
//! A [`Variant`] names one compiled kernel: an entry point and the constants it is compiled with. A [`Launch`] is its grid.
//! The parameter blocks in [`params`] are passed by value and have the same layout in Rust, CUDA C++ and HIP
//! (`kernels/params.h` asserts the same sizes).

#[cfg(any(feature = "cuda", feature = "rocm"))]
pub mod cache;
#[cfg(any(feature = "cuda", feature = "rocm"))]
mod compile;
#[cfg(any(feature = "cuda", feature = "rocm"))]
pub mod embedded;
#[cfg(any(feature = "cuda", feature = "rocm"))]
mod inventory;
#[cfg(any(feature = "cuda", feature = "rocm"))]
mod load;
pub mod params;
pub mod select;
mod select_cdna;
mod select_few;
mod select_sm90;
#[cfg(any(feature = "cuda", feature = "rocm"))]
pub mod source;

#[cfg(any(feature = "cuda", feature = "rocm"))]
pub use compile::{Compiled, Compiler, Resources};
#[cfg(any(feature = "cuda", feature = "rocm"))]
pub use inventory::{ArchiveStatus, CompilerStatus, Inventory, compile, inventory, precompile, source_of};
#[cfg(any(feature = "cuda", feature = "rocm"))]
pub use load::Origin;
#[cfg(any(feature = "cuda", feature = "rocm"))]
pub(crate) use load::{Loaded, load};
pub use params::Params;
#[cfg(any(feature = "cuda", feature = "rocm"))]
pub use source::Source;

use crate::tensor::DType;

/// The kernels of this crate. Each is one `extern "C"` function in `kernels/`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Entry {
    /// Makes the balanced schedule of a step from the lengths on the device. `kernels/mla_plan.cu`
    Plan,
    /// Stage 1: attention over one split of one sequence's pages. `kernels/mla_decode_split.cu`
    DecodeSplit,
    /// Stage 2: merges the partial results of a sequence's splits. `kernels/mla_decode_reduce.cu`
    DecodeReduce,
    /// Writes new latent and rope rows into their cache slots. `kernels/mla_cache.cu`
    CacheWrite,
    /// Copies cached rows out of their pages into a contiguous tensor. `kernels/mla_cache.cu`
    CacheGather,
    /// Merges two attention results of the same rows by their LSE. `kernels/merge.cu`
    MergeStates,
    /// Combines the partial results of decode-context-parallel ranks. `kernels/merge.cu`
    DcpCombine,
    /// Reads memory as fast as it goes. `kernels/probe.cu`
    ProbeRead,
    /// Multiplies matrices as fast as it goes; form 1 with Hopper's own instructions. `kernels/probe.cu`, `kernels/sm90/probe.cu`
    ProbeMatmul,
}

impl Entry {
    /// Name of the `extern "C"` function.
    pub fn symbol(self) -> &'static str {
        match self {
            Self::Plan => "mla_plan",
            Self::DecodeSplit => "mla_decode_split",
            Self::DecodeReduce => "mla_decode_reduce",
            Self::CacheWrite => "mla_cache_write",
            Self::CacheGather => "mla_cache_gather",
            Self::MergeStates => "merge_states",
            Self::DcpCombine => "dcp_combine",
            Self::ProbeRead => "probe_read",
            Self::ProbeMatmul => "probe_matmul",
        }
    }
}

/// One compiled kernel: the entry and the constants it is compiled with.
///
/// The name of a constant is the `-D` name given to the compiler; the host backend reads the same constants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Variant {
    /// The entry point.
    pub entry: Entry,
    /// Element type of queries, outputs and 16-bit arithmetic (`Q_DTYPE`).
    pub q_dtype: DType,
    /// Element type of the cache (`KV_DTYPE`).
    pub kv_dtype: DType,
    /// Width of the latent part of a row, which is also the width of a value row (`KV_LORA_RANK`).
    pub kv_lora_rank: u32,
    /// Width of the rotary part of a row, may be 0 (`ROPE_DIM`).
    pub rope_dim: u32,
    /// Query rows that one block of stage 1 handles (`BLOCK_ROWS`).
    pub block_rows: u32,
    /// Cached tokens that one step of stage 1 handles, and the unit of the balanced schedule (`TILE_TOKENS`).
    pub tile_tokens: u32,
    /// Depth of the load pipeline (`STAGES`).
    pub stages: u32,
    /// Threads of one block (`THREADS`).
    pub threads: u32,
    /// Selects among tuned forms of one entry; 0 is the portable form.
    pub form: u32,
    /// Whether rows of the cache are copied one by one, as small pages demand of Hopper's forms (`GATHER`).
    pub gather: bool,
    /// Whether pages are small, so that several warps copy their boxes in Hopper's forms (`SMALL_PAGES`).
    pub small: bool,
}

impl Variant {
    /// A variant of `entry` for `q_dtype`, with every other constant 0 and the cache of the same type.
    pub const fn simple(entry: Entry, q_dtype: DType) -> Self {
        Self {
            entry,
            q_dtype,
            kv_dtype: q_dtype,
            kv_lora_rank: 0,
            rope_dim: 0,
            block_rows: 0,
            tile_tokens: 0,
            stages: 0,
            threads: 0,
            form: 0,
            gather: false,
            small: false,
        }
    }

    /// Whether the kernel takes the cache by tensor maps, as Hopper's forms of stage 1 do.
    #[cfg(feature = "cuda")]
    pub(crate) fn takes_maps(&self) -> bool {
        let forms = [
            select_sm90::ROWS_FORM,
            select_sm90::KEYS_FORM,
            select_sm90::WIDE_FORM,
            select_few::BOXES_FORM,
            select_few::EITHER_FORM,
        ];
        self.entry == Entry::DecodeSplit && forms.contains(&self.form)
    }

    /// Neighbouring blocks of stage 1 that are best launched as a cluster: where each piece has an even number of `row_blocks`, pairs of
    /// them in the forms of many rows, which read most of what they share.
    pub(crate) fn cluster(&self, row_blocks: usize) -> u32 {
        let pairs =
            self.entry == Entry::DecodeSplit && matches!(self.form, select_sm90::ROWS_FORM | select_sm90::WIDE_FORM);
        if pairs && row_blocks.is_multiple_of(2) { 2 } else { 1 }
    }
}

impl std::fmt::Display for Variant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{}_{}_{}_{}+{}_r{}_t{}_s{}_n{}_f{}{}{}",
            self.entry.symbol(),
            self.q_dtype,
            self.kv_dtype,
            self.kv_lora_rank,
            self.rope_dim,
            self.block_rows,
            self.tile_tokens,
            self.stages,
            self.threads,
            self.form,
            if self.gather { "g" } else { "" },
            if self.small { "s" } else { "" }
        )
    }
}

/// Lanes of a wave on devices of this architecture: 64 on AMD's CDNA, 32 on all others.
fn wave_of(arch: &str) -> usize {
    if arch.starts_with("gfx9") { 64 } else { 32 }
}

/// Grid of one launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    /// Blocks along x, y, z.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block, in bytes.
    pub shared_bytes: u32,
    /// The kernel waits for its predecessor itself, so it may start before that one has ended
    /// (programmatic dependent launch where the device has it, ignored elsewhere).
    pub dependent: bool,
    /// Neighbouring blocks along x that are to run beside each other, on units that lie together: 1 or 2, of which the grid's x must be a
    /// multiple. Only to be quick; no kernel relies on it, and devices without clusters of blocks ignore it.
    pub cluster: u32,
}
