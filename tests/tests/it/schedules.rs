//! Periodic jobs: each slot has one job, on time, under every leader, also if it dies.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Arc, Mutex},
    time::Duration,
};

use bson::{Bson, Document, doc};
use chrono::TimeDelta;
use rand::RngExt as _;
use recruiter_common::{
    JobId, Keep, NewJob, Workable,
    control::Change,
    instant::Instant,
    schedules::{Declared, Missed, Overlap, Schedule, ScheduleError},
    shutdown::pause,
    store::{Store, id_of_slot},
};
use recruiter_tests::{
    fail_points::FailPoint,
    local::{Local, prepared, store},
    mongo::TestDatabase,
    processes::{Process, Recruiters, Setup, System},
    promise,
    wait::{SOON, wait_for, wait_until},
    workable,
};
use recruiter_worker::{Context, Executable, NotDone, Worker};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::cli::recruiter;

const SECOND: Duration = Duration::from_secs(1);
/// A long interval, so that slots were missed at any time of day: there are twenty of them since 1970.
const LONG: Duration = Duration::from_secs(1_000 * 86_400);

fn noop() -> NewJob {
    NewJob::of_class("noop", doc! {})
}

fn every_second() -> Schedule {
    Schedule::every(SECOND).unwrap().job(noop())
}

async fn declared(store: &Store, name: &str, schedule: Schedule) {
    assert_eq!(store.schedules().declare(name, &schedule).await.unwrap(), Declared::Created);
}

async fn document(database: &TestDatabase, name: &str) -> Document {
    database.only("schedulers", doc! { "_id": name }).await
}

/// The slots of the jobs of a schedule, in both collections.
async fn slots(database: &TestDatabase, name: &str) -> Vec<Instant> {
    // By the job: one that is archived between the reads is found twice.
    let mut slots = BTreeMap::new();
    for collection in ["scheduled", "archived"] {
        let found = database.all(collection, doc! { "schedule.name": name }).await;
        let slot = |job: &Document| job.get_document("schedule").unwrap().get_datetime("slot").unwrap().to_chrono();
        slots.extend(found.iter().map(|job| (job.get_object_id("_id").unwrap(), slot(job))));
    }
    let mut slots: Vec<Instant> = slots.into_values().collect();
    slots.sort_unstable();
    slots
}

async fn until_runs(database: &TestDatabase, name: &str, runs: usize) {
    wait_until(SOON, "it runs", async || slots(database, name).await.len() >= runs).await;
}

async fn set(database: &TestDatabase, name: &str, set: Document) {
    let changed = database.raw("schedulers").update_one(doc! { "_id": name }, doc! { "$set": set }).await.unwrap();
    assert_eq!(changed.matched_count, 1);
}

fn long_ago() -> bson::DateTime {
    bson::DateTime::from_millis(86_400_000)
}

/// Counts the executions of each job.
#[derive(Serialize, Deserialize)]
struct Counted {}
workable!(Counted);

type Executions = Arc<Mutex<HashMap<JobId, u32>>>;

impl Executable for Counted {
    type State = Executions;

    async fn execute(&self, executions: &Executions, job: &Context) -> Result<(), NotDone> {
        *executions.lock().unwrap().entry(job.job_id()).or_default() += 1;
        Ok(())
    }
}

#[tokio::test]
async fn runs_start_on_time() {
    let (database, store) = prepared().await;
    for n in 0..10 {
        declared(&store, &format!("s{n}"), every_second()).await;
    }
    // Without a timer the runs after the first scan would wait for the second one.
    let system = System::start(&database, Setup { recruiter: &["--poll", "10m", "--lease", "1h"], ..Setup::default() });
    let since = bson::DateTime::from_chrono(store.now() + TimeDelta::seconds(2));
    let started = doc! { "schedule.slot": { "$gte": since }, "last_execution.started_at": { "$exists": true } };
    let jobs = wait_for(SOON, "they run", async || {
        let jobs = database.all("archived", started.clone()).await;
        (jobs.len() >= 40).then_some(jobs)
    });
    for job in jobs.await {
        let at = |of: &str, field: &str| job.get_document(of).unwrap().get_datetime(field).unwrap().timestamp_millis();
        assert!(at("last_execution", "started_at") >= at("schedule", "slot"), "{job}");
    }
    system.stop().await;
}

