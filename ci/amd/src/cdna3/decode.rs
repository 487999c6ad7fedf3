//! From machine words to [`Inst`]: encodings, their fields, and the tables of all families.

use std::sync::LazyLock;

use super::inst::{Inst, Row, Src, sgpr};
use super::lane::{Dpp, LaneOp, Sdwa};
use super::memory_op::{IDXEN, OFFEN, REFUSED, RETURN, SCRATCH_VADDR};
use super::{ds, flat, mfma, mubuf, smem, sop, vop1, vop2, vop3, vop3p, vopc};

/// Encodings, as families of opcodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names of the ISA document")]
pub enum Encoding {
    Sop1,
    Sop2,
    Sopc,
    Sopk,
    Sopp,
    Smem,
    Vop1,
    Vop2,
    Vopc,
    Vop3,
    Vop3p,
    Ds,
    Flat,
    Global,
    Scratch,
    Mubuf,
    Unknown,
}

/// All tables, by encoding.
const TABLES: &[(Encoding, &[&[Row]])] = &[
    (Encoding::Sop1, &[sop::SOP1]),
    (Encoding::Sop2, &[sop::SOP2]),
    (Encoding::Sopc, &[sop::SOPC]),
    (Encoding::Sopk, &[sop::SOPK]),
    (Encoding::Sopp, &[sop::SOPP]),
    (Encoding::Smem, &[smem::SMEM]),
    (Encoding::Vop1, &[vop1::VOP1]),
    (Encoding::Vop2, &[vop2::VOP2]),
    (Encoding::Vopc, vopc::VOPC),
    (Encoding::Vop3, &[vop3::VOP3]),
    (Encoding::Vop3p, &[vop3p::VOP3P, mfma::MFMA]),
    (Encoding::Ds, ds::DS),
    (Encoding::Flat, flat::FLAT),
    (Encoding::Global, flat::GLOBAL),
    (Encoding::Scratch, flat::SCRATCH),
    (Encoding::Mubuf, mubuf::MUBUF),
];

/// Every instruction that is implemented, with its encoding.
pub fn implemented() -> impl Iterator<Item = (Encoding, &'static Row)> {
    TABLES.iter().flat_map(|(encoding, tables)| tables.iter().flat_map(|rows| rows.iter()).map(|row| (*encoding, row)))
}

/// Rows by opcode, for each encoding.
static ROWS: LazyLock<Vec<Vec<Option<&'static Row>>>> = LazyLock::new(|| {
    let mut all = vec![vec![None; 1024]; Encoding::Unknown as usize];
    for (encoding, row) in implemented() {
        all[encoding as usize][row.op as usize] = Some(row);
    }
    all
});

/// How a kernel's vector registers are laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Registers {
    /// Vector registers of both kinds.
    pub total: u16,
    /// Index of the first accumulation register.
    pub accumulation: u16,
}

/// An instruction that no table has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Undecoded {
    /// Its encoding and opcode.
    pub form: String,
}

fn field(word: u32, high: u32, low: u32) -> u32 {
    word >> low & (u32::MAX >> (31 - (high - low)))
}

/// The encoding and opcode of an instruction's first word.
fn classify(word: u32) -> (Encoding, u16) {
    let f = |high, low| field(word, high, low);
    let (encoding, op) = match word {
        _ if f(31, 31) == 0 => match f(30, 25) {
            0x3f => (Encoding::Vop1, f(16, 9)),
            0x3e => (Encoding::Vopc, f(24, 17)),
            op => (Encoding::Vop2, op),
        },
        _ if f(31, 30) == 2 => match (f(31, 23), f(31, 28)) {
            (0x17d, _) => (Encoding::Sop1, f(15, 8)),
            (0x17e, _) => (Encoding::Sopc, f(22, 16)),
            (0x17f, _) => (Encoding::Sopp, f(22, 16)),
            (_, 0xb) => (Encoding::Sopk, f(27, 23)),
            _ => (Encoding::Sop2, f(29, 23)),
        },
        _ => match f(31, 26) {
            0x30 => (Encoding::Smem, f(25, 18)),
            0x34 if f(31, 23) == 0x1a7 => (Encoding::Vop3p, f(22, 16)),
            0x34 => (Encoding::Vop3, f(25, 16)),
            0x36 => (Encoding::Ds, f(24, 17)),
            0x37 => match f(15, 14) {
                0 => (Encoding::Flat, f(24, 18)),
                1 => (Encoding::Scratch, f(24, 18)),
                2 => (Encoding::Global, f(24, 18)),
                _ => (Encoding::Unknown, f(31, 26)),
            },
            0x38 => (Encoding::Mubuf, f(24, 18)),
            other => (Encoding::Unknown, other),
        },
    };
    (encoding, op as u16)
}

