//! The audit: each change through the API has an entry before it is made, and what came out of it afterwards.

use bson::doc;
use recruiter_common::{
    NewJob,
    store::{ConnectArgs, Store},
};
use recruiter_tests::{
    fail_points::FailPoint,
    http::{Api, answer},
    local::prepared,
    mongo::TestDatabase,
    wait::SOON,
};
use reqwest::{Method, header};
use serde_json::{Value, json};

use super::{super::cli::recruiter, OPEN, tokens};

/// Jobs that wait, of a class that nobody has.
async fn jobs(store: &Store, class: &str, count: i32) -> Vec<String> {
    let jobs = (0..count).map(|n| NewJob::of_class(class, doc! { "n": n }).after(SOON));
    store.enqueue_many(jobs).await.unwrap().iter().map(|job| job.id.to_string()).collect()
}

#[tokio::test]
async fn each_change_is_written_with_who_has_asked_and_what_came_out() {
    let (database, store) = prepared().await;
    let (file, ids) = (tokens(), jobs(&store, "a", 3).await);
    let api = Api::serve(&database, &["--tokens", file.path().to_str().unwrap(), "--anonymous", "operator"]).await;
    let send = async |token: Option<&str>, method: Method, path: &str, body: Option<Value>| {
        let mut request = api.request(method, path);
        if let Some(token) = token {
            request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
        }
        answer(match body {
            Some(body) => request.json(&body),
            None => request,
        })
        .await
        .0
    };
    let one = format!("/jobs/{}", ids[0]);
    let operator = Some("operator");
    // None of these changes something.
    assert_eq!(send(operator, Method::POST, &format!("{one}/cancel?dry_run=true"), None).await, 200);
    assert_eq!(send(operator, Method::POST, "/jobs/cancel?all=true&dry_run=true", None).await, 200);
    assert_eq!(send(Some("client"), Method::POST, &format!("{one}/cancel"), None).await, 403);
    assert_eq!(send(operator, Method::PATCH, &one, Some(json!({ "prio": 1 }))).await, 422);
    assert_eq!(send(operator, Method::POST, "/jobs/cancel", None).await, 400);
    assert_eq!(send(Some("client"), Method::POST, "/jobs", Some(json!({ "class": "b" }))).await, 201, "a job says itself who it is");
    assert_eq!(database.count("audit", doc! {}).await, 0);

    let values = json!({ "priority": 7, "group": "$where" });
    assert_eq!(send(operator, Method::PATCH, &one, Some(values)).await, 200);
    assert_eq!(send(operator, Method::POST, "/jobs/cancel?class=a&message=%24ne", None).await, 200);
    assert_eq!(send(operator, Method::POST, "/jobs/cancel?class=a", None).await, 200);
    let again = json!({ "set": { "secret": "x" }, "again": true });
    assert_eq!(send(None, Method::POST, &format!("{one}/retry"), Some(again)).await, 200);
    assert_eq!(send(None, Method::DELETE, "/jobs/65a1b2c3d4e5f60718293a4b", None).await, 404);
    assert_eq!(send(None, Method::GET, "/audit", None).await, 200);
    assert_eq!(send(Some("viewer"), Method::GET, "/audit", None).await, 403);

    let (_, page) = api.get("/audit?limit=1000").await;
    let entries = page["entries"].as_array().unwrap();
    assert_eq!((entries.len(), &page["next"]), (5, &Value::Null), "{page}");
    let part = |field: &str| entries.iter().rev().map(|entry| entry[field].clone()).collect::<Vec<_>>();
    let actions = ["jobs.change", "jobs.cancel", "jobs.cancel", "jobs.retry", "jobs.delete"];
    assert_eq!(part("action"), actions);
    assert_eq!(part("caller"), [json!("operator"), json!("operator"), json!("operator"), Value::Null, Value::Null]);
    assert_eq!(part("address"), ["127.0.0.1"; 5]);
    let target = part("target");
    assert_eq!(target[0], json!({ "job": ids[0], "priority": "7", "group": "$where" }));
    assert_eq!(target[1]["filter"], json!({ "class": "a", "message": "$ne" }));
    assert_eq!(target[3], json!({ "job": ids[0], "set": ["secret"], "again": true }), "not the values");
    let outcome = part("outcome");
    assert_eq!(outcome[0], json!({ "outcome": "changed" }));
    assert_eq!((&outcome[1]["matched"], &outcome[2]), (&json!(0), &json!({ "matched": 3, "outcomes": { "cancelled": 3 } })));
    assert_eq!((&outcome[3]["outcome"], outcome[3]["new_id"].is_string()), (&json!("enqueued-again"), true));
    assert_eq!(outcome[4]["status"], 404);
    assert!(entries.iter().all(|entry| entry["at"]["$date"].is_string() && entry["ended_at"]["$date"].is_string()));

    // By pages, and on the command line.
    let (_, first) = api.get("/audit?limit=3").await;
    let (_, rest) = api.get(&format!("/audit?limit=3&after={}", first["next"].as_str().unwrap())).await;
    let paged: Vec<&Value> = [&first, &rest].iter().flat_map(|page| page["entries"].as_array().unwrap()).collect();
    assert_eq!((paged, &rest["next"]), (entries.iter().collect(), &Value::Null));
    let said = recruiter(&database, &["audit", "--json"]).succeeded();
    let lines: Vec<Value> = said.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(&lines, entries);
    let said = recruiter(&database, &["audit", "--limit", "1", "--after", lines[3]["id"].as_str().unwrap()]).succeeded();
    assert!(said.out.contains("jobs.change") && !said.out.contains("jobs.cancel") && said.out.contains("operator"), "{}", said.out);
    for (path, said) in [("/audit?limit=0", "from 1 to 1000"), ("/audit?after=x", "not an id"), ("/audit?x=1", "no parameter `x`")] {
        let (status, problem) = api.get(path).await;
        assert!(status == 400 && problem["detail"].as_str().unwrap().contains(said), "{problem}");
    }
    let kept = database.raw("audit").find_one(doc! {}).await.unwrap().unwrap();
    let days = (kept.get_datetime("expires_at").unwrap().to_chrono() - kept.get_datetime("at").unwrap().to_chrono()).num_days();
    assert_eq!(days, 400);
}

