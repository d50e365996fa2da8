//! One worker process, as its roster document describes it.
//!
//! Used by the worker (registers itself), the recruiter (assigns to it) and the cleaner (retires it). The recruiter
//! writes an assignment only while `available` is true, and thereby sets it to false. Only the worker sets it to true.
//!
//! `docs/protocol.md` has the fields that operators read. The others are:
//!
//! | field | meaning |
//! |---|---|
//! | `prefetch`, `prefetched` | how many jobs it accepts beyond the free slots; the jobs that it holds and has not locked |
//! | `class_slots` | how many more jobs it accepts of the classes that have a limit in its process: `[{class, free}]` |
//! | `assigned_since` | when the assignment was written, until it is taken |
//! | `grants` | job id in hex → `{gate, names, ahead, from, until}`: how the limited jobs of the assignment may start |
//! | `working`, `created_at` | whether it has jobs; when it was registered |
//! | `boot_id`, `pid_namespace`, `process_start_ticks`, `version` | its process, beside `hostname` and `pid`; its release |
//! | `sessions`, `transaction_sessions`, `mongodb_user` | its MongoDB sessions, which a cleaner ends, and its MongoDB user |

use crate::{
    base::{Instant, JobId, LeaseTerm, RoundId, WorkerId, integer, of_bson},
    job::Permit,
    mongo::{Channel, schema::WORKER_FIELDS},
};
use std::{collections::BTreeMap, fs, io, time::Duration};

use bson::{Bson, Document, RawDocument, doc, spec::BinarySubtype};
use serde::{Deserialize, Serialize};

/// The lease of a worker whose document does not contain one: the default of `--lease`.
const DEFAULT_LEASE: Duration = Duration::from_secs(20);

/// The field with the permits of an assignment, by job. Earlier releases have another field with permits of another meaning.
pub(crate) const GRANTS: &str = "grants";

/// The groups whose jobs a worker takes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(not(feature = "protocol"), non_exhaustive)]
pub enum WorkOn {
    /// Every group: `"*"`.
    All,
    /// These groups.
    Groups(Vec<String>),
}

impl WorkOn {
    /// Whether the worker takes jobs of this group.
    pub fn includes(&self, group: &str) -> bool {
        match self {
            Self::All => true,
            Self::Groups(groups) => groups.iter().any(|wanted| wanted == group),
        }
    }
}

impl From<&WorkOn> for Bson {
    /// The stored form: `"*"`, one group, or an array.
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
            None => bson::deserialize_from_bson(stored).map(Self::Groups).map_err(|error| format!("`work_on`: {}", of_bson(&error))),
        }
    }
}

/// The identity of a worker process and its machine. On the same machine it is sufficient to prove that the process is
/// gone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessIdentity {
    /// Process id, in its own pid namespace.
    pub pid: i32,
    /// Name of the machine, for display.
    pub hostname: String,
    /// Identifies this boot of the machine.
    pub boot_id: String,
    /// Identifies the pid namespace.
    pub pid_namespace: String,
    /// When the process started, in clock ticks since boot. Together with the pid it is never reused.
    pub process_start_ticks: i64,
}

impl ProcessIdentity {
    /// The identity of this process. On other systems than Linux it has no boot id, so a cleaner never treats the
    /// process as local.
    ///
    /// # Errors
    /// When `/proc` cannot be read.
    pub fn of_this_process() -> io::Result<Self> {
        let pid = i32::try_from(std::process::id()).unwrap_or(i32::MAX);
        if !cfg!(target_os = "linux") {
            let hostname = ["HOSTNAME", "COMPUTERNAME"].iter().find_map(|name| std::env::var(name).ok()).unwrap_or_default();
            return Ok(Self { pid, hostname, boot_id: String::new(), pid_namespace: String::new(), process_start_ticks: 0 });
        }
        let line = |path: &str| fs::read_to_string(path).map(|text| text.trim_end().to_owned());
        Ok(Self {
            pid,
            hostname: line("/proc/sys/kernel/hostname").unwrap_or_default(),
            boot_id: line("/proc/sys/kernel/random/boot_id")?,
            // Reads only this one link: after secrets are hidden, a process must not list the directory that contains
            // it.
            pid_namespace: fs::read_link("/proc/self/ns/pid")?.to_string_lossy().into_owned(),
            process_start_ticks: start_ticks(&line("/proc/self/stat")?).ok_or(io::ErrorKind::InvalidData)?,
        })
    }
}

