//! The one list of collections, validators and indexes, named after the operations they serve.
//!
//! Made at the start of every process and safe to make again: what is there already is left alone. The schema's
//! version is kept in `metadata`, so that an up-to-date database needs nothing but ordinary rights.

use bson::{Document, doc};
use mongodb::{Collection, IndexModel, options::IndexOptions};

use super::{Store, StoreError, call, code_of};

/// Version of what this file describes. Raised with every change to it.
const SCHEMA_VERSION: i32 = 3;

/// Largest `workable` that is accepted, in bytes of BSON: a job, its history and its result must fit into MongoDB's
/// 16 MiB together.
pub const LARGEST_WORKABLE: usize = 4 * 1024 * 1024;

/// Serves `due_jobs`, `groups` and `next_due`. A start takes an entry out, so that the later delete touches little. The class
/// comes before the dates: a backlog that nobody can take is never walked over.
pub const DUE_JOBS: &str = "due_jobs";
/// Serves `prune_archived`, the statistics and the newest finished jobs.
pub const ARCHIVED_BY_END: &str = "archived_by_end";

/// Size of the collection of hints: minutes of them on a busy system; a hint is stale after a second.
const SIGNALS_BYTES: i64 = 16 * 1024 * 1024;

/// Makes what is missing.
///
/// # Errors
/// When MongoDB refuses or cannot be reached.
pub(super) async fn ensure(store: &Store) -> Result<(), StoreError> {
    let found = version(store).await?;
    if found > SCHEMA_VERSION {
        tracing::warn!(found, known = SCHEMA_VERSION, "the database was set up by a newer release; leaving its schema as it is");
    }
    if found < SCHEMA_VERSION {
        create_collections(store).await?;
        create_indexes(store).await?;
    }
    // Also the proof that this user may write at all.
    let metadata = store.metadata.clone();
    call("ensure_schema", async move {
        metadata.update_one(doc! { "_id": "schema" }, doc! { "$max": { "version": SCHEMA_VERSION } }).upsert(true).await
    })
    .await?;
    Ok(())
}

/// Whether any of the collections is there that jobs and workers are in. Needs the role `read`.
pub(super) async fn is_set_up(store: &Store) -> Result<bool, StoreError> {
    let database = store.database.clone();
    let names = call("collections", async move { database.list_collection_names().await }).await?;
    Ok(names.iter().any(|name| ["scheduled", "archived", "roster"].contains(&name.as_str())))
}

async fn version(store: &Store) -> Result<i32, StoreError> {
    let metadata = store.metadata.clone();
    let found = call("schema_version", async move { metadata.find_one(doc! { "_id": "schema" }).await }).await?;
    Ok(found.and_then(|schema| schema.get_i32("version").ok()).unwrap_or(0))
}

async fn create_collections(store: &Store) -> Result<(), StoreError> {
    let validation = |validator: Document| doc! { "validator": validator, "validationLevel": "moderate", "validationAction": "error" };
    create(store, "scheduled", validation(scheduled_validator())).await?;
    create(store, "archived", doc! {}).await?;
    create(store, "roster", doc! {}).await?;
    create(store, "signals", doc! { "capped": true, "size": SIGNALS_BYTES }).await?;
    // A tailing cursor on an empty collection ends at once.
    store.publish(&super::Hint::Seed).await?;
    create_channel(store, super::Channel::default()).await
}

/// Makes the collection of a channel, unless it is there.
pub(super) async fn create_channel(store: &Store, channel: super::Channel) -> Result<(), StoreError> {
    create(store, &channel.collection(), doc! { "capped": true, "size": SIGNALS_BYTES }).await?;
    store.publish_to(channel, &super::Hint::Seed).await
}

/// Creates a collection, or gives an existing one the same validator.
async fn create(store: &Store, name: &str, options: Document) -> Result<(), StoreError> {
    let with = |verb: &str| {
        let mut command = doc! { verb: name };
        command.extend(options.clone());
        command
    };
    let (database, command) = (store.database.clone(), with("create"));
    match call("create_collection", async move { database.run_command(command).await }).await {
        Err(StoreError::Mongo { source, .. }) if code_of(&source) == Some(48) => {
            if options.contains_key("validator") {
                let (database, command) = (store.database.clone(), with("collMod"));
                call("change_validator", async move { database.run_command(command).await }).await?;
            }
            Ok(())
        }
        other => other.map(drop),
    }
}

/// The contract for enqueuers in other languages. A document without `locked: false` would be invisible to every
/// index that matters; the rest of a job has defaults. What a worker holds was checked before: its start is not asked again.
fn scheduled_validator() -> Document {
    doc! { "$or": [{ "locked": true, "last_execution.start": { "$type": "objectId" } }, waiting_job()] }
}

fn waiting_job() -> Document {
    let count = doc! { "bsonType": ["int", "long"], "minimum": 0 };
    doc! {
        "$jsonSchema": {
            "required": ["_id", "locked", "group", "priority", "scheduled_at", "workable"],
            "properties": {
                "_id": { "bsonType": "objectId" },
                "locked": { "bsonType": "bool" },
                "group": { "bsonType": "string", "minLength": 1, "maxLength": 256 },
                "priority": { "bsonType": ["int", "long"], "minimum": 0, "maximum": 9 },
                "scheduled_at": { "bsonType": "date" },
                "workable": {
                    "bsonType": "object",
                    "required": ["class"],
                    "properties": { "class": { "bsonType": "string", "minLength": 1, "maxLength": 256 } },
                },
                "attempts": count.clone(),
                "interruptions": count,
            },
        },
        "$expr": { "$or": [
            { "$ne": [{ "$type": "$workable" }, "object"] },
            { "$lte": [{ "$bsonSize": "$workable" }, i64::try_from(LARGEST_WORKABLE).unwrap_or(i64::MAX)] },
        ] },
    }
}

async fn create_indexes(store: &Store) -> Result<(), StoreError> {
    let index = |name: &str, keys: Document, partial: Option<Document>| {
        IndexModel::builder()
            .keys(keys)
            .options(IndexOptions::builder().name(name.to_owned()).partial_filter_expression(partial).build())
            .build()
    };
    for (collection, model) in [
        (
            &store.scheduled,
            index(DUE_JOBS, doc! { "group": 1, "workable.class": 1, "priority": -1, "scheduled_at": 1 }, Some(doc! { "locked": false })),
        ),
        (&store.archived, index(ARCHIVED_BY_END, doc! { "last_execution.ended_at": 1 }, None)),
    ] {
        match create_index(collection, &model).await {
            // IndexKeySpecsConflict: an earlier release had other keys under this name.
            Err(StoreError::Mongo { source, .. }) if code_of(&source) == Some(86) => {
                let (outdated, name) =
                    (collection.clone(), model.options.as_ref().and_then(|options| options.name.clone()).unwrap_or_default());
                call("drop_index", async move { outdated.drop_index(name).await }).await?;
                create_index(collection, &model).await?;
            }
            created => created?,
        }
    }
    Ok(())
}

async fn create_index(collection: &Collection<Document>, model: &IndexModel) -> Result<(), StoreError> {
    let (collection, model) = (collection.clone(), model.clone());
    call("create_index", async move { collection.create_index(model).await }).await.map(drop)
}
