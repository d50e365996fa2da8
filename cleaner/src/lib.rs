//! The cleaner: retires dead workers, rescues their jobs, archives expired jobs, and prunes the archive.
//!
//! `main.rs` calls it. Several cleaners may run, on several machines: every write is guarded and can be repeated. The
//! cleaner does not ask the retry policy of a job: the worker has stored its answer to the death of the worker when it
//! started the job.
//!
//! | file | content |
//! |---|---|
//! | `cli`, `config` | the command line, and the flags of the cleaning |
//! | `liveness`, `retire` | who is dead: silent for too long, or gone from this host; its document is retired |
//! | `rescues`, `rescue` | the jobs of each dead worker are ended, beside each other; the sweep for jobs without a worker |
//! | `expire` | expired jobs are archived, and successors whose predecessor is gone are released |
//! | `retention`, `files` | what is deleted of the archive, and files without a job |
//! | `meters` | what is measured |

pub mod cli;
pub mod config;
mod expire;
mod files;
mod liveness;
mod meters;
mod rescue;
mod rescues;
mod retention;
mod retire;

use std::{
    sync::Arc,
    time::{Duration, Instant as Monotonic},
};

use bson::oid::ObjectId;
use recruiter_common::{
    job::FinishReason,
    service::Watchdog,
    shutdown::{Shutdown, Wake, pause},
    store::{CleanerNote, ConnectArgs, NOTED_EVERY, ProcessIdentity, Store, StoreError, WalkStep},
    telemetry::{chain, milliseconds},
};

use crate::{
    config::CleanerArgs,
    expire::Expiry,
    files::Files,
    meters::{DutyMeters, Meters},
    rescue::{Rescuer, Sweep},
    retention::Retention,
    retire::Observations,
};

/// How often to check whether the workers on this machine still run. The check does not use MongoDB.
const NEIGHBOURS_EVERY: Duration = Duration::from_millis(200);
/// How long the counts of deleted successes stay: longer than the period of `recruiter stats`.
const NOT_KEPT_FOR: chrono::TimeDelta = chrono::TimeDelta::minutes(10);
/// Maximum interval between searches for expired jobs.
const EXPIRE_EVERY: Duration = Duration::from_secs(5);
/// How long one pass of a duty begins further steps.
const PASS: Duration = Duration::from_millis(500);
/// Minimum wait after a poll that failed in MongoDB.
const RETRY: Duration = Duration::from_secs(1);
/// How long the present steps may take when a stop is requested: less than `TimeoutStopSec=` of the unit. What is not done then is repeated
/// by the next cleaner, as after a kill.
const STOP_WITHIN: Duration = Duration::from_secs(10);

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
    tokio::select! {
        () = clean(&args, &store, here, shutdown.clone()) => {}
        () = async { shutdown.requested().await; pause(STOP_WITHIN).await } => {
            tracing::warn!("MongoDB is slow: the present steps are left to the next cleaner");
        }
    }
    recruiter_common::service::stopping();
    Ok(())
}

