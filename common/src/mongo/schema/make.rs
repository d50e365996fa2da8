//! Makes missing indexes, replaces wrong ones, and drops those of earlier releases.

use std::{collections::HashMap, sync::PoisonError, time::Instant};

use bson::{Bson, Document, doc};

use super::{
    Feature, GRAPH_JOBS, SCHEMA_VERSION, features_in_use,
    indexes::{Index, IndexKind, indexes},
    note_in_use,
    ownership::refuse_foreign_documents,
    repeated_call, run, version,
};
use crate::{
    base::chain,
    mongo::{
        CALL_LIMIT, Client, StandIn,
        error::{
            StoreError,
            code::{INDEX_KEY_SPECS_CONFLICT, INDEX_NOT_FOUND, NAMESPACE_NOT_FOUND},
        },
        readable::Readable as _,
    },
};

pub(crate) async fn ensure_indexes(client: &Client, version: i32) -> Result<(), StoreError> {
    let mut features = features_in_use(client).await?;
    // The database may have been dropped since.
    let known: Vec<Feature> = client.features.lock().unwrap_or_else(PoisonError::into_inner).iter().copied().collect();
    for feature in known {
        if !features.contains(&feature) {
            features.push(feature);
            note_in_use(client, feature).await?;
        }
    }
    match ensure_these_indexes(client, version, &features).await {
        Err(error @ StoreError::Foreign { .. }) => {
            // A process that does not start would run no job at all.
            tracing::error!(error = chain(&error), "an index is missing, because MongoDB would delete documents of an application by it");
            Ok(())
        }
        other => other,
    }
}

/// Makes these indexes. One that cannot be made, or that an operator has hidden, does not keep the others from being made: reads then use
/// another index or none. Two failures are errors, after the other indexes are made: a refused unique index, because without it a promise
/// would be broken; and an index of expiry on a collection with documents of an application, because MongoDB would delete them, also if the
/// collection is listed as Recruiter's.
pub(crate) async fn ensure_these_indexes(client: &Client, version: i32, features: &[Feature]) -> Result<(), StoreError> {
    let mut failed = None;
    for index in indexes().into_iter().filter(|index| index.feature.is_none_or(|feature| features.contains(&feature))) {
        let found = indexes_of(client, index.collection).await?;
        let named = found.iter().find(|found| has_name(found, index.name));
        let is_as_good = |found: &Document| index.kind.is_met_by(found) && has_entries_of(found, &index);
        let is_right = named.is_some_and(|named| index.kind.is_met_by(named) && has_entries_of(named, &index));
        if !is_right && (named.is_none() || version <= SCHEMA_VERSION) {
            if index.kind == IndexKind::Expiry
                && let Err(error) = refuse_foreign_documents(client, index.collection).await
            {
                failed = Some(error);
                continue;
            }
            if named.is_some() {
                drop_index(client, index.collection, index.name).await?;
            }
            let is_refused = match create_index(client, &index).await {
                Err(error) if error.is_index_refused() && index.kind == IndexKind::Unique && !found.iter().any(is_as_good) => {
                    failed = Some(error);
                    continue;
                }
                Err(error) if error.is_index_refused() => {
                    warn_of(client, &index, &found, Some(&error));
                    true
                }
                other => other.map(|()| false)?,
            };
            let found = indexes_of(client, index.collection).await?;
            stand_in(client, &index, &found, is_refused);
        } else {
            if named.is_some_and(is_hidden) {
                warn_of(client, &index, &found, None);
            }
            stand_in(client, &index, &found, false);
        }
    }
    failed.map_or(Ok(()), Err)
}

/// Finds out which indexes are hidden or under another name, and what reads use in their places. Needs the role `read`.
pub(crate) async fn learn_stand_ins(client: &Client) -> Result<(), StoreError> {
    // Before the first reply, so that other reads do not ask as well.
    client.stand_ins.lock().unwrap_or_else(PoisonError::into_inner).learned = Some(Instant::now());
    let mut by_collection: HashMap<&str, Vec<Document>> = HashMap::new();
    for index in indexes() {
        if !by_collection.contains_key(index.collection) {
            by_collection.insert(index.collection, indexes_of(client, index.collection).await?);
        }
        stand_in(client, &index, &by_collection[index.collection], false);
    }
    Ok(())
}

