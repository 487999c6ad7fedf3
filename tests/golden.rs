//! Golden cases: results computed in float64 by an implementation in another language.
//!
//! Reads every file of `$LATENTWAVE_GOLDEN_DIR` (default `tests/data/golden`): `index.X.json` with its `.npz` files in the folder
//! `X/`, and tables `NAME.json` or `NAME.X.json`. An unknown file or group is an error, and so is an empty folder. Prints how many
//! cases of each were checked, for passing runs too.

mod common;
#[path = "golden/dcp.rs"]
mod dcp;
mod devices;
#[path = "golden/index.rs"]
mod index;
#[path = "golden/paged.rs"]
mod paged;
#[path = "golden/tables.rs"]
mod tables;

use std::collections::BTreeMap;
use std::path::PathBuf;

use latentwave::testing::report;
use latentwave::{DType, GraphBackend};

/// What was found and checked under each heading.
#[derive(Default)]
struct Tally {
    counts: BTreeMap<String, (usize, usize)>,
    failures: Vec<String>,
    // Cases of widths that a GPU has no kernels for, which it must say by name. The host has them all.
    unsupported: Option<usize>,
}

impl Tally {
    /// Counts one case: `Ok(true)` checked, `Ok(false)` present but not of this run's kind.
    fn count(&mut self, heading: &str, case: &str, outcome: Result<bool, String>) {
        let (checked, present) = self.counts.entry(heading.to_owned()).or_default();
        *present += 1;
        match outcome {
            Ok(done) => *checked += usize::from(done),
            Err(why) if self.unsupported.is_some() && why.contains("does not support rows of") => {
                self.unsupported = self.unsupported.map(|count| count + 1);
            }
            Err(why) => self.failures.push(format!("{heading}: {case}: {why}")),
        }
    }
}

fn folder() -> PathBuf {
    std::env::var_os("LATENTWAVE_GOLDEN_DIR").map_or_else(|| PathBuf::from("tests/data/golden"), PathBuf::from)
}

/// Runs every golden case with queries and outputs of this type (and a cache of the same, where the case does not name one).
fn run<B: GraphBackend>(backend: &B, dtype: DType) {
    let folder = folder();
    let mut files: Vec<PathBuf> = std::fs::read_dir(&folder)
        .unwrap_or_else(|error| panic!("{}: {error}; set LATENTWAVE_GOLDEN_DIR", folder.display()))
        .map(|entry| entry.expect("a folder entry").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "json"))
        .collect();
    files.sort();
    assert!(!files.is_empty(), "{}: no golden files", folder.display());

    let unsupported = (B::NAME != "host").then_some(0);
    let mut tally = Tally { unsupported, ..Tally::default() };
    for path in files {
        let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let json = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let stem = path.file_stem().and_then(|stem| stem.to_str()).expect("a readable name");
        match stem.split_once('.') {
            Some(("index", part)) => index::run(backend, dtype, &json, &folder.join(part), stem, &mut tally),
            _ => tables::run(backend, dtype, &json, stem, &mut tally),
        }
    }

    let device = format!("golden on {} in {dtype}", B::NAME);
    let (mut checked_total, mut present_total) = (0, 0);
    for (heading, (checked, present)) in &tally.counts {
        report(&format!("{device}: {heading}: {checked} of {present}"));
        checked_total += checked;
        present_total += present;
    }
    let unsupported = tally.unsupported.map_or(String::new(), |count| format!(", {count} of widths not supported"));
    let failed = tally.failures.len();
    report(&format!("{device}: total: {checked_total} of {present_total}{unsupported}, {failed} failed"));
    assert!(tally.failures.is_empty(), "{device}:\n{}", tally.failures.join("\n"));
    assert!(checked_total > 0, "{device}: nothing was checked");
}

// The kernels of the vendors compute in 16-bit types, so float32 is the host's.
#[test]
fn float32_on_host() {
    run(&latentwave::Host::new(), DType::F32);
}

fn bfloat16<B: GraphBackend>(backend: &B) {
    run(backend, DType::BF16);
}

fn float16<B: GraphBackend>(backend: &B) {
    run(backend, DType::F16);
}

on_every_backend!(bfloat16, float16);
