//! Reports on policy: modes, sizes, dispatch, reservations, lengths.

use std::panic::Location;

use latentwave::backend::{DecodeKernels, DeviceInfo};
use latentwave::batch::{DcpShard, ReorderThreshold, SplitRequest, flatten_rows};
use latentwave::graph::builder::minimum_support;
use latentwave::graph::{
    AttentionBuilder, Batch, BatchDescriptor, BuilderSpec, CaptureBatch, DriverFacts, DriverRule, EngineFacts,
    GraphDispatcher, GraphMode, GraphSupport, KeyRequest, MinimumSupport, Misfit, MlaBuilder, QueryLenSupport, Reason,
    ResolveRequest, RuntimeMode, SizeReason, SizeRequest, graph_keys, resolve,
};
use latentwave::kernel::params::PartialOrder;
use latentwave::kernel::{Entry, Variant};
use latentwave::plan::{self, DecodePlan, PlanShape, ScratchReservation, SplitPolicy, scratch_shape};
use latentwave::workspace::{Fit, SlotTable, layout};
use latentwave::{DType, Error};

const ENGINE: EngineFacts = EngineFacts { attention_separable: true, piecewise_capture: true };

/// A dispatcher with every graph of a mode captured.
fn dispatcher(mode: GraphMode, sizes: &[usize], max_num_seqs: usize, query_len: usize) -> GraphDispatcher {
    let keys = graph_keys(&KeyRequest {
        mode,
        sizes,
        max_num_seqs,
        query_lens: &[query_len],
        varlen_decode: false,
        variants: &[0],
    });
    let mut dispatcher = GraphDispatcher::new(keys.unwrap()).unwrap();
    dispatcher.set_all_captured();
    dispatcher
}

fn device(arch: &str, driver_version: &str) -> DeviceInfo {
    DeviceInfo {
        backend: "rocm",
        name: "a GPU".into(),
        arch: arch.into(),
        index: 0,
        num_compute_units: 304,
        wave_size: 64,
        shared_bytes_per_block: 65_536,
        memory_bytes: 1 << 37,
        driver_version: driver_version.into(),
    }
}

/// Reports the flags of the vLLM versions with the defect.
struct Lying;

impl AttentionBuilder for Lying {
    fn name(&self) -> &str {
        "lying"
    }

    fn query_len_support(&self) -> QueryLenSupport {
        QueryLenSupport::SingleOnly
    }

    fn decode_threshold(&self) -> usize {
        1
    }

    fn graph_support(&self) -> GraphSupport {
        GraphSupport::UniformBatch
    }
}

fn mode_of(builder: &dyn AttentionBuilder, requested: GraphMode, query_len: usize) -> (GraphMode, Vec<Reason>) {
    let minimum = minimum_support([builder]);
    let request =
        ResolveRequest { requested: Some(requested), minimum: &minimum, query_len, engine: ENGINE, driver: None };
    let resolved = resolve(&request).unwrap();
    (resolved.mode, resolved.because)
}

/// vLLM #47144, #47310: uniform batches claimed over a kernel for single tokens; capture with one draft token asserts.
#[test]
fn report_04_support_beyond_the_kernel_cannot_be_claimed() {
    let single =
        |claim| BuilderSpec { claim, draft_tokens: Some(1), ..BuilderSpec::new("single", QueryLenSupport::SingleOnly) };
    let error = MlaBuilder::new(single(Some(GraphSupport::UniformBatch))).unwrap_err();
    assert!(matches!(error, Error::InconsistentGraphSupport { .. }));
    assert!(error.to_string().contains("UNIFORM_BATCH") && error.to_string().contains("SINGLE_ONLY"), "{error}");

    // A foreign builder can still say so: then the capture check speaks, before anything is captured.
    assert_eq!(mode_of(&Lying, GraphMode::FullAndPiecewise, 2).0, GraphMode::FullAndPiecewise);
    let error = Lying.check_capture(&CaptureBatch { num_reqs: 4, num_tokens: 8, max_query_len: 2 }).unwrap_err();
    assert!(matches!(error, Error::CaptureQueryTooLong { max_query_len: 2, threshold: 1, .. }));
    assert!(error.to_string().contains("max_query_len 2 > threshold 1"), "{error}");
    Lying.check_capture(&CaptureBatch { num_reqs: 4, num_tokens: 4, max_query_len: 1 }).unwrap();

    // An honest one is weakened before capture, and the reason names it.
    let (mode, because) = mode_of(&MlaBuilder::new(single(None)).unwrap(), GraphMode::FullAndPiecewise, 2);
    assert_eq!(mode, GraphMode::Piecewise);
    assert!(because[0].to_string().contains("`single` has UNIFORM_SINGLE_TOKEN_DECODE"), "{}", because[0]);

    // One whose kernel takes several tokens keeps its full graphs.
    let spec = BuilderSpec { draft_tokens: Some(1), ..BuilderSpec::new("several", QueryLenSupport::Uniform) };
    let several = MlaBuilder::new(spec).unwrap();
    assert_eq!(mode_of(&several, GraphMode::FullAndPiecewise, 2).0, GraphMode::FullAndPiecewise);
    several.check_capture(&CaptureBatch { num_reqs: 4, num_tokens: 8, max_query_len: 2 }).unwrap();
}

