//! Unconfirmed starts: starts of this session that have locked jobs, or may still lock them, and whose jobs the session does not run.
//!
//! A start is unconfirmed if its reply was lost or arrived after the end of the lease, or if the archive could not be read. Its jobs are
//! released: unlocked as they were before the start. A start whose reply was lost may lock its jobs later. Therefore the session searches
//! for them until 30 s after the end of the start's lease.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use recruiter_common::{
    ids::{JobId, StartId, WorkerId},
    instant::Instant,
    job::{Claim, Held},
    store::{Archival, CommitSession, Recorded, Rescheduling, StoreError},
    telemetry::chain,
};

use super::dependencies::Dependencies;

/// How long after the end of its lease the jobs of a start are searched. A start that began in time may finish late.
const SEARCHED_FOR: Duration = Duration::from_secs(30);
/// Number of jobs that are released in one step. The whole jobs are in memory then.
const STEP: usize = 50;

/// The unconfirmed starts of a session. Only ids are kept, since jobs may be large.
pub(crate) struct UnconfirmedStarts {
    dependencies: Arc<Dependencies>,
    worker: WorkerId,
    starts: HashMap<StartId, Unconfirmed>,
    /// Whether jobs that these starts have locked are not released yet, or may not be.
    has_unreleased: bool,
}

struct Unconfirmed {
    jobs: HashSet<JobId>,
    /// By the server's clock: MongoDB refuses the start if it begins after this date. A start that began earlier may still finish.
    until: Instant,
}

impl UnconfirmedStarts {
    pub(crate) fn new(dependencies: Arc<Dependencies>, worker: WorkerId) -> Self {
        Self { dependencies, worker, starts: HashMap::new(), has_unreleased: false }
    }

    /// Adds a start that may begin until `until`, with the jobs that are not run.
    pub(crate) fn add(&mut self, start: StartId, jobs: HashSet<JobId>, until: Instant) {
        self.starts.insert(start, Unconfirmed { jobs, until });
    }

    /// The jobs that may be locked at `now` or later.
    pub(crate) fn jobs(&self, now: Instant) -> impl Iterator<Item = JobId> {
        self.starts.values().filter(move |start| self.has_unreleased || start.until > now).flat_map(|start| start.jobs.iter().copied())
    }

    /// Releases the jobs that these starts have locked by now, and removes the starts that can no longer lock jobs.
    pub(crate) async fn release(&mut self, now: Instant) {
        self.has_unreleased = true;
        match self.release_locked().await {
            Ok(has_unreleased) => {
                self.has_unreleased = has_unreleased;
                self.starts.retain(|_, start| !start.jobs.is_empty() && (has_unreleased || now <= start.until + SEARCHED_FOR));
            }
            Err(error) => {
                let count = self.starts.values().map(|start| start.jobs.len()).sum::<usize>();
                tracing::warn!(
                    count,
                    error = chain(&error),
                    "failed to release jobs that were locked and not run; the next heartbeat repeats it"
                );
            }
        }
    }

    /// Releases the locked jobs. Returns whether MongoDB refused to release some of them.
    async fn release_locked(&mut self) -> Result<bool, StoreError> {
        let store = self.dependencies.store.clone();
        let asked = self.starts.iter().map(|(start, Unconfirmed { jobs, .. })| (*start, jobs.iter().copied().collect()));
        let claims = store.claims_of_starts_at_majority(&asked.collect()).await?;
        let mut has_unreleased = false;
        for claims in claims.chunks(STEP) {
            self.dependencies.watchdog.progress();
            let jobs: Vec<JobId> = claims.iter().map(|claim| claim.job()).collect();
            let (mut released, mut damaged) = (Vec::new(), Vec::new());
            for Held { holder, claim, job } in store.held_by(self.worker, &jobs).await? {
                match job {
                    _ if !claims.contains(&claim) => {}
                    Ok(job) => released.push(Rescheduling::release(&job, claim)),
                    Err((document, error)) => damaged.push(Archival::undecodable(claim, holder, &document, &error, store.now())),
                }
            }
            let mut session = CommitSession::default();
            let mut recorded = store.finish(&mut session, &released).await?;
            recorded.extend(store.finish(&mut session, &damaged).await?);
            tracing::info!(count = recorded.len(), "released jobs that were locked and not run");
            if recorded.contains(&Recorded::Refused) {
                has_unreleased = true;
            } else {
                claims.iter().for_each(|claim| self.forget(*claim));
            }
        }
        Ok(has_unreleased)
    }

    fn forget(&mut self, claim: Claim) {
        if let Some(start) = self.starts.get_mut(&claim.start()) {
            start.jobs.remove(&claim.job());
        }
    }
}
