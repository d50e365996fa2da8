//! Waits for the result of a job.
//!
//! All waits of a process share one listener. It asks the other processes to publish the ids of the jobs that end
//! ([`events`](crate::events)), and reads them. Each process publishes one small document for a batch of jobs that it has archived, and only
//! while somebody waits. A job needs no mark for this, so any job can be waited for, also one that runs already.
//!
//! A change stream over `archived` would need no other process. But for each stream MongoDB unwinds every transaction of up to 1,000 jobs:
//! one stream cost it a fifth more processor time, the ring a twentieth at most (docs/performance.md). The ring is written once for all
//! who wait, whatever their number.
//!
//! An id that is published is a hint. After it, and at the beginning, the job itself is read. If a hint is lost, the job is found by a look:
//! one query for all jobs that this process waits for. The looks are 2 s apart. In the first second after the first wait, when other
//! processes may not know of it yet, they begin with 10 ms and double. The listener ends a minute after the last wait, so an application
//! that waits again and again does not begin anew.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant as Monotonic},
};

use bson::{Timestamp, oid::ObjectId};
use futures_util::{FutureExt as _, TryStreamExt, future::BoxFuture};
use tokio::sync::{Notify, watch};

use crate::{
    enqueue::{Enqueued, Workable},
    events::{RENEW_EVERY, Wanted},
    failure::Failure,
    finished::{JobResult, ResultError, result_in},
    ids::JobId,
    job::{FinishReason, Keep},
    shutdown::pause,
    store::{RingPart, Store, StoreError, StoredJob},
    telemetry::chain,
};

/// The listener ends this long after the last wait.
const LINGER: Duration = Duration::from_secs(60);
/// How long after the subscription the other processes may not know of it: the time that they cache, and some more for a slow machine.
const UNKNOWN_FOR: Duration = Duration::from_millis(1_500);
/// The first look after a subscription. The next ones double.
const FIRST_LOOK: Duration = Duration::from_millis(10);
/// The time between looks while hints arrive.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// The same while they do not, because the events cannot be read.
const LOOK_BLINDLY_EVERY: Duration = Duration::from_millis(500);
/// Pause after a failed call.
const AGAIN_AFTER: Duration = Duration::from_millis(200);

/// Why a wait has no result.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WaitError {
    /// The job had not ended in time. It still waits or runs.
    #[error("job {job} has not ended within {waited:?}: wait again, or look at `recruiter jobs why {job}`")]
    TimedOut {
        /// The job.
        job: JobId,
        /// How long the caller wanted to wait.
        waited: Duration,
    },
    /// No job has this id.
    #[error(
        "there is no job {job}: it was never enqueued, its transaction is not committed, or it has ended and was deleted from the archive"
    )]
    Unknown {
        /// The id.
        job: JobId,
    },
    /// The job was there and is gone: it succeeded and nothing is kept of a success ([`Keep::Failures`]).
    #[error("job {job} has ended, and nothing of it is kept: it succeeded with `keep: failures`")]
    NotKept {
        /// The job.
        job: JobId,
    },
    /// The job was there and is gone, although it should be in the archive: somebody has deleted it. How it has ended is unknown.
    #[error("job {job} is gone and is not in the archive: somebody has deleted it, and how it has ended is unknown")]
    Gone {
        /// The job.
        job: JobId,
    },
    /// The job became other jobs. Wait for those whose results are wanted.
    #[error("job {job} became other jobs: wait for one of them ({jobs:?})")]
    ContinuedAs {
        /// The job.
        job: JobId,
        /// The jobs that it became.
        jobs: Vec<JobId>,
    },
    /// The job failed for good, was cancelled, or has expired.
    #[error("job {job} ended as `{why}`{}", said(.failure.as_ref()))]
    Failed {
        /// The job.
        job: JobId,
        /// The finish reason.
        why: FinishReason,
        /// The failure of its last execution: error class, message and trace. `None` if it was never started.
        failure: Option<Failure>,
    },
    /// The job has another class, or its result cannot be decoded.
    #[error(transparent)]
    Result(#[from] ResultError),
}

