//! The device tensors that a captured step reads, and their host shadows.
//!
//! Graphs replay over fixed addresses; what changes from step to step stands in these tensors. Only what differs from the
//! shadow is uploaded, so a step whose sequences grew inside their pages moves a few hundred bytes.

use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::stream::Stream;
use crate::tensor::{DType, Tensor};

pub(super) struct StepInputs<B: Backend> {
    seq_lens: Tensor<B>,
    block_table: Tensor<B>,
    slot_mapping: Tensor<B>,
    host_lens: Vec<i32>,
    host_table: Vec<i32>,
    host_slots: Vec<i64>,
    table_width: usize,
    page_size: usize,
}

impl<B: Backend> StepInputs<B> {
    /// Room for `max_seqs` sequences of `table_width` pages and `max_tokens` decode tokens; everything is padding at first.
    pub(super) fn new(
        stream: &Stream<B>,
        max_seqs: usize,
        max_tokens: usize,
        table_width: usize,
        page_size: usize,
    ) -> Result<Self> {
        let backend = stream.backend();
        let table_entries = max_seqs.checked_mul(table_width).ok_or_else(|| {
            Error::argument("max_num_seqs", format!("{max_seqs} rows of {table_width} pages overflow"))
        })?;
        let host_slots = filled(max_tokens, -1)?;
        let inputs = Self {
            seq_lens: Tensor::zeros(backend, [max_seqs], DType::I32)?,
            block_table: Tensor::zeros(backend, [max_seqs, table_width], DType::I32)?,
            slot_mapping: Tensor::from_slice(backend, [max_tokens], &host_slots)?,
            host_lens: filled(max_seqs, 0)?,
            host_table: filled(table_entries, 0)?,
            host_slots,
            table_width,
            page_size,
        };
        Ok(inputs)
    }

    pub(super) fn bytes(&self) -> usize {
        [&self.seq_lens, &self.block_table, &self.slot_mapping].iter().map(|tensor| tensor.span_bytes()).sum()
    }

    /// Whether the pages of a sequence stand on the device already.
    pub(super) fn holds(&self, seq: usize, pages: &[i32]) -> bool {
        self.host_table[seq * self.table_width..][..pages.len()] == *pages
    }

    /// Brings a batch to the device: `seq_lens[i]` cached tokens for sequence `i` in the pages `table(i)`, the last `query_len` of
    /// them new. Sequences from there to the last one of the previous step become padding.
    pub(super) fn update<'a>(
        &mut self,
        stream: &Stream<B>,
        seq_lens: &[i32],
        query_len: usize,
        table: impl Fn(usize) -> &'a [i32],
    ) -> Result<()> {
        let updated = self
            .update_lens(stream, seq_lens)
            .and_then(|()| self.update_table(stream, seq_lens, &table))
            .and_then(|()| self.update_slots(stream, seq_lens, query_len, &table));
        if updated.is_err() {
            // What stands on the device is not known any more: the next step uploads everything.
            self.host_lens.fill(i32::MIN);
            self.host_table.fill(i32::MIN);
            self.host_slots.fill(i64::MIN);
        }
        updated
    }

    fn update_lens(&mut self, stream: &Stream<B>, seq_lens: &[i32]) -> Result<()> {
        let len = |i: usize| seq_lens.get(i).copied().unwrap_or(0);
        let changed = assign(&mut self.host_lens, len);
        upload(stream, &self.seq_lens, &self.host_lens, changed)
    }

    fn update_table<'a>(
        &mut self,
        stream: &Stream<B>,
        seq_lens: &[i32],
        table: &impl Fn(usize) -> &'a [i32],
    ) -> Result<()> {
        // Neighbouring rows that changed go up together: one copy where a batch was reshuffled, a word where a page was added.
        let mut pending: Option<(usize, usize)> = None;
        for (seq, &len) in seq_lens.iter().enumerate() {
            let used = (len.max(0) as usize).div_ceil(self.page_size);
            let (row, new) = (&mut self.host_table[seq * self.table_width..][..used], &table(seq)[..used]);
            if *row == *new {
                continue;
            }
            let Some((first, end)) = assign(row, |slot| new[slot]) else { continue };
            let (first, end) = (seq * self.table_width + first, seq * self.table_width + end);
            pending = match pending {
                Some((start, until)) if first - until <= self.table_width => Some((start, end)),
                Some(run) => {
                    upload(stream, &self.block_table, &self.host_table, Some(run))?;
                    Some((first, end))
                }
                None => Some((first, end)),
            };
        }
        upload(stream, &self.block_table, &self.host_table, pending)
    }

    fn update_slots<'a>(
        &mut self,
        stream: &Stream<B>,
        seq_lens: &[i32],
        query_len: usize,
        table: &impl Fn(usize) -> &'a [i32],
    ) -> Result<()> {
        let page_size = self.page_size as i64;
        let slot = |token: usize| {
            let Some(&len) = seq_lens.get(token / query_len) else { return -1 };
            let position = i64::from(len) - query_len as i64 + (token % query_len) as i64;
            match position {
                0.. => {
                    i64::from(table(token / query_len)[(position / page_size) as usize]) * page_size
                        + position % page_size
                }
                _ => -1,
            }
        };
        let changed = assign(&mut self.host_slots, slot);
        upload(stream, &self.slot_mapping, &self.host_slots, changed)
    }

    pub(super) fn seq_lens(&self, num_seqs: usize) -> Result<Tensor<B>> {
        self.seq_lens.narrow(0, 0..num_seqs)
    }

    pub(super) fn block_table(&self, num_seqs: usize) -> Result<Tensor<B>> {
        self.block_table.narrow(0, 0..num_seqs)
    }

    pub(super) fn slot_mapping(&self, num_tokens: usize) -> Result<Tensor<B>> {
        self.slot_mapping.narrow(0, 0..num_tokens)
    }
}

/// A vector of `len` values, or an error where the host has no memory for it.
fn filled<T: Clone>(len: usize, value: T) -> Result<Vec<T>> {
    let mut values = Vec::new();
    values.try_reserve_exact(len).map_err(|_| Error::OutOfMemory {
        backend: "host",
        bytes: len.saturating_mul(size_of::<T>()),
        purpose: "the step inputs",
    })?;
    values.resize(len, value);
    Ok(values)
}

/// Sets `shadow[i] = value(i)` and returns the smallest range outside which nothing changed.
fn assign<T: PartialEq>(shadow: &mut [T], value: impl Fn(usize) -> T) -> Option<(usize, usize)> {
    let mut changed: Option<(usize, usize)> = None;
    for (i, old) in shadow.iter_mut().enumerate() {
        let new = value(i);
        if *old != new {
            *old = new;
            changed = Some((changed.map_or(i, |(first, _)| first), i + 1));
        }
    }
    changed
}

fn upload<B: Backend, T: bytemuck::Pod>(
    stream: &Stream<B>,
    tensor: &Tensor<B>,
    shadow: &[T],
    range: Option<(usize, usize)>,
) -> Result<()> {
    let Some((first, end)) = range else { return Ok(()) };
    let at = tensor.addr() + (first * size_of::<T>()) as u64;
    // SAFETY: the tensor is contiguous and as long as its shadow; steps of a session are enqueued on one stream, so no work
    // of an earlier step reads it any more when the copy runs.
    unsafe { stream.backend().upload(stream.raw(), at, bytemuck::cast_slice(&shadow[first..end])) }
}
