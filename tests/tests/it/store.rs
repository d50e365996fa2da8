//! The operations of the store: the indexes they are served by, and what they make of jobs together. Their guards, one by
//! one, are in `tests/tests/guards/`.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use bson::{Bson, Document, doc};
use futures_util::TryStreamExt;
use mongodb::{IndexModel, error::ErrorKind};
use recruiter_common::{
    Failure, FinishReason, JobId, NewJob, OnConflict, Outcome, Priority, StoreError, Unique, WorkerId,
    ids::{RoundId, StartId},
    job::{Execution, Job},
    store::{
        Archival, AssignedJobs, Channel, CommitSession, Covered, DOCUMENT_FAULTS, EVERY_GROUP, Ending, Hint, Lane, Listener, Offer,
        Recorded, Rescheduling, ScheduledJob, Store,
    },
};
use recruiter_tests::{
    factory::{announcement, in_ms, insert_unvalidated, minimal_job, read, start, started, to_start},
    fail_points::FailPoint,
    local::{ids, prepared, store, store_behind_a_proxy},
    mongo::TestDatabase,
    oracle,
    proxy::Action,
    wait::SOON,
};
use tokio::sync::Barrier;

async fn enqueued(store: &Store, count: usize) -> Vec<JobId> {
    ids(store.enqueue_many((0..count).map(|_| NewJob::of_class("x", doc! {}))).await.unwrap())
}

fn done(job: &Job, claim: recruiter_common::job::Claim, store: &Store) -> Archival {
    let execution = job.last_execution.clone().unwrap_or_default().ended(store.now(), None);
    Archival::ended(job, claim, Ending::new(execution, FinishReason::DONE))
}

async fn archive(store: &Store, batch: &[Archival]) -> Vec<Recorded> {
    let mut session = CommitSession::default();
    store.archive(&mut session, batch).await.unwrap()
}

/// Runs production code with MongoDB's profiler on and reads what the server says it did.
async fn profiled(database: &TestDatabase, work: impl Future<Output = ()>) -> Vec<Document> {
    let profile = async |level: i32| database.database().run_command(doc! { "profile": level }).await.unwrap();
    profile(2).await;
    work.await;
    profile(0).await;
    let found = database.all("system.profile", doc! { "appName": "test", "ns": { "$not": { "$regex": "system|signals" } } }).await;
    database.raw("system.profile").drop().await.unwrap();
    found
}

fn number(entry: &Document, field: &str) -> i64 {
    entry.get(field).and_then(|n| n.as_i64().or(n.as_i32().map(i64::from))).unwrap_or(0)
}

