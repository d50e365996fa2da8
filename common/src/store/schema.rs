//! The only list of collections, validators and indexes, named after the operations they serve.
//!
//! Checked when a process starts, and when an error reports that something is missing. Correct parts are left
//! unchanged, others are created again. The role `readWrite` is enough for this, with one exception: changing an
//! existing validator needs `dbAdmin`.

use std::{
    sync::PoisonError,
    time::{Duration, Instant as Monotonic},
};

use bson::{Bson, Document, Timestamp, doc};
use futures_util::TryStreamExt;
use mongodb::results::CollectionSpecification;

use super::{
    Store, StoreError, call, code_of,
    error::code::{INDEX_KEY_SPECS_CONFLICT, INDEX_NOT_FOUND, NAMESPACE_EXISTS, NAMESPACE_NOT_FOUND},
};
use crate::{
    instant::DUE_MS,
    job::bundle::MOST_ITEMS,
    limits::{LARGEST_CAPACITY, MOST_WINDOWS},
    roster::Channel,
    schedules::MOST_MISSED,
    telemetry::chain,
};

/// Version of the schema in this file. Every change to the schema increases it.
const SCHEMA_VERSION: i32 = 13;

/// Maximum size of a `workable`, in bytes of BSON. A job with its history and its result must fit into MongoDB's limit
/// of 16 MiB.
pub const LARGEST_WORKABLE: usize = 4 * 1024 * 1024;

/// The jobs without a gate. Serves `due_jobs`, `groups`, `waiting_lanes` and `lanes_of`. A start removes the index entry, so the later
/// delete changes less. The class precedes the dates, so a backlog that no worker can take is never scanned.
pub const DUE_JOBS: &str = "due_jobs";
/// The jobs with a gate. Serves `due_jobs`, `gated_groups` and `gated_lanes_of`. There are two indexes, because in one index with the gate
/// before the dates the jobs without a gate would not be a single range: MongoDB has separate entries for `null` and `undefined`.
pub const GATED_JOBS: &str = "gated_jobs";
/// The jobs in lines, locked or not, in their order. Serves `heads_of_lines`.
pub const LINES: &str = "lines";
/// The permits of running jobs: a second running job with the same permit is refused. Serves `held_permits`.
pub const PERMITS: &str = "permits";
/// Makes jobs unique until they are finished: a finished job leaves `scheduled`.
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
/// Serves `prune_archived`, the statistics and the list of the newest finished jobs.
pub const ARCHIVED_BY_END: &str = "archived_by_end";

/// Serves `schedule_revisions`, in each poll of the leading recruiter.
pub const SCHEDULE_REVISIONS: &str = "schedule_revisions";

/// Size of a collection of hints: some minutes of hints on a busy system. A hint is useless after a second.
const SIGNALS_BYTES: i64 = 16 * 1024 * 1024;
/// How long a start waits for an index build. With a million waiting jobs a build takes seconds.
const BUILT_WITHIN: Duration = Duration::from_secs(600);

/// The required definition of an index.
struct Index {
    collection: &'static str,
    name: &'static str,
    keys: Document,
    /// The filter of a partial index.
    only: Option<Document>,
    kind: IndexKind,
    /// The index is made when the feature is used for the first time.
    feature: Option<Feature>,
}

/// A feature with indexes of its own. Each index of `scheduled` costs every archival some microseconds, whether the job is in the index or
/// not. So these indexes are made only where jobs use them, and `metadata` notes that.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Feature {
    /// Jobs with unique keys.
    Unique,
    /// Jobs with an expiry.
    Expiry,
    /// Jobs with limits.
    Limits,
    /// Jobs in lines.
    Lines,
    /// Jobs that wait for others.
    Graphs,
    /// Messages of applications.
    Messages,
}

impl Feature {
    const ALL: [Self; 6] = [Self::Unique, Self::Expiry, Self::Limits, Self::Lines, Self::Graphs, Self::Messages];

