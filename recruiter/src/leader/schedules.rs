//! The duty of schedules: enqueues the job of each slot when it is due. It runs beside the rounds, and never delays them.
//!
//! One step for schedules that are due:
//!
//! 1. Read them. A slot up to `last_slot` is handled, and a paused schedule is left alone.
//! 2. If the lease is still trusted, enqueue the jobs. The `_id` of a job is derived from the schedule and the slot, so a second insert finds
//!    the first one, in `scheduled` or in the archive.
//! 3. Advance `last_slot`, if it is still as it was read.
//!
//! A leader that dies after step 2 leaves the slot to the next one, which inserts the same job and advances. A job with `keep: "failures"`
//! could be gone by then, and run again: for such a schedule steps 2 and 3 are one transaction.
//!
//! A job is inserted at its slot and not ahead of it, so that a pause, a removal and `overlap: "skip"` hold until the slot. A timer waits for
//! the slot. Each poll only looks for changed schedules, with one covered query.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant as Monotonic},
};

use bson::Bson;
use chrono::TimeDelta;
use recruiter_common::{
    enqueue::{EnqueueError, NewJob},
    ids::JobId,
    instant::Instant,
    schedules::{MOST_MISSED, Missed, Overlap, Run, Schedule, StoredSchedule},
    shutdown::Shutdown,
    store::{Advance, CommitSession, Store, StoreError, id_of_slot, lossy},
    telemetry::chain,
};

use super::{lease::Leadership, meters::ScheduleMeters};

/// Wait after a step that failed in MongoDB, and while the lease is not trusted.
const RETRY: Duration = Duration::from_millis(500);
/// Interval of reading all schedules: a document that was changed by hand may have the revision that it had before.
const READ_ALL_EVERY: Duration = Duration::from_secs(30);
/// Maximum number of schedules in one step.
const BATCH: usize = 50;
/// A run that is late by less than this is not missed. It is longer than a change of the leader takes.
const ON_TIME: TimeDelta = TimeDelta::seconds(60);

/// The schedules as the leader knows them.
pub(crate) struct Schedules<'a> {
    store: &'a Store,
    poll: Duration,
    leadership: &'a Leadership,
    known: BTreeMap<String, Known>,
    /// When the next search for changes is due.
    poll_at: Monotonic,
    /// When all schedules are read again.
    read_all_at: Monotonic,
    session: CommitSession,
    meters: &'a ScheduleMeters,
}

/// What the leader remembers of a schedule.
#[derive(Clone, Debug, PartialEq)]
struct Known {
    revision: Option<Bson>,
    /// When it must be read again: its next run is due, or it has changed. `None` if it is paused or invalid.
    due: Option<Instant>,
}

impl<'a> Schedules<'a> {
    pub(crate) fn new(store: &'a Store, poll: Duration, leadership: &'a Leadership, meters: &'a ScheduleMeters) -> Self {
        let (now, session) = (Monotonic::now(), CommitSession::default());
        Self { store, poll, leadership, known: BTreeMap::new(), poll_at: now, read_all_at: now, session, meters }
    }

    /// Enqueues the jobs of due slots until a stop is requested. The stop waits for the end of the step. If the lease is lost, this is
    /// dropped: the next leader repeats the step.
    pub(crate) async fn run(&mut self, shutdown: &mut Shutdown) {
        let mut is_failing = false;
        while !shutdown.is_requested() {
            if !self.leadership.is_trusted() {
                shutdown.sleep(RETRY).await;
                continue;
            }
            match self.tick().await {
                Ok(()) => {
                    if std::mem::take(&mut is_failing) {
                        tracing::info!("schedules run again");
                    }
                    shutdown.sleep(self.until_next()).await;
                }
                Err(error) => {
                    tracing::warn!(error = chain(&error), "cannot enqueue the jobs of schedules; retrying");
                    is_failing = true;
                    self.known.clear();
                    self.poll_at = Monotonic::now();
                    shutdown.sleep(RETRY).await;
                }
            }
        }
    }