/// The same defect through DCP (vLLM 0.33.0): the threshold goes back to one token, the claim stays.
#[test]
fn report_04_a_threshold_lowered_by_dcp_lowers_support() {
    let spec =
        BuilderSpec { draft_tokens: Some(3), dcp_size: 2, ..BuilderSpec::new("sharded", QueryLenSupport::Uniform) };
    let builder = MlaBuilder::new(spec.clone()).unwrap();
    assert_eq!((builder.decode_threshold(), builder.graph_support()), (1, GraphSupport::UniformSingleTokenDecode));
    assert_eq!(mode_of(&builder, GraphMode::FullAndPiecewise, 4).0, GraphMode::Piecewise);

    let builder = MlaBuilder::new(BuilderSpec { multi_token_dcp: true, ..spec }).unwrap();
    assert_eq!((builder.decode_threshold(), builder.graph_support()), (4, GraphSupport::UniformBatch));
}

/// vLLM #51065, #51848: a verify block reached decode with more rows than its table has, and read past it.
#[test]
fn report_05_rows_that_do_not_share_out_evenly_are_refused() {
    assert!(matches!(flatten_rows(&[9, 20], 7, true, 1), Err(Error::UnevenRows { num_rows: 7, num_reqs: 2 })));
    assert!(matches!(flatten_rows(&[], 3, true, 1), Err(Error::UnevenRows { .. })));
    let rows = flatten_rows(&[9, 2], 8, true, 1).unwrap();
    assert_eq!(rows.extents, [6, 7, 8, 9, 0, 0, 1, 2]);
    assert_eq!(rows.requests, [0, 0, 0, 0, 1, 1, 1, 1]);
}

/// vLLM #50391: under DCP the local lengths of a block's tokens do not follow from the last one.
#[test]
fn report_07_local_lengths_of_each_token_of_a_block() {
    let mut underivable = 0;
    for size in 1..=8 {
        for interleave in [1, 2, 4, 16, 64] {
            for history in 0..300 {
                let local = |rank, len| DcpShard::new(rank, size, interleave).unwrap().local_len(len);
                for j in 0..4 {
                    let len = history + j + 1;
                    assert_eq!((0..size).map(|rank| local(rank, len)).sum::<usize>(), len);
                    // Exactly one rank holds the token that came last.
                    let owners = (0..size).filter(|&rank| local(rank, len) == local(rank, len - 1) + 1).count();
                    assert_eq!(owners, 1, "{len} tokens, {size} ranks, interleave {interleave}");
                    let guessed = (local(0, history + 4) + j + 1).saturating_sub(4);
                    underivable += usize::from(guessed != local(0, len));
                }
            }
        }
    }
    assert!(underivable > 0);
    assert!(matches!(flatten_rows(&[9, 9], 4, true, 2), Err(Error::CausalDcp { query_len: 2, dcp_size: 2 })));
    assert_eq!(flatten_rows(&[9, 7], 4, false, 2).unwrap().extents, [9, 9, 7, 7]);
    assert!(matches!(DcpShard::new(2, 2, 1), Err(Error::Argument { arg: "rank", .. })));
    assert!(matches!(DcpShard::new(0, 2, 0), Err(Error::Argument { arg: "interleave", .. })));
}

