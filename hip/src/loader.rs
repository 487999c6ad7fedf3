//! Where libraries are looked for, and what is told when none is found.

use std::env;
use std::path::{Path, PathBuf};

use libloading::Library;

use crate::error::{Attempt, Error, Result};

// Newest first: the runtime keeps old code objects running, not the other way round. The bare name comes last, it may be
// anything and is mostly there with the development packages only.
const SUFFIXES: [&str; 4] = [".so.7", ".so.6", ".so.5", ".so"];

/// Where to look for AMD's libraries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Search {
    dirs: Vec<PathBuf>,
    loader_path: bool,
}

impl Search {
    /// `lib` and `lib64` of `HIP_PATH` and `ROCM_PATH`, then the ordinary loader path, then `/opt/rocm/lib`, which many
    /// installations do not put on that path.
    pub fn from_env() -> Self {
        Self::from_roots(["HIP_PATH", "ROCM_PATH"].into_iter().filter_map(env::var_os).filter(|v| !v.is_empty()))
    }

    /// As [`Search::from_env`], with these installations in place of the variables'.
    pub fn from_roots(roots: impl IntoIterator<Item = impl Into<PathBuf>>) -> Self {
        let dirs = roots.into_iter().map(Into::into).flat_map(|root: PathBuf| [root.join("lib"), root.join("lib64")]);
        Self { dirs: dirs.collect(), loader_path: true }
    }

    /// These directories and nothing else.
    pub fn only(dirs: impl IntoIterator<Item = impl Into<PathBuf>>) -> Self {
        Self { dirs: dirs.into_iter().map(Into::into).collect(), loader_path: false }
    }

    /// What the loader is given, in order, for a library called `stem` (`libamdhip64`).
    pub fn candidates(&self, stem: &str) -> Vec<PathBuf> {
        let files: Vec<_> = SUFFIXES.iter().map(|suffix| format!("{stem}{suffix}")).collect();
        self.places_of(&files)
    }

    /// Every place of every file: all files of one directory before the next directory.
    pub(crate) fn places_of(&self, files: &[impl AsRef<Path>]) -> Vec<PathBuf> {
        if cfg!(not(target_os = "linux")) {
            return Vec::new();
        }
        let in_dir = |dir: &Path| files.iter().map(|file| dir.join(file)).collect::<Vec<_>>();
        let mut places: Vec<PathBuf> = self.dirs.iter().flat_map(|dir| in_dir(dir)).collect();
        if self.loader_path {
            places.extend(files.iter().map(|file| file.as_ref().to_owned()));
            places.extend(in_dir(Path::new("/opt/rocm/lib")));
        }
        places
    }
}

impl Default for Search {
    fn default() -> Self {
        Self::from_env()
    }
}

/// Opens the first candidate of the first stem whose functions `bind` finds. Returns what `bind` made, and the file.
///
/// `bind` answers with the name of a function that the library lacks.
pub(crate) fn open<T>(
    library: &'static str,
    stems: &[&str],
    search: &Search,
    bind: impl Fn(&Library) -> Result<T, &'static str>,
) -> Result<(T, PathBuf)> {
    let mut tried = Vec::new();
    for candidate in stems.iter().flat_map(|stem| search.candidates(stem)) {
        // SAFETY: loading runs the library's initialisers. The names asked for are those of AMD's runtime, whose
        // initialisers may run in any process and on any thread.
        let opened = match unsafe { Library::new(&candidate) } {
            Ok(opened) => opened,
            Err(error) => {
                let problem = loader_message(&candidate, &error);
                tried.push(Attempt { candidate, problem });
                continue;
            }
        };
        let bound = bind(&opened);
        // Never unloaded: the runtime starts threads and registers handlers that outlive any handle of ours.
        std::mem::forget(opened);
        match bound {
            Ok(bound) => return Ok((bound, candidate)),
            Err(symbol) => tried.push(Attempt { candidate, problem: format!("opened, but it has no {symbol}") }),
        }
    }
    Err(Error::Unavailable { library, tried })
}

// What the loader itself said: the innermost of the errors around it, without the name that stands beside it anyway.
fn loader_message(candidate: &Path, error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(cause) => loader_message(candidate, cause),
        None => {
            let text = error.to_string();
            let name = format!("{}: ", candidate.display());
            text.strip_prefix(&name).unwrap_or(&text).to_owned()
        }
    }
}
