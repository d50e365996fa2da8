//! Long-lived programs: processes that run one job after the other, by the clients for Python and Node and without them.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use bson::{Document, doc};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use recruiter_common::{JobId, NewJob, store::Store};
use recruiter_tests::{
    factory::again,
    local::store,
    mongo::TestDatabase,
    mongosh::node,
    oracle::number,
    processes::{Process, is_alive},
    promise,
    wait::{SOON, wait_for, wait_until},
};
use tempfile::TempDir;

/// Handlers of every kind, by the client for Python.
const PYTHON: &str = r#"
import asyncio, datetime, decimal, os, subprocess, sys, threading, time
from recruiter_jobs import Cancelled, Failed, GiveUp, Snooze, job, run

print("noise before run()")
HALF = "caf\udce9"
circular = []
circular.append(circular)

@job("echo")
def echo(parameters, job):
    print("noise on standard output")
    subprocess.run(["sh", "-c", "cat; echo noise of a child"], check=True)
    threads = [threading.Thread(target=job.log, args=("x" * 900,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"parameters": parameters, "pid": os.getpid(), "attempt": job.attempt, "group": job.group}

@job("fails")
def fails(parameters, job):
    job.progress(job.attempt, of=4, text="page")
    job.log(f"attempt {job.attempt} after {job.last_checkpoint}")
    if job.attempt == 1:
        job.checkpoint({"row": 17})
        raise Failed("no answer", "SmtpDown", retry_after=0.05)
    return job.last_checkpoint

@job("raises")
def raises(parameters, job):
    return parameters["absent"]

@job("gives-up")
def gives_up(parameters, job):
    raise GiveUp("no such customer", "NoCustomer")

@job("snoozes")
def snoozes(parameters, job):
    if job.attempt == 1:
        raise Snooze(0.05, "too early")

@job("times")
def times(parameters, job):
    if parameters.get("late"):
        raise Snooze(time.time() * 1000)
    refused = []
    for nan in [float("nan"), decimal.Decimal("NaN")]:
        for call in [Snooze, job.extend, lambda after: Failed("", retry_after=after), lambda after: GiveUp("", retry_after=after)]:
            try:
                call(nan)
            except ValueError as error:
                refused.append(str(error))
    job.extend(-5)
    if job.attempt == 1:
        raise Snooze(-0.5)
    if job.attempt == 2:
        raise Failed("at once", retry_after=-1)
    return refused

@job("odd")
def odd(parameters, job):
    job.log(5)
    job.log(HALF)
    job.progress(2.7, of=10, text=HALF)
    job.progress("most")
    job.checkpoint({1})
    job.extend("long")
    return {"pid": os.getpid(), "half": HALF}

@job("gives-up-oddly")
def gives_up_oddly(parameters, job):
    raise GiveUp(HALF, error_class=5, retry_after="soon")

@job("no-json")
def no_json(parameters, job):
    deep = lambda levels: [deep(levels - 1)] if levels else []
    return {
        "nan": lambda: float("nan"), "function": lambda: print, "set": lambda: {1}, "bytes": lambda: b"", "decimal": lambda: decimal.Decimal(1),
        "circular": lambda: circular, "deep": lambda: deep(200), "long": lambda: "x" * 3_000_000, "date": datetime.datetime.now,
    }[parameters["kind"]]()

@job("values")
async def values(parameters, job):
    await asyncio.sleep(0)
    n, at = parameters["n"], parameters["at"]
    return {"n": n, "at": at, "text": f"{n} {at.year}"}

@job("dies")
def dies(parameters, job):
    print("out of cheese", file=sys.stderr, flush=True)
    os._exit(3)

@job("waits")
def waits(parameters, job):
    job.progress(50)
    while True:
        try:
            job.check()
        except Exception:
            pass
        time.sleep(0.01)

@job("deaf")
def deaf(parameters, job):
    job.checkpoint(subprocess.Popen(["setsid", "sleep", "600"]).pid)
    job.progress(50)
    time.sleep(600)

run()
"#;

/// The same for Node, as far as it differs.
const NODE: &str = r"
const { Failed, GiveUp, Snooze, job, run } = require('recruiter-jobs');
const { spawnSync } = require('node:child_process');
const fs = require('node:fs');

console.log('noise before run()');
const HALF = 'caf\udce9';

job('echo', async (parameters, job) => {
  console.log('noise on standard output');
  process.stdout.write('more of it\n');
  fs.writeSync(1, 'more of it\n');
  spawnSync('sh', ['-c', 'cat; echo noise of a child'], { stdio: 'inherit' });
  setInterval(() => {}, 1000);
  return { parameters, pid: process.pid, attempt: job.attempt, group: job.group };
});
job('fails', async (parameters, job) => {
  job.progress(job.attempt, { of: 4, text: 'page' });
  job.log(`attempt ${job.attempt} after ${JSON.stringify(job.lastCheckpoint)}`);
  if (job.attempt === 1) {
    job.checkpoint({ row: 17 });
    throw new Failed('no answer', { errorClass: 'SmtpDown', retryAfter: 0.05 });
  }
  return job.lastCheckpoint;
});
job('gives-up', () => { throw new GiveUp('no such customer', { errorClass: 'NoCustomer' }); });
job('snoozes', (parameters, job) => { if (job.attempt === 1) throw new Snooze(0.05); });
job('raises', () => undefined.absent);
job('times', ({ late }, job) => {
  if (late) throw new Snooze(Date.now());
  const refused = [];
  const failures = [Failed, GiveUp].map((failure) => (retryAfter) => new failure('', { retryAfter }));
  for (const call of [(after) => new Snooze(after), (after) => job.extend(after), ...failures]) {
    for (const nan of [NaN, Number('x')]) {
      try {
        call(nan);
      } catch (error) {
        refused.push(error.message);
      }
    }
  }
  job.extend(-5);
  if (job.attempt === 1) throw new Snooze(-0.5);
  if (job.attempt === 2) throw new Failed('at once', { retryAfter: -1 });
  return refused;
});
job('odd', (parameters, job) => {
  job.log(5);
  job.log(HALF);
  job.progress(2.7, { of: 10, text: HALF });
  job.progress('most');
  job.checkpoint(() => 1);
  job.extend('long');
  return { pid: process.pid, half: HALF };
});
job('gives-up-oddly', () => { throw new GiveUp(HALF, { errorClass: 5, retryAfter: 'soon' }); });
job('no-json', ({ kind }) => {
  const deep = (levels) => (levels ? [deep(levels - 1)] : []);
  const circular = {};
  circular.circular = circular;
  const kinds = { nan: [NaN], function: () => 1, symbol: Symbol('x'), set: new Set([1]), bigint: 2n ** 70n, circular, date: new Date(NaN) };
  return { ...kinds, deep: deep(200), long: 'x'.repeat(3_000_000) }[kind];
});
job('values', async ({ n, at }) => ({ n, at, text: `${n} ${at.getUTCFullYear()}` }));
job('dies', () => new Promise(() => setTimeout(() => { throw new Error('out of cheese'); })));
job('waits', (parameters, job) => new Promise((_, reject) => {
  job.progress(50);
  job.signal.addEventListener('abort', () => reject(job.signal.reason));
}));
run();
";

/// A program without a client: it does what the parameters say.
const RAW: &str = r#"
import json, os, subprocess, sys, time
for line in sys.stdin:
    job = json.loads(line)
    what = job["parameters"]["do"]
    say = lambda more: print(json.dumps({"id": job["id"], **more}), flush=True)
    daemon = None
    if job["parameters"].get("daemon"):
        nowhere = subprocess.DEVNULL
        daemon = subprocess.Popen(["sleep", "600"], start_new_session=True, stdin=nowhere, stdout=nowhere, stderr=nowhere).pid
        say({"checkpoint": daemon})
    if what == "garbage":
        print("Traceback (most recent call last):", flush=True)
    elif what == "endless":
        while True: sys.stdout.write("x" * 65536)
    elif what == "not-utf8":
        os.write(1, b"\xff\xfe\n")
    elif what == "close":
        os.close(1)
    elif what == "orphan":
        child = subprocess.Popen(["sleep", "600"])
        say({"checkpoint": child.pid})
        os._exit(3)
    elif what == "leave":
        say({"result": daemon or os.getpid()})
        sys.exit(0)
    elif what == "crash":
        os.abort()
    elif what == "stay":
        say({"result": {"pid": os.getpid(), "daemon": daemon}})
        continue
    elif what == "other-id":
        print(json.dumps({"id": job["id"] + 1, "result": "wrong"}), flush=True)
        say({"result": "right"})
        continue
    elif what == "odd-messages":
        say({"progress": {}, "checkpoint": {"$oid": 5}, "extend_ms": 10**15, "unknown": [1]})
        say({"error": {}})
        continue
    time.sleep(600)
"#;

/// The classes of both.
const CLASSES: [&str; 12] =
    ["echo", "fails", "raises", "gives-up", "snoozes", "times", "waits", "dies", "odd", "gives-up-oddly", "no-json", "values"];

/// The latest date, the end of the year 9999.
pub(super) const LATEST_MS: i64 = 253_402_300_799_999;

struct Setting {
    database: TestDatabase,
    store: Store,
    directory: TempDir,
    _recruiter: Process,
}

impl Setting {
    async fn new() -> Self {
        let (database, directory) = (TestDatabase::new().await, tempfile::tempdir().unwrap());
        let _recruiter = Process::on(&database, "recruiter", &["run"]);
        Self { store: store(&database).await, database, directory, _recruiter }
    }

    fn clients() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../worker/clients").canonicalize().unwrap()
    }

    /// A worker with these classes of a program.
    fn worker(&self, command: &str, text: &str, file: &str, classes: &[&str], more: &str, flags: &[&str]) -> Process {
        fs::write(self.directory.path().join(file), text).unwrap();
        let python = Self::clients().join("python");
        // Another test compares the files of the clients.
        let env = format!("PYTHONPATH = '{}', PYTHONDONTWRITEBYTECODE = '1'", python.display());
        let tables = classes.iter().map(|class| {
            format!("[workables.{class}]\ncommand = [\"{command}\", \"{file}\"]\nmode = \"long-lived\"\n{more}\nenv = {{ {env} }}\n")
        });
        let config = self.directory.path().join("workables.toml");
        fs::write(&config, tables.collect::<String>()).unwrap();
        let flags = [&["--config", config.to_str().unwrap()], flags].concat();
        Process::on(&self.database, "recruiter-worker", &flags)
    }

    fn python(&self, classes: &[&str], more: &str, flags: &[&str]) -> Process {
        self.worker("python3", PYTHON, "app.py", classes, more, flags)
    }

    async fn enqueue(&self, class: &str, parameters: Document) -> JobId {
        NewJob::of_class(class, parameters).retry(&again(1)).enqueue(&self.store).await.unwrap().id
    }

    async fn run(&self, class: &str, parameters: Document) -> Document {
        self.database.archived(self.enqueue(class, parameters).await).await
    }

    /// Waits until the job reports that it runs, and cancels it.
    async fn cancel(&self, job: JobId) -> Document {
        self.database.until("scheduled", doc! { "_id": job, "progress.percent": 50.0 }, 1, "it runs").await;
        let cancelled = Process::on(&self.database, "recruiter", &["jobs", "cancel", "--yes", &job.to_string()]);
        let ended = self.database.archived(job).await;
        drop(cancelled);
        ended
    }
}

fn end_of(job: &Document) -> (&str, &str, &str) {
    let last = job.get_document("last_execution").unwrap();
    (job.get_str("why").unwrap(), last.get_str("class").unwrap_or_default(), last.get_str("message").unwrap_or_default())
}

fn pid(job: &Document) -> u32 {
    u32::try_from(number(job.get_document("result").unwrap(), "pid")).unwrap()
}

/// What the clients for both languages do in the same way.
async fn the_client_does_what_its_documentation_says(setting: &Setting) {
    let done = setting.run("echo", doc! { "text": "é\n\"\u{2028}", "list": [1, { "x": 2.5 }] }).await;
    let result = done.get_document("result").unwrap();
    assert_eq!(result.get_document("parameters").unwrap(), &doc! { "text": "é\n\"\u{2028}", "list": [1, { "x": 2.5 }] });
    assert_eq!((number(result, "attempt"), result.get_str("group").unwrap()), (1, "generic"));
    let failed = setting.run("fails", doc! {}).await;
    assert_eq!(failed.get_document("result").unwrap(), &doc! { "row": 17 }, "the checkpoint of the first attempt: {failed}");
    let first = failed.get_array("executions").unwrap()[0].as_document().unwrap();
    assert_eq!((first.get_str("class").unwrap(), first.get_str("message").unwrap()), ("SmtpDown", "no answer"));
    let progress = failed.get_document("progress").unwrap();
    assert_eq!((number(progress, "done"), number(progress, "of"), progress.get_str("text").unwrap()), (2, 4, "page"));
    assert_eq!(failed.get_array("log").unwrap().len(), 2);
    assert_eq!(end_of(&setting.run("gives-up", doc! {}).await), ("gave-up", "NoCustomer", "no such customer"));
    let snoozed = setting.run("snoozes", doc! {}).await;
    assert_eq!((snoozed.get_str("why").unwrap(), number(&snoozed, "interruptions")), ("done", 1));
    times_are_as_documented(setting).await;
    let raised = setting.run("raises", doc! {}).await;
    assert_eq!(raised.get_str("why").unwrap(), "tried-too-many-times");
    let last = raised.get_document("last_execution").unwrap();
    assert!(["KeyError", "TypeError"].contains(&last.get_str("class").unwrap()), "{last}");
    assert!(last.get_str("trace").unwrap().contains("app."), "{last}");
    let waits = setting.enqueue("waits", doc! {}).await;
    assert_eq!(end_of(&setting.cancel(waits).await).0, "cancelled");
    // The worker writes the fraction of a second as `.67`.
    let at = bson::DateTime::from_millis(1_767_323_045_670);
    let values = setting.run("values", doc! { "n": 1_234_567_890_123_456_789_i64, "at": at }).await;
    let result = values.get_document("result").unwrap();
    assert_eq!(result, &doc! { "n": 1_234_567_890_123_456_789_i64, "at": at, "text": "1234567890123456789 2026" });
    wrong_values_cost_nothing(setting).await;
    let died = setting.run("dies", doc! {}).await;
    assert_eq!(end_of(&died).0, "tried-too-many-times");
    assert!(end_of(&died).2.ends_with("out of cheese"), "{died}");
    assert_eq!(setting.run("echo", doc! {}).await.get_str("why").unwrap(), "done", "in another process");
}

/// NaN is an error of the call, below zero is zero, and beyond the latest date is the latest date.
async fn times_are_as_documented(setting: &Setting) {
    let late = setting.enqueue("times", doc! { "late": true }).await;
    let times = setting.run("times", doc! {}).await;
    assert_eq!((times.get_str("why").unwrap(), number(&times, "interruptions"), number(&times, "attempts")), ("done", 1, 3), "{times}");
    let refused = times.get_array("result").unwrap();
    assert!(refused.len() == 8 && refused.iter().all(|said| said.as_str().unwrap().contains("NaN")), "{times}");
    assert!(!times.contains_key("log"), "nothing was ignored: {times}");
    let waits = doc! { "_id": late, "locked": false, "interruptions": 1 };
    let waits = async || setting.database.raw("scheduled").find_one(waits.clone()).await.unwrap();
    let waits: Document = wait_for(SOON, "it waits", waits).await;
    assert_eq!(waits.get_datetime("scheduled_at").unwrap().timestamp_millis(), LATEST_MS);
}

/// Neither the process nor an attempt.
async fn wrong_values_cost_nothing(setting: &Setting) {
    let odd = setting.run("odd", doc! {}).await;
    assert_eq!((odd.get_str("why").unwrap(), number(&odd, "attempts")), ("done", 1), "{odd}");
    assert_eq!(odd.get_document("result").unwrap().get_str("half").unwrap(), "caf\u{fffd}");
    let progress = odd.get_document("progress").unwrap();
    assert_eq!((number(progress, "done"), progress.get_str("text").unwrap()), (2, "caf\u{fffd}"));
    let log: Vec<&str> = odd.get_array("log").unwrap().iter().map(|line| line.as_document().unwrap().get_str("line").unwrap()).collect();
    assert_eq!(log[..2], ["5", "caf\u{fffd}"]);
    for (line, field) in log[2..].iter().zip(["progress", "checkpoint", "extend_ms"]) {
        assert!(line.starts_with(&format!("ignored `{field}`: ")), "{log:?}");
    }
    assert_eq!(log.len(), 5, "{log:?}");
    let oddly = setting.run("gives-up-oddly", doc! {}).await;
    assert_eq!((end_of(&oddly), number(&oddly, "attempts")), (("gave-up", "5", "caf\u{fffd}"), 1));
    for kind in ["nan", "function", "set", "circular", "deep", "long", "date"] {
        let ended = setting.run("no-json", doc! { "kind": kind }).await;
        let (why, class, message) = end_of(&ended);
        assert_eq!((why, class, number(&ended, "attempts")), ("gave-up", "result", 1), "{kind}: {message}");
        assert!(message.starts_with("the result cannot be stored: "), "{kind}: {message}");
    }
    assert_eq!(pid(&setting.run("odd", doc! {}).await), pid(&odd), "the same process");
}

#[tokio::test]
async fn the_python_client_does_what_its_documentation_says() {
    let setting = Setting::new().await;
    let worker = setting.python(&CLASSES, "", &[]);
    the_client_does_what_its_documentation_says(&setting).await;
    for kind in ["bytes", "decimal"] {
        assert_eq!(end_of(&setting.run("no-json", doc! { "kind": kind }).await).1, "result", "{kind}");
    }
    drop(worker);
}

#[tokio::test]
async fn the_node_client_does_what_its_documentation_says() {
    let setting = Setting::new().await;
    let modules = setting.directory.path().join("node_modules");
    fs::create_dir(&modules).unwrap();
    std::os::unix::fs::symlink(Setting::clients().join("node"), modules.join("recruiter-jobs")).unwrap();
    let client = fs::read_to_string(Setting::clients().join("node/index.js")).unwrap();
    assert!(!client.contains("readline"), "for which U+2028 in a text ends a line in some releases of Node");
    let worker = setting.worker(node().to_str().unwrap(), NODE, "app.js", &CLASSES, "", &[]);
    the_client_does_what_its_documentation_says(&setting).await;
    for kind in ["symbol", "bigint"] {
        assert_eq!(end_of(&setting.run("no-json", doc! { "kind": kind }).await).1, "result", "{kind}");
    }
    drop(worker);
}

#[test]
fn a_client_that_is_used_wrongly_says_what_to_do() {
    let clients = Setting::clients();
    let said = |language: &str, script: &str, variable: (&str, &str)| {
        let (program, flag) = if language == "python" { ("python3".into(), "-c") } else { (node(), "-e") };
        let mut command = Command::new(program);
        command.args([flag, script]).current_dir(clients.join(language)).env("PYTHONDONTWRITEBYTECODE", "1");
        let output = command.env(variable.0, variable.1).output().unwrap();
        String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
    };
    let (by_hand, as_program, by_worker) = (("A", "b"), ("RECRUITER_JOB_CLASS", "resize"), ("RECRUITER_LONG_LIVED", "1"));
    for (language, script, variable, expected) in [
        ("python", "import recruiter_jobs as r; r.run()", by_hand, "`recruiter-worker --config FILE`"),
        ("node", "require('.').run()", by_hand, "`recruiter-worker --config FILE`"),
        ("python", "import recruiter_jobs as r; r.run()", as_program, "add `mode = \"long-lived\"` to [workables.resize]"),
        ("node", "require('.').run()", as_program, "add `mode = \"long-lived\"` to [workables.resize]"),
        ("python", "import recruiter_jobs", by_worker, "ended before it called `run()`"),
        ("node", "require('.')", by_worker, "ended before it called `run()`"),
        ("python", "import recruiter_jobs as r\n@r.job\ndef f(p, j): pass", by_hand, "write `@job(\"resize\")`"),
        ("node", "require('.').job(() => 1)", by_hand, "needs the class of its jobs first"),
        ("python", "import recruiter_jobs as r\n@r.job('a')\ndef f(p, j): yield", by_hand, "is a generator, which would not run"),
        ("node", "require('.').job('a', async function* () {})", by_hand, "is a generator, which would not run"),
    ] {
        let said = said(language, script, variable);
        assert!(said.contains(expected), "{language}: {script}: {said}");
    }
    let crash = said("python", "import recruiter_jobs; 1 / 0", by_worker);
    assert!(crash.ends_with("ZeroDivisionError: division by zero\n"), "{crash}");
    let tested = said(
        "python",
        "from recruiter_jobs import Job; j = Job.for_tests(checkpoint=7); j.progress(j.last_checkpoint); print(j.reported)",
        by_hand,
    );
    assert_eq!(tested, "[{'progress': {'percent': 7}}]\n");
    let dates = "from recruiter_jobs import _decoded, _iso
for text in ['05Z', '05.6Z', '05.67Z', '05.678Z', '05.123456789+01:00']:
    text = '2026-01-02T03:04:' + text
    assert len(_iso(text)) == (25 if text.endswith(':05Z') else 32), _iso(text)
    print(_decoded({'$date': text}).isoformat()[17:])
print(_iso('.6Z'), [_decoded({'$date': odd}) for odd in [None, [], 'x.6']])";
    let read = "05+00:00\n05.600000+00:00\n05.670000+00:00\n05.678000+00:00\n05.123456+00:00\n";
    let odd = "[{'$date': None}, {'$date': []}, {'$date': 'x.6'}]";
    assert_eq!(said("python", dates, by_hand), format!("{read}.600000+00:00 {odd}\n"));
    let tested = said(
        "node",
        "const j = require('.').Job.forTests({ lastCheckpoint: 7 }); j.progress(j.lastCheckpoint); console.log(JSON.stringify(j.reported))",
        by_hand,
    );
    assert_eq!(tested, "[{\"progress\":{\"percent\":7}}]\n");
}

#[tokio::test]
async fn a_few_processes_run_many_jobs_of_many_classes() {
    let setting = Setting::new().await;
    let mut worker = setting.python(&["echo", "snoozes"], "jobs_per_process = 15", &["--concurrency", "2"]);
    let jobs = (0..50).map(|n| NewJob::of_class("echo", doc! { "n": n }));
    setting.store.enqueue_many(jobs).await.unwrap();
    let bundle = NewJob::bundle_of_class("echo", (0..20).map(|n| doc! { "n": n })).enqueue(&setting.store).await.unwrap().id;
    setting.database.until("archived", doc! {}, 51, "all are done").await;
    let done = setting.database.all("archived", doc! { "_id": { "$ne": bundle } }).await;
    promise!(
        done.iter().all(|job| job.get_str("why").unwrap() == "done" && number(job, "attempts") == 1),
        "each is done at its first start"
    );
    let pids: BTreeSet<u32> = done.iter().map(pid).collect();
    assert!((4..=6).contains(&pids.len()), "{pids:?}: 15 jobs for each process");
    let bundle = setting.database.archived(bundle).await;
    let outcomes = bundle.get_array("item_outcomes").unwrap();
    assert!(outcomes.iter().all(|outcome| outcome.as_document().unwrap().get_bool("done").unwrap()), "{bundle}");
    // The first may have been the last job of its process.
    let waits_for_more = async || Some(pid(&setting.run("echo", doc! {}).await)).filter(|pid| is_alive(*pid));
    let last = wait_for(SOON, "a process waits for more", waits_for_more).await;
    worker.stop().await;
    wait_until(SOON, "its processes have ended", async || !pids.iter().chain([&last]).any(|pid| is_alive(*pid))).await;
}

#[tokio::test]
async fn a_cancelled_job_leaves_its_process_to_the_next_or_is_killed_with_it() {
    let setting = Setting::new().await;
    for (class, kill_after, is_left) in [("waits", "10m", true), ("deaf", "300ms", false)] {
        let mut worker = setting.python(&["echo", class], &format!("kill_after = \"{kill_after}\""), &["--concurrency", "1"]);
        let before = pid(&setting.run("echo", doc! {}).await);
        let job = setting.enqueue(class, doc! {}).await;
        let cancelled = setting.cancel(job).await;
        assert_eq!(end_of(&cancelled).0, "cancelled");
        assert_eq!(is_alive(before), is_left, "{class}");
        if !is_left {
            let daemon = u32::try_from(number(&cancelled, "checkpoint")).unwrap();
            wait_until(SOON, "its child in another session is killed", async || !is_alive(daemon)).await;
        }
        assert_eq!(pid(&setting.run("echo", doc! {}).await) == before, is_left, "{class}");
        worker.stop().await;
    }
}

#[tokio::test]
async fn idle_processes_end_and_so_do_those_of_a_killed_worker() {
    let setting = Setting::new().await;
    let worker = setting.python(&["echo"], "idle_timeout = \"300ms\"", &[]);
    let idle = pid(&setting.run("echo", doc! {}).await);
    wait_until(SOON, "it has ended", async || !is_alive(idle)).await;
    let other = pid(&setting.run("echo", doc! {}).await);
    assert_ne!(other, idle);
    worker.kill();
    wait_until(SOON, "it sees the end of its worker", async || !is_alive(other)).await;
}

/// For everything that a process can do, its job has a defined end, and the next job another process.
#[tokio::test]
async fn a_process_that_breaks_the_protocol_fails_its_job_only() {
    let setting = Setting::new().await;
    let worker = |timeout: &str| {
        let more = format!("timeout = \"{timeout}\"\nkill_after = \"100ms\"\nresult_limit = \"1KiB\"");
        setting.worker("python3", RAW, "raw.py", &["raw"], &more, &[])
    };
    let mut patient = worker("10m");
    let run = async |what: &str| {
        let job = NewJob::of_class("raw", doc! { "do": what }).enqueue(&setting.store).await.unwrap().id;
        setting.database.archived(job).await
    };
    let fails = async |what: &str, class: &str, message: &str| {
        let ended = run(what).await;
        let (why, found, said) = end_of(&ended);
        assert_eq!((why, found), ("not-scheduled-by-retry-policy", class), "{what}: {said}");
        assert!(said.contains(message), "{what}: {said}");
    };
    for (what, class, message) in [
        ("garbage", "protocol", "it wrote `Traceback (most recent call last):"),
        ("endless", "protocol", "it wrote a line of more than 132096 bytes"),
        ("not-utf8", "protocol", "it wrote `"),
        ("close", "signal:SIGKILL", "was killed by SIGKILL"),
        ("odd-messages", "error", "the program gave no message"),
    ] {
        fails(what, class, message).await;
    }
    assert_eq!(run("other-id").await.get_str("result").unwrap(), "right");
    let orphan = run("orphan").await;
    assert_eq!(end_of(&orphan).1, "exit:3", "its child keeps its output open");
    let child = u32::try_from(number(&orphan, "checkpoint")).unwrap();
    wait_until(SOON, "the child is killed", async || !is_alive(child)).await;
    let left = u32::try_from(number(&run("leave").await, "result")).unwrap();
    wait_until(SOON, "it has left", async || !is_alive(left)).await;
    assert_ne!(number(&run("leave").await, "result"), i64::from(left), "another process");
    patient.stop().await;
    let hasty = worker("300ms");
    fails("nothing", "timeout", "it took longer than its time limit of 300ms").await;
    drop(hasty);
}

/// Descendants in another session too: after an exit, a signal or a broken protocol in a job, between two jobs, and at the stop.
#[tokio::test]
async fn a_process_that_has_ended_leaves_no_descendants() {
    let setting = Setting::new().await;
    let mut worker = setting.worker("python3", RAW, "raw.py", &["raw"], "", &[]);
    let run = async |what: &str| {
        let job = NewJob::of_class("raw", doc! { "do": what, "daemon": true }).enqueue(&setting.store).await.unwrap().id;
        setting.database.archived(job).await
    };
    let until_gone = async |what: &str, daemon: u32| wait_until(SOON, what, async || !is_alive(daemon)).await;
    for what in ["orphan", "crash", "garbage", "close"] {
        let checkpoint = run(what).await;
        until_gone(what, u32::try_from(number(&checkpoint, "checkpoint")).unwrap()).await;
    }
    // No other job comes.
    until_gone("leave", u32::try_from(number(&run("leave").await, "result")).unwrap()).await;
    let stays = async || {
        let stayed = run("stay").await;
        let result = stayed.get_document("result").unwrap();
        (Pid::from_raw(i32::try_from(number(result, "pid")).unwrap()), u32::try_from(number(result, "daemon")).unwrap())
    };
    let (process, daemon) = stays().await;
    assert!(is_alive(daemon));
    kill(process, Signal::SIGKILL).unwrap();
    until_gone("killed while it is idle", daemon).await;
    let (_, daemon) = stays().await;
    worker.stop().await;
    until_gone("its worker stopped", daemon).await;
}
