//! A small engine: what a test needs around a session, with random data and a float64 reference for any of its rows.

use half::bf16;
use latentwave::reference::attend;
use latentwave::session::{DecodeSession, SessionConfig, Step, StepBatch, StepReport};
use latentwave::testing::SplitMix64;
use latentwave::{DType, GraphBackend, KvCache, MlaConfig, Result, Stream, Tensor};

/// Heads of the engine's layers.
pub const HEADS: usize = 8;

/// A session, `layers` caches of random pages, random queries, and poisoned outputs.
pub struct Engine<B: GraphBackend> {
    pub backend: B,
    pub session: DecodeSession<B>,
    pub layers: Vec<Layer<B>>,
    pub new_rows: Tensor<B>,
    new_host: Vec<f64>,
}

/// One layer's tensors, and the host's copy of its inputs.
pub struct Layer<B: GraphBackend> {
    pub q: Tensor<B>,
    pub cache: KvCache<B>,
    pub out: Tensor<B>,
    pub lse: Tensor<B>,
    q_host: Vec<f64>,
    kv_host: Vec<f64>,
}

/// A configuration of bf16 with pages of 16 tokens.
pub fn config(max_num_seqs: usize, num_spec_tokens: usize) -> SessionConfig {
    let mla = MlaConfig::deepseek(HEADS, 16);
    SessionConfig { num_spec_tokens, ..SessionConfig::new(mla, max_num_seqs, 512, 32 * max_num_seqs) }
}

fn random(seed: u64, len: usize) -> (Vec<bf16>, Vec<f64>) {
    let random = SplitMix64::new(seed);
    let values: Vec<f64> = (0..len as u64).map(|i| random.grid(i)).collect();
    (values.iter().map(|&value| bf16::from_f64(value)).collect(), values)
}

impl<B: GraphBackend> Engine<B> {
    pub fn new(backend: &B, session: DecodeSession<B>, num_layers: usize, seed: u64) -> Result<Self> {
        let config = session.config().clone();
        let (mla, rows) = (config.mla, config.max_decode_tokens());
        let layers = (0..num_layers as u64).map(|layer| {
            let (q, q_host) = random(seed * 100 + layer, rows * mla.num_heads * mla.head_dim());
            let (kv, kv_host) = random(seed * 100 + 50 + layer, config.num_pages * mla.page_size * mla.head_dim());
            let kv = Tensor::from_slice(backend, [config.num_pages, mla.page_size, mla.head_dim()], &kv)?;
            let out = Tensor::empty(backend, [rows, mla.num_heads, mla.kv_lora_rank], DType::BF16)?;
            let lse = Tensor::empty(backend, [rows, mla.num_heads], DType::F32)?;
            let q = Tensor::from_slice(backend, [rows, mla.num_heads, mla.head_dim()], &q)?;
            Ok(Layer { q, cache: KvCache::joined(&kv, &mla)?, out, lse, q_host, kv_host })
        });
        let layers = layers.collect::<Result<_>>()?;
        let (new_rows, new_host) = random(seed * 100 + 99, rows * mla.head_dim());
        let new_rows = Tensor::from_slice(backend, [rows, mla.head_dim()], &new_rows)?;
        let engine = Self { backend: backend.clone(), session, layers, new_rows, new_host };
        engine.poison()?;
        Ok(engine)
    }

    /// Fills outputs with NaN: what a step does not write shows.
    pub fn poison(&self) -> Result<()> {
        self.layers.iter().try_for_each(|layer| {
            layer.out.fill_bytes(&self.backend, 0xFF)?;
            layer.lse.fill_bytes(&self.backend, 0xFF)
        })
    }

    pub fn capture(&mut self) -> Result<latentwave::session::CaptureReport> {
        self.capture_with(|_| Ok(()))
    }

    /// As [`Engine::capture`]; `meddle` is called behind what is enqueued, in the eager run too.
    pub fn capture_with(
        &mut self,
        mut meddle: impl FnMut(&Stream<B>) -> Result<()>,
    ) -> Result<latentwave::session::CaptureReport> {
        let Self { session, layers, new_rows, .. } = self;
        session.capture(|step| {
            enqueue(step, layers, new_rows)?;
            meddle(step.stream())
        })
    }

