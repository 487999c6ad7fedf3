//! What a vendor's compiler offers.

use super::source::Source;
use crate::error::Result;

/// A compiler: NVRTC, hipRTC or, ahead of time, a clang program. It needs no GPU.
pub trait Compiler: Send + Sync {
    /// Name and version, which are part of the disk cache's key: `nvrtc 13.0`.
    fn version(&self) -> &str;

    /// Compiles to native code of `arch`, or to portable code where the compiler does not know that architecture.
    ///
    /// # Errors
    /// [`Compile`](crate::Error::Compile) with the compiler's log.
    fn compile(&self, source: &Source, arch: &str) -> Result<Compiled>;
}

/// A compiled kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compiled {
    /// The binary, as the driver loads it.
    pub code: Vec<u8>,
    /// What the compiler said.
    pub log: String,
    /// What the kernel takes, as far as the compiler tells.
    pub resources: Option<Resources>,
}

/// What a kernel takes of a compute unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resources {
    /// Vector registers of one thread.
    pub registers: u32,
    /// Static shared memory (LDS) of one block, in bytes.
    pub shared_bytes: u32,
    /// Bytes that one thread spills into memory, stores and loads together.
    pub spill_bytes: u32,
}
