//! Sessions: padding, replay in place, failures that leave the rest usable, limits, and typed errors for every bad input.

mod devices;
mod engine;

use engine::{Engine, config, tables};
use half::bf16;
use latentwave::graph::{CaptureState, RuntimeMode};
use latentwave::session::{DecodeSession, SessionConfig, StepBatch};
use latentwave::testing::SplitMix64;
use latentwave::{DType, Error, GraphBackend, GraphMode, KvCache, MlaConfig, MlaDecode, SplitPolicy, Tensor};

on_every_backend!(
    replays_see_new_lengths_tables_and_pages,
    a_graph_equals_the_same_step_run_eagerly,
    padding_rows_leak_nothing_and_real_rows_are_bit_equal_to_the_unpadded_batch,
    one_failed_capture_leaves_the_rest_usable,
    a_capture_broken_by_a_forbidden_call_is_reported_and_the_next_works,
    growth_after_the_lock_is_refused_and_names_the_caller,
    every_legal_shape_fits_what_was_reserved,
    out_of_bounds_input_is_a_typed_error_and_the_session_goes_on,
    a_session_may_be_dropped_with_work_in_flight,
    sizes_and_modes_that_cannot_be_are_refused,
    speculative_lengths_up_to_eight_keep_full_graphs,
    split_policies_agree,
    a_schedule_made_outside_a_capture_is_no_part_of_its_graph,
    a_plan_serves_only_the_layer_that_it_was_made_for,
    outputs_that_overlap_any_input_are_refused,
    a_step_tells_which_graphs_serve_it,
    short_sequences_have_graphs_of_their_own_where_that_is_faster,
    a_step_writes_only_caches_of_its_session,
);

fn session<B: GraphBackend>(backend: &B, config: SessionConfig) -> DecodeSession<B> {
    DecodeSession::new(backend, config).expect("session")
}

fn engine<B: GraphBackend>(backend: &B, config: SessionConfig, layers: usize, seed: u64) -> Engine<B> {
    Engine::new(backend, session(backend, config), layers, seed).expect("engine")
}

fn outputs<B: GraphBackend>(engine: &Engine<B>) -> Vec<u16> {
    let out: Vec<bf16> = engine.layers[0].out.to_vec(&engine.backend).expect("out");
    out.into_iter().map(bf16::to_bits).collect()
}

fn replays_see_new_lengths_tables_and_pages<B: GraphBackend>(backend: &B) {
    let mut engine = engine(backend, config(6, 0), 2, 1);
    engine.capture().and_then(|report| report.all()).expect("capture");
    let random = SplitMix64::new(11);
    for round in 0..12_u64 {
        let batch = 1 + random.below(3 * round, 6);
        let lens: Vec<i32> = (0..batch).map(|i| 1 + random.below(100 + 10 * round + i, 512) as i32).collect();
        let tables = tables(&lens, 16, engine.session.config().num_pages, 20 + round);
        engine.poison().expect("poison");
        let served = engine.step(1, &lens, &tables).expect("step");
        assert_eq!(served.mode, RuntimeMode::Full, "{served}");
        engine.verify(1, &lens, &tables, served.num_tokens);
    }
}

fn a_graph_equals_the_same_step_run_eagerly<B: GraphBackend>(backend: &B) {
    let lens = [129, 1, 16, 500];
    let mut captured = engine(backend, config(4, 0), 1, 2);
    captured.capture().and_then(|report| report.all()).expect("capture");
    let mut eager = engine(backend, SessionConfig { graph_mode: GraphMode::None, ..config(4, 0) }, 1, 2);
    let tables = tables(&lens, 16, captured.session.config().num_pages, 3);
    assert_eq!(captured.step(1, &lens, &tables).expect("step").mode, RuntimeMode::Full);
    assert_eq!(eager.step(1, &lens, &tables).expect("step").mode, RuntimeMode::None);
    assert_eq!(outputs(&captured), outputs(&eager));
}

