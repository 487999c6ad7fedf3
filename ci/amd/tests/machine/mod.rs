#![allow(dead_code, reason = "each test file uses a part")]
//! One wave with memory and LDS, for tests of single instructions, and the language of `instructions.txt`.

use hsakmt::cdna3::decode::{Registers, decode};
use hsakmt::device::{Access, Context, FaultKind, Flow, Lds, Memory, Wave};

/// Vector registers before the accumulation registers.
const ACCUMULATION: usize = 128;
/// Bytes of memory, and of LDS.
pub(crate) const BYTES: usize = 1024;
/// Bytes of a lane's private segment.
pub(crate) const PRIVATE: usize = 64;
/// Where the instruction lies.
const CODE: u64 = 0x10000;

/// A wave and what it can touch.
pub(crate) struct Machine {
    pub(crate) wave: Wave,
    pub(crate) lds: [u8; BYTES],
    pub(crate) memory: Vec<u64>,
    /// A checking device.
    pub(crate) check: bool,
}

/// Everything that an instruction may change.
#[derive(Clone, PartialEq)]
pub(crate) struct State {
    s: [u32; 128],
    scc: bool,
    v: Vec<[u32; 64]>,
    mode: u32,
    lds: [u8; BYTES],
    memory: Vec<u8>,
    private: Vec<u8>,
}

impl Machine {
    pub(crate) fn new() -> Self {
        let wave = Wave {
            s: [0; 128],
            scc: false,
            v: vec![[0; 64]; ACCUMULATION + 64],
            pc: 0,
            mode: 0,
            private: vec![0; PRIVATE * 64],
            private_size: PRIVATE as u32,
            index: 0,
            executed: 0,
        };
        let mut machine = Self { wave, lds: [0; BYTES], memory: vec![0; BYTES / 8], check: false };
        machine.wave.set_s64(126, u64::MAX);
        machine
    }

    pub(crate) fn state(&self) -> State {
        State {
            s: self.wave.s,
            scc: self.wave.scc,
            v: self.wave.v.clone(),
            mode: self.wave.mode,
            lds: self.lds,
            memory: self.memory.iter().flat_map(|x| x.to_le_bytes()).collect(),
            private: self.wave.private.clone(),
        }
    }

    /// Executes the instruction at the start of `words`.
    pub(crate) fn execute(&mut self, words: &[u32]) -> Result<Flow, FaultKind> {
        let registers = Registers { total: (ACCUMULATION + 64) as u16, accumulation: ACCUMULATION as u16 };
        let inst = decode(words, registers).unwrap_or_else(|e| panic!("{words:x?}: {e:?}"));
        assert_eq!(usize::from(inst.size), 4 * words.len(), "size of {}", inst.row.name);
        let memory = Memory::default();
        memory.insert(self.memory.as_ptr() as u64, BYTES as u64);
        let mut lds = Lds::new(BYTES as u32, false, false);
        for (at, dword) in self.lds.chunks_exact(4).enumerate() {
            lds.access::<4>(4 * at as u32, 0, 0, Access::Write)?.copy_from_slice(dword);
        }
        let mut context = Context {
            wave: &mut self.wave,
            lds: &mut lds,
            memory: &memory,
            check: self.check,
            strict: false,
            code_base: CODE,
            fault: None,
            recent: 0..0,
        };
        let flow = (inst.row.run)(&mut context, &inst);
        let fault = context.fault.take();
        for (at, dword) in self.lds.chunks_exact_mut(4).enumerate() {
            dword.copy_from_slice(lds.access::<4>(4 * at as u32, 0, 0, Access::Read)?);
        }
        fault.map_or(Ok(flow), Err)
    }

