//! Detects dead workers, retires them, and has their jobs rescued.
//!
//! A worker is dead when this cleaner has observed its last heartbeat unchanged for the whole period. The period is
//! measured by the cleaner's own monotonic clock, in successful reads without a gap. `last_seen_at` is never compared
//! with a clock: after a failover to a member whose clock is ahead, after an outage, or after the suspend of a laptop,
//! such a comparison would declare all live workers dead. If the cleaner is suspended together with the workers and
//! resumes first, it must not count the suspended time as silence. Therefore one poll adds at most a third of the period.
//!
//! MongoDB can answer reads while writes are blocked (a lock for a backup, a disk that hangs). Then no heartbeat
//! changes although every worker is alive. Therefore a worker that was silent for a third of the period is only
//! suspected. From then on each poll begins with a write by the cleaner, and the silence counts only while MongoDB
//! acknowledges these writes. While no worker is suspected, the cleaner writes nothing.
//!
//! A worker is also dead when its process ran on this machine and is gone (`liveness`), which is checked every 200 ms without MongoDB. A
//! retirement that another cleaner has not finished within two seconds is taken over.

use std::{
    collections::{HashMap, HashSet},
    time::{Duration, Instant as Monotonic},
};

use recruiter_common::{
    ids::WorkerId,
    shutdown::Shutdown,
    store::{ProcessIdentity, RegisteredWorker, Store, StoreError},
    telemetry::chain,
};

use crate::{
    liveness::{is_gone, is_here},
    rescue::Rescuer,
};

/// Time for a cleaner to finish a retirement before another cleaner takes it over. Usually it takes far less time, so
/// the first cleaner has died or is stalled.
const FINISHED_WITHIN: Duration = Duration::from_secs(2);

/// Minimum number of polls that observe a worker as silent before it is declared dead, however far apart the polls are.
/// The period is validated to be at least this many times `--every`. One poll adds at most `1 / POLLS` of the period, and
/// a worker is suspected after `1 / POLLS` of the period.
const POLLS: u32 = 3;

/// The heartbeats that this cleaner has observed, and how long each one has not changed.
pub(crate) struct Observations {
    here: ProcessIdentity,
    /// When the last poll of the roster began.
    asked: Option<Monotonic>,
    /// For each worker its last heartbeat, and how long that was observed unchanged.
    last_seen: HashMap<WorkerId, (LastSeen, Duration)>,
    /// Whether the last poll suspected a worker. If so, the next poll begins with a write.
    suspects: bool,
    /// The processes of live workers on this machine.
    neighbours: Vec<ProcessIdentity>,
    /// Retired workers in the roster, and when this cleaner first read them as retired.
    retired: HashMap<WorkerId, Monotonic>,
    /// Retired workers whose retirement this cleaner is finishing.
    finishing: HashSet<WorkerId>,
}

/// `last_seen_at` of a worker, as stored in the roster.
type LastSeen = Option<bson::DateTime>;

/// The evidence that a worker is dead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Death {
    /// Its process on this machine is gone.
    Gone,
    /// Its heartbeat did not change for the whole period.
    Silent,
}

impl Death {
    fn cause(self) -> &'static str {
        match self {
            Self::Gone => "its process is gone",
            Self::Silent => "its heartbeat did not change",
        }
    }
}

impl Observations {
    /// Discards all observations: silence counts only if it was observed without a gap.
    pub(crate) fn clear(&mut self) {
        self.asked = None;
        self.last_seen.clear();
        self.suspects = false;
        self.retired.clear();
    }

    pub(crate) fn new(here: ProcessIdentity) -> Self {
        Self {
            here,
            asked: None,
            last_seen: HashMap::new(),
            suspects: false,
            neighbours: Vec::new(),
            retired: HashMap::new(),
            finishing: HashSet::new(),
        }
    }

    /// Whether the process of a worker on this machine has ended since the last poll of the roster.
    pub(crate) fn has_lost_a_neighbour(&self) -> bool {
        self.neighbours.iter().any(|there| is_gone(&self.here, there))
    }

