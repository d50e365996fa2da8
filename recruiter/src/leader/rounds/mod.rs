//! The loop of rounds: runs a round, and then waits for the next trigger.

mod assign;
mod keep_alive;
mod read;
pub(crate) mod round;
pub(crate) mod trigger;
mod unannounced;

use std::time::{Duration, Instant as Monotonic};

use recruiter_common::{
    instant::Instant,
    service::Watchdog,
    shutdown::{Shutdown, pause},
    store::{Hint, Hints, HintsAt, Hub, Listener, ScheduledJob, Store},
    telemetry::{chain, milliseconds},
};
use tokio::sync::mpsc;

use self::{
    round::{Assigning, Summary},
    trigger::Trigger,
    unannounced::UnannouncedScans,
};
use super::{lease::Leadership, meters::RoundMeters};

/// If a full scan takes long, the next one is due after this many times its duration, but after this many poll intervals at most.
const RARER: u32 = 3;
/// Wait after a round that failed in MongoDB, and while the lease is not trusted.
const RETRY: Duration = Duration::from_millis(500);

/// The inputs of the loop of rounds.
pub(crate) struct Rounds<'a> {
    pub(crate) store: &'a Store,
    /// A full scan is due after each of these intervals.
    pub(crate) poll: Duration,
    /// Where to listen for hints.
    pub(crate) hints_at: &'a HintsAt,
    pub(crate) leadership: &'a Leadership,
    pub(crate) watchdog: &'a Watchdog,
    pub(crate) meters: &'a mut RoundMeters,
    /// Where hints about ends go, to the duty of dependencies.
    pub(crate) ends: mpsc::UnboundedSender<Hint>,
    /// The jobs that this duty has released.
    pub(crate) released: mpsc::UnboundedReceiver<Vec<ScheduledJob>>,
}

