//! Printing that can fail: a full disk behind standard output ends the program with a message, where the standard macro panics.

use std::fmt::Arguments;
use std::io::Write;

/// As the standard macro, for the whole program.
macro_rules! println {
    ($($text:tt)*) => {
        $crate::out::line(format_args!($($text)*))
    };
}

/// Prints a line, or says why it cannot be and ends the program.
pub(crate) fn line(text: Arguments<'_>) {
    if let Err(error) = writeln!(std::io::stdout().lock(), "{text}") {
        eprintln!("error: standard output: {error}");
        std::process::exit(1);
    }
}
