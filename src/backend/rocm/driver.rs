//! The HIP runtime: opened at run time by [`hip_sys`], its errors as this crate's.

use hip_sys::{Error as HipSysError, Hip, HipError};

use crate::error::{Error, Result};

/// Name of the backend.
pub(super) const NAME: &str = "rocm";

/// Packages that hold what is missing, as a way to mend it.
const HINT: &str =
    "install AMD's HIP runtime (libamdhip64, and libhiprtc for run-time compilation), or set ROCM_PATH to it";

/// The runtime, opened once per process and never closed.
///
/// # Errors
/// [`Error::Unavailable`] with every file that was tried.
pub(super) fn hip() -> Result<&'static Hip> {
    Hip::load().map_err(typed)
}

/// An error of the bindings as one of this crate.
pub(super) fn typed(error: HipSysError) -> Error {
    let text = error.to_string();
    match error {
        HipSysError::Unavailable { library, .. } => {
            // The bindings' own text begins with the library, which this error names itself.
            let tried = text.split_once("; ").map_or(text.as_str(), |(_, tried)| tried);
            Error::Unavailable { backend: NAME, library, reason: format!("{HINT}; {tried}") }
        }
        HipSysError::Unsupported { symbol } => Error::Unavailable {
            backend: NAME,
            library: "libamdhip64",
            reason: format!("this release has no {symbol}; update ROCm"),
        },
        HipSysError::NoDevice { code, message } => {
            let reason = format!("the runtime answers {} ({}: {message})", code.0, code.name());
            Error::NoDevice { backend: NAME, index: 0, reason }
        }
        HipSysError::Hip { call, code, message } => {
            Error::Driver { backend: NAME, call, code: code.0, message: format!("{}: {message}", code.name()) }
        }
        HipSysError::Hiprtc { call, code, message } => {
            Error::Driver { backend: NAME, call, code: code.0, message: format!("{}: {message}", code.name()) }
        }
        HipSysError::InteriorNul { argument } => Error::argument(argument, "a zero byte inside"),
        _ => Error::Unavailable { backend: NAME, library: "libamdhip64", reason: text },
    }
}

/// Whether a call failed for want of memory.
pub(super) fn is_out_of_memory(error: &HipSysError) -> bool {
    matches!(error, HipSysError::Hip { code: HipError::OUT_OF_MEMORY, .. })
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use hip_sys::Attempt;

    use super::*;

    #[test]
    fn a_missing_library_keeps_what_was_tried_and_says_what_to_do() {
        let tried =
            vec![Attempt { candidate: PathBuf::from("/opt/x/libamdhip64.so.6"), problem: "no such file".into() }];
        let error = typed(HipSysError::Unavailable { library: "libamdhip64", tried });
        let Error::Unavailable { backend: "rocm", library: "libamdhip64", reason } = &error else {
            panic!("{error:?}")
        };
        assert!(reason.contains("/opt/x/libamdhip64.so.6: no such file") && reason.contains("ROCM_PATH"), "{reason}");
        assert_eq!(reason.matches("unavailable").count(), 0, "{reason}");
    }

    #[test]
    fn codes_keep_their_number_name_and_call() {
        let error =
            HipSysError::Hip { call: "hipMalloc", code: HipError::ILLEGAL_ADDRESS, message: "bad address".into() };
        assert_eq!(typed(error).to_string(), "rocm: hipMalloc failed with 700 (hipErrorIllegalAddress: bad address)");
        let missing = typed(HipSysError::NoDevice { code: HipError::NO_DEVICE, message: "none detected".into() });
        assert!(matches!(&missing, Error::NoDevice { reason, .. } if reason.contains("none detected")), "{missing}");
        assert!(is_out_of_memory(&HipSysError::Hip {
            call: "hipMalloc",
            code: HipError::OUT_OF_MEMORY,
            message: String::new()
        }));
    }
}
