//! Retries with a wait that doubles each time.

use std::time::Duration;

use bson::{Document, doc};
use rand::{RngExt, SeedableRng, rngs::StdRng};

use super::{
    Decision, History, InvalidPolicy, LONGEST_WAIT, Parameters, RetryPolicy,
    parameters::{checked_wait, stored_seconds},
};
use crate::{
    base::{Failure, Instant, JobId},
    job::FinishReason,
};

/// Retries a limited number of times and doubles the wait each time: `first`, `2 · first`, `4 · first`, …, but at most
/// the cap, or [`LONGEST_WAIT`] without a cap. Then the job is archived as [`FinishReason::TRIED_TOO_MANY_TIMES`].
///
/// Without jitter, many jobs that failed together also retry together.
///
/// Stored as `retry_how_many_times`, `seconds_to_initially_wait_before_retry` and, if set, `seconds_to_wait_at_most` and
/// `jitter`.
///
/// ```
/// use std::time::Duration;
/// use recruiter_common::retry_policy::ExponentialBackoff;
///
/// let patient = ExponentialBackoff::new(10, Duration::from_secs(5))?
///     .waiting_at_most(Duration::from_secs(600))?
///     .with_jitter(0.2)?;
/// let for_about_a_day = ExponentialBackoff::for_an_interval(Duration::from_secs(86_400), Duration::from_secs(5))?;
/// # Ok::<(), recruiter_common::retry_policy::InvalidPolicy>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExponentialBackoff {
    times: u32,
    first: Duration,
    at_most: Option<Duration>,
    jitter: f64,
}

impl ExponentialBackoff {
    /// `times` retries, the first one `first` after the failure (rounded to milliseconds).
    ///
    /// # Errors
    /// When `first` is less than a millisecond (doubling zero gives zero) or more than a hundred years.
    pub fn new(times: u32, first: Duration) -> Result<Self, InvalidPolicy> {
        Ok(Self { times, first: checked_wait("seconds_to_initially_wait_before_retry", first)?, at_most: None, jitter: 0.0 })
    }

    /// As many retries as fit into `total`, if executions take no time.
    ///
    /// # Errors
    /// As [`new`](Self::new), and when not even one retry fits.
    pub fn for_an_interval(total: Duration, first: Duration) -> Result<Self, InvalidPolicy> {
        let policy = Self::new(0, first)?;
        // n waits last (2ⁿ − 1) · first.
        match (total.as_millis() / policy.first.as_millis() + 1).ilog2() {
            0 => Err(InvalidPolicy::parameter(
                "seconds_to_initially_wait_before_retry",
                format!("is {first:?}; it must not be longer than the whole interval, {total:?}"),
            )),
            times => Ok(Self { times, ..policy }),
        }
    }

    /// Limits each wait to `at_most` (rounded to milliseconds).
    ///
    /// # Errors
    /// When `at_most` is shorter than the first wait or longer than a hundred years.
    pub fn waiting_at_most(self, at_most: Duration) -> Result<Self, InvalidPolicy> {
        let at_most = checked_wait("seconds_to_wait_at_most", at_most)?;
        if at_most < self.first {
            let problem = format!("is {at_most:?}; it must not be shorter than the first wait, {:?}", self.first);
            return Err(InvalidPolicy::parameter("seconds_to_wait_at_most", problem));
        }
        Ok(Self { at_most: Some(at_most), ..self })
    }

    /// Shortens each wait by up to this fraction of it. 0 means no jitter; with 1 a wait may become nearly zero. The
    /// amount is computed from the job's id and the number of the attempt. Therefore the same attempt of the same job
    /// always gets the same wait, and the retries of different jobs are spread.
    ///
    /// # Errors
    /// When `fraction` is not between 0 and 1.
    pub fn with_jitter(self, fraction: f64) -> Result<Self, InvalidPolicy> {
        if !(0.0..=1.0).contains(&fraction) {
            return Err(InvalidPolicy::parameter("jitter", format!("is {fraction}; it must be a fraction from 0 to 1")));
        }
        Ok(Self { jitter: fraction, ..self })
    }

