//! Attention against float64 over random, poisoned inputs.

use latentwave::kernel::params::{DecodeParams, ScheduleKind};
use latentwave::kernel::{Launch, Params};
use latentwave::plan::{BalanceShape, LENGTH_WORD, PART_WORDS, balance, parts_offset};
use latentwave::reference::{Attended, merge};
use latentwave::testing::{SplitMix64, Tolerance, check_close, poisoned};
use latentwave::{
    Backend, DType, DecodeArgs, Error, KvCache, MlaConfig, MlaDecode, SplitPolicy, Stream, Tensor, Workspace,
};

use crate::common::{Problem, bytes, encode, lse_tolerance, tensor, tolerance, values};

pub(crate) const POLICIES: [SplitPolicy; 7] = [
    SplitPolicy::Auto,
    SplitPolicy::MinTokens(16),
    SplitPolicy::Fixed(1),
    SplitPolicy::Fixed(3),
    SplitPolicy::Fixed(64),
    SplitPolicy::Invariant(24),
    SplitPolicy::Invariant(512),
];

/// The widths that every backend serves.
pub(crate) fn layer(num_heads: usize, page_size: usize) -> MlaConfig {
    MlaConfig::deepseek(num_heads, page_size)
}

/// Word for word what `plan::balance` writes, for batches of every kind of lengths: of no work where another kernel does it all.
pub(crate) fn the_plan_kernel_writes_the_balanced_schedule<B: Backend>(backend: &B, dtype: DType) {
    let numbers = SplitMix64::new(31);
    let stream = Stream::new(backend).unwrap();
    let table_width = 512;
    for round in 0..46_u64 {
        let few = round >= 40;
        let heads = if few { 40 } else { [8, 64, 128][round as usize % 3] };
        let decode = MlaDecode::new(backend, layer(heads, 64), dtype, dtype).unwrap();
        let batch = match round % 5 {
            _ if few => 1 + round as usize % 2,
            0 => 1 + numbers.below(round, 700) as usize,
            _ => 1 + numbers.below(round, 70) as usize,
        };
        let query_len = 1 + numbers.below(1000 + round, 4) as usize;
        let longest = [30_000, 5_000, 300, 64][round as usize % 4];
        let policy = if few { SplitPolicy::Auto } else { SplitPolicy::MinTokens(64) };
        let plan = decode.plan(batch, query_len, 131_072, policy).unwrap();
        let most = plan.kernels().few.map_or(300, |few| few.max_tokens);
        let lens: Vec<i32> = match round % 3 {
            // At the bound, a token above it, and far below.
            kind if few => vec![[most / batch, most / batch + 1, 100][kind as usize] as i32; batch],
            // Equal lengths are cut in a way of their own.
            0 => vec![longest as i32; batch],
            _ => (0..batch as u64).map(|i| numbers.below(10_000 * (round + 1) + i, longest + 1) as i32).collect(),
        };
        let mut workspace = Workspace::new(backend, 1).unwrap();
        let [table, ..] = workspace.views(0, &plan.decode().workspace_views()).unwrap();
        let words = plan.decode().schedule_bytes / 4;
        // SAFETY: the view has this size and lives as long as the workspace.
        let table = unsafe { Tensor::<B>::from_raw(table, DType::I32, &[words], &[1]) }.unwrap();
        table.fill_bytes(backend, 0xFF).unwrap();
        let seq_lens = Tensor::from_slice(backend, [batch], &lens).unwrap();
        let causal = round % 2 == 0;
        decode.schedule(&stream, &plan, &mut workspace, &seq_lens, table_width, causal).unwrap();
        stream.synchronize().unwrap();

        let (groups, group) = (plan.decode().num_groups, plan.decode().query_group);
        let tile = plan.kernels().split.tile_tokens as usize;
        let tiles: Vec<i32> = (0..batch * groups)
            .map(|v| {
                let last = ((v % groups + 1) * group).min(query_len);
                let len = lens[v / groups] as usize;
                let extent = if causal { (len + last).saturating_sub(query_len) } else { len };
                extent.div_ceil(tile) as i32
            })
            .collect();
        let elsewhere = plan.kernels().few.is_some_and(|few| lens.iter().sum::<i32>() as usize <= few.max_tokens);
        let tiles = if elsewhere { vec![0; tiles.len()] } else { tiles };
        let mut want = vec![-1; words];
        let shape = BalanceShape {
            num_parts: plan.decode().num_parts,
            num_kv_splits: plan.decode().num_kv_splits,
            fixed_cost: i64::from(plan.kernels().fixed_cost),
            merged_pieces: i64::from(plan.decode().merged_pieces),
        };
        balance(&shape, &tiles, &mut want);
        for part in want[parts_offset(tiles.len())..].chunks_mut(PART_WORDS) {
            part[LENGTH_WORD] = if (part[0] as usize) < tiles.len() { lens[part[0] as usize / groups] } else { 0 };
        }
        assert_eq!(table.to_vec::<i32>(backend).unwrap(), want, "round {round}: {batch} x {query_len}, {lens:?}");
    }
}

