//! Hopper's forms of stage 1 (`kernels/sm90/`): which problems they serve, and what they take.
//!
//! Measured on one H200 (`benches/results/hopper-h200.md`), stage 2 included, beside the portable form that would serve the
//! problem, which was measured in an earlier run. Tokens are sequences times the longest that is captured, which says nothing of
//! their lengths later: a form is chosen where it wins by lengths below the longest too.
//!
//! | rows of a group | sequences, tokens | form | measured, µs, beside the portable form's |
//! |---|---|---|---|
//! | over 32 | from 8,192 tokens on (one sequence: more) | rows | B2 S4096 H128 19.4 (29.8), B8 S1024 H128 25.2 (42.9), B4 S4096 H128 22.6 (45.5), B16 S4096 H128 45.9 (103.4), B64 S4096 H64 95.6 (190), B16 S16384 H64 92.0 (181), B1 S131072 H128 77.4 (174) |
//! | 17 to 32 | 4, 65,536 | keys of 32 rows | B64 S4096 H32 83.1 (110), B4 S131072 H32 154 (208) |
//! | up to 16 | 4, 65,536 | keys of 16 rows | B128 S4096 H16 144 (155), B64 S4096 79.9 (87), B64 S16384 278 (300), B16 S4096 28.9 (34.3), B4 S16384 28.1 (33.3) |
//! | over 32, of an fp8 cache | as of a 16-bit one | wide | beside the rows form that served them before: B16 S16384 H64 75.0 (82.7), B64 S4096 H128 122 (138), B16 S4096 H128 46.0 (51.6), B1 S131072 H128 70.9 (79.4), B1 S4096 H128, captured long, 15.7 (17.2) |
//! | up to 32, of an fp8 cache | any, 4,096 | keys of 16 or 32 rows | B128 S4096 H16 86.3 (203), B64 S4096 H16 51.7 (111), B1 S4096 H16 10.9 (12.5), H32 14.1 (15.9), B1 S65536 H16 23.0 (37.8), B2 S2048 H16 10.4 (11.8), B4 S1024 H16 10.4 (11.3), B16 S1024 H16 19.0 (35.9), B8 S2048 H32 16.8 (21.3); captured long but short, B1 S1024 H16 9.9 (9.0), H32 12.9 (11.0) |
//! | the others | | portable | |
//!
//! Where the policy leaves the splits open, few tokens are served by the form of `select_few.rs` before any of these, also by a kernel
//! that has the rows form for the same sequence when it is longer.

use super::params::PartialOrder;
use super::{Variant, select, select_few};
use crate::backend::DecodeShape;
use crate::tensor::DType;

/// `kernels/sm90/mla_decode_split_rows.cu`: 64 query rows are the rows of the matrix products.
pub(super) const ROWS_FORM: u32 = 1;
/// `kernels/sm90/mla_decode_split_keys.cu`: tokens are, for 16 or 32 query rows.
pub(super) const KEYS_FORM: u32 = 2;
/// `kernels/sm90/mla_decode_split_wide.cu`: tokens are, for 64 query rows over an fp8 cache.
pub(super) const WIDE_FORM: u32 = 10;

/// Tokens of a tile, and columns of a unit of one.
const TILE_TOKENS: u32 = 64;
const UNIT_BYTES: u32 = TILE_TOKENS * 64 * 2;
/// What a piece costs the rows form beside its tiles, in tiles.
pub(super) const ROWS_FIXED_COST: i32 = 3;
/// Likewise the wide form.
pub(super) const WIDE_FIXED_COST: i32 = 4;
/// Most pieces of a sequence that the keys form merges itself, in blocks of 16 rows over a 16-bit cache. Measured, µs, beside stage 2:
/// 2 pieces 78.0 (78.4), 3 57.1 (57.0), 4 44.7 (43.9); others are slower with 2 already: 32 rows 84.3 (82.9), by an older stage 2.
const KEYS_MERGED_PIECES: i32 = 2;
/// Tiles in the rows form's ring, half of the last left out.
const STAGES: u32 = 3;
/// Units of a query row that the rows form has in shared memory; the others are in registers.
const STAGED_UNITS: u32 = 6;

/// From how many sequences and tokens on the keys form is chosen: the fewest that it was measured at.
const MANY_SEQUENCES: usize = 4;
const MANY_TOKENS: usize = 65_536;
/// Likewise over an fp8 cache, of however many sequences: the portable form widens one by way of shared memory, and is slower from here on.
const MANY_TOKENS_FP8: usize = 4096;

