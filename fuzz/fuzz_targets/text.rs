//! What a person types: points of a benchmark, graph modes, supports, driver versions.
#![no_main]

#[path = "../../src/bin/latentwave/point.rs"]
#[allow(dead_code, reason = "the program uses the rest")]
mod point;
#[path = "../../src/bin/latentwave/rng.rs"]
#[allow(dead_code, reason = "the program uses the rest")]
mod rng;

use latentwave::graph::support::parse_version;
use latentwave::{GraphMode, GraphSupport, QueryLenSupport};

libfuzzer_sys::fuzz_target!(|text: &str| {
    for point in point::list(text).unwrap_or_default() {
        assert_eq!(point.to_string().parse(), Ok(point));
        if point.batch <= 1 << 10 {
            assert_eq!(point.seq_lens(1).len(), point.batch);
            assert!(point.seq_lens(1).iter().all(|&len| len > 0));
        }
    }
    if let Ok(mode) = text.parse::<GraphMode>() {
        assert_eq!(mode.to_string().parse::<GraphMode>().ok(), Some(mode));
    }
    let _ = text.parse::<GraphSupport>();
    let _ = text.parse::<QueryLenSupport>();
    let _ = parse_version(text);
});
