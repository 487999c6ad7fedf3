//! One problem on a device: run it, and look at every byte that it wrote.

use std::fmt;
use std::ops::Range;

use latentwave::kernel::Variant;
use latentwave::testing;
use latentwave::{
    DType, DecodeArgs, Error, Graph, GraphBackend, KvCache, MlaDecode, Result, Stream, Tensor, Workspace, reference,
};

use super::problem::{Block, Problem};
use crate::{interrupt, rows};

/// What outputs and scratch hold before a launch: NaN in every float type.
const POISON: u8 = 0xff;

/// What a problem came to.
#[derive(Debug)]
pub(super) struct Passed {
    pub(super) kernel: Variant,
    pub(super) launches: usize,
    pub(super) errors: Errors,
}

/// Largest errors: of an output as a share of its row's largest element, of an LSE as a share of it, absolute below 1.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Errors {
    pub(super) out: f64,
    /// `||out - reference|| / ||reference||` of all rows that were checked of a launch, and of one row.
    pub(super) norm: f64,
    pub(super) row_norm: f64,
    pub(super) lse: f64,
}

impl Errors {
    pub(super) fn merge(&mut self, other: Self) {
        self.out = self.out.max(other.out);
        self.norm = self.norm.max(other.norm);
        self.row_norm = self.row_norm.max(other.row_norm);
        self.lse = self.lse.max(other.lse);
    }
}

/// Why a problem did not pass.
#[derive(Debug)]
pub(super) enum Fault {
    /// A result is wrong, in words.
    Wrong(String),
    /// Something of it could not be run: what, and why.
    Failed(String, Error),
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Wrong(miss) => f.write_str(miss),
            Self::Failed(what, _) => write!(f, "{what} could not be run"),
        }
    }
}

/// Runs a problem: its rounds one after another, on the same scratch, poisoned only before the first. `None` at Ctrl-C: a
/// problem that was not checked as a whole does not count.
///
/// # Errors
/// What is wrong with a result, or what the device said.
pub(super) fn run<B: GraphBackend>(backend: &B, problem: &Problem) -> Result<Option<Passed>, Fault> {
    let failed = |what: &str, error| Fault::Failed(what.to_owned(), error);
    let stream = Stream::new(backend).map_err(|error| failed("its set-up", error))?;
    let mut device = Device::new(backend, problem).map_err(|error| failed("its set-up", error))?;
    let mut errors = Errors::default();
    for round in 0..problem.rounds.len() {
        if interrupt::caught() {
            return Ok(None);
        }
        let written = device.round(backend, &stream, problem, round);
        let (out, lse) = written.map_err(|error| failed(&format!("launch {round}"), error))?;
        errors.merge(check(problem, round, out, lse).map_err(|miss| Fault::Wrong(format!("launch {round}: {miss}")))?);
    }
    let passed = Passed { kernel: device.plan.kernels().split, launches: problem.rounds.len(), errors };
    Ok((!interrupt::caught()).then_some(passed))
}

/// A problem's tensors.
struct Device<B: GraphBackend> {
    decode: MlaDecode<B>,
    plan: latentwave::ops::Plan<B>,
    workspace: Workspace<B>,
    q: Tensor<B>,
    kv_cache: KvCache<B>,
    table: Tensor<B>,
    seq_lens: Tensor<B>,
    out: Tensor<B>,
    lse: Tensor<B>,
    /// What layers before the last write.
    passed: Tensor<B>,
    graph: Option<Graph<B>>,
}

impl<B: GraphBackend> Device<B> {
    fn new(backend: &B, problem: &Problem) -> Result<Self> {
        let Problem { config, q_dtype, kv_dtype, batch, query_len, policy, planned, .. } = *problem;
        let decode = MlaDecode::new(backend, config, q_dtype, kv_dtype)?;
        let decode = decode.portable(problem.portable).history_final(problem.history_final);
        let plan = decode.plan(batch, query_len, planned, policy)?;
        let mut workspace = Workspace::new(backend, 1)?;
        workspace.reserve(0, &plan.decode().workspace_views())?;
        workspace.lock();
        // SAFETY: nothing uses it yet.
        unsafe { workspace.fill_bytes(0, POISON)? };

        let cache = |columns: Range<usize>| -> Result<Tensor<B>> {
            let width = columns.len();
            let shape = [problem.num_pages, config.page_size + problem.page_room, width + problem.slot_room];
            let whole = Tensor::from_bytes(backend, shape, kv_dtype, &problem.cache_bytes(columns))?;
            whole.narrow(1, 0..config.page_size)?.columns(0..width)
        };
        let (rank, width) = (config.kv_lora_rank, config.head_dim());
        let kv_cache = match problem.split_cache && width > rank {
            true => KvCache::split(&cache(0..rank)?, Some(&cache(rank..width)?))?,
            false => KvCache::joined(&cache(0..width)?, &config)?,
        };
        let q = Tensor::from_bytes(backend, problem.q_block.whole, q_dtype, &problem.query_bytes())?;
        Ok(Self {
            q: view(&q, &problem.q_block)?,
            kv_cache,
            table: Tensor::empty(backend, [batch, problem.table_stride], DType::I32)?,
            seq_lens: Tensor::empty(backend, [batch], DType::I32)?,
            out: Tensor::empty(backend, problem.out_block.whole, q_dtype)?,
            lse: Tensor::empty(backend, problem.lse_block.whole, DType::F32)?,
            passed: Tensor::empty(backend, problem.out_block.whole, q_dtype)?,
            decode,
            plan,
            workspace,
            graph: None,
        })
    }

