//! What the numeric suites share: a decode problem that runs on any backend and in float64.
#![allow(dead_code)] // Each suite uses its part.

pub(crate) mod step;

use half::{bf16, f16};
use latentwave::reference::{self, PagedStep};
use latentwave::testing::{self, SplitMix64, Tolerance, check_close, nan_byte, poisoned};
use latentwave::{
    Backend, DType, DecodeArgs, KvCache, MlaConfig, MlaDecode, Result, SplitPolicy, Stream, Tensor, Workspace,
};

/// Values as elements of a type, rounded to nearest even.
pub(crate) fn encode(dtype: DType, values: &[f64]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|&x| match dtype {
            DType::F32 => (x as f32).to_le_bytes().to_vec(),
            DType::F16 => f16::from_f64(x).to_le_bytes().to_vec(),
            DType::BF16 => bf16::from_f64(x).to_le_bytes().to_vec(),
            DType::Fp8E4m3 | DType::Fp8E4m3Fnuz => vec![latentwave::fp8::from_f32(dtype, x as f32)],
            other => panic!("no float type: {other}"),
        })
        .collect()
}

/// A tensor of these bytes.
pub(crate) fn tensor<B: Backend, const N: usize>(
    backend: &B,
    shape: [usize; N],
    dtype: DType,
    bytes: &[u8],
) -> Tensor<B> {
    Tensor::from_bytes(backend, shape, dtype, bytes).expect("a tensor of the right size")
}

/// A contiguous tensor's values as float64; an fp8 tensor's without their scale.
pub(crate) fn values<B: Backend>(backend: &B, tensor: &Tensor<B>) -> Vec<f64> {
    reference::to_f64(tensor.dtype(), &bytes(backend, tensor), 1.0)
}

/// A contiguous tensor's bytes.
pub(crate) fn bytes<B: Backend>(backend: &B, tensor: &Tensor<B>) -> Vec<u8> {
    testing::bytes(backend, tensor).expect("a read")
}

/// One decode step.
#[derive(Clone)]
pub(crate) struct Problem {
    pub(crate) config: MlaConfig,
    pub(crate) q_dtype: DType,
    pub(crate) kv_dtype: DType,
    pub(crate) query_len: usize,
    pub(crate) causal: bool,
    pub(crate) kv_scale: f32,
    pub(crate) policy: SplitPolicy,
    /// `[batch, query_len, num_heads, head_dim]`.
    pub(crate) q: Vec<f64>,
    /// `[num_pages, page_size, row bytes]`.
    pub(crate) cache: Vec<u8>,
    /// `[batch, table_width]`.
    pub(crate) block_table: Vec<i32>,
    pub(crate) seq_lens: Vec<i32>,
    /// What the plan is made for; 0 for the longest sequence.
    pub(crate) max_seq_len: usize,
}

/// What a step wrote.
#[derive(Clone, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) out: Vec<f64>,
    pub(crate) lse: Vec<f64>,
    /// The bits of both, for exact comparison.
    pub(crate) bits: Vec<u8>,
    /// LSE of each slot's rows, where the plan has slots.
    pub(crate) partial_lse: Vec<f64>,
}

impl Problem {
    /// Random queries and pages; each sequence has pages of its own in random order, unused table entries are -1.
    pub(crate) fn random(
        seed: u64,
        config: MlaConfig,
        dtypes: (DType, DType),
        query_len: usize,
        seq_lens: &[i32],
    ) -> Self {
        let page_size = config.page_size;
        let pages_of = |len: i32| (len.max(0) as usize).div_ceil(page_size);
        let table_width = seq_lens.iter().map(|&len| pages_of(len)).max().unwrap_or(0).max(1) + 1;
        let num_pages = seq_lens.iter().map(|&len| pages_of(len)).sum::<usize>() + 3;
        let mut free = SplitMix64::new(seed ^ 0xA5A5).permutation(num_pages).into_iter();
        let mut block_table = vec![-1; seq_lens.len() * table_width];
        for (row, &len) in block_table.chunks_mut(table_width).zip(seq_lens) {
            for entry in &mut row[..pages_of(len)] {
                *entry = free.next().expect("enough pages") as i32;
            }
        }
        let (q_numbers, kv_numbers) = (SplitMix64::new(4 * seed), SplitMix64::new(4 * seed + 1));
        let rows = seq_lens.len() * query_len * config.num_heads;
        let kv: Vec<f64> =
            (0..(num_pages * page_size * config.head_dim()) as u64).map(|i| kv_numbers.grid(i)).collect();
        Self {
            config,
            q_dtype: dtypes.0,
            kv_dtype: dtypes.1,
            query_len,
            causal: query_len > 1,
            kv_scale: 1.0,
            policy: SplitPolicy::Auto,
            q: (0..(rows * config.head_dim()) as u64).map(|i| q_numbers.grid(i)).collect(),
            cache: encode(dtypes.1, &kv),
            block_table,
            seq_lens: seq_lens.to_vec(),
            max_seq_len: 0,
        }
    }

