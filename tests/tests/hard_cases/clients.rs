//! Workers by HTTP: clients that vanish, freeze, lose answers and commit twice, and a server that is killed.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use bson::{doc, oid::ObjectId};
use futures_util::future::join_all;
use recruiter_common::{JobId, shutdown::pause};
use recruiter_tests::{
    factory::again,
    full_length,
    http::Api,
    ledger::{Entry, Event, Ledger, Line, monotonic_ms},
    oracle::{Policy, number},
    promise,
    report::Row,
    wait::SOON,
    world::World,
};
use reqwest::Method;
use serde_json::{Value, json};

use crate::world;

/// What a client does with a job that it has.
#[derive(Clone, Copy)]
enum Conduct {
    /// Executes and commits it.
    Commit,
    /// Commits it twice, as after a lost answer.
    CommitTwice,
    /// Its connection is cut while it commits; it repeats that.
    Cut,
    /// It is killed.
    Vanish,
    /// It stands still until its lease is over, and commits then.
    Freeze,
}

const CONDUCTS: [Conduct; 5] = [Conduct::Commit, Conduct::CommitTwice, Conduct::Cut, Conduct::Vanish, Conduct::Freeze];

/// The clients of a server, which is another one after a kill.
struct Clients<'a> {
    world: &'a World,
    ledger: Ledger,
    server: Mutex<Arc<Api>>,
    begun: AtomicUsize,
    struck: AtomicUsize,
    /// How often a client did each of these.
    done: [AtomicUsize; CONDUCTS.len()],
}

impl Clients<'_> {
    fn server(&self) -> Arc<Api> {
        self.server.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The status and the answer; `None` without one.
    async fn send(server: &Api, path: &str, body: &Value) -> Option<(u16, Value)> {
        let answered = server.request(Method::POST, path).json(body).send().await.ok()?;
        Some((answered.status().as_u16(), answered.json().await.ok()?))
    }

    /// One client: until no job is left.
    async fn work(&self) {
        while self.world.unfinished().await > 0 {
            let number = self.begun.fetch_add(1, Ordering::Relaxed) % CONDUCTS.len();
            let conduct = CONDUCTS[number];
            let lease = if matches!(conduct, Conduct::Vanish | Conduct::Freeze) { "1s" } else { "60s" };
            let server = self.server();
            let wanted = json!({ "classes": ["entry"], "wait": "1s", "lease": lease });
            match Self::send(&server, "/work/reserve", &wanted).await {
                Some((200, answer)) => {
                    for reserved in answer["jobs"].as_array().into_iter().flatten() {
                        self.execute(&server, reserved, conduct).await;
                        self.done[number].fetch_add(1, Ordering::Relaxed);
                    }
                }
                Some(_) | None => pause(Duration::from_millis(100)).await,
            }
        }
    }

    async fn execute(&self, server: &Api, reserved: &Value, conduct: Conduct) {
        let job: JobId = reserved["id"].as_str().unwrap().parse().unwrap();
        let Some(start) = self.start(job, reserved["attempt"].as_i64().unwrap()).await else { return };
        let note = |event| {
            let (job, start) = (job.to_string(), start.to_hex());
            self.ledger.append(&Line { job, start, attempt: 0, worker: std::process::id(), event, at_ms: monotonic_ms() });
        };
        note(Event::Begin);
        let commit = format!("/work/{}/commit", reserved["reservation"].as_str().unwrap());
        let nothing = json!({});
        let send = || Self::send(server, &commit, &nothing);
        if !matches!(conduct, Conduct::Commit) {
            self.struck.fetch_add(1, Ordering::Relaxed);
        }
        match conduct {
            Conduct::Vanish => return,
            Conduct::Freeze => pause(Duration::from_secs(2)).await,
            Conduct::Commit | Conduct::CommitTwice | Conduct::Cut => {}
        }
        note(Event::Done);
        if matches!(conduct, Conduct::Cut) {
            // The request is sent or not, and nobody reads the answer.
            let _ = tokio::time::timeout(Duration::from_millis(1), send()).await;
        }
        let first = send().await;
        if matches!(conduct, Conduct::CommitTwice)
            && let Some((200, _)) = first
            && let Some((status, answer)) = send().await
        {
            promise!(status == 200 && answer["recorded"] == true, "a repeated commit: {status} {answer}");
        }
        if let (Conduct::Freeze, Some((status, answer))) = (conduct, first) {
            promise!([404, 410].contains(&status), "a commit after the lease: {status} {answer}");
        }
    }

    /// The start of this attempt, unless the job has been taken from its server already.
    async fn start(&self, job: JobId, attempt: i64) -> Option<ObjectId> {
        let stored = self.world.database.raw("scheduled").find_one(doc! { "_id": job, "locked": true }).await.unwrap()?;
        let execution = stored.get_document("last_execution").ok().filter(|_| number(&stored, "attempts") == attempt)?;
        execution.get_object_id("start").ok()
    }

    /// Kills the server when a third of the jobs has ended, and starts another one.
    async fn kill_server(&self, jobs: u64) -> Instant {
        crate::wait(self.world, "a third has ended", async || self.world.count("archived", doc! {}).await >= jobs / 3).await;
        let next = Arc::new(Api::serve(&self.world.database, &["--anonymous", "client"]).await);
        let killed = std::mem::replace(&mut *self.server.lock().unwrap_or_else(PoisonError::into_inner), next);
        killed.process.kill();
        self.struck.fetch_add(1, Ordering::Relaxed);
        Instant::now()
    }
}

/// What runs at most once begins once, what is repeated is repeated as often as its policy says, and no commit counts twice.
#[tokio::test(flavor = "multi_thread")]
async fn clients_that_vanish_freeze_and_repeat_lose_nothing_and_do_nothing_twice() {
    let mut row = Row::new("workers by HTTP are killed, frozen, cut and commit twice, and their server is killed (SIGKILL)");
    let jobs = if full_length() { 200 } else { 60 };
    let mut world = world().await;
    world.enqueue_many(jobs / 2, Policy::Never, |_| Entry::lasting(0)).await;
    world.enqueue_many(jobs / 2, Policy::Again(50), |_| Entry::lasting(0).retry(&again(50))).await;
    let server = Arc::new(Api::serve(&world.database, &["--anonymous", "client"]).await);
    let ledger = world.own_ledger();
    let (begun, struck, done) = Default::default();
    let clients = Clients { world: &world, ledger, server: Mutex::new(server), begun, struck, done };
    let (_, killed) = tokio::join!(join_all((0..8).map(|_| clients.work())), clients.kill_server(jobs as u64));
    assert!(clients.done.iter().all(|done| done.load(Ordering::Relaxed) > 0), "{:?}", clients.done);
    let (recovery, struck, server) = (killed.elapsed(), clients.struck.into_inner(), clients.server.into_inner().unwrap());
    let mut server = Arc::into_inner(server).unwrap();
    server.process.terminate();
    assert!(server.process.wait_exit(SOON).await.success(), "{}", server.process.stderr());
    row.add_run(world.judge().await, struck, Some(recovery));
    row.close();
}
