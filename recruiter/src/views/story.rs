//! A job in words, for people: on one line of a list, and as a story. Text of the database is cut, and has no control characters.

use bson::{Bson, Document};
use recruiter_common::{
    failure::Failure,
    instant::Instant,
    job::{
        Execution, Job, JobProgress, JobState, Settings, Stage, StoredPolicy,
        bundle::{failure_of, is_done},
        notes::LogLine,
    },
    retry_policy::RetryPolicies,
    store::lossy,
    text::{apart, briefly_apart, moment, printable},
};
use serde_json::Value;

use super::job::{MALFORMED, Read};

/// A job on one line.
pub(crate) struct Line {
    pub(crate) id: String,
    /// Its state in one word.
    pub(crate) state: &'static str,
    /// `None`: the document is not a job.
    pub(crate) stage: Option<Stage>,
    pub(crate) class: String,
    pub(crate) group: String,
    pub(crate) priority: String,
    pub(crate) starts: String,
    /// Since or until when it is in its state.
    pub(crate) when: String,
    /// How it has failed, or how far it is.
    pub(crate) below: Option<String>,
}

impl Line {
    pub(crate) fn of(job: &Read, now: Instant) -> Self {
        match job {
            Ok(job) => Self::of_job(job, now),
            Err((document, error)) => Self::of_malformed(&lossy(document), printable(&error.to_string(), 400)),
        }
    }

    /// The fields that can be read.
    fn of_malformed(document: &Document, problem: String) -> Self {
        let text = |value: Option<&Bson>, width| {
            value.map_or_else(|| "-".into(), |value| printable(value.as_str().unwrap_or(&value.to_string()), width))
        };
        let class = document.get_document("workable").ok().and_then(|workable| workable.get("class"));
        Self {
            id: document.get("_id").map(id_in).unwrap_or_default(),
            state: MALFORMED,
            stage: None,
            class: text(class, 32),
            group: text(document.get("group"), 24),
            priority: text(document.get("priority"), 8),
            starts: text(document.get("attempts"), 8),
            when: "-".into(),
            below: Some(problem),
        }
    }

    fn of_job(job: &Job, now: Instant) -> Self {
        let stage = Stage::of(job, now);
        let failure = job.last_execution.as_ref().and_then(|execution| {
            let class = execution.class.as_deref()?;
            Some(format!("{}: {}", printable(class, 80), printable(execution.message.as_deref().unwrap_or_default(), 400)))
        });
        let below = match (&job.state, failure) {
            (JobState::Archived { why }, _) if Stage::of_end(why) != Stage::Failed => None,
            (JobState::Archived { why }, None) => Some(printable(why.as_str(), 80)),
            // The reasons `malformed` and `interrupted` are also error classes: show them once.
            (JobState::Archived { why }, Some(failure)) if failure.starts_with(&format!("{why}: ")) => Some(failure),
            (JobState::Archived { why }, Some(failure)) => Some(format!("{}; {failure}", printable(why.as_str(), 80))),
            (JobState::Waiting { .. }, failure) => failure.map(|failure| format!("failed before; {failure}")),
            (JobState::Locked { .. }, _) => JobProgress::of_job(job).map(|progress| printable(&progress.to_string(), 400)),
        };
        Self {
            id: job.id.to_string(),
            state: stage.word(),
            stage: Some(stage),
            class: printable(&job.class, 32),
            group: printable(job.settings.group(), 24),
            priority: job.settings.priority().to_string(),
            starts: job.attempts.to_string(),
            when: when(job, stage, now, briefly_apart).unwrap_or_else(|| "-".into()),
            below,
        }
    }
}

/// An id for people.
pub(crate) fn id_in(id: &Bson) -> String {
    id.as_object_id().map_or_else(|| printable(&id.to_string(), 24), |id| id.to_hex())
}

/// What a job waits for that has no date.
fn waits_for(job: &Job) -> String {
    match job.parents().len() {
        _ if !job.is_waiting => "for its predecessor".into(),
        1 => "for 1 job".into(),
        jobs => format!("for {jobs} jobs"),
    }
}

