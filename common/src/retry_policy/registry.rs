//! The registry of policies: decodes stored policies by class.
//!
//! Used to read a job's policy: by workers, and by enqueuers that validate a user's input.

use std::{collections::BTreeMap, fmt, sync::Arc};

use bson::Bson;

use super::{InvalidPolicy, Parameters, RetryPolicy, parameters::DEEPEST};
use crate::job::StoredPolicy;

type Decode = dyn Fn(&Parameters<'_>, &RetryPolicies) -> Result<Arc<dyn RetryPolicy>, InvalidPolicy> + Send + Sync;

/// The policies that can be decoded. The default has the built-in ones. Cloning is cheap.
///
/// ```
/// use recruiter_common::{job::StoredPolicy, retry_policy::RetryPolicies};
///
/// let stored: StoredPolicy =
///     serde_json::from_str(r#"{"class": "RetryForever", "parameters": {"seconds_to_wait_before_retry": 60}}"#)?;
/// let policy = RetryPolicies::default().decode(&stored)?;
/// assert_eq!(StoredPolicy::from(&policy), stored);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct RetryPolicies {
    known: Arc<BTreeMap<String, Arc<Decode>>>,
    /// Number of levels of nested policies that may still be decoded. A decoder of a nested policy gets a registry with
    /// one level less.
    levels: usize,
    /// Whether unknown parameters are refused.
    strict: bool,
}

impl RetryPolicies {
    /// Maximum depth of policies within policies, so that no document can overflow the stack.
    pub const DEEPEST: usize = DEEPEST;

    /// An empty registry.
    pub(super) fn none() -> Self {
        Self { known: Arc::default(), levels: DEEPEST, strict: false }
    }

    /// Adds a policy. `decode` creates it from its stored parameters, with the same validation as its constructor. The
    /// registry in its arguments is for parameters that are policies themselves ([`Parameters::policy`]).
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use bson::{Document, doc};
    /// use recruiter_common::{failure::Failure, instant::Instant, retry_policy::*};
    ///
    /// #[derive(Debug)]
    /// struct WaitLongerEachTime(Duration);
    ///
    /// impl RetryPolicy for WaitLongerEachTime {
    ///     fn class(&self) -> &str {
    ///         "WaitLongerEachTime"
    ///     }
    ///     fn parameters(&self) -> Document {
    ///         doc! { "seconds": self.0.as_secs_f64() }
    ///     }
    ///     fn decide(&self, job: &History<'_>, _: &Failure, _: Instant) -> Decision {
    ///         Decision::RetryAfter(self.0.saturating_mul(job.attempts))
    ///     }
    ///     fn is_last_attempt(&self, _: &History<'_>, _: Instant) -> bool {
    ///         false
    ///     }
    /// }
    ///
    /// let mut policies = RetryPolicies::default();
    /// policies.register("WaitLongerEachTime", |parameters, _| Ok(WaitLongerEachTime(parameters.seconds("seconds")?)))?;
    /// # Ok::<(), InvalidPolicy>(())
    /// ```
    ///
    /// # Errors
    /// When a policy of this class is already registered.
    pub fn register<P: RetryPolicy + 'static>(
        &mut self,
        class: impl Into<String>,
        decode: impl Fn(&Parameters<'_>, &RetryPolicies) -> Result<P, InvalidPolicy> + Send + Sync + 'static,
    ) -> Result<(), InvalidPolicy> {
        let class = class.into();
        if self.known.contains_key(&class) {
            return Err(InvalidPolicy::AlreadyRegistered(class));
        }
        self.insert(class, decode);
        Ok(())
    }

    /// Creates a policy from its stored form.
    ///
    /// # Errors
    /// When the class is not registered, or its constructor refuses the parameters. The message names both.
    pub fn decode(&self, stored: &StoredPolicy) -> Result<Arc<dyn RetryPolicy>, InvalidPolicy> {
        self.decode_parts(&stored.class, Some(&stored.parameters))
    }

