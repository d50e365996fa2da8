//! Retries without limit, with a constant wait.

use std::time::Duration;

use bson::{Document, doc};

use super::{
    Decision, History, InvalidPolicy, Parameters, RetryPolicy,
    parameters::{checked_wait, stored_seconds},
};
use crate::base::{Failure, Instant};

/// Retries after the same wait each time, until the job succeeds, discards itself or is cancelled.
///
/// Stored as `seconds_to_wait_before_retry`.
///
/// ```
/// use std::time::Duration;
/// use recruiter_common::retry_policy::RetryForever;
///
/// let every_minute = RetryForever::new(Duration::from_secs(60))?;
/// assert!(RetryForever::new(Duration::ZERO).is_err());
/// # Ok::<(), recruiter_common::retry_policy::InvalidPolicy>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryForever {
    wait: Duration,
}

impl RetryForever {
    /// `wait` is rounded to milliseconds.
    ///
    /// # Errors
    /// When `wait` is less than a millisecond or more than a hundred years. Endless retries without a wait would use all
    /// the capacity.
    pub fn new(wait: Duration) -> Result<Self, InvalidPolicy> {
        Ok(Self { wait: checked_wait("seconds_to_wait_before_retry", wait)? })
    }

    pub(super) fn decode(parameters: &Parameters<'_>) -> Result<Self, InvalidPolicy> {
        Self::new(parameters.seconds("seconds_to_wait_before_retry")?)
    }
}

impl RetryPolicy for RetryForever {
    fn class(&self) -> &str {
        "RetryForever"
    }

    fn parameters(&self) -> Document {
        doc! { "seconds_to_wait_before_retry": stored_seconds(self.wait) }
    }

    fn decide(&self, _: &History<'_>, _: &Failure, _: Instant) -> Decision {
        Decision::RetryAfter(self.wait)
    }

    fn is_last_attempt(&self, _: &History<'_>, _: Instant) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use bson::bson;

    use super::*;
    use crate::retry_policy::testing::*;

    #[test]
    fn it_is_always_done_again() {
        let policy = RetryForever::new(Duration::from_secs(5)).expect("valid");
        for attempts in [0, 1, 1_000, u32::MAX] {
            check(&policy, &job(attempts), "timeout", Duration::from_secs(1 << 33), Ok(Duration::from_secs(5)));
        }
    }

    #[test]
    fn it_is_stored_and_read() {
        for wait in [bson!(60), bson!(0.001), bson!(3_153_600_000_i64)] {
            survives("RetryForever", bson!({ "seconds_to_wait_before_retry": wait }));
        }
    }

    #[test]
    fn nonsense_is_refused() {
        fn check(wait: Bson, message: &str) {
            refused("RetryForever", bson!({ "seconds_to_wait_before_retry": wait }), message);
        }
        check(bson!(0), "RetryForever: `seconds_to_wait_before_retry` is 0 seconds; it must be from 0.001");
        check(bson!(0.0004), "is 0.0004 seconds");
        check(bson!(-0.5), "is -0.5; it must be a number of seconds from 0");
        check(bson!("60"), "is \"60\"");
        check(bson!(i64::MAX), "to 3153600000 (a hundred years)");
        refused("RetryForever", bson!([]), "RetryForever: `seconds_to_wait_before_retry` is missing");
    }
}
