//! Work by HTTP: jobs are reserved, committed and rolled back once, whoever goes away in between, and everything holds for them as for others.

use std::{collections::HashSet, time::Duration};

use bson::{Document, doc, oid::ObjectId};
use futures_util::future::join_all;
use recruiter_common::{Limit, NewJob, RetryForever, RetryManyTimes, store::Store};
use recruiter_tests::{
    fail_points::FailPoint,
    http::{Api, answer},
    local::prepared,
    mongo::TestDatabase,
    processes::{Setup, System},
    wait::{SOON, wait_for, wait_until},
};
use reqwest::Method;
use serde_json::{Value, json};
use tokio::{io::AsyncWriteExt as _, net::TcpStream};

/// Clients may work.
const CLIENT: [&str; 2] = ["--anonymous", "client"];

/// A recruiter and a cleaner without a worker, and the API.
async fn begin() -> (TestDatabase, Store, System, Api) {
    let (database, store) = prepared().await;
    let setup = Setup { workers: 0, cleaner: &["--every", "200ms"], ..Setup::default() };
    let system = System::start(&database, setup);
    let api = Api::serve(&database, &CLIENT).await;
    (database, store, system, api)
}

async fn enqueue(store: &Store, job: NewJob) -> String {
    job.enqueue(store).await.unwrap().id.to_string()
}

fn job() -> NewJob {
    NewJob::of_class("mail", doc! { "to": "ada" })
}

/// Reserves one job, in the end.
async fn reserve(api: &Api) -> Value {
    wait_for(SOON, "a job is reserved", async || {
        let (status, answer) = api.post("/work/reserve", &json!({ "classes": ["mail"], "wait": "5s", "lease": "1h" })).await;
        assert_eq!(status, 200, "{answer}");
        answer["jobs"].get(0).cloned()
    })
    .await
}

async fn say(api: &Api, job: &Value, what: &str, body: Value) -> (u16, Value) {
    api.post(&format!("/work/{}/{what}", job["reservation"].as_str().unwrap()), &body).await
}

