//! Settings of groups: weights, ageing and maintenance windows, by the command line; and why the jobs of a group wait.

use std::time::Duration;

use bson::doc;
use chrono::{TimeDelta, Timelike as _};
use recruiter_common::{Limit, NewJob, Priority, instant::Instant, limits::SettingError};
use recruiter_tests::{
    ledger::Entry,
    local::prepared,
    oracle::Policy,
    wait::{best_of_three, in_a_few_tries},
    world::World,
};
use serde_json::{Value, json};

use super::limits::{cli, said_with_a_recruiter, why};

fn with_priority(ms: i64, priority: u8) -> NewJob {
    Entry::lasting(ms).priority(Priority::new(priority).unwrap())
}

async fn reasons(world: &World, group: &str) -> Vec<(String, u64)> {
    let said = said_with_a_recruiter(world, &["groups", "why", group, "--json"]).await;
    let reason = |reason: &Value| (reason["reason"].as_str().unwrap().to_owned(), reason["jobs"].as_u64().unwrap());
    said["reasons"].as_array().unwrap().iter().map(reason).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_of_a_group_are_set_listed_and_removed() {
    let (database, store) = prepared().await;
    let set = |args: &[&str]| cli(&database, &[&["groups", "set", "mail"], args].concat());
    assert_eq!(set(&["--weight", "3"]), (0, "mail has the weight 3\n".into(), String::new()));
    assert!(set(&["--ageing", "10m"]).1.contains("one priority higher for each 10m"));
    let windows = ["--maintenance", "02:00-03:00 Europe/Berlin", "--maintenance", "22:00-06:00 UTC sat,sun"];
    assert!(set(&windows).1.contains("no job of mail starts in 02:00-03:00 Europe/Berlin; 22:00-06:00 UTC sat,sun"));
    let listed = cli(&database, &["groups", "list", "--json"]).1;
    let expected = json!({ "name": "mail", "most_waiting": null, "weight": 3.0, "ageing": "10m",
        "maintenance": ["02:00-03:00 Europe/Berlin", "22:00-06:00 UTC sat,sun"], "waiting": 0 });
    assert_eq!(serde_json::from_str::<Value>(&listed).unwrap(), expected);
    assert!(cli(&database, &["groups", "list"]).1.contains("02:00-03:00 Europe/Berlin"));
    let stored = database.raw("groups").find_one(doc! {}).await.unwrap().unwrap();
    assert_eq!(stored.get_i64("ageing_ms").unwrap(), 600_000);
    assert_eq!(set(&["--weight", "unset", "--ageing", "unset", "--maintenance", "unset"]).0, 0);
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
        assert_eq!(code, 2, "{wrong:?}: {err}");
    }
    assert!(matches!(store.groups().set_weight("mail", Some(f64::NAN)).await, Err(SettingError::Invalid(_))));
    assert!(matches!(store.groups().set_weight("", Some(1.0)).await, Err(SettingError::Invalid(_))));
    assert!(matches!(store.groups().set_ageing("mail", Some(Duration::ZERO)).await, Err(SettingError::Invalid(_))));
    let window = "02:00-03:00 UTC".parse().unwrap();
    assert!(matches!(store.groups().set_maintenance("mail", &[window; 51]).await, Err(SettingError::Invalid(_))));
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

/// How many of 120 urgent jobs start before a job of the lowest priority that has been due for longer than half of them.
async fn overtaken(ageing: Option<Duration>) -> usize {
    let world = World::new().await;
    world.store.groups().set_ageing("generic", ageing).await.unwrap();
    assert_eq!(world.store.groups().list().await.unwrap().get("generic").and_then(|group| group.ageing), ageing);
    let ago = |hours: i64| world.store.now() - TimeDelta::hours(hours);
    let low = world.enqueue(with_priority(0, 0).at(ago(10)), Policy::Never).await.unwrap();
    for hours in [20, 1] {
        for _ in 0..60 {
            world.enqueue(with_priority(20, 9).at(ago(hours)), Policy::Never).await.unwrap();
        }
    }
    let world = world.patient(&["1"]);
    world.wait_for("all are done", async || world.unfinished().await == 0).await;
    let begun = world.begun();
    world.close().await;
    begun.into_iter().take_while(|job| *job != low).count()
}

/// Some jobs are assigned ahead, so the order is not exact.
#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_ages_is_not_starved_by_a_stream_of_urgent_ones() {
    let between = async || Some(overtaken(Some(Duration::from_secs(3_600))).await).filter(|before| (30..90).contains(before));
    in_a_few_tries("it starts between urgent jobs", between).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_ageing_urgent_jobs_come_first_for_as_long_as_there_are_any() {
    let before = overtaken(None).await;
    assert!(before >= 90, "{before}");
}

/// How long after the begin of a maintenance window, and before its end, the last job starts.
async fn starts_in_a_window() -> Duration {
    let world = World::new().await.patient(&["3"]);
    let second = |more: i64| (world.store.now() + TimeDelta::seconds(more)).with_nanosecond(0).unwrap();
    let close = |from: Instant, until: Instant| {
        let window = format!("{}-{} UTC", from.format("%H:%M:%S"), until.format("%H:%M:%S"));
        let (code, _, err) = cli(&world.database, &["groups", "set", "generic", "--maintenance", &window]);
        assert_eq!(code, 0, "{err}");
    };
    // More short jobs than can be done in this test: some are held ahead.
    let jobs = world.store.enqueue_many((0..3_000).map(|_| Entry::lasting(30))).await.unwrap();
    jobs.iter().for_each(|job| world.asked.will_send(job.id, Policy::Never));
    world.wait_for("they run until the window", async || world.count("archived", doc! {}).await > 20).await;
    let from = second(8);
    close(from, second(600));
    world.wait_for("the window has begun", async || world.store.now() > from).await;
    let all_wait = async || reasons(&world, "generic").await == [("maintenance".to_owned(), world.count("scheduled", doc! {}).await)];
    world.wait_for("all jobs wait for its end", all_wait).await;
    let waiting = world.database.raw("scheduled").find_one(doc! { "locked": false }).await.unwrap().unwrap();
    let said = why(&world, waiting.get_object_id("_id").unwrap().into()).await;
    assert!(said["reason"] == "maintenance" && said["text"].as_str().unwrap().contains("ends in"), "{said}");
    let other = world.enqueue(Entry::lasting(0).in_group("other"), Policy::Never).await.unwrap();
    world.wait_for("other groups go on", async || world.archived(other).await.is_some()).await;
    let until = second(2);
    close(from, until);
    let at = |comparison: &str, time: Instant| {
        doc! { "group": "generic", "last_execution.started_at": { comparison: bson::DateTime::from_chrono(time) } }
    };
    world.wait_for("all go on after it", async || world.count("archived", at("$gte", until)).await > 0).await;
    world.database.raw("scheduled").delete_many(doc! { "locked": false }).await.unwrap();
    // A worker only estimates the server's clock.
    let in_time = at("$lt", until - TimeDelta::milliseconds(100));
    let last = world.database.raw("archived").find_one(in_time).sort(doc! { "last_execution.started_at": -1 }).await.unwrap().unwrap();
    let last = last.get_document("last_execution").unwrap().get_datetime("started_at").unwrap().to_chrono();
    world.close().await;
    (last - from).to_std().unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread")]
async fn no_job_starts_in_a_maintenance_window_and_all_go_on_after_it() {
    // The worker estimates the server's clock.
    best_of_three(Duration::from_millis(150), "the last start after the begin of a window", starts_in_a_window).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_reasons_of_a_group_are_counted() {
    let world = World::new().await.patient(&["5"]);
    world.store.limits().set("printer", Limit::capacity(1)).await.unwrap();
    let running = world.enqueue(Entry::lasting(600_000).limit("printer"), Policy::Any).await.unwrap();
    world.wait_for("it runs", async || world.started().await == 1).await;
    for _ in 0..4 {
        world.store.enqueue_many([Entry::lasting(0).limit("printer")]).await.unwrap();
    }
    world.store.enqueue_many((0..3).map(|_| Entry::lasting(0).limit("scanner"))).await.unwrap();
    world.store.enqueue_many((0..2).map(|_| Entry::lasting(0).after(Duration::from_secs(600)))).await.unwrap();
    world.store.enqueue_many([NewJob::of_class("unknown", doc! {})]).await.unwrap();
    let expected = [("limit-full", 4), ("limit-undefined", 3), ("no-worker", 1), ("not-due", 2)];
    let expected = expected.map(|(reason, jobs)| (reason.to_owned(), jobs));
    let are_counted = async || {
        let mut counted = reasons(&world, "generic").await;
        counted.sort();
        counted == expected
    };
    world.wait_for(&format!("{expected:?}"), are_counted).await;
    let text = cli(&world.database, &["groups", "why", "generic"]).1;
    assert!(text.contains("4 limit-full: `printer` is full") && text.contains("3 limit-undefined"), "{text}");
    assert!(cli(&world.database, &["groups", "why", "empty"]).1.contains("no job waits in empty"));
    world.database.raw("scheduled").delete_many(doc! { "locked": false }).await.unwrap();
    assert_eq!(cli(&world.database, &["jobs", "cancel", &running.to_string()]).0, 0);
}

/// A limited job is not starved by a backlog of short jobs that fill the slots ahead.
#[tokio::test(flavor = "multi_thread")]
async fn a_limited_job_gets_a_slot_among_many_short_ones() {
    let world = World::new().await.patient(&["2"]);
    world.store.limits().set("printer", Limit::capacity(1)).await.unwrap();
    let jobs_are_ahead = async || {
        if world.count("scheduled", doc! {}).await < 2_000 {
            world.store.enqueue_many((0..3_000).map(|_| Entry::lasting(3))).await.unwrap();
        }
        world.count("roster", doc! { "prefetched.1": { "$exists": true } }).await == 1
    };
    let mut left = Vec::new();
    // While this test is stalled, all short jobs may end.
    while left.len() < 3 && left.last() <= Some(&500) {
        world.wait_for("jobs are ahead", async || jobs_are_ahead().await).await;
        let urgent = world.enqueue(with_priority(0, 9).limit("printer"), Policy::Never).await.unwrap();
        world.wait_for("it is done", async || world.archived(urgent).await.is_some()).await;
        left.push(world.count("scheduled", doc! {}).await);
    }
    assert!(left.last() > Some(&500), "of each time these were left: {left:?}");
    world.database.raw("scheduled").delete_many(doc! { "locked": false }).await.unwrap();
}