/// The start time of a process from its `stat`: the 22nd field. The second field, the program's name in brackets, can
/// contain any character.
fn start_ticks(stat: &str) -> Option<i64> {
    let (_, behind_the_name) = stat.rsplit_once(')')?;
    behind_the_name.split_whitespace().nth(19)?.parse().ok()
}

/// How many more jobs of a class a worker accepts, if the class has a limit in its process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClassSlots {
    /// The class.
    pub class: String,
    /// Number of further jobs.
    pub free: u32,
}

/// The free slots of a worker, as its roster document offers them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Offered {
    /// Number of free slots.
    pub slots: u32,
    /// How many more jobs of the classes that have a limit.
    pub class_slots: Vec<ClassSlots>,
}

/// A worker that can receive jobs. One that only holds permits accepts none.
#[derive(Clone, Debug)]
pub struct AvailableWorker {
    /// Its id.
    pub id: WorkerId,
    /// The groups whose jobs it takes.
    pub work_on: WorkOn,
    /// The classes that it runs, without those of which it runs as many jobs as it may.
    pub classes: Vec<String>,
    /// How many more jobs it accepts of the classes that have a limit.
    pub class_slots: Vec<ClassSlots>,
    /// Number of free slots.
    pub free: u32,
    /// How many jobs it accepts ahead, beyond the free slots.
    pub prefetch: u32,
    /// Jobs that were assigned to it ahead and are not started yet.
    pub prefetched: Vec<JobId>,
    /// The names of the permits that it holds. `None` for a worker of an earlier release, which gets no limited jobs.
    pub held_permits: Option<Vec<String>>,
    /// The last round whose assignment it took.
    pub round: Option<RoundId>,
    /// The channel that it reads hints from.
    pub channel: Channel,
    /// Its last heartbeat. It is only compared with earlier values, never with a clock. `None` if the field is not a
    /// date.
    pub last_seen_at: Option<bson::DateTime>,
    /// How long it starts jobs after an acknowledged heartbeat. It sends at least three heartbeats in this time.
    pub lease: Duration,
}

/// The assignment in the worker's own document, read with a heartbeat or by a poll.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assignment {
    /// The round that wrote it.
    pub round: RoundId,
    /// The jobs assigned to this worker.
    pub jobs: Vec<JobId>,
    /// The permits of those that are limited.
    pub permits: Permits,
}

/// The permits of limited jobs.
pub type Permits = BTreeMap<JobId, Permit>;

/// A worker as the cleaner reads it, with the fields of its document that are valid.
#[derive(Clone, Debug)]
pub struct RegisteredWorker {
    /// Its id.
    pub id: WorkerId,
    /// Its last heartbeat. It is only compared with earlier values, never with a clock. `None` if the field is not a
    /// date.
    pub last_seen_at: Option<bson::DateTime>,
    /// How long it starts jobs after an acknowledged heartbeat. A cleaner waits longer.
    pub lease: Duration,
    /// Its process and machine, if the document contains all fields.
    pub process: Option<ProcessIdentity>,
    /// Ids of its commit sessions.
    pub sessions: Vec<Document>,
    /// Every job that it can have locked.
    pub jobs: Vec<JobId>,
    /// Whether a cleaner has begun to retire it.
    pub retired: bool,
    /// Its MongoDB user, in the form of [`Store::user`](crate::mongo::Store::user). Documents of earlier releases do
    /// not contain it.
    pub mongodb_user: Option<String>,
}

