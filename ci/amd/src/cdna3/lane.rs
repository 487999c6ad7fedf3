//! Data-parallel primitives (DPP) and sub-dword addressing (SDWA): modifiers of a vector instruction's operands and result.

use super::inst::Lanes;

/// What a vector instruction does to its operands' lanes or parts of a dword.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LaneOp {
    /// Nothing.
    None,
    /// Operand 0 comes from other lanes.
    Dpp(Dpp),
    /// Operands and result are bytes or words of a dword.
    Sdwa(Sdwa),
}

/// Cross-lane selection of operand 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dpp {
    /// Which lane each lane reads: `quad_perm`, `row_shl` and so on.
    pub control: u16,
    /// A lane with no valid source reads 0; otherwise it is left out of the result.
    pub bound_zero: bool,
    /// Rows (16 lanes) that take part.
    pub row_mask: u8,
    /// Banks (4 lanes of every row) that take part.
    pub bank_mask: u8,
}

/// Selection of parts of dwords: 0 to 3 a byte, 4 and 5 a word, 6 the whole dword.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sdwa {
    /// Part of operands 0 and 1.
    pub src: [u8; 2],
    /// Operands 0 and 1 are sign extended.
    pub sext: [bool; 2],
    /// Part of the destination that is written.
    pub dst: u8,
    /// The rest of the destination: 0 zero, 1 sign extended, 2 kept.
    pub unused: u8,
}

impl Dpp {
    /// The lane that `lane` reads, or `None` when there is none.
    pub fn source(self, lane: usize) -> Option<usize> {
        let (row, at) = (lane & !15, lane & 15);
        match self.control {
            control @ 0..=0xff => Some((lane & !3) + usize::from(control >> (2 * (lane & 3)) & 3)),
            control @ 0x101..=0x10f => Some(at + usize::from(control & 15)).filter(|x| *x < 16).map(|x| row + x),
            control @ 0x111..=0x11f => at.checked_sub(usize::from(control & 15)).map(|x| row + x),
            control @ 0x121..=0x12f => Some(row + (at + 16 - usize::from(control & 15)) % 16),
            0x130 => Some(lane + 1).filter(|x| *x < 64),
            0x134 => Some((lane + 1) % 64),
            0x138 => lane.checked_sub(1),
            0x13c => Some((lane + 63) % 64),
            0x140 => Some(row + 15 - at),
            0x141 => Some((lane & !7) + 7 - (lane & 7)),
            // Lane 15 of each row goes to the next row; lane 31 to rows 2 and 3.
            0x142 => row.checked_sub(1),
            0x143 => (lane >= 32).then_some(31),
            control @ 0x150..=0x15f => Some(row + usize::from(control & 15)),
            _ => None,
        }
    }

    /// Says whether this control word is one that gfx942 has.
    pub fn is_known(self) -> bool {
        matches!(self.control, 0..=0xff | 0x101..=0x10f | 0x111..=0x11f | 0x121..=0x12f | 0x130 | 0x134 | 0x138 | 0x13c
            | 0x140..=0x143 | 0x150..=0x15f)
    }

    /// Operand 0 after the selection; lanes with no valid source give 0.
    pub fn permute(self, x: &Lanes, exec: u64) -> Lanes {
        std::array::from_fn(|lane| match self.source(lane) {
            Some(from) if exec >> from & 1 == 1 => x[from],
            _ => 0,
        })
    }

    /// Lanes of `exec` that are written.
    pub fn write_mask(self, exec: u64) -> u64 {
        (0..64).filter(|lane| self.writes(*lane, exec)).fold(0, |mask, lane| mask | 1 << lane)
    }

    fn writes(self, lane: usize, exec: u64) -> bool {
        let enabled = exec >> lane & 1 == 1
            && self.row_mask >> (lane / 16) & 1 == 1
            && self.bank_mask >> (lane % 16 / 4) & 1 == 1;
        enabled && (self.bound_zero || self.source(lane).is_some_and(|from| exec >> from & 1 == 1))
    }
}

/// First bit and width of a part.
fn part(select: u8) -> (u32, u32) {
    match select {
        0..=3 => (u32::from(select) * 8, 8),
        4 | 5 => (u32::from(select - 4) * 16, 16),
        _ => (0, 32),
    }
}

impl Sdwa {
    /// Operand `n` of one lane, extended to a dword.
    pub fn extract(self, n: usize, x: u32) -> u32 {
        let (first, width) = part(self.src[n]);
        let top = x << (32 - first - width);
        if self.sext[n] { (top.cast_signed() >> (32 - width)).cast_unsigned() } else { top >> (32 - width) }
    }

    /// Width in bits of operand `n`.
    pub fn width(self, n: usize) -> u32 {
        part(self.src[n]).1
    }

    /// The destination's new value from its old one and the result.
    pub fn insert(self, old: u32, x: u32) -> u32 {
        let (first, width) = part(self.dst);
        if width == 32 {
            return x;
        }
        let mask = ((1 << width) - 1) << first;
        let new = x << first & mask;
        match self.unused {
            2 => old & !mask | new,
            1 => ((x << (32 - width)).cast_signed() >> (32 - width)).cast_unsigned() << first,
            _ => new,
        }
    }
}