/// With 20,000 jobs that are not wanted now and 5,000 archived ones in the way, no hot operation scans a collection, and
/// none reads much more than it returns.
#[tokio::test]
async fn hot_operations_are_served_by_their_index() {
    let (database, store) = prepared().await;
    let later = in_ms(&store, 3_600_000);
    store.enqueue_many((0..10_000).map(|_| NewJob::of_class("x", doc! {}).at(later))).await.unwrap();
    store.enqueue_many((0..10_000).map(|n| NewJob::of_class("x", doc! {}).in_group(format!("other-{}", n % 5)))).await.unwrap();
    let mut old: Vec<Document> = (0..5_000).map(|_| minimal_job("x")).collect();
    let now = bson::DateTime::now().timestamp_millis();
    for (document, ms) in old.iter_mut().zip(1..) {
        document.insert("last_execution", doc! { "ended_at": bson::DateTime::from_millis(now - ms) });
    }
    database.raw("archived").insert_many(old).await.unwrap();
    let ids = enqueued(&store, 10).await;
    let pairs = [("generic", "x"), ("generic", "y"), ("other-1", "x"), ("other-1", "y")];
    let lanes = pairs.map(|(group, class)| Lane::new(group, class));
    let worker = WorkerId::new();

    let check = async |what: &str, most: i64, work: &mut dyn AsyncWork| {
        let entries = profiled(&database, work.run()).await;
        assert!(!entries.is_empty(), "{what}: nothing was profiled");
        for entry in entries {
            let plan = entry.get_str("planSummary").unwrap_or("none").to_owned();
            let operation = entry.get_str("op").unwrap_or_default().to_owned();
            if matches!(operation.as_str(), "command" | "insert") && plan == "none" {
                continue;
            }
            let (keys, documents) = (number(&entry, "keysExamined"), number(&entry, "docsExamined"));
            println!("{what}: {operation} {plan} keys={keys} documents={documents}");
            assert!(
                plan.starts_with("IXSCAN") || plan.starts_with("DISTINCT_SCAN") || plan == "IDHACK",
                "{what} is not served by an index: {entry}"
            );
            assert!(keys <= most && documents <= most, "{what} reads too much: keys {keys}, documents {documents}");
        }
    };
    let due = async |limit: usize| store.due_jobs(&lanes, store.now(), limit).await.unwrap().jobs.len();
    check("due_jobs", 40, &mut Work(async || assert_eq!(due(10).await, 10))).await;
    let entry = profiled(&database, async { assert_eq!(due(10).await, 10) }).await.remove(0);
    assert_eq!(number(&entry, "docsExamined"), 0, "the index covers it, however large the payloads are: {entry}");
    check("ungated_groups", 40, &mut Work(async || assert_eq!(store.ungated_groups().await.unwrap().len(), 6))).await;
    let unique = |key: &str| NewJob::of_class("x", doc! {}).unique(Unique::by_key(key)).at(later);
    for key in ["a", "b", "c"] {
        unique(key).expires_at(in_ms(&store, 7_200_000)).enqueue(&store).await.unwrap();
    }
    check("a taken key", 2, &mut Work(async || assert!(!unique("b").enqueue(&store).await.unwrap().is_new))).await;
    let replace = async || {
        let job = unique("b").unique(Unique::by_key("b").on_conflict(OnConflict::Replace));
        assert_eq!(job.enqueue(&store).await.unwrap().outcome, Outcome::Replaced);
    };
    check("replace", 2, &mut Work(replace)).await;
    check("expired_jobs", 2, &mut Work(async || assert!(store.expired_jobs(store.now(), 10).await.unwrap().is_empty()))).await;
    let orphans = async || assert_eq!(store.release_orphaned_successors().await.unwrap(), 0);
    check("release_orphaned_successors", 0, &mut Work(orphans)).await;
    check("waiting_in", 12, &mut Work(async || assert_eq!(store.waiting_in("generic", 10).await.unwrap(), 10))).await;
    let lanes_of = async || assert_eq!(store.lanes_of("other-1", 9).await.unwrap(), (vec![lanes[2].clone()], true));
    check("lanes_of", 40, &mut Work(lanes_of)).await;
    let gated = (0..2_000).map(|number| {
        let mut job = minimal_job("x");
        job.extend(doc! { "group": "other-1", "gate": format!("gate-{}", number % 5) });
        job
    });
    database.raw("scheduled").insert_many(gated).await.unwrap();
    let of_gates: Vec<Lane> = (0..5).map(|gate| Lane { gate: Some(format!("gate-{gate}")), ..Lane::new("other-1", "x") }).collect();
    check("gated_groups", 40, &mut Work(async || assert_eq!(store.gated_groups().await.unwrap().len(), 1))).await;
    check("gated_lanes_of", 40, &mut Work(async || assert_eq!(store.gated_lanes_of("other-1").await.unwrap(), of_gates))).await;
    for lanes in [&of_gates[..], &lanes[2..]] {
        let due = async || assert_eq!(store.due_jobs(lanes, store.now(), 10).await.unwrap().jobs.len(), 10);
        let entry = profiled(&database, due()).await.remove(0);
        assert!(number(&entry, "docsExamined") == 0 && number(&entry, "keysExamined") < 40, "{entry}");
    }
    check("unlocked", 40, &mut Work(async || assert_eq!(store.unlocked(&ids).await.unwrap().len(), 10))).await;
    let jobs = read(&store, &ids).await;
    let starting = start(&store, worker);
    check(
        "start_if_unlocked",
        40,
        &mut Work(async || assert_eq!(store.start_if_unlocked(&starting, &to_start(&jobs)).await.unwrap().len(), 10)),
    )
    .await;
    let asked = std::collections::HashMap::from([(starting.id, ids.clone())]);
    check("claims_of_starts", 40, &mut Work(async || assert_eq!(store.claims_of_starts_at_majority(&asked).await.unwrap().len(), 10)))
        .await;
    check("held_by", 40, &mut Work(async || assert_eq!(store.held_by(worker, &ids).await.unwrap().len(), 10))).await;
    check("cancel_requests", 40, &mut Work(async || assert!(store.cancel_requests(&ids).await.unwrap().is_empty()))).await;
    check("already_archived", 40, &mut Work(async || assert!(store.already_archived(&ids).await.unwrap().is_empty()))).await;
    let held = store.held_by(worker, &ids).await.unwrap();
    let held: Vec<_> = held.into_iter().map(|held| (held.job.unwrap(), held.claim)).collect();
    let back: Vec<Rescheduling> =
        held[..5].iter().map(|(job, claim)| Rescheduling::retry(job, *claim, &Execution::default(), later, true)).collect();
    check(
        "reschedule_if_claimed",
        40,
        &mut Work(async || assert_eq!(store.reschedule_if_claimed(&back).await.unwrap(), [Recorded::Yes; 5])),
    )
    .await;
    let ended: Vec<Archival> = held[5..].iter().map(|(job, claim)| done(job, *claim, &store)).collect();
    check("archive", 60, &mut Work(async || assert_eq!(archive(&store, &ended).await, [Recorded::Yes; 5]))).await;
    let covered = Covered { classes: vec!["nosuch".into()], others: None };
    let prune = async || assert!(store.prune_covered(&covered, None, in_ms(&store, 60_000), 20).await.unwrap().next.is_some());
    check("prune_covered", 40, &mut Work(prune)).await;
    check("prune_archived", 120, &mut Work(async || assert_eq!(store.prune_archived(in_ms(&store, 60_000), 100).await.unwrap(), 100)))
        .await;
}

