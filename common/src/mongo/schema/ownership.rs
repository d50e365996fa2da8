//! Whose collections they are. A collection of an application that has one of our names is refused before anything is written.
//!
//! The document `collections` in `metadata` has the UUIDs of the collections that are Recruiter's. A collection with another UUID (an earlier
//! release made it, it was restored, or it was dropped and made again) is examined: it is Recruiter's if it has a validator of
//! this release, or if its documents look like those of Recruiter: all of them, or at least one in a collection that the first insert makes or
//! that has a validator of another release. An empty one is Recruiter's as well.
//!
//! That documents look alike says little in a database without a schema. There a collection without a validator of this release is an
//! application's, unless `scheduled` is Recruiter's: a start makes `scheduled` first, and may have been killed. And a bucket is Recruiter's only
//! if files are in use, which is noted before the first one is written.
//!
//! The collection `audit` is younger than the others, and an application that shares the database may have had one before. Then nothing is
//! refused but what needs an entry in the audit.

use std::{sync::atomic::Ordering, time::Duration};

use bson::{Bson, Document, RawDocumentBuf, doc};
use mongodb::{Collection, options::ReadConcern};

use super::{
    BUCKET, BUILT_WITHIN, Feature, WORKER_FIELDS, features_in_use,
    kind::{AUDIT, Kind},
    repeated_call, version,
};
use crate::mongo::{
    CALL_LIMIT, Client, call,
    error::StoreError,
    readable::{Readable as _, readable},
};

/// The document in `metadata` with the UUIDs of our collections.
const LISTED: &str = "collections";

/// How long a document of Recruiter is searched for among those of an application.
const FOUND_WITHIN: Duration = Duration::from_secs(2);

/// A collection of the database that has one of our names.
pub(crate) struct Found {
    /// Without the prefix of the client.
    pub(crate) name: String,
    pub(crate) kind: Kind,
    pub(crate) options: Document,
    uuid: Bson,
    /// Whether it is a view or a collection of time series.
    is_special: bool,
    pub(crate) is_listed: bool,
    /// Whether it is an application's. Only that of the audit may be.
    pub(crate) is_foreign: bool,
}

impl Found {
    fn new(mut listed: Document, prefix: &str) -> Option<Self> {
        let name = listed.get_str("name").ok()?.strip_prefix(prefix)?.to_owned();
        let kind = Kind::of(&name)?;
        let uuid = listed.get_document_mut("info").ok().and_then(|info| info.remove("uuid")).unwrap_or_default();
        Some(Self {
            name,
            kind,
            options: listed.get_document("options").cloned().unwrap_or_default(),
            uuid,
            is_special: listed.get_str("type").is_ok_and(|kind| kind != "collection"),
            is_listed: false,
            is_foreign: false,
        })
    }

    pub(crate) fn validator(&self) -> Option<&Document> {
        self.options.get_document("validator").ok()
    }

    fn is_of_bucket(&self) -> bool {
        self.name.strip_prefix(BUCKET).is_some_and(|rest| rest.starts_with('.'))
    }

    pub(crate) fn is_capped(&self) -> bool {
        self.options.get_bool("capped").unwrap_or(false)
    }
}

