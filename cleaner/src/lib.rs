//! The cleaner: retires dead workers, rescues what they held, and prunes the archive.
//!
//! Called by the binary beside it. Several may run, on several machines; everything they do is guarded and can be
//! repeated. A cleaner never decides what becomes of a job: its retry policy did, when the job was started.

pub mod config;
mod liveness;
mod prune;
mod rescue;
mod retire;

use std::time::{Duration, Instant as Monotonic};

use recruiter_common::{
    roster::Place,
    shutdown::{Shutdown, Wake},
    store::{ConnectArgs, Store},
    telemetry::chain,
};

use crate::{config::CleanerArgs, rescue::Rescuer, retire::Observations};

/// After a pass that MongoDB did not carry out.
const RETRY: Duration = Duration::from_secs(1);

/// Runs until asked to stop.
///
/// # Errors
/// When the arguments contradict each other or MongoDB cannot be used at the start. Later MongoDB is waited for.
pub async fn run(args: CleanerArgs, connect: &ConnectArgs, mut shutdown: Shutdown) -> anyhow::Result<()> {
    args.validate()?;
    let store = tokio::select! {
        connected = Store::connect(connect, "recruiter-cleaner") => connected?,
        () = shutdown.requested() => return Ok(()),
    };
    let here = Place::of_this_process()?;
    let mut observations = Observations::new(here);
    let mut rescuer = Rescuer::new(store.clone());
    let (mut last_sweep, mut last_prune) = (None, None);
    recruiter_common::service::ready("watching");
    tracing::info!(dead_after = %humantime::format_duration(args.dead_after), "watching over the workers");
    while !shutdown.is_requested() {
        let pass = pass(&store, &args, &mut observations, &mut rescuer, &mut last_sweep, &mut last_prune, &mut shutdown).await;
        let pause = match pass {
            Ok(()) => args.every,
            Err(error) => {
                tracing::warn!(error = chain(&error), "a pass was not completed; trying again");
                RETRY
            }
        };
        if shutdown.sleep(pause).await == Wake::Stop {
            break;
        }
    }
    recruiter_common::service::stopping();
    Ok(())
}

/// Everything that is due now.
async fn pass(
    store: &Store,
    args: &CleanerArgs,
    observations: &mut Observations,
    rescuer: &mut Rescuer,
    last_sweep: &mut Option<Monotonic>,
    last_prune: &mut Option<Monotonic>,
    shutdown: &mut Shutdown,
) -> Result<(), recruiter_common::store::StoreError> {
    retire::tick(store, rescuer, observations, args.dead_after).await?;
    if is_due(last_sweep, args.sweep_every) {
        store.refresh_clock().await?;
        rescue::sweep(store, rescuer, shutdown).await?;
        *last_sweep = Some(Monotonic::now());
    }
    if is_due(last_prune, args.prune_every) {
        let before = store.now() - chrono::TimeDelta::from_std(args.keep_archived).unwrap_or(chrono::TimeDelta::MAX / 2);
        prune::tick(store, before, shutdown).await?;
        *last_prune = Some(Monotonic::now());
    }
    Ok(())
}

fn is_due(last: &Option<Monotonic>, every: Duration) -> bool {
    last.is_none_or(|last| last.elapsed() >= every)
}
