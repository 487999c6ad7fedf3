//! The `latentwave` program.
#![allow(dead_code)]
mod alloc;
mod replay { pub(crate) mod pages; pub(crate) mod plots; pub(crate) mod report; pub(crate) mod scheduler; pub(crate) mod stats; pub(crate) mod trace; }
mod rng;
mod text;
#[global_allocator]
static ALLOCATOR: alloc::Counting = alloc::Counting;
fn main() {}