    /// Validates a policy that a user wrote, for enqueuers: unknown parameters are refused, because a misspelt name
    /// would be ignored. The policies of stored jobs are not checked this way, because a newer program may have written
    /// them.
    ///
    /// # Errors
    /// As [`decode`](Self::decode), and when a parameter is not one of the policy's.
    pub fn check(&self, written: &StoredPolicy) -> Result<(), InvalidPolicy> {
        Self { strict: true, ..self.clone() }.decode(written).map(drop)
    }

    pub(super) fn decode_parts(&self, class: &str, parameters: Option<&Bson>) -> Result<Arc<dyn RetryPolicy>, InvalidPolicy> {
        let levels = self.levels.checked_sub(1).ok_or(InvalidPolicy::NestedTooDeep)?;
        let within = Self { known: Arc::clone(&self.known), levels, strict: self.strict };
        let decode = self.known.get(class).ok_or_else(|| InvalidPolicy::UnknownClass { class: class.into(), known: self.list() })?;
        Parameters::read_all(parameters, self.strict, |parameters| decode(parameters, &within)).map_err(|problem| problem.within(class))
    }

    pub(super) fn insert<P: RetryPolicy + 'static>(
        &mut self,
        class: impl Into<String>,
        decode: impl Fn(&Parameters<'_>, &RetryPolicies) -> Result<P, InvalidPolicy> + Send + Sync + 'static,
    ) {
        let decode = move |parameters: &Parameters<'_>, policies: &RetryPolicies| -> Result<Arc<dyn RetryPolicy>, InvalidPolicy> {
            Ok(Arc::new(decode(parameters, policies)?))
        };
        Arc::make_mut(&mut self.known).insert(class.into(), Arc::new(decode));
    }

    /// The registered classes, in alphabetical order.
    pub fn classes(&self) -> impl Iterator<Item = &str> {
        self.known.keys().map(String::as_str)
    }

    fn list(&self) -> String {
        self.classes().collect::<Vec<_>>().join(", ")
    }
}

impl Parameters<'_> {
    /// A policy nested in a policy.
    pub fn policy(&self, name: &str, policies: &RetryPolicies) -> Result<Arc<dyn RetryPolicy>, InvalidPolicy> {
        let stored = self.read(name, "a retry policy {class, parameters}", Bson::as_document)?;
        let parts = self.part(stored);
        let decode = || {
            let class = parts.read("class", "the name of a retry policy", Bson::as_str)?;
            let policy = policies.decode_parts(class, parts.get("parameters"))?;
            parts.no_others().map(|()| policy)
        };
        decode().map_err(|problem| problem.within(name))
    }
}

impl fmt::Debug for RetryPolicies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RetryPolicies({})", self.list())
    }
}

#[cfg(test)]
mod tests {
    use bson::{Bson, bson, doc};

    use super::*;
    use crate::retry_policy::{do_not_do_it_again::DoNotDoItAgain, testing::*};

    fn nested(levels: usize) -> Bson {
        (1..levels).fold(bson!({ "class": "DoNotDoItAgain" }), |within, _| {
            let parameters = doc! { "retriable_exceptions": ["*"], "filtered_retry_policy": within };
            bson!({ "class": "RetriableExceptionFilter", "parameters": parameters })
        })
    }

    #[test]
    fn nesting_is_bounded() {
        #[track_caller]
        fn check(levels: usize, expected: Option<InvalidPolicy>) {
            let stored: StoredPolicy = bson::deserialize_from_bson(nested(levels)).expect("a policy");
            assert_eq!(RetryPolicies::default().decode(&stored).err(), expected, "{levels} levels");
        }
        check(1, None);
        check(RetryPolicies::DEEPEST, None);
        check(RetryPolicies::DEEPEST + 1, Some(InvalidPolicy::NestedTooDeep));
    }

