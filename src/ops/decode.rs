//! Decode attention: plan → stage 1 (splits) → stage 2 (reduce).

mod args;

use std::marker::PhantomData;

use args::row_strides;

use super::cache::KvCache;
use super::check;
use crate::backend::{Backend, DecodeKernels, DecodeShape, FewTokens};
use crate::config::MlaConfig;
use crate::error::{Error, Result};
use crate::kernel::params::{DecodeParams, ScheduleKind, Settled};
use crate::kernel::{Launch, Params};
use crate::observe::span;
use crate::plan::{DecodePlan, PlanShape, SplitPolicy};
use crate::stream::Stream;
use crate::tensor::{DType, Owner, Tensor};
use crate::workspace::Workspace;

/// Element types of queries and outputs.
const QUERY_TYPES: &[DType] = &[DType::F32, DType::F16, DType::BF16];

/// Decode attention of one layer shape on one device.
///
/// A *step* is one [`schedule`](MlaDecode::schedule) for all layers, then one [`attend`](Scheduled::attend) per layer;
/// [`run`](MlaDecode::run) does both for a single layer. All of it only enqueues, allocates nothing on the device, and may be
/// captured.
#[derive(Debug, Clone)]
pub struct MlaDecode<B: Backend> {
    backend: B,
    config: MlaConfig,
    q_dtype: DType,
    kv_dtype: DType,
    portable: bool,
    history_final: bool,
}

/// A [`DecodePlan`] with its kernels compiled and loaded.
#[derive(Debug, Clone)]
pub struct Plan<B: Backend> {
    pub(crate) decode: DecodePlan,
    pub(crate) kernels: DecodeKernels,
    // What it was made for: scratch and kernels fit nothing else.
    config: MlaConfig,
    types: [DType; 2],
    plan_kernel: B::Kernel,
    split_kernel: B::Kernel,
    reduce_kernel: B::Kernel,
}

/// Tensors of one call. `rows` is `batch * query_len`; a tensor may have them as one dimension or as two.
#[derive(Debug)]
pub struct DecodeArgs<'a, B: Backend> {
    /// Queries, absorbed latent part then rope part: `[rows, num_heads, kv_lora_rank + qk_rope_head_dim]` or
    /// `[batch, query_len, num_heads, ..]`.
    pub q: &'a Tensor<B>,
    /// The layer's pages. Rows of this step's own tokens must have been written.
    pub kv_cache: &'a KvCache<B>,
    /// Page ids, i32 `[batch, table_width]`. What lies behind a sequence's pages may be anything. Each layer reads them in the stream's order:
    /// they may be written between layers.
    pub block_table: &'a Tensor<B>,
    /// Cached tokens per sequence, this step's own included, i32 `[batch]`. 0 is an empty (padding) sequence. On a GPU the host cannot
    /// see them: lengths are cut to what a row of the table addresses (under [`SplitPolicy::Invariant`] also to the plan's longest), page ids
    /// outside the cache are not followed. Nothing may write them between [`MlaDecode::schedule`] and the end of the step's last layer: the
    /// work is cut by them, and layers after the first read them while the layer before may still run.
    pub seq_lens: &'a Tensor<B>,
    /// Attention output in latent space, `[rows, num_heads, kv_lora_rank]` or `[batch, query_len, ..]`, of the queries' type. 0 for
    /// rows that see no token.
    pub out: &'a mut Tensor<B>,
    /// Natural-log LSE, f32 `[rows, num_heads]` or `[batch, query_len, num_heads]`. −inf for rows that see no token.
    pub lse: Option<&'a mut Tensor<B>>,
    /// Scale of an fp8 cache: a cached value is its byte's times this. 1 for others.
    pub kv_scale: f32,
    /// Whether query token `t` of `query_len` sees only the first `seq_len - query_len + 1 + t` cached tokens (verification of
    /// drafts). Indifferent for `query_len` 1.
    pub causal: bool,
}

impl<B: Backend> Plan<B> {
    /// What the host decided.
    pub fn decode(&self) -> &DecodePlan {
        &self.decode
    }

    /// The kernels chosen.
    pub fn kernels(&self) -> &DecodeKernels {
        &self.kernels
    }
}

