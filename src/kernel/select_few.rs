//! The forms of stage 1 for few tokens: which problems they serve, and what they take. Pages of multiples of 8 tokens are copied in boxes
//! (`kernels/sm90/mla_decode_split_few.cu`), others token by token (`kernels/mla_decode_split_few.cu`).
//!
//! Measured on one H200 (`benches/results/hopper-h200.md`, "Few tokens by products of warpgroups"), both stages, of boxes, beside what
//! would serve the problem else: up to 16 rows the form of single tokens, which won over the others before, for more rows Hopper's
//! rows form. One sequence unless said otherwise.
//!
//! | rows of a group | served | measured, µs |
//! |---|---|---|
//! | up to 16 | one to four sequences of any length | S1024 5.0 (6.4), S4096 6.3 (8.3), S65536 24.6 (31.5), B4 S16384 24.4 (30.5) |
//! | 17 to 32 | one sequence of any length, 8,192 tokens of up to eight | H32 S4096 8.6, S65536 28.8 (44.2, portable form), S131072 45.2 (67.6, likewise) |
//! | 33 to 128 | up to 16,384 tokens of one sequence, 8,192 of up to eight; of one sequence captured longer by a kernel that has the rows form, too | S1024 H128 6.7 (13.4), S4096 H128 11.3 (16.6), S16384 H128 21.1 (21.8), B2 S4096 H128 16.6 (18.1); B4 S4096 H128 24.3 (21.5), S131072 H128 117 (67.6) |

use super::{Variant, select, select_sm90};
use crate::backend::{DecodeShape, FewTokens};

/// `kernels/mla_decode_split_few.cu`: one piece of a sequence in a block, most often a single tile. For pages of any size.
pub(super) const FORM: u32 = 3;
/// `kernels/sm90/mla_decode_split_few.cu`: likewise by bulk copies, whose boxes take pages of multiples of 8 tokens.
pub(super) const BOXES_FORM: u32 = 7;
/// `kernels/sm90/mla_decode_split_either.cu`: by the lengths of a step, that one or Hopper's rows form.
pub(super) const EITHER_FORM: u32 = 9;

/// Most virtual sequences that blocks look through for a piece of their own.
const MAX_VIRTUAL_SEQS: usize = 8;
/// Most sequences of up to 16 rows that it serves, at any length.
const MAX_LONG: usize = 4;
/// Longest sequence of 17 to 128 rows that it serves.
const ONE_TOKENS: usize = 16_384;
/// Pieces per sequence from which on it does not matter that the last one may be short.
const MIN_PIECES: usize = 4;
/// Tokens of a tile.
const TILE: u32 = 64;
/// The unit of pieces, in tokens, where single tokens are copied.
const UNIT: u32 = 16;
/// Two warpgroups; of boxes, one warp loads besides.
const THREADS: u32 = 256;
const BOXES_THREADS: u32 = THREADS + 32;
/// Tiles that have room.
const STAGES: u32 = 2;
/// What a block can have: the kernel of two forms uses both ends.
const EITHER_SHARED_BYTES: u32 = 232_448;
/// Units of 64 columns of a tile that a barrier counts.
const PART_UNITS: u32 = 3;

/// Whether the blocks of stage 1 are to find their pieces by themselves, where `blocks` of `block_rows` rows run at a time.
pub(super) fn own_pieces(shape: &DecodeShape, virtual_seqs: usize, row_blocks: usize, blocks: usize) -> bool {
    let few = virtual_seqs <= MAX_VIRTUAL_SEQS && blocks / row_blocks.max(1) >= MIN_PIECES * virtual_seqs;
    shape.free_splits && few && virtual_seqs > 0
}

/// The form's variant for groups of `rows` rows, if it is to serve the problem alone.
pub(super) fn split(shape: &DecodeShape, rows: usize, base: Variant, arch: &str) -> Option<Variant> {
    // A block that reads what no other does is worth having at any length; where several read the same, only while each has a tile or two.
    let few = match rows {
        ..=16 => shape.batch <= MAX_LONG,
        17..=32 if shape.batch == 1 => true,
        17..=128 => shape.batch.saturating_mul(shape.max_seq_len) <= most_tokens(shape),
        _ => false,
    };
    let boxes = shape.page_size.is_multiple_of(8);
    (!shape.portable && serves(&base, arch) && few).then(|| variant(base, block_rows(rows), boxes))
}

