//! The cap of snoozes: after so many of them, the next one is a failure.

use recruiter_common::{
    failure::Failure,
    job::{Execution, Job},
};

use crate::outcome::{Done, NotDone};

/// Turns a snooze of a job that has reached its cap into a failure, which the retry policy decides about.
pub(super) fn capped(ended: Result<Done, NotDone>, job: &Job) -> Result<Done, NotDone> {
    match ended {
        Err(NotDone::Snooze { reason, at_most: Some(most), .. }) if times_snoozed(job, &reason.class) >= u64::from(most) => {
            let message = format!("{} (snoozed {most} times, the limit of this class)", reason.message);
            Err(NotDone::Failed(Failure { trace: reason.trace, ..Failure::new(reason.class, message) }))
        }
        ended => ended,
    }
}

/// How many executions of this job have ended with this class. Executions that the history has dropped are assumed to have the same share
/// of them as those that it kept.
fn times_snoozed(job: &Job, class: &str) -> u64 {
    let has_class = |execution: &&Execution| execution.class.as_deref() == Some(class);
    let count = |number: usize| u64::try_from(number).unwrap_or(u64::MAX);
    let (snoozed, kept) = (count(job.executions.iter().filter(has_class).count()), count(job.executions.len()));
    snoozed + (u64::from(job.executions_dropped) * snoozed).checked_div(kept).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use bson::{Document, doc};
    use recruiter_common::ids::JobId;

    use super::*;

    #[test]
    fn a_job_is_snoozed_only_so_often() {
        let check = |ended_with: &[&str], dropped: u32, is_snoozed: bool| {
            let executions: Vec<Document> = ended_with.iter().map(|class| doc! { "class": *class }).collect();
            let job = doc! {
                "_id": JobId::new(), "locked": false, "group": "generic", "workable": { "class": "test" }, "attempts": 9,
                "scheduled_at": bson::DateTime::now(), "executions": executions, "executions_dropped": dropped,
            };
            let job = Job::try_from(job).expect("a job");
            let snooze = NotDone::snooze(Duration::from_secs(60), "busy", "no line").at_most(3);
            let ended = capped(Err(snooze.clone()), &job);
            let failed = Err(NotDone::failed("busy", "no line (snoozed 3 times, the limit of this class)"));
            assert_eq!(ended, if is_snoozed { Err(snooze) } else { failed }, "{ended_with:?} {dropped}");
            let uncapped = NotDone::snooze(Duration::from_secs(60), "busy", "no line");
            assert_eq!(capped(Err(uncapped.clone()), &job), Err(uncapped));
        };
        check(&[], 0, true);
        check(&["busy", "busy"], 0, true);
        check(&["busy", "interrupted", "busy", "exit:1"], 0, true);
        check(&["busy", "busy", "busy"], 0, false);
        check(&["busy", "busy"], 1, false);
        check(&["busy", "exit:1"], 3, true);
        check(&["busy", "exit:1"], 4, false);
    }
}