impl<B: Backend> MlaDecode<B> {
    /// Decode attention over queries of `q_dtype` and a cache of `kv_dtype`.
    ///
    /// # Errors
    /// [`Error::Argument`] for a bad configuration; [`Error::DType`]; [`Error::Unsupported`] where the backend has no such kernel.
    pub fn new(backend: &B, config: MlaConfig, q_dtype: DType, kv_dtype: DType) -> Result<Self> {
        config.validate()?;
        if !QUERY_TYPES.contains(&q_dtype) {
            return Err(Error::DType { arg: "q", expected: QUERY_TYPES, got: q_dtype });
        }
        let decode =
            Self { backend: backend.clone(), config, q_dtype, kv_dtype, portable: false, history_final: false };
        decode.kernels(1, 1, 1)?;
        Ok(decode)
    }

    /// Leaves out, or not, the kernels that are made for one architecture alone: to measure what they are worth, and to test
    /// what serves the others.
    pub fn portable(self, portable: bool) -> Self {
        Self { portable, ..self }
    }

    /// Promises, or not, that a step's history was final before the step began: block tables, and of every layer's cache the rows below
    /// `seq_len - query_len` of each sequence, were written by work that was enqueued before the step's first
    /// [`attend`](Scheduled::attend), none of it between its layers. The last `query_len` rows of a sequence may be written at any time
    /// before their layer. From a step's second layer on kernels then copy the others while the layer before still runs; where the promise
    /// is broken, results may be of what the rows held before. Engines keep it that write nothing but each step's own tokens, and share
    /// pages between sequences only in steps after the one that computed them. Indifferent on the host and for kernels that copy nothing
    /// early.
    pub fn history_final(self, history_final: bool) -> Self {
        Self { history_final, ..self }
    }

    /// The layer shape.
    pub fn config(&self) -> &MlaConfig {
        &self.config
    }

    /// Element type of queries and outputs.
    pub fn q_dtype(&self) -> DType {
        self.q_dtype
    }

    /// Element type of the cache.
    pub fn kv_dtype(&self) -> DType {
        self.kv_dtype
    }

    /// The kernels that serve a batch under [`SplitPolicy::Auto`].
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn kernels(&self, batch: usize, query_len: usize, max_seq_len: usize) -> Result<DecodeKernels> {
        self.kernels_for(batch, query_len, max_seq_len, true)
    }

    fn kernels_for(
        &self,
        batch: usize,
        query_len: usize,
        max_seq_len: usize,
        free_splits: bool,
    ) -> Result<DecodeKernels> {
        self.backend.decode_kernels(&DecodeShape {
            q_dtype: self.q_dtype,
            kv_dtype: self.kv_dtype,
            num_heads: self.config.num_heads,
            query_len,
            kv_lora_rank: self.config.kv_lora_rank,
            rope_dim: self.config.qk_rope_head_dim,
            page_size: self.config.page_size,
            batch,
            max_seq_len,
            portable: self.portable,
            free_splits,
        })
    }

    /// What [`MlaDecode::plan`] decides, and for which kernels, without loading them.
    pub(crate) fn host_plan(
        &self,
        batch: usize,
        query_len: usize,
        max_seq_len: usize,
        policy: SplitPolicy,
    ) -> Result<(DecodePlan, DecodeKernels)> {
        if query_len == 0 {
            return Err(Error::argument("query_len", "0: at least 1 token per sequence"));
        }
        check::int("batch", batch)?;
        check::int("query_len", query_len)?;
        check::int("max_seq_len", max_seq_len)?;
        let kernels = match policy {
            // One form for every batch and query length, and each token in a group of its own: rows are computed alike wherever
            // they stand.
            SplitPolicy::Invariant(_) => DecodeKernels { query_group: 1, ..self.kernels_for(64, 1, 1 << 16, false)? },
            _ => self.kernels_for(batch, query_len, max_seq_len, policy == SplitPolicy::Auto)?,
        };
        let shape = PlanShape {
            batch,
            query_len,
            num_heads: self.config.num_heads,
            kv_lora_rank: self.config.kv_lora_rank,
            max_seq_len,
        };
        Ok((DecodePlan::new(shape, policy, &kernels, self.backend.device())?, kernels))
    }

