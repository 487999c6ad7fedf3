//! `NAME.json` and `NAME.X.json`: tables of single operations.

use latentwave::ops::{CacheWrite, DcpCombine, MergeStates, dcp_combine, gather_cache, merge_states, write_cache};
use latentwave::testing::{Tolerance, check_close, poisoned};
use latentwave::{Backend, DType, KvCache, MlaConfig, Result as OpResult, SplitPolicy, Stream, Tensor};
use serde_json::Value;

use super::Tally;
use super::common::{Problem, bytes, encode, tensor, values};

/// One row, by column name.
struct Row<'a> {
    columns: &'a [Value],
    cells: &'a [Value],
}

impl Row<'_> {
    fn cell(&self, column: &str) -> Result<&Value, String> {
        let index = self.columns.iter().position(|name| name == column);
        index.and_then(|index| self.cells.get(index)).ok_or_else(|| format!("no column `{column}`"))
    }

    fn size(&self, column: &str) -> Result<usize, String> {
        self.cell(column)?.as_u64().map(|x| x as usize).ok_or_else(|| format!("`{column}` is no size"))
    }

    fn floats(&self, column: &str) -> Result<Vec<f64>, String> {
        floats(self.cell(column)?).ok_or_else(|| format!("`{column}` is no list of numbers"))
    }
}

/// A nested list of numbers, flattened. `null` is NaN, infinities are words.
fn floats(value: &Value) -> Option<Vec<f64>> {
    match value {
        Value::Array(items) => items.iter().map(floats).collect::<Option<Vec<_>>>().map(|lists| lists.concat()),
        Value::Null => Some(vec![f64::NAN]),
        Value::String(word) => match word.as_str() {
            "inf" => Some(vec![f64::INFINITY]),
            "-inf" => Some(vec![f64::NEG_INFINITY]),
            _ => None,
        },
        other => other.as_f64().map(|x| vec![x]),
    }
}

pub(crate) fn run<B: Backend>(backend: &B, dtype: DType, json: &Value, stem: &str, tally: &mut Tally) {
    let name = stem.split('.').next().unwrap_or(stem);
    if name == "fp8_decode_tables" {
        return fp8_tables(backend, json, stem, tally);
    }
    let check: fn(&B, DType, &Row) -> Result<bool, String> = match name {
        "merge_attn_states" => merge_row,
        "dcp_combine" => combine_row,
        "concat_and_cache" => cache_row,
        "fp8_ds_mla_entry" => ds_mla_row,
        "dcp_empty_shard_mask" => mask_row,
        _ => return tally.failures.push(format!("{stem}: unknown golden table `{name}`")),
    };
    let list = |key: &str| json.get(key).and_then(Value::as_array);
    let (Some(columns), Some(rows)) = (list("columns"), list("rows")) else {
        return tally.failures.push(format!("{stem}: no columns or no rows"));
    };
    for (i, cells) in rows.iter().enumerate() {
        let outcome = match cells.as_array() {
            Some(cells) => check(backend, dtype, &Row { columns, cells }),
            None => Err("no list of cells".to_owned()),
        };
        tally.count(stem, &format!("row {i}"), outcome);
    }
}

fn words<T>(result: OpResult<T>) -> Result<T, String> {
    result.map_err(|error| error.to_string())
}

fn tolerance(dtype: DType) -> Tolerance {
    if dtype == DType::F32 { Tolerance::abs(2e-6) } else { Tolerance::HALF }
}

/// An LSE is float32 whatever the outputs are: two units in its last place.
const LSE: Tolerance = Tolerance { abs: 2e-6, rel: 2.4e-7, frobenius: f64::INFINITY };

fn f32_tensor<B: Backend, const N: usize>(backend: &B, shape: [usize; N], data: &[f64]) -> Tensor<B> {
    tensor(backend, shape, DType::F32, &encode(DType::F32, data))
}

