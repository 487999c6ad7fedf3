//! Full device graphs: what a kernel takes and who can take part ([`support`], [`builder`]), which mode follows
//! ([`mod@resolve`]), which sizes are captured ([`sizes`]), how a capture goes ([`capture`]) and which graph serves a batch
//! ([`dispatch`]). All of it is pure: no device is touched here.

pub mod builder;
pub mod capture;
pub mod dispatch;
pub mod mode;
pub mod resolve;
pub mod sizes;
pub mod support;

pub use builder::{AttentionBuilder, BuilderSpec, CaptureBatch, MlaBuilder};
pub use capture::CaptureState;
pub use dispatch::{Batch, BatchDescriptor, Dispatch, GraphDispatcher, KeyRequest, Misfit, graph_keys};
pub use mode::{GraphMode, RuntimeMode};
pub use resolve::{DriverFacts, EngineFacts, Reason, ResolveRequest, Resolved, resolve};
pub use sizes::{CaptureSizes, SizeReason, SizeRequest};
pub use support::{DriverRule, GraphSupport, MinimumSupport, QueryLenSupport};

use std::fmt::Display;

use crate::error::{Error, Result};

/// Finds the value whose printed name is `text`, whatever its case.
fn parse_name<T: Copy + Display>(what: &str, text: &str, all: &[T]) -> Result<T> {
    let found = all.iter().find(|value| value.to_string().eq_ignore_ascii_case(text.trim()));
    found.copied().ok_or_else(|| Error::Parse {
        what: what.to_owned(),
        place: format!("`{text}`"),
        problem: format!("expected one of {}", all.iter().map(T::to_string).collect::<Vec<_>>().join(", ")),
    })
}
