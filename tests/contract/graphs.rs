//! Capture and replay.

use latentwave::testing::poisoned;
use latentwave::{DType, Error, GraphBackend, MlaDecode, SplitPolicy, Stream};

use super::numerics::layer;
use crate::common::step::{Step, replay};
use crate::common::{Outcome, Problem, bytes, values};

pub(crate) fn a_graph_replays_new_lengths_and_tables<B: GraphBackend>(backend: &B, dtype: DType) {
    for (query_len, policy) in [(1, SplitPolicy::Auto), (1, SplitPolicy::Fixed(4)), (3, SplitPolicy::Auto)] {
        let longest = [300, 300, 300];
        let full = Problem { policy, ..Problem::random(31, layer(4, 16), (dtype, dtype), query_len, &longest) };
        let mut step = Step::new(backend, &full);
        let stream = Stream::new(backend).unwrap();
        let graph = step.capture(&stream, full.causal);
        assert!(step.bits(backend).iter().all(|&byte| byte == 0xFF), "a capture must not run");
        let mut bits = Vec::new();
        for (shift, lens) in [(0, [300, 300, 300]), (1, [7, 0, 299]), (2, [64, 1, 16]), (0, [300, 300, 300])] {
            let mut now = full.clone();
            now.seq_lens = lens.to_vec();
            // Other pages, too: every sequence takes its neighbour's.
            now.block_table.rotate_left(shift * full.table_width());
            now.max_seq_len = 300;
            step.load(backend, &now);
            replay(&stream, &graph);
            let eager: Outcome = now.check(backend, &format!("eager {lens:?} {policy:?}"));
            bits.push(step.bits(backend));
            assert!(bits.last() == Some(&eager.bits), "{lens:?} {policy:?}: replay differs from the eager step");
        }
        assert!(bits[0] == bits[3], "the first and the last replay had the same inputs");
    }
}

/// A graph that is captured long serves short sequences, too, also where another kernel does that: lengths below, at and above the bound
/// between the two, in turn, each of them more than once.
pub(crate) fn a_graph_captured_long_serves_every_length<B: GraphBackend>(backend: &B, dtype: DType) {
    const CAPTURED: usize = 131_072;
    for (seed, heads, page_size) in [(34, 33, 64), (35, 20, 12), (36, 40, 16)] {
        let kernels = MlaDecode::new(backend, layer(heads, page_size), dtype, dtype).unwrap().kernels(1, 1, CAPTURED);
        let bound = kernels.unwrap().few.map_or(300, |few| few.max_tokens) as i32;
        let mut longest = Problem::random(seed, layer(heads, page_size), (dtype, dtype), 1, &[bound + 1]);
        longest.max_seq_len = CAPTURED;
        let mut step = Step::new(backend, &longest);
        let stream = Stream::new(backend).unwrap();
        let graph = step.capture(&stream, false);
        let mut earlier = Vec::<(i32, Vec<u8>)>::new();
        for tokens in [bound + 1, 130, bound, bound + 1, 130, 65, bound] {
            let now = Problem { seq_lens: vec![tokens], ..longest.clone() };
            step.load(backend, &now);
            replay(&stream, &graph);
            let bits = step.bits(backend);
            match earlier.iter().find(|(before, _)| *before == tokens) {
                Some((_, before)) => assert!(*before == bits, "{tokens} of {bound} tokens: other bits than before"),
                None => {
                    let what = format!("{tokens} tokens of {heads} heads, {bound} between two forms");
                    now.compare(&values(backend, &step.out), &values(backend, &step.lse), &what);
                    earlier.push((tokens, bits));
                }
            }
        }
    }
}

pub(crate) fn a_dropped_session_leaves_its_graph_whole<B: GraphBackend>(backend: &B, dtype: DType) {
    let problem = Problem::random(32, layer(4, 16), (dtype, dtype), 1, &[200, 31]);
    let want = problem.check(backend, "eager");
    let stream = Stream::new(backend).unwrap();
    let mut step = Step::new(backend, &problem);
    let (out, lse) = (step.out.clone(), step.lse.clone());
    let graph = step.capture(&stream, false);
    assert!(graph.kept_buffers() > 0);
    drop(step);
    // What would be reused if the graph did not own its buffers.
    let _noise: Vec<_> = (0..8).map(|_| poisoned(backend, [64, 1024], DType::F32).unwrap()).collect();
    for _ in 0..8 {
        // SAFETY: all tensors own their memory.
        unsafe { stream.replay(&graph) }.unwrap();
    }
    // In flight, for a device that works behind the host's back.
    drop(graph);
    stream.synchronize().unwrap();
    let mut bits = bytes(backend, &out);
    bits.extend(bytes(backend, &lse));
    assert!(bits == want.bits);
}

pub(crate) fn a_forbidden_call_breaks_only_its_capture<B: GraphBackend>(backend: &B, dtype: DType) {
    let problem = Problem::random(33, layer(2, 16), (dtype, dtype), 1, &[20]);
    let want = problem.check(backend, "eager");
    let mut step = Step::new(backend, &problem);
    let stream = Stream::new(backend).unwrap();
    // Through the seam, past the stream's own refusal, and with the call's error swallowed.
    let broken = stream.capture(|| {
        step.enqueue(&stream, false)?;
        let refused = backend.synchronize(stream.raw());
        assert!(refused.is_err(), "synchronising a stream that is being captured");
        Ok(())
    });
    assert!(matches!(broken, Err(Error::CaptureFailed { .. })), "{:?}", broken.err());
    // The stream's own refusal.
    let refused = stream.capture(|| stream.synchronize());
    assert!(matches!(refused, Err(Error::GraphState { call: "synchronize", .. })), "{:?}", refused.err());

    let graph = step.capture(&stream, false);
    replay(&stream, &graph);
    assert!(step.bits(backend) == want.bits, "the capture after a broken one");
    step.load(backend, &problem);
    step.enqueue(&stream, false).unwrap();
    stream.synchronize().unwrap();
    assert!(step.bits(backend) == want.bits, "an eager step after a broken capture");
}

pub(crate) fn an_error_in_the_closure_ends_the_capture<B: GraphBackend>(backend: &B, dtype: DType) {
    let problem = Problem::random(34, layer(2, 16), (dtype, dtype), 1, &[20]);
    let mut step = Step::new(backend, &problem);
    let stream = Stream::new(backend).unwrap();
    let failed = stream.capture(|| {
        step.enqueue(&stream, false)?;
        Err(Error::argument("on purpose", "the caller's own error"))
    });
    assert!(matches!(failed, Err(Error::Argument { arg: "on purpose", .. })));
    assert!(step.bits(backend).iter().all(|&byte| byte == 0xFF), "nothing of a failed capture may run");
    let graph = step.capture(&stream, false);
    replay(&stream, &graph);
    assert!(values(backend, &step.out).iter().all(|x| x.is_finite()));
}

pub(crate) fn captures_do_not_nest<B: GraphBackend>(backend: &B, _: DType) {
    let stream = Stream::new(backend).unwrap();
    let nested = stream.capture(|| match stream.capture(|| Ok(())) {
        Err(Error::GraphState { call: "begin capture", .. }) => Ok(()),
        other => panic!("a nested capture: {:?}", other.err()),
    });
    assert!(nested.is_ok() || matches!(nested, Err(Error::CaptureFailed { .. })));
    stream.synchronize().unwrap();
}
