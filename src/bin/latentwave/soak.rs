//! `latentwave soak`: random decode problems against float64, for as long as is asked.

mod problem;
mod run;

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::Args as ClapArgs;
use latentwave::kernel::Variant;
use latentwave::{DType, Error, GraphBackend, MlaConfig, MlaDecode, Result};

use crate::device::{self, DeviceArgs, Job};
use crate::{Outcome, args, interrupt, text};
use problem::{Problem, Size};
use run::{Errors, Fault, Passed};

/// Check random decode problems against float64
///
/// Batches, heads, query tokens, lengths, pages, widths, types, strides and split policies are drawn at random; scratch, outputs
/// and cache slots that no token uses are NaN, unused table entries are anything. A problem is launched one to three times,
/// eagerly or as a graph, with other lengths and tables and without clearing the scratch between. Every element of an output
/// must have been written and nothing beside it; some rows are compared with float64. All processor cores draw and check.
///
/// Errors: `out`, the largest difference of an element as a share of its row's largest; `norm`, ||out - ref|| / ||ref|| of all
/// checked rows of a launch together, by which bf16 kernels are commonly judged (2.5e-3); `LSE`, as a share of it, absolute below 1.
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    /// Seconds after which no further problem is begun.
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0, allow_negative_numbers = true)]
    seconds: f64,
    /// Problems after which none is begun.
    #[arg(long, value_name = "N", default_value_t = u64::MAX, hide_default_value = true)]
    problems: u64,
    /// Seed: the same one gives the same problems.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Small problems of the types whose kernels are carried: for a slow device, or under a sanitizer.
    #[arg(long)]
    small: bool,
    /// Only problems of few sequences, as the library chooses to split them: blocks of such cut their own pieces.
    #[arg(long)]
    few: bool,
    /// Run one problem alone.
    #[arg(long, value_name = "SEED:INDEX", value_parser = one)]
    only: Option<(u64, u64)>,
    #[command(flatten)]
    device: DeviceArgs,
}

fn one(text: &str) -> std::result::Result<(u64, u64), String> {
    let parts = text.split_once(':').and_then(|(seed, index)| Some((seed.parse().ok()?, index.parse().ok()?)));
    parts.ok_or_else(|| "a seed and an index are needed, as in 0:123".to_owned())
}

/// Runs the command.
///
/// # Errors
/// For bad arguments and an absent device.
pub(crate) fn run(args: &Args) -> Result<Outcome> {
    let time = args::seconds("seconds", args.seconds)?;
    if args.problems == 0 {
        return Err(Error::argument("problems", "0: at least 1"));
    }
    device::run(args.device, Soak { args, time })
}

struct Soak<'a> {
    args: &'a Args,
    time: Duration,
}

impl Job for Soak<'_> {
    type Output = Outcome;

    fn run<B: GraphBackend>(self, backend: &B) -> Result<Outcome> {
        let Self { args, time } = self;
        let info = backend.device();
        let (seed, indices) = match args.only {
            Some((seed, index)) => match index.checked_add(1) {
                Some(end) => (seed, index..end),
                None => return Err(Error::argument("only", format!("{index}: there is no problem after it"))),
            },
            None => (args.seed, 0..args.problems),
        };
        let size = if args.small { Size::SMALL } else { Size::FULL };
        let size = if args.few { size.of_few() } else { size };
        let served = |q, kv, (kv_lora_rank, qk_rope_head_dim): (usize, usize)| {
            let config = MlaConfig { kv_lora_rank, qk_rope_head_dim, ..MlaConfig::deepseek(1, 1) };
            MlaDecode::new(backend, config, q, kv).is_ok()
        };
        println!("{}: {} ({}), driver {}, seed {seed}", info.backend, info.name, info.arch, info.driver_version);

        interrupt::catch();
        let (tally, next, failed) =
            (Mutex::new(Tally::default()), AtomicU64::new(indices.start), AtomicBool::new(false));
        let start = Instant::now();
        rayon::broadcast(|_| {
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                let over = start.elapsed() >= time && index > indices.start;
                if over || index >= indices.end || interrupt::caught() || failed.load(Ordering::Relaxed) {
                    break;
                }
                let problem = Problem::draw(seed, index, &size, served);
                let result = run::run(backend, &problem);
                failed.fetch_or(result.is_err(), Ordering::Relaxed);
                let mut tally = tally.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                tally.note(index, &problem, result);
            }
        });
        let tally = tally.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        println!("{}", tally.table(start.elapsed()));
        if let Some((index, problem, fault)) = tally.first_fault {
            let small = if args.small { " --small" } else { "" };
            let few = if args.few { " --few" } else { "" };
            let what = if matches!(fault, Fault::Wrong(_)) { "miss: " } else { "" };
            eprintln!(
                "{what}{fault}\nproblem {index}: {problem}\nagain: latentwave soak --backend {} --device {}{small}{few} --only {seed}:{index}",
                info.backend, info.index
            );
            return match fault {
                Fault::Wrong(_) => Ok(Outcome::Missed),
                Fault::Failed(_, error) => Err(error),
            };
        }
        Ok(if interrupt::caught() { Outcome::Interrupted } else { Outcome::Done })
    }
}

