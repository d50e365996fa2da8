//! One term of leadership: round after round of assigning, and in between the wait for something that may have changed.
//!
//! | module | what it is |
//! |---|---|
//! | `trigger` | what makes a round necessary |
//! | `fleet` | workers with free slots |
//! | `discover` | which lanes have jobs |
//! | `lanes` | the jobs that are known to be due, and when that knowledge is stale |
//! | `in_flight` | assigned, and not seen taken |
//! | `refusals` | assigned, and not started |
//! | `plan` | which worker gets which job |
//! | `assign` | one round |
//! | `keep_alive` | what idle workers are told |

mod assign;
mod discover;
mod fleet;
mod in_flight;
mod keep_alive;
mod lanes;
mod plan;
mod refusals;
mod trigger;

use std::time::{Duration, Instant as Monotonic};

use recruiter_common::{
    ids::LeaseTerm,
    instant::Instant,
    service::Watchdog,
    shutdown::{Shutdown, pause},
    store::{Hints, Listener, Store, StoreError},
    telemetry::chain,
};

use self::{
    assign::{Assigning, Summary},
    trigger::Trigger,
};
use crate::leadership::Leadership;

/// How much rarer full scans become, at most, when they take long: with thousands of groups they would be all that is done.
const RARER: u32 = 3;
/// After a round that MongoDB did not carry out.
const RETRY: Duration = Duration::from_millis(500);

/// Assigns until asked to stop or until another recruiter leads. A full scan is due after each `poll`.
pub(crate) async fn lead(store: &Store, poll: Duration, mut leadership: Leadership, watchdog: &Watchdog, shutdown: &mut Shutdown) {
    let term = leadership.term();
    tracing::info!(lease.term = term.0, "leading");
    let mut hints = store.hints(Listener::Recruiter);
    let mut assigning = match prepare(store, &leadership).await {
        Ok(assigning) => assigning,
        Err(error) => {
            tracing::warn!(error = chain(&error), "could not begin the term; standing back");
            leadership.release(store).await;
            shutdown.sleep(RETRY).await;
            return;
        }
    };
    recruiter_common::service::ready("leading");
    let mut trigger = Trigger::default();
    let mut is_failing = false;
    let (mut scan_at, mut every) = (Monotonic::now(), poll);
    loop {
        watchdog.progress();
        if shutdown.is_requested() {
            leadership.release(store).await;
            return;
        }
        if leadership.renew_in().is_zero() && !renewed(store, &mut leadership, &mut assigning).await {
            return;
        }
        if !leadership.is_trusted() {
            // No recruiter may lead, or another one does: the next renewal tells. Until then nothing is assigned.
            shutdown.sleep(RETRY).await;
            continue;
        }
        let began = Monotonic::now();
        trigger.full_scan |= began >= scan_at;
        trigger.look_in(assigning.alarms.ring(store.now()));
        if let Err(error) = store.fresh_clock().await {
            tracing::debug!(error = chain(&error), "the server's clock could not be read");
        }
        let is_full_scan = trigger.full_scan;
        let summary = match assigning.tick(store, term, std::mem::take(&mut trigger), every).await {
            Ok(summary) => summary,
            Err(error) => {
                tracing::warn!(error = chain(&error), "a round failed; trying again");
                is_failing = true;
                assigning.forget();
                scan_at = Monotonic::now();
                shutdown.sleep(RETRY).await;
                continue;
            }
        };
        if std::mem::take(&mut is_failing) {
            tracing::info!("rounds work again");
        }
        log(&summary, began.elapsed());
        if is_full_scan {
            every = scan_every(poll, hints.is_listening(), began.elapsed());
            store.announce_hints_to(assigning.keep_alive.hints(every, Monotonic::now())).await;
            // A little sooner than the keep-alives have promised, also while hints come without a pause.
            scan_at = Monotonic::now() + every.mul_f64(rand::random_range(0.85..0.95));
        }
        let until = scan_at.min(Monotonic::now() + leadership.renew_in().min(watchdog.next_in()));
        let until = summary.look_again_at.map_or(until, |again| until.min(again));
        trigger = wait(store, &mut hints, &mut assigning, summary.next_due, until, shutdown).await;
    }
}