/// The table and opcode that give the row: VOP3 encodes the short vector families too.
fn family(encoding: Encoding, op: u16) -> (Encoding, u16) {
    match (encoding, op) {
        (Encoding::Vop3, 0..=255) => (Encoding::Vopc, op),
        (Encoding::Vop3, 256..=319) => (Encoding::Vop2, op - 256),
        (Encoding::Vop3, 320..=447) => (Encoding::Vop1, op - 320),
        other => other,
    }
}

/// Decodes the instruction at the start of `words` (three of them, as far as there are any).
///
/// # Errors
/// An encoding or opcode that is not implemented.
pub fn decode(words: &[u32], registers: Registers) -> Result<Inst, Undecoded> {
    let word = words.first().copied().unwrap_or(0);
    let (encoding, op) = classify(word);
    let undecoded = || Undecoded { form: format!("{encoding:?} opcode {op}") };
    let (family, row_op) = family(encoding, op);
    if encoding == Encoding::Unknown {
        return Err(undecoded());
    }
    let row = ROWS[family as usize].get(row_op as usize).copied().flatten().ok_or_else(undecoded)?;
    let second = words.get(1).copied().unwrap_or(0);
    let mut d = Decoder { inst: Inst::new(row), word, second, registers };
    match encoding {
        Encoding::Sop1 => d.sop(&[field(word, 7, 0)], field(word, 22, 16)),
        Encoding::Sop2 => d.sop(&[field(word, 7, 0), field(word, 15, 8)], field(word, 22, 16)),
        Encoding::Sopc => d.sop(&[field(word, 7, 0), field(word, 15, 8)], 0),
        Encoding::Sopk => d.sopk(op),
        Encoding::Sopp => d.inst.imm = i32::from(word as i16),
        Encoding::Smem => d.smem(),
        Encoding::Vop1 => d.vop1(op),
        Encoding::Vop2 => d.vop2(op),
        Encoding::Vopc => d.vopc(),
        Encoding::Vop3 => d.vop3(op, family, row_op),
        Encoding::Vop3p => d.vop3p(op),
        Encoding::Ds => d.ds(op),
        Encoding::Flat | Encoding::Global | Encoding::Scratch => d.flat(encoding),
        Encoding::Mubuf => d.mubuf(),
        Encoding::Unknown => return Err(undecoded()),
    }
    if let LaneOp::Dpp(dpp) = d.inst.lane
        && !dpp.is_known()
    {
        return Err(Undecoded { form: format!("DPP control {:#x}", dpp.control) });
    }
    Ok(d.inst)
}

struct Decoder {
    inst: Inst,
    word: u32,
    second: u32,
    registers: Registers,
}

/// Source codes that announce a modifier word.
const SDWA: u32 = 249;
const DPP: u32 = 250;
const LITERAL: u32 = 255;

impl Decoder {
    /// Field of the 64-bit encoding's second word.
    fn high(&self, high: u32, low: u32) -> u32 {
        field(self.second, high - 32, low - 32)
    }

    fn low(&self, high: u32, low: u32) -> u32 {
        field(self.word, high, low)
    }

