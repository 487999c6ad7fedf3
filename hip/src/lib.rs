//! AMD's HIP and hipRTC libraries, opened at run time.
//!
//! A program that uses this crate builds anywhere: neither headers nor libraries of ROCm are needed, and nothing is linked.
//! The libraries are looked for when [`Hip::load`] or [`Hiprtc::load`] is first called. Where they are not found the error
//! says which files were tried and what the loader answered; nothing here panics or aborts.
//!
//! - [`Hip`] has a method for each call that a compute library needs, with errors by name and message.
//! - [`Hiprtc`] compiles HIP C++ to code objects, on machines with no GPU too.
//! - [`types`] holds C's names, [`api`] the tables of function pointers, for calls that have no method.
//!
//! Functions that every supported release has are plain pointers; later ones are `Option`, and calling an absent one is the
//! error [`Unsupported`](Error::Unsupported) with its name. HIP 5.2 to 7.x are supported, on Linux.
//!
//! ```
//! match hip_sys::Hip::load() {
//!     Ok(hip) => match hip.device_count() {
//!         Ok(devices) => println!("{devices} devices through {}", hip.path().display()),
//!         Err(error) => println!("{error}"),
//!     },
//!     Err(error) => println!("{error}"), // libamdhip64 is unavailable; tried: ...
//! }
//! ```
//!
//! This crate stands in for the published `hip-sys`, which needs ROCm's headers to build and links the library. Its constants,
//! layouts and signatures are checked against that crate and against the headers of HIP 5.2.3, 5.7.1 and 6.4.3
//! (`ci/hip_abi.sh`), and its behaviour without a GPU against those runtimes (`ci/hip_runtimes.sh`).
//!
//! [`VENDOR_H`] and [`MMA_H`] are the device side: what kernels written in one vocabulary for two vendors are compiled with on
//! AMD GPUs.

pub mod api;
mod comgr;
pub mod error;
mod graph;
mod hiprtc;
mod loader;
pub mod properties;
mod runtime;
pub mod types;

pub use error::{Attempt, Error, HipError, HiprtcError, Result};
pub use graph::{GraphNodeKind, KernelNode};
pub use hiprtc::{Compiled, Header, Hiprtc};
pub use loader::Search;
pub use runtime::{Hip, Version};

/// Spells the kernel vocabulary for AMD GPUs: thread ids, barriers, shuffles, 16-bit types.
pub const VENDOR_H: &str = include_str!("../device/vendor.h");

/// Spells the matrix vocabulary for AMD GPUs: MFMA on CDNA, WMMA on RDNA.
pub const MMA_H: &str = include_str!("../device/mma.h");
