//! VOP2: vector instructions of two operands.

use super::float::{f16_to_f32, ldexp, max_f32, min_f32};
use super::inst::{Inst, Lanes, Row, row};
use super::lane::LaneOp;
use super::operand::each;
use crate::device::{Context, Flow};

/// Opcodes whose third operand is a carry or select mask: VCC, or operand 2 in the long encoding.
pub(super) fn reads_carry(op: u16) -> bool {
    matches!(op, 0 | 28..=30)
}

/// `v_fmamk_f32` and its like: a literal follows, and is factor 1.
pub(super) const FMAMK: [u16; 2] = [23, 36];
/// `v_fmaak_f32` and its like: a literal follows, and is the addend.
pub(super) const FMAAK: [u16; 2] = [24, 37];

/// Operand 0 or 1 by the select mask. Modifiers apply as to float32.
fn select(c: &mut Context<'_>, i: &Inst) -> Flow {
    let mask = c.carry(i);
    let pick = |a: &Lanes, b: &Lanes| each(|lane| if mask >> lane & 1 == 1 { b[lane] } else { a[lane] });
    let x = if i.abs | i.neg == 0 {
        pick(&c.u32s(i, 0), &c.u32s(i, 1))
    } else {
        let (a, b) = (c.f32s(i, 0).map(f32::to_bits), c.f32s(i, 1).map(f32::to_bits));
        pick(&a, &b)
    };
    c.put(i, &x)
}

/// `x + y + carry`, or `x - y - carry`, with a carry or borrow per lane.
fn add_carry(c: &mut Context<'_>, i: &Inst, carry: u64, f: impl Fn(u32, u32, u32) -> (u32, bool)) -> Flow {
    let (a, b) = (c.u32s(i, 0), c.u32s(i, 1));
    let sums = each(|lane| f(a[lane], b[lane], (carry >> lane & 1) as u32).0);
    let flow = c.put_bits(i, |lane| f(a[lane], b[lane], (carry >> lane & 1) as u32).1);
    c.put(i, &sums);
    flow
}

fn add(a: u32, b: u32, carry: u32) -> (u32, bool) {
    let sum = u64::from(a) + u64::from(b) + u64::from(carry);
    (sum as u32, sum >> 32 != 0)
}

fn sub(a: u32, b: u32, borrow: u32) -> (u32, bool) {
    let difference = i64::from(a) - i64::from(b) - i64::from(borrow);
    (difference as u32, difference < 0)
}

/// Low 24 bits, sign extended.
pub(super) fn signed24(x: u32) -> i64 {
    i64::from((x << 8).cast_signed() >> 8)
}

/// Low 24 bits.
pub(super) fn unsigned24(x: u32) -> u64 {
    u64::from(x & 0xff_ffff)
}

fn signed_2(c: &mut Context<'_>, i: &Inst, f: impl Fn(i32, i32) -> i32) -> Flow {
    c.u32_2(i, |a, b| f(a.cast_signed(), b.cast_signed()).cast_unsigned())
}

fn signed16_2(c: &mut Context<'_>, i: &Inst, f: impl Fn(i16, i16) -> i16) -> Flow {
    c.u16_2(i, |a, b| f(a.cast_signed(), b.cast_signed()).cast_unsigned())
}

/// A sum or difference; `clamp` saturates it.
fn saturating(c: &mut Context<'_>, i: &Inst, plain: fn(u32, u32) -> u32, clamped: fn(u32, u32) -> u32) -> Flow {
    if i.clamp { c.u32_2(i, clamped) } else { c.u32_2(i, plain) }
}

fn dot2_f16(a: u32, b: u32, sum: f32) -> f32 {
    let product = |shift: u32| f16_to_f32((a >> shift) as u16) * f16_to_f32((b >> shift) as u16);
    sum + product(0) + product(16)
}

/// Dot product of float16 pairs, added to operand 2.
pub(super) fn dot2_f32_f16(c: &mut Context<'_>, i: &Inst) -> Flow {
    let (a, b, sum) = (c.u32s(i, 0), c.u32s(i, 1), c.f32s(i, 2));
    c.put_f32(i, each(|lane| dot2_f16(a[lane], b[lane], sum[lane])))
}

