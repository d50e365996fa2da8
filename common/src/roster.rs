//! One worker process, as its roster document says.
//!
//! Used by the worker (announces itself), the recruiter (assigns to it) and the cleaner (retires it). The document
//! is written by turns: by the worker while `available` is false, by the recruiter's assignment while it is true.

use bson::{Bson, Document};
use serde::{Deserialize, Serialize};

use crate::{
    ids::{JobId, LeaseTerm, RoundId, WorkerId},
    instant::{self, Instant},
    store::Channel,
};

/// Which groups a worker takes jobs of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorkOn {
    /// Every group: `"*"`.
    All,
    /// These groups.
    Groups(Vec<String>),
}

impl WorkOn {
    /// Whether jobs of this group are wanted.
    pub fn includes(&self, group: &str) -> bool {
        match self {
            Self::All => true,
            Self::Groups(groups) => groups.iter().any(|wanted| wanted == group),
        }
    }
}

impl From<&WorkOn> for Bson {
    /// As in the documents: `"*"`, one group, or an array.
    fn from(work_on: &WorkOn) -> Self {
        match work_on {
            WorkOn::All => "*".into(),
            WorkOn::Groups(groups) => match groups.as_slice() {
                [group] => group.into(),
                groups => groups.to_vec().into(),
            },
        }
    }
}

impl TryFrom<Bson> for WorkOn {
    type Error = String;

    fn try_from(stored: Bson) -> Result<Self, String> {
        match stored.as_str() {
            Some("*") => Ok(Self::All),
            Some(group) => Ok(Self::Groups(vec![group.to_owned()])),
            None => bson::deserialize_from_bson(stored).map(Self::Groups).map_err(|error| format!("`work_on`: {error}")),
        }
    }
}

/// Where a worker process runs: enough to prove, on the same machine, that it is gone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// Process id, in its own pid namespace.
    pub pid: i32,
    /// Name of the machine, for people.
    pub hostname: String,
    /// Identity of this boot of the machine.
    pub boot_id: String,
    /// Identity of the pid namespace.
    pub pid_namespace: String,
    /// When the process started, in clock ticks since boot: with the pid, an identity that is never reused.
    pub process_start_ticks: i64,
}

impl Place {
    /// Where this process runs.
    ///
    /// # Errors
    /// When `/proc` cannot be read.
    pub fn of_this_process() -> procfs::ProcResult<Self> {
        let this = procfs::process::Process::myself()?;
        Ok(Self {
            pid: this.pid,
            hostname: nix::unistd::gethostname().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default(),
            boot_id: procfs::sys::kernel::random::boot_id()?,
            pid_namespace: pid_namespace()?,
            process_start_ticks: i64::try_from(this.stat()?.starttime).unwrap_or(i64::MAX),
        })
    }
}

/// Identity of this process's pid namespace, as `pid:[4026531836]`. Only this one link is read: once [`secrets`](crate::secrets) are
/// hidden, a process may not list the directory that it is in.
fn pid_namespace() -> std::io::Result<String> {
    Ok(std::fs::read_link("/proc/self/ns/pid")?.to_string_lossy().into_owned())
}

/// A worker that can be given jobs.
#[derive(Clone, Debug)]
pub struct AvailableWorker {
    /// Which.
    pub id: WorkerId,
    /// Groups it works on.
    pub work_on: WorkOn,
    /// Classes it has.
    pub classes: Vec<String>,
    /// Places free now; grows while it is available, falls only by an assignment.
    pub free: u32,
    /// The round it took last.
    pub round: Option<RoundId>,
    /// Where it listens.
    pub channel: Channel,
}

/// What a heartbeat or a look at the own document brings back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assignment {
    /// The round that wrote it.
    pub round: RoundId,
    /// The jobs assigned to this worker.
    pub jobs: Vec<JobId>,
}

