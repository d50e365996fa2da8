//! The priority of a job.

use std::fmt;

use bson::Bson;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

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

    /// The parser of a flag.
    #[cfg(feature = "process")]
    pub(super) fn flag() -> impl clap::builder::TypedValueParser<Value = Self> {
        use clap::builder::TypedValueParser as _;
        clap::value_parser!(u8).range(0..=i64::from(Self::MAX.0)).map(Self)
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

impl Serialize for Priority {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_i32(self.0.into())
    }
}

impl<'de> Deserialize<'de> for Priority {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let number = i64::deserialize(from)?;
        let known = u8::try_from(number).ok().and_then(Self::new);
        known.ok_or_else(|| D::Error::custom(format!("`priority` is {number}; it must be from 0 to 9")))
    }
}

impl fmt::Display for Priority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
