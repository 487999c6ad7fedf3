//! `latentwave replay`: continuous batching over a trace's real request lengths and arrival order.

mod pages;
mod plots;
mod report;
mod scheduler;
mod stats;
mod step;
mod trace;

use std::path::PathBuf;

use clap::{Args as ClapArgs, ValueEnum};
use latentwave::session::SessionConfig;
use latentwave::{Error, GraphBackend, GraphMode, MlaConfig, ModelConfig, Result, SplitPolicy};

use crate::args::{self, ModelArgs, TypeArgs};
use crate::device::{self, DeviceArgs, Job};
use crate::rng::Rng;
use crate::{Outcome, interrupt, rows, text};
use report::Setting;
use scheduler::{Limits, Scheduler};
use stats::{Measured, Verified};
use step::Engine;
use trace::Request;

/// Replay a request trace: continuous batching with real lengths and arrival order
///
/// Every decode step runs through a session: lengths and page tables go to the device in place, the smallest captured graph that
/// holds the batch is replayed, and each layer writes its new rows and attends over its pages. Prompts enter the cache through
/// the cache writer; their attention is not computed. Queries and cache rows are random, from the seed.
///
/// A request is admitted when the pages for all it will ever cache are free, and keeps them to its end: nothing is preempted. One
/// that is longer than the cache or --max-model-len is rejected and counted.
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    /// Trace: CSV with the columns TIMESTAMP, ContextTokens and GeneratedTokens.
    #[arg(value_name = "TRACE.csv")]
    trace: PathBuf,

    #[command(flatten)]
    model: ModelArgs,
    /// Devices that the heads are shared out to; one device's part is computed here.
    #[arg(long, default_value_t = 1, value_name = "N", help_heading = "Model")]
    tp: usize,
    /// Attention layers to run: a number, or `all` of the model's.
    #[arg(long, default_value = "1", value_name = "N|all", help_heading = "Model")]
    layers: String,
    #[command(flatten)]
    types: TypeArgs,
    /// Scale of an fp8 cache: a cached value is its byte's times this.
    #[arg(long, default_value_t = 1.0, value_name = "X", help_heading = "Model")]
    kv_scale: f32,

    /// Sequences that decode at once.
    #[arg(long, default_value_t = 16, value_name = "N", help_heading = "Batching")]
    max_num_seqs: usize,
    /// Longest sequence, in tokens; by default the longest of the trace.
    #[arg(long, value_name = "N", help_heading = "Batching")]
    max_model_len: Option<usize>,
    /// Tokens of one step, prompts included.
    #[arg(long, default_value_t = 2048, value_name = "N", help_heading = "Batching")]
    max_num_batched_tokens: usize,
    /// Pages of each layer's cache; by default room for --max-num-seqs sequences of twice the trace's mean length.
    #[arg(long, value_name = "N", help_heading = "Batching")]
    num_pages: Option<usize>,
    /// When requests arrive: `saturate` takes the next in order as soon as there is room, `trace` waits for its time, on a clock
    /// that the measured steps move.
    #[arg(long, value_enum, default_value = "saturate", value_name = "WHEN", help_heading = "Batching")]
    arrivals: Arrivals,
    /// Draft tokens to verify with every decode step (speculative decoding).
    #[arg(long, default_value_t = 0, value_name = "K", help_heading = "Batching")]
    spec_tokens: usize,
    /// Probability that a draft is accepted, if those before it were.
    #[arg(long, default_value_t = 0.7, value_name = "P", value_parser = args::probability, help_heading = "Batching")]
    acceptance: f64,
    /// Seed of inputs, page order and acceptance.
    #[arg(long, default_value_t = 0, value_name = "N", help_heading = "Batching")]
    seed: u64,

    /// Graph mode: none, piecewise, full, full-decode-only or full-and-piecewise. What can be had of it is resolved and explained.
    #[arg(long, default_value = "full-and-piecewise", value_name = "MODE", value_parser = args::graph_mode, help_heading = "Graphs")]
    graph_mode: GraphMode,
    /// Sizes to capture, in query rows, set apart by commas.
    #[arg(long, value_name = "N,N,...", value_delimiter = ',', help_heading = "Graphs")]
    capture_sizes: Option<Vec<usize>>,
    /// Largest size to capture.
    #[arg(long, value_name = "N", help_heading = "Graphs")]
    max_capture_size: Option<usize>,
    /// The engine cannot take attention out of its graphs.
    #[arg(long, help_heading = "Graphs")]
    no_piecewise: bool,
    /// Promise kernels that history is final during a step, tables and the rows before each sequence's own tokens: they may copy these
    /// while the layer before runs.
    #[arg(long, help_heading = "Graphs")]
    history_final: bool,
    /// How sequences are split: auto, min-tokens:N, fixed:N or invariant:N.
    #[arg(long, default_value = "auto", value_name = "POLICY", value_parser = args::split_policy, help_heading = "Graphs")]
    split_policy: SplitPolicy,

    #[command(flatten)]
    device: DeviceArgs,

    /// End after so many steps of attention.
    #[arg(long, value_name = "N", help_heading = "Output")]
    max_steps: Option<usize>,
    /// Check so many random rows of every step against float64; a miss makes the exit status 3.
    #[arg(long, default_value_t = 0, value_name = "N", help_heading = "Output")]
    verify: usize,
    /// Error that a checked row may have, as a share of its largest element; by default what suits --dtype.
    #[arg(long, value_name = "X", value_parser = args::probability, help_heading = "Output")]
    tolerance: Option<f64>,
    /// Write every step and every number as JSON.
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    json: Option<PathBuf>,
    /// Write plots: a page (.html) or a bare drawing (.svg).
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    report: Option<PathBuf>,
}

