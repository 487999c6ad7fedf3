//! What an engine holds: resolve → capture → dispatch → replay.
//!
//! A [`DecodeSession`] reserves everything once for its declared maxima and locks it, resolves which graph mode can be had and
//! says why, captures each size through a closure that enqueues the engine's whole step, and then serves batches: it
//! brings lengths, tables and slots to the device in place, pads, and replays the graph that fits or runs the closure eagerly.
//!
//! ```
//! use latentwave::session::{DecodeSession, SessionConfig, StepBatch};
//! use latentwave::{DType, Host, KvCache, MlaConfig, Tensor};
//!
//! # fn main() -> latentwave::Result<()> {
//! let dev = Host::new();
//! let mla = MlaConfig::deepseek(2, 16);
//! let config = SessionConfig { q_dtype: DType::F32, kv_dtype: DType::F32, ..SessionConfig::new(mla, 4, 64, 16) };
//! let mut session = DecodeSession::new(&dev, config)?;
//!
//! let cache = KvCache::zeros(&dev, 16, &mla, DType::F32)?;
//! let q = Tensor::from_fn(&dev, [4, 2, 576], |i| (i as f32).sin())?;
//! let mut out = Tensor::zeros(&dev, [4, 2, 512], DType::F32)?;
//! let captured = session.capture(|step| step.decode(&q, &cache, &mut out, None))?;
//! assert!(captured.failed.is_empty());
//!
//! let tables = [vec![3], vec![7, 1], vec![5]];
//! let report = session.step(&StepBatch::decode(1, &[9, 30, 1], &tables), |step| step.decode(&q, &cache, &mut out, None))?;
//! println!("{report}");
//! session.synchronize()?;
//! # Ok(())
//! # }
//! ```

mod capture;
mod config;
mod inputs;
mod report;
mod step;

use std::fmt;

pub use config::SessionConfig;
pub use report::{CaptureReport, StepReport};
pub use step::Step;

use crate::backend::GraphBackend;
use crate::error::{Error, Result};
use crate::graph::builder::minimum_support;
use crate::graph::resolve::{DriverFacts, EngineFacts, ResolveRequest, Resolved, resolve};
use crate::graph::sizes::{CaptureSizes, SizeRequest, default_ceiling};
use crate::graph::{
    AttentionBuilder, Batch, BuilderSpec, Dispatch, GraphDispatcher, GraphSupport, KeyRequest, MlaBuilder,
    QueryLenSupport, RuntimeMode, graph_keys,
};
use crate::observe::{self, event, span};
use crate::ops::{MlaDecode, Plan, check};
use crate::stream::Stream;
use crate::workspace::Workspace;
use capture::SizeGraphs;
use inputs::StepInputs;

/// The sequences of one step.
#[derive(Debug, Clone, Copy)]
pub struct StepBatch<'a, T> {
    /// Query tokens per decoding sequence: 1, or 1 plus the drafts to verify.
    pub query_len: usize,
    /// Cached tokens of each decoding sequence, this step's own included.
    pub seq_lens: &'a [i32],
    /// Pages of each decoding sequence, in order; more than its length needs are allowed.
    pub block_tables: &'a [T],
    /// Further tokens that the engine handles itself in this step (prefill); with any, the batch is mixed.
    pub prefill_tokens: usize,
    /// Requests that those belong to.
    pub prefill_reqs: usize,
}

impl<'a, T> StepBatch<'a, T> {
    /// A batch that only decodes.
    pub fn decode(query_len: usize, seq_lens: &'a [i32], block_tables: &'a [T]) -> Self {
        Self { query_len, seq_lens, block_tables, prefill_tokens: 0, prefill_reqs: 0 }
    }
}

/// Decode attention of an engine: everything reserved, resolved, captured and replayed in one place.
pub struct DecodeSession<B: GraphBackend> {
    config: SessionConfig,
    decode: MlaDecode<B>,
    builders: Vec<Box<dyn AttentionBuilder + Send>>,
    resolved: Resolved,
    sizes: CaptureSizes,
    dispatcher: GraphDispatcher,
    // By the dispatcher's index.
    graphs: Vec<SizeGraphs<B>>,
    inputs: StepInputs<B>,
    workspace: Workspace<B>,
    stream: Stream<B>,
}

impl<B: GraphBackend> fmt::Debug for DecodeSession<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let captured = self.graphs.iter().filter(|graphs| !graphs.is_empty()).count();
        write!(f, "DecodeSession<{}>({}, {captured} of {} graphs)", B::NAME, self.resolved.mode, self.graphs.len())
    }
}

