//! The recruiter's searches for jobs, as recorded by MongoDB's profiler, and its hints. These tests limit the cost of a search.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex},
    time::Duration,
};

use bson::{Document, RawDocumentBuf, doc};
use mongodb::event::{EventHandler, command::CommandEvent};
use recruiter_common::{
    ConnectArgs, JobId, Limit, NewJob, Priority, RetryManyTimes, WorkerId,
    shutdown::pause,
    store::{Channel, Hint, Listener, Registration, ScheduledJob, Store},
};
use recruiter_tests::{
    factory::{announcement, minimal_job},
    fail_points::FailPoint,
    local::{self, Local, connect_args, prepared, store},
    mongo::TestDatabase,
    mongosh,
    proxy::{Action, Proxy},
    wait::{SOON, Stopwatch, best_of_three, wait_for, wait_until, within},
};
use recruiter_worker::Worker;
use tokio::time::timeout;

const NOBODYS: &str = "a class that no worker has";
/// A recruiter and a worker of these flags neither scan nor poll: what they do they do after a hint, or at a date.
const NEVER_SCANS: [&str; 4] = ["--poll", "10m", "--lease", "1h"];
const NEVER_POLLS: [&str; 6] = ["--poll", "10m", "--heartbeat", "10m", "--lease", "1h"];

/// The groups of each search for due jobs since the profiler was turned on.
async fn searched(database: &TestDatabase) -> Vec<BTreeSet<String>> {
    let filter = doc! { "command.find": "scheduled", "command.filter.$or": { "$exists": true } };
    let found = database.all("system.profile", filter).await;
    let groups = |search: &Document| {
        let lanes = search.get_document("command").unwrap().get_document("filter").unwrap().get_array("$or").unwrap();
        lanes.iter().map(|lane| lane.as_document().unwrap().get_str("group").unwrap().to_owned()).collect()
    };
    found.iter().map(groups).collect()
}

async fn profile(database: &TestDatabase) {
    // An account of two hundred scans is long.
    database.database().run_command(doc! { "create": "system.profile", "capped": true, "size": 64 * 1024 * 1024 }).await.unwrap();
    database.database().run_command(doc! { "profile": 2 }).await.unwrap();
}

fn only(group: &str) -> BTreeSet<String> {
    [group.to_owned()].into()
}

/// A recruiter and a worker of all builtin classes.
async fn system(database: &TestDatabase, work_on: &[&str]) -> (Store, [Local; 2]) {
    let store = store(database).await;
    let processes = Local::pair(database, &["--poll", "400ms"], builtins(), work_on);
    until_ready(database, 1).await;
    (store, processes)
}

fn builtins() -> Worker {
    Worker::new().register_builtins().unwrap()
}

async fn until_ready(database: &TestDatabase, workers: u64) {
    database.until("roster", doc! { "available": true, "term": { "$gt": 0 } }, workers, "all are there").await;
}

/// In a group without waiting jobs a search would walk over all that lately left it.
#[tokio::test]
async fn only_groups_with_waiting_jobs_are_searched_and_those_with_news_alone() {
    let database = TestDatabase::new().await;
    let (store, processes) = system(&database, &["--work-on", "waiting", "--work-on", "news", "--work-on", "empty"]).await;
    for group in ["waiting", "elsewhere"] {
        NewJob::of_class(NOBODYS, doc! {}).in_group(group).enqueue(&store).await.unwrap();
    }
    profile(&database).await;
    // Announced jobs are searched first.
    let repeated = async || searched(&database).await.into_iter().skip_while(|groups| *groups != only("waiting")).collect::<Vec<_>>();
    wait_until(SOON, "it has searched a few times", async || repeated().await.len() > 2).await;
    assert!(repeated().await.iter().all(|groups| *groups == only("waiting")), "{:?}", searched(&database).await);
    store.publish(&Hint::jobs_in(["news"])).await.unwrap();
    wait_until(SOON, "the announced lane is searched", async || searched(&database).await.contains(&only("news"))).await;
    local::stop(processes).await;
}

/// Jobs that were found but exceed the free slots are assigned in the next rounds; a search asks for no more.
#[tokio::test]
async fn a_search_finds_a_few_times_what_fits_and_not_without_end() {
    let check = async |places: &str, most: i64| {
        let database = TestDatabase::new().await;
        let (_, processes) = system(&database, &["--work-on", "g", "--concurrency", places]).await;
        profile(&database).await;
        let limit = async || {
            let search = doc! { "command.find": "scheduled", "command.filter.$or": { "$exists": true } };
            let search = database.raw("system.profile").find_one(search).await.unwrap()?;
            Some(search.get_document("command").unwrap().get_i64("limit").unwrap())
        };
        assert_eq!(wait_for(SOON, "it has searched", limit).await, most);
        local::stop(processes).await;
    };
    check("100", 400).await;
    check("4000", 9_000).await;
}