/// A deletion needs no other insert, and no other update.
#[tokio::test(flavor = "multi_thread")]
async fn no_change_is_made_that_the_audit_does_not_know() {
    let database = TestDatabase::of_its_own().await;
    let store = Store::connect(&ConnectArgs::to(database.uri()), "test").await.unwrap();
    jobs(&store, "a", 2).await;
    let api = Api::serve(&database, &OPEN).await;
    assert_eq!(answer(api.request(Method::POST, "/jobs/cancel?class=a")).await.0, 200);
    let fault = FailPoint::new("recruiter web", &["insert"]).error_code(189).arm(database.uri()).await;
    assert_eq!(answer(api.request(Method::POST, "/jobs/delete?class=a")).await.0, 503);
    assert_eq!(database.count("archived", doc! {}).await, 2, "nothing is deleted");
    drop(fault);
    let fault = FailPoint::new("recruiter web", &["update"]).error_code(189).arm(database.uri()).await;
    let (status, deleted) = answer(api.request(Method::POST, "/jobs/delete?class=a")).await;
    assert_eq!((status, &deleted["matched"]), (200, &json!(2)), "it has happened, and is said");
    drop(fault);
    assert_eq!(database.count("archived", doc! {}).await, 0);
    let (_, page) = api.get("/audit").await;
    let last = &page["entries"][0];
    assert_eq!((&last["action"], &last["outcome"]), (&json!("jobs.delete"), &Value::Null), "what came out is not known: {last}");
    assert!(recruiter(&database, &["audit"]).succeeded().out.contains("not known"));
    assert!(api.process.stderr().contains("the audit does not say what came out"), "{}", api.process.stderr());
}
