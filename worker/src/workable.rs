//! What a user implements, and the closed set of ways in which it can end.

use std::{
    error::Error,
    fmt,
    future::Future,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use bson::Bson;
use recruiter_common::{
    enqueue::Workable,
    failure::Failure,
    ids::{JobId, StartId},
    job::{Execution, Job},
    shutdown::pause,
};
use serde::Serialize;
use tokio_util::sync::CancellationToken;

use crate::heartbeat::Shared;

/// Between two looks at a lease that is over.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// A [`Workable`] that this process can execute.
///
/// One value is made from the stored parameters for each execution. Whatever `execute` does may have been done
/// before by an earlier attempt: a worker can die between a side effect and its record.
pub trait Executable: Workable {
    /// What all executions share: connection pools, clients, caches. `()` when there is nothing.
    type State: Send + Sync + 'static;

    /// Does the work.
    ///
    /// # Errors
    /// Any error type converts into [`NotDone::Failed`] with its type name as the error class; say
    /// [`NotDone::GiveUp`] when trying again is pointless, [`NotDone::TryAgain`] when it is merely too early.
    fn execute(&self, state: &Self::State, job: &Context) -> impl Future<Output = Result<Done, NotDone>> + Send;

    /// How long an execution may take; no limit unless the worker has one. What ends later has failed as `timeout`, whatever it says.
    fn time_limit(&self) -> Option<Duration> {
        None
    }

    /// Called once the success is in the archive. Not called again if the process dies before it ends.
    ///
    /// Of a bundle these three are called for each item that was executed, in order, once what this run made of the whole bundle is
    /// recorded.
    fn after_success(&self, _state: &Self::State, _job: &Context) -> impl Future<Output = ()> + Send {
        async {}
    }

    /// Called once a failure is recorded, whether or not the job will be done again.
    fn after_failure(&self, _state: &Self::State, _job: &Context, _failure: &Failure) -> impl Future<Output = ()> + Send {
        async {}
    }

    /// Called after `after_failure` when the failed job went to the archive. A cleaner that ends the job of a dead
    /// worker cannot call it.
    fn after_last_failure(&self, _state: &Self::State, _job: &Context, _failure: &Failure) -> impl Future<Output = ()> + Send {
        async {}
    }
}

/// A [`Workable`] whose work blocks its thread (computation, synchronous I/O). It runs on a thread of its own.
///
/// A thread cannot be killed: past its time limit the job is cancelled, and its place is free again when it returns.
pub trait BlockingExecutable: Workable + Clone {
    /// What all executions share.
    type State: Send + Sync + 'static;

    /// Does the work. Long loops should look at [`Context::is_cancelled`].
    ///
    /// # Errors
    /// As [`Executable::execute`].
    fn execute(&self, state: &Self::State, job: &Context) -> Result<Done, NotDone>;

    /// How long an execution may take; no limit unless the worker has one. What ends later has failed as `timeout`, whatever it says.
    fn time_limit(&self) -> Option<Duration> {
        None
    }
}

/// The work is done.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Done {
    /// Kept as `result` in the archive.
    pub result: Option<Bson>,
}

impl Done {
    /// Done, with a result for the archive.
    ///
    /// # Errors
    /// [`NotDone::GiveUp`] when the result cannot be expressed in BSON: doing the work again would not help.
    pub fn with(result: impl Serialize) -> Result<Self, NotDone> {
        match bson::serialize_to_bson(&result) {
            Ok(result) => Ok(Self { result: Some(result) }),
            Err(error) => Err(NotDone::GiveUp(Failure::new("result", format!("the result cannot be stored: {error}")))),
        }
    }
}