/// The collections that have our names.
///
/// # Errors
/// [`StoreError::Foreign`] names all that are not Recruiter's. Nothing is written.
pub(crate) async fn examine(client: &Client) -> Result<Vec<Found>, StoreError> {
    let (database, metadata) = (client.database.clone(), client.metadata.clone_with_type::<RawDocumentBuf>());
    let listed = repeated_call("collections", CALL_LIMIT, || {
        let database = database.clone();
        async move { database.run_cursor_command(doc! { "listCollections": 1 }).await?.readable().await }
    })
    .await?;
    let mut found: Vec<Found> = listed.into_iter().filter_map(|listed| Found::new(listed, &client.prefix)).collect();
    let known = call("collections", async move { metadata.find_one(doc! { "_id": LISTED }).await }).await?;
    let known = known.map(|known| readable(&known)).unwrap_or_default();
    // A process that has made the schema makes it again after the database was dropped.
    let is_new = version(client).await? == 0 && !client.is_set_up.load(Ordering::Relaxed);
    let has_files = found.iter().any(Found::is_of_bucket) && features_in_use(client).await?.contains(&Feature::Files);
    // Whose the others are can be seen from `scheduled`, and whose `metadata` is from the others.
    found.sort_by_key(|found| (found.kind != Kind::Jobs, found.name == "metadata"));
    let (mut has_our_jobs, mut foreign) = (false, Vec::new());
    for found in &mut found {
        found.is_listed = found.uuid != Bson::Null && uuid_in(&known, &found.name) == Some(&found.uuid);
        // The validator of messages says little.
        let looks_ours = found.kind != Kind::Messages && has_our_validator(found);
        let may_be_ours = if found.is_of_bucket() { has_files } else { !is_new || has_our_jobs || looks_ours };
        // The documents of an earlier release in `metadata` are not known.
        let is_metadata = found.name == "metadata" && has_our_jobs && !found.is_special;
        let is_ours = found.is_listed || is_metadata || (may_be_ours && is_ours(client, found, is_new).await?);
        has_our_jobs |= is_ours && found.kind == Kind::Jobs && found.validator().is_some();
        if !is_ours && found.name == AUDIT && has_our_jobs {
            // It was there before there was an audit. A process that does not start would run no job at all.
            found.is_foreign = true;
        } else if !is_ours {
            let (prefix, name) = (&client.prefix, &found.name);
            let remedy = if *name == format!("{BUCKET}.files") && has_our_jobs {
                format!(
                    " (if the files are Recruiter's, and `{prefix}metadata` was lost: db.getCollection('{prefix}metadata').updateOne({{ _id: 'features' }}, \
                     {{ $set: {{ files: true }} }}, {{ upsert: true }}) in the mongo shell)"
                )
            } else {
                String::new()
            };
            foreign.push(format!("`{prefix}{name}`{remedy}"));
        }
    }
    foreign.sort_unstable();
    if foreign.is_empty() { Ok(found) } else { Err(StoreError::Foreign { collection: foreign.join(", ") }) }
}

/// Lists the collections that have our names as Recruiter's, after an examination.
pub(crate) async fn note(client: &Client) -> Result<(), StoreError> {
    let mut uuids = Document::new();
    let unlisted = |found: &Found| !found.is_listed && !found.is_foreign && found.uuid != Bson::Null;
    for found in examine(client).await?.into_iter().filter(unlisted) {
        // An application may have made one that Recruiter does not use yet, but not with a validator of ours.
        let is_certain = !matches!(found.kind, Kind::Later | Kind::Messages) || has_our_validator(&found);
        if is_certain || !is_empty(client, &found.name).await? {
            uuids.insert(found.name, found.uuid);
        }
    }
    if uuids.is_empty() {
        return Ok(());
    }
    // A bucket that is no document was written by hand, and could not get fields.
    let bucket = doc! { "$cond": [{ "$eq": [{ "$type": format!("${BUCKET}") }, "object"] }, format!("${BUCKET}"), "$$REMOVE"] };
    let noted = vec![doc! { "$set": { BUCKET: bucket } }, doc! { "$set": uuids }];
    let metadata = client.metadata.clone();
    call("ensure_schema", async move { metadata.update_one(doc! { "_id": LISTED }, noted).upsert(true).await }).await.map(drop)
}

/// The UUID of a collection. The names of the bucket's collections have a point.
fn uuid_in<'a>(known: &'a Document, name: &str) -> Option<&'a Bson> {
    match name.split_once('.') {
        Some((bucket, name)) => known.get_document(bucket).ok()?.get(name),
        None => known.get(name),
    }
}

async fn is_ours(client: &Client, found: &Found, is_new: bool) -> Result<bool, StoreError> {
    let may_be_capped = matches!(found.kind, Kind::Hints | Kind::Events);
    if found.is_special || (found.is_capped() && !may_be_capped) {
        return Ok(false);
    }
    let has_no_validator = found.validator().is_none_or(Document::is_empty);
    // That of `messages` says little.
    if has_our_validator(found) && found.kind != Kind::Messages {
        return Ok(true);
    }
    let is_empty = is_empty(client, &found.name).await?;
    if has_our_validator(found) || (!has_no_validator && has_similar_validator(found)) {
        return Ok(is_empty || has_ours(client, &found.name).await?);
    }
    if is_empty {
        // `create` makes a collection and its options at once, so one without them is not being made by another process.
        let is_plain = found.kind == Kind::Plain || found.is_capped();
        return Ok(has_no_validator && (is_plain || !is_new));
    }
    if first_foreign(client, &found.name).await?.is_none() {
        return Ok(true);
    }
    // It is not listed before the first use of it has ended, and may have got a damaged document by hand. Nothing writes into a collection of
    // an application.
    let is_later = matches!(found.kind, Kind::Later | Kind::Messages);
    Ok(is_later && has_no_validator && has_ours(client, &found.name).await?)
}

fn has_our_validator(found: &Found) -> bool {
    found.kind.validator().is_some_and(|ours| found.validator() == Some(&ours))
}

