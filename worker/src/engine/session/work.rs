//! The jobs of a session: takes assignments, starts their jobs as slots become free, and runs them.
//!
//! Starts do not block the session: up to two are on their way while it reports, reads and receives hints. A worker without jobs ahead
//! reports after its start is answered. A worker with jobs ahead reports beside its starts. The report then names the jobs that are about
//! to be locked among `prefetched`.

use std::{sync::Arc, time::Instant as Monotonic};

use recruiter_common::{
    ids::{JobId, WorkerId},
    store::{Assignment, Permits, Store},
    telemetry::chain,
};

use crate::engine::{
    environment::Environment,
    run::{
        locked_ahead,
        tasks::{TaskPanicked, Tasks},
    },
    starts::{Answered, Confirmed, InFlight, Intake, SkippedJobs},
    turn::Turn,
};

/// The jobs of a session, from their assignment on.
pub(crate) struct Work {
    pub(super) worker: WorkerId,
    pub(super) environment: Arc<Environment>,
    pub(crate) tasks: Tasks,
    pub(crate) turn: Turn,
    pub(crate) intake: Intake,
    pub(crate) starts: InFlight,
    skipped: SkippedJobs,
    /// Whether the recruiter must be notified of skipped jobs.
    pub(super) has_skipped_jobs: bool,
    /// Jobs that were assigned ahead, and that the next hint returns.
    pub(super) returning: Vec<JobId>,
    /// An operator wants this worker to take no jobs. Running jobs continue.
    is_quiet: bool,
}

impl Work {
    pub(crate) fn new(worker: WorkerId, environment: Arc<Environment>) -> Self {
        let dependencies = &environment.dependencies;
        Self {
            worker,
            tasks: Tasks::new(environment.held.clone(), dependencies.registry.threads.clone()),
            turn: Turn::new(Store::clone(&dependencies.store), worker),
            intake: Intake::new(environment.clone(), worker),
            starts: InFlight::new(environment.clone(), worker),
            environment,
            skipped: SkippedJobs::default(),
            has_skipped_jobs: false,
            returning: Vec::new(),
            is_quiet: false,
        }
    }

    /// Whether the recruiter may assign jobs: not to a quiet worker, nor to a process whose slots are for own jobs, nor to a worker whose
    /// lease is over. It would refuse them, and the recruiter would assign them again at once.
    pub(super) fn is_accepting(&self) -> bool {
        !self.is_quiet && !self.environment.lease.has_lapsed() && self.environment.dependencies.source.is_roster()
    }

    /// Takes an assignment that was not taken before: reads its jobs, queues them, and starts as many as there are free slots.
    pub(crate) async fn take(&mut self, assignment: Option<Assignment>) {
        let Some(Assignment { mut jobs, permits, .. }) = assignment.and_then(|assignment| self.turn.begin(assignment)) else { return };
        let held = self.environment.held.clone();
        jobs.retain(|job| !held.holds(*job));
        let granted: Vec<JobId> = permits.iter().filter(|(_, permit)| !permit.names.is_empty()).map(|(job, _)| *job).collect();
        if self.is_quiet {
            // They were assigned before the recruiter could know.
            self.returning.extend(jobs);
            self.turn.returns_permits |= !granted.is_empty();
            return;
        }
        // A job that is held already, such as one whose hooks still run, needs no permit yet.
        self.turn.returns_permits |= granted.iter().any(|job| held.holds(*job));
        self.environment.dependencies.watchdog.progress();
        let without_room = self.queue(&jobs, permits).await;
        jobs.retain(|job| !without_room.contains(job) && !held.holds(*job));
        self.returning.extend(without_room);
        self.note_skipped(&jobs);
        self.turn.returns_permits |= granted.iter().any(|job| !held.holds(*job));
        self.start();
        self.returning.extend(held.remove_stranded());
    }

    /// Takes own jobs: reads them, reports them to the roster, and starts as many as there are free slots. Those that are not queued stay in
    /// MongoDB, for the workers.
    pub(crate) async fn take_own(&mut self, jobs: &[JobId]) {
        if !self.is_quiet {
            self.queue(jobs, Permits::default()).await;
        }
        let Environment { dependencies, held, .. } = &*self.environment;
        dependencies.source.give_up(jobs.iter().filter(|job| !held.holds(**job)));
        // The recruiter assigns nothing to this process.
        let _none = self.turn.report(&held.offer(self.is_accepting())).await;
        dependencies.watchdog.progress();
        self.start();
    }

