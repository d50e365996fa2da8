//! What an operator does on a bad day: searches a large archive, retries, cancels and deletes very many jobs at once, and meets
//! documents that cannot be read.

use std::{
    fs::File,
    io::{Read as _, Write as _},
    process::Command,
    time::Duration,
};

use bson::{Bson, Document, RawDocumentBuf, doc, oid::ObjectId};
use nix::{
    pty::openpty,
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use recruiter_common::{JobId, Priority};
use recruiter_tests::{
    factory::{announcement, insert_unvalidated, minimal_job, started},
    fail_points::FailPoint,
    local::{prepared, store},
    mongo::TestDatabase,
    processes::{Setup, System, binary},
    wait::{SOON, wait_until},
};
use serde_json::{Value, json};

use super::cli::{Said, recruiter, spawn};

/// A finished job that ended so many seconds ago.
fn archived(class: &str, why: &str, seconds_ago: i64) -> Document {
    let mut job = minimal_job(class);
    job.remove("scheduled_at");
    let ended = bson::DateTime::from_millis(bson::DateTime::now().timestamp_millis() - seconds_ago * 1_000);
    job.extend(doc! { "why": why, "done": why == "done", "attempts": 1, "last_execution": { "ended_at": ended } });
    if why != "done" {
        let execution = job.get_document_mut("last_execution").unwrap();
        execution.extend(doc! { "class": "SmtpDown", "message": "connection refused (50 %) by example.org" });
    }
    job
}

async fn insert(database: &TestDatabase, collection: &str, documents: Vec<Document>) -> Vec<String> {
    let ids = documents.iter().map(|document| document.get_object_id("_id").unwrap().to_hex()).collect();
    database.raw(collection).insert_many(documents).await.unwrap();
    ids
}

fn ids(said: &Said) -> Vec<String> {
    said.objects().iter().map(|job| job["id"].as_str().unwrap().to_owned()).collect()
}

/// The last line of what a change of many jobs has written.
fn summary(said: &Said) -> Value {
    said.objects().pop().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn jobs_are_found_by_what_went_wrong_and_when() {
    let (database, _store) = prepared().await;
    let mut other = archived("mail", "tried-too-many-times", 60);
    other.get_document_mut("last_execution").unwrap().extend(doc! { "class": "exit:1", "message": "No Such File" });
    let mut waiting = minimal_job("mail");
    waiting.extend(doc! { "attempts": 1, "last_execution": { "class": "SmtpDown", "message": "connection reset" } });
    let done = archived("mail", "done", 5_000);
    let old = archived("mail", "gave-up", 7_200);
    let found = insert(&database, "archived", vec![other, done, old]).await;
    let [other, done, old] = found.try_into().unwrap();
    let waiting = insert(&database, "scheduled", vec![waiting]).await.remove(0);
    let check = |args: &[&str], expected: &[&String]| {
        let said = recruiter(&database, &[&["jobs", "list", "--json"], args].concat());
        let (mut found, mut expected) = (ids(&said), expected.iter().copied().cloned().collect::<Vec<_>>());
        found.sort();
        expected.sort();
        assert_eq!(found, expected, "{args:?}");
    };
    check(&["--error-class", "SmtpDown"], &[&old, &waiting]);
    check(&["--error-class", "SmtpDown", "--state", "archived"], &[&old]);
    check(&["--message", "no such"], &[&other]);
    check(&["--message", "(50 %) by example.org"], &[&old]);
    check(&["--message", "connection.re"], &[]);
    check(&["--since", "1h"], &[&other, &waiting]);
    check(&["--since", "3h", "--until", "1h"], &[&done, &old]);
    check(&["--state", "archived", "--until", "1h"], &[&done, &old]);
    check(&["--since", "2001-01-01T00:00:00Z", "--until", "2002-01-01T00:00:00Z"], &[]);
    // A job of another language may have no date of its own, one of this library has.
    let aged = doc! { "$set": { "created_at": bson::DateTime::from_millis(1_000_000_000_000) } };
    database.raw("scheduled").update_one(doc! { "_id": ObjectId::parse_str(&waiting).unwrap() }, aged).await.unwrap();
    check(&["--since", "2001-01-01T00:00:00Z", "--until", "2002-01-01T00:00:00Z"], &[&waiting]);
    check(&["--state", "waiting", "--since", "1h"], &[]);

    let said = recruiter(&database, &["jobs", "list", "--why", "gave-up"]);
    assert!(said.out.contains("\n    gave-up; SmtpDown: connection refused (50 %) by example.org\n"), "{}", said.out);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn what_no_job_can_match_is_refused_and_a_misspelt_reason_is_corrected() {
    let (database, _store) = prepared().await;
    insert(&database, "archived", vec![archived("a", "my-own-reason", 1)]).await;
    let check = |args: &[&str], code: i32, expected: &str| {
        let said = recruiter(&database, &[&["jobs"], args].concat());
        assert!(said.code == code && said.err.contains(expected), "{args:?}: {} {}", said.code, said.err);
    };
    check(&["list", "--state", "waiting", "--why", "done"], 2, "only archived jobs have a finish reason");
    check(&["list", "--since", "1h", "--until", "2h"], 2, "the period is empty");
    check(&["list", "--why", "done", "--message", "x"], 2, "a job that is done has no error class");
    check(&["list", "--state", "done", "--error-class", "x"], 2, "a job that is done has no error class");
    check(&["list", "--state", "failed", "--why", "done"], 2, "a job with this finish reason (`why`) has another state");
    check(&["list", "--since", "noon"], 2, "neither an instant nor a duration");
    check(&["list", "--why", "tried-to-many-times"], 2, "did you mean `tried-too-many-times`?");
    check(&["list", "--why", "nonsense"], 0, "not a built-in finish reason (done, ");
    check(&["list", "--why", "my-own-reason"], 0, "");
    check(&["retry", "--yes", "--why", "tried-to-many-times"], 2, "did you mean `tried-too-many-times`?");
    check(&["retry"], 2, "name the jobs to be retried");
    check(&["retry", "--state", "archived"], 2, "add --yes");
    check(&["retry", "--all", "--class", "a"], 2, "--all cannot be combined with filters");
    check(&["retry", &ObjectId::new().to_hex(), "--class", "a"], 2, "job ids cannot be combined with filters");
    check(&["retry", "--all"], 2, "add --yes");
    check(&["retry", "--all", "--yes", "--state", "running"], 2, "a running job cannot be retried");
    check(&["cancel", "--all", "--yes", "--state", "archived"], 2, "an archived job cannot be cancelled");
    check(&["delete", "--all", "--yes", "--state", "waiting"], 2, "only archived jobs are deleted");
    assert_eq!(database.count("archived", doc! { "retried_as": null }).await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_failed_job_is_retried_with_new_content() {
    let (database, _store) = prepared().await;
    let mut failed = archived("mail", "gave-up", 60);
    failed.extend(doc! { "group": "mail", "gate": "customer:17,printer" });
    failed.get_document_mut("workable").unwrap().insert("parameters", doc! { "to": "a", "mail": { "subject": "s", "bcc": "x" } });
    let bundle = {
        let mut bundle = archived("bundle", "gave-up", 60);
        bundle.insert("workable", doc! { "class": "bundle", "items": [{ "n": 1 }, { "n": 2 }] });
        let failed = doc! { "class": "x", "message": "y", "why": "gave-up" };
        bundle.insert("item_outcomes", vec![Bson::from("done"), failed.into()]);
        bundle
    };
    let old = insert(&database, "archived", vec![failed, bundle]).await;
    let waiting = insert(&database, "scheduled", vec![minimal_job("mail")]).await.remove(0);
    let retry = |args: &[&str]| recruiter(&database, &[&["jobs", "retry", "--json", "--yes"], args].concat());
    let set = r#"{"to": "b", "mail": {"bcc": null}}"#;

    let check = |args: &[&str], expected: &str| {
        let said = retry(args);
        assert!(said.code == 2 && said.err.contains(expected), "{args:?}: {} {}", said.code, said.err);
    };
    check(&["--all", "--set", "[1]"], "parameters must be a JSON object");
    check(&["--all", "--to-group", ""], "the name of the new group is empty");
    check(&["--all", "--retry-policy", r#"{"class": "Mine"}"#], "if your workers know it, add --custom-policy");
    check(&["--all", "--retry-policy", r#"{"class": "RetryForever"}"#], "`seconds_to_wait_before_retry` is missing");
    check(&["--all", "--state", "waiting", "--set", set], "only finished jobs are retried with new content");
    let refused = recruiter(&database, &["jobs", "retry", &waiting, "--set", set]);
    assert!(refused.code == 1 && refused.err.contains("only finished jobs are retried with new content"), "{}", refused.err);
    let dry = summary(&retry(&["--class", "mail", "--set", set, "--dry-run"]));
    assert!(dry["outcomes"]["enqueued-again"] == 1 && database.count("scheduled", doc! {}).await == 1, "{dry}");

    let mine = r#"{"class": "Mine"}"#;
    let changes = ["--set", set, "--to-group", "slow", "--priority", "9", "--retry-policy", mine, "--custom-policy"];
    assert_eq!(summary(&retry(&[&["--class", "mail"], &changes[..]].concat()))["outcomes"], json!({ "enqueued-again": 1 }));
    let id = |hex: &str| ObjectId::parse_str(hex).unwrap();
    let new = database.only("scheduled", doc! { "recovered_from": id(&old[0]) }).await;
    let parameters = new.get_document("workable").unwrap().get_document("parameters").unwrap();
    assert_eq!(*parameters, doc! { "to": "b", "mail": { "subject": "s" } });
    assert_eq!((new.get_str("group").unwrap(), new.get_str("gate").unwrap()), ("slow", "customer:17,printer"));
    assert_eq!(Priority::new(9).map(Bson::from).as_ref(), new.get("priority"));
    assert_eq!(new.get_document("retry_policy").unwrap().get_str("class").unwrap(), "Mine");
    let old_job = database.only("archived", doc! { "_id": id(&old[0]) }).await;
    assert_eq!(old_job.get("retried_as"), new.get("_id"));
    assert_eq!(old_job.get_document("workable").unwrap().get_document("parameters").unwrap().get_str("to").unwrap(), "a", "history stays");
    assert_eq!(summary(&retry(&["--class", "mail", "--set", set]))["outcomes"], json!({ "retried-before": 1 }));
    assert_eq!(summary(&retry(&["--class", "bundle", "--set", r#"{"m": 3}"#]))["outcomes"], json!({ "enqueued-again": 1 }));
    let new = database.only("scheduled", doc! { "recovered_from": id(&old[1]) }).await;
    assert_eq!(new.get_document("workable").unwrap().get_array("items").unwrap(), &[Bson::from(doc! { "n": 2, "m": 3 })]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn exported_jobs_are_enqueued_again() {
    let (database, _store) = prepared().await;
    let mut failed = archived("mail", "gave-up", 60);
    let date = bson::DateTime::from_millis(5);
    failed.get_document_mut("workable").unwrap().insert("parameters", doc! { "to": "a", "count": 3_i64, "date": date });
    failed.extend(doc! { "tags": ["t"], "gate": "printer" });
    let mut unreadable = archived("mail", "malformed", 60);
    unreadable.get_document_mut("workable").unwrap().insert("parameters", 5);
    insert(&database, "archived", vec![failed.clone(), unreadable, archived("mail", "done", 60), archived("sms", "gave-up", 7_200)]).await;
    let later = bson::DateTime::from_millis(bson::DateTime::now().timestamp_millis() + 3_600_000);
    let mut waiting = minimal_job("later");
    waiting.insert("scheduled_at", later);
    insert(&database, "scheduled", vec![waiting]).await;
    let export = |args: &[&str]| recruiter(&database, &[&["jobs", "export"], args].concat());

    let said = export(&["--class", "mail"]);
    assert!(said.code == 1 && said.err.contains("1 of 2 jobs were not exported"), "{} {}", said.code, said.err);
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), &said.out).unwrap();
    assert_eq!(recruiter(&database, &["enqueue", "--from", file.path().to_str().unwrap()]).code, 0);
    let new = database.only("scheduled", doc! { "workable.class": "mail" }).await;
    let parameters = |job: &Document| job.get_document("workable").unwrap().get_document("parameters").unwrap().clone();
    assert_eq!(parameters(&new), parameters(&failed));
    assert_eq!((new.get("tags"), new.get("gate"), new.get("attempts")), (failed.get("tags"), failed.get("gate"), Some(&0.into())));
    assert_ne!(new.get("_id"), failed.get("_id"));

    assert_eq!(export(&["--since", "1h", "--class", "sms"]).objects().len(), 0);
    assert_eq!(export(&["--class", "sms"]).objects().len(), 1);
    assert_eq!(export(&["--why", "done"]).objects().len(), 1);
    let waiting = export(&["--state", "waiting", "--class", "later"]).objects();
    let at = waiting[0]["scheduled_at"].as_str().unwrap();
    assert_eq!(recruiter_common::spec::instant_of_text(at).unwrap().timestamp_millis(), later.timestamp_millis());
    assert!(export(&["--state", "running"]).err.contains("would run twice"));
    assert!(export(&["--state", "waiting", "--why", "done"]).err.contains("only archived jobs have a finish reason"));
}

/// Many of them ended in the same millisecond, as those of one batch do.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn pages_show_every_job_once() {
    let (database, _store) = prepared().await;
    let mut documents: Vec<Document> = (0..25).map(|_| archived("a", "gave-up", 1)).collect();
    let ended = documents[0].get_document("last_execution").unwrap().clone();
    documents[3..20].iter_mut().for_each(|job| drop(job.insert("last_execution", ended.clone())));
    let mut expected = insert(&database, "archived", documents).await;
    expected.sort();
    for place in [&["--state", "archived"][..], &[], &["--why", "gave-up", "--since", "1h"]] {
        let mut seen: Vec<String> = Vec::new();
        loop {
            let after: Vec<&str> = seen.last().iter().flat_map(|last| ["--after", last.as_str()]).collect();
            let said = recruiter(&database, &[&["jobs", "list", "--json", "--limit", "4"], place, &after].concat());
            let page = ids(&said);
            let has_more = seen.len() + page.len() < expected.len();
            let last = page.last().cloned().unwrap();
            assert_eq!(said.err.contains(&format!("--after {last}")), has_more, "{}", said.err);
            seen.extend(page);
            if !has_more {
                break;
            }
        }
        seen.sort();
        assert_eq!(seen, expected, "{place:?}");
    }
}

/// MongoDB aborts reads that take too long. A list reports that; a change of many jobs continues in smaller steps.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_search_that_takes_too_long_is_given_up_and_a_walk_is_not() {
    let (database, _store) = prepared().await;
    insert(&database, "archived", (0..700).map(|_| archived("a", "gave-up", 1)).collect()).await;
    let too_slow = async |times: i32| {
        let fault = FailPoint::new("recruiter jobs", &["find"]).namespace(database.name(), "archived").times(times).error_code(50);
        fault.arm(&database.uri().replace(database.name(), "")).await
    };
    let fault = too_slow(1).await;
    let said = recruiter(&database, &["jobs", "list", "--state", "archived", "--tag", "x"]);
    assert!(said.code == 1 && said.err.contains("stopped after 8 s") && said.err.contains("narrow it"), "{} {}", said.code, said.err);
    drop(fault);
    let fault = too_slow(2).await;
    let said = recruiter(&database, &["jobs", "retry", "--all", "--dry-run"]);
    assert_eq!((said.code, said.out.as_str(), fault.struck().await), (0, "(dry run) 700 enqueued again\n", 2), "{}", said.err);
}

/// The new jobs, by the archived one that each is a retry of.
async fn retries(database: &TestDatabase) -> Vec<ObjectId> {
    let jobs = database.all("scheduled", doc! {}).await;
    jobs.iter().map(|job| job.get_object_id("recovered_from").unwrap()).collect()
}

/// Each archived job of this filter names the one new job that names it.
async fn each_was_retried_once(database: &TestDatabase, filter: Document) {
    let pairs = async |collection: &str, filter: Document, old: &str, new: &str| {
        let found = database.all(collection, filter).await;
        let id = |job: &Document, field: &str| job.get_object_id(field).unwrap();
        let mut pairs: Vec<(ObjectId, ObjectId)> = found.iter().map(|job| (id(job, old), id(job, new))).collect();
        pairs.sort();
        pairs
    };
    assert_eq!(pairs("archived", filter, "_id", "retried_as").await, pairs("scheduled", doc! {}, "recovered_from", "_id").await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn what_failed_is_retried_once_however_often_it_is_said() {
    let (database, _store) = prepared().await;
    let mut jobs: Vec<Document> = (0..1_200).map(|_| archived("mail", "gave-up", 10)).collect();
    jobs.extend((0..300).map(|_| archived("other", "worker-died", 10)));
    jobs.extend((0..200).flat_map(|_| [archived("mail", "done", 10), archived("mail", "cancelled", 10)]));
    // One that cannot be enqueued again stops no other.
    jobs[17].insert("workable", doc! { "class": "mail", "parameters": [1, 2] });
    jobs[18].insert("tags", "text");
    insert(&database, "archived", jobs).await;

    let counted = summary(&recruiter(&database, &["jobs", "retry", "--class", "mail", "--dry-run", "--json"]).said_anyhow());
    assert_eq!(counted["outcomes"], json!({ "enqueued-again": 1_198, "refused": 2 }));
    assert_eq!(retries(&database).await.len(), 0);

    let said = recruiter(&database, &["jobs", "retry", "--class", "mail", "--yes"]);
    assert_eq!((said.code, said.out.as_str()), (1, "1198 enqueued again, 2 refused\n"), "{}", said.err);
    assert!(
        said.err.contains("its parameters are not a document") && said.err.contains("2 of 1200 jobs could not be retried"),
        "{}",
        said.err
    );
    each_was_retried_once(&database, doc! { "workable.class": "mail", "why": "gave-up", "retried_as": { "$exists": true } }).await;
    assert_eq!(database.count("archived", doc! { "retried_as": { "$exists": true } }).await, 1_198);

    // Said again it does the rest.
    let said = recruiter(&database, &["jobs", "retry", "--all", "--yes", "--json"]).said_anyhow();
    assert_eq!(summary(&said)["outcomes"], json!({ "enqueued-again": 300, "refused": 2, "retried-before": 1_198 }));
    assert_eq!(retries(&database).await.len(), 1_498);

    // By its id, too, unless `--again` is given.
    let old = database.only("archived", doc! { "_id": retries(&database).await[0] }).await;
    let (old_id, first) = (old.get_object_id("_id").unwrap(), old.get_object_id("retried_as").unwrap().to_hex());
    let said = recruiter(&database, &["jobs", "retry", &old_id.to_hex()]);
    assert!(said.code == 1 && said.err.contains(&format!("it was retried before, as {first}; --again")), "{}", said.err);
    assert!(recruiter(&database, &["jobs", "show", &old_id.to_hex()]).out.contains(&format!("retried as   {first}")));
    let again = recruiter(&database, &["jobs", "retry", "--again", "--json", &old_id.to_hex()]).objects()[0]["new_id"].clone();
    let old = database.only("archived", doc! { "_id": old_id }).await;
    assert_eq!(json!(old.get_object_id("retried_as").unwrap().to_hex()), again);
    let shown = recruiter(&database, &["jobs", "show", again.as_str().unwrap()]).out;
    assert!(shown.contains(&format!("retry of     {old_id}\n")), "{shown}");
}

impl Said {
    /// The same as if it had not refused anything.
    fn said_anyhow(mut self) -> Self {
        assert!(self.code == 0 || self.err.contains("jobs could not be"), "{}", self.err);
        self.code = 0;
        self
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn many_jobs_are_cancelled_deleted_and_made_due() {
    let (database, store) = prepared().await;
    let job = |class: &str, group: &str, minutes: i64| {
        let mut job = minimal_job(class);
        let at = bson::DateTime::from_millis(bson::DateTime::now().timestamp_millis() + minutes * 60_000);
        job.extend(doc! { "group": group, "scheduled_at": at });
        job
    };
    let wrong: Vec<Document> = (0..700).map(|n| job("nosuch", "g", n - 350)).collect();
    insert(&database, "scheduled", wrong.clone()).await;
    insert(&database, "scheduled", vec![job("good", "g", -1), job("good", "h", 60)]).await;
    insert_unvalidated(&database, vec![doc! { "_id": ObjectId::new(), "locked": false, "workable": { "class": "nosuch" } }]).await;
    let running: Vec<JobId> = wrong[..5].iter().map(|job| job.get_object_id("_id").unwrap().into()).collect();
    let worker = announcement(10);
    store.register(&worker).await.unwrap();
    assert_eq!(started(&store, worker.id, &running).await.len(), 5);

    let cancel = |more: &[&str]| recruiter(&database, &[&["jobs", "cancel", "--class", "nosuch", "--json"], more].concat());
    assert_eq!(summary(&cancel(&["--dry-run"]))["outcomes"], json!({ "asked": 5, "cancelled": 696 }));
    assert_eq!(summary(&cancel(&["--yes", "--state", "waiting"]))["outcomes"], json!({ "cancelled": 696 }));
    assert_eq!(database.count("scheduled", doc! { "cancel_requested_at": { "$exists": true } }).await, 0);
    assert_eq!(summary(&cancel(&["--yes"]))["outcomes"], json!({ "asked": 5 }));
    let dry = |args: &[&str]| recruiter(&database, &[&["jobs"], args, &["--dry-run", "--json"]].concat());
    assert_eq!(summary(&dry(&["cancel", "--all", "--state", "queued"]))["outcomes"], json!({ "cancelled": 1 }));
    assert_eq!(summary(&dry(&["retry", "--all", "--state", "cancelled"]).said_anyhow())["outcomes"]["enqueued-again"], 695);
    assert_eq!(
        database.count("scheduled", doc! { "workable.class": "nosuch", "locked": true, "cancel_requested_at": { "$exists": true } }).await,
        5
    );
    assert_eq!(database.count("archived", doc! { "why": "cancelled", "workable.class": "nosuch" }).await, 696);

    let said = recruiter(&database, &["jobs", "retry", "--group", "h", "--state", "waiting", "--yes"]);
    assert_eq!((said.code, said.out.as_str()), (0, "1 due now\n"));
    assert_eq!(database.count("scheduled", doc! { "group": "h", "scheduled_at": { "$lte": bson::DateTime::now() } }).await, 1);

    // More than one step of a walk looks at, by id and by date, many of them of the same millisecond.
    let then = archived("old", "done", 7_200).get_document("last_execution").unwrap().clone();
    let old = |_| {
        let mut job = archived("old", "done", 7_200);
        job.insert("last_execution", then.clone());
        job
    };
    insert(&database, "archived", (0..11_000).map(old).chain((0..500).map(|_| archived("new", "done", 1))).collect()).await;
    for period in [&[][..], &["--until", "1h"]] {
        let said = recruiter(&database, &[&["jobs", "delete", "--class", "old", "--dry-run"], period].concat());
        assert_eq!((said.code, said.out.as_str()), (0, "(dry run) 11000 deleted\n"));
    }
    let said = recruiter(&database, &["jobs", "delete", "--until", "1h", "--yes"]);
    assert_eq!((said.code, said.out.as_str()), (0, "11000 deleted\n"));
    let said = recruiter(&database, &["jobs", "delete", "--class", "new", "--yes"]);
    assert_eq!((said.code, said.out.as_str()), (0, "500 deleted\n"));
    assert_eq!(database.count("archived", doc! {}).await, 696);
    assert_eq!(recruiter(&database, &["jobs", "delete", "--until", "1h", "--yes"]).out, "no matching job can be deleted\n");
    // One that is not finished is never deleted.
    let good = database.only("scheduled", doc! { "group": "h" }).await.get_object_id("_id").unwrap().to_hex();
    let said = recruiter(&database, &["jobs", "delete", &good]);
    assert!(said.code == 1 && said.err.contains("only archived jobs are deleted"), "{}", said.err);
    assert_eq!(database.count("scheduled", doc! { "group": "h" }).await, 1);
}

/// The output of a command on a terminal, where this is typed after the question.
fn on_a_terminal(database: &TestDatabase, args: &[&str], typed: &str, more: &[(&str, &str)]) -> (i32, String) {
    let terminal = openpty(None, None).unwrap();
    let [stdin, stdout, stderr] = std::array::from_fn(|_| terminal.slave.try_clone().unwrap());
    let mut command = Command::new(binary("recruiter"));
    command
        .args(args)
        .env("MONGODB_URI", database.uri())
        .env("TERM", "xterm")
        .env_remove("NO_COLOR")
        .env_remove("COLUMNS")
        .envs(more.iter().copied());
    let mut child = command.stdin(stdin).stdout(stdout).stderr(stderr).spawn().unwrap();
    drop((command, terminal.slave));
    let mut screen = File::from(terminal.master);
    let (mut shown, mut part, mut typed) = (Vec::new(), [0; 4_096], Some(typed));
    // The end of a terminal is an error.
    while let Ok(length @ 1..) = screen.read(&mut part) {
        shown.extend_from_slice(&part[..length]);
        if shown.ends_with(b"[y/N] ") {
            match typed.take().expect("it asks once") {
                // The terminal is not the one that the child is controlled by, which would make a signal of it.
                "\u{3}" => kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGINT).unwrap(),
                typed => screen.write_all(typed.as_bytes()).unwrap(),
            }
        }
    }
    (child.wait().unwrap().code().unwrap(), String::from_utf8(shown).unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_terminal_is_asked_for_confirmation_and_shows_colours() {
    let (database, _store) = prepared().await;
    insert(&database, "archived", (0..600).map(|_| archived("a", "gave-up", 10)).chain([archived("a", "done", 1)]).collect()).await;
    let retry = ["jobs", "retry", "--class", "a"];
    for (typed, code) in [("n\n", 1), ("\n", 1), ("\u{3}", 130)] {
        let (ended, shown) = on_a_terminal(&database, &retry, typed, &[]);
        assert!(ended == code && shown.contains("Retry 600 jobs? [y/N]") && shown.contains("nothing was changed"), "{ended} {shown}");
        assert_eq!(retries(&database).await.len(), 0);
    }
    let (ended, shown) = on_a_terminal(&database, &retry, "y\n", &[]);
    assert!(ended == 0 && shown.contains("jobs retried") && shown.contains("600 enqueued again"), "{ended} {shown}");
    assert_eq!(retries(&database).await.len(), 600);

    let list = ["jobs", "list", "--state", "archived", "--limit", "1"];
    assert!(on_a_terminal(&database, &list, "", &[]).1.contains("\u{1b}[32mdone"));
    assert!(!on_a_terminal(&database, &list, "", &[("NO_COLOR", "1")]).1.contains('\u{1b}'));
    assert!(on_a_terminal(&database, &list, "", &[("COLUMNS", "120")]).1.contains("PRIORITY"));
}

/// A signal in the middle, the replies of two commits lost, and the whole process killed: said again, the command does the rest.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn an_interrupted_retry_goes_on_where_it_was() {
    let database = TestDatabase::of_its_own().await;
    let _store = store(&database).await;
    insert(&database, "archived", (0..4_000).map(|_| archived("a", "gave-up", 10)).collect()).await;
    let retried = async || database.count("archived", doc! { "retried_as": { "$exists": true } }).await;
    let retry = ["jobs", "retry", "--all", "--yes"];
    // So slow that both signals arrive in the middle.
    let slow = FailPoint::new("recruiter jobs", &["commitTransaction"]).block(Duration::from_secs(2));

    let fault = slow.arm(database.uri()).await;
    let child = spawn(&database, &retry);
    wait_until(SOON, "some are retried", async || retried().await >= 500).await;
    kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGINT).unwrap();
    let said = Said::of(child.wait_with_output().unwrap());
    assert_eq!(said.code, 130, "{}", said.err);
    assert!(said.err.contains("repeat the command to continue with the rest"), "{}", said.err);
    let so_far = retried().await;
    assert!(said.out.starts_with(&format!("{so_far} enqueued again")) && so_far < 4_000, "{} {so_far}", said.out);
    each_was_retried_once(&database, doc! { "retried_as": { "$exists": true } }).await;

    let mut child = spawn(&database, &retry);
    wait_until(SOON, "some more are retried", async || retried().await > so_far).await;
    child.kill().unwrap();
    child.wait().unwrap();
    drop(fault);
    each_was_retried_once(&database, doc! { "retried_as": { "$exists": true } }).await;

    // MongoDB ends the open transaction of the killed process after a minute; here it is ended at once.
    database.database().run_command(doc! { "killAllSessions": [] }).await.unwrap();
    let fault = FailPoint::new("recruiter jobs", &["commitTransaction"]).times(2).write_concern_error(64).arm(database.uri()).await;
    let said = recruiter(&database, &retry);
    assert_eq!((said.code, fault.struck().await), (0, 2), "{}", said.err);
    each_was_retried_once(&database, doc! {}).await;
    assert_eq!(retries(&database).await.len(), 4_000);
}

/// I9.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn an_unreadable_document_is_shown_and_hides_nothing() {
    let (database, store) = prepared().await;
    let bad = |place: &str, field: &str| {
        let mut job = minimal_job("good");
        if place == "archived" {
            job.remove("scheduled_at");
            job.extend(doc! { "why": "done", "last_execution": { "ended_at": bson::DateTime::now() } });
        }
        match field {
            "class" => job.insert("workable", doc! { "class": "caf!" }),
            "parameters" => job.insert("workable", doc! { "class": "good", "parameters": { "path": "caf!" } }),
            field => job.insert(field, "caf!"),
        };
        job
    };
    let raw = |collection: &str| database.raw(collection).clone_with_type::<RawDocumentBuf>();
    let mut bad_ids = Vec::new();
    for place in ["scheduled", "archived"] {
        for field in ["class", "parameters", "urn", "own"] {
            let job = bad(place, field);
            bad_ids.push(job.get_object_id("_id").unwrap().to_hex());
            raw(place).insert_one(not_utf8(&job)).bypass_document_validation(true).await.unwrap();
        }
    }
    for place in ["scheduled", "archived"] {
        raw(place).insert_one(not_utf8(&bad(place, "group"))).bypass_document_validation(true).await.unwrap();
    }
    raw("roster")
        .insert_one(not_utf8(&doc! { "_id": ObjectId::new(), "work_on": "*", "hostname": "caf!", "available": true }))
        .await
        .unwrap();
    let worker = announcement(1);
    store.register(&worker).await.unwrap();
    let good = minimal_job("good");
    let good_id = good.get_object_id("_id").unwrap().to_hex();
    insert_unvalidated(&database, vec![good]).await;

    let said = recruiter(&database, &["jobs", "list"]).succeeded();
    for id in bad_ids.iter().chain([&good_id]) {
        assert!(said.out.lines().any(|line| line.starts_with(id) && line.contains("generic")), "{id} is not in {}", said.out);
        assert_eq!(recruiter(&database, &["jobs", "show", id]).code, 0);
    }
    assert!(said.out.contains("malformed  caf\u{fffd}") && said.out.contains("malformed  good"), "{}", said.out);
    let json = recruiter(&database, &["jobs", "list", "--state", "archived", "--json"]).objects();
    assert!(json.iter().any(|job| job["group"] == json!("caf\u{fffd}")) && json.len() == 5, "{json:?}");
    let said = recruiter(&database, &["roster"]);
    assert!(said.code == 0 && said.out.contains("caf\u{fffd}") && said.out.contains(&worker.id.to_string()), "{} {}", said.out, said.err);
    let stats = recruiter(&database, &["stats", "--json"]).objects().remove(0);
    assert!(stats["groups"].as_array().unwrap().iter().any(|group| group["name"] == json!("caf\u{fffd}")), "{stats}");

    // They can be got rid of.
    let said = recruiter(&database, &["jobs", "cancel", "--all", "--yes"]);
    assert_eq!((said.code, said.out.as_str()), (0, "6 cancelled\n"), "{}", said.err);
    let said = recruiter(&database, &["jobs", "delete", "--all", "--yes"]);
    assert_eq!((said.code, said.out.as_str()), (0, "11 deleted\n"), "{}", said.err);
}

/// The bytes of a document in which the end of each `caf!` has become a byte that is not UTF-8.
fn not_utf8(document: &Document) -> RawDocumentBuf {
    let mut bytes = document.to_vec().unwrap();
    let found: Vec<usize> = bytes.windows(4).enumerate().filter(|(_, word)| word == b"caf!").map(|(at, _)| at + 3).collect();
    found.into_iter().for_each(|at| bytes[at] = 0xe9);
    RawDocumentBuf::from_bytes(bytes).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn the_leader_and_jobs_without_workers_are_shown() {
    let (database, store) = prepared().await;
    let waits = minimal_job("noop");
    let id = waits.get_object_id("_id").unwrap().to_hex();
    insert_unvalidated(&database, vec![waits]).await;
    let says = |args: &[&str], expected: &str| {
        let said = recruiter(&database, args);
        assert!(said.code == 0 && (said.out.contains(expected) || said.err.contains(expected)), "{args:?}: {}{}", said.out, said.err);
    };
    for args in [&["stats"][..], &["roster"], &["roster", "--json"], &["jobs", "show", &id]] {
        says(args, "no recruiter leads: due jobs are not assigned (no recruiter has led yet)");
    }
    let stats = recruiter(&database, &["stats", "--json"]).objects().remove(0);
    assert_eq!((&stats["leader"], &stats["held"][0]["reason"]), (&Value::Null, &json!("no-recruiter")), "{stats}");
    says(&["enqueue", "--class", "nosuch"], "warning: no worker is running");

    let setup = Setup { recruiter: &["--lease", "10m"], worker: &["--builtins", "--work-on", "g", "--lease", "10m"], ..Setup::default() };
    let system = System::start(&database, setup);
    wait_until(SOON, "a recruiter leads", async || store.observe_lease().await.unwrap().is_some()).await;
    database.until("roster", doc! { "available": true }, 1, "a worker is available").await;
    says(&["stats"], "leader: ");
    says(&["stats"], "jobs cannot start: no running worker has the class `nosuch`; start one that does\n");
    says(&["stats"], "jobs cannot start: no running worker that has the class `noop` works on the group `generic`; start one that does\n");
    let untaken = recruiter(&database, &["stats", "--json"]).objects().remove(0)["untaken"].take();
    let classes: Vec<&Value> = untaken.as_array().unwrap().iter().map(|kind| &kind["class"]).collect();
    assert_eq!(classes, [&json!("noop"), &json!("nosuch")], "{untaken}");
    let mut job = minimal_job("noop");
    job.extend(doc! { "group": "g", "retry_policy": { "class": "Mine", "parameters": {} } });
    database.raw("scheduled").insert_one(job).await.unwrap();
    says(
        &["stats"],
        "jobs wait in g: no running worker that has the class `noop` and works on the group `g` knows the retry policy `Mine`",
    );
    says(&["roster"], "leader: ");
    assert!(recruiter(&database, &["stats", "--json"]).objects()[0]["leader"].as_str().unwrap().contains(':'));
    assert!(!recruiter(&database, &["jobs", "show", &id]).out.contains("no recruiter leads"));
    says(&["enqueue", "--class", "nosuch"], "warning: no running worker has the class `nosuch`");
    says(&["enqueue", "--class", "noop", "--group", "h"], "no running worker that has the class `noop` works on the group `h`");
    assert_eq!(recruiter(&database, &["enqueue", "--class", "noop", "--group", "g"]).err, "");
    system.stop().await;
    says(&["stats"], "has stopped");

    let renewed_at = bson::DateTime::from_millis(bson::DateTime::now().timestamp_millis() - 7_200_000);
    let killed = doc! { "$set": { "released": false, "renewed_at": renewed_at } };
    database.raw("metadata").update_one(doc! { "_id": "recruiter" }, killed).await.unwrap();
    says(&["stats"], "has not renewed its lease for 2h");
}

/// A mistyped database is not set up by a command that changes jobs.
#[tokio::test]
async fn where_there_is_no_recruiter_no_job_is_changed_and_nothing_is_made() {
    let database = TestDatabase::new().await;
    for args in
        [&["jobs", "cancel", "--all", "--yes"][..], &["jobs", "delete", "--all", "--yes"], &["jobs", "retry", "65a1b2c3d4e5f60718293a4b"]]
    {
        let said = recruiter(&database, args);
        assert!(said.code == 1 && said.err.contains("has none of the collections"), "{args:?}: {}{}", said.out, said.err);
    }
    assert_eq!(database.database().list_collection_names().await.unwrap(), [""; 0]);
}
