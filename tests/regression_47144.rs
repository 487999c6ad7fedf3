//! The regression behind this crate: vLLM PR 47144.
//!
//! A decode path that takes one query token per sequence claimed full graphs for uniform batches. Capturing speculative
//! decoding then asked it for two tokens and met a bare assertion. Here (a) the claim cannot be made; (b) a foreign builder
//! that makes it all the same is caught as a typed error before anything is enqueued; (c) an honest single-token builder makes
//! the mode fall back, with the reason; (d) this crate's kernels take several tokens and keep the full graphs.

mod devices;
mod engine;

use engine::{Engine, config, tables};
use latentwave::graph::builder::{BuilderSpec, MlaBuilder};
use latentwave::graph::resolve::Reason;
use latentwave::graph::{AttentionBuilder, RuntimeMode};
use latentwave::session::DecodeSession;
use latentwave::{Error, GraphBackend, GraphMode, GraphSupport, QueryLenSupport, Stream};

on_every_backend!(
    a_claim_beyond_the_kernel_is_refused,
    b_a_lying_builder_is_caught_before_capture,
    c_an_honest_single_token_builder_falls_back_with_the_reason,
    d_kernels_of_several_tokens_keep_full_graphs,
);

/// (a) UNIFORM_BATCH over a SINGLE_ONLY builder is refused at construction, naming both.
fn a_claim_beyond_the_kernel_is_refused<B: GraphBackend>(_: &B) {
    let spec = BuilderSpec {
        claim: Some(GraphSupport::UniformBatch),
        draft_tokens: Some(1),
        ..BuilderSpec::new("TRITON_MLA of vLLM 0.25", QueryLenSupport::SingleOnly)
    };
    let error = MlaBuilder::new(spec).expect_err("the claim is inconsistent");
    assert!(
        matches!(
            error,
            Error::InconsistentGraphSupport {
                claimed: GraphSupport::UniformBatch,
                query_len_support: QueryLenSupport::SingleOnly,
                allowed: GraphSupport::UniformSingleTokenDecode,
                ..
            }
        ),
        "{error:?}"
    );
    let text = error.to_string();
    for named in ["TRITON_MLA of vLLM 0.25", "UNIFORM_BATCH", "SINGLE_ONLY", "UNIFORM_SINGLE_TOKEN_DECODE"] {
        assert!(text.contains(named), "{text}");
    }
}

/// A builder with the flags of vLLM 0.22.1 to 0.25.1.
struct Liar;

impl AttentionBuilder for Liar {
    fn name(&self) -> &str {
        "liar"
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

/// (b) The lie, told through the public trait, meets the capture check as a typed error; nothing is half-captured.
fn b_a_lying_builder_is_caught_before_capture<B: GraphBackend>(backend: &B) {
    let stream = Stream::new(backend).expect("stream");
    let session = DecodeSession::with_builders(stream, config(4, 1), vec![Box::new(Liar)]).expect("session");
    assert_eq!(session.resolved().mode, GraphMode::FullAndPiecewise, "the engine believes what builders say");
    let mut engine = Engine::new(backend, session, 1, 1).expect("engine");

    let report = engine.capture().expect("the capture as a whole goes on");
    assert!(report.captured.is_empty());
    assert!(!report.failed.is_empty());
    for (key, error) in &report.failed {
        assert!(
            matches!(error, Error::CaptureQueryTooLong { builder, max_query_len: 2, threshold: 1 } if builder == "liar"),
            "{key:?}: {error:?}"
        );
        assert!(error.to_string().contains("max_query_len 2 > threshold 1"), "{error}");
    }

    // The stream is out of capture, and the next capture on it works.
    assert_eq!(engine.session.stream().capture_state(), latentwave::graph::CaptureState::Idle);
    let empty = engine.session.stream().capture(|| Ok(()));
    assert!(empty.is_ok(), "{:?}", empty.err());

    // Steps run eagerly, and right.
    let lens = [40, 17];
    let tables = tables(&lens, 16, engine.session.config().num_pages, 2);
    let served = engine.step(2, &lens, &tables).expect("step");
    assert_ne!(served.mode, RuntimeMode::Full);
    engine.verify(2, &lens, &tables, served.num_tokens);
}

/// (c) UNIFORM_SINGLE_TOKEN_DECODE with one draft token: FULL_AND_PIECEWISE resolves to PIECEWISE, with the reason.
fn c_an_honest_single_token_builder_falls_back_with_the_reason<B: GraphBackend>(backend: &B) {
    let spec = BuilderSpec { draft_tokens: Some(1), ..BuilderSpec::new("single", QueryLenSupport::SingleOnly) };
    let honest = MlaBuilder::new(spec).expect("builder");
    assert_eq!(honest.graph_support(), GraphSupport::UniformSingleTokenDecode);
    let stream = Stream::new(backend).expect("stream");
    let session = DecodeSession::with_builders(stream, config(4, 1), vec![Box::new(honest)]).expect("session");
    assert_eq!(session.resolved().mode, GraphMode::Piecewise);
    let named = session.resolved().because.iter().any(|reason| {
        matches!(reason, Reason::QueryLenNeedsUniformBatch { minimum, query_len: 2, .. } if minimum.name() == "single")
    });
    assert!(named, "{:?}", session.resolved().because);

    let mut engine = Engine::new(backend, session, 1, 3).expect("engine");
    let report =
        engine.capture().and_then(|report| report.all()).expect("there is nothing to capture, and that is fine");
    assert!(report.captured.is_empty());
    let lens = [33];
    let tables = tables(&lens, 16, engine.session.config().num_pages, 4);
    let served = engine.step(2, &lens, &tables).expect("step");
    assert_eq!(served.mode, RuntimeMode::Piecewise);
    engine.verify(2, &lens, &tables, served.num_tokens.min(2));
}

/// (d) Kernels that take several tokens keep FULL and capture at query length 2; replays see new lengths and tables.
fn d_kernels_of_several_tokens_keep_full_graphs<B: GraphBackend>(backend: &B) {
    let session = DecodeSession::new(backend, config(4, 1)).expect("session");
    assert_eq!(session.resolved().mode, GraphMode::FullAndPiecewise);
    let mut engine = Engine::new(backend, session, 2, 5).expect("engine");
    let report = engine.capture().and_then(|report| report.all()).expect("capture");
    assert!(
        report.captured.iter().all(|key| key.uniform_query_len == Some(2) && key.num_tokens % 2 == 0),
        "{report:?}"
    );
    assert!(report.captured.iter().any(|key| key.num_reqs == Some(4)), "{report:?}");

    for (seed, lens) in [vec![40, 17, 3, 2], vec![100, 2, 500], vec![1], vec![16, 32, 48, 64]].into_iter().enumerate() {
        let tables = tables(&lens, 16, engine.session.config().num_pages, 6 + seed as u64);
        engine.poison().expect("poison");
        let served = engine.step(2, &lens, &tables).expect("step");
        assert_eq!(served.mode, RuntimeMode::Full, "{served}");
        engine.verify(2, &lens, &tables, served.num_tokens);
    }
}