pub(crate) fn the_split_count_does_not_change_the_answer<B: Backend>(backend: &B, dtype: DType) {
    let mut problem = Problem::random(11, layer(16, 16), (dtype, dtype), 1, &[1, 700, 0, 33, 128, 257]);
    for policy in POLICIES {
        problem.policy = policy;
        problem.check(backend, &format!("{policy:?}"));
    }
    // A plan for far longer sequences than there are.
    problem.max_seq_len = 100_000;
    for policy in [SplitPolicy::Auto, SplitPolicy::Fixed(8), SplitPolicy::Invariant(512)] {
        problem.policy = policy;
        problem.check(backend, &format!("{policy:?} planned for 100000"));
    }
}

/// A batch so small that its sequences are cut finer than others: pieces of one tile, of several, and with ends inside one.
pub(crate) fn few_sequences_of_any_length<B: Backend>(backend: &B, dtype: DType) {
    let batches: [&[i32]; 8] =
        [&[1], &[16], &[17], &[9000], &[1000, 63], &[700, 0, 1, 129], &[64, 300, 65, 0, 33], &[100; 8]];
    for (round, lens) in batches.into_iter().enumerate() {
        let (page_size, seed) = ([16, 64, 24][round % 3], 40 + round as u64);
        let shapes = [(16, 1), (16, 2), (5, 3), (40, 1)];
        for (heads, query_len) in shapes.into_iter().take(if lens[0] > 1000 { 1 } else { 4 }) {
            let mut problem = Problem::random(seed, layer(heads, page_size), (dtype, dtype), query_len, lens);
            problem.poison_unused_slots();
            // In turns planned for the lengths themselves, and for far longer ones.
            problem.max_seq_len = if query_len == 1 { 0 } else { 100_000 };
            problem.check(backend, &format!("{lens:?} of {heads} heads, {query_len} tokens"));
        }
    }
    let mut wide = Problem::random(50, layer(128, 64), (dtype, dtype), 1, &[333]);
    wide.poison_unused_slots();
    wide.check(backend, "one sequence of 128 heads");
}

/// Batches planned for so many tokens that the forms for them are chosen, whatever is there: several tiles of a sequence, ends
/// inside one, and blocks that go on to the next sequence.
pub(crate) fn plans_for_many_tokens<B: Backend>(backend: &B, dtype: DType) {
    let shapes = [(16, 1, 64), (16, 2, 16), (24, 1, 64), (64, 1, 16), (40, 2, 64)];
    for (round, (heads, query_len, page_size)) in shapes.into_iter().enumerate() {
        for cache in [dtype, DType::Fp8E4m3] {
            let lens = [1300, 0, 65, 1, 512, 130];
            let mut problem =
                Problem::random(60 + round as u64, layer(heads, page_size), (dtype, cache), query_len, &lens);
            problem.poison_unused_slots();
            problem.max_seq_len = 100_000;
            problem.check(backend, &format!("{heads} heads, {query_len} tokens, pages of {page_size}, {cache} cache"));
        }
    }
}

/// Where few tokens count, an LSE shows whether their weights were added up before or after they are rounded for the products.
pub(crate) fn lses_of_few_tokens_are_exact<B: Backend>(backend: &B, dtype: DType) {
    for (heads, query_len) in [(64, 1), (40, 2)] {
        let mut problem =
            Problem::random(70, layer(heads, 64), (dtype, DType::Fp8E4m3), query_len, &[1, 2, 3, 4, 5, 6, 7, 8]);
        problem.poison_unused_slots();
        problem.max_seq_len = 100_000;
        let what = format!("{heads} heads, {query_len} tokens");
        let outcome = problem.check(backend, &what);
        check_close(&what, &outcome.lse, &problem.reference().1, &Tolerance::abs(2e-5)).unwrap();
    }
}

