//! Structures of the C ABI, on the host backend: any sizes, strides, types and contents are refused or computed without leaving the
//! memory that they describe, which the sanitizer guards.
#![no_main]

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::LazyLock;

use arbitrary::{Result, Unstructured};
use latentwave::capi::*;

/// Tensors that would take more are NULL, which has to be refused.
const LARGEST: i128 = 1 << 16;

struct Device(*mut lw_device);

// SAFETY: a device may be used by any thread.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

static DEVICE: LazyLock<Device> = LazyLock::new(|| {
    let mut device = null_mut();
    // SAFETY: the pointer can be written.
    assert_eq!(unsafe { lw_device_open(lw_backend::LW_HOST as i32, 0, &mut device) }, lw_status::LW_OK);
    Device(device)
});

/// A structure with every byte 0 but its size.
fn cleared<T>() -> T {
    // SAFETY: the structures of the ABI are numbers and raw pointers, which zeros are valid for, and begin with their size.
    unsafe {
        let mut block: T = std::mem::zeroed();
        (&raw mut block).cast::<usize>().write(size_of::<T>());
        block
    }
}

/// A number in a range, or now and then any other.
fn number(u: &mut Unstructured<'_>, most: i64) -> Result<i64> {
    Ok(match u.int_in_range(0..=63)? {
        0 => u.arbitrary()?,
        1 => *u.choose(&[-1, 1 << 31, 1 << 32, 1 << 40, i64::MAX, i64::MIN, i64::MAX / 2])?,
        _ => u.int_in_range(0..=most)?,
    })
}

fn flag(u: &mut Unstructured<'_>) -> Result<i32> {
    if u.ratio(1, 64)? { u.arbitrary() } else { u.int_in_range(0..=1) }
}

/// A stride: usually packed or a little more.
fn stride(u: &mut Unstructured<'_>, packed: i64) -> Result<i64> {
    Ok(if u.arbitrary()? { 0 } else { packed.saturating_add(number(u, 3)?) })
}

/// The memory of one call.
#[derive(Default)]
struct Memory(Vec<Vec<u64>>);

impl Memory {
    /// Exactly what a tensor reaches, filled with what the input holds; NULL for what is too large or cannot be.
    fn tensor<T>(&mut self, u: &mut Unstructured<'_>, size: i64, shape: &[i64], strides: &[i64]) -> Result<*mut T> {
        let (mut packed, mut last) = (1_i128, 0_i128);
        for (dim, &extent) in shape.iter().enumerate().rev() {
            let stride = strides.get(dim).copied().filter(|&stride| stride != 0).map_or(packed, i128::from);
            last = last.saturating_add((i128::from(extent) - 1).saturating_mul(stride));
            packed = stride.saturating_mul(i128::from(extent.max(1)));
        }
        let bytes = last.saturating_add(1).saturating_mul(size.into());
        let sound = shape.iter().all(|&extent| extent > 0) && strides.iter().all(|&stride| stride >= 0);
        if !sound || bytes > LARGEST || u.ratio(1, 128)? {
            return Ok(null_mut());
        }
        let mut memory = vec![0_u64; (bytes as usize).div_ceil(8)];
        // It ends where the tensor ends, so that one element more is one too many.
        let spare = memory.len() * 8 - bytes as usize;
        let seed = u.bytes(u.len().min(48))?;
        if !seed.is_empty() {
            // SAFETY: these are the memory's bytes.
            let all = unsafe { std::slice::from_raw_parts_mut(memory.as_mut_ptr().cast::<u8>(), memory.len() * 8) };
            all.iter_mut().zip(seed.iter().cycle()).for_each(|(byte, seed)| *byte = *seed);
        }
        let odd = usize::from(u.ratio(1, 128)?);
        let at = memory.as_mut_ptr().cast::<u8>().wrapping_add(spare - odd.min(spare)).cast();
        self.0.push(memory);
        Ok(at)
    }
}

const SIZES: [i64; 7] = [0, 4, 2, 2, 1, 1, 1];

/// Bytes of an element, 1 for types that are none.
fn size_of_type(dtype: i32) -> i64 {
    usize::try_from(dtype).ok().and_then(|dtype| SIZES.get(dtype)).copied().unwrap_or(1).max(1)
}

fn layer(u: &mut Unstructured<'_>) -> Result<lw_layer> {
    Ok(lw_layer {
        num_heads: number(u, 4)?,
        kv_lora_rank: if u.ratio(1, 8)? { 512 } else { number(u, 20)? },
        qk_rope_head_dim: if u.ratio(1, 8)? { 64 } else { number(u, 9)? },
        page_size: number(u, 5)?,
        split_value: number(u, 9)?,
        split: number(u, 4)? as i32,
        q_dtype: number(u, 4)? as i32,
        kv_dtype: number(u, 7)? as i32,
        sm_scale: if u.ratio(1, 32)? { u.arbitrary()? } else { 0.125 },
        softcap: if u.ratio(1, 32)? { u.arbitrary()? } else { 0.0 },
        kv_scale: if u.ratio(1, 32)? { u.arbitrary()? } else { 1.0 },
    })
}

