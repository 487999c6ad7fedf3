//! How vector instructions read operands and write results: types, modifiers, execution mask.

use super::inst::{Inst, Lanes, Src, constant16, constant32, constant64, sgpr};
use super::lane::LaneOp;
use crate::device::{Context, Flow, PRIVATE_APERTURE, SHARED_APERTURE};
use half::f16;

/// 64-bit values, one per lane.
pub(super) type Lanes64 = [u64; 64];

/// `f` of each lane.
#[inline(always)]
pub(super) fn each<R: Copy + Default>(mut f: impl FnMut(usize) -> R) -> [R; 64] {
    let mut out = [R::default(); 64];
    for (lane, x) in out.iter_mut().enumerate() {
        *x = f(lane);
    }
    out
}

impl Context<'_> {
    /// A scalar source by its code.
    #[inline]
    pub(super) fn scalar(&self, code: u8) -> u32 {
        match code {
            0..=127 => self.wave.s[code as usize],
            251 => u32::from(self.wave.vcc() == 0),
            252 => u32::from(self.wave.exec() == 0),
            253 => u32::from(self.wave.scc),
            // Apertures are 64-bit values with a low dword of 0.
            _ => 0,
        }
    }

    /// A 32-bit operand of a scalar instruction.
    #[inline]
    pub(super) fn s32(&self, i: &Inst, n: usize) -> u32 {
        match i.src[n] {
            Src::S(code) => self.scalar(code),
            Src::Const(code) => constant32(code),
            Src::Lit(x) => x,
            Src::V(r) => self.wave.v[r as usize][0],
        }
    }

    /// A 64-bit operand that is the same for all lanes.
    #[inline]
    pub(super) fn s64(&self, i: &Inst, n: usize) -> u64 {
        match i.src[n] {
            Src::S(code @ 0..=126) => self.wave.s64(code),
            Src::S(235) => SHARED_APERTURE << 32,
            Src::S(236) => SHARED_APERTURE << 32 | 0xffff_ffff,
            Src::S(237) => PRIVATE_APERTURE << 32,
            Src::S(238) => PRIVATE_APERTURE << 32 | 0xffff_ffff,
            Src::S(code) => self.scalar(code).into(),
            Src::Const(code) => constant64(code),
            Src::Lit(x) => i64::from(x.cast_signed()).cast_unsigned(),
            Src::V(_) => 0,
        }
    }

    /// A 32-bit operand, with no float modifiers.
    #[inline(always)]
    pub(super) fn u32s(&self, i: &Inst, n: usize) -> Lanes {
        let x = match i.src[n] {
            Src::V(r) => self.wave.v[r as usize],
            _ => [self.s32(i, n); 64],
        };
        if i.lane == LaneOp::None { x } else { self.select(i, n, &x) }
    }

    #[cold]
    fn select(&self, i: &Inst, n: usize, x: &Lanes) -> Lanes {
        match i.lane {
            LaneOp::Dpp(dpp) if n == 0 => dpp.permute(x, self.wave.exec()),
            LaneOp::Sdwa(sdwa) if n < 2 => each(|lane| sdwa.extract(n, x[lane])),
            _ => *x,
        }
    }

    /// A float32 operand.
    #[inline(always)]
    pub(super) fn f32s(&self, i: &Inst, n: usize) -> [f32; 64] {
        let mut x = self.u32s(i, n);
        if (i.abs | i.neg) >> n & 1 == 1 {
            let sign_bit = self.sign_bit(i, n, 31);
            sign(&mut x, i, n, sign_bit);
        }
        each(|lane| f32::from_bits(x[lane]))
    }

    fn sign_bit(&self, i: &Inst, n: usize, whole: u32) -> u32 {
        match i.lane {
            LaneOp::Sdwa(sdwa) if n < 2 => whole.min(sdwa.width(n) - 1),
            _ => whole,
        }
    }

    /// A 16-bit operand in the low half of each lane: the half that `op_sel` names, with no float modifiers.
    #[inline(always)]
    pub(super) fn u16s(&self, i: &Inst, n: usize) -> Lanes {
        let mut x = match i.src[n] {
            Src::Const(code) => [constant16(code); 64],
            _ => self.u32s(i, n),
        };
        if i.op_sel >> n & 1 == 1 && !matches!(i.src[n], Src::Const(_)) {
            x.iter_mut().for_each(|x| *x >>= 16);
        }
        each(|lane| x[lane] & 0xffff)
    }

    /// A float16 operand, as float32.
    #[inline(always)]
    pub(super) fn f16s(&self, i: &Inst, n: usize) -> [f32; 64] {
        let mut x = self.u16s(i, n);
        if (i.abs | i.neg) >> n & 1 == 1 {
            sign(&mut x, i, n, 15);
        }
        each(|lane| f16::from_bits(x[lane] as u16).to_f32())
    }

    /// A 64-bit operand, with no float modifiers.
    #[inline(always)]
    pub(super) fn u64s(&self, i: &Inst, n: usize) -> Lanes64 {
        match i.src[n] {
            Src::V(r) => {
                let (low, high) = (&self.wave.v[r as usize], &self.wave.v[r as usize + 1]);
                let x = each(|lane| u64::from(low[lane]) | u64::from(high[lane]) << 32);
                match i.lane {
                    LaneOp::Dpp(dpp) if n == 0 => {
                        let (low, high) = (dpp.permute(low, self.wave.exec()), dpp.permute(high, self.wave.exec()));
                        each(|lane| u64::from(low[lane]) | u64::from(high[lane]) << 32)
                    }
                    _ => x,
                }
            }
            _ => [self.s64(i, n); 64],
        }
    }

    /// A float64 operand. A literal is its high dword.
    #[inline(always)]
    pub(super) fn f64s(&self, i: &Inst, n: usize) -> [f64; 64] {
        let mut x = match i.src[n] {
            Src::Lit(x) => [u64::from(x) << 32; 64],
            _ => self.u64s(i, n),
        };
        if i.abs >> n & 1 == 1 {
            x.iter_mut().for_each(|x| *x &= !(1 << 63));
        }
        if i.neg >> n & 1 == 1 {
            x.iter_mut().for_each(|x| *x ^= 1 << 63);
        }
        each(|lane| f64::from_bits(x[lane]))
    }

    /// Lanes that the instruction writes.
    #[inline(always)]
    pub(super) fn mask(&self, i: &Inst) -> u64 {
        match i.lane {
            LaneOp::Dpp(dpp) => dpp.write_mask(self.wave.exec()),
            _ => self.wave.exec(),
        }
    }

    /// Writes a vector register's active lanes.
    #[inline(always)]
    pub(super) fn put_register(&mut self, register: usize, x: &Lanes, mask: u64) {
        let dst = &mut self.wave.v[register];
        if mask == u64::MAX {
            *dst = *x;
        } else {
            for lane in 0..64 {
                dst[lane] = if mask >> lane & 1 == 1 { x[lane] } else { dst[lane] };
            }
        }
    }

    /// Writes the 32-bit result.
    #[inline(always)]
    pub(super) fn put(&mut self, i: &Inst, x: &Lanes) -> Flow {
        let mask = self.mask(i);
        if let LaneOp::Sdwa(sdwa) = i.lane {
            let old = self.wave.v[i.dst as usize];
            let merged = each(|lane| sdwa.insert(old[lane], x[lane]));
            self.put_register(i.dst.into(), &merged, mask);
        } else {
            self.put_register(i.dst.into(), x, mask);
        }
        Flow::Next
    }

    /// Writes the 64-bit result.
    #[inline(always)]
    pub(super) fn put64(&mut self, i: &Inst, x: &Lanes64) -> Flow {
        let mask = self.mask(i);
        self.put_register(i.dst.into(), &each(|lane| x[lane] as u32), mask);
        self.put_register(usize::from(i.dst) + 1, &each(|lane| (x[lane] >> 32) as u32), mask);
        Flow::Next
    }

    /// Writes the float32 result, after output modifier and clamp.
    #[inline(always)]
    pub(super) fn put_f32(&mut self, i: &Inst, mut x: [f32; 64]) -> Flow {
        if i.omod != 0 || i.clamp {
            x.iter_mut().for_each(|x| *x = modified(*x, i));
        }
        self.put(i, &each(|lane| x[lane].to_bits()))
    }

    /// Writes the float16 result, rounded from a wider one. `keep` leaves the other half of the register as it is.
    #[inline(always)]
    pub(super) fn put_f16(&mut self, i: &Inst, mut x: [f32; 64], keep: bool) -> Flow {
        if i.omod != 0 || i.clamp {
            x.iter_mut().for_each(|x| *x = modified(*x, i));
        }
        self.put_u16(i, &each(|lane| f16::from_f32(x[lane]).to_bits().into()), keep)
    }

    /// Writes a 16-bit result into the half that `op_sel` names. Without `keep` the low half is written and the high one is 0.
    #[inline(always)]
    pub(super) fn put_u16(&mut self, i: &Inst, x: &Lanes, keep: bool) -> Flow {
        let old = self.wave.v[i.dst as usize];
        if i.op_sel & 8 != 0 {
            self.put(i, &each(|lane| old[lane] & 0xffff | x[lane] << 16))
        } else if keep {
            self.put(i, &each(|lane| old[lane] & 0xffff_0000 | x[lane] & 0xffff))
        } else {
            self.put(i, &each(|lane| x[lane] & 0xffff))
        }
    }

    /// Writes the float64 result, after output modifier and clamp.
    #[inline(always)]
    pub(super) fn put_f64(&mut self, i: &Inst, mut x: [f64; 64]) -> Flow {
        if i.omod != 0 || i.clamp {
            let factor = f64::from(omod_factor(i));
            x.iter_mut().for_each(|x| *x *= factor);
            if i.clamp {
                x.iter_mut().for_each(|x| *x = if *x > 0.0 { x.min(1.0) } else { 0.0 });
            }
        }
        self.put64(i, &each(|lane| x[lane].to_bits()))
    }

    /// Writes one bit per lane to the instruction's scalar destination; inactive lanes give 0.
    #[inline(always)]
    pub(super) fn put_bits(&mut self, i: &Inst, f: impl Fn(usize) -> bool) -> Flow {
        let bits = (0..64).fold(0, |bits, lane| bits | u64::from(f(lane)) << lane);
        let exec = self.wave.exec();
        self.wave.set_s64(i.sdst, bits & exec);
        Flow::Next
    }

    /// `f` of float32 operands 0, 1.
    #[inline(always)]
    pub(super) fn f32_2(&mut self, i: &Inst, f: impl Fn(f32, f32) -> f32) -> Flow {
        let (a, b) = (self.f32s(i, 0), self.f32s(i, 1));
        self.put_f32(i, each(|lane| f(a[lane], b[lane])))
    }

    /// `f` of float32 operands 0, 1, 2.
    #[inline(always)]
    pub(super) fn f32_3(&mut self, i: &Inst, f: impl Fn(f32, f32, f32) -> f32) -> Flow {
        let (a, b, c) = (self.f32s(i, 0), self.f32s(i, 1), self.f32s(i, 2));
        self.put_f32(i, each(|lane| f(a[lane], b[lane], c[lane])))
    }

    /// `f` of float32 operand 0.
    #[inline(always)]
    pub(super) fn f32_1(&mut self, i: &Inst, f: impl Fn(f32) -> f32) -> Flow {
        let a = self.f32s(i, 0);
        self.put_f32(i, each(|lane| f(a[lane])))
    }

    /// `f` of dword operand 0.
    #[inline(always)]
    pub(super) fn u32_1(&mut self, i: &Inst, f: impl Fn(u32) -> u32) -> Flow {
        let a = self.u32s(i, 0);
        self.put(i, &each(|lane| f(a[lane])))
    }

    /// `f` of dword operands 0, 1.
    #[inline(always)]
    pub(super) fn u32_2(&mut self, i: &Inst, f: impl Fn(u32, u32) -> u32) -> Flow {
        let (a, b) = (self.u32s(i, 0), self.u32s(i, 1));
        self.put(i, &each(|lane| f(a[lane], b[lane])))
    }

    /// `f` of dword operands 0, 1, 2.
    #[inline(always)]
    pub(super) fn u32_3(&mut self, i: &Inst, f: impl Fn(u32, u32, u32) -> u32) -> Flow {
        let (a, b, c) = (self.u32s(i, 0), self.u32s(i, 1), self.u32s(i, 2));
        self.put(i, &each(|lane| f(a[lane], b[lane], c[lane])))
    }

    /// `f` of float16 operands 0, 1.
    #[inline(always)]
    pub(super) fn f16_2(&mut self, i: &Inst, f: impl Fn(f32, f32) -> f32) -> Flow {
        let (a, b) = (self.f16s(i, 0), self.f16s(i, 1));
        self.put_f16(i, each(|lane| f(a[lane], b[lane])), false)
    }

    /// `f` of float16 operand 0.
    #[inline(always)]
    pub(super) fn f16_1(&mut self, i: &Inst, f: impl Fn(f32) -> f32) -> Flow {
        let a = self.f16s(i, 0);
        self.put_f16(i, each(|lane| f(a[lane])), false)
    }

    /// `f` of 16-bit operands 0, 1.
    #[inline(always)]
    pub(super) fn u16_2(&mut self, i: &Inst, f: impl Fn(u16, u16) -> u16) -> Flow {
        let (a, b) = (self.u16s(i, 0), self.u16s(i, 1));
        self.put_u16(i, &each(|lane| f(a[lane] as u16, b[lane] as u16).into()), false)
    }

    /// `f` of float64 operands 0, 1.
    #[inline(always)]
    pub(super) fn f64_2(&mut self, i: &Inst, f: impl Fn(f64, f64) -> f64) -> Flow {
        let (a, b) = (self.f64s(i, 0), self.f64s(i, 1));
        self.put_f64(i, each(|lane| f(a[lane], b[lane])))
    }

    /// `f` of float64 operand 0.
    #[inline(always)]
    pub(super) fn f64_1(&mut self, i: &Inst, f: impl Fn(f64) -> f64) -> Flow {
        let a = self.f64s(i, 0);
        self.put_f64(i, each(|lane| f(a[lane])))
    }

    /// Carry in, one bit per lane, from scalar operand 2.
    pub(super) fn carry(&self, i: &Inst) -> u64 {
        match i.src[2] {
            Src::S(n) => self.wave.s64(n),
            Src::Const(code) => constant64(code),
            _ => self.wave.s64(sgpr::VCC),
        }
    }
}

fn sign(x: &mut Lanes, i: &Inst, n: usize, bit: u32) {
    if i.abs >> n & 1 == 1 {
        x.iter_mut().for_each(|x| *x &= !(1 << bit));
    }
    if i.neg >> n & 1 == 1 {
        x.iter_mut().for_each(|x| *x ^= 1 << bit);
    }
}

fn omod_factor(i: &Inst) -> f32 {
    [1.0, 2.0, 4.0, 0.5][usize::from(i.omod & 3)]
}

/// Output modifier and clamp to 0..1; a NaN clamps to 0.
fn modified(x: f32, i: &Inst) -> f32 {
    let x = x * omod_factor(i);
    match i.clamp {
        true if x > 0.0 => x.min(1.0),
        true => 0.0,
        false => x,
    }
}
