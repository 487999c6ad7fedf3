//! Every kernel compiles with NVRTC, as a user's machine would do it. Needs NVRTC, but no GPU.

use latentwave::kernel::{self, Entry, Variant, select};
use latentwave::testing::not_run;
use latentwave::{DType, Error};
use rayon::prelude::*;

/// Architectures of NVIDIA that the table serves.
const ARCHES: [&str; 6] = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"];

/// Bytes that a thread may spill: a few registers kept around the main loop. `ci/run.sh isa` finds spills inside it.
const MOST_SPILLED: u32 = 64;

/// Whether there is a compiler here; says so if not.
fn has_compiler(test: &str) -> bool {
    match kernel::compile("sm_90a", &Variant::simple(Entry::MergeStates, DType::BF16)) {
        Err(error @ Error::Unavailable { .. }) => {
            not_run(test, "nvrtc", &error);
            false
        }
        _ => true,
    }
}

#[test]
fn every_kernel_compiles_with_hardly_a_spill() {
    if !has_compiler("every_kernel_compiles_with_hardly_a_spill") {
        return;
    }
    // What is shipped, everywhere; and all that the table can choose, once. `ci/run.sh kernels` compiles all of it everywhere.
    let on = |arch: &'static str, variants: Vec<Variant>| variants.into_iter().map(move |variant| (arch, variant));
    let mut cases: Vec<_> = ARCHES.iter().flat_map(|arch| on(arch, select::variants(arch))).collect();
    cases.extend(on("sm_90a", select::all_variants("sm_90a")));
    cases.sort();
    cases.dedup();
    let problems: Vec<String> = cases
        .par_iter()
        .filter_map(|(arch, variant)| match kernel::compile(arch, variant).map(|compiled| compiled.resources) {
            Ok(Some(resources)) => {
                println!("{arch:8} {variant}: {resources:?}");
                (resources.spill_bytes > MOST_SPILLED).then(|| format!("{arch} {variant}: {resources:?}"))
            }
            Ok(None) => Some(format!("{arch} {variant}: no kernel in the output")),
            Err(error) => Some(error.to_string()),
        })
        .collect();
    assert!(problems.is_empty(), "{} of {}:\n{}", problems.len(), cases.len(), problems.join("\n"));
}

#[test]
fn an_unknown_newer_architecture_gets_portable_code() {
    if !has_compiler("an_unknown_newer_architecture_gets_portable_code") {
        return;
    }
    let variant = select::variants("sm_90a")[0];
    let code = kernel::compile("sm_999a", &variant).unwrap().code;
    assert!(String::from_utf8_lossy(&code).contains(".target sm_80"), "PTX that every GPU from 8.0 on takes");
}

#[test]
fn a_kernel_that_does_not_compile_names_itself_the_architecture_and_the_line() {
    if !has_compiler("a_kernel_that_does_not_compile_names_itself_the_architecture_and_the_line") {
        return;
    }
    let broken = Variant { kv_lora_rank: 7, tile_tokens: 3, ..Variant::simple(Entry::DecodeSplit, DType::BF16) };
    match kernel::compile("sm_90a", &broken) {
        Err(Error::Compile { kernel, arch, log }) => {
            assert_eq!((kernel, &*arch), (broken.to_string(), "sm_90a"));
            assert!(log.contains("kernels/") && log.contains("error"), "{log}");
        }
        other => panic!("{other:?}"),
    }
    assert!(matches!(kernel::compile("vax", &broken), Err(Error::Argument { arg: "arch", .. })));
}
