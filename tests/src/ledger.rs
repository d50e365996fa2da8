//! The ledger: a record of executions that the jobs write themselves, independent of the system under test. A job
//! appends a line at its begin and at its end, and each is on the disk before the job continues. Tests count executions
//! by these lines.

use std::{
    fs,
    hint::black_box,
    io::Write as _,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use nix::time::{ClockId, clock_gettime};
use recruiter_common::{Failure, JobId, NewJob, Workable, ids::StartId};
use recruiter_worker::{BlockingExecutable, Context, Executable, InvalidClass, NotDone, Worker};
use serde::{Deserialize, Serialize};

use crate::effects::Settle;

/// Names the variable with the directory of the ledger.
pub const LEDGER: &str = "RECRUITER_TEST_LEDGER";

/// A job that writes the ledger: works for `ms` milliseconds, and fails in its first `failures` attempts.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Entry {
    /// Duration of an execution, in milliseconds.
    pub ms: i64,
    /// Number of attempts that fail at the end.
    pub failures: u32,
    /// Whether it ignores a request to stop.
    pub deaf: bool,
}

impl Workable for Entry {
    const CLASS: &'static str = "entry";
    type Output = ();
}

impl Entry {
    /// A job with this duration, in milliseconds.
    pub fn lasting(ms: i64) -> NewJob {
        Self { ms, ..Self::default() }.as_job()
    }
}

impl Executable for Entry {
    type State = Ledger;

    async fn execute(&self, ledger: &Ledger, job: &Context) -> Result<(), NotDone> {
        ledger.write(job, Event::Begin);
        let work = recruiter_common::shutdown::pause(Duration::from_millis(u64::try_from(self.ms).unwrap_or(0)));
        let stopped = tokio::select! {
            () = work => false,
            () = job.cancelled(), if !self.deaf => true,
        };
        if stopped {
            ledger.write(job, Event::Stopped);
            Err(NotDone::Stopped(Failure::new("stopped", "as it was asked to")))
        } else if job.retries() < self.failures {
            ledger.write(job, Event::Failed);
            Err(NotDone::failed("not-yet", format!("it fails {} times", self.failures)))
        } else {
            ledger.write(job, Event::Done);
            Ok(())
        }
    }
}

/// A job that writes the ledger and takes another time after its first execution.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Longer {
    /// The first execution. The others differ only in their duration.
    pub first: Entry,
    /// Duration of the other executions, in milliseconds.
    pub again_ms: i64,
}

impl Workable for Longer {
    const CLASS: &'static str = "longer";
    type Output = ();
}

impl Executable for Longer {
    type State = Ledger;

    async fn execute(&self, ledger: &Ledger, job: &Context) -> Result<(), NotDone> {
        // A start whose reply came too late is released and leaves no execution, and counts as an attempt.
        let ms = if job.last_execution().is_some() { self.again_ms } else { self.first.ms };
        Entry { ms, ..self.first.clone() }.execute(ledger, job).await
    }
}

/// The effect of a harmful job on its worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Harm {
    /// Aborts the process.
    Abort,
    /// Allocates all available memory.
    Exhaust,
    /// Allocates a mebibyte every few milliseconds, up to this number of mebibytes or until its cancellation.
    Leak(i64),
    /// Recurses until the stack overflows.
    Overflow,
    /// Blocks its thread for this many milliseconds and ignores requests to stop.
    Spin(i64),
    /// Prints this many mebibytes, half of them to standard error.
    Print(i64),
}

/// A job that writes the ledger and does harm.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Poison {
    /// The harm.
    pub harm: Harm,
    /// Its time limit in milliseconds, if it has one.
    pub limit_ms: Option<i64>,
}

impl Poison {
    /// A job with this harm, without a time limit.
    pub fn new(harm: Harm) -> Self {
        Self { harm, limit_ms: None }
    }

    fn limit(&self) -> Option<Duration> {
        self.limit_ms.and_then(|ms| u64::try_from(ms).ok()).map(Duration::from_millis)
    }

    /// Does the harm on the calling thread.
    fn harm(&self, ledger: &Ledger, job: &Context) -> Result<(), NotDone> {
        ledger.write(job, Event::Begin);
        match self.harm {
            Harm::Abort => std::process::abort(),
            Harm::Exhaust => {
                let mut hoard = Vec::new();
                loop {
                    hoard.push(black_box(vec![1_u8; 16 * MIB]));
                }
            }
            Harm::Leak(mib) => {
                for _ in 0..mib {
                    if job.is_cancelled() {
                        ledger.write(job, Event::Stopped);
                        return Err(NotDone::Stopped(Failure::new("stopped", "as it was asked to")));
                    }
                    black_box(vec![1_u8; MIB]).leak();
                    thread::sleep(LEAK_EVERY);
                }
            }
            Harm::Overflow => drop(black_box(deeper(0))),
            Harm::Spin(ms) => thread::sleep(Duration::from_millis(u64::try_from(ms).unwrap_or(0))),
            Harm::Print(mib) => {
                let lines = ("x".repeat(1023) + "\n").repeat(MIB / 2048);
                for _ in 0..mib {
                    std::io::stdout().write_all(lines.as_bytes())?;
                    std::io::stderr().write_all(lines.as_bytes())?;
                }
            }
        }
        ledger.write(job, Event::Done);
        Ok(())
    }
}

