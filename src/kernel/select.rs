//! Which kernels serve which problem: one table per vendor, from shape and device to [`DecodeKernels`].
//!
//! A row of the table is a form of stage 1. The first one that is made for as many rows as a group has and whose shared
//! memory fits the device is taken, with as many pipeline stages as fit; a device with less shared memory ends at a smaller
//! form, never at a launch that fails. What the forms reach is in `benches/results/kernels-h200.md`.

use super::{Entry, Variant, select_cdna, select_few, select_sm90};
use crate::backend::{DecodeKernels, DecodeShape, DeviceInfo, FewTokens};
use crate::error::{Error, Result};
use crate::plan::FIXED_COST;
use crate::tensor::DType;

/// Latent and rope widths that kernels are compiled for.
pub const DIMS: [(u32, u32); 4] = [(512, 64), (512, 0), (256, 64), (256, 32)];

/// Most rows that a group packs before further query tokens go to further groups.
const GROUP_ROWS: usize = 256;

/// Rows are read in words of 16 bytes.
const ROW_ALIGNMENT: usize = 16;

/// The longest uniform query: groups serve any number of tokens, so the kernels set no limit of their own.
const MAX_QUERY_LEN: usize = 1024;

/// Sequences times tokens below which small blocks of rows are better than few, however many rows there are.
pub(super) const FEW_TOKENS: usize = 8192;

/// Blocks of stage 2 of a compute unit: for groups of up to [`REDUCE_FEW_ROWS`] rows, and of more.
const REDUCE_BLOCKS: [usize; 2] = [2, 3];
const REDUCE_FEW_ROWS: usize = 32;
const REDUCE_THREADS: u32 = 256;
const PLAN_THREADS: u32 = 256;

/// A form of stage 1.
#[derive(Debug, Clone, Copy)]
struct Form {
    block_rows: u32,
    tile_tokens: u32,
    /// Stages wanted of a 16-bit cache; down to [`MIN_STAGES`] will do.
    stages: u32,
    threads: u32,
    /// [`Variant::form`].
    form: u32,
}

const fn form(block_rows: u32, tile_tokens: u32, stages: u32, threads: u32) -> Form {
    Form { block_rows, tile_tokens, stages, threads, form: 0 }
}

/// Two tiles are in use while another loads; tiles of a quantised cache are loaded beside those in use.
const MIN_STAGES: u32 = 3;
const MIN_STAGES_FP8: u32 = 2;

/// `kernels/mla_decode_split_turns.cu`: two halves of a block take turns at softmax and products. For 16-bit caches.
pub(super) const TURNS_FORM: u32 = 4;

/// NVIDIA, `sm_80` and later: the first two need 227 KB of shared memory, the last 99 KB.
const CUDA_FORMS: [Form; 6] = [
    Form { form: TURNS_FORM, ..form(64, 32, 3, 256) },
    form(64, 32, 3, 256),
    form(32, 32, 4, 256),
    form(16, 32, 5, 256),
    form(16, 32, 3, 128),
    form(16, 16, 4, 128),
];

/// AMD with 64-lane waves (CDNA): 64 KB of LDS, 160 KB on gfx950.
const CDNA_FORMS: [Form; 2] = [form(32, 16, 3, 256), form(16, 16, 3, 256)];

/// AMD with 32-lane waves (RDNA): 64 KB of LDS, 256 registers a lane.
const RDNA_FORMS: [Form; 1] = [form(16, 16, 3, 256)];

/// What differs between vendors in how shared memory is laid out; `kernels/mma.h` and `hip/device/mma.h` have the same.
struct Layout {
    wave: u32,
    /// `QUERIES_STAGED`: queries pass through shared memory.
    queries_staged: bool,
    /// `SCORE_PAD`: elements between rows of scores and weights.
    score_pad: u32,
}

fn layout_of(arch: &str) -> Layout {
    if arch.starts_with("gfx") {
        let wave = super::wave_of(arch) as u32;
        Layout { wave, queries_staged: false, score_pad: if wave == 64 { 4 } else { 0 } }
    } else {
        Layout { wave: 32, queries_staged: true, score_pad: 8 }
    }
}

