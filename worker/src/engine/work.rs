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
    intake::{Intake, Intaken, Startable},
    left::LeftJobs,
    prefetch::Prefetch,
    slots::Slots,
    turn::Turn,
};
use crate::context::Cancel;

/// How long starts follow each other at once when jobs could not be locked. Without MongoDB each of them takes long.
const START_FOR: Duration = Duration::from_secs(1);

/// The jobs of a session, from their assignment on.
pub(crate) struct Work {
    worker: WorkerId,
    environment: Arc<Environment>,
    pub(crate) slots: Slots,
    pub(crate) turn: Turn,
    pub(crate) intake: Intake,
    prefetch: Prefetch,
    /// Since when the worker has been busy, or when its ends were last counted.
    busy_since: Monotonic,
    left: LeftJobs,
    /// Whether the recruiter is to be notified of jobs that were not started.
    has_left_jobs: bool,
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
            environment,
            prefetch: Prefetch::default(),
            busy_since: Monotonic::now(),
            left: LeftJobs::default(),
            has_left_jobs: false,
            returning: Vec::new(),
        }
    }

    /// What this worker offers and holds, as the roster shows it.
    pub(crate) fn free(&self) -> Offer {
        let (slots, prefetched): (u32, Vec<JobId>) = (self.slots.count_free(), self.prefetch.jobs().collect());
        let ahead = u32::try_from(prefetched.len()).unwrap_or(u32::MAX);
        let working_on = self.slots.table().working_on();
        Offer { slots: slots.saturating_sub(ahead), prefetch: self.prefetch.room(slots), prefetched, working_on }
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
        self.leave(&jobs);
        self.start().await;
    }

    /// Starts jobs while slots are free. Jobs that cannot be started, because others have taken them, make room for the next.
    async fn start(&mut self) {
        let began = Monotonic::now();
        while self.start_some().await && began.elapsed() < START_FOR {}
    }

    /// Starts the next jobs, each in its slot. Reports to the roster beside it, if that is due. True if some could not be locked.
    async fn start_some(&mut self) -> bool {
        let next = self.prefetch.next(self.slots.count_free() as usize);
        if next.is_empty() {
            return false;
        }
        let mut was_sent = false;
        let mut jobs: Vec<JobId> = next.iter().map(Startable::id).collect();
        if self.slots.running() == 0 {
            self.busy_since = Monotonic::now();
        }
        if let Some(locked) = self.intake.lock(next, &self.slots).await {
            was_sent = true;
            // Not before the jobs are locked: a recruiter that found this worker free would assign them to another.
            self.slots.table().set_prefetched(self.prefetch.jobs());
            let free = self.free();
            let is_due = self.turn.is_behind();
            let report = async { is_due && self.turn.report_start(&free).await };
            let (Intaken { started, not_started }, is_reported) = tokio::join!(self.intake.confirm(locked), report);
            self.environment.dependencies.watchdog.progress();
            let has_started_all = started.len() == jobs.len();
            for job in started {
                let (environment, cancel) = (self.environment.clone(), Arc::new(Cancel::default()));
                self.slots.run(job.job.id, cancel.clone(), async move {
                    let attempt = Attempt::new(&environment, job, cancel);
                    carry_out(&environment, attempt).await
                });
            }
            self.slots.release(not_started);
            if is_reported && has_started_all {
                self.turn.end(&free).await;
            }
        }
        jobs.retain(|job| !self.slots.is_started(*job));
        self.leave(&jobs);
        was_sent && !jobs.is_empty()
    }

    /// Jobs of an assignment were not started.
    fn leave(&mut self, jobs: &[JobId]) {
        if !jobs.is_empty() {
            self.turn.slots_changed();
            self.has_left_jobs |= self.left.note(jobs, Monotonic::now());
        }
    }

    /// Slots have become free: starts jobs ahead, and asks for more when most of them are started.
    pub(crate) async fn slots_changed(&mut self) {
        let now = Monotonic::now();
        self.prefetch.ended(self.slots.table().take_ended(), self.busy_since, now);
        self.busy_since = now;
        self.start().await;
        if self.prefetch.is_low() {
            self.turn.slots_changed();
        }
    }

    /// Reports the slots to the roster, and to the recruiter which jobs were not started or have waited too long.
    pub(crate) async fn report(&mut self) {
        if let Some(took) = self.turn.round_trip.take() {
            self.prefetch.round_trip(took);
        }
        self.returning.extend(self.prefetch.overdue(Monotonic::now()));
        if !self.returning.is_empty() {
            self.turn.slots_changed();
        }
        if self.turn.is_behind() {
            self.environment.dependencies.watchdog.progress();
            self.slots.table().set_prefetched(self.prefetch.jobs());
            let free = self.free();
            let assignment = self.turn.report(&free).await;
            self.take(assignment).await;
        }
        if !self.turn.is_behind() {
            // Not before the roster is told: until then these jobs count as assigned.
            if !self.returning.is_empty() {
                let jobs = std::mem::take(&mut self.returning);
                tracing::debug!(count = jobs.len(), "returning jobs that were assigned ahead");
                self.environment.dependencies.store.announce_hint(Hint::Returned { worker: self.worker, jobs }).await;
            }
            if std::mem::take(&mut self.has_left_jobs) {
                self.environment.dependencies.store.announce_hint(Hint::NotStarted).await;
            }
        }
    }

    /// Returns every job that was assigned ahead. The roster offers nothing any more.
    pub(crate) async fn return_all(&mut self) {
        let jobs: Vec<JobId> = self.returning.drain(..).chain(self.prefetch.next(usize::MAX).iter().map(Startable::id)).collect();
        self.slots.table().set_prefetched(self.prefetch.jobs());
        if !jobs.is_empty() {
            self.environment.dependencies.store.announce_hint(Hint::Returned { worker: self.worker, jobs }).await;
        }
    }
}
