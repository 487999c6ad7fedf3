//! Reports about numbers, masks, caches and scales. Each check is generic over backends; the tests are made at the end.

use latentwave::ops::{CacheWrite, DcpCombine, MergeStates, dcp_combine, gather_cache, merge_states, write_cache};
use latentwave::reference::to_f64;
use latentwave::testing::{SplitMix64, Tolerance, check_close, device_or_report, poisoned};
use latentwave::{
    Backend, DType, DecodeArgs, Error, GraphBackend, KvCache, MlaConfig, MlaDecode, SplitPolicy, Stream, Tensor,
    Workspace,
};

use crate::common::step::{Step, replay};
use crate::common::{Problem, bytes, encode, tensor, values};

fn layer(num_heads: usize, page_size: usize) -> MlaConfig {
    MlaConfig::deepseek(num_heads, page_size)
}

/// The problem's rows `tokens` of the sequences `seqs`, over the same pages, planned alike.
fn part(problem: &Problem, seqs: std::ops::Range<usize>) -> Problem {
    let row = problem.query_len * problem.config.num_heads * problem.config.head_dim();
    let width = problem.table_width();
    Problem {
        q: problem.q[seqs.start * row..seqs.end * row].to_vec(),
        block_table: problem.block_table[seqs.start * width..seqs.end * width].to_vec(),
        seq_lens: problem.seq_lens[seqs].to_vec(),
        max_seq_len: problem.longest(),
        ..problem.clone()
    }
}

/// The bits of outputs and LSE of one row (sequence, token) of an outcome, over all heads.
fn row_bits(problem: &Problem, bits: &[u8], row: usize) -> Vec<u8> {
    let rows = problem.batch() * problem.query_len;
    let out = problem.config.num_heads * problem.config.kv_lora_rank * problem.q_dtype.size();
    let lse = problem.config.num_heads * 4;
    [&bits[row * out..][..out], &bits[rows * out + row * lse..][..lse]].concat()
}

/// 1 (vLLM 57017, 57094): a padding row of length 0 became 0/0 and spread through the batch.
fn a_padding_row_leaks_nothing<B: Backend>(backend: &B, dtype: DType) {
    for kv_dtype in [dtype, DType::Fp8E4m3] {
        for policy in [SplitPolicy::Auto, SplitPolicy::Fixed(4), SplitPolicy::Invariant(64)] {
            let mut padded = Problem::random(101, layer(16, 16), (dtype, kv_dtype), 1, &[17, 5, 9, 0]);
            padded.policy = policy;
            let outcome = padded.check(backend, &format!("{kv_dtype} {policy:?}"));
            assert!(outcome.out.iter().all(|x| x.is_finite()));
            assert!(outcome.lse[3 * 16..].iter().all(|&x| x == f64::NEG_INFINITY));
            let alone = part(&padded, 0..3);
            let real = alone.check(backend, "unpadded");
            for row in 0..3 {
                assert!(row_bits(&padded, &outcome.bits, row) == row_bits(&alone, &real.bits, row), "{policy:?} {row}");
            }
        }
    }
}

/// 3 (vLLM 37442): rows that a kernel skips kept an older step's NaN, and NaN in unwritten slots leaked.
fn stale_nan_does_not_survive<B: GraphBackend>(backend: &B, dtype: DType) {
    let mut problem = Problem::random(103, layer(8, 16), (dtype, dtype), 2, &[0, 1, 33, 0]);
    problem.poison_unused_slots();
    // `check` fills outputs and scratch with NaN first.
    let eager = problem.check(backend, "eager");
    assert!(eager.out.iter().all(|x| x.is_finite()));
    let mut step = Step::new(backend, &problem);
    let stream = Stream::new(backend).unwrap();
    let graph = step.capture(&stream, true);
    for _ in 0..2 {
        step.load(backend, &problem);
        replay(&stream, &graph);
        assert!(step.bits(backend) == eager.bits);
    }
}

