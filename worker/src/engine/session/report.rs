//! What a session reports to the roster, and when: free slots, held jobs and permits, and the jobs that it returns.

use std::time::{Duration, Instant as Monotonic};

use recruiter_common::{
    store::{Assignment, Hint, Offer, Offered},
    telemetry::chain,
};

use super::work::Work;

/// Time after which a report is repeated that must precede a hint about returned jobs.
const RETURN_AGAIN_AFTER: Duration = Duration::from_millis(50);

impl Work {
    /// What this worker offers and holds.
    pub(crate) fn offer(&self) -> Offer {
        self.environment.held.offer(self.is_accepting())
    }

    /// Compares the free slots, the permits and the jobs in the roster, as read by a heartbeat, with the actual ones. They differ if MongoDB
    /// has executed a delayed write after a later one. A worker still has a job there whose end was recorded after the last report.
    pub(crate) fn compare(&mut self, assignment: Option<&Assignment>, offered: &Offered, mut held_permits: Vec<String>, has_jobs: bool) {
        if !self.turn.is_comparable(assignment) {
            return;
        }
        let Offer { slots, class_slots, held_permits: mut names, working_on, .. } = self.offer();
        names.sort_unstable();
        held_permits.sort_unstable();
        if *offered != (Offered { slots, class_slots }) || names != held_permits || (has_jobs && working_on.is_empty()) {
            self.turn.is_outdated = true;
        }
    }

    /// The time until the first queued job or permit must be returned, or until the report that precedes a return is repeated.
    pub(crate) fn returns_in(&self) -> Option<Duration> {
        if self.returning.is_empty() { self.environment.held.returns_in() } else { Some(RETURN_AGAIN_AFTER) }
    }

    /// Reports to the roster if it is outdated. Then sends hints about jobs that were skipped or have waited too long.
    pub(crate) async fn report(&mut self) {
        let held = self.environment.held.clone();
        if let Some(took) = self.turn.round_trip.take() {
            held.note_round_trip(took);
        }
        let now = Monotonic::now();
        self.returning.extend(held.remove_overdue(now));
        if !self.returning.is_empty() {
            self.turn.is_outdated = true;
        }
        self.turn.returns_permits |= held.drop_permits(false, now);
        // Without jobs ahead, the report waits for the start. One report then follows the start, instead of one before and one after it.
        // Jobs and permits for other workers do not wait.
        let is_urgent = !self.returning.is_empty() || self.has_skipped_jobs || self.turn.returns_permits;
        let waits_for_start = !self.starts.is_empty() && !held.has_queued() && !is_urgent;
        if (self.turn.is_outdated || self.turn.returns_permits) && !waits_for_start {
            self.environment.dependencies.watchdog.progress();
            let offer = self.offer();
            let assignment = self.turn.report(&offer).await;
            self.take(assignment).await;
        }
        if !self.turn.is_outdated {
            // Only after the report: until then these jobs count as assigned to this worker.
            if !self.returning.is_empty() {
                let jobs = std::mem::take(&mut self.returning);
                self.environment.dependencies.source.give_up(&jobs);
                tracing::debug!(count = jobs.len(), "returning jobs that were assigned ahead");
                self.environment.dependencies.store.announce_hint(Hint::Returned { worker: self.worker, jobs }).await;
            }
            if std::mem::take(&mut self.has_skipped_jobs) {
                self.environment.dependencies.store.announce_hint(Hint::NotStarted).await;
            }
        }
    }

    /// Returns every queued job, and releases the jobs that are locked ahead. The caller has withdrawn the offer before.
    pub(crate) async fn return_all(&mut self) {
        self.recall();
        let jobs = std::mem::take(&mut self.returning);
        self.environment.dependencies.source.give_up(&jobs);
        if !jobs.is_empty() {
            self.environment.dependencies.store.announce_hint(Hint::Returned { worker: self.worker, jobs }).await;
        }
    }

    /// Returns the permits that no job needs any more, while this worker ends: no report returns them.
    pub(crate) async fn return_permits(&mut self) {
        if self.environment.held.drop_permits(true, Monotonic::now()) {
            let store = &self.environment.dependencies.store;
            match store.hold_permits(self.worker, &self.environment.held.permit_names()).await {
                Ok(()) => store.announce_hint(Hint::Left { worker: self.worker }).await,
                Err(error) => tracing::debug!(error = chain(&error), "failed to return permits; they are free when this worker has left"),
            }
        }
    }
}