fn said(failure: Option<&Failure>) -> String {
    failure.map_or_else(String::new, |failure| format!(": {}: {}", failure.class, failure.message))
}

/// Those who wait for jobs in this process.
#[derive(Debug, Default)]
pub(crate) struct Waiters {
    state: Mutex<State>,
    /// Notified when somebody begins to wait.
    arrived: Notify,
}

#[derive(Debug, Default)]
struct State {
    waiting: HashMap<JobId, watch::Sender<()>>,
    is_listening: bool,
    /// Since when the other processes can know that somebody waits.
    subscribed_at: Option<Monotonic>,
    /// Whether the ids of ended jobs are read at the moment.
    hears: bool,
}

/// One who waits for a job. Dropping it ends the wait.
struct Place {
    waiters: Arc<Waiters>,
    job: JobId,
    ended: Option<watch::Receiver<()>>,
}

impl Place {
    /// Waits until the job should be read.
    async fn changed(&mut self) {
        // The sender is there as long as this place is.
        if let Some(ended) = &mut self.ended
            && ended.changed().await.is_ok()
        {
            return;
        }
        std::future::pending().await
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.waiters.state();
        self.ended = None;
        if state.waiting.get(&self.job).is_some_and(|sender| sender.receiver_count() == 0) {
            state.waiting.remove(&self.job);
        }
    }
}

impl Waiters {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a place. Returns whether the caller must start the listener.
    fn place(self: &Arc<Self>, job: JobId) -> (Place, bool) {
        let mut state = self.state();
        let ended = state.waiting.entry(job).or_insert_with(|| watch::channel(()).0).subscribe();
        let must_start = !std::mem::replace(&mut state.is_listening, true);
        drop(state);
        self.arrived.notify_one();
        (Place { waiters: self.clone(), job, ended: Some(ended) }, must_start)
    }

    /// Lets those who wait for this job read it.
    fn wake(&self, job: JobId) {
        if let Some(ended) = self.state().waiting.get(&job) {
            ended.send_replace(());
        }
    }

    fn jobs(&self) -> Vec<JobId> {
        self.state().waiting.keys().copied().collect()
    }

    /// When the next look is due, after a look that was this long ago.
    fn look_after(&self, last: Duration) -> Duration {
        let state = self.state();
        match state.subscribed_at {
            Some(at) if state.hears && at.elapsed() >= UNKNOWN_FOR => LOOK_EVERY,
            None | Some(_) => (last * 2).clamp(FIRST_LOOK, LOOK_BLINDLY_EVERY),
        }
    }
}

impl Enqueued {
    /// Waits for the result of the job.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # use recruiter_common::{Store, WaitError, Workable};
    /// # #[derive(serde::Serialize, serde::Deserialize)]
    /// # struct Sum { numbers: Vec<i64> }
    /// impl Workable for Sum {
    ///     const CLASS: &'static str = "Sum";
    ///     type Output = i64;
    /// }
    ///
    /// # async fn example(store: Store) -> Result<(), Box<dyn std::error::Error>> {
    /// let enqueued = Sum { numbers: vec![1, 2, 3] }.as_job().enqueue(&store).await?;
    /// match enqueued.wait::<Sum>(&store, Duration::from_secs(30)).await {
    ///     Ok(sum) => println!("it is {sum}"),
    ///     Err(WaitError::TimedOut { job, .. }) => println!("{job} still runs"),
    ///     Err(other) => return Err(other.into()),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`WaitError`].
    pub async fn wait<W: Workable>(&self, store: &Store, timeout: Duration) -> Result<W::Output, WaitError> {
        store.wait_for::<W>(self.id, timeout).await
    }
}

