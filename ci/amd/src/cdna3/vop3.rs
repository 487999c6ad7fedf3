//! VOP3: vector instructions that only the long encoding has.

use super::float::{f32_to_bf8, f32_to_f16_toward_zero, f32_to_fp8, ldexp, max_f32, med3_f32, min_f32};
use super::inst::{Inst, Lanes, Row, Src, row};
use super::operand::each;
use super::vop2::{fma_f16, signed24, unsigned24};
use super::vop3_div;
use crate::device::{Context, Flow};

fn signed_3(c: &mut Context<'_>, i: &Inst, f: impl Fn(i32, i32, i32) -> i32) -> Flow {
    c.u32_3(i, |a, b, d| f(a.cast_signed(), b.cast_signed(), d.cast_signed()).cast_unsigned())
}

fn f16_3(c: &mut Context<'_>, i: &Inst, f: impl Fn(f32, f32, f32) -> f32) -> Flow {
    let (a, b, d) = (c.f16s(i, 0), c.f16s(i, 1), c.f16s(i, 2));
    c.put_f16(i, each(|lane| f(a[lane], b[lane], d[lane])), true)
}

fn u16_3(c: &mut Context<'_>, i: &Inst, f: impl Fn(u16, u16, u16) -> u16) -> Flow {
    let (a, b, d) = (c.u16s(i, 0), c.u16s(i, 1), c.u16s(i, 2));
    c.put_u16(i, &each(|lane| f(a[lane] as u16, b[lane] as u16, d[lane] as u16).into()), true)
}

fn i16_3(c: &mut Context<'_>, i: &Inst, f: impl Fn(i16, i16, i16) -> i16) -> Flow {
    u16_3(c, i, |a, b, d| f(a.cast_signed(), b.cast_signed(), d.cast_signed()).cast_unsigned())
}

/// Middle of three values.
fn med3<T: Ord>(a: T, b: T, c: T) -> T {
    let (low, high) = if a < b { (a, b) } else { (b, a) };
    low.max(high.min(c))
}

/// One byte of the eight of `a` (high) and `b` (low), or a fill.
fn permute_byte(a: u32, b: u32, select: u32) -> u32 {
    let data = u64::from(a) << 32 | u64::from(b);
    let sign = |byte: u32| if data >> (byte * 8 + 7) & 1 == 1 { 0xff } else { 0 };
    match select {
        0..=7 => (data >> (select * 8) & 0xff) as u32,
        8..=11 => sign((select - 8) * 2 + 1),
        12 => 0,
        _ => 0xff,
    }
}

/// `v_perm_b32`.
fn permute(a: u32, b: u32, select: u32) -> u32 {
    (0..4).fold(0, |x, n| x | permute_byte(a, b, select >> (8 * n) & 0xff) << (8 * n))
}

fn bit_field_unsigned(a: u32, first: u32, count: u32) -> u32 {
    a >> (first & 31) & ((1u64 << (count & 31)) - 1) as u32
}

fn bit_field_signed(a: u32, first: u32, count: u32) -> u32 {
    let count = count & 31;
    if count == 0 {
        return 0;
    }
    let x = bit_field_unsigned(a, first, count);
    ((x << (32 - count)).cast_signed() >> (32 - count)).cast_unsigned()
}

fn sad_u8(a: u32, b: u32, sum: u32) -> u32 {
    let byte = |x: u32, n: u32| x >> (8 * n) & 0xff;
    (0..4).fold(sum, |sum, n| sum.wrapping_add(byte(a, n).abs_diff(byte(b, n))))
}

fn shift64(c: &mut Context<'_>, i: &Inst, f: impl Fn(u64, u32) -> u64) -> Flow {
    let (count, x) = (c.u32s(i, 0), c.u64s(i, 1));
    c.put64(i, &each(|lane| f(x[lane], count[lane] & 63)))
}

fn read_lane(c: &mut Context<'_>, i: &Inst) -> Flow {
    let lane = c.s32(i, 1) as usize % 64;
    c.wave.s[i.sdst as usize] = match i.src[0] {
        Src::V(r) => c.wave.v[r as usize][lane],
        _ => c.s32(i, 0),
    };
    Flow::Next
}

/// Writes one lane, whatever the execution mask.
fn write_lane(c: &mut Context<'_>, i: &Inst) -> Flow {
    let (x, lane) = (c.s32(i, 0), c.s32(i, 1) as usize % 64);
    c.wave.v[i.dst as usize][lane] = x;
    Flow::Next
}