async fn archived(database: &TestDatabase, id: &str) -> Document {
    database.archived(id.parse::<ObjectId>().unwrap()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_is_reserved_noted_and_committed_once() {
    let (database, store, _system, api) = begin().await;
    let id = enqueue(&store, job().tag("t").urn("urn:x:1")).await;
    let taken = reserve(&api).await;
    let expected = json!({
        "id": id, "class": "mail", "group": "generic", "parameters": { "to": "ada" }, "attempt": 1, "is_last_attempt": true, "tags": ["t"],
        "urn": "urn:x:1", "traceparent": null, "checkpoint": null, "item": null, "inputs": [],
        "reservation": taken["reservation"], "lease_until": taken["lease_until"],
    });
    assert_eq!(taken, expected);
    let (status, extended) = say(&api, &taken, "extend", json!({ "lease": "2h" })).await;
    assert!(status == 200 && extended["stop"].is_null() && extended["lease_until"] != taken["lease_until"], "{extended}");
    let notes = json!({ "done": 3, "of": 4, "text": "almost", "log": "a line\nanother", "checkpoint": { "at": 3 } });
    assert_eq!(say(&api, &taken, "notes", notes).await, (200, json!({ "stop": null })));
    for _ in 0..3 {
        assert_eq!(say(&api, &taken, "commit", json!({ "result": { "sent": true } })).await, (200, json!({ "recorded": true })));
    }
    let end = archived(&database, &id).await;
    assert_eq!((end.get_document("result").unwrap(), end.get_str("why").unwrap()), (&doc! { "sent": true }, "done"));
    assert_eq!((end.get_array("log").unwrap().len(), end.get_i32("attempts").unwrap()), (2, 1), "{end}");
    assert_eq!(end.get_document("progress").unwrap().get_i64("done").unwrap(), 3);
    // The answer is lost: the client closes the connection, or repeats the request before the end is recorded.
    let second = enqueue(&store, job()).await;
    let lost = reserve(&api).await;
    let at = api.at.strip_prefix("http://").unwrap();
    let path = format!("/api/v1/work/{}/commit", lost["reservation"].as_str().unwrap());
    let request =
        format!("POST {path} HTTP/1.1\r\nHost: {at}\r\nContent-Type: application/json\r\nContent-Length: 14\r\n\r\n{{\"result\": 5 }}");
    let slow =
        FailPoint::new("recruiter-worker", &["update", "commitTransaction"]).block(Duration::from_millis(500)).arm(database.uri()).await;
    let mut client = TcpStream::connect(at).await.unwrap();
    client.write_all(request.as_bytes()).await.unwrap();
    wait_until(SOON, "it has come", async || say(&api, &lost, "extend", json!({})).await.0 == 410).await;
    drop(client);
    assert_eq!(say(&api, &lost, "commit", json!({ "result": 5 })).await, (200, json!({ "recorded": true })));
    drop(slow);
    assert_eq!(archived(&database, &second).await.get_i32("result").unwrap(), 5);
    let (status, refused) = say(&api, &taken, "rollback", json!({ "message": "no" })).await;
    assert!(status == 410 && refused["detail"].as_str().unwrap().contains("in another way"), "{refused}");
    assert_eq!(say(&api, &taken, "extend", json!({})).await.0, 410);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_rolled_back_runs_again_as_its_policy_says() {
    let (database, store, _system, api) = begin().await;
    let policy = RetryManyTimes::new(2, Duration::from_secs(3600)).unwrap();
    let id = enqueue(&store, job().retry(&policy)).await;
    let taken = reserve(&api).await;
    say(&api, &taken, "notes", json!({ "checkpoint": [1, 2] })).await;
    let failed = json!({ "class": "smtp", "message": "no line", "trace": "a\nb", "delay": "0s" });
    assert_eq!(say(&api, &taken, "rollback", failed).await.0, 200);
    let taken = reserve(&api).await;
    assert_eq!((&taken["attempt"], &taken["checkpoint"]), (&json!(2), &json!([1, 2])), "{taken}");
    say(&api, &taken, "notes", json!({ "checkpoint": null })).await;
    assert_eq!(say(&api, &taken, "rollback", json!({ "snooze": "0s", "at_most": 1, "message": "busy" })).await.0, 200);
    let taken = reserve(&api).await;
    assert_eq!(taken["checkpoint"], Value::Null, "it is removed");
    assert_eq!(say(&api, &taken, "rollback", json!({ "give_up": true, "class": "gone", "message": "no such address" })).await.0, 200);
    let end = archived(&database, &id).await;
    let classes: Vec<&str> =
        end.get_array("executions").unwrap().iter().map(|ran| ran.as_document().unwrap().get_str("class").unwrap()).collect();
    assert_eq!(classes, ["smtp", "error", "gone"]);
    assert_eq!(end.get_document("last_execution").unwrap().get_str("message").unwrap(), "no such address");
    // Snoozed too often, it has failed.
    let id = enqueue(&store, job()).await;
    let taken = reserve(&api).await;
    assert_eq!(say(&api, &taken, "rollback", json!({ "snooze": "0s", "at_most": 0, "message": "busy" })).await.0, 200);
    assert!(archived(&database, &id).await.get_document("last_execution").unwrap().get_str("message").unwrap().contains("snoozed 0 times"));
}

/// At most once: a job whose client may have begun it does not run again.
#[tokio::test(flavor = "multi_thread")]
async fn the_job_of_a_client_that_vanishes_has_failed_at_the_end_of_its_lease() {
    let (database, store, _system, api) = begin().await;
    let id = enqueue(&store, job()).await;
    let taken = wait_for(SOON, "a job is reserved", async || {
        let (_, answer) = api.post("/work/reserve", &json!({ "classes": ["mail"], "wait": "5s", "lease": "1s" })).await;
        answer["jobs"].get(0).cloned()
    })
    .await;
    let end = archived(&database, &id).await;
    assert_eq!(end.get_document("last_execution").unwrap().get_str("class").unwrap(), "client-vanished", "{end}");
    let (status, late) = say(&api, &taken, "commit", json!({})).await;
    assert!(status == 410 && late["detail"].as_str().unwrap().contains("lease is over"), "{late}");
}

/// A client that closes its connection while it waits takes no job with it. If the answer was on its way, the lease ends.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_goes_while_it_waits_loses_no_job() {
    let (database, store, _system, api) = begin().await;
    let at = api.at.strip_prefix("http://").unwrap().to_owned();
    let body = r#"{"classes": ["mail"], "wait": "50s", "lease": "1s"}"#;
    let head = format!(
        "POST /api/v1/work/reserve HTTP/1.1\r\nHost: {at}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut ids = HashSet::new();
    for round in 0..30_u64 {
        let mut gone = TcpStream::connect(&at).await.unwrap();
        gone.write_all(head.as_bytes()).await.unwrap();
        // Some go while a job is on its way to them.
        recruiter_common::shutdown::pause(Duration::from_millis(round * 7 % 50)).await;
        ids.insert(enqueue(&store, job().retry(RetryForever::new(Duration::from_millis(1)))).await);
        recruiter_common::shutdown::pause(Duration::from_millis(round % 5)).await;
        drop(gone);
    }
    let mut done = HashSet::new();
    while done.len() < ids.len() {
        let taken = reserve(&api).await;
        assert!(done.insert(taken["id"].as_str().unwrap().to_owned()), "{taken} twice");
        assert_eq!(say(&api, &taken, "commit", json!({})).await.0, 200);
    }
    assert_eq!((done, database.count("archived", doc! { "why": "done" }).await), (ids, 30));
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_of_a_killed_process_are_rescued_and_late_ends_are_refused() {
    let (database, store, _system, api) = begin().await;
    let once = enqueue(&store, job()).await;
    let again = enqueue(&store, job().retry(RetryForever::new(Duration::from_millis(1)))).await;
    let taken = [reserve(&api).await, reserve(&api).await];
    api.process.kill();
    let api = Api::serve(&database, &CLIENT).await;
    assert_eq!(archived(&database, &once).await.get_document("last_execution").unwrap().get_str("class").unwrap(), "worker-died");
    let second = reserve(&api).await;
    assert_eq!((second["id"].as_str().unwrap(), &second["attempt"]), (&*again, &json!(2)), "{second}");
    for former in &taken {
        assert_eq!(say(&api, former, "commit", json!({})).await.0, 410);
    }
    assert_eq!(say(&api, &second, "commit", json!({})).await.0, 200);
}

/// It was thought to be dead, and its jobs are elsewhere: the roster and the fence decide.
#[tokio::test(flavor = "multi_thread")]
async fn an_end_after_a_rescue_is_refused() {
    let (database, store, system, api) = begin().await;
    let id = enqueue(&store, job().retry(RetryForever::new(Duration::from_millis(1)))).await;
    let taken = reserve(&api).await;
    api.process.pause();
    drop(system.cleaner);
    let _cleaner = recruiter_tests::processes::Process::on(&database, "recruiter-cleaner", &["--every", "150ms", "--dead-after", "1500ms"]);
    database.until("scheduled", doc! { "_id": id.parse::<ObjectId>().unwrap(), "locked": false }, 1, "it is rescued").await;
    api.process.resume();
    let second = reserve(&api).await;
    assert_eq!((&second["id"], &second["attempt"]), (&json!(id), &json!(2)));
    let (status, refused) = say(&api, &taken, "commit", json!({ "result": "first" })).await;
    assert_eq!(status, 410, "{refused}");
    assert_eq!(say(&api, &second, "commit", json!({ "result": "second" })).await.0, 200);
    assert_eq!(archived(&database, &id).await.get_str("result").unwrap(), "second");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_job_tells_its_client() {
    let (database, store, _system, api) = begin().await;
    let id = enqueue(&store, job()).await;
    let taken = reserve(&api).await;
    let said = super::usual_settings::run("recruiter", &["jobs", "cancel", &id], &[("MONGODB_URI", database.uri())]);
    assert_eq!(said.code, 0, "{}", said.err);
    wait_until(SOON, "the client is told", async || say(&api, &taken, "extend", json!({})).await.1["stop"] == "cancelled").await;
    assert_eq!(say(&api, &taken, "rollback", json!({ "message": "stopped after 3 of 9" })).await.0, 200);
    let end = archived(&database, &id).await;
    assert_eq!(
        (end.get_str("why").unwrap(), end.get_document("last_execution").unwrap().get_str("message").unwrap()),
        ("cancelled", "stopped after 3 of 9")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_answers_those_who_wait_and_lets_clients_end_their_jobs() {
    let (database, store, _system, mut api) = begin().await;
    let id = enqueue(&store, job()).await;
    let taken = reserve(&api).await;
    let waiting = tokio::spawn(answer(api.request(Method::POST, "/work/reserve").json(&json!({ "classes": ["mail"], "wait": "50s" }))));
    wait_until(SOON, "a slot is open", async || database.count("roster", doc! { "free": 1 }).await == 1).await;
    api.process.terminate();
    assert_eq!(waiting.await.unwrap(), (200, json!({ "jobs": [] })));
    let refused = api.post("/work/reserve", &json!({ "classes": ["mail"] })).await;
    assert!(refused.0 == 503 && refused.1["detail"].as_str().unwrap().contains("stops"), "{refused:?}");
    assert_eq!(say(&api, &taken, "commit", json!({ "result": 1 })).await.0, 200);
    assert_eq!(api.process.wait_exit(SOON).await.code(), Some(0));
    assert_eq!(archived(&database, &id).await.get_str("why").unwrap(), "done");
    assert_eq!(database.count("roster", doc! {}).await, 0);
}

/// Limits count the jobs that clients have.
#[tokio::test(flavor = "multi_thread")]
async fn limits_hold_for_clients() {
    let (database, store, _system, api) = begin().await;
    store.limits().set("smtp", Limit::capacity(1)).await.unwrap();
    for _ in 0..3 {
        enqueue(&store, job().limit("smtp")).await;
    }
    let mut seen = HashSet::new();
    for left in [2, 1, 0] {
        let taken = reserve(&api).await;
        assert!(seen.insert(taken["id"].clone()));
        let another = api.post("/work/reserve", &json!({ "classes": ["mail"], "wait": "1s", "most": 5 })).await;
        assert_eq!(another, (200, json!({ "jobs": [] })), "the limit is one");
        wait_until(SOON, "no slot is open", async || database.count("roster", doc! { "free": 0 }).await == 1).await;
        assert_eq!(database.count("scheduled", doc! { "locked": false }).await, left);
        assert_eq!(say(&api, &taken, "commit", json!({})).await.0, 200);
    }
    // Several at once, each once.
    let ids: HashSet<String> = {
        let jobs = (0..20).map(|n| NewJob::of_class("mail", doc! { "n": n }));
        store.enqueue_many(jobs).await.unwrap().iter().map(|job| job.id.to_string()).collect()
    };
    let mut done = HashSet::new();
    while done.len() < ids.len() {
        let (_, several) = api.post("/work/reserve", &json!({ "classes": ["mail"], "wait": "5s", "most": 8 })).await;
        for taken in several["jobs"].as_array().unwrap() {
            assert!(done.insert(taken["id"].as_str().unwrap().to_owned()));
            assert_eq!(say(&api, taken, "commit", json!({})).await.0, 200);
        }
    }
    assert_eq!(done, ids);
}

/// While clients come back soon, jobs are ready for them. When they stay away, others get these.
#[tokio::test(flavor = "multi_thread")]
async fn jobs_ahead_of_clients_that_stay_away_go_to_others() {
    let (database, store, _system, api) = begin().await;
    let other = Api::serve(&database, &CLIENT).await;
    let jobs = (0..400).map(|_| job().retry(RetryForever::new(Duration::from_millis(1))));
    let ids: HashSet<String> = store.enqueue_many(jobs).await.unwrap().iter().map(|job| job.id.to_string()).collect();
    let (mut done, mut ahead) = (HashSet::new(), 0);
    for (api, until) in [(&api, 200), (&other, 400)] {
        while done.len() < until {
            let clients = (0..5).map(async |_| {
                let taken = reserve(api).await;
                assert_eq!(say(api, &taken, "commit", json!({})).await.0, 200);
                taken["id"].as_str().unwrap().to_owned()
            });
            for id in join_all(clients).await {
                assert!(done.insert(id.clone()), "{id} twice");
            }
            ahead += database.count("roster", doc! { "prefetched.0": { "$exists": true } }).await;
        }
    }
    assert!(done == ids && ahead > 0, "{} done, {ahead} times with jobs ahead", done.len());
    let counted = doc! { "$subtract": ["$attempts", { "$ifNull": ["$interruptions", 0] }] };
    let once = doc! { "why": "done", "executions": { "$exists": false }, "$expr": { "$eq": [counted, 1] } };
    assert_eq!(database.count("archived", once).await, 400, "one that was released was not executed");
}

#[tokio::test]
async fn bad_requests_for_work_are_refused() {
    let (database, _store) = prepared().await;
    let api = Api::serve(&database, &CLIENT).await;
    for (body, said) in [
        (json!({}), "at least one class"),
        (json!({ "classes": [] }), "at least one class"),
        (json!({ "classes": [" a"] }), "begins or ends with a blank"),
        (json!({ "classes": ["a"], "groups": [" b"] }), "group"),
        (json!({ "classes": ["a"], "most": 0 }), "from 1 to 100"),
        (json!({ "classes": ["a"], "most": 101 }), "from 1 to 100"),
        (json!({ "classes": ["a"], "lease": "10ms" }), "from 1s to 1d"),
        (json!({ "classes": ["a"], "lease": "2d" }), "from 1s to 1d"),
        (json!({ "classes": ["a"], "wait": "soon" }), "`wait`"),
        (json!({ "classes": ["a"], "colour": 1 }), "unknown field `colour`"),
        (json!({ "classes": "a" }), "expected a sequence"),
    ] {
        let (status, problem) = api.post("/work/reserve", &body).await;
        assert!(status == 422 && problem["detail"].as_str().unwrap().contains(said), "{body}: {problem}");
    }
    for what in ["extend", "notes", "commit", "rollback"] {
        let (status, problem) = api.post(&format!("/work/{}/{what}", "0".repeat(32)), &json!({})).await;
        assert!(status == 410 && problem["detail"].as_str().unwrap().contains("no such reservation"), "{problem}");
    }
    assert_eq!(api.post("/work/x/rollback", &json!({ "snooze": "1s", "give_up": true })).await.0, 422);
    assert_eq!(api.post("/work/x/rollback", &json!({ "at_most": 1 })).await.0, 422);
    assert_eq!(api.post("/work/x/notes", &json!({ "done": 1 })).await.0, 422);
    let viewer = Api::serve(&database, &[]).await;
    assert_eq!(viewer.post("/work/reserve", &json!({ "classes": ["a"] })).await.0, 403);
}
