//! Whether this process is alive and ready: what its probes answer, and what its metrics say about it.
//!
//! Used by the three programs, each of which is one process with one main loop. A worker inside of an application notes nothing here except
//! whether MongoDB answers.
//!
//! - **Alive**: the main loop makes progress, as the watchdog of the service manager sees it.
//! - **Ready**: the process has reached its place (a recruiter leads or stands by, a worker is registered, a cleaner watches), it is not
//!   stopping, and MongoDB has answered the last operation that ended. No probe asks MongoDB anything.

use std::{
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant as Monotonic},
};

/// The main loop hangs if it makes no progress for this time. As `WatchdogSec=` of the units.
pub(crate) const HANGS_AFTER: Duration = Duration::from_secs(180);

static THIS_PROCESS: Health = Health::new();

/// The health of one process.
#[derive(Debug)]
struct Health {
    /// When the main loop made progress last; `None` before its first turn.
    progress: Mutex<Option<Monotonic>>,
    place: Mutex<Place>,
    /// Whether MongoDB has answered the last operation that ended.
    is_database_reached: AtomicBool,
}

#[derive(Debug)]
struct Place {
    is_ready: bool,
    /// In words, for people.
    status: String,
}

impl Health {
    const fn new() -> Self {
        let place = Place { is_ready: false, status: String::new() };
        Self { progress: Mutex::new(None), place: Mutex::new(place), is_database_reached: AtomicBool::new(true) }
    }

    fn set(&self, is_ready: bool, status: &str) {
        *lock(&self.place) = Place { is_ready, status: status.to_owned() };
    }

    fn progress_age(&self, now: Monotonic) -> Option<Duration> {
        lock(&self.progress).map(|progress| now.saturating_duration_since(progress))
    }

    fn live(&self, now: Monotonic) -> Result<String, String> {
        match self.progress_age(now) {
            Some(age) if age > HANGS_AFTER => Err(format!("the main loop has made no progress for {} s", age.as_secs())),
            Some(_) => Ok("the main loop makes progress".into()),
            None => Ok("starting".into()),
        }
    }

    fn readiness(&self) -> Result<String, String> {
        let Place { is_ready, status } = &*lock(&self.place);
        match (is_ready, self.is_database_reached.load(Ordering::Relaxed)) {
            (true, true) => Ok(status.clone()),
            (true, false) => Err("MongoDB does not answer".into()),
            (false, _) if status.is_empty() => Err("starting".into()),
            (false, _) => Err(status.clone()),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Notes that the main loop makes progress.
pub(crate) fn progress() {
    *lock(&THIS_PROCESS.progress) = Some(Monotonic::now());
}

/// Notes that the process is ready, and in which way.
pub(crate) fn ready(status: &str) {
    THIS_PROCESS.set(true, status);
}

/// Notes that the process is not ready any more, and why.
pub(crate) fn not_ready(why: &str) {
    THIS_PROCESS.set(false, why);
}

/// Notes whether MongoDB has answered an operation. A refusal is an answer.
pub(crate) fn database(is_reached: bool) {
    THIS_PROCESS.is_database_reached.store(is_reached, Ordering::Relaxed);
}

/// Time since the main loop made progress; `None` before its first turn.
pub(crate) fn progress_age() -> Option<Duration> {
    THIS_PROCESS.progress_age(Monotonic::now())
}

/// Whether the process is alive, in words. A process that starts is alive.
pub(crate) fn live() -> Result<String, String> {
    THIS_PROCESS.live(Monotonic::now())
}

/// Whether the process is ready, in words.
pub(crate) fn readiness() -> Result<String, String> {
    THIS_PROCESS.readiness()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_alive_until_its_main_loop_hangs() {
        let (health, begin) = (Health::new(), Monotonic::now());
        assert!(health.live(begin + HANGS_AFTER * 2).is_ok(), "it waits for MongoDB at its start");
        *lock(&health.progress) = Some(begin);
        assert!(health.live(begin + HANGS_AFTER).is_ok());
        let hangs = health.live(begin + HANGS_AFTER + Duration::from_secs(1));
        assert_eq!(hangs, Err("the main loop has made no progress for 181 s".into()));
    }

    #[test]
    fn a_process_is_ready_in_its_place_while_mongodb_answers() {
        let health = Health::new();
        assert_eq!(health.readiness(), Err("starting".into()));
        health.set(true, "leading");
        assert_eq!(health.readiness(), Ok("leading".into()));
        health.is_database_reached.store(false, Ordering::Relaxed);
        assert_eq!(health.readiness(), Err("MongoDB does not answer".into()));
        health.is_database_reached.store(true, Ordering::Relaxed);
        assert_eq!(health.readiness(), Ok("leading".into()));
        health.set(false, "stopping");
        assert_eq!(health.readiness(), Err("stopping".into()));
    }
}
