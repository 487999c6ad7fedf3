//! VOPC: vector comparisons, whose result is one bit per lane.

use super::float::{class_f16, class_f32, class_f64};
use super::inst::{Inst, Row, row, sgpr};
use crate::device::{Context, Flow};

/// Writes the result, to EXEC too when the opcode says so (`v_cmpx`).
fn finish(c: &mut Context<'_>, i: &Inst, f: impl Fn(usize) -> bool) -> Flow {
    c.put_bits(i, f);
    let (op, class_op) = (i.row.op, i.row.op < 32);
    if (class_op && op & 1 == 1) || (!class_op && op & 16 != 0) {
        let bits = c.wave.s64(i.sdst);
        c.wave.set_s64(sgpr::EXEC, bits);
    }
    Flow::Next
}

/// The low opcode bits say which orders give true: 1 less, 2 equal, 4 greater, and for floats 8 unordered.
fn ordered<T: PartialOrd>(a: T, b: T, op: u16) -> bool {
    (a < b) & (op & 1 != 0) | (a == b) & (op & 2 != 0) | (a > b) & (op & 4 != 0)
}

fn float<T: PartialOrd>(a: T, b: T, op: u16) -> bool {
    let known = (a <= b) | (a > b);
    ordered(a, b, op) | !known & (op & 8 != 0)
}

fn cmp_f16(c: &mut Context<'_>, i: &Inst) -> Flow {
    let (a, b) = (c.f16s(i, 0), c.f16s(i, 1));
    finish(c, i, |lane| float(a[lane], b[lane], i.row.op))
}

fn cmp_f32(c: &mut Context<'_>, i: &Inst) -> Flow {
    let (a, b) = (c.f32s(i, 0), c.f32s(i, 1));
    finish(c, i, |lane| float(a[lane], b[lane], i.row.op))
}

fn cmp_f64(c: &mut Context<'_>, i: &Inst) -> Flow {
    let (a, b) = (c.f64s(i, 0), c.f64s(i, 1));
    finish(c, i, |lane| float(a[lane], b[lane], i.row.op))
}

fn cmp_u16(c: &mut Context<'_>, i: &Inst) -> Flow {
    let (a, b) = (c.u16s(i, 0), c.u16s(i, 1));
    finish(c, i, |lane| ordered(a[lane], b[lane], i.row.op))
}

fn cmp_i16(c: &mut Context<'_>, i: &Inst) -> Flow {
    let (a, b) = (c.u16s(i, 0), c.u16s(i, 1));
    finish(c, i, |lane| ordered(a[lane] as i16, b[lane] as i16, i.row.op))
}

fn cmp_u32(c: &mut Context<'_>, i: &Inst) -> Flow {
    let (a, b) = (c.u32s(i, 0), c.u32s(i, 1));
    finish(c, i, |lane| ordered(a[lane], b[lane], i.row.op))
}

fn cmp_i32(c: &mut Context<'_>, i: &Inst) -> Flow {
    let (a, b) = (c.u32s(i, 0), c.u32s(i, 1));
    finish(c, i, |lane| ordered(a[lane].cast_signed(), b[lane].cast_signed(), i.row.op))
}

fn cmp_u64(c: &mut Context<'_>, i: &Inst) -> Flow {
    let (a, b) = (c.u64s(i, 0), c.u64s(i, 1));
    finish(c, i, |lane| ordered(a[lane], b[lane], i.row.op))
}

fn cmp_i64(c: &mut Context<'_>, i: &Inst) -> Flow {
    let (a, b) = (c.u64s(i, 0), c.u64s(i, 1));
    finish(c, i, |lane| ordered(a[lane].cast_signed(), b[lane].cast_signed(), i.row.op))
}

fn class_of_f16(c: &mut Context<'_>, i: &Inst) -> Flow {
    let (a, wanted) = (c.f16s(i, 0), c.u32s(i, 1));
    finish(c, i, |lane| wanted[lane] >> class_f16(half::f16::from_f32(a[lane]).to_bits()) & 1 == 1)
}

fn class_of_f32(c: &mut Context<'_>, i: &Inst) -> Flow {
    let (a, wanted) = (c.f32s(i, 0), c.u32s(i, 1));
    finish(c, i, |lane| wanted[lane] >> class_f32(a[lane].to_bits()) & 1 == 1)
}

fn class_of_f64(c: &mut Context<'_>, i: &Inst) -> Flow {
    let (a, wanted) = (c.f64s(i, 0), c.u32s(i, 1));
    finish(c, i, |lane| wanted[lane] >> class_f64(a[lane].to_bits()) & 1 == 1)
}

/// Rows of one operand type: opcodes count up from `$base` in the order of the conditions.
macro_rules! conditions {
    ($base:literal, $type:literal, $run:ident: $($at:literal $name:literal),*) => {
        &[
            $(row($base + $at, concat!("v_cmp_", $name, "_", $type), $run),)*
            $(row($base + 16 + $at, concat!("v_cmpx_", $name, "_", $type), $run),)*
        ]
    };
}

macro_rules! float_conditions {
    ($base:literal, $type:literal, $run:ident) => {
        conditions!($base, $type, $run: 0 "f", 1 "lt", 2 "eq", 3 "le", 4 "gt", 5 "lg", 6 "ge", 7 "o", 8 "u", 9 "nge",
            10 "nlg", 11 "ngt", 12 "nle", 13 "neq", 14 "nlt", 15 "tru")
    };
}

macro_rules! integer_conditions {
    ($base:literal, $type:literal, $run:ident) => {
        conditions!($base, $type, $run: 0 "f", 1 "lt", 2 "eq", 3 "le", 4 "gt", 5 "ne", 6 "ge", 7 "t")
    };
}

pub(super) const VOPC: &[&[Row]] = &[
    &[
        row(16, "v_cmp_class_f32", class_of_f32),
        row(17, "v_cmpx_class_f32", class_of_f32),
        row(18, "v_cmp_class_f64", class_of_f64),
        row(19, "v_cmpx_class_f64", class_of_f64),
        row(20, "v_cmp_class_f16", class_of_f16),
        row(21, "v_cmpx_class_f16", class_of_f16),
    ],
    float_conditions!(32, "f16", cmp_f16),
    float_conditions!(64, "f32", cmp_f32),
    float_conditions!(96, "f64", cmp_f64),
    integer_conditions!(160, "i16", cmp_i16),
    integer_conditions!(168, "u16", cmp_u16),
    integer_conditions!(192, "i32", cmp_i32),
    integer_conditions!(200, "u32", cmp_u32),
    integer_conditions!(224, "i64", cmp_i64),
    integer_conditions!(232, "u64", cmp_u64),
];
