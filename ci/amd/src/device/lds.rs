//! A workgroup's local data share, with bounds always checked and, on a checking device, races.

use super::fault::FaultKind;

/// What is known about one byte of a checked LDS.
#[derive(Clone, Copy, Default)]
struct Shadow {
    write_epoch: u32,
    write_wave: u32,
    read_epoch: u32,
    read_wave: u32,
    // The write was an atomic, which other waves' atomics may follow.
    atomic: bool,
}

/// A reader that stands for several waves.
const SEVERAL: u32 = u32::MAX;

/// How an access touches LDS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// A load.
    Read,
    /// A store.
    Write,
    /// A read-modify-write.
    Atomic,
}

/// Local data share of one workgroup.
pub struct Lds {
    bytes: Vec<u8>,
    shadow: Option<Vec<Shadow>>,
    // Reads of bytes that were never written are reported.
    strict: bool,
    // Number of barriers passed, plus 1.
    epoch: u32,
}

impl Lds {
    /// `size` bytes, poisoned.
    pub fn new(size: u32, check: bool, strict: bool) -> Self {
        let mut lds = Self { bytes: vec![0; size as usize], shadow: check.then(Vec::new), strict, epoch: 1 };
        lds.reset();
        lds
    }

    /// Makes it as new, for another workgroup.
    pub fn reset(&mut self) {
        self.bytes.fill(0xff);
        if let Some(shadow) = &mut self.shadow {
            shadow.clear();
            shadow.resize(self.bytes.len(), Shadow::default());
        }
        self.epoch = 1;
    }

    /// All waves have met at a barrier.
    pub fn barrier(&mut self) {
        self.epoch += 1;
    }

    /// The `N` bytes at `address` for an access of `wave`'s `lane`.
    #[inline]
    pub fn access<const N: usize>(
        &mut self,
        address: u32,
        wave: u32,
        lane: u32,
        access: Access,
    ) -> Result<&mut [u8; N], FaultKind> {
        if self.shadow.is_some() {
            self.check(address, N as u32, wave, lane, access)?;
        }
        let size = self.bytes.len() as u32;
        let write = access != Access::Read;
        let end = (address as usize).saturating_add(N);
        match self.bytes.get_mut(address as usize..end).and_then(|bytes| bytes.try_into().ok()) {
            Some(bytes) => Ok(bytes),
            None => Err(FaultKind::LdsOutOfBounds { address, len: N as u32, lane, size, write }),
        }
    }

    fn check(&mut self, address: u32, len: u32, wave: u32, lane: u32, access: Access) -> Result<(), FaultKind> {
        let (epoch, strict, Some(shadow)) = (self.epoch, self.strict, &mut self.shadow) else { return Ok(()) };
        if !address.is_multiple_of(len.min(4)) {
            return Err(FaultKind::LdsUnaligned { address, len, lane });
        }
        for byte in address..address.saturating_add(len) {
            let Some(state) = shadow.get_mut(byte as usize) else { break };
            let writes = access != Access::Read;
            let race = |first, first_writes| {
                Err(FaultKind::LdsRace { address: byte, first, first_writes, second: wave, second_writes: writes })
            };
            let both_atomic = access == Access::Atomic && state.atomic;
            if state.write_epoch == epoch && state.write_wave != wave && !both_atomic {
                return race(state.write_wave, true);
            }
            if writes && state.read_epoch == epoch && state.read_wave != wave && !both_atomic {
                let first = if state.read_wave == SEVERAL { u32::from(wave == 0) } else { state.read_wave };
                return race(first, false);
            }
            if access != Access::Write {
                if strict && state.write_epoch == 0 {
                    return Err(FaultKind::LdsNeverWritten { address: byte, lane });
                }
                let others = state.read_epoch == epoch && state.read_wave != wave;
                state.read_wave = if others { SEVERAL } else { wave };
                state.read_epoch = epoch;
            }
            if writes {
                (state.write_epoch, state.write_wave, state.atomic) = (epoch, wave, access == Access::Atomic);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(lds: &mut Lds, address: u32, wave: u32, access: Access) -> Result<(), FaultKind> {
        lds.access::<4>(address, wave, 0, access).map(|_| ())
    }

    #[test]
    fn waves_that_share_bytes_need_a_barrier() {
        let mut lds = Lds::new(64, true, true);
        touch(&mut lds, 0, 0, Access::Write).unwrap();
        touch(&mut lds, 0, 0, Access::Read).unwrap();
        assert!(matches!(touch(&mut lds, 0, 1, Access::Read), Err(FaultKind::LdsRace { first: 0, second: 1, .. })));
        lds.barrier();
        touch(&mut lds, 0, 1, Access::Read).unwrap();
        touch(&mut lds, 0, 2, Access::Read).unwrap();
        assert!(matches!(touch(&mut lds, 0, 1, Access::Write), Err(FaultKind::LdsRace { first_writes: false, .. })));
    }

    #[test]
    fn atomics_do_not_race_with_each_other() {
        let mut lds = Lds::new(64, true, true);
        touch(&mut lds, 4, 0, Access::Write).unwrap();
        lds.barrier();
        for wave in 0..4 {
            touch(&mut lds, 4, wave, Access::Atomic).unwrap();
        }
        assert!(matches!(touch(&mut lds, 4, 1, Access::Read), Err(FaultKind::LdsRace { .. })));
    }

    #[test]
    fn bounds_alignment_and_first_writes_are_checked() {
        let mut lds = Lds::new(64, true, true);
        assert!(matches!(touch(&mut lds, 64, 0, Access::Write), Err(FaultKind::LdsOutOfBounds { size: 64, .. })));
        assert!(matches!(touch(&mut lds, 62, 0, Access::Write), Err(FaultKind::LdsUnaligned { .. })));
        assert!(matches!(touch(&mut lds, 8, 0, Access::Read), Err(FaultKind::LdsNeverWritten { .. })));
        let mut unchecked = Lds::new(64, false, false);
        touch(&mut unchecked, 2, 0, Access::Write).unwrap();
        assert!(matches!(touch(&mut unchecked, 61, 0, Access::Read), Err(FaultKind::LdsOutOfBounds { .. })));
    }
}
