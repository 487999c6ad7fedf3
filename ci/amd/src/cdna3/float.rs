//! Number formats and float operations with AMD's rules.

use half::{bf16, f16};

/// Value of an e4m3fnuz byte (bias 8, one NaN, no infinities, no negative zero).
pub fn fp8_to_f32(x: u8) -> f32 {
    small_to_f32(x, 3, 8)
}

/// Value of an e5m2fnuz byte (bias 16).
pub fn bf8_to_f32(x: u8) -> f32 {
    small_to_f32(x, 2, 16)
}

fn small_to_f32(x: u8, mantissa_bits: u32, bias: i32) -> f32 {
    if x == 0x80 {
        return f32::NAN;
    }
    let (sign, magnitude) = (if x & 0x80 != 0 { -1.0 } else { 1.0 }, u32::from(x & 0x7f));
    let (exponent, mantissa) = ((magnitude >> mantissa_bits) as i32, magnitude & ((1 << mantissa_bits) - 1));
    let fraction = mantissa as f32 / (1 << mantissa_bits) as f32;
    let scaled = if exponent == 0 { fraction * exp2i(1 - bias) } else { (1.0 + fraction) * exp2i(exponent - bias) };
    sign * scaled
}

/// 2 to the power `n`, for a normal result.
fn exp2i(n: i32) -> f32 {
    f32::from_bits(((n + 127) as u32) << 23)
}

/// Rounds to nearest even e4m3fnuz; past the largest value (240) it gives NaN, or saturates when asked to.
pub fn f32_to_fp8(x: f32, saturate: bool) -> u8 {
    f32_to_small(x, 3, 8, saturate)
}

/// Rounds to nearest even e5m2fnuz; past the largest value (57344) it gives NaN, or saturates when asked to.
pub fn f32_to_bf8(x: f32, saturate: bool) -> u8 {
    f32_to_small(x, 2, 16, saturate)
}

fn f32_to_small(x: f32, mantissa_bits: u32, bias: i32, saturate: bool) -> u8 {
    if x.is_nan() || (x.is_infinite() && !saturate) {
        return 0x80;
    }
    let largest = 0x7f;
    // In units of the result's last place the value is at most 2^(mantissa bits + 1): rounding to an integer is exact rounding.
    let exponent = (x.abs().to_bits() >> 23) as i32 - 127;
    let exponent = exponent.max(1 - bias);
    let unit = f64::from(exp2i_wide(exponent - mantissa_bits as i32));
    let steps = if x.is_infinite() { f64::MAX } else { (f64::from(x.abs()) / unit).round_ties_even() };
    let code = steps + f64::from(((exponent + bias - 1) as u32) << mantissa_bits);
    let magnitude = match code <= f64::from(largest) {
        true => code as u8,
        false if saturate => largest as u8,
        false => return 0x80,
    };
    // There is no negative zero.
    if magnitude == 0 { 0 } else { magnitude | if x.is_sign_negative() { 0x80 } else { 0 } }
}

fn exp2i_wide(n: i32) -> f32 {
    (f64::from_bits(((n + 1023) as u64) << 52)) as f32
}

/// Value of bfloat16 bits.
#[inline(always)]
pub fn bf16_to_f32(x: u16) -> f32 {
    bf16::from_bits(x).to_f32()
}

/// Value of float16 bits.
#[inline(always)]
pub fn f16_to_f32(x: u16) -> f32 {
    f16::from_bits(x).to_f32()
}

/// Float16 bits, rounded toward zero.
pub fn f32_to_f16_toward_zero(x: f32) -> u16 {
    let near = f16::from_f32(x);
    if x.is_nan() || near.to_f32().abs() <= x.abs() {
        return near.to_bits();
    }
    // The nearest value lies further from zero than x: the one before it is right, and 65504 for what overflowed.
    near.to_bits() - 1
}

/// Smaller of two numbers; -0 is below +0, a NaN loses to a number.
#[inline(always)]
pub fn min_f32(a: f32, b: f32) -> f32 {
    let below = a < b || (a == b && a.is_sign_negative()) || b.is_nan();
    if below { a } else { b }
}

/// Larger of two numbers; +0 is above -0, a NaN loses to a number.
#[inline(always)]
pub fn max_f32(a: f32, b: f32) -> f32 {
    let above = a > b || (a == b && a.is_sign_positive()) || b.is_nan();
    if above { a } else { b }
}

/// Middle of three numbers; with a NaN among them, the smallest.
#[inline(always)]
pub fn med3_f32(a: f32, b: f32, c: f32) -> f32 {
    if a.is_nan() || b.is_nan() || c.is_nan() {
        return min_f32(min_f32(a, b), c);
    }
    max_f32(min_f32(a, b), min_f32(max_f32(a, b), c))
}

/// Denormals become zeros of their sign.
#[inline(always)]
pub fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0f32.copysign(x) } else { x }
}