/// An async closure as an object, so that one check serves them all.
trait AsyncWork {
    fn run<'a>(&'a mut self) -> std::pin::Pin<Box<dyn Future<Output = ()> + 'a>>;
}

struct Work<F>(F);

impl<F: AsyncFnMut()> AsyncWork for Work<F> {
    fn run<'a>(&'a mut self) -> std::pin::Pin<Box<dyn Future<Output = ()> + 'a>> {
        Box::pin((self.0)())
    }
}

/// With any number of groups and classes, and the most urgent jobs in any of them.
#[tokio::test]
async fn the_first_of_many_groups_are_found_in_order() {
    let (_database, store) = prepared().await;
    let (groups, classes): (Vec<String>, _) = ((0..300).map(|number| format!("group-{number:03}")).collect(), ["x", "y"]);
    let first = store.now() - Duration::from_secs(3_600);
    let job = |number: u32| {
        // Half of them in one group, all of them in an order of their own.
        let group = if number.is_multiple_of(2) { 7 } else { number as usize * 7 % groups.len() };
        let at = first + Duration::from_secs(u64::from(number * 1_237 % 2_003));
        let priority = Priority::new(u8::try_from(number % 3).unwrap()).unwrap();
        NewJob::of_class(classes[number as usize % 2], doc! {}).in_group(&groups[group]).priority(priority).at(at)
    };
    store.enqueue_many((0..2_000).map(job)).await.unwrap();
    let lanes = classes.iter().flat_map(|class| groups.iter().map(|group| Lane::new(group, *class)));
    let lanes: Vec<Lane> = lanes.collect();
    let all = store.due_jobs(&lanes, store.now(), 2_001).await.unwrap();
    assert!(all.end.is_none() && all.jobs.len() == 2_000, "{}", all.jobs.len());
    assert!(all.jobs.is_sorted_by_key(ScheduledJob::position));
    for limit in [1, 100, 700] {
        let some = store.due_jobs(&lanes, store.now(), limit).await.unwrap();
        assert!(some.jobs.len() >= limit, "{} of {limit}", some.jobs.len());
        assert_eq!(some.end, some.jobs.last().map(ScheduledJob::position));
        assert_eq!(some.jobs, all.jobs[..some.jobs.len()], "{limit}");
    }
}

/// I3: two workers with the same hint.
#[tokio::test]
async fn of_two_racing_starts_each_job_belongs_to_one() {
    let (database, store) = prepared().await;
    let ids = enqueued(&store, 200).await;
    let (jobs, barrier) = (to_start(&read(&store, &ids).await), Arc::new(Barrier::new(2)));
    let race = || {
        let (store, jobs, barrier) = (store.clone(), jobs.clone(), barrier.clone());
        tokio::spawn(async move {
            barrier.wait().await;
            store.start_if_unlocked(&start(&store, WorkerId::new()), &jobs).await.unwrap().len()
        })
    };
    let (first, second) = tokio::join!(race(), race());
    assert_eq!(first.unwrap() + second.unwrap(), 200);
    let locked = database.count("scheduled", doc! { "locked": true, "attempts": 1 }).await;
    assert_eq!(locked, 200, "every job was started exactly once");
}

/// However many groups or jobs it is about.
#[tokio::test]
async fn a_hint_that_would_be_too_large_is_told_in_parts_or_in_short() {
    let (_database, store) = prepared().await;
    let mut recruiter = store.hints(Listener::Recruiter);
    let assigned = |jobs: usize| AssignedJobs::new(WorkerId::new(), (0..jobs).map(|_| JobId::new()).collect());
    let assignments: Vec<AssignedJobs> = (0..80).map(|_| assigned(10_000)).collect();
    let last = assignments[79].clone();
    let mut worker = store.hints(Listener::Worker(last.worker, Channel(0)));
    tokio::time::timeout(SOON, async {
        while !(recruiter.is_listening() && worker.is_listening()) {
            tokio::task::yield_now().await;
        }
        store.publish(&Hint::jobs_in((0..70_000).map(|n| format!("{n}{}", "g".repeat(240))))).await.unwrap();
        while recruiter.next().await != Hint::jobs_in([EVERY_GROUP]) {}
        let round = RoundId::new();
        store.publish_to(Channel(0), &Hint::Assigned { round, assignments }).await.unwrap();
        while worker.next().await != (Hint::Assigned { round, assignments: vec![last.clone()] }) {}
    })
    .await
    .expect("both hints arrive");
}

