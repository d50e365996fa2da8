//! A schedule: when it runs and what it enqueues. Its declaration.

use std::{fmt, time::Duration};

use backon::{ConstantBuilder, Retryable as _};
use bson::{Bson, Document, doc, oid::ObjectId};
use chrono::TimeDelta;
use sha2::{Digest, Sha256};

use super::{InvalidSchedule, Missed, Overlap, ScheduleError, Timing, template::template_of};
use crate::{
    base::{Instant, JobId, LONGEST_NAME, at_once, check_trimmed_name},
    enqueue::NewJob,
    job::Keep,
    mongo::{Store, readable, schema::MOST_MISSED},
};

/// The immediate repetitions of a change of a schedule that others change at the same time.
const AGAIN: ConstantBuilder = ConstantBuilder::new().with_max_times(4);

/// What a declaration has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Declared {
    /// There was no schedule with this name.
    Created,
    /// The schedule was different.
    Changed,
    /// The schedule is as it was.
    Unchanged,
}

impl Declared {
    /// The outcome as one word, for programs and for counts.
    pub fn word(self) -> &'static str {
        match self {
            Self::Created => "created",
            Self::Changed => "changed",
            Self::Unchanged => "unchanged",
        }
    }
}

/// A schedule: when it runs, and the job that each run enqueues.
#[derive(Clone, Debug)]
#[must_use = "a schedule does nothing until it is declared"]
pub struct Schedule {
    timing: Timing,
    pub(super) jitter: Duration,
    pub(super) job: Option<NewJob>,
    pub(super) overlap: Overlap,
    pub(super) missed: Missed,
    pub(super) namespace: Option<String>,
}

impl Schedule {
    /// Runs at the times of a cron expression, in the zone with this IANA name. See [`Timing::cron`].
    ///
    /// # Errors
    /// When the expression is invalid or has no run, or the zone is unknown.
    pub fn cron(expression: &str, zone: &str) -> Result<Self, InvalidSchedule> {
        Timing::cron(expression, zone).map(Self::at)
    }

    /// Runs at the multiples of an interval since 1970 in UTC. See [`Timing::every`].
    ///
    /// # Errors
    /// When the interval is shorter than a second or too long.
    pub fn every(interval: Duration) -> Result<Self, InvalidSchedule> {
        Timing::every(interval).map(Self::at)
    }

    /// Runs at these times.
    pub fn at(timing: Timing) -> Self {
        Self { timing, jitter: Duration::ZERO, job: None, overlap: Overlap::default(), missed: Missed::default(), namespace: None }
    }

    /// Sets the job that each run enqueues. It has no id, date, unique key or expiry of its own.
    pub fn job(mut self, job: NewJob) -> Self {
        self.job = Some(job);
        self
    }

    /// Delays each run by a part of this time, which depends only on the name and the slot. Many schedules with the same expression then
    /// do not run at the same instant. At most the shortest time between two runs. Default: no delay.
    pub fn jitter(mut self, jitter: Duration) -> Self {
        self.jitter = jitter;
        self
    }

    /// Sets what follows when the job of the previous run is not finished. Default: [`Overlap::Allow`].
    pub fn overlap(mut self, overlap: Overlap) -> Self {
        self.overlap = overlap;
        self
    }

    /// Sets what follows when slots were missed. Default: [`Missed::One`].
    pub fn missed(mut self, missed: Missed) -> Self {
        self.missed = missed;
        self
    }

    /// Sets the namespace: who may change the schedule. Only a declaration with the same namespace changes it. Default: none.
    pub fn in_namespace(mut self, namespace: impl Into<String>) -> Self {
        self.namespace = Some(namespace.into());
        self
    }

    /// When it runs.
    pub fn timing(&self) -> &Timing {
        &self.timing
    }

    /// What follows when the job of the previous run is not finished.
    pub fn overlap_policy(&self) -> Overlap {
        self.overlap
    }

    /// What follows when slots were missed.
    pub fn missed_policy(&self) -> Missed {
        self.missed
    }

    /// What it enqueues.
    pub fn enqueues(&self) -> Option<&NewJob> {
        self.job.as_ref()
    }

