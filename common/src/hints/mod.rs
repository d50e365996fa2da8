//! The kinds of hints, and their stored form.
//!
//! A hint reports a recent event. It is never the source of truth: after a lost hint the event is found by polling, and
//! a wrong or old hint is harmless, because the writes that follow it have their own guards.

pub(crate) mod listener;
pub(crate) mod relay;
pub(crate) mod ring;

pub use self::{
    listener::{Hints, Listener},
    relay::{
        address::{HintsAddress, InvalidHintsAddress},
        hub::{HintsAt, Hub},
    },
};
use std::{borrow::Cow, time::Duration};

use bson::{Bson, Document, Timestamp, doc};

use crate::{
    base::{Instant, JobId, RoundId, WorkerId},
    job::ScheduledJob,
    mongo::cut,
    roster::{GRANTS, Permits, ids_in, permits_in, permits_to_document},
};

/// Maximum size of the group names in one hint, in bytes.
const GROUPS_BYTES: usize = 256 * 1024;
/// In a hint this name means every group. It is used if the names of the groups do not fit. In a worker's `work_on` it has the same
/// meaning.
pub const EVERY_GROUP: &str = "*";
/// Maximum number of jobs that one hint assigns, about one megabyte.
const ASSIGNED: usize = 50_000;

/// Maximum number of jobs that one hint names that wait for others.
const NAMED_WAITING: usize = 1_000;

/// Jobs that the recruiter assigns to one worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AssignedJobs {
    /// The worker.
    pub worker: WorkerId,
    /// Its new jobs.
    pub jobs: Vec<JobId>,
    /// The permits of those that are limited.
    pub permits: Permits,
}

impl AssignedJobs {
    /// An assignment of jobs that are not limited.
    pub fn new(worker: WorkerId, jobs: Vec<JobId>) -> Self {
        Self { worker, jobs, permits: Permits::new() }
    }
}

/// A hint about an event.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "each variant says what its fields are")]
pub enum Hint {
    /// Not an event. Each time a reader opens its cursor, it gets this hint first. Hints may have been missed, so the reader must read the
    /// database.
    Seed,
    /// Jobs of these groups are due.
    Jobs {
        groups: Vec<String>,
        /// When the earliest job is due; `None` if one is due now.
        at: Option<Instant>,
        /// All the jobs, if they are few. They can then be assigned without a search. The hint may arrive before the jobs are visible.
        jobs: Vec<ScheduledJob>,
    },
    /// A worker accepts jobs again.
    Free,
    /// A worker did not start all jobs of an assignment.
    NotStarted,
    /// A worker has returned jobs that were assigned ahead.
    Returned { worker: WorkerId, jobs: Vec<JobId> },
    /// A worker takes no more jobs, or has left the roster. Jobs that were assigned to it and not started can be assigned to others. It may
    /// still run jobs.
    Left { worker: WorkerId },
    /// A round has assigned jobs.
    Assigned { round: RoundId, assignments: Vec<AssignedJobs> },
    /// Jobs have ended for which others wait.
    Ended { jobs: Vec<JobId> },
    /// Jobs that wait for others were enqueued. Perhaps other jobs of their graph are among them. No job is named if there are many.
    Waiting { jobs: Vec<JobId> },
    /// An operator has changed a limit, a group or a pause.
    Settings,
    /// Jobs that are assigned ahead should be returned, because a pause covers them.
    Recall,
    /// An operator has changed what is wanted of workers. Each worker reads its own document.
    Control,
    /// A running job should be cancelled.
    Cancel { job: JobId },
    /// Keep-alive: the recruiter leads, and has sent every hint that was due before this one. The next one follows within this time.
    KeepAlive { again_in: Duration },
}

impl Hint {
    /// Jobs of these groups are due.
    pub fn jobs_in(groups: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self::Jobs { groups: groups.into_iter().map(Into::into).collect(), at: None, jobs: Vec::new() }
    }

    /// Jobs that wait for others were enqueued, among these jobs.
    pub fn waiting(jobs: Vec<JobId>) -> Self {
        Self::Waiting { jobs: if jobs.len() > NAMED_WAITING { Vec::new() } else { jobs } }
    }