/// When requests arrive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Arrivals {
    /// As soon as there is room.
    Saturate,
    /// At the trace's times.
    Trace,
}

/// Runs the command.
///
/// # Errors
/// For bad arguments and files, an absent device, and what a backend returns.
pub(crate) fn run(args: &Args) -> Result<Outcome> {
    if let Some(path) = &args.report {
        report::check_path(path)?;
    }
    let read: Vec<_> = args.model.file().into_iter().chain([args.trace.as_path()]).collect();
    crate::files::check_outputs(&read, &[("json", args.json.as_deref()), ("report", args.report.as_deref())])?;
    let trace = trace::read(&args.trace)?;
    let (model, mla) = args.model.load(args.tp)?;
    let layers = match args.layers.as_str() {
        "all" => model.num_layers,
        number => match number.parse() {
            Ok(layers) if (1..=model.num_layers).contains(&layers) => layers,
            _ => {
                let problem = format!("`{number}`: 1 to {} of {}, or `all`, is needed", model.num_layers, model.name);
                return Err(Error::argument("layers", problem));
            }
        },
    };
    let limits = limits(args, &trace, mla.page_size)?;
    device::run(args.device, Replay { args, trace, model, mla, layers, limits })
}

/// What the scheduler may use: what was asked for, or what suits the trace.
fn limits(args: &Args, trace: &[Request], page_size: usize) -> Result<Limits> {
    let decode_tokens = args.max_num_seqs.saturating_mul(1 + args.spec_tokens);
    if args.max_num_seqs == 0 {
        return Err(Error::argument("max_num_seqs", "0: at least 1"));
    }
    if args.max_num_batched_tokens <= decode_tokens {
        return Err(Error::argument(
            "max_num_batched_tokens",
            format!(
                "{}: {decode_tokens} tokens may decode in one step, and prompts need room beside them",
                args.max_num_batched_tokens
            ),
        ));
    }
    let peaks = || trace.iter().map(|request| request.peak_tokens(args.spec_tokens));
    let longest = peaks().max().unwrap_or(1);
    let max_model_len = args.max_model_len.unwrap_or(longest);
    if max_model_len == 0 {
        return Err(Error::argument("max_model_len", "0: at least 1"));
    }
    let mean = peaks().sum::<usize>() / trace.len().max(1);
    let usual = args.max_num_seqs.saturating_mul(2 * mean).max(max_model_len.min(longest)).div_ceil(page_size);
    let most = args.max_num_seqs.saturating_mul(longest.div_ceil(page_size));
    Ok(Limits {
        max_num_seqs: args.max_num_seqs,
        max_model_len,
        max_num_batched_tokens: args.max_num_batched_tokens,
        page_size,
        num_pages: args.num_pages.unwrap_or(usual.min(most)),
        spec_tokens: args.spec_tokens,
    })
}