/// Tokens of the smallest box worth a bulk copy, of a 16-bit and of an fp8 cache. A page has boxes of the largest power of two that
/// divides it, which four warps copy where it is below a tile; rows of smaller ones are gathered, which takes as long whatever the page.
/// Measured, µs:
///
/// | | boxes of 64 | of 32 | of 16 | of 8 | of 4 | gathered |
/// |---|---|---|---|---|---|---|
/// | B64 S4096 H16 | 76.4 | 77.6 | 77.1 | 78.0 | 78.8 | 79.1 |
/// | B64 S4096 H32 | 80.0 | 80.8 | 80.1 | 80.7 | 82.0 | 81.3 |
/// | B64 S4096 H128 | 111 | 116 | 117 | 122 | 148 | 126 |
/// | B16 S16384 H64 | 81.5 | 82.4 | 83.2 | 83.9 | 86.0 | 85.0 |
/// | B128 S4096 H16, fp8, two warps | 90 | | 90 | | | 102 |
const BOX_TOKENS: usize = 8;
const BOX_TOKENS_FP8: usize = 16;

/// Whether there is a form of many rows for such a cache: the wide form's third warpgroup has no warps to gather rows with.
fn serves_many_rows(base: &Variant) -> bool {
    !(base.gather && base.kv_dtype.is_fp8())
}

/// The form of more than 32 rows: rows of the products for 16 bits, and for an fp8 cache tokens, which then need not be widened in
/// shared memory.
fn many_rows_variant(base: Variant) -> Variant {
    if base.kv_dtype.is_fp8() { wide_variant(base) } else { rows_variant(base) }
}

/// The form's variant for a group of `rows` rows, if one of Hopper's is to serve the problem.
pub(super) fn split(shape: &DecodeShape, rows: usize, base: Variant, arch: &str) -> Option<Variant> {
    if arch != "sm_90a" || !serves(&base) || shape.portable {
        return None;
    }
    let base = of_pages(base, shape.page_size);
    let tokens = shape.batch.saturating_mul(shape.max_seq_len);
    if rows > 32 && serves_many_rows(&base) {
        let few = tokens < select::FEW_TOKENS || (shape.batch == 1 && tokens == select::FEW_TOKENS);
        return (!few).then(|| many_rows_variant(base));
    }
    let many = if base.kv_dtype.is_fp8() {
        tokens >= MANY_TOKENS_FP8
    } else {
        shape.batch >= MANY_SEQUENCES && tokens >= MANY_TOKENS
    };
    many.then(|| keys_variant(base, if rows <= 16 { 16 } else { 32 }))
}

/// Whether a cache's types and widths are what these forms are made for.
fn serves(base: &Variant) -> bool {
    let types = base.kv_dtype == base.q_dtype || base.kv_dtype == DType::Fp8E4m3;
    types && base.kv_lora_rank == 512 && matches!(base.rope_dim, 0 | 64)
}

/// Whether the cache's pages are worth copying by boxes, and whether by several warps, said in the variant. An fp8 cache has two warps that
/// copy boxes, whatever its pages.
pub(super) fn of_pages(base: Variant, page_size: usize) -> Variant {
    let fp8 = base.kv_dtype.is_fp8();
    let gather = !page_size.is_multiple_of(if fp8 { BOX_TOKENS_FP8 } else { BOX_TOKENS });
    let whole = page_size.is_multiple_of(TILE_TOKENS as usize);
    Variant { gather, small: !gather && !whole && !fp8, ..base }
}

pub(super) fn rows_variant(base: Variant) -> Variant {
    Variant { block_rows: 64, tile_tokens: TILE_TOKENS, stages: STAGES, threads: 384, form: ROWS_FORM, ..base }
}

/// The wide form's stages are units of its ring, whole tiles, as many as fit beside the queries.
fn wide_variant(base: Variant) -> Variant {
    let stages = if base.rope_dim > 0 { 3 * 5 } else { 4 * 4 };
    Variant { block_rows: 64, tile_tokens: TILE_TOKENS, stages, threads: 384, form: WIDE_FORM, ..base }
}

