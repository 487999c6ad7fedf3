//! One decode step as its parameter block describes it: lengths, extents, slots, and what must never be followed.

use std::sync::{Mutex, PoisonError};

use super::memory::element;
use crate::error::Error;
use crate::kernel::Variant;
use crate::kernel::params::{DecodeParams, ScheduleKind};
use crate::plan::parts_offset;

/// The parameter block with the numbers that follow from it.
pub(super) struct Step<'a> {
    pub p: &'a DecodeParams,
    pub num_groups: usize,
    pub group_rows: usize,
    pub virtual_seqs: usize,
    faults: Faults,
}

/// What a cached value is multiplied by.
pub(super) fn value_scale(p: &DecodeParams, variant: &Variant) -> f32 {
    if variant.kv_dtype.is_fp8() { p.kv_scale } else { 1.0 }
}

/// Where a virtual sequence's result comes from.
pub(super) enum Pieces {
    /// It has no tokens.
    Empty,
    /// Stage 1 writes it.
    Direct,
    /// Stage 2 merges these slots.
    Slots { first: usize, count: usize },
}

impl<'a> Step<'a> {
    pub(super) fn new(p: &'a DecodeParams) -> Self {
        let num_groups = (p.query_len as usize).div_ceil(p.query_group.max(1) as usize);
        Self {
            p,
            num_groups,
            group_rows: (p.query_group * p.num_heads) as usize,
            virtual_seqs: p.batch as usize * num_groups,
            faults: Faults::default(),
        }
    }

    pub(super) fn kind(&self) -> ScheduleKind {
        match self.p.schedule_kind {
            0 => ScheduleKind::Balanced,
            1 => ScheduleKind::Even,
            _ => ScheduleKind::Chunked,
        }
    }

    /// The sequence's length; `None`, and a fault noted, if its row of the block table cannot address it.
    pub(super) fn length(&self, seq: usize) -> Option<i64> {
        // SAFETY: `seq_lens` has `batch` elements.
        let len = i64::from(unsafe { *element::<i32>(self.p.seq_lens, seq as i64) });
        let mut capacity = i64::from(self.p.table_width) * i64::from(self.p.page_size);
        if self.kind() == ScheduleKind::Chunked {
            // The plan has no split for what lies past its own longest sequence.
            capacity = capacity.min(i64::from(self.p.num_kv_splits) * i64::from(self.p.split_tokens));
        }
        if (0..=capacity).contains(&len) {
            return Some(len);
        }
        self.faults.note(seq, 0, || Error::SeqLenOutOfRange { seq, len, capacity: capacity as usize });
        None
    }

    /// Cached tokens that query token `token` of a sequence of `len` tokens sees.
    pub(super) fn visible(&self, len: i64, token: usize) -> usize {
        if self.p.causal == 0 {
            return len as usize;
        }
        (len - i64::from(self.p.query_len) + 1 + token as i64).max(0) as usize
    }

    /// Query tokens of the virtual sequence's group.
    pub(super) fn tokens(&self, v: usize) -> std::ops::Range<usize> {
        let first = v % self.num_groups * self.p.query_group as usize;
        first..(first + self.p.query_group as usize).min(self.p.query_len as usize)
    }

    /// Cached tokens that the last query token of the group sees, which is what is scheduled.
    pub(super) fn extent(&self, v: usize) -> Option<usize> {
        let len = self.length(v / self.num_groups)?;
        Some(self.visible(len, self.tokens(v).end - 1))
    }

    /// Tokens of one split of an even or chunked schedule.
    pub(super) fn split_tokens(&self, extent: usize) -> usize {
        match self.kind() {
            ScheduleKind::Chunked => self.p.split_tokens as usize,
            _ => extent.div_ceil(self.p.num_kv_splits.max(1) as usize),
        }
        .max(1)
    }

    /// Where the virtual sequence's result comes from; `None`, and a fault noted, if the schedule cannot be this step's.
    pub(super) fn pieces(&self, v: usize, extent: usize) -> Option<Pieces> {
        let splits = self.p.num_kv_splits as usize;
        Some(match self.kind() {
            _ if extent == 0 => Pieces::Empty,
            ScheduleKind::Balanced => {
                // SAFETY: the table begins with `virtual_seqs + 1` slot offsets.
                let [first, end] = [0, 1].map(|i| unsafe { *element::<i32>(self.p.schedule, (v + i) as i64) } as usize);
                // What the plan reserved; a table that nothing was written to must not lead past it.
                let slots = (self.virtual_seqs * splits).min(2 * (self.p.num_parts as usize).saturating_sub(1));
                if first > end || end > slots {
                    self.faults.note(v / self.num_groups, 0, || {
                        let problem = "not this step's: call `schedule` with the same plan and lengths before `attend`";
                        Error::argument("schedule", problem)
                    });
                    return None;
                }
                if end == first { Pieces::Direct } else { Pieces::Slots { first, count: end - first } }
            }
            ScheduleKind::Even if splits == 1 => Pieces::Direct,
            ScheduleKind::Chunked if extent <= self.split_tokens(extent) => Pieces::Direct,
            _ => Pieces::Slots { first: v * splits, count: extent.div_ceil(self.split_tokens(extent)).min(splits) },
        })
    }

    /// Words of part `part` of a balanced schedule: first sequence, first tile, end sequence, end tile, first split.
    pub(super) fn part(&self, part: usize) -> [usize; 5] {
        let at = parts_offset(self.virtual_seqs) + part * crate::plan::PART_WORDS;
        // SAFETY: the table holds `num_parts` parts after its slot offsets.
        std::array::from_fn(|word| unsafe { *element::<i32>(self.p.schedule, (at + word) as i64) } as usize)
    }

    /// Page that holds token `position` of the sequence; `None`, and a fault noted, if the cache does not have it.
    pub(super) fn page(&self, seq: usize, position: usize) -> Option<i64> {
        let slot = position / self.p.page_size as usize;
        // SAFETY: the length was checked, so the row of the table has this column.
        let page = unsafe { *element::<i32>(self.p.block_table, seq as i64 * self.p.table_stride + slot as i64) };
        if (0..self.p.num_pages).contains(&i64::from(page)) {
            return Some(i64::from(page));
        }
        let num_pages = self.p.num_pages as usize;
        self.faults.note(seq, slot, || Error::PageOutOfRange { seq, slot, page, num_pages });
        None
    }

    /// Address of a row of `out` in elements, and of its LSE.
    pub(super) fn output_offsets(&self, seq: usize, token: usize, head: usize) -> (i64, i64) {
        let (seq, token, head) = (seq as i64, token as i64, head as i64);
        let p = self.p;
        (
            seq * p.out_stride_batch + token * p.out_stride_token + head * p.out_stride_head,
            seq * p.lse_stride_batch + token * p.lse_stride_token + head,
        )
    }

    pub(super) fn into_result(self) -> Result<(), Error> {
        self.faults.into_result()
    }
}

/// The first bad length or page that any thread met, in the order of sequences and pages: the same for every thread count.
#[derive(Default)]
pub(super) struct Faults(Mutex<Option<(usize, usize, Error)>>);

impl Faults {
    pub(super) fn note(&self, seq: usize, slot: usize, error: impl FnOnce() -> Error) {
        let mut first = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if first.as_ref().is_none_or(|(s, t, _)| (seq, slot) < (*s, *t)) {
            *first = Some((seq, slot, error()));
        }
    }

    pub(super) fn into_result(self) -> Result<(), Error> {
        match self.0.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some((_, _, error)) => Err(error),
            None => Ok(()),
        }
    }
}
