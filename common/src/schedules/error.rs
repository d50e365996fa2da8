//! Why a schedule is invalid, and why a change of it failed.

use std::time::Duration;

use crate::{
    enqueue::EnqueueError,
    mongo::{StoreError, schema::MOST_MISSED},
};

/// Why a schedule is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidSchedule {
    /// The document has bytes that are no UTF-8, or is damaged.
    #[error("its document cannot be decoded ({reason}): write it again")]
    Undecodable {
        /// The problem with it.
        reason: String,
    },
    /// The cron expression cannot be read.
    #[error("`{expression}` is not a cron expression: {reason}")]
    Cron {
        /// The expression.
        expression: String,
        /// The problem with it.
        reason: String,
    },
    /// No date fits the cron expression.
    #[error("`{expression}` never runs: no date fits all of its fields")]
    NeverRuns {
        /// The expression.
        expression: String,
    },
    /// No such time zone.
    #[error("there is no zone `{zone}`; {}", similar.map_or_else(|| "write an IANA name like Europe/Berlin or UTC".to_owned(), |similar| format!("did you mean `{similar}`?")))]
    Zone {
        /// The name.
        zone: String,
        /// A zone with a similar name.
        similar: Option<&'static str>,
    },
    /// The interval is too short, too long, or not of whole milliseconds.
    #[error("an interval of {} is not possible: give whole milliseconds, from 1s to 1000 years", humantime::format_duration(*interval))]
    Interval {
        /// The interval.
        interval: Duration,
    },
    /// The jitter is longer than the time between two runs, or not of whole milliseconds.
    #[error(
        "a jitter of {} is not possible: give whole milliseconds, at most the shortest time between two runs, {}",
        humantime::format_duration(*jitter), humantime::format_duration(*shortest)
    )]
    Jitter {
        /// The jitter.
        jitter: Duration,
        /// The shortest time between two runs.
        shortest: Duration,
    },
    /// The maximum of missed runs is out of range.
    #[error("a maximum of {limit} missed runs is not possible: give 1 to {MOST_MISSED}")]
    Limit {
        /// The maximum.
        limit: u16,
    },
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
    Word {
        /// The setting.
        what: &'static str,
        /// Its value.
        word: String,
        /// The values that it can have.
        known: &'static str,
    },
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
    Job {
        /// The reason.
        reason: String,
    },
    /// The name or namespace is invalid.
    #[error("the {what} of a schedule {problem}")]
    Name {
        /// Whether it is the name or the namespace.
        what: &'static str,
        /// The problem with it.
        problem: String,
    },
    /// A field of the document has the wrong type.
    #[error("its field `{field}` is not valid: it must be {expected}")]
    Field {
        /// The field.
        field: String,
        /// The valid values.
        expected: &'static str,
    },
}

/// Why a schedule was not changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ScheduleError {
    /// The schedule is invalid.
    #[error(transparent)]
    Invalid(#[from] InvalidSchedule),
    /// There is no schedule with this name.
    #[error("there is no schedule `{name}`")]
    Unknown {
        /// The name.
        name: String,
    },
    /// The stored schedule is invalid.
    #[error("the schedule `{name}` is invalid: {problem}")]
    Corrupt {
        /// The name.
        name: String,
        /// The problem.
        problem: InvalidSchedule,
    },
    /// The schedule belongs to another namespace.
    #[error("the schedule `{name}` belongs to {}: choose another name, or remove it there first", of_namespace(owner.as_deref()))]
    Owned {
        /// The name.
        name: String,
        /// The namespace; `None` if a program or a person has declared it without one.
        owner: Option<String>,
    },
    /// Others changed it between each read and write.
    #[error("the schedule `{name}` changed each time it was read; try again")]
    KeepsChanging {
        /// The name.
        name: String,
    },
    /// The job of a run could not be enqueued.
    #[error("the job of the schedule `{name}` was not enqueued")]
    Enqueue {
        /// The name.
        name: String,
        /// The cause.
        source: EnqueueError,
    },
    /// The database has no schema.
    #[error("database `{database}` is not set up for jobs: call Store::ensure_schema, or start `recruiter run` on it once")]
    NotSetUp {
        /// The database.
        database: String,
    },
    /// An error of MongoDB.
    #[error(transparent)]
    Store(#[from] StoreError),
}

fn of_namespace(namespace: Option<&str>) -> String {
    namespace.map_or_else(|| "no namespace".to_owned(), |namespace| format!("the namespace `{namespace}`"))
}
