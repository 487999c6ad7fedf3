//! Error codes and the errors of this crate.

use std::fmt;
use std::path::PathBuf;

/// Result of every fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

// Codes are integers, not a Rust enum: a later release may return a code that nobody here has heard of.
macro_rules! codes {
    ($type:ident, $unknown:literal: $($constant:ident = $value:literal, $name:literal, $message:literal;)*) => {
        impl $type {
            $(
                #[doc = concat!("`", $name, "`: ", $message, ".")]
                pub const $constant: Self = Self($value);
            )*

            /// Every code that this crate knows, ascending.
            pub const KNOWN: &'static [Self] = &[$(Self($value)),*];

            /// The code's name in C.
            pub const fn name(self) -> &'static str {
                match self.0 {
                    $($value => $name,)*
                    _ => $unknown,
                }
            }

            /// What the code means, in this crate's words.
            pub const fn message(self) -> &'static str {
                match self.0 {
                    $($value => $message,)*
                    _ => "a code that this crate does not know",
                }
            }

            /// Whether the call succeeded.
            pub const fn is_success(self) -> bool {
                self.0 == 0
            }
        }

        impl fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({})", self.name(), self.0)
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{} ({}): {}", self.name(), self.0, self.message())
            }
        }

        impl std::error::Error for $type {}
    };
}

/// What a HIP call returns (`hipError_t`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct HipError(pub i32);

/// What a hipRTC call returns (`hiprtcResult`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct HiprtcError(pub i32);