/// Two recruiters, the leader is killed at random points: no slot is missed, and none runs twice, also with `keep: "failures"`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_leaders_miss_no_slot_and_repeat_none() {
    let database = TestDatabase::of_its_own().await;
    let store = store(&database).await;
    database.limit_transactions(3).await;
    let executions = Executions::default();
    let worker = Worker::new().register::<Counted>(executions.clone()).unwrap();
    let worker = Local::worker(&database, worker, &[]);
    let mut recruiters = Recruiters::start(&database);
    let names: Vec<String> = (0..20).map(|n| format!("s{n}")).collect();
    for (n, name) in names.iter().enumerate() {
        let keep = if n % 2 == 0 { Keep::All } else { Keep::Failures };
        let schedule = Schedule::every(SECOND).unwrap().job(Counted {}.as_job().keep(keep)).missed(Missed::All(100));
        declared(&store, name, schedule).await;
    }
    database.until("metadata", doc! { "_id": "recruiter" }, 1, "one leads").await;
    let mut kills = 0;
    while kills < 6 {
        // Most kills are near a slot, where the steps are.
        let now = store.now();
        let near = i64::from(1_000 - now.timestamp_subsec_millis()) + rand::rng().random_range(-10..60);
        let wait = near + 1_000 * rand::rng().random_range(0..3);
        pause(Duration::from_millis(u64::try_from(wait.max(1)).unwrap())).await;
        kills += u32::from(recruiters.kill_leader().await);
    }
    let last = store.now();
    let caught_up = async || {
        let waiting = database.count("schedulers", doc! { "last_slot": { "$lt": bson::DateTime::from_chrono(last) } }).await;
        waiting == 0 && database.count("scheduled", doc! {}).await == 0
    };
    wait_until(SOON, "all slots are handled", caught_up).await;
    for name in &names {
        store.schedules().pause(name, "ada", "the end of the test").await.unwrap();
    }
    // Also those of a slot that was not recorded, because its recruiter was killed. Nobody would assign what is left by the last one.
    database.until("scheduled", doc! {}, 0, "all jobs are done").await;
    recruiters.stop().await;
    let executions = executions.lock().unwrap().clone();
    promise!(executions.values().all(|times| *times == 1), "a job ran twice");
    let mut all = 0;
    for (n, name) in names.iter().enumerate() {
        let schedule = document(&database, name).await;
        let from = schedule.get_datetime("created_at").unwrap().timestamp_millis();
        let through = schedule.get_datetime("last_slot").unwrap().timestamp_millis();
        for second in from / 1_000 + 1..=through / 1_000 {
            let id = id_of_slot(name, Instant::from_timestamp_millis(second * 1_000).unwrap());
            promise!(executions.contains_key(&id), "{name}: no job of second {second} of {} to {}", from / 1_000, through / 1_000);
            all += 1;
        }
        assert!(schedule.get_document("skipped").is_err(), "{schedule}");
        let kept = database.count("archived", doc! { "schedule.name": name }).await;
        assert_eq!(i64::try_from(kept).unwrap(), if n % 2 == 0 { through / 1_000 - from / 1_000 } else { 0 }, "{name}");
    }
    promise!(executions.len() == all, "{} jobs for {all} slots", executions.len());
    worker.stop().await;
}

