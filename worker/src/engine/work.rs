//! Takes assignments, starts their jobs as slots become free, runs them, and reports to the roster.
//!
//! Starts do not block the session: up to two are on their way while it reports, reads and receives hints. A worker without jobs ahead
//! reports after its start is answered. A worker with jobs ahead reports beside its starts. The report then names the jobs that are about
//! to be locked among `prefetched`.

use std::{
    sync::Arc,
    time::{Duration, Instant as Monotonic},
};

use recruiter_common::{
    ids::{JobId, WorkerId},
    roster::{self, Assignment, Offered},
    store::{Hint, Offer, Store},
    telemetry::chain,
};

use super::{
    attempt::{self, Attempt},
    class_limits::ClassLimits,
    environment::Environment,
    intake::{Intake, StartResult},
    locked_ahead,
    permits::Permits,
    prefetch::Prefetch,
    skipped::SkippedJobs,
    slots::{Slots, TaskPanicked},
    startable::Startable,
    starts::{Answered, Starts},
    turn::Turn,
};

/// Time after which a report is repeated that must precede a hint about returned jobs.
const RETURN_AGAIN_AFTER: Duration = Duration::from_millis(50);

/// The jobs of a session, from their assignment on.
pub(crate) struct Work {
    worker: WorkerId,
    environment: Arc<Environment>,
    pub(crate) slots: Slots,
    pub(crate) turn: Turn,
    pub(crate) intake: Intake,
    pub(crate) starts: Starts,
    prefetch: Prefetch,
    permits: Permits,
    class_limits: ClassLimits,
    /// When the ended jobs were last counted, or when the worker became busy after that.
    busy_since: Monotonic,
    skipped: SkippedJobs,
    /// Whether the recruiter must be notified of skipped jobs.
    has_skipped_jobs: bool,
    /// Jobs that were assigned ahead, and that the next hint returns.
    returning: Vec<JobId>,
    /// An operator wants this worker to take no jobs. Running jobs continue.
    is_quiet: bool,
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
            permits: Permits::default(),
            class_limits: ClassLimits::default(),
            busy_since: Monotonic::now(),
            skipped: SkippedJobs::default(),
            has_skipped_jobs: false,
            returning: Vec::new(),
            is_quiet: false,
        }
    }

    /// What this worker offers and holds, for the roster. Queued jobs get the free slots first, and only the remaining slots are offered.
    /// Jobs whose start is on its way are listed as prefetched: until they are locked, the recruiter must not assign them to another
    /// worker.
    pub(crate) fn offer(&self) -> Offer {
        let prefetched = self.prefetch.jobs().chain(self.slots.table().reserved()).collect();
        let working_on = self.slots.table().working_on();
        let prefetch = if self.accepts_assignments() { self.prefetch.room(self.slots.count_free()) } else { 0 };
        let Offered { slots, class_slots } = self.offered();
        Offer { slots, class_slots, prefetch, prefetched, held_permits: self.permits.names(), working_on }
    }

    /// How many jobs this worker accepts in free slots, and of the classes that have a limit.
    pub(crate) fn offered(&self) -> Offered {
        let Self { prefetch, slots, class_limits, environment, .. } = self;
        let is_held = |job| prefetch.holds(job) || slots.is_open(job);
        let class_slots = class_limits.slots(&environment.dependencies.registry, is_held);
        Offered { slots: self.free_slots(), class_slots }
    }

    /// Compares the free slots, the permits and the jobs in the roster, as read by a heartbeat, with the actual ones. They differ if MongoDB
    /// has executed a delayed write after a later one. A worker still has a job there whose end was recorded after the last report.
    pub(crate) fn compare(&mut self, assignment: Option<&Assignment>, offered: &Offered, mut held_permits: Vec<String>, has_jobs: bool) {
        if !self.turn.is_comparable(assignment) {
            return;
        }
        let mut names = self.permits.names();
        names.sort_unstable();
        held_permits.sort_unstable();
        let Offer { working_on, .. } = self.offer();
        if *offered != self.offered() || names != held_permits || (has_jobs && working_on.is_empty()) {
            self.turn.mark_outdated();
        }
    }

    /// Removes the jobs beyond the limits of their classes. Returns their ids.
    fn admit(&mut self, startable: &mut Vec<Startable>) -> Vec<JobId> {
        let Self { prefetch, slots, class_limits, environment, .. } = self;
        let is_held = |job| prefetch.holds(job) || slots.is_open(job);
        class_limits.admit(startable, &environment.dependencies.registry, is_held)
    }

    /// The free slots that remain after the queued jobs. A quiet worker has none, nor has a process whose slots are for own jobs.
    fn free_slots(&self) -> u32 {
        if !self.accepts_assignments() {
            return 0;
        }
        self.slots.count_free().saturating_sub(self.slots.locked_ahead()).saturating_sub(self.prefetch.count())
    }

    fn accepts_assignments(&self) -> bool {
        !self.is_quiet && self.environment.dependencies.own.is_none()
    }

    /// The time until the first queued job or permit must be returned, or until the report that precedes a return is repeated.
    pub(crate) fn returns_in(&self) -> Option<Duration> {
        if !self.returning.is_empty() {
            return Some(RETURN_AGAIN_AFTER);
        }
        let at = self.prefetch.overdue_at().into_iter().chain(self.permits.return_at()).min();
        at.map(|at| at.saturating_duration_since(Monotonic::now()))
    }

    /// Takes an assignment that was not taken before: reads its jobs, queues them, and starts as many as there are free slots.
    pub(crate) async fn take(&mut self, assignment: Option<Assignment>) {
        let Some(Assignment { mut jobs, permits, .. }) = assignment.and_then(|assignment| self.turn.begin(assignment)) else { return };
        jobs.retain(|job| !self.slots.holds(*job) && !self.prefetch.holds(*job));
        let granted: Vec<JobId> = permits.iter().filter(|(_, permit)| !permit.names.is_empty()).map(|(job, _)| *job).collect();
        if self.is_quiet {
            // They were assigned before the recruiter could know.
            self.returning.extend(jobs);
            self.turn.returns_permits |= !granted.is_empty();
            return;
        }
        self.environment.dependencies.watchdog.progress();
        match self.intake.read(&jobs, permits).await {
            Ok(mut startable) => {
                let mut without_room = self.admit(&mut startable);
                startable.iter().for_each(|job| self.permits.grant(job));
                without_room.extend(self.prefetch.add(startable, self.slots.count_free(), Monotonic::now()));
                jobs.retain(|job| !without_room.contains(job));
                self.returning.extend(without_room);
            }
            Err(error) => tracing::warn!(count = jobs.len(), error = chain(&error), "failed to read assigned jobs; they stay due"),
        }
        jobs.retain(|job| !self.prefetch.holds(*job));
        self.note_skipped(&jobs);
        self.turn.returns_permits |= granted.iter().any(|job| !self.prefetch.holds(*job));
        self.start();
        let Self { prefetch, permits, .. } = self;
        self.returning.extend(prefetch.without_permits(|lane| permits.has_any(lane)));
    }

    /// Takes own jobs: reads them, reports them to the roster, and starts as many as there are free slots. Those that are not queued stay in
    /// MongoDB, for the workers.
    pub(crate) async fn take_own(&mut self, jobs: &[JobId]) {
        let now = self.environment.dependencies.store.now();
        let wanted = if self.is_quiet { &[] } else { jobs };
        match self.intake.read(wanted, roster::Permits::default()).await {
            Ok(mut startable) => {
                // The others are for the workers.
                self.admit(&mut startable);
                let own = self.environment.dependencies.own.as_ref();
                let unchanged = startable.into_iter().filter(|job| own.is_some_and(|own| own.is_unchanged(job.job())));
                let startable = unchanged.map(|job| job.early(now)).collect();
                self.prefetch.add(startable, self.slots.count_free(), Monotonic::now());
            }
            Err(error) => tracing::warn!(count = jobs.len(), error = chain(&error), "failed to read own jobs; they are for the workers"),
        }
        self.give_up(jobs.iter().filter(|job| !self.prefetch.holds(**job)));
        self.name_prefetched();
        let offer = self.offer();
        // The recruiter assigns nothing to this process.
        let _none = self.turn.report(&offer).await;
        self.environment.dependencies.watchdog.progress();
        self.start();
    }

    /// Answers the callers of own jobs that are not run.
    fn give_up<'a>(&self, jobs: impl IntoIterator<Item = &'a JobId>) {
        if let Some(own) = &self.environment.dependencies.own {
            own.give_up(jobs);
        }
    }

    /// Sends a start of the next jobs, if fewer than two starts are on their way. Slots must be free, or half of the jobs that were locked
    /// ahead must have got one.
    fn start(&mut self) {
        self.pass_permits();
        if !self.starts.has_room() {
            return;
        }
        let (free, locked, to_lock) = (self.slots.count_free(), self.slots.locked_ahead(), self.to_lock_ahead());
        if free <= locked && locked > to_lock / 2 {
            return;
        }
        let next = self.prefetch.next(free.saturating_sub(locked) as usize, to_lock.saturating_sub(locked.saturating_sub(free)) as usize);
        if next.jobs.is_empty() && next.ahead.is_empty() {
            return;
        }
        if self.slots.running() == 0 && self.starts.is_empty() {
            self.busy_since = Monotonic::now();
        }
        let not_sent = self.starts.send(next, &self.slots);
        self.name_prefetched();
        self.give_up(&not_sent);
        self.note_skipped(&not_sent);
    }

    /// Frees the permits of jobs that have returned, and passes them on to jobs that wait for them.
    fn pass_permits(&mut self) {
        if self.permits.is_empty() {
            return;
        }
        let Self { permits, prefetch, slots, .. } = self;
        permits.free(|job, lane| prefetch.holds(job) || slots.needs_permit(job, lane), Monotonic::now());
        permits.pass_on(|lane, names| prefetch.give_permits(lane, names));
    }

    /// How many jobs are locked before a slot is free. Own jobs are not.
    fn to_lock_ahead(&self) -> u32 {
        if self.accepts_assignments() { self.prefetch.to_lock_ahead() } else { 0 }
    }

    /// Runs the jobs that a start has locked. Frees the slots of the others, and starts further jobs in them.
    pub(crate) async fn run(&mut self, answered: Answered) {
        self.prefetch.start_took(answered.took);
        let StartResult { started, not_run } = self.intake.confirm(answered).await;
        for job in started {
            if let Some(own) = &self.environment.dependencies.own {
                own.note_entered(job.job.id);
            }
            let environment = self.environment.clone();
            self.slots.run(job.job.id, |cancel, slot| async move {
                match slot {
                    Some(slot) => locked_ahead::run(&environment, job, cancel, slot).await,
                    None => attempt::run(&environment, Attempt::new(&environment, job, cancel)).await,
                }
            });
        }
        self.slots.release(not_run.iter().copied());
        self.slots.table().fill_slots();
        self.give_up(&not_run);
        self.note_skipped(&not_run);
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
            self.intake.drop_start(&answered);
            self.slots.release(answered.startable.into_keys());
        }
        Ok(())
    }

    /// Copies the ids of the queued jobs into the table. Reports and heartbeats write them into the roster.
    fn name_prefetched(&self) {
        self.slots.table().set_prefetched(self.prefetch.jobs());
    }

    /// Notes assigned jobs that this worker does not run.
    fn note_skipped(&mut self, jobs: &[JobId]) {
        if !jobs.is_empty() {
            self.turn.mark_outdated();
            self.has_skipped_jobs |= self.skipped.note(jobs, Monotonic::now());
        }
    }

    /// Starts queued jobs in slots that have become free. Marks the roster as outdated once two thirds of the jobs ahead are started.
    pub(crate) fn slots_changed(&mut self) {
        let now = Monotonic::now();
        self.slots.table().fill_slots();
        let unlocked = self.slots.table().take_unlocked();
        if !unlocked.is_empty() {
            // In the recruiter's view the worker still holds them.
            self.returning.extend(unlocked);
            self.prefetch.stall();
        }
        self.prefetch.ended(self.slots.table().take_ended(), self.busy_since, now);
        self.busy_since = now;
        self.start();
        self.note_free_slots();
    }

    /// Marks the roster as outdated if this worker needs jobs and the recruiter does not know so.
    fn note_free_slots(&mut self) {
        if (self.prefetch.is_low() || self.free_slots() > 0) && !self.turn.offers(&self.offered()) {
            self.turn.mark_outdated();
        }
    }

    /// Reports to the roster if it is outdated. Then sends hints about jobs that were skipped or have waited too long.
    pub(crate) async fn report(&mut self) {
        if let Some(took) = self.turn.round_trip.take() {
            self.prefetch.round_trip(took);
        }
        self.returning.extend(self.prefetch.overdue(Monotonic::now()));
        if !self.returning.is_empty() {
            self.turn.mark_outdated();
        }
        self.pass_permits();
        let returns_permits = self.permits.drop_free(false, Monotonic::now());
        self.turn.returns_permits |= returns_permits;
        // Without jobs ahead, the report waits for the start. One report then follows the start, instead of one before and one after it.
        // Jobs and permits for other workers do not wait.
        let is_urgent = !self.returning.is_empty() || self.has_skipped_jobs || self.turn.returns_permits;
        let waits_for_start = !self.starts.is_empty() && self.prefetch.count_all() == 0 && !is_urgent;
        if (self.turn.is_outdated() || self.turn.returns_permits) && !waits_for_start {
            self.environment.dependencies.watchdog.progress();
            self.name_prefetched();
            let offer = self.offer();
            let assignment = self.turn.report(&offer).await;
            self.take(assignment).await;
        }
        if !self.turn.is_outdated() {
            // Only after the report: until then these jobs count as assigned to this worker.
            if !self.returning.is_empty() {
                let jobs = std::mem::take(&mut self.returning);
                self.give_up(&jobs);
                tracing::debug!(count = jobs.len(), "returning jobs that were assigned ahead");
                self.environment.dependencies.store.announce_hint(Hint::Returned { worker: self.worker, jobs }).await;
            }
            if std::mem::take(&mut self.has_skipped_jobs) {
                self.environment.dependencies.store.announce_hint(Hint::NotStarted).await;
            }
        }
    }

    /// Returns every queued job with the next report, because a pause covers some of them. Releases the jobs that are locked ahead.
    pub(crate) fn recall(&mut self) {
        self.slots.table().recall();
        self.returning.extend(self.prefetch.clear());
        self.name_prefetched();
    }

    /// Sets whether this worker takes jobs. A quiet worker offers nothing and returns its queued jobs. Starts on their way continue.
    pub(crate) fn set_quiet(&mut self, is_quiet: bool) {
        if self.is_quiet != is_quiet {
            self.is_quiet = is_quiet;
            self.turn.mark_outdated();
            if is_quiet {
                self.recall();
            }
        }
    }

    /// Returns every queued job, and releases the jobs that are locked ahead. The caller has withdrawn the offer before.
    pub(crate) async fn return_all(&mut self) {
        self.slots.table().recall();
        let jobs: Vec<JobId> = self.returning.drain(..).chain(self.prefetch.clear()).collect();
        self.name_prefetched();
        self.give_up(&jobs);
        if !jobs.is_empty() {
            self.environment.dependencies.store.announce_hint(Hint::Returned { worker: self.worker, jobs }).await;
        }
    }

    /// Returns the permits that no job needs any more, while this worker ends: no report returns them.
    pub(crate) async fn return_permits(&mut self) {
        let Self { permits, slots, .. } = self;
        permits.free(|job, lane| slots.needs_permit(job, lane), Monotonic::now());
        if permits.drop_free(true, Monotonic::now()) {
            let store = &self.environment.dependencies.store;
            match store.hold_permits(self.worker, &self.permits.names()).await {
                Ok(()) => store.announce_hint(Hint::Left { worker: self.worker }).await,
                Err(error) => tracing::debug!(error = chain(&error), "failed to return permits; they are free when this worker has left"),
            }
        }
    }
}
