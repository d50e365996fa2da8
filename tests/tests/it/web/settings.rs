//! Limits, pauses, groups, schedules, workers and graphs: read as the commands show them, and changed.

use std::collections::HashSet;

use bson::{doc, oid::ObjectId};
use recruiter_common::{
    NewJob,
    graphs::Graph,
    store::{ConnectArgs, Store},
};
use recruiter_tests::{
    fail_points::FailPoint,
    http::{Api, answer},
    local::prepared,
    mongo::TestDatabase,
    processes::Process,
    wait::{SOON, wait_until},
};
use reqwest::{Method, header};
use serde_json::{Value, json};

use super::{super::cli::recruiter, OPEN};

const ID: &str = "65a1b2c3d4e5f60718293a4b";

async fn send(api: &Api, method: Method, path: &str, body: &Value) -> (u16, Value) {
    let request = api.request(method, path);
    answer(if *body == Value::Null { request } else { request.json(body) }).await
}

/// What a command writes with `--json`.
fn command(database: &TestDatabase, args: &[&str]) -> Vec<Value> {
    let said = recruiter(database, &[args, &["--json"]].concat()).succeeded();
    said.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[tokio::test]
async fn limits_pauses_and_groups_are_changed_and_shown_as_by_the_commands() {
    let (database, store) = prepared().await;
    let api = Api::serve(&database, &OPEN).await;
    let named = |name: &str, outcome: &str, dry_run: bool| (200, json!({ "name": name, "outcome": outcome, "dry_run": dry_run }));
    let limit = json!({ "capacity": 3, "rate": "100/1s burst 20", "most_waiting": 50 });
    assert_eq!(send(&api, Method::PUT, "/limits/customer:17", &limit).await, named("customer:17", "set", false));
    assert_eq!(send(&api, Method::PUT, "/limits/@mail", &json!({ "capacity": 1 })).await, named("@mail", "set", false));
    assert_eq!(send(&api, Method::PUT, "/limits/customer:*", &json!({ "rate": "5/1m" })).await.0, 200);
    NewJob::of_class("a", doc! {}).limit("customer:17").enqueue(&store).await.unwrap();
    let (_, listed) = api.get("/limits").await;
    assert_eq!(listed, json!({ "limits": command(&database, &["limits", "list"]), "invalid": [] }));
    let (_, shown) = api.get("/limits/customer:17").await;
    assert_eq!(json!([shown]), json!(command(&database, &["limits", "show", "customer:17"])));
    assert_eq!((&shown["capacity"], &shown["waiting"], &shown["holders"]), (&json!(3), &json!(1), &json!([])), "{shown}");
    assert_eq!(api.get("/limits/nothing").await.1["is_defined"], false);
    assert_eq!(send(&api, Method::DELETE, "/limits/@mail?dry_run=true", &Value::Null).await, named("@mail", "removed", true));
    assert_eq!(send(&api, Method::DELETE, "/limits/@mail", &Value::Null).await, named("@mail", "removed", false));
    assert_eq!(send(&api, Method::DELETE, "/limits/@mail", &Value::Null).await.0, 404);

    // The key of a line may have any character.
    for (path, name) in [("group:mail", "group:mail"), ("line:a%2Fb%20%24", "line:a/b $"), ("everything", "everything")] {
        let path = format!("/pauses/{path}");
        assert_eq!(send(&api, Method::PUT, &path, &json!({ "reason": "<b>" })).await, named(name, "paused", false));
        assert_eq!(send(&api, Method::PUT, &path, &Value::Null).await, named(name, "paused-before", false));
    }
    let (_, paused) = api.get("/pauses").await;
    assert_eq!(paused["pauses"], json!(command(&database, &["pauses"])));
    let first = &paused["pauses"][0];
    assert_eq!((&first["reason"], &first["by"]), (&json!("<b>"), &json!("127.0.0.1")), "who asks is known, and not said");
    assert_eq!(send(&api, Method::DELETE, "/pauses/line:a%2Fb%20%24", &Value::Null).await, named("line:a/b $", "resumed", false));
    assert_eq!(send(&api, Method::DELETE, "/pauses/class:x", &Value::Null).await, named("class:x", "not-paused", false));

    let group = json!({ "most_waiting": 9, "weight": 2.5, "ageing": "10m", "maintenance": ["02:00-03:00 Europe/Berlin"] });
    let (status, changed) = send(&api, Method::PATCH, "/groups/mail", &group).await;
    let mut expected = group.clone();
    expected["name"] = json!("mail");
    assert_eq!((status, &changed), (200, &expected));
    let (_, listed) = api.get("/groups").await;
    assert_eq!(listed, json!({ "groups": command(&database, &["groups", "list"]), "invalid": [] }));
    let (_, changed) = send(&api, Method::PATCH, "/groups/mail", &json!({ "weight": null, "maintenance": null })).await;
    assert_eq!(changed, json!({ "name": "mail", "most_waiting": 9, "ageing": "10m" }), "what is not given stays");
    let (_, stats) = api.get("/stats?overdue_after=1s").await;
    assert_eq!((&stats["total"]["queued"], stats["held"].is_array()), (&json!(1), true), "{stats}");
    let actions: Vec<String> =
        database.raw("audit").distinct("action", doc! {}).await.unwrap().iter().map(|action| action.as_str().unwrap().to_owned()).collect();
    assert_eq!(actions, ["groups.set", "limits.remove", "limits.set", "pauses.add", "pauses.remove"]);
}

#[tokio::test]
async fn schedules_are_put_paused_run_and_removed() {
    let (database, _store) = prepared().await;
    let api = Api::serve(&database, &OPEN).await;
    let schedule = json!({ "cron": "0 3 * * *", "zone": "Europe/Berlin", "overlap": "skip", "namespace": "shop",
        "job": { "class": "report", "parameters": { "kind": "daily" }, "group": "reports" } });
    let put = async |query: &str, schedule: &Value| send(&api, Method::PUT, &format!("/schedules/a%20b{query}"), schedule).await;
    assert_eq!(put("?dry_run=true", &schedule).await, (200, json!({ "name": "a b", "outcome": "created", "dry_run": true })));
    assert_eq!(api.get("/schedules").await.1, json!({ "schedules": [] }));
    assert_eq!(put("", &schedule).await.1["outcome"], "created");
    assert_eq!(put("", &schedule).await.1["outcome"], "unchanged");
    let mut other = schedule.clone();
    other["namespace"] = json!("elsewhere");
    let (status, problem) = put("", &other).await;
    assert!(status == 409 && problem["detail"].as_str().unwrap().contains("namespace `shop`"), "{problem}");
    assert_eq!(api.get("/schedules").await.1["schedules"], json!(command(&database, &["schedules", "list"])));
    let (_, shown) = api.get("/schedules/a%20b").await;
    assert_eq!(json!([shown]), json!(command(&database, &["schedules", "show", "a b"])));
    assert_eq!((&shown["state"], shown["next_runs"].as_array().map(Vec::len)), (&json!("active"), Some(5)));
    let post = async |what: &str, body: &Value| send(&api, Method::POST, &format!("/schedules/a%20b/{what}"), body).await.1;
    assert_eq!(post("pause", &json!({ "reason": "holidays" })).await["outcome"], "paused");
    assert_eq!(post("pause", &Value::Null).await["outcome"], "paused-before");
    assert_eq!(api.get("/schedules/a%20b").await.1["paused"]["reason"], "holidays");
    let job = post("run", &Value::Null).await["id"].as_str().unwrap().to_owned();
    assert_eq!(database.count("scheduled", doc! { "_id": job.parse::<ObjectId>().unwrap(), "workable.class": "report" }).await, 1);
    assert_eq!(post("resume", &Value::Null).await["outcome"], "resumed");
    assert_eq!(post("resume", &Value::Null).await["outcome"], "not-paused");
    // Parameters are redacted.
    recruiter(&database, &["redaction", "set", "report"]).succeeded();
    for path in ["/schedules", "/schedules/a%20b"] {
        assert!(!api.get(path).await.1.to_string().contains("daily"), "{path}");
    }
    assert_eq!(send(&api, Method::DELETE, "/schedules/a%20b?dry_run=true", &Value::Null).await.1["dry_run"], true);
    assert_eq!(send(&api, Method::DELETE, "/schedules/a%20b", &Value::Null).await.1["outcome"], "removed");
    for (method, path) in [
        (Method::DELETE, "/schedules/a%20b"),
        (Method::GET, "/schedules/a%20b"),
        (Method::POST, "/schedules/a%20b/pause"),
        (Method::POST, "/schedules/a%20b/resume"),
        (Method::POST, "/schedules/a%20b/run"),
    ] {
        assert_eq!(send(&api, method.clone(), path, &Value::Null).await.0, 404, "{method} {path}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_are_quieted_and_stopped_and_graphs_cancelled_and_retried() {
    let (database, store) = prepared().await;
    let api = Api::serve(&database, &OPEN).await;
    let mut worker = Process::on(&database, "recruiter-worker", &["--builtins"]);
    database.until("roster", doc! { "available": true }, 1, "the worker is there").await;
    let is_available = async || api.get("/workers").await.1["workers"][0]["state"] == "available";
    wait_until(SOON, "it is available", is_available).await;
    let (_, listed) = api.get("/workers").await;
    let (id, leader) = (listed["workers"][0]["id"].clone(), &listed["leader"]);
    assert_eq!((&listed["workers"][0]["state"], leader), (&json!("available"), &Value::Null), "{listed}");
    let post = async |what: &str, body: &Value| send(&api, Method::POST, &format!("/workers/{what}"), body).await;
    let (_, dry) = post("stop?dry_run=true", &json!({ "all": true })).await;
    assert_eq!((&dry["outcomes"][0]["outcome"], &dry["outcomes"][0]["id"], &dry["dry_run"]), (&json!("done"), &id, &json!(true)), "{dry}");
    let (_, quiet) = post("quiet", &json!({ "ids": [id, ID] })).await;
    let outcomes: Vec<&Value> = quiet["outcomes"].as_array().unwrap().iter().map(|outcome| &outcome["outcome"]).collect();
    assert_eq!(outcomes, ["done", "gone"]);
    let entry = database.only("audit", doc! { "action": "workers.quiet" }).await;
    assert_eq!(entry.get_document("outcome").unwrap(), &doc! { "matched": 2_i64, "outcomes": { "done": 1_i64, "gone": 1_i64 } });
    let by = database.only("roster", doc! { "wanted": "quiet" }).await;
    assert_eq!(by.get_str("wanted_by").unwrap(), "127.0.0.1");
    let host = json!({ "host": by.get_str("hostname").unwrap() });
    assert_eq!(post("resume", &host).await.1["outcomes"][0]["outcome"], "done");
    assert_eq!(post("resume", &json!({ "host": "nowhere" })).await.0, 404);
    assert_eq!(post("stop", &json!({ "all": true })).await.0, 200);
    assert_eq!(worker.wait_exit(SOON).await.code(), Some(0));

    let mut graph = Graph::new();
    let first = graph.add(NewJob::of_class("a", doc! {}));
    graph.add(NewJob::of_class("b", doc! {}).waits_for(first));
    let path = format!("/graphs/{}", graph.id());
    graph.enqueue(&store).await.unwrap();
    let (_, shown) = api.get(&path).await;
    assert_eq!(shown["jobs"], json!(command(&database, &["graph", "show", shown["id"].as_str().unwrap()])));
    assert_eq!(shown["jobs"].as_array().map(Vec::len), Some(2));
    let (_, dry) = send(&api, Method::POST, &format!("{path}/cancel?dry_run=true"), &Value::Null).await;
    assert_eq!((dry["jobs"].as_array().map(Vec::len), database.count("archived", doc! {}).await), (Some(2), 0), "{dry}");
    let (_, cancelled) = send(&api, Method::POST, &format!("{path}/cancel"), &Value::Null).await;
    assert_eq!(cancelled["jobs"][0]["outcome"], "cancelled", "{cancelled}");
    let (_, nothing) = send(&api, Method::POST, &format!("{path}/cancel"), &Value::Null).await;
    assert!(nothing["message"].as_str().unwrap().contains("nothing to cancel"), "{nothing}");
    let (_, retried) = send(&api, Method::POST, &format!("{path}/retry"), &Value::Null).await;
    assert!(retried["jobs"].as_array().unwrap().iter().all(|job| job["new_id"].is_string()), "{retried}");
    for (method, what) in [(Method::GET, ""), (Method::POST, "/cancel"), (Method::POST, "/retry")] {
        assert_eq!(send(&api, method, &format!("/graphs/{ID}{what}"), &Value::Null).await.0, 404, "{what}");
    }
}

#[tokio::test]
async fn wrong_settings_are_refused_whole() {
    let (database, _store) = prepared().await;
    let api = Api::serve(&database, &OPEN).await;
    let job = json!({ "class": "c" });
    for (method, path, body, status, said) in [
        ("PUT", "/limits/a", json!({}), 422, "a capacity, a rate, or both"),
        ("PUT", "/limits/a", json!({ "capacity": 0 }), 422, "from 1 to"),
        ("PUT", "/limits/a", json!({ "capacity": -1 }), 422, "u32"),
        ("PUT", "/limits/a", json!({ "capacity": 1, "most_waiting": 0 }), 422, "most_waiting"),
        ("PUT", "/limits/a", json!({ "capacity": 1, "colour": 1 }), 422, "unknown field `colour`"),
        ("PUT", "/limits/a", json!({ "rate": "fast" }), 422, "fast"),
        ("PUT", "/limits/a", json!([1]), 422, "a JSON object"),
        ("PUT", "/limits/a%2Cb", json!({ "capacity": 1 }), 422, "must not contain"),
        ("PUT", "/limits/@mail", json!({ "capacity": 1, "most_waiting": 5 }), 422, "groups/NAME"),
        ("PUT", "/limits/%00", json!({ "capacity": 1 }), 422, "control characters"),
        ("PUT", "/limits/a?dry_run=true", json!({ "capacity": 1 }), 400, "no parameter `dry_run`"),
        ("DELETE", "/limits/a", Value::Null, 404, "a has no limit"),
        ("PUT", "/pauses/all", Value::Null, 422, "cannot be paused"),
        ("PUT", "/pauses/group:", Value::Null, 422, "cannot be paused"),
        ("PUT", "/pauses/group:a", json!({ "why": "x" }), 422, "unknown field `why`"),
        ("PUT", "/pauses/group:a", json!({ "reason": { "$gt": "" } }), 422, "expected a string"),
        ("DELETE", "/pauses/x:y", Value::Null, 422, "cannot be paused"),
        ("PATCH", "/groups/a", json!({}), 422, "at least one"),
        ("PATCH", "/groups/a", json!({ "weight": 2, "ageing": "1ms" }), 422, "from 10ms"),
        ("PATCH", "/groups/a", json!({ "weight": 0 }), 422, "from 0.001"),
        ("PATCH", "/groups/a", json!({ "weight": 2, "maintenance": ["soon"] }), 422, "soon"),
        ("PATCH", "/groups/a", json!({ "weight": 2, "most_waiting": 0 }), 422, "most_waiting"),
        ("PUT", "/schedules/a", json!({}), 422, "either `cron` or `every`"),
        ("PUT", "/schedules/a", json!({ "every": "1m" }), 422, "no job"),
        ("PUT", "/schedules/a", json!({ "every": "1m", "cron": "* * * * *", "job": job }), 422, "exactly one"),
        ("PUT", "/schedules/a", json!({ "every": "1m", "zone": "UTC", "job": job }), 422, "has no `zone`"),
        ("PUT", "/schedules/a", json!({ "cron": "0 0 31 2 *", "job": job }), 422, "never runs"),
        ("PUT", "/schedules/a", json!({ "every": "1m", "missed_limit": 5, "job": job }), 422, "needs `missed"),
        ("PUT", "/schedules/a", json!({ "every": "1m", "job": { "class": "c", "klass": 1 } }), 422, "klass"),
        ("PUT", "/schedules/a", json!({ "every": "1m", "job": { "class": "c", "id": ID } }), 422, "cannot have an id"),
        (
            "PUT",
            "/schedules/a",
            json!({ "every": "1m", "job": { "class": "c", "retry_policy": { "class": "Mine" } } }),
            422,
            "custom_policy=true",
        ),
        ("PUT", "/schedules/a", json!({ "every": "1m", "job": job, "x": 1 }), 422, "unknown field `x`"),
        ("POST", "/workers/quiet", Value::Null, 422, "name the workers"),
        ("POST", "/workers/quiet", json!({ "ids": [ID], "all": true }), 422, "cannot be combined"),
        ("POST", "/workers/quiet", json!({ "ids": ["x"] }), 422, "not the id of a worker"),
        ("POST", "/workers/quiet", json!({ "ids": vec![ID; 1_001] }), 422, "too many"),
        ("POST", "/graphs/x/cancel", Value::Null, 400, "not the id of a graph"),
        ("GET", "/graphs/x", Value::Null, 400, "not the id of a graph"),
        ("GET", "/stats?overdue_after=x", Value::Null, 400, "not a duration"),
        ("GET", "/limits?x=1", Value::Null, 400, "no parameter `x`"),
    ] {
        let (got, problem) = send(&api, method.parse().unwrap(), path, &body).await;
        assert!(got == status && problem["detail"].as_str().unwrap().contains(said), "{method} {path} {body}: {problem}");
    }
    let text = api.request(Method::PUT, "/limits/a").header(header::CONTENT_TYPE, "text/plain").body("{\"capacity\": 1}");
    assert_eq!(answer(text).await.0, 415);
    for collection in ["limits", "groups", "pauses", "schedulers"] {
        assert_eq!(database.count(collection, doc! {}).await, 0, "{collection}");
    }
    assert!(database.all("audit", doc! { "outcome.outcome": { "$exists": true } }).await.is_empty(), "nothing was changed");
}

#[tokio::test(flavor = "multi_thread")]
async fn each_path_says_that_mongodb_is_away() {
    let database = TestDatabase::of_its_own().await;
    Store::connect(&ConnectArgs::to(database.uri()), "test").await.unwrap();
    let api = Api::serve(&database, &OPEN).await;
    let commands = ["find", "insert", "update", "findAndModify", "aggregate", "delete"];
    let fault = FailPoint::new("recruiter web", &commands).error_code(189).arm(database.uri()).await;
    for (method, path, body) in [
        ("GET", "/stats", Value::Null),
        ("GET", "/groups", Value::Null),
        ("GET", "/limits", Value::Null),
        ("GET", "/limits/a", Value::Null),
        ("GET", "/pauses", Value::Null),
        ("GET", "/schedules", Value::Null),
        ("GET", "/schedules/a", Value::Null),
        ("GET", "/workers", Value::Null),
        ("GET", &format!("/graphs/{ID}"), Value::Null),
        ("GET", "/audit", Value::Null),
        ("GET", "/events", Value::Null),
        ("GET", "/messages?topic=a", Value::Null),
        ("PUT", "/limits/a", json!({ "capacity": 1 })),
        ("DELETE", "/limits/a", Value::Null),
        ("PUT", "/pauses/everything", Value::Null),
        ("PATCH", "/groups/a", json!({ "weight": 1 })),
        ("PUT", "/schedules/a", json!({ "every": "1m", "job": { "class": "c" } })),
        ("POST", "/schedules/a/run", Value::Null),
        ("POST", "/workers/stop", json!({ "all": true })),
        ("POST", &format!("/graphs/{ID}/retry"), Value::Null),
    ] {
        let (status, problem) = send(&api, method.parse().unwrap(), path, &body).await;
        assert_eq!(status, 503, "{method} {path}: {problem}");
    }
    drop(fault);
    assert_eq!(send(&api, Method::PUT, "/limits/a", &json!({ "capacity": 1 })).await.0, 200);
}

/// Tools make the names of their functions of these.
#[tokio::test]
async fn each_operation_has_an_id_of_its_own() {
    let (database, _store) = prepared().await;
    let api = Api::serve(&database, &[]).await;
    let (_, described) = api.get("/openapi.json").await;
    let mut ids = HashSet::new();
    for methods in described["paths"].as_object().unwrap().values() {
        for operation in methods.as_object().unwrap().values() {
            assert!(ids.insert(operation["operationId"].as_str().unwrap().to_owned()), "{operation}");
        }
    }
    assert!(ids.len() > 40, "{ids:?}");
}
