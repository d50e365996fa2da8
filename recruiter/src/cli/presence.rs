//! Warnings about jobs that wait for what does not exist. The library reads the leader and the workers.

use std::{collections::BTreeSet, io::Write};

pub(super) use recruiter_common::workers::Worker;
use recruiter_common::{enqueue::NewJob, store::Store};

use super::output::printable;

/// Maximum number of warnings.
const WARNINGS: usize = 5;
/// Maximum number of pairs, limits and policies of which it is checked whether they exist.
const NEEDS: usize = 1_000;

/// What jobs need to run: the pairs of class and group, limits and retry policies.
#[derive(Clone, Debug, Default)]
pub(super) struct Needs {
    kinds: BTreeSet<(String, String)>,
    limits: BTreeSet<String>,
    policies: BTreeSet<String>,
}

impl Needs {
    pub(super) fn of<'a>(jobs: impl IntoIterator<Item = &'a NewJob>) -> Self {
        let mut needs = Self::default();
        jobs.into_iter().for_each(|job| needs.add(job));
        needs
    }

    /// Adds what this job needs, up to [`NEEDS`] of each.
    pub(super) fn add(&mut self, job: &NewJob) {
        let (class, group) = job.class_and_group();
        if self.kinds.len() < NEEDS {
            self.kinds.insert((class.to_owned(), group.to_owned()));
        }
        self.limits.extend(job.settings().limits.iter().take(NEEDS.saturating_sub(self.limits.len())).cloned());
        if self.policies.len() < NEEDS {
            self.policies.insert(job.settings().retry_policy().class.clone());
        }
    }
}

/// Warns about what jobs need and do not have: a running worker that takes their class and group, one that knows their retry policy, and
/// the limits that they name. This is not an error: the jobs wait. What this user may not read is not checked.
pub(super) async fn warn_of_unmet(store: &Store, needs: &Needs) {
    let mut reasons = BTreeSet::new();
    if let Ok(workers) = store.workers().list().await {
        let untaken = needs.kinds.iter().filter_map(|(class, group)| workers.why_nobody_takes(class, group));
        reasons.extend(untaken.map(|reason| format!("{reason}; the job waits until there is one")));
        let unknown = workers.unknown_policies(needs.policies.clone()).into_iter();
        reasons.extend(
            unknown.map(|policy| {
                format!("no running worker knows the retry policy `{}`; the job waits until one does", printable(&policy, 80))
            }),
        );
    }
    if !needs.limits.is_empty()
        && let Ok(settings) = store.settings().await
    {
        let undefined = needs.limits.iter().filter(|name| settings.limit_of(name).is_none() && settings.invalid_for(name).is_none());
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
