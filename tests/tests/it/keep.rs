//! Nothing is kept of a success: the job is deleted and counted. Every other end is archived.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use bson::doc;
use chrono::TimeDelta;
use recruiter_common::{
    Defaults, FinishReason, JobId, JobResult, Keep, NewJob, Workable, WorkerId,
    store::{Archival, CommitSession, Ending, Recorded, Store},
};
use recruiter_tests::{
    factory::{again, announcement, minimal_job, started},
    fail_points::FailPoint,
    local::{self, Local, ids, prepared, store},
    mongo::TestDatabase,
    promise,
    wait::{SOON, wait_until},
};
use recruiter_worker::{Context, Executable, NotDone, Worker};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::cli::recruiter;

/// The jobs that ended lately and of which nothing was kept.
async fn not_kept(store: &Store, group: &str) -> u64 {
    let counted = store.not_kept(store.now() - TimeDelta::minutes(10)).await.unwrap();
    counted.groups.get(group).copied().unwrap_or(0)
}

async fn until_counted(store: &Store, group: &str, jobs: u64) {
    wait_until(SOON, "they are deleted and counted", async || not_kept(store, group).await >= jobs).await;
    assert_eq!(not_kept(store, group).await, jobs);
}

/// Fails as often as it says.
#[derive(Serialize, Deserialize)]
struct Fleeting {
    failures: u32,
}

impl Workable for Fleeting {
    const CLASS: &'static str = "Fleeting";
    type Output = i64;

    fn defaults() -> Defaults {
        Defaults::default().keep(Keep::Failures)
    }
}

#[derive(Default)]
struct Counts {
    executions: AtomicU64,
    successes: AtomicU64,
}

impl Executable for Fleeting {
    type State = Arc<Counts>;

    async fn execute(&self, counts: &Arc<Counts>, job: &Context) -> Result<i64, NotDone> {
        counts.executions.fetch_add(1, Ordering::SeqCst);
        if job.retries() < self.failures { Err(NotDone::failed("broken", "as it was told")) } else { Ok(1) }
    }

    async fn after_success(&self, counts: &Arc<Counts>, _job: &Context) {
        counts.successes.fetch_add(1, Ordering::SeqCst);
    }
}

struct Setting {
    database: TestDatabase,
    store: Store,
    counts: Arc<Counts>,
    processes: [Local; 2],
}

impl Setting {
    async fn on(database: TestDatabase) -> Self {
        let (store, counts) = (store(&database).await, Arc::new(Counts::default()));
        let worker = Worker::new().register_builtins().unwrap().register::<Fleeting>(counts.clone()).unwrap();
        let processes = Local::pair(&database, &[], worker, &[]);
        Self { database, store, counts, processes }
    }

    async fn enqueue(&self, job: NewJob) -> JobId {
        job.enqueue(&self.store).await.unwrap().id
    }

