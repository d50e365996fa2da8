//! The flags about retry policies: `--retry`, `--retry-delay`, `--backoff` and `--custom-policy`.

use std::time::Duration;

use recruiter_common::{
    ExponentialBackoff, RetryManyTimes,
    job::StoredPolicy,
    spec::{InvalidSpec, UnknownPolicies, policy_of_text},
};

use super::exit::usage;

/// The wait of `--retry N`, if none is given.
const RETRY_DELAY: Duration = Duration::from_secs(10);

/// What `--retry` gives.
#[derive(Clone, Debug)]
pub(super) enum Retries {
    Times(u32),
    Policy(StoredPolicy),
}

pub(super) fn retry_of_text(text: &str) -> Result<Retries, InvalidSpec> {
    if text.trim_start().starts_with('{') {
        return policy_of_text(text).map(Retries::Policy);
    }
    let wrong = || format!("`{text:.80}` is neither a number of retries nor a retry policy {{\"class\": …, \"parameters\": …}}");
    text.parse().map(Retries::Times).map_err(|_| InvalidSpec::of_text(wrong()))
}

/// What `--custom-policy` decides.
pub(super) fn unknown_policies(custom_policy: bool) -> UnknownPolicies {
    if custom_policy { UnknownPolicies::Accept } else { UnknownPolicies::Refuse }
}

/// The retry policy that the flags describe. They must not give a delay to a policy that has its own.
pub(super) fn policy(retries: Option<&Retries>, delay: Option<Duration>, backoff: bool) -> anyhow::Result<Option<StoredPolicy>> {
    let is_detailed = delay.is_some() || backoff;
    let delay = delay.unwrap_or(RETRY_DELAY);
    let policy = match retries {
        None if is_detailed => return Err(usage("--retry-delay and --backoff need --retry N")),
        None => return Ok(None),
        Some(Retries::Policy(_)) if is_detailed => {
            return Err(usage("--retry-delay and --backoff are for --retry N; a retry policy as JSON has them among its parameters"));
        }
        Some(Retries::Policy(policy)) => Ok(policy.clone()),
        Some(Retries::Times(times)) if backoff => ExponentialBackoff::new(*times, delay).map(|policy| StoredPolicy::from(&policy)),
        Some(Retries::Times(times)) => RetryManyTimes::new(*times, delay).map(|policy| StoredPolicy::from(&policy)),
    };
    policy.map(Some).map_err(|_| {
        usage(format!(
            "--retry-delay {} is not possible: give 1ms to 100 years{}",
            humantime::format_duration(delay),
            if backoff { "" } else { ", or 0s" }
        ))
    })
}