codes! { HipError, "unknown hipError_t":
    SUCCESS = 0, "hipSuccess", "no error";
    INVALID_VALUE = 1, "hipErrorInvalidValue", "an argument is null or out of range";
    OUT_OF_MEMORY = 2, "hipErrorOutOfMemory", "out of memory";
    NOT_INITIALIZED = 3, "hipErrorNotInitialized", "the runtime is not initialised";
    DEINITIALIZED = 4, "hipErrorDeinitialized", "the runtime is shutting down";
    PROFILER_DISABLED = 5, "hipErrorProfilerDisabled", "the profiler is disabled";
    PROFILER_NOT_INITIALIZED = 6, "hipErrorProfilerNotInitialized", "the profiler is not initialised";
    PROFILER_ALREADY_STARTED = 7, "hipErrorProfilerAlreadyStarted", "the profiler is already running";
    PROFILER_ALREADY_STOPPED = 8, "hipErrorProfilerAlreadyStopped", "the profiler is already stopped";
    INVALID_CONFIGURATION = 9, "hipErrorInvalidConfiguration", "the launch configuration is impossible";
    INVALID_PITCH_VALUE = 12, "hipErrorInvalidPitchValue", "the pitch is out of range";
    INVALID_SYMBOL = 13, "hipErrorInvalidSymbol", "no such device symbol";
    INVALID_DEVICE_POINTER = 17, "hipErrorInvalidDevicePointer", "not a device pointer";
    INVALID_MEMCPY_DIRECTION = 21, "hipErrorInvalidMemcpyDirection", "the copy direction does not fit its pointers";
    INSUFFICIENT_DRIVER = 35, "hipErrorInsufficientDriver", "the driver is older than the runtime needs";
    MISSING_CONFIGURATION = 52, "hipErrorMissingConfiguration", "no launch configuration was given";
    PRIOR_LAUNCH_FAILURE = 53, "hipErrorPriorLaunchFailure", "an earlier launch failed";
    INVALID_DEVICE_FUNCTION = 98, "hipErrorInvalidDeviceFunction", "no such function on this device";
    NO_DEVICE = 100, "hipErrorNoDevice", "no ROCm-capable device";
    INVALID_DEVICE = 101, "hipErrorInvalidDevice", "no device of that index";
    INVALID_IMAGE = 200, "hipErrorInvalidImage", "not a code object";
    INVALID_CONTEXT = 201, "hipErrorInvalidContext", "no such context";
    CONTEXT_ALREADY_CURRENT = 202, "hipErrorContextAlreadyCurrent", "the context is already current";
    MAP_FAILED = 205, "hipErrorMapFailed", "mapping failed";
    UNMAP_FAILED = 206, "hipErrorUnmapFailed", "unmapping failed";
    ARRAY_IS_MAPPED = 207, "hipErrorArrayIsMapped", "the array is mapped";
    ALREADY_MAPPED = 208, "hipErrorAlreadyMapped", "already mapped";
    NO_BINARY_FOR_GPU = 209, "hipErrorNoBinaryForGpu", "the code object holds no code for this GPU";
    ALREADY_ACQUIRED = 210, "hipErrorAlreadyAcquired", "already acquired";
    NOT_MAPPED = 211, "hipErrorNotMapped", "not mapped";
    NOT_MAPPED_AS_ARRAY = 212, "hipErrorNotMappedAsArray", "not mapped as an array";
    NOT_MAPPED_AS_POINTER = 213, "hipErrorNotMappedAsPointer", "not mapped as a pointer";
    ECC_NOT_CORRECTABLE = 214, "hipErrorECCNotCorrectable", "a memory error beyond correction";
    UNSUPPORTED_LIMIT = 215, "hipErrorUnsupportedLimit", "no such limit on this device";
    CONTEXT_ALREADY_IN_USE = 216, "hipErrorContextAlreadyInUse", "the context is in use by another thread";
    PEER_ACCESS_UNSUPPORTED = 217, "hipErrorPeerAccessUnsupported", "these devices cannot reach each other's memory";
    INVALID_KERNEL_FILE = 218, "hipErrorInvalidKernelFile", "the kernel file is invalid";
    INVALID_GRAPHICS_CONTEXT = 219, "hipErrorInvalidGraphicsContext", "no such graphics context";
    INVALID_SOURCE = 300, "hipErrorInvalidSource", "the source is invalid";
    FILE_NOT_FOUND = 301, "hipErrorFileNotFound", "no such file";
    SHARED_OBJECT_SYMBOL_NOT_FOUND = 302, "hipErrorSharedObjectSymbolNotFound", "a shared object lacks a symbol";
    SHARED_OBJECT_INIT_FAILED = 303, "hipErrorSharedObjectInitFailed", "a shared object could not be initialised";
    OPERATING_SYSTEM = 304, "hipErrorOperatingSystem", "a call of the operating system failed";
    INVALID_HANDLE = 400, "hipErrorInvalidHandle", "no such stream, event, module or graph";
    ILLEGAL_STATE = 401, "hipErrorIllegalState", "the object is not in a state for this call";
    NOT_FOUND = 500, "hipErrorNotFound", "no such symbol";
    NOT_READY = 600, "hipErrorNotReady", "the work has not ended yet";
    ILLEGAL_ADDRESS = 700, "hipErrorIllegalAddress", "a kernel touched an illegal address";
    LAUNCH_OUT_OF_RESOURCES = 701, "hipErrorLaunchOutOfResources", "a block needs more registers or shared memory than there are";
    LAUNCH_TIME_OUT = 702, "hipErrorLaunchTimeOut", "a kernel ran too long";
    PEER_ACCESS_ALREADY_ENABLED = 704, "hipErrorPeerAccessAlreadyEnabled", "peer access is already enabled";
    PEER_ACCESS_NOT_ENABLED = 705, "hipErrorPeerAccessNotEnabled", "peer access is not enabled";
    SET_ON_ACTIVE_PROCESS = 708, "hipErrorSetOnActiveProcess", "not possible once a device is in use";
    CONTEXT_IS_DESTROYED = 709, "hipErrorContextIsDestroyed", "the context was destroyed";
    ASSERT = 710, "hipErrorAssert", "an assertion failed in a kernel";
    HOST_MEMORY_ALREADY_REGISTERED = 712, "hipErrorHostMemoryAlreadyRegistered", "the host memory is already registered";
    HOST_MEMORY_NOT_REGISTERED = 713, "hipErrorHostMemoryNotRegistered", "the host memory is not registered";
    LAUNCH_FAILURE = 719, "hipErrorLaunchFailure", "a kernel failed while it ran";
    COOPERATIVE_LAUNCH_TOO_LARGE = 720, "hipErrorCooperativeLaunchTooLarge", "more blocks than can be resident together";
    NOT_SUPPORTED = 801, "hipErrorNotSupported", "not supported on this device";
    STREAM_CAPTURE_UNSUPPORTED = 900, "hipErrorStreamCaptureUnsupported", "not permitted while a stream is captured";
    STREAM_CAPTURE_INVALIDATED = 901, "hipErrorStreamCaptureInvalidated", "an earlier error broke the capture";
    STREAM_CAPTURE_MERGE = 902, "hipErrorStreamCaptureMerge", "two captures would be merged";
    STREAM_CAPTURE_UNMATCHED = 903, "hipErrorStreamCaptureUnmatched", "the capture did not begin on this stream";
    STREAM_CAPTURE_UNJOINED = 904, "hipErrorStreamCaptureUnjoined", "a forked stream was not joined before the capture ended";
    STREAM_CAPTURE_ISOLATION = 905, "hipErrorStreamCaptureIsolation", "work outside the capture would depend on work inside";
    STREAM_CAPTURE_IMPLICIT = 906, "hipErrorStreamCaptureImplicit", "the capture would depend on the default stream";
    CAPTURED_EVENT = 907, "hipErrorCapturedEvent", "the event was recorded in a capture";
    STREAM_CAPTURE_WRONG_THREAD = 908, "hipErrorStreamCaptureWrongThread", "the capture began on another thread";
    GRAPH_EXEC_UPDATE_FAILURE = 910, "hipErrorGraphExecUpdateFailure", "the change does not fit the instantiated graph";
    INVALID_CHANNEL_DESCRIPTOR = 911, "hipErrorInvalidChannelDescriptor", "the channel descriptor is invalid";
    INVALID_TEXTURE = 912, "hipErrorInvalidTexture", "the texture is invalid";
    UNKNOWN = 999, "hipErrorUnknown", "an unknown error";
    RUNTIME_MEMORY = 1052, "hipErrorRuntimeMemory", "the HSA runtime's memory call failed";
    RUNTIME_OTHER = 1053, "hipErrorRuntimeOther", "the HSA runtime failed";
}