impl<B: GraphBackend> DecodeSession<B> {
    /// Reserves and resolves for this crate's own attention, on a stream of its own.
    ///
    /// # Errors
    /// [`Error::Argument`] naming the field; [`Error::Unsupported`]; [`Error::Compile`]; [`Error::OutOfMemory`];
    /// [`Error::GraphModeUnsupported`].
    pub fn new(backend: &B, config: SessionConfig) -> Result<Self> {
        Self::with_builders(Stream::new(backend)?, config, Vec::new())
    }

    /// As [`DecodeSession::new`], on a stream that the caller chose, and with further builders whose attention takes part in the
    /// same graphs. The least graph support of all counts.
    ///
    /// # Errors
    /// As [`DecodeSession::new`].
    pub fn with_builders(
        stream: Stream<B>,
        config: SessionConfig,
        further: Vec<Box<dyn AttentionBuilder + Send>>,
    ) -> Result<Self> {
        config.validate()?;
        let backend = stream.backend().clone();
        let _span = span!(
            INFO,
            "session",
            backend = B::NAME,
            max_num_seqs = config.max_num_seqs,
            max_seq_len = config.max_seq_len,
            query_len = config.query_len(),
        );
        let decode =
            MlaDecode::new(&backend, config.mla, config.q_dtype, config.kv_dtype)?.history_final(config.history_final);

        let mut builders: Vec<Box<dyn AttentionBuilder + Send>> = vec![Box::new(own_builder(&decode, &config)?)];
        builders.extend(further);
        let mut minimum = minimum_support(builders.iter().map(|builder| builder.as_ref() as &dyn AttentionBuilder));
        minimum.lower(B::NAME, backend.graph_support());
        let resolved = resolve(&ResolveRequest {
            requested: Some(config.graph_mode),
            minimum: &minimum,
            query_len: config.query_len(),
            engine: EngineFacts { attention_separable: config.piecewise, piecewise_capture: config.piecewise },
            driver: Some(DriverFacts {
                device: backend.device(),
                rules: backend.driver_rules(),
                ignore_rules: config.ignore_driver_rules,
            }),
        })?;

        let sizes = SizeRequest {
            sizes: config.capture_sizes.as_deref(),
            max_size: config.max_capture_size,
            ceiling: default_ceiling(backend.device()),
            ..SizeRequest::new(resolved.mode, config.max_num_seqs, config.max_num_batched_tokens, config.query_len())
        }
        .resolve()?;
        observe::resolution(&resolved, &sizes);
        let keys = graph_keys(&KeyRequest {
            mode: resolved.mode,
            sizes: &sizes.sizes,
            max_num_seqs: config.max_num_seqs,
            query_lens: &[config.query_len()],
            varlen_decode: false,
            variants: &[0],
        })?;
        let dispatcher = GraphDispatcher::new(keys)?;

        let inputs = StepInputs::new(
            &stream,
            config.max_num_seqs,
            config.max_decode_tokens(),
            config.table_width(),
            config.mla.page_size,
        )?;
        let mut workspace = Workspace::new(&backend, 1)?;
        workspace.reserve(0, &worst_case(&decode, &config)?)?;
        workspace.lock();
        let graphs = dispatcher.keys().iter().map(|_| SizeGraphs::default()).collect();
        Ok(Self { config, decode, builders, resolved, sizes, dispatcher, graphs, inputs, workspace, stream })
    }

    /// What the session was made for.
    pub fn config(&self) -> &SessionConfig {
        &self.config
    }

    /// The graph mode that could be had, and the reasons.
    pub fn resolved(&self) -> &Resolved {
        &self.resolved
    }

    /// The sizes to capture, and what was changed of those asked for.
    pub fn capture_sizes(&self) -> &CaptureSizes {
        &self.sizes
    }

    /// Which graph serves which batch.
    pub fn dispatcher(&self) -> &GraphDispatcher {
        &self.dispatcher
    }

    /// The stream that steps are enqueued on.
    pub fn stream(&self) -> &Stream<B> {
        &self.stream
    }

    /// Device bytes reserved at construction: scratch and step inputs.
    pub fn reserved_bytes(&self) -> usize {
        self.workspace.table().bytes().sum::<usize>() + self.inputs.bytes()
    }

    /// Device bytes that captured graphs hold, as far as the driver tells.
    pub fn graph_bytes(&self) -> usize {
        self.graphs.iter().map(SizeGraphs::bytes).sum()
    }

