//! The document of a new job: every setting is validated before anything is sent.

use bson::{Bson, Document, doc};

use super::{
    EnqueueError, NewJob,
    new_job::{Expires, Given, Scheduled, document_or_nothing},
    waiting::make_wait,
};
use crate::{
    base::{DUE_MS, Instant, JobId, check_name, check_traceparent, check_trimmed_name, instant::later, of_bson},
    job::{Job, LONGEST_GATE, MOST_ITEMS, Settings},
    limits::{InvalidSetting, check_resource, check_stored_resource},
    mongo::LARGEST_WORKABLE,
    unique::{Content, Keyed},
};

/// Bytes reserved in a job's document for tags, retry policy and all other fields except the workable.
const ROOM_FOR_THE_REST: usize = 64 * 1024;

impl NewJob {
    /// The job as it would be stored now. Nothing is enqueued.
    ///
    /// # Errors
    /// Those of enqueueing that need no database.
    ///
    /// # Panics
    /// Never: a new job is a valid one.
    pub fn to_job(&self, now: Instant) -> Result<Job, EnqueueError> {
        let (_, document) = self.clone().into_document(now)?;
        Ok(Job::try_from(document).expect("a new job has all that a job must have"))
    }

    /// Validates the job and returns its document.
    pub(crate) fn into_document(self, now: Instant) -> Result<(JobId, Document), EnqueueError> {
        self.into_keyed_document(now).map(|(id, document, _)| (id, document))
    }

    /// Validates the job and returns its document, and its key if it is unique.
    pub(super) fn into_keyed_document(self, now: Instant) -> Result<(JobId, Document, Option<Keyed>), EnqueueError> {
        let job = self.traced();
        job.check()?;
        let (at, expires_at) = job.dates(now)?;
        let class = job.class;
        let unstorable = |reason: String| EnqueueError::Parameters { class: class.clone(), reason };
        let given = job.given.map_err(unstorable)?;
        let keyed = job.unique.map(|unique| {
            let content = match &given {
                Given::Parameters(parameters) => Content::Parameters(parameters),
                Given::Items(items) => Content::Items(items),
            };
            unique.validated(&class, &content, (at - now).to_std().unwrap_or_default())
        });
        let keyed = keyed.transpose().map_err(|problem| EnqueueError::Unique { class: class.clone(), problem })?;
        let is_bundle = matches!(given, Given::Items(_));
        let (is_sent_once, id) = (job.id.is_none(), job.id.or(job.made_id).unwrap_or_else(JobId::new));
        let (attempts, created_at) = job.continues.unwrap_or_default();
        let mut document = doc! {
            "_id": id,
            "done": false,
            "created_at": created_at.unwrap_or(now),
            "locked": false,
            "attempts": attempts,
            "workable": workable(&class, given)?,
            "scheduled_at": at,
        };
        document.extend(job.settings.stored().map_err(|error| unstorable(of_bson(&error)))?);
        let mut add = |field: &str, value: Option<Bson>| document.extend(value.map(|value| (field.to_owned(), value)));
        add("once", is_sent_once.then_some(true.into()));
        if let Some(keyed) = &keyed {
            add(keyed.scope.field(), Some(keyed.key.clone().into()));
        }
        add("expires_at", expires_at.map(Bson::from));
        add("item_outcomes", is_bundle.then(|| Bson::Array(Vec::new())));
        add("recovered_from", job.recovered_from.map(Bson::from));
        add("schedule", job.schedule.map(Bson::from));
        add("graph", job.graph.map(Bson::from));
        if !job.waits_for.is_empty() {
            make_wait(&mut document, &job.waits_for, at, now);
        }
        // The size includes tags and policy: the rest of the document needs room for the history and the result.
        match document.to_vec().map_err(|error| unstorable(of_bson(&error)))?.len() {
            bytes if bytes > LARGEST_WORKABLE + ROOM_FOR_THE_REST => Err(EnqueueError::TooLarge { class, bytes }),
            _ => Ok((id, document, keyed)),
        }
    }

