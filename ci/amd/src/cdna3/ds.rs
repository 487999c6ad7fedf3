//! DS: local data share, and moves between lanes that need no memory.
//!
//! Operand 0 is the address register, 1 and 2 the data; the immediate holds both offset bytes.

use super::inst::{Inst, Lanes, Row, Src, row};
use super::memory_op::*;
use super::operand::each;
use crate::device::{Access, Context, FaultKind, Flow, lanes};

/// Local data share at a register plus an offset.
struct Local;

impl Addressing for Local {
    fn addresses(c: &Context<'_>, i: &Inst) -> Result<Addresses, FaultKind> {
        if i.flags & REFUSED != 0 {
            return Err(FaultKind::Unsupported("global data share"));
        }
        let base = c.u32s(i, 0);
        let at = each(|lane| base[lane].wrapping_add(i.imm.cast_unsigned()).into());
        Ok(Addresses { at, mask: c.wave.exec(), space: Space::Lds })
    }
}

/// Both offsets of a two-address instruction, in bytes.
fn offsets(i: &Inst, unit: u32) -> [u32; 2] {
    let imm = i.imm.cast_unsigned();
    [(imm & 0xff) * unit, (imm >> 8 & 0xff) * unit]
}

/// Loads `N` bytes at each of two addresses.
fn read2<const N: usize>(c: &mut Context<'_>, i: &Inst, stride: u32) -> Flow {
    let base = c.u32s(i, 0);
    let mut read = || -> Result<(), FaultKind> {
        for lane in lanes(c.wave.exec()) {
            for (which, offset) in offsets(i, N as u32 * stride).into_iter().enumerate() {
                let bytes = *c.lds::<N>(base[lane].wrapping_add(offset), lane, Access::Read)?;
                for (n, dword) in bytes.chunks_exact(4).enumerate() {
                    let register = usize::from(i.dst) + which * N / 4 + n;
                    c.wave.v[register][lane] = u32::from_le_bytes(std::array::from_fn(|byte| dword[byte]));
                }
            }
        }
        Ok(())
    };
    let result = read();
    done(c, result)
}

/// Stores `N` bytes at each of two addresses.
fn write2<const N: usize>(c: &mut Context<'_>, i: &Inst, stride: u32) -> Flow {
    let base = c.u32s(i, 0);
    let mut write = || -> Result<(), FaultKind> {
        for lane in lanes(c.wave.exec()) {
            for (which, offset) in offsets(i, N as u32 * stride).into_iter().enumerate() {
                let Src::V(first) = i.src[1 + which] else { continue };
                let mut bytes = [0; N];
                for (n, dword) in bytes.chunks_exact_mut(4).enumerate() {
                    dword.copy_from_slice(&c.wave.v[usize::from(first) + n][lane].to_le_bytes());
                }
                *c.lds::<N>(base[lane].wrapping_add(offset), lane, Access::Write)? = bytes;
            }
        }
        Ok(())
    };
    let result = write();
    done(c, result)
}

/// Each lane reads the lane that its address names; an inactive one gives 0.
fn backward_permute(c: &mut Context<'_>, i: &Inst) -> Flow {
    let (address, data, exec) = (c.u32s(i, 0), c.u32s(i, 1), c.wave.exec());
    c.put(
        i,
        &each(|lane| {
            let from = address[lane].wrapping_add(i.imm.cast_unsigned()) as usize / 4 % 64;
            if exec >> from & 1 == 1 { data[from] } else { 0 }
        }),
    )
}

/// Each lane writes the lane that its address names; the highest wins, and lanes that nothing writes get 0.
fn permute(c: &mut Context<'_>, i: &Inst) -> Flow {
    let (address, data) = (c.u32s(i, 0), c.u32s(i, 1));
    let mut out: Lanes = [0; 64];
    for lane in lanes(c.wave.exec()) {
        out[address[lane].wrapping_add(i.imm.cast_unsigned()) as usize / 4 % 64] = data[lane];
    }
    c.put(i, &out)
}