    /// Reads assigned jobs and queues those that this worker can start. Returns those that it has no room for.
    async fn queue(&mut self, jobs: &[JobId], permits: Permits) -> Vec<JobId> {
        match self.intake.read(jobs, permits).await {
            Ok(startable) => self.environment.held.queue(startable, Monotonic::now()),
            Err(error) => {
                tracing::warn!(count = jobs.len(), error = chain(&error), "failed to read assigned jobs; they stay due");
                Vec::new()
            }
        }
    }

    /// Sends a start of the next jobs, if fewer than two starts are on their way.
    fn start(&mut self) {
        if !self.starts.has_room() {
            return;
        }
        let next = self.environment.held.next(self.is_accepting(), Monotonic::now());
        if !next.is_empty() {
            let not_sent = self.starts.send(next);
            self.skip(&not_sent);
        }
    }

    /// Runs the jobs that a start has locked. Frees the slots of the others, and starts further jobs in them.
    pub(crate) async fn run(&mut self, answered: Answered) {
        self.environment.held.note_start_took(answered.took);
        let Confirmed { started, not_run } = self.intake.confirm(answered).await;
        for (started, claim) in started {
            let environment = self.environment.clone();
            environment.dependencies.source.own().inspect(|own| own.note_entered(claim.job()));
            self.tasks.run(claim.job(), |filled| async move { locked_ahead::run(&environment, started, claim, filled).await });
        }
        self.environment.held.remove(&not_run);
        self.skip(&not_run);
        self.start();
        self.note_free_slots();
    }

    /// Waits for the answers of all starts on their way, and runs their jobs.
    pub(crate) async fn finish_starts(&mut self) -> Result<(), TaskPanicked> {
        while let Some(answered) = self.starts.next().await {
            self.environment.dependencies.watchdog.progress();
            self.run(answered?).await;
        }
        Ok(())
    }

    /// Waits for the answers of all starts on their way. Their jobs are not run, and are released later.
    pub(crate) async fn drop_starts(&mut self) -> Result<(), TaskPanicked> {
        while let Some(answered) = self.starts.next().await {
            let answered = answered?;
            let held = &self.environment.held;
            held.unconfirm(answered.start.id, answered.may_be_locked(), answered.start.lease_until);
            held.remove(&answered.startable.into_keys().collect::<Vec<_>>());
        }
        Ok(())
    }

    /// Notes jobs that were to be started and are not run here.
    fn skip(&mut self, jobs: &[JobId]) {
        self.environment.dependencies.source.give_up(jobs);
        self.note_skipped(jobs);
    }

    /// Notes assigned jobs that this worker does not run.
    fn note_skipped(&mut self, jobs: &[JobId]) {
        if !jobs.is_empty() {
            self.turn.is_outdated = true;
            self.has_skipped_jobs |= self.skipped.note(jobs, Monotonic::now());
        }
    }

    /// Starts queued jobs in slots that have become free. Marks the roster as outdated once two thirds of the jobs ahead are started.
    pub(crate) fn slots_changed(&mut self) {
        self.returning.extend(self.tasks.take_unlocked());
        self.environment.held.slots_changed(Monotonic::now());
        self.start();
        self.note_free_slots();
    }

    /// Offers as many slots as clients wait now.
    pub(crate) fn clients_changed(&mut self) {
        self.slots_changed();
        self.turn.is_outdated |= !self.turn.offers(&self.environment.held.offered(self.is_accepting()));
    }

    /// Marks the roster as outdated if this worker needs jobs and the recruiter does not know so.
    fn note_free_slots(&mut self) {
        if self.environment.held.wanted(self.is_accepting()).is_some_and(|offered| !self.turn.offers(&offered)) {
            self.turn.is_outdated = true;
        }
    }

    /// Returns every queued job with the next report, because a pause covers some of them. Releases the jobs that are locked ahead.
    pub(crate) fn recall(&mut self) {
        self.returning.extend(self.environment.held.recall());
    }

    /// Sets whether this worker takes jobs. A quiet worker offers nothing and returns its queued jobs. Starts on their way continue.
    pub(crate) fn set_quiet(&mut self, is_quiet: bool) {
        if self.is_quiet != is_quiet {
            self.is_quiet = is_quiet;
            self.turn.is_outdated = true;
            if is_quiet {
                self.recall();
            }
        }
    }
}
