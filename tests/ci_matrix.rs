//! `ci/matrix.json` is the single list of CI's jobs: `ci/run.sh` has each of them, and `.github/workflows/ci.yml` is made from it.

use std::collections::BTreeSet;
use std::fmt::Write;

use serde_json::Value;

fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn matrix() -> Value {
    serde_json::from_str(&read("ci/matrix.json")).expect("matrix.json is JSON")
}

fn rows(matrix: &Value) -> &[Value] {
    matrix["jobs"].as_array().expect("a list of jobs")
}

fn text<'a>(row: &'a Value, key: &str) -> &'a str {
    row[key].as_str().unwrap_or_else(|| panic!("{row}: `{key}` is no text"))
}

/// The job of a row without the architecture behind its colon.
fn job(row: &Value) -> &str {
    text(row, "job").split(':').next().unwrap_or_default()
}

#[test]
fn the_matrix_lists_every_job_and_no_other() {
    let matrix = matrix();
    let names: BTreeSet<&str> = rows(&matrix).iter().map(|row| text(row, "job")).collect();
    assert_eq!(names.len(), rows(&matrix).len(), "a job stands there twice");
    let listed: BTreeSet<String> = rows(&matrix).iter().map(|row| job(row).to_owned()).collect();
    let defined: BTreeSet<String> = read("ci/run.sh")
        .lines()
        .filter_map(|line| line.strip_prefix("job_")?.strip_suffix("() {"))
        .map(str::to_owned)
        .collect();
    // Parts of `test` that can be run alone have no row of their own.
    let parts: BTreeSet<String> = ["format", "lint", "docs", "unit", "readme", "package"].map(str::to_owned).into();
    assert_eq!(listed.union(&parts).cloned().collect::<BTreeSet<_>>(), defined);
}

#[test]
fn the_workflow_follows_from_the_matrix() {
    let path = ".github/workflows/ci.yml";
    let wanted = workflow(&matrix());
    if std::env::var_os("LATENTWAVE_WRITE").is_some() {
        std::fs::write(path, &wanted).expect(path);
    }
    let hint = "run `LATENTWAVE_WRITE=1 cargo test --test ci_matrix`";
    assert!(read(path) == wanted, "{path} does not follow from ci/matrix.json: {hint}");
}

const HEAD: &str = "\
# Made from ci/matrix.json: change that, then `LATENTWAVE_WRITE=1 cargo test --test ci_matrix`.
name: CI
on:
  push:
    branches: [main]
  pull_request:
  schedule:
    - cron: '17 3 * * 1'
  workflow_call:
  workflow_dispatch:
permissions:
  contents: read
concurrency:
  group: ${{ github.workflow }}-${{ github.ref }}
  cancel-in-progress: true
env:
  CARGO_INCREMENTAL: 0
jobs:
";

/// The last job: its result is the one that a branch needs, and its summary tells what was not run.
const REPORT: &str = "
  report:
    if: always()
    needs: [NEEDS]
    runs-on: ubuntu-24.04
    steps:
      - uses: actions/checkout@v4
      - run: python3 ci/report.py <<<\"$RESULTS\" >> \"$GITHUB_STEP_SUMMARY\"
        env:
          RESULTS: ${{ toJSON(needs) }}
";

fn workflow(matrix: &Value) -> String {
    let mut out = HEAD.to_owned();
    let mut ids = Vec::new();
    for (i, row) in rows(matrix).iter().enumerate() {
        let (name, label) = (text(row, "job"), text(row, "runner"));
        let runner = &matrix["runners"][label];
        assert!(row["required"].is_boolean() && !text(row, "what").is_empty(), "{row}");
        let id = name.replace(':', "-");
        let mut line = |text: String| writeln!(out, "{text}").expect("a text takes everything");
        if i > 0 {
            line(String::new());
        }
        line(format!("  {id}:"));
        line(format!("    name: {name}"));
        if runner["device"] == true {
            // A runner that the repository does not have would be waited for, and no job may pass without it.
            line(format!("    if: contains(fromJSON(vars.RUNNERS || '[]'), '{label}')"));
        }
        line(format!("    runs-on: {}", text(runner, "runs-on")));
        if runner["container"].is_string() {
            line(format!("    container: {}", text(runner, "container")));
        }
        line("    timeout-minutes: 120".to_owned());
        line("    steps:".to_owned());
        line("      - uses: actions/checkout@v4".to_owned());
        if runner["container"].is_string() {
            line("      - run: apt-get update -qq && apt-get install -y -qq python3-venv".to_owned());
        }
        line("      - run: rustup toolchain install stable --profile minimal --component clippy,rustfmt".to_owned());
        match runner["toolchain"].as_str() {
            None => {}
            Some("nightly") => line(
                "      - run: rustup toolchain install nightly --profile minimal --component miri,rust-src".to_owned(),
            ),
            Some(version) => line(format!("      - run: rustup toolchain install {version} --profile minimal")),
        }
        line("      - uses: Swatinem/rust-cache@v2".to_owned());
        line(format!("      - run: ci/run.sh --require {name}"));
        ids.push(id);
    }
    out + &REPORT.replace("NEEDS", &ids.join(", "))
}

/// What the report says of these results, and whether it fails.
fn report(results: &Value) -> Option<(String, bool)> {
    use std::process::{Command, Stdio};
    let started = Command::new("python3").arg("ci/report.py").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    let mut python = match started {
        Ok(python) => python,
        Err(error) => {
            latentwave::testing::not_run("ci_matrix", "python3", &error);
            return None;
        }
    };
    std::io::Write::write_all(&mut python.stdin.take().expect("a pipe"), results.to_string().as_bytes())
        .expect("stdin");
    let output = python.wait_with_output().expect("it ends");
    Some((String::from_utf8(output.stdout).expect("UTF-8"), output.status.success()))
}

#[test]
fn what_was_not_run_is_never_reported_as_passed() {
    let matrix = matrix();
    let results = |job: &str, result: &str| -> Value {
        let all = rows(&matrix).iter().map(|row| {
            let name = text(row, "job");
            let usual = if matrix["runners"][text(row, "runner")]["device"] == true { "skipped" } else { "success" };
            (name.replace(':', "-"), serde_json::json!({"result": if name == job { result } else { usual }}))
        });
        Value::Object(all.collect())
    };
    let Some((said, passed)) = report(&results("", "")) else { return };
    assert!(passed, "{said}");
    let line = |said: &str, job: &str| said.lines().find(|line| line.contains(job)).map(str::to_owned).expect("a row");
    assert!(line(&said, "`test`").contains("passed"), "{said}");
    assert!(line(&said, "`cuda_device:sm_90`").contains("not run: no runner labelled sm_90"), "{said}");
    // A required job that was skipped, cancelled or failed fails the whole; another's failure is shown.
    for result in ["skipped", "cancelled", "failure"] {
        let (said, passed) = report(&results("test", result)).expect("python3 is there");
        assert!(!passed && !line(&said, "`test`").contains("passed"), "{result}: {said}");
    }
    let (said, passed) = report(&results("cuda_device:sm_90", "failure")).expect("python3 is there");
    assert!(passed && line(&said, "`cuda_device:sm_90`").contains("failed"), "{said}");
    // A row that no job reported on.
    assert!(!report(&serde_json::json!({})).expect("python3 is there").1);
}
