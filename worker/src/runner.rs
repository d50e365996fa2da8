//! One incarnation of a worker: announce, take what is assigned, hand it to `execute`, free the places, drain.
//!
//! Everything that changes the roster document in the worker's turn happens in this one task, so that turns cannot
//! overlap. A restart, or a return after having been declared dead, is another incarnation with another id.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::Arc,
    time::{Duration, Instant as Monotonic},
};

use recruiter_common::{
    ids::{JobId, RoundId, WorkerId},
    retry_policy::RetryPolicies,
    roster::{self, Place},
    service::Watchdog,
    shutdown::{Shutdown, pause},
    store::{Announcement, CommitSession, Free, Hint, Hints, Listener, Store, StoreError},
    telemetry::{chain, milliseconds},
};
use tokio::{
    sync::mpsc,
    task::{JoinHandle, JoinSet},
};

use crate::{
    WorkerListener,
    commit::{self, ToRecord},
    config::WorkerArgs,
    heartbeat::{self, News, Shared},
    leader::Leader,
    memory,
    portion::Portion,
    progress,
    registry::Registry,
    start::{READ_AT_ONCE, Unconfirmed},
    workable::{Cancel, Cancellation},
};

/// Rounds that are remembered, so that an assignment seen both in a hint and in the roster is taken once.
const ROUNDS: usize = 64;
/// Outcomes that may wait to be written.
const QUEUE: usize = 10_000;
/// How long the recruiter is believed to have nothing to say, whatever it said.
const LONGEST_SILENCE: Duration = Duration::from_secs(60);
/// How long handing back unconfirmed starts may take at the end. The cleaner does what is left.
const LAST_HAND_BACK: Duration = Duration::from_secs(5);
/// Jobs that are remembered because they were assigned and not entered.
const LEFT: usize = 1_000;
/// For how long.
const LEFT_FOR: Duration = Duration::from_secs(60);
/// So often a job must be left for a warning, and for each further one twice as often.
const LEFT_TOO_OFTEN: u32 = 16;
/// How long jobs that were told to stop may take to end.
const LAST_WORDS: Duration = Duration::from_secs(5);
/// The same after a second signal: with what is then written, less than the stock worker leaves for it.
const LAST_WORDS_AT_ONCE: Duration = Duration::from_secs(1);
/// How long the last outcomes may take to be written: longer than most failovers. With the grace, the above and one call it must
/// fit into systemd's TimeoutStopSec.
const LAST_COMMIT: Duration = Duration::from_secs(15);

/// How an incarnation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// It was asked to.
    Stopped,
    /// The memory limit was reached.
    MemoryLimit,
    /// A cleaner declared it dead.
    Retired,
    /// A task of its own has panicked: it cannot go on, and leaves its jobs to the cleaner.
    Broken,
}

/// What all incarnations of a process share.
pub(crate) struct Equipment {
    pub(crate) store: Store,
    /// The same database over other connections.
    pub(crate) heartbeat_store: Store,
    pub(crate) args: WorkerArgs,
    pub(crate) place: Place,
    pub(crate) registry: Registry,
    pub(crate) policies: RetryPolicies,
    pub(crate) listener: Option<Arc<WorkerListener>>,
    /// Where bundles have what became of their items written.
    pub(crate) progress: progress::Queue,
    /// Noted by the main loop.
    pub(crate) watchdog: Watchdog,
}

/// One registered worker.
pub(crate) struct Incarnation {
    pub(crate) equipment: Arc<Equipment>,
    pub(crate) id: WorkerId,
    pub(crate) shared: Arc<Shared>,
    /// The last round that was taken: the worker's turn began with it.
    round: Option<RoundId>,
    /// Rounds seen lately.
    seen: VecDeque<RoundId>,
    /// Whether the roster does not say yet what it should.
    pub(crate) roster_is_behind: bool,
    /// Jobs that were assigned to it lately and that it has not entered.
    left: HashMap<JobId, Left>,
    /// Whether the recruiter is to be told of such jobs.
    left_some: bool,
    /// Classes of retry policies that jobs wanted and this worker does not know.
    pub(crate) unknown_policies: HashSet<String>,
    /// Bytes of jobs in one read.
    pub(crate) reading: Portion,
    pub(crate) running: JoinSet<JobId>,
    pub(crate) cancels: HashMap<JobId, Arc<Cancel>>,
    pub(crate) outcomes: mpsc::Sender<ToRecord>,
    /// Starts that may have locked jobs which are not entered.
    pub(crate) unconfirmed: Unconfirmed,
    hints: Hints,
    news: mpsc::Receiver<News>,
    /// Writes outcomes, until nobody can send any more.
    commits: JoinHandle<()>,
    beating: JoinHandle<()>,
}

