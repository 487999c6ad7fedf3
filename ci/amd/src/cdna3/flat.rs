//! FLAT, GLOBAL and SCRATCH instructions.
//!
//! Operand 0 is the address register, 1 the data, 2 the scalar base or nothing.

use super::inst::{Inst, Row, Src, row};
use super::memory_op::*;
use super::operand::each;
use crate::device::{Context, FaultKind};

/// Device memory, at a register pair or a scalar base plus a register.
pub(super) struct Global;
/// Any space, at a register pair. There is no scalar base, whatever its field holds.
pub(super) struct Flat;
/// Private segments, at a register or a scalar or both.
pub(super) struct Scratch;

impl Addressing for Global {
    #[inline]
    fn addresses(c: &Context<'_>, i: &Inst) -> Result<Addresses, FaultKind> {
        let at = match i.src[2] {
            Src::S(base) => {
                let base = c.wave.s64(base).wrapping_add(i64::from(i.imm).cast_unsigned());
                let offset = c.u32s(i, 0);
                each(|lane| base.wrapping_add(offset[lane].into()))
            }
            _ => register_addresses(c, i),
        };
        Ok(Addresses { at, mask: c.wave.exec(), space: Space::Global })
    }
}

impl Addressing for Flat {
    fn addresses(c: &Context<'_>, i: &Inst) -> Result<Addresses, FaultKind> {
        Ok(Addresses { at: register_addresses(c, i), mask: c.wave.exec(), space: Space::Flat })
    }
}

impl Addressing for Scratch {
    fn addresses(c: &Context<'_>, i: &Inst) -> Result<Addresses, FaultKind> {
        let base = match i.src[2] {
            Src::S(base) => i64::from(c.scalar(base).cast_signed()),
            _ => 0,
        } + i64::from(i.imm);
        let at = if i.flags & SCRATCH_VADDR != 0 {
            let offset = c.u32s(i, 0);
            each(|lane| (base + i64::from(offset[lane].cast_signed())).cast_unsigned())
        } else {
            [base.cast_unsigned(); 64]
        };
        Ok(Addresses { at, mask: c.wave.exec(), space: Space::Private })
    }
}

pub(super) const FLAT: &[&[Row]] = &[memory_rows!(Flat, "flat"), atomic_rows!(Flat, "flat")];

pub(super) const SCRATCH: &[&[Row]] = &[memory_rows!(Scratch, "scratch")];

pub(super) const GLOBAL: &[&[Row]] = &[
    memory_rows!(Global, "global"),
    atomic_rows!(Global, "global"),
    &[
        row(38, "global_load_lds_ubyte", |c, i| load_to_lds::<Global, 1>(c, i, |x| x[0].into())),
        row(39, "global_load_lds_sbyte", |c, i| {
            load_to_lds::<Global, 1>(c, i, |x| i32::from(x[0] as i8).cast_unsigned())
        }),
        row(40, "global_load_lds_ushort", |c, i| load_to_lds::<Global, 2>(c, i, |x| u16::from_le_bytes(x).into())),
        row(41, "global_load_lds_sshort", |c, i| {
            load_to_lds::<Global, 2>(c, i, |x| i32::from(i16::from_le_bytes(x)).cast_unsigned())
        }),
        row(42, "global_load_lds_dword", |c, i| load_to_lds::<Global, 4>(c, i, u32::from_le_bytes)),
    ],
];