    pub fn step(&mut self, query_len: usize, lens: &[i32], tables: &[Vec<i32>]) -> Result<StepReport> {
        let Self { session, layers, new_rows, .. } = self;
        let report =
            session.step(&StepBatch::decode(query_len, lens, tables), |step| enqueue(step, layers, new_rows))?;
        session.synchronize()?;
        self.note_written(query_len, lens, tables);
        Ok(report)
    }

    /// Keeps the host's copy of the cache equal to what the step's cache write did.
    fn note_written(&mut self, query_len: usize, lens: &[i32], tables: &[Vec<i32>]) {
        let mla = self.session.config().mla;
        let width = mla.head_dim();
        for (row, new) in self.new_host.chunks(width).take(lens.len() * query_len).enumerate() {
            let (seq, token) = (row / query_len, row % query_len);
            let position = lens[seq] - query_len as i32 + token as i32;
            if position < 0 {
                continue;
            }
            let slot = slot_of(&tables[seq], position as usize, mla.page_size);
            for layer in &mut self.layers {
                layer.kv_host[slot * width..][..width].copy_from_slice(new);
            }
        }
    }

    /// Compares every row of a step with float64, and padding rows with emptiness. `rows` is what the step ran with.
    pub fn verify(&self, query_len: usize, lens: &[i32], tables: &[Vec<i32>], rows: usize) {
        let mla = self.session.config().mla;
        let (width, rank) = (mla.head_dim(), mla.kv_lora_rank);
        for (index, layer) in self.layers.iter().enumerate() {
            let out: Vec<bf16> = layer.out.to_vec(&self.backend).expect("out");
            let lse: Vec<f32> = layer.lse.to_vec(&self.backend).expect("lse");
            for row in 0..rows {
                let (seq, token) = (row / query_len, row % query_len);
                let len = lens.get(seq).copied().unwrap_or(0);
                let extent = if len == 0 { 0 } else { (len - query_len as i32 + 1 + token as i32).max(0) as usize };
                for head in 0..mla.num_heads {
                    let at = row * mla.num_heads + head;
                    let q = &layer.q_host[at * width..][..width];
                    let want = attend(q, rank, extent, f64::from(mla.sm_scale), 0.0, |position, row| {
                        let slot = slot_of(&tables[seq], position, mla.page_size);
                        row.copy_from_slice(&layer.kv_host[slot * width..][..width]);
                    });
                    let got = &out[at * rank..][..rank];
                    let context = format!("layer {index} row {row} head {head} extent {extent}");
                    match extent {
                        0 => assert_eq!(lse[at], f32::NEG_INFINITY, "{context}"),
                        _ => {
                            assert!((f64::from(lse[at]) - want.lse).abs() < 2e-3, "{context}: {} {}", lse[at], want.lse)
                        }
                    }
                    // Partial outputs and weights are rounded to 16 bits as well: errors are shares of a row's largest element.
                    let bound = 1e-2 * want.out.iter().fold(0.5, |most: f64, x| most.max(x.abs()));
                    for (got, want) in got.iter().zip(&want.out) {
                        assert!((got.to_f64() - want).abs() <= bound, "{context}: {got} {want}");
                    }
                }
            }
        }
    }
}

fn slot_of(table: &[i32], position: usize, page_size: usize) -> usize {
    table[position / page_size] as usize * page_size + position % page_size
}

fn enqueue<B: GraphBackend>(step: &mut Step<'_, B>, layers: &mut [Layer<B>], new_rows: &Tensor<B>) -> Result<()> {
    let rank = step_rank(layers);
    let (kv_c, k_pe) = (new_rows.columns(0..rank)?, new_rows.columns(rank..new_rows.shape()[1])?);
    for layer in layers {
        step.write_cache(&kv_c, Some(&k_pe), &layer.cache)?;
        step.decode(&layer.q, &layer.cache, &mut layer.out, Some(&mut layer.lse))?;
    }
    Ok(())
}

fn step_rank<B: GraphBackend>(layers: &[Layer<B>]) -> usize {
    layers.first().map_or(0, |layer| layer.cache.kv_lora_rank())
}

/// Lengths and shuffled, disjoint tables for `lens.len()` sequences out of `num_pages` pages.
pub fn tables(lens: &[i32], page_size: usize, num_pages: usize, seed: u64) -> Vec<Vec<i32>> {
    let mut pages = SplitMix64::new(seed).permutation(num_pages).into_iter().map(|page| page as i32);
    lens.iter().map(|&len| pages.by_ref().take((len as usize).div_ceil(page_size)).collect()).collect()
}
