//! Bundles: every item is executed, judged and recorded by itself, and what is recorded is not executed again, also if processes die.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::PathBuf,
    sync::{Arc, Mutex},
    time::Duration,
};

use bson::{Bson, Document, doc};
use recruiter_common::{
    EnqueueError, Failure, JobId, NewJob, WorkerId,
    ids::StartId,
    job::bundle::is_pending,
    store::{CommitSession, Progress, Recorded, Store},
};
use recruiter_tests::{
    factory::{again, insert_unvalidated, minimal_job, started},
    fail_points::FailPoint,
    local::{self, Local, ids, prepared, store},
    mongo::TestDatabase,
    oracle::number,
    processes::{Process, Setup, System, mentioning},
    promise,
    wait::{SOON, wait_until},
    workable,
};
use recruiter_worker::{BlockingExecutable, Context, Executable, NotDone, Worker};
use serde::{Deserialize, Serialize};
use tempfile::TempDir;
use tokio::sync::Semaphore;

/// The behaviour of one item.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum How {
    Succeed,
    Answer,
    Fail,
    /// Only in the first attempt.
    FailOnce,
    GiveUp,
    Panic,
    TakeTooLong,
    /// Is not possible yet in the first attempt.
    TryAgain,
    /// Ends when the test lets it, or when its cancellation.
    Wait,
}

#[derive(Clone, Serialize, Deserialize)]
struct Step {
    how: How,
}
workable!(Step -> Option<String>);

struct Notes {
    lines: Mutex<Vec<String>>,
    /// One permit for each item that may end.
    gate: Semaphore,
}

impl Default for Notes {
    fn default() -> Self {
        Self { lines: Mutex::default(), gate: Semaphore::new(0) }
    }
}

impl Notes {
    fn write(&self, what: &str, job: &Context) {
        self.lines.lock().unwrap().push(format!("{what} {}", job.item().unwrap().index));
    }

    /// Removes and returns the events so far.
    fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.lines.lock().unwrap())
    }

    fn count(&self) -> usize {
        self.lines.lock().unwrap().len()
    }
}

impl Executable for Step {
    type State = Notes;

    async fn execute(&self, notes: &Notes, job: &Context) -> Result<Option<String>, NotDone> {
        notes.write("enter", job);
        match self.how {
            How::Succeed => Ok(None),
            How::Answer => Ok(Some(format!("item {} of {}", job.item().unwrap().index, job.item().unwrap().of))),
            How::Fail => Err(NotDone::failed("broken", "as it was told")),
            How::FailOnce if job.retries() == 0 => Err(NotDone::failed("broken", "as it was told")),
            How::TryAgain if job.last_execution().is_none() => {
                Err(NotDone::Snooze { after: Some(Duration::from_millis(50)), reason: Failure::new("early", "not yet"), at_most: None })
            }
            How::FailOnce | How::TryAgain => Ok(None),
            How::GiveUp => Err(NotDone::GiveUp(Failure::new("hopeless", "for ever"))),
            How::Panic => panic!("as it was told"),
            How::TakeTooLong => std::future::pending().await,
            How::Wait => tokio::select! {
                permit = notes.gate.acquire() => {
                    permit.unwrap().forget();
                    Ok(None)
                }
                () = job.cancelled() => {
                    notes.write(if job.claim_lost() { "lost" } else { "stop" }, job);
                    Err(NotDone::Stopped(Failure::new("stopped", "as it was asked to")))
                }
            },
        }
    }

    fn time_limit(&self) -> Option<Duration> {
        (self.how == How::TakeTooLong).then_some(Duration::from_millis(50))
    }

    async fn after_success(&self, notes: &Notes, job: &Context) {
        notes.write("success", job);
    }

    async fn after_failure(&self, notes: &Notes, job: &Context, failure: &Failure) {
        notes.write(&format!("failure {}", failure.class), job);
        assert_ne!(self.how, How::GiveUp, "in a hook");
    }

