//! From an assignment to running jobs: takes it, starts its jobs as slots fall free, and reports the slots to the roster.

use std::{
    sync::Arc,
    time::{Duration, Instant as Monotonic},
};

use recruiter_common::{
    ids::{JobId, WorkerId},
    roster::Assignment,
    store::{Hint, Offer, Store},
    telemetry::chain,
};

use super::{
    attempt::{Attempt, carry_out},
    environment::Environment,
    intake::{Intake, StartResult, Startable},
    prefetch::Prefetch,
    skipped::SkippedJobs,
    slots::{Slots, TaskPanicked},
    starts::{Answered, Starts},
    turn::Turn,
};

/// The jobs of a session, from their assignment on.
pub(crate) struct Work {
    worker: WorkerId,
    environment: Arc<Environment>,
    pub(crate) slots: Slots,
    pub(crate) turn: Turn,
    pub(crate) intake: Intake,
    pub(crate) starts: Starts,
    prefetch: Prefetch,
    /// Since when the worker has been busy, or when its ends were last counted.
    busy_since: Monotonic,
    skipped: SkippedJobs,
    /// Whether the recruiter is to be notified of jobs that were not started.
    has_skipped_jobs: bool,
    /// Jobs that were assigned ahead and are to be returned.
    returning: Vec<JobId>,
}

impl Work {
    pub(crate) fn new(worker: WorkerId, environment: Arc<Environment>, slots: Slots) -> Self {
        Self {
            worker,
            slots,
            turn: Turn::new(Store::clone(&environment.dependencies.store), worker),
            intake: Intake::new(environment.clone(), worker),
            starts: Starts::new(environment.clone(), worker),
            environment,
            prefetch: Prefetch::default(),
            busy_since: Monotonic::now(),
            skipped: SkippedJobs::default(),
            has_skipped_jobs: false,
            returning: Vec::new(),
        }
    }

    /// What this worker offers and holds, as the roster shows it. The jobs ahead use the free slots first. Jobs whose start is on its way count
    /// as ahead: until they are locked, the recruiter must not assign them to another worker.
    pub(crate) fn offer(&self) -> Offer {
        let prefetched = self.prefetch.jobs().chain(self.slots.table().reserved()).collect();
        let working_on = self.slots.table().working_on();
        Offer { slots: self.free_slots(), prefetch: self.prefetch.room(self.slots.count_free()), prefetched, working_on }
    }

    /// The free slots that the jobs ahead leave.
    fn free_slots(&self) -> u32 {
        self.slots.count_free().saturating_sub(self.prefetch.count())
    }

    /// When the first job ahead is to be returned.
    pub(crate) fn returns_in(&self) -> Option<Duration> {
        self.prefetch.overdue_at().map(|at| at.saturating_duration_since(Monotonic::now()))
    }

    /// Takes an assignment that was not taken before: reads its jobs, and starts as many as there are free slots.
    pub(crate) async fn take(&mut self, assignment: Option<Assignment>) {
        let Some(Assignment { mut jobs, .. }) = assignment.and_then(|assignment| self.turn.begin(assignment)) else { return };
        jobs.retain(|job| !self.slots.holds(*job) && !self.prefetch.holds(*job));
        self.environment.dependencies.watchdog.progress();
        match self.intake.read(&jobs).await {
            Ok(startable) => {
                let without_room = self.prefetch.add(startable, self.slots.count_free(), Monotonic::now());
                jobs.retain(|job| !without_room.contains(job));
                self.returning.extend(without_room);
            }
            Err(error) => tracing::warn!(count = jobs.len(), error = chain(&error), "failed to read assigned jobs; they stay due"),
        }
        jobs.retain(|job| !self.prefetch.holds(*job));
        self.note_skipped(&jobs);
        self.start();
    }

    /// Sends a start of the next jobs, if slots are free and few starts are on their way.
    fn start(&mut self) {
        if !self.starts.has_room() {
            return;
        }
        let next = self.prefetch.next(self.slots.count_free() as usize);
        if next.is_empty() {
            return;
        }
        if self.slots.running() == 0 && self.starts.is_empty() {
            self.busy_since = Monotonic::now();
        }
        let not_sent = self.starts.send(next, &self.slots);
        self.name_prefetched();
        self.note_skipped(&not_sent);
    }