fn kernels(block_rows: u32, query_group: usize) -> DecodeKernels {
    let variant = |entry| Variant { block_rows, tile_tokens: 32, ..Variant::simple(entry, DType::F32) };
    DecodeKernels {
        split: variant(Entry::DecodeSplit),
        reduce: variant(Entry::DecodeReduce),
        plan: variant(Entry::Plan),
        query_group,
        blocks_per_unit: 2,
        fixed_cost: 1,
        split_shared_bytes: 0,
        own_pieces: false,
        few: None,
        short_seq_len: None,
        merged_pieces: 0,
        partial_dtype: DType::F32,
        partial_order: PartialOrder::InOrder,
        reduce_blocks: 64,
        row_alignment: 1,
        max_query_len: usize::MAX,
    }
}

const POLICIES: [SplitPolicy; 5] = [
    SplitPolicy::Auto,
    SplitPolicy::MinTokens(64),
    SplitPolicy::Fixed(1),
    SplitPolicy::Fixed(16),
    SplitPolicy::Invariant(256),
];

/// vLLM #43357, #43026: "Workspace is locked" on the first long prompt, because the reservation missed a term.
#[test]
fn report_17_every_legal_step_fits_what_was_reserved() {
    const MAX: PlanShape = PlanShape { batch: 33, query_len: 4, num_heads: 16, kv_lora_rank: 512, max_seq_len: 20_000 };
    let device = device("gfx942:sramecc+:xnack-", "7.0.0");
    let caller = Location::caller();
    for policy in POLICIES {
        let plan = |shape| DecodePlan::new(shape, policy, &kernels(16, 4), &device).unwrap();
        let bytes = |shape| layout(&plan(shape).workspace_views()).unwrap().1;
        let mut slots = SlotTable::new(1).unwrap();
        for query_len in 1..=MAX.query_len {
            if let Fit::Grow(bytes) = slots.fit(0, bytes(PlanShape { query_len, ..MAX }), caller).unwrap() {
                slots.replaced(0, bytes).unwrap();
            }
        }
        slots.lock();
        for batch in 1..=MAX.batch {
            for query_len in 1..=MAX.query_len {
                for max_seq_len in [0, 1, 255, 256, 257, 511, 512, 1024, 4095, 16_384, 20_000] {
                    let shape = PlanShape { batch, query_len, max_seq_len, ..MAX };
                    assert_eq!(slots.fit(0, bytes(shape), caller).unwrap(), Fit::Fits, "{policy:?} {shape:?}");
                }
            }
        }
    }
    let reservation = ScratchReservation {
        max_num_seqs: 8,
        decode_threshold: 4,
        num_heads: 16,
        dcp_size: 2,
        max_seq_len: 20_000,
        num_compute_units: 132,
        kv_lora_rank: 512,
    };
    let reserved = reservation.bytes().unwrap();
    for rows in 1..=8 * 4 {
        for len in 0..=20_000 {
            let shape = scratch_shape(rows, 32, plan::num_kv_splits(len, 132), 512);
            assert!(shape.iter().product::<usize>() * 4 <= reserved, "{rows} rows of {len} tokens");
        }
    }
}

/// vLLM #57355; vllm-ascend #16049: 100 sequences at most, and batches of 97 to 100 had no full graph.
#[test]
fn report_21_the_widest_decode_batch_is_captured() {
    let sizes = SizeRequest::new(GraphMode::FullAndPiecewise, 100, 8192, 1).resolve().unwrap();
    assert!(sizes.sizes.contains(&100));
    let dispatcher = dispatcher(GraphMode::FullAndPiecewise, &sizes.sizes, 100, 1);
    for num_reqs in 97..=100 {
        let got = dispatcher.dispatch(&Batch::uniform(num_reqs, 1));
        assert_eq!((got.descriptor.mode, got.descriptor.num_tokens), (RuntimeMode::Full, 100));
    }
}

/// The same where the user names the largest size, off the grid (vLLM 0.33.0 truncates 42 to 40).
#[test]
fn report_21_a_users_largest_size_is_captured() {
    let request = SizeRequest { max_size: Some(42), ..SizeRequest::new(GraphMode::FullAndPiecewise, 6, 8192, 7) };
    let sizes = request.resolve().unwrap();
    assert_eq!(sizes.max_size(), 42);
    assert_eq!(sizes.because, []);
    let got = dispatcher(GraphMode::FullAndPiecewise, &sizes.sizes, 6, 7).dispatch(&Batch::uniform(6, 7));
    assert_eq!(got.descriptor.mode, RuntimeMode::Full);

    // Where the maximum is too small for the widest batch, that batch is named.
    let sizes = SizeRequest { max_size: Some(41), ..request }.resolve().unwrap();
    assert_eq!(sizes.because, [SizeReason::WidestDecodeLost { from_seqs: 6, to_seqs: 6 }]);
    // And a maximum above the grid's end but off the decode grid does not lose it.
    let sizes = SizeRequest { max_size: Some(100), ..request }.resolve().unwrap();
    assert!(sizes.sizes.contains(&42) && sizes.sizes.contains(&100));
}

