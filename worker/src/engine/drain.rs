//! The end of a session: after a stop request, at the memory limit, when a cleaner has declared the worker dead, or after a panic of a
//! task.
//!
//! After a stop request or at the memory limit the session takes no more jobs. Its jobs may continue for the grace period, and are
//! cancelled then; if the request is patient, the grace period begins only when another request presses. The roster keeps naming the jobs that have not ended, so that a cleaner rescues them.
//!
//! A worker that could not end or write everything (a thread that cannot be killed, a MongoDB that is away) leaves its roster document. At the
//! memory limit, a start that the drain interrupts counts as an attempt: otherwise a job that exhausts the memory would run again without
//! end.

use std::time::{Duration, Instant as Monotonic};

use recruiter_common::{
    ids::JobId,
    shutdown::{Shutdown, pause},
    store::{HeartbeatReply, Hint},
    telemetry::{chain, milliseconds},
};
use tokio::time::timeout;

use super::{
    run::tasks::TaskPanicked,
    session::{Session, SessionEnd},
    starts::release_unconfirmed,
};
use crate::cancellation::{Cancel, Cancellation};

/// How long cancelled jobs may take to end.
const WAIT_AFTER_CANCEL: Duration = Duration::from_secs(5);
/// The same after a second signal. Together with the last writes it must fit into [`ABORT_WITHIN`](crate::ABORT_WITHIN).
const HURRIED_FOR: Duration = Duration::from_secs(1);
/// How long the release of unconfirmed starts may take at the end. A cleaner rescues the jobs that were not released.
const LAST_RELEASE: Duration = Duration::from_secs(5);
/// How long the last writes of the recorder may take: longer than most failovers. Together with the grace period, the times above and one
/// call it must fit into systemd's TimeoutStopSec.
const LAST_RECORDS: Duration = Duration::from_secs(15);

/// A longer grace period is cut to this: an instant plus the longest duration would overflow.
const LONGEST_GRACE: Duration = Duration::from_secs(365 * 24 * 3_600);

/// Ends a session for the reason `end`. Returns another reason if the worker is declared dead, or a task panics, in the meantime.
pub(crate) async fn drain(mut session: Session, mut end: SessionEnd, shutdown: &mut Shutdown) -> SessionEnd {
    if matches!(end, SessionEnd::Stopped | SessionEnd::MemoryLimit) {
        end = wait_for_jobs(&mut session, end, shutdown).await;
    }
    if matches!(end, SessionEnd::Retired | SessionEnd::Broken) {
        drop_jobs(&mut session, end).await;
    }
    session.progress();
    let now = session.store().now();
    if end != SessionEnd::Broken {
        // MongoDB may be unreachable. The roster names the jobs that are not released in time.
        let _ = timeout(LAST_RELEASE, release_unconfirmed(&session.environment, session.id, now)).await;
    }
    let unended = session.environment.held.working_on();
    let in_hooks = session.environment.held.count_recorded();
    if in_hooks > 0 {
        tracing::warn!(worker.id = %session.id, count = in_hooks, "aborting hooks; the ends of their jobs are recorded");
    }
    leave(session, end, &unended).await;
    end
}

/// Takes no more jobs and waits for those that run, at first for the grace period. Then it cancels them.
async fn wait_for_jobs(session: &mut Session, end: SessionEnd, shutdown: &mut Shutdown) -> SessionEnd {
    if end == SessionEnd::MemoryLimit || shutdown.is_requested() {
        session.dependencies().notifier.stopping();
    }
    let grace = session.config().grace.min(LONGEST_GRACE);
    let until = Monotonic::now() + if shutdown.is_patient() { LONGEST_GRACE } else { grace };
    session.work.turn.withdraw().await;
    session.work.return_all().await;
    session.work.return_permits().await;
    if session.work.finish_starts().await.is_err() {
        return SessionEnd::Broken;
    }
    tracing::info!(worker.id = %session.id, count = session.work.tasks.running(), grace_ms = milliseconds(grace), "taking no more jobs");
    session.environment.held.for_each_job(Cancel::no_more_items);
    let mut waited = wait(session, until, Duration::ZERO, shutdown).await;
    if waited == Ok(false) {
        let why = if end == SessionEnd::MemoryLimit { Cancellation::MemoryLimit } else { Cancellation::WorkerStopping };
        tracing::warn!(
            worker.id = %session.id,
            count = session.work.tasks.running(),
            grace_ms = milliseconds(grace),
            "interrupting jobs that did not end within the grace; if this happens often, raise it, and the time that the supervisor waits"
        );
        session.environment.held.for_each_job(|cancel| cancel.cancel(why));
        let cancelled_for = WAIT_AFTER_CANCEL.max(session.dependencies().registry.stops_within());
        waited = wait(session, Monotonic::now() + cancelled_for, HURRIED_FOR, shutdown).await;
    }
    waited.map_or_else(|other| other, |_| end)
}