/// Four-element dot product of signed bytes.
pub(super) fn dot4_i8(a: u32, b: u32, sum: u32) -> u32 {
    let byte = |x: u32, n: u32| i32::from((x >> (8 * n)) as i8);
    (0..4).fold(sum.cast_signed(), |sum, n| sum.wrapping_add(byte(a, n) * byte(b, n))).cast_unsigned()
}

/// Packed float16 multiply-add onto the destination.
fn pk_fmac_f16(c: &mut Context<'_>, i: &Inst) -> Flow {
    use half::f16;
    let half_at = |x: u32, shift: u32| f64::from(f16_to_f32((x >> shift) as u16));
    c.u32_3(i, |a, b, d| {
        let at = |shift| {
            let x = half_at(a, shift).mul_add(half_at(b, shift), half_at(d, shift));
            u32::from(f16::from_f64(x).to_bits()) << shift
        };
        at(0) | at(16)
    })
}

/// Fused multiply-add of float16, rounded once.
pub(super) fn fma_f16(a: f32, b: f32, d: f32) -> f32 {
    half::f16::from_f64(f64::from(a).mul_add(f64::from(b), f64::from(d))).to_f32()
}

fn fmac_f16(c: &mut Context<'_>, i: &Inst) -> Flow {
    let (a, b, d) = (c.f16s(i, 0), c.f16s(i, 1), c.f16s(i, 2));
    c.put_f16(i, each(|lane| fma_f16(a[lane], b[lane], d[lane])), i.lane != LaneOp::None)
}

