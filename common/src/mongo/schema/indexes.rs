//! The list of indexes, named after the operations they serve, and the features that have indexes of their own.

use bson::{Bson, Document, doc};

use crate::base::{DUE_MS, words};

/// The jobs without a gate. Serves `due_jobs`, `groups`, `waiting_lanes` and `lanes_of`. A start removes the index entry, so the later
/// delete changes less. The class precedes the dates, so a backlog that no worker can take is never scanned.
pub const DUE_JOBS: &str = "due_jobs";
/// The jobs with a gate. Serves `due_jobs`, `gated_groups` and `gated_lanes_of`. There are two indexes, because in one index with the gate
/// before the dates the jobs without a gate would not be a single range: MongoDB has separate entries for `null` and `undefined`.
pub const GATED_JOBS: &str = "gated_jobs";
/// The jobs in lines, locked or not, in their order. Serves `heads_of_lines`.
pub const LINES: &str = "lines";
/// The permits that workers hold: a second worker with the same permit is refused.
pub const HELD_PERMITS: &str = "held_permits";
/// Makes jobs unique until they are finished: an archived job leaves `scheduled`.
pub const UNIQUE: &str = "unique";
/// Makes jobs unique until their first start. A start counts in `attempts`, which never decreases, so it removes the index entry for good:
/// a retry cannot collide.
pub const UNIQUE_WHILE_WAITING: &str = "unique_while_waiting";
/// Makes the job unique that waits for the end of another one.
pub const UNIQUE_AFTER: &str = "unique_after";
/// The jobs that wait for others. Serves `waiting_jobs`.
pub const WAITING_JOBS: &str = "waiting_jobs";
/// The jobs of a graph, in `scheduled` and in `archived`. Serves `jobs_of_graph`.
pub const GRAPH_JOBS: &str = "graph_jobs";
/// Serves `expired_jobs`.
pub const EXPIRING_JOBS: &str = "expiring_jobs";
/// Deletes the keys whose period is over.
const EXPIRED_PERIODS: &str = "expired_periods";
/// Deletes messages whose time is over.
const EXPIRED_MESSAGES: &str = "expired_messages";
/// Deletes entries of the audit whose time is over.
const EXPIRED_AUDIT: &str = "expired_audit";
/// Serves `prune_archived`, the statistics and the list of the newest archived jobs.
pub const ARCHIVED_BY_END: &str = "archived_by_end";

/// Serves `schedule_revisions`, in each poll of the leading recruiter.
pub const SCHEDULE_REVISIONS: &str = "schedule_revisions";

/// The required definition of an index.
pub(crate) struct Index {
    pub(crate) collection: &'static str,
    pub(crate) name: &'static str,
    pub(crate) keys: Document,
    /// The filter of a partial index.
    pub(crate) only: Option<Document>,
    pub(crate) kind: IndexKind,
    /// The index is made when the feature is used for the first time.
    pub(crate) feature: Option<Feature>,
}

words! {
    /// A feature with indexes of its own. Each index of `scheduled` costs every archival some microseconds, whether the job is in the index or
    /// not. So these indexes are made only where jobs use them, and `metadata` notes that.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub(crate) enum Feature {
        /// Jobs with unique keys.
        Unique = "unique",
        /// Jobs with an expiry.
        Expiry = "expiry",
        /// Jobs with limits.
        Limits = "limits",
        /// Jobs in lines.
        Lines = "lines",
        /// Jobs that wait for others.
        Graphs = "graphs",
        /// Messages of applications.
        Messages = "messages",
        /// Files of jobs: without an index, but with collections to list.
        Files = "files",
    }

    /// The field in `metadata`.
    fn field;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IndexKind {
    Ordinary,
    Unique,
    /// MongoDB deletes a document at the date of its key.
    Expiry,
}

impl IndexKind {
    pub(crate) fn options(self) -> Document {
        match self {
            Self::Ordinary => doc! {},
            Self::Unique => doc! { "unique": true },
            Self::Expiry => doc! { "expireAfterSeconds": 0 },
        }
    }

    /// Whether an existing index is of this kind.
    pub(crate) fn is_met_by(self, found: &Document) -> bool {
        let is_unique = found.get_bool("unique").unwrap_or(false);
        let expires = found.contains_key("expireAfterSeconds");
        (is_unique, expires) == (self == Self::Unique, self == Self::Expiry)
    }
}