    pub(super) fn decode(parameters: &Parameters<'_>) -> Result<Self, InvalidPolicy> {
        let first = parameters.seconds("seconds_to_initially_wait_before_retry")?;
        let policy = Self::new(parameters.count("retry_how_many_times")?, first)?
            .with_jitter(parameters.optional("jitter", Parameters::number)?.unwrap_or(0.0))?;
        match parameters.optional("seconds_to_wait_at_most", Parameters::seconds)? {
            Some(at_most) => policy.waiting_at_most(at_most),
            None => Ok(policy),
        }
    }

    /// The wait after the failure of this attempt: the doubled and capped wait, times a number in (1 − jitter, 1].
    fn wait(&self, job: JobId, attempt: u32) -> Duration {
        // Waits have less than 42 bits of milliseconds: 64 doublings exceed every cap and fit into 128 bits.
        let doubled = self.first.as_millis() << attempt.saturating_sub(1).min(64);
        let at_most = self.at_most.unwrap_or(LONGEST_WAIT);
        let wait = u64::try_from(doubled).map_or(at_most, |milliseconds| at_most.min(Duration::from_millis(milliseconds)));
        if self.jitter == 0.0 { wait } else { wait.mul_f64(1.0 - self.jitter * drawn(job, attempt)) }
    }
}

/// A pseudo-random number in [0, 1) for this attempt of this job. It may change with the version of `rand`.
fn drawn(job: JobId, attempt: u32) -> f64 {
    let mut seed = [0; 32];
    let identity = job.to_string();
    for (to, from) in seed.iter_mut().zip(attempt.to_le_bytes().into_iter().chain(identity.bytes())) {
        *to = from;
    }
    StdRng::from_seed(seed).random()
}

impl RetryPolicy for ExponentialBackoff {
    fn class(&self) -> &str {
        "ExponentialBackoff"
    }

    fn parameters(&self) -> Document {
        let mut parameters =
            doc! { "retry_how_many_times": self.times, "seconds_to_initially_wait_before_retry": stored_seconds(self.first) };
        if let Some(at_most) = self.at_most {
            parameters.insert("seconds_to_wait_at_most", stored_seconds(at_most));
        }
        if self.jitter != 0.0 {
            parameters.insert("jitter", self.jitter);
        }
        parameters
    }

