//! NVRTC, the run-time compiler: found and opened by us, used to native code. It needs no GPU and no toolkit.

use std::ffi::{CString, c_char, c_int};
use std::fs;
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::OnceLock;

use cudarc::nvrtc::sys::nvrtcProgram;

use super::driver::{NAME, driver};
use super::library::{function_table, open_global};
use crate::error::{Error, Result};
use crate::kernel::{Compiled, Compiler, Resources, Source};

/// Major versions that are looked for.
const MAJORS: [i32; 2] = [13, 12];

/// Architecture of the portable code made for GPUs that the compiler is too old to know.
const PORTABLE: &str = "compute_80";

/// The version from which on NVRTC keeps results in the driver's cache. It says nothing of a kernel that it finds there, neither what
/// the kernel takes nor that its products are serialised, so it is told not to: this crate has a cache of its own.
const CACHES_FROM: (i32, i32) = (12, 9);

/// ptxas notes that it has serialised asynchronous matrix instructions: such a kernel runs, at a fraction of its speed.
const SERIALISED: [&str; 11] =
    ["C7508", "C7510", "C7511", "C7512", "C7513", "C7514", "C7515", "C7516", "C7517", "C7518", "C7520"];

function_table! {
    /// What is used of NVRTC.
    struct Functions {
        fn nvrtcVersion(*mut c_int, *mut c_int);
        fn nvrtcGetNumSupportedArchs(*mut c_int);
        fn nvrtcGetSupportedArchs(*mut c_int);
        fn nvrtcCreateProgram(
            *mut nvrtcProgram, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char,
        );
        fn nvrtcCompileProgram(nvrtcProgram, c_int, *const *const c_char);
        fn nvrtcDestroyProgram(*mut nvrtcProgram);
        fn nvrtcGetProgramLogSize(nvrtcProgram, *mut usize);
        fn nvrtcGetProgramLog(nvrtcProgram, *mut c_char);
        fn nvrtcGetCUBINSize(nvrtcProgram, *mut usize);
        fn nvrtcGetCUBIN(nvrtcProgram, *mut c_char);
        fn nvrtcGetPTXSize(nvrtcProgram, *mut usize);
        fn nvrtcGetPTX(nvrtcProgram, *mut c_char);
    }
}

/// The run-time compiler.
pub(crate) struct Nvrtc {
    functions: Functions,
    version: String,
    /// Compute capabilities that it makes native code for.
    capabilities: Vec<i32>,
    /// Whether it keeps results by itself.
    caches: bool,
}

/// The compiler, opened once per process and never closed.
///
/// # Errors
/// [`Error::Unavailable`] with what was tried.
pub(crate) fn nvrtc() -> Result<&'static Nvrtc> {
    static NVRTC: OnceLock<Nvrtc> = OnceLock::new();
    match NVRTC.get() {
        Some(nvrtc) => Ok(nvrtc),
        None => {
            let nvrtc = Nvrtc::find()?;
            Ok(NVRTC.get_or_init(|| nvrtc))
        }
    }
}

fn library_name(major: i32) -> String {
    if cfg!(windows) { format!("nvrtc64_{major}0_0.dll") } else { format!("libnvrtc.so.{major}") }
}

