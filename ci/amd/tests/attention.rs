//! The library's own kernels, compiled for gfx942, on a checking device: numbers against float64, and no finding.

mod common;

use bytemuck::Zeroable;
use common::emulator::Emulator;
use common::{Arguments, Gpu, Random};
use latentwave::DType;
use latentwave::kernel::params::{DecodeParams, ScheduleKind};
use latentwave::kernel::source::ROCM;
use latentwave::kernel::{Entry, Source, Variant, select};

const HEADS: usize = 5;
const PAGE: usize = 4;
const LENS: [i32; 3] = [53, 3, 17];
const LONG_LENS: [i32; 3] = [333, 3, 97];

/// A type of the kernels.
#[derive(Clone, Copy, PartialEq)]
enum Type {
    F16,
    Bf16,
    Fp8,
    Fp8Fnuz,
}

impl Type {
    fn of(dtype: DType) -> Self {
        match dtype {
            DType::F16 => Self::F16,
            DType::Fp8E4m3 => Self::Fp8,
            DType::Fp8E4m3Fnuz => Self::Fp8Fnuz,
            _ => Self::Bf16,
        }
    }

    fn size(self) -> usize {
        if matches!(self, Self::Fp8 | Self::Fp8Fnuz) { 1 } else { 2 }
    }

    /// The byte that makes an element NaN, as all of its bytes.
    fn nan(self) -> u8 {
        match self {
            Self::Fp8 => 0x7f,
            Self::Fp8Fnuz => 0x80,
            _ => 0xff,
        }
    }

    /// Random elements: bytes and values.
    fn random(self, random: &mut Random, n: usize) -> (Vec<u8>, Vec<f64>) {
        let mut bytes = Vec::with_capacity(n * self.size());
        let values = (0..n).map(|_| {
            let x = random.unit();
            match self {
                Self::F16 => {
                    let x = half::f16::from_f32(x);
                    bytes.extend(x.to_le_bytes());
                    x.to_f64()
                }
                Self::Bf16 => {
                    let x = half::bf16::from_f32(x);
                    bytes.extend(x.to_le_bytes());
                    x.to_f64()
                }
                Self::Fp8 => {
                    // The same bits as e4m3fnuz are worth twice as much, and 0x80 is -0.
                    let byte = random.bits() as u8 & 0xbf;
                    bytes.push(byte);
                    if byte == 0x80 { 0.0 } else { f64::from(hsakmt::cdna3::float::fp8_to_f32(byte)) * 2.0 }
                }
                Self::Fp8Fnuz => {
                    let byte = random.bits() as u8 & 0xbf;
                    let byte = if byte == 0x80 { 0 } else { byte };
                    bytes.push(byte);
                    hsakmt::cdna3::float::fp8_to_f32(byte).into()
                }
            }
        });
        let values = values.collect();
        (bytes, values)
    }

    /// The value of stored bytes.
    fn value(self, bytes: &[u8]) -> f64 {
        match self {
            Self::F16 => half::f16::from_le_bytes([bytes[0], bytes[1]]).to_f64(),
            _ => half::bf16::from_le_bytes([bytes[0], bytes[1]]).to_f64(),
        }
    }
}

/// Compiles a variant for gfx942 from the sources that the library carries.
fn compile(variant: &Variant) -> Result<Vec<u8>, String> {
    let source = Source::new(&ROCM, variant, 64);
    common::compile_text(&source.text, &source.options)
}

/// A form of stage 1.
fn split(dtypes: (DType, DType), dims: (u32, u32), block_rows: u32, stages: u32) -> Variant {
    Variant {
        kv_dtype: dtypes.1,
        kv_lora_rank: dims.0,
        rope_dim: dims.1,
        block_rows,
        tile_tokens: 16,
        stages,
        threads: 256,
        ..Variant::simple(Entry::DecodeSplit, dtypes.0)
    }
}

/// Rows and columns of a block of stage 2.
const REDUCE: (u32, u32) = (4, 128);

