//! Attention in float64, computed as it is written down: what every kernel is compared with.
//!
//! Nothing here is fast. Scores, softmax and sums are float64, over inputs that convert to float64 exactly.

use half::{bf16, f16};

use crate::fp8::{self, ds_mla};
use crate::tensor::DType;

/// Attention of one query row.
#[derive(Debug, Clone, PartialEq)]
pub struct Attended {
    /// Output, `[kv_lora_rank]`; zeros if no token is seen.
    pub out: Vec<f64>,
    /// Natural log of the sum of exponentiated logits; `-inf` if no token is seen.
    pub lse: f64,
}

/// Attention of a query row `[width]` over `num_tokens` cached rows of the same width, whose first `kv_lora_rank` elements
/// are the values. `kv_row(j, row)` fills `row` with cached row `j`.
///
/// Logits are `x = q . k * sm_scale`, then `softcap * tanh(x / softcap)` unless `softcap` is 0.
pub fn attend(
    q: &[f64],
    kv_lora_rank: usize,
    num_tokens: usize,
    sm_scale: f64,
    softcap: f64,
    kv_row: impl FnMut(usize, &mut [f64]),
) -> Attended {
    attend_repeated(q, kv_lora_rank, &vec![1; num_tokens], sm_scale, softcap, kv_row)
}

/// As [`attend`], over `counts[j]` tokens with cached row `j` each: what long sequences of few distinct rows cost does not
/// depend on their length. A row that no token has is not asked for.
pub fn attend_repeated(
    q: &[f64],
    kv_lora_rank: usize,
    counts: &[u32],
    sm_scale: f64,
    softcap: f64,
    mut kv_row: impl FnMut(usize, &mut [f64]),
) -> Attended {
    let mut row = vec![0.0; q.len()];
    let seen = || counts.iter().enumerate().filter(|(_, count)| **count > 0);
    let logits: Vec<f64> = seen()
        .map(|(j, _)| {
            kv_row(j, &mut row);
            let x = q.iter().zip(&row).map(|(q, k)| q * k).sum::<f64>() * sm_scale;
            if softcap > 0.0 { softcap * (x / softcap).tanh() } else { x }
        })
        .collect();
    let mut out = vec![0.0; kv_lora_rank];
    if logits.is_empty() {
        return Attended { out, lse: f64::NEG_INFINITY };
    }
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut sum = 0.0;
    for ((j, &count), logit) in seen().zip(&logits) {
        let weight = f64::from(count) * (logit - max).exp();
        sum += weight;
        kv_row(j, &mut row);
        for (out, v) in out.iter_mut().zip(&row) {
            *out += weight * v;
        }
    }
    out.iter_mut().for_each(|x| *x /= sum);
    Attended { out, lse: max + sum.ln() }
}

/// Merges results of the same row over disjoint sets of tokens.
pub fn merge(parts: &[Attended]) -> Attended {
    let max = parts.iter().map(|part| part.lse).fold(f64::NEG_INFINITY, f64::max);
    let mut out = vec![0.0; parts.first().map_or(0, |part| part.out.len())];
    let mut sum = 0.0;
    for part in parts.iter().filter(|part| part.lse != f64::NEG_INFINITY) {
        let weight = (part.lse - max).exp();
        sum += weight;
        for (out, x) in out.iter_mut().zip(&part.out) {
            *out += weight * x;
        }
    }
    if sum == 0.0 {
        return Attended { out, lse: f64::NEG_INFINITY };
    }
    out.iter_mut().for_each(|x| *x /= sum);
    Attended { out, lse: max + sum.ln() }
}

/// A decode step over a paged cache, all in float64.
#[derive(Debug, Clone, Copy)]
pub struct PagedStep<'a> {
    /// Queries, `[batch, query_len, num_heads, kv_lora_rank + rope_dim]`.
    pub q: &'a [f64],
    /// Cache, `[num_pages, page_size, kv_lora_rank + rope_dim]`.
    pub kv: &'a [f64],
    /// Page ids, `[batch, table_width]`.
    pub block_table: &'a [i32],
    /// Cached tokens of each sequence, this step's own included.
    pub seq_lens: &'a [i32],
    /// Query tokens per sequence.
    pub query_len: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Width of the latent part.
    pub kv_lora_rank: usize,
    /// Width of the rotary part.
    pub rope_dim: usize,
    /// Tokens per page.
    pub page_size: usize,
    /// Softmax scale.
    pub sm_scale: f64,
    /// Logit soft cap, 0 for none.
    pub softcap: f64,
    /// Whether a query token sees only itself and what lies before it.
    pub causal: bool,
}

