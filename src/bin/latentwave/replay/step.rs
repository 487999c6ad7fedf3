//! A step on the device: prompts into the cache, then attention of the decoding sequences, layer by layer, through a session.

use std::time::Instant;

use latentwave::graph::RuntimeMode;
use latentwave::ops::{CacheWrite, write_cache};
use latentwave::session::{DecodeSession, SessionConfig, Step, StepBatch, StepReport};
use latentwave::{DType, GraphBackend, KvCache, Result, Tensor, reference};

use super::scheduler::{PromptChunk, Scheduler};
use super::stats::{Service, StepRecord, Verified};
use crate::alloc::allocations;
use crate::interrupt;
use crate::rng::Rng;
use crate::rows::{self, Rows};

/// Random rows that new cache rows are taken from; a cached token is one of them, and layer `l` caches the `l`-th behind it.
const FRESH_ROWS: usize = 4096;

/// What one layer's part of a step reads and writes. Graphs hold these addresses, so they stay for the whole replay.
struct Layer<B: GraphBackend> {
    cache: KvCache<B>,
    q: Tensor<B>,
    kv_c: Tensor<B>,
    k_pe: Option<Tensor<B>>,
    out: Tensor<B>,
}

/// Everything that a replay keeps on the device.
pub(crate) struct Engine<'a, B: GraphBackend> {
    backend: &'a B,
    config: SessionConfig,
    session: DecodeSession<B>,
    layers: Vec<Layer<B>>,
    /// Random queries and cache rows, and this step's part of them on the device. Layer `l` reads from its row `l` on.
    q_rows: Rows,
    kv_rows: Rows,
    q_step: Tensor<B>,
    kv_step: Tensor<B>,
    /// First rows of this step's part.
    q_base: usize,
    kv_base: usize,
    /// All cache rows on the device, where prompts are copied from.
    kv_prompts: Tensor<B>,
    /// Slots of the prompt tokens of a step.
    slots: Tensor<B>,
    rng: Rng,
}

/// A step that was measured.
pub(crate) struct Measure {
    pub(crate) service: Service,
    pub(crate) record: StepRecord,
}

fn enqueue<B: GraphBackend>(step: &mut Step<'_, B>, layers: &mut [Layer<B>]) -> Result<()> {
    for layer in layers {
        step.write_cache(&layer.kv_c, layer.k_pe.as_ref(), &layer.cache)?;
        step.decode(&layer.q, &layer.cache, &mut layer.out, None)?;
    }
    Ok(())
}

/// How a step was served, in the words of the table.
fn service(report: &StepReport) -> Service {
    let full = report.mode == RuntimeMode::Full;
    Service {
        mode: report.mode.to_string(),
        size: full.then_some(report.num_tokens),
        why: match report.misfit {
            Some(misfit) => format!("{misfit}; attention runs eagerly"),
            None => "the smallest graph that holds the batch".to_owned(),
        },
    }
}

impl<'a, B: GraphBackend> Engine<'a, B> {
    /// Allocates everything, captures every graph. `keep_outputs` gives each layer an output of its own, to be checked.
    ///
    /// # Errors
    /// [`OutOfMemory`](latentwave::Error::OutOfMemory), and what the session's construction and capture return.
    pub(crate) fn new(
        backend: &'a B,
        config: SessionConfig,
        num_layers: usize,
        keep_outputs: bool,
        seed: u64,
    ) -> Result<Self> {
        let mla = config.mla;
        let (rank, width, dtype) = (mla.kv_lora_rank, mla.head_dim(), config.q_dtype);
        let mut rng = Rng::new(seed ^ 0x5eed_da7a);
        let mut session = DecodeSession::new(backend, config.clone())?;

        let rows = config.max_decode_tokens() + num_layers - 1;
        let q_rows = Rows::random(dtype, 2 * rows, mla.num_heads * width, &mut rng);
        let kv_rows = Rows::random(dtype, FRESH_ROWS + config.max_num_batched_tokens + rows, width, &mut rng);
        let q_step = Tensor::from_bytes(backend, [rows, mla.num_heads, width], dtype, q_rows.bytes(0..rows))?;
        let kv_step = Tensor::from_bytes(backend, [rows, width], dtype, kv_rows.bytes(0..rows))?;
        let kv_prompts = Tensor::from_bytes(backend, [kv_rows.len(), width], dtype, kv_rows.bytes(0..kv_rows.len()))?;
        let slots = Tensor::zeros(backend, [config.max_num_batched_tokens], DType::I64)?;

        let output = || Tensor::zeros(backend, [rows, mla.num_heads, rank], dtype);
        let shared = output()?;
        let layers = (0..num_layers).map(|layer| {
            let own = layer..rows - (num_layers - 1 - layer);
            let kv = kv_step.narrow(0, own.clone())?;
            Ok(Layer {
                cache: KvCache::zeros(backend, config.num_pages, &mla, config.kv_dtype)?,
                q: q_step.narrow(0, own)?,
                kv_c: kv.columns(0..rank)?,
                k_pe: (width > rank).then(|| kv.columns(rank..width)).transpose()?,
                out: if keep_outputs && layer > 0 { output()? } else { shared.clone() },
            })
        });
        let mut layers = layers.collect::<Result<Vec<_>>>()?;
        session.capture(|step| enqueue(step, &mut layers))?.all()?;
        Ok(Self {
            backend,
            config,
            session,
            layers,
            q_rows,
            kv_rows,
            q_step,
            kv_step,
            q_base: 0,
            kv_base: 0,
            kv_prompts,
            slots,
            rng,
        })
    }

