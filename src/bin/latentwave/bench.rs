//! `latentwave bench`: how long decode attention takes at named points.

mod ceilings;
mod check;
mod measure;
mod roofline;

use std::path::PathBuf;

use clap::Args as ClapArgs;
use latentwave::{Error, GraphBackend, MlaConfig, Result, SplitPolicy};
use serde::Serialize;

use crate::args::{self, ModelArgs, TypeArgs};
use crate::device::{self, DeviceArgs, Job};
use crate::point::{self, Point};
use crate::{Outcome, files, interrupt, rows, text};
use ceilings::Ceilings;
use measure::{Measurement, Method};

/// Measure decode attention at named points
///
/// Each point is a batch of one decode layer: `B` sequences of `S` cached tokens, `H` heads, `q` query tokens each. Several
/// layers with caches of their own, pages in random order, are captured in one graph and replayed, so that each layer finds its
/// cache cold; the reduce is part of the time of a layer, the plan, once per graph as in a step, is shared out. Rows of every result are checked
/// against float64: of sequences of all lengths, the first, middle and last query tokens and heads, and some more. `error` is the
/// largest difference of an element as a share of its row's largest, `norm` is ||out - ref|| / ||ref|| of all of these rows together,
/// by which bf16 kernels are commonly judged (2.5e-3), `of a row` that of the worst of them. A quantised cache is what its bytes say.
/// `first ms` is what loading a point's kernels and running them once took; those that a point before had are loaded.
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    /// Points: `small`, `gpu`, or written out and set apart by commas: "B64 S4096 H16 q1, var B64 ~4096 H16, skew B16 1x131072 H16".
    #[arg(long, value_name = "LIST", default_value = "small")]
    points: String,
    /// Least seconds spent on each point.
    #[arg(long, value_name = "SECONDS", default_value_t = 0.5, allow_negative_numbers = true)]
    time: f64,
    /// Also replay once after 0.12 s of rest, three times: the clock is higher then than under a load that lasts.
    #[arg(long)]
    burst: bool,
    /// MiB of cache that the layers of a graph take together at least.
    #[arg(long, value_name = "MIB", default_value_t = 256)]
    pool: usize,
    /// How sequences are split: auto, min-tokens:N, fixed:N or invariant:N.
    #[arg(long, value_name = "POLICY", default_value = "auto", value_parser = args::split_policy)]
    split_policy: SplitPolicy,
    /// Leave out the kernels that are made for one architecture alone.
    #[arg(long)]
    portable: bool,
    /// Promise kernels that history is final during a step, tables and the rows before each sequence's own tokens: they may copy these
    /// while the layer before runs.
    #[arg(long)]
    history_final: bool,
    /// Longest sequence that graphs are captured for, in tokens; longer points raise it.
    #[arg(long, value_name = "TOKENS", default_value_t = 0)]
    captured_for: usize,
    /// Seed of inputs and page order.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Write every number as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write a roofline plot as SVG.
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    types: TypeArgs,
    #[command(flatten)]
    device: DeviceArgs,
}

/// The JSON file.
#[derive(Serialize)]
struct File<'a> {
    backend: &'static str,
    device: &'a str,
    arch: &'a str,
    driver: &'a str,
    dtype: String,
    kv_dtype: String,
    page_size: usize,
    seed: u64,
    ceilings: Ceilings,
    points: &'a [Measurement],
}

/// Runs the command.
///
/// # Errors
/// For bad arguments, an absent device, and what a backend returns.
pub(crate) fn run(args: &Args) -> Result<Outcome> {
    let points = point::list(&args.points).map_err(|problem| Error::argument("points", problem))?;
    if points.is_empty() {
        return Err(Error::argument("points", "none: small, gpu, or points such as `B64 S4096 H16 q1`"));
    }
    args::seconds("time", args.time)?;
    files::check_outputs(
        args.model.file().as_slice(),
        &[("json", args.json.as_deref()), ("plot", args.plot.as_deref())],
    )?;
    let (_, mla) = args.model.load(1)?;
    device::run(args.device, Bench { args, points, mla })
}

struct Bench<'a> {
    args: &'a Args,
    points: Vec<Point>,
    mla: MlaConfig,
}

