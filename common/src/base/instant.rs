//! Instants: UTC, whole milliseconds, stored as BSON dates.
//!
//! Used wherever a document contains an instant. chrono's own serde support is disabled, because it would store
//! strings, which range queries silently miss. Therefore every instant that is read uses this module or does not
//! compile, and every instant that is written becomes a [`bson::DateTime`] by `Bson::from`.

use std::{ops::RangeInclusive, time::Duration};

use bson::RawBson;
use chrono::{DateTime, TimeDelta, Utc};
use serde::{Deserialize, Deserializer, de::Error};

/// An instant in UTC.
pub type Instant = DateTime<Utc>;

/// Range of valid due dates in milliseconds since 1970: the years 1 to 9999, which every programming language can read
/// and write.
pub(crate) const DUE_MS: RangeInclusive<i64> = -62_135_596_800_000..=253_402_300_799_999;

/// The date of a job that waits for the end of another one: the last one that is allowed, which never comes.
pub(crate) fn never_due() -> bson::DateTime {
    bson::DateTime::from_millis(*DUE_MS.end())
}

/// This instant and a delay: the due date of a job that runs again. At most the last instant of the year 9999, which is the latest due date.
///
/// ```
/// use std::time::Duration;
///
/// use recruiter_common::{Instant, instant::later};
///
/// assert_eq!(later(Instant::UNIX_EPOCH, Duration::from_secs(60)).timestamp(), 60);
/// assert_eq!(later(Instant::UNIX_EPOCH, Duration::MAX).to_rfc3339(), "9999-12-31T23:59:59.999+00:00");
/// ```
pub fn later(now: Instant, delay: Duration) -> Instant {
    let at = TimeDelta::from_std(delay).ok().and_then(|delay| now.checked_add_signed(delay));
    let latest = bson::DateTime::from_millis(*DUE_MS.end()).to_chrono();
    at.map_or(latest, |at| at.min(latest))
}

/// The delay that a program gives as a number of milliseconds. Below zero it is zero, and one that is too long is the longest. `None` if
/// it is not a number.
pub fn delay_of_ms(milliseconds: f64) -> Option<Duration> {
    let seconds = Some(milliseconds.max(0.0) / 1_000.0).filter(|_| !milliseconds.is_nan())?;
    Some(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
}

/// The delay that a program writes as a text, for example `90s`. With a minus sign it is zero, and one that is too long is the longest.
///
/// # Errors
/// When the text is not a duration.
pub fn delay_of_text(text: &str) -> Result<Duration, humantime::DurationError> {
    let (text, is_negative) = text.strip_prefix('-').map_or((text, false), |text| (text.trim_start(), true));
    match humantime::parse_duration(text) {
        Ok(_) | Err(humantime::DurationError::NumberOverflow) if is_negative => Ok(Duration::ZERO),
        Err(humantime::DurationError::NumberOverflow) => Ok(Duration::MAX),
        parsed => parsed,
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_delay_of_a_program_is_never_negative_and_never_beyond_the_latest_date() {
        let second = Duration::from_secs(1);
        for (milliseconds, delay) in [
            (-500.0, Some(Duration::ZERO)),
            (-0.0, Some(Duration::ZERO)),
            (f64::NEG_INFINITY, Some(Duration::ZERO)),
            (0.5, Some(second / 2_000)),
            (1_000.0, Some(second)),
            (1e300, Some(Duration::MAX)),
            (f64::INFINITY, Some(Duration::MAX)),
            (f64::NAN, None),
        ] {
            assert_eq!(delay_of_ms(milliseconds), delay, "{milliseconds}");
        }
        for (text, delay) in [
            ("1m 30s", Some(second * 90)),
            ("-1s", Some(Duration::ZERO)),
            ("- 99999999999999999999999s", Some(Duration::ZERO)),
            ("99999999999999999999999s", Some(Duration::MAX)),
            ("soon", None),
            ("-", None),
            ("--1s", None),
            ("NaN", None),
        ] {
            assert_eq!(delay_of_text(text).ok(), delay, "{text}");
        }
        let now = Instant::from_timestamp_millis(1_700_000_000_000).expect("a date");
        let latest = later(now, Duration::MAX);
        assert_eq!(latest.timestamp_millis(), *DUE_MS.end());
        // The delay of `Snooze(time() * 1000)`.
        assert_eq!(later(now, Duration::from_secs(1_700_000_000_000)), latest);
        assert_eq!((later(now, Duration::ZERO), later(latest, second)), (now, latest));
    }
}