/// The leader has enqueued the job of a slot, cannot record that, and the job is done: of one of the two schedules nothing is left by then.
#[tokio::test]
async fn an_advance_that_fails_after_the_job_has_run_repeats_no_run() {
    let database = TestDatabase::of_its_own().await;
    let store = store(&database).await;
    let executions = Executions::default();
    let worker = Local::worker(&database, Worker::new().register::<Counted>(executions.clone()).unwrap(), &[]);
    let slot = Instant::from_timestamp(store.now().timestamp() / 86_400_000 * 86_400_000, 0).unwrap();
    for (name, keep) in [("kept", Keep::All), ("fleeting", Keep::Failures)] {
        declared(&store, name, Schedule::every(LONG).unwrap().job(Counted {}.as_job().keep(keep))).await;
        set(&database, name, doc! { "last_slot": bson::DateTime::from_chrono(slot - TimeDelta::seconds(1)) }).await;
    }
    let fault = FailPoint::new("recruiter", &["update"]).namespace(database.name(), "schedulers").times(3).close_connection();
    let armed = fault.arm(database.uri()).await;
    let recruiter = Process::on(&database, "recruiter", &["run"]);
    for name in ["kept", "fleeting"] {
        let is_handled = async || document(&database, name).await.get_datetime("last_slot").unwrap().to_chrono() == slot;
        wait_until(SOON, "its slot is handled", is_handled).await;
        let has_run = async || executions.lock().unwrap().contains_key(&id_of_slot(name, slot));
        wait_until(SOON, "its job runs", has_run).await;
    }
    database.until("scheduled", doc! {}, 0, "all jobs are done").await;
    assert!(armed.struck().await >= 2);
    let executions = executions.lock().unwrap().clone();
    promise!(executions.len() == 2 && executions.values().all(|times| *times == 1), "one run for each slot: {executions:?}");
    drop(recruiter);
    worker.stop().await;
    drop(armed);
}

#[tokio::test]
async fn a_run_that_would_overlap_is_skipped() {
    let (database, store) = prepared().await;
    let system = System::start(&database, Setup { worker: &["--builtins", "--grace", "100ms"], ..Setup::default() });
    let slow = Schedule::every(SECOND).unwrap().job(NewJob::of_class("sleep", doc! { "ms": 600_000 }));
    declared(&store, "one-by-one", slow.clone().overlap(Overlap::Skip)).await;
    declared(&store, "together", slow).await;
    let running = async |name: &str| database.count("scheduled", doc! { "schedule.name": name, "locked": true }).await;
    let skipped =
        async |name: &str| document(&database, name).await.get_document("skipped").map_or(0, |of| of.get_i64("overlap").unwrap_or(0));
    let overlap = async || running("one-by-one").await == 1 && skipped("one-by-one").await >= 2 && running("together").await >= 3;
    wait_until(SOON, "runs overlap or are skipped", overlap).await;
    assert_eq!((slots(&database, "one-by-one").await.len(), skipped("together").await), (1, 0));
    let running = database.only("scheduled", doc! { "schedule.name": "one-by-one" }).await.get_object_id("_id").unwrap().into();
    store.control(false).change(&Change::Cancel, &[running]).await.unwrap();
    until_runs(&database, "one-by-one", 2).await;
    system.stop().await;
}

#[tokio::test]
async fn missed_runs_follow_the_policy() {
    let (database, store) = prepared().await;
    let policies = [("skip", Missed::Skip, 0), ("one", Missed::One, 1), ("all", Missed::All(5), 5)];
    for (name, missed, _) in policies {
        declared(&store, name, Schedule::every(LONG).unwrap().job(noop()).missed(missed)).await;
        set(&database, name, doc! { "last_slot": long_ago() }).await;
    }
    let recruiter = Process::on(&database, "recruiter", &["run"]);
    for (name, _, runs) in policies {
        let is_handled = async || *document(&database, name).await.get_datetime("last_slot").unwrap() > long_ago();
        wait_until(SOON, "its slots are handled", is_handled).await;
        let (slots, schedule) = (slots(&database, name).await, document(&database, name).await);
        let all = store.now().timestamp() / 86_400 / 1_000;
        assert_eq!(slots.len(), runs, "{name}");
        assert_eq!(schedule.get_document("skipped").unwrap().get_i64("missed").unwrap(), all - i64::try_from(runs).unwrap(), "{name}");
        assert!(slots.iter().rev().zip(0..).all(|(slot, back)| slot.timestamp() == (all - back) * 86_400_000), "{name}: the newest");
        assert!(schedule.get_datetime("next_run").unwrap().to_chrono() > store.now());
    }
    let job = database.only("scheduled", doc! { "schedule.name": "one" }).await;
    let id: JobId = job.get_object_id("_id").unwrap().into();
    assert_eq!(id.made_at(), job.get_datetime("scheduled_at").unwrap().to_chrono());
    drop(recruiter);
}

