//! One job, as code uses it.
//!
//! Used by every crate. A job lives in `scheduled` until it is finished and then, whole, in `archived`
//! (`docs/protocol.md` lists every field). Code never changes a job by changing these values: the operations of
//! [`store`](crate::store) do, each under its own guard.

pub mod bundle;
mod document;
pub(crate) mod ending;
mod execution;
mod priority;
pub(crate) mod raw;
mod state;
mod why;

use bson::{Bson, RawDocumentBuf, doc};
use serde::{Deserialize, Serialize};

use self::bundle::Bundle;
pub use self::{
    document::{CorruptJob, Held},
    ending::KEPT_EXECUTIONS,
    execution::{Claim, Execution, IfWorkerDies},
    priority::Priority,
    state::JobState,
    why::Why,
};
use crate::{ids::JobId, instant::Instant};

/// Group of a job that names none.
pub const DEFAULT_GROUP: &str = "generic";
/// Retry policy of a job that names none.
pub(crate) const DEFAULT_POLICY: &str = "DoNotDoItAgain";

/// A retry policy as stored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StoredPolicy {
    /// Name of the policy.
    pub class: String,
    /// What it was made with.
    #[serde(default)]
    pub parameters: Bson,
}

impl From<StoredPolicy> for Bson {
    fn from(policy: StoredPolicy) -> Self {
        Bson::Document(doc! { "class": policy.class, "parameters": policy.parameters })
    }
}

/// One job, as code uses it.
#[derive(Clone, Debug)]
pub struct Job {
    /// `_id`.
    pub id: JobId,
    /// When it was enqueued, by the enqueuer; the date of its id when it does not say.
    pub created_at: Instant,
    /// Starts so far; never goes down.
    pub attempts: u32,
    /// Starts that do not count against the retry policy.
    pub interruptions: u32,
    /// Starts that ended with the death of their worker. They count against the retry policy, like failures.
    pub deaths: u32,
    /// The group it is in.
    pub group: String,
    /// How urgent it is.
    pub priority: Priority,
    /// Class of the workable.
    pub class: String,
    /// Parameters of the workable: usually a document.
    pub parameters: Bson,
    /// What is known of its items, if it is a bundle.
    pub bundle: Option<Bundle>,
    /// How failures are treated.
    pub retry_policy: StoredPolicy,
    /// Labels for people.
    pub tags: Vec<String>,
    /// A name in the application's own terms; not unique.
    pub urn: Option<String>,
    /// Whether its cancellation was requested while it runs.
    pub cancel_requested: bool,
    /// The execution that runs or ran last.
    pub last_execution: Option<Execution>,
    /// The executions that ended before it; with it once it has ended, but for a job that was done at its first attempt.
    pub executions: Vec<Execution>,
    /// How many executions fell out of the bounded history.
    pub executions_dropped: u32,
    /// Where it stands.
    pub state: JobState,
    /// As stored, fields unknown to this version included.
    pub document: RawDocumentBuf,
}

impl Job {
    /// When it is due, while it waits.
    pub fn due(&self) -> Option<Instant> {
        match self.state {
            JobState::Scheduled { at } => Some(at),
            JobState::Started { .. } | JobState::Archived { .. } => None,
        }
    }

    /// A field as it is stored; nothing when there is none, or none that BSON allows.
    pub fn field(&self, name: &str) -> Option<Bson> {
        self.document.get(name).ok().flatten()?.try_into().ok()
    }

    /// Parameters of the items of a bundle; none of another job.
    pub fn items(&self) -> Vec<Bson> {
        let items = self.document.get_document("workable").and_then(|workable| workable.get_array("items"));
        items.ok().and_then(|items| items.try_into().ok()).unwrap_or_default()
    }

    /// Every execution that is kept, oldest first, each once: the last one is in two places once it has ended.
    pub fn every_execution(&self) -> impl Iterator<Item = &Execution> {
        let last = self.last_execution.as_ref().filter(|last| self.executions.last() != Some(last));
        self.executions.iter().chain(last)
    }
}
