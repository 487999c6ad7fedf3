//! CDNA's form of stage 1 (`kernels/cdna/`): which problems it serves, and what it takes.
//!
//! Chosen by what its machine code says (`benches/results/cdna-form.md`): no such device has run it yet.

use super::Variant;

/// `kernels/cdna/mla_decode_split_slices.cu`: waves share out the columns of a row.
pub(super) const SLICES_FORM: u32 = 3;

const TILE_TOKENS: u32 = 64;
const THREADS: u32 = 256;
const WAVES: u32 = THREADS / 64;

/// The form's variant for a group of `rows` rows, if it is to serve the problem.
pub(super) fn split(rows: usize, base: Variant, arch: &str) -> Option<Variant> {
    (rows <= 16).then(|| chosen_variants(arch, base).first().copied()).flatten()
}

/// The variants that [`split`] can give for these types and widths.
pub(super) fn chosen_variants(arch: &str, base: Variant) -> Vec<Variant> {
    let cdna = matches!(arch.split(':').next(), Some("gfx90a" | "gfx942" | "gfx950"));
    let serves = base.kv_dtype == base.q_dtype && matches!(base.kv_lora_rank, 256 | 512) && matches!(base.rope_dim, 0 | 64);
    if cdna && serves { vec![slices_variant(base)] } else { Vec::new() }
}

fn slices_variant(base: Variant) -> Variant {
    Variant { block_rows: 16, tile_tokens: TILE_TOKENS, stages: 1, threads: THREADS, form: SLICES_FORM, ..base }
}

/// Dynamic shared memory in bytes: `SHARED_BYTES` of the form's kernel.
pub(super) fn shared_bytes(variant: &Variant) -> u32 {
    let logits = variant.tile_tokens * variant.block_rows * 4;
    let pairs = 4 * 74 * 16;
    2 * WAVES * logits.max(pairs)
}
