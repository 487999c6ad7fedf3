//! What is the host backend's own: threads, memory limit, streams that are no handles, and safety against misuse.

mod common;

use common::{Problem, encode, tensor};
use latentwave::testing::{check_close, poisoned};
use latentwave::{
    Backend, DType, DecodeArgs, Error, GraphBackend, Host, KvCache, MlaConfig, MlaDecode, SplitPolicy, Stream, Tensor,
    Workspace,
};

fn problem(policy: SplitPolicy) -> Problem {
    let config = MlaConfig::deepseek(40, 16);
    Problem { policy, ..Problem::random(7, config, (DType::F32, DType::BF16), 2, &[300, 0, 17, 129]) }
}

#[test]
fn the_number_of_threads_does_not_change_a_bit() {
    let devices = [1, 2, 3, 8].map(Host::with_threads);
    for policy in [SplitPolicy::Fixed(1), SplitPolicy::Fixed(5), SplitPolicy::Invariant(64)] {
        let problem = problem(policy);
        let want = problem.check(&devices[0], "one thread");
        for device in &devices[1..] {
            assert!(problem.run(device).unwrap().bits == want.bits, "{policy:?} {device:?}");
        }
    }
    // A balanced plan is made by the number of threads, and so differs in the last places.
    let problem = problem(SplitPolicy::Auto);
    let want = problem.run(&devices[0]).unwrap();
    for device in &devices[1..] {
        let got = problem.run(device).unwrap();
        check_close("out", &got.out, &want.out, &common::tolerance(DType::F32)).unwrap();
    }
}

#[test]
fn facts() {
    let host = Host::with_threads(3);
    let info = host.device();
    assert_eq!((info.backend, info.num_compute_units, info.wave_size), ("host", 3, 1));
    assert!(!info.name.is_empty() && !info.arch.is_empty() && info.memory_bytes > 0);
    assert_eq!(Host::with_threads(0).device().num_compute_units, 1);
}

#[test]
fn the_memory_limit_counts_what_is_alive() {
    let host = Host::with_threads(1).with_memory_limit(10_000);
    assert_eq!(host.device().memory_bytes, 10_000);
    let first = host.alloc(6_000, "first").unwrap();
    assert!(matches!(
        host.alloc(6_000, "second"),
        Err(Error::OutOfMemory { backend: "host", bytes: 6_000, purpose: "second" })
    ));
    drop(first);
    assert!(host.alloc(10_000, "third").is_ok());
    // Scratch of the kernels counts, too.
    let decode = MlaDecode::new(&host, MlaConfig::deepseek(16, 16), DType::F32, DType::F32).unwrap();
    assert!(matches!(decode.plan(1, 1, 100, SplitPolicy::Auto), Err(Error::OutOfMemory { .. })));
}

#[test]
fn only_the_default_stream_can_be_borrowed() {
    let host = Host::with_threads(1);
    // SAFETY: the host follows no raw handle.
    unsafe {
        assert!(Stream::from_raw(&host, 0).is_ok());
        assert!(matches!(Stream::from_raw(&host, 0x1234), Err(Error::Argument { arg: "raw", .. })));
    }
}

#[test]
fn copies_break_a_capture() {
    let host = Host::with_threads(1);
    let target = Tensor::zeros(&host, [4], DType::I32).unwrap();
    let stream = host.create_stream().unwrap();
    // SAFETY: the tensor has these bytes.
    unsafe {
        host.begin_capture(&stream).unwrap();
        assert!(matches!(host.upload(&stream, target.addr(), &[1; 16]), Err(Error::CaptureFailed { .. })));
        assert!(matches!(host.end_capture(&stream), Err(Error::CaptureFailed { .. })));
        assert_eq!(target.to_vec::<i32>(&host).unwrap(), [0; 4]);

        host.begin_capture(&stream).unwrap();
        host.fill(&stream, target.addr(), 1, 8).unwrap();
        let graph = host.end_capture(&stream).unwrap();
        assert!(host.graph_bytes(&graph) > 0);
        assert_eq!(target.to_vec::<i32>(&host).unwrap(), [0; 4]);
        host.replay(&stream, &graph).unwrap();
        assert_eq!(target.to_vec::<i32>(&host).unwrap(), [0x0101_0101, 0x0101_0101, 0, 0]);

        host.begin_capture(&stream).unwrap();
        assert!(matches!(host.replay(&stream, &graph), Err(Error::CaptureFailed { .. })));
        host.abort_capture(&stream);
        assert!(matches!(host.end_capture(&stream), Err(Error::GraphState { call: "end capture", .. })));
        host.upload(&stream, target.addr(), &[2; 16]).unwrap();
    }
    assert_eq!(target.to_vec::<i32>(&host).unwrap(), [0x0202_0202; 4]);
}

