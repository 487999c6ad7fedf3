//! Tensor maps: how Hopper's bulk copies cut boxes out of the cache. Encoded at every launch from its parameters, on the
//! stack; the driver copies them with the other parameters, so a captured launch keeps its own.

use std::ffi::c_void;

use cudarc::driver::sys::{
    CUtensorMap, CUtensorMapDataType as DataType, CUtensorMapFloatOOBfill as OobFill,
    CUtensorMapInterleave as Interleave, CUtensorMapL2promotion as Promotion, CUtensorMapSwizzle as Swizzle,
};

use super::driver::{Driver, cu};
use crate::error::Result;
use crate::kernel::Variant;
use crate::kernel::params::DecodeParams;
use crate::tensor::DType;

/// Bytes of a box's row: one swizzled row.
const BOX_ROW_BYTES: u32 = 128;
/// Tokens of the largest box; a smaller page has boxes of the largest power of two that divides it.
const BOX_TOKENS: u32 = 64;

/// The maps of the latent and of the rotary part of the cache, `[page, token, column]`. Its rows begin on multiples of 16 bytes,
/// as [`DecodeKernels::row_alignment`](crate::backend::DecodeKernels::row_alignment) demands. Kernels that gather all
/// rows have parameters for maps and do not look at them.
///
/// # Errors
/// [`Error::Driver`](crate::Error::Driver) for a cache that no map can describe.
pub(super) fn cache_maps(driver: &Driver, variant: &Variant, params: &DecodeParams) -> Result<[CUtensorMap; 2]> {
    if variant.gather {
        return Ok([CUtensorMap { opaque: [0; 16] }; 2]);
    }
    let (p, dtype) = (params, variant.kv_dtype);
    let latent = encode(driver, p, dtype, (p.kv, p.kv_lora_rank), (p.kv_stride_page, p.kv_stride_token))?;
    if p.rope_dim == 0 {
        return Ok([latent, latent]);
    }
    let rope = encode(driver, p, dtype, (p.k_rope, p.rope_dim), (p.rope_stride_page, p.rope_stride_token))?;
    Ok([latent, rope])
}

fn encode(
    driver: &Driver,
    p: &DecodeParams,
    dtype: DType,
    (address, columns): (u64, i32),
    (page_stride, token_stride): (i64, i64),
) -> Result<CUtensorMap> {
    let data_type = match dtype {
        DType::F16 => DataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        DType::BF16 => DataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        _ => DataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
    };
    let element = dtype.size() as u64;
    let sizes = [columns as u64, p.page_size as u64, p.num_pages as u64];
    // The stride of a single page means nothing, and may be anything.
    let page_stride = if p.num_pages > 1 { page_stride } else { token_stride * i64::from(p.page_size) };
    let strides = [token_stride as u64 * element, page_stride as u64 * element];
    let page_size = p.page_size as u32;
    let tokens = (page_size & page_size.wrapping_neg()).min(BOX_TOKENS);
    // A box may be wider than the rotary part: what lies beyond becomes zeros and is not read.
    let (box_sizes, steps) = ([BOX_ROW_BYTES / element as u32, tokens, 1], [1; 3]);
    // SAFETY: a plain C structure, for which zeros are valid.
    let mut map: CUtensorMap = unsafe { std::mem::zeroed() };
    // SAFETY: the arrays have the rank's length and outlive the call; the address is not followed here.
    unsafe {
        cu!(
            driver,
            cuTensorMapEncodeTiled(
                &mut map,
                data_type,
                sizes.len() as u32,
                address as *mut c_void,
                sizes.as_ptr(),
                strides.as_ptr(),
                box_sizes.as_ptr(),
                steps.as_ptr(),
                Interleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                Swizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                Promotion::CU_TENSOR_MAP_L2_PROMOTION_NONE,
                OobFill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        )?;
    }
    Ok(map)
}
