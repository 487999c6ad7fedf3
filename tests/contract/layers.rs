//! Layers of one step, each of which writes its own tokens' rows and its queries before they are read.

use latentwave::ops::{CacheWrite, gather_cache, write_cache};
use latentwave::reference;
use latentwave::testing::{nan_byte, poisoned};
use latentwave::{
    DType, DecodeArgs, Error, GraphBackend, KvCache, MlaConfig, MlaDecode, Result, Stream, Tensor, Workspace,
};

use super::numerics::layer;
use crate::common::{Problem, encode, tensor, values};

/// A layer's tensors: a cache whose rows of this step's tokens are still to be written, those rows, and its queries, as a
/// cache of pages of one row.
struct Layer<B: GraphBackend> {
    problem: Problem,
    queries: Tensor<B>,
    cache: Tensor<B>,
    poisoned: Vec<u8>,
    latent: Tensor<B>,
    rope: Tensor<B>,
    out: Tensor<B>,
    lse: Tensor<B>,
}

/// Cache rows of the step's tokens, in the order of its queries; -1 where a sequence is shorter.
fn slots(problem: &Problem) -> Vec<i64> {
    let (page_size, query_len) = (problem.config.page_size as i64, problem.query_len as i64);
    let of_sequence = |(table, &len): (&[i32], &i32)| {
        let tokens = i64::from(len) - query_len..i64::from(len);
        let slot = |at: i64| i64::from(table[(at / page_size) as usize]) * page_size + at % page_size;
        tokens.map(|at| if at < 0 { -1 } else { slot(at) }).collect::<Vec<_>>()
    };
    problem.block_table.chunks(problem.table_width()).zip(&problem.seq_lens).flat_map(of_sequence).collect()
}

impl<B: GraphBackend> Layer<B> {
    fn new(backend: &B, problem: Problem, slots: &[i64]) -> Self {
        let Problem { config, q_dtype, kv_dtype, query_len, .. } = problem.clone();
        let (rank, width, row_bytes) = (config.kv_lora_rank, config.head_dim(), problem.row_bytes());
        let mut poisoned_cache = problem.cache.clone();
        let (mut latent, mut rope) = (Vec::new(), Vec::new());
        for &slot in slots {
            let bytes = slot.max(0) as usize * row_bytes..(slot.max(0) as usize + 1) * row_bytes;
            let row = reference::to_f64(kv_dtype, &problem.cache[bytes.clone()], 1.0);
            latent.extend_from_slice(&row[..rank]);
            rope.extend_from_slice(&row[rank..]);
            if slot >= 0 {
                poisoned_cache[bytes].fill(nan_byte(kv_dtype));
            }
        }
        let rows =
            |width: usize, values: &[f64]| tensor(backend, [slots.len(), width], q_dtype, &encode(q_dtype, values));
        let (batch, heads) = (problem.batch(), config.num_heads);
        Self {
            queries: tensor(backend, [batch * query_len * heads, 1, width], q_dtype, &encode(q_dtype, &problem.q)),
            cache: tensor(backend, [problem.num_pages(), config.page_size, width], kv_dtype, &poisoned_cache),
            poisoned: poisoned_cache,
            latent: rows(rank, &latent),
            rope: rows(width - rank, &rope),
            out: poisoned(backend, [batch, query_len, heads, rank], q_dtype).unwrap(),
            lse: poisoned(backend, [batch, query_len, heads], DType::F32).unwrap(),
            problem,
        }
    }

    /// As before the step.
    fn reset(&self, backend: &B) {
        self.cache.write_bytes(backend, &self.poisoned).unwrap();
        self.out.fill_bytes(backend, 0xFF).unwrap();
        self.lse.fill_bytes(backend, 0xFF).unwrap();
    }
}

/// Where the caller promises that older rows are final, kernels may copy these while the layer before runs, but no row that
/// the step itself writes: of those each layer's are poison until just before it. Nor may they read queries, which are the
/// layer's before until then. Without that promise they may read no row of the cache. Lengths end at, before and after the
/// edges of tiles. Planned for long sequences, so that Hopper's forms that do so serve them, by boxes and row by row.
pub(crate) fn rows_of_the_step_are_read_in_their_turn<B: GraphBackend>(backend: &B, dtype: DType) {
    let fp8 = DType::Fp8E4m3;
    let keys_and_rows =
        [(dtype, 16, 1, 64, "r16"), (dtype, 40, 1, 64, "r64"), (dtype, 20, 3, 24, "r64"), (dtype, 40, 1, 12, "r64")];
    let of_fp8 = [(fp8, 16, 1, 16, "r16"), (fp8, 40, 1, 16, "r64")];
    for (kv_dtype, heads, query_len, page_size, rows) in keys_and_rows.into_iter().chain(of_fp8) {
        let of = |history_final| {
            in_turn(backend, (dtype, kv_dtype), heads, query_len, page_size, &LENS, (100_000, history_final))
        };
        let Some(served) = of(true) else {
            continue;
        };
        if backend.device().arch == "sm_90a" {
            of(false);
            let form = served.rsplit('_').next().unwrap();
            let copies_early = ["f1", "f2", "f10"].contains(&form.trim_end_matches(['g', 's']));
            assert!(copies_early && served.contains(rows), "{kv_dtype}, {heads} heads, {query_len} tokens: {served}");
        }
    }
}

