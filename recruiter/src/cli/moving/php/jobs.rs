//! What a document in `scheduled` becomes: a job with the same id, or a reason why it is left alone.

use std::{collections::BTreeMap, time::Duration};

use bson::{Bson, Document};
use recruiter_common::{
    Decision, Failure, NewJob,
    failure::WORKER_DIED,
    ids::JobId,
    instant::Instant,
    retry_policy::{RetryPolicies, RetryPolicy as _},
    schedules::Timing,
};

use super::{
    super::taking::{Found, Reason},
    Left, count, malformed,
    roster::Roster,
    workable,
};

/// Converts the documents.
pub(super) struct Jobs {
    pub(super) now: Instant,
    pub(super) roster: Roster,
    /// The declared schedules by the `urn` of their scheduler.
    pub(super) slots: BTreeMap<String, Slots>,
    pub(super) custom_policy: bool,
}

/// The slots that a schedule runs.
pub(super) struct Slots {
    pub(super) timing: Timing,
    /// Those after this instant, when it was declared first.
    pub(super) since: Instant,
}

impl Jobs {
    /// The class of a job, and what it becomes.
    pub(super) fn convert(&self, document: &Document) -> (String, Found) {
        let name = document.get_document("workable").ok().and_then(|workable| workable.get_str("class").ok());
        (name.unwrap_or_default().to_owned(), self.job(document).unwrap_or_else(|(reason, why)| Found::Left(reason, why)))
    }

    fn job(&self, document: &Document) -> Result<Found, Left> {
        let id = document.get_object_id("_id").map_err(|_| malformed("its `_id` is no ObjectId"))?;
        let is_locked = document.get_bool("locked").map_err(|_| malformed("its `locked` is neither true nor false"))?;
        self.roster.refuse_held(id, is_locked)?;
        if document.get_bool("done").unwrap_or(false) {
            return Err((Reason::Disabled, "it is done, and waits only because a listener of the library failed after that".into()));
        }
        let due = match document.get("scheduled_at") {
            Some(Bson::DateTime(due)) => due.to_chrono(),
            None => return Err((Reason::Disabled, "it has no `scheduled_at`, so the library never runs it".into())),
            Some(_) => return Err(malformed("its `scheduled_at` is no date")),
        };
        let attempts = count(document, "attempts")?;
        if attempts == 0 && self.is_run_by_schedule(document, due) {
            return Ok(Found::BySchedule);
        }
        let (job, note) = workable(document, self.custom_policy)?;
        let job = with_names(job, document)?;
        let created_at = document.get_datetime("created_at").ok().map(|at| at.to_chrono()).filter(|at| *at <= self.now);
        let id = JobId::from(id);
        let job = job.with_id(id).at(due).continues(attempts, created_at);
        if has_died(document) {
            self.refuse_repetition(&job)?;
        }
        Ok(Found::Job(Box::new(job), id, note))
    }

    /// A scheduler of the library makes the job of its next slot ahead.
    fn is_run_by_schedule(&self, document: &Document, due: Instant) -> bool {
        let by = document.get_document("scheduled").and_then(|scheduled| scheduled.get_document("by"));
        let Ok(by) = by else { return false };
        let slots = by
            .get_str("urn")
            .ok()
            .filter(|_| by.get_str("namespace").is_ok_and(|namespace| namespace == "scheduler"))
            .and_then(|urn| self.slots.get(urn));
        let just_before = due - Duration::from_millis(1);
        slots.is_some_and(|slots| due > slots.since && slots.timing.next_after(just_before) == Some(due))
    }

    /// The library asks the retry policy before it runs a job again whose worker has died.
    fn refuse_repetition(&self, job: &NewJob) -> Result<(), Left> {
        // What this job system refuses is named when it is enqueued.
        let Ok(job) = job.to_job(self.now) else { return Ok(()) };
        let failure = Failure::new(WORKER_DIED, "a worker of the library died");
        let decided =
            RetryPolicies::default().decode(job.settings.retry_policy()).map(|policy| policy.decide(&job.history(), &failure, self.now));
        let why = match decided {
            Ok(Decision::RetryAfter(_)) => return Ok(()),
            Ok(Decision::Archive(_)) => "its retry policy does not repeat it",
            Err(_) => "its retry policy is not known here",
        };
        Err((Reason::Died, format!("a worker of the library died while it ran, and {why}: if it may run again, enqueue it by hand")))
    }
}

