//! The candle adapter: equal to the library over its own tensors, whatever the strides, and errors by name.

use candle_core::{DType, Device, Tensor};
use latentwave::candle::CandleMla;
use latentwave::reference::PagedStep;
use latentwave::testing::{Tolerance, check_close};
use latentwave::{MlaConfig, SplitPolicy};

const CONFIG: MlaConfig =
    MlaConfig { num_heads: 3, kv_lora_rank: 32, qk_rope_head_dim: 8, page_size: 4, sm_scale: 0.2, softcap: 0.0 };

fn random(shape: &[usize], seed: f32) -> Tensor {
    let values: Vec<f32> = (0..shape.iter().product()).map(|i| (i as f32 * 0.731 + seed).sin()).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).expect("as many values as the shape has")
}

fn numbers(tensor: &Tensor) -> Vec<f64> {
    let tensor = tensor.to_dtype(DType::F64).expect("a float");
    tensor.flatten_all().expect("a tensor").to_vec1().expect("one dimension")
}

fn error(result: candle_core::Result<impl Sized>) -> String {
    result.err().expect("it is refused").to_string()
}

#[test]
fn attention_equals_float64_for_every_type_and_stride() {
    let seq_lens = [13, 0, 6];
    let tables: [[u32; 4]; 3] = [[4, 1, 0, 6], [9, 9, 9, 9], [2, 5, 7, 0xffff_ffff]];
    for (dtype, kv_dtype) in
        [(DType::F32, DType::F32), (DType::BF16, DType::BF16), (DType::F16, DType::F16), (DType::BF16, DType::F8E4M3)]
    {
        // Heads stand before query tokens in memory, and the cache is a part of a wider tensor.
        let q = random(&[3, 3, 2, 40], 1.0).to_dtype(dtype).expect("a float").transpose(1, 2).expect("dimensions");
        let wide = random(&[10, 4, 48], 2.0).to_dtype(kv_dtype).expect("a float");
        let kv_cache = wide.narrow(2, 8, 40).expect("columns");
        let block_table = Tensor::new(&tables, &Device::Cpu).expect("a table");
        let mla =
            CandleMla::new(CONFIG, dtype, kv_dtype).expect("types that it takes").with_policy(SplitPolicy::Fixed(2));
        let out = mla.attend(&q, &kv_cache, &block_table, &seq_lens);
        let out = out.unwrap_or_else(|error| panic!("{dtype:?} {kv_dtype:?}: {error}"));
        assert_eq!((out.dims(), out.dtype()), (&[3, 2, 3, 32][..], dtype));
        let (want, _) = PagedStep {
            q: &numbers(&q.contiguous().expect("a copy")),
            kv: &numbers(&kv_cache.to_dtype(DType::F32).expect("a float").contiguous().expect("a copy")),
            block_table: &tables.concat().iter().map(|&page| page as i32).collect::<Vec<_>>(),
            seq_lens: &seq_lens,
            query_len: 2,
            num_heads: 3,
            kv_lora_rank: 32,
            rope_dim: 8,
            page_size: 4,
            sm_scale: f64::from(CONFIG.sm_scale),
            softcap: 0.0,
            causal: true,
        }
        .all();
        let tolerance = if dtype == DType::F32 { Tolerance::abs(1e-5) } else { Tolerance::HALF };
        check_close("out", &numbers(&out), &want, &tolerance).unwrap_or_else(|error| panic!("{dtype:?}: {error}"));
    }
}

#[test]
fn rows_are_written_in_place() {
    let mla = CandleMla::new(CONFIG, DType::F32, DType::F32).expect("types that it takes");
    let cache = Tensor::zeros((3, 4, 40), DType::F32, &Device::Cpu).expect("a cache");
    let rows = random(&[3, 40], 3.0);
    let slots = Tensor::new(&[5_i64, -1, 11], &Device::Cpu).expect("slots");
    mla.write_cache(&cache, &rows, &slots).expect("rows that fit");
    let got = cache.reshape((12, 40)).expect("its rows");
    for slot in 0..12 {
        let want = match slot {
            5 => numbers(&rows.get(0).expect("a row")),
            11 => numbers(&rows.get(2).expect("a row")),
            _ => vec![0.0; 40],
        };
        assert_eq!(numbers(&got.get(slot).expect("a row")), want, "slot {slot}");
    }
}

#[test]
fn what_does_not_fit_is_named() {
    let cpu = &Device::Cpu;
    assert!(error(CandleMla::new(CONFIG, DType::I64, DType::F32)).contains("`q`"));
    assert!(error(CandleMla::new(CONFIG, DType::F32, DType::U8)).contains("`kv_cache`"));
    let mla = CandleMla::new(CONFIG, DType::F32, DType::F32).expect("types that it takes");
    let (q, cache) = (random(&[1, 1, 3, 40], 1.0), random(&[4, 4, 40], 2.0));
    let table = Tensor::new(&[[1_u32, 9]], cpu).expect("a table");
    assert!(mla.attend(&q, &cache, &table, &[4]).is_ok(), "what lies behind a sequence's pages may be anything");
    assert!(error(mla.attend(&q, &cache, &table, &[5])).contains("block_table[0, 1] = 9"));
    assert!(error(mla.attend(&q, &cache, &table, &[9])).contains("seq_lens[0] = 9"));
    assert!(error(mla.attend(&q, &cache, &table, &[4, 4])).contains("`seq_lens`"));
    assert!(error(mla.attend(&q, &random(&[4, 4, 41], 2.0), &table, &[4])).contains("`kv_cache`"));
    assert!(error(mla.attend(&q, &random(&[4, 0, 40], 2.0), &table, &[0])).contains("`kv_cache`"));
    assert!(
        error(mla.attend(&q, &cache, &Tensor::new(&[[1.5_f32]], cpu).expect("a table"), &[4]))
            .contains("`block_table`")
    );
    assert!(error(mla.attend(&random(&[1, 1, 2, 40], 1.0), &cache, &table, &[4])).contains("`q`"));
    assert!(error(mla.attend(&q.transpose(2, 3).expect("dimensions"), &cache, &table, &[4])).contains("`q`"));
    let slots = Tensor::new(&[0_i64], cpu).expect("slots");
    assert!(error(mla.write_cache(&cache, &random(&[1, 39], 0.0), &slots)).contains("`rows`"));
    assert!(error(mla.write_cache(&cache, &random(&[1, 40], 0.0), &table)).contains("`slot_mapping`"));
}
