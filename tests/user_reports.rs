//! What users of this area reported broken elsewhere, each as a named test. Numbers are those of the list that the project keeps.

mod common;
#[path = "user_reports/numeric.rs"]
mod numeric;
