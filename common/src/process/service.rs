//! Notifications to the service manager: that a process is ready, is stopping, and what it is doing.
//!
//! Used by the three programs. A worker inside an application sends nothing ([`Notifier::Silent`]): the application
//! notifies its service manager itself. Without the feature `process`, no process sends anything. What is sent is also noted in
//! the room `health`, for the probes.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant as Monotonic},
};

#[cfg(feature = "process")]
use sd_notify::NotifyState;

use crate::health;

/// Maximum time between two calls of [`Watchdog::progress`] in a main loop, for any wait.
const LONGEST_WAIT: Duration = Duration::from_secs(5);

/// Notifies that the process is ready.
pub fn ready(status: &str) {
    health::ready(status);
    notify(News::Ready(status));
}

/// Notes that the process is not ready for now. The service manager has no word for it.
pub fn not_ready(why: &str) {
    health::not_ready(why);
}

/// Notifies that the process reads its settings again. [`ready`] ends it.
pub fn reloading() {
    notify(News::Reloading);
}

/// Whether a service manager started this process and hears its notifications.
#[cfg(feature = "process")]
#[must_use]
pub fn is_managed() -> bool {
    crate::base::flags::variable("NOTIFY_SOCKET").is_some()
}

/// Notifies that the process has begun to stop.
pub fn stopping() {
    health::not_ready("stopping");
    notify(News::Stopping);
}

/// Who notifies the service manager about a worker.
#[derive(Clone, Debug)]
pub enum Notifier {
    /// The application that the worker is part of: the worker sends nothing.
    Silent,
    /// The worker, which is the whole process, until another worker of the process replaces it.
    Process(Replaced),
}

/// Whether another worker of the process speaks for it.
#[derive(Clone, Debug, Default)]
pub struct Replaced(Arc<AtomicBool>);

impl Replaced {
    /// From now on another worker speaks for the process.
    pub fn note(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    fn is_noted(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl Notifier {
    /// Notifies that the process is ready.
    pub fn ready(&self, status: &str) {
        if self.speaks() {
            ready(status);
        }
    }

    /// Notes that the process is not ready for now. The service manager has no word for it.
    pub fn not_ready(&self, why: &str) {
        if self.speaks() {
            not_ready(why);
        }
    }

    /// Notifies that the process has begun to stop.
    pub fn stopping(&self) {
        if self.speaks() {
            stopping();
        }
    }

    /// The watchdog of the main loop, which a silent one notifies of nothing.
    pub fn watchdog(&self) -> Watchdog {
        let interval = if self.speaks() { watchdog_interval() } else { None };
        Watchdog { notifier: self.clone(), ..Watchdog::every(interval) }
    }

    /// Whether another worker of the process has replaced this one.
    pub fn is_replaced(&self) -> bool {
        matches!(self, Self::Process(replaced) if replaced.is_noted())
    }

    fn speaks(&self) -> bool {
        matches!(self, Self::Process(replaced) if !replaced.is_noted())
    }
}

/// Reports the progress of a process's main loop to the service manager.
///
/// The loop calls [`Watchdog::progress`] in each turn and after each long step of a turn, and waits for
/// [`Watchdog::next_in`] at most. While it does, the service manager gets `WATCHDOG=1`. When the loop hangs, the
/// service manager ends the process (`WatchdogSec=`). The loop itself must make the call, because a separate timer
/// would continue while the loop hangs.
#[derive(Clone, Debug)]
pub struct Watchdog {
    /// The interval in which the service manager expects `WATCHDOG=1`, if it expects it.
    interval: Option<Duration>,
    notifier: Notifier,
    noted: Arc<Mutex<Noted>>,
}

#[derive(Debug)]
struct Noted {
    progress: Monotonic,
    /// When the last notification was sent.
    told: Option<Monotonic>,
}

impl Watchdog {
    /// Uses the interval from the environment, set by the service manager (`WATCHDOG_USEC`).
    pub fn of_this_process() -> Self {
        Notifier::Process(Replaced::default()).watchdog()
    }

    fn every(interval: Option<Duration>) -> Self {
        Self { interval, notifier: Notifier::Silent, noted: Arc::new(Mutex::new(Noted { progress: Monotonic::now(), told: None })) }
    }

    /// Records progress of the main loop, and notifies the service manager when that is due.
    pub fn progress(&self) {
        let is_due = self.note(Monotonic::now());
        if self.notifier.speaks() {
            health::progress();
            if is_due {
                notify(News::Progress);
            }
        }
    }

    /// Whether a notification is due: at most four are sent in each interval.
    fn note(&self, now: Monotonic) -> bool {
        let mut noted = self.noted();
        noted.progress = now;
        let is_due = self.interval.is_some_and(|interval| noted.told.is_none_or(|told| now.duration_since(told) >= interval / 4));
        if is_due {
            noted.told = Some(now);
        }
        is_due
    }

    /// How long the main loop may wait before it must call [`Watchdog::progress`] again.
    pub fn next_in(&self) -> Duration {
        self.interval.map_or(LONGEST_WAIT, |interval| (interval / 4).min(LONGEST_WAIT))
    }

    /// Time since the main loop last recorded progress.
    pub fn stalled_for(&self) -> Duration {
        self.noted().progress.elapsed()
    }

    fn noted(&self) -> MutexGuard<'_, Noted> {
        self.noted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A notification to the service manager.
#[cfg_attr(not(feature = "process"), expect(dead_code, reason = "without the feature nothing is sent"))]
enum News<'a> {
    Ready(&'a str),
    Reloading,
    Stopping,
    Progress,
}

#[cfg(feature = "process")]
fn notify(news: News<'_>) {
    let told = match news {
        News::Ready(status) => sd_notify::notify(&[NotifyState::Ready, NotifyState::Status(status)]),
        News::Reloading => match NotifyState::monotonic_usec_now() {
            Ok(now) => sd_notify::notify(&[NotifyState::Reloading, now]),
            Err(error) => Err(error),
        },
        News::Stopping => sd_notify::notify(&[NotifyState::Stopping]),
        News::Progress => sd_notify::notify(&[NotifyState::Watchdog]),
    };
    if let Err(error) = told {
        tracing::debug!(%error, "the service manager could not be notified");
    }
}

#[cfg(feature = "process")]
fn watchdog_interval() -> Option<Duration> {
    sd_notify::watchdog_enabled()
}

#[cfg(not(feature = "process"))]
fn notify(_: News<'_>) {}

#[cfg(not(feature = "process"))]
fn watchdog_interval() -> Option<Duration> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_service_manager_is_told_while_there_is_progress_and_not_more_often_than_needed() {
        let second = Duration::from_secs(1);
        let (watchdog, start) = (Watchdog::every(Some(second * 40)), Monotonic::now());
        let told: Vec<u32> = (0..60).filter(|after| watchdog.note(start + second * *after)).collect();
        assert_eq!(told, [0, 10, 20, 30, 40, 50]);
        assert_eq!(watchdog.next_in(), LONGEST_WAIT);
        assert_eq!(Watchdog::every(Some(second)).next_in(), second / 4);
        assert!(!Watchdog::every(None).note(start), "the service manager expects no notification");
    }
}
