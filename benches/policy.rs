//! Dispatch and resolve, in nanoseconds: what one step, and one start, cost on the host.

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use latentwave::graph::{
    Batch, EngineFacts, GraphDispatcher, GraphMode, GraphSupport, KeyRequest, MinimumSupport, ResolveRequest,
    SizeRequest, graph_keys, resolve,
};

fn dispatch(criterion: &mut Criterion) {
    let mode = GraphMode::FullAndPiecewise;
    let sizes = SizeRequest::new(mode, 256, 8192, 2).resolve().expect("valid limits").sizes;
    let mut group = criterion.benchmark_group("dispatch");
    for (name, variants) in [("one variant", vec![0]), ("16 variants", (0..16).collect())] {
        let keys = graph_keys(&KeyRequest {
            mode,
            sizes: &sizes,
            max_num_seqs: 256,
            query_lens: &[2],
            varlen_decode: false,
            variants: &variants,
        });
        let mut dispatcher = GraphDispatcher::new(keys.expect("valid sizes")).expect("distinct keys");
        dispatcher.set_all_captured();
        let variant = variants[variants.len() - 1];
        for (kind, batch) in
            [("full", Batch::uniform(97, 2)), ("piecewise", Batch::mixed(97, 301)), ("eager", Batch::mixed(97, 4000))]
        {
            let batch = Batch { variant, ..batch };
            group.bench_function(format!("{kind}, {name}"), |bencher| {
                bencher.iter(|| black_box(&dispatcher).dispatch(black_box(&batch)));
            });
        }
    }
    group.finish();
}

fn resolution(criterion: &mut Criterion) {
    let minimum = MinimumSupport::over([("mla", GraphSupport::UniformSingleTokenDecode)]);
    let request = ResolveRequest {
        requested: Some(GraphMode::FullAndPiecewise),
        minimum: &minimum,
        query_len: 1,
        engine: EngineFacts { attention_separable: true, piecewise_capture: true },
        driver: None,
    };
    let weakened = ResolveRequest { requested: Some(GraphMode::Full), query_len: 2, ..request };
    let mut group = criterion.benchmark_group("resolve");
    group.bench_function("kept", |bencher| bencher.iter(|| resolve(black_box(&request))));
    group.bench_function("weakened twice", |bencher| bencher.iter(|| resolve(black_box(&weakened))));
    group.finish();
}

criterion_group!(benches, dispatch, resolution);
criterion_main!(benches);
