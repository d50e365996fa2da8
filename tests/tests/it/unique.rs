//! Unique jobs: of the jobs with one key only one exists, with several enqueuers, and with faults in between.

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bson::{Document, doc};
use chrono::TimeDelta;
use futures_util::TryStreamExt;
use mongodb::ClientSession;
use recruiter_common::{
    Client, EnqueueError, Enqueued, Failure, FinishReason, JobId, Keep, NewJob, OnConflict, Outcome, Priority, Unique, Workable, WorkerId,
    control::{Change, Changed, Refusal},
    job::{Claim, Job},
    shutdown::pause,
    store::{Archival, CommitSession, Ending, Recorded, Rescheduling, Store},
    telemetry::chain,
};
use recruiter_tests::{
    factory::{again, minimal_job, read, start, started, to_start},
    fail_points::FailPoint,
    local::{self, Local, prepared, store},
    mongo::TestDatabase,
    mongosh,
    processes::{Setup, System},
    promise,
    wait::{SOON, wait_until},
    workable,
};
use recruiter_worker::{Context, Executable, NotDone, Worker};
use serde::{Deserialize, Serialize};

use super::cli::{recruiter, spawn};

const HOUR: Duration = Duration::from_secs(3_600);

fn job(n: i32) -> NewJob {
    NewJob::of_class("noop", doc! { "n": n })
}

fn keyed(n: i32, unique: Unique) -> NewJob {
    job(n).unique(unique)
}

async fn enqueue(store: &Store, job: NewJob) -> Enqueued {
    job.enqueue(store).await.unwrap()
}

async fn start_one(store: &Store, id: JobId) -> (Job, Claim) {
    started(store, WorkerId::new(), &[id]).await.pop().unwrap()
}

fn done(store: &Store, (job, claim): &(Job, Claim)) -> Archival {
    let execution = job.last_execution.clone().unwrap().ended(store.now(), None);
    Archival::ended(job, *claim, Ending::new(execution, FinishReason::DONE))
}

async fn finish(store: &Store, held: &(Job, Claim)) {
    assert_eq!(store.archive(&mut CommitSession::default(), &[done(store, held)]).await.unwrap(), [Recorded::Yes]);
}

async fn reschedule(store: &Store, (job, claim): &(Job, Claim)) {
    let execution = job.last_execution.clone().unwrap().ended(store.now(), Some(&Failure::new("x", "")));
    let retry = Rescheduling::retry(job, *claim, &execution, store.now(), true);
    assert_eq!(store.reschedule_if_claimed(&[retry]).await.unwrap(), [Recorded::Yes]);
}

async fn n_of(database: &TestDatabase, id: JobId) -> i32 {
    let job = database.only("scheduled", doc! { "_id": id }).await;
    job.get_document("workable").unwrap().get_document("parameters").unwrap().get_i32("n").unwrap()
}

