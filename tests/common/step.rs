//! A decode step that stays on the device, to be captured and replayed.

use latentwave::testing::poisoned;
use latentwave::{DType, DecodeArgs, Graph, GraphBackend, KvCache, MlaDecode, Stream, Tensor, Workspace};

use super::{Problem, bytes, encode, tensor};

/// A step's tensors on the device, all of them kept in place from replay to replay.
pub(crate) struct Step<B: GraphBackend> {
    decode: MlaDecode<B>,
    plan: latentwave::ops::Plan<B>,
    workspace: Workspace<B>,
    q: Tensor<B>,
    kv_cache: KvCache<B>,
    block_table: Tensor<B>,
    seq_lens: Tensor<B>,
    pub(crate) out: Tensor<B>,
    pub(crate) lse: Tensor<B>,
}

impl<B: GraphBackend> Step<B> {
    /// The problem's tensors, with a workspace that is reserved and locked.
    pub(crate) fn new(backend: &B, problem: &Problem) -> Self {
        let Problem { config, q_dtype, kv_dtype, query_len, policy, .. } = problem.clone();
        let decode = MlaDecode::new(backend, config, q_dtype, kv_dtype).unwrap();
        let plan = decode.plan(problem.batch(), query_len, problem.longest(), policy).unwrap();
        let mut workspace = Workspace::new(backend, 1).unwrap();
        workspace.reserve(0, &plan.decode().workspace_views()).unwrap();
        workspace.lock();
        let shape = [problem.batch(), query_len, config.num_heads, config.head_dim()];
        Self {
            q: tensor(backend, shape, q_dtype, &encode(q_dtype, &problem.q)),
            kv_cache: problem.kv_cache(backend).unwrap(),
            block_table: Tensor::from_slice(backend, [problem.batch(), problem.table_width()], &problem.block_table)
                .unwrap(),
            seq_lens: Tensor::from_slice(backend, [problem.batch()], &problem.seq_lens).unwrap(),
            out: poisoned(backend, [shape[0], shape[1], shape[2], config.kv_lora_rank], q_dtype).unwrap(),
            lse: poisoned(backend, [shape[0], shape[1], shape[2]], DType::F32).unwrap(),
            decode,
            plan,
            workspace,
        }
    }

    /// Runs or records the step.
    pub(crate) fn enqueue(&mut self, stream: &Stream<B>, causal: bool) -> latentwave::Result<()> {
        let args = DecodeArgs {
            q: &self.q,
            kv_cache: &self.kv_cache,
            block_table: &self.block_table,
            seq_lens: &self.seq_lens,
            out: &mut self.out,
            lse: Some(&mut self.lse),
            kv_scale: 1.0,
            causal,
        };
        self.decode.run(stream, &self.plan, &mut self.workspace, args)
    }

    /// Records the step.
    pub(crate) fn capture(&mut self, stream: &Stream<B>, causal: bool) -> Graph<B> {
        stream.capture(|| self.enqueue(stream, causal)).unwrap()
    }

    /// Puts new lengths and tables into the same tensors, and poison into the outputs.
    pub(crate) fn load(&self, backend: &B, problem: &Problem) {
        self.block_table.write(backend, &problem.block_table).unwrap();
        self.seq_lens.write(backend, &problem.seq_lens).unwrap();
        self.out.fill_bytes(backend, 0xFF).unwrap();
        self.lse.fill_bytes(backend, 0xFF).unwrap();
    }

    /// The bits of outputs and LSE.
    pub(crate) fn bits(&self, backend: &B) -> Vec<u8> {
        let mut bits = bytes(backend, &self.out);
        bits.extend(bytes(backend, &self.lse));
        bits
    }
}

/// Replays a graph over owned tensors and waits.
pub(crate) fn replay<B: GraphBackend>(stream: &Stream<B>, graph: &Graph<B>) {
    // SAFETY: all tensors own their memory.
    unsafe { stream.replay(graph) }.unwrap();
    stream.synchronize().unwrap();
}
