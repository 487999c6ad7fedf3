//! Scalar instructions: SOP1, SOP2, SOPC, SOPK, SOPP.

use super::inst::{Inst, Row, row, sgpr};
use crate::device::{Context, FaultKind, Flow};

/// Writes `x` to the scalar destination.
fn set32(c: &mut Context<'_>, i: &Inst, x: u32) -> Flow {
    c.wave.s[i.sdst as usize] = x;
    Flow::Next
}

fn set64(c: &mut Context<'_>, i: &Inst, x: u64) -> Flow {
    c.wave.set_s64(i.sdst, x);
    Flow::Next
}

/// Writes `x` and says in SCC whether it is not 0.
fn logic32(c: &mut Context<'_>, i: &Inst, x: u32) -> Flow {
    c.wave.scc = x != 0;
    set32(c, i, x)
}

fn logic64(c: &mut Context<'_>, i: &Inst, x: u64) -> Flow {
    c.wave.scc = x != 0;
    set64(c, i, x)
}

/// Writes `x` and sets SCC to `carry`.
fn carry32(c: &mut Context<'_>, i: &Inst, (x, carry): (u32, bool)) -> Flow {
    c.wave.scc = carry;
    set32(c, i, x)
}

fn two32(c: &Context<'_>, i: &Inst) -> (u32, u32) {
    (c.s32(i, 0), c.s32(i, 1))
}

fn two64(c: &Context<'_>, i: &Inst) -> (u64, u64) {
    (c.s64(i, 0), c.s64(i, 1))
}

fn compare(c: &mut Context<'_>, i: &Inst, f: impl Fn(u32, u32) -> bool) -> Flow {
    let (a, b) = two32(c, i);
    c.wave.scc = f(a, b);
    Flow::Next
}

fn compare_signed(c: &mut Context<'_>, i: &Inst, f: impl Fn(i32, i32) -> bool) -> Flow {
    compare(c, i, |a, b| f(a.cast_signed(), b.cast_signed()))
}

/// Saves EXEC and replaces it by `f` of the operand and EXEC.
fn save_exec(c: &mut Context<'_>, i: &Inst, f: impl Fn(u64, u64) -> u64) -> Flow {
    let (operand, old) = (c.s64(i, 0), c.wave.exec());
    let new = f(operand, old);
    c.wave.set_s64(sgpr::EXEC, new);
    c.wave.scc = new != 0;
    set64(c, i, old)
}

fn write_exec(c: &mut Context<'_>, i: &Inst, f: impl Fn(u64, u64) -> u64) -> Flow {
    let x = f(c.s64(i, 0), c.wave.exec());
    c.wave.set_s64(sgpr::EXEC, x);
    logic64(c, i, x)
}

fn shift_add(c: &mut Context<'_>, i: &Inst, shift: u32) -> Flow {
    let (a, b) = two32(c, i);
    let sum = (u64::from(a) << shift) + u64::from(b);
    carry32(c, i, (sum as u32, sum >> 32 != 0))
}

/// Bit position of the first bit that differs from the sign, or -1.
pub(super) fn first_non_sign(x: i64, width: u32) -> u32 {
    let top = x << (64 - width);
    let run = if top < 0 { (!top).leading_zeros() } else { top.leading_zeros() };
    if run >= width { u32::MAX } else { run }
}

/// A count of zeros, or -1 when every bit is one.
pub(super) fn found(count: u32, width: u32) -> u32 {
    if count >= width { u32::MAX } else { count }
}

fn bit_field(x: u64, control: u32, width: u32) -> (u64, u32) {
    let (first, count) = (control & (width - 1), control >> 16 & 0x7f);
    let mask = if count >= 64 { u64::MAX } else { (1 << count) - 1 };
    ((x >> first) & mask, count)
}

fn sign_extend(x: u64, bits: u32) -> u64 {
    if bits == 0 || bits >= 64 { x } else { ((x << (64 - bits)).cast_signed() >> (64 - bits)).cast_unsigned() }
}