/// A fixed pattern: of quads, or of 32 lanes by and, or, xor of the lane number. The data is in the address register.
fn swizzle(c: &mut Context<'_>, i: &Inst) -> Flow {
    let (data, exec, pattern) = (c.u32s(i, 0), c.wave.exec(), i.imm as usize);
    if pattern >= 0xc000 {
        return c.fail(FaultKind::Unsupported("ds_swizzle_b32 in rotate or FFT mode"));
    }
    c.put(
        i,
        &each(|lane| {
            let from = if pattern & 0x8000 != 0 {
                lane & !3 | pattern >> (2 * (lane & 3)) & 3
            } else {
                lane & 32 | (lane & pattern & 31 | pattern >> 5 & 31) ^ (pattern >> 10 & 31)
            };
            if exec >> from & 1 == 1 { data[from] } else { 0 }
        }),
    )
}

fn min_f32(a: u32, b: u32) -> u32 {
    super::float::min_f32(f32::from_bits(a), f32::from_bits(b)).to_bits()
}

fn max_f32(a: u32, b: u32) -> u32 {
    super::float::max_f32(f32::from_bits(a), f32::from_bits(b)).to_bits()
}

/// DS takes the expected value first, other families second.
fn compare_store32(old: u32, expected: u32, x: u32) -> u32 {
    if old == expected { x } else { old }
}

fn compare_store64(c: &mut Context<'_>, i: &Inst) -> Flow {
    // The two data operands are separate register pairs here.
    let (Src::V(expected), Src::V(data)) = (i.src[1], i.src[2]) else { return Flow::Next };
    let address = c.u32s(i, 0);
    let mut update = || -> Result<(), FaultKind> {
        for lane in lanes(c.wave.exec()) {
            let pair = |r: u16| {
                u64::from(c.wave.v[usize::from(r)][lane]) | u64::from(c.wave.v[usize::from(r) + 1][lane]) << 32
            };
            let (expected, data) = (pair(expected), pair(data));
            let at = address[lane].wrapping_add(i.imm.cast_unsigned());
            let bytes = c.lds::<8>(at, lane, Access::Atomic)?;
            let old = u64::from_le_bytes(*bytes);
            if old == expected {
                *bytes = data.to_le_bytes();
            }
            if i.flags & RETURN != 0 {
                c.wave.v[usize::from(i.dst)][lane] = old as u32;
                c.wave.v[usize::from(i.dst) + 1][lane] = (old >> 32) as u32;
            }
        }
        Ok(())
    };
    let result = update();
    done(c, result)
}

fn compare_store(c: &mut Context<'_>, i: &Inst) -> Flow {
    let Src::V(data) = i.src[2] else { return Flow::Next };
    let data = c.wave.v[usize::from(data)];
    let (address, expected) = (c.u32s(i, 0), c.u32s(i, 1));
    let mut update = || -> Result<(), FaultKind> {
        for lane in lanes(c.wave.exec()) {
            let at = address[lane].wrapping_add(i.imm.cast_unsigned());
            let bytes = c.lds::<4>(at, lane, Access::Atomic)?;
            let old = u32::from_le_bytes(*bytes);
            *bytes = compare_store32(old, expected[lane], data[lane]).to_le_bytes();
            if i.flags & RETURN != 0 {
                c.wave.v[usize::from(i.dst)][lane] = old;
            }
        }
        Ok(())
    };
    let result = update();
    done(c, result)
}

/// Says whether an atomic's opcode returns the old value.
pub(super) fn returns(op: u16) -> bool {
    matches!(op, 32..=53 | 96..=115 | 124 | 183 | 184)
}

/// A row for the opcode that returns nothing and one for the opcode that returns the old value.
macro_rules! atomic {
    ($op:literal, $returning:literal, $name:literal, $return_name:literal, $run:expr) => {
        &[row($op, $name, $run), row($returning, $return_name, $run)]
    };
}

