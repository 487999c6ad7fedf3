//! Vectors of float32 lanes, one type per instruction set.

/// One vector register of float32 lanes.
///
/// # Safety
/// All functions need the instruction set that the type is named for; pointers need [`Lanes::N`] elements.
pub(super) trait Lanes: Copy {
    /// Number of lanes.
    const N: usize;
    unsafe fn splat(x: f32) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    unsafe fn store(self, to: *mut f32);
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn sub(self, other: Self) -> Self;
    unsafe fn mul(self, other: Self) -> Self;
    unsafe fn div(self, other: Self) -> Self;
    /// `self * by + plus`, rounded once where the instruction set can.
    unsafe fn fma(self, by: Self, plus: Self) -> Self;
    /// The larger; the second where either is NaN.
    unsafe fn max(self, other: Self) -> Self;
    unsafe fn abs(self) -> Self;
    /// Lanes of `yes` where `self < bound`, of `no` elsewhere and where `self` is NaN.
    unsafe fn select_below(self, bound: Self, yes: Self, no: Self) -> Self;
    /// The bits shifted left by 23: an integer in the low bits becomes an exponent.
    unsafe fn shift_into_exponent(self) -> Self;
    /// Sum of the lanes, in an order that depends on the type alone.
    unsafe fn sum(self) -> f32;
    /// Largest lane.
    unsafe fn largest(self) -> f32;
}

/// Four lanes in plain Rust; the compiler maps them to SSE2 or NEON.
#[derive(Clone, Copy)]
pub(super) struct Portable([f32; 4]);

impl Portable {
    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Self(std::array::from_fn(|i| f(self.0[i], other.0[i])))
    }
}

