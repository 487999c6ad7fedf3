//! Decode attention for models with multi-head latent attention (MLA), on NVIDIA and AMD GPUs and on the host.
//!
//! An engine holds a [`DecodeSession`]; a single call is [`MlaDecode::run`]. The [`guide`] explains both in five short chapters.
//!
//! | feature | adds |
//! | --- | --- |
//! | `cuda` | `Cuda`: NVIDIA GPUs; the driver and NVRTC are opened at run time |
//! | `rocm` | `Rocm`: AMD GPUs; HIP is opened at run time |
//! | `capi`, `dlpack` | the C ABI; tensors from and to other libraries without copies |
//! | `candle` | `candle`: decode attention over candle's tensors, on the CPU |
//! | `tracing`, `profiler` | spans, and ranges of NVTX and rocTX: [`observe`] |
//! | `cli` | the program |
#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod backend;
pub mod batch;
#[cfg(feature = "candle")]
#[cfg_attr(docsrs, doc(cfg(feature = "candle")))]
pub mod candle;
#[cfg(feature = "capi")]
#[cfg_attr(docsrs, doc(cfg(feature = "capi")))]
pub mod capi;
pub mod config;
#[cfg(feature = "dlpack")]
#[cfg_attr(docsrs, doc(cfg(feature = "dlpack")))]
pub mod dlpack;
pub mod error;
pub mod fp8;
pub mod graph;
pub mod guide;
pub mod kernel;
pub mod model;
pub mod observe;
pub mod ops;
pub mod plan;
pub mod reference;
pub mod session;
pub mod stream;
pub mod tensor;
pub mod testing;
pub mod workspace;

#[cfg(feature = "cuda")]
#[cfg_attr(docsrs, doc(cfg(feature = "cuda")))]
pub use backend::cuda::Cuda;
pub use backend::host::Host;
#[cfg(feature = "rocm")]
#[cfg_attr(docsrs, doc(cfg(feature = "rocm")))]
pub use backend::rocm::Rocm;
pub use backend::{Backend, DeviceInfo, GraphBackend};
pub use config::MlaConfig;
pub use error::{Error, Result};
pub use graph::{GraphMode, GraphSupport, QueryLenSupport};
pub use model::ModelConfig;
pub use ops::{DecodeArgs, KvCache, MlaDecode};
pub use plan::{DecodePlan, SplitPolicy};
pub use session::DecodeSession;
pub use stream::{Graph, Stream};
pub use tensor::{DType, Element, Tensor};
pub use workspace::Workspace;

// The README's example compiles and runs.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
