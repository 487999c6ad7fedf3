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

/// A type of the kernels.
#[derive(Clone, Copy, PartialEq)]
enum Type {
    F16,
    Bf16,
    Fp8Fnuz,
}

impl Type {
    fn of(dtype: DType) -> Self {
        match dtype {
            DType::F16 => Self::F16,
            DType::Fp8E4m3Fnuz => Self::Fp8Fnuz,
            _ => Self::Bf16,
        }
    }

    fn size(self) -> usize {
        if self == Self::Fp8Fnuz { 1 } else { 2 }
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
    let (batch, width) = (LENS.len(), form.rank + form.rope);
    let mut random = Random::new();
    let columns = LENS.iter().max().map_or(0, |len| (*len as usize).div_ceil(PAGE)) + 1;
    let pages = batch * columns + 2;
    let (q_bytes, q) = form.q.random(&mut random, batch * query_len * HEADS * width);
    let (kv_bytes, kv) = form.kv.random(&mut random, pages * PAGE * width);
    // Pages in an order of their own; entries past a sequence's end name no page.
    let table: Vec<i32> = (0..batch * columns)
        .map(|at| {
            let used = (LENS[at / columns] as usize).div_ceil(PAGE);
            if at % columns < used { ((at * 7 + 3) % pages) as i32 } else { -1 }
        })
        .collect();
    // Bytes of tokens past a sequence's end are NaN, of a sixteen bit type at least.
    let mut cache = kv_bytes;
    for (seq, len) in LENS.iter().enumerate() {
        let last = (*len as usize - 1) / PAGE;
        for token in *len as usize..(last + 1) * PAGE {
            let at = (table[seq * columns + last] as usize * PAGE + token % PAGE) * width * form.kv.size();
            cache[at..at + width * form.kv.size()].fill(if form.kv == Type::Fp8Fnuz { 0x80 } else { 0xff });
        }
    }
    // Stage 1 looks up the page of a tile after the last one, in a row past the table; it does not use it.
    let padded = [&table[..], &vec![-1; columns]].concat();
    let rows = batch * query_len * HEADS;
    let slots = batch * splits;
    let (pq, pkv) = (gpu.upload(&q_bytes), gpu.upload(&cache));
    let out = gpu.upload(&vec![0xff; rows * form.rank * 2]);
    let lse = gpu.upload(&common::unwritten(rows));
    let (kv_scale, sm_scale) = (if form.kv == Type::Fp8Fnuz { 0.25 } else { 1.0 }, 0.7 / (width as f32).sqrt());
    let params = DecodeParams {
        q: pq,
        kv: pkv,
        k_rope: pkv + (form.rank * form.kv.size()) as u64,
        block_table: gpu.upload(&common::i32_bytes(&padded)),
        seq_lens: gpu.upload(&common::i32_bytes(&LENS)),
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
        ..DecodeParams::zeroed()
    };
    let arguments = Arguments::default().block(bytemuck::bytes_of(&params));
    let group_rows = (query_len * HEADS) as u32;
    let grid = group_rows.div_ceil(variant.block_rows) * slots as u32;
    gpu.launch(&gpu.kernel("mla_decode_split"), grid, variant.threads, &arguments)
        .unwrap_or_else(|fault| panic!("stage 1: {fault}"));
    if splits > 1 {
        gpu.dynamic_bytes = 0;
        let code = hsakmt::device::CodeObject::load(&reduce, &gpu.device.memory).expect("stage 2");
        let kernel = code.kernel("mla_decode_reduce").expect("stage 2");
        let grid = (form.rank as u32).div_ceil(REDUCE.1) * group_rows.div_ceil(REDUCE.0) * batch as u32;
        gpu.launch(&kernel, grid, 256, &arguments).unwrap_or_else(|fault| panic!("stage 2: {fault}"));
    }
    let total = gpu.device.statistics().total();
    println!("{variant}: {} wave instructions in {:.2} s", total.instructions, total.seconds);

    let got_out = gpu.download(out, rows * form.rank * 2);
    let got_lse = common::to_f32(&gpu.download(lse, 4 * rows));
    for row in 0..rows {
        let (seq, token) = (row / (query_len * HEADS), row / HEADS % query_len);
        let visible = (LENS[seq] as usize + token + 1).saturating_sub(query_len);
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
        assert!((f64::from(got_lse[row]) - want_lse).abs() < 2e-3, "row {row}: LSE {} for {want_lse}", got_lse[row]);
        for (column, want) in want.iter().enumerate() {
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

/// Forms for many rows, with more of them than one block has, some of which see nothing.
#[test]
fn forms_for_many_rows() {
    let shipped = select::variants("gfx942").into_iter().filter(|variant| variant.entry == Entry::DecodeSplit);
    let many = shipped.filter(|variant| variant.block_rows >= 64);
    let count = many.map(|variant| decode(variant, 30, 3)).count();
    assert!(count >= 1, "{count}");
}
