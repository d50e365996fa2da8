//! The leading recruiter, and the workers with their groups, classes and policies. Read once for display; no program
//! acts on it.
//!
//! Ages are computed with the server's clock, which wrote the dates. Only the cleaner and the standby recruiters detect
//! deaths, and they use other means.

use std::{collections::BTreeSet, io::Write};

use bson::{Bson, Document};
use chrono::TimeDelta;
use recruiter_common::{
    enqueue::NewJob,
    instant::Instant,
    roster::WorkOn,
    store::{Store, StoreError, lossy},
    workers::Request,
};
use serde_json::{Value, json};

use super::output::{apart, printable};

/// Maximum lease in milliseconds of a leader whose document does not contain its lease.
const USUAL_LEADERS_LEASE_MS: u32 = 30_000;
/// Lease in milliseconds of a worker whose document does not contain its lease.
const USUAL_LEASE_MS: i64 = 20_000;
/// Maximum number of warnings.
const WARNINGS: usize = 5;
/// Maximum number of pairs, limits and policies of which it is checked whether they exist.
const NEEDS: usize = 1_000;

/// Whether there is a leading recruiter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Leader {
    /// The leader, as `host:pid`.
    Leads(String),
    /// No leader, and the reason.
    Nobody(String),
}

impl Leader {
    pub(crate) async fn find(store: &Store) -> Result<Self, StoreError> {
        let now = store.now();
        Ok(match store.observe_lease().await? {
            None => Self::Nobody("no recruiter has led yet".into()),
            Some(lease) => {
                let who = printable(&lease.holder_at, 80);
                let lease_ms = if lease.lease_ms > 0 { lease.lease_ms } else { USUAL_LEADERS_LEASE_MS };
                match lease.renewed_at {
                    _ if lease.released => Self::Nobody(format!("the last leader, {who}, has stopped")),
                    Some(at) if now - at > TimeDelta::milliseconds(lease_ms.into()) => {
                        Self::Nobody(format!("the last leader, {who}, has not renewed its lease for {}", apart(at, now)))
                    }
                    _ => Self::Leads(who),
                }
            }
        })
    }

    /// The state as one line of text.
    pub(crate) fn line(&self) -> String {
        match self {
            Self::Leads(who) => format!("leader: {who}"),
            Self::Nobody(why) => format!("no recruiter leads: due jobs are not assigned ({why})"),
        }
    }

    pub(crate) fn to_json(&self) -> Value {
        match self {
            Self::Leads(who) => json!(who),
            Self::Nobody(_) => Value::Null,
        }
    }

    pub(crate) fn is_missing(&self) -> bool {
        matches!(self, Self::Nobody(_))
    }
}

/// A worker, with the fields of its roster document that can be read.
#[derive(Clone, Debug)]
pub(crate) struct Worker {
    /// Its roster document.
    pub(crate) document: Document,
    /// Groups that it takes jobs of.
    pub(crate) work_on: Option<WorkOn>,
    /// Classes that it can run.
    pub(crate) classes: Vec<String>,
    /// Retry policies that it knows, if its document lists them.
    pub(crate) policies: Option<Vec<String>>,
    /// Whether a cleaner has declared it dead.
    pub(crate) is_retired: bool,
    /// Time since its last heartbeat, if that is longer than its lease.
    pub(crate) silent_for: Option<TimeDelta>,
    /// What an operator wants of it.
    pub(crate) request: Option<Request>,
    /// Its lease: the longest expected time between two heartbeats.
    pub(crate) lease: TimeDelta,
}

impl Worker {
    pub(crate) fn of(document: Document, now: Instant) -> Self {
        let texts = |field: &str| {
            let list = document.get_array(field).ok()?;
            Some(list.iter().filter_map(|text| text.as_str().map(str::to_owned)).collect::<Vec<_>>())
        };
        let lease_ms = document.get("lease_ms").and_then(|ms| ms.as_i64().or(ms.as_i32().map(i64::from))).filter(|ms| *ms > 0);
        let lease = TimeDelta::try_milliseconds(lease_ms.unwrap_or(USUAL_LEASE_MS)).unwrap_or(TimeDelta::MAX);
        let silent_for = document.get_datetime("last_seen_at").ok().map(|at| now - at.to_chrono()).filter(|silence| *silence > lease);
        Self {
            work_on: document.get("work_on").cloned().and_then(|work_on: Bson| work_on.try_into().ok()),
            classes: texts("classes").unwrap_or_default(),
            policies: texts("policies"),
            is_retired: document.get_bool("retired").unwrap_or(false),
            silent_for,
            request: Request::of(&document),
            lease,
            document,
        }
    }

    /// Whether it is neither retired nor silent for longer than its lease.
    pub(crate) fn is_alive(&self) -> bool {
        !self.is_retired && self.silent_for.is_none()
    }

    fn works_on(&self, group: &str) -> bool {
        self.work_on.as_ref().is_some_and(|work_on| work_on.includes(group))
    }
}

/// All workers in the roster.
#[derive(Clone, Debug, Default)]
pub(crate) struct Workers(pub(crate) Vec<Worker>);

impl Workers {
    pub(crate) async fn find(store: &Store) -> Result<Self, StoreError> {
        let documents = store.roster_documents().await?;
        let now = store.now();
        Ok(Self(documents.iter().map(|document| Worker::of(lossy(document), now)).collect()))
    }

