//! A database that an application uses as well: what the application has made is left as it is, and a prefix lets both live in it.
//! Indexes of an operator: a warning, and everything goes on.

use std::ops::ControlFlow;

use bson::{Bson, Document, doc, oid::ObjectId};
use futures_util::TryStreamExt;
use mongodb::{
    IndexModel,
    options::{IndexOptions, ReadConcern},
};
use recruiter_common::{
    Client, ConnectArgs, ConnectError, Graph, GraphId, JobFilter, JobId, Limit, NewJob, OnConflict, Outcome, Pattern, StoreError, Unique,
    control::{Change, Changed, Control},
    instant::Instant,
    limits::Paused,
    messages::From,
    schedules::Schedule,
    store::{Store, schema},
    workers::{Chosen, WorkerChange},
};
use recruiter_tests::{
    factory::again,
    fail_points::FailPoint,
    http::Api,
    local::{prepared, store},
    mongo::{PASSWORD, TestDatabase, USER, mongod_with_access_control},
    processes::{Process, Setup, System},
    wait::{SOON, wait_until},
};

const PREFIX: &str = "jobs_";

/// All collections without the statistics of MongoDB: options, indexes and documents.
async fn everything_in(database: &TestDatabase) -> Vec<Document> {
    let mut all = Vec::new();
    let mut names = database.database().list_collection_names().await.unwrap();
    names.sort();
    for name in names {
        let listed = doc! { "listCollections": 1, "filter": { "name": &name } };
        let options: Vec<Document> = database.database().run_cursor_command(listed).await.unwrap().try_collect().await.unwrap();
        let is_view = options[0].get_str("type").unwrap() == "view";
        let indexes = if is_view { Vec::new() } else { database.raw(&name).list_index_names().await.unwrap() };
        let mut documents = database.all(&name, doc! {}).await;
        documents.sort_by_key(ToString::to_string);
        all.push(doc! { "options": options, "indexes": indexes, "documents": documents });
    }
    all
}

/// Documents that MongoDB or the cleaner would delete if they were ours: their dates are over.
fn of_an_application(count: i32) -> Vec<Document> {
    let past = bson::DateTime::from_millis(5);
    let document = |number| {
        doc! {
            "_id": ObjectId::new(), "name": format!("{number}"), "number": number, "expires_at": past, "at": past, "available": true,
            "last_seen_at": past, "filename": "a.txt", "kind": "wave",
        }
    };
    (0..count).map(document).collect()
}

async fn make_foreign(database: &TestDatabase, name: &str) {
    database.raw(name).insert_many(of_an_application(20)).await.unwrap();
    database.raw(name).create_index(IndexModel::builder().keys(doc! { "number": 1 }).build()).await.unwrap();
}

fn foreign_in(failed: &ConnectError) -> String {
    let ConnectError::Store(StoreError::Foreign { collection }) = failed else { panic!("{failed}") };
    collection.clone()
}

/// As a user with the role `readWrite`, who may drop collections as well.
#[tokio::test]
async fn each_collection_of_an_application_is_refused_by_its_name_and_left_alone() {
    let (_mongo, uri) = mongod_with_access_control().await;
    for name in schema::collection_names().chain(["signals_7"]) {
        let database = TestDatabase::on(&uri).await;
        let user = database.name().to_owned();
        let writer = doc! { "createUser": &user, "pwd": "pw", "roles": [{ "role": "readWrite", "db": database.name() }] };
        database.database().client().database("admin").run_command(writer).await.unwrap();
        make_foreign(&database, name).await;
        let before = everything_in(&database).await;
        let connect = ConnectArgs::to(database.uri().replace(&format!("{USER}:{PASSWORD}@"), &format!("{user}:pw@")));
        assert_eq!(foreign_in(&Store::connect(&connect, "test").await.unwrap_err()), format!("`{name}`"));
        let own = Client::from_database(database.database().clone());
        assert_eq!(foreign_in(&own.ensure_schema().await.unwrap_err()), format!("`{name}`"));
        assert_eq!(foreign_in(&Store::connect_to_ask(&connect, "test").await.unwrap_err()), format!("`{name}`"));
        NewJob::of_class("noop", doc! {}).enqueue(&own).await.unwrap_err();
        let here = database.all(name, doc! {}).await[0].get_object_id("_id").unwrap();
        call_all(&own, Here { waiting: here.into(), archived: here.into(), graph: here.into() }).await;
        assert_eq!(everything_in(&database).await, before, "{name}");
    }
}