impl Lanes for Portable {
    const N: usize = 4;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Self([x; 4])
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller gives N readable elements.
        Self(unsafe { from.cast::<[f32; 4]>().read() })
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller gives N writable elements.
        unsafe { to.cast::<[f32; 4]>().write(self.0) }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        self.zip(other, |a, b| a + b)
    }

    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        self.zip(other, |a, b| a - b)
    }

    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        self.zip(other, |a, b| a * b)
    }

    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        self.zip(other, |a, b| a / b)
    }

    #[inline(always)]
    unsafe fn fma(self, by: Self, plus: Self) -> Self {
        // Without hardware support `mul_add` is a slow library call.
        if cfg!(any(target_arch = "aarch64", target_feature = "fma")) {
            Self(std::array::from_fn(|i| self.0[i].mul_add(by.0[i], plus.0[i])))
        } else {
            Self(std::array::from_fn(|i| self.0[i] * by.0[i] + plus.0[i]))
        }
    }

    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        self.zip(other, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    unsafe fn abs(self) -> Self {
        Self(self.0.map(f32::abs))
    }

    #[inline(always)]
    unsafe fn select_below(self, bound: Self, yes: Self, no: Self) -> Self {
        Self(std::array::from_fn(|i| if self.0[i] < bound.0[i] { yes.0[i] } else { no.0[i] }))
    }

    #[inline(always)]
    unsafe fn shift_into_exponent(self) -> Self {
        Self(self.0.map(|x| f32::from_bits(x.to_bits() << 23)))
    }

    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        (self.0[0] + self.0[2]) + (self.0[1] + self.0[3])
    }

    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        let [a, b, c, d] = self.0;
        let larger = |a: f32, b: f32| if a > b { a } else { b };
        larger(larger(a, b), larger(c, d))
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    // SAFETY (whole module): callers have checked the instruction set, as the trait demands.
    #![allow(clippy::undocumented_unsafe_blocks)]

    use super::Lanes;
    use std::arch::x86_64::*;

    /// Eight lanes; needs AVX2 and FMA.
    #[derive(Clone, Copy)]
    pub(in super::super) struct Avx2(__m256);

    impl Lanes for Avx2 {
        const N: usize = 8;

        #[inline(always)]
        unsafe fn splat(x: f32) -> Self {
            Self(unsafe { _mm256_set1_ps(x) })
        }

        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            Self(unsafe { _mm256_loadu_ps(from) })
        }

        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            unsafe { _mm256_storeu_ps(to, self.0) }
        }

        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            Self(unsafe { _mm256_add_ps(self.0, other.0) })
        }

        #[inline(always)]
        unsafe fn sub(self, other: Self) -> Self {
            Self(unsafe { _mm256_sub_ps(self.0, other.0) })
        }

        #[inline(always)]
        unsafe fn mul(self, other: Self) -> Self {
            Self(unsafe { _mm256_mul_ps(self.0, other.0) })
        }

        #[inline(always)]
        unsafe fn div(self, other: Self) -> Self {
            Self(unsafe { _mm256_div_ps(self.0, other.0) })
        }

        #[inline(always)]
        unsafe fn fma(self, by: Self, plus: Self) -> Self {
            Self(unsafe { _mm256_fmadd_ps(self.0, by.0, plus.0) })
        }

        #[inline(always)]
        unsafe fn max(self, other: Self) -> Self {
            Self(unsafe { _mm256_max_ps(self.0, other.0) })
        }

        #[inline(always)]
        unsafe fn abs(self) -> Self {
            Self(unsafe { _mm256_andnot_ps(_mm256_set1_ps(-0.0), self.0) })
        }

        #[inline(always)]
        unsafe fn select_below(self, bound: Self, yes: Self, no: Self) -> Self {
            Self(unsafe { _mm256_blendv_ps(no.0, yes.0, _mm256_cmp_ps::<_CMP_LT_OQ>(self.0, bound.0)) })
        }

        #[inline(always)]
        unsafe fn shift_into_exponent(self) -> Self {
            Self(unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_castps_si256(self.0))) })
        }

        #[inline(always)]
        unsafe fn sum(self) -> f32 {
            unsafe {
                let four = _mm_add_ps(_mm256_castps256_ps128(self.0), _mm256_extractf128_ps::<1>(self.0));
                let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
                _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
            }
        }

        #[inline(always)]
        unsafe fn largest(self) -> f32 {
            unsafe {
                let four = _mm_max_ps(_mm256_castps256_ps128(self.0), _mm256_extractf128_ps::<1>(self.0));
                let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
                _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
            }
        }
    }

    /// Sixteen lanes; needs AVX-512F.
    #[cfg(avx512_intrinsics)]
    #[derive(Clone, Copy)]
    pub(in super::super) struct Avx512(__m512);

    #[cfg(avx512_intrinsics)]
    #[allow(clippy::incompatible_msrv)]
    #[inline(always)]
    unsafe fn upper_half(x: __m512) -> __m256 {
        unsafe { _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(x))) }
    }

    // The build script sets `avx512_intrinsics` only for compilers that have these.
    #[cfg(avx512_intrinsics)]
    #[allow(clippy::incompatible_msrv)]
    impl Lanes for Avx512 {
        const N: usize = 16;

        #[inline(always)]
        unsafe fn splat(x: f32) -> Self {
            Self(unsafe { _mm512_set1_ps(x) })
        }

        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            Self(unsafe { _mm512_loadu_ps(from) })
        }

        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            unsafe { _mm512_storeu_ps(to, self.0) }
        }

        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            Self(unsafe { _mm512_add_ps(self.0, other.0) })
        }

        #[inline(always)]
        unsafe fn sub(self, other: Self) -> Self {
            Self(unsafe { _mm512_sub_ps(self.0, other.0) })
        }

        #[inline(always)]
        unsafe fn mul(self, other: Self) -> Self {
            Self(unsafe { _mm512_mul_ps(self.0, other.0) })
        }

        #[inline(always)]
        unsafe fn div(self, other: Self) -> Self {
            Self(unsafe { _mm512_div_ps(self.0, other.0) })
        }

        #[inline(always)]
        unsafe fn fma(self, by: Self, plus: Self) -> Self {
            Self(unsafe { _mm512_fmadd_ps(self.0, by.0, plus.0) })
        }

        #[inline(always)]
        unsafe fn max(self, other: Self) -> Self {
            Self(unsafe { _mm512_max_ps(self.0, other.0) })
        }

        #[inline(always)]
        unsafe fn abs(self) -> Self {
            Self(unsafe { _mm512_abs_ps(self.0) })
        }

        #[inline(always)]
        unsafe fn select_below(self, bound: Self, yes: Self, no: Self) -> Self {
            Self(unsafe { _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(self.0, bound.0), no.0, yes.0) })
        }

        #[inline(always)]
        unsafe fn shift_into_exponent(self) -> Self {
            Self(unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_castps_si512(self.0))) })
        }

        #[inline(always)]
        unsafe fn sum(self) -> f32 {
            // Not the reduce intrinsic: it leaves the order to the compiler, which may then differ between call sites.
            unsafe { Avx2(_mm256_add_ps(_mm512_castps512_ps256(self.0), upper_half(self.0))).sum() }
        }

        #[inline(always)]
        unsafe fn largest(self) -> f32 {
            unsafe { Avx2(_mm256_max_ps(_mm512_castps512_ps256(self.0), upper_half(self.0))).largest() }
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::Avx2;
#[cfg(all(target_arch = "x86_64", avx512_intrinsics))]
pub(super) use x86::Avx512;