/// Ids are looked for in the archive in portions.
#[tokio::test]
async fn of_many_jobs_that_are_sent_again_those_that_are_done_stay_done() {
    let (database, store) = prepared().await;
    let ids: Vec<JobId> = (0..10_100).map(|_| JobId::new()).collect();
    let known = [ids[5], ids[10_050]];
    database.raw("archived").insert_many(known.map(|id| doc! { "_id": id })).await.unwrap();
    store.enqueue_many(ids.iter().map(|id| NewJob::of_class("x", doc! {}).with_id(*id))).await.unwrap();
    assert_eq!(database.count("scheduled", doc! {}).await, 10_098);
    assert_eq!(database.count("scheduled", doc! { "_id": { "$in": known.to_vec() } }).await, 0);
}

/// The driver does not repeat them, and who misses them waits for the poll.
#[tokio::test]
async fn what_wakes_others_is_said_once_more_when_it_failed() {
    let (database, store) = prepared().await;
    let worker = announcement(1);
    store.register(&worker).await.unwrap();
    let mut hints = store.hints(Listener::Recruiter);
    assert_eq!(hints.next().await, Hint::Seed);
    let cut = |command, collection| FailPoint::new("test", &[command]).namespace(database.name(), collection).times(1).close_connection();
    let armed = cut("insert", "signals").arm(database.uri()).await;
    store.publish(&Hint::Free).await.unwrap();
    assert_eq!((armed.struck().await, hints.next().await), (1, Hint::Free));
    drop(armed);
    let armed = cut("update", "roster").arm(database.uri()).await;
    let free = Offer { slots: 1, ..Offer::default() };
    assert!(store.report_if_unassigned_since(worker.id, None, &free).await.unwrap());
    assert_eq!(armed.struck().await, 1);
}

/// I6: the history keeps the first execution and the newest and counts the rest.
#[tokio::test]
async fn a_long_history_is_bounded_and_counted() {
    let (_database, store) = prepared().await;
    let ids = enqueued(&store, 1).await;
    for n in 1..=25 {
        let (job, claim) = started(&store, WorkerId::new(), &ids).await.pop().unwrap();
        assert_eq!(job.attempts, n);
        let execution = job.last_execution.clone().unwrap().ended(store.now(), Some(&Failure::new(format!("failure-{n}"), "")));
        assert_eq!(
            store.reschedule_if_claimed(&[Rescheduling::retry(&job, claim, &execution, store.now(), true)]).await.unwrap(),
            [Recorded::Yes]
        );
    }
    let job = read(&store, &ids).await.pop().unwrap();
    let classes: Vec<_> = job.executions.iter().map(|execution| execution.class.clone().unwrap()).collect();
    assert_eq!(classes.len(), recruiter_common::job::KEPT_EXECUTIONS);
    assert_eq!((classes[0].as_str(), classes[1].as_str(), classes[19].as_str()), ("failure-1", "failure-7", "failure-25"));
    assert_eq!(job.executions_dropped, 5);
}