/// The keys form's stages are units of its ring, as many as fit beside the queries.
fn keys_variant(base: Variant, block_rows: u32) -> Variant {
    let stages = if block_rows == 16 { 24 } else { 21 };
    // Two warpgroups, and a loader: a warpgroup of its own where it has registers to give up, rows to gather or many boxes to copy.
    let one_warp = block_rows == 16 && !base.kv_dtype.is_fp8() && !base.gather && !base.small;
    let threads = if one_warp { 288 } else { 384 };
    Variant { block_rows, tile_tokens: TILE_TOKENS, stages, threads, form: KEYS_FORM, ..base }
}

/// Most pieces of a sequence that a variant merges itself.
pub(super) fn merged_pieces(variant: &Variant) -> i32 {
    let merges = variant.form == KEYS_FORM && variant.block_rows == 16 && !variant.kv_dtype.is_fp8();
    if merges { KEYS_MERGED_PIECES } else { 0 }
}

/// How a variant orders the columns of partial results. Measured, µs, beside rows put in order in shared memory: B4 S4096 H128 17.5 (18.4),
/// B16 34.0 (35.0), B16 S16384 H64 78.0 (78.9), B1 S131072 H128 59.5 (60.6); with an order of its own the wide form was slower, B16 S16384
/// H64 71.2 (70.6), and the form of few tokens as it was, B1 S4096 H16 6.59 (6.62).
pub(super) fn partial_order(variant: &Variant) -> PartialOrder {
    match variant.form {
        ROWS_FORM | select_few::EITHER_FORM => PartialOrder::DealtPairs,
        _ => PartialOrder::InOrder,
    }
}

/// The variants that [`split`] can give for these types and widths.
pub(super) fn variants(arch: &str, base: Variant) -> Vec<Variant> {
    if arch != "sm_90a" || !serves(&base) {
        return Vec::new();
    }
    let of_source = |base: Variant| {
        let many_rows = serves_many_rows(&base).then(|| many_rows_variant(base));
        many_rows.into_iter().chain([16, 32].map(|block_rows| keys_variant(base, block_rows)))
    };
    let small = (!base.kv_dtype.is_fp8()).then_some(Variant { small: true, ..base });
    [base, Variant { gather: true, ..base }].into_iter().chain(small).flat_map(of_source).collect()
}

/// Dynamic shared memory in bytes: `SHARED_BYTES` of the form's kernel.
pub(super) fn shared_bytes(variant: &Variant) -> u32 {
    let Variant { block_rows: rows, stages, .. } = *variant;
    if variant.form == ROWS_FORM {
        let halves = 2 * stages - 1;
        let ring = (halves * 4 + 1) * UNIT_BYTES + (halves * 5 + 3) * 8;
        // Queries, weights, what 128 lanes hand on, two pieces of each side and two barriers.
        return ring + (STAGED_UNITS + 1) * UNIT_BYTES + 128 * 16 + 4 * 32 + 2 * 8;
    }
    if variant.form == WIDE_FORM {
        // Units of the ring, of queries and of three tiles' weights. Of three tiles: factors, and a flag. Of two pieces: states, limits,
        // results, LSEs and scales of rows, and 32 bytes. Of two sides: four warps' maxima, scales. Sums, two more flags, which block
        // it is, barriers.
        let units = stages + variant.kv_lora_rank / 64 + u32::from(variant.rope_dim > 0) + 3;
        let of_rows = 3 * 4 + 2 * (8 + 4 + 8 + 8 + 4) + 2 * (4 * 4 + 4) + 4;
        return units * UNIT_BYTES
            + rows * of_rows
            + (3 * 4 + 2 * 4u32).next_multiple_of(16)
            + 2 * 32
            + 8
            + (2 * stages + 6) * 8;
    }
    let ring = stages * UNIT_BYTES + 2 * stages * 8;
    let queries = 9 * rows * 128;
    let weights = 4 * rows * TILE_TOKENS * 2;
    // Of two groups: sums of four warps, maxima, scales of both's sums, LSEs and a count. Scales of queries; limits, results
    // and what else is told of two pieces.
    ring + queries + weights + 2 * ((4 + 1 + 2 + 1) * rows * 4 + 4) + rows * 4 + 2 * (rows * (4 + 16) + 32)
}

#[cfg(test)]
mod tests {
    use super::super::Entry;
    use super::*;

