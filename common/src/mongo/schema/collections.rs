//! The collections: creates missing ones, and replaces or changes wrong ones.

use bson::{Document, Timestamp, doc, oid::ObjectId};

use super::{
    Feature, SCHEMA_VERSION, ensure_made, features_in_use,
    kind::{COLLECTIONS, EVENTS, Kind, MESSAGES, SIGNALS_BYTES},
    note,
    ownership::{Found, examine, refuse_foreign_documents},
    run,
};
use crate::{
    base::{chain, integer},
    mongo::{
        Client,
        channel::Channel,
        error::{StoreError, code::NAMESPACE_EXISTS},
    },
};

impl Kind {
    /// Whether an existing collection has the options of this kind.
    pub(super) fn is_met_by(self, found: &Found) -> bool {
        match self {
            Self::Jobs | Self::Limits | Self::Groups | Self::Pauses | Self::Schedules | Self::Messages => {
                found.validator() == self.validator().as_ref()
            }
            Self::Hints => found.is_capped() && integer(found.options.get("size")).is_some_and(|size| size >= SIGNALS_BYTES),
            Self::Events | Self::Plain | Self::Later => true,
        }
    }
}

/// Creates missing collections and mends wrong ones, if all that have our names are Recruiter's. Returns whether all are listed as such.
///
/// # Errors
/// [`StoreError::Foreign`], before anything is written.
pub(crate) async fn ensure_collections(client: &Client, version: i32, channel: Option<Channel>) -> Result<bool, StoreError> {
    let found = examine(client).await?;
    let mut is_noted = found.iter().all(|found| found.is_listed);
    for name in wanted(client, &found, channel).await? {
        match ensure_one(client, &found, version, &name).await {
            Err(error @ StoreError::Foreign { .. }) if name == MESSAGES => {
                // A process that does not start would run no job at all.
                tracing::error!(error = chain(&error), "a validator is missing, because it would refuse documents of an application");
            }
            is_new => is_noted &= !is_new?,
        }
    }
    Ok(is_noted)
}

/// The names of the collections that a start makes or mends.
pub(super) async fn wanted(client: &Client, found: &[Found], channel: Option<Channel>) -> Result<Vec<String>, StoreError> {
    let has_messages = features_in_use(client).await?.contains(&Feature::Messages);
    let is_at_once = |kind: Kind| !matches!(kind, Kind::Events | Kind::Later) && (kind != Kind::Messages || has_messages);
    let at_once = COLLECTIONS.iter().filter(|(_, kind)| is_at_once(*kind)).map(|(name, _)| (*name).to_owned());
    // Channels of other workers, which may have become ordinary collections.
    let others = found.iter().filter(|found| found.kind == Kind::Hints).map(|found| found.name.clone());
    let mut wanted: Vec<String> = at_once.chain(channel.map(Channel::collection)).chain(others).collect();
    // It shows that a start has begun to make the others.
    wanted.sort_unstable_by_key(|name| (Kind::of(name) != Some(Kind::Jobs), name.clone()));
    wanted.dedup();
    Ok(wanted)
}

/// The same for one collection, from those that were found. Returns whether it is a new one.
pub(crate) async fn ensure_one(client: &Client, found: &[Found], version: i32, name: &str) -> Result<bool, StoreError> {
    let Some(kind) = Kind::of(name) else { return Ok(false) };
    match found.iter().find(|found| found.name == name) {
        None => create(client, name, kind).await.map(|()| true),
        Some(found) if kind.is_met_by(found) => Ok(false),
        Some(found) if kind == Kind::Hints => replace(client, found).await.map(|()| true),
        // Collections of a newer release are left unchanged.
        Some(_) if version > SCHEMA_VERSION => Ok(false),
        Some(_) => {
            // An application may have filled it since it was listed. All documents are read, so only by a user who may go on.
            if kind == Kind::Messages && may_change(client, name).await? {
                match refuse_foreign_documents(client, name).await {
                    Err(error) if error.is_too_slow() || matches!(error, StoreError::TimedOut { .. }) => {
                        let collection = client.named(name);
                        tracing::warn!(
                            collection,
                            error = chain(&error),
                            "a validator is missing: the documents could not be examined in time"
                        );
                        return Ok(false);
                    }
                    other => other?,
                }
            } else if kind == Kind::Messages {
                return Ok(false);
            }
            change_validator(client, name, kind).await.map(|()| false)
        }
    }
}

