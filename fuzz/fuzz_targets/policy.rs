//! Graph policy and plans on any numbers: builders → mode → sizes → keys → dispatch, batches, and the balanced schedule.
#![no_main]

use arbitrary::{Arbitrary, Unstructured};
use latentwave::batch::{DcpShard, ReorderThreshold, SplitRequest, dcp_empty_rows, flatten_rows};
use latentwave::graph::builder::{BuilderSpec, minimum_support};
use latentwave::graph::sizes::{SizeRequest, round_to_query_len};
use latentwave::graph::{
    AttentionBuilder, Batch, CaptureBatch, EngineFacts, GraphDispatcher, KeyRequest, MlaBuilder, ResolveRequest,
    RuntimeMode, graph_keys, resolve,
};
use latentwave::plan::{BalanceShape, PART_WORDS, ScratchReservation, balance, parts_offset};
use latentwave::{GraphMode, GraphSupport, QueryLenSupport};

/// More sizes than this are slow to make tables of, and teach nothing new.
const MOST: usize = 2048;

#[derive(Arbitrary, Debug)]
struct Engine {
    query_lens: u8,
    max_query_len: Option<usize>,
    class_threshold: usize,
    claim: Option<u8>,
    draft_tokens: Option<usize>,
    parallel_drafting: bool,
    dcp_size: usize,
    multi_token_dcp: bool,
    mode: Option<u8>,
    separable: bool,
    piecewise: bool,
    max_num_seqs: usize,
    max_num_tokens: usize,
    sizes: Option<Vec<u16>>,
    max_size: Option<u16>,
    ceiling: u16,
    every_small_size: bool,
    varlen_decode: bool,
    batches: Vec<(u16, u16, bool)>,
}

fn graphs(engine: &Engine) -> latentwave::Result<()> {
    let claim = engine.claim.map(|claim| GraphSupport::ALL[usize::from(claim) % GraphSupport::ALL.len()]);
    let mode = engine.mode.map(|mode| GraphMode::ALL[usize::from(mode) % GraphMode::ALL.len()]);
    let lens = QueryLenSupport::ALL[usize::from(engine.query_lens) % QueryLenSupport::ALL.len()];
    let builder = MlaBuilder::new(BuilderSpec {
        max_query_len: engine.max_query_len,
        class_threshold: engine.class_threshold,
        claim,
        draft_tokens: engine.draft_tokens,
        parallel_drafting: engine.parallel_drafting,
        dcp_size: engine.dcp_size,
        multi_token_dcp: engine.multi_token_dcp,
        ..BuilderSpec::new("fuzz", lens)
    })?;
    assert!(builder.graph_support() <= lens.allowed_support());
    let query_len = builder.spec().query_len();
    let minimum = minimum_support([&builder as &dyn AttentionBuilder]);
    let facts = EngineFacts { attention_separable: engine.separable, piecewise_capture: engine.piecewise };
    let resolved =
        resolve(&ResolveRequest { requested: mode, minimum: &minimum, query_len, engine: facts, driver: None })?;
    assert!(!resolved.because.is_empty() && resolved.because.iter().all(|reason| !reason.to_string().is_empty()));

    let sizes: Option<Vec<usize>> =
        engine.sizes.as_ref().map(|sizes| sizes.iter().map(|&size| usize::from(size) % MOST).collect());
    let sizes = SizeRequest {
        sizes: sizes.as_deref(),
        max_size: engine.max_size.map(|size| usize::from(size) % MOST),
        ceiling: usize::from(engine.ceiling) % MOST,
        every_small_size: engine.every_small_size,
        ..SizeRequest::new(resolved.mode, engine.max_num_seqs, engine.max_num_tokens, query_len)
    }
    .resolve()?
    .sizes;
    assert!(sizes.is_sorted());
    let _ = round_to_query_len(&sizes, MOST, query_len);
    let keys = graph_keys(&KeyRequest {
        mode: resolved.mode,
        sizes: &sizes,
        max_num_seqs: engine.max_num_seqs,
        query_lens: &[query_len],
        varlen_decode: engine.varlen_decode,
        variants: &[0],
    })?;
    // The builder's own check agrees with what was resolved: no graph may be asked for that it refuses to capture.
    for key in keys.iter().filter(|key| key.mode == RuntimeMode::Full && key.uniform_query_len.is_some()) {
        let max_query_len = key.uniform_query_len.unwrap_or(1);
        let num_reqs = key.num_reqs.unwrap_or(key.num_tokens);
        builder
            .check_capture(&CaptureBatch { num_reqs, num_tokens: key.num_tokens, max_query_len })
            .unwrap_or_else(|error| panic!("{key:?}: {error}"));
    }
    let mut dispatcher = GraphDispatcher::new(keys)?;
    dispatcher.set_all_captured();
    for &(num_reqs, extra, uniform) in &engine.batches {
        let num_reqs = usize::from(num_reqs);
        let batch = match uniform {
            true => Batch::uniform(num_reqs, query_len),
            false => Batch::mixed(num_reqs, num_reqs.saturating_add(extra.into())),
        };
        let served = dispatcher.dispatch(&batch);
        assert!(served.descriptor.num_tokens >= batch.num_tokens);
        assert_eq!(served.graph.is_none(), served.descriptor.mode == RuntimeMode::None);
        assert_eq!(served.misfit.is_none(), served.descriptor.mode == RuntimeMode::Full);
    }
    Ok(())
}

