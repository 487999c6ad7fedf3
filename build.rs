//! Tells the crate whether this compiler knows the AVX-512 intrinsics (stable since Rust 1.89); older ones build without.

use std::env;
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-check-cfg=cfg(avx512_intrinsics)");
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let version = Command::new(rustc).arg("--version").output();
    let minor = version
        .ok()
        .and_then(|output| String::from_utf8(output.stdout).ok())
        .and_then(|text| text.split('.').nth(1)?.parse::<u32>().ok());
    if minor.is_some_and(|minor| minor >= 89) {
        println!("cargo:rustc-cfg=avx512_intrinsics");
    }
}
