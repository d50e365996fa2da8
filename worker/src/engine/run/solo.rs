//! Executes single jobs outside of a session: without a place in the roster, slots, heartbeats and a recorder.
//!
//! Used by the test kit for applications, `recruiter-testing`. The workable, the layers, the policy and the verdict are those of a worker.
//! A job whose cancellation was requested before is not executed, and nothing else cancels an execution but its time limit.

use std::sync::Arc;

use recruiter_common::{
    failure::{self, Failure},
    ids::{StartId, WorkerId},
    instant::Instant,
    job::Job,
    store::{CommitSession, ProcessIdentity, Recorded, Start, Store, StoreError, ToStart},
};

use super::{
    place::{Alone, Place},
    unit::{Ended, Unit},
};
use crate::{
    Worker,
    cancellation::Cancel,
    engine::{
        dependencies::{Policy, policy_of},
        held::Startable,
        record::{
            ending::{JobEnd, end_of},
            ran::Ran,
        },
    },
    notes,
};

/// How long after its creation a [`Start`] can be recorded, by the server's clock.
const RECORDED_WITHIN: chrono::TimeDelta = chrono::TimeDelta::minutes(1);

/// Why a job cannot be executed alone by this worker.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotAlone {
    /// The worker does not have the class.
    #[error("this worker has no workable of class `{0}`: register it")]
    UnknownClass(String),
    /// The worker does not have the retry policy.
    #[error("this worker has no retry policy `{0}`: register it")]
    UnknownPolicy(String),
    /// The job is a bundle.
    #[error("a bundle is executed by a running worker only: execute one job for each item")]
    Bundle,
}

/// The parameters of a job as a value of this class.
///
/// # Errors
/// When they cannot be decoded.
pub fn deserialize<W: serde::de::DeserializeOwned>(parameters: bson::Bson) -> Result<W, Failure> {
    crate::registry::deserialize(parameters)
}

/// Whether the worker has this class.
pub fn has_class(worker: &Worker, class: &str) -> bool {
    worker.registry.has(class)
}

/// A job that can be executed alone, before its start.
pub struct Solo<'a> {
    worker: &'a Worker,
    store: Option<Arc<Store>>,
    /// The job.
    pub job: Arc<Job>,
    policy: Policy,
}

/// An execution that has ended.
pub struct Execution {
    unit: Box<Unit>,
    ended: Box<Ended>,
    start: Start,
}

impl<'a> Solo<'a> {
    /// # Errors
    /// When this worker cannot execute the job alone.
    pub fn new(worker: &'a Worker, store: Option<Arc<Store>>, job: Arc<Job>) -> Result<Self, NotAlone> {
        if job.bundle.is_some() {
            return Err(NotAlone::Bundle);
        }
        if !worker.registry.has(&job.class) {
            return Err(NotAlone::UnknownClass(job.class.clone()));
        }
        let policy = policy_of(&worker.policies, &job).map_err(NotAlone::UnknownPolicy)?;
        Ok(Self { worker, store, job, policy })
    }

    /// How the job is locked by a start.
    fn startable(&self, now: Instant) -> Startable {
        let died = Failure::new(failure::WORKER_DIED, "its process died");
        Startable::new(self.job.clone(), self.policy.clone(), None, &died, now)
    }

    /// Executes the job, which begins now, at `server` by the server's clock.
    pub async fn execute(&self, server: Instant, clock: impl Fn() -> Instant + Sync) -> Execution {
        let start = start(clock(), server);
        let alone = Alone { worker: self.worker, store: self.store.as_ref(), clock: &clock };
        let place = Place::Alone(&alone);
        let mut unit = Unit::new(place, self.startable(start.now).started(&start), None, Arc::new(Cancel::default()));
        let ended = unit.execute(place).await;
        Execution { unit, ended, start }
    }
}

impl Execution {
    /// The start by which the execution began, valid from now on: the execution may have taken longer than a start is valid.
    fn start(&self, server: Instant) -> Start {
        Start { lease_until: server + RECORDED_WITHIN, ..self.start.clone() }
    }

    /// The end, as it would be recorded.
    pub fn ran(&self) -> Ran {
        Ran::of(&self.ended.verdict).expect("nothing takes the claim of an execution that has no session")
    }

    /// Locks the job by this start and records the end, guarded by both. `ClaimLost` if something else has started, changed or ended the job
    /// before.
    ///
    /// # Errors
    /// When MongoDB refuses or cannot be reached.
    pub async fn record(&self, store: &Store, session: &mut CommitSession, solo: &Solo<'_>) -> Result<Recorded, StoreError> {
        let start = &self.start(store.now());
        let to_start = solo.startable(start.now).to_start(start.now);
        let to_start = ToStart { conditions: to_start.conditions.early(), ..to_start };
        let claims = store.start_if_unlocked(start, &[to_start]).await?;
        let Some(claim) = claims.first() else { return Ok(Recorded::ClaimLost) };
        let Self { unit, ended, .. } = self;
        let recorded = match end_of(&ended.verdict, &unit.context.job, *claim, (None, notes::at_the_end(&unit.context)), ended.at) {
            Some(JobEnd::Archive(end)) => store.archive(session, &[*end]).await?,
            Some(JobEnd::Reschedule(end)) => store.reschedule_if_claimed(&[*end]).await?,
            None => Vec::new(),
        };
        Ok(recorded.first().copied().unwrap_or(Recorded::ClaimLost))
    }

    /// Calls the hooks.
    pub async fn hooks(&mut self) {
        self.unit.hooks(&self.ended.verdict).await;
    }
}

/// A start by this process, which is in no roster: a cleaner rescues a job that it locks and does not end.
fn start(now: Instant, server: Instant) -> Start {
    let (hostname, pid) = ProcessIdentity::of_this_process().map_or_else(|_| (String::new(), 0), |process| (process.hostname, process.pid));
    Start { id: StartId::new(), worker: WorkerId::new(), hostname, pid, lease_until: server + RECORDED_WITHIN, now }
}

#[cfg(all(test, feature = "process"))]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use recruiter_common::NewJob;
    use tracing_subscriber::{Layer, layer::SubscriberExt as _};

    use super::*;

    /// Counts the spans that have ended.
    struct Ended(Arc<AtomicUsize>);

    impl<S: tracing::Subscriber> Layer<S> for Ended {
        fn on_close(&self, _: tracing::span::Id, _: tracing_subscriber::layer::Context<'_, S>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[tokio::test]
    async fn the_span_of_a_job_ends_with_its_run_or_with_the_verdict_that_opentelemetry_writes_into_it() {
        let ended = Arc::new(AtomicUsize::default());
        let _default = tracing::subscriber::set_default(tracing_subscriber::registry().with(Ended(ended.clone())));
        let worker = Worker::new().register_builtins().expect("classes");
        let (now, at_verdict) = (Instant::UNIX_EPOCH, AtomicUsize::default());
        let job = Arc::new(NewJob::of_class("noop", bson::doc! {}).to_job(now).expect("a job"));
        let solo = Solo::new(&worker, None, job).expect("its class is registered");
        // The clock is read when the workable has returned, and the verdict is about to be made.
        let clock = || {
            at_verdict.store(ended.load(Ordering::Relaxed), Ordering::Relaxed);
            now
        };
        solo.execute(now, clock).await;
        assert_eq!(at_verdict.into_inner(), usize::from(!cfg!(feature = "opentelemetry")));
        assert_eq!(ended.load(Ordering::Relaxed), 1);
    }
}
