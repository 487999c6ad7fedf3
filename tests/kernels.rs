//! The code that the library carries was made from the sources as they are. Needs no GPU and no compiler.
#![cfg(any(feature = "cuda", feature = "rocm"))]

use latentwave::kernel;

/// Architectures that code is carried for.
const ARCHES: &[&str] = &[
    #[cfg(feature = "cuda")]
    "sm_80",
    #[cfg(feature = "cuda")]
    "sm_86",
    #[cfg(feature = "cuda")]
    "sm_89",
    #[cfg(feature = "cuda")]
    "sm_90a",
    #[cfg(feature = "cuda")]
    "sm_100a",
    #[cfg(feature = "cuda")]
    "sm_120a",
    #[cfg(feature = "rocm")]
    "gfx90a",
    #[cfg(feature = "rocm")]
    "gfx942",
    #[cfg(feature = "rocm")]
    "gfx950",
    #[cfg(feature = "rocm")]
    "gfx1100",
    #[cfg(feature = "rocm")]
    "gfx1201",
];

#[test]
fn carried_code_is_complete_and_not_stale() {
    let inventory = kernel::inventory();
    for arch in ARCHES {
        let archive = inventory.archives.iter().find(|archive| archive.arch == *arch).expect(arch);
        assert!(archive.fresh > 0, "{arch} carries nothing");
        assert!(
            archive.stale.is_empty(),
            "{arch}: {} kernels are stale or missing, run `latentwave precompile`: {:?}",
            archive.stale.len(),
            archive.stale
        );
    }
    let bytes: usize = inventory.archives.iter().map(|archive| archive.bytes).sum();
    assert!(bytes < 6 << 20, "{bytes} bytes leave no room in a package of 8 MiB");
}
