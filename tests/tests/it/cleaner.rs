//! The cleaner among documents of foreign programs: each invalid document is skipped alone, and all documents behind it are handled.

use std::time::Duration;

use bson::{Bson, Document, RawDocumentBuf, doc, oid::ObjectId};
use recruiter_common::{
    NewJob, RetryForever, WorkerId,
    ids::StartId,
    store::{ProcessIdentity, Registration},
};
use recruiter_tests::{
    factory::{announcement, insert_unvalidated, minimal_job, started},
    fail_points::FailPoint,
    local::{ids, prepared, store},
    mongo::{PASSWORD, TestDatabase, USER},
    processes::{Process, Setup, System},
    wait::{SOON, wait_until},
};

/// A job that a worker has locked which is not in the roster; due again after so many milliseconds.
fn orphan(retry_after_ms: i64) -> Document {
    let mut document = minimal_job("x");
    let execution = doc! { "worker": WorkerId::new(), "start": StartId::new(), "if_worker_dies": { "retry_after_ms": retry_after_ms } };
    document.extend(doc! { "locked": true, "attempts": 1, "last_execution": execution });
    document
}

fn id_of(document: &Document) -> ObjectId {
    document.get_object_id("_id").unwrap()
}

/// I9: a document that cannot be unlocked does not stop later ones, and causes one warning.
#[tokio::test]
async fn a_document_that_cannot_be_unlocked_does_not_end_the_sweep() {
    let (database, _) = prepared().await;
    let strange = |more: Document| {
        let mut document = minimal_job("x");
        document.extend(doc! { "locked": true });
        document.extend(more);
        document
    };
    // A foreign validator setting. With ours the first document is unlocked, and archived by the next process that reads it.
    database.database().run_command(doc! { "collMod": "scheduled", "validationLevel": "strict" }).await.unwrap();
    // The sweep goes by the ids: these come first.
    let refused = strange(doc! { "_id": ObjectId::from_bytes([0; 12]), "group": 5, "last_execution": { "start": StartId::new() } });
    let no_job = strange(doc! { "_id": "a text" });
    let behind = orphan(60_000);
    insert_unvalidated(&database, vec![refused, no_job, behind.clone()]).await;
    let cleaner = Process::on(&database, "recruiter-cleaner", &["--sweep-every", "100ms"]);
    let rescued = doc! { "_id": id_of(&behind), "locked": false, "deaths": 1 };
    database.until("scheduled", rescued.clone(), 1, "the orphan behind them is rescued").await;
    // A later sweep has met them again.
    let later = orphan(60_000);
    insert_unvalidated(&database, vec![later.clone()]).await;
    let rescued = doc! { "_id": id_of(&later), "locked": false };
    database.until("scheduled", rescued.clone(), 1, "another one is rescued").await;
    assert_eq!(cleaner.stderr().matches("skipping it").count(), 2, "{}", cleaner.stderr());
    assert_eq!(database.count("scheduled", doc! { "locked": true }).await, 2);
}

/// I9: a delay that no policy asks for is no reason to end.
#[tokio::test]
async fn a_verdict_with_an_impossible_delay_is_carried_out() {
    let (database, _) = prepared().await;
    let orphans = [i64::MIN, -1, i64::MAX, 0].map(orphan);
    insert_unvalidated(&database, orphans.to_vec()).await;
    let now = bson::DateTime::now().timestamp_millis();
    let mut cleaner = Process::on(&database, "recruiter-cleaner", &["--sweep-every", "100ms"]);
    let rescued = doc! { "locked": false, "deaths": 1, "scheduled_at": { "$gte": bson::DateTime::from_millis(now - 30_000) } };
    database.until("scheduled", rescued, 4, "all are rescued").await;
    assert!(cleaner.try_exit().is_none(), "{}", cleaner.stderr());
}

/// I9: archived documents of any origin are deleted in time.
#[tokio::test]
async fn retention_deletes_documents_whatever_their_ids_are() {
    let (database, _) = prepared().await;
    let ended = |id: Bson, day: i64| doc! { "_id": id, "last_execution": { "ended_at": bson::DateTime::from_millis(day * 86_400_000) } };
    let numbers = (0..1_000).map(|number| ended(number.into(), 1));
    let others = [Bson::from("a text"), doc! { "a": 1 }.into(), Bson::Null, 0.5.into(), bson::Uuid::new().into()];
    let ours = (0..50).map(|_| ended(ObjectId::new().into(), 2));
    let all = numbers.chain(others.map(|id| ended(id, 1))).chain(ours);
    database.raw("archived").insert_many(all).await.unwrap();
    let _cleaner = Process::on(&database, "recruiter-cleaner", &["--prune-every", "100ms"]);
    database.until("archived", doc! {}, 0, "jobs older than five days are deleted").await;
}