/// vLLM issue 57017: padding sequences of a graph made NaN that spread. User report 1.
fn padding_rows_leak_nothing_and_real_rows_are_bit_equal_to_the_unpadded_batch<B: GraphBackend>(backend: &B) {
    let policy = SplitPolicy::Invariant(256);
    let with_size = |sizes: Vec<usize>| SessionConfig { capture_sizes: Some(sizes), policy, ..config(4, 0) };
    let lens = [17, 5, 9];
    let mut padded = engine(backend, with_size(vec![4]), 1, 4);
    let mut exact = engine(backend, with_size(vec![3]), 1, 4);
    let tables = tables(&lens, 16, padded.session.config().num_pages, 5);
    for engine in [&mut padded, &mut exact] {
        engine.capture().and_then(|report| report.all()).expect("capture");
        engine.poison().expect("poison");
    }
    let served = padded.step(1, &lens, &tables).expect("step");
    assert_eq!((served.mode, served.num_tokens, served.padding), (RuntimeMode::Full, 4, 1));
    let served = exact.step(1, &lens, &tables).expect("step");
    assert_eq!((served.mode, served.padding), (RuntimeMode::Full, 0));
    padded.verify(1, &lens, &tables, 4);
    let row = engine::HEADS * 512;
    assert_eq!(outputs(&padded)[..3 * row], outputs(&exact)[..3 * row]);
    assert!(outputs(&padded)[3 * row..4 * row].iter().all(|&bits| bits == 0), "padding rows are 0, not NaN");
}

fn one_failed_capture_leaves_the_rest_usable<B: GraphBackend>(backend: &B) {
    let config = SessionConfig { capture_sizes: Some(vec![1, 2, 4]), ..config(4, 0) };
    let mut engine = engine(backend, config, 1, 6);
    let Engine { session, layers, .. } = &mut engine;
    let layer = &mut layers[0];
    let report = session
        .capture(|step| {
            if step.stream().capture_state() == CaptureState::Capturing && step.num_tokens() == 2 {
                return Err(Error::argument("size", "2 is refused by this test"));
            }
            step.decode(&layer.q, &layer.cache, &mut layer.out, Some(&mut layer.lse))
        })
        .expect("the others are captured");
    assert_eq!(report.captured.iter().map(|key| key.num_tokens).collect::<Vec<_>>(), [4, 1]);
    let failed: Vec<_> = report.failed.iter().map(|(key, error)| (key.num_tokens, error.to_string())).collect();
    assert_eq!(failed, [(2, "argument `size`: 2 is refused by this test".to_owned())]);

    // Two sequences take the next larger graph; a second attempt captures what is missing.
    let lens = [3, 50];
    let tables = tables(&lens, 16, session.config().num_pages, 7);
    let served =
        session.step(&StepBatch::decode(1, &lens, &tables), |_| unreachable!("a graph serves this")).expect("step");
    assert_eq!((served.mode, served.num_tokens), (RuntimeMode::Full, 4));
    session.synchronize().expect("synchronize");
    let again = session
        .capture(|step| step.decode(&layer.q, &layer.cache, &mut layer.out, Some(&mut layer.lse)))
        .and_then(|report| report.all())
        .expect("capture");
    assert_eq!(again.captured.iter().map(|key| key.num_tokens).collect::<Vec<_>>(), [2]);
}

fn a_capture_broken_by_a_forbidden_call_is_reported_and_the_next_works<B: GraphBackend>(backend: &B) {
    let mut engine = engine(backend, SessionConfig { capture_sizes: Some(vec![2]), ..config(2, 0) }, 1, 8);
    let report = engine
        .session
        .capture(|step| {
            // The wrapper refuses to wait while capturing; an engine that swallows that has still broken nothing, one that goes
            // to the backend itself has.
            let stream = step.stream();
            if stream.capture_state() == CaptureState::Capturing {
                assert!(matches!(stream.synchronize(), Err(Error::GraphState { call: "synchronize", .. })));
                let _ = stream.backend().synchronize(stream.raw());
            }
            Ok(())
        })
        .expect("capture goes on");
    assert!(matches!(report.failed[..], [(_, Error::CaptureFailed { .. })]), "{report:?}");
    assert_eq!(engine.session.stream().capture_state(), CaptureState::Idle);

    engine.capture().and_then(|report| report.all()).expect("the next capture works");
    let lens = [20, 30];
    let tables = tables(&lens, 16, engine.session.config().num_pages, 9);
    let served = engine.step(1, &lens, &tables).expect("step");
    assert_eq!(served.mode, RuntimeMode::Full);
    engine.verify(1, &lens, &tables, 2);
}