/// 5 (vLLM 51065): a verification block that reaches decode unflattened must not read past the tables.
fn rows_that_are_no_multiple_of_requests_are_refused<B: Backend>(backend: &B, dtype: DType) {
    let (batch, query_len, config) = (2, 4, layer(2, 16));
    let decode = MlaDecode::new(backend, config, dtype, dtype).unwrap();
    let plan = decode.plan(batch, query_len, 32, SplitPolicy::Auto).unwrap();
    let stream = Stream::new(backend).unwrap();
    let kv_cache = KvCache::zeros(backend, 4, &config, dtype).unwrap();
    let table = Tensor::from_slice(backend, [batch, 2], &[0, 1, 2, 3]).unwrap();
    let seq_lens = Tensor::from_slice(backend, [batch], &[20, 9]).unwrap();
    for rows in [7, 9, 4, 16] {
        let q = Tensor::zeros(backend, [rows, 2, 576], dtype).unwrap();
        let mut out = poisoned(backend, [rows, 2, 512], dtype).unwrap();
        let args = DecodeArgs {
            q: &q,
            kv_cache: &kv_cache,
            block_table: &table,
            seq_lens: &seq_lens,
            out: &mut out,
            lse: None,
            kv_scale: 1.0,
            causal: true,
        };
        let refused = decode.run(&stream, &plan, &mut Workspace::new(backend, 1).unwrap(), args);
        assert!(matches!(refused, Err(Error::Shape { arg: "q", .. })), "{rows} rows: {refused:?}");
    }
    // And 4 rows per request, each with an extent of its own, against float64.
    Problem::random(105, config, (dtype, dtype), query_len, &[20, 9, 2]).check(backend, "4 rows per request");
}

/// Ranks' results, natural log, of one random problem, and what they must combine to.
fn shards(seed: u64) -> (Vec<f64>, Vec<f64>) {
    let numbers = SplitMix64::new(seed);
    let out = (0..2 * 3 * 2 * 8).map(|i| numbers.grid(i)).collect();
    let lse = (0..2 * 3 * 2).map(|i| numbers.grid(1000 + i) * 3.0).collect();
    (out, lse)
}

/// 8 (vLLM 47079): base-2 LSE read as natural logarithms diverges silently. The flag is a field without a default, and says so.
fn the_base_of_the_lse_is_the_callers_to_say<B: Backend>(backend: &B, dtype: DType) {
    let (outs, lse) = shards(108);
    let partial_out = tensor(backend, [2, 3, 2, 8], dtype, &encode(dtype, &outs));
    let stream = Stream::new(backend).unwrap();
    let combine = |lse: &[f64], natural_log| {
        let partial_lse = tensor(backend, [2, 3, 2], DType::F32, &encode(DType::F32, lse));
        let mut out = poisoned(backend, [3, 2, 8], dtype).unwrap();
        let inputs = DcpCombine { partial_out: &partial_out, partial_lse: &partial_lse, natural_log };
        dcp_combine(&stream, &inputs, &mut out, None).unwrap();
        stream.synchronize().unwrap();
        values(backend, &out)
    };
    let base_two: Vec<f64> = lse.iter().map(|x| x / std::f64::consts::LN_2).collect();
    let right = combine(&lse, true);
    check_close("base 2", &combine(&base_two, false), &right, &crate::common::tolerance(dtype)).unwrap();
    let wrong = check_close("misread", &combine(&base_two, true), &right, &Tolerance::abs(0.05));
    assert!(wrong.is_err(), "a misread base must be a visible error, or this test proves nothing");
}

/// Merges one row of 8 columns; outputs given as they are.
fn merged<B: Backend>(backend: &B, dtype: DType, outs: [f64; 2], lse: [f64; 2]) -> (Vec<f64>, f64) {
    let side = |x: f64| tensor(backend, [1, 1, 8], dtype, &encode(dtype, &[x; 8]));
    let sum = |x: f64| tensor(backend, [1, 1], DType::F32, &encode(DType::F32, &[x]));
    let states = MergeStates {
        prefix_out: &side(outs[0]),
        prefix_lse: &sum(lse[0]),
        suffix_out: &side(outs[1]),
        suffix_lse: &sum(lse[1]),
        tokens_with_context: None,
    };
    let stream = Stream::new(backend).unwrap();
    let mut out = poisoned(backend, [1, 1, 8], dtype).unwrap();
    let mut out_lse = poisoned(backend, [1, 1], DType::F32).unwrap();
    merge_states(&stream, &states, &mut out, Some(&mut out_lse)).unwrap();
    stream.synchronize().unwrap();
    (values(backend, &out), values(backend, &out_lse)[0])
}

