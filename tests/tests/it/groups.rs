//! Settings of groups: weights, ageing and maintenance windows, by the command line; and why the jobs of a group wait.

use std::time::{Duration, Instant};

use bson::doc;
use chrono::{TimeDelta, Timelike as _};
use recruiter_common::{
    enqueue::NewJob,
    job::Priority,
    limits::{self, Limit, SettingError},
    shutdown::pause,
};
use recruiter_tests::{
    ledger::{Entry, Event},
    local::store,
    mongo::TestDatabase,
    oracle::Policy,
    world::World,
};
use serde_json::{Value, json};

use super::limits::{cli, why, world};

fn with_priority(ms: i64, priority: u8) -> NewJob {
    Entry::lasting(ms).priority(Priority::new(priority).unwrap())
}

async fn reasons(world: &World, group: &str) -> Vec<(String, u64)> {
    let (code, out, err) = cli(&world.database, &["groups", "why", group, "--json"]);
    assert_eq!(code, Some(0), "{err}");
    let said: Value = serde_json::from_str(&out).unwrap();
    let reason = |reason: &Value| (reason["reason"].as_str().unwrap().to_owned(), reason["jobs"].as_u64().unwrap());
    said["reasons"].as_array().unwrap().iter().map(reason).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_of_a_group_are_set_listed_and_removed() {
    let database = TestDatabase::new().await;
    let store = store(&database).await;
    let set = |args: &[&str]| cli(&database, &[&["groups", "set", "mail"], args].concat());
    assert_eq!(set(&["--weight", "3"]), (Some(0), "mail has the weight 3\n".into(), String::new()));
    assert!(set(&["--ageing", "10m"]).1.contains("one priority higher for each 10m"));
    let windows = ["--maintenance", "02:00-03:00 Europe/Berlin", "--maintenance", "22:00-06:00 UTC sat,sun"];
    assert!(set(&windows).1.contains("no job of mail starts in 02:00-03:00 Europe/Berlin; 22:00-06:00 UTC sat,sun"));
    let listed = cli(&database, &["groups", "list", "--json"]).1;
    let expected = json!({ "group": "mail", "most_waiting": null, "weight": 3.0, "ageing": "10m",
        "maintenance": ["02:00-03:00 Europe/Berlin", "22:00-06:00 UTC sat,sun"], "waiting": 0 });
    assert_eq!(serde_json::from_str::<Value>(&listed).unwrap(), expected);
    assert!(cli(&database, &["groups", "list"]).1.contains("02:00-03:00 Europe/Berlin"));
    let stored = database.raw("groups").find_one(doc! {}).await.unwrap().unwrap();
    assert_eq!(stored.get_i64("ageing_ms").unwrap(), 600_000);
    assert_eq!(set(&["--weight", "unset", "--ageing", "unset", "--maintenance", "unset"]).0, Some(0));
    assert_eq!(database.raw("groups").find_one(doc! {}).await.unwrap(), Some(doc! { "_id": "mail" }));
    for wrong in [
        &["--weight", "0"][..],
        &["--weight", "-1"],
        &["--ageing", "1ms"],
        &["--maintenance", "2-3"],
        &["--maintenance", "02:00-03:00 Mars/Base"],
        &["--maintenance", "unset", "--maintenance", "02:00-03:00 UTC"],
    ] {
        let (code, _, err) = set(wrong);
        assert_eq!(code, Some(2), "{wrong:?}: {err}");
    }
    assert!(matches!(limits::set_weight(&store, "mail", Some(f64::NAN)).await, Err(SettingError::Invalid(_))));
    assert!(matches!(limits::set_weight(&store, "", Some(1.0)).await, Err(SettingError::Invalid(_))));
    assert!(matches!(limits::set_ageing(&store, "mail", Some(Duration::ZERO)).await, Err(SettingError::Invalid(_))));
    let window = "02:00-03:00 UTC".parse().unwrap();
    assert!(matches!(limits::set_maintenance(&store, "mail", &[window; 51]).await, Err(SettingError::Invalid(_))));
    for wrong in [
        doc! { "_id": "a", "ageing_ms": 1 },
        doc! { "_id": "a", "ageing_ms": "10m" },
        doc! { "_id": "a", "maintenance": "02:00-03:00 UTC" },
        doc! { "_id": "a", "maintenance": [{ "from": "2", "until": "03:00" }] },
        doc! { "_id": "a", "maintenance": [{ "from": "02:00", "until": "03:00", "days": ["monday"] }] },
    ] {
        database.raw("groups").insert_one(wrong).await.unwrap_err();
    }
    // The zone is checked when the document is read.
    let mars = doc! { "_id": "b", "maintenance": [{ "from": "02:00", "until": "03:00", "zone": "Mars/Base" }] };
    database.raw("groups").insert_one(mars).await.unwrap();
    assert!(store.settings().await.unwrap().invalid.contains("@b"));
}

/// How many urgent jobs of a steady stream start before a job of the lowest priority does: `None` if it does not start before the stream ends.
async fn overtaken(ageing: Option<&str>) -> Option<usize> {
    let world = world(&["1"]).await;
    if let Some(ageing) = ageing {
        assert_eq!(cli(&world.database, &["groups", "set", "generic", "--ageing", ageing]).0, Some(0));
        pause(Duration::from_millis(600)).await;
    }
    for _ in 0..20 {
        world.enqueue(with_priority(25, 9), Policy::Never).await.unwrap();
    }
    let low = world.enqueue(with_priority(0, 0), Policy::Never).await.unwrap();
    let (mut sent, end) = (20_u64, Instant::now() + Duration::from_secs(8));
    // More urgent jobs than the slot can start are always waiting.
    while Instant::now() < end && world.archived(low).await.is_none() {
        let done = world.count("archived", doc! {}).await;
        while sent < done + 20 {
            world.enqueue(with_priority(25, 9), Policy::Never).await.unwrap();
            sent += 1;
        }
        pause(Duration::from_millis(10)).await;
    }
    let was_done = world.archived(low).await.is_some();
    let ledger = world.ledger();
    world.close().await;
    let begins = ledger.iter().filter(|line| line.event == Event::Begin);
    was_done.then(|| begins.take_while(|line| line.execution().0 != low).count())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_ages_is_not_starved_by_a_stream_of_urgent_ones() {
    let before = overtaken(Some("150ms")).await;
    assert!(before.is_some_and(|before| before > 20), "{before:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_ageing_urgent_jobs_come_first_for_as_long_as_there_are_any() {
    assert_eq!(overtaken(None).await, None);
}

/// A window that begins in three seconds, and the seconds of its begin and end in UTC.
#[tokio::test(flavor = "multi_thread")]
async fn no_job_starts_in_a_maintenance_window_and_all_go_on_after_it() {
    let world = world(&["3"]).await;
    let second = |more: i64| {
        let at = world.store.now() + TimeDelta::seconds(more);
        at.with_nanosecond(0).unwrap()
    };
    let (from, until) = (second(4), second(7));
    let window = format!("{}-{} UTC", from.format("%H:%M:%S"), until.format("%H:%M:%S"));
    let (code, _, err) = cli(&world.database, &["groups", "set", "generic", "--maintenance", &window]);
    assert_eq!(code, Some(0), "{err}");
    // More short jobs than can be done before the window: some are held ahead.
    let jobs = world.store.enqueue_many((0..600).map(|_| Entry::lasting(30))).await.unwrap();
    jobs.iter().for_each(|job| world.asked.will_send(job.id, Policy::Never));
    world.wait_for("the window has begun", async || world.store.now() > from + TimeDelta::milliseconds(600)).await;
    let left = world.count("scheduled", doc! { "locked": false }).await;
    assert!(left > 100, "{left}: the machine is too fast");
    let waiting = world.database.raw("scheduled").find_one(doc! { "locked": false }).await.unwrap().unwrap();
    let said = why(&world, waiting.get_object_id("_id").unwrap().into()).await;
    assert!(said["reason"] == "maintenance" && said["text"].as_str().unwrap().contains("ends in"), "{said}");
    let all = reasons(&world, "generic").await;
    assert!(all.len() == 1 && all[0].0 == "maintenance" && all[0].1 == left, "{all:?}, {left}");
    let other = world.enqueue(Entry::lasting(0).in_group("other"), Policy::Never).await.unwrap();
    world.wait_for("other groups go on", async || world.archived(other).await.is_some()).await;
    world.wait_for("the window has ended", async || world.store.now() > until).await;
    assert_eq!(cli(&world.database, &["groups", "set", "generic", "--maintenance", "unset"]).0, Some(0));
    world.wait_for("all are done", async || world.unfinished().await == 0).await;
    // A worker only estimates the server's clock.
    let within =
        doc! { "$gte": bson::DateTime::from_chrono(from + TimeDelta::milliseconds(20)), "$lt": bson::DateTime::from_chrono(until) };
    let started = doc! { "group": "generic", "last_execution.started_at": within };
    assert_eq!(world.count("archived", started).await, 0, "starts in the window");
    let before = doc! { "last_execution.started_at": { "$lt": bson::DateTime::from_chrono(from) } };
    assert!(world.count("archived", before).await > 20, "they run until the window");
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_reasons_of_a_group_are_counted() {
    let world = world(&["5"]).await;
    limits::set_limit(&world.store, "printer", Limit { capacity: Some(1), rate: None }).await.unwrap();
    let running = world.enqueue(Entry::lasting(60_000).limit("printer"), Policy::Any).await.unwrap();
    world.wait_for("it runs", async || world.started().await == 1).await;
    for _ in 0..4 {
        world.store.enqueue_many([Entry::lasting(0).limit("printer")]).await.unwrap();
    }
    world.store.enqueue_many((0..3).map(|_| Entry::lasting(0).limit("scanner"))).await.unwrap();
    world.store.enqueue_many((0..2).map(|_| Entry::lasting(0).after(Duration::from_secs(600)))).await.unwrap();
    world.store.enqueue_many([NewJob::of_class("unknown", doc! {})]).await.unwrap();
    pause(Duration::from_millis(600)).await;
    let mut counted = reasons(&world, "generic").await;
    counted.sort();
    let expected = [("limit-full", 4), ("limit-undefined", 3), ("no-worker", 1), ("not-due", 2)];
    assert_eq!(counted, expected.map(|(reason, jobs)| (reason.to_owned(), jobs)));
    let text = cli(&world.database, &["groups", "why", "generic"]).1;
    assert!(text.contains("4 limit-full: `printer` is full") && text.contains("3 limit-undefined"), "{text}");
    assert!(cli(&world.database, &["groups", "why", "empty"]).1.contains("no job waits in empty"));
    world.database.raw("scheduled").delete_many(doc! { "locked": false }).await.unwrap();
    assert_eq!(cli(&world.database, &["jobs", "cancel", &running.to_string()]).0, Some(0));
}

/// A limited job is not starved by a backlog of short jobs that fill the slots ahead.
#[tokio::test(flavor = "multi_thread")]
async fn a_limited_job_gets_a_slot_among_many_short_ones() {
    let world = world(&["2"]).await;
    limits::set_limit(&world.store, "printer", Limit { capacity: Some(1), rate: None }).await.unwrap();
    world.store.enqueue_many((0..3_000).map(|_| Entry::lasting(3))).await.unwrap();
    world.wait_for("jobs are ahead", async || world.count("roster", doc! { "prefetched.1": { "$exists": true } }).await == 1).await;
    let began = Instant::now();
    let urgent = world.enqueue(with_priority(0, 9).limit("printer"), Policy::Never).await.unwrap();
    world.wait_for("it is done", async || world.archived(urgent).await.is_some()).await;
    let left = world.count("scheduled", doc! {}).await;
    assert!(left > 500, "{left} were left after {:?}", began.elapsed());
    world.database.raw("scheduled").delete_many(doc! { "locked": false }).await.unwrap();
}