    #[test]
    fn many_rows_take_a_form_by_how_many_tokens_there_are() {
        let base = Variant { kv_lora_rank: 512, rope_dim: 64, ..Variant::simple(Entry::DecodeSplit, DType::BF16) };
        let shape = DecodeShape {
            q_dtype: DType::BF16,
            kv_dtype: DType::BF16,
            num_heads: 128,
            query_len: 1,
            kv_lora_rank: 512,
            rope_dim: 64,
            page_size: 64,
            batch: 16,
            max_seq_len: 4096,
            portable: false,
            free_splits: false,
        };
        assert_eq!(split(&shape, 33, base, "sm_90a").map(|variant| variant.form), Some(ROWS_FORM));
        for (page_sizes, gather, small) in
            [(&[1, 2, 12, 20][..], true, false), (&[8, 16, 24, 32, 96], false, true), (&[64, 128], false, false)]
        {
            for &page_size in page_sizes {
                let paged = DecodeShape { page_size, ..shape };
                let kind = |rows| split(&paged, rows, base, "sm_90a").map(|v| (v.gather, v.small, v.threads));
                let few = if gather || small { 384 } else { 288 };
                assert_eq!([16, 32, 128].map(kind), [few, 384, 384].map(|threads| Some((gather, small, threads))));
            }
        }
        assert_eq!(split(&DecodeShape { batch: 2, ..shape }, 128, base, "sm_90a").map(|v| v.form), Some(ROWS_FORM));
        let one = DecodeShape { batch: 1, max_seq_len: 8193, ..shape };
        assert_eq!(split(&one, 128, base, "sm_90a").map(|variant| variant.form), Some(ROWS_FORM));
        let few_rows = [1, 16, 17, 32].map(|rows| split(&shape, rows, base, "sm_90a").map(|v| (v.form, v.block_rows)));
        assert_eq!(few_rows, [16, 16, 32, 32].map(|rows| Some((KEYS_FORM, rows))));
        assert_eq!([1, 2, 3, 4].map(|row_blocks| rows_variant(base).cluster(row_blocks)), [1, 2, 1, 2]);
        assert_eq!(keys_variant(base, 16).cluster(2), 1);
        let fp8 = Variant { kv_dtype: DType::Fp8E4m3, ..base };
        let merged = [(16, base), (17, base), (16, fp8), (128, base)];
        let merged = merged.map(|(rows, base)| split(&shape, rows, base, "sm_90a").map(|v| merged_pieces(&v)));
        assert_eq!(merged, [2, 0, 0, 0].map(Some));
        let paged = [1, 8, 24, 16, 48].map(|page_size| split(&DecodeShape { page_size, ..shape }, 16, fp8, "sm_90a"));
        assert_eq!(paged.map(|split| split.map(|v| v.gather)), [true, true, true, false, false].map(Some));
        let one_fp8 = split(&DecodeShape { max_seq_len: 4096, ..one }, 16, fp8, "sm_90a");
        assert_eq!(one_fp8.map(|variant| variant.form), Some(KEYS_FORM));
        let quantised = [16, 17, 128].map(|rows| split(&shape, rows, fp8, "sm_90a").map(|v| (v.form, v.block_rows)));
        assert_eq!(quantised, [(KEYS_FORM, 16), (KEYS_FORM, 32), (WIDE_FORM, 64)].map(Some));
        assert_eq!([1, 2].map(|row_blocks| wide_variant(fp8).cluster(row_blocks)), [1, 2]);
        let gathered = split(&DecodeShape { page_size: 8, ..shape }, 128, fp8, "sm_90a");
        assert_eq!(gathered.map(|v| (v.form, v.block_rows)), Some((KEYS_FORM, 32)));
        let refused = [
            split(&shape, 128, base, "sm_100a"),
            split(&DecodeShape { portable: true, ..shape }, 128, base, "sm_90a"),
            split(&DecodeShape { batch: 2, max_seq_len: 4095, ..shape }, 128, base, "sm_90a"),
            split(&DecodeShape { max_seq_len: 8192, ..one }, 128, base, "sm_90a"),
            split(&DecodeShape { batch: 3, max_seq_len: 65_536, ..shape }, 32, base, "sm_90a"),
            split(&DecodeShape { max_seq_len: 4095, ..shape }, 32, base, "sm_90a"),
            split(&DecodeShape { max_seq_len: 4095, ..one }, 32, fp8, "sm_90a"),
            split(&DecodeShape { batch: 2, max_seq_len: 4095, ..shape }, 128, fp8, "sm_90a"),
            split(&shape, 128, Variant { kv_dtype: DType::Fp8E4m3Fnuz, ..base }, "sm_90a"),
            split(&shape, 128, Variant { kv_lora_rank: 256, ..base }, "sm_90a"),
        ];
        assert!(refused.iter().all(Option::is_none), "{refused:?}");
    }
}
