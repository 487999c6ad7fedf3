//! `mla_cache_write` and `mla_cache_gather`: rows into their cache slots, and out again.

use super::convert;
use super::memory::element;
use super::pool::Pool;
use super::step::Faults;
use crate::error::{Error, Result};
use crate::kernel::Variant;
use crate::kernel::params::{CacheGatherParams, CacheLayout, CacheWriteParams};
use crate::tensor::DType;

/// Rows that one work item copies.
const ROWS: usize = 32;

/// Bytes of scratch that a thread needs: one row.
pub(super) fn scratch_bytes(variant: &Variant) -> usize {
    (variant.kv_lora_rank as usize + variant.rope_dim as usize).max(1) * size_of::<f32>()
}

/// A row of scratch, latent and rope; `None` if the variant was not prepared.
fn row_of(scratch: &mut [f32], rank: usize, rope_dim: usize) -> Option<(&mut [f32], &mut [f32])> {
    Some(scratch.get_mut(..rank + rope_dim)?.split_at_mut(rank))
}

/// # Safety
/// As [`Backend::launch`](crate::Backend::launch).
pub(super) unsafe fn write(p: &CacheWriteParams, variant: &Variant, pool: &Pool) -> Result<bool> {
    let tokens = p.num_tokens as usize;
    Ok(pool.run(tokens.div_ceil(ROWS), &|index, scratch| {
        for token in index * ROWS..tokens.min((index + 1) * ROWS) {
            // SAFETY: the caller's promise.
            unsafe { write_row(p, variant, token as i64, scratch) };
        }
    }))
}

unsafe fn write_row(p: &CacheWriteParams, variant: &Variant, token: i64, scratch: &mut [f32]) {
    // SAFETY: `slot_mapping` has `num_tokens` elements.
    let slot = unsafe { *element::<i64>(p.slot_mapping, token) };
    let (page, entry) = (slot.div_euclid(i64::from(p.page_size)), slot.rem_euclid(i64::from(p.page_size)));
    if slot < 0 || page >= p.num_pages {
        return;
    }
    let (rank, rope_dim) = (p.kv_lora_rank as usize, p.rope_dim as usize);
    let (from_size, size) = (variant.q_dtype.size() as i64, variant.kv_dtype.size() as i64);
    let kv = element::<u8>(p.kv, (page * p.kv_stride_page + entry * p.kv_stride_token) * size);
    // SAFETY: input rows and the slot have these widths, and the slot was checked.
    unsafe {
        let Some((latent, rope)) = row_of(scratch, rank, rope_dim) else { return };
        convert::load(variant.q_dtype, element(p.kv_c, token * p.kv_c_stride * from_size), latent);
        if rope_dim > 0 {
            convert::load(variant.q_dtype, element(p.k_pe, token * p.k_pe_stride * from_size), rope);
        }
        if p.layout == CacheLayout::Fp8DsMla as i32 {
            convert::store_ds_mla(latent, rope, kv);
            return;
        }
        convert::store(variant.kv_dtype, latent, p.kv_scale, kv);
        if rope_dim > 0 {
            let at = (page * p.rope_stride_page + entry * p.rope_stride_token) * size;
            convert::store(variant.kv_dtype, rope, p.kv_scale, element(p.k_rope, at));
        }
    }
}

/// # Safety
/// As [`Backend::launch`](crate::Backend::launch).
pub(super) unsafe fn gather(p: &CacheGatherParams, variant: &Variant, pool: &Pool) -> Result<bool> {
    let faults = Faults::default();
    let completed = pool.run(p.batch as usize, &|seq, scratch| {
        // SAFETY: the caller's promise.
        unsafe { gather_sequence(p, variant, seq, scratch, &faults) };
    });
    faults.into_result()?;
    Ok(completed)
}

unsafe fn gather_sequence(p: &CacheGatherParams, variant: &Variant, seq: usize, scratch: &mut [f32], faults: &Faults) {
    // SAFETY: `cu_seq_lens` has `batch + 1` elements, `seq_starts` has `batch`.
    let (first, end, start) = unsafe {
        (
            i64::from(*element::<i32>(p.cu_seq_lens, seq as i64)),
            i64::from(*element::<i32>(p.cu_seq_lens, seq as i64 + 1)),
            if p.seq_starts == 0 { 0 } else { i64::from(*element::<i32>(p.seq_starts, seq as i64)) },
        )
    };
    let capacity = i64::from(p.table_width) * i64::from(p.page_size);
    let len = start.saturating_add(end - first);
    if start < 0 || end < first || len > capacity || first < 0 {
        faults.note(seq, 0, || Error::SeqLenOutOfRange { seq, len, capacity: capacity as usize });
        return;
    }
    let (rank, rope_dim) = (p.kv_lora_rank as usize, p.rope_dim as usize);
    let size = variant.kv_dtype.size() as i64;
    let scale = if variant.kv_dtype.is_fp8() { p.kv_scale } else { 1.0 };
    for row in first..end.min(i64::from(p.num_tokens)) {
        let position = start + row - first;
        let (slot, entry) = (position / i64::from(p.page_size), position % i64::from(p.page_size));
        // SAFETY: the position lies inside the row of the table.
        let page = unsafe { *element::<i32>(p.block_table, seq as i64 * p.table_stride + slot) };
        if !(0..p.num_pages).contains(&i64::from(page)) {
            let (slot, num_pages) = (slot as usize, p.num_pages as usize);
            faults.note(seq, slot, || Error::PageOutOfRange { seq, slot, page, num_pages });
            return;
        }
        let page = i64::from(page);
        let kv = element::<u8>(p.kv, (page * p.kv_stride_page + entry * p.kv_stride_token) * size);
        // SAFETY: the page was checked, and the output row is below `num_tokens`.
        unsafe {
            let Some((latent, rope)) = row_of(scratch, rank, rope_dim) else { return };
            if p.layout == CacheLayout::Fp8DsMla as i32 {
                convert::load_ds_mla(kv, latent, rope);
            } else {
                convert::load(variant.kv_dtype, kv, latent);
                if rope_dim > 0 {
                    let at = (page * p.rope_stride_page + entry * p.rope_stride_token) * size;
                    convert::load(variant.kv_dtype, element(p.k_rope, at), rope);
                }
                latent.iter_mut().chain(rope.iter_mut()).for_each(|x| *x *= scale);
            }
            let out = row * p.out_stride;
            store_row(variant.q_dtype, latent, p.out, out);
            store_row(variant.q_dtype, rope, p.out, out + rank as i64);
        }
    }
}

unsafe fn store_row(dtype: DType, row: &[f32], addr: u64, at: i64) {
    // SAFETY: the caller's promise.
    unsafe { convert::store(dtype, row, 1.0, element(addr, at * dtype.size() as i64)) }
}
