//! The C ABI's stateless calls for the count of allocations.

use std::ptr::{null_mut, with_exposed_provenance_mut, without_provenance_mut};

use latentwave::capi::*;
use latentwave::{DType, GraphBackend, Stream, Tensor};

/// Calls a step of two layers over one schedule, 50 times after two to warm up; `count` tells the allocations so far.
pub(crate) fn of_calls<B: GraphBackend>(backend: &B, count: impl Fn() -> usize) -> usize {
    let zeros = |shape: [usize; 3], dtype| Tensor::zeros(backend, shape, dtype).expect("a tensor");
    let (q, out) = (zeros([4, 16, 576], DType::BF16), zeros([4, 16, 512], DType::BF16));
    let (cache, table) = (zeros([8, 16, 576], DType::BF16), zeros([1, 4, 8], DType::I32));
    let seq_lens = Tensor::from_slice(backend, [4], &[100, 128, 0, 1]).expect("lengths");
    fn at<B: GraphBackend, T>(tensor: &Tensor<B>) -> *mut T {
        with_exposed_provenance_mut(tensor.addr() as usize)
    }
    let layer = lw_layer {
        num_heads: 16,
        kv_lora_rank: 512,
        qk_rope_head_dim: 64,
        page_size: 16,
        split_value: 0,
        split: 0,
        q_dtype: lw_dtype::LW_BF16 as i32,
        kv_dtype: lw_dtype::LW_BF16 as i32,
        sm_scale: 0.1,
        softcap: 0.0,
        kv_scale: 0.0,
    };
    let cache =
        lw_kv_cache { kv: at(&cache), k_rope: null_mut(), num_pages: 8, kv_strides: [0; 2], k_rope_strides: [0; 2] };
    // SAFETY: the structure is numbers and pointers, for which zeros are valid.
    let mut args: lw_decode_args = unsafe { std::mem::zeroed() };
    args.struct_size = size_of::<lw_decode_args>();
    (args.layer, args.cache) = (layer, cache);
    (args.batch, args.query_len, args.max_seq_len, args.table_width) = (4, 1, 128, 8);
    (args.q, args.out, args.block_table, args.seq_lens) = (at(&q), at(&out), at(&table), at(&seq_lens));
    let number = if B::NAME == "cuda" { 1 } else { 2 * i32::from(B::NAME == "rocm") };
    let mut device = null_mut();
    let stream = Stream::new(backend).expect("a stream");
    let raw = without_provenance_mut(backend.raw_stream(stream.raw()) as usize);
    // SAFETY: device and tensors outlive the work, which is waited for.
    unsafe {
        assert_eq!(lw_device_open(number, 0, &mut device), lw_status::LW_OK);
        assert_eq!(lw_decode_workspace_bytes(device, &args, &mut args.workspace_bytes), lw_status::LW_OK);
        let workspace = zeros([1, 1, args.workspace_bytes], DType::U8);
        args.workspace = at(&workspace);
        args.scheduled = 1;
        let mut before = 0;
        for round in 0..52 {
            if round == 2 {
                before = count();
            }
            assert_eq!(lw_decode_plan(device, &args, raw), lw_status::LW_OK);
            for _ in 0..2 {
                assert_eq!(lw_decode(device, &args, raw), lw_status::LW_OK);
            }
            stream.synchronize().expect("synchronize");
        }
        let allocated = count() - before;
        lw_device_close(device);
        allocated
    }
}
