//! Why a schedule is invalid, and why a change of it failed.

use std::time::Duration;

use crate::{
    enqueue::EnqueueError,
    mongo::{StoreError, schema::MOST_MISSED},
};

/// Why a schedule is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the fields are")]
#[non_exhaustive]
pub enum InvalidSchedule {
    /// The document has bytes that are no UTF-8, or is damaged.
    #[error("its document cannot be decoded ({reason}): write it again")]
    Undecodable { reason: String },
    /// The cron expression cannot be read.
    #[error("`{expression}` is not a cron expression: {reason}")]
    Cron { expression: String, reason: String },
    /// No date fits the cron expression.
    #[error("`{expression}` never runs: no date fits all of its fields")]
    NeverRuns { expression: String },
    /// No such time zone.
    #[error("there is no zone `{zone}`; {}", similar.map_or_else(|| "write an IANA name like Europe/Berlin or UTC".to_owned(), |similar| format!("did you mean `{similar}`?")))]
    Zone { zone: String, similar: Option<&'static str> },
    /// The interval is too short, too long, or not of whole milliseconds.
    #[error("an interval of {} is not possible: give whole milliseconds, from 1s to 1000 years", humantime::format_duration(*interval))]
    Interval { interval: Duration },
    /// The jitter is longer than the time between two runs, or not of whole milliseconds.
    #[error(
        "a jitter of {} is not possible: give whole milliseconds, at most the shortest time between two runs, {}",
        humantime::format_duration(*jitter), humantime::format_duration(*shortest)
    )]
    Jitter { jitter: Duration, shortest: Duration },
    /// The maximum of missed runs is out of range.
    #[error("a maximum of {limit} missed runs is not possible: give 1 to {MOST_MISSED}")]
    Limit { limit: u16 },
    /// A maximum without `all`.
    #[error("`missed_limit` needs `missed = \"all\"`")]
    LimitWithoutAll,
    /// Runs that must not overlap cannot all be made up for.
    #[error(
        "`overlap = \"skip\"` and `missed = \"all\"` exclude each other: the first missed run would make the others overlap; use `missed = \"one\"`"
    )]
    Contradiction,
    /// An unknown word.
    #[error("`{what}` is `{word}`; it must be {known}")]
    Word { what: &'static str, word: String, known: &'static str },
    /// There is neither a cron expression nor an interval, or both.
    #[error("a schedule has either `cron` or `every`: give exactly one of them")]
    NoTiming,
    /// The schedule has no job.
    #[error("the schedule has no job: say what it enqueues")]
    NoJob,
    /// The job has an id, a date, a unique key or an expiry of its own.
    #[error(
        "the job of a schedule cannot have an id, a date, a unique key or an expiry of its own: leave out `id`, `scheduled_at`, `after`, `unique`, `expires_at` and `expires_after`"
    )]
    NotRepeatable,
    /// The job cannot be enqueued.
    #[error("the job of the schedule cannot be enqueued: {reason}")]
    Job { reason: String },
    /// The name or namespace is invalid.
    #[error("the {what} of a schedule {problem}")]
    Name { what: &'static str, problem: String },
    /// A field of the document has the wrong type.
    #[error("its field `{field}` is not valid: it must be {expected}")]
    Field { field: String, expected: &'static str },
}

/// Why a schedule was not changed.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the fields are")]
#[non_exhaustive]
pub enum ScheduleError {
    /// The schedule is invalid.
    #[error(transparent)]
    Invalid(#[from] InvalidSchedule),
    /// There is no schedule with this name.
    #[error("there is no schedule `{name}`")]
    Unknown { name: String },
    /// The stored schedule is invalid.
    #[error("the schedule `{name}` is invalid: {problem}")]
    Corrupt { name: String, problem: InvalidSchedule },
    /// The schedule belongs to another namespace.
    #[error("the schedule `{name}` belongs to {}: choose another name, or remove it there first", of_namespace(owner.as_deref()))]
    Owned {
        name: String,
        /// The namespace; `None` if a program or a person has declared it without one.
        owner: Option<String>,
    },
    /// Others changed it between each read and write.
    #[error("the schedule `{name}` changed each time it was read; try again")]
    KeepsChanging { name: String },
    /// The job of a run could not be enqueued.
    #[error("the job of the schedule `{name}` was not enqueued")]
    Enqueue { name: String, source: EnqueueError },
    /// The database has no schema.
    #[error("database `{database}` is not set up for jobs: call Client::ensure_schema, or start `recruiter run` on it once")]
    NotSetUp { database: String },
    /// An error of MongoDB.
    #[error(transparent)]
    Store(#[from] StoreError),
}

fn of_namespace(namespace: Option<&str>) -> String {
    namespace.map_or_else(|| "no namespace".to_owned(), |namespace| format!("the namespace `{namespace}`"))
}