/// What looks like Recruiter's says nothing where Recruiter has made nothing: `unique_periods` would get an index by which MongoDB deletes
/// documents, `signals` would be replaced, and the cleaner would delete the files.
#[tokio::test]
async fn where_recruiter_is_new_nothing_is_adopted_because_it_looks_like_recruiters() {
    let past = bson::DateTime::from_millis(5);
    let two_days_ago = || {
        let seconds =
            (chrono::TimeDelta::days(-2) + chrono::TimeDelta::milliseconds(bson::DateTime::now().timestamp_millis())).num_seconds();
        ObjectId::from_parts(u32::try_from(seconds).unwrap(), [0; 5], rand::random())
    };
    let file = || doc! { "_id": two_days_ago(), "filename": format!("{}/a.jpg", ObjectId::new()), "length": 0_i64 };
    let capped = |name: &str| (doc! { "create": name, "capped": true, "size": 4_096 }, vec![]);
    let plain = |name: &str, documents: Vec<Document>| (doc! { "create": name }, documents);
    let chunk = || doc! { "files_id": two_days_ago(), "n": 0, "data": bson::Binary { subtype: 0.into(), bytes: vec![1] } };
    let with_documents = [
        plain("payloads.files", vec![file(), file()]),
        plain("payloads.chunks", vec![chunk()]),
        plain("groups", vec![doc! { "_id": "admins" }]),
        plain("limits", vec![doc! { "_id": "api", "capacity": 5 }]),
        plain("roster", vec![doc! { "work_on": "the roof", "lease_ms": 5 }]),
        plain("unique_periods", vec![doc! { "_id": "a", "job": ObjectId::new(), "expires_at": past }]),
        plain("metadata", vec![doc! { "_id": "features", "files": true }]),
        plain("signals", vec![doc! { "_id": 1, "kind": "wave" }]),
    ];
    let empty = schema::collection_names().map(|name| plain(name, vec![])).chain([capped("signals"), capped("events")]);
    for (create, documents) in empty.chain(with_documents) {
        let database = TestDatabase::new().await;
        let name = create.get_str("create").unwrap().to_owned();
        database.database().run_command(create).await.unwrap();
        database.raw(&name).create_index(IndexModel::builder().keys(doc! { "number": 1 }).build()).await.unwrap();
        if !documents.is_empty() {
            database.raw(&name).insert_many(documents).await.unwrap();
        }
        let before = everything_in(&database).await;
        let connect = ConnectArgs::to(database.uri());
        assert_eq!(foreign_in(&Store::connect(&connect, "test").await.unwrap_err()), format!("`{name}`"));
        let own = Client::from_database(database.database().clone());
        own.limits().set("api", Limit::capacity(1)).await.unwrap_err();
        own.put_file(JobId::new(), "a", "b".as_bytes()).await.unwrap_err();
        own.publish_message("a", &doc! {}).await.unwrap_err();
        own.events([Pattern::new("job.*").unwrap()], None).await.unwrap_err();
        assert_eq!(everything_in(&database).await, before, "{name}");
    }
}

/// Later, a bucket is the application's until files of jobs are in use, and `consumers` until there are messages.
#[tokio::test]
async fn a_bucket_of_an_application_is_left_alone_by_the_cleaner() {
    let (database, own) = prepared().await;
    database.raw("consumers").insert_one(doc! { "_id": "g" }).await.unwrap();
    assert!(!own.consumers().remove("g").await.unwrap());
    assert_eq!(database.count("consumers", doc! {}).await, 1);
    database.raw("consumers").drop().await.unwrap();
    let job = JobId::new();
    let name = format!("{job}/a.jpg");
    let past = bson::DateTime::from_millis(5);
    let id = ObjectId::from_parts(1_000_000_000, [0; 5], [0; 3]);
    let file = doc! { "_id": id, "filename": &name, "length": 0_i64, "chunkSize": 5, "uploadDate": past };
    database.raw("payloads.files").insert_one(file).await.unwrap();
    let data = bson::Binary { subtype: 0.into(), bytes: vec![1] };
    let chunk = doc! { "files_id": ObjectId::from_parts(1, [0; 5], [0; 3]), "n": 0, "data": data };
    database.raw("payloads.chunks").insert_one(chunk).await.unwrap();
    let before = everything_in(&database).await;
    assert_eq!(own.prune_files(None, own.now(), 9).await.unwrap().deleted, 0);
    assert_eq!(own.prune_chunks(None, own.now(), 9).await.unwrap().deleted, 0);
    assert!(!own.delete_file(job, "a.jpg").await.unwrap());
    own.put_file(JobId::new(), "a", "b".as_bytes()).await.unwrap_err();
    let refused = Store::connect(&ConnectArgs::to(database.uri()), "test").await.unwrap_err();
    let named = foreign_in(&refused);
    let remedy = "updateOne({ _id: 'features' }, { $set: { files: true } }, { upsert: true })";
    assert!(named.starts_with("`payloads.chunks`, `payloads.files` (") && named.contains(remedy), "{named}");
    assert_eq!(everything_in(&database).await, before);
    let noted = doc! { "$set": { "files": true } };
    database.raw("metadata").update_one(doc! { "_id": "features" }, noted).upsert(true).await.unwrap();
    store(&database).await;
}

/// What the calls of the library are given.
#[derive(Clone, Copy)]
struct Here {
    waiting: JobId,
    archived: JobId,
    graph: GraphId,
}

impl Default for Here {
    fn default() -> Self {
        Self { waiting: JobId::new(), archived: JobId::new(), graph: GraphId::new() }
    }
}

const CALLS: usize = 30;

/// One of the calls of the library that write. Returns what was called.
async fn call(number: usize, own: &Client, here: Here) -> String {
    let (limits, groups, pauses) = (own.limits(), own.groups(), own.pauses());
    let (schedules, consumers, mut control) = (own.schedules(), own.consumers(), own.control(false));
    let retry = Change::Retry { again: false, with: Box::default() };
    let noop = || NewJob::of_class("noop", doc! {});
    let all = async |change: Change, control: &mut Control| {
        let filter = JobFilter::default().narrowed_to(&change).unwrap();
        control.change_all(&change, &filter, |_, _| ControlFlow::Continue(())).await.is_ok()
    };
    let (name, is_ok) = match number {
        0 => ("remove a limit", limits.remove("api").await.is_ok()),
        1 => ("remove the limit of a group", limits.remove("@mail").await.is_ok()),
        2 => ("most waiting of a limit", limits.set_most_waiting("api", Some(5)).await.is_ok()),
        3 => ("most waiting of a group", groups.set_most_waiting("mail", Some(5)).await.is_ok()),
        4 => ("no most waiting of a group", groups.set_most_waiting("mail", None).await.is_ok()),
        5 => ("weight", groups.set_weight("mail", None).await.is_ok()),
        6 => ("resume", pauses.resume(&Paused::Everything).await.is_ok()),
        7 => ("pause", pauses.pause(&Paused::Class("c".into()), "ada", None).await.is_ok()),
        8 => ("pause a schedule", schedules.pause("s", "ada", "").await.is_ok()),
        9 => ("resume a schedule", schedules.resume("paused").await.is_ok()),
        10 => ("run a schedule", schedules.run_now("s").await.is_ok()),
        11 => ("remove a schedule", schedules.remove("s", None).await.is_ok()),
        12 => ("remove a consumer group", consumers.remove("g").await.is_ok()),
        13 => ("reset a consumer group", consumers.reset("g", From::Now).await.is_ok()),
        14 => ("delete a file", own.delete_file(here.waiting, "a").await.is_ok()),
        15 => ("stop all workers", own.workers().change(WorkerChange::Stop, &Chosen::All, "ada", false).await.is_ok()),
        16 => {
            own.announce_jobs(["mail"]).await;
            ("announce jobs", true)
        }
        17 => ("cancel a job", control.change(&Change::Cancel, &[here.waiting]).await.is_ok()),
        18 => ("retry a job", control.change(&retry, &[here.archived]).await.is_ok()),
        19 => ("cancel all jobs", all(Change::Cancel, &mut control).await),
        20 => ("retry a graph", control.retry_graph(here.graph).await.is_ok()),
        21 => ("cancel a graph", control.cancel_graph(here.graph).await.is_ok()),
        22 => ("delete a job", control.change(&Change::Delete, &[here.archived]).await.is_ok()),
        23 => ("delete all jobs", all(Change::Delete, &mut control).await),
        24 => ("enqueue", noop().enqueue(own).await.is_ok()),
        25 => ("set a limit", limits.set("api", Limit::capacity(1)).await.is_ok()),
        26 => ("write a file", own.put_file(here.waiting, "a", "b".as_bytes()).await.is_ok()),
        27 => ("drop outdated indexes", own.drop_outdated_indexes().await.is_ok()),
        28 => ("publish a message", own.publish_message("a", &doc! {}).await.is_ok()),
        _ => ("subscribe", own.events([Pattern::new("job.*").unwrap()], None).await.is_ok()),
    };
    format!("{name}: {is_ok}")
}