    async fn stop(self) {
        local::stop(self.processes).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_success_leaves_nothing_and_is_counted_and_a_failure_is_archived() {
    let setting = Setting::on(TestDatabase::new().await).await;
    let (database, store) = (&setting.database, &setting.store);
    let succeeds = setting.enqueue(Fleeting { failures: 0 }.as_job()).await;
    // It is archived only if its last attempt fails, too.
    setting.enqueue(Fleeting { failures: 1 }.as_job().retry(&again(1))).await;
    let fails = setting.enqueue(Fleeting { failures: 9 }.as_job()).await;
    let kept = setting.enqueue(Fleeting { failures: 0 }.as_job().keep(Keep::All)).await;
    let mut of_another_language = minimal_job("noop");
    of_another_language.extend(doc! { "keep": "failures", "group": "others" });
    database.raw("scheduled").insert_one(of_another_language).await.unwrap();
    assert_eq!(recruiter(database, &["enqueue", "--class", "noop", "--keep", "failures", "--group", "others"]).code, 0);
    until_counted(store, "generic", 2).await;
    until_counted(store, "others", 2).await;
    assert_eq!(database.archived(kept).await.get_i64("result").unwrap(), 1);
    let failed = database.archived(fails).await;
    assert_eq!((failed.get_str("why").unwrap(), failed.get_str("keep").unwrap()), ("not-scheduled-by-retry-policy", "failures"));
    assert_eq!((database.count("scheduled", doc! {}).await, database.count("archived", doc! {}).await), (0, 2));

    assert_eq!(store.result_of::<Fleeting>(succeeds).await.unwrap(), JobResult::Unknown);
    let stats = &recruiter(database, &["stats", "--json"]).objects()[0];
    assert_eq!((&stats["total"]["not_kept"], &stats["total"]["done"], &stats["total"]["failed"]), (&json!(4), &json!(1), &json!(1)));
    assert!(recruiter(database, &["stats"]).out.contains("done and not kept: about 4 in the last "));

    // Its id is free: what is sent again late runs again.
    let executions = setting.counts.executions.load(Ordering::SeqCst);
    let again = Fleeting { failures: 0 }.as_job().with_id(succeeds).enqueue(store).await.unwrap();
    assert!(again.is_new);
    until_counted(store, "generic", 3).await;
    promise!(setting.counts.executions.load(Ordering::SeqCst) == executions + 1, "it ran more than once");

    // A dead letter that is retried is deleted once it has succeeded.
    assert_eq!(recruiter(database, &["jobs", "retry", &fails.to_string(), "--yes"]).code, 0);
    database.until("archived", doc! { "recovered_from": fails, "keep": "failures" }, 1, "it fails again").await;
    setting.stop().await;
}

#[tokio::test]
async fn a_bundle_leaves_nothing_if_every_item_has_succeeded() {
    let setting = Setting::on(TestDatabase::new().await).await;
    let bundle = |failures: &[u32]| NewJob::bundle(failures.iter().map(|failures| Fleeting { failures: *failures })).retry(&again(1));
    setting.enqueue(bundle(&[0, 1, 0])).await;
    until_counted(&setting.store, "generic", 1).await;
    let failed = setting.enqueue(bundle(&[0, 9])).await;
    let failed = setting.database.archived(failed).await;
    assert_eq!(failed.get_str("why").unwrap(), "tried-too-many-times");
    assert_eq!(failed.get_array("item_outcomes").unwrap()[0].as_document().map(|one| one.get_i64("result").unwrap()), Some(1));
    assert_eq!((setting.database.count("scheduled", doc! {}).await, setting.database.count("archived", doc! {}).await), (0, 1));
    assert_eq!(not_kept(&setting.store, "generic").await, 1);
    setting.stop().await;
}

/// I3: the deletion was made and its reply was lost, or it was not made and the worker cannot know; alone, and in one transaction with other ends. No
/// claim is taken for lost, and no job runs twice.
#[tokio::test]
async fn a_deletion_of_unknown_outcome_is_made_once_and_taken_for_no_lost_claim() {
    let setting = Setting::on(TestDatabase::of_its_own().await).await;
    let fault = |command: &str| FailPoint::new("recruiter-worker", &[command]);
    let on_deletes = || fault("delete").namespace(setting.database.name(), "scheduled");
    let faults = [
        ("deletions", on_deletes().times(1).write_concern_error(64)),
        ("deletions", on_deletes().times(2).write_concern_error(91)),
        ("deletions", on_deletes().times(1).close_connection()),
        ("transactions", fault("commitTransaction").times(3).write_concern_error(64)),
        ("transactions", fault("commitTransaction").times(2).close_connection()),
    ];
    const JOBS: u64 = 20;
    let mut jobs = 0;
    let transactions = async || {
        let status = setting.database.database().run_command(doc! { "serverStatus": 1 }).await.unwrap();
        status.get_document("transactions").unwrap().get_i64("totalStarted").unwrap()
    };
    let before = transactions().await;
    for (with, fault) in faults {
        assert!(with == "transactions" || transactions().await == before, "deletions alone need no transaction");
        let armed = fault.arm(setting.database.uri()).await;
        let others = if with == "transactions" { JOBS } else { 0 };
        let other = |_| Fleeting { failures: 0 }.as_job().keep(Keep::All).in_group("kept");
        let deleted = |_| Fleeting { failures: 0 }.as_job();
        setting.store.enqueue_many((0..JOBS).map(deleted).chain((0..others).map(other))).await.unwrap();
        jobs += JOBS + others;
        setting.database.until("scheduled", doc! {}, 0, "all are done").await;
        wait_until(SOON, "the fault has struck", async || armed.struck().await > 0).await;
    }
    // The hook follows only if the end was recorded.
    wait_until(SOON, "every success was recorded", async || setting.counts.successes.load(Ordering::SeqCst) == jobs).await;
    promise!(setting.counts.executions.load(Ordering::SeqCst) == jobs, "a job ran twice");
    until_counted(&setting.store, "generic", 5 * JOBS).await;
    assert_eq!(setting.database.count("archived", doc! {}).await, 2 * JOBS);
    setting.stop().await;
}

/// A transaction whose commit got no answer may be open, and keep its jobs locked: a deletion beside it would wait for its end.
#[tokio::test]
async fn a_deletion_does_not_wait_for_an_earlier_transaction_of_its_session() {
    let database = TestDatabase::of_its_own().await;
    database.limit_transactions(3_600).await;
    let store = store(&database).await;
    let worker = announcement(2);
    store.register(&worker).await.unwrap();
    let job = |keep| NewJob::of_class("x", doc! {}).keep(keep);
    let ids = ids(store.enqueue_many([job(Keep::All), job(Keep::Failures)]).await.unwrap());
    let held = started(&store, worker.id, &ids).await;
    let end = |id: JobId| {
        let (job, claim) = held.iter().find(|(job, _)| job.id == id).unwrap();
        let execution = job.last_execution.clone().unwrap().ended(store.now(), None);
        Archival::ended(job, *claim, Ending::new(execution, FinishReason::DONE))
    };
    let (mut session, ends) = (CommitSession::default(), [end(ids[0]), end(ids[1])]);
    let armed = FailPoint::new("test", &["commitTransaction", "abortTransaction"]).close_connection().arm(database.uri()).await;
    assert!(store.archive(&mut session, &ends).await.is_err());
    drop(armed);
    let deleted = tokio::time::timeout(SOON, store.archive(&mut session, &ends[1..])).await;
    assert_eq!(deleted.expect("it does not wait").unwrap(), [Recorded::Yes]);
    assert_eq!(store.archive(&mut session, &ends).await.unwrap(), [Recorded::Yes; 2]);
}

/// The caller's transaction deletes and counts the job, or does neither.
#[tokio::test]
async fn a_job_of_which_nothing_is_kept_ends_in_a_transaction_of_the_callers() {
    let (database, store) = prepared().await;
    let id = NewJob::of_class("x", doc! {}).keep(Keep::Failures).enqueue(&store).await.unwrap().id;
    let (job, claim) = started(&store, WorkerId::new(), &[id]).await.remove(0);
    let execution = job.last_execution.clone().unwrap().ended(store.now(), None);
    let end = Archival::ended(&job, claim, Ending::new(execution, FinishReason::DONE));
    let mut session = store.start_session().await.unwrap();
    for (commits, left) in [(false, 1), (true, 0)] {
        session.start_transaction().await.unwrap();
        assert_eq!(store.finish_in(&mut session, &end).await.unwrap(), Recorded::Yes);
        if commits {
            session.commit_transaction().await.unwrap()
        } else {
            session.abort_transaction().await.unwrap()
        }
        assert_eq!((database.count("scheduled", doc! {}).await, not_kept(&store, "generic").await), (left, 1 - left));
    }
    assert_eq!(database.count("archived", doc! {}).await, 0);
    session.start_transaction().await.unwrap();
    assert_eq!(store.finish_in(&mut session, &end).await.unwrap(), Recorded::ClaimLost);
    session.abort_transaction().await.unwrap();
}
