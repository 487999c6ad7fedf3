//! `ci/matrix.json` and `ci/run.sh` name the same jobs.

use std::collections::BTreeSet;

#[test]
fn the_matrix_lists_every_job_and_no_other() {
    let matrix = std::fs::read_to_string("ci/matrix.json").expect("ci/matrix.json");
    let matrix: serde_json::Value = serde_json::from_str(&matrix).expect("matrix.json is JSON");
    let listed: BTreeSet<String> = matrix["jobs"]
        .as_array()
        .expect("a list of jobs")
        .iter()
        .map(|row| row["job"].as_str().expect("a job's name").to_owned())
        .collect();
    assert_eq!(listed.len(), matrix["jobs"].as_array().map_or(0, Vec::len), "a job stands there twice");
    let script = std::fs::read_to_string("ci/run.sh").expect("ci/run.sh");
    let defined: BTreeSet<String> =
        script.lines().filter_map(|line| line.strip_prefix("job_")?.strip_suffix("() {")).map(str::to_owned).collect();
    // Parts of `test` that can be run alone have no row of their own.
    let parts: BTreeSet<String> = ["format", "lint", "docs", "unit", "readme", "package"].map(str::to_owned).into();
    assert_eq!(listed.union(&parts).cloned().collect::<BTreeSet<_>>(), defined);
}
