use super::super::stats::tests::{full, step};
use super::super::stats::{StepRecord, Verified};
use super::*;
use crate::rng::Rng;

fn setting() -> Setting {
    Setting {
        trace: "a <trace> & more.csv".into(),
        requests: 3,
        model: "deepseek-v2-lite".into(),
        backend: "host",
        device: "a processor".into(),
        arch: "x86_64".into(),
        num_heads: 16,
        head_dim: 576,
        kv_lora_rank: 512,
        layers: 1,
        page_size: 64,
        num_pages: 100,
        dtype: "bf16".into(),
        kv_dtype: "bf16".into(),
        kv_row_bytes: 1152,
        max_num_seqs: 16,
        max_model_len: 4096,
        max_num_batched_tokens: 2048,
        spec_tokens: 0,
        acceptance: 0.7,
        seed: 1,
        split_policy: "Auto".into(),
        graph_mode_asked: "FULL_AND_PIECEWISE".into(),
        graph_mode: "FULL_AND_PIECEWISE".into(),
        graph_mode_reasons: vec!["the minimum is <UNIFORM_BATCH>".into()],
        capture_sizes: vec![1, 2, 4, 8, 16],
        reserved_bytes: 3 << 20,
        kv_cache_bytes: 7 << 20,
        graph_bytes: 0,
        ended_early: None,
    }
}

fn measured() -> Measured {
    let mut rng = Rng::new(9);
    let mut measured =
        Measured { finished: 3, rejected: 1, decoded_tokens: 4000, drafts: [30, 21], ..Measured::default() };
    for i in 0..3000 {
        let rows = 1 + rng.below(16);
        let size = [1, 2, 4, 8, 16].into_iter().find(|&size| size >= rows).unwrap();
        let record = StepRecord {
            prompt_tokens: if i % 50 == 0 { 100 } else { 0 },
            context_tokens: rows * (500 + rng.below(1500)),
            longest: 2000,
            ..step(0.001 + 0.001 * rows as f64 * rng.unit(), rows, size - rows)
        };
        measured.record(full(size), record);
    }
    measured.verified = Some(Verified { rows: 6000, misses: 0, worst: 1.5e-3, tolerance: 2e-2 });
    measured
}

#[test]
fn a_page_stands_alone_and_is_escaped() {
    let page = page(&setting(), &measured(), &plots::draw(&measured()).unwrap());
    assert_eq!(page.matches("<svg").count(), 1);
    assert!(page.contains("a &lt;trace&gt; &amp; more.csv") && !page.contains("<trace>"));
    assert!(page.contains("&lt;UNIFORM_BATCH&gt;"));
    // Nothing is fetched from elsewhere, and nothing came out as no number.
    let foreign = page.matches("http").count() - page.matches("http://www.w3.org/2000/svg").count();
    assert_eq!((foreign, page.matches("NaN").count()), (0, 0));
}

#[test]
fn plots_of_little_and_of_nothing() {
    for steps in [0, 1, 2] {
        let mut few = Measured::default();
        for _ in 0..steps {
            few.record(full(4), step(0.001, 3, 1));
        }
        let svg = plots::draw(&few).unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>") && !svg.contains("NaN"), "{steps} steps");
        assert!(!table(&setting(), &few).contains("NaN"));
    }
}

#[test]
fn the_table_says_it_all() {
    let table = table(&setting(), &measured());
    for words in [
        "3 finished, 1 rejected",
        "3,000 (2,940 decode only, 60 with prompts beside)",
        "21 of 30 accepted (70.0 %)",
        "tokens/s",
        "p50 ",
        "p99 ",
        "GB/s",
        "3.00 MiB of scratch, 7.00 MiB of cache",
        "0 per step, at most 0",
        "6,000 rows against float64, worst error 1.5e-3",
        "graph mode FULL_AND_PIECEWISE (asked: FULL_AND_PIECEWISE)",
        "served by",
        "captured",
    ] {
        assert!(table.contains(words), "`{words}` is missing in\n{table}");
    }
}

#[test]
fn json_holds_every_step() {
    let path = std::env::temp_dir().join(format!("latentwave-report-{}.json", std::process::id()));
    write_json(&path, &setting(), &measured()).unwrap();
    let json: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert_eq!(json["steps"].as_array().unwrap().len(), 3000);
    assert_eq!(json["served"].as_array().unwrap().len(), 5);
    assert_eq!(json["setting"]["num_heads"], 16);
    let seconds: f64 = json["steps"].as_array().unwrap().iter().map(|step| step["seconds"].as_f64().unwrap()).sum();
    assert!((json["attention_tokens_per_second"].as_f64().unwrap() - 4000.0 / seconds).abs() < 1e-6);
}

#[test]
fn endings() {
    assert!(check_path(Path::new("a.html")).is_ok() && check_path(Path::new("a.svg")).is_ok());
    for bad in ["a.png", "a", "html"] {
        assert!(matches!(check_path(Path::new(bad)), Err(Error::Argument { arg: "report", .. })));
    }
    let missing = Path::new("no/such/folder/a.json");
    assert!(matches!(write_json(missing, &setting(), &measured()), Err(Error::Io { .. })));
}

#[test]
fn reports_by_their_ending() {
    for (ending, begin) in [("html", "<!doctype html>"), ("svg", "<svg")] {
        let path = std::env::temp_dir().join(format!("latentwave-report-{}.{ending}", std::process::id()));
        write_report(&path, &setting(), &measured()).unwrap();
        let written = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(written.starts_with(begin) && written.contains("Step time"), "{ending}");
    }
}
