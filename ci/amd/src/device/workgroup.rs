//! Runs the waves of one workgroup after another.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::code_object::KernelDescriptor;
use super::dispatch::{Device, Dispatch};
use super::fault::{Fault, FaultKind};
use super::lds::Lds;
use super::program::Program;
use super::wave::{Context, Flow, PRIVATE_APERTURE, Wave};
use crate::cdna3::inst::{Lanes, sgpr};

/// Instructions that a wave executes before another one has its turn; waves may wait for each other by memory.
const TURN: u32 = 1 << 20;
/// What registers hold before they are written: a NaN.
const REGISTER_POISON: u32 = 0xffc5_a3f1;

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Ready,
    AtBarrier,
    Ended,
}

/// The waves and LDS of one workgroup; used again for the next one.
pub(super) struct Workgroup<'a> {
    device: &'a Device,
    program: Arc<Program>,
    dispatch: &'a Dispatch,
    waves: Vec<(Wave, State)>,
    lds: Lds,
    /// Executions of each of the program's instructions.
    counts: Vec<u64>,
}

impl<'a> Workgroup<'a> {
    pub(super) fn new(device: &'a Device, program: Arc<Program>, dispatch: &'a Dispatch) -> Self {
        let items: u32 = dispatch.workgroup.iter().product();
        let registers = usize::from(program.descriptor.registers().total);
        let wave = |index| Wave {
            s: [0; sgpr::COUNT],
            scc: false,
            v: vec![[0; 64]; registers],
            pc: 0,
            mode: 0,
            private: vec![0; dispatch.private_bytes as usize * 64],
            private_size: dispatch.private_bytes,
            index,
            executed: 0,
        };
        Self {
            device,
            dispatch,
            waves: (0..items.div_ceil(64)).map(|index| (wave(index), State::Ready)).collect(),
            lds: Lds::new(dispatch.group_bytes, device.config.check, device.config.strict),
            counts: vec![0; program.insts.len()],
            program,
        }
    }

    /// Instructions executed so far, by mnemonic.
    pub(super) fn executed(&self) -> BTreeMap<&'static str, u64> {
        let mut by_name = BTreeMap::new();
        for (inst, count) in self.program.insts.iter().zip(&self.counts).filter(|(_, count)| **count > 0) {
            *by_name.entry(inst.row.name).or_default() += count;
        }
        by_name
    }

    /// Takes a function into the program that a wave has jumped to; gives the index of its first instruction.
    fn extend(&mut self, address: u64) -> Result<u32, FaultKind> {
        let program = self.device.extend(&self.program, address)?;
        let moved = |index: u32| {
            let offset = self.program.insts.get(index as usize).map_or(0, |inst| u64::from(inst.offset));
            program.index_of(self.program.base + offset).unwrap_or(0)
        };
        let mut counts = vec![0; program.insts.len()];
        for (index, count) in self.counts.iter().enumerate() {
            counts[moved(index as u32) as usize] = *count;
        }
        for (wave, _) in &mut self.waves {
            wave.pc = moved(wave.pc);
        }
        let target = program.index_of(address).ok_or(FaultKind::IndirectJump(address))?;
        (self.program, self.counts) = (program, counts);
        Ok(target)
    }

    /// Runs workgroup `id` to its end.
    pub(super) fn run(&mut self, id: [u32; 3]) -> Result<(), Fault> {
        self.lds.reset();
        for (wave, state) in &mut self.waves {
            start(wave, &self.program, self.dispatch, id);
            *state = State::Ready;
        }
        loop {
            for at in 0..self.waves.len() {
                if self.waves[at].1 == State::Ready {
                    self.turn(at, id)?;
                }
            }
            if self.waves.iter().all(|(_, state)| *state == State::Ended) {
                return Ok(());
            }
            // Waves that have ended are not waited for.
            if self.waves.iter().all(|(_, state)| *state != State::Ready) {
                self.lds.barrier();
                for (_, state) in &mut self.waves {
                    if *state == State::AtBarrier {
                        *state = State::Ready;
                    }
                }
            }
        }
    }

    /// Lets a wave execute until it ends, comes to a barrier, or has had its turn.
    fn turn(&mut self, at: usize, id: [u32; 3]) -> Result<(), Fault> {
        let mut left = TURN;
        while left > 0 {
            let stopped = match self.execute(at, &mut left) {
                Ok(None) => return Ok(()),
                Ok(Some(address)) => self.extend(address).map(|target| self.waves[at].0.pc = target),
                Err(kind) => Err(kind),
            };
            stopped.map_err(|kind| self.fault(at, id, kind))?;
        }
        Ok(())
    }

    /// A fault of the instruction before the wave's next one.
    fn fault(&self, at: usize, id: [u32; 3], kind: FaultKind) -> Fault {
        let program = &self.program;
        let inst = self.waves[at].0.pc.checked_sub(1).and_then(|pc| program.insts.get(pc as usize));
        let pc = program.base + inst.map_or(0, |inst| u64::from(inst.offset));
        Fault {
            kernel: program.kernel,
            pc,
            offset: pc.wrapping_sub(program.entry).cast_signed(),
            mnemonic: inst.map_or("?", |inst| inst.row.name),
            workgroup: id,
            wave: at as u32,
            kind,
        }
    }

    /// Executes at most `left` instructions of a wave. Gives the address of a function that the program does not hold yet.
    fn execute(&mut self, at: usize, left: &mut u32) -> Result<Option<u64>, FaultKind> {
        let (wave, state) = &mut self.waves[at];
        let program = &*self.program;
        let mut pc = wave.pc;
        let mut context = Context {
            wave,
            lds: &mut self.lds,
            memory: &self.device.memory,
            check: self.device.config.check,
            strict: self.device.config.strict,
            code_base: program.base,
            fault: None,
            recent: 0..0,
        };
        let before = *left;
        let mut unknown = None;
        let mut fault = None;
        while *left > 0 {
            let Some(inst) = program.insts.get(pc as usize) else {
                fault = Some(FaultKind::Internal("the program ran past its end".into()));
                break;
            };
            self.counts[pc as usize] += 1;
            *left -= 1;
            pc += 1;
            match (inst.row.run)(&mut context, inst) {
                Flow::Next => continue,
                Flow::Jump(target) => {
                    pc = target;
                    continue;
                }
                Flow::JumpTo(address) => match program.index_of(address) {
                    Some(target) => {
                        pc = target;
                        continue;
                    }
                    None => unknown = Some(address),
                },
                Flow::Barrier => *state = State::AtBarrier,
                Flow::End => *state = State::Ended,
                Flow::Fault => fault = Some(context.fault.take().unwrap_or_else(no_reason)),
            }
            break;
        }
        context.wave.pc = pc;
        context.wave.executed += u64::from(before - *left);
        match fault {
            Some(kind) => Err(kind),
            None if context.wave.executed > self.device.config.wave_limit => {
                Err(FaultKind::Hung(context.wave.executed))
            }
            None => Ok(unknown),
        }
    }
}