fn short_sequences_have_graphs_of_their_own_where_that_is_faster<B: GraphBackend>(backend: &B) {
    const LONGEST: usize = 4_200;
    // 32 rows a sequence: as many as want other kernels when they are short.
    let config = SessionConfig { max_seq_len: LONGEST, num_pages: 600, capture_sizes: Some(vec![8]), ..config(2, 3) };
    let layer = MlaDecode::new(backend, config.mla, config.q_dtype, config.kv_dtype).expect("layer");
    let short = layer.kernels(2, 4, LONGEST).expect("kernels").short_seq_len;
    let bound = short.unwrap_or(4_096);
    let mut captured = engine(backend, config.clone(), 1, 40);
    let mut graphs = 0;
    let report = captured.capture_with(|stream| {
        graphs += usize::from(stream.capture_state() == CaptureState::Capturing);
        Ok(())
    });
    report.and_then(|report| report.all()).expect("capture");
    assert_eq!(graphs, 1 + usize::from(short.is_some()), "one for each kind of length");

    let mut eager = engine(backend, SessionConfig { graph_mode: GraphMode::None, ..config }, 1, 40);
    let at = bound as i32;
    for (round, lens) in [[30, at], [at + 1, 4], [200, 65], [5, LONGEST as i32], [at, 9]].into_iter().enumerate() {
        let tables = tables(&lens, 16, captured.session.config().num_pages, 41 + round as u64);
        captured.poison().expect("poison");
        let served = captured.step(4, &lens, &tables).expect("step");
        let fits = lens.iter().all(|&len| len <= at);
        let planned = if fits { short.unwrap_or(LONGEST) } else { LONGEST };
        assert_eq!((served.mode, served.max_seq_len), (RuntimeMode::Full, planned), "{lens:?}");
        captured.verify(4, &lens, &tables, served.num_tokens);
        assert_eq!(eager.step(4, &lens, &tables).expect("step").max_seq_len, planned, "{lens:?}");
        assert_eq!(outputs(&captured), outputs(&eager), "{lens:?}");
    }
}

fn growth_after_the_lock_is_refused_and_names_the_caller<B: GraphBackend>(backend: &B) {
    use latentwave::Workspace;
    let mut workspace = Workspace::new(backend, 1).expect("workspace");
    workspace.reserve(0, &[1000]).expect("reserve");
    workspace.lock();
    let line = line!() + 1;
    let error = workspace.reserve(0, &[5000]).expect_err("locked");
    let Error::WorkspaceLocked { slot: 0, need, have, caller } = error else { panic!("{error:?}") };
    assert_eq!((need, have), (5120, 1024));
    assert_eq!((caller.file(), caller.line()), (file!(), line));
}

/// vLLM issues 43357 and 43026: a term was missed in the reservation. User report 17.
fn every_legal_shape_fits_what_was_reserved<B: GraphBackend>(backend: &B) {
    let mut engine = engine(backend, SessionConfig { graph_mode: GraphMode::None, ..config(5, 3) }, 1, 10);
    for query_len in 1..=4_usize {
        for batch in 1..=5_usize {
            let lens: Vec<i32> = (0..batch as i32).map(|i| 512 - 60 * i).collect();
            let tables = tables(&lens, 16, engine.session.config().num_pages, 11);
            let served = engine.step(query_len, &lens, &tables).expect("a legal step");
            assert_eq!(served.num_tokens, batch * query_len);
        }
    }
}

