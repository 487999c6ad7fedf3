//! The `latentwave` program.
fn main() {}
