//! VOP3P: packed vector instructions, two results in one register or register pair, and mixed precision.

use super::float::{f16_to_f32, max_f32, min_f32};
use super::inst::{Inst, Lanes, Row, Src, constant16, constant32, row};
use super::operand::each;
use super::vop2::{dot2_f32_f16, dot4_i8, fma_f16};
use crate::device::{Context, Flow};
use half::f16;

/// The halves of operand `n` for the low and the high result, each in the low 16 bits.
fn halves(c: &Context<'_>, i: &Inst, n: usize, float: bool) -> [Lanes; 2] {
    // A float constant is one half, an integer constant a dword.
    let x = match i.src[n] {
        Src::Const(code) => [if float { constant16(code) } else { constant32(code) }; 64],
        _ => c.u32s(i, n),
    };
    let pick = |select: u8, negate: u8| {
        let shift = if select >> n & 1 == 1 { 16 } else { 0 };
        let flip = if float && negate >> n & 1 == 1 { 0x8000 } else { 0 };
        each(|lane| (x[lane] >> shift & 0xffff) ^ flip)
    };
    [pick(i.op_sel, i.neg), pick(i.op_sel_hi, i.neg_hi)]
}

fn packed(c: &mut Context<'_>, i: &Inst, float: bool, f: impl Fn(u16, u16, u16) -> u16) -> Flow {
    let (a, b, d) = (halves(c, i, 0, float), halves(c, i, 1, float), halves(c, i, 2, float));
    let at = |half: usize, lane: usize| u32::from(f(a[half][lane] as u16, b[half][lane] as u16, d[half][lane] as u16));
    c.put(i, &each(|lane| at(0, lane) | at(1, lane) << 16))
}

fn unsigned(c: &mut Context<'_>, i: &Inst, f: impl Fn(u16, u16, u16) -> u16) -> Flow {
    packed(c, i, false, f)
}

fn signed(c: &mut Context<'_>, i: &Inst, f: impl Fn(i16, i16, i16) -> i16) -> Flow {
    packed(c, i, false, |a, b, d| f(a.cast_signed(), b.cast_signed(), d.cast_signed()).cast_unsigned())
}

fn float16(c: &mut Context<'_>, i: &Inst, f: impl Fn(f32, f32, f32) -> f32) -> Flow {
    let clamp = i.clamp;
    packed(c, i, true, |a, b, d| {
        let x = f(f16_to_f32(a), f16_to_f32(b), f16_to_f32(d));
        f16::from_f32(if clamp { x.clamp(0.0, 1.0) } else { x }).to_bits()
    })
}

/// The float32 of operand `n` for the low and the high result: registers of a pair.
fn pair_f32(c: &Context<'_>, i: &Inst, n: usize) -> [[f32; 64]; 2] {
    let of = |high: bool| -> Lanes {
        match i.src[n] {
            Src::V(r) => c.wave.v[r as usize + usize::from(high)],
            Src::S(code) => [c.scalar(code + u8::from(high)); 64],
            _ => [c.s32(i, n); 64],
        }
    };
    let pick = |select: u8, negate: u8| {
        let (x, flip) = (of(select >> n & 1 == 1), u32::from(negate >> n & 1) << 31);
        each(|lane| f32::from_bits(x[lane] ^ flip))
    };
    [pick(i.op_sel, i.neg), pick(i.op_sel_hi, i.neg_hi)]
}

fn float32(c: &mut Context<'_>, i: &Inst, f: impl Fn(f32, f32, f32) -> f32) -> Flow {
    let (a, b, d) = (pair_f32(c, i, 0), pair_f32(c, i, 1), pair_f32(c, i, 2));
    let clamp = |x: f32| if i.clamp { x.clamp(0.0, 1.0) } else { x };
    let at = |half: usize, lane: usize| u64::from(clamp(f(a[half][lane], b[half][lane], d[half][lane])).to_bits());
    c.put64(i, &each(|lane| at(0, lane) | at(1, lane) << 32))
}