/// Dynamic shared memory of a stage-1 kernel in bytes: `SHARED_BYTES` of `kernels/mla_decode_split.cu`, `TURN_BYTES` of
/// `kernels/mla_decode_split_turns.cu`, which `ci/kernels.py` compiles against this.
pub fn split_shared_bytes(variant: &Variant, arch: &str) -> u32 {
    match variant.form {
        select_sm90::ROWS_FORM | select_sm90::KEYS_FORM | select_sm90::WIDE_FORM => {
            return select_sm90::shared_bytes(variant);
        }
        select_cdna::SLICES_FORM | select_cdna::ROWS_FORM | select_cdna::OWN_ROWS_FORM => {
            return select_cdna::shared_bytes(variant);
        }
        select_few::FORM | select_few::BOXES_FORM | select_few::EITHER_FORM => {
            return select_few::shared_bytes(variant, layout_of(arch).score_pad);
        }
        _ => {}
    }
    let Layout { wave, queries_staged, score_pad } = layout_of(arch);
    let Variant { block_rows, tile_tokens, stages, .. } = *variant;
    let width = variant.kv_lora_rank + variant.rope_dim;
    let row_stride = width + 8;
    let score_stride = tile_tokens + score_pad;
    let waves_per_row_tile = (variant.threads / wave) / (block_rows / 16);
    let key_slices = (waves_per_row_tile / 2).clamp(1, tile_tokens / 16);
    let depth = waves_per_row_tile / key_slices;
    let quantised = variant.kv_dtype.size() == 1;

    let queries = if queries_staged { block_rows * row_stride * 2 } else { 0 };
    let tiles = if quantised { 2 } else { stages } * tile_tokens * row_stride * 2;
    let raw = if quantised { stages * tile_tokens * width } else { 0 };
    let (scores, weights, slots) = if variant.form == TURNS_FORM {
        (variant.threads / wave / 2 * block_rows * tile_tokens * 4, block_rows * score_stride * 2, 32)
    } else {
        (depth * block_rows * score_stride * 4, 2 * block_rows * score_stride * 2, 16)
    };
    queries + tiles + raw + scores + weights + 2 * block_rows * 4 + slots
}

fn forms_of(arch: &str) -> &'static [Form] {
    match (arch.starts_with("gfx"), super::wave_of(arch)) {
        (false, _) => &CUDA_FORMS,
        (true, 64) => &CDNA_FORMS,
        (true, _) => &RDNA_FORMS,
    }
}

/// Shared memory of one block that an architecture is known to have, in bytes.
pub fn shared_limit(arch: &str) -> usize {
    match arch.split(':').next().unwrap_or(arch) {
        "gfx950" => 160 << 10,
        arch if arch.starts_with("gfx") => 64 << 10,
        "sm_80" | "sm_87" => 163 << 10,
        "sm_86" | "sm_89" | "sm_120" | "sm_120a" | "sm_121" | "sm_121a" => 99 << 10,
        _ => 227 << 10,
    }
}

/// A form's variant with as many stages as fit into `limit` bytes, or none.
fn fit(form: &Form, base: Variant, arch: &str, limit: usize) -> Option<Variant> {
    let quantised = base.kv_dtype.size() == 1;
    if quantised && form.form == TURNS_FORM {
        return None;
    }
    let least = if quantised { MIN_STAGES_FP8 } else { MIN_STAGES };
    (least..=form.stages).rev().find_map(|stages| {
        let Form { block_rows, tile_tokens, threads, form, .. } = *form;
        let variant = Variant { block_rows, tile_tokens, stages, threads, form, ..base };
        // AMD's `barrier_any` keeps a word per wave besides.
        let fixed = if arch.starts_with("gfx") { threads / layout_of(arch).wave * 4 } else { 0 };
        ((split_shared_bytes(&variant, arch) + fixed) as usize <= limit).then_some(variant)
    })
}

fn split_base(q_dtype: DType, kv_dtype: DType, (kv_lora_rank, rope_dim): (u32, u32)) -> Variant {
    Variant { kv_dtype, kv_lora_rank, rope_dim, ..Variant::simple(Entry::DecodeSplit, q_dtype) }
}

/// Stage 2's. As many threads as elsewhere have too few registers for three blocks of `sm_100a` and `sm_120a`.
fn reduce_variant(q_dtype: DType, arch: &str) -> Variant {
    let threads = if matches!(arch, "sm_100a" | "sm_120a") { REDUCE_THREADS / 2 } else { REDUCE_THREADS };
    Variant { threads, ..Variant::simple(Entry::DecodeReduce, q_dtype) }
}