fn cache(u: &mut Unstructured<'_>, memory: &mut Memory, layer: &lw_layer) -> Result<lw_kv_cache> {
    let num_pages = number(u, 4)?;
    let (size, split) = (size_of_type(layer.kv_dtype), u.ratio(1, 4)?);
    let width = match (layer.kv_dtype == lw_dtype::LW_FP8_DS_MLA as i32, split) {
        (true, _) => 656,
        (false, true) => layer.kv_lora_rank,
        (false, false) => layer.kv_lora_rank.saturating_add(layer.qk_rope_head_dim),
    };
    let mut part = |u: &mut Unstructured<'_>, width: i64| {
        let token = stride(u, width)?;
        let strides = [stride(u, layer.page_size.saturating_mul(token.max(width)))?, token];
        Ok((memory.tensor::<c_void>(u, size, &[num_pages, layer.page_size, width], &strides)?, strides))
    };
    let (mut kv, kv_strides) = part(u, width)?;
    let (k_rope, k_rope_strides) = if split { part(u, layer.qk_rope_head_dim)? } else { (null_mut(), [0; 2]) };
    if split && k_rope.is_null() {
        // Then `kv` is said to hold both parts.
        kv = null_mut();
    }
    Ok(lw_kv_cache { kv, k_rope, num_pages, kv_strides, k_rope_strides })
}

fn decode(u: &mut Unstructured<'_>, memory: &mut Memory) -> Result<()> {
    let layer = layer(u)?;
    let size = size_of_type(layer.q_dtype);
    let (batch, query_len, table_width) = (number(u, 3)?, number(u, 3)?, number(u, 4)?);
    let width = layer.kv_lora_rank.saturating_add(layer.qk_rope_head_dim);
    let rows = [batch, query_len, layer.num_heads];
    let strides = |u: &mut Unstructured<'_>, width: i64| {
        let head = stride(u, width)?;
        let token = stride(u, layer.num_heads.saturating_mul(head.max(width)))?;
        Ok([0, token, head])
    };
    let (q_strides, out_strides) = (strides(u, width)?, strides(u, layer.kv_lora_rank)?);
    let table_stride = stride(u, table_width)?;
    let mut args = lw_decode_args {
        layer,
        cache: cache(u, memory, &layer)?,
        batch,
        query_len,
        table_width,
        table_stride,
        max_seq_len: number(u, 20)?,
        q: memory.tensor::<c_void>(u, size, &[rows[0], rows[1], rows[2], width], &q_strides)?,
        block_table: memory.tensor::<i32>(u, 4, &[batch, table_width], &[table_stride])?,
        seq_lens: memory.tensor::<i32>(u, 4, &[batch], &[])?,
        out: memory.tensor(u, size, &[rows[0], rows[1], rows[2], layer.kv_lora_rank], &out_strides)?,
        lse: if u.arbitrary()? { memory.tensor(u, 4, &rows, &[])? } else { null_mut() },
        q_strides,
        out_strides,
        causal: flag(u)?,
        scheduled: flag(u)?,
        ..cleared()
    };
    // SAFETY: every tensor is NULL or as large as the structure says; a step that is said to be scheduled has been.
    unsafe {
        let planned = lw_decode_workspace_bytes(DEVICE.0, &args, &mut args.workspace_bytes) == lw_status::LW_OK;
        if planned && args.workspace_bytes > 0 && args.workspace_bytes < 1 << 24 {
            args.workspace = memory.tensor(u, 1, &[args.workspace_bytes as i64], &[])?;
            if args.workspace_bytes as i128 > LARGEST {
                memory.0.push(vec![0; args.workspace_bytes.div_ceil(8)]);
                args.workspace = memory.0.last_mut().map_or(null_mut(), |memory| memory.as_mut_ptr().cast());
            }
        }
        if args.scheduled == 0 || lw_decode_plan(DEVICE.0, &args, null_mut()) == lw_status::LW_OK {
            refuses_or_runs(lw_decode(DEVICE.0, &args, null_mut()));
        }
    }
    Ok(())
}