/// vLLM #50488: the default maximum counted tokens as if each request had one, and the widest speculative batch had no graph.
#[test]
fn report_23_speculative_batches_within_the_ceiling_are_captured() {
    let sizes = SizeRequest::new(GraphMode::FullAndPiecewise, 32, 8192, 17).resolve().unwrap();
    for count in [1, 2, 4, 8, 16, 24] {
        assert!(sizes.sizes.contains(&(count * 17)), "{count} sequences");
    }
    let dispatcher = dispatcher(GraphMode::FullAndPiecewise, &sizes.sizes, 32, 17);
    let full = |num_reqs| dispatcher.dispatch(&Batch::uniform(num_reqs, 17)).descriptor.mode == RuntimeMode::Full;
    let captured = (1..=32).filter(|&num_reqs| full(num_reqs)).count();
    // 512 tokens hold 30 such requests; the rest is named.
    assert!(captured >= 29 && (1..=captured).all(full));
    let lost = SizeReason::WidestDecodeLost { from_seqs: captured + 1, to_seqs: 32 };
    assert_eq!(sizes.because, [lost]);
}

/// vLLM #53407, #52000: a uniform batch between sizes took a piecewise graph though a slightly larger full one fits.
#[test]
fn report_24_a_slightly_larger_full_graph_serves() {
    let dispatcher = dispatcher(GraphMode::FullAndPiecewise, &[1, 2, 4, 8, 16, 24], 8, 3);
    let got = dispatcher.dispatch(&Batch::uniform(4, 3));
    assert_eq!((got.descriptor.mode, got.descriptor.num_tokens, got.padding), (RuntimeMode::Full, 18, 6));
    assert_eq!(got.to_string(), "FULL 18 (6 of padding)");
    let got = dispatcher.dispatch(&Batch::mixed(4, 12));
    assert_eq!((got.descriptor.mode, got.descriptor.num_tokens), (RuntimeMode::Piecewise, 16));
    assert_eq!(got.misfit, Some(Misfit::QueryLen));
}

/// The same after one capture failed: the next larger graph serves, and nothing serves that was not captured.
#[test]
fn report_24_a_graph_that_failed_is_passed_over() {
    let mut all = dispatcher(GraphMode::FullDecodeOnly, &[1, 2, 4, 8], 8, 1);
    let keys = all.keys().to_vec();
    let mut some = GraphDispatcher::new(keys.clone()).unwrap();
    assert_eq!(some.dispatch(&Batch::uniform(1, 1)).misfit, Some(Misfit::Tokens { largest: 0 }));
    for (graph, key) in keys.iter().enumerate().filter(|(_, key)| key.num_tokens != 4) {
        some.set_captured(graph).unwrap();
        assert_eq!(some.dispatch(&Batch::uniform(key.num_reqs.unwrap(), 1)).graph, Some(graph));
    }
    assert_eq!(some.dispatch(&Batch::uniform(3, 1)).descriptor.num_tokens, 8);
    assert_eq!(all.dispatch(&Batch::uniform(3, 1)).descriptor.num_tokens, 4);
    assert_eq!(some.dispatch(&Batch::uniform(9, 1)).misfit, Some(Misfit::Tokens { largest: 8 }));
    assert!(all.set_captured(keys.len()).is_err());
    assert!(GraphDispatcher::new(vec![keys[0], keys[0]]).is_err());
}

