//! What users reported broken elsewhere, as tests that it is not broken here. Each test's name has the number of the report in
//! the list that it was taken from; its comment names the public thread.

mod common;
#[path = "user_reports/numeric.rs"]
mod numeric;
#[path = "user_reports/policy.rs"]
mod policy;