/// All indexes. Other keys under the same name replace the old index, and until the new one is built searches find
/// nothing. With a number in the name (`due_jobs_2`), the old index serves the old release until a recruiter of this
/// release leads ([`drop_outdated_indexes`]).
pub(crate) fn indexes() -> [Index; 16] {
    let index = |collection, name, keys| Index { collection, name, keys, only: None, kind: IndexKind::Ordinary, feature: None };
    let partial = |collection, name, keys, only, feature| Index { only: Some(only), feature, ..index(collection, name, keys) };
    let unique = |name, only| {
        let unique = partial("scheduled", name, doc! { name: 1 }, only, Some(Feature::Unique));
        Index { kind: IndexKind::Unique, ..unique }
    };
    let graph_jobs = |collection| {
        let only = doc! { "graph": { "$exists": true } };
        partial(collection, GRAPH_JOBS, doc! { "graph": 1 }, only, Some(Feature::Graphs))
    };
    let expired = |collection, name| Index { kind: IndexKind::Expiry, ..index(collection, name, doc! { "expires_at": 1 }) };
    // `locked` is false in every entry. With `_id`, `locked` and `gate` the index covers the searches.
    let due = doc! { "group": 1, "workable.class": 1, "priority": -1, "scheduled_at": 1, "_id": 1, "locked": 1, "gate": 1 };
    let gated = doc! { "group": 1, "workable.class": 1, "gate": 1, "priority": -1, "scheduled_at": 1, "_id": 1, "locked": 1 };
    // An empty array would have an entry, too.
    let any_permit = doc! { format!("{HELD_PERMITS}.0"): { "$exists": true } };
    let waiting = doc! { "waiting": 1, "_id": 1 };
    let expiring = doc! { "locked": false, "expires_at": any_date() };
    [
        partial("scheduled", DUE_JOBS, due, doc! { "locked": false, "gate": Bson::Null }, None),
        partial("scheduled", GATED_JOBS, gated, doc! { "locked": false, "gate": any_gate() }, None),
        partial("scheduled", LINES, doc! { "gate": 1, "created_at": 1, "_id": 1 }, doc! { "gate": any_line() }, Some(Feature::Lines)),
        Index { kind: IndexKind::Unique, ..partial("roster", HELD_PERMITS, doc! { HELD_PERMITS: 1 }, any_permit, Some(Feature::Limits)) },
        index("schedulers", SCHEDULE_REVISIONS, doc! { "_id": 1, "revision": 1 }),
        index("archived", ARCHIVED_BY_END, doc! { "last_execution.ended_at": 1 }),
        unique(UNIQUE, doc! { UNIQUE: any_text() }),
        unique(UNIQUE_WHILE_WAITING, doc! { UNIQUE_WHILE_WAITING: any_text(), "locked": false, "attempts": never_started() }),
        unique(UNIQUE_AFTER, doc! { UNIQUE_AFTER: any_text() }),
        graph_jobs("scheduled"),
        graph_jobs("archived"),
        partial("scheduled", WAITING_JOBS, waiting, doc! { "waiting": true }, Some(Feature::Graphs)),
        partial("scheduled", EXPIRING_JOBS, doc! { "expires_at": 1 }, expiring, Some(Feature::Expiry)),
        expired("unique_periods", EXPIRED_PERIODS),
        expired("audit", EXPIRED_AUDIT),
        Index { feature: Some(Feature::Messages), ..expired("messages", EXPIRED_MESSAGES) },
    ]
}

/// The predicate of the jobs in the index `gated_jobs`.
pub(crate) fn any_gate() -> Document {
    any_text()
}

/// The predicate of the jobs in the unique indexes. It does not include null.
fn any_text() -> Document {
    doc! { "$gte": "" }
}

/// The predicate of the gates of lines: those that begin with `>`.
pub(crate) fn any_line() -> Document {
    doc! { "$gte": ">", "$lt": "?" }
}

/// The predicate of the jobs that have never started. A job from another language may have no `attempts`.
pub(crate) fn never_started() -> Document {
    doc! { "$in": [0, Bson::Null] }
}

/// The predicate of the jobs in the index `expiring_jobs`. It does not include null.
pub(crate) fn any_date() -> Document {
    doc! { "$gte": bson::DateTime::from_millis(*DUE_MS.start()) }
}