/// Bits of the mask in lower lanes, counted onto operand 1. `half` is the mask's dword.
fn mbcnt(c: &mut Context<'_>, i: &Inst, half: usize) -> Flow {
    let (mask, sum) = (c.u32s(i, 0), c.u32s(i, 1));
    c.put(
        i,
        &each(|lane| {
            let below = ((1u64 << lane) - 1) >> (32 * half);
            sum[lane].wrapping_add((mask[lane] & below as u32).count_ones())
        }),
    )
}

/// Two results in the word that `op_sel` names; the other word is kept.
fn put_pair(c: &mut Context<'_>, i: &Inst, convert: fn(f32, bool) -> u8) -> Flow {
    let (a, b) = (c.f32s(i, 0), c.f32s(i, 1));
    let saturate = c.wave.mode & MODE_FP16_OVERFLOW != 0;
    c.put_u16(i, &each(|lane| u32::from(convert(a[lane], saturate)) | u32::from(convert(b[lane], saturate)) << 8), true)
}

/// MODE bit: results past the largest value saturate in conversions to fp8.
const MODE_FP16_OVERFLOW: u32 = 1 << 23;

/// Stochastic rounding: the seed's high bits are added below the result's last place, then it is rounded.
fn put_stochastic(c: &mut Context<'_>, i: &Inst, seed_shift: u32, convert: fn(f32, bool) -> u8) -> Flow {
    let (a, seed, old) = (c.f32s(i, 0), c.u32s(i, 1), c.wave.v[i.dst as usize]);
    let saturate = c.wave.mode & MODE_FP16_OVERFLOW != 0;
    let shift = 8 * u32::from(i.op_sel >> 2 & 3);
    c.put(
        i,
        &each(|lane| {
            let bits = a[lane].to_bits();
            let mantissa = (bits & 0x7f_ffff).wrapping_add(seed[lane] >> seed_shift) & 0x7f_ffff;
            let byte = convert(f32::from_bits(bits & 0xff80_0000 | mantissa), saturate);
            old[lane] & !(0xff << shift) | u32::from(byte) << shift
        }),
    )
}

/// Float32 to a normalised 16-bit integer.
fn to_unit(x: f32, low: f32, high: f32) -> u32 {
    (x.clamp(low, 1.0) * high).round_ties_even() as i32 as u32 & 0xffff
}

fn pack_f32(c: &mut Context<'_>, i: &Inst, f: impl Fn(f32) -> u32) -> Flow {
    let (a, b) = (c.f32s(i, 0), c.f32s(i, 1));
    c.put(i, &each(|lane| f(a[lane]) | f(b[lane]) << 16))
}

fn add64_of_product(c: &mut Context<'_>, i: &Inst, f: impl Fn(u32, u32, u64) -> (u64, bool)) -> Flow {
    let (a, b, d) = (c.u32s(i, 0), c.u32s(i, 1), c.u64s(i, 2));
    let sums = each(|lane| f(a[lane], b[lane], d[lane]).0);
    let flow = c.put_bits(i, |lane| f(a[lane], b[lane], d[lane]).1);
    c.put64(i, &sums);
    flow
}

fn mad_u64(a: u32, b: u32, d: u64) -> (u64, bool) {
    (u64::from(a) * u64::from(b)).overflowing_add(d)
}

fn mad_i64(a: u32, b: u32, d: u64) -> (u64, bool) {
    let product = i64::from(a.cast_signed()) * i64::from(b.cast_signed());
    let (sum, overflow) = product.overflowing_add(d.cast_signed());
    (sum.cast_unsigned(), overflow)
}

fn ldexp_f32(c: &mut Context<'_>, i: &Inst) -> Flow {
    let (a, b) = (c.f32s(i, 0), c.u32s(i, 1));
    c.put_f32(i, each(|lane| ldexp(a[lane].into(), b[lane].cast_signed()) as f32))
}

/// Opcodes that write a scalar register instead of a vector register.
pub(super) fn writes_scalar(op: u16) -> bool {
    op == READLANE
}

/// Opcodes with a vector and a scalar destination.
pub(super) fn writes_both(op: u16) -> bool {
    matches!(op, 281..=286 | 480 | 481 | 488 | 489)
}

