//! The run-time compiler.

use std::ffi::{CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::OnceLock;

use crate::api::HiprtcApi;
use crate::comgr::Comgr;
use crate::error::{Error, HiprtcError, Result};
use crate::loader::{self, Search};
use crate::runtime::{c_string, static_text};
use crate::types::hiprtcProgram;

/// Options that name an architecture.
const ARCH_OPTIONS: [&str; 2] = ["--offload-arch=", "--gpu-architecture="];

/// A header that source may include without a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header<'a> {
    /// Name as the source includes it.
    pub name: &'a str,
    /// Its text.
    pub source: &'a str,
}

/// What the compiler made.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Compiled {
    /// The code object, for [`Hip::module_load`](crate::Hip::module_load).
    pub code: Vec<u8>,
    /// Warnings, may be empty.
    pub log: String,
    /// The symbol of each name expression, in the order asked.
    pub lowered_names: Vec<String>,
}

/// The opened run-time compiler. It needs no GPU when an architecture is given (`--offload-arch=gfx942`).
#[derive(Debug)]
pub struct Hiprtc {
    api: HiprtcApi,
    path: PathBuf,
    comgr: Option<Comgr>,
}

// A program that is destroyed however its compilation ends.
struct Program<'a> {
    rtc: &'a Hiprtc,
    raw: hiprtcProgram,
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: made by this library, used by nobody else. A failure would leave nothing to be done.
        unsafe { (self.rtc.api.hiprtcDestroyProgram)(&mut self.raw) };
    }
}