    /// Checks the class and the settings. A retried job has the names, the trace and the retry policy that it had.
    fn check(&self) -> Result<(), EnqueueError> {
        let Settings { group, tags, urn, traceparent, limits, .. } = &self.settings;
        let is_retry = self.recovered_from.is_some();
        let check = if is_retry { check_name } else { check_trimmed_name };
        for (what, name) in [("class", Some(&self.class)), ("group", group.as_ref())] {
            name.map_or(Ok(()), |name| check(name)).map_err(|problem| EnqueueError::Name { what, problem })?;
        }
        for (what, name) in tags.iter().map(|tag| ("tag", tag)).chain(urn.iter().map(|urn| ("urn", urn))) {
            check_name(name).map_err(|problem| EnqueueError::Name { what, problem })?;
        }
        if let Some(traceparent) = traceparent.as_ref().filter(|_| !is_retry) {
            check_traceparent(traceparent).map_err(|problem| EnqueueError::Name { what: "trace", problem })?;
        }
        let check_limit = if is_retry { check_stored_resource } else { check_resource };
        limits
            .iter()
            .try_for_each(|name| check_limit(name))
            .and_then(|()| self.settings.line.iter().try_for_each(|key| check_stored_resource(key)))
            .and_then(|()| check_gate(&self.settings))
            .map_err(|problem| EnqueueError::Limit { problem })?;
        match (self.wrong_priority, &self.policy_problem) {
            (Some(number), _) => Err(EnqueueError::Priority { number }),
            (None, Some(problem)) if !is_retry => Err(EnqueueError::Policy { class: self.class.clone(), problem: problem.clone() }),
            (None, _) => Ok(()),
        }
    }

    /// When it is due, and when it expires.
    fn dates(&self, now: Instant) -> Result<(Instant, Option<Instant>), EnqueueError> {
        let is_date = |at: &Instant| DUE_MS.contains(&at.timestamp_millis());
        let at = match self.scheduled {
            Scheduled::Now => now,
            Scheduled::At(at) => at,
            Scheduled::After(delay) => later(now, delay),
        };
        let expires_at = match self.expires {
            None => None,
            Some(Expires::At(at)) => Some(at),
            Some(Expires::After(time)) => Some(later(now, time)),
        };
        if !is_date(&at) {
            return Err(EnqueueError::Date);
        }
        match &expires_at {
            Some(expiry) if !is_date(expiry) => Err(EnqueueError::ExpiryDate),
            Some(expiry) if expiry.timestamp_millis() <= at.timestamp_millis() => Err(EnqueueError::ExpiresTooEarly),
            _ => Ok((at, expires_at)),
        }
    }
}

fn check_gate(settings: &Settings) -> Result<(), InvalidSetting> {
    let gate = settings.gate().unwrap_or_default();
    let problem = match &settings.line {
        Some(_) if !settings.limits.is_empty() => {
            "a job in a line cannot name resources as well: limit its group, or leave the line out".to_owned()
        }
        None if settings.halt_on_failure => "only a job in a line can halt one: name its line".to_owned(),
        Some(_) | None if gate.len() > LONGEST_GATE => {
            format!("the names of all resources of a job must have at most {LONGEST_GATE} bytes together, not {}", gate.len())
        }
        Some(_) | None => return Ok(()),
    };
    Err(InvalidSetting(problem))
}