fn a_step_writes_only_caches_of_its_session<B: GraphBackend>(backend: &B) {
    let mut engine = engine(backend, config(2, 0), 1, 12);
    let mla = engine.session.config().mla;
    let kv_c = Tensor::zeros(backend, [2, mla.kv_lora_rank], DType::BF16).expect("rows");
    let k_pe = Tensor::zeros(backend, [2, mla.qk_rope_head_dim], DType::BF16).expect("rows");
    let mut write = |dtype, mla: MlaConfig| {
        let cache = KvCache::zeros(backend, 4, &mla, dtype).expect("cache");
        let k_pe = (mla.qk_rope_head_dim > 0).then_some(&k_pe);
        engine.session.step(&StepBatch::decode(1, &[1], &[[0]]), |step| step.write_cache(&kv_c, k_pe, &cache))
    };
    assert!(write(DType::BF16, mla).is_ok());
    assert!(matches!(write(DType::F16, mla), Err(Error::Argument { arg: "kv_cache", .. })));
    for other in [
        MlaConfig { page_size: mla.page_size * 2, ..mla },
        MlaConfig { kv_lora_rank: mla.kv_lora_rank / 2, ..mla },
        MlaConfig { qk_rope_head_dim: 0, ..mla },
    ] {
        assert!(matches!(write(DType::BF16, other), Err(Error::Shape { arg: "kv_cache", .. })), "{other:?}");
    }
}

fn out_of_bounds_input_is_a_typed_error_and_the_session_goes_on<B: GraphBackend>(backend: &B) {
    let mut engine = engine(backend, config(2, 1), 1, 12);
    engine.capture().and_then(|report| report.all()).expect("capture");
    let pages = engine.session.config().num_pages as i32;
    let one = |page: i32| vec![vec![page, 1, 2]];
    let error = |engine: &mut Engine<B>, query_len, lens: &[i32], tables: &[Vec<i32>]| {
        engine.session.step(&StepBatch::decode(query_len, lens, tables), |_| Ok(())).expect_err("must be refused")
    };
    let cases = [
        (error(&mut engine, 2, &[20], &one(pages)), "PageOutOfRange"),
        (error(&mut engine, 2, &[20], &one(-1)), "PageOutOfRange"),
        (error(&mut engine, 2, &[49], &one(0)), "SeqLenOutOfRange"),
        (error(&mut engine, 2, &[-2], &one(0)), "SeqLenOutOfRange"),
        (error(&mut engine, 2, &[513], &[(0..40).collect()]), "SeqLenOutOfRange"),
        (error(&mut engine, 3, &[20], &one(0)), "Argument"),
        (error(&mut engine, 0, &[20], &one(0)), "Argument"),
        (error(&mut engine, 2, &[20, 20], &one(0)), "Argument"),
        (error(&mut engine, 1, &[1, 1, 1], &[vec![0], vec![1], vec![2]]), "Capacity"),
    ];
    for (error, kind) in cases {
        assert!(format!("{error:?}").starts_with(kind), "{kind}: {error:?}");
    }
    let table = one(0);
    let many = StepBatch { prefill_tokens: 1 << 20, prefill_reqs: 1, ..StepBatch::decode(1, &[20], &table) };
    assert!(matches!(engine.session.step(&many, |_| Ok(())), Err(Error::Capacity { .. })));
    let most =
        StepBatch { prefill_tokens: usize::MAX, prefill_reqs: usize::MAX, ..StepBatch::decode(1, &[20], &table) };
    assert!(matches!(engine.session.step(&most, |_| Ok(())), Err(Error::Capacity { .. })));

    let served = engine.step(2, &[20], &one(0)).expect("a good step after the bad ones");
    engine.verify(2, &[20], &one(0), served.num_tokens);
}

fn a_session_may_be_dropped_with_work_in_flight<B: GraphBackend>(backend: &B) {
    for round in 0..3 {
        let mut engine = engine(backend, config(4, 0), 2, 13 + round);
        engine.capture().and_then(|report| report.all()).expect("capture");
        let lens = [500, 400, 300, 200];
        let tables = tables(&lens, 16, engine.session.config().num_pages, 14);
        let Engine { session, layers, .. } = &mut engine;
        for _ in 0..20 {
            let served = session.step(&StepBatch::decode(1, &lens, &tables), |_| unreachable!("a graph serves this"));
            assert_eq!(served.expect("step").mode, RuntimeMode::Full);
        }
        // Tensors go first, then the session, all without waiting: the graphs own what they touch.
        layers.clear();
        drop(engine);
    }
}