/// A layer's attention without this step's schedule meets whatever stands in the table; it must not write by it.
#[test]
fn attention_without_a_schedule_is_an_error() {
    let host = Host::with_threads(2);
    let problem = Problem { query_len: 1, causal: false, ..problem(SplitPolicy::Auto) };
    let batch = problem.batch();
    let config = problem.config;
    let decode = MlaDecode::new(&host, config, DType::F32, DType::BF16).unwrap();
    let plan = decode.plan(batch, 1, 300, SplitPolicy::Auto).unwrap();
    let kv_cache = problem.kv_cache(&host).unwrap();
    let q = tensor(&host, [batch, 40, 576], DType::F32, &encode(DType::F32, &problem.q[..batch * 40 * 576]));
    let block_table = Tensor::from_slice(&host, [batch, problem.table_width()], &problem.block_table).unwrap();
    let seq_lens = Tensor::from_slice(&host, [batch], &problem.seq_lens).unwrap();
    let stream = Stream::new(&host).unwrap();
    for byte in [0xFF, 0x7F, 0x01] {
        let mut workspace = Workspace::new(&host, 1).unwrap();
        let views = plan.decode().workspace_views();
        let [table, ..] = workspace.views(0, &views).unwrap();
        // SAFETY: the view has this size.
        let table = unsafe { Tensor::<Host>::from_raw(table, DType::U8, &[views[0]], &[1]) }.unwrap();
        let width = problem.table_width();
        let mut step = decode.schedule(&stream, &plan, &mut workspace, &seq_lens, width, false).unwrap();
        table.fill_bytes(&host, byte).unwrap();
        let mut out = poisoned(&host, [batch, 40, 512], DType::F32).unwrap();
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
        let refused = step.attend(args);
        assert!(matches!(refused, Err(Error::Argument { arg: "schedule", .. })), "{byte:#x}: {refused:?}");
    }
}

#[test]
fn what_no_kernel_serves_is_refused_by_name() {
    let host = Host::with_threads(1);
    let narrow = MlaConfig { kv_lora_rank: 256, ..MlaConfig::deepseek(4, 16) };
    let refused = MlaDecode::new(&host, narrow, DType::F32, DType::U8).unwrap_err();
    assert!(matches!(refused, Error::Unsupported { backend: "host", .. }), "{refused}");
    assert!(refused.to_string().contains("512 + 64"), "{refused}");
    assert!(matches!(
        MlaDecode::new(&host, MlaConfig::deepseek(4, 16), DType::F32, DType::I32),
        Err(Error::Unsupported { .. })
    ));
}

#[test]
fn pages_without_a_token_are_no_cache() {
    let host = Host::new();
    let pages = Tensor::zeros(&host, [3, 0, 656], DType::U8).unwrap();
    let rows = Tensor::zeros(&host, [3, 0, 576], DType::BF16).unwrap();
    for refused in [KvCache::ds_mla(&pages), KvCache::split(&rows, None)] {
        assert!(matches!(refused, Err(Error::Shape { arg: "kv_cache", .. })), "{refused:?}");
    }
}

#[test]
fn rows_with_rope_values_off_a_word_are_no_cache() {
    let memory = Tensor::zeros(&Host::new(), [1, 3, 657], DType::U8).unwrap();
    for rows in [memory.columns(1..657).unwrap(), memory.narrow(1, 1..3).unwrap().columns(0..656).unwrap()] {
        assert!(matches!(KvCache::ds_mla(&rows), Err(Error::Argument { arg: "kv_cache", .. })));
    }
}
