//! The clients for Python and Node over HTTP, against a real server that is restarted and whose answers get lost; and the commands of the
//! documentation.

use std::{
    fs,
    iter::repeat_n,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{Arc, Mutex},
    time::Duration,
};

use bson::{Document, doc, oid::ObjectId};
use recruiter_common::{NewJob, RetryManyTimes, shutdown::pause, store::Store};
use recruiter_tests::{
    http::Api,
    local::prepared,
    mongo::TestDatabase,
    mongosh::node,
    processes::{Process, Setup, System, can_run},
    wait::{SOON, wait_for, wait_until},
};
use serde_json::{Deserializer, Value, json};
use sha2::{Digest as _, Sha256};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::Barrier,
};

const TOKEN: &str = "the-secret-of-the-test";

/// `app URL TOKEN DIRECTORY MODE`, or `work GRACE LEASE` as the mode: a client, or a worker that notes each execution in the file `runs`.
const PYTHON: &str = r#"
import os, sys, time
from recruiter_jobs.http import *

url, token, directory, mode, *times = sys.argv[1:]
client = Client(url, token + "\n", patience=60)

def handle(parameters, job):
    with open(directory + "/runs", "a") as runs:
        runs.write(f"{job.class_name} {job.id} {job.attempt}\n")
    if job.class_name == "fails":
        if job.attempt == 1:
            job.checkpoint({"at": 3})
            raise ValueError("no line")
        return job.last_checkpoint
    if job.class_name == "gives-up":
        job.progress("much")
        raise GiveUp("no such address", "gone")
    if job.class_name == "long":
        job.progress(1, of=2, text="half")
        job.log("one")
        job.log("two")
        time.sleep(parameters["seconds"])
    while job.class_name == "waits":
        job.progress(50)
        job.check()
        time.sleep(0.05)
    while job.class_name == "gated" and not os.path.exists(directory + "/open"):
        time.sleep(0.02)
    return parameters

def refused(kind, act):
    try:
        act()
    except kind as error:
        assert token not in f"{error!r} {error} {client!r}"
        return error
    raise AssertionError(f"no {kind}")

def check():
    id = f"{7:024x}"
    assert client.enqueue("echo", {"n": 7}, id=id) == client.enqueue("echo", {"n": 8}, id=id) == id
    assert client.wait(id, 300) == {"n": 7}
    assert client.enqueue_many({"class": "echo", "parameters": {"n": n}} for n in range(1000)) == 1000
    wrong = refused(Problem, lambda: client.enqueue_many([{"class": "nobody"}] * 1001 + [{"class": 5}]))
    assert wrong.status == 422 and wrong.detail.startswith("job 1002: "), wrong
    again = {"class": "RetryManyTimes", "parameters": {"retry_how_many_times": 1, "seconds_to_wait_before_retry": 0}}
    assert client.wait(client.enqueue("fails", retry_policy=again), 300) == {"at": 3}
    assert client.wait(client.enqueue("long", {"seconds": 4}), 300) == {"seconds": 4}
    failed = refused(JobFailed, lambda: client.wait(client.enqueue("gives-up"), 300))
    assert (failed.why, failed.error_class, failed.message) == ("gave-up", "gone", "no such address"), failed
    waits = client.enqueue("waits")
    while "progress" not in client.job(waits):
        time.sleep(0.05)
    refused(TimeoutError, lambda: client.wait(waits, 1))
    client.cancel(waits)
    assert refused(JobFailed, lambda: client.wait(waits, 300)).why == "cancelled"
    refused(JobFailed, lambda: client.wait(client.retry(failed.id)["new_id"], 300))
    assert refused(Problem, lambda: Client(url, "another").job(id)).status == 401
    assert "does not answer" in refused(Unreachable, lambda: Client("http://127.0.0.1:2", token, patience=0.5).job(id)).detail
    assert "answers no JSON" in refused(Problem, lambda: Client(url + "/elsewhere", token).job(id)).detail
    refused(ValueError, lambda: Client(url, "two\nlines"))