    /// Carries out assignments such as `v0=1.0f vcc=3`; gives where the wave should go on.
    pub(crate) fn assign(&mut self, text: &str) -> String {
        let mut flow = String::from("next");
        for part in text.split_whitespace() {
            let (name, value) = part.split_once('=').unwrap_or_else(|| panic!("{part}: no assignment"));
            if name == "flow" {
                flow = value.into();
                continue;
            }
            let base = self.memory.as_ptr() as u64;
            let at = |n: usize| name[n..].parse::<usize>().unwrap_or_else(|_| panic!("{name}: no such place"));
            match name {
                "scc" => self.wave.scc = value == "1",
                "mode" => self.wave.mode = number(value, base, 0) as u32,
                "m0" => self.wave.s[124] = number(value, base, 0) as u32,
                "exec" => self.wave.set_s64(126, number(value, base, 0)),
                "vcc" => self.wave.set_s64(106, number(value, base, 0)),
                _ if name.starts_with("lds@") => {
                    self.lds[at(4)..at(4) + 4].copy_from_slice(&(number(value, base, 0) as u32).to_le_bytes());
                }
                _ if name.starts_with("mem@") => {
                    let x = number(value, base, 0) as u32;
                    let (word, shift) = (at(4) / 8, at(4) % 8 * 8);
                    self.memory[word] = self.memory[word] & !(0xffff_ffff << shift) | u64::from(x) << shift;
                }
                _ if name.starts_with('s') => {
                    let x = number(value, base, 0);
                    self.wave.s[at(1)] = x as u32;
                    if is_wide(value) {
                        self.wave.s[at(1) + 1] = (x >> 32) as u32;
                    }
                }
                _ => {
                    let (register, lane) = name.split_once('@').unwrap_or((name, ""));
                    let n: usize = register[1..].parse().unwrap_or_else(|_| panic!("{name}: no such place"));
                    let n = if name.starts_with('a') { n + ACCUMULATION } else { n };
                    let one = lane.parse::<usize>().ok();
                    for lane in (0..64).filter(|lane| one.is_none_or(|one| one == *lane)) {
                        let x = number(value, base, lane as u64);
                        self.wave.v[n][lane] = x as u32;
                        if is_wide(value) {
                            self.wave.v[n + 1][lane] = (x >> 32) as u32;
                        }
                    }
                }
            }
        }
        flow
    }
}

fn is_wide(value: &str) -> bool {
    value.ends_with('q') || value.starts_with("mem") || (value.ends_with('d') && !value.starts_with("0x"))
}

/// A value's bits.
fn number(text: &str, memory: u64, lane: u64) -> u64 {
    let parse = |text: &str| {
        let (sign, digits) = text.strip_prefix('-').map_or((1, text), |digits| (-1i64, digits));
        let magnitude = match digits.strip_prefix("0x") {
            Some(hex) => u64::from_str_radix(hex, 16),
            None => digits.parse(),
        };
        magnitude.unwrap_or_else(|_| panic!("{text}: no number")).wrapping_mul(sign.cast_unsigned())
    };
    let float = |digits: &str| digits.parse::<f64>().ok();
    if let Some(pair) = text.strip_prefix('(') {
        let (low, high) = pair.trim_end_matches(')').split_once(',').expect("two halves");
        return number(low, memory, lane) & 0xffff | number(high, memory, lane) << 16;
    }
    if let Some(offset) = text.strip_prefix("mem") {
        return memory + if offset.is_empty() { 0 } else { parse(&offset[1..]) };
    }
    if let Some(rest) = text.strip_prefix("lane*") {
        let (factor, addend) = rest.split_once('+').unwrap_or((rest, "0"));
        return lane * parse(factor) + parse(addend);
    }
    if let Some(digits) = text.strip_suffix('q') {
        return parse(digits);
    }
    if !text.starts_with("0x") && text.contains('.') {
        let x = float(&text[..text.len() - 1]).unwrap_or_else(|| panic!("{text}: no float"));
        return match text.as_bytes()[text.len() - 1] {
            b'f' => (x as f32).to_bits().into(),
            b'h' => half::f16::from_f64(x).to_bits().into(),
            b'b' => half::bf16::from_f64(x).to_bits().into(),
            _ => x.to_bits(),
        };
    }
    parse(text)
}