pub(super) const DS: &[&[Row]] = &[
    atomic!(0, 32, "ds_add_u32", "ds_add_rtn_u32", |c, i| atomic32::<Local>(c, i, |old, x, _| old.wrapping_add(x))),
    atomic!(1, 33, "ds_sub_u32", "ds_sub_rtn_u32", |c, i| atomic32::<Local>(c, i, |old, x, _| old.wrapping_sub(x))),
    atomic!(2, 34, "ds_rsub_u32", "ds_rsub_rtn_u32", |c, i| atomic32::<Local>(c, i, |old, x, _| x.wrapping_sub(old))),
    atomic!(3, 35, "ds_inc_u32", "ds_inc_rtn_u32", |c, i| atomic32::<Local>(c, i, |old, x, _| increment(old, x))),
    atomic!(4, 36, "ds_dec_u32", "ds_dec_rtn_u32", |c, i| atomic32::<Local>(c, i, |old, x, _| decrement(old, x))),
    atomic!(5, 37, "ds_min_i32", "ds_min_rtn_i32", |c, i| {
        atomic32::<Local>(c, i, |old, x, _| old.cast_signed().min(x.cast_signed()).cast_unsigned())
    }),
    atomic!(6, 38, "ds_max_i32", "ds_max_rtn_i32", |c, i| {
        atomic32::<Local>(c, i, |old, x, _| old.cast_signed().max(x.cast_signed()).cast_unsigned())
    }),
    atomic!(7, 39, "ds_min_u32", "ds_min_rtn_u32", |c, i| atomic32::<Local>(c, i, |old, x, _| old.min(x))),
    atomic!(8, 40, "ds_max_u32", "ds_max_rtn_u32", |c, i| atomic32::<Local>(c, i, |old, x, _| old.max(x))),
    atomic!(9, 41, "ds_and_b32", "ds_and_rtn_b32", |c, i| atomic32::<Local>(c, i, |old, x, _| old & x)),
    atomic!(10, 42, "ds_or_b32", "ds_or_rtn_b32", |c, i| atomic32::<Local>(c, i, |old, x, _| old | x)),
    atomic!(11, 43, "ds_xor_b32", "ds_xor_rtn_b32", |c, i| atomic32::<Local>(c, i, |old, x, _| old ^ x)),
    atomic!(16, 48, "ds_cmpst_b32", "ds_cmpst_rtn_b32", compare_store),
    atomic!(18, 50, "ds_min_f32", "ds_min_rtn_f32", |c, i| atomic32::<Local>(c, i, |old, x, _| min_f32(old, x))),
    atomic!(19, 51, "ds_max_f32", "ds_max_rtn_f32", |c, i| atomic32::<Local>(c, i, |old, x, _| max_f32(old, x))),
    atomic!(21, 53, "ds_add_f32", "ds_add_rtn_f32", |c, i| atomic32::<Local>(c, i, |old, x, _| add_f32(old, x))),
    atomic!(23, 183, "ds_pk_add_f16", "ds_pk_add_rtn_f16", |c, i| {
        atomic32::<Local>(c, i, |old, x, _| add_pair_f16(old, x))
    }),
    atomic!(24, 184, "ds_pk_add_bf16", "ds_pk_add_rtn_bf16", |c, i| {
        atomic32::<Local>(c, i, |old, x, _| add_pair_bf16(old, x))
    }),
    atomic!(64, 96, "ds_add_u64", "ds_add_rtn_u64", |c, i| atomic64::<Local>(c, i, |old, x, _| old.wrapping_add(x))),
    atomic!(65, 97, "ds_sub_u64", "ds_sub_rtn_u64", |c, i| atomic64::<Local>(c, i, |old, x, _| old.wrapping_sub(x))),
    atomic!(69, 101, "ds_min_i64", "ds_min_rtn_i64", |c, i| {
        atomic64::<Local>(c, i, |old, x, _| old.cast_signed().min(x.cast_signed()).cast_unsigned())
    }),
    atomic!(70, 102, "ds_max_i64", "ds_max_rtn_i64", |c, i| {
        atomic64::<Local>(c, i, |old, x, _| old.cast_signed().max(x.cast_signed()).cast_unsigned())
    }),
    atomic!(71, 103, "ds_min_u64", "ds_min_rtn_u64", |c, i| atomic64::<Local>(c, i, |old, x, _| old.min(x))),
    atomic!(72, 104, "ds_max_u64", "ds_max_rtn_u64", |c, i| atomic64::<Local>(c, i, |old, x, _| old.max(x))),
    atomic!(73, 105, "ds_and_b64", "ds_and_rtn_b64", |c, i| atomic64::<Local>(c, i, |old, x, _| old & x)),
    atomic!(74, 106, "ds_or_b64", "ds_or_rtn_b64", |c, i| atomic64::<Local>(c, i, |old, x, _| old | x)),
    atomic!(75, 107, "ds_xor_b64", "ds_xor_rtn_b64", |c, i| atomic64::<Local>(c, i, |old, x, _| old ^ x)),
    atomic!(80, 112, "ds_cmpst_b64", "ds_cmpst_rtn_b64", compare_store64),
    atomic!(92, 124, "ds_add_f64", "ds_add_rtn_f64", |c, i| atomic64::<Local>(c, i, |old, x, _| add_f64(old, x))),
    &[
        row(13, "ds_write_b32", store_dwords::<Local, 4, 1>),
        row(14, "ds_write2_b32", |c, i| write2::<4>(c, i, 1)),
        row(15, "ds_write2st64_b32", |c, i| write2::<4>(c, i, 64)),
        row(20, "ds_nop", |_, _| Flow::Next),
        row(30, "ds_write_b8", |c, i| store_part::<Local, 1>(c, i, 0)),
        row(31, "ds_write_b16", |c, i| store_part::<Local, 2>(c, i, 0)),
        row(45, "ds_wrxchg_rtn_b32", |c, i| atomic32::<Local>(c, i, |_, x, _| x)),
        row(54, "ds_read_b32", load_dwords::<Local, 4, 1>),
        row(55, "ds_read2_b32", |c, i| read2::<4>(c, i, 1)),
        row(56, "ds_read2st64_b32", |c, i| read2::<4>(c, i, 64)),
        row(57, "ds_read_i8", |c, i| load_part::<Local, 1>(c, i, |_, x| i32::from(x[0] as i8).cast_unsigned())),
        row(58, "ds_read_u8", |c, i| load_part::<Local, 1>(c, i, |_, x| x[0].into())),
        row(59, "ds_read_i16", |c, i| {
            load_part::<Local, 2>(c, i, |_, x| i32::from(i16::from_le_bytes(x)).cast_unsigned())
        }),
        row(60, "ds_read_u16", |c, i| load_part::<Local, 2>(c, i, |_, x| u16::from_le_bytes(x).into())),
        row(61, "ds_swizzle_b32", swizzle),
        row(62, "ds_permute_b32", permute),
        row(63, "ds_bpermute_b32", backward_permute),
        row(77, "ds_write_b64", store_dwords::<Local, 8, 2>),
        row(78, "ds_write2_b64", |c, i| write2::<8>(c, i, 1)),
        row(79, "ds_write2st64_b64", |c, i| write2::<8>(c, i, 64)),
        row(84, "ds_write_b8_d16_hi", |c, i| store_part::<Local, 1>(c, i, 16)),
        row(85, "ds_write_b16_d16_hi", |c, i| store_part::<Local, 2>(c, i, 16)),
        row(86, "ds_read_u8_d16", |c, i| load_part::<Local, 1>(c, i, |old, x| old & 0xffff_0000 | u32::from(x[0]))),
        row(87, "ds_read_u8_d16_hi", |c, i| load_part::<Local, 1>(c, i, |old, x| old & 0xffff | u32::from(x[0]) << 16)),
        row(88, "ds_read_i8_d16", |c, i| {
            load_part::<Local, 1>(c, i, |old, x| old & 0xffff_0000 | u32::from(i16::from(x[0] as i8).cast_unsigned()))
        }),
        row(89, "ds_read_i8_d16_hi", |c, i| {
            load_part::<Local, 1>(c, i, |old, x| old & 0xffff | u32::from(i16::from(x[0] as i8).cast_unsigned()) << 16)
        }),
        row(90, "ds_read_u16_d16", |c, i| {
            load_part::<Local, 2>(c, i, |old, x| old & 0xffff_0000 | u32::from(u16::from_le_bytes(x)))
        }),
        row(91, "ds_read_u16_d16_hi", |c, i| {
            load_part::<Local, 2>(c, i, |old, x| old & 0xffff | u32::from(u16::from_le_bytes(x)) << 16)
        }),
        row(109, "ds_wrxchg_rtn_b64", |c, i| atomic64::<Local>(c, i, |_, x, _| x)),
        row(118, "ds_read_b64", load_dwords::<Local, 8, 2>),
        row(119, "ds_read2_b64", |c, i| read2::<8>(c, i, 1)),
        row(120, "ds_read2st64_b64", |c, i| read2::<8>(c, i, 64)),
        row(222, "ds_write_b96", store_dwords::<Local, 12, 3>),
        row(223, "ds_write_b128", store_dwords::<Local, 16, 4>),
        row(254, "ds_read_b96", load_dwords::<Local, 12, 3>),
        row(255, "ds_read_b128", load_dwords::<Local, 16, 4>),
    ],
];