/// Failures stay longer than successes, and classes have periods of their own.
#[tokio::test]
async fn retention_has_periods_for_failures_reasons_and_classes() {
    let (database, _) = prepared().await;
    let ended = |id: &str, class: &str, why: &str, days_ago: i64| {
        let ended = bson::DateTime::from_millis(bson::DateTime::now().timestamp_millis() - days_ago * 86_400_000);
        doc! { "_id": id, "workable": { "class": class }, "why": why, "last_execution": { "ended_at": ended } }
    };
    let documents = [
        ended("done, old", "import", "done", 6),
        ended("done, new", "import", "done", 4),
        ended("failed, older than all periods", "import", "gave-up", 31),
        ended("failed, old", "import", "gave-up", 29),
        ended("expired, old", "import", "expired", 3),
        ended("expired, new", "import", "expired", 1),
        ended("mail, old", "mail", "gave-up", 2),
        ended("mail, new", "mail", "done", 0),
        ended("audit, old", "audit", "done", 91),
        ended("audit, new", "audit", "done", 89),
    ];
    // More than one step of the walk, of which nothing is deleted.
    let many = (0..2_500).map(|number| ended(&format!("failed {number}"), "import", "gave-up", 7));
    database.raw("archived").insert_many(documents.into_iter().chain(many)).await.unwrap();
    let flags = ["--prune-every", "100ms", "--keep-failures", "30d", "--keep-reason", "expired=2d", "--keep", "mail=1d,audit=90d"];
    let cleaner = Process::on(&database, "recruiter-cleaner", &flags);
    let kept = ["audit, new", "done, new", "expired, new", "failed, old", "mail, new"];
    let others =
        || doc! { "_id": { "$not": bson::Regex { pattern: "^failed [0-9]".try_into().unwrap(), options: "".try_into().unwrap() } } };
    wait_until(SOON, "what is kept no longer is deleted", async || {
        database.raw("archived").distinct("_id", others()).await.unwrap() == kept.map(Bson::from)
    })
    .await;
    // A job that ends later is met by a walk that goes on.
    database.raw("archived").insert_one(ended("mail, later", "mail", "done", 1)).await.unwrap();
    database.until("archived", doc! { "_id": "mail, later" }, 0, "it is deleted as well").await;
    assert_eq!(database.count("archived", doc! {}).await, 2_505, "{}", cleaner.stderr());
}

#[tokio::test]
async fn a_class_has_one_period() {
    let database = TestDatabase::new().await;
    let mut cleaner = Process::on(&database, "recruiter-cleaner", &["--keep", "mail=1d", "--keep", "mail=2d"]);
    cleaner.wait_exit(SOON).await;
    assert!(cleaner.stderr().contains("--keep is given twice for `mail`"), "{}", cleaner.stderr());
}

/// I9: a worker's document is damaged; the worker runs, dies and is rescued like the others.
#[tokio::test]
async fn a_dead_worker_with_a_damaged_document_is_retired_and_its_jobs_are_rescued() {
    let (database, store) = prepared().await;
    let worker = ["--builtins", "--heartbeat", "200ms", "--lease", "600ms"];
    let mut system = System::start(&database, Setup { worker: &worker, ..Setup::default() });
    let again = RetryForever::new(Duration::from_secs(3_600)).unwrap();
    let jobs = ids(store.enqueue_many((0..3).map(|_| NewJob::of_class("sleep", doc! { "ms": 600_000 }).retry(&again))).await.unwrap());
    database.until("scheduled", doc! { "locked": true }, 3, "they are running").await;
    // Frozen: only its silence shows that it is dead, and no process writes to its document any more.
    let frozen = system.workers.pop().unwrap();
    frozen.pause();
    damage(&database).await;
    // Not before: on a busy machine it might take a worker that runs for dead.
    let impatient = ["--dead-after", "1500ms", "--every", "100ms", "--sweep-every", "200ms"];
    system.cleaner = Process::on(&database, "recruiter-cleaner", &impatient);
    database.until("scheduled", doc! { "_id": { "$in": &jobs }, "locked": false, "deaths": 1 }, 3, "its jobs are rescued").await;
    database.until("roster", doc! {}, 0, "it is retired").await;
    assert_eq!(system.cleaner.stderr().matches("fields of a roster document cannot be decoded").count(), 1, "{}", system.cleaner.stderr());
    drop(frozen);
    system.stop().await;
}