/// 10 (vLLM 27491, 39148, 28181; flashinfer 4051): merging two empty states gave NaN.
fn two_empty_states_merge_to_an_empty_one<B: Backend>(backend: &B, dtype: DType) {
    for junk in [0.0, 7.0, f64::NAN] {
        let (out, lse) = merged(backend, dtype, [junk, junk], [f64::NEG_INFINITY; 2]);
        assert_eq!((out, lse), (vec![0.0; 8], f64::NEG_INFINITY), "outputs {junk}");
    }
}

/// 11 (vLLM 15492): some kernels say +inf for an empty context.
fn a_positive_infinity_is_an_empty_state<B: Backend>(backend: &B, dtype: DType) {
    for empty in [f64::INFINITY, f64::NEG_INFINITY] {
        assert_eq!(merged(backend, dtype, [f64::NAN, 3.0], [empty, 1.5]), (vec![3.0; 8], 1.5));
        assert_eq!(merged(backend, dtype, [3.0, f64::NAN], [1.5, empty]), (vec![3.0; 8], 1.5));
        assert_eq!(merged(backend, dtype, [3.0, 3.0], [empty, f64::INFINITY]), (vec![0.0; 8], f64::NEG_INFINITY));
    }
}

/// 12 (vLLM 47671; tokenspeed 501; sglang 14224): page number times stride overflowed 32 bits.
fn offsets_past_two_to_the_31<B: Backend>(backend: &B, dtype: DType) {
    const STRIDE: usize = 1 << 31;
    let config = layer(2, 16);
    let mut problem = Problem::random(112, config, (dtype, DType::Fp8E4m3), 1, &[16]);
    problem.block_table = vec![1];
    let want = problem.check(backend, "dense");
    let page_bytes = 16 * config.head_dim();
    let buffer = match backend.alloc(STRIDE + page_bytes, "a sparse cache") {
        Ok(buffer) => buffer,
        // A device that has less memory than that cannot make the mistake either.
        Err(Error::OutOfMemory { .. }) => return,
        Err(error) => panic!("{error}"),
    };
    let strides = [STRIDE, config.head_dim(), 1];
    // SAFETY: the buffer reaches to the end of page 1 and outlives the tensor.
    let cache = unsafe {
        Tensor::<B>::from_raw(backend.addr(&buffer), DType::Fp8E4m3, &[2, 16, config.head_dim()], &strides).unwrap()
    };
    cache.narrow(0, 1..2).unwrap().write_bytes(backend, &problem.cache[page_bytes..2 * page_bytes]).unwrap();
    let kv_cache = KvCache::joined(&cache, &config).unwrap();

    let decode = MlaDecode::new(backend, config, dtype, DType::Fp8E4m3).unwrap();
    let plan = decode.plan(1, 1, 16, SplitPolicy::Auto).unwrap();
    let q = tensor(backend, [1, 2, config.head_dim()], dtype, &encode(dtype, &problem.q));
    let table = Tensor::from_slice(backend, [1, 1], &[1]).unwrap();
    let seq_lens = Tensor::from_slice(backend, [1], &[16]).unwrap();
    let mut out = poisoned(backend, [1, 2, config.kv_lora_rank], dtype).unwrap();
    let mut lse = poisoned(backend, [1, 2], DType::F32).unwrap();
    let stream = Stream::new(backend).unwrap();
    let args = DecodeArgs {
        q: &q,
        kv_cache: &kv_cache,
        block_table: &table,
        seq_lens: &seq_lens,
        out: &mut out,
        lse: Some(&mut lse),
        kv_scale: 1.0,
        causal: false,
    };
    decode.run(&stream, &plan, &mut Workspace::new(backend, 1).unwrap(), args).unwrap();
    stream.synchronize().unwrap();
    assert!([bytes(backend, &out), bytes(backend, &lse)].concat() == want.bits);

    // The writer and the reader reach the same page.
    let kv_c = Tensor::zeros(backend, [1, config.kv_lora_rank], dtype).unwrap();
    let k_pe = Tensor::zeros(backend, [1, config.qk_rope_head_dim], dtype).unwrap();
    let slot_mapping = Tensor::from_slice(backend, [1], &[16_i64 + 3]).unwrap();
    let write = CacheWrite { kv_c: &kv_c, k_pe: Some(&k_pe), slot_mapping: &slot_mapping, kv_scale: 1.0 };
    write_cache(&stream, &kv_cache, &write).unwrap();
    let cu_seq_lens = Tensor::from_slice(backend, [2], &[0, 16]).unwrap();
    let mut rows = poisoned(backend, [16, config.head_dim()], DType::F32).unwrap();
    gather_cache(&stream, &kv_cache, &table, &cu_seq_lens, None, 1.0, &mut rows).unwrap();
    stream.synchronize().unwrap();
    let mut expected = to_f64(DType::Fp8E4m3, &problem.cache[page_bytes..2 * page_bytes], 1.0);
    expected[3 * config.head_dim()..4 * config.head_dim()].fill(0.0);
    assert_eq!(values(backend, &rows), expected);
    // Only now may the memory go.
    drop(buffer);
}

