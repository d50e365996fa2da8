//! One document stops nothing (I9): in every collection, documents with bytes that are no UTF-8, with wrong types, and without fields.

use std::time::Duration;

use bson::{Bson, Document, RawDocumentBuf, doc, oid::ObjectId, rawdoc};
use chrono::TimeDelta;
use futures_util::TryStreamExt as _;
use recruiter_common::{
    Client, FinishReason, JobId, Limit, NewJob, Pattern, Rate, Unique,
    consumers::ConsumerError,
    messages::From,
    schedules::Schedule,
    store::{Listener, Registration, Store, lossy},
};
use recruiter_tests::{
    factory::{announcement, minimal_job},
    local::{prepared, store},
    mongo::TestDatabase,
    processes::{Process, Setup, System},
    wait::{SOON, wait_until},
};

use super::cli::recruiter;

/// Stands for bytes that are no UTF-8.
const INVALID: &str = "QQQQ";

fn noop() -> NewJob {
    NewJob::of_class("noop", doc! {})
}

fn damaged(document: &Document) -> RawDocumentBuf {
    let mut bytes = document.to_vec().unwrap();
    while let Some(at) = bytes.windows(INVALID.len()).position(|bytes| bytes == INVALID.as_bytes()) {
        bytes[at..at + INVALID.len()].copy_from_slice(b"\xff\xfe\xe9!");
    }
    RawDocumentBuf::from_bytes(bytes).unwrap()
}

/// By a command, because the driver decodes the `_id` of a document that it inserts.
pub(super) async fn insert_damaged(database: &TestDatabase, collection: &str, document: Document) {
    let command = rawdoc! { "insert": collection, "documents": [damaged(&document)], "bypassDocumentValidation": true };
    let reply = database.database().run_raw_command(command).await.unwrap();
    // A copy of a document with a unique key.
    let errors = reply.get_array("writeErrors").cloned().unwrap_or_default();
    assert!(
        errors.iter().all(|error| error.as_document().unwrap().get_i32("code").is_ok_and(|code| code == 11000)),
        "{collection}: {reply}"
    );
}

/// The document with an invalid text more, with invalid texts only, with other types, and without fields.
fn poisons(of: &Document) -> Vec<Document> {
    let with_id = |number: usize, fields: Document| {
        let id = match of.get("_id") {
            Some(Bson::String(id)) if number == 1 => format!("{INVALID}{id}").into(),
            Some(Bson::String(id)) => format!("{id}-{number}").into(),
            Some(Bson::Document(id)) => {
                let mut id = id.clone();
                id.insert("group", format!("{INVALID}{number}"));
                id.into()
            }
            _ => Bson::from(ObjectId::new()),
        };
        let mut document = doc! { "_id": id };
        document.extend(fields.into_iter().filter(|(field, _)| field != "_id"));
        document
    };
    let each = |change: fn(&Bson) -> Bson| of.iter().map(|(field, value)| (field.clone(), change(value))).collect::<Document>();
    let mut noted = of.clone();
    noted.insert("note", INVALID);
    let invalid = each(|value| if value.as_str().is_some() { INVALID.into() } else { value.clone() });
    let of_other_types = each(|value| {
        let is_number = value.as_i32().is_some() || value.as_i64().is_some() || value.as_f64().is_some();
        if value.as_str().is_some() {
            5.into()
        } else if is_number || value.as_datetime().is_some() {
            INVALID.into()
        } else {
            vec![Bson::from(INVALID), Bson::Null].into()
        }
    });
    [noted, invalid, of_other_types, doc! {}].into_iter().enumerate().map(|(number, fields)| with_id(number, fields)).collect()
}