/// A worker as the cleaner sees it.
#[derive(Clone, Debug)]
pub struct RegisteredWorker {
    /// Which.
    pub id: WorkerId,
    /// Its last heartbeat, compared for change only, never with a clock.
    pub last_seen_at: Option<Instant>,
    /// How long it trusts itself after a heartbeat, milliseconds: a cleaner waits longer.
    pub lease_ms: i64,
    /// Where it runs, when the document says so completely.
    pub place: Option<Place>,
    /// Ids of its commit sessions.
    pub sessions: Vec<Document>,
    /// Every job it can have locked.
    pub jobs: Vec<JobId>,
    /// Whether a cleaner has begun to retire it.
    pub retired: bool,
}

#[derive(Deserialize)]
struct RosterDocument {
    #[serde(rename = "_id")]
    id: WorkerId,
    work_on: Option<Bson>,
    classes: Option<Vec<String>>,
    free: Option<i64>,
    #[expect(dead_code, reason = "read so that a document of another shape is noticed")]
    term: Option<LeaseTerm>,
    round: Option<RoundId>,
    channel: Option<i64>,
    #[serde(deserialize_with = "instant::stored", default)]
    last_seen_at: Option<Instant>,
    lease_ms: Option<i64>,
    sessions: Option<Vec<Document>>,
    assigned_to: Option<Document>,
    working_on: Option<Bson>,
    retired: Option<bool>,
}

impl TryFrom<Document> for AvailableWorker {
    type Error = String;

    fn try_from(document: Document) -> Result<Self, String> {
        let stored: RosterDocument = bson::deserialize_from_document(document).map_err(|error| error.to_string())?;
        Ok(Self {
            id: stored.id,
            work_on: stored.work_on.ok_or("`work_on` is missing")?.try_into()?,
            classes: stored.classes.ok_or("`classes` is missing")?,
            free: u32::try_from(stored.free.unwrap_or(0)).map_err(|error| format!("`free`: {error}"))?,
            round: stored.round,
            channel: Channel(stored.channel.and_then(|channel| u32::try_from(channel).ok()).unwrap_or_default()),
        })
    }
}

impl TryFrom<Document> for RegisteredWorker {
    type Error = String;

    fn try_from(document: Document) -> Result<Self, String> {
        let place = bson::deserialize_from_document(document.clone()).ok();
        let stored: RosterDocument = bson::deserialize_from_document(document).map_err(|error| error.to_string())?;
        let mut jobs = stored.assigned_to.map(|map| ids_in(map.get(stored.id.to_string()))).unwrap_or_default();
        jobs.extend(ids_in(stored.working_on.as_ref()));
        jobs.sort_unstable();
        jobs.dedup();
        Ok(Self {
            id: stored.id,
            last_seen_at: stored.last_seen_at,
            lease_ms: stored.lease_ms.unwrap_or(0),
            place,
            sessions: stored.sessions.unwrap_or_default(),
            jobs,
            retired: stored.retired.unwrap_or(false),
        })
    }
}

/// The assignment in a worker's own roster document, if the recruiter has had its turn.
pub(crate) fn assignment_in(worker: WorkerId, document: &Document) -> Option<Assignment> {
    if document.get_bool("available").unwrap_or(true) {
        return None;
    }
    let round = document.get_object_id("round").ok()?.into();
    let jobs = ids_in(document.get_document("assigned_to").ok()?.get(worker.to_string()));
    Some(Assignment { round, jobs })
}

/// The places that a worker's own roster document offers to the recruiter.
pub(crate) fn offered_in(document: &Document) -> u32 {
    let free = document.get("free").and_then(|free| free.as_i64().or(free.as_i32().map(i64::from)));
    let offered = free.filter(|_| document.get_bool("available").unwrap_or(false));
    offered.and_then(|free| u32::try_from(free).ok()).unwrap_or(0)
}

/// Job ids in a list, or a single one; anything else in it is left out.
pub(crate) fn ids_in(value: Option<&Bson>) -> Vec<JobId> {
    match value {
        Some(Bson::ObjectId(id)) => vec![(*id).into()],
        Some(Bson::Array(ids)) => ids.iter().filter_map(Bson::as_object_id).map(JobId::from).collect(),
        _ => Vec::new(),
    }
}
