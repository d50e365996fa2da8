//! The public interface for applications: describe a job and enqueue it now, at a later time, together with other jobs,
//! or in the application's own transaction.

mod backlog;
mod conflicts;
mod graph;

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    time::Duration,
};

use bson::{Bson, Document, doc};
use mongodb::ClientSession;
use serde::{Serialize, de::DeserializeOwned};

pub(crate) use self::backlog::Caps;
use self::backlog::Patience;
use crate::{
    graphs::{self, Edge, InvalidGraph, When},
    ids::{GraphId, JobId},
    instant::{DUE_MS, Instant},
    job::{DEFAULT_GROUP, Keep, Priority, StoredPolicy, bundle::MOST_ITEMS},
    limits::{InvalidSetting, LONGEST_GATE, check_resource, gate_of, gate_of_line},
    retry_policy::{DoNotDoItAgain, InvalidPolicy, RetryPolicies, RetryPolicy},
    store::{Hint, ScheduledJob, Store, StoreError, schema::LARGEST_WORKABLE},
    telemetry::of_bson,
    unique::{Content, InvalidUnique, Keyed, Unique},
};

/// Maximum length of a class, group, tag or urn, in bytes.
pub const LONGEST_NAME: usize = 256;
/// Bytes reserved in a job's document for tags, retry policy and all other fields except the workable.
const ROOM_FOR_THE_REST: usize = 64 * 1024;
/// Maximum number of jobs in one call for which the notification is sent together with the insert. So few jobs are
/// inserted before a recipient of the notification can read them.
const ANNOUNCED_EARLY: usize = 16;
/// If the insert ends this much later than the notification, recipients may have read before the insert. Then the
/// notification is sent again.
const TOO_EARLY: Duration = Duration::from_millis(5);
/// Maximum number of ids in one query. MongoDB does not accept 700,000 ids in one query.
const IDS_PER_QUERY: usize = 10_000;

/// A kind of work: a class name and parameters.
///
/// The struct is stored in its serde form. A worker that has the class decodes it.
///
/// ```
/// use std::time::Duration;
///
/// use recruiter_common::{Defaults, ExponentialBackoff, Workable};
///
/// #[derive(serde::Serialize, serde::Deserialize)]
/// struct SendMail {
///     to: String,
/// }
///
/// impl Workable for SendMail {
///     const CLASS: &'static str = "SendMail";
///     type Output = ();
///
///     fn defaults() -> Defaults {
///         Defaults::default().group("mail").retry(ExponentialBackoff::new(5, Duration::from_secs(10)))
///     }
/// }
/// ```
pub trait Workable: Serialize + DeserializeOwned + Send + Sync + 'static {
    /// The class name stored in jobs of this kind. Never change it while such jobs are waiting.
    const CLASS: &'static str;

    /// The result type of this kind of job, `()` for no result. The result is stored in the archive and read with
    /// [`Store::result_of`].
    type Output: Serialize + DeserializeOwned + Send + 'static;

    /// Default settings of jobs of this kind. A job can override each of them.
    fn defaults() -> Defaults {
        Defaults::default()
    }

    /// Creates a job of this workable. It can be configured further and then enqueued.
    fn as_job(&self) -> NewJob {
        NewJob::of(Self::CLASS, bson::serialize_to_bson(self).map_err(|error| of_bson(&error))).with(Self::defaults())
    }
}

/// Default settings of the jobs of a class. A setting that is missing here too has the default of all jobs.
#[derive(Clone, Debug, Default)]
#[must_use = "these are the defaults of a class only when `Workable::defaults` returns them"]
pub struct Defaults {
    group: Option<String>,
    priority: Option<Priority>,
    retry: Option<Retry>,
    keep: Option<Keep>,
    time_limit: Option<Duration>,
}

impl Defaults {
    /// Sets the group: only workers that work on it get these jobs.
    pub fn group(mut self, group: impl Into<String>) -> Self {
        self.group = Some(group.into());
        self
    }

    /// Sets the priority.
    pub fn priority(mut self, priority: Priority) -> Self {
        self.priority = Some(priority);
        self
    }

    /// Sets the retry policy, which decides what follows a failure.
    pub fn retry(mut self, policy: impl Into<Retry>) -> Self {
        self.retry = Some(policy.into());
        self
    }

    /// Sets what is kept of a job after its end. With [`Keep::Failures`] nothing is kept of a success.
    pub fn keep(mut self, keep: Keep) -> Self {
        self.keep = Some(keep);
        self
    }

    /// Sets the time limit of one execution. A worker asks the workable for the limit, and the workable returns this
    /// one by default.
    pub fn time_limit(mut self, limit: Duration) -> Self {
        self.time_limit = Some(limit);
        self
    }

    /// The time limit of one execution, if one was set.
    pub fn given_time_limit(&self) -> Option<Duration> {
        self.time_limit
    }
}

/// A retry policy for a job: a reference to a policy, or the result of a policy's constructor. If the constructor
/// failed, the enqueueing call returns its error.
#[derive(Clone, Debug)]
pub struct Retry(Result<StoredPolicy, InvalidPolicy>);

impl<P: RetryPolicy + ?Sized> From<&P> for Retry {
    fn from(policy: &P) -> Self {
        Self(Ok(StoredPolicy::from(policy)))
    }
}

impl<P: RetryPolicy> From<Result<P, InvalidPolicy>> for Retry {
    fn from(made: Result<P, InvalidPolicy>) -> Self {
        match made {
            Ok(policy) => Self::from(&policy),
            Err(problem) => Self(Err(problem)),
        }
    }
}

