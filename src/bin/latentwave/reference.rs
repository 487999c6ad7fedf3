//! Decode attention in float64, straight from its definition: what every result is checked against.

use half::{bf16, f16};
use latentwave::DType;

use crate::rng::Rng;

/// Random rows in a storage type, and what their bytes stand for.
#[derive(Debug)]
pub(crate) struct Rows {
    dtype: DType,
    width: usize,
    bytes: Vec<u8>,
}

impl Rows {
    /// `rows` rows of `width` nearly normal numbers, rounded to `dtype`, one of f32, f16 and bf16.
    pub(crate) fn random(dtype: DType, rows: usize, width: usize, rng: &mut Rng) -> Self {
        let mut bytes = Vec::with_capacity(rows * width * dtype.size());
        for _ in 0..rows * width {
            let value = rng.normal();
            match dtype {
                DType::F16 => bytes.extend(f16::from_f32(value).to_ne_bytes()),
                DType::BF16 => bytes.extend(bf16::from_f32(value).to_ne_bytes()),
                _ => bytes.extend(value.to_ne_bytes()),
            }
        }
        Self { dtype, width, bytes }
    }

    /// Number of rows.
    pub(crate) fn len(&self) -> usize {
        self.bytes.len() / (self.width * self.dtype.size())
    }

    /// Bytes of `rows`.
    pub(crate) fn bytes(&self, rows: std::ops::Range<usize>) -> &[u8] {
        let row = self.width * self.dtype.size();
        &self.bytes[rows.start * row..rows.end * row]
    }

    /// What columns `columns` of a row stand for.
    pub(crate) fn values(&self, row: usize, columns: std::ops::Range<usize>) -> Vec<f64> {
        let size = self.dtype.size();
        decode(self.dtype, &self.bytes(row..row + 1)[columns.start * size..columns.end * size])
    }
}

/// What the bytes of f32, f16 or bf16 numbers stand for.
pub(crate) fn decode(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    let value = |element: &[u8]| match (dtype, *element) {
        (DType::F16, [a, b]) => f16::from_ne_bytes([a, b]).to_f64(),
        (DType::BF16, [a, b]) => bf16::from_ne_bytes([a, b]).to_f64(),
        (_, [a, b, c, d]) => f64::from(f32::from_ne_bytes([a, b, c, d])),
        _ => f64::NAN,
    };
    bytes.chunks_exact(dtype.size()).map(value).collect()
}

/// What a value becomes in a cache of `dtype` with `scale`: itself, or its nearest 8-bit float, ties to even, saturating.
pub(crate) fn cached(value: f64, dtype: DType, scale: f32) -> f64 {
    let (least_exponent, most) = match dtype {
        DType::Fp8E4m3 => (-6, 448.0),
        DType::Fp8E4m3Fnuz => (-7, 240.0),
        DType::F16 => return f16::from_f64(value).to_f64(),
        DType::BF16 => return bf16::from_f64(value).to_f64(),
        _ => return value,
    };
    let scaled = f64::from(value as f32 / scale);
    if scaled == 0.0 {
        return 0.0;
    }
    // Three bits behind the leading one, fewer below the least exponent.
    let step = 2_f64.powi((scaled.abs().log2().floor() as i32).max(least_exponent) - 3);
    ((scaled / step).round_ties_even() * step).clamp(-most, most) * f64::from(scale)
}

/// Attention of one query row over cached rows, of which the first `latent` numbers are also the value row.
pub(crate) fn attend(q: &[f64], cache: &[Vec<f64>], latent: usize, sm_scale: f64) -> Vec<f64> {
    let scores: Vec<f64> =
        cache.iter().map(|k| q.iter().zip(k).map(|(a, b)| a * b).sum::<f64>() * sm_scale).collect();
    let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut out = vec![0.0; latent];
    let mut sum = 0.0;
    for (score, v) in scores.iter().zip(cache) {
        let p = (score - most).exp();
        sum += p;
        for (o, v) in out.iter_mut().zip(v) {
            *o += p * v;
        }
    }
    if sum != 0.0 {
        out.iter_mut().for_each(|o| *o /= sum);
    }
    out
}

/// Largest difference as a share of the largest element wanted; NaN counts as infinite.
pub(crate) fn error(got: &[f64], wanted: &[f64]) -> f64 {
    let most = wanted.iter().fold(0.0_f64, |most, x| most.max(x.abs())).max(f64::MIN_POSITIVE);
    let worst = got.iter().zip(wanted).map(|(a, b)| (a - b).abs());
    let worst = worst.fold(0.0_f64, |worst, x| if x.is_nan() { f64::INFINITY } else { worst.max(x) });
    if got.len() == wanted.len() { worst / most } else { f64::INFINITY }
}

/// The error that a result of `dtype` may have: a few units in its last place, since probabilities are rounded to it too.
pub(crate) fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 2e-2,
        DType::F16 => 3e-3,
        _ => 2e-5,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attention_by_hand() {
        // Scores 0 and ln 3: weights 1/4 and 3/4.
        let q = [1.0, 0.0];
        let cache = [vec![0.0, 8.0], vec![3_f64.ln(), 4.0]];
        let out = attend(&q, &cache, 2, 1.0);
        assert!((out[0] - 0.75 * 3_f64.ln()).abs() < 1e-15 && (out[1] - 5.0).abs() < 1e-15, "{out:?}");
        assert_eq!(attend(&q, &[], 2, 1.0), [0.0, 0.0]);
    }

    #[test]
    fn eight_bit_floats() {
        let e4m3 = |x| cached(x, DType::Fp8E4m3, 1.0);
        assert_eq!([e4m3(1.0), e4m3(1.0625), e4m3(1.1875), e4m3(-500.0)], [1.0, 1.0, 1.25, -448.0]);
        // Least subnormal numbers: 2^-9 and 2^-10.
        assert_eq!(e4m3(2_f64.powi(-9)), 2_f64.powi(-9));
        assert_eq!(e4m3(2_f64.powi(-11)), 0.0);
        assert_eq!(cached(2_f64.powi(-10), DType::Fp8E4m3Fnuz, 1.0), 2_f64.powi(-10));
        assert_eq!(cached(300.0, DType::Fp8E4m3Fnuz, 1.0), 240.0);
        assert_eq!(cached(0.5, DType::Fp8E4m3, 0.5), 0.5);
    }

    /// Every finite e4m3 number is its own nearest, as another crate decodes it.
    #[test]
    fn every_e4m3_number_stands_for_itself() {
        for bits in 0..=255_u8 {
            let value = float8::F8E4M3::from_bits(bits).to_f64();
            if value.is_finite() {
                assert_eq!(cached(value, DType::Fp8E4m3, 1.0), value, "{bits:#x}");
            }
        }
    }

    #[test]
    fn errors_see_a_nan() {
        assert_eq!(error(&[1.0, 2.0], &[1.0, 2.5]), 0.2);
        assert_eq!(error(&[f64::NAN], &[1.0]), f64::INFINITY);
        assert_eq!(error(&[1.0], &[1.0, 1.0]), f64::INFINITY);
    }

    #[test]
    fn rows_read_back() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let rows = Rows::random(dtype, 5, 7, &mut Rng::new(3));
            assert_eq!((rows.len(), rows.bytes(1..3).len()), (5, 14 * dtype.size()));
            let row = rows.values(2, 0..7);
            assert_eq!(rows.values(2, 3..5), row[3..5]);
            assert_eq!(decode(dtype, rows.bytes(2..3)), row);
            assert!(row.iter().all(|x| cached(*x, dtype, 1.0) == *x && x.abs() < 4.0));
        }
    }
}
