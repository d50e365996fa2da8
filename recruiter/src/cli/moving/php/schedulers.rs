//! What a document in `schedulers` becomes: a schedule with the name of its `urn`.

use std::collections::BTreeMap;

use bson::{Bson, Document};
use recruiter_common::schedules::{Overlap, Schedule, Timing};

use super::{
    super::taking::{Found, Reason},
    Left, malformed, workable,
};

/// The namespace of the schedules.
const SOURCE: &str = "php-recruiter";
/// The namespace of the library's policies.
const NAMESPACE: &str = r"Recruiter\SchedulePolicy\";

/// Converts the documents, and remembers when each schedule runs.
pub(super) struct Schedulers<'a> {
    zone: &'a str,
    custom_policy: bool,
    timings: BTreeMap<String, Timing>,
}

impl<'a> Schedulers<'a> {
    pub(super) fn new(zone: &'a str, custom_policy: bool) -> Self {
        Self { zone, custom_policy, timings: BTreeMap::new() }
    }

    pub(super) fn into_timings(self) -> BTreeMap<String, Timing> {
        self.timings
    }

    /// The name of a scheduler, and what it becomes.
    pub(super) fn convert(&mut self, document: &Document) -> (String, Found) {
        let name = document.get_str("urn").unwrap_or_default().to_owned();
        (name, self.schedule(document).unwrap_or_else(|(reason, why)| Found::Left(reason, why)))
    }

    fn schedule(&mut self, document: &Document) -> Result<Found, Left> {
        let urn = document.get_str("urn").ok().filter(|urn| !urn.is_empty()).ok_or_else(|| malformed("it has no `urn`"))?;
        if self.timings.contains_key(urn) {
            return Err((Reason::Repetition, "another scheduler has the same `urn`, and only one schedule can have this name".into()));
        }
        let job = document.get_document("job").map_err(|_| malformed("it has no `job`"))?;
        let (job, note) = workable(job, self.custom_policy)?;
        let schedule = timing(document, self.zone)?;
        let overlap = if document.get_bool("unique").unwrap_or(false) { Overlap::Skip } else { Overlap::Allow };
        self.timings.insert(urn.to_owned(), schedule.timing().clone());
        Ok(Found::Schedule(urn.to_owned(), Box::new(schedule.overlap(overlap).job(job).in_namespace(SOURCE)), note))
    }
}

/// When it runs: at the times of a cron expression, or each minute.
fn timing(document: &Document, zone: &str) -> Result<Schedule, Left> {
    let unknown = |why: String| (Reason::Repetition, why);
    let policy = document.get_document("schedule_policy").map_err(|_| malformed("it has no `schedule_policy`"))?;
    let class = policy.get_str("class").map_err(|_| malformed("its schedule policy has no `class`"))?;
    let expression = match class.strip_prefix(NAMESPACE) {
        Some("EveryMinutes") => "* * * * *",
        Some("Cron") => {
            let parameters = policy.get_document("parameters").map_err(|_| malformed("its schedule policy has no `parameters`"))?;
            if parameters.get("now").is_some_and(|now| *now != Bson::Null) {
                return Err(unknown("the clock of its cron expression stands still (`now`): it would run only once".into()));
            }
            parameters.get_str("cron_expression").map_err(|_| malformed("its schedule policy has no `cron_expression`"))?
        }
        _ => return Err(unknown(format!("its schedule policy `{class}` has no counterpart"))),
    };
    // In PHP a sixth field is the year, and here the first of six is the second.
    if expression.split_whitespace().count() > 5 {
        return Err(unknown(format!("its cron expression `{expression}` has more than five fields")));
    }
    Schedule::cron(expression, zone).map_err(|problem| unknown(problem.to_string()))
}

#[cfg(test)]
mod tests {
    use bson::doc;

    use super::*;

    fn cron(expression: &str) -> Document {
        doc! { "class": format!("{NAMESPACE}Cron"), "parameters": { "cron_expression": expression, "now": Bson::Null } }
    }

    fn scheduler(more: Document) -> Document {
        let job = doc! {
            "workable": { "class": r"Acme\Report", "parameters": [], "method": "execute" },
            "retry_policy": { "class": r"Recruiter\RetryPolicy\DoNotDoItAgain", "parameters": [] },
        };
        let mut document = doc! { "urn": "report:daily", "unique": true, "schedule_policy": cron("0 6 * * *"), "job": job };
        document.extend(more);
        document
    }

    fn converted(more: Document) -> Found {
        Schedulers::new("Europe/Rome", false).convert(&scheduler(more)).1
    }

    #[test]
    fn a_scheduler_becomes_a_schedule_with_its_urn() {
        let check = |more: Document, shown: &str, overlap: Overlap| {
            let Found::Schedule(name, schedule, None) = converted(more) else { panic!("no schedule") };
            schedule.check(&name).unwrap();
            assert_eq!((name.as_str(), schedule.to_string().as_str(), schedule.overlap_policy()), ("report:daily", shown, overlap));
            assert_eq!(schedule.enqueues().unwrap().class_and_group(), (r"Acme\Report", "generic"));
        };
        check(doc! {}, "0 6 * * * Europe/Rome", Overlap::Skip);
        check(doc! { "unique": false, "schedule_policy": cron("@daily") }, "@daily Europe/Rome", Overlap::Allow);
        let minutes = doc! { "class": format!("{NAMESPACE}EveryMinutes"), "parameters": [] };
        check(doc! { "schedule_policy": minutes }, "* * * * * Europe/Rome", Overlap::Skip);
    }

    #[test]
    fn what_has_no_counterpart_has_a_reason() {
        let left = |more: Document, reason: Reason, words: &str| {
            let Found::Left(is, why) = converted(more) else { panic!("it is taken over") };
            assert!(is == reason && why.contains(words), "{is:?}: {why}");
        };
        left(doc! { "urn": Bson::Null }, Reason::Malformed, "`urn`");
        left(doc! { "job": [] }, Reason::Malformed, "`job`");
        left(doc! { "job": {} }, Reason::Malformed, "`workable`");
        left(doc! { "schedule_policy": 7 }, Reason::Malformed, "`schedule_policy`");
        left(doc! { "schedule_policy": {} }, Reason::Malformed, "`class`");
        left(doc! { "schedule_policy": { "class": format!("{NAMESPACE}Cron"), "parameters": {} } }, Reason::Malformed, "`cron_expression`");
        left(doc! { "schedule_policy": { "class": r"Acme\Tides" } }, Reason::Repetition, r"`Acme\Tides`");
        left(doc! { "schedule_policy": cron("0 0 1 1 * 2030") }, Reason::Repetition, "more than five");
        left(doc! { "schedule_policy": cron("99 * * * *") }, Reason::Repetition, "99");
        let mut still = cron("0 6 * * *");
        still.get_document_mut("parameters").unwrap().insert("now", 1_700_000_000);
        left(doc! { "schedule_policy": still }, Reason::Repetition, "`now`");
        let mut schedulers = Schedulers::new("UTC", false);
        assert!(matches!(schedulers.convert(&scheduler(doc! {})).1, Found::Schedule(..)));
        assert!(matches!(schedulers.convert(&scheduler(doc! {})).1, Found::Left(Reason::Repetition, _)), "the same urn twice");
    }
}