/// Only lanes that exist and have something due are searched, however many groups and classes there are.
#[tokio::test]
async fn lanes_without_due_jobs_are_not_searched() {
    let (database, store) = prepared().await;
    let later = |number: u32| NewJob::of_class("noop", doc! {}).in_group(format!("group-{number}")).after(Duration::from_secs(3_600));
    store.enqueue_many((0..101).map(later)).await.unwrap();
    let (store, processes) = system(&database, &["--work-on", "*"]).await;
    profile(&database).await;
    let walks = doc! { "command.aggregate": "scheduled", "command.pipeline.1.$group.first": { "$exists": true } };
    let walked = async || database.count("system.profile", walks.clone()).await > 2;
    wait_until(SOON, "the lanes are listed a few times", walked).await;
    assert_eq!(searched(&database).await, [] as [BTreeSet<String>; 0]);
    store.enqueue_many([NewJob::of_class("noop", doc! {}).in_group("group-7")]).await.unwrap();
    database.until("archived", doc! {}, 1, "a job that is due is done").await;
    local::stop(processes).await;
}

/// A full scan in between does not forget what a hint has said of a later date, in however many groups.
#[tokio::test]
async fn jobs_of_many_groups_start_at_their_date() {
    let (database, store) = prepared().await;
    let flags = [&NEVER_POLLS[..], &["--work-on", "*"]].concat();
    let processes = Local::pair(&database, &NEVER_SCANS, builtins(), &flags);
    until_ready(&database, 1).await;
    let dates = [1_000, 1_300, 1_600].map(|ms| store.now() + Duration::from_millis(ms));
    let job = |number: usize| NewJob::of_class("noop", doc! {}).in_group(format!("group-{number}")).at(dates[number % 3]);
    store.enqueue_many((0..150).map(job)).await.unwrap();
    store.publish(&Hint::Seed).await.unwrap();
    database.until("archived", doc! { "done": true }, 150, "all are done").await;
    local::stop(processes).await;
}

/// A worker whose slots are offered before it has a lease would refuse its first jobs.
#[tokio::test]
async fn a_worker_that_offers_slots_can_start_jobs() {
    let (database, store) = prepared().await;
    let beats = FailPoint::new("recruiter-worker-heartbeat", &["findAndModify"]).namespace(database.name(), "roster").close_connection();
    let armed = beats.arm(database.uri()).await;
    NewJob::of_class("noop", doc! {}).enqueue(&store).await.unwrap();
    let processes = Local::pair(&database, &NEVER_SCANS, builtins(), &NEVER_POLLS);
    database.until("archived", doc! { "done": true }, 1, "it is done").await;
    assert!(armed.struck().await > 0);
    drop(armed);
    local::stop(processes).await;
}

/// A job is announced while it is on its way. If that takes long, a recipient that searched for it has not found it.
#[tokio::test]
async fn what_was_announced_long_before_it_was_there_is_announced_again() {
    let (database, store) = prepared().await;
    let mut hints = store.hints(Listener::Recruiter);
    assert_eq!(hints.next().await, Hint::Seed);
    let job = || NewJob::of_class("noop", doc! {}).in_group("g");
    let announced = |hint: Hint| {
        let Hint::Jobs { groups, at: None, jobs } = hint else { panic!("{hint:?}") };
        (groups, jobs.len())
    };
    let slow = FailPoint::new("test", &["insert"]).namespace(database.name(), "scheduled").block(Duration::from_millis(200));
    let armed = slow.arm(database.uri()).await;
    job().enqueue(&store).await.unwrap();
    assert_eq!(armed.struck().await, 1);
    drop(armed);
    assert_eq!(announced(hints.next().await), (vec!["g".to_owned()], 1));
    assert_eq!(announced(hints.next().await), (vec!["g".to_owned()], 0), "to be looked for");
    // One that is quick is announced once: a busy machine may be slow now and then.
    let once = async || {
        job().enqueue(&store).await.unwrap();
        pause(Duration::from_millis(100)).await;
        let told: Vec<_> = std::iter::from_fn(|| hints.try_next()).collect();
        (told.len() == 1).then_some(())
    };
    wait_for(SOON, "it is announced once", once).await;
}