fn workable(class: &str, given: Given) -> Result<Document, EnqueueError> {
    let unstorable = |reason: String| EnqueueError::Parameters { class: class.to_owned(), reason };
    let workable = match given {
        Given::Parameters(parameters) => {
            let parameters = document_or_nothing(parameters).map_err(unstorable)?;
            doc! { "class": class, "parameters": parameters, "method": "execute" }
        }
        Given::Items(items) if items.is_empty() => return Err(EnqueueError::NoItems { class: class.to_owned() }),
        Given::Items(items) if items.len() > MOST_ITEMS => return Err(EnqueueError::TooManyItems { class: class.to_owned() }),
        Given::Items(items) => doc! { "class": class, "items": items, "method": "execute" },
    };
    match workable.to_vec().map_err(|error| unstorable(of_bson(&error)))?.len() {
        bytes if bytes > LARGEST_WORKABLE => Err(EnqueueError::TooLarge { class: class.to_owned(), bytes }),
        _ => Ok(workable),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde::Serialize;

    use super::*;
    use crate::{
        base::LONGEST_NAME,
        enqueue::{defaults::Defaults, workable::Workable},
        job::{Keep, Priority, StoredPolicy},
        retry_policy::DoNotDoItAgain,
    };

    fn check(job: NewJob) -> Result<Document, String> {
        job.into_document(Instant::default()).map(|(_, document)| document).map_err(|error| error.to_string())
    }

    #[test]
    fn hostile_names_are_stored_or_refused_and_never_cut() {
        for name in ["$where", "a.b", "ünï", "'; drop", "x".repeat(LONGEST_NAME).as_str()] {
            let document = check(NewJob::of_class(name, doc! {}).in_group(name).tag(name).urn(name)).expect("a name as good as any");
            assert_eq!(document.get_str("group").expect("a text"), name);
        }
        for (name, problem) in [("", "is empty"), ("a\0b", "contains a NUL"), ("x".repeat(10_000).as_str(), "has 10000 bytes")] {
            for job in
                [NewJob::of_class(name, doc! {}), NewJob::of_class("a", doc! {}).in_group(name), NewJob::of_class("a", doc! {}).tag(name)]
            {
                assert!(check(job).is_err_and(|error| error.contains(problem)), "{problem}");
            }
        }
    }

    #[test]
    fn a_blank_around_the_name_of_a_class_or_group_is_refused_but_for_a_job_that_had_it_before() {
        for name in [" mail", "mail\n", "mail\r", "\tmail"] {
            for job in [NewJob::of_class(name, doc! {}), NewJob::of_class("a", doc! {}).in_group(name)] {
                assert!(check(job.clone()).is_err_and(|error| error.contains("begins or ends with a blank")), "{name:?}");
                assert!(check(job.recovered_from(JobId::new())).is_ok(), "{name:?}");
            }
        }
    }

    #[test]
    fn a_job_of_another_system_continues_with_its_attempts_and_its_age() {
        let (now, before) = (Instant::UNIX_EPOCH + Duration::from_secs(90), Instant::UNIX_EPOCH);
        let job = |job: NewJob| job.to_job(now).expect("a job");
        let continued = job(NewJob::of_class("a", doc! {}).continues(3, Some(before)));
        assert_eq!((continued.attempts, continued.history().attempts, continued.created_at), (3, 3, before));
        let (hostile, new) = (job(NewJob::of_class("a", doc! {}).continues(u32::MAX, None)), job(NewJob::of_class("a", doc! {})));
        assert_eq!((hostile.attempts, hostile.created_at, new.attempts, new.created_at), (1_000_000_000, now, 0, now));
    }

    #[test]
    fn a_payload_over_the_limit_is_refused_before_it_is_sent() {
        let of = |bytes: usize| check(NewJob::of_class("a", doc! { "data": "x".repeat(bytes) }));
        assert!(of(LARGEST_WORKABLE - 200).is_ok());
        assert!(of(LARGEST_WORKABLE).is_err_and(|error| error.contains("store the data elsewhere")));
    }

    #[test]
    fn so_is_whatever_else_is_too_large() {
        let tags =
            |count: usize| check((0..count).fold(NewJob::of_class("a", doc! {}), |job, n| job.tag(format!("{n}{}", "x".repeat(200)))));
        assert!(tags(100).is_ok());
        assert!(tags(30_000).is_err_and(|error| error.contains("store the data elsewhere")));
    }

    #[test]
    fn a_job_is_due_in_a_year_of_four_digits() {
        let at = |ms: i64| check(NewJob::of_class("a", doc! {}).at(Instant::from_timestamp_millis(ms).expect("a date")));
        for ms in [*DUE_MS.start(), *DUE_MS.end()] {
            assert!(at(ms).is_ok());
        }
        for ms in [DUE_MS.start() - 1, DUE_MS.end() + 1] {
            assert!(at(ms).is_err_and(|error| error.contains("years 1 to 9999")));
        }
        let latest = Bson::from(bson::DateTime::from_millis(*DUE_MS.end()));
        let late = check(NewJob::of_class("a", doc! {}).after(Duration::MAX)).expect("a delay beyond the latest date");
        assert_eq!(late.get("scheduled_at"), Some(&latest));
        let kept = check(NewJob::of_class("a", doc! {}).expires_after(Duration::MAX)).expect("an expiry beyond it");
        assert_eq!(kept.get("expires_at"), Some(&latest));
    }

    #[test]
    fn a_misspelt_parameter_of_a_policy_is_refused_but_for_a_job_that_had_it_before() {
        let policy =
            |class: &str| StoredPolicy { class: class.into(), parameters: doc! { "seconds_to_wait_before_retry": 1, "jiter": 0.1 }.into() };
        let job = |class: &str| NewJob::of_class("a", doc! {}).retry_stored(policy(class));
        assert!(check(job("RetryForever")).is_err_and(|error| error.contains("`jiter` is unknown")));
        assert!(check(job("RetryForever").recovered_from(JobId::new())).is_ok());
        assert!(check(job("OneOfTheirOwn")).is_ok());
        assert!(check(job("RetryForever").retry(&DoNotDoItAgain)).is_ok());
        let impossible = crate::retry_policy::ExponentialBackoff::new(0, Duration::ZERO);
        assert!(impossible.is_err() && check(NewJob::of_class("a", doc! {}).retry(impossible)).is_err());
    }

    #[test]
    fn parameters_must_be_a_document() {
        let of = |parameters: Bson| check(NewJob::of("a", Ok(parameters)));
        assert!(of(Bson::Null).is_ok());
        assert!(of(Bson::Int32(1)).is_err_and(|error| error.contains("must be a struct or a map")));
    }

    #[test]
    fn a_bundle_has_some_items_and_not_too_many_or_too_large_ones() {
        let of = |count: usize, bytes: usize| check(NewJob::bundle_of_class("a", (0..count).map(|_| doc! { "data": "x".repeat(bytes) })));
        for count in [1, MOST_ITEMS] {
            let document = of(count, 10).expect("a bundle");
            let workable = document.get_document("workable").expect("a document");
            assert!(workable.get_array("items").is_ok_and(|items| items.len() == count));
            assert!(!workable.contains_key("parameters") && document.get_array("item_outcomes").is_ok_and(Vec::is_empty));
        }
        assert!(of(0, 10).is_err_and(|error| error.contains("no items")));
        assert!(of(MOST_ITEMS + 1, 10).is_err_and(|error| error.contains("more than 1000 items")));
        assert!(of(MOST_ITEMS, LARGEST_WORKABLE / MOST_ITEMS).is_err_and(|error| error.contains("store the data elsewhere")));
        let unsized_items = NewJob::of_items("a", std::iter::repeat_with(|| Ok(Bson::Document(doc! {}))));
        assert!(check(unsized_items).is_err_and(|error| error.contains("more than 1000 items")), "it does not look for the end");
        let number = NewJob::of_items("a", [Ok(Bson::Null), Ok(Bson::Int32(1))].into_iter());
        assert!(check(number).is_err_and(|error| error.contains("item 1: they must be a struct or a map")));
    }

    /// A class with default settings for its jobs.
    #[derive(Serialize, serde::Deserialize)]
    struct Invoice {}

    impl Workable for Invoice {
        const CLASS: &'static str = "Invoice";
        type Output = ();

        fn defaults() -> Defaults {
            let retry = crate::retry_policy::RetryManyTimes::new(3, Duration::from_secs(1));
            Defaults::default().group("invoices").priority(7).retry(retry).keep(Keep::Failures)
        }
    }

    #[test]
    fn a_job_is_what_its_class_says_unless_it_says_otherwise() {
        let of = |document: Document| {
            let policy = document.get_document("retry_policy").and_then(|policy| policy.get_str("class")).map(str::to_owned);
            let (priority, keep) = (document.get_i32("priority").ok(), document.get_str("keep").map(str::to_owned));
            (document.get_str("group").map(str::to_owned).ok(), priority, policy.ok(), keep.ok())
        };
        let expected = |group: &str, priority, policy: &str, keep: Option<&str>| {
            (Some(group.to_owned()), Some(priority), Some(policy.to_owned()), keep.map(str::to_owned))
        };
        let of_class = expected("invoices", 7, "RetryManyTimes", Some("failures"));
        assert_eq!(of(check(Invoice {}.as_job()).expect("a job")), of_class);
        assert_eq!(of(check(NewJob::bundle([Invoice {}])).expect("a job")), of_class);
        let other = Invoice {}.as_job().in_group("x").priority(Priority::default()).retry(&DoNotDoItAgain).keep(Keep::All);
        assert_eq!(of(check(other).expect("a job")), expected("x", 5, "DoNotDoItAgain", None));
    }
}
