//! Retries only some error classes.

use std::sync::Arc;

use bson::{Document, doc};

use super::{Decision, History, InvalidPolicy, Parameters, RetryPolicies, RetryPolicy, error_classes::ErrorClasses};
use crate::{
    base::{Failure, Instant},
    job::{FinishReason, StoredPolicy},
};

/// Uses another policy if the failure is of a listed error class. Any other failure archives the job as
/// [`FinishReason::NON_RETRIABLE_EXCEPTION`].
///
/// A listed class that ends in `*` matches all classes that begin with the text before it: `exit:*`, `signal:*`.
///
/// Stored as `retriable_exceptions`, a list of classes, and `filtered_retry_policy`, a `{class, parameters}`.
///
/// ```
/// use std::time::Duration;
/// use recruiter_common::retry_policy::{RetriableExceptionFilter, RetryManyTimes};
///
/// let policy = RetriableExceptionFilter::new(RetryManyTimes::new(3, Duration::from_secs(60))?, ["timeout", "exit:*"])?;
/// # Ok::<(), recruiter_common::retry_policy::InvalidPolicy>(())
/// ```
#[derive(Clone, Debug)]
pub struct RetriableExceptionFilter {
    filtered: Arc<dyn RetryPolicy>,
    retriable: ErrorClasses,
}

impl RetriableExceptionFilter {
    /// Lets `policy` decide on failures of these classes.
    ///
    /// # Errors
    /// When no class is listed, or one that no failure can have: empty, or longer than
    /// [`LONGEST_CLASS`](crate::base::failure::LONGEST_CLASS).
    pub fn new(policy: impl RetryPolicy + 'static, classes: impl IntoIterator<Item = impl Into<String>>) -> Result<Self, InvalidPolicy> {
        Ok(Self { retriable: ErrorClasses::new("retriable_exceptions", classes)?, filtered: Arc::new(policy) })
    }

    pub(super) fn decode(parameters: &Parameters<'_>, policies: &RetryPolicies) -> Result<Self, InvalidPolicy> {
        Self::new(parameters.policy("filtered_retry_policy", policies)?, parameters.texts("retriable_exceptions")?)
    }
}

impl RetryPolicy for RetriableExceptionFilter {
    fn class(&self) -> &str {
        "RetriableExceptionFilter"
    }

    fn parameters(&self) -> Document {
        doc! { "retriable_exceptions": &self.retriable, "filtered_retry_policy": StoredPolicy::from(&self.filtered) }
    }

    fn decide(&self, job: &History<'_>, failure: &Failure, failed_at: Instant) -> Decision {
        if !self.retriable.contain(&failure.class) {
            return Decision::Archive(FinishReason::NON_RETRIABLE_EXCEPTION);
        }
        self.filtered.decide(job, failure, failed_at)
    }

    fn is_last_attempt(&self, job: &History<'_>, now: Instant) -> bool {
        self.filtered.is_last_attempt(job, now)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use bson::{Bson, bson};

    use super::*;
    use crate::retry_policy::{retry_many_times::RetryManyTimes, testing::*};

    #[test]
    fn listed_classes_are_left_to_the_policy_within() {
        let minute = Duration::from_secs(60);
        let policy = RetriableExceptionFilter::new(RetryManyTimes::new(1, minute).expect("valid"), ["timeout", "exit:*"]).expect("valid");
        for class in ["timeout", "exit:1"] {
            check(&policy, &job(1), class, Duration::ZERO, Ok(minute));
            check(&policy, &job(2), class, Duration::ZERO, Err(FinishReason::TRIED_TOO_MANY_TIMES));
        }
        for attempts in [1, 2] {
            check(&policy, &job(attempts), "panic", Duration::ZERO, Err(FinishReason::NON_RETRIABLE_EXCEPTION));
        }
    }

    #[test]
    fn it_is_stored_and_read() {
        let forever = bson!({ "class": "RetryForever", "parameters": { "seconds_to_wait_before_retry": 60 } });
        let once = bson!({ "retriable_exceptions": ["timeout", "exit:*"], "filtered_retry_policy": forever });
        survives("RetriableExceptionFilter", once.clone());
        let twice =
            bson!({ "retriable_exceptions": ["*"], "filtered_retry_policy": { "class": "RetriableExceptionFilter", "parameters": once } });
        survives("RetriableExceptionFilter", twice);
    }

    #[test]
    fn nonsense_is_refused() {
        fn check(classes: Bson, policy: Bson, message: &str) {
            refused("RetriableExceptionFilter", bson!({ "retriable_exceptions": classes, "filtered_retry_policy": policy }), message);
        }
        let never = bson!({ "class": "DoNotDoItAgain" });
        check(bson!([]), never.clone(), "RetriableExceptionFilter: `retriable_exceptions` is empty; list at least one");
        check(bson!([""]), never.clone(), "`retriable_exceptions` lists an empty text");
        check(bson!([1]), never.clone(), "`retriable_exceptions` is [1]; it must be a list of texts");
        check(bson!(null), never, "`retriable_exceptions` is missing");
        check(bson!(["timeout"]), bson!(null), "`filtered_retry_policy` is missing; it must be a retry policy {class, parameters}");
        check(bson!(["timeout"]), bson!("RetryForever"), "`filtered_retry_policy` is \"RetryForever\"; it must be");
        check(bson!(["timeout"]), bson!({}), "RetriableExceptionFilter: filtered_retry_policy: `class` is missing");
        check(bson!(["timeout"]), bson!({ "class": "Never" }), "filtered_retry_policy: there is no retry policy `Never`");
        let path = "RetriableExceptionFilter: filtered_retry_policy: RetryForever: `seconds_to_wait_before_retry` is missing";
        check(bson!(["timeout"]), bson!({ "class": "RetryForever" }), path);
    }
}
