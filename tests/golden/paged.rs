//! Cases over a paged cache: one token or several, plain or fp8, with and without soft cap.

use latentwave::testing::check_close;
use latentwave::{Backend, DType, MlaConfig, SplitPolicy};
use serde_json::Value;

use super::common::{Outcome, Problem, encode};
use super::index::Case;

/// Runs a case under several ways to split it, with and without NaN in the slots that no sequence addresses.
///
/// False if the case's queries are not exact in `dtype`, so that its numbers are not this run's.
pub(crate) fn check<B: Backend>(backend: &B, dtype: DType, case: &Case) -> Result<bool, String> {
    let mut problem = problem(dtype, case)?;
    check_stored_inputs(case)?;
    if latentwave::reference::to_f64(dtype, &encode(dtype, &problem.q), 1.0) != problem.q {
        return Ok(false);
    }
    let expected = Expected::new(case)?;
    if let Some(lens) = case.get("row_seq_lens").and_then(super::index::ints) {
        // What a row sees is the crate's rule, not the file's: they must agree.
        let rows = problem.batch() * problem.query_len;
        let seen = |row: usize| {
            let (seq, token) = (row / problem.query_len, row % problem.query_len);
            let len = problem.seq_lens[seq];
            if problem.causal { (len - problem.query_len as i32 + 1 + token as i32).max(0) } else { len }
        };
        if lens != (0..rows).map(seen).collect::<Vec<_>>() {
            return Err(format!("row_seq_lens {lens:?} follow another rule"));
        }
    }

    for policy in [SplitPolicy::Auto, SplitPolicy::MinTokens(16), SplitPolicy::Fixed(1), SplitPolicy::Invariant(16)] {
        problem.policy = policy;
        expected.check(backend, &problem, &format!("{policy:?}"))?;
    }
    if let Some(splits) = case.get("splits").and_then(Value::as_object) {
        for (count, rows) in splits {
            let count = count.parse().map_err(|_| format!("splits: `{count}` is no number"))?;
            problem.policy = SplitPolicy::Fixed(count);
            let outcome = expected.check(backend, &problem, &format!("{count} splits"))?;
            check_splits(case, &problem, count, rows, &outcome)?;
        }
    }

    problem.policy = SplitPolicy::Auto;
    let clean = problem.run(backend).map_err(|error| error.to_string())?;
    problem.poison_unused_slots();
    let poisoned = problem.run(backend).map_err(|error| error.to_string())?;
    if poisoned.bits != clean.bits {
        return Err("the result depends on cache slots that no sequence addresses".to_owned());
    }
    Ok(true)
}

fn problem(dtype: DType, case: &Case) -> Result<Problem, String> {
    let (width, rank) = (case.size("Lk")?, case.size("Lv")?);
    let config = MlaConfig {
        num_heads: case.size("H")?,
        kv_lora_rank: rank,
        qk_rope_head_dim: width - rank,
        page_size: case.size("page_size")?,
        sm_scale: case.number("scale")? as f32,
        softcap: case.number("logit_cap")? as f32,
    };
    let seq_lens = case.ints("seq_lens")?;
    let query_len = case.get("query_len").map_or(Ok(1), |_| case.size("query_len"))?;
    let q_numbers = case.numbers(0)?;
    let multiplier = case.get("q_multiplier").map_or(Ok(1.0), |_| case.number("q_multiplier"))?;
    let rows = seq_lens.len() * query_len * config.num_heads;
    let q = (0..(rows * width) as u64).map(|i| q_numbers.grid(i) * multiplier).collect();

    let elements = (case.size("num_pages")? * config.page_size * width) as u64;
    let (kv_dtype, kv_scale, cache) = match case.get("format").and_then(Value::as_str) {
        None => {
            let numbers = case.numbers(1)?;
            let values: Vec<f64> = (0..elements).map(|i| numbers.grid(i)).collect();
            (dtype, 1.0, encode(dtype, &values))
        }
        Some("e4m3fn") => {
            let numbers = case.numbers(2)?;
            (DType::Fp8E4m3, case.number("k_scale")? as f32, (0..elements).map(|i| numbers.fp8_byte(i)).collect())
        }
        Some(other) => return Err(format!("unknown format `{other}`")),
    };
    Ok(Problem {
        config,
        q_dtype: dtype,
        kv_dtype,
        query_len,
        causal: case.get("causal").and_then(Value::as_bool).unwrap_or(false),
        kv_scale,
        policy: SplitPolicy::Auto,
        q,
        cache,
        block_table: case.ints("block_table")?,
        seq_lens,
        max_seq_len: 0,
    })
}

