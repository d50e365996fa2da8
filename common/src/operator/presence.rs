//! The leading recruiter, and the workers with their groups, classes and policies. Read once for display; no program
//! acts on it.
//!
//! Ages are computed with the server's clock, which wrote the dates. Only the cleaner and the standby recruiters detect
//! deaths, and they use other means.

use std::collections::BTreeSet;

use bson::{Bson, Document};
use chrono::TimeDelta;

use crate::{
    base::{Instant, JobId, WorkerId, apart, integer, printable},
    mongo::{Client, Store, StoreError, lossy},
    roster::{Request, WorkOn, assigned_in, ids_in},
};

/// Maximum lease in milliseconds of a leader whose document does not contain its lease.
const USUAL_LEADERS_LEASE_MS: u32 = 30_000;
/// Lease in milliseconds of a worker whose document does not contain its lease.
const USUAL_LEASE_MS: i64 = 20_000;

/// Whether there is a leading recruiter.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Leader {
    /// The leader, as `host:pid`.
    Leads(String),
    /// No leader, and the reason.
    Absent(String),
}

impl Client {
    /// Whether a recruiter leads.
    ///
    /// # Errors
    /// An error of MongoDB.
    pub async fn leader(&self) -> Result<Leader, StoreError> {
        Leader::find(&self.store()).await
    }
}

impl Leader {
    /// Reads the lease.
    pub(crate) async fn find(store: &Store) -> Result<Self, StoreError> {
        let now = store.now();
        Ok(match store.observe_lease().await? {
            None => Self::Absent("no recruiter has led yet".into()),
            Some(lease) => {
                let who = printable(&lease.holder_at, 80);
                let lease_ms = if lease.lease_ms > 0 { lease.lease_ms } else { USUAL_LEADERS_LEASE_MS };
                match lease.renewed_at {
                    _ if lease.released => Self::Absent(format!("the last leader, {who}, has stopped")),
                    Some(at) if now - at > TimeDelta::milliseconds(lease_ms.into()) => {
                        Self::Absent(format!("the last leader, {who}, has not renewed its lease for {}", apart(at, now)))
                    }
                    _ => Self::Leads(who),
                }
            }
        })
    }

    /// The state as one line of text.
    pub fn line(&self) -> String {
        match self {
            Self::Leads(who) => format!("leader: {who}"),
            Self::Absent(why) => format!("no recruiter leads: due jobs are not assigned ({why})"),
        }
    }

    /// The leader, as `host:pid`.
    pub fn holder(&self) -> Option<&str> {
        match self {
            Self::Leads(who) => Some(who),
            Self::Absent(_) => None,
        }
    }

    /// Whether no recruiter leads.
    pub fn is_missing(&self) -> bool {
        matches!(self, Self::Absent(_))
    }
}

/// A worker, with the fields of its roster document that can be read.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Worker {
    /// Its roster document.
    pub document: Document,
    /// Groups that it takes jobs of.
    pub work_on: Option<WorkOn>,
    /// Classes that it can run.
    pub classes: Vec<String>,
    /// Retry policies that it knows, if its document lists them.
    pub policies: Option<Vec<String>>,
    /// Whether a cleaner has declared it dead.
    pub is_retired: bool,
    /// Time since its last heartbeat; `None` if it has sent none.
    pub seen_before: Option<TimeDelta>,
    /// Time since its last heartbeat, if that is longer than its lease.
    pub silent_for: Option<TimeDelta>,
    /// What an operator wants of it.
    pub request: Option<Request>,
    /// Its lease: the longest expected time between two heartbeats.
    pub lease: TimeDelta,
}

impl Worker {
    /// The worker of a roster document at `now`.
    pub fn of(document: Document, now: Instant) -> Self {
        let texts = |field: &str| {
            let list = document.get_array(field).ok()?;
            Some(list.iter().filter_map(|text| text.as_str().map(str::to_owned)).collect::<Vec<_>>())
        };
        let lease_ms = integer(document.get("lease_ms")).filter(|ms| *ms > 0);
        let lease = TimeDelta::try_milliseconds(lease_ms.unwrap_or(USUAL_LEASE_MS)).unwrap_or(TimeDelta::MAX);
        let seen_before = document.get_datetime("last_seen_at").ok().map(|at| now - at.to_chrono());
        let silent_for = seen_before.filter(|silence| *silence > lease);
        Self {
            work_on: document.get("work_on").cloned().and_then(|work_on: Bson| work_on.try_into().ok()),
            classes: texts("classes").unwrap_or_default(),
            policies: texts("policies"),
            is_retired: document.get_bool("retired").unwrap_or(false),
            seen_before,
            silent_for,
            request: Request::of(&document),
            lease,
            document,
        }
    }