    /// The session.
    pub(crate) fn session(&self) -> &DecodeSession<B> {
        &self.session
    }

    /// Does what is planned. `None` if no sequence decodes.
    ///
    /// The time measured is that of attention: from handing the batch over to having its result, cache writes of the decoded
    /// tokens included, prompts and fresh random inputs not.
    ///
    /// # Errors
    /// What the session returns.
    pub(crate) fn run(&mut self, scheduler: &mut Scheduler) -> Result<Option<Measure>> {
        let prompts = scheduler.plan().prompts.clone();
        let prefill_reqs = prompts.len();
        let mut prompt_tokens = 0;
        for chunk in prompts {
            let tokens = chunk.tokens.len();
            self.write_prompt(scheduler, chunk, prompt_tokens)?;
            prompt_tokens += tokens;
        }
        let num_seqs = scheduler.plan().decode.len();
        self.session.synchronize()?;
        if num_seqs == 0 {
            return Ok(None);
        }
        self.refresh_inputs(scheduler)?;

        let query_len = self.config.query_len();
        let sequences = || scheduler.plan().decode.iter().map(|&index| &scheduler.running()[index]);
        let seq_lens: Vec<i32> = sequences().map(|sequence| (sequence.cached + query_len) as i32).collect();
        let block_tables: Vec<&[i32]> = sequences().map(|sequence| sequence.pages.as_slice()).collect();
        let decode = StepBatch::decode(query_len, &seq_lens, &block_tables);
        let batch = StepBatch { prefill_tokens: prompt_tokens, prefill_reqs, ..decode };

        let layers = &mut self.layers;
        let before = allocations();
        let start = Instant::now();
        let report = self.session.step(&batch, |step| enqueue(step, layers))?;
        self.session.synchronize()?;
        let seconds = start.elapsed().as_secs_f64();
        let allocations = allocations() - before;

        let longest = seq_lens.iter().copied().max().unwrap_or(0) as usize;
        let record = StepRecord {
            served: 0,
            sequences: num_seqs,
            query_tokens: num_seqs * query_len,
            padding: report.padding,
            prompt_tokens,
            context_tokens: seq_lens.iter().map(|&len| len as usize).sum(),
            longest,
            generated: 0,
            waiting: scheduler.waiting(),
            used_pages: scheduler.used_pages(),
            seconds,
            allocations,
        };
        Ok(Some(Measure { service: service(&report), record }))
    }

    /// Fresh random queries and cache rows for the step's decode tokens.
    fn refresh_inputs(&mut self, scheduler: &mut Scheduler) -> Result<()> {
        let query_len = self.config.query_len();
        let decode = scheduler.plan().decode.clone();
        let rows = decode.len() * query_len + self.layers.len() - 1;
        self.q_base = self.rng.below(self.q_rows.len() - rows + 1);
        self.kv_base = self.rng.below(FRESH_ROWS);
        self.q_step
            .narrow(0, 0..rows)?
            .write_bytes(self.backend, self.q_rows.bytes(self.q_base..self.q_base + rows))?;
        self.kv_step
            .narrow(0, 0..rows)?
            .write_bytes(self.backend, self.kv_rows.bytes(self.kv_base..self.kv_base + rows))?;
        for (i, index) in decode.into_iter().enumerate() {
            let sequence = scheduler.running_mut(index);
            let first = self.kv_base + i * query_len;
            // Rows of refused drafts are overwritten.
            sequence.rows.truncate(sequence.cached);
            sequence.rows.extend((first..first + query_len).map(|row| row as u32));
        }
        Ok(())
    }