pub(crate) fn empty_sequences_are_zero_and_minus_infinity<B: Backend>(backend: &B, dtype: DType) {
    for lens in [&[0][..], &[0, 0, 0], &[17, 5, 9, 0], &[0, 300, 0]] {
        for policy in POLICIES {
            let mut problem = Problem::random(12, layer(4, 16), (dtype, dtype), 1, lens);
            problem.policy = policy;
            let outcome = problem.check(backend, &format!("{lens:?} {policy:?}"));
            for (seq, _) in lens.iter().enumerate().filter(|(_, len)| **len == 0) {
                assert!(outcome.out[seq * 4 * 512..][..4 * 512].iter().all(|&x| x == 0.0), "{lens:?} {policy:?}");
                assert!(outcome.lse[seq * 4..][..4].iter().all(|&x| x == f64::NEG_INFINITY), "{lens:?} {policy:?}");
            }
        }
    }
}

pub(crate) fn what_lies_past_the_end_does_not_matter<B: Backend>(backend: &B, dtype: DType) {
    for (query_len, lens) in [(1, &[5, 64, 131][..]), (3, &[3, 17, 1])] {
        let clean = Problem::random(13, layer(8, 16), (dtype, dtype), query_len, lens);
        let mut dirty = clean.clone();
        dirty.poison_unused_slots();
        let page_size = clean.config.page_size;
        let width = clean.table_width();
        for (table, &len) in dirty.block_table.chunks_mut(width).zip(lens) {
            table[(len as usize).div_ceil(page_size)..].fill(i32::MAX);
        }
        assert!(clean.check(backend, "clean").bits == dirty.check(backend, "poisoned").bits, "{dtype} {query_len}");
    }
}

pub(crate) fn pages_may_lie_in_any_order<B: Backend>(backend: &B, dtype: DType) {
    // Of few heads, and of some and many that are planned for longer sequences.
    let shapes = [(4, &[100, 65][..], 0), (16, &[100, 65, 0, 300], 100_000), (40, &[257, 1, 64, 130], 100_000)];
    for (page_size, (heads, lens, planned)) in
        [1, 12, 16, 64].into_iter().flat_map(|size| shapes.map(|shape| (size, shape)))
    {
        let mut shuffled = Problem::random(14, layer(heads, page_size), (dtype, dtype), 1, lens);
        shuffled.poison_unused_slots();
        shuffled.max_seq_len = planned;
        // The same rows, one page after another.
        let mut contiguous = shuffled.clone();
        let page_bytes = page_size * shuffled.row_bytes();
        let mut next = 0;
        for (from, to) in shuffled.block_table.iter().zip(&mut contiguous.block_table) {
            if *from >= 0 {
                let page = &shuffled.cache[*from as usize * page_bytes..][..page_bytes];
                contiguous.cache[next * page_bytes..][..page_bytes].copy_from_slice(page);
                *to = next as i32;
                next += 1;
            }
        }
        let what = format!("{heads} heads, page size {page_size}");
        assert!(shuffled.check(backend, &what).bits == contiguous.check(backend, &what).bits, "{what}");
    }
}

pub(crate) fn head_counts<B: Backend>(backend: &B, dtype: DType) {
    for heads in [1, 2, 3, 5, 16, 20, 63, 128] {
        for policy in [SplitPolicy::Auto, SplitPolicy::Fixed(3)] {
            let mut problem = Problem::random(15, layer(heads, 16), (dtype, dtype), 1, &[70, 0, 18]);
            problem.policy = policy;
            problem.check(backend, &format!("{heads} heads {policy:?}"));
        }
    }
}

pub(crate) fn lengths_around_page_and_split_edges<B: Backend>(backend: &B, dtype: DType) {
    let lens = [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 95, 127, 128, 129, 191, 192, 193];
    for policy in POLICIES {
        let mut problem = Problem::random(16, layer(2, 16), (dtype, dtype), 1, &lens);
        problem.policy = policy;
        problem.check(backend, &format!("{policy:?}"));
    }
}

