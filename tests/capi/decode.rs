//! The stateless decode call.

use latentwave::capi::*;
use latentwave::testing::poisoned;
use latentwave::{Backend, DType, GraphBackend, MlaConfig, SplitPolicy, Stream, Tensor};

use crate::common::{Problem, bytes, encode, tensor};
use crate::{Device, cleared, last_error, layer, ok, pages, pointer, raw_stream};

/// A problem's tensors on a device, and the call over them. Outputs and workspace are poisoned.
pub(crate) struct Call<B: Backend> {
    pub(crate) q: Tensor<B>,
    pub(crate) cache: Tensor<B>,
    pub(crate) block_table: Tensor<B>,
    pub(crate) seq_lens: Tensor<B>,
    pub(crate) out: Tensor<B>,
    pub(crate) lse: Tensor<B>,
    pub(crate) workspace: Tensor<B>,
    pub(crate) args: lw_decode_args,
}

impl<B: Backend> Call<B> {
    pub(crate) fn new(backend: &B, device: &Device, problem: &Problem) -> Self {
        let (batch, query_len, config) = (problem.batch(), problem.query_len, problem.config);
        let shape = [batch, query_len, config.num_heads, config.head_dim()];
        let row = problem.row_bytes() / problem.kv_dtype.size();
        let mut args = lw_decode_args {
            layer: layer(problem),
            batch: batch as i64,
            query_len: query_len as i64,
            max_seq_len: problem.longest() as i64,
            table_width: problem.table_width() as i64,
            causal: problem.causal.into(),
            ..cleared()
        };
        // SAFETY: the device is open and the pointers are valid for the call.
        ok(unsafe { lw_decode_workspace_bytes(device.0, &args, &mut args.workspace_bytes) });
        let outs = [batch, query_len, config.num_heads, config.kv_lora_rank];
        let call = Self {
            q: tensor(backend, shape, problem.q_dtype, &encode(problem.q_dtype, &problem.q)),
            cache: tensor(backend, [problem.num_pages(), config.page_size, row], problem.kv_dtype, &problem.cache),
            block_table: Tensor::from_slice(backend, [batch, problem.table_width()], &problem.block_table).unwrap(),
            seq_lens: Tensor::from_slice(backend, [batch], &problem.seq_lens).unwrap(),
            out: poisoned(backend, outs, problem.q_dtype).unwrap(),
            lse: poisoned(backend, [batch, query_len, config.num_heads], DType::F32).unwrap(),
            workspace: poisoned(backend, [args.workspace_bytes.max(1)], DType::U8).unwrap(),
            args,
        };
        let args = lw_decode_args {
            cache: pages(&call.cache),
            q: pointer(&call.q),
            block_table: pointer(&call.block_table),
            seq_lens: pointer(&call.seq_lens),
            out: pointer(&call.out),
            lse: pointer(&call.lse),
            workspace: pointer(&call.workspace),
            ..call.args
        };
        Self { args, ..call }
    }

    fn enqueue(&self, device: &Device, stream: u64) {
        // SAFETY: the tensors have the shapes that the arguments say and outlive the work, which the callers wait for.
        ok(unsafe { lw_decode(device.0, &self.args, raw_stream(stream)) });
    }

    fn bits(&self, backend: &B) -> Vec<u8> {
        let mut bits = bytes(backend, &self.out);
        bits.extend(bytes(backend, &self.lse));
        bits
    }
}

fn problems(fp8: DType) -> Vec<(&'static str, Problem)> {
    let mla = MlaConfig::deepseek(16, 16);
    let bf16 = (DType::BF16, DType::BF16);
    let lens = [700, 1, 0, 64, 129];
    let plain = Problem::random(1, mla, bf16, 1, &lens);
    vec![
        ("one token", plain.clone()),
        ("causal drafts", Problem::random(2, mla, bf16, 3, &lens)),
        ("drafts, not causal", Problem { causal: false, ..Problem::random(3, mla, bf16, 2, &lens) }),
        ("fp8 cache", Problem { kv_scale: 0.5, ..Problem::random(4, mla, (DType::BF16, fp8), 1, &lens) }),
        ("soft cap", Problem::random(5, MlaConfig { softcap: 30.0, ..mla }, bf16, 1, &lens)),
        ("no rope", Problem::random(6, MlaConfig { qk_rope_head_dim: 0, ..mla }, bf16, 1, &lens)),
        ("fixed splits", Problem { policy: SplitPolicy::Fixed(3), ..plain.clone() }),
        ("invariant splits", Problem { policy: SplitPolicy::Invariant(256), ..plain.clone() }),
        ("a split per tile", Problem { policy: SplitPolicy::MinTokens(64), ..plain }),
        ("128 heads", Problem::random(7, MlaConfig::deepseek(128, 64), bf16, 1, &[300, 40])),
    ]
}

