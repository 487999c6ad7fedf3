//! Random rows whose values are known, so that results can be checked against float64.

use std::ops::Range;

use half::{bf16, f16};
use latentwave::{Backend, DType, Result, Tensor, fp8, reference};

use crate::rng::Rng;

/// Random rows in a storage type.
#[derive(Debug)]
pub(crate) struct Rows {
    dtype: DType,
    width: usize,
    bytes: Vec<u8>,
}

impl Rows {
    /// `rows` rows of `width` nearly normal numbers, rounded to `dtype`.
    pub(crate) fn random(dtype: DType, rows: usize, width: usize, rng: &mut Rng) -> Self {
        let mut bytes = Vec::with_capacity(rows * width * dtype.size());
        for _ in 0..rows * width {
            let value = rng.normal();
            match dtype {
                DType::F16 => bytes.extend(f16::from_f32(value).to_le_bytes()),
                DType::BF16 => bytes.extend(bf16::from_f32(value).to_le_bytes()),
                DType::Fp8E4m3 | DType::Fp8E4m3Fnuz => bytes.push(fp8::from_f32(dtype, value)),
                _ => bytes.extend(value.to_le_bytes()),
            }
        }
        Self { dtype, width, bytes }
    }

    /// Number of rows.
    pub(crate) fn len(&self) -> usize {
        self.bytes.len() / (self.width * self.dtype.size())
    }

    /// Bytes of `rows`.
    pub(crate) fn bytes(&self, rows: Range<usize>) -> &[u8] {
        let row = self.width * self.dtype.size();
        &self.bytes[rows.start * row..rows.end * row]
    }

    /// What columns `columns` of a row stand for.
    pub(crate) fn values(&self, row: usize, columns: Range<usize>) -> Vec<f64> {
        let size = self.dtype.size();
        reference::to_f64(self.dtype, &self.bytes(row..row + 1)[columns.start * size..columns.end * size], 1.0)
    }
}

/// What a value becomes in a cache of `dtype` with `scale`.
pub(crate) fn cached(value: f64, dtype: DType, scale: f32) -> f64 {
    match dtype {
        DType::F16 => f16::from_f64(value).to_f64(),
        DType::BF16 => bf16::from_f64(value).to_f64(),
        DType::Fp8E4m3 | DType::Fp8E4m3Fnuz => {
            let byte = fp8::from_f32(dtype, value as f32 / scale);
            f64::from(fp8::to_f32(dtype, byte)) * f64::from(scale)
        }
        _ => value,
    }
}

/// A contiguous tensor's values.
///
/// # Errors
/// What reading returns.
pub(crate) fn read<B: Backend>(backend: &B, tensor: &Tensor<B>) -> Result<Vec<f64>> {
    Ok(match tensor.dtype() {
        DType::F16 => tensor.to_vec::<f16>(backend)?.into_iter().map(f16::to_f64).collect(),
        DType::BF16 => tensor.to_vec::<bf16>(backend)?.into_iter().map(bf16::to_f64).collect(),
        _ => tensor.to_vec::<f32>(backend)?.into_iter().map(f64::from).collect(),
    })
}

/// Largest difference as a share of the largest element wanted; infinite where a number is missing or NaN.
pub(crate) fn error(got: &[f64], wanted: &[f64]) -> f64 {
    if got.len() != wanted.len() || got.iter().any(|x| x.is_nan()) {
        return f64::INFINITY;
    }
    let most = wanted.iter().fold(0.0_f64, |most, x| most.max(x.abs())).max(f64::MIN_POSITIVE);
    got.iter().zip(wanted).fold(0.0_f64, |worst, (a, b)| worst.max((a - b).abs())) / most
}

/// The error that a result of `dtype` may have: a few units in its last place, since a kernel may round probabilities to it too.
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
    fn errors_see_a_nan() {
        assert_eq!(error(&[1.0, 2.0], &[1.0, 2.5]), 0.2);
        assert_eq!(error(&[f64::NAN], &[1.0]), f64::INFINITY);
        assert_eq!(error(&[1.0], &[1.0, 1.0]), f64::INFINITY);
    }

    #[test]
    fn rows_read_back() {
        for dtype in [DType::F32, DType::F16, DType::BF16, DType::Fp8E4m3, DType::Fp8E4m3Fnuz] {
            let rows = Rows::random(dtype, 5, 7, &mut Rng::new(3));
            assert_eq!((rows.len(), rows.bytes(1..3).len()), (5, 14 * dtype.size()));
            let row = rows.values(2, 0..7);
            assert_eq!(rows.values(2, 3..5), row[3..5]);
            // Rounded already, a value stays as it is in a cache of its own type.
            assert!(row.iter().all(|x| cached(*x, dtype, 1.0) == *x && x.abs() < 4.0));
        }
    }

    #[test]
    fn a_scaled_cache_holds_the_scaled_value() {
        assert_eq!(cached(0.5, DType::Fp8E4m3, 0.5), 0.5);
        assert_eq!(cached(500.0, DType::Fp8E4m3, 1.0), 448.0);
        assert_eq!(cached(500.0, DType::Fp8E4m3, 2.0), 512.0);
    }
}