/// Each attempt hangs in its transaction until the call is given up. Meanwhile others die, one after the other: each is found by a later poll.
#[tokio::test]
async fn a_rescue_that_hangs_holds_up_no_other() {
    let database = TestDatabase::of_its_own().await;
    let store = store(&database).await;
    let gone = ProcessIdentity { pid: i32::MAX, ..ProcessIdentity::of_this_process().unwrap() };
    let dead = || Registration { process: gone.clone(), ..announcement(1) };
    let first = dead();
    store.register(&first).await.unwrap();
    let job = NewJob::of_class("x", doc! {}).enqueue(&store).await.unwrap().id;
    assert_eq!(started(&store, first.id, &[job]).await.len(), 1);
    store.heartbeat(first.id, &[job], 0).await.unwrap();
    let fault = FailPoint::new("recruiter-cleaner", &["insert"]).namespace(database.name(), "archived").block(SOON);
    let armed = fault.arm(database.uri()).await;
    let cleaner = Process::on(&database, "recruiter-cleaner", &["--dead-after", "10m", "--every", "100ms", "--log", "debug"]);
    wait_until(SOON, "the first attempt hangs", async || armed.struck().await == 1).await;
    for _ in 0..5 {
        store.register(&dead()).await.unwrap();
        database.until("roster", doc! {}, 1, "another one is rescued").await;
    }
    let attempts = cleaner.stderr().matches("be rescued").count();
    assert!(attempts < 5, "{attempts} have ended: the polls wait for them\n{}", cleaner.stderr());
    wait_until(SOON, "it is tried again", async || armed.struck().await >= 2).await;
    let sessions = database.raw("roster").find_one(doc! { "_id": first.id }).await.unwrap().unwrap().get_array("sessions").unwrap().len();
    assert_eq!(sessions, 1, "the one that was given up may be used for something else");
    drop(armed);
    database.until("roster", doc! {}, 0, "it is rescued as well").await;
    assert_eq!(database.count("archived", doc! { "_id": job }).await, 1);
}

/// Jobs of 18 MB.
#[tokio::test]
async fn a_rescue_reads_large_jobs_in_portions() {
    let (database, _) = prepared().await;
    let worker = WorkerId::new();
    let large = (0..6).map(|_| {
        let mut document = orphan(60_000);
        document.get_document_mut("last_execution").unwrap().insert("worker", worker);
        document.insert("note", "x".repeat(3 * 1024 * 1024));
        document
    });
    insert_unvalidated(&database, large.collect()).await;
    database.database().run_command(doc! { "profile": 2 }).await.unwrap();
    let _cleaner = Process::on(&database, "recruiter-cleaner", &["--sweep-every", "100ms"]);
    database.until("scheduled", doc! { "locked": false, "deaths": 1 }, 6, "all are rescued").await;
    let replies = async |bytes: i32| {
        database.count("system.profile", doc! { "appName": "recruiter-cleaner", "responseLength": { "$gt": bytes << 20 } }).await
    };
    assert!(replies(5).await >= 3, "two in each");
    assert_eq!(replies(9).await, 0);
}

