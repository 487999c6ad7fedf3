//! Tests that need a device or a compiler say visibly when they could not run.

use std::io::Write;

/// Prints `not run: REASON`, past the test harness's capturing. Fails if `LATENTWAVE_REQUIRE` names `what`.
pub(crate) fn not_run(what: &str, reason: &str) {
    let required = std::env::var("LATENTWAVE_REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|name| name == what), "{what} is required, but {reason}");
    let test = std::thread::current().name().unwrap_or("test").to_owned();
    // One write, so that parallel tests do not mix their lines.
    let _ = std::io::stderr().write_all(format!("\n{test}: not run: {reason}\n").as_bytes());
}