/// The variant of one sequence that is captured for more tokens than the form serves well, which has the rows form besides; and how it
/// serves fewer.
pub(super) fn either(shape: &DecodeShape, rows: usize, base: Variant, arch: &str) -> Option<(Variant, FewTokens)> {
    let boxes = shape.page_size.is_multiple_of(8);
    let both = shape.batch == 1 && (33..=128).contains(&rows) && boxes && !shape.portable && serves(&base, arch);
    (both && shape.max_seq_len > ONE_TOKENS).then(|| {
        let (block_rows, max_tokens) = (block_rows(rows), ONE_TOKENS);
        let few = FewTokens { max_tokens, block_rows, tile_tokens: TILE, reduce_blocks: 0 };
        (either_variant(select_sm90::rows_variant(select_sm90::of_pages(base, shape.page_size))), few)
    })
}

/// The longest sequence of a batch that is captured for longer ones and of which the form alone serves only those up to here.
pub(super) fn short_seq_len(shape: &DecodeShape, rows: usize, base: Variant, arch: &str) -> Option<(Variant, usize)> {
    let max_seq_len = most_tokens(shape) / shape.batch.max(1);
    let short = split(&DecodeShape { max_seq_len, ..*shape }, rows, base, arch);
    let alone = split(shape, rows, base, arch).is_some();
    short.filter(|_| !alone && max_seq_len > 0 && max_seq_len < shape.max_seq_len).map(|split| (split, max_seq_len))
}

fn block_rows(rows: usize) -> u32 {
    if rows <= 16 { 16 } else { 32 }
}

/// Most tokens of all sequences of more than 16 rows that it serves.
fn most_tokens(shape: &DecodeShape) -> usize {
    if shape.batch == 1 { ONE_TOKENS } else { select::FEW_TOKENS }
}

fn serves(base: &Variant, arch: &str) -> bool {
    arch == "sm_90a" && base.kv_dtype == base.q_dtype && base.kv_lora_rank == 512
}

fn variant(base: Variant, block_rows: u32, boxes: bool) -> Variant {
    let (tile_tokens, threads, form) = if boxes { (TILE, BOXES_THREADS, BOXES_FORM) } else { (UNIT, THREADS, FORM) };
    Variant { block_rows, tile_tokens, stages: STAGES, threads, form, ..base }
}

fn either_variant(rows: Variant) -> Variant {
    Variant { form: EITHER_FORM, ..rows }
}

/// The variants that [`split`] and [`either`] can give for these types and widths.
pub(super) fn variants(arch: &str, base: Variant) -> Vec<Variant> {
    let alone = [(16, true), (32, true), (16, false), (32, false)];
    let alone = alone.map(|(block_rows, boxes)| variant(base, block_rows, boxes));
    let both = [false, true].map(|small| either_variant(select_sm90::rows_variant(Variant { small, ..base })));
    if serves(&base, arch) { alone.into_iter().chain(both).collect() } else { Vec::new() }
}

/// Dynamic shared memory in bytes: `SHARED_BYTES` of the form's kernel, for rows of scores padded by `score_pad`.
pub(super) fn shared_bytes(variant: &Variant, score_pad: u32) -> u32 {
    if variant.form == EITHER_FORM {
        return EITHER_SHARED_BYTES;
    }
    let rows = variant.block_rows;
    if variant.form == BOXES_FORM {
        let units = (variant.kv_lora_rank + variant.rope_dim).div_ceil(64);
        let tiles = variant.stages * (units * TILE * 128 + (units.div_ceil(PART_UNITS) + 1) * 8);
        // Queries and weights, halves of logits that the groups exchange, highest logits of four warps, a maximum and a factor;
        // four barriers.
        return tiles + rows * ((units + 1) * 128 + THREADS + 4 * 4 + 2 * 4) + 4 * 8;
    }
    let row_bytes = (variant.kv_lora_rank + variant.rope_dim + 8) * 2;
    let score_stride = TILE + score_pad;
    let depth = 128 / rows;
    let tiles = variant.stages * TILE * row_bytes;
    tiles + rows * row_bytes + depth * rows * score_stride * 4 + rows * score_stride * 2 + 2 * rows * 4
}