def unanswered():
    id = client.enqueue("nobody")
    refused(TimeoutError, lambda: Client(url, token, patience=1).wait(id, 3))
    refused(Unreachable, lambda: client.cancel(id))
    refused(Unreachable, lambda: client.retry(id, again=True))
    client.cancel(client.job(id)["retried_as"]["$oid"])

if mode == "check":
    check()
elif mode == "enqueue":
    client.enqueue("nobody")
elif mode == "unanswered":
    unanswered()
else:
    grace, lease = map(float, times)
    client.work(["echo", "fails", "gives-up", "long", "waits", "gated"], handle, slots=4, lease=lease, wait=2, grace=grace)
"#;

const NODE: &str = r#"
import { appendFileSync, existsSync } from 'node:fs';
import { setTimeout as pause } from 'node:timers/promises';
import { inspect, isDeepStrictEqual } from 'node:util';
import { Client, GiveUp, JobFailed, Problem, TimedOut, Unreachable } from 'recruiter-jobs/http';

const [url, token, directory, mode, ...times] = process.argv.slice(2);
const client = new Client(url, `${token}\n`, { patience: 60 });

async function handle(parameters, job) {
  appendFileSync(`${directory}/runs`, `${job.className} ${job.id} ${job.attempt}\n`);
  if (job.className === 'fails') {
    if (job.attempt > 1) return job.lastCheckpoint;
    job.checkpoint({ at: 3 });
    throw new RangeError('no line');
  }
  if (job.className === 'gives-up') {
    job.progress('much');
    throw new GiveUp('no such address', { errorClass: 'gone' });
  }
  if (job.className === 'long') {
    job.progress(1, { of: 2, text: 'half' });
    job.log('one');
    job.log('two');
    await pause(parameters.seconds * 1000);
  }
  while (job.className === 'waits') {
    job.progress(50);
    await pause(50, undefined, { signal: job.signal });
  }
  while (job.className === 'gated' && !existsSync(`${directory}/open`)) await pause(20);
  return parameters;
}

function assert(is, said) {
  if (!is) throw new Error(`it is not: ${inspect(said)}`);
}

async function refused(kind, promise) {
  const error = await promise.then(() => undefined, (error) => error);
  assert(error instanceof kind && !inspect([error, client], { depth: 9, showHidden: true }).includes(token), error);
  return error;
}

async function check() {
  const same = async (promise, value) => assert(isDeepStrictEqual(await promise, value), await promise);
  const id = (7).toString(16).padStart(24, '0');
  for (const n of [7, 8]) await same(client.enqueue('echo', { n }, { id }), id);
  await same(client.wait(id, 300), { n: 7 });
  await same(client.enqueueMany(Array.from({ length: 1000 }, (_, n) => ({ class: 'echo', parameters: { n } }))), 1000);
  const wrong = await refused(Problem, client.enqueueMany([...Array(1001).fill({ class: 'nobody' }), { class: 5 }]));
  assert(wrong.status === 422 && wrong.detail.startsWith('job 1002: '), wrong);
  const retry_policy = { class: 'RetryManyTimes', parameters: { retry_how_many_times: 1, seconds_to_wait_before_retry: 0 } };
  await same(client.wait(await client.enqueue('fails', {}, { retry_policy }), 300), { at: 3 });
  await same(client.wait(await client.enqueue('long', { seconds: 4 }), 300), { seconds: 4 });
  const failed = await refused(JobFailed, client.wait(await client.enqueue('gives-up'), 300));
  assert(failed.why === 'gave-up' && failed.errorClass === 'gone' && failed.reason === 'no such address', failed);
  const waits = await client.enqueue('waits');
  while (!('progress' in (await client.job(waits)))) await pause(50);
  await refused(TimedOut, client.wait(waits, 1));
  await client.cancel(waits);
  assert((await refused(JobFailed, client.wait(waits, 300))).why === 'cancelled');
  await refused(JobFailed, client.wait((await client.retry(failed.id)).new_id, 300));
  assert((await refused(Problem, new Client(url, 'another').job(id))).status === 401);
  const unreachable = await refused(Unreachable, new Client('http://127.0.0.1:2', token, { patience: 0.5 }).job(id));
  assert(unreachable.detail.includes('does not answer: connect'), unreachable);
  assert((await refused(Problem, new Client(`${url}/elsewhere`, token).job(id))).detail.includes('answers no JSON'));
  await refused(TypeError, (async () => new Client(url, 'two\nlines'))());
}

