//! The arithmetic of attention over one tile, generic over the vector type.
//!
//! Every output element is summed in one order that depends on the vector type alone, whatever block it is computed in: that is
//! what makes a row's result independent of the rows beside it.

use super::lanes::Lanes;
use super::{AccumulateArgs, Logits, RowState, ScoreArgs};

/// Rows of a register block.
const ROWS: usize = 4;

/// `s[row][token] = q[row] . k[token]`, in blocks of `ROWS` rows by `T` tokens.
///
/// # Safety
/// As [`super::Simd::scores`], and the instruction set of `L`.
#[inline(always)]
pub(super) unsafe fn scores<L: Lanes, const T: usize>(a: &ScoreArgs) {
    // Two blocks of tokens stay in the first-level cache while the rows pass by.
    let mut token = 0;
    while token < a.tokens {
        let end = a.tokens.min(token + 2 * T);
        let mut row = 0;
        while row + ROWS <= a.rows {
            // SAFETY: the block lies inside the extents that the caller vouches for.
            unsafe { score_rows::<L, ROWS, T>(a, row, token, end) };
            row += ROWS;
        }
        while row < a.rows {
            // SAFETY: as above.
            unsafe { score_rows::<L, 1, T>(a, row, token, end) };
            row += 1;
        }
        token = end;
    }
}

#[inline(always)]
unsafe fn score_rows<L: Lanes, const R: usize, const T: usize>(a: &ScoreArgs, row: usize, begin: usize, end: usize) {
    let mut token = begin;
    // SAFETY: rows and tokens lie inside the extents that the caller vouches for.
    unsafe {
        while token + T <= end {
            score_block::<L, R, T>(a, row, token);
            token += T;
        }
        while token + 2 <= end {
            score_block::<L, R, 2>(a, row, token);
            token += 2;
        }
        if token < end {
            score_block::<L, R, 1>(a, row, token);
        }
    }
}

#[inline(always)]
unsafe fn score_block<L: Lanes, const R: usize, const T: usize>(a: &ScoreArgs, row: usize, token: usize) {
    // SAFETY: `width` is a multiple of N, and rows and tokens lie inside the extents that the caller vouches for.
    unsafe {
        let q = a.q.add(row * a.q_stride);
        let k = a.k.add(token * a.k_stride);
        let mut sums = [[L::splat(0.0); T]; R];
        let mut d = 0;
        while d < a.width {
            let mut keys = [L::splat(0.0); T];
            for (t, key) in keys.iter_mut().enumerate() {
                *key = L::load(k.add(t * a.k_stride + d));
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let query = L::load(q.add(r * a.q_stride + d));
                for (sum, key) in sums.iter_mut().zip(keys) {
                    *sum = query.fma(key, *sum);
                }
            }
            d += L::N;
        }
        let s = a.s.add(row * a.s_stride + token);
        for (r, sums) in sums.iter().enumerate() {
            for (t, sum) in sums.iter().enumerate() {
                *s.add(r * a.s_stride + t) = sum.sum();
            }
        }
    }
}

/// `o[row] = o[row] * rescale[row] + sum over tokens of p[row][token] * v[token]`, in blocks of `ROWS` rows by `V` vectors.
///
/// # Safety
/// As [`super::Simd::accumulate`], and the instruction set of `L`.
#[inline(always)]
pub(super) unsafe fn accumulate<L: Lanes, const V: usize>(a: &AccumulateArgs) {
    let mut column = 0;
    // SAFETY: columns and rows lie inside the extents that the caller vouches for.
    unsafe {
        while column + V * L::N <= a.columns {
            accumulate_columns::<L, V>(a, column);
            column += V * L::N;
        }
        while column < a.columns {
            accumulate_columns::<L, 1>(a, column);
            column += L::N;
        }
    }
}

#[inline(always)]
unsafe fn accumulate_columns<L: Lanes, const V: usize>(a: &AccumulateArgs, column: usize) {
    let mut row = 0;
    // SAFETY: as the caller.
    unsafe {
        while row + ROWS <= a.rows {
            accumulate_block::<L, ROWS, V>(a, row, column);
            row += ROWS;
        }
        while row < a.rows {
            accumulate_block::<L, 1, V>(a, row, column);
            row += 1;
        }
    }
}

