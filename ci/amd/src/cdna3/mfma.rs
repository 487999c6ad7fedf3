//! MFMA: matrix products of a wave.
//!
//! Layouts, for `M`x`N`x`K` products of `B` blocks (M = N). A lane holds `E = M K B / 64` consecutive `k` of one row of A:
//! row `lane % M`, and `lane / M` counts groups of `E` first along `k`, then along blocks; B likewise with columns. Of D a lane
//! holds column `lane % M`; with M = 32 register `r` is row `8 (r / 4) + 4 (lane / 32) + r % 4` of block `r / 16`, with M = 16 it
//! is row `4 (lane / 16) + r % 4` of block `r / 4`, with M = 4 row `r` of block `lane / 4`. The execution mask does not matter; a
//! checking device reports a mask that is not full.

use std::sync::LazyLock;

use super::float::{bf8_to_f32, bf16_to_f32, f16_to_f32, fp8_to_f32};
use super::inst::{Inst, Lanes, Row, Src, row};
use super::operand::each;
use crate::device::{Context, FaultKind, Flow};

/// Most elements that A or B have: 8 in each lane.
const ELEMENTS: usize = 512;

/// Block and row of D that lanes `group * m` and following hold in a register.
const fn block_and_row(m: usize, register: usize, group: usize) -> (usize, usize) {
    match m {
        32 => (register / 16, register % 16 / 4 * 8 + group * 4 + register % 4),
        16 => (register / 4, group * 4 + register % 4),
        _ => (group, register),
    }
}

/// All of operand `n`, which has `bits` wide elements: `[block][k][row]`.
#[inline(always)]
fn gather<T: Copy + Default, const M: usize, const K: usize, const B: usize>(
    c: &Context<'_>,
    i: &Inst,
    n: usize,
    bits: usize,
    f: impl Fn(u32) -> T,
) -> [T; ELEMENTS] {
    let mut out = [T::default(); ELEMENTS];
    let Src::V(first) = i.src[n] else { return out };
    let per_lane = M * K * B / 64;
    // Groups of M lanes follow each other along k first, then along blocks.
    let groups_per_block = 64 / M / B;
    for element in 0..per_lane {
        let dwords = &c.wave.v[usize::from(first) + element * bits / 32];
        let shift = element * bits % 32;
        let values: [T; 64] = each(|lane| f(dwords[lane] >> shift));
        for group in 0..64 / M {
            let k = group % groups_per_block * per_lane + element;
            let at = (group / groups_per_block * K + k) * M;
            out[at..at + M].copy_from_slice(&values[group * M..][..M]);
        }
    }
    out
}

/// D = A B + C, with `multiply_add(a, b, c)` in the order of `k`.
#[inline(always)]
fn product<T: Copy + Default, const M: usize, const K: usize, const B: usize>(
    c: &mut Context<'_>,
    i: &Inst,
    bits: usize,
    (decode_a, decode_b): (impl Fn(u32) -> T, impl Fn(u32) -> T),
    multiply_add: impl Fn(T, T, u32) -> u32,
) -> Flow {
    if i.flags != 0 {
        return c.fail(FaultKind::Unsupported("a matrix instruction with cbsz, abid or blgp"));
    }
    let exec = c.wave.exec();
    if c.check && exec != u64::MAX {
        return c.fail(FaultKind::MaskedMatrix { exec });
    }
    let a = gather::<T, M, K, B>(c, i, 0, bits, decode_a);
    let b = gather::<T, M, K, B>(c, i, 1, bits, decode_b);
    let registers = M * M * B / 64;
    // D may begin inside C, which is read as a whole before.
    let upwards = !matches!(i.src[2], Src::V(r) if usize::from(r) < usize::from(i.dst));
    for step in 0..registers {
        let register = if upwards { step } else { registers - 1 - step };
        let mut sums: Lanes = match i.src[2] {
            Src::V(r) => c.wave.v[usize::from(r) + register],
            _ => [c.s32(i, 2); 64],
        };
        for (group, sums) in sums.chunks_exact_mut(M).enumerate() {
            let (block, row) = block_and_row(M, register, group);
            for k in block * K..(block + 1) * K {
                let factor = a[k * M + row];
                for (sum, column) in sums.iter_mut().zip(&b[k * M..(k + 1) * M]) {
                    *sum = multiply_add(factor, *column, *sum);
                }
            }
        }
        c.wave.v[usize::from(i.dst) + register] = sums;
    }
    Flow::Next
}

/// A product in float32 of elements whose products are exact there.
#[inline(always)]
fn exact<const M: usize, const K: usize, const B: usize>(
    c: &mut Context<'_>,
    i: &Inst,
    bits: usize,
    decode: (impl Fn(u32) -> f32, impl Fn(u32) -> f32),
) -> Flow {
    product::<f32, M, K, B>(c, i, bits, decode, |a, b, sum| (a * b + f32::from_bits(sum)).to_bits())
}

fn f16<const M: usize, const K: usize, const B: usize>(c: &mut Context<'_>, i: &Inst) -> Flow {
    exact::<M, K, B>(c, i, 16, (|x| f16_to_f32(x as u16), |x| f16_to_f32(x as u16)))
}

