//! A session: one registration of this worker in the roster. Its loop handles hints, heartbeats, answered starts and ended jobs.
//!
//! Only this task writes the worker's reports into the roster document. A restart, or a return after the worker was
//! declared dead, is another session with another worker id.

use std::{
    sync::Arc,
    time::{Duration, Instant as Monotonic},
};

use recruiter_common::{
    ids::{JobId, WorkerId},
    roster::{Assignment, WorkOn},
    shutdown::{Shutdown, pause},
    store::{CommitSession, Hint, Hints, Listener, Registration, Store, StoreError},
    telemetry::chain,
    workers::{Request, Wanted},
};
use tokio::{sync::mpsc, task::JoinHandle};

use super::{
    dependencies::Dependencies,
    environment::Environment,
    heartbeat::{Heartbeat, News},
    leader::Leader,
    lease::Lease,
    memory,
    recorder::Recorder,
    slots::Slots,
    starts::Answered,
    work::Work,
};
use crate::{cancellation::Cancellation, config::WorkerConfig, context::Transactions, registry::Registry};

/// The longest time between two reads of the assignment, also with keep-alives.
const LONGEST_SILENCE: Duration = Duration::from_secs(60);

/// How often the session yields before it starts jobs in free slots. Measured: with fewer yields, a start often locks a single job.
const YIELDS: usize = 4;

/// How a session ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SessionEnd {
    /// A stop was requested.
    Stopped,
    /// The memory limit was reached.
    MemoryLimit,
    /// A cleaner declared the worker dead.
    Retired,
    /// A task of the session panicked. The session cannot continue, and a cleaner rescues its jobs.
    Broken,
}

/// One registration of this worker.
pub(crate) struct Session {
    pub(crate) id: WorkerId,
    pub(crate) environment: Arc<Environment>,
    pub(crate) work: Work,
    leader: Leader,
    pub(crate) hints: Hints,
    pub(crate) news: mpsc::Receiver<News>,
    /// The recorder's task. It ends when all its senders are dropped.
    pub(crate) recording: JoinHandle<()>,
    pub(crate) beating: JoinHandle<()>,
    /// The last request of an operator that was obeyed.
    pub(crate) request: Option<Request>,
}

/// What wakes the session.
enum Event {
    Hint(Hint),
    /// Jobs that this process has enqueued to execute them itself.
    Own(Vec<JobId>),
    News(Option<News>),
    SlotsChanged,
    /// A start was answered, or its answer was lost.
    Started(Box<Answered>),
    Poll,
    /// The watchdog is due, or jobs ahead have waited too long.
    Timer,
    Stop,
    TaskPanicked,
}

impl Session {
    /// Registers this worker and starts its heartbeat and its recorder.
    pub(crate) async fn register(dependencies: Arc<Dependencies>) -> Result<Self, StoreError> {
        let (store, config) = (&dependencies.store, &dependencies.config);
        let id = WorkerId::new();
        let mut commits = CommitSession::default();
        let session = store.open_session(&mut commits).await?;
        let channel = store.join_channel().await?;
        // Listening begins before the registration, so that no hint is missed.
        let hints = store.hints(Listener::Worker(id, channel));
        // In the roster, a process with own jobs serves no class: it takes no jobs of others.
        let (work_on, classes) = match &dependencies.own {
            Some(_) => (WorkOn::Groups(Vec::new()), Vec::new()),
            None => (config.work_on(), dependencies.registry.classes().map(str::to_owned).collect()),
        };
        let registration = Registration {
            id,
            work_on,
            classes,
            policies: dependencies.policies.classes().map(str::to_owned).collect(),
            class_slots: dependencies.registry.class_slots(),
            capacity: config.concurrency,
            lease_ms: i64::try_from(config.lease.as_millis()).unwrap_or(i64::MAX),
            channel,
            session: Some(session),
            process: dependencies.process.clone(),
        };
        declare_classes(store, &dependencies.registry).await?;
        store.register(&registration).await?;
        let (recorder, recording) = Recorder::start(Store::clone(store), id, commits);
        let slots = Slots::new(config.concurrency, dependencies.registry.threads().clone());
        let lease = Arc::new(Lease::default());
        dependencies.watchdog.progress();
        let heartbeat = Heartbeat {
            store: dependencies.heartbeat_store.clone(),
            worker: id,
            table: slots.table(),
            lease: lease.clone(),
            every: config.heartbeat,
            lease_for: config.lease,
            watchdog: dependencies.watchdog.clone(),
        };
        let (sender, news) = mpsc::channel(4);
        let beating = tokio::spawn(heartbeat.run(sender));
        let leader = Leader::new(config.heartbeat);
        let transactions = Arc::new(Transactions::new(dependencies.store.clone(), id));
        let environment = Arc::new(Environment { dependencies, table: slots.table(), lease, recorder, transactions });
        let work = Work::new(id, environment.clone(), slots);
        Ok(Self { id, environment, work, leader, hints, news, recording, beating, request: None })
    }

