//! Request traces: whatever the file holds, it is refused by place or read as requests that keep the parser's promises.
#![no_main]

#[path = "../../src/bin/latentwave/replay/trace.rs"]
#[allow(dead_code, reason = "the program uses the rest")]
mod trace;

libfuzzer_sys::fuzz_target!(|text: &[u8]| {
    let Ok(requests) = trace::parse(text, "trace.csv") else { return };
    assert!(!requests.is_empty() && requests[0].arrival == 0.0);
    assert!(requests.iter().is_sorted_by(|a, b| a.arrival <= b.arrival));
    for request in &requests {
        assert!(request.arrival.is_finite() && request.context > 0 && request.generated > 0);
        assert!(request.peak_tokens(1023) >= request.context);
    }
});
