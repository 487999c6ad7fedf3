//! VOP1: vector instructions of one operand.

use super::float::{bf8_to_f32, flush, fp8_to_f32, frexp_exponent, frexp_mantissa};
use super::inst::{Inst, Row, Src, row};
use super::operand::each;
use super::sop::{first_non_sign, found};
use crate::device::{Context, FaultKind, Flow};
use half::f16;

/// Value of the first active lane (lane 0 when none is), in a scalar register.
fn read_first_lane(c: &mut Context<'_>, i: &Inst) -> Flow {
    let exec = c.wave.exec();
    let lane = if exec == 0 { 0 } else { exec.trailing_zeros() as usize };
    c.wave.s[i.sdst as usize] = match i.src[0] {
        Src::V(r) => c.wave.v[r as usize][lane],
        _ => c.s32(i, 0),
    };
    Flow::Next
}

fn swap(c: &mut Context<'_>, i: &Inst) -> Flow {
    let Src::V(other) = i.src[0] else { return c.fail(FaultKind::Unsupported("v_swap_b32 of a scalar register")) };
    let (a, b) = (c.wave.v[i.dst as usize], c.wave.v[other as usize]);
    let mask = c.wave.exec();
    c.put_register(i.dst.into(), &b, mask);
    c.put_register(other.into(), &a, mask);
    Flow::Next
}

fn f64_to_u32(c: &mut Context<'_>, i: &Inst, f: impl Fn(f64) -> u32) -> Flow {
    let a = c.f64s(i, 0);
    c.put(i, &each(|lane| f(a[lane])))
}

fn f32_to_u32(c: &mut Context<'_>, i: &Inst, f: impl Fn(f32) -> u32) -> Flow {
    let a = c.f32s(i, 0);
    c.put(i, &each(|lane| f(a[lane])))
}

fn u32_to_f32(c: &mut Context<'_>, i: &Inst, f: impl Fn(u32) -> f32) -> Flow {
    let a = c.u32s(i, 0);
    c.put_f32(i, each(|lane| f(a[lane])))
}

fn u32_to_f64(c: &mut Context<'_>, i: &Inst, f: impl Fn(u32) -> f64) -> Flow {
    let a = c.u32s(i, 0);
    c.put_f64(i, each(|lane| f(a[lane])))
}

fn f16_to_u16(c: &mut Context<'_>, i: &Inst, f: impl Fn(f32) -> u16) -> Flow {
    let a = c.f16s(i, 0);
    c.put_u16(i, &each(|lane| f(a[lane]).into()), false)
}

/// Two bytes of the word that SDWA selects, as float32.
fn cvt_pk(c: &mut Context<'_>, i: &Inst, f: fn(u8) -> f32) -> Flow {
    let a = c.u32s(i, 0);
    c.put64(
        i,
        &each(|lane| {
            let (low, high) = (f(a[lane] as u8).to_bits(), f((a[lane] >> 8) as u8).to_bits());
            u64::from(low) | u64::from(high) << 32
        }),
    )
}

/// Fraction, below 1.
fn fract(x: f64, below_one: f64) -> f64 {
    let fraction = x - x.floor();
    if fraction >= 1.0 { below_one } else { fraction }
}

const BELOW_ONE_F32: f32 = 1.0 - f32::EPSILON / 2.0;

/// Sine or cosine of a number of turns.
fn turns(x: f32, f: fn(f64) -> f64) -> f32 {
    // Beyond this no fraction is left, and hardware gives up too.
    let turns = f64::from(x);
    if turns.abs() > 256.0 { f(0.0) as f32 } else { f(turns.fract() * std::f64::consts::TAU) as f32 }
}

fn byte(x: u32, n: u32) -> f32 {
    (x >> (8 * n) & 0xff) as f32
}

/// Base 2 exponential; denormal results are flushed.
fn exp(x: f32) -> f32 {
    flush(x.exp2())
}

/// Base 2 logarithm; denormal operands are flushed.
fn log(x: f32) -> f32 {
    flush(x).log2()
}