/// The result of enqueueing one job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Enqueued {
    /// The id of the job. If nothing was enqueued, the id of the existing job.
    pub id: JobId,
    /// Whether this call has enqueued the job. If not, a scheduled or archived job already had its id ([`NewJob::with_id`]) or its unique
    /// key ([`NewJob::unique`]).
    pub is_new: bool,
    /// What has happened.
    pub outcome: Outcome,
}

impl Enqueued {
    fn new(id: JobId, outcome: Outcome) -> Self {
        Self { id, is_new: matches!(outcome, Outcome::New | Outcome::RunsOnceMore), outcome }
    }
}

/// What has happened to a job that was to be enqueued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// It is enqueued.
    New,
    /// A job with its id is scheduled or archived.
    KnownId,
    /// A job has its unique key. Nothing was changed.
    Duplicate,
    /// The waiting job that has its unique key has its content now.
    Replaced,
    /// The waiting job that has its unique key has its date now, or the latest possible one.
    Postponed,
    /// The job that has its unique key was to be replaced or postponed, and has started. Nothing was changed.
    AlreadyStarted,
    /// It is enqueued and waits until the running job with its unique key is finished.
    RunsOnceMore,
}

impl Outcome {
    /// The outcome as one word, for programs.
    pub fn word(self) -> &'static str {
        match self {
            Self::New => "new",
            Self::KnownId => "known-id",
            Self::Duplicate => "duplicate",
            Self::Replaced => "replaced",
            Self::Postponed => "postponed",
            Self::AlreadyStarted => "already-started",
            Self::RunsOnceMore => "runs-once-more",
        }
    }
}

/// A job that is not enqueued yet. The enqueueing call reports every invalid setting before it sends anything.
#[derive(Clone, Debug)]
#[must_use = "a job does nothing until it is enqueued"]
pub struct NewJob {
    id: Option<JobId>,
    class: String,
    given: Result<Given, String>,
    group: String,
    priority: Priority,
    scheduled: Scheduled,
    tags: Vec<String>,
    urn: Option<String>,
    retry_policy: StoredPolicy,
    policy_problem: Option<InvalidPolicy>,
    keep: Keep,
    limits: Vec<String>,
    line: Option<String>,
    halt_on_failure: bool,
    unique: Option<Unique>,
    expires: Option<Expires>,
    recovered_from: Option<JobId>,
    schedule: Option<Document>,
    waits_for: Vec<Edge>,
    graph: Option<GraphId>,
    /// The id that the job gets if the application gives none.
    made_id: Option<JobId>,
}

#[derive(Clone, Copy, Debug)]
enum Expires {
    At(Instant),
    After(Duration),
}

/// The content of the workable.
#[derive(Clone, Debug)]
enum Given {
    Parameters(Bson),
    /// The parameters of each item of a bundle.
    Items(Vec<Bson>),
}

#[derive(Clone, Copy, Debug)]
enum Scheduled {
    Now,
    At(Instant),
    After(Duration),
}