    pub(crate) fn batch(&self) -> usize {
        self.seq_lens.len()
    }

    pub(crate) fn table_width(&self) -> usize {
        self.block_table.len() / self.batch().max(1)
    }

    pub(crate) fn row_bytes(&self) -> usize {
        if self.kv_dtype == DType::U8 { 656 } else { self.config.head_dim() * self.kv_dtype.size() }
    }

    pub(crate) fn num_pages(&self) -> usize {
        self.cache.len() / (self.config.page_size * self.row_bytes())
    }

    pub(crate) fn longest(&self) -> usize {
        let longest = self.seq_lens.iter().copied().max().unwrap_or(0).max(0) as usize;
        self.max_seq_len.max(longest).max(1)
    }

    /// Sets every cache slot that no sequence addresses to NaN.
    pub(crate) fn poison_unused_slots(&mut self) {
        let page_size = self.config.page_size;
        let mut used = vec![false; self.num_pages() * page_size];
        for (table, &len) in self.block_table.chunks(self.table_width()).zip(&self.seq_lens) {
            for j in 0..len.max(0) as usize {
                used[table[j / page_size] as usize * page_size + j % page_size] = true;
            }
        }
        let (row_bytes, nan) = (self.row_bytes(), nan_byte(self.kv_dtype));
        for (row, used) in self.cache.chunks_mut(row_bytes).zip(used) {
            if !used {
                row.fill(nan);
            }
        }
    }

    /// The cache as the kernels take it.
    pub(crate) fn kv_cache<B: Backend>(&self, backend: &B) -> Result<KvCache<B>> {
        let elements = self.row_bytes() / self.kv_dtype.size();
        let shape = [self.num_pages(), self.config.page_size, elements];
        let cache = Tensor::from_bytes(backend, shape, self.kv_dtype, &self.cache)?;
        if self.kv_dtype == DType::U8 { KvCache::ds_mla(&cache) } else { KvCache::joined(&cache, &self.config) }
    }

    /// Runs the step, as two layers over the same inputs that must write the same bits. Outputs and scratch are poisoned first.
    pub(crate) fn run<B: Backend>(&self, backend: &B) -> Result<Outcome> {
        self.run_with_lens(backend, &self.seq_lens)
    }

    /// As [`Problem::run`], planned for the problem's own lengths but with these on the device.
    pub(crate) fn run_with_lens<B: Backend>(&self, backend: &B, seq_lens: &[i32]) -> Result<Outcome> {
        let decode = MlaDecode::new(backend, self.config, self.q_dtype, self.kv_dtype)?;
        let plan = decode.plan(self.batch(), self.query_len, self.longest(), self.policy)?;
        let (batch, heads, rank) = (self.batch(), self.config.num_heads, self.config.kv_lora_rank);
        let shape = [batch, self.query_len, heads, self.config.head_dim()];
        let q = tensor(backend, shape, self.q_dtype, &encode(self.q_dtype, &self.q));
        let kv_cache = self.kv_cache(backend)?;
        let block_table = Tensor::from_slice(backend, [batch, self.table_width()], &self.block_table)?;
        let seq_lens = Tensor::from_slice(backend, [batch], seq_lens)?;
        let out_of = || poisoned(backend, [batch, self.query_len, heads, rank], self.q_dtype);
        let lse_of = || poisoned(backend, [batch, self.query_len, heads], DType::F32);
        let mut layers = [(out_of()?, lse_of()?), (out_of()?, lse_of()?)];
        let mut workspace = Workspace::new(backend, 1)?;
        let [_, partial_lse] = scratch(backend, plan.decode(), &mut workspace)?;

        let stream = Stream::new(backend)?;
        let mut step = decode.schedule(&stream, &plan, &mut workspace, &seq_lens, self.table_width(), self.causal)?;
        for (out, lse) in &mut layers {
            step.attend(DecodeArgs {
                q: &q,
                kv_cache: &kv_cache,
                block_table: &block_table,
                seq_lens: &seq_lens,
                out,
                lse: Some(lse),
                kv_scale: self.kv_scale,
                causal: self.causal,
            })?;
        }
        stream.synchronize()?;
        let [bits, again] = layers.each_ref().map(|(out, lse)| [bytes(backend, out), bytes(backend, lse)].concat());
        assert!(bits == again, "the second layer's results differ from the first's");
        let [(out, lse), _] = &layers;
        Ok(Outcome {
            out: values(backend, out),
            lse: values(backend, lse),
            bits,
            partial_lse: values(backend, &partial_lse),
        })
    }