/// What one query row must give: output and natural-log LSE.
fn reference(q: &[f64], rows: &[&[f64]], rank: usize, scale: f64) -> (Vec<f64>, f64) {
    let logits: Vec<f64> = rows.iter().map(|row| scale * q.iter().zip(*row).map(|(a, b)| a * b).sum::<f64>()).collect();
    let top = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = logits.iter().map(|x| (x - top).exp()).collect();
    let sum: f64 = weights.iter().sum();
    let mut out = vec![0.0; rank];
    for (weight, row) in weights.iter().zip(rows) {
        out.iter_mut().zip(*row).for_each(|(out, x)| *out += weight / sum * x);
    }
    (out, top + sum.ln())
}

/// Sizes of a problem.
struct Form {
    q: Type,
    kv: Type,
    rank: usize,
    rope: usize,
}

/// Runs both stages for `query_len` tokens and compares every row.
fn decode(variant: Variant, query_len: usize, splits: usize) {
    decode_with(variant, query_len, splits, LENS, None);
}

/// Where a NaN is put.
const NAN_COLUMN: usize = 7;

/// The same with sequences of these lengths, and a NaN in that token of the first.
fn decode_with(variant: Variant, query_len: usize, splits: usize, lens: [i32; 3], nan: Option<usize>) {
    let form = Form {
        q: Type::of(variant.q_dtype),
        kv: Type::of(variant.kv_dtype),
        rank: variant.kv_lora_rank as usize,
        rope: variant.rope_dim as usize,
    };
    let merge = Variant {
        block_rows: REDUCE.0,
        tile_tokens: REDUCE.1,
        threads: 256,
        ..Variant::simple(Entry::DecodeReduce, variant.q_dtype)
    };
    let (split, reduce) = match compile(&variant).and_then(|split| Ok((split, compile(&merge)?))) {
        Ok(files) => files,
        Err(reason) if reason.starts_with("clang") => panic!("{variant}: {reason}"),
        Err(reason) => {
            println!("not run: {reason}");
            return;
        }
    };
    let mut gpu = Emulator::new(&split, true);
    gpu.dynamic_bytes = 65536 - 128;
    let (batch, width) = (lens.len(), form.rank + form.rope);
    let mut random = Random::new();
    let columns = lens.iter().max().map_or(0, |len| (*len as usize).div_ceil(PAGE)) + 1;
    let pages = batch * columns + 2;
    let (q_bytes, q) = form.q.random(&mut random, batch * query_len * HEADS * width);
    let (mut cache, mut kv) = form.kv.random(&mut random, pages * PAGE * width);
    // Pages in an order of their own; entries past a sequence's end name no page.
    let table: Vec<i32> = (0..batch * columns)
        .map(|at| {
            let used = (lens[at / columns] as usize).div_ceil(PAGE);
            if at % columns < used { ((at * 7 + 3) % pages) as i32 } else { -1 }
        })
        .collect();
    if let Some(token) = nan {
        let at = (table[token / PAGE] as usize * PAGE + token % PAGE) * width + NAN_COLUMN;
        cache[at * form.kv.size()..][..form.kv.size()].fill(form.kv.nan());
        kv[at] = f64::NAN;
    }
    // Tokens past a sequence's end are NaN.
    for (seq, len) in lens.iter().enumerate() {
        let last = (*len as usize - 1) / PAGE;
        for token in *len as usize..(last + 1) * PAGE {
            let at = (table[seq * columns + last] as usize * PAGE + token % PAGE) * width * form.kv.size();
            cache[at..at + width * form.kv.size()].fill(form.kv.nan());
        }
    }
    // Stage 1 looks up the page of a tile after the last one, in a row past the table; it does not use it.
    let padded = [&table[..], &vec![-1; columns]].concat();
    let rows = batch * query_len * HEADS;
    let slots = batch * splits;
    let (pq, pkv) = (gpu.upload(&q_bytes), gpu.upload(&cache));
    let out = gpu.upload(&vec![0xff; rows * form.rank * 2]);
    let lse = gpu.upload(&common::unwritten(rows));
    let (kv_scale, sm_scale) = (if form.kv.size() == 1 { 0.25 } else { 1.0 }, 0.7 / (width as f32).sqrt());
    let group_rows = (query_len * HEADS) as u32;
    let share_blocks = (form.rank as u32).div_ceil(REDUCE.1) * group_rows.div_ceil(REDUCE.0);
    let params = DecodeParams {
        q: pq,
        kv: pkv,
        k_rope: pkv + (form.rank * form.kv.size()) as u64,
        block_table: gpu.upload(&common::i32_bytes(&padded)),
        seq_lens: gpu.upload(&common::i32_bytes(&lens)),
        out,
        lse,
        partial_out: gpu.upload(&vec![0xff; slots * query_len * HEADS * form.rank * form.q.size()]),
        partial_lse: gpu.upload(&common::unwritten(slots * query_len * HEADS)),
        q_stride_batch: (query_len * HEADS * width) as i64,
        q_stride_token: (HEADS * width) as i64,
        q_stride_head: width as i64,
        kv_stride_page: (PAGE * width) as i64,
        kv_stride_token: width as i64,
        rope_stride_page: (PAGE * width) as i64,
        rope_stride_token: width as i64,
        table_stride: columns as i64,
        out_stride_batch: (query_len * HEADS * form.rank) as i64,
        out_stride_token: (HEADS * form.rank) as i64,
        out_stride_head: form.rank as i64,
        lse_stride_batch: (query_len * HEADS) as i64,
        lse_stride_token: HEADS as i64,
        num_pages: pages as i64,
        batch: batch as i32,
        query_len: query_len as i32,
        query_group: query_len as i32,
        num_groups: 1,
        num_heads: HEADS as i32,
        kv_lora_rank: form.rank as i32,
        rope_dim: form.rope as i32,
        page_size: PAGE as i32,
        table_width: columns as i32,
        causal: 1,
        schedule_kind: ScheduleKind::Even as i32,
        num_kv_splits: splits as i32,
        tile_tokens: variant.tile_tokens as i32,
        sm_scale,
        kv_scale,
        share_blocks: share_blocks as i32,
        ..DecodeParams::zeroed()
    }
    .with_inverses();
    let arguments = Arguments::default().block(bytemuck::bytes_of(&params));
    let grid = group_rows.div_ceil(variant.block_rows) * slots as u32;
    gpu.launch(&gpu.kernel("mla_decode_split"), grid, variant.threads, &arguments)
        .unwrap_or_else(|fault| panic!("stage 1: {fault}"));
    if splits > 1 {
        gpu.dynamic_bytes = 0;
        let code = hsakmt::device::CodeObject::load(&reduce, &gpu.device.memory).expect("stage 2");
        let kernel = code.kernel("mla_decode_reduce").expect("stage 2");
        let grid = share_blocks * batch as u32;
        gpu.launch(&kernel, grid, 256, &arguments).unwrap_or_else(|fault| panic!("stage 2: {fault}"));
    }
    let total = gpu.device.statistics().total();
    println!("{variant}: {} wave instructions in {:.2} s", total.instructions, total.seconds);

    let got_out = gpu.download(out, rows * form.rank * 2);
    let got_lse = common::to_f32(&gpu.download(lse, 4 * rows));
    for row in 0..rows {
        let (seq, token) = (row / (query_len * HEADS), row / HEADS % query_len);
        let visible = (lens[seq] as usize + token + 1).saturating_sub(query_len);
        let scaled: Vec<Vec<f64>> = (0..visible)
            .map(|t| {
                let at = (table[seq * columns + t / PAGE] as usize * PAGE + t % PAGE) * width;
                kv[at..at + width].iter().map(|x| x * f64::from(kv_scale)).collect()
            })
            .collect();
        let tokens: Vec<&[f64]> = scaled.iter().map(Vec::as_slice).collect();
        let (want, want_lse) = reference(&q[row * width..(row + 1) * width], &tokens, form.rank, sm_scale.into());
        if visible == 0 {
            assert_eq!(got_lse[row], f32::NEG_INFINITY, "row {row}");
            continue;
        }
        if want_lse.is_nan() {
            let all_nan = got_out[row * form.rank * 2..][..form.rank * 2].chunks(2).all(|x| form.q.value(x).is_nan());
            assert!(got_lse[row].is_nan() && all_nan, "row {row}: LSE {} for NaN", got_lse[row]);
            continue;
        }
        assert!((f64::from(got_lse[row]) - want_lse).abs() < 2e-3, "row {row}: LSE {} for {want_lse}", got_lse[row]);
        for (column, want) in want.iter().enumerate() {
            if nan.is_some() && (seq, column) == (0, NAN_COLUMN) {
                continue; // a weight of zero does not undo a NaN
            }
            let at = (row * form.rank + column) * 2;
            let got = form.q.value(&got_out[at..at + 2]);
            assert!((got - want).abs() <= 0.02 * want.abs() + 4e-3, "row {row} column {column}: {got} for {want}");
        }
    }
}