    fn decide(&self, job: &History<'_>, _: &Failure, _: Instant) -> Decision {
        if job.attempts > self.times {
            return Decision::Archive(FinishReason::TRIED_TOO_MANY_TIMES);
        }
        Decision::RetryAfter(self.wait(job.job, job.attempts))
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

    fn backoff(times: u32, first_ms: u64) -> ExponentialBackoff {
        ExponentialBackoff::new(times, Duration::from_millis(first_ms)).expect("valid")
    }

    #[test]
    fn each_wait_is_twice_the_one_before_up_to_the_cap() {
        #[track_caller]
        fn check_wait(policy: ExponentialBackoff, attempts: u32, expected: Result<Duration, FinishReason>) {
            check(&policy, &job(attempts), "timeout", Duration::ZERO, expected);
        }
        let seconds = |seconds| Ok(Duration::from_secs(seconds));
        for (attempts, expected) in [(0, 5), (1, 5), (2, 10), (3, 20), (4, 40)] {
            check_wait(backoff(4, 5_000), attempts, seconds(expected));
        }
        check_wait(backoff(4, 5_000), 5, Err(FinishReason::TRIED_TOO_MANY_TIMES));
        check_wait(backoff(0, 5_000), 1, Err(FinishReason::TRIED_TOO_MANY_TIMES));
        let capped = backoff(u32::MAX - 1, 1_000).waiting_at_most(Duration::from_secs(6)).expect("valid");
        for (attempts, expected) in [(3, 4), (4, 6), (5, 6), (66, 6), (u32::MAX - 1, 6)] {
            check_wait(capped, attempts, seconds(expected));
        }
        check_wait(capped, u32::MAX, Err(FinishReason::TRIED_TOO_MANY_TIMES));
        let endless = backoff(u32::MAX, 1);
        check_wait(endless, 42, Ok(Duration::from_millis(1 << 41)));
        for attempts in [43, 64, 65, 66, 129, u32::MAX] {
            check_wait(endless, attempts, Ok(LONGEST_WAIT));
        }
        check_wait(ExponentialBackoff::new(9, LONGEST_WAIT).expect("valid"), 9, Ok(LONGEST_WAIT));
    }

    #[test]
    fn an_interval_gives_as_many_retries_as_have_room() {
        #[track_caller]
        fn check(total: Duration, first: Duration, times: Option<u32>) {
            assert_eq!(ExponentialBackoff::for_an_interval(total, first).ok().map(|policy| policy.times), times);
        }
        let second = Duration::from_secs(1);
        for (total, times) in [(1, 1), (2, 1), (3, 2), (6, 2), (7, 3), (1_023, 10)] {
            check(second * total, second, Some(times));
        }
        check(second / 2, second, None);
        check(Duration::ZERO, second, None);
        check(second, Duration::ZERO, None);
        assert!(ExponentialBackoff::for_an_interval(Duration::MAX, Duration::from_millis(1)).is_ok());
    }

    #[test]
    fn jitter_is_the_same_for_the_same_attempt_and_spreads_the_others() {
        #[track_caller]
        fn check(jitter: f64) {
            let policy = backoff(9, 100_000).with_jitter(jitter).expect("valid");
            let (shortest, longest) = (100.0 * (1.0 - jitter), 100.0);
            let waits: Vec<f64> = (0..1_000).map(|_| policy.wait(JobId::new(), 1).as_secs_f64()).collect();
            assert!(waits.iter().all(|wait| *wait >= shortest && *wait <= longest));
            let (least, most) = waits.iter().fold((f64::MAX, 0.0_f64), |(least, most), wait| (least.min(*wait), most.max(*wait)));
            assert!(least < shortest + jitter * 10.0 && most > longest - jitter * 10.0, "{least} to {most}");
            let (one, again) = (job(1), job(1));
            assert_eq!(policy.wait(one.job, 1), policy.wait(again.job, 1));
            assert_ne!(policy.wait(one.job, 2), policy.wait(one.job, 1) * 2);
        }
        check(0.1);
        check(0.5);
        check(1.0);
        let capped = backoff(99, 1_000).waiting_at_most(Duration::from_secs(8)).and_then(|policy| policy.with_jitter(0.5)).expect("valid");
        for attempt in 0..99 {
            assert!(capped.wait(JobId::new(), attempt) <= Duration::from_secs(8));
        }
    }

    #[test]
    fn it_is_stored_and_read() {
        survives("ExponentialBackoff", bson!({ "retry_how_many_times": 3, "seconds_to_initially_wait_before_retry": 60 }));
        survives(
            "ExponentialBackoff",
            bson!({ "retry_how_many_times": 3, "seconds_to_initially_wait_before_retry": 60, "seconds_to_wait_at_most": 60 }),
        );
        survives(
            "ExponentialBackoff",
            bson!({ "retry_how_many_times": 3, "seconds_to_initially_wait_before_retry": 0.5, "seconds_to_wait_at_most": 90, "jitter": 0.25 }),
        );
    }

    #[test]
    fn nonsense_is_refused() {
        fn check(change: Document, message: &str) {
            let mut parameters = doc! { "retry_how_many_times": 3, "seconds_to_initially_wait_before_retry": 60 };
            parameters.extend(change);
            refused("ExponentialBackoff", parameters.into(), message);
        }
        check(doc! { "retry_how_many_times": -3 }, "ExponentialBackoff: `retry_how_many_times` is -3");
        check(doc! { "seconds_to_initially_wait_before_retry": 0 }, "`seconds_to_initially_wait_before_retry` is 0 seconds");
        check(
            doc! { "seconds_to_wait_at_most": 59.9 },
            "`seconds_to_wait_at_most` is 59.9s; it must not be shorter than the first wait, 60s",
        );
        check(doc! { "seconds_to_wait_at_most": 1e300 }, "000…; it must be a number of seconds from 0 to 3153600000");
        for jitter in [-0.1, 1.1, f64::NAN, f64::INFINITY] {
            check(doc! { "jitter": jitter }, "it must be a fraction from 0 to 1");
        }
        check(doc! { "jitter": "0.1" }, "`jitter` is \"0.1\"; it must be a number");
    }
}