fn rows_of_a_cache(u: &mut Unstructured<'_>, memory: &mut Memory) -> Result<()> {
    let layer = layer(u)?;
    let (size, cache) = (size_of_type(layer.q_dtype), cache(u, memory, &layer)?);
    let (num_tokens, batch, table_width) = (number(u, 5)?, number(u, 3)?, number(u, 4)?);
    let (kv_c_stride, k_pe_stride) = (stride(u, layer.kv_lora_rank)?, stride(u, layer.qk_rope_head_dim)?);
    let write = lw_cache_write_args {
        layer,
        cache,
        num_tokens,
        kv_c: memory.tensor::<c_void>(u, size, &[num_tokens, layer.kv_lora_rank], &[kv_c_stride])?,
        k_pe: memory.tensor::<c_void>(u, size, &[num_tokens, layer.qk_rope_head_dim], &[k_pe_stride])?,
        slot_mapping: memory.tensor::<i64>(u, 8, &[num_tokens], &[])?,
        kv_c_stride,
        k_pe_stride,
        ..cleared()
    };
    let width = layer.kv_lora_rank.saturating_add(layer.qk_rope_head_dim);
    let (table_stride, out_stride) = (stride(u, table_width)?, stride(u, width)?);
    let gather = lw_cache_gather_args {
        layer,
        cache,
        batch,
        num_tokens,
        table_width,
        table_stride,
        block_table: memory.tensor::<i32>(u, 4, &[batch, table_width], &[table_stride])?,
        cu_seq_lens: memory.tensor::<i32>(u, 4, &[batch.saturating_add(1)], &[])?,
        seq_starts: if u.arbitrary()? { memory.tensor::<i32>(u, 4, &[batch], &[])? } else { null_mut() },
        out: memory.tensor(u, size, &[num_tokens, width], &[out_stride])?,
        out_stride,
        ..cleared()
    };
    // SAFETY: every tensor is NULL or as large as the structures say.
    unsafe {
        refuses_or_runs(lw_cache_write(DEVICE.0, &write, null_mut()));
        refuses_or_runs(lw_cache_gather(DEVICE.0, &gather, null_mut()));
    }
    Ok(())
}

fn merging(u: &mut Unstructured<'_>, memory: &mut Memory) -> Result<()> {
    let dtype = number(u, 4)? as i32;
    let size = size_of_type(dtype);
    let (ranks, tokens, heads, dim) = (number(u, 3)?, number(u, 4)?, number(u, 4)?, number(u, 9)?);
    let (outs, lses) = ([tokens, heads, dim], [heads, tokens]);
    let merge = lw_merge_states_args {
        num_tokens: tokens,
        num_heads: heads,
        head_dim: dim,
        tokens_with_context: number(u, 5)?,
        prefix_out: memory.tensor::<c_void>(u, size, &outs, &[])?,
        prefix_lse: memory.tensor::<f32>(u, 4, &lses, &[])?,
        suffix_out: memory.tensor::<c_void>(u, size, &outs, &[])?,
        suffix_lse: memory.tensor::<f32>(u, 4, &lses, &[])?,
        out: memory.tensor(u, size, &outs, &[])?,
        out_lse: if u.arbitrary()? { memory.tensor(u, 4, &lses, &[])? } else { null_mut() },
        dtype,
        ..cleared()
    };
    let part = tokens.saturating_mul(heads);
    let (out_stride, lse_stride) = (stride(u, part.saturating_mul(dim))?, stride(u, part)?);
    let combine = lw_dcp_combine_args {
        num_ranks: ranks,
        num_rows: tokens,
        num_heads: heads,
        head_dim: dim,
        partial_out: memory.tensor::<c_void>(u, size, &[ranks, tokens, heads, dim], &[out_stride])?,
        partial_lse: memory.tensor::<f32>(u, 4, &[ranks, tokens, heads], &[lse_stride])?,
        partial_out_stride: out_stride,
        partial_lse_stride: lse_stride,
        out: memory.tensor(u, size, &outs, &[])?,
        out_lse: if u.arbitrary()? { memory.tensor(u, 4, &[tokens, heads], &[])? } else { null_mut() },
        dtype,
        natural_log: flag(u)?,
        ..cleared()
    };
    // SAFETY: every tensor is NULL or as large as the structures say.
    unsafe {
        refuses_or_runs(lw_merge_states(DEVICE.0, &merge, null_mut()));
        refuses_or_runs(lw_dcp_combine(DEVICE.0, &combine, null_mut()));
    }
    Ok(())
}

fn refuses_or_runs(status: lw_status) {
    assert_ne!(status, lw_status::LW_ERROR_INTERNAL);
}

fn operate(u: &mut Unstructured<'_>) -> Result<()> {
    let mut memory = Memory::default();
    match u.int_in_range(0..=3)? {
        0 => merging(u, &mut memory),
        1 => rows_of_a_cache(u, &mut memory),
        _ => decode(u, &mut memory),
    }
}

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    // An input that ends early is no failure.
    let _ = operate(&mut Unstructured::new(data));
});
