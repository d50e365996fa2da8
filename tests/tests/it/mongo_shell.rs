//! The session of the Recruiter document, replayed in a real mongosh against a running system: the fields it shows are
//! there, under the same names and of the same kinds. `assigned_to` holds lists and `working_on` is one, since a process
//! runs many jobs.

use std::time::Duration;

use bson::doc;
use recruiter_common::{Limit, NewJob, control::Change};
use recruiter_tests::{
    factory::started,
    local::{ids, store},
    mongo::TestDatabase,
    mongosh,
    processes::{Setup, System},
    wait::{SOON, wait_until},
};
use serde_json::Value;

use super::why::Stage;

/// A query as a person would type it, answered as one JSON document.
fn ask(database: &TestDatabase, expression: &str) -> Value {
    let answer = mongosh::eval(database.uri(), &format!("print(EJSON.stringify({expression}, null, 0, {{relaxed: true}}))"));
    serde_json::from_str(answer.trim()).unwrap_or_else(|error| panic!("{expression}: {error}: {answer}"))
}

/// Checks kinds by name: `id`, `date`, `bool`, `count`, `text`, `list`, `map`.
fn check(document: &Value, fields: &[(&str, &str)]) {
    for (path, kind) in fields {
        let value = path.split('.').fold(document, |value, field| &value[field]);
        let fits = match *kind {
            "id" => value["$oid"].is_string(),
            "date" => value["$date"].is_string(),
            "bool" => value.is_boolean(),
            "count" => value.is_u64(),
            "text" => value.is_string(),
            "list" => value.is_array(),
            "map" => value.is_object(),
            other => panic!("no such kind: {other}"),
        };
        assert!(fits, "{path} is not a {kind}: {document:#}");
    }
}

