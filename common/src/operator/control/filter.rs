//! Which jobs a change applies to.

use super::Change;
use crate::{
    job::{FinishReason, Stage},
    operator::select::{JobFilter, StateFilter},
};

/// The reason why a filter cannot match any job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Contradiction {
    /// Only archived jobs have a reason.
    #[error("only archived jobs have a finish reason (`why`): select the state `archived`, or no state")]
    WhyOutsideOfTheArchive,
    /// An empty text is part of every message.
    #[error("the text of the failure message is empty, so every failure would match: give some text, or leave it out")]
    EmptyMessage,
    /// The period is empty.
    #[error("the period is empty: `since` must be before `until`")]
    EmptyPeriod,
    /// A successful job has no failure.
    #[error("a job that is done has no error class and no failure message; select another finish reason")]
    DoneAndFailed,
    /// The finish reason belongs to another state.
    #[error("a job with this finish reason (`why`) has another state: leave out one of the two")]
    WhyOfAnotherState,
    /// A running job cannot be retried.
    #[error("a running job cannot be retried; its retry policy decides when it ends")]
    RetryOfRunning,
    /// A job that is not finished cannot be retried with new content.
    #[error("only finished jobs are retried with new content: `recruiter jobs change` gives waiting ones another priority, group or date")]
    RevisionOfWaiting,
    /// A running job cannot be exported.
    #[error("a running job cannot be exported, because it would run twice: select the state `waiting` or `archived`")]
    ExportOfRunning,
    /// Only waiting jobs can be changed.
    #[error("only waiting jobs are changed: select the state `waiting`, or no state")]
    AlterOfStarted,
    /// An archived job cannot be cancelled.
    #[error("an archived job cannot be cancelled: it has ended")]
    CancelOfArchived,
    /// Only archived jobs can be deleted.
    #[error("only archived jobs are deleted: cancel the others first")]
    DeleteOfUnfinished,
}

impl JobFilter {
    /// Checks that the filter can match a job.
    ///
    /// # Errors
    /// When parts of the filter exclude each other.
    pub fn check(&self) -> Result<(), Contradiction> {
        let unfinished = matches!(self.state, Some(StateFilter::Waiting | StateFilter::Running));
        let of_failure = self.error_class.is_some() || self.message.is_some();
        let stage = self.stage.map(|(stage, _)| stage);
        let of_why = self.why.as_deref().map(|why| Stage::of_end(&FinishReason::custom(why)));
        if unfinished && (self.why.is_some() || self.failed) {
            Err(Contradiction::WhyOutsideOfTheArchive)
        } else if self.message.as_ref().is_some_and(String::is_empty) {
            Err(Contradiction::EmptyMessage)
        } else if self.since.is_some() && self.until.is_some() && self.since >= self.until {
            Err(Contradiction::EmptyPeriod)
        } else if of_failure && [stage, of_why].contains(&Some(Stage::Done)) {
            Err(Contradiction::DoneAndFailed)
        } else if stage.is_some() && of_why.is_some() && stage != of_why {
            Err(Contradiction::WhyOfAnotherState)
        } else {
            Ok(())
        }
    }

    /// The jobs of this filter that the change applies to.
    ///
    /// A retry applies to archived jobs unless another state is given, and to failed ones (neither done nor cancelled)
    /// unless a reason or a stage is given. New values apply to waiting jobs, a deletion to archived jobs, a cancellation to all others.
    ///
    /// # Errors
    /// When the change is not possible in the given state, or parts of the filter exclude each other.
    pub fn narrowed_to(mut self, change: &Change) -> Result<Self, Contradiction> {
        match (change, self.state) {
            (Change::Retry { .. }, Some(StateFilter::Running)) => return Err(Contradiction::RetryOfRunning),
            (Change::Alter(_), Some(StateFilter::Running | StateFilter::Archived)) => return Err(Contradiction::AlterOfStarted),
            (Change::Alter(_), _) if self.why.is_some() => return Err(Contradiction::AlterOfStarted),
            (Change::Alter(_), Some(StateFilter::Waiting) | None) => self.state = Some(StateFilter::Waiting),
            (Change::Cancel, Some(StateFilter::Archived)) => return Err(Contradiction::CancelOfArchived),
            (Change::Cancel, _) if self.why.is_some() => return Err(Contradiction::CancelOfArchived),
            (Change::Delete, Some(StateFilter::Waiting | StateFilter::Running)) => return Err(Contradiction::DeleteOfUnfinished),
            (Change::Retry { with, .. }, Some(StateFilter::Waiting)) if !with.is_empty() => return Err(Contradiction::RevisionOfWaiting),
            (Change::Retry { .. }, Some(StateFilter::Waiting)) | (Change::Cancel, _) => {}
            (Change::Retry { .. }, Some(StateFilter::Archived) | None) => {
                self.state = Some(StateFilter::Archived);
                self.failed = self.why.is_none() && self.stage.is_none();
            }
            (Change::Delete, Some(StateFilter::Archived) | None) => self.state = Some(StateFilter::Archived),
        }
        self.check().map(|()| self)
    }
}