/// The work is not done.
#[derive(Clone, Debug, PartialEq)]
pub enum NotDone {
    /// It failed; the job's retry policy decides what follows.
    Failed(Failure),
    /// It failed and trying again is pointless, whatever the retry policy.
    GiveUp(Failure),
    /// It cannot be done yet, and that is no failure: another run that does not count against the retry policy.
    TryAgain {
        /// How long to wait; the policy's delay, or half a minute, when nothing is said.
        after: Option<Duration>,
        /// Why, for the history.
        reason: Failure,
    },
    /// Nothing was done, because the machine is short of something: open files, processes, memory. That is no fault of the job,
    /// which is released as it was, uncounted and without an entry in its history; this worker takes fewer jobs for a while.
    NoResources(Failure),
    /// It was broken off, as [`Context::cancelled`] had asked.
    Stopped(Failure),
}

impl NotDone {
    /// A failure of this class, for retry policies to select by.
    pub fn failed(class: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Failed(Failure::new(class, message))
    }

    /// What goes into the history.
    pub fn failure(&self) -> &Failure {
        match self {
            Self::Failed(failure) | Self::GiveUp(failure) | Self::NoResources(failure) | Self::Stopped(failure) => failure,
            Self::TryAgain { reason, .. } => reason,
        }
    }
}

impl<E: Error + 'static> From<E> for NotDone {
    fn from(error: E) -> Self {
        let mut sources = Vec::new();
        let mut next = error.source();
        while let Some(source) = next {
            sources.push(source.to_string());
            next = source.source();
        }
        let failure = Failure::new(std::any::type_name::<E>(), error.to_string());
        Self::Failed(if sources.is_empty() { failure } else { failure.with_trace(sources.join("\n")) })
    }
}

/// Why a running job is asked to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cancellation {
    /// Somebody cancelled the job.
    Requested,
    /// Its time limit passed.
    TimeLimit,
    /// The worker is stopping and its grace is over.
    WorkerStopping,
    /// The worker reached its memory limit and the grace is over. This start counts: whoever takes a worker there every time
    /// would otherwise do so for ever.
    MemoryLimit,
    /// The worker was declared dead: nothing this execution says will be recorded, and another may already run.
    LeaseLost,
}

/// Which item of a bundle is executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    /// Where it is in the bundle, from 0.
    pub index: usize,
    /// How many items the bundle has.
    pub of: usize,
}

/// What an execution knows about its job.
pub struct Context {
    pub(crate) job: Arc<Job>,
    pub(crate) start: StartId,
    pub(crate) is_last_attempt: bool,
    pub(crate) last_execution: Option<Arc<Execution>>,
    pub(crate) item: Option<Item>,
    pub(crate) deadline: OnceLock<Instant>,
    pub(crate) cancel: Arc<Cancel>,
}

/// The worker's side of a running job's cancellation.
#[derive(Debug, Default)]
pub(crate) struct Cancel {
    token: CancellationToken,
    why: OnceLock<Cancellation>,
    /// The bundle's, of an item.
    above: Option<Arc<Cancel>>,
    /// Whoever was asked to stop is to end at once.
    at_once: CancellationToken,
    /// Whether a bundle is to stop before its next item.
    no_more_items: AtomicBool,
    /// The worker's.
    lease: Option<Arc<Shared>>,
}

impl Cancel {
    /// For a job of a worker with this lease.
    pub(crate) fn under(lease: Arc<Shared>) -> Self {
        Self { lease: Some(lease), ..Self::default() }
    }

    /// For one item: asked to stop with its bundle, or alone.
    pub(crate) fn of_item(bundle: &Arc<Self>) -> Self {
        Self { token: bundle.token.child_token(), at_once: bundle.at_once.child_token(), above: Some(bundle.clone()), ..Self::default() }
    }

    /// Asks the execution to stop. The first reason stays.
    pub(crate) fn cancel(&self, why: Cancellation) {
        // A second reason is no news to the execution.
        let _ = self.why.set(why);
        self.token.cancel();
    }

    pub(crate) fn why(&self) -> Option<Cancellation> {
        self.why.get().copied().or_else(|| self.above.as_ref()?.why())
    }

    pub(crate) async fn cancelled(&self) {
        self.token.cancelled().await;
    }

