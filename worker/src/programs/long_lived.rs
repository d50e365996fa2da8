//! Long-lived programs: a process runs one job after the other, which saves the start of a process for each job.
//!
//! A worker starts a process when a job finds none idle. It writes each job as one line of JSON to standard input, and reads messages and
//! the answer as lines of JSON from standard output. A process that dies, or writes anything else, fails the job that it has, and the next
//! job gets another process. The worker ends a process by closing its standard input: when it was idle for a while, has run its maximum
//! number of jobs, or when the worker stops. If the worker is killed, its processes see that end as well.
//!
//! When a process has ended, its descendants are killed before it is reaped: its id is that of their group, and could be another's then.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    io,
    path::PathBuf,
    process::Stdio,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use bson::Bson;
use nix::sys::signal::Signal;
use recruiter_common::{failure::Failure, job::JobProgress, shutdown::pause};
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    process::{ChildStdin, ChildStdout, Command},
    time::timeout,
};
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

use super::{
    group::{Group, LINGER},
    messages::Lines,
    output::Errors,
    settings::{Settings, prepare},
    stopped_by,
    streams::{drain, log_line},
};
use crate::{
    cancellation::Cancellation,
    context::Context,
    outcome::{Done, NotDone},
};

/// The error class of a process that writes something else than the protocol to standard output.
const PROTOCOL: &str = "protocol";
/// Maximum length of a line of a process, beyond the largest result.
const LONGEST_LINE: usize = 128 * 1024;
/// Maximum length of a line that an error quotes, in bytes.
const QUOTED: usize = 200;
/// Bytes in one read from a pipe.
const CHUNK: usize = 16 * 1024;
/// The shortest time between two searches for idle processes.
const SWEEP_EVERY: Duration = Duration::from_millis(100);

/// The processes of one long-lived program. Classes with the same command share them.
pub(crate) struct Pool {
    pub(crate) start: HowToStart,
    idle: Mutex<Vec<Idle>>,
    is_sweeping: AtomicBool,
    is_closed: AtomicBool,
    /// The ends of processes that are under way.
    ends: TaskTracker,
}

/// How the processes of a pool are started and ended. Two classes with equal values share a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HowToStart {
    pub(crate) path: PathBuf,
    pub(crate) arguments: Vec<OsString>,
    pub(crate) directory: PathBuf,
    pub(crate) environment: BTreeMap<String, String>,
    /// How long a process may be idle.
    pub(crate) idle_timeout: Duration,
    /// How many jobs a process runs before it is replaced.
    pub(crate) jobs_per_process: u32,
    /// Time between the end of standard input and TERM.
    pub(crate) kill_after: Duration,
    /// Whether standard error goes into the logs.
    pub(crate) log_stderr: bool,
}

struct Idle {
    process: Process,
    since: Instant,
}

/// A process that waits for a job or runs one. Dropping it kills it.
struct Process {
    group: Group,
    input: ChildStdin,
    output: Reader,
    heard: Arc<Mutex<Heard>>,
    hearing: AbortOnDropHandle<()>,
    /// Jobs so far. The present one has this number.
    jobs: u32,
}

/// Standard error since the present job began.
#[derive(Default)]
struct Heard {
    errors: Errors,
    lines: Lines,
    job: Option<Arc<Context>>,
}

/// How a job ended in a process.
enum End {
    /// With an answer: the process can run further jobs.
    Answered(Result<Done, NotDone>),
    /// The process has closed its standard output.
    Gone,
    /// The process has written something else.
    Broken(String),
}

impl Pool {
    pub(crate) fn new(start: HowToStart) -> Self {
        Self {
            start,
            idle: Mutex::default(),
            is_sweeping: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
            ends: TaskTracker::new(),
        }
    }

    /// Runs a job in an idle process, or in a new one.
    pub(super) async fn run(self: &Arc<Self>, parameters: &Value, settings: &Settings, job: &Arc<Context>) -> Result<Done, NotDone> {
        let mut process = match self.take() {
            Some(process) => process,
            None => self.start(job).map_err(|error| settings.not_started(&error))?,
        };
        process.begin(job);
        let line = process.line(parameters, job);
        let longest = settings.result_limit.saturating_add(LONGEST_LINE);
        let end = process.run(line.as_bytes(), longest, job, settings.kill_after).await;
        match end {
            Some(End::Answered(answer)) => {
                self.put_back(process);
                // A job that ends although it should stop is done. Any other answer follows from the cancellation.
                if job.is_cancelled() && answer.is_err() { Err(stopped_by(job)) } else { answer }
            }
            Some(End::Gone) => Err(NotDone::Failed(process.gone(settings).await)),
            Some(End::Broken(problem)) => {
                let program = settings.path.display();
                let message = format!("`{program}` broke the protocol: {problem}; its standard output is for the protocol only");
                Err(NotDone::failed(PROTOCOL, message))
            }
            None => {
                process.stop(job).await;
                Err(stopped_by(job))
            }
        }
    }