    /// Offers the slots of this worker to the recruiter, unless they are for own jobs.
    pub(crate) async fn offer_slots(&self) -> Result<(), StoreError> {
        if self.dependencies().own.is_some() {
            return Ok(());
        }
        let capacity = self.config().concurrency;
        self.store().make_available(self.id, self.work.offer().slots).await?;
        self.store().announce_hint(Hint::Free).await;
        let classes = self.dependencies().registry.classes().collect::<Vec<_>>().join(",");
        tracing::info!(worker.id = %self.id, worker.capacity = capacity, classes, "ready for work");
        self.dependencies().notifier.ready("waiting for jobs");
        Ok(())
    }

    /// Takes and runs jobs until something ends the session.
    pub(crate) async fn run_jobs(&mut self, shutdown: &mut Shutdown) -> SessionEnd {
        let half = (self.config().poll / 2).min(LONGEST_SILENCE);
        let mut poll_at = Monotonic::now();
        loop {
            self.progress();
            let wakes_in = self.wakes_in();
            let event = tokio::select! {
                biased;
                () = shutdown.requested() => Event::Stop,
                _ = &mut self.recording => Event::TaskPanicked,
                news = self.news.recv() => Event::News(news),
                () = pause(poll_at.saturating_duration_since(Monotonic::now())) => Event::Poll,
                () = pause(wakes_in) => Event::Timer,
                hint = self.hints.next() => Event::Hint(hint),
                Some(answered) = self.work.starts.next() => answered.map_or(Event::TaskPanicked, |answered| Event::Started(Box::new(answered))),
                jobs = next_own(&self.environment) => Event::Own(jobs),
                changed = self.work.slots.changed() => changed.map_or(Event::TaskPanicked, |()| Event::SlotsChanged),
            };
            match event {
                Event::Stop => return SessionEnd::Stopped,
                // The heartbeat ends without news only in a panic.
                Event::TaskPanicked | Event::News(None) => return SessionEnd::Broken,
                Event::News(Some(News::Retired)) => return SessionEnd::Retired,
                Event::Timer => {}
                Event::News(Some(News::Alive { at, assignment, offered, held_permits, has_jobs, request })) => {
                    // The heartbeat may be older than the last read.
                    if wanted(&request) != wanted(&self.request) {
                        self.read_request().await;
                    }
                    self.work.compare(assignment.as_ref(), &offered, held_permits, has_jobs);
                    if self.work.intake.release_unconfirmed(at).await {
                        self.work.turn.mark_outdated();
                    }
                    self.progress();
                    self.read_cancellations().await;
                    self.open_for_own_jobs().await;
                    self.progress();
                    self.work.take(assignment).await;
                    self.leader.check(&self.environment.dependencies.store).await;
                }
                Event::Hint(Hint::Assigned { round, assignments }) => {
                    self.leader.note_hint();
                    let own = assignments.into_iter().find(|given| given.worker == self.id);
                    self.work.take(own.map(|given| Assignment { round, jobs: given.jobs, permits: given.permits })).await;
                }
                Event::Own(jobs) => self.work.take_own(&jobs).await,
                Event::Hint(Hint::Cancel { job }) => self.cancel(job),
                Event::Hint(Hint::Recall) => self.work.recall(),
                Event::Hint(Hint::Control) => self.read_request().await,
                // The recruiter has sent every earlier assignment before this keep-alive.
                Event::Hint(Hint::KeepAlive { again_in }) => {
                    self.leader.note_hint();
                    poll_at = Monotonic::now() + again_in.min(LONGEST_SILENCE);
                }
                // Hints may have been missed.
                Event::Hint(Hint::Seed) => poll_at = Monotonic::now(),
                Event::Hint(Hint::Jobs { .. } | Hint::NotStarted | Hint::Free | Hint::Returned { .. } | Hint::Left { .. }) => {}
                Event::Hint(Hint::Ended { .. } | Hint::Waiting { .. } | Hint::Settings) => {}
                Event::Started(answered) => self.work.run(*answered).await,
                Event::SlotsChanged => {
                    gather().await;
                    self.work.slots_changed();
                }
                Event::Poll => {
                    poll_at = Monotonic::now() + half.mul_f64(rand::random_range(0.75..0.95));
                    match self.store().assignment(self.id).await {
                        Ok(assignment) => self.work.take(assignment).await,
                        Err(error) => tracing::debug!(error = chain(&error), "failed to read the assignment"),
                    }
                }
            }
            if self.is_stopped_by_operator() {
                return SessionEnd::Stopped;
            }
            self.work.report().await;
            if let Some(limit) = self.config().memory_limit.filter(|limit| memory::resident() > *limit) {
                tracing::warn!(limit, resident = memory::resident(), "the memory limit is reached: taking no more jobs");
                return SessionEnd::MemoryLimit;
            }
        }
    }

