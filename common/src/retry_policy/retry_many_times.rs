//! Retries a limited number of times, with a constant wait.

use std::time::Duration;

use bson::{Document, doc};

use super::{
    Decision, History, InvalidPolicy, Parameters, RetryPolicy,
    parameters::{checked_wait, stored_seconds},
};
use crate::{
    base::{Failure, Instant},
    job::FinishReason,
};

/// Retries `times` times, after the same wait each time: `n` retries are `n + 1` runs. Then the job is archived as
/// [`FinishReason::TRIED_TOO_MANY_TIMES`].
///
/// Stored as `retry_how_many_times` and `seconds_to_wait_before_retry`.
///
/// ```
/// use std::time::Duration;
/// use recruiter_common::retry_policy::RetryManyTimes;
///
/// let thrice_more = RetryManyTimes::new(3, Duration::from_secs(60))?;
/// # Ok::<(), recruiter_common::retry_policy::InvalidPolicy>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryManyTimes {
    times: u32,
    wait: Duration,
}

impl RetryManyTimes {
    /// Every value of `times` is valid, including 0. `wait` is rounded to milliseconds; zero means "retry at once".
    ///
    /// # Errors
    /// When `wait` is not zero and less than a millisecond, or more than a hundred years.
    pub fn new(times: u32, wait: Duration) -> Result<Self, InvalidPolicy> {
        let wait = if wait.is_zero() { wait } else { checked_wait("seconds_to_wait_before_retry", wait)? };
        Ok(Self { times, wait })
    }

    pub(super) fn decode(parameters: &Parameters<'_>) -> Result<Self, InvalidPolicy> {
        Self::new(parameters.count("retry_how_many_times")?, parameters.seconds("seconds_to_wait_before_retry")?)
    }
}

impl RetryPolicy for RetryManyTimes {
    fn class(&self) -> &str {
        "RetryManyTimes"
    }

    fn parameters(&self) -> Document {
        doc! { "retry_how_many_times": self.times, "seconds_to_wait_before_retry": stored_seconds(self.wait) }
    }

    fn decide(&self, job: &History<'_>, _: &Failure, _: Instant) -> Decision {
        if job.attempts > self.times { Decision::Archive(FinishReason::TRIED_TOO_MANY_TIMES) } else { Decision::RetryAfter(self.wait) }
    }

    fn is_last_attempt(&self, job: &History<'_>, _: Instant) -> bool {
        job.attempts > self.times
    }
}

#[cfg(test)]
mod tests {
    use bson::bson;

    use super::*;
    use crate::retry_policy::testing::*;

    #[test]
    fn n_retries_are_n_plus_one_runs() {
        let minute = Duration::from_secs(60);
        for times in [0, 1, 2, 9] {
            let policy = RetryManyTimes::new(times, minute).expect("valid");
            for attempts in 0..12 {
                let expected = if attempts <= times { Ok(minute) } else { Err(FinishReason::TRIED_TOO_MANY_TIMES) };
                check(&policy, &job(attempts), "timeout", Duration::ZERO, expected);
            }
        }
    }

    #[test]
    fn it_is_stored_and_read() {
        for (times, wait) in [(3, bson!(60)), (0, bson!(0)), (1, bson!(0.25)), (7, bson!(3_000_000_000_i64))] {
            survives("RetryManyTimes", bson!({ "retry_how_many_times": times, "seconds_to_wait_before_retry": wait }));
        }
        survives("RetryManyTimes", bson!({ "retry_how_many_times": i64::from(u32::MAX), "seconds_to_wait_before_retry": 1 }));
    }

    #[test]
    fn nonsense_is_refused() {
        fn check(times: Bson, wait: Bson, message: &str) {
            refused("RetryManyTimes", bson!({ "retry_how_many_times": times, "seconds_to_wait_before_retry": wait }), message);
        }
        check(bson!(-1), bson!(1), "RetryManyTimes: `retry_how_many_times` is -1; it must be a whole number from 0");
        check(bson!(1.5), bson!(1), "`retry_how_many_times` is 1.5");
        check(bson!(1e12), bson!(1), "`retry_how_many_times` is 1000000000000");
        check(bson!(null), bson!(1), "`retry_how_many_times` is missing");
        check(bson!(3), bson!(null), "`seconds_to_wait_before_retry` is missing; it must be a number of seconds");
        check(bson!(3), bson!(-1), "`seconds_to_wait_before_retry` is -1");
        check(bson!(3), bson!(f64::NAN), "`seconds_to_wait_before_retry` is NaN");
        check(bson!(3), bson!(f64::INFINITY), "`seconds_to_wait_before_retry` is inf");
        check(bson!(3), bson!(0.0001), "`seconds_to_wait_before_retry` is 0.0001 seconds; it must be from 0.001");
        check(bson!(3), bson!(1e10), "`seconds_to_wait_before_retry` is 10000000000 seconds; it must be from 0.001 to 3153600000");
    }
}
