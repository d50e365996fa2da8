//! How urgent a job is.

use std::fmt;

use bson::Bson;

/// Priority of a job that names none.
pub(crate) const DEFAULT_PRIORITY: u8 = 5;

/// How urgent a job is: 0 to 9, higher first, 5 by default.
///
/// Few, so that finding due jobs is a merge of ten bounded index ranges however many jobs wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Priority(u8);

impl Priority {
    /// The highest.
    pub const MAX: Priority = Priority(9);

    /// This priority, or nothing when it is above 9.
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