/// Whether a job that no living worker has has begun and not ended: an end has a date, or the class of an exception. A worker that died
/// before it ran anything leaves the execution before.
fn has_died(document: &Document) -> bool {
    let has = |last: &Document, field: &str| last.contains_key(field);
    document.get_document("last_execution").is_ok_and(|last| has(last, "started_at") && !has(last, "ended_at") && !has(last, "class"))
}

/// The group, the tags and the `urn`.
fn with_names(job: NewJob, document: &Document) -> Result<NewJob, Left> {
    let job = match document.get("group") {
        Some(Bson::String(group)) if !group.is_empty() => job.in_group(group),
        // In the library it is then of the group `generic`.
        None | Some(Bson::Null | Bson::String(_)) => job,
        Some(Bson::Array(none)) if none.is_empty() => job,
        Some(_) => return Err(malformed("its `group` is no text")),
    };
    let tags: Vec<&Bson> = match document.get("tags") {
        None | Some(Bson::Null) => Vec::new(),
        Some(Bson::Array(tags)) => tags.iter().collect(),
        // PHP stores an array with gaps as a document.
        Some(Bson::Document(tags)) => tags.values().collect(),
        Some(_) => return Err(malformed("its `tags` are no list")),
    };
    let tags = tags.into_iter().map(|tag| tag.as_str().ok_or_else(|| malformed("one of its `tags` is no text")));
    let job = tags.collect::<Result<Vec<_>, _>>()?.into_iter().fold(job, NewJob::tag);
    match document.get("urn") {
        None | Some(Bson::Null) => Ok(job),
        Some(Bson::String(urn)) => Ok(job.urn(urn)),
        Some(_) => Err(malformed("its `urn` is no text")),
    }
}

#[cfg(test)]
mod tests {
    use bson::{doc, oid::ObjectId};
    use recruiter_common::schedules::Schedule;

    use super::*;

    /// Noon of a day.
    fn now() -> Instant {
        "2026-03-02T12:00:00Z".parse().unwrap()
    }

    fn date(minutes: i64) -> bson::DateTime {
        bson::DateTime::from_millis(now().timestamp_millis() + minutes * 60_000)
    }

    fn policy(times: i32) -> Document {
        let parameters = doc! { "retry_how_many_times": times, "seconds_to_wait_before_retry": 60 };
        doc! { "class": r"Recruiter\RetryPolicy\RetryManyTimes", "parameters": parameters }
    }

    fn converted(more: Document) -> Found {
        let mut document = doc! {
            "_id": ObjectId::new(), "done": false, "created_at": date(-60), "locked": false, "attempts": 0, "group": "generic",
            "workable": { "class": r"Acme\Mail", "parameters": { "to": "ada" }, "method": "execute" }, "scheduled_at": date(0),
            "retry_policy": policy(2),
        };
        document.extend(more);
        let slots = Slots { timing: Schedule::cron("0 * * * *", "UTC").unwrap().timing().clone(), since: now() };
        let slots = [("report".to_owned(), slots)].into();
        Jobs { now: now(), roster: Roster::default(), slots, custom_policy: false }.convert(&document).1
    }

    #[track_caller]
    fn job(more: Document) -> recruiter_common::job::Job {
        let found = converted(more);
        let Found::Job(job, id, None) = &found else { panic!("{found:?}") };
        Some(job.to_job(now()).unwrap()).filter(|job| job.id == *id).unwrap()
    }

    #[track_caller]
    fn left(more: Document, reason: Reason, words: &str) {
        let Found::Left(is, why) = converted(more) else { panic!("it is taken over") };
        assert!(is == reason && why.contains(words), "{is:?}: {why}");
    }

    #[test]
    fn what_waits_becomes_a_job_with_its_id_its_names_and_its_attempts() {
        let id = ObjectId::new();
        let mail = job(doc! {
            "_id": id, "attempts": 2_i64, "group": "mail", "tags": ["a", "b"], "urn": "order:17", "scheduled_at": date(5),
            "last_execution": { "started_at": date(-9), "ended_at": date(-8), "class": "Exception" },
        });
        assert_eq!((mail.id, mail.attempts, mail.class.as_str()), (id.into(), 2, r"Acme\Mail"));
        assert_eq!((mail.created_at, mail.due()), (date(-60).to_chrono(), Some(date(5).to_chrono())));
        assert_eq!(
            (mail.settings.group(), &mail.settings.tags, mail.settings.urn.as_deref()),
            ("mail", &vec!["a".into(), "b".into()], Some("order:17"))
        );
        assert_eq!((mail.settings.retry_policy.unwrap().class.as_str(), mail.parameters), ("RetryManyTimes", doc! { "to": "ada" }.into()));
    }