const WIDE: (u32, u32) = (512, 64);
const BF16: (DType, DType) = (DType::BF16, DType::BF16);

#[test]
fn bf16_in_one_split() {
    decode(split(BF16, WIDE, 16, 3), 1, 1);
}

#[test]
fn bf16_in_three_splits_with_two_query_tokens() {
    decode(split(BF16, WIDE, 32, 3), 2, 3);
}

#[test]
fn f16() {
    decode(split((DType::F16, DType::F16), WIDE, 16, 3), 1, 2);
}

#[test]
fn fp8() {
    decode(split((DType::BF16, DType::Fp8E4m3Fnuz), WIDE, 16, 2), 1, 2);
}

#[test]
fn narrow_rows_with_four_query_tokens() {
    decode(split(BF16, (256, 32), 32, 3), 4, 2);
}

/// All variants of stage 1 that the library ships for this device.
#[test]
fn every_shipped_variant() {
    let shipped = select::variants("gfx942").into_iter().filter(|variant| variant.entry == Entry::DecodeSplit);
    let count = shipped.map(|variant| decode(variant, 2, 2)).count();
    assert!(count >= 4, "{count}");
}

/// CDNA's forms of other widths, and of the 8-bit floats that the device has no instructions for.
#[test]
fn forms_of_other_widths_and_types() {
    let chosen = |variant: &Variant| {
        let narrow = variant.kv_lora_rank == 256;
        let other = variant.kv_dtype == DType::Fp8E4m3 && (variant.kv_lora_rank, variant.rope_dim) == WIDE;
        variant.entry == Entry::DecodeSplit
            && variant.stages == 1
            && variant.q_dtype == DType::BF16
            && (narrow || other)
    };
    let count = select::all_variants("gfx942").into_iter().filter(chosen).map(|variant| decode(variant, 14, 2)).count();
    assert!(count >= 19, "{count}");
}

