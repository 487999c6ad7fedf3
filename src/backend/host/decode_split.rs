//! `mla_decode_split`, stage 1: attention of a block of query rows over one split of one sequence.
//!
//! A work item is a block of rows times a part (balanced) or a split. It turns a tile of cached rows into float32 once and uses it
//! for the scores and for the values of all its rows.

use std::ops::Range;

use super::convert;
use super::memory::element;
use super::pool::Pool;
use super::simd::{AccumulateArgs, Logits, PAD, RowState, ScoreArgs, Simd};
use super::step::{Pieces, Step, value_scale};
use crate::error::Result;
use crate::kernel::Variant;
use crate::kernel::params::{DecodeParams, ScheduleKind};
use crate::tensor::DType;

/// Sizes of a thread's scratch, in float32 elements.
struct Sizes {
    rows: usize,
    tile_tokens: usize,
    // Width of a cached row and of an output row, padded to whole vectors.
    width: usize,
    columns: usize,
}

impl Sizes {
    fn new(variant: &Variant) -> Self {
        Self {
            rows: variant.block_rows as usize,
            tile_tokens: (variant.tile_tokens as usize).next_multiple_of(PAD),
            width: (variant.kv_lora_rank as usize + variant.rope_dim as usize).next_multiple_of(PAD),
            columns: (variant.kv_lora_rank as usize).next_multiple_of(PAD),
        }
    }

    // Queries, tile, scores, outputs, factors, running maxima and sums.
    fn lens(&self) -> [usize; 6] {
        let rows = self.rows.next_multiple_of(PAD);
        let Self { tile_tokens, width, columns, .. } = self;
        [rows * width, tile_tokens * width, rows * tile_tokens, rows * columns, rows, 2 * rows]
    }
}

/// Bytes of scratch that a thread needs.
pub(super) fn scratch_bytes(variant: &Variant) -> usize {
    Sizes::new(variant).lens().iter().sum::<usize>() * size_of::<f32>()
}

/// Buffers of one work item, cut from the thread's scratch.
struct Buffers<'a> {
    q: &'a mut [f32],
    kv: &'a mut [f32],
    scores: &'a mut [f32],
    out: &'a mut [f32],
    rescale: &'a mut [f32],
    states: &'a mut [RowState],
}

impl<'a> Buffers<'a> {
    fn new(scratch: &'a mut [f32], sizes: &Sizes) -> Option<Self> {
        let [q, kv, scores, out, rescale, states] = sizes.lens();
        let (q, rest) = scratch.split_at_mut_checked(q)?;
        let (kv, rest) = rest.split_at_mut_checked(kv)?;
        let (scores, rest) = rest.split_at_mut_checked(scores)?;
        let (out, rest) = rest.split_at_mut_checked(out)?;
        let (rescale, rest) = rest.split_at_mut_checked(rescale)?;
        let states = bytemuck::cast_slice_mut(rest.get_mut(..states)?);
        Some(Self { q, kv, scores, out, rescale, states })
    }
}

/// Where the rows of a piece go.
#[derive(Clone, Copy)]
enum Destination {
    Output,
    Slot(usize),
}

struct Kernel<'a> {
    step: Step<'a>,
    variant: &'a Variant,
    sizes: Sizes,
    simd: &'static Simd,
    logits: Logits,
    // What the latents of the tile must still be multiplied with.
    value_scale: f32,
}

/// # Safety
/// As [`Backend::launch`](crate::Backend::launch).
pub(super) unsafe fn run(p: &DecodeParams, variant: &Variant, simd: &'static Simd, pool: &Pool) -> Result<bool> {
    let step = Step::new(p);
    // One scale for latent and rope: it is folded into the logits and into the output.
    let value_scale = value_scale(p, variant);
    let kernel = Kernel {
        sizes: Sizes::new(variant),
        variant,
        simd,
        logits: Logits { scale: p.sm_scale * value_scale, softcap: p.softcap },
        value_scale,
        step,
    };
    let row_blocks = kernel.step.group_rows.div_ceil(kernel.sizes.rows);
    let items = match kernel.step.kind() {
        ScheduleKind::Balanced => p.num_parts as usize,
        _ => kernel.step.virtual_seqs * p.num_kv_splits as usize,
    };
    let completed = pool.run(items * row_blocks, &|index, scratch| {
        // `prepare` has reserved the scratch of every variant that can be launched.
        if let Some(mut buffers) = Buffers::new(scratch, &kernel.sizes) {
            let first = index % row_blocks * kernel.sizes.rows;
            let rows = first..(first + kernel.sizes.rows).min(kernel.step.group_rows);
            // SAFETY: the caller's promise.
            unsafe { kernel.item(index / row_blocks, rows, &mut buffers) };
        }
    });
    kernel.step.into_result()?;
    Ok(completed)
}

