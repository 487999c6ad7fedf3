//! Cache writing and gathering, merging, and what devices say of themselves.

use std::ffi::CStr;

use half::bf16;
use latentwave::capi::*;
use latentwave::ops::{CacheWrite, MergeStates, merge_states, write_cache};
use latentwave::testing::{SplitMix64, poisoned};
use latentwave::{Backend, DType, GraphBackend, KvCache, MlaConfig, Stream, Tensor};

use crate::common::{Problem, bytes};
use crate::{Device, cleared, last_error, layer, number, ok, pages, pointer, raw_stream};

fn random<B: Backend, const N: usize>(backend: &B, seed: u64, shape: [usize; N]) -> Tensor<B> {
    let numbers = SplitMix64::new(seed);
    Tensor::from_fn(backend, shape, |i| bf16::from_f64(numbers.grid(i as u64))).unwrap()
}

pub(crate) fn the_cache_is_written_and_gathered<B: GraphBackend>(backend: &B) {
    let device = Device::open::<B>();
    let stream = Stream::new(backend).unwrap();
    let raw = raw_stream(backend.raw_stream(stream.raw()));
    let mla = MlaConfig::deepseek(1, 16);
    let problem = Problem::random(1, mla, (DType::BF16, DType::BF16), 1, &[1]);
    let (kv_c, k_pe) = (random(backend, 2, [5, 512]), random(backend, 3, [5, 64]));
    let slots = Tensor::from_slice(backend, [5], &[17_i64, 3, -1, 40, 16]).unwrap();
    let caches = [0, 1].map(|_| Tensor::zeros(backend, [4, 16, 576], DType::BF16).unwrap());

    let wanted = KvCache::joined(&caches[0], &mla).unwrap();
    let write = CacheWrite { kv_c: &kv_c, k_pe: Some(&k_pe), slot_mapping: &slots, kv_scale: 1.0 };
    write_cache(&stream, &wanted, &write).unwrap();
    let args = lw_cache_write_args {
        layer: layer(&problem),
        cache: pages(&caches[1]),
        num_tokens: 5,
        kv_c: pointer(&kv_c),
        k_pe: pointer(&k_pe),
        slot_mapping: pointer(&slots),
        ..cleared()
    };
    // SAFETY: the tensors have the shapes that the arguments say and outlive the work, which is waited for.
    ok(unsafe { lw_cache_write(device.0, &args, raw) });
    stream.synchronize().unwrap();
    assert!(bytes(backend, &caches[0]) == bytes(backend, &caches[1]));

    // Rows 16 and 17 (page 1) of one sequence, row 3 (page 0) of another.
    let table = Tensor::from_slice(backend, [2, 1], &[1, 0]).unwrap();
    let ends = Tensor::from_slice(backend, [3], &[0, 2, 3]).unwrap();
    let starts = Tensor::from_slice(backend, [2], &[0, 3]).unwrap();
    let out = poisoned(backend, [3, 576], DType::BF16).unwrap();
    let args = lw_cache_gather_args {
        layer: layer(&problem),
        cache: pages(&caches[1]),
        batch: 2,
        num_tokens: 3,
        table_width: 1,
        block_table: pointer(&table),
        cu_seq_lens: pointer(&ends),
        seq_starts: pointer(&starts),
        out: pointer(&out),
        ..cleared()
    };
    // SAFETY: as above.
    ok(unsafe { lw_cache_gather(device.0, &args, raw) });
    stream.synchronize().unwrap();
    let (latents, ropes) = (bytes(backend, &kv_c), bytes(backend, &k_pe));
    let row = |i: usize| [&latents[i * 1024..][..1024], &ropes[i * 128..][..128]].concat();
    assert!(bytes(backend, &out) == [row(4), row(0), row(1)].concat());
}