/// Folders that CUDA toolkits, conda and pip put the library into. Those that the system's loader searches come first, as an
/// empty path.
fn folders() -> Vec<PathBuf> {
    let var = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    let path = |name| var(name).map(PathBuf::from);
    let mut folders = vec![PathBuf::new()];
    folders.extend(["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(path).map(|root| root.join("lib64")));
    folders.extend(path("CONDA_PREFIX").map(|root| root.join("lib")));
    folders.push("/usr/local/cuda/lib64".into());
    // Python environments: the active ones, and those whose programs are found.
    let mut prefixes: Vec<PathBuf> = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(path).collect();
    let programs = var("PATH").unwrap_or_default();
    prefixes.extend(std::env::split_paths(&programs).filter_map(|bin| bin.parent().map(Path::to_owned)));
    prefixes.dedup();
    for prefix in prefixes {
        for python in fs::read_dir(prefix.join("lib")).into_iter().flatten().flatten() {
            if python.file_name().to_string_lossy().starts_with("python3") {
                let packages =
                    ["site-packages", "dist-packages"].map(|packages| python.path().join(packages).join("nvidia"));
                let nvidia = packages.into_iter().filter(|folder| folder.is_dir());
                folders.extend(
                    nvidia.flat_map(|nvidia| ["cu13", "cuda_nvrtc"].map(|package| nvidia.join(package).join("lib"))),
                );
            }
        }
    }
    folders
}

impl Nvrtc {
    fn find() -> Result<Self> {
        let mut tried = Vec::new();
        for path in Self::candidates() {
            match Self::open(&path) {
                Ok(nvrtc) => return Ok(nvrtc),
                Err(error) => tried.push(format!("{}: {error}", path.display())),
            }
        }
        let hint = "install it (pip install nvidia-cuda-nvrtc) and set LATENTWAVE_NVRTC to its folder";
        Err(Error::Unavailable {
            backend: NAME,
            library: "NVRTC",
            reason: format!("{hint}; tried {}", tried.join("; ")),
        })
    }

    /// Paths to try, best first. Code of a compiler newer than the driver may not load, so those come last.
    fn candidates() -> Vec<PathBuf> {
        let driver_major = driver().and_then(|driver| driver.version()).map_or(i32::MAX, |version| version / 1000);
        let mut majors = MAJORS;
        majors.sort_by_key(|&major| major > driver_major);
        let named = std::env::var_os("LATENTWAVE_NVRTC").filter(|value| !value.is_empty()).map(PathBuf::from);
        let folders = match named {
            Some(path) if !path.is_dir() => return vec![path],
            Some(folder) => vec![folder],
            None => folders(),
        };
        majors.iter().flat_map(|&major| folders.iter().map(move |folder| folder.join(library_name(major)))).collect()
    }

    fn open(path: &Path) -> Result<Self, String> {
        // NVRTC opens its built-in headers by name only, which fails where the system's loader does not search this folder,
        // so they are opened before it.
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
                if entry.file_name().to_string_lossy().starts_with("libnvrtc-builtins.so.") {
                    std::mem::forget(open_global(&entry.path()));
                }
            }
        }
        let library = open_global(path)?;
        // SAFETY: the types are those of NVRTC's published interface, and the library is forgotten.
        let functions = unsafe { Functions::resolve(&library) }?;
        std::mem::forget(library);
        let (mut major, mut minor, mut count) = (0, 0, 0);
        // SAFETY: the pointers are valid for the calls.
        let codes = unsafe {
            [(functions.nvrtcVersion)(&mut major, &mut minor), (functions.nvrtcGetNumSupportedArchs)(&mut count)]
        };
        let mut capabilities = vec![0; usize::try_from(count).unwrap_or(0)];
        // SAFETY: the array has as many elements as the library said.
        let code = unsafe { (functions.nvrtcGetSupportedArchs)(capabilities.as_mut_ptr()) };
        match codes.into_iter().chain([code]).find(|&code| code != 0) {
            None => {
                let caches = (major, minor) >= CACHES_FROM;
                Ok(Self { functions, version: format!("nvrtc {major}.{minor}"), capabilities, caches })
            }
            Some(code) => Err(format!("opened, but it answers with error {code}")),
        }
    }

    /// The compiler's own name for the target, and whether that is native code.
    fn target(&self, arch: &str) -> (String, bool) {
        let digits: String = arch.chars().filter(char::is_ascii_digit).collect();
        match digits.parse().is_ok_and(|capability| self.capabilities.contains(&capability)) {
            true => (arch.to_owned(), true),
            false => (PORTABLE.to_owned(), false),
        }
    }
}

/// A program, destroyed on drop.
struct Program<'a> {
    functions: &'a Functions,
    handle: nvrtcProgram,
}

impl Program<'_> {
    /// One of the library's pairs of a size query and a read.
    fn read(
        &self,
        size: unsafe extern "C" fn(nvrtcProgram, *mut usize) -> i32,
        read: unsafe extern "C" fn(nvrtcProgram, *mut c_char) -> i32,
    ) -> Result<Vec<u8>, i32> {
        let mut bytes = 0;
        // SAFETY: the program is live, the pointer is valid for the call.
        status(unsafe { size(self.handle, &mut bytes) })?;
        let mut buffer = vec![0_u8; bytes];
        // SAFETY: the buffer has the size that the library asked for.
        status(unsafe { read(self.handle, buffer.as_mut_ptr().cast()) })?;
        Ok(buffer)
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: made by this library, destroyed once.
        unsafe { (self.functions.nvrtcDestroyProgram)(&mut self.handle) };
    }
}

