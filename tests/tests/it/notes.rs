//! Notes of a running job: its progress, its checkpoint and its log are visible while it runs, survive the death of its worker, and are
//! written by the start that holds the job, at most once per second.

use std::time::{Duration, Instant};

use bson::{Bson, Document, doc};
use recruiter_common::{JobId, NewJob, Workable, ids::StartId};
use recruiter_tests::{
    factory::again,
    local::{self, Local, prepared},
    mongo::TestDatabase,
    oracle::number,
    processes::{Process, Setup, System},
    wait::{SOON, wait_until},
    workable,
};
use recruiter_worker::{CheckpointError, Context, Executable, JobProgress, NotDone, Worker};
use serde::{Deserialize, Serialize};

async fn scheduled(database: &TestDatabase, job: JobId) -> Option<Document> {
    database.raw("scheduled").find_one(doc! { "_id": job }).await.unwrap()
}

fn lines(job: &Document) -> Vec<String> {
    let log = job.get_array("log").map(Vec::as_slice).unwrap_or_default();
    log.iter().map(|line| line.as_document().unwrap().get_str("line").unwrap().to_owned()).collect()
}

/// What a job of this test does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum How {
    /// Reports thousands of times in two and a half seconds or more.
    Chatter,
    /// Takes notes of each kind, and then fails in its first attempt.
    FailOnce,
    /// The same, and is snoozed.
    SnoozeOnce,
    /// The same, and fails.
    Fail,
    /// Saves a checkpoint that MongoDB refuses.
    SaveWhatIsRefused,
    /// Saves checkpoints until it is refused, and logs why.
    SaveUntilLost,
    /// Takes no notes.
    Nothing,
}

#[derive(Serialize, Deserialize)]
struct Noting {
    how: How,
}
workable!(Noting -> Option<i32>);

impl Executable for Noting {
    type State = tokio::sync::Semaphore;

    async fn execute(&self, lost: &Self::State, job: &Context) -> Result<Option<i32>, NotDone> {
        let before: Option<i32> = job.last_checkpoint()?;
        let first = job.last_execution().is_none();
        match self.how {
            How::Nothing => return Ok(None),
            How::Chatter => {
                let began = Instant::now();
                for n in 0.. {
                    if n > 1_000 && began.elapsed() >= Duration::from_millis(2_500) {
                        return Ok(Some(n));
                    }
                    job.progress(JobProgress::from(50).text(format!("call {n}")));
                    job.checkpoint(n)?;
                    job.log(format!("call {n}"));
                    tokio::task::yield_now().await;
                }
            }
            How::SaveWhatIsRefused => {
                let deep = (0..250).fold(Bson::Null, |inner, _| Bson::Array(vec![inner]));
                let refused = job.save_checkpoint(deep).await;
                return if refused == Err(CheckpointError::Refused) {
                    Ok(Some(1))
                } else {
                    Err(NotDone::failed("no", format!("{refused:?}")))
                };
            }
            How::SaveUntilLost => {
                for n in 0.. {
                    if let Err(error) = job.save_checkpoint(n).await {
                        assert_eq!((error, job.claim_lost()), (CheckpointError::ClaimLost, true));
                        lost.add_permits(1);
                        return Ok(None);
                    }
                }
            }
            How::FailOnce | How::SnoozeOnce | How::Fail => {}
        }
        job.progress((3, 10));
        job.checkpoint(job.retries().cast_signed() + 1)?;
        job.log(format!("retries {}, checkpoint {before:?}", job.retries()));
        match self.how {
            How::FailOnce if first => Err(NotDone::failed("broken", "as it was told")),
            How::SnoozeOnce if first => Err(NotDone::snooze(Duration::from_millis(50), "early", "not yet")),
            How::Fail => Err(NotDone::failed("broken", "as it was told")),
            How::FailOnce | How::SnoozeOnce | How::Chatter | How::SaveWhatIsRefused | How::SaveUntilLost | How::Nothing => Ok(before),
        }
    }
}

struct Setting {
    database: TestDatabase,
    store: recruiter_common::store::Store,
    lost: std::sync::Arc<tokio::sync::Semaphore>,
    processes: [Local; 2],
}

impl Setting {
    async fn new() -> Self {
        let (database, store) = prepared().await;
        let lost = std::sync::Arc::new(tokio::sync::Semaphore::new(0));
        let worker = Worker::new().register::<Noting>(lost.clone()).unwrap();
        let processes = Local::pair(&database, &[], worker, &[]);
        Self { database, store, lost, processes }
    }

    async fn enqueue(&self, how: How) -> JobId {
        Noting { how }.as_job().retry(&again(1)).enqueue(&self.store).await.unwrap().id
    }

    async fn run(&self, how: How) -> Document {
        self.database.archived(self.enqueue(how).await).await
    }

    async fn stop(self) {
        local::stop(self.processes).await;
    }
}

