//! `recruiter doctor`: each fault of an installation is found, named and has a remedy, and a healthy one has none.

use bson::{Document, doc, oid::ObjectId};
use recruiter_common::{
    WorkerId,
    store::{Check, CleanerNote, ConnectArgs, Finding, ProcessIdentity, State, Store},
};
use recruiter_tests::{
    factory::{announcement, insert_unvalidated, minimal_job},
    local::{connect_args, prepared},
    mongo::{PASSWORD, TestDatabase, USER},
    processes::{Setup, System},
    wait::{SOON, wait_until},
};
use serde_json::Value;

use super::cli::recruiter;

/// What depends on the machine of the test, and on its MongoDB with one member.
const OF_THE_MACHINE: [&str; 4] = ["replica-set", "version", "disk", "clocks"];

/// The exit code, and all findings.
fn json(database: &TestDatabase) -> (i32, Vec<Value>) {
    let said = recruiter(database, &["doctor", "--json"]);
    (said.code, said.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect())
}

/// The findings that are not good, without those of the machine.
fn bad(findings: &[Value]) -> Vec<&Value> {
    let is_of_the_machine = |found: &&Value| OF_THE_MACHINE.contains(&found["check"].as_str().unwrap());
    findings.iter().filter(|found| found["state"] != "ok" && !is_of_the_machine(found)).collect()
}

/// How many errors there are, for example because the disk of the machine is full.
fn errors(findings: &[Value]) -> usize {
    findings.iter().filter(|found| found["state"] == "error").count()
}

#[tokio::test]
async fn a_healthy_installation_has_no_fault_and_each_check_is_made() {
    let database = TestDatabase::new().await;
    let system = System::start(&database, Setup::default());
    wait_until(SOON, "all processes are there", async || {
        let (code, found) = json(&database);
        bad(&found).is_empty() && (code == 0) == (errors(&found) == 0)
    })
    .await;
    let found = json(&database).1;
    let mut names: Vec<&str> = found.iter().map(|found| found["check"].as_str().unwrap()).collect();
    names.dedup();
    let all: Vec<&str> = Check::ALL.iter().map(|check| check.name()).collect();
    assert_eq!((names.len(), names.iter().all(|name| all.contains(name))), (all.len(), true), "{names:?}");
    let strict = recruiter(&database, &["doctor", "--strict"]);
    assert!(
        strict.code == 1
            && strict.out.contains("warning  replica-set ")
            && strict.err.contains(&format!("errors: {}, warnings: ", errors(&found))),
        "{} {}",
        strict.out,
        strict.err
    );
    system.stop().await;
    // A cleaner that has stopped leaves no note.
    assert_eq!(database.count("metadata", doc! { "_id": { "$regex": "^cleaner:" } }).await, 0);
    let stopped = recruiter(&database, &["doctor"]);
    let lines: Vec<&str> = stopped.out.lines().filter(|line| line.starts_with("error ") && !line.starts_with("error    disk ")).collect();
    let counted = stopped.err.contains(&format!("errors: {}, warnings: ", errors(&found) + 3));
    assert!(stopped.code == 1 && counted && lines.len() == 3, "{} {}", stopped.out, stopped.err);
    for (line, part) in lines.iter().zip(["start `recruiter run`", "start recruiter-cleaner", "start `recruiter-worker`"]) {
        assert!(line.contains(part), "{line}");
    }
}

/// A database in which all is well, and no process runs.
async fn stage() -> (TestDatabase, Store) {
    let (database, store) = prepared().await;
    let worker = announcement(10);
    store.register(&worker).await.unwrap();
    let offer = doc! { "available": true, "free": 10, "lease_ms": 3_600_000_i64, "last_seen_at": bson::DateTime::now() };
    database.raw("roster").update_one(doc! { "_id": worker.id }, doc! { "$set": offer }).await.unwrap();
    let lease = doc! {
        "_id": "recruiter", "term": 1_i64, "renewals": 1_i64, "released": false, "lease_ms": 3_600_000_i64, "holder_at": "h:1",
        "renewed_at": bson::DateTime::now(),
    };
    database.raw("metadata").insert_one(lease).await.unwrap();
    store.note_cleaner(&cleaner("5days")).await.unwrap();
    (database, store)
}

fn cleaner(keeps: &str) -> CleanerNote {
    CleanerNote { id: ObjectId::new(), process: ProcessIdentity::of_this_process().unwrap(), keeps: keeps.into() }
}

fn past(seconds: i64) -> bson::DateTime {
    bson::DateTime::from_millis(bson::DateTime::now().timestamp_millis() - seconds * 1_000)
}