/// vLLM #28207, #28015: a size that holds no whole number of queries captured a ragged last request, read as a prefill.
#[test]
fn report_25_decode_graphs_hold_whole_queries() {
    for query_len in 2..=9 {
        let sizes = SizeRequest::new(GraphMode::FullAndPiecewise, 48, 8192, query_len).resolve().unwrap().sizes;
        let keys = dispatcher(GraphMode::FullAndPiecewise, &sizes, 48, query_len).keys().to_vec();
        let decode = |key: &&BatchDescriptor| key.mode == RuntimeMode::Full;
        assert!(keys.iter().any(|key| decode(&key)));
        for key in keys.iter().filter(decode) {
            assert_eq!(key.num_tokens % query_len, 0);
            let captured = key.num_reqs.unwrap();
            // A smaller batch, padded: the padding requests have no query tokens.
            for real in 1..=captured {
                let mut query_lens = vec![query_len; real];
                query_lens.resize(captured, 0);
                let request = SplitRequest {
                    query_lens: &query_lens,
                    num_tokens: key.num_tokens,
                    max_query_len: query_len,
                    decode_threshold: query_len,
                    require_uniform: true,
                    is_prefilling: None,
                };
                let split = request.split().unwrap();
                assert_eq!((split.num_decodes, split.num_prefills, split.num_prefill_tokens), (captured, 0, 0));
            }
        }
    }
}

/// vLLM #50629; sglang #2271, #35801; aiter #4899: the split count ignores batch and heads. It is a policy here, and whichever
/// it is, no step needs more than the plan for the longest sequence has.
#[test]
fn report_27_no_policy_exceeds_its_reservation() {
    let device = device("gfx942:sramecc+:xnack-", "7.0.0");
    let shape = PlanShape { batch: 64, query_len: 1, num_heads: 128, kv_lora_rank: 512, max_seq_len: 131_072 };
    for policy in POLICIES {
        let reserved = DecodePlan::new(shape, policy, &kernels(16, 1), &device).unwrap();
        for batch in [1, 2, 7, 64] {
            for max_seq_len in [1, 512, 4096, 131_072] {
                let step = PlanShape { batch, max_seq_len, ..shape };
                let step = DecodePlan::new(step, policy, &kernels(16, 1), &device).unwrap();
                assert!(step.num_kv_splits <= reserved.num_kv_splits, "{policy:?}");
                assert!(step.num_slots <= reserved.num_slots, "{policy:?}");
            }
        }
    }
    // The default makes no more slots than the device can use at once, whatever the batch.
    let auto = DecodePlan::new(shape, SplitPolicy::Auto, &kernels(16, 1), &device).unwrap();
    assert!(auto.num_slots < shape.batch * plan::num_kv_splits(shape.max_seq_len, device.num_compute_units));
}

/// aiter #2760: decode kernels stop at query length 4.
#[test]
fn report_40_longer_queries_are_refused_by_type_and_can_be_flattened() {
    let spec = BuilderSpec {
        max_query_len: Some(4),
        draft_tokens: Some(7),
        ..BuilderSpec::new("short", QueryLenSupport::Uniform)
    };
    let builder = MlaBuilder::new(spec.clone()).unwrap();
    assert_eq!((builder.decode_threshold(), builder.graph_support()), (4, GraphSupport::UniformSingleTokenDecode));
    assert_eq!(mode_of(&builder, GraphMode::FullAndPiecewise, 8).0, GraphMode::Piecewise);
    let error = builder.check_capture(&CaptureBatch { num_reqs: 2, num_tokens: 16, max_query_len: 8 }).unwrap_err();
    assert!(matches!(error, Error::CaptureQueryTooLong { max_query_len: 8, threshold: 4, .. }));

    // Flattened, every kernel takes the block: one query token per row.
    let rows = flatten_rows(&[100, 8], 16, true, 1).unwrap();
    assert_eq!(rows.extents, [93, 94, 95, 96, 97, 98, 99, 100, 1, 2, 3, 4, 5, 6, 7, 8]);
    // Up to the limit the kernel keeps its full graphs.
    let builder = MlaBuilder::new(BuilderSpec { draft_tokens: Some(3), ..spec }).unwrap();
    assert_eq!((builder.decode_threshold(), builder.graph_support()), (4, GraphSupport::UniformBatch));
}