    /// Time until a run or the next search for changes is due.
    fn until_next(&self) -> Duration {
        let until_poll = self.poll_at.saturating_duration_since(Monotonic::now());
        let due = self.known.values().filter_map(|known| known.due).min();
        // One millisecond more, because the estimated server time is cut to whole milliseconds.
        let until_due = due.map(|due| (due - self.store.now()).to_std().unwrap_or_default() + Duration::from_millis(1));
        until_due.map_or(until_poll, |until_due| until_due.min(until_poll))
    }

    /// Finds changed schedules, if a search is due, and handles the slots that are due.
    async fn tick(&mut self) -> Result<(), StoreError> {
        self.store.fresh_clock().await?;
        if Monotonic::now() >= self.poll_at {
            self.find_changes().await?;
            self.poll_at = Monotonic::now() + self.poll;
        }
        let now = self.store.now();
        let due: Vec<String> =
            self.known.iter().filter(|(_, known)| known.due.is_some_and(|due| due <= now)).map(|(name, _)| name.clone()).collect();
        for batch in due.chunks(BATCH) {
            self.step(batch).await?;
        }
        Ok(())
    }

    /// New and changed schedules are due at once, so that they are read.
    async fn find_changes(&mut self) -> Result<(), StoreError> {
        let found: BTreeMap<String, Option<Bson>> = self.store.schedule_revisions().await?.into_iter().collect();
        self.known.retain(|name, _| found.contains_key(name));
        let reads_all = Monotonic::now() >= self.read_all_at;
        if reads_all {
            self.read_all_at = Monotonic::now() + READ_ALL_EVERY;
        }
        for (name, revision) in found {
            if reads_all || self.known.get(&name).is_none_or(|known| known.revision != revision) {
                self.known.insert(name, Known { revision, due: Some(Instant::UNIX_EPOCH) });
            }
        }
        Ok(())
    }

    /// Reads these schedules, enqueues the jobs of their due slots, and advances them.
    async fn step(&mut self, names: &[String]) -> Result<(), StoreError> {
        let found = self.store.schedules_by_name(names).await?;
        let (now, mut steps) = (self.store.now(), Vec::new());
        let mut left: BTreeSet<&String> = names.iter().collect();
        for stored in found {
            let name = stored.get_str("_id").unwrap_or_default().to_owned();
            left.remove(&name);
            let revision = lossy(&stored).remove("revision");
            match StoredSchedule::try_from(stored) {
                Ok(schedule) => {
                    self.known.insert(name, Known { revision, due: schedule.next_run() });
                    steps.extend(Step::of(schedule, now));
                }
                Err(problem) => self.leave(name, revision, &problem.to_string()),
            }
        }
        // Removed since the last search.
        left.into_iter().for_each(|name| drop(self.known.remove(name)));
        self.skip_overlaps(&mut steps).await?;
        if steps.is_empty() || !self.leadership.is_trusted() {
            return Ok(());
        }
        let (fleeting, lasting): (Vec<Step>, Vec<Step>) = steps.into_iter().partition(Step::leaves_nothing);
        let steps = self.enqueue(lasting).await?;
        self.advance(&steps).await?;
        self.enqueue_in_transaction(fleeting).await;
        Ok(())
    }