/// A reader of the archive need not know any default, and finds every attempt in one field.
#[tokio::test]
async fn what_is_archived_is_complete() {
    let (database, store) = prepared().await;
    let mut nulls = minimal_job("x");
    nulls.extend(doc! { "created_at": null, "attempts": null, "retry_policy": null });
    let documents = [minimal_job("x"), nulls, minimal_job("x"), minimal_job("x"), minimal_job("x")];
    let ids = documents.each_ref().map(|document| JobId::from(document.get_object_id("_id").unwrap()));
    let [done_at_once, with_nulls, failed, often, unstarted] = ids;
    database.raw("scheduled").insert_many(documents).await.unwrap();
    let archived = async |job: JobId| database.raw("archived").find_one(doc! { "_id": job }).await.unwrap().unwrap();
    let execution = |job: &Job, class: &str| {
        let failure = (!class.is_empty()).then(|| Failure::new(class, ""));
        job.last_execution.clone().unwrap().ended(store.now(), failure.as_ref())
    };

    let held = started(&store, WorkerId::new(), &[done_at_once, with_nulls]).await;
    let batch: Vec<Archival> = held.iter().map(|(job, claim)| done(job, *claim, &store)).collect();
    assert_eq!(archive(&store, &batch).await, [Recorded::Yes; 2]);
    let (job, claim) = &started(&store, WorkerId::new(), &[failed]).await[0];
    let given_up = Archival::ended(job, *claim, Ending::new(execution(job, "first"), FinishReason::GAVE_UP));
    assert_eq!(archive(&store, &[given_up]).await, [Recorded::Yes]);
    for n in 1..=24 {
        let (job, claim) = &started(&store, WorkerId::new(), &[often]).await[0];
        let retry = Rescheduling::retry(job, *claim, &execution(job, &format!("failure-{n}")), store.now(), n != 7);
        assert_eq!(store.reschedule_if_claimed(&[retry]).await.unwrap(), [Recorded::Yes]);
    }
    let (job, claim) = &started(&store, WorkerId::new(), &[often]).await[0];
    let ending = Ending { result: Some(Bson::Int32(1)), ..Ending::new(execution(job, ""), FinishReason::DONE) };
    let end = Archival::ended(job, *claim, ending);
    assert_eq!(archive(&store, &[end]).await, [Recorded::Yes]);
    let job = &read(&store, &[unstarted]).await[0];
    let cancelled = Archival::unstarted(job.id, &job.document, &FinishReason::CANCELLED, &Failure::new("cancelled", ""), store.now());
    assert_eq!(archive(&store, &[cancelled]).await, [Recorded::Yes]);

    for (job, attempts, interruptions) in [(done_at_once, 1, 0), (with_nulls, 1, 0), (failed, 1, 0), (often, 25, 1), (unstarted, 0, 0)] {
        let document = archived(job).await;
        let made = bson::oid::ObjectId::from(job).timestamp();
        assert_eq!(document.get_datetime("created_at").unwrap(), &made, "{document}");
        assert_eq!(document.get_document("retry_policy").unwrap(), &doc! { "class": "DoNotDoItAgain", "parameters": {} }, "{document}");
        let counts = ["attempts", "interruptions", "deaths"].map(|field| oracle::number(&document, field));
        assert_eq!(counts, [attempts, interruptions, 0], "{document}");
        assert!(["attempts", "interruptions", "deaths", "priority"].iter().all(|field| document.contains_key(field)), "{document}");
        assert_eq!(document.keys().collect::<BTreeSet<_>>().len(), document.len(), "no field twice: {document}");
    }
    for never_failed in [done_at_once, unstarted] {
        assert!(!archived(never_failed).await.contains_key("executions"), "last_execution says it all");
    }
    let history = async |job: JobId| {
        let document = archived(job).await;
        let last = document.get_document("last_execution").unwrap().clone();
        let all: Vec<Document> =
            document.get_array("executions").unwrap().iter().map(|execution| execution.as_document().unwrap().clone()).collect();
        assert_eq!(all.last(), Some(&last));
        let read = Job::try_from(document.clone()).unwrap();
        assert_eq!(read.every_execution().count(), all.len(), "each once");
        (all.len(), oracle::number(&document, "executions_dropped"))
    };
    assert_eq!(history(failed).await, (1, 0));
    assert_eq!(history(often).await, (recruiter_common::job::KEPT_EXECUTIONS, 5));
}

/// I8: a released job is unchanged, except for one start that does not count.
#[tokio::test]
async fn a_job_handed_back_is_due_as_before_and_the_start_does_not_count() {
    let (database, store) = prepared().await;
    let ids = enqueued(&store, 1).await;
    let before = database.raw("scheduled").find_one(doc! {}).await.unwrap().unwrap();
    let (job, claim) = started(&store, WorkerId::new(), &ids).await.pop().unwrap();
    assert_eq!(store.reschedule_if_claimed(&[Rescheduling::release(&job, claim)]).await.unwrap(), [Recorded::Yes]);
    let mut after = database.raw("scheduled").find_one(doc! {}).await.unwrap().unwrap();
    assert_eq!(number(&after, "attempts"), 1, "attempts never go down");
    assert_eq!(number(&after, "interruptions"), 1);
    after.insert("attempts", 0);
    after.remove("interruptions");
    assert_eq!(after, before);
    assert_eq!(read(&store, &ids).await[0].history().attempts, 0);
}

/// The end of a job and the application's own write are one transaction: both, or neither; and a job that was rescued is not finished.
#[tokio::test]
async fn a_job_is_finished_in_a_transaction_of_the_callers() {
    let (database, store) = prepared().await;
    let ids = enqueued(&store, 1).await;
    let worker = WorkerId::new();
    let (job, claim) = started(&store, worker, &ids).await.remove(0);
    let end = done(&job, claim, &store);
    let counts = async || {
        let count = async |collection: &str| database.count(collection, doc! {}).await;
        (count("scheduled").await, count("archived").await, count("orders").await)
    };
    let mut session = store.database().client().start_session().await.unwrap();
    let order = || store.database().run_command(doc! { "insert": "orders", "documents": [{ "paid": true }] });

    let none = store.finish_in(&mut session, &end).await;
    assert!(matches!(none, Err(StoreError::NoTransaction { .. })), "{none:?}");
    assert_eq!(counts().await, (1, 0, 0), "without a transaction nothing is written");

    session.start_transaction().await.unwrap();
    order().session(&mut session).await.unwrap();
    assert_eq!(store.finish_in(&mut session, &end).await.unwrap(), Recorded::Yes);
    session.abort_transaction().await.unwrap();
    assert_eq!(counts().await, (1, 0, 0), "aborted: neither");
    assert_eq!(store.held_by(worker, &ids).await.unwrap()[0].claim, claim, "the job is still claimed");

    session.start_transaction().await.unwrap();
    order().session(&mut session).await.unwrap();
    assert_eq!(store.finish_in(&mut session, &end).await.unwrap(), Recorded::Yes);
    assert_eq!(counts().await, (1, 0, 0), "nothing is seen before the commit");
    session.commit_transaction().await.unwrap();
    assert_eq!(counts().await, (0, 1, 1), "committed: both");
    let archived = database.raw("archived").find_one(doc! { "_id": job.id }).await.unwrap().unwrap();
    assert!(archived.get_bool("done").unwrap() && archived.get_array("executions").is_err(), "as the group commit writes it: {archived}");
    assert_eq!(archive(&store, &[end]).await, [Recorded::Yes], "and the group commit recognises it");

    let ids = enqueued(&store, 1).await;
    let (job, claim) = started(&store, worker, &ids).await.remove(0);
    let rescued = Rescheduling::retry(&job, claim, &Execution::default(), store.now(), true);
    assert_eq!(store.reschedule_if_claimed(&[rescued]).await.unwrap(), [Recorded::Yes]);
    session.start_transaction().await.unwrap();
    order().session(&mut session).await.unwrap();
    assert_eq!(store.finish_in(&mut session, &done(&job, claim, &store)).await.unwrap(), Recorded::ClaimLost);
    session.abort_transaction().await.unwrap();
    assert_eq!(counts().await, (1, 1, 1), "the rescued job waits, and the caller's write is taken back");
}