fn sizes_and_modes_that_cannot_be_are_refused<B: GraphBackend>(backend: &B) {
    let refused = |config: SessionConfig, arg: &str| {
        let error = DecodeSession::new(backend, config).expect_err("must be refused");
        assert!(matches!(&error, Error::Argument { arg: got, .. } if *got == arg), "{arg}: {error:?}");
    };
    refused(SessionConfig { max_num_seqs: 0, ..config(2, 0) }, "max_num_seqs");
    refused(SessionConfig { max_num_seqs: 1 << 21, ..config(2, 0) }, "max_num_seqs");
    refused(SessionConfig { num_spec_tokens: usize::MAX, ..config(2, 0) }, "num_spec_tokens");
    refused(SessionConfig { max_seq_len: 0, ..config(2, 0) }, "max_seq_len");
    refused(SessionConfig { num_pages: 0, ..config(2, 0) }, "num_pages");
    refused(SessionConfig { max_num_batched_tokens: 7, ..config(2, 3) }, "max_num_batched_tokens");
    refused(SessionConfig { kv_scale: f32::NAN, ..config(2, 0) }, "kv_scale");
    refused(SessionConfig { kv_scale: 0.5, ..config(2, 0) }, "kv_scale");
    refused(SessionConfig { capture_sizes: Some(vec![]), ..config(2, 0) }, "sizes");
    refused(SessionConfig { capture_sizes: Some(vec![0, 1]), ..config(2, 0) }, "sizes");
    refused(SessionConfig { policy: SplitPolicy::Fixed(0), ..config(2, 0) }, "policy");
    let mut mla = config(2, 0).mla;
    mla.num_heads = 0;
    refused(SessionConfig { mla, ..config(2, 0) }, "num_heads");
    mla = config(2, 0).mla;
    mla.sm_scale = f32::INFINITY;
    refused(SessionConfig { mla, ..config(2, 0) }, "sm_scale");
    let dtype = DecodeSession::new(backend, SessionConfig { q_dtype: DType::I32, ..config(2, 0) });
    assert!(matches!(dtype, Err(Error::DType { arg: "q", got: DType::I32, .. })));
    let too_large = Tensor::<B>::zeros(backend, [usize::MAX / 2, 4], DType::F32);
    assert!(matches!(too_large, Err(Error::Argument { arg: "shape", .. })));
    let too_large = Tensor::<B>::from_fn(backend, [usize::MAX / 2, 4], |_| 0.0_f32);
    assert!(matches!(too_large, Err(Error::Argument { arg: "shape", .. })));
    let too_large = Tensor::<B>::from_fn(backend, [1 << 58], |_| 0.0_f32);
    assert!(matches!(too_large, Err(Error::OutOfMemory { .. })));
    let small = Tensor::<B>::zeros(backend, [4, 4], DType::F32).expect("small");
    assert!(matches!(small.reshape([usize::MAX, 16]), Err(Error::Argument { arg: "shape", .. })));
}

fn speculative_lengths_up_to_eight_keep_full_graphs<B: GraphBackend>(backend: &B) {
    for drafts in [1, 2, 3, 7] {
        let mut engine = engine(backend, config(3, drafts), 1, 15 + drafts as u64);
        engine.capture().and_then(|report| report.all()).expect("capture");
        let query_len = drafts + 1;
        // The second sequence is shorter than the block: its first rows see nothing.
        let lens = [100 + drafts as i32, drafts as i32, 64];
        let tables = tables(&lens, 16, engine.session.config().num_pages, 16);
        engine.poison().expect("poison");
        let served = engine.step(query_len, &lens, &tables).expect("step");
        assert_eq!((served.mode, served.num_tokens), (RuntimeMode::Full, 3 * query_len));
        engine.verify(query_len, &lens, &tables, served.num_tokens);
    }
}

