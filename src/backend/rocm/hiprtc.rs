//! hipRTC, the run-time compiler, used to native code. It needs no GPU.

use std::sync::OnceLock;

use hip_sys::{Error as HipSysError, Hip, Version};

use super::clang::clang;
use super::driver::{NAME, typed};
use crate::error::{Error, Result};
use crate::kernel::{Compiled, Compiler, Source};

/// The run-time compiler.
pub(crate) struct Hiprtc {
    rtc: &'static hip_sys::Hiprtc,
    version: String,
}

/// Oldest release whose compiler (LLVM 17) has all the operations that the kernels are written with.
const OLDEST: Version = Version { major: 5, minor: 7, patch: 0 };

/// The compiler, opened once per process and never closed.
///
/// # Errors
/// [`Error::Unavailable`] with what was tried, or where the compiler is older than HIP 5.7.
pub(crate) fn hiprtc() -> Result<&'static Hiprtc> {
    static HIPRTC: OnceLock<Hiprtc> = OnceLock::new();
    match HIPRTC.get() {
        Some(hiprtc) => Ok(hiprtc),
        None => {
            let rtc = hip_sys::Hiprtc::load().map_err(typed)?;
            // The version that hipRTC gives of itself is that of its interface, 9.0 in all releases; the runtime's tells them
            // apart, and so does the path where that is not to be had.
            let release = match Hip::load().and_then(Hip::runtime_version) {
                Ok(version) if version < OLDEST => {
                    let reason =
                        format!("HIP {version} has a compiler too old for the kernels; update to {OLDEST} or later");
                    return Err(Error::Unavailable { backend: NAME, library: "libhiprtc", reason });
                }
                Ok(version) => version.to_string(),
                Err(_) => rtc.path().display().to_string(),
            };
            Ok(HIPRTC.get_or_init(|| Hiprtc { rtc, version: format!("hiprtc {release}") }))
        }
    }
}

/// What compiles for `arch` ahead of time: hipRTC if it is there and knows that architecture, else a clang program.
///
/// # Errors
/// [`Error::Unavailable`] where there is neither.
pub(crate) fn ahead(arch: &str) -> Result<&'static dyn Compiler> {
    match hiprtc() {
        Ok(hiprtc) if hiprtc.rtc.knows(arch) => Ok(hiprtc),
        _ => clang().map(|clang| clang as &dyn Compiler),
    }
}

impl Compiler for Hiprtc {
    fn version(&self) -> &str {
        &self.version
    }

    fn compile(&self, source: &Source, arch: &str) -> Result<Compiled> {
        let target = format!("--offload-arch={arch}");
        let options: Vec<&str> = source.options.iter().map(String::as_str).chain([&*target]).collect();
        match self.rtc.compile(&format!("{}.cu", source.name), &source.text, &[], &options) {
            // Registers and LDS are in the code object's notes, not in the log.
            Ok(compiled) => Ok(Compiled { code: compiled.code, log: compiled.log, resources: None }),
            Err(HipSysError::Compile { log, .. }) => {
                Err(Error::Compile { kernel: source.name.clone(), arch: arch.to_owned(), log })
            }
            Err(error) => Err(typed(error)),
        }
    }
}
