//! Every row of every policy table executed from vLLM, against this crate's policy.
//!
//! `LATENTWAVE_CONFORMANCE_DIR` names the folder of tables; the default is `tests/data/conformance`. A table's kind is its file
//! name before the first dot; one that no adapter knows is an error, and so is an empty folder. The summary goes to stderr
//! past the harness's capture, so that it shows on success too.
//!
//! Where this crate departs from vLLM there is a [`Rule`](report::Rule): the adapter computes vLLM's value, which must be the
//! row's, and ours, which may differ only where the rule says so. Columns of older versions of vLLM (`result_0.26.0` and the
//! like) are history and not compared, except `threshold_0.26.0`, which the same function gives.

#[path = "conformance/batch.rs"]
mod batch;
#[path = "conformance/builder.rs"]
mod builder;
#[path = "conformance/dispatch.rs"]
mod dispatch;
#[path = "conformance/plan.rs"]
mod plan;
#[path = "conformance/report.rs"]
mod report;
#[path = "conformance/resolver.rs"]
mod resolver;
#[path = "conformance/sizes.rs"]
mod sizes;
#[path = "conformance/table.rs"]
mod table;
#[path = "conformance/workspace.rs"]
mod workspace;

use std::io::Write;
use std::path::{Path, PathBuf};

use report::Report;
use table::Table;

/// Checks one table with the adapter of its kind.
fn check(table: &Table, report: &mut Report) -> Result<(), String> {
    match table.kind.as_str() {
        "modes" => resolver::modes(table, report),
        "resolver_mode" => resolver::mode(table, report),
        "resolver_sizes" => resolver::sizes(table, report),
        "capture_sizes" | "capture_sizes_platform" => sizes::defaults(table, report),
        "capture_sizes_off" => sizes::off(table, report),
        "capture_sizes_user" => sizes::user(table, report),
        "dispatch_v2" => dispatch::dispatch(table, report),
        "dispatch_v2_keys" => dispatch::keys(table, report),
        "reorder_threshold" => batch::reorder_threshold(table, report),
        "split" | "split_short_extends" => batch::split(table, report),
        "split_padded" => batch::split_padded(table, report),
        "dcp_local_seq_lens" => batch::dcp_local_seq_lens(table, report),
        "mla_row_flatten" => batch::row_flatten(table, report),
        "mla_row_counts" => batch::row_counts(table, report),
        "mla_capture_assert" => builder::capture_assert(table, report),
        "triton_mla_capture_story" => builder::capture_story(table, report),
        "num_kv_splits" => plan::num_kv_splits(table, report),
        "mla_logits_shape" => plan::logits_shape(table, report),
        "mla_reserve" => plan::reserve(table, report),
        "workspace" => workspace::workspace(table, report),
        kind => return Err(format!("no adapter for tables of kind `{kind}`")),
    }
    Ok(())
}

/// Checks every table of a folder.
fn check_folder(folder: &Path) -> Result<Report, String> {
    let entries = std::fs::read_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let mut files: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "json"))
        .collect();
    files.sort();
    if files.is_empty() {
        return Err(format!("{} holds no table", folder.display()));
    }
    let mut report = Report::default();
    for file in files {
        let table = Table::read(&file)?;
        report.begin(&table);
        check(&table, &mut report).map_err(|error| format!("{}: {error}", file.display()))?;
    }
    Ok(report)
}

fn default_folder() -> PathBuf {
    std::env::var_os("LATENTWAVE_CONFORMANCE_DIR").map_or_else(|| "tests/data/conformance".into(), PathBuf::from)
}

#[test]
fn every_row_of_every_table() {
    let report = check_folder(&default_folder()).unwrap();
    // Written to the stream itself: the harness captures only what the print macros write.
    write!(std::io::stderr().lock(), "\n{report}").unwrap();
    assert!(report.failures.is_empty(), "{}", report.failures.join("\n"));
    assert_eq!(report.checked() + report.out_of_scope_rows(), report.present());
}

/// A folder of its own under the system's temporary one, gone when dropped.
struct Folder(PathBuf);

impl Folder {
    fn with(name: &str, files: &[(&str, &str)]) -> Self {
        let path = std::env::temp_dir().join(format!("latentwave-conformance-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        for (file, text) in files {
            std::fs::write(path.join(file), text).unwrap();
        }
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // Left-overs in a temporary folder do no harm.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn an_empty_folder_is_an_error() {
    let folder = Folder::with("empty", &[("README.md", "no table")]);
    assert!(check_folder(&folder.0).unwrap_err().contains("holds no table"));
    assert!(check_folder(&folder.0.join("missing")).is_err());
}

#[test]
fn an_unknown_table_is_an_error() {
    let folder = Folder::with("unknown", &[("novel.open.json", r#"{"columns": ["a"], "rows": [[1]]}"#)]);
    assert!(check_folder(&folder.0).unwrap_err().contains("`novel`"));
}

#[test]
fn a_wrong_row_is_found() {
    let text =
        r#"{"columns": ["max_seq_len", "compute_units", "num_kv_splits"], "rows": [[1535, 84, 2], [1535, 84, 3]]}"#;
    let folder = Folder::with("wrong", &[("num_kv_splits.other.json", text)]);
    let report = check_folder(&folder.0).unwrap();
    assert_eq!((report.checked(), report.present(), report.failures.len()), (1, 2, 1));
    assert!(report.failures[0].contains("[1535,84,3]"), "{:?}", report.failures);
}