fn split_policies_agree<B: GraphBackend>(backend: &B) {
    let lens = [512, 65, 1, 300];
    let policies = [
        SplitPolicy::Auto,
        SplitPolicy::MinTokens(64),
        SplitPolicy::Fixed(1),
        SplitPolicy::Fixed(7),
        SplitPolicy::Invariant(64),
        SplitPolicy::Invariant(1000),
    ];
    for policy in policies {
        let mut engine = engine(backend, SessionConfig { policy, ..config(4, 0) }, 1, 17);
        engine.capture().and_then(|report| report.all()).expect("capture");
        let tables = tables(&lens, 16, engine.session.config().num_pages, 18);
        engine.poison().expect("poison");
        let served = engine.step(1, &lens, &tables).expect("step");
        engine.verify(1, &lens, &tables, served.num_tokens);
    }
}

/// Layers captured without their plan kernel would replay over whatever stands in the scratch by then.
fn a_schedule_made_outside_a_capture_is_no_part_of_its_graph<B: GraphBackend>(backend: &B) {
    use latentwave::{DecodeArgs, MlaConfig, MlaDecode, Stream, Workspace};
    let mla = MlaConfig::deepseek(4, 16);
    let decode = MlaDecode::new(backend, mla, DType::BF16, DType::BF16).expect("decode");
    let plan = decode.plan(1, 1, 64, SplitPolicy::Auto).expect("plan");
    let mut workspace = Workspace::new(backend, 1).expect("workspace");
    let kv_cache = latentwave::KvCache::zeros(backend, 4, &mla, DType::BF16).expect("cache");
    let q = Tensor::zeros(backend, [1, 4, 576], DType::BF16).expect("q");
    let mut out = Tensor::zeros(backend, [1, 4, 512], DType::BF16).expect("out");
    let block_table = Tensor::from_slice(backend, [1, 4], &[0, 1, 2, 3]).expect("table");
    let seq_lens = Tensor::from_slice(backend, [1], &[40]).expect("lens");
    let other_lens = Tensor::from_slice(backend, [1], &[4]).expect("lens");

    let stream = Stream::new(backend).expect("stream");
    let mut step = decode.schedule(&stream, &plan, &mut workspace, &seq_lens, 4, true).expect("schedule");
    let mut attend = |seq_lens| {
        let (q, kv_cache, block_table, out) = (&q, &kv_cache, &block_table, &mut out);
        step.attend(DecodeArgs { q, kv_cache, block_table, seq_lens, out, lse: None, kv_scale: 1.0, causal: true })
    };
    attend(&seq_lens).expect("the schedule's own time");
    let error = attend(&other_lens).expect_err("other lengths than were scheduled");
    assert!(matches!(error, Error::Argument { arg: "seq_lens", .. }), "{error:?}");
    let mut inside = None;
    let graph = stream.capture(|| {
        inside = Some(attend(&seq_lens));
        Ok(())
    });
    assert!(graph.is_ok());
    assert!(matches!(inside, Some(Err(Error::GraphState { .. }))), "{inside:?}");
    let after = attend(&seq_lens);
    assert!(matches!(after, Err(Error::GraphState { .. })), "the scratch may have been used since: {after:?}");
    stream.synchronize().expect("synchronize");
}

/// Scratch and kernels of another layer's plan do not fit.
fn a_plan_serves_only_the_layer_that_it_was_made_for<B: GraphBackend>(backend: &B) {
    use latentwave::{MlaConfig, MlaDecode, Stream, Workspace};
    let mla = MlaConfig::deepseek(4, 16);
    let narrow = MlaConfig { kv_lora_rank: 256, ..mla };
    let decode = |mla, dtype| MlaDecode::new(backend, mla, dtype, dtype).expect("decode");
    let (own, stream) = (decode(mla, DType::BF16), Stream::new(backend).expect("stream"));
    let seq_lens = Tensor::from_slice(backend, [1], &[40]).expect("lens");
    for other in [decode(narrow, DType::BF16), decode(mla, DType::F16), decode(MlaConfig::deepseek(8, 16), DType::BF16)]
    {
        let plan = other.plan(1, 1, 64, SplitPolicy::Fixed(6)).expect("plan");
        let mut workspace = Workspace::new(backend, 1).expect("workspace");
        let refused = own.schedule(&stream, &plan, &mut workspace, &seq_lens, 4, true).err();
        assert!(matches!(refused, Some(Error::Argument { arg: "plan", .. })), "{refused:?}");
    }
}

