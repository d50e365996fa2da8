//! The recruiter process: lead, assign round after round, sleep until something may have changed.
//!
//! What wakes it: a hint, the next scheduled job becoming due, or the poll fallback when every hint is lost.

use std::time::{Duration, Instant as Monotonic};

use clap::Args;
use recruiter_common::{
    exit::Exit,
    instant::Instant,
    roster::Place,
    shutdown::{Shutdown, Wake, pause},
    store::{ConnectArgs, Hint, Hints, Listener, Store, StoreError},
    task::as_task,
    telemetry::chain,
};

use crate::{
    leadership::Leadership,
    round::{self, Look, Memory},
};

/// How much rarer everything is looked at, at most, when that takes long: with thousands of groups it would be all that is done.
const RARER: u32 = 3;
/// After a round that MongoDB did not carry out.
const RETRY: Duration = Duration::from_millis(500);

/// How the recruiter runs.
#[derive(Args, Clone, Debug)]
pub struct RunArgs {
    /// How long a silent leader is waited for before a standby takes over
    #[arg(long, env = "RECRUITER_LEASE", value_name = "DURATION", default_value = "15s", value_parser = humantime::parse_duration)]
    pub lease: Duration,
    /// A due job is started within this time even if every hint is lost: recruiter and worker each look twice as often
    #[arg(long, env = "RECRUITER_POLL", value_name = "DURATION", default_value = "1s", value_parser = humantime::parse_duration)]
    pub poll: Duration,
}

impl RunArgs {
    fn validate(&self) -> anyhow::Result<()> {
        let refuse = |text: &str| Err(anyhow::anyhow!(text.to_owned()).context(Exit::Usage));
        if self.poll.is_zero() {
            return refuse("--poll must be above zero");
        }
        if self.lease < self.poll * 3 || self.lease < Duration::from_secs(1) {
            return refuse("--lease must be at least a second and three times --poll, or the leader could not renew it in time");
        }
        Ok(())
    }
}

/// Runs until asked to stop.
///
/// # Errors
/// When the arguments contradict each other or MongoDB cannot be used at the start. Later MongoDB is waited for.
pub async fn run(args: RunArgs, connect: &ConnectArgs, mut shutdown: Shutdown) -> anyhow::Result<()> {
    args.validate()?;
    let store = tokio::select! {
        connected = Store::connect(connect, "recruiter") => connected?,
        () = shutdown.requested() => return Ok(()),
    };
    let here = Place::of_this_process()?;
    let holder_at = format!("{}:{}", here.hostname, here.pid);
    as_task(async move {
        while let Some(leadership) = Leadership::acquire(&store, args.lease, &holder_at, &mut shutdown).await {
            lead(&store, &args, leadership, &mut shutdown).await;
        }
    })
    .await;
    recruiter_common::service::stopping();
    Ok(())
}

/// Assigns until asked to stop or until another leads.
async fn lead(store: &Store, args: &RunArgs, mut leadership: Leadership, shutdown: &mut Shutdown) {
    let term = leadership.term();
    tracing::info!(lease.term = %term, "leading");
    let mut hints = store.hints(Listener::Recruiter);
    let mut memory = match prepare(store, &leadership).await {
        Ok(memory) => memory,
        Err(error) => {
            tracing::warn!(error = chain(&error), "could not begin the term; standing back");
            leadership.release(store).await;
            shutdown.sleep(RETRY).await;
            return;
        }
    };
    recruiter_common::service::ready("leading");
    let mut look = Look::default();
    let mut thorough_at = Monotonic::now();
    loop {
        if shutdown.is_requested() {
            leadership.release(store).await;
            return;
        }
        if leadership.renew_in().is_zero() && !renewed(store, &mut leadership, &mut memory).await {
            return;
        }
        if !leadership.is_trusted() {
            // Nobody may lead, or somebody else: the next renewal tells. Until then nothing is assigned.
            shutdown.sleep(RETRY).await;
            continue;
        }
        let before = Monotonic::now();
        look.thorough |= before >= thorough_at;
        look.workers |= look.thorough && !hints.is_listening();
        let thorough = look.thorough;
        if let Err(error) = store.fresh_clock().await {
            tracing::debug!(error = chain(&error), "the server's clock could not be read");
        }
        let tick = round::tick(store, term, &mut memory, store.now(), std::mem::take(&mut look)).await;
        let due = match tick {
            Ok(summary) => {
                let duration_ms = before.elapsed().as_millis();
                match summary.assigned {
                    0 => tracing::trace!(places = summary.places, duration_ms, "nothing to assign"),
                    count => tracing::debug!(count, places = summary.places, duration_ms, "assigned jobs"),
                }
                if thorough {
                    let every = look_every(args.poll, hints.is_listening(), before.elapsed());
                    store.announce_hints_to(memory.beats(every)).await;
                    // A little sooner than the beat has promised, also while hints come without a pause.
                    thorough_at = Monotonic::now() + every.mul_f64(rand::random_range(0.85..0.95));
                }
                summary.next_due
            }
            Err(error) => {
                tracing::warn!(error = chain(&error), "a round was not completed; trying again");
                memory.doubt();
                thorough_at = Monotonic::now();
                if shutdown.sleep(RETRY).await == Wake::Stop {
                    continue;
                }
                None
            }
        };
        let until = thorough_at.min(Monotonic::now() + leadership.renew_in());
        look = wait(store, &mut hints, &mut memory, due, until, shutdown).await;
    }
}