/// The store distinguishes refusals by their codes. This test fails if a server gives a code another meaning.
#[tokio::test]
async fn mongodb_gives_refusals_the_names_that_the_store_knows() {
    let database = TestDatabase::new().await;
    let mut options = mongodb::options::ClientOptions::parse(database.uri()).await.unwrap();
    options.app_name = Some("refusals".into());
    let client = mongodb::Client::with_options(options).unwrap();
    let ask = async |command: Document| client.database(database.name()).run_command(command).await;
    store(&database).await;
    for (code, name) in DOCUMENT_FAULTS {
        // Refusals with details cannot be made by a fail point.
        let real = match name {
            "DuplicateKey" => Some(doc! { "insert": "twice", "documents": [{ "_id": 1 }, { "_id": 1 }] }),
            "DocumentValidationFailure" => Some(doc! { "insert": "scheduled", "documents": [{ "locked": false }] }),
            _ => None,
        };
        if let Some(real) = real {
            let reply = ask(real).await.unwrap();
            let refusal = reply.get_array("writeErrors").unwrap()[0].as_document().unwrap().clone();
            assert_eq!(number(&refusal, "code"), i64::from(code), "{refusal}");
            continue;
        }
        let _armed = FailPoint::new("refusals", &["count"]).error_code(code).arm(database.uri()).await;
        let error = ask(doc! { "count": "x" }).await.unwrap_err();
        let ErrorKind::Command(refusal) = *error.kind else { panic!("{name}: {:?}", error.kind) };
        assert_eq!((refusal.code, refusal.code_name.as_str()), (code, name));
    }
}

/// I1 and I2 in every majority snapshot: while jobs are archived, each is in exactly one collection.
#[tokio::test]
async fn in_no_snapshot_is_a_job_in_both_collections_or_in_none() {
    // The server that the tests share can forget old snapshots within a second.
    let database = TestDatabase::of_its_own().await;
    let store = store(&database).await;
    let ids = enqueued(&store, 600).await;
    let held = started(&store, WorkerId::new(), &ids).await;
    let mut both_seen = 0;
    for batch in held.chunks(10) {
        let batch: Vec<Archival> = batch.iter().map(|(job, claim)| done(job, *claim, &store)).collect();
        let archiving = tokio::spawn({
            let store = store.clone();
            async move { assert!(archive(&store, &batch).await.iter().all(|recorded| *recorded == Recorded::Yes)) }
        });
        while !archiving.is_finished() {
            let mut session = database.database().client().start_session().snapshot(true).await.unwrap();
            let mut count = async |collection: &str| {
                let found = database.raw(collection).find(doc! {}).projection(doc! { "_id": 1 }).session(&mut session).await;
                let found: Vec<Document> = found.unwrap().stream(&mut session).try_collect().await.unwrap();
                found.len()
            };
            let (scheduled, archived) = (count("scheduled").await, count("archived").await);
            assert_eq!(scheduled + archived, 600);
            both_seen += u32::from(scheduled > 0 && archived > 0);
        }
        archiving.await.unwrap();
    }
    assert!(both_seen > 0, "no snapshot was taken in the middle");
}