pub(super) const VOP1: &[Row] = &[
    row(0, "v_nop", |_, _| Flow::Next),
    row(1, "v_mov_b32", |c, i| c.u32_1(i, |a| a)),
    row(READ_FIRST_LANE, "v_readfirstlane_b32", read_first_lane),
    row(3, "v_cvt_i32_f64", |c, i| f64_to_u32(c, i, |a| (a as i32).cast_unsigned())),
    row(4, "v_cvt_f64_i32", |c, i| u32_to_f64(c, i, |a| a.cast_signed().into())),
    row(5, "v_cvt_f32_i32", |c, i| u32_to_f32(c, i, |a| a.cast_signed() as f32)),
    row(6, "v_cvt_f32_u32", |c, i| u32_to_f32(c, i, |a| a as f32)),
    row(7, "v_cvt_u32_f32", |c, i| f32_to_u32(c, i, |a| a as u32)),
    row(8, "v_cvt_i32_f32", |c, i| f32_to_u32(c, i, |a| (a as i32).cast_unsigned())),
    row(10, "v_cvt_f16_f32", |c, i| {
        let a = c.f32s(i, 0);
        c.put_f16(i, a, false)
    }),
    row(11, "v_cvt_f32_f16", |c, i| {
        let a = c.f16s(i, 0);
        c.put_f32(i, a)
    }),
    row(12, "v_cvt_rpi_i32_f32", |c, i| f32_to_u32(c, i, |a| ((f64::from(a) + 0.5).floor() as i32).cast_unsigned())),
    row(13, "v_cvt_flr_i32_f32", |c, i| f32_to_u32(c, i, |a| (a.floor() as i32).cast_unsigned())),
    row(14, "v_cvt_off_f32_i4", |c, i| u32_to_f32(c, i, |a| ((a << 28).cast_signed() >> 28) as f32 / 16.0)),
    row(15, "v_cvt_f32_f64", |c, i| {
        let a = c.f64s(i, 0);
        c.put_f32(i, each(|lane| a[lane] as f32))
    }),
    row(16, "v_cvt_f64_f32", |c, i| {
        let a = c.f32s(i, 0);
        c.put_f64(i, each(|lane| a[lane].into()))
    }),
    row(17, "v_cvt_f32_ubyte0", |c, i| u32_to_f32(c, i, |a| byte(a, 0))),
    row(18, "v_cvt_f32_ubyte1", |c, i| u32_to_f32(c, i, |a| byte(a, 1))),
    row(19, "v_cvt_f32_ubyte2", |c, i| u32_to_f32(c, i, |a| byte(a, 2))),
    row(20, "v_cvt_f32_ubyte3", |c, i| u32_to_f32(c, i, |a| byte(a, 3))),
    row(21, "v_cvt_u32_f64", |c, i| f64_to_u32(c, i, |a| a as u32)),
    row(22, "v_cvt_f64_u32", |c, i| u32_to_f64(c, i, f64::from)),
    row(23, "v_trunc_f64", |c, i| c.f64_1(i, f64::trunc)),
    row(24, "v_ceil_f64", |c, i| c.f64_1(i, f64::ceil)),
    row(25, "v_rndne_f64", |c, i| c.f64_1(i, f64::round_ties_even)),
    row(26, "v_floor_f64", |c, i| c.f64_1(i, f64::floor)),
    row(27, "v_fract_f32", |c, i| {
        c.f32_1(i, |a| fract(a.into(), BELOW_ONE_F32.into()).min(BELOW_ONE_F32.into()) as f32)
    }),
    row(28, "v_trunc_f32", |c, i| c.f32_1(i, f32::trunc)),
    row(29, "v_ceil_f32", |c, i| c.f32_1(i, f32::ceil)),
    row(30, "v_rndne_f32", |c, i| c.f32_1(i, f32::round_ties_even)),
    row(31, "v_floor_f32", |c, i| c.f32_1(i, f32::floor)),
    row(32, "v_exp_f32", |c, i| c.f32_1(i, exp)),
    row(33, "v_log_f32", |c, i| c.f32_1(i, log)),
    row(34, "v_rcp_f32", |c, i| c.f32_1(i, |a| 1.0 / a)),
    row(35, "v_rcp_iflag_f32", |c, i| c.f32_1(i, |a| 1.0 / a)),
    row(36, "v_rsq_f32", |c, i| c.f32_1(i, |a| (1.0 / f64::from(a).sqrt()) as f32)),
    row(37, "v_rcp_f64", |c, i| c.f64_1(i, |a| 1.0 / a)),
    row(38, "v_rsq_f64", |c, i| c.f64_1(i, |a| 1.0 / a.sqrt())),
    row(39, "v_sqrt_f32", |c, i| c.f32_1(i, f32::sqrt)),
    row(40, "v_sqrt_f64", |c, i| c.f64_1(i, f64::sqrt)),
    row(41, "v_sin_f32", |c, i| c.f32_1(i, |a| turns(a, f64::sin))),
    row(42, "v_cos_f32", |c, i| c.f32_1(i, |a| turns(a, f64::cos))),
    row(43, "v_not_b32", |c, i| c.u32_1(i, |a| !a)),
    row(44, "v_bfrev_b32", |c, i| c.u32_1(i, u32::reverse_bits)),
    row(45, "v_ffbh_u32", |c, i| c.u32_1(i, |a| found(a.leading_zeros(), 32))),
    row(46, "v_ffbl_b32", |c, i| c.u32_1(i, |a| found(a.trailing_zeros(), 32))),
    row(47, "v_ffbh_i32", |c, i| c.u32_1(i, |a| first_non_sign(a.into(), 32))),
    row(48, "v_frexp_exp_i32_f64", |c, i| f64_to_u32(c, i, |a| frexp_exponent(a).cast_unsigned())),
    row(49, "v_frexp_mant_f64", |c, i| c.f64_1(i, frexp_mantissa)),
    row(50, "v_fract_f64", |c, i| c.f64_1(i, |a| fract(a, 1.0 - f64::EPSILON / 2.0))),
    row(51, "v_frexp_exp_i32_f32", |c, i| f32_to_u32(c, i, |a| frexp_exponent(a.into()).cast_unsigned())),
    row(52, "v_frexp_mant_f32", |c, i| c.f32_1(i, |a| frexp_mantissa(a.into()) as f32)),
    row(56, "v_mov_b64", |c, i| {
        let a = c.u64s(i, 0);
        c.put64(i, &a)
    }),
    row(57, "v_cvt_f16_u16", |c, i| {
        let a = c.u16s(i, 0);
        c.put_f16(i, each(|lane| a[lane] as f32), false)
    }),
    row(58, "v_cvt_f16_i16", |c, i| {
        let a = c.u16s(i, 0);
        c.put_f16(i, each(|lane| (a[lane] as i16).into()), false)
    }),
    row(59, "v_cvt_u16_f16", |c, i| f16_to_u16(c, i, |a| a as u16)),
    row(60, "v_cvt_i16_f16", |c, i| f16_to_u16(c, i, |a| (a as i16).cast_unsigned())),
    row(61, "v_rcp_f16", |c, i| c.f16_1(i, |a| 1.0 / a)),
    row(62, "v_sqrt_f16", |c, i| c.f16_1(i, f32::sqrt)),
    row(63, "v_rsq_f16", |c, i| c.f16_1(i, |a| 1.0 / a.sqrt())),
    row(64, "v_log_f16", |c, i| c.f16_1(i, f32::log2)),
    row(65, "v_exp_f16", |c, i| c.f16_1(i, f32::exp2)),
    row(66, "v_frexp_mant_f16", |c, i| c.f16_1(i, |a| frexp_mantissa(a.into()) as f32)),
    row(67, "v_frexp_exp_i16_f16", |c, i| f16_to_u16(c, i, |a| (frexp_exponent(a.into()) as i16).cast_unsigned())),
    row(68, "v_floor_f16", |c, i| c.f16_1(i, f32::floor)),
    row(69, "v_ceil_f16", |c, i| c.f16_1(i, f32::ceil)),
    row(70, "v_trunc_f16", |c, i| c.f16_1(i, f32::trunc)),
    row(71, "v_rndne_f16", |c, i| c.f16_1(i, f32::round_ties_even)),
    row(72, "v_fract_f16", |c, i| c.f16_1(i, |a| fract(a.into(), f16::from_bits(0x3bff).into()) as f32)),
    row(79, "v_sat_pk_u8_i16", |c, i| {
        let clamp = |x: u32| (x as i16).clamp(0, 255) as u32;
        let a = c.u32s(i, 0);
        c.put_u16(i, &each(|lane| clamp(a[lane]) | clamp(a[lane] >> 16) << 8), false)
    }),
    row(81, "v_swap_b32", swap),
    row(ACCVGPR_MOV, "v_accvgpr_mov_b32", |c, i| c.u32_1(i, |a| a)),
    row(84, "v_cvt_f32_fp8", |c, i| u32_to_f32(c, i, |a| fp8_to_f32(a as u8))),
    row(85, "v_cvt_f32_bf8", |c, i| u32_to_f32(c, i, |a| bf8_to_f32(a as u8))),
    row(86, "v_cvt_pk_f32_fp8", |c, i| cvt_pk(c, i, fp8_to_f32)),
    row(87, "v_cvt_pk_f32_bf8", |c, i| cvt_pk(c, i, bf8_to_f32)),
];

pub(super) const READ_FIRST_LANE: u16 = 2;
pub(super) const ACCVGPR_MOV: u16 = 82;
