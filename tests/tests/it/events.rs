//! The events of a worker, and the hooks of its workables: which, how often, and when.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use bson::doc;
use recruiter_common::{Failure, JobId, NewJob, RetryManyTimes, Workable, store::Store};
use recruiter_tests::{
    local::{Local, prepared},
    wait::{SOON, wait_until},
    workable,
};
use recruiter_worker::{Context, Executable, NotDone, Worker, WorkerEvent};
use serde::{Deserialize, Serialize};

/// Events and hooks of one job each, in order.
#[derive(Clone, Debug, Default)]
struct Diary(Arc<Mutex<Vec<(JobId, &'static str)>>>);

impl Diary {
    fn write(&self, job: &Context, word: &'static str) {
        self.0.lock().unwrap().push((job.job_id(), word));
    }

    fn of(&self, job: JobId) -> Vec<&'static str> {
        self.0.lock().unwrap().iter().filter(|(of, _)| *of == job).map(|(_, word)| *word).collect()
    }

    fn listen(&self, event: &WorkerEvent<'_>) {
        let (job, word) = match event {
            WorkerEvent::Started { job } => (job, "started"),
            WorkerEvent::Done { job } => (job, "done"),
            WorkerEvent::Failed { job, last, .. } => (job, if *last { "failed at last" } else { "failed" }),
            WorkerEvent::Cancelled { job, .. } => (job, "cancelled"),
            WorkerEvent::Snoozed { job, .. } => (job, "snoozed"),
            WorkerEvent::Interrupted { job, .. } => (job, "interrupted"),
            WorkerEvent::Released { job, .. } => (job, "released"),
            WorkerEvent::ClaimLost { job } => (job, "claim lost"),
            _ => panic!("an event that is not known here: {event:?}"),
        };
        self.write(job, word);
    }
}

/// Ends in this way.
#[derive(Serialize, Deserialize)]
struct End {
    how: String,
}
workable!(End);

impl Executable for End {
    type State = Diary;

    async fn execute(&self, diary: &Diary, job: &Context) -> Result<(), NotDone> {
        match self.how.as_str() {
            "done" | "hangs after" => Ok(()),
            "fail" => Err(NotDone::failed("x", "as planned")),
            "snooze" => Err(NotDone::snooze(Duration::from_secs(3_600), "x", "as planned")),
            "release" if diary.of(job.job_id()).len() > 1 => Ok(()),
            "release" => Err(NotDone::NoResources(Failure::new("x", "as planned"))),
            _ => std::future::pending().await,
        }
    }

    async fn after_success(&self, diary: &Diary, job: &Context) {
        diary.write(job, "after success");
        if self.how == "hangs after" {
            std::future::pending::<()>().await;
        }
    }

    async fn after_failure(&self, diary: &Diary, job: &Context, _failure: &Failure) {
        diary.write(job, "after failure");
        assert_ne!(self.how, "fail", "a panic that this test wants");
    }

    async fn after_last_failure(&self, diary: &Diary, job: &Context, _failure: &Failure) {
        diary.write(job, "after last failure");
    }
}

fn worker(diary: &Diary) -> Worker {
    let listener = diary.clone();
    Worker::new().register::<End>(diary.clone()).unwrap().listen(move |event| listener.listen(event))
}

async fn enqueue(store: &Store, how: &str) -> JobId {
    let again = RetryManyTimes::new(3, Duration::from_secs(3_600)).unwrap();
    End { how: how.into() }.as_job().retry(&again).enqueue(store).await.unwrap().id
}

/// A snooze, a cancellation and an interruption are no failures, and no start is left without an end.
#[tokio::test]
async fn each_start_has_one_event_that_names_its_end_and_hooks_are_for_ends() {
    let ((database, store), diary) = (prepared().await, Diary::default());
    let [local, recruiter] = Local::pair(&database, &[], worker(&diary), &["--heartbeat", "300ms", "--lease", "10m", "--grace", "100ms"]);
    let ends = async |job: JobId, expected: &[&str]| {
        wait_until(SOON, &format!("{expected:?}"), async || diary.of(job).len() >= expected.len()).await;
        assert_eq!(diary.of(job), expected);
    };
    ends(enqueue(&store, "done").await, &["started", "done", "after success"]).await;
    ends(enqueue(&store, "fail").await, &["started", "failed", "after failure"]).await;
    let never = End { how: "fail".into() }.as_job().enqueue(&store).await.unwrap().id;
    ends(never, &["started", "failed at last", "after failure", "after last failure"]).await;
    ends(enqueue(&store, "snooze").await, &["started", "snoozed"]).await;
    ends(enqueue(&store, "release").await, &["started", "released", "started", "done", "after success"]).await;
    let cancelled = enqueue(&store, "wait").await;
    wait_until(SOON, "it runs", async || diary.of(cancelled) == ["started"]).await;
    assert_eq!(store.request_cancel_if_started(&[cancelled]).await.unwrap().len(), 1);
    ends(cancelled, &["started", "cancelled"]).await;
    let lost = enqueue(&store, "wait").await;
    wait_until(SOON, "it runs", async || diary.of(lost) == ["started"]).await;
    database.raw("roster").delete_one(doc! {}).await.unwrap();
    ends(lost, &["started", "claim lost"]).await;
    let interrupted = enqueue(&store, "wait").await;
    wait_until(SOON, "it runs", async || diary.of(interrupted) == ["started"]).await;
    local.stop().await;
    ends(interrupted, &["started", "interrupted"]).await;
    recruiter.stop().await;
}

/// The items of a bundle have hooks of their own, and a bundle has an event as a job has it.
#[tokio::test]
async fn a_bundle_that_is_snoozed_calls_the_hooks_of_the_items_that_have_ended() {
    let ((database, store), diary) = (prepared().await, Diary::default());
    let [local, recruiter] = Local::pair(&database, &[], worker(&diary), &[]);
    let bundle = NewJob::bundle(["done", "snooze", "done"].map(|how| End { how: how.into() })).enqueue(&store).await.unwrap().id;
    wait_until(SOON, "the hooks are called", async || diary.of(bundle).len() >= 4).await;
    local.stop().await;
    assert_eq!(diary.of(bundle), ["started", "snoozed", "after success", "after success"]);
    recruiter.stop().await;
}

/// The job is in the archive: there is nothing to rescue.
#[tokio::test]
async fn a_worker_that_stops_during_a_hook_leaves_the_roster() {
    let ((database, store), diary) = (prepared().await, Diary::default());
    let [local, recruiter] = Local::pair(&database, &[], worker(&diary), &["--grace", "100ms"]);
    let job = enqueue(&store, "hangs after").await;
    wait_until(SOON, "the hook is called", async || diary.of(job) == ["started", "done", "after success"]).await;
    local.stop().await;
    assert_eq!(database.count("roster", doc! {}).await, 0);
    recruiter.stop().await;
}
