//! A session: one registration of this worker in the roster. Its loop handles hints, heartbeats, answered starts and ended jobs.
//!
//! Only this task writes the worker's reports into the roster document. A restart, or a return after the worker was
//! declared dead, is another session with another worker id.

mod leader;
mod operator;
mod register;
mod report;
mod work;

use std::{
    sync::Arc,
    time::{Duration, Instant as Monotonic},
};

use recruiter_common::{
    ids::{JobId, WorkerId},
    shutdown::{Shutdown, pause},
    store::{Assignment, HeartbeatReply, Hint, Hints, Store},
    telemetry::chain,
    workers::Request,
};
use tokio::{sync::mpsc, task::JoinHandle};

use self::{leader::Leader, operator::wanted, work::Work};
use super::{
    dependencies::Dependencies,
    environment::Environment,
    memory,
    starts::{Answered, release_unconfirmed},
};
use crate::config::WorkerConfig;

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
    pub(crate) news: mpsc::Receiver<HeartbeatReply>,
    /// The recorder's task. It ends when all its senders are dropped.
    pub(crate) recording: JoinHandle<()>,
    pub(crate) beating: JoinHandle<()>,
    /// The last request of an operator that was obeyed.
    pub(crate) request: Option<Request>,
    /// When the assignment is read next.
    poll_at: Monotonic,
    /// When the rules of redaction were read.
    redaction_at: Monotonic,
}

/// What wakes the session.
enum Event {
    Hint(Hint),
    /// Jobs that this process has enqueued to execute them itself.
    Own(Vec<JobId>),
    News(Option<HeartbeatReply>),
    SlotsChanged,
    /// Clients have come or gone.
    ClientsChanged,
    /// A start was answered, or its answer was lost.
    Started(Box<Answered>),
    Poll,
    /// The watchdog is due, or jobs ahead have waited too long.
    Timer,
    Stop,
    TaskPanicked,
}

impl Session {
    /// Takes and runs jobs until something ends the session.
    pub(crate) async fn run_jobs(&mut self, shutdown: &mut Shutdown) -> SessionEnd {
        loop {
            self.progress();
            let event = self.next(shutdown).await;
            if let Some(end) = self.handle(event).await {
                return end;
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

    /// Waits for the next event.
    async fn next(&mut self, shutdown: &mut Shutdown) -> Event {
        let wakes_in = self.work.returns_in().unwrap_or(Duration::MAX).min(self.dependencies().watchdog.next_in());
        tokio::select! {
            biased;
            () = shutdown.requested() => Event::Stop,
            _ = &mut self.recording => Event::TaskPanicked,
            news = self.news.recv() => Event::News(news),
            () = pause(self.poll_at.saturating_duration_since(Monotonic::now())) => Event::Poll,
            () = pause(wakes_in) => Event::Timer,
            hint = self.hints.next() => Event::Hint(hint),
            Some(answered) = self.work.starts.next() => answered.map_or(Event::TaskPanicked, |answered| Event::Started(Box::new(answered))),
            jobs = self.environment.dependencies.source.next() => Event::Own(jobs),
            () = self.environment.dependencies.source.clients_changed() => Event::ClientsChanged,
            changed = self.work.tasks.changed() => changed.map_or(Event::TaskPanicked, |()| Event::SlotsChanged),
        }
    }

    /// Handles an event. Returns the end of the session if it is one.
    async fn handle(&mut self, event: Event) -> Option<SessionEnd> {
        match event {
            Event::Stop => return Some(SessionEnd::Stopped),
            // The heartbeat ends without news only in a panic.
            Event::TaskPanicked | Event::News(None) => return Some(SessionEnd::Broken),
            Event::News(Some(HeartbeatReply::Retired)) => return Some(SessionEnd::Retired),
            Event::Timer => {}
            Event::News(Some(seen)) => self.compare(seen).await,
            Event::Hint(hint) => self.hint(hint).await,
            Event::Own(jobs) => self.work.take_own(&jobs).await,
            Event::Started(answered) => self.work.run(*answered).await,
            Event::SlotsChanged => {
                gather().await;
                self.work.slots_changed();
            }
            Event::ClientsChanged => {
                gather().await;
                self.work.clients_changed();
            }
            Event::Poll => {
                let half = (self.config().poll / 2).min(LONGEST_SILENCE);
                self.poll_at = Monotonic::now() + half.mul_f64(rand::random_range(0.75..0.95));
                match self.store().assignment(self.id).await {
                    Ok(assignment) => self.work.take(assignment).await,
                    Err(error) => tracing::debug!(error = chain(&error), "failed to read the assignment"),
                }
            }
        }
        None
    }

    /// Handles an acknowledged heartbeat: compares the roster with what this worker has, and does what takes place once in a while.
    async fn compare(&mut self, reply: HeartbeatReply) {
        let HeartbeatReply::Seen { at, assignment, offered, held_permits, has_jobs, request } = reply else { return };
        // The heartbeat may be older than the last read.
        if wanted(&request) != wanted(&self.request) {
            self.read_request().await;
        }
        self.work.compare(assignment.as_ref(), &offered, held_permits, has_jobs);
        if release_unconfirmed(&self.environment, self.id, at).await {
            self.work.turn.is_outdated = true;
        }
        self.progress();
        self.read_cancellations().await;
        self.read_redaction().await;
        self.dependencies().source.open(self.store(), self.request.is_some()).await;
        self.progress();
        self.work.take(assignment).await;
        self.leader.check(&self.environment.dependencies.store).await;
    }

    async fn hint(&mut self, hint: Hint) {
        match hint {
            Hint::Assigned { round, assignments } => {
                self.leader.note_hint();
                let own = assignments.into_iter().find(|given| given.worker == self.id);
                self.work.take(own.map(|given| Assignment { round, jobs: given.jobs, permits: given.permits })).await;
            }
            Hint::Cancel { job } => self.cancel(job),
            Hint::Recall => self.work.recall(),
            Hint::Control => self.read_request().await,
            // The recruiter has sent every earlier assignment before this keep-alive.
            Hint::KeepAlive { again_in } => {
                self.leader.note_hint();
                self.poll_at = Monotonic::now() + again_in.min(LONGEST_SILENCE);
            }
            // Hints may have been missed.
            Hint::Seed => self.poll_at = Monotonic::now(),
            Hint::Jobs { .. } | Hint::NotStarted | Hint::Free | Hint::Returned { .. } | Hint::Left { .. } => {}
            Hint::Ended { .. } | Hint::Waiting { .. } | Hint::Settings => {}
        }
    }

    /// Notes progress of the session loop: once in each pass, and after each call to MongoDB in it.
    pub(crate) fn progress(&self) {
        self.dependencies().meters.slots(self.environment.held.slots());
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
}

/// Lets other tasks run for a moment. If several jobs end at the same time, one start then fills their slots.
async fn gather() {
    for _ in 0..YIELDS {
        tokio::task::yield_now().await;
    }
}
