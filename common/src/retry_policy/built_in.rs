//! The built-in policies, which every program can decode.

use super::{
    DoNotDoItAgain, ExponentialBackoff, RetriableExceptionFilter, RetryForever, RetryManyTimes, RetryPolicies, SelectByException, TimeTable,
};

impl Default for RetryPolicies {
    fn default() -> Self {
        let mut policies = Self::none();
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