/// Notes what reads use in place of this index. A missing index has no stand-in: the read that meets it makes it again.
fn stand_in(client: &Client, index: &Index, found: &[Document], is_refused: bool) {
    let is_usable = |found: &&Document| has_entries_of(found, index) && !is_hidden(found);
    let usable = || found.iter().filter(is_usable);
    let other = || Some(usable().next()?.get_str("name").ok()?.to_owned());
    let stand_in = match other() {
        _ if found.iter().any(|found| has_name(found, index.name) && !is_hidden(found)) => None,
        // One hint serves both collections with this index.
        Some(other) if index.name != GRAPH_JOBS => Some(StandIn::Index(other)),
        other => (other.is_some() || is_refused || found.iter().any(|found| has_keys_of(found, index))).then_some(StandIn::Scan),
    };
    let mut stand_ins = client.stand_ins.lock().unwrap_or_else(PoisonError::into_inner);
    match stand_in {
        Some(stand_in) => drop(stand_ins.by_index.insert(index.name, stand_in)),
        None if index.name == GRAPH_JOBS && index.collection == "archived" => {}
        None => drop(stand_ins.by_index.remove(index.name)),
    }
}

fn warn_of(client: &Client, index: &Index, found: &[Document], error: Option<&StoreError>) {
    let collection = client.named(index.collection);
    let Some(error) = error.map(|error| chain(error)) else {
        let remedy = format!("db.getCollection('{collection}').unhideIndex('{}'); it is used a minute later", index.name);
        tracing::warn!(collection, index = index.name, remedy, "an index is hidden; going on without it, which is slow");
        return;
    };
    match found.iter().filter(|found| has_keys_of(found, index)).find_map(|found| found.get_str("name").ok()) {
        Some(other) => {
            let remedy = format!("db.getCollection('{collection}').dropIndex('{other}'), then start any process again");
            let message = "an index cannot be made, because another one has its keys; going on with what is there";
            tracing::warn!(collection, index = index.name, other, remedy, error, "{message}");
        }
        None => tracing::warn!(collection, index = index.name, error, "an index cannot be made; going on without it, which is slow"),
    }
}

pub(super) fn has_name(found: &Document, name: &str) -> bool {
    found.get_str("name").is_ok_and(|found| found == name)
}

pub(super) fn is_hidden(found: &Document) -> bool {
    found.get_bool("hidden").unwrap_or(false)
}

/// Whether an index has the keys of ours, in this order. Shells write a direction as a number of any type.
fn has_keys_of(found: &Document, index: &Index) -> bool {
    let directions = |keys: &Document| -> Vec<_> { keys.iter().map(|(field, value)| (field.clone(), direction(value))).collect() };
    found.get_document("key").is_ok_and(|keys| directions(keys) == directions(&index.keys))
}

fn direction(value: &Bson) -> Option<f64> {
    value.as_f64().or(value.as_i32().map(f64::from)).or_else(|| value.as_i64()?.to_string().parse().ok())
}

/// Whether an index has the keys and the documents of ours.
pub(super) fn has_entries_of(found: &Document, index: &Index) -> bool {
    has_keys_of(found, index)
        && found.get_document("partialFilterExpression").ok() == index.only.as_ref()
        && !found.get_bool("sparse").unwrap_or(false)
        && !found.contains_key("collation")
}

pub(super) async fn indexes_of(client: &Client, collection: &'static str) -> Result<Vec<Document>, StoreError> {
    let (database, collection) = (client.database.clone(), client.named(collection));
    let listed = repeated_call("indexes", CALL_LIMIT, || {
        let (database, collection) = (database.clone(), collection.clone());
        async move { database.run_cursor_command(doc! { "listIndexes": collection }).await?.readable().await }
    });
    match listed.await {
        Err(error) if error.code() == Some(NAMESPACE_NOT_FOUND) => Ok(Vec::new()),
        other => other,
    }
}