    /// Whether a job that succeeded leaves nothing, by which a second insert for its slot would be noticed.
    pub fn leaves_nothing(&self) -> bool {
        self.job.as_ref().is_some_and(|job| job.settings().keep() == Keep::Failures)
    }

    /// When the run of this slot is due: at the slot, or a little later by the jitter.
    pub fn due(&self, name: &str, slot: Instant) -> Instant {
        let digest = digest(name, slot);
        let jitter = u64::try_from(self.jitter.as_millis()).unwrap_or(u64::MAX);
        let delay = u64::from_be_bytes(std::array::from_fn(|index| digest[8 + index])).checked_rem(jitter).unwrap_or(0);
        slot + TimeDelta::milliseconds(i64::try_from(delay).unwrap_or(i64::MAX))
    }

    /// When its next runs are due, after this instant.
    pub fn next_runs(&self, name: &str, after: Instant) -> impl Iterator<Item = Instant> {
        self.timing.slots_after(after).map(|slot| self.due(name, slot))
    }

    /// The job of a slot.
    ///
    /// # Errors
    /// When the schedule has no job.
    pub fn job_of_slot(&self, name: &str, slot: Instant) -> Result<NewJob, InvalidSchedule> {
        let run = doc! { "name": name, "slot": slot };
        let job = self.job.clone().ok_or(InvalidSchedule::NoJob)?;
        Ok(job.with_id(id_of_slot(name, slot)).at(self.due(name, slot)).of_schedule(run))
    }

    /// Checks everything that can be checked without MongoDB.
    ///
    /// # Errors
    /// When the schedule or its name is invalid.
    pub fn check(&self, name: &str) -> Result<(), InvalidSchedule> {
        self.stored(name)?;
        check_trimmed_name(name).map_err(|problem| InvalidSchedule::Name { what: "name", problem })
    }

    /// Validates the schedule and returns the fields of its definition. A field that it does not have is null.
    pub(super) fn stored(&self, name: &str) -> Result<Document, InvalidSchedule> {
        check_name("name", name)?;
        if let Some(namespace) = &self.namespace {
            check_name("namespace", namespace)?;
        }
        if !self.jitter.is_zero() {
            let shortest = self.timing.shortest_gap().to_std().unwrap_or_default();
            if self.jitter > shortest || !self.jitter.subsec_nanos().is_multiple_of(1_000_000) {
                return Err(InvalidSchedule::Jitter { jitter: self.jitter, shortest });
            }
        }
        match self.missed {
            Missed::All(_) if self.overlap == Overlap::Skip => return Err(InvalidSchedule::Contradiction),
            Missed::All(limit) if !(1..=MOST_MISSED).contains(&limit) => return Err(InvalidSchedule::Limit { limit }),
            Missed::All(_) | Missed::One | Missed::Skip => {}
        }
        let job = self.job.clone().ok_or(InvalidSchedule::NoJob)?;
        let mut stored = self.timing.stored();
        let jitter = i64::try_from(self.jitter.as_millis()).ok().filter(|jitter| *jitter > 0);
        stored.extend(doc! {
            "jitter_ms": jitter,
            "overlap": self.overlap.word(),
            "missed": self.missed.word(),
            "missed_limit": self.missed.limit().map(i32::from),
            "job": template_of(job)?,
            "source": self.namespace.clone(),
        });
        Ok(stored)
    }

    pub(super) async fn declare_or_compare(&self, store: &Store, name: &str, is_dry_run: bool) -> Result<Declared, ScheduleError> {
        self.check(name)?;
        let wanted = self.stored(name)?;
        if !is_dry_run {
            ready(store).await?;
        }
        let declare = || self.declare_once(store, name, &wanted, is_dry_run);
        declare.retry(AGAIN).sleep(at_once).when(|error| matches!(error, ScheduleError::KeepsChanging { .. })).await
    }

