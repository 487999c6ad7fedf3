//! Full device graphs: who can take part ([`support`]), which mode follows ([`resolve`]), which sizes are captured
//! ([`sizes`]), how a capture goes ([`capture`]) and which graph serves a batch ([`dispatch`]).

pub mod capture;
pub mod mode;
pub mod support;

pub use capture::CaptureState;
pub use mode::GraphMode;
pub use support::{DriverRule, GraphSupport, QueryLenSupport};