    /// Returns the policies that no live worker knows. Empty if no worker is live, or if one does not list its
    /// policies.
    pub(crate) fn unknown_policies(&self, policies: BTreeSet<String>) -> Vec<String> {
        let living = self.0.iter().filter(|worker| worker.is_alive());
        match living.map(|worker| worker.policies.as_deref()).collect::<Option<Vec<_>>>() {
            Some(known) if !known.is_empty() => policies.into_iter().filter(|policy| !known.concat().contains(policy)).collect(),
            _ => Vec::new(),
        }
    }

    /// The reason why no live worker takes jobs of this class and group; `None` if there is such a worker.
    pub(crate) fn why_nobody_takes(&self, class: &str, group: &str) -> Option<String> {
        let mut living = self.0.iter().filter(|worker| worker.is_alive()).peekable();
        if living.peek().is_none() {
            return Some("no worker is running".into());
        }
        let with_class: Vec<&Worker> = living.filter(|worker| worker.classes.iter().any(|known| known == class)).collect();
        let able: Vec<&&Worker> = with_class.iter().filter(|worker| worker.works_on(group)).collect();
        let (class, group) = (printable(class, 80), printable(group, 80));
        if with_class.is_empty() {
            Some(format!("no running worker has the class `{class}`"))
        } else if able.is_empty() {
            Some(format!("no running worker that has the class `{class}` works on the group `{group}`"))
        } else if able.iter().all(|worker| worker.request.is_some()) {
            Some(format!(
                "every running worker that has the class `{class}` and works on the group `{group}` is quiet or stops \
                 (`recruiter workers resume` ends the quiet)"
            ))
        } else {
            None
        }
    }
}

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
        self.limits.extend(job.limit_names().iter().take(NEEDS.saturating_sub(self.limits.len())).cloned());
        if self.policies.len() < NEEDS {
            self.policies.insert(job.policy_class().to_owned());
        }
    }
}

/// Warns about what jobs need and do not have: a running worker that takes their class and group, one that knows their retry policy, and
/// the limits that they name. This is not an error: the jobs wait. What this user may not read is not checked.
pub(super) async fn warn_of_unmet(store: &Store, needs: &Needs) {
    let mut reasons = BTreeSet::new();
    if let Ok(workers) = Workers::find(store).await {
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

#[cfg(test)]
mod tests {
    use bson::doc;

    use super::*;

    #[test]
    fn what_nobody_takes_has_a_reason() {
        let now = Instant::UNIX_EPOCH + TimeDelta::hours(1);
        let seen = |seconds_ago: i64| bson::DateTime::from_chrono(now - TimeDelta::seconds(seconds_ago));
        let workers = |documents: Vec<Document>| Workers(documents.into_iter().map(|document| Worker::of(document, now)).collect());
        let check = |workers: &Workers, class: &str, group: &str, expected: Option<&str>| {
            assert_eq!(workers.why_nobody_takes(class, group).as_deref(), expected);
        };
        let living = doc! { "classes": ["a", "b"], "work_on": ["g", "h"], "last_seen_at": seen(1), "lease_ms": 20_000_i64 };
        let some = workers(vec![living, doc! { "classes": ["c"], "work_on": "*", "last_seen_at": seen(21), "lease_ms": 20_000 }]);
        check(&some, "a", "g", None);
        check(&some, "a", "x", Some("no running worker that has the class `a` works on the group `x`"));
        check(&some, "c", "g", Some("no running worker has the class `c`"));
        let dead = workers(vec![doc! { "classes": ["a"], "work_on": "*", "last_seen_at": seen(1), "retired": true }]);
        check(&dead, "a", "g", Some("no worker is running"));
        check(&Workers::default(), "a", "g", Some("no worker is running"));
        let quiet = doc! { "classes": ["a"], "work_on": "*", "last_seen_at": seen(1), "lease_ms": 20_000, "wanted": "quiet" };
        let reason = workers(vec![quiet.clone()]).why_nobody_takes("a", "g").unwrap();
        assert!(reason.contains("is quiet or stops"), "{reason}");
        let other = Document::from_iter(quiet.clone().into_iter().filter(|(field, _)| field != "wanted"));
        check(&workers(vec![quiet, other]), "a", "g", None);
        check(&workers(vec![doc! {}]), "a", "g", Some("no running worker has the class `a`"));
    }

    #[test]
    fn a_policy_is_unknown_when_no_living_worker_knows_it() {
        let unknown = |workers: &[Document]| {
            let workers = workers.iter().map(|document| Worker::of(document.clone(), Instant::UNIX_EPOCH)).collect();
            Workers(workers).unknown_policies(["Mine".to_owned(), "Ours".to_owned()].into())
        };
        let [ours, all] = [doc! { "policies": ["Ours"] }, doc! { "policies": ["Mine", "Ours"] }];
        assert_eq!(unknown(std::slice::from_ref(&ours)), ["Mine"]);
        assert_eq!(unknown(&[ours.clone(), all.clone()]), [""; 0]);
        let dead = doc! { "policies": ["Mine"], "retired": true };
        assert_eq!(unknown(&[ours.clone(), dead]), ["Mine"]);
        assert_eq!(unknown(&[ours, doc! {}]), [""; 0], "one of an older release does not say");
        assert_eq!(unknown(&[]), [""; 0]);
    }
}