    /// Returns the dead among `workers`, which were read after `asked`. The period is `dead_after`, or one and a half
    /// times the worker's lease if that is longer. `written` is whether MongoDB acknowledged a write in this poll
    /// before the read.
    fn dead(
        &mut self,
        workers: &[RegisteredWorker],
        asked: Monotonic,
        written: bool,
        dead_after: Duration,
    ) -> Vec<(WorkerId, LastSeen, Death)> {
        // A longer gap means that this cleaner was stalled, and perhaps the workers too. It counts as one third of the
        // period.
        let watched = self.asked.replace(asked).map_or(Duration::ZERO, |before| asked.duration_since(before).min(dead_after / POLLS));
        let before = std::mem::take(&mut self.last_seen);
        self.neighbours.clear();
        self.suspects = false;
        let mut dead = Vec::new();
        for worker in workers.iter().filter(|worker| !worker.retired) {
            let limit = dead_after.max(worker.lease + worker.lease / 2);
            let suspected = |silence: Duration| silence >= limit / POLLS;
            let silence = match before.get(&worker.id) {
                Some((last_seen_at, silence)) if *last_seen_at == worker.last_seen_at => {
                    *silence + if written || !suspected(*silence) { watched } else { Duration::ZERO }
                }
                _ => Duration::ZERO,
            };
            self.last_seen.insert(worker.id, (worker.last_seen_at, silence));
            if worker.process.as_ref().is_some_and(|there| is_gone(&self.here, there)) {
                dead.push((worker.id, worker.last_seen_at, Death::Gone));
            } else if silence >= limit {
                dead.push((worker.id, worker.last_seen_at, Death::Silent));
            } else {
                self.neighbours.extend(worker.process.clone().filter(|there| is_here(&self.here, there)));
            }
            self.suspects |= suspected(silence);
        }
        dead
    }

    /// Returns the retired workers whose retirement this cleaner must finish: those that it began, and those that another
    /// cleaner did not finish in time.
    fn unfinished<'a>(&mut self, workers: &'a [RegisteredWorker], now: Monotonic) -> Vec<&'a RegisteredWorker> {
        let before = std::mem::take(&mut self.retired);
        let mine = std::mem::take(&mut self.finishing);
        let mut to_finish = Vec::new();
        for worker in workers.iter().filter(|worker| worker.retired) {
            let since = before.get(&worker.id).copied().unwrap_or(now);
            self.retired.insert(worker.id, since);
            if mine.contains(&worker.id) || now.duration_since(since) >= FINISHED_WITHIN {
                self.finishing.insert(worker.id);
                to_finish.push(worker);
            }
        }
        to_finish
    }
}