    /// Whether it is neither retired nor silent for longer than its lease.
    pub fn is_alive(&self) -> bool {
        !self.is_retired && self.silent_for.is_none()
    }

    /// Whether it is alive, but has missed heartbeats: a worker sends at least three within its lease.
    pub fn is_late(&self) -> bool {
        self.is_alive() && self.seen_before.is_some_and(|silence| silence > self.lease / 2)
    }

    /// Whether a cleaner should have ended its jobs by now. By default a cleaner retires a worker after 30 s of silence (`--dead-after`), or one
    /// and a half leases if that is longer. So a silence of more than two leases and 45 s means that no cleaner runs.
    pub fn is_overdue(&self) -> bool {
        self.silent_for.is_some_and(|silence| silence / 2 > self.lease && silence > TimeDelta::seconds(45))
    }

    /// Its id.
    pub fn id(&self) -> Option<WorkerId> {
        self.document.get_object_id("_id").ok().map(WorkerId::from)
    }

    /// Whether it has this class and works on this group.
    pub fn takes(&self, class: &str, group: &str) -> bool {
        self.has_class(class) && self.works_on(group)
    }

    fn has_class(&self, class: &str) -> bool {
        self.classes.iter().any(|known| known == class)
    }

    fn works_on(&self, group: &str) -> bool {
        self.work_on.as_ref().is_some_and(|work_on| work_on.includes(group))
    }

    /// Whether it knows all these retry policies, or does not list those that it knows.
    pub fn knows(&self, policies: &BTreeSet<String>) -> bool {
        self.policies.as_ref().is_none_or(|known| policies.iter().all(|policy| known.contains(policy)))
    }

    /// The jobs that were assigned to it and that it has not taken yet.
    pub fn untaken(&self) -> Vec<JobId> {
        // The document keeps an assignment that was taken while the worker has jobs, without the date.
        let is_taken = !self.document.contains_key("assigned_since");
        if is_taken || self.document.get_bool("available").unwrap_or(true) {
            return Vec::new();
        }
        let listed = ids_in(self.document.get("working_on"));
        self.id().map(|id| assigned_in(id, &self.document)).unwrap_or_default().into_iter().filter(|job| !listed.contains(job)).collect()
    }

    /// The jobs that it has, and that have not started: assigned ahead.
    pub fn ahead(&self) -> Vec<JobId> {
        ids_in(self.document.get("prefetched"))
    }

    /// Its host and process, and its last heartbeat, in words.
    pub fn described(&self, now: Instant) -> String {
        let at = self.document.get_datetime("last_seen_at").ok().map(|at| at.to_chrono());
        let seen = at.map_or_else(|| "without a heartbeat".into(), |at| format!("last heartbeat {} ago", apart(at, now)));
        let id = self.id().map_or_else(|| "?".into(), |id| id.to_string());
        let host = printable(self.document.get_str("hostname").unwrap_or("?"), 80);
        let pid = self.document.get("pid").map_or_else(|| "?".into(), |pid| printable(&pid.to_string(), 12));
        format!("worker {id} ({host}:{pid}, {seen})")
    }
}

/// All workers in the roster.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Presence(pub Vec<Worker>);

impl Presence {
    /// Reads the roster.
    pub(crate) async fn find(store: &Store) -> Result<Self, StoreError> {
        let documents = store.roster_documents().await?;
        let now = store.now();
        Ok(Self(documents.iter().map(|document| Worker::of(lossy(document), now)).collect()))
    }

    /// The live workers that take jobs of this class and group, without those that are asked to be quiet or to stop.
    pub(crate) fn takers(&self, class: &str, group: &str) -> impl Iterator<Item = &Worker> {
        self.0.iter().filter(move |worker| worker.is_alive() && worker.request.is_none() && worker.takes(class, group))
    }

    /// The reason why no live worker that takes jobs of this class and group can run one with these retry policies; `None` if there is such a
    /// worker, or if none takes them at all.
    pub fn why_unknown(&self, class: &str, group: &str, policies: &BTreeSet<String>) -> Option<String> {
        let mut takers = self.takers(class, group).peekable();
        takers.peek()?;
        if takers.any(|worker| worker.knows(policies)) {
            return None;
        }
        let is_known = |policy: &&String| self.takers(class, group).any(|worker| worker.knows(&[(*policy).clone()].into()));
        let unknown = policies.iter().filter(|policy| !is_known(policy));
        let unknown: Vec<String> = unknown.map(|policy| format!("`{}`", printable(policy, 80))).collect();
        let named =
            if unknown.is_empty() { "all retry policies of the job".into() } else { format!("the retry policy {}", unknown.join(", ")) };
        let (class, group) = (printable(class, 80), printable(group, 80));
        Some(format!("no running worker that has the class `{class}` and works on the group `{group}` knows {named}"))
    }