async fn call_all(own: &Client, here: Here) {
    for number in 0..CALLS {
        call(number, own, here).await;
    }
}

/// Documents that the calls would find and change.
#[tokio::test]
async fn no_call_of_the_library_changes_what_an_application_has_made() {
    let here = Here::default();
    let (past, worker) = (bson::DateTime::from_millis(5), ObjectId::new());
    let job = doc! { "workable": { "class": "noop", "parameters": {} }, "group": "mail", "attempts": 1, "graph": here.graph };
    let job = |more: Document| job.clone().into_iter().chain(more).collect::<Document>();
    let waiting = job(doc! { "_id": here.waiting, "locked": false, "scheduled_at": past });
    let ended = doc! { "start": ObjectId::new(), "started_at": past, "ended_at": past };
    let archived = job(doc! { "_id": here.archived, "locked": false, "scheduled_at": past, "why": "gave-up", "last_execution": ended });
    let schedule = doc! { "_id": "s", "every_ms": 60_000_i64, "job": { "class": "noop" }, "last_slot": past };
    let paused: Document = schedule.clone().into_iter().chain(doc! { "_id": "paused", "paused": { "by": "bob" } }).collect();
    let file = doc! { "_id": worker, "filename": format!("{}/a", here.waiting), "length": 0_i64, "chunkSize": 5, "uploadDate": past };
    let theirs = [
        ("scheduled", waiting),
        ("archived", archived),
        ("roster", doc! { "_id": worker, "work_on": "the roof", "lease_ms": 5 }),
        ("limits", doc! { "_id": "api", "capacity": 5 }),
        ("groups", doc! { "_id": "mail", "capacity": 5, "most_waiting": 7 }),
        ("pauses", doc! { "_id": "everything" }),
        ("schedulers", schedule),
        ("schedulers", paused),
        ("consumers", doc! { "_id": "g", "position": "5" }),
        ("payloads.files", file),
        ("signals", doc! { "_id": 1, "kind": "wave" }),
        ("metadata", doc! { "_id": "features", "files": true, "messages": true }),
    ];
    let database = TestDatabase::new().await;
    for (name, document) in theirs {
        database.raw(name).insert_one(document).await.unwrap();
    }
    // An early release had one of this name.
    let permits = IndexOptions::builder().name("permits".to_owned()).build();
    database.raw("scheduled").create_index(index(doc! { "number": 1 }, permits)).await.unwrap();
    let before = everything_in(&database).await;
    for number in 0..CALLS {
        let own = Client::from_database(database.database().clone());
        let called = call(number, &own, here).await;
        assert_eq!(everything_in(&database).await, before, "{called}");
    }
}

/// Otherwise a collection that a call makes would count as an application's.
#[tokio::test]
async fn a_call_of_a_client_of_an_application_makes_no_collection_or_the_schema() {
    let mut database = TestDatabase::new().await;
    for number in 0..CALLS {
        let called = call(number, &Client::from_database(database.database().clone()), Here::default()).await;
        if !database.database().list_collection_names().await.unwrap().is_empty() {
            Store::connect(&ConnectArgs::to(database.uri()), "test").await.map(drop).expect(&called);
            database = TestDatabase::new().await;
        }
    }
}

/// A call of the library makes the schema before it writes: otherwise its own collection would count as an application's.
#[tokio::test]
async fn the_first_write_of_a_client_of_an_application_makes_the_schema() {
    for number in 0..4 {
        let database = TestDatabase::new().await;
        let own = Client::from_database(database.database().clone());
        match number {
            0 => own.limits().set("api", Limit::capacity(1)).await.unwrap(),
            1 => drop(own.put_file(JobId::new(), "a", "b".as_bytes()).await.unwrap()),
            2 => own.publish_message("a", &doc! {}).await.map(drop).unwrap(),
            _ => drop(own.events([Pattern::new("job.*").unwrap()], None).await.unwrap()),
        }
        drop(store(&database).await);
        NewJob::of_class("noop", doc! {}).enqueue(&own).await.unwrap();
    }
}

