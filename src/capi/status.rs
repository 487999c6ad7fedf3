//! How calls end: status codes, the last error's text, and the guard that lets nothing unwind into C.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::error::{Error, Result};

/// Version of the functions and structures of this header. It changes when something that was there is changed; what is only
/// added leaves it.
pub const LW_ABI_VERSION: u32 = 1;

/// How a call ended. 0 is success; what is not listed here will be an error, too.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum lw_status {
    /// Done, or enqueued.
    LW_OK = 0,
    /// An argument has a value that no such call can take; the text names it.
    LW_ERROR_ARGUMENT = 1,
    /// Shapes do not fit each other.
    LW_ERROR_SHAPE = 2,
    /// An element type that this call does not take.
    LW_ERROR_DTYPE = 3,
    /// A page id or a length outside the cache or the block table (where the host can see them).
    LW_ERROR_OUT_OF_RANGE = 4,
    /// More than was declared or reserved.
    LW_ERROR_CAPACITY = 5,
    /// The backend or its kernels cannot do this on this device.
    LW_ERROR_UNSUPPORTED = 6,
    /// A vendor's library is missing or too old, or this library was built without that backend.
    LW_ERROR_UNAVAILABLE = 7,
    /// The library is there, the device is not.
    LW_ERROR_NO_DEVICE = 8,
    /// Device or host memory ran out.
    LW_ERROR_OUT_OF_MEMORY = 9,
    /// A kernel could not be compiled; the text has the compiler's log.
    LW_ERROR_COMPILE = 10,
    /// A graph could not be captured, or a call came in a state of capture that does not allow it.
    LW_ERROR_GRAPH = 11,
    /// The vendor's driver refused a call; the text has its name and code.
    LW_ERROR_DRIVER = 12,
    /// A file could not be read, written or understood.
    LW_ERROR_FILE = 13,
    /// The caller's own callback returned something else than 0.
    LW_ERROR_CALLBACK = 14,
    /// A defect of this library. The handles of the call should be closed.
    LW_ERROR_INTERNAL = 15,
}

use lw_status::*;

/// Why a call failed.
pub(super) enum Failure {
    Error(Error),
    /// The caller's callback returned this.
    Callback(i32),
    Panic(Box<dyn Any + Send>),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Error(error)
    }
}

impl Failure {
    fn status(&self) -> lw_status {
        match self {
            Self::Callback(_) => LW_ERROR_CALLBACK,
            Self::Panic(_) => LW_ERROR_INTERNAL,
            Self::Error(error) => match error {
                Error::Argument { .. } | Error::UnevenRows { .. } | Error::CausalDcp { .. } => LW_ERROR_ARGUMENT,
                Error::Shape { .. } => LW_ERROR_SHAPE,
                Error::DType { .. } => LW_ERROR_DTYPE,
                Error::PageOutOfRange { .. } | Error::SeqLenOutOfRange { .. } => LW_ERROR_OUT_OF_RANGE,
                Error::Capacity { .. } | Error::WorkspaceLocked { .. } | Error::WorkspaceInUse { .. } => {
                    LW_ERROR_CAPACITY
                }
                Error::Unsupported { .. } => LW_ERROR_UNSUPPORTED,
                Error::Unavailable { .. } => LW_ERROR_UNAVAILABLE,
                Error::NoDevice { .. } => LW_ERROR_NO_DEVICE,
                Error::OutOfMemory { .. } => LW_ERROR_OUT_OF_MEMORY,
                Error::Compile { .. } => LW_ERROR_COMPILE,
                Error::GraphState { .. }
                | Error::CaptureFailed { .. }
                | Error::CaptureQueryTooLong { .. }
                | Error::CaptureTooManyRequests { .. }
                | Error::InconsistentGraphSupport { .. }
                | Error::GraphModeUnsupported { .. }
                | Error::NoCaptureSizes { .. } => LW_ERROR_GRAPH,
                Error::Driver { .. } => LW_ERROR_DRIVER,
                Error::Io { .. } | Error::Parse { .. } => LW_ERROR_FILE,
            },
        }
    }

    fn text(&self) -> String {
        match self {
            Self::Error(error) => error.to_string(),
            Self::Callback(code) => match last_error() {
                text if text.is_empty() => format!("the callback returned {code}"),
                text => format!("the callback returned {code}; before that: {text}"),
            },
            Self::Panic(payload) => {
                let text = payload.downcast_ref::<String>().map(String::as_str);
                let text = text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("no words for it");
                format!("a defect of latentwave {}, please report it: {text}", env!("CARGO_PKG_VERSION"))
            }
        }
    }
}

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

