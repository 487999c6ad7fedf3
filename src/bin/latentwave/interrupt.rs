//! Ctrl-C: noted, so that a command can end with what it has measured so far.

use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

static HELD: AtomicBool = AtomicBool::new(false);
static CAUGHT: AtomicBool = AtomicBool::new(false);

/// Starts the handler's thread. Until [`catch`] is called, Ctrl-C ends the process: there is nothing to show yet.
pub(crate) fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // Without a handler Ctrl-C ends the process at once, as it would have anyway.
        let _ = ctrlc::set_handler(|| {
            if !HELD.load(Ordering::Relaxed) || CAUGHT.swap(true, Ordering::Relaxed) {
                std::process::exit(crate::INTERRUPTED.into());
            }
        });
    });
}

/// Notes Ctrl-C from now on instead of ending the process; a second one ends it.
pub(crate) fn catch() {
    install();
    HELD.store(true, Ordering::Relaxed);
}

/// Whether Ctrl-C was pressed.
pub(crate) fn caught() -> bool {
    CAUGHT.load(Ordering::Relaxed)
}
