//! What the tests share: devices, data, a kernel to run, and the driver beside the library.

use std::ffi::c_void;

use latentwave::backend::cuda::{CudaBuffer, CudaKernel, CudaStream};
use latentwave::kernel::params::MergeParams;
use latentwave::kernel::{Entry, Launch, Params, Variant};
use latentwave::{Backend, Cuda, DType, Error, Result};

use latentwave::testing;

/// Says what could not be run in the test of this thread.
pub(super) fn not_run(name: &str, reason: &dyn std::fmt::Display) {
    testing::not_run(std::thread::current().name().unwrap_or("a test"), name, reason);
}

pub(super) fn on_each_device(test: impl Fn(&Cuda)) {
    match Cuda::devices() {
        Ok(devices) if devices.is_empty() => not_run("cuda", &"the driver sees no GPU"),
        Ok(devices) => (0..devices.len()).for_each(|index| test(&Cuda::new(index).unwrap())),
        Err(error) => not_run("cuda", &error),
    }
}

/// Reproducible bytes that differ from seed to seed.
pub(super) fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    std::iter::repeat_with(next).take(bytes).collect()
}

/// Reproducible finite bf16 values, as bytes.
pub(super) fn noise_bf16(seed: u64, count: usize) -> Vec<u8> {
    noise(seed, count).iter().flat_map(|&byte| half::bf16::from_f32(f32::from(byte) - 128.0).to_le_bytes()).collect()
}

pub(super) fn upload(cuda: &Cuda, stream: &CudaStream, buffer: &CudaBuffer, bytes: &[u8]) {
    // SAFETY: the buffers of these tests are as long as what is copied, and each test's streams are its own.
    unsafe { cuda.upload(stream, cuda.addr(buffer), bytes).unwrap() };
}

pub(super) fn download(cuda: &Cuda, stream: &CudaStream, buffer: &CudaBuffer, bytes: usize) -> Vec<u8> {
    let mut data = vec![0; bytes];
    // SAFETY: as above; the tests write before they read.
    unsafe { cuda.download(stream, cuda.addr(buffer), &mut data).unwrap() };
    data
}

/// A kernel of the library used as a device copy: a merge in which no token has a prefix copies the suffix.
pub(super) struct Copy {
    pub(super) kernel: CudaKernel,
    pub(super) src: CudaBuffer,
    pub(super) dst: CudaBuffer,
    pub(super) lse: CudaBuffer,
}

const TOKENS: usize = 37;
const HEADS: usize = 5;
const WIDTH: usize = 512;
const ELEMENTS: usize = TOKENS * HEADS * WIDTH;
pub(super) const BYTES: usize = ELEMENTS * 2;

pub(super) fn copy_variant() -> Variant {
    Variant { threads: 128, ..Variant::simple(Entry::MergeStates, DType::BF16) }
}

impl Copy {
    pub(super) fn new(cuda: &Cuda) -> Option<Self> {
        match cuda.prepare(&copy_variant()) {
            Ok(kernel) => Some(Self::with_kernel(cuda, kernel)),
            // Neither code carried for this device nor a compiler.
            Err(error @ Error::Unavailable { .. }) => {
                not_run("nvrtc", &error);
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    pub(super) fn with_kernel(cuda: &Cuda, kernel: CudaKernel) -> Self {
        let alloc = |bytes| cuda.alloc(bytes, "a copy").unwrap();
        let copy = Self { kernel, src: alloc(BYTES), dst: alloc(BYTES), lse: alloc(TOKENS * HEADS * 4) };
        let stream = cuda.create_stream().unwrap();
        // SAFETY: the buffer has these bytes.
        unsafe { cuda.fill(&stream, cuda.addr(&copy.lse), 0, TOKENS * HEADS * 4).unwrap() };
        cuda.synchronize(&stream).unwrap();
        copy
    }

    pub(super) fn enqueue(&self, cuda: &Cuda, stream: &CudaStream, dependent: bool) -> Result<()> {
        let (src, dst, lse) = (cuda.addr(&self.src), cuda.addr(&self.dst), cuda.addr(&self.lse));
        let params = Params::Merge(MergeParams {
            prefix_out: src,
            prefix_lse: lse,
            suffix_out: src,
            suffix_lse: lse,
            out: dst,
            out_lse: 0,
            num_tokens: TOKENS as i32,
            num_heads: HEADS as i32,
            head_dim: WIDTH as i32,
            tokens_with_context: 0,
        });
        let launch = Launch { grid: [(TOKENS * HEADS) as u32, 1, 1], threads: 128, shared_bytes: 0, dependent };
        // SAFETY: the buffers have the extents that the block states.
        unsafe { cuda.launch(stream, &self.kernel, &launch, &params) }
    }

    /// Sets the source to fresh data, poisons the destination, and gives what the destination must become.
    pub(super) fn refresh(&self, cuda: &Cuda, stream: &CudaStream, seed: u64) -> Vec<u8> {
        let data = noise_bf16(seed, ELEMENTS);
        upload(cuda, stream, &self.src, &data);
        // SAFETY: the buffer has these bytes.
        unsafe { cuda.fill(stream, cuda.addr(&self.dst), 0xff, BYTES).unwrap() };
        data
    }

    pub(super) fn result(&self, cuda: &Cuda, stream: &CudaStream) -> Vec<u8> {
        download(cuda, stream, &self.dst, BYTES)
    }
}

/// Driver functions that a caller may use beside this library, on the same streams.
pub(super) struct Raw {
    library: libloading::Library,
}

impl Raw {
    pub(super) fn open() -> Self {
        // SAFETY: the backend has opened the same library before.
        Self { library: unsafe { libloading::Library::new("libcuda.so.1").unwrap() } }
    }

    pub(super) fn synchronize(&self, stream: &CudaStream) -> i32 {
        // SAFETY: the function's published type; the stream is live.
        unsafe {
            let call = self.library.get::<unsafe extern "C" fn(u64) -> i32>("cuStreamSynchronize").unwrap();
            call(stream.handle())
        }
    }

    pub(super) fn mem_alloc(&self) -> i32 {
        let mut addr = 0_u64;
        // SAFETY: the function's published type. The call is expected to fail; otherwise the memory is lost to the test.
        unsafe {
            let call = self.library.get::<unsafe extern "C" fn(*mut u64, usize) -> i32>("cuMemAlloc_v2").unwrap();
            call(&mut addr, 4096)
        }
    }

    pub(super) fn mem_alloc_async(&self, stream: &CudaStream) -> i32 {
        let mut addr = 0_u64;
        // SAFETY: the function's published type; the stream is live.
        unsafe {
            type Call = unsafe extern "C" fn(*mut u64, usize, *mut c_void) -> i32;
            let call = self.library.get::<Call>("cuMemAllocAsync").unwrap();
            call(&mut addr, 4096, stream.handle() as *mut c_void)
        }
    }
}