/// A job that was not entered.
struct Left {
    times: u32,
    at: Monotonic,
}

/// Runs one incarnation to its end.
pub(crate) async fn run(equipment: Arc<Equipment>, shutdown: &mut Shutdown) -> Result<End, StoreError> {
    let store = &equipment.store;
    let args = &equipment.args;
    let id = WorkerId::new();
    let shared = Arc::new(Shared::default());
    let mut session = CommitSession::default();
    let commits_in = store.open_session(&mut session).await?;
    let channel = store.join_channel().await?;
    let announcement = Announcement {
        id,
        work_on: args.work_on(),
        classes: equipment.registry.classes().map(str::to_owned).collect(),
        policies: equipment.policies.classes().map(str::to_owned).collect(),
        capacity: args.concurrency,
        lease_ms: i64::try_from(args.lease.as_millis()).unwrap_or(i64::MAX),
        channel,
        session: Some(commits_in),
        place: equipment.place.clone(),
    };
    // Listening begins first, so that no assignment is missed.
    let hints = store.hints(Listener::Worker(id, channel));
    store.register(&announcement).await?;
    let (outcomes, queue) = mpsc::channel(QUEUE);
    let commits = tokio::spawn(commit::run(store.clone(), id, session, queue));
    let (beats, news) = mpsc::channel(4);
    let watchdog = equipment.watchdog.clone();
    watchdog.progress();
    let pulse = heartbeat::Pulse { worker: id, shared: shared.clone(), every: args.heartbeat, lease: args.lease, watchdog };
    let beating = tokio::spawn(heartbeat::run(equipment.heartbeat_store.clone(), pulse, beats));
    let mut incarnation = Incarnation {
        equipment: equipment.clone(),
        id,
        shared,
        round: None,
        seen: VecDeque::with_capacity(ROUNDS),
        roster_is_behind: false,
        left: HashMap::new(),
        left_some: false,
        unknown_policies: HashSet::new(),
        reading: Portion::new(READ_AT_ONCE),
        running: JoinSet::new(),
        cancels: HashMap::new(),
        outcomes,
        unconfirmed: Unconfirmed::default(),
        hints,
        news,
        commits,
        beating,
    };
    let announced = store.announce(id, args.concurrency).await;
    let end = if announced.is_ok() {
        store.announce_hint(Hint::Free).await;
        tracing::info!(worker.id = %id, worker.capacity = args.concurrency, classes = announcement.classes.join(","), "ready for work");
        recruiter_common::service::ready("waiting for jobs");
        incarnation.work(shutdown).await
    } else {
        End::Stopped
    };
    let end = incarnation.end(end, shutdown).await;
    announced.map(|_| end)
}

impl Incarnation {
    pub(crate) fn store(&self) -> &Store {
        &self.equipment.store
    }

    fn args(&self) -> &WorkerArgs {
        &self.equipment.args
    }

    /// The main loop goes on: after each call to MongoDB that it waits for.
    pub(crate) fn progress(&self) {
        self.equipment.watchdog.progress();
    }