/// One round of a leader that knows nothing yet; says how many jobs it assigned.
pub(crate) async fn assign_once(store: &Store, term: LeaseTerm) -> Result<usize, StoreError> {
    Ok(Assigning::default().tick(store, term, Trigger::default(), Duration::from_secs(1)).await?.assigned)
}

fn log(summary: &Summary, took: Duration) {
    let Summary { assigned, slots, .. } = *summary;
    let duration_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
    match assigned {
        0 => tracing::trace!(slots, duration_ms, "nothing to assign"),
        count => tracing::debug!(count, slots, duration_ms, "assigned jobs"),
    }
}

/// How long after a full scan the next one is due.
fn scan_every(poll: Duration, is_listening: bool, took: Duration) -> Duration {
    // While no hints are heard, scans stand in for them.
    let wanted = if is_listening { poll } else { poll / 2 };
    wanted.max((took * RARER).min(poll * RARER))
}

/// Stamps the term on the roster and learns what an earlier leader has assigned.
async fn prepare(store: &Store, leadership: &Leadership) -> Result<Assigning, StoreError> {
    store.stamp_term(leadership.term()).await?;
    if let Err(error) = store.drop_outdated_indexes().await {
        tracing::warn!(error = chain(&error), "the indexes of an earlier release could not be dropped; the next leader tries again");
    }
    let mut assigning = Assigning::default();
    for (round, assignment) in store.assigned_and_not_taken().await? {
        assigning.inherit(round, assignment);
    }
    Ok(assigning)
}

/// Renews the lease; false when another recruiter leads by now.
async fn renewed(store: &Store, leadership: &mut Leadership, assigning: &mut Assigning) -> bool {
    match leadership.renew(store).await {
        Ok(false) => {
            tracing::warn!(lease.term = leadership.term().0, "another recruiter leads; standing by");
            return false;
        }
        Ok(true) => {
            // A worker that has lost the stamp, to a failover or to a hand, is not left out for long.
            if let Err(error) = store.stamp_term(leadership.term()).await {
                tracing::debug!(error = chain(&error), "the term could not be stamped; trying again");
            }
            if let Ok(channels) = store.channels().await {
                assigning.keep_alive.channels = channels;
            }
        }
        Err(error) => {
            tracing::warn!(error = chain(&error), trusted = leadership.is_trusted(), "the lease was not renewed; trying again");
            pause(RETRY).await;
        }
    }
    true
}

/// Sleeps until a hint arrives, a job becomes due, or `until`.
async fn wait(
    store: &Store,
    hints: &mut Hints,
    assigning: &mut Assigning,
    next_due: Option<Instant>,
    until: Monotonic,
    shutdown: &mut Shutdown,
) -> Trigger {
    let mut trigger = Trigger::default();
    while trigger.is_empty() {
        let due = next_due.into_iter().chain(assigning.alarms.next()).min();
        // One millisecond more than the estimate, which is whole milliseconds.
        let until_due = due.map_or(Duration::MAX, |due| (due - store.now()).to_std().unwrap_or_default() + Duration::from_millis(1));
        let until_scan = until.saturating_duration_since(Monotonic::now());
        let mut next = tokio::select! {
            hint = hints.next() => Some(hint),
            () = pause(until_due.min(until_scan)) => return trigger,
            () = shutdown.requested() => return trigger,
        };
        while let Some(hint) = next {
            trigger.hear(hint, &mut assigning.alarms);
            next = hints.try_next();
        }
    }
    trigger
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scan_that_takes_long_is_done_less_often() {
        let check = |is_listening, took| scan_every(Duration::from_millis(1_000), is_listening, Duration::from_millis(took)).as_millis();
        assert_eq!(check(true, 5), 1_000);
        assert_eq!(check(false, 5), 500, "nothing is heard");
        assert_eq!(check(true, 600), 1_800);
        assert_eq!(check(true, 60_000), 3_000, "and not for ever");
        assert_eq!(check(false, 60_000), 3_000);
    }
}
