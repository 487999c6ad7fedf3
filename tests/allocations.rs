//! A step allocates nothing: neither on the host, counted by the global allocator, nor on the device.

#[cfg(feature = "capi")]
#[path = "capi/allocations.rs"]
mod capi;
mod engine;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use engine::{Engine, config, tables};
use latentwave::graph::RuntimeMode;
use latentwave::session::{DecodeSession, SessionConfig, StepBatch};
use latentwave::{GraphBackend, GraphMode};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: everything is handed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, layout) }
    }
    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocations of 50 steps of changing lengths and batch sizes, after two to warm up.
fn allocations_of_steps<B: GraphBackend>(backend: &B, graph_mode: GraphMode, expected: RuntimeMode) -> usize {
    let session = DecodeSession::new(backend, SessionConfig { graph_mode, ..config(4, 1) }).expect("session");
    let mut engine = Engine::new(backend, session, 2, 1).expect("engine");
    engine.capture().and_then(|report| report.all()).expect("capture");
    let tables = tables(&[500, 500, 500, 500], 16, engine.session.config().num_pages, 2);
    let served = engine.step(2, &[500, 499, 2, 1], &tables).expect("step");
    engine.verify(2, &[500, 499, 2, 1], &tables, served.num_tokens);
    let Engine { session, layers, .. } = &mut engine;
    let mut before = 0;
    for round in 0..52_usize {
        if round == 2 {
            before = ALLOCATIONS.load(Ordering::Relaxed);
        }
        let lens = [10 + round as i32, 400 + round as i32, 2, 100];
        let batch = 4 - round % 3;
        let step = StepBatch::decode(2, &lens[..batch], &tables[..batch]);
        let served = session
            .step(&step, |step| {
                layers
                    .iter_mut()
                    .try_for_each(|layer| step.decode(&layer.q, &layer.cache, &mut layer.out, Some(&mut layer.lse)))
            })
            .expect("step");
        session.synchronize().expect("synchronize");
        assert_eq!(served.mode, expected);
    }
    ALLOCATIONS.load(Ordering::Relaxed) - before
}

fn nothing_is_allocated<B: GraphBackend>(backend: &B) {
    assert_eq!(allocations_of_steps(backend, GraphMode::FullDecodeOnly, RuntimeMode::Full), 0, "replayed steps");
    assert_eq!(allocations_of_steps(backend, GraphMode::None, RuntimeMode::None), 0, "eager steps");
    #[cfg(feature = "capi")]
    assert_eq!(capi::of_calls(backend, || ALLOCATIONS.load(Ordering::Relaxed)), 0, "calls of the C ABI");
}

// Without the test harness, whose main thread allocates at times of its own.
fn main() {
    nothing_is_allocated(&latentwave::Host::new());
    #[cfg(feature = "cuda")]
    if let Some(device) = latentwave::testing::device_or_report("allocations", latentwave::Cuda::new(0)) {
        nothing_is_allocated(&device);
    }
    #[cfg(feature = "rocm")]
    if let Some(device) = latentwave::testing::device_or_report("allocations", latentwave::Rocm::new(0)) {
        nothing_is_allocated(&device);
    }
    println!("a step allocates nothing: ok");
}