/// A worker may receive an assignment before the job is visible. The job counts as in flight until the worker reports that it is missing.
#[tokio::test]
async fn what_a_worker_did_not_find_is_looked_for_once_it_has_said_so() {
    let (database, store) = prepared().await;
    let recruiter = Local::recruiter(&database, &NEVER_SCANS);
    // Two workers, so that one has free slots in the meantime.
    let line = Proxy::before(database.uri()).await;
    let over = || ConnectArgs { uri: line.uri(database.name()), ..connect_args(&database) };
    let workers = [(); 2].map(|()| Local::worker_over(over(), builtins(), &NEVER_POLLS));
    until_ready(&database, 2).await;
    let report = line.arm(Action::Hold, .., |request| request.is("update", "roster"));
    let (id, mut job) = (JobId::new(), minimal_job("noop"));
    let announced = ScheduledJob { id, group: "generic".into(), class: "noop".into(), gate: None, priority: 5, scheduled_at: store.now() };
    job.extend(doc! { "_id": id, "scheduled_at": bson::DateTime::from_chrono(announced.scheduled_at) });
    let hint = Hint::Jobs { groups: vec![announced.group.clone()], at: None, jobs: vec![announced] };
    // A hint that arrives before the offers of the workers assigns nothing.
    let not_found = async || {
        store.publish(&hint).await.unwrap();
        let reports = async || {
            let roster = database.all("roster", doc! {}).await;
            roster.iter().any(|worker| worker.to_string().contains(&id.to_string())) && report.count() > 0
        };
        within(Duration::from_secs(1), reports).await
    };
    wait_until(SOON, "the worker has not found it", not_found).await;
    database.raw("scheduled").insert_one(job).await.unwrap();
    drop(report);
    database.until("archived", doc! { "_id": id }, 1, "it is done long before the poll").await;
    local::stop(workers.into_iter().chain([recruiter])).await;
}

/// The jobs of a full worker count as in flight until it offers slots again. They may become due again sooner.
#[tokio::test]
async fn what_is_due_again_before_its_worker_has_places_is_looked_for_once_it_has() {
    let (database, store) = prepared().await;
    let recruiter = Local::recruiter(&database, &NEVER_SCANS);
    // Two workers, so that one has free slots in the meantime.
    let worker = || Local::worker(&database, builtins(), &[&NEVER_POLLS[..], &["--concurrency", "1"]].concat());
    let workers = [worker(), worker()];
    until_ready(&database, 2).await;
    let slow = FailPoint::new("recruiter-worker", &["update"]).namespace(database.name(), "roster").block(Duration::from_millis(300));
    let armed = slow.arm(database.uri()).await;
    let policy = RetryManyTimes::new(1, Duration::ZERO).unwrap();
    let job = NewJob::of_class("fail", doc! { "times": 1 }).retry(&policy).enqueue(&store).await.unwrap().id;
    database.until("archived", doc! { "_id": job, "done": true }, 1, "it is done long before the poll").await;
    drop(armed);
    local::stop(workers.into_iter().chain([recruiter])).await;
}

/// The sender of a hint about a due job may have another clock, or may name only the first of several jobs.
#[tokio::test]
async fn what_is_due_a_little_later_than_was_said_is_not_left_to_the_poll() {
    let (database, store) = prepared().await;
    let processes = Local::pair(&database, &NEVER_SCANS, builtins(), &NEVER_POLLS);
    until_ready(&database, 1).await;
    // Finished jobs are behind all jobs of the first search.
    let done = async || database.count("archived", doc! { "done": true }).await;
    NewJob::of_class("noop", doc! {}).enqueue(&store).await.unwrap();
    wait_until(SOON, "the first is done", async || done().await == 1).await;
    let mut job = minimal_job("noop");
    job.insert("scheduled_at", bson::DateTime::from_chrono(store.now() + Duration::from_millis(500)));
    database.raw("scheduled").insert_one(job).await.unwrap();
    store.publish(&Hint::jobs_in(["generic"])).await.unwrap();
    wait_until(SOON, "it is done long before the poll", async || done().await == 2).await;
    local::stop(processes).await;
}

/// The jobs to be assigned in it are not announced again.
#[tokio::test]
async fn after_a_round_that_failed_everything_is_looked_at_at_once() {
    let (database, store) = prepared().await;
    let processes = Local::pair(&database, &NEVER_SCANS, builtins(), &NEVER_POLLS);
    until_ready(&database, 1).await;
    let done = async || database.count("archived", doc! { "done": true }).await;
    NewJob::of_class("noop", doc! {}).enqueue(&store).await.unwrap();
    wait_until(SOON, "the first is done", async || done().await == 1).await;
    let fails = FailPoint::new("recruiter", &["update"]).namespace(database.name(), "roster").times(1).close_connection();
    let armed = fails.arm(database.uri()).await;
    NewJob::of_class("noop", doc! {}).enqueue(&store).await.unwrap();
    wait_until(SOON, "it is done long before the poll", async || done().await == 2).await;
    assert_eq!(armed.struck().await, 1);
    drop(armed);
    local::stop(processes).await;
}