/// 14 (flashinfer 3219) and 15 (sglang 25556): scattered pages gave zeros; a page size of 64 was read in the wrong unit.
fn page_order_and_page_size_do_not_matter<B: Backend>(backend: &B, dtype: DType) {
    let fine = Problem::random(114, layer(8, 1), (dtype, dtype), 1, &[150, 64, 1]);
    let want = fine.check(backend, "page size 1, scattered");
    let row_bytes = fine.row_bytes();
    for page_size in [16, 64] {
        let mut coarse = Problem::random(115, layer(8, page_size), (dtype, dtype), 1, &fine.seq_lens);
        coarse.q = fine.q.clone();
        for (seq, &len) in fine.seq_lens.iter().enumerate() {
            for j in 0..len as usize {
                let from = fine.block_table[seq * fine.table_width() + j] as usize;
                let page = coarse.block_table[seq * coarse.table_width() + j / page_size] as usize;
                let to = page * page_size + j % page_size;
                let row = &fine.cache[from * row_bytes..][..row_bytes];
                coarse.cache[to * row_bytes..][..row_bytes].copy_from_slice(row);
            }
        }
        let got = coarse.check(backend, &format!("page size {page_size}"));
        check_close("page size", &got.out, &want.out, &crate::common::tolerance(dtype)).unwrap();
    }
}

/// 28 (vLLM 47188): a split that no block writes was merged from uninitialised scratch.
fn empty_splits_are_not_merged<B: Backend>(backend: &B, dtype: DType) {
    for splits in [2, 16, 64] {
        let mut problem = Problem::random(128, layer(4, 16), (dtype, dtype), 1, &[1, 5, 17, 0]);
        // `check` fills the scratch with NaN first.
        problem.policy = SplitPolicy::Fixed(splits);
        problem.check(backend, &format!("{splits} splits"));
    }
}

/// 29 (aiter 4364, 4378; FlashMLA 212; tokenspeed 904): a row's result depended on its batch through the split count.
///
/// The claim is made for decode alone (31, vLLM 28832: a backend was listed as invariant whose prefill and decode differ).
fn invariant_rows_do_not_depend_on_their_batch<B: Backend>(backend: &B, dtype: DType) {
    for split_tokens in [32, 64, 512] {
        let lens: Vec<i32> = (0..33).map(|i| [700, 64, 1, 65, 31, 0, 128][i % 7] + i as i32).collect();
        let mut batch = Problem::random(129, layer(5, 16), (dtype, dtype), 1, &lens);
        batch.policy = SplitPolicy::Invariant(split_tokens);
        batch.max_seq_len = 1024;
        let all = batch.check(backend, "a batch of 33");
        for seq in [0, 2, 7, 32] {
            let alone = part(&batch, seq..seq + 1);
            let outcome = alone.run(backend).unwrap();
            assert!(row_bits(&alone, &outcome.bits, 0) == row_bits(&batch, &all.bits, seq), "{split_tokens}: {seq}");
        }

        // A verification block of four tokens against each of its rows as a decode of its own.
        let mut verify = Problem::random(130, layer(5, 16), (dtype, dtype), 4, &[67, 3, 700]);
        verify.policy = SplitPolicy::Invariant(split_tokens);
        verify.max_seq_len = 1024;
        let all = verify.check(backend, "a verification block");
        let row = verify.config.num_heads * verify.config.head_dim();
        for seq in 0..3 {
            for token in 0..4 {
                let mut alone = part(&verify, seq..seq + 1);
                alone.q = alone.q[token * row..(token + 1) * row].to_vec();
                alone.query_len = 1;
                alone.seq_lens = vec![(verify.seq_lens[seq] - 3 + token as i32).max(0)];
                alone.max_seq_len = 1024;
                let outcome = alone.run(backend).unwrap();
                let (alone, among) =
                    (row_bits(&alone, &outcome.bits, 0), row_bits(&verify, &all.bits, seq * 4 + token));
                assert!(alone == among, "{split_tokens}: sequence {seq} token {token}");
            }
        }
    }
}

