//! Vector arithmetic of the host kernels, chosen once for the machine that it runs on.

mod lanes;
mod tiles;

use super::convert;
use crate::tensor::DType;
use lanes::Portable;

/// Widest vector, in float32 lanes: buffers are padded to it.
pub(super) const PAD: usize = 16;

/// `s[row][token] = q[row] . k[token]`.
pub(super) struct ScoreArgs {
    /// `[rows, width]`.
    pub q: *const f32,
    pub q_stride: usize,
    pub rows: usize,
    /// `[tokens, width]`.
    pub k: *const f32,
    pub k_stride: usize,
    pub tokens: usize,
    /// A multiple of [`PAD`]; what lies past the real width is zero in both.
    pub width: usize,
    /// `[rows, tokens]`.
    pub s: *mut f32,
    pub s_stride: usize,
}

/// `o[row] = o[row] * rescale[row] + sum over tokens of p[row][token] * v[token]`.
pub(super) struct AccumulateArgs {
    /// `[rows, tokens]`.
    pub p: *const f32,
    pub p_stride: usize,
    pub rows: usize,
    pub tokens: usize,
    /// `[tokens, columns]`.
    pub v: *const f32,
    pub v_stride: usize,
    /// A multiple of [`PAD`].
    pub columns: usize,
    /// `[rows]`.
    pub rescale: *const f32,
    /// `[rows, columns]`.
    pub o: *mut f32,
    pub o_stride: usize,
}

/// From a raw score to a logit: `x = score * scale`, then `softcap * tanh(x / softcap)` unless the cap is 0.
#[derive(Clone, Copy)]
pub(super) struct Logits {
    pub scale: f32,
    pub softcap: f32,
}

/// Running maximum of a row's logits and sum of `exp(logit - max)`.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct RowState {
    pub max: f32,
    pub sum: f32,
}

impl RowState {
    pub(super) const EMPTY: Self = Self { max: f32::NEG_INFINITY, sum: 0.0 };
}

/// The functions of one instruction set.
pub(super) struct Simd {
    /// Name of the instruction set.
    pub name: &'static str,
    /// # Safety
    /// Pointers are valid for the shapes that [`ScoreArgs`] states.
    pub scores: unsafe fn(&ScoreArgs),
    /// # Safety
    /// Pointers are valid for the shapes that [`AccumulateArgs`] states.
    pub accumulate: unsafe fn(&AccumulateArgs),
    /// Scores to weights, see [`tiles::softmax`].
    ///
    /// # Safety
    /// The row has as many elements as are visible, rounded up to a multiple of [`PAD`].
    pub softmax: unsafe fn(*mut f32, usize, &Logits, &mut RowState) -> f32,
    /// [`convert::load`].
    ///
    /// # Safety
    /// The address has as many elements as the slice.
    pub load: unsafe fn(DType, *const u8, &mut [f32]),
}