/// Since or until when a job is in this stage, if that is known.
fn when(job: &Job, stage: Stage, now: Instant, apart: fn(Instant, Instant) -> String) -> Option<String> {
    let execution = job.last_execution.as_ref();
    match job.state {
        JobState::Waiting { .. } if stage == Stage::Waits => Some(waits_for(job)),
        JobState::Waiting { at } => Some(format!("{} {}", if at <= now { "due" } else { "in" }, apart(at, now))),
        JobState::Locked { .. } => execution?.started_at.map(|at| format!("for {}", apart(at, now))),
        JobState::Archived { .. } => execution?.ended_at.map(|at| format!("{} ago", apart(at, now))),
    }
}

/// The state of a job in words, with its dates and its finish reason.
pub(crate) fn state(job: &Job, now: Instant) -> String {
    let stage = Stage::of(job, now);
    let when = when(job, stage, now, apart).unwrap_or_default();
    let more = match &job.state {
        JobState::Waiting { at } if stage != Stage::Waits => {
            format!("due {} {} ({})", if *at <= now { "for" } else { "in" }, apart(*at, now), moment(*at))
        }
        JobState::Archived { why } if stage == Stage::Failed => format!("{}, {when}", printable(why.as_str(), 80)),
        JobState::Waiting { .. } | JobState::Locked { .. } | JobState::Archived { .. } => when,
    };
    format!("{}, {more}", stage.word())
}

/// Every setting that the job has, with its name in words.
pub(crate) fn settings(settings: &Settings) -> Vec<(String, String)> {
    let Ok(Value::Object(all)) = serde_json::to_value(settings) else { return Vec::new() };
    let text = |name: &str, value: Value| match value {
        Value::Object(_) if name == "retry_policy" => retry_policy(settings.retry_policy()),
        Value::String(text) => printable(&text, 256),
        Value::Array(texts) => texts.iter().filter_map(Value::as_str).map(|text| printable(text, 256)).collect::<Vec<_>>().join(", "),
        other @ (Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_)) => printable(&other.to_string(), 256),
    };
    all.into_iter().map(|(name, value)| (name.replace('_', " "), text(&name, value))).collect()
}

/// A line of the log.
pub(crate) fn log_line(line: &LogLine) -> String {
    let item = line.item.map(|item| format!(" item {item}")).unwrap_or_default();
    format!("{} attempt {}{item}: {}", moment(line.at), line.attempt, printable(&line.line, 1_024))
}

/// The policy, with any error in its parameters: a worker ignores an unknown parameter.
fn retry_policy(policy: &StoredPolicy) -> String {
    let mut text = printable(&policy.class, 256);
    if policy.parameters != Bson::Null {
        text.push(' ');
        text.push_str(&printable(&policy.parameters.clone().into_relaxed_extjson().to_string(), 400));
    }
    match RetryPolicies::default().check(policy) {
        Err(problem) if problem.unknown_class().is_none() => {
            text.push_str(&format!(" ({})", printable(&problem.to_string(), 400)));
        }
        Ok(()) | Err(_) => {}
    }
    text
}

/// Counts of the outcomes of a bundle's items, as text.
pub(crate) fn items(outcomes: &[Bson]) -> String {
    let done = outcomes.iter().filter(|outcome| is_done(outcome)).count();
    let failed: Vec<(usize, Failure)> =
        outcomes.iter().enumerate().filter_map(|(index, outcome)| Some((index, failure_of(outcome)?.0))).collect();
    let first = failed.first().map(|(index, failure)| printable(&format!(", the first of them item {index}: {}", failure.message), 400));
    format!("{done} of {} done, {} failed{}", outcomes.len(), failed.len(), first.unwrap_or_default())
}