fn bf16<const M: usize, const K: usize, const B: usize>(c: &mut Context<'_>, i: &Inst) -> Flow {
    exact::<M, K, B>(c, i, 16, (|x| bf16_to_f32(x as u16), |x| bf16_to_f32(x as u16)))
}

/// Values of all bytes of a format.
type Values = LazyLock<[f32; 256]>;
static FP8: Values = LazyLock::new(|| std::array::from_fn(|byte| fp8_to_f32(byte as u8)));
static BF8: Values = LazyLock::new(|| std::array::from_fn(|byte| bf8_to_f32(byte as u8)));

fn fp8<const M: usize, const K: usize>(c: &mut Context<'_>, i: &Inst, a: &Values, b: &Values) -> Flow {
    let (a, b): (&[f32; 256], &[f32; 256]) = (a, b);
    exact::<M, K, 1>(c, i, 8, (|x| a[(x & 0xff) as usize], |x| b[(x & 0xff) as usize]))
}

fn f32<const M: usize, const K: usize, const B: usize>(c: &mut Context<'_>, i: &Inst) -> Flow {
    let multiply_add = |a: f32, b: f32, sum| a.mul_add(b, f32::from_bits(sum)).to_bits();
    product::<f32, M, K, B>(c, i, 32, (f32::from_bits, f32::from_bits), multiply_add)
}

fn i8<const M: usize, const K: usize, const B: usize>(c: &mut Context<'_>, i: &Inst) -> Flow {
    let byte = |x: u32| i32::from(x as i8);
    product::<i32, M, K, B>(c, i, 8, (byte, byte), |a, b, sum| sum.wrapping_add((a * b).cast_unsigned()))
}

pub(super) const MFMA: &[Row] = &[
    row(64, "v_mfma_f32_32x32x1_2b_f32", f32::<32, 1, 2>),
    row(65, "v_mfma_f32_16x16x1_4b_f32", f32::<16, 1, 4>),
    row(66, "v_mfma_f32_4x4x1_16b_f32", f32::<4, 1, 16>),
    row(68, "v_mfma_f32_32x32x2_f32", f32::<32, 2, 1>),
    row(69, "v_mfma_f32_16x16x4_f32", f32::<16, 4, 1>),
    row(72, "v_mfma_f32_32x32x4_2b_f16", f16::<32, 4, 2>),
    row(73, "v_mfma_f32_16x16x4_4b_f16", f16::<16, 4, 4>),
    row(74, "v_mfma_f32_4x4x4_16b_f16", f16::<4, 4, 16>),
    row(76, "v_mfma_f32_32x32x8_f16", f16::<32, 8, 1>),
    row(77, "v_mfma_f32_16x16x16_f16", f16::<16, 16, 1>),
    row(80, "v_mfma_i32_32x32x4_2b_i8", i8::<32, 4, 2>),
    row(81, "v_mfma_i32_16x16x4_4b_i8", i8::<16, 4, 4>),
    row(82, "v_mfma_i32_4x4x4_16b_i8", i8::<4, 4, 16>),
    row(86, "v_mfma_i32_32x32x16_i8", i8::<32, 16, 1>),
    row(87, "v_mfma_i32_16x16x32_i8", i8::<16, 32, 1>),
    // The bfloat16 forms with four elements a lane, which older assemblers name with the suffix _1k.
    row(93, "v_mfma_f32_32x32x4_2b_bf16", bf16::<32, 4, 2>),
    row(94, "v_mfma_f32_16x16x4_4b_bf16", bf16::<16, 4, 4>),
    row(95, "v_mfma_f32_4x4x4_16b_bf16", bf16::<4, 4, 16>),
    row(96, "v_mfma_f32_32x32x8_bf16", bf16::<32, 8, 1>),
    row(97, "v_mfma_f32_16x16x16_bf16", bf16::<16, 16, 1>),
    row(112, "v_mfma_f32_16x16x32_bf8_bf8", |c, i| fp8::<16, 32>(c, i, &BF8, &BF8)),
    row(113, "v_mfma_f32_16x16x32_bf8_fp8", |c, i| fp8::<16, 32>(c, i, &BF8, &FP8)),
    row(114, "v_mfma_f32_16x16x32_fp8_bf8", |c, i| fp8::<16, 32>(c, i, &FP8, &BF8)),
    row(115, "v_mfma_f32_16x16x32_fp8_fp8", |c, i| fp8::<16, 32>(c, i, &FP8, &FP8)),
    row(116, "v_mfma_f32_32x32x16_bf8_bf8", |c, i| fp8::<32, 16>(c, i, &BF8, &BF8)),
    row(117, "v_mfma_f32_32x32x16_bf8_fp8", |c, i| fp8::<32, 16>(c, i, &BF8, &FP8)),
    row(118, "v_mfma_f32_32x32x16_fp8_bf8", |c, i| fp8::<32, 16>(c, i, &FP8, &BF8)),
    row(119, "v_mfma_f32_32x32x16_fp8_fp8", |c, i| fp8::<32, 16>(c, i, &FP8, &FP8)),
];
