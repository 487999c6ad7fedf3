//! `latentwave soak`: random decode problems against float64, for as long as is asked.

mod ops;
mod problem;
mod run;

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::Args as ClapArgs;
use latentwave::kernel::Variant;
use latentwave::{DType, Error, GraphBackend, MlaConfig, MlaDecode, Result, SplitPolicy};

use crate::device::{self, DeviceArgs, Job};
use crate::{Outcome, args, interrupt, point, text};
use problem::{Given, Problem, Size};
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
    /// Problems of these shapes only, in turn, written as for `bench`: "B2 S500 H32 q2, var B5 ~150 H16". Each is one layer, launched once.
    #[arg(long, value_name = "LIST", conflicts_with_all = ["small", "few"])]
    points: Option<String>,
    #[command(flatten)]
    shape: ShapeArgs,
    /// First write cached rows, gather them and merge results: the operations beside attention, on one small problem of each.
    #[arg(long)]
    ops: bool,
    /// Run one problem alone.
    #[arg(long, value_name = "SEED:INDEX", value_parser = one)]
    only: Option<(u64, u64)>,
    #[command(flatten)]
    device: DeviceArgs,
}

/// What else is given of the problems of `--points`.
#[derive(Debug, ClapArgs)]
struct ShapeArgs {
    /// Longest sequence that points are planned for, in tokens, if it is longer than their own: with it a short one has a long one's kernel.
    #[arg(long, value_name = "TOKENS", requires = "points", default_value_t = 0, help_heading = "Points")]
    captured_for: usize,
    /// Tokens per page of the cache.
    #[arg(long, value_name = "N", requires = "points", default_value_t = 64, value_parser = args::count(1, 1 << 16), help_heading = "Points")]
    page_size: usize,
    /// Element type of queries and outputs.
    #[arg(long, value_name = "TYPE", requires = "points", default_value = "bf16", value_parser = args::dtype, help_heading = "Points")]
    dtype: DType,
    /// Element type of the cache, if it is not that of the queries.
    #[arg(long, value_name = "TYPE", requires = "points", value_parser = args::dtype, help_heading = "Points")]
    kv_dtype: Option<DType>,
    /// How sequences are split: auto, min-tokens:N, fixed:N or invariant:N.
    #[arg(long, value_name = "POLICY", requires = "points", default_value = "auto", value_parser = args::split_policy, help_heading = "Points")]
    split_policy: SplitPolicy,
    /// Leave out the kernels that are made for one architecture alone.
    #[arg(long, requires = "points", help_heading = "Points")]
    portable: bool,
}

/// Query rows and cached tokens that a point may have: a problem is drawn and looked at byte by byte.
const MAX_POINT: usize = 1 << 22;

impl Args {
    /// The problems of `--points`; none without it.
    fn given(&self) -> Result<Vec<Given>> {
        let wrong = |problem| Error::argument("points", problem);
        let Some(points) = &self.points else { return Ok(Vec::new()) };
        let points = point::list(points).map_err(wrong)?;
        if points.is_empty() {
            return Err(wrong("none: points such as `B2 S500 H32 q2`".to_owned()));
        }
        let ShapeArgs { captured_for, page_size, dtype, kv_dtype, split_policy, portable } = self.shape;
        let given = |point: point::Point| {
            let rows = [point.batch, point.query_len, point.num_heads].into_iter().try_fold(1, usize::checked_mul);
            let small = |count: Option<usize>| count.is_some_and(|count| count <= MAX_POINT);
            let longest = point.longest();
            if !small(rows) || !small(point.batch.checked_mul(longest.next_multiple_of(page_size))) {
                return Err(wrong(format!("{point}: more than {MAX_POINT} query rows or cached tokens")));
            }
            let (q_dtype, kv_dtype) = (dtype, kv_dtype.unwrap_or(dtype));
            Ok(Given { point, q_dtype, kv_dtype, page_size, policy: split_policy, captured_for, portable })
        };
        points.into_iter().map(given).collect()
    }
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
    device::run(args.device, Soak { args, time, given: args.given()? })
}

struct Soak<'a> {
    args: &'a Args,
    time: Duration,
    given: Vec<Given>,
}