/// `x` times 2 to the power `n`.
pub fn ldexp(x: f64, n: i32) -> f64 {
    let (mut x, mut n) = (x, n.clamp(-2200, 2200));
    let power = |n: i32| f64::from_bits(((n + 1023) as u64) << 52);
    while n > 1023 {
        x *= power(1023);
        n -= 1023;
    }
    // Steps down leave 53 bits of room above the denormals, so that only the last step can round.
    while n < -1022 {
        x *= power(-969);
        n += 969;
    }
    x * power(n)
}

/// Exponent as `frexp` gives it (mantissa in 0.5..1); 0 for zero, infinity and NaN.
pub fn frexp_exponent(x: f64) -> i32 {
    if x == 0.0 || !x.is_finite() {
        return 0;
    }
    let scaled = if x.abs() < f64::MIN_POSITIVE { x * 2f64.powi(64) } else { x };
    let exponent = (scaled.to_bits() >> 52 & 0x7ff) as i32 - 1022;
    if x.abs() < f64::MIN_POSITIVE { exponent - 64 } else { exponent }
}

/// Mantissa as `frexp` gives it.
pub fn frexp_mantissa(x: f64) -> f64 {
    if x == 0.0 || !x.is_finite() { x } else { ldexp(x, -frexp_exponent(x)) }
}

/// Which class bit of `v_cmp_class` a float32 has, from signalling NaN (0) to +infinity (9).
pub fn class_f32(x: u32) -> u32 {
    class(x >> 31 == 1, x >> 23 & 0xff, 0xff, x & 0x7f_ffff, x >> 22 & 1 == 1)
}

/// As [`class_f32`], for float16 bits.
pub fn class_f16(x: u16) -> u32 {
    let x = u32::from(x);
    class(x >> 15 == 1, x >> 10 & 0x1f, 0x1f, x & 0x3ff, x >> 9 & 1 == 1)
}

/// As [`class_f32`], for float64 bits.
pub fn class_f64(x: u64) -> u32 {
    class(x >> 63 == 1, (x >> 52 & 0x7ff) as u32, 0x7ff, u32::from(x << 12 != 0), x >> 51 & 1 == 1)
}

fn class(negative: bool, exponent: u32, top: u32, mantissa: u32, quiet: bool) -> u32 {
    let pick = |minus, plus| if negative { minus } else { plus };
    match (exponent, mantissa) {
        (e, m) if e == top && m != 0 => u32::from(quiet),
        (e, _) if e == top => pick(2, 9),
        (0, 0) => pick(5, 6),
        (0, _) => pick(4, 7),
        _ => pick(3, 8),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fp8_bytes_round_trip() {
        for byte in 0..=255u8 {
            if byte != 0x80 {
                assert_eq!(f32_to_fp8(fp8_to_f32(byte), false), byte);
                assert_eq!(f32_to_bf8(bf8_to_f32(byte), false), byte);
            }
        }
        assert_eq!(fp8_to_f32(0x7f), 240.0);
        assert_eq!(fp8_to_f32(0x01), 1.0 / 1024.0);
        assert_eq!(bf8_to_f32(0x7f), 57344.0);
        assert!(fp8_to_f32(0x80).is_nan());
    }

    #[test]
    fn fp8_rounds_to_nearest_even() {
        assert_eq!(f32_to_fp8(1.0625, false), f32_to_fp8(1.0, false));
        assert_eq!(fp8_to_f32(f32_to_fp8(1.1875, false)), 1.25);
        assert_eq!(f32_to_fp8(247.9, false), 0x7f);
        assert_eq!(f32_to_fp8(248.0, false), 0x80);
        assert_eq!(f32_to_fp8(1e9, true), 0x7f);
        assert_eq!(f32_to_fp8(-1e-9, false), 0);
        assert_eq!(fp8_to_f32(f32_to_fp8(0.0005, false)), 1.0 / 1024.0 * 1.0);
    }

    #[test]
    fn float_rules() {
        assert_eq!(med3_f32(3.0, 1.0, 2.0), 2.0);
        assert_eq!(min_f32(f32::NAN, 2.0), 2.0);
        assert!(max_f32(-0.0, 0.0).is_sign_positive() && max_f32(0.0, -0.0).is_sign_positive());
        assert_eq!(ldexp(1.5, -1074), f64::from_bits(2));
        assert_eq!(ldexp(1.0, 1023), f64::from_bits(0x7fe << 52));
        assert_eq!((frexp_exponent(8.0), frexp_mantissa(8.0)), (4, 0.5));
        assert_eq!(f32_to_f16_toward_zero(65519.0), 0x7bff);
        assert_eq!(f32_to_f16_toward_zero(1e9), 0x7bff);
        assert_eq!(f32_to_f16_toward_zero(-1.0005), 0xbc00);
    }
}
