//! `latentwave precompile`: compiles the kernels that a build carries, with no GPU.

use std::path::PathBuf;
use std::sync::Mutex;

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
