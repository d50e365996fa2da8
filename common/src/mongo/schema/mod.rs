//! The only list of collections, validators and indexes, named after the operations they serve.
//!
//! Checked when a process starts, and when an error reports that something is missing. Correct parts are left
//! unchanged, others are created again. A collection of an application is refused before anything is written. The role `readWrite` is
//! enough for this, with one exception: changing an existing validator needs the action `collMod`. Without it a process logs a warning and
//! goes on with the old validator. A process whose MongoDB user may not create what is missing asks the leading recruiter for it (`asked`).
//!
//! Each index on `scheduled` costs every archival some microseconds, also for jobs that are not in it. So the indexes of a feature are made
//! when it is used for the first time. The version of the schema keeps an older release from changing what a newer one has made. An index with
//! another number (`due_jobs_2`) is built beside the old one, which the first leader of the new release drops.
//!
//! | file | content |
//! |---|---|
//! | `asked` | what the leading recruiter makes for processes that may not |
//! | `collections` | the collections of a job system |
//! | `kind` | the names of the collections, and how each kind of them is made |
//! | `ownership` | which collections are Recruiter's |
//! | `validators` | what documents of other programs must look like |
//! | `indexes` | the indexes, and the features that have their own |
//! | `make` | makes and replaces indexes |
//! | `survey` | how the schema of a database differs from this one |
//! | `migrate` | what a start changes, for `recruiter migrate` |
//! | `version` | the version of a schema, and which programs may work with it |

mod asked;
mod collections;
mod indexes;
mod kind;
mod make;
mod migrate;
mod ownership;
mod survey;
mod validators;
mod version;

use std::time::Duration;

use backon::{ConstantBuilder, Retryable as _};
use bson::{Bson, Document, RawDocumentBuf, doc};
use mongodb::error::Error;

pub(crate) use self::indexes::Feature;
pub use self::indexes::{
    ARCHIVED_BY_END, DUE_JOBS, EXPIRING_JOBS, GATED_JOBS, GRAPH_JOBS, HELD_PERMITS, LINES, SCHEDULE_REVISIONS, UNIQUE, UNIQUE_AFTER,
    UNIQUE_WHILE_WAITING, WAITING_JOBS,
};
pub use self::migrate::{Action, Change, Part};
pub(crate) use self::{
    asked::{MADE_WITHIN, WHOLE, made_or_asked, make_asked},
    indexes::{any_date, any_gate, never_started},
    make::{drop_outdated_indexes, learn_stand_ins},
    migrate::changes,
    ownership::{any_worker, note, refuse_foreign_audit},
    survey::{IndexFault, Ring, Surveyed, survey},
    version::version,
};
use self::{
    collections::{ensure_collections, ensure_events, ensure_one},
    kind::MESSAGES,
    make::{ensure_indexes, ensure_these_indexes},
    version::raise,
};
use super::{Channel, Client, StoreError, call, call_within, readable};
use crate::base::{Patience, at_once, pause};

/// Maximum number of running jobs of one resource.
pub const LARGEST_CAPACITY: u32 = 100_000;
/// Maximum number of maintenance windows of a group.
pub const MOST_WINDOWS: usize = 50;
/// Maximum number of missed runs that [`Missed::All`](crate::schedules::Missed::All) makes up for.
pub const MOST_MISSED: u16 = 1_000;
/// The name of the bucket: its collections are `payloads.files` and `payloads.chunks`.
pub(crate) const BUCKET: &str = "payloads";
/// A roster document with two of these fields is a worker's.
pub(crate) const WORKER_FIELDS: [&str; 4] = ["work_on", "lease_ms", "assigned_to", "working_on"];
/// The names of all collections without a prefix. Of the channels only the first is among them.
pub fn collection_names() -> impl Iterator<Item = &'static str> {
    kind::COLLECTIONS.iter().map(|(name, _)| *name)
}

