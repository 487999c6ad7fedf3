//! CDNA's forms of stage 1 (`kernels/cdna/`): which problems they serve, and what they take.
//!
//! Chosen by what their machine code says (`benches/results/cdna-form.md`): no such device has run them yet.

use super::Variant;
use crate::backend::DecodeShape;

/// `kernels/cdna/mla_decode_split_slices.cu`, for 16 rows: waves share out the columns of a row.
pub(super) const SLICES_FORM: u32 = 5;
/// `kernels/cdna/mla_decode_split_rows.cu`, for 64 or 128: waves share out the rows, and the columns of the output.
pub(super) const ROWS_FORM: u32 = 6;
/// `kernels/cdna/mla_decode_split_own_rows.cu`, for 128 of half the width: waves share out the rows, and those of the output.
pub(super) const OWN_ROWS_FORM: u32 = 8;

/// The form's variant for a group of `rows` rows, if one of CDNA's is to serve the problem.
pub(super) fn split(shape: &DecodeShape, rows: usize, base: Variant, arch: &str) -> Option<Variant> {
    if shape.portable {
        return None;
    }
    let variants = chosen_variants(arch, base);
    let fits = |variant: &&Variant| variant.block_rows as usize >= rows;
    variants.iter().find(fits).or(variants.last()).copied()
}

/// The variants that [`split`] can give for these types and widths, by rows.
pub(super) fn chosen_variants(arch: &str, base: Variant) -> Vec<Variant> {
    if !matches!(arch.split(':').next(), Some("gfx90a" | "gfx942" | "gfx950")) {
        return Vec::new();
    }
    let form =
        |form, block_rows, tile_tokens, threads| Variant { form, block_rows, tile_tokens, threads, stages: 1, ..base };
    // Queries and outputs of 128 rows fill the registers of eight waves, or, of half the width, of four.
    let most = if base.kv_lora_rank == 512 { form(ROWS_FORM, 128, 16, 512) } else { form(OWN_ROWS_FORM, 128, 32, 256) };
    vec![form(SLICES_FORM, 16, 64, 256), form(ROWS_FORM, 64, 16, 256), most]
}

/// Dynamic shared memory in bytes: `SHARED_BYTES` of the form's kernel.
pub(super) fn shared_bytes(variant: &Variant) -> u32 {
    let Variant { block_rows, tile_tokens, threads, kv_lora_rank, rope_dim, .. } = *variant;
    let waves = threads / 64;
    if variant.form == SLICES_FORM {
        let pairs = 4 * 74 * 16 + 128;
        // Of a narrow rope waves share out the tokens, and want weights in two orders.
        let orders = if rope_dim == 32 { 2 } else { 1 };
        let weights = tile_tokens * block_rows * 2;
        return waves * pairs + orders * weights + 2 * block_rows * 4;
    }
    let tile = tile_tokens * (kv_lora_rank + rope_dim).next_multiple_of(64) * 2;
    let places = tile_tokens * 16;
    if variant.form == OWN_ROWS_FORM {
        return 3 * tile + 4 * places;
    }
    let weights = block_rows * tile_tokens * 2;
    // Chunks of queries.
    let staged = match (kv_lora_rank, block_rows) {
        (512, 64) => 5,
        (512, _) => 2,
        _ => 0,
    };
    2 * (tile + weights + places + waves * 4) + 2 * block_rows * 4 + staged * (block_rows / 16) * 64 * 16
}

#[cfg(test)]
mod tests {
    use super::super::Entry;
    use super::*;
    use crate::tensor::DType;

    #[test]
    fn rows_take_the_smallest_form_that_holds_them_of_any_cache_type() {
        let base = Variant { kv_lora_rank: 512, rope_dim: 64, ..Variant::simple(Entry::DecodeSplit, DType::BF16) };
        let shape = DecodeShape {
            q_dtype: DType::BF16,
            kv_dtype: DType::BF16,
            num_heads: 16,
            query_len: 1,
            kv_lora_rank: 512,
            rope_dim: 64,
            page_size: 1,
            batch: 1,
            max_seq_len: 4096,
            portable: false,
            free_splits: true,
        };
        for kv_dtype in [DType::BF16, DType::Fp8E4m3, DType::Fp8E4m3Fnuz] {
            let base = Variant { kv_dtype, ..base };
            let rows = [1, 16, 17, 64, 65, 128, 129, 256];
            let blocks = rows.map(|rows| split(&shape, rows, base, "gfx942:sramecc+:xnack-").map(|v| v.block_rows));
            assert_eq!(blocks, [16, 16, 64, 64, 128, 128, 128, 128].map(Some));
        }
        let narrow = Variant { kv_lora_rank: 256, ..base };
        let forms = [16, 64, 65].map(|rows| split(&shape, rows, narrow, "gfx950").map(|v| (v.form, v.block_rows)));
        assert_eq!(forms, [(SLICES_FORM, 16), (ROWS_FORM, 64), (OWN_ROWS_FORM, 128)].map(Some));
        let refused = [
            split(&DecodeShape { portable: true, ..shape }, 16, base, "gfx942"),
            split(&shape, 16, base, "gfx1100"),
            split(&shape, 16, base, "sm_90a"),
        ];
        assert!(refused.iter().all(Option::is_none), "{refused:?}");
    }
}