pub(crate) fn causal_rows_of_every_query_length<B: Backend>(backend: &B, dtype: DType) {
    for query_len in [2, 3, 4, 7, 17] {
        for causal in [true, false] {
            for policy in
                [SplitPolicy::Auto, SplitPolicy::MinTokens(8), SplitPolicy::Fixed(4), SplitPolicy::Invariant(16)]
            {
                let lens = [query_len as i32, 70, 1, 0, 129];
                let mut problem = Problem::random(17, layer(3, 16), (dtype, dtype), query_len, &lens);
                (problem.causal, problem.policy) = (causal, policy);
                problem.check(backend, &format!("{query_len} tokens, causal {causal}, {policy:?}"));
            }
        }
    }
}

/// Stage 2 alone, over partial results that no stage 1 has made.
pub(crate) fn stage_two_merges_made_up_partials<B: Backend>(backend: &B, dtype: DType) {
    let (batch, heads, splits, rank) = (3, 5, 4, 512);
    let config = layer(heads, 16);
    let decode = MlaDecode::new(backend, config, dtype, dtype).unwrap();
    let plan = decode.plan(batch, 1, 64, SplitPolicy::Fixed(splits)).unwrap();
    let numbers = SplitMix64::new(18);
    let rows = batch * splits * heads;
    let mut partial_out: Vec<f64> = (0..(rows * rank) as u64).map(|i| numbers.grid(i)).collect();
    let partial_lse: Vec<f64> = (0..rows)
        .map(|i| if i % 7 == 3 { f64::NEG_INFINITY } else { numbers.grid((rows * rank + i) as u64) * 20.0 })
        .collect();
    for (row, lse) in partial_out.chunks_mut(rank).zip(&partial_lse) {
        if *lse == f64::NEG_INFINITY {
            row.fill(f64::NAN);
        }
    }
    let slots = |dtype, data: &[f64]| tensor(backend, [data.len()], dtype, &encode(dtype, data));
    let out_tensor = slots(plan.kernels().partial_dtype, &partial_out);
    let lse_tensor = slots(DType::F32, &partial_lse);
    let seq_lens = Tensor::from_slice(backend, [batch], &[64, 64, 0]).unwrap();
    let out = poisoned(backend, [batch, heads, rank], dtype).unwrap();
    let lse = poisoned(backend, [batch, heads], DType::F32).unwrap();
    let params = DecodeParams {
        seq_lens: seq_lens.addr(),
        out: out.addr(),
        lse: lse.addr(),
        partial_out: out_tensor.addr(),
        partial_lse: lse_tensor.addr(),
        out_stride_batch: (heads * rank) as i64,
        out_stride_token: (heads * rank) as i64,
        out_stride_head: rank as i64,
        lse_stride_batch: heads as i64,
        lse_stride_token: heads as i64,
        batch: batch as i32,
        query_len: 1,
        query_group: 1,
        num_groups: 1,
        num_heads: heads as i32,
        kv_lora_rank: rank as i32,
        rope_dim: 64,
        page_size: 16,
        table_width: 4,
        schedule_kind: ScheduleKind::Even as i32,
        num_kv_splits: splits as i32,
        tile_tokens: plan.kernels().split.tile_tokens as i32,
        sm_scale: 1.0,
        kv_scale: 1.0,
        share_blocks: (plan.decode().reduce_blocks / batch) as i32,
        ..bytemuck::Zeroable::zeroed()
    }
    .with_inverses();
    let launch = Launch {
        grid: [plan.decode().reduce_blocks as u32, 1, 1],
        threads: plan.kernels().reduce.threads,
        shared_bytes: 0,
        dependent: false,
        cluster: 1,
    };
    let kernel = backend.prepare(&plan.kernels().reduce).unwrap();
    let stream = backend.create_stream().unwrap();
    // SAFETY: all tensors have the shapes that the parameters say.
    unsafe { backend.launch(&stream, &kernel, &launch, &Params::Decode(params)) }.unwrap();
    backend.synchronize(&stream).unwrap();

    let part = |seq: usize, head: usize, split: usize| {
        let row = (seq * splits + split) * heads + head;
        Attended { out: partial_out[row * rank..][..rank].to_vec(), lse: f64::from(partial_lse[row] as f32) }
    };
    let (mut want_out, mut want_lse) = (Vec::new(), Vec::new());
    for seq in 0..batch {
        for head in 0..heads {
            let parts: Vec<Attended> = (0..splits).map(|split| part(seq, head, split)).collect();
            let empty = Attended { out: vec![0.0; rank], lse: f64::NEG_INFINITY };
            let row = if seq == 2 { empty } else { merge(&parts) };
            want_out.extend(row.out);
            want_lse.push(row.lse);
        }
    }
    check_close("out", &values(backend, &out), &want_out, &tolerance(dtype)).unwrap();
    check_close("LSE", &values(backend, &lse), &want_lse, &lse_tolerance(DType::F32)).unwrap();
}

