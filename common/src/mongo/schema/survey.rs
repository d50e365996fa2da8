//! How the schema of a database differs from that of this release, for people. It writes nothing.

use std::collections::BTreeSet;

use bson::Document;

use super::{
    features_in_use,
    indexes::{Index, indexes},
    kind::Kind,
    make::{has_entries_of, has_name, indexes_of, is_hidden, is_of_earlier_release},
    ownership::examine,
    version,
};
use crate::{
    base::integer,
    mongo::{Client, StoreError},
};

/// What is wrong with an index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IndexFault {
    /// It is not there.
    Missing,
    /// An index of its name has other keys or other documents.
    Different,
    /// An operator has hidden it.
    Hidden,
    /// It is of an earlier release.
    Outdated,
    /// An operator has made it.
    Foreign,
}

/// A capped collection.
#[derive(Clone, Debug)]
pub(crate) struct Ring {
    /// With the prefix of the client.
    pub(crate) collection: String,
    /// Its size in bytes; `None` if it is not capped.
    pub(crate) size: Option<i64>,
}

/// The schema as it was found.
#[derive(Clone, Debug, Default)]
pub(crate) struct Surveyed {
    /// Its version; 0 without a schema.
    pub(crate) version: i32,
    /// The collections, with the prefix of the client, whose validators are not those of this release.
    pub(crate) other_validators: Vec<String>,
    /// The number of indexes that are as they should be.
    pub(crate) good_indexes: usize,
    /// The others: collection, with the prefix of the client, name and fault.
    pub(crate) indexes: Vec<(String, String, IndexFault)>,
    pub(crate) rings: Vec<Ring>,
}

/// Reads the collections and indexes.
///
/// # Errors
/// [`StoreError::Foreign`] if a collection of an application has one of our names.
pub(crate) async fn survey(client: &Client) -> Result<Surveyed, StoreError> {
    let (found, features) = (examine(client).await?, features_in_use(client).await?);
    let mut surveyed = Surveyed { version: version(client).await?, ..Surveyed::default() };
    for found in &found {
        if matches!(found.kind, Kind::Hints | Kind::Events) {
            let size = if found.is_capped() { integer(found.options.get("size")) } else { None };
            surveyed.rings.push(Ring { collection: client.named(&found.name), size });
        }
        let is_other = found.kind.validator().is_some_and(|ours| found.validator() != Some(&ours));
        surveyed.other_validators.extend(is_other.then(|| client.named(&found.name)));
    }
    let wanted: Vec<Index> =
        indexes().into_iter().filter(|index| index.feature.is_none_or(|feature| features.contains(&feature))).collect();
    for collection in wanted.iter().map(|index| index.collection).collect::<BTreeSet<_>>() {
        let there = indexes_of(client, collection).await?;
        let mut add = |name: &str, fault| surveyed.indexes.push((client.named(collection), name.to_owned(), fault));
        let ours: Vec<&Index> = wanted.iter().filter(|index| index.collection == collection).collect();
        let mut good = 0;
        for index in &ours {
            match fault_of(index, &there) {
                Some(fault) => add(index.name, fault),
                None => good += 1,
            }
        }
        let names = indexes().map(|index| index.name);
        for other in there.iter().filter_map(|found| found.get_str("name").ok().map(|name| (name, found))) {
            match other {
                ("_id_", _) => {}
                (name, found) if is_of_earlier_release(collection, found) => add(name, IndexFault::Outdated),
                (name, _) if !names.contains(&name) => add(name, IndexFault::Foreign),
                _ => {}
            }
        }
        surveyed.good_indexes += good;
    }
    Ok(surveyed)
}

fn fault_of(index: &Index, there: &[Document]) -> Option<IndexFault> {
    let Some(named) = there.iter().find(|found| has_name(found, index.name)) else { return Some(IndexFault::Missing) };
    if !index.kind.is_met_by(named) || !has_entries_of(named, index) {
        return Some(IndexFault::Different);
    }
    is_hidden(named).then_some(IndexFault::Hidden)
}
