//! Files that commands write.

use std::path::Path;

use latentwave::{Error, Result};
use serde::Serialize;

/// Checks, before anything is measured, that files can be written there, that they differ from each other, and that none is
/// one that is read.
///
/// # Errors
/// [`Error::Io`]; [`Error::Argument`] naming the second of two options with one file.
pub(crate) fn check_outputs(read: &[&Path], written: &[(&'static str, Option<&Path>)]) -> Result<()> {
    let whole = |path: &Path| std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let mut taken: Vec<_> = read.iter().map(|path| whole(path)).collect();
    for (arg, path) in written {
        let Some(path) = path else { continue };
        let existed = path.exists();
        let opened = std::fs::OpenOptions::new().append(true).create(true).open(path);
        opened.map_err(|source| Error::Io { path: path.to_path_buf(), source })?;
        let itself = whole(path);
        if !existed {
            // Nothing is left behind by a command that fails before it has something to write.
            let _ = std::fs::remove_file(path);
        }
        if taken.contains(&itself) {
            return Err(Error::argument(
                arg,
                format!("{}: that file is read, or written by another option", path.display()),
            ));
        }
        taken.push(itself);
    }
    Ok(())
}

/// Writes a text.
///
/// # Errors
/// [`Error::Io`].
pub(crate) fn write(path: &Path, content: &str) -> Result<()> {
    std::fs::write(path, content).map_err(|source| Error::Io { path: path.to_owned(), source })
}

/// Writes a value as JSON.
///
/// # Errors
/// [`Error::Io`].
pub(crate) fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    let json = serde_json::to_string_pretty(value)
        .map_err(|error| Error::Io { path: path.to_owned(), source: std::io::Error::other(error) })?;
    write(path, &json)
}