    async fn after_last_failure(&self, notes: &Notes, job: &Context, failure: &Failure) {
        notes.write(&format!("last {}", failure.class), job);
    }
}

fn steps(how: &[How]) -> NewJob {
    NewJob::bundle(how.iter().map(|how| Step { how: *how }))
}

/// A recruiter, and a worker with this class.
struct Setting {
    database: TestDatabase,
    store: Store,
    notes: Arc<Notes>,
    recruiter: Local,
    worker: Local,
}

impl Setting {
    async fn new() -> Self {
        let ((database, store), notes) = (prepared().await, Arc::new(Notes::default()));
        let recruiter = Local::recruiter(&database, &[]);
        let worker = Self::worker(&database, &notes, &["--grace", "100ms"]);
        Self { database, store, notes, recruiter, worker }
    }

    fn worker(database: &TestDatabase, notes: &Arc<Notes>, flags: &[&str]) -> Local {
        let worker = Worker::new().register::<Step>(notes.clone()).unwrap().register_blocking::<Count>(()).unwrap();
        Local::worker(database, worker, flags)
    }

    async fn scheduled(&self, id: JobId) -> Document {
        self.database.raw("scheduled").find_one(doc! { "_id": id }).await.unwrap().unwrap()
    }

    async fn stop(self) {
        local::stop([self.worker, self.recruiter]).await;
    }
}

fn outcomes(job: &Document) -> Vec<Bson> {
    job.get_array("item_outcomes").unwrap().clone()
}

/// `done`, or the class of the failure, with its `why`.
fn summaries(job: &Document) -> Vec<String> {
    let summary = |outcome: &Bson| match outcome.as_document() {
        Some(outcome) if outcome.contains_key("class") => {
            format!("{} {}", outcome.get_str("class").unwrap(), outcome.get_str("why").unwrap_or("again"))
        }
        Some(outcome) => format!("done {}", outcome.get("result").unwrap()),
        None => outcome.as_str().unwrap_or("null").to_owned(),
    };
    outcomes(job).iter().map(summary).collect()
}

fn why(job: &Document) -> (&str, &str) {
    let message = job.get_document("last_execution").unwrap().get_str("message").unwrap_or_default();
    (job.get_str("why").unwrap(), message)
}