/// Whether the collection has the validator of this release, or one like it: the fields of one of them are among those of the other. The two
/// fields of `messages` may be those of any application.
fn has_similar_validator(found: &Found) -> bool {
    if found.kind == Kind::Messages {
        return false;
    }
    let (Some(ours), Some(theirs)) = (found.kind.validator(), found.validator()) else { return false };
    let (ours, theirs) = (fields(&ours), fields(theirs));
    theirs.len() > 1 && (theirs.iter().all(|field| ours.contains(field)) || ours.iter().all(|field| theirs.contains(field)))
}

/// The fields that a validator describes.
fn fields(validator: &Document) -> Vec<&str> {
    let alternatives = validator.get_array("$or").into_iter().flatten().filter_map(Bson::as_document);
    let described = alternatives.chain([validator]).find(|part| part.contains_key("$jsonSchema"));
    let properties = described.and_then(|part| part.get_document("$jsonSchema").ok()?.get_document("properties").ok());
    properties.map(|properties| properties.keys().map(String::as_str).collect()).unwrap_or_default()
}

/// # Errors
/// [`StoreError::Foreign`] if the collection of the audit is an application's.
pub(crate) async fn refuse_foreign_audit(client: &Client) -> Result<(), StoreError> {
    let is_foreign = examine(client).await?.iter().any(|found| found.is_foreign);
    if is_foreign { Err(StoreError::Foreign { collection: format!("`{}{AUDIT}`", client.prefix) }) } else { Ok(()) }
}

/// Whether documents of an application are in the collection, also if it is listed as Recruiter's.
///
/// # Errors
/// [`StoreError::Foreign`] if there are.
pub(crate) async fn refuse_foreign_documents(client: &Client, name: &str) -> Result<(), StoreError> {
    match first_foreign(client, name).await? {
        Some(_) => Err(StoreError::Foreign { collection: format!("`{}{name}`", client.prefix) }),
        None => Ok(()),
    }
}

/// A document that does not look like one of Recruiter. A large collection is read for as long as that takes.
async fn first_foreign(client: &Client, name: &str) -> Result<Option<RawDocumentBuf>, StoreError> {
    let (collection, foreign) = (client.collection(name).clone_with_type::<RawDocumentBuf>(), foreign(name));
    first_document(collection, foreign, BUILT_WITHIN).await
}

/// Whether at least one document looks like one of Recruiter. Among very many, none that is found soon counts as none.
async fn has_ours(client: &Client, name: &str) -> Result<bool, StoreError> {
    let (collection, ours) = (client.collection(name).clone_with_type::<RawDocumentBuf>(), ours(name));
    match first_document(collection, ours, FOUND_WITHIN).await {
        Err(error) if error.is_too_slow() => Ok(false),
        other => Ok(other?.is_some()),
    }
}

async fn is_empty(client: &Client, name: &str) -> Result<bool, StoreError> {
    let collection = client.collection(name).clone_with_type::<RawDocumentBuf>();
    Ok(first_document(collection, doc! {}, CALL_LIMIT).await?.is_none())
}

/// One of the documents that match, of a collection that another process may be replacing.
async fn first_document(
    collection: Collection<RawDocumentBuf>,
    filter: Document,
    within: Duration,
) -> Result<Option<RawDocumentBuf>, StoreError> {
    repeated_call("foreign_documents", within.max(CALL_LIMIT), || {
        let (collection, filter) = (collection.clone(), filter.clone());
        async move {
            let found = collection.find_one(filter).projection(doc! { "_id": 1 }).read_concern(ReadConcern::local());
            found.max_time(within).await
        }
    })
    .await
}

/// The filter of the documents of Recruiter.
fn ours(name: &str) -> Document {
    doc! { "$nor": [foreign(name)] }
}

/// The filter of the roster documents of workers: those with two of the fields that only workers have.
pub(crate) fn any_worker() -> Document {
    let has = |fields: &[&str]| fields.iter().map(|field| ((*field).to_owned(), doc! { "$exists": true }.into())).collect::<Document>();
    let pairs = (0..WORKER_FIELDS.len()).flat_map(|last| (0..last).map(move |first| [WORKER_FIELDS[first], WORKER_FIELDS[last]]));
    doc! { "_id": { "$type": "objectId" }, "$or": pairs.map(|pair| has(&pair)).collect::<Vec<_>>() }
}