/// A library on the application's client does not check at a connect.
#[tokio::test]
async fn an_enqueueing_call_refuses_what_came_after_the_schema() {
    let (database, _) = prepared().await;
    database.raw("signals").drop().await.unwrap();
    make_foreign(&database, "signals").await;
    let before = everything_in(&database).await;
    let own = Client::from_database(database.database().clone());
    let refused = NewJob::of_class("noop", doc! {}).enqueue(&own).await.unwrap_err();
    assert!(recruiter_common::telemetry::chain(&refused).contains("`signals`"), "{refused}");
    call_all(&own, Here::default()).await;
    assert_eq!(everything_in(&database).await, before);
}

/// The programs: the error names the collection and the remedy.
#[tokio::test]
async fn no_program_touches_the_signals_of_an_application() {
    let database = TestDatabase::new().await;
    database.raw("signals").insert_many(of_an_application(1_000)).await.unwrap();
    let before = everything_in(&database).await;
    let programs: [(&str, &[&str]); 5] = [
        ("recruiter", &["enqueue", "--class", "noop"]),
        ("recruiter", &["stats"]),
        ("recruiter", &["run"]),
        ("recruiter-cleaner", &[]),
        ("recruiter-worker", &["--builtins"]),
    ];
    for (program, args) in programs {
        let mut process = Process::on(&database, program, args);
        let code = process.wait_exit(SOON).await.code();
        let said = process.stderr();
        assert_eq!(code, Some(77), "{said}");
        assert!(said.contains("`signals`") && said.contains("--collection-prefix") && said.contains("another database"), "{said}");
        assert_eq!(everything_in(&database).await, before);
    }
}

#[tokio::test]
async fn views_and_collections_with_options_of_others_are_refused_even_if_they_are_empty() {
    let options = [
        doc! { "create": "groups", "viewOn": "orders", "pipeline": [] },
        doc! { "create": "events", "timeseries": { "timeField": "at" } },
        doc! { "create": "roster", "capped": true, "size": 4_096 },
        doc! { "create": "limits", "validator": { "$jsonSchema": { "required": ["capacity", "room"] } } },
        doc! { "create": "messages", "validator": { "$jsonSchema": { "properties": { "_id": {}, "messages": {} } } } },
    ];
    for create in options {
        let database = TestDatabase::new().await;
        let name = create.get_str("create").unwrap().to_owned();
        database.database().run_command(create).await.unwrap();
        let connect = ConnectArgs::to(database.uri());
        assert_eq!(foreign_in(&Store::connect(&connect, "test").await.unwrap_err()), format!("`{name}`"));
        assert!(!database.database().list_collection_names().await.unwrap().contains(&"scheduled".to_owned()));
    }
}

/// The database of an earlier release, a restored one, and one whose validators an operator has removed.
#[tokio::test]
async fn what_looks_like_ours_is_adopted_and_listed() {
    let (database, own) = prepared().await;
    own.limits().set("api", Limit::capacity(1)).await.unwrap();
    assert_eq!(own.limits().list().await.unwrap(), [("api".to_owned(), Limit::capacity(1))].into());
    let system = System::start(&database, Setup::default());
    let jobs = [NewJob::of_class("noop", doc! {}).limit("api"), NewJob::of_class("noop", doc! {}).expires_after(SOON)];
    for job in jobs {
        let id = job.enqueue(&own).await.unwrap().id;
        database.until("archived", doc! { "_id": id }, 1, "it is done").await;
    }
    system.stop().await;
    let listed = async || database.raw("metadata").find_one(doc! { "_id": "collections" }).await.unwrap().unwrap();
    let before = listed().await;
    database.raw("metadata").delete_one(doc! { "_id": "collections" }).await.unwrap();
    for name in ["scheduled", "limits", "groups", "pauses", "schedulers"] {
        database.database().run_command(doc! { "collMod": name, "validator": {} }).await.unwrap();
    }
    database.raw("archived").insert_one(doc! { "_id": 5, "workable": "odd" }).await.unwrap();
    store(&database).await;
    let names = |listed: &Document| listed.keys().cloned().collect::<std::collections::BTreeSet<_>>();
    assert_eq!(names(&listed().await), names(&before));
    // An application makes its own one in place of a dropped one.
    database.raw("unique_periods").drop().await.unwrap();
    make_foreign(&database, "unique_periods").await;
    assert_eq!(foreign_in(&Store::connect(&ConnectArgs::to(database.uri()), "test").await.unwrap_err()), "`unique_periods`");
    assert_eq!(database.count("unique_periods", doc! {}).await, 20);
}

#[tokio::test]
async fn no_collection_with_documents_of_others_is_replaced() {
    let (database, _) = prepared().await;
    // The name that a replacement once had.
    make_foreign(&database, "signals.capped").await;
    database.raw("signals").drop().await.unwrap();
    database.raw("signals").insert_one(doc! { "kind": "free" }).await.unwrap();
    store(&database).await;
    assert_eq!(database.count("signals.capped", doc! {}).await, 20);
    // Listed as ours, then an application inserts.
    database.raw("signals").drop().await.unwrap();
    database.raw("signals").insert_one(doc! { "kind": "free" }).await.unwrap();
    let uuid = |listed: Vec<Document>| listed[0].get_document("info").unwrap().get("uuid").cloned().unwrap();
    let listed = doc! { "listCollections": 1, "filter": { "name": "signals" } };
    let signals = database.database().run_cursor_command(listed).await.unwrap().try_collect().await.unwrap();
    let noted = doc! { "$set": { "signals": uuid(signals) } };
    database.raw("metadata").update_one(doc! { "_id": "collections" }, noted).await.unwrap();
    database.raw("signals").insert_many(of_an_application(3)).await.unwrap();
    assert_eq!(foreign_in(&Store::connect(&ConnectArgs::to(database.uri()), "test").await.unwrap_err()), "`signals`");
    assert_eq!(database.count("signals", doc! {}).await, 4);
}