    async fn declare_once(&self, store: &Store, name: &str, wanted: &Document, is_dry_run: bool) -> Result<Declared, ScheduleError> {
        let (declared, is_written) = match store.schedules_by_name(&[name.to_owned()]).await?.pop().map(|found| readable(&found)) {
            None => (Declared::Created, is_dry_run || store.insert_schedule(name, self.created(name, wanted, store.now())).await?),
            Some(found) => {
                let owner = found.get_str("source").ok();
                if owner != self.namespace.as_deref() {
                    return Err(ScheduleError::Owned { name: name.into(), owner: owner.map(str::to_owned) });
                }
                let Some(change) = self.change(name, wanted, &found, store.now()) else { return Ok(Declared::Unchanged) };
                let revision = found.get("revision").cloned();
                (Declared::Changed, is_dry_run || store.change_schedule_if_unchanged(name, revision, change).await?)
            }
        };
        if is_written { Ok(declared) } else { Err(ScheduleError::KeepsChanging { name: name.into() }) }
    }

    /// The document of a new schedule, without its name.
    fn created(&self, name: &str, wanted: &Document, now: Instant) -> Document {
        let mut document: Document = wanted.clone().into_iter().filter(|(_, value)| *value != Bson::Null).collect();
        document.extend(self.counting_from(name, now));
        document.extend(doc! { "created_at": now, "runs": [], "revision": 1_i64 });
        document
    }

    /// The slots up to `now` are none of this schedule's.
    pub(super) fn counting_from(&self, name: &str, now: Instant) -> Document {
        doc! { "last_slot": now, "next_run": self.next_runs(name, now).next() }
    }

    /// The fields that make the found document the wanted one, null to remove them; `None` if it is that already.
    fn change(&self, name: &str, wanted: &Document, found: &Document, now: Instant) -> Option<Document> {
        let differs = |field: &str| found.get(field).unwrap_or(&Bson::Null) != wanted.get(field).unwrap_or(&Bson::Null);
        let mut change: Document = wanted.clone().into_iter().filter(|(field, _)| differs(field)).collect();
        if change.is_empty() {
            return None;
        }
        if ["cron", "zone", "every_ms"].into_iter().any(differs) {
            change.extend(self.counting_from(name, now));
        }
        Some(change)
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.timing.fmt(f)
    }
}

fn check_name(what: &'static str, name: &str) -> Result<(), InvalidSchedule> {
    let problem = match name {
        "" => "is empty".to_owned(),
        name if name.len() > LONGEST_NAME => format!("has {} bytes, and {LONGEST_NAME} is the limit", name.len()),
        name if name.chars().any(char::is_control) => format!("contains a control character: {name:?}"),
        _ => return Ok(()),
    };
    Err(InvalidSchedule::Name { what, problem })
}

fn digest(name: &str, slot: Instant) -> [u8; 32] {
    Sha256::new().chain_update(name).chain_update([0]).chain_update(slot.timestamp_millis().to_be_bytes()).finalize().into()
}

/// The id of the job of a slot. It is the same for every recruiter and every attempt. Its timestamp is the slot.
pub fn id_of_slot(name: &str, slot: Instant) -> JobId {
    let [.., a, b, c, d] = slot.timestamp().to_be_bytes();
    let digest = digest(name, slot);
    let bytes = [a, b, c, d, digest[0], digest[1], digest[2], digest[3], digest[4], digest[5], digest[6], digest[7]];
    ObjectId::from_bytes(bytes).into()
}