pub(super) const VOP2: &[Row] = &[
    row(0, "v_cndmask_b32", select),
    row(1, "v_add_f32", |c, i| c.f32_2(i, |a, b| a + b)),
    row(2, "v_sub_f32", |c, i| c.f32_2(i, |a, b| a - b)),
    row(3, "v_subrev_f32", |c, i| c.f32_2(i, |a, b| b - a)),
    row(4, "v_fmac_f64", |c, i| {
        let (a, b, d) = (c.f64s(i, 0), c.f64s(i, 1), c.f64s(i, 2));
        c.put_f64(i, each(|lane| a[lane].mul_add(b[lane], d[lane])))
    }),
    row(5, "v_mul_f32", |c, i| c.f32_2(i, |a, b| a * b)),
    row(6, "v_mul_i32_i24", |c, i| c.u32_2(i, |a, b| (signed24(a) * signed24(b)) as u32)),
    row(7, "v_mul_hi_i32_i24", |c, i| c.u32_2(i, |a, b| ((signed24(a) * signed24(b)) >> 32) as u32)),
    row(8, "v_mul_u32_u24", |c, i| c.u32_2(i, |a, b| (unsigned24(a) * unsigned24(b)) as u32)),
    row(9, "v_mul_hi_u32_u24", |c, i| c.u32_2(i, |a, b| ((unsigned24(a) * unsigned24(b)) >> 32) as u32)),
    row(10, "v_min_f32", |c, i| c.f32_2(i, min_f32)),
    row(11, "v_max_f32", |c, i| c.f32_2(i, max_f32)),
    row(12, "v_min_i32", |c, i| signed_2(c, i, i32::min)),
    row(13, "v_max_i32", |c, i| signed_2(c, i, i32::max)),
    row(14, "v_min_u32", |c, i| c.u32_2(i, u32::min)),
    row(15, "v_max_u32", |c, i| c.u32_2(i, u32::max)),
    row(16, "v_lshrrev_b32", |c, i| c.u32_2(i, |a, b| b >> (a & 31))),
    row(17, "v_ashrrev_i32", |c, i| signed_2(c, i, |a, b| b >> (a & 31))),
    row(18, "v_lshlrev_b32", |c, i| c.u32_2(i, |a, b| b << (a & 31))),
    row(19, "v_and_b32", |c, i| c.u32_2(i, |a, b| a & b)),
    row(20, "v_or_b32", |c, i| c.u32_2(i, |a, b| a | b)),
    row(21, "v_xor_b32", |c, i| c.u32_2(i, |a, b| a ^ b)),
    row(23, "v_fmamk_f32", |c, i| c.f32_3(i, f32::mul_add)),
    row(24, "v_fmaak_f32", |c, i| c.f32_3(i, f32::mul_add)),
    row(25, "v_add_co_u32", |c, i| add_carry(c, i, 0, add)),
    row(26, "v_sub_co_u32", |c, i| add_carry(c, i, 0, sub)),
    row(27, "v_subrev_co_u32", |c, i| add_carry(c, i, 0, |a, b, carry| sub(b, a, carry))),
    row(28, "v_addc_co_u32", |c, i| add_carry(c, i, c.carry(i), add)),
    row(29, "v_subb_co_u32", |c, i| add_carry(c, i, c.carry(i), sub)),
    row(30, "v_subbrev_co_u32", |c, i| add_carry(c, i, c.carry(i), |a, b, carry| sub(b, a, carry))),
    row(31, "v_add_f16", |c, i| c.f16_2(i, |a, b| a + b)),
    row(32, "v_sub_f16", |c, i| c.f16_2(i, |a, b| a - b)),
    row(33, "v_subrev_f16", |c, i| c.f16_2(i, |a, b| b - a)),
    row(34, "v_mul_f16", |c, i| c.f16_2(i, |a, b| a * b)),
    row(35, "v_mac_f16", fmac_f16),
    row(36, "v_madmk_f16", fmac_f16),
    row(37, "v_madak_f16", fmac_f16),
    row(38, "v_add_u16", |c, i| if i.clamp { c.u16_2(i, u16::saturating_add) } else { c.u16_2(i, u16::wrapping_add) }),
    row(39, "v_sub_u16", |c, i| if i.clamp { c.u16_2(i, u16::saturating_sub) } else { c.u16_2(i, u16::wrapping_sub) }),
    row(40, "v_subrev_u16", |c, i| c.u16_2(i, |a, b| if i.clamp { b.saturating_sub(a) } else { b.wrapping_sub(a) })),
    row(41, "v_mul_lo_u16", |c, i| c.u16_2(i, u16::wrapping_mul)),
    row(42, "v_lshlrev_b16", |c, i| c.u16_2(i, |a, b| b << (a & 15))),
    row(43, "v_lshrrev_b16", |c, i| c.u16_2(i, |a, b| b >> (a & 15))),
    row(44, "v_ashrrev_i16", |c, i| signed16_2(c, i, |a, b| b >> (a & 15))),
    row(45, "v_max_f16", |c, i| c.f16_2(i, max_f32)),
    row(46, "v_min_f16", |c, i| c.f16_2(i, min_f32)),
    row(47, "v_max_u16", |c, i| c.u16_2(i, u16::max)),
    row(48, "v_max_i16", |c, i| signed16_2(c, i, i16::max)),
    row(49, "v_min_u16", |c, i| c.u16_2(i, u16::min)),
    row(50, "v_min_i16", |c, i| signed16_2(c, i, i16::min)),
    row(51, "v_ldexp_f16", |c, i| {
        let (a, b) = (c.f16s(i, 0), c.u16s(i, 1));
        c.put_f16(i, each(|lane| ldexp(a[lane].into(), (b[lane] as i16).into()) as f32), false)
    }),
    row(52, "v_add_u32", |c, i| saturating(c, i, u32::wrapping_add, u32::saturating_add)),
    row(53, "v_sub_u32", |c, i| saturating(c, i, u32::wrapping_sub, u32::saturating_sub)),
    row(54, "v_subrev_u32", |c, i| saturating(c, i, |a, b| b.wrapping_sub(a), |a, b| b.saturating_sub(a))),
    row(55, "v_dot2c_f32_f16", dot2_f32_f16),
    row(57, "v_dot4c_i32_i8", |c, i| c.u32_3(i, dot4_i8)),
    row(59, "v_fmac_f32", |c, i| c.f32_3(i, f32::mul_add)),
    row(60, "v_pk_fmac_f16", pk_fmac_f16),
    row(61, "v_xnor_b32", |c, i| c.u32_2(i, |a, b| !(a ^ b))),
];
