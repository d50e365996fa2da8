//! Warnings from before the logs begin: they become the first lines.

use std::sync::{Mutex, PoisonError};

static WARNINGS: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Keeps a warning until logs can be written.
pub(super) fn warn(warning: String) {
    WARNINGS.lock().unwrap_or_else(PoisonError::into_inner).push(warning);
}

/// The warnings up to now.
pub(super) fn warnings() -> Vec<String> {
    std::mem::take(&mut WARNINGS.lock().unwrap_or_else(PoisonError::into_inner))
}