async fn poison(database: &TestDatabase, collection: &str) {
    let found = database.raw(collection).clone_with_type::<RawDocumentBuf>().find(doc! {}).limit(20).await.unwrap();
    let mut known: Vec<Document> = found.map_ok(|found| lossy(&found)).try_collect().await.unwrap();
    known.push(match collection {
        "pauses" => doc! { "_id": "class:nothing", "by": "ada", "reason": "x", "at": bson::DateTime::now() },
        "groups" => doc! { "_id": "elsewhere", "weight": 2.0, "ageing_ms": 1_000, "capacity": 1 },
        "unique_periods" => doc! { "_id": "period", "job": ObjectId::new(), "expires_at": bson::DateTime::from_millis(0) },
        "audit" => doc! { "_id": ObjectId::new(), "at": bson::DateTime::now(), "action": "jobs.cancel", "address": "127.0.0.1" },
        "scheduled" => {
            let mut job = minimal_job("noop");
            job.extend(doc! { "unique": "u", "waiting": true, "waits_for": [ObjectId::new()], "expires_at": bson::DateTime::now() });
            job
        }
        "payloads.files" => doc! { "_id": ObjectId::from_bytes([1; 12]), "filename": format!("{}/x", JobId::new()), "length": 1_i64 },
        "payloads.chunks" => doc! { "_id": ObjectId::new(), "files_id": ObjectId::from_bytes([2; 12]), "n": 0 },
        _ => doc! { "_id": "by hand" },
    });
    for document in &known {
        for poison in poisons(document) {
            insert_damaged(database, collection, poison).await;
        }
    }
    // The documents of which there is only one.
    if collection == "metadata" {
        for mut document in known {
            let id = document.get("_id").cloned().unwrap();
            document.insert("note", INVALID);
            let raw = database.raw(collection).clone_with_type::<RawDocumentBuf>();
            raw.replace_one(doc! { "_id": id }, damaged(&document)).await.unwrap();
        }
    }
}

async fn done(database: &TestDatabase, what: &str, job: JobId) {
    database.until("archived", doc! { "_id": job, "why": "done" }, 1, &format!("{what} is done")).await;
}

async fn enqueued(store: &Store, job: NewJob) -> JobId {
    job.enqueue(store).await.unwrap().id
}

/// A job, a limited one, one in a line, a schedule, a message, a job of a dead worker, an expired job, the graph and the retention.
async fn all_goes_on(database: &TestDatabase, round: &str) -> (JobId, JobId) {
    let store = store(database).await;
    let since = bson::DateTime::from_chrono(store.now());
    // The leader and the cleaner know this worker only by its document.
    let dead = Registration { lease_ms: 2_000, ..announcement(1) };
    store.register(&dead).await.unwrap();
    let mut of_the_dead = minimal_job("noop");
    let verdict = doc! { "retry_after_ms": 0_i64 };
    let start = doc! { "start": ObjectId::new(), "worker": dead.id, "started_at": since, "scheduled_at": since, "if_worker_dies": verdict };
    of_the_dead.extend(doc! { "locked": true, "attempts": 1, "last_execution": start });
    database.raw("scheduled").insert_one(&of_the_dead).await.unwrap();
    let of_the_dead = JobId::from(of_the_dead.get_object_id("_id").unwrap());
    let expired = enqueued(&store, noop().in_group("nobody").expires_after(Duration::from_millis(1))).await;
    let old = bson::DateTime::from_chrono(store.now() - TimeDelta::days(3));
    let prunable = ObjectId::new();
    let archived = doc! { "_id": prunable, "why": "done", "last_execution": { "ended_at": old } };
    database.raw("archived").insert_one(archived).await.unwrap();
    let parent = ObjectId::new();
    let end = doc! { "class": INVALID, "ended_at": bson::DateTime::now() };
    insert_damaged(database, "archived", doc! { "_id": parent, "why": INVALID, "last_execution": end }).await;
    let child = enqueued(&store, noop().waits_for(parent.into())).await;
    store.publish_message("news.now", &doc! { "round": round }).await.unwrap();
    let jobs = [("a job", noop()), ("a limited one", noop().limit("printer")), ("one in a line", noop().in_line("line"))];
    for (what, job) in jobs {
        done(database, &format!("{round}: {what}"), enqueued(&store, job).await).await;
    }
    done(database, &format!("{round}: the job of a dead worker"), of_the_dead).await;
    let happens = async |what: &str, collection: &str, filter: Document| {
        let has_happened = async || database.count(collection, filter.clone()).await > 0;
        wait_until(SOON, &format!("{round}: {what}"), has_happened).await;
    };
    happens("a run of a schedule", "archived", doc! { "schedule.name": "ticks", "created_at": { "$gt": since } }).await;
    happens("a message", "archived", doc! { "workable.parameters.body.round": round }).await;
    happens("an expiry", "archived", doc! { "_id": expired, "why": FinishReason::EXPIRED.as_str() }).await;
    happens("an end of a graph", "archived", doc! { "_id": child, "why": "cancelled" }).await;
    database.until("archived", doc! { "_id": prunable }, 0, &format!("{round}: the retention")).await;
    (child, expired)
}