    /// Ends all processes: those that are idle at once, and each other one when its job has ended.
    pub(crate) async fn close(&self) {
        self.is_closed.store(true, Ordering::SeqCst);
        std::mem::take(&mut *self.idle()).into_iter().for_each(|idle| self.end(idle.process));
        self.ends.close();
        self.ends.wait().await;
    }

    /// The process that was idle for the shortest time: the others may be ended.
    fn take(&self) -> Option<Process> {
        loop {
            let process = self.idle().pop()?.process;
            if !process.group.has_ended() {
                return Some(process);
            }
        }
    }

    fn put_back(self: &Arc<Self>, process: Process) {
        process.heard().job = None;
        if process.jobs >= self.start.jobs_per_process || self.is_closed.load(Ordering::SeqCst) {
            return self.end(process);
        }
        self.idle().push(Idle { process, since: Instant::now() });
        if !self.is_sweeping.swap(true, Ordering::SeqCst) {
            let (pool, every) = (Arc::downgrade(self), (self.start.idle_timeout / 2).max(SWEEP_EVERY));
            tokio::spawn(async move {
                loop {
                    pause(every).await;
                    let Some(pool) = pool.upgrade() else { return };
                    if !pool.sweep() {
                        return;
                    }
                }
            });
        }
    }

    /// Ends the processes that were idle for too long. Returns whether there are others.
    fn sweep(&self) -> bool {
        let mut idle = self.idle();
        let (over, left) = std::mem::take(&mut *idle).into_iter().partition(|idle| idle.since.elapsed() >= self.start.idle_timeout);
        *idle = left;
        let over: Vec<Idle> = over;
        let is_needed = !idle.is_empty();
        if !is_needed {
            self.is_sweeping.store(false, Ordering::SeqCst);
        }
        drop(idle);
        over.into_iter().for_each(|idle| self.end(idle.process));
        is_needed
    }

