//! The server's clock: the only wall clock that documents are stamped with.
//!
//! Used by every process through [`Store::now`](crate::store::Store::now). The estimate is a lower bound: a reading
//! is taken to be as old as its round trip allows, so that a job which looks due here is due for the server's own
//! `$$NOW` too. Nobody's life or death is decided by it: that is the monotonic clock's, in the cleaner and the lease.

use std::{sync::RwLock, time::Duration};

use chrono::DurationRound;

use crate::instant::Instant;

/// How old a reading may be before an enqueuer takes another: quartz drifts well below a millisecond in this time.
pub(crate) const FRESH_FOR: Duration = Duration::from_secs(30);

/// An estimate of the server's clock, carried on by the monotonic clock between readings.
#[derive(Debug, Default)]
pub(crate) struct ServerClock {
    reading: RwLock<Option<Reading>>,
}

#[derive(Clone, Copy, Debug)]
struct Reading {
    server: Instant,
    taken: std::time::Instant,
    /// Since when another server may be the primary.
    doubtful: Option<std::time::Instant>,
}

impl ServerClock {
    /// Notes what the server's clock showed in a reply that has just arrived, to a question that was asked at `asked`.
    ///
    /// The reply may have been on its way for all that time. What is known already and agrees with it is better than the
    /// least that a slow reply says: retries would be early by as much as it was late.
    pub(crate) fn observe(&self, server: Instant, asked: std::time::Instant) {
        let taken = std::time::Instant::now();
        let mut reading = self.reading.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        let known = reading.map(|reading| reading.server + taken.duration_since(reading.taken));
        let agrees = |known: &Instant| (server..=server + taken.duration_since(asked)).contains(known);
        // An answer to what was asked before may still be the former primary's.
        let doubtful = reading.and_then(|reading| reading.doubtful).filter(|since| asked < *since);
        *reading = Some(Reading { server: known.filter(agrees).unwrap_or(server), taken, doubtful });
    }

    /// Notes that a primary was found, whose clock may be another one.
    pub(crate) fn doubt(&self) {
        let mut reading = self.reading.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(reading) = reading.as_mut() {
            reading.doubtful = Some(std::time::Instant::now());
        }
    }

    /// The server's time, in whole milliseconds; this machine's own before the first reading.
    pub(crate) fn now(&self) -> Instant {
        let reading = *self.reading.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        let now = match reading {
            Some(Reading { server, taken, .. }) => server + taken.elapsed(),
            #[expect(clippy::disallowed_methods, reason = "nothing was heard from the server yet")]
            None => chrono::Utc::now(),
        };
        now.duration_trunc(chrono::TimeDelta::milliseconds(1)).unwrap_or(now)
    }

    /// Whether the last reading is too old to enqueue by, or may be another server's.
    pub(crate) fn is_stale(&self) -> bool {
        let reading = *self.reading.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        reading.is_none_or(|reading| reading.doubtful.is_some() || reading.taken.elapsed() > FRESH_FOR)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_follows_the_server_and_not_this_machine() {
        let clock = ServerClock::default();
        assert!(clock.is_stale());
        let server = Instant::from_timestamp_millis(4_000_000_000_000).expect("a date");
        clock.observe(server, std::time::Instant::now());
        assert!(!clock.is_stale());
        let now = clock.now();
        assert!(now >= server && now < server + Duration::from_secs(10));
        clock.doubt();
        assert!(clock.is_stale() && clock.now() >= server, "the best there is, until the new primary was asked");
        clock.observe(server, std::time::Instant::now().checked_sub(Duration::from_secs(1)).expect("this machine runs for longer"));
        assert!(clock.is_stale(), "it was asked before");
        clock.observe(server, std::time::Instant::now());
        assert!(!clock.is_stale());
        assert_eq!(now.timestamp_subsec_nanos() % 1_000_000, 0, "BSON dates are whole milliseconds");
    }

    #[test]
    fn a_slow_reply_does_not_put_the_clock_back_and_a_quick_one_does() {
        let clock = ServerClock::default();
        let server = Instant::from_timestamp_millis(4_000_000_000_000).expect("a date");
        let ago = |seconds: u64| std::time::Instant::now().checked_sub(Duration::from_secs(seconds)).expect("this machine runs for longer");
        clock.observe(server, ago(0));
        clock.observe(server - Duration::from_secs(3), ago(4));
        assert!(clock.now() >= server, "three seconds late, of four that it may have been on its way");
        clock.observe(server - Duration::from_secs(3_600), ago(4));
        assert!(clock.now() < server, "another server, an hour behind");
        clock.observe(server + Duration::from_secs(3_600), ago(4));
        assert!(clock.now() > server, "another server, an hour ahead");
    }
}
