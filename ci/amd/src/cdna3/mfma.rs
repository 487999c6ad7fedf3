//! MFMA: matrix products of a wave.
//!
//! Layouts, for `M`x`N`x`K` products of `B` blocks (M = N). A lane holds `E = M K B / 64` consecutive `k` of one row of A:
//! row `lane % M`, and `lane / M` counts groups of `E` first along `k`, then along blocks; B likewise with columns. Of D a lane
//! holds column `lane % M`; with M = 32 register `r` is row `8 (r / 4) + 4 (lane / 32) + r % 4` of block `r / 16`, with M = 16 it
//! is row `4 (lane / 16) + r % 4` of block `r / 4`, with M = 4 row `r` of block `lane / 4`. The execution mask does not matter.

use super::float::{bf8_to_f32, bf16_to_f32, f16_to_f32, fp8_to_f32};
use super::inst::{Inst, Row, Src, row};
use crate::device::{Context, FaultKind, Flow};

/// Shape of a matrix instruction.
#[derive(Clone, Copy)]
struct Shape {
    m: usize,
    k: usize,
    blocks: usize,
}

impl Shape {
    /// Elements of A, or of B, that a lane holds.
    const fn per_lane(self) -> usize {
        self.m * self.k * self.blocks / 64
    }

    /// Registers of D.
    const fn registers(self) -> usize {
        self.m * self.m * self.blocks / 64
    }

    /// Block and `k` of a lane's first element.
    const fn block_and_k(self, lane: usize) -> (usize, usize) {
        let (group, groups) = (lane / self.m, 64 / self.m / self.blocks);
        (group / groups, group % groups * self.per_lane())
    }

    /// Block, row and column of D in a lane's register.
    const fn place(self, register: usize, lane: usize) -> (usize, usize, usize) {
        let column = lane % self.m;
        match self.m {
            32 => (register / 16, register % 16 / 4 * 8 + lane / 32 * 4 + register % 4, column),
            16 => (register / 4, lane / 16 * 4 + register % 4, column),
            _ => (lane / 4, register, column),
        }
    }
}

/// Element type of A or B.
type Decode = fn(u32) -> f32;

/// Elements of a block as `[k][row]`, at most 32 by 32.
struct Matrix<T>(Vec<T>);

/// Bits of a lane's elements of operand `n`.
fn element_bits(c: &Context<'_>, i: &Inst, n: usize, lane: usize, element: usize, bits: u32) -> u32 {
    let per_register = (32 / bits) as usize;
    let Src::V(r) = i.src[n] else { return 0 };
    let dword = c.wave.v[r as usize + element / per_register][lane];
    let shift = bits * (element % per_register) as u32;
    if bits == 32 { dword } else { dword >> shift & ((1 << bits) - 1) }
}

/// All of operand `n`: element `[block][k][row]`.
fn gather<T: Copy + Default>(c: &Context<'_>, i: &Inst, n: usize, shape: Shape, bits: u32, f: impl Fn(u32) -> T) -> Matrix<T> {
    let mut out = vec![T::default(); shape.blocks * shape.k * shape.m];
    for element in 0..shape.per_lane() {
        for lane in 0..64 {
            let (block, k) = shape.block_and_k(lane);
            let at = (block * shape.k + k + element) * shape.m + lane % shape.m;
            out[at] = f(element_bits(c, i, n, lane, element, bits));
        }
    }
    Matrix(out)
}

/// D = A B + C, with `multiply_add(a, b, c)` in the order of `k`.
fn product<T: Copy>(
    c: &mut Context<'_>,
    i: &Inst,
    shape: Shape,
    (a, b): (Matrix<T>, Matrix<T>),
    multiply_add: impl Fn(T, T, u32) -> u32,
) -> Flow {
    if i.flags != 0 {
        return c.fail(FaultKind::Unsupported("a matrix instruction with cbsz, abid or blgp"));
    }
    let (m, k) = (shape.m, shape.k);
    // [block][row][column]
    let mut sums = vec![0u32; shape.blocks * m * m];
    for register in 0..shape.registers() {
        let addend = match i.src[2] {
            Src::V(r) => c.wave.v[r as usize + register],
            _ => [c.s32(i, 2); 64],
        };
        for (lane, x) in addend.iter().enumerate() {
            let (block, row, column) = shape.place(register, lane);
            sums[(block * m + row) * m + column] = *x;
        }
    }
    for (at, sums) in sums.chunks_exact_mut(m).enumerate() {
        let (block, row) = (at / m, at % m);
        for k in block * k..(block + 1) * k {
            let (factor, columns) = (a.0[k * m + row], &b.0[k * m..(k + 1) * m]);
            for (sum, column) in sums.iter_mut().zip(columns) {
                *sum = multiply_add(factor, *column, *sum);
            }
        }
    }
    for register in 0..shape.registers() {
        let out = &mut c.wave.v[i.dst as usize + register];
        for (lane, x) in out.iter_mut().enumerate() {
            let (block, row, column) = shape.place(register, lane);
            *x = sums[(block * m + row) * m + column];
        }
    }
    Flow::Next
}

/// A product of elements of at most 16 bits, whose products are exact in float32.
#[inline(always)]
fn narrow(c: &mut Context<'_>, i: &Inst, m: usize, k: usize, blocks: usize, bits: u32, a: Decode, b: Decode) -> Flow {
    let shape = Shape { m, k, blocks };
    let operands = (gather(c, i, 0, shape, bits, a), gather(c, i, 1, shape, bits, b));
    product(c, i, shape, operands, |a, b, sum| (a * b + f32::from_bits(sum)).to_bits())
}

fn f16(c: &mut Context<'_>, i: &Inst, m: usize, k: usize, blocks: usize) -> Flow {
    narrow(c, i, m, k, blocks, 16, |x| f16_to_f32(x as u16), |x| f16_to_f32(x as u16))
}

