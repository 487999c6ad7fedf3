//! The host backend: the same plan, workspace, parameter blocks, capture and replay, with kernels written in Rust.