fn merge_row<B: Backend>(backend: &B, dtype: DType, row: &Row) -> Result<bool, String> {
    let (tokens, heads, dim) = (row.size("T")?, row.size("H")?, row.size("D")?);
    let out = |column: &str| {
        row.floats(column).map(|data| tensor(backend, [tokens, heads, dim], dtype, &encode(dtype, &data)))
    };
    let lse = |column: &str| row.floats(column).map(|data| f32_tensor(backend, [heads, tokens], &data));
    let tokens_with_context = match row.cell("prefill_tokens_with_context")? {
        Value::Null => None,
        _ => Some(row.size("prefill_tokens_with_context")?),
    };
    let states = MergeStates {
        prefix_out: &out("prefix_out")?,
        prefix_lse: &lse("prefix_lse")?,
        suffix_out: &out("suffix_out")?,
        suffix_lse: &lse("suffix_lse")?,
        tokens_with_context,
    };
    let mut out = words(poisoned(backend, [tokens, heads, dim], dtype))?;
    let mut out_lse = words(poisoned(backend, [heads, tokens], DType::F32))?;
    let stream = words(Stream::new(backend))?;
    words(merge_states(&stream, &states, &mut out, Some(&mut out_lse)))?;
    words(stream.synchronize())?;
    check_close("out", &values(backend, &out), &row.floats("out")?, &tolerance(dtype))?;
    check_close("out_lse", &values(backend, &out_lse), &row.floats("out_lse")?, &LSE)?;
    Ok(true)
}

fn combine_row<B: Backend>(backend: &B, dtype: DType, row: &Row) -> Result<bool, String> {
    let ranks = row.size("N")?;
    let shape = |value: &Value| -> Vec<usize> {
        let mut shape = Vec::new();
        let mut value = value;
        while let Some(items) = value.as_array() {
            shape.push(items.len());
            let Some(first) = items.first() else { break };
            value = first;
        }
        shape
    };
    let outs = row.cell("outs")?;
    let [_, batch, heads, dim] = shape(outs)[..] else { return Err("`outs` has not four dimensions".to_owned()) };
    let natural_log = row.cell("natural_log")?.as_bool().ok_or("`natural_log` is no boolean")?;
    let partial_out = tensor(backend, [ranks, batch, heads, dim], dtype, &encode(dtype, &row.floats("outs")?));
    let partial_lse = f32_tensor(backend, [ranks, batch, heads], &row.floats("lses")?);
    let mut out = words(poisoned(backend, [batch, heads, dim], dtype))?;
    let mut out_lse = words(poisoned(backend, [batch, heads], DType::F32))?;
    let stream = words(Stream::new(backend))?;
    let combine = DcpCombine { partial_out: &partial_out, partial_lse: &partial_lse, natural_log };
    words(dcp_combine(&stream, &combine, &mut out, Some(&mut out_lse)))?;
    words(stream.synchronize())?;
    check_close("out", &values(backend, &out), &row.floats("out")?, &tolerance(dtype))?;
    check_close("lse", &values(backend, &out_lse), &row.floats("lse")?, &LSE)?;
    Ok(true)
}

fn config(kv_lora_rank: usize, rope_dim: usize, page_size: usize) -> MlaConfig {
    MlaConfig { num_heads: 1, kv_lora_rank, qk_rope_head_dim: rope_dim, page_size, sm_scale: 1.0, softcap: 0.0 }
}

