//! The write that records a verdict.

use bson::{Bson, Document};
use recruiter_common::{
    failure::Failure,
    instant::Instant,
    job::{Claim, FinishReason, Job},
    store::{Archival, Ending, Rescheduling},
};

use super::verdict::Verdict;

/// The end of a job, as a write.
#[derive(Clone, Debug)]
pub(crate) enum JobEnd {
    Archive(Box<Archival>),
    Reschedule(Box<Rescheduling>),
}

/// The outcomes of the items of a bundle, and the notes of a job.
type Made = (Option<Vec<Bson>>, Document);

/// The write that records the verdict; `None` when the claim is lost.
pub(crate) fn end_of(verdict: &Verdict, job: &Job, claim: Claim, (items, notes): Made, now: Instant) -> Option<JobEnd> {
    let execution = |failure: Option<&Failure>| job.last_execution.clone().unwrap_or_default().ended(now, failure);
    let archive = |ending| Some(JobEnd::Archive(Box::new(Archival::ended(job, claim, ending))));
    let reschedule = |end| Some(JobEnd::Reschedule(Box::new(end)));
    match verdict {
        Verdict::Archive { why, failure, result } => {
            archive(Ending { result: result.clone(), items, notes, ..Ending::new(execution(failure.as_ref()), why.clone()) })
        }
        Verdict::Become { jobs } => {
            archive(Ending { becomes: jobs.as_slice().into(), notes, ..Ending::new(execution(None), FinishReason::DONE) })
        }
        Verdict::Retry { failure, at, again } => {
            reschedule(Rescheduling::retry(job, claim, &execution(Some(failure)), *at, again.counts()).with(items, notes))
        }
        Verdict::Release { at, .. } => reschedule(Rescheduling::release_until(job, claim, *at).with(None, notes)),
        Verdict::ClaimLost => None,
    }
}