/// The one finding that is not good, without those of the machine.
async fn only_fault(store: &Store) -> Finding {
    let findings = store.findings().await;
    let is_bad = |found: &&Finding| found.state != State::Good && !OF_THE_MACHINE.contains(&found.check.name());
    let bad: Vec<&Finding> = findings.iter().filter(is_bad).collect();
    assert_eq!(bad.len(), 1, "{bad:#?}");
    bad[0].clone()
}

/// As a command that is started now finds it.
async fn check(database: &TestDatabase, expected: (Check, State), parts: &[&str]) {
    let store = Store::connect_to_ask(&connect_args(database), "test").await.unwrap();
    let found = only_fault(&store).await;
    assert_eq!((found.check, found.state), expected, "{found:?}");
    assert!(parts.iter().all(|part| found.text.contains(part)), "{parts:?}: {found:?}");
}

#[tokio::test]
async fn each_fault_of_the_schema_is_found() {
    let (database, store) = stage().await;
    let run = |command: Document| {
        let database = database.database().clone();
        async move { database.run_command(command).await.unwrap() }
    };
    let hidden = |hidden: bool| doc! { "collMod": "scheduled", "index": { "name": "due_jobs", "hidden": hidden } };
    run(hidden(true)).await;
    check(&database, (Check::Indexes, State::Warning), &["is hidden", "db.getCollection('scheduled').unhideIndex('due_jobs')"]).await;
    run(hidden(false)).await;
    let other = |name: &str| doc! { "createIndexes": "archived", "indexes": [{ "key": { "urn": 1 }, "name": name }] };
    run(other("urn_1")).await;
    check(&database, (Check::Indexes, State::Warning), &["`urn_1` of `archived` is not Recruiter's", "dropIndex('urn_1')"]).await;
    run(doc! { "dropIndexes": "archived", "index": "urn_1" }).await;
    run(other("archived_by_end_7")).await;
    check(&database, (Check::Indexes, State::Warning), &["of an earlier release"]).await;
    run(doc! { "dropIndexes": "archived", "index": ["archived_by_end", "archived_by_end_7"] }).await;
    check(&database, (Check::Indexes, State::Error), &["`archived_by_end` of `archived` is missing", "start any process"]).await;
    run(other("archived_by_end")).await;
    check(&database, (Check::Indexes, State::Error), &["`archived_by_end` of `archived` has other keys"]).await;
    run(doc! { "dropIndexes": "archived", "index": "archived_by_end" }).await;
    store.ensure_schema().await.unwrap();
    run(doc! { "collMod": "scheduled", "validator": {} }).await;
    check(&database, (Check::Validators, State::Warning), &["`scheduled` has another validator"]).await;
    store.ensure_schema().await.unwrap();
    run(doc! { "drop": "signals_0" }).await;
    run(doc! { "create": "signals_0" }).await;
    check(&database, (Check::Rings, State::Error), &["`signals_0` is not capped"]).await;
    store.ensure_schema().await.unwrap();
    let version = async |version: i32| {
        database.raw("metadata").update_one(doc! { "_id": "schema" }, doc! { "$set": { "version": version, "oldest": 17 } }).await.unwrap();
    };
    version(1).await;
    check(&database, (Check::Schema, State::Warning), &["start a recruiter of this release"]).await;
    version(1_000).await;
    check(&database, (Check::Schema, State::Warning), &["a newer release"]).await;
}

#[tokio::test]
async fn each_fault_of_the_processes_is_found() {
    let (database, store) = stage().await;
    let roster = database.raw("roster");
    let set = async |fields: Document| {
        roster.update_many(doc! {}, doc! { "$set": fields }).await.unwrap();
    };
    let other = cleaner("1day");
    store.note_cleaner(&other).await.unwrap();
    check(&database, (Check::Retention, State::Warning), &["keeps 5days", "keeps 1day", "give all the same flags"]).await;
    store.forget_cleaner(other.id).await.unwrap();
    let notes = async |fields: Document| {
        database.raw("metadata").update_many(doc! { "_id": { "$regex": "^cleaner:" } }, doc! { "$set": fields }).await.unwrap();
    };
    notes(doc! { "seen_at": past(125) }).await;
    check(&database, (Check::Cleaners, State::Error), &["no cleaner runs (the last one, ", "was seen 2m", "start recruiter-cleaner"]).await;
    notes(doc! { "seen_at": past(30) }).await;
    notes(doc! { "version": "9.9.9" }).await;
    check(&database, (Check::Releases, State::Warning), &["9.9.9", "end the upgrade"]).await;
    notes(doc! { "version": env!("CARGO_PKG_VERSION") }).await;
    set(doc! { "last_seen_at": past(3_000) }).await;
    check(&database, (Check::Workers, State::Warning), &["without a heartbeat for too long", "50m"]).await;
    let second = announcement(1);
    store.register(&second).await.unwrap();
    let silent = doc! { "last_seen_at": past(3_600 * 9), "lease_ms": 3_600_000_i64 };
    set(doc! { "last_seen_at": bson::DateTime::now() }).await;
    roster.update_one(doc! { "_id": second.id }, doc! { "$set": silent }).await.unwrap();
    check(&database, (Check::Workers, State::Error), &["dead, and no cleaner has ended their jobs", "start recruiter-cleaner"]).await;
    roster.delete_one(doc! { "_id": second.id }).await.unwrap();
    database.raw("metadata").update_one(doc! { "_id": "recruiter" }, doc! { "$set": { "released": true } }).await.unwrap();
    check(&database, (Check::Leader, State::Error), &["no recruiter leads", "start `recruiter run`"]).await;
}