#[cfg(test)]
mod tests {
    use bson::doc;

    use super::*;
    use crate::{
        base::Instant,
        operator::control::{alteration::Alteration, revision::Revision},
    };

    #[test]
    fn a_change_applies_to_the_states_in_which_it_is_possible() {
        let of = |state, why: Option<&str>| JobFilter { state, why: why.map(Into::into), ..JobFilter::default() };
        let retry = Change::Retry { again: false, with: Box::default() };
        let alter = Change::Alter(Alteration::default());
        let check = |filter: JobFilter, change: Change, expected: Result<(Option<StateFilter>, bool), Contradiction>| {
            assert_eq!(filter.clone().narrowed_to(&change).map(|filter| (filter.state, filter.failed)), expected, "{change:?} {filter:?}");
        };
        let (waiting, running, archived) = (Some(StateFilter::Waiting), Some(StateFilter::Running), Some(StateFilter::Archived));
        check(of(None, None), retry.clone(), Ok((archived, true)));
        check(of(None, Some("done")), retry.clone(), Ok((archived, false)));
        check(JobFilter { stage: Some((Stage::Done, Instant::UNIX_EPOCH)), ..of(archived, None) }, retry.clone(), Ok((archived, false)));
        let revised = Change::Retry { again: false, with: Revision::default().set(doc! { "a": 1 }).into() };
        check(of(None, None), revised.clone(), Ok((archived, true)));
        check(of(waiting, None), revised, Err(Contradiction::RevisionOfWaiting));
        check(of(waiting, None), retry.clone(), Ok((waiting, false)));
        check(of(running, None), retry.clone(), Err(Contradiction::RetryOfRunning));
        check(of(waiting, Some("done")), retry, Err(Contradiction::WhyOutsideOfTheArchive));
        check(of(None, None), alter.clone(), Ok((waiting, false)));
        check(of(waiting, None), alter.clone(), Ok((waiting, false)));
        for filter in [of(running, None), of(archived, None), of(None, Some("done"))] {
            check(filter, alter.clone(), Err(Contradiction::AlterOfStarted));
        }
        check(of(None, None), Change::Cancel, Ok((None, false)));
        check(of(running, None), Change::Cancel, Ok((running, false)));
        check(of(archived, None), Change::Cancel, Err(Contradiction::CancelOfArchived));
        check(of(None, Some("done")), Change::Cancel, Err(Contradiction::CancelOfArchived));
        check(of(None, None), Change::Delete, Ok((archived, false)));
        check(of(waiting, None), Change::Delete, Err(Contradiction::DeleteOfUnfinished));
    }

    #[test]
    fn a_filter_that_no_job_can_match_is_refused() {
        let at = |ms| Instant::from_timestamp_millis(ms);
        let period = |since, until| JobFilter { since, until, ..JobFilter::default() }.check();
        assert_eq!(period(at(2), at(2)), Err(Contradiction::EmptyPeriod));
        let message = |text: &str| JobFilter { message: Some(text.into()), ..JobFilter::default() }.check();
        assert_eq!((message(""), message("x")), (Err(Contradiction::EmptyMessage), Ok(())));
        assert_eq!((period(at(1), at(2)), period(at(2), None), period(None, at(1))), (Ok(()), Ok(()), Ok(())));
        let done = JobFilter { why: Some("done".into()), message: Some("x".into()), ..JobFilter::default() };
        assert_eq!(done.check(), Err(Contradiction::DoneAndFailed));
        let stage =
            |stage| JobFilter { state: Some(StateFilter::Archived), stage: Some((stage, Instant::UNIX_EPOCH)), ..JobFilter::default() };
        assert_eq!(stage(Stage::Done).message("x").check(), Err(Contradiction::DoneAndFailed));
        assert_eq!(
            (stage(Stage::Failed).why("done").check(), stage(Stage::Failed).why("gave-up").check()),
            (Err(Contradiction::WhyOfAnotherState), Ok(()))
        );
        let running = JobFilter { state: Some(StateFilter::Running), why: Some("gave-up".into()), ..JobFilter::default() };
        assert_eq!(running.check(), Err(Contradiction::WhyOutsideOfTheArchive));
    }
}
