//! `mla_decode_reduce`, stage 2: merges the splits of each sequence, and writes the rows of empty ones.

use super::convert;
use super::memory::element;
use super::pool::Pool;
use super::step::{Pieces, Step, value_scale};
use crate::error::Result;
use crate::kernel::Variant;
use crate::kernel::params::DecodeParams;

/// Rows that one work item merges.
pub(super) const ROWS: usize = 16;

/// Bytes of scratch that a thread needs: one output row.
pub(super) fn scratch_bytes(variant: &Variant) -> usize {
    variant.kv_lora_rank as usize * size_of::<f32>()
}

/// # Safety
/// As [`Backend::launch`](crate::Backend::launch).
pub(super) unsafe fn run(p: &DecodeParams, variant: &Variant, pool: &Pool) -> Result<bool> {
    let step = Step::new(p);
    let row_blocks = step.group_rows.div_ceil(ROWS);
    let completed = pool.run(step.virtual_seqs * row_blocks, &|index, scratch| {
        // SAFETY: the caller's promise.
        unsafe { item(&step, variant, index / row_blocks, index % row_blocks * ROWS, scratch) };
    });
    step.into_result()?;
    Ok(completed)
}

unsafe fn item(step: &Step, variant: &Variant, v: usize, first_row: usize, scratch: &mut [f32]) {
    let p = step.p;
    let rank = p.kv_lora_rank as usize;
    let Some(extent) = step.extent(v) else { return };
    let (first_slot, count) = match step.pieces(v, extent) {
        None | Some(Pieces::Direct) => return,
        Some(Pieces::Empty) => (0, 0),
        Some(Pieces::Slots { first, count }) => (first, count),
    };
    // `prepare` has reserved it.
    let Some(out) = scratch.get_mut(..rank) else { return };
    let heads = p.num_heads as usize;
    let tokens = step.tokens(v);
    for row in first_row..(first_row + ROWS).min(tokens.len() * heads) {
        // SAFETY: slots `first_slot..first_slot + count` were written by stage 1.
        let lse = unsafe { merge(step, first_slot, count, row, value_scale(p, variant), out) };
        let (at, lse_at) = step.output_offsets(v / step.num_groups, tokens.start + row / heads, row % heads);
        // SAFETY: the row lies inside the outputs.
        unsafe {
            convert::store(variant.q_dtype, out, 1.0, element(p.out, at * variant.q_dtype.size() as i64));
            if p.lse != 0 {
                *element::<f32>(p.lse, lse_at) = lse;
            }
        }
    }
}

/// Merges one row's splits into `out`, times `scale`, and returns the LSE. A split that the row sees nothing of has LSE -inf and is not read;
/// where only one is left its numbers pass through unchanged.
unsafe fn merge(step: &Step, first_slot: usize, count: usize, row: usize, scale: f32, out: &mut [f32]) -> f32 {
    let p = step.p;
    let index = |split: usize| ((first_slot + split) * step.group_rows + row) as i64;
    // SAFETY: the caller's promise.
    let lse = |split: usize| unsafe { *element::<f32>(p.partial_lse, index(split)) };
    let max = (0..count).map(lse).fold(f32::NEG_INFINITY, |max, x| if x > max { x } else { max });
    out.fill(0.0);
    let mut sum = 0.0;
    for split in 0..count {
        let lse = lse(split);
        if lse == f32::NEG_INFINITY {
            continue;
        }
        let weight = (lse - max).exp();
        sum += weight;
        // SAFETY: the caller's promise.
        let partial = unsafe {
            std::slice::from_raw_parts(element::<f32>(p.partial_out, index(split) * out.len() as i64), out.len())
        };
        for (out, x) in out.iter_mut().zip(partial) {
            *out += weight * x;
        }
    }
    if sum == 0.0 {
        return f32::NEG_INFINITY;
    }
    out.iter_mut().for_each(|x| *x *= scale / sum);
    max + sum.ln()
}