/// MongoDB would delete its documents by an index of expiry, and refuse its inserts by a validator.
#[tokio::test]
async fn a_collection_that_an_application_made_and_fills_later_is_left_alone() {
    let (database, own) = prepared().await;
    database.database().create_collection("messages").await.unwrap();
    drop(store(&database).await);
    make_foreign(&database, "messages").await;
    let refused = own.publish_message("a", &doc! {}).await.unwrap_err().to_string();
    assert!(refused.contains("`messages`"), "{refused}");
    assert_eq!(database.raw("messages").list_index_names().await.unwrap().len(), 2);
    // Listed, for any reason.
    let listed = doc! { "listCollections": 1, "filter": { "name": "messages" } };
    let listed: Vec<Document> = database.database().run_cursor_command(listed).await.unwrap().try_collect().await.unwrap();
    let uuid = listed[0].get_document("info").unwrap().get("uuid").unwrap();
    database.raw("metadata").update_one(doc! { "_id": "collections" }, doc! { "$set": { "messages": uuid } }).await.unwrap();
    own.publish_message("a", &doc! {}).await.unwrap_err();
    database.raw("messages").insert_one(doc! { "_id": "i".repeat(5_000) }).await.expect("it has got no validator");
    database.raw("messages").delete_one(doc! { "_id": "i".repeat(5_000) }).await.unwrap();
    assert_eq!(database.raw("messages").list_index_names().await.unwrap().len(), 2);
    assert_eq!(database.count("messages", doc! {}).await, 20);
}

/// The collection `audit` came with a later release than the others: jobs run on, and only what needs an entry there is refused.
#[tokio::test(flavor = "multi_thread")]
async fn an_audit_that_an_application_had_before_stops_changes_by_http_only() {
    let (database, own) = prepared().await;
    database.raw("audit").drop().await.unwrap();
    database.raw("metadata").update_one(doc! { "_id": "collections" }, doc! { "$unset": { "audit": 1 } }).await.unwrap();
    make_foreign(&database, "audit").await;
    let system = System::start(&database, Setup::default());
    let id = NewJob::of_class("noop", doc! {}).enqueue(&own).await.unwrap().id;
    database.archived(id).await;
    let waiting = NewJob::of_class("nobody-has-it", doc! {}).enqueue(&own).await.unwrap().id;
    let api = Api::serve(&database, &["--anonymous", "operator"]).await;
    let (status, refused) = api.post(&format!("/jobs/{waiting}/cancel"), &serde_json::json!({})).await;
    assert!(status == 500 && refused["detail"].as_str().unwrap().contains("`audit`"), "{refused}");
    assert_eq!(database.count("scheduled", doc! { "_id": waiting }).await, 1);
    let indexes = indexes_of(&database, "audit").await;
    drop(system);
    drop(store(&database).await);
    assert_eq!((database.count("audit", doc! {}).await, indexes_of(&database, "audit").await), (20, indexes));
    assert!(database.count("metadata", doc! { "_id": "collections", "audit": { "$exists": true } }).await == 0);
    // Its owner renames it.
    let rename = doc! { "renameCollection": format!("{}.audit", database.name()), "to": format!("{}.their_audit", database.name()) };
    database.database().client().database("admin").run_command(rename).await.unwrap();
    assert_eq!(api.post(&format!("/jobs/{waiting}/cancel"), &serde_json::json!({})).await.0, 200);
    assert_eq!(database.count("audit", doc! { "action": "jobs.cancel" }).await, 1);
}

async fn indexes_of(database: &TestDatabase, name: &str) -> Vec<String> {
    database.raw(name).list_index_names().await.unwrap()
}

#[tokio::test]
async fn a_collection_with_a_validator_or_without_documents_is_refused_before_the_schema_is_made() {
    let validator = doc! { "$jsonSchema": { "properties": { "_id": {}, "capacity": {} } } };
    for name in ["groups", "signals"] {
        let database = TestDatabase::new().await;
        if name == "groups" {
            database.database().run_command(doc! { "create": name, "validator": &validator }).await.unwrap();
            make_foreign(&database, name).await;
        } else {
            database.database().create_collection(name).await.unwrap();
        }
        let before = everything_in(&database).await;
        let own = Client::from_database(database.database().clone());
        assert_eq!(foreign_in(&own.ensure_schema().await.unwrap_err()), format!("`{name}`"));
        let limit = Limit::capacity(1);
        own.limits().set("api", limit).await.unwrap_err();
        own.put_file(JobId::new(), "a", "b".as_bytes()).await.unwrap_err();
        assert_eq!(everything_in(&database).await, before);
    }
}

/// Documents that came after the schema.
#[tokio::test]
async fn the_cleaner_leaves_documents_that_are_no_workers_and_names_each_once() {
    let (database, own) = prepared().await;
    let mut theirs = of_an_application(2);
    theirs[0].insert("work_on", "the roof");
    theirs[1].extend(doc! { "_id": "ada", "work_on": "the roof", "working_on": "it" });
    database.raw("roster").insert_many(&theirs).await.unwrap();
    let quick = &["--dead-after", "1500ms", "--every", "150ms"];
    let mut system = System::start(
        &database,
        Setup { cleaner: quick, worker: &["--builtins", "--lease", "900ms", "--heartbeat", "250ms"], ..Setup::default() },
    );
    NewJob::of_class("noop", doc! {}).enqueue(&own).await.unwrap();
    database.until("archived", doc! {}, 1, "it is done").await;
    let mut asked = Process::on(&database, "recruiter", &["workers", "quiet", "--all"]);
    assert!(asked.wait_exit(SOON).await.success(), "{}", asked.stderr());
    // A dead worker of ours, which is as silent as they are.
    system.workers[0].kill();
    system.workers[0].wait_exit(SOON).await;
    let ours = doc! { "lease_ms": { "$exists": true } };
    database.until("roster", ours.clone(), 0, "it is retired").await;
    let again = Process::on(&database, "recruiter-worker", &["--builtins", "--lease", "900ms", "--heartbeat", "250ms"]);
    database.until("roster", ours.clone(), 1, "it is there").await;
    again.kill();
    database.until("roster", ours.clone(), 0, "it is retired").await;
    let mut left = database.all("roster", doc! {}).await;
    left.sort_by_key(|document| document.get_str("name").unwrap().to_owned());
    assert_eq!(left, theirs);
    let said = system.cleaner.stderr();
    assert_eq!(said.lines().filter(|line| line.contains("does not belong to a worker")).count(), 2, "{said}");
    drop(again);
    system.stop().await;
}