impl PagedStep<'_> {
    /// Cached tokens that query token `token` of sequence `seq` sees.
    pub fn visible(&self, seq: usize, token: usize) -> usize {
        let len = i64::from(self.seq_lens[seq]);
        if !self.causal {
            return len as usize;
        }
        (len - self.query_len as i64 + 1 + token as i64).max(0) as usize
    }

    /// Attention of one row.
    ///
    /// # Panics
    /// If an index, a page id or a length lies outside its slice.
    pub fn row(&self, seq: usize, token: usize, head: usize) -> Attended {
        let width = self.kv_lora_rank + self.rope_dim;
        let at = ((seq * self.query_len + token) * self.num_heads + head) * width;
        let table_width = self.block_table.len() / self.seq_lens.len();
        let visible = self.visible(seq, token);
        attend(&self.q[at..at + width], self.kv_lora_rank, visible, self.sm_scale, self.softcap, |j, row| {
            let page = self.block_table[seq * table_width + j / self.page_size];
            let at = (page as usize * self.page_size + j % self.page_size) * width;
            row.copy_from_slice(&self.kv[at..at + width]);
        })
    }

    /// Attention of all rows: outputs `[batch, query_len, num_heads, kv_lora_rank]` and LSE `[batch, query_len, num_heads]`.
    ///
    /// # Panics
    /// As [`PagedStep::row`].
    pub fn all(&self) -> (Vec<f64>, Vec<f64>) {
        let (mut out, mut lse) = (Vec::new(), Vec::new());
        for seq in 0..self.seq_lens.len() {
            for token in 0..self.query_len {
                for head in 0..self.num_heads {
                    let row = self.row(seq, token, head);
                    out.extend(row.out);
                    lse.push(row.lse);
                }
            }
        }
        (out, lse)
    }
}

/// Little-endian elements of any type as float64, exactly; 8-bit floats times `scale`, other types not.
pub fn to_f64(dtype: DType, bytes: &[u8], scale: f64) -> Vec<f64> {
    fn elements<const N: usize>(bytes: &[u8], f: impl Fn([u8; N]) -> f64) -> Vec<f64> {
        bytes.chunks_exact(N).map(|chunk| f(std::array::from_fn(|i| chunk[i]))).collect()
    }
    match dtype {
        DType::F32 => elements(bytes, |b| f64::from(f32::from_le_bytes(b))),
        DType::F16 => elements(bytes, |b| f16::from_le_bytes(b).to_f64()),
        DType::BF16 => elements(bytes, |b| bf16::from_le_bytes(b).to_f64()),
        DType::Fp8E4m3 | DType::Fp8E4m3Fnuz => elements(bytes, |[b]| f64::from(fp8::to_f32(dtype, b)) * scale),
        DType::U8 => elements(bytes, |[b]| f64::from(b)),
        DType::I32 => elements(bytes, |b| f64::from(i32::from_le_bytes(b))),
        DType::I64 => elements(bytes, |b| i64::from_le_bytes(b) as f64),
    }
}

/// A 656-byte row as 512 latents and 64 rope values.
///
/// # Panics
/// If the row has another length.
pub fn ds_mla_to_f64(row: &[u8]) -> Vec<f64> {
    assert_eq!(row.len(), ds_mla::ROW_BYTES, "bytes of a row");
    let (latents, rest) = row.split_at(ds_mla::SCALES_AT);
    let (scales, rope) = rest.split_at(ds_mla::ROPE_AT - ds_mla::SCALES_AT);
    let scales = to_f64(DType::F32, scales, 1.0);
    let tiles = latents.chunks(ds_mla::TILE).zip(scales);
    let mut values: Vec<f64> = tiles.flat_map(|(tile, scale)| to_f64(DType::Fp8E4m3, tile, scale)).collect();
    values.extend(to_f64(DType::BF16, rope, 1.0));
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attention_of_two_tokens_by_hand() {
        let rows = [[1.0, 2.0, 0.0], [3.0, -1.0, 0.0]];
        let got = attend(&[1.0, 0.0, 5.0], 2, 2, 0.5, 0.0, |j, row| row.copy_from_slice(&rows[j]));
        // Logits 0.5 and 1.5.
        let (a, b) = (0.5_f64.exp(), 1.5_f64.exp());
        let want = [(a + 3.0 * b) / (a + b), (2.0 * a - b) / (a + b)];
        assert!((got.lse - (a + b).ln()).abs() < 1e-15);
        assert!(got.out.iter().zip(want).all(|(x, y)| (x - y).abs() < 1e-15), "{got:?} {want:?}");

        let parts: Vec<Attended> = (0..2)
            .map(|part| attend(&[1.0, 0.0, 5.0], 2, 1, 0.5, 0.0, |_, row| row.copy_from_slice(&rows[part])))
            .collect();
        let merged = merge(&parts);
        assert!((merged.lse - got.lse).abs() < 1e-15);
        assert!(merged.out.iter().zip(&got.out).all(|(x, y)| (x - y).abs() < 1e-15));
    }

    #[test]
    fn a_repeated_row_counts_as_often_as_it_is_there() {
        let rows = [[1.0, 2.0, 0.0], [3.0, -1.0, 0.5], [f64::NAN; 3]];
        let fill = |j: usize, row: &mut [f64]| row.copy_from_slice(&rows[j]);
        let got = attend_repeated(&[1.0, 0.0, 5.0], 2, &[2, 1, 0], 0.5, 0.0, fill);
        let want = attend(&[1.0, 0.0, 5.0], 2, 3, 0.5, 0.0, |j, row| row.copy_from_slice(&rows[j % 2]));
        assert!((got.lse - want.lse).abs() < 1e-15);
        assert!(got.out.iter().zip(&want.out).all(|(x, y)| (x - y).abs() < 1e-15), "{got:?} {want:?}");
    }

    #[test]
    fn nothing_seen_is_zero_and_minus_infinity() {
        let got = attend(&[1.0, 1.0], 1, 0, 1.0, 0.0, |_, _| panic!("no row may be asked for"));
        assert_eq!(got, Attended { out: vec![0.0], lse: f64::NEG_INFINITY });
        assert_eq!(merge(&[got.clone(), got.clone()]), got);
    }
}
