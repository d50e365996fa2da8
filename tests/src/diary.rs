//! The diary of a test: one line for each execution and each hook of its workables, in order, in the memory of the test.
//! A workable has the diary as its state, and writes what the test is to see.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Lines in the order in which they were written.
#[derive(Debug, Default)]
pub struct Diary(Mutex<Vec<String>>);

impl Diary {
    /// Adds a line.
    pub fn write(&self, line: impl Into<String>) {
        self.lock().push(line.into());
    }

    /// The lines so far.
    pub fn lines(&self) -> Vec<String> {
        self.lock().clone()
    }

    /// Removes and returns the lines so far.
    pub fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.lock())
    }

    fn lock(&self) -> MutexGuard<'_, Vec<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