    /// Advances the schedules of these steps, whose jobs are enqueued: all with one command. If MongoDB refuses one of them, each alone.
    async fn advance(&mut self, steps: &[Step]) -> Result<(), StoreError> {
        let at = self.store.now();
        let advances: Vec<Advance> = steps.iter().map(|step| step.advance(at)).collect();
        if advances.is_empty() {
            return Ok(());
        }
        match self.store.advance_schedules(&advances).await {
            Ok(all_advanced) => {
                if all_advanced {
                    self.measure(steps, at);
                }
                for advance in advances {
                    if !all_advanced {
                        // One was not as it was read: the next poll reads them again.
                        self.known.remove(&advance.name);
                    } else if let Some(known) = self.known.get_mut(&advance.name) {
                        known.due = advance.next_run;
                    }
                }
                return Ok(());
            }
            Err(error) if error.is_transient() => return Err(error),
            Err(_) => {}
        }
        for (step, advance) in steps.iter().zip(advances) {
            let revision = step.schedule.document.get("revision").cloned();
            match self.store.advance_schedules(std::slice::from_ref(&advance)).await {
                // Most were advanced by the first command. They are read again at once.
                Ok(_) => drop(self.known.insert(advance.name, Known { revision, due: Some(Instant::UNIX_EPOCH) })),
                Err(error) if error.is_transient() => return Err(error),
                Err(refused) => self.leave(advance.name, revision, &chain(&refused)),
            }
        }
        Ok(())
    }

    /// Enqueues the jobs of these steps and advances their schedules: all in one transaction, or step by step if that fails. A transaction of
    /// a leader that was killed may block a schedule for a minute, until MongoDB ends it. That holds up no other schedule.
    async fn enqueue_in_transaction(&mut self, steps: Vec<Step>) {
        if steps.len() > 1 && matches!(self.transaction(&steps).await, Ok(true)) {
            return;
        }
        for step in steps {
            let (name, revision) = (step.schedule.name.clone(), step.schedule.document.get("revision").cloned());
            match self.transaction(&[step]).await {
                Ok(true) => {}
                // The next poll reads it again.
                Ok(false) => drop(self.known.remove(&name)),
                Err(EnqueueError::Store(error)) if error.is_transient() => {
                    tracing::warn!(schedule = name, error = chain(&error), "cannot enqueue the job of a schedule; retrying");
                    self.known.remove(&name);
                }
                Err(refused) => self.leave(name, revision, &chain(&refused)),
            }
        }
    }

    /// One transaction for these steps. Returns false if one of the schedules is not as it was read, or the lease is not trusted.
    async fn transaction(&mut self, steps: &[Step]) -> Result<bool, EnqueueError> {
        // Without a job nothing `leaves_nothing`, so every step has its jobs.
        let jobs: Vec<NewJob> = steps.iter().flat_map(Step::new_jobs).filter_map(Result::ok).collect();
        let at = self.store.now();
        let advances: Vec<Advance> = steps.iter().map(|step| step.advance(at)).collect();
        if !self.leadership.is_trusted() || !self.store.enqueue_and_advance(&mut self.session, &advances, jobs).await? {
            return Ok(false);
        }
        for advance in advances {
            if let Some(known) = self.known.get_mut(&advance.name) {
                known.due = advance.next_run;
            }
        }
        self.measure(steps, at);
        Ok(true)
    }

    /// Measures steps that are handled, at this time.
    fn measure(&self, steps: &[Step], at: Instant) {
        for Step { schedule, run, missed, overlap, .. } in steps {
            run.iter().for_each(|slot| self.meters.ran(at - schedule.schedule.due(&schedule.name, *slot)));
            self.meters.left_out(*missed, *overlap);
        }
    }

    /// An invalid schedule does nothing until it changes.
    fn leave(&mut self, name: String, revision: Option<Bson>, problem: &str) {
        tracing::warn!(schedule = name, problem, "a schedule cannot run; correct its document");
        self.known.insert(name, Known { revision, due: None });
    }

