//! Warnings about jobs that wait for what does not exist. The library reads the leader and the workers.

use std::{collections::BTreeSet, io::Write};

pub(super) use recruiter_common::workers::Worker;
use recruiter_common::{
    enqueue::NewJob,
    ids::JobId,
    job::{Job, Settings},
    store::{Store, policies_in},
};

use super::output::printable;

/// Maximum number of warnings.
const WARNINGS: usize = 5;
/// Maximum number of kinds and limits of which it is checked whether they exist.
const NEEDS: usize = 1_000;

/// Maximum number of written jobs that are read again.
pub(super) const STORED: usize = 100;

/// What jobs need to run: workers for each class and group with these retry policies, and limits.
#[derive(Clone, Debug, Default)]
pub(super) struct Needs {
    kinds: BTreeSet<(String, String, BTreeSet<String>)>,
    limits: BTreeSet<String>,
}

impl Needs {
    pub(super) fn of<'a>(jobs: impl IntoIterator<Item = &'a NewJob>) -> Self {
        let mut needs = Self::default();
        jobs.into_iter().for_each(|job| needs.add(job));
        needs
    }

    /// Adds what this job needs, up to [`NEEDS`] of each.
    pub(super) fn add(&mut self, job: &NewJob) {
        self.add_settings(job.class_and_group(), job.settings());
    }

    fn add_settings(&mut self, (class, group): (&str, &str), settings: &Settings) {
        if self.kinds.len() < NEEDS {
            let policies = policies_in(settings.retry_policy().clone().into());
            self.kinds.insert((class.to_owned(), group.to_owned(), policies));
        }
        self.limits.extend(settings.limits.iter().take(NEEDS.saturating_sub(self.limits.len())).cloned());
    }

    /// What the first [`STORED`] of these jobs need, which are read one by one: they may be large. Jobs that cannot be read need nothing.
    pub(super) async fn of_stored(store: &Store, jobs: &[JobId]) -> Self {
        let mut needs = Self::default();
        for job in jobs.iter().take(STORED) {
            let Ok(stored) = store.job(*job).await else { break };
            if let Some(Ok(job)) = stored.map(|stored| Job::try_from(stored.document)) {
                needs.add_settings((&job.class, job.settings.group()), &job.settings);
            }
        }
        needs
    }
}

/// Warns about what jobs need and do not have: a running worker that takes their class and group and knows their retry policies, and the
/// limits that they name. This is not an error: the jobs wait. What this user may not read is not checked.
pub(super) async fn warn_of_unmet(store: &Store, needs: &Needs) {
    let mut reasons = BTreeSet::new();
    if let Ok(workers) = store.workers().list().await {
        for (class, group, policies) in &needs.kinds {
            let untaken = workers.why_no_worker_takes(class, group).map(|reason| format!("{reason}; the job waits until there is one"));
            let unknown = || Some(format!("{}; the job waits until one does", workers.why_unknown(class, group, policies)?));
            reasons.extend(untaken.or_else(unknown));
        }
    }
    if !needs.limits.is_empty()
        && let Ok(stored) = store.settings().await
    {
        let undefined = needs.limits.iter().filter(|name| stored.limit_of(name).is_none() && stored.invalid_for(name).is_none());
        reasons.extend(undefined.map(|name| {
            let name = printable(name, 80);
            format!("there is no limit `{name}`; the job waits until `recruiter limits set {name}` defines it")
        }));
    }
    // Standard error may be closed: the warnings are then not needed.
    for reason in reasons.iter().take(WARNINGS) {
        let _ = writeln!(std::io::stderr(), "warning: {reason}");
    }
    if let Some(more @ 1..) = reasons.len().checked_sub(WARNINGS) {
        let _ = writeln!(std::io::stderr(), "warning: {more} more of this kind");
    }
}
