//! `latentwave resolve`: explains, step by step, which graphs a session gets and which of them serves a batch.

use clap::{Args as ClapArgs, ValueEnum};
use latentwave::graph::builder::minimum_support;
use latentwave::graph::resolve::{DriverFacts, EngineFacts, ResolveRequest, resolve};
use latentwave::graph::sizes::{SizeRequest, default_ceiling};
use latentwave::graph::{
    AttentionBuilder, Batch, BuilderSpec, GraphDispatcher, KeyRequest, MinimumSupport, MlaBuilder, RuntimeMode,
    graph_keys,
};
use latentwave::{GraphBackend, GraphMode, GraphSupport, QueryLenSupport, Result};

use crate::device::{self, DeviceArgs, Job};
use crate::{Outcome, args, text};

/// Most sequences and tokens; beyond it a number was mistyped.
const MOST: usize = 1 << 24;

/// Explain a graph decision step by step: builders, mode, sizes, graphs, and the graph that serves each batch
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    /// Query lengths that the decode kernel takes.
    #[arg(long, value_enum, default_value = "uniform", value_name = "WHICH")]
    query_lens: QueryLens,
    /// Graph support that the builder claims; by default what its kernel allows.
    #[arg(long, value_enum, value_name = "SUPPORT")]
    claim: Option<Support>,
    /// Graph support of another builder that takes part in the same graphs.
    #[arg(long, value_enum, value_name = "SUPPORT")]
    other: Option<Support>,
    /// Draft tokens per step.
    #[arg(long, default_value_t = 0, value_name = "K", value_parser = args::count(0, 1023))]
    spec_tokens: usize,
    /// Ranks of decode context parallelism.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = args::count(1, 1 << 16))]
    dcp: usize,
    /// Graph mode asked for: none, piecewise, full, full-decode-only or full-and-piecewise.
    #[arg(long, default_value = "full-and-piecewise", value_name = "MODE", value_parser = args::graph_mode)]
    graph_mode: GraphMode,
    /// The engine cannot take attention out of its graphs.
    #[arg(long)]
    no_piecewise: bool,
    /// Sequences that decode at once.
    #[arg(long, default_value_t = 16, value_name = "N", value_parser = args::count(1, MOST))]
    max_num_seqs: usize,
    /// Tokens of one step.
    #[arg(long, default_value_t = 2048, value_name = "N", value_parser = args::count(1, MOST))]
    max_num_batched_tokens: usize,
    /// Sizes to capture, in query rows, set apart by commas.
    #[arg(long, value_name = "N,N,...", value_delimiter = ',', value_parser = args::count(1, MOST))]
    capture_sizes: Option<Vec<usize>>,
    /// Largest size to capture.
    #[arg(long, value_name = "N", value_parser = args::count(1, MOST))]
    max_capture_size: Option<usize>,
    /// Sequences of a batch to dispatch; by default several.
    #[arg(long, value_name = "N", value_parser = args::count(1, MOST))]
    batch: Option<usize>,
    #[command(flatten)]
    device: DeviceArgs,
}

/// Query lengths by name.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum QueryLens {
    SingleOnly,
    Uniform,
    Varlen,
}

impl From<QueryLens> for QueryLenSupport {
    fn from(name: QueryLens) -> Self {
        match name {
            QueryLens::SingleOnly => Self::SingleOnly,
            QueryLens::Uniform => Self::Uniform,
            QueryLens::Varlen => Self::Varlen,
        }
    }
}

/// Graph support by name.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Support {
    Never,
    UniformSingleTokenDecode,
    UniformBatch,
    Always,
}

impl From<Support> for GraphSupport {
    fn from(name: Support) -> Self {
        match name {
            Support::Never => Self::Never,
            Support::UniformSingleTokenDecode => Self::UniformSingleTokenDecode,
            Support::UniformBatch => Self::UniformBatch,
            Support::Always => Self::Always,
        }
    }
}

/// Runs the command.
///
/// # Errors
/// What the rules refuse, and an absent device.
pub(crate) fn run(args: &Args) -> Result<Outcome> {
    device::run(args.device, Explain { args })
}

struct Explain<'a> {
    args: &'a Args,
}

