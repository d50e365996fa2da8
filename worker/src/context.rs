//! The information that an execution has about its job, and its cancellation.

use std::{
    fmt,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use bson::doc;
use recruiter_common::{
    graphs::InputError,
    ids::{GraphId, JobId, StartId},
    job::{Claim, Execution, Job},
    shutdown::pause,
    store::Store,
};
use serde::de::DeserializeOwned;
use tokio_util::sync::CancellationToken;

use crate::notes::NotesCell;
use crate::transaction::{OwnEnd, Transactions};

/// Why a running job should stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Cancellation {
    /// A user or a program cancelled the job.
    Requested,
    /// The job exceeded its time limit.
    TimeLimit,
    /// The worker is stopping and its grace period is over.
    WorkerStopping,
    /// The worker reached its memory limit and the grace period is over. This attempt counts. Otherwise a job that takes every worker to
    /// its memory limit would run for ever.
    MemoryLimit,
    /// The worker no longer holds the job, usually because a cleaner declared the worker dead. The result of this execution will not be
    /// recorded, and the job may already run elsewhere.
    ClaimLost,
}

/// The item of a bundle that is executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    /// Its position in the bundle, from 0.
    pub index: usize,
    /// The number of items in the bundle.
    pub of: usize,
}

/// The longest time until a deadline that was extended: an instant plus the longest duration would overflow.
const LONGEST_EXTENSION: Duration = Duration::from_secs(365 * 24 * 3_600);

/// When the time limit of an execution passes. Once it has passed, it cannot be extended.
#[derive(Debug, Default)]
pub(crate) struct Deadline(Mutex<Option<Limit>>);

#[derive(Clone, Copy, Debug)]
struct Limit {
    at: Instant,
    /// The time limit with all extensions.
    time: Duration,
}

impl Deadline {
    /// Begins a time limit, unless it is too long to ever pass.
    pub(crate) fn begin(&self, time: Duration) {
        *self.limit() = Instant::now().checked_add(time).map(|at| Limit { at, time });
    }

    pub(crate) fn at(&self) -> Option<Instant> {
        self.limit().map(|limit| limit.at)
    }

    /// The time limit with all extensions, if it has passed.
    pub(crate) fn passed(&self) -> Option<Duration> {
        self.limit().filter(|limit| Instant::now() >= limit.at).map(|limit| limit.time)
    }

    /// Resolves when the time limit has passed.
    pub(crate) async fn pass(&self) {
        loop {
            match self.at() {
                Some(at) if Instant::now() >= at => return,
                // An extension during this wait is noticed after it.
                Some(at) => pause(at.saturating_duration_since(Instant::now())).await,
                None => std::future::pending().await,
            }
        }
    }

    fn extend(&self, by: Duration) -> Option<Instant> {
        let (mut limit, now) = (self.limit(), Instant::now());
        let limit = limit.as_mut().filter(|limit| now < limit.at)?;
        let longest = now + LONGEST_EXTENSION;
        let at = limit.at.checked_add(by).map_or(longest, |at| at.min(longest)).max(limit.at);
        limit.time = limit.time.saturating_add(at - limit.at);
        limit.at = at;
        Some(at)
    }

    fn limit(&self) -> std::sync::MutexGuard<'_, Option<Limit>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The time until the next attempt that an execution has asked for.
#[derive(Debug, Default)]
pub(crate) struct RetryAfter(Mutex<Option<Duration>>);

impl RetryAfter {
    fn set(&self, delay: Duration) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(delay);
    }

    pub(crate) fn get(&self) -> Option<Duration> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The information that an execution has about its job.
pub struct Context {
    pub(crate) job: Arc<Job>,
    /// `None` in a unit test without a store.
    pub(crate) store: Option<Arc<Store>>,
    pub(crate) start: StartId,
    pub(crate) is_last_attempt: bool,
    pub(crate) last_execution: Option<Arc<Execution>>,
    pub(crate) item: Option<Item>,
    pub(crate) deadline: Deadline,
    pub(crate) cancel: Arc<Cancel>,
    /// How this execution ends its job in a transaction of its own; `None` for an item of a bundle, and in a unit test.
    pub(crate) ends: Option<(Claim, Arc<Transactions>)>,
    /// Whether it has done so.
    pub(crate) own_end: Arc<OwnEnd>,
    pub(crate) notes: NotesCell,
    pub(crate) retry_after: RetryAfter,
}

impl Context {
    /// The context of one item of this context's bundle.
    pub(crate) fn of_item(&self, item: Item, cancel: Arc<Cancel>) -> Self {
        Self {
            job: self.job.clone(),
            store: self.store.clone(),
            start: self.start,
            is_last_attempt: self.is_last_attempt,
            last_execution: self.last_execution.clone(),
            item: Some(item),
            deadline: Deadline::default(),
            cancel,
            ends: None,
            own_end: Arc::default(),
            notes: NotesCell::of_item(self.notes()),
            retry_after: RetryAfter::default(),
        }
    }