/// MongoDB lets a user end its own transactions only.
#[tokio::test]
async fn a_cleaner_says_once_that_workers_have_another_mongodb_user() {
    let database = TestDatabase::with_access_control().await;
    let store = store(&database).await;
    let admin = database.database().client().database("admin");
    database.limit_transactions(600).await;
    let as_user = |name: &str| database.uri().replace(&format!("{USER}:{PASSWORD}@"), &format!("{name}:pw@"));
    for user in ["one", "two"] {
        let roles = vec![doc! { "role": "readWrite", "db": database.name() }];
        admin.run_command(doc! { "createUser": user, "pwd": "pw", "roles": roles }).await.unwrap();
    }
    let start = |name: &str, args: &[&str], user: &str| Process::start(name, args, &[("MONGODB_URI", &as_user(user))]);
    let _recruiter = start("recruiter", &["run"], "one");
    let mut same = start("recruiter-cleaner", &["--every", "100ms", "--dead-after", "10m"], "one");
    let worker = start("recruiter-worker", &["--builtins"], "one");
    database.until("roster", doc! { "available": true, "term": { "$gt": 0 } }, 1, "it is there").await;
    let transaction = FailPoint::new("recruiter-worker", &["insert"]).namespace(database.name(), "archived").block(SOON);
    let armed = transaction.arm(database.uri()).await;
    let job = NewJob::of_class("noop", doc! {}).enqueue(&store).await.unwrap().id;
    wait_until(SOON, "the transaction is open", async || armed.struck().await == 1).await;
    // Only the other one sees the death.
    same.terminate();
    same.wait_exit(SOON).await;
    let other = start("recruiter-cleaner", &["--every", "100ms", "--dead-after", "10m", "--log", "debug"], "two");
    let warned =
        |process: &Process, what: &str| process.stderr().lines().filter(|line| line.contains("WARN") && line.contains(what)).count();
    wait_until(SOON, "it has seen whose the worker is", async || warned(&other, "another MongoDB user") == 1).await;
    drop(worker);
    wait_until(SOON, "it has tried again", async || other.stderr().contains("still cannot be rescued")).await;
    // As MongoDB does by itself at the time limit of a transaction.
    admin.run_command(doc! { "killAllSessions": [{ "user": "one", "db": "admin" }] }).await.unwrap();
    database.until("archived", doc! { "_id": job }, 1, "the job is ended").await;
    let said = other.stderr();
    assert_eq!((warned(&other, "another MongoDB user"), warned(&other, "could not be rescued yet, probably")), (1, 1), "{said}");
    assert_eq!(warned(&same, "MongoDB user"), 0, "{}", same.stderr());
    drop((armed, database));
}

/// Makes nonsense of the only document in the roster, as its bytes even.
async fn damage(database: &TestDatabase) {
    let roster = database.raw("roster");
    let mut document = roster.find_one_and_delete(doc! {}).await.unwrap().unwrap();
    document.extend(doc! {
        "last_seen_at": "now", "sessions": 5, "assigned_to": "them", "working_on": "them too", "classes": 5, "work_on": 5,
        "retired": "no", "hostname": "h\u{7f}st", "place": {},
    });
    for field in ["pid", "boot_id"] {
        document.remove(field);
    }
    let mut bytes = RawDocumentBuf::try_from(&document).unwrap().into_bytes();
    // Only there: an id or a length may have the same byte.
    let name = bytes.windows(4).position(|bytes| bytes == b"h\x7fst").unwrap();
    bytes[name + 1] = 0xff;
    roster.clone_with_type::<RawDocumentBuf>().insert_one(RawDocumentBuf::from_bytes(bytes).unwrap()).await.unwrap();
}

/// A document is read again with every round and every look; that something is wrong with it is said once by each process.
#[tokio::test]
async fn strange_roster_documents_are_warned_of_once_and_hide_no_worker() {
    let (database, store) = prepared().await;
    let base = doc! { "available": true, "free": 3, "work_on": "*", "working_on": [], "classes": ["noop"], "channel": 0 };
    let strange = |more: Document| {
        let mut document = base.clone();
        document.insert("_id", WorkerId::new());
        document.extend(more);
        document
    };
    let all = [doc! { "_id": "by hand" }, doc! { "free": -3 }, doc! { "work_on": 5 }, doc! { "classes": 5 }, doc! { "lease_ms": "long" }];
    database.raw("roster").insert_many(all.map(strange)).await.unwrap();
    let system = System::start(&database, Setup { cleaner: &["--dead-after", "10m"], ..Setup::default() });
    let warned = |process: &Process| process.stderr().lines().filter(|line| line.contains("roster document")).count();
    wait_until(SOON, "the cleaner has read them", async || warned(&system.cleaner) >= 5).await;
    for round in 0..6 {
        let jobs = ids(store.enqueue_many((0..20).map(|_| NewJob::of_class("noop", doc! {}))).await.unwrap());
        database.until("archived", doc! { "_id": { "$in": &jobs } }, 20, &format!("round {round} is done")).await;
    }
    assert_eq!(warned(&system.cleaner), 5, "{}", system.cleaner.stderr());
    assert!((1..=5).contains(&warned(&system.recruiter)), "{}", system.recruiter.stderr());
    system.stop().await;
}