/// Operand `n` of a mixed precision instruction: float32, or the float16 half that `op_sel` names where `op_sel_hi` is set.
fn mixed(c: &Context<'_>, i: &Inst, n: usize) -> [f32; 64] {
    let x = match i.src[n] {
        Src::Const(code) if i.op_sel_hi >> n & 1 == 1 => [constant16(code); 64],
        _ => c.u32s(i, n),
    };
    let shift = if i.op_sel >> n & 1 == 1 && !matches!(i.src[n], Src::Const(_)) { 16 } else { 0 };
    let (absolute, negate) = (i.neg_hi >> n & 1 == 1, i.neg >> n & 1 == 1);
    each(|lane| {
        let value = match i.op_sel_hi >> n & 1 {
            1 => f16_to_f32((x[lane] >> shift) as u16),
            _ => f32::from_bits(x[lane]),
        };
        let value = if absolute { value.abs() } else { value };
        if negate { -value } else { value }
    })
}

fn mixed_fma(c: &Context<'_>, i: &Inst) -> [f32; 64] {
    let (a, b, d) = (mixed(c, i, 0), mixed(c, i, 1), mixed(c, i, 2));
    each(|lane| {
        let x = a[lane].mul_add(b[lane], d[lane]);
        if i.clamp { x.clamp(0.0, 1.0) } else { x }
    })
}

/// A mixed precision result as float16 in one half of the destination.
fn mixed_f16(c: &mut Context<'_>, i: &Inst, shift: u32) -> Flow {
    let (x, old) = (mixed_fma(c, i), c.wave.v[i.dst as usize]);
    let bits = |lane: usize| u32::from(f16::from_f32(x[lane]).to_bits()) << shift;
    c.put(i, &each(|lane| old[lane] & !(0xffff << shift) | bits(lane)))
}

fn mov(c: &mut Context<'_>, i: &Inst) -> Flow {
    let of = |n: usize| -> Lanes {
        let high = i.op_sel >> n & 1 == 1;
        match i.src[n] {
            Src::V(r) => c.wave.v[r as usize + usize::from(high)],
            Src::S(code) => [c.scalar(code + u8::from(high)); 64],
            _ => [c.s32(i, n); 64],
        }
    };
    let (low, high) = (of(0), of(1));
    c.put64(i, &each(|lane| u64::from(low[lane]) | u64::from(high[lane]) << 32))
}

fn dot4_u8(a: u32, b: u32, sum: u32) -> u32 {
    let byte = |x: u32, n: u32| x >> (8 * n) & 0xff;
    (0..4).fold(sum, |sum, n| sum.wrapping_add(byte(a, n) * byte(b, n)))
}

fn dot2_i16(a: u32, b: u32, sum: u32) -> u32 {
    let word = |x: u32, n: u32| i32::from((x >> (16 * n)) as i16);
    (0..2).fold(sum.cast_signed(), |sum, n| sum.wrapping_add(word(a, n).wrapping_mul(word(b, n)))).cast_unsigned()
}

fn dot2_u16(a: u32, b: u32, sum: u32) -> u32 {
    let word = |x: u32, n: u32| x >> (16 * n) & 0xffff;
    (0..2).fold(sum, |sum, n| sum.wrapping_add(word(a, n).wrapping_mul(word(b, n))))
}

pub(super) const ACCVGPR_READ: u16 = 88;
pub(super) const ACCVGPR_WRITE: u16 = 89;