/// Waits until no job runs any more or `until` has passed: the grace period, which begins with the first request that is not patient. After
/// a second signal it waits for `hurried` at most. Jobs can still be cancelled. Returns whether all jobs have ended, or another end of the session.
async fn wait(session: &mut Session, mut until: Monotonic, hurried: Duration, shutdown: &mut Shutdown) -> Result<bool, SessionEnd> {
    let (mut is_hurried, mut is_patient) = (false, shutdown.is_patient());
    while session.work.tasks.running() > 0 {
        session.progress();
        tokio::select! {
            Some(ended) = session.work.tasks.ended() => match ended {
                Ok(()) => session.work.return_permits().await,
                Err(TaskPanicked) => return Err(SessionEnd::Broken),
            },
            _ = &mut session.recording => return Err(SessionEnd::Broken),
            news = session.news.recv() => match news {
                Some(HeartbeatReply::Retired) => return Err(SessionEnd::Retired),
                Some(HeartbeatReply::Seen { .. }) => session.read_cancellations().await,
                None => return Err(SessionEnd::Broken),
            },
            hint = session.hints.next() => if let Hint::Cancel { job } = hint {
                session.cancel(job);
            },
            () = pause(until.saturating_duration_since(Monotonic::now())) => return Ok(false),
            () = pause(session.environment.dependencies.watchdog.next_in()) => {}
            () = async { if is_patient { shutdown.pressed().await } else { shutdown.aborted().await } }, if !is_hurried => {
                if std::mem::take(&mut is_patient) {
                    until = Monotonic::now() + session.config().grace.min(LONGEST_GRACE);
                    continue;
                }
                is_hurried = true;
                session.environment.held.for_each_job(Cancel::hurry);
                until = until.min(Monotonic::now() + hurried);
            }
        }
    }
    Ok(true)
}

/// Cancels the jobs of a session that must not record their ends, and waits for them for `WAIT_AFTER_CANCEL` at most.
async fn drop_jobs(session: &mut Session, end: SessionEnd) {
    let count = session.work.tasks.running();
    if end == SessionEnd::Retired {
        tracing::warn!(worker.id = %session.id, count, "this worker was declared dead: cancelling its jobs without recording them");
    } else {
        tracing::error!(worker.id = %session.id, count, "a task of this worker has panicked: a cleaner will rescue its jobs");
    }
    session.environment.held.for_each_job(|cancel| cancel.cancel(Cancellation::ClaimLost));
    if end == SessionEnd::Retired {
        // The jobs that they have locked are released, or rescued by a cleaner.
        let _ = session.work.drop_starts().await;
    }
    let until = Monotonic::now() + WAIT_AFTER_CANCEL;
    while session.work.tasks.running() > 0 && Monotonic::now() < until {
        session.progress();
        let _ = timeout(until.saturating_duration_since(Monotonic::now()), session.work.tasks.ended()).await;
    }
}

/// Waits for the last writes and leaves the roster, unless the roster must still name the `unended` jobs.
async fn leave(session: Session, end: SessionEnd, unended: &[JobId]) {
    let store = session.store().clone();
    let watchdog = session.dependencies().watchdog.clone();
    session.dependencies().meters.left();
    let Session { id, recording, beating, environment, work, .. } = session;
    // Aborts the jobs that still run. The recorder ends when all references to it are dropped.
    drop((environment, work));
    let abort = recording.abort_handle();
    let is_recorded = end != SessionEnd::Broken && timeout(LAST_RECORDS, recording).await.is_ok_and(|ended| ended.is_ok());
    abort.abort();
    beating.abort();
    watchdog.progress();
    if matches!(end, SessionEnd::Retired | SessionEnd::Broken) {
        return;
    }
    if !is_recorded || !unended.is_empty() {
        let jobs: Vec<String> = unended.iter().map(ToString::to_string).collect();
        tracing::warn!(worker.id = %id, ?jobs, "not everything ended in time: a cleaner rescues the rest");
        return;
    }
    match store.leave_if_alive(id).await {
        Ok(()) => store.announce_hint(Hint::Left { worker: id }).await,
        Err(error) => tracing::warn!(worker.id = %id, error = chain(&error), "failed to leave the roster; a cleaner removes this worker"),
    }
}