    #[test]
    fn unknown_classes_are_refused_with_the_known_ones() {
        let known =
            "DoNotDoItAgain, ExponentialBackoff, RetriableExceptionFilter, RetryForever, RetryManyTimes, SelectByException, TimeTable";
        refused("RetryFourTimes", Bson::Null, &format!("there is no retry policy `RetryFourTimes`; the known ones are {known}"));
        refused("", Bson::Null, "there is no retry policy ``");
    }

    /// An enqueuer gets an error for a misspelt name. A stored job with the same name still runs.
    #[test]
    fn unknown_parameters_are_refused_when_they_are_written_and_ignored_when_they_are_read() {
        #[track_caller]
        fn check(class: &str, parameters: Bson, message: &str) {
            let policy = StoredPolicy { class: class.into(), parameters };
            assert!(RetryPolicies::default().decode(&policy).is_ok(), "{policy:?}");
            assert_eq!(RetryPolicies::default().check(&policy).expect_err("misspelt").to_string(), message);
        }
        let backoff = bson!({ "retry_how_many_times": 3, "seconds_to_initially_wait_before_retry": 1, "jiter": 0.5 });
        check("ExponentialBackoff", backoff, "ExponentialBackoff: `jiter` is unknown; did you mean `jitter`?");
        check("DoNotDoItAgain", bson!({ "times": 3 }), "DoNotDoItAgain: `times` is unknown: there are no parameters");
        let known = "the known parameters are retry_how_many_times, seconds_to_wait_before_retry";
        let times = bson!({ "retry_how_many_times": 3, "seconds_to_wait_before_retry": 1, "x": 1 });
        check("RetryManyTimes", times, &format!("RetryManyTimes: `x` is unknown; {known}"));
        let row = bson!({ "younger_than_seconds": 300, "seconds_to_wait": 60, "second_to_wait": 1 });
        check(
            "TimeTable",
            bson!({ "time_table": [row] }),
            "TimeTable: time_table[0]: `second_to_wait` is unknown; did you mean `seconds_to_wait`?",
        );
        let filtered = bson!({ "class": "DoNotDoItAgain", "params": {} });
        check(
            "RetriableExceptionFilter",
            bson!({ "retriable_exceptions": ["*"], "filtered_retry_policy": filtered }),
            "RetriableExceptionFilter: filtered_retry_policy: `params` is unknown; did you mean `parameters`?",
        );
        let case = bson!({ "when": ["*"], "then": { "class": "DoNotDoItAgain" }, "otherwise": 1 });
        check(
            "SelectByException",
            bson!({ "cases": [case] }),
            "SelectByException: cases[0]: `otherwise` is unknown; the known parameters are then, when",
        );
        let misspelt = bson!({ "retry_how_many_time": 3, "seconds_to_wait_before_retry": 1 });
        let message = "`retry_how_many_times` is missing; it must be a whole number from 0 to 4294967295; did you misspell it as `retry_how_many_time`?";
        refused("RetryManyTimes", misspelt, message);
    }

    #[test]
    fn a_policy_is_registered_once_and_can_be_nested() {
        let mut policies = RetryPolicies::default();
        let before = policies.clone();
        policies.register("Mine", |_, _| Ok(DoNotDoItAgain)).expect("new");
        for class in ["Mine", "RetryForever"] {
            let refused = policies.register(class, |_, _| Ok(DoNotDoItAgain));
            assert_eq!(refused, Err(InvalidPolicy::AlreadyRegistered(class.into())));
        }
        let parameters = bson!({ "retriable_exceptions": ["*"], "filtered_retry_policy": { "class": "Mine" } });
        let stored = StoredPolicy { class: "RetriableExceptionFilter".into(), parameters };
        assert!(policies.decode(&stored).is_ok());
        assert!(before.decode(&stored).is_err(), "a clone is not changed");
    }
}
