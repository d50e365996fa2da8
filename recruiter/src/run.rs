//! The recruiter process: wait for the lease, lead as long as it is held, stand by again.

use std::{env, path::PathBuf, time::Duration};

use clap::Args;
use recruiter_common::{
    exit::Exit,
    flags::variable,
    monitoring::MetricsArgs,
    service::Watchdog,
    shutdown::Shutdown,
    store::{ConnectArgs, HintsAddress, HintsAt, ProcessIdentity, Store},
    task::as_task,
};

use crate::leader::{Leadership, Meters, lead};

/// The arguments of `run`.
#[derive(Args, Clone, Debug)]
pub struct RunArgs {
    /// Time without a renewal of the lease, after which a standby takes over
    #[arg(long, env = "RECRUITER_LEASE", value_name = "DURATION", default_value = "15s", value_parser = humantime::parse_duration)]
    pub lease: Duration,
    /// Interval of full scans; a due job starts within two intervals even if hints are lost
    #[arg(long, env = "RECRUITER_POLL", value_name = "DURATION", default_value = "1s", value_parser = humantime::parse_duration)]
    pub poll: Duration,
    /// Directory of a Unix socket over which processes of this machine exchange hints. Without a directory all hints go through MongoDB
    /// [default: $RUNTIME_DIRECTORY of the service manager]
    #[arg(long, env = "RECRUITER_HINTS_DIRECTORY", value_name = "DIR")]
    pub hints_directory: Option<PathBuf>,
    /// Address at which processes of other machines exchange hints over TCP, in a network that you trust: hints are not encrypted. If the
    /// host stands for every address (0.0.0.0), others connect to this machine's name
    #[arg(long, env = "RECRUITER_HINTS_ADDRESS", value_name = "HOST:PORT")]
    pub hints_address: Option<HintsAddress>,
    /// Where metrics are served.
    #[command(flatten)]
    pub metrics: MetricsArgs,
}

impl RunArgs {
    pub(crate) fn validate(&self) -> anyhow::Result<()> {
        let refuse = |text: &str| Err(anyhow::anyhow!(text.to_owned()).context(Exit::Usage));
        if self.poll.is_zero() {
            return refuse("--poll must be above zero");
        }
        if self.lease < self.poll * 3 || self.lease < Duration::from_secs(1) {
            return refuse("--lease must be at least 1s and at least three times --poll, so that the leader can renew it in time");
        }
        Ok(())
    }
}

/// Runs until a stop is requested.
///
/// # Errors
/// When the arguments contradict each other or MongoDB cannot be used at the start. Later the process waits for MongoDB.
pub async fn run(args: RunArgs, connect: &ConnectArgs, mut shutdown: Shutdown) -> anyhow::Result<()> {
    args.validate()?;
    let monitoring = args.metrics.serve("recruiter").await?;
    let store = tokio::select! {
        connected = Store::connect(connect, "recruiter") => connected?,
        () = shutdown.requested() => return Ok(()),
    };
    let here = ProcessIdentity::of_this_process()?;
    let holder_at = format!("{}:{}", here.hostname, here.pid);
    let watchdog = Watchdog::of_this_process();
    let directory = args.hints_directory.or_else(|| env::split_paths(&variable("RUNTIME_DIRECTORY")?).next());
    let hints_at = HintsAt { directory, address: args.hints_address };
    let mut meters = Meters::new(monitoring.is_some());
    as_task(async move {
        while let Some(leadership) = Leadership::acquire(&store, args.lease, &holder_at, &watchdog, &mut shutdown).await {
            lead(&store, args.poll, &hints_at, leadership, &watchdog, &mut meters, &mut shutdown).await;
        }
    })
    .await;
    recruiter_common::service::stopping();
    Ok(())
}
