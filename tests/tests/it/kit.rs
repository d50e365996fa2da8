//! What surrounds workables in an application: layers, hooks of blocking workables, the test kit.

use std::{sync::Arc, time::Duration};

use bson::doc;
use recruiter_common::{JobFilter, NewJob, RetryManyTimes, Workable};
use recruiter_testing::{Drain, DrainError, Inline, InlineError, NotAlone, enqueued, run_inline};
use recruiter_tests::{
    diary::Diary,
    local::{self, Local, prepared},
    mongo::TestDatabase,
    wait::{SOON, wait_until},
    workable,
};
use recruiter_worker::{
    BlockingExecutable, Context, Executable, Failure, FinishReason, Layer, Next, NotDone, Priority, Ran, Success, Worker,
};
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Step {
    name: String,
    fails: u32,
}

fn step(name: &str, fails: u32) -> Step {
    Step { name: name.into(), fails }
}

impl Workable for Step {
    const CLASS: &'static str = "Step";
    type Output = String;

    fn defaults() -> recruiter_common::Defaults {
        recruiter_common::Defaults::default().retry(RetryManyTimes::new(2, Duration::from_secs(3_600)))
    }
}

impl Executable for Step {
    type State = Diary;

    async fn execute(&self, diary: &Diary, job: &Context) -> Result<String, NotDone> {
        diary.write(format!("{} {}", self.name, job.attempt()));
        if self.name == "next" {
            step("follower", 0).as_job().enqueue(job.client()).await?;
        }
        assert_ne!(self.name, "panic", "a panic that this test wants");
        if job.retries() < self.fails { Err(NotDone::failed("too-early", "not yet")) } else { Ok(self.name.to_uppercase()) }
    }

    async fn after_success(&self, diary: &Diary, _job: &Context) {
        diary.write("success");
    }

    async fn after_last_failure(&self, diary: &Diary, _job: &Context, failure: &Failure) {
        diary.write(format!("last failure {}", failure.class));
    }
}

#[derive(Clone, Serialize, Deserialize)]
struct Compute {
    fails: bool,
}
workable!(Compute);

impl BlockingExecutable for Compute {
    type State = Diary;

    fn execute(&self, diary: &Diary, _job: &Context) -> Result<(), NotDone> {
        diary.write("compute");
        if self.fails { Err(NotDone::failed("x", "y")) } else { Ok(()) }
    }

    const HAS_HOOKS: bool = true;

    fn after_success(&self, diary: &Diary, _job: &Context) {
        let thread = std::thread::current().name().map(str::to_owned).unwrap_or_default();
        diary.write(format!("success in a thread named {thread}"));
    }

    fn after_failure(&self, diary: &Diary, _job: &Context, failure: &Failure) {
        diary.write(format!("failure {}", failure.class));
    }

    fn after_last_failure(&self, diary: &Diary, _job: &Context, _failure: &Failure) {
        diary.write("last failure");
    }
}