const MIB: usize = 1024 * 1024;
/// Interval between two mebibytes of a leak.
const LEAK_EVERY: Duration = Duration::from_millis(10);

/// Never returns, because it always calls itself again.
fn deeper(depth: u64) -> u64 {
    let room = black_box([depth; 128]);
    if depth == u64::MAX { 0 } else { deeper(depth + 1) + room[0] }
}

impl Workable for Poison {
    const CLASS: &'static str = "poison";
    type Output = ();
}

impl Executable for Poison {
    type State = Ledger;

    /// Blocks a thread of the runtime.
    async fn execute(&self, ledger: &Ledger, job: &Context) -> Result<(), NotDone> {
        self.harm(ledger, job)
    }

    fn time_limit(&self) -> Option<Duration> {
        self.limit()
    }
}

/// The same job as a blocking workable, on a thread of its own.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BlockingPoison(pub Poison);

impl Workable for BlockingPoison {
    const CLASS: &'static str = "blocking-poison";
    type Output = ();
}

impl BlockingExecutable for BlockingPoison {
    type State = Ledger;

    fn execute(&self, ledger: &Ledger, job: &Context) -> Result<(), NotDone> {
        self.0.harm(ledger, job)
    }

    fn time_limit(&self) -> Option<Duration> {
        self.0.limit()
    }
}

/// The event of a line in the ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Event {
    /// The execution began.
    Begin,
    /// The job was successful.
    Done,
    /// The job failed.
    Failed,
    /// The job ended because of its cancellation.
    Stopped,
}

/// One line of the ledger.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Line {
    /// The id of the job, in hex.
    pub job: String,
    /// The id of its start, in hex.
    pub start: String,
    /// The number of the attempt, as the job got it.
    pub attempt: u32,
    /// The process id of the worker.
    pub worker: u32,
    /// The event.
    pub event: Event,
    /// The time of the machine's monotonic clock, in milliseconds.
    pub at_ms: i64,
}

impl Line {
    /// The ids of the job and of its start.
    pub fn execution(&self) -> (JobId, StartId) {
        (self.job.parse().expect("a ledger names jobs"), self.start.parse().expect("a ledger names starts"))
    }
}

/// The ledger file of one process.
#[derive(Debug)]
pub struct Ledger(Mutex<fs::File>);

impl Ledger {
    /// Opens this process's file in the directory from the environment.
    ///
    /// # Panics
    /// When the environment names no writable directory.
    pub fn of_this_process() -> Self {
        Self::within(&PathBuf::from(std::env::var_os(LEDGER).expect("the environment names a ledger")))
    }

    /// Opens this process's file in a directory.
    ///
    /// # Panics
    /// When it cannot be written.
    pub fn within(directory: &Path) -> Self {
        let file = fs::OpenOptions::new().create(true).append(true).open(directory.join(std::process::id().to_string()));
        Self(Mutex::new(file.expect("the ledger can be written")))
    }

    /// Records an event of a job. When it returns, a kill of this process does not lose it.
    pub fn write(&self, job: &Context, event: Event) {
        let line = Line {
            job: job.job_id().to_string(),
            start: job.start_id().to_string(),
            attempt: job.attempt(),
            worker: std::process::id(),
            event,
            at_ms: monotonic_ms(),
        };
        self.append(&line);
    }

    /// Records a line.
    ///
    /// # Panics
    /// When the file cannot be written.
    pub fn append(&self, line: &Line) {
        let text = serde_json::to_string(line).expect("a line is made of texts and numbers") + "\n";
        let mut file = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        file.write_all(text.as_bytes()).expect("the ledger can be written");
    }
}

/// A worker with every class that writes the ledger of this process.
///
/// # Errors
/// Never: no class is registered twice.
pub fn worker() -> Result<Worker, InvalidClass> {
    let ledger = Arc::new(Ledger::of_this_process());
    let worker = Worker::new().register::<Entry>(ledger.clone())?.register::<Longer>(ledger.clone())?;
    worker.register::<Poison>(ledger.clone())?.register_blocking::<BlockingPoison>(ledger.clone())?.register::<Settle>(ledger)
}

/// All lines of all processes, ordered by time. No line is incomplete, even if its process died: a line is one write.
pub fn read(directory: &Path) -> Vec<Line> {
    let files = fs::read_dir(directory).expect("the ledger is there").filter_map(Result::ok);
    let text = files.map(|file| fs::read_to_string(file.path()).expect("the ledger is text")).collect::<String>();
    let mut lines: Vec<Line> = text.lines().map(|line| serde_json::from_str(line).expect("the ledger is well-formed")).collect();
    lines.sort_by_key(|line| line.at_ms);
    lines
}

/// The machine's monotonic clock in milliseconds, which all its processes share.
pub fn monotonic_ms() -> i64 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("Linux has a monotonic clock");
    now.tv_sec() * 1_000 + now.tv_nsec() / 1_000_000
}