    fn end(&self, process: Process) {
        drop(self.ends.spawn(process.end(self.start.kill_after)));
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Idle>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn start(&self, job: &Context) -> io::Result<Process> {
        let start = &self.start;
        let mut command = Command::new(&start.path);
        command.args(&start.arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        prepare(&mut command, &start.directory, &start.environment);
        command.env("RECRUITER_LONG_LIVED", "1");
        let mut group = Group::spawn(&mut command)?;
        let leader = &mut group.leader;
        let (Some(input), Some(output)) = (leader.stdin.take(), leader.stdout.take()) else {
            return Err(io::Error::other("it has no pipes"));
        };
        let (heard, errors, logs) = (Arc::<Mutex<Heard>>::default(), leader.stderr.take(), start.log_stderr);
        let hearing = {
            let heard = heard.clone();
            tokio::spawn(async move { drain(errors, |chunk| hear(&heard, chunk, logs)).await })
        };
        tracing::debug!(job.class = job.class(), pid = group.pid, "started a long-lived program");
        let output = Reader { from: output, buffer: Vec::new(), searched: 0 };
        Ok(Process { group, input, output, heard, hearing: AbortOnDropHandle::new(hearing), jobs: 0 })
    }
}

fn hear(heard: &Mutex<Heard>, chunk: &[u8], logs: bool) {
    let heard = &mut *heard.lock().unwrap_or_else(PoisonError::into_inner);
    heard.errors.push(chunk);
    if logs {
        let job = heard.job.as_ref();
        heard.lines.push(chunk, |line, _| log_line(line, job.map(AsRef::as_ref)));
    }
}

impl Process {
    fn heard(&self) -> MutexGuard<'_, Heard> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(&mut self, job: &Arc<Context>) {
        self.jobs += 1;
        *self.heard() = Heard { job: Some(job.clone()), ..Heard::default() };
    }

    /// The job as a line.
    fn line(&self, parameters: &Value, job: &Context) -> String {
        let mut line = json!({
            "id": self.jobs,
            "job": job.job_id().to_string(),
            "class": job.class(),
            "group": job.group(),
            "attempt": job.attempt(),
            "is_last_attempt": job.is_last_attempt(),
        });
        if let Some(item) = job.item() {
            (line["item"], line["items"]) = (item.index.into(), item.of.into());
        }
        if let Some(traceparent) = job.traceparent_of_span() {
            line["traceparent"] = traceparent.into();
        }
        if let Some(deadline) = job.deadline() {
            let left = deadline.saturating_duration_since(Instant::now()).as_millis();
            line["time_limit_ms"] = u64::try_from(left).unwrap_or(u64::MAX).into();
        }
        if let Ok(Some(checkpoint)) = job.last_checkpoint::<Bson>() {
            line["checkpoint"] = checkpoint.into_relaxed_extjson();
        }
        line["parameters"] = parameters.clone();
        format!("{line}\n")
    }

    /// Runs a job. `None` if it must stop and does not in time.
    async fn run(&mut self, line: &[u8], longest: usize, job: &Context, kill_after: Duration) -> Option<End> {
        let mut is_sent = false;
        {
            let (input, sent) = (&mut self.input, &mut is_sent);
            let send = async {
                // If the process has ended, the end of its output says so.
                *sent = input.write_all(line).await.is_ok();
                std::future::pending::<()>().await;
            };
            tokio::select! {
                biased;
                end = answer(&mut self.output, self.jobs, longest, job) => return Some(end),
                () = self.group.leader_ended() => return Some(self.last_words(longest, job).await),
                () = job.cancelled() => {}
                () = send => {}
            }
        }
        if !is_sent || job.cancellation() == Some(Cancellation::ClaimLost) {
            return None;
        }
        let why = match job.cancellation() {
            Some(Cancellation::Requested) => "requested",
            Some(Cancellation::TimeLimit) => "time-limit",
            Some(Cancellation::MemoryLimit) => "memory-limit",
            Some(Cancellation::WorkerStopping | Cancellation::ClaimLost) | None => "worker-stopping",
        };
        let cancel = format!("{}\n", json!({ "cancel": self.jobs, "why": why }));
        let (input, output, number) = (&mut self.input, &mut self.output, self.jobs);
        let answered = async {
            // A process that reads nothing is ended by a signal.
            tokio::join!(async { drop(input.write_all(cancel.as_bytes()).await) }, answer(output, number, longest, job)).1
        };
        tokio::select! {
            end = answered => Some(end),
            () = self.group.leader_ended() => Some(self.last_words(longest, job).await),
            () = pause(kill_after) => None,
            () = job.cancel.at_once() => None,
        }
    }

    /// What a process that has ended wrote before. Its descendants are killed: they may keep its output open.
    async fn last_words(&mut self, longest: usize, job: &Context) -> End {
        self.group.kill();
        timeout(LINGER, answer(&mut self.output, self.jobs, longest, job)).await.unwrap_or(End::Gone)
    }

    /// Ends a process that has a job: by TERM, and by KILL a moment later. At once when the job may already run elsewhere.
    async fn stop(mut self, job: &Context) {
        if job.cancellation() != Some(Cancellation::ClaimLost) {
            self.group.signal(Signal::SIGTERM);
            tokio::select! {
                _ = timeout(LINGER, self.group.leader_ended()) => {}
                () = job.cancel.at_once() => {}
            }
        }
        self.group.kill();
        // A process that waits for a dead disk survives KILL. The worker does not wait for it.
        let _ = timeout(LINGER, self.group.leader.wait()).await;
    }

    /// Ends a process without a job.
    async fn end(self, kill_after: Duration) {
        let Self { mut group, input, hearing, .. } = self;
        drop(input);
        if timeout(kill_after, group.leader_ended()).await.is_err() {
            group.signal(Signal::SIGTERM);
            let _ = timeout(LINGER, group.leader_ended()).await;
        }
        group.kill();
        let _ = timeout(LINGER, group.leader.wait()).await;
        drop(hearing);
    }

    /// The failure of a job whose process has closed its output.
    async fn gone(mut self, settings: &Settings) -> Failure {
        let _ = timeout(LINGER, self.group.leader_ended()).await;
        self.group.kill();
        let status = self.group.leader.wait().await;
        // Its descendants may keep standard error open.
        let _ = timeout(LINGER, &mut self.hearing).await;
        let errors = std::mem::take(&mut self.heard().errors);
        match status {
            Ok(status) => errors.into_failure(&settings.path, status),
            Err(error) => Failure::new("spawn", format!("cannot learn how `{}` ended: {error}", settings.path.display())),
        }
    }
}

/// Reads messages until the answer of job `number`.
async fn answer(output: &mut Reader, number: u32, longest: usize, job: &Context) -> End {
    loop {
        let line = match output.line(longest).await {
            Ok(Some(line)) => line,
            Ok(None) => return End::Gone,
            Err(TooLong) => return End::Broken(format!("it wrote a line of more than {longest} bytes")),
        };
        let quoted = || String::from_utf8_lossy(&line[..line.len().min(QUOTED)]).into_owned();
        let said: Said = match serde_json::from_slice(&line) {
            Ok(said) => said,
            Err(error) => return End::Broken(format!("it wrote `{}` ({error})", quoted())),
        };
        // The answer of an earlier job, which was cancelled.
        if said.id != number {
            continue;
        }
        said.note(job);
        if let Some(answer) = said.answer() {
            return End::Answered(answer);
        }
    }
}

/// A line of a process: messages about its job, or the answer.
#[derive(Deserialize)]
struct Said {
    id: u32,
    progress: Option<SaidProgress>,
    #[serde(default, deserialize_with = "given")]
    checkpoint: Option<Value>,
    log: Option<String>,
    extend_ms: Option<u64>,
    #[serde(default, deserialize_with = "given")]
    result: Option<Value>,
    error: Option<SaidError>,
    snooze: Option<SaidSnooze>,
}

/// A field that is there, also if it is null.
fn given<'de, D: Deserializer<'de>>(value: D) -> Result<Option<Value>, D::Error> {
    Value::deserialize(value).map(Some)
}

#[derive(Deserialize)]
struct SaidProgress {
    percent: Option<f64>,
    done: Option<u64>,
    of: Option<u64>,
    text: Option<String>,
}

#[derive(Deserialize)]
struct SaidError {
    class: Option<String>,
    message: Option<String>,
    trace: Option<String>,
    #[serde(default)]
    give_up: bool,
    retry_after_ms: Option<u64>,
}

#[derive(Deserialize)]
struct SaidSnooze {
    after_ms: Option<u64>,
    at_most: Option<u32>,
    class: Option<String>,
    message: Option<String>,
}

impl Said {
    /// Does what the messages say. A checkpoint that cannot be stored is in the log of the job.
    fn note(&self, job: &Context) {
        if let Some(SaidProgress { percent, done, of, text }) = &self.progress {
            let progress = match (done, of, percent) {
                (Some(done), Some(of), _) => JobProgress::from((*done, *of)),
                (_, _, Some(percent)) => JobProgress::from(*percent),
                (_, _, None) => JobProgress::default(),
            };
            job.progress(match text {
                Some(text) => progress.text(text),
                None => progress,
            });
        }
        if let Some(checkpoint) = &self.checkpoint {
            let value = Bson::try_from(checkpoint.clone()).map_err(|error| error.to_string());
            if let Err(problem) = value.and_then(|value| job.checkpoint(value).map_err(|error| error.to_string())) {
                tracing::warn!(job.id = %job.job_id(), job.class = job.class(), problem, "ignoring a checkpoint of a program");
                job.log(format!("ignored a checkpoint: {problem}"));
            }
        }
        if let Some(line) = &self.log {
            job.log(line);
        }
        if let Some(ms) = self.extend_ms {
            let _ = job.extend(Duration::from_millis(ms));
        }
        if let Some(ms) = self.error.as_ref().and_then(|error| error.retry_after_ms) {
            job.retry_after(Duration::from_millis(ms));
        }
    }

