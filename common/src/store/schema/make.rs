//! Makes missing indexes, replaces wrong ones, and drops those of earlier releases.

use std::sync::PoisonError;

use bson::{Bson, Document, doc};
use futures_util::TryStreamExt;

use super::{
    SCHEMA_VERSION, features_in_use,
    indexes::{EXPIRED_MESSAGES, Feature, Index, IndexKind, indexes},
    note_in_use, run, version,
};
use crate::{
    store::{
        Store, StoreError, call, code_of,
        error::code::{INDEX_KEY_SPECS_CONFLICT, INDEX_NOT_FOUND, NAMESPACE_NOT_FOUND},
    },
    telemetry::chain,
};

pub(super) async fn ensure_indexes(store: &Store, version: i32) -> Result<(), StoreError> {
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
pub(super) async fn ensure_these_indexes(store: &Store, version: i32, features: &[Feature]) -> Result<(), StoreError> {
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

/// Indexes of earlier releases that have no successor.
const GONE: [(&str, &str); 1] = [("scheduled", "permits")];

/// Drops the indexes of earlier releases that are [`GONE`] or have the same name and another number, unless the schema of the database is
/// newer.
pub(in crate::store) async fn drop_outdated_indexes(store: &Store) -> Result<(), StoreError> {
    if version(store).await? > SCHEMA_VERSION {
        return Ok(());
    }
    let features = features_in_use(store).await?;
    // The collection of a feature that is not in use may not exist.
    for index in indexes().into_iter().filter(|index| index.feature.is_none_or(|feature| features.contains(&feature))) {
        for found in indexes_of(store, index.collection).await? {
            let name = found.get_str("name").unwrap_or_default();
            let is_earlier = name != index.name && without_number(name) == without_number(index.name);
            if is_earlier || GONE.contains(&(index.collection, name)) {
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
