//! The information that an execution has about its job.

mod checkpoint_error;
mod for_tests;
mod own_end;
pub(crate) mod unwritten;

use std::{
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use recruiter_common::{
    Client,
    graphs::InputError,
    ids::{GraphId, JobId, StartId},
    job::{Claim, Execution, Job},
    store::Store,
};
use serde::de::DeserializeOwned;

pub use self::{checkpoint_error::CheckpointError, for_tests::ForTests};
pub(crate) use self::{
    own_end::{OwnEnd, Transactions},
    unwritten::{Held, Notes, NotesCell, NotesQueue},
};
use crate::{
    cancellation::{Cancel, Cancellation},
    deadline::Deadline,
};

/// The item of a bundle that is executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    /// Its position in the bundle, from 0.
    pub index: usize,
    /// The number of items in the bundle.
    pub of: usize,
}

/// The information that an execution has about its job.
pub struct Context {
    pub(crate) job: Arc<Job>,
    /// `None` in a unit test without a client.
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
    /// The time until the next attempt that this execution has asked for.
    pub(crate) retry_after: Mutex<Option<Duration>>,
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
            retry_after: Mutex::default(),
        }
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

    /// A text that the code of this class has written, as it may be logged: an operator may have said that nothing of the class is shown.
    #[cfg(any(feature = "process", feature = "opentelemetry"))]
    pub(crate) fn may_log<'a>(&self, text: &'a str) -> &'a str {
        self.store.as_ref().map_or(text, |store| store.may_log(self.class(), text))
    }

    /// The group of the job.
    pub fn group(&self) -> &str {
        self.job.settings.group()
    }

    /// The trace that the job belongs to, as its enqueuer has set it ([`NewJob::traceparent`](recruiter_common::NewJob::traceparent)).
    pub fn traceparent(&self) -> Option<String> {
        self.job.settings.traceparent.clone()
    }

    /// The trace for the processes that this execution starts: with the feature `opentelemetry` that of the current span.
    #[cfg(feature = "process")]
    pub(crate) fn traceparent_of_span(&self) -> Option<String> {
        #[cfg(feature = "opentelemetry")]
        if let Some(current) = recruiter_common::traces::current() {
            return Some(current);
        }
        self.traceparent()
    }

    /// The tags of the job.
    pub fn tags(&self) -> &[String] {
        &self.job.settings.tags
    }

    /// The URN of the job.
    pub fn urn(&self) -> Option<&str> {
        self.job.settings.urn.as_deref()
    }

    /// The connection of the worker, to enqueue further jobs with.
    ///
    /// # Panics
    /// In a unit test that gives none by [`ForTests::client`].
    pub fn client(&self) -> &Client {
        self.store()
    }

    pub(crate) fn store(&self) -> &Store {
        self.store.as_deref().expect("a worker has a client; in a unit test, give one by `ForTests::client`")
    }

    /// The number of this start. Every start counts here, also one that was released before the workable was called, so the first run may
    /// have a higher number than 1: [`last_execution`](Self::last_execution) tells whether there was an earlier one.
    pub fn attempt(&self) -> u32 {
        self.job.attempts
    }

    /// How many earlier starts counted as attempts: how often the job was retried so far, 0 at first. As for
    /// [`History::attempts`](recruiter_common::History::attempts), by which retry policies decide, starts that were released do not count,
    /// and neither do runs that were snoozed or interrupted.
    pub fn retries(&self) -> u32 {
        self.job.history().attempts.saturating_sub(1)
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
    /// As for [`Context::client`].
    pub async fn inputs<T: DeserializeOwned>(&self) -> Result<Vec<T>, InputError> {
        self.store().results(&self.job.parents()).await
    }

    /// The result of the only job that this one waited for, as in a pipeline.
    ///
    /// # Errors
    /// As for [`Context::inputs`]; also if it waited for none or for several jobs.
    ///
    /// # Panics
    /// As for [`Context::client`].
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
        *self.retry_after.lock() = Some(delay);
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
