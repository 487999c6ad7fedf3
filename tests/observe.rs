//! What a subscriber is told: plan, capture, dispatch and replay, and why the mode is what it is.

use std::fmt::{Debug, Write};
use std::sync::{Arc, Mutex};

use latentwave::session::{DecodeSession, SessionConfig, StepBatch};
use latentwave::{DType, GraphMode, Host, KvCache, MlaConfig, Tensor};
use tracing::field::{Field, Visit};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;

/// Lines `PARENT > NAME field=value ...`, of spans and events as they come.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<String>>>);

struct Fields<'a>(&'a mut String);

impl Visit for Fields<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        write!(self.0, " {field}={value:?}").expect("a text");
    }
}

impl Lines {
    fn push(&self, parent: Option<&str>, name: &str, visit: impl FnOnce(&mut Fields<'_>)) {
        let mut line = format!("{} > {name}", parent.unwrap_or("-"));
        visit(&mut Fields(&mut line));
        self.0.lock().expect("no test panics in here").push(line);
    }

    fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().expect("no test panics in here"))
    }
}

impl<S: tracing::Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Lines {
    fn on_new_span(&self, span: &tracing::span::Attributes<'_>, _: &tracing::span::Id, context: Context<'_, S>) {
        let parent = context.lookup_current();
        self.push(parent.map(|span| span.name()), span.metadata().name(), |fields| span.record(fields));
    }

    fn on_event(&self, event: &tracing::Event<'_>, context: Context<'_, S>) {
        if event.metadata().target() == "latentwave" {
            self.push(context.lookup_current().map(|span| span.name()), "event", |fields| event.record(fields));
        }
    }
}

#[test]
fn a_session_tells_what_it_does_and_why() {
    let lines = Lines::default();
    let subscriber = tracing_subscriber::registry().with(lines.clone());
    tracing::subscriber::with_default(subscriber, || {
        let dev = Host::with_threads(1);
        let mla = MlaConfig::deepseek(2, 16);
        let config = SessionConfig {
            q_dtype: DType::F32,
            kv_dtype: DType::F32,
            graph_mode: GraphMode::Full,
            capture_sizes: Some(vec![1, 2]),
            ..SessionConfig::new(mla, 4, 64, 16)
        };
        let mut session = DecodeSession::new(&dev, config).expect("a session");
        let made = lines.take();
        let of = |name: &str| made.iter().filter(|line| line.starts_with(name)).cloned().collect::<Vec<_>>();
        assert_eq!(
            of("- > session"),
            ["- > session backend=\"host\" max_num_seqs=4 max_seq_len=64 query_len=1"],
            "{made:#?}"
        );
        assert!(!of("session > plan").is_empty(), "{made:#?}");
        let reasons: Vec<String> = session
            .resolved()
            .because
            .iter()
            .map(|reason| {
                format!("session > event message=graph mode mode={} reason={reason}", session.resolved().mode)
            })
            .chain(
                session
                    .capture_sizes()
                    .because
                    .iter()
                    .map(|reason| format!("session > event message=capture sizes reason={reason}")),
            )
            .collect();
        let told: Vec<String> = of("session > event").into_iter().filter(|line| line.contains(" reason=")).collect();
        assert_eq!(told, reasons);
        assert!(reasons[0].contains("FULL becomes FULL_AND_PIECEWISE"), "{reasons:?}");

        let cache = KvCache::zeros(&dev, 16, &mla, DType::F32).expect("a cache");
        let q = Tensor::zeros(&dev, [4, 2, 576], DType::F32).expect("queries");
        let mut out = Tensor::zeros(&dev, [4, 2, 512], DType::F32).expect("outputs");
        session.capture(|step| step.decode(&q, &cache, &mut out, None)).expect("a capture").all().expect("all sizes");
        let captured = lines.take();
        for size in [1, 2] {
            let line = format!("- > capture mode=FULL num_tokens={size}");
            assert!(captured.contains(&line), "{captured:#?}");
        }

        let tables = [vec![3], vec![7, 1], vec![5]];
        session
            .step(&StepBatch::decode(1, &[9], &tables[..1]), |step| step.decode(&q, &cache, &mut out, None))
            .expect("a step");
        assert_eq!(
            lines.take(),
            [
                "- > step num_seqs=1 query_len=1",
                "step > dispatch",
                "dispatch > event message=dispatched mode=FULL num_tokens=1 padding=0",
                "step > replay num_tokens=1",
            ]
        );
        let report = session
            .step(&StepBatch::decode(1, &[9, 30, 1], &tables), |step| step.decode(&q, &cache, &mut out, None))
            .expect("a step");
        let eager = lines.take();
        let why = report.misfit.expect("three sequences fit no graph");
        assert!(eager[2].ends_with(&format!("padding=0 reason={why}")), "{eager:#?}");
        assert!(eager.iter().any(|line| line.starts_with("step > enqueue num_tokens=3")), "{eager:#?}");
        assert!(!eager.iter().any(|line| line.contains("replay")), "{eager:#?}");

        let failed = session.step(&StepBatch::decode(9, &[9], &tables[..1]), |_| Ok(()));
        assert!(failed.is_err() && lines.take() == ["- > step num_seqs=1 query_len=9"]);
    });
}

#[test]
fn a_failed_capture_is_told_with_its_error() {
    let lines = Lines::default();
    let subscriber = tracing_subscriber::registry().with(lines.clone());
    tracing::subscriber::with_default(subscriber, || {
        let dev = Host::with_threads(1);
        let config =
            SessionConfig { capture_sizes: Some(vec![1]), ..SessionConfig::new(MlaConfig::deepseek(1, 16), 1, 16, 1) };
        let mut session = DecodeSession::new(&dev, config).expect("a session");
        lines.take();
        let mut calls = 0;
        let report = session.capture(|step| {
            calls += 1;
            // The first call is the eager one.
            if calls > 1 { step.stream().synchronize() } else { Ok(()) }
        });
        let (_, error) = &report.expect("the eager call passed").failed[0];
        let told = format!("capture > event message=not captured error={error}");
        let lines = lines.take();
        assert!(lines.contains(&told), "{told}: {lines:#?}");
    });
}
