//! Properties of the policy over random inputs, against definitions that can be read off at a glance.

use latentwave::Error;
use latentwave::batch::{DcpShard, SplitRequest, flatten_rows};
use latentwave::graph::builder::minimum_support;
use latentwave::graph::sizes::round_to_query_len;
use latentwave::graph::{
    AttentionBuilder, Batch, BatchDescriptor, BuilderSpec, CaptureBatch, EngineFacts, GraphDispatcher, GraphMode,
    GraphSupport, KeyRequest, MlaBuilder, QueryLenSupport, ResolveRequest, RuntimeMode, SizeReason, SizeRequest,
    graph_keys, resolve,
};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

/// What dispatch must find: of the captured graphs that take the batch the smallest, full ones first.
fn smallest_that_fits<'a>(
    keys: &'a [BatchDescriptor],
    captured: &[bool],
    batch: &Batch,
) -> Option<&'a BatchDescriptor> {
    let takes = |key: &BatchDescriptor| {
        key.variant == batch.variant
            && key.num_tokens >= batch.num_tokens
            && key.num_reqs.is_none_or(|most| most >= batch.num_reqs)
            && key.uniform_query_len.is_none_or(|len| batch.uniform_query_len == Some(len))
            && key.max_query_len.is_none_or(|most| batch.max_query_len.is_some_and(|len| len <= most))
    };
    let candidates = keys.iter().zip(captured).filter(|&(key, &captured)| captured && takes(key));
    candidates.map(|(key, _)| key).min_by_key(|key| (std::cmp::Reverse(key.mode), key.num_tokens))
}

