//! Long-lived programs: a process runs one job after the other, which saves the start of a process for each job.
//!
//! A worker starts a process when a job finds none idle. It writes each job as one line of JSON to standard input, and reads messages and
//! the answer as lines of JSON from standard output. A process that dies, or writes anything else, fails the job that it has, and the next
//! job gets another process. The worker ends a process by closing its standard input: when it was idle for a while, has run its maximum
//! number of jobs, or when the worker stops. If the worker is killed, its processes see that end as well.
//!
//! When a process has ended, however it did, all its descendants are killed before it is reaped: its id is that of their group, and could be
//! another's then.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    io,
    path::PathBuf,
    process::Stdio,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use bson::Bson;
use parking_lot::Mutex;
use recruiter_common::{failure::Failure, shutdown::pause};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    process::{ChildStdin, ChildStdout, Command},
    signal::unix::{SignalKind, signal},
    time::timeout,
};
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

use super::{
    group::{Group, LINGER},
    messages::{Lines, quoted},
    output::Errors,
    said::Said,
    settings::{Settings, prepare},
    stopped_by,
    streams::{Loggable, drain, log_line},
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
/// Maximum length of what is dropped of a line that is longer: without an end, it is no line.
const LONGEST_DROPPED: usize = 1024 * 1024 * 1024;
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
        std::mem::take(&mut *self.idle.lock()).into_iter().for_each(|idle| self.end(idle.process));
        self.ends.close();
        self.ends.wait().await;
    }

    /// The process that was idle for the shortest time: the others may be ended.
    fn take(&self) -> Option<Process> {
        loop {
            let process = self.idle.lock().pop()?.process;
            if !process.group.has_ended() {
                return Some(process);
            }
            self.end(process);
        }
    }

    fn put_back(&self, process: Process) {
        process.heard.lock().job = None;
        if process.jobs >= self.start.jobs_per_process || self.is_closed.load(Ordering::SeqCst) {
            return self.end(process);
        }
        let mut idle = self.idle.lock();
        // A process that ends from now on is found by the next sweep, which its end causes.
        if process.group.has_ended() {
            return self.end(process);
        }
        idle.push(Idle { process, since: Instant::now() });
    }

    /// Sweeps as long as there is this pool: now and then, and whenever a child of this worker has ended.
    fn keep_sweeping(self: &Arc<Self>) -> io::Result<()> {
        let mut children = signal(SignalKind::child())?;
        if self.is_sweeping.swap(true, Ordering::SeqCst) {
            return Ok(());
        }
        let (pool, every) = (Arc::downgrade(self), (self.start.idle_timeout / 2).max(SWEEP_EVERY));
        tokio::spawn(async move {
            loop {
                tokio::select! { () = pause(every) => {} _ = children.recv() => {} }
                let Some(pool) = pool.upgrade() else { return };
                pool.sweep();
            }
        });
        Ok(())
    }

    /// Ends the processes that were idle for too long, and what is left of those that have ended by themselves.
    fn sweep(&self) {
        let is_over = |idle: &Idle| idle.since.elapsed() >= self.start.idle_timeout || idle.process.group.has_ended();
        let mut idle = self.idle.lock();
        let (over, left): (Vec<Idle>, Vec<Idle>) = std::mem::take(&mut *idle).into_iter().partition(is_over);
        *idle = left;
        drop(idle);
        over.into_iter().for_each(|idle| self.end(idle.process));
    }

    fn end(&self, process: Process) {
        drop(self.ends.spawn(process.end(self.start.kill_after)));
    }

    fn start(self: &Arc<Self>, job: &Context) -> io::Result<Process> {
        self.keep_sweeping()?;
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
        let (heard, errors, logs) = (Arc::<Mutex<Heard>>::default(), leader.stderr.take(), start.log_stderr.then(|| Loggable::of(job)));
        let hearing = {
            let heard = heard.clone();
            tokio::spawn(async move { drain(errors, |chunk| hear(&heard, chunk, logs.as_ref())).await })
        };
        tracing::debug!(job.class = job.class(), pid = group.pid, "started a long-lived program");
        let output = Reader { from: output, buffer: Vec::new(), searched: 0, dropped: 0 };
        Ok(Process { group, input, output, heard, hearing: AbortOnDropHandle::new(hearing), jobs: 0 })
    }
}

fn hear(heard: &Mutex<Heard>, chunk: &[u8], logs: Option<&Loggable>) {
    let heard = &mut *heard.lock();
    heard.errors.push(chunk);
    if let Some(loggable) = logs {
        let job = heard.job.as_ref();
        heard.lines.push(chunk, |line, _| log_line(line, job.map(AsRef::as_ref), loggable));
    }
}