    #[test]
    fn what_php_stores_in_its_own_way_is_read() {
        let workable = |parameters: Bson, method: &str| doc! { "workable": { "class": "C", "parameters": parameters, "method": method } };
        for (stored, parameters) in [
            (Bson::Array(vec![]), doc! {}),
            (Bson::Null, doc! {}),
            (vec![1, 2].into(), doc! { "parameters": [1, 2] }),
            ("x".into(), doc! { "parameters": "x" }),
        ] {
            assert_eq!(job(workable(stored, "execute")).parameters, parameters.into());
        }
        assert_eq!(job(workable(Bson::Null, "send")).class, "C::send");
        assert_eq!(job(doc! { "tags": { "0": "a", "2": "b" } }).settings.tags, ["a", "b"]);
        for group in [Bson::Null, "".into(), Bson::Array(vec![])] {
            assert_eq!(job(doc! { "group": group }).settings.group(), "generic");
        }
        assert_eq!(job(doc! { "attempts": 3.0 }).attempts, 3);
    }

    #[test]
    fn a_job_that_had_begun_is_repeated_as_its_retry_policy_says() {
        let began = |attempts: i32, times: i32, more: Document| {
            let mut last = doc! { "scheduled_at": date(-9), "started_at": date(-9) };
            last.extend(more);
            doc! { "locked": true, "attempts": attempts, "retry_policy": policy(times), "last_execution": last }
        };
        assert_eq!(job(began(2, 2, doc! {})).attempts, 2);
        left(began(3, 2, doc! {}), Reason::Died, "does not repeat it");
        left(began(1, 0, doc! { "crashed": true }), Reason::Died, "does not repeat it");
        // It was locked again, and did not begin.
        for over in [doc! { "ended_at": date(-8), "crashed": true }, doc! { "class": "E", "crashed": true }] {
            job(began(1, 0, over));
        }
        job(doc! { "locked": true, "last_execution": { "crashed": true } });
    }

    #[test]
    fn a_slot_that_a_schedule_runs_is_no_job() {
        let by = |minutes: i64, urn: &str, attempts: i32| {
            let scheduled = doc! { "by": { "namespace": "scheduler", "urn": urn }, "executions": 4 };
            converted(doc! { "scheduled_at": date(minutes), "attempts": attempts, "scheduled": scheduled })
        };
        assert!(matches!(by(60, "report", 0), Found::BySchedule));
        // Before the schedule, between its slots, a retry, and a scheduler that was left alone.
        for job in [by(0, "report", 0), by(61, "report", 0), by(60, "report", 1), by(60, "other", 0)] {
            assert!(matches!(job, Found::Job(..)));
        }
        let recovered = doc! { "by": { "namespace": "recovering-archived-job", "urn": "report" }, "executions": -1 };
        assert!(matches!(converted(doc! { "scheduled_at": date(60), "scheduled": recovered }), Found::Job(..)));
    }

    #[test]
    fn what_is_left_alone_has_a_reason() {
        left(doc! { "_id": 7 }, Reason::Malformed, "no ObjectId");
        left(doc! { "locked": 1 }, Reason::Malformed, "`locked`");
        left(doc! { "done": true }, Reason::Disabled, "is done");
        left(doc! { "scheduled_at": "soon" }, Reason::Malformed, "no date");
        left(doc! { "workable": 7 }, Reason::Malformed, "`workable`");
        left(doc! { "workable": { "class": Bson::Null } }, Reason::Malformed, "`class`");
        left(doc! { "workable": { "class": "C", "method": 7 } }, Reason::Malformed, "`method`");
        left(doc! { "retry_policy": { "class": "Mine" } }, Reason::RetryPolicy, "Mine");
        left(doc! { "group": ["a"] }, Reason::Malformed, "`group`");
        left(doc! { "tags": "a" }, Reason::Malformed, "`tags`");
        left(doc! { "tags": [7] }, Reason::Malformed, "`tags`");
        left(doc! { "urn": 7 }, Reason::Malformed, "`urn`");
        for attempts in [Bson::Double(0.5), (-1).into(), f64::NAN.into(), (1_i64 << 40).into(), "1".into()] {
            left(doc! { "attempts": attempts }, Reason::Malformed, "`attempts`");
        }
    }
}
