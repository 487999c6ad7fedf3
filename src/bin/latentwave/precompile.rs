//! `latentwave precompile`: compiles the kernels that a build carries, with no GPU.

use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Instant;

use clap::Args as ClapArgs;
use latentwave::kernel::{self, embedded, select};
use latentwave::{Error, Result};

use crate::{Outcome, text};

/// Compile the kernels of the selection table for the architectures that a build carries code for; needs no GPU
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    /// Architectures, `sm_90a` for instance; by default all that this build carries code for.
    #[arg(long, value_delimiter = ',', value_name = "ARCH")]
    arch: Vec<String>,
    /// Where the archives go. A build takes those of `kernels/prebuilt` in its source tree.
    #[arg(long, default_value = "kernels/prebuilt", value_name = "FOLDER")]
    out: PathBuf,
    /// Show registers, shared memory and spills of every kernel.
    #[arg(long)]
    verbose: bool,
    /// Write nothing: compile one kernel after another, as a program does that finds none carried or cached, and show how long each takes.
    #[arg(long, conflicts_with_all = ["out", "verbose"])]
    time: bool,
    /// With `--time`, only the kernels whose names contain this.
    #[arg(long, requires = "time", value_name = "TEXT")]
    only: Option<String>,
}

/// Runs the command.
///
/// # Errors
/// Without a compiler, for a kernel that does not compile, for a file that cannot be written.
pub(crate) fn run(args: &Args) -> Result<Outcome> {
    let arches = match args.arch.is_empty() {
        true => embedded::architectures().map(str::to_owned).collect(),
        false => args.arch.clone(),
    };
    if args.time {
        return time(&arches, args.only.as_deref().unwrap_or_default());
    }
    for arch in arches {
        let rows = Mutex::new(Vec::new());
        let path = kernel::precompile(&args.out, &arch, &select::variants(&arch), |variant, compiled| {
            let mut row = vec![variant.to_string(), text::bytes(compiled.code.len())];
            row.extend(compiled.resources.iter().flat_map(|taken| {
                [taken.registers, taken.shared_bytes, taken.spill_bytes].map(|number| number.to_string())
            }));
            if let Ok(mut rows) = rows.lock() {
                rows.push(row);
            }
        })?;
        let size = std::fs::metadata(&path).map_err(|source| Error::Io { path: path.clone(), source })?.len();
        let mut rows = rows.into_inner().unwrap_or_default();
        println!(
            "{arch}: {} in {} of {}",
            text::plural(rows.len(), "kernel"),
            text::bytes(size as usize),
            path.display()
        );
        if args.verbose {
            rows.sort();
            rows.insert(0, ["kernel", "code", "registers", "shared", "spilt"].map(str::to_owned).to_vec());
            println!("{}\n", text::table(&rows, 1));
        }
    }
    Ok(Outcome::Done)
}

/// Shows how long the run-time compiler takes for each kernel.
fn time(arches: &[String], only: &str) -> Result<Outcome> {
    for arch in arches {
        let mut rows = vec![["kernel", "code", "seconds"].map(str::to_owned).to_vec()];
        for variant in select::variants(arch).into_iter().filter(|variant| variant.to_string().contains(only)) {
            let start = Instant::now();
            let compiled = kernel::compile(arch, &variant)?;
            let seconds = start.elapsed().as_secs_f64();
            rows.push(vec![variant.to_string(), text::bytes(compiled.code.len()), format!("{seconds:.2}")]);
        }
        println!("{arch}\n{}\n", text::table(&rows, 1));
    }
    Ok(Outcome::Done)
}
