//! What a step asks of the policy allocates nothing.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::panic::Location;

use latentwave::graph::{Batch, GraphDispatcher, GraphMode, KeyRequest, SizeRequest, graph_keys};
use latentwave::workspace::{SlotTable, layout};

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

/// The system's allocator, counting what the current thread allocates.
struct Counting;

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocations(work: impl FnOnce()) -> usize {
    let before = ALLOCATIONS.get();
    work();
    ALLOCATIONS.get() - before
}

#[test]
fn dispatch_and_workspace_views_allocate_nothing() {
    let sizes = SizeRequest::new(GraphMode::FullAndPiecewise, 256, 8192, 4).resolve().unwrap().sizes;
    let keys = graph_keys(&KeyRequest {
        mode: GraphMode::FullAndPiecewise,
        sizes: &sizes,
        max_num_seqs: 256,
        query_lens: &[4],
        varlen_decode: false,
        variants: &[0, 1],
    });
    let mut dispatcher = GraphDispatcher::new(keys.unwrap()).unwrap();
    dispatcher.set_all_captured();
    let mut slots = SlotTable::new(1).unwrap();
    slots.replaced(0, 4096).unwrap();
    slots.lock();

    let mut served = 0;
    let count = allocations(|| {
        for num_reqs in 0..600 {
            served += usize::from(dispatcher.dispatch(&Batch::uniform(num_reqs, 4)).graph.is_some());
            served += usize::from(dispatcher.dispatch(&Batch::mixed(num_reqs, 2 * num_reqs)).graph.is_some());
            let (offsets, need) = layout(&[num_reqs, 1000, 500]).unwrap();
            served += usize::from(slots.fit(0, need, Location::caller()).is_ok() && offsets[0] == 0);
        }
    });
    assert!(served > 600);
    assert_eq!(count, 0);
    // The counter does count.
    assert!(allocations(|| drop(std::hint::black_box(vec![1_u8; 100]))) > 0);
}