/// All names without the prefix are the application's.
#[tokio::test]
async fn with_a_prefix_jobs_live_in_the_database_of_an_application() {
    let database = TestDatabase::new().await;
    for name in schema::collection_names() {
        make_foreign(&database, name).await;
    }
    let before = everything_in(&database).await;
    let flags = ["--collection-prefix", PREFIX];
    let worker = ["--builtins", "--collection-prefix", PREFIX];
    let cleaner = ["--collection-prefix", PREFIX, "--prune-every", "200ms", "--keep-archived", "1d", "--sweep-every", "200ms"];
    let system = System::start(&database, Setup { recruiter: &flags, cleaner: &cleaner, worker: &worker, ..Setup::default() });
    let own = Client::from_database(database.database().clone()).with_collection_prefix(PREFIX).unwrap();
    own.ensure_schema().await.unwrap();
    own.prepare_unique_jobs().await.unwrap();
    own.limits().set("api", Limit::capacity(1)).await.unwrap();
    let noop = || NewJob::of_class("noop", doc! {});
    let mut jobs = vec![
        noop().enqueue(&own).await.unwrap().id,
        noop().limit("api").enqueue(&own).await.unwrap().id,
        noop().in_line("a").enqueue(&own).await.unwrap().id,
        noop().unique(Unique::by_key("k")).enqueue(&own).await.unwrap().id,
    ];
    let archived = database.raw("jobs_archived");
    let done = async |jobs: &[JobId]| {
        let done = doc! { "_id": { "$in": jobs.to_vec() }, "why": "done" };
        archived.count_documents(done).await.unwrap() == jobs.len() as u64
    };
    // Then all indexes are made, which a transaction does not wait for.
    wait_until(SOON, "all jobs are done", async || done(&jobs).await).await;
    // In a transaction of the application, with a write to a collection of the application that has one of our names.
    let mut session = own.start_session().await.unwrap();
    session.start_transaction().await.unwrap();
    database.raw("orders").insert_one(doc! { "_id": 17 }).session(&mut session).await.unwrap();
    jobs.push(noop().enqueue_in(&own, &mut session).await.unwrap().id);
    session.commit_transaction().await.unwrap();
    own.announce_jobs(["generic"]).await;
    let mut command = Process::start(
        "recruiter",
        &["enqueue", "--class", "noop", "--wait"],
        &[("MONGODB_URI", database.uri()), ("RECRUITER_COLLECTION_PREFIX", PREFIX)],
    );
    assert!(command.wait_exit(SOON).await.success(), "{}", command.stderr());
    wait_until(SOON, "the job of the transaction is done", async || done(&jobs).await).await;
    let graph = use_the_rest(&database, &own).await;
    let lists = ["jobs", "groups", "schedules", "consumers", "limits"].map(|noun| vec![noun, "list"]);
    for args in [vec!["stats"], vec!["roster"], vec!["pauses"], vec!["graph", "show", &graph]].into_iter().chain(lists) {
        let mut command = Process::on(&database, "recruiter", &[&args, &flags[..]].concat());
        assert!(command.wait_exit(SOON).await.success(), "{args:?}: {}", command.stderr());
    }
    system.stop().await;
    database.raw("orders").drop().await.unwrap();
    let mut after = everything_in(&database).await;
    let name = |found: &Document| found.get_array("options").unwrap()[0].as_document().unwrap().get_str("name").unwrap().to_owned();
    after.retain(|found| !name(found).starts_with(PREFIX));
    assert_eq!(after, before);
}

/// What has collections or indexes of its own: a schedule, a consumer group with messages, a graph and its retry, a retry, a line that halts,
/// and a file that is copied. Returns the graph.
async fn use_the_rest(database: &TestDatabase, own: &Client) -> String {
    let archived = database.raw("jobs_archived");
    let ended = async |what: &str, filter: Document, count: u64| {
        // As a change of jobs reads it.
        let found = async || archived.count_documents(filter.clone()).read_concern(ReadConcern::majority()).await.unwrap();
        wait_until(SOON, what, async || found().await >= count).await;
    };
    let (noop, fail) = (|| NewJob::of_class("noop", doc! {}), || NewJob::of_class("fail", doc! {}));
    let schedule = Schedule::every(std::time::Duration::from_secs(1)).unwrap().job(noop());
    own.schedules().declare("s", &schedule).await.unwrap();
    own.consumers().declare("g", [Pattern::new("orders.*").unwrap()], noop().tag("message"), From::Now).await.unwrap();
    own.publish_messages((0..3).map(|number| ("orders.placed", doc! { "number": number }))).await.unwrap();

    let mut graph = Graph::new();
    let parents = [graph.add(noop()), graph.add(fail())];
    graph.when_all(parents, noop());
    let id = graph.id();
    graph.enqueue(own).await.unwrap();
    assert_eq!(own.wait_for_graph(id, SOON).await.unwrap().len(), 3);
    assert_eq!(own.control(false).retry_graph(id).await.unwrap().len(), 2);
    assert_eq!(own.wait_for_graph(id, SOON).await.unwrap().len(), 5);

    NewJob::of_class("fail", doc! { "times": 1 }).retry(&again(3)).tag("again").enqueue(own).await.unwrap();
    let halts = fail().in_line("h").halt_on_failure().enqueue(own).await.unwrap().id;
    let behind = noop().in_line("h").enqueue(own).await.unwrap().id;
    ended("the first job of the line has failed", doc! { "_id": halts }, 1).await;
    assert_eq!(database.count("jobs_pauses", doc! { "_id": "line:h", "job": halts }).await, 1);
    assert!(own.pauses().resume(&Paused::Line("h".into())).await.unwrap());
    ended("the line goes on", doc! { "_id": behind, "why": "done" }, 1).await;

    let job = JobId::new();
    own.put_file(job, "a.txt", "content".as_bytes()).await.unwrap();
    fail().with_id(job).enqueue(own).await.unwrap();
    ended("it has failed", doc! { "_id": job }, 1).await;
    let change = Change::Retry { again: false, with: Box::default() };
    let retried = own.control(false).change(&change, &[job]).await.unwrap();
    let Changed::EnqueuedAgain { new: Some(new), .. } = &retried[0].1 else { panic!("{retried:?}") };
    assert_eq!(own.read_file(*new, "a.txt").await.unwrap(), b"content");

    ended("the retry has succeeded", doc! { "tags": "again", "why": "done", "attempts": 2 }, 1).await;
    ended("the messages have become jobs", doc! { "tags": "message", "why": "done" }, 3).await;
    ended("the schedule runs", doc! { "schedule.name": "s", "why": "done" }, 2).await;
    assert!(own.schedules().remove("s", None).await.unwrap());
    id.to_string()
}