/// 33 (sglang 18396): a scale applied to a 16-bit cache made scores 16 times too small.
fn a_scale_for_an_unquantised_cache_is_refused<B: Backend>(backend: &B, dtype: DType) {
    let mut problem = Problem::random(133, layer(2, 16), (dtype, dtype), 1, &[20]);
    problem.kv_scale = 1.0 / 16.0;
    assert!(matches!(problem.run(backend), Err(Error::Argument { arg: "kv_scale", .. })));
    problem.kv_scale = f32::NAN;
    assert!(matches!(problem.run(backend), Err(Error::Argument { arg: "kv_scale", .. })));
    let kv_cache = problem.kv_cache(backend).unwrap();
    let kv_c = Tensor::zeros(backend, [1, 512], dtype).unwrap();
    let k_pe = Tensor::zeros(backend, [1, 64], dtype).unwrap();
    let slot_mapping = Tensor::from_slice(backend, [1], &[0_i64]).unwrap();
    let write = CacheWrite { kv_c: &kv_c, k_pe: Some(&k_pe), slot_mapping: &slot_mapping, kv_scale: 2.0 };
    let refused = write_cache(&Stream::new(backend).unwrap(), &kv_cache, &write);
    assert!(matches!(refused, Err(Error::Argument { arg: "kv_scale", .. })));
}

/// Writes random rows of `-2..2` times `magnitude` through the cache writer; returns the problem over them and the rows.
fn written<B: Backend>(backend: &B, dtype: DType, kv_dtype: DType, scale: f32, magnitude: f64) -> (Problem, Vec<f64>) {
    let config = layer(4, 16);
    let (tokens, width) = (40, config.head_dim());
    let mut problem = Problem::random(134, config, (dtype, DType::F32), 1, &[tokens as i32]);
    let mut rows = Vec::new();
    let mut slots = Vec::new();
    for j in 0..tokens {
        let slot = problem.block_table[j / 16] as usize * 16 + j % 16;
        let row = to_f64(DType::F32, &problem.cache[slot * width * 4..][..width * 4], 1.0);
        // Tiles of very different magnitudes, as latents have.
        rows.extend(row.iter().enumerate().map(|(d, x)| x * magnitude * 4_f64.powi((d / 128) as i32 % 4)));
        slots.push(slot as i64);
    }
    let rows = to_f64(dtype, &encode(dtype, &rows), 1.0);
    (problem.kv_dtype, problem.kv_scale) = (kv_dtype, scale);
    let row_bytes = problem.row_bytes();
    problem.cache = vec![0xFF; problem.cache.len() / (width * 4) * row_bytes];
    let kv_cache = problem.kv_cache(backend).unwrap();
    let column = |range: std::ops::Range<usize>| -> Vec<u8> {
        let part: Vec<f64> = rows.chunks(width).flat_map(|row| row[range.clone()].to_vec()).collect();
        encode(dtype, &part)
    };
    let kv_c = tensor(backend, [tokens, 512], dtype, &column(0..512));
    let k_pe = tensor(backend, [tokens, 64], dtype, &column(512..576));
    let slot_mapping = Tensor::from_slice(backend, [tokens], &slots).unwrap();
    let stream = Stream::new(backend).unwrap();
    let write = CacheWrite { kv_c: &kv_c, k_pe: Some(&k_pe), slot_mapping: &slot_mapping, kv_scale: scale };
    write_cache(&stream, &kv_cache, &write).unwrap();
    stream.synchronize().unwrap();
    problem.cache = match kv_dtype {
        DType::U8 => bytes(backend, kv_cache.latent()),
        // The views of a joined cache have gaps; read the rows through their whole tensor.
        _ => {
            let shape = [problem.num_pages(), 16, width];
            let strides = [16 * width, width, 1];
            // SAFETY: the latent view begins where the whole tensor does, and `kv_cache` keeps it.
            let whole = unsafe { Tensor::<B>::from_raw(kv_cache.latent().addr(), kv_dtype, &shape, &strides).unwrap() };
            bytes(backend, &whole)
        }
    };
    (problem, rows)
}

