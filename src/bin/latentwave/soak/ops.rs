//! The operations beside attention, one small problem of each: rows written to a cache and gathered from it, results merged.

use latentwave::ops::{CacheWrite, DcpCombine, MergeStates, dcp_combine, gather_cache, merge_states, write_cache};
use latentwave::reference::{self, Attended};
use latentwave::testing::{self, nan_byte};
use latentwave::{DType, Error, GraphBackend, KvCache, MlaConfig, Result, Stream, Tensor};

use super::run::Fault;
use crate::rng::Rng;
use crate::rows::{self, Errors, Rows};

const PAGE_SIZE: usize = 16;

/// Cached tokens of two sequences, and rows after them that go to no slot.
const LENS: [usize; 2] = [20, 17];
const PADDED: usize = 3;

/// A merged LSE is as exact as float32.
const LSE_TOLERANCE: f64 = 1e-5;

/// Checks all of them. Returns what was right, in words.
///
/// # Errors
/// What is wrong with a result, or what the device said.
pub(super) fn check<B: GraphBackend>(backend: &B, seed: u64) -> Result<String, Fault> {
    let failed = |what: &'static str| move |error: Error| Fault::Failed(what.to_owned(), error);
    let stream = Stream::new(backend).map_err(failed("the set-up of operations"))?;
    let mut rng = Rng::new(seed);
    for (dtype, scale) in [(DType::BF16, 1.0), (DType::Fp8E4m3, 0.5)] {
        let cached = cache(backend, &stream, dtype, scale, &mut rng).map_err(failed("writing or gathering rows"))?;
        cached.map_err(|miss| Fault::Wrong(format!("cache of {dtype}: {miss}")))?;
    }
    let mut errors = Errors::default();
    for (what, ranks) in [("two results merged", None), ("results of three ranks combined", Some(3))] {
        let merged = merge(backend, &stream, ranks, &mut rng).map_err(failed("merging"))?;
        errors.merge(merged.map_err(|miss| Fault::Wrong(format!("{what}: {miss}")))?);
    }
    Ok(format!(
        "rows of bf16 and fp8_e4m3 written and gathered, {} rows merged and combined: right, norm {:.2e}",
        errors.rows,
        errors.norm()
    ))
}

/// Writes rows of two sequences and gathers them again; every byte of cache and output is looked at.
fn cache<B: GraphBackend>(
    backend: &B,
    stream: &Stream<B>,
    dtype: DType,
    kv_scale: f32,
    rng: &mut Rng,
) -> Result<Result<(), String>> {
    let config = MlaConfig::deepseek(1, PAGE_SIZE);
    let (rank, width) = (config.kv_lora_rank, config.head_dim());
    let mut pages: Vec<i32> = (0..5).collect();
    rng.shuffle(&mut pages);
    let table = &pages[..4];
    let tokens: usize = LENS.iter().sum();
    let slot = |seq: usize, token: usize| table[2 * seq + token / PAGE_SIZE] as usize * PAGE_SIZE + token % PAGE_SIZE;
    let slots: Vec<usize> = (0..2).flat_map(|seq| (0..LENS[seq]).map(move |token| slot(seq, token))).collect();
    let mapping: Vec<i64> = slots.iter().map(|slot| *slot as i64).chain([-1; PADDED]).collect();
    let new = Rows::random(DType::BF16, tokens + PADDED, width, rng);
    let part = |columns: std::ops::Range<usize>| {
        let bytes = (0..new.len()).flat_map(|row| new.bytes(row..row + 1)[columns.start * 2..columns.end * 2].to_vec());
        Tensor::from_bytes(backend, [new.len(), columns.len()], DType::BF16, &bytes.collect::<Vec<_>>())
    };
    let whole = Tensor::empty(backend, [pages.len(), PAGE_SIZE, width], dtype)?;
    whole.fill_bytes(backend, nan_byte(dtype))?;
    let kv_cache = KvCache::joined(&whole, &config)?;
    let (kv_c, k_pe) = (&part(0..rank)?, &part(rank..width)?);
    let slot_mapping = &Tensor::from_slice(backend, [mapping.len()], &mapping)?;
    write_cache(stream, &kv_cache, &CacheWrite { kv_c, k_pe: Some(k_pe), slot_mapping, kv_scale })?;
    let mut out = Tensor::empty(backend, [tokens, width], DType::BF16)?;
    out.fill_bytes(backend, 0xff)?;
    let block_table = Tensor::from_slice(backend, [2, 2], table)?;
    let starts = Tensor::from_slice(backend, [3], &[0, LENS[0] as i32, tokens as i32])?;
    gather_cache(stream, &kv_cache, &block_table, &starts, None, kv_scale, &mut out)?;
    stream.synchronize()?;

    let written = testing::bytes(backend, &whole)?;
    let gathered = rows::read(backend, &out)?;
    let row_bytes = width * dtype.size();
    let wanted = |row: usize| -> Vec<f64> {
        new.values(row, 0..width).into_iter().map(|x| rows::cached(x, dtype, kv_scale)).collect()
    };
    for (at, bytes) in written.chunks(row_bytes).enumerate() {
        let right = match slots.iter().position(|slot| *slot == at) {
            Some(row) => reference::to_f64(dtype, bytes, kv_scale.into()) == wanted(row),
            None => bytes.iter().all(|byte| *byte == nan_byte(dtype)),
        };
        if !right {
            return Ok(Err(format!("slot {at} does not hold what was written")));
        }
    }
    // Eight bits and a scale of a power of two are exact in sixteen.
    let wrong = (0..tokens).find(|&row| gathered[row * width..(row + 1) * width] != wanted(row)[..]);
    Ok(wrong.map_or(Ok(()), |row| Err(format!("row {row} was gathered wrong"))))
}

