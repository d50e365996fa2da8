//! The collections: creates missing ones, and replaces or changes wrong ones.

use bson::{Document, Timestamp, doc};
use futures_util::TryStreamExt;
use mongodb::results::CollectionSpecification;

use super::{
    SCHEMA_VERSION, run,
    validators::{groups_validator, limits_validator, pauses_validator, scheduled_validator, schedulers_validator},
};
use crate::{
    roster::Channel,
    store::{
        Store, StoreError, call, code_of,
        error::code::{NAMESPACE_EXISTS, NAMESPACE_NOT_FOUND},
    },
};

/// Size of a collection of hints: some minutes of hints on a busy system. A hint is useless after a second.
const SIGNALS_BYTES: i64 = 16 * 1024 * 1024;

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

pub(super) async fn ensure_collections(store: &Store, version: i32, channel: Option<Channel>) -> Result<(), StoreError> {
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
pub(in crate::store) async fn ensure_events(store: &Store, size: Option<i64>) -> Result<(), StoreError> {
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
