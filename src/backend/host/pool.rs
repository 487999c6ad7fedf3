//! Threads that share the items of one launch, each with scratch of its own.
//!
//! Not rayon: its queue of jobs from outside allocates now and then, and a step must not.

use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::memory::{Budget, HostBuffer};
use crate::error::Result;

/// What a launch asks of every thread: handle item `index` with the thread's own scratch.
type Job = dyn Fn(usize, &mut [f32]) + Sync;

/// Scratch of one thread, reserved before it is needed.
struct Scratch(UnsafeCell<Option<HostBuffer>>);

// SAFETY: a scratch is used by its own thread during a job, and by the holder of `Pool::running` between jobs.
unsafe impl Sync for Scratch {}

struct Posted {
    // The job of this round, with its lifetime erased: `Pool::run` does not return before all threads are done with it.
    job: Option<*const Job>,
    round: u64,
    // Threads that took the job and still work on it.
    busy: usize,
    // Threads that wait for jobs, or did.
    started: usize,
    stop: bool,
}

// SAFETY: the pointer is only followed while `Pool::run` keeps the job alive, and the job is Sync.
unsafe impl Send for Posted {}

struct Shared {
    posted: Mutex<Posted>,
    start: Condvar,
    done: Condvar,
    next: AtomicUsize,
    items: AtomicUsize,
    panicked: AtomicBool,
    scratch: Vec<Scratch>,
}

impl Shared {
    fn posted(&self) -> MutexGuard<'_, Posted> {
        self.posted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self, job: &(dyn Fn(usize, &mut [f32]) + Sync), thread: usize) {
        let all = AssertUnwindSafe(|| {
            // SAFETY: this thread alone uses its scratch while the job runs, and the memory was written when it was allocated.
            let scratch = match unsafe { &mut *self.scratch[thread].0.get() } {
                // SAFETY: as above; the buffer is aligned and this long.
                Some(buffer) => unsafe {
                    std::slice::from_raw_parts_mut(buffer.as_ptr(), buffer.len() / size_of::<f32>())
                },
                None => &mut [],
            };
            loop {
                let item = self.next.fetch_add(1, Ordering::Relaxed);
                if item >= self.items.load(Ordering::Relaxed) {
                    return;
                }
                job(item, scratch);
            }
        });
        if catch_unwind(all).is_err() {
            self.panicked.store(true, Ordering::Relaxed);
        }
    }

    fn serve(&self, thread: usize) {
        let mut seen = 0;
        self.posted().started += 1;
        self.done.notify_one();
        loop {
            let job = {
                let mut posted = self.posted();
                loop {
                    if posted.stop {
                        return;
                    }
                    match posted.job {
                        Some(job) if posted.round != seen => {
                            seen = posted.round;
                            posted.busy += 1;
                            break job;
                        }
                        _ => posted = self.start.wait(posted).unwrap_or_else(PoisonError::into_inner),
                    }
                }
            };
            // SAFETY: `Pool::run` waits for this thread before the job's lifetime ends.
            self.work(unsafe { &*job }, thread);
            let mut posted = self.posted();
            posted.busy -= 1;
            if posted.busy == 0 {
                self.done.notify_one();
            }
        }
    }
}

/// The threads of one host device. The thread that launches is one of them.
pub(super) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    // One job at a time.
    running: Mutex<()>,
}

impl Pool {
    /// A pool of `threads` threads, or of as many as the system gives.
    pub(super) fn new(threads: usize) -> Self {
        let threads = threads.max(1);
        let shared = Arc::new(Shared {
            posted: Mutex::new(Posted { job: None, round: 0, busy: 0, started: 0, stop: false }),
            start: Condvar::new(),
            done: Condvar::new(),
            next: AtomicUsize::new(0),
            items: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            scratch: (0..threads).map(|_| Scratch(UnsafeCell::new(None))).collect(),
        });
        let spawn = |thread| {
            let shared = shared.clone();
            std::thread::Builder::new().name(format!("latentwave-{thread}")).spawn(move || shared.serve(thread))
        };
        let workers: Vec<_> = (1..threads).map_while(|thread| spawn(thread).ok()).collect();
        // A thread allocates as it starts, which is to be over before a step is timed or its allocations are counted.
        let mut posted = shared.posted();
        while posted.started < workers.len() {
            posted = shared.done.wait(posted).unwrap_or_else(PoisonError::into_inner);
        }
        drop(posted);
        Self { shared, workers, running: Mutex::new(()) }
    }

    pub(super) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    fn exclusive(&self) -> MutexGuard<'_, ()> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sees to it that every thread's scratch has `bytes`.
    pub(super) fn reserve(&self, bytes: usize, budget: &Arc<Budget>) -> Result<()> {
        let _exclusive = self.exclusive();
        for scratch in &self.shared.scratch[..self.threads()] {
            // SAFETY: no job runs while `running` is held.
            let scratch = unsafe { &mut *scratch.0.get() };
            if scratch.as_ref().is_none_or(|buffer| buffer.len() < bytes) {
                *scratch = Some(HostBuffer::new(bytes, "scratch of the host kernels", budget)?);
            }
        }
        Ok(())
    }

    /// Calls `job` once for every item below `items`, on all threads. False if a call panicked.
    pub(super) fn run(&self, items: usize, job: &(dyn Fn(usize, &mut [f32]) + Sync + '_)) -> bool {
        let _exclusive = self.exclusive();
        let shared = &*self.shared;
        shared.next.store(0, Ordering::Relaxed);
        shared.items.store(items, Ordering::Relaxed);
        shared.panicked.store(false, Ordering::Relaxed);
        let shares = items > 1 && !self.workers.is_empty();
        if shares {
            // SAFETY: only the lifetime changes; this function waits below until no thread holds the pointer.
            let erased =
                unsafe { std::mem::transmute::<*const (dyn Fn(usize, &mut [f32]) + Sync + '_), *const Job>(job) };
            let mut posted = shared.posted();
            posted.job = Some(erased);
            posted.round += 1;
            drop(posted);
            shared.start.notify_all();
        }
        shared.work(job, 0);
        if shares {
            let mut posted = shared.posted();
            // No items are left: a thread that has not woken yet need not.
            posted.job = None;
            while posted.busy > 0 {
                posted = shared.done.wait(posted).unwrap_or_else(PoisonError::into_inner);
            }
        }
        !shared.panicked.load(Ordering::Relaxed)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.posted().stop = true;
        self.shared.start.notify_all();
        for worker in self.workers.drain(..) {
            // A worker catches its jobs' panics, so it ends without one.
            let _ = worker.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_handled_once_and_a_panic_is_reported() {
        let pool = Pool::new(3);
        for items in [0, 1, 2, 1000] {
            let counts: Vec<AtomicUsize> = (0..items).map(|_| AtomicUsize::new(0)).collect();
            assert!(pool.run(items, &|item, _| {
                counts[item].fetch_add(1, Ordering::Relaxed);
            }));
            assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
        }
        assert!(!pool.run(8, &|item, _| assert!(item != 5, "on purpose")));
        assert!(pool.run(8, &|_, _| ()));
    }
}
