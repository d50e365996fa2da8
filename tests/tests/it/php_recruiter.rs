//! `recruiter import php-recruiter`, on documents of the PHP library Recruiter: jobs run with their ids, attempts and retry policies, and
//! repeatable jobs are schedules.
//!
//! The library is not on the package registries that these tests may use. The documents have the fields and types that its release 5.0 writes:
//! jobs are of `Job::initialize`, `Job::export`, `WorkableInJob::export`, `RetryPolicyInJob::export` and `JobExecution::export`, locked and
//! unlocked by `Job::lockAll` and `Job::rollbackLockedNotIn`; workers of `Worker::initialize`, `Worker::tryToAssignJobsToWorkers` and
//! `Worker::beforeExecutionOf`; schedulers of `Scheduler::initialize`, `Scheduler::export` and `Scheduler\Repository::create`; locks of
//! `MongoLock::acquire`. PHP stores an empty array as an array, an array with keys as a document, and integers with 32 bits where they fit.

use std::collections::BTreeMap;

use bson::{Bson, DateTime, Document, doc, oid::ObjectId};
use recruiter_common::{JobId, instant::Instant, schedules::Overlap, store::Store};
use recruiter_tests::{
    local::{connect_args, prepared},
    mongo::TestDatabase,
    oracle::number,
    processes::{Setup, System},
};
use serde_json::Value;

use super::{
    bad_input::why,
    cli::{Said, recruiter},
    damaged_documents::insert_damaged,
};

/// A date so many seconds from now.
fn date(seconds: i64) -> DateTime {
    DateTime::from_millis(DateTime::now().timestamp_millis() + seconds * 1_000)
}

fn policy(class: &str, parameters: impl Into<Bson>) -> Document {
    doc! { "class": format!(r"Recruiter\RetryPolicy\{class}"), "parameters": parameters.into() }
}

fn none() -> Bson {
    Bson::Array(vec![])
}

/// A job of the library that was enqueued a minute ago.
fn job(class: &str, parameters: impl Into<Bson>, more: Document) -> Document {
    let mut job = doc! {
        "_id": ObjectId::new(), "done": false, "created_at": date(-60), "locked": false, "attempts": 0, "group": "generic",
        "workable": { "class": class, "parameters": parameters.into(), "method": "execute" }, "scheduled_at": date(-60),
        "retry_policy": policy("DoNotDoItAgain", none()),
    };
    job.extend(more);
    job
}

fn scheduler(urn: &str, class: &str, schedule_policy: Document) -> Document {
    doc! {
        "urn": urn, "created_at": date(-600), "last_scheduling": { "scheduled_at": date(-60), "job_id": ObjectId::new().to_hex() },
        "attempts": 4, "unique": true, "schedule_policy": schedule_policy,
        "job": {
            "workable": { "class": class, "parameters": { "format": "pdf" }, "method": "execute" },
            "retry_policy": policy("RetryForever", doc! { "seconds_to_wait_before_retry": 60 }),
        },
    }
}

fn cron(expression: &str) -> Document {
    doc! { "class": r"Recruiter\SchedulePolicy\Cron", "parameters": { "cron_expression": expression, "now": Bson::Null } }
}

/// A worker of the library that runs this job, and was last seen so many seconds ago.
fn worker(job: &Document, seen: i64) -> Document {
    let (id, job) = (ObjectId::new(), job.get_object_id("_id").unwrap());
    doc! {
        "_id": id, "work_on": "*", "available": false, "available_since": date(-900), "last_seen_at": date(-seen), "created_at": date(-900),
        "working": true, "pid": 4711, "assigned_to": { id.to_hex(): job }, "assigned_since": date(-seen), "working_on": job,
        "working_since": date(-seen),
    }
}