/// 34 (TensorRT-LLM 16916): scales of an fp8 cache were not passed at decode.
fn fp8_scales_round_trip_through_writer_and_decode<B: Backend>(backend: &B, dtype: DType) {
    for scale in [1.0, 4.0, 1.0 / 64.0] {
        let (problem, rows) = written(backend, dtype, DType::Fp8E4m3, scale, 1.0 / 64.0);
        let outcome = problem.check(backend, &format!("scale {scale}"));
        // Not only what the bytes say, but what was put in: within e4m3's three bits.
        let exact = Problem {
            kv_dtype: DType::F32,
            kv_scale: 1.0,
            block_table: (0..40_i32.div_euclid(16) + 1).collect(),
            cache: encode(DType::F32, &[rows, vec![0.0; 8 * 576]].concat()),
            ..problem
        };
        let (out, _) = exact.reference();
        let near = Tolerance { abs: 0.05, rel: 0.1, frobenius: 0.08 };
        check_close(&format!("scale {scale} against the rows"), &outcome.out, &out, &near).unwrap();
    }
}

/// 35 (vllm-xpu-kernels 475): the writer multiplied by the scale instead of dividing, and did not clamp.
fn the_writer_divides_and_clamps<B: Backend>(backend: &B, dtype: DType) {
    let config = MlaConfig { kv_lora_rank: 8, qk_rope_head_dim: 0, ..layer(1, 2) };
    for (kv_dtype, one, largest, max) in [(DType::Fp8E4m3, 0x38, 0x7E, 448.0), (DType::Fp8E4m3Fnuz, 0x40, 0x7F, 240.0)]
    {
        let scale = 0.25;
        let x = [scale, -scale, max * scale, max * scale * 2.0, -max * scale * 100.0, 0.0, scale / 2.0, scale * 2.0];
        let want = [one, one | 0x80, largest, largest, largest | 0x80, 0, one - 8, one + 8];
        let cache = poisoned(backend, [1, 2, 8], kv_dtype).unwrap();
        let kv_cache = KvCache::joined(&cache, &config).unwrap();
        let kv_c = tensor(backend, [1, 8], dtype, &encode(dtype, &x));
        let slot_mapping = Tensor::from_slice(backend, [1], &[1_i64]).unwrap();
        let write = CacheWrite { kv_c: &kv_c, k_pe: None, slot_mapping: &slot_mapping, kv_scale: scale as f32 };
        let stream = Stream::new(backend).unwrap();
        write_cache(&stream, &kv_cache, &write).unwrap();
        stream.synchronize().unwrap();
        assert_eq!(bytes(backend, &cache), [[0xFF; 8], want].concat(), "{kv_dtype}");
    }
}

/// 36 (vLLM 49435): writer and reader of `fp8_ds_mla` disagreed on scales that are no powers of two.
fn ds_mla_rows_are_read_as_they_are_written<B: Backend>(backend: &B, dtype: DType) {
    if matches!(MlaDecode::new(backend, layer(4, 16), dtype, DType::U8), Err(Error::Unsupported { .. })) {
        return;
    }
    let (problem, rows) = written(backend, dtype, DType::U8, 1.0, 1.0 / 16.0);
    problem.check(backend, "656-byte rows");
    for (j, row) in rows.chunks(576).enumerate() {
        let slot = problem.block_table[j / 16] as usize * 16 + j % 16;
        let entry = &problem.cache[slot * 656..][..656];
        for (tile, scale) in to_f64(DType::F32, &entry[512..528], 1.0).into_iter().enumerate() {
            let amax = row[tile * 128..(tile + 1) * 128].iter().fold(0.0_f64, |amax, x| amax.max(x.abs()));
            assert_eq!(scale, (amax / 448.0).max(1e-4).log2().ceil().exp2(), "token {j} tile {tile}");
        }
        let near = Tolerance { abs: 1e-4, rel: 0.07, frobenius: 0.05 };
        check_close("row", &latentwave::reference::ds_mla_to_f64(entry), row, &near).unwrap();
    }
}

/// 37 (vLLM 40705): Mistral-Small-4 (256 + 64) failed: the value tile was wrong when rows are wider than the rank.
fn rows_wider_than_their_rank<B: Backend>(backend: &B, dtype: DType) {
    for (kv_lora_rank, qk_rope_head_dim) in [(256, 64), (256, 32), (512, 0)] {
        let config = MlaConfig { kv_lora_rank, qk_rope_head_dim, sm_scale: 0.088, ..layer(8, 16) };
        Problem::random(137, config, (dtype, dtype), 1, &[1, 16, 75]).check(backend, &format!("{config:?}"));
    }
}

