//! Jobs as lines of JSON that `recruiter enqueue --from` reads: to keep dead letters, to change them with other programs, to move waiting
//! jobs to another database.

use std::ops::ControlFlow;

use super::{BATCH, BATCH_BYTES, Contradiction, patiently, patiently_with};
use crate::{
    base::{Instant, JobId},
    enqueue::spec::JobSpec,
    job::{Job, JobState, StoredJob},
    mongo::{Store, StoreError, cut},
    operator::select::{JobFilter, StateFilter, Walk},
};

/// A job as a line, or the reason why it has none.
pub type Exported = Result<JobSpec, String>;

impl JobFilter {
    /// The jobs of this filter that can be exported: archived ones, or waiting ones if that state is given. Without a state and a reason, the
    /// failed ones, as for a retry.
    ///
    /// # Errors
    /// When the state is `running`, or parts of the filter exclude each other.
    pub fn narrowed_to_export(mut self) -> Result<Self, Contradiction> {
        match self.state {
            Some(StateFilter::Running) => return Err(Contradiction::ExportOfRunning),
            Some(StateFilter::Waiting | StateFilter::Archived) => {}
            None => {
                self.failed = self.why.is_none();
                self.state = Some(StateFilter::Archived);
            }
        }
        self.check().map(|()| self)
    }
}

impl Store {
    /// Reads the jobs of a filter that was narrowed by [`JobFilter::narrowed_to_export`], each as the specification that enqueues it once more:
    /// without its id and its history, and with its due date only if that is to come. `each` can stop the export.
    ///
    /// Nothing is changed. A waiting job that starts meanwhile is left out if it is read after that.
    pub async fn export_jobs(
        &self,
        filter: &JobFilter,
        mut each: impl FnMut(JobId, Exported) -> ControlFlow<()>,
    ) -> Result<ControlFlow<()>, StoreError> {
        let mut walk = Walk::new(filter.clone());
        loop {
            let found = patiently_with(&mut walk, |walk| async move {
                let found = self.next_matches(walk).await;
                (walk, found)
            })
            .await?;
            let Some(found) = found else { return Ok(ControlFlow::Continue(())) };
            for batch in cut(found, BATCH, BATCH_BYTES, |found| found.bytes) {
                let ids: Vec<JobId> = batch.iter().map(|found| found.job).collect();
                let mut stored = patiently(|| self.jobs_by_id(&ids)).await?;
                let now = self.now();
                for id in ids {
                    let job = stored.remove(&id).filter(|stored| stored.is_archived == filter.is_archived());
                    if let Some(exported) = job.and_then(|job| specification(job, now))
                        && each(id, exported).is_break()
                    {
                        return Ok(ControlFlow::Break(()));
                    }
                }
            }
        }
    }
}

/// `None` for a job that has started since it matched.
fn specification(stored: StoredJob, now: Instant) -> Option<Exported> {
    let job = match Job::try_from(stored.document) {
        Ok(job) => job,
        Err((_, error)) => return Some(Err(error.to_string())),
    };
    let at = match &job.state {
        JobState::Locked { .. } => return None,
        JobState::Waiting { .. } if job.is_waiting => {
            return Some(Err("it waits for other jobs, whose ids a line for another database cannot name".into()));
        }
        JobState::Waiting { .. } if job.is_expired(now) => return Some(Err("it has expired".into())),
        JobState::Waiting { at } => Some(*at).filter(|at| *at > now && job.predecessor_key().is_none()),
        JobState::Archived { .. } => None,
    };
    // The expiry of an archived job has passed, or did not matter.
    let expires_at = job.expires_at.filter(|_| !matches!(job.state, JobState::Archived { .. }));
    Some(JobSpec::of_job(&job).map(|spec| JobSpec { scheduled_at: at, expires_at, ..spec }).map_err(|problem| problem.to_string()))
}

#[cfg(test)]
mod tests {
    use bson::{RawDocumentBuf, doc};

    use super::*;

    #[test]
    fn a_job_is_exported_with_the_date_that_is_to_come() {
        let at = |ms: i64| Instant::from_timestamp_millis(ms).expect("a date");
        let line = |more: bson::Document| {
            let mut document = doc! {
                "_id": bson::oid::ObjectId::new(), "locked": false, "group": "g", "workable": { "class": "c" },
                "scheduled_at": bson::DateTime::from_millis(5_000),
            };
            document.extend(more);
            let document = RawDocumentBuf::try_from(&document).expect("a document");
            specification(StoredJob { is_archived: false, document }, at(1_000))
        };
        let date = |line: Option<Exported>| line.map(|line| line.map(|spec| spec.scheduled_at));
        assert_eq!(date(line(doc! { "workable": { "class": "c", "parameters": {} } })), Some(Ok(Some(at(5_000)))));
        let expires = |ms: i64| doc! { "workable": { "class": "c", "parameters": {} }, "expires_at": bson::DateTime::from_millis(ms) };
        assert_eq!(line(expires(9_000)).map(|line| line.map(|spec| spec.expires_at)), Some(Ok(Some(at(9_000)))));
        assert_eq!(line(expires(500)), Some(Err("it has expired".into())));
        let items = doc! { "class": "c", "items": [{ "n": 0 }, { "n": 1 }] };
        let rest = line(doc! { "workable": items, "item_outcomes": ["done", null] });
        assert_eq!(rest.map(|line| line.map(|spec| spec.items)), Some(Ok(Some(vec![doc! { "n": 1 }]))), "one item is done");
        let due = doc! { "workable": { "class": "c", "parameters": {} }, "scheduled_at": bson::DateTime::from_millis(500) };
        assert_eq!(date(line(due)), Some(Ok(None)));
        assert!(line(doc! { "workable": { "class": "c", "parameters": 5 } }).is_some_and(|line| line.is_err()));
        assert!(line(doc! { "group": 5 }).is_some_and(|line| line.is_err()));
    }

    #[test]
    fn what_is_exported_depends_on_the_state() {
        let check = |state, why: Option<&str>, expected| {
            let filter = JobFilter { state, why: why.map(Into::into), ..JobFilter::default() };
            assert_eq!(filter.narrowed_to_export().map(|filter| (filter.state, filter.failed)), expected);
        };
        check(None, None, Ok((Some(StateFilter::Archived), true)));
        check(None, Some("done"), Ok((Some(StateFilter::Archived), false)));
        check(Some(StateFilter::Archived), None, Ok((Some(StateFilter::Archived), false)));
        check(Some(StateFilter::Waiting), None, Ok((Some(StateFilter::Waiting), false)));
        check(Some(StateFilter::Running), None, Err(Contradiction::ExportOfRunning));
        check(Some(StateFilter::Waiting), Some("done"), Err(Contradiction::WhyOutsideOfTheArchive));
    }
}
