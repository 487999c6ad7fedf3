//! Kernels compiled ahead and carried in the library: one archive per architecture under `kernels/prebuilt/`.
//!
//! An archive is `LWKERNEL`, the length of the manifest (u32, little-endian), the manifest as JSON, and the kernels, each
//! compressed by itself. The manifest gives each kernel's source hash. A kernel whose source has changed since is not used;
//! `tests/kernels.rs` fails on it.

use std::io::{Read, Write};

use flate2::Compression;
use flate2::read::DeflateDecoder;
use flate2::write::DeflateEncoder;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::compile::{Compiled, Compiler};
use super::source::{Dialect, Source};
use super::{Variant, wave_of};
use crate::error::{Error, Result};

const MAGIC: &[u8; 8] = b"LWKERNEL";

macro_rules! prebuilt {
    ($arch:literal) => {
        ($arch, include_bytes!(concat!("../../kernels/prebuilt/", $arch, ".kernels")))
    };
}

/// The archives of this build.
const ARCHIVES: &[(&str, &[u8])] = &[
    #[cfg(feature = "cuda")]
    prebuilt!("sm_80"),
    #[cfg(feature = "cuda")]
    prebuilt!("sm_86"),
    #[cfg(feature = "cuda")]
    prebuilt!("sm_89"),
    #[cfg(feature = "cuda")]
    prebuilt!("sm_90a"),
    #[cfg(feature = "cuda")]
    prebuilt!("sm_100a"),
    #[cfg(feature = "cuda")]
    prebuilt!("sm_120a"),
    #[cfg(feature = "rocm")]
    prebuilt!("gfx90a"),
    #[cfg(feature = "rocm")]
    prebuilt!("gfx942"),
    #[cfg(feature = "rocm")]
    prebuilt!("gfx950"),
    #[cfg(feature = "rocm")]
    prebuilt!("gfx1100"),
    #[cfg(feature = "rocm")]
    prebuilt!("gfx1201"),
];

/// What an archive holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Architecture of the code.
    pub arch: String,
    /// Who compiled it.
    pub compiler: String,
    /// The kernels, in order.
    pub kernels: Vec<ManifestEntry>,
}

/// One kernel of an archive.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ManifestEntry {
    /// Name of the variant.
    pub variant: String,
    /// Hash of the source and options that it was compiled from.
    pub source: String,
    /// Where its code begins, behind the manifest. Entries of one source share their code.
    pub offset: usize,
    /// Bytes in the archive.
    pub stored: usize,
    /// Bytes once decompressed.
    pub size: usize,
}

/// Architectures that this build carries code for.
pub fn architectures() -> impl Iterator<Item = &'static str> {
    ARCHIVES.iter().map(|(arch, _)| *arch)
}

/// The manifest of the archive for `arch`, if this build carries one.
pub fn manifest(arch: &str) -> Option<Manifest> {
    Some(open(archive(arch)?)?.0)
}

/// The code compiled ahead from exactly this source for this architecture.
pub(super) fn find(source: &Source, arch: &str) -> Option<Vec<u8>> {
    extract(archive(arch)?, source)
}

/// AMD writes features behind the name (`gfx942:sramecc+:xnack-`); code compiled without any runs with all.
fn archive(arch: &str) -> Option<&'static [u8]> {
    let base = arch.split(':').next();
    ARCHIVES.iter().find(|(name, _)| Some(*name) == base).map(|(_, bytes)| *bytes)
}

/// Manifest and kernels of an archive.
fn open(archive: &[u8]) -> Option<(Manifest, &[u8])> {
    let rest = archive.strip_prefix(MAGIC)?;
    let (length, rest) = rest.split_first_chunk()?;
    let (manifest, kernels) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
    Some((serde_json::from_slice(manifest).ok()?, kernels))
}

/// The code that an archive (of [`build`]) holds for exactly this source. A damaged archive holds none.
pub fn extract(archive: &[u8], source: &Source) -> Option<Vec<u8>> {
    let (manifest, kernels) = open(archive)?;
    let entry = manifest.kernels.into_iter().find(|entry| entry.variant == source.name)?;
    if entry.source != source.hash() {
        return None;
    }
    let stored = kernels.get(entry.offset..)?.get(..entry.stored)?;
    let mut code = Vec::new();
    // A bound on what is read, should the archive be damaged.
    DeflateDecoder::new(stored).take((entry.size as u64).saturating_add(1)).read_to_end(&mut code).ok()?;
    (code.len() == entry.size).then_some(code)
}