fn status(code: i32) -> Result<(), i32> {
    if code == 0 { Ok(()) } else { Err(code) }
}

impl Compiler for Nvrtc {
    fn version(&self) -> &str {
        &self.version
    }

    fn compile(&self, source: &Source, arch: &str) -> Result<Compiled> {
        let failed = |log: String| Error::Compile { kernel: source.name.clone(), arch: arch.to_owned(), log };
        let c_string =
            |text: &str| CString::new(text).map_err(|_| failed("a zero byte in the source or options".into()));
        let (target, native) = self.target(arch);
        let text = c_string(&source.text)?;
        let name = c_string(&format!("{}.cu", source.name))?;
        let arch_option = format!("--gpu-architecture={target}");
        let options: Vec<CString> = (source
            .options
            .iter()
            .map(String::as_str)
            .chain([&*arch_option])
            .chain(self.caches.then_some("--no-cache")))
        .map(c_string)
        .collect::<Result<_>>()?;
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();

        let functions = &self.functions;
        let mut program = Program { functions, handle: null_mut() };
        // SAFETY: the strings outlive the calls; there are no headers.
        let code = unsafe {
            (functions.nvrtcCreateProgram)(
                &mut program.handle,
                text.as_ptr(),
                name.as_ptr(),
                0,
                std::ptr::null(),
                std::ptr::null(),
            )
        };
        status(code).map_err(|code| failed(format!("nvrtcCreateProgram failed with {code}")))?;
        // SAFETY: the program is live; the options outlive the call.
        let code =
            unsafe { (functions.nvrtcCompileProgram)(program.handle, pointers.len() as c_int, pointers.as_ptr()) };
        let log = program.read(functions.nvrtcGetProgramLogSize, functions.nvrtcGetProgramLog).unwrap_or_default();
        let log = String::from_utf8_lossy(&log).trim_end_matches(['\0', '\n']).to_owned();
        if code != 0 {
            return Err(failed(format!("nvrtcCompileProgram failed with {code}\n{log}")));
        }
        if SERIALISED.iter().any(|note| log.contains(note)) {
            return Err(failed(log));
        }
        let code = match native {
            true => program.read(functions.nvrtcGetCUBINSize, functions.nvrtcGetCUBIN),
            false => program.read(functions.nvrtcGetPTXSize, functions.nvrtcGetPTX),
        };
        let code = code.map_err(|code| failed(format!("no code came back: error {code}\n{log}")))?;
        Ok(Compiled { code, resources: resources(&log, source.symbol), log })
    }
}

/// Reads what ptxas prints with `-v` about one entry point.
fn resources(log: &str, symbol: &str) -> Option<Resources> {
    let of_entry = log.split("Compiling entry function ").find(|part| part.starts_with(&format!("'{symbol}'")))?;
    let before = |words: &str| -> Option<u32> {
        let head = &of_entry[..of_entry.find(words)?];
        head.trim_end().rsplit(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
    };
    Some(Resources {
        registers: before("registers")?,
        shared_bytes: before("bytes smem").unwrap_or(0),
        spill_bytes: before("bytes spill stores").unwrap_or(0) + before("bytes spill loads").unwrap_or(0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resources_of_one_entry_are_read_from_the_log() {
        let log = "ptxas info    : 0 bytes gmem\nptxas info    : Compiling entry function 'k2' for 'sm_90a'\n\
                   ptxas info    : Function properties for k2\n    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
                   ptxas info    : Used 40 registers, used 0 barriers\n\
                   ptxas info    : Compiling entry function 'k' for 'sm_90a'\n\
                   ptxas info    : Function properties for k\n    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n\
                   ptxas info    : Used 168 registers, used 1 barriers, 4096 bytes smem, 8 bytes cmem[2]";
        assert_eq!(resources(log, "k"), Some(Resources { registers: 168, shared_bytes: 4096, spill_bytes: 16 }));
        assert_eq!(resources(log, "k2"), Some(Resources { registers: 40, shared_bytes: 0, spill_bytes: 0 }));
        assert_eq!(resources(log, "k3"), None);
    }

    #[test]
    fn a_missing_compiler_says_what_was_tried() {
        let error = Nvrtc::open(Path::new("/nowhere/libnvrtc.so.13")).err().unwrap();
        assert!(error.contains("/nowhere/libnvrtc.so.13"), "{error}");
    }
}