    fn enqueue(&mut self, stream: &Stream<B>, problem: &Problem) -> Result<()> {
        let Self { decode, plan, workspace, q, kv_cache, seq_lens, .. } = self;
        let block_table = &self.table.columns(0..problem.table_width)?;
        let (width, causal, kv_scale) = (problem.table_width, problem.causal, problem.kv_scale);
        let mut step = decode.schedule(stream, plan, workspace, seq_lens, width, causal)?;
        for layer in 1..=problem.layers {
            let last = layer == problem.layers;
            let out = &mut view(if last { &self.out } else { &self.passed }, &problem.out_block)?;
            let lse = &mut view(&self.lse, &problem.lse_block)?;
            let lse = (last && problem.lse).then_some(lse);
            step.attend(DecodeArgs { q, kv_cache, block_table, seq_lens, out, lse, kv_scale, causal })?;
        }
        Ok(())
    }

    /// Launches or replays a round. Returns the bytes of the whole outputs and LSE.
    fn round(
        &mut self,
        backend: &B,
        stream: &Stream<B>,
        problem: &Problem,
        round: usize,
    ) -> Result<(Vec<u8>, Vec<u8>)> {
        if problem.graph && self.graph.is_none() {
            self.graph = Some(stream.capture(|| self.enqueue(stream, problem))?);
        }
        let round = &problem.rounds[round];
        self.table.write(backend, &round.block_table)?;
        self.seq_lens.write(backend, &round.seq_lens)?;
        self.out.fill_bytes(backend, POISON)?;
        self.lse.fill_bytes(backend, POISON)?;
        match &self.graph {
            // SAFETY: all tensors own their memory.
            Some(graph) => unsafe { stream.replay(graph)? },
            None => self.enqueue(stream, problem)?,
        }
        stream.synchronize()?;
        Ok((testing::bytes(backend, &self.out)?, testing::bytes(backend, &self.lse)?))
    }
}

/// The block of a tensor that holds the whole.
fn view<B: GraphBackend, const N: usize>(whole: &Tensor<B>, block: &Block<N>) -> Result<Tensor<B>> {
    (0..N).try_fold(whole.clone(), |view, d| view.narrow(d, block.from[d]..block.from[d] + block.shape[d]))
}

/// Takes a row of a block out of the whole's bytes, where poison is left.
fn take<const N: usize>(whole: &mut [u8], dtype: DType, block: &Block<N>, row: usize) -> Vec<f64> {
    let Range { start, end } = block.row(row);
    let bytes = &mut whole[start * dtype.size()..end * dtype.size()];
    let values = reference::to_f64(dtype, bytes, 1.0);
    bytes.fill(POISON);
    values
}

/// Looks at everything that a launch wrote: every element is a number, rows that see nothing are empty, some rows are compared
/// with float64 (until Ctrl-C), and nothing beside the outputs has changed.
///
/// # Errors
/// The first fault in words.
pub(super) fn check(problem: &Problem, round: usize, mut out: Vec<u8>, mut lse: Vec<u8>) -> Result<Errors, String> {
    let rows = problem.rows();
    let heads = problem.config.num_heads;
    let name = |row: usize| {
        let (token, head) = (row / heads, row % heads);
        format!("sequence {}, query token {}, head {head}", token / problem.query_len, token % problem.query_len)
    };
    let out_rows: Vec<_> = (0..rows).map(|row| take(&mut out, problem.q_dtype, &problem.out_block, row)).collect();
    let lse_rows: Vec<f64> = match problem.lse {
        true => (0..rows / heads).flat_map(|row| take(&mut lse, DType::F32, &problem.lse_block, row)).collect(),
        false => Vec::new(),
    };
    for (what, bytes) in [("out", &out), ("LSE", &lse)] {
        if let Some(at) = bytes.iter().position(|byte| *byte != POISON) {
            return Err(format!("byte {at} was written, which lies outside the view `{what}`"));
        }
    }
    for (row, values) in out_rows.iter().enumerate() {
        if let Some(column) = values.iter().position(|x| !x.is_finite()) {
            return Err(format!("out is {} at column {column} of {}", values[column], name(row)));
        }
    }
    if let Some(row) = lse_rows.iter().position(|x| x.is_nan() || *x == f64::INFINITY) {
        return Err(format!("LSE is {} at {}", lse_rows[row], name(row)));
    }

    let (mut of_rows, mut lse_most) = (rows::Errors::default(), 0.0_f64);
    let reference = problem.reference(round);
    for row in problem.checked_rows(round) {
        if interrupt::caught() {
            break;
        }
        let (got, want) = (&out_rows[row], reference(row));
        let empty = want.lse == f64::NEG_INFINITY;
        if empty && (got.iter().any(|x| *x != 0.0) || lse_rows.get(row).is_some_and(|lse| *lse != want.lse)) {
            return Err(format!("{} sees nothing, but is not 0 with an LSE of -inf", name(row)));
        }
        let of_row = rows::Errors::of_row(got, &want.out);
        let (error, norm) = (of_row.element, of_row.row_norm);
        if !empty && (error > rows::tolerance(problem.q_dtype) || norm > rows::norm_tolerance(problem.q_dtype)) {
            return Err(format!(
                "out of {} is wrong by {error:.2e} of its largest element, {norm:.2e} in norm",
                name(row)
            ));
        }
        let lse_error =
            lse_rows.get(row).filter(|_| !empty).map_or(0.0, |lse| (lse - want.lse).abs() / want.lse.abs().max(1.0));
        if lse_error > LSE_TOLERANCE {
            return Err(format!("LSE of {} is {}, not {}", name(row), lse_rows[row], want.lse));
        }
        of_rows.merge(of_row);
        lse_most = lse_most.max(lse_error);
    }
    Ok(Errors { out: of_rows.element, norm: of_rows.norm(), row_norm: of_rows.row_norm, lse: lse_most })
}

