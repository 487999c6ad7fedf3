//! Checks that the operations share. Each failure names the argument.

use std::ops::Range;

use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::tensor::{DType, Tensor};

/// Checks that a tensor has one of these element types.
pub(super) fn dtype<B: Backend>(arg: &'static str, tensor: &Tensor<B>, expected: &'static [DType]) -> Result<()> {
    match expected.contains(&tensor.dtype()) {
        true => Ok(()),
        false => Err(Error::DType { arg, expected, got: tensor.dtype() }),
    }
}

/// Checks that a tensor has this shape.
pub(super) fn shape<B: Backend>(arg: &'static str, tensor: &Tensor<B>, expected: &[usize]) -> Result<()> {
    match tensor.shape() == expected {
        true => Ok(()),
        false => Err(Error::Shape { arg, expected: format!("{expected:?}"), got: tensor.shape().to_vec() }),
    }
}

/// Checks that neighbours along the last dimension are adjacent in memory.
pub(super) fn dense_rows<B: Backend>(arg: &'static str, tensor: &Tensor<B>) -> Result<()> {
    match (tensor.shape().last(), tensor.strides().last()) {
        (Some(&extent), Some(&stride)) if stride != 1 && extent > 1 => {
            Err(Error::argument(arg, format!("last stride is {stride}; elements of a row must be adjacent")))
        }
        _ => Ok(()),
    }
}

/// Checks that rows, and all that lies above them, begin on multiples of `bytes`.
pub(super) fn aligned<B: Backend>(arg: &'static str, tensor: &Tensor<B>, bytes: usize) -> Result<()> {
    let above = tensor.shape().len().saturating_sub(1);
    let extents = tensor.shape()[..above].iter().zip(&tensor.strides()[..above]);
    let strides_fit =
        extents.clone().all(|(&extent, &stride)| extent <= 1 || (stride * tensor.dtype().size()).is_multiple_of(bytes));
    match strides_fit && tensor.addr().is_multiple_of(bytes as u64) {
        true => Ok(()),
        false => Err(Error::argument(
            arg,
            format!(
                "address {:#x} and strides {:?} of {}: rows must begin on multiples of {bytes} bytes on this device",
                tensor.addr(),
                tensor.strides(),
                tensor.dtype()
            ),
        )),
    }
}

/// Checks that a tensor is contiguous.
pub(super) fn contiguous<B: Backend>(arg: &'static str, tensor: &Tensor<B>) -> Result<()> {
    match tensor.is_contiguous() {
        true => Ok(()),
        false => Err(Error::argument(arg, format!("strides {:?}: a contiguous tensor is needed", tensor.strides()))),
    }
}