    /// A context for unit tests, without MongoDB. The methods of [`ForTests`] change its values.
    ///
    /// ```
    /// # use recruiter_worker::{Context, Executable, NotDone, Workable};
    /// # #[derive(serde::Serialize, serde::Deserialize)]
    /// # struct Greet { name: String }
    /// # impl Workable for Greet { const CLASS: &'static str = "Greet"; type Output = String; }
    /// impl Executable for Greet {
    ///     type State = ();
    ///
    ///     async fn execute(&self, (): &(), job: &Context) -> Result<String, NotDone> {
    ///         Ok(format!("hello, {}, for the {}. time", self.name, job.attempt()))
    ///     }
    /// }
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// let second = Context::for_tests().attempt(2).build();
    /// let greeting = Greet { name: "Ada".into() }.execute(&(), &second).await;
    /// assert_eq!(greeting.unwrap(), "hello, Ada, for the 2. time");
    /// # }
    /// ```
    pub fn for_tests() -> ForTests {
        ForTests::default()
    }

    /// The id of the job.
    pub fn job_id(&self) -> JobId {
        self.job.id
    }

    /// The id of this start. No other execution of the job has it, and the job's history names it. Together with the job's id it is a
    /// fencing token for systems that can refuse a second writer.
    pub fn start_id(&self) -> StartId {
        self.start
    }

    /// The class of the workable.
    pub fn class(&self) -> &str {
        &self.job.class
    }

    /// The group of the job.
    pub fn group(&self) -> &str {
        &self.job.group
    }

    /// The tags of the job.
    pub fn tags(&self) -> &[String] {
        &self.job.tags
    }

    /// The URN of the job.
    pub fn urn(&self) -> Option<&str> {
        self.job.urn.as_deref()
    }

    /// The store of the worker, to enqueue further jobs with.
    ///
    /// # Panics
    /// In a unit test that gives none by [`ForTests::store`].
    pub fn store(&self) -> &Store {
        self.store.as_deref().expect("a worker has a store; in a unit test, give one by `ForTests::store`")
    }

    /// The number of this start: 1 in the first run. Every start counts here. [`History::attempts`](recruiter_common::History::attempts),
    /// by which retry policies decide, leaves out runs that were snoozed or interrupted.
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

    /// The graph that the job is part of. Jobs that this execution enqueues [in it](recruiter_common::NewJob::in_graph) are shown and
    /// cancelled with it.
    pub fn graph(&self) -> Option<GraphId> {
        self.job.graph
    }

    /// The results of the jobs that this one waited for, in the order of its edges. A job without a result has null, which `Option` and `()`
    /// accept.
    ///
    /// # Errors
    /// [`InputError`]: a result was deleted, has another type, or MongoDB cannot be reached.
    ///
    /// # Panics
    /// As for [`Context::store`].
    pub async fn inputs<T: DeserializeOwned>(&self) -> Result<Vec<T>, InputError> {
        self.store().results(&self.job.parents()).await
    }

    /// The result of the only job that this one waited for, as in a pipeline.
    ///
    /// # Errors
    /// As for [`Context::inputs`]; also if it waited for none or for several jobs.
    ///
    /// # Panics
    /// As for [`Context::store`].
    pub async fn input<T: DeserializeOwned>(&self) -> Result<T, InputError> {
        let mut inputs = self.inputs().await?;
        match (inputs.pop(), inputs.len()) {
            (Some(input), 0) => Ok(input),
            (last, others) => Err(InputError::NotOne { count: others + usize::from(last.is_some()) }),
        }
    }

    /// The item that is executed; `None` if the job is not a bundle.
    pub fn item(&self) -> Option<Item> {
        self.item
    }

    /// When the time limit passes.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline.at()
    }

    /// Extends the time limit of this execution, and returns the new deadline. `None` if there is no time limit, or if this execution must
    /// stop already: then nothing changes.
    ///
    /// A deadline is moved to a year from now at most. In a bundle this is about the present item.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use recruiter_worker::Context;
    /// let job = Context::for_tests().time_limit(Duration::from_secs(60)).build();
    /// let first = job.deadline().unwrap();
    /// assert_eq!(job.extend(Duration::from_secs(30)), Some(first + Duration::from_secs(30)));
    /// ```
    pub fn extend(&self, by: Duration) -> Option<Instant> {
        if self.is_cancelled() { None } else { self.deadline.extend(by) }
    }