#[derive(Arbitrary, Debug)]
struct Numbers {
    query_lens: Vec<usize>,
    flags: Option<Vec<bool>>,
    counts: [usize; 7],
    switches: [bool; 4],
    tiles: Vec<u16>,
    parts: u8,
    splits: u16,
    fixed_cost: u8,
}

fn batches(numbers: &Numbers) {
    let Numbers { query_lens, flags, counts, switches, .. } = numbers;
    let split = SplitRequest {
        query_lens,
        num_tokens: counts[0],
        max_query_len: counts[1],
        decode_threshold: counts[2],
        require_uniform: switches[0],
        is_prefilling: flags.as_deref(),
    }
    .split();
    if let Ok(split) = split {
        assert_eq!(split.num_decodes + split.num_prefills, query_lens.len());
        assert_eq!(split.num_decode_tokens + split.num_prefill_tokens, counts[0]);
    }
    let _ = flatten_rows(query_lens, counts[3] % (1 << 16), switches[1], counts[4]);
    if let Ok(shard) = DcpShard::new(counts[0], counts[1], counts[2]) {
        assert!(shard.local_len(counts[3]) <= shard.max_local_len(counts[3]));
    }
    let _ = dcp_empty_rows(query_lens, counts, counts[5] % (1 << 16));
    let _ = ReorderThreshold {
        class_threshold: Some(counts[0]),
        spec_as_decode: switches[2],
        draft_tokens: Some(counts[1]),
        parallel_drafting: switches[3],
        dcp_size: counts[2],
        multi_token_dcp: switches[0],
    }
    .tokens();
    let [max_num_seqs, decode_threshold, num_heads, dcp_size, max_seq_len, num_compute_units, kv_lora_rank] = *counts;
    let _ = ScratchReservation {
        max_num_seqs,
        decode_threshold,
        num_heads,
        dcp_size,
        max_seq_len,
        num_compute_units,
        kv_lora_rank,
    }
    .bytes();
}

/// Parts cover every tile once, in order, and none has more splits of a sequence than allowed.
fn schedule(numbers: &Numbers) {
    let tiles: Vec<i32> = numbers.tiles.iter().map(|&tiles| tiles.into()).collect();
    let shape = BalanceShape {
        num_parts: usize::from(numbers.parts).max(1),
        num_kv_splits: usize::from(numbers.splits).max(1),
        fixed_cost: numbers.fixed_cost.into(),
    };
    let parts = parts_offset(tiles.len());
    let mut table = vec![i32::MIN; parts + shape.num_parts * PART_WORDS];
    balance(&shape, &tiles, &mut table);
    // The end of a sequence, or of an empty one, is the start of the next.
    let settle = |mut seq: usize, mut tile: i32| {
        while tiles.get(seq).is_some_and(|&tiles| tile >= tiles) {
            (seq, tile) = (seq + 1, 0);
        }
        (seq, tile)
    };
    let mut at = settle(0, 0);
    for part in table[parts..].chunks(PART_WORDS).filter(|part| part[..2] != part[2..4]) {
        assert_eq!(settle(part[0] as usize, part[1]), at, "{shape:?} {tiles:?}: {part:?}");
        at = settle(part[2] as usize, part[3]);
    }
    assert_eq!(at, (tiles.len(), 0), "{shape:?} {tiles:?}");
    for pieces in table[..=tiles.len()].windows(2).map(|pair| pair[1] - pair[0]) {
        assert!((0..=shape.num_kv_splits as i32).contains(&pieces) && pieces != 1, "{shape:?} {tiles:?}: {pieces}");
    }
}

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let mut data = Unstructured::new(data);
    if let Ok(engine) = Engine::arbitrary(&mut data) {
        let _ = graphs(&engine);
    }
    if let Ok(numbers) = Numbers::arbitrary(&mut data) {
        batches(&numbers);
        schedule(&numbers);
    }
});