/// Creates a collection, unless another process has created it.
async fn create(client: &Client, name: &str, kind: Kind) -> Result<(), StoreError> {
    make(client, name, kind.options()).await?;
    if kind == Kind::Hints { seed(client, name).await } else { Ok(()) }
}

async fn make(client: &Client, name: &str, options: Document) -> Result<(), StoreError> {
    let mut command = doc! { "create": client.named(name) };
    command.extend(options);
    match run(client, "create_collection", "", command).await {
        Err(error) if error.code() == Some(NAMESPACE_EXISTS) => Ok(()),
        other => other,
    }
}

/// Creates the ring of events, with this size in bytes, unless it exists. Replaces an ordinary collection, but not one of an application.
pub(crate) async fn ensure_events(client: &Client, size: Option<i64>) -> Result<(), StoreError> {
    ensure_made(client).await?;
    let found = examine(client).await?;
    match found.iter().find(|found| found.kind == Kind::Events) {
        Some(found) if found.is_capped() => return Ok(()),
        Some(found) => replace(client, found).await?,
        None => {
            make(client, EVENTS, doc! { "capped": true, "size": size.unwrap_or(SIGNALS_BYTES) }).await?;
            seed(client, EVENTS).await?;
        }
    }
    note(client).await
}

/// Inserts a first document, because a tailing cursor on an empty collection ends at once.
async fn seed(client: &Client, name: &str) -> Result<(), StoreError> {
    let filler = doc! { "at": Timestamp { time: 0, increment: 0 }, "kind": "seed" };
    let command = doc! { "insert": client.named(name), "documents": [filler], "writeConcern": { "w": 1 } };
    client.write("seed", command).await.map(drop)
}

/// Replaces an ordinary collection, which an insert into a missing one creates, by a capped one. Uses a rename, which
/// is atomic: between a drop and a creation the next hint would create the ordinary collection again.
///
/// Its documents are examined again: the collection may be ours and have documents of an application.
async fn replace(client: &Client, found: &Found) -> Result<(), StoreError> {
    refuse_foreign_documents(client, &found.name).await?;
    // No other collection has this name.
    let capped = format!("{}.{}", found.name, ObjectId::new());
    match make(client, &capped, Kind::Hints.options()).await {
        Err(error) if error.is_unauthorized() => return convert(client, found).await,
        other => other?,
    }
    let full = |name: &str| format!("{}.{}", client.database.name(), client.named(name));
    let command = doc! { "renameCollection": full(&capped), "to": full(&found.name), "dropTarget": true };
    if let Err(error) = run(client, "replace_collection", "admin", command).await {
        run(client, "replace_collection", "", doc! { "drop": client.named(&capped) }).await?;
        return Err(error);
    }
    say_replaced(client, found);
    seed(client, &found.name).await
}

/// The same for a MongoDB user with rights on our collections only, and so not on one with a new name. MongoDB locks the database meanwhile.
async fn convert(client: &Client, found: &Found) -> Result<(), StoreError> {
    let command = doc! { "convertToCapped": client.named(&found.name), "size": SIGNALS_BYTES };
    run(client, "replace_collection", "", command).await?;
    say_replaced(client, found);
    seed(client, &found.name).await
}

fn say_replaced(client: &Client, found: &Found) {
    tracing::warn!(
        collection = client.named(&found.name),
        "replaced an ordinary collection of hints by a capped one, because an ordinary collection cannot be tailed"
    );
}

async fn change_validator(client: &Client, name: &str, kind: Kind) -> Result<(), StoreError> {
    modify(client, name, kind.options()).await.map(drop)
}

/// Whether this MongoDB user may change the collection: a change of nothing needs the same right.
async fn may_change(client: &Client, name: &str) -> Result<bool, StoreError> {
    modify(client, name, doc! {}).await
}

async fn modify(client: &Client, name: &str, options: Document) -> Result<bool, StoreError> {
    let mut command = doc! { "collMod": client.named(name) };
    command.extend(options);
    match run(client, "change_validator", "", command).await {
        Err(error) if error.is_unauthorized() => {
            tracing::warn!(
                collection = client.named(name),
                "the validator belongs to another release, and this MongoDB user may not change it; continuing with it. Give the user a role with the action collMod on this collection, and start any process again"
            );
            Ok(false)
        }
        other => other.map(|()| true),
    }
}
