//! The one list of collections, validators and indexes, named after the operations they serve.
//!
//! Looked at when a process starts and when an error says that something is missing. What is as it should be is left alone; what is not
//! is made again. All of that needs the role `readWrite`, but for one: a validator that is there already can only be changed with `dbAdmin`.

use std::time::{Duration, Instant as Monotonic};

use bson::{Bson, Document, Timestamp, doc};
use futures_util::TryStreamExt;
use mongodb::results::CollectionSpecification;

use super::{
    Store, StoreError, call, code_of,
    error::code::{INDEX_KEY_SPECS_CONFLICT, INDEX_NOT_FOUND, NAMESPACE_EXISTS, NAMESPACE_NOT_FOUND},
};
use crate::{instant::DUE_MS, job::bundle::MOST_ITEMS, roster::Channel};

/// Version of what this file describes. Raised with every change to it.
const SCHEMA_VERSION: i32 = 5;

/// Largest `workable` that is accepted, in bytes of BSON: a job, its history and its result must fit into MongoDB's
/// 16 MiB together.
pub const LARGEST_WORKABLE: usize = 4 * 1024 * 1024;

/// Serves `due_jobs`, `groups`, `waiting_lanes` and `lanes_of`. A start takes an entry out, so that the later delete touches little. The class
/// comes before the dates: a backlog that no worker can take is never scanned.
pub const DUE_JOBS: &str = "due_jobs";
/// Serves `prune_archived`, the statistics and the newest finished jobs.
pub const ARCHIVED_BY_END: &str = "archived_by_end";

/// Size of a collection of hints: minutes of them on a busy system; a hint is stale after a second.
const SIGNALS_BYTES: i64 = 16 * 1024 * 1024;
/// How long a start waits for an index that is being built. A million waiting jobs take seconds.
const BUILT_WITHIN: Duration = Duration::from_secs(600);

/// An index as it has to be.
struct Index {
    collection: &'static str,
    name: &'static str,
    keys: Document,
    /// Which documents it has, if not all.
    only: Option<Document>,
}

/// Every index. Other keys under the same name replace the old index, and until they are built nothing is found. Under another number
/// (`due_jobs_2`) the old index serves the old release until a recruiter of this one leads ([`drop_outdated_indexes`]).
fn indexes() -> [Index; 2] {
    [
        Index {
            collection: "scheduled",
            name: DUE_JOBS,
            // `locked`, which is false in every entry, and `_id` make the index cover the searches.
            keys: doc! { "group": 1, "workable.class": 1, "priority": -1, "scheduled_at": 1, "_id": 1, "locked": 1 },
            only: Some(doc! { "locked": false }),
        },
        Index { collection: "archived", name: ARCHIVED_BY_END, keys: doc! { "last_execution.ended_at": 1 }, only: None },
    ]
}

/// What a collection is for, hence how it is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Has [`scheduled_validator`].
    Jobs,
    /// Is capped.
    Hints,
    Plain,
}

impl Kind {
    fn options(self) -> Document {
        match self {
            Self::Jobs => doc! { "validator": scheduled_validator(), "validationLevel": "moderate", "validationAction": "error" },
            Self::Hints => doc! { "capped": true, "size": SIGNALS_BYTES },
            Self::Plain => doc! {},
        }
    }

    /// Whether a collection that is there is of this kind.
    fn is_met_by(self, found: &CollectionSpecification) -> bool {
        let options = &found.options;
        match self {
            Self::Jobs => options.validator.as_ref() == Some(&scheduled_validator()),
            Self::Hints => options.capped == Some(true) && options.size.is_some_and(|size| size >= SIGNALS_BYTES.unsigned_abs()),
            Self::Plain => true,
        }
    }
}

/// At a start: makes what is missing and mends what is not as it should be.
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
    // Also the proof that this user may write at all.
    let metadata = store.metadata.clone();
    call("ensure_schema", async move {
        metadata.update_one(doc! { "_id": "schema" }, doc! { "$max": { "version": SCHEMA_VERSION } }).upsert(true).await
    })
    .await?;
    Ok(())
}

/// While a process runs, when an error says that something is missing: the same, and the collection of this channel with it.
pub(super) async fn mend(store: &Store, channel: Option<Channel>) -> Result<(), StoreError> {
    let found = version(store).await?;
    ensure_collections(store, found, channel).await?;
    ensure_indexes(store, found).await
}

