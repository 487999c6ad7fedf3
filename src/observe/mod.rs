//! What this crate tells those who watch it. Both features are off by default, and nothing is compiled in without them.
//!
//! With `tracing`, spans under the target `latentwave`:
//!
//! | span | level | fields | events inside |
//! | --- | --- | --- | --- |
//! | `session` | info | `backend`, `max_num_seqs`, `max_seq_len`, `query_len` | `graph mode` per reason of the resolver (`mode`, `reason`); `capture sizes` per reason (`reason`); `workspace …` at debug level |
//! | `plan` | debug | `batch`, `query_len`, `max_seq_len` | |
//! | `compile` | info | `kernel`, `arch`, `compiler` | |
//! | `capture` | info | `mode`, `num_tokens` | `not captured` (`error`) |
//! | `step` | debug | `num_seqs`, `query_len` | those below |
//! | `dispatch` | debug | | `dispatched` (`mode`, `num_tokens`, `padding`, `reason`: why no full graph) |
//! | `replay` | debug | `num_tokens` | |
//! | `enqueue` | debug | `num_tokens` | |
//!
//! With `profiler`, the same as nested ranges of NVTX and rocTX, named `latentwave: SPAN`, in the timelines of Nsight Systems and
//! rocprof. Their libraries are opened at run time; where there is none, there are no ranges.

#[cfg(feature = "profiler")]
mod profiler;

use crate::graph::{CaptureSizes, Resolved};

/// Ends its span, and its range in a profiler, when dropped.
pub(crate) struct Observed {
    #[cfg(feature = "tracing")]
    pub(crate) _span: tracing::span::EnteredSpan,
    #[cfg(feature = "profiler")]
    pub(crate) _range: profiler::Range,
}

#[cfg(feature = "profiler")]
pub(crate) fn range(name: &'static std::ffi::CStr) -> profiler::Range {
    profiler::Range::new(name)
}

/// `span!(INFO, "name", field = value, ...)`: begins what [`Observed`] ends. Values are not looked at unless someone watches.
macro_rules! span {
    ($level:ident, $name:literal $(, $($fields:tt)*)?) => {
        $crate::observe::Observed {
            #[cfg(feature = "tracing")]
            _span: tracing::span!(target: "latentwave", tracing::Level::$level, $name $(, $($fields)*)?).entered(),
            #[cfg(feature = "profiler")]
            _range: {
                const NAME: &std::ffi::CStr =
                    match std::ffi::CStr::from_bytes_with_nul(concat!("latentwave: ", $name, "\0").as_bytes()) {
                        Ok(name) => name,
                        Err(_) => panic!("a name without NUL"),
                    };
                $crate::observe::range(NAME)
            },
        }
    };
}

/// `event!(INFO, field = value, ..., "message")`.
macro_rules! event {
    ($level:ident, $($fields:tt)*) => {
        #[cfg(feature = "tracing")]
        tracing::event!(target: "latentwave", tracing::Level::$level, $($fields)*)
    };
}

pub(crate) use {event, span};

/// Tells of a session's graph mode and sizes, reason by reason.
pub(crate) fn resolution(resolved: &Resolved, sizes: &CaptureSizes) {
    #[cfg(feature = "tracing")]
    {
        for reason in &resolved.because {
            event!(INFO, mode = %resolved.mode, %reason, "graph mode");
        }
        for reason in &sizes.because {
            event!(INFO, %reason, "capture sizes");
        }
    }
    #[cfg(not(feature = "tracing"))]
    let _ = (resolved, sizes);
}