    /// Says that whoever was or will be asked to stop has no time for it.
    pub(crate) fn hurry(&self) {
        self.at_once.cancel();
    }

    /// Resolves when there is no time left to stop in.
    pub(crate) async fn at_once(&self) {
        self.at_once.cancelled().await;
    }

    /// Tells the worker that its machine could not start this job.
    pub(crate) fn note_shortage(&self, reason: &str) {
        match (&self.lease, &self.above) {
            (Some(worker), _) => worker.note_shortage(reason),
            (None, Some(bundle)) => bundle.note_shortage(reason),
            (None, None) => {}
        }
    }

    /// Asks a bundle to stop before its next item: the present one may end. Nothing to any other job.
    pub(crate) fn no_more_items(&self) {
        self.no_more_items.store(true, Ordering::Relaxed);
    }

    /// Waits until a bundle may enter its next item, as any job may be started only while its worker trusts its lease; or until
    /// the bundle is to stop, and says so.
    pub(crate) async fn may_go_on(&self) -> bool {
        loop {
            if self.token.is_cancelled() || self.no_more_items.load(Ordering::Relaxed) {
                return false;
            }
            if self.lease.as_ref().is_none_or(|lease| lease.lease_until().is_some()) {
                return true;
            }
            tokio::select! { () = self.cancelled() => {} () = pause(LOOK_EVERY) => {} }
        }
    }
}

impl Context {
    /// The same for an item of the bundle.
    pub(crate) fn of_item(&self, item: Item, cancel: Arc<Cancel>) -> Self {
        Self {
            job: self.job.clone(),
            start: self.start,
            is_last_attempt: self.is_last_attempt,
            last_execution: self.last_execution.clone(),
            item: Some(item),
            deadline: OnceLock::new(),
            cancel,
        }
    }

    /// The job.
    pub fn job_id(&self) -> JobId {
        self.job.id
    }

    /// The start this execution belongs to: no other execution of this job has it, and the job's history names it. With the
    /// job's id it is a fencing token for systems that can refuse a second writer.
    pub fn start_id(&self) -> StartId {
        self.start
    }

    /// Class of the workable.
    pub fn class(&self) -> &str {
        &self.job.class
    }

    /// Group of the job.
    pub fn group(&self) -> &str {
        &self.job.group
    }

    /// Number of this start: 1 in the first run, interrupted ones included.
    pub fn attempt(&self) -> u32 {
        self.job.attempts
    }

    /// Whether a failure of this run would be the last, as far as the retry policy can tell beforehand.
    pub fn is_last_attempt(&self) -> bool {
        self.is_last_attempt
    }

    /// The execution before this one.
    pub fn last_execution(&self) -> Option<&Execution> {
        self.last_execution.as_deref()
    }

    /// Which item of a bundle this is; nothing when the job is no bundle.
    pub fn item(&self) -> Option<Item> {
        self.item
    }

    /// When the time limit passes.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline.get().copied()
    }

    /// Resolves when this execution should stop; [`Context::cancellation`] then says why.
    pub async fn cancelled(&self) {
        self.cancel.cancelled().await;
    }

    /// Whether this execution should stop.
    pub fn is_cancelled(&self) -> bool {
        self.cancel.token.is_cancelled() || self.is_late()
    }

    /// Why this execution should stop, once it should.
    pub fn cancellation(&self) -> Option<Cancellation> {
        self.cancel.why().or_else(|| self.is_late().then_some(Cancellation::TimeLimit))
    }

    /// Whether the time limit has passed, also in code that has let nobody else see to it.
    pub(crate) fn is_late(&self) -> bool {
        self.deadline().is_some_and(|deadline| Instant::now() >= deadline)
    }

    /// Whether this worker was declared dead, so that side effects should be left to the next run.
    pub fn lease_lost(&self) -> bool {
        self.cancellation() == Some(Cancellation::LeaseLost)
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context")
            .field("job", &self.job.id)
            .field("class", &self.job.class)
            .field("attempt", &self.job.attempts)
            .finish_non_exhaustive()
    }
}
