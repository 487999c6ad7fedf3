//! What the shared tests need to know of AMD.

use hip_sys::types::{hipStream_t, hipStreamCaptureModeThreadLocal};
use hip_sys::{Error, Hip, Result};
use latentwave::backend::rocm::RocmStream;

pub(crate) use latentwave::Rocm as Gpu;

/// Name of the run-time compiler.
pub(crate) const COMPILER: &str = "hiprtc";

/// Codes for launches that cannot be: releases differ.
pub(crate) const REFUSED_LAUNCH: &[i32] = &[1, 9, 701];

/// Whether a capture may go on after a call that it forbids: old releases refuse the call, or let it pass, and record on.
pub(crate) const MAY_SURVIVE: bool = true;

/// A call that breaks a capture: its name, the call, and a word of the error that follows.
type Breaker<'a> = (&'static str, Box<dyn Fn() -> i32 + 'a>, &'static str);

pub(crate) fn breakers<'a>(raw: &'a Raw, stream: &'a RocmStream) -> [Breaker<'a>; 3] {
    let handle = stream.handle() as hipStream_t;
    // SAFETY: the stream is live. Memory that is handed out in spite of the capture is lost to the test.
    unsafe {
        [
            ("a synchronize inside", Box::new(move || code(raw.hip.stream_synchronize(handle))), "Invalidated"),
            ("an allocation inside", Box::new(|| code(raw.hip.malloc(4096))), "Invalidated"),
            ("a captured allocation", Box::new(move || code(raw.hip.malloc_async(4096, handle))), "runs once"),
        ]
    }
}

fn code<T>(result: Result<T>) -> i32 {
    match result {
        Ok(_) => 0,
        Err(Error::Hip { code, .. }) => code.0,
        Err(other) => panic!("{other}"),
    }
}

/// The runtime, as a caller may use it beside this library, on the same streams.
pub(crate) struct Raw {
    hip: &'static Hip,
}

impl Raw {
    pub(crate) fn open() -> Self {
        Self { hip: Hip::load().unwrap() }
    }

    /// Begins a capture behind the library's back.
    pub(crate) fn begin_capture(&self, stream: &RocmStream) -> i32 {
        // SAFETY: the stream is live.
        code(unsafe { self.hip.begin_capture(stream.handle() as hipStream_t, hipStreamCaptureModeThreadLocal) })
    }

    /// Ends it. The graph is lost to the test.
    pub(crate) fn end_capture(&self, stream: &RocmStream) -> i32 {
        // SAFETY: the stream is live.
        code(unsafe { self.hip.end_capture(stream.handle() as hipStream_t) })
    }

    /// Gives work to a stream of its own that waits for this one's, which draws it into a capture. It is lost to the test.
    pub(crate) fn fork(&self, stream: &RocmStream) -> Result<()> {
        let stream = stream.handle() as hipStream_t;
        let (event, other) = (self.hip.event_create(0)?, self.hip.stream_create(1)?);
        // SAFETY: all are live.
        unsafe {
            self.hip.event_record(event, stream)?;
            self.hip.stream_wait_event(other, event)?;
            let launch = self.hip.api().hipLaunchHostFunc.expect("HIP 5.3 or later");
            self.hip.check("hipLaunchHostFunc", launch(other, Some(nothing), std::ptr::null_mut()))
        }
    }
}

/// Work for a stream that takes no memory.
unsafe extern "C" fn nothing(_: *mut std::ffi::c_void) {}