async function unanswered() {
  const id = await client.enqueue('nobody');
  await refused(TimedOut, new Client(url, token, { patience: 1 }).wait(id, 3));
  await refused(Unreachable, client.cancel(id));
  await refused(Unreachable, client.retry(id, { again: true }));
  await client.cancel((await client.job(id)).retried_as.$oid);
}

const [grace, lease] = times.map(Number);
const classes = ['echo', 'fails', 'gives-up', 'long', 'waits', 'gated'];
if (mode === 'check') await check();
else if (mode === 'enqueue') await client.enqueue('nobody');
else if (mode === 'unanswered') await unanswered();
else await client.work(classes, handle, { slots: 4, lease, wait: 2, grace });
process.exit(0);
"#;

#[derive(Clone, Copy)]
enum Language {
    Python,
    Node,
}

/// A recruiter and a cleaner without a worker, a server, and a directory with the programs.
struct Scene {
    database: TestDatabase,
    store: Store,
    api: Api,
    language: Language,
    directory: TempDir,
    _system: System,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().unwrap()
}

/// A file with a token of an operator.
fn tokens(directory: &Path) -> String {
    let file = directory.join("tokens.toml");
    fs::write(&file, format!("[tokens.test]\nrole = \"operator\"\nsha256 = \"{}\"\n", hex::encode(Sha256::digest(TOKEN)))).unwrap();
    file.to_str().unwrap().to_owned()
}

impl Scene {
    async fn begin(language: Language) -> Self {
        let ((database, store), directory) = (prepared().await, tempfile::tempdir().unwrap());
        fs::write(directory.path().join("app.py"), PYTHON).unwrap();
        fs::write(directory.path().join("app.mjs"), NODE).unwrap();
        fs::create_dir(directory.path().join("node_modules")).unwrap();
        symlink(root().join("worker/clients/node"), directory.path().join("node_modules/recruiter-jobs")).unwrap();
        let cleaner = &["--every", "200ms"];
        let _system = System::start(&database, Setup { workers: 0, cleaner, ..Setup::default() });
        let api = Api::serve(&database, &["--tokens", &tokens(directory.path())]).await;
        Self { database, store, api, language, directory, _system }
    }

    fn path(&self, name: &str) -> String {
        self.directory.path().join(name).to_str().unwrap().to_owned()
    }

    fn app(&self, at: &str, mode: &str) -> Process {
        let (program, file) = match self.language {
            Language::Python => ("python3".into(), "app.py"),
            Language::Node => (node(), "app.mjs"),
        };
        let python = root().join("worker/clients/python");
        // Another test compares the files of the clients.
        let env = [("PYTHONPATH", python.to_str().unwrap()), ("PYTHONDONTWRITEBYTECODE", "1")];
        let (file, directory) = (self.path(file), self.path(""));
        let args = [program.to_str().unwrap(), &file, at, TOKEN, &directory].into_iter().chain(mode.split(' '));
        Process::start("/usr/bin/env", &args.collect::<Vec<_>>(), &env)
    }

    async fn enqueue(&self, class: &str, parameters: Document, retries: u32) -> ObjectId {
        let job = NewJob::of_class(class, parameters).retry(&RetryManyTimes::new(retries, Duration::ZERO).unwrap());
        job.enqueue(&self.store).await.unwrap().id.to_string().parse().unwrap()
    }