struct Replay<'a> {
    args: &'a Args,
    trace: Vec<Request>,
    model: ModelConfig,
    mla: MlaConfig,
    layers: usize,
    limits: Limits,
}

impl Job for Replay<'_> {
    type Output = Outcome;

    fn run<B: GraphBackend>(self, backend: &B) -> Result<Outcome> {
        // First of all: the handler's thread has started, and allocated what it needs, before steps are counted.
        interrupt::install();
        let Self { args, limits, .. } = &self;
        // The session refuses limits that cannot be before lists of that length are made.
        let mut engine = Engine::new(backend, self.session_config(), self.layers, args.verify > 0, args.seed)?;
        let mut scheduler = Scheduler::new(&self.trace, *limits, args.seed);
        if scheduler.is_done() {
            let Limits { max_model_len, num_pages, page_size, .. } = limits;
            let problem = format!(
                "none of the {} fits {max_model_len} tokens and {num_pages} pages of {page_size}: raise --max-model-len or --num-pages",
                text::plural(self.trace.len(), "request")
            );
            return Err(Error::argument("trace", problem));
        }
        interrupt::catch();
        let mut setting = self.setting(backend, &engine);
        for line in report::heading(&setting) {
            println!("{line}");
        }

        let mut measured = Measured { rejected: scheduler.rejected().len(), ..Measured::default() };
        setting.ended_early = self.replay(&mut engine, &mut scheduler, &mut measured)?;
        measured.unfinished = scheduler.waiting() + scheduler.running().len();

        println!("\n{}", report::table(&setting, &measured));
        if let Some(path) = &args.json {
            report::write_json(path, &setting, &measured)?;
        }
        if let Some(path) = &args.report {
            report::write_report(path, &setting, &measured)?;
            println!("plots are in {}", path.display());
        }
        Ok(match measured.verified {
            Some(verified) if verified.misses > 0 => Outcome::Missed,
            _ if interrupt::caught() => Outcome::Interrupted,
            _ => Outcome::Done,
        })
    }
}