/// Merges two results, or combines those of ranks; the first row has nothing in the first of them.
fn merge<B: GraphBackend>(
    backend: &B,
    stream: &Stream<B>,
    ranks: Option<usize>,
    rng: &mut Rng,
) -> Result<Result<Errors, String>> {
    let (tokens, heads, width, parts) = (5, 3, 512, ranks.unwrap_or(2));
    let count = tokens * heads;
    let outs = Rows::random(DType::BF16, parts * count, width, rng);
    // By part, token and head.
    let mut lse: Vec<f32> = (0..parts * count).map(|_| rng.normal()).collect();
    lse[0] = f32::NEG_INFINITY;
    let mut out = Tensor::empty(backend, [tokens, heads, width], DType::BF16)?;
    out.fill_bytes(backend, 0xff)?;
    let (got_lse, heads_first) = if ranks.is_some() {
        let all = Tensor::from_bytes(backend, [parts, tokens, heads, width], DType::BF16, outs.bytes(0..outs.len()))?;
        let partial_lse = &Tensor::from_slice(backend, [parts, tokens, heads], &lse)?;
        let mut out_lse = Tensor::zeros(backend, [tokens, heads], DType::F32)?;
        let combine = DcpCombine { partial_out: &all, partial_lse, natural_log: true };
        dcp_combine(stream, &combine, &mut out, Some(&mut out_lse))?;
        (out_lse, false)
    } else {
        let part = |part: usize| -> Result<(Tensor<B>, Tensor<B>)> {
            let bytes = outs.bytes(part * count..(part + 1) * count);
            let transposed: Vec<f32> =
                (0..count).map(|i| lse[part * count + i % tokens * heads + i / tokens]).collect();
            let out = Tensor::from_bytes(backend, [tokens, heads, width], DType::BF16, bytes)?;
            Ok((out, Tensor::from_slice(backend, [heads, tokens], &transposed)?))
        };
        let ((prefix_out, prefix_lse), (suffix_out, suffix_lse)) = (part(0)?, part(1)?);
        let states = MergeStates {
            prefix_out: &prefix_out,
            prefix_lse: &prefix_lse,
            suffix_out: &suffix_out,
            suffix_lse: &suffix_lse,
            tokens_with_context: None,
        };
        let mut out_lse = Tensor::zeros(backend, [heads, tokens], DType::F32)?;
        merge_states(stream, &states, &mut out, Some(&mut out_lse))?;
        (out_lse, true)
    };
    stream.synchronize()?;

    let (got, got_lse) = (rows::read(backend, &out)?, rows::read(backend, &got_lse)?);
    let mut errors = Errors::default();
    for row in 0..count {
        let of_part = |part: usize| {
            let at = part * count + row;
            Attended { out: outs.values(at, 0..width), lse: lse[at].into() }
        };
        let wanted = reference::merge(&(0..parts).map(of_part).collect::<Vec<_>>());
        let of_row = Errors::of_row(&got[row * width..(row + 1) * width], &wanted.out);
        let at = if heads_first { row % heads * tokens + row / heads } else { row };
        let lse_error = (got_lse[at] - wanted.lse).abs();
        let wrong =
            of_row.element > rows::tolerance(DType::BF16) || of_row.row_norm > rows::norm_tolerance(DType::BF16);
        if wrong || lse_error.is_nan() || lse_error > LSE_TOLERANCE {
            return Ok(Err(format!(
                "row {row} is wrong by {:.2e} in norm, its LSE by {lse_error:.2e}",
                of_row.row_norm
            )));
        }
        errors.merge(of_row);
    }
    Ok(Ok(errors))
}
