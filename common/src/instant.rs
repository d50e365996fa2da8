//! Instants: UTC, whole milliseconds, stored as BSON dates.
//!
//! Used wherever a document contains an instant. chrono's own serde support is disabled, because it would store
//! strings, which range queries silently miss. Therefore every instant that is read uses this module or does not
//! compile, and every instant that is written is a [`bson::DateTime`].

use std::ops::RangeInclusive;

use bson::RawBson;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Deserializer, de::Error};

/// An instant in UTC.
pub type Instant = DateTime<Utc>;

/// Range of valid due dates in milliseconds since 1970: the years 1 to 9999, which every programming language can read
/// and write.
pub(crate) const DUE_MS: RangeInclusive<i64> = -62_135_596_800_000..=253_402_300_799_999;

/// For `#[serde(deserialize_with = "instant::stored", default)]`.
pub(crate) fn stored<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Instant>, D::Error> {
    // Decoded as raw BSON, because all other ways convert to a string.
    match Option::<RawBson>::deserialize(from)? {
        Some(RawBson::DateTime(at)) => Ok(Some(at.to_chrono())),
        Some(RawBson::Null) | None => Ok(None),
        Some(other) => Err(D::Error::custom(format!("expected a date, found {:?}", other.element_type()))),
    }
}

/// Time in nanoseconds of this machine's monotonic clock, which all its processes share. For measurements across
/// processes.
///
/// # Panics
/// Never on Linux, which always has this clock.
#[cfg(feature = "process")]
pub fn monotonic_ns() -> i64 {
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC).expect("Linux has a monotonic clock");
    now.tv_sec() * 1_000_000_000 + now.tv_nsec()
}