pub(crate) fn partial_results_are_merged<B: GraphBackend>(backend: &B) {
    let device = Device::open::<B>();
    let stream = Stream::new(backend).unwrap();
    let raw = raw_stream(backend.raw_stream(stream.raw()));
    let outs = [4, 5].map(|seed| random(backend, seed, [3, 2, 64]));
    let lses = [[0.5_f32, f32::NEG_INFINITY, 1.0, 2.0, -1.0, 0.0], [1.5, 0.25, f32::NEG_INFINITY, 2.0, 3.0, 0.0]]
        .map(|lse| Tensor::from_slice(backend, [2, 3], &lse).unwrap());
    let mut results = [0, 1, 2].map(|_| poisoned(backend, [3, 2, 64], DType::BF16).unwrap());
    let mut result_lse = poisoned(backend, [2, 3], DType::F32).unwrap();
    let states = MergeStates {
        prefix_out: &outs[0],
        prefix_lse: &lses[0],
        suffix_out: &outs[1],
        suffix_lse: &lses[1],
        tokens_with_context: Some(2),
    };
    merge_states(&stream, &states, &mut results[0], Some(&mut result_lse)).unwrap();
    let lse = poisoned(backend, [2, 3], DType::F32).unwrap();
    let args = lw_merge_states_args {
        num_tokens: 3,
        num_heads: 2,
        head_dim: 64,
        tokens_with_context: 2,
        prefix_out: pointer(&outs[0]),
        prefix_lse: pointer(&lses[0]),
        suffix_out: pointer(&outs[1]),
        suffix_lse: pointer(&lses[1]),
        out: pointer(&results[1]),
        out_lse: pointer(&lse),
        dtype: number(DType::BF16),
        ..cleared()
    };
    // SAFETY: the tensors have the shapes that the arguments say and outlive the work, which is waited for.
    ok(unsafe { lw_merge_states(device.0, &args, raw) });

    // Ranks over one row of all: equal weights where the LSE are equal, and a rank without keys that is ignored.
    let partial =
        Tensor::from_slice(backend, [3, 1, 1, 4], &[1.0_f32, 2.0, 3.0, 4.0, 3.0, 4.0, 5.0, 6.0, 9.0, 9.0, 9.0, 9.0]);
    let partial = partial.unwrap();
    let partial: Vec<bf16> = partial.to_vec::<f32>(backend).unwrap().into_iter().map(bf16::from_f32).collect();
    let partial = Tensor::from_slice(backend, [3, 1, 1, 4], &partial).unwrap();
    let partial_lse = Tensor::from_slice(backend, [3, 1, 1], &[2.0_f32, 2.0, f32::NEG_INFINITY]).unwrap();
    let combined = poisoned(backend, [1, 1, 4], DType::BF16).unwrap();
    let combined_lse = poisoned(backend, [1, 1], DType::F32).unwrap();
    let args = lw_dcp_combine_args {
        num_ranks: 3,
        num_rows: 1,
        num_heads: 1,
        head_dim: 4,
        partial_out: pointer(&partial),
        partial_lse: pointer(&partial_lse),
        out: pointer(&combined),
        out_lse: pointer(&combined_lse),
        dtype: number(DType::BF16),
        natural_log: 1,
        ..cleared()
    };
    // SAFETY: as above.
    ok(unsafe { lw_dcp_combine(device.0, &args, raw) });
    stream.synchronize().unwrap();

    assert!(bytes(backend, &results[0]) == bytes(backend, &results[1]));
    assert!(bytes(backend, &result_lse) == bytes(backend, &lse));
    let combined: Vec<f32> = combined.to_vec::<bf16>(backend).unwrap().into_iter().map(bf16::to_f32).collect();
    assert_eq!(combined, [2.0, 3.0, 4.0, 5.0]);
    let combined_lse = combined_lse.to_vec::<f32>(backend).unwrap()[0];
    assert!((combined_lse - (2.0 + 2_f32.ln())).abs() < 1e-6, "{combined_lse}");
}

#[test]
fn devices_say_what_they_are_or_why_they_are_not() {
    let device = Device::open::<latentwave::Host>();
    let mut info: lw_device_info = cleared();
    // SAFETY: the device is open and the pointer is valid.
    ok(unsafe { lw_device_get_info(device.0, &mut info) });
    assert_eq!((info.backend, info.index, info.wave_size), (lw_backend::LW_HOST as i32, 0, 1));
    assert!(info.num_compute_units > 0 && info.memory_bytes > 0);
    // SAFETY: terminated, as the header says.
    let arch = unsafe { CStr::from_ptr(info.arch.as_ptr()) }.to_str().unwrap();
    assert_eq!(arch, latentwave::Host::new().device().arch);

    let mut count = -1;
    // SAFETY: the pointer is valid.
    ok(unsafe { lw_device_count(lw_backend::LW_HOST as i32, &mut count) });
    assert_eq!(count, 1);
    for backend in [lw_backend::LW_CUDA, lw_backend::LW_ROCM] {
        // SAFETY: as above.
        let status = unsafe { lw_device_count(backend as i32, &mut count) };
        match status {
            lw_status::LW_OK => assert!(count >= 0),
            lw_status::LW_ERROR_UNAVAILABLE => assert!(last_error().contains("unavailable"), "{}", last_error()),
            other => panic!("{other:?}: {}", last_error()),
        }
    }
}