/// The library's database with these jobs.
async fn library(jobs: &[Document]) -> TestDatabase {
    let database = TestDatabase::new().await;
    database.raw("scheduled").insert_many(jobs).await.unwrap();
    let lock = doc! { "_id": ObjectId::new(), "program": "RECRUITER", "acquired_at": date(-30), "expires_at": date(30) };
    database.raw("metadata").insert_one(lock).await.unwrap();
    database
}

/// All documents of the library.
async fn everything(database: &TestDatabase) -> Vec<Document> {
    let mut all = Vec::new();
    for name in ["scheduled", "archived", "roster", "schedulers", "metadata"] {
        all.extend(database.all(name, doc! {}).await);
    }
    all
}

fn import(ours: &TestDatabase, of_php: &TestDatabase, more: &[&str]) -> Said {
    recruiter(ours, &[&["import", "php-recruiter", "--database", of_php.name(), "--zone", "Europe/Rome"], more].concat())
}

/// The lines by the class, or the name of the schedule.
fn lines(said: &Said) -> BTreeMap<String, Value> {
    let lines = said.out.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.map(|line| (line["name"].as_str().unwrap().to_owned(), line)).collect()
}

fn outcomes(said: &Said) -> BTreeMap<String, String> {
    let word = |line: &Value| format!("{} {}", line["outcome"].as_str().unwrap(), line["reason"].as_str().unwrap_or_default());
    lines(said).iter().map(|(name, line)| (name.clone(), word(line).trim().to_owned())).collect()
}

