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

/// How far rows of a result are from float64.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Errors {
    /// Largest difference of an element, as a share of its row's largest.
    pub(crate) element: f64,
    /// `||got - wanted|| / ||wanted||` of the row where it is largest.
    pub(crate) row_norm: f64,
    /// Rows that were compared.
    pub(crate) rows: usize,
    /// Squares of all rows' differences, and of what was wanted.
    difference: f64,
    wanted: f64,
}

impl Errors {
    /// Compares one row.
    pub(crate) fn of_row(got: &[f64], wanted: &[f64]) -> Self {
        let square = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>();
        let element = error(got, wanted);
        let mut row = Self { element, row_norm: 0.0, rows: 1, difference: f64::INFINITY, wanted: 0.0 };
        row.wanted = square(&mut wanted.iter().copied());
        if element.is_finite() {
            row.difference = square(&mut got.iter().zip(wanted).map(|(a, b)| a - b));
        }
        row.row_norm = row.norm();
        row
    }

    /// Adds what other rows differ by.
    pub(crate) fn merge(&mut self, other: Self) {
        self.element = self.element.max(other.element);
        self.row_norm = self.row_norm.max(other.row_norm);
        self.rows += other.rows;
        self.difference += other.difference;
        self.wanted += other.wanted;
    }

    /// `||got - wanted|| / ||wanted||` of all rows together, in the Frobenius norm; 0 if both are zero.
    pub(crate) fn norm(&self) -> f64 {
        if self.difference > 0.0 { (self.difference / self.wanted).sqrt() } else { 0.0 }
    }
}

/// The error that a result of `dtype` may have: a few units in its last place, since a kernel may round probabilities to it too.
pub(crate) fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 2e-2,
        DType::F16 => 3e-3,
        _ => 2e-5,
    }
}

/// The error in norm that a row of such a result may have: of bf16, rounding has left nine tenths of it where few tokens count.
pub(crate) fn norm_tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 5e-3,
        DType::F16 => 5e-3 / 8.0,
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
    fn norms_are_of_a_row_and_of_all_rows() {
        let mut errors = Errors::of_row(&[3.0, 4.0], &[3.0, 4.0]);
        assert_eq!((errors.norm(), errors.row_norm), (0.0, 0.0));
        // Off by 0.3 and 0.4 of a row of norm 5: a tenth of it, and of both rows' norm a tenth by the root of two.
        errors.merge(Errors::of_row(&[3.3, 4.4], &[3.0, 4.0]));
        assert!((errors.row_norm - 0.1).abs() < 1e-12 && (errors.element - 0.1).abs() < 1e-12, "{errors:?}");
        assert!((errors.norm() - 0.1 / 2_f64.sqrt()).abs() < 1e-12 && errors.rows == 2, "{errors:?}");
        errors.merge(Errors::of_row(&[f64::NAN, 4.0], &[3.0, 4.0]));
        assert_eq!((errors.norm(), errors.row_norm, errors.element), (f64::INFINITY, f64::INFINITY, f64::INFINITY));
        assert_eq!(Errors::of_row(&[0.0], &[0.0]).norm(), 0.0);
        assert_eq!(Errors::of_row(&[1.0], &[0.0]).norm(), f64::INFINITY);
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
