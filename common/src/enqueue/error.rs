//! Why a job was not enqueued.

use super::invalid_graph::InvalidGraph;
use crate::{
    job::MOST_ITEMS,
    limits::InvalidSetting,
    mongo::{LARGEST_WORKABLE, StoreError},
    retry_policy::InvalidPolicy,
    unique::InvalidUnique,
};

/// Why a job was not enqueued.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the fields are")]
#[non_exhaustive]
pub enum EnqueueError {
    /// The parameters cannot be represented in BSON.
    #[error("the parameters of a `{class}` job cannot be stored: {reason}")]
    Parameters { class: String, reason: String },
    /// The job is larger than the limit.
    #[error(
        "a `{class}` job would have {bytes} bytes, more than the maximum of {LARGEST_WORKABLE}: store the data elsewhere, for example in a file of the job (`Client::put_file`, `recruiter enqueue --file`), and enqueue a reference to it"
    )]
    TooLarge {
        class: String,
        /// Size of the part that is too large, in bytes of BSON.
        bytes: usize,
    },
    /// A bundle without items.
    #[error("a bundle of `{class}` has no items: give 1 to {MOST_ITEMS}")]
    NoItems { class: String },
    /// A bundle with too many items.
    #[error("a bundle of `{class}` has more than {MOST_ITEMS} items: divide them among several bundles")]
    TooManyItems { class: String },
    /// An invalid class, group, tag or urn.
    #[error("the {what} of a job {problem}")]
    Name { what: &'static str, problem: String },
    /// An invalid resource.
    #[error("the job cannot be limited: {problem}")]
    Limit { problem: InvalidSetting },
    /// A priority that does not exist.
    #[error("the priority of a job is a number from 0 to 9, not {number}")]
    Priority { number: i64 },
    /// A date that some programming languages cannot read.
    #[error("the job would be due outside of the years 1 to 9999: give another date")]
    Date,
    /// The job would expire before it is due.
    #[error("the job would expire before it is due: let it expire later, or be due earlier")]
    ExpiresTooEarly,
    /// An expiry that some programming languages cannot read.
    #[error("the job would expire outside of the years 1 to 9999: give another date")]
    ExpiryDate,
    /// The job cannot be unique in this way.
    #[error("a `{class}` job cannot be unique: {problem}")]
    Unique { class: String, problem: InvalidUnique },
    /// Whenever the job was to be enqueued, another one had its unique key, and that one was finished when it was looked up.
    #[error("the unique key `{key}` was taken and freed again at each attempt: repeat the call")]
    KeyKeepsChanging { key: String },
    /// The group has as many waiting jobs as it may have.
    #[error(
        "group `{group}` accepts at most {most_waiting} waiting jobs: wait until workers have run some, enqueue fewer at once, or raise the limit with `recruiter groups set`"
    )]
    BacklogFull { group: String, most_waiting: u64 },
    /// As many jobs wait for the resources as one of their limits allows.
    #[error(
        "at most {most_waiting} jobs may wait for `{gate}` by the limit `{limit}`: wait until workers have run some, enqueue fewer at once, or raise it with `recruiter limits set --most-waiting`"
    )]
    GateFull { gate: String, limit: String, most_waiting: u64 },
    /// The database has the schema of an earlier release, whose indexes do not make jobs unique.
    #[error(
        "database `{database}` is set up by an earlier release, which cannot make jobs unique: start a process of this release on it once"
    )]
    NotSetUpForUnique { database: String },
    /// The parameters of a built-in retry policy are invalid or unknown.
    #[error("the retry policy of a `{class}` job cannot be used: {problem}")]
    Policy { class: String, problem: InvalidPolicy },
    /// The database has no schema. A client on the application's own driver creates one only on request.
    #[error("database `{database}` is not set up for jobs: call Client::ensure_schema, or start `recruiter run` on it once")]
    NotSetUp { database: String },
    /// The database has the schema of an earlier release, or no job has waited for another one yet: its indexes are missing, and cannot be
    /// made in a transaction.
    #[error(
        "database `{database}` has no indexes for jobs that wait for others yet: call Client::prepare_graphs once, outside of a transaction"
    )]
    NotSetUpForGraphs { database: String },
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