fn outputs_that_overlap_any_input_are_refused<B: GraphBackend>(backend: &B) {
    use latentwave::{DecodeArgs, KvCache, MlaConfig, MlaDecode, Stream, Workspace};
    let mla = MlaConfig::deepseek(4, 16);
    let decode = MlaDecode::new(backend, mla, DType::BF16, DType::BF16).expect("decode");
    let plan = decode.plan(1, 1, 64, SplitPolicy::Auto).expect("plan");
    let latent = Tensor::zeros(backend, [8, 16, 512], DType::BF16).expect("latent");
    let rope = Tensor::zeros(backend, [8, 16, 64], DType::BF16).expect("rope");
    let q = Tensor::zeros(backend, [1, 4, 576], DType::BF16).expect("q");
    let kv_cache = KvCache::split(&latent, Some(&rope)).expect("cache");
    let (block_table, seq_lens) = (
        Tensor::from_slice(backend, [1, 4], &[0, 1, 2, 3]).expect("table"),
        Tensor::from_slice(backend, [1], &[40]).expect("lens"),
    );
    let stream = Stream::new(backend).expect("stream");
    for input in [&latent, &rope] {
        let mut out =
            input.reshape([input.len() / 2048, 4, 512]).and_then(|rows| rows.narrow(0, 1..2)).expect("a view");
        let mut workspace = Workspace::new(backend, 1).expect("workspace");
        let (kv_cache, block_table, seq_lens) = (&kv_cache, &block_table, &seq_lens);
        let args = DecodeArgs {
            q: &q,
            kv_cache,
            block_table,
            seq_lens,
            out: &mut out,
            lse: None,
            kv_scale: 1.0,
            causal: true,
        };
        let refused = decode.run(&stream, &plan, &mut workspace, args);
        assert!(matches!(refused, Err(Error::Argument { arg: "out", .. })), "{refused:?}");
    }
    let memory = Tensor::zeros(backend, [4, 512], DType::BF16).expect("memory");
    // SAFETY: inside the tensor above, and refused before anything is written.
    let mut out = unsafe { Tensor::from_raw(memory.addr(), DType::BF16, &[1, 4, 512], &[2048, 1, 1]) }.expect("rows");
    let mut workspace = Workspace::new(backend, 1).expect("workspace");
    let (kv_cache, block_table, seq_lens) = (&kv_cache, &block_table, &seq_lens);
    let args =
        DecodeArgs { q: &q, kv_cache, block_table, seq_lens, out: &mut out, lse: None, kv_scale: 1.0, causal: true };
    let refused = decode.run(&stream, &plan, &mut workspace, args);
    assert!(matches!(refused, Err(Error::Argument { arg: "out", .. })), "heads upon each other: {refused:?}");
}

fn a_step_tells_which_graphs_serve_it<B: GraphBackend>(backend: &B) {
    let config = SessionConfig { capture_sizes: Some(vec![4, 16]), ..config(4, 0) };
    let mut session = session(backend, config.clone());
    let mut seen = Vec::new();
    session
        .capture(|step| {
            seen.push((step.mode(), step.num_tokens(), step.graph_tokens()));
            Ok(())
        })
        .expect("capture");
    // Once eagerly, then into the one full graph: no decode batch has 16 sequences.
    assert_eq!(seen, [(RuntimeMode::None, 4, 4), (RuntimeMode::Full, 4, 4)]);

    let table = tables(&[20], 16, config.num_pages, 3);
    for (prefill_tokens, wanted) in
        [(9, (RuntimeMode::Piecewise, 10, 16)), (2, (RuntimeMode::Piecewise, 3, 4)), (16, (RuntimeMode::None, 17, 17))]
    {
        let batch = StepBatch { prefill_tokens, prefill_reqs: 1, ..StepBatch::decode(1, &[20], &table) };
        let mut got = None;
        let report = session
            .step(&batch, |step| {
                got = Some((step.mode(), step.num_tokens(), step.graph_tokens()));
                Ok(())
            })
            .expect("step");
        assert_eq!((got, report.mode), (Some(wanted), wanted.0), "{prefill_tokens} prompt tokens: {report}");
    }
}