impl Hiprtc {
    /// The process's compiler, opened on the first call from [`Search::from_env`]'s places and never closed.
    ///
    /// Releases before HIP 6 have it inside libamdhip64, which is looked into when there is no libhiprtc.
    ///
    /// # Errors
    /// [`Error::Unavailable`], the same at every call.
    pub fn load() -> Result<&'static Self> {
        static HIPRTC: OnceLock<Result<Hiprtc>> = OnceLock::new();
        HIPRTC.get_or_init(|| Self::open(&Search::from_env())).as_ref().map_err(Clone::clone)
    }

    /// Opens a compiler from other places.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub fn open(search: &Search) -> Result<Self> {
        let (api, path) = loader::open("libhiprtc", &["libhiprtc", "libamdhip64"], search, HiprtcApi::bind)?;
        Ok(Self { api, path, comgr: Comgr::find(search) })
    }

    /// The functions, for calls that have no method.
    pub fn api(&self) -> &HiprtcApi {
        &self.api
    }

    /// What the loader was given when it found the library.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Version of the compiler's interface: major, minor.
    ///
    /// # Errors
    /// [`Error::Hiprtc`].
    pub fn version(&self) -> Result<(i32, i32)> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: writes two integers.
        self.check("hiprtcVersion", unsafe { (self.api.hiprtcVersion)(&mut major, &mut minor) })?;
        Ok((major, minor))
    }

    /// Whether the compiler knows an architecture, its features included (`gfx942:sramecc+:xnack-`). True where that cannot be
    /// found out.
    pub fn knows(&self, arch: &str) -> bool {
        self.comgr.as_ref().is_none_or(|comgr| comgr.knows(arch))
    }

    /// Compiles HIP C++ to a code object. `name` is what messages call the source.
    ///
    /// The architecture is an option, `--offload-arch=gfx942`. One that the compiler does not know is refused here: hipRTC
    /// would end the process (seen in 5.2.3, 5.7.1 and 6.4.3).
    ///
    /// # Errors
    /// [`Error::Compile`] with the compiler's log; [`Error::InteriorNul`]; [`Error::Hiprtc`].
    pub fn compile(&self, name: &str, source: &str, headers: &[Header<'_>], options: &[&str]) -> Result<Compiled> {
        self.compile_names(name, source, headers, options, &[])
    }

    /// As [`Hiprtc::compile`], and looks up the symbols of C++ names such as `kernel<float>`.
    ///
    /// # Errors
    /// As [`Hiprtc::compile`]; [`Error::Unsupported`] if names are given and the library cannot look them up.
    pub fn compile_names(
        &self,
        name: &str,
        source: &str,
        headers: &[Header<'_>],
        options: &[&str],
        expressions: &[&str],
    ) -> Result<Compiled> {
        let expressions = c_strings("expressions", expressions.iter().copied())?;
        self.require_known_arch(options)?;
        let program = self.program(name, source, headers)?;
        for expression in &expressions {
            let add = optional(self.api.hiprtcAddNameExpression, "hiprtcAddNameExpression")?;
            // SAFETY: a live program and a C string.
            self.check("hiprtcAddNameExpression", unsafe { add(program.raw, expression.as_ptr()) })?;
        }

        let options = c_strings("options", options.iter().copied())?;
        let mut pointers = pointers(&options);
        // SAFETY: a live program and as many C strings as are counted.
        let code =
            unsafe { (self.api.hiprtcCompileProgram)(program.raw, pointers.len() as c_int, pointers.as_mut_ptr()) };
        let log = self.log(&program);
        if !code.is_success() {
            let log = log.ok().filter(|log| !log.is_empty()).unwrap_or_else(|| self.error_message(code).to_owned());
            return Err(Error::Compile { code, log });
        }

        let mut lowered_names = Vec::new();
        for expression in &expressions {
            let lowered = optional(self.api.hiprtcGetLoweredName, "hiprtcGetLoweredName")?;
            let mut text = ptr::null();
            // SAFETY: a live program, a C string that was registered, and room for a pointer.
            self.check("hiprtcGetLoweredName", unsafe { lowered(program.raw, expression.as_ptr(), &mut text) })?;
            // SAFETY: the library gives a C string that lives as long as the program; it is copied before that ends.
            lowered_names.push(unsafe { static_text(text) }.unwrap_or_default().to_owned());
        }
        Ok(Compiled { code: self.code(&program)?, log: log?, lowered_names })
    }

    /// Compiles with `-fgpu-rdc` to LLVM bitcode.
    ///
    /// # Errors
    /// As [`Hiprtc::compile`]; [`Error::Unsupported`] where the library gives no bitcode.
    pub fn compile_to_bitcode(
        &self,
        name: &str,
        source: &str,
        headers: &[Header<'_>],
        options: &[&str],
    ) -> Result<Vec<u8>> {
        let get_size = optional(self.api.hiprtcGetBitcodeSize, "hiprtcGetBitcodeSize")?;
        let get = optional(self.api.hiprtcGetBitcode, "hiprtcGetBitcode")?;
        self.require_known_arch(options)?;
        let program = self.program(name, source, headers)?;
        let options = c_strings("options", options.iter().copied().chain(["-fgpu-rdc"]))?;
        let mut pointers = pointers(&options);
        // SAFETY: a live program and as many C strings as are counted.
        let code =
            unsafe { (self.api.hiprtcCompileProgram)(program.raw, pointers.len() as c_int, pointers.as_mut_ptr()) };
        if !code.is_success() {
            return Err(Error::Compile { code, log: self.log(&program)? });
        }
        self.bytes(&program, ("hiprtcGetBitcodeSize", get_size), ("hiprtcGetBitcode", get))
    }

    fn require_known_arch(&self, options: &[&str]) -> Result<()> {
        for option in options {
            let Some(arch) = ARCH_OPTIONS.iter().find_map(|name| option.strip_prefix(name)) else { continue };
            if !self.knows(arch) {
                let log = format!("{option}: this release of hipRTC does not know the architecture; update ROCm");
                return Err(Error::Compile { code: HiprtcError::INVALID_OPTION, log });
            }
        }
        Ok(())
    }

    fn program(&self, name: &str, source: &str, headers: &[Header<'_>]) -> Result<Program<'_>> {
        let (name, source) = (c_string("name", name)?, c_string("source", source)?);
        let texts = c_strings("headers", headers.iter().map(|header| header.source))?;
        let names = c_strings("headers", headers.iter().map(|header| header.name))?;
        let (mut text_pointers, mut name_pointers) = (pointers(&texts), pointers(&names));
        let mut raw = ptr::null_mut();
        // SAFETY: C strings and arrays of as many C strings as are counted; the library copies them.
        let code = unsafe {
            (self.api.hiprtcCreateProgram)(
                &mut raw,
                source.as_ptr(),
                name.as_ptr(),
                headers.len() as c_int,
                text_pointers.as_mut_ptr(),
                name_pointers.as_mut_ptr(),
            )
        };
        self.check("hiprtcCreateProgram", code)?;
        Ok(Program { rtc: self, raw })
    }

    fn log(&self, program: &Program<'_>) -> Result<String> {
        let size = ("hiprtcGetProgramLogSize", self.api.hiprtcGetProgramLogSize);
        let bytes = self.bytes(program, size, ("hiprtcGetProgramLog", self.api.hiprtcGetProgramLog))?;
        Ok(String::from_utf8_lossy(&bytes).trim_end_matches(['\0', '\n']).to_owned())
    }

    fn code(&self, program: &Program<'_>) -> Result<Vec<u8>> {
        let size = ("hiprtcGetCodeSize", self.api.hiprtcGetCodeSize);
        self.bytes(program, size, ("hiprtcGetCode", self.api.hiprtcGetCode))
    }

    // The compiler's outputs are fetched alike: ask for the size, then for the bytes.
    fn bytes(
        &self,
        program: &Program<'_>,
        (size_call, get_size): (&'static str, unsafe extern "C" fn(hiprtcProgram, *mut usize) -> HiprtcError),
        (call, get): (&'static str, unsafe extern "C" fn(hiprtcProgram, *mut c_char) -> HiprtcError),
    ) -> Result<Vec<u8>> {
        let mut size = 0;
        // SAFETY: a live program and room for the size.
        self.check(size_call, unsafe { get_size(program.raw, &mut size) })?;
        let mut bytes = vec![0u8; size];
        if size > 0 {
            // SAFETY: a live program and as many bytes as it asked for.
            self.check(call, unsafe { get(program.raw, bytes.as_mut_ptr().cast()) })?;
        }
        Ok(bytes)
    }

    fn error_message(&self, code: HiprtcError) -> &'static str {
        // SAFETY: takes any integer and gives a static string.
        unsafe { static_text((self.api.hiprtcGetErrorString)(code)) }.unwrap_or(code.message())
    }

    fn check(&self, call: &'static str, code: HiprtcError) -> Result<()> {
        if code.is_success() {
            return Ok(());
        }
        Err(Error::Hiprtc { call, code, message: self.error_message(code).to_owned() })
    }
}

fn optional<T>(function: Option<T>, symbol: &'static str) -> Result<T> {
    function.ok_or(Error::Unsupported { symbol })
}

fn c_strings<'a>(argument: &'static str, texts: impl Iterator<Item = &'a str>) -> Result<Vec<CString>> {
    texts.map(|text| c_string(argument, text)).collect()
}

fn pointers(texts: &[CString]) -> Vec<*const c_char> {
    texts.iter().map(|text| text.as_ptr()).collect()
}