#[tokio::test]
async fn all_items_are_executed_once_in_order_and_recorded() {
    let setting = Setting::new().await;
    let id = steps(&[How::Succeed; 1_000]).in_group("many").tag("a").enqueue(&setting.store).await.unwrap().id;
    let job = setting.database.archived(id).await;
    assert_eq!(outcomes(&job), vec![Bson::from("done"); 1_000]);
    assert_eq!((why(&job), job.get_bool("done").unwrap()), (("done", ""), true));
    assert_eq!(job.get_document("workable").unwrap().get_array("items").unwrap().len(), 1_000, "it is archived whole");
    wait_until(SOON, "the hooks were called", async || setting.notes.count() == 2_000).await;
    let expected = |what: &str| (0..1_000).map(|index| format!("{what} {index}")).collect::<Vec<_>>();
    assert_eq!(setting.notes.take(), [expected("enter"), expected("success")].concat());
    let id = steps(&[How::Answer; 2]).enqueue(&setting.store).await.unwrap().id;
    assert_eq!(summaries(&setting.database.archived(id).await), [r#"done "item 0 of 2""#, r#"done "item 1 of 2""#]);
    setting.stop().await;
}

/// All of this test runs in one thread.
#[tokio::test(flavor = "current_thread")]
async fn items_that_wait_for_nothing_leave_others_a_turn() {
    let setting = Setting::new().await;
    let notes = setting.notes.clone();
    let other = tokio::spawn(async move {
        let mut turns = BTreeSet::new();
        while turns.last().is_none_or(|entered| *entered < 1_000) {
            turns.insert(notes.count());
            tokio::task::yield_now().await;
        }
        turns.range(1..1_000).count()
    });
    steps(&[How::Succeed; 1_000]).enqueue(&setting.store).await.unwrap();
    let turns = tokio::time::timeout(SOON, other).await.expect("the items are executed").unwrap();
    assert!(turns >= 3, "{turns} in the middle of the items");
    setting.stop().await;
}

/// A failed item does not affect the others: done items stay done, discarded ones do not run again, and the policy decides for each item.
#[tokio::test]
async fn each_item_fails_alone_and_is_tried_again_alone() {
    let setting = Setting::new().await;
    let how = [How::Succeed, How::Fail, How::Panic, How::GiveUp, How::FailOnce, How::TakeTooLong, How::Succeed];
    let id = steps(&how).retry(&again(1)).enqueue(&setting.store).await.unwrap().id;
    let job = setting.database.archived(id).await;
    let last = "tried-too-many-times";
    assert_eq!(
        summaries(&job),
        ["done", &format!("broken {last}"), &format!("panic {last}"), "hopeless gave-up", "done", &format!("timeout {last}"), "done"]
    );
    assert_eq!(why(&job), (last, "4 of 7 items failed, the first of them item 1: as it was told"));
    let earlier = job.get_array("executions").unwrap()[0].as_document().unwrap();
    assert_eq!(earlier.get_str("message").unwrap(), "5 of 7 items failed, the first of them item 1: as it was told");
    wait_until(SOON, "the hooks were called", async || setting.notes.count() == 7 + 7 + 4 + 8).await;
    let lines = setting.notes.take();
    let entered: Vec<&str> = lines.iter().filter_map(|line| line.strip_prefix("enter ")).collect();
    assert_eq!(entered, ["0", "1", "2", "3", "4", "5", "6", "1", "2", "4", "5"]);
    let hooks: Vec<&str> = lines.iter().filter(|line| !line.starts_with("enter")).map(String::as_str).collect();
    // A hook that panics stops no other.
    let first =
        "success 0, failure broken 1, failure panic 2, failure hopeless 3, last hopeless 3, failure broken 4, failure timeout 5, success 6";
    let second = "failure broken 1, last broken 1, failure panic 2, last panic 2, success 4, failure timeout 5, last timeout 5";
    assert_eq!(hooks.join(", "), [first, second].join(", "));
    setting.stop().await;
}

/// I5: not again is not again for each item; what merely came too early is neither failed nor forgotten beside one that failed.
#[tokio::test]
async fn an_item_that_comes_too_early_is_pending_for_the_next_run() {
    let setting = Setting::new().await;
    let id = steps(&[How::TryAgain, How::Fail, How::Succeed]).enqueue(&setting.store).await.unwrap().id;
    let job = setting.database.archived(id).await;
    assert_eq!(summaries(&job), ["done", "broken not-scheduled-by-retry-policy", "done"]);
    assert_eq!(job.get_i32("interruptions").unwrap(), 1, "it did not count: {job}");
    let entered: Vec<String> = setting.notes.take().into_iter().filter(|line| line.starts_with("enter")).collect();
    assert_eq!(entered, ["enter 0", "enter 1", "enter 2", "enter 0"]);
    let id = steps(&[How::GiveUp, How::Succeed]).enqueue(&setting.store).await.unwrap().id;
    assert_eq!(why(&setting.database.archived(id).await).0, "gave-up");
    setting.stop().await;
}

#[derive(Clone, Serialize, Deserialize)]
struct Count {
    n: u32,
}
workable!(Count -> u32);

impl BlockingExecutable for Count {
    type State = ();

    fn execute(&self, _state: &(), job: &Context) -> Result<u32, NotDone> {
        Ok(self.n + u32::try_from(job.item().unwrap().of).unwrap())
    }
}

#[tokio::test]
async fn items_may_block_and_one_that_cannot_be_decoded_fails_alone() {
    let setting = Setting::new().await;
    let id = NewJob::bundle_of_class("Count", [doc! { "n": 1 }, doc! { "n": "one" }, doc! {}, doc! { "n": 4 }]);
    let id = id.enqueue(&setting.store).await.unwrap().id;
    let job = setting.database.archived(id).await;
    let undecodable = "parameters not-scheduled-by-retry-policy";
    assert_eq!(summaries(&job), ["done 5", undecodable, undecodable, "done 8"]);
    assert!(why(&job).1.starts_with("2 of 4 items failed, the first of them item 1: the parameters cannot be decoded"), "{job}");
    setting.stop().await;
}

#[tokio::test]
async fn a_bundle_of_none_or_too_many_is_refused_and_a_foreign_one_ends_alone() {
    let setting = Setting::new().await;
    let refused = async |count: usize| steps(&vec![How::Succeed; count]).enqueue(&setting.store).await.unwrap_err();
    assert!(matches!(refused(0).await, EnqueueError::NoItems { .. }));
    assert!(matches!(refused(1_001).await, EnqueueError::TooManyItems { .. }));
    let foreign = |items: Bson| {
        let mut job = minimal_job("Step");
        job.insert("workable", doc! { "class": "Step", "items": items });
        job
    };
    let item = Bson::from(doc! { "how": "Succeed" });
    let jobs = [
        foreign(Bson::Array(vec![item.clone(); 1_001])),
        foreign("all".into()),
        foreign(Bson::Array(vec![])),
        foreign(Bson::Array(vec![item; 2])),
    ];
    let ids: Vec<JobId> = jobs.iter().map(|job| job.get_object_id("_id").unwrap().into()).collect();
    insert_unvalidated(&setting.database, jobs.to_vec()).await;
    setting.store.announce_jobs(["generic"]).await;
    for (id, expected) in ids.into_iter().zip(["malformed", "malformed", "malformed", "done"]) {
        assert_eq!(why(&setting.database.archived(id).await).0, expected);
    }
    setting.stop().await;
}

/// While MongoDB refuses writes, the items continue; their outcomes are recorded before the bundle ends.
#[tokio::test]
async fn progress_is_written_as_it_goes_and_waits_for_mongodb() {
    let setting = Setting::new().await;
    let id = steps(&[How::Wait, How::Wait, How::Wait, How::Wait]).enqueue(&setting.store).await.unwrap().id;
    wait_until(SOON, "the first item runs", async || setting.notes.count() == 1).await;
    setting.notes.gate.add_permits(1);
    let done = async |count: usize| {
        let job = setting.scheduled(id).await;
        outcomes(&job).iter().filter(|outcome| !is_pending(outcome)).count() == count
    };
    wait_until(SOON, "the first outcome is written", async || done(1).await).await;
    let fault = FailPoint::new("recruiter-worker", &["update"]).namespace(setting.database.name(), "scheduled").close_connection();
    let armed = fault.arm(setting.database.uri()).await;
    setting.notes.gate.add_permits(2);
    wait_until(SOON, "the items go on", async || setting.notes.count() == 4).await;
    wait_until(SOON, "writes fail", async || armed.struck().await >= 2).await;
    assert!(done(1).await);
    drop(armed);
    wait_until(SOON, "the outcomes are written", async || done(3).await).await;
    assert_eq!(summaries(&setting.scheduled(id).await), ["done", "done", "done", "null"]);
    setting.notes.gate.add_permits(1);
    assert_eq!(why(&setting.database.archived(id).await).0, "done");
    setting.stop().await;
}

/// I3: a worker without a valid lease enters no item, because another worker may be about to enter it.
#[tokio::test]
async fn no_item_is_entered_while_the_lease_is_over() {
    let (database, notes) = (TestDatabase::new().await, Arc::new(Notes::default()));
    let recruiter = Local::recruiter(&database, &[]);
    let worker = Setting::worker(&database, &notes, &["--heartbeat", "250ms", "--lease", "900ms"]);
    let store = store(&database).await;
    let id = steps(&[How::Wait, How::Succeed]).enqueue(&store).await.unwrap().id;
    wait_until(SOON, "the first item runs", async || notes.count() == 1).await;
    let fault = FailPoint::new("recruiter-worker-heartbeat", &["findAndModify"]).namespace(database.name(), "roster").error_code(1);
    let armed = fault.arm(database.uri()).await;
    // Half a second apart: the driver asks only once.
    wait_until(SOON, "the lease is over", async || armed.struck().await >= 3).await;
    notes.gate.add_permits(1);
    let recorded = |outcomes: Vec<Bson>| outcomes.first().is_some_and(|outcome| !is_pending(outcome));
    wait_until(SOON, "its outcome is written", async || raw_outcomes(&database, id).await.is_none_or(recorded)).await;
    assert_eq!(notes.take(), ["enter 0"]);
    drop(armed);
    assert_eq!(summaries(&database.archived(id).await), ["done", "done"]);
    local::stop([worker, recruiter]).await;
}

/// I3: a worker that finds its claim lost stops, and does not overwrite the records of the next start.
#[tokio::test]
async fn a_bundle_whose_claim_is_lost_stops_in_the_middle() {
    let setting = Setting::new().await;
    let id = steps(&[How::Wait; 5]).enqueue(&setting.store).await.unwrap().id;
    wait_until(SOON, "the first item runs", async || setting.notes.count() == 1).await;
    let other = doc! { "$set": { "last_execution.start": StartId::new(), "item_outcomes": [null, null, null, null, "done"] } };
    setting.database.raw("scheduled").update_one(doc! { "_id": id }, other).await.unwrap();
    let before = setting.scheduled(id).await;
    setting.notes.gate.add_permits(1);
    wait_until(SOON, "the second item is cancelled", async || setting.notes.count() == 3).await;
    assert_eq!(setting.notes.take(), ["enter 0", "enter 1", "lost 1"]);
    setting.worker.stop().await;
    assert_eq!(setting.notes.take(), [""; 0], "neither another item nor a hook");
    assert_eq!(setting.database.raw("scheduled").find_one(doc! { "_id": id }).await.unwrap().unwrap(), before);
    setting.recruiter.stop().await;
}

/// I9: an outcome that MongoDB refuses stops neither its bundle nor another.
#[tokio::test]
async fn an_outcome_that_mongodb_refuses_is_pending_to_the_end() {
    let (database, store) = prepared().await;
    let jobs = ids(store.enqueue_many([steps(&[How::Succeed]), steps(&[How::Succeed])]).await.unwrap());
    let held = started(&store, WorkerId::new(), &jobs).await;
    let deep = (0..250).fold(Bson::Null, |inner, _| Bson::Array(vec![inner]));
    let batch = [Progress::whole(held[0].1, &[deep]), Progress::whole(held[1].1, &["done".into()])];
    assert_eq!(store.finish(&mut CommitSession::default(), &batch).await.unwrap(), [Recorded::Yes; 2], "their claims hold");
    assert_eq!(raw_outcomes(&database, held[0].0.id).await.unwrap(), []);
    assert_eq!(raw_outcomes(&database, held[1].0.id).await.unwrap(), ["done".into()]);
}

#[tokio::test]
async fn a_cancelled_bundle_is_archived_with_what_it_has() {
    let setting = Setting::new().await;
    let id = steps(&[How::Succeed, How::Wait, How::Succeed]).enqueue(&setting.store).await.unwrap().id;
    wait_until(SOON, "the second item runs", async || setting.notes.count() == 2).await;
    assert_eq!(setting.store.request_cancel_if_started(&[id]).await.unwrap(), [id].into());
    setting.store.announce_hint(recruiter_common::store::Hint::Cancel { job: id }).await;
    let job = setting.database.archived(id).await;
    assert_eq!(summaries(&job), ["done", "cancelled cancelled", "null"]);
    assert_eq!(why(&job), ("cancelled", "1 of 3 items are still to be done"));
    setting.stop().await;
}

/// I5 and I8: a stop costs the item that it breaks off, if it may not be done again, and no other.
#[tokio::test]
async fn a_worker_that_stops_hands_the_rest_back_whatever_the_policy() {
    let setting = Setting::new().await;
    let how = [How::Fail, How::Succeed, How::Wait, How::Succeed];
    let never = steps(&how).enqueue(&setting.store).await.unwrap().id;
    wait_until(SOON, "it waits", async || setting.notes.count() == 3).await;
    setting.worker.stop().await;
    assert_eq!(setting.notes.take()[..4], ["enter 0", "enter 1", "enter 2", "stop 2"]);
    let job = setting.database.raw("scheduled").find_one(doc! { "_id": never }).await.unwrap().unwrap();
    let failed = "broken not-scheduled-by-retry-policy";
    assert_eq!(summaries(&job), [failed, "done", "interrupted interrupted", "null"]);
    let worker = Setting::worker(&setting.database, &setting.notes, &[]);
    let job = setting.database.archived(never).await;
    assert_eq!(summaries(&job), [failed, "done", "interrupted interrupted", "done"]);
    promise!((number(&job, "attempts"), number(&job, "interruptions")) == (2, 1), "an interruption counts: {job}");
    wait_until(SOON, "the hook was called", async || setting.notes.take().contains(&"success 3".to_owned())).await;
    local::stop([worker, setting.recruiter]).await;
}

/// Item at which a bundle of programs stays until it is let go. So a bundle does not end before a test has ended its worker.
const HELD: usize = 20;

/// Items that are programs, in real processes: each writes its number into a file, then takes its time.
struct Programs {
    directory: TempDir,
    config: PathBuf,
}

impl Programs {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let config = directory.path().join("workables.toml");
        let wait = format!(r#"while [ $RECRUITER_ITEM = {HELD} ] && [ -e "$0.held" ]; do sleep 0.05; done"#);
        let script = format!(r#"echo $RECRUITER_ITEM >> "$0"; {wait}; exec sleep $1"#);
        let command = format!("['/bin/sh', '-c', '{script}', '{{file}}', '{{seconds}}']");
        fs::write(&config, format!("[workables.note]\ncommand = {command}\n")).unwrap();
        fs::write(directory.path().join("entered.held"), "").unwrap();
        Self { directory, config }
    }

    fn let_go(&self) {
        fs::remove_file(self.directory.path().join("entered.held")).unwrap();
    }

    /// Waits for the last program of a worker that has ended: it may be about to write its number.
    async fn until_ended(&self) {
        let directory = self.directory.path().to_str().unwrap();
        wait_until(SOON, "its program has ended", async || mentioning(directory).is_empty()).await;
    }

    fn worker_arguments(&self) -> [&str; 4] {
        ["--config", self.config.to_str().unwrap(), "--grace", "1m"]
    }

    fn file(&self) -> PathBuf {
        self.directory.path().join("entered")
    }

    fn bundle(&self, items: i32, seconds: f64) -> NewJob {
        let file = self.file().to_str().unwrap().to_owned();
        NewJob::bundle_of_class("note", (0..items).map(|_| doc! { "file": &file, "seconds": seconds }))
    }

    /// The items as they were entered.
    fn lines(&self) -> Vec<usize> {
        let text = fs::read_to_string(self.file()).unwrap_or_default();
        text.lines().map(|line| line.parse().unwrap()).collect()
    }

    /// How often each item was entered.
    fn entered(&self) -> BTreeMap<usize, usize> {
        let mut times = BTreeMap::new();
        self.lines().into_iter().for_each(|item| *times.entry(item).or_default() += 1);
        times
    }
}

async fn raw_outcomes(database: &TestDatabase, id: JobId) -> Option<Vec<Bson>> {
    let job = database.raw("scheduled").find_one(doc! { "_id": id }).await.unwrap();
    job.map(|job| outcomes(&job))
}

fn count_recorded(outcomes: &[Bson]) -> usize {
    outcomes.iter().filter(|outcome| !is_pending(outcome)).count()
}

/// I5: without another run nothing is done twice after `kill -9`.
#[tokio::test]
async fn after_a_kill_what_is_recorded_is_not_done_again() {
    let ((database, store), programs) = (prepared().await, Programs::new());
    let mut system =
        System::start(&database, Setup { worker: &programs.worker_arguments(), cleaner: &["--every", "100ms"], ..Setup::default() });
    let id = programs.bundle(30, 0.02).enqueue(&store).await.unwrap().id;
    // While it stays at an item: then all before that are recorded.
    let recorded = async || count_recorded(&raw_outcomes(&database, id).await.unwrap_or_default());
    wait_until(SOON, "some are recorded", async || recorded().await >= HELD).await;
    system.workers[0].kill();
    system.workers[0].wait_exit(SOON).await;
    programs.let_go();
    programs.until_ended().await;
    let job = database.archived(id).await;
    assert_eq!(why(&job).0, "worker-died");
    let (entered, recorded) = (programs.entered(), count_recorded(&outcomes(&job)));
    assert!(recorded == HELD && entered.len() <= recorded + 1, "{recorded} of {} are recorded", entered.len());
    assert!(entered.values().all(|times| *times == 1), "{entered:?}");
    system.stop().await;
}

/// I5: kills and stops at random: an item recorded at the end of a run is not entered in a later run, and every item is done.
#[tokio::test]
async fn however_often_its_workers_end_a_bundle_goes_on_where_it_was() {
    const ITEMS: usize = 80;
    let ((database, store), programs) = (prepared().await, Programs::new());
    let mut system =
        System::start(&database, Setup { worker: &programs.worker_arguments(), cleaner: &["--every", "100ms"], ..Setup::default() });
    programs.let_go();
    let id = programs.bundle(80, 0.02).retry(&again(9)).enqueue(&store).await.unwrap().id;
    let (mut ends, mut entered_again) = (Vec::new(), 0);
    for _ in 0..8 {
        let goal = (programs.entered().len() + rand::random_range(3..12)).min(ITEMS);
        wait_until(SOON, "it goes on", async || programs.entered().len() >= goal).await;
        let worker = system.workers.last_mut().unwrap();
        let kill = ends.is_empty() || rand::random();
        ends.push(kill);
        if kill {
            worker.kill()
        } else {
            worker.terminate()
        }
        worker.wait_exit(SOON).await;
        programs.until_ended().await;
        database.until("scheduled", doc! { "_id": id, "locked": true }, 0, "it is handed back or rescued").await;
        let Some(outcomes) = raw_outcomes(&database, id).await else { break };
        let recorded: Vec<usize> =
            outcomes.iter().enumerate().filter(|(_, outcome)| !is_pending(outcome)).map(|(index, _)| index).collect();
        let before = programs.lines().len();
        promise!(recorded.iter().copied().eq(0..recorded.len()), "out of order: {recorded:?}");
        let lost = programs.entered().len() - recorded.len();
        promise!(kill || lost == 0, "a stop loses {lost} outcomes, {ends:?}");
        entered_again += lost;
        system.workers.push(Process::on(&database, "recruiter-worker", &programs.worker_arguments()));
        wait_until(SOON, "the next run has begun", async || programs.lines().len() > before || raw_outcomes(&database, id).await.is_none())
            .await;
        let next = programs.lines().get(before).copied();
        assert!(next.is_none_or(|next| next == recorded.len()), "{next:?} after {} were recorded, {ends:?}", recorded.len());
    }
    let job = database.archived(id).await;
    assert_eq!(why(&job).0, "done", "{ends:?}");
    assert!(outcomes(&job).iter().all(|outcome| !is_pending(outcome)) && outcomes(&job).len() == ITEMS);
    assert_eq!(programs.entered().len(), ITEMS);
    assert_eq!(programs.lines().len(), ITEMS + entered_again, "only items that were not recorded are entered again, after {ends:?}");
    system.stop().await;
}

/// I3: a worker that resumes after it was declared dead enters no further item, and the outcome of its current item is not recorded.
#[tokio::test]
async fn a_worker_that_is_frozen_past_its_death_leaves_its_bundle_to_the_next() {
    const ITEMS: i32 = 30;
    let ((database, store), programs) = (prepared().await, Programs::new());
    let impatient = [&programs.worker_arguments()[..], &["--heartbeat", "250ms", "--lease", "900ms"]].concat();
    let mut system = System::start(&database, Setup { worker: &impatient, ..Setup::default() });
    let id = programs.bundle(ITEMS, 0.02).retry(&again(1)).enqueue(&store).await.unwrap().id;
    wait_until(SOON, "it is in the middle", async || programs.entered().len() > HELD).await;
    system.workers[0].pause();
    // Not before: on a busy machine it might take a worker that runs for dead.
    system.cleaner = Process::on(&database, "recruiter-cleaner", &["--dead-after", "1500ms", "--every", "150ms"]);
    database.until("scheduled", doc! { "_id": id, "locked": false }, 1, "it is declared dead").await;
    system.cleaner = Process::on(&database, "recruiter-cleaner", &[]);
    let recorded = count_recorded(&raw_outcomes(&database, id).await.unwrap());
    let before = programs.entered();
    system.workers[0].resume();
    wait_until(SOON, "it knows", async || system.workers[0].stderr().contains("declared dead")).await;
    programs.let_go();
    let job = database.archived(id).await;
    assert_eq!((why(&job).0, job.get_array("executions").unwrap().len()), ("done", 2));
    assert!(recorded > 0 && outcomes(&job).iter().all(|outcome| !is_pending(outcome)));
    let entered = programs.entered();
    assert_eq!(entered.len(), usize::try_from(ITEMS).unwrap());
    for (item, times) in entered {
        assert_eq!(times, 1 + usize::from(item >= recorded && before.contains_key(&item)), "item {item} of which {recorded} were recorded");
    }
    system.stop().await;
}

/// I8, in real processes: TERM in the middle of a bundle.
#[tokio::test]
async fn a_bundle_survives_the_rolling_restart_of_its_workers() {
    const ITEMS: i32 = 30;
    let ((database, store), programs) = (prepared().await, Programs::new());
    let mut system = System::start(&database, Setup { worker: &programs.worker_arguments(), ..Setup::default() });
    let id = programs.bundle(ITEMS, 0.02).enqueue(&store).await.unwrap().id;
    wait_until(SOON, "it is in the middle", async || programs.entered().len() > HELD).await;
    system.workers[0].terminate();
    wait_until(SOON, "it drains", async || system.workers[0].stderr().contains("taking no more jobs")).await;
    programs.let_go();
    assert!(system.workers[0].wait_exit(SOON).await.success());
    let job = database.raw("scheduled").find_one(doc! { "_id": id }).await.unwrap().unwrap();
    assert!(!job.get_bool("locked").unwrap() && outcomes(&job).iter().any(is_pending), "{job}");
    system.workers.push(Process::on(&database, "recruiter-worker", &programs.worker_arguments()));
    let job = database.archived(id).await;
    let entered = programs.entered();
    assert!(entered.len() == usize::try_from(ITEMS).unwrap() && entered.values().all(|times| *times == 1), "{entered:?}");
    assert_eq!(why(&job).0, "done", "the present item ends, the next one is another worker's");
    system.stop().await;
}