/// When and where an execution ran.
pub(crate) fn ran(execution: &Execution, now: Instant) -> String {
    let process = match (&execution.hostname, execution.pid) {
        (Some(hostname), Some(pid)) => format!(" on {}:{pid}", printable(hostname, 80)),
        _ => String::new(),
    };
    match (execution.started_at, execution.ended_at) {
        (Some(started), Some(ended)) => format!("{}{process}, {} ms", moment(started), (ended - started).num_milliseconds().max(0)),
        (Some(started), None) => format!("{}{process}, running for {}", moment(started), apart(started, now)),
        (None, Some(ended)) => format!("{}, never started", moment(ended)),
        (None, None) => "at an unknown time".into(),
    }
}

/// How an execution ended.
pub(crate) fn ended(execution: &Execution) -> &'static str {
    match (&execution.class, execution.crashed) {
        (_, Some(true)) => "its worker died",
        (Some(_), _) => "failed",
        (None, _) if execution.ended_at.is_some() => "succeeded",
        (None, _) => "not ended",
    }
}

#[cfg(test)]
mod tests {
    use bson::doc;

    use super::*;

    fn job(more: Document) -> Job {
        let mut document = doc! {
            "_id": bson::oid::ObjectId::from_bytes([7; 12]), "locked": false, "group": "g", "priority": 3,
            "scheduled_at": bson::DateTime::from_millis(60_000), "workable": { "class": "c", "parameters": { "a": 1 } },
        };
        document.extend(more);
        if document.contains_key("why") {
            document.remove("scheduled_at");
        }
        Job::try_from(document).unwrap()
    }

    #[test]
    fn states_are_said_in_few_words() {
        let check = |more: Document, now: i64, expected: &str| {
            assert_eq!(state(&job(more), bson::DateTime::from_millis(now).to_chrono()), expected);
        };
        let at = bson::DateTime::from_millis(10_000);
        let started = doc! { "worker": bson::oid::ObjectId::new(), "start": bson::oid::ObjectId::new(), "started_at": at };
        check(doc! {}, 0, "postponed, due in 1m (1970-01-01T00:01:00.000Z)");
        check(doc! {}, 65_000, "queued, due for 5s (1970-01-01T00:01:00.000Z)");
        check(doc! { "locked": true, "last_execution": started.clone() }, 20_000, "running, for 10s");
        check(doc! { "locked": true, "last_execution": started, "cancel_requested_at": at }, 20_000, "cancelling, for 10s");
        check(doc! { "why": "done", "last_execution": { "ended_at": at } }, 20_000, "done, 10s ago");
        check(doc! { "why": "gave-up", "last_execution": { "ended_at": at } }, 20_000, "failed, gave-up, 10s ago");
        let latest = bson::DateTime::from_millis(253_402_300_799_999);
        let waits = doc! { "scheduled_at": latest, "waiting": true, "waits_for": [bson::oid::ObjectId::new(), bson::oid::ObjectId::new()] };
        check(waits.clone(), 0, "waits, for 2 jobs");
        let once_more = doc! { "scheduled_at": latest, "unique_after": "k" };
        check(once_more.clone(), 0, "waits, for its predecessor");
        for (more, when) in [(waits, "for 2 jobs"), (once_more, "for its predecessor")] {
            let line = Line::of(&Ok(job(more)), Instant::UNIX_EPOCH);
            assert_eq!((line.state, &*line.when), ("waits", when));
        }
    }

    #[test]
    fn a_policy_is_shown_with_what_is_misspelt_in_it() {
        let check = |parameters: Bson, expected: &str| {
            assert_eq!(retry_policy(&StoredPolicy { class: "RetryForever".into(), parameters }), expected);
        };
        check(
            doc! { "seconds_to_wait_before_retry": 60, "jiter": 1 }.into(),
            "RetryForever {\"seconds_to_wait_before_retry\":60,\"jiter\":1} (RetryForever: `jiter` is unknown; the known parameters are seconds_to_wait_before_retry)",
        );
        check(doc! { "seconds_to_wait_before_retry": 60 }.into(), "RetryForever {\"seconds_to_wait_before_retry\":60}");
        let own = StoredPolicy { class: "Mine".into(), parameters: Bson::Null };
        assert_eq!(retry_policy(&own), "Mine");
    }
}
