//! `merge_states` and `dcp_combine`: attention results of the same rows over disjoint tokens, merged by their LSE.

use super::convert;
use super::memory::element;
use super::pool::Pool;
use crate::kernel::Variant;
use crate::kernel::params::{DcpCombineParams, MergeParams};

/// Scratch of a thread: an input row and an output row of this many columns at a time.
const COLUMNS: usize = 256;

/// Bytes of scratch that a thread needs.
pub(super) const SCRATCH_BYTES: usize = 2 * COLUMNS * size_of::<f32>();

/// One side of a merge: where its row begins, in elements, and its weight.
struct Side {
    addr: u64,
    at: i64,
    weight: f32,
}

/// `out[at..] = sum of weight * row`. A side of weight 0 is not read: its row may hold anything.
unsafe fn weighted_sum(
    variant: &Variant,
    sides: impl Fn(usize) -> Side,
    count: usize,
    to: Side,
    width: usize,
    scratch: &mut [f32],
) {
    // `prepare` has reserved it.
    let Some(scratch) = scratch.get_mut(..2 * COLUMNS) else { return };
    let (row, out) = scratch.split_at_mut(COLUMNS);
    let size = variant.q_dtype.size() as i64;
    for column in (0..width).step_by(COLUMNS) {
        let len = COLUMNS.min(width - column);
        let (row, out) = (&mut row[..len], &mut out[..len]);
        out.fill(0.0);
        for Side { addr, at, weight } in (0..count).map(&sides).filter(|side| side.weight != 0.0) {
            // SAFETY: rows have `width` elements.
            unsafe { convert::load(variant.q_dtype, element(addr, (at + column as i64) * size), row) };
            for (out, &x) in out.iter_mut().zip(&*row) {
                *out += weight * x;
            }
        }
        // SAFETY: as above.
        unsafe { convert::store(variant.q_dtype, out, 1.0, element(to.addr, (to.at + column as i64) * size)) };
    }
}

/// # Safety
/// As [`Backend::launch`](crate::Backend::launch).
pub(super) unsafe fn merge_states(p: &MergeParams, variant: &Variant, pool: &Pool) -> bool {
    let (heads, width) = (i64::from(p.num_heads), p.head_dim as usize);
    pool.run(p.num_tokens as usize, &|token, scratch| {
        let token = token as i64;
        for head in 0..heads {
            let at = (token * heads + head) * width as i64;
            let lse_at = head * i64::from(p.num_tokens) + token;
            // SAFETY: the LSE tensors are `[heads, tokens]`.
            let lse = |addr| unsafe { *element::<f32>(addr, lse_at) };
            let (prefix, suffix) = (lse(p.prefix_lse), lse(p.suffix_lse));
            let (weights, merged) = if token >= i64::from(p.tokens_with_context) {
                ([0.0, 1.0], suffix)
            } else {
                // Some kernels say +inf where they saw nothing.
                let [a, b] = [prefix, suffix].map(|x| if x == f32::INFINITY { f32::NEG_INFINITY } else { x });
                let max = if a > b { a } else { b };
                let [wa, wb] = [a, b].map(|x| if x == f32::NEG_INFINITY { 0.0 } else { (x - max).exp() });
                let sum = wa + wb;
                if sum == 0.0 { ([0.0, 0.0], f32::NEG_INFINITY) } else { ([wa / sum, wb / sum], max + sum.ln()) }
            };
            let side = |i: usize| Side { addr: [p.prefix_out, p.suffix_out][i], at, weight: weights[i] };
            // SAFETY: the caller's promise.
            unsafe {
                weighted_sum(variant, side, 2, Side { addr: p.out, at, weight: 1.0 }, width, scratch);
                if p.out_lse != 0 {
                    *element::<f32>(p.out_lse, lse_at) = merged;
                }
            }
        }
    })
}

/// # Safety
/// As [`Backend::launch`](crate::Backend::launch).
pub(super) unsafe fn dcp_combine(p: &DcpCombineParams, variant: &Variant, pool: &Pool) -> bool {
    let (heads, width, ranks) = (i64::from(p.num_heads), p.head_dim as usize, p.num_ranks as usize);
    let natural = p.natural_log != 0;
    pool.run(p.num_rows as usize, &|row, scratch| {
        for head in 0..heads {
            let at = row as i64 * heads + head;
            // SAFETY: every rank has `[rows, heads]` LSE values.
            let lse =
                |rank: usize| match unsafe { *element::<f32>(p.partial_lse, rank as i64 * p.lse_stride_rank + at) } {
                    x if x.is_finite() => x,
                    _ => f32::NEG_INFINITY,
                };
            let max = (0..ranks).map(lse).fold(f32::NEG_INFINITY, f32::max);
            let weight = |rank: usize| match lse(rank) {
                f32::NEG_INFINITY => 0.0,
                x if natural => (x - max).exp(),
                x => (x - max).exp2(),
            };
            let sum: f32 = (0..ranks).map(weight).sum();
            let side = |rank: usize| Side {
                addr: p.partial_out,
                at: rank as i64 * p.out_stride_rank + at * width as i64,
                weight: if sum == 0.0 { 0.0 } else { weight(rank) / sum },
            };
            let to = Side { addr: p.out, at: at * width as i64, weight: 1.0 };
            // SAFETY: the caller's promise.
            unsafe {
                weighted_sum(variant, side, ranks, to, width, scratch);
                if p.out_lse != 0 {
                    let log = if natural { sum.ln() } else { sum.log2() };
                    *element::<f32>(p.out_lse, at) = if sum == 0.0 { f32::NEG_INFINITY } else { max + log };
                }
            }
        }
    })
}
