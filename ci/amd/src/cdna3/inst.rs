//! A decoded instruction and the rows of the decode tables.

use super::lane::LaneOp;
use crate::device::{Context, Flow};

/// Values of one 32-bit register, one per lane.
pub type Lanes = [u32; 64];

/// Executes one instruction for a whole wave.
pub type Handler = fn(&mut Context<'_>, &Inst) -> Flow;

/// SGPR numbers with a meaning of their own.
pub mod sgpr {
    /// Low half of the vector condition code.
    pub const VCC: u8 = 106;
    /// Memory descriptor register.
    pub const M0: u8 = 124;
    /// Low half of the execution mask.
    pub const EXEC: u8 = 126;
    /// Number of registers that the scalar unit addresses: SGPRs, VCC, trap registers, M0 and EXEC.
    pub const COUNT: usize = 128;
}

/// One line of a decode table: an opcode of its encoding, the mnemonic and what it does.
pub struct Row {
    /// Opcode within the encoding.
    pub op: u16,
    /// Mnemonic, without the suffix for the encoding.
    pub name: &'static str,
    /// What it does.
    pub run: Handler,
}

/// A [`Row`].
pub const fn row(op: u16, name: &'static str, run: Handler) -> Row {
    Row { op, name, run }
}

/// Where an operand comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Src {
    /// Vector register: an index into the wave's register file, accumulation registers included.
    V(u16),
    /// Scalar register, or one of the read-only scalar sources above 127 that are no constants.
    S(u8),
    /// Inline constant by its code, 128 to 208 and 240 to 248; its bits depend on the operand's type.
    Const(u8),
    /// Literal that follows the instruction.
    Lit(u32),
}

/// One decoded instruction. Fields that an encoding lacks are 0.
pub struct Inst {
    /// Mnemonic and handler.
    pub row: &'static Row,
    /// Vector destination: an index into the wave's register file.
    pub dst: u16,
    /// Scalar destination.
    pub sdst: u8,
    /// Operands.
    pub src: [Src; 3],
    /// Bit n: the absolute value of operand n is taken.
    pub abs: u8,
    /// Bit n: operand n is negated (after `abs`); in packed instructions, its low half.
    pub neg: u8,
    /// Packed instructions: bit n negates the high half of operand n.
    pub neg_hi: u8,
    /// Bit n: operand n comes from the high half; bit 3: the destination does.
    pub op_sel: u8,
    /// Packed instructions: bit n takes the high result's operand n from the high half.
    pub op_sel_hi: u8,
    /// Output modifier: 1, 2, 3 for times 2, times 4, half.
    pub omod: u8,
    /// The result is clamped.
    pub clamp: bool,
    /// Offset, immediate, or the index of a branch's target in the program.
    pub imm: i32,
    /// Cross-lane or sub-word selection.
    pub lane: LaneOp,
    /// Bytes from the start of the program's lowest instruction.
    pub offset: u32,
    /// Bytes of the encoding: 4, 8 or 12.
    pub size: u8,
    /// Encoding specific bits; the family's file names them.
    pub flags: u16,
}

impl Inst {
    /// An instruction with no operands.
    pub fn new(row: &'static Row) -> Self {
        Self {
            row,
            dst: 0,
            sdst: 0,
            src: [Src::Const(128); 3],
            abs: 0,
            neg: 0,
            neg_hi: 0,
            op_sel: 0,
            op_sel_hi: 0,
            omod: 0,
            clamp: false,
            imm: 0,
            lane: LaneOp::None,
            offset: 0,
            size: 4,
            flags: 0,
        }
    }
}

/// Bits of inline constant `code` as a 32-bit operand.
#[inline]
pub fn constant32(code: u8) -> u32 {
    match code {
        128..=192 => u32::from(code) - 128,
        193..=208 => (192 - i32::from(code)).cast_unsigned(),
        _ => float_constant(code).to_bits(),
    }
}

/// Bits of inline constant `code` as a 16-bit float operand; integers are the same as for 32 bits.
#[inline]
pub fn constant16(code: u8) -> u32 {
    match code {
        240..=247 => u32::from(half::f16::from_f32(float_constant(code)).to_bits()),
        248 => 0x3118,
        _ => constant32(code),
    }
}

/// Bits of inline constant `code` as a 64-bit operand.
#[inline]
pub fn constant64(code: u8) -> u64 {
    match code {
        240..=247 => f64::from(float_constant(code)).to_bits(),
        248 => 0x3fc4_5f30_6dc9_c882,
        _ => i64::from(constant32(code).cast_signed()).cast_unsigned(),
    }
}

fn float_constant(code: u8) -> f32 {
    match code {
        240 => 0.5,
        241 => -0.5,
        242 => 1.0,
        243 => -1.0,
        244 => 2.0,
        245 => -2.0,
        246 => 4.0,
        247 => -4.0,
        _ => f32::from_bits(0x3e22_f983), // 1 / (2 pi)
    }
}