    /// Takes and runs jobs until something ends it.
    async fn work(&mut self, shutdown: &mut Shutdown) -> End {
        enum Event {
            Hint(Hint),
            News(Option<News>),
            Finished(JobId),
            Poll,
            Turn,
            Stop,
            Broken,
        }
        let half = self.args().poll / 2;
        let mut poll_at = Monotonic::now();
        let mut leader = Leader::new(self.args().heartbeat);
        loop {
            self.progress();
            let event = tokio::select! {
                biased;
                () = shutdown.requested() => Event::Stop,
                _ = &mut self.commits => Event::Broken,
                heard = self.news.recv() => Event::News(heard),
                () = pause(poll_at.saturating_duration_since(Monotonic::now())) => Event::Poll,
                () = pause(self.equipment.watchdog.next_in()) => Event::Turn,
                hint = self.hints.next() => Event::Hint(hint),
                Some(finished) = self.running.join_next() => Event::Finished(finished_job(finished)),
            };
            match event {
                Event::Stop => return End::Stopped,
                // The task that writes outcomes ends, as long as there are senders, only in a panic; so does the heartbeat without a last word.
                Event::Broken | Event::News(None) => return End::Broken,
                Event::News(Some(News::Retired)) => return End::Retired,
                Event::Turn => {}
                Event::News(Some(News::Alive { at, assignment, offered })) => {
                    // An older word of ours may have arrived last.
                    self.roster_is_behind |=
                        assignment.as_ref().is_none_or(|given| self.seen.contains(&given.round)) && offered != self.free().places;
                    self.hand_back_unconfirmed(at).await;
                    self.progress();
                    self.look_for_cancellations().await;
                    self.progress();
                    self.take(assignment).await;
                    leader.look(&self.equipment.store).await;
                }
                Event::Hint(Hint::Assigned { round, assignments }) => {
                    leader.heard();
                    let jobs = assignments.into_iter().find(|given| given.worker == self.id).map(|given| given.jobs);
                    self.take(jobs.map(|jobs| roster::Assignment { round, jobs })).await;
                }
                Event::Hint(Hint::Cancel { job }) => self.cancel(job),
                // Whatever it has assigned to us before was said before.
                Event::Hint(Hint::Beat { again_in }) => {
                    leader.heard();
                    poll_at = Monotonic::now() + again_in.min(LONGEST_SILENCE);
                }
                Event::Hint(Hint::Seed) => poll_at = Monotonic::now(),
                Event::Hint(Hint::Jobs { .. } | Hint::Free | Hint::Left { .. }) => {}
                Event::Finished(job) => self.finished(job),
                Event::Poll => {
                    poll_at = Monotonic::now() + half.mul_f64(rand::random_range(0.75..0.95));
                    match self.store().assignment(self.id).await {
                        Ok(assignment) => self.take(assignment).await,
                        Err(error) => tracing::debug!(error = chain(&error), "could not look for an assignment"),
                    }
                }
            }
            if self.roster_is_behind {
                self.progress();
                self.tell_the_roster().await;
            }
            if !self.roster_is_behind && std::mem::take(&mut self.left_some) {
                // They may be there by now. Not before the roster says so: until then they are believed to be seen to.
                self.store().announce_hint(Hint::jobs_in([] as [&str; 0])).await;
            }
            if let Some(limit) = self.args().memory_limit.filter(|limit| memory::resident() > limit.as_u64()) {
                tracing::warn!(limit = limit.as_u64(), resident = memory::resident(), "the memory limit is reached: taking no more jobs");
                return End::MemoryLimit;
            }
        }
    }

    /// Notes every execution that has ended by now, `first` among them.
    fn finished(&mut self, first: JobId) {
        let mut next = Some(first);
        while let Some(job) = next {
            self.shared.done_with(job);
            self.cancels.remove(&job);
            next = self.running.try_join_next().map(finished_job);
        }
        self.roster_is_behind = true;
    }

    pub(crate) fn free(&self) -> Free {
        let allowed = self.shared.allowed(self.args().concurrency);
        Free { places: allowed.saturating_sub(self.shared.count()), working_on: self.shared.working_on() }
    }

    /// Says in the roster what is worked on and how many places are free.
    async fn tell_the_roster(&mut self) {
        let free = self.free();
        match self.store().free_if_unassigned_since(self.id, self.round, &free).await {
            Ok(true) => {
                self.roster_is_behind = false;
                if free.places > 0 {
                    self.store().announce_hint(Hint::Free).await;
                }
            }
            // The recruiter was faster: its assignment comes first, and taking it tells the roster as well.
            Ok(false) => match self.store().assignment(self.id).await {
                Ok(Some(assignment)) if self.seen.contains(&assignment.round) => self.round = Some(assignment.round),
                Ok(assignment) => self.take(assignment).await,
                Err(error) => tracing::debug!(error = chain(&error), "could not look for an assignment"),
            },
            Err(error) => tracing::debug!(error = chain(&error), "could not tell the roster; trying again"),
        }
    }