#[tokio::test]
async fn the_validator_refuses_what_no_recruiter_would_ever_see() {
    let (database, _store) = prepared().await;
    let scheduled = database.raw("scheduled");
    scheduled.insert_one(minimal_job("x")).await.expect("the contract for other languages");
    let mut extra = minimal_job("x");
    extra.extend(doc! { "colour": "blue", "attempts": 0, "tags": ["a"], "keep": "failures" });
    scheduled.insert_one(extra).await.expect("other fields are the enqueuer's own business");
    let mut empty = minimal_job("x");
    empty.extend(doc! {
        "created_at": null, "attempts": null, "interruptions": null, "deaths": null, "retry_policy": null, "tags": null, "urn": null,
        "last_execution": null, "executions": null, "item_outcomes": null, "keep": null,
    });
    scheduled.insert_one(empty).await.expect("a missing field may be null");
    let mut of_php = minimal_job("x");
    of_php.extend(doc! { "retry_policy": { "class": "DoNotDoItAgain", "parameters": [] }, "workable": { "class": "x", "parameters": [] } });
    scheduled.insert_one(of_php).await.expect("PHP stores an empty document as an empty array");
    let change = |set: Document| {
        let mut document = minimal_job("x");
        document.extend(set);
        document
    };
    let without = |field: &str| {
        let mut document = minimal_job("x");
        document.remove(field);
        document
    };
    for refused in [
        without("locked"),
        without("group"),
        without("priority"),
        without("scheduled_at"),
        without("workable"),
        change(doc! { "workable": {} }),
        change(doc! { "workable": "x" }),
        change(doc! { "workable": { "class": 1 } }),
        change(doc! { "locked": "no" }),
        change(doc! { "group": 1 }),
        change(doc! { "group": "" }),
        change(doc! { "priority": 12 }),
        change(doc! { "priority": "high" }),
        change(doc! { "scheduled_at": "tomorrow" }),
        change(doc! { "attempts": -1 }),
        change(doc! { "_id": "a word" }),
        change(doc! { "locked": true }),
        change(doc! { "locked": true, "last_execution": { "start": StartId::new() } }),
        change(doc! { "done": "no" }),
        change(doc! { "created_at": "2026" }),
        change(doc! { "scheduled_at": bson::DateTime::from_millis(-62_135_596_800_001) }),
        change(doc! { "scheduled_at": bson::DateTime::from_millis(253_402_300_800_000) }),
        change(doc! { "scheduled_at": bson::DateTime::from_millis(i64::MIN) }),
        change(doc! { "retry_policy": "RetryForever" }),
        change(doc! { "retry_policy": {} }),
        change(doc! { "retry_policy": { "class": 1 } }),
        change(doc! { "retry_policy": { "class": "RetryForever", "parameters": 60 } }),
        change(doc! { "tags": "a" }),
        change(doc! { "tags": [1] }),
        change(doc! { "urn": 7 }),
        change(doc! { "why": 7 }),
        change(doc! { "recovered_from": "a word" }),
        change(doc! { "keep": "nothing" }),
        change(doc! { "keep": true }),
        change(doc! { "gate": 5 }),
        change(doc! { "gate": "" }),
        change(doc! { "cancel_requested_at": true }),
        change(doc! { "attempts": 1.0 }),
        change(doc! { "attempts": 1_i64 << 31 }),
        change(doc! { "interruptions": "1" }),
        change(doc! { "deaths": -1 }),
        change(doc! { "executions_dropped": 0.5 }),
        change(doc! { "executions": {} }),
        change(doc! { "executions": [{ "pid": "17" }] }),
        change(doc! { "last_execution": [] }),
        change(doc! { "last_execution": { "ended_at": "2026" } }),
        change(doc! { "workable": { "class": "x", "items": {} } }),
        change(doc! { "workable": { "class": "x", "items": [] } }),
        change(doc! { "workable": { "class": "x", "items": vec![doc! {}; 1_001] } }),
        change(doc! { "item_outcomes": "done" }),
        change(doc! { "workable": { "class": "x", "items": [{}] }, "item_outcomes": [1] }),
        change(doc! { "workable": { "class": "x", "method": 3 } }),
        change(doc! { "workable": { "class": "x", "parameters": "now" } }),
        change(doc! { "workable": { "class": "x", "parameters": ["now"] } }),
        change(doc! { "workable": { "class": "x", "items": [{}, 1] } }),
        change(doc! { "retry_policy": { "class": "RetryForever", "parameters": [60] } }),
        change(doc! { "workable": { "class": "x", "parameters": { "data": "x".repeat(4 * 1024 * 1024) } } }),
    ] {
        let error = scheduled.insert_one(&refused).await.expect_err("refused");
        assert!(error.to_string().contains("121") || error.to_string().contains("validation"), "{error}");
    }
    // MongoDB's message names the problem first.
    for (refused, field, must_be) in [
        (change(doc! { "tags": 5 }), "tags", "an array of texts"),
        (change(doc! { "priority": 12 }), "priority", "an integer from 0 to 9"),
        (change(doc! { "scheduled_at": "tomorrow" }), "scheduled_at", "a date from the year 1 to the year 9999"),
    ] {
        let error = scheduled.insert_one(&refused).await.expect_err("refused");
        let mongodb::error::ErrorKind::Write(mongodb::error::WriteFailure::WriteError(error)) = *error.kind else { panic!("{error}") };
        let details = error.details.unwrap();
        let clauses = details.get_document("details").unwrap().get_array("clausesNotSatisfied").unwrap();
        let first = clauses[0].as_document().unwrap();
        assert_eq!(first.get_i32("index").unwrap(), 0);
        let first = first.to_string();
        assert!(first.contains(field) && first.contains(must_be) && !first.contains("locked"), "{first}");
    }
    // Documents older than the validator can still be moved on.
    insert_unvalidated(&database, vec![change(doc! { "attempts": 0, "tags": 5, "priority": 5, "colour": "blue", "urn": 5 })]).await;
}

