//! Hopper's forms of stage 1 (`kernels/sm90/`): which problems they serve, and what they take.
//!
//! Measured on one H200 (`benches/results/hopper-h200.md`), against the portable form of as many rows:
//!
//! | rows of a group | sequences x tokens | form | measured, µs, beside the portable form's |
//! |---|---|---|---|
//! | over 32 | over 8,192 | rows | B4 S4096 H128 38 (46), B16 S4096 H128 73 (103), B16 S16384 H64 113 (179), B128 S4096 H128 307 (637) |
//! | over 32 | up to 8,192 | portable | B1 S1024 H128 18.1 (15.7), B1 S4096 H128 21.0 (21.5) |
//! | up to 32 | all | portable | the rows form with 16 rows: B128 S4096 180 (177), B1 S1024 15.4 (10.3); the keys form awaits its measurement |

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
    let much = shape.batch.saturating_mul(shape.max_seq_len) > select::FEW_TOKENS;
    (copies && much && rows > 32).then(|| rows_variant(base))
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
    if arch == "sm_90a" && serves(&base) { vec![rows_variant(base)] } else { Vec::new() }
}

/// Those that it does not give yet.
pub(super) fn unchosen_variants(arch: &str, base: Variant) -> Vec<Variant> {
    if arch == "sm_90a" && serves(&base) { [16, 32].map(|rows| keys_variant(base, rows)).to_vec() } else { Vec::new() }
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
    fn the_rows_form_takes_many_rows_and_tokens_in_pages_of_eights() {
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
        };
        assert_eq!(split(&shape, 33, base, "sm_90a").map(|variant| variant.form), Some(ROWS_FORM));
        assert_eq!(split(&DecodeShape { page_size: 24, ..shape }, 128, base, "sm_90a").map(|v| v.block_rows), Some(64));
        let refused = [
            split(&shape, 32, base, "sm_90a"),
            split(&shape, 128, base, "sm_100a"),
            split(&DecodeShape { page_size: 12, ..shape }, 128, base, "sm_90a"),
            split(&DecodeShape { batch: 2, ..shape }, 128, base, "sm_90a"),
            split(&shape, 128, Variant { kv_dtype: DType::Fp8E4m3, ..base }, "sm_90a"),
            split(&shape, 128, Variant { kv_lora_rank: 256, ..base }, "sm_90a"),
        ];
        assert!(refused.iter().all(Option::is_none), "{refused:?}");
    }
}
