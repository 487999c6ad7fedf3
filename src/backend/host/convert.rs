//! Rows of any element type to float32 and back.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::fp8::{self, ds_mla};
use crate::tensor::DType;

/// Reads `to.len()` elements of type `dtype` as float32, exactly and without their scale.
///
/// Inlined, so that the vector code of the caller's instruction set is made of it.
///
/// # Safety
/// `from` has so many elements.
#[inline(always)]
pub(super) unsafe fn load(dtype: DType, from: *const u8, to: &mut [f32]) {
    let len = to.len();
    // SAFETY: the caller's promise; the element type is the one the tensor was checked to have.
    unsafe {
        match dtype {
            DType::F32 => to.copy_from_slice(std::slice::from_raw_parts(from.cast(), len)),
            DType::F16 => std::slice::from_raw_parts(from.cast::<f16>(), len).convert_to_f32_slice(to),
            DType::BF16 => map(std::slice::from_raw_parts(from.cast::<bf16>(), len), to, bf16_to_f32),
            DType::Fp8E4m3 => map(std::slice::from_raw_parts(from, len), to, fp8::e4m3_to_f32),
            DType::Fp8E4m3Fnuz => map(std::slice::from_raw_parts(from, len), to, fp8::e4m3fnuz_to_f32),
            // No kernel is made for tensors of these types.
            DType::U8 | DType::I32 | DType::I64 => to.fill(f32::NAN),
        }
    }
}

// `bf16::to_f32` keeps signalling NaNs quiet by a branch, which stands in the way of vector code.
#[inline(always)]
fn bf16_to_f32(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

#[inline(always)]
fn map<T: Copy>(from: &[T], to: &mut [f32], f: impl Fn(T) -> f32) {
    for (to, &from) in to.iter_mut().zip(from) {
        *to = f(from);
    }
}

/// Writes float32 values as elements of type `dtype`, rounded to nearest even; `scale` divides what 8-bit floats store.
///
/// # Safety
/// `to` has room for `from.len()` elements.
pub(super) unsafe fn store(dtype: DType, from: &[f32], scale: f32, to: *mut u8) {
    let len = from.len();
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            DType::F32 => std::slice::from_raw_parts_mut(to.cast(), len).copy_from_slice(from),
            DType::F16 => std::slice::from_raw_parts_mut(to.cast::<f16>(), len).convert_from_f32_slice(from),
            DType::BF16 => std::slice::from_raw_parts_mut(to.cast::<bf16>(), len).convert_from_f32_slice(from),
            _ => {
                for (i, &x) in from.iter().enumerate() {
                    *to.add(i) = fp8::from_f32(dtype, x / scale);
                }
            }
        }
    }
}

/// Reads a 656-byte row: 512 latents, scaled per tile, and 64 rope values.
///
/// # Safety
/// `row` has [`ds_mla::ROW_BYTES`] bytes and is aligned to 2.
pub(super) unsafe fn load_ds_mla(row: *const u8, latent: &mut [f32], rope: &mut [f32]) {
    // SAFETY: the caller's promise.
    unsafe {
        load(DType::Fp8E4m3, row, latent);
        for (tile, latents) in latent.chunks_mut(ds_mla::TILE).enumerate() {
            let scale = row.add(ds_mla::SCALES_AT + tile * 4).cast::<f32>().read_unaligned();
            latents.iter_mut().for_each(|x| *x *= scale);
        }
        load(DType::BF16, row.add(ds_mla::ROPE_AT), rope);
    }
}

/// Writes a 656-byte row. A row without rope values gets zeros.
///
/// # Safety
/// As [`load_ds_mla`].
pub(super) unsafe fn store_ds_mla(latent: &[f32], rope: &[f32], row: *mut u8) {
    // SAFETY: the caller's promise.
    unsafe {
        for (tile, latents) in latent.chunks(ds_mla::TILE).enumerate() {
            let scale = ds_mla::tile_scale(latents.iter().fold(0.0, |amax, x| x.abs().max(amax)));
            store(DType::Fp8E4m3, latents, scale, row.add(tile * ds_mla::TILE));
            row.add(ds_mla::SCALES_AT + tile * 4).cast::<f32>().write_unaligned(scale);
        }
        row.add(ds_mla::ROPE_AT).write_bytes(0, ds_mla::ROPE * 2);
        store(DType::BF16, rope, 1.0, row.add(ds_mla::ROPE_AT));
    }
}