#[tokio::test]
async fn what_the_library_has_left_waiting_is_taken_over_once_and_runs_on() {
    let (ours, store) = prepared().await;
    let began = || doc! { "locked": true, "attempts": 1, "last_execution": { "scheduled_at": date(-60), "started_at": date(-50) } };
    let (hang, lost) = (job("hang", none(), began()), job("lost", none(), began()));
    let slot = "2999-03-04T05:00:00Z".parse::<Instant>().unwrap();
    let of_scheduler = doc! { "by": { "namespace": "scheduler", "urn": "report:daily" }, "executions": 4 };
    let twice = policy("RetryManyTimes", doc! { "retry_how_many_times": 2, "seconds_to_wait_before_retry": 0 });
    let failed = doc! { "scheduled_at": date(-50), "started_at": date(-50), "ended_at": date(-49), "class": "Exception", "message": "m", "trace": "#0" };
    let filter = doc! { "retriable_exceptions": [r"Acme\Busy"], "filtered_retry_policy": twice.clone() };
    let waiting = [
        job("sleep", doc! { "ms": 1 }, doc! {}),
        job("fail", none(), doc! { "attempts": 2, "retry_policy": twice.clone(), "last_execution": failed }),
        job(
            r"Acme\Mail",
            doc! { "to": "ada" },
            doc! { "scheduled_at": date(3_600), "group": "mail", "tags": ["a", "b"], "urn": "order:17" },
        ),
        job(r"Acme\Filter", none(), doc! { "retry_policy": policy("RetriableExceptionFilter", filter) }),
        job(r"Acme\Own", none(), doc! { "retry_policy": { "class": r"Acme\Patience", "parameters": { "days": 3 } } }),
        job(r"Acme\Report", none(), doc! { "scheduled_at": DateTime::from_chrono(slot), "scheduled": of_scheduler }),
        hang.clone(),
        lost,
    ];
    let of_php = library(&waiting).await;
    of_php.raw("roster").insert_one(worker(&hang, 60)).await.unwrap();
    let tides = doc! { "class": r"Acme\Tides", "parameters": none() };
    let schedulers = [scheduler("report:daily", r"Acme\Report", cron("0 6 * * *")), scheduler("tides", r"Acme\Tides", tides)];
    of_php.raw("schedulers").insert_many(schedulers).await.unwrap();
    let before = everything(&of_php).await;

    let planned = import(&ours, &of_php, &["--dry-run", "--json"]);
    let expected = [
        (r"Acme\Filter", "enqueued"),
        (r"Acme\Mail", "enqueued"),
        (r"Acme\Own", "left retry-policy"),
        (r"Acme\Report", "by-schedule"),
        ("fail", "enqueued"),
        ("hang", "left locked"),
        ("lost", "left locked"),
        ("report:daily", "declared"),
        ("sleep", "enqueued"),
        ("tides", "left repetition"),
    ];
    let expected: BTreeMap<_, _> = expected.map(|(name, outcome)| (name.to_owned(), outcome.to_owned())).into();
    assert_eq!((planned.code, outcomes(&planned)), (1, expected.clone()), "{}", planned.err);
    assert!(lines(&planned)[r"Acme\Own"]["why"].as_str().unwrap().contains("--custom-policy"));
    assert!(lines(&planned)[r"Acme\Filter"]["note"].as_str().unwrap().contains(r"exceptions of PHP, Acme\Busy:"));
    assert!(ours.count("scheduled", doc! {}).await == 0 && store.schedules().list().await.unwrap().is_empty(), "a dry run");

    let done = import(&ours, &of_php, &["--json"]);
    assert_eq!((done.code, outcomes(&done)), (1, expected), "{}", done.err);
    assert!(
        done.err.contains("4 jobs of the PHP library were left alone") && done.err.contains("1 workers of the library live"),
        "{}",
        done.err
    );
    let mail = ours.only("scheduled", doc! { "workable.class": r"Acme\Mail" }).await;
    for field in ["_id", "scheduled_at", "created_at", "group", "tags", "urn"] {
        assert_eq!(mail.get(field), waiting[2].get(field), "{field}");
    }
    let (name, daily) = store.schedules().list().await.unwrap().pop().unwrap();
    let daily = daily.unwrap().schedule;
    assert_eq!(
        (name.as_str(), daily.to_string().as_str(), daily.overlap_policy()),
        ("report:daily", "0 6 * * * Europe/Rome", Overlap::Skip)
    );

    let system = System::start(&ours, Setup::default());
    let id = |index: usize| JobId::from(waiting[index].get_object_id("_id").unwrap());
    assert_eq!(why(&ours.archived(id(0)).await), "done");
    let failed = ours.archived(id(1)).await;
    let runs = failed.get_array("executions").unwrap().len();
    assert_eq!((why(&failed), number(&failed, "attempts"), runs), ("tried-too-many-times", 3, 1), "two attempts were made in PHP");

    // By now the worker counts as dead: what it ran is not repeated without a policy for that.
    let again = import(&ours, &of_php, &["--dead-after", "1ms", "--custom-policy", "--json"]);
    let words = outcomes(&again);
    assert_eq!([&words["sleep"], &words["fail"], &words[r"Acme\Mail"], &words["report:daily"]], ["known", "known", "known", "declared"]);
    assert_eq!([&words["hang"], &words["lost"], &words[r"Acme\Own"]], ["left died", "left died", "enqueued"], "{}", again.err);
    assert_eq!(ours.count("archived", doc! { "workable.class": "sleep" }).await, 1, "it ran once");
    assert_eq!(everything(&of_php).await, before, "they are only read");
    system.stop().await;
}