struct Noted(&'static str, Arc<Diary>);

impl Layer for Noted {
    async fn around(&self, job: &Context, next: Next<'_>) -> Result<Success, NotDone> {
        self.1.write(format!("{} before {}", self.0, job.class()));
        if job.tags().iter().any(|tag| tag == self.0) {
            return Err(NotDone::give_up("Blocked", "this tag is blocked"));
        }
        let ended = next.run().await;
        let result = ended.as_ref().map(|success| success.result().is_some());
        self.1.write(format!("{} after {:?}", self.0, result.map_err(|not_done| not_done.failure().class.clone())));
        ended
    }
}

fn worker(diary: &Arc<Diary>) -> Worker {
    Worker::new().register::<Step>(diary.clone()).unwrap().register_blocking::<Compute>(diary.clone()).unwrap()
}

pub(super) async fn counts(database: &TestDatabase) -> [u64; 2] {
    let count = async |collection| database.count(collection, doc! {}).await;
    [count("scheduled").await, count("archived").await]
}

#[tokio::test]
async fn a_job_is_executed_inline_as_by_a_worker() {
    let diary = Arc::new(Diary::default());
    let worker = worker(&diary).layer(Noted("outer", diary.clone())).layer(Noted("inner", diary.clone()));
    let ran = run_inline(&worker, step("a", 0).as_job()).await.unwrap();
    assert_eq!(ran.result::<String>().as_deref(), Some("A"));
    let around = ["outer before Step", "inner before Step", "a 1", "inner after Ok(true)", "outer after Ok(true)", "success"];
    assert_eq!(diary.take(), around);

    let now = bson::DateTime::from_millis(1_000_000).to_chrono();
    let run = async |attempt, job: NewJob| Inline::new(&worker).now(now).attempt(attempt).run(job).await.unwrap();
    let again = Ran::Again { failure: Failure::new("too-early", "not yet"), at: now + Duration::from_secs(3_600), counts: true };
    assert_eq!(run(1, step("b", 9).as_job()).await, again);
    let last = run(3, step("b", 9).as_job()).await;
    assert!(matches!(last, Ran::Archived { why, .. } if why == FinishReason::TRIED_TOO_MANY_TIMES));
    assert_eq!(diary.take().last().map(String::as_str), Some("last failure too-early"));

    let blocked = run(1, step("c", 0).as_job().tag("inner")).await;
    assert!(matches!(&blocked, Ran::Archived { failure, .. } if failure.class == "Blocked"), "{blocked:?}");
    assert_eq!(diary.take(), ["outer before Step", "inner before Step", "outer after Err(\"Blocked\")", "last failure Blocked"]);
    let panicked = run(1, step("panic", 0).as_job()).await;
    assert!(matches!(&panicked, Ran::Again { failure, .. } if failure.class == "panic"), "{panicked:?}");

    diary.take();
    run(1, Compute { fails: false }.as_job()).await;
    assert!(diary.take().contains(&"success in a thread named Compute".to_owned()));
    run(1, Compute { fails: true }.as_job()).await;
    assert!(diary.take().ends_with(&["failure x".into(), "last failure".into()]));

    let refused = async |job: NewJob| run_inline(&worker, job).await.unwrap_err();
    assert!(matches!(refused(NewJob::of_class("Other", doc! {})).await, InlineError::NotAlone(NotAlone::UnknownClass(_))));
    assert!(matches!(refused(NewJob::bundle([step("a", 0)])).await, InlineError::NotAlone(NotAlone::Bundle)));
    assert!(matches!(refused(step("a", 0).as_job().in_group("")).await, InlineError::Invalid(_)));
    let undecodable = run_inline(&worker, NewJob::of_class("Step", doc! { "name": 5 })).await.unwrap();
    assert!(matches!(&undecodable, Ran::Archived { failure, .. } if failure.class == "parameters"), "{undecodable:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_running_worker_has_layers_and_blocking_hooks() {
    let ((database, store), diary) = (prepared().await, Arc::new(Diary::default()));
    let processes = Local::pair(&database, &[], worker(&diary).layer(Noted("layer", diary.clone())), &[]);
    let seen = async |expected: &[&str]| {
        let mut lines: Vec<String> = Vec::new();
        wait_until(SOON, &format!("{expected:?}"), async || {
            lines.extend(diary.take());
            lines == expected
        })
        .await;
    };
    step("a", 0).as_job().enqueue(&store).await.unwrap();
    seen(&["layer before Step", "a 1", "layer after Ok(true)", "success"]).await;
    Compute { fails: true }.as_job().enqueue(&store).await.unwrap();
    seen(&["layer before Compute", "compute", "layer after Err(\"x\")", "failure x", "last failure"]).await;
    NewJob::bundle([step("b", 0), step("c", 0)]).enqueue(&store).await.unwrap();
    let item = |name| ["layer before Step".to_owned(), format!("{name} 1"), "layer after Ok(true)".into()];
    let lines = [item("b").as_slice(), &item("c"), &["success".into(), "success".into()]].concat();
    seen(&lines.iter().map(String::as_str).collect::<Vec<_>>()).await;
    local::stop(processes).await;
}

#[tokio::test]
async fn what_is_due_is_drained_in_order_and_what_was_enqueued_is_listed() {
    let ((database, store), diary) = (prepared().await, Arc::new(Diary::default()));
    let worker = worker(&diary);
    step("low", 0).as_job().priority(Priority::new(0).unwrap()).enqueue(&store).await.unwrap();
    step("next", 0).as_job().in_group("first").priority(Priority::MAX).enqueue(&store).await.unwrap();
    step("fails", 1).as_job().tag("t").limit("printer").enqueue(&store).await.unwrap();
    step("later", 0).as_job().after(Duration::from_secs(1_800)).enqueue(&store).await.unwrap();
    NewJob::of_class("unknown", doc! {}).enqueue(&store).await.unwrap();
    let listed = enqueued::<Step>(&store, JobFilter::default().group("first")).await.unwrap();
    assert!(listed.len() == 1 && listed[0].workable == step("next", 0) && listed[0].job.settings.priority() == Priority::MAX);
    assert_eq!(enqueued::<Step>(&store, JobFilter::default()).await.unwrap().len(), 4);
    assert_eq!(enqueued::<Compute>(&store, JobFilter::default()).await.unwrap().len(), 0);

    let drained = Drain::new(&worker, &store).run().await.unwrap();
    assert_eq!(drained.iter().filter(|job| matches!(job.ran, Ran::Done { .. })).count(), 3, "{drained:?}");
    let entered = |lines: Vec<String>| lines.into_iter().filter(|line| line != "success").collect::<Vec<_>>();
    assert_eq!(entered(diary.take()), ["next 1", "fails 1", "follower 1", "low 1"]);
    assert_eq!(counts(&database).await, [3, 3]);
    assert_eq!(Drain::new(&worker, &store).run().await.unwrap(), []);
    // By the clock of the drain, the retry is an hour after its first attempt.
    let ahead = Drain::new(&worker, &store).ahead(Duration::from_secs(3_700)).run().await.unwrap();
    assert_eq!((ahead.len(), entered(diary.take())), (2, vec!["later 1".to_owned(), "fails 2".to_owned()]));
    let retried = database.raw("archived").find_one(doc! { "tags": "t" }).await.unwrap().unwrap();
    assert_eq!((retried.get_i32("attempts").unwrap(), retried.get_str("why").unwrap()), (2, "done"));
    assert_eq!(retried.get_array("executions").unwrap().len(), 2);
    NewJob::bundle([step("a", 0)]).enqueue(&store).await.unwrap();
    let refused = Drain::new(&worker, &store).run().await.unwrap_err();
    assert!(matches!(refused, DrainError::NotAlone { source: NotAlone::Bundle, .. }), "{refused:?}");
}

#[tokio::test]
async fn the_clock_of_a_drain_stands_at_an_instant() {
    let (database, store) = prepared().await;
    let worker = worker(&Arc::new(Diary::default()));
    let due = bson::DateTime::from_millis(4_000_000_000_000).to_chrono();
    step("fails", 1).as_job().at(due).enqueue(&store).await.unwrap();
    let at = async |instant| Drain::new(&worker, &store).at(instant).run().await.unwrap();
    let millisecond = Duration::from_millis(1);
    assert_eq!(at(due - millisecond).await, []);
    let drained = at(due + millisecond).await;
    let retry = due + millisecond + Duration::from_secs(3_600);
    assert!(matches!(&drained[..], [job] if matches!(job.ran, Ran::Again { at, .. } if at == retry)), "{drained:?}");
    assert_eq!(at(retry - millisecond).await, []);
    assert!(matches!(&at(retry).await[..], [job] if matches!(job.ran, Ran::Done { .. })));
    let archived = database.raw("archived").find_one(doc! {}).await.unwrap().unwrap();
    assert_eq!(archived.get_document("last_execution").unwrap().get_datetime("ended_at").unwrap().to_chrono(), retry);
}