/// A worker that receives keep-alives in time need not poll. Hints leave the recruiter no pause.
#[tokio::test]
async fn idle_workers_are_told_in_time_also_while_hints_come_without_a_pause() {
    let database = TestDatabase::new().await;
    let (store, processes) = system(&database, &[]).await;
    let flood = tokio::spawn(async move {
        loop {
            store.publish(&Hint::jobs_in(["nobody's"])).await.unwrap();
            pause(Duration::from_millis(20)).await;
        }
    });
    let looks = doc! { "command.find": "roster", "appName": "recruiter-worker" };
    profile(&database).await;
    // In seven rounds; a busy machine may be late now and then.
    let hardly_asked = async || {
        let asked = async || database.count("system.profile", looks.clone()).await;
        let before = asked().await;
        pause(Duration::from_secs(3)).await;
        (asked().await <= before + 2).then_some(())
    };
    wait_for(SOON, "the worker hardly asks", hardly_asked).await;
    assert!(!flood.is_finished());
    flood.abort();
    local::stop(processes).await;
}

/// I9. A group or a class may be any bytes: drivers of other languages do not check.
#[tokio::test]
async fn a_name_that_is_not_utf8_stops_no_other_job() {
    let database = TestDatabase::new().await;
    let (store, processes) = system(&database, &["--work-on", "*"]).await;
    for hostile in [("group", b"caf\xe9!"), ("class", b"caf\xe9!")] {
        let mut job = minimal_job("noop");
        job.insert("group", if hostile.0 == "group" { "-----" } else { "generic" });
        job.insert("workable", doc! { "class": if hostile.0 == "class" { "-----" } else { "noop" } });
        let bytes = job.to_vec().unwrap();
        let at = bytes.windows(5).position(|bytes| bytes == b"-----").unwrap();
        let bytes = [&bytes[..at], hostile.1, &bytes[at + 5..]].concat();
        let scheduled = database.raw("scheduled").clone_with_type::<RawDocumentBuf>();
        scheduled.insert_one(RawDocumentBuf::from_bytes(bytes).unwrap()).await.unwrap();
    }
    // More groups than are searched without being listed.
    let job = |number: u32| NewJob::of_class("noop", doc! {}).in_group(format!("group-{number}"));
    store.enqueue_many((0..100).map(job)).await.unwrap();
    database.raw("scheduled").insert_one(minimal_job("noop")).await.unwrap();
    wait_until(SOON, "all others are done", async || database.count("archived", doc! {}).await >= 101).await;
    assert!(store.ungated_groups().await.unwrap().iter().all(|group| group.is_ascii()));
    store.lanes_of("generic", 9).await.unwrap();
    store.waiting_lanes().await.unwrap();
    local::stop(processes).await;
}

/// How long after their due dates these jobs started, in milliseconds, in the order of the dates.
async fn latencies(database: &TestDatabase, filter: Document) -> Vec<i64> {
    let found = database.all("archived", filter).await;
    let at = |job: &Document, field| job.get_document("last_execution").unwrap().get_datetime(field).unwrap().timestamp_millis();
    let mut found: Vec<(i64, i64)> = found.iter().map(|job| (at(job, "scheduled_at"), at(job, "started_at"))).collect();
    found.sort_unstable();
    found.into_iter().map(|(due, started)| started - due).collect()
}

/// A job of another language that is due now.
fn plain_job() -> Document {
    let mut job = minimal_job("noop");
    job.insert("scheduled_at", bson::DateTime::now());
    job
}