impl Job for Soak<'_> {
    type Output = Outcome;

    fn run<B: GraphBackend>(self, backend: &B) -> Result<Outcome> {
        let Self { args, time, given } = self;
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
        if args.ops {
            match ops::check(backend, args.seed) {
                Ok(errors) => println!("{errors}"),
                Err(Fault::Wrong(miss)) => {
                    eprintln!("miss: {miss}");
                    return Ok(Outcome::Missed);
                }
                Err(Fault::Failed(_, error)) => return Err(error),
            }
        }
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
                let given = given.get(index.checked_rem(given.len() as u64).unwrap_or(0) as usize);
                let problem = Problem::draw(seed, index, &size, given, served);
                let result = run::run(backend, &problem);
                failed.fetch_or(result.is_err(), Ordering::Relaxed);
                let mut tally = tally.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                tally.note(index, given, &problem, result);
            }
        });
        let tally = tally.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        println!("{}", tally.table(start.elapsed()));
        if let Some((index, problem, fault)) = tally.first_fault {
            let small = if args.small { " --small" } else { "" };
            let few = if args.few { " --few" } else { "" };
            let what = if matches!(fault, Fault::Wrong(_)) { "miss: " } else { "" };
            let points = if args.points.is_some() { " (its points and their options)" } else { "" };
            eprintln!(
                "{what}{fault}\nproblem {index}: {problem}\nagain: latentwave soak --backend {} --device {}{small}{few}{points} --only {seed}:{index}",
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
    /// Of points that were given: the kernels that served them.
    kernels: BTreeMap<String, String>,
}

/// What problems are counted by: the kernel of stage 1, whatever its widths.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Form {
    form: u32,
    gather: bool,
    small: bool,
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
    fn note(
        &mut self,
        index: u64,
        given: Option<&Given>,
        problem: &Problem,
        result: std::result::Result<Option<Passed>, Fault>,
    ) {
        match result {
            Ok(Some(Passed { kernel, launches, errors })) => {
                if let Some(given) = given {
                    self.kernels.insert(given.point.to_string(), kernel.to_string());
                }
                let Variant { form, gather, small, block_rows, tile_tokens, q_dtype, kv_dtype, .. } = kernel;
                let types = [q_dtype, kv_dtype];
                let form = Form { form, gather, small, block_rows: block_rows.next_power_of_two(), tile_tokens, types };
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
            let Form { form, gather, small, block_rows, tile_tokens, types: [q, kv] } = form;
            let form = format!("{form}{}{}", if *gather { " gather" } else { "" }, if *small { " small" } else { "" });
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
        let kernels: String = self.kernels.iter().map(|(point, kernels)| format!("{point}: {kernels}\n")).collect();
        format!("{table}\n{kernels}{right} right in {time}{}", self.norms())
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
    use clap::Parser;
    use latentwave::kernel::Entry;

    use super::*;

    #[test]
    fn a_point_is_given_and_the_rest_is_drawn() {
        let args = |more: &[&str]| {
            let args = ["latentwave", "soak", "--points", "B2 S70 H5 q2, var B4 ~32 H1"].iter().chain(more);
            match crate::Cli::try_parse_from(args).unwrap().command {
                crate::Command::Soak(args) => args.given(),
                other => panic!("{other:?}"),
            }
        };
        let given = args(&["--page-size", "8", "--captured-for", "4096", "--split-policy", "fixed:3"]).unwrap();
        let problems: Vec<_> =
            given.iter().map(|given| Problem::draw(1, 7, &Size::FULL, Some(given), |_, _, _| true)).collect();
        let [same, spread] = &problems[..] else { panic!("{problems:?}") };
        assert_eq!((same.batch, same.query_len, same.config.num_heads, same.config.page_size), (2, 2, 5, 8));
        assert_eq!((same.planned, same.policy, same.portable), (4096, SplitPolicy::Fixed(3), false));
        assert_eq!(same.rounds.iter().map(|round| &round.seq_lens[..]).collect::<Vec<_>>(), [[70, 70]]);
        assert_eq!(spread.rounds[0].seq_lens.iter().sum::<i32>(), 4 * 32);
        let longer = args(&["--kv-dtype", "fp8", "--portable"]).unwrap()[0];
        let longer = Problem::draw(1, 7, &Size::FULL, Some(&longer), |_, _, _| true);
        assert_eq!((longer.planned, longer.kv_dtype, longer.portable), (70, DType::Fp8E4m3, true));
        assert!(args(&["--points", "B4096 S4096 H1"]).is_err());
    }

    #[test]
    fn the_largest_error_in_norm_of_each_type_of_queries_is_told() {
        let problem = Problem::draw(0, 0, &Size::SMALL, None, |_, _, _| true);
        let mut tally = Tally::default();
        let types = [(DType::BF16, DType::BF16), (DType::BF16, DType::Fp8E4m3), (DType::F16, DType::F16)];
        for (index, ((q, kv), norm)) in types.into_iter().zip([1e-3, 2.25e-3, 3e-4]).enumerate() {
            let kernel = Variant { kv_dtype: kv, ..Variant::simple(Entry::DecodeSplit, q) };
            let errors = Errors { out: 0.0, norm, row_norm: 1.5 * norm, lse: 0.0 };
            let passed = Passed { kernel, launches: 1, errors };
            tally.note(index as u64, None, &problem, Ok(Some(passed)));
        }
        let table = tally.table(Duration::from_secs(1));
        let last = table.lines().last().unwrap();
        assert!(last.starts_with("3 problems right in 1.00 s; largest norm: "), "{last}");
        for of_type in ["bf16 2.25e-3 (of a row 3.37e-3)", "f16 3.00e-4 (of a row 4.50e-4)"] {
            assert!(last.contains(of_type), "{last}");
        }
    }
}