/// Blocks of stage 2 for pieces that blocks cut themselves: a block per row, half of them for few rows, were as quick as more, or quicker.
fn few_reduce_blocks(rows: usize, units: usize) -> usize {
    if rows > REDUCE_FEW_ROWS { units } else { units.div_ceil(2) }
}

fn plan_variant() -> Variant {
    Variant { threads: PLAN_THREADS, ..Variant::simple(Entry::Plan, DType::BF16) }
}

/// Chooses the decode kernels for a problem on a device of NVIDIA or AMD.
///
/// # Errors
/// [`Error::Unsupported`], naming what would do.
pub fn decode_kernels(shape: &DecodeShape, device: &DeviceInfo) -> Result<DecodeKernels> {
    let arch = device.arch.as_str();
    let unsupported = |what: String| Error::Unsupported { backend: device.backend, arch: arch.to_owned(), what };
    if !matches!(shape.q_dtype, DType::BF16 | DType::F16) {
        return Err(unsupported(format!(
            "queries of {}: bf16 and f16 are possible; the host takes f32",
            shape.q_dtype
        )));
    }
    if shape.kv_dtype != shape.q_dtype && !shape.kv_dtype.is_fp8() {
        return Err(unsupported(format!(
            "a cache of {} for queries of {}: the same type, fp8_e4m3 and fp8_e4m3fnuz are possible",
            shape.kv_dtype, shape.q_dtype
        )));
    }
    let dims =
        DIMS.into_iter().find(|&(rank, rope)| (rank as usize, rope as usize) == (shape.kv_lora_rank, shape.rope_dim));
    let dims = dims.ok_or_else(|| {
        unsupported(format!("rows of {} + {}: {DIMS:?} are possible", shape.kv_lora_rank, shape.rope_dim))
    })?;

    let query_group = (GROUP_ROWS / shape.num_heads.max(1)).clamp(1, shape.query_len.max(1));
    let rows = query_group * shape.num_heads;
    let most = if shape.batch.saturating_mul(shape.max_seq_len) <= FEW_TOKENS { 32 } else { u32::MAX };
    let wanted = (rows.next_multiple_of(16).min(64) as u32).next_power_of_two().min(most);
    let base = split_base(shape.q_dtype, shape.kv_dtype, dims);
    let fitting = forms_of(arch).iter().filter(|form| form.block_rows <= wanted);
    let limit = device.shared_bytes_per_block;
    let units = device.num_compute_units;
    let virtual_seqs = shape.batch * shape.query_len.div_ceil(query_group);
    let possible = |split: &Variant, block_rows: u32| {
        let own = select_few::own_pieces(shape, virtual_seqs, rows.div_ceil(block_rows as usize), units);
        own && split_shared_bytes(split, arch) as usize <= limit
    };
    let alone = select_few::split(shape, rows, base, arch).filter(|split| possible(split, split.block_rows));
    let short_seq_len = select_few::short_seq_len(shape, rows, base, arch)
        .filter(|(split, _)| possible(split, split.block_rows))
        .map(|(_, len)| len);
    // Its kernel knows of one virtual sequence only.
    let either = select_few::either(shape, rows, base, arch)
        .filter(|(split, few)| virtual_seqs == 1 && possible(split, few.block_rows));
    let few = either.map(|(_, few)| FewTokens { reduce_blocks: few_reduce_blocks(rows, units), ..few });
    let tuned = alone
        .or(either.map(|(split, _)| split))
        .or_else(|| select_sm90::split(shape, rows, base, arch))
        .or_else(|| select_cdna::split(shape, rows, base, arch));
    let tuned = tuned.filter(|split| split_shared_bytes(split, arch) as usize <= limit);
    let split = tuned.or_else(|| fitting.filter_map(|form| fit(form, base, arch, limit)).next());
    let split = split.ok_or_else(|| {
        let needed = forms_of(arch).iter().map(|form| {
            let stages = MIN_STAGES_FP8.max(if base.kv_dtype.size() == 1 { 0 } else { MIN_STAGES });
            let Form { block_rows, tile_tokens, threads, .. } = *form;
            split_shared_bytes(&Variant { block_rows, tile_tokens, stages, threads, ..base }, arch)
        });
        let needed = needed.min().unwrap_or(0);
        unsupported(format!("{limit} bytes of shared memory per block: {needed} are needed"))
    })?;

    // Blocks that cut their own pieces are most often more than there are pieces.
    let own_pieces = matches!(split.form, select_few::FORM | select_few::BOXES_FORM);
    // With few sequences the third block of a unit won nothing, and while they are short most have nothing to do.
    let many = rows > REDUCE_FEW_ROWS && few.is_none();
    Ok(DecodeKernels {
        split,
        reduce: reduce_variant(shape.q_dtype, arch),
        plan: plan_variant(),
        query_group,
        blocks_per_unit: 1,
        fixed_cost: match split.form {
            select_sm90::WIDE_FORM => select_sm90::WIDE_FIXED_COST,
            select_sm90::ROWS_FORM | select_few::EITHER_FORM => select_sm90::ROWS_FIXED_COST,
            _ => FIXED_COST,
        },
        split_shared_bytes: split_shared_bytes(&split, arch),
        own_pieces,
        few,
        short_seq_len,
        merged_pieces: select_sm90::merged_pieces(&split),
        partial_dtype: shape.q_dtype,
        partial_order: select_sm90::partial_order(&split),
        reduce_blocks: if own_pieces {
            few_reduce_blocks(rows, units)
        } else if few.is_some() {
            units
        } else {
            REDUCE_BLOCKS[usize::from(many)] * units
        },
        row_alignment: ROW_ALIGNMENT,
        max_query_len: MAX_QUERY_LEN,
    })
}