    /// Takes an assignment that was not taken before.
    async fn take(&mut self, assignment: Option<roster::Assignment>) {
        let Some(roster::Assignment { round, mut jobs }) = assignment.filter(|assignment| !self.seen.contains(&assignment.round)) else {
            return;
        };
        if self.seen.len() == ROUNDS {
            self.seen.pop_front();
        }
        self.seen.push_back(round);
        self.round = Some(round);
        // Whatever happens below, the places that stay free are announced again.
        self.roster_is_behind = true;
        jobs.retain(|job| !self.shared.works_on(*job));
        let fits = jobs.len().min(self.free().places as usize);
        self.progress();
        if let Err(error) = self.start(round, &jobs[..fits]).await {
            tracing::warn!(count = fits, error = chain(&error), "assigned jobs could not be started; they stay due");
        }
        self.note_left(jobs);
    }

    /// Notes which of these jobs were not entered. The recruiter is told at once of those that were not left lately: they may be there by now,
    /// or be for another worker. The others it finds with its next full search, so that nothing goes round without a pause.
    fn note_left(&mut self, mut jobs: Vec<JobId>) {
        let now = Monotonic::now();
        jobs.retain(|job| !self.cancels.contains_key(job));
        if self.left.len() + jobs.len() > LEFT {
            self.left.retain(|_, left| now.duration_since(left.at) < LEFT_FOR);
        }
        for job in jobs {
            let is_known = self.left.contains_key(&job);
            self.left_some |= !is_known;
            if !is_known && self.left.len() >= LEFT {
                continue;
            }
            let left = self.left.entry(job).or_insert(Left { times: 0, at: now });
            left.times = if now.duration_since(left.at) < LEFT_FOR { left.times.saturating_add(1) } else { 1 };
            left.at = now;
            if left.times >= LEFT_TOO_OFTEN && left.times.is_power_of_two() {
                tracing::warn!(
                    job.id = %job,
                    times = left.times,
                    "a job is assigned to this worker again and again and cannot be started here: see `recruiter jobs show`"
                );
            }
        }
    }

    /// The fallback for a lost hint of a cancellation.
    async fn look_for_cancellations(&mut self) {
        let working_on = self.shared.working_on();
        if working_on.is_empty() {
            return;
        }
        match self.store().cancel_requests(&working_on).await {
            Ok(jobs) => jobs.into_iter().for_each(|job| self.cancel(job)),
            Err(error) => tracing::debug!(error = chain(&error), "could not look for cancellations"),
        }
    }

    fn cancel(&self, job: JobId) {
        if let Some(cancel) = self.cancels.get(&job) {
            tracing::info!(job.id = %job, "cancelling a running job");
            cancel.cancel(Cancellation::Requested);
        }
    }

    fn cancel_all(&self, why: Cancellation) {
        self.cancels.values().for_each(|cancel| cancel.cancel(why));
    }