    fn answer(self) -> Option<Result<Done, NotDone>> {
        let failure = |class: Option<String>, message: Option<String>| {
            let class = class.filter(|class| !class.is_empty()).unwrap_or_else(|| "error".into());
            Failure::new(class, message.unwrap_or_else(|| "the program gave no message".into()))
        };
        if let Some(SaidError { class, message, trace, give_up, .. }) = self.error {
            let failure = failure(class, message);
            let failure = match trace {
                Some(trace) => failure.with_trace(trace),
                None => failure,
            };
            return Some(Err(if give_up { NotDone::GiveUp(failure) } else { NotDone::Failed(failure) }));
        }
        if let Some(SaidSnooze { after_ms, at_most, class, message }) = self.snooze {
            let reason = failure(class.or_else(|| Some("snoozed".into())), message);
            return Some(Err(NotDone::Snooze { after: after_ms.map(Duration::from_millis), reason, at_most }));
        }
        let result = self.result?;
        Some(match Bson::try_from(result) {
            Ok(Bson::Null) => Ok(Done::default()),
            Ok(result) => Ok(Done { result: Some(result) }),
            Err(error) => Err(NotDone::give_up("result", format!("the result cannot be stored: {error}"))),
        })
    }
}

/// Reads lines. It keeps what it has read if it is not awaited to its end.
struct Reader {
    from: ChildStdout,
    buffer: Vec<u8>,
    /// This many bytes of the buffer contain no newline.
    searched: usize,
}

/// A line is too long.
struct TooLong;

impl Reader {
    /// The next line; `None` at the end. What precedes the end without a newline is no line.
    async fn line(&mut self, longest: usize) -> Result<Option<Vec<u8>>, TooLong> {
        loop {
            if let Some(at) = self.buffer[self.searched..].iter().position(|byte| *byte == b'\n') {
                let rest = self.buffer.split_off(self.searched + at + 1);
                self.searched = 0;
                return Ok(Some(std::mem::replace(&mut self.buffer, rest)));
            }
            self.searched = self.buffer.len();
            if self.buffer.len() > longest {
                return Err(TooLong);
            }
            self.buffer.reserve(CHUNK);
            if !matches!(self.from.read_buf(&mut self.buffer).await, Ok(1..)) {
                return Ok(None);
            }
        }
    }
}
