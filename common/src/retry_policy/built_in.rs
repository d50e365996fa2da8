//! The built-in policies, which every program can decode.

use super::{
    do_not_do_it_again::DoNotDoItAgain, exponential_backoff::ExponentialBackoff, registry::RetryPolicies,
    retriable_exception_filter::RetriableExceptionFilter, retry_forever::RetryForever, retry_many_times::RetryManyTimes,
    select_by_exception::SelectByException, time_table::TimeTable,
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
