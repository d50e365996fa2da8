//! Control from afar: workers that are quiet or stopped, waiting jobs that are changed, running jobs that extend their time limit.

use std::time::{Duration, Instant};

use bson::doc;
use recruiter_common::{
    JobFilter, JobId, NewJob, Priority, RetryManyTimes, WorkerId,
    control::{Alteration, Change, Changed, Refusal},
    shutdown::{Shutdown, pause},
    workers::{Chosen, WorkerChange},
};
use recruiter_tests::{
    factory::{again, read, start, to_start},
    ledger::{Entry, Event},
    local::{self, Local, connect_args, ids, prepared, store},
    mongo::TestDatabase,
    oracle::Policy,
    promise,
    wait::{SOON, in_a_few_tries, wait_until},
    workable,
    world::{Role, World},
};
use recruiter_worker::{BlockingExecutable, Context, Ended, Executable, NotDone, Workable, Worker, WorkerConfig};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::limits::cli;

async fn host(world: &World) -> String {
    let worker = world.database.raw("roster").find_one(doc! {}).await.unwrap().expect("a worker");
    worker.get_str("hostname").unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_quiet_worker_ends_its_jobs_and_takes_no_more_across_recruiters() {
    let mut world = World::new().await;
    world.start(Role::Recruiter, &[], &[]);
    world.start(Role::Cleaner, &["--dead-after", "10m"], &[]);
    world.start(Role::Worker, &["--concurrency", "5", "--lease", "10m"], &[]);
    let mut long = Vec::new();
    for _ in 0..3 {
        long.push(world.enqueue(Entry::lasting(2_000), Policy::Never).await.unwrap());
    }
    world.wait_for("the long jobs run", async || world.begun().len() == 3).await;
    let host = host(&world).await;
    let (code, out, err) = cli(&world.database, &["workers", "quiet", "--all", "--dry-run"]);
    assert!(code == 0 && out.contains("(dry run) would be made quiet"), "{out}{err}");
    assert_eq!(world.count("roster", doc! { "wanted": "quiet" }).await, 0);
    let (code, out, err) = cli(&world.database, &["workers", "quiet", "--host", &host, "--by", "ada", "--json"]);
    assert!(code == 0 && out.contains(r#""outcome":"done""#), "{out}{err}");
    world.wait_for("it offers nothing", async || world.count("roster", doc! { "available": false }).await == 1).await;
    let mut short = Vec::new();
    for _ in 0..10 {
        short.push(world.enqueue(Entry::lasting(0), Policy::Never).await.unwrap());
    }
    world.members[0].process.kill();
    assert!(world.until(SOON, async |world| world.started().await == 0).await, "{}", world.logs());
    for job in &long {
        assert!(world.archived(*job).await.is_some(), "{}", world.logs());
    }
    let led_again = doc! { "_id": "recruiter", "term": { "$gt": 1 } };
    let led_again = world.until(SOON, async |world| world.count("metadata", led_again.clone()).await == 1).await;
    assert!(led_again && world.until(SOON, async |world| cli(&world.database, &["stats"]).1.contains("\nleader: ")).await);
    world.start(Role::Worker, &["--work-on", "later"], &[]);
    world.later_job(Entry::lasting(0).in_group("later")).await;
    assert_eq!(world.begun().len(), 3 + 1, "{}", world.logs());
    let (_, out, _) = cli(&world.database, &["roster"]);
    assert!(out.contains("quiet wanted by ada") && out.contains("0/5"), "{out}");
    let (_, out, _) = cli(&world.database, &["jobs", "why", &short[0].to_string()]);
    assert!(out.contains("is quiet or stops") && out.contains("recruiter workers resume"), "{out}");
    assert!(cli(&world.database, &["workers", "quiet", "--all"]).1.contains("is quiet already"));
    assert!(cli(&world.database, &["workers", "resume", "--host", &host]).1.contains("takes jobs again"));
    world.wait_for("the others run", async || world.begun().len() == 13 + 1).await;
    assert!(cli(&world.database, &["workers", "resume", "--all"]).1.contains("is not quiet"));
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_quiet_worker_returns_its_jobs_ahead_to_the_others() {
    let mut world = World::new().await;
    world.start(Role::Recruiter, &[], &[]);
    world.start(Role::Worker, &["--concurrency", "2"], &[]);
    let change = async |change| assert_eq!(world.store.workers().change(change, &Chosen::All, "ada", false).await.unwrap().len(), 1);
    let is_quiet_before_all_is_done = async || {
        let before = world.begun().len();
        world.store.enqueue_many((0..1_000).map(|_| Entry::lasting(20))).await.unwrap();
        world.wait_for("some ran", async || world.begun().len() > before + 20).await;
        change(WorkerChange::Quiet).await;
        world.wait_for("it holds nothing", async || world.count("roster", doc! { "available": false, "working": false }).await == 1).await;
        if world.count("scheduled", doc! {}).await == 0 {
            change(WorkerChange::Resume).await;
            return None;
        }
        Some(world.begun().len())
    };
    let before = in_a_few_tries("it is quiet before it has done all of them", is_quiet_before_all_is_done).await;
    world.start(Role::Worker, &["--concurrency", "50"], &[]);
    world.wait_for("the other one takes them", async || world.unfinished().await == 0).await;
    let quiet = world.members[1].process.pid();
    let by_quiet = world.ledger().iter().filter(|line| line.event == Event::Begin && line.worker == quiet).count();
    assert_eq!(by_quiet, before);
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_are_stopped_by_host_with_code_0_once_their_jobs_end() {
    let mut world = World::new().await;
    world.start(Role::Recruiter, &[], &[]);
    let mut stopped: Vec<_> = (0..2).map(|_| world.beside(&[], Role::Worker, &["--grace", "10m"])).collect();
    world.wait_for("both are there", async || world.count("roster", doc! { "available": true }).await == 2).await;
    let job = world.enqueue(Entry::lasting(600_000), Policy::Never).await.unwrap();
    world.wait_for("it runs", async || world.begun().len() == 1).await;
    let host = host(&world).await;
    let (code, out, err) = cli(&world.database, &["workers", "stop", "--host", &host]);
    assert!(code == 0 && out.matches("drains and ends").count() == 2, "{out}{err}");
    let (code, _, err) = cli(&world.database, &["workers", "resume", "--host", &host]);
    assert!(code == 1 && err.contains("cannot be undone"), "{err}");
    // Its worker lets it run until another process ends it.
    assert_eq!(cli(&world.database, &["jobs", "cancel", &job.to_string()]).0, 0);
    for process in &mut stopped {
        assert_eq!(process.wait_exit(SOON).await.code(), Some(0), "{}", process.stderr());
    }
    assert_eq!(world.archived(job).await.unwrap().get_str("why").unwrap(), "cancelled");
    assert_eq!(world.count("roster", doc! {}).await, 0);
    let (code, _, err) = cli(&world.database, &["workers", "stop", "--host", &host]);
    assert!(code == 1 && err.contains("no worker on the host"), "{err}");
}

/// The hint may be lost. The heartbeat remains.
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_reads_what_is_wanted_without_a_hint_and_stays_quiet_when_it_returns() {
    let mut world = World::new().await;
    world.start(Role::Recruiter, &[], &[]);
    world.start(Role::Worker, &[], &[]);
    world.wait_for("it is there", async || world.count("roster", doc! { "available": true }).await == 1).await;
    let roster = world.database.raw("roster");
    roster.update_one(doc! {}, doc! { "$set": { "wanted": "rest" } }).await.unwrap();
    for _ in 0..2 {
        let seen = doc! { "last_seen_at": roster.find_one(doc! {}).await.unwrap().unwrap().get("last_seen_at") };
        world.wait_for("a heartbeat", async || world.count("roster", seen.clone()).await == 0).await;
    }
    assert_eq!(world.count("roster", doc! { "available": true }).await, 1, "a word that it does not know");
    roster.update_one(doc! {}, doc! { "$set": { "wanted": "quiet", "wanted_by": "ada" } }).await.unwrap();
    world.wait_for("it is quiet", async || world.count("roster", doc! { "available": false }).await == 1).await;
    // A cleaner declares it dead, and removes its document.
    let first: WorkerId = roster.find_one(doc! {}).await.unwrap().unwrap().get_object_id("_id").unwrap().into();
    roster.delete_one(doc! { "_id": first }).await.unwrap();
    let again = doc! { "_id": { "$ne": first }, "wanted": "quiet", "wanted_by": "ada", "available": false };
    world.wait_for("it is back and quiet", async || world.count("roster", again.clone()).await == 1).await;
    let job = world.enqueue(Entry::lasting(0), Policy::Never).await.unwrap();
    world.start(Role::Worker, &["--work-on", "later"], &[]);
    world.later_job(Entry::lasting(0).in_group("later")).await;
    assert!(!world.begun().contains(&job));
    world.store.workers().change(WorkerChange::Resume, &Chosen::All, "ada", false).await.unwrap();
    world.wait_for("it runs", async || world.archived(job).await.is_some()).await;
}

#[derive(Clone, Serialize, Deserialize)]
struct Slow {
    /// How long it takes, and by how much it extends its limit every 50 ms.
    ms: u64,
    extends_ms: u64,
}
workable!(Slow);

impl Executable for Slow {
    type State = ();

    async fn execute(&self, (): &(), job: &Context) -> Result<(), NotDone> {
        let end = Instant::now() + Duration::from_millis(self.ms);
        while Instant::now() < end {
            job.extend(Duration::from_millis(self.extends_ms));
            pause(Duration::from_millis(50)).await;
        }
        Ok(())
    }

    fn time_limit(&self) -> Option<Duration> {
        Some(Duration::from_millis(300))
    }
}

#[derive(Clone, Serialize, Deserialize)]
struct SlowThread(Slow);
workable!(SlowThread);

impl BlockingExecutable for SlowThread {
    type State = ();

    fn execute(&self, (): &(), job: &Context) -> Result<(), NotDone> {
        let end = Instant::now() + Duration::from_millis(self.0.ms);
        while Instant::now() < end && !job.is_cancelled() {
            job.extend(Duration::from_millis(self.0.extends_ms));
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    fn time_limit(&self) -> Option<Duration> {
        Some(Duration::from_millis(300))
    }
}

#[derive(Serialize, Deserialize)]
struct NotYet {
    at_most: u32,
}
workable!(NotYet);

impl Executable for NotYet {
    type State = ();

    async fn execute(&self, (): &(), _: &Context) -> Result<(), NotDone> {
        Err(NotDone::snooze(Duration::from_millis(20), "NotReady", "the report is not ready").at_most(self.at_most))
    }
}

fn worker() -> Worker {
    Worker::new().register::<Slow>(()).unwrap().register_blocking::<SlowThread>(()).unwrap().register::<NotYet>(()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_running_job_extends_its_time_limit() {
    let (database, store) = prepared().await;
    let processes = Local::pair(&database, &[], worker(), &[]);
    let check = async |job: NewJob, class: Option<&str>| {
        let id = job.enqueue(&store).await.unwrap().id;
        let archived = database.archived(id).await;
        let last = archived.get_document("last_execution").unwrap();
        assert_eq!(last.get_str("class").ok(), class, "{archived}");
        last.get_str("message").unwrap_or_default().to_owned()
    };
    let slow = |ms, extends_ms| Slow { ms, extends_ms };
    // On a busy machine an attempt may come too late to extend its limit.
    for job in [slow(900, 100).as_job(), SlowThread(slow(900, 100)).as_job(), slow(900, i64::MAX.unsigned_abs()).as_job()] {
        check(job.retry(&again(19)), None).await;
    }
    for job in [slow(600_000, 0).as_job(), SlowThread(slow(600_000, 0)).as_job()] {
        assert!(check(job, Some("timeout")).await.contains("time limit of 300ms"));
    }
    // 300 ms, and 10 ms more every 50 ms.
    wait_until(SOON, "an extended limit is named", async || {
        let message = check(slow(600_000, 10).as_job(), Some("timeout")).await;
        message.contains("time limit of 3") && !message.contains("of 300ms")
    })
    .await;
    local::stop(processes).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snooze_has_a_reason_and_a_cap() {
    let (database, store) = prepared().await;
    let processes = Local::pair(&database, &[], worker(), &[]);
    let policy = RetryManyTimes::new(1, Duration::from_millis(20)).unwrap();
    let id = NotYet { at_most: 2 }.as_job().retry(&policy).enqueue(&store).await.unwrap().id;
    let archived = database.archived(id).await;
    let messages: Vec<&str> = archived
        .get_array("executions")
        .unwrap()
        .iter()
        .map(|execution| execution.as_document().unwrap().get_str("message").unwrap())
        .collect();
    let (snoozed, failed) = ("the report is not ready", "the report is not ready (snoozed 2 times, the limit of this class)");
    assert_eq!(messages, [snoozed, snoozed, failed, failed], "{archived}");
    assert_eq!(archived.get_str("why").unwrap(), "tried-too-many-times");
    local::stop(processes).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_embedded_worker_that_is_stopped_from_afar_returns() {
    let database = TestDatabase::new().await;
    let (_trigger, shutdown) = Shutdown::manual();
    let config = WorkerConfig::default().heartbeat(SOON * 5).lease(SOON * 15);
    let running = tokio::spawn(worker().run(connect_args(&database), config, shutdown));
    let store = store(&database).await;
    database.until("roster", doc! { "available": true }, 1, "it is there").await;
    let id: WorkerId = database.raw("roster").find_one(doc! {}).await.unwrap().unwrap().get_object_id("_id").unwrap().into();
    let answers = store.workers().change(WorkerChange::Stop, &Chosen::Ids(vec![id]), "ada", false).await.unwrap();
    assert!(!answers[0].asked.is_refused());
    let ended = tokio::time::timeout(SOON, running).await.expect("the hint is faster than a heartbeat").unwrap();
    assert!(matches!(ended, Ok(Ended::Stopped)), "{ended:?}");
    assert_eq!(database.count("roster", doc! {}).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_jobs_get_another_date_group_and_priority() {
    let mut world = World::new().await;
    world.start(Role::Recruiter, &["--lease", "30m", "--poll", "10m"], &[]);
    world.start(Role::Worker, &["--work-on", "generic", "--lease", "10m"], &[]);
    world.wait_for("it is there", async || world.count("roster", doc! { "available": true }).await == 1).await;
    let mut jobs = Vec::new();
    for _ in 0..20 {
        jobs.push(world.enqueue(Entry::lasting(0).in_group("other").tag("t"), Policy::Never).await.unwrap());
    }
    let change = |args: &[&str]| cli(&world.database, &[&["jobs", "change"], args].concat());
    let (code, out, err) = change(&["--tag", "t", "--priority", "9", "--dry-run"]);
    assert!(code == 0 && out.contains("(dry run) 20 changed"), "{out}{err}");
    assert_eq!(world.count("scheduled", doc! { "priority": 9 }).await, 0);
    let (code, out, err) = change(&["--tag", "t", "--priority", "9", "--after", "1h", "--yes", "--json"]);
    assert!(code == 0 && out.contains(r#""outcomes":{"changed":20}"#), "{out}{err}");
    assert_eq!(world.count("scheduled", doc! { "priority": 9, "scheduled_at": { "$gt": bson::DateTime::now() } }).await, 20);
    assert!(change(&["--tag", "t", "--priority", "9", "--yes"]).1.contains("20 unchanged"));
    assert!(change(&["--tag", "t", "--after", "9000000days", "--yes"]).1.contains("20 changed"));
    let latest = bson::DateTime::parse_rfc3339_str("9999-12-31T23:59:59.999Z").unwrap();
    assert_eq!(world.count("scheduled", doc! { "scheduled_at": latest }).await, 20);
    // The poll interval is long: only the hints are fast enough.
    let began = Instant::now();
    let at = bson::DateTime::from_millis(bson::DateTime::now().timestamp_millis() + 800).try_to_rfc3339_string().unwrap();
    let (code, out, err) = change(&["--tag", "t", "--to-group", "generic", "--at", &at, "--yes"]);
    assert!(code == 0 && out.contains("20 changed"), "{out}{err}");
    world.wait_for("they run in their new group", async || world.unfinished().await == 0).await;
    assert!(began.elapsed() >= Duration::from_millis(500), "{:?}", began.elapsed());
    let (code, _, err) = change(&[&jobs[0].to_string(), "--priority", "1"]);
    assert!(code == 1 && err.contains("archived already"), "{err}");
    assert!(change(&["--tag", "t", "--priority", "1", "--yes"]).1.contains("no matching job can be changed"));
}

/// A job is either started as it was or changed, and both sides know which.
#[tokio::test(flavor = "multi_thread")]
async fn a_change_and_a_start_never_both_win() {
    let (database, store) = prepared().await;
    let (mut started, mut changed) = (0, 0);
    for round in 0..20 {
        let jobs: Vec<JobId> = ids(store.enqueue_many((0..40).map(|_| NewJob::of_class("x", doc! {}))).await.unwrap());
        let to_start = to_start(&read(&store, &jobs).await);
        let alteration = match round % 2 {
            0 => Alteration::new(None, None, Some(store.now() + chrono::TimeDelta::hours(1))),
            _ => Alteration::new(Some(Priority::new(1).unwrap()), Some("other".into()), None),
        };
        let (change, by) = (Change::Alter(alteration.unwrap()), start(&store, WorkerId::new()));
        let mut control = store.control(false);
        let altering = async {
            pause(Duration::from_micros(300 * (round % 7))).await;
            control.change(&change, &jobs).await.unwrap()
        };
        let (claims, outcomes) = tokio::join!(store.start_if_unlocked(&by, &to_start), altering);
        let claims: Vec<JobId> = claims.unwrap().iter().map(|claim| claim.job()).collect();
        for (job, outcome) in outcomes {
            if outcome == Changed::Altered {
                promise!(!claims.contains(&job), "changed, and started as it was before");
            } else {
                assert!(matches!(outcome, Changed::Refused(Refusal::Started { .. })) && claims.contains(&job), "{outcome:?}");
            }
            *(if claims.contains(&job) { &mut started } else { &mut changed }) += 1;
        }
        database.raw("scheduled").delete_many(doc! {}).await.unwrap();
    }
    assert_eq!(started + changed, 800);
}

#[tokio::test]
async fn bad_input_is_refused_with_the_reason_and_changes_nothing() {
    let (database, store) = prepared().await;
    let id = NewJob::of_class("x", doc! {}).enqueue(&store).await.unwrap().id;
    let before = database.raw("scheduled").find_one(doc! {}).await.unwrap();
    let (hex, long) = (id.to_string(), "x".repeat(300));
    let table: &[(&[&str], i32, &str)] = &[
        (&["jobs", "change", "--class", "x", "--yes"], 2, "nothing is to be changed"),
        (&["jobs", "change", "--priority", "3", "--yes"], 2, "name the jobs to be changed"),
        (&["jobs", "change", &hex, "--all", "--priority", "3"], 2, "cannot be combined"),
        (&["jobs", "change", "--class", "x", "--priority", "10", "--yes"], 2, "10"),
        (&["jobs", "change", "--class", "x", "--priority", "-1", "--yes"], 2, "-1"),
        (&["jobs", "change", "--class", "x", "--to-group", "", "--yes"], 2, "is empty"),
        (&["jobs", "change", "--class", "x", "--to-group", &long, "--yes"], 2, "300 bytes"),
        (&["jobs", "change", "--class", "x", "--at", "noon", "--yes"], 2, "not an instant"),
        (&["jobs", "change", "--class", "x", "--at", "2030-01-31T18:00:00Z", "--after", "1h", "--yes"], 2, "cannot be used with"),
        (&["jobs", "change", "--class", "x", "--at", "0000-01-31T18:00:00Z", "--yes"], 2, "years 1 to 9999"),
        (&["jobs", "change", "--class", "x", "--after", "soon", "--yes"], 2, "not a duration"),
        (&["jobs", "change", "--state", "running", "--class", "x", "--priority", "3", "--yes"], 2, "only waiting jobs"),
        (&["jobs", "change", "--why", "done", "--priority", "3", "--yes"], 2, "only waiting jobs"),
        (&["jobs", "change", "--class", "x", "--priority", "3"], 2, "add --yes"),
        (&["jobs", "change", "65a1b2c3d4e5f60718293a4b", "--priority", "3"], 1, "no job has this id"),
        (&["workers", "quiet"], 2, "name the workers"),
        (&["workers", "quiet", "zz"], 2, "not the id of a worker"),
        (&["workers", "quiet", &hex, "--all"], 2, "cannot be combined"),
        (&["workers", "stop", "--host", "a", "--all"], 2, "cannot be used with"),
        (&["workers", "stop", "--host", "nosuch"], 1, "no worker on the host `nosuch`"),
        (&["workers", "stop", &hex], 1, "no living worker has this id"),
    ];
    for (args, code, said) in table {
        let (got, out, err) = cli(&database, args);
        assert!(got == *code && err.contains(said), "{args:?}: {got}\n{out}{err}");
    }
    assert_eq!(database.raw("scheduled").find_one(doc! {}).await.unwrap(), before);
    let (code, out, _) = cli(&database, &["workers", "stop", "--all"]);
    assert_eq!((code, out.as_str()), (0, "no worker is registered\n"));
}

#[tokio::test(flavor = "multi_thread")]
async fn stats_name_pauses_and_limits_that_jobs_wait_for() {
    let mut world = World::new().await;
    world.start(Role::Recruiter, &[], &[]);
    world.start(Role::Worker, &[], &[]);
    for args in [&["pause", "group:mail", "--by", "ada"][..], &["limits", "set", "printer", "--capacity", "1"]] {
        assert_eq!(cli(&world.database, args).0, 0);
    }
    let long = world.enqueue(Entry::lasting(600_000).limit("printer"), Policy::Never).await.unwrap();
    world.wait_for("it has the printer", async || world.begun().len() == 1).await;
    for job in [Entry::lasting(0).limit("printer"), Entry::lasting(0).limit("scanner"), Entry::lasting(0).in_group("mail")] {
        world.enqueue(job, Policy::Never).await.unwrap();
    }
    let (_, out, _) = cli(&world.database, &["stats"]);
    for said in ["jobs wait in mail: group:mail is paused by ada", "`printer` is full", "`scanner`, which has no limit yet"] {
        assert!(out.contains(said), "{said}\n{out}");
    }
    let json: Value = serde_json::from_str(&cli(&world.database, &["stats", "--json"]).1).unwrap();
    let mut reasons: Vec<&str> = json["held"].as_array().unwrap().iter().map(|held| held["reason"].as_str().unwrap()).collect();
    reasons.sort_unstable();
    assert_eq!(reasons, ["limit-full", "limit-undefined", "paused"], "{json}");
    let mut control = world.store.control(false);
    control.change(&Change::Cancel, &[long]).await.unwrap();
    let all = JobFilter::default().group("mail").narrowed_to(&Change::Cancel).unwrap();
    let report = control.change_all(&Change::Cancel, &all, |_, _| std::ops::ControlFlow::Continue(())).await.unwrap();
    assert_eq!(report.count("cancelled"), 1);
}
