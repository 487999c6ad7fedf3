//! What the vector memory families share: loads, stores and atomics of a wave's addresses.
//!
//! FLAT, GLOBAL, SCRATCH and MUBUF number their operations alike, so one table serves them all; they differ in addresses.
//! Operand 1 is the data, the destination the result.

use super::inst::{Inst, Src};
use super::operand::each;
use crate::device::{Access, Context, FaultKind, Flow, PRIVATE_APERTURE, SHARED_APERTURE, lanes};

/// [`Inst::flags`]: an atomic returns the old value.
pub(super) const RETURN: u16 = 1;
/// [`Inst::flags`]: a scratch instruction adds its address register.
pub(super) const SCRATCH_VADDR: u16 = 2;
/// [`Inst::flags`]: a buffer instruction adds its address register as an offset.
pub(super) const OFFEN: u16 = 4;
/// [`Inst::flags`]: a buffer instruction takes an index from its address register.
pub(super) const IDXEN: u16 = 8;
/// [`Inst::flags`]: an instruction in a form that is not implemented, such as GDS.
pub(super) const REFUSED: u16 = 16;

/// What a wave's addresses mean.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Space {
    /// Device memory.
    Global,
    /// Each lane's private segment.
    Private,
    /// Local data share.
    Lds,
    /// Any of these, by the aperture that the address lies in.
    Flat,
}

/// One address per lane.
pub(super) struct Addresses {
    pub(super) at: [u64; 64],
    /// Lanes that touch memory.
    pub(super) mask: u64,
    pub(super) space: Space,
}

/// A family's way to make addresses.
pub(super) trait Addressing {
    fn addresses(c: &Context<'_>, i: &Inst) -> Result<Addresses, FaultKind>;
}

/// Index of the data register.
fn data_register(i: &Inst) -> usize {
    match i.src[1] {
        Src::V(r) => r.into(),
        _ => 0,
    }
}

impl Addresses {
    /// Checks the addresses in device memory.
    fn check(&self, c: &mut Context<'_>, len: u64, write: bool) -> Result<(), FaultKind> {
        match self.space {
            Space::Global => c.check_addresses(&self.at, self.mask, len, write),
            Space::Flat => {
                let global = lanes(self.mask).filter(|lane| space_of(self.at[*lane]) == Space::Global);
                let mask = global.fold(0, |mask, lane| mask | 1 << lane);
                c.check_addresses(&self.at, mask, len, write)
            }
            Space::Private | Space::Lds => Ok(()),
        }
    }

    /// The space of a lane's address.
    fn lane_space(&self, lane: usize) -> Space {
        if self.space == Space::Flat { space_of(self.at[lane]) } else { self.space }
    }

    fn load<const N: usize>(&self, c: &mut Context<'_>, lane: usize) -> Result<[u8; N], FaultKind> {
        let address = self.at[lane];
        match self.lane_space(lane) {
            Space::Private => c.private::<N>(private_offset(self.space, address), lane).copied(),
            Space::Lds => c.lds::<N>(address as u32, lane, Access::Read).copied(),
            _ => c.load(address, lane as u32),
        }
    }