    /// Sets the time until the next attempt, in place of the delay of the retry policy: for example what a server has asked for.
    ///
    /// It holds if this execution fails and the policy allows another attempt. A snooze has its own time.
    pub fn retry_after(&self, delay: Duration) {
        self.retry_after.set(delay);
    }

    /// Resolves when this execution should stop. [`Context::cancellation`] then returns the reason.
    pub async fn cancelled(&self) {
        self.cancel.cancelled().await;
    }

    /// Whether this execution should stop.
    pub fn is_cancelled(&self) -> bool {
        self.cancel.is_cancelled() || self.is_late()
    }

    /// The reason why this execution should stop. `None` while it may continue.
    pub fn cancellation(&self) -> Option<Cancellation> {
        self.cancel.why().or_else(|| self.is_late().then_some(Cancellation::TimeLimit))
    }

    /// Whether the time limit has passed. True also in code that never yields, where no timer runs.
    pub(crate) fn is_late(&self) -> bool {
        self.deadline.passed().is_some()
    }

    /// Whether the worker has lost the job, see [`Cancellation::ClaimLost`]. Side effects should then be left to the next run.
    pub fn claim_lost(&self) -> bool {
        self.cancellation() == Some(Cancellation::ClaimLost)
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

/// Builds a [`Context`] for unit tests.
#[derive(Clone, Debug, Default)]
#[must_use = "`build` creates the context"]
pub struct ForTests {
    class: Option<String>,
    group: Option<String>,
    attempt: Option<u32>,
    is_last_attempt: bool,
    item: Option<Item>,
    cancelled: Option<Cancellation>,
    time_limit: Option<Duration>,
    tags: Vec<String>,
    urn: Option<String>,
    store: Option<Arc<Store>>,
    checkpoint: Option<bson::Bson>,
}

impl ForTests {
    /// Sets the class.
    pub fn class(mut self, class: impl Into<String>) -> Self {
        self.class = Some(class.into());
        self
    }

    /// Sets the group.
    pub fn group(mut self, group: impl Into<String>) -> Self {
        self.group = Some(group.into());
        self
    }

    /// Adds a tag.
    pub fn tag(mut self, tag: impl Into<String>) -> Self {
        self.tags.push(tag.into());
        self
    }

    /// Sets the URN.
    pub fn urn(mut self, urn: impl Into<String>) -> Self {
        self.urn = Some(urn.into());
        self
    }

    /// Sets the store of the worker.
    pub fn store(mut self, store: Store) -> Self {
        self.store = Some(Arc::new(store));
        self
    }

    /// Sets the number of this start. Default: 1.
    pub fn attempt(mut self, number: u32) -> Self {
        self.attempt = Some(number);
        self
    }

    /// A failure of this run would be the last.
    pub fn last_attempt(mut self) -> Self {
        self.is_last_attempt = true;
        self
    }

    /// The execution runs item `index` of a bundle of `of` items.
    pub fn item(mut self, index: usize, of: usize) -> Self {
        self.item = Some(Item { index, of });
        self
    }

    /// Sets a time limit, which begins with [`ForTests::build`].
    pub fn time_limit(mut self, limit: Duration) -> Self {
        self.time_limit = Some(limit);
        self
    }

    /// The execution is already cancelled, for this reason.
    pub fn cancelled(mut self, why: Cancellation) -> Self {
        self.cancelled = Some(why);
        self
    }

    /// Sets the checkpoint of an earlier attempt.
    ///
    /// # Panics
    /// When it cannot be expressed in BSON.
    pub fn checkpoint(mut self, value: impl serde::Serialize) -> Self {
        self.checkpoint = Some(bson::serialize_to_bson(&value).expect("a checkpoint that BSON can express"));
        self
    }

    /// The context.
    ///
    /// # Panics
    /// Never: the job has all required fields.
    pub fn build(self) -> Context {
        let job = doc! {
            "_id": JobId::new(),
            "locked": false,
            "group": self.group.unwrap_or_else(|| "generic".into()),
            "workable": { "class": self.class.unwrap_or_else(|| "test".into()) },
            "scheduled_at": bson::DateTime::now(),
            "attempts": self.attempt.unwrap_or(1),
            "tags": self.tags,
            "urn": self.urn,
            "checkpoint": self.checkpoint,
        };
        let cancel = Arc::new(Cancel::default());
        if let Some(why) = self.cancelled {
            cancel.cancel(why);
        }
        let deadline = Deadline::default();
        if let Some(limit) = self.time_limit {
            deadline.begin(limit);
        }
        Context {
            job: Arc::new(Job::try_from(job).expect("all that a job must have")),
            store: self.store,
            start: StartId::new(),
            is_last_attempt: self.is_last_attempt,
            last_execution: None,
            item: self.item,
            deadline,
            cancel,
            ends: None,
            own_end: Arc::default(),
            notes: NotesCell::default(),
            retry_after: RetryAfter::default(),
        }
    }
}

/// The worker's side of a running job's cancellation.
#[derive(Debug, Default)]
pub(crate) struct Cancel {
    token: CancellationToken,
    why: OnceLock<Cancellation>,
    /// The cancellation of the bundle that this item belongs to.
    bundle: Option<Arc<Cancel>>,
    /// Cancelled when a cancelled execution must end at once.
    at_once: CancellationToken,
    /// Whether a bundle stops before its next item.
    no_more_items: AtomicBool,
    is_claim_lost: AtomicBool,
}

impl Cancel {
    /// For one item of a bundle, which is cancelled with the bundle or alone.
    pub(crate) fn of_item(bundle: &Arc<Self>) -> Self {
        Self { token: bundle.token.child_token(), at_once: bundle.at_once.child_token(), bundle: Some(bundle.clone()), ..Self::default() }
    }

    /// Cancels the execution. The first reason is kept, except that the loss of the claim replaces every other reason, because the job may
    /// then belong to another worker.
    pub(crate) fn cancel(&self, why: Cancellation) {
        if why == Cancellation::ClaimLost {
            self.is_claim_lost.store(true, Ordering::Relaxed);
        }
        let _ = self.why.set(why);
        self.token.cancel();
    }

    /// The reason for the cancellation, of the item or of its bundle.
    pub(crate) fn why(&self) -> Option<Cancellation> {
        if self.is_claim_lost.load(Ordering::Relaxed) {
            return Some(Cancellation::ClaimLost);
        }
        self.why.get().copied().or_else(|| self.bundle.as_ref()?.why())
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.token.is_cancelled()
    }

    pub(crate) async fn cancelled(&self) {
        self.token.cancelled().await;
    }

    /// Makes a cancellation, earlier or later, end the execution at once, without time to clean up.
    pub(crate) fn hurry(&self) {
        self.at_once.cancel();
    }

    /// Resolves when there is no time left to clean up.
    #[cfg(feature = "process")]
    pub(crate) async fn at_once(&self) {
        self.at_once.cancelled().await;
    }

    /// Stops a bundle before its next item. The current item may end, and a single job is not affected.
    pub(crate) fn no_more_items(&self) {
        self.no_more_items.store(true, Ordering::Relaxed);
    }

    /// Whether a bundle may begin another item.
    pub(crate) fn allows_items(&self) -> bool {
        !self.is_cancelled() && !self.no_more_items.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_context_for_tests_is_what_it_is_said_to_be() {
        let job =
            Context::for_tests().class("a").group("b").attempt(3).last_attempt().item(1, 9).cancelled(Cancellation::Requested).build();
        assert_eq!((job.class(), job.group(), job.attempt(), job.is_last_attempt()), ("a", "b", 3, true));
        assert_eq!((job.item(), job.cancellation()), (Some(Item { index: 1, of: 9 }), Some(Cancellation::Requested)));
        job.cancelled().await;
        let job = Context::for_tests().tag("x").tag("y").urn("urn:z").build();
        assert_eq!((job.tags(), job.urn()), (["x".to_owned(), "y".to_owned()].as_slice(), Some("urn:z")));
        assert!(!Context::for_tests().build().is_cancelled());
    }

    #[test]
    fn a_time_limit_is_extended_until_it_has_passed_and_never_overflows() {
        let (second, job) = (Duration::from_secs(1), |limit| Context::for_tests().time_limit(limit).build());
        let long = job(second * 60);
        let begun = long.deadline().unwrap();
        assert_eq!((long.extend(second), long.extend(second)), (Some(begun + second), Some(begun + second * 2)));
        let latest = long.extend(Duration::MAX).expect("it is moved as far as possible");
        assert!(latest > begun + LONGEST_EXTENSION / 2 && latest <= Instant::now() + LONGEST_EXTENSION);
        assert!(long.extend(Duration::MAX).is_some_and(|at| at >= latest), "never earlier");
        assert_eq!(job(Duration::ZERO).extend(second), None, "it has passed");
        assert_eq!(job(Duration::MAX).extend(second), None, "it never passes");
        assert_eq!(Context::for_tests().build().extend(second), None, "there is none");
        assert_eq!(Context::for_tests().time_limit(second).cancelled(Cancellation::Requested).build().extend(second), None);
    }
}
