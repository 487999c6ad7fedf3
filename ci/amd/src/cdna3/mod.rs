//! CDNA3 (gfx942): decode tables and what each instruction does, one file per family.
//!
//! Everything that is specific to the instruction set lies in this folder; `device` knows registers, memory and waves.

pub mod decode;
mod ds;
mod flat;
pub mod float;
pub mod inst;
pub mod lane;
mod memory_op;
mod mfma;
mod mubuf;
mod operand;
mod smem;
mod sop;
mod vop1;
mod vop2;
mod vop3;
mod vop3_div;
mod vop3p;
mod vopc;