/// Checks that an output shares no memory with any of the other tensors, nor one of its elements with another.
pub(super) fn disjoint<B: Backend>(
    arg: &'static str,
    out: &Tensor<B>,
    others: &[(&'static str, &Tensor<B>)],
) -> Result<()> {
    // From the smallest stride up, each must step over all that the smaller ones reach. Nothing is allocated here.
    let dims = || out.strides().iter().copied().zip(out.shape().iter().copied()).filter(|&(_, extent)| extent > 1);
    for (stride, _) in dims() {
        let below = dims().filter(|&(other, _)| other < stride).map(|(other, extent)| other.saturating_mul(extent - 1));
        let reach = below.fold(1_usize, usize::saturating_add);
        let twins = dims().filter(|&(other, _)| other == stride).count();
        if stride < reach || twins > 1 {
            return Err(Error::argument(arg, format!("strides {:?}: elements lie upon each other", out.strides())));
        }
    }
    let span = |tensor: &Tensor<B>| -> Range<u64> { tensor.addr()..tensor.addr() + tensor.span_bytes() as u64 };
    let out = span(out);
    for (name, other) in others {
        let other = span(other);
        if out.start < other.end && other.start < out.end {
            return Err(Error::argument(arg, format!("overlaps `{name}` in memory")));
        }
    }
    Ok(())
}

/// A count as the kernels hold it.
pub(super) fn int(arg: &'static str, value: usize) -> Result<i32> {
    i32::try_from(value).map_err(|_| Error::argument(arg, format!("{value} is past {}", i32::MAX)))
}

/// A scale of cached values: positive, within float32's normal range (its reciprocal is finite, too), and 1 where the cache is not
/// quantised.
///
/// vLLM-like code that applies a scale to a 16-bit cache makes every score wrong by that factor (sglang issue 18396).
pub(crate) fn kv_scale(scale: f32, kv_dtype: DType) -> Result<()> {
    if !(scale.is_normal() && scale > 0.0) {
        let problem = format!("{scale:e}: a positive number from {:e} to {:e} is needed", f32::MIN_POSITIVE, f32::MAX);
        return Err(Error::argument("kv_scale", problem));
    }
    if scale != 1.0 && !kv_dtype.is_fp8() {
        return Err(Error::argument(
            "kv_scale",
            format!("{scale} for a {kv_dtype} cache: only fp8 caches have a scale, use 1"),
        ));
    }
    Ok(())
}

/// Checks a batch's lengths and page ids as the host knows them, before they are uploaded.
///
/// `seq_lens` counts cached tokens per sequence, this step's own included; `table(i)` is the row of the block table of sequence
/// `i`. Only the pages that a sequence uses are looked at: what lies behind may be anything.
///
/// # Errors
/// [`Error::SeqLenOutOfRange`] for a negative length or one that the row does not cover or that exceeds `max_seq_len`;
/// [`Error::PageOutOfRange`] for a page id outside `0..num_pages`.
pub fn check_batch<'a>(
    seq_lens: &[i32],
    table: impl Fn(usize) -> &'a [i32],
    page_size: usize,
    num_pages: usize,
    max_seq_len: usize,
) -> Result<()> {
    for (seq, &len) in seq_lens.iter().enumerate() {
        let row = table(seq);
        let used = used_pages(seq, len, row.len(), page_size, max_seq_len)?;
        pages(seq, &row[..used], num_pages)?;
    }
    Ok(())
}

/// Pages that sequence `seq` of `len` tokens uses of a row of `table_width`.
pub(crate) fn used_pages(
    seq: usize,
    len: i32,
    table_width: usize,
    page_size: usize,
    max_seq_len: usize,
) -> Result<usize> {
    let capacity = table_width.saturating_mul(page_size).min(max_seq_len);
    let tokens = usize::try_from(len).ok().filter(|&tokens| tokens <= capacity);
    tokens.map(|tokens| tokens.div_ceil(page_size)).ok_or(Error::SeqLenOutOfRange {
        seq,
        len: i64::from(len),
        capacity,
    })
}

/// Checks the pages that sequence `seq` uses.
pub(crate) fn pages(seq: usize, used: &[i32], num_pages: usize) -> Result<()> {
    let bad = used.iter().position(|&page| usize::try_from(page).map_or(true, |page| page >= num_pages));
    match bad {
        Some(slot) => Err(Error::PageOutOfRange { seq, slot, page: used[slot], num_pages }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_checked_only_inside_a_sequence() {
        let table: [&[i32]; 2] = [&[3, -1], &[0, 99]];
        let check = |lens: &[i32], pages| check_batch(lens, |i| table[i], 16, pages, 1000);
        assert!(check(&[16, 16], 4).is_ok());
        assert!(matches!(check(&[17, 1], 4), Err(Error::PageOutOfRange { seq: 0, slot: 1, page: -1, num_pages: 4 })));
        assert!(matches!(check(&[1, 17], 4), Err(Error::PageOutOfRange { seq: 1, slot: 1, page: 99, .. })));
        assert!(matches!(check(&[1, 33], 100), Err(Error::SeqLenOutOfRange { seq: 1, len: 33, capacity: 32 })));
        assert!(matches!(check(&[-1, 0], 4), Err(Error::SeqLenOutOfRange { seq: 0, len: -1, .. })));
        assert!(matches!(
            check_batch(&[17], |i| table[i], 16, 4, 16),
            Err(Error::SeqLenOutOfRange { capacity: 16, .. })
        ));
    }

    #[test]
    fn rows_that_begin_off_a_word_are_named() {
        use crate::Host;
        // SAFETY: nothing is read: only the addresses are looked at.
        let tensor = |addr, strides: [usize; 2]| unsafe {
            Tensor::<Host>::from_raw(addr, DType::BF16, &[4, 576], &strides).expect("two dimensions")
        };
        assert!(aligned("q", &tensor(0x1000, [576, 1]), 16).is_ok());
        for bad in [tensor(0x1008, [576, 1]), tensor(0x1000, [580, 1])] {
            assert!(matches!(aligned("q", &bad, 16), Err(Error::Argument { arg: "q", .. })));
            assert!(aligned("q", &bad, 8).is_ok() && aligned("q", &bad, 1).is_ok());
        }
        assert!(aligned("q", &tensor(0x1000, [580, 1]).narrow(0, 1..2).expect("a row"), 8).is_ok());
    }

    #[test]
    fn a_scale_needs_a_quantised_cache() {
        assert!(kv_scale(0.5, DType::Fp8E4m3).is_ok());
        assert!(kv_scale(1.0, DType::BF16).is_ok());
        for (scale, dtype) in [
            (0.5, DType::BF16),
            (f32::NAN, DType::Fp8E4m3),
            (0.0, DType::Fp8E4m3),
            (-1.0, DType::Fp8E4m3),
            (1e-40, DType::Fp8E4m3),
            (f32::INFINITY, DType::Fp8E4m3),
        ] {
            assert!(matches!(kv_scale(scale, dtype), Err(Error::Argument { arg: "kv_scale", .. })));
        }
    }
}