impl Replay<'_> {
    fn session_config(&self) -> SessionConfig {
        let Self { args, limits, .. } = self;
        SessionConfig {
            q_dtype: args.types.dtype,
            kv_dtype: args.types.kv(),
            kv_scale: args.kv_scale,
            max_num_batched_tokens: limits.max_num_batched_tokens,
            num_spec_tokens: limits.spec_tokens,
            policy: args.split_policy,
            history_final: args.history_final,
            graph_mode: args.graph_mode,
            capture_sizes: args.capture_sizes.clone(),
            max_capture_size: args.max_capture_size,
            piecewise: !args.no_piecewise,
            ..SessionConfig::new(self.mla, limits.max_num_seqs, limits.max_model_len, limits.num_pages)
        }
    }

    /// Runs step after step. Returns why it ended before the trace did, if it did.
    fn replay<B: GraphBackend>(
        &self,
        engine: &mut Engine<'_, B>,
        scheduler: &mut Scheduler,
        measured: &mut Measured,
    ) -> Result<Option<&'static str>> {
        let args = self.args;
        let mut rng = Rng::new(args.seed ^ 0xacce_97ed);
        let mut verified = Verified {
            tolerance: args.tolerance.unwrap_or_else(|| rows::tolerance(args.types.dtype)),
            ..Verified::default()
        };
        let rejected = scheduler.rejected();
        let to_generate: usize = self.trace.iter().map(|request| request.generated).sum::<usize>()
            - rejected.iter().map(|&index| self.trace[index].generated).sum::<usize>();
        let bar = indicatif::ProgressBar::new(to_generate as u64);
        bar.set_style(text::progress_style("tokens"));

        let mut clock = 0.0_f64;
        let ended_early = loop {
            if scheduler.is_done() {
                break None;
            }
            if interrupt::caught() {
                break Some("Ctrl-C");
            }
            if args.max_steps.is_some_and(|most| measured.steps.len() >= most) {
                break Some("--max-steps");
            }
            if args.arrivals == Arrivals::Trace {
                clock = clock.max(scheduler.idle_until().unwrap_or(0.0));
                scheduler.schedule(clock);
            } else {
                scheduler.schedule(f64::INFINITY);
            }
            let prompt_tokens = scheduler.plan().prompt_tokens();
            let measure = engine.run(scheduler)?;
            if args.verify > 0 && measure.is_some() {
                engine.verify(scheduler, args.verify, &mut verified)?;
            }
            let made = scheduler.advance(args.acceptance, &mut rng);
            measured.prompt_tokens += prompt_tokens;
            measured.progress(made);
            match measure {
                Some(mut measure) => {
                    clock += measure.record.seconds;
                    measure.record.generated = made.decoded;
                    bar.set_message(format!(
                        "{} sequences, {} cached tokens",
                        measure.record.sequences, measure.record.context_tokens
                    ));
                    measured.record(measure.service, measure.record);
                }
                None => measured.prompt_only_steps += 1,
            }
            bar.set_position((measured.decoded_tokens + measured.first_tokens) as u64);
        };
        bar.finish_and_clear();
        measured.verified = (args.verify > 0).then_some(verified);
        Ok(ended_early)
    }

    fn setting<B: GraphBackend>(&self, backend: &B, engine: &Engine<'_, B>) -> Setting {
        let Self { args, limits, mla, .. } = self;
        let device = backend.device();
        let session = engine.session();
        let row_bytes = mla.head_dim() * args.types.kv().size();
        let reasons = session.resolved().because.iter().map(ToString::to_string);
        let sizes = session.capture_sizes();
        Setting {
            trace: args.trace.file_name().unwrap_or(args.trace.as_os_str()).to_string_lossy().into_owned(),
            requests: self.trace.len(),
            model: self.model.name.clone(),
            backend: device.backend,
            device: device.name.clone(),
            arch: device.arch.clone(),
            num_heads: mla.num_heads,
            head_dim: mla.head_dim(),
            kv_lora_rank: mla.kv_lora_rank,
            layers: self.layers,
            page_size: mla.page_size,
            num_pages: limits.num_pages,
            dtype: args.types.dtype.to_string(),
            kv_dtype: args.types.kv().to_string(),
            kv_row_bytes: row_bytes,
            max_num_seqs: limits.max_num_seqs,
            max_model_len: limits.max_model_len,
            max_num_batched_tokens: limits.max_num_batched_tokens,
            spec_tokens: limits.spec_tokens,
            acceptance: args.acceptance,
            seed: args.seed,
            split_policy: format!("{:?}", args.split_policy),
            graph_mode_asked: args.graph_mode.to_string(),
            graph_mode: session.resolved().mode.to_string(),
            graph_mode_reasons: reasons.chain(sizes.because.iter().map(ToString::to_string)).collect(),
            capture_sizes: sizes.sizes.clone(),
            reserved_bytes: session.reserved_bytes(),
            kv_cache_bytes: limits.num_pages * mla.page_size * row_bytes * self.layers,
            graph_bytes: session.graph_bytes(),
            ended_early: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Only {
        #[command(flatten)]
        args: Args,
    }

    fn args(options: &[&str]) -> Args {
        Only::parse_from(["replay", "trace.csv"].iter().chain(options)).args
    }

    #[test]
    fn limits_suit_the_trace() {
        let request = |context, generated| Request { arrival: 0.0, context, generated };
        let trace = [request(100, 29), request(1000, 25)];
        let suited = limits(&args(&["--max-num-seqs", "1"]), &trace, 16).unwrap();
        // Peaks 128 and 1024: mean 576, longest 1024.
        assert_eq!((suited.max_model_len, suited.num_pages), (1024, 64));
        assert_eq!(limits(&args(&["--max-num-seqs", "4"]), &trace, 16).unwrap().num_pages, 256);
        assert_eq!(limits(&args(&["--num-pages", "7"]), &trace, 16).unwrap().num_pages, 7);
        assert_eq!(limits(&args(&["--spec-tokens", "3"]), &trace, 16).unwrap().max_model_len, 1027);
        let refused = |options: &[&str]| limits(&args(options), &trace, 16).unwrap_err().to_string();
        assert!(refused(&["--max-num-seqs", "0"]).contains("max_num_seqs"));
        assert!(refused(&["--max-model-len", "0"]).contains("max_model_len"));
        assert!(refused(&["--max-num-batched-tokens", "16"]).contains("max_num_batched_tokens"));
    }
}