/// One poll of the roster: retires dead workers and begins to rescue their jobs. Returns whether a worker was retired. Continues
/// retirements that another cleaner did not finish. The rescues run beside the next polls.
pub(crate) async fn tick(
    store: &Store,
    rescuer: &mut Rescuer,
    observations: &mut Observations,
    dead_after: Duration,
    shutdown: &Shutdown,
) -> Result<bool, StoreError> {
    rescuer.progress();
    // Taken before the reads, because this process may stall after them.
    let asked = Monotonic::now();
    let written = observations.suspects && store.acknowledges_writes(dead_after / POLLS).await?;
    if observations.suspects && !written {
        observations.clear();
        tracing::warn!("MongoDB answers reads but does not acknowledge a write in time: the silence observed so far does not count");
    }
    let workers = store.registered_workers().await?;
    store.fresh_clock().await?;
    rescuer.compare_users(&workers).await?;
    rescuer.forget_all_but(&workers);
    for left in observations.unfinished(&workers, asked) {
        rescuer.begin(left.clone());
    }
    let mut has_retired = false;
    for (worker, last_seen_at, death) in observations.dead(&workers, asked, written, dead_after) {
        if shutdown.is_requested() {
            break;
        }
        rescuer.progress();
        let retired = match store.retire_if_silent_since(worker, last_seen_at).await {
            Err(error) if !error.is_transient() => {
                tracing::warn!(worker.id = %worker, error = chain(&error), "a dead worker cannot be retired; trying again");
                continue;
            }
            other => other?,
        };
        if let Some(retired) = retired {
            tracing::warn!(worker.id = %worker, death.cause = death.cause(), "a worker is dead: retiring it");
            match death {
                Death::Gone => &rescuer.meters.retired_gone,
                Death::Silent => &rescuer.meters.retired_silent,
            }
            .increment(1);
            observations.finishing.insert(worker);
            rescuer.begin(retired);
            has_retired = true;
        }
    }
    Ok(has_retired)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEAD_AFTER: Duration = Duration::from_secs(30);

    fn worker(id: WorkerId, last_seen_at: i64, lease: u64) -> RegisteredWorker {
        RegisteredWorker {
            id,
            last_seen_at: Some(bson::DateTime::from_millis(last_seen_at)),
            lease: Duration::from_secs(lease),
            process: None,
            sessions: Vec::new(),
            jobs: Vec::new(),
            retired: false,
            mongodb_user: None,
        }
    }

    /// Runs one poll for each (second, heartbeat, whether MongoDB acknowledges a write). Returns whether the last poll
    /// found a death, and how many polls had to write.
    fn observe(lease: u64, looks: impl IntoIterator<Item = (u64, i64, bool)>) -> (bool, usize) {
        let mut observations = Observations::new(ProcessIdentity::of_this_process().expect("/proc"));
        let (id, begin, mut asked) = (WorkerId::new(), Monotonic::now(), 0);
        let looks = looks.into_iter().map(|(at, seen, writes)| {
            let seen = worker(id, seen, lease);
            asked += usize::from(observations.suspects);
            let written = observations.suspects && writes;
            let dead = observations.dead(std::slice::from_ref(&seen), begin + Duration::from_secs(at), written, DEAD_AFTER);
            dead == [(id, seen.last_seen_at, Death::Silent)]
        });
        let last = looks.last();
        (last.unwrap_or(false), asked)
    }

    fn look(lease: u64, looks: impl IntoIterator<Item = (u64, i64)>) -> bool {
        observe(lease, looks.into_iter().map(|(at, seen)| (at, seen, true))).0
    }

    /// Like `look`, with an additional poll every second between the given ones, each with the heartbeat of the one
    /// before.
    fn check(lease: u64, looks: &[(u64, i64)]) -> bool {
        let between = looks.windows(2).flat_map(|pair| (pair[0].0..pair[1].0).map(|at| (at, pair[0].1)));
        look(lease, between.chain(looks.last().copied()))
    }

    #[test]
    fn silence_does_not_count_while_no_write_is_acknowledged() {
        let seconds = |range: std::ops::Range<u64>, writes| range.map(move |at| (at, 1, writes));
        assert!(!observe(20, seconds(0..3_600, false)).0, "for an hour only reads were answered");
        assert!(!observe(20, seconds(0..600, false).chain(seconds(600..619, true))).0, "heartbeats were possible for less than its lease");
        assert!(observe(20, seconds(0..600, false).chain(seconds(600..621, true))).0, "no heartbeat while heartbeats were possible");
        assert_eq!(observe(20, (0..600).map(|at| (at, i64::try_from(at / 6).expect("small"), true))).1, 0, "no suspect: no write");
        assert_eq!(observe(20, seconds(0..31, true)), (true, 20), "in time, with a write a second when it was late");
    }

    #[test]
    fn another_cleaner_has_two_seconds_to_finish_a_retirement_that_it_began() {
        let mut observations = Observations::new(ProcessIdentity::of_this_process().expect("/proc"));
        let begin = Monotonic::now();
        let retired = [RegisteredWorker { retired: true, ..worker(WorkerId::new(), 1, 20) }];
        let check = |observations: &mut Observations, ms: u64| observations.unfinished(&retired, begin + Duration::from_millis(ms)).len();
        assert_eq!(check(&mut observations, 0), 0, "another cleaner's");
        assert_eq!(check(&mut observations, 1_900), 0);
        assert_eq!(check(&mut observations, 2_000), 1, "the other cleaner did not finish it in time");
        observations.clear();
        assert_eq!(check(&mut observations, 2_001), 1, "this cleaner has taken the retirement over");
        assert!(observations.dead(&retired, begin + DEAD_AFTER * 2, true, DEAD_AFTER).is_empty(), "it is dead already");
    }

    #[test]
    fn only_observed_silence_counts() {
        assert!(!check(20, &[(0, 1)]), "a first poll proves nothing, however old the heartbeat");
        assert!(!check(20, &[(0, 1), (29, 1)]));
        assert!(check(20, &[(0, 1), (30, 1)]));
        assert!(!check(20, &[(0, 1), (29, 2), (58, 2)]), "any change is a sign of life");
        assert!(!check(20, &[(0, 9), (29, 1), (58, 1)]), "even one back in time");
        assert!(!check(60, &[(0, 1), (80, 1)]), "its lease is a minute");
        assert!(check(60, &[(0, 1), (90, 1)]));
    }

    #[test]
    fn the_suspended_time_of_the_cleaner_does_not_count_as_silence() {
        let night = 8 * 3_600;
        assert!(!look(20, [(0, 1), (night, 1)]), "the cleaner resumed before the worker");
        assert!(!look(20, (0..5).chain(night..night + 15).map(|at| (at, 1))), "the worker had less than the period to resume");
        assert!(look(20, (0..5).chain(night..night + 20).map(|at| (at, 1))), "the worker did not resume");
        assert!(look(20, [(0, 1), (40, 1), (80, 1), (120, 1)]), "a cleaner that is busy finds the dead as well");
    }
}