#[tokio::test]
async fn the_session_of_the_recruiter_document_reads_the_same() {
    let database = TestDatabase::new().await;
    let system = System::start(&database, Setup { worker: &["--builtins", "--concurrency", "2"], ..Setup::default() });
    database.until("roster", doc! { "available": true }, 1, "the worker is there").await;

    // "Every worker registers itself as available to work when it's born"
    let worker = ask(&database, "db.roster.findOne()");
    assert_eq!((&worker["work_on"], &worker["available"], &worker["working"]), (&"*".into(), &true.into(), &false.into()));
    check(&worker, &[("_id", "id"), ("available_since", "date"), ("last_seen_at", "date"), ("created_at", "date"), ("pid", "count")]);

    // "When there's something to do a job is created in the scheduled collection"
    let store = store(&database).await;
    let later = NewJob::of_class("sleep", doc! { "ms": 200 }).after(Duration::from_secs(3_600)).enqueue(&store).await.unwrap().id;
    let job_fields = [
        ("_id", "id"),
        ("done", "bool"),
        ("created_at", "date"),
        ("locked", "bool"),
        ("attempts", "count"),
        ("group", "text"),
        ("workable.class", "text"),
        ("workable.parameters", "map"),
        ("workable.method", "text"),
        ("retry_policy.class", "text"),
        ("retry_policy.parameters", "map"),
    ];
    let job = ask(&database, "db.scheduled.findOne()");
    check(&job, &job_fields);
    check(&job, &[("scheduled_at", "date")]);
    assert_eq!((&job["locked"], &job["attempts"], &job["group"]), (&false.into(), &0.into(), &"generic".into()));
    assert_eq!((&job["retry_policy"]["class"], &job["workable"]["method"]), (&"DoNotDoItAgain".into(), &"execute".into()));
    assert_eq!(job["_id"]["$oid"], later.to_string());

    // "This is how it looks a locked job", and a worker assigned to it
    let sleep = |ms: i64| NewJob::of_class("sleep", doc! { "ms": ms });
    let count = async |collection: &str, filter| database.count(collection, filter).await;
    let running = ids(store.enqueue_many([sleep(600_000), sleep(600_000)]).await.unwrap());
    wait_until(SOON, "both run", async || {
        let reported = count("roster", doc! { "available": false, "working_on": { "$size": 2 } }).await == 1;
        reported && count("scheduled", doc! { "locked": true }).await == 2
    })
    .await;
    let job = ask(&database, "db.scheduled.find({locked: true}).limit(1).toArray()[0]");
    check(&job, &job_fields);
    check(&job, &[("last_execution.scheduled_at", "date"), ("last_execution.started_at", "date"), ("last_execution.worker", "id")]);
    assert_eq!((&job["locked"], &job["attempts"]), (&true.into(), &1.into()));
    let worker = ask(&database, "db.roster.findOne()");
    check(&worker, &[("assigned_to", "map"), ("working_on", "list"), ("working_since", "date")]);
    assert_eq!((&worker["available"], &worker["working"]), (&false.into(), &true.into()));
    let own = worker["_id"]["$oid"].as_str().unwrap();
    check(&worker, &[(&format!("assigned_to.{own}"), "list")]);
    let mut working_on: Vec<&str> = worker["working_on"].as_array().unwrap().iter().map(|id| id["$oid"].as_str().unwrap()).collect();
    working_on.sort_unstable();
    assert_eq!(working_on, running.iter().map(ToString::to_string).collect::<Vec<_>>());

    // "This is how it looks a job that it has been successfully executed"
    store.control(false).change(&Change::Cancel, &running).await.unwrap();
    store.enqueue_many([sleep(1), sleep(1)]).await.unwrap();
    wait_until(SOON, "both are done", async || count("archived", doc! { "done": true }).await == 2).await;
    let job = ask(&database, "db.archived.find({done: true}).sort({$natural: -1}).limit(1).toArray()[0]");
    check(&job, &job_fields);
    check(
        &job,
        &[
            ("why", "text"),
            ("last_execution.scheduled_at", "date"),
            ("last_execution.started_at", "date"),
            ("last_execution.ended_at", "date"),
        ],
    );
    assert_eq!((&job["done"], &job["locked"], &job["why"]), (&true.into(), &false.into(), &"done".into()));
    assert!(job["scheduled_at"].is_null());

    // The queries of the README, as they stand there.
    let readme = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../README.md")).unwrap();
    let (_, queries) = readme.split_once("```js\n").unwrap();
    let queries: Vec<&str> =
        queries.lines().take_while(|line| *line != "```").map(|line| line.split("//").next().unwrap().trim()).collect();
    assert!(queries.len() >= 4, "{queries:?}");
    let each = |query: &&str| if query.contains(".find(") { format!("{query}.toArray()") } else { (*query).to_owned() };
    ask(&database, &format!("[{}]", queries.iter().map(each).collect::<Vec<_>>().join(", ")));
    system.stop().await;
}