/// MongoDB ends a read of a collection that is replaced at that moment, as another process does with ordinary `signals`.
#[tokio::test]
async fn a_collection_that_is_replaced_during_its_examination_is_read_again() {
    let (database, _) = prepared().await;
    for (command, collection, code) in [("find", "signals", 175), ("find", "signals", 43), ("listIndexes", "scheduled", 43)] {
        // What is listed is not examined.
        database.raw("metadata").delete_one(doc! { "_id": "collections" }).await.unwrap();
        let fault = FailPoint::new("test", &[command]).namespace(database.name(), collection).times(3).error_code(code);
        let armed = fault.arm(database.uri()).await;
        drop(store(&database).await);
        assert_eq!(armed.struck().await, 3, "{command} {code}");
    }
}

#[tokio::test]
async fn a_prefix_that_mongodb_does_not_accept_is_refused() {
    for prefix in ["$jobs", "system.", "1", "a b", "jobs\n", "é", &"x".repeat(65)] {
        let args = ConnectArgs::to("mongodb://127.0.0.1:1/x").collection_prefix(prefix);
        assert!(matches!(Store::connect(args, "test").await, Err(ConnectError::InvalidPrefix(_))), "{prefix}");
    }
}

fn index(keys: Document, options: IndexOptions) -> IndexModel {
    IndexModel::builder().keys(keys).options(options).build()
}

/// An operator's, with the keys of ours: MongoDB refuses ours.
#[tokio::test]
async fn an_index_of_an_operator_with_our_keys_keeps_nothing_from_working() {
    let database = TestDatabase::new().await;
    let day = std::time::Duration::from_secs(86_400);
    let ttl = IndexOptions::builder().name("mine".to_owned()).expire_after(day * 10_000).build();
    let own = store(&database).await;
    database.raw("archived").drop_index("archived_by_end").await.unwrap();
    database.raw("archived").create_index(index(doc! { "last_execution.ended_at": 1 }, ttl.clone())).await.unwrap();
    database.raw("unique_periods").drop_index("expired_periods").await.unwrap();
    database.raw("unique_periods").create_index(index(doc! { "expires_at": 1 }, ttl)).await.unwrap();
    database.raw("scheduled").drop_index("due_jobs").await.unwrap();
    let keys = doc! { "group": 1, "workable.class": 1, "priority": -1, "scheduled_at": 1, "_id": 1, "locked": 1, "gate": 1 };
    let only = doc! { "locked": false, "gate": Bson::Null };
    let other = IndexOptions::builder().name("theirs".to_owned()).partial_filter_expression(only).build();
    database.raw("scheduled").create_index(index(keys, other)).await.unwrap();
    database.raw("schedulers").drop_index("schedule_revisions").await.unwrap();
    // The name that MongoDB gives, which looks like that of an earlier release.
    database.raw("scheduled").create_index(index(doc! { "unique": 1 }, IndexOptions::default())).await.unwrap();
    goes_on(&database, &own, &["archived_by_end", "expired_periods", "due_jobs"], "dropIndex('theirs')").await;
    assert!(database.raw("scheduled").list_index_names().await.unwrap().contains(&"unique_1".to_owned()));
    // The others were made.
    assert!(database.raw("schedulers").list_index_names().await.unwrap().contains(&"schedule_revisions".to_owned()));
}

/// As that of an application, which has arrays where jobs have texts. The other indexes are made.
#[tokio::test]
async fn an_index_that_mongodb_refuses_for_a_document_keeps_no_process_from_starting() {
    let (database, _) = prepared().await;
    let indexes = [("scheduled", "gated_jobs"), ("archived", "archived_by_end")];
    let found = async || {
        let has =
            async |(collection, name): (&str, &str)| database.raw(collection).list_index_names().await.unwrap().contains(&name.to_owned());
        [has(indexes[0]).await, has(indexes[1]).await]
    };
    for (collection, name) in indexes {
        database.raw(collection).drop_index(name).await.unwrap();
    }
    let arrays = doc! { "_id": 1, "locked": false, "gate": "api", "group": ["a", "b"], "workable": { "class": ["a", "b"] } };
    database.raw("scheduled").insert_one(arrays).bypass_document_validation(true).await.unwrap();
    // This one may succeed later, so the process is to be started again.
    let aborted = FailPoint::new("test", &["createIndexes"]).namespace(database.name(), "scheduled").times(1).error_code(276);
    let armed = aborted.arm(database.uri()).await;
    Store::connect(&ConnectArgs::to(database.uri()), "test").await.map(drop).unwrap_err();
    assert_eq!((armed.struck().await, found().await), (1, [false, false]));
    drop(store(&database).await);
    assert_eq!(found().await, [false, true]);
    database.raw("scheduled").delete_one(doc! { "_id": 1 }).await.unwrap();
    drop(store(&database).await);
    assert_eq!(found().await, [true, true]);
}