/// Queries, cache and outputs that are parts of larger tensors, and a cache in two tensors: the same bits.
pub(crate) fn views_with_strides<B: Backend>(backend: &B, dtype: DType) {
    let problem = Problem::random(19, layer(4, 16), (dtype, dtype), 2, &[33, 50]);
    let want = problem.check(backend, "dense");
    let Problem { config, query_len, .. } = problem;
    let (heads, rank, width, page_size) = (config.num_heads, config.kv_lora_rank, config.head_dim(), config.page_size);
    let (batch, pages, size) = (problem.batch(), problem.num_pages(), dtype.size());
    // Rows of `data` spread over rows that are wider or come in larger groups, NaN between them.
    let spread = |data: &[u8], row: usize, wide: usize, group: usize, wide_group: usize| {
        let mut wider = Vec::new();
        for rows in data.chunks(row * group) {
            for row_data in rows.chunks(row) {
                wider.extend(row_data);
                wider.resize(wider.len() + wide - row, 0xFF);
            }
            wider.resize(wider.len() + (wide_group - group) * wide, 0xFF);
        }
        wider
    };
    let q = encode(dtype, &problem.q);
    let q = spread(&q, width * size, (width + 16) * size, heads, heads + 1);
    let q = tensor(backend, [batch, query_len, heads + 1, width + 16], dtype, &q);
    let q = q.columns(0..width).unwrap().narrow(2, 0..heads).unwrap();
    let cache = spread(&problem.cache, width * size, (width + 32) * size, page_size, page_size + 3);
    let cache = tensor(backend, [pages, page_size + 3, width + 32], dtype, &cache);
    let cache = cache.narrow(1, 0..page_size).unwrap();
    let joined = KvCache::joined(&cache.columns(0..width).unwrap(), &config).unwrap();
    let column = |range: std::ops::Range<usize>| -> Vec<u8> {
        problem.cache.chunks(width * size).flat_map(|row| row[range.start * size..range.end * size].to_vec()).collect()
    };
    let latent = tensor(backend, [pages, page_size, rank], dtype, &column(0..rank));
    let rope = tensor(backend, [pages, page_size, width - rank], dtype, &column(rank..width));
    let split = KvCache::split(&latent, Some(&rope)).unwrap();

    let decode = MlaDecode::new(backend, config, dtype, dtype).unwrap();
    let plan = decode.plan(batch, query_len, problem.longest(), problem.policy).unwrap();
    let mut table = Vec::new();
    for row in problem.block_table.chunks(problem.table_width()) {
        table.extend(row);
        table.push(-7);
    }
    let table = Tensor::from_slice(backend, [batch, problem.table_width() + 1], &table).unwrap();
    let table = table.columns(0..problem.table_width()).unwrap();
    let seq_lens = Tensor::from_slice(backend, [batch], &problem.seq_lens).unwrap();
    let stream = Stream::new(backend).unwrap();
    for kv_cache in [&joined, &split] {
        let whole = poisoned(backend, [batch, query_len, heads + 2, rank], dtype).unwrap();
        let mut out = whole.narrow(2, 1..heads + 1).unwrap();
        let mut lse = poisoned(backend, [batch, query_len, heads], DType::F32).unwrap();
        let args = DecodeArgs {
            q: &q,
            kv_cache,
            block_table: &table,
            seq_lens: &seq_lens,
            out: &mut out,
            lse: Some(&mut lse),
            kv_scale: 1.0,
            causal: true,
        };
        decode.run(&stream, &plan, &mut Workspace::new(backend, 1).unwrap(), args).unwrap();
        stream.synchronize().unwrap();
        let (mut got, whole) = (Vec::new(), bytes(backend, &whole));
        for rows in whole.chunks((heads + 2) * rank * size) {
            let (before, rest) = rows.split_at(rank * size);
            let (middle, after) = rest.split_at(heads * rank * size);
            assert!(before.iter().chain(after).all(|&byte| byte == 0xFF), "written outside the view");
            got.extend(middle);
        }
        got.extend(bytes(backend, &lse));
        assert!(got == want.bits, "{dtype}: a strided view changed the result");
    }
}

