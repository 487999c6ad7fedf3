//! The state of one wave, and what an instruction may reach while it executes.

use std::ops::Range;

use super::fault::FaultKind;
use super::lds::{Access, Lds};
use super::memory::{Memory, POISON};
use crate::cdna3::inst::{Lanes, sgpr};

/// High dword of the flat addresses that mean LDS.
pub const SHARED_APERTURE: u64 = 0x1_0000;
/// High dword of the flat addresses that mean a lane's private segment.
pub const PRIVATE_APERTURE: u64 = 0x2_0000;

/// What comes after an instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flow {
    /// The next instruction.
    Next,
    /// The instruction with this index.
    Jump(u32),
    /// The instruction at this address.
    JumpTo(u64),
    /// The next instruction, when all waves of the workgroup have come here.
    Barrier,
    /// Nothing: the wave has ended.
    End,
    /// Nothing: [`Context::fault`] says why.
    Fault,
}

/// Architectural state of a wave.
pub struct Wave {
    /// Scalar registers: SGPRs, VCC, trap registers, M0, EXEC.
    pub s: [u32; sgpr::COUNT],
    /// Scalar condition code.
    pub scc: bool,
    /// Vector registers, accumulation registers after the others.
    pub v: Vec<Lanes>,
    /// Index of the next instruction in the program.
    pub pc: u32,
    /// MODE register: rounding and denormals, as the kernel descriptor sets them.
    pub mode: u32,
    /// Private segments, one lane after another.
    pub private: Vec<u8>,
    /// Bytes of one lane's private segment.
    pub private_size: u32,
    /// Number of the wave in its workgroup.
    pub index: u32,
    /// Instructions executed.
    pub executed: u64,
}

impl Wave {
    /// The 64-bit value of a pair of scalar registers.
    #[inline]
    pub fn s64(&self, n: u8) -> u64 {
        u64::from(self.s[n as usize]) | u64::from(self.s[n as usize + 1]) << 32
    }

    /// Writes a pair of scalar registers.
    #[inline]
    pub fn set_s64(&mut self, n: u8, x: u64) {
        self.s[n as usize] = x as u32;
        self.s[n as usize + 1] = (x >> 32) as u32;
    }

    /// The execution mask.
    #[inline]
    pub fn exec(&self) -> u64 {
        self.s64(sgpr::EXEC)
    }

    /// The vector condition code.
    #[inline]
    pub fn vcc(&self) -> u64 {
        self.s64(sgpr::VCC)
    }
}

/// What an instruction works on.
pub struct Context<'a> {
    /// The wave.
    pub wave: &'a mut Wave,
    /// The workgroup's local data share.
    pub lds: &'a mut Lds,
    /// The device's memory.
    pub memory: &'a Memory,
    /// Mistakes that give a defined result are reported.
    pub check: bool,
    /// Reads of never-written memory are reported.
    pub strict: bool,
    /// Address of the program's lowest instruction.
    pub code_base: u64,
    /// Why the last instruction returned [`Flow::Fault`].
    pub fault: Option<FaultKind>,
    /// The allocation that was touched last.
    pub recent: Range<u64>,
}

/// Lanes of a mask, lowest first.
pub fn lanes(mask: u64) -> impl Iterator<Item = usize> {
    std::iter::successors((mask != 0).then_some(mask), |m| {
        let rest = m & (m - 1);
        (rest != 0).then_some(rest)
    })
    .map(|m| m.trailing_zeros() as usize)
}

impl Context<'_> {
    /// Stops the wave.
    #[cold]
    pub fn fail(&mut self, kind: FaultKind) -> Flow {
        self.fault = Some(kind);
        Flow::Fault
    }

    /// Checks that `len` bytes at each active lane's address lie in an allocation.
    pub fn check_addresses(
        &mut self,
        addresses: &[u64; 64],
        mask: u64,
        len: u64,
        write: bool,
    ) -> Result<(), FaultKind> {
        if mask == 0 {
            return Ok(());
        }
        let (mut low, mut high) = (u64::MAX, 0);
        for (lane, address) in addresses.iter().enumerate() {
            let active = mask >> lane & 1 == 1;
            low = low.min(if active { *address } else { u64::MAX });
            high = high.max(if active { *address } else { 0 });
        }
        if self.recent.start <= low && high.saturating_add(len) <= self.recent.end {
            return Ok(());
        }
        for lane in lanes(mask) {
            self.check_address(addresses[lane], len, lane as u32, write)?;
        }
        Ok(())
    }

    /// Checks that `len` bytes at `address` lie in an allocation.
    pub fn check_address(&mut self, address: u64, len: u64, lane: u32, write: bool) -> Result<(), FaultKind> {
        let fits = |range: &Range<u64>| range.start <= address && address.saturating_add(len) <= range.end;
        if fits(&self.recent) {
            return Ok(());
        }
        match self.memory.find(address).filter(fits) {
            Some(range) => {
                self.recent = range;
                Ok(())
            }
            None => Err(FaultKind::OutOfBounds { address, len, lane, write, hint: self.memory.hint(address) }),
        }
    }

    /// Loads `N` bytes at a checked address.
    #[inline]
    pub fn load<const N: usize>(&self, address: u64, lane: u32) -> Result<[u8; N], FaultKind> {
        if self.strict {
            for dword in (address & !3..address + N as u64).step_by(4) {
                // SAFETY: an aligned dword lies in one page, and the checked bytes in it are mapped.
                if unsafe { (dword as *const u32).read_volatile() } == POISON {
                    return Err(FaultKind::NeverWritten { address: dword, lane });
                }
            }
        }
        // SAFETY: the caller has checked the address; other waves' stores are other GPU threads' races.
        Ok(unsafe { (address as *const [u8; N]).read_unaligned() })
    }

    /// Stores `N` bytes at a checked address.
    #[inline]
    pub fn store<const N: usize>(&self, address: u64, x: [u8; N]) {
        // SAFETY: the caller has checked the address; other waves' accesses are other GPU threads' races.
        unsafe { (address as *mut [u8; N]).write_unaligned(x) }
    }

    /// `N` bytes of LDS for this wave's `lane`.
    #[inline]
    pub fn lds<const N: usize>(
        &mut self,
        address: u32,
        lane: usize,
        access: Access,
    ) -> Result<&mut [u8; N], FaultKind> {
        self.lds.access(address, self.wave.index, lane as u32, access)
    }

    /// `N` bytes of a lane's private segment.
    pub fn private<const N: usize>(&mut self, address: i64, lane: usize) -> Result<&mut [u8; N], FaultKind> {
        let size = self.wave.private_size as usize;
        let start = usize::try_from(address).ok().filter(|start| start.saturating_add(N) <= size);
        let bytes = start.and_then(|start| self.wave.private[lane * size + start..][..N].as_mut().try_into().ok());
        bytes.ok_or(FaultKind::PrivateOutOfBounds { address, len: N as u64, lane: lane as u32, size: size as u64 })
    }
}
