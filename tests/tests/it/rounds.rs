//! Where the recruiter looks for jobs, as MongoDB's profiler saw it, and what it is told: what a search may cost is decided here.

use std::{collections::BTreeSet, time::Duration};

use bson::{Document, doc};
use futures_util::TryStreamExt;
use recruiter_common::{
    enqueue::NewJob,
    ids::JobId,
    retry_policy::RetryManyTimes,
    shutdown::pause,
    store::{DueJob, Hint, Listener, Store},
};
use recruiter_tests::{
    factory::minimal_job,
    fail_points::FailPoint,
    local::{Local, store},
    mongo::TestDatabase,
    wait::{wait_for, wait_until},
};
use recruiter_worker::Worker;

const SOON: Duration = Duration::from_secs(30);
const NOBODYS: &str = "a class that no worker has";

/// The groups of each search for jobs, due or due next, since the profiler was turned on.
async fn searched(database: &TestDatabase, due_next: bool) -> Vec<BTreeSet<String>> {
    let filter = doc! { "command.find": "scheduled", "command.hint": "due_jobs" };
    let found: Vec<Document> = database.raw("system.profile").find(filter).await.unwrap().try_collect().await.unwrap();
    let groups = |search: &Document| {
        let filter = search.get_document("command").unwrap().get_document("filter").unwrap();
        let asked_for = if due_next { "$gt" } else { "$lte" };
        let groups = filter.get_document("group").unwrap().get_array("$in").unwrap();
        let groups = groups.iter().map(|group| group.as_str().unwrap().to_owned()).collect();
        filter.get_document("scheduled_at").unwrap().contains_key(asked_for).then_some(groups)
    };
    found.iter().filter_map(groups).collect()
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
    let recruiter = Local::recruiter(database, &["--poll", "400ms"]);
    let worker = Local::worker(database, Worker::new().register_builtins().unwrap(), work_on);
    until_ready(database, 1).await;
    (store, [recruiter, worker])
}

async fn until_ready(database: &TestDatabase, workers: u64) {
    let there = doc! { "available": true, "term": { "$gt": 0 } };
    wait_until(SOON, "all are there", async || database.raw("roster").count_documents(there.clone()).await.unwrap() == workers).await;
}

/// In a group without waiting jobs a search would walk over all that lately left it.
#[tokio::test]
async fn only_groups_with_waiting_jobs_are_searched_and_those_with_news_alone() {
    let database = TestDatabase::new().await;
    let (store, processes) = system(&database, &["--work-on", "waiting", "--work-on", "news", "--work-on", "empty"]).await;
    for group in ["waiting", "elsewhere"] {
        NewJob::of_class(NOBODYS, doc! {}).in_group(group).enqueue(&store).await.unwrap();
    }
    // What was announced is looked at first.
    pause(Duration::from_secs(1)).await;
    profile(&database).await;
    wait_until(SOON, "it has searched a few times", async || searched(&database, false).await.len() > 2).await;
    assert!(searched(&database, false).await.iter().all(|groups| *groups == only("waiting")), "{:?}", searched(&database, false).await);
    store.publish(&Hint::jobs_in(["news"])).await.unwrap();
    wait_until(SOON, "the news are looked at", async || searched(&database, false).await.contains(&only("news"))).await;
    for process in processes {
        process.stop().await;
    }
}

/// What was found and does not fit is assigned in the next rounds; more than that nobody waits for.
#[tokio::test]
async fn a_search_finds_a_few_times_what_fits_and_not_without_end() {
    let check = async |places: &str, most: i64| {
        let database = TestDatabase::new().await;
        let (_, processes) = system(&database, &["--work-on", "g", "--concurrency", places]).await;
        profile(&database).await;
        let limit = async || {
            let search =
                doc! { "command.find": "scheduled", "command.hint": "due_jobs", "command.filter.scheduled_at.$lte": { "$exists": true } };
            let search = database.raw("system.profile").find_one(search).await.unwrap()?;
            Some(search.get_document("command").unwrap().get_i64("limit").unwrap())
        };
        assert_eq!(wait_for(SOON, "it has searched", limit).await, most);
        for process in processes {
            process.stop().await;
        }
    };
    check("100", 400).await;
    check("4000", 9_000).await;
}