#[derive(Deserialize)]
struct RosterDocument {
    #[serde(rename = "_id")]
    id: WorkerId,
    available: Option<bool>,
    work_on: Option<Bson>,
    classes: Option<Vec<String>>,
    #[serde(default)]
    class_slots: Vec<ClassSlots>,
    free: Option<i64>,
    prefetch: Option<i64>,
    held_permits: Option<Vec<String>>,
    #[expect(dead_code, reason = "decoded so that a wrong type is detected")]
    term: Option<LeaseTerm>,
    round: Option<RoundId>,
    channel: Option<i64>,
}

impl TryFrom<Document> for AvailableWorker {
    type Error = String;

    fn try_from(document: Document) -> Result<Self, String> {
        let last_seen_at = document.get_datetime("last_seen_at").ok().copied();
        let lease = lease_in(&document).unwrap_or(DEFAULT_LEASE);
        let prefetched = ids_in(document.get("prefetched"));
        let stored: RosterDocument = bson::deserialize_from_document(document).map_err(|error| of_bson(&error))?;
        let (full, class_slots): (Vec<ClassSlots>, Vec<ClassSlots>) = stored.class_slots.into_iter().partition(|slots| slots.free == 0);
        let mut classes = stored.classes.ok_or("`classes` is missing")?;
        classes.retain(|class| full.iter().all(|slots| slots.class != *class));
        let offered = |count: Option<i64>| count.filter(|_| stored.available != Some(false)).unwrap_or(0);
        Ok(Self {
            id: stored.id,
            work_on: stored.work_on.ok_or("`work_on` is missing")?.try_into()?,
            classes,
            class_slots,
            free: u32::try_from(offered(stored.free)).map_err(|error| format!("`free`: {error}"))?,
            prefetch: u32::try_from(offered(stored.prefetch)).map_err(|error| format!("`prefetch`: {error}"))?,
            prefetched,
            held_permits: stored.held_permits,
            round: stored.round,
            channel: Channel(stored.channel.and_then(|channel| u32::try_from(channel).ok()).unwrap_or_default()),
            last_seen_at,
            lease,
        })
    }
}

/// The state in which an operator wants a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(feature = "protocol"), non_exhaustive)]
pub enum Wanted {
    /// It takes no more jobs. Its running jobs continue.
    Quiet,
    /// It drains as after TERM, and ends.
    Stop,
}

impl Wanted {
    /// The stored form.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Quiet => "quiet",
            Self::Stop => "stop",
        }
    }
}

/// What an operator wants of a worker, who it is and since when.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Request {
    /// The state that is wanted.
    pub wanted: Wanted,
    /// Who has made the request.
    pub by: String,
    /// When, by the server's clock.
    pub at: Option<Instant>,
}

impl Request {
    /// The request in a roster document. A value of a later release, or one that was misspelt by hand, is none.
    pub fn of(worker: &Document) -> Option<Self> {
        let wanted = match worker.get_str("wanted") {
            Ok("quiet") => Wanted::Quiet,
            Ok("stop") => Wanted::Stop,
            _ => return None,
        };
        let by = worker.get_str("wanted_by").unwrap_or_default().to_owned();
        Some(Self { wanted, by, at: worker.get_datetime("wanted_at").ok().map(|at| at.to_chrono()) })
    }
}

/// A worker that holds permits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PermitHolder {
    /// Its id.
    pub worker: WorkerId,
    /// The names of the permits, for example `printer#0`.
    pub permits: Vec<String>,
    /// The jobs that it may be running.
    pub jobs: Vec<JobId>,
}

impl PermitHolder {
    /// Reads a roster document. `None` if it names no worker, or no permits.
    pub(crate) fn read(document: &RawDocument) -> Option<Self> {
        let stored = legible(document);
        let permits = held_permits_in(&stored);
        let worker = WorkerId::from(stored.get_object_id("_id").ok()?);
        (!permits.is_empty()).then(|| Self { worker, permits, jobs: ids_in(stored.get("working_on")) })
    }
}