    fn store<const N: usize>(&self, c: &mut Context<'_>, lane: usize, x: [u8; N]) -> Result<(), FaultKind> {
        let address = self.at[lane];
        match self.lane_space(lane) {
            Space::Private => *c.private::<N>(private_offset(self.space, address), lane)? = x,
            Space::Lds => *c.lds::<N>(address as u32, lane, Access::Write)? = x,
            _ => c.store(address, x),
        }
        Ok(())
    }
}

fn space_of(address: u64) -> Space {
    match address >> 32 {
        SHARED_APERTURE => Space::Lds,
        PRIVATE_APERTURE => Space::Private,
        _ => Space::Global,
    }
}

fn private_offset(space: Space, address: u64) -> i64 {
    if space == Space::Flat { i64::from(address as u32) } else { address.cast_signed() }
}

/// Ends an instruction that may have failed.
pub(super) fn done(c: &mut Context<'_>, result: Result<(), FaultKind>) -> Flow {
    match result {
        Ok(()) => Flow::Next,
        Err(kind) => c.fail(kind),
    }
}

/// Loads `D` dwords into consecutive registers.
pub(super) fn load_dwords<A: Addressing, const N: usize, const D: usize>(c: &mut Context<'_>, i: &Inst) -> Flow {
    let mut load = || -> Result<(), FaultKind> {
        let a = A::addresses(c, i)?;
        a.check(c, N as u64, false)?;
        for lane in lanes(c.wave.exec()) {
            let bytes = if a.mask >> lane & 1 == 1 { a.load::<N>(c, lane)? } else { [0; N] };
            for n in 0..D {
                let dword = std::array::from_fn(|byte| bytes[4 * n + byte]);
                c.wave.v[i.dst as usize + n][lane] = u32::from_le_bytes(dword);
            }
        }
        Ok(())
    };
    let result = load();
    done(c, result)
}

/// Loads `N` bytes and merges them into the destination by `f(old, bytes)`.
pub(super) fn load_part<A: Addressing, const N: usize>(
    c: &mut Context<'_>,
    i: &Inst,
    f: impl Fn(u32, [u8; N]) -> u32,
) -> Flow {
    let load = || -> Result<(), FaultKind> {
        let a = A::addresses(c, i)?;
        a.check(c, N as u64, false)?;
        for lane in lanes(c.wave.exec()) {
            let bytes = if a.mask >> lane & 1 == 1 { a.load::<N>(c, lane)? } else { [0; N] };
            let dst = &mut c.wave.v[i.dst as usize][lane];
            *dst = f(*dst, bytes);
        }
        Ok(())
    };
    let mut load = load;
    let result = load();
    done(c, result)
}

/// Stores `D` dwords of consecutive registers.
pub(super) fn store_dwords<A: Addressing, const N: usize, const D: usize>(c: &mut Context<'_>, i: &Inst) -> Flow {
    let first = data_register(i);
    let mut store = || -> Result<(), FaultKind> {
        let a = A::addresses(c, i)?;
        a.check(c, N as u64, true)?;
        for lane in lanes(a.mask) {
            let mut bytes = [0; N];
            for n in 0..D {
                bytes[4 * n..4 * n + 4].copy_from_slice(&c.wave.v[first + n][lane].to_le_bytes());
            }
            a.store(c, lane, bytes)?;
        }
        Ok(())
    };
    let result = store();
    done(c, result)
}

/// Stores `N` bytes of the data register, from bit `shift`.
pub(super) fn store_part<A: Addressing, const N: usize>(c: &mut Context<'_>, i: &Inst, shift: u32) -> Flow {
    let first = data_register(i);
    let mut store = || -> Result<(), FaultKind> {
        let a = A::addresses(c, i)?;
        a.check(c, N as u64, true)?;
        for lane in lanes(a.mask) {
            let bytes = (c.wave.v[first][lane] >> shift).to_le_bytes();
            a.store::<N>(c, lane, std::array::from_fn(|n| bytes[n]))?;
        }
        Ok(())
    };
    let result = store();
    done(c, result)
}

/// Replaces the dword at each lane's address by `f(old, data, next data register)`; lanes act one after another.
pub(super) fn atomic32<A: Addressing>(c: &mut Context<'_>, i: &Inst, f: impl Fn(u32, u32, u32) -> u32) -> Flow {
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
    let first = data_register(i);
    let mut update = || -> Result<(), FaultKind> {
        let a = A::addresses(c, i)?;
        a.check(c, 4, true)?;
        for lane in lanes(a.mask) {
            let data = c.wave.v[first][lane];
            let second = c.wave.v.get(first + 1).map_or(0, |v| v[lane]);
            let address = a.at[lane];
            let old = match a.lane_space(lane) {
                Space::Lds => {
                    let bytes = c.lds::<4>(address as u32, lane, Access::Atomic)?;
                    let old = u32::from_le_bytes(*bytes);
                    *bytes = f(old, data, second).to_le_bytes();
                    old
                }
                Space::Private => return Err(FaultKind::Unsupported("an atomic on private memory")),
                _ if address % 4 != 0 => return Err(FaultKind::Unsupported("an atomic that is not aligned")),
                _ => {
                    // SAFETY: the address was checked and is aligned.
                    let place = unsafe { AtomicU32::from_ptr(address as *mut u32) };
                    place.fetch_update(Relaxed, Relaxed, |old| Some(f(old, data, second))).unwrap_or_else(|old| old)
                }
            };
            if i.flags & RETURN != 0 {
                c.wave.v[i.dst as usize][lane] = old;
            }
        }
        Ok(())
    };
    let result = update();
    done(c, result)
}

/// As [`atomic32`], for pairs of dwords.
pub(super) fn atomic64<A: Addressing>(c: &mut Context<'_>, i: &Inst, f: impl Fn(u64, u64, u64) -> u64) -> Flow {
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
    let first = data_register(i);
    let mut update = || -> Result<(), FaultKind> {
        let a = A::addresses(c, i)?;
        a.check(c, 8, true)?;
        for lane in lanes(a.mask) {
            let dword = |n: usize| u64::from(c.wave.v.get(first + n).map_or(0, |v| v[lane]));
            let (data, second) = (dword(0) | dword(1) << 32, dword(2) | dword(3) << 32);
            let address = a.at[lane];
            let old = match a.lane_space(lane) {
                Space::Lds => {
                    let bytes = c.lds::<8>(address as u32, lane, Access::Atomic)?;
                    let old = u64::from_le_bytes(*bytes);
                    *bytes = f(old, data, second).to_le_bytes();
                    old
                }
                Space::Private => return Err(FaultKind::Unsupported("an atomic on private memory")),
                _ if address % 8 != 0 => return Err(FaultKind::Unsupported("an atomic that is not aligned")),
                _ => {
                    // SAFETY: the address was checked and is aligned.
                    let place = unsafe { AtomicU64::from_ptr(address as *mut u64) };
                    place.fetch_update(Relaxed, Relaxed, |old| Some(f(old, data, second))).unwrap_or_else(|old| old)
                }
            };
            if i.flags & RETURN != 0 {
                c.wave.v[i.dst as usize][lane] = old as u32;
                c.wave.v[i.dst as usize + 1][lane] = (old >> 32) as u32;
            }
        }
        Ok(())
    };
    let result = update();
    done(c, result)
}

/// Stores bytes from memory straight to LDS: M0 is the base, lanes follow each other by dwords.
pub(super) fn load_to_lds<A: Addressing, const N: usize>(
    c: &mut Context<'_>,
    i: &Inst,
    f: impl Fn([u8; N]) -> u32,
) -> Flow {
    let base = c.wave.s[super::inst::sgpr::M0 as usize] & 0xffff;
    let mut copy = || -> Result<(), FaultKind> {
        let a = A::addresses(c, i)?;
        a.check(c, N as u64, false)?;
        for lane in lanes(a.mask) {
            let dword = f(a.load::<N>(c, lane)?);
            let address = base.wrapping_add_signed(i.imm).wrapping_add(4 * lane as u32);
            *c.lds::<4>(address, lane, Access::Write)? = dword.to_le_bytes();
        }
        Ok(())
    };
    let result = copy();
    done(c, result)
}

/// Wraps to 0 past `limit`.
pub(super) fn increment<T: PartialOrd + From<u8> + std::ops::Add<Output = T>>(old: T, limit: T) -> T {
    if old >= limit { T::from(0) } else { old + T::from(1) }
}

/// Wraps to `limit` below 0 or from above it.
pub(super) fn decrement<T: PartialOrd + Copy + From<u8> + std::ops::Sub<Output = T>>(old: T, limit: T) -> T {
    if old == T::from(0) || old > limit { limit } else { old - T::from(1) }
}

/// Sum of float32 bits.
pub(super) fn add_f32(a: u32, b: u32) -> u32 {
    (f32::from_bits(a) + f32::from_bits(b)).to_bits()
}

/// Sum of float64 bits.
pub(super) fn add_f64(a: u64, b: u64) -> u64 {
    (f64::from_bits(a) + f64::from_bits(b)).to_bits()
}

/// Sums of float16 pairs.
pub(super) fn add_pair_f16(a: u32, b: u32) -> u32 {
    let sum = |shift: u32| {
        let value = |x: u32| half::f16::from_bits((x >> shift) as u16).to_f32();
        u32::from(half::f16::from_f32(value(a) + value(b)).to_bits()) << shift
    };
    sum(0) | sum(16)
}

/// Sums of bfloat16 pairs.
pub(super) fn add_pair_bf16(a: u32, b: u32) -> u32 {
    let sum = |shift: u32| {
        let value = |x: u32| half::bf16::from_bits((x >> shift) as u16).to_f32();
        u32::from(half::bf16::from_f32(value(a) + value(b)).to_bits()) << shift
    };
    sum(0) | sum(16)
}

/// The 64-bit addresses of a pair of registers plus the immediate.
pub(super) fn register_addresses(c: &Context<'_>, i: &Inst) -> [u64; 64] {
    let base = c.u64s(i, 0);
    let offset = i64::from(i.imm).cast_unsigned();
    each(|lane| base[lane].wrapping_add(offset))
}

/// Rows of loads, stores and 32- and 64-bit atomics of one family, with `$prefix` before their names.
macro_rules! memory_rows {
    ($addressing:ident, $prefix:literal) => {
        &[
            row(16, concat!($prefix, "_load_ubyte"), |c, i| load_part::<$addressing, 1>(c, i, |_, x| x[0].into())),
            row(17, concat!($prefix, "_load_sbyte"), |c, i| {
                load_part::<$addressing, 1>(c, i, |_, x| i32::from(x[0] as i8).cast_unsigned())
            }),
            row(18, concat!($prefix, "_load_ushort"), |c, i| {
                load_part::<$addressing, 2>(c, i, |_, x| u16::from_le_bytes(x).into())
            }),
            row(19, concat!($prefix, "_load_sshort"), |c, i| {
                load_part::<$addressing, 2>(c, i, |_, x| i32::from(i16::from_le_bytes(x)).cast_unsigned())
            }),
            row(20, concat!($prefix, "_load_dword"), load_dwords::<$addressing, 4, 1>),
            row(21, concat!($prefix, "_load_dwordx2"), load_dwords::<$addressing, 8, 2>),
            row(22, concat!($prefix, "_load_dwordx3"), load_dwords::<$addressing, 12, 3>),
            row(23, concat!($prefix, "_load_dwordx4"), load_dwords::<$addressing, 16, 4>),
            row(24, concat!($prefix, "_store_byte"), |c, i| store_part::<$addressing, 1>(c, i, 0)),
            row(25, concat!($prefix, "_store_byte_d16_hi"), |c, i| store_part::<$addressing, 1>(c, i, 16)),
            row(26, concat!($prefix, "_store_short"), |c, i| store_part::<$addressing, 2>(c, i, 0)),
            row(27, concat!($prefix, "_store_short_d16_hi"), |c, i| store_part::<$addressing, 2>(c, i, 16)),
            row(28, concat!($prefix, "_store_dword"), store_dwords::<$addressing, 4, 1>),
            row(29, concat!($prefix, "_store_dwordx2"), store_dwords::<$addressing, 8, 2>),
            row(30, concat!($prefix, "_store_dwordx3"), store_dwords::<$addressing, 12, 3>),
            row(31, concat!($prefix, "_store_dwordx4"), store_dwords::<$addressing, 16, 4>),
            row(32, concat!($prefix, "_load_ubyte_d16"), |c, i| {
                load_part::<$addressing, 1>(c, i, |old, x| old & 0xffff_0000 | u32::from(x[0]))
            }),
            row(33, concat!($prefix, "_load_ubyte_d16_hi"), |c, i| {
                load_part::<$addressing, 1>(c, i, |old, x| old & 0xffff | u32::from(x[0]) << 16)
            }),
            row(34, concat!($prefix, "_load_sbyte_d16"), |c, i| {
                load_part::<$addressing, 1>(c, i, |old, x| {
                    old & 0xffff_0000 | u32::from(i16::from(x[0] as i8).cast_unsigned())
                })
            }),
            row(35, concat!($prefix, "_load_sbyte_d16_hi"), |c, i| {
                load_part::<$addressing, 1>(c, i, |old, x| {
                    old & 0xffff | u32::from(i16::from(x[0] as i8).cast_unsigned()) << 16
                })
            }),
            row(36, concat!($prefix, "_load_short_d16"), |c, i| {
                load_part::<$addressing, 2>(c, i, |old, x| old & 0xffff_0000 | u32::from(u16::from_le_bytes(x)))
            }),
            row(37, concat!($prefix, "_load_short_d16_hi"), |c, i| {
                load_part::<$addressing, 2>(c, i, |old, x| old & 0xffff | u32::from(u16::from_le_bytes(x)) << 16)
            }),
        ]
    };
}

/// Rows of the atomics of one family.
macro_rules! atomic_rows {
    ($addressing:ident, $prefix:literal) => {
        &[
            row(64, concat!($prefix, "_atomic_swap"), |c, i| atomic32::<$addressing>(c, i, |_, x, _| x)),
            row(65, concat!($prefix, "_atomic_cmpswap"), |c, i| {
                atomic32::<$addressing>(c, i, |old, x, expected| if old == expected { x } else { old })
            }),
            row(66, concat!($prefix, "_atomic_add"), |c, i| {
                atomic32::<$addressing>(c, i, |old, x, _| old.wrapping_add(x))
            }),
            row(67, concat!($prefix, "_atomic_sub"), |c, i| {
                atomic32::<$addressing>(c, i, |old, x, _| old.wrapping_sub(x))
            }),
            row(68, concat!($prefix, "_atomic_smin"), |c, i| {
                atomic32::<$addressing>(c, i, |old, x, _| old.cast_signed().min(x.cast_signed()).cast_unsigned())
            }),
            row(69, concat!($prefix, "_atomic_umin"), |c, i| atomic32::<$addressing>(c, i, |old, x, _| old.min(x))),
            row(70, concat!($prefix, "_atomic_smax"), |c, i| {
                atomic32::<$addressing>(c, i, |old, x, _| old.cast_signed().max(x.cast_signed()).cast_unsigned())
            }),
            row(71, concat!($prefix, "_atomic_umax"), |c, i| atomic32::<$addressing>(c, i, |old, x, _| old.max(x))),
            row(72, concat!($prefix, "_atomic_and"), |c, i| atomic32::<$addressing>(c, i, |old, x, _| old & x)),
            row(73, concat!($prefix, "_atomic_or"), |c, i| atomic32::<$addressing>(c, i, |old, x, _| old | x)),
            row(74, concat!($prefix, "_atomic_xor"), |c, i| atomic32::<$addressing>(c, i, |old, x, _| old ^ x)),
            row(75, concat!($prefix, "_atomic_inc"), |c, i| {
                atomic32::<$addressing>(c, i, |old, x, _| increment(old, x))
            }),
            row(76, concat!($prefix, "_atomic_dec"), |c, i| {
                atomic32::<$addressing>(c, i, |old, x, _| decrement(old, x))
            }),
            row(77, concat!($prefix, "_atomic_add_f32"), |c, i| {
                atomic32::<$addressing>(c, i, |old, x, _| add_f32(old, x))
            }),
            row(78, concat!($prefix, "_atomic_pk_add_f16"), |c, i| {
                atomic32::<$addressing>(c, i, |old, x, _| add_pair_f16(old, x))
            }),
            row(79, concat!($prefix, "_atomic_add_f64"), |c, i| {
                atomic64::<$addressing>(c, i, |old, x, _| add_f64(old, x))
            }),
            row(80, concat!($prefix, "_atomic_min_f64"), |c, i| {
                atomic64::<$addressing>(c, i, |old, x, _| f64::from_bits(old).min(f64::from_bits(x)).to_bits())
            }),
            row(81, concat!($prefix, "_atomic_max_f64"), |c, i| {
                atomic64::<$addressing>(c, i, |old, x, _| f64::from_bits(old).max(f64::from_bits(x)).to_bits())
            }),
            row(82, concat!($prefix, "_atomic_pk_add_bf16"), |c, i| {
                atomic32::<$addressing>(c, i, |old, x, _| add_pair_bf16(old, x))
            }),
            row(96, concat!($prefix, "_atomic_swap_x2"), |c, i| atomic64::<$addressing>(c, i, |_, x, _| x)),
            row(97, concat!($prefix, "_atomic_cmpswap_x2"), |c, i| {
                atomic64::<$addressing>(c, i, |old, x, expected| if old == expected { x } else { old })
            }),
            row(98, concat!($prefix, "_atomic_add_x2"), |c, i| {
                atomic64::<$addressing>(c, i, |old, x, _| old.wrapping_add(x))
            }),
            row(99, concat!($prefix, "_atomic_sub_x2"), |c, i| {
                atomic64::<$addressing>(c, i, |old, x, _| old.wrapping_sub(x))
            }),
            row(100, concat!($prefix, "_atomic_smin_x2"), |c, i| {
                atomic64::<$addressing>(c, i, |old, x, _| old.cast_signed().min(x.cast_signed()).cast_unsigned())
            }),
            row(101, concat!($prefix, "_atomic_umin_x2"), |c, i| atomic64::<$addressing>(c, i, |old, x, _| old.min(x))),
            row(102, concat!($prefix, "_atomic_smax_x2"), |c, i| {
                atomic64::<$addressing>(c, i, |old, x, _| old.cast_signed().max(x.cast_signed()).cast_unsigned())
            }),
            row(103, concat!($prefix, "_atomic_umax_x2"), |c, i| atomic64::<$addressing>(c, i, |old, x, _| old.max(x))),
            row(104, concat!($prefix, "_atomic_and_x2"), |c, i| atomic64::<$addressing>(c, i, |old, x, _| old & x)),
            row(105, concat!($prefix, "_atomic_or_x2"), |c, i| atomic64::<$addressing>(c, i, |old, x, _| old | x)),
            row(106, concat!($prefix, "_atomic_xor_x2"), |c, i| atomic64::<$addressing>(c, i, |old, x, _| old ^ x)),
            row(107, concat!($prefix, "_atomic_inc_x2"), |c, i| {
                atomic64::<$addressing>(c, i, |old, x, _| increment(old, x))
            }),
            row(108, concat!($prefix, "_atomic_dec_x2"), |c, i| {
                atomic64::<$addressing>(c, i, |old, x, _| decrement(old, x))
            }),
        ]
    };
}

pub(super) use {atomic_rows, memory_rows};
