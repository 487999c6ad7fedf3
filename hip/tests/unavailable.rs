//! What is told when AMD's libraries are not there, or are not what their name says.

use std::path::PathBuf;
use std::{env, fs};

use hip_sys::{Error, Hip, HipError, Hiprtc, HiprtcError, Search};

/// An empty folder of this test's own, removed when it ends.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = env::temp_dir().join(format!("hip-sys-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn roots_come_before_the_loader_path() {
    let candidates = Search::from_roots(["/a", "/b"]).candidates("libamdhip64");
    let names: Vec<_> = candidates.iter().map(|c| c.to_str().unwrap()).collect();
    assert_eq!(names[0], "/a/lib/libamdhip64.so.7");
    let at = |name: &str| names.iter().position(|n| *n == name).unwrap_or_else(|| panic!("{name} not in {names:?}"));
    let order = [
        "/a/lib/libamdhip64.so.7",
        "/a/lib/libamdhip64.so.6",
        "/a/lib/libamdhip64.so.5",
        "/a/lib/libamdhip64.so",
        "/a/lib64/libamdhip64.so",
        "/b/lib/libamdhip64.so.7",
        "libamdhip64.so.7",
        "libamdhip64.so.6",
        "libamdhip64.so.5",
        "libamdhip64.so",
        "/opt/rocm/lib/libamdhip64.so.7",
    ];
    assert!(order.windows(2).all(|pair| at(pair[0]) < at(pair[1])), "{names:?}");
}

#[test]
fn every_file_tried_is_named_with_the_loaders_message() {
    let folder = Folder::new("empty");
    let search = Search::only([&folder.0]);
    let Err(Error::Unavailable { library, tried }) = Hip::open(&search) else { panic!("no error") };
    assert_eq!(library, "libamdhip64");
    assert_eq!(tried.iter().map(|t| t.candidate.clone()).collect::<Vec<_>>(), search.candidates("libamdhip64"));
    assert_eq!(tried.len(), 4);
    assert!(tried.iter().all(|t| t.problem.contains("cannot open shared object file")), "{tried:?}");
    let text = Hip::open(&search).unwrap_err().to_string();
    for candidate in search.candidates("libamdhip64") {
        assert!(text.contains(candidate.to_str().unwrap()), "{text}");
    }

    // The compiler is looked for under its own name and then inside the runtime.
    let Err(Error::Unavailable { library, tried }) = Hiprtc::open(&search) else { panic!("no error") };
    assert_eq!(library, "libhiprtc");
    let stems = ["libhiprtc", "libamdhip64"];
    let expected: Vec<_> = stems.iter().flat_map(|stem| search.candidates(stem)).collect();
    assert_eq!(tried.iter().map(|t| t.candidate.clone()).collect::<Vec<_>>(), expected);
}

#[test]
fn files_that_are_not_the_library_are_passed_over() {
    let folder = Folder::new("wrong");
    fs::write(folder.0.join("libamdhip64.so.7"), b"not a library").unwrap();
    // A library that opens and has none of the functions.
    let libc = ["/lib/x86_64-linux-gnu/libc.so.6", "/usr/lib/x86_64-linux-gnu/libc.so.6", "/lib64/libc.so.6"];
    if let Some(libc) = libc.iter().find(|path| fs::metadata(path).is_ok()) {
        std::os::unix::fs::symlink(libc, folder.0.join("libamdhip64.so.6")).unwrap();
    } else {
        println!("not run: no libc.so.6 in its usual places to stand in for a wrong library");
    }
    let Err(Error::Unavailable { tried, .. }) = Hip::open(&Search::only([&folder.0])) else { panic!("no error") };
    assert_eq!(tried.len(), 4);
    assert!(tried[0].problem.contains("too short") || tried[0].problem.contains("invalid ELF"), "{tried:?}");
    if fs::symlink_metadata(folder.0.join("libamdhip64.so.6")).is_ok() {
        assert_eq!(tried[1].problem, "opened, but it has no hipInit");
    }
}

#[test]
fn codes_have_names_and_unknown_codes_are_values() {
    assert_eq!(HipError::NO_DEVICE.name(), "hipErrorNoDevice");
    assert_eq!(HipError(900), HipError::STREAM_CAPTURE_UNSUPPORTED);
    assert_eq!(HipError(123_456).name(), "unknown hipError_t");
    assert_eq!(HipError(123_456).to_string(), "unknown hipError_t (123456): a code that this crate does not know");
    assert_eq!(HiprtcError::COMPILATION.name(), "HIPRTC_ERROR_COMPILATION");
    assert!(HipError::KNOWN.windows(2).all(|pair| pair[0] < pair[1]), "one row per code, ascending");
    assert!(HipError::SUCCESS.is_success() && !HipError::UNKNOWN.is_success());
}
