//! Collections, validators and indexes that were dropped or changed: made again at the next start, and by the processes that
//! meet them while they run.

use bson::{Document, doc};
use futures_util::TryStreamExt;
use recruiter_common::{
    EnqueueError, NewJob, StoreError, Unique,
    store::{Channel, Store},
};
use recruiter_tests::{
    factory::minimal_job,
    fail_points::FailPoint,
    local::{connect_args, prepared, store},
    mongo::{PASSWORD, TestDatabase, USER},
    processes::{Process, Setup, System},
    wait::{SOON, wait_until},
};

/// The indexes of `scheduled` that every database has.
const INDEXES: [&str; 3] = ["_id_", "due_jobs", "gated_jobs"];

async fn options(database: &TestDatabase, collection: &str) -> Option<Document> {
    let listed: Vec<Document> = database
        .database()
        .run_cursor_command(doc! { "listCollections": 1, "filter": { "name": collection } })
        .await
        .unwrap()
        .try_collect()
        .await
        .unwrap();
    Some(listed.first()?.get_document("options").unwrap().clone())
}

async fn is_capped(database: &TestDatabase, collection: &str) -> bool {
    options(database, collection).await.is_some_and(|options| options.get_bool("capped").unwrap_or(false))
}

async fn indexes(database: &TestDatabase, collection: &str) -> Vec<String> {
    let mut names = database.raw(collection).list_index_names().await.unwrap();
    names.sort();
    names
}

/// The next hint creates an ordinary collection in place of a dropped one.
async fn make_ordinary(database: &TestDatabase, collection: &str) {
    database.raw(collection).drop().await.unwrap();
    database.raw(collection).insert_one(doc! { "kind": "free" }).await.unwrap();
}

async fn drop_index(database: &TestDatabase, collection: &str, name: &str) {
    database.raw(collection).drop_index(name).await.unwrap();
}

async fn is_as_it_should_be(database: &TestDatabase) -> bool {
    let capped = is_capped(database, "signals").await && is_capped(database, "signals_0").await;
    let has_validator = async |name| options(database, name).await.is_some_and(|options| options.contains_key("validator"));
    let validated = has_validator("scheduled").await && has_validator("schedulers").await;
    capped
        && validated
        && indexes(database, "scheduled").await == INDEXES
        && indexes(database, "archived").await == ["_id_", "archived_by_end"]
        && indexes(database, "unique_periods").await == ["_id_", "expired_periods"]
        && indexes(database, "schedulers").await == ["_id_", "schedule_revisions"]
}

async fn is_done(database: &TestDatabase, store: &Store) {
    let id = NewJob::of_class("noop", doc! {}).enqueue(store).await.unwrap().id;
    database.until("archived", doc! { "_id": id, "why": "done" }, 1, "the job is done").await;
}

/// The driver does not repeat all of these commands, and the others once.
#[tokio::test]
async fn a_broken_connection_ends_no_start_and_no_question() {
    const NAME: &str = "a start";
    let commands = ["buildInfo", "listCollections", "find", "create", "listIndexes", "createIndexes", "update"];
    let prepared = TestDatabase::new().await;
    store(&prepared).await;
    for (command, asks) in commands.into_iter().map(|command| (command, false)).chain([("listCollections", true), ("listIndexes", true)]) {
        let new = TestDatabase::new().await;
        let armed = FailPoint::new(NAME, &[command]).times(2).close_connection().arm(new.uri()).await;
        let connected = if asks {
            Store::connect_to_ask(&connect_args(&prepared), NAME).await
        } else {
            Store::connect(&connect_args(&new), NAME).await
        };
        assert!(connected.is_ok(), "{command}: {connected:?}");
        assert_eq!(armed.struck().await, 2, "{command}");
        assert!(asks || is_as_it_should_be(&new).await, "{command}");
    }
}

