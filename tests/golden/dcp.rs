//! Decode context parallelism: each rank attends its own tokens, then the ranks' results are combined.

use latentwave::ops::{DcpCombine, dcp_combine};
use latentwave::testing::{check_close, poisoned};
use latentwave::{Backend, DType, MlaConfig, SplitPolicy, Stream, Tensor};

use super::common::{Problem, encode, tensor, values};
use super::index::Case;

const PAGE_SIZE: usize = 4;

pub(crate) fn check<B: Backend>(backend: &B, dtype: DType, case: &Case) -> Result<bool, String> {
    let (heads, width, rank) = (case.size("H")?, case.size("Lk")?, case.size("Lv")?);
    let (ranks, interleave) = (case.size("ranks")?, case.size("interleave")?);
    let seq_lens = case.ints("seq_lens")?;
    let (batch, tolerance) = (seq_lens.len(), case.tolerance(dtype));
    let out_heads = case.ints("out_heads")?;
    let max_len = seq_lens.iter().copied().max().unwrap_or(0) as usize;
    let q_numbers = case.numbers(0)?;
    let kv_numbers = case.numbers(1)?;
    let q: Vec<f64> = (0..(batch * heads * width) as u64).map(|i| q_numbers.grid(i)).collect();
    let want_local = case.array("local_seq_lens")?;
    let [want_out, want_lse] = [case.array("partial_out")?, case.array("partial_lse")?];

    let (mut partial_out, mut partial_lse) = (Vec::new(), Vec::new());
    for r in 0..ranks {
        // Token j belongs to rank floor(j / interleave) mod ranks.
        let tokens = |seq: usize| {
            (0..seq_lens[seq] as usize).filter(move |j| j / interleave % ranks == r).collect::<Vec<usize>>()
        };
        let local: Vec<i32> = (0..batch).map(|seq| tokens(seq).len() as i32).collect();
        let lens_of_rank = &want_local[r * batch..][..batch];
        if local.iter().map(|&x| f64::from(x)).ne(lens_of_rank.iter().copied()) {
            return Err(format!("rank {r} has local lengths {local:?}, expected {lens_of_rank:?}"));
        }
        let config = MlaConfig {
            num_heads: heads,
            kv_lora_rank: rank,
            qk_rope_head_dim: width - rank,
            page_size: PAGE_SIZE,
            sm_scale: case.number("scale")? as f32,
            softcap: 0.0,
        };
        let pages = max_len.div_ceil(PAGE_SIZE);
        let mut kv = vec![f64::NAN; batch * pages * PAGE_SIZE * width];
        for seq in 0..batch {
            for (slot, j) in tokens(seq).into_iter().enumerate() {
                let row = &mut kv[(seq * pages * PAGE_SIZE + slot) * width..][..width];
                for (d, x) in row.iter_mut().enumerate() {
                    *x = kv_numbers.grid(((seq * max_len + j) * width + d) as u64);
                }
            }
        }
        let problem = Problem {
            config,
            q_dtype: dtype,
            kv_dtype: dtype,
            query_len: 1,
            causal: false,
            kv_scale: 1.0,
            policy: SplitPolicy::Auto,
            q: q.clone(),
            cache: encode(dtype, &kv),
            block_table: (0..(batch * pages) as i32).collect(),
            seq_lens: local,
            max_seq_len: 0,
        };
        let outcome = problem.run(backend).map_err(|error| error.to_string())?;
        partial_out.extend(outcome.out);
        partial_lse.extend(outcome.lse);
    }
    let chosen = |out: &[f64]| -> Vec<f64> {
        let rows = out.chunks(heads * rank);
        rows.flat_map(|row| out_heads.iter().flat_map(move |&h| row[h as usize * rank..][..rank].to_vec())).collect()
    };
    let zero_for_empty = |x: Vec<f64>| x.into_iter().map(|x| if x.is_nan() { 0.0 } else { x }).collect::<Vec<_>>();
    check_close("partial out", &chosen(&partial_out), &zero_for_empty(want_out), &tolerance)?;
    check_close("partial LSE", &partial_lse, &want_lse, &tolerance)?;

    let stream = Stream::new(backend).map_err(|error| error.to_string())?;
    for natural_log in [true, false] {
        let base = if natural_log { 1.0 } else { std::f64::consts::LN_2 };
        let lse: Vec<f32> = partial_lse.iter().map(|&x| (x / base) as f32).collect();
        // An empty shard's output may hold anything.
        let mut outs = partial_out.clone();
        for (row, lse) in outs.chunks_mut(rank).zip(&lse) {
            if *lse == f32::NEG_INFINITY {
                row.fill(f64::NAN);
            }
        }
        let outs = tensor(backend, [ranks, batch, heads, rank], dtype, &encode(dtype, &outs));
        let run = || -> latentwave::Result<_> {
            let lse = Tensor::from_slice(backend, [ranks, batch, heads], &lse)?;
            let mut out = poisoned(backend, [batch, heads, rank], dtype)?;
            let mut out_lse = poisoned(backend, [batch, heads], DType::F32)?;
            let combine = DcpCombine { partial_out: &outs, partial_lse: &lse, natural_log };
            dcp_combine(&stream, &combine, &mut out, Some(&mut out_lse))?;
            stream.synchronize()?;
            Ok((values(backend, &out), values(backend, &out_lse)))
        };
        let (out, lse) = run().map_err(|error| error.to_string())?;
        let lse: Vec<f64> = lse.into_iter().map(|x| x * base).collect();
        let what = if natural_log { "natural log" } else { "base 2" };
        check_close(
            &format!("merged out, {what}"),
            &chosen(&out),
            &zero_for_empty(case.array("merged_out")?),
            &tolerance,
        )?;
        check_close(&format!("merged LSE, {what}"), &lse, &case.array("merged_lse")?, &tolerance)?;
    }
    Ok(true)
}