/// Why a job was not enqueued.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EnqueueError {
    /// The parameters cannot be represented in BSON.
    #[error("the parameters of a `{class}` job cannot be stored: {reason}")]
    Parameters {
        /// Class of the job.
        class: String,
        /// The error of serde or BSON.
        reason: String,
    },
    /// The job is larger than the limit.
    #[error(
        "a `{class}` job would have {bytes} bytes, more than the maximum of {LARGEST_WORKABLE}: store the data elsewhere and enqueue a reference to it"
    )]
    TooLarge {
        /// Class of the job.
        class: String,
        /// Size of the part that is too large, in bytes of BSON.
        bytes: usize,
    },
    /// A bundle without items.
    #[error("a bundle of `{class}` has no items: give 1 to {MOST_ITEMS}")]
    NoItems {
        /// Class of the items.
        class: String,
    },
    /// A bundle with too many items.
    #[error("a bundle of `{class}` has more than {MOST_ITEMS} items: divide them among several bundles")]
    TooManyItems {
        /// Class of the items.
        class: String,
    },
    /// An invalid class, group, tag or urn.
    #[error("the {what} of a job {problem}")]
    Name {
        /// The name of the field.
        what: &'static str,
        /// The problem with its value.
        problem: String,
    },
    /// An invalid resource.
    #[error("the job cannot be limited: {problem}")]
    Limit {
        /// The problem with its name.
        problem: InvalidSetting,
    },
    /// A date that some programming languages cannot read.
    #[error("the job would be due outside of the years 1 to 9999: give an earlier date or a shorter delay")]
    Date,
    /// The job would expire before it is due.
    #[error("the job would expire before it is due: give a later `expires_at`, or an earlier due date")]
    ExpiresTooEarly,
    /// An expiry that some programming languages cannot read.
    #[error("the job would expire outside of the years 1 to 9999: give an earlier date or a shorter time")]
    ExpiryDate,
    /// The job cannot be unique in this way.
    #[error("a `{class}` job cannot be unique: {problem}")]
    Unique {
        /// Class of the job.
        class: String,
        /// The problem.
        problem: InvalidUnique,
    },
    /// Whenever the job was to be enqueued, another one had its unique key, and that one was finished when it was looked up.
    #[error("the unique key `{key}` was taken and freed again at each attempt: repeat the call")]
    KeyKeepsChanging {
        /// The key.
        key: String,
    },
    /// The group has as many waiting jobs as it may have.
    #[error(
        "group `{group}` accepts at most {most_waiting} waiting jobs: wait until workers have run some, enqueue fewer at once, or raise the limit with `recruiter groups set`"
    )]
    BacklogFull {
        /// The group.
        group: String,
        /// Its limit.
        most_waiting: u64,
    },
    /// The database has the schema of an earlier release, whose indexes do not make jobs unique.
    #[error(
        "database `{database}` is set up by an earlier release, which cannot make jobs unique: start a process of this release on it once"
    )]
    NotSetUpForUnique {
        /// The database.
        database: String,
    },
    /// The parameters of a built-in retry policy are invalid or unknown.
    #[error("the retry policy of a `{class}` job cannot be used: {problem}")]
    Policy {
        /// Class of the job.
        class: String,
        /// The problem with the policy.
        problem: InvalidPolicy,
    },
    /// The database has no schema. A store on the application's own client creates one only on request.
    #[error("database `{database}` is not set up for jobs: call Store::ensure_schema, or start `recruiter run` on it once")]
    NotSetUp {
        /// The database.
        database: String,
    },
    /// The database has the schema of an earlier release, or no job has waited for another one yet: its indexes are missing, and cannot be
    /// made in a transaction.
    #[error(
        "database `{database}` has no indexes for jobs that wait for others yet: call Store::prepare_graphs once, outside of a transaction"
    )]
    NotSetUpForGraphs {
        /// The database.
        database: String,
    },
    /// The jobs cannot wait for each other in this way.
    #[error(transparent)]
    Graph(#[from] InvalidGraph),
    /// An error of MongoDB.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Allows enqueueing in `StartTransaction::and_run2`: the driver gets back its own error with its labels, and repeats
/// the transaction when the labels say so.
impl From<EnqueueError> for mongodb::error::Error {
    fn from(error: EnqueueError) -> Self {
        if let EnqueueError::Store(StoreError::Mongo { source, .. }) = &error {
            return Self::clone(source);
        }
        Self::custom(error)
    }
}

impl NewJob {
    /// A job of this class with these parameters. For classes that are not Rust types: programs, other languages.
    pub fn of_class(class: impl Into<String>, parameters: Document) -> Self {
        Self::of(class, Ok(Bson::Document(parameters)))
    }

    /// One job with many small items of one class, at most [`MOST_ITEMS`]. One worker executes the items one after the
    /// other. The outcome of each item is stored separately, and an item whose outcome is stored is not run again after
    /// a crash. Only failed items are retried, as the retry policy decides for their failures.
    pub fn bundle<W: Workable>(items: impl IntoIterator<Item = W>) -> Self {
        let items = items.into_iter().map(|item| bson::serialize_to_bson(&item).map_err(|error| of_bson(&error)));
        Self::of_items(W::CLASS, items).with(W::defaults())
    }

    /// Like [`bundle`](Self::bundle), for classes that are not Rust types, with the parameters of each item.
    pub fn bundle_of_class(class: impl Into<String>, items: impl IntoIterator<Item = Document>) -> Self {
        Self::of_items(class, items.into_iter().map(|item| Ok(Bson::Document(item))))
    }

    fn of_items(class: impl Into<String>, items: impl Iterator<Item = Result<Bson, String>>) -> Self {
        // One item above the limit is enough to detect too many items.
        let items = items
            .take(MOST_ITEMS + 1)
            .enumerate()
            .map(|(index, item)| item.and_then(document_or_nothing).map_err(|reason| format!("item {index}: {reason}")));
        Self { given: items.collect::<Result<_, _>>().map(Given::Items), ..Self::of(class, Ok(Bson::Null)) }
    }

    fn of(class: impl Into<String>, parameters: Result<Bson, String>) -> Self {
        Self {
            id: None,
            class: class.into(),
            given: parameters.map(Given::Parameters),
            group: DEFAULT_GROUP.into(),
            priority: Priority::default(),
            scheduled: Scheduled::Now,
            tags: Vec::new(),
            urn: None,
            retry_policy: StoredPolicy::from(&DoNotDoItAgain as &dyn RetryPolicy),
            policy_problem: None,
            keep: Keep::default(),
            limits: Vec::new(),
            line: None,
            halt_on_failure: false,
            unique: None,
            expires: None,
            recovered_from: None,
            schedule: None,
            waits_for: Vec::new(),
            graph: None,
            made_id: None,
        }
    }

    fn with(mut self, defaults: Defaults) -> Self {
        if let Some(group) = defaults.group {
            self.group = group;
        }
        if let Some(priority) = defaults.priority {
            self.priority = priority;
        }
        if let Some(keep) = defaults.keep {
            self.keep = keep;
        }
        match defaults.retry {
            Some(policy) => self.retry(policy),
            None => self,
        }
    }

    /// Sets the id, so that a call with an unknown outcome can be repeated: a job whose id is already scheduled or
    /// archived is not enqueued a second time. Of a job with [`Keep::Failures`] that has succeeded, nothing remains: it is enqueued again.
    pub fn with_id(mut self, id: JobId) -> Self {
        self.id = Some(id);
        self
    }

    /// Sets the group: only workers that work on it get the job. Default: the group of its class, or `generic`.
    pub fn in_group(mut self, group: impl Into<String>) -> Self {
        self.group = group.into();
        self
    }

    /// Sets when the job is due, by the server's clock.
    pub fn at(mut self, at: Instant) -> Self {
        self.scheduled = Scheduled::At(at);
        self
    }

    /// Sets how long after it is enqueued the job is due.
    pub fn after(mut self, delay: Duration) -> Self {
        self.scheduled = Scheduled::After(delay);
        self
    }

    /// Sets the priority. Default: the priority of its class, or 5.
    pub fn priority(mut self, priority: Priority) -> Self {
        self.priority = priority;
        self
    }

    /// Adds a label.
    pub fn tag(mut self, tag: impl Into<String>) -> Self {
        self.tags.push(tag.into());
        self
    }

    /// Sets a name in the application's own terms. It need not be unique.
    pub fn urn(mut self, urn: impl Into<String>) -> Self {
        self.urn = Some(urn.into());
        self
    }

    /// Sets the retry policy, which decides what follows a failure. Default: the policy of its class, or
    /// [`DoNotDoItAgain`].
    pub fn retry(mut self, policy: impl Into<Retry>) -> Self {
        match policy.into().0 {
            Ok(policy) => (self.retry_policy, self.policy_problem) = (policy, None),
            Err(problem) => self.policy_problem = Some(problem),
        }
        self
    }

    /// Sets the retry policy in its stored form. A built-in policy with invalid or unknown parameters is refused. A
    /// policy that is not built in is accepted, because workers may know it.
    pub fn retry_stored(mut self, policy: StoredPolicy) -> Self {
        self.policy_problem = RetryPolicies::default().check(&policy).err().filter(|problem| problem.unknown_class().is_none());
        self.retry_policy = policy;
        self
    }

    /// Sets what is kept of the job after its end. Default: the choice of its class, or [`Keep::All`]. With [`Keep::Failures`] nothing is
    /// kept of a success.
    pub fn keep(mut self, keep: Keep) -> Self {
        self.keep = keep;
        self
    }

    /// Adds a resource that the job needs, for example `printer` or `customer:17`. No more jobs with it run at a time, and they start no more
    /// often, than its limit allows ([`limits`](crate::limits)). A job whose resource has no limit yet waits for one.
    pub fn limit(mut self, resource: impl Into<String>) -> Self {
        self.limits.push(resource.into());
        self
    }

    /// Puts the job into a line: jobs with the same key run one after the other, in the order in which they were enqueued. A job that is
    /// delayed or retried keeps its place, and those behind it wait until it is finished. A job in a line cannot have other limits, except
    /// that of its group.
    pub fn in_line(mut self, key: impl Into<String>) -> Self {
        self.line = Some(key.into());
        self
    }

    /// Halts the line of the job if the job fails for the last time: the jobs behind it wait until an operator resumes the line. By default the
    /// line goes on.
    pub fn halt_on_failure(mut self) -> Self {
        self.halt_on_failure = true;
        self
    }

    /// Makes the job unique: while a job with the same key exists, another one is not enqueued.
    pub fn unique(mut self, unique: Unique) -> Self {
        self.unique = Some(unique);
        self
    }

    /// Sets when the job expires, by the server's clock. A job that has not started by then is archived as `expired`. It must be later than
    /// the due date.
    pub fn expires_at(mut self, at: Instant) -> Self {
        self.expires = Some(Expires::At(at));
        self
    }

    /// Sets how long after it is enqueued the job expires. A job that has not started by then is archived as `expired`. It must be longer
    /// than the delay of the job.
    pub fn expires_after(mut self, time: Duration) -> Self {
        self.expires = Some(Expires::After(time));
        self
    }

    /// Sets the archived job that this one repeats. The new document names it. The retry policy is accepted without
    /// validation.
    pub fn recovered_from(mut self, job: JobId) -> Self {
        self.recovered_from = Some(job);
        self
    }

    /// Makes the job wait until another one is done. If that one ends in any other way, this job is cancelled
    /// ([`graphs`]).
    pub fn waits_for(self, job: JobId) -> Self {
        self.waits_for_all([Edge { job, when: When::Done }])
    }

    /// Makes the job wait for the ends of other jobs. The results of those jobs are its inputs, in this order.
    pub fn waits_for_all(mut self, jobs: impl IntoIterator<Item = impl Into<Edge>>) -> Self {
        self.waits_for.extend(jobs.into_iter().map(Into::into));
        self
    }

    /// Makes the job part of a graph, for example that of the job that enqueues it.
    pub fn in_graph(mut self, graph: GraphId) -> Self {
        self.graph = Some(graph);
        self
    }

    /// Sets the id that the job gets if the application has given none.
    pub(crate) fn made_as(mut self, id: JobId) -> Self {
        self.made_id = Some(id);
        self
    }

    pub(crate) fn has_own_id(&self) -> bool {
        self.id.is_some()
    }

    pub(crate) fn is_unique(&self) -> bool {
        self.unique.is_some()
    }

    /// The id that the job will have.
    pub(crate) fn fix_id(&mut self) -> JobId {
        self.id.unwrap_or_else(|| *self.made_id.get_or_insert_with(JobId::new))
    }

    /// Sets the run of a schedule that this job is. The document names it.
    pub(crate) fn of_schedule(mut self, run: Document) -> Self {
        self.schedule = Some(run);
        self
    }

    /// Whether it has no id, no date, no unique key and no expiry of its own, so that a schedule can enqueue it again and again.
    pub(crate) fn is_repeatable(&self) -> bool {
        let is_plain = self.unique.is_none() && self.expires.is_none() && self.waits_for.is_empty() && self.graph.is_none();
        is_plain && self.id.is_none() && self.recovered_from.is_none() && matches!(self.scheduled, Scheduled::Now)
    }

    /// What is kept of it after its end.
    pub fn kept(&self) -> Keep {
        self.keep
    }

    /// The class and the group, which decide which workers get the job.
    pub fn class_and_group(&self) -> (&str, &str) {
        (&self.class, &self.group)
    }

    /// Enqueues the job. Returns when a majority of the replica set has it.
    ///
    /// # Errors
    /// [`EnqueueError`]. After a [`StoreError`] the outcome may be unknown: repeat the call under [`NewJob::with_id`].
    pub async fn enqueue(self, store: &Store) -> Result<Enqueued, EnqueueError> {
        Ok(store.enqueue_many([self]).await?[0])
    }

    /// Enqueues the job in the caller's transaction, in a session of [`Store::start_session`]. Call [`Store::announce_jobs`] after the
    /// commit to notify the workers. Without that call the job is found by polling.
    ///
    /// # Errors
    /// [`EnqueueError`]. The caller must then abort the transaction. In `and_run2` the driver wraps the error: `get_custom::<EnqueueError>()`
    /// of the driver's error returns it. [`StoreError::NoTransaction`] if the session has no transaction open.
    pub async fn enqueue_in(self, store: &Store, session: &mut ClientSession) -> Result<Enqueued, EnqueueError> {
        Ok(store.enqueue_many_in(session, [self]).await?[0])
    }

    /// Validates the job and returns its document.
    pub(crate) fn into_document(self, now: Instant) -> Result<(JobId, Document), EnqueueError> {
        self.into_keyed_document(now).map(|(id, document, _)| (id, document))
    }

    /// Validates the job and returns its document, and its key if it is unique.
    fn into_keyed_document(self, now: Instant) -> Result<(JobId, Document, Option<Keyed>), EnqueueError> {
        let names = [("class", &self.class), ("group", &self.group)];
        let names = names.into_iter().chain(self.tags.iter().map(|tag| ("tag", tag))).chain(self.urn.iter().map(|urn| ("urn", urn)));
        for (what, name) in names {
            check_name(name).map_err(|problem| EnqueueError::Name { what, problem })?;
        }
        let limit = |name: &String| check_resource(name).map_err(|problem| EnqueueError::Limit { problem });
        self.limits.iter().try_for_each(limit)?;
        let gate = match &self.line {
            Some(_) if !self.limits.is_empty() => {
                let problem = "a job in a line cannot name resources as well: limit its group, or leave the line out";
                return Err(EnqueueError::Limit { problem: InvalidSetting(problem.into()) });
            }
            Some(key) => {
                check_resource(key).map_err(|problem| EnqueueError::Limit { problem })?;
                Some(gate_of_line(key))
            }
            None if self.halt_on_failure => {
                return Err(EnqueueError::Limit { problem: InvalidSetting("only a job in a line can halt one: name its line".into()) });
            }
            None => gate_of(self.limits.iter().map(String::as_str)),
        };
        if let Some(gate) = gate.as_ref().filter(|gate| gate.len() > LONGEST_GATE) {
            let problem =
                format!("the names of all resources of a job must have at most {LONGEST_GATE} bytes together, not {}", gate.len());
            return Err(EnqueueError::Limit { problem: InvalidSetting(problem) });
        }
        if let (Some(problem), None) = (self.policy_problem, self.recovered_from) {
            return Err(EnqueueError::Policy { class: self.class, problem });
        }
        let unstorable = |reason: String| EnqueueError::Parameters { class: self.class.clone(), reason };
        let later = |delay: Duration| chrono::TimeDelta::from_std(delay).ok().and_then(|delay| now.checked_add_signed(delay));
        let at = match self.scheduled {
            Scheduled::Now => Some(now),
            Scheduled::At(at) => Some(at),
            Scheduled::After(delay) => later(delay),
        };
        let at = at.filter(|at| DUE_MS.contains(&at.timestamp_millis())).ok_or(EnqueueError::Date)?;
        let expires_at = match self.expires {
            None => None,
            Some(Expires::At(at)) => Some(Some(at)),
            Some(Expires::After(time)) => Some(later(time)),
        };
        let expires_at = expires_at.map(|at| at.filter(|at| DUE_MS.contains(&at.timestamp_millis())).ok_or(EnqueueError::ExpiryDate));
        let expires_at = expires_at.transpose()?;
        if expires_at.is_some_and(|expires_at| expires_at.timestamp_millis() <= at.timestamp_millis()) {
            return Err(EnqueueError::ExpiresTooEarly);
        }
        let given = self.given.map_err(unstorable)?;
        let keyed = self.unique.map(|unique| {
            let content = match &given {
                Given::Parameters(parameters) => Content::Parameters(parameters),
                Given::Items(items) => Content::Items(items),
            };
            unique.validated(&self.class, &content, (at - now).to_std().unwrap_or_default())
        });
        let keyed = keyed.transpose().map_err(|problem| EnqueueError::Unique { class: self.class.clone(), problem })?;
        let (workable, outcomes) = match given {
            Given::Parameters(parameters) => {
                let parameters = document_or_nothing(parameters).map_err(unstorable)?;
                (doc! { "class": &self.class, "parameters": parameters, "method": "execute" }, None)
            }
            Given::Items(items) if items.is_empty() => return Err(EnqueueError::NoItems { class: self.class }),
            Given::Items(items) if items.len() > MOST_ITEMS => return Err(EnqueueError::TooManyItems { class: self.class }),
            Given::Items(items) => (doc! { "class": &self.class, "items": items, "method": "execute" }, Some(Bson::Array(Vec::new()))),
        };
        let bytes = workable.to_vec().map_err(|error| unstorable(of_bson(&error)))?.len();
        if bytes > LARGEST_WORKABLE {
            return Err(EnqueueError::TooLarge { class: self.class, bytes });
        }
        let (is_sent_once, id, class) = (self.id.is_none(), self.id.or(self.made_id).unwrap_or_else(JobId::new), self.class);
        let mut document = doc! {
            "_id": id,
            "done": false,
            "created_at": bson::DateTime::from_chrono(now),
            "locked": false,
            "attempts": 0,
            "group": self.group,
            "priority": self.priority,
            "workable": workable,
            "scheduled_at": bson::DateTime::from_chrono(at),
            "retry_policy": { "class": self.retry_policy.class, "parameters": self.retry_policy.parameters },
        };
        if is_sent_once {
            document.insert("once", true);
        }
        if let Some(keyed) = &keyed {
            document.insert(keyed.scope.field(), &keyed.key);
        }
        if let Some(expires_at) = expires_at {
            document.insert("expires_at", bson::DateTime::from_chrono(expires_at));
        }
        if let Some(keep) = self.keep.stored() {
            document.insert("keep", keep);
        }
        if let Some(gate) = gate {
            document.insert("gate", gate);
        }
        if self.halt_on_failure {
            document.insert("halt_on_failure", true);
        }
        if let Some(outcomes) = outcomes {
            document.insert("item_outcomes", outcomes);
        }
        if !self.tags.is_empty() {
            document.insert("tags", self.tags);
        }
        if let Some(urn) = self.urn {
            document.insert("urn", urn);
        }
        if let Some(job) = self.recovered_from {
            document.insert("recovered_from", job);
        }
        if let Some(run) = self.schedule {
            document.insert("schedule", run);
        }
        if let Some(graph) = self.graph {
            document.insert("graph", graph);
        }
        if !self.waits_for.is_empty() {
            graphs::make_wait(&mut document, &self.waits_for, at, now);
        }
        // The size includes tags and policy: the rest of the document needs room for the history and the result.
        match document.to_vec().map_err(|error| EnqueueError::Parameters { class: class.clone(), reason: of_bson(&error) })?.len() {
            bytes if bytes > LARGEST_WORKABLE + ROOM_FOR_THE_REST => Err(EnqueueError::TooLarge { class, bytes }),
            _ => Ok((id, document, keyed)),
        }
    }
}

/// Parameters in their stored form. A unit struct has none.
fn document_or_nothing(parameters: Bson) -> Result<Bson, String> {
    if parameters == Bson::Null {
        Ok(Bson::Document(doc! {}))
    } else if parameters.as_document().is_some() {
        Ok(parameters)
    } else {
        Err(format!("they must be a struct or a map, not {:?}", parameters.element_type()))
    }
}

pub(crate) fn check_name(name: &str) -> Result<(), String> {
    if name.is_empty() {
        Err("is empty".into())
    } else if name.len() > LONGEST_NAME {
        Err(format!("has {} bytes, and {LONGEST_NAME} is the limit", name.len()))
    } else if name.contains('\0') {
        Err(format!("contains a NUL character: {name:?}"))
    } else {
        Ok(())
    }
}

impl Store {
    /// Enqueues many jobs. Returns when a majority has all of them, with one result per job in the same order.
    ///
    /// All jobs are validated before the first is sent. A job whose id exists already is left unchanged.
    ///
    /// # Errors
    /// [`EnqueueError`]. After a [`StoreError`] some jobs may have been enqueued: repeat all of them under
    /// [`NewJob::with_id`].
    pub async fn enqueue_many(&self, jobs: impl IntoIterator<Item = NewJob>) -> Result<Vec<Enqueued>, EnqueueError> {
        self.ready_to_enqueue().await?;
        let prepared = Prepared::from_jobs(jobs, self.clock.now_in_order())?;
        self.admit(&prepared.groups).await?;
        if prepared.expires {
            self.prepare_expiring_jobs().await?;
        }
        if prepared.is_graph {
            return self.enqueue_graph(prepared).await;
        }
        if !prepared.keyed.is_empty() {
            return self.enqueue_keyed(prepared).await;
        }
        let groups: Vec<String> = prepared.groups.into_keys().collect();
        let mut documents = prepared.documents;
        let mut known = HashSet::new();
        if !prepared.resent.is_empty() {
            for some in prepared.resent.chunks(IDS_PER_QUERY) {
                known.extend(self.already_archived(some).await?);
            }
            documents.retain(|document| !crate::store::id_of(document).is_some_and(|id| known.contains(&id)));
        }
        let early = documents.len() <= ANNOUNCED_EARLY;
        let jobs = documents.iter().filter(|_| early && prepared.at.is_none()).filter_map(ScheduledJob::of_document).collect();
        let again = Hint::Jobs { groups: groups.clone(), at: prepared.at, jobs: Vec::new() };
        let hint = Hint::Jobs { groups, at: prepared.at, jobs };
        let insert = async {
            known.extend(self.insert_jobs(documents).await?);
            Ok::<_, StoreError>(known)
        };
        if early {
            // The notification reaches the workers while MongoDB waits for its journal.
            let announce = async {
                self.announce_hint(hint).await;
                std::time::Instant::now()
            };
            let (inserted, announced) = tokio::join!(insert, announce);
            known = inserted?;
            if announced.elapsed() > TOO_EARLY {
                self.announce_hint(again).await;
            }
        } else {
            known = insert.await?;
            self.announce_hint(hint).await;
        }
        Ok(prepared.ids.into_iter().map(|id| enqueued(id, &known)).collect())
    }

    /// Like [`enqueue_many`](Self::enqueue_many), but waits while a group has as many waiting jobs as it may have
    /// ([`set_most_waiting`](Self::set_most_waiting)). The jobs are enqueued together, so there must be room for all of them.
    ///
    /// # Errors
    /// [`EnqueueError`]; [`EnqueueError::BacklogFull`] if there is no room within the timeout, or if the limit is lower than the number of
    /// jobs.
    pub async fn enqueue_when_room(
        &self,
        jobs: impl IntoIterator<Item = NewJob>,
        timeout: Duration,
    ) -> Result<Vec<Enqueued>, EnqueueError> {
        let jobs: Vec<NewJob> = jobs.into_iter().collect();
        let mut patience = Patience::new(timeout);
        loop {
            match self.enqueue_many(jobs.iter().cloned()).await {
                Err(EnqueueError::BacklogFull { group, most_waiting }) => {
                    let of_group = jobs.iter().filter(|job| job.group == group).count() as u64;
                    if of_group > most_waiting || !patience.wait().await {
                        return Err(EnqueueError::BacklogFull { group, most_waiting });
                    }
                }
                done => return done,
            }
        }
    }

    /// Enqueues many jobs in the caller's session and transaction. See [`NewJob::enqueue_in`].
    ///
    /// # Errors
    /// See [`NewJob::enqueue_in`].
    pub async fn enqueue_many_in(
        &self,
        session: &mut ClientSession,
        jobs: impl IntoIterator<Item = NewJob>,
    ) -> Result<Vec<Enqueued>, EnqueueError> {
        self.ready_to_enqueue().await?;
        let prepared = Prepared::from_jobs(jobs, self.clock.now_in_order())?;
        self.admit(&prepared.groups).await?;
        if prepared.is_graph {
            return self.enqueue_graph_in(session, prepared).await;
        }
        if !prepared.keyed.is_empty() {
            return self.enqueue_keyed_in(session, prepared).await;
        }
        let known = self.insert_jobs_in(session, prepared.documents, &prepared.resent).await?;
        Ok(prepared.ids.into_iter().map(|id| enqueued(id, &known)).collect())
    }

    /// Checks before an insert that the schema exists: an insert would create a missing collection without a validator.
    async fn ready_to_enqueue(&self) -> Result<(), EnqueueError> {
        if !self.is_set_up().await? {
            return Err(EnqueueError::NotSetUp { database: self.database().name().into() });
        }
        Ok(self.fresh_clock().await?)
    }

    /// Notifies the recruiter that jobs of these groups were committed. Without this call the jobs are found by
    /// polling.
    pub async fn announce_jobs(&self, groups: impl IntoIterator<Item = impl Into<String>>) {
        self.announce_hint(Hint::jobs_in(groups)).await;
    }
}

fn enqueued(id: JobId, known: &HashSet<JobId>) -> Enqueued {
    // Only a job with an id given by the application can exist already.
    Enqueued::new(id, if !known.is_empty() && known.contains(&id) { Outcome::KnownId } else { Outcome::New })
}

/// Validated jobs, ready to be sent.
struct Prepared {
    ids: Vec<JobId>,
    documents: Vec<Document>,
    /// Ids that the application has given.
    resent: Vec<JobId>,
    /// The unique keys, by the index of their job.
    keyed: HashMap<usize, Keyed>,
    /// Whether one of them expires.
    expires: bool,
    /// Whether one of them waits for another job, or is part of a graph.
    is_graph: bool,
    /// The number of jobs in each group.
    groups: BTreeMap<String, u64>,
    /// When the earliest job is due; `None` if one is due now.
    at: Option<Instant>,
}

impl Prepared {
    fn from_jobs(jobs: impl IntoIterator<Item = NewJob>, now: Instant) -> Result<Self, EnqueueError> {
        let (mut ids, mut documents, mut resent) = (Vec::new(), Vec::new(), Vec::new());
        let (mut keyed, mut groups) = (HashMap::new(), BTreeMap::new());
        let (mut first, mut expires, mut is_graph): (Option<Instant>, bool, bool) = (None, false, false);
        for job in jobs {
            expires |= job.expires.is_some();
            is_graph |= !job.waits_for.is_empty() || job.graph.is_some();
            resent.extend(job.id);
            match groups.get_mut(&job.group) {
                Some(count) => *count += 1,
                None => drop(groups.insert(job.group.clone(), 1)),
            }
            let (id, document, key) = job.into_keyed_document(now)?;
            keyed.extend(key.map(|key| (ids.len(), key)));
            let at = document.get_datetime("scheduled_at").map_or(now, |at| at.to_chrono());
            first = Some(first.map_or(at, |first| first.min(at)));
            ids.push(id);
            documents.push(document);
        }
        if is_graph {
            graphs::connect(&mut documents)?;
        }
        Ok(Self { ids, documents, resent, keyed, expires, is_graph, groups, at: first.filter(|at| *at > now) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(job: NewJob) -> Result<Document, String> {
        job.into_document(Instant::default()).map(|(_, document)| document).map_err(|error| error.to_string())
    }

    #[test]
    fn hostile_names_are_stored_or_refused_and_never_cut() {
        for name in ["$where", "a.b", "ünï", "'; drop", "x".repeat(LONGEST_NAME).as_str()] {
            let document = check(NewJob::of_class(name, doc! {}).in_group(name).tag(name).urn(name)).expect("a name as good as any");
            assert_eq!(document.get_str("group").expect("a text"), name);
        }
        for (name, problem) in [("", "is empty"), ("a\0b", "contains a NUL"), ("x".repeat(10_000).as_str(), "has 10000 bytes")] {
            for job in
                [NewJob::of_class(name, doc! {}), NewJob::of_class("a", doc! {}).in_group(name), NewJob::of_class("a", doc! {}).tag(name)]
            {
                assert!(check(job).is_err_and(|error| error.contains(problem)), "{problem}");
            }
        }
    }

    #[test]
    fn a_payload_over_the_limit_is_refused_before_it_is_sent() {
        let of = |bytes: usize| check(NewJob::of_class("a", doc! { "data": "x".repeat(bytes) }));
        assert!(of(LARGEST_WORKABLE - 200).is_ok());
        assert!(of(LARGEST_WORKABLE).is_err_and(|error| error.contains("store the data elsewhere")));
    }

    #[test]
    fn so_is_whatever_else_is_too_large() {
        let tags =
            |count: usize| check((0..count).fold(NewJob::of_class("a", doc! {}), |job, n| job.tag(format!("{n}{}", "x".repeat(200)))));
        assert!(tags(100).is_ok());
        assert!(tags(30_000).is_err_and(|error| error.contains("store the data elsewhere")));
    }

    #[test]
    fn a_job_is_due_in_a_year_of_four_digits() {
        let at = |ms: i64| check(NewJob::of_class("a", doc! {}).at(Instant::from_timestamp_millis(ms).expect("a date")));
        for ms in [*DUE_MS.start(), *DUE_MS.end()] {
            assert!(at(ms).is_ok());
        }
        for ms in [DUE_MS.start() - 1, DUE_MS.end() + 1] {
            assert!(at(ms).is_err_and(|error| error.contains("years 1 to 9999")));
        }
        assert!(check(NewJob::of_class("a", doc! {}).after(Duration::MAX)).is_err_and(|error| error.contains("years 1 to 9999")));
    }

    #[test]
    fn a_misspelt_parameter_of_a_policy_is_refused_but_for_a_job_that_had_it_before() {
        let policy =
            |class: &str| StoredPolicy { class: class.into(), parameters: doc! { "seconds_to_wait_before_retry": 1, "jiter": 0.1 }.into() };
        let job = |class: &str| NewJob::of_class("a", doc! {}).retry_stored(policy(class));
        assert!(check(job("RetryForever")).is_err_and(|error| error.contains("`jiter` is unknown")));
        assert!(check(job("RetryForever").recovered_from(JobId::new())).is_ok());
        assert!(check(job("OneOfTheirOwn")).is_ok());
        assert!(check(job("RetryForever").retry(&DoNotDoItAgain)).is_ok());
        let impossible = crate::retry_policy::ExponentialBackoff::new(0, Duration::ZERO);
        assert!(impossible.is_err() && check(NewJob::of_class("a", doc! {}).retry(impossible)).is_err());
    }

    #[test]
    fn parameters_must_be_a_document() {
        let of = |parameters: Bson| check(NewJob::of("a", Ok(parameters)));
        assert!(of(Bson::Null).is_ok());
        assert!(of(Bson::Int32(1)).is_err_and(|error| error.contains("must be a struct or a map")));
    }

    #[test]
    fn a_bundle_has_some_items_and_not_too_many_or_too_large_ones() {
        let of = |count: usize, bytes: usize| check(NewJob::bundle_of_class("a", (0..count).map(|_| doc! { "data": "x".repeat(bytes) })));
        for count in [1, MOST_ITEMS] {
            let document = of(count, 10).expect("a bundle");
            let workable = document.get_document("workable").expect("a document");
            assert!(workable.get_array("items").is_ok_and(|items| items.len() == count));
            assert!(!workable.contains_key("parameters") && document.get_array("item_outcomes").is_ok_and(Vec::is_empty));
        }
        assert!(of(0, 10).is_err_and(|error| error.contains("no items")));
        assert!(of(MOST_ITEMS + 1, 10).is_err_and(|error| error.contains("more than 1000 items")));
        assert!(of(MOST_ITEMS, LARGEST_WORKABLE / MOST_ITEMS).is_err_and(|error| error.contains("store the data elsewhere")));
        let unsized_items = NewJob::of_items("a", std::iter::repeat_with(|| Ok(Bson::Document(doc! {}))));
        assert!(check(unsized_items).is_err_and(|error| error.contains("more than 1000 items")), "it does not look for the end");
        let number = NewJob::of_items("a", [Ok(Bson::Null), Ok(Bson::Int32(1))].into_iter());
        assert!(check(number).is_err_and(|error| error.contains("item 1: they must be a struct or a map")));
    }

    /// A class with default settings for its jobs.
    #[derive(Serialize, serde::Deserialize)]
    struct Invoice {}

    impl Workable for Invoice {
        const CLASS: &'static str = "Invoice";
        type Output = ();

        fn defaults() -> Defaults {
            let retry = crate::retry_policy::RetryManyTimes::new(3, Duration::from_secs(1));
            Defaults::default().group("invoices").priority(Priority::new(7).expect("in range")).retry(retry).keep(Keep::Failures)
        }
    }

    #[test]
    fn a_job_is_what_its_class_says_unless_it_says_otherwise() {
        let of = |document: Document| {
            let policy = document.get_document("retry_policy").and_then(|policy| policy.get_str("class")).map(str::to_owned);
            let (priority, keep) = (document.get_i32("priority").ok(), document.get_str("keep").map(str::to_owned));
            (document.get_str("group").map(str::to_owned).ok(), priority, policy.ok(), keep.ok())
        };
        let expected = |group: &str, priority, policy: &str, keep: Option<&str>| {
            (Some(group.to_owned()), Some(priority), Some(policy.to_owned()), keep.map(str::to_owned))
        };
        let of_class = expected("invoices", 7, "RetryManyTimes", Some("failures"));
        assert_eq!(of(check(Invoice {}.as_job()).expect("a job")), of_class);
        assert_eq!(of(check(NewJob::bundle([Invoice {}])).expect("a job")), of_class);
        let other = Invoice {}.as_job().in_group("x").priority(Priority::default()).retry(&DoNotDoItAgain).keep(Keep::All);
        assert_eq!(of(check(other).expect("a job")), expected("x", 5, "DoNotDoItAgain", None));
    }
}