#[tokio::test]
async fn each_reason_why_jobs_do_not_run_is_found() {
    let (database, store) = stage().await;
    let scheduled = database.raw("scheduled");
    let waits = async |more: Document| {
        let mut job = minimal_job("x");
        job.insert("scheduled_at", past(120));
        job.extend(more);
        insert_unvalidated(&database, vec![job]).await;
    };
    waits(doc! { "workable": { "class": "nobody's" } }).await;
    check(&database, (Check::Waiting, State::Error), &["generic", "no running worker has the class `nobody's`"]).await;
    // It is looked at only after a minute.
    scheduled.update_many(doc! {}, doc! { "$set": { "scheduled_at": past(10) } }).await.unwrap();
    assert_eq!(bad_of(&store).await, 0);
    scheduled.delete_many(doc! {}).await.unwrap();
    waits(doc! { "gate": "printer", "limits": ["printer"] }).await;
    check(&database, (Check::Waiting, State::Error), &["`printer`, which has no limit yet", "recruiter limits set"]).await;
    scheduled.delete_many(doc! {}).await.unwrap();
    store.pauses().pause(&"group:generic".parse().unwrap(), "ada", Some("inventory")).await.unwrap();
    waits(doc! {}).await;
    check(&database, (Check::Waiting, State::Warning), &["paused by ada", "inventory", "recruiter resume group:generic"]).await;
    database.raw("pauses").delete_many(doc! {}).await.unwrap();
    scheduled.delete_many(doc! {}).await.unwrap();
    let invalid = doc! { "_id": "printer", "capacity": "many" };
    database.raw("limits").insert_one(invalid).bypass_document_validation(true).await.unwrap();
    check(&database, (Check::Settings, State::Warning), &["the limit `printer` in `limits` is not valid"]).await;
    database.raw("limits").delete_many(doc! {}).await.unwrap();
    let gone = doc! { "worker": WorkerId::new(), "start": ObjectId::new(), "started_at": past(60) };
    waits(doc! { "locked": true, "scheduled_at": bson::Bson::Null, "last_execution": gone }).await;
    check(&database, (Check::Stuck, State::Warning), &["1 job", "a cleaner ends"]).await;
}

async fn bad_of(store: &Store) -> usize {
    let findings = store.findings().await;
    findings.iter().filter(|found| found.state != State::Good && !OF_THE_MACHINE.contains(&found.check.name())).count()
}

/// What a user may not read is unknown, and no error. One with too many rights is told so.
#[tokio::test]
async fn what_the_user_may_not_read_is_unknown_and_wide_roles_are_named() {
    let database = TestDatabase::with_access_control().await;
    let system = System::start(&database, Setup::default());
    // The user of the tests is root.
    wait_until(SOON, "all processes are there", async || bad(&json(&database).1).len() == 1).await;
    let found = json(&database).1;
    assert!(bad(&found)[0]["text"].as_str().unwrap().contains("has root on admin"), "{found:?}");
    let reader = doc! { "createUser": "reader", "pwd": "pw", "roles": [{ "role": "read", "db": database.name() }] };
    database.database().client().database("admin").run_command(reader).await.unwrap();
    let uri = database.uri().replace(&format!("{USER}:{PASSWORD}@"), "reader:pw@");
    let store = Store::connect_to_ask(&ConnectArgs { uri, ..connect_args(&database) }, "test").await.unwrap();
    let oplog = only_fault(&store).await;
    assert_eq!((oplog.check, oplog.state), (Check::Oplog, State::Unknown), "{oplog:?}");
    assert!(
        oplog.text.contains("this MongoDB user may not read it") && oplog.text.contains("recruiterServerReader on `admin`"),
        "{oplog:?}"
    );
    let findings = store.findings().await;
    let of_set = findings.iter().filter(|found| found.check == Check::ReplicaSet && found.state == State::Unknown);
    assert!(
        of_set
            .map(|found| found.text.as_str())
            .eq(["this MongoDB user may not read it: give it the role recruiterServerReader on `admin`, which the script roles.js makes \
                  (docs/operating.md), to have it examined"])
    );
    system.stop().await;
}
