//! The parts of a GPU that do not depend on an instruction set: memory, local memory, waves, workgroups, dispatch.

mod code_object;
mod config;
mod dispatch;
mod fault;
mod lds;
mod memory;
mod program;
mod statistics;
mod wave;
mod workgroup;

pub use code_object::{CodeObject, KernelDescriptor, LoadError};
pub use config::Config;
pub use dispatch::{Device, Dispatch};
pub use fault::{Fault, FaultKind};
pub use lds::{Access, Lds};
pub use memory::{Memory, POISON};
pub use program::Program;
pub use statistics::{KernelStatistics, Statistics};
pub use wave::{Context, Flow, PRIVATE_APERTURE, SHARED_APERTURE, Wave, lanes};