impl State {
    /// Says where two states differ.
    pub(crate) fn difference(&self, other: &Self) -> Vec<String> {
        let mut found = Vec::new();
        let mut differ = |name: String, got: u64, want: u64| {
            if got != want && found.len() < 8 {
                found.push(format!("{name} is {got:#x}, should be {want:#x}"));
            }
        };
        for n in 0..128 {
            differ(format!("s{n}"), self.s[n].into(), other.s[n].into());
        }
        for n in 0..self.v.len() {
            for lane in 0..64 {
                differ(format!("v{n}@{lane}"), self.v[n][lane].into(), other.v[n][lane].into());
            }
        }
        differ("scc".into(), self.scc.into(), other.scc.into());
        differ("mode".into(), self.mode.into(), other.mode.into());
        for n in 0..BYTES {
            differ(format!("lds byte {n}"), self.lds[n].into(), other.lds[n].into());
            differ(format!("memory byte {n}"), self.memory[n].into(), other.memory[n].into());
        }
        for n in 0..self.private.len() {
            differ(format!("private byte {n}"), self.private[n].into(), other.private[n].into());
        }
        found
    }
}

/// A line of `instructions.txt`.
#[derive(Clone)]
pub(crate) struct Case {
    pub(crate) assembly: String,
    pub(crate) words: Vec<u32>,
    pub(crate) before: String,
    pub(crate) after: String,
}

impl Case {
    /// All lines.
    pub(crate) fn all() -> Vec<Self> {
        let text = include_str!("../instructions.txt");
        let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
        lines.map(Self::parse).collect()
    }

    fn parse(line: &str) -> Self {
        let mut fields = line.rsplitn(4, " |");
        let mut next = || fields.next().unwrap_or_else(|| panic!("{line}: too few fields")).trim().to_owned();
        let (after, before, words, assembly) = (next(), next(), next(), next());
        let words = words.split_whitespace().map(|word| u32::from_str_radix(word, 16).expect("an encoding")).collect();
        Self { assembly, words, before, after }
    }

    /// The mnemonic, without the suffix for the encoding.
    pub(crate) fn mnemonic(&self) -> &str {
        let name = self.assembly.split_whitespace().next().unwrap_or("");
        ["_e64", "_e32", "_sdwa", "_dpp"].iter().fold(name, |name, suffix| name.strip_suffix(suffix).unwrap_or(name))
    }

    /// Runs it; `prepare` may change the machine before, and what is expected after.
    pub(crate) fn run_with(&self, prepare: impl Fn(&mut Machine)) -> Result<(), String> {
        let mut machine = Machine::new();
        machine.assign(&self.before);
        prepare(&mut machine);
        let mut want = Machine::new();
        // The expected state's memory has another address, so addresses are copied, not made again.
        want.wave.s = machine.wave.s;
        want.wave.scc = machine.wave.scc;
        want.wave.v = machine.wave.v.clone();
        want.wave.mode = machine.wave.mode;
        want.wave.private = machine.wave.private.clone();
        (want.lds, want.memory) = (machine.lds, machine.memory.clone());
        let flow = want.assign(&self.after);
        let got = match machine.execute(&self.words) {
            Ok(Flow::Next) => "next".into(),
            Ok(Flow::Jump(_)) => "jump".into(),
            Ok(Flow::JumpTo(address)) => format!("{address:#x}"),
            Ok(Flow::Barrier) => "barrier".into(),
            Ok(Flow::End) => "end".into(),
            Ok(Flow::Fault) => "fault without a reason".into(),
            Err(kind) if flow == "fault" => {
                let _described = kind.to_string();
                return Ok(());
            }
            Err(kind) => kind.to_string(),
        };
        let mut wrong = machine.state().difference(&want.state());
        if got != flow {
            wrong.push(format!("it goes on with {got}, should with {flow}"));
        }
        if wrong.is_empty() {
            Ok(())
        } else {
            Err(format!("{} | {}: {}", self.assembly, self.before, wrong.join("; ")))
        }
    }

    /// Runs it as it is.
    pub(crate) fn run(&self) -> Result<(), String> {
        self.run_with(|_| ())
    }
}
