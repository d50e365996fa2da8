//! Selects a policy by error class.

use std::sync::Arc;

use bson::{Bson, Document, doc};

use super::{Decision, History, InvalidPolicy, Parameters, RetryPolicies, RetryPolicy, error_classes::ErrorClasses};
use crate::{
    base::{Failure, Instant},
    job::{FinishReason, StoredPolicy},
};

/// Uses the policy of the first case that lists the failure's error class. A failure that no case lists archives the
/// job as [`FinishReason::NON_RETRIABLE_EXCEPTION`].
///
/// A listed class that ends in `*` matches all classes that begin with the text before it: `exit:*`. `*` matches every
/// class.
///
/// Stored as `cases`, a list of `{when: [classes], then: {class, parameters}}`.
///
/// ```
/// use std::time::Duration;
/// use recruiter_common::retry_policy::{RetryForever, RetryManyTimes, SelectByException};
///
/// let policy = SelectByException::when(["timeout", "worker-died"], RetryForever::new(Duration::from_secs(60))?)?
///     .or_when(["exit:*"], RetryManyTimes::new(3, Duration::from_secs(5))?)?;
/// # Ok::<(), recruiter_common::retry_policy::InvalidPolicy>(())
/// ```
#[derive(Clone, Debug)]
pub struct SelectByException {
    cases: Vec<Case>,
}

#[derive(Clone, Debug)]
struct Case {
    when: ErrorClasses,
    then: Arc<dyn RetryPolicy>,
}

impl SelectByException {
    /// The first case: `policy` decides on failures of these classes.
    ///
    /// # Errors
    /// When no class is listed, or one that no failure can have: empty, or longer than
    /// [`LONGEST_CLASS`](crate::base::failure::LONGEST_CLASS).
    pub fn when(classes: impl IntoIterator<Item = impl Into<String>>, policy: impl RetryPolicy + 'static) -> Result<Self, InvalidPolicy> {
        Self { cases: Vec::new() }.or_when(classes, policy)
    }

    /// Adds a case, for failures that no earlier case lists.
    ///
    /// # Errors
    /// As [`when`](Self::when), and when an earlier case already covers a listed class.
    pub fn or_when(
        mut self,
        classes: impl IntoIterator<Item = impl Into<String>>,
        policy: impl RetryPolicy + 'static,
    ) -> Result<Self, InvalidPolicy> {
        let parameter = format!("cases[{}].when", self.cases.len());
        let when = ErrorClasses::new(&parameter, classes)?;
        if let Some((earlier, class)) = self.cases.iter().enumerate().find_map(|(at, case)| Some((at, when.covered_by(&case.when)?))) {
            let problem = format!("lists `{class}`, which `cases[{earlier}]` already covers; put the narrower class first");
            return Err(InvalidPolicy::parameter(parameter, problem));
        }
        self.cases.push(Case { when, then: Arc::new(policy) });
        Ok(self)
    }

    pub(super) fn decode(parameters: &Parameters<'_>, policies: &RetryPolicies) -> Result<Self, InvalidPolicy> {
        let cases = parameters.rows("cases", |case| Ok((case.texts("when")?, case.policy("then", policies)?)))?;
        if cases.is_empty() {
            return Err(InvalidPolicy::parameter("cases", "is empty; give at least one case {when, then}, or use DoNotDoItAgain"));
        }
        cases.into_iter().try_fold(Self { cases: Vec::new() }, |policy, (when, then)| policy.or_when(when, then))
    }
}

impl RetryPolicy for SelectByException {
    fn class(&self) -> &str {
        "SelectByException"
    }

    fn parameters(&self) -> Document {
        let stored = |case: &Case| Bson::Document(doc! { "when": &case.when, "then": StoredPolicy::from(&case.then) });
        doc! { "cases": self.cases.iter().map(stored).collect::<Vec<_>>() }
    }

