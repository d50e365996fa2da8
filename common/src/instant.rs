//! Instants: UTC, whole milliseconds, as BSON dates.
//!
//! Used wherever a document carries an instant. chrono's own serde support stays switched off (it would store
//! text, which range queries miss without a word), so every instant that is read goes through here or does not compile, and every
//! one that is written is a [`bson::DateTime`].

use std::ops::RangeInclusive;

use bson::RawBson;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Deserializer, de::Error};

/// An instant in UTC.
pub type Instant = DateTime<Utc>;

/// When a job may be due, in milliseconds since 1970: in the years 1 to 9999, which every language can read and write.
pub(crate) const DUE_MS: RangeInclusive<i64> = -62_135_596_800_000..=253_402_300_799_999;

/// For `#[serde(deserialize_with = "instant::stored", default)]`.
pub(crate) fn stored<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Instant>, D::Error> {
    // Raw, because any other way leads through text.
    match Option::<RawBson>::deserialize(from)? {
        Some(RawBson::DateTime(at)) => Ok(Some(at.to_chrono())),
        Some(RawBson::Null) | None => Ok(None),
        Some(other) => Err(D::Error::custom(format!("expected a date, found {:?}", other.element_type()))),
    }
}

/// Nanoseconds of this machine's monotonic clock, which all its processes share: for measuring across processes.
///
/// # Panics
/// Never on Linux, which always has one.
#[cfg(feature = "process")]
pub fn monotonic_ns() -> i64 {
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC).expect("Linux has a monotonic clock");
    now.tv_sec() * 1_000_000_000 + now.tv_nsec()
}
