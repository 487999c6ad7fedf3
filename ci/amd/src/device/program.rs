//! A kernel's machine code, decoded once.

use std::collections::BTreeMap;

use super::code_object::KernelDescriptor;
use super::fault::FaultKind;
use super::memory::Memory;
use crate::cdna3::decode::{self, Registers, Successor};
use crate::cdna3::inst::{Inst, Row, row};

/// The instructions that are reachable from a kernel's entry, in the order of their addresses.
pub struct Program {
    /// Address of the kernel descriptor.
    pub kernel: u64,
    /// Address of the entry point.
    pub entry: u64,
    /// Address of the lowest instruction.
    pub base: u64,
    /// Index of the instruction at the entry point.
    pub start: u32,
    /// The instructions.
    pub insts: Vec<Inst>,
    /// What the kernel descriptor asks for.
    pub descriptor: KernelDescriptor,
    /// Addresses that only jumps through registers reach: functions that the kernel calls.
    functions: Vec<u64>,
    /// The machine code that was decoded, to notice that other code has taken its place.
    image: Vec<u8>,
}

/// Stands for an instruction that no table has; it stops the wave that comes to it.
static UNDECODED: Row = row(0, "(not implemented)", |c, i| {
    let fault = undecoded(c.memory, c.code_base + u64::from(i.offset));
    c.fail(fault)
});

/// Why the instruction at an address cannot be executed.
fn undecoded(memory: &Memory, at: u64) -> FaultKind {
    let words = read_words(memory, at).unwrap_or_default();
    let form = decode::decode(&words, Registers { total: 512, accumulation: 256 }).err().map(|e| e.form);
    let len = words.len().min(2);
    FaultKind::Undecoded { words: words[..len].to_vec(), form: form.unwrap_or_default() }
}

impl Program {
    /// Decodes what is reachable from the entry of the kernel whose descriptor lies at `kernel`.
    ///
    /// # Errors
    /// The descriptor, or code that a branch leads to, lies outside every allocation.
    pub fn decode(memory: &Memory, kernel: u64) -> Result<Self, FaultKind> {
        Self::decode_with(memory, kernel, Vec::new())
    }

    /// The same kernel with a function at `address` too, to which it jumps through a register.
    ///
    /// # Errors
    /// The function lies outside every allocation.
    pub(super) fn with_function(&self, memory: &Memory, address: u64) -> Result<Self, FaultKind> {
        let functions = self.functions.iter().copied().chain([address]).collect();
        Self::decode_with(memory, self.kernel, functions).map_err(|_| FaultKind::IndirectJump(address))
    }

    fn decode_with(memory: &Memory, kernel: u64, functions: Vec<u64>) -> Result<Self, FaultKind> {
        let bytes = memory.read(kernel, KernelDescriptor::SIZE);
        let bytes = bytes.ok_or_else(|| FaultKind::Dispatch(format!("no kernel descriptor at {kernel:#x}")))?;
        let descriptor = KernelDescriptor::parse(&bytes).map_err(FaultKind::Dispatch)?;
        let entry =
            kernel.wrapping_add(descriptor.entry_offset.cast_unsigned()).wrapping_add(descriptor.preload_skip());
        let registers = descriptor.registers();

        let mut found: BTreeMap<u64, (Inst, Option<u64>)> = BTreeMap::new();
        let mut pending = vec![entry];
        pending.extend(&functions);
        while let Some(mut at) = pending.pop() {
            while !found.contains_key(&at) {
                let words = read_words(memory, at)?;
                let mut inst = match decode::decode(&words, registers) {
                    Ok(inst) => inst,
                    Err(_) => {
                        found.insert(at, (Inst::new(&UNDECODED), None));
                        break;
                    }
                };
                inst.offset = 0;
                let next = at + u64::from(inst.size);
                let (target, falls_through) = match decode::successor(&words) {
                    Successor::Next => (None, true),
                    Successor::Stop => (None, false),
                    Successor::Branch { words, always } => {
                        (Some(next.wrapping_add_signed(4 * i64::from(words))), !always)
                    }
                };
                found.insert(at, (inst, target));
                pending.extend(target);
                if !falls_through {
                    break;
                }
                at = next;
            }
        }

        let base = found.keys().next().copied().unwrap_or(entry);
        let addresses: Vec<u64> = found.keys().copied().collect();
        let index = |address: u64| addresses.binary_search(&address).unwrap_or(0) as u32;
        let mut insts = Vec::with_capacity(found.len());
        for (address, (mut inst, target)) in found {
            inst.offset = (address - base) as u32;
            if let Some(target) = target {
                inst.imm = index(target).cast_signed();
            }
            insts.push(inst);
        }
        let last = insts.last().map_or(0, |inst| inst.offset as usize + usize::from(inst.size));
        let image = memory.read(base, last).unwrap_or_default();
        Ok(Self { kernel, entry, base, start: index(entry), insts, descriptor, functions, image })
    }

    /// Says whether memory still holds the code that was decoded.
    pub fn is_current(&self, memory: &Memory) -> bool {
        let descriptor = memory.read(self.kernel, KernelDescriptor::SIZE);
        let same_kernel = descriptor.and_then(|bytes| KernelDescriptor::parse(&bytes).ok()) == Some(self.descriptor);
        same_kernel && memory.read(self.base, self.image.len()).is_some_and(|bytes| bytes == self.image)
    }

    /// The reachable instructions that no table has.
    pub fn undecoded(&self, memory: &Memory) -> impl Iterator<Item = FaultKind> {
        let missing = self.insts.iter().filter(|inst| std::ptr::eq(inst.row, &raw const UNDECODED));
        missing.map(|inst| undecoded(memory, self.base + u64::from(inst.offset)))
    }

    /// Index of the instruction at an address.
    pub fn index_of(&self, address: u64) -> Option<u32> {
        let offset = u32::try_from(address.checked_sub(self.base)?).ok()?;
        self.insts.binary_search_by_key(&offset, |inst| inst.offset).ok().map(|at| at as u32)
    }
}

/// Up to three words at an address.
fn read_words(memory: &Memory, at: u64) -> Result<Vec<u32>, FaultKind> {
    let word = |n: u64| memory.read(at + 4 * n, 4).map(|bytes| u32::from_le_bytes(std::array::from_fn(|n| bytes[n])));
    let words: Vec<u32> = (0..3).map_while(word).collect();
    if words.is_empty() {
        return Err(FaultKind::Dispatch(format!("code at {at:#x} lies in no allocation")));
    }
    Ok(words)
}
