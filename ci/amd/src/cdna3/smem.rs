//! SMEM: scalar loads. Operand 0 is the base, operand 1 the scalar offset.

use super::inst::{Inst, Row, row};
use crate::device::{Context, FaultKind, Flow};

/// Loads `D` dwords into consecutive scalar registers.
fn load<const D: usize>(c: &mut Context<'_>, i: &Inst) -> Flow {
    let offset = i64::from(i.imm).wrapping_add(c.s32(i, 1).into()).cast_unsigned();
    load_at::<D>(c, i, c.s64(i, 0).wrapping_add(offset) & !3)
}

fn load_at<const D: usize>(c: &mut Context<'_>, i: &Inst, address: u64) -> Flow {
    if let Err(kind) = c.check_address(address, 4 * D as u64, 0, false) {
        return c.fail(kind);
    }
    for n in 0..D {
        match c.load::<4>(address + 4 * n as u64, 0) {
            Ok(bytes) => c.wave.s[usize::from(i.sdst) + n] = u32::from_le_bytes(bytes),
            Err(kind) => return c.fail(kind),
        }
    }
    Flow::Next
}

/// Loads through a buffer descriptor; past its end the registers are 0.
fn buffer_load<const D: usize>(c: &mut Context<'_>, i: &Inst) -> Flow {
    let super::inst::Src::S(descriptor) = i.src[0] else {
        return c.fail(FaultKind::Unsupported("a buffer descriptor that is no scalar register"));
    };
    let word = |n: u8| u64::from(c.wave.s[usize::from(descriptor + n)]);
    let (base, stride, records) = (word(0) | (word(1) & 0xffff) << 32, word(1) >> 16 & 0x3fff, word(2));
    let offset = (i64::from(i.imm) + i64::from(c.s32(i, 1))).cast_unsigned() & !3;
    let size = if stride == 0 { records } else { records * stride };
    if offset + 4 * D as u64 > size {
        c.wave.s[usize::from(i.sdst)..][..D].fill(0);
        return Flow::Next;
    }
    load_at::<D>(c, i, base + offset)
}

fn time(c: &mut Context<'_>, i: &Inst, hertz: u64) -> Flow {
    let start = std::time::SystemTime::UNIX_EPOCH;
    let nanoseconds = start.elapsed().map_or(0, |elapsed| elapsed.as_nanos());
    c.wave.set_s64(i.sdst, (nanoseconds * u128::from(hertz) / 1_000_000_000) as u64);
    Flow::Next
}

pub(super) const SMEM: &[Row] = &[
    row(0, "s_load_dword", load::<1>),
    row(1, "s_load_dwordx2", load::<2>),
    row(2, "s_load_dwordx4", load::<4>),
    row(3, "s_load_dwordx8", load::<8>),
    row(4, "s_load_dwordx16", load::<16>),
    row(8, "s_buffer_load_dword", buffer_load::<1>),
    row(9, "s_buffer_load_dwordx2", buffer_load::<2>),
    row(10, "s_buffer_load_dwordx4", buffer_load::<4>),
    row(11, "s_buffer_load_dwordx8", buffer_load::<8>),
    row(12, "s_buffer_load_dwordx16", buffer_load::<16>),
    row(32, "s_dcache_inv", |_, _| Flow::Next),
    row(33, "s_dcache_wb", |_, _| Flow::Next),
    row(36, "s_memtime", |c, i| time(c, i, 1_700_000_000)),
    row(37, "s_memrealtime", |c, i| time(c, i, 100_000_000)),
];