codes! { HiprtcError, "unknown hiprtcResult":
    SUCCESS = 0, "HIPRTC_SUCCESS", "no error";
    OUT_OF_MEMORY = 1, "HIPRTC_ERROR_OUT_OF_MEMORY", "out of memory";
    PROGRAM_CREATION_FAILURE = 2, "HIPRTC_ERROR_PROGRAM_CREATION_FAILURE", "the program could not be made";
    INVALID_INPUT = 3, "HIPRTC_ERROR_INVALID_INPUT", "an argument is null or out of range";
    INVALID_PROGRAM = 4, "HIPRTC_ERROR_INVALID_PROGRAM", "no such program";
    INVALID_OPTION = 5, "HIPRTC_ERROR_INVALID_OPTION", "the compiler does not know an option";
    COMPILATION = 6, "HIPRTC_ERROR_COMPILATION", "the source does not compile";
    BUILTIN_OPERATION_FAILURE = 7, "HIPRTC_ERROR_BUILTIN_OPERATION_FAILURE", "the compiler failed inside";
    NO_NAME_EXPRESSIONS_AFTER_COMPILATION = 8, "HIPRTC_ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION", "name expressions come before compilation";
    NO_LOWERED_NAMES_BEFORE_COMPILATION = 9, "HIPRTC_ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION", "lowered names exist after compilation only";
    NAME_EXPRESSION_NOT_VALID = 10, "HIPRTC_ERROR_NAME_EXPRESSION_NOT_VALID", "the name expression was not registered";
    INTERNAL_ERROR = 11, "HIPRTC_ERROR_INTERNAL_ERROR", "an internal error of the compiler";
}

/// One file that was tried, and why it would not do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attempt {
    /// The path or bare name that the loader was given.
    pub candidate: PathBuf,
    /// What the loader said, or which function the library lacks.
    pub problem: String,
}

/// What went wrong. Match on the variant; the message is for people.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// No usable library was found.
    Unavailable {
        /// The library looked for.
        library: &'static str,
        /// Every file tried, in order.
        tried: Vec<Attempt>,
    },
    /// The library is there but too old for this call.
    Unsupported {
        /// The function that it lacks.
        symbol: &'static str,
    },
    /// The library is there, but it sees no GPU.
    NoDevice {
        /// What it returned when asked for devices.
        code: HipError,
        /// The library's text for the code.
        message: String,
    },
    /// A HIP call failed.
    Hip {
        /// The function.
        call: &'static str,
        /// What it returned.
        code: HipError,
        /// The library's name and text for the code.
        message: String,
    },
    /// A hipRTC call failed.
    Hiprtc {
        /// The function.
        call: &'static str,
        /// What it returned.
        code: HiprtcError,
        /// The library's text for the code.
        message: String,
    },
    /// Source that does not compile, or an option that the compiler does not take.
    Compile {
        /// What the compiler returned.
        code: HiprtcError,
        /// The compiler's log.
        log: String,
    },
    /// Text for C holds a zero byte.
    InteriorNul {
        /// Name of the argument.
        argument: &'static str,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unavailable { library, tried } => {
                write!(f, "{library} is unavailable; tried:")?;
                for Attempt { candidate, problem } in tried {
                    write!(f, "\n  {}: {problem}", candidate.display())?;
                }
                if tried.is_empty() {
                    write!(f, " nothing, HIP is opened on Linux only")?;
                }
                Ok(())
            }
            Self::Unsupported { symbol } => write!(f, "this release of HIP has no {symbol}"),
            Self::NoDevice { code, message } => write!(f, "no HIP device: {} ({}): {message}", code.name(), code.0),
            Self::Hip { call, code, message } => {
                write!(f, "{call} failed with {} ({}): {message}", code.name(), code.0)
            }
            Self::Hiprtc { call, code, message } => {
                write!(f, "{call} failed with {} ({}): {message}", code.name(), code.0)
            }
            Self::Compile { code, log } => write!(f, "{} ({}):\n{log}", code.name(), code.0),
            Self::InteriorNul { argument } => write!(f, "argument `{argument}` holds a zero byte"),
        }
    }
}

impl std::error::Error for Error {}