/// The name of the database of both systems is `recruiter`, if nobody gives another one.
#[tokio::test]
async fn a_source_that_is_the_target_is_refused_and_a_prefix_keeps_them_apart() {
    let (ours, _store) = prepared().await;
    let (other, _other_store) = prepared().await;
    let of_php = library(&[job("sleep", doc! { "ms": 1 }, doc! {})]).await;
    let before = everything(&of_php).await;
    let refused = |said: Said, code: i32, words: &str| assert!(said.code == code && said.err.contains(words), "{} {}", said.code, said.err);
    for database in [&ours, &of_php] {
        refused(
            recruiter(database, &["import", "php-recruiter"]),
            2,
            "read from the database of the connection string, and enqueued there",
        );
    }
    refused(import(&ours, &ours, &[]), 2, &format!("read from the database `{}`, and enqueued there", ours.name()));
    refused(import(&ours, &ours, &["--dry-run"]), 2, "and enqueued there");
    refused(import(&of_php, &of_php, &[]), 77, "`scheduled`");
    refused(import(&ours, &other, &[]), 2, &format!("`{}` are those of this job system", other.name()));
    assert_eq!(everything(&of_php).await, before);
    assert_eq!(of_php.database().list_collection_names().await.unwrap().len(), 2, "nothing was made");

    for database in [&of_php, &ours] {
        Store::connect(&connect_args(database).collection_prefix("jobs_"), "test").await.unwrap();
    }
    let said = recruiter(&of_php, &["--collection-prefix", "jobs_", "import", "php-recruiter"]);
    assert_eq!((said.code, said.out.as_str()), (0, "1 enqueued\n"), "{}", said.err);
    assert_eq!(of_php.only("jobs_scheduled", doc! {}).await.get("_id"), before[0].get("_id"));
    assert_eq!(everything(&of_php).await, before, "they are only read");
    // The other way round: Recruiter's own jobs, in the same database as its jobs with a prefix.
    let said = recruiter(&ours, &["--collection-prefix", "jobs_", "import", "php-recruiter"]);
    refused(said, 2, "are those of this job system");
}

#[tokio::test]
async fn a_wrong_place_is_named_and_odd_documents_are_left_alone_one_by_one() {
    let (ours, store) = prepared().await;
    let empty = TestDatabase::new().await;
    let said = import(&ours, &empty, &[]);
    assert!(
        said.code == 1 && said.err.contains(&format!("neither {0}.scheduled nor {0}.schedulers has documents", empty.name())),
        "{}",
        said.err
    );
    let said = recruiter(&ours, &["import", "php-recruiter", "--database", "shop", "--zone", "Europe/Nowhere"]);
    assert!(said.code == 2 && said.err.contains("--zone: ") && said.err.contains("Europe/Nowhere"), "{}", said.err);

    let nested = (0..80).fold(doc! {}, |inner, _| doc! { "a": inner });
    let of_php = library(&[
        job("good", nested, doc! {}),
        job(&"x".repeat(5_000), none(), doc! {}),
        job("large", doc! { "text": "x".repeat(15 << 20) }, doc! {}),
        job("no\u{1b}[2J", none(), doc! { "scheduled_at": "soon" }),
        job("number", none(), doc! { "_id": 7 }),
        job("group", none(), doc! { "group": " a" }),
        job("date", none(), doc! { "scheduled_at": DateTime::MAX }),
        doc! { "workable": { "$where": 1 } },
        doc! { "priority": 5 },
    ])
    .await;
    insert_damaged(&of_php, "scheduled", job("text", doc! { "name": "QQQQ" }, doc! {})).await;
    of_php.raw("roster").insert_one(doc! { "_id": 1, "last_seen_at": date(-7_200), "assigned_to": ["x"] }).await.unwrap();
    let odd =
        [doc! {}, doc! { "urn": "x" }, scheduler(&"u".repeat(5_000), "c", cron("0 6 * * *")), scheduler("gone", "c", cron("0 0 31 2 *"))];
    of_php.raw("schedulers").insert_many(odd).await.unwrap();
    let said = import(&ours, &of_php, &[]);
    assert_eq!((said.code, said.out.as_str()), (1, "1 enqueued, 13 left (7 malformed, 5 refused, 1 repetition)\n"), "{}", said.err);
    assert_eq!(said.err.lines().filter(|line| line.contains(") is left alone: ")).count(), 13, "{}", said.err);
    assert!(said.err.contains("no\\u{1b}[2J") && !said.err.contains('\u{1b}') && said.err.contains("it cannot be read"), "{}", said.err);
    assert_eq!(ours.only("scheduled", doc! {}).await.get_document("workable").unwrap().get_str("class").unwrap(), "good");
    assert!(store.schedules().list().await.unwrap().is_empty());
}