fn cache_row<B: Backend>(backend: &B, dtype: DType, row: &Row) -> Result<bool, String> {
    let (rank, rope) = (row.size("kv_lora_rank")?, row.size("pe_dim")?);
    let (page_size, num_pages) = (row.size("block_size")?, row.size("num_blocks")?);
    let (kv_dtype, untouched) = match row.cell("format")?.as_str() {
        Some("auto") => (dtype, encode(dtype, &[-1.0])),
        Some("e4m3fn") => (DType::Fp8E4m3, vec![255]),
        Some("e4m3fnuz") => (DType::Fp8E4m3Fnuz, vec![255]),
        other => return Err(format!("unknown format {other:?}")),
    };
    let (kv_c, k_pe) = (row.floats("kv_c")?, row.floats("k_pe")?);
    // Inputs that this run's type cannot hold make other bytes.
    let exact = |data: &[f64]| latentwave::reference::to_f64(dtype, &encode(dtype, data), 1.0) == data;
    if !exact(&kv_c) || !exact(&k_pe) {
        return Ok(false);
    }
    let slots: Vec<i64> = row.floats("slot_mapping")?.iter().map(|&x| x as i64).collect();
    let rows = kv_c.len() / rank;
    let shape = [num_pages, page_size, rank + rope];
    let cache = tensor(backend, shape, kv_dtype, &untouched.repeat(num_pages * page_size * (rank + rope)));
    let kv_c = tensor(backend, [rows, rank], dtype, &encode(dtype, &kv_c));
    let k_pe = tensor(backend, [rows, rope], dtype, &encode(dtype, &k_pe));
    let slot_mapping = words(Tensor::from_slice(backend, [slots.len()], &slots))?;
    let kv_cache = words(KvCache::joined(&cache, &config(rank, rope, page_size)))?;
    let write = CacheWrite {
        kv_c: &kv_c,
        k_pe: (rope > 0).then_some(&k_pe),
        slot_mapping: &slot_mapping,
        kv_scale: row.cell("scale")?.as_f64().unwrap_or(1.0) as f32,
    };
    let stream = words(Stream::new(backend))?;
    words(write_cache(&stream, &kv_cache, &write))?;
    words(stream.synchronize())?;
    let want = row.floats("cache")?;
    let want = if kv_dtype.is_fp8() { want.iter().map(|&x| x as u8).collect() } else { encode(kv_dtype, &want) };
    match bytes(backend, &cache) == want {
        true => Ok(true),
        false => Err(format!("cache bytes {:?}, expected {want:?}", bytes(backend, &cache))),
    }
}

fn ds_mla_row<B: Backend>(backend: &B, _: DType, row: &Row) -> Result<bool, String> {
    let base64 = |column: &str| {
        let text = row.cell(column)?.as_str().ok_or_else(|| format!("`{column}` is no text"))?;
        decode_base64(text).ok_or_else(|| format!("`{column}` is no base64"))
    };
    let kv_c = tensor(backend, [1, 512], DType::BF16, &base64("kv_c_bf16")?);
    let mut rope = base64("k_pe_bf16")?;
    // A model without rope stores zeros.
    rope.resize(128, 0);
    let k_pe = tensor(backend, [1, 64], DType::BF16, &rope);
    let cache = words(poisoned(backend, [2, 2, 656], DType::U8))?;
    let kv_cache = words(KvCache::ds_mla(&cache))?;
    let slot_mapping = words(Tensor::from_slice(backend, [1], &[2_i64]))?;
    let write = CacheWrite { kv_c: &kv_c, k_pe: Some(&k_pe), slot_mapping: &slot_mapping, kv_scale: 1.0 };
    let stream = words(Stream::new(backend))?;
    words(write_cache(&stream, &kv_cache, &write))?;
    words(stream.synchronize())?;
    let got = bytes(backend, &cache);
    let want = base64("entry")?;
    if want.len() != 656 || got[2 * 656..3 * 656] != want {
        let at = got[2 * 656..].iter().zip(&want).position(|(a, b)| a != b);
        return Err(format!("the entry differs from byte {at:?} on"));
    }
    if got[..2 * 656].iter().chain(&got[3 * 656..]).any(|&byte| byte != 0xFF) {
        return Err("bytes of other slots were written".to_owned());
    }
    let scales = latentwave::reference::to_f64(DType::F32, &want[512..528], 1.0);
    check_close("tile scales", &scales, &row.floats("tile_scales")?, &Tolerance::abs(0.0))?;
    Ok(true)
}