    /// The step in float64 over the rounded inputs: outputs and LSE.
    pub(crate) fn reference(&self) -> (Vec<f64>, Vec<f64>) {
        let kv = match self.kv_dtype {
            DType::U8 => self.cache.chunks(656).flat_map(reference::ds_mla_to_f64).collect(),
            dtype => reference::to_f64(dtype, &self.cache, f64::from(self.kv_scale)),
        };
        let q = reference::to_f64(self.q_dtype, &encode(self.q_dtype, &self.q), 1.0);
        let step = PagedStep {
            q: &q,
            kv: &kv,
            block_table: &self.block_table,
            seq_lens: &self.seq_lens,
            query_len: self.query_len,
            num_heads: self.config.num_heads,
            kv_lora_rank: self.config.kv_lora_rank,
            rope_dim: self.config.qk_rope_head_dim,
            page_size: self.config.page_size,
            sm_scale: f64::from(self.config.sm_scale),
            softcap: f64::from(self.config.softcap),
            causal: self.causal,
        };
        step.all()
    }

    /// Runs the step and compares it with float64.
    #[track_caller]
    pub(crate) fn check<B: Backend>(&self, backend: &B, what: &str) -> Outcome {
        let outcome = self.run(backend).unwrap_or_else(|error| panic!("{what}: {error}"));
        self.compare(&outcome.out, &outcome.lse, what);
        outcome
    }

    /// Compares a result with float64.
    #[track_caller]
    pub(crate) fn compare(&self, out: &[f64], lse: &[f64], what: &str) {
        let (want_out, want_lse) = self.reference();
        check_close(&format!("{what}: out"), out, &want_out, &tolerance(self.q_dtype)).unwrap();
        check_close(&format!("{what}: LSE"), lse, &want_lse, &lse_tolerance(self.q_dtype)).unwrap();
    }
}

/// Reserves a workspace for a plan, poisons it, and gives tensors over the partial outputs and the partial LSE.
pub(crate) fn scratch<B: Backend>(
    backend: &B,
    plan: &latentwave::DecodePlan,
    workspace: &mut Workspace<B>,
) -> Result<[Tensor<B>; 2]> {
    let views = plan.workspace_views();
    let addresses = workspace.views(0, &views)?;
    let [_, partial_out, partial_lse] = std::array::from_fn(|i| {
        // As words of 32 bits, whatever they hold.
        let shape = [views[i] / 4];
        // SAFETY: the view has this size, and the workspace outlives the test's use of the tensor.
        unsafe { Tensor::<B>::from_raw(addresses[i], DType::F32, &shape, &[1]) }.expect("a view")
    });
    for view in [&partial_out, &partial_lse] {
        view.fill_bytes(backend, 0xFF)?;
    }
    Ok([partial_out, partial_lse])
}

/// What an output of this type may differ by, for cached values below 2. With `u` half a unit in the last place of a number just above
/// 1, an element may be off by 2 `u` for weights that were rounded, by `u` times itself as the result and by `u` times its parts,
/// which seldom exceed it by much; few are, so all together are held to `u`.
pub(crate) fn tolerance(dtype: DType) -> Tolerance {
    let u = match dtype {
        DType::F32 => return Tolerance { abs: 2e-5, rel: 2e-5, frobenius: 1e-5 },
        DType::F16 => 2_f64.powi(-11),
        _ => 2_f64.powi(-8),
    };
    Tolerance { abs: 4.0 * u, rel: 4.0 * u, frobenius: u }
}

/// What an LSE may differ by when queries have this type.
pub(crate) fn lse_tolerance(dtype: DType) -> Tolerance {
    if dtype == DType::F32 {
        Tolerance { abs: 2e-5, rel: 1e-6, frobenius: f64::INFINITY }
    } else {
        Tolerance::abs(5e-3)
    }
}
