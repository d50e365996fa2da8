//! A schedule of periodic jobs, as it is shown, and in words.

use bson::doc;
use recruiter_common::{
    instant::Instant,
    schedules::{InvalidSchedule, Run, StoredSchedule},
    store::Redaction,
    text::{moment, printable},
};
use serde_json::Value;

use super::extended;

/// Number of next runs that are shown.
pub(crate) const SHOWN_NEXT: usize = 5;

/// The state of a schedule in one word.
pub(crate) fn state(schedule: Result<&StoredSchedule, &InvalidSchedule>) -> &'static str {
    match schedule {
        Err(_) => "invalid",
        Ok(schedule) if schedule.paused.is_some() => "paused",
        Ok(_) => "active",
    }
}

/// The document with its id as `name`, like everything that has a name, and with what is computed from it; or why the document is no schedule.
pub(crate) fn to_json(name: &str, schedule: Result<&StoredSchedule, &InvalidSchedule>, now: Instant) -> Value {
    let mut document = doc! { "name": name, "state": state(schedule) };
    match schedule {
        Ok(schedule) => {
            let next = schedule.next_runs(now, SHOWN_NEXT).into_iter().map(bson::DateTime::from_chrono);
            let computed = ["_id", "name", "state"];
            document.extend(schedule.document.clone().into_iter().filter(|(field, _)| !computed.contains(&field.as_str())));
            document.insert("next_runs", next.collect::<Vec<_>>());
        }
        Err(problem) => drop(document.insert("problem", problem.to_string())),
    }
    extended(document)
}

/// Hides parameters of the job.
pub(crate) fn redact(schedule: &mut StoredSchedule, redaction: &Redaction) {
    if let Ok(job) = schedule.document.get_document_mut("job") {
        redaction.template(job);
    }
}

/// Who has paused it, and why.
pub(crate) fn pause_of(schedule: &StoredSchedule) -> Option<String> {
    let paused = schedule.paused.as_ref()?;
    let by = paused.by.as_deref().map(|by| format!(" by {}", printable(by, 80))).unwrap_or_default();
    let reason = paused.reason.as_deref().filter(|reason| !reason.is_empty());
    Some(format!("paused{by}{}", reason.map(|reason| format!(": {}", printable(reason, 200))).unwrap_or_default()))
}

/// The slots without a run.
pub(crate) fn skipped_of(schedule: &StoredSchedule) -> Option<String> {
    let skipped = schedule.skipped;
    (skipped.overlap + skipped.missed > 0).then(|| format!("skipped: {} overlapping, {} missed", skipped.overlap, skipped.missed))
}

/// A run, and the job that it has enqueued.
pub(crate) fn run_of(run: &Run) -> String {
    let slot = run.slot.map_or_else(|| "manual".into(), |slot| format!("of {}", moment(slot)));
    format!("{}, job {}, enqueued {}", slot, run.job, moment(run.at))
}