    /// Runs the jobs that a start has locked. Jobs that it could not lock, because others have taken them, make room for the next.
    pub(crate) async fn run(&mut self, answered: Answered) {
        let StartResult { started, not_run } = self.intake.confirm(answered).await;
        for job in started {
            let environment = self.environment.clone();
            self.slots.run(job.job.id, |cancel| async move {
                let attempt = Attempt::new(&environment, job, cancel);
                carry_out(&environment, attempt).await
            });
        }
        self.slots.release(not_run.iter().copied());
        self.note_skipped(&not_run);
        self.start();
    }

    /// Waits for the answers of all starts on their way, and runs their jobs.
    pub(crate) async fn finish_starts(&mut self) -> Result<(), TaskPanicked> {
        while let Some(answered) = self.starts.next().await {
            self.environment.dependencies.watchdog.progress();
            self.run(answered?).await;
        }
        Ok(())
    }

    /// Waits for the answers of all starts on their way, and runs none of their jobs.
    pub(crate) async fn drop_starts(&mut self) -> Result<(), TaskPanicked> {
        while let Some(answered) = self.starts.next().await {
            let answered = answered?;
            self.intake.drop_start(&answered);
            self.slots.release(answered.startable.into_keys());
        }
        Ok(())
    }

    /// Names the jobs ahead to the heartbeat, which writes into the roster what this worker may have locked.
    fn name_prefetched(&self) {
        self.slots.table().set_prefetched(self.prefetch.jobs());
    }

    /// Jobs of an assignment were not started.
    fn note_skipped(&mut self, jobs: &[JobId]) {
        if !jobs.is_empty() {
            self.turn.mark_outdated();
            self.has_skipped_jobs |= self.skipped.note(jobs, Monotonic::now());
        }
    }

    /// Slots have become free: starts jobs ahead, and asks for more when most of them are started.
    pub(crate) fn slots_changed(&mut self) {
        let now = Monotonic::now();
        self.prefetch.ended(self.slots.table().take_ended(), self.busy_since, now);
        self.busy_since = now;
        self.start();
        if self.prefetch.is_low() && !self.turn.offers(self.free_slots()) {
            self.turn.mark_outdated();
        }
    }

    /// Reports the slots to the roster, and to the recruiter which jobs were not started or have waited too long.
    pub(crate) async fn report(&mut self) {
        if let Some(took) = self.turn.round_trip.take() {
            self.prefetch.round_trip(took);
        }
        self.returning.extend(self.prefetch.overdue(Monotonic::now()));
        if !self.returning.is_empty() {
            self.turn.mark_outdated();
        }
        // A worker without jobs ahead reports after its start: then the report need not name jobs that are about to be locked.
        let waits_for_start = !self.starts.is_empty() && self.prefetch.count() == 0;
        if self.turn.is_outdated() && !waits_for_start {
            self.environment.dependencies.watchdog.progress();
            self.name_prefetched();
            let offer = self.offer();
            let assignment = self.turn.report(&offer).await;
            self.take(assignment).await;
        }
        if !self.turn.is_outdated() {
            // Not before the roster is told: until then these jobs count as assigned.
            if !self.returning.is_empty() {
                let jobs = std::mem::take(&mut self.returning);
                tracing::debug!(count = jobs.len(), "returning jobs that were assigned ahead");
                self.environment.dependencies.store.announce_hint(Hint::Returned { worker: self.worker, jobs }).await;
            }
            if std::mem::take(&mut self.has_skipped_jobs) {
                self.environment.dependencies.store.announce_hint(Hint::NotStarted).await;
            }
        }
    }

    /// Returns every job that was assigned ahead. The roster offers nothing any more.
    pub(crate) async fn return_all(&mut self) {
        let jobs: Vec<JobId> = self.returning.drain(..).chain(self.prefetch.next(usize::MAX).iter().map(Startable::id)).collect();
        self.name_prefetched();
        if !jobs.is_empty() {
            self.environment.dependencies.store.announce_hint(Hint::Returned { worker: self.worker, jobs }).await;
        }
    }
}
