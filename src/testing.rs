//! What test suites of backends need: reproducible inputs, poisoned memory, tolerances, and devices that may be absent.

use std::fmt::Display;
use std::io::Write;

use half::{bf16, f16};

use crate::backend::Backend;
use crate::error::Result;
use crate::tensor::{DType, Tensor};

/// Reproducible numbers addressed by index: output `i` of the splitmix64 generator (Steele, Lea, Flood 2014).
///
/// ```
/// assert_eq!(latentwave::testing::SplitMix64::new(0).number(0), 0xE220_A839_7B1D_CDAF);
/// ```
#[derive(Debug, Clone, Copy)]
pub struct SplitMix64 {
    state: u64,
}

impl SplitMix64 {
    /// The sequence of a state.
    pub const fn new(state: u64) -> Self {
        Self { state }
    }

    /// Number `i` of the sequence, from 0.
    pub const fn number(&self, i: u64) -> u64 {
        let z = self.state.wrapping_add(i.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Integer `i` in -127..=127.
    pub const fn integer(&self, i: u64) -> i32 {
        ((self.number(i) >> 32) % 255) as i32 - 127
    }

    /// Value `i`, a multiple of 1/64 in -2..2: exact in f32, f16 and bf16.
    pub fn grid(&self, i: u64) -> f64 {
        f64::from(self.integer(i)) / 64.0
    }

    /// Byte `i` that is no NaN of e4m3: a byte whose low seven bits are all ones has its lowest bit cleared.
    pub const fn fp8_byte(&self, i: u64) -> u8 {
        let byte = (self.number(i) >> 32) as u8;
        if byte & 0x7F == 0x7F { byte ^ 1 } else { byte }
    }

    /// Integer `i` below `bound`.
    pub const fn below(&self, i: u64, bound: u64) -> u64 {
        (self.number(i) >> 16) % bound
    }

    /// The numbers `0..len` in an order of the sequence's own (Fisher and Yates).
    pub fn permutation(&self, len: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..len).collect();
        for i in (1..len).rev() {
            order.swap(i, self.below(i as u64, i as u64 + 1) as usize);
        }
        order
    }
}

/// A tensor filled with bytes that are NaN in f32, f16, bf16 and e4m3, and -1 as integers: what is never written shows.
///
/// # Errors
/// As [`Tensor::empty`] and [`Tensor::fill_bytes`].
pub fn poisoned<B: Backend, const N: usize>(backend: &B, shape: [usize; N], dtype: DType) -> Result<Tensor<B>> {
    let tensor = Tensor::empty(backend, shape, dtype)?;
    tensor.fill_bytes(backend, 0xFF)?;
    Ok(tensor)
}

/// A contiguous tensor's bytes, whatever its type.
///
/// # Errors
/// As [`Tensor::to_vec`].
pub fn bytes<B: Backend>(backend: &B, tensor: &Tensor<B>) -> Result<Vec<u8>> {
    Ok(match tensor.dtype() {
        DType::F32 => bytemuck::cast_slice(&tensor.to_vec::<f32>(backend)?).to_vec(),
        DType::F16 => bytemuck::cast_slice(&tensor.to_vec::<f16>(backend)?).to_vec(),
        DType::BF16 => bytemuck::cast_slice(&tensor.to_vec::<bf16>(backend)?).to_vec(),
        DType::I32 => bytemuck::cast_slice(&tensor.to_vec::<i32>(backend)?).to_vec(),
        DType::I64 => bytemuck::cast_slice(&tensor.to_vec::<i64>(backend)?).to_vec(),
        DType::U8 | DType::Fp8E4m3 | DType::Fp8E4m3Fnuz => tensor.to_vec::<u8>(backend)?,
    })
}

/// The byte that fills elements of a float type with NaN.
pub const fn nan_byte(dtype: DType) -> u8 {
    if matches!(dtype, DType::Fp8E4m3Fnuz) { 0x80 } else { 0xFF }
}

/// How two results of the same shape differ.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Difference {
    /// Elements compared.
    pub elements: usize,
    /// Largest absolute difference of finite elements.
    pub max_abs: f64,
    /// Index of the worst element under the tolerance.
    pub worst: usize,
    /// The worst element, got and wanted.
    pub values: (f64, f64),
    /// Elements beyond the tolerance, elements that are not finite in one of both only included.
    pub misses: usize,
    /// `1 - cosine` of the angle between both, over finite elements; 0 if either is zero.
    pub cosine_distance: f64,
    /// `|got - want| / |want|` in the Frobenius norm; 0 if both are zero.
    pub frobenius: f64,
}

/// What may differ: an element passes if its difference is within `abs` or within `rel` of the wanted magnitude.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tolerance {
    /// Absolute tolerance.
    pub abs: f64,
    /// Relative tolerance.
    pub rel: f64,
    /// Largest ratio of norms, [`Difference::frobenius`].
    pub frobenius: f64,
}

impl Tolerance {
    /// An absolute tolerance alone.
    pub const fn abs(abs: f64) -> Self {
        Self { abs, rel: 0.0, frobenius: f64::INFINITY }
    }