pub(super) const VOP3P: &[Row] = &[
    row(0, "v_pk_mad_i16", |c, i| signed(c, i, |a, b, d| a.wrapping_mul(b).wrapping_add(d))),
    row(1, "v_pk_mul_lo_u16", |c, i| unsigned(c, i, |a, b, _| a.wrapping_mul(b))),
    row(2, "v_pk_add_i16", |c, i| {
        if i.clamp { signed(c, i, |a, b, _| a.saturating_add(b)) } else { signed(c, i, |a, b, _| a.wrapping_add(b)) }
    }),
    row(3, "v_pk_sub_i16", |c, i| {
        if i.clamp { signed(c, i, |a, b, _| a.saturating_sub(b)) } else { signed(c, i, |a, b, _| a.wrapping_sub(b)) }
    }),
    row(4, "v_pk_lshlrev_b16", |c, i| unsigned(c, i, |a, b, _| b << (a & 15))),
    row(5, "v_pk_lshrrev_b16", |c, i| unsigned(c, i, |a, b, _| b >> (a & 15))),
    row(6, "v_pk_ashrrev_i16", |c, i| signed(c, i, |a, b, _| b >> (a & 15))),
    row(7, "v_pk_max_i16", |c, i| signed(c, i, |a, b, _| a.max(b))),
    row(8, "v_pk_min_i16", |c, i| signed(c, i, |a, b, _| a.min(b))),
    row(9, "v_pk_mad_u16", |c, i| unsigned(c, i, |a, b, d| a.wrapping_mul(b).wrapping_add(d))),
    row(10, "v_pk_add_u16", |c, i| {
        if i.clamp {
            unsigned(c, i, |a, b, _| a.saturating_add(b))
        } else {
            unsigned(c, i, |a, b, _| a.wrapping_add(b))
        }
    }),
    row(11, "v_pk_sub_u16", |c, i| {
        if i.clamp {
            unsigned(c, i, |a, b, _| a.saturating_sub(b))
        } else {
            unsigned(c, i, |a, b, _| a.wrapping_sub(b))
        }
    }),
    row(12, "v_pk_max_u16", |c, i| unsigned(c, i, |a, b, _| a.max(b))),
    row(13, "v_pk_min_u16", |c, i| unsigned(c, i, |a, b, _| a.min(b))),
    row(14, "v_pk_fma_f16", |c, i| float16(c, i, fma_f16)),
    row(15, "v_pk_add_f16", |c, i| float16(c, i, |a, b, _| a + b)),
    row(16, "v_pk_mul_f16", |c, i| float16(c, i, |a, b, _| a * b)),
    row(17, "v_pk_min_f16", |c, i| float16(c, i, |a, b, _| min_f32(a, b))),
    row(18, "v_pk_max_f16", |c, i| float16(c, i, |a, b, _| max_f32(a, b))),
    row(32, "v_fma_mix_f32", |c, i| {
        let x = mixed_fma(c, i);
        c.put(i, &each(|lane| x[lane].to_bits()))
    }),
    row(33, "v_fma_mixlo_f16", |c, i| mixed_f16(c, i, 0)),
    row(34, "v_fma_mixhi_f16", |c, i| mixed_f16(c, i, 16)),
    row(35, "v_dot2_f32_f16", dot2_f32_f16),
    row(38, "v_dot2_i32_i16", |c, i| c.u32_3(i, dot2_i16)),
    row(39, "v_dot2_u32_u16", |c, i| c.u32_3(i, dot2_u16)),
    row(40, "v_dot4_i32_i8", |c, i| c.u32_3(i, dot4_i8)),
    row(41, "v_dot4_u32_u8", |c, i| c.u32_3(i, dot4_u8)),
    row(48, "v_pk_fma_f32", |c, i| float32(c, i, f32::mul_add)),
    row(49, "v_pk_mul_f32", |c, i| float32(c, i, |a, b, _| a * b)),
    row(50, "v_pk_add_f32", |c, i| float32(c, i, |a, b, _| a + b)),
    row(51, "v_pk_mov_b32", mov),
    row(ACCVGPR_READ, "v_accvgpr_read_b32", |c, i| c.u32_1(i, |a| a)),
    row(ACCVGPR_WRITE, "v_accvgpr_write_b32", |c, i| c.u32_1(i, |a| a)),
];
