//! Decides which jobs of an answered start are run.
//!
//! Jobs that were locked and are not run are released: unlocked as they were before the start.

use std::collections::HashSet;

use recruiter_common::{
    failure::{self, Failure},
    ids::JobId,
    job::Claim,
    telemetry::chain,
};

use super::{in_flight::Answered, intake::Intake, release::release_unconfirmed};
use crate::engine::held::{Startable, Started};

/// Which jobs of an answered start are run.
pub(crate) struct Confirmed {
    /// Jobs to run.
    pub(crate) started: Vec<(Started, Claim)>,
    /// The other jobs, locked or not. Their slots become free.
    pub(crate) not_run: Vec<JobId>,
}

impl Intake {
    /// Decides which jobs of an answered start are run. Deletes locked jobs that were archived before, archives jobs whose start MongoDB
    /// refused as malformed, and releases the other locked jobs.
    pub(crate) async fn confirm(&mut self, answered: Answered) -> Confirmed {
        if answered.is_fruitless() {
            self.environment.lease.request_heartbeat();
        }
        let Answered { start, mut startable, claims, refused, unanswered, archived, took: _ } = answered;
        for job in refused.iter().filter_map(|id| startable.get(id)).map(Startable::job) {
            self.unstarted.malformed(job.id, &job.document, &Failure::new(failure::MALFORMED, "MongoDB cannot start it"), start.now);
        }
        // This start may still lock jobs without an answer. It locks no other job later.
        let claimed: HashSet<JobId> = claims.iter().map(|claim| claim.job()).collect();
        let mut not_run: HashSet<JobId> = unanswered.into_iter().filter(|id| !claimed.contains(id)).collect();
        let (again, mut claims): (Vec<Claim>, Vec<Claim>) = match &archived {
            Ok(archived) => claims.into_iter().partition(|claim| archived.contains(&claim.job())),
            Err(_) => (Vec::new(), claims),
        };
        not_run.extend(self.discard(&again).await);
        if self.environment.lease.is_over() || archived.is_err() {
            // The answer came too late, or the jobs may have run before.
            not_run.extend(claims.drain(..).map(|claim| claim.job()));
        }
        if !not_run.is_empty() {
            self.environment.held.unconfirm(start.id, not_run, start.lease_until);
            release_unconfirmed(&self.environment, self.worker, start.now).await;
        }
        let started = claims.into_iter().filter_map(|claim| Some((startable.remove(&claim.job())?.started(&start), claim))).collect();
        // They expired between the read and the start. The archival changes nothing if the job is locked.
        let now = self.environment.dependencies.store.now();
        startable.values().map(Startable::job).filter(|job| job.is_expired(now)).for_each(|job| self.unstarted.expired(job, now));
        Confirmed { started, not_run: startable.into_keys().collect() }
    }

    /// Deletes locked jobs that were enqueued again after they had been archived. Returns those that could not be deleted.
    async fn discard(&self, again: &[Claim]) -> Vec<JobId> {
        if again.is_empty() {
            return Vec::new();
        }
        tracing::info!(count = again.len(), "deleting jobs that were enqueued again after they were archived");
        match self.environment.dependencies.store.discard_if_claimed(again).await {
            Ok(_) => Vec::new(),
            Err(error) => {
                tracing::warn!(error = chain(&error), "failed to delete re-enqueued jobs that are already archived");
                again.iter().map(|claim| claim.job()).collect()
            }
        }
    }
}