/// The commands answer.
async fn commands_go_on(database: &TestDatabase, child: JobId, expired: JobId) {
    let (job, expired) = (child.to_string(), expired.to_string());
    insert_damaged(database, "payloads.files", doc! { "_id": ObjectId::new(), "filename": format!("{expired}/x"), "length": INVALID })
        .await;
    for command in [
        &["stats"][..],
        &["roster"],
        &["limits", "list"],
        &["groups", "list"],
        &["pauses"],
        &["schedules", "list"],
        &["consumers", "list"],
        &["audit"],
        &["jobs", "list"],
        &["jobs", "list", "--state", "archived"],
        &["jobs", "why", &job],
        &["jobs", "show", &job],
        &["jobs", "retry", &expired],
        &["enqueue", "--class", "noop", "--unique", "period-0", "--unique-for", "1h"],
    ] {
        let said = recruiter(database, command);
        assert_eq!(said.code, 0, "{command:?}: {}{}", said.out, said.err);
    }
}

/// What [`all_goes_on`] uses.
async fn set_up(store: &Store) {
    let rate = Rate::new(1_000, Duration::from_secs(1), 1_000).unwrap();
    store.limits().set("printer", Limit::new(Some(2), Some(rate))).await.unwrap();
    let slow = Rate::new(6, Duration::from_secs(60), 6).unwrap();
    store.limits().set("slow", Limit::rate(slow)).await.unwrap();
    let ticks = Schedule::every(Duration::from_secs(1)).unwrap().job(noop());
    store.schedules().declare("ticks", &ticks).await.unwrap();
    let declared = store.consumers().declare("news", [Pattern::new("news.*").unwrap()], noop(), From::Now).await;
    assert!(!matches!(declared, Err(ConsumerError::Store(_))), "{declared:?}");
    enqueued(store, noop().unique(Unique::by_key("key"))).await;
    enqueued(store, noop().limit("slow")).await;
}

