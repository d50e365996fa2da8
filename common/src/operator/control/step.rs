//! The next step for one job, decided by its document. Pure.

use std::sync::LazyLock;

use bson::{Bson, RawDocument, RawDocumentBuf};

use super::{Alteration, Change, Changed, Refusal, Revision, again::again};
use crate::{
    base::{Failure, Instant, JobId, failure::CANCELLED},
    job::{Archival, FinishReason, Job, JobState, StoredJob},
};

/// The next step for one job, decided by its document.
pub(crate) enum Step {
    Enqueue {
        retried_as: Option<Bson>,
        job: Box<Job>,
        why: FinishReason,
    },
    Hasten {
        at: Instant,
        group: String,
    },
    /// A waiting job of this group gets other values.
    Alter {
        group: String,
    },
    Archive(Archival),
    Ask,
    Delete,
    Nothing(Changed),
}

/// Decides the step for a job from its document.
pub(crate) fn step(change: &Change, id: JobId, stored: StoredJob, now: Instant) -> Step {
    let StoredJob { is_archived, document } = stored;
    match change {
        Change::Delete if is_archived => Step::Delete,
        Change::Delete => Step::Nothing(Changed::Refused(Refusal::NotArchived)),
        Change::Alter(alteration) => {
            step_of_alteration(alteration, is_archived, document).unwrap_or_else(|refusal| Step::Nothing(Changed::Refused(refusal)))
        }
        Change::Cancel => step_of_cancel(id, is_archived, &document, now),
        Change::Retry { again, with } => step_of_retry(*again, !with.is_empty(), is_archived, document, now)
            .unwrap_or_else(|refusal| Step::Nothing(Changed::Refused(refusal))),
    }
}

fn step_of_alteration(alteration: &Alteration, is_archived: bool, document: RawDocumentBuf) -> Result<Step, Refusal> {
    if is_archived {
        return Err(Refusal::Archived { why: document.get_str("why").unwrap_or("an unknown reason").to_owned() });
    }
    let job = Job::try_from(document).map_err(|(_, error)| Refusal::Malformed(error.to_string()))?;
    match job.state {
        JobState::Locked { worker, .. } => Err(Refusal::Started { worker }),
        JobState::Waiting { at } if alteration.is_in(&job, at) => Ok(Step::Nothing(Changed::Unchanged)),
        // The recruiter has read what it needs of such a job.
        JobState::Waiting { .. } if job.is_waiting => Err(Refusal::WaitsForJobs),
        JobState::Waiting { .. } => match job.predecessor_key().filter(|_| alteration.at.is_some()) {
            // It has no date of its own until that job ends.
            Some(key) => Err(Refusal::WaitsForAnother { key }),
            None => Ok(Step::Alter { group: job.settings.group().to_owned() }),
        },
        JobState::Archived { .. } => Err(Refusal::Malformed("it is in `scheduled`, but its document is in a finished state".into())),
    }
}

/// Decides by single fields, so that a document that is not a valid job can be cancelled as well.
fn step_of_cancel(id: JobId, is_archived: bool, document: &RawDocument, now: Instant) -> Step {
    let refused = |refusal| Step::Nothing(Changed::Refused(refusal));
    if is_archived {
        return refused(Refusal::Archived { why: document.get_str("why").unwrap_or("an unknown reason").to_owned() });
    }
    match document.get_bool("locked") {
        Ok(true) => Step::Ask,
        Ok(false) => {
            let failure = Failure::new(CANCELLED, "cancelled by hand before it was started");
            Step::Archive(Archival::unstarted(id, document, &FinishReason::CANCELLED, &failure, now))
        }
        Err(_) => refused(Refusal::NeitherLockedNorNot),
    }
}

fn step_of_retry(again: bool, is_revised: bool, is_archived: bool, document: RawDocumentBuf, now: Instant) -> Result<Step, Refusal> {
    let job = Job::try_from(document).map_err(|(_, error)| Refusal::Malformed(error.to_string()))?;
    Ok(match (&job.state, is_archived) {
        (JobState::Archived { why }, true) => {
            let (why, retried_as) = (why.clone(), job.field("retried_as"));
            match &retried_as {
                Some(new) if *new != Bson::Null && !again => {
                    let new = new.as_object_id().map_or_else(|| new.to_string(), |new| new.to_hex());
                    return Err(Refusal::RetriedBefore { new });
                }
                _ => Step::Enqueue { retried_as, job: Box::new(job), why },
            }
        }
        (JobState::Locked { worker, .. }, false) => return Err(Refusal::Running { worker: *worker }),
        (JobState::Waiting { .. }, false) if is_revised => return Err(Refusal::NotFinished),
        (JobState::Waiting { at }, false) if *at <= now => Step::Nothing(Changed::AlreadyDue { since: *at }),
        (JobState::Waiting { .. }, false) if job.is_waiting => return Err(Refusal::WaitsForJobs),
        (JobState::Waiting { at }, false) => match job.predecessor_key() {
            Some(key) => return Err(Refusal::WaitsForAnother { key }),
            None => Step::Hasten { at: *at, group: job.settings.group().to_owned() },
        },
        (_, true) => return Err(Refusal::Malformed("it is in the archive, but its document is not in a finished state".into())),
        (JobState::Archived { .. }, false) => {
            return Err(Refusal::Malformed("it is in `scheduled`, but its document is in a finished state".into()));
        }
    })
}

pub(crate) fn would_become(change: &Change, (id, step): (JobId, Step), now: Instant) -> (JobId, Changed) {
    let changed = match step {
        Step::Nothing(changed) => changed,
        Step::Archive(_) => Changed::Cancelled,
        Step::Ask => Changed::CancelRequested,
        Step::Alter { .. } => Changed::Altered,
        Step::Delete => Changed::Deleted,
        Step::Hasten { at, .. } => Changed::DueNow { instead_of: at },
        Step::Enqueue { job, why, .. } => {
            match again(*job, revision(change)).and_then(|new| new.into_document(now).map_err(|error| error.to_string())) {
                Ok(_) => Changed::EnqueuedAgain { new: None, why },
                Err(problem) => Changed::Refused(Refusal::Unstorable(problem)),
            }
        }
    };
    (id, changed)
}

/// What retried jobs have in place of their former content.
pub(crate) fn revision(change: &Change) -> &Revision {
    static NONE: LazyLock<Revision> = LazyLock::new(Revision::default);
    match change {
        Change::Retry { with, .. } => with,
        Change::Alter(_) | Change::Cancel | Change::Delete => &NONE,
    }
}

#[cfg(test)]
mod tests {
    use bson::doc;

    use super::*;
    use crate::{base::never_due, job::Priority};

    #[test]
    fn a_job_that_waits_for_another_one_keeps_its_date() {
        let step = |at| {
            let document = doc! {
                "_id": bson::oid::ObjectId::new(), "locked": false, "group": "g", "workable": { "class": "c" }, "unique_after": "k",
                "scheduled_at": never_due(),
            };
            let document = RawDocumentBuf::try_from(&document).expect("a document");
            let priority = Priority::new(9);
            step_of_alteration(&Alteration::new(priority, None, at).expect("valid"), false, document).map(drop)
        };
        assert_eq!(step(Some(Instant::UNIX_EPOCH)), Err(Refusal::WaitsForAnother { key: "k".into() }));
        assert_eq!(step(None), Ok(()));
    }
}