/// Each group costs a search of its own.
#[tokio::test]
async fn of_many_groups_it_is_not_looked_up_when_their_next_jobs_become_due() {
    let database = TestDatabase::new().await;
    let (store, processes) = system(&database, &["--work-on", "*"]).await;
    let later = |number: u32| NewJob::of_class("noop", doc! {}).in_group(format!("group-{number}")).after(Duration::from_secs(3_600));
    store.enqueue_many((0..101).map(later)).await.unwrap();
    pause(Duration::from_secs(1)).await;
    profile(&database).await;
    let groups = async |due_next: bool| searched(&database, due_next).await.into_iter().flatten().collect::<BTreeSet<String>>().len();
    wait_until(SOON, "all groups are searched", async || groups(false).await == 101).await;
    assert!(searched(&database, true).await.is_empty());
    database.raw("scheduled").delete_one(doc! { "group": "group-7" }).await.unwrap();
    wait_until(SOON, "it is looked up for fewer groups", async || groups(true).await == 100).await;
    for process in processes {
        process.stop().await;
    }
}

/// A job is announced while it is on its way. When that takes long, whoever looked for it has not found it.
#[tokio::test]
async fn what_was_announced_long_before_it_was_there_is_announced_again() {
    let database = TestDatabase::new().await;
    let store = store(&database).await;
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

/// A worker may be told of a job sooner than it is there. It is believed to be seen to until the worker says otherwise.
#[tokio::test]
async fn what_a_worker_did_not_find_is_looked_for_once_it_has_said_so() {
    let database = TestDatabase::new().await;
    let store = store(&database).await;
    let recruiter = Local::recruiter(&database, &["--poll", "20s", "--lease", "60s"]);
    // Of two, so that somebody has places meanwhile.
    let worker = || Local::worker(&database, Worker::new().register_builtins().unwrap(), &["--poll", "20s"]);
    let workers = [worker(), worker()];
    until_ready(&database, 2).await;
    let slow = FailPoint::new("recruiter-worker", &["update"]).namespace(database.name(), "roster").block(Duration::from_millis(500));
    let armed = slow.arm(database.uri()).await;
    let (id, mut job) = (JobId::new(), minimal_job("noop"));
    let announced = DueJob { id, group: "generic".into(), class: "noop".into(), priority: 5, scheduled_at: store.now() };
    job.extend(doc! { "_id": id, "scheduled_at": bson::DateTime::from_chrono(announced.scheduled_at) });
    let hint = Hint::Jobs { groups: vec![announced.group.clone()], at: None, jobs: vec![announced] };
    store.publish(&hint).await.unwrap();
    wait_until(SOON, "the worker has not found it", async || armed.struck().await > 0).await;
    database.raw("scheduled").insert_one(job).await.unwrap();
    drop(armed);
    let done = async || database.raw("archived").count_documents(doc! { "_id": id }).await.unwrap() == 1;
    wait_until(Duration::from_secs(5), "it is done long before the poll", done).await;
    for process in workers.into_iter().chain([recruiter]) {
        process.stop().await;
    }
}

/// A full worker counts as busy with what it was given until it offers places again. What it was given may be due again sooner.
#[tokio::test]
async fn what_is_due_again_before_its_worker_has_places_is_looked_for_once_it_has() {
    let database = TestDatabase::new().await;
    let store = store(&database).await;
    let recruiter = Local::recruiter(&database, &["--poll", "20s", "--lease", "60s"]);
    // Of two, so that somebody has places meanwhile.
    let worker = || Local::worker(&database, Worker::new().register_builtins().unwrap(), &["--poll", "20s", "--concurrency", "1"]);
    let workers = [worker(), worker()];
    until_ready(&database, 2).await;
    let slow = FailPoint::new("recruiter-worker", &["update"]).namespace(database.name(), "roster").block(Duration::from_millis(300));
    let armed = slow.arm(database.uri()).await;
    let policy = RetryManyTimes::new(1, Duration::ZERO).unwrap();
    let job = NewJob::of_class("fail", doc! { "times": 1 }).retry(&policy).enqueue(&store).await.unwrap();
    let done = async || database.raw("archived").count_documents(doc! { "_id": job, "done": true }).await.unwrap() == 1;
    wait_until(Duration::from_secs(8), "it is done long before the poll", done).await;
    drop(armed);
    for process in workers.into_iter().chain([recruiter]) {
        process.stop().await;
    }
}

/// Whoever says that a job is due may have another idea of the time, or say it of the first of several.
#[tokio::test]
async fn what_is_due_a_little_later_than_was_said_is_not_left_to_the_poll() {
    let database = TestDatabase::new().await;
    let store = store(&database).await;
    let recruiter = Local::recruiter(&database, &["--poll", "20s", "--lease", "60s"]);
    let worker = Local::worker(&database, Worker::new().register_builtins().unwrap(), &["--poll", "20s"]);
    until_ready(&database, 1).await;
    // What is done is behind everything that was searched for at the beginning.
    let done = async || database.raw("archived").count_documents(doc! { "done": true }).await.unwrap();
    NewJob::of_class("noop", doc! {}).enqueue(&store).await.unwrap();
    wait_until(SOON, "the first is done", async || done().await == 1).await;
    let mut job = minimal_job("noop");
    job.insert("scheduled_at", bson::DateTime::from_chrono(store.now() + Duration::from_millis(500)));
    database.raw("scheduled").insert_one(job).await.unwrap();
    store.publish(&Hint::jobs_in(["generic"])).await.unwrap();
    wait_until(Duration::from_secs(8), "it is done long before the poll", async || done().await == 2).await;
    for process in [worker, recruiter] {
        process.stop().await;
    }
}

/// What was to be assigned in it is not announced again.
#[tokio::test]
async fn after_a_round_that_failed_everything_is_looked_at_at_once() {
    let database = TestDatabase::new().await;
    let store = store(&database).await;
    let recruiter = Local::recruiter(&database, &["--poll", "20s", "--lease", "60s"]);
    let worker = Local::worker(&database, Worker::new().register_builtins().unwrap(), &["--poll", "20s"]);
    until_ready(&database, 1).await;
    let done = async || database.raw("archived").count_documents(doc! { "done": true }).await.unwrap();
    NewJob::of_class("noop", doc! {}).enqueue(&store).await.unwrap();
    wait_until(SOON, "the first is done", async || done().await == 1).await;
    let fails = FailPoint::new("recruiter", &["update"]).namespace(database.name(), "roster").times(1).close_connection();
    let armed = fails.arm(database.uri()).await;
    NewJob::of_class("noop", doc! {}).enqueue(&store).await.unwrap();
    wait_until(Duration::from_secs(8), "it is done long before the poll", async || done().await == 2).await;
    assert_eq!(armed.struck().await, 1);
    drop(armed);
    for process in [worker, recruiter] {
        process.stop().await;
    }
}

/// Who is told in time that there was nothing to say need not ask. Hints leave the recruiter no pause.
#[tokio::test]
async fn idle_workers_are_told_in_time_also_while_hints_come_without_a_pause() {
    let database = TestDatabase::new().await;
    let (store, processes) = system(&database, &[]).await;
    let flood = tokio::spawn(async move {
        loop {
            store.publish(&Hint::jobs_in(["nobody's"])).await.unwrap();
            pause(Duration::from_millis(5)).await;
        }
    });
    let looks = doc! { "command.find": "roster", "appName": "recruiter-worker" };
    profile(&database).await;
    // In seven rounds; a busy machine may be late now and then.
    let hardly_asked = async || {
        let asked = async || database.raw("system.profile").count_documents(looks.clone()).await.unwrap();
        let before = asked().await;
        pause(Duration::from_secs(3)).await;
        (asked().await <= before + 2).then_some(())
    };
    wait_for(SOON, "the worker hardly asks", hardly_asked).await;
    assert!(!flood.is_finished());
    flood.abort();
    for process in processes {
        process.stop().await;
    }
}
