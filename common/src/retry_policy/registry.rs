//! Policies by name: from what is stored to what decides.
//!
//! Used by whoever reads a job's policy: workers, and enqueuers to check what a user wrote.

use std::{collections::BTreeMap, fmt, sync::Arc};

use bson::Bson;

use super::{
    DoNotDoItAgain, ExponentialBackoff, InvalidPolicy, Parameters, RetriableExceptionFilter, RetryForever, RetryManyTimes, RetryPolicy,
    SelectByException, TimeTable,
};
use crate::job::StoredPolicy;

type Decode = dyn Fn(&Parameters<'_>, &RetryPolicies) -> Result<Arc<dyn RetryPolicy>, InvalidPolicy> + Send + Sync;

/// The policies that can be decoded; the built-in ones to begin with. Cloning is cheap.
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
    /// How many levels may still be decoded below: a decoder of nested policies gets a registry with one less.
    levels: usize,
}

impl RetryPolicies {
    /// How deep policies may be nested in policies, so that no document can exhaust the stack.
    pub const DEEPEST: usize = 16;

    /// Adds a policy. `decode` makes it from its stored parameters, through the same checks as any other; the
    /// registry is for parameters that are policies themselves ([`Parameters::policy`]).
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
    /// When a policy of this class is there already.
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

    /// Makes a policy from what is stored.
    ///
    /// # Errors
    /// When the class is not registered, or its constructor refuses the parameters: the message names both.
    pub fn decode(&self, stored: &StoredPolicy) -> Result<Arc<dyn RetryPolicy>, InvalidPolicy> {
        self.decode_parts(&stored.class, Some(&stored.parameters))
    }

    pub(super) fn decode_parts(&self, class: &str, parameters: Option<&Bson>) -> Result<Arc<dyn RetryPolicy>, InvalidPolicy> {
        let levels = self.levels.checked_sub(1).ok_or(InvalidPolicy::NestedTooDeep)?;
        let within = Self { known: Arc::clone(&self.known), levels };
        let decode = self.known.get(class).ok_or_else(|| InvalidPolicy::UnknownClass { class: class.into(), known: self.classes() })?;
        Parameters::of(parameters).and_then(|parameters| decode(&parameters, &within)).map_err(|problem| problem.within(class))
    }

    fn insert<P: RetryPolicy + 'static>(
        &mut self,
        class: impl Into<String>,
        decode: impl Fn(&Parameters<'_>, &RetryPolicies) -> Result<P, InvalidPolicy> + Send + Sync + 'static,
    ) {
        let decode = move |parameters: &Parameters<'_>, policies: &RetryPolicies| -> Result<Arc<dyn RetryPolicy>, InvalidPolicy> {
            Ok(Arc::new(decode(parameters, policies)?))
        };
        Arc::make_mut(&mut self.known).insert(class.into(), Arc::new(decode));
    }

    fn classes(&self) -> String {
        self.known.keys().map(String::as_str).collect::<Vec<_>>().join(", ")
    }
}

impl Default for RetryPolicies {
    fn default() -> Self {
        let mut policies = Self { known: Arc::default(), levels: Self::DEEPEST };
        policies.insert("DoNotDoItAgain", |_, _| Ok(DoNotDoItAgain));
        policies.insert("RetryManyTimes", |parameters, _| RetryManyTimes::decode(parameters));
        policies.insert("RetryForever", |parameters, _| RetryForever::decode(parameters));
        policies.insert("ExponentialBackoff", |parameters, _| ExponentialBackoff::decode(parameters));
        policies.insert("TimeTable", |parameters, _| TimeTable::decode(parameters));
        policies.insert("RetriableExceptionFilter", RetriableExceptionFilter::decode);
        policies.insert("SelectByException", SelectByException::decode);
        policies
    }
}

impl fmt::Debug for RetryPolicies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RetryPolicies({})", self.classes())
    }
}

#[cfg(test)]
mod tests {
    use bson::{Bson, bson, doc};

    use super::{super::testing::*, *};

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
