//! Ctrl-C: noted, so that a command can end with what it has measured so far.

use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

static CAUGHT: AtomicBool = AtomicBool::new(false);

/// Notes Ctrl-C from now on instead of ending the process; a second one ends it.
pub(crate) fn catch() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // Without a handler Ctrl-C ends the process at once, as it would have anyway.
        let _ = ctrlc::set_handler(|| {
            if CAUGHT.swap(true, Ordering::Relaxed) {
                std::process::exit(crate::INTERRUPTED.into());
            }
        });
    });
}

/// Whether Ctrl-C was pressed.
pub(crate) fn caught() -> bool {
    CAUGHT.load(Ordering::Relaxed)
}