impl RegisteredWorker {
    /// Reads a roster document. Also returns the names of fields with a wrong type. Such fields are treated as missing,
    /// so that a worker with a damaged document is still observed and rescued.
    ///
    /// `None` if `_id` is not an ObjectId, or if the document has fewer than two fields of a worker: it does not belong to one.
    pub(crate) fn read(document: &RawDocument) -> Option<(Self, Vec<&'static str>)> {
        let stored = legible(document);
        let id = WorkerId::from(stored.get_object_id("_id").ok()?);
        WORKER_FIELDS.iter().filter(|field| stored.contains_key(**field)).nth(1)?;
        let mut unreadable = Vec::new();
        let last_seen_at = stored.get_datetime("last_seen_at").ok().copied();
        if last_seen_at.is_none() {
            unreadable.push("last_seen_at");
        }
        let lease = lease_in(&stored);
        if lease.is_none() {
            unreadable.push("lease_ms");
        }
        let of_workables = stored.get_array("transaction_sessions").into_iter().flatten();
        let sessions = match stored.get("sessions") {
            Some(Bson::Array(sessions)) => sessions.iter().chain(of_workables).filter_map(session_id).collect(),
            _ => {
                unreadable.push("sessions");
                Vec::new()
            }
        };
        let assigned = match stored.get("assigned_to") {
            Some(Bson::Document(map)) => map.get(id.to_string()),
            other => other,
        };
        let mut jobs = Vec::new();
        for (field, ids) in [("assigned_to", assigned), ("working_on", stored.get("working_on"))] {
            if !matches!(ids, None | Some(Bson::Null | Bson::ObjectId(_) | Bson::Array(_))) {
                unreadable.push(field);
            }
            jobs.extend(ids_in(ids));
        }
        jobs.sort_unstable();
        jobs.dedup();
        let process = bson::deserialize_from_document(stored.clone()).ok();
        let retired = stored.get_bool("retired").unwrap_or(false);
        let mongodb_user = stored.get_str("mongodb_user").ok().map(str::to_owned);
        let lease = lease.unwrap_or(DEFAULT_LEASE);
        Some((Self { id, last_seen_at, lease, process, sessions, jobs, retired, mongodb_user }, unreadable))
    }
}

fn lease_in(document: &Document) -> Option<Duration> {
    integer(document.get("lease_ms")).and_then(|lease| u64::try_from(lease).ok()).map(Duration::from_millis)
}

/// The document without invalid BSON. Invalid UTF-8 is replaced where possible.
pub(crate) fn legible(document: &RawDocument) -> Document {
    let field =
        |element: bson::raw::RawElement<'_>| Some((element.key().to_string(), Bson::try_from(element.value_utf8_lossy().ok()?).ok()?));
    document.iter_elements().filter_map(|element| field(element.ok()?)).collect()
}

/// The id of a session in the form that MongoDB requires. If one id had other fields, MongoDB would refuse the whole list.
fn session_id(stored: &Bson) -> Option<Document> {
    let id = stored.as_document()?.get("id")?;
    matches!(id, Bson::Binary(id) if id.subtype == BinarySubtype::Uuid).then(|| doc! { "id": id.clone() })
}

/// The term of a document.
pub(crate) fn term_in(document: &Document) -> Option<LeaseTerm> {
    term_of(document.get("term"))
}

/// The term of a field, unless it was written by hand and no term could follow it.
pub(crate) fn term_of(value: Option<&Bson>) -> Option<LeaseTerm> {
    integer(value).filter(|term| *term < LeaseTerm::END).map(LeaseTerm)
}

/// The assignment in a worker's own roster document, if the recruiter has written one.
pub(crate) fn assignment_in(worker: WorkerId, document: &Document) -> Option<Assignment> {
    if document.get_bool("available").unwrap_or(true) {
        return None;
    }
    let round = document.get_object_id("round").ok()?.into();
    document.get_document("assigned_to").ok()?;
    let jobs = assigned_in(worker, document);
    let permits = permits_in(document.get(GRANTS), &jobs);
    Some(Assignment { round, jobs, permits })
}

