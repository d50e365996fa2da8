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
    failure::Failure,
    ids::{JobId, RoundId, StartId, WorkerId},
    instant::Instant,
    job::{Claim, Execution, IfWorkerDies, Job, Why},
    retry_policy::{Decision, RetryPolicies, RetryPolicy},
    roster::{self, Place},
    shutdown::{Shutdown, pause},
    store::{
        Announcement, Archival, CommitSession, Free, Hint, Hints, Listener, Recorded, Rescheduling, Start, Store, StoreError, ToStart,
        as_started,
    },
    telemetry::chain,
};
use tokio::{
    sync::{mpsc, oneshot},
    task::{JoinHandle, JoinSet},
};

use crate::{
    WorkerEvent, WorkerListener,
    commit::{self, ToRecord},
    config::WorkerArgs,
    execute::{Attempt, Next, Outcome, guarded},
    heartbeat::{self, News, Shared},
    memory,
    registry::Registry,
    workable::{Cancel, Cancellation},
};

/// Rounds that are remembered, so that an assignment seen both in a hint and in the roster is taken once.
const ROUNDS: usize = 64;
/// Outcomes that may wait to be written.
const QUEUE: usize = 10_000;
/// How long jobs that were told to stop may take to end.
const LAST_WORDS: Duration = Duration::from_secs(5);
/// How long the last outcomes may take to be written: longer than most failovers. With the grace and the above it must
/// fit into systemd's TimeoutStopSec.
const LAST_COMMIT: Duration = Duration::from_secs(15);
/// How long after its lease a start whose reply was lost is still looked for: it may have begun in time and be slow.
const AWAITED_FOR: Duration = Duration::from_secs(30);
/// How long a hook may take before its place is given to another job.
const HOOKS_MAY_TAKE: Duration = Duration::from_secs(60);

/// How an incarnation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// It was asked to.
    Stopped,
    /// The memory limit was reached.
    MemoryLimit,
    /// A cleaner declared it dead.
    Retired,
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
}

/// One registered worker.
struct Incarnation {
    equipment: Arc<Equipment>,
    id: WorkerId,
    shared: Arc<Shared>,
    /// The last round that was taken: the worker's turn began with it.
    round: Option<RoundId>,
    /// Rounds seen lately.
    seen: VecDeque<RoundId>,
    /// Whether the roster does not say yet what it should.
    roster_is_behind: bool,
    running: JoinSet<JobId>,
    cancels: HashMap<JobId, Arc<Cancel>>,
    outcomes: mpsc::Sender<ToRecord>,
    /// Starts whose reply was lost and that may still be carried out.
    awaited: Vec<Awaited>,
}

/// A start of unknown outcome.
struct Awaited {
    start: StartId,
    jobs: Vec<Job>,
    /// By the server's clock: after this it can no longer happen.
    until: Instant,
}

/// Runs one incarnation to its end.
pub(crate) async fn run(equipment: Arc<Equipment>, shutdown: &mut Shutdown) -> Result<End, StoreError> {
    let store = &equipment.store;
    let args = &equipment.args;
    let id = WorkerId::new();
    let shared = Arc::new(Shared::default());
    let session = store.commit_session().await?;
    shared.commits_in(session.id());
    let announcement = Announcement {
        id,
        work_on: args.work_on(),
        classes: equipment.registry.classes().map(str::to_owned).collect(),
        capacity: args.concurrency,
        lease_ms: i64::try_from(args.lease.as_millis()).unwrap_or(i64::MAX),
        sessions: shared.sessions(),
        place: equipment.place.clone(),
    };
    // Listening begins first, so that no assignment is missed.
    let hints = store.hints(Listener::Worker(id));
    store.register(&announcement).await?;
    let (outcomes, queue) = mpsc::channel(QUEUE);
    let commits = tokio::spawn(commit::run(store.clone(), session, shared.clone(), queue));
    let (beats, mut news) = mpsc::channel(4);
    let beating = tokio::spawn(heartbeat::run(equipment.heartbeat_store.clone(), id, shared.clone(), args.heartbeat, args.lease, beats));
    let mut incarnation = Incarnation {
        equipment: equipment.clone(),
        id,
        shared,
        round: None,
        seen: VecDeque::with_capacity(ROUNDS),
        roster_is_behind: false,
        running: JoinSet::new(),
        cancels: HashMap::new(),
        outcomes,
        awaited: Vec::new(),
    };
    let announced = store.announce(id, args.concurrency).await;
    let end = if announced.is_ok() {
        store.announce_hint(Hint::Free).await;
        tracing::info!(worker.id = %id, worker.capacity = args.concurrency, classes = announcement.classes.join(","), "ready for work");
        recruiter_common::service::ready("waiting for jobs");
        incarnation.work(hints, &mut news, shutdown).await
    } else {
        End::Stopped
    };
    incarnation.end(end, commits, beating, &mut news, shutdown).await;
    announced.map(|_| end)
}