macro_rules! instruction_set {
    ($module:ident, $name:literal, $lanes:ty, tokens $t:literal, vectors $v:literal $(, $feature:literal)?) => {
        mod $module {
            use super::{AccumulateArgs, DType, Logits, RowState, ScoreArgs, Simd, convert, tiles};

            pub(super) static SIMD: Simd = Simd { name: $name, scores, accumulate, softmax, load };

            $(#[target_feature(enable = $feature)])?
            unsafe fn scores(args: &ScoreArgs) {
                // SAFETY: the caller's promise, and the instruction set is enabled here.
                unsafe { tiles::scores::<$lanes, $t>(args) }
            }

            $(#[target_feature(enable = $feature)])?
            unsafe fn accumulate(args: &AccumulateArgs) {
                // SAFETY: as above.
                unsafe { tiles::accumulate::<$lanes, $v>(args) }
            }

            $(#[target_feature(enable = $feature)])?
            unsafe fn softmax(row: *mut f32, visible: usize, logits: &Logits, state: &mut RowState) -> f32 {
                // SAFETY: as above.
                unsafe { tiles::softmax::<$lanes>(row, visible, logits, state) }
            }

            $(#[target_feature(enable = $feature)])?
            unsafe fn load(dtype: DType, from: *const u8, to: &mut [f32]) {
                // SAFETY: as above.
                unsafe { convert::load(dtype, from, to) }
            }
        }
    };
}

instruction_set!(portable, "portable", super::Portable, tokens 2, vectors 2);
#[cfg(target_arch = "x86_64")]
instruction_set!(avx2, "avx2", super::lanes::Avx2, tokens 2, vectors 2, "avx2,fma");
#[cfg(all(target_arch = "x86_64", avx512_intrinsics))]
instruction_set!(avx512, "avx512f", super::lanes::Avx512, tokens 6, vectors 4, "avx512f,avx2,fma");

impl Simd {
    /// The best instruction set of this machine.
    pub(super) fn detect() -> &'static Self {
        Self::available()[0]
    }

    /// All instruction sets that this machine has, best first.
    fn available() -> Vec<&'static Self> {
        let mut found = Vec::new();
        #[cfg(all(target_arch = "x86_64", avx512_intrinsics))]
        if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("fma") {
            found.push(&avx512::SIMD);
        }
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            found.push(&avx2::SIMD);
        }
        found.push(&portable::SIMD);
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::SplitMix64;

    fn random(seed: u64, len: usize) -> Vec<f32> {
        let numbers = SplitMix64::new(seed);
        (0..len as u64).map(|i| numbers.grid(i) as f32).collect()
    }

    #[test]
    fn products_agree_with_float64_in_every_block_shape() {
        for simd in Simd::available() {
            for (rows, tokens) in [(1, 1), (4, 6), (5, 13), (7, 64), (16, 3), (3, 65)] {
                let (width, columns) = (48, 32);
                let (q, k) = (random(1, rows * width), random(2, tokens * width));
                let s_stride = tokens.next_multiple_of(PAD);
                let mut s = vec![f32::NAN; rows * s_stride];
                let args = ScoreArgs {
                    q: q.as_ptr(),
                    q_stride: width,
                    rows,
                    k: k.as_ptr(),
                    k_stride: width,
                    tokens,
                    width,
                    s: s.as_mut_ptr(),
                    s_stride,
                };
                // SAFETY: the vectors have the shapes stated.
                unsafe { (simd.scores)(&args) };
                let mut o = random(3, rows * columns);
                let (before, rescale) = (o.clone(), random(4, rows));
                let args = AccumulateArgs {
                    p: s.as_ptr(),
                    p_stride: s_stride,
                    rows,
                    tokens,
                    v: k.as_ptr(),
                    v_stride: width,
                    columns,
                    rescale: rescale.as_ptr(),
                    o: o.as_mut_ptr(),
                    o_stride: columns,
                };
                // SAFETY: as above.
                unsafe { (simd.accumulate)(&args) };
                for r in 0..rows {
                    let dot = |t: usize| -> f64 {
                        (0..width).map(|d| f64::from(q[r * width + d]) * f64::from(k[t * width + d])).sum()
                    };
                    for c in 0..columns {
                        let sum: f64 = (0..tokens).map(|t| dot(t) * f64::from(k[t * width + c])).sum();
                        let want = f64::from(before[r * columns + c]) * f64::from(rescale[r]) + sum;
                        let got = f64::from(o[r * columns + c]);
                        assert!((got - want).abs() < 1e-3, "{} {rows}x{tokens}: {got} {want}", simd.name);
                    }
                }
            }
        }
    }

    #[test]
    fn softmax_agrees_with_float64_and_never_overflows() {
        for simd in Simd::available() {
            for (scale, softcap) in [(1.0, 0.0), (-3.0, 0.0), (1.0, 50.0), (1e6, 50.0), (0.01, 2.5), (1e-30, 1.0)] {
                for visible in [1, 15, 16, 17, 64] {
                    let scores = random(9, visible);
                    let mut row = scores.clone();
                    row.resize(visible.next_multiple_of(PAD), f32::NAN);
                    let mut state = RowState { max: 0.25, sum: 2.0 };
                    // SAFETY: the row is padded as asked.
                    let rescale =
                        unsafe { (simd.softmax)(row.as_mut_ptr(), visible, &Logits { scale, softcap }, &mut state) };
                    let logit = |x: f32| {
                        let x = f64::from(x) * f64::from(scale);
                        if softcap > 0.0 { f64::from(softcap) * (x / f64::from(softcap)).tanh() } else { x }
                    };
                    let max = scores.iter().map(|&x| logit(x)).fold(0.25, f64::max);
                    let sum: f64 =
                        scores.iter().map(|&x| (logit(x) - max).exp()).sum::<f64>() + 2.0 * (0.25 - max).exp();
                    let name = format!("{} scale {scale} cap {softcap} visible {visible}", simd.name);
                    assert!((f64::from(state.max) - max).abs() < 1e-6 * max.abs().max(1.0), "{name} max");
                    assert!((f64::from(state.sum) / sum - 1.0).abs() < 4e-6, "{name} sum {} {sum}", state.sum);
                    assert!((f64::from(rescale) - (0.25 - max).exp()).abs() < 1e-6, "{name} rescale");
                    for (&x, &weight) in scores.iter().zip(&row) {
                        let want = (logit(x) - max).exp();
                        assert!((f64::from(weight) - want).abs() < 4e-6, "{name} {weight} {want}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_nan_shows() {
        for simd in Simd::available() {
            let mut row = vec![1.0; PAD];
            row[3] = f32::NAN;
            let mut state = RowState::EMPTY;
            // SAFETY: the row is padded as asked.
            unsafe { (simd.softmax)(row.as_mut_ptr(), 5, &Logits { scale: 1.0, softcap: 0.0 }, &mut state) };
            assert!(state.sum.is_nan(), "{}", simd.name);
        }
    }
}