impl Rounds<'_> {
    /// Assigns until a stop is requested, or the term is over. The stop waits for the end of the round.
    pub(crate) async fn run(&mut self, mut assigning: Assigning, shutdown: &mut Shutdown) {
        let store = self.store;
        let mut hints = store.hints(Listener::Recruiter);
        // Closed with the end of the term.
        let _hub = self.serve_hints(&hints).await;
        let mut trigger = Trigger::default();
        let mut is_failing = false;
        let (mut scan_at, mut every) = (Monotonic::now(), self.poll);
        let mut unannounced = UnannouncedScans::default();
        while !shutdown.is_requested() {
            self.watchdog.progress();
            if !self.leadership.is_trusted() {
                // Another recruiter may lead. The next renewal shows whether it does.
                shutdown.sleep(RETRY).await;
                continue;
            }
            let began = Monotonic::now();
            trigger.full_scan |= began >= scan_at;
            trigger.unannounced |= unannounced.is_due(began);
            trigger.add_groups(assigning.alarms.ring(store.now()));
            if let Err(error) = store.fresh_clock().await {
                tracing::debug!(error = chain(&error), "cannot read the server's clock");
            }
            let (is_full_scan, is_scan) = (trigger.full_scan, trigger.full_scan || trigger.unannounced);
            let summary = match assigning.tick(store, self.leadership.term(), std::mem::take(&mut trigger), every).await {
                Ok(summary) => summary,
                Err(error) => {
                    tracing::warn!(error = chain(&error), "a round failed; retrying");
                    self.meters.failed();
                    is_failing = true;
                    assigning.forget();
                    scan_at = Monotonic::now();
                    shutdown.sleep(RETRY).await;
                    continue;
                }
            };
            if summary.is_over {
                self.leadership.give_up();
                return;
            }
            if std::mem::take(&mut is_failing) {
                tracing::info!("rounds succeed again");
            }
            self.meters.succeeded(&assigning.assigned, summary.slots, began.elapsed());
            log(&summary, began.elapsed());
            if is_scan {
                unannounced.scanned(summary.unannounced > 0, began.elapsed(), Monotonic::now());
            }
            if is_full_scan {
                every = scan_every(self.poll, hints.is_listening(), began.elapsed());
                store.announce_hints_to(assigning.keep_alive.hints(every, Monotonic::now())).await;
                // The keep-alives promise the next scan within `every`, so it is due a little earlier.
                scan_at = Monotonic::now() + every.mul_f64(rand::random_range(0.85..0.95));
            }
            let until = scan_at.min(Monotonic::now() + self.watchdog.next_in());
            let until = summary.retry_at.into_iter().chain(unannounced.next()).fold(until, Monotonic::min);
            trigger = self.wait(&mut hints, &mut assigning, summary.next_due, until, shutdown).await;
        }
    }

    /// Listens for the hints of processes that connect.
    async fn serve_hints(&self, hints: &Hints) -> Option<Hub> {
        match self.store.serve_hints(self.hints_at, self.leadership.term(), hints).await {
            Ok(hub) => hub,
            Err(error) => {
                tracing::warn!(error = chain(&error), "cannot announce where to connect for hints; all hints go through MongoDB");
                None
            }
        }
    }

    /// Sleeps until a hint arrives, a job becomes due, or `until`.
    async fn wait(
        &mut self,
        hints: &mut Hints,
        assigning: &mut Assigning,
        next_due: Option<Instant>,
        until: Monotonic,
        shutdown: &mut Shutdown,
    ) -> Trigger {
        let mut trigger = Trigger::default();
        loop {
            // Hints that have already arrived are read even if there is no time to wait.
            while let Some(hint) = hints.try_next() {
                self.note(hint, &mut trigger, assigning);
            }
            while let Ok(jobs) = self.released.try_recv() {
                trigger.announced.extend(jobs);
            }
            if !trigger.is_empty() {
                return trigger;
            }
            let due = next_due.into_iter().chain(assigning.alarms.next()).min();
            // One millisecond more, because the estimated server time is cut to whole milliseconds.
            let until_due =
                due.map_or(Duration::MAX, |due| (due - self.store.now()).to_std().unwrap_or_default() + Duration::from_millis(1));
            let until_scan = until.saturating_duration_since(Monotonic::now());
            tokio::select! {
                hint = hints.next() => self.note(hint, &mut trigger, assigning),
                Some(jobs) = self.released.recv() => trigger.announced.extend(jobs),
                () = pause(until_due.min(until_scan)) => return trigger,
                () = shutdown.requested() => return trigger,
            }
        }
    }

    /// Adds a hint to the trigger, or passes it on to the duty of dependencies.
    fn note(&self, hint: Hint, trigger: &mut Trigger, assigning: &mut Assigning) {
        self.meters.hint(&hint);
        if matches!(hint, Hint::Ended { .. } | Hint::Waiting { .. } | Hint::Seed) {
            // That duty ends together with the rounds.
            let _ = self.ends.send(hint.clone());
        }
        trigger.add(hint, &mut assigning.alarms);
    }
}

fn log(summary: &Summary, took: Duration) {
    let (slots, duration_ms) = (summary.slots, milliseconds(took));
    match summary.assigned {
        0 => tracing::trace!(slots, duration_ms, "nothing to assign"),
        count => tracing::debug!(count, slots, duration_ms, "assigned jobs"),
    }
}

/// The time from one full scan to the next.
fn scan_every(poll: Duration, is_listening: bool, took: Duration) -> Duration {
    // While hints cannot be received, scans replace them.
    let wanted = if is_listening { poll } else { poll / 2 };
    wanted.max((took * RARER).min(poll * RARER))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scan_that_takes_long_is_done_less_often() {
        let check = |is_listening, took| scan_every(Duration::from_millis(1_000), is_listening, Duration::from_millis(took)).as_millis();
        assert_eq!(check(true, 5), 1_000);
        assert_eq!(check(false, 5), 500, "hints cannot be received");
        assert_eq!(check(true, 600), 1_800);
        assert_eq!(check(true, 60_000), 3_000, "with a limit");
        assert_eq!(check(false, 60_000), 3_000);
    }
}