fn bf16(c: &mut Context<'_>, i: &Inst, m: usize, k: usize, blocks: usize) -> Flow {
    narrow(c, i, m, k, blocks, 16, |x| bf16_to_f32(x as u16), |x| bf16_to_f32(x as u16))
}

fn fp8(c: &mut Context<'_>, i: &Inst, m: usize, k: usize, a: fn(u8) -> f32, b: fn(u8) -> f32) -> Flow {
    let shape = Shape { m, k, blocks: 1 };
    let operands = (gather(c, i, 0, shape, 8, |x| a(x as u8)), gather(c, i, 1, shape, 8, |x| b(x as u8)));
    product(c, i, shape, operands, |a, b, sum| (a * b + f32::from_bits(sum)).to_bits())
}

fn f32(c: &mut Context<'_>, i: &Inst, m: usize, k: usize, blocks: usize) -> Flow {
    let shape = Shape { m, k, blocks };
    let operands = (gather(c, i, 0, shape, 32, f32::from_bits), gather(c, i, 1, shape, 32, f32::from_bits));
    product(c, i, shape, operands, |a, b, sum| a.mul_add(b, f32::from_bits(sum)).to_bits())
}

fn i8(c: &mut Context<'_>, i: &Inst, m: usize, k: usize, blocks: usize) -> Flow {
    let shape = Shape { m, k, blocks };
    let byte = |x: u32| i32::from(x as i8);
    let operands = (gather(c, i, 0, shape, 8, byte), gather(c, i, 1, shape, 8, byte));
    product(c, i, shape, operands, |a, b, sum| sum.wrapping_add((a * b).cast_unsigned()))
}

pub(super) const MFMA: &[Row] = &[
    row(64, "v_mfma_f32_32x32x1_2b_f32", |c, i| f32(c, i, 32, 1, 2)),
    row(65, "v_mfma_f32_16x16x1_4b_f32", |c, i| f32(c, i, 16, 1, 4)),
    row(66, "v_mfma_f32_4x4x1_16b_f32", |c, i| f32(c, i, 4, 1, 16)),
    row(68, "v_mfma_f32_32x32x2_f32", |c, i| f32(c, i, 32, 2, 1)),
    row(69, "v_mfma_f32_16x16x4_f32", |c, i| f32(c, i, 16, 4, 1)),
    row(72, "v_mfma_f32_32x32x4_2b_f16", |c, i| f16(c, i, 32, 4, 2)),
    row(73, "v_mfma_f32_16x16x4_4b_f16", |c, i| f16(c, i, 16, 4, 4)),
    row(74, "v_mfma_f32_4x4x4_16b_f16", |c, i| f16(c, i, 4, 4, 16)),
    row(76, "v_mfma_f32_32x32x8_f16", |c, i| f16(c, i, 32, 8, 1)),
    row(77, "v_mfma_f32_16x16x16_f16", |c, i| f16(c, i, 16, 16, 1)),
    row(80, "v_mfma_i32_32x32x4_2b_i8", |c, i| i8(c, i, 32, 4, 2)),
    row(81, "v_mfma_i32_16x16x4_4b_i8", |c, i| i8(c, i, 16, 4, 4)),
    row(82, "v_mfma_i32_4x4x4_16b_i8", |c, i| i8(c, i, 4, 4, 16)),
    row(86, "v_mfma_i32_32x32x16_i8", |c, i| i8(c, i, 32, 16, 1)),
    row(87, "v_mfma_i32_16x16x32_i8", |c, i| i8(c, i, 16, 32, 1)),
    // The bfloat16 forms with four elements a lane, which older assemblers name with the suffix _1k.
    row(93, "v_mfma_f32_32x32x4_2b_bf16", |c, i| bf16(c, i, 32, 4, 2)),
    row(94, "v_mfma_f32_16x16x4_4b_bf16", |c, i| bf16(c, i, 16, 4, 4)),
    row(95, "v_mfma_f32_4x4x4_16b_bf16", |c, i| bf16(c, i, 4, 4, 16)),
    row(96, "v_mfma_f32_32x32x8_bf16", |c, i| bf16(c, i, 32, 8, 1)),
    row(97, "v_mfma_f32_16x16x16_bf16", |c, i| bf16(c, i, 16, 16, 1)),
    row(112, "v_mfma_f32_16x16x32_bf8_bf8", |c, i| fp8(c, i, 16, 32, bf8_to_f32, bf8_to_f32)),
    row(113, "v_mfma_f32_16x16x32_bf8_fp8", |c, i| fp8(c, i, 16, 32, bf8_to_f32, fp8_to_f32)),
    row(114, "v_mfma_f32_16x16x32_fp8_bf8", |c, i| fp8(c, i, 16, 32, fp8_to_f32, bf8_to_f32)),
    row(115, "v_mfma_f32_16x16x32_fp8_fp8", |c, i| fp8(c, i, 16, 32, fp8_to_f32, fp8_to_f32)),
    row(116, "v_mfma_f32_32x32x16_bf8_bf8", |c, i| fp8(c, i, 32, 16, bf8_to_f32, bf8_to_f32)),
    row(117, "v_mfma_f32_32x32x16_bf8_fp8", |c, i| fp8(c, i, 32, 16, bf8_to_f32, fp8_to_f32)),
    row(118, "v_mfma_f32_32x32x16_fp8_bf8", |c, i| fp8(c, i, 32, 16, fp8_to_f32, bf8_to_f32)),
    row(119, "v_mfma_f32_32x32x16_fp8_fp8", |c, i| fp8(c, i, 32, 16, fp8_to_f32, fp8_to_f32)),
];