fn fp8_of<B: Backend>(backend: &B) -> DType {
    if backend.device().arch.starts_with("gfx94") { DType::Fp8E4m3Fnuz } else { DType::Fp8E4m3 }
}

pub(crate) fn decode_equals_the_rust_api_bit_by_bit<B: GraphBackend>(backend: &B) {
    let device = Device::open::<B>();
    let stream = Stream::new(backend).unwrap();
    for (what, problem) in problems(fp8_of(backend)) {
        let wanted = problem.check(backend, what);
        let call = Call::new(backend, &device, &problem);
        // Twice: over a plan made now, and over one that was there.
        for _ in 0..2 {
            call.out.fill_bytes(backend, 0xFF).unwrap();
            call.enqueue(&device, backend.raw_stream(stream.raw()));
            stream.synchronize().unwrap();
            assert!(call.bits(backend) == wanted.bits, "{what}");
        }
    }
}

pub(crate) fn threads_share_a_device<B: GraphBackend>(backend: &B) {
    let device = Device::open::<B>();
    let address = device.0.expose_provenance();
    std::thread::scope(|scope| {
        for seed in 0..4 {
            scope.spawn(move || {
                let device = std::mem::ManuallyDrop::new(Device(std::ptr::with_exposed_provenance_mut(address)));
                let stream = Stream::new(backend).unwrap();
                let bf16 = (DType::BF16, DType::BF16);
                // Two threads each ask for the same plan.
                let lens = [300 + 100 * (seed as i32 % 2), 7];
                let problem = Problem::random(40 + seed, MlaConfig::deepseek(16, 16), bf16, 1, &lens);
                let wanted = problem.run(backend).unwrap().bits;
                let call = Call::new(backend, &device, &problem);
                for _ in 0..5 {
                    call.out.fill_bytes(backend, 0xFF).unwrap();
                    call.enqueue(&device, backend.raw_stream(stream.raw()));
                    stream.synchronize().unwrap();
                    assert!(call.bits(backend) == wanted);
                }
            });
        }
    });
}

pub(crate) fn layers_share_a_schedule<B: GraphBackend>(backend: &B) {
    let device = Device::open::<B>();
    let stream = Stream::new(backend).unwrap();
    let raw = backend.raw_stream(stream.raw());
    let lens = [1000, 17, 333];
    let problems = [11, 12, 13]
        .map(|seed| Problem::random(seed, MlaConfig::deepseek(16, 16), (DType::BF16, DType::BF16), 1, &lens));
    let mut calls = [0, 1, 2].map(|i| Call::new(backend, &device, &problems[i]));
    // Later layers have the first one's lengths and workspace, and so its schedule.
    for layer in 1..calls.len() {
        (calls[layer].args.seq_lens, calls[layer].args.workspace) = (calls[0].args.seq_lens, calls[0].args.workspace);
    }
    // SAFETY: as for `enqueue`.
    ok(unsafe { lw_decode_plan(device.0, &calls[0].args, raw_stream(raw)) });
    for settled in [0, 1, 2] {
        for (layer, call) in calls.iter_mut().enumerate() {
            call.out.fill_bytes(backend, 0xFF).unwrap();
            call.lse.fill_bytes(backend, 0xFF).unwrap();
            (call.args.scheduled, call.args.settled) = (1, if layer == 0 { 0 } else { settled });
            call.enqueue(&device, raw);
        }
        stream.synchronize().unwrap();
        for (call, problem) in calls.iter().zip(&problems) {
            assert!(call.bits(backend) == problem.run(backend).unwrap().bits, "settled {settled}");
        }
    }
}