    /// The field in `metadata`.
    fn field(self) -> &'static str {
        match self {
            Self::Unique => "unique",
            Self::Expiry => "expiry",
            Self::Limits => "limits",
            Self::Lines => "lines",
            Self::Graphs => "graphs",
            Self::Messages => "messages",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum IndexKind {
    Ordinary,
    Unique,
    /// MongoDB deletes a document at the date of its key.
    Expiry,
}

impl IndexKind {
    fn options(self) -> Document {
        match self {
            Self::Ordinary => doc! {},
            Self::Unique => doc! { "unique": true },
            Self::Expiry => doc! { "expireAfterSeconds": 0 },
        }
    }

    /// Whether an existing index is of this kind.
    fn is_met_by(self, found: &Document) -> bool {
        let is_unique = found.get_bool("unique").unwrap_or(false);
        let expires = found.contains_key("expireAfterSeconds");
        (is_unique, expires) == (self == Self::Unique, self == Self::Expiry)
    }
}

/// All indexes. Other keys under the same name replace the old index, and until the new one is built searches find
/// nothing. With a number in the name (`due_jobs_2`), the old index serves the old release until a recruiter of this
/// release leads ([`drop_outdated_indexes`]).
fn indexes() -> [Index; 15] {
    let unique = |name, only: Document| Index {
        collection: "scheduled",
        name,
        keys: doc! { name: 1 },
        only: Some(only),
        kind: IndexKind::Unique,
        feature: Some(Feature::Unique),
    };
    let graph_jobs = |collection| Index {
        collection,
        name: GRAPH_JOBS,
        keys: doc! { "graph": 1 },
        only: Some(doc! { "graph": { "$exists": true } }),
        kind: IndexKind::Ordinary,
        feature: Some(Feature::Graphs),
    };
    [
        Index {
            collection: "scheduled",
            name: DUE_JOBS,
            // `locked` is false in every entry. With `_id`, `locked` and `gate` the index covers the searches.
            keys: doc! { "group": 1, "workable.class": 1, "priority": -1, "scheduled_at": 1, "_id": 1, "locked": 1, "gate": 1 },
            only: Some(doc! { "locked": false, "gate": Bson::Null }),
            kind: IndexKind::Ordinary,
            feature: None,
        },
        Index {
            collection: "scheduled",
            name: GATED_JOBS,
            keys: doc! { "group": 1, "workable.class": 1, "gate": 1, "priority": -1, "scheduled_at": 1, "_id": 1, "locked": 1 },
            only: Some(doc! { "locked": false, "gate": any_gate() }),
            kind: IndexKind::Ordinary,
            feature: None,
        },
        Index {
            collection: "scheduled",
            name: LINES,
            keys: doc! { "gate": 1, "created_at": 1, "_id": 1 },
            only: Some(doc! { "gate": any_line() }),
            kind: IndexKind::Ordinary,
            feature: Some(Feature::Lines),
        },
        Index {
            collection: "scheduled",
            name: PERMITS,
            keys: doc! { "last_execution.permits": 1 },
            only: Some(doc! { "locked": true, "last_execution.permits": { "$exists": true } }),
            kind: IndexKind::Unique,
            feature: Some(Feature::Limits),
        },
        Index {
            collection: "schedulers",
            name: SCHEDULE_REVISIONS,
            keys: doc! { "_id": 1, "revision": 1 },
            only: None,
            kind: IndexKind::Ordinary,
            feature: None,
        },
        Index {
            collection: "archived",
            name: ARCHIVED_BY_END,
            keys: doc! { "last_execution.ended_at": 1 },
            only: None,
            kind: IndexKind::Ordinary,
            feature: None,
        },
        unique(UNIQUE, doc! { UNIQUE: any_text() }),
        unique(UNIQUE_WHILE_WAITING, doc! { UNIQUE_WHILE_WAITING: any_text(), "locked": false, "attempts": never_started() }),
        unique(UNIQUE_AFTER, doc! { UNIQUE_AFTER: any_text() }),
        graph_jobs("scheduled"),
        graph_jobs("archived"),
        Index {
            collection: "scheduled",
            name: WAITING_JOBS,
            keys: doc! { "waiting": 1, "_id": 1 },
            only: Some(doc! { "waiting": true }),
            kind: IndexKind::Ordinary,
            feature: Some(Feature::Graphs),
        },
        Index {
            collection: "scheduled",
            name: EXPIRING_JOBS,
            keys: doc! { "expires_at": 1 },
            only: Some(doc! { "locked": false, "expires_at": any_date() }),
            kind: IndexKind::Ordinary,
            feature: Some(Feature::Expiry),
        },
        Index {
            collection: "unique_periods",
            name: EXPIRED_PERIODS,
            keys: doc! { "expires_at": 1 },
            only: None,
            kind: IndexKind::Expiry,
            feature: None,
        },
        Index {
            collection: "messages",
            name: EXPIRED_MESSAGES,
            keys: doc! { "expires_at": 1 },
            only: None,
            kind: IndexKind::Expiry,
            feature: Some(Feature::Messages),
        },
    ]
}

/// The predicate of the jobs in the index `gated_jobs`.
pub(super) fn any_gate() -> Document {
    any_text()
}

/// The predicate of the jobs in the unique indexes. It does not include null.
fn any_text() -> Document {
    doc! { "$gte": "" }
}

/// The predicate of the gates of lines: those that begin with `>`.
fn any_line() -> Document {
    doc! { "$gte": ">", "$lt": "?" }
}

/// The predicate of the jobs that have never started. A job from another language may have no `attempts`.
pub(super) fn never_started() -> Document {
    doc! { "$in": [0, Bson::Null] }
}

/// The predicate of the jobs in the index `expiring_jobs`. It does not include null.
pub(super) fn any_date() -> Document {
    doc! { "$gte": bson::DateTime::from_millis(*DUE_MS.start()) }
}

/// The kind of a collection, which decides its options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Has [`scheduled_validator`].
    Jobs,
    /// Has the validator of `limits`.
    Limits,
    /// Has the validator of `groups`.
    Groups,
    /// Has the validator of `pauses`.
    Pauses,
    /// Has [`schedulers_validator`].
    Schedules,
    /// Is capped.
    Hints,
    Plain,
}

impl Kind {
    fn options(self) -> Document {
        match (self, self.validator()) {
            (_, Some(validator)) => doc! { "validator": validator, "validationLevel": "moderate", "validationAction": "error" },
            (Self::Hints, None) => doc! { "capped": true, "size": SIGNALS_BYTES },
            (_, None) => doc! {},
        }
    }

