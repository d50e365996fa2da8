//! What a developer and an operator meet the first time: parameters without fields, warnings, flags, events of commands.

use std::fs;

use bson::{Document, doc, oid::ObjectId};
use recruiter_common::{
    JobId, Pattern,
    events::{Events, Received},
};
use recruiter_tests::{
    local::{Local, prepared},
    wait::SOON,
};
use recruiter_worker::{Context, EnqueueError, Executable, Limit, NewJob, NotDone, Workable, Worker};
use serde::{Deserialize, Serialize};

use super::cli::recruiter;

macro_rules! without_fields {
    ($name:ident, $item:item) => {
        #[derive(Serialize, Deserialize)]
        $item

        impl Workable for $name {
            const CLASS: &'static str = stringify!($name);
            type Output = ();
        }

        impl Executable for $name {
            type State = ();

            async fn execute(&self, (): &(), _job: &Context) -> Result<(), NotDone> {
                Ok(())
            }
        }
    };
}

without_fields!(Unit, struct Unit;);
without_fields!(Braces, struct Braces {});
without_fields!(Tuple, struct Tuple(););
without_fields!(Nothing, struct Nothing(()););

#[tokio::test(flavor = "multi_thread")]
async fn parameters_may_have_no_fields() {
    let (database, store) = prepared().await;
    let worker = Worker::new().register::<Unit>(()).unwrap().register::<Braces>(()).unwrap();
    let worker = worker.register::<Tuple>(()).unwrap().register::<Nothing>(()).unwrap();
    let (leader, worker) = (Local::recruiter(&database, &[]), Local::worker(&database, worker, &[]));
    let jobs = [Unit.as_job(), Braces {}.as_job(), Tuple().as_job(), Nothing(()).as_job(), NewJob::bundle([Unit, Unit])];
    store.enqueue_many(jobs).await.unwrap();
    for class in ["Unit", "Braces", "Tuple", "Nothing"] {
        for more in [&[][..], &["--parameters", "{}"], &["--items", "[{}]"]] {
            recruiter(&database, &[&["enqueue", "--class", class], more].concat()).succeeded();
        }
    }
    database.until("archived", doc! {}, 17, "all have ended").await;
    assert_eq!(database.count("archived", doc! { "why": "done" }).await, 17);
    leader.stop().await;
    worker.stop().await;
}

/// Reads events until one has this topic.
async fn until(events: &mut Events, topic: &str) {
    let read = async {
        loop {
            match events.next().await {
                Received::Event(event) if event.topic == topic => return,
                Received::Event(_) => {}
                other @ Received::Missed(_) | other => panic!("{other:?}"),
            }
        }
    };
    assert!(tokio::time::timeout(SOON, read).await.is_ok(), "no {topic}");
}

