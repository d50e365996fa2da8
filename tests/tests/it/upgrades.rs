//! `recruiter migrate`, and programs that meet the schema or the documents of a newer release. The suite `upgrade` has both releases at work.

use std::collections::BTreeMap;

use bson::{Bson, Document, doc};
use futures_util::TryStreamExt as _;
use recruiter_common::{Client, NewJob, exit::Exit};
use recruiter_tests::{
    factory::minimal_job,
    local::prepared,
    mongo::{PASSWORD, TestDatabase, USER},
    previous,
    processes::{Setup, System},
};
use serde_json::{Value, json};

use super::{
    cli::{Said, recruiter},
    usual_settings::run,
};

/// The version of the schema of this release.
const THIS: i32 = 19;

/// Everything in the database: options, indexes and documents of each collection, as texts, because no NaN is like another.
async fn everything(database: &TestDatabase) -> BTreeMap<String, String> {
    let listed = async |command: Document| -> Vec<Document> {
        database.database().run_cursor_command(command).await.unwrap().try_collect().await.unwrap()
    };
    let mut found = BTreeMap::new();
    for collection in listed(doc! { "listCollections": 1 }).await {
        let name = collection.get_str("name").unwrap().to_owned();
        let (indexes, documents) = (listed(doc! { "listIndexes": &name }).await, database.all(&name, doc! {}).await);
        found.insert(name, format!("{collection:?} {indexes:?} {documents:?}"));
    }
    found
}

/// The changes that the command says: part, action, collection and name; documents; whether they are done.
fn changes(said: &Said) -> Vec<(String, i64, bool)> {
    let change = |line: &str| {
        let change: Value = serde_json::from_str(line).unwrap();
        let text = |field: &str| change[field].as_str().unwrap_or("-").to_owned();
        let what = ["part", "action", "collection", "name"].map(text).join(" ");
        (what, change["documents"].as_i64().unwrap(), change["done"] == json!(true))
    };
    said.out.lines().map(change).collect()
}