/// After the first job without a hint, frequent scans find the next ones.
#[tokio::test]
async fn jobs_that_keep_coming_without_a_hint_start_soon_after_the_first() {
    let (database, store) = prepared().await;
    let processes = Local::pair(&database, &["--poll", "2s", "--lease", "10s"], builtins(), &[]);
    until_ready(&database, 1).await;
    // Full scans have seen the worker idle.
    pause(Duration::from_secs(3)).await;
    database.raw("scheduled").insert_one(plain_job()).await.unwrap();
    database.until("archived", doc! {}, 1, "the first is found by a full scan").await;
    const JOBS: u64 = 20;
    // A busy machine may be late now and then.
    let mut before = 1;
    let start_soon = async || {
        for _ in 0..JOBS {
            database.raw("scheduled").insert_one(plain_job()).await.unwrap();
            pause(Duration::from_millis(70)).await;
        }
        database.until("archived", doc! {}, before + JOBS, "all are done").await;
        let late = latencies(&database, doc! {}).await.split_off(usize::try_from(before).unwrap());
        before += JOBS;
        (late.iter().filter(|ms| **ms <= 400).count() >= 10).then_some(())
    };
    // With the full scans alone half of them would wait for 700 ms and more.
    wait_for(SOON, "half of them start within 400 ms", start_soon).await;

    // After a while without such jobs the scans end.
    profile(&database).await;
    let mut before = (0, 0);
    let mut are_full_scans = async |hinted: bool, but: u64| {
        for _ in 0..20 {
            if hinted {
                NewJob::of_class("noop", doc! {}).enqueue(&store).await.unwrap();
            }
            pause(Duration::from_millis(100)).await;
        }
        // Frequent scans do not read the roster, so full scans are counted by that.
        let now = (listings(&database).await, looks(&database).await);
        let (listed, full) = (now.0 - before.0, now.1 - before.1);
        before = now;
        listed <= full + but
    };
    wait_until(SOON, "the frequent scans end", async || are_full_scans(false, 2).await).await;
    wait_until(SOON, "jobs with a hint do not begin them again", async || are_full_scans(true, 4).await).await;
    local::stop(processes).await;
}

/// How many times the recruiter has listed the groups that have jobs since the profiler was turned on.
async fn listings(database: &TestDatabase) -> u64 {
    let listing = doc! { "appName": "recruiter", "command.aggregate": "scheduled", "command.hint": "gated_jobs" };
    database.count("system.profile", listing).await
}

/// How many times the recruiter has read the roster, and the server's time with it, since the profiler was turned on.
async fn looks(database: &TestDatabase) -> u64 {
    let looks = doc! { "command.find": "roster", "command.projection.now": "$$NOW", "appName": "recruiter" };
    database.count("system.profile", looks).await
}

/// Tests the hints of the library guide as they are printed there.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_hint_of_another_language_starts_its_job_at_once() {
    let database = TestDatabase::new().await;
    let processes = Local::pair(&database, &NEVER_SCANS, builtins(), &NEVER_POLLS);
    until_ready(&database, 1).await;
    let guide = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/library.md")).unwrap();
    let line = |begin: &str| guide.lines().find(|line| line.starts_with(begin)).unwrap().to_owned();
    // Python: what pymongo sends for that line.
    let python = r#"db.signals.insert_one({"at": Timestamp(0, 0), "kind": "jobs", "groups": ["generic"]})"#;
    assert!(line("db.signals.insert_one").starts_with(python));
    let hint = doc! { "at": bson::Timestamp { time: 0, increment: 0 }, "kind": "jobs", "groups": ["generic"] };
    let started = async |count: u64| database.until("archived", doc! {}, count, "it starts").await;
    for number in 1..=5 {
        database.raw("scheduled").insert_one(plain_job()).await.unwrap();
        database.raw("signals").insert_one(hint.clone()).await.unwrap();
        started(number).await;
    }
    // Node: the line itself, in the shell, whose database has the driver's collections under another name.
    let node = line("await db.collection(\"signals\")").replace("await db.collection", "db.getCollection");
    let job = plain_job();
    let id = job.get_object_id("_id").unwrap();
    let job = format!(
        "db.scheduled.insertOne({{_id: ObjectId('{id}'), workable: {{class: 'noop'}}, locked: false, group: 'generic', \
         priority: Int32(5), scheduled_at: new Date()}})"
    );
    mongosh::eval(database.uri(), &format!("{job}; {node}"));
    started(6).await;
    local::stop(processes).await;
}