fn reverse(x: u32, chunk: u32) -> u32 {
    (0..32 / chunk).fold(0, |mask, n| mask | u32::from(x >> (n * chunk) & ((1 << chunk) - 1) != 0) << n)
}

fn program_counter(c: &Context<'_>, i: &Inst) -> u64 {
    c.code_base + u64::from(i.offset) + u64::from(i.size)
}

pub(super) const SOP1: &[Row] = &[
    row(0, "s_mov_b32", |c, i| set32(c, i, c.s32(i, 0))),
    row(1, "s_mov_b64", |c, i| set64(c, i, c.s64(i, 0))),
    row(2, "s_cmov_b32", |c, i| if c.wave.scc { set32(c, i, c.s32(i, 0)) } else { Flow::Next }),
    row(3, "s_cmov_b64", |c, i| if c.wave.scc { set64(c, i, c.s64(i, 0)) } else { Flow::Next }),
    row(4, "s_not_b32", |c, i| logic32(c, i, !c.s32(i, 0))),
    row(5, "s_not_b64", |c, i| logic64(c, i, !c.s64(i, 0))),
    row(8, "s_brev_b32", |c, i| set32(c, i, c.s32(i, 0).reverse_bits())),
    row(9, "s_brev_b64", |c, i| set64(c, i, c.s64(i, 0).reverse_bits())),
    row(10, "s_bcnt0_i32_b32", |c, i| logic32(c, i, c.s32(i, 0).count_zeros())),
    row(11, "s_bcnt0_i32_b64", |c, i| logic32(c, i, c.s64(i, 0).count_zeros())),
    row(12, "s_bcnt1_i32_b32", |c, i| logic32(c, i, c.s32(i, 0).count_ones())),
    row(13, "s_bcnt1_i32_b64", |c, i| logic32(c, i, c.s64(i, 0).count_ones())),
    row(14, "s_ff0_i32_b32", |c, i| set32(c, i, found(c.s32(i, 0).trailing_ones(), 32))),
    row(15, "s_ff0_i32_b64", |c, i| set32(c, i, found(c.s64(i, 0).trailing_ones(), 64))),
    row(16, "s_ff1_i32_b32", |c, i| set32(c, i, found(c.s32(i, 0).trailing_zeros(), 32))),
    row(17, "s_ff1_i32_b64", |c, i| set32(c, i, found(c.s64(i, 0).trailing_zeros(), 64))),
    row(18, "s_flbit_i32_b32", |c, i| set32(c, i, found(c.s32(i, 0).leading_zeros(), 32))),
    row(19, "s_flbit_i32_b64", |c, i| set32(c, i, found(c.s64(i, 0).leading_zeros(), 64))),
    row(20, "s_flbit_i32", |c, i| set32(c, i, first_non_sign(c.s32(i, 0).into(), 32))),
    row(21, "s_flbit_i32_i64", |c, i| set32(c, i, first_non_sign(c.s64(i, 0).cast_signed(), 64))),
    row(22, "s_sext_i32_i8", |c, i| set32(c, i, sign_extend(c.s32(i, 0).into(), 8) as u32)),
    row(23, "s_sext_i32_i16", |c, i| set32(c, i, sign_extend(c.s32(i, 0).into(), 16) as u32)),
    row(24, "s_bitset0_b32", |c, i| set32(c, i, c.wave.s[i.sdst as usize] & !(1 << (c.s32(i, 0) & 31)))),
    row(25, "s_bitset0_b64", |c, i| set64(c, i, c.wave.s64(i.sdst) & !(1 << (c.s32(i, 0) & 63)))),
    row(26, "s_bitset1_b32", |c, i| set32(c, i, c.wave.s[i.sdst as usize] | 1 << (c.s32(i, 0) & 31))),
    row(27, "s_bitset1_b64", |c, i| set64(c, i, c.wave.s64(i.sdst) | 1 << (c.s32(i, 0) & 63))),
    row(28, "s_getpc_b64", |c, i| set64(c, i, program_counter(c, i))),
    row(29, "s_setpc_b64", |c, i| Flow::JumpTo(c.s64(i, 0))),
    row(30, "s_swappc_b64", |c, i| {
        let target = c.s64(i, 0);
        set64(c, i, program_counter(c, i));
        Flow::JumpTo(target)
    }),
    row(32, "s_and_saveexec_b64", |c, i| save_exec(c, i, |a, exec| a & exec)),
    row(33, "s_or_saveexec_b64", |c, i| save_exec(c, i, |a, exec| a | exec)),
    row(34, "s_xor_saveexec_b64", |c, i| save_exec(c, i, |a, exec| a ^ exec)),
    row(35, "s_andn2_saveexec_b64", |c, i| save_exec(c, i, |a, exec| a & !exec)),
    row(36, "s_orn2_saveexec_b64", |c, i| save_exec(c, i, |a, exec| a | !exec)),
    row(37, "s_nand_saveexec_b64", |c, i| save_exec(c, i, |a, exec| !(a & exec))),
    row(38, "s_nor_saveexec_b64", |c, i| save_exec(c, i, |a, exec| !(a | exec))),
    row(39, "s_xnor_saveexec_b64", |c, i| save_exec(c, i, |a, exec| !(a ^ exec))),
    row(40, "s_quadmask_b32", |c, i| logic32(c, i, reverse(c.s32(i, 0), 4))),
    row(41, "s_quadmask_b64", |c, i| {
        let x = c.s64(i, 0);
        logic64(c, i, u64::from(reverse(x as u32, 4) | reverse((x >> 32) as u32, 4) << 8))
    }),
    row(48, "s_abs_i32", |c, i| logic32(c, i, c.s32(i, 0).cast_signed().wrapping_abs().cast_unsigned())),
    row(51, "s_andn1_saveexec_b64", |c, i| save_exec(c, i, |a, exec| !a & exec)),
    row(52, "s_orn1_saveexec_b64", |c, i| save_exec(c, i, |a, exec| !a | exec)),
    row(53, "s_andn1_wrexec_b64", |c, i| write_exec(c, i, |a, exec| !a & exec)),
    row(54, "s_andn2_wrexec_b64", |c, i| write_exec(c, i, |a, exec| a & !exec)),
    row(55, "s_bitreplicate_b64_b32", |c, i| {
        let x = c.s32(i, 0);
        set64(c, i, (0..32).fold(0, |y, n| y | (u64::from(x >> n & 1) * 3) << (2 * n)))
    }),
];