/// The index had other keys in an earlier release.
#[tokio::test]
async fn an_outdated_index_is_replaced() {
    let database = TestDatabase::new().await;
    let keys = doc! { "group": 1, "priority": -1, "scheduled_at": 1, "workable.class": 1 };
    let only = doc! { "locked": false };
    let index = doc! { "key": keys, "name": "due_jobs", "partialFilterExpression": only };
    database.database().run_command(doc! { "createIndexes": "scheduled", "indexes": [index] }).await.unwrap();
    database.raw("metadata").insert_one(doc! { "_id": "schema", "version": 2 }).await.unwrap();
    store(&database).await;
    let keys = async || {
        let indexes: Vec<IndexModel> = database.raw("scheduled").list_indexes().await.unwrap().try_collect().await.unwrap();
        indexes.into_iter().map(|index| index.keys.keys().cloned().collect::<Vec<_>>()).collect::<Vec<_>>()
    };
    let gated = vec!["group", "workable.class", "gate", "priority", "scheduled_at", "_id", "locked"];
    let due = vec!["group", "workable.class", "priority", "scheduled_at", "_id", "locked", "gate"];
    assert_eq!(keys().await[..3], [vec!["_id"], due, gated]);
}

/// Also if another process was killed in the middle: it has made some collections, and has noted nothing.
#[tokio::test]
async fn processes_that_start_together_make_the_schema_once() {
    let database = TestDatabase::new().await;
    for _ in 0..3 {
        for name in ["metadata", "unique_periods", "limits", "signals"] {
            database.raw(name).drop().await.unwrap();
        }
        futures_util::future::join_all((0..6).map(|_| store(&database))).await;
    }
    let names = database.database().list_collection_names().await.unwrap();
    let sorted = |mut names: Vec<String>| {
        names.retain(|name| !name.starts_with("system"));
        names.sort();
        names.join(" ")
    };
    let expected = "archived audit groups limits metadata pauses roster scheduled schedulers signals signals_0 unique_periods";
    assert_eq!(sorted(names), expected);
    let indexes = async |collection: &str| sorted(database.raw(collection).list_index_names().await.unwrap());
    assert_eq!(indexes("scheduled").await, "_id_ due_jobs gated_jobs");
    assert_eq!(indexes("unique_periods").await, "_id_ expired_periods");
    assert_eq!(indexes("archived").await, "_id_ archived_by_end");
    let schema = database.raw("metadata").find_one(doc! { "_id": "schema" }).await.unwrap().unwrap();
    assert_eq!(schema.get("version"), Some(&Bson::Int32(19)));
}

#[tokio::test]
async fn unfinished_jobs_run_are_due_or_wait_for_others() {
    let (database, store) = prepared().await;
    let later = bson::DateTime::from_chrono(in_ms(&store, 3_600_000));
    let job = |class: &str, fields: Document| {
        let mut job = minimal_job(class);
        job.extend(fields);
        job
    };
    let other = JobId::new();
    insert_unvalidated(
        &database,
        vec![
            job("due", doc! {}),
            job("later", doc! { "scheduled_at": later }),
            job("runs", doc! { "scheduled_at": later, "locked": true }),
            job("waits", doc! { "scheduled_at": later, "waiting": true, "waits_for": [{ "job": other, "when": "done" }] }),
            job("waited", doc! { "waits_for": [{ "job": other, "when": "done" }] }),
        ],
    )
    .await;
    let found = store.unfinished_jobs(store.now()).await.unwrap();
    let found: Vec<_> = found.iter().map(|job| (job.class.as_str(), job.is_locked, job.waits_for.as_slice())).collect();
    assert_eq!(found, [("due", false, &[][..]), ("runs", true, &[]), ("waits", false, &[other]), ("waited", false, &[])]);
}

/// A command that the driver does not repeat, unlike reads.
#[tokio::test]
async fn the_clock_is_asked_again_when_the_connection_is_lost() {
    let database = TestDatabase::new().await;
    let (line, store) = store_behind_a_proxy(&database).await;
    let name = database.name().to_owned();
    // The driver asks `hello` of the database `admin`.
    let cut = line.arm(Action::Cut, 1..=1, move |request| request.command == "hello" && request.database == name);
    store.refresh_clock().await.unwrap();
    cut.fired().await;
}