#[tokio::test(flavor = "multi_thread")]
async fn each_command_publishes_its_events_before_it_ends() {
    let ((database, store), dir) = (prepared().await, tempfile::tempdir().unwrap());
    let file = |name: &str, text: &str| {
        fs::write(dir.path().join(name), text).unwrap();
        dir.path().join(name).to_str().unwrap().to_owned()
    };
    let graph = file("graph.json", r#"{"jobs": {"a": {"class": "a"}}}"#);
    let lines = file("jobs.ndjson", r#"{"class": "line"}"#);
    let schedules = file("schedules.toml", "namespace = \"n\"\n[schedules.s]\nevery = \"1d\"\njob = { class = \"run\" }\n");
    let id = JobId::new().to_string();
    let mut events = store.events([Pattern::everything()], None).await.unwrap();
    // Nothing is told of a limit that is not there.
    assert!(!store.limits().remove("printer").await.unwrap());
    store.limits().set_most_waiting("printer", Some(5)).await.unwrap_err();
    store.groups().set_weight("mail", Some(1.0)).await.unwrap();
    let first = events.next().await;
    assert!(matches!(&first, Received::Event(event) if event.topic == "group.changed"), "{first:?}");
    for (args, topic) in [
        (&["pause", "group:x"][..], "pause.added"),
        (&["resume", "group:x"], "pause.removed"),
        (&["limits", "set", "printer", "--capacity", "2"], "limit.changed"),
        (&["limits", "remove", "printer"], "limit.removed"),
        (&["groups", "set", "mail", "--weight", "2"], "group.changed"),
        (&["enqueue", "--class", "one", "--id", &id], "job.enqueued.one"),
        (&["jobs", "cancel", &id], "job.cancelled.one"),
        (&["jobs", "retry", &id], "job.enqueued.one"),
        (&["enqueue", "--from", &lines], "job.enqueued.line"),
        (&["graph", "enqueue", &graph], "job.enqueued.a"),
        (&["jobs", "cancel", "--class", "a", "--yes"], "job.cancelled.a"),
        (&["schedules", "apply", &schedules], ""),
        (&["schedules", "run", "s"], "job.enqueued.run"),
    ] {
        let said = recruiter(&database, args);
        assert_eq!(said.code, 0, "{args:?}: {}", said.err);
        if !topic.is_empty() {
            until(&mut events, topic).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_worker_names_no_jobs_in_the_roster() {
    let (database, _store) = prepared().await;
    let worker = Local::worker(&database, Worker::new().register::<Unit>(()).unwrap(), &["--heartbeat", "200ms", "--lease", "2m"]);
    let roster = database.raw("roster");
    database.until("roster", doc! { "available": true }, 1, "it is available").await;
    // As after a report that was written before the end of its last job was recorded.
    let left = doc! { "working": true, "working_on": [ObjectId::new()], "working_since": bson::DateTime::now() };
    roster.update_one(doc! {}, doc! { "$set": left }).await.unwrap();
    let is_idle = doc! { "available": true, "working": false, "working_on": { "$exists": false }, "working_since": { "$exists": false } };
    database.until("roster", is_idle, 1, "it reports that it has none").await;
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_job_waits_for_without_anybody_having_it_is_said_at_once() {
    let (database, store) = prepared().await;
    let worker = Local::worker(&database, Worker::new().register::<Unit>(()).unwrap(), &["--lease", "10m"]);
    database.until("roster", doc! { "available": true }, 1, "it is available").await;
    store.limits().set("customer:*", Limit::capacity(1)).await.unwrap();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("graph.json");
    fs::write(&file, r#"{"jobs": {"a": {"class": "Unit", "limits": ["scaner"]}, "b": {"class": "nosuch"}}}"#).unwrap();
    let lines = dir.path().join("jobs.ndjson");
    fs::write(&lines, r#"{"class": "Unit", "limits": ["scaner"]}"#).unwrap();
    let schedules = dir.path().join("schedules.toml");
    fs::write(&schedules, "namespace = \"n\"\n[schedules.s]\nevery = \"1d\"\njob = { class = \"Unit\", limits = [\"scaner\"] }\n").unwrap();
    let scaner = "warning: there is no limit `scaner`; the job waits until `recruiter limits set scaner` defines it";
    let [waits, ended] = [JobId::new(), JobId::new()].map(|id| id.to_string());
    let (waits, ended) = (waits.as_str(), ended.as_str());
    for (args, expected) in [
        (&["enqueue", "--class", "Unit", "--limit", "scaner"][..], &[scaner][..]),
        (&["enqueue", "--class", "Unit", "--limit", "customer:17", "--retry", "3"], &[]),
        (
            &["enqueue", "--class", "Unit", "--retry", r#"{"class": "Mine"}"#, "--custom-policy"],
            &["warning: no running worker that has the class `Unit` and works on the group `generic` knows the retry policy `Mine`"],
        ),
        (&["enqueue", "--from", lines.to_str().unwrap(), "--json"], &[scaner]),
        (&["graph", "enqueue", file.to_str().unwrap()], &[scaner, "warning: no running worker has the class `nosuch`"]),
        (&["schedules", "apply", schedules.to_str().unwrap()], &[scaner]),
        (&["schedules", "run", "s"], &[scaner]),
        (&["consumers", "set", "c", "--topic", "t", "--job", r#"{"class": "Unit", "limits": ["scaner"]}"#], &[scaner]),
        (&["enqueue", "--class", "Nothing", "--id", waits, "--after", "1h"], &["no running worker has the class `Nothing`"]),
        (&["jobs", "change", waits, "--to-group", "g"], &["warning: no running worker has the class `Nothing`"]),
        (&["enqueue", "--class", "Unit", "--id", ended, "--after", "1h"], &[]),
        (&["jobs", "cancel", ended], &[]),
        (
            &["jobs", "retry", "--why", "cancelled", "--yes", "--retry-policy", r#"{"class": "Mine"}"#, "--custom-policy"],
            &["works on the group `generic` knows the retry policy `Mine`; the job waits until one does"],
        ),
        (&["jobs", "retry", waits], &["warning: no running worker has the class `Nothing`"]),
        (&["jobs", "cancel", waits], &[]),
        (&["jobs", "retry", waits, "--dry-run"], &[]),
        (&["jobs", "retry", waits], &["warning: no running worker has the class `Nothing`"]),
    ] {
        let said = recruiter(&database, args);
        assert_eq!(said.code, 0, "{args:?}: {}", said.err);
        assert_eq!(said.err.matches("warning: ").count(), expected.len(), "{args:?}: {}", said.err);
        assert!(expected.iter().all(|part| said.err.contains(part)), "{args:?}: {}", said.err);
    }
    let graph = database.only("scheduled", doc! { "workable.class": "nosuch" }).await.get_object_id("graph").unwrap().to_hex();
    recruiter(&database, &["graph", "cancel", &graph]).succeeded();
    let said = recruiter(&database, &["graph", "retry", &graph]).succeeded();
    assert!(said.err.contains(scaner) && said.err.contains("warning: no running worker has the class `nosuch`"), "{}", said.err);
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_names_the_flag_or_the_name_that_was_written() {
    let (database, _store) = prepared().await;
    let dir = tempfile::tempdir().unwrap();
    let graph = dir.path().join("graph.json");
    fs::write(&graph, r#"{"jobs": {"one": {"class": "a", "waits_for": ["two"]}, "two": {"class": "a", "waits_for": ["one"]}}}"#).unwrap();
    let empty = dir.path().join("schedules.toml");
    let (graph, schedules) = (graph.to_str().unwrap(), empty.to_str().unwrap());
    let check = |args: &[&str], code: i32, expected: &str| {
        let said = recruiter(&database, args);
        assert!(said.code == code && said.err.contains(expected), "{args:?}: {} {}", said.code, said.err);
        said.err
    };
    let enqueue = |args: &[&str], expected: &str| drop(check(&[&["enqueue", "--class", "a"], args].concat(), 2, expected));
    enqueue(&["--unique-for", "1h"], "--unique-for is about a unique job: add --unique KEY");
    enqueue(&["--unique", "k", "--on-conflict", "postpone"], "--on-conflict postpone needs --postpone-at-most");
    enqueue(&["--unique", "k", "--postpone-at-most", "1m"], "--postpone-at-most is for --on-conflict postpone only");
    enqueue(&["--retry", "often"], "`often` is neither a number of retries nor a retry policy");
    enqueue(&["--retry", r#"{"class": "Mine"}"#, "--backoff"], "--retry-delay and --backoff are for --retry N");
    enqueue(&["--retry", "3", "--backoff", "--retry-delay", "0s"], "--retry-delay 0s is not possible: give 1ms to 100 years");
    enqueue(&["--after", "5m", "--expires-after", "1m"], "would expire before it is due: let it expire later, or be due earlier");
    enqueue(&["--backoff"], "--retry-delay and --backoff need --retry N");
    check(&["limits", "set", "printer", "--capacity", "two"], 2, "'two' for '--capacity <N>'");
    check(&["publish", "T", "17"], 2, "the content of a message must be a JSON object");
    let said = check(&["graph", "enqueue", graph], 2, "would wait for itself");
    assert!(said.contains("job \"one\"") || said.contains("job \"two\""), "{said}");
    for args in [
        &["enqueue", "--from", "/no/such"][..],
        &["enqueue", "--class", "a", "--file", "/no/such"],
        &["graph", "enqueue", "/no/such"],
        &["schedules", "apply", "/no/such"],
        &["files", "put", "65a1b2c3d4e5f60718293a4b", "name", "/no/such"],
    ] {
        check(args, 78, "/no/such");
    }
    fs::write(schedules, "namespace = \"shop\"\n[schedules.a]\nevery = \"1h\"\njob = { class = \"c\" }\n").unwrap();
    check(&["schedules", "apply", schedules], 0, "");
    fs::write(schedules, "namespace = \"shop\"\n").unwrap();
    check(&["schedules", "apply", schedules], 2, "it would remove all 1 of the namespace `shop`; add --yes");
    assert_eq!(database.count("schedulers", doc! { "_id": "a" }).await, 1, "nothing was removed");
    check(&["schedules", "apply", schedules, "--dry-run"], 0, "");
    check(&["schedules", "apply", schedules, "--yes"], 0, "");
    assert_eq!(database.count("schedulers", doc! { "_id": "a" }).await, 0);
    check(&["schedules", "apply", schedules], 0, "");
}

#[tokio::test(flavor = "multi_thread")]
async fn retries_are_given_as_numbers() {
    let (database, store) = prepared().await;
    let policy = async |args: &[&str]| {
        let said = recruiter(&database, &[&["enqueue", "--class", "a"], args].concat()).succeeded();
        let id = ObjectId::parse_str(said.out.trim()).unwrap();
        database.only("scheduled", doc! { "_id": id }).await.get_document("retry_policy").unwrap().clone()
    };
    let many = |times: i32, wait: i32| {
        doc! { "class": "RetryManyTimes", "parameters": { "retry_how_many_times": times, "seconds_to_wait_before_retry": wait } }
    };
    assert_same(&policy(&["--retry", "5"]).await, &many(5, 10));
    assert_same(&policy(&["--retry", "0", "--retry-delay", "1m"]).await, &many(0, 60));
    let doubled = doc! {
        "class": "ExponentialBackoff",
        "parameters": { "retry_how_many_times": 5, "seconds_to_initially_wait_before_retry": 10 },
    };
    assert_same(&policy(&["--retry", "5", "--retry-delay", "10s", "--backoff"]).await, &doubled);
    assert_same(&policy(&["--retry-policy", &doubled.to_string()]).await, &doubled);
    let id = NewJob::of_class("b", doc! {}).enqueue(&store).await.unwrap().id.to_string();
    for args in [&["jobs", "cancel", &id][..], &["jobs", "retry", &id, "--retry", "5", "--retry-delay", "10s", "--backoff"]] {
        recruiter(&database, args).succeeded();
    }
    assert_same(database.only("scheduled", doc! { "workable.class": "b" }).await.get_document("retry_policy").unwrap(), &doubled);

    let id = Unit.as_job().priority(7).enqueue(&store).await.unwrap().id;
    assert_eq!(database.only("scheduled", doc! { "_id": id }).await.get_i32("priority").ok(), Some(7));
    let refused = Unit.as_job().priority(12).enqueue(&store).await;
    assert!(matches!(refused, Err(EnqueueError::Priority { number: 12 })), "{refused:?}");
}

/// Whether numbers are integers or doubles is not the point.
fn assert_same(one: &Document, other: &Document) {
    let of = |document: &Document| bson::Bson::from(document.clone()).into_relaxed_extjson().to_string().replace(".0", "");
    assert_eq!(of(one), of(other));
}