#[cfg(test)]
mod tests {
    use super::super::Entry;
    use super::*;
    use crate::tensor::DType;

    const ONE: DecodeShape = DecodeShape {
        q_dtype: DType::BF16,
        kv_dtype: DType::BF16,
        num_heads: 16,
        query_len: 1,
        kv_lora_rank: 512,
        rope_dim: 64,
        page_size: 64,
        batch: 1,
        max_seq_len: 4096,
        portable: false,
        free_splits: true,
    };

    #[test]
    fn boxes_take_pages_of_eights_and_single_tokens_the_others() {
        let base = Variant { kv_lora_rank: 512, rope_dim: 64, ..Variant::simple(Entry::DecodeSplit, DType::BF16) };
        let of_pages = |page_size| split(&DecodeShape { page_size, ..ONE }, 16, base, "sm_90a").unwrap();
        assert_eq!([8, 24, 64].map(|size| of_pages(size).form), [BOXES_FORM; 3]);
        assert_eq!([1, 4, 12].map(|size| (of_pages(size).form, of_pages(size).tile_tokens)), [(FORM, UNIT); 3]);
        let shared = |variant: Variant| shared_bytes(&variant, 8);
        assert_eq!([16, 32].map(|rows| shared(variant(base, rows, true))), [172_512, 197_472]);
        assert_eq!(shared(variant(Variant { rope_dim: 0, ..base }, 16, true)), 154_080);
    }

    #[test]
    fn few_rows_are_served_at_any_length_and_many_while_there_are_few_tokens() {
        let base = Variant { kv_lora_rank: 512, rope_dim: 64, ..Variant::simple(Entry::DecodeSplit, DType::BF16) };
        let of = |batch, max_seq_len, rows| {
            split(&DecodeShape { batch, max_seq_len, ..ONE }, rows, base, "sm_90a").map(|variant| variant.block_rows)
        };
        assert_eq!([of(1, 4096, 16), of(1, 131_072, 16), of(4, 131_072, 16)], [Some(16); 3]);
        assert_eq!([of(1, 131_072, 17), of(1, 131_072, 32), of(1, 16_384, 128)], [Some(32); 3]);
        assert_eq!([of(2, 4096, 128), of(5, 1024, 128)], [Some(32); 2]);
        assert_eq!([of(1, 16_385, 33), of(2, 4097, 17), of(5, 4096, 16), of(1, 4096, 129)], [None; 4]);
        let both = |shape: DecodeShape, rows| {
            either(&shape, rows, base, "sm_90a").map(|(split, few)| (split.small, few.max_tokens, few.block_rows))
        };
        let long = DecodeShape { max_seq_len: 131_072, ..ONE };
        assert_eq!([33, 128].map(|rows| both(long, rows)), [Some((false, ONE_TOKENS, 32)); 2]);
        assert_eq!(both(DecodeShape { page_size: 16, ..long }, 64), Some((true, ONE_TOKENS, 32)));
        assert_eq!([both(long, 32), both(long, 129), both(ONE, 128)], [None; 3]);
        assert_eq!(
            [both(DecodeShape { page_size: 12, ..long }, 64), both(DecodeShape { batch: 2, ..long }, 64)],
            [None; 2]
        );
        assert!(split(&ONE, 16, base, "sm_80").is_none());
        assert!(split(&ONE, 16, Variant { kv_dtype: DType::Fp8E4m3, ..base }, "sm_90a").is_none());
    }

    #[test]
    fn blocks_find_their_pieces_where_there_are_many_to_a_sequence_and_the_policy_leaves_it_open() {
        assert!(own_pieces(&ONE, 1, 1, 132) && own_pieces(&ONE, 8, 4, 132));
        assert!(!own_pieces(&ONE, 9, 1, 132) && !own_pieces(&ONE, 8, 8, 132));
        assert!(!own_pieces(&DecodeShape { free_splits: false, ..ONE }, 1, 1, 132));
        assert!(!own_pieces(&ONE, 0, 1, 132), "an empty batch");
    }
}