    /// For results of 16-bit arithmetic: 1e-2, absolute or relative, and 5e-3 of the norm.
    pub const HALF: Self = Self { abs: 1e-2, rel: 1e-2, frobenius: 5e-3 };
}

/// Compares two results. Infinities must agree; a NaN agrees with a NaN only.
///
/// # Panics
/// If the lengths differ.
pub fn compare(got: &[f64], want: &[f64], tolerance: &Tolerance) -> Difference {
    assert_eq!(got.len(), want.len(), "results of different sizes");
    let mut difference = Difference {
        elements: got.len(),
        max_abs: 0.0,
        worst: 0,
        values: (0.0, 0.0),
        misses: 0,
        cosine_distance: 0.0,
        frobenius: 0.0,
    };
    let (mut dot, mut got_square, mut want_square, mut error_square) = (0.0, 0.0, 0.0, 0.0);
    let mut worst = -1.0;
    for (i, (&g, &w)) in got.iter().zip(want).enumerate() {
        // How far beyond the tolerance, 1 being its edge.
        let excess = if g == w || (g.is_nan() && w.is_nan()) {
            0.0
        } else if !g.is_finite() || !w.is_finite() {
            f64::INFINITY
        } else {
            let error = (g - w).abs();
            difference.max_abs = difference.max_abs.max(error);
            error_square += error * error;
            error / tolerance.abs.max(tolerance.rel * w.abs())
        };
        if g.is_finite() && w.is_finite() {
            dot += g * w;
            got_square += g * g;
            want_square += w * w;
        }
        if excess > worst {
            (worst, difference.worst, difference.values) = (excess, i, (g, w));
        }
        difference.misses += usize::from(excess > 1.0);
    }
    if got_square > 0.0 && want_square > 0.0 {
        difference.cosine_distance = 1.0 - dot / (got_square.sqrt() * want_square.sqrt());
    }
    if error_square > 0.0 {
        difference.frobenius = (error_square / want_square).sqrt();
    }
    difference
}

/// As [`compare`], and an error in words if anything is beyond the tolerance.
///
/// # Errors
/// A sentence naming `what`, the worst element and how many miss.
pub fn check_close(what: &str, got: &[f64], want: &[f64], tolerance: &Tolerance) -> Result<Difference, String> {
    if got.len() != want.len() {
        return Err(format!("{what}: {} elements, expected {}", got.len(), want.len()));
    }
    let difference = compare(got, want, tolerance);
    if difference.misses == 0 && difference.frobenius <= tolerance.frobenius {
        return Ok(difference);
    }
    let Difference { elements, misses, worst, values: (g, w), frobenius, .. } = difference;
    Err(format!(
        "{what}: {misses} of {elements} elements miss (abs {:e} or rel {:e}); worst [{worst}] = {g:e}, expected {w:e}; \
         error norm {frobenius:e}",
        tolerance.abs, tolerance.rel
    ))
}

/// A device for a suite, or `None` after saying that it was [`not_run`].
///
/// # Panics
/// If the device is absent and its backend is required.
pub fn device_or_report<B: Backend>(suite: &str, device: Result<B>) -> Option<B> {
    device.map_err(|reason| not_run(suite, B::NAME, &reason)).ok()
}

/// Says `SUITE on NAME: not run: REASON` on standard error.
///
/// The environment variable `LATENTWAVE_REQUIRE`, a list of names (`cuda`, `rocm`, `nvrtc`) separated by commas, turns absence
/// into failure.
///
/// # Panics
/// If `name` is required.
pub fn not_run(suite: &str, name: &str, reason: &dyn Display) {
    let required = std::env::var("LATENTWAVE_REQUIRE").unwrap_or_default();
    assert!(
        !required.split(',').any(|required| required.trim() == name),
        "{suite} on {name}: required by LATENTWAVE_REQUIRE, but absent: {reason}"
    );
    report(&format!("{suite} on {name}: not run: {reason}"));
}

/// Writes a line to standard error past the capture of the test harness, so that it shows for passing tests too.
pub fn report(line: &str) {
    // Nothing is left to do if standard error is closed.
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_found() {
        let close = |got: &[f64], want: &[f64]| check_close("x", got, want, &Tolerance::abs(0.1)).is_ok();
        assert!(close(&[1.0, f64::NAN, f64::NEG_INFINITY], &[1.05, f64::NAN, f64::NEG_INFINITY]));
        assert!(!close(&[1.0], &[1.2]));
        assert!(!close(&[f64::NAN], &[0.0]));
        assert!(!close(&[0.0], &[f64::NAN]));
        assert!(!close(&[f64::INFINITY], &[f64::NEG_INFINITY]));
        assert!(!close(&[], &[1.0]));
        let strict = Tolerance { abs: 1.0, rel: 0.0, frobenius: 1e-3 };
        assert!(check_close("x", &[1.0, 0.5], &[1.0, 0.4], &strict).is_err());
    }

    #[test]
    fn a_permutation_has_every_index_once() {
        let mut order = SplitMix64::new(5).permutation(100);
        assert_ne!(order, (0..100).collect::<Vec<_>>());
        order.sort_unstable();
        assert_eq!(order, (0..100).collect::<Vec<_>>());
    }
}
