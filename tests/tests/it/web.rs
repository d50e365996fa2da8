//! The HTTP API: a life of jobs, roles, hostile requests, and a MongoDB that is away.
//!
//! | file | content |
//! |---|---|
//! | `audit` | what was done through the API |
//! | `settings` | limits, pauses, groups, schedules, workers and graphs, read and changed |
//! | `streams` | events and messages as server-sent events |

mod audit;
mod settings;
mod streams;

use std::{collections::BTreeSet, time::Duration};

use bson::{doc, oid::ObjectId};
use recruiter_common::NewJob;
use recruiter_tests::{
    fail_points::FailPoint,
    http::{Api, answer},
    local::prepared,
    mongo::TestDatabase,
    processes::{Setup, System},
    wait::{SOON, wait_until},
};
use reqwest::{Method, header};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tempfile::NamedTempFile;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

/// Everyone may do everything.
const OPEN: [&str; 2] = ["--anonymous", "operator"];
/// The three roles.
const ROLES: [&str; 3] = ["viewer", "client", "operator"];

/// A file with a token for each role, whose text is the name of the role.
fn tokens() -> NamedTempFile {
    let file = NamedTempFile::new().unwrap();
    let token = |role: &str| format!("[tokens.{role}]\nrole = \"{role}\"\nsha256 = \"{}\"\n", hex::encode(Sha256::digest(role)));
    std::fs::write(file.path(), ROLES.map(token).concat()).unwrap();
    file
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_is_enqueued_waited_for_found_and_changed() {
    let (database, _store) = prepared().await;
    let _system = System::start(&database, Setup::default());
    let api = Api::serve(&database, &OPEN).await;
    let (status, job) = api.post("/jobs", &json!({ "class": "noop", "parameters": { "n": 7 }, "tags": ["t"] })).await;
    assert_eq!((status, &job["outcome"]), (201, &json!("new")), "{job}");
    let id = job["id"].as_str().unwrap();
    let (status, end) = api.get(&format!("/jobs/{id}/end?timeout=50s")).await;
    assert_eq!((status, &end["state"], &end["id"]), (200, &json!("done"), &json!(id)), "{end}");
    let again = api.post("/jobs", &json!({ "class": "noop", "parameters": {}, "id": id })).await;
    assert_eq!(again, (200, json!({ "id": id, "outcome": "known-id" })));
    let (_, found) = api.get("/jobs?state=done&tag=t").await;
    assert_eq!(
        (found["jobs"][0]["id"].as_str(), found["jobs"].as_array().map(Vec::len), &found["next"]),
        (Some(id), Some(1), &Value::Null)
    );
    let (_, shown) = api.get(&format!("/jobs/{id}")).await;
    assert_eq!(
        (&shown["workable"]["parameters"]["n"], &shown["held"], &shown["state"]),
        (&json!(7), &Value::Null, &json!("done")),
        "{shown}"
    );
    let (_, retried) = api.post(&format!("/jobs/{id}/retry"), &json!({ "set": { "n": 8 }, "again": true })).await;
    let new = retried["new_id"].as_str().unwrap();
    assert_eq!(retried["outcome"], "enqueued-again");
    database.until("archived", doc! { "_id": new.parse::<ObjectId>().unwrap(), "workable.parameters.n": 8 }, 1, "the new one").await;
    assert_eq!(api.post(&format!("/jobs/{id}/retry"), &json!({})).await.0, 409, "it was retried before");
    let deleted = answer(api.request(Method::DELETE, &format!("/jobs/{id}?dry_run=true"))).await;
    assert_eq!((deleted.0, &deleted.1["outcome"]), (200, &json!("deleted")));
    assert_eq!(api.get(&format!("/jobs/{id}")).await.0, 200, "a dry run");
    assert_eq!(answer(api.request(Method::DELETE, &format!("/jobs/{id}"))).await.0, 200);
    assert_eq!(api.get(&format!("/jobs/{id}")).await.0, 404);
    assert_eq!(api.get(&format!("/jobs/{id}/end")).await.0, 404);
}

#[tokio::test]
async fn jobs_get_the_defaults_that_workers_have_declared_a_second_before() {
    let database = TestDatabase::of_its_own().await;
    recruiter_tests::local::store(&database).await;
    let api = Api::serve(&database, &OPEN).await;
    let priority = async || {
        let (status, job) = api.post("/jobs", &json!({ "class": "mail" })).await;
        assert_eq!(status, 201, "{job}");
        let id: ObjectId = job["id"].as_str().unwrap().parse().unwrap();
        database.only("scheduled", doc! { "_id": id }).await.get_i32("priority").unwrap()
    };
    database.raw("metadata").insert_one(doc! { "_id": "class:mail", "priority": 8 }).await.unwrap();
    assert_eq!(priority().await, 8);
    let (changed, to) = (doc! { "_id": "class:mail" }, doc! { "$set": { "priority": 2 } });
    database.raw("metadata").update_one(changed, to).await.unwrap();
    wait_until(SOON, "the next defaults", async || priority().await == 2).await;
    // A job without its defaults would be another one.
    let fault = FailPoint::new("recruiter web", &["find"]).error_code(189).arm(database.uri()).await;
    recruiter_common::shutdown::pause(Duration::from_millis(1_100)).await;
    assert_eq!(api.post("/jobs", &json!({ "class": "mail" })).await.0, 503);
    drop(fault);
    assert_eq!(priority().await, 2, "no error is kept");
}

#[tokio::test]
async fn waiting_jobs_are_explained_changed_and_cancelled() {
    let (database, store) = prepared().await;
    let api = Api::serve(&database, &OPEN).await;
    let ids: Vec<String> = {
        let jobs = (0..5).map(|n| NewJob::of_class("nobody-has-it", doc! { "n": n }).after(SOON));
        store.enqueue_many(jobs).await.unwrap().iter().map(|job| job.id.to_string()).collect()
    };
    let one = format!("/jobs/{}", ids[0]);
    assert_eq!(api.get(&format!("{one}/end?timeout=10ms")).await.0, 202, "not yet");
    assert_eq!(api.get(&format!("{one}/why")).await.1["reason"], "not-due", "it waits for its date");
    let values = json!({ "priority": 9, "group": "g", "after": "0s" });
    let changed = answer(api.request(Method::PATCH, &one).json(&values)).await;
    assert_eq!((changed.0, &changed.1["outcome"]), (200, &json!("changed")), "{changed:?}");
    let (_, shown) = api.get(&one).await;
    assert_eq!((&shown["priority"], &shown["group"]), (&json!(9), &json!("g")));
    assert_eq!(shown["held"]["reason"], "no-recruiter", "{shown}");
    // By pages.
    let mut listed = BTreeSet::new();
    let mut path = "/jobs?limit=2".to_owned();
    loop {
        let (_, page) = api.get(&path).await;
        listed.extend(page["jobs"].as_array().unwrap().iter().map(|job| job["id"].as_str().unwrap().to_owned()));
        let Some(next) = page["next"].as_str() else { break };
        path = format!("/jobs?limit=2&after={next}");
    }
    assert_eq!(listed, ids.iter().cloned().collect());
    let (_, counted) = api.post("/jobs/cancel?class=nobody-has-it&dry_run=true", &Value::Null).await;
    assert_eq!(counted, json!({ "matched": 5, "outcomes": { "cancelled": 5 }, "dry_run": true }));
    assert_eq!(database.count("scheduled", doc! {}).await, 5);
    assert_eq!(answer(api.request(Method::POST, &format!("{one}/cancel"))).await.1["outcome"], "cancelled");
    assert_eq!(answer(api.request(Method::POST, &format!("{one}/cancel"))).await.0, 409, "it is archived");
    let (_, rest) = answer(api.request(Method::POST, "/jobs/cancel?all=true")).await;
    assert_eq!(rest["outcomes"], json!({ "cancelled": 4 }));
    assert_eq!(answer(api.request(Method::POST, "/jobs/delete?why=cancelled")).await.1["matched"], 5);
    assert_eq!(database.count("archived", doc! {}).await, 0);
}

#[tokio::test]
async fn bad_requests_are_refused_with_what_to_do_and_change_nothing() {
    let (database, _store) = prepared().await;
    let api = Api::serve(&database, &OPEN).await;
    let id = "65a1b2c3d4e5f60718293a4b";
    for (path, status, said) in [
        ("/jobs/xyz".to_owned(), 400, "not a job id"),
        (format!("/jobs/{id}"), 404, "no job has the id"),
        (format!("/jobs/{id}?x=1"), 400, "no parameter `x`"),
        ("/jobs?colour=red".into(), 400, "unknown field `colour`"),
        ("/jobs?state=asleep".into(), 400, "is no state"),
        ("/jobs?since=noon".into(), 400, "neither an instant nor a duration"),
        ("/jobs?limit=0".into(), 400, "from 1 to 1000"),
        ("/jobs?limit=100000".into(), 400, "from 1 to 1000"),
        ("/jobs?class=a&class=b".into(), 400, "duplicate field `class`"),
        (format!("/jobs/{id}/end?timeout=soon"), 400, "not a duration"),
        ("/nothing".into(), 404, "openapi.json"),
    ] {
        let (got, problem) = api.get(&path).await;
        assert!(got == status && problem["detail"].as_str().unwrap().contains(said), "{path}: {problem}");
    }
    let deep = format!(r#"{{"class": "c", "parameters": {{"a": {}1{}}}}}"#, "[".repeat(10_000), "]".repeat(10_000));
    let large = format!(r#"{{"class": "c", "parameters": {{"a": "{}"}}}}"#, "x".repeat(5 << 20));
    let huge = "x".repeat(20 << 20);
    for (content, body, status, said) in [
        ("application/json", r#"{"group": "g"}"#, 422, "`class` is missing"),
        ("application/json", r#"{"class": "c", "klass": 1}"#, 422, "unknown field `klass`"),
        ("application/json", r#"{"class": "c""#, 422, "EOF"),
        ("application/json", "", 422, "one JSON object"),
        ("application/json", "[1]", 422, "one JSON object"),
        ("application/json", r#"{"class": "c", "priority": 12}"#, 422, "from 0 to 9"),
        ("application/json", r#"{"class": "c", "retry_policy": {"class": "Mine"}}"#, 422, "custom_policy=true"),
        ("application/json", &*deep, 422, "recursion limit"),
        ("application/json", &*large, 422, "more than the maximum"),
        ("application/json", &*huge, 413, "is larger than"),
        ("text/plain", r#"{"class": "c"}"#, 415, "Content-Type"),
        ("", r#"{"class": "c"}"#, 415, "Content-Type"),
    ] {
        let mut request = api.request(Method::POST, "/jobs").body(body.to_owned());
        if !content.is_empty() {
            request = request.header(header::CONTENT_TYPE, content);
        }
        let (got, problem) = answer(request).await;
        assert!(got == status && problem["detail"].as_str().unwrap().contains(said), "{body:.80}: {problem}");
    }
    let bytes = api.request(Method::POST, "/jobs").header(header::CONTENT_TYPE, "application/json").body(vec![b'{', 0xff]);
    assert_eq!(answer(bytes).await.0, 400, "no UTF-8");
    for path in ["/jobs/cancel", "/jobs/retry?all=true&class=c", "/jobs/delete"] {
        assert_eq!(answer(api.request(Method::POST, path)).await.0, 400, "{path}");
    }
    assert_eq!(answer(api.request(Method::PUT, "/jobs")).await.0, 405);
    assert_eq!(database.count("scheduled", doc! {}).await, 0);
}

/// The paths and methods are those of the description, so that none is left out.
#[tokio::test]
async fn a_token_may_do_what_its_role_says() {
    let (database, _store) = prepared().await;
    let file = tokens();
    let api = Api::serve(&database, &["--tokens", file.path().to_str().unwrap()]).await;
    assert_eq!(api.get("/jobs").await.0, 401, "without a token");
    let with = |token: &str, method: &str, path: &str| {
        let request = api.request(method.to_uppercase().parse().unwrap(), path);
        // No stream begins behind this event.
        request.header(header::AUTHORIZATION, format!("Bearer {token}")).header("Last-Event-ID", "x")
    };
    for wrong in ["", "nobody", "viewer2", &"x".repeat(4_000)] {
        assert_eq!(answer(with(wrong, "get", "/jobs")).await.0, 401, "{wrong:.80}");
    }
    let (_, described) = answer(with("viewer", "get", "/openapi.json")).await;
    let mut refused = [0; 3];
    for (path, methods) in described["paths"].as_object().unwrap() {
        let path = path
            .strip_prefix("/api/v1")
            .unwrap()
            .replace("{id}", "65a1b2c3d4e5f60718293a4b")
            .replace("{name}", "a")
            .replace("{reservation}", "x")
            .replace("{what}", "group:a");
        for method in methods.as_object().unwrap().keys() {
            let statuses = [with("viewer", method, &path), with("client", method, &path), with("operator", method, &path)];
            for (role, request) in statuses.into_iter().enumerate() {
                let (status, problem) = answer(request).await;
                assert!(
                    ![401, 405].contains(&status) && problem["detail"] != "there is nothing at this path",
                    "{method} {path}: {problem}"
                );
                refused[role] += usize::from(status == 403);
            }
            assert!(method != "get" || refused == [refused[0], refused[1], 0], "{method} {path}");
        }
    }
    assert_eq!(refused, [31, 23, 0], "what changes something is refused");
    for (role, status) in ROLES.into_iter().zip([403, 201, 201]) {
        let request = with(role, "post", "/jobs").json(&json!({ "class": "c" }));
        assert_eq!(answer(request).await.0, status, "{role}");
    }
    assert_eq!(database.count("scheduled", doc! {}).await, 2);
    assert!(!api.process.stderr().contains("viewer2"), "a token is not in the log");
}

#[tokio::test]
async fn a_page_of_another_site_is_refused() {
    let (database, _store) = prepared().await;
    let api = Api::serve(&database, &OPEN).await;
    let own = api.at.strip_prefix("http://").unwrap();
    let sent = async |headers: &[(&'static str, &str)]| {
        let mut request = api.request(Method::POST, "/jobs").json(&json!({ "class": "c" }));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        answer(request).await.0
    };
    for (headers, status) in [
        (&[][..], 201),
        (&[("origin", &*api.at)], 201),
        (&[("sec-fetch-site", "same-origin")], 201),
        (&[("origin", "http://example.org")], 403),
        (&[("origin", "null")], 403),
        (&[("sec-fetch-site", "cross-site")], 403),
        (&[("sec-fetch-site", "same-site")], 403),
        (&[("host", "example.org:7420"), ("origin", "http://example.org:7420")], 403),
        (&[("host", "example.org")], 403),
        (&[("host", own)], 201),
    ] {
        assert_eq!(sent(headers).await, status, "{headers:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn many_jobs_are_enqueued_as_lines_and_the_bad_line_is_named() {
    let (database, _store) = prepared().await;
    let api = Api::serve(&database, &OPEN).await;
    let send = async |lines: String, query: &str| -> Vec<Value> {
        let request = api.request(Method::POST, &format!("/jobs/lines{query}")).header(header::CONTENT_TYPE, "application/x-ndjson");
        let answered = request.body(lines).send().await.unwrap();
        assert_eq!(answered.status(), 200);
        answered.text().await.unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let good: String = (0..2_500).map(|n| format!("{{\"class\": \"c\", \"parameters\": {{\"n\": {n}}}}}\n")).collect();
    let said = send(good.clone(), "").await;
    assert_eq!(said.last().unwrap(), &json!({ "line": 2_500, "enqueued": 2_500, "done": true }));
    assert_eq!(said.len(), 4, "after each batch, and at the end: {said:?}");
    assert_eq!(database.count("scheduled", doc! {}).await, 2_500);
    let bad = format!("{good}{{\"class\": 5}}\n{good}");
    let said = send(bad.clone(), "?skip=2499").await;
    let last = said.last().unwrap();
    assert_eq!((&last["line"], &last["enqueued"], &last["error"]["line"]), (&json!(2_500), &json!(1), &json!(2_501)), "{last}");
    assert_eq!(last["error"]["status"], 422, "{last}");
    assert!(last["error"]["detail"].as_str().unwrap().contains("expected a string"), "{last}");
    assert_eq!(database.count("scheduled", doc! {}).await, 2_501);
    // Without a newline at the end, with blank lines, refused by MongoDB's side: too large.
    let large = "x".repeat(5 << 20);
    let said =
        send(format!("{{\"class\": \"a\"}}\n\n{{\"class\": \"b\", \"parameters\": {{\"x\": \"{large}\"}}}}\n{{\"class\": \"c\"}}"), "")
            .await;
    let last = said.last().unwrap();
    assert_eq!((&last["enqueued"], &last["error"]["line"]), (&json!(1), &json!(3)), "{last}");
    let said = send("{\"class\": \"last\"}".into(), "").await;
    assert_eq!(said.last().unwrap()["enqueued"], 1);
    assert_eq!(database.count("scheduled", doc! { "workable.class": "last" }).await, 1);
}

#[tokio::test]
async fn slow_clients_delay_no_other() {
    let (database, _store) = prepared().await;
    let api = Api::serve(&database, &OPEN).await;
    let at = api.at.strip_prefix("http://").unwrap();
    let mut slow = Vec::new();
    for _ in 0..200 {
        let mut stream = TcpStream::connect(at).await.unwrap();
        stream.write_all(b"GET /api/v1/jobs HTTP/1.1\r\nHost: ").await.unwrap();
        slow.push(stream);
    }
    assert_eq!(api.get("/jobs").await.0, 200);
    let mut stopped = TcpStream::connect(at).await.unwrap();
    let head = format!("POST /api/v1/jobs HTTP/1.1\r\nHost: {at}\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{{");
    stopped.write_all(head.as_bytes()).await.unwrap();
    let mut answered = String::new();
    stopped.read_to_string(&mut answered).await.unwrap_or_default();
    assert!(answered.starts_with("HTTP/1.1 408"), "{answered}");
    assert_eq!(api.get("/jobs").await.0, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_waits_for_requests_that_have_begun_and_mongodb_that_is_away_is_said() {
    let database = TestDatabase::of_its_own().await;
    recruiter_tests::local::store(&database).await;
    let mut api = Api::serve(&database, &OPEN).await;
    let fault = FailPoint::new("recruiter web", &["find"]).error_code(189).arm(database.uri()).await;
    let response = api.request(Method::GET, "/jobs").send().await.unwrap();
    assert_eq!((response.status().as_u16(), response.headers()[header::RETRY_AFTER].as_bytes()), (503, &b"1"[..]));
    drop(fault);
    assert_eq!(api.get("/jobs").await.0, 200);
    let (_, job) = api.post("/jobs", &json!({ "class": "nobody-has-it" })).await;
    let wait = api.request(Method::GET, &format!("/jobs/{}/end?timeout=3s", job["id"].as_str().unwrap()));
    let waiting = tokio::spawn(answer(wait));
    recruiter_common::shutdown::pause(Duration::from_millis(500)).await;
    api.process.terminate();
    assert_eq!(waiting.await.unwrap().0, 202, "it is answered");
    assert_eq!(api.process.wait_exit(SOON).await.code(), Some(0));
}

#[test]
fn the_network_may_not_change_jobs_without_a_token() {
    let run = |args: &[&str]| {
        super::usual_settings::run(
            "recruiter",
            &[&["web"], args].concat(),
            &[("MONGODB_URI", "mongodb://127.0.0.1:1/x"), ("RECRUITER_CONNECT_TIMEOUT", "1ms")],
        )
    };
    let refused = run(&["--listen", "0.0.0.0:0", "--anonymous", "client"]);
    assert!(refused.code == 2 && refused.err.contains("--tokens"), "{}", refused.err);
    assert_eq!(run(&["--listen", "0.0.0.0:0"]).code, 69, "only to be read");
    let file = NamedTempFile::new().unwrap();
    let path = file.path().to_str().unwrap();
    for (text, said) in [
        ("x = 1", "unknown field `x`"),
        ("[tokens.a]\nrole = \"boss\"\nsha256 = \"00\"", "unknown variant `boss`"),
        ("[tokens.a]\nrole = \"viewer\"\nsha256 = \"00\"", "64 hexadecimal digits"),
        ("[tokens.a]\nrole = \"viewer\"\n", "missing field `sha256`"),
        ("[tokens", "TOML parse error"),
    ] {
        std::fs::write(path, text).unwrap();
        let refused = run(&["--tokens", path]);
        assert!(refused.code == 78 && refused.err.contains(said) && refused.err.contains(path), "{text}: {}", refused.err);
    }
    let same = "0".repeat(64);
    std::fs::write(path, ["a", "b"].map(|name| format!("[tokens.{name}]\nrole = \"viewer\"\nsha256 = \"{same}\"\n")).concat()).unwrap();
    assert!(run(&["--tokens", path]).err.contains("are the same"));
    let nowhere = run(&["--tokens", "/nonexistent"]);
    assert!(nowhere.code == 78 && nowhere.err.contains("/nonexistent"), "{}", nowhere.err);
}