    fn validator(self) -> Option<Document> {
        match self {
            Self::Jobs => Some(scheduled_validator()),
            Self::Limits => Some(limits_validator()),
            Self::Groups => Some(groups_validator()),
            Self::Pauses => Some(pauses_validator()),
            Self::Schedules => Some(schedulers_validator()),
            Self::Hints | Self::Plain => None,
        }
    }

    /// Whether an existing collection has the options of this kind.
    fn is_met_by(self, found: &CollectionSpecification) -> bool {
        let options = &found.options;
        match self {
            Self::Jobs | Self::Limits | Self::Groups | Self::Pauses | Self::Schedules => options.validator == self.validator(),
            Self::Hints => options.capped == Some(true) && options.size.is_some_and(|size| size >= SIGNALS_BYTES.unsigned_abs()),
            Self::Plain => true,
        }
    }
}

/// Called at a start: creates missing parts and replaces wrong ones.
///
/// # Errors
/// When MongoDB refuses or cannot be reached.
pub(super) async fn ensure(store: &Store) -> Result<(), StoreError> {
    let found = version(store).await?;
    if found > SCHEMA_VERSION {
        tracing::warn!(found, known = SCHEMA_VERSION, "the database was set up by a newer release; leaving its schema as it is");
    }
    ensure_collections(store, found, None).await?;
    let began = Monotonic::now();
    loop {
        match ensure_indexes(store, found).await {
            Err(StoreError::TimedOut { .. }) if began.elapsed() < BUILT_WITHIN => {
                tracing::info!("an index is being built; waiting for it");
            }
            other => break other?,
        }
    }
    // This write also proves that the user may write.
    let metadata = store.metadata.clone();
    call("ensure_schema", async move {
        metadata.update_one(doc! { "_id": "schema" }, doc! { "$max": { "version": SCHEMA_VERSION } }).upsert(true).await
    })
    .await?;
    Ok(())
}

/// Called while a process runs, when an error reports that something is missing. Creates missing parts, including the collection of this
/// channel, and replaces wrong ones.
pub(super) async fn mend(store: &Store, channel: Option<Channel>) -> Result<(), StoreError> {
    let found = version(store).await?;
    ensure_collections(store, found, channel).await?;
    ensure_indexes(store, found).await
}

/// Creates the collection of a channel if it is missing.
pub(super) async fn ensure_channel(store: &Store, channel: Channel) -> Result<(), StoreError> {
    ensure_collections(store, version(store).await?, Some(channel)).await
}

/// Whether the database has at least one of the collections for jobs and workers. Needs the role `read`.
pub(super) async fn is_set_up(store: &Store) -> Result<bool, StoreError> {
    let database = store.database.clone();
    let names = call("collections", async move { database.list_collection_names().await }).await?;
    Ok(names.iter().any(|name| ["scheduled", "archived", "roster"].contains(&name.as_str())))
}

/// The version of the database's schema; 0 without a schema.
pub(super) async fn version(store: &Store) -> Result<i32, StoreError> {
    let metadata = store.metadata.clone();
    let found = call("schema_version", async move { metadata.find_one(doc! { "_id": "schema" }).await }).await?;
    Ok(found.and_then(|schema| schema.get_i32("version").ok()).unwrap_or(0))
}

async fn ensure_collections(store: &Store, version: i32, channel: Option<Channel>) -> Result<(), StoreError> {
    let database = store.database.clone();
    let found: Vec<CollectionSpecification> =
        call("collections", async move { database.list_collections().await?.try_collect().await }).await?;
    let fixed = [
        ("scheduled", Kind::Jobs),
        ("archived", Kind::Plain),
        ("roster", Kind::Plain),
        ("metadata", Kind::Plain),
        ("limits", Kind::Limits),
        ("groups", Kind::Groups),
        ("pauses", Kind::Pauses),
        ("schedulers", Kind::Schedules),
        ("unique_periods", Kind::Plain),
        ("signals", Kind::Hints),
    ];
    let channels = [Channel::default()].into_iter().chain(channel).map(Channel::collection);
    // Channels of other workers, which may have become ordinary collections.
    let others = found.iter().map(|found| &found.name).filter(|name| Channel::is_collection(name)).cloned();
    let mut hints: Vec<String> = channels.chain(others).collect();
    hints.sort_unstable();
    hints.dedup();
    let wanted = fixed.map(|(name, kind)| (name.to_owned(), kind)).into_iter().chain(hints.into_iter().map(|name| (name, Kind::Hints)));
    for (name, kind) in wanted {
        match found.iter().find(|found| found.name == name) {
            None => create(store, &name, kind).await?,
            Some(found) if kind.is_met_by(found) => {}
            Some(_) if kind == Kind::Hints => replace(store, &name).await?,
            // Collections of a newer release are left unchanged.
            Some(_) if version > SCHEMA_VERSION => {}
            Some(_) => change_validator(store, &name, kind).await?,
        }
    }
    Ok(())
}

async fn run(store: &Store, operation: &'static str, on: &str, command: Document) -> Result<(), StoreError> {
    let database = if on == "admin" { store.client.database(on) } else { store.database.clone() };
    call(operation, async move { database.run_command(command).await }).await.map(drop)
}

/// Creates a collection, unless another process has created it.
async fn create(store: &Store, name: &str, kind: Kind) -> Result<(), StoreError> {
    let mut command = doc! { "create": name };
    command.extend(kind.options());
    match run(store, "create_collection", "", command).await {
        Err(StoreError::Mongo { source, .. }) if code_of(&source) == Some(NAMESPACE_EXISTS) => {}
        other => other?,
    }
    if kind == Kind::Hints { seed(store, name).await } else { Ok(()) }
}

/// Creates the ring of events, with this size in bytes, unless it exists. Replaces an ordinary collection, but not one of an application.
pub(super) async fn ensure_events(store: &Store, size: Option<i64>) -> Result<(), StoreError> {
    let name = store.events.name();
    let (database, named) = (store.database.clone(), doc! { "name": name });
    let found: Vec<CollectionSpecification> =
        call("collections", async move { database.list_collections().filter(named).await?.try_collect().await }).await?;
    match found.first() {
        Some(found) if found.options.capped == Some(true) => return Ok(()),
        Some(_) => {
            store.refuse_foreign_events().await?;
            return replace(store, name).await;
        }
        None => {}
    }
    let command = doc! { "create": name, "capped": true, "size": size.unwrap_or(SIGNALS_BYTES) };
    match run(store, "create_collection", "", command).await {
        Err(StoreError::Mongo { source, .. }) if code_of(&source) == Some(NAMESPACE_EXISTS) => {}
        other => other?,
    }
    seed(store, name).await
}

/// Inserts a first document, because a tailing cursor on an empty collection ends at once.
async fn seed(store: &Store, name: &str) -> Result<(), StoreError> {
    let filler = doc! { "at": Timestamp { time: 0, increment: 0 }, "kind": "seed" };
    let command = doc! { "insert": name, "documents": [filler], "writeConcern": { "w": 1 } };
    store.write("seed", command).await.map(drop)
}

/// Replaces an ordinary collection, which an insert into a missing one creates, by a capped one. Uses a rename, which
/// is atomic: between a drop and a creation the next hint would create the ordinary collection again.
async fn replace(store: &Store, name: &str) -> Result<(), StoreError> {
    let capped = format!("{name}.capped");
    let mut command = doc! { "create": &capped };
    command.extend(Kind::Hints.options());
    match run(store, "create_collection", "", command).await {
        // Another process is replacing it.
        Err(StoreError::Mongo { source, .. }) if code_of(&source) == Some(NAMESPACE_EXISTS) => {}
        other => other?,
    }
    let full = |name: &str| format!("{}.{name}", store.database.name());
    let command = doc! { "renameCollection": full(&capped), "to": full(name), "dropTarget": true };
    match run(store, "replace_collection", "admin", command).await {
        // Another process has replaced it.
        Err(StoreError::Mongo { source, .. }) if code_of(&source) == Some(NAMESPACE_NOT_FOUND) => {}
        other => other?,
    }
    tracing::warn!(
        collection = name,
        "replaced an ordinary collection of hints by a capped one, because an ordinary collection cannot be tailed"
    );
    seed(store, name).await
}

async fn change_validator(store: &Store, name: &str, kind: Kind) -> Result<(), StoreError> {
    let mut command = doc! { "collMod": name };
    command.extend(kind.options());
    match run(store, "change_validator", "", command).await {
        Err(error) if error.is_unauthorized() => {
            tracing::warn!(
                collection = name,
                "the validator belongs to another release, and this MongoDB user may not change it; continuing with it. Start any process once with a user that has the role dbAdmin"
            );
            Ok(())
        }
        other => other,
    }
}

/// The contract for enqueuers in other languages. It refuses every type that a worker cannot decode, so that no job is
/// archived without a run although it could have been refused. Fields that Recruiter does not define are not checked.
///
/// The rules for waiting jobs come first, because MongoDB reports a refusal in this order. Locked jobs are not checked:
/// they were checked when they were inserted, a start writes only valid values, and checking costs time.
fn scheduled_validator() -> Document {
    let held = doc! {
        "locked": true,
        "last_execution.start": { "$type": "objectId" },
        "last_execution.worker": { "$type": "objectId" },
    };
    doc! { "$or": [waiting_job(), held] }
}

fn waiting_job() -> Document {
    doc! {
        // Checked first: a locked job needs no further check.
        "locked": { "$ne": true },
        "$jsonSchema": {
            "required": ["_id", "locked", "group", "priority", "scheduled_at", "workable"],
            "properties": job_properties(),
        },
        "$and": [
            // The place in a line.
            { "$or": [{ "gate": { "$not": any_line() } }, { "created_at": { "$type": "date" } }] },
            // A job that waits is not due.
            { "$or": [
                { "waiting": Bson::Null },
                { "scheduled_at": bson::DateTime::from_millis(*DUE_MS.end()), "gate": { "$not": any_line() }, "unique_after": Bson::Null },
            ] },
        ],
        "scheduled_at": { "$gte": bson::DateTime::from_millis(*DUE_MS.start()), "$lte": bson::DateTime::from_millis(*DUE_MS.end()) },
        "$expr": { "$or": [
            { "$ne": [{ "$type": "$workable" }, "object"] },
            { "$lte": [{ "$bsonSize": "$workable" }, i64::try_from(LARGEST_WORKABLE).unwrap_or(i64::MAX)] },
        ] },
    }
}

/// The fields of a job, in two parts, because the macro nests once for each value.
fn job_properties() -> Document {
    let mut properties = doc! {
        "_id": { "bsonType": "objectId", "description": "an ObjectId" },
        "locked": { "bsonType": "bool", "description": "false; only a worker sets it to true" },
        "done": optional("bool", "true or false"),
        "created_at": optional("date", "a date"),
        "group": { "bsonType": "string", "minLength": 1, "maxLength": 256, "description": "a text of 1 to 256 characters" },
        "priority": { "bsonType": ["int", "long"], "minimum": 0, "maximum": 9, "description": "an integer from 0 to 9" },
        "scheduled_at": { "bsonType": "date", "description": "a date from the year 1 to the year 9999" },
        "keep": { "enum": ["all", "failures", Bson::Null], "description": "`failures` or `all`" },
        "gate": { "bsonType": ["string", "null"], "minLength": 1, "maxLength": 256, "description": "a text of 1 to 256 characters" },
        "unique": key(),
        "unique_while_waiting": key(),
        "unique_after": key(),
        "unique_for_period": key(),
        "replaced": count(),
        "due_after": optional("date", "a date"),
        "expires_at": optional("date", "a date"),
        "attempts": count(),
        "interruptions": count(),
        "deaths": count(),
        "executions_dropped": count(),
        "workable": {
            "bsonType": "object",
            "description": "a document {class, parameters} or {class, items}, with at most 4 MiB",
            "required": ["class"],
            "properties": {
                "class": { "bsonType": "string", "minLength": 1, "maxLength": 256, "description": "a text of 1 to 256 characters" },
                "parameters": parameters(),
                "method": optional("string", "a text"),
                "items": items(),
            },
        },
        "item_outcomes": {
            "bsonType": ["array", "null"],
            "maxItems": i64::try_from(MOST_ITEMS).unwrap_or(i64::MAX),
            "items": { "bsonType": ["string", "object", "null"] },
            "description": "an array with one outcome for each item at most",
        },
        "retry_policy": retry_policy(),
        "tags": tags(),
        "halt_on_failure": optional("bool", "true or false"),
        "urn": optional("string", "a text"),
        "once": optional("bool", "true or false"),
        "recovered_from": optional("objectId", "the id of a job"),
        "schedule": optional("object", "the run of a schedule: {name, slot}"),
        "cancel_requested_at": optional("date", "a date"),
        "why": optional("string", "a text"),
        "last_execution": execution(),
        "executions": { "bsonType": ["array", "null"], "items": execution(), "description": "an array of executions" },
    };
    properties.extend(doc! {
        "graph": optional("objectId", "the id of a graph"),
        "waiting": { "enum": [true, Bson::Null], "description": "true while it waits for other jobs" },
        "waits_for": edges(),
        "followed": optional("bool", "true or false"),
        "continued_as": { "enum": [Bson::Null], "description": "only in the archive" },
    });
    properties
}

/// The fields of a limit, of a resource or of a group.
fn limit() -> Document {
    let whole =
        |most: i64, description: &str| doc! { "bsonType": ["int", "long"], "minimum": 1, "maximum": most, "description": description };
    doc! {
        "capacity": {
            "bsonType": ["int", "long", "null"],
            "minimum": 1,
            "maximum": i64::from(LARGEST_CAPACITY),
            "description": "an integer from 1 to 100000",
        },
        "rate": {
            "bsonType": ["object", "null"],
            "description": "a document {starts, per_ms, burst}",
            "required": ["starts", "per_ms"],
            "properties": {
                "starts": whole(1_000_000, "an integer from 1 to 1000000"),
                "per_ms": whole(30 * 86_400_000, "an integer from 1 to the milliseconds of 30 days"),
                "burst": whole(1_000_000, "an integer from 1 to 1000000"),
            },
        },
    }
}

fn limits_validator() -> Document {
    let name = doc! {
        "bsonType": "string",
        "minLength": 1,
        "maxLength": 248,
        "pattern": "^[^@,#*][^,#*]*\\*?$",
        "description": "the name of a resource, or a prefix that ends in `*`",
    };
    let mut properties = doc! { "_id": name };
    properties.extend(limit());
    doc! { "$jsonSchema": { "required": ["_id"], "properties": properties } }
}

fn groups_validator() -> Document {
    let mut properties = doc! {
        "_id": { "bsonType": "string", "minLength": 1, "maxLength": 256, "description": "the name of a group" },
        "weight": { "bsonType": ["int", "long", "double", "null"], "minimum": 0.001, "maximum": 1_000_000.0, "description": "a number from 0.001 to 1000000" },
        "ageing_ms": { "bsonType": ["int", "long", "null"], "minimum": 10, "maximum": 366_i64 * 86_400_000, "description": "an integer from 10 to the milliseconds of 366 days" },
        "maintenance": { "bsonType": ["array", "null"], "maxItems": i64::try_from(MOST_WINDOWS).unwrap_or(i64::MAX), "items": window(), "description": "an array of documents {from, until, zone, days}" },
        "most_waiting": { "bsonType": ["int", "long", "null"], "minimum": 1, "description": "an integer from 1" },
    };
    properties.extend(limit());
    doc! { "$jsonSchema": { "required": ["_id"], "properties": properties } }
}

/// A maintenance window. The recruiter checks the zone.
fn window() -> Document {
    let time = doc! { "bsonType": "string", "pattern": "^[0-2][0-9]:[0-5][0-9](:[0-5][0-9])?$", "description": "a time of the day, such as 02:00" };
    let day = doc! { "enum": ["mon", "tue", "wed", "thu", "fri", "sat", "sun"] };
    doc! {
        "bsonType": "object",
        "required": ["from", "until"],
        "properties": {
            "from": time.clone(),
            "until": time,
            "zone": optional("string", "the IANA name of a zone"),
            "days": { "bsonType": ["array", "null"], "items": day, "description": "an array of the names of days, such as mon" },
        },
    }
}

fn pauses_validator() -> Document {
    doc! { "$jsonSchema": { "required": ["_id"], "properties": {
        "_id": { "bsonType": "string", "pattern": "^(everything|group:.+|class:.+|line:.+)$", "description": "`everything`, `group:NAME`, `class:NAME` or `line:KEY`" },
        "by": optional("string", "a text"),
        "reason": optional("string", "a text"),
        "at": optional("date", "a date"),
        "job": optional("objectId", "the id of a job"),
    } } }
}

/// The contract for people who write schedules by hand. It refuses wrong types and missing fields. Expressions, zones and policies are checked
/// by the library at a declaration, and by the recruiter when it reads the document.
fn schedulers_validator() -> Document {
    let name = |description: &str| doc! { "bsonType": "string", "minLength": 1, "maxLength": 256, "description": description };
    let milliseconds = |least: i64| {
        doc! { "bsonType": ["int", "long", "null"], "minimum": least, "maximum": 31_536_000_000_000_i64, "description": format!("milliseconds, an integer from {least}") }
    };
    let run = doc! {
        "bsonType": "object",
        "required": ["job", "at"],
        "properties": {
            "slot": optional("date", "a date"),
            "job": { "bsonType": "objectId", "description": "the id of a job" },
            "at": { "bsonType": "date", "description": "a date" },
            "manual": optional("bool", "true or false"),
        },
    };
    doc! {
        "$jsonSchema": {
            "required": ["_id", "job"],
            "properties": {
                "_id": name("the name of the schedule: a text of 1 to 256 characters"),
                "cron": { "bsonType": ["string", "null"], "maxLength": 256, "pattern": r"^\s*(@[A-Za-z]+|\S+(\s+\S+){4,5})\s*$", "description": "a cron expression of 5 or 6 fields" },
                "zone": optional("string", "the IANA name of a zone"),
                "every_ms": milliseconds(1_000),
                "jitter_ms": milliseconds(0),
                "overlap": { "enum": ["allow", "skip", Bson::Null], "description": "`allow` or `skip`" },
                "missed": { "enum": ["skip", "one", "all", Bson::Null], "description": "`skip`, `one` or `all`" },
                "missed_limit": { "bsonType": ["int", "long", "null"], "minimum": 1, "maximum": i64::from(MOST_MISSED), "description": "an integer from 1 to 1000" },
                "job": {
                    "bsonType": "object",
                    "description": "what each run enqueues: {class, parameters} or {class, items}, and the settings of a job, with at most 4 MiB",
                    "required": ["class"],
                    "properties": {
                        "class": name("a text of 1 to 256 characters"),
                        "parameters": parameters(),
                        "items": items(),
                        "group": { "bsonType": ["string", "null"], "minLength": 1, "maxLength": 256, "description": "a text of 1 to 256 characters" },
                        "priority": { "bsonType": ["int", "long", "null"], "minimum": 0, "maximum": 9, "description": "an integer from 0 to 9" },
                        "retry_policy": retry_policy(),
                        "limits": tags(),
                        "line": optional("string", "a text"),
                        "halt_on_failure": optional("bool", "true or false"),
                        "tags": tags(),
                        "urn": optional("string", "a text"),
                        "keep": { "enum": ["all", "failures", Bson::Null], "description": "`failures` or `all`" },
                    },
                },
                "source": { "bsonType": ["string", "null"], "minLength": 1, "maxLength": 256, "description": "a text of 1 to 256 characters" },
                "paused": {
                    "bsonType": ["object", "null"],
                    "description": "a document {by, reason, at}",
                    "properties": { "by": optional("string", "a text"), "reason": optional("string", "a text"), "at": optional("date", "a date") },
                },
                "created_at": optional("date", "a date"),
                "last_slot": optional("date", "a date"),
                "next_run": optional("date", "a date"),
                "runs": { "bsonType": ["array", "null"], "items": run, "description": "an array of runs" },
                "skipped": optional("object", "counts of slots without a run"),
                "revision": { "bsonType": ["int", "long", "null"], "description": "an integer" },
            },
            // Exactly one of them.
            "oneOf": [
                { "required": ["cron"], "properties": { "cron": { "bsonType": "string" }, "every_ms": { "bsonType": "null" } } },
                { "required": ["every_ms"], "properties": { "every_ms": { "bsonType": ["int", "long"] }, "cron": { "bsonType": "null" } } },
            ],
        },
        "$expr": { "$or": [
            { "$ne": [{ "$type": "$job" }, "object"] },
            { "$lte": [{ "$bsonSize": "$job" }, i64::try_from(LARGEST_WORKABLE).unwrap_or(i64::MAX)] },
        ] },
    }
}

/// A unique key. A key that is made of parameters is the class with a text or a hash.
fn key() -> Document {
    doc! { "bsonType": ["string", "null"], "minLength": 1, "maxLength": 512, "description": "a text of 1 to 512 characters" }
}

fn optional(of: &str, description: &str) -> Document {
    doc! { "bsonType": [of, "null"], "description": description }
}

/// A document, or an empty array, because PHP stores an empty document as one.
fn parameters() -> Document {
    doc! { "bsonType": ["object", "array", "null"], "maxItems": 0, "description": "a document" }
}

fn items() -> Document {
    doc! {
        "bsonType": ["array", "null"],
        "minItems": 1,
        "maxItems": i64::try_from(MOST_ITEMS).unwrap_or(i64::MAX),
        "items": parameters(),
        "description": "an array of 1 to 1000 documents",
    }
}

fn retry_policy() -> Document {
    doc! {
        "bsonType": ["object", "null"],
        "description": "a document {class, parameters}",
        "required": ["class"],
        "properties": {
            "class": { "bsonType": "string", "description": "the name of a retry policy" },
            "parameters": parameters(),
        },
    }
}

fn tags() -> Document {
    doc! { "bsonType": ["array", "null"], "items": { "bsonType": "string" }, "description": "an array of texts" }
}

fn edges() -> Document {
    let edge = doc! {
        "bsonType": ["objectId", "object"],
        "required": ["job"],
        "properties": {
            "job": { "bsonType": "objectId", "description": "the id of a job" },
            "when": { "enum": ["done", "ended", "failed"], "description": "`done`, `ended` or `failed`" },
        },
    };
    doc! { "bsonType": ["array", "null"], "items": edge, "description": "an array of ids of jobs, or of documents {job, when}" }
}

fn count() -> Document {
    doc! { "bsonType": ["int", "long", "null"], "minimum": 0, "maximum": i32::MAX, "description": "an integer from 0" }
}

fn execution() -> Document {
    doc! {
        "bsonType": ["object", "null"],
        "description": "what a worker has written of an execution",
        "properties": {
            "scheduled_at": optional("date", "a date"),
            "started_at": optional("date", "a date"),
            "ended_at": optional("date", "a date"),
            "worker": optional("objectId", "the id of a worker"),
            "start": optional("objectId", "the id of a start"),
            "if_worker_dies": optional("object", "{retry_after_ms} or {archive}"),
            "hostname": optional("string", "a text"),
            "pid": { "bsonType": ["int", "long", "null"], "description": "an integer" },
            "class": optional("string", "a text"),
            "message": optional("string", "a text"),
            "trace": optional("string", "a text"),
            "crashed": optional("bool", "true or false"),
        },
    }
}

/// The features that were used in this database.
pub(super) async fn features_in_use(store: &Store) -> Result<Vec<Feature>, StoreError> {
    let metadata = store.metadata.clone();
    let found = call("features", async move { metadata.find_one(doc! { "_id": "features" }).await }).await?.unwrap_or_default();
    Ok(Feature::ALL.into_iter().filter(|feature| found.get_bool(feature.field()).unwrap_or(false)).collect())
}

/// Called when a feature is used for the first time: makes its indexes, and notes that it is in use.
pub(super) async fn begin_to_use(store: &Store, feature: Feature) -> Result<(), StoreError> {
    ensure_these_indexes(store, version(store).await?, &[feature]).await?;
    note_in_use(store, feature).await
}

async fn note_in_use(store: &Store, feature: Feature) -> Result<(), StoreError> {
    let (metadata, noted) = (store.metadata.clone(), doc! { "$set": { feature.field(): true } });
    call("note_in_use", async move { metadata.update_one(doc! { "_id": "features" }, noted).upsert(true).await }).await.map(drop)
}

async fn ensure_indexes(store: &Store, version: i32) -> Result<(), StoreError> {
    let mut features = features_in_use(store).await?;
    // The database may have been dropped since.
    let known: Vec<Feature> = store.features.lock().unwrap_or_else(PoisonError::into_inner).iter().copied().collect();
    for feature in known {
        if !features.contains(&feature) {
            features.push(feature);
            note_in_use(store, feature).await?;
        }
    }
    match ensure_these_indexes(store, version, &features).await {
        Err(error @ StoreError::Foreign { .. }) => {
            // A process that does not start would run no job at all.
            tracing::error!(error = chain(&error), "an index is missing");
            Ok(())
        }
        other => other,
    }
}

/// A foreign collection is an error after the other indexes are there.
async fn ensure_these_indexes(store: &Store, version: i32, features: &[Feature]) -> Result<(), StoreError> {
    let mut refused = None;
    for index in indexes().into_iter().filter(|index| index.feature.is_none_or(|feature| features.contains(&feature))) {
        let found = indexes_of(store, index.collection).await?;
        let named = found.iter().find(|found| found.get_str("name").is_ok_and(|name| name == index.name));
        let part = |key: &str| named.and_then(|named| named.get_document(key).ok());
        // The order of the keys matters.
        let same_keys = part("key").is_some_and(|keys| keys.iter().eq(index.keys.iter()));
        let same_kind = named.is_some_and(|named| index.kind.is_met_by(named));
        if same_keys && same_kind && part("partialFilterExpression") == index.only.as_ref() {
            continue;
        }
        if named.is_some() {
            if version > SCHEMA_VERSION {
                continue;
            }
            drop_index(store, index.collection, index.name).await?;
        }
        if index.name == EXPIRED_MESSAGES
            && let Err(error) = store.refuse_foreign_messages().await
        {
            refused = Some(error);
            continue;
        }
        create_index(store, &index).await?;
    }
    refused.map_or(Ok(()), Err)
}

async fn indexes_of(store: &Store, collection: &'static str) -> Result<Vec<Document>, StoreError> {
    let database = store.database.clone();
    let listed = async move { database.run_cursor_command(doc! { "listIndexes": collection }).await?.try_collect().await };
    match call("indexes", listed).await {
        Err(StoreError::Mongo { source, .. }) if code_of(&source) == Some(NAMESPACE_NOT_FOUND) => Ok(Vec::new()),
        other => other,
    }
}

async fn create_index(store: &Store, index: &Index) -> Result<(), StoreError> {
    let mut options = doc! { "key": &index.keys, "name": index.name };
    options.extend(index.kind.options());
    options.extend(index.only.clone().map(|only| ("partialFilterExpression".to_owned(), Bson::Document(only))));
    let command = doc! { "createIndexes": index.collection, "indexes": [options] };
    match run(store, "create_index", "", command.clone()).await {
        // Another process has just created it with other keys. It is replaced: of two releases, the older one keeps the
        // index of the newer schema version.
        Err(StoreError::Mongo { source, .. }) if code_of(&source) == Some(INDEX_KEY_SPECS_CONFLICT) => {
            drop_index(store, index.collection, index.name).await?;
            run(store, "create_index", "", command).await
        }
        Err(error) if index.kind == IndexKind::Unique && error.is_duplicate() => {
            // Documents that were inserted while the index was missing. A process that does not start would run no job at all.
            tracing::error!(
                collection = index.collection,
                index = index.name,
                error = chain(&error),
                "jobs are not unique: two documents have the same unique key. Cancel one of them, and start any process again"
            );
            Ok(())
        }
        other => other,
    }
}

async fn drop_index(store: &Store, collection: &str, name: &str) -> Result<(), StoreError> {
    match run(store, "drop_index", "", doc! { "dropIndexes": collection, "index": name }).await {
        // Another process has dropped it.
        Err(StoreError::Mongo { source, .. }) if matches!(code_of(&source), Some(INDEX_NOT_FOUND | NAMESPACE_NOT_FOUND)) => Ok(()),
        other => other,
    }
}

/// Drops the indexes of earlier releases with the same name and another number, unless the schema of the database is
/// newer.
pub(super) async fn drop_outdated_indexes(store: &Store) -> Result<(), StoreError> {
    if version(store).await? > SCHEMA_VERSION {
        return Ok(());
    }
    let features = features_in_use(store).await?;
    // The collection of a feature that is not in use may not exist.
    for index in indexes().into_iter().filter(|index| index.feature.is_none_or(|feature| features.contains(&feature))) {
        for found in indexes_of(store, index.collection).await? {
            let name = found.get_str("name").unwrap_or_default();
            if name != index.name && without_number(name) == without_number(index.name) {
                drop_index(store, index.collection, name).await?;
                tracing::info!(collection = index.collection, index = name, "dropped an index of an earlier release");
            }
        }
    }
    Ok(())
}

fn without_number(name: &str) -> &str {
    name.trim_end_matches(|digit: char| digit.is_ascii_digit()).trim_end_matches('_')
}