/// The jobs that are assigned to a worker.
pub(crate) fn assigned_in(worker: WorkerId, document: &Document) -> Vec<JobId> {
    ids_in(document.get_document("assigned_to").ok().and_then(|assigned| assigned.get(worker.to_string())))
}

/// The stored form of permits: job id in hex → `{gate, names, ahead, from, until}`. `None` if there are no permits.
pub(crate) fn permits_to_document<'a>(permits: impl Iterator<Item = (&'a JobId, &'a Permit)>) -> Option<Document> {
    let stored = |(job, permit): (&JobId, &Permit)| {
        let mut stored = doc! { "names": permit.names.clone() };
        stored.extend(permit.is_ahead.then(|| ("ahead".to_owned(), true.into())));
        stored.extend(permit.gate.as_ref().map(|gate| ("gate".to_owned(), gate.into())));
        if let Some((from, until)) = permit.between {
            stored.extend(doc! { "from": from, "until": until });
        }
        (job.to_string(), Bson::Document(stored))
    };
    let document: Document = permits.map(stored).collect();
    (!document.is_empty()).then_some(document)
}

/// The permits of these jobs in a stored map. A permit that cannot be decoded is left out, so its job is not started.
pub(crate) fn permits_in(stored: Option<&Bson>, jobs: &[JobId]) -> Permits {
    let Some(stored) = stored.and_then(Bson::as_document) else { return Permits::new() };
    let permit = |job: &JobId| {
        let permit = stored.get_document(job.to_string()).ok()?;
        let names: Option<Vec<String>> = permit.get_array("names").ok()?.iter().map(|name| name.as_str().map(str::to_owned)).collect();
        let date = |field| permit.get_datetime(field).ok().map(|at| at.to_chrono());
        let between =
            if permit.contains_key("from") || permit.contains_key("until") { Some((date("from")?, date("until")?)) } else { None };
        let gate = permit.get_str("gate").ok().map(str::to_owned);
        Some((*job, Permit { gate, names: names?, is_ahead: permit.get_bool("ahead").unwrap_or(false), between }))
    };
    jobs.iter().filter_map(permit).collect()
}

/// The names of the permits that a worker holds.
pub(crate) fn held_permits_in(document: &Document) -> Vec<String> {
    document.get_array("held_permits").into_iter().flatten().filter_map(Bson::as_str).map(str::to_owned).collect()
}

/// The number of slots that a worker's own roster document offers to the recruiter.
pub(crate) fn offered_in(document: &Document) -> Offered {
    let slots = integer(document.get("free")).filter(|_| document.get_bool("available").unwrap_or(false));
    let slots = slots.and_then(|free| u32::try_from(free).ok()).unwrap_or(0);
    // A value that cannot be decoded counts as no limit.
    let class_slots = document.get("class_slots").and_then(|slots| bson::deserialize_from_bson(slots.clone()).ok()).unwrap_or_default();
    Offered { slots, class_slots }
}

/// The number of free slots in a roster document for jobs of this class, for display.
pub fn free_slots_of(document: &Document, class: &str) -> i64 {
    let Offered { slots, class_slots } = offered_in(document);
    let of_class = class_slots.iter().find(|of| of.class == class).map_or(slots, |of| of.free.min(slots));
    of_class.into()
}

