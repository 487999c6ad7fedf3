//! MUBUF: memory through a buffer descriptor of four scalar registers.
//!
//! Operand 0 is the address register or pair, 1 the data, 2 the scalar offset; the scalar destination field names the
//! descriptor.

use super::inst::{Inst, Row, Src, row};
use super::memory_op::*;
use crate::device::{Context, FaultKind, Flow, lanes};

/// Buffers: a lane out of the descriptor's range loads 0 and stores nothing.
pub(super) struct Buffer;

impl Addressing for Buffer {
    fn addresses(c: &Context<'_>, i: &Inst) -> Result<Addresses, FaultKind> {
        if i.flags & REFUSED != 0 {
            return Err(FaultKind::Unsupported("a buffer load to LDS"));
        }
        let word = |n: u8| c.wave.s[usize::from(i.sdst + n)];
        let base = u64::from(word(0)) | u64::from(word(1) & 0xffff) << 32;
        let (stride, records) = (u64::from(word(1) >> 16 & 0x3fff), u64::from(word(2)));
        if word(1) >> 31 == 1 || word(3) >> 23 & 1 == 1 {
            return Err(FaultKind::Unsupported("a swizzled buffer, or one that adds the lane number"));
        }
        let register = |n: usize, lane: usize| match i.src[0] {
            Src::V(r) => u64::from(c.wave.v[r as usize + n][lane]),
            _ => 0,
        };
        let scalar = u64::from(c.s32(i, 2));
        let (mut at, mut mask) = ([0; 64], 0);
        for lane in lanes(c.wave.exec()) {
            let (indexed, offsets) = (i.flags & IDXEN != 0, i.flags & OFFEN != 0);
            let index = if indexed { register(0, lane) } else { 0 };
            let offset = i64::from(i.imm).cast_unsigned() + if offsets { register(indexed.into(), lane) } else { 0 };
            let inside = if stride == 0 { offset + scalar < records } else { index < records };
            at[lane] = base.wrapping_add(index * stride).wrapping_add(offset + scalar);
            mask |= u64::from(inside) << lane;
        }
        Ok(Addresses { at, mask, space: Space::Global })
    }
}

pub(super) const MUBUF: &[&[Row]] = &[
    memory_rows!(Buffer, "buffer"),
    atomic_rows!(Buffer, "buffer"),
    // Caches are coherent here.
    &[row(40, "buffer_wbl2", |_, _| Flow::Next), row(41, "buffer_inv", |_, _| Flow::Next)],
];
