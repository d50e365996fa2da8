//! Limits and pauses: capacities and rates hold exactly, also if processes die; what waits says why; a full resource delays no other job.

use std::time::Duration;

use bson::{Document, doc};
use recruiter_common::{
    EnqueueError, JobId, Limit, NewJob, Priority, Rate, RetryManyTimes, WorkerId,
    ids::RoundId,
    limits::{Paused, SettingError},
    shutdown::pause,
    store::{AssignedJobs, Hint, Permit},
};
use recruiter_tests::{
    ledger::{Entry, Event, monotonic_ms},
    local::prepared,
    mongo::TestDatabase,
    oracle::Policy,
    promise,
    proxy::Proxy,
    wait::{SOON, Stopwatch, best_of_three, in_a_few_tries, wait_for},
    world::{Role, World},
};
use serde_json::{Value, json};

use super::cli::recruiter;

fn capacity(capacity: u32) -> Limit {
    Limit::capacity(capacity)
}

/// Waits until the leader knows all settings that were written before: it reads them all together, and the limits first.
async fn settings_are_known(world: &World) {
    let limit = JobId::new().to_string();
    let job = world.enqueue(Entry::lasting(0).limit(&limit).in_group("settings"), Policy::Never).await.unwrap();
    world.store.limits().set(&limit, capacity(1)).await.unwrap();
    world.wait_for("the leader knows the settings", async || world.archived(job).await.is_some()).await;
}

/// The exit code, the output and the errors of a command.
pub(super) fn cli(database: &TestDatabase, args: &[&str]) -> (i32, String, String) {
    let said = recruiter(database, args);
    (said.code, said.out, said.err)
}

pub(super) async fn why(world: &World, job: JobId) -> Value {
    said_with_a_recruiter(world, &["jobs", "why", &job.to_string(), "--json"]).await
}

/// The JSON of a command that explains, once it names no missing recruiter: on a busy machine its lease may be over for a moment.
pub(super) async fn said_with_a_recruiter(world: &World, args: &[&str]) -> Value {
    let explained = async || {
        let (code, out, err) = cli(&world.database, args);
        assert_eq!(code, 0, "{err}");
        (!out.contains("\"no-recruiter\"")).then(|| serde_json::from_str(&out).unwrap())
    };
    wait_for(SOON, "it explains with a recruiter", explained).await
}

#[tokio::test(flavor = "multi_thread")]
async fn no_more_jobs_run_than_a_capacity_allows_whoever_dies() {
    let mut world = World::new().await.patient(&["20", "20"]);
    world.start(Role::Recruiter, &[], &[]);
    // The oracle compares the executions with them.
    world.limit("printer", capacity(3)).await;
    world.limit("customer:*", capacity(1)).await;
    let mut jobs = Vec::new();
    let policy = RetryManyTimes::new(30, Duration::from_millis(10)).unwrap();
    for number in 0..240 {
        let job = Entry::lasting(20).limit("printer").limit(format!("customer:{}", number % 6)).retry(&policy);
        jobs.push(world.enqueue(job, Policy::Again(30)).await.unwrap());
    }
    world.kill_at_random(7, 30, 100..700).await;
    assert!(world.until_quiet(SOON).await, "not quiet\n{}", world.logs());
    assert_eq!(world.most_at_once(&jobs).await, 3);
    world.close().await;
}

/// The rate alone takes 6 s. The oracle compares the starts with it in each run.
#[tokio::test(flavor = "multi_thread")]
async fn starts_follow_a_rate_across_leaders() {
    let rate = Rate::new(50, Duration::from_secs(1), 20).unwrap();
    let starts = async |limit: Option<Limit>| {
        let mut world = World::new().await.patient(&["50"]);
        world.start(Role::Recruiter, &[], &[]);
        if let Some(limit) = limit {
            world.limit("api", limit).await;
        }
        let began = Stopwatch::start();
        for number in 0..300 {
            let job = if limit.is_some() { Entry::lasting(0).limit("api") } else { Entry::lasting(0) };
            world.enqueue(job, Policy::Never).await.unwrap();
            if number == 100 {
                world.members[0].process.kill();
            }
        }
        assert!(world.until_quiet(SOON).await, "not quiet\n{}", world.logs());
        let took = began.elapsed();
        world.close().await;
        took
    };
    best_of_three(Duration::from_secs(12), "that the rate delays 300 starts", async || {
        let without = starts(None).await;
        starts(Some(Limit::rate(rate))).await.saturating_sub(without)
    })
    .await;
}