/// Compiles `variants` for `arch` and packs them into an archive. `done` is told of each kernel as it is made, from any
/// thread. The same compiler makes the same archive again.
///
/// # Errors
/// [`Error::Compile`] for the first variant that does not compile.
pub fn build(
    dialect: &Dialect,
    compiler: &dyn Compiler,
    arch: &str,
    variants: &[Variant],
    done: impl Fn(&Variant, &Compiled) + Sync,
) -> Result<Vec<u8>> {
    let mut variants = variants.to_vec();
    variants.sort();
    variants.dedup();
    let compiled: Vec<(Source, Vec<u8>)> = variants
        .par_iter()
        .map(|variant| {
            let source = Source::new(dialect, variant, wave_of(arch));
            let compiled = compiler.compile(&source, arch)?;
            done(variant, &compiled);
            Ok((source, compiled.code))
        })
        .collect::<Result<_>>()?;
    let mut entries: Vec<ManifestEntry> = Vec::new();
    let mut kernels = Vec::new();
    for (source, code) in compiled {
        let hash = source.hash();
        // Entry points of one file with the same constants have one source, and so one binary.
        let entry = match entries.iter().find(|entry| entry.source == hash) {
            Some(twin) => ManifestEntry { variant: source.name, ..twin.clone() },
            None => {
                let stored = compress(&code)?;
                let (offset, size) = (kernels.len(), code.len());
                kernels.extend(&stored);
                ManifestEntry { variant: source.name, source: hash, offset, stored: stored.len(), size }
            }
        };
        entries.push(entry);
    }
    let manifest = Manifest { arch: arch.to_owned(), compiler: compiler.version().to_owned(), kernels: entries };
    let manifest = serde_json::to_vec(&manifest).map_err(packing)?;
    let length = u32::try_from(manifest.len()).map_err(packing)?.to_le_bytes();
    Ok([&MAGIC[..], &length, &manifest, &kernels].concat())
}

fn compress(code: &[u8]) -> Result<Vec<u8>> {
    let mut encoder = DeflateEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(code).and_then(|()| encoder.finish()).map_err(packing)
}

fn packing(error: impl ToString) -> Error {
    Error::Parse { what: "a kernel archive".into(), place: "while packing".into(), problem: error.to_string() }
}

#[cfg(test)]
mod tests {
    use super::super::source::SourceFile;
    use super::super::{Entry, Resources};
    use super::*;
    use crate::tensor::DType;

    const DIALECT: Dialect = Dialect {
        backend: "test",
        vendor: SourceFile { name: "vendor.h", text: "// one" },
        mma: SourceFile { name: "mma.h", text: "" },
        options: &[],
    };

    struct Echo;

    impl Compiler for Echo {
        fn version(&self) -> &str {
            "echo 1"
        }

        fn compile(&self, source: &Source, arch: &str) -> Result<Compiled> {
            let resources = Some(Resources { registers: 1, shared_bytes: 0, spill_bytes: 0 });
            let code = format!("{arch} {} {:?}", source.text, source.options).into_bytes();
            Ok(Compiled { code, log: String::new(), resources })
        }
    }

    #[test]
    fn an_archive_gives_back_what_its_source_hash_still_fits() {
        let variants = [Entry::Plan, Entry::MergeStates, Entry::DcpCombine].map(|e| Variant::simple(e, DType::BF16));
        let told = std::sync::atomic::AtomicUsize::new(0);
        let count = |_: &Variant, _: &Compiled| {
            told.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        };
        let archive = build(&DIALECT, &Echo, "sm_90a", &variants, count).unwrap();
        assert_eq!(told.into_inner(), 3);
        assert_eq!(archive, build(&DIALECT, &Echo, "sm_90a", &variants, |_, _| {}).unwrap());
        for variant in &variants {
            let source = Source::new(&DIALECT, variant, 32);
            assert_eq!(extract(&archive, &source), Some(Echo.compile(&source, "sm_90a").unwrap().code));
            let newer = Dialect { vendor: SourceFile { name: "vendor.h", text: "// two" }, ..DIALECT };
            assert_eq!(extract(&archive, &Source::new(&newer, variant, 32)), None, "stale");
        }
        let merges = open(&archive).unwrap().0.kernels;
        assert!(
            merges.iter().any(|a| merges.iter().any(|b| a.variant < b.variant && a.offset == b.offset)),
            "shared code"
        );
        let absent = Variant::simple(Entry::DecodeSplit, DType::BF16);
        assert_eq!(extract(&archive, &Source::new(&DIALECT, &absent, 32)), None);
    }

    #[test]
    fn a_damaged_archive_gives_nothing_and_does_not_panic() {
        let variant = Variant::simple(Entry::Plan, DType::BF16);
        let source = Source::new(&DIALECT, &variant, 32);
        let archive = build(&DIALECT, &Echo, "sm_90a", &[variant], |_, _| {}).unwrap();
        for cut in 0..archive.len() {
            assert_eq!(extract(&archive[..cut], &source), None, "cut at {cut}");
        }
        assert_eq!(extract(b"another file", &source), None);
        // A manifest that promises more than can be.
        let (mut manifest, kernels) = open(&archive).unwrap();
        for size in [0, usize::MAX] {
            manifest.kernels[0].size = size;
            let json = serde_json::to_vec(&manifest).unwrap();
            let promising = [&MAGIC[..], &(json.len() as u32).to_le_bytes(), &json, kernels].concat();
            assert_eq!(extract(&promising, &source), None, "{size} bytes promised");
        }
    }
}
