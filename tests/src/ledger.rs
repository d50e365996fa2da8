//! The ledger: what jobs themselves say of their executions, outside of the system under test. A job appends a line when it
//! is entered and one when it ends, each on the disk before it goes on. Whoever counts executions counts these.

use std::{
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    sync::Mutex,
    time::Duration,
};

use nix::time::{ClockId, clock_gettime};
use recruiter_common::{
    enqueue::{NewJob, Workable},
    failure::Failure,
    ids::{JobId, StartId},
};
use recruiter_worker::{Context, Done, Executable, NotDone};
use serde::{Deserialize, Serialize};

/// Names the directory of the ledger.
pub const LEDGER: &str = "RECRUITER_TEST_LEDGER";

/// A job that keeps the ledger: works for `ms` milliseconds; fails in its first `failures` attempts.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Entry {
    /// How long it takes.
    pub ms: i64,
    /// In how many attempts it fails at the end.
    pub failures: u32,
    /// Whether it goes on when it is asked to stop.
    pub deaf: bool,
}

impl Workable for Entry {
    const CLASS: &'static str = "entry";
}

impl Entry {
    /// A job that takes so many milliseconds.
    pub fn lasting(ms: i64) -> NewJob {
        Self { ms, ..Self::default() }.as_job()
    }
}

impl Executable for Entry {
    type State = Ledger;

    async fn execute(&self, ledger: &Ledger, job: &Context) -> Result<Done, NotDone> {
        ledger.write(job, Event::Begin);
        let work = recruiter_common::shutdown::pause(Duration::from_millis(u64::try_from(self.ms).unwrap_or(0)));
        let stopped = tokio::select! {
            () = work => false,
            () = job.cancelled(), if !self.deaf => true,
        };
        if stopped {
            ledger.write(job, Event::Stopped);
            Err(NotDone::Stopped(Failure::new("stopped", "as it was asked to")))
        } else if job.attempt() <= self.failures {
            ledger.write(job, Event::Failed);
            Err(NotDone::failed("not-yet", format!("it fails {} times", self.failures)))
        } else {
            ledger.write(job, Event::Done);
            Ok(Done::default())
        }
    }
}

/// What a line of the ledger says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Event {
    /// It was entered.
    Begin,
    /// It is done.
    Done,
    /// It failed.
    Failed,
    /// It was asked to stop and did.
    Stopped,
}

/// One line.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Line {
    /// The job, in hex.
    pub job: String,
    /// Its start, in hex.
    pub start: String,
    /// Which attempt the job took it for.
    pub attempt: u32,
    /// The process it ran in.
    pub worker: u32,
    /// What happened.
    pub event: Event,
    /// When, in milliseconds of the machine's monotonic clock.
    pub at_ms: i64,
}

impl Line {
    /// The job and its start.
    pub fn execution(&self) -> (JobId, StartId) {
        (self.job.parse().expect("a ledger names jobs"), self.start.parse().expect("a ledger names starts"))
    }
}

/// A process's own file of the ledger.
#[derive(Debug)]
pub struct Ledger(Mutex<fs::File>);

impl Ledger {
    /// Opens this process's file in the directory that the environment names.
    ///
    /// # Panics
    /// When it names none that can be written in.
    pub fn of_this_process() -> Self {
        let directory = PathBuf::from(std::env::var_os(LEDGER).expect("the environment names a ledger"));
        let file = fs::OpenOptions::new().create(true).append(true).open(directory.join(std::process::id().to_string()));
        Self(Mutex::new(file.expect("the ledger can be written")))
    }

    /// Notes what happened to a job, and returns when that is on the disk.
    pub fn write(&self, job: &Context, event: Event) {
        let line = Line {
            job: job.job_id().to_string(),
            start: job.start_id().to_string(),
            attempt: job.attempt(),
            worker: std::process::id(),
            event,
            at_ms: monotonic_ms(),
        };
        let text = serde_json::to_string(&line).expect("a line is made of texts and numbers") + "\n";
        let mut file = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        file.write_all(text.as_bytes()).and_then(|()| file.sync_data()).expect("the ledger can be written");
    }
}

/// All lines of a ledger, of all processes, in the order of time. A last line that its process died in the middle of
/// cannot be: a line is one write.
pub fn read(directory: &Path) -> Vec<Line> {
    let files = fs::read_dir(directory).expect("the ledger is there").filter_map(Result::ok);
    let text = files.map(|file| fs::read_to_string(file.path()).expect("the ledger is text")).collect::<String>();
    let mut lines: Vec<Line> = text.lines().map(|line| serde_json::from_str(line).expect("the ledger is well-formed")).collect();
    lines.sort_by_key(|line| line.at_ms);
    lines
}

/// The machine's monotonic clock, in milliseconds: the same for all its processes.
pub fn monotonic_ms() -> i64 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("Linux has a monotonic clock");
    now.tv_sec() * 1_000 + now.tv_nsec() / 1_000_000
}
