//! Runs gfx942 machine code where there is no AMD GPU.
//!
//! Two layers: `device` with `cdna3` is an interpreter of a code object's instructions, wave by wave; `kmt` presents it to
//! AMD's unmodified HIP runtime as the kernel driver's user library, `libhsakmt.so.1`.
//!
//! The interpreter models results, not time: memory operations are complete when the next instruction starts, caches are
//! coherent, and waves of a workgroup run one after another from barrier to barrier. [`device::FaultKind`] lists what it reports.

pub mod cdna3;
pub mod device;
#[cfg(target_os = "linux")]
pub mod kmt;