    /// Splits a hint into parts that are small compared with the collection.
    pub(crate) fn parts(&self) -> Vec<Cow<'_, Self>> {
        if let Self::Jobs { groups, at, .. } = self
            && groups.iter().map(String::len).sum::<usize>() > GROUPS_BYTES
        {
            // The names of the groups are not necessary: the recruiter then scans all groups.
            return vec![Cow::Owned(Self::Jobs { groups: vec![EVERY_GROUP.into()], at: *at, jobs: Vec::new() })];
        }
        if let Self::Assigned { round, assignments } = self
            && assignments.iter().map(|given| given.jobs.len()).sum::<usize>() > ASSIGNED
        {
            // Each worker's assignment is in one part only, because a worker treats the first part with its id as
            // its whole assignment.
            let parts = cut(assignments.clone(), usize::MAX, ASSIGNED, |given| given.jobs.len());
            return parts.into_iter().map(|assignments| Cow::Owned(Self::Assigned { round: *round, assignments })).collect();
        }
        vec![Cow::Borrowed(self)]
    }

    pub(crate) fn to_document(&self) -> Document {
        // The server fills in an empty timestamp, in the order of insertion.
        let mut document = doc! { "at": Timestamp { time: 0, increment: 0 } };
        document.extend(match self {
            Self::Seed => doc! { "kind": "seed" },
            Self::Jobs { groups, at, jobs } => {
                let jobs: Vec<Document> = jobs.iter().map(scheduled_job_to_document).collect();
                doc! { "kind": "jobs", "groups": groups.clone(), "due": at, "jobs": jobs }
            }
            Self::NotStarted => doc! { "kind": "not_started" },
            Self::Free => doc! { "kind": "free" },
            Self::Returned { worker, jobs } => doc! { "kind": "returned", "worker": worker, "jobs": jobs.clone() },
            Self::Left { worker } => doc! { "kind": "left", "worker": worker },
            Self::Assigned { round, assignments } => {
                let pairs: Document = assignments.iter().map(|given| (given.worker.to_string(), Bson::from(given.jobs.clone()))).collect();
                let mut assigned = doc! { "kind": "assigned", "round": round, "pairs": pairs };
                let permits = permits_to_document(assignments.iter().flat_map(|given| &given.permits));
                assigned.extend(permits.map(|permits| (GRANTS.to_owned(), permits.into())));
                assigned
            }
            Self::Ended { jobs } => doc! { "kind": "ended", "jobs": jobs.clone() },
            Self::Waiting { jobs } => doc! { "kind": "waiting", "jobs": jobs.clone() },
            Self::Settings => doc! { "kind": "settings" },
            Self::Recall => doc! { "kind": "recall" },
            Self::Control => doc! { "kind": "control" },
            Self::Cancel { job } => doc! { "kind": "cancel", "job": job },
            Self::KeepAlive { again_in } => {
                doc! { "kind": "keep-alive", "again_in_ms": i64::try_from(again_in.as_millis()).unwrap_or(i64::MAX) }
            }
        });
        document
    }

    pub(crate) fn from_document(document: &Document) -> Option<Self> {
        Some(match document.get_str("kind").ok()? {
            "jobs" => Self::Jobs {
                groups: document.get_array("groups").ok()?.iter().filter_map(Bson::as_str).map(str::to_owned).collect(),
                at: document.get_datetime("due").ok().map(|at| at.to_chrono()),
                jobs: document
                    .get_array("jobs")
                    .into_iter()
                    .flatten()
                    .filter_map(|job| ScheduledJob::of_document(job.as_document()?))
                    .collect(),
            },
            "not_started" => Self::NotStarted,
            "free" => Self::Free,
            "returned" => Self::Returned { worker: document.get_object_id("worker").ok()?.into(), jobs: ids_in(document.get("jobs")) },
            "left" => Self::Left { worker: document.get_object_id("worker").ok()?.into() },
            "assigned" => {
                let pairs = document.get_document("pairs").ok()?;
                let given = |(worker, jobs): (&String, &Bson)| {
                    let jobs = ids_in(Some(jobs));
                    let permits = permits_in(document.get(GRANTS), &jobs);
                    Some(AssignedJobs { worker: worker.parse().ok()?, jobs, permits })
                };
                Self::Assigned {
                    round: document.get_object_id("round").ok()?.into(),
                    assignments: pairs.iter().filter_map(given).collect(),
                }
            }
            "ended" => Self::Ended { jobs: ids_in(document.get("jobs")) },
            "waiting" => Self::Waiting { jobs: ids_in(document.get("jobs")) },
            "settings" => Self::Settings,
            "recall" => Self::Recall,
            "control" => Self::Control,
            "cancel" => Self::Cancel { job: document.get_object_id("job").ok()?.into() },
            "keep-alive" => Self::KeepAlive { again_in: Duration::from_millis(u64::try_from(document.get_i64("again_in_ms").ok()?).ok()?) },
            _ => return None,
        })
    }
}

fn scheduled_job_to_document(job: &ScheduledJob) -> Document {
    let mut document = doc! {
        "_id": job.id,
        "group": &job.group,
        "workable": { "class": &job.class },
        "priority": job.priority,
        "scheduled_at": job.scheduled_at,
    };
    document.extend(job.gate.as_ref().map(|gate| ("gate".to_owned(), gate.into())));
    document
}