async fn create_index(client: &Client, index: &Index) -> Result<(), StoreError> {
    let mut options = doc! { "key": &index.keys, "name": index.name };
    options.extend(index.kind.options());
    options.extend(index.only.clone().map(|only| ("partialFilterExpression".to_owned(), Bson::Document(only))));
    let command = doc! { "createIndexes": client.named(index.collection), "indexes": [options] };
    match run(client, "create_index", "", command.clone()).await {
        // Another process has just created it with other keys. It is replaced: of two releases, the older one keeps the
        // index of the newer schema version.
        Err(error) if error.code() == Some(INDEX_KEY_SPECS_CONFLICT) => {
            drop_index(client, index.collection, index.name).await?;
            run(client, "create_index", "", command).await
        }
        Err(error) if index.kind == IndexKind::Unique && error.is_duplicate() => {
            // Documents that were inserted while the index was missing. A process that does not start would run no job at all.
            tracing::error!(
                collection = client.named(index.collection),
                index = index.name,
                error = chain(&error),
                "jobs are not unique: two documents have the same unique key. Cancel one of them, and start any process again"
            );
            Ok(())
        }
        other => other,
    }
}

async fn drop_index(client: &Client, collection: &str, name: &str) -> Result<(), StoreError> {
    match run(client, "drop_index", "", doc! { "dropIndexes": client.named(collection), "index": name }).await {
        // Another process has dropped it.
        Err(error) if matches!(error.code(), Some(INDEX_NOT_FOUND | NAMESPACE_NOT_FOUND)) => Ok(()),
        other => other,
    }
}

/// Indexes of earlier releases that have no successor.
const GONE: [(&str, &str); 1] = [("scheduled", "permits")];

/// Drops the indexes of earlier releases that are [`GONE`] or have the same name and another number, unless the schema of the database is
/// newer.
pub(crate) async fn drop_outdated_indexes(client: &Client) -> Result<(), StoreError> {
    if version(client).await? > SCHEMA_VERSION {
        return Ok(());
    }
    let features = features_in_use(client).await?;
    // The collection of a feature that is not in use may not exist.
    for index in indexes().into_iter().filter(|index| index.feature.is_none_or(|feature| features.contains(&feature))) {
        for found in indexes_of(client, index.collection).await? {
            let name = found.get_str("name").unwrap_or_default();
            if is_earlier(&index, &found) || GONE.contains(&(index.collection, name)) {
                drop_index(client, index.collection, name).await?;
                tracing::info!(collection = client.named(index.collection), index = name, "dropped an index of an earlier release");
            }
        }
    }
    Ok(())
}

/// Whether an index is one of an earlier release, that its leader has not dropped yet.
pub(super) fn is_of_earlier_release(collection: &str, found: &Document) -> bool {
    let is_gone = found.get_str("name").is_ok_and(|name| GONE.contains(&(collection, name)));
    is_gone || indexes().iter().any(|index| index.collection == collection && is_earlier(index, found))
}

/// Whether an index has the name of ours with another number. An operator's has the default name, which ends with a number as well.
fn is_earlier(index: &Index, found: &Document) -> bool {
    let name = found.get_str("name").unwrap_or_default();
    name != index.name && without_number(name) == without_number(index.name) && name != default_name(found)
}

/// The name that MongoDB gives to an index with these keys.
fn default_name(found: &Document) -> String {
    let keys = found.get_document("key").into_iter().flatten();
    keys.map(|(field, direction)| format!("{field}_{direction}")).collect::<Vec<_>>().join("_")
}

fn without_number(name: &str) -> &str {
    name.trim_end_matches(|digit: char| digit.is_ascii_digit()).trim_end_matches('_')
}
