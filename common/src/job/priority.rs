//! The priority of a job.

use std::fmt;

use bson::Bson;

/// Priority of a job without a priority.
pub(crate) const DEFAULT_PRIORITY: u8 = 5;

/// The priority of a job: 0 to 9, higher first. Default: 5.
///
/// There are only ten, so that a search for due jobs merges ten bounded index ranges, however many jobs wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Priority(u8);

impl Priority {
    /// The highest.
    pub const MAX: Priority = Priority(9);

    /// This priority; `None` if it is above 9.
    pub fn new(priority: u8) -> Option<Self> {
        (priority <= Self::MAX.0).then_some(Self(priority))
    }

    /// The number.
    pub fn get(self) -> u8 {
        self.0
    }

    /// Every priority, most urgent first.
    pub fn all() -> impl Iterator<Item = Priority> {
        (0..=Self::MAX.0).rev().map(Priority)
    }
}

impl Default for Priority {
    fn default() -> Self {
        Self(DEFAULT_PRIORITY)
    }
}

impl From<Priority> for Bson {
    fn from(priority: Priority) -> Self {
        Bson::Int32(priority.0.into())
    }
}

impl fmt::Display for Priority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