/// The documents of `metadata` of which there is only one: each field has another type, while nothing runs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_type_of_a_field_in_metadata_stops_a_duty() {
    let (database, store) = prepared().await;
    set_up(&store).await;
    let (flags, cleaner) = (
        ["--lease", "3s", "--poll", "500ms"],
        ["--dead-after", "3s", "--every", "500ms", "--sweep-every", "1s", "--prune-every", "1s", "--keep-archived", "1d"],
    );
    let start = || System::start(&database, Setup { recruiter: &flags, cleaner: &cleaner, ..Setup::default() });
    store.events([Pattern::new("a").unwrap()], None).await.unwrap().close().await;
    store.put_file(JobId::new(), "x", "content".as_bytes()).await.unwrap();
    let metadata = database.raw("metadata");
    // These recruiters listen nowhere.
    metadata.insert_one(doc! { "_id": "relay", "term": 1_i64, "secret": "x", "address": "127.0.0.1:1" }).await.unwrap();
    let mut system = start();
    all_goes_on(&database, "before").await;
    for other in [Bson::from("x"), vec![Bson::from("x")].into(), 5.5.into(), doc! { "x": [1, 2] }.into(), Bson::Null] {
        system.stop().await;
        let singletons = ["subscribers", "features", "rates", "relay", "cleaners", "channels", "schema", "collections", "recruiter"];
        for id in singletons {
            let damaged = metadata.find_one(doc! { "_id": id }).await.unwrap().unwrap_or_else(|| panic!("there is {id}"));
            // A null says that the feature is not in use.
            let is_damaged = |field: &&String| *field != "_id" && (id, &other) != ("features", &Bson::Null);
            let damaged: Document = damaged.keys().filter(is_damaged).map(|field| (field.clone(), other.clone())).collect();
            if !damaged.is_empty() {
                metadata.update_one(doc! { "_id": id }, doc! { "$set": damaged }).await.unwrap();
            }
        }
        // Before a start mends the schema.
        noop().enqueue(&Client::from_database(database.database().clone())).await.unwrap();
        let follower = Process::on(&database, "recruiter", &["events", "--follow", "--topic", "job.enqueued.*"]);
        let by_id = doc! { "_id": "subscribers", "by": { "$type": "object", "$nin": [{}, { "x": [1, 2] }] } };
        database.until("metadata", by_id, 1, "it has subscribed").await;
        system = start();
        all_goes_on(&database, &format!("with {other}")).await;
        wait_until(SOON, "an event is shown", async || follower.stdout().contains("job.enqueued.noop")).await;
        let mended = doc! { "_id": "collections", "payloads.files": { "$type": "binData" } };
        assert_eq!(database.count("metadata", mended).await, 1);
        assert_eq!(database.count("metadata", doc! { "_id": "schema", "version": { "$type": "int", "$gt": 1 } }).await, 1);
    }
    system.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_document_of_any_collection_stops_the_others() {
    let (database, store) = prepared().await;
    set_up(&store).await;
    let flags = ["--lease", "3s", "--poll", "500ms"];
    let cleaner = ["--dead-after", "3s", "--every", "500ms", "--sweep-every", "1s", "--prune-every", "1s", "--keep-archived", "1d"];
    let mut system = System::start(&database, Setup { recruiter: &flags, cleaner: &cleaner, ..Setup::default() });
    all_goes_on(&database, "before").await;
    enqueued(&store, noop().unique(Unique::by_key("period").for_period(Duration::from_secs(3600)))).await;
    let with_file = enqueued(&store, noop().in_group("nobody")).await;
    store.put_file(with_file, "x", "content".as_bytes()).await.unwrap();
    let mut collections = database.database().list_collection_names().await.unwrap();
    collections.retain(|name| !name.starts_with("system."));
    assert!(collections.len() >= 15, "{collections:?}");
    for collection in &collections {
        poison(&database, collection).await;
    }
    insert_damaged(&database, "limits", doc! { "_id": "broken*", "capacity": INVALID }).await;
    insert_damaged(&database, "pauses", doc! { "_id": "line:halted", "reason": INVALID }).await;
    let blocked = enqueued(&store, noop().limit("broken-1")).await;
    let halted = enqueued(&store, noop().in_line("halted")).await;
    let (child, expired) = all_goes_on(&database, "poisoned").await;
    commands_go_on(&database, child, expired).await;
    system.recruiter.kill();
    system.recruiter = Process::on(&database, "recruiter", &[&["run"][..], &flags[..]].concat());
    all_goes_on(&database, "with a new leader").await;
    assert_eq!(database.count("scheduled", doc! { "_id": { "$in": [blocked, halted] }, "locked": false }).await, 2);
    let said = recruiter(&database, &["jobs", "why", &blocked.to_string()]);
    assert!(said.out.contains("broken*"), "{}{}", said.out, said.err);
    assert!(recruiter(&database, &["jobs", "why", &halted.to_string()]).out.contains("halted"));
    // The fields of the lease and of a cell of a rate.
    for fields in [doc! { "renewals": "x", "lease_ms": "x" }, doc! { "term": "x" }, doc! { "term": i64::MAX }, doc! { "released": 5 }] {
        let what = format!("a lease with {fields}");
        database.raw("metadata").update_one(doc! { "_id": "recruiter" }, doc! { "$set": fields }).await.unwrap();
        let job = enqueued(&store, noop()).await;
        done(&database, &what, job).await;
        database.until("metadata", doc! { "_id": "recruiter", "renewals": { "$gt": 1 } }, 1, &format!("{what} is renewed")).await;
    }
    let workers = doc! { "$set": { "workers": "x" } };
    database.raw("metadata").update_one(doc! { "_id": "channels" }, workers).await.unwrap();
    system.workers.push(Process::on(&database, "recruiter-worker", &["--builtins"]));
    let damaged_cell = doc! { "$set": { "cell": "x" } };
    database.raw("metadata").update_one(doc! { "_id": "rate:slow" }, damaged_cell).upsert(true).await.unwrap();
    system.recruiter.kill();
    system.recruiter = Process::on(&database, "recruiter", &[&["run"][..], &flags[..]].concat());
    done(&database, "with a damaged cell", enqueued(&store, noop()).await).await;
    let named = |text: &str| system.recruiter.stderr().lines().filter(|line| line.contains("no UTF-8") && line.contains(text)).count();
    assert_eq!(named("class:nothing-0"), 1, "named once:\n{}", system.recruiter.stderr());
    system.stop().await;
}