impl Store {
    /// Waits for the result of a job of this class, by its id. Through retries, failovers and restarts of all processes: only the timeout
    /// and the end of the job end the wait. Dropping the future ends it as well.
    ///
    /// # Errors
    /// [`WaitError`]. An unknown id is an error, so a job of a transaction can be waited for after the commit.
    pub async fn wait_for<W: Workable>(&self, job: JobId, timeout: Duration) -> Result<W::Output, WaitError> {
        let read = async move || {
            let Some(stored) = self.job(job).await.map_err(ResultError::from)? else { return Ok(Seen::Nowhere) };
            match result_in::<W>(&stored)? {
                JobResult::Unknown => Ok(Seen::Nowhere),
                JobResult::Unfinished => Ok(Seen::unfinished(&stored)),
                JobResult::Done(result) => Ok(Seen::Ended(result)),
                JobResult::ContinuedAs(jobs) => Err(WaitError::ContinuedAs { job, jobs }),
                JobResult::Failed { why, failure } => Err(WaitError::Failed { job, why, failure }),
            }
        };
        self.wait_until(job, timeout, || read().boxed()).await
    }

    /// Waits until a job of any class is archived, and returns its document. For programs that know no Rust type of its class.
    ///
    /// # Errors
    /// [`WaitError`], but not [`WaitError::Failed`]: the document says how the job has ended.
    pub async fn wait_for_end(&self, job: JobId, timeout: Duration) -> Result<StoredJob, WaitError> {
        let read = async move || match self.job(job).await.map_err(ResultError::from)? {
            None => Ok(Seen::Nowhere),
            Some(stored) if stored.is_archived => Ok(Seen::Ended(stored)),
            Some(stored) => Ok(Seen::unfinished(&stored)),
        };
        self.wait_until(job, timeout, || read().boxed()).await
    }

    async fn wait_until<'a, T>(
        &'a self,
        job: JobId,
        timeout: Duration,
        read: impl Fn() -> BoxFuture<'a, Result<Seen<T>, WaitError>>,
    ) -> Result<T, WaitError> {
        let waited = async {
            // Before the first read, so that no end is missed.
            let (mut place, must_start) = self.waiters.place(job);
            if must_start {
                tokio::spawn(listen(self.clone()));
            }
            let mut last_seen = None;
            loop {
                match read().await {
                    Ok(Seen::Ended(result)) => return Ok(result),
                    Ok(Seen::Unfinished { is_deleted_after_success }) => last_seen = Some(is_deleted_after_success),
                    Ok(Seen::Nowhere) => {
                        return Err(match last_seen {
                            Some(true) => WaitError::NotKept { job },
                            Some(false) => WaitError::Gone { job },
                            None => WaitError::Unknown { job },
                        });
                    }
                    Err(WaitError::Result(ResultError::Store(error))) if error.is_transient() && !error.is_unauthorized() => {
                        tracing::debug!(job.id = %job, error = chain(&error), "cannot read the job that is waited for; trying again");
                        pause(AGAIN_AFTER).await;
                        continue;
                    }
                    Err(other) => return Err(other),
                }
                place.changed().await;
            }
        };
        tokio::time::timeout(timeout, waited).await.unwrap_or(Err(WaitError::TimedOut { job, waited: timeout }))
    }
}

/// Where a job was seen.
enum Seen<T> {
    Nowhere,
    Unfinished { is_deleted_after_success: bool },
    Ended(T),
}

impl<T> Seen<T> {
    /// With `keep: failures` a job that succeeds is deleted, unless another job waits for it.
    fn unfinished(stored: &StoredJob) -> Self {
        let keep = Keep::of_stored(stored.document.get_str("keep").ok());
        let is_followed = stored.document.get_bool("followed").unwrap_or(false);
        Self::Unfinished { is_deleted_after_success: keep == Keep::Failures && !is_followed }
    }
}

/// The listener of a process. It ends when nobody has waited for a while.
async fn listen(store: Store) {
    let id = ObjectId::new();
    loop {
        tokio::select! {
            () = subscribe(&store, id) => {}
            () = hear(&store) => {}
            () = look(&store) => {}
            () = until_idle(&store.waiters) => {}
        }
        let mut state = store.waiters.state();
        if state.waiting.is_empty() {
            state.is_listening = false;
            (state.subscribed_at, state.hears) = (None, false);
            break;
        }
    }
    let _ = store.unsubscribe(id).await;
}

