//! Every kernel compiles with hipRTC, as a user's machine would do it. Needs hipRTC, but no GPU.

use latentwave::Error;
use latentwave::kernel::{self, select};
use rayon::prelude::*;

use super::support::not_run;

/// Architectures of AMD that the selection table serves.
const ARCHES: [&str; 5] = ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"];

#[test]
fn every_shipped_variant_compiles_for_every_architecture_that_the_compiler_knows() {
    // Absent, or too old.
    if let Err(error @ Error::Unavailable { .. }) = kernel::compile("gfx90a", &select::variants("gfx90a")[0]) {
        return not_run("hiprtc", &error);
    }
    let rtc = hip_sys::Hiprtc::load().unwrap();
    for arch in ARCHES {
        if !rtc.knows(arch) {
            not_run("hiprtc", &format!("this release does not know {arch}"));
            continue;
        }
        let variants = select::variants(arch);
        assert!(variants.len() >= 10, "{arch}: {} variants", variants.len());
        let problems: Vec<String> = variants
            .par_iter()
            .filter_map(|variant| match kernel::compile(arch, variant) {
                Ok(compiled) => {
                    (!compiled.code.starts_with(b"\x7fELF")).then(|| format!("{variant}: not a code object"))
                }
                Err(error) => Some(error.to_string()),
            })
            .collect();
        assert!(problems.is_empty(), "{arch}: {} of {}:\n{}", problems.len(), variants.len(), problems.join("\n"));
        println!("{arch}: {} variants", variants.len());
    }
}

#[test]
fn an_architecture_that_the_compiler_does_not_know_is_a_typed_error() {
    let variant = select::variants("gfx90a")[0];
    match kernel::compile("gfx000", &variant) {
        Err(Error::Compile { arch, log, .. }) => assert!(arch == "gfx000" && log.contains("gfx000"), "{log}"),
        Err(error @ Error::Unavailable { .. }) => not_run("hiprtc", &error),
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_same_compiler_makes_the_same_archive() {
    let folder = std::env::temp_dir().join(format!("latentwave-archives-{}", std::process::id()));
    let make = |name: &str| -> latentwave::Result<Vec<u8>> {
        let path = kernel::precompile(&folder.join(name), "gfx90a", &select::variants("gfx90a")[..1], |_, _| {})?;
        Ok(std::fs::read(path).unwrap())
    };
    match make("one") {
        Err(error @ Error::Unavailable { .. }) => not_run("hiprtc or clang", &error),
        Err(other) => panic!("{other}"),
        Ok(archive) => assert!(archive == make("two").unwrap(), "two runs differ"),
    }
    let _ = std::fs::remove_dir_all(&folder);
}