impl Process {
    fn begin(&mut self, job: &Arc<Context>) {
        self.jobs += 1;
        *self.heard.lock() = Heard { job: Some(job.clone()), ..Heard::default() };
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
        self.group.kill_all().await;
        timeout(LINGER, answer(&mut self.output, self.jobs, longest, job)).await.unwrap_or(End::Gone)
    }

    /// Ends a process that has a job: by TERM, and by KILL a moment later. At once when the job may already run elsewhere.
    async fn stop(mut self, job: &Context) {
        if job.cancellation() != Some(Cancellation::ClaimLost) {
            self.group.terminate_all().await;
            tokio::select! {
                _ = timeout(LINGER, self.group.leader_ended()) => {}
                () = job.cancel.at_once() => {}
            }
        }
        self.group.kill_all().await;
        // A process that waits for a dead disk survives KILL. The worker does not wait for it.
        let _ = timeout(LINGER, self.group.leader.wait()).await;
    }

    /// Ends a process without a job.
    async fn end(self, kill_after: Duration) {
        let Self { mut group, input, hearing, .. } = self;
        drop(input);
        if timeout(kill_after, group.leader_ended()).await.is_err() {
            group.terminate_all().await;
            let _ = timeout(LINGER, group.leader_ended()).await;
        }
        group.kill_all().await;
        let _ = timeout(LINGER, group.leader.wait()).await;
        drop(hearing);
    }

    /// The failure of a job whose process has closed its output.
    async fn gone(mut self, settings: &Settings) -> Failure {
        let _ = timeout(LINGER, self.group.leader_ended()).await;
        self.group.kill_all().await;
        let status = self.group.leader.wait().await;
        // Its descendants may keep standard error open.
        let _ = timeout(LINGER, &mut self.hearing).await;
        let errors = std::mem::take(&mut self.heard.lock().errors);
        match status {
            Ok(status) => errors.into_failure(&settings.path, status),
            Err(error) => Failure::new("spawn", format!("cannot learn how `{}` ended: {error}", settings.path.display())),
        }
    }
}

/// Reads messages until the answer of job `number`.
async fn answer(output: &mut Reader, number: u32, longest: usize, job: &Context) -> End {
    loop {
        let Line { text, is_cut } = match output.line(longest).await {
            Ok(Some(line)) => line,
            Ok(None) => return End::Gone,
            Err(TooLong) => return End::Broken(format!("it wrote a line of more than {longest} bytes")),
        };
        let said = match Said::read(&text, is_cut) {
            Ok(said) => said,
            Err(problem) => return End::Broken(format!("it wrote `{}` ({problem})", quoted(&text))),
        };
        // The answer of an earlier job, which was cancelled.
        if !said.is_about(number) {
            continue;
        }
        said.note(job);
        if let Some(answer) = said.answer(job) {
            return End::Answered(answer);
        }
    }
}

/// Reads lines. It keeps what it has read if it is not awaited to its end.
struct Reader {
    from: ChildStdout,
    buffer: Vec<u8>,
    /// This many bytes of the buffer contain no newline.
    searched: usize,
    /// This many bytes of the present line were dropped.
    dropped: usize,
}

/// A line, or the beginning of a line that is too long.
struct Line {
    text: Vec<u8>,
    is_cut: bool,
}

/// A line is too long, and does not begin as a line of the protocol, or does not end.
struct TooLong;

impl Reader {
    /// The next line; `None` at the end. What precedes the end without a newline is no line.
    async fn line(&mut self, longest: usize) -> Result<Option<Line>, TooLong> {
        loop {
            if let Some(at) = self.buffer[self.searched..].iter().position(|byte| *byte == b'\n') {
                let rest = self.buffer.split_off(self.searched + at + 1);
                self.searched = 0;
                let mut text = std::mem::replace(&mut self.buffer, rest);
                let is_cut = std::mem::take(&mut self.dropped) > 0;
                if is_cut {
                    text.truncate(longest);
                }
                return Ok(Some(Line { text, is_cut }));
            }
            if self.buffer.len() > longest {
                self.dropped += self.buffer.len() - longest;
                if !self.buffer.starts_with(b"{") || self.dropped > LONGEST_DROPPED {
                    return Err(TooLong);
                }
                self.buffer.truncate(longest);
            }
            self.searched = self.buffer.len();
            self.buffer.reserve(CHUNK);
            if !matches!(self.from.read_buf(&mut self.buffer).await, Ok(1..)) {
                return Ok(None);
            }
        }
    }
}
