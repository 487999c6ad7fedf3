//! Files that commands write.

use std::path::Path;

use latentwave::{Error, Result};
use serde::Serialize;

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