/// Version of the schema in this file. Every change to the schema increases it.
pub(crate) const SCHEMA_VERSION: i32 = 19;
/// Version of the schema of the previous release, whose programs may work beside those of this one. Older programs refuse the database.
/// `tests/previous-version` has it as well, with the commit.
pub(crate) const OLDEST_BESIDE: i32 = 17;
/// Maximum size of a `workable`, in bytes of BSON. A job with its history and its result must fit into MongoDB's limit
/// of 16 MiB.
pub const LARGEST_WORKABLE: usize = 4 * 1024 * 1024;
/// Maximum size of the `_id` of an envelope in `messages`, in bytes of `{_id}`. MongoDB puts three copies of it into an event of a change
/// stream, and refuses an event above 16 MB, which would end the stream; a position contains it, too.
pub(crate) const LARGEST_KEY: i64 = 4096;
/// How long a start waits for an index build. With a million waiting jobs a build takes seconds.
const BUILT_WITHIN: Duration = Duration::from_secs(600);

/// Called at a start: creates missing parts and replaces wrong ones.
pub(crate) async fn ensure(client: &Client) -> Result<(), StoreError> {
    let found = version(client).await?;
    if found > SCHEMA_VERSION {
        tracing::warn!(found, known = SCHEMA_VERSION, "the database was set up by a newer release; leaving its schema as it is");
    }
    let is_noted = ensure_collections(client, found, None).await?;
    let patience = Patience::new(BUILT_WITHIN);
    (|| ensure_indexes(client, found))
        .retry(ConstantBuilder::new().without_max_times())
        .sleep(at_once)
        .when(|error| matches!(error, StoreError::TimedOut { .. }) && !patience.is_over())
        .notify(|_, _| tracing::info!("an index is being built; waiting for it"))
        .await?;
    // This write also proves that the user may write.
    raise(client).await?;
    if is_noted { Ok(()) } else { note(client).await }
}

/// Makes the schema unless the database has one. Called before other writes that may be the first ones: without the schema a collection that
/// they make would count as an application's.
pub(crate) async fn ensure_made(client: &Client) -> Result<(), StoreError> {
    if version(client).await? == 0 { ensure(client).await } else { Ok(()) }
}

/// Called while a process runs, when an error reports that something is missing. Creates missing parts, including the collection of this
/// channel, and replaces wrong ones. If this MongoDB user may not, the leading recruiter is asked for it.
pub(crate) async fn mend(client: &Client, channel: Option<Channel>) -> Result<(), StoreError> {
    match mend_at_once(client, channel).await {
        Err(error) if error.lacks_right_of_schema() => {
            asked::ask(client, WHOLE).await?;
            if let Some(channel) = channel {
                asked::ask(client, &channel.collection()).await?;
            }
            Err(error)
        }
        other => other,
    }
}

async fn mend_at_once(client: &Client, channel: Option<Channel>) -> Result<(), StoreError> {
    let found = version(client).await?;
    let is_noted = ensure_collections(client, found, channel).await?;
    ensure_indexes(client, found).await?;
    if is_noted { Ok(()) } else { note(client).await }
}

/// Creates the collection of a channel if it is missing, or asks for it.
pub(crate) async fn join_channel(client: &Client, channel: Channel) -> Result<(), StoreError> {
    made_or_asked(client, &channel.collection(), MADE_WITHIN, || ensure_channel(client, channel)).await
}

async fn ensure_channel(client: &Client, channel: Channel) -> Result<(), StoreError> {
    let is_noted = ensure_collections(client, version(client).await?, Some(channel)).await?;
    if is_noted { Ok(()) } else { note(client).await }
}

/// Whether the database has at least one of the collections for jobs and workers. Needs the role `read`.
///
/// # Errors
/// [`StoreError::Foreign`] if a collection of an application has one of our names.
pub(crate) async fn is_set_up(client: &Client) -> Result<bool, StoreError> {
    let found = ownership::examine(client).await?;
    Ok(found.iter().any(|found| ["scheduled", "archived", "roster"].contains(&found.name.as_str())))
}

