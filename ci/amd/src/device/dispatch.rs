//! A device: memory, decoded programs, and grids of workgroups on the host's threads.

use std::any::Any;
use std::collections::{BTreeMap, HashMap};
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use super::config::Config;
use super::fault::{Fault, FaultKind};
use super::memory::Memory;
use super::program::Program;
use super::statistics::Statistics;
use super::workgroup::Workgroup;

/// One kernel launch, as an AQL dispatch packet says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Dispatch {
    /// Address of the kernel descriptor.
    pub kernel: u64,
    /// Work items along x, y, z.
    pub grid: [u32; 3],
    /// Work items of a workgroup along x, y, z.
    pub workgroup: [u32; 3],
    /// LDS of a workgroup in bytes, static and dynamic.
    pub group_bytes: u32,
    /// Private segment of a work item in bytes.
    pub private_bytes: u32,
    /// Address of the kernel arguments.
    pub kernarg: u64,
    /// Address of the packet, which kernels may read.
    pub packet: u64,
    /// Address of the queue's descriptor, which kernels may read.
    pub queue: u64,
    /// Number of the packet in its queue.
    pub id: u64,
}

/// An emulated GPU.
#[derive(Default)]
pub struct Device {
    /// What was configured.
    pub config: Config,
    /// Address space.
    pub memory: Memory,
    programs: Mutex<HashMap<u64, Arc<Program>>>,
    statistics: Mutex<Statistics>,
}

/// Most LDS that a workgroup can have, in bytes.
const LDS_LIMIT: u32 = 65536;

impl Device {
    /// A device with nothing in its memory.
    pub fn new(config: Config) -> Self {
        Self { config, ..Self::default() }
    }

    /// Runs a kernel to its end.
    ///
    /// # Errors
    /// The first fault of any workgroup; the others stop.
    pub fn run(&self, dispatch: &Dispatch) -> Result<(), Fault> {
        let program = self.program(dispatch)?;
        let counts: Vec<u32> = (0..3).map(|n| dispatch.grid[n].div_ceil(dispatch.workgroup[n])).collect();
        let total = counts.iter().map(|count| u64::from(*count)).product::<u64>();
        let (next, stop) = (AtomicU64::new(0), AtomicBool::new(false));
        let started = Instant::now();
        let results: Mutex<(BTreeMap<&'static str, u64>, Option<Fault>)> = Mutex::default();
        let work = || {
            let mut group = Workgroup::new(self, Arc::clone(&program), dispatch);
            let mut fault = None;
            while !stop.load(Ordering::Relaxed) {
                let n = next.fetch_add(1, Ordering::Relaxed);
                if n >= total {
                    break;
                }
                let (x, y) = (u64::from(counts[0]), u64::from(counts[1]));
                let id = [(n % x) as u32, (n / x % y) as u32, (n / (x * y)) as u32];
                let run = std::panic::catch_unwind(AssertUnwindSafe(|| group.run(id)));
                if let Err(error) = run.unwrap_or_else(|panic| Err(internal(&program, id, &*panic))) {
                    fault = Some(error);
                    stop.store(true, Ordering::Relaxed);
                }
            }
            let mut results = results.lock().unwrap_or_else(PoisonError::into_inner);
            for (name, count) in group.executed() {
                *results.0.entry(name).or_default() += count;
            }
            results.1 = results.1.take().or(fault);
        };
        let threads = self.config.threads.min(usize::try_from(total).unwrap_or(usize::MAX)).max(1);
        std::thread::scope(|scope| {
            for _ in 1..threads {
                scope.spawn(work);
            }
            work();
        });
        let (by_name, fault) = results.into_inner().unwrap_or_else(PoisonError::into_inner);
        self.count(dispatch.kernel, by_name, started.elapsed().as_secs_f64());
        fault.map_or(Ok(()), Err)
    }

    /// What has been executed so far.
    pub fn statistics(&self) -> Statistics {
        self.statistics.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Writes each allocation's bytes as never written, on a device that checks.
    pub fn poison(&self, base: u64, len: u64) {
        if self.config.check {
            // SAFETY: the caller has just allocated these bytes.
            let dwords = unsafe { std::slice::from_raw_parts_mut(base as *mut u32, len as usize / 4) };
            dwords.fill(super::memory::POISON);
        }
    }

    fn program(&self, dispatch: &Dispatch) -> Result<Arc<Program>, Fault> {
        let fail = |kind| Fault {
            kernel: dispatch.kernel,
            pc: 0,
            offset: 0,
            mnemonic: "dispatch",
            workgroup: [0; 3],
            wave: 0,
            kind,
        };
        let items = dispatch.workgroup.iter().map(|n| u64::from(*n)).product::<u64>();
        if !(1..=1024).contains(&items) || dispatch.grid.contains(&0) {
            let text = format!("workgroup {:?} of grid {:?}", dispatch.workgroup, dispatch.grid);
            return Err(fail(FaultKind::Dispatch(text)));
        }
        let mut programs = self.programs.lock().unwrap_or_else(PoisonError::into_inner);
        let cached = programs.get(&dispatch.kernel).filter(|program| program.is_current(&self.memory));
        let program = match cached {
            Some(program) => Arc::clone(program),
            None => {
                let program = Arc::new(Program::decode(&self.memory, dispatch.kernel).map_err(fail)?);
                programs.insert(dispatch.kernel, Arc::clone(&program));
                program
            }
        };
        let group_bytes = dispatch.group_bytes;
        if group_bytes > LDS_LIMIT {
            return Err(fail(FaultKind::Dispatch(format!("{group_bytes} bytes of LDS, the device has {LDS_LIMIT}"))));
        }
        let preload = u64::from(program.descriptor.preload.0 + program.descriptor.preload.1) * 4;
        if preload > 0 && self.memory.read(dispatch.kernarg, preload as usize).is_none() {
            return Err(fail(FaultKind::Dispatch(format!(
                "kernel arguments at {:#x} are not mapped",
                dispatch.kernarg
            ))));
        }
        Ok(program)
    }

    /// The program with a function that it jumps to through a register.
    pub(super) fn extend(&self, program: &Arc<Program>, address: u64) -> Result<Arc<Program>, FaultKind> {
        let mut programs = self.programs.lock().unwrap_or_else(PoisonError::into_inner);
        // Another workgroup may have come to it before, or to another function.
        let latest = programs.get(&program.kernel).unwrap_or(program);
        if latest.index_of(address).is_some() {
            return Ok(Arc::clone(latest));
        }
        let extended = Arc::new(latest.with_function(&self.memory, address)?);
        programs.insert(program.kernel, Arc::clone(&extended));
        Ok(extended)
    }

    fn count(&self, kernel: u64, by_name: BTreeMap<&'static str, u64>, seconds: f64) {
        let mut statistics = self.statistics.lock().unwrap_or_else(PoisonError::into_inner);
        let kernel = statistics.kernels.entry(kernel).or_default();
        kernel.dispatches += 1;
        kernel.instructions += by_name.values().sum::<u64>();
        kernel.seconds += seconds;
        for (name, count) in by_name {
            *statistics.mnemonics.entry(name).or_default() += count;
        }
    }
}

fn internal(program: &Program, workgroup: [u32; 3], panic: &(dyn Any + Send)) -> Fault {
    let text = panic.downcast_ref::<String>().cloned();
    let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).into())).unwrap_or_default();
    let kind = FaultKind::Internal(text);
    Fault { kernel: program.kernel, pc: program.base, offset: 0, mnemonic: "?", workgroup, wave: 0, kind }
}