    /// Index of vector register `n` in the wave's register file.
    fn vector(&self, n: u32, accumulation: bool) -> u16 {
        n as u16 + if accumulation { self.registers.accumulation } else { 0 }
    }

    fn source(&mut self, code: u32) -> Src {
        match code {
            LITERAL => {
                self.inst.size = 8;
                Src::Lit(self.second)
            }
            128..=208 | 240..=248 => Src::Const(code as u8),
            0..=255 => Src::S(code as u8),
            _ => Src::V((code - 256) as u16),
        }
    }

    fn sop(&mut self, sources: &[u32], dst: u32) {
        self.inst.sdst = dst as u8;
        for (n, code) in sources.iter().enumerate() {
            self.inst.src[n] = self.source(*code);
        }
    }

    fn sopk(&mut self, op: u16) {
        self.inst.sdst = self.low(22, 16) as u8;
        self.inst.imm = i32::from(self.word as i16);
        if op == 20 {
            self.inst.src[0] = self.source(LITERAL);
        }
    }

    fn smem(&mut self) {
        self.inst.size = 8;
        self.inst.sdst = self.low(12, 6) as u8;
        self.inst.src[0] = Src::S((self.low(5, 0) * 2) as u8);
        let (immediate, register) = (self.low(17, 17) == 1, self.low(14, 14) == 1);
        if immediate {
            self.inst.imm = (self.high(52, 32) << 11).cast_signed() >> 11;
        }
        if register {
            self.inst.src[1] = Src::S(self.high(63, 57) as u8);
        } else if !immediate {
            self.inst.src[1] = Src::S(self.high(38, 32) as u8);
        }
    }

    /// Operand 0 of a short vector encoding, with the modifier word that it may announce.
    fn vector_source0(&mut self, is_compare: bool) {
        match self.low(8, 0) {
            SDWA => self.sdwa(is_compare),
            DPP => self.dpp(),
            code => self.inst.src[0] = self.source(code),
        }
    }

    fn sdwa(&mut self, is_compare: bool) {
        self.inst.size = 8;
        let flag = |d: &Self, bit| d.high(bit, bit) == 1;
        let register = self.high(39, 32);
        self.inst.src[0] = if flag(self, 55) { self.source(register) } else { Src::V(register as u16) };
        self.inst.neg = u8::from(flag(self, 52)) | u8::from(flag(self, 60)) << 1;
        self.inst.abs = u8::from(flag(self, 53)) | u8::from(flag(self, 61)) << 1;
        let mut sdwa = Sdwa {
            src: [self.high(50, 48) as u8, self.high(58, 56) as u8],
            sext: [flag(self, 51), flag(self, 59)],
            dst: 6,
            unused: 0,
        };
        if is_compare {
            if flag(self, 47) {
                self.inst.sdst = self.high(46, 40) as u8;
            }
        } else {
            sdwa.dst = self.high(42, 40) as u8;
            sdwa.unused = self.high(44, 43) as u8;
            self.inst.clamp = flag(self, 45);
            self.inst.omod = self.high(47, 46) as u8;
        }
        self.inst.lane = LaneOp::Sdwa(sdwa);
        if flag(self, 63) {
            self.inst.src[1] = Src::S(self.low(16, 9) as u8);
        }
    }

    fn dpp(&mut self) {
        self.inst.size = 8;
        self.inst.src[0] = Src::V(self.high(39, 32) as u16);
        self.inst.neg = (self.high(52, 52) | self.high(54, 54) << 1) as u8;
        self.inst.abs = (self.high(53, 53) | self.high(55, 55) << 1) as u8;
        self.inst.lane = LaneOp::Dpp(Dpp {
            control: self.high(48, 40) as u16,
            bound_zero: self.high(51, 51) == 1,
            row_mask: self.high(63, 60) as u8,
            bank_mask: self.high(59, 56) as u8,
        });
    }

    fn vop1(&mut self, op: u16) {
        self.vector_source0(false);
        self.vop1_destination(op, self.low(24, 17));
    }

