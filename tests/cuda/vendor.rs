//! What the shared tests need to know of NVIDIA.

use std::ffi::c_void;

use latentwave::backend::cuda::CudaStream;

pub(crate) use latentwave::Cuda as Gpu;

/// Name of the run-time compiler.
pub(crate) const COMPILER: &str = "nvrtc";

/// Codes for launches that cannot be.
pub(crate) const REFUSED_LAUNCH: &[i32] = &[1];

/// Whether a capture may go on after a call that it forbids.
pub(crate) const MAY_SURVIVE: bool = false;

/// A call that breaks a capture: its name, the call, and a word of the error that follows.
type Breaker<'a> = (&'static str, Box<dyn Fn() -> i32 + 'a>, &'static str);

pub(crate) fn breakers<'a>(raw: &'a Raw, stream: &'a CudaStream) -> [Breaker<'a>; 4] {
    [
        ("a synchronize inside", Box::new(|| raw.synchronize(stream)), "INVALIDATED"),
        ("an allocation inside", Box::new(|| raw.mem_alloc()), "INVALIDATED"),
        ("a captured allocation", Box::new(|| raw.mem_alloc_async(stream)), "runs once"),
        ("another stream drawn in and not joined", Box::new(|| raw.fork(stream)), "UNJOINED"),
    ]
}

/// Driver functions that a caller may use beside this library, on the same streams.
pub(crate) struct Raw {
    library: libloading::Library,
}

impl Raw {
    pub(crate) fn open() -> Self {
        // SAFETY: the backend has opened the same library before.
        Self { library: unsafe { libloading::Library::new("libcuda.so.1").unwrap() } }
    }

    /// Begins a capture behind the library's back.
    pub(crate) fn begin_capture(&self, stream: &CudaStream) -> i32 {
        // SAFETY: the function's published type; the stream is live. Mode 1: only this thread's calls can break it.
        unsafe {
            type Call = unsafe extern "C" fn(u64, i32) -> i32;
            self.library.get::<Call>("cuStreamBeginCapture_v2").unwrap()(stream.handle(), 1)
        }
    }

    /// Ends it. The graph is lost to the test.
    pub(crate) fn end_capture(&self, stream: &CudaStream) -> i32 {
        let mut graph = std::ptr::null_mut::<c_void>();
        // SAFETY: the function's published type; the stream is live.
        unsafe {
            type Call = unsafe extern "C" fn(u64, *mut *mut c_void) -> i32;
            self.library.get::<Call>("cuStreamEndCapture").unwrap()(stream.handle(), &mut graph)
        }
    }

    /// Gives work to a stream of its own that waits for this one's, which draws it into a capture. It is lost to the test.
    fn fork(&self, stream: &CudaStream) -> i32 {
        let (mut event, mut other) = (0_u64, 0_u64);
        // SAFETY: the functions' published types; the stream is live.
        unsafe {
            type Make = unsafe extern "C" fn(*mut u64, u32) -> i32;
            let make = |name: &str, handle: &mut u64| self.library.get::<Make>(name).unwrap()(handle, 1);
            let record = self.library.get::<unsafe extern "C" fn(u64, u64) -> i32>("cuEventRecord").unwrap();
            let wait = self.library.get::<unsafe extern "C" fn(u64, u64, u32) -> i32>("cuStreamWaitEvent").unwrap();
            type Work = unsafe extern "C" fn(u64, extern "C" fn(*mut c_void), *mut c_void) -> i32;
            let work = self.library.get::<Work>("cuLaunchHostFunc").unwrap();
            make("cuEventCreate", &mut event)
                | make("cuStreamCreate", &mut other)
                | record(event, stream.handle())
                | wait(other, event, 0)
                | work(other, nothing, std::ptr::null_mut())
        }
    }

    fn synchronize(&self, stream: &CudaStream) -> i32 {
        // SAFETY: the function's published type; the stream is live.
        unsafe {
            let call = self.library.get::<unsafe extern "C" fn(u64) -> i32>("cuStreamSynchronize").unwrap();
            call(stream.handle())
        }
    }

    fn mem_alloc(&self) -> i32 {
        let mut addr = 0_u64;
        // SAFETY: the function's published type. The call is expected to fail; otherwise the memory is lost to the test.
        unsafe {
            let call = self.library.get::<unsafe extern "C" fn(*mut u64, usize) -> i32>("cuMemAlloc_v2").unwrap();
            call(&mut addr, 4096)
        }
    }

    fn mem_alloc_async(&self, stream: &CudaStream) -> i32 {
        let mut addr = 0_u64;
        // SAFETY: the function's published type; the stream is live.
        unsafe {
            type Call = unsafe extern "C" fn(*mut u64, usize, *mut c_void) -> i32;
            let call = self.library.get::<Call>("cuMemAllocAsync").unwrap();
            call(&mut addr, 4096, stream.handle() as *mut c_void)
        }
    }
}

/// Work for a stream that takes no memory.
extern "C" fn nothing(_: *mut c_void) {}