/// Logits are sums in float32 of exact products, and their exponentials good to some 2e-7.
const LSE_TOLERANCE: f64 = 1e-4;

#[cfg(test)]
mod tests {
    use super::super::problem::Size;
    use super::*;

    /// A problem with an LSE and room around its outputs, and what a right launch writes.
    fn right() -> (Problem, Vec<u8>, Vec<u8>) {
        let only_bf16 = |q, kv, _| (q, kv) == (DType::BF16, DType::BF16);
        let drawn = (0..).map(|index| Problem::draw(5, index, &Size::SMALL, None, only_bf16));
        let suits = |problem: &Problem| {
            let seen = problem.rounds[0].seq_lens.iter().all(|len| *len as usize > problem.query_len);
            problem.lse && seen && problem.out_block.whole[3] > 512 && problem.rows() > 2
        };
        let problem = drawn.into_iter().find(suits).unwrap();
        let fill = |len: usize| vec![POISON; len];
        let mut out = fill(problem.out_block.whole.iter().product::<usize>() * 2);
        let mut lse = fill(problem.lse_block.whole.iter().product::<usize>() * 4);
        let reference = problem.reference(0);
        for row in 0..problem.rows() {
            let want = reference(row);
            let at = problem.out_block.row(row).start * 2;
            for (column, x) in want.out.iter().enumerate() {
                let bits = half::bf16::from_f64(*x).to_le_bytes();
                out[at + column * 2..][..2].copy_from_slice(&bits);
            }
            let at = problem.lse_block.row(row / problem.config.num_heads).start + row % problem.config.num_heads;
            lse[at * 4..][..4].copy_from_slice(&(want.lse as f32).to_le_bytes());
        }
        drop(reference);
        (problem, out, lse)
    }

    #[test]
    fn a_right_result_passes_and_every_fault_is_found() {
        let (problem, out, lse) = right();
        let errors = check(&problem, 0, out.clone(), lse.clone()).unwrap();
        assert!(errors.out > 0.0 && errors.out < 4e-3 && errors.lse < 1e-6, "{errors:?}");
        // What rounding to bf16 costs a row of these numbers.
        assert!((1e-3..2.2e-3).contains(&errors.norm) && errors.row_norm >= errors.norm, "{errors:?}");

        let row = problem.out_block.row(1);
        let fault = |at: usize, bytes: [u8; 2]| {
            let mut out = out.clone();
            out[at..at + 2].copy_from_slice(&bytes);
            check(&problem, 0, out, lse.clone()).unwrap_err()
        };
        assert!(fault(row.start * 2 + 10, [POISON; 2]).contains("NaN"), "an element that was not written");
        let beside = if problem.out_block.from[3] > 0 { row.start - 1 } else { row.end };
        assert!(fault(beside * 2, [0, 0]).contains("outside the view `out`"));
        let first = problem.out_block.row(0).start * 2;
        assert!(fault(first, half::bf16::from_f32(9.0).to_le_bytes()).contains("is wrong by"));

        // A fault of a row's norm that is allowed still shows: every second element of the first one rounded up.
        let mut larger = out.clone();
        for bits in larger[first..first + 2 * problem.config.kv_lora_rank].chunks_mut(4) {
            let value = half::bf16::from_le_bytes([bits[0], bits[1]]);
            bits[..2].copy_from_slice(&half::bf16::from_f32(value.to_f32() * (1.0 + 1.0 / 256.0)).to_le_bytes());
        }
        let more = check(&problem, 0, larger, lse.clone()).unwrap();
        assert!(more.row_norm > 3.5e-3 && more.norm > errors.norm && more.norm < more.row_norm, "{more:?}");

        let mut other = lse.clone();
        let at = problem.lse_block.row(0).start * 4;
        other[at..at + 4].copy_from_slice(&99.0_f32.to_le_bytes());
        assert!(check(&problem, 0, out, other).unwrap_err().contains("LSE of sequence 0"));
    }
}