/// The permit of a job without a burst lasts for 20 ms at first, and a start takes several round trips of the worker.
#[tokio::test(flavor = "multi_thread")]
async fn jobs_with_a_rate_start_over_a_slow_network() {
    let rate = Rate::new(10, Duration::from_secs(1), 1).unwrap();
    let mut world = World::new().await.patient(&[]);
    let line = Proxy::before(world.database.uri()).await;
    line.slow(Duration::from_millis(80), 10_000_000);
    world.start_at(&line.uri(world.database.name()), Role::Worker, &["--lease", "20s"], &[]);
    world.limit("api", Limit::rate(rate)).await;
    for _ in 0..5 {
        world.enqueue(Entry::lasting(0).limit("api"), Policy::Never).await.unwrap();
    }
    world.close().await;
}

/// One start in six seconds. The second leader neither waits for longer than the interval after the first start, nor for less.
#[tokio::test(flavor = "multi_thread")]
async fn a_new_leader_goes_on_with_a_slow_rate() {
    let rate = Rate::new(1, Duration::from_secs(6), 1).unwrap();
    // Without the kept cell: three seconds, the lease of the first leader, and one interval from the beginning of the second term. The
    // oracle compares the starts with the rate in each run.
    best_of_three(Duration::from_millis(9_500), "two starts, six seconds apart,", async || {
        let mut world = World::new().await.patient(&["5"]);
        world.start(Role::Recruiter, &[], &[]);
        world.limit("api", Limit::rate(rate)).await;
        for _ in 0..2 {
            world.enqueue(Entry::lasting(0).limit("api"), Policy::Never).await.unwrap();
        }
        world.wait_for("the first starts at once, because there was no leader before", async || !world.begun().is_empty()).await;
        pause(Duration::from_secs(3)).await;
        world.members[0].process.kill();
        world.wait_for("the second starts", async || world.begun().len() == 2).await;
        let begins: Vec<i64> = world.ledger().iter().filter(|line| line.event == Event::Begin).map(|line| line.at_ms).collect();
        world.close().await;
        Duration::from_millis((begins[1] - begins[0]).unsigned_abs())
    })
    .await;
}