    /// Takes the slots out of the steps that would overlap an earlier run.
    async fn skip_overlaps(&self, steps: &mut [Step]) -> Result<(), StoreError> {
        let exclusive = || steps.iter().filter(|step| step.is_exclusive());
        let own: Vec<JobId> = exclusive().flat_map(Step::jobs).collect();
        let earlier: Vec<JobId> = exclusive().flat_map(|step| step.schedule.runs.iter().map(|run| run.job)).collect();
        if own.is_empty() {
            return Ok(());
        }
        let unfinished = self.store.unfinished_among(&[earlier, own.clone()].concat()).await?;
        let archived = self.store.already_archived(&own).await?;
        for step in steps.iter_mut().filter(|step| step.is_exclusive()) {
            // An earlier attempt at this step has enqueued it: the overlap was decided then.
            let is_enqueued = step.jobs().any(|job| unfinished.contains(&job) || archived.contains(&job));
            if !is_enqueued && step.schedule.runs.iter().any(|run| unfinished.contains(&run.job)) {
                step.overlap = i64::try_from(std::mem::take(&mut step.run).len()).unwrap_or(i64::MAX);
            }
        }
        Ok(())
    }

    /// Enqueues the jobs of these steps: all together, or step by step if one is refused. Returns the steps whose jobs are enqueued.
    async fn enqueue(&mut self, steps: Vec<Step>) -> Result<Vec<Step>, StoreError> {
        if self.enqueue_together(&steps).await?.is_ok() {
            return Ok(steps);
        }
        let mut enqueued = Vec::with_capacity(steps.len());
        for step in steps {
            match self.enqueue_together(std::slice::from_ref(&step)).await? {
                Ok(()) => enqueued.push(step),
                Err(problem) => {
                    let revision = step.schedule.document.get("revision").cloned();
                    self.leave(step.schedule.name, revision, &problem);
                }
            }
        }
        Ok(enqueued)
    }

    /// Enqueues the jobs of these steps. The inner error says why one of them is refused.
    async fn enqueue_together(&self, steps: &[Step]) -> Result<Result<(), String>, StoreError> {
        let jobs = match steps.iter().flat_map(Step::new_jobs).collect::<Result<Vec<NewJob>, _>>() {
            Ok(jobs) if jobs.is_empty() => return Ok(Ok(())),
            Ok(jobs) => jobs,
            Err(problem) => return Ok(Err(problem.to_string())),
        };
        let count = jobs.len();
        match self.store.enqueue_many(jobs).await {
            Ok(_) => {
                tracing::debug!(count, "enqueued jobs of schedules");
                Ok(Ok(()))
            }
            Err(EnqueueError::Store(error)) if error.is_transient() => Err(error),
            Err(refused) => Ok(Err(chain(&refused))),
        }
    }
}

/// The due slots of one schedule.
#[derive(Clone, Debug)]
struct Step {
    schedule: StoredSchedule,
    /// Slots that run.
    run: Vec<Instant>,
    /// Number of slots that were missed and do not run.
    missed: i64,
    /// Number of slots that do not run, because an earlier run is not finished.
    overlap: i64,
    /// All slots up to this one are handled.
    through: Instant,
}

impl Step {
    /// `None` if nothing is due.
    fn of(schedule: StoredSchedule, now: Instant) -> Option<Self> {
        if schedule.paused.is_some() {
            return None;
        }
        let Some(last_slot) = schedule.last_slot else {
            // Written by hand, and seen for the first time: it counts from now.
            return Some(Self { schedule, run: Vec::new(), missed: 0, overlap: 0, through: now });
        };
        let (run, missed) = due_slots(&schedule.schedule, &schedule.name, last_slot, now)?;
        let through = run.last().copied().unwrap_or(missed.last);
        Some(Self { schedule, run, missed: missed.count, overlap: 0, through })
    }

    /// Whether an earlier run that is not finished takes its slots.
    fn is_exclusive(&self) -> bool {
        !self.run.is_empty() && self.schedule.schedule.overlap_policy() == Overlap::Skip
    }

    /// Whether a second insert of its jobs could go unnoticed.
    fn leaves_nothing(&self) -> bool {
        !self.run.is_empty() && self.schedule.schedule.leaves_nothing()
    }

    fn jobs(&self) -> impl Iterator<Item = JobId> {
        self.run.iter().map(|slot| id_of_slot(&self.schedule.name, *slot))
    }