impl Job for Bench<'_> {
    type Output = Outcome;

    fn run<B: GraphBackend>(self, backend: &B) -> Result<Outcome> {
        let Self { args, points, mla } = self;
        let info = backend.device();
        let gpu = info.backend != "host";
        let method = Method {
            q_dtype: args.types.dtype,
            kv_dtype: args.types.kv(),
            policy: args.split_policy,
            portable: args.portable,
            history_final: args.history_final,
            pool_bytes: args
                .pool
                .checked_mul(1 << 20)
                .ok_or_else(|| Error::argument("pool", format!("{} MiB: too many", args.pool)))?,
            max_layers: if gpu { 512 } else { 64 },
            min_launches: if gpu { 20 } else { 1 },
            max_seq_len: args.captured_for,
            time: args::seconds("time", args.time)?,
            burst: args.burst,
            seed: args.seed,
        };
        println!("{}: {} ({}), {} compute units", info.backend, info.name, info.arch, info.num_compute_units);
        println!("{} queries, {} cache, {} tokens per page\n", method.q_dtype, method.kv_dtype, mla.page_size);

        interrupt::install();
        let ceilings = ceilings::measure(backend, args.burst)?;
        interrupt::catch();
        let bar = indicatif::ProgressBar::new(points.len() as u64);
        bar.set_style(text::progress_style("points"));
        let mut measurements = Vec::new();
        for point in &points {
            bar.set_message(point.to_string());
            let Some(measurement) = measure::measure(backend, &mla, point, &method)? else { break };
            measurements.push(measurement);
            bar.inc(1);
        }
        bar.finish_and_clear();

        println!("{}", table(&ceilings, &measurements));
        if let Some(path) = &args.json {
            let file = File {
                backend: info.backend,
                device: &info.name,
                arch: &info.arch,
                driver: &info.driver_version,
                dtype: method.q_dtype.to_string(),
                kv_dtype: method.kv_dtype.to_string(),
                page_size: mla.page_size,
                seed: args.seed,
                ceilings,
                points: &measurements,
            };
            files::write_json(path, &file)?;
        }
        if let Some(path) = &args.plot {
            let title = format!("{} ({})", info.name, info.arch);
            let svg = roofline::draw(&title, &ceilings, &measurements)
                .map_err(|error| Error::argument("plot", error.to_string()))?;
            files::write(path, &svg)?;
        }
        let (tolerance, norm) = (rows::tolerance(method.q_dtype), rows::norm_tolerance(method.q_dtype));
        if let Some(miss) = measurements.iter().find(|m| m.error > tolerance || m.error_norm_max > norm) {
            eprintln!(
                "miss: {} is wrong by {:.2e} of a row's largest element, {:.2e} of a row's norm; {tolerance:.0e} and {norm:.0e} are allowed",
                miss.point, miss.error, miss.error_norm_max
            );
            return Ok(Outcome::Missed);
        }
        Ok(if interrupt::caught() { Outcome::Interrupted } else { Outcome::Done })
    }
}

fn table(ceilings: &Ceilings, measurements: &[Measurement]) -> String {
    let share = |value: f64, most: Option<f64>| most.map_or_else(|| "-".to_owned(), |most| text::percent(value / most));
    let burst = measurements.iter().any(|m| m.us_burst.is_some());
    let heading = ["point", "us", "least", "GB/s", "of read", "TFLOP/s", "of matmul", "issue us", "first ms", "splits"];
    let heading = heading.into_iter().chain(["error", "norm", "of a row"]);
    let heading = heading.chain(burst.then_some("burst us")).map(str::to_owned).collect();
    let row = |m: &Measurement| {
        let mut row = vec![
            m.point.clone(),
            text::quantity(m.us),
            text::quantity(m.us_min),
            text::quantity(m.gb_per_second()),
            share(m.gb_per_second(), ceilings.read),
            format!("{:.3}", m.tflops()),
            share(m.tflops(), ceilings.matmul),
            text::quantity(m.issue_us),
            text::quantity(m.first_ms),
            m.num_kv_splits.to_string(),
            format!("{:.1e}", m.error),
            format!("{:.2e}", m.error_norm),
            format!("{:.2e}", m.error_norm_max),
        ];
        row.extend(m.us_burst.map(text::quantity));
        row
    };
    let rows: Vec<Vec<String>> = std::iter::once(heading).chain(measurements.iter().map(row)).collect();
    let ceiling = |value: Option<f64>, unit: &str| value.map(|value| format!("{} {unit}", text::quantity(value)));
    let known = [
        ceiling(ceilings.read, "GB/s of reading"),
        ceiling(ceilings.matmul, "TFLOP/s of matrix products"),
        ceiling(ceilings.matmul_burst, "TFLOP/s after a rest"),
    ];
    let known: Vec<String> = known.into_iter().flatten().collect();
    let note = if known.is_empty() { String::new() } else { format!("\nceilings, same run: {}\n", known.join(", ")) };
    format!("{}{note}", text::table(&rows, 1))
}