impl Kernel<'_> {
    unsafe fn item(&self, item: usize, rows: Range<usize>, buffers: &mut Buffers) {
        let step = &self.step;
        if step.kind() == ScheduleKind::Balanced {
            let [first_seq, first_tile, end_seq, end_tile, first_split] = step.part(item);
            let (mut tile, mut split) = (first_tile, first_split);
            for v in first_seq..step.virtual_seqs.min(end_seq.saturating_add(usize::from(end_tile > 0))) {
                let end = if v == end_seq { end_tile } else { usize::MAX };
                // SAFETY: as the caller.
                unsafe { self.piece(v, split, tile, end, step.p.tile_tokens as usize, rows.clone(), buffers) };
                (tile, split) = (0, 0);
            }
        } else {
            let splits = step.p.num_kv_splits as usize;
            let (v, split) = (item / splits, item % splits);
            let Some(extent) = step.extent(v) else { return };
            // SAFETY: as the caller.
            unsafe { self.piece(v, split, split, split + 1, step.split_tokens(extent), rows, buffers) };
        }
    }

    /// Tokens `begin * unit .. end * unit` of virtual sequence `v`, which are its split `split`.
    #[allow(clippy::too_many_arguments)]
    unsafe fn piece(
        &self,
        v: usize,
        split: usize,
        begin: usize,
        end: usize,
        unit: usize,
        rows: Range<usize>,
        buffers: &mut Buffers,
    ) {
        let Some(extent) = self.step.extent(v) else { return };
        let tokens = begin.saturating_mul(unit).min(extent)..end.saturating_mul(unit).min(extent);
        if tokens.is_empty() {
            return;
        }
        let to = match self.step.pieces(v, extent) {
            Some(Pieces::Direct) => Destination::Output,
            Some(Pieces::Slots { first, count }) if split < count => Destination::Slot(first + split),
            _ => return,
        };
        // A ragged last group has fewer rows.
        let rows = rows.start..rows.end.min(self.step.tokens(v).len() * self.step.p.num_heads as usize);
        if rows.is_empty() {
            return;
        }
        // SAFETY: as the caller.
        unsafe {
            self.load_queries(v, rows.clone(), buffers);
            if self.attend(v, rows.clone(), tokens, buffers).is_some() {
                self.finish(v, rows, to, buffers);
            }
        }
    }

    /// Sequence, query token and head of a row of the virtual sequence's group.
    fn row(&self, v: usize, row: usize) -> (usize, usize, usize) {
        let heads = self.step.p.num_heads as usize;
        (v / self.step.num_groups, self.step.tokens(v).start + row / heads, row % heads)
    }

    unsafe fn load_queries(&self, v: usize, rows: Range<usize>, buffers: &mut Buffers) {
        let p = self.step.p;
        let width = (p.kv_lora_rank + p.rope_dim) as usize;
        for (row, q) in rows.zip(buffers.q.chunks_mut(self.sizes.width)) {
            let (seq, token, head) = self.row(v, row);
            let at = seq as i64 * p.q_stride_batch + token as i64 * p.q_stride_token + head as i64 * p.q_stride_head;
            let from = element::<u8>(p.q, at * self.variant.q_dtype.size() as i64);
            // SAFETY: a query row has `width` elements.
            unsafe { convert::load(self.variant.q_dtype, from, &mut q[..width]) };
            q[width..].fill(0.0);
        }
    }

    /// The online softmax of all rows over the tokens. `None` if a page was not there.
    unsafe fn attend(&self, v: usize, rows: Range<usize>, tokens: Range<usize>, buffers: &mut Buffers) -> Option<()> {
        let Sizes { width, columns, tile_tokens, .. } = self.sizes;
        let seq = v / self.step.num_groups;
        let len = self.step.length(seq)?;
        buffers.states[..rows.len()].fill(RowState::EMPTY);
        buffers.out[..rows.len() * columns].fill(0.0);
        for tile in tokens.clone().step_by(tile_tokens) {
            let count = tile_tokens.min(tokens.end - tile);
            // SAFETY: the tokens lie inside the sequence.
            unsafe { self.load_tile(seq, tile..tile + count, buffers.kv)? };
            // Rows that see equally much of the tile go together: all of them, but for the last tiles of causal tokens.
            let visible = |row: usize| self.step.visible(len, self.row(v, row).1).saturating_sub(tile).min(count);
            let mut first = rows.start;
            while first < rows.end {
                let seen = visible(first);
                let run = (first..rows.end).take_while(|&row| visible(row) == seen).count();
                if seen > 0 {
                    let at = first - rows.start;
                    // SAFETY: rows `at..at + run` and `seen` tokens lie inside the buffers.
                    unsafe { self.push(at, run, seen, width, columns, buffers) };
                }
                first += run;
            }
        }
        Some(())
    }

    /// Adds the first `seen` tokens of the tile to rows `at..at + run`.
    unsafe fn push(&self, at: usize, run: usize, seen: usize, width: usize, columns: usize, buffers: &mut Buffers) {
        let s_stride = self.sizes.tile_tokens;
        let scores = buffers.scores[at * s_stride..(at + run) * s_stride].as_mut_ptr();
        let rescale = &mut buffers.rescale[at..at + run];
        // SAFETY: all extents were just cut from the buffers, whose rows are padded to whole vectors.
        unsafe {
            (self.simd.scores)(&ScoreArgs {
                q: buffers.q[at * width..(at + run) * width].as_ptr(),
                q_stride: width,
                rows: run,
                k: buffers.kv.as_ptr(),
                k_stride: width,
                tokens: seen,
                width,
                s: scores,
                s_stride,
            });
            for (i, rescale) in rescale.iter_mut().enumerate() {
                let state = &mut buffers.states[at + i];
                *rescale = (self.simd.softmax)(scores.add(i * s_stride), seen, &self.logits, state);
            }
            (self.simd.accumulate)(&AccumulateArgs {
                p: scores,
                p_stride: s_stride,
                rows: run,
                tokens: seen,
                v: buffers.kv.as_ptr(),
                v_stride: width,
                columns,
                rescale: rescale.as_ptr(),
                o: buffers.out[at * columns..(at + run) * columns].as_mut_ptr(),
                o_stride: columns,
            });
        }
    }

    /// Cached rows as float32, latent then rope then zeros.
    unsafe fn load_tile(&self, seq: usize, tokens: Range<usize>, tile: &mut [f32]) -> Option<()> {
        let p = self.step.p;
        let (rank, rope_dim) = (p.kv_lora_rank as usize, p.rope_dim as usize);
        let (page_size, dtype) = (p.page_size as usize, self.variant.kv_dtype);
        for (position, row) in tokens.zip(tile.chunks_mut(self.sizes.width)) {
            let page = self.step.page(seq, position)?;
            let entry = (position % page_size) as i64;
            let size = dtype.size() as i64;
            let kv = element::<u8>(p.kv, (page * p.kv_stride_page + entry * p.kv_stride_token) * size);
            let (latent, rest) = row.split_at_mut(rank);
            let (rope, pad) = rest.split_at_mut(rope_dim);
            // SAFETY: the page was checked and the entry lies inside it.
            unsafe {
                if dtype == DType::U8 {
                    convert::load_ds_mla(kv, latent, rope);
                } else {
                    (self.simd.load)(dtype, kv, latent);
                    if rope_dim > 0 {
                        let at = (page * p.rope_stride_page + entry * p.rope_stride_token) * size;
                        (self.simd.load)(dtype, element(p.k_rope, at), rope);
                    }
                }
            }
            pad.fill(0.0);
        }
        Some(())
    }

    /// Normalises the rows and writes them.
    unsafe fn finish(&self, v: usize, rows: Range<usize>, to: Destination, buffers: &mut Buffers) {
        let p = self.step.p;
        let rank = p.kv_lora_rank as usize;
        for (i, row) in rows.enumerate() {
            let RowState { max, sum } = buffers.states[i];
            let out = &mut buffers.out[i * self.sizes.columns..][..rank];
            // Stage 2 scales what goes to a slot.
            let scale = if matches!(to, Destination::Output) { self.value_scale } else { 1.0 };
            // A row that saw nothing: its sum is 0, not NaN.
            let (factor, lse) = if sum == 0.0 { (0.0, f32::NEG_INFINITY) } else { (scale / sum, max + sum.ln()) };
            out.iter_mut().for_each(|x| *x *= factor);
            // SAFETY: the row lies inside the outputs or inside its slot.
            unsafe {
                match to {
                    Destination::Output => {
                        let (seq, token, head) = self.row(v, row);
                        let (at, lse_at) = self.step.output_offsets(seq, token, head);
                        let size = self.variant.q_dtype.size() as i64;
                        convert::store(self.variant.q_dtype, out, 1.0, element(p.out, at * size));
                        if p.lse != 0 {
                            *element::<f32>(p.lse, lse_at) = lse;
                        }
                    }
                    Destination::Slot(slot) => {
                        let at = (slot * self.step.group_rows + row) as i64;
                        convert::store(DType::F32, out, 1.0, element(p.partial_out, at * rank as i64 * 4));
                        *element::<f32>(p.partial_lse, at) = lse;
                    }
                }
            }
        }
    }
}
