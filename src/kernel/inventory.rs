//! What this build carries, has cached and could compile; and how archives of compiled kernels are made.

use std::path::{Path, PathBuf};

use super::cache::{CacheStatus, DiskCache};
use super::compile::{Compiled, Compiler};
use super::embedded;
use super::source::{self, Dialect, Source};
use super::{Variant, select, wave_of};
use crate::error::{Error, Result};

/// What there is for running kernels on this machine.
#[derive(Debug, Clone)]
pub struct Inventory {
    /// Code carried in the library, per architecture.
    pub archives: Vec<ArchiveStatus>,
    /// The disk cache.
    pub cache: CacheStatus,
    /// The run-time compilers of the backends in this build.
    pub compilers: Vec<CompilerStatus>,
}

/// Code carried for one architecture.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArchiveStatus {
    /// The architecture.
    pub arch: &'static str,
    /// Who compiled it.
    pub compiler: String,
    /// Kernels that fit the sources of this build.
    pub fresh: usize,
    /// Names of kernels of the selection table whose code is missing or was made from other sources.
    pub stale: Vec<String>,
    /// Bytes of code, compressed.
    pub bytes: usize,
}

/// A run-time compiler.
#[derive(Debug, Clone)]
pub struct CompilerStatus {
    /// Name of the backend.
    pub backend: &'static str,
    /// Name and version, or why there is none.
    pub version: std::result::Result<String, String>,
}

/// Looks at what this build carries of the selection table, at the disk cache and at the compilers. Opens the compilers'
/// libraries, but no device.
pub fn inventory() -> Inventory {
    Inventory {
        archives: embedded::architectures().map(|arch| archive_status(arch, &select::variants(arch))).collect(),
        cache: DiskCache::from_env().status(),
        compilers: BACKENDS
            .iter()
            .map(|backend| {
                let version = (backend.compiler)();
                let version = version.map(|compiler| compiler.version().to_owned()).map_err(|error| error.to_string());
                CompilerStatus { backend: backend.dialect.backend, version }
            })
            .collect(),
    }
}

fn archive_status(arch: &'static str, variants: &[Variant]) -> ArchiveStatus {
    let manifest = embedded::manifest(arch);
    let kernels = manifest.as_ref().map_or(&[][..], |manifest| &manifest.kernels);
    let (fresh, stale) = variants.iter().partition::<Vec<&Variant>, _>(|variant| {
        backend_of(arch).is_some_and(|backend| {
            let source = Source::new(backend.dialect, variant, wave_of(arch));
            let hash = source.hash();
            kernels.iter().any(|kernel| kernel.variant == source.name && kernel.source == hash)
        })
    });
    ArchiveStatus {
        arch,
        fresh: fresh.len(),
        stale: stale.iter().map(ToString::to_string).collect(),
        // The last kernel ends the archive.
        bytes: kernels.iter().map(|kernel| kernel.offset + kernel.stored).max().unwrap_or(0),
        compiler: manifest.map(|manifest| manifest.compiler).unwrap_or_default(),
    }
}

/// How the kernels of one backend are compiled.
struct KernelBackend {
    dialect: &'static Dialect,
    /// Beginning of its architectures' names.
    arch_prefix: &'static str,
    /// The run-time compiler.
    compiler: fn() -> Result<&'static dyn Compiler>,
    /// What makes archives for an architecture.
    ahead: fn(&str) -> Result<&'static dyn Compiler>,
}

const BACKENDS: &[KernelBackend] = &[
    #[cfg(feature = "cuda")]
    KernelBackend {
        dialect: &source::CUDA,
        arch_prefix: "sm_",
        compiler: || crate::backend::cuda::nvrtc().map(|nvrtc| nvrtc as &dyn Compiler),
        ahead: |_| crate::backend::cuda::nvrtc().map(|nvrtc| nvrtc as &dyn Compiler),
    },
    #[cfg(feature = "rocm")]
    KernelBackend {
        dialect: &source::ROCM,
        arch_prefix: "gfx",
        compiler: || crate::backend::rocm::hiprtc().map(|hiprtc| hiprtc as &dyn Compiler),
        ahead: crate::backend::rocm::ahead,
    },
];

fn backend_of(arch: &str) -> Option<&'static KernelBackend> {
    BACKENDS.iter().find(|backend| arch.starts_with(backend.arch_prefix))
}

fn require_backend(arch: &str) -> Result<&'static KernelBackend> {
    backend_of(arch).ok_or_else(|| {
        let known: Vec<_> = BACKENDS.iter().map(|backend| format!("{}*", backend.arch_prefix)).collect();
        Error::argument("arch", format!("`{arch}` is none of this build's architectures: {}", known.join(", ")))
    })
}

/// Compiles `variants` for `arch` (`sm_90a`, `gfx942`) and writes the archive `<folder>/<arch>.kernels`, which a later build of
/// this crate carries. Needs no GPU: the compiler is NVRTC; for AMD it is hipRTC or, where that is not found or does not know
/// the architecture, a clang program with lld. `done` is told of each kernel as it is made, from any thread.
///
/// # Errors
/// [`Error::Argument`] for an architecture of no backend in this build, [`Error::Unavailable`] without the compiler,
/// [`Error::Compile`], [`Error::Io`].
pub fn precompile(
    folder: &Path,
    arch: &str,
    variants: &[Variant],
    done: impl Fn(&Variant, &Compiled) + Sync,
) -> Result<PathBuf> {
    let backend = require_backend(arch)?;
    let archive = embedded::build(backend.dialect, (backend.ahead)(arch)?, arch, variants, done)?;
    let path = folder.join(format!("{arch}.kernels"));
    let written = std::fs::create_dir_all(folder).and_then(|()| std::fs::write(&path, archive));
    written.map_err(|source| Error::Io { path: path.clone(), source })?;
    Ok(path)
}

/// What that vendor's compiler is given for one kernel.
///
/// # Errors
/// [`Error::Argument`] for an architecture of no backend in this build.
pub fn source_of(arch: &str, variant: &Variant) -> Result<Source> {
    Ok(Source::new(require_backend(arch)?.dialect, variant, wave_of(arch)))
}

/// Compiles one kernel for `arch` with that vendor's run-time compiler. Needs no GPU.
///
/// # Errors
/// As [`precompile`].
pub fn compile(arch: &str, variant: &Variant) -> Result<Compiled> {
    (require_backend(arch)?.compiler)()?.compile(&source_of(arch, variant)?, arch)
}