/// Jobs with a gate fill the window of no other lane, are found with and without a hint, and end like any other.
#[tokio::test]
async fn jobs_with_a_gate_are_assigned_like_any_other() {
    let database = TestDatabase::new().await;
    let (store, processes) = system(&database, &["--work-on", "*"]).await;
    let gated = |group: String, gate: String| {
        let mut job = minimal_job("noop");
        job.extend(doc! { "group": group, "gate": gate });
        job
    };
    let ample = Limit::capacity(100);
    store.limits().set("customer:*", ample).await.unwrap();
    store.limits().set("printer", ample).await.unwrap();
    // One group with many gates; many groups with a gate; both have jobs without one.
    let one_group = (0..300).map(|number| gated("generic".into(), format!("customer:{}", number % 60)));
    let many_groups = (0..40).map(|number| gated(format!("group-{number}"), "printer".into()));
    database.raw("scheduled").insert_many(one_group.chain(many_groups)).await.unwrap();
    database.raw("scheduled").insert_one(minimal_job("noop")).await.unwrap();
    let done = async || database.count("archived", doc! {}).await == 341;
    wait_until(SOON, "all are done without a hint", done).await;
    let job = gated("generic".into(), "customer:7".into());
    database.raw("scheduled").insert_one(&job).await.unwrap();
    store.announce_hint(Hint::jobs_in(["generic"])).await;
    database.until("archived", doc! {}, 342, "one more is done").await;
    let last = database.raw("archived").find_one(doc! { "_id": job.get_object_id("_id").unwrap() }).await.unwrap().unwrap();
    assert_eq!((last.get_str("why").unwrap(), last.get_str("gate").unwrap()), ("done", "customer:7"));
    local::stop(processes).await;
}

/// When the recruiter has assigned since the profiler was turned on, in milliseconds.
async fn assignments(database: &TestDatabase) -> Vec<i64> {
    let filter = doc! { "op": "update", "ns": format!("{}.roster", database.name()), "command.u.$set.assigned_to": { "$exists": true } };
    let found = database.all("system.profile", filter).await;
    found.iter().map(|assignment| assignment.get_datetime("ts").unwrap().timestamp_millis()).collect()
}

/// I9. A hand has changed the roster: the recruiter believes what the worker does not.
#[tokio::test]
async fn a_job_that_its_worker_does_not_start_is_left_alone_for_a_growing_while() {
    let database = TestDatabase::new().await;
    let (store, processes) = system(&database, &[]).await;
    database.raw("roster").update_one(doc! {}, doc! { "$push": { "classes": NOBODYS } }).await.unwrap();
    profile(&database).await;
    NewJob::of_class(NOBODYS, doc! {}).priority(Priority::MAX).enqueue(&store).await.unwrap();
    // Several scans apart.
    let are_rare = async || {
        let times = assignments(&database).await;
        times.len() > 8 && times.windows(2).rev().take(2).all(|pair| pair[1] - pair[0] > 1_200)
    };
    wait_until(SOON, "it is assigned again, after a longer pause each time", are_rare).await;
    NewJob::of_class("noop", doc! {}).enqueue(&store).await.unwrap();
    database.until("archived", doc! {}, 1, "others are done beside it").await;
    local::stop(processes).await;
}

/// A worker of this process that is registered and does nothing.
async fn ghost(store: &Store, capacity: u32, classes: &[String]) -> WorkerId {
    let announcement = Registration { classes: classes.to_vec(), ..announcement(capacity) };
    store.register(&announcement).await.unwrap();
    assert!(store.make_available(announcement.id, capacity).await.unwrap());
    announcement.id
}

/// I7, when the worker that a job was assigned to has just died, however many died with it.
#[tokio::test]
async fn a_host_that_vanishes_with_several_workers_costs_a_job_one_assignment() {
    best_of_three(Duration::from_secs(30), "a job whose assigned worker has just died", start_beside_ghosts).await;
}

/// The time until a job is done, and forever if more than one of the dead was tried.
async fn start_beside_ghosts() -> Duration {
    let (database, store) = prepared().await;
    let recruiter = Local::recruiter(&database, &["--poll", "400ms"]);
    for _ in 0..3 {
        ghost(&store, 50, &["noop".to_owned()]).await;
    }
    let tried = doc! { "capacity": 50, "assigned_to": { "$exists": true } };
    let worker = Local::worker(&database, builtins(), &["--concurrency", "1", "--heartbeat", "1s"]);
    until_ready(&database, 4).await;
    // The recruiter has seen them all.
    pause(Duration::from_secs(1)).await;
    NewJob::of_class("noop", doc! {}).enqueue(&store).await.unwrap();
    let begun = Stopwatch::start();
    database.until("archived", doc! {}, 1, "it is done").await;
    let took = begun.elapsed();
    let is_one = database.count("roster", tried).await <= 1;
    local::stop([worker, recruiter]).await;
    if is_one { took } else { Duration::MAX }
}

