//! What all sessions of a worker process use.

use std::sync::Arc;

use recruiter_common::{
    failure::Failure,
    job::Job,
    retry_policy::{RetryPolicies, RetryPolicy},
    service::{Notifier, Watchdog},
    store::{ProcessIdentity, Store},
};

use super::{meters::Meters, outliving::Outliving, source::Source};
use crate::{config::WorkerConfig, event::Listener, layer::Layers, panics::guarded, registry::Registry};

pub(crate) struct Dependencies {
    pub(crate) store: Arc<Store>,
    /// The same database over connections of its own, which job traffic cannot exhaust.
    pub(crate) heartbeat_store: Store,
    pub(crate) config: WorkerConfig,
    pub(crate) process: ProcessIdentity,
    pub(crate) registry: Registry,
    pub(crate) policies: RetryPolicies,
    pub(crate) layers: Layers,
    pub(crate) listener: Option<Arc<Listener>>,
    /// Where the jobs come from.
    pub(crate) source: Source,
    pub(crate) outliving: Outliving,
    pub(crate) meters: Meters,
    pub(crate) notifier: Notifier,
    /// The session loop notes its progress here.
    pub(crate) watchdog: Watchdog,
}

/// The retry policy of a job, or why it cannot be used.
pub(crate) type Policy = Result<Arc<dyn RetryPolicy>, Failure>;

/// Decodes the retry policy of a job, which is code of users. The error is the class of an unknown policy.
pub(crate) fn policy_of(policies: &RetryPolicies, job: &Job) -> Result<Policy, String> {
    let unusable = |error: &dyn std::fmt::Display| Failure::new("retry-policy", format!("the retry policy cannot be used: {error}"));
    match guarded(|| policies.decode(job.settings.retry_policy())) {
        Ok(Ok(policy)) => Ok(Ok(policy)),
        Ok(Err(error)) => match error.unknown_class() {
            Some(class) => Err(class.to_owned()),
            None => Ok(Err(unusable(&error))),
        },
        Err(panicked) => Ok(Err(panicked)),
    }
}
