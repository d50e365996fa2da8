//! Decides which assigned jobs can be started. The others stay due, or are archived.

use std::{collections::HashSet, sync::Arc};

use recruiter_common::{
    failure::{self, Failure},
    ids::{JobId, WorkerId},
    instant::Instant,
    store::{Permits, StoreError, WorkOn},
};

use super::{
    reading::{Reading, Unlocked},
    unstarted::Unstarted,
};
use crate::engine::{
    dependencies::{Dependencies, policy_of},
    environment::Environment,
    held::Startable,
    source::Source,
};

/// Maximum number of unknown retry policies in memory. Each of them is logged once.
const UNKNOWN_POLICIES: usize = 100;

/// Turns assignments into started jobs.
pub(crate) struct Intake {
    pub(super) environment: Arc<Environment>,
    pub(super) worker: WorkerId,
    work_on: WorkOn,
    reading: Reading,
    pub(super) unstarted: Unstarted,
    /// Classes of retry policies of jobs that this worker does not know.
    unknown_policies: HashSet<String>,
    /// The last place that a job of an assignment has got.
    last_place: Instant,
}

impl Intake {
    pub(crate) fn new(environment: Arc<Environment>, worker: WorkerId) -> Self {
        let (work_on, reading) = (environment.dependencies.config.work_on(), Reading::new(environment.dependencies.clone()));
        let unstarted = Unstarted::new(environment.recorder.clone());
        Self { environment, worker, work_on, reading, unstarted, unknown_policies: HashSet::new(), last_place: Instant::UNIX_EPOCH }
    }

    /// Reads those of these jobs that this worker can start. The others stay due.
    pub(crate) async fn read(&mut self, jobs: &[JobId], permits: Permits) -> Result<Vec<Startable>, StoreError> {
        if jobs.is_empty() {
            return Ok(Vec::new());
        }
        let now = self.dependencies().store.now();
        let unlocked = self.reading.unlocked(jobs).await?;
        self.dependencies().watchdog.progress();
        Ok(self.startable(jobs, unlocked, permits, now))
    }

    /// The jobs whose class, group and retry policy this worker serves, in the order of the assignment. A document that is not a job is archived.
    fn startable(&mut self, jobs: &[JobId], unlocked: Vec<Unlocked>, mut permits: Permits, now: Instant) -> Vec<Startable> {
        let mut startable = Vec::with_capacity(unlocked.len());
        let died = Failure::new(failure::WORKER_DIED, "the worker died");
        for found in unlocked {
            match found {
                Ok(job) if job.is_expired(now) => self.unstarted.expired(&job, now),
                // A recruiter of an earlier release gives no permit, and the job may have been replaced since it was assigned.
                Ok(job)
                    if !permits
                        .get(&job.id)
                        .map_or(job.gate.is_none(), |permit| permit.is_for(job.settings.group(), job.gate.as_deref())) =>
                {
                    tracing::debug!(job.id = %job.id, "the job was assigned without a permit for its limits; skipping it")
                }
                Ok(job) if self.dependencies().registry.has(&job.class) && self.work_on.includes(job.settings.group()) => {
                    match policy_of(&self.dependencies().policies, &job) {
                        Ok(policy) => {
                            let permit = permits.remove(&job.id);
                            startable.push(Startable::new(job, policy, permit, &died, now));
                        }
                        Err(unknown) => self.skip_unknown_policy(job.id, unknown),
                    }
                }
                Ok(job) => tracing::debug!(job.id = %job.id, "this worker does not serve the job; skipping it"),
                Err((id, document, error)) => {
                    self.unstarted.malformed(id, &document, &Failure::new(failure::MALFORMED, error.to_string()), now)
                }
            }
        }
        match &self.dependencies().source {
            Source::Roster | Source::Clients(_) => {
                Startable::keep_order(&mut startable, jobs, &mut self.last_place);
                startable
            }
            // The others are for the workers.
            Source::Own(own) => startable.into_iter().filter(|job| own.is_unchanged(job.job())).map(|job| job.early(now)).collect(),
        }
    }

    /// Skips a job whose retry policy this worker does not know. A worker of a newer release, or with custom policies, can run it.
    fn skip_unknown_policy(&mut self, job: JobId, class: String) {
        tracing::debug!(job.id = %job, policy = class, "this worker does not serve the job; skipping it");
        if self.unknown_policies.len() < UNKNOWN_POLICIES && !self.unknown_policies.contains(&class) {
            tracing::warn!(job.id = %job, policy = class, "this worker does not know the retry policy of a job; other workers must run such jobs");
            self.unknown_policies.insert(class);
        }
    }

    fn dependencies(&self) -> &Dependencies {
        &self.environment.dependencies
    }
}