/// Some cases store their inputs as integers, to check the generator.
fn check_stored_inputs(case: &Case) -> Result<(), String> {
    if case.get("inputs_stored").and_then(Value::as_bool) != Some(true) {
        return Ok(());
    }
    for (name, stream) in [("q_k", 0), ("kv_k", 1)] {
        let numbers = case.numbers(stream)?;
        for (i, stored) in case.array(name)?.into_iter().enumerate() {
            if stored != f64::from(numbers.integer(i as u64)) {
                return Err(format!("{name}[{i}] = {stored}, the generator makes {}", numbers.integer(i as u64)));
            }
        }
    }
    Ok(())
}

struct Expected<'a> {
    case: &'a Case<'a>,
    out: Vec<f64>,
    lse: Vec<f64>,
    heads: Vec<i32>,
}

impl<'a> Expected<'a> {
    fn new(case: &'a Case<'a>) -> Result<Self, String> {
        // Our fp8 kernels dequantise exactly, so the exact arrays are theirs.
        let suffix = if case.get("format").is_some() { "_exact" } else { "" };
        let heads = case.ints("out_heads")?;
        // NaN marks rows without tokens; this crate gives 0 there.
        let out = case.array(&format!("out{suffix}"))?.into_iter().map(|x| if x.is_nan() { 0.0 } else { x }).collect();
        Ok(Self { case, out, lse: case.array(&format!("lse{suffix}"))?, heads })
    }

    fn check<B: Backend>(&self, backend: &B, problem: &Problem, what: &str) -> Result<Outcome, String> {
        let outcome = problem.run(backend).map_err(|error| format!("{what}: {error}"))?;
        let tolerance = self.case.tolerance(problem.q_dtype);
        let rank = problem.config.kv_lora_rank;
        let rows = outcome.out.chunks(problem.config.num_heads * rank);
        let got: Vec<f64> = rows
            .flat_map(|row| {
                self.heads.iter().flat_map(move |&head| row[head as usize * rank..][..rank].iter().copied())
            })
            .collect();
        check_close(&format!("{what}: out"), &got, &self.out, &tolerance)?;
        check_close(&format!("{what}: LSE"), &outcome.lse, &self.lse, &tolerance)?;
        Ok(outcome)
    }
}

/// Ranges of the splits, and the LSE that stage 1 left in each split's slot.
fn check_splits(case: &Case, problem: &Problem, count: usize, rows: &Value, outcome: &Outcome) -> Result<(), String> {
    let heads = problem.config.num_heads;
    let rows = rows.as_array().ok_or("splits: no list of rows")?;
    if rows.len() != problem.batch() {
        return Err(format!("splits: {} rows for {} sequences", rows.len(), problem.batch()));
    }
    for (seq, row) in rows.iter().enumerate() {
        let list = |key: &str| row.get(key).and_then(Value::as_array);
        let ranges = list("ranges").ok_or("splits: no ranges")?;
        if ranges.len() != count {
            return Err(format!("splits: {} ranges where {count} are named", ranges.len()));
        }
        for (split, range) in ranges.iter().enumerate() {
            let len = problem.seq_lens[seq];
            let step = (len as usize).div_ceil(count) as i32;
            let (begin, end) = ((step * split as i32).min(len), (step * (split as i32 + 1)).min(len));
            let ours = (begin < end).then(|| vec![begin, end]);
            if super::index::ints(range) != ours {
                return Err(format!("splits: sequence {seq} split {split} is {range}, ours {ours:?}"));
            }
            let Some(lse) = list("lse_first4_heads").and_then(|lse| lse[split].as_array()) else { continue };
            let want: Vec<f64> = lse.iter().filter_map(Value::as_f64).collect();
            // A single split is written to the output, there are no slots.
            let (from, at) = if count == 1 { (&outcome.lse, seq) } else { (&outcome.partial_lse, seq * count + split) };
            let got = &from[at * heads..][..want.len()];
            let what = format!("sequence {seq} split {split} of {count}: LSE");
            check_close(&what, got, &want, &case.tolerance(problem.q_dtype))?;
        }
    }
    Ok(())
}