/// 39 (vLLM 56578): a soft cap by exponentials overflowed above 88 times the cap.
fn a_soft_cap_does_not_overflow<B: Backend>(backend: &B, dtype: DType) {
    for sign in [1.0, -1.0] {
        let config = MlaConfig { softcap: 50.0, sm_scale: sign * 1e4 / 576.0, ..layer(2, 16) };
        let mut problem = Problem::random(139, config, (dtype, dtype), 1, &[1]);
        // One token, all elements 1: the logit is 1e4, and the LSE is the capped logit.
        problem.q.fill(1.0);
        problem.cache = encode(dtype, &vec![1.0; problem.cache.len() / dtype.size()]);
        let outcome = problem.check(backend, "one token");
        assert!(outcome.lse.iter().all(|x| (x - f64::from(sign) * 50.0).abs() < 1e-4), "{:?}", outcome.lse);
    }
    let config = MlaConfig { softcap: 50.0, sm_scale: 1e4, ..layer(4, 16) };
    let outcome = Problem::random(140, config, (dtype, dtype), 1, &[40, 7]).run(backend).unwrap();
    assert!(outcome.out.iter().chain(&outcome.lse).all(|x| x.is_finite()));
}

/// 43 (candle 3733, 3669; candle_graphs 2): a captured graph kept a position of the host's.
fn a_graph_follows_the_lengths_on_the_device<B: GraphBackend>(backend: &B, dtype: DType) {
    let mut problem = Problem::random(143, layer(4, 16), (dtype, dtype), 1, &[90, 90]);
    let mut step = Step::new(backend, &problem);
    let stream = Stream::new(backend).unwrap();
    let graph = step.capture(&stream, false);
    problem.max_seq_len = 90;
    for lens in [[90, 90], [1, 89], [16, 0], [17, 33]] {
        problem.seq_lens = lens.to_vec();
        let table_width = problem.table_width();
        problem.block_table.rotate_left(table_width);
        let want = problem.check(backend, "eager");
        step.load(backend, &problem);
        replay(&stream, &graph);
        assert!(step.bits(backend) == want.bits, "{lens:?}");
    }
}

/// Makes one test per report for a device.
macro_rules! reports {
    ($name:ident, $device:expr, $dtypes:expr) => {
        reports!(@each $name, $device, $dtypes,
            report_01_padding_row = a_padding_row_leaks_nothing,
            report_03_stale_nan = stale_nan_does_not_survive,
            report_05_unflattened_rows = rows_that_are_no_multiple_of_requests_are_refused,
            report_08_base_of_the_lse = the_base_of_the_lse_is_the_callers_to_say,
            report_10_two_empty_states = two_empty_states_merge_to_an_empty_one,
            report_11_positive_infinity = a_positive_infinity_is_an_empty_state,
            report_12_offsets_of_64_bits = offsets_past_two_to_the_31,
            report_14_15_pages = page_order_and_page_size_do_not_matter,
            report_28_empty_splits = empty_splits_are_not_merged,
            report_29_31_invariant_rows = invariant_rows_do_not_depend_on_their_batch,
            report_33_scale_of_16_bits = a_scale_for_an_unquantised_cache_is_refused,
            report_34_scales_round_trip = fp8_scales_round_trip_through_writer_and_decode,
            report_35_writer = the_writer_divides_and_clamps,
            report_36_ds_mla = ds_mla_rows_are_read_as_they_are_written,
            report_37_width_320 = rows_wider_than_their_rank,
            report_39_soft_cap = a_soft_cap_does_not_overflow,
            report_43_graph_lengths = a_graph_follows_the_lengths_on_the_device,
        );
    };
    (@each $name:ident, $device:expr, $dtypes:expr, $($report:ident = $check:ident),* $(,)?) => {
        mod $name {
            use super::*;
            $(#[test]
            fn $report() {
                let Some(device) = device_or_report(stringify!($report), $device) else { return };
                for dtype in $dtypes {
                    $check(&device, dtype);
                }
            })*
        }
    };
}

reports!(host, latentwave::Result::Ok(latentwave::Host::new()), [DType::F32, DType::BF16]);
#[cfg(feature = "cuda")]
reports!(cuda, latentwave::Cuda::new(0), [DType::BF16]);
#[cfg(feature = "rocm")]
reports!(rocm, latentwave::Rocm::new(0), [DType::BF16]);