    /// The executions of this class, each with the job and the attempt.
    fn runs(&self, class: &str) -> Vec<String> {
        let runs = fs::read_to_string(self.path("runs")).unwrap_or_default();
        runs.lines().filter(|run| run.split(' ').next() == Some(class)).map(str::to_owned).collect()
    }

    async fn runs_times(&self, class: &str, times: usize) {
        wait_until(SOON, &format!("{class} runs"), async || self.runs(class).len() == times).await;
    }
}

/// Requests a stop, and checks that it ends cleanly.
async fn stop(app: Process) {
    app.terminate();
    succeeds(app).await;
}

async fn succeeds(mut app: Process) {
    let ended = app.wait_exit(SOON).await;
    assert_eq!(ended.code(), Some(0), "{}", app.stderr());
}

fn last(job: &Document) -> (&str, &str) {
    let last = job.get_document("last_execution").unwrap();
    (last.get_str("class").unwrap_or_default(), last.get_str("message").unwrap_or_default())
}

async fn jobs_are_enqueued_run_and_waited_for(language: Language) {
    let scene = Scene::begin(language).await;
    let worker = scene.app(&scene.api.at, "work 300 1.5");
    succeeds(scene.app(&scene.api.at, "check")).await;
    scene.database.until("archived", doc! { "workable.class": "echo", "why": "done" }, 1_001, "all are done").await;
    let counted = ["echo", "fails", "gives-up", "long", "waits"].map(|class| scene.runs(class).len());
    assert_eq!(counted, [1_001, 2, 2, 1, 1], "executions");
    let failed = scene.database.only("archived", doc! { "workable.class": "fails" }).await;
    let first = failed.get_array("executions").unwrap()[0].as_document().unwrap();
    assert!(["ValueError", "RangeError"].contains(&first.get_str("class").unwrap()), "{first}");
    assert!(first.get_str("message").unwrap() == "no line" && first.get_str("trace").unwrap().contains("handle"), "{first}");
    let long = scene.database.only("archived", doc! { "workable.class": "long" }).await;
    let lines = long.get_array("log").unwrap().iter().map(|line| line.as_document().unwrap().get_str("line").unwrap());
    assert_eq!((long.get_i32("attempts").unwrap(), lines.collect::<Vec<_>>()), (1, vec!["one", "two"]), "one lease would be over");
    assert_eq!(long.get_document("progress").unwrap().get_str("text").unwrap(), "half");
    let ignored = doc! { "workable.class": "gives-up", "log.line": { "$regex": "^ignored `progress`: " } };
    assert_eq!(scene.database.count("archived", ignored).await, 2);
    // What runs at a stop is finished.
    let id = scene.enqueue("long", doc! { "seconds": 2 }, 0).await;
    scene.runs_times("long", 2).await;
    stop(worker).await;
    assert_eq!(scene.database.archived(id).await.get_str("why").unwrap(), "done");
}

#[tokio::test(flavor = "multi_thread")]
async fn python_enqueues_runs_and_waits() {
    jobs_are_enqueued_run_and_waited_for(Language::Python).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn node_enqueues_runs_and_waits() {
    jobs_are_enqueued_run_and_waited_for(Language::Node).await;
}

/// What becomes of the answer to a request.
#[derive(Clone)]
enum Fate {
    /// Its connection breaks.
    Lost,
    Late(Duration),
    /// It is held until there are as many.
    Together(Arc<Barrier>),
}

/// The fates of the next answers, each to a request whose head has these words.
type Fates = Arc<Mutex<Vec<(&'static str, Fate)>>>;

/// A port in front of the server.
struct Line {
    at: String,
    fates: Fates,
}

impl Line {
    async fn to(server: &str) -> Self {
        let (listener, to) = (TcpListener::bind("127.0.0.1:0").await.unwrap(), server.strip_prefix("http://").unwrap().to_owned());
        let line = Self { at: format!("http://{}", listener.local_addr().unwrap()), fates: Fates::default() };
        let fates = line.fates.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (Ok(server), fates) = (TcpStream::connect(&to).await, fates.clone()) else { continue };
                tokio::spawn(forward(client, server, fates));
            }
        });
        line
    }

    fn harm(&self, requests: &'static str, count: usize, fate: &Fate) {
        self.fates.lock().unwrap().extend(repeat_n((requests, fate.clone()), count));
    }

    /// How many fates have not been met yet.
    fn left(&self) -> usize {
        self.fates.lock().unwrap().len()
    }
}