/// A backlog of many classes, as even as can be, fills every answer.
#[tokio::test]
async fn a_backlog_of_some_workers_keeps_no_other_worker_idle() {
    let (database, store) = prepared().await;
    let classes: Vec<String> = (0..40).map(|number| format!("class-{number}")).collect();
    let job = |number: usize| NewJob::of_class(&classes[number % 40], doc! {}).priority(Priority::MAX);
    store.enqueue_many((0..4_000).map(job)).await.unwrap();
    ghost(&store, 10, &classes).await;
    let worker = Local::worker(&database, builtins(), &[]);
    database.raw("scheduled").insert_one(minimal_job("noop")).await.unwrap();
    // Its first round meets both of them free.
    database.until("roster", doc! { "available": true }, 2, "the worker is there").await;
    let recruiter = Local::recruiter(&database, &NEVER_SCANS);
    database.until("archived", doc! {}, 1, "its job is done long before the poll").await;
    local::stop([worker, recruiter]).await;
}

/// I7, when only the hints of workers are lost: the recruiter listens, and another worker has slots.
#[tokio::test]
async fn a_free_worker_whose_hint_is_lost_is_found_by_the_next_scan() {
    let (database, store) = prepared().await;
    let processes = Local::pair(&database, &[], builtins(), &["--concurrency", "1"]);
    ghost(&store, 10, &[NOBODYS.to_owned()]).await;
    until_ready(&database, 2).await;
    let lost =
        FailPoint::new("recruiter-worker", &["insert"]).namespace(database.name(), "signals").error_code(8).arm(database.uri()).await;
    for _ in 0..3 {
        let is_done = async || {
            let begun = Stopwatch::start();
            NewJob::of_class("noop", doc! {}).enqueue(&store).await.unwrap();
            database.until("scheduled", doc! {}, 0, "it is done").await;
            begun.elapsed()
        };
        best_of_three(Duration::from_millis(3_800), "a job", is_done).await;
    }
    drop(lost);
    local::stop(processes).await;
}

/// I7, when the hint of an assignment is lost and the keep-alives are not.
#[tokio::test]
async fn an_assignment_whose_hint_is_lost_is_announced_again() {
    let (database, store) = prepared().await;
    let mut hints = store.hints(Listener::Worker(ghost(&store, 10, &["x".to_owned()]).await, Channel::default()));
    assert_eq!(hints.next().await, Hint::Seed);
    let recruiter = Local::recruiter(&database, &["--poll", "400ms"]);
    NewJob::of_class("x", doc! {}).enqueue(&store).await.unwrap();
    let mut rounds = BTreeSet::new();
    let is_repeated = async || {
        let repeated = async { while !matches!(hints.next().await, Hint::Assigned { round, .. } if !rounds.insert(round)) {} };
        let is_heard = timeout(Duration::from_secs(5), repeated).await.is_ok();
        // A recruiter that stalls for four seconds gives the assignment up: it gets another chance.
        database.raw("roster").update_many(doc! {}, doc! { "$set": { "available": true } }).await.unwrap();
        is_heard
    };
    wait_until(SOON, "the hint of a round comes twice", is_repeated).await;
    recruiter.stop().await;
}

/// MongoDB gives a search up: the next one asks for half as much.
#[tokio::test]
async fn a_search_that_takes_too_long_asks_for_fewer_jobs() {
    let (database, store) = prepared().await;
    // The profile of a busy server leaves commands out.
    let limits = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&limits);
    let commands = EventHandler::callback(move |event: CommandEvent| {
        let CommandEvent::Started(started) = event else { return };
        let is_find = started.command.get_str("find").is_ok_and(|collection| collection == "scheduled");
        if is_find && started.command.get_document("filter").is_ok_and(|filter| filter.contains_key("$or")) {
            noted.lock().unwrap().push(started.command.get_i64("limit").unwrap());
        }
    });
    ghost(&store, 100, &["x".to_owned()]).await;
    NewJob::of_class("x", doc! {}).enqueue(&store).await.unwrap();
    let searches = FailPoint::new("recruiter", &["find"]).namespace(database.name(), "scheduled").error_code(50);
    let slow = searches.times(2).arm(database.uri()).await;
    let recruiter = Local::recruiter_over(ConnectArgs { commands: Some(commands), ..connect_args(&database) }, &["--poll", "400ms"]);
    database.until("roster", doc! { "assigned_to": { "$exists": true } }, 1, "the job is assigned").await;
    assert_eq!(slow.struck().await, 2);
    drop(slow);
    recruiter.stop().await;
    assert_eq!(limits.lock().unwrap()[..3], [400, 200, 100], "the first two were given up");
}

/// The server's clock comes with every full scan: a primary whose clock is put back or forward is noticed within a second.
#[tokio::test]
async fn the_servers_time_rides_on_the_look_at_the_roster() {
    let database = TestDatabase::new().await;
    let (_, processes) = system(&database, &["--concurrency", "1"]).await;
    profile(&database).await;
    wait_until(SOON, "the roster is read with each scan", async || looks(&database).await > 3).await;
    local::stop(processes).await;
}