/// Every stage-1 variant that the table can give an architecture, for the given types and widths.
fn split_variants(arch: &str, q_dtype: DType, kv_dtype: DType, dims: (u32, u32)) -> Vec<Variant> {
    let base = split_base(q_dtype, kv_dtype, dims);
    let fitting = |form: &Form| fit(form, base, arch, shared_limit(arch));
    let mut variants: Vec<Variant> = forms_of(arch).iter().filter_map(fitting).collect();
    // Of two forms for the same rows the first is taken.
    variants.dedup_by_key(|variant| variant.block_rows);
    variants.extend(select_few::variants(arch, base));
    variants.extend(select_sm90::variants(arch, base));
    variants.extend(select_cdna::chosen_variants(arch, base));
    variants
}

/// The widths of which kernels of 64 rows over 8 bits take NVIDIA's run-time compiler the longest, two seconds and more.
const WIDE_DIMS: [(u32, u32); 2] = [(512, 64), (512, 0)];

/// The variants that are shipped compiled: what common models need on an architecture, and what takes its compiler the longest.
pub fn variants(arch: &str) -> Vec<Variant> {
    let fp8 = if arch.starts_with("gfx942") { DType::Fp8E4m3Fnuz } else { DType::Fp8E4m3 };
    let mut variants = vec![plan_variant()];
    variants.push(reduce_variant(DType::BF16, arch));
    for kv_dtype in [DType::BF16, fp8] {
        variants.extend(split_variants(arch, DType::BF16, kv_dtype, (512, 64)));
        variants.extend([Entry::CacheWrite, Entry::CacheGather].map(|entry| Variant {
            kv_dtype,
            kv_lora_rank: 512,
            rope_dim: 64,
            threads: 256,
            ..Variant::simple(entry, DType::BF16)
        }));
    }
    if arch.starts_with("sm_") {
        let slow = |variant: &Variant| variant.kv_dtype.is_fp8() && variant.block_rows == 64;
        for (q_dtype, dims) in
            [DType::BF16, DType::F16].into_iter().flat_map(|q_dtype| WIDE_DIMS.map(|dims| (q_dtype, dims)))
        {
            for variant in split_variants(arch, q_dtype, fp8, dims).into_iter().filter(slow) {
                if !variants.contains(&variant) {
                    variants.push(variant);
                }
            }
        }
    }
    variants.extend(
        [Entry::MergeStates, Entry::DcpCombine]
            .map(|entry| Variant { threads: 128, ..Variant::simple(entry, DType::BF16) }),
    );
    variants
}