/// Both operands of a 32-bit operation.
macro_rules! logic32 {
    ($f:expr) => {
        |c, i| {
            let (a, b) = two32(c, i);
            logic32(c, i, $f(a, b))
        }
    };
}

macro_rules! logic64 {
    ($f:expr) => {
        |c, i| {
            let (a, b) = two64(c, i);
            logic64(c, i, $f(a, b))
        }
    };
}

macro_rules! plain32 {
    ($f:expr) => {
        |c, i| {
            let (a, b) = two32(c, i);
            set32(c, i, $f(a, b))
        }
    };
}

macro_rules! carry32 {
    ($f:expr) => {
        |c, i| {
            let (a, b) = two32(c, i);
            let scc = c.wave.scc;
            carry32(c, i, $f(a, b, scc))
        }
    };
}

/// Sum with carry out.
fn add_carry(a: u32, b: u32, carry: bool) -> (u32, bool) {
    let sum = u64::from(a) + u64::from(b) + u64::from(carry);
    (sum as u32, sum >> 32 != 0)
}

/// Difference with borrow out.
fn sub_borrow(a: u32, b: u32, borrow: bool) -> (u32, bool) {
    let difference = i64::from(a) - i64::from(b) - i64::from(borrow);
    (difference as u32, difference < 0)
}

