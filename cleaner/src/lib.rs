//! The cleaner: retires dead workers, rescues their jobs, archives expired jobs, and prunes the archive.
//!
//! `main.rs` calls it. Several cleaners may run, on several machines: every write is guarded and can be repeated. The
//! cleaner never decides the outcome of a job: the worker stored the verdict of the job's retry policy when it started
//! the job.

pub mod config;
mod expire;
mod files;
mod liveness;
mod prune;
mod rescue;
mod retention;
mod retire;

use std::time::{Duration, Instant as Monotonic};

use recruiter_common::{
    job::FinishReason,
    roster::ProcessIdentity,
    service::Watchdog,
    shutdown::{Shutdown, Wake},
    store::{CommitSession, ConnectArgs, Store, StoreError},
    telemetry::{chain, milliseconds},
};

use crate::{config::CleanerArgs, files::Files, rescue::Rescuer, retention::Retention, retire::Observations};

/// How often to check whether the workers on this machine still run. The check does not use MongoDB.
const NEIGHBOURS_EVERY: Duration = Duration::from_millis(200);
/// How long the counts of deleted successes stay: longer than the period of `recruiter stats`.
const NOT_KEPT_FOR: chrono::TimeDelta = chrono::TimeDelta::minutes(10);
/// Maximum interval between searches for expired jobs.
const EXPIRE_EVERY: Duration = Duration::from_secs(5);
/// Minimum wait after a poll that failed in MongoDB.
const RETRY: Duration = Duration::from_secs(1);

/// Runs until a stop is requested.
///
/// # Errors
/// When the arguments contradict each other, or when MongoDB cannot be used at the start. Later it waits for MongoDB.
pub async fn run(args: CleanerArgs, connect: &ConnectArgs, mut shutdown: Shutdown) -> anyhow::Result<()> {
    args.validate()?;
    let store = tokio::select! {
        connected = Store::connect(connect, "recruiter-cleaner") => connected?,
        () = shutdown.requested() => return Ok(()),
    };
    let here = ProcessIdentity::of_this_process()?;
    let mut observations = Observations::new(here);
    let watchdog = Watchdog::of_this_process();
    let mut rescuer = Rescuer::new(store.clone(), watchdog.clone());
    let (mut sweep_at, mut prune_at, mut expire_at) = (Monotonic::now(), Monotonic::now(), Monotonic::now());
    for (reason, _) in args.keep_reason.iter().filter(|(reason, _)| FinishReason::BUILT_IN.iter().all(|other| other.as_str() != reason)) {
        tracing::warn!(reason, "--keep-reason names a finish reason that is not built in; only custom retry policies have such");
    }
    let (mut retention, mut files) = (Retention::new(&args.periods()), Files::default());
    let mut session = CommitSession::default();
    // After the first poll, and after each poll that retired a worker, the next one follows after half the interval:
    // workers that have just registered or restarted are not observed yet.
    let mut is_first = true;
    recruiter_common::service::ready("watching");
    tracing::info!(dead_after_ms = milliseconds(args.dead_after), "watching the heartbeats of the workers");
    while !shutdown.is_requested() {
        watchdog.progress();
        let polled = retire::tick(&store, &mut rescuer, &mut observations, args.dead_after).await;
        if let Err(error) = &polled {
            observations.clear();
            tracing::warn!(error = chain(error), "the poll of the roster failed; trying again");
        }
        if Monotonic::now() >= sweep_at {
            sweep_at = Monotonic::now() + args.sweep_every;
            if let Err(error) = rescue::sweep(&store, &mut rescuer, &shutdown).await {
                tracing::warn!(error = chain(&error), "the sweep failed; trying again later");
            }
        }
        watchdog.progress();
        if Monotonic::now() >= expire_at {
            expire_at = Monotonic::now() + args.sweep_every.min(EXPIRE_EVERY);
            if let Err(error) = expire::tick(&store, &mut session, &shutdown).await {
                tracing::warn!(error = chain(&error), "expired jobs were not archived; trying again later");
            }
        }
        watchdog.progress();
        if Monotonic::now() >= prune_at {
            match prune(&store, &mut retention, &mut files, &shutdown).await {
                Ok(true) => prune_at = Monotonic::now() + args.prune_every,
                Ok(false) => {}
                Err(error) => {
                    prune_at = Monotonic::now() + args.prune_every;
                    tracing::warn!(error = chain(&error), "the archive was not pruned; trying again later");
                }
            }
        }
        match polled {
            Ok(has_retired) => {
                let every = if has_retired || std::mem::take(&mut is_first) { args.every / 2 } else { args.every };
                wait(every, &observations, &watchdog, &mut shutdown).await
            }
            Err(_) => drop(shutdown.sleep(args.every.min(watchdog.next_in()).max(RETRY)).await),
        }
    }
    recruiter_common::service::stopping();
    Ok(())
}

/// Waits until the next poll of the roster. Ends early when the process of a worker on this machine is gone.
async fn wait(every: Duration, observations: &Observations, watchdog: &Watchdog, shutdown: &mut Shutdown) {
    let until = Monotonic::now() + every;
    while Monotonic::now() < until && !observations.has_lost_a_neighbour() {
        watchdog.progress();
        let left = until.saturating_duration_since(Monotonic::now());
        if shutdown.sleep(left.min(NEIGHBOURS_EVERY)).await == Wake::Stop {
            return;
        }
    }
}

/// Deletes archived jobs whose period of retention has passed, and files without a job. Returns whether none are left.
async fn prune(store: &Store, retention: &mut Retention, files: &mut Files, shutdown: &Shutdown) -> Result<bool, StoreError> {
    store.prune_not_kept(store.now() - NOT_KEPT_FOR).await?;
    let all = retention.tick(store, shutdown).await?;
    Ok(files.tick(store, shutdown).await? && all)
}
