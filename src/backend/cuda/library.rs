//! Tables of C functions, resolved by name when a library is opened.
//!
//! cudarc gives the types, layouts and constants. The calls go through tables of our own: cudarc's functions panic where the
//! library or a symbol is missing, and return an enum that a newer driver's unknown status would make invalid.

use std::path::Path;

use libloading::Library;

/// Declares a struct of function pointers that return the library's integer status.
macro_rules! function_table {
    ($(#[$doc:meta])* struct $name:ident { $(fn $function:ident($($arg:ty),* $(,)?);)* }) => {
        $(#[$doc])*
        #[allow(non_snake_case)]
        pub(super) struct $name {
            $(pub(super) $function: unsafe extern "C" fn($($arg),*) -> i32,)*
        }

        impl $name {
            /// # Safety
            /// The library's functions have the types declared here, and it is never closed.
            unsafe fn resolve(library: &libloading::Library) -> Result<Self, String> {
                Ok(Self {
                    // SAFETY: the caller's promise.
                    $($function: unsafe {
                        *library.get(stringify!($function)).map_err(|error| $crate::backend::cuda::library::explain(&error))?
                    },)*
                })
            }
        }
    };
}
pub(super) use function_table;

/// A loader error with what the system said: libloading keeps that in the source.
pub(super) fn explain(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

/// Opens a library.
pub(super) fn open(path: &Path) -> Result<Library, String> {
    // SAFETY: the vendor's libraries run nothing harmful when they are opened.
    unsafe { Library::new(path) }.map_err(|error| explain(&error))
}

/// Opens a library whose symbols other libraries shall find.
pub(super) fn open_global(path: &Path) -> Result<Library, String> {
    // SAFETY: as above.
    #[cfg(unix)]
    let opened = unsafe {
        use libloading::os::unix::{Library as Unix, RTLD_GLOBAL, RTLD_NOW};
        Unix::open(Some(path), RTLD_NOW | RTLD_GLOBAL).map(Library::from).map_err(|error| explain(&error))
    };
    #[cfg(not(unix))]
    let opened = open(path);
    opened
}