/// A checkpoint that was acknowledged survives `kill -9`: the next attempt continues there.
#[tokio::test]
async fn after_a_kill_the_next_attempt_continues_at_the_checkpoint() {
    const TO: i64 = 1_000_000;
    let (database, store) = prepared().await;
    let mut system = System::start(&database, Setup { cleaner: &["--every", "100ms"], ..Setup::default() });
    let job = NewJob::of_class("count", doc! { "to": TO, "ms": 40 }).retry(&again(1)).enqueue(&store).await.unwrap().id;
    let saved = async || scheduled(&database, job).await.map_or(0, |job| job.get("checkpoint").map_or(0, |_| number(&job, "checkpoint")));
    wait_until(SOON, "it has counted", async || saved().await >= 10).await;
    let running = scheduled(&database, job).await.unwrap();
    assert_eq!(running.get_document("progress").unwrap().get_i64("of").unwrap(), TO, "visible while it runs");
    system.workers[0].kill();
    system.workers[0].wait_exit(SOON).await;
    let ended = async || scheduled(&database, job).await.is_some_and(|job| !job.get_bool("locked").unwrap());
    wait_until(SOON, "it is rescued", ended).await;
    let saved = saved().await;
    assert!((10..TO).contains(&saved), "{saved}");
    let to = saved + 5;
    let sooner = doc! { "$set": { "workable.parameters.to": to } };
    database.raw("scheduled").update_one(doc! { "_id": job }, sooner).await.unwrap();
    system.workers.push(Process::on(&database, "recruiter-worker", &["--builtins"]));
    let done = database.archived(job).await;
    let result = done.get_document("result").unwrap();
    assert_eq!((done.get_str("why").unwrap(), number(result, "from"), number(result, "to")), ("done", saved, to), "{done}");
    assert_eq!(lines(&done), ["attempt 1 begins at 0".to_owned(), format!("attempt 2 begins at {saved}")]);
    assert_eq!(done.get_document("progress").unwrap().get("percent"), Some(&Bson::Double(100.0)));
    assert_eq!(done.get("checkpoint"), None, "a success needs none");
    system.stop().await;
}

/// A worker that was declared dead while it was frozen writes nothing over the notes of the next start.
#[tokio::test]
async fn a_checkpoint_of_a_lost_claim_is_refused() {
    let setting = Setting::new().await;
    let job = setting.enqueue(How::SaveUntilLost).await;
    let has_checkpoint = async || scheduled(&setting.database, job).await.is_some_and(|job| job.contains_key("checkpoint"));
    wait_until(SOON, "it has saved one", has_checkpoint).await;
    let other = doc! { "$set": { "last_execution.start": StartId::new(), "checkpoint": "of the next start" } };
    setting.database.raw("scheduled").update_one(doc! { "_id": job }, other).await.unwrap();
    tokio::time::timeout(SOON, setting.lost.acquire()).await.expect("the next save says that the claim is lost").unwrap().forget();
    assert_eq!(scheduled(&setting.database, job).await.unwrap().get("checkpoint"), Some(&"of the next start".into()));
    setting.stop().await;
}

#[tokio::test]
async fn notes_last_through_a_failure_and_a_snooze() {
    let setting = Setting::new().await;
    for (how, counted) in [(How::FailOnce, 1), (How::SnoozeOnce, 0)] {
        let done = setting.run(how).await;
        assert_eq!((done.get_str("why").unwrap(), done.get("result")), ("done", Some(&Bson::Int32(1))), "{done}");
        assert_eq!(lines(&done), ["retries 0, checkpoint None".to_owned(), format!("retries {counted}, checkpoint Some(1)")]);
        assert_eq!((done.get("checkpoint"), done.get_document("progress").unwrap().get("done")), (None, Some(&Bson::Int64(3))));
    }
    let failed = setting.run(How::Fail).await;
    assert_eq!((failed.get_str("why").unwrap(), number(&failed, "checkpoint")), ("tried-too-many-times", 2));
    setting.stop().await;
}

#[tokio::test]
async fn thousands_of_notes_are_a_few_writes_and_none_are_none() {
    let setting = Setting::new().await;
    setting.database.database().run_command(doc! { "profile": 2 }).await.unwrap();
    let done = setting.run(How::Chatter).await;
    let calls = done.get_i32("result").unwrap();
    assert_eq!(lines(&done).last(), Some(&format!("call {}", calls - 1)), "the end has the newest");
    assert_eq!(lines(&done).len(), 100);
    let writes = doc! { "op": "update", "command.u.$set.progress": { "$exists": true } };
    let writes = setting.database.count("system.profile", writes).await;
    let execution = done.get_document("last_execution").unwrap();
    let at = |field: &str| execution.get_datetime(field).unwrap().to_chrono();
    let took = (at("ended_at") - at("started_at")).num_seconds();
    assert!((1..=took + 2).contains(&i64::try_from(writes).unwrap()), "{writes} writes in {took} s");
    let silent = setting.run(How::Nothing).await;
    assert!(!["progress", "checkpoint", "log"].iter().any(|field| silent.contains_key(field)), "{silent}");
    setting.database.database().run_command(doc! { "profile": 0 }).await.unwrap();
    setting.stop().await;
}

#[tokio::test]
async fn a_checkpoint_that_mongodb_refuses_is_an_error_and_costs_the_job_nothing() {
    let setting = Setting::new().await;
    let done = setting.run(How::SaveWhatIsRefused).await;
    assert_eq!((done.get_str("why").unwrap(), done.get("result"), done.get("reduced")), ("done", Some(&Bson::Int32(1)), None), "{done}");
    setting.stop().await;
}
