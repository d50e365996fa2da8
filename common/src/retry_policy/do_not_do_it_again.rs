//! Never retries a job. It is the default: the policy of jobs without a stored policy.

use bson::{Document, doc};

use super::{Decision, History, RetryPolicy};
use crate::{
    base::{Failure, Instant},
    job::FinishReason,
};

/// A failed job is not retried. It is archived as [`FinishReason::NOT_SCHEDULED_BY_RETRY_POLICY`].
///
/// Stored without parameters.
///
/// ```
/// use recruiter_common::{job::StoredPolicy, retry_policy::DoNotDoItAgain};
///
/// assert_eq!(StoredPolicy::from(&DoNotDoItAgain).class, "DoNotDoItAgain");
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DoNotDoItAgain;

impl RetryPolicy for DoNotDoItAgain {
    fn class(&self) -> &str {
        "DoNotDoItAgain"
    }

    fn parameters(&self) -> Document {
        doc! {}
    }

    fn decide(&self, _: &History<'_>, _: &Failure, _: Instant) -> Decision {
        Decision::Archive(FinishReason::NOT_SCHEDULED_BY_RETRY_POLICY)
    }

    fn is_last_attempt(&self, _: &History<'_>, _: Instant) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use bson::{Bson, bson};

    use super::*;
    use crate::retry_policy::testing::*;

    #[test]
    fn it_is_never_done_again() {
        for attempts in [0, 1, u32::MAX] {
            check(&DoNotDoItAgain, &job(attempts), "timeout", Duration::ZERO, Err(FinishReason::NOT_SCHEDULED_BY_RETRY_POLICY));
        }
    }

    #[test]
    fn it_needs_no_parameters() {
        for parameters in [Bson::Null, bson!([]), bson!({}), bson!({ "added_by_a_newer_program": 1 })] {
            assert_eq!(decoded("DoNotDoItAgain", parameters).expect("valid").parameters(), doc! {});
        }
        refused("DoNotDoItAgain", bson!("never"), "DoNotDoItAgain: `parameters` is \"never\"; it must be a document");
    }
}
