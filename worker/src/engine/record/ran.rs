//! The end of an execution, for the caller that has asked for it.

use bson::{Bson, Document};
use recruiter_common::{failure::Failure, instant::Instant, job::FinishReason};
use serde::de::DeserializeOwned;

use super::verdict::Verdict;

/// What has become of a job that was executed for a caller: optimistically, or by the test kit.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Ran {
    /// It is done.
    Done {
        /// Its result; `None` for `()`.
        result: Option<Bson>,
    },
    /// It is done, and becomes these jobs ([`NotDone::continue_as`](crate::NotDone::continue_as)).
    Became {
        /// The documents of the jobs.
        jobs: Vec<Document>,
    },
    /// It runs again.
    Again {
        /// The failure, or the reason of a snooze.
        failure: Failure,
        /// When it is due.
        at: Instant,
        /// Whether this attempt counts against the retry policy. A snooze does not.
        counts: bool,
    },
    /// It is archived without success.
    Archived {
        /// The finish reason.
        why: FinishReason,
        /// The failure.
        failure: Failure,
    },
}

impl Ran {
    /// `None` if nothing is recorded.
    pub(crate) fn of(verdict: &Verdict) -> Option<Self> {
        Some(match verdict.clone() {
            Verdict::Archive { failure: None, result, .. } => Self::Done { result },
            Verdict::Archive { why, failure: Some(failure), .. } => Self::Archived { why, failure },
            Verdict::Become { jobs } => Self::Became { jobs },
            Verdict::Retry { failure, at, again } => Self::Again { failure, at, counts: again.counts() },
            Verdict::Release { failure, at } => Self::Again { failure, at, counts: false },
            Verdict::ClaimLost => return None,
        })
    }

    /// The result, if the job is done and has a result of this type.
    pub fn result<T: DeserializeOwned>(&self) -> Option<T> {
        match self {
            Self::Done { result } => bson::deserialize_from_bson(result.clone().unwrap_or(Bson::Null)).ok(),
            Self::Became { .. } | Self::Again { .. } | Self::Archived { .. } => None,
        }
    }
}
