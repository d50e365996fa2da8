//! The server's clock, the only wall clock whose time is written into documents, and [`Uptime`], a clock of this
//! machine.
//!
//! Every process uses the server's clock through [`Client::now`](crate::mongo::Client::now). The estimate is a lower bound: it counts a
//! reading from the arrival of the reply, although the server's clock was read earlier. Therefore a job that is due by this estimate is
//! also due by the server's own `$$NOW`. The estimate never decides whether a worker is dead: the cleaner measures silence by the monotonic
//! clock, and a worker measures its lease by [`Uptime`].

use std::{
    ops::Add,
    sync::{
        RwLock,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use chrono::DurationRound;
#[cfg(unix)]
use rustix::time::{ClockId, clock_gettime};

use super::Instant;

/// The Unix clock that cannot be set and that continues while the machine is suspended.
#[cfg(any(target_os = "linux", target_os = "android"))]
const COUNTS_SLEEP: ClockId = ClockId::Boottime;
#[cfg(all(unix, not(any(target_os = "linux", target_os = "android"))))]
const COUNTS_SLEEP: ClockId = ClockId::Monotonic;

/// A point in time on this machine's clock that cannot be set and that continues while the machine is suspended
/// (`CLOCK_BOOTTIME` on Linux).
///
/// On Linux `std::time::Instant` stops during a suspend (`CLOCK_MONOTONIC`). This type measures everything that must
/// expire during a suspend, such as a worker's lease or a reading of the server's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Uptime(Duration);

impl Uptime {
    /// The current time.
    ///
    /// # Panics
    /// Never: the clock counts from the boot or from a past date.
    #[cfg(unix)]
    pub fn now() -> Self {
        Self(clock_gettime(COUNTS_SLEEP).try_into().expect("the clock began at zero"))
    }

    /// The current time. On Windows this clock includes suspended time.
    #[cfg(not(unix))]
    pub fn now() -> Self {
        static FIRST: std::sync::LazyLock<std::time::Instant> = std::sync::LazyLock::new(std::time::Instant::now);
        Self(FIRST.elapsed())
    }

    /// The time since `earlier`; zero if `earlier` is later.
    pub fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

impl Add<Duration> for Uptime {
    type Output = Self;

    fn add(self, more: Duration) -> Self {
        Self(self.0.saturating_add(more))
    }
}

/// Maximum age of a reading before [`Store::fresh_clock`](crate::mongo::Store::fresh_clock) reads the clock again. In this time two clocks
/// drift apart by about a millisecond.
pub(crate) const FRESH_FOR: Duration = Duration::from_secs(30);
/// Like [`FRESH_FOR`], for clients that are not notified of failovers. For this time a job may get the time of the former primary.
const FRESH_WITHOUT_NOTICE_FOR: Duration = Duration::from_secs(5);

/// An estimate of the server's clock. Between readings it is advanced by this machine's [`Uptime`].
#[derive(Debug)]
pub(crate) struct ServerClock {
    fresh_for: Duration,
    reading: RwLock<Option<Reading>>,
    /// The last result of [`ServerClock::now_in_order`], in milliseconds.
    last: AtomicI64,
}

/// A better estimate may be behind an earlier one by less than this.
const CORRECTED_BY: i64 = 1_000;

#[derive(Clone, Copy, Debug)]
struct Reading {
    server: Instant,
    /// When the reply arrived.
    taken: Uptime,
    /// When a new primary was found, if the clock was not read since.
    primary_changed_at: Option<Uptime>,
}

impl Default for ServerClock {
    fn default() -> Self {
        Self { fresh_for: FRESH_FOR, reading: RwLock::default(), last: AtomicI64::default() }
    }
}

impl ServerClock {
    /// For a client that does not call [`ServerClock::primary_changed`].
    pub(crate) fn without_notice_of_failovers() -> Self {
        Self { fresh_for: FRESH_WITHOUT_NOTICE_FOR, ..Self::default() }
    }

    /// Records the server's time from a reply that has just arrived, to a command that was sent at `asked`.
    ///
    /// The server may have read its clock at any time of the round trip. If the existing estimate agrees with that, it is kept, because it
    /// is more exact. A slow reply alone would put the estimate back by its delay, and retries would be too early.
    pub(crate) fn observe(&self, server: Instant, asked: Uptime) {
        self.observe_at(server, asked, Uptime::now());
    }

    fn observe_at(&self, server: Instant, asked: Uptime, taken: Uptime) {
        let mut reading = self.reading.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        let known = reading.map(|reading| reading.server + taken.since(reading.taken));
        let agrees = |known: &Instant| (server..=server + taken.since(asked)).contains(known);
        // A reply to a command sent before the failover was noticed may come from the former primary.
        let primary_changed_at = reading.and_then(|reading| reading.primary_changed_at).filter(|changed_at| asked < *changed_at);
        *reading = Some(Reading { server: known.filter(agrees).unwrap_or(server), taken, primary_changed_at });
    }

    /// Records that a new primary was found, whose clock may differ.
    pub(crate) fn primary_changed(&self) {
        let mut reading = self.reading.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(reading) = reading.as_mut() {
            reading.primary_changed_at = Some(Uptime::now());
        }
    }

    /// The server's time in whole milliseconds. Before the first reading it is this machine's time.
    pub(crate) fn now(&self) -> Instant {
        self.now_at(Uptime::now())
    }

    /// Like [`ServerClock::now`], but not before an earlier result if a better estimate is slightly behind it. So jobs that one process
    /// enqueues one after the other have dates in this order.
    pub(crate) fn now_in_order(&self) -> Instant {
        let now = self.now();
        let ms = now.timestamp_millis();
        let last = self.last.fetch_max(ms, Ordering::Relaxed);
        if last <= ms {
            return now;
        }
        if last - ms > CORRECTED_BY {
            // The estimate was wrong before.
            self.last.store(ms, Ordering::Relaxed);
            return now;
        }
        Instant::from_timestamp_millis(last).unwrap_or(now)
    }

    fn now_at(&self, now: Uptime) -> Instant {
        let reading = *self.reading.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        let estimate = match reading {
            Some(Reading { server, taken, .. }) => server + now.since(taken),
            #[expect(clippy::disallowed_methods, reason = "there is no reply of the server yet")]
            None => chrono::Utc::now(),
        };
        estimate.duration_trunc(chrono::TimeDelta::milliseconds(1)).unwrap_or(estimate)
    }

    /// Whether the last reading is too old, or may come from a former primary.
    pub(crate) fn is_stale(&self) -> bool {
        self.is_stale_at(Uptime::now())
    }

    fn is_stale_at(&self, now: Uptime) -> bool {
        let reading = *self.reading.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        reading.is_none_or(|reading| reading.primary_changed_at.is_some() || now.since(reading.taken) > self.fresh_for)
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn server() -> Instant {
        Instant::from_timestamp_millis(4_000_000_000_000).expect("a date")
    }

    #[test]
    fn the_clock_follows_the_server_and_not_this_machine() {
        let clock = ServerClock::default();
        let before = Uptime::now();
        assert!(clock.is_stale());
        clock.observe(server(), Uptime::now());
        assert!(!clock.is_stale());
        let now = clock.now();
        assert!(now >= server() && now < server() + 10 * SECOND);
        clock.primary_changed();
        assert!(clock.is_stale() && clock.now() >= server(), "the old estimate is used until the new primary replies");
        clock.observe(server(), before);
        assert!(clock.is_stale(), "the command was sent before the change");
        clock.observe(server(), Uptime::now());
        assert!(!clock.is_stale());
        assert_eq!(now.timestamp_subsec_nanos() % 1_000_000, 0, "BSON dates are whole milliseconds");
    }

    #[test]
    fn dates_in_order_do_not_go_back_a_little_and_do_after_an_error() {
        let clock = ServerClock::default();
        let asked = Uptime::now();
        clock.observe(server() + SECOND, asked);
        let first = clock.now_in_order();
        clock.observe_at(server() + SECOND / 2, Uptime::now(), Uptime::now());
        assert!(clock.now() < first && clock.now_in_order() == first);
        clock.observe_at(server() - 60 * SECOND, Uptime::now(), Uptime::now());
        assert!(clock.now_in_order() < server() - 50 * SECOND);
    }

    #[test]
    fn a_slow_reply_does_not_put_the_clock_back_and_a_quick_one_does() {
        let (clock, asked) = (ServerClock::default(), Uptime::now());
        let taken = asked + 4 * SECOND;
        clock.observe_at(server(), taken, taken);
        clock.observe_at(server() - 3 * SECOND, asked, taken);
        assert_eq!(clock.now_at(taken), server(), "three seconds late, of four that it may have been on its way");
        clock.observe_at(server() - 3_600 * SECOND, asked, taken);
        assert!(clock.now_at(taken) < server(), "another server, an hour behind");
        clock.observe_at(server() + 3_600 * SECOND, asked, taken);
        assert!(clock.now_at(taken) > server(), "another server, an hour ahead");
    }

    #[test]
    fn a_reading_from_before_a_sleep_is_stale_and_the_estimate_counts_the_sleep() {
        let (clock, taken, sleep) = (ServerClock::default(), Uptime::now(), 8 * 3_600 * SECOND);
        clock.observe_at(server(), taken, taken);
        assert!(!clock.is_stale_at(taken + FRESH_FOR));
        assert!(clock.is_stale_at(taken + sleep));
        assert_eq!(clock.now_at(taken + sleep), server() + sleep);
    }

    /// In a time namespace `CLOCK_BOOTTIME` can be ahead of `CLOCK_MONOTONIC`, as after a suspend of the machine.
    #[test]
    fn the_uptime_counts_the_sleep_of_the_machine() {
        const SLEPT: &str = "RECRUITER_TEST_SLEPT";
        if let Ok(before) = std::env::var(SLEPT) {
            let before = Duration::from_nanos(before.parse().expect("nanoseconds"));
            let slept = Uptime::now().since(Uptime(before));
            assert!(slept >= Duration::from_secs(86_400), "{slept:?}");
            return;
        }
        let test = std::thread::current().name().expect("a test has a name").to_owned();
        let this = std::env::current_exe().expect("a test knows its own program");
        let slept = Command::new("unshare")
            .args(["--user", "--map-root-user", "--time", "--boottime", "86400", "--fork"])
            .arg(this)
            .args(["--exact", &test])
            .env(SLEPT, Uptime::now().0.as_nanos().to_string())
            .output()
            .expect("`unshare` (util-linux) makes a time namespace");
        let said = String::from_utf8_lossy(&slept.stdout);
        assert!(slept.status.success() && said.contains("1 passed"), "{said}{}", String::from_utf8_lossy(&slept.stderr));
    }
}
