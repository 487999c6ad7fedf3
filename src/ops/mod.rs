//! Operations: shapes and types are checked here, then kernels are launched, the same way on every backend.

mod cache;
pub(crate) mod check;
mod decode;
mod merge;
mod probe;

pub use cache::{CacheWrite, KvCache, gather_cache, write_cache};
pub use check::check_batch;
#[cfg(feature = "capi")]
pub(crate) use decode::Scratch;
pub use decode::{DecodeArgs, MlaDecode, Plan, Scheduled};
pub use merge::{DcpCombine, MergeStates, dcp_combine, merge_states};
pub use probe::Probe;
