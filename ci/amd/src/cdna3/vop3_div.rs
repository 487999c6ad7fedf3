//! The steps of an exact division: scale, fused multiply-add with scale, fix up.

use super::float::{class_f32, ldexp};
use super::inst::Inst;
use super::operand::each;
use crate::device::{Context, Flow};

/// The quotient's special cases; `a` is the quotient, `b` the denominator, `c` the numerator.
pub(super) fn fixup_f32(a: f32, b: f32, c: f32) -> f32 {
    fixup(a.into(), b.into(), c.into(), -150, 128, |x| exponent_f32(x as f32)) as f32
}

fn exponent_f32(x: f32) -> i32 {
    (x.to_bits() >> 23 & 0xff) as i32 - 127
}

fn exponent_f64(x: f64) -> i32 {
    (x.to_bits() >> 52 & 0x7ff) as i32 - 1023
}

fn fixup(a: f64, b: f64, c: f64, underflow: i32, top: i32, exponent: impl Fn(f64) -> i32) -> f64 {
    let negative = b.is_sign_negative() != c.is_sign_negative();
    let signed = |x: f64| if negative { -x } else { x };
    if c.is_nan() {
        c
    } else if b.is_nan() {
        b
    } else if (b == 0.0 && c == 0.0) || (b.is_infinite() && c.is_infinite()) {
        -f64::NAN
    } else if b == 0.0 || c.is_infinite() {
        signed(f64::INFINITY)
    } else if b.is_infinite() || c == 0.0 || exponent(c) - exponent(b) < underflow {
        signed(0.0)
    } else if exponent(b) == top {
        signed(f64::INFINITY)
    } else {
        signed(a.abs())
    }
}

/// As [`fixup_f32`], of a wave's float64.
pub(super) fn fixup_f64(c: &mut Context<'_>, i: &Inst) -> Flow {
    let (a, b, d) = (c.f64s(i, 0), c.f64s(i, 1), c.f64s(i, 2));
    c.put_f64(i, each(|lane| fixup(a[lane], b[lane], d[lane], -1075, 1024, exponent_f64)))
}

/// Scales a numerator or denominator so that the division's steps neither overflow nor lose bits. Operand 0 is the one to
/// scale, 1 the denominator, 2 the numerator. The flag says that the quotient must be scaled back.
fn scale_one_f32(x: f32, denominator: f32, numerator: f32) -> (f32, bool) {
    let up = |x: f32| ldexp(x.into(), 64) as f32;
    let reciprocal_denormal = (1.0 / f64::from(denominator)).abs() < f64::from(f32::MIN_POSITIVE);
    let denormal = |x: f32| matches!(class_f32(x.to_bits()), 4 | 7);
    let quotient_denormal = {
        let quotient = (f64::from(numerator) / f64::from(denominator)).abs();
        quotient > 0.0 && quotient < f64::from(f32::MIN_POSITIVE)
    };
    if numerator == 0.0 || denominator == 0.0 {
        (f32::NAN, false)
    } else if exponent_f32(numerator) - exponent_f32(denominator) >= 96 {
        (if x == denominator { up(x) } else { x }, true)
    } else if denormal(denominator) {
        (up(x), false)
    } else if reciprocal_denormal && quotient_denormal {
        (if x == denominator { up(x) } else { x }, true)
    } else if reciprocal_denormal {
        (ldexp(x.into(), -64) as f32, false)
    } else if quotient_denormal {
        (if x == numerator { up(x) } else { x }, true)
    } else if exponent_f32(numerator) + 127 <= 23 {
        (up(x), false)
    } else {
        (x, false)
    }
}

/// As [`scale_one_f32`].
fn scale_one_f64(x: f64, denominator: f64, numerator: f64) -> (f64, bool) {
    let up = |x: f64| ldexp(x, 128);
    let reciprocal_denormal = (1.0 / denominator).is_subnormal();
    let quotient_denormal = (numerator / denominator).is_subnormal();
    if numerator == 0.0 || denominator == 0.0 {
        (f64::NAN, false)
    } else if exponent_f64(numerator) - exponent_f64(denominator) >= 768 {
        (if x == denominator { up(x) } else { x }, true)
    } else if denominator.is_subnormal() {
        (up(x), false)
    } else if reciprocal_denormal && quotient_denormal {
        (if x == denominator { up(x) } else { x }, true)
    } else if reciprocal_denormal {
        (ldexp(x, -128), false)
    } else if quotient_denormal {
        (if x == numerator { up(x) } else { x }, true)
    } else if exponent_f64(numerator) + 1023 <= 53 {
        (up(x), false)
    } else {
        (x, false)
    }
}

pub(super) fn scale_f32(c: &mut Context<'_>, i: &Inst) -> Flow {
    let (a, b, d) = (c.f32s(i, 0), c.f32s(i, 1), c.f32s(i, 2));
    let flow = c.put_bits(i, |lane| scale_one_f32(a[lane], b[lane], d[lane]).1);
    c.put_f32(i, each(|lane| scale_one_f32(a[lane], b[lane], d[lane]).0));
    flow
}

pub(super) fn scale_f64(c: &mut Context<'_>, i: &Inst) -> Flow {
    let (a, b, d) = (c.f64s(i, 0), c.f64s(i, 1), c.f64s(i, 2));
    let flow = c.put_bits(i, |lane| scale_one_f64(a[lane], b[lane], d[lane]).1);
    c.put_f64(i, each(|lane| scale_one_f64(a[lane], b[lane], d[lane]).0));
    flow
}

/// Fused multiply-add, times 2^32 in lanes of VCC.
pub(super) fn fmas_f32(c: &mut Context<'_>, i: &Inst) -> Flow {
    let vcc = c.wave.vcc();
    let (a, b, d) = (c.f32s(i, 0), c.f32s(i, 1), c.f32s(i, 2));
    let scale = |lane: usize| if vcc >> lane & 1 == 1 { 32 } else { 0 };
    c.put_f32(i, each(|lane| ldexp(a[lane].mul_add(b[lane], d[lane]).into(), scale(lane)) as f32))
}

/// Fused multiply-add, times 2^64 in lanes of VCC.
pub(super) fn fmas_f64(c: &mut Context<'_>, i: &Inst) -> Flow {
    let vcc = c.wave.vcc();
    let (a, b, d) = (c.f64s(i, 0), c.f64s(i, 1), c.f64s(i, 2));
    let scale = |lane: usize| if vcc >> lane & 1 == 1 { 64 } else { 0 };
    c.put_f64(i, each(|lane| ldexp(a[lane].mul_add(b[lane], d[lane]), scale(lane))))
}
