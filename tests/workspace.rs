//! The workspace on a backend that only counts its memory.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use latentwave::backend::{Backend, DecodeKernels, DecodeShape, DeviceInfo};
use latentwave::kernel::{Launch, Params, Variant};
use latentwave::{Error, Result, Workspace};

/// Hands out addresses and remembers which are alive. Nothing can run on it.
#[derive(Clone)]
struct Counting {
    info: Arc<DeviceInfo>,
    next: Arc<AtomicU64>,
    live: Arc<Mutex<HashSet<u64>>>,
    capacity: usize,
    used: Arc<AtomicUsize>,
    most_live: Arc<AtomicUsize>,
}

struct Memory {
    addr: u64,
    bytes: usize,
    owner: Counting,
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.owner.live.lock().unwrap().remove(&self.addr);
        self.owner.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl Counting {
    fn with_capacity(capacity: usize) -> Self {
        let info = DeviceInfo {
            backend: "counting",
            name: "memory only".into(),
            arch: "none".into(),
            index: 0,
            num_compute_units: 1,
            wave_size: 1,
            shared_bytes_per_block: 0,
            memory_bytes: capacity as u64,
            driver_version: "1".into(),
        };
        Self {
            info: Arc::new(info),
            next: Arc::new(AtomicU64::new(1 << 20)),
            live: Arc::default(),
            capacity,
            used: Arc::default(),
            most_live: Arc::default(),
        }
    }

    fn live(&self) -> usize {
        self.live.lock().unwrap().len()
    }

    fn nothing_runs<T>() -> Result<T> {
        Err(Error::Unsupported { backend: "counting", arch: "none".into(), what: "work".into() })
    }
}

impl Backend for Counting {
    const NAME: &'static str = "counting";
    type Buffer = Memory;
    type Stream = ();
    type Kernel = ();

    fn device(&self) -> &DeviceInfo {
        &self.info
    }

    fn decode_kernels(&self, _: &DecodeShape) -> Result<DecodeKernels> {
        Self::nothing_runs()
    }

    fn prepare(&self, _: &Variant) -> Result<()> {
        Self::nothing_runs()
    }

    fn alloc(&self, bytes: usize, purpose: &'static str) -> Result<Memory> {
        if self.used.load(Ordering::Relaxed) + bytes > self.capacity {
            return Err(Error::OutOfMemory { backend: "counting", bytes, purpose });
        }
        self.used.fetch_add(bytes, Ordering::Relaxed);
        let addr = self.next.fetch_add((bytes as u64).next_multiple_of(4096), Ordering::Relaxed);
        self.live.lock().unwrap().insert(addr);
        self.most_live.fetch_max(self.live(), Ordering::Relaxed);
        Ok(Memory { addr, bytes, owner: self.clone() })
    }

    fn addr(&self, buffer: &Memory) -> u64 {
        buffer.addr
    }

    fn create_stream(&self) -> Result<()> {
        Ok(())
    }

    unsafe fn borrow_stream(&self, _: u64) -> Result<()> {
        Ok(())
    }

    unsafe fn upload(&self, (): &(), _: u64, _: &[u8]) -> Result<()> {
        Self::nothing_runs()
    }

    unsafe fn download(&self, (): &(), _: u64, _: &mut [u8]) -> Result<()> {
        Self::nothing_runs()
    }

    unsafe fn fill(&self, (): &(), _: u64, _: u8, _: usize) -> Result<()> {
        Self::nothing_runs()
    }

    unsafe fn launch(&self, (): &(), (): &(), _: &Launch, _: &Params) -> Result<()> {
        Self::nothing_runs()
    }

