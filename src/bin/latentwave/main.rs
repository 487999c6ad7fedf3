//! The `latentwave` program: replays request traces, explains graph decisions, measures kernels, lists devices.

#[macro_use]
mod out;

mod alloc;
mod args;
mod bench;
mod device;
mod draw;
mod files;
mod gain;
mod info;
mod interrupt;
mod point;
#[cfg(any(feature = "cuda", feature = "rocm"))]
mod precompile;
mod replay;
mod resolve;
mod rng;
mod rows;
mod soak;
mod text;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[global_allocator]
static ALLOCATOR: alloc::Counting = alloc::Counting;

/// Exit status of a command that found a result wrong.
const MISSED: u8 = 3;

/// Exit status of a command that was ended by Ctrl-C, after it has shown what it had.
const INTERRUPTED: u8 = 130;

const EXIT_STATUS: &str = "Exit status:\n  \
    0    done\n  \
    1    an error, explained on standard error\n  \
    2    arguments that cannot be understood\n  \
    3    a result differs from float64 by more than it may\n  \
    130  ended by Ctrl-C; what was measured so far has been shown and written";

/// Decode attention for MLA models on NVIDIA and AMD GPUs and on the host, with full device graphs.
#[derive(Debug, Parser)]
#[command(version, about, after_help = EXIT_STATUS, args_override_self = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    #[command(after_help = EXIT_STATUS)]
    Replay(Box<replay::Args>),
    Resolve(resolve::Args),
    Info(info::Args),
    #[command(after_help = EXIT_STATUS)]
    Bench(bench::Args),
    #[command(after_help = EXIT_STATUS)]
    Gain(gain::Args),
    #[command(after_help = EXIT_STATUS)]
    Soak(soak::Args),
    #[cfg(any(feature = "cuda", feature = "rocm"))]
    Precompile(precompile::Args),
}

/// How a command ended, if not by an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Done,
    /// A result was wrong.
    Missed,
    /// Ctrl-C.
    Interrupted,
}

/// Lets a closed pipe (`| head`) end the program quietly, as it ends others: Rust's runtime ignores the signal, and printing
/// would panic.
#[cfg(unix)]
fn end_at_a_closed_pipe() {
    // SAFETY: called once, before any other thread is there; the default action is always valid.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
}

#[cfg(not(unix))]
fn end_at_a_closed_pipe() {}

fn main() -> ExitCode {
    end_at_a_closed_pipe();
    let outcome = match Cli::parse().command {
        Command::Replay(args) => replay::run(&args),
        Command::Resolve(args) => resolve::run(&args),
        Command::Info(args) => info::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Gain(args) => gain::run(&args),
        Command::Soak(args) => soak::run(&args),
        #[cfg(any(feature = "cuda", feature = "rocm"))]
        Command::Precompile(args) => precompile::run(&args),
    };
    match outcome {
        Ok(Outcome::Done) => ExitCode::SUCCESS,
        Ok(Outcome::Missed) => MISSED.into(),
        Ok(Outcome::Interrupted) => INTERRUPTED.into(),
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn arguments_are_consistent() {
        super::Cli::command().debug_assert();
    }
}