/// The job of a slot was inserted, and has ended, before its leader died.
#[tokio::test]
async fn a_slot_whose_job_is_archived_is_not_run_again() {
    let (database, store) = prepared().await;
    let slot = Instant::from_timestamp(store.now().timestamp() / 86_400_000 * 86_400_000, 0).unwrap();
    for (name, overlap, archived) in [("a", Overlap::Allow, true), ("b", Overlap::Skip, true), ("c", Overlap::Skip, false)] {
        declared(&store, name, Schedule::every(LONG).unwrap().job(noop()).overlap(overlap)).await;
        set(&database, name, doc! { "last_slot": bson::DateTime::from_chrono(slot - TimeDelta::seconds(1)) }).await;
        if archived {
            database.raw("archived").insert_one(doc! { "_id": id_of_slot(name, slot), "why": "done" }).await.unwrap();
        } else {
            noop().with_id(id_of_slot(name, slot)).after(Duration::from_secs(3_600)).enqueue(&store).await.unwrap();
        }
    }
    let recruiter = Process::on(&database, "recruiter", &["run"]);
    for name in ["a", "b", "c"] {
        let is_handled = async || document(&database, name).await.get_datetime("last_slot").unwrap().to_chrono() == slot;
        wait_until(SOON, "its slot is handled", is_handled).await;
        let schedule = document(&database, name).await;
        let run = schedule.get_array("runs").unwrap()[0].as_document().unwrap();
        assert_eq!(JobId::from(run.get_object_id("job").unwrap()), id_of_slot(name, slot), "{name}");
        assert!(schedule.get("skipped").is_none(), "{name}: it is its own run");
    }
    assert_eq!(database.count("scheduled", doc! {}).await, 1);
    drop(recruiter);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_paused_schedule_rests_and_goes_on_with_its_next_slot() {
    let (database, store) = prepared().await;
    let system = System::start(&database, Setup::default());
    declared(&store, "s", every_second().missed(Missed::All(100))).await;
    until_runs(&database, "s", 2).await;
    let said = recruiter(&database, &["schedules", "pause", "s", "--reason", "a move"]);
    assert_eq!((said.code, said.out.as_str()), (0, "s: paused\n"), "{}", said.err);
    assert_eq!(recruiter(&database, &["schedules", "pause", "s"]).out, "s: paused-before\n");
    let from = store.now();
    pause(Duration::from_millis(2_500)).await;
    let paused = document(&database, "s").await;
    assert!(paused.get_document("paused").unwrap().get_str("reason").unwrap() == "a move", "{paused}");
    let listed = recruiter(&database, &["schedules", "list"]);
    assert!(listed.out.contains("paused") && listed.out.contains("a move"), "{}", listed.out);
    let resumed = store.now();
    assert_eq!(recruiter(&database, &["schedules", "resume", "s"]).out, "s: resumed\n");
    assert_eq!(recruiter(&database, &["schedules", "resume", "s"]).out, "s: not-paused\n");
    let runs_again = async || slots(&database, "s").await.last().is_some_and(|slot| *slot > resumed + TimeDelta::seconds(1));
    wait_until(SOON, "it runs again", runs_again).await;
    let meanwhile: Vec<Instant> = slots(&database, "s").await.into_iter().filter(|slot| *slot > from && *slot <= resumed).collect();
    assert!(meanwhile.is_empty(), "{meanwhile:?}");
    for command in ["pause", "resume", "run", "show"] {
        let said = recruiter(&database, &["schedules", command, "nosuch"]);
        assert_eq!(said.code, 1, "{command}");
        assert!(said.err.contains("there is no schedule `nosuch`"), "{command}: {}", said.err);
    }
    system.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_schedule_can_be_run_now_shown_and_removed() {
    let (database, store) = prepared().await;
    declared(&store, "s", Schedule::cron("0 3 * * *", "Europe/Berlin").unwrap().job(noop().tag("t"))).await;
    let id = recruiter(&database, &["schedules", "run", "s", "--json"]).objects()[0]["id"].as_str().unwrap().to_owned();
    let job = database.only("scheduled", doc! { "schedule.manual": true, "schedule.name": "s", "tags": "t" }).await;
    assert_eq!(job.get_object_id("_id").unwrap().to_hex(), id);
    let shown = &recruiter(&database, &["schedules", "show", "s", "--json"]).objects()[0];
    assert_eq!((&shown["runs"][0]["job"]["$oid"], &shown["runs"][0]["manual"]), (&json!(id), &json!(true)));
    assert_eq!(shown["next_runs"].as_array().unwrap().len(), 5);
    assert_eq!((&shown["name"], shown.get("_id")), (&json!("s"), None));
    let own_fields = doc! { "$set": { "name": "other", "state": "other" } };
    database.raw("schedulers").update_one(doc! { "_id": "s" }, own_fields).await.unwrap();
    let listed = &recruiter(&database, &["schedules", "list", "--json"]).objects()[0];
    assert_eq!((&listed["name"], &listed["state"], listed.get("_id")), (&json!("s"), &json!("active"), None));
    let text = recruiter(&database, &["schedules", "show", "s"]).out;
    for expected in ["0 3 * * * Europe/Berlin", "manual, job", "next run", "\"class\":\"noop\""] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
    // The history is bounded.
    for _ in 0..25 {
        store.schedules().run_now("s").await.unwrap();
    }
    assert_eq!(document(&database, "s").await.get_array("runs").unwrap().len(), 20);

    let said = recruiter(&database, &["schedules", "remove", "s", "nosuch"]);
    assert!(said.code == 1 && said.err.contains("there is no schedule `nosuch`; nothing was removed"), "{}", said.err);
    assert_eq!(recruiter(&database, &["schedules", "remove", "s", "--dry-run"]).out, "(dry run) s: removed\n");
    assert_eq!(database.count("schedulers", doc! {}).await, 1);
    assert_eq!(recruiter(&database, &["schedules", "remove", "s"]).out, "s: removed\n");
    assert_eq!((database.count("schedulers", doc! {}).await, database.count("scheduled", doc! {}).await), (0, 26));
    assert_eq!(recruiter(&database, &["schedules", "list"]).out, "there are no schedules\n");
}

#[tokio::test]
async fn a_removed_schedule_does_not_run() {
    let (database, store) = prepared().await;
    let system = System::start(&database, Setup::default());
    declared(&store, "s", every_second()).await;
    declared(&store, "other", every_second()).await;
    until_runs(&database, "s", 1).await;
    assert!(store.schedules().remove("s", None).await.unwrap());
    assert!(!store.schedules().remove("s", None).await.unwrap());
    // A step that was on its way may still insert one job. It ends before the next step of the other schedule but one.
    let others = slots(&database, "other").await.len();
    until_runs(&database, "other", others + 2).await;
    let before = slots(&database, "s").await;
    until_runs(&database, "other", others + 4).await;
    assert_eq!(slots(&database, "s").await, before);
    system.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_file_is_the_truth_about_its_namespace() {
    let ((database, store), directory) = (prepared().await, tempfile::tempdir().unwrap());
    let path = directory.path().join("schedules.toml");
    let file = path.display().to_string();
    let apply = |text: &str, args: &[&str]| {
        std::fs::write(&path, format!("namespace = \"shop\"\n{text}")).unwrap();
        recruiter(&database, &[&["schedules", "apply", &file], args].concat())
    };
    declared(&store, "foreign", every_second()).await;
    let a = "[schedules.a]\nevery = \"1h\"\njob = { class = \"noop\", parameters = { n = 1 } }\n";
    let b = "[schedules.b]\ncron = \"0 3 * * *\"\nzone = \"Europe/Berlin\"\njob = { class = \"nosuch\" }\n";
    let outcomes = |said: &super::cli::Said| {
        let word = |line: serde_json::Value| (line["name"].as_str().unwrap().to_owned(), line["outcome"].as_str().unwrap().to_owned());
        said.objects().into_iter().map(word).collect::<BTreeMap<_, _>>()
    };
    let expect = |said: &super::cli::Said, expected: &[(&str, &str)]| {
        let expected: BTreeMap<String, String> = expected.iter().map(|(name, word)| ((*name).to_owned(), (*word).to_owned())).collect();
        assert_eq!(outcomes(said), expected);
    };
    expect(&apply(&format!("{a}{b}"), &["--dry-run", "--json"]), &[("a", "created"), ("b", "created")]);
    assert_eq!(database.count("schedulers", doc! {}).await, 1);
    let said = apply(&format!("{a}{b}"), &["--json"]);
    expect(&said, &[("a", "created"), ("b", "created")]);
    assert!(said.err.contains("warning: no worker is running"), "{}", said.err);
    let first = document(&database, "a").await;
    assert_eq!(first.get_str("source").unwrap(), "shop");
    expect(&apply(&format!("{a}{b}"), &["--json"]), &[("a", "unchanged"), ("b", "unchanged")]);
    assert_eq!(document(&database, "a").await, first, "nothing was written");
    let changed = a.replace("n = 1", "n = 2");
    expect(&apply(&changed, &["--dry-run", "--json"]), &[("a", "changed"), ("b", "removed")]);
    assert_eq!(database.count("schedulers", doc! {}).await, 3);
    expect(&apply(&changed, &["--json"]), &[("a", "changed"), ("b", "removed")]);
    let second = document(&database, "a").await;
    assert_eq!(second.get_datetime("last_slot").unwrap(), first.get_datetime("last_slot").unwrap(), "its times are the same");
    assert_eq!(second.get_i64("revision").unwrap(), 2);
    let names = database.raw("schedulers").distinct("_id", doc! {}).await.unwrap();
    assert_eq!(names, ["a", "foreign"].map(Bson::from));

    // One bad entry: nothing of the file is written.
    let c = "[schedules.c]\nevery = \"1h\"\njob = { class = \"noop\" }\n";
    let said = apply(&format!("{c}[schedules.d]\ncron = \"0 0 31 2 *\"\njob = {{ class = \"noop\" }}\n"), &[]);
    assert_eq!(said.code, 78);
    assert!(said.err.contains("schedules.toml:6:8: `0 0 31 2 *` never runs"), "{}", said.err);
    // Neither if one belongs to another.
    let said = apply(&format!("{c}{}", a.replace("schedules.a", "schedules.foreign")), &[]);
    assert_eq!(said.code, 1);
    assert!(said.err.contains("`foreign` belongs to no namespace") && said.err.contains("nothing was changed"), "{}", said.err);
    let taken = store.schedules().declare("a", &every_second()).await;
    assert!(matches!(taken, Err(ScheduleError::Owned { owner: Some(owner), .. }) if owner == "shop"));
    assert_eq!(database.raw("schedulers").distinct("_id", doc! {}).await.unwrap(), ["a", "foreign"].map(Bson::from));
    let said = recruiter(&database, &["schedules", "apply", "/nosuch.toml"]);
    assert!(said.code == 78 && said.err.contains("cannot read the file of schedules `/nosuch.toml`"), "{}", said.err);
    // Everything that a dry run accepts: blanks of other scripts, and every name.
    let odd = "[schedules.a]\ncron = \" 0\\u00A03\\u2003* * *\"\njob = { class = \"noop\" }\n".to_owned()
        + "[schedules.e]\ncron = \"@Midnight\"\njob = { class = \"noop\" }\n";
    for args in [&["--dry-run", "--json"][..], &["--json"]] {
        expect(&apply(&odd, args), &[("a", "changed"), ("e", "created")]);
    }
    let said = apply(&odd.replace("@Midnight", "@every 5m"), &["--dry-run"]);
    assert!(
        said.code == 78 && said.err.contains("schedules.toml:6:8: `@every 5m` is not a cron expression: a fixed interval"),
        "{}",
        said.err
    );
    expect(&apply(a, &["--json"]), &[("a", "changed"), ("e", "removed")]);
    // An empty file removes all of its own.
    expect(&apply("", &["--json", "--yes"]), &[("a", "removed")]);
}

/// The file in the documentation, as it is there.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn the_documented_file_can_be_applied() {
    let page = std::fs::read_to_string(super::tidy::root().join("docs/schedules.md")).unwrap();
    let (_, rest) = page.split_once("```toml\n").unwrap();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("schedules.toml");
    std::fs::write(&path, rest.split_once("```").unwrap().0).unwrap();
    let database = TestDatabase::new().await;
    let said = recruiter(&database, &["schedules", "apply", path.to_str().unwrap()]);
    assert_eq!((said.code, said.out.as_str()), (0, "nightly_report: created\nping: created\n"), "{}", said.err);
    let report = document(&database, "nightly_report").await;
    assert_eq!((report.get_str("zone").unwrap(), report.get_str("overlap").unwrap()), ("Europe/Berlin", "skip"));
}

/// Written in mongosh: the least that a schedule needs, and an edit.
#[tokio::test]
async fn a_schedule_that_was_written_by_hand_runs() {
    let (database, store) = prepared().await;
    let system = System::start(&database, Setup::default());
    let by_hand = doc! { "_id": "s", "cron": "* * * * * *", "job": { "class": "noop" } };
    let before = store.now();
    database.raw("schedulers").insert_one(by_hand).await.unwrap();
    until_runs(&database, "s", 1).await;
    let is_complete = async || system.cleaner.stderr().contains("watching") && database.count("roster", doc! {}).await == 1;
    wait_until(SOON, "no process is left that would replace the validator", is_complete).await;
    // Another program's validator.
    let refusing = doc! { "collMod": "schedulers", "validator": { "$or": [{ "_id": { "$ne": "0" } }, { "last_slot": long_ago() }] } };
    database.database().run_command(refusing).await.unwrap();
    // Of no release's validator: each has another problem, and no other schedule notices.
    let bad = [
        doc! { "_id": "bad-cron", "cron": "soon", "job": { "class": "noop" } },
        doc! { "_id": "bad-zone", "cron": "* * * * *", "zone": "Nowhere", "job": { "class": "noop" } },
        doc! { "_id": "bad-date", "every_ms": 1_000, "last_slot": bson::DateTime::MAX, "job": { "class": "noop" } },
        doc! { "_id": "bad-job", "every_ms": 1_000, "job": 5 },
        doc! { "_id": 5, "every_ms": 1_000, "job": { "class": "noop" } },
        doc! { "_id": "a bad class", "every_ms": 1_000, "job": { "class": "x".repeat(1_000) } },
        // MongoDB refuses to advance it. The paused ones are read with it: "s" is in the next batch.
        doc! { "_id": "0", "every_ms": 1_000, "last_slot": long_ago(), "job": { "class": "noop" } },
    ];
    let paused = (0..60).map(|n| doc! { "_id": format!("1-{n}"), "every_ms": 1_000, "paused": { "by": "me" }, "job": { "class": "noop" } });
    let bad = bad.into_iter().chain(paused).collect::<Vec<_>>();
    database.raw("schedulers").insert_many(bad).bypass_document_validation(true).await.unwrap();
    until_runs(&database, "s", 2).await;
    assert!(slots(&database, "s").await.iter().all(|slot| *slot > before), "it counts from its first sight");
    let edit = doc! { "$set": { "job.class": "edited" }, "$inc": { "revision": 1 } };
    database.raw("schedulers").update_one(doc! { "_id": "s" }, edit).await.unwrap();
    wait_until(SOON, "the edit counts", async || database.count("scheduled", doc! { "workable.class": "edited" }).await > 0).await;
    let listed = store.schedules().list().await.unwrap();
    assert_eq!(listed.iter().filter(|(_, schedule)| schedule.is_err()).count(), 6);
    assert!(system.recruiter.stderr().contains("a schedule cannot run"), "{}", system.recruiter.stderr());
    system.stop().await;
}

#[tokio::test]
async fn a_document_that_is_no_schedule_is_refused() {
    let (database, _) = prepared().await;
    let schedule = |with: Document| {
        let mut document = doc! { "_id": "s", "every_ms": 60_000, "job": { "class": "c" } };
        document.extend(with);
        document.into_iter().filter(|(_, value)| *value != Bson::from("absent")).collect::<Document>()
    };
    let good = [
        doc! {},
        doc! { "every_ms": "absent", "cron": "0 3 * * MON", "zone": "Europe/Berlin" },
        doc! { "every_ms": Bson::Null, "cron": "@daily" },
        doc! { "overlap": "skip", "missed": "all", "missed_limit": 5, "jitter_ms": 10_i64, "source": "x", "paused": { "by": "me" } },
        doc! { "job": { "class": "c", "items": [{}], "priority": 9, "tags": ["t"], "keep": "failures", "parameters": [] } },
    ];
    for with in good {
        database.raw("schedulers").insert_one(schedule(with.clone())).await.unwrap_or_else(|error| panic!("{with}: {error}"));
        database.raw("schedulers").delete_many(doc! {}).await.unwrap();
    }
    let bad = [
        doc! { "_id": "" },
        doc! { "_id": 5 },
        doc! { "job": "absent" },
        doc! { "job": {} },
        doc! { "job": { "class": 5 } },
        doc! { "job": { "class": "c", "priority": 10 } },
        doc! { "job": { "class": "c", "items": [] } },
        doc! { "job": { "class": "c", "parameters": { "d": "x".repeat(5 << 20) } } },
        doc! { "every_ms": "absent" },
        doc! { "every_ms": 999 },
        doc! { "every_ms": 1_000.5 },
        doc! { "cron": "* * * * *" },
        doc! { "every_ms": "absent", "cron": "* * *" },
        doc! { "every_ms": "absent", "cron": 5 },
        doc! { "zone": 5 },
        doc! { "jitter_ms": -1 },
        doc! { "overlap": "no" },
        doc! { "missed": "two" },
        doc! { "missed_limit": 0 },
        doc! { "paused": true },
        doc! { "paused": { "by": 5 } },
        doc! { "last_slot": 5 },
        doc! { "runs": [{}] },
        doc! { "source": "" },
    ];
    for with in bad {
        let refused = database.raw("schedulers").insert_one(schedule(with.clone())).await;
        assert!(refused.is_err(), "{with:.200}");
    }
}

#[tokio::test]
async fn bad_declarations_are_refused_and_write_nothing() {
    let (database, store) = prepared().await;
    let check = async |schedule: Schedule, name: &str, expected: &str| {
        let problem = store.schedules().declare(name, &schedule).await.expect_err(expected).to_string();
        assert!(problem.contains(expected), "{problem}");
    };
    check(every_second().jitter(2 * SECOND), "a", "a jitter of 2s is not possible").await;
    check(every_second(), "", "the name of a schedule is empty").await;
    check(every_second().job(NewJob::of_class("", doc! {})), "a", "the class of a job is empty").await;
    check(every_second().job(NewJob::of_class("c", doc! { "d": "x".repeat(5 << 20) })), "a", "store the data elsewhere").await;
    check(every_second().job(noop().after(SECOND)), "a", "cannot have an id, a date").await;
    check(Schedule::every(SECOND).unwrap(), "a", "has no job").await;
    assert_eq!(database.count("schedulers", doc! {}).await, 0);
    // The largest job that can be enqueued can be repeated.
    let large = NewJob::of_class("c", doc! { "d": "x".repeat((4 << 20) - 200) });
    declared(&store, "large", every_second().job(large)).await;
    // Two at the same time: one creates, both succeed.
    let schedule = Schedule::every(LONG).unwrap().job(noop());
    let schedules = store.schedules();
    let both = tokio::join!(schedules.declare("b", &schedule), schedules.declare("b", &schedule));
    let both = BTreeSet::from([both.0.unwrap().word(), both.1.unwrap().word()]);
    assert!(both.contains("created") && both.len() == 2, "{both:?}");
}