    fn new_jobs(&self) -> impl Iterator<Item = Result<NewJob, recruiter_common::schedules::InvalidSchedule>> {
        self.run.iter().map(|slot| self.schedule.schedule.job_of_slot(&self.schedule.name, *slot))
    }

    /// The update that records that the slots are handled, and their jobs enqueued at this time.
    fn advance(&self, at: Instant) -> Advance {
        let runs = self.run.iter().zip(self.jobs()).map(|(slot, job)| Run::of_slot(*slot, job, at).stored());
        Advance {
            name: self.schedule.name.clone(),
            last_slot: self.schedule.last_slot,
            through: self.through,
            next_run: self.schedule.schedule.next_runs(&self.schedule.name, self.through).next(),
            runs: runs.collect(),
            overlap: self.overlap,
            missed: self.missed,
        }
    }
}

/// Slots that were missed and do not run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MissedSlots {
    count: i64,
    last: Instant,
}

/// The slots after `last_slot` whose runs are due: those that run, in order, and those that do not. `None` if none is due.
fn due_slots(schedule: &Schedule, name: &str, last_slot: Instant, now: Instant) -> Option<(Vec<Instant>, MissedSlots)> {
    let mut slots = schedule.timing().newest_slots(last_slot, now, MOST_MISSED.into());
    // The jitter is at most the time between two slots, so their order is that of their due dates.
    slots.truncate(slots.iter().take_while(|slot| schedule.due(name, **slot) <= now).count());
    let newest = *slots.last()?;
    let (missed, is_late) = (schedule.missed_policy(), now - schedule.due(name, newest) >= ON_TIME);
    let most = if let Missed::All(limit) = missed
        && schedule.overlap_policy() == Overlap::Allow
    {
        usize::from(limit)
    } else {
        // One at a time: with `overlap: "skip"` the others would overlap it.
        usize::from(!(missed == Missed::Skip && is_late))
    };
    let run = slots.split_off(slots.len().saturating_sub(most));
    let count = i64::try_from(slots.len()).unwrap_or(i64::MAX);
    Some((run, MissedSlots { count, last: newest }))
}

#[cfg(test)]
mod tests {
    use bson::{Document, doc};

    use super::*;

    fn at(ms: i64) -> Instant {
        Instant::from_timestamp_millis(ms).expect("a date")
    }

    fn every_minute() -> Schedule {
        Schedule::every(Duration::from_secs(60)).expect("an interval").job(NewJob::of_class("c", doc! {}))
    }

    /// The minutes whose slots run, and the number of missed ones.
    fn due(schedule: &Schedule, last_slot: i64, now: i64) -> Option<(Vec<i64>, i64)> {
        let (run, missed) = due_slots(schedule, "a", at(last_slot), at(now))?;
        Some((run.iter().map(|slot| slot.timestamp() / 60).collect(), missed.count))
    }

    #[test]
    fn a_slot_runs_once_from_its_instant_on() {
        let schedule = every_minute();
        assert_eq!(due(&schedule, 60_000, 119_999), None);
        assert_eq!(due(&schedule, 60_000, 120_000), Some((vec![2], 0)));
        assert_eq!(due(&schedule, 120_000, 120_000), None);
        assert_eq!(due(&schedule, 119_000, 120_000), Some((vec![2], 0)), "a declaration between slots");
        assert_eq!(due(&schedule, 600_000, 120_000), None, "the clock was put back");
    }