pub(crate) fn widths_and_soft_caps<B: Backend>(backend: &B, dtype: DType) {
    let widths = [(512, 64), (512, 0), (256, 64), (256, 32), (32, 4), (16, 4), (7, 3), (33, 0)].map(|(a, b)| (a, b, 5));
    // And rows enough for the forms that serve many.
    for (kv_lora_rank, qk_rope_head_dim, heads) in widths.into_iter().chain([(256, 64, 40), (256, 32, 40)]) {
        let config = MlaConfig { kv_lora_rank, qk_rope_head_dim, ..layer(heads, 4) };
        if matches!(MlaDecode::new(backend, config, dtype, dtype), Err(Error::Unsupported { .. })) {
            // The models' own widths are served everywhere.
            assert!(kv_lora_rank < 256 && B::NAME != "host", "{kv_lora_rank} + {qk_rope_head_dim}");
            continue;
        }
        for (softcap, sm_scale) in [(0.0, 0.1), (50.0, 0.1), (2.5, 0.3), (0.0, -0.1), (1.0, 100.0)] {
            let config = MlaConfig { softcap, sm_scale, ..config };
            let problem = Problem::random(22, config, (dtype, dtype), 2, &[70, 3, 1]);
            problem.check(backend, &format!("{kv_lora_rank} + {qk_rope_head_dim}, cap {softcap}, scale {sm_scale}"));
        }
    }
}

pub(crate) fn every_cache_type<B: Backend>(backend: &B, dtype: DType) {
    for (kv_dtype, kv_scale) in [(DType::Fp8E4m3, 1.0), (DType::Fp8E4m3, 1.0 / 64.0), (DType::Fp8E4m3Fnuz, 0.02)] {
        let decode = MlaDecode::new(backend, layer(4, 16), dtype, kv_dtype);
        if matches!(decode, Err(Error::Unsupported { .. })) {
            continue;
        }
        let mut problem = Problem::random(20, layer(4, 16), (dtype, kv_dtype), 1, &[100, 0, 17]);
        problem.kv_scale = kv_scale;
        problem.check(backend, &format!("{kv_dtype} scale {kv_scale}"));
    }
}

/// The host says which page or length is wrong; a device must not fault, and serves what comes after.
pub(crate) fn bad_pages_and_lengths_are_not_followed<B: Backend>(backend: &B, dtype: DType) {
    let good = Problem::random(21, layer(4, 16), (dtype, dtype), 1, &[40, 20]);
    for policy in [SplitPolicy::Auto, SplitPolicy::Fixed(2), SplitPolicy::Invariant(16)] {
        let mut bad = good.clone();
        bad.policy = policy;
        let width = bad.table_width();
        for page in [-1, bad.num_pages() as i32, i32::MAX, i32::MIN] {
            bad.block_table[width + 1] = page;
            match bad.run(backend) {
                Err(Error::PageOutOfRange { seq: 1, slot: 1, page: got, .. }) if got == page => {}
                Ok(_) if B::NAME != "host" => {}
                other => panic!("{policy:?} page {page}: {:?}", other.map(|_| ())),
            }
        }
        bad.block_table = good.block_table.clone();
        for len in [-1, i32::MIN, (width * 16) as i32 + 1, i32::MAX] {
            bad.max_seq_len = width * 16;
            match bad.run_with_lens(backend, &[40, len]) {
                Err(Error::SeqLenOutOfRange { seq: 1, len: got, .. }) if got == i64::from(len) => {}
                Ok(_) if B::NAME != "host" => {}
                other => panic!("{policy:?} length {len}: {:?}", other.map(|_| ())),
            }
        }
    }
    good.check(backend, "after bad input");
}