fn signed(f: impl Fn(i32, i32) -> (i32, bool)) -> impl Fn(u32, u32, bool) -> (u32, bool) {
    move |a, b, _| {
        let (x, overflow) = f(a.cast_signed(), b.cast_signed());
        (x.cast_unsigned(), overflow)
    }
}

/// `first` when `pick`, and so said in SCC.
fn choose(pick: bool, a: u32, b: u32) -> (u32, bool) {
    (if pick { a } else { b }, pick)
}

pub(super) const SOP2: &[Row] = &[
    row(0, "s_add_u32", carry32!(|a, b, _| add_carry(a, b, false))),
    row(1, "s_sub_u32", carry32!(|a, b, _| sub_borrow(a, b, false))),
    row(2, "s_add_i32", carry32!(signed(i32::overflowing_add))),
    row(3, "s_sub_i32", carry32!(signed(i32::overflowing_sub))),
    row(4, "s_addc_u32", carry32!(add_carry)),
    row(5, "s_subb_u32", carry32!(sub_borrow)),
    row(6, "s_min_i32", carry32!(|a: u32, b: u32, _| choose(a.cast_signed() < b.cast_signed(), a, b))),
    row(7, "s_min_u32", carry32!(|a, b, _| choose(a < b, a, b))),
    row(8, "s_max_i32", carry32!(|a: u32, b: u32, _| choose(a.cast_signed() > b.cast_signed(), a, b))),
    row(9, "s_max_u32", carry32!(|a, b, _| choose(a > b, a, b))),
    row(10, "s_cselect_b32", |c, i| set32(c, i, c.s32(i, usize::from(!c.wave.scc)))),
    row(11, "s_cselect_b64", |c, i| set64(c, i, c.s64(i, usize::from(!c.wave.scc)))),
    row(12, "s_and_b32", logic32!(|a, b| a & b)),
    row(13, "s_and_b64", logic64!(|a, b| a & b)),
    row(14, "s_or_b32", logic32!(|a, b| a | b)),
    row(15, "s_or_b64", logic64!(|a, b| a | b)),
    row(16, "s_xor_b32", logic32!(|a, b| a ^ b)),
    row(17, "s_xor_b64", logic64!(|a, b| a ^ b)),
    row(18, "s_andn2_b32", logic32!(|a: u32, b: u32| a & !b)),
    row(19, "s_andn2_b64", logic64!(|a: u64, b: u64| a & !b)),
    row(20, "s_orn2_b32", logic32!(|a: u32, b: u32| a | !b)),
    row(21, "s_orn2_b64", logic64!(|a: u64, b: u64| a | !b)),
    row(22, "s_nand_b32", logic32!(|a: u32, b: u32| !(a & b))),
    row(23, "s_nand_b64", logic64!(|a: u64, b: u64| !(a & b))),
    row(24, "s_nor_b32", logic32!(|a: u32, b: u32| !(a | b))),
    row(25, "s_nor_b64", logic64!(|a: u64, b: u64| !(a | b))),
    row(26, "s_xnor_b32", logic32!(|a: u32, b: u32| !(a ^ b))),
    row(27, "s_xnor_b64", logic64!(|a: u64, b: u64| !(a ^ b))),
    row(28, "s_lshl_b32", logic32!(|a: u32, b: u32| a << (b & 31))),
    row(29, "s_lshl_b64", logic64!(|a: u64, b: u64| a << (b & 63))),
    row(30, "s_lshr_b32", logic32!(|a: u32, b: u32| a >> (b & 31))),
    row(31, "s_lshr_b64", logic64!(|a: u64, b: u64| a >> (b & 63))),
    row(32, "s_ashr_i32", logic32!(|a: u32, b: u32| (a.cast_signed() >> (b & 31)).cast_unsigned())),
    row(33, "s_ashr_i64", logic64!(|a: u64, b: u64| (a.cast_signed() >> (b & 63)).cast_unsigned())),
    row(34, "s_bfm_b32", plain32!(|a: u32, b: u32| ((1u32 << (a & 31)) - 1) << (b & 31))),
    row(35, "s_bfm_b64", |c, i| {
        let (a, b) = two32(c, i);
        set64(c, i, ((1u64 << (a & 63)) - 1) << (b & 63))
    }),
    row(36, "s_mul_i32", plain32!(u32::wrapping_mul)),
    row(37, "s_bfe_u32", logic32!(|a: u32, b: u32| bit_field(a.into(), b, 32).0 as u32)),
    row(
        38,
        "s_bfe_i32",
        logic32!(|a: u32, b: u32| {
            let (x, bits) = bit_field(i64::from(a.cast_signed()).cast_unsigned(), b, 32);
            sign_extend(x, bits) as u32
        }),
    ),
    row(39, "s_bfe_u64", logic64!(|a: u64, b: u64| bit_field(a, b as u32, 64).0)),
    row(
        40,
        "s_bfe_i64",
        logic64!(|a: u64, b: u64| {
            let (x, bits) = bit_field(a, b as u32, 64);
            sign_extend(x, bits)
        }),
    ),
    row(
        42,
        "s_absdiff_i32",
        logic32!(|a: u32, b: u32| { a.cast_signed().wrapping_sub(b.cast_signed()).wrapping_abs().cast_unsigned() }),
    ),
    row(44, "s_mul_hi_u32", plain32!(|a: u32, b: u32| ((u64::from(a) * u64::from(b)) >> 32) as u32)),
    row(
        45,
        "s_mul_hi_i32",
        plain32!(|a: u32, b: u32| { ((i64::from(a.cast_signed()) * i64::from(b.cast_signed())) >> 32) as u32 }),
    ),
    row(46, "s_lshl1_add_u32", |c, i| shift_add(c, i, 1)),
    row(47, "s_lshl2_add_u32", |c, i| shift_add(c, i, 2)),
    row(48, "s_lshl3_add_u32", |c, i| shift_add(c, i, 3)),
    row(49, "s_lshl4_add_u32", |c, i| shift_add(c, i, 4)),
    row(50, "s_pack_ll_b32_b16", plain32!(|a: u32, b: u32| a & 0xffff | b << 16)),
    row(51, "s_pack_lh_b32_b16", plain32!(|a: u32, b: u32| a & 0xffff | b & 0xffff_0000)),
    row(52, "s_pack_hh_b32_b16", plain32!(|a: u32, b: u32| a >> 16 | b & 0xffff_0000)),
];

