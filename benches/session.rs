//! Host overhead of one session step: checks, dispatch, what changed of lengths, tables and slots, and the replay call. The captured
//! step is empty, so nothing else is in the figure.

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use latentwave::session::{DecodeSession, SessionConfig, StepBatch};
use latentwave::{Host, MlaConfig};

fn step_overhead(c: &mut Criterion) {
    let mut group = c.benchmark_group("session_step");
    for batch in [1_usize, 16, 64, 256] {
        let (max_seq_len, page_size) = (4096, 64);
        let num_pages = batch * max_seq_len / page_size;
        let config = SessionConfig::new(MlaConfig::deepseek(16, page_size), batch, max_seq_len, num_pages);
        let mut session = DecodeSession::new(&Host::new(), config).expect("session");
        session.capture(|_| Ok(())).and_then(|report| report.all()).expect("capture");
        let width = max_seq_len / page_size;
        let tables: Vec<Vec<i32>> =
            (0..batch).map(|i| (i * width..(i + 1) * width).map(|page| page as i32).collect()).collect();
        let mut lens: Vec<i32> = (0..batch).map(|i| 1 + (i * 37 % 1000) as i32).collect();
        group.bench_function(BenchmarkId::new("replay", batch), |b| {
            b.iter(|| {
                // Every sequence grows by a token, as in decoding, and starts over at the end.
                lens.iter_mut().for_each(|len| *len = *len % max_seq_len as i32 + 1);
                session.step(&StepBatch::decode(1, &lens, &tables), |_| Ok(())).expect("step")
            });
        });
    }
    group.finish();
}

criterion_group!(benches, step_overhead);
criterion_main!(benches);