/// That of the answer to this request.
fn fate_of(request: &[u8], fates: &Fates) -> Option<Fate> {
    let (request, mut fates) = (String::from_utf8_lossy(request), fates.lock().unwrap());
    let met = fates.iter().position(|(words, _)| request.contains(words))?;
    Some(fates.remove(met).1)
}

async fn forward(mut client: TcpStream, mut server: TcpStream, fates: Fates) {
    let (mut asked, mut answered, mut fate) = ([0; 8192], [0; 8192], None);
    loop {
        tokio::select! {
            read = client.read(&mut asked) => {
                let Ok(length @ 1..) = read else { return };
                fate = fate.or_else(|| fate_of(&asked[..length], &fates));
                if server.write_all(&asked[..length]).await.is_err() {
                    return;
                }
            }
            read = server.read(&mut answered) => {
                let Ok(length @ 1..) = read else { return };
                match fate.take() {
                    None => {}
                    Some(Fate::Lost) => return,
                    Some(Fate::Late(by)) => pause(by).await,
                    Some(Fate::Together(all)) => {
                        all.wait().await;
                    }
                }
                if client.write_all(&answered[..length]).await.is_err() {
                    return;
                }
            }
        }
    }
}

async fn each_job_is_enqueued_and_ended_once(language: Language) {
    let scene = Scene::begin(language).await;
    let line = Line::to(&scene.api.at).await;
    line.harm("/jobs HTTP", 2, &Fate::Lost);
    succeeds(scene.app(&line.at, "enqueue")).await;
    assert_eq!((line.left(), scene.database.count("scheduled", doc! { "workable.class": "nobody" }).await), (0, 1));
    let worker = scene.app(&line.at, "work 300 60");
    let id = scene.enqueue("gated", doc! { "n": 1 }, 5).await;
    scene.runs_times("gated", 1).await;
    line.harm("/commit HTTP", 2, &Fate::Lost);
    fs::write(scene.path("open"), "").unwrap();
    let ended = scene.database.archived(id).await;
    stop(worker).await;
    assert_eq!((line.left(), scene.runs("gated").len(), ended.get_i32("attempts").unwrap()), (0, 1, 1), "{ended}");
    assert_eq!(ended.get_document("result").unwrap(), &doc! { "n": 1 });
}