    fn vop1_destination(&mut self, op: u16, n: u32) {
        self.inst.sdst = n as u8;
        self.inst.dst = self.vector(n, op == vop1::ACCVGPR_MOV);
        if let (vop1::ACCVGPR_MOV, Src::V(n)) = (op, self.inst.src[0]) {
            self.inst.src[0] = Src::V(n + self.registers.accumulation);
        }
        if op == vop1::READ_FIRST_LANE {
            self.inst.dst = 0;
        }
    }

    fn vop2(&mut self, op: u16) {
        self.inst.dst = self.vector(self.low(24, 17), false);
        self.inst.sdst = sgpr::VCC;
        self.inst.src[1] = Src::V(self.low(16, 9) as u16);
        self.inst.src[2] = if vop2::reads_carry(op) { Src::S(sgpr::VCC) } else { Src::V(self.inst.dst) };
        self.vector_source0(false);
        if vop2::FMAMK.contains(&op) {
            self.inst.src[2] = self.inst.src[1];
            self.inst.src[1] = self.source(LITERAL);
        } else if vop2::FMAAK.contains(&op) {
            self.inst.src[2] = self.source(LITERAL);
        }
    }

    fn vopc(&mut self) {
        self.inst.sdst = sgpr::VCC;
        self.inst.src[1] = Src::V(self.low(16, 9) as u16);
        self.vector_source0(true);
    }

    fn vop3(&mut self, op: u16, family: Encoding, row_op: u16) {
        self.inst.size = 8;
        for (n, code) in [self.high(40, 32), self.high(49, 41), self.high(58, 50)].into_iter().enumerate() {
            self.inst.src[n] = self.source(code);
        }
        self.inst.size = 8;
        self.inst.neg = self.high(63, 61) as u8;
        self.inst.omod = self.high(60, 59) as u8;
        self.inst.clamp = self.low(15, 15) == 1;
        let destination = self.low(7, 0);
        if vop3::writes_both(op) {
            self.inst.sdst = self.low(14, 8) as u8;
        } else {
            self.inst.abs = self.low(10, 8) as u8;
            self.inst.op_sel = self.low(14, 11) as u8;
            self.inst.sdst = destination as u8;
        }
        self.inst.dst = self.vector(destination, false);
        match family {
            Encoding::Vop1 => self.vop1_destination(row_op, destination),
            Encoding::Vop2 if !vop2::reads_carry(row_op) => self.inst.src[2] = Src::V(self.inst.dst),
            Encoding::Vopc => self.inst.dst = 0,
            _ if vop3::writes_scalar(op) => self.inst.dst = 0,
            _ => {}
        }
    }

    fn vop3p(&mut self, op: u16) {
        self.inst.size = 8;
        for (n, code) in [self.high(40, 32), self.high(49, 41), self.high(58, 50)].into_iter().enumerate() {
            self.inst.src[n] = self.source(code);
        }
        self.inst.size = 8;
        let accumulate = |src: &mut Src, base: u16| {
            if let Src::V(n) = src {
                *n += base;
            }
        };
        let base = self.registers.accumulation;
        let is_matrix = op >= 64 && op != vop3p::ACCVGPR_READ && op != vop3p::ACCVGPR_WRITE;
        if is_matrix {
            let acc_cd = self.low(15, 15) == 1;
            self.inst.dst = self.vector(self.low(7, 0), acc_cd);
            for n in 0..2 {
                if self.high(60, 59) >> n & 1 == 1 {
                    accumulate(&mut self.inst.src[n], base);
                }
            }
            if acc_cd {
                accumulate(&mut self.inst.src[2], base);
            }
            // cbsz, abid, blgp
            self.inst.flags = (self.low(14, 8) | self.high(63, 61) << 7) as u16;
            return;
        }
        self.inst.dst = self.vector(self.low(7, 0), op == vop3p::ACCVGPR_WRITE);
        if op == vop3p::ACCVGPR_READ {
            accumulate(&mut self.inst.src[0], base);
        }
        self.inst.neg = self.high(63, 61) as u8;
        self.inst.neg_hi = self.low(10, 8) as u8;
        self.inst.op_sel = self.low(13, 11) as u8;
        self.inst.op_sel_hi = (self.high(60, 59) | self.low(14, 14) << 2) as u8;
        self.inst.clamp = self.low(15, 15) == 1;
    }

