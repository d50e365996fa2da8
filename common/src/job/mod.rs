//! One job, as a value.
//!
//! Used by every crate. A job is in `scheduled` until it is finished, then complete in `archived` (`docs/protocol.md` lists
//! every field). These values are copies: only the operations of `cycle` and of the features change a job, each under its own guard.

pub mod bundle;
pub(crate) mod document;
pub(crate) mod edge;
pub(crate) mod effects;
pub(crate) mod ending;
mod execution;
mod finish_reason;
pub(crate) mod gate;
mod keep;
pub(crate) mod lane;
pub mod notes;
mod priority;
pub(crate) mod raw;
pub(crate) mod rescheduling;
pub(crate) mod settings;
mod state;
pub(crate) mod stored_policy;

use bson::{Bson, RawDocumentBuf};

use self::bundle::Bundle;
pub(crate) use self::{
    bundle::MOST_ITEMS,
    document::{Held, LARGEST_COUNT},
    edge::{Edge, End, InvalidEdge, NOT_NEEDED, When, edges_of},
    ending::{Archival, Recorded, has_lost_content},
    gate::{LONGEST_GATE, Permit, group_of_resource, line_of_gate, resource_and_number, resource_of_group, resources_in},
    lane::{Lane, ScheduledJob},
};
pub use self::{
    document::{CorruptJob, StoredJob},
    execution::{Claim, Execution, IfWorkerDies, KEPT_EXECUTIONS},
    finish_reason::FinishReason,
    keep::Keep,
    notes::JobProgress,
    priority::Priority,
    settings::Settings,
    state::{JobState, Stage},
    stored_policy::StoredPolicy,
};
use crate::base::{GraphId, Instant, JobId};

/// Group of a job without a group.
pub const DEFAULT_GROUP: &str = "generic";

/// One job, as a value.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Job {
    /// `_id`.
    pub id: JobId,
    /// When it was enqueued, by the enqueuer's date; the date of its id if there is none.
    pub created_at: Instant,
    /// Number of starts; it never decreases.
    pub attempts: u32,
    /// Number of starts that do not count against the retry policy.
    pub interruptions: u32,
    /// Number of starts that ended with the death of their worker. They count against the retry policy, like failures.
    pub deaths: u32,
    /// Class of the workable.
    pub class: String,
    /// Parameters of the workable: usually a document.
    pub parameters: Bson,
    /// The recorded outcomes of its items, if it is a bundle.
    pub bundle: Option<Bundle>,
    /// How it is treated.
    pub settings: Settings,
    /// The resources that it needs, or its line, as stored: see [`limits`](crate::limits).
    pub gate: Option<String>,
    /// Its unique key, if that is taken until the job is finished.
    pub unique: Option<String>,
    /// How often an enqueueing call has replaced its content; `None` for a job without a unique key, whose content never changes.
    pub replaced: Option<u32>,
    /// It is not started at this instant or later.
    pub expires_at: Option<Instant>,
    /// The graph that it is part of.
    pub graph: Option<GraphId>,
    /// Whether other jobs are known to wait for it.
    pub is_followed: bool,
    /// Whether it waits for other jobs.
    pub is_waiting: bool,
    /// Whether its enqueuer never sends it again: its id was made for one call.
    pub is_sent_once: bool,
    /// Whether its cancellation was requested while it was running.
    pub cancel_requested: bool,
    /// The current or the last execution.
    pub last_execution: Option<Execution>,
    /// The ended executions. They include the last one once it has ended, except for a job that was done at its first attempt.
    pub executions: Vec<Execution>,
    /// Number of executions dropped from the bounded history.
    pub executions_dropped: u32,
    /// Its state.
    pub state: JobState,
    /// The stored document, including fields that this version does not know.
    pub document: RawDocumentBuf,
}

impl Job {
    /// When it is due, while it waits.
    pub fn due(&self) -> Option<Instant> {
        match self.state {
            JobState::Waiting { at } => Some(at),
            JobState::Locked { .. } | JobState::Archived { .. } => None,
        }
    }

    /// Whether it can no longer be started at `now`.
    pub fn is_expired(&self, now: Instant) -> bool {
        self.expires_at.is_some_and(|expires_at| expires_at <= now)
    }

    /// The unique key of the job after whose end it runs once more, while it waits for that.
    pub fn predecessor_key(&self) -> Option<String> {
        self.field("unique_after").and_then(|key| key.as_str().map(str::to_owned))
    }

    /// A stored field; `None` if it is missing or not valid BSON.
    pub fn field(&self, name: &str) -> Option<Bson> {
        self.document.get(name).ok().flatten()?.try_into().ok()
    }

    /// Parameters of the items of a bundle; empty for any other job.
    pub fn items(&self) -> Vec<Bson> {
        let items = self.document.get_document("workable").and_then(|workable| workable.get_array("items"));
        items.ok().and_then(|items| items.try_into().ok()).unwrap_or_default()
    }

    /// The items of a bundle that a repetition of the job has: those that are not done, or all items if all are done.
    pub(crate) fn items_to_repeat(&self) -> Vec<Bson> {
        let Some(bundle) = &self.bundle else { return Vec::new() };
        let all_done = bundle.outcomes.iter().all(bundle::is_done);
        let items = self.items().into_iter().zip(&bundle.outcomes);
        items.filter(|(_, outcome)| all_done || !bundle::is_done(outcome)).map(|(item, _)| item).collect()
    }

    /// The jobs that it waits for, or has waited for, in the order of its edges.
    pub fn parents(&self) -> Vec<JobId> {
        let edges = edges_of(self.field("waits_for").as_ref()).unwrap_or_default();
        edges.into_iter().map(|edge| edge.job).collect()
    }

    /// Every stored execution, oldest first, each once: the last one is stored in two places once it has ended.
    pub fn every_execution(&self) -> impl Iterator<Item = &Execution> {
        let last = self.last_execution.as_ref().filter(|last| self.executions.last() != Some(last));
        self.executions.iter().chain(last)
    }
}