/// A listener begins behind the newest hint.
#[tokio::test]
async fn a_newest_hint_that_cannot_be_decoded_keeps_no_listener_from_its_hints() {
    let (database, store) = prepared().await;
    insert_damaged(&database, "signals", doc! { "_id": ObjectId::new(), "kind": INVALID, "at": bson::Timestamp { time: 0, increment: 0 } })
        .await;
    let hints = store.hints(Listener::Recruiter);
    wait_until(SOON, "it listens", async || hints.is_listening()).await;
}

/// The lease is lost while no worker is there that knows the term; and a term is written by hand while a recruiter leads.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_later_term_in_a_cell_stops_nothing() {
    let (database, store) = prepared().await;
    let slow = Rate::new(6, Duration::from_secs(60), 6).unwrap();
    store.limits().set("slow", Limit::rate(slow)).await.unwrap();
    let both = async |when: &str| {
        // The other way round the first one would be assigned alone.
        let jobs = [enqueued(&store, noop().limit("slow")).await, enqueued(&store, noop()).await];
        for job in jobs {
            done(&database, when, job).await;
        }
    };
    let later = async |term: i64| {
        let later = doc! { "$set": { "term": term } };
        database.raw("metadata").update_one(doc! { "_id": "rate:slow" }, later).await.unwrap();
    };
    let system = System::start(&database, Setup::default());
    both("before").await;
    system.stop().await;
    database.raw("metadata").delete_one(doc! { "_id": "recruiter" }).await.unwrap();
    later(99).await;
    let system = System::start(&database, Setup::default());
    both("after a lost lease").await;
    later(1_000).await;
    both("with a later term than the leader's").await;
    assert_eq!(database.count("metadata", doc! { "_id": "recruiter", "term": { "$gt": 1_000 } }).await, 1);
    system.stop().await;
}

/// A line whose key has a line feed, which `.` of a regular expression does not match.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_line_with_a_control_character_halts_and_a_refused_pause_locks_no_job() {
    let (database, store) = prepared().await;
    let system = System::start(&database, Setup::default());
    // Inserted by another language. Each fails for the last time, because it expires.
    let failed = async |line: &str| {
        let (mut job, now) = (minimal_job("noop"), bson::DateTime::now());
        job.extend(doc! { "gate": format!(">{line}"), "created_at": now, "expires_at": now, "halt_on_failure": true });
        database.raw("scheduled").insert_one(&job).await.unwrap();
        database.until("archived", doc! { "_id": job.get_object_id("_id").unwrap() }, 1, &format!("{line:?} is archived")).await;
    };
    // Makes the indexes of lines and of expiry.
    enqueued(&store, noop().in_line("first").expires_after(Duration::from_millis(1))).await;
    for line in ["a\nb", "\u{2028}", "tab\t"] {
        failed(line).await;
        assert_eq!(database.count("pauses", doc! { "_id": format!("line:{line}") }).await, 1, "{line:?}");
    }
    // An older validator, which no process may change.
    let refusing = doc! { "collMod": "pauses", "validator": { "_id": { "$not": { "$regex": "^line:" } } } };
    database.database().run_command(refusing).await.unwrap();
    failed("other").await;
    system.stop().await;
}

/// A validator that is not Recruiter's refuses the release of one successor. One whose date is beyond the latest is due at the latest.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_successor_that_cannot_be_released_stops_no_other() {
    let (database, store) = prepared().await;
    enqueued(&store, noop().unique(Unique::by_key("first"))).await;
    let far = bson::DateTime::parse_rfc3339_str("9999-12-31T23:59:59.999Z").unwrap();
    let successor = |after: &str, due_after: bson::DateTime| {
        let mut job = minimal_job("noop");
        job.extend(doc! { "unique_after": after, "scheduled_at": far, "due_after": due_after });
        job
    };
    let now = bson::DateTime::now();
    database.raw("scheduled").insert_many([successor("a", now), successor("b", now), successor("c", bson::DateTime::MAX)]).await.unwrap();
    let refusing = doc! { "collMod": "scheduled", "validator": { "unique": { "$ne": "a" }, "scheduled_at": { "$lte": far } } };
    database.database().run_command(refusing).await.unwrap();
    assert_eq!(store.release_orphaned_successors().await.unwrap(), 2);
    assert_eq!(database.count("scheduled", doc! { "unique": "b", "scheduled_at": { "$lt": far } }).await, 1);
    assert_eq!(database.count("scheduled", doc! { "unique": "c", "scheduled_at": far }).await, 1);
}