#[tokio::test]
async fn hidden_indexes_keep_nothing_from_working() {
    let (database, own) = prepared().await;
    // Each kind of job that has indexes of its own.
    own.prepare_limited_jobs().await.unwrap();
    own.prepare_unique_jobs().await.unwrap();
    own.prepare_expiring_jobs().await.unwrap();
    own.publish_message("a.b", &doc! {}).await.unwrap();
    own.heads_of_lines(&[]).await.unwrap();
    let first = NewJob::of_class("noop", doc! {}).enqueue(&own).await.unwrap().id;
    NewJob::of_class("noop", doc! {}).waits_for(first).enqueue(&own).await.unwrap();
    let mut hidden = Vec::new();
    for collection in schema::collection_names() {
        for name in database.raw(collection).list_index_names().await.unwrap_or_default() {
            if name != "_id_" {
                let command = doc! { "collMod": collection, "index": { "name": &name, "hidden": true } };
                database.database().run_command(command).await.unwrap();
                hidden.push(name);
            }
        }
    }
    assert_eq!(hidden.len(), 16, "{hidden:?}");
    goes_on(&database, &own, &hidden.iter().map(String::as_str).collect::<Vec<_>>(), "unhideIndex('due_jobs')").await;
}

/// Processes that start now, and a store that was there before: jobs with and without a limit are done, retention deletes, and commands
/// answer. The warnings name the indexes and a remedy.
async fn goes_on(database: &TestDatabase, before: &Store, names: &[&str], remedy: &str) {
    before.limits().set("api", Limit::capacity(1)).await.unwrap();
    let old = doc! { "workable": { "class": "old" }, "last_execution": { "ended_at": bson::DateTime::from_millis(5) } };
    // Covered by a period of its own.
    let hours_ago = |hours: i64| bson::DateTime::from_chrono(before.now() - chrono::TimeDelta::hours(hours));
    let failed = doc! { "workable": { "class": "old" }, "why": "gave-up", "last_execution": { "ended_at": hours_ago(18) } };
    let kept = doc! { "workable": { "class": "kept" }, "why": "done", "last_execution": { "ended_at": hours_ago(18) } };
    database.raw("archived").insert_many([old, failed, kept]).await.unwrap();
    let cleaner = ["--prune-every", "200ms", "--keep-archived", "1d", "--keep-failures", "12h", "--sweep-every", "200ms"];
    let system = System::start(database, Setup { cleaner: &cleaner, ..Setup::default() });
    let mut jobs = Vec::new();
    for number in 0..20 {
        let job = NewJob::of_class("noop", doc! {});
        jobs.push(if number % 2 == 0 { job } else { job.limit("api") }.enqueue(before).await.unwrap().id);
    }
    database.until("archived", doc! { "_id": { "$in": &jobs }, "why": "done" }, 20, "all jobs are done").await;
    each_other_kind_ends(database).await;
    database.until("archived", doc! { "workable.class": "old" }, 0, "the old jobs are deleted").await;
    assert_eq!(database.count("archived", doc! { "workable.class": "kept" }).await, 1);
    for args in [&["stats"][..], &["jobs", "list"], &["groups", "list"], &["schedules", "list"]] {
        let mut command = Process::on(database, "recruiter", args);
        assert!(command.wait_exit(SOON).await.success(), "{args:?}: {}", command.stderr());
    }
    let said = system.recruiter.stderr();
    assert!(names.iter().all(|name| said.contains(name)) && said.contains(remedy), "{said}");
    // It meets the missing index, learns, and then reads without it.
    let _ = (before.ungated_groups().await, before.finished(Instant::UNIX_EPOCH).await);
    assert!(before.ungated_groups().await.unwrap().is_empty() && before.gated_groups().await.unwrap().is_empty());
    assert!(before.waiting_lanes().await.unwrap().is_empty());
    assert!(before.finished(Instant::UNIX_EPOCH).await.unwrap().len() >= 21);
    system.stop().await;
}

/// In a line, of a graph, one that expires, one that runs once more, and of a message.
async fn each_other_kind_ends(database: &TestDatabase) {
    let (own, noop) = (store(database).await, || NewJob::of_class("noop", doc! {}));
    let archived = async |what: &str, filter: Document| {
        wait_until(SOON, what, async || database.count("archived", filter.clone()).await > 0).await;
    };
    noop().in_line("l").enqueue(&own).await.unwrap();
    let second = noop().in_line("l").enqueue(&own).await.unwrap().id;
    let mut graph = Graph::new();
    let parent = graph.add(noop());
    let child = graph.when_all([parent], noop());
    graph.enqueue(&own).await.unwrap();
    let nobodys = NewJob::of_class("nobodys", doc! {}).expires_after(std::time::Duration::from_millis(1));
    let expires = nobodys.enqueue(&own).await.unwrap().id;
    let once_more = Unique::by_key("k").on_conflict(OnConflict::RunOnceMore);
    let sleep = |ms: i32| NewJob::of_class("sleep", doc! { "ms": ms }).unique(once_more.clone());
    let holder = sleep(600_000).enqueue(&own).await.unwrap().id;
    database.until("scheduled", doc! { "_id": holder, "locked": true }, 1, "it runs").await;
    let successor = sleep(1).enqueue(&own).await.unwrap();
    assert_eq!(successor.outcome, Outcome::RunsOnceMore);
    own.control(false).change(&Change::Cancel, &[holder]).await.unwrap();
    own.consumers().declare("g", [Pattern::new("a.*").unwrap()], noop().tag("message"), From::Now).await.unwrap();
    own.publish_message("a.b", &doc! {}).await.unwrap();
    for (job, why) in [(second, "done"), (child, "done"), (expires, "expired"), (holder, "cancelled"), (successor.id, "done")] {
        archived(why, doc! { "_id": job, "why": why }).await;
    }
    archived("the message is a job", doc! { "tags": "message", "why": "done" }).await;
}