/// Checks before a write that the schema exists: an insert would create a missing collection without a validator.
async fn ready(store: &Store) -> Result<(), ScheduleError> {
    if !store.is_set_up().await? {
        return Err(ScheduleError::NotSetUp { database: store.database().name().into() });
    }
    Ok(store.fresh_clock().await?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(ms: i64) -> Instant {
        Instant::from_timestamp_millis(ms).expect("a date")
    }

    fn every(seconds: u64) -> Schedule {
        Schedule::every(Duration::from_secs(seconds)).expect("an interval").job(NewJob::of_class("c", doc! {}))
    }

    /// A later release must make the same ids: two releases may lead in turns.
    #[test]
    fn the_job_of_a_slot_has_the_same_id_for_ever() {
        let id = id_of_slot("nightly-report", slot(1_772_330_400_000));
        assert_eq!((id.to_string().as_str(), id.made_at()), ("69a39da006b7ef1b1fa0d38f", slot(1_772_330_400_000)));
        assert_ne!(id, id_of_slot("nightly-report", slot(1_772_330_400_001)));
        assert_ne!(id, id_of_slot("nightly-repor", slot(1_772_330_400_000)));
    }

    #[test]
    fn jitter_delays_each_slot_by_less_than_it_and_always_by_the_same() {
        let schedule = every(60).jitter(Duration::from_secs(60));
        let delays: Vec<i64> = (0..1_000).map(|n| (schedule.due("a", slot(n * 60_000)) - slot(n * 60_000)).num_milliseconds()).collect();
        assert!(delays.iter().all(|delay| (0..60_000).contains(delay)));
        let mean = delays.iter().sum::<i64>() / 1_000;
        assert!((27_000..33_000).contains(&mean), "{mean}");
        assert_eq!(schedule.due("a", slot(0)), schedule.due("a", slot(0)));
        assert_ne!(schedule.due("a", slot(0)), schedule.due("b", slot(0)));
        assert_eq!(every(60).due("a", slot(0)), slot(0));
    }

    #[test]
    fn a_schedule_that_cannot_be_is_refused_with_the_reason() {
        let check = |schedule: Schedule, name: &str, expected: &str| {
            let problem = schedule.check(name).expect_err(expected).to_string();
            assert!(problem.contains(expected), "{problem}");
        };
        let minute = || every(60);
        check(minute().jitter(Duration::from_secs(61)), "a", "a jitter of 1m 1s is not possible");
        let cron = Schedule::cron("0,30 * * * *", "UTC").expect("an expression").job(NewJob::of_class("c", doc! {}));
        check(cron.clone().jitter(Duration::from_secs(1_801)), "a", "the shortest time between two runs, 30m");
        assert!(cron.jitter(Duration::from_secs(1_800)).check("a").is_ok());
        check(minute().jitter(Duration::from_micros(1)), "a", "whole milliseconds");
        check(minute().missed(Missed::All(0)), "a", "give 1 to 1000");
        check(minute().missed(Missed::All(1_001)), "a", "give 1 to 1000");
        check(minute().missed(Missed::All(1)).overlap(Overlap::Skip), "a", "exclude each other");
        check(minute(), "", "the name of a schedule is empty");
        check(minute(), &"x".repeat(257), "has 257 bytes");
        check(minute(), "a\nb", "control character");
        check(minute(), " a", "begins or ends with a blank");
        check(minute().in_namespace(""), "a", "the namespace of a schedule is empty");
        check(minute().job(NewJob::of_class("", doc! {})), "a", "the class of a job is empty");
        check(minute().job(NewJob::of_class("c", doc! { "d": "x".repeat(5 << 20) })), "a", "store the data elsewhere");
        let large = NewJob::of_class("c", doc! { "d": "x".repeat((4 << 20) - 100) }).tag("t".repeat(200));
        check(minute().job(large), "a", "4194304 is the limit");
        check(minute().job(NewJob::of_class("c", doc! {}).with_id(JobId::new())), "a", "cannot have an id, a date");
        check(minute().job(NewJob::of_class("c", doc! {}).after(Duration::ZERO)), "a", "cannot have an id, a date");
        check(Schedule::every(Duration::from_secs(1)).expect("an interval"), "a", "has no job");
    }

    #[test]
    fn a_declaration_changes_only_what_is_different() {
        let (now, later) = (slot(90_000), slot(200_500));
        let wanted = |schedule: &Schedule| schedule.stored("a").expect("valid");
        let schedule = every(60).jitter(Duration::from_secs(1)).in_namespace("shop");
        let document = schedule.created("a", &wanted(&schedule), now);
        assert_eq!(document.get("last_slot"), Some(&bson::DateTime::from_chrono(now).into()));
        let change = |to: &Schedule| to.change("a", &wanted(to), &document, later);
        assert_eq!(change(&schedule), None);
        let other_job = change(&schedule.clone().job(NewJob::of_class("d", doc! {}))).expect("a change");
        assert!(other_job.keys().eq(["job"]), "{other_job}");
        let other_time = change(&Schedule { timing: Timing::every(Duration::from_secs(7)).expect("an interval"), ..schedule.clone() });
        let other_time = other_time.expect("a change");
        assert_eq!(
            other_time.get("last_slot"),
            Some(&bson::DateTime::from_chrono(later).into()),
            "old slots of the new interval are not its own"
        );
        let plain = change(&schedule.jitter(Duration::ZERO)).expect("a change");
        assert_eq!(plain, doc! { "jitter_ms": null });
    }
}
