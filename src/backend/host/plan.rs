//! `mla_plan`: the balanced schedule of a step, from the lengths that now stand on the device.

use super::memory::element;
use super::step::Step;
use crate::error::Result;
use crate::kernel::params::DecodeParams;
use crate::plan::{BalanceShape, LENGTH_WORD, PART_WORDS, balance, parts_offset};

/// `tiles` is scratch; it grows to the number of virtual sequences and stays.
///
/// # Safety
/// As [`Backend::launch`](crate::Backend::launch).
pub(super) unsafe fn run(p: &DecodeParams, tiles: &mut Vec<i32>) -> Result<()> {
    let step = Step::new(p);
    tiles.clear();
    let unit = p.tile_tokens.max(1) as usize;
    tiles.extend((0..step.virtual_seqs).map(|v| step.extent(v).unwrap_or(0).div_ceil(unit) as i32));
    let shape = BalanceShape {
        num_parts: p.num_parts as usize,
        num_kv_splits: p.num_kv_splits as usize,
        fixed_cost: i64::from(p.fixed_cost),
        merged_pieces: i64::from(p.merged_pieces),
    };
    let words = parts_offset(step.virtual_seqs) + shape.num_parts * PART_WORDS;
    // SAFETY: the schedule has this many words, and the launch owns them.
    let table = unsafe { std::slice::from_raw_parts_mut(element::<i32>(p.schedule, 0), words) };
    balance(&shape, tiles, table);
    for part in table[parts_offset(step.virtual_seqs)..].chunks_exact_mut(PART_WORDS) {
        let first = part[0] as usize;
        part[LENGTH_WORD] =
            if first < step.virtual_seqs { step.length(first / step.num_groups).unwrap_or(0) as i32 } else { 0 };
    }
    step.into_result()
}