/// Job ids from a list or a single id. Other values are skipped.
pub(crate) fn ids_in(value: Option<&Bson>) -> Vec<JobId> {
    match value {
        Some(Bson::ObjectId(id)) => vec![(*id).into()],
        Some(Bson::Array(ids)) => ids.iter().filter_map(Bson::as_object_id).map(JobId::from).collect(),
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use bson::RawDocumentBuf;

    use super::*;

    fn read(document: &Document) -> Option<(RegisteredWorker, Vec<&'static str>)> {
        RegisteredWorker::read(&RawDocumentBuf::try_from(document).expect("a document"))
    }

    #[test]
    fn a_worker_is_read_as_far_as_its_document_can_be() {
        let (id, assigned, working) = (WorkerId::new(), JobId::new(), JobId::new());
        let session = doc! { "id": bson::Uuid::new() };
        let process = doc! { "pid": 7, "hostname": "h", "boot_id": "b", "pid_namespace": "n", "process_start_ticks": 9_i64 };
        let mut whole = doc! {
            "_id": id, "last_seen_at": bson::DateTime::from_millis(5), "lease_ms": 60_000_i64, "sessions": [session.clone()],
            "assigned_to": { id.to_string(): [assigned] }, "working_on": [working], "retired": true,
        };
        whole.extend(process);
        let (worker, unreadable) = read(&whole).expect("a worker");
        assert_eq!(unreadable, Vec::<&str>::new());
        assert_eq!((worker.id, worker.last_seen_at, worker.lease), (id, Some(bson::DateTime::from_millis(5)), Duration::from_secs(60)));
        assert_eq!((worker.sessions, worker.retired), (vec![session.clone()], true));
        assert!(worker.jobs.len() == 2 && worker.jobs.contains(&assigned) && worker.jobs.contains(&working));
        assert!(worker.process.is_some_and(|process| process.pid == 7));

        let mut strange = doc! {
            "_id": id, "last_seen_at": "now", "lease_ms": -5, "sessions": [session.clone(), 5, { "id": "x" }], "assigned_to": 5,
            "working_on": [working, "x"], "retired": "yes", "classes": 5, "pid": "seven",
        };
        let (worker, unreadable) = read(&strange).expect("still a worker");
        assert_eq!(unreadable, ["last_seen_at", "lease_ms", "assigned_to"]);
        assert_eq!((worker.last_seen_at, worker.lease, worker.sessions), (None, DEFAULT_LEASE, vec![session]));
        assert_eq!((worker.jobs, worker.retired, worker.process), (vec![working], false, None));
        assert!(read(&doc! { "_id": id, "work_on": "*", "lease_ms": 5 }).is_some());
        assert!(read(&doc! { "_id": id, "name": "Ada", "work_on": "mail" }).is_none(), "a document of an application");
        strange.insert("_id", "by hand");
        assert!(read(&strange).is_none(), "not a worker");
    }

    /// The recruiter does not search for jobs that no worker accepts.
    #[test]
    fn a_class_of_which_a_worker_accepts_no_more_jobs_is_not_among_its_classes() {
        let worker = |slots: Bson| {
            let document = doc! { "_id": WorkerId::new(), "work_on": "*", "classes": ["a", "b", "c"], "free": 5, "class_slots": slots };
            AvailableWorker::try_from(document)
        };
        let slots = bson::bson!([{ "class": "a", "free": 0_i64 }, { "class": "c", "free": 2 }]);
        let (read, document) = (worker(slots.clone()).expect("a worker"), doc! { "available": true, "free": 5, "class_slots": slots });
        assert_eq!((read.classes, read.class_slots), (vec!["b".into(), "c".into()], vec![ClassSlots { class: "c".into(), free: 2 }]));
        assert_eq!(["a", "b", "c"].map(|class| free_slots_of(&document, class)), [0, 5, 2]);
        assert!(worker(5.into()).is_err(), "it is not guessed");
    }

    #[test]
    fn text_that_is_not_utf8_hides_nothing_else() {
        let id = WorkerId::new();
        let document =
            RawDocumentBuf::try_from(&doc! { "_id": id, "hostname": "h\u{7f}st", "lease_ms": 5_000, "work_on": "*" }).expect("a document");
        let bytes: Vec<u8> = document.into_bytes().into_iter().map(|byte| if byte == 0x7f { 0xff } else { byte }).collect();
        let document = RawDocumentBuf::from_bytes(bytes).expect("a document");
        assert!(Document::try_from(&*document).is_err(), "it is not UTF-8");
        assert_eq!(RegisteredWorker::read(&document).expect("a worker").0.lease, Duration::from_secs(5));
        assert_eq!(legible(&document).get_str("hostname").ok(), Some("h\u{fffd}st"));
    }
}