#[tokio::test]
async fn a_start_makes_again_what_was_dropped_or_changed() {
    let (database, _) = prepared().await;
    assert!(is_as_it_should_be(&database).await);
    make_ordinary(&database, "signals").await;
    // A channel without listeners at the moment.
    make_ordinary(&database, "signals_3").await;
    database.raw("signals_0").drop().await.unwrap();
    drop_index(&database, "scheduled", "due_jobs").await;
    drop_index(&database, "unique_periods", "expired_periods").await;
    let wrong = mongodb::IndexModel::builder().keys(doc! { "expires_at": 1 }).options(named("expired_periods")).build();
    database.raw("unique_periods").create_index(wrong).await.unwrap();
    database.raw("archived").drop().await.unwrap();
    database.raw("groups").drop().await.unwrap();
    database.database().run_command(doc! { "collMod": "scheduled", "validator": {} }).await.unwrap();
    store(&database).await;
    assert!(options(&database, "groups").await.unwrap().contains_key("validator"));
    assert!(is_as_it_should_be(&database).await);
    assert!(is_capped(&database, "signals_3").await);
    database.raw("scheduled").insert_one(doc! { "no": "job" }).await.expect_err("the validator is back");

    // Smaller than it should be, as after a restore.
    database.raw("signals").drop().await.unwrap();
    database.database().run_command(doc! { "create": "signals", "capped": true, "size": 4_096 }).await.unwrap();
    store(&database).await;
    assert!(options(&database, "signals").await.unwrap().get("size").and_then(number).is_some_and(|size| size >= 16 << 20));

    // Changes of a newer release are left alone; its indexes are not dropped.
    database.database().run_command(doc! { "collMod": "scheduled", "validator": {} }).await.unwrap();
    database.raw("metadata").update_one(doc! { "_id": "schema" }, doc! { "$set": { "version": 1_000, "oldest": 19 } }).await.unwrap();
    let store = store(&database).await;
    assert!(!options(&database, "scheduled").await.unwrap().contains_key("validator"));
    database
        .raw("archived")
        .create_index(mongodb::IndexModel::builder().keys(doc! { "x": 1 }).options(named("archived_by_end_9")).build())
        .await
        .unwrap();
    store.drop_outdated_indexes().await.unwrap();
    assert_eq!(indexes(&database, "archived").await, ["_id_", "archived_by_end", "archived_by_end_9"]);
}

fn number(value: &bson::Bson) -> Option<i64> {
    value.as_i64().or(value.as_i32().map(i64::from))
}

fn named(name: &str) -> mongodb::options::IndexOptions {
    mongodb::options::IndexOptions::builder().name(name.to_owned()).build()
}

/// They cost every job some microseconds. Once they are there, they are kept.
#[tokio::test]
async fn the_indexes_of_a_feature_are_made_when_it_is_used() {
    let (database, own) = prepared().await;
    let unique = || NewJob::of_class("x", doc! {}).unique(Unique::by_key("k"));
    let of_scheduled = async || indexes(&database, "scheduled").await;
    let with = |more: &[&'static str]| {
        let mut all = [&INDEXES, more].concat();
        all.sort_unstable();
        all
    };
    assert_eq!(of_scheduled().await, INDEXES);
    let mut session = own.start_session().await.unwrap();
    session.start_transaction().await.unwrap();
    let refused = unique().enqueue_in(&own, &mut session).await.unwrap_err();
    assert!(matches!(refused, EnqueueError::NotSetUpForUnique { .. }), "{refused}");
    session.abort_transaction().await.unwrap();
    unique().enqueue(&own).await.unwrap();
    let of_unique = ["unique", "unique_after", "unique_while_waiting"];
    assert_eq!(of_scheduled().await, with(&of_unique));
    NewJob::of_class("x", doc! {}).expires_after(SOON).enqueue(&own).await.unwrap();
    let all = with(&["expiring_jobs", "unique", "unique_after", "unique_while_waiting"]);
    assert_eq!(of_scheduled().await, all);
    // The same keys, but not unique.
    drop_index(&database, "scheduled", "unique").await;
    let wrong = mongodb::IndexModel::builder().keys(doc! { "unique": 1 }).options(named("unique")).build();
    database.raw("scheduled").create_index(wrong).await.unwrap();
    drop_index(&database, "scheduled", "expiring_jobs").await;
    store(&database).await;
    assert_eq!(of_scheduled().await, all);
    assert!(!unique().enqueue(&own).await.unwrap().is_new);
    // The database is dropped while a process uses it.
    database.database().drop().await.unwrap();
    database.raw("scheduled").insert_one(minimal_job("x")).await.unwrap();
    own.expired_jobs(own.now(), 1).await.unwrap_err();
    // On a machine that stands still the first call may have had another error.
    wait_until(SOON, "the indexes are there again", async || {
        let _ = own.expired_jobs(own.now(), 1).await;
        of_scheduled().await == all
    })
    .await;
    assert_eq!(database.count("metadata", doc! { "unique": true, "expiry": true }).await, 1);
}

/// A restore, a script that cleans up, a test suite with the wrong URI.
#[tokio::test]
async fn processes_make_again_what_is_dropped_while_they_run() {
    let (database, store) = prepared().await;
    let (recruiter, worker) = (&["--lease", "3s", "--poll", "500ms"], &["--builtins", "--heartbeat", "500ms"]);
    let system = System::start(&database, Setup { recruiter, worker, ..Setup::default() });
    is_done(&database, &store).await;
    make_ordinary(&database, "signals_0").await;
    make_ordinary(&database, "signals").await;
    wait_until(SOON, "hints can be listened to again", async || is_as_it_should_be(&database).await).await;
    is_done(&database, &store).await;
    drop_index(&database, "scheduled", "due_jobs").await;
    wait_until(SOON, "the index is there again", async || is_as_it_should_be(&database).await).await;
    is_done(&database, &store).await;
    // With its jobs: they are gone. The system is not.
    database.database().drop().await.unwrap();
    wait_until(SOON, "everything is there again", async || is_as_it_should_be(&database).await).await;
    is_done(&database, &store).await;
    system.stop().await;
}

