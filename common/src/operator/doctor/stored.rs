//! The schema, as it is in the database.

use std::time::Duration;

use bson::{Bson, Document, Timestamp, doc};

use super::{Check, Finding, number, or_good};
use crate::{
    base::{in_words, printable},
    mongo::{
        Store, StoreError, call,
        schema::{IndexFault, Ring, SCHEMA_VERSION, Surveyed, survey},
    },
};

/// A ring of events that is full should reach back this far: so long a subscriber may be away.
const EVENTS_REACH: Duration = Duration::from_secs(600);

pub(super) async fn findings(store: &Store) -> Vec<Finding> {
    match survey(store).await {
        Ok(surveyed) => [vec![version(&surveyed)], validators(&surveyed), indexes(&surveyed), rings(store, &surveyed.rings).await].concat(),
        Err(error @ StoreError::Foreign { .. }) => {
            let text = format!("{error}; give Recruiter a database of its own, or --collection-prefix");
            vec![Finding::error(Check::Schema, text)]
        }
        Err(error) => {
            [Check::Schema, Check::Validators, Check::Indexes, Check::Rings].map(|check| Finding::unknown(check, "read", &error)).into()
        }
    }
}

fn version(surveyed: &Surveyed) -> Finding {
    match surveyed.version {
        0 => Finding::error(Check::Schema, "the database has no schema; the start of a recruiter, a cleaner or a worker makes it"),
        older @ ..SCHEMA_VERSION => Finding::warning(
            Check::Schema,
            format!("the schema has the version {older}, and this release the version {SCHEMA_VERSION}: start a recruiter of this release"),
        ),
        SCHEMA_VERSION => Finding::good(Check::Schema, format!("version {SCHEMA_VERSION}")),
        newer => Finding::warning(
            Check::Schema,
            format!(
                "a newer release has made the schema (version {newer}, known are {SCHEMA_VERSION}): use the newer release of this command"
            ),
        ),
    }
}

fn validators(surveyed: &Surveyed) -> Vec<Finding> {
    let findings = surveyed.other_validators.iter().map(|collection| {
        let text = format!(
            "`{}` has another validator than that of this release, so a damaged document may come in: start any process again with a user \
             that may collMod it",
            printable(collection, 120)
        );
        Finding::warning(Check::Validators, text)
    });
    or_good(findings.collect(), Check::Validators, "as in this release")
}

fn indexes(surveyed: &Surveyed) -> Vec<Finding> {
    let finding = |(collection, name, fault): &(String, String, IndexFault)| {
        let which = format!("the index `{}` of `{}`", printable(name, 120), printable(collection, 120));
        let (collection, name) = (printable(collection, 120), printable(name, 120));
        match fault {
            IndexFault::Missing => Finding::error(
                Check::Indexes,
                format!("{which} is missing, so searches read whole collections, or a promise is not kept: start any process again"),
            ),
            IndexFault::Different => Finding::error(
                Check::Indexes,
                format!("{which} has other keys or documents than in this release: start any process again, which replaces it"),
            ),
            IndexFault::Hidden => Finding::warning(
                Check::Indexes,
                format!("{which} is hidden, which makes searches slow: db.getCollection('{collection}').unhideIndex('{name}')"),
            ),
            IndexFault::Outdated => Finding::warning(
                Check::Indexes,
                format!(
                    "{which} is of an earlier release, and costs every job some time: a recruiter of this release drops it when it leads"
                ),
            ),
            IndexFault::Foreign => Finding::warning(
                Check::Indexes,
                format!(
                    "{which} is not Recruiter's, and costs every job some time: if it is not needed, \
                     db.getCollection('{collection}').dropIndex('{name}')"
                ),
            ),
        }
    };
    or_good(surveyed.indexes.iter().map(finding).collect(), Check::Indexes, format!("all {} are there", surveyed.good_indexes))
}

/// The rings of hints and of events.
async fn rings(store: &Store, rings: &[Ring]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for Ring { collection, size } in rings {
        let collection_shown = printable(collection, 120);
        if size.is_none() {
            let text = format!(
                "`{collection_shown}` is not capped, so it cannot be followed, and it grows: start any process again, which replaces it"
            );
            findings.push(Finding::error(Check::Rings, text));
        } else if *collection == store.named("events") {
            match span_of_ring(store, collection).await {
                Ok(Some(reach)) if reach < EVENTS_REACH => findings.push(Finding::warning(
                    Check::Rings,
                    format!(
                        "`{collection_shown}` is full and reaches only {} back, so a slow subscriber misses events: make it larger with \
                         db.runCommand({{ collMod: '{collection_shown}', cappedSize: {} }})",
                        in_words(reach),
                        size.unwrap_or_default().saturating_mul(8)
                    ),
                )),
                Ok(_) => {}
                Err(error) => findings.push(Finding::unknown(Check::Rings, "read", &error)),
            }
        }
    }
    or_good(findings, Check::Rings, format!("{} capped collections", rings.len()))
}

/// How far the ring of events reaches back, if it is full.
///
/// Filter: none. Index: none, the ends of a capped collection. Invariant: none, for people.
async fn span_of_ring(store: &Store, collection: &str) -> Result<Option<Duration>, StoreError> {
    let database = store.database.clone();
    let stats = doc! { "collStats": collection };
    let stats = call("examine_ring", async move { database.run_command(stats).await }).await?;
    let is_full = number(&stats, "size").zip(number(&stats, "maxSize")).is_some_and(|(size, most)| size > most / 10 * 9);
    let database = store.database.clone();
    let find =
        |direction: i32| doc! { "find": collection, "sort": { "$natural": direction }, "limit": 2, "projection": { "_id": 0, "at": 1 } };
    let (first, last) = (find(1), find(-1));
    let (first, last) =
        call("examine_ring", async move { Ok((database.run_command(first).await?, database.run_command(last).await?)) }).await?;
    let time = |reply: &Document| {
        let entries = reply.get_document("cursor").ok()?.get_array("firstBatch").ok()?.iter().filter_map(Bson::as_document);
        entries.filter_map(|entry| entry.get_timestamp("at").ok()).map(|Timestamp { time, .. }| time).find(|time| *time > 0)
    };
    let reach = time(&first).zip(time(&last)).map(|(first, last)| Duration::from_secs(u64::from(last.saturating_sub(first))));
    Ok(reach.filter(|_| is_full))
}