fn batches() -> impl Strategy<Value = Batch> {
    let mixed = (1_usize..40, 0_usize..80, prop::option::of(1_usize..9));
    let mixed = mixed
        .prop_map(|(num_reqs, more, max_query_len)| Batch { max_query_len, ..Batch::mixed(num_reqs, num_reqs + more) });
    let uniform = (1_usize..40, 1_usize..6).prop_map(|(num_reqs, query_len)| Batch::uniform(num_reqs, query_len));
    (prop_oneof![mixed, uniform], 0_u32..3).prop_map(|(batch, variant)| Batch { variant, ..batch })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn dispatch_takes_the_smallest_captured_graph_that_fits(
        mode in select(&GraphMode::ALL),
        sizes in vec(1_usize..70, 0..8),
        max_num_seqs in 1_usize..40,
        query_lens in vec(1_usize..6, 1..3),
        varlen_decode: bool,
        captured in vec(prop::bool::weighted(0.8), 64),
        batches in vec(batches(), 1..20),
    ) {
        let request =
            KeyRequest { mode, sizes: &sizes, max_num_seqs, query_lens: &query_lens, varlen_decode, variants: &[0, 2] };
        let keys = graph_keys(&request).unwrap();
        let captured: Vec<bool> = (0..keys.len()).map(|graph| captured[graph % captured.len()]).collect();
        let mut dispatcher = GraphDispatcher::new(keys.clone()).unwrap();
        for graph in (0..keys.len()).filter(|&graph| captured[graph]) {
            dispatcher.set_captured(graph).unwrap();
        }
        for batch in &batches {
            let got = dispatcher.dispatch(batch);
            let expected = smallest_that_fits(&keys, &captured, batch);
            match expected {
                Some(key) => {
                    prop_assert_eq!(got.descriptor, *key);
                    prop_assert_eq!(got.graph.map(|graph| keys[graph]), Some(*key));
                    prop_assert_eq!(got.padding, key.num_tokens - batch.num_tokens);
                }
                None => {
                    prop_assert_eq!((got.graph, got.descriptor.mode), (None, RuntimeMode::None));
                    prop_assert_eq!(got.descriptor.num_tokens, batch.num_tokens);
                }
            }
            prop_assert_eq!(got.misfit.is_none(), got.descriptor.mode == RuntimeMode::Full);
        }
    }

    #[test]
    fn local_lengths_add_up_and_count_the_tokens_in_turns(
        seq_len in 0_usize..5000, size in 1_usize..10, interleave in 1_usize..70,
    ) {
        let mut counted = vec![0; size];
        for token in 0..seq_len {
            counted[token / interleave % size] += 1;
        }
        let bound = DcpShard::new(0, size, interleave).unwrap().max_local_len(seq_len);
        for (rank, &expected) in counted.iter().enumerate() {
            let local = DcpShard::new(rank, size, interleave).unwrap().local_len(seq_len);
            prop_assert_eq!(local, expected);
            prop_assert!(local <= bound);
        }
    }

    #[test]
    fn a_split_adds_up_and_its_decodes_are_decodes(
        query_lens in vec(0_usize..9, 0..12),
        padding in 0_usize..5,
        decode_threshold in 1_usize..9,
        require_uniform: bool,
        flags in prop::option::of(vec(any::<bool>(), 12)),
    ) {
        let total: usize = query_lens.iter().sum();
        let flags = flags.map(|flags| flags[..query_lens.len()].to_vec());
        let request = SplitRequest {
            query_lens: &query_lens,
            num_tokens: total + padding,
            max_query_len: query_lens.iter().copied().max().unwrap_or(0),
            decode_threshold,
            require_uniform,
            is_prefilling: flags.as_deref(),
        };
        let split = request.split().unwrap();
        prop_assert_eq!(split.num_decodes + split.num_prefills, query_lens.len());
        prop_assert_eq!(split.num_decode_tokens + split.num_prefill_tokens, total + padding);
        let (decodes, prefills) = query_lens.split_at(split.num_decodes);
        prop_assert!(decodes.iter().all(|&len| len <= decode_threshold));
        if require_uniform && decode_threshold > 1 {
            let common = decodes.first().copied().unwrap_or(0);
            prop_assert!(decodes.iter().all(|&len| len == common || len == 0));
        }
        if let Some(flags) = &flags {
            prop_assert!(!flags[..split.num_decodes].contains(&true));
        }
        if !prefills.is_empty() {
            prop_assert_eq!(split.num_decode_tokens, decodes.iter().sum::<usize>());
        }
    }

    #[test]
    fn flattened_rows_see_their_own_prefix(seq_lens in vec(0_usize..50, 1..6), query_len in 1_usize..9) {
        let rows = flatten_rows(&seq_lens, seq_lens.len() * query_len, true, 1).unwrap();
        for (row, (&extent, &request)) in rows.extents.iter().zip(&rows.requests).enumerate() {
            prop_assert_eq!(request, row / query_len);
            // Tokens after this row's own are hidden from it.
            let hidden = query_len - 1 - row % query_len;
            prop_assert_eq!(extent, seq_lens[request].saturating_sub(hidden));
        }
    }

    #[test]
    fn rounding_yields_multiples_and_loses_no_batch_that_fits(
        sizes in vec(1_usize..600, 1..12), query_len in 1_usize..20, room in 0_usize..20,
    ) {
        let max = sizes.iter().copied().max().unwrap() + room;
        match round_to_query_len(&sizes, max, query_len) {
            Ok(rounded) => {
                prop_assert!(rounded.is_sorted_by(|a, b| a < b));
                prop_assert!(rounded.iter().all(|size| size % query_len == 0 && (1..=max).contains(size)));
                for size in sizes {
                    // Whole queries that the size held are still held by a size.
                    prop_assert!(*rounded.last().unwrap() >= size - size % query_len);
                }
            }
            Err(Error::NoCaptureSizes { .. }) => prop_assert!(max < query_len),
            Err(error) => prop_assert!(false, "{}", error),
        }
    }

    #[test]
    fn default_sizes_capture_the_widest_decode_batch_or_name_it(
        max_num_seqs in 1_usize..300,
        max_num_tokens in 1_usize..3000,
        query_len in 1_usize..20,
        max_size in prop::option::of(1_usize..1200),
    ) {
        let mode = GraphMode::FullAndPiecewise;
        let request = SizeRequest { max_size, ..SizeRequest::new(mode, max_num_seqs, max_num_tokens, query_len) };
        let sizes = request.resolve().unwrap();
        prop_assert!(sizes.sizes.is_sorted_by(|a, b| a < b));
        prop_assert!(sizes.sizes[0] >= 1 && sizes.max_size() <= max_num_tokens);
        if let Some(asked) = max_size {
            prop_assert_eq!(sizes.max_size(), asked.min(max_num_tokens));
        }
        let keys = graph_keys(&KeyRequest {
            mode, sizes: &sizes.sizes, max_num_seqs, query_lens: &[query_len], varlen_decode: false, variants: &[0],
        }).unwrap();
        let mut dispatcher = GraphDispatcher::new(keys).unwrap();
        dispatcher.set_all_captured();
        let lost = sizes.because.iter().find_map(|reason| match reason {
            &SizeReason::WidestDecodeLost { from_seqs, to_seqs } => Some(from_seqs..=to_seqs),
            _ => None,
        });
        for num_reqs in 1..=max_num_seqs.min(max_num_tokens / query_len) {
            let full = dispatcher.dispatch(&Batch::uniform(num_reqs, query_len)).descriptor.mode == RuntimeMode::Full;
            let named = lost.as_ref().is_some_and(|lost| lost.contains(&num_reqs));
            prop_assert_ne!(full, named, "{} sequences", num_reqs);
        }
    }

    #[test]
    fn an_honest_builder_never_fails_its_own_capture_check(
        (query_len_support, claim) in (select(&QueryLenSupport::ALL), prop::option::of(select(&GraphSupport::ALL))),
        (max_query_len, class_threshold) in (prop::option::of(1_usize..8), 1_usize..8),
        (draft_tokens, parallel_drafting) in (prop::option::of(0_usize..8), any::<bool>()),
        (dcp_size, multi_token_dcp) in (1_usize..4, any::<bool>()),
        requested in prop::option::of(select(&GraphMode::ALL)),
        (attention_separable, piecewise_capture) in any::<(bool, bool)>(),
    ) {
        let spec = BuilderSpec {
            max_query_len, class_threshold, claim, draft_tokens, parallel_drafting, dcp_size, multi_token_dcp,
            ..BuilderSpec::new("any", query_len_support)
        };
        let query_len = spec.query_len();
        let Ok(builder) = MlaBuilder::new(spec) else {
            let overclaims = claim.is_some_and(|claim| claim > query_len_support.allowed_support());
            let several = query_len_support == QueryLenSupport::SingleOnly && class_threshold > 1;
            prop_assert!(overclaims || several);
            return Ok(());
        };
        prop_assert!(builder.graph_support() <= query_len_support.allowed_support());
        let minimum = minimum_support([&builder as &dyn AttentionBuilder]);
        let engine = EngineFacts { attention_separable, piecewise_capture };
        let request = ResolveRequest { requested, minimum: &minimum, query_len, engine, driver: None };
        let Ok(resolved) = resolve(&request) else {
            prop_assert_eq!((requested, minimum.support), (Some(GraphMode::Full), GraphSupport::Never));
            return Ok(());
        };
        if resolved.mode.decode_mode() == RuntimeMode::Full {
            let batch = CaptureBatch { num_reqs: 3, num_tokens: 3 * query_len, max_query_len: query_len };
            prop_assert!(builder.check_capture(&batch).is_ok());
        }
        prop_assert!(resolved.mode.mixed_mode() != RuntimeMode::Full || minimum.support == GraphSupport::Always);
        prop_assert!(piecewise_capture || !resolved.mode.has(RuntimeMode::Piecewise));
        prop_assert!(!resolved.because.is_empty());
    }
}