    fn synchronize(&self, (): &()) -> Result<()> {
        Ok(())
    }
}

#[test]
fn views_lie_one_after_another_on_aligned_addresses() {
    let device = Counting::with_capacity(1 << 20);
    let mut workspace = Workspace::new(&device, 1).unwrap();
    let [a, b, c, d] = workspace.views(0, &[1, 256, 257, 0]).unwrap();
    assert_eq!((b - a, c - b, d - c, a % 256), (256, 256, 512, 0));
    assert_eq!(workspace.table().bytes().collect::<Vec<_>>(), [1024]);
    // A smaller request reuses the buffer.
    assert_eq!(workspace.views(0, &[5]).unwrap(), [a]);
    assert_eq!(workspace.table().generation(0).unwrap(), 1);
}

#[test]
fn growth_frees_the_old_buffer_first() {
    let device = Counting::with_capacity(1536);
    let mut workspace = Workspace::new(&device, 1).unwrap();
    workspace.reserve(0, &[1024]).unwrap();
    // Both at once would not fit.
    workspace.reserve(0, &[1280]).unwrap();
    assert_eq!((device.live(), device.most_live.load(Ordering::Relaxed)), (1, 1));
}

#[test]
fn memory_running_out_leaves_an_empty_slot_that_works_again() {
    let device = Counting::with_capacity(1024);
    let mut workspace = Workspace::new(&device, 2).unwrap();
    workspace.reserve(0, &[512]).unwrap();
    let error = workspace.reserve(0, &[2048]).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { bytes: 2048, .. }), "{error}");
    assert_eq!((device.live(), workspace.table().bytes().sum::<usize>()), (0, 0));
    workspace.reserve(0, &[1024]).unwrap();
    drop(workspace);
    assert_eq!(device.live(), 0);
}

#[test]
fn a_locked_workspace_says_need_have_and_who_asked() {
    let device = Counting::with_capacity(1 << 20);
    let mut workspace = Workspace::new(&device, 1).unwrap();
    workspace.reserve(0, &[512]).unwrap();
    workspace.lock();
    let line = line!() + 1;
    let error = workspace.views(0, &[512, 1]).unwrap_err();
    let Error::WorkspaceLocked { slot: 0, need: 768, have: 512, caller } = error else { panic!("{error}") };
    assert_eq!((caller.file(), caller.line()), (file!(), line));
    // Nothing changed, and what was reserved still serves.
    workspace.views(0, &[256, 256]).unwrap();
    workspace.unlock();
    workspace.views(0, &[512, 1]).unwrap();
}

#[test]
fn a_first_request_of_no_bytes_works_even_when_locked() {
    let device = Counting::with_capacity(0);
    let mut workspace = Workspace::new(&device, 1).unwrap();
    workspace.lock();
    assert_eq!(workspace.views(0, &[0, 0]).unwrap(), [0, 0]);
    assert!(workspace.views(0, &[]).unwrap().is_empty());
    assert!(workspace.buffer(0).is_none());
}

#[test]
fn bad_arguments_are_named() {
    let device = Counting::with_capacity(1 << 20);
    assert!(matches!(Workspace::new(&device, 0), Err(Error::Argument { arg: "num_slots", .. })));
    let mut workspace = Workspace::new(&device, 1).unwrap();
    assert!(matches!(workspace.views(1, &[1]), Err(Error::Argument { arg: "slot", .. })));
    assert!(matches!(workspace.views(0, &[usize::MAX, 1]), Err(Error::Argument { arg: "sizes", .. })));
    assert!(workspace.buffer(1).is_none());
}

/// User report 18 (vLLM #55336): growth after capture freed memory that graphs used, because nobody had locked.
#[test]
fn report_18_a_buffer_that_a_graph_uses_is_never_replaced() {
    let device = Counting::with_capacity(1 << 20);
    let mut workspace = Workspace::new(&device, 1).unwrap();
    let before = workspace.views(0, &[1000]).unwrap();
    let graph = workspace.buffer(0).unwrap().clone();

    let error = workspace.views(0, &[5000]).unwrap_err();
    assert!(matches!(error, Error::WorkspaceInUse { slot: 0, need: 5120, have: 1024, .. }), "{error}");
    assert_eq!(workspace.table().generation(0).unwrap(), 1);
    assert_eq!(workspace.views(0, &[1000]).unwrap(), before);
    assert!(device.live.lock().unwrap().contains(&before[0]));

    drop(graph);
    workspace.views(0, &[5000]).unwrap();
    assert_eq!((workspace.table().generation(0).unwrap(), device.live()), (3, 1));
}

/// User report 20 (vLLM #42275): only one of two microbatch slots had been sized when the workspace was locked.
#[test]
fn report_20_both_slots_serve_after_the_lock() {
    let device = Counting::with_capacity(1 << 20);
    let mut workspace = Workspace::new(&device, 2).unwrap();
    for slot in 0..2 {
        workspace.reserve(slot, &[4096, 100]).unwrap();
    }
    workspace.lock();
    let (a, b) = (workspace.views(0, &[4096, 100]).unwrap(), workspace.views(1, &[4096, 100]).unwrap());
    assert!(a[1] + 256 <= b[0] || b[1] + 256 <= a[0], "{a:?} and {b:?} overlap");
}
