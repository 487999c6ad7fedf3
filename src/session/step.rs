//! One step, as the engine's own code sees it.

use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::graph::RuntimeMode;
use crate::ops::{CacheWrite, DecodeArgs, KvCache, MlaDecode, Plan, Scheduled, write_cache};
use crate::stream::Stream;
use crate::tensor::Tensor;
use crate::workspace::Workspace;

/// One step while it is being enqueued: eagerly, or recorded into a graph. The engine's closure enqueues its whole model step
/// for [`num_tokens`](Step::num_tokens) rows on [`stream`](Step::stream), calling [`decode`](Step::decode) once per layer.
///
/// When a graph serves a batch, rows past the batch are padding: their lengths are 0 and their slots −1, so they write
/// nothing to the cache and their outputs are 0.
pub struct Step<'a, B: Backend> {
    pub(super) stream: &'a Stream<B>,
    pub(super) decode: &'a MlaDecode<B>,
    pub(super) plan: &'a Plan<B>,
    // Given to the schedule by the first layer.
    pub(super) workspace: Option<&'a mut Workspace<B>>,
    pub(super) scheduled: Option<Scheduled<'a, B>>,
    pub(super) seq_lens: Tensor<B>,
    pub(super) block_table: Tensor<B>,
    pub(super) slot_mapping: Tensor<B>,
    pub(super) num_tokens: usize,
    pub(super) mode: RuntimeMode,
    pub(super) graph_tokens: usize,
    pub(super) kv_scale: f32,
}

impl<B: Backend> Step<'_, B> {
    /// Rows to enqueue work for: decode tokens, padding included, then the engine's own prefill tokens.
    pub fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    /// What the engine's own work of this step is served by: [`RuntimeMode::Full`] while the step is captured, [`RuntimeMode::Piecewise`]
    /// where the engine's piecewise graphs of [`graph_tokens`](Step::graph_tokens) rows are to be replayed around the attention, else
    /// [`RuntimeMode::None`].
    pub fn mode(&self) -> RuntimeMode {
        self.mode
    }

    /// Rows of the graphs that serve this step, padding included: the captured size, at least [`num_tokens`](Step::num_tokens), which
    /// it equals where there is no graph.
    pub fn graph_tokens(&self) -> usize {
        self.graph_tokens
    }

    /// Rows that [`decode`](Step::decode) takes: sequences times query length, padding included.
    pub fn num_decode_tokens(&self) -> usize {
        self.num_seqs() * self.query_len()
    }

    /// Decoding sequences, padding included.
    pub fn num_seqs(&self) -> usize {
        self.plan.decode.shape.batch
    }

    /// Query tokens per sequence.
    pub fn query_len(&self) -> usize {
        self.plan.decode.shape.query_len
    }

    /// The attention layers.
    pub fn layer(&self) -> &MlaDecode<B> {
        self.decode
    }

    /// The stream that everything must be enqueued on.
    pub fn stream(&self) -> &Stream<B> {
        self.stream
    }

    /// Cached tokens per sequence, i32 `[num_seqs]`, 0 for padding.
    pub fn seq_lens(&self) -> &Tensor<B> {
        &self.seq_lens
    }

    /// Page ids, i32 `[num_seqs, table_width]`.
    pub fn block_table(&self) -> &Tensor<B> {
        &self.block_table
    }

    /// Cache slot of each decode token, i64 `[num_decode_tokens]`, −1 for padding.
    pub fn slot_mapping(&self) -> &Tensor<B> {
        &self.slot_mapping
    }

    /// Writes this step's decode tokens into one layer's cache: `kv_c` `[>= num_decode_tokens, kv_lora_rank]`, `k_pe` likewise.
    ///
    /// # Errors
    /// As [`write_cache`]; [`Error::Argument`] and [`Error::Shape`] for a cache of another type or layout than the session's.
    pub fn write_cache(&mut self, kv_c: &Tensor<B>, k_pe: Option<&Tensor<B>>, cache: &KvCache<B>) -> Result<()> {
        self.decode.check_cache(cache)?;
        let write = CacheWrite { kv_c, k_pe, slot_mapping: &self.slot_mapping, kv_scale: self.kv_scale };
        write_cache(self.stream, cache, &write)
    }

    /// Attention of this step's decode tokens over one layer's cache: `q` `[num_decode_tokens, num_heads, head_dim]`, `out`
    /// `[num_decode_tokens, num_heads, kv_lora_rank]`, `lse` f32 `[num_decode_tokens, num_heads]`; longer tensors may be
    /// passed, of which the first rows are used.
    ///
    /// # Errors
    /// As [`Scheduled::attend`].
    pub fn decode(
        &mut self,
        q: &Tensor<B>,
        cache: &KvCache<B>,
        out: &mut Tensor<B>,
        lse: Option<&mut Tensor<B>>,
    ) -> Result<()> {
        let rows = self.num_decode_tokens();
        if rows == 0 {
            return Ok(());
        }
        // The plan kernel runs once per step: lengths are the same for every layer.
        if let Some(workspace) = self.workspace.take() {
            let width = self.block_table.shape()[1];
            let scheduled = self.decode.schedule(self.stream, self.plan, workspace, &self.seq_lens, width, true)?;
            self.scheduled = Some(scheduled);
        }
        let Some(scheduled) = &mut self.scheduled else {
            return Err(Error::argument("step", "its plan kernel could not be enqueued; the step must be given up"));
        };
        let first = |arg: &'static str, tensor: &Tensor<B>| match tensor.shape().first() {
            Some(&have) if have >= rows => tensor.narrow(0, 0..rows),
            _ => Err(Error::Shape { arg, expected: format!("[>= {rows}, ..]"), got: tensor.shape().to_vec() }),
        };
        let mut out = first("out", out)?;
        let mut lse = lse.map(|lse| first("lse", lse)).transpose()?;
        let args = DecodeArgs {
            q: &first("q", q)?,
            kv_cache: cache,
            block_table: &self.block_table,
            seq_lens: &self.seq_lens,
            out: &mut out,
            lse: lse.as_mut(),
            kv_scale: self.kv_scale,
            causal: true,
        };
        scheduled.attend(args)
    }
}
