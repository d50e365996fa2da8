//! Executes single jobs outside of a session: without a place in the roster, slots, heartbeats and a recorder.
//!
//! Used by the test kit for applications, `recruiter-testing`. The workable, the layers, the policy and the verdict are those of a worker. Nothing cancels
//! such an execution except its time limit.

use std::sync::Arc;

use recruiter_common::{
    failure::{self, Failure},
    ids::{StartId, WorkerId},
    instant::Instant,
    job::{FinishReason, Job},
    roster::ProcessIdentity,
    store::{CommitSession, Recorded, Start, Store, StoreError, ToStart},
};
use tracing::Instrument as _;

use super::{
    attempt::{end_of, span_of},
    continuation, deadline,
    dependencies::{Policy, policy_of},
    ran::Ran,
    recorder::JobEnd,
    snooze,
    startable::Startable,
    verdict::{Verdict, verdict},
};
use crate::{
    Worker,
    cancellation::Cancel,
    context::{Context, NotesCell, RetryAfter},
    deadline::Deadline,
    notes,
    outcome::NotDone,
    panics::guarded,
    registry::{Ready, decode},
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
    job: Arc<Job>,
    verdict: Verdict,
    at: Instant,
    start: Start,
    context: Arc<Context>,
    workable: Option<Arc<dyn Ready>>,
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
    pub async fn execute(&self, server: Instant, clock: impl Fn() -> Instant) -> Execution {
        let start = &start(clock(), server);
        let (job, _, previous) = self.startable(start.now).marked(start);
        let now = clock();
        let asked = self.policy.clone().and_then(|policy| {
            let is_last = guarded(|| policy.is_last_attempt(&job.history(), now))?;
            Ok((policy, is_last))
        });
        let context = Arc::new(Context {
            job: job.clone(),
            store: self.store.clone(),
            start: start.id,
            is_last_attempt: asked.as_ref().is_ok_and(|(_, is_last)| *is_last),
            last_execution: previous,
            item: None,
            deadline: Deadline::default(),
            cancel: Arc::new(Cancel::default()),
            ends: None,
            own_end: Arc::default(),
            notes: NotesCell::default(),
            retry_after: RetryAfter::default(),
        });
        let mut workable = None;
        let span = span_of(&job);
        let (at, verdict) = match asked {
            Err(failure) => (now, Verdict::Archive { why: FinishReason::MALFORMED, failure: Some(failure), result: None }),
            Ok((policy, _)) => {
                let decoded = self.worker.registry.handler(&job.class).and_then(|handler| decode(handler, job.parameters.clone()));
                let ended = match decoded {
                    Ok((ready, limit)) => {
                        workable = Some(ready.clone());
                        let executed = deadline::execute(ready, &context, limit, &self.worker.layers).instrument(span.clone());
                        snooze::capped(executed.await, &job)
                    }
                    Err(failure) => Err(NotDone::Failed(failure)),
                };
                let at = clock();
                let decided = |ended| verdict(&job.history(), policy.as_ref(), ended, context.cancel.why(), at);
                (
                    at,
                    match continuation::prepared(ended, &job, self.store.as_deref(), at).await {
                        Ok(continuation::Ended::Become(jobs)) => Verdict::Become { jobs },
                        Ok(continuation::Ended::Done(done)) => decided(Ok(done)),
                        Err(not_done) => decided(Err(not_done)),
                    },
                )
            }
        };
        let verdict = verdict.put_off(context.retry_after.get(), at);
        #[cfg(feature = "opentelemetry")]
        super::traces::end(span, &verdict);
        Execution { job, verdict, at, start: start.clone(), context, workable }
    }
}

impl Execution {
    /// The start by which the execution began, valid from now on: the execution may have taken longer than a start is valid.
    fn start(&self, server: Instant) -> Start {
        Start { lease_until: server + RECORDED_WITHIN, ..self.start.clone() }
    }

    /// The end, as it would be recorded.
    ///
    /// # Panics
    /// Never: nothing takes the claim of such an execution.
    pub fn ran(&self) -> Ran {
        Ran::of(&self.verdict).expect("nothing takes the claim of an execution that has no session")
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
        let recorded = match end_of(&self.verdict, &self.job, *claim, (None, notes::at_the_end(&self.context)), self.at) {
            Some(JobEnd::Archive(end)) => store.archive(session, &[*end]).await?,
            Some(JobEnd::Reschedule(end)) => store.reschedule_if_claimed(&[*end]).await?,
            None => Vec::new(),
        };
        Ok(recorded.first().copied().unwrap_or(Recorded::ClaimLost))
    }

    /// Calls the hooks.
    pub async fn hooks(&self) {
        if let (Some(workable), Some((failure, last))) = (&self.workable, self.verdict.for_hooks()) {
            workable.after(&self.context, failure, last).await;
        }
    }
}

/// A start by this process, which is in no roster: a cleaner rescues a job that it locks and does not end.
fn start(now: Instant, server: Instant) -> Start {
    let (hostname, pid) = ProcessIdentity::of_this_process().map_or_else(|_| (String::new(), 0), |process| (process.hostname, process.pid));
    Start { id: StartId::new(), worker: WorkerId::new(), hostname, pid, lease_until: server + RECORDED_WITHIN, now }
}