const READLANE: u16 = 649;

pub(super) const VOP3: &[Row] = &[
    row(450, "v_mad_i32_i24", |c, i| c.u32_3(i, |a, b, d| ((signed24(a) * signed24(b)) as u32).wrapping_add(d))),
    row(451, "v_mad_u32_u24", |c, i| c.u32_3(i, |a, b, d| ((unsigned24(a) * unsigned24(b)) as u32).wrapping_add(d))),
    row(456, "v_bfe_u32", |c, i| c.u32_3(i, bit_field_unsigned)),
    row(457, "v_bfe_i32", |c, i| c.u32_3(i, bit_field_signed)),
    row(458, "v_bfi_b32", |c, i| c.u32_3(i, |mask, a, b| mask & a | !mask & b)),
    row(459, "v_fma_f32", |c, i| c.f32_3(i, f32::mul_add)),
    row(460, "v_fma_f64", |c, i| {
        let (a, b, d) = (c.f64s(i, 0), c.f64s(i, 1), c.f64s(i, 2));
        c.put_f64(i, each(|lane| a[lane].mul_add(b[lane], d[lane])))
    }),
    row(462, "v_alignbit_b32", |c, i| c.u32_3(i, |a, b, d| ((u64::from(a) << 32 | u64::from(b)) >> (d & 31)) as u32)),
    row(463, "v_alignbyte_b32", |c, i| {
        c.u32_3(i, |a, b, d| ((u64::from(a) << 32 | u64::from(b)) >> (8 * (d & 3))) as u32)
    }),
    row(464, "v_min3_f32", |c, i| c.f32_3(i, |a, b, d| min_f32(min_f32(a, b), d))),
    row(465, "v_min3_i32", |c, i| signed_3(c, i, |a, b, d| a.min(b).min(d))),
    row(466, "v_min3_u32", |c, i| c.u32_3(i, |a, b, d| a.min(b).min(d))),
    row(467, "v_max3_f32", |c, i| c.f32_3(i, |a, b, d| max_f32(max_f32(a, b), d))),
    row(468, "v_max3_i32", |c, i| signed_3(c, i, |a, b, d| a.max(b).max(d))),
    row(469, "v_max3_u32", |c, i| c.u32_3(i, |a, b, d| a.max(b).max(d))),
    row(470, "v_med3_f32", |c, i| c.f32_3(i, med3_f32)),
    row(471, "v_med3_i32", |c, i| signed_3(c, i, med3)),
    row(472, "v_med3_u32", |c, i| c.u32_3(i, med3)),
    row(473, "v_sad_u8", |c, i| c.u32_3(i, sad_u8)),
    row(475, "v_sad_u16", |c, i| {
        c.u32_3(i, |a, b, d| {
            d.wrapping_add((a & 0xffff).abs_diff(b & 0xffff)).wrapping_add((a >> 16).abs_diff(b >> 16))
        })
    }),
    row(476, "v_sad_u32", |c, i| c.u32_3(i, |a, b, d| d.wrapping_add(a.abs_diff(b)))),
    row(477, "v_cvt_pk_u8_f32", |c, i| {
        let (a, at, old) = (c.f32s(i, 0), c.u32s(i, 1), c.u32s(i, 2));
        c.put(
            i,
            &each(|lane| {
                let shift = 8 * (at[lane] & 3);
                old[lane] & !(0xff << shift) | u32::from(a[lane] as u8) << shift
            }),
        )
    }),
    row(478, "v_div_fixup_f32", |c, i| c.f32_3(i, vop3_div::fixup_f32)),
    row(479, "v_div_fixup_f64", vop3_div::fixup_f64),
    row(480, "v_div_scale_f32", vop3_div::scale_f32),
    row(481, "v_div_scale_f64", vop3_div::scale_f64),
    row(482, "v_div_fmas_f32", vop3_div::fmas_f32),
    row(483, "v_div_fmas_f64", vop3_div::fmas_f64),
    row(488, "v_mad_u64_u32", |c, i| add64_of_product(c, i, mad_u64)),
    row(489, "v_mad_i64_i32", |c, i| add64_of_product(c, i, mad_i64)),
    row(493, "v_perm_b32", |c, i| c.u32_3(i, permute)),
    row(497, "v_mad_u32_u16", |c, i| {
        let (a, b, d) = (c.u16s(i, 0), c.u16s(i, 1), c.u32s(i, 2));
        c.put(i, &each(|lane| (a[lane] * b[lane]).wrapping_add(d[lane])))
    }),
    row(498, "v_mad_i32_i16", |c, i| {
        let (a, b, d) = (c.u16s(i, 0), c.u16s(i, 1), c.u32s(i, 2));
        let wide = |x: u32| i32::from(x as i16);
        c.put(i, &each(|lane| (wide(a[lane]) * wide(b[lane])).cast_unsigned().wrapping_add(d[lane])))
    }),
    row(499, "v_xad_u32", |c, i| c.u32_3(i, |a, b, d| (a ^ b).wrapping_add(d))),
    row(500, "v_min3_f16", |c, i| f16_3(c, i, |a, b, d| min_f32(min_f32(a, b), d))),
    row(501, "v_min3_i16", |c, i| i16_3(c, i, |a, b, d| a.min(b).min(d))),
    row(502, "v_min3_u16", |c, i| u16_3(c, i, |a, b, d| a.min(b).min(d))),
    row(503, "v_max3_f16", |c, i| f16_3(c, i, |a, b, d| max_f32(max_f32(a, b), d))),
    row(504, "v_max3_i16", |c, i| i16_3(c, i, |a, b, d| a.max(b).max(d))),
    row(505, "v_max3_u16", |c, i| u16_3(c, i, |a, b, d| a.max(b).max(d))),
    row(506, "v_med3_f16", |c, i| f16_3(c, i, med3_f32)),
    row(507, "v_med3_i16", |c, i| i16_3(c, i, med3)),
    row(508, "v_med3_u16", |c, i| u16_3(c, i, med3)),
    row(509, "v_lshl_add_u32", |c, i| c.u32_3(i, |a, b, d| (a << (b & 31)).wrapping_add(d))),
    row(510, "v_add_lshl_u32", |c, i| c.u32_3(i, |a, b, d| a.wrapping_add(b) << (d & 31))),
    row(511, "v_add3_u32", |c, i| c.u32_3(i, |a, b, d| a.wrapping_add(b).wrapping_add(d))),
    row(512, "v_lshl_or_b32", |c, i| c.u32_3(i, |a, b, d| a << (b & 31) | d)),
    row(513, "v_and_or_b32", |c, i| c.u32_3(i, |a, b, d| a & b | d)),
    row(514, "v_or3_b32", |c, i| c.u32_3(i, |a, b, d| a | b | d)),
    row(515, "v_mad_f16", |c, i| f16_3(c, i, |a, b, d| half::f16::from_f32(a * b).to_f32() + d)),
    row(516, "v_mad_u16", |c, i| u16_3(c, i, |a, b, d| a.wrapping_mul(b).wrapping_add(d))),
    row(517, "v_mad_i16", |c, i| i16_3(c, i, |a, b, d| a.wrapping_mul(b).wrapping_add(d))),
    row(518, "v_fma_f16", |c, i| f16_3(c, i, fma_f16)),
    row(519, "v_div_fixup_f16", |c, i| f16_3(c, i, vop3_div::fixup_f32)),
    row(520, "v_lshl_add_u64", |c, i| {
        let (a, b, d) = (c.u64s(i, 0), c.u32s(i, 1), c.u64s(i, 2));
        c.put64(i, &each(|lane| (a[lane] << (b[lane] & 7)).wrapping_add(d[lane])))
    }),
    row(640, "v_add_f64", |c, i| c.f64_2(i, |a, b| a + b)),
    row(641, "v_mul_f64", |c, i| c.f64_2(i, |a, b| a * b)),
    row(642, "v_min_f64", |c, i| c.f64_2(i, f64::min)),
    row(643, "v_max_f64", |c, i| c.f64_2(i, f64::max)),
    row(644, "v_ldexp_f64", |c, i| {
        let (a, b) = (c.f64s(i, 0), c.u32s(i, 1));
        c.put_f64(i, each(|lane| ldexp(a[lane], b[lane].cast_signed())))
    }),
    row(645, "v_mul_lo_u32", |c, i| c.u32_2(i, u32::wrapping_mul)),
    row(646, "v_mul_hi_u32", |c, i| c.u32_2(i, |a, b| ((u64::from(a) * u64::from(b)) >> 32) as u32)),
    row(647, "v_mul_hi_i32", |c, i| {
        c.u32_2(i, |a, b| ((i64::from(a.cast_signed()) * i64::from(b.cast_signed())) >> 32) as u32)
    }),
    row(648, "v_ldexp_f32", ldexp_f32),
    row(READLANE, "v_readlane_b32", read_lane),
    row(650, "v_writelane_b32", write_lane),
    row(651, "v_bcnt_u32_b32", |c, i| c.u32_2(i, |a, b| a.count_ones().wrapping_add(b))),
    row(652, "v_mbcnt_lo_u32_b32", |c, i| mbcnt(c, i, 0)),
    row(653, "v_mbcnt_hi_u32_b32", |c, i| mbcnt(c, i, 1)),
    row(655, "v_lshlrev_b64", |c, i| shift64(c, i, |x, n| x << n)),
    row(656, "v_lshrrev_b64", |c, i| shift64(c, i, |x, n| x >> n)),
    row(657, "v_ashrrev_i64", |c, i| shift64(c, i, |x, n| (x.cast_signed() >> n).cast_unsigned())),
    row(659, "v_bfm_b32", |c, i| c.u32_2(i, |a, b| ((1 << (a & 31)) - 1) << (b & 31))),
    row(660, "v_cvt_pknorm_i16_f32", |c, i| pack_f32(c, i, |x| to_unit(x, -1.0, 32767.0))),
    row(661, "v_cvt_pknorm_u16_f32", |c, i| pack_f32(c, i, |x| to_unit(x, 0.0, 65535.0))),
    row(662, "v_cvt_pkrtz_f16_f32", |c, i| pack_f32(c, i, |x| f32_to_f16_toward_zero(x).into())),
    row(663, "v_cvt_pk_u16_u32", |c, i| c.u32_2(i, |a, b| a.min(0xffff) | b.min(0xffff) << 16)),
    row(664, "v_cvt_pk_i16_i32", |c, i| {
        let clamp = |x: u32| x.cast_signed().clamp(-0x8000, 0x7fff).cast_unsigned() & 0xffff;
        c.u32_2(i, |a, b| clamp(a) | clamp(b) << 16)
    }),
    row(668, "v_add_i32", |c, i| {
        let clamp = i.clamp;
        c.u32_2(i, |a, b| if clamp { saturating_add(a, b) } else { a.wrapping_add(b) })
    }),
    row(669, "v_sub_i32", |c, i| {
        let clamp = i.clamp;
        c.u32_2(i, |a, b| if clamp { saturating_sub(a, b) } else { a.wrapping_sub(b) })
    }),
    row(670, "v_add_i16", |c, i| c.u16_2(i, u16::wrapping_add)),
    row(671, "v_sub_i16", |c, i| c.u16_2(i, u16::wrapping_sub)),
    row(672, "v_pack_b32_f16", |c, i| {
        let (a, b) = (packed_half(c, i, 0), packed_half(c, i, 1));
        c.put(i, &each(|lane| a[lane] | b[lane] << 16))
    }),
    row(673, "v_mul_legacy_f32", |c, i| c.f32_2(i, |a, b| if a == 0.0 || b == 0.0 { 0.0 } else { a * b })),
    row(674, "v_cvt_pk_fp8_f32", |c, i| put_pair(c, i, f32_to_fp8)),
    row(675, "v_cvt_pk_bf8_f32", |c, i| put_pair(c, i, f32_to_bf8)),
    row(676, "v_cvt_sr_fp8_f32", |c, i| put_stochastic(c, i, 12, f32_to_fp8)),
    row(677, "v_cvt_sr_bf8_f32", |c, i| put_stochastic(c, i, 11, f32_to_bf8)),
];

/// A float16 operand's bits, with its sign modifiers.
fn packed_half(c: &Context<'_>, i: &Inst, n: usize) -> Lanes {
    let mut x = c.u16s(i, n);
    if i.abs >> n & 1 == 1 {
        x.iter_mut().for_each(|x| *x &= 0x7fff);
    }
    if i.neg >> n & 1 == 1 {
        x.iter_mut().for_each(|x| *x ^= 0x8000);
    }
    x
}

fn saturating_add(a: u32, b: u32) -> u32 {
    a.cast_signed().saturating_add(b.cast_signed()).cast_unsigned()
}

fn saturating_sub(a: u32, b: u32) -> u32 {
    a.cast_signed().saturating_sub(b.cast_signed()).cast_unsigned()
}