/// The filter of the documents of an application.
fn foreign(name: &str) -> Document {
    let of_type = |of: &str| doc! { "$type": of };
    // Fields of which a document of ours has no other ones.
    let only = |fields: &[&str]| {
        let names = doc! { "$map": { "input": { "$objectToArray": "$$ROOT" }, "in": "$$this.k" } };
        doc! { "$expr": { "$setIsSubset": [names, fields] } }
    };
    let ours = match name {
        // With the index of the archive few documents are read.
        "archived" => {
            return doc! {
                "last_execution.ended_at": { "$not": { "$gte": bson::DateTime::MIN } },
                "workable": { "$exists": false },
            };
        }
        "scheduled" => doc! { "workable": { "$exists": true } },
        "roster" => any_worker(),
        "metadata" => doc! { "$or": [
            { "_id": { "$in": ["schema", "features", LISTED, "channels", "cleaners", "relay", "recruiter", "rates", "subscribers", "redaction"] } },
            { "_id": { "$regex": "^(rate|class|cleaner):" } },
            { "_id.not_kept_since": of_type("date") },
        ] },
        "limits" => doc! { "_id": of_type("string"), "$and": [only(&["_id", "capacity", "rate", "changed_at", "most_waiting"])] },
        "groups" => doc! {
            "_id": of_type("string"),
            "$and": [only(&["_id", "weight", "ageing_ms", "maintenance", "most_waiting", "capacity", "rate", "changed_at"])],
        },
        "pauses" => doc! {
            "_id": { "$regex": "^(everything$|group:|class:|line:)" },
            "$and": [only(&["_id", "by", "reason", "at", "job"])],
        },
        "schedulers" => doc! { "_id": of_type("string"), "job.class": { "$exists": true } },
        "unique_periods" => {
            doc! { "job": of_type("objectId"), "expires_at": of_type("date"), "$and": [only(&["_id", "job", "expires_at"])] }
        }
        "audit" => doc! { "at": of_type("date"), "action": of_type("string"), "expires_at": of_type("date"), "address": of_type("string") },
        "events" => doc! { "$or": [{ "kind": "seed" }, { "at": of_type("timestamp"), "by": of_type("objectId") }] },
        "messages" => doc! { "$or": [
            { "at": of_type("date"), "expires_at": of_type("date"), "messages": of_type("array") },
            { "messages.topic": of_type("string"), "messages.body": { "$exists": true } },
        ] },
        "consumers" => doc! { "_id": of_type("string"), "position": of_type("string"), "created_at": of_type("date") },
        "payloads.files" => doc! { "filename": { "$regex": "^[0-9a-f]{24}/" } },
        "payloads.chunks" => doc! { "files_id": of_type("objectId"), "n": of_type("number"), "data": of_type("binData") },
        // Hints. A program of another language may insert one without a time.
        _ => doc! { "kind": of_type("string"), "$or": [{ "at": of_type("timestamp") }, only(&["_id", "kind", "groups", "due", "jobs"])] },
    };
    doc! { "$nor": [ours] }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mongo::schema::kind::COLLECTIONS;

    #[test]
    fn every_collection_says_what_its_documents_look_like() {
        for (name, kind) in COLLECTIONS {
            assert_eq!(Kind::of(name), Some(kind), "{name}");
            assert!(foreign(name) != foreign("signals") || kind == Kind::Hints, "{name} has a shape of its own");
        }
        assert_eq!([Kind::of("signals_17"), Kind::of("signals_x"), Kind::of("orders")], [Some(Kind::Hints), None, None]);
    }

    #[test]
    fn a_validator_of_another_release_is_ours() {
        let check = |kind: Kind, validator: Document| {
            let listed = doc! { "name": "x_limits", "type": "collection", "options": { "validator": validator } };
            has_similar_validator(&Found { kind, ..Found::new(listed, "x_").expect("a name of ours") })
        };
        let schema = |properties: Document| doc! { "$jsonSchema": { "properties": properties } };
        assert!(check(Kind::Jobs, Kind::Jobs.validator().expect("one")));
        assert!(check(Kind::Limits, schema(doc! { "_id": {}, "capacity": {} })), "older");
        assert!(check(Kind::Limits, schema(doc! { "_id": {}, "capacity": {}, "rate": {}, "most_waiting": {}, "more": {} })), "newer");
        assert!(!check(Kind::Limits, schema(doc! { "_id": {}, "capacity": {}, "room": {} })));
        assert!(!check(Kind::Limits, schema(doc! { "_id": {} })) && !check(Kind::Limits, doc! { "capacity": 5 }));
        assert!(!check(Kind::Messages, schema(doc! { "_id": {}, "messages": {} })), "an application may have these fields");
        assert!(!check(Kind::Plain, schema(doc! { "_id": {}, "capacity": {} })));
    }
}