/// Enqueues at the same time, through several connections.
async fn all_at_once(stores: &[Store], count: usize, job: impl Fn(usize) -> NewJob) -> Vec<Result<Enqueued, EnqueueError>> {
    let barrier = Arc::new(tokio::sync::Barrier::new(count));
    let tasks: Vec<_> = (0..count)
        .map(|at| {
            let (store, job, barrier) = (stores[at % stores.len()].clone(), job(at), barrier.clone());
            tokio::spawn(async move {
                barrier.wait().await;
                job.enqueue(&store).await
            })
        })
        .collect();
    let mut all = Vec::new();
    for task in tasks {
        all.push(task.await.unwrap());
    }
    all
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_a_hundred_jobs_with_one_key_one_is_enqueued() {
    let database = TestDatabase::new().await;
    let stores = [store(&database).await, store(&database).await, store(&database).await, store(&database).await];
    let scopes = [Unique::by_key("k").while_waiting(), Unique::by_key("k"), Unique::by_key("k").for_period(HOUR)];
    for (at, unique) in scopes.into_iter().enumerate() {
        let all = all_at_once(&stores, 100, |_| keyed(0, unique.clone())).await;
        let all: Vec<Enqueued> = all.into_iter().map(Result::unwrap).collect();
        assert_eq!(all.iter().filter(|job| job.is_new).count(), 1, "{unique:?}");
        assert_eq!(all.iter().map(|job| job.id).collect::<BTreeSet<_>>().len(), 1, "all learn the id of the one");
        assert!(all.iter().all(|job| matches!(job.outcome, Outcome::New | Outcome::Duplicate)));
        assert_eq!(database.count("scheduled", doc! {}).await, at as u64 + 1);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_key_is_free_when_its_scope_ends() {
    let (database, store) = prepared().await;
    // While it waits: until the first start. A retry does not take it again.
    let waiting = || keyed(0, Unique::by_key("w").while_waiting());
    let first = enqueue(&store, waiting()).await;
    assert_eq!(enqueue(&store, waiting()).await, duplicate_of(first));
    let held = start_one(&store, first.id).await;
    let second = enqueue(&store, waiting()).await;
    assert!(second.is_new);
    reschedule(&store, &held).await;
    assert_eq!(enqueue(&store, waiting()).await.id, second.id);
    let held = [start_one(&store, first.id).await, start_one(&store, second.id).await];
    for held in &held {
        finish(&store, held).await;
    }
    let archived = database.only("archived", doc! { "_id": first.id }).await;
    assert_eq!(archived.get_str("unique_while_waiting").unwrap(), "w", "people still see it");

    // Until it is finished, in any way.
    let finished = || keyed(0, Unique::by_key("f"));
    let first = enqueue(&store, finished()).await;
    let held = start_one(&store, first.id).await;
    reschedule(&store, &held).await;
    assert_eq!(enqueue(&store, finished()).await.id, first.id, "it waits for a retry");
    finish(&store, &start_one(&store, first.id).await).await;
    let second = enqueue(&store, finished()).await;
    assert!(second.is_new);
    assert_eq!(store.control(false).change(&Change::Cancel, &[second.id]).await.unwrap()[0].1, Changed::Cancelled);
    let third = enqueue(&store, finished().keep(Keep::Failures)).await;
    assert!(third.is_new);
    finish(&store, &start_one(&store, third.id).await).await;
    let fourth = enqueue(&store, finished()).await;
    assert!(fourth.is_new, "nothing was kept of the third");
    database.raw("scheduled").delete_one(doc! { "_id": fourth.id }).await.unwrap();
    assert!(enqueue(&store, finished()).await.is_new);
}

fn duplicate_of(job: Enqueued) -> Enqueued {
    let mut job = job;
    (job.is_new, job.outcome) = (false, Outcome::Duplicate);
    job
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_period_ends_by_its_date_and_not_with_its_job() {
    let (database, store) = prepared().await;
    let of_period = || keyed(0, Unique::by_key("p").for_period(HOUR));
    let first = enqueue(&store, of_period()).await;
    finish(&store, &start_one(&store, first.id).await).await;
    assert_eq!(enqueue(&store, of_period()).await, duplicate_of(first));
    // Over, but not yet deleted by MongoDB.
    let over = doc! { "$set": { "expires_at": bson::DateTime::from_chrono(store.now() - TimeDelta::milliseconds(1)) } };
    database.raw("unique_periods").update_one(doc! { "_id": "p" }, over).await.unwrap();
    let second = enqueue(&store, of_period()).await;
    assert!(second.is_new);
    let period = database.only("unique_periods", doc! {}).await;
    assert_eq!(period.get_object_id("job").unwrap(), second.id.into());
    let indexes = database.database().run_cursor_command(doc! { "listIndexes": "unique_periods" }).await.unwrap();
    let indexes: Vec<Document> = indexes.try_collect().await.unwrap();
    assert!(indexes.iter().any(|index| index.contains_key("expireAfterSeconds")), "MongoDB deletes them");
    // A job that never started does not keep its key.
    assert_eq!(store.control(false).change(&Change::Cancel, &[second.id]).await.unwrap()[0].1, Changed::Cancelled);
    let third = enqueue(&store, of_period()).await;
    assert!(third.is_new);
    // A job that was cancelled after a start does.
    reschedule(&store, &start_one(&store, third.id).await).await;
    store.control(false).change(&Change::Cancel, &[third.id]).await.unwrap();
    assert_eq!(enqueue(&store, of_period()).await, duplicate_of(third));
    // Deletion from the archive changes nothing.
    store.control(false).change(&Change::Delete, &[third.id]).await.unwrap();
    assert_eq!(enqueue(&store, of_period()).await, duplicate_of(third));
}

/// The key is written with the job or not at all.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn the_key_of_a_period_and_its_job_are_one() {
    let database = TestDatabase::of_its_own().await;
    let store = store(&database).await;
    let of_period = || keyed(0, Unique::by_key("p").for_period(HOUR));
    // The insert of the job, which follows that of the key.
    let refused = FailPoint::new("test", &["insert"]).namespace(database.name(), "scheduled").error_code(2).arm(database.uri()).await;
    enqueue_fails(&store, of_period()).await;
    drop(refused);
    assert_eq!(database.count("unique_periods", doc! {}).await, 0);
    assert!(enqueue(&store, of_period()).await.is_new);
}

async fn enqueue_fails(store: &Store, job: NewJob) {
    job.enqueue(store).await.unwrap_err();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_waiting_job_is_replaced_and_a_started_one_is_not() {
    let (database, store) = prepared().await;
    for unique in [Unique::by_key("w").while_waiting(), Unique::by_key("f"), Unique::by_key("p").for_period(HOUR)] {
        let replace = |n| keyed(n, unique.clone().on_conflict(OnConflict::Replace));
        let first = enqueue(&store, replace(1).tag("old").urn("old").in_group("old").expires_after(HOUR).after(HOUR / 2)).await;
        let before = database.only("scheduled", doc! { "_id": first.id }).await;
        let second = enqueue(&store, replace(2).in_group("new").priority(Priority::MAX)).await;
        assert_eq!((second.id, second.is_new, second.outcome), (first.id, false, Outcome::Replaced));
        let after = database.only("scheduled", doc! { "_id": first.id }).await;
        assert_eq!(n_of(&database, first.id).await, 2);
        assert_eq!((after.get_str("group").unwrap(), after.get_i32("priority").unwrap()), ("new", 9));
        assert!(after.get_datetime("scheduled_at").unwrap() < before.get_datetime("scheduled_at").unwrap());
        for gone in ["tags", "urn", "expires_at"] {
            assert!(before.contains_key(gone) && !after.contains_key(gone), "{gone}");
        }
        for kept in ["created_at", "once", "attempts"] {
            assert_eq!(before.get(kept), after.get(kept), "{kept}");
        }
        let held = start_one(&store, first.id).await;
        let third = enqueue(&store, replace(3)).await;
        if after.contains_key("unique_while_waiting") {
            assert!(third.is_new);
        } else {
            assert_eq!((third.id, third.outcome), (first.id, Outcome::AlreadyStarted));
            assert_eq!(n_of(&database, first.id).await, 2);
            reschedule(&store, &held).await;
            assert_eq!(enqueue(&store, replace(4)).await.outcome, Outcome::AlreadyStarted, "it waits for a retry");
        }
        finish(&store, &if after.contains_key("unique_while_waiting") { held } else { start_one(&store, first.id).await }).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_postponed_job_waits_for_the_last_call_but_not_for_ever() {
    let (database, store) = prepared().await;
    let due = async |id: JobId| database.only("scheduled", doc! { "_id": id }).await.get_datetime("scheduled_at").unwrap().to_chrono();
    let at_most = Duration::from_secs(100);
    let call =
        |n, delay: u64| keyed(n, Unique::by_key("k").on_conflict(OnConflict::Postpone { at_most })).after(Duration::from_secs(delay));
    let first = enqueue(&store, call(1, 10)).await;
    let early = due(first.id).await;
    let second = enqueue(&store, call(2, 60).expires_after(at_most)).await;
    assert_eq!((second.id, second.outcome), (first.id, Outcome::Postponed));
    let later = due(first.id).await;
    assert!(later - early >= TimeDelta::seconds(50));
    assert_eq!(n_of(&database, first.id).await, 1, "only the date changes");
    assert!(database.only("scheduled", doc! { "_id": first.id }).await.contains_key("expires_at"), "the expiry belongs to the date");
    enqueue(&store, call(3, 10)).await;
    assert_eq!(due(first.id).await, later, "never earlier");
    let created = doc! { "$set": { "created_at": bson::DateTime::from_chrono(store.now() - TimeDelta::seconds(30)) } };
    database.raw("scheduled").update_one(doc! { "_id": first.id }, created).await.unwrap();
    assert_eq!(enqueue(&store, call(4, 90)).await.outcome, Outcome::Postponed);
    let latest = due(first.id).await;
    assert!(latest > later && latest <= store.now() + TimeDelta::seconds(70), "at most 100 s after it was enqueued");
    database
        .raw("scheduled")
        .update_one(doc! { "_id": first.id }, doc! { "$set": { "scheduled_at": bson::DateTime::from_millis(1) } })
        .await
        .unwrap();
    start_one(&store, first.id).await;
    assert_eq!(enqueue(&store, call(5, 10)).await.outcome, Outcome::AlreadyStarted);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_running_job_has_one_successor_that_starts_after_its_end() {
    let database = TestDatabase::new().await;
    let stores = [store(&database).await, store(&database).await, store(&database).await];
    let store = &stores[0];
    let once_more = |n| keyed(n, Unique::by_key("k").on_conflict(OnConflict::RunOnceMore));
    let first = enqueue(store, once_more(0)).await;
    assert_eq!(enqueue(store, once_more(1)).await, duplicate_of(first), "it waits, so it runs after this call");
    let held = start_one(store, first.id).await;
    let all = all_at_once(&stores, 50, |n| once_more(i32::try_from(n).unwrap())).await;
    let all: Vec<Enqueued> = all.into_iter().map(Result::unwrap).collect();
    let new: Vec<&Enqueued> = all.iter().filter(|job| job.is_new).collect();
    assert!(new.len() == 1 && new[0].outcome == Outcome::RunsOnceMore, "{all:?}");
    let successor = new[0].id;
    assert!(all.iter().all(|job| job.id == successor));
    assert_eq!(database.count("scheduled", doc! {}).await, 2);
    // It is not due, and an operator does not make it so by mistake.
    assert!(read(store, &[successor]).await[0].due().unwrap() > store.now() + TimeDelta::days(365));
    let changed = store.control(false).change(&Change::Retry { again: false, with: Box::default() }, &[successor]).await.unwrap();
    assert!(matches!(&changed[0].1, Changed::Refused(Refusal::WaitsForAnother { key }) if key == "k"), "{changed:?}");
    assert_eq!(store.release_successors(&["k".into()]).await.unwrap(), 0, "the other one has not ended");
    assert_eq!(store.release_orphaned_successors().await.unwrap(), 0);
    finish(store, &held).await;
    let held = start_one(store, successor).await;
    assert!(enqueue(store, once_more(9)).await.outcome == Outcome::RunsOnceMore, "it has the key now");
    // Its process dies after the archival, or another release has archived it.
    database.raw("scheduled").delete_one(doc! { "_id": held.0.id }).await.unwrap();
    assert_eq!(store.release_orphaned_successors().await.unwrap(), 1);
    // A delay holds from the call.
    let third = database.only("scheduled", doc! {}).await.get_object_id("_id").unwrap().into();
    let held = start_one(store, third).await;
    let delayed = enqueue(store, once_more(10).after(HOUR)).await;
    finish(store, &held).await;
    let due = read(store, &[delayed.id]).await[0].due().unwrap() - store.now();
    assert!(due > TimeDelta::minutes(50) && due < TimeDelta::minutes(61), "{due}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_call_whose_reply_was_lost_can_be_repeated() {
    let database = TestDatabase::of_its_own().await;
    let store = store(&database).await;
    for (at, unique) in
        [Unique::by_key("w").while_waiting(), Unique::by_key("f"), Unique::by_key("p").for_period(HOUR)].into_iter().enumerate()
    {
        let id = JobId::new();
        let job = || keyed(at.try_into().unwrap(), unique.clone()).with_id(id);
        // The job is written, and the caller gets an error.
        let lost = FailPoint::new("test", &[if at == 2 { "commitTransaction" } else { "insert" }])
            .write_concern_error(64)
            .times(1)
            .arm(database.uri())
            .await;
        let first = job().enqueue(&store).await;
        drop(lost);
        let second = enqueue(&store, job()).await;
        assert_eq!(second.id, id);
        assert!(first.is_ok() || second.outcome == Outcome::KnownId, "{first:?}, {second:?}");
        assert_eq!(database.count("scheduled", doc! {}).await, at as u64 + 1);
        assert_eq!(enqueue(&store, job()).await.outcome, Outcome::KnownId);
        assert_eq!(enqueue(&store, keyed(9, unique.clone())).await.id, id, "without the id it is a duplicate");
        finish(&store, &start_one(&store, id).await).await;
        assert_eq!(enqueue(&store, job()).await.outcome, Outcome::KnownId, "it is archived");
        let filler = minimal_job("filler");
        database.raw("scheduled").insert_one(filler).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_batch_may_have_the_same_key_several_times() {
    let (database, store) = prepared().await;
    let ignore = || Unique::by_key("i");
    let replace = || Unique::by_key("r").while_waiting().on_conflict(OnConflict::Replace);
    let period = || Unique::by_key("p").for_period(HOUR);
    let jobs =
        [keyed(1, ignore()), job(2), keyed(3, replace()), keyed(4, ignore()), keyed(5, replace()), keyed(6, period()), keyed(7, period())];
    let enqueued = store.enqueue_many(jobs).await.unwrap();
    let outcomes: Vec<Outcome> = enqueued.iter().map(|job| job.outcome).collect();
    let (new, duplicate) = (Outcome::New, Outcome::Duplicate);
    assert_eq!(outcomes, [new, new, new, duplicate, Outcome::Replaced, new, duplicate]);
    for (same, first) in [(3, 0), (4, 2), (6, 5)] {
        assert_eq!(enqueued[same].id, enqueued[first].id);
    }
    assert_eq!(n_of(&database, enqueued[2].id).await, 5);
    assert_eq!(database.count("scheduled", doc! {}).await, 4);
    // More than one command.
    let many = store.enqueue_many((0..2_500).map(|n| keyed(n, Unique::by_key(format!("m{}", n % 1_250))))).await.unwrap();
    assert_eq!(many.iter().filter(|job| job.is_new).count(), 1_250);
    assert!((0..1_250).all(|n| many[n].id == many[n + 1_250].id));
}

async fn in_transaction(store: &Store, jobs: Vec<NewJob>) -> Vec<Enqueued> {
    let enqueue = async |session: &mut ClientSession| Ok(store.enqueue_many_in(session, jobs.clone()).await?);
    store.start_session().await.unwrap().start_transaction().and_run2(enqueue).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_a_callers_transaction_the_keys_hold_as_well() {
    let (database, store) = prepared().await;
    store.prepare_unique_jobs().await.unwrap();
    for (at, unique) in
        [Unique::by_key("w").while_waiting(), Unique::by_key("f"), Unique::by_key("p").for_period(HOUR)].into_iter().enumerate()
    {
        let id = JobId::new();
        let jobs = vec![
            keyed(1, unique.clone()).with_id(id),
            keyed(2, unique.clone()),
            job(3),
            keyed(4, unique.clone().on_conflict(OnConflict::Replace)),
        ];
        let first = in_transaction(&store, jobs.clone()).await;
        let outcomes: Vec<Outcome> = first.iter().map(|job| job.outcome).collect();
        assert_eq!(outcomes, [Outcome::New, Outcome::Duplicate, Outcome::New, Outcome::Replaced]);
        assert_eq!((first[1].id, n_of(&database, id).await), (id, 4));
        assert_eq!(in_transaction(&store, jobs).await[0].outcome, Outcome::KnownId);
        // Nothing is left of an aborted one.
        let mut session = store.start_session().await.unwrap();
        session.start_transaction().await.unwrap();
        let other = Unique::by_key("other").scope(match at {
            0 => recruiter_common::UniqueScope::WhileWaiting,
            1 => recruiter_common::UniqueScope::UntilFinished,
            _ => recruiter_common::UniqueScope::For(HOUR),
        });
        assert!(keyed(1, other.clone()).enqueue_in(&store, &mut session).await.unwrap().is_new);
        session.abort_transaction().await.unwrap();
        assert!(enqueue(&store, keyed(1, other)).await.is_new);
        // Of transactions that race, one is first; the others are repeated by the driver and find it.
        let key = format!("race{at}");
        let racing = match at {
            0 => Unique::by_key(&key).while_waiting(),
            1 => Unique::by_key(&key),
            _ => Unique::by_key(&key).for_period(HOUR),
        };
        let all = futures_util::future::join_all((0..10).map(|_| in_transaction(&store, vec![keyed(0, racing.clone())]))).await;
        assert_eq!(all.iter().filter(|jobs| jobs[0].is_new).count(), 1, "{unique:?}");
    }
    // A successor.
    let once_more = || keyed(0, Unique::by_key("k").on_conflict(OnConflict::RunOnceMore));
    let held = start_one(&store, enqueue(&store, once_more()).await.id).await;
    let both = in_transaction(&store, vec![once_more(), once_more()]).await;
    assert_eq!((both[0].outcome, both[1].outcome, both[1].id), (Outcome::RunsOnceMore, Outcome::Duplicate, both[0].id));
    finish(&store, &held).await;
    start_one(&store, both[0].id).await;
}

/// The error of a conflict has the label by which the driver repeats the transaction.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_race_in_a_callers_transaction_is_reported_as_such() {
    let (_database, store) = prepared().await;
    store.prepare_unique_jobs().await.unwrap();
    let mut session = store.start_session().await.unwrap();
    session.start_transaction().await.unwrap();
    job(1).enqueue_in(&store, &mut session).await.unwrap();
    assert!(enqueue(&store, keyed(2, Unique::by_key("k"))).await.is_new);
    let lost = keyed(3, Unique::by_key("k")).enqueue_in(&store, &mut session).await.unwrap_err();
    let error = mongodb::error::Error::from(lost);
    assert!(error.contains_label(mongodb::error::TRANSIENT_TRANSACTION_ERROR), "{error}");
}

/// Between an insert that is refused and the look at the job that has the key.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_holder_may_be_archived_meanwhile() {
    let database = TestDatabase::new().await;
    let stores = [store(&database).await, store(&database).await];
    let ended = Arc::new(AtomicU64::new(0));
    let consumer = {
        let (store, ended, database_of) = (stores[0].clone(), ended.clone(), database.raw("scheduled"));
        tokio::spawn(async move {
            loop {
                if let Some(job) = database_of.find_one(doc! { "locked": false }).await.unwrap() {
                    let id = JobId::from(job.get_object_id("_id").unwrap());
                    for held in started(&store, WorkerId::new(), &[id]).await {
                        finish(&store, &held).await;
                        ended.fetch_add(1, Ordering::SeqCst);
                    }
                }
            }
        })
    };
    let (mut new, mut rounds) = (0, 0);
    while rounds < 20 || new < 2 {
        rounds += 1;
        for enqueued in all_at_once(&stores, 10, |_| keyed(0, Unique::by_key("k"))).await {
            match enqueued {
                Ok(enqueued) => new += u64::from(enqueued.is_new),
                Err(EnqueueError::KeyKeepsChanging { .. }) => {}
                Err(error) => panic!("{}", chain(&error)),
            }
        }
    }
    wait_until(SOON, "all are ended", async || ended.load(Ordering::SeqCst) == new).await;
    consumer.abort();
}

/// While a worker starts it: either the new content runs, or the caller learns that it was too late.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replacement_that_races_with_a_start_is_run_or_refused() {
    let (database, store) = prepared().await;
    let (mut replaced, mut too_late) = (0, 0);
    for _ in 0..60 {
        let id = enqueue(&store, keyed(1, Unique::by_key("k"))).await.id;
        let jobs = read(&store, &[id]).await;
        let (start, to_start) = (start(&store, WorkerId::new()), to_start(&jobs));
        let (claims, change) = tokio::join!(
            store.start_if_unlocked(&start, &to_start),
            keyed(2, Unique::by_key("k").on_conflict(OnConflict::Replace)).enqueue(&store)
        );
        let (started, outcome) = (claims.unwrap().len() == 1, change.unwrap().outcome);
        match outcome {
            Outcome::Replaced => {
                assert!(!started, "the old content was started");
                assert_eq!(n_of(&database, id).await, 2);
                replaced += 1;
            }
            Outcome::AlreadyStarted => {
                assert!(started);
                assert_eq!(n_of(&database, id).await, 1);
                too_late += 1;
            }
            Outcome::New | Outcome::KnownId | Outcome::Duplicate | Outcome::Postponed | Outcome::RunsOnceMore | _ => panic!("{outcome:?}"),
        }
        database.raw("scheduled").delete_many(doc! {}).await.unwrap();
    }
    assert!(replaced + too_late == 60);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn mongodb_refuses_a_second_key_also_from_the_shell() {
    let (database, store) = prepared().await;
    store.prepare_unique_jobs().await.unwrap();
    // Null is no key.
    let script =
        "const job = set => ({ workable: { class: 'x' }, locked: false, group: 'g', priority: 5, scheduled_at: new Date(), ...set });
         const null_keys = { unique: null, unique_while_waiting: null, attempts: 0 };
         for (const set of [{ unique: 'k' }, { unique_while_waiting: 'k' }, { unique_after: 'k' }, null_keys]) {
             db.scheduled.insertOne(job(set));
             try { db.scheduled.insertOne(job(set)); print('accepted') } catch (error) { print(error.code) }
         }";
    let said = mongosh::eval(database.uri(), script);
    assert_eq!(said.split_whitespace().collect::<Vec<_>>(), ["11000", "11000", "11000", "accepted"]);
    assert_eq!(enqueue(&store, keyed(0, Unique::by_key("k"))).await.outcome, Outcome::Duplicate);
    // Other types are refused.
    for wrong in [
        "unique: 5",
        "unique: ''",
        "unique_while_waiting: {}",
        "unique_after: []",
        "unique_for_period: 1",
        "replaced: 'x'",
        "expires_at: 5",
    ] {
        let mut job = minimal_job("x");
        let (field, _) = wrong.split_once(':').unwrap();
        job.insert(field, doc! {});
        assert!(database.raw("scheduled").insert_one(job).await.is_err(), "{wrong}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_dead_letter_keeps_its_key_when_it_is_retried() {
    let (_database, store) = prepared().await;
    let failed = async |unique: Unique| {
        let held = start_one(&store, enqueue(&store, keyed(0, unique)).await.id).await;
        let execution = held.0.last_execution.clone().unwrap().ended(store.now(), Some(&Failure::new("x", "")));
        let end = Archival::ended(&held.0, held.1, Ending::new(execution, FinishReason::GAVE_UP));
        assert_eq!(store.archive(&mut CommitSession::default(), &[end]).await.unwrap(), [Recorded::Yes]);
        held.0.id
    };
    let retry = async |id: JobId| {
        store.control(false).change(&Change::Retry { again: true, with: Box::default() }, &[id]).await.unwrap().remove(0).1
    };
    let finished = failed(Unique::by_key("f")).await;
    let other = enqueue(&store, keyed(1, Unique::by_key("f"))).await.id;
    assert_eq!(retry(finished).await, Changed::Refused(Refusal::KeyIsTaken));
    finish(&store, &start_one(&store, other).await).await;
    assert!(matches!(retry(finished).await, Changed::EnqueuedAgain { .. }));
    assert!(!enqueue(&store, keyed(2, Unique::by_key("f"))).await.is_new);
    // A person's decision is not bound by a period.
    let of_period = failed(Unique::by_key("p").for_period(HOUR)).await;
    assert!(matches!(retry(of_period).await, Changed::EnqueuedAgain { .. }));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_store_on_a_foreign_client_makes_the_indexes_and_duplicates_stop_no_process() {
    let (database, own) = prepared().await;
    let foreign = Client::from_database(database.database().clone());
    assert!(keyed(0, Unique::by_key("k")).enqueue(&foreign).await.unwrap().is_new);
    // Two documents with one key, from a time without the index: the process starts, and the others work.
    database.raw("scheduled").drop_index("unique").await.unwrap();
    let mut double = minimal_job("x");
    double.insert("unique", "k");
    database.raw("scheduled").insert_one(double).await.unwrap();
    store(&database).await;
    assert!(enqueue(&own, job(1)).await.is_new);
    database.raw("scheduled").delete_one(doc! { "unique": "k" }).await.unwrap();
    store(&database).await;
    assert!(!enqueue(&own, keyed(1, Unique::by_key("k"))).await.is_new);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn what_cannot_be_is_refused_before_anything_is_sent() {
    let (database, store) = prepared().await;
    let refused = async |job: NewJob, part: &str| {
        let problem = job.enqueue(&store).await.unwrap_err();
        assert!(matches!(problem, EnqueueError::Unique { .. }) && chain(&problem).contains(part), "{problem:?}");
    };
    refused(keyed(0, Unique::by_key("")), "is empty").await;
    refused(keyed(0, Unique::by_key("x".repeat(300))), "256 is the limit").await;
    refused(keyed(0, Unique::by_parameters(["customer"])), "no parameter `customer`").await;
    refused(keyed(0, Unique::by_key("k").for_period(Duration::ZERO)), "from 1 ms to 10 years").await;
    refused(keyed(0, Unique::by_key("k").for_period(Duration::from_secs(400_000_000))), "from 1 ms to 10 years").await;
    let said = |args: &[&str], code: i32, part: &str| {
        let said = recruiter(&database, &[&["enqueue", "--class", "c"], args].concat());
        assert!(said.code == code && said.err.contains(part), "{args:?}: {}", said.err);
    };
    said(&["--unique", ""], 2, "the unique key is empty");
    said(&["--unique", "k", "--unique-by", "a"], 2, "cannot be used with");
    said(&["--unique-by", "a"], 2, "no parameter `a`");
    said(&["--unique", "k", "--unique-until", "noon"], 2, "invalid value");
    said(&["--unique", "k", "--unique-for", "0s"], 2, "from 1 ms to 10 years");
    said(&["--unique", "k", "--on-conflict", "postpone"], 2, "needs --postpone-at-most");
    said(&["--unique", "k", "--on-conflict", "postpone", "--postpone-at-most", "1m"], 2, "needs a later date");
    said(&["--on-conflict", "replace"], 2, "add --unique KEY");
    said(&["--unique", "k", "--unique-until", "started", "--on-conflict", "run-once-more"], 2, "can run once more only");
    assert_eq!(database.count("scheduled", doc! {}).await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn the_command_line_says_what_has_happened() {
    let database = TestDatabase::new().await;
    let enqueue = |args: &[&str]| {
        let parameters = r#"{"customer": 17, "month": "2030-01"}"#;
        let all = [&["enqueue", "--class", "report", "--parameters", parameters, "--json"], args].concat();
        recruiter(&database, &all).objects().remove(0)
    };
    let first = enqueue(&["--unique-by", "month,customer", "--after", "1h"]);
    assert_eq!(first["outcome"], "new");
    let job = database.only("scheduled", doc! {}).await;
    assert_eq!(job.get_str("unique").unwrap(), r#"report{"customer":17,"month":"2030-01"}"#);
    let second = enqueue(&["--unique-by", "*"]);
    assert_eq!((&second["outcome"], &second["id"]), (&"duplicate".into(), &first["id"]));
    assert_eq!(enqueue(&["--unique-by", "*", "--on-conflict", "replace"])["outcome"], "replaced");
    let postponed = enqueue(&["--unique-by", "*", "--on-conflict", "postpone", "--postpone-at-most", "2h", "--after", "1h"]);
    assert_eq!(postponed["outcome"], "postponed");
    assert_eq!(enqueue(&["--unique", "k", "--unique-for", "1h"])["outcome"], "new");
    assert_eq!(enqueue(&["--unique", "k", "--unique-until", "started"])["outcome"], "new", "scopes are independent");
    let line = r#"{"class": "c", "unique": {"key": "k", "until": "started", "on_conflict": "replace"}}"#;
    let mut child = spawn(&database, &["enqueue", "--from", "-", "--json"]);
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), format!("{line}\n{line}\n").as_bytes()).unwrap();
    let said = super::cli::Said::of(child.wait_with_output().unwrap()).objects();
    assert_eq!((&said[0]["outcome"], &said[1]["outcome"]), (&"replaced".into(), &"replaced".into()));
    let said = recruiter(&database, &["enqueue", "--class", "c", "--unique", "k", "--unique-until", "started"]);
    assert!(said.code == 0 && said.err.starts_with("nothing was enqueued: a job with this unique key exists"), "{}", said.err);
}

/// Many processes, killed between the insert and the hint: the job is done once.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn killed_enqueuers_leave_one_job_that_is_done() {
    let (database, store) = prepared().await;
    let mut children: Vec<_> =
        (0..12).map(|_| spawn(&database, &["enqueue", "--class", "noop", "--unique", "k", "--unique-for", "1h"])).collect();
    database.until("scheduled", doc! {}, 1, "one of them has inserted").await;
    for child in &mut children {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    let system = System::start(&database, Setup::default());
    database.until("archived", doc! { "why": "done" }, 1, "it is done").await;
    assert!(!enqueue(&store, keyed(0, Unique::by_key("k").for_period(HOUR))).await.is_new);
    assert_eq!(database.count("scheduled", doc! {}).await, 0);
    system.stop().await;
}

/// Counts the executions that run at the same time.
#[derive(Serialize, Deserialize)]
struct Index {
    fails: u32,
}
workable!(Index);

#[derive(Default)]
struct Seen {
    running: AtomicU64,
    most: AtomicU64,
    executions: AtomicU64,
}

impl Executable for Index {
    type State = Arc<Seen>;

    async fn execute(&self, seen: &Arc<Seen>, job: &Context) -> Result<(), NotDone> {
        seen.most.fetch_max(seen.running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        seen.executions.fetch_add(1, Ordering::SeqCst);
        pause(Duration::from_millis(100)).await;
        seen.running.fetch_sub(1, Ordering::SeqCst);
        if job.retries() < self.fails { Err(NotDone::failed("x", "as it was told")) } else { Ok(()) }
    }
}

/// With real processes: a job runs once more after each call at most, never beside itself, and soon.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_that_runs_once_more_never_runs_beside_itself() {
    let ((database, store), seen) = (prepared().await, Arc::new(Seen::default()));
    let worker = Worker::new().register::<Index>(seen.clone()).unwrap();
    let processes = Local::pair(&database, &[], worker, &[]);
    let once_more = || Index { fails: 0 }.as_job().unique(Unique::by_key("k").on_conflict(OnConflict::RunOnceMore));
    let (mut new, mut calls) = (0, 0);
    while calls < 100 || new < 4 {
        calls += 1;
        new += u64::from(enqueue(&store, once_more()).await.is_new);
        pause(Duration::from_millis(15)).await;
    }
    // Much sooner than the sweep, which no cleaner makes here.
    database.until("archived", doc! { "why": "done" }, new, "all are done").await;
    let (executions, most) = (seen.executions.load(Ordering::SeqCst), seen.most.load(Ordering::SeqCst));
    promise!((executions, most) == (new, 1), "{executions} executions of {new} jobs, {most} at a time");
    // A retry of a job that is unique while it waits collides with no other.
    let waiting = |fails| Index { fails }.as_job().retry(&again(3)).unique(Unique::by_key("w").while_waiting());
    let mut first = vec![enqueue(&store, waiting(2)).await.id];
    database.until("scheduled", doc! { "attempts": 0 }, 0, "it has started").await;
    first.push(enqueue(&store, waiting(0).after(Duration::from_secs(1))).await.id);
    database.until("archived", doc! { "_id": { "$in": first }, "why": "done" }, 2, "both are done").await;
    local::stop(processes).await;
}
