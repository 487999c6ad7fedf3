//! Attention on the host backend, float32: the whole step (plan, stage 1, stage 2) over a paged cache.
//!
//! `benches/compare_numpy.py` runs this and the same matrix products in numpy, one after the other on the same cores.

use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use latentwave::testing::SplitMix64;
use latentwave::{DType, DecodeArgs, Host, KvCache, MlaConfig, MlaDecode, SplitPolicy, Stream, Tensor, Workspace};

/// Heads, sequences, cached tokens of each; the same list is in `compare_numpy.py`.
const SHAPES: [(usize, usize, usize); 4] = [(16, 8, 2048), (16, 1, 16_384), (64, 4, 2048), (128, 4, 2048)];
const PAGE_SIZE: usize = 64;

fn attention(c: &mut Criterion) {
    let host = Host::new();
    let mut group = c.benchmark_group("host_attention");
    group.sample_size(20).warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2));
    for (heads, batch, tokens) in SHAPES {
        for (kv_dtype, size) in [(DType::F32, 4), (DType::BF16, 2), (DType::Fp8E4m3, 1)] {
            if kv_dtype != DType::F32 && heads != 16 {
                continue;
            }
            let config = MlaConfig::deepseek(heads, PAGE_SIZE);
            let width = config.head_dim();
            let pages = batch * tokens / PAGE_SIZE;
            let numbers = SplitMix64::new(1);
            let q = Tensor::from_fn(&host, [batch, heads, width], |i| numbers.grid(i as u64) as f32).expect("q");
            // Bytes below 0x3F are small finite numbers in every type that is used here.
            let bytes: Vec<u8> =
                (0..(pages * PAGE_SIZE * width * size) as u64).map(|i| numbers.number(i) as u8 & 0x3F).collect();
            let cache = Tensor::from_bytes(&host, [pages, PAGE_SIZE, width], kv_dtype, &bytes).expect("cache");
            let kv_cache = KvCache::joined(&cache, &config).expect("cache");
            let order: Vec<i32> = numbers.permutation(pages).into_iter().map(|page| page as i32).collect();
            let block_table = Tensor::from_slice(&host, [batch, tokens / PAGE_SIZE], &order).expect("table");
            let seq_lens = Tensor::from_slice(&host, [batch], &vec![tokens as i32; batch]).expect("lengths");
            let mut out = Tensor::zeros(&host, [batch, heads, config.kv_lora_rank], DType::F32).expect("out");
            let decode = MlaDecode::new(&host, config, DType::F32, kv_dtype).expect("decode");
            let plan = decode.plan(batch, 1, tokens, SplitPolicy::Auto).expect("plan");
            let mut workspace = Workspace::new(&host, 1).expect("workspace");
            let stream = Stream::new(&host).expect("stream");

            // Two products of heads x tokens, 576 and 512 deep.
            let flop = 2 * batch * heads * tokens * (width + config.kv_lora_rank);
            group.throughput(Throughput::Elements(flop as u64));
            let id = BenchmarkId::new(format!("{kv_dtype}"), format!("{heads}x{batch}x{tokens}"));
            group.bench_function(id, |bencher| {
                bencher.iter(|| {
                    let args = DecodeArgs {
                        q: &q,
                        kv_cache: &kv_cache,
                        block_table: &block_table,
                        seq_lens: &seq_lens,
                        out: &mut out,
                        lse: None,
                        kv_scale: 1.0,
                        causal: false,
                    };
                    decode.run(&stream, &plan, &mut workspace, args).expect("a step");
                });
            });
        }
    }
    group.finish();
}

criterion_group!(benches, attention);
criterion_main!(benches);