/// The last of 53 tokens, which only the last query token sees, is NaN: the others are right beside it.
#[test]
fn a_nan_reaches_those_who_see_it() {
    let chosen = |variant: &Variant| {
        let wide = (variant.kv_lora_rank, variant.rope_dim) == WIDE;
        variant.entry == Entry::DecodeSplit && variant.stages == 1 && variant.q_dtype == DType::BF16 && wide
    };
    let variants = select::all_variants("gfx942").into_iter().filter(chosen);
    let count = variants.map(|variant| decode_with(variant, 2, 2, LENS, Some(52))).count();
    assert!(count >= 9, "{count}");
}

/// Blocks of CDNA's forms share out items and rows so that nothing is left out or done twice, whatever the grid, and those of an
/// item go to one die.
#[test]
fn the_order_of_blocks_is_a_permutation() {
    const DIES: usize = 8;
    let mut form = select::all_variants("gfx942").into_iter().filter(|v| v.stages == 1 && v.block_rows == 128);
    let form = form.next().expect("CDNA's form for many rows");
    let source = Source::new(&ROCM, &form, 64);
    let probe = "KERNEL(64) order(const DecodeParams p, uint64 out) {
        int block = block_index() * 64 + thread_index();
        Share share = share_of(p, block);
        ((int*)out)[2 * block] = share.item;
        ((int*)out)[2 * block + 1] = share.first_row;
    }";
    let code = match common::compile_text(&format!("{}\n{probe}", source.text), &source.options) {
        Ok(code) => code,
        Err(reason) if reason.starts_with("clang") => panic!("{reason}"),
        Err(reason) => return println!("not run: {reason}"),
    };
    let gpu = Emulator::new(&code, true);
    let most = 64 * 64;
    let out = gpu.upload(&common::unwritten(2 * most));
    for row_blocks in 1..=4 {
        for (parts, batch, splits) in (1..=70).map(|n| (n, 0, 0)).chain((1..=9).map(|n| (0, n, 5))) {
            let kind = if parts > 0 { ScheduleKind::Balanced } else { ScheduleKind::Even };
            let params = DecodeParams {
                batch,
                query_group: 1,
                num_groups: 1,
                num_heads: 128 * row_blocks - 5,
                schedule_kind: kind as i32,
                num_kv_splits: splits,
                num_parts: parts,
                ..DecodeParams::zeroed()
            }
            .with_inverses();
            let (items, row_blocks) = ((parts + batch * splits) as usize, row_blocks as usize);
            let arguments = Arguments::default().block(bytemuck::bytes_of(&params)).pointer(out);
            gpu.launch(&gpu.kernel("order"), (items * row_blocks).div_ceil(64) as u32, 64, &arguments).expect("runs");
            let shares = common::to_i32(&gpu.download(out, 8 * items * row_blocks));
            let mut seen = vec![None; items * row_blocks];
            for (block, share) in shares.chunks_exact(2).enumerate() {
                let (item, row_block) = (share[0] as usize, share[1] as usize / 128);
                assert_eq!((share[1] % 128, item < items, row_block < row_blocks), (0, true, true), "{share:?}");
                let before = seen[item * row_blocks + row_block].replace(block);
                assert_eq!(before, None, "{share:?} is done twice of {items} items in {row_blocks} blocks");
            }
            for item in 0..items / DIES * DIES {
                let dies: Vec<_> =
                    seen[item * row_blocks..][..row_blocks].iter().map(|b| b.map(|b| b % DIES)).collect();
                assert!(dies.iter().all(|die| *die == dies[0]), "item {item} of {items} is on dies {dies:?}");
            }
        }
    }
}

/// The form whose waves have their rows to themselves, of every type that it serves: many tiles, and a NaN that some rows see;
/// and rows in two blocks, in pieces that end at each tile of a turn.
#[test]
fn rows_of_their_own_in_many_tiles() {
    let chosen =
        |v: &Variant| v.entry == Entry::DecodeSplit && v.stages == 1 && v.block_rows == 128 && v.kv_lora_rank == 256;
    let variants: Vec<_> = select::all_variants("gfx942").into_iter().filter(chosen).collect();
    assert!(variants.len() >= 8, "{}", variants.len());
    for variant in &variants {
        decode_with(*variant, 14, 2, LONG_LENS, Some(332));
    }
    for splits in [1, 3, 5] {
        decode_with(variants[0], 30, splits, LONG_LENS, None);
    }
}

/// Forms for many rows, with more of them than one block has, some of which see nothing.
#[test]
fn forms_for_many_rows() {
    let shipped = select::variants("gfx942").into_iter().filter(|variant| variant.entry == Entry::DecodeSplit);
    let many = shipped.filter(|variant| variant.block_rows >= 64);
    let count = many.map(|variant| decode(variant, 30, 3)).count();
    assert!(count >= 1, "{count}");
}