/// Every variant that an architecture can be given: what CI compiles.
pub fn all_variants(arch: &str) -> Vec<Variant> {
    let mut variants = vec![plan_variant()];
    for q_dtype in [DType::BF16, DType::F16] {
        variants.push(reduce_variant(q_dtype, arch));
        for kv_dtype in [q_dtype, DType::Fp8E4m3, DType::Fp8E4m3Fnuz] {
            for dims in DIMS {
                variants.extend(split_variants(arch, q_dtype, kv_dtype, dims));
            }
        }
    }
    for q_dtype in [DType::BF16, DType::F16, DType::F32] {
        for kv_dtype in [q_dtype, DType::Fp8E4m3, DType::Fp8E4m3Fnuz, DType::U8] {
            // Writing and gathering share a source, and so their code.
            let dims = Variant { kv_lora_rank: 512, rope_dim: 64, ..Variant::simple(Entry::CacheWrite, q_dtype) };
            variants.push(Variant { kv_dtype, threads: 256, ..dims });
        }
        variants.push(Variant { threads: 128, ..Variant::simple(Entry::MergeStates, q_dtype) });
    }
    variants
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(arch: &str, shared: usize) -> DeviceInfo {
        DeviceInfo {
            backend: "cuda",
            name: String::new(),
            arch: arch.to_owned(),
            index: 0,
            num_compute_units: 132,
            wave_size: 32,
            shared_bytes_per_block: shared,
            memory_bytes: 0,
            driver_version: String::new(),
        }
    }

    fn shape(num_heads: usize, query_len: usize, kv_dtype: DType) -> DecodeShape {
        DecodeShape {
            q_dtype: DType::BF16,
            kv_dtype,
            num_heads,
            query_len,
            kv_lora_rank: 512,
            rope_dim: 64,
            page_size: 64,
            batch: 64,
            max_seq_len: 4096,
            portable: false,
            free_splits: false,
        }
    }

    #[test]
    fn the_kernel_of_two_forms_has_one_virtual_sequence() {
        let mut chosen = 0;
        for (heads, query_len) in
            (1..=128).step_by(3).flat_map(|heads| (1..=40).map(move |query_len| (heads, query_len)))
        {
            let one = DecodeShape {
                batch: 1,
                max_seq_len: 131_072,
                free_splits: true,
                ..shape(heads, query_len, DType::BF16)
            };
            let kernels = decode_kernels(&one, &device("sm_90a", 232_448)).unwrap();
            if kernels.split.form == select_few::EITHER_FORM {
                chosen += 1;
                assert_eq!(query_len.div_ceil(kernels.query_group), 1, "{heads} heads, {query_len} tokens");
            }
        }
        assert!(chosen > 100, "{chosen}");
    }

    #[test]
    fn every_choice_fits_the_shared_memory_that_the_device_has() {
        for (arch, shared) in [("sm_90a", 232_448), ("sm_80", 166_912), ("sm_86", 101_376), ("gfx942", 65_536)] {
            for heads in [1, 5, 16, 20, 32, 64, 128, 1000] {
                for query_len in [1, 2, 16, 100] {
                    for kv_dtype in [DType::BF16, DType::Fp8E4m3] {
                        let kernels =
                            decode_kernels(&shape(heads, query_len, kv_dtype), &device(arch, shared)).unwrap();
                        assert!(kernels.split_shared_bytes as usize <= shared, "{arch} {kernels:?}");
                        assert!((1..=query_len).contains(&kernels.query_group));
                        assert!(all_variants(arch).contains(&kernels.split), "{arch} {kernels:?}");
                        assert!(all_variants(arch).contains(&kernels.reduce), "{arch} {kernels:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn more_rows_take_larger_blocks_and_few_tokens_smaller_ones() {
        let rows = |shape: &DecodeShape| decode_kernels(shape, &device("sm_90a", 232_448)).unwrap().split.block_rows;
        assert_eq!([1, 16, 17, 32, 33, 128].map(|heads| rows(&shape(heads, 1, DType::BF16))), [16, 16, 32, 32, 64, 64]);
        assert_eq!(rows(&shape(16, 2, DType::BF16)), 32);
        assert_eq!(rows(&DecodeShape { batch: 1, ..shape(128, 1, DType::BF16) }), 32);
        assert_eq!(rows(&DecodeShape { batch: 1, ..shape(16, 1, DType::BF16) }), 16);
    }

    #[test]
    fn one_sequence_captured_long_has_a_form_for_few_tokens_beside_another() {
        let kernels = |batch, num_heads, max_seq_len| {
            let few = DecodeShape { batch, max_seq_len, free_splits: true, ..shape(num_heads, 1, DType::BF16) };
            decode_kernels(&few, &device("sm_90a", 232_448)).unwrap()
        };
        let most = 16_384;
        for num_heads in [33, 64, 128] {
            let both = kernels(1, num_heads, 131_072);
            let few = both.few.expect("a second form");
            assert_eq!((both.split.form, both.split.block_rows), (select_few::EITHER_FORM, 64), "{num_heads}");
            assert_eq!((few.max_tokens, few.block_rows, both.own_pieces), (most, 32, false));
            assert!(both.split_shared_bytes as usize <= 232_448 && all_variants("sm_90a").contains(&both.split));
            let alone = kernels(1, num_heads, most);
            assert_eq!((alone.split.form, alone.own_pieces, alone.few), (select_few::BOXES_FORM, true, None));
            assert_eq!((both.short_seq_len, alone.short_seq_len), (Some(most), None));
        }
        let none = [(1, 16), (1, 32), (2, 128)].map(|(batch, heads)| kernels(batch, heads, 131_072).few);
        assert_eq!(none, [None; 3]);
        let short = |batch, num_heads| kernels(batch, num_heads, 131_072).short_seq_len;
        assert_eq!([short(1, 32), short(2, 128), short(8, 128), short(9, 128)], [None, Some(4096), Some(1024), None]);
        let fixed = DecodeShape { batch: 1, max_seq_len: 131_072, ..shape(128, 1, DType::BF16) };
        let fixed = decode_kernels(&fixed, &device("sm_90a", 232_448)).unwrap();
        assert_eq!((fixed.few, fixed.short_seq_len), (None, None));
    }

    #[test]
    fn many_rows_take_turns_where_the_cache_has_16_bits_and_the_memory_is_there() {
        let form = |heads, kv_dtype, arch, shared| {
            let split = decode_kernels(&shape(heads, 1, kv_dtype), &device(arch, shared)).unwrap().split;
            (split.form, split.block_rows)
        };
        assert_eq!(form(128, DType::BF16, "sm_100a", 232_448), (TURNS_FORM, 64));
        assert_eq!(form(128, DType::Fp8E4m3, "sm_100a", 232_448), (0, 64));
        assert_eq!(form(32, DType::BF16, "sm_100a", 232_448), (0, 32));
        assert_eq!(form(128, DType::BF16, "sm_80", 166_912), (0, 32));
        let portable = DecodeShape { portable: true, ..shape(128, 1, DType::BF16) };
        let split = decode_kernels(&portable, &device("sm_90a", 232_448)).unwrap().split;
        assert_eq!((split.form, split.block_rows), (TURNS_FORM, 64));
    }

    #[test]
    fn what_no_kernel_serves_is_refused_by_name() {
        let refused = |shape: &DecodeShape, shared| match decode_kernels(shape, &device("sm_90a", shared)) {
            Err(Error::Unsupported { what, .. }) => what,
            other => panic!("{other:?}"),
        };
        let fine = shape(16, 1, DType::BF16);
        assert!(refused(&DecodeShape { rope_dim: 16, ..fine }, 232_448).contains("512 + 16"));
        assert!(refused(&DecodeShape { q_dtype: DType::F32, ..fine }, 232_448).contains("f32"));
        assert!(refused(&DecodeShape { kv_dtype: DType::U8, ..fine }, 232_448).contains("u8"));
        assert!(refused(&fine, 48 << 10).contains("shared memory"));
    }

    #[test]
    fn stages_are_lowered_before_a_form_is_given_up() {
        let kernels = |shared| decode_kernels(&shape(16, 1, DType::BF16), &device("sm_90", shared)).unwrap().split;
        assert_eq!((kernels(232_448).tile_tokens, kernels(232_448).stages), (32, 5));
        assert_eq!((kernels(200_000).tile_tokens, kernels(200_000).stages), (32, 4));
        assert_eq!((kernels(101_376).tile_tokens, kernels(101_376).stages), (16, 4));
    }
}