fn no_reason() -> FaultKind {
    FaultKind::Internal("a fault with no reason".into())
}

/// Puts a wave at the kernel's entry with the registers that the hardware sets up.
fn start(wave: &mut Wave, program: &Program, dispatch: &Dispatch, id: [u32; 3]) {
    let descriptor = &program.descriptor;
    wave.s = [REGISTER_POISON; sgpr::COUNT];
    wave.scc = false;
    wave.v.fill([REGISTER_POISON; 64]);
    wave.pc = program.start;
    wave.mode = descriptor.mode();
    wave.executed = 0;
    scalar_registers(wave, descriptor, dispatch, id);
    let [x, y, _] = dispatch.workgroup;
    let first = wave.index * 64;
    let mut exec = 0u64;
    let mut ids: Lanes = [0; 64];
    let items = x * y * dispatch.workgroup[2];
    for (lane, packed) in ids.iter_mut().enumerate() {
        let item = first + lane as u32;
        if item >= items {
            break;
        }
        let at = [item % x, item / x % y, item / (x * y)];
        *packed = at[0] | at[1] << 10 | at[2] << 20;
        // The last workgroups of a grid may be partial.
        let inside = (0..3).all(|n| id[n] * dispatch.workgroup[n] + at[n] < dispatch.grid[n]);
        exec |= u64::from(inside) << lane;
    }
    wave.v[0] = ids;
    wave.set_s64(sgpr::EXEC, exec);
    wave.set_s64(sgpr::VCC, 0);
}

/// Order of the values in the first scalar registers, by the descriptor's property bits.
fn scalar_registers(wave: &mut Wave, descriptor: &KernelDescriptor, dispatch: &Dispatch, id: [u32; 3]) {
    let mut next = 0u8;
    let mut put = |wave: &mut Wave, values: &[u32]| {
        for value in values {
            wave.s[usize::from(next)] = *value;
            next += 1;
        }
    };
    let pair = |x: u64| [x as u32, (x >> 32) as u32];
    let has = |bit: u32| descriptor.properties >> bit & 1 == 1;
    if has(0) {
        put(wave, &[0; 4]); // private segment buffer: private memory is architected here
    }
    for (bit, value) in [
        (1, dispatch.packet),
        (2, dispatch.queue),
        (3, dispatch.kernarg),
        (4, dispatch.id),
        (5, PRIVATE_APERTURE << 32),
    ] {
        if has(bit) {
            put(wave, &pair(value));
        }
    }
    if has(6) {
        put(wave, &[wave.private_size]);
    }
    let (count, first) = descriptor.preload;
    for n in 0..u64::from(count) {
        // SAFETY: the dispatcher has checked that the kernel arguments are mapped.
        let value = unsafe { ((dispatch.kernarg + 4 * (u64::from(first) + n)) as *const u32).read_unaligned() };
        put(wave, &[value]);
    }
    next = next.max(descriptor.user_sgprs() as u8);
    let rsrc2 = descriptor.rsrc[1];
    for (n, workgroup) in id.iter().enumerate() {
        if rsrc2 >> (7 + n) & 1 == 1 {
            wave.s[usize::from(next)] = *workgroup;
            next += 1;
        }
    }
    if rsrc2 >> 10 & 1 == 1 {
        wave.s[usize::from(next)] = 0; // workgroup info
    }
    wave.set_s64(102, PRIVATE_APERTURE << 32); // FLAT_SCRATCH
}