/// Makes the collection of a channel, unless it is there.
pub(super) async fn ensure_channel(store: &Store, channel: Channel) -> Result<(), StoreError> {
    ensure_collections(store, version(store).await?, Some(channel)).await
}

/// Whether any of the collections is there that jobs and workers are in. Needs the role `read`.
pub(super) async fn is_set_up(store: &Store) -> Result<bool, StoreError> {
    let database = store.database.clone();
    let names = call("collections", async move { database.list_collection_names().await }).await?;
    Ok(names.iter().any(|name| ["scheduled", "archived", "roster"].contains(&name.as_str())))
}

/// The version of the schema that the database has; 0 when it has none.
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
        ("signals", Kind::Hints),
    ];
    let channels = [Channel::default()].into_iter().chain(channel).map(Channel::collection);
    // Channels of other workers, which may have become ordinary collections since.
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
            // A newer release knows better.
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

/// Creates a collection, unless another process was faster.
async fn create(store: &Store, name: &str, kind: Kind) -> Result<(), StoreError> {
    let mut command = doc! { "create": name };
    command.extend(kind.options());
    match run(store, "create_collection", "", command).await {
        Err(StoreError::Mongo { source, .. }) if code_of(&source) == Some(NAMESPACE_EXISTS) => {}
        other => other?,
    }
    if kind == Kind::Hints { seed(store, name).await } else { Ok(()) }
}

/// A tailing cursor on an empty collection ends at once.
async fn seed(store: &Store, name: &str) -> Result<(), StoreError> {
    let filler = doc! { "at": Timestamp { time: 0, increment: 0 }, "kind": "seed" };
    let command = doc! { "insert": name, "documents": [filler], "writeConcern": { "w": 1 } };
    store.write("seed", command).await.map(drop)
}

/// Puts a capped collection in the place of an ordinary one, which an insert makes when there is none. At once: between a drop and a
/// creation the next hint would make it again.
async fn replace(store: &Store, name: &str) -> Result<(), StoreError> {
    let capped = format!("{name}.capped");
    let mut command = doc! { "create": &capped };
    command.extend(Kind::Hints.options());
    match run(store, "create_collection", "", command).await {
        // Another process is at it.
        Err(StoreError::Mongo { source, .. }) if code_of(&source) == Some(NAMESPACE_EXISTS) => {}
        other => other?,
    }
    let full = |name: &str| format!("{}.{name}", store.database.name());
    let command = doc! { "renameCollection": full(&capped), "to": full(name), "dropTarget": true };
    match run(store, "replace_collection", "admin", command).await {
        // It was faster.
        Err(StoreError::Mongo { source, .. }) if code_of(&source) == Some(NAMESPACE_NOT_FOUND) => {}
        other => other?,
    }
    tracing::warn!(collection = name, "hints were kept in an ordinary collection, which nobody can listen to; made it a capped one again");
    seed(store, name).await
}

async fn change_validator(store: &Store, name: &str, kind: Kind) -> Result<(), StoreError> {
    let mut command = doc! { "collMod": name };
    command.extend(kind.options());
    match run(store, "change_validator", "", command).await {
        Err(error) if error.is_unauthorized() => {
            tracing::warn!(
                collection = name,
                "the validator is another release's and this MongoDB user may not change it; going on with it. Start any process once with a user that has the role dbAdmin"
            );
            Ok(())
        }
        other => other,
    }
}