    fn decide(&self, job: &History<'_>, failure: &Failure, failed_at: Instant) -> Decision {
        let case = self.cases.iter().find(|case| case.when.contain(&failure.class));
        case.map_or(Decision::Archive(FinishReason::NON_RETRIABLE_EXCEPTION), |case| case.then.decide(job, failure, failed_at))
    }

    fn is_last_attempt(&self, job: &History<'_>, now: Instant) -> bool {
        self.cases.iter().all(|case| case.then.is_last_attempt(job, now))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use bson::bson;

    use super::*;
    use crate::retry_policy::{do_not_do_it_again::DoNotDoItAgain, retry_many_times::RetryManyTimes, testing::*};

    fn times(times: u32, seconds: u64) -> RetryManyTimes {
        RetryManyTimes::new(times, Duration::from_secs(seconds)).expect("valid")
    }

    #[test]
    fn the_first_case_that_lists_the_class_decides() {
        let policy = SelectByException::when(["timeout"], times(2, 1))
            .and_then(|policy| policy.or_when(["exit:75"], times(1, 2)))
            .and_then(|policy| policy.or_when(["exit:*", "signal:9"], DoNotDoItAgain))
            .expect("valid");
        let check_class = |attempts, class, expected: Result<u64, FinishReason>| {
            check(&policy, &job(attempts), class, Duration::ZERO, expected.map(Duration::from_secs));
        };
        check_class(1, "timeout", Ok(1));
        check_class(2, "timeout", Ok(1));
        check_class(3, "timeout", Err(FinishReason::TRIED_TOO_MANY_TIMES));
        check_class(1, "exit:75", Ok(2));
        check_class(2, "exit:75", Err(FinishReason::TRIED_TOO_MANY_TIMES));
        check_class(1, "exit:7", Err(FinishReason::NOT_SCHEDULED_BY_RETRY_POLICY));
        check_class(1, "signal:9", Err(FinishReason::NOT_SCHEDULED_BY_RETRY_POLICY));
        check_class(1, "signal:15", Err(FinishReason::NON_RETRIABLE_EXCEPTION));
    }

    #[test]
    fn it_is_stored_and_read() {
        let forever = bson!({ "class": "RetryForever", "parameters": { "seconds_to_wait_before_retry": 60 } });
        let never = bson!({ "class": "DoNotDoItAgain", "parameters": {} });
        survives(
            "SelectByException",
            bson!({ "cases": [{ "when": ["timeout", "exit:*"], "then": forever }, { "when": ["*"], "then": never }] }),
        );
        let brief = bson!({ "cases": [{ "when": "timeout", "then": { "class": "DoNotDoItAgain" } }] });
        let whole = doc! { "cases": [{ "when": ["timeout"], "then": { "class": "DoNotDoItAgain", "parameters": {} } }] };
        assert_eq!(decoded("SelectByException", brief).expect("valid").parameters(), whole);
    }

    #[test]
    fn nonsense_is_refused() {
        #[track_caller]
        fn check(cases: Bson, message: &str) {
            refused("SelectByException", bson!({ "cases": cases }), message);
        }
        let never = bson!({ "class": "DoNotDoItAgain" });
        check(bson!(null), "SelectByException: `cases` is missing; it must be a list of documents");
        check(bson!([]), "SelectByException: `cases` is empty; give at least one case");
        check(bson!([{ "then": &never }]), "SelectByException: cases[0]: `when` is missing");
        check(bson!([{ "when": [], "then": &never }]), "`cases[0].when` is empty; list at least one");
        check(bson!([{ "when": ["timeout"] }]), "cases[0]: `then` is missing; it must be a retry policy");
        check(bson!([{ "when": ["timeout"], "then": { "class": "TimeTable" } }]), "cases[0]: then: TimeTable: `time_table` is missing");
        let shadowed =
            bson!([{ "when": ["panic"], "then": &never }, { "when": ["exit:*"], "then": &never }, { "when": ["exit:1"], "then": &never }]);
        check(shadowed, "`cases[2].when` lists `exit:1`, which `cases[1]` already covers; put the narrower class first");
    }
}