    /// The reason why no live worker takes jobs of this class and group; `None` if there is such a worker.
    pub fn why_no_worker_takes(&self, class: &str, group: &str) -> Option<String> {
        let mut living = self.0.iter().filter(|worker| worker.is_alive()).peekable();
        if living.peek().is_none() {
            return Some("no worker is running".into());
        }
        let with_class: Vec<&Worker> = living.filter(|worker| worker.has_class(class)).collect();
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

#[cfg(test)]
mod tests {
    use bson::doc;

    use super::*;

    #[test]
    fn a_class_without_workers_has_a_reason() {
        let now = Instant::UNIX_EPOCH + TimeDelta::hours(1);
        let seen = |seconds_ago: i64| bson::DateTime::from_chrono(now - TimeDelta::seconds(seconds_ago));
        let workers = |documents: Vec<Document>| Presence(documents.into_iter().map(|document| Worker::of(document, now)).collect());
        let check = |workers: &Presence, class: &str, group: &str, expected: Option<&str>| {
            assert_eq!(workers.why_no_worker_takes(class, group).as_deref(), expected);
        };
        let living = doc! { "classes": ["a", "b"], "work_on": ["g", "h"], "last_seen_at": seen(1), "lease_ms": 20_000_i64 };
        let some = workers(vec![living, doc! { "classes": ["c"], "work_on": "*", "last_seen_at": seen(21), "lease_ms": 20_000 }]);
        check(&some, "a", "g", None);
        check(&some, "a", "x", Some("no running worker that has the class `a` works on the group `x`"));
        check(&some, "c", "g", Some("no running worker has the class `c`"));
        let dead = workers(vec![doc! { "classes": ["a"], "work_on": "*", "last_seen_at": seen(1), "retired": true }]);
        check(&dead, "a", "g", Some("no worker is running"));
        check(&Presence::default(), "a", "g", Some("no worker is running"));
        let quiet = doc! { "classes": ["a"], "work_on": "*", "last_seen_at": seen(1), "lease_ms": 20_000, "wanted": "quiet" };
        let reason = workers(vec![quiet.clone()]).why_no_worker_takes("a", "g").unwrap();
        assert!(reason.contains("is quiet or stops"), "{reason}");
        let other = Document::from_iter(quiet.clone().into_iter().filter(|(field, _)| field != "wanted"));
        check(&workers(vec![quiet, other]), "a", "g", None);
        check(&workers(vec![doc! {}]), "a", "g", Some("no running worker has the class `a`"));
    }

    #[test]
    fn an_assignment_is_untaken_while_it_has_its_date() {
        let (id, [job, other]) = (WorkerId::new(), [JobId::new(), JobId::new()]);
        let untaken = |more: Document| {
            let mut worker = doc! { "_id": id, "available": false, "assigned_to": { id.to_string(): [job, other] } };
            worker.extend(more);
            Worker::of(worker, Instant::UNIX_EPOCH).untaken()
        };
        let date = bson::DateTime::from_millis(10);
        assert_eq!(untaken(doc! { "assigned_since": date }), [job, other]);
        assert_eq!(untaken(doc! { "assigned_since": date, "working_on": [other] }), [job]);
        assert!(untaken(doc! { "working_on": [other] }).is_empty());
        assert!(untaken(doc! { "assigned_since": date, "available": true }).is_empty());
    }

    #[test]
    fn a_policy_is_unknown_when_no_worker_that_takes_the_job_knows_it() {
        let check = |workers: &[Document], expected: Option<&str>| {
            let of = |document: &Document| {
                let mut worker = doc! { "classes": ["x"], "work_on": "*" };
                worker.extend(document.clone());
                Worker::of(worker, Instant::UNIX_EPOCH)
            };
            let unknown = Presence(workers.iter().map(of).collect()).why_unknown("x", "g", &["Mine".to_owned(), "Ours".to_owned()].into());
            let unknown = unknown.as_deref().map(|reason| reason.split(" knows ").last().unwrap_or_default());
            assert_eq!(unknown, expected, "{workers:?}");
        };
        let [ours, all] = [doc! { "policies": ["Ours"] }, doc! { "policies": ["Mine", "Ours"] }];
        check(std::slice::from_ref(&ours), Some("the retry policy `Mine`"));
        check(&[ours.clone(), all.clone()], None);
        check(&[ours.clone(), doc! { "policies": ["Mine"] }], Some("all retry policies of the job"));
        for more in [doc! { "retired": true }, doc! { "wanted": "quiet" }, doc! { "classes": ["y"] }] {
            let other = all.clone().into_iter().chain(more).collect();
            check(&[ours.clone(), other], Some("the retry policy `Mine`"));
        }
        check(&[ours, doc! {}], None);
        check(&[], None);
    }
}