#[tokio::test(flavor = "multi_thread")]
async fn python_repeats_what_had_no_answer() {
    each_job_is_enqueued_and_ended_once(Language::Python).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn node_repeats_what_had_no_answer() {
    each_job_is_enqueued_and_ended_once(Language::Node).await;
}

/// A wait is repeated that took longer than the patience of its client. What would be done twice is not.
async fn only_what_may_be_done_twice_is_repeated(language: Language) {
    let scene = Scene::begin(language).await;
    let line = Line::to(&scene.api.at).await;
    ["/end?", "/cancel HTTP", "/retry HTTP"].iter().for_each(|requests| line.harm(requests, 1, &Fate::Lost));
    succeeds(scene.app(&line.at, "unanswered")).await;
    let (waiting, archived) = (scene.database.count("scheduled", doc! {}).await, scene.database.count("archived", doc! {}).await);
    assert_eq!((line.left(), waiting, archived), (0, 0, 2), "the job, and the one that its only retry has enqueued");
}

#[tokio::test(flavor = "multi_thread")]
async fn python_repeats_only_what_may_be_done_twice() {
    only_what_may_be_done_twice_is_repeated(Language::Python).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn node_repeats_only_what_may_be_done_twice() {
    only_what_may_be_done_twice_is_repeated(Language::Node).await;
}

async fn a_lease_is_counted_from_its_request(language: Language) {
    let scene = Scene::begin(language).await;
    let line = Line::to(&scene.api.at).await;
    // One answer is slow, no other comes: when the server gives the job up, the client has done so.
    line.harm("/extend HTTP", 1, &Fate::Late(Duration::from_secs(1)));
    line.harm("/extend HTTP", 999, &Fate::Lost);
    let worker = scene.app(&line.at, "work 300 6");
    let id = scene.enqueue("gated", doc! {}, 0).await;
    assert_eq!(last(&scene.database.archived(id).await).0, "client-vanished");
    fs::write(scene.path("open"), "").unwrap();
    wait_until(SOON, "the end is dropped", async || worker.stderr().contains("its end is dropped")).await;
    assert!(worker.stderr().contains("its end is dropped: its lease is over"), "{}", worker.stderr());
    stop(worker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn python_counts_a_lease_from_its_request() {
    a_lease_is_counted_from_its_request(Language::Python).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn node_counts_a_lease_from_its_request() {
    a_lease_is_counted_from_its_request(Language::Node).await;
}

async fn an_end_whose_answer_does_not_come_is_sent_again_within_the_lease(language: Language) {
    let scene = Scene::begin(language).await;
    let line = Line::to(&scene.api.at).await;
    line.harm("/commit HTTP", 1, &Fate::Late(SOON));
    let mut worker = scene.app(&line.at, "work 300 30");
    fs::write(scene.path("open"), "").unwrap();
    let id = scene.enqueue("gated", doc! {}, 0).await;
    assert_eq!(scene.database.archived(id).await.get_str("why").unwrap(), "done");
    worker.terminate();
    assert_eq!(worker.wait_exit(SOON).await.code(), Some(0), "{}", worker.stderr());
    assert!(!worker.stderr().contains("its end is dropped"), "{}", worker.stderr());
}

async fn a_stop_waits_for_an_end_that_is_under_way(language: Language) {
    let scene = Scene::begin(language).await;
    let line = Line::to(&scene.api.at).await;
    line.harm("/commit HTTP", 9, &Fate::Late(SOON));
    let mut worker = scene.app(&line.at, "work 0 60");
    fs::write(scene.path("open"), "").unwrap();
    let id = scene.enqueue("gated", doc! {}, 0).await;
    scene.database.archived(id).await;
    worker.terminate();
    assert_eq!(worker.wait_exit(Duration::from_secs(60)).await.code(), Some(0), "{}", worker.stderr());
    assert!(worker.stderr().contains("its end is dropped: no answer has come in time"), "it is said: {}", worker.stderr());
}

async fn a_stop_rolls_all_jobs_back_at_once(language: Language) {
    let scene = Scene::begin(language).await;
    let line = Line::to(&scene.api.at).await;
    // No answer comes before there are four; then none comes at all.
    for (fate, waited) in [(Fate::Together(Arc::new(Barrier::new(4))), SOON), (Fate::Late(SOON), Duration::from_secs(60))] {
        line.harm("/rollback HTTP", 4, &fate);
        let mut worker = scene.app(&line.at, "work 0 60");
        let mut jobs = Vec::new();
        for _ in 0..4 {
            jobs.push(scene.enqueue("gated", doc! {}, 0).await);
        }
        scene.runs_times("gated", 4).await;
        worker.terminate();
        let ended = worker.wait_exit(waited).await;
        assert_eq!(ended.code(), Some(0), "{}", worker.stderr());
        assert!(matches!(fate, Fate::Late(_)) || !worker.stderr().contains("its end is dropped"), "{}", worker.stderr());
        for job in jobs {
            assert_eq!(last(&scene.database.archived(job).await).0, "worker-stopping");
        }
        fs::remove_file(scene.path("runs")).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn python_sends_an_end_again_within_the_lease() {
    an_end_whose_answer_does_not_come_is_sent_again_within_the_lease(Language::Python).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn node_sends_an_end_again_within_the_lease() {
    an_end_whose_answer_does_not_come_is_sent_again_within_the_lease(Language::Node).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn python_waits_at_a_stop_for_an_end_that_is_under_way() {
    a_stop_waits_for_an_end_that_is_under_way(Language::Python).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn node_waits_at_a_stop_for_an_end_that_is_under_way() {
    a_stop_waits_for_an_end_that_is_under_way(Language::Node).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn python_rolls_all_jobs_back_at_once() {
    a_stop_rolls_all_jobs_back_at_once(Language::Python).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn node_rolls_all_jobs_back_at_once() {
    a_stop_rolls_all_jobs_back_at_once(Language::Node).await;
}

async fn jobs_survive_restarts_of_both_sides(language: Language) {
    let mut scene = Scene::begin(language).await;
    let at = scene.api.at.clone();
    let (database, listen, file) = (scene.database.uri().to_owned(), at.replace("http://", ""), scene.path("tokens.toml"));
    let serve = || Process::start("recruiter", &["web", "--listen", &listen, "--tokens", &file], &[("MONGODB_URI", &database)]);
    let worker = scene.app(&at, "work 300 60");
    let id = scene.enqueue("gated", doc! { "n": 1 }, 5).await;
    scene.runs_times("gated", 1).await;
    // The server does not know the job any more: the first end is dropped.
    scene.api.process.kill();
    scene.api.process.wait_exit(SOON).await;
    fs::write(scene.path("open"), "").unwrap();
    scene.api.process = serve();
    let ended = scene.database.archived(id).await;
    assert_eq!((ended.get_str("why").unwrap(), scene.runs("gated").len()), ("done", 2), "{ended}");
    assert_eq!(ended.get_array("executions").unwrap()[0].as_document().unwrap().get_str("class").unwrap(), "worker-died");
    wait_until(SOON, "it says what it drops", async || worker.stderr().contains("its end is dropped")).await;
    stop(worker).await;
    // A worker that stops: one handler ends when it is told to, the other one does not.
    fs::remove_file(scene.path("open")).unwrap();
    fs::remove_file(scene.path("runs")).unwrap();
    let worker = scene.app(&at, "work 1 60");
    let told = scene.enqueue("waits", doc! {}, 0).await;
    let deaf = scene.enqueue("gated", doc! {}, 0).await;
    scene.runs_times("waits", 1).await;
    scene.runs_times("gated", 1).await;
    stop(worker).await;
    let told = scene.database.archived(told).await;
    assert!(["Cancelled", "AbortError"].contains(&last(&told).0), "{told}");
    assert_eq!(last(&scene.database.archived(deaf).await).0, "worker-stopping");
    assert_eq!((scene.runs("waits").len(), scene.runs("gated").len()), (1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn python_survives_restarts() {
    jobs_survive_restarts_of_both_sides(Language::Python).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn node_survives_restarts() {
    jobs_survive_restarts_of_both_sides(Language::Node).await;
}

/// Whether an answer has what the documentation shows. A text with `…` and a date stand for any other.
fn is_as_shown(shown: &Value, answered: &Value) -> bool {
    match (shown, answered) {
        (Value::Object(shown), Value::Object(answered)) => {
            shown.iter().all(|(field, value)| field == "$date" || answered.get(field).is_some_and(|answered| is_as_shown(value, answered)))
        }
        (Value::Array(shown), Value::Array(answered)) => {
            shown.len() == answered.len() && shown.iter().zip(answered).all(|(shown, answered)| is_as_shown(shown, answered))
        }
        (Value::String(shown), Value::String(answered)) => shown.ends_with('…') || shown == answered,
        (shown, answered) => shown == answered,
    }
}

fn values(text: &str) -> Vec<Value> {
    Deserializer::from_str(text).into_iter().map(|value| value.unwrap_or_else(|error| panic!("{error}: {text}"))).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_curl_commands_of_the_documentation_do_what_it_says() {
    if !can_run(&["curl", "--json", "{}", "--version"]) {
        return;
    }
    let ((database, _store), directory) = (prepared().await, tempfile::tempdir().unwrap());
    let _system = System::start(&database, Setup { workers: 0, ..Setup::default() });
    let api = Api::serve(&database, &["--anonymous", "client", "--tokens", &tokens(directory.path())]).await;
    let line = json!({ "class": "mail", "parameters": { "to": "ada@example.org" } });
    fs::write(directory.path().join("jobs.ndjson"), format!("{line}\n").repeat(1_000)).unwrap();
    let page = fs::read_to_string(root().join("docs/http.md")).unwrap();
    let mut blocks = page.split("\n```").map(|block| block.split_once('\n').unwrap_or((block, "")));
    let (mut known, mut streams, mut commands) = (Vec::<(&str, String)>::new(), Vec::new(), 0);
    while let Some((kind, block)) = blocks.next() {
        let after = blocks.clone().nth(1).filter(|(kind, _)| *kind == "json").map(|(_, block)| values(block));
        for command in block.lines().filter(|line| kind == "sh" && line.starts_with("curl ")) {
            commands += 1;
            let mut command = command.replace("http://127.0.0.1:7420", &api.at);
            known.iter().for_each(|(shown, real)| command = command.replace(shown, real));
            let mut curl = Command::new("sh");
            curl.current_dir(directory.path()).env("TOKEN", TOKEN).env("NO_PROXY", "127.0.0.1").stdin(Stdio::null());
            if command.contains("/events?") || command.contains("/messages?") {
                let file = directory.path().join(format!("stream-{commands}"));
                let curl = curl.args(["-c", &format!("exec {command}")]).stdout(fs::File::create(&file).unwrap()).spawn().unwrap();
                wait_until(SOON, "the stream begins", async || !fs::read(&file).unwrap().is_empty()).await;
                streams.push((curl, file));
                continue;
            }
            let output = curl.args(["-c", &format!("{command} --fail-with-body")]).output().unwrap();
            let answered = String::from_utf8(output.stdout).unwrap();
            assert!(output.status.success(), "{command}: {answered}");
            let answered = values(&answered);
            if let Some(job) = answered[0]["jobs"].get(0).filter(|job| job["reservation"].is_string()) {
                known =
                    [("8c0e…", "reservation"), ("65a1…", "id")].map(|(shown, field)| (shown, job[field].as_str().unwrap().into())).into();
            }
            if let Some(shown) = after.as_ref().filter(|_| block.lines().count() == 1) {
                assert_eq!(shown.len(), answered.len(), "{command}");
                assert!(shown.iter().zip(&answered).all(|(shown, answered)| is_as_shown(shown, answered)), "{command}: {answered:?}");
            }
        }
    }
    assert_eq!((commands, streams.len()), (10, 2), "of docs/http.md");
    // A worker of other classes comes: an event.
    api.post("/work/reserve", &json!({ "classes": ["other"], "wait": "1s" })).await;
    for ((mut curl, file), expected) in streams.into_iter().zip(["\"topic\":\"worker.", "\"order\":17"]) {
        let read = async || fs::read_to_string(&file).unwrap().contains(expected).then_some(());
        wait_for(SOON, expected, read).await;
        curl.kill().unwrap();
        curl.wait().unwrap();
    }
}