    #[test]
    fn missed_slots_follow_the_policy() {
        let check =
            |missed, now, expected: (Vec<i64>, i64)| assert_eq!(due(&every_minute().missed(missed), 0, now), Some(expected), "{missed:?}");
        check(Missed::One, 300_000, (vec![5], 4));
        check(Missed::All(3), 300_000, (vec![3, 4, 5], 2));
        check(Missed::All(100), 300_000, (vec![1, 2, 3, 4, 5], 0));
        check(Missed::Skip, 300_000, (vec![5], 4));
        check(Missed::Skip, 359_999, (vec![5], 4));
        let hour = Schedule::every(Duration::from_secs(3_600)).expect("an interval").missed(Missed::Skip);
        assert_eq!(due(&hour, 0, 3_659_999), Some((vec![60], 0)), "late by less than a minute");
        assert_eq!(due(&hour, 0, 3_660_000), Some((vec![], 1)));
        assert_eq!(due(&every_minute().missed(Missed::All(1_000)), 0, 60_000_000_000).map(|(run, _)| run.len()), Some(1_000));
        assert_eq!(due(&every_minute(), 0, 60_000_000_000), Some((vec![1_000_000], 999)), "counted up to a thousand");
    }

    #[test]
    fn a_run_waits_for_its_jitter() {
        let schedule = every_minute().jitter(Duration::from_secs(60));
        let run = schedule.due("a", at(120_000)).timestamp_millis();
        assert!(run > 120_000);
        let before = due(&schedule, 60_000, run - 1);
        assert_eq!(before, None);
        assert_eq!(due(&schedule, 60_000, run), Some((vec![2], 0)));
    }

    fn stored(of: Document) -> StoredSchedule {
        let mut document = doc! { "_id": "a", "every_ms": 60_000, "job": { "class": "c" } };
        document.extend(of);
        document.try_into().expect("a schedule")
    }

    #[test]
    fn one_written_by_hand_counts_from_its_first_sight_and_a_paused_one_rests() {
        let date = |ms| bson::DateTime::from_millis(ms);
        let step = Step::of(stored(doc! {}), at(90_000)).expect("a step");
        assert_eq!((step.run.len(), step.through), (0, at(90_000)));
        assert_eq!(step.advance(at(90_000)).next_run, Some(at(120_000)));
        assert!(Step::of(stored(doc! { "last_slot": date(0), "paused": { "by": "me" } }), at(90_000)).is_none());
        let step = Step::of(stored(doc! { "last_slot": date(0) }), at(90_000)).expect("a step");
        let advance = step.advance(at(90_001));
        assert_eq!((advance.last_slot, advance.through, advance.runs.len()), (Some(at(0)), at(60_000), 1));
        assert_eq!(advance.runs[0].get_object_id("job").ok().map(JobId::from), Some(id_of_slot("a", at(60_000))));
    }

    /// Every slot is handled once, in order, at any times at which the leader reads: a model that goes through all minutes.
    #[test]
    fn whatever_the_times_of_the_looks_every_slot_is_run_or_counted_once() {
        use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
        for seed in 0..300 {
            let mut random = StdRng::seed_from_u64(seed);
            let jitter = Duration::from_secs(random.random_range(0..=60));
            let missed = [Missed::One, Missed::Skip, Missed::All(3), Missed::All(100)][random.random_range(0..4)];
            let schedule = every_minute().jitter(jitter).missed(missed);
            let (mut last, mut now, mut ran, mut counted) = (0, 0, Vec::new(), 0);
            for _ in 0..50 {
                now += random.random_range(0..200_000);
                if let Some((run, missed)) = due_slots(&schedule, "a", at(last), at(now)) {
                    assert!(run.iter().all(|slot| schedule.due("a", *slot) <= at(now)), "seed {seed}: before it is due");
                    ran.extend(run.iter().map(|slot| slot.timestamp() / 60));
                    counted += missed.count;
                    last = missed.last.timestamp_millis();
                }
            }
            let all = (1..).take_while(|minute| schedule.due("a", at(minute * 60_000)) <= at(now)).count();
            assert!(ran.windows(2).all(|pair| pair[0] < pair[1]), "seed {seed}: {ran:?}");
            assert_eq!(ran.len() as i64 + counted, all as i64, "seed {seed}");
            if missed == Missed::All(100) {
                assert_eq!(counted, 0, "seed {seed}");
            }
        }
    }
}