pub(crate) fn strided_and_split_tensors_are_taken<B: GraphBackend>(backend: &B) {
    let device = Device::open::<B>();
    let stream = Stream::new(backend).unwrap();
    let problem = Problem::random(21, MlaConfig::deepseek(8, 16), (DType::BF16, DType::BF16), 2, &[100, 33]);
    let wanted = problem.run(backend).unwrap().bits;
    let mut call = Call::new(backend, &device, &problem);

    // The rope part of a joined cache is as good as one of its own; tables and outputs lie in wider ones.
    let wide = problem.table_width() + 5;
    let mut table = vec![i32::MAX; problem.batch() * wide];
    for (to, from) in table.chunks_mut(wide).zip(problem.block_table.chunks(problem.table_width())) {
        to[..from.len()].copy_from_slice(from);
    }
    let table = Tensor::from_slice(backend, [problem.batch(), wide], &table).unwrap();
    let out = poisoned(backend, [2, 2, 12, 512], DType::BF16).unwrap();
    let page = 16 * 576;
    call.args.cache.k_rope = pointer::<B, u8>(&call.cache).wrapping_add(512 * 2).cast();
    call.args.cache.kv_strides = [page, 576];
    call.args.cache.k_rope_strides = [page, 576];
    call.args.block_table = pointer(&table);
    call.args.table_stride = wide as i64;
    call.args.out = pointer(&out);
    call.args.out_strides = [0, 12 * 512, 0];
    call.args.q_strides = [2 * 8 * 576, 8 * 576, 576];
    call.enqueue(&device, backend.raw_stream(stream.raw()));
    stream.synchronize().unwrap();

    let row = 512 * 2;
    let rows = bytes(backend, &out);
    let mut got: Vec<u8> = rows.chunks(12 * row).flat_map(|token| token[..8 * row].to_vec()).collect();
    got.extend(bytes(backend, &call.lse));
    assert!(got == wanted);
    assert!(rows.chunks(12 * row).all(|token| token[8 * row..].iter().all(|&byte| byte == 0xFF)));
}

/// A graph that knows nothing of this library, captured over raw pointers, sees lengths and tables changed in place.
pub(crate) fn anyones_graph_can_capture_it<B: GraphBackend>(backend: &B) {
    if B::NAME == "host" {
        // The host has no raw streams to capture; its work runs at once.
        let problem = Problem::random(31, MlaConfig::deepseek(2, 16), (DType::F32, DType::F32), 1, &[5]);
        let device = Device::open::<B>();
        let call = Call::new(backend, &device, &problem);
        // SAFETY: as for `enqueue`.
        let status = unsafe { lw_decode(device.0, &call.args, raw_stream(64)) };
        assert_eq!(status, lw_status::LW_ERROR_ARGUMENT);
        assert!(last_error().contains("`stream`"), "{}", last_error());
        return;
    }
    let device = Device::open::<B>();
    let stream = Stream::new(backend).unwrap();
    let raw = backend.raw_stream(stream.raw());
    let problem = |seed, lens: &[i32]| Problem {
        max_seq_len: 900,
        ..Problem::random(seed, MlaConfig::deepseek(16, 16), (DType::BF16, DType::BF16), 1, lens)
    };
    let first = problem(32, &[800, 700, 0]);
    let call = Call::new(backend, &device, &first);
    // The first call with these sizes is made inside the capture, so kernels may be loaded there.
    let graph = stream
        .capture(|| {
            call.enqueue(&device, raw);
            Ok(())
        })
        .unwrap();
    for lens in [[800, 700, 0], [3, 0, 850], [1, 1, 1]] {
        let mut now = Problem { seq_lens: lens.to_vec(), ..first.clone() };
        // Other pages in another order; every page that a length needs is somewhere in the cache.
        let width = now.table_width();
        for (seq, row) in now.block_table.chunks_mut(width).enumerate() {
            for (slot, page) in row.iter_mut().enumerate() {
                *page = ((slot * 7 + seq * 31 + lens[0] as usize) % first.num_pages()) as i32;
            }
        }
        call.seq_lens.write(backend, &now.seq_lens).unwrap();
        call.block_table.write(backend, &now.block_table).unwrap();
        call.out.fill_bytes(backend, 0xFF).unwrap();
        // SAFETY: the tensors that the graph names are alive.
        unsafe { stream.replay(&graph).unwrap() };
        stream.synchronize().unwrap();
        assert!(call.bits(backend) == now.run(backend).unwrap().bits, "{lens:?}");
    }
}