/// Keeps the subscription.
async fn subscribe(store: &Store, id: ObjectId) {
    let wanted = Wanted { ends: true, ..Wanted::default() };
    loop {
        // Without a ring nobody may publish: `events` may be a collection of the application.
        let asked = async {
            store.prepare_events(None).await?;
            store.subscribe(id, &wanted, RENEW_EVERY * 3).await
        };
        match asked.await {
            Ok(()) => {
                store.waiters.state().subscribed_at.get_or_insert_with(Monotonic::now);
                pause(RENEW_EVERY).await;
            }
            Err(error) => {
                tracing::debug!(error = chain(&error), "cannot ask for the ends of jobs; looking at the jobs instead");
                store.waiters.state().subscribed_at = None;
                pause(if is_lasting(&error) { LINGER } else { AGAIN_AFTER }).await;
            }
        }
    }
}

/// Whether the same call is useless for a while: a user who may only read cannot create the ring, and looks are enough.
fn is_lasting(error: &StoreError) -> bool {
    error.is_unauthorized() || !error.is_transient()
}

/// Reads the ids of ended jobs.
async fn hear(store: &Store) {
    loop {
        let heard = hear_once(store).await;
        store.waiters.state().hears = false;
        // Hints may have been missed.
        store.waiters.arrived.notify_one();
        if let Err(error) = heard {
            if matches!(error, StoreError::Foreign { .. }) {
                tracing::warn!(error = chain(&error), "cannot read the ends of jobs; looking at the jobs instead");
            } else {
                tracing::debug!(error = chain(&error), "cannot read the ends of jobs; trying again");
            }
            pause(if is_lasting(&error) { RENEW_EVERY } else { AGAIN_AFTER }).await;
        } else {
            pause(AGAIN_AFTER).await;
        }
    }
}

async fn hear_once(store: &Store) -> Result<(), StoreError> {
    store.prepare_events(None).await?;
    let from = store.newest_event().await?.unwrap_or(Timestamp { time: 0, increment: 0 });
    let mut cursor = store.tail_events(from, RingPart::Ends).await?;
    store.waiters.state().hears = true;
    // Jobs may have ended before the cursor was open.
    store.waiters.arrived.notify_one();
    while let Some(document) = cursor.try_next().await.map_err(StoreError::of_tail)? {
        let Ok(ended) = document.get_array("ended") else { continue };
        for job in ended.into_iter().flatten().filter_map(|id| id.as_object_id()) {
            store.waiters.wake(job.into());
        }
    }
    Ok(())
}

/// Looks at the jobs, in case a hint was lost.
async fn look(store: &Store) {
    let mut wait = Duration::ZERO;
    let mut looked_at = Monotonic::now();
    loop {
        wait = store.waiters.look_after(wait);
        tokio::select! {
            () = pause((looked_at + wait).saturating_duration_since(Monotonic::now())) => {}
            () = store.waiters.arrived.notified() => {
                // While hints arrive, a new wait needs no look. It has read its job.
                if store.waiters.look_after(wait) != LOOK_EVERY {
                    wait = Duration::ZERO;
                }
                continue;
            }
        }
        looked_at = Monotonic::now();
        let jobs = store.waiters.jobs();
        if jobs.is_empty() {
            continue;
        }
        match store.unfinished_among(&jobs).await {
            // Whatever is not scheduled has ended or is unknown.
            Ok(unfinished) => jobs.into_iter().filter(|job| !unfinished.contains(job)).for_each(|job| store.waiters.wake(job)),
            Err(error) => tracing::debug!(error = chain(&error), "cannot look at the jobs that are waited for; trying again"),
        }
    }
}

/// Returns when nobody has waited for a while.
async fn until_idle(waiters: &Waiters) {
    let mut idle = 0;
    while idle < 10 {
        pause(LINGER / 10).await;
        idle = if waiters.state().waiting.is_empty() { idle + 1 } else { 0 };
    }
}