/// Whether the schema was made in this database.
///
/// # Errors
/// [`StoreError::Foreign`] if a collection of an application has one of our names.
pub(crate) async fn is_made(client: &Client) -> Result<bool, StoreError> {
    if version(client).await? == 0 {
        return Ok(false);
    }
    let known = match ownership::examine(client).await {
        Ok(_) => make::learn_stand_ins(client).await,
        Err(error) => Err(error),
    };
    match known {
        // A user that may only insert. Its processes have examined the collections.
        Err(error) if error.is_unauthorized() => Ok(true),
        other => other.map(|()| true),
    }
}

/// The features that were used in this database.
pub(crate) async fn features_in_use(client: &Client) -> Result<Vec<Feature>, StoreError> {
    let metadata = client.metadata.clone_with_type::<RawDocumentBuf>();
    let found = call("features", async move { metadata.find_one(doc! { "_id": "features" }).await }).await?;
    let found = found.map(|found| readable(&found)).unwrap_or_default();
    // What is neither true nor false was written by hand over a true: no process writes false.
    let is_in_use = |feature: &Feature| found.get(feature.field()).is_some_and(|noted| !matches!(noted, Bson::Boolean(false) | Bson::Null));
    Ok(Feature::ALL.into_iter().filter(is_in_use).collect())
}

/// Called when a feature is used for the first time: makes its indexes, or asks for them, and notes that it is in use.
pub(crate) async fn begin_to_use(client: &Client, feature: Feature) -> Result<(), StoreError> {
    made_or_asked(client, feature.field(), MADE_WITHIN, || begin_at_once(client, feature)).await
}

/// Creates the ring of events, with this size in bytes, unless it exists, or asks for it.
pub(crate) async fn prepare_events(client: &Client, size: Option<i64>) -> Result<(), StoreError> {
    made_or_asked(client, kind::EVENTS, MADE_WITHIN, || ensure_events(client, size)).await
}

async fn begin_at_once(client: &Client, feature: Feature) -> Result<(), StoreError> {
    ensure_made(client).await?;
    let (found, version) = (ownership::examine(client).await?, version(client).await?);
    if feature == Feature::Messages {
        ensure_one(client, &found, version, MESSAGES).await?;
    }
    ensure_these_indexes(client, version, &[feature]).await?;
    note_in_use(client, feature).await?;
    note(client).await
}

async fn note_in_use(client: &Client, feature: Feature) -> Result<(), StoreError> {
    let (metadata, noted) = (client.metadata.clone(), doc! { "$set": { feature.field(): true } });
    call("note_in_use", async move { metadata.update_one(doc! { "_id": "features" }, noted).upsert(true).await }).await.map(drop)
}

/// The repetitions of a read.
const READ_AGAIN: ConstantBuilder = ConstantBuilder::new().with_delay(Duration::from_millis(50)).with_max_times(19);

/// A read of a collection that another process may be replacing at this moment: it is repeated if MongoDB ends it for that reason, or if the
/// connection breaks. The driver repeats its own reads, but none that is given as a command.
async fn repeated_call<T: Send + 'static, R: Future<Output = Result<T, Error>> + Send + 'static>(
    operation: &'static str,
    limit: Duration,
    once: impl Fn() -> R,
) -> Result<T, StoreError> {
    (|| call_within(limit, operation, once())).retry(READ_AGAIN).sleep(pause).when(may_be_repeated).await
}

fn may_be_repeated(error: &StoreError) -> bool {
    error.is_cursor_lost() || error.is_broken_off()
}

async fn run(client: &Client, operation: &'static str, on: &str, command: Document) -> Result<(), StoreError> {
    let database = if on == "admin" { client.driver.database(on) } else { client.database.clone() };
    call(operation, async move { database.run_command(command).await }).await.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_schema_has_another_version() {
        let validators = kind::COLLECTIONS.map(|(name, kind)| (name, kind.validator()));
        let indexes = indexes::indexes().map(|index| (index.collection, index.name, index.keys, index.only, index.kind.options()));
        let schema = serde_json::to_string(&(validators, indexes)).expect("JSON");
        // FNV-1a.
        let hash = schema.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
        assert_eq!(
            (SCHEMA_VERSION, hash),
            (19, 11_429_543_085_992_137_244),
            "the version is increased, and both are written here: else a database keeps the former schema"
        );
    }
}
