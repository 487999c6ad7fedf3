//! Hopper's forms of stage 1 (`kernels/sm90/`): which problems they serve, and what they take.
//!
//! Measured on one H200 (`benches/results/hopper-h200.md`, run 3), stage 2 included, in the same run as the portable form that
//! would serve the problem. Tokens are sequences times the longest that is captured, which says nothing of their lengths later:
//! a form is chosen where it wins by lengths below the longest too.
//!
//! | rows of a group | tokens | form | measured, µs, beside the portable form's |
//! |---|---|---|---|
//! | over 32 | from 8,192 on | rows | B2 S4096 H128 24.8 (29.8), B8 S1024 H128 40.5 (42.9), B4 S4096 H128 34.4 (45.5), B16 S4096 H128 61.2 (103.4), B64 S4096 H64 123 (190), B16 S16384 H64 112 (181), B1 S131072 H128 87.8 (174) |
//! | 33 to 128 | one sequence of up to 8,192 | keys of 16 rows | B1 S1024 H128 14.1 (14.7), B1 S4096 H128 20.0 (21.1), B1 S2048 H64 12.6 (14.8), B1 S8192 H64 18.3 (20.2) |
//! | over 32 | the others | portable | B4 S1024 H40 keys of 16 rows 15.6 (16.0) |
//! | 17 to 32 | all | portable | keys of 32 rows: B64 S4096 H32 114.3 (121.3; 115 in another run), B4 S131072 H32 183 (213), B1 S4096 H32 18.0 (16.8), two tokens of H16 B64 S4096 118.6 (115); rows: B64 S4096 H32 108.3; keys of 16 rows: B1 S4096 H32 14.1 (16.8) |
//! | up to 16 | all | portable | keys of 16 rows: B128 S4096 H16 171 (168), B64 S16384 302 (305), B16 S4096 38.0 (36.7), B1 S65536 33.3 (35.0), B1 S1024 11.2 (8.9) |
//!
//! Where the policy leaves the splits open, few tokens are served by the form of `select_few.rs` before any of these.
//!
//! One captured sequence of more than 8,192 tokens is served by the rows form, which loses while it is short (B1 S1024 H128 18.2
//! beside 14.7) and wins twofold when it is long.

use super::{Variant, select};
use crate::backend::DecodeShape;

/// `kernels/sm90/mla_decode_split_rows.cu`: 64 query rows are the rows of the matrix products.
pub(super) const ROWS_FORM: u32 = 1;
/// `kernels/sm90/mla_decode_split_keys.cu`: tokens are, for 16 or 32 query rows.
pub(super) const KEYS_FORM: u32 = 2;

/// Tokens of a tile, and columns of a unit of one.
const TILE_TOKENS: u32 = 64;
const UNIT_BYTES: u32 = TILE_TOKENS * 64 * 2;
const STAGES: u32 = 3;
/// Units of a query row that the rows form holds in registers.
const HELD_UNITS: u32 = 4;

/// The form's variant for a group of `rows` rows, if one of Hopper's is to serve the problem.
pub(super) fn split(shape: &DecodeShape, rows: usize, base: Variant, arch: &str) -> Option<Variant> {
    // Bulk copies take boxes of 8 to 64 tokens of a page.
    let copies = arch == "sm_90a" && serves(&base) && shape.page_size.is_multiple_of(8);
    if !copies || rows <= 32 {
        return None;
    }
    let tokens = shape.batch.saturating_mul(shape.max_seq_len);
    if shape.batch == 1 && tokens <= select::FEW_TOKENS && rows <= 128 {
        return Some(keys_variant(base, 16));
    }
    (tokens >= select::FEW_TOKENS).then(|| rows_variant(base))
}

/// Whether a cache's types and widths are what these forms are made for.
fn serves(base: &Variant) -> bool {
    base.kv_dtype == base.q_dtype && base.kv_lora_rank == 512 && matches!(base.rope_dim, 0 | 64)
}