    /// Plans a step of `batch` sequences of `query_len` query tokens each, none longer than `max_seq_len`, and loads its
    /// kernels (compiling them on first use). Uses host facts only.
    ///
    /// # Errors
    /// [`Error::Argument`] for sizes that are zero (except `batch`) or overflow; [`Error::Unsupported`]; [`Error::Compile`].
    pub fn plan(&self, batch: usize, query_len: usize, max_seq_len: usize, policy: SplitPolicy) -> Result<Plan<B>> {
        let _span = span!(DEBUG, "plan", batch, query_len, max_seq_len);
        let (decode, kernels) = self.host_plan(batch, query_len, max_seq_len, policy)?;
        Ok(Plan {
            decode,
            kernels,
            config: self.config,
            types: [self.q_dtype, self.kv_dtype],
            plan_kernel: self.backend.prepare(&kernels.plan)?,
            split_kernel: self.backend.prepare(&kernels.split)?,
            reduce_kernel: self.backend.prepare(&kernels.reduce)?,
        })
    }

    /// Enqueues the plan kernel, which cuts this step's work by the lengths that stand in `seq_lens` when it runs (nothing to do
    /// for schedules that need no table). What comes back enqueues the layers; until it is dropped the workspace is this step's.
    ///
    /// `table_width` is the number of columns of the block table; `causal` as in [`DecodeArgs`].
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::DType`], [`Error::WorkspaceLocked`], [`Error::Driver`].
    #[track_caller]
    pub fn schedule<'a>(
        &'a self,
        stream: &'a Stream<B>,
        plan: &'a Plan<B>,
        workspace: &'a mut Workspace<B>,
        seq_lens: &Tensor<B>,
        table_width: usize,
        causal: bool,
    ) -> Result<Scheduled<'a, B>> {
        let views = workspace.views(0, &plan.decode.workspace_views())?;
        let owner = workspace.buffer(0).map(|buffer| buffer.clone() as Owner);
        let step = self.step(stream, plan, Scratch { views, owner }, seq_lens, table_width, causal)?;
        step.cut(seq_lens)?;
        Ok(step)
    }

    /// A step over scratch that may hold its schedule already, or will by [`Scheduled::cut`].
    pub(crate) fn step<'a>(
        &'a self,
        stream: &'a Stream<B>,
        plan: &'a Plan<B>,
        scratch: Scratch,
        seq_lens: &Tensor<B>,
        table_width: usize,
        causal: bool,
    ) -> Result<Scheduled<'a, B>> {
        self.check_seq_lens(plan, seq_lens)?;
        let table_width = check::int("block_table", table_width)?;
        let base =
            DecodeParams { seq_lens: seq_lens.addr(), table_width, ..self.base_params(plan, scratch.views, causal)? };
        let (owner, recording) = (scratch.owner, stream.recording_id());
        Ok(Scheduled {
            decode: self,
            stream,
            plan,
            base,
            owner,
            causal,
            recording,
            settled: Settled::Nothing,
            _workspace: PhantomData,
        })
    }

    /// [`schedule`](MlaDecode::schedule) and [`attend`](Scheduled::attend) in one, for a single layer.
    ///
    /// # Errors
    /// As those two.
    #[track_caller]
    pub fn run(
        &self,
        stream: &Stream<B>,
        plan: &Plan<B>,
        workspace: &mut Workspace<B>,
        args: DecodeArgs<'_, B>,
    ) -> Result<()> {
        let table_width = self.check_args(plan, &args)?;
        self.schedule(stream, plan, workspace, args.seq_lens, table_width, args.causal)?.attend(args)
    }

    /// The fields that plan, configuration and workspace give.
    fn base_params(
        &self,
        plan: &Plan<B>,
        [table, partial_out, partial_lse]: [u64; 3],
        causal: bool,
    ) -> Result<DecodeParams> {
        let DecodePlan { shape, schedule, num_kv_splits, split_tokens, num_parts, query_group, num_groups, .. } =
            plan.decode;
        let (few_unit, few_tokens) = match plan.kernels.few {
            Some(FewTokens { tile_tokens, max_tokens, .. }) => (tile_tokens, max_tokens),
            None => (plan.kernels.split.tile_tokens, 0),
        };
        let rank = self.config.kv_lora_rank;
        Ok(DecodeParams {
            partial_out,
            partial_lse,
            schedule: if plan.decode.schedule_bytes > 0 { table } else { 0 },
            batch: check::int("batch", shape.batch)?,
            query_len: check::int("query_len", shape.query_len)?,
            query_group: check::int("query_len", query_group)?,
            num_heads: check::int("num_heads", shape.num_heads)?,
            kv_lora_rank: check::int("kv_lora_rank", rank)?,
            rope_dim: check::int("qk_rope_head_dim", self.config.qk_rope_head_dim)?,
            page_size: check::int("page_size", self.config.page_size)?,
            causal: i32::from(causal && shape.query_len > 1),
            schedule_kind: schedule as i32,
            num_kv_splits: check::int("policy", num_kv_splits)?,
            split_tokens: check::int("policy", split_tokens)?,
            num_parts: check::int("policy", num_parts)?,
            tile_tokens: plan.kernels.split.tile_tokens as i32,
            sm_scale: self.config.sm_scale,
            softcap: self.config.softcap,
            kv_scale: 1.0,
            fixed_cost: plan.kernels.fixed_cost,
            num_groups: check::int("query_len", num_groups)?,
            few_parts: check::int("policy", plan.decode.few_parts)?,
            few_unit: few_unit as i32,
            few_tokens: check::int("policy", few_tokens)?,
            few_blocks: check::int("policy", plan.decode.few_blocks)?,
            merged_pieces: plan.decode.merged_pieces,
            partial_order: plan.kernels.partial_order as i32,
            share_blocks: check::int("policy", plan.decode.share_blocks())?,
            ..bytemuck::Zeroable::zeroed()
        }
        .with_inverses())
    }
}

/// A step whose work has been cut: enqueues its layers. It borrows the workspace, so that nothing else can write there between
/// the plan kernel and the layers.
pub struct Scheduled<'a, B: Backend> {
    decode: &'a MlaDecode<B>,
    stream: &'a Stream<B>,
    plan: &'a Plan<B>,
    base: DecodeParams,
    owner: Option<Owner>,
    causal: bool,
    // A schedule that was enqueued outside a capture is not part of its graph.
    recording: u64,
    // More than nothing once a layer has been enqueued. Its stage 1 lets a kernel after it begin only when it has itself waited for all
    // that comes before it, the plan kernel and whatever wrote the lengths among it: when a later layer begins, both are final. That
    // holds whatever else is enqueued between layers, as nothing begins before the kernel that is enqueued before it.
    settled: Settled,
    _workspace: PhantomData<&'a mut Workspace<B>>,
}

/// Where a step's scratch lies: addresses of [`DecodePlan::workspace_views`], and who owns them, if that is known.
pub(crate) struct Scratch {
    pub(crate) views: [u64; 3],
    pub(crate) owner: Option<Owner>,
}

impl<B: Backend> Scheduled<'_, B> {
    /// Enqueues the plan kernel, where the schedule is one that needs it.
    pub(crate) fn cut(&self, seq_lens: &Tensor<B>) -> Result<()> {
        let Self { stream, plan, base, .. } = self;
        if plan.decode.schedule_bytes == 0 || plan.decode.shape.batch == 0 {
            return Ok(());
        }
        let threads = plan.kernels.plan.threads;
        let launch = Launch { grid: [1, 1, 1], threads, shared_bytes: 0, dependent: false, cluster: 1 };
        stream.retain(&[Some(seq_lens)]);
        self.owner.iter().for_each(|owner| stream.retain_owner(owner));
        // SAFETY: the schedule view has the table's size and `seq_lens` one length per sequence.
        unsafe { stream.launch(&plan.plan_kernel, &launch, &Params::Decode(*base)) }
    }

    /// Enqueues stage 1 and stage 2 of one layer, over the lengths and with the causality that were scheduled. A kernel of the caller's
    /// that is launched to begin early (programmatic dependent launch) must wait for the ones before it before it ends, as these do.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::DType`], [`Error::Argument`] naming the argument; [`Error::WorkspaceLocked`];
    /// [`Error::PageOutOfRange`] and [`Error::SeqLenOutOfRange`] on the host backend, which sees the tables; [`Error::Driver`].
    pub fn attend(&mut self, args: DecodeArgs<'_, B>) -> Result<()> {
        let Self { decode, stream, plan, ref base, ref owner, .. } = *self;
        let table_width = check::int("block_table", decode.check_args(plan, &args)?)?;
        self.check_scheduled(&args, table_width)?;
        let DecodePlan { shape, schedule, num_kv_splits, num_parts, few_parts, .. } = plan.decode;
        if shape.batch == 0 {
            return Ok(());
        }
        let cache = args.kv_cache.addresses();
        let [q_batch, q_token, q_head] = row_strides("q", args.q, shape.batch, shape.query_len)?;
        let [out_batch, out_token, out_head] = row_strides("out", args.out, shape.batch, shape.query_len)?;
        let lse = args.lse.as_deref();
        let [lse_batch, lse_token, _] = match lse {
            Some(lse) => row_strides("lse", lse, shape.batch, shape.query_len)?,
            None => [0; 3],
        };
        let params = DecodeParams {
            q: args.q.addr(),
            kv: cache.kv,
            k_rope: cache.k_rope,
            block_table: args.block_table.addr(),
            out: args.out.addr(),
            lse: lse.map_or(0, Tensor::addr),
            q_stride_batch: q_batch,
            q_stride_token: q_token,
            q_stride_head: q_head,
            kv_stride_page: cache.kv_strides[0],
            kv_stride_token: cache.kv_strides[1],
            rope_stride_page: cache.rope_strides[0],
            rope_stride_token: cache.rope_strides[1],
            table_stride: args.block_table.strides()[0] as i64,
            out_stride_batch: out_batch,
            out_stride_token: out_token,
            out_stride_head: out_head,
            lse_stride_batch: lse_batch,
            lse_stride_token: lse_token,
            num_pages: args.kv_cache.num_pages() as i64,
            kv_scale: args.kv_scale,
            settled: self.settled as i32,
            ..*base
        };

        let row_blocks = |block_rows: u32| plan.decode.group_rows().div_ceil(block_rows as usize);
        let items = match schedule {
            ScheduleKind::Balanced | ScheduleKind::Either => num_parts,
            ScheduleKind::Own => few_parts,
            ScheduleKind::Even | ScheduleKind::Chunked => plan.decode.virtual_seqs() * num_kv_splits,
        };
        let few_blocks = plan.kernels.few.map_or(0, |few| few_parts * row_blocks(few.block_rows));
        let split = &plan.kernels.split;
        let split_row_blocks = row_blocks(split.block_rows);
        let split_launch = Launch {
            grid: [blocks((split_row_blocks * items).max(few_blocks))?, 1, 1],
            threads: split.threads,
            shared_bytes: plan.kernels.split_shared_bytes,
            dependent: true,
            cluster: split.cluster(split_row_blocks),
        };
        let reduce_launch = Launch {
            grid: [blocks(plan.decode.reduce_blocks)?, 1, 1],
            threads: plan.kernels.reduce.threads,
            shared_bytes: 0,
            dependent: true,
            cluster: 1,
        };
        let cache = args.kv_cache;
        let tensors = [Some(args.q), Some(cache.latent()), cache.rope(), Some(args.block_table), Some(args.seq_lens)];
        stream.retain(&tensors);
        stream.retain(&[Some(&*args.out), lse]);
        owner.iter().for_each(|owner| stream.retain_owner(owner));
        let params = Params::Decode(params);
        // SAFETY: shapes, types and strides were checked against each other and the plan; the workspace views have the
        // plan's sizes; the kernels follow neither page ids outside the cache nor lengths past the table.
        unsafe {
            stream.launch(&plan.split_kernel, &split_launch, &params)?;
            self.settled = if decode.history_final { Settled::History } else { self.settled.max(Settled::Lengths) };
            stream.launch(&plan.reduce_kernel, &reduce_launch, &params)
        }
    }

    /// The step as after a layer that another `Scheduled` of it enqueued.
    #[cfg(feature = "capi")]
    pub(crate) fn settled(self, settled: Settled) -> Self {
        Self { settled, ..self }
    }

    /// The layer must fit what the plan kernel saw, and stand in the same graph.
    fn check_scheduled(&self, args: &DecodeArgs<'_, B>, table_width: i32) -> Result<()> {
        if self.stream.recording_id() != self.recording {
            let call = "attend (its schedule was enqueued before a capture began, or in one that has ended)";
            return Err(Error::GraphState { call, state: self.stream.capture_state() });
        }
        if args.seq_lens.addr() != self.base.seq_lens {
            return Err(Error::argument("seq_lens", "not the tensor that was scheduled"));
        }
        if args.causal != self.causal || table_width != self.base.table_width {
            return Err(Error::argument("causal", "causality and table width must be those that were scheduled"));
        }
        Ok(())
    }
}

/// A grid's extent.
fn blocks(count: usize) -> Result<u32> {
    match u32::try_from(count) {
        Ok(blocks) if blocks <= i32::MAX as u32 => Ok(blocks),
        _ => Err(Error::argument(
            "batch",
            format!("{count} blocks in one launch: fewer sequences or splits are possible"),
        )),
    }
}
