//! CDNA's form of stage 1 (`kernels/cdna/`): which problems it serves, and what it takes.
//!
//! Chosen by what its machine code says (`benches/results/cdna-form.md`): no such device has run it yet.

use super::Variant;
use crate::backend::DecodeShape;

/// `kernels/cdna/mla_decode_split_slices.cu`, for 16 rows: waves share out the columns of a row.
pub(super) const SLICES_FORM: u32 = 5;
/// `kernels/cdna/mla_decode_split_rows.cu`, for 64 or 128: waves share out the rows, and the columns of the output.
pub(super) const ROWS_FORM: u32 = 6;

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
    let cdna = matches!(arch.split(':').next(), Some("gfx90a" | "gfx942" | "gfx950"));
    let serves = base.kv_lora_rank == 512 && matches!(base.rope_dim, 0 | 64);
    if !(cdna && serves) {
        return Vec::new();
    }
    let form =
        |form, block_rows, tile_tokens, threads| Variant { form, block_rows, tile_tokens, threads, stages: 1, ..base };
    vec![form(SLICES_FORM, 16, 64, 256), form(ROWS_FORM, 64, 16, 256), form(ROWS_FORM, 128, 16, 512)]
}

/// Dynamic shared memory in bytes: `SHARED_BYTES` of the form's kernel.
pub(super) fn shared_bytes(variant: &Variant) -> u32 {
    let Variant { block_rows, tile_tokens, threads, .. } = *variant;
    let waves = threads / 64;
    if variant.form == SLICES_FORM {
        let logits = tile_tokens * block_rows * 4;
        let pairs = 4 * 74 * 16;
        return 2 * waves * logits.max(pairs);
    }
    let tile = tile_tokens * (variant.kv_lora_rank + variant.rope_dim) * 2;
    let weights = block_rows * tile_tokens * 2;
    let places = tile_tokens * 16;
    let staged = if block_rows == 64 { 5 } else { 1 };
    2 * (tile + weights + places + waves * 4) + 2 * block_rows * 4 + staged * threads * 16
}
