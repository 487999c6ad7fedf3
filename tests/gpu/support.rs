//! What the tests share: devices, data and a kernel to run.

use std::sync::{PoisonError, RwLock};

use latentwave::kernel::params::MergeParams;
use latentwave::kernel::{Entry, Launch, Params, Variant};
use latentwave::{Backend, DType, Error, Result};

use latentwave::testing;

use super::vendor::{COMPILER, Gpu};

type Buffer = <Gpu as Backend>::Buffer;
type GpuStream = <Gpu as Backend>::Stream;
type Kernel = <Gpu as Backend>::Kernel;

/// Says what could not be run in the test of this thread.
pub(super) fn not_run(name: &str, reason: &dyn std::fmt::Display) {
    testing::not_run(std::thread::current().name().unwrap_or("a test"), name, reason);
}

/// Held for reading by tests that need some memory, for writing by those that take all of it.
static MEMORY: RwLock<()> = RwLock::new(());

pub(super) fn on_each_device(test: impl Fn(&Gpu)) {
    let _shared = MEMORY.read().unwrap_or_else(PoisonError::into_inner);
    each_device(test);
}

/// As [`on_each_device`], while no other test of this program runs on one.
pub(super) fn alone_on_each_device(test: impl Fn(&Gpu)) {
    let _alone = MEMORY.write().unwrap_or_else(PoisonError::into_inner);
    each_device(test);
}

/// Takes all memory of a device but less than a mebibyte.
pub(super) fn fill(gpu: &Gpu) -> Vec<Buffer> {
    gpu.trim().unwrap();
    let mut taken = Vec::new();
    let mut bytes = gpu.device().memory_bytes as usize;
    while bytes >= 1 << 20 {
        match gpu.alloc(bytes, "all that is left") {
            Ok(buffer) => taken.push(buffer),
            Err(Error::OutOfMemory { .. }) => bytes /= 2,
            Err(error) => panic!("{error}"),
        }
    }
    taken
}

fn each_device(test: impl Fn(&Gpu)) {
    match Gpu::devices() {
        Ok(devices) if devices.is_empty() => not_run(Gpu::NAME, &"the driver sees no GPU"),
        Ok(devices) => (0..devices.len()).for_each(|index| test(&Gpu::new(index).unwrap())),
        Err(error) => not_run(Gpu::NAME, &error),
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

pub(super) fn upload(gpu: &Gpu, stream: &GpuStream, buffer: &Buffer, bytes: &[u8]) {
    // SAFETY: the buffers of these tests are as long as what is copied, and each test's streams are its own.
    unsafe { gpu.upload(stream, gpu.addr(buffer), bytes).unwrap() };
}

pub(super) fn download(gpu: &Gpu, stream: &GpuStream, buffer: &Buffer, bytes: usize) -> Vec<u8> {
    let mut data = vec![0; bytes];
    // SAFETY: as above; the tests write before they read.
    unsafe { gpu.download(stream, gpu.addr(buffer), &mut data).unwrap() };
    data
}

/// A kernel of the library used as a device copy: a merge in which no token has a prefix copies the suffix.
pub(super) struct Copy {
    pub(super) kernel: Kernel,
    pub(super) src: Buffer,
    pub(super) dst: Buffer,
    pub(super) lse: Buffer,
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
    pub(super) fn new(gpu: &Gpu) -> Option<Self> {
        match gpu.prepare(&copy_variant()) {
            Ok(kernel) => Some(Self::with_kernel(gpu, kernel)),
            // Neither code carried for this device nor a compiler.
            Err(error @ Error::Unavailable { .. }) => {
                not_run(COMPILER, &error);
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    pub(super) fn with_kernel(gpu: &Gpu, kernel: Kernel) -> Self {
        let alloc = |bytes| gpu.alloc(bytes, "a copy").unwrap();
        let copy = Self { kernel, src: alloc(BYTES), dst: alloc(BYTES), lse: alloc(TOKENS * HEADS * 4) };
        let stream = gpu.create_stream().unwrap();
        // SAFETY: the buffer has these bytes.
        unsafe { gpu.fill(&stream, gpu.addr(&copy.lse), 0, TOKENS * HEADS * 4).unwrap() };
        gpu.synchronize(&stream).unwrap();
        copy
    }

    pub(super) fn enqueue(&self, gpu: &Gpu, stream: &GpuStream, dependent: bool) -> Result<()> {
        let (src, dst, lse) = (gpu.addr(&self.src), gpu.addr(&self.dst), gpu.addr(&self.lse));
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
        let launch =
            Launch { grid: [(TOKENS * HEADS) as u32, 1, 1], threads: 128, shared_bytes: 0, dependent, cluster: 1 };
        // SAFETY: the buffers have the extents that the block states.
        unsafe { gpu.launch(stream, &self.kernel, &launch, &params) }
    }

    /// Sets the source to fresh data, poisons the destination, and gives what the destination must become.
    pub(super) fn refresh(&self, gpu: &Gpu, stream: &GpuStream, seed: u64) -> Vec<u8> {
        let data = noise_bf16(seed, ELEMENTS);
        upload(gpu, stream, &self.src, &data);
        // SAFETY: the buffer has these bytes.
        unsafe { gpu.fill(stream, gpu.addr(&self.dst), 0xff, BYTES).unwrap() };
        data
    }

    pub(super) fn result(&self, gpu: &Gpu, stream: &GpuStream) -> Vec<u8> {
        download(gpu, stream, &self.dst, BYTES)
    }
}