#[inline(always)]
unsafe fn accumulate_block<L: Lanes, const R: usize, const V: usize>(a: &AccumulateArgs, row: usize, column: usize) {
    // SAFETY: `columns` is a multiple of N, and rows and columns lie inside the extents that the caller vouches for.
    unsafe {
        let o = a.o.add(row * a.o_stride + column);
        let p = a.p.add(row * a.p_stride);
        let mut sums = [[L::splat(0.0); V]; R];
        for (r, sums) in sums.iter_mut().enumerate() {
            let rescale = L::splat(*a.rescale.add(row + r));
            for (c, sum) in sums.iter_mut().enumerate() {
                *sum = L::load(o.add(r * a.o_stride + c * L::N)).mul(rescale);
            }
        }
        for t in 0..a.tokens {
            let v = a.v.add(t * a.v_stride + column);
            let mut values = [L::splat(0.0); V];
            for (c, value) in values.iter_mut().enumerate() {
                *value = L::load(v.add(c * L::N));
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let weight = L::splat(*p.add(r * a.p_stride + t));
                for (sum, value) in sums.iter_mut().zip(values) {
                    *sum = weight.fma(value, *sum);
                }
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            for (c, sum) in sums.iter().enumerate() {
                sum.store(o.add(r * a.o_stride + c * L::N));
            }
        }
    }
}

/// Turns a row's raw scores into weights `exp(x - max)` and carries the running maximum and sum on. Returns what the row's
/// accumulated output must be multiplied with.
///
/// # Safety
/// As [`super::Simd::softmax`], and the instruction set of `L`.
#[inline(always)]
pub(super) unsafe fn softmax<L: Lanes>(row: *mut f32, visible: usize, logits: &Logits, state: &mut RowState) -> f32 {
    let padded = visible.next_multiple_of(L::N);
    // SAFETY: the caller gives `padded` elements.
    unsafe {
        for t in visible..padded {
            *row.add(t) = 0.0;
        }
        let mut t = 0;
        while t < padded {
            let x = L::load(row.add(t)).mul(L::splat(logits.scale));
            let x = if logits.softcap > 0.0 { soft_capped(x, logits.softcap) } else { x };
            x.store(row.add(t));
            t += L::N;
        }
        for t in visible..padded {
            *row.add(t) = f32::NEG_INFINITY;
        }

        let mut largest = L::splat(state.max);
        let mut t = 0;
        while t < padded {
            largest = L::load(row.add(t)).max(largest);
            t += L::N;
        }
        let max = largest.largest();
        let mut sum = L::splat(0.0);
        let mut t = 0;
        while t < padded {
            let weight = exp(L::load(row.add(t)).sub(L::splat(max)));
            weight.store(row.add(t));
            sum = sum.add(weight);
            t += L::N;
        }
        let mut rescale = [0.0; MAX_LANES];
        exp(L::splat(state.max - max)).store(rescale.as_mut_ptr());
        let rescale = rescale[0];
        *state = RowState { max, sum: state.sum * rescale + sum.sum() };
        rescale
    }
}

const MAX_LANES: usize = 16;

/// `exp(x)` to about one unit in the last place; 0 below -87.3, where float32 would leave its normal range. Not for x > 88.
#[inline(always)]
unsafe fn exp<L: Lanes>(x: L) -> L {
    // 1.5 * 2^23 rounds to an integer when added; the exponent's bias is folded in.
    const ROUND: f32 = 12_582_912.0 + 127.0;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Minimax polynomial of (exp(r) - 1 - r) / r^2 on [-ln2/2, ln2/2] (Cephes, expf).
    const POLY: [f32; 6] = [1.987_569_1e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_65, 0.5];
    // SAFETY: only arithmetic; the caller vouches for the instruction set.
    unsafe {
        let shifted = x.fma(L::splat(std::f32::consts::LOG2_E), L::splat(ROUND));
        let n = shifted.sub(L::splat(ROUND));
        let r = n.fma(L::splat(-LN2_HIGH), x);
        let r = n.fma(L::splat(-LN2_LOW), r);
        let mut poly = L::splat(POLY[0]);
        for c in &POLY[1..] {
            poly = poly.fma(r, L::splat(*c));
        }
        let value = r.mul(r).fma(poly, r.add(L::splat(1.0))).mul(shifted.shift_into_exponent());
        x.select_below(L::splat(-87.3), L::splat(0.0), value)
    }
}

/// `cap * tanh(x / cap)` by exponentials of negative numbers only, so that nothing overflows.
#[inline(always)]
unsafe fn soft_capped<L: Lanes>(x: L, cap: f32) -> L {
    // SAFETY: only arithmetic; the caller vouches for the instruction set.
    unsafe {
        let y = x.mul(L::splat(1.0 / cap));
        let size = y.abs();
        let e = exp(size.mul(L::splat(-2.0)));
        let large = L::splat(1.0).sub(e).div(L::splat(1.0).add(e));
        // Near zero 1 - e cancels; the series does not.
        let square = y.mul(y);
        let series = square.fma(L::splat(2.0 / 15.0), L::splat(-1.0 / 3.0)).mul(square).fma(size, size);
        let tanh = size.select_below(L::splat(0.1), series, large).mul(L::splat(cap));
        y.select_below(L::splat(0.0), L::splat(0.0).sub(tanh), tanh)
    }
}