/// vLLM #34154: some architectures fault while capturing attention in full graphs.
#[test]
fn report_41_a_defect_of_an_architecture_or_driver_limits_graphs() {
    const RULES: [DriverRule; 2] = [
        DriverRule {
            backend: "rocm",
            arch_prefixes: &["gfx11", "gfx12"],
            first: (0, 0, 0),
            last: (u32::MAX, u32::MAX, u32::MAX),
            limit: GraphSupport::Never,
            reason: "faults while capturing attention",
        },
        DriverRule {
            backend: "rocm",
            arch_prefixes: &["gfx942"],
            first: (7, 2, 0),
            last: (7, 2, 3),
            limit: GraphSupport::Never,
            reason: "replays are corrupt",
        },
    ];
    let minimum = MinimumSupport::over([("mla", GraphSupport::UniformBatch)]);
    let resolve_on = |device: &DeviceInfo, requested, ignore_rules| {
        let driver = Some(DriverFacts { device, rules: &RULES, ignore_rules });
        resolve(&ResolveRequest { requested: Some(requested), minimum: &minimum, query_len: 1, engine: ENGINE, driver })
    };
    let mode =
        |arch, version, ignore| resolve_on(&device(arch, version), GraphMode::FullAndPiecewise, ignore).unwrap().mode;
    assert_eq!(mode("gfx1100", "6.4.1", false), GraphMode::Piecewise);
    assert_eq!(mode("gfx1201", "7.2.4", false), GraphMode::Piecewise);
    assert_eq!(mode("gfx942:sramecc+:xnack-", "7.2.3", false), GraphMode::Piecewise);
    assert_eq!(mode("gfx942:sramecc+:xnack-", "unreadable", false), GraphMode::Piecewise);
    assert_eq!(mode("gfx942:sramecc+:xnack-", "7.1.9", false), GraphMode::FullAndPiecewise);
    assert_eq!(mode("gfx942:sramecc+:xnack-", "7.2.4", false), GraphMode::FullAndPiecewise);
    assert_eq!(mode("gfx950", "7.2.1", false), GraphMode::FullAndPiecewise);
    assert_eq!(mode("gfx942", "7.2.1", true), GraphMode::FullAndPiecewise);

    let bad = device("gfx942:sramecc+:xnack-", "7.2.1");
    let told = |ignore| resolve_on(&bad, GraphMode::FullAndPiecewise, ignore).unwrap().because[0].to_string();
    assert!(told(false).contains("driver 7.2.1") && told(false).contains("replays are corrupt"), "{}", told(false));
    assert!(told(true).contains("overridden by the user") && told(true).contains("corrupt"), "{}", told(true));
    let error = resolve_on(&bad, GraphMode::Full, false).unwrap_err();
    assert!(matches!(error, Error::GraphModeUnsupported { instead: GraphMode::Piecewise, .. }), "{error}");
}

/// mistral.rs #1287, #1159, #1837, #2384; candle-vllm #317, #403: Rust engines want this policy as plain functions.
#[test]
fn report_42_the_whole_policy_without_a_device() {
    let drafts = 3;
    let threshold = ReorderThreshold {
        class_threshold: Some(1),
        spec_as_decode: true,
        draft_tokens: Some(drafts),
        dcp_size: 1,
        ..ReorderThreshold::default()
    };
    let spec = BuilderSpec { draft_tokens: Some(drafts), ..BuilderSpec::new("mla", QueryLenSupport::Uniform) };
    let builder = MlaBuilder::new(spec).unwrap();
    assert_eq!(Some(builder.decode_threshold()), threshold.tokens());

    let (mode, because) = mode_of(&builder, "full".parse().unwrap(), 1 + drafts);
    assert_eq!((mode, because.len()), (GraphMode::FullAndPiecewise, 1));
    let sizes = SizeRequest::new(mode, 16, 2048, 1 + drafts).resolve().unwrap();
    let dispatcher = dispatcher(mode, &sizes.sizes, 16, 1 + drafts);
    for num_reqs in 1..=16 {
        let got = dispatcher.dispatch(&Batch::uniform(num_reqs, 1 + drafts)).descriptor;
        let tokens = got.num_tokens;
        assert!(got.mode == RuntimeMode::Full && tokens >= num_reqs * 4);
        let batch = CaptureBatch { num_reqs: got.num_reqs.unwrap(), num_tokens: tokens, max_query_len: 1 + drafts };
        builder.check_capture(&batch).unwrap();
    }
    assert_eq!(dispatcher.dispatch(&Batch::mixed(3, 50)).descriptor.mode, RuntimeMode::Piecewise);
    assert_eq!(dispatcher.dispatch(&Batch::mixed(3, 2000)).descriptor.mode, RuntimeMode::None);
}
