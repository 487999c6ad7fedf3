use super::*;

const LIMITS: Limits = Limits {
    max_num_seqs: 4,
    max_model_len: 200,
    max_num_batched_tokens: 64,
    page_size: 16,
    num_pages: 30,
    spec_tokens: 0,
};

fn request(arrival: f64, context: usize, generated: usize) -> Request {
    Request { arrival, context, generated }
}

/// Runs a trace to its end and checks every step; returns the sum of what was made.
fn run(trace: &[Request], limits: Limits, acceptance: f64) -> Progress {
    let mut scheduler = Scheduler::new(trace, limits, 1);
    let mut rng = Rng::new(5);
    let mut sum = Progress::default();
    let mut steps = 0;
    while !scheduler.is_done() {
        scheduler.schedule(f64::INFINITY);
        let plan = scheduler.plan();
        let query_len = 1 + limits.spec_tokens;
        let tokens = plan.decode.len() * query_len + plan.prompt_tokens();
        assert!(tokens > 0 && tokens <= limits.max_num_batched_tokens, "step {steps}: {tokens} tokens");
        assert!(scheduler.running().len() <= limits.max_num_seqs);

        // Whatever a step writes lies in pages of that sequence alone.
        let mut seen = vec![false; limits.num_pages];
        for sequence in scheduler.running() {
            for &page in &sequence.pages {
                assert!(!std::mem::replace(&mut seen[page as usize], true), "page {page} has two owners");
            }
        }
        for &index in &plan.decode {
            let sequence = &scheduler.running()[index];
            assert!(sequence.cached + query_len <= sequence.pages.len() * limits.page_size);
            assert!(sequence.cached + query_len <= limits.max_model_len);
        }
        for chunk in &plan.prompts {
            assert!(chunk.tokens.end <= scheduler.running()[chunk.sequence].pages.len() * limits.page_size);
        }
        assert_eq!(scheduler.used_pages(), seen.iter().filter(|&&taken| taken).count());

        let made = scheduler.advance(acceptance, &mut rng);
        sum.decoded += made.decoded;
        sum.first_tokens += made.first_tokens;
        sum.finished += made.finished;
        sum.drafts[0] += made.drafts[0];
        sum.drafts[1] += made.drafts[1];
        steps += 1;
        assert!(steps < 100_000, "the schedule does not end");
    }
    assert_eq!(scheduler.used_pages(), 0, "a page leaked");
    assert_eq!(sum.finished + scheduler.rejected().len(), trace.len());
    sum
}

fn random_trace(seed: u64, len: usize) -> Vec<Request> {
    let mut rng = Rng::new(seed);
    (0..len).map(|i| request(i as f64, 1 + rng.below(150), 1 + rng.below(60))).collect()
}

#[test]
fn every_token_of_every_request_that_fits_is_generated() {
    for seed in 0..20 {
        for spec_tokens in [0, 1, 3] {
            let limits = Limits { spec_tokens, ..LIMITS };
            let trace = random_trace(seed, 40);
            let fitting = trace.iter().filter(|r| r.peak_tokens(spec_tokens) <= limits.max_model_len);
            let wanted: usize = fitting.map(|r| r.generated).sum();
            for acceptance in [0.0, 0.7, 1.0] {
                let made = run(&trace, limits, acceptance);
                assert_eq!(made.decoded + made.first_tokens, wanted);
                assert_eq!(made.drafts[1], if acceptance == 1.0 { made.drafts[0] } else { made.drafts[1] });
                assert!(acceptance > 0.0 || made.drafts[1] == 0);
            }
        }
    }
}

#[test]
fn a_request_that_can_never_fit_is_rejected_and_named() {
    let trace = [request(0.0, 201, 1), request(0.0, 200, 1), request(0.0, 150, 52), request(0.0, 150, 51)];
    let scheduler = Scheduler::new(&trace, LIMITS, 0);
    assert_eq!(scheduler.rejected(), [0, 2]);
    // Two pages of 16 tokens hold 32 tokens, whatever the longest length allowed.
    let scheduler = Scheduler::new(&trace[..2], Limits { num_pages: 2, ..LIMITS }, 0);
    assert_eq!(scheduler.rejected(), [0, 1]);
    // Drafts need room too.
    let scheduler = Scheduler::new(&trace, Limits { spec_tokens: 1, ..LIMITS }, 0);
    assert_eq!(scheduler.rejected(), [0, 2, 3]);
}

#[test]
fn pages_are_reserved_to_the_end_and_order_is_kept() {
    // 12 pages each (190 tokens): the third waits for pages although sequences are free, and the short fourth does not overtake it.
    let trace = [request(0.0, 100, 91), request(0.0, 100, 91), request(0.0, 100, 91), request(0.0, 5, 2)];
    let mut scheduler = Scheduler::new(&trace, LIMITS, 0);
    scheduler.schedule(f64::INFINITY);
    assert_eq!((scheduler.running().len(), scheduler.waiting(), scheduler.used_pages()), (2, 2, 24));
}

#[test]
fn prompts_share_the_budget_with_decoding() {
    let trace = [request(0.0, 10, 50), request(1.0, 100, 5)];
    let mut scheduler = Scheduler::new(&trace, LIMITS, 0);
    let mut rng = Rng::new(0);
    scheduler.schedule(0.5);
    assert_eq!(scheduler.plan().prompts, [PromptChunk { sequence: 0, tokens: 0..10 }]);
    assert_eq!(scheduler.advance(0.0, &mut rng), Progress { first_tokens: 1, ..Progress::default() });
    for (now, tokens) in [(1.0, 0..63), (1.0, 63..100)] {
        scheduler.schedule(now);
        assert_eq!(scheduler.plan().decode, [0]);
        assert_eq!(scheduler.plan().prompts, [PromptChunk { sequence: 1, tokens }]);
        assert_eq!(scheduler.advance(0.0, &mut rng).decoded, 1);
    }
    scheduler.schedule(1.0);
    assert_eq!(scheduler.plan().decode, [0, 1]);
    assert_eq!(scheduler.running()[1].cached, 100);
}

#[test]
fn the_clock_moves_to_the_next_arrival_only_when_idle() {
    let trace = [request(0.0, 4, 1), request(9.0, 4, 1)];
    let mut scheduler = Scheduler::new(&trace, LIMITS, 0);
    assert_eq!(scheduler.idle_until(), Some(0.0));
    scheduler.schedule(0.0);
    assert_eq!(scheduler.idle_until(), None);
    scheduler.advance(0.0, &mut Rng::new(0));
    assert_eq!(scheduler.idle_until(), Some(9.0));
}
