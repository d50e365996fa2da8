//! Instants: UTC, whole milliseconds, as BSON dates.
//!
//! Used wherever a document carries an instant. chrono's own serde support stays switched off (it would store
//! text, which range queries miss without a word), so every stored instant goes through here or does not compile.

use bson::DateTime as BsonDateTime;
use chrono::{DateTime, Utc};
use nix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// An instant in UTC.
pub type Instant = DateTime<Utc>;

/// For `#[serde(with = "instant::option", default)]`.
pub(crate) mod option {
    use super::*;

    pub(crate) fn serialize<S: Serializer>(instant: &Option<Instant>, to: S) -> Result<S::Ok, S::Error> {
        instant.map(BsonDateTime::from_chrono).serialize(to)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Instant>, D::Error> {
        Ok(Option::<BsonDateTime>::deserialize(from)?.map(BsonDateTime::to_chrono))
    }
}

/// Nanoseconds of this machine's monotonic clock, which all its processes share: for measuring across processes.
///
/// # Panics
/// Never on Linux, which always has one.
pub fn monotonic_ns() -> i64 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("Linux has a monotonic clock");
    now.tv_sec() * 1_000_000_000 + now.tv_nsec()
}