/// The helpers for the shell name the same reasons as the library, and write nothing.
#[tokio::test]
async fn the_helpers_for_the_shell_agree_with_the_library() {
    let stage = Stage::new().await;
    let (database, store) = (&stage.database, &stage.store);
    let at = |ms: i64| bson::DateTime::from_millis(bson::DateTime::now().timestamp_millis() + ms);
    let [latest, long_ago] = [bson::DateTime::from_millis(253_402_300_799_999), at(-60_000)];
    store.limits().set("printer", Limit::capacity(1)).await.unwrap();
    store.limits().set("customer:*", Limit::capacity(2)).await.unwrap();
    store.pauses().pause(&"group:closed".parse().unwrap(), "ada", Some("inventory")).await.unwrap();
    let [running, done] = [stage.insert(doc! {}).await, stage.insert(doc! {}).await];
    started(store, stage.worker, &[running, done]).await;
    let ended =
        doc! { "ended_at": at(-5_000), "started_at": at(-7_000), "hostname": "h", "pid": 1, "class": "smtp", "message": "no mailbox" };
    let mut archived = database.only("scheduled", doc! { "_id": done }).await;
    database.raw("scheduled").delete_one(doc! { "_id": done }).await.unwrap();
    archived.remove("scheduled_at");
    archived.extend(doc! { "why": "gave-up", "locked": false, "last_execution": ended });
    database.raw("archived").insert_one(archived).await.unwrap();
    stage.set_worker(doc! { "held_permits": ["printer#0"], "working_on": [running] }).await;
    let head = stage.insert(doc! { "gate": ">k", "created_at": at(-9_000) }).await;
    let jobs = [
        running,
        done,
        head,
        stage.insert(doc! { "gate": ">k", "created_at": at(-1_000) }).await,
        stage.insert(doc! {}).await,
        stage.insert(doc! { "gate": "printer" }).await,
        stage.insert(doc! { "gate": "customer:7" }).await,
        stage.insert(doc! { "gate": "nothing" }).await,
        stage.insert(doc! { "group": "closed" }).await,
        stage.insert(doc! { "workable": { "class": "unknown" } }).await,
        stage.insert(doc! { "scheduled_at": at(3_600_000) }).await,
        stage.insert(doc! { "expires_at": long_ago }).await,
        stage.insert(doc! { "waiting": true, "waits_for": [head], "scheduled_at": latest }).await,
        stage.insert(doc! { "waiting": true, "waits_for": [{ "job": done, "when": "ended" }], "scheduled_at": latest }).await,
        stage.insert(doc! { "unique_after": "k", "scheduled_at": latest }).await,
    ];
    database.database().run_command(doc! { "profile": 2 }).await.unwrap();
    let helpers = super::tidy::root().join("shell/recruiter.js");
    let shell = |expression: &str| -> Value {
        let script = format!("load({:?}); print(EJSON.stringify({expression}, null, 0, {{relaxed: true}}))", helpers.display().to_string());
        let answer = mongosh::eval(database.uri(), &script);
        serde_json::from_str(answer.trim()).unwrap_or_else(|error| panic!("{expression}: {error}: {answer}"))
    };
    let names: Vec<String> = jobs.iter().map(|job| format!("\"{job}\"")).collect();
    let said = shell(&format!("[{}].map(jobs.why)", names.join(", ")));
    for (job, said) in jobs.iter().zip(said.as_array().unwrap()) {
        let why = store.why(*job).await.unwrap().unwrap();
        let said = said.as_str().unwrap();
        assert!(said.starts_with(&format!("{}: ", why.reason)), "{said} {why:?}");
    }
    assert_eq!(shell("jobs.failed({class: 'x'}, 5)")[0]["error"], "smtp: no mailbox");
    assert_eq!(shell("[jobs.failed({class: 'y'}).length, jobs.failed({group: 'generic'}).length]"), serde_json::json!([0, 1]));
    assert_eq!(shell("jobs.running()")[0]["_id"]["$oid"], running.to_string());
    assert!(shell(&format!("jobs.story('{done}')"))[1].as_str().unwrap().ends_with("on h:1, took 2 s: smtp: no mailbox"));
    let waiting = shell("jobs.waiting()");
    assert_eq!(
        (&waiting[0]["group"], &waiting[0]["class"], &waiting[0]["jobs"]),
        (&"generic".into(), &"x".into(), &11.into()),
        "{waiting}"
    );
    let worker = &shell("workers()")[0];
    assert_eq!((&worker["alive"], &worker["free"], &worker["jobs"]), (&true.into(), &"10/10".into(), &1.into()), "{worker}");
    let printer = shell("limits().find(({_id}) => _id === 'printer')");
    assert_eq!((&printer["capacity"], &printer["in_use"]), (&1.into(), &1.into()), "{printer}");
    assert_eq!(shell("line('k').map(({_id}) => _id)")[0]["$oid"], head.to_string());
    let writes = doc! { "ns": { "$not": { "$regex": "system" } }, "op": { "$in": ["insert", "update", "remove"] }, "appName": { "$regex": "^mongosh" } };
    let reads = doc! { "op": "query", "appName": { "$regex": "^mongosh" } };
    assert_eq!((database.count("system.profile", writes).await, database.count("system.profile", reads).await > 20), (0, true));
    // Without a leader that is the reason of each job that could run.
    database.raw("metadata").update_one(doc! { "_id": "recruiter" }, doc! { "$set": { "released": true } }).await.unwrap();
    assert!(shell(&format!("jobs.why('{}')", jobs[4])).as_str().unwrap().starts_with("no-recruiter: "));
}
