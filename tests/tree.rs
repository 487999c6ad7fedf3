//! ARCHITECTURE.md against the tree: what it names is there, what is there it names, and `unsafe` is only where it says.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

fn read(path: impl AsRef<Path>) -> String {
    let path = path.as_ref();
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Files under a folder with this extension; what is built lies in `target` folders and is left out.
fn files(folder: &Path, extension: &str, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
        let path = entry.expect("an entry").path();
        if path.is_dir() && !path.ends_with("target") {
            files(&path, extension, found);
        } else if path.extension().is_some_and(|found| found == extension) {
            found.push(path);
        }
    }
}

/// What stands between backticks.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// Whether a quoted word is a path, without placeholders.
fn is_path(word: &str) -> bool {
    let extension =
        word.rsplit_once('.').is_some_and(|(_, end)| matches!(end, "rs" | "md" | "json" | "sh" | "py" | "yml" | "h"));
    (word.contains('/') || extension) && !word.contains([' ', '*', '<', '(']) && !word.contains("NAME")
}

#[test]
fn every_path_that_the_map_names_exists() {
    let page = read("ARCHITECTURE.md");
    for line in page.lines() {
        // A file is named by itself behind another of its folder.
        let mut folder = PathBuf::new();
        for word in quoted(line).filter(|word| is_path(word)) {
            let places = [PathBuf::from(word), Path::new("src").join(word), folder.join(word)];
            let found = places.iter().position(|place| place.exists());
            let found = found.unwrap_or_else(|| panic!("ARCHITECTURE.md names `{word}`, which is not there:\n{line}"));
            if found < 2 {
                let place = &places[found];
                folder = if place.is_dir() { place.clone() } else { place.parent().expect("a folder").to_owned() };
            }
        }
    }
}

#[test]
fn the_map_names_every_folder() {
    let page = read("ARCHITECTURE.md");
    let mut sources = Vec::new();
    for folder in ["src", "kernels", "hip", "ci", "tests", "fuzz"] {
        files(Path::new(folder), "rs", &mut sources);
        files(Path::new(folder), "cu", &mut sources);
    }
    // A file's tests may lie in a folder of its name.
    let code = sources.iter().filter(|file| !file.ends_with("tests.rs"));
    let folders: BTreeSet<&Path> = code.filter_map(|file| file.parent()).collect();
    let named = |folder: &Path| {
        let name = folder.file_name().expect("a name").to_string_lossy();
        page.contains(&format!("{}/", folder.display())) || page.contains(&format!("{name}/"))
    };
    // Of a crate or suite of its own only the top is on this map.
    let inside = |folder: &Path| ["ci/amd", "hip", "fuzz", "tests"].iter().any(|top| folder.starts_with(top));
    for folder in folders.into_iter().filter(|folder| folder.starts_with("src") || !inside(folder)) {
        assert!(named(folder), "ARCHITECTURE.md does not name {}", folder.display());
    }
    for top in ["ci/amd/", "ci/nvidia/", "hip/", "fuzz/", "tests/gpu/"] {
        assert!(page.contains(top), "ARCHITECTURE.md does not name {top}");
    }
}

/// Whether a line of code has the keyword: not in a comment, a text or a longer word.
fn has_unsafe(line: &str) -> bool {
    let code = line.split("//").next().unwrap_or_default();
    ["unsafe {", "unsafe fn", "unsafe impl", "unsafe extern", "unsafe trait", "unsafe(", "unsafe |"]
        .iter()
        .any(|form| code.contains(form) && !code.contains('"'))
        || code.trim_end().ends_with("unsafe")
}

#[test]
fn unsafe_is_only_where_the_map_says() {
    let page = read("ARCHITECTURE.md");
    let rule = page.split("\n- ").find(|rule| rule.starts_with("`unsafe` lives")).expect("the rule on unsafe");
    let allowed: Vec<&str> = quoted(rule).filter(|word| word.contains('/') && *word != "tests/tree.rs").collect();
    assert!(allowed.len() > 5 && allowed.iter().all(|path| Path::new(path).exists()), "{allowed:?}");

    let mut sources = Vec::new();
    for folder in ["src", "hip/src", "hip/examples", "ci/amd/src", "ci/amd/examples", "examples", "benches"] {
        files(Path::new(folder), "rs", &mut sources);
    }
    sources.push("build.rs".into());
    let with: Vec<String> = sources
        .iter()
        .filter(|file| read(file).lines().any(has_unsafe))
        .map(|file| file.display().to_string())
        .collect();
    for file in &with {
        assert!(
            allowed.iter().any(|place| file.starts_with(place)),
            "{file} holds `unsafe`, which ARCHITECTURE.md does not say"
        );
    }
    // What is listed needs its place there.
    for place in allowed {
        assert!(with.iter().any(|file| file.starts_with(place)), "{place} holds no `unsafe` any more");
    }
}