pub(super) const SOPC: &[Row] = &[
    row(0, "s_cmp_eq_i32", |c, i| compare(c, i, |a, b| a == b)),
    row(1, "s_cmp_lg_i32", |c, i| compare(c, i, |a, b| a != b)),
    row(2, "s_cmp_gt_i32", |c, i| compare_signed(c, i, |a, b| a > b)),
    row(3, "s_cmp_ge_i32", |c, i| compare_signed(c, i, |a, b| a >= b)),
    row(4, "s_cmp_lt_i32", |c, i| compare_signed(c, i, |a, b| a < b)),
    row(5, "s_cmp_le_i32", |c, i| compare_signed(c, i, |a, b| a <= b)),
    row(6, "s_cmp_eq_u32", |c, i| compare(c, i, |a, b| a == b)),
    row(7, "s_cmp_lg_u32", |c, i| compare(c, i, |a, b| a != b)),
    row(8, "s_cmp_gt_u32", |c, i| compare(c, i, |a, b| a > b)),
    row(9, "s_cmp_ge_u32", |c, i| compare(c, i, |a, b| a >= b)),
    row(10, "s_cmp_lt_u32", |c, i| compare(c, i, |a, b| a < b)),
    row(11, "s_cmp_le_u32", |c, i| compare(c, i, |a, b| a <= b)),
    row(12, "s_bitcmp0_b32", |c, i| compare(c, i, |a, b| a >> (b & 31) & 1 == 0)),
    row(13, "s_bitcmp1_b32", |c, i| compare(c, i, |a, b| a >> (b & 31) & 1 == 1)),
    row(14, "s_bitcmp0_b64", |c, i| {
        c.wave.scc = c.s64(i, 0) >> (c.s32(i, 1) & 63) & 1 == 0;
        Flow::Next
    }),
    row(15, "s_bitcmp1_b64", |c, i| {
        c.wave.scc = c.s64(i, 0) >> (c.s32(i, 1) & 63) & 1 == 1;
        Flow::Next
    }),
    row(18, "s_cmp_eq_u64", |c, i| {
        c.wave.scc = c.s64(i, 0) == c.s64(i, 1);
        Flow::Next
    }),
    row(19, "s_cmp_lg_u64", |c, i| {
        c.wave.scc = c.s64(i, 0) != c.s64(i, 1);
        Flow::Next
    }),
];