fn rows_variant(base: Variant) -> Variant {
    Variant { block_rows: 64, tile_tokens: TILE_TOKENS, stages: STAGES, threads: 512, form: ROWS_FORM, ..base }
}

fn keys_variant(base: Variant, block_rows: u32) -> Variant {
    Variant { block_rows, tile_tokens: TILE_TOKENS, stages: STAGES, threads: 160, form: KEYS_FORM, ..base }
}

/// The variants that [`split`] can give for these types and widths.
pub(super) fn chosen_variants(arch: &str, base: Variant) -> Vec<Variant> {
    if arch == "sm_90a" && serves(&base) { vec![rows_variant(base), keys_variant(base, 16)] } else { Vec::new() }
}

/// Those that it does not give yet.
pub(super) fn unchosen_variants(arch: &str, base: Variant) -> Vec<Variant> {
    if arch == "sm_90a" && serves(&base) { vec![keys_variant(base, 32)] } else { Vec::new() }
}

/// Dynamic shared memory in bytes: `SHARED_BYTES` of the form's kernel.
pub(super) fn shared_bytes(variant: &Variant) -> u32 {
    let rows = variant.block_rows;
    let halves = 2 * variant.stages - 1;
    let rotaries = if variant.form == ROWS_FORM { variant.stages } else { variant.stages - 1 };
    let ring = halves * 4 * UNIT_BYTES + rotaries * UNIT_BYTES;
    let ring_barriers = (halves * 5 + 2 * rotaries) * 8;
    let rest = if variant.form == ROWS_FORM {
        let note = 32;
        (9 - HELD_UNITS) * UNIT_BYTES + variant.stages * (2 * rows * 4 + note) + variant.stages * 8
    } else {
        // Queries, two tiles' weights, maxima of four warps, limits, slot.
        9 * rows * 128 + 2 * rows * TILE_TOKENS * 2 + 4 * rows * 4 + rows * 4 + 8
    };
    ring + ring_barriers + rest
}

#[cfg(test)]
mod tests {
    use super::super::Entry;
    use super::*;
    use crate::tensor::DType;

    #[test]
    fn many_rows_take_a_form_by_how_many_tokens_there_are_in_pages_of_eights() {
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
            free_splits: false,
        };
        assert_eq!(split(&shape, 33, base, "sm_90a").map(|variant| variant.form), Some(ROWS_FORM));
        assert_eq!(split(&DecodeShape { page_size: 24, ..shape }, 128, base, "sm_90a").map(|v| v.block_rows), Some(64));
        assert_eq!(split(&DecodeShape { batch: 2, ..shape }, 128, base, "sm_90a").map(|v| v.form), Some(ROWS_FORM));
        let one = DecodeShape { batch: 1, max_seq_len: 8192, ..shape };
        let keys = split(&one, 128, base, "sm_90a").map(|variant| (variant.form, variant.block_rows));
        assert_eq!(keys, Some((KEYS_FORM, 16)));
        let longer = DecodeShape { max_seq_len: 8193, ..one };
        assert_eq!(split(&longer, 128, base, "sm_90a").map(|variant| variant.form), Some(ROWS_FORM));
        let refused = [
            split(&shape, 32, base, "sm_90a"),
            split(&shape, 128, base, "sm_100a"),
            split(&DecodeShape { page_size: 12, ..shape }, 128, base, "sm_90a"),
            split(&DecodeShape { batch: 2, max_seq_len: 4095, ..shape }, 128, base, "sm_90a"),
            split(&DecodeShape { max_seq_len: 1024, ..one }, 32, base, "sm_90a"),
            split(&DecodeShape { max_seq_len: 1024, ..one }, 256, base, "sm_90a"),
            split(&shape, 128, Variant { kv_dtype: DType::Fp8E4m3, ..base }, "sm_90a"),
            split(&shape, 128, Variant { kv_lora_rank: 256, ..base }, "sm_90a"),
        ];
        assert!(refused.iter().all(Option::is_none), "{refused:?}");
    }
}
