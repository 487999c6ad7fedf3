//! A clang program with AMD's targets and lld, which makes the code that the library carries where there is no hipRTC. It needs
//! no ROCm and no GPU: the kernels include nothing.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use super::driver::NAME;
use crate::error::{Error, Result};
use crate::kernel::{Compiled, Compiler, Source};

/// The compiler.
pub(crate) struct Clang {
    program: PathBuf,
    version: String,
}

/// Names under which distributions install a release that knows all architectures; ROCm's own lies under its root.
const PROGRAMS: [&str; 3] = ["clang++-22", "clang++-23", "clang++"];

/// Options beside those of the dialect: device code alone, from standard input to standard output, with nothing of the machine
/// in it.
const OPTIONS: [&str; 9] = [
    "-xhip",
    "--offload-device-only",
    "--no-gpu-bundle-output",
    "-nogpulib",
    "-nogpuinc",
    "-fuse-ld=lld",
    "-fuse-cuid=none",
    "-Wno-pass-failed",
    "-o-",
];

/// The compiler, looked for once per process.
///
/// # Errors
/// [`Error::Unavailable`] with the programs that were tried.
pub(crate) fn clang() -> Result<&'static Clang> {
    static CLANG: OnceLock<Option<Clang>> = OnceLock::new();
    CLANG.get_or_init(|| programs().find_map(Clang::open)).as_ref().ok_or_else(|| {
        let tried: Vec<_> = programs().map(|program| program.display().to_string()).collect();
        let reason = format!("install clang 22 and lld 22, or hipRTC; tried the programs {}", tried.join(", "));
        Error::Unavailable { backend: NAME, library: "clang", reason }
    })
}

fn programs() -> impl Iterator<Item = PathBuf> {
    let root = std::env::var_os("ROCM_PATH").map(PathBuf::from).unwrap_or_else(|| "/opt/rocm".into());
    PROGRAMS.map(PathBuf::from).into_iter().chain([root.join("llvm/bin/clang++")])
}

impl Clang {
    fn open(program: PathBuf) -> Option<Self> {
        let output = Command::new(&program).arg("--version").output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        let version = text.split_once("clang version ")?.1.split_whitespace().next()?;
        Some(Self { version: format!("clang {version}"), program })
    }

    fn failed(program: &Path, source: std::io::Error) -> Error {
        Error::Io { path: program.to_owned(), source }
    }
}

impl Compiler for Clang {
    fn version(&self) -> &str {
        &self.version
    }

    fn compile(&self, source: &Source, arch: &str) -> Result<Compiled> {
        let failed = |error| Self::failed(&self.program, error);
        let mut clang = Command::new(&self.program)
            .args(OPTIONS)
            .arg(format!("--offload-arch={arch}"))
            .args(&source.options)
            .arg("-")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        // It reads all of its input before it writes. One that ends early says why in its log.
        let written = clang.stdin.take().map(|mut input| input.write_all(source.text.as_bytes()));
        let output = clang.wait_with_output().map_err(failed)?;
        let log = String::from_utf8_lossy(&output.stderr).into_owned();
        if !output.status.success() {
            return Err(Error::Compile { kernel: source.name.clone(), arch: arch.to_owned(), log });
        }
        written.unwrap_or(Ok(())).map_err(failed)?;
        Ok(Compiled { code: output.stdout, log, resources: None })
    }
}
