//! AMD GPU code objects: the kernel descriptor, and a small loader for programs that run with no HIP runtime.

use std::collections::BTreeMap;

use thiserror::Error;

use super::memory::Memory;
use crate::cdna3::decode::Registers;

/// What a kernel descriptor (64 bytes, code object versions 3 to 6) asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelDescriptor {
    /// Static LDS of a workgroup, in bytes.
    pub group_segment: u32,
    /// Private segment of a work item, in bytes.
    pub private_segment: u32,
    /// Bytes from the descriptor to the entry point.
    pub entry_offset: i64,
    /// COMPUTE_PGM_RSRC1 to 3.
    pub rsrc: [u32; 3],
    /// Which values the kernel wants in its first scalar registers.
    pub properties: u16,
    /// Kernel arguments that are loaded into scalar registers before it starts: dwords, and the first one.
    pub preload: (u16, u16),
}

impl KernelDescriptor {
    /// Bytes of a descriptor.
    pub const SIZE: usize = 64;

    /// Reads a descriptor.
    ///
    /// # Errors
    /// Says which mode it asks for that is not emulated.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        if bytes.len() < Self::SIZE {
            return Err("a kernel descriptor has 64 bytes".into());
        }
        let u32_at = |at: usize| u32::from_le_bytes(std::array::from_fn(|n| bytes[at + n]));
        let u16_at = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let preload = u16_at(58);
        let descriptor = Self {
            group_segment: u32_at(0),
            private_segment: u32_at(4),
            entry_offset: i64::from_le_bytes(std::array::from_fn(|n| bytes[16 + n])),
            rsrc: [u32_at(48), u32_at(52), u32_at(44)],
            properties: u16_at(56),
            preload: (preload & 0x7f, preload >> 7),
        };
        if descriptor.mode() & 0xf != 0 {
            return Err("the kernel asks for a rounding mode other than nearest even".into());
        }
        Ok(descriptor)
    }

    /// Initial MODE register: rounding and denormal modes. Denormals are kept whatever it says.
    pub fn mode(&self) -> u32 {
        self.rsrc[0] >> 12 & 0xff
    }

    /// Vector registers: allocated in units of 8, the accumulation registers from a multiple of 4.
    pub fn registers(&self) -> Registers {
        let total = ((self.rsrc[0] & 0x3f) as u16 + 1) * 8;
        let accumulation = ((self.rsrc[2] & 0x3f) as u16 + 1) * 4;
        Registers { total: total.max(accumulation), accumulation }
    }

    /// Scalar registers that are loaded before the first workgroup id.
    pub fn user_sgprs(&self) -> u32 {
        self.rsrc[1] >> 1 & 0x1f
    }

    /// A kernel with preloaded arguments starts with 256 bytes for hardware that cannot preload.
    pub fn preload_skip(&self) -> u64 {
        if self.preload.0 > 0 { 256 } else { 0 }
    }
}

/// Why a code object cannot be loaded.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum LoadError {
    /// It is no 64-bit little-endian ELF file.
    #[error("no 64-bit little-endian ELF file")]
    NotElf,
    /// A table lies outside the file.
    #[error("the ELF file is cut short at byte {0}")]
    Truncated(usize),
    /// A relocation that the loader does not know.
    #[error("relocation type {0} is not implemented")]
    Relocation(u32),
    /// There is no memory for it.
    #[error("{0} bytes of memory cannot be had")]
    OutOfMemory(usize),
}

/// A loaded code object; its memory is freed with it.
pub struct CodeObject {
    image: Vec<u64>,
    kernels: BTreeMap<String, u64>,
}

const PT_LOAD: u32 = 1;
const SHT_DYNSYM: u32 = 11;
const SHT_RELA: u32 = 4;
const R_AMDGPU_ABS64: u32 = 3;
const R_AMDGPU_RELATIVE64: u32 = 13;

struct Elf<'a>(&'a [u8]);

impl Elf<'_> {
    fn bytes<const N: usize>(&self, at: usize) -> Result<[u8; N], LoadError> {
        let bytes = self.0.get(at..at.saturating_add(N)).ok_or(LoadError::Truncated(at))?;
        bytes.try_into().map_err(|_| LoadError::Truncated(at))
    }

    fn u16(&self, at: usize) -> Result<u16, LoadError> {
        self.bytes(at).map(u16::from_le_bytes)
    }

    fn u32(&self, at: usize) -> Result<u32, LoadError> {
        self.bytes(at).map(u32::from_le_bytes)
    }

    fn u64(&self, at: usize) -> Result<u64, LoadError> {
        self.bytes(at).map(u64::from_le_bytes)
    }

    fn name(&self, at: usize) -> Result<String, LoadError> {
        let rest = self.0.get(at..).ok_or(LoadError::Truncated(at))?;
        let end = rest.iter().position(|byte| *byte == 0).ok_or(LoadError::Truncated(at))?;
        Ok(String::from_utf8_lossy(&rest[..end]).into_owned())
    }
}