    /// Serves one step: replays the graph that fits, or calls `enqueue` to run eagerly. Returns once everything is enqueued;
    /// [`synchronize`](DecodeSession::synchronize) waits.
    ///
    /// # Errors
    /// [`Error::Capacity`] for more sequences or tokens than declared; [`Error::Argument`] for a query length outside
    /// `1..=1 + num_spec_tokens` or tables that are missing; [`Error::SeqLenOutOfRange`], [`Error::PageOutOfRange`]; what
    /// `enqueue` returns; [`Error::Driver`]. The session is usable afterwards.
    pub fn step<T: AsRef<[i32]>>(
        &mut self,
        batch: &StepBatch<'_, T>,
        mut enqueue: impl FnMut(&mut Step<'_, B>) -> Result<()>,
    ) -> Result<StepReport> {
        let (query_len, num_seqs) = (batch.query_len, batch.seq_lens.len());
        let _span = span!(DEBUG, "step", num_seqs, query_len);
        self.check(batch)?;
        self.stream.require_idle("step")?;
        self.inputs.update(&self.stream, batch.seq_lens, query_len, |seq| batch.block_tables[seq].as_ref())?;

        let decode_tokens = num_seqs * query_len;
        let num_tokens = decode_tokens + batch.prefill_tokens;
        let wanted = match batch.prefill_tokens {
            0 => Batch::uniform(num_seqs, query_len),
            _ => Batch::mixed(num_seqs.saturating_add(batch.prefill_reqs), num_tokens),
        };
        let served = self.dispatch(&wanted);
        let graph = served.graph.filter(|_| served.descriptor.mode == RuntimeMode::Full);
        let longest = batch.seq_lens.iter().fold(0, |longest, &len| longest.max(len as usize));
        let max_seq_len;
        if let Some((planned, graph)) = graph.and_then(|index| self.graphs[index].serving(longest)) {
            let _span = span!(DEBUG, "replay", num_tokens = served.descriptor.num_tokens);
            // SAFETY: the graph owns this crate's buffers that it touches; borrowed tensors are the promise made where they
            // were borrowed.
            unsafe { self.stream.replay(graph)? };
            max_seq_len = planned;
        } else {
            let served = match served.descriptor.mode {
                // The attention of a full graph that is not there runs eagerly, and so does all else.
                RuntimeMode::Full => Served::eager(num_tokens),
                mode => Served { mode, num_tokens: served.descriptor.num_tokens },
            };
            max_seq_len = self.enqueue(num_seqs, query_len, num_tokens, longest, served, &mut enqueue)?;
        }
        Ok(StepReport {
            mode: served.descriptor.mode,
            num_tokens: if graph.is_some() { served.descriptor.num_tokens } else { num_tokens },
            padding: if graph.is_some() { served.padding } else { 0 },
            max_seq_len,
            misfit: served.misfit,
        })
    }

    fn dispatch(&self, batch: &Batch) -> Dispatch {
        let _span = span!(DEBUG, "dispatch");
        let served = self.dispatcher.dispatch(batch);
        event!(
            DEBUG,
            mode = %served.descriptor.mode,
            num_tokens = served.descriptor.num_tokens,
            padding = served.padding,
            reason = served.misfit.map(tracing::field::display),
            "dispatched"
        );
        served
    }

    /// Waits for all enqueued steps.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn synchronize(&self) -> Result<()> {
        self.stream.synchronize()
    }

    fn check<T: AsRef<[i32]>>(&self, batch: &StepBatch<'_, T>) -> Result<()> {
        let config = &self.config;
        let (num_seqs, query_len) = (batch.seq_lens.len(), batch.query_len);
        if query_len == 0 || query_len > config.query_len() {
            return Err(Error::argument("query_len", format!("{query_len}: 1 to {} are possible", config.query_len())));
        }
        let capacity = |what, asked: usize, limit: usize| match asked <= limit {
            true => Ok(()),
            false => Err(Error::Capacity { what, asked, limit }),
        };
        capacity("sequences of a step (max_num_seqs)", num_seqs, config.max_num_seqs)?;
        let tokens = (num_seqs * query_len).saturating_add(batch.prefill_tokens);
        capacity("tokens of a step (max_num_batched_tokens)", tokens, config.max_num_batched_tokens)?;
        if batch.block_tables.len() != num_seqs {
            let got = batch.block_tables.len();
            return Err(Error::argument("block_tables", format!("{got} tables for {num_seqs} sequences")));
        }
        for (seq, (&len, table)) in batch.seq_lens.iter().zip(batch.block_tables).enumerate() {
            let table = table.as_ref();
            let width = table.len().min(config.table_width());
            let used = check::used_pages(seq, len, width, config.mla.page_size, config.max_seq_len)?;
            // What stands on the device already was checked when it was brought there.
            if !self.inputs.holds(seq, &table[..used]) {
                check::pages(seq, &table[..used], config.num_pages)?;
            }
        }
        Ok(())
    }