/// The main loop. It begins no step when a stop is requested.
async fn clean(args: &CleanerArgs, store: &Store, here: ProcessIdentity, mut shutdown: Shutdown) {
    let note = CleanerNote { id: ObjectId::new(), process: here.clone(), keeps: args.periods().to_string() };
    let mut observations = Observations::new(here);
    let watchdog = Watchdog::of_this_process();
    let meters = Arc::new(Meters::new());
    let mut rescuer = Rescuer::new(store.clone(), watchdog.clone(), meters.clone(), shutdown.clone());
    let now = Monotonic::now();
    let (mut sweep_at, mut prune_at, mut expire_at, mut note_at) = (now, now, now, now);
    for (reason, _) in args.keep_reason.iter().filter(|(reason, _)| FinishReason::BUILT_IN.iter().all(|other| other.as_str() != reason)) {
        tracing::warn!(reason, "--keep-reason names a finish reason that is not built in; only custom retry policies have such");
    }
    let (mut retention, mut files) = (Retention::new(&args.periods()), Files::default());
    let (mut sweep, mut expiry) = (Sweep::default(), Expiry::default());
    // After the first poll, and after each poll that retired a worker, the next one follows after half the interval:
    // workers that have just registered or restarted are not observed yet.
    let mut is_first = true;
    recruiter_common::service::ready("watching");
    tracing::info!(dead_after_ms = milliseconds(args.dead_after), "watching the heartbeats of the workers");
    while !shutdown.is_requested() {
        let pass = || Pass::begin(&meters, &shutdown);
        let began = Monotonic::now();
        let polled = retire::tick(store, &mut rescuer, &mut observations, args.dead_after, &shutdown).await;
        meters.poll.passed(began.elapsed(), polled.is_err());
        if let Err(error) = &polled {
            observations.clear();
            tracing::warn!(error = chain(error), "the poll of the roster failed; trying again");
        }
        if Monotonic::now() >= sweep_at && is_over(sweep.tick(store, &mut rescuer, &pass()), &meters.sweep, "the sweep").await {
            sweep_at = Monotonic::now() + args.sweep_every;
        }
        rescuer.progress();
        if Monotonic::now() >= expire_at && is_over(expiry.tick(store, &pass()), &meters.expiry, "the archiving of expired jobs").await {
            expire_at = Monotonic::now() + args.sweep_every.min(EXPIRE_EVERY);
        }
        rescuer.progress();
        if Monotonic::now() >= prune_at
            && is_over(prune(store, &mut retention, &mut files, &pass()), &meters.pruning, "the pruning of the archive").await
        {
            prune_at = Monotonic::now() + args.prune_every;
        }
        if Monotonic::now() >= note_at {
            note_at = Monotonic::now() + NOTED_EVERY;
            if let Err(error) = store.note_cleaner(&note).await {
                tracing::warn!(error = chain(&error), "the note of this cleaner could not be written; trying again later");
            }
        }
        match polled {
            Ok(has_retired) => {
                let every = if has_retired || std::mem::take(&mut is_first) { args.every / 2 } else { args.every };
                wait(every, &observations, &mut rescuer, &mut shutdown).await
            }
            Err(_) => drop(shutdown.sleep(args.every.min(watchdog.next_in()).max(RETRY)).await),
        }
    }
    rescuer.end().await;
    // Another cleaner deletes it in a day.
    if let Err(error) = store.forget_cleaner(note.id).await {
        tracing::debug!(error = chain(&error), "the note of this cleaner stays");
    }
}

/// Waits until the next poll of the roster. Ends early when the process of a worker on this machine is gone.
async fn wait(every: Duration, observations: &Observations, rescuer: &mut Rescuer, shutdown: &mut Shutdown) {
    let until = Monotonic::now() + every;
    while Monotonic::now() < until && !observations.has_lost_a_neighbour() {
        rescuer.progress();
        let left = until.saturating_duration_since(Monotonic::now());
        if shutdown.sleep(left.min(NEIGHBOURS_EVERY)).await == Wake::Stop {
            return;
        }
    }
}

/// Runs a pass of a duty. Returns whether the duty is done for now: this pass has left nothing, or has failed.
async fn is_over(pass: impl Future<Output = Result<bool, StoreError>>, meters: &DutyMeters, duty: &str) -> bool {
    let began = Monotonic::now();
    let passed = pass.await;
    meters.passed(began.elapsed(), passed.is_err());
    passed.unwrap_or_else(|error| {
        tracing::warn!(error = chain(&error), "{duty} failed; trying again later");
        true
    })
}

/// Deletes archived jobs whose period of retention has passed, and files without a job. Returns whether none are left.
async fn prune(store: &Store, retention: &mut Retention, files: &mut Files, pass: &Pass<'_>) -> Result<bool, StoreError> {
    store.prune_not_kept(store.now() - NOT_KEPT_FOR).await?;
    let all = retention.tick(store, pass).await?;
    let is_over = files.tick(store, pass).await? && all;
    if is_over {
        *files = Files::default();
    }
    Ok(is_over)
}

/// One pass of a duty. It ends after a while, or when a stop is requested. Between two passes the cleaner polls the roster.
struct Pass<'a> {
    until: Monotonic,
    meters: &'a Meters,
    shutdown: &'a Shutdown,
}

impl<'a> Pass<'a> {
    fn begin(meters: &'a Meters, shutdown: &'a Shutdown) -> Self {
        Self { until: Monotonic::now() + PASS, meters, shutdown }
    }

    /// The steps of one part of the duty: one, and further ones while there is time. None at a stop.
    fn steps(&self) -> impl Iterator<Item = u32> {
        (0..).take_while(|step| !self.shutdown.is_requested() && (*step == 0 || Monotonic::now() < self.until))
    }

    /// Goes on with a walk over an index. Returns the number of deleted documents, and whether the walk is at its end. After an error the
    /// position is that of the last step.
    async fn walk<P: Copy, F>(&self, position: &mut Option<P>, step: impl Fn(Option<P>) -> F) -> Result<(u64, bool), StoreError>
    where
        F: Future<Output = Result<WalkStep<P>, StoreError>>,
    {
        let mut count = 0;
        for _ in self.steps() {
            let WalkStep { deleted, next } = step(*position).await?;
            count += deleted;
            *position = next;
            if next.is_none() {
                return Ok((count, true));
            }
        }
        Ok((count, false))
    }
}