    /// Writes a part of a prompt into every layer's cache. `offset` tokens of other prompts were written in this step before.
    fn write_prompt(&mut self, scheduler: &mut Scheduler, chunk: PromptChunk, offset: usize) -> Result<()> {
        let tokens = chunk.tokens;
        let base = self.rng.below(FRESH_ROWS);
        let page_size = self.config.mla.page_size;
        let rank = self.config.mla.kv_lora_rank;
        let sequence = scheduler.running_mut(chunk.sequence);
        sequence.rows.extend((base..base + tokens.len()).map(|row| row as u32));
        let slots: Vec<i64> = tokens
            .clone()
            .map(|at| i64::from(sequence.pages[at / page_size]) * page_size as i64 + (at % page_size) as i64)
            .collect();
        // A range of its own: the writes of the prompt before may still read theirs.
        let slot_mapping = self.slots.narrow(0, offset..offset + slots.len())?;
        slot_mapping.write(self.backend, &slots)?;
        for (l, layer) in self.layers.iter().enumerate() {
            let rows = self.kv_prompts.narrow(0, base + l..base + l + slots.len())?;
            let k_pe = layer.k_pe.is_some().then(|| rows.columns(rank..rows.shape()[1])).transpose()?;
            let write = CacheWrite {
                kv_c: &rows.columns(0..rank)?,
                k_pe: k_pe.as_ref(),
                slot_mapping: &slot_mapping,
                kv_scale: self.config.kv_scale,
            };
            write_cache(self.session.stream(), &layer.cache, &write)?;
        }
        Ok(())
    }

    /// Checks `rows` random rows of the step just run against float64, or fewer at Ctrl-C: one query token's output at one head of one
    /// layer each.
    ///
    /// # Errors
    /// What reading results back returns.
    pub(crate) fn verify(&mut self, scheduler: &Scheduler, rows: usize, sum: &mut Verified) -> Result<()> {
        let query_len = self.config.query_len();
        let decode = &scheduler.plan().decode;
        for _ in 0..rows {
            if interrupt::caught() {
                break;
            }
            let seq = self.rng.below(decode.len());
            let token = self.rng.below(query_len);
            let layer = self.rng.below(self.layers.len());
            let head = self.rng.below(self.config.mla.num_heads);
            let row = seq * query_len + token;
            let sequence = &scheduler.running()[decode[seq]];
            let wanted = self.wanted(&sequence.rows[..sequence.cached + 1 + token], row, layer, head);
            let out = self.layers[layer].out.narrow(0, row..row + 1)?.narrow(1, head..head + 1)?;
            let got = rows::read(self.backend, &out)?;
            let error = rows::error(&got, &wanted);
            sum.rows += 1;
            sum.worst = sum.worst.max(error);
            if error > sum.tolerance {
                sum.misses += 1;
                eprintln!(
                    "miss: request {}, token {token} of {query_len}, layer {layer}, head {head}, {} cached tokens: error {error:.2e}",
                    sequence.request,
                    sequence.cached + 1 + token
                );
            }
        }
        Ok(())
    }

    /// Attention by its definition, over the rows that the tokens seen were copied from.
    fn wanted(&self, seen: &[u32], row: usize, layer: usize, head: usize) -> Vec<f64> {
        let SessionConfig { mla, kv_dtype, kv_scale, .. } = self.config;
        let width = mla.head_dim();
        let q = self.q_rows.values(self.q_base + row + layer, head * width..(head + 1) * width);
        let cached_row = |token: usize, to: &mut [f64]| {
            let values = self.kv_rows.values(seen[token] as usize + layer, 0..width);
            for (to, value) in to.iter_mut().zip(values) {
                *to = rows::cached(value, kv_dtype, kv_scale);
            }
        };
        let (scale, softcap) = (f64::from(mla.sm_scale), f64::from(mla.softcap));
        reference::attend(&q, mla.kv_lora_rank, seen.len(), scale, softcap, cached_row).out
    }
}
