//! The guide: five short chapters.
//!
//! 1. [Concepts](concepts): latent cache, pages, plan, schedule, session, in one page with a picture.
//! 2. [Porting](porting): names of FlashMLA, FlashInfer and vLLM, and what differs.
//! 3. [Graph modes](graph_modes): which to ask for, what you get, and why.
//! 4. [Speculative decoding](speculative): several query tokens per sequence, with full graphs.
//! 5. [Adding a backend](backends).

#[doc = include_str!("concepts.md")]
pub mod concepts {}

#[doc = include_str!("porting.md")]
pub mod porting {}

#[doc = include_str!("graph_modes.md")]
pub mod graph_modes {}

#[doc = include_str!("speculative.md")]
pub mod speculative {}

#[doc = include_str!("backends.md")]
pub mod backends {}
