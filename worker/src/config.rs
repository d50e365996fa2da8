//! What a worker can be told: the same for the stock worker and for workers of one's own.

use std::time::Duration;

use bytesize::ByteSize;
use clap::Args;
use recruiter_common::{enqueue::LONGEST_NAME, exit::Exit, roster::WorkOn};

/// How a worker works. As a clap group it gives one's own worker the flags of the stock one.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Work", about = None, long_about = None)]
pub struct WorkerArgs {
    /// Groups to work on, separated by commas or given several times; every group unless one is named
    #[arg(long, env = "RECRUITER_WORK_ON", value_name = "GROUP", value_delimiter = ',')]
    pub work_on: Vec<String>,
    /// Jobs to run at a time
    #[arg(long, env = "RECRUITER_CONCURRENCY", value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub concurrency: u32,
    /// Time limit of jobs whose workable has none of its own [default: none]
    #[arg(long, env = "RECRUITER_TIME_LIMIT", value_name = "DURATION", value_parser = humantime::parse_duration)]
    pub time_limit: Option<Duration>,
    /// Resident memory above which no more jobs are taken and the process ends with exit code 75, to be started
    /// again [default: none]
    #[arg(long, env = "RECRUITER_MEMORY_LIMIT", value_name = "SIZE")]
    pub memory_limit: Option<ByteSize>,
    /// How long running jobs may go on after TERM, INT or HUP; then they are interrupted. Keep systemd's TimeoutStopSec
    /// above it
    #[arg(long, env = "RECRUITER_GRACE", value_name = "DURATION", default_value = "30s", value_parser = humantime::parse_duration)]
    pub grace: Duration,
    /// Heartbeat interval
    #[arg(long, env = "RECRUITER_HEARTBEAT", value_name = "DURATION", default_value = "5s", value_parser = humantime::parse_duration)]
    pub heartbeat: Duration,
    /// How long this worker trusts itself to be alive after a heartbeat; cleaners wait longer before they retire it
    #[arg(long, env = "RECRUITER_WORKER_LEASE", value_name = "DURATION", default_value = "20s", value_parser = humantime::parse_duration)]
    pub lease: Duration,
    /// A job starts within this time even if every hint is lost: the recruiter and the worker each look twice as often
    #[arg(long, env = "RECRUITER_POLL", value_name = "DURATION", default_value = "1s", value_parser = humantime::parse_duration)]
    pub poll: Duration,
}

impl WorkerArgs {
    /// Checks what single flags cannot know of each other.
    ///
    /// # Errors
    /// With what to change, and [`Exit::Usage`].
    pub fn validate(&self) -> anyhow::Result<()> {
        let refuse = |text: String| Err(anyhow::anyhow!(text).context(Exit::Usage));
        if self.heartbeat.is_zero() || self.poll.is_zero() {
            return refuse("--heartbeat and --poll must be above zero".into());
        }
        if self.lease < self.heartbeat * 3 {
            return refuse(format!(
                "--lease ({}) must be at least three heartbeats (--heartbeat {}), or one slow answer would stop the work",
                humantime::format_duration(self.lease),
                humantime::format_duration(self.heartbeat)
            ));
        }
        if self.lease > Duration::from_secs(24 * 3600) {
            return refuse("--lease must be at most a day: nobody would notice a death before".into());
        }
        match self.work_on.iter().find(|group| group.is_empty() || group.len() > LONGEST_NAME || group.contains('\0')) {
            Some(group) => refuse(format!("--work-on: {group:?} cannot be the name of a group (1 to {LONGEST_NAME} bytes, no NUL)")),
            None => Ok(()),
        }
    }

    /// The groups, with `*` for all.
    pub(crate) fn work_on(&self) -> WorkOn {
        if self.work_on.is_empty() || self.work_on.iter().any(|group| group == "*") {
            WorkOn::All
        } else {
            WorkOn::Groups(self.work_on.clone())
        }
    }
}
