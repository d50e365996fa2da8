//! The heartbeat: says that this worker lives, busy or idle, on connections that job traffic cannot starve, and learns
//! when it was declared dead. A worker whose main loop hangs sends none, so that the cleaner takes its jobs.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant as Monotonic},
};

use recruiter_common::{
    clock::Uptime,
    ids::{JobId, WorkerId},
    instant::Instant,
    roster::Assignment,
    service::Watchdog,
    shutdown::pause,
    store::{Beat, Store},
    telemetry::chain,
};
use tokio::sync::mpsc;

use crate::shortage::Shortage;

/// The heartbeats of a fleet fall on multiples of this, by MongoDB's clock: those that meet share one write to its disk.
const TOGETHER: Duration = Duration::from_millis(250);
/// How long after its lease a worker without progress goes on to send heartbeats. Longer than a call to MongoDB, after each of which the main
/// loop notes progress.
const HANGS_AFTER: Duration = Duration::from_secs(20);
/// Between attempts after a heartbeat that was not acknowledged.
const RETRY: Duration = Duration::from_millis(500);

/// What runner and heartbeat share.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    /// Every job this worker holds or is about to start: written into the roster, read by the cleaner.
    working_on: Mutex<HashSet<JobId>>,
    lease: Mutex<Option<Lease>>,
    shortage: Mutex<Shortage>,
}

/// How long this worker may trust that it has not been declared dead.
#[derive(Clone, Copy, Debug)]
struct Lease {
    /// On the clock of this machine, which counts a sleep, from before the heartbeat was sent.
    until: Uptime,
    /// By the server's clock, counted from what the heartbeat wrote.
    server_until: Instant,
}

impl Shared {
    pub(crate) fn work_on(&self, jobs: impl IntoIterator<Item = JobId>) {
        lock(&self.working_on).extend(jobs);
    }

    pub(crate) fn done_with(&self, job: JobId) {
        lock(&self.working_on).remove(&job);
    }

    pub(crate) fn works_on(&self, job: JobId) -> bool {
        lock(&self.working_on).contains(&job)
    }

    pub(crate) fn working_on(&self) -> Vec<JobId> {
        lock(&self.working_on).iter().copied().collect()
    }

    pub(crate) fn count(&self) -> u32 {
        u32::try_from(lock(&self.working_on).len()).unwrap_or(u32::MAX)
    }

    /// Until when, by the server's clock, a start may still be carried out; nothing when the lease is over.
    pub(crate) fn lease_until(&self) -> Option<Instant> {
        self.lease_until_at(Uptime::now())
    }

    fn lease_until_at(&self, now: Uptime) -> Option<Instant> {
        lock(&self.lease).filter(|lease| now < lease.until).map(|lease| lease.server_until)
    }

    /// How many jobs this worker may have at a time, of `concurrency` that were asked for.
    pub(crate) fn allowed(&self, concurrency: u32) -> u32 {
        lock(&self.shortage).allowed(concurrency, Monotonic::now())
    }

    /// Notes that the machine could not start a job, for this reason.
    pub(crate) fn note_shortage(&self, reason: &str) {
        if lock(&self.shortage).observe(self.count(), Monotonic::now()) {
            tracing::warn!(
                reason,
                "the machine cannot start more programs: the jobs are released uncounted, and this worker takes fewer for a while"
            );
        }
    }

    /// Notes an acknowledged heartbeat that was sent at `sent` and written as `at`.
    pub(crate) fn renew(&self, sent: Uptime, at: Instant, lease: Duration) {
        *lock(&self.lease) = Some(Lease { until: sent + lease, server_until: at + lease });
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a heartbeat found out.
#[derive(Debug)]
pub(crate) enum News {
    /// It was acknowledged at this time; this assignment stands in the roster, or so many places are offered there.
    Alive { at: Instant, assignment: Option<Assignment>, offered: u32 },
    /// This worker was declared dead.
    Retired,
}

/// How to beat, and for what.
pub(crate) struct Pulse {
    pub(crate) worker: WorkerId,
    pub(crate) shared: Arc<Shared>,
    pub(crate) every: Duration,
    pub(crate) lease: Duration,
    /// Noted by the main loop.
    pub(crate) watchdog: Watchdog,
}

/// Beats until the worker is declared dead or nobody listens any more.
pub(crate) async fn run(store: Store, pulse: Pulse, news: mpsc::Sender<News>) {
    let Pulse { worker, shared, every, lease, watchdog } = pulse;
    let (mut unheard, mut hanging) = (false, 0_u32);
    while !news.is_closed() {
        let stalled = watchdog.stalled_for();
        if stalled > lease + HANGS_AFTER {
            hanging = hanging.saturating_add(1);
            if hanging == 2 {
                tracing::error!(
                    worker.id = %worker,
                    seconds = stalled.as_secs(),
                    "the main loop of this worker hangs: no heartbeats are sent, so that a cleaner takes its jobs"
                );
            }
            // A process that was frozen needs a moment until its main loop goes on.
            pause(if hanging == 1 { RETRY / 10 } else { RETRY }).await;
            continue;
        }
        hanging = 0;
        let sent = Uptime::now();
        let next = match store.heartbeat(worker, &shared.working_on()).await {
            Ok(Beat::Seen { at, assignment, offered }) => {
                shared.renew(sent, at, lease);
                if std::mem::take(&mut unheard) {
                    tracing::info!(worker.id = %worker, "heartbeats are acknowledged again");
                }
                // A runner that is busy will hear of the next one.
                let _ = news.try_send(News::Alive { at, assignment, offered });
                with_others(every, store.now())
            }
            Ok(Beat::Retired) => {
                let _ = news.send(News::Retired).await;
                return;
            }
            Err(error) => {
                if !std::mem::replace(&mut unheard, true) {
                    tracing::warn!(worker.id = %worker, error = chain(&error), "a heartbeat was not acknowledged; trying on");
                }
                RETRY
            }
        };
        pause(next).await;
    }
}

/// How long to wait from `now` so that others end their wait at the same instant: `every`, or a little less.
fn with_others(every: Duration, now: Instant) -> Duration {
    if every < TOGETHER * 2 {
        return every;
    }
    let past = (now + every).timestamp_subsec_millis() % TOGETHER.subsec_millis();
    every - Duration::from_millis(past.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_over_when_the_machine_has_slept_for_longer() {
        let (shared, sent) = (Shared::default(), Uptime::now());
        let (at, lease) = (Instant::from_timestamp_millis(1_700_000_000_000).expect("a date"), Duration::from_secs(20));
        assert_eq!(shared.lease_until_at(sent), None, "no heartbeat was acknowledged yet");
        shared.renew(sent, at, lease);
        assert_eq!(shared.lease_until_at(sent + Duration::from_secs(19)), Some(at + lease));
        assert_eq!(shared.lease_until_at(sent + lease), None);
        assert_eq!(shared.lease_until_at(sent + Duration::from_secs(8 * 3_600)), None, "a night asleep");
    }

    #[test]
    fn heartbeats_meet_and_are_never_late() {
        let check = |every: u64, now: i64| {
            let now = Instant::from_timestamp_millis(1_700_000_000_000 + now).expect("a date");
            with_others(Duration::from_millis(every), now).as_millis()
        };
        assert_eq!(check(5_000, 0), 5_000);
        assert_eq!(check(5_000, 1), 4_999);
        assert_eq!(check(5_000, 249), 4_751);
        assert_eq!(check(5_000, 251), 4_999);
        assert_eq!(check(500, 30), 470);
        assert_eq!(check(50, 10), 50, "too often to meet");
    }
}