    /// Takes own jobs under the present settings, unless an operator wants this process to take none.
    async fn open_for_own_jobs(&self) {
        let Some(own) = &self.dependencies().own else { return };
        if self.request.is_some() {
            own.close();
            return;
        }
        match self.store().settings().await {
            Ok(settings) => own.open(settings),
            Err(error) => {
                tracing::debug!(
                    error = chain(&error),
                    "failed to read the settings of groups; taking no own jobs until the next heartbeat"
                );
                own.close();
            }
        }
    }

    /// Reads what an operator wants, and does it.
    async fn read_request(&mut self) {
        match self.store().wanted(self.id).await {
            Ok(request) => self.obey(request),
            Err(error) => tracing::debug!(error = chain(&error), "failed to read what an operator wants"),
        }
        self.progress();
    }

    /// Does what an operator wants, if it is not what was wanted before.
    fn obey(&mut self, request: Option<Request>) {
        if wanted(&self.request) == wanted(&request) {
            return;
        }
        match &request {
            None => tracing::info!(worker.id = %self.id, "an operator has resumed this worker: taking jobs again"),
            Some(Request { wanted: Wanted::Quiet, by, .. }) => {
                tracing::info!(worker.id = %self.id, by, "an operator has made this worker quiet: taking no jobs until it is resumed");
            }
            Some(Request { wanted: Wanted::Stop, by, .. }) => {
                tracing::info!(worker.id = %self.id, by, "an operator has stopped this worker");
                self.dependencies().notifier.stopping();
            }
        }
        self.work.set_quiet(request.is_some());
        self.request = request;
    }

    fn is_stopped_by_operator(&self) -> bool {
        self.request.as_ref().is_some_and(|request| request.wanted == Wanted::Stop)
    }

    /// Makes a new session quiet, as the last one of this process was.
    pub(crate) async fn stay_quiet(&mut self, request: Request) -> Result<(), StoreError> {
        self.store().ask_worker(self.id, request.wanted, &request.by).await?;
        self.obey(Some(request));
        Ok(())
    }

    fn wakes_in(&self) -> Duration {
        self.work.returns_in().unwrap_or(Duration::MAX).min(self.dependencies().watchdog.next_in())
    }

    /// Notes progress of the session loop: once in each pass, and after each call to MongoDB in it.
    pub(crate) fn progress(&self) {
        self.dependencies().watchdog.progress();
    }

    pub(crate) fn dependencies(&self) -> &Dependencies {
        &self.environment.dependencies
    }

    pub(crate) fn store(&self) -> &Store {
        &self.environment.dependencies.store
    }

    pub(crate) fn config(&self) -> &WorkerConfig {
        &self.environment.dependencies.config
    }

    /// Finds cancellations whose hint was lost.
    pub(crate) async fn read_cancellations(&self) {
        let jobs = self.work.slots.jobs();
        if jobs.is_empty() {
            return;
        }
        match self.store().cancel_requests(&jobs).await {
            Ok(jobs) => jobs.into_iter().for_each(|job| self.cancel(job)),
            Err(error) => tracing::debug!(error = chain(&error), "failed to read requests for cancellation"),
        }
    }

    /// Cancels a job, if it runs here.
    pub(crate) fn cancel(&self, job: JobId) {
        if self.work.slots.cancel(job, Cancellation::Requested) {
            tracing::info!(job.id = %job, "cancelling a running job");
        }
    }
}

/// Declares the defaults of the classes of the workables file. Writes only what has changed.
async fn declare_classes(store: &Store, registry: &Registry) -> Result<(), StoreError> {
    if registry.defaults().is_empty() {
        return Ok(());
    }
    let mut declared = store.class_defaults().await?;
    for (class, defaults) in registry.defaults() {
        if declared.remove(class).unwrap_or_default() != *defaults {
            store.declare_class(class, defaults).await?;
        }
    }
    Ok(())
}

fn wanted(request: &Option<Request>) -> Option<Wanted> {
    request.as_ref().map(|request| request.wanted)
}

/// The next own jobs. It never returns if the session has none.
async fn next_own(environment: &Environment) -> Vec<JobId> {
    match &environment.dependencies.own {
        Some(own) => own.next().await,
        None => std::future::pending().await,
    }
}

/// Lets other tasks run for a moment. If several jobs end at the same time, one start then fills their slots.
async fn gather() {
    for _ in 0..YIELDS {
        tokio::task::yield_now().await;
    }
}
