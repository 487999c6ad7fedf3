//! Which rows of a point's result are compared with float64, and what they differ by.

use latentwave::{MlaConfig, Result, reference};
use rayon::prelude::*;

use crate::interrupt;
use crate::rng::Rng;
use crate::rows::{Errors, Rows};

/// Sequences that are checked: the shortest, the longest and as many lengths between, the first and the last of the batch.
const SEQUENCES: usize = 16;

/// Heads of each query token that are checked beside the first, the middle and the last one.
const DRAWN_HEADS: usize = 2;

/// What a point's output has to be.
pub(super) struct Wanted<'a, R> {
    pub(super) mla: &'a MlaConfig,
    /// Cached tokens of each sequence.
    pub(super) lens: &'a [i32],
    pub(super) query_len: usize,
    /// `[batch * query_len, heads * width]`.
    pub(super) q_rows: &'a Rows,
    /// Distinct rows of the cache.
    pub(super) kv_rows: &'a Rows,
    /// Which of them a sequence has for a token.
    pub(super) cached_row: R,
}

/// One query token of a sequence, and its heads that are checked.
#[derive(Debug, PartialEq, Eq)]
struct Checked {
    seq: usize,
    token: usize,
    heads: Vec<usize>,
}

/// First, middle and last of `len`, without repetitions.
fn ends(len: usize) -> Vec<usize> {
    let mut ends = vec![0, len / 2, len.saturating_sub(1)];
    ends.dedup();
    ends
}

/// Sequences evenly spread over all lengths, of each the first, middle and last query token, of each such heads and some more.
fn choose(lens: &[i32], query_len: usize, num_heads: usize, seed: u64) -> Vec<Checked> {
    let mut rng = Rng::new(seed ^ 0x0c4e_c4ed);
    let last = lens.len().saturating_sub(1);
    let mut by_length: Vec<usize> = (0..lens.len()).collect();
    by_length.sort_by_key(|&seq| lens[seq]);
    let mut seqs: Vec<usize> = (0..SEQUENCES).map(|i| by_length[i * last / (SEQUENCES - 1)]).collect();
    seqs.extend([0, last]);
    seqs.sort_unstable();
    seqs.dedup();
    let mut checked = Vec::new();
    for seq in seqs {
        for token in ends(query_len) {
            let mut heads = ends(num_heads);
            heads.extend((0..DRAWN_HEADS).map(|_| rng.below(num_heads)));
            heads.sort_unstable();
            heads.dedup();
            checked.push(Checked { seq, token, heads });
        }
    }
    checked
}

impl<R: Fn(usize, usize) -> usize + Sync> Wanted<'_, R> {
    /// What `out` of all heads of one query token, `[heads, rank]`, differs by from float64. `cached` has the values of `kv_rows`.
    fn errors(&self, checked: &Checked, out: &[f64], cached: &[f64]) -> Errors {
        let &Checked { seq, token, ref heads } = checked;
        let MlaConfig { kv_lora_rank: rank, sm_scale, softcap, .. } = *self.mla;
        let width = self.mla.head_dim();
        let seen = (self.lens[seq] as usize + token + 1).saturating_sub(self.query_len);
        let mut counts = vec![0; self.kv_rows.len()];
        for j in 0..seen {
            counts[(self.cached_row)(seq, j)] += 1;
        }
        let mut errors = Errors::default();
        for &head in heads {
            let q = self.q_rows.values(seq * self.query_len + token, head * width..(head + 1) * width);
            let fill = |j: usize, row: &mut [f64]| row.copy_from_slice(&cached[j * width..][..width]);
            let wanted = reference::attend_repeated(&q, rank, &counts, sm_scale.into(), softcap.into(), fill).out;
            errors.merge(Errors::of_row(&out[head * rank..(head + 1) * rank], &wanted));
        }
        errors
    }
}

