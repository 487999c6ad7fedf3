//! A device's ceilings, so that a measurement can be given as a share of what the device can do.

use crate::backend::Backend;
use crate::error::Result;
use crate::kernel::params::ProbeParams;
use crate::kernel::{Entry, Launch, Params, Variant};
use crate::stream::Stream;
use crate::tensor::{DType, Tensor};

/// Threads of a block.
const THREADS: u32 = 256;

/// Rounds of products in one launch: far more work than a launch costs.
const ITERATIONS: u32 = 4096;

/// Bytes of operands.
const OPERANDS: usize = 64 << 10;

/// Work that does nothing but read, or multiply, for as long as a ceiling takes to show.
#[derive(Debug)]
pub struct Probe<B: Backend> {
    kernel: B::Kernel,
    launch: Launch,
    params: ProbeParams,
    source: Tensor<B>,
    out: Tensor<B>,
    /// Bytes that one launch reads, or multiplications and additions that it does.
    pub work: f64,
}

impl<B: Backend> Probe<B> {
    /// Reads `bytes` of device memory; several times the caches show the memory itself.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) on a backend without the kernel;
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    pub fn read(backend: &B, bytes: usize) -> Result<Self> {
        let variant = Variant { threads: THREADS, ..Variant::simple(Entry::ProbeRead, DType::BF16) };
        let blocks = 8 * backend.device().num_compute_units as u32;
        // Every thread takes whole rounds of 64 bytes.
        let round = 64 * (blocks * THREADS) as usize;
        let bytes = bytes.div_ceil(round) * round;
        Self::new(backend, &variant, blocks, 0, random(backend, bytes)?, bytes as f64, bytes as i64)
    }

    /// Multiplies bf16 matrices with float32 sums, with the fastest instructions that this crate has for the device.
    ///
    /// # Errors
    /// As [`Probe::read`].
    pub fn matmul(backend: &B) -> Result<Self> {
        let hopper = backend.device().arch == "sm_90a";
        let form = u32::from(hopper);
        let variant = Variant { threads: THREADS, form, ..Variant::simple(Entry::ProbeMatmul, DType::BF16) };
        let units = backend.device().num_compute_units as u32;
        let waves = THREADS / backend.device().wave_size.max(1) as u32;
        let (blocks, shared, per_round) = match hopper {
            true => (units, 48 << 10, 2 * 4 * (64 * 128 * 16)),
            false => (4 * units, 0, waves * 8 * (16 * 16 * 16)),
        };
        let work = 2.0 * f64::from(per_round) * f64::from(ITERATIONS) * f64::from(blocks);
        Self::new(backend, &variant, blocks, shared, random(backend, OPERANDS)?, work, 0)
    }

    fn new(
        backend: &B,
        variant: &Variant,
        blocks: u32,
        shared_bytes: u32,
        source: Tensor<B>,
        work: f64,
        bytes: i64,
    ) -> Result<Self> {
        let out = Tensor::zeros(backend, [1], DType::F32)?;
        let params =
            ProbeParams { source: source.addr(), out: out.addr(), bytes, iterations: ITERATIONS as i32, reserved: 0 };
        let launch = Launch { grid: [blocks, 1, 1], threads: THREADS, shared_bytes, dependent: false, cluster: 1 };
        Ok(Self { kernel: backend.prepare(variant)?, launch, params, source, out, work })
    }

    /// Enqueues one launch.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver).
    pub fn enqueue(&self, stream: &Stream<B>) -> Result<()> {
        stream.retain(&[Some(&self.source), Some(&self.out)]);
        // SAFETY: the parameters say the sizes of these tensors, which the probe and a capture hold.
        unsafe { stream.launch(&self.kernel, &self.launch, &Params::Probe(self.params)) }
    }
}

/// Random bf16 of magnitude about 1: constant data would cost less power and flatter the clock.
fn random<B: Backend>(backend: &B, bytes: usize) -> Result<Tensor<B>> {
    const CHUNK: usize = 1 << 20;
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let chunk: Vec<u8> = (0..CHUNK / 2)
        .flat_map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            // Sign and mantissa at random, the exponent that of 1 or 0.5.
            let bits = (state >> 48) as u16;
            ((bits & 0x80ff) | 0x3f00).to_le_bytes()
        })
        .collect();
    let tensor = Tensor::empty(backend, [bytes], DType::U8)?;
    for start in (0..bytes).step_by(CHUNK) {
        let len = CHUNK.min(bytes - start);
        tensor.narrow(0, start..start + len)?.write_bytes(backend, &chunk[..len])?;
    }
    Ok(tensor)
}