/// One hint names the date of the first of them only, and the worker has a slot for one: every search is full of later jobs.
#[tokio::test]
async fn jobs_that_are_due_one_after_the_other_start_each_at_its_date() {
    let (database, store) = prepared().await;
    let flags = [&NEVER_POLLS[..], &["--concurrency", "1"]].concat();
    let processes = Local::pair(&database, &NEVER_SCANS, builtins(), &flags);
    until_ready(&database, 1).await;
    let first = store.now() + Duration::from_millis(500);
    let job = |number: u32| NewJob::of_class("noop", doc! {}).at(first + Duration::from_millis(200) * number);
    store.enqueue_many((0..12).map(job)).await.unwrap();
    database.until("archived", doc! {}, 12, "all are done long before the scan").await;
    local::stop(processes).await;
}

/// The end of the head is enough for the next job of its line, also for one of another class.
#[tokio::test]
async fn a_line_of_several_classes_goes_on_without_a_scan() {
    let (database, store) = prepared().await;
    // The first scan notes that the group has lines.
    NewJob::of_class("noop", doc! {}).in_line("x").enqueue(&store).await.unwrap();
    let processes = Local::pair(&database, &NEVER_SCANS, builtins(), &NEVER_POLLS);
    database.until("archived", doc! {}, 1, "the first is done").await;
    let mut jobs = 1;
    let measure = async || {
        let begun = Stopwatch::start();
        // The first one is due when all is quiet, and the others are behind it.
        for (class, after) in [("noop", 3), ("sleep", 0), ("noop", 0), ("sleep", 0)] {
            let job = NewJob::of_class(class, doc! { "ms": 1 }).in_line("x").after(Duration::from_secs(after));
            job.enqueue(&store).await.unwrap();
            jobs += 1;
        }
        database.until("archived", doc! {}, jobs, "all are done").await;
        begun.elapsed()
    };
    best_of_three(Duration::from_secs(30), "the line goes on", measure).await;
    local::stop(processes).await;
}

/// A hint is about workers that are busy, too.
#[tokio::test]
async fn a_hint_that_comes_while_its_worker_is_busy_is_not_forgotten() {
    let (database, store) = prepared().await;
    let processes = Local::pair(&database, &NEVER_SCANS, builtins(), &[&NEVER_POLLS[..], &["--concurrency", "1"]].concat());
    // Another one has slots meanwhile.
    ghost(&store, 10, &[NOBODYS.to_owned()]).await;
    until_ready(&database, 2).await;
    NewJob::of_class("sleep", doc! { "ms": 1_500 }).enqueue(&store).await.unwrap();
    database.until("scheduled", doc! { "locked": true }, 1, "the worker is busy").await;
    database.raw("scheduled").insert_one(minimal_job("noop")).await.unwrap();
    store.publish(&Hint::jobs_in(["generic"])).await.unwrap();
    database.until("archived", doc! {}, 2, "both are done long before the scan").await;
    local::stop(processes).await;
}

/// The lease is kept beside the rounds: one that takes longer than the lease does not hand over to a standby in its middle.
#[tokio::test]
async fn a_round_that_takes_long_does_not_cost_the_lease() {
    let (database, store) = prepared().await;
    ghost(&store, 1, &["x".to_owned()]).await;
    let flags = &["--poll", "300ms", "--lease", "1s"];
    let leader = Local::recruiter(&database, flags);
    let lease = async || database.raw("metadata").find_one(doc! { "_id": "recruiter" }).await.unwrap();
    let number = |lease: &Document, field: &str| lease.get_i64(field).unwrap();
    wait_until(SOON, "one leads", async || lease().await.is_some_and(|lease| lease.contains_key("renewals"))).await;
    let standby = Local::recruiter(&database, flags);
    let is_kept = async || {
        let slow = FailPoint::new("recruiter", &["find"]).namespace(database.name(), "roster").times(1).block(Duration::from_secs(3));
        let slow = slow.arm(database.uri()).await;
        wait_until(SOON, "a round hangs", async || slow.struck().await == 1).await;
        let before = lease().await.unwrap();
        pause(Duration::from_millis(2_500)).await;
        let after = lease().await.unwrap();
        number(&after, "term") == number(&before, "term") && number(&after, "renewals") >= number(&before, "renewals") + 3
    };
    // If the machine stalls for a second, the leader may lose the lease.
    wait_until(SOON, "a round hangs, and the lease is renewed", is_kept).await;
    local::stop([leader, standby]).await;
}