/// What came of all problems so far.
#[derive(Default)]
struct Tally {
    forms: BTreeMap<Form, Count>,
    first_fault: Option<(u64, String, Fault)>,
}

/// What problems are counted by: the kernel of stage 1, whatever its widths.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Form {
    form: u32,
    gather: bool,
    /// A power of two; the host's kernel takes any number up to it.
    block_rows: u32,
    tile_tokens: u32,
    types: [DType; 2],
}

#[derive(Default)]
struct Count {
    problems: usize,
    replayed: usize,
    launches: usize,
    errors: Errors,
}

impl Tally {
    fn note(&mut self, index: u64, problem: &Problem, result: std::result::Result<Option<Passed>, Fault>) {
        match result {
            Ok(Some(Passed { kernel, launches, errors })) => {
                let Variant { form, gather, block_rows, tile_tokens, q_dtype, kv_dtype, .. } = kernel;
                let types = [q_dtype, kv_dtype];
                let form = Form { form, gather, block_rows: block_rows.next_power_of_two(), tile_tokens, types };
                let count = self.forms.entry(form).or_default();
                count.problems += 1;
                count.launches += launches;
                count.replayed += usize::from(problem.graph);
                count.errors.merge(errors);
            }
            Err(fault) if self.first_fault.as_ref().is_none_or(|(first, ..)| index < *first) => {
                self.first_fault = Some((index, problem.to_string(), fault));
            }
            Ok(None) | Err(_) => {}
        }
    }

    fn table(&self, time: Duration) -> String {
        let heading =
            ["form", "types", "rows", "tokens", "problems", "of them graphs", "launches", "out", "norm", "LSE"];
        let mut lines = vec![heading.map(str::to_owned).to_vec()];
        let mut all = Count::default();
        let cells = |count: &Count| {
            [
                text::count(count.problems),
                text::count(count.replayed),
                text::count(count.launches),
                format!("{:.1e}", count.errors.out),
                format!("{:.2e}", count.errors.norm),
                format!("{:.1e}", count.errors.lse),
            ]
        };
        for (form, count) in &self.forms {
            let Form { form, gather, block_rows, tile_tokens, types: [q, kv] } = form;
            let form = if *gather { format!("{form} gather") } else { form.to_string() };
            let name = [form, format!("{q} {kv}"), block_rows.to_string(), tile_tokens.to_string()];
            lines.push(name.into_iter().chain(cells(count)).collect());
            all.problems += count.problems;
            all.replayed += count.replayed;
            all.launches += count.launches;
            all.errors.merge(count.errors);
        }
        lines.push(["all", "", "", ""].map(str::to_owned).into_iter().chain(cells(&all)).collect());
        let right = text::plural(all.problems, "problem");
        let (table, time) = (text::table(&lines, 2), text::seconds(time.as_secs_f64()));
        format!("{table}\n{right} right in {time}{}", self.norms())
    }

    /// The largest errors in norm, of each type of queries.
    fn norms(&self) -> String {
        let mut by_type = BTreeMap::<DType, Errors>::new();
        for (form, count) in &self.forms {
            by_type.entry(form.types[0]).or_default().merge(count.errors);
        }
        let norms = by_type
            .iter()
            .map(|(dtype, Errors { norm, row_norm, .. })| format!("{dtype} {norm:.2e} (of a row {row_norm:.2e})"));
        let norms: Vec<String> = norms.collect();
        if norms.is_empty() { String::new() } else { format!("; largest norm: {}", norms.join(", ")) }
    }
}

#[cfg(test)]
mod tests {
    use latentwave::kernel::Entry;

    use super::*;

    #[test]
    fn the_largest_error_in_norm_of_each_type_of_queries_is_told() {
        let problem = Problem::draw(0, 0, &Size::SMALL, |_, _, _| true);
        let mut tally = Tally::default();
        let types = [(DType::BF16, DType::BF16), (DType::BF16, DType::Fp8E4m3), (DType::F16, DType::F16)];
        for (index, ((q, kv), norm)) in types.into_iter().zip([1e-3, 2.25e-3, 3e-4]).enumerate() {
            let kernel = Variant { kv_dtype: kv, ..Variant::simple(Entry::DecodeSplit, q) };
            let errors = Errors { out: 0.0, norm, row_norm: 1.5 * norm, lse: 0.0 };
            tally.note(index as u64, &problem, Ok(Some(Passed { kernel, launches: 1, errors })));
        }
        let table = tally.table(Duration::from_secs(1));
        let last = table.lines().last().unwrap();
        assert!(last.starts_with("3 problems right in 1.00 s; largest norm: "), "{last}");
        for of_type in ["bf16 2.25e-3 (of a row 3.37e-3)", "f16 3.00e-4 (of a row 4.50e-4)"] {
            assert!(last.contains(of_type), "{last}");
        }
    }
}