/// Compares the destination register with the sign extended immediate.
fn compare_k(c: &mut Context<'_>, i: &Inst, f: impl Fn(i32, i32) -> bool) -> Flow {
    c.wave.scc = f(c.wave.s[i.sdst as usize].cast_signed(), i.imm);
    Flow::Next
}

/// Compares the destination register with the zero extended immediate.
fn compare_k_unsigned(c: &mut Context<'_>, i: &Inst, f: impl Fn(u32, u32) -> bool) -> Flow {
    c.wave.scc = f(c.wave.s[i.sdst as usize], i.imm.cast_unsigned() & 0xffff);
    Flow::Next
}

/// Register number, first bit and width of a hardware register field.
fn hardware_field(i: &Inst) -> (u32, u32, u32) {
    let imm = i.imm.cast_unsigned();
    (imm & 63, imm >> 6 & 31, (imm >> 11 & 31) + 1)
}

const HW_MODE: u32 = 1;
const HW_HW_ID: u32 = 4;
const HW_XCC_ID: u32 = 20;

fn get_register(c: &mut Context<'_>, i: &Inst) -> Flow {
    let (register, first, width) = hardware_field(i);
    let value = match register {
        HW_MODE => c.wave.mode,
        HW_HW_ID | HW_XCC_ID => 0,
        _ => return c.fail(FaultKind::Unsupported("s_getreg_b32 of a register other than MODE, HW_ID, XCC_ID")),
    };
    set32(c, i, (u64::from(value) >> first & ((1 << width) - 1)) as u32)
}

fn set_register(c: &mut Context<'_>, i: &Inst, value: u32) -> Flow {
    let (register, first, width) = hardware_field(i);
    if register != HW_MODE {
        return c.fail(FaultKind::Unsupported("s_setreg of a register other than MODE"));
    }
    let mask = (((1u64 << width) - 1) << first) as u32;
    let mode = c.wave.mode & !mask | value << first & mask;
    if mode & 0xf != 0 {
        return c.fail(FaultKind::Unsupported("a rounding mode other than nearest even"));
    }
    c.wave.mode = mode;
    Flow::Next
}