/// The same of what serves few tokens, and a single sequence of any length. Of one type: turns do not depend on it.
pub(crate) fn few_rows_of_the_step_are_read_in_their_turn<B: GraphBackend>(backend: &B, dtype: DType) {
    if dtype != DType::BF16 {
        return;
    }
    let fp8 = DType::Fp8E4m3;
    let cases = [(dtype, 16, 1, 64), (dtype, 20, 3, 24), (dtype, 40, 1, 12), (fp8, 16, 1, 16), (fp8, 40, 1, 16)];
    for (kv_dtype, heads, query_len, page_size) in cases {
        for (lens, max_seq_len) in [(&LENS[..], 0), (&[200], 0), (&[129], 100_000)] {
            in_turn(backend, (dtype, kv_dtype), heads, query_len, page_size, lens, (max_seq_len, true));
        }
    }
}

const LENS: [i32; 7] = [129, 128, 65, 3, 200, 0, 64];

/// Four layers of a step, which are right; what served them, or nothing if the backend does not take the types.
fn in_turn<B: GraphBackend>(
    backend: &B,
    (dtype, kv_dtype): (DType, DType),
    heads: usize,
    query_len: usize,
    page_size: usize,
    lens: &[i32],
    (max_seq_len, history_final): (usize, bool),
) -> Option<String> {
    let decode = MlaDecode::new(backend, layer(heads, page_size), dtype, kv_dtype).ok()?.history_final(history_final);
    let of_seed = |seed| Problem::random(seed, layer(heads, page_size), (dtype, kv_dtype), query_len, lens);
    let first = Problem { max_seq_len, ..of_seed(60) };
    let slots = slots(&first);
    let mut layers: Vec<_> = (60..64)
        .map(|seed| {
            let Problem { cache, q, .. } = of_seed(seed);
            Layer::new(backend, Problem { cache, q, ..first.clone() }, &slots)
        })
        .collect();
    let served = decode.kernels(lens.len(), query_len, first.longest()).unwrap().split.to_string();
    run(backend, &decode, &first, &slots, &mut layers)
        .unwrap_or_else(|error| panic!("{kv_dtype}, {heads} heads, {query_len} tokens, {lens:?}, {served}: {error}"));
    Some(served)
}

fn run<B: GraphBackend>(
    backend: &B,
    decode: &MlaDecode<B>,
    step: &Problem,
    slots: &[i64],
    layers: &mut [Layer<B>],
) -> Result<(), Error> {
    let Problem { config, q_dtype, query_len, causal, kv_scale, .. } = *step;
    let shape = [step.batch(), query_len, config.num_heads, config.head_dim()];
    let q = poisoned(backend, shape, q_dtype)?;
    // Queries come from a kernel, as they do in a model: here from one that gathers rows.
    let num_rows = shape[0] * shape[1] * shape[2];
    let mut q_rows = q.reshape([num_rows, config.head_dim()])?;
    let all_rows = Tensor::from_fn(backend, [1, num_rows], |row| row as i32)?;
    let row_ends = Tensor::from_slice(backend, [2], &[0, num_rows as i32])?;
    let of_rows = MlaConfig { page_size: 1, ..config };
    let block_table = Tensor::from_slice(backend, [step.batch(), step.table_width()], &step.block_table)?;
    let seq_lens = Tensor::from_slice(backend, [step.batch()], &step.seq_lens)?;
    let slot_mapping = Tensor::from_slice(backend, [slots.len()], slots)?;
    let caches = layers.iter().map(|layer| KvCache::joined(&layer.cache, &config)).collect::<Result<Vec<_>>>()?;
    let plan = decode.plan(step.batch(), query_len, step.longest(), step.policy)?;
    let mut workspace = Workspace::new(backend, 1)?;
    workspace.reserve(0, &plan.decode().workspace_views())?;
    workspace.lock();
    let stream = Stream::new(backend)?;
    let mut enqueue = |layers: &mut [Layer<B>]| {
        let width = step.table_width();
        let mut scheduled = decode.schedule(&stream, &plan, &mut workspace, &seq_lens, width, causal)?;
        for (layer, kv_cache) in layers.iter_mut().zip(&caches) {
            let Layer { queries, latent, rope, out, lse, .. } = layer;
            let queries = KvCache::joined(queries, &of_rows)?;
            gather_cache(&stream, &queries, &all_rows, &row_ends, None, 1.0, &mut q_rows)?;
            let write = CacheWrite { kv_c: latent, k_pe: Some(rope), slot_mapping: &slot_mapping, kv_scale };
            write_cache(&stream, kv_cache, &write)?;
            let (q, block_table, seq_lens, lse) = (&q, &block_table, &seq_lens, Some(lse));
            scheduled.attend(DecodeArgs { q, kv_cache, block_table, seq_lens, out, lse, kv_scale, causal })?;
        }
        Ok(())
    };
    let check = |layers: &[Layer<B>], how: &str| {
        for (n, layer) in layers.iter().enumerate() {
            let (out, lse) = (values(backend, &layer.out), values(backend, &layer.lse));
            layer.problem.compare(&out, &lse, &format!("layer {n}, {how}"));
        }
    };
    enqueue(layers)?;
    stream.synchronize()?;
    check(layers, "eager");
    let graph = stream.capture(|| enqueue(layers))?;
    for round in 0..2 {
        layers.iter().for_each(|layer| layer.reset(backend));
        q.fill_bytes(backend, 0xFF)?;
        // SAFETY: all tensors own their memory.
        unsafe { stream.replay(&graph)? };
        stream.synchronize()?;
        check(layers, &format!("replay {round}"));
    }
    Ok(())
}