/// Compares chosen rows of an output with float64, on all processor cores; `None` at Ctrl-C. `read` has the values of a row of
/// `[batch * query_len, heads * rank]`.
///
/// # Errors
/// What `read` returns.
pub(super) fn errors<R: Fn(usize, usize) -> usize + Sync>(
    wanted: &Wanted<'_, R>,
    seed: u64,
    read: impl Fn(usize) -> Result<Vec<f64>>,
) -> Result<Option<Errors>> {
    let width = wanted.mla.head_dim();
    let cached: Vec<f64> = (0..wanted.kv_rows.len()).flat_map(|row| wanted.kv_rows.values(row, 0..width)).collect();
    let checked = choose(wanted.lens, wanted.query_len, wanted.mla.num_heads, seed);
    let outs = checked.iter().map(|at| read(at.seq * wanted.query_len + at.token)).collect::<Result<Vec<_>>>()?;
    let of_rows: Vec<Option<Errors>> = checked
        .par_iter()
        .zip(&outs)
        .map(|(checked, out)| (!interrupt::caught()).then(|| wanted.errors(checked, out, &cached)))
        .collect();
    Ok(of_rows.into_iter().try_fold(Errors::default(), |mut all, errors| {
        all.merge(errors?);
        Some(all)
    }))
}

#[cfg(test)]
mod tests {
    use latentwave::DType;

    use super::*;

    #[test]
    fn rows_of_every_kind_are_checked() {
        let mut lens = vec![4096; 40];
        (lens[7], lens[20]) = (131_072, 5);
        let checked = choose(&lens, 4, 128, 0);
        for seq in [0, 7, 20, 39] {
            let tokens: Vec<_> = checked.iter().filter(|at| at.seq == seq).map(|at| at.token).collect();
            assert_eq!(tokens, [0, 2, 3], "sequence {seq}");
        }
        assert!(checked.iter().all(|at| [0, 64, 127].iter().all(|head| at.heads.contains(head))), "{checked:?}");
        assert!(checked.iter().any(|at| at.heads.len() == 5), "{checked:?}");
        let one = choose(&[3], 1, 1, 0);
        assert_eq!(one, [Checked { seq: 0, token: 0, heads: vec![0] }]);
        let even: Vec<i32> = (0..64).collect();
        assert!(choose(&even, 1, 1, 0).len() >= SEQUENCES);
    }

    /// An error in one row must appear in the figures, as large as it is: also over an fp8 cache, whose reference is what its
    /// bytes stand for.
    #[test]
    fn a_planted_error_is_reported() {
        let mla = MlaConfig { num_heads: 2, ..MlaConfig::deepseek(2, 4) };
        let (lens, query_len, rank, width) = ([40, 9], 2, mla.kv_lora_rank, mla.head_dim());
        for kv_dtype in [DType::BF16, DType::Fp8E4m3] {
            let mut rng = Rng::new(3);
            let kv_rows = Rows::random(kv_dtype, 31, width, &mut rng);
            let q_rows = Rows::random(DType::BF16, 4, 2 * width, &mut rng);
            let cached_row = |seq: usize, token: usize| (seq * 17 + token * 5) % 31;
            let wanted = Wanted { mla: &mla, lens: &lens, query_len, q_rows: &q_rows, kv_rows: &kv_rows, cached_row };
            // Every row by itself: token after token, each counted once.
            let right = |row: usize| -> Vec<f64> {
                let (seq, seen) = (row / 2, lens[row / 2] as usize + row % 2 - 1);
                let of_head = |head: usize| {
                    let q = q_rows.values(row, head * width..(head + 1) * width);
                    let fill = |j: usize, to: &mut [f64]| {
                        to.copy_from_slice(&kv_rows.values(cached_row(seq, j), 0..width));
                    };
                    reference::attend(&q, rank, seen, mla.sm_scale.into(), 0.0, fill).out
                };
                (0..2).flat_map(of_head).collect()
            };
            let clean = errors(&wanted, 0, |row| Ok(right(row))).unwrap().unwrap();
            assert!(clean.rows == 8 && clean.norm() < 1e-13 && clean.element < 1e-13, "{clean:?}");

            let planted = |row| {
                let mut out = right(row);
                if row == 2 {
                    out[..rank].iter_mut().for_each(|x| *x *= 1.01);
                }
                Ok(out)
            };
            let square = |values: &[f64]| values.iter().map(|x| x * x).sum::<f64>();
            let all: f64 = (0..4).map(|row| square(&right(row))).sum();
            let expected = 0.01 * (square(&right(2)[..rank]) / all).sqrt();
            let found = errors(&wanted, 0, planted).unwrap().unwrap();
            assert!((found.row_norm - 0.01).abs() < 1e-9 && (found.element - 0.01).abs() < 1e-9, "{found:?}");
            assert!((found.norm() - expected).abs() < 1e-9 && expected > 1e-3, "{found:?} {expected}");
        }
    }
}