    /// Enqueues a step planned for the shortest sequences that its `longest` one allows; answers with what that is.
    fn enqueue(
        &mut self,
        num_seqs: usize,
        query_len: usize,
        num_tokens: usize,
        longest: usize,
        served: Served,
        enqueue: &mut impl FnMut(&mut Step<'_, B>) -> Result<()>,
    ) -> Result<usize> {
        let _span = span!(DEBUG, "enqueue", num_tokens);
        let Self { config, decode, inputs, workspace, stream, .. } = self;
        let planned = planned_seq_lens(decode, config, num_seqs, query_len)?.filter(|&len| longest <= len).last();
        let max_seq_len = planned.unwrap_or(config.max_seq_len);
        let plan = decode.plan(num_seqs, query_len, max_seq_len, config.policy)?;
        enqueue(&mut make_step(config, decode, &plan, inputs, workspace, stream, num_tokens, served)?)?;
        Ok(max_seq_len)
    }
}

impl<B: GraphBackend> Drop for DecodeSession<B> {
    fn drop(&mut self) {
        // Graphs and buffers must outlive the work that uses them. An error here was or will be reported elsewhere.
        let _ = self.stream.synchronize();
    }
}

/// The graphs that serve a step, as its closure sees them.
#[derive(Clone, Copy)]
struct Served {
    mode: RuntimeMode,
    num_tokens: usize,
}

impl Served {
    fn eager(num_tokens: usize) -> Self {
        Self { mode: RuntimeMode::None, num_tokens }
    }
}

#[allow(clippy::too_many_arguments, reason = "the parts of a session, borrowed one by one")]
fn make_step<'a, B: GraphBackend>(
    config: &SessionConfig,
    decode: &'a MlaDecode<B>,
    plan: &'a Plan<B>,
    inputs: &StepInputs<B>,
    workspace: &'a mut Workspace<B>,
    stream: &'a Stream<B>,
    num_tokens: usize,
    served: Served,
) -> Result<Step<'a, B>> {
    let (num_seqs, query_len) = (plan.decode.shape.batch, plan.decode.shape.query_len);
    Ok(Step {
        stream,
        decode,
        plan,
        workspace: Some(workspace),
        scheduled: None,
        seq_lens: inputs.seq_lens(num_seqs)?,
        block_table: inputs.block_table(num_seqs)?,
        slot_mapping: inputs.slot_mapping(num_seqs * query_len)?,
        num_tokens,
        mode: served.mode,
        graph_tokens: served.num_tokens,
        kv_scale: config.kv_scale,
    })
}

/// The builder of this crate's attention: what its kernels take decides what its graphs may do.
fn own_builder<B: GraphBackend>(decode: &MlaDecode<B>, config: &SessionConfig) -> Result<MlaBuilder> {
    let kernels = decode.kernels(config.max_num_seqs, config.query_len(), config.max_seq_len)?;
    let query_lens = match kernels.max_query_len {
        0 | 1 => QueryLenSupport::SingleOnly,
        _ => QueryLenSupport::Uniform,
    };
    MlaBuilder::new(BuilderSpec {
        max_query_len: Some(kernels.max_query_len.max(1)),
        draft_tokens: (config.num_spec_tokens > 0).then_some(config.num_spec_tokens),
        claim: Some(query_lens.allowed_support().min(GraphSupport::UniformBatch)),
        ..BuilderSpec::new("latentwave", query_lens)
    })
}

/// The longest sequences that steps of so many are planned for: the session's, and shorter ones if those have kernels of their own.
fn planned_seq_lens<B: GraphBackend>(
    decode: &MlaDecode<B>,
    config: &SessionConfig,
    num_seqs: usize,
    query_len: usize,
) -> Result<impl Iterator<Item = usize> + use<B>> {
    let (_, kernels) = decode.host_plan(num_seqs, query_len, config.max_seq_len, config.policy)?;
    Ok(std::iter::once(config.max_seq_len).chain(kernels.short_seq_len))
}

/// The largest views that any legal step takes.
///
/// They are asked of every batch size and query length: fewer sequences may be cut into more pieces. Of the plans that share
/// kernels one is made, which loads them, so that no step compiles.
fn worst_case<B: GraphBackend>(decode: &MlaDecode<B>, config: &SessionConfig) -> Result<[usize; 3]> {
    let mut worst = [0; 3];
    for query_len in 1..=config.query_len() {
        let mut loaded = [None; 2];
        for num_seqs in 1..=config.max_num_seqs {
            let seq_lens = planned_seq_lens(decode, config, num_seqs, query_len)?;
            for (max_seq_len, loaded) in seq_lens.zip(&mut loaded) {
                let (plan, kernels) = decode.host_plan(num_seqs, query_len, max_seq_len, config.policy)?;
                worst.iter_mut().zip(plan.workspace_views()).for_each(|(most, view)| *most = view.max(*most));
                if loaded.replace(kernels) != Some(kernels) {
                    decode.plan(num_seqs, query_len, max_seq_len, config.policy)?;
                }
            }
        }
    }
    Ok(worst)
}