impl CodeObject {
    /// Loads an ELF code object and lets kernels on `memory`'s device use it.
    ///
    /// # Errors
    /// The file is no code object, or damaged.
    pub fn load(file: &[u8], memory: &Memory) -> Result<Self, LoadError> {
        let elf = Elf(file);
        if file.get(..6) != Some(b"\x7fELF\x02\x01") {
            return Err(LoadError::NotElf);
        }
        let mut segments = Vec::new();
        let (first, count) = (elf.u64(32)? as usize, elf.u16(56)?);
        for n in 0..usize::from(count) {
            let at = first + 56 * n;
            if elf.u32(at)? == PT_LOAD {
                segments.push((
                    elf.u64(at + 8)? as usize,
                    elf.u64(at + 16)? as usize,
                    elf.u64(at + 32)? as usize,
                    elf.u64(at + 40)? as usize,
                ));
            }
        }
        let size = segments.iter().map(|(_, address, _, len)| address + len).max().unwrap_or(0);
        // A page more, so that the image can start at a page as segments expect.
        let mut image = Vec::new();
        image.try_reserve_exact((size + 8192) / 8).map_err(|_| LoadError::OutOfMemory(size))?;
        image.resize((size + 8192) / 8, 0u64);
        let base = (image.as_ptr() as u64).next_multiple_of(4096);
        // SAFETY: the vector holds 8192 bytes more than `size`, and at most 4095 are skipped.
        let bytes = unsafe { std::slice::from_raw_parts_mut(base as *mut u8, size + 4096) };
        for (offset, address, len, _) in segments {
            let data = file.get(offset..offset + len).ok_or(LoadError::Truncated(offset))?;
            bytes[address..address + len].copy_from_slice(data);
        }
        let mut kernels = BTreeMap::new();
        let (sections, count) = (elf.u64(40)? as usize, elf.u16(60)?);
        let section = |n: usize| sections + 64 * n;
        for n in 0..usize::from(count) {
            let at = section(n);
            let (offset, len) = (elf.u64(at + 24)? as usize, elf.u64(at + 32)? as usize);
            match elf.u32(at + 4)? {
                SHT_DYNSYM => {
                    let strings = elf.u64(section(elf.u32(at + 40)? as usize) + 24)? as usize;
                    for symbol in (offset..offset + len).step_by(24) {
                        let name = elf.name(strings + elf.u32(symbol)? as usize)?;
                        if let Some(name) = name.strip_suffix(".kd") {
                            kernels.insert(name.into(), base + elf.u64(symbol + 8)?);
                        }
                    }
                }
                SHT_RELA => {
                    let symbols = elf.u64(section(elf.u32(at + 40)? as usize) + 24)? as usize;
                    for entry in (offset..offset + len).step_by(24) {
                        let (place, info, addend) =
                            (elf.u64(entry)? as usize, elf.u64(entry + 8)?, elf.u64(entry + 16)?);
                        let value = match info as u32 {
                            R_AMDGPU_RELATIVE64 => base.wrapping_add(addend),
                            R_AMDGPU_ABS64 => {
                                let symbol = symbols + 24 * (info >> 32) as usize;
                                base.wrapping_add(elf.u64(symbol + 8)?).wrapping_add(addend)
                            }
                            other => return Err(LoadError::Relocation(other)),
                        };
                        let bytes = bytes.get_mut(place..place + 8).ok_or(LoadError::Truncated(place))?;
                        bytes.copy_from_slice(&value.to_le_bytes());
                    }
                }
                _ => {}
            }
        }
        memory.insert(base, size as u64 + 4096);
        Ok(Self { image, kernels })
    }

    /// Address of a kernel's descriptor.
    pub fn kernel(&self, name: &str) -> Option<u64> {
        self.kernels.get(name).copied()
    }

    /// Names of the kernels.
    pub fn kernels(&self) -> impl Iterator<Item = &str> {
        self.kernels.keys().map(String::as_str)
    }

    /// Bytes that the loaded image takes.
    pub fn size(&self) -> usize {
        self.image.len() * 8
    }
}