/// Only the call that meets it fails.
#[tokio::test]
async fn a_missing_index_is_made_by_whoever_needs_it() {
    let (database, store) = prepared().await;
    database.raw("scheduled").insert_one(minimal_job("x")).await.unwrap();
    database.raw("archived").insert_one(doc! {}).await.unwrap();
    let far = recruiter_common::instant::Instant::UNIX_EPOCH;
    let missing = |failed: StoreError| assert!(recruiter_common::telemetry::chain(&failed).contains("hint provided does not correspond"));
    drop_index(&database, "archived", "archived_by_end").await;
    store.prune_archived(far, 1).await.map_err(missing).unwrap_err();
    store.prune_archived(far, 1).await.unwrap();
    drop_index(&database, "archived", "archived_by_end").await;
    store.finished(far).await.map_err(missing).unwrap_err();
    store.finished(far).await.unwrap();
    drop_index(&database, "scheduled", "due_jobs").await;
    store.ungated_groups().await.map_err(missing).unwrap_err();
    assert_eq!(store.ungated_groups().await.unwrap(), ["generic".to_owned()].into());
    drop_index(&database, "scheduled", "gated_jobs").await;
    store.gated_groups().await.map_err(missing).unwrap_err();
    assert!(store.gated_groups().await.unwrap().is_empty());
}

/// Until a recruiter of this release leads, one of the earlier release may need it.
#[tokio::test]
async fn the_indexes_of_an_earlier_release_serve_it_until_the_new_one_leads() {
    let (database, _) = prepared().await;
    let earlier = mongodb::IndexModel::builder().keys(doc! { "group": 1 }).options(named("due_jobs_0")).build();
    let without_successor = mongodb::IndexModel::builder().keys(doc! { "last_execution.permits": 1 }).options(named("permits")).build();
    let own = mongodb::IndexModel::builder().keys(doc! { "urn": 1 }).options(named("by_urn")).build();
    database.raw("scheduled").create_indexes([earlier, without_successor, own]).await.unwrap();
    store(&database).await;
    let with = |more: &[&'static str]| {
        let mut all = [&INDEXES, more].concat();
        all.sort_unstable();
        all
    };
    assert_eq!(indexes(&database, "scheduled").await, with(&["by_urn", "due_jobs_0", "permits"]));
    let recruiter = Process::on(&database, "recruiter", &["run"]);
    wait_until(SOON, "they are dropped", async || indexes(&database, "scheduled").await == with(&["by_urn"])).await;
    drop(recruiter);
}

/// The role `readWrite` is enough, but for changing a validator that is there.
#[tokio::test]
async fn an_ordinary_user_is_enough_to_make_and_to_mend() {
    let database = TestDatabase::with_access_control().await;
    let writer = doc! { "createUser": "writer", "pwd": "pw", "roles": [{ "role": "readWrite", "db": database.name() }] };
    database.database().client().database("admin").run_command(writer).await.unwrap();
    let connect = || async {
        let uri = database.uri().replace(&format!("{USER}:{PASSWORD}@"), "writer:pw@");
        Store::connect(&recruiter_common::store::ConnectArgs::to(uri), "test").await.unwrap()
    };
    connect().await;
    assert!(is_as_it_should_be(&database).await);
    make_ordinary(&database, "signals").await;
    drop_index(&database, "scheduled", "due_jobs").await;
    assert_eq!(connect().await.join_channel().await.unwrap(), Channel(0));
    assert!(is_as_it_should_be(&database).await);
    // The validator of an earlier release: the process logs that and continues with it.
    database.database().run_command(doc! { "collMod": "scheduled", "validator": {} }).await.unwrap();
    is_enqueued(&connect().await).await;
    // That of `messages`, which are too many to examine: they are not read in vain, and an examination that takes too long is not the end.
    connect().await.publish_message("a", &doc! {}).await.unwrap();
    database.database().run_command(doc! { "collMod": "messages", "validator": {} }).await.unwrap();
    let slow = FailPoint::new("test", &["find"]).namespace(database.name(), "messages").error_code(50);
    let armed = slow.arm(database.uri()).await;
    is_enqueued(&connect().await).await;
    assert_eq!(armed.struck().await, 0);
    is_enqueued(&store(&database).await).await;
    assert!(armed.struck().await > 0);
    drop((armed, database));
}

async fn is_enqueued(store: &Store) {
    NewJob::of_class("noop", doc! {}).enqueue(store).await.unwrap();
}