/// How often everything is looked at.
fn look_every(poll: Duration, is_listening: bool, took: Duration) -> Duration {
    // Who is heard need not be asked so often.
    let wanted = if is_listening { poll } else { poll / 2 };
    wanted.max((took * RARER).min(poll * RARER))
}

/// Stamps the term on the roster and learns what an earlier leader has assigned.
async fn prepare(store: &Store, leadership: &Leadership) -> Result<Memory, StoreError> {
    store.stamp_term(leadership.term()).await?;
    if let Err(error) = store.drop_outdated_indexes().await {
        tracing::warn!(error = chain(&error), "the indexes of an earlier release could not be dropped; the next leader tries again");
    }
    let mut memory = Memory::default();
    for (round, assignment) in store.assigned_and_not_taken().await? {
        memory.in_flight.insert(round, assignment);
    }
    Ok(memory)
}

/// Renews the lease; false when another leads by now.
async fn renewed(store: &Store, leadership: &mut Leadership, memory: &mut Memory) -> bool {
    match leadership.renew(store).await {
        Ok(false) => {
            tracing::warn!(lease.term = %leadership.term(), "another recruiter leads; standing by");
            return false;
        }
        Ok(true) => {
            // Whoever has lost the stamp again, to a failover or to a hand, is not left out for long.
            if let Err(error) = store.stamp_term(leadership.term()).await {
                tracing::debug!(error = chain(&error), "the term could not be stamped; trying again");
            }
            if let Ok(channels) = store.channels().await {
                memory.channels = channels;
            }
        }
        Err(error) => {
            tracing::warn!(error = chain(&error), trusted = leadership.is_trusted(), "the lease was not renewed; trying again");
            pause(RETRY).await;
        }
    }
    true
}

/// Sleeps until a hint, the next job becoming due, or the poll fallback.
async fn wait(
    store: &Store,
    hints: &mut Hints,
    memory: &mut Memory,
    mut due: Option<Instant>,
    until: Monotonic,
    shutdown: &mut Shutdown,
) -> Look {
    loop {
        // One millisecond more than the estimate, which is whole milliseconds.
        let until_due = due.map_or(Duration::MAX, |due| (due - store.now()).to_std().unwrap_or_default() + Duration::from_millis(1));
        let until_poll = until.saturating_duration_since(Monotonic::now());
        let by_due = until_due < until_poll;
        let hint = tokio::select! {
            hint = hints.next() => hint,
            () = pause(until_due.min(until_poll)) => return Look { thorough: !by_due, jobs: true, ..Look::default() },
            () = shutdown.requested() => return Look::default(),
        };
        let mut look = Look::default();
        let mut next = Some(hint);
        while let Some(hint) = next {
            match hint {
                Hint::Jobs { groups, at: None, jobs } => {
                    if jobs.is_empty() {
                        look.jobs |= groups.is_empty();
                        look.groups.extend(groups.iter().cloned());
                    }
                    memory.groups.extend(groups);
                    look.announced.extend(jobs);
                }
                Hint::Jobs { groups, at: Some(at), .. } => {
                    memory.groups.extend(groups);
                    memory.due_later(at);
                    due = Some(due.map_or(at, |due| due.min(at)));
                }
                Hint::Left { worker } => {
                    memory.left(worker);
                    look.jobs = true;
                }
                Hint::Free => look.workers = true,
                Hint::Seed => look = Look { workers: true, jobs: true, ..look },
                Hint::Assigned { .. } | Hint::Cancel { .. } | Hint::Beat { .. } => {}
            }
            next = hints.try_next();
        }
        if look.workers || look.jobs || !look.groups.is_empty() || !look.announced.is_empty() {
            return look;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_look_that_takes_long_is_taken_less_often() {
        let check = |is_listening, took| look_every(Duration::from_millis(1_000), is_listening, Duration::from_millis(took)).as_millis();
        assert_eq!(check(true, 5), 1_000);
        assert_eq!(check(false, 5), 500, "nothing is heard");
        assert_eq!(check(true, 600), 1_800);
        assert_eq!(check(true, 60_000), 3_000, "and not for ever");
        assert_eq!(check(false, 60_000), 3_000);
    }
}