    fn ds(&mut self, op: u16) {
        self.inst.size = 8;
        self.inst.imm = self.low(15, 0).cast_signed();
        let acc = self.low(25, 25) == 1;
        self.inst.src = [
            Src::V(self.vector(self.high(39, 32), false)),
            Src::V(self.vector(self.high(47, 40), acc)),
            Src::V(self.vector(self.high(55, 48), acc)),
        ];
        self.inst.dst = self.vector(self.high(63, 56), acc);
        self.inst.flags = if self.low(16, 16) == 1 { REFUSED } else { 0 } | if ds::returns(op) { RETURN } else { 0 };
    }

    fn flat(&mut self, encoding: Encoding) {
        self.inst.size = 8;
        let acc = self.high(55, 55) == 1;
        let base = self.high(54, 48);
        self.inst.src = [
            Src::V(self.vector(self.high(39, 32), false)),
            Src::V(self.vector(self.high(47, 40), acc)),
            // FLAT has no scalar base.
            if base == 0x7f || encoding == Encoding::Flat { Src::Const(128) } else { Src::S(base as u8) },
        ];
        self.inst.dst = self.vector(self.high(63, 56), acc);
        self.inst.imm = match encoding {
            Encoding::Flat => self.low(11, 0).cast_signed(),
            _ => (self.low(12, 0) << 19).cast_signed() >> 19,
        };
        let mut flags = if self.low(16, 16) == 1 { RETURN } else { 0 };
        if encoding == Encoding::Scratch && self.low(13, 13) == 1 {
            flags |= SCRATCH_VADDR;
        }
        self.inst.flags = flags;
    }

    fn mubuf(&mut self) {
        self.inst.size = 8;
        let acc = self.high(55, 55) == 1;
        self.inst.imm = self.low(11, 0).cast_signed();
        self.inst.sdst = (self.high(52, 48) * 4) as u8;
        let data = self.vector(self.high(47, 40), acc);
        let soffset = self.high(63, 56);
        self.inst.src = [Src::V(self.vector(self.high(39, 32), false)), Src::V(data), self.source(soffset)];
        self.inst.dst = data;
        let mut flags = 0;
        for (bit, flag) in [(14, RETURN), (12, OFFEN), (13, IDXEN), (16, REFUSED)] {
            if self.low(bit, bit) == 1 {
                flags |= flag;
            }
        }
        self.inst.flags = flags;
        self.inst.size = 8;
    }
}

/// Where an instruction may continue.
pub enum Successor {
    /// Only the next instruction.
    Next,
    /// A branch: always, or perhaps, by so many words from the next instruction.
    Branch {
        /// Words from the end of the branch.
        words: i32,
        /// The next instruction never follows.
        always: bool,
    },
    /// Nowhere that is known before it runs.
    Stop,
}

/// Where the instruction at the start of `words` may continue.
pub fn successor(words: &[u32]) -> Successor {
    let word = words.first().copied().unwrap_or(0);
    let displacement = i32::from(word as i16);
    match classify(word) {
        (Encoding::Sopp, sop::SOPP_ENDPGM) => Successor::Stop,
        (Encoding::Sopp, op) if sop::is_branch(op) => {
            Successor::Branch { words: displacement, always: op == sop::SOPP_BRANCH }
        }
        (Encoding::Sopk, 21) => Successor::Branch { words: displacement, always: false },
        (Encoding::Sop1, 29) => Successor::Stop,
        _ => Successor::Next,
    }
}