impl Incarnation {
    fn store(&self) -> &Store {
        &self.equipment.store
    }

    fn args(&self) -> &WorkerArgs {
        &self.equipment.args
    }

    /// Takes and runs jobs until something ends it.
    async fn work(&mut self, mut hints: Hints, news: &mut mpsc::Receiver<News>, shutdown: &mut Shutdown) -> End {
        enum Event {
            Hint(Hint),
            News(Option<News>),
            Finished(JobId),
            Poll,
            Stop,
        }
        let half = self.args().poll / 2;
        loop {
            let poll = half.mul_f64(rand::random_range(0.8..1.0));
            let event = tokio::select! {
                biased;
                () = shutdown.requested() => Event::Stop,
                heard = news.recv() => Event::News(heard),
                hint = hints.next() => Event::Hint(hint),
                Some(finished) = self.running.join_next() => Event::Finished(finished_job(finished)),
                () = pause(poll) => Event::Poll,
            };
            match event {
                Event::Stop => return End::Stopped,
                Event::News(Some(News::Retired) | None) => return End::Retired,
                Event::News(Some(News::Alive { at, assignment })) => {
                    // Said again with every heartbeat, in case an older word arrived last.
                    self.roster_is_behind = true;
                    self.settle_awaited(at).await;
                    self.look_for_cancellations().await;
                    self.take(assignment).await;
                }
                Event::Hint(Hint::Assigned { round, assignments }) => {
                    let jobs = assignments.into_iter().find(|given| given.worker == self.id).map(|given| given.jobs);
                    self.take(jobs.map(|jobs| roster::Assignment { round, jobs })).await;
                }
                Event::Hint(Hint::Cancel { job }) => self.cancel(job),
                Event::Hint(Hint::Seed | Hint::Jobs { .. } | Hint::Free | Hint::Left { .. }) => {}
                Event::Finished(job) => self.finished(job),
                Event::Poll => match self.store().assignment(self.id).await {
                    Ok(assignment) => self.take(assignment).await,
                    Err(error) => tracing::debug!(error = chain(&error), "could not look for an assignment"),
                },
            }
            if self.roster_is_behind {
                self.tell_the_roster().await;
            }
            if let Some(limit) = self.args().memory_limit.filter(|limit| memory::resident() > limit.as_u64()) {
                tracing::warn!(limit = %limit, resident = memory::resident(), "the memory limit is reached: taking no more jobs");
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

    fn free(&self) -> Free {
        Free { places: self.args().concurrency.saturating_sub(self.shared.count()), working_on: self.shared.working_on() }
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
        jobs.truncate(self.free().places as usize);
        if jobs.is_empty() {
            return;
        }
        if let Err(error) = self.start(round, &jobs).await {
            tracing::warn!(count = jobs.len(), error = chain(&error), "assigned jobs could not be started; they stay due");
        }
    }

    /// Starts jobs: reads them, locks them, and enters those that this start got.
    async fn start(&mut self, round: RoundId, jobs: &[JobId]) -> Result<(), StoreError> {
        let store = self.store().clone();
        let now = store.now();
        let mut readable = HashMap::new();
        for found in store.unlocked(jobs).await? {
            match found {
                Ok(job) => drop(readable.insert(job.id, job)),
                Err((id, document, error)) => self.archive_malformed(id, document, &Failure::new("malformed", error.to_string()), now),
            }
        }
        if readable.is_empty() {
            return Ok(());
        }
        let Some(lease_until) = self.shared.lease_until() else {
            tracing::warn!(count = readable.len(), "not starting jobs: no heartbeat was acknowledged for too long");
            return Ok(());
        };
        let start = Start {
            id: StartId::new(),
            worker: self.id,
            hostname: self.equipment.place.hostname.clone(),
            pid: self.equipment.place.pid,
            lease_until,
            now,
        };
        let to_start: Vec<ToStart> = readable.values().map(|job| self.to_start(job, now)).collect();
        let ids: Vec<JobId> = to_start.iter().map(|job| job.job).collect();
        self.shared.work_on(ids.iter().copied());
        let free = self.free();
        let (claims, taken, archived) =
            tokio::join!(self.lock(&start, &to_start), store.take_if_assigned(self.id, round, &free), store.already_archived(&ids));
        let Locked { claims, refused, unanswered } = claims;
        // Locked by somebody else, most likely, or not known to be locked by this start: looked for until it cannot be.
        let lost: Vec<JobId> =
            ids.iter().copied().filter(|id| !refused.contains(id) && !claims.iter().any(|claim| claim.job() == *id)).collect();
        match taken {
            Ok(true) if claims.len() == jobs.len() => {
                self.roster_is_behind = false;
                if free.places > 0 {
                    store.announce_hint(Hint::Free).await;
                }
            }
            Ok(_) => {}
            Err(error) => tracing::debug!(error = chain(&error), "could not tell the roster; trying again"),
        }
        for id in refused {
            if let Some(job) = readable.get(&id) {
                self.archive_malformed(id, job.document.clone(), &Failure::new("malformed", "MongoDB cannot start it"), now);
            }
        }
        let archived = archived.inspect_err(|error| tracing::debug!(error = chain(error), "could not look into the archive"));
        let (again, mut claims): (Vec<Claim>, Vec<Claim>) = match &archived {
            Ok(archived) => claims.into_iter().partition(|claim| archived.contains(&claim.job())),
            Err(_) => (Vec::new(), claims),
        };
        let mut not_entered = Vec::new();
        if !again.is_empty() {
            tracing::info!(count = again.len(), "jobs that were enqueued again after they were archived are not run again");
            if let Err(error) = store.discard_if_claimed(&again).await {
                tracing::warn!(error = chain(&error), "they could not be deleted either");
                not_entered.extend(again.iter().map(|claim| claim.job()));
            }
        }
        if self.shared.lease_until().is_none() || archived.is_err() {
            // The answer took too long, or it is not known whether they ran before.
            not_entered.extend(claims.drain(..).map(|claim| claim.job()));
        }
        not_entered.extend(lost);
        if !not_entered.is_empty() {
            let jobs = not_entered.iter().filter_map(|id| readable.get(id).cloned()).collect();
            // A start that was answered cannot happen later, only be seen later.
            self.awaited.push(Awaited { start: start.id, jobs, until: if unanswered { lease_until } else { now } });
            self.settle_awaited(now).await;
        }
        let verdicts: HashMap<JobId, IfWorkerDies> = to_start.into_iter().map(|job| (job.job, job.if_worker_dies)).collect();
        let mut entered = HashSet::with_capacity(claims.len());
        for claim in claims {
            if let (Some(job), Some(verdict)) = (readable.remove(&claim.job()), verdicts.get(&claim.job())) {
                entered.insert(claim.job());
                self.enter(job, claim, &start, verdict.clone());
            }
        }
        for id in ids {
            if !entered.contains(&id) {
                self.shared.done_with(id);
            }
        }
        Ok(())
    }

    /// A job with the verdict of its policy for the case that this worker dies in this start.
    fn to_start(&self, job: &Job, now: Instant) -> ToStart {
        let mut history = job.history();
        history.attempts += 1;
        let died = Failure::new(recruiter_common::failure::WORKER_DIED, "the worker died");
        let policies = &self.equipment.policies;
        let decision = guarded(|| policies.decode(&job.retry_policy).map(|policy| policy.decide(&history, &died, now)).ok());
        let decision = decision.ok().flatten().unwrap_or(Decision::Archive(Why::WORKER_DIED));
        ToStart { job: job.id, attempts: job.attempts, if_worker_dies: decision.into() }
    }

    /// Locks jobs, halving the batch around what MongoDB refuses.
    async fn lock(&self, start: &Start, jobs: &[ToStart]) -> Locked {
        let mut locked = Locked::default();
        let mut pieces = vec![jobs];
        while let Some(piece) = pieces.pop() {
            let ids = || piece.iter().map(|job| job.job).collect::<Vec<_>>();
            match self.store().start_if_unlocked(start, piece).await {
                _ if piece.is_empty() => {}
                Ok(claims) => locked.claims.extend(claims),
                Err(error) if error.is_transient() => {
                    tracing::warn!(count = piece.len(), error = chain(&error), "it is not known whether jobs were started; looking");
                    locked.unanswered = true;
                    let claims = self.store().claims_of_start(start.id, &ids()).await.unwrap_or_default();
                    locked.claims.extend(claims);
                }
                Err(_) if piece.len() > 1 => {
                    let (first, second) = piece.split_at(piece.len() / 2);
                    pieces.extend([first, second]);
                }
                Err(error) => {
                    tracing::error!(job.id = %piece[0].job, error = chain(&error), "a job cannot be started");
                    locked.refused.extend(ids());
                }
            }
        }
        locked
    }

    /// Enters the workable of a started job, in a task of its own that ends when its outcome is recorded.
    fn enter(&mut self, job: Job, claim: Claim, start: &Start, verdict: IfWorkerDies) {
        let cancel = Arc::new(Cancel::default());
        self.cancels.insert(job.id, cancel.clone());
        let previous = job.last_execution.clone();
        let (job, equipment, outcomes) = (as_started(job, start, verdict), self.equipment.clone(), self.outcomes.clone());
        self.running.spawn(async move { carry_out(&equipment, equipment.attempt(job, claim, previous, cancel), outcomes).await });
    }

    /// Archives a document that is no job, alone.
    fn archive_malformed(&self, id: JobId, document: bson::Document, failure: &Failure, now: Instant) {
        tracing::warn!(job.id = %id, reason = failure.message, "a document in `scheduled` is no job; archiving it as malformed");
        let archival = Archival::malformed(id, document, &Why::MALFORMED, failure, now);
        let (recorded, _) = oneshot::channel();
        // A full queue: the document stays and will be met again.
        let _ = self.outcomes.try_send(ToRecord { outcome: Outcome::Archive(Box::new(archival)), recorded });
    }

    /// Hands back, as they were, jobs that this worker has locked and will not enter: started after the reply had been
    /// given up, or too late. Goes on asking for as long as a late start may still be carried out.
    async fn settle_awaited(&mut self, now: Instant) {
        for awaited in std::mem::take(&mut self.awaited) {
            match self.hand_back(&awaited).await {
                Ok(()) if now > awaited.until + AWAITED_FOR => {}
                Ok(()) => self.awaited.push(awaited),
                Err(error) => {
                    tracing::warn!(
                        count = awaited.jobs.len(),
                        error = chain(&error),
                        "could not hand back jobs that were not entered; trying again"
                    );
                    self.awaited.push(awaited);
                }
            }
        }
    }

    async fn hand_back(&self, awaited: &Awaited) -> Result<(), StoreError> {
        let ids: Vec<JobId> = awaited.jobs.iter().map(|job| job.id).collect();
        let claims = self.store().claims_of_start(awaited.start, &ids).await?;
        let job = |claim: &Claim| awaited.jobs.iter().find(|job| job.id == claim.job());
        let back: Vec<Rescheduling> = claims.iter().filter_map(|claim| Some(Rescheduling::hand_back(job(claim)?, *claim))).collect();
        if !back.is_empty() {
            let _ = self.store().record(&mut CommitSession::default(), &back).await?;
            tracing::info!(count = back.len(), "handed back jobs that were not entered");
            self.store().announce_hint(Rescheduling::hint(&back, self.store().now())).await;
        }
        Ok(())
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

    /// Drains and leaves, in the way the end demands.
    async fn end(
        mut self,
        end: End,
        commits: JoinHandle<()>,
        beating: JoinHandle<()>,
        news: &mut mpsc::Receiver<News>,
        shutdown: &mut Shutdown,
    ) {
        if end == End::Retired {
            tracing::warn!(worker.id = %self.id, count = self.running.len(), "declared dead: dropping what runs and coming back as another worker");
            self.cancel_all(Cancellation::LeaseLost);
            self.wait_for_running(LAST_WORDS, news, shutdown).await;
        } else {
            recruiter_common::service::stopping();
            if let Err(error) = self.store().withdraw_if_unassigned_since(self.id, self.round).await {
                tracing::debug!(error = chain(&error), "could not withdraw from the roster");
            }
            let grace = self.args().grace;
            tracing::info!(worker.id = %self.id, count = self.running.len(), grace = %humantime::format_duration(grace), "taking no more jobs");
            self.wait_for_running(grace, news, shutdown).await;
            self.cancel_all(Cancellation::WorkerStopping);
            self.wait_for_running(LAST_WORDS, news, shutdown).await;
        }
        let now = self.store().now();
        self.settle_awaited(now).await;
        let mut left = self.shared.working_on();
        left.extend(self.awaited.iter().filter(|awaited| awaited.until > now).flat_map(|awaited| &awaited.jobs).map(|job| job.id));
        self.running.abort_all();
        let (id, store) = (self.id, self.store().clone());
        drop(self);
        // Ends when the last outcome is written, as nobody can send any more.
        let abort = commits.abort_handle();
        let committed = tokio::time::timeout(LAST_COMMIT, commits).await.is_ok();
        abort.abort();
        beating.abort();
        if end == End::Retired {
            return;
        }
        if !committed || !left.is_empty() {
            // The roster names what is left, so that the cleaner finds it.
            tracing::warn!(worker.id = %id, jobs = ?left.iter().map(ToString::to_string).collect::<Vec<_>>(), "not everything ended in time: the cleaner will see to it");
            return;
        }
        match store.leave(id).await {
            Ok(()) => store.announce_hint(Hint::Left { worker: id }).await,
            Err(error) => tracing::warn!(worker.id = %id, error = chain(&error), "could not leave the roster; a cleaner will see to it"),
        }
    }

    /// Waits until nothing runs any more, a time has passed, or an end at once is asked for.
    async fn wait_for_running(&mut self, limit: Duration, news: &mut mpsc::Receiver<News>, shutdown: &mut Shutdown) {
        let until = Monotonic::now() + limit;
        while !self.running.is_empty() {
            tokio::select! {
                Some(finished) = self.running.join_next() => {
                    let job = finished_job(finished);
                    self.shared.done_with(job);
                    self.cancels.remove(&job);
                }
                Some(heard) = news.recv() => if matches!(heard, News::Retired) {
                    self.cancel_all(Cancellation::LeaseLost);
                },
                () = pause(until.saturating_duration_since(Monotonic::now())) => return,
                () = shutdown.aborted() => return,
            }
        }
    }
}

/// What became of a bulk start.
#[derive(Default)]
struct Locked {
    claims: Vec<Claim>,
    /// MongoDB cannot carry out their start.
    refused: Vec<JobId>,
    /// Whether a start may still be carried out.
    unanswered: bool,
}

/// One attempt from entry to record.
async fn carry_out(equipment: &Equipment, attempt: Attempt, outcomes: mpsc::Sender<ToRecord>) -> JobId {
    let (job, store) = (attempt.job.id, &equipment.store);
    let context = attempt.context();
    let started = Monotonic::now();
    equipment.tell(&WorkerEvent::Started { job: &context });
    let ended = attempt.execute(&context).await;
    let now = store.now();
    let next = attempt.next(ended, now);
    let duration_ms = started.elapsed().as_millis();
    let recorded = match attempt.outcome(&next, now) {
        Some(outcome) => {
            let (recorded, answer) = oneshot::channel();
            match outcomes.send(ToRecord { outcome, recorded }).await {
                Ok(()) => answer.await.unwrap_or(Recorded::ClaimLost),
                Err(_) => Recorded::ClaimLost,
            }
        }
        None => Recorded::ClaimLost,
    };
    if recorded == Recorded::ClaimLost {
        tracing::warn!(job.id = %job, "the job was rescued meanwhile; its outcome is dropped");
        return job;
    }
    let (failure, last) = match &next {
        Next::Archive { failure, .. } => (failure.as_ref(), true),
        Next::Retry { failure, .. } => (Some(failure), false),
        Next::Nothing => (None, false),
    };
    match failure {
        None => tracing::debug!(job.id = %job, job.class = attempt.job.class, duration_ms, "done"),
        Some(failure) => {
            tracing::info!(job.id = %job, job.class = attempt.job.class, job.attempt = attempt.job.attempts, duration_ms, failure = failure.class, message = failure.message, last, "not done");
        }
    }
    equipment.tell(&match failure {
        None => WorkerEvent::Done { job: &context },
        Some(failure) => WorkerEvent::Failed { job: &context, failure, last },
    });
    if let Ok(workable) = attempt.workable {
        // A hook's panic is its own: the job has been recorded.
        let (failure, hooks) = (failure.cloned(), context.clone());
        let hooks = tokio::spawn(async move { workable.after(&hooks, failure.as_ref(), last).await });
        match tokio::time::timeout(HOOKS_MAY_TAKE, hooks).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) => tracing::error!(job.id = %job, "a hook panicked"),
            Err(_) => tracing::error!(job.id = %job, "a hook takes too long; its place is given to another job"),
        }
    }
    job
}

impl Equipment {
    /// A started job with its workable and policy, both made by code of users.
    fn attempt(&self, job: Job, claim: Claim, previous: Option<Execution>, cancel: Arc<Cancel>) -> Attempt {
        let unusable = |error: &dyn std::fmt::Display| Failure::new("retry-policy", format!("the retry policy cannot be used: {error}"));
        let decoded = guarded(|| self.policies.decode(&job.retry_policy).map_err(|error| unusable(&error))).and_then(|policy| policy);
        let is_last = |policy: &Arc<dyn RetryPolicy>| guarded(|| policy.is_last_attempt(&job.history(), self.store.now()));
        let (policy, is_last_attempt) = match decoded.and_then(|policy| Ok((is_last(&policy)?, policy))) {
            Ok((is_last, policy)) => (Ok(policy), is_last),
            Err(failure) => (Err(failure), false),
        };
        let workable = guarded(|| {
            let workable = self.registry.decode(&job.class, job.parameters.clone())?;
            let limit = workable.time_limit();
            Ok((workable, limit))
        });
        let (workable, own_limit) = match workable.and_then(|workable| workable) {
            Ok((workable, limit)) => (Ok(workable), limit),
            Err(failure) => (Err(failure), None),
        };
        Attempt { job, claim, workable, policy, is_last_attempt, time_limit: own_limit.or(self.args.time_limit), cancel, previous }
    }

    fn tell(&self, event: &WorkerEvent<'_>) {
        if let Some(Err(failure)) = self.listener.as_ref().map(|listener| guarded(|| listener(event))) {
            tracing::error!(message = failure.message, "a listener failed");
        }
    }
}

/// The job of an execution task. Such a task does not panic: whatever is code of users is guarded or runs in a task of its
/// own.
fn finished_job(joined: Result<JobId, tokio::task::JoinError>) -> JobId {
    joined.unwrap_or_else(|error| match error.try_into_panic() {
        Ok(panic) => std::panic::resume_unwind(panic),
        Err(_) => unreachable!("executions are aborted only after nobody waits for them"),
    })
}
