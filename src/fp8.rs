//! The 8-bit floats of quantised caches: e4m3 (OCP: NVIDIA, gfx950, gfx12) and e4m3fnuz (gfx942).
//!
//! Encoding rounds to nearest even and saturates at the largest finite value. Decoding is exact and free of branches, so that
//! loops over it become vector code.

use float8::F8E4M3;

use crate::tensor::DType;

/// Largest e4m3 value.
pub const E4M3_MAX: f32 = 448.0;

/// Largest e4m3fnuz value.
pub const E4M3FNUZ_MAX: f32 = 240.0;

const fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

// A byte's exponent and fraction, moved to where float32 has them, make a float32 that is too small by a power of two: the
// difference of the two formats' exponent biases. Subnormal bytes become subnormal floats, which the product mends as well.
#[inline(always)]
fn decode(byte: u8, bias: i32, is_nan: bool) -> f32 {
    let magnitude = f32::from_bits(u32::from(byte & 0x7F) << 20) * power_of_two(127 - bias);
    let sign = u32::from(byte & 0x80) << 24;
    f32::from_bits(if is_nan { f32::NAN.to_bits() } else { magnitude.to_bits() | sign })
}

/// Value of an e4m3 byte.
#[inline(always)]
pub fn e4m3_to_f32(byte: u8) -> f32 {
    decode(byte, 7, byte & 0x7F == 0x7F)
}

/// Value of an e4m3fnuz byte.
#[inline(always)]
pub fn e4m3fnuz_to_f32(byte: u8) -> f32 {
    decode(byte, 8, byte == 0x80)
}

/// The e4m3 byte nearest to a value; the largest finite one beyond it.
pub fn f32_to_e4m3(x: f32) -> u8 {
    // `clamp` keeps a NaN.
    F8E4M3::from_f32(x.clamp(-E4M3_MAX, E4M3_MAX)).to_bits()
}

/// The e4m3fnuz byte nearest to a value; the largest finite one beyond it. There is no negative zero: its byte is the NaN.
pub fn f32_to_e4m3fnuz(x: f32) -> u8 {
    const BIAS: u32 = 8;
    const SMALLEST_NORMAL: f32 = power_of_two(1 - BIAS as i32);
    if x.is_nan() {
        return 0x80;
    }
    let size = x.abs().min(E4M3FNUZ_MAX);
    let byte = if size < SMALLEST_NORMAL {
        (size * power_of_two(BIAS as i32 + 2)).round_ties_even() as u32
    } else {
        // Round the fraction from 23 bits to 3, then rebias the exponent.
        let bits = size.to_bits();
        ((bits + 0x7_FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - BIAS) << 3)
    };
    if byte != 0 && x < 0.0 { byte as u8 | 0x80 } else { byte as u8 }
}

/// Value of a byte of one of the 8-bit float types; NaN for other types.
pub fn to_f32(dtype: DType, byte: u8) -> f32 {
    match dtype {
        DType::Fp8E4m3 => e4m3_to_f32(byte),
        DType::Fp8E4m3Fnuz => e4m3fnuz_to_f32(byte),
        _ => f32::NAN,
    }
}

/// Byte of a value in one of the 8-bit float types: e4m3fnuz, or e4m3 for all others.
pub fn from_f32(dtype: DType, x: f32) -> u8 {
    match dtype {
        DType::Fp8E4m3Fnuz => f32_to_e4m3fnuz(x),
        _ => f32_to_e4m3(x),
    }
}

/// Bytes of a row of [`CacheLayout::Fp8DsMla`](crate::kernel::params::CacheLayout::Fp8DsMla).
pub mod ds_mla {
    /// Latents of a row.
    pub const LATENTS: usize = 512;
    /// Latents that share a scale.
    pub const TILE: usize = 128;
    /// Rope values of a row.
    pub const ROPE: usize = 64;
    /// First byte of the scales.
    pub const SCALES_AT: usize = LATENTS;
    /// First byte of the rope values.
    pub const ROPE_AT: usize = SCALES_AT + LATENTS / TILE * 4;
    /// Bytes of a row.
    pub const ROW_BYTES: usize = ROPE_AT + ROPE * 2;

    /// Scale of a tile whose largest magnitude is `amax`: the power of two at or above `max(amax / 448, 1e-4)`.
    pub fn tile_scale(amax: f32) -> f32 {
        let wanted = (amax / super::E4M3_MAX).max(1e-4);
        let bits = wanted.to_bits();
        // The next power of two is the next value with an empty fraction.
        f32::from_bits(bits.next_multiple_of(1 << 23))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e4m3_decodes_as_the_float8_crate_does() {
        for byte in 0..=255 {
            let (ours, theirs) = (e4m3_to_f32(byte), F8E4M3::from_bits(byte).to_f32());
            assert!(
                ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan()),
                "{byte}: {ours} {theirs}"
            );
        }
    }

    #[test]
    fn every_byte_survives_a_round_trip_and_midpoints_go_to_even() {
        for dtype in [DType::Fp8E4m3, DType::Fp8E4m3Fnuz] {
            for byte in 0..=255 {
                let value = to_f32(dtype, byte);
                if value.is_nan() {
                    assert!(to_f32(dtype, from_f32(dtype, value)).is_nan());
                    continue;
                }
                assert_eq!(from_f32(dtype, value), byte, "{dtype} {value}");
                let above = to_f32(dtype, byte.wrapping_add(1));
                if byte & 0x7F != 0x7F && above.is_finite() {
                    let even = if byte % 2 == 0 { byte } else { byte + 1 };
                    let middle = from_f32(dtype, (value + above) / 2.0);
                    // The midpoint below the smallest negative e4m3fnuz value rounds to the only zero.
                    let even = if dtype == DType::Fp8E4m3Fnuz && even == 0x80 { 0 } else { even };
                    assert_eq!(middle, even, "{dtype} between {value} and {above}");
                }
            }
            for (x, want) in [(1e9, 0x7E), (f32::INFINITY, 0x7E), (-1e9, 0xFE)] {
                let want = if dtype == DType::Fp8E4m3 { want } else { want | 1 };
                assert_eq!(from_f32(dtype, x), want, "{dtype} {x}");
            }
            assert_eq!(from_f32(dtype, 1e-9), 0, "{dtype}");
        }
        assert_eq!(f32_to_e4m3fnuz(-0.0), 0);
        assert_eq!(f32_to_e4m3fnuz(-1e-9), 0);
    }

    #[test]
    fn tile_scales_are_powers_of_two_at_or_above() {
        assert_eq!(ds_mla::ROW_BYTES, 656);
        for (amax, scale) in [(0.0, 1.0 / 8192.0), (448.0, 1.0), (448.1, 2.0), (3.5, 1.0 / 128.0), (7000.0, 16.0)] {
            assert_eq!(ds_mla::tile_scale(amax), scale, "{amax}");
        }
    }
}