/// vLLM masks the LSE of rows whose shard is empty after the kernel; here the kernel says so itself, and padding rows have length 0.
fn mask_row<B: Backend>(backend: &B, dtype: DType, row: &Row) -> Result<bool, String> {
    let (lens, starts) = (row.floats("local_seq_lens")?, row.floats("query_start_loc")?);
    let mut seq_lens = vec![0; row.size("lse_rows")?];
    for (seq, len) in lens.iter().enumerate() {
        seq_lens[starts[seq] as usize..starts[seq + 1] as usize].fill(*len as i32);
    }
    let mut problem = Problem::random(seq_lens.len() as u64, config(16, 4, 4), (dtype, dtype), 1, &seq_lens);
    problem.policy = SplitPolicy::Auto;
    let outcome = words(problem.run(backend))?;
    let empty: Vec<Value> = outcome.lse.iter().map(|&lse| Value::Bool(lse == f64::NEG_INFINITY)).collect();
    let want = row.cell("row_is_empty")?.as_array().ok_or("`row_is_empty` is no list")?;
    if empty != *want || outcome.lse.iter().any(|lse| lse.is_nan()) {
        return Err(format!("LSE {:?} where rows {want:?} are empty", outcome.lse));
    }
    Ok(true)
}

/// All bytes of the cache's 8-bit floats, by the crate's functions and by the backend's gather kernel.
fn fp8_tables<B: Backend>(backend: &B, json: &Value, stem: &str, tally: &mut Tally) {
    for (format, table) in json.as_object().into_iter().flatten().filter(|(_, table)| table.is_array()) {
        let dtype = match format.as_str() {
            "e4m3fn" => DType::Fp8E4m3,
            "e4m3fnuz" => DType::Fp8E4m3Fnuz,
            // No model keeps its cache in e5m2, and no kernel here reads it.
            "e5m2" => {
                tally.count(stem, format, Ok(false));
                continue;
            }
            other => {
                tally.failures.push(format!("{stem}: unknown format `{other}`"));
                continue;
            }
        };
        tally.count(stem, format, fp8_table(backend, dtype, table));
    }
}

fn fp8_table<B: Backend>(backend: &B, dtype: DType, table: &Value) -> Result<bool, String> {
    let want = floats(table).ok_or("no list of numbers")?;
    let all: Vec<u8> = (0..=255).collect();
    let ours: Vec<f64> = all.iter().map(|&byte| f64::from(latentwave::fp8::to_f32(dtype, byte))).collect();
    check_close("decoder", &ours, &want, &Tolerance::abs(0.0))?;

    let cache = tensor(backend, [1, 16, 16], dtype, &all);
    let kv_cache = words(KvCache::joined(&cache, &config(12, 4, 16)))?;
    let block_table = words(Tensor::from_slice(backend, [1, 1], &[0]))?;
    let cu_seq_lens = words(Tensor::from_slice(backend, [2], &[0, 16]))?;
    let mut out = words(poisoned(backend, [16, 16], DType::F32))?;
    let stream = words(Stream::new(backend))?;
    words(gather_cache(&stream, &kv_cache, &block_table, &cu_seq_lens, None, 1.0, &mut out))?;
    words(stream.synchronize())?;
    check_close("gather kernel", &values(backend, &out), &want, &Tolerance::abs(0.0))?;
    Ok(true)
}

fn decode_base64(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    let (mut bits, mut count) = (0_u32, 0);
    for c in text.bytes().filter(|&c| c != b'=') {
        let value = match c {
            b'A'..=b'Z' => c - b'A',
            b'a'..=b'z' => c - b'a' + 26,
            b'0'..=b'9' => c - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        bits = bits << 6 | u32::from(value);
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
        }
    }
    Some(bytes)
}