impl Job for Explain<'_> {
    type Output = Outcome;

    fn run<B: GraphBackend>(self, backend: &B) -> Result<Outcome> {
        let args = self.args;
        let query_len = 1 + args.spec_tokens;
        println!("1. Builders");
        let minimum = self.builders(backend)?;

        println!("\n2. Graph mode, {} asked for", args.graph_mode);
        let device = backend.device();
        let resolved = resolve(&ResolveRequest {
            requested: Some(args.graph_mode),
            minimum: &minimum,
            query_len,
            engine: EngineFacts { attention_separable: !args.no_piecewise, piecewise_capture: !args.no_piecewise },
            driver: Some(DriverFacts { device, rules: backend.driver_rules(), ignore_rules: false }),
        })?;
        for reason in &resolved.because {
            println!("   {reason}");
        }
        println!("   -> {}", resolved.mode);

        println!("\n3. Capture sizes, in query rows");
        let sizes = SizeRequest {
            sizes: args.capture_sizes.as_deref(),
            max_size: args.max_capture_size,
            ceiling: default_ceiling(device),
            ..SizeRequest::new(resolved.mode, args.max_num_seqs, args.max_num_batched_tokens, query_len)
        }
        .resolve()?;
        for reason in &sizes.because {
            println!("   {reason}");
        }
        println!("   -> {:?}", sizes.sizes);

        println!("\n4. Graphs, in the order of capture");
        let keys = graph_keys(&KeyRequest {
            mode: resolved.mode,
            sizes: &sizes.sizes,
            max_num_seqs: args.max_num_seqs,
            query_lens: &[query_len],
            varlen_decode: false,
            variants: &[0],
        })?;
        for mode in [RuntimeMode::Piecewise, RuntimeMode::Full] {
            let rows: Vec<_> = keys.iter().filter(|key| key.mode == mode).map(|key| key.num_tokens).collect();
            if !rows.is_empty() {
                println!("   {mode}: {rows:?}");
            }
        }
        if keys.is_empty() {
            println!("   none: everything runs eagerly");
        }

        println!("\n5. Batches");
        let mut dispatcher = GraphDispatcher::new(keys)?;
        dispatcher.set_all_captured();
        println!("{}", self.batches(&dispatcher, query_len));
        Ok(Outcome::Done)
    }
}

impl Explain<'_> {
    /// The least graph support, with the way there.
    fn builders<B: GraphBackend>(&self, backend: &B) -> Result<MinimumSupport> {
        let args = self.args;
        let builder = MlaBuilder::new(BuilderSpec {
            claim: args.claim.map(Into::into),
            draft_tokens: (args.spec_tokens > 0).then_some(args.spec_tokens),
            dcp_size: args.dcp,
            ..BuilderSpec::new("latentwave", args.query_lens.into())
        })?;
        let lens = builder.query_len_support();
        println!("   `latentwave` takes query lengths {lens}: it may claim {} at most", lens.allowed_support());
        println!("   queries up to {} count as decode", text::plural(builder.decode_threshold(), "token"));
        println!("   it has {}", builder.graph_support());
        if builder.graph_support() < args.claim.map_or(lens.allowed_support(), Into::into) {
            println!("   less than claimed: its threshold is below the {} of a decode query", 1 + args.spec_tokens);
        }
        let mut minimum = minimum_support([&builder as &dyn AttentionBuilder]);
        if let Some(other) = args.other {
            let other = GraphSupport::from(other);
            println!("   `other` has {other}");
            minimum.lower("other", other);
        }
        println!("   graphs of {} can do {}", B::NAME, backend.graph_support());
        minimum.lower(B::NAME, backend.graph_support());
        println!("   -> {}, set by {}", minimum.support, minimum.name());
        Ok(minimum)
    }

    fn batches(&self, dispatcher: &GraphDispatcher, query_len: usize) -> String {
        let most = self.args.max_num_seqs;
        let sizes = match self.args.batch {
            Some(batch) => vec![batch],
            None => {
                let mut sizes: Vec<usize> = [1, 2, 3, 5, most / 2, most.saturating_sub(1), most].into();
                sizes.retain(|&size| (1..=most).contains(&size));
                sizes.sort_unstable();
                sizes.dedup();
                sizes
            }
        };
        let heading = ["   batch", "rows", "served by"].map(str::to_owned).to_vec();
        let mut rows = vec![heading];
        for &seqs in &sizes {
            let tokens = seqs * query_len;
            let served = dispatcher.dispatch(&Batch::uniform(seqs, query_len));
            rows.push(vec![
                format!("   {} decoding", text::plural(seqs, "sequence")),
                tokens.to_string(),
                served.to_string(),
            ]);
        }
        if let Some(&seqs) = sizes.last() {
            let tokens = seqs * query_len + 100;
            let served = dispatcher.dispatch(&Batch::mixed(seqs + 1, tokens));
            rows.push(vec!["   and a prompt of 100 beside".to_owned(), tokens.to_string(), served.to_string()]);
        }
        text::table(&rows, 1)
    }
}