/// The text of this thread's last failure, if it has not ended yet.
fn last_error() -> String {
    let text = |error: &RefCell<CString>| error.borrow().to_string_lossy().into_owned();
    LAST_ERROR.try_with(text).unwrap_or_default()
}

/// Notes a text as this thread's last failure.
pub(super) fn set_last_error(text: &str) {
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    // A thread that is ending has nobody to ask for it.
    let _ = LAST_ERROR.try_with(|error| error.replace(text));
}

/// Runs the body of a call: an error or a panic becomes a status and a text.
pub(super) fn guard(body: impl FnOnce() -> Result<(), Failure>) -> lw_status {
    let failure = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => return LW_OK,
        Ok(Err(failure)) => failure,
        Err(payload) => Failure::Panic(payload),
    };
    set_last_error(&failure.text());
    failure.status()
}

/// Text of the last call that failed on the calling thread, UTF-8; empty if none has. Valid until the next failure on that thread
/// or its end. Never NULL.
#[unsafe(no_mangle)]
pub extern "C" fn lw_last_error() -> *const c_char {
    LAST_ERROR.try_with(|error| error.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// Name of a status as this header spells it, `LW_ERROR_SHAPE` for instance; "unknown status" for numbers that are none. Static.
#[unsafe(no_mangle)]
pub extern "C" fn lw_status_name(status: i32) -> *const c_char {
    let names = [
        c"LW_OK",
        c"LW_ERROR_ARGUMENT",
        c"LW_ERROR_SHAPE",
        c"LW_ERROR_DTYPE",
        c"LW_ERROR_OUT_OF_RANGE",
        c"LW_ERROR_CAPACITY",
        c"LW_ERROR_UNSUPPORTED",
        c"LW_ERROR_UNAVAILABLE",
        c"LW_ERROR_NO_DEVICE",
        c"LW_ERROR_OUT_OF_MEMORY",
        c"LW_ERROR_COMPILE",
        c"LW_ERROR_GRAPH",
        c"LW_ERROR_DRIVER",
        c"LW_ERROR_FILE",
        c"LW_ERROR_CALLBACK",
        c"LW_ERROR_INTERNAL",
    ];
    usize::try_from(status).ok().and_then(|index| names.get(index)).unwrap_or(&c"unknown status").as_ptr()
}

/// Version of the library, `0.1.0` for instance. Static.
#[unsafe(no_mangle)]
pub extern "C" fn lw_version() -> *const c_char {
    const TEXT: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    TEXT.as_ptr().cast()
}

/// The `LW_ABI_VERSION` that the library was built with. Use no other function of a library where it is not that of the header.
#[unsafe(no_mangle)]
pub extern "C" fn lw_abi_version() -> u32 {
    LW_ABI_VERSION
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;

    fn text(pointer: *const c_char) -> String {
        // SAFETY: the functions of this file return terminated strings that nothing frees meanwhile.
        unsafe { CStr::from_ptr(pointer) }.to_str().unwrap().to_owned()
    }

    #[test]
    fn every_status_has_the_name_of_its_variant() {
        for number in 0..16 {
            // SAFETY: 0 to 15 are the variants' numbers.
            let status = unsafe { std::mem::transmute::<i32, lw_status>(number) };
            assert_eq!(text(lw_status_name(number)), format!("{status:?}"));
        }
        for other in [-1, 16, i32::MIN, i32::MAX] {
            assert_eq!(text(lw_status_name(other)), "unknown status");
        }
    }

    #[test]
    fn a_panic_becomes_a_status_and_a_text_of_this_thread() {
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| {}));
        let status = guard(|| panic!("odd {}", 1));
        std::panic::set_hook(hook);
        assert_eq!(status, LW_ERROR_INTERNAL);
        assert!(text(lw_last_error()).contains("odd 1"));
        assert_eq!(std::thread::spawn(|| text(lw_last_error())).join().unwrap(), "");
        assert_eq!(guard(|| { Ok(()) }), LW_OK);
        assert!(text(lw_last_error()).contains("odd 1"), "a success leaves the text alone");
    }

    #[test]
    fn versions() {
        assert_eq!(text(lw_version()), env!("CARGO_PKG_VERSION"));
        assert_eq!(lw_abi_version(), LW_ABI_VERSION);
    }
}