/// The contract for enqueuers in other languages: every type that a worker would stumble over, so that nothing is archived unrun that
/// could have been refused. Fields that are not ours are the enqueuer's own business.
///
/// The waiting job comes first, because MongoDB explains a refusal in this order. What a worker holds was checked before: a start changes
/// no field that is checked here, and checking costs time.
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
        // Checked first: a job that is held needs no further check.
        "locked": { "$ne": true },
        "$jsonSchema": {
            "required": ["_id", "locked", "group", "priority", "scheduled_at", "workable"],
            "properties": {
                "_id": { "bsonType": "objectId", "description": "an ObjectId" },
                "locked": { "bsonType": "bool", "description": "false; only a worker sets it to true" },
                "done": optional("bool", "true or false"),
                "created_at": optional("date", "a date"),
                "group": { "bsonType": "string", "minLength": 1, "maxLength": 256, "description": "a text of 1 to 256 characters" },
                "priority": { "bsonType": ["int", "long"], "minimum": 0, "maximum": 9, "description": "an integer from 0 to 9" },
                "scheduled_at": { "bsonType": "date", "description": "a date from the year 1 to the year 9999" },
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
                        "items": {
                            "bsonType": ["array", "null"],
                            "minItems": 1,
                            "maxItems": i64::try_from(MOST_ITEMS).unwrap_or(i64::MAX),
                            "items": parameters(),
                            "description": "an array of 1 to 1000 documents",
                        },
                    },
                },
                "item_outcomes": {
                    "bsonType": ["array", "null"],
                    "maxItems": i64::try_from(MOST_ITEMS).unwrap_or(i64::MAX),
                    "items": { "bsonType": ["string", "object", "null"] },
                    "description": "an array with one outcome for each item at most",
                },
                "retry_policy": {
                    "bsonType": ["object", "null"],
                    "description": "a document {class, parameters}",
                    "required": ["class"],
                    "properties": {
                        "class": { "bsonType": "string", "description": "the name of a retry policy" },
                        "parameters": parameters(),
                    },
                },
                "tags": { "bsonType": ["array", "null"], "items": { "bsonType": "string" }, "description": "an array of texts" },
                "urn": optional("string", "a text"),
                "recovered_from": optional("objectId", "the id of a job"),
                "cancel_requested_at": optional("date", "a date"),
                "why": optional("string", "a text"),
                "last_execution": execution(),
                "executions": { "bsonType": ["array", "null"], "items": execution(), "description": "an array of executions" },
            },
        },
        "scheduled_at": { "$gte": bson::DateTime::from_millis(*DUE_MS.start()), "$lte": bson::DateTime::from_millis(*DUE_MS.end()) },
        "$expr": { "$or": [
            { "$ne": [{ "$type": "$workable" }, "object"] },
            { "$lte": [{ "$bsonSize": "$workable" }, i64::try_from(LARGEST_WORKABLE).unwrap_or(i64::MAX)] },
        ] },
    }
}

fn optional(of: &str, description: &str) -> Document {
    doc! { "bsonType": [of, "null"], "description": description }
}

/// A document. PHP stores an empty one as an empty array.
fn parameters() -> Document {
    doc! { "bsonType": ["object", "array", "null"], "maxItems": 0, "description": "a document" }
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

async fn ensure_indexes(store: &Store, version: i32) -> Result<(), StoreError> {
    for index in indexes() {
        let found = indexes_of(store, index.collection).await?;
        let named = found.iter().find(|found| found.get_str("name").is_ok_and(|name| name == index.name));
        let part = |key: &str| named.and_then(|named| named.get_document(key).ok());
        // In this very order.
        let same_keys = part("key").is_some_and(|keys| keys.iter().eq(index.keys.iter()));
        if same_keys && part("partialFilterExpression") == index.only.as_ref() {
            continue;
        }
        if named.is_some() {
            if version > SCHEMA_VERSION {
                continue;
            }
            drop_index(store, index.collection, index.name).await?;
        }
        create_index(store, &index).await?;
    }
    Ok(())
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
    options.extend(index.only.clone().map(|only| ("partialFilterExpression".to_owned(), Bson::Document(only))));
    let command = doc! { "createIndexes": index.collection, "indexes": [options] };
    match run(store, "create_index", "", command.clone()).await {
        // Another process has created it with other keys: the release that is older keeps the newer one's, by the version of the schema.
        Err(StoreError::Mongo { source, .. }) if code_of(&source) == Some(INDEX_KEY_SPECS_CONFLICT) => {
            drop_index(store, index.collection, index.name).await?;
            run(store, "create_index", "", command).await
        }
        other => other,
    }
}

async fn drop_index(store: &Store, collection: &str, name: &str) -> Result<(), StoreError> {
    match run(store, "drop_index", "", doc! { "dropIndexes": collection, "index": name }).await {
        // Another process was faster.
        Err(StoreError::Mongo { source, .. }) if matches!(code_of(&source), Some(INDEX_NOT_FOUND | NAMESPACE_NOT_FOUND)) => Ok(()),
        other => other,
    }
}

/// Drops what an earlier release had under the same name with another number, unless the database is a newer release's.
pub(super) async fn drop_outdated_indexes(store: &Store) -> Result<(), StoreError> {
    if version(store).await? > SCHEMA_VERSION {
        return Ok(());
    }
    for index in indexes() {
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