pub(super) const SOPK: &[Row] = &[
    row(0, "s_movk_i32", |c, i| set32(c, i, i.imm.cast_unsigned())),
    row(1, "s_cmovk_i32", |c, i| if c.wave.scc { set32(c, i, i.imm.cast_unsigned()) } else { Flow::Next }),
    row(2, "s_cmpk_eq_i32", |c, i| compare_k(c, i, |a, b| a == b)),
    row(3, "s_cmpk_lg_i32", |c, i| compare_k(c, i, |a, b| a != b)),
    row(4, "s_cmpk_gt_i32", |c, i| compare_k(c, i, |a, b| a > b)),
    row(5, "s_cmpk_ge_i32", |c, i| compare_k(c, i, |a, b| a >= b)),
    row(6, "s_cmpk_lt_i32", |c, i| compare_k(c, i, |a, b| a < b)),
    row(7, "s_cmpk_le_i32", |c, i| compare_k(c, i, |a, b| a <= b)),
    row(8, "s_cmpk_eq_u32", |c, i| compare_k_unsigned(c, i, |a, b| a == b)),
    row(9, "s_cmpk_lg_u32", |c, i| compare_k_unsigned(c, i, |a, b| a != b)),
    row(10, "s_cmpk_gt_u32", |c, i| compare_k_unsigned(c, i, |a, b| a > b)),
    row(11, "s_cmpk_ge_u32", |c, i| compare_k_unsigned(c, i, |a, b| a >= b)),
    row(12, "s_cmpk_lt_u32", |c, i| compare_k_unsigned(c, i, |a, b| a < b)),
    row(13, "s_cmpk_le_u32", |c, i| compare_k_unsigned(c, i, |a, b| a <= b)),
    row(14, "s_addk_i32", |c, i| {
        let (x, overflow) = c.wave.s[i.sdst as usize].cast_signed().overflowing_add(i.imm);
        carry32(c, i, (x.cast_unsigned(), overflow))
    }),
    row(15, "s_mulk_i32", |c, i| {
        let x = c.wave.s[i.sdst as usize].cast_signed().wrapping_mul(i.imm);
        set32(c, i, x.cast_unsigned())
    }),
    row(17, "s_getreg_b32", get_register),
    row(18, "s_setreg_b32", |c, i| set_register(c, i, c.wave.s[i.sdst as usize])),
    row(20, "s_setreg_imm32_b32", |c, i| set_register(c, i, c.s32(i, 0))),
    row(21, "s_call_b64", |c, i| {
        set64(c, i, program_counter(c, i));
        Flow::Jump(i.imm.cast_unsigned())
    }),
];

fn branch(i: &Inst, taken: bool) -> Flow {
    if taken { Flow::Jump(i.imm.cast_unsigned()) } else { Flow::Next }
}

/// Says whether a SOPP opcode is a branch with a target in its immediate.
pub(super) fn is_branch(op: u16) -> bool {
    matches!(op, 2 | 4..=9)
}

pub(super) const SOPP_ENDPGM: u16 = 1;
pub(super) const SOPP_BRANCH: u16 = 2;

pub(super) const SOPP: &[Row] = &[
    row(0, "s_nop", |_, _| Flow::Next),
    row(SOPP_ENDPGM, "s_endpgm", |_, _| Flow::End),
    row(SOPP_BRANCH, "s_branch", |_, i| branch(i, true)),
    row(3, "s_wakeup", |_, _| Flow::Next),
    row(4, "s_cbranch_scc0", |c, i| branch(i, !c.wave.scc)),
    row(5, "s_cbranch_scc1", |c, i| branch(i, c.wave.scc)),
    row(6, "s_cbranch_vccz", |c, i| branch(i, c.wave.vcc() == 0)),
    row(7, "s_cbranch_vccnz", |c, i| branch(i, c.wave.vcc() != 0)),
    row(8, "s_cbranch_execz", |c, i| branch(i, c.wave.exec() == 0)),
    row(9, "s_cbranch_execnz", |c, i| branch(i, c.wave.exec() != 0)),
    row(10, "s_barrier", |_, _| Flow::Barrier),
    // Memory operations are complete when the next instruction starts.
    row(12, "s_waitcnt", |_, _| Flow::Next),
    row(13, "s_sethalt", |c, _| c.fail(FaultKind::Unsupported("s_sethalt"))),
    row(14, "s_sleep", |_, _| Flow::Next),
    row(15, "s_setprio", |_, _| Flow::Next),
    row(18, "s_trap", |c, i| c.fail(FaultKind::Trap(i.imm.cast_unsigned() & 0xff))),
    row(19, "s_icache_inv", |_, _| Flow::Next),
    row(22, "s_ttracedata", |_, _| Flow::Next),
];