    /// Drains and leaves, in the way the end demands; says how it ended, since it can be declared dead meanwhile.
    async fn end(mut self, mut end: End, shutdown: &mut Shutdown) -> End {
        if matches!(end, End::Stopped | End::MemoryLimit) {
            recruiter_common::service::stopping();
            let grace = self.args().grace;
            let until = Monotonic::now() + grace;
            if let Err(error) = self.store().withdraw_if_unassigned_since(self.id, self.round).await {
                tracing::debug!(error = chain(&error), "could not withdraw from the roster");
            }
            tracing::info!(worker.id = %self.id, count = self.running.len(), grace_ms = milliseconds(grace), "taking no more jobs");
            self.cancels.values().for_each(|cancel| cancel.no_more_items());
            let why = if end == End::MemoryLimit { Cancellation::MemoryLimit } else { Cancellation::WorkerStopping };
            let mut drained = self.wait_for_running(until, Duration::ZERO, shutdown).await;
            if drained == Drained::Partly {
                self.cancel_all(why);
                let last_words = LAST_WORDS.max(self.equipment.registry.stops_within());
                drained = self.wait_for_running(Monotonic::now() + last_words, LAST_WORDS_AT_ONCE, shutdown).await;
            }
            end = match drained {
                Drained::Whole | Drained::Partly => end,
                Drained::Retired => End::Retired,
                Drained::Broken => End::Broken,
            };
        }
        if matches!(end, End::Retired | End::Broken) {
            let count = self.running.len();
            if end == End::Retired {
                tracing::warn!(worker.id = %self.id, count, "declared dead: dropping what runs");
            } else {
                tracing::error!(worker.id = %self.id, count, "a task of this worker has panicked: leaving its jobs to the cleaner");
            }
            self.cancel_all(Cancellation::LeaseLost);
            let until = Monotonic::now() + LAST_WORDS;
            while !self.running.is_empty() && Monotonic::now() < until {
                self.progress();
                let _ = tokio::time::timeout(until.saturating_duration_since(Monotonic::now()), self.running.join_next()).await;
            }
        }
        self.progress();
        let now = self.store().now();
        if end != End::Broken {
            // MongoDB may be away: what is not handed back in time is named by the roster.
            let _ = tokio::time::timeout(LAST_HAND_BACK, self.hand_back_unconfirmed(now)).await;
        }
        let mut left = self.shared.working_on();
        left.extend(self.unconfirmed.jobs(now));
        self.running.abort_all();
        let store = self.store().clone();
        let Self { id, equipment, commits, beating, outcomes, running, .. } = self;
        // The task that writes outcomes ends with the last one, as nobody can send any more.
        drop((outcomes, running));
        let abort = commits.abort_handle();
        let committed = end != End::Broken && tokio::time::timeout(LAST_COMMIT, commits).await.is_ok_and(|ended| ended.is_ok());
        abort.abort();
        beating.abort();
        equipment.watchdog.progress();
        if matches!(end, End::Retired | End::Broken) {
            return end;
        }
        if !committed || !left.is_empty() {
            // The roster names what is left, so that the cleaner finds it.
            tracing::warn!(worker.id = %id, jobs = ?left.iter().map(ToString::to_string).collect::<Vec<_>>(), "not everything ended in time: the cleaner will see to it");
            return end;
        }
        match store.leave_if_alive(id).await {
            Ok(()) => store.announce_hint(Hint::Left { worker: id }).await,
            Err(error) => tracing::warn!(worker.id = %id, error = chain(&error), "could not leave the roster; a cleaner will see to it"),
        }
        end
    }

    /// Waits until nothing runs any more, or a time has come: so long from now once an end at once is asked for. Jobs can be cancelled
    /// meanwhile.
    async fn wait_for_running(&mut self, mut until: Monotonic, at_once: Duration, shutdown: &mut Shutdown) -> Drained {
        let mut hurry = false;
        while !self.running.is_empty() {
            self.progress();
            tokio::select! {
                Some(finished) = self.running.join_next() => {
                    let job = finished_job(finished);
                    self.shared.done_with(job);
                    self.cancels.remove(&job);
                }
                _ = &mut self.commits => return Drained::Broken,
                heard = self.news.recv() => match heard {
                    Some(News::Retired) => return Drained::Retired,
                    // The hint of a cancellation may have been lost.
                    Some(News::Alive { .. }) => self.look_for_cancellations().await,
                    None => return Drained::Broken,
                },
                hint = self.hints.next() => if let Hint::Cancel { job } = hint {
                    self.cancel(job);
                },
                () = pause(until.saturating_duration_since(Monotonic::now())) => return Drained::Partly,
                () = pause(self.equipment.watchdog.next_in()) => {}
                () = shutdown.aborted(), if !hurry => {
                    hurry = true;
                    self.cancels.values().for_each(|cancel| cancel.hurry());
                    until = until.min(Monotonic::now() + at_once);
                }
            }
        }
        Drained::Whole
    }
}

/// How far a wait for what runs came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
enum Drained {
    /// Nothing runs any more.
    Whole,
    /// Something still runs.
    Partly,
    /// This worker was declared dead meanwhile.
    Retired,
    /// A task of this worker has panicked.
    Broken,
}

/// The job of an execution task. Such a task does not panic: whatever is code of users is guarded or runs in a task of its
/// own.
fn finished_job(joined: Result<JobId, tokio::task::JoinError>) -> JobId {
    joined.unwrap_or_else(|error| match error.try_into_panic() {
        Ok(panic) => std::panic::resume_unwind(panic),
        Err(_) => unreachable!("executions are aborted only after nobody waits for them"),
    })
}