/// A schema of an earlier release, with one difference of each kind.
async fn outdate(database: &TestDatabase) {
    let run = async |command: Document| drop(database.database().run_command(command).await.unwrap());
    database.raw("scheduled").insert_many([minimal_job("x"), minimal_job("x")]).await.unwrap();
    database.raw("archived").insert_one(doc! {}).await.unwrap();
    run(doc! { "collMod": "scheduled", "validator": {} }).await;
    run(doc! { "dropIndexes": "scheduled", "index": "gated_jobs" }).await;
    let other = |name: &str| doc! { "createIndexes": "archived", "indexes": [{ "key": { "urn": 1 }, "name": name }] };
    run(doc! { "dropIndexes": "archived", "index": "archived_by_end" }).await;
    run(other("archived_by_end")).await;
    run(doc! { "createIndexes": "archived", "indexes": [{ "key": { "why": 1 }, "name": "archived_by_end_0" }] }).await;
    run(doc! { "drop": "groups" }).await;
    run(doc! { "drop": "signals_0" }).await;
    run(doc! { "create": "signals_0" }).await;
    database.raw("metadata").update_one(doc! { "_id": "schema" }, doc! { "$set": { "version": 1 } }).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn migrate_says_each_change_and_a_dry_run_changes_nothing() {
    let (database, _) = prepared().await;
    assert_eq!(recruiter(&database, &["migrate", "--dry-run"]).succeeded().out, "the schema is that of this release\n");
    outdate(&database).await;
    let (before, noted) = (everything(&database).await, database.count("metadata", doc! {}).await);
    let dry = recruiter(&database, &["migrate", "--dry-run", "--json"]).succeeded();
    let expected = [
        (format!("version replace metadata 1 to {THIS}"), i64::try_from(noted).unwrap()),
        ("validator replace scheduled -".into(), 2),
        ("collection make groups -".into(), 0),
        ("collection replace signals_0 -".into(), 0),
        ("index replace archived archived_by_end".into(), 1),
        ("index drop archived archived_by_end_0".into(), 1),
        ("index make scheduled gated_jobs".into(), 2),
    ];
    assert_eq!(changes(&dry), expected.clone().map(|(what, documents)| (what, documents, false)));
    let text = recruiter(&database, &["migrate", "--dry-run"]).succeeded().out;
    assert!(
        text.contains("the validator: would be replaced (documents: 2)") && text.ends_with("changes: 7; nothing was changed\n"),
        "{text}"
    );
    assert!(everything(&database).await == before);

    let made = recruiter(&database, &["migrate", "--json"]).succeeded();
    let is_left = |what: &str| what.starts_with("index drop");
    assert_eq!(changes(&made), expected.map(|(what, documents)| (what.clone(), documents, !is_left(&what))));
    // An earlier release may need it, until a recruiter of this one leads.
    let text = recruiter(&database, &["migrate"]).succeeded().out;
    assert_eq!(text.lines().count(), 2);
    assert!(text.contains("the index `archived_by_end_0`: would be dropped by the first leading recruiter"), "{text}");

    let empty = TestDatabase::new().await;
    let all = changes(&recruiter(&empty, &["migrate", "--dry-run", "--json"]).succeeded());
    assert!(all.contains(&(format!("version make metadata 0 to {THIS}"), 0, false)), "{all:?}");
    assert!(all.contains(&("collection make scheduled -".into(), 0, false)), "{all:?}");
    assert!(everything(&empty).await.is_empty());
    assert!(changes(&recruiter(&empty, &["migrate", "--json"]).succeeded()).into_iter().all(|(_, _, is_done)| is_done));
}

#[tokio::test(flavor = "multi_thread")]
async fn migrate_names_what_its_user_may_not_change_and_a_reader_may_ask() {
    let database = TestDatabase::with_access_control().await;
    drop(recruiter_tests::local::store(&database).await);
    outdate(&database).await;
    for role in ["read", "readWrite"] {
        let user = doc! { "createUser": role, "pwd": "pw", "roles": [{ "role": role, "db": database.name() }] };
        database.database().client().database("admin").run_command(user).await.unwrap();
    }
    let by = |user: &str, args: &[&str]| {
        let uri = database.uri().replace(&format!("{USER}:{PASSWORD}@"), &format!("{user}:pw@"));
        run("recruiter", args, &[("MONGODB_URI", &uri), ("RECRUITER_CONNECT_TIMEOUT", "1m")])
    };
    let asked = by("read", &["migrate", "--dry-run", "--json"]).succeeded();
    assert_eq!(changes(&asked).len(), 7);
    let refused = by("readWrite", &["migrate", "--json"]);
    assert_eq!(refused.code, i32::from(Exit::Failure as u8), "{}", refused.err);
    assert!(refused.err.contains("changes that were not made: 1") && refused.err.contains("collMod"), "{}", refused.err);
    let left: Vec<_> = changes(&refused).into_iter().filter(|(_, _, is_done)| !is_done).map(|(what, _, _)| what).collect();
    assert_eq!(left, ["validator replace scheduled -", "index drop archived archived_by_end_0"]);
}

async fn note(database: &TestDatabase, noted: Document) {
    let mut schema = doc! { "_id": "schema" };
    schema.extend(noted);
    database.raw("metadata").replace_one(doc! { "_id": "schema" }, schema).await.unwrap();
}

#[track_caller]
fn is_too_old(said: &Said, what: &str) {
    assert_eq!(said.code, i32::from(Exit::Refused as u8), "{what}: {} {}", said.out, said.err);
    let sentence = said.err.lines().last().unwrap_or_default();
    assert!(sentence.contains("this program is too old") && sentence.contains("Upgrade this program"), "{what}: {}", said.err);
    assert_eq!(said.out, "", "{what}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_that_is_too_old_for_the_schema_says_so_and_changes_nothing() {
    let (database, store) = prepared().await;
    NewJob::of_class("noop", doc! {}).enqueue(&store).await.unwrap();
    drop(store);
    let large: i64 = 3_000_000_000;
    for noted in [
        doc! { "version": THIS + 1 },
        doc! { "version": THIS + 1, "oldest": THIS + 1 },
        doc! { "version": 1_000, "oldest": "x" },
        doc! { "version": 1_000, "oldest": -1 },
        doc! { "version": large },
        doc! { "version": 1e300, "oldest": f64::NAN },
        doc! { "version": "x", "oldest": THIS + 1 },
        doc! { "oldest": large },
    ] {
        note(&database, noted.clone()).await;
        let before = everything(&database).await;
        is_too_old(&recruiter(&database, &["enqueue", "--class", "noop"]), &format!("{noted}"));
        assert!(everything(&database).await == before, "{noted}");
    }
    note(&database, doc! { "version": THIS + 1, "oldest": THIS + 1 }).await;
    let before = everything(&database).await;
    for (program, args) in [
        ("recruiter", &["run"][..]),
        ("recruiter-cleaner", &[]),
        ("recruiter-worker", &["--builtins"]),
        ("recruiter", &["migrate"]),
        ("recruiter", &["migrate", "--dry-run"]),
        ("recruiter", &["jobs", "list"]),
        ("recruiter", &["jobs", "cancel", "--class", "noop", "--yes"]),
        ("recruiter", &["limits", "set", "printer", "--capacity", "1"]),
        ("recruiter", &["workers", "stop", "--all"]),
        ("recruiter", &["publish", "a", "{}"]),
        ("recruiter", &["doctor"]),
    ] {
        let env = [("MONGODB_URI", database.uri()), ("RECRUITER_CONNECT_TIMEOUT", "1m"), ("RECRUITER_LOG", "error")];
        is_too_old(&run(program, args, &env), &format!("{program} {args:?}"));
    }
    // An application with a driver of its own.
    let client = Client::from_database(database.database().clone());
    let refused = NewJob::of_class("noop", doc! {}).enqueue(&client).await.unwrap_err();
    assert!(recruiter_common::telemetry::chain(&refused).contains("this program is too old"), "{refused}");
    client.ensure_schema().await.unwrap_err();
    assert!(everything(&database).await == before);
}

/// What the next release notes, and what was damaged: a start makes it right.
#[tokio::test(flavor = "multi_thread")]
async fn a_program_goes_on_beside_the_next_release_and_with_a_damaged_version() {
    let (database, _) = prepared().await;
    let (_, previous) = previous::named();
    let schema = async || database.only("metadata", doc! { "_id": "schema" }).await;
    assert_eq!(schema().await, doc! { "_id": "schema", "version": THIS, "oldest": previous });
    for (noted, version, oldest) in [
        (doc! { "version": THIS + 1, "oldest": THIS }, THIS + 1, THIS),
        (doc! { "version": 1_000_i64, "oldest": f64::from(THIS) }, 1_000, THIS),
        (doc! { "version": "x" }, THIS, previous),
        (doc! { "version": -5, "oldest": -5 }, THIS, previous),
        (doc! { "version": 0, "oldest": Bson::Null }, THIS, previous),
        (doc! { "version": f64::NAN, "oldest": [1] }, THIS, previous),
        (doc! {}, THIS, previous),
        (doc! { "version": THIS }, THIS, previous),
    ] {
        note(&database, noted.clone()).await;
        recruiter(&database, &["enqueue", "--class", "noop"]).succeeded();
        assert_eq!(schema().await, doc! { "_id": "schema", "version": version, "oldest": oldest }, "{noted}");
    }
}

/// A worker, a retry and a rescue write named fields only, and the archive gets the whole document.
#[tokio::test(flavor = "multi_thread")]
async fn fields_of_a_newer_release_outlive_an_older_one() {
    let (database, _) = prepared().await;
    let mut job = minimal_job("fail");
    let retry = doc! { "class": "RetryManyTimes", "parameters": { "retry_how_many_times": 1, "seconds_to_wait_before_retry": 0 } };
    job.extend(doc! { "retry_policy": retry, "colour": { "of": ["tomorrow"] } });
    let id = job.get_object_id("_id").unwrap();
    database.raw("scheduled").insert_one(job).await.unwrap();
    let system = System::start(&database, Setup::default());
    let archived = database.archived(id).await;
    assert_eq!(archived.get("attempts").and_then(Bson::as_i32).map(i64::from).or_else(|| archived.get_i64("attempts").ok()), Some(2));
    assert_eq!(archived.get_document("colour").unwrap(), &doc! { "of": ["tomorrow"] });
    system.stop().await;
}