/// The rates of a name, of a prefix and of a group are changed, while a recruiter leads and while none does.
#[tokio::test(flavor = "multi_thread")]
async fn a_changed_rate_counts_what_was_started_and_no_longer_than_it_should() {
    let set = async |world: &World, rate: &str| {
        for name in ["api", "customer:*", "@mail"] {
            world.store.limits().set(name, Limit::rate(rate.parse().unwrap())).await.unwrap();
        }
    };
    let enqueue = async |world: &World, count: usize| {
        let jobs = || [Entry::lasting(0).limit("api"), Entry::lasting(0).limit("customer:7"), Entry::lasting(0).in_group("mail")];
        world.enqueue_many(count * 3, Policy::Never, |number| jobs()[number % 3].clone()).await;
    };
    // When the limited jobs began, after an ordinary one has run.
    let begins = async |world: &World| {
        let ordinary = world.enqueue(Entry::lasting(0), Policy::Never).await.unwrap();
        world.wait_for("the ordinary job ends", async || world.archived(ordinary).await.is_some()).await;
        let begins = world.ledger().into_iter().filter(|line| line.event == Event::Begin && line.execution().0 != ordinary);
        begins.map(|line| line.at_ms).collect::<Vec<i64>>()
    };
    let mut world = World::new().await.patient(&["60"]);
    set(&world, "20/1h").await;
    enqueue(&world, 30).await;
    // On a busy machine an assignment that arrives late costs a start.
    world.wait_for("the rate is used up", async || world.begun().len() > 50).await;
    set(&world, "20/5s").await;
    world.wait_for("the others start at the raised rate", async || world.unfinished().await == 0).await;
    let last = *begins(&world).await.iter().max().unwrap();
    set(&world, "20/1h").await;
    settings_are_known(&world).await;
    let known = monotonic_ms();
    enqueue(&world, 20).await;
    let more = begins(&world).await.into_iter().filter(|at| *at > last).count();
    // Each start is paid off in a quarter of a second, and later in three minutes. The helpers have begun three other jobs.
    let allowed = 3 * (2 + (known - last) / 250 + (monotonic_ms() - known) / 180_000) + 3;
    assert!(i64::try_from(more).unwrap() <= allowed, "{more} starts, and {allowed} are allowed");

    set(&world, "20/5s").await;
    world.wait_for("they start at the raised rate", async || world.unfinished().await == 0).await;
    let killed = monotonic_ms();
    world.members[0].process.kill();
    set(&world, "20/1h").await;
    world.start(Role::Recruiter, &[], &[]);
    enqueue(&world, 20).await;
    let more = begins(&world).await.into_iter().filter(|at| *at > killed).count();
    let allowed = 3 * ((monotonic_ms() - killed) / 180_000);
    assert!(i64::try_from(more).unwrap() <= allowed, "{more} starts under the next leader, and {allowed} are allowed");
    set(&world, "20/5s").await;
    world.wait_for("all start at the raised rate", async || world.unfinished().await == 0).await;
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backlog_behind_a_full_resource_delays_no_other_job() {
    let world = World::new().await.patient(&["10"]);
    world.store.limits().set("printer", capacity(1)).await.unwrap();
    let long = world.enqueue(Entry::lasting(600_000).limit("printer"), Policy::Never).await.unwrap();
    world.wait_for("the printer is in use", async || world.started().await == 1).await;
    let behind: Vec<NewJob> = (0..5_000).map(|_| Entry::lasting(0).limit("printer").priority(Priority::new(9).unwrap())).collect();
    let behind = world.store.enqueue_many(behind).await.unwrap();
    let ordinary = world.enqueue(Entry::lasting(0), Policy::Never).await.unwrap();
    world.wait_for("the ordinary job ends", async || world.archived(ordinary).await.is_some()).await;
    assert!(world.archived(long).await.is_none());
    let said = why(&world, behind[0].id).await;
    let holder = &said["holders"][0];
    assert_eq!((&said["reason"], &holder["jobs"][0]), (&json!("limit-full"), &json!(long.to_string())), "{said}");
    assert_eq!(holder["permits"], json!(["printer#0"]), "{said}");
    assert_eq!(cli(&world.database, &["jobs", "cancel", &long.to_string()]).0, 0);
    world.wait_for("the next one gets the printer", async || world.begun().len() > 10).await;
    world.database.raw("scheduled").delete_many(doc! { "locked": false }).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_class_a_line_and_everything_can_be_paused() {
    let world = World::new().await.patient(&["5"]);
    let of_a_line = Entry::lasting(0).in_line("a");
    for (what, held) in [("class:entry", Entry::lasting(0)), ("line:a", of_a_line), ("everything", Entry::lasting(0))] {
        let paused: Paused = what.parse().unwrap();
        if let Paused::Line(_) = paused {
            assert_eq!(cli(&world.database, &["pause", what]).0, 0);
        } else {
            assert!(world.store.pauses().pause(&paused, "ada", None).await.unwrap());
            assert_eq!(world.store.pauses().list().await.unwrap()[&paused].by, "ada");
        }
        // The first may start before the leader knows of the pause.
        let job = wait_for(SOON, "a job waits", async || {
            let before = world.begun().len();
            let job = world.enqueue(held.clone(), Policy::Never).await.unwrap();
            pause(Duration::from_millis(900)).await;
            (world.begun().len() == before).then_some(job)
        })
        .await;
        assert_eq!(why(&world, job).await["reason"], "paused");
        if let Paused::Line(_) = paused {
            let other = world.enqueue(Entry::lasting(0).in_line("b"), Policy::Never).await.unwrap();
            world.wait_for("another line goes on", async || world.archived(other).await.is_some()).await;
        }
        assert!(world.store.pauses().resume(&paused).await.unwrap());
        world.wait_for("it runs", async || world.archived(job).await.is_some()).await;
        assert!(!world.store.pauses().resume(&paused).await.unwrap());
    }
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_whose_resource_has_no_limit_waits_for_one_and_says_so() {
    let world = World::new().await.patient(&["5"]);
    let job = world.enqueue(Entry::lasting(0).limit("scanner"), Policy::Never).await.unwrap();
    let says_so = async || Some(why(&world, job).await).filter(|said| said["reason"] == "limit-undefined");
    let said = wait_for(SOON, "it says so", says_so).await;
    assert!(said["text"].as_str().unwrap().contains("recruiter limits set"), "{said}");
    let (code, out, err) = cli(&world.database, &["limits", "set", "scanner", "--capacity", "2", "--rate", "100/1s burst 10"]);
    assert!(code == 0 && out.contains("at most 2 at a time, at most 100/1s burst 10"), "{out}{err}");
    world.wait_for("it runs", async || world.archived(job).await.is_some()).await;
    world.wait_for("its permit is returned", async || world.store.permit_holders().await.unwrap().is_empty()).await;
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_has_a_limit_from_a_plain_document() {
    let world = World::new().await.patient(&["20"]);
    world.database.raw("groups").insert_one(doc! { "_id": "generic", "capacity": 2 }).await.unwrap();
    let most_of_ten = async || {
        let mut jobs = Vec::new();
        for _ in 0..10 {
            jobs.push(world.enqueue(Entry::lasting(100), Policy::Never).await.unwrap());
        }
        world.wait_for("all end", async || world.unfinished().await == 0).await;
        world.most_at_once(&jobs).await
    };
    settings_are_known(&world).await;
    let two = async || {
        let most = most_of_ten().await;
        promise!(most <= 2, "{most} at a time");
        most == 2
    };
    world.wait_for("there are two at a time", two).await;
    assert!(cli(&world.database, &["limits", "list"]).1.contains("@generic"));
    assert!(cli(&world.database, &["limits", "set", "@generic", "--capacity", "1"]).1.contains("at most 1 at a time"));
    settings_are_known(&world).await;
    assert_eq!(most_of_ten().await, 1);
    assert!(cli(&world.database, &["limits", "remove", "@generic"]).1.contains("no limit"));
    world.close().await;
}

/// A plain document, as another language writes it: the gate is the names of the resources.
#[tokio::test(flavor = "multi_thread")]
async fn documents_of_other_languages_are_limited_and_checked() {
    let world = World::new().await.patient(&["5"]);
    let raw = async |collection: &str, document: Document| world.database.raw(collection).insert_one(document).await;
    raw("limits", doc! { "_id": "printer", "capacity": 1_i64, "rate": { "starts": 10, "per_ms": 100 } }).await.unwrap();
    for (collection, wrong) in [
        ("limits", doc! { "_id": "printer2", "capacity": 0 }),
        ("limits", doc! { "_id": "printer2", "capacity": -1 }),
        ("limits", doc! { "_id": "printer2", "capacity": "many" }),
        ("limits", doc! { "_id": "a,b", "capacity": 1 }),
        ("limits", doc! { "_id": "@mail", "capacity": 1 }),
        ("limits", doc! { "_id": 7, "capacity": 1 }),
        ("limits", doc! { "_id": "printer2", "rate": { "starts": 0, "per_ms": 100 } }),
        ("limits", doc! { "_id": "printer2", "rate": { "starts": 1 } }),
        ("groups", doc! { "_id": "mail", "weight": 0 }),
        ("groups", doc! { "_id": "", "capacity": 1 }),
        ("pauses", doc! { "_id": "all" }),
        ("pauses", doc! { "_id": "group:" }),
    ] {
        assert!(raw(collection, wrong.clone()).await.is_err(), "{collection}: {wrong}");
    }
    let job = doc! {
        "_id": JobId::new(), "locked": false, "group": "generic", "priority": 5, "gate": "printer",
        "scheduled_at": bson::DateTime::from_chrono(world.store.now()), "workable": { "class": "entry", "parameters": { "ms": 0 } },
    };
    let id: JobId = job.get_object_id("_id").unwrap().into();
    raw("scheduled", job).await.unwrap();
    world.wait_for("it runs", async || world.archived(id).await.is_some()).await;
    let names = async |collection: &str| world.database.raw(collection).list_index_names().await.unwrap().join(" ");
    let (roster, scheduled) = (names("roster").await, names("scheduled").await);
    assert!(roster.contains("held_permits") && !scheduled.contains("lines"), "made at the first use: {roster}, {scheduled}");
}

#[tokio::test]
async fn wrong_limits_are_refused_with_the_reason() {
    let (database, store) = prepared().await;
    let enqueue = async |job: NewJob| {
        let Err(EnqueueError::Limit { problem }) = job.enqueue(&store).await else { panic!("it is not refused") };
        problem.to_string()
    };
    assert!(enqueue(Entry::lasting(0).limit("")).await.contains("is empty"));
    assert!(enqueue(Entry::lasting(0).limit("a,b")).await.contains("must not contain"));
    assert!(enqueue(Entry::lasting(0).limit("@mail")).await.contains("must not begin"));
    let long = "x".repeat(200);
    assert!(enqueue(Entry::lasting(0).limit(format!("{long}1")).limit(format!("{long}2"))).await.contains("together"));
    let set = async |name: &str, limit| {
        let Err(SettingError::Invalid(problem)) = store.limits().set(name, limit).await else { panic!("it is not refused") };
        problem.to_string()
    };
    assert!(set("printer", Limit::default()).await.contains("a capacity, a rate, or both"));
    assert!(set("printer", capacity(0)).await.contains("pause them"));
    assert!(set("*", capacity(1)).await.contains("at least one character"));
    for args in [
        &["limits", "set", "printer"][..],
        &["limits", "set", "printer", "--capacity", "0"],
        &["limits", "set", "printer", "--capacity", "-1"],
        &["limits", "set", "printer", "--rate", "0/1s"],
        &["limits", "set", "printer", "--rate", "fast"],
        &["limits", "set", "a,b", "--capacity", "1"],
        &["pause", "mail"],
        &["pause", "group:"],
    ] {
        let (code, _, err) = cli(&database, args);
        assert_eq!(code, 2, "{args:?}: {err}");
    }
    let (code, _, err) = cli(&database, &["limits", "remove", "printer"]);
    assert!(code == 1 && err.contains("has no limit"), "{err}");
    store.limits().set("printer", capacity(4)).await.unwrap();
    assert!(cli(&database, &["limits", "remove", "printer", "--dry-run"]).1.contains("would remove"));
    assert!(cli(&database, &["limits", "list"]).1.contains("printer"));
    let object = |args: &[&str]| serde_json::from_str::<Value>(&cli(&database, args).1).unwrap();
    let (listed, mut shown) = (object(&["limits", "list", "--json"]), object(&["limits", "show", "printer", "--json"]));
    let only_shown = ["holders", "waiting"].map(|field| shown.as_object_mut().unwrap().remove(field));
    assert_eq!((shown["capacity"].as_u64(), only_shown), (Some(4), [Some(json!([])), Some(json!(0))]));
    assert_eq!(shown, listed, "a limit has the same fields everywhere");
    assert!(cli(&database, &["limits", "remove", "printer"]).1.contains("removed"));
}

/// A recruiter of an earlier release assigns without a permit.
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_leaves_a_limited_job_without_a_permit() {
    let mut world = World::new().await;
    world.start(Role::Worker, &["--concurrency", "5"], &[]);
    let job = world.enqueue(Entry::lasting(0).limit("printer"), Policy::Never).await.unwrap();
    world.wait_for("the worker is there", async || world.count("roster", doc! { "available": true }).await == 1).await;
    let worker: WorkerId = world.database.raw("roster").find_one(doc! {}).await.unwrap().unwrap().get_object_id("_id").unwrap().into();
    let assign = async |job: JobId, permit: Option<Permit>| {
        let mut assignment = AssignedJobs::new(worker, vec![job]);
        assignment.permits.extend(permit.map(|permit| (job, permit)));
        world.store.publish(&Hint::Assigned { round: RoundId::new(), assignments: vec![assignment] }).await.unwrap();
    };
    let permit = |gate: &str, names: &[&str]| Permit {
        gate: Some(gate.to_owned()),
        names: names.iter().map(|name| (*name).to_owned()).collect(),
        ..Permit::default()
    };
    let runs = async |job: JobId| {
        // No recruiter repeats a hint that is lost.
        let is_done = async || {
            assign(job, Some(permit("printer", &["printer#0"]))).await;
            pause(Duration::from_millis(100)).await;
            world.archived(job).await.is_some()
        };
        world.wait_for("it runs", is_done).await;
    };
    for (invalid, why) in [
        (None, "it has none"),
        (Some(permit("scanner", &["scanner#0"])), "it was replaced since the permit was given"),
        (Some(permit("printer", &["@other#0", "printer#0"])), "it was moved to another group since then"),
    ] {
        assign(job, invalid).await;
        runs(world.enqueue(Entry::lasting(0).limit("printer"), Policy::Never).await.unwrap()).await;
        promise!(!world.begun().contains(&job), "it ran without a permit: {why}");
    }
    runs(job).await;
}

/// A noisy group with older jobs, and a group with three times its weight.
#[tokio::test(flavor = "multi_thread")]
async fn groups_with_weights_get_their_shares() {
    in_a_few_tries("each group gets its share", groups_get_their_shares).await;
}

async fn groups_get_their_shares() -> Option<()> {
    let world = World::new().await;
    for (group, weight) in [("noisy", 1.0), ("quiet", 3.0)] {
        world.database.raw("groups").insert_one(doc! { "_id": group, "weight": weight }).await.unwrap();
    }
    let jobs = 300;
    world.enqueue_many(jobs, Policy::Never, |_| Entry::lasting(3).in_group("noisy")).await;
    let quiet = world.enqueue_many(jobs, Policy::Never, |_| Entry::lasting(3).in_group("quiet")).await;
    let world = world.patient(&["4"]);
    world.wait_for("all end", async || world.unfinished().await == 0).await;
    // As long as both groups have jobs.
    let of_quiet = world.begun().into_iter().take(jobs).filter(|job| quiet.contains(job)).count();
    world.close().await;
    (of_quiet.abs_diff(jobs * 3 / 4) <= jobs / 20).then_some(())
}
