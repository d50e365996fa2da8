//! The oracle of the failure tests: the jobs that were enqueued, the executions in the ledger, and the documents must
//! agree, execution by execution. An acknowledged job must exist. A job that was not acknowledged may exist, and is
//! then checked as well.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use bson::{Document, doc};
use futures_util::TryStreamExt;
use mongodb::{
    Client, Collection,
    error::Error,
    options::{Acknowledgment, WriteConcern},
};
use recruiter_common::{EnqueueError, JobId, NewJob, Workable, failure, ids::StartId, limits::Settings, shutdown::pause, store::Store};
use tokio::task::JoinHandle;

use crate::{
    constraints::Finished,
    effects::{self, EFFECTS, Settle},
    ledger::{BlockingPoison, Entry, Event, Line, Longer, Poison},
    mongo::TestDatabase,
    wait::{SOON, wait_until},
};

/// The error class of a job whose client has not ended it within its lease.
const CLIENT_VANISHED: &str = "client-vanished";

/// The policy of a job, as far as the oracle needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// No retries.
    Never,
    /// No retries. The application, or the leader for a schedule, sends the job again when it is done, so it may be in both collections.
    SentAgain,
    /// This many retries.
    Again(u32),
    /// It is not a valid job, or it may end in any way.
    Any,
}

/// The jobs that the application has sent, each recorded before it was sent.
#[derive(Clone, Debug, Default)]
pub struct Asked(Arc<Mutex<HashMap<JobId, Sent>>>);

/// A job that was sent.
#[derive(Clone, Copy, Debug)]
struct Sent {
    /// The policy by which it is checked, whether or not its enqueue was acknowledged.
    policy: Policy,
    /// When it was sent, as a count of such events.
    sent: u64,
    /// When it was acknowledged.
    acknowledged: Option<u64>,
}

/// The number of the next event of all applications.
fn next_event() -> u64 {
    static EVENTS: AtomicU64 = AtomicU64::new(0);
    EVENTS.fetch_add(1, Ordering::SeqCst)
}

impl Asked {
    /// Records that a job is about to be sent, for the first time or again. From now on it is checked by this policy.
    pub fn will_send(&self, job: JobId, policy: Policy) {
        let mut sent = self.sent();
        let acknowledged = sent.get(&job).and_then(|sent| sent.acknowledged);
        sent.insert(job, Sent { policy, sent: next_event(), acknowledged });
    }

    /// Records that the job was acknowledged.
    pub fn was_acknowledged(&self, job: JobId) {
        self.sent().get_mut(&job).expect("it was noted before it was sent").acknowledged = Some(next_event());
    }

    /// Whether the first of these jobs was acknowledged before the second one was sent.
    pub fn in_order(&self, earlier: JobId, later: JobId) -> bool {
        let sent = self.sent();
        let acknowledged = sent.get(&earlier).and_then(|earlier| earlier.acknowledged);
        let later = sent.get(&later).filter(|later| later.acknowledged.is_some());
        acknowledged.zip(later).is_some_and(|(acknowledged, later)| acknowledged < later.sent)
    }

    /// Enqueues a job. Records it before it is sent, and again when it is acknowledged.
    ///
    /// # Errors
    /// As [`NewJob::enqueue`]. The job may exist or not.
    pub async fn enqueue(&self, store: &Store, job: NewJob, policy: Policy) -> Result<JobId, EnqueueError> {
        let id = JobId::new();
        self.will_send(id, policy);
        job.with_id(id).enqueue(store).await?;
        self.was_acknowledged(id);
        Ok(id)
    }

    /// The acknowledged jobs.
    pub fn acknowledged(&self) -> Vec<JobId> {
        self.sent().iter().filter(|(_, sent)| sent.acknowledged.is_some()).map(|(id, _)| *id).collect()
    }

    fn sent(&self) -> MutexGuard<'_, HashMap<JobId, Sent>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The violations found, as text. Empty if every invariant holds.
#[derive(Clone, Debug, Default)]
pub struct Findings {
    /// Acknowledged jobs that are in neither collection (I1).
    pub lost: Vec<String>,
    /// Executions that are in no history, and history entries without an execution (I3 to I6).
    pub unexplained: Vec<String>,
    /// Violations of all other invariants.
    pub broken: Vec<String>,
    /// Number of executions in the ledger.
    pub executions: usize,
    /// Number of executions that ended with the death of their worker.
    pub deaths: usize,
}

impl Findings {
    /// All violations.
    pub fn all(&self) -> Vec<String> {
        [&self.lost[..], &self.unexplained, &self.broken].concat()
    }

    /// The same violations, each with the place where it was found.
    #[must_use]
    pub fn of(mut self, run: &str) -> Self {
        [&mut self.lost, &mut self.unexplained, &mut self.broken]
            .into_iter()
            .flatten()
            .for_each(|finding| finding.insert_str(0, &format!("{run}: ")));
        self
    }

    /// Adds the violations of another run.
    pub fn add(&mut self, other: Self) {
        self.lost.extend(other.lost);
        self.unexplained.extend(other.unexplained);
        self.broken.extend(other.broken);
        self.executions += other.executions;
        self.deaths += other.deaths;
    }
}

/// The jobs of the archive.
pub(crate) async fn archived(database: &TestDatabase) -> HashMap<JobId, Document> {
    database.all("archived", doc! {}).await.into_iter().map(|job| (id_of(&job), job)).collect()
}

/// Checks an idle system: no job is enqueued or runs any more. `clock` is the server's clock minus the monotonic one, in milliseconds.
pub async fn examine(database: &TestDatabase, lines: &[Line], asked: &Asked, settings: &Settings, clock: i64) -> Findings {
    let mut findings = Findings::default();
    let scheduled = database.all("scheduled", doc! {}).await;
    let archived = archived(database).await;
    for job in &scheduled {
        if job.get_bool("locked").unwrap_or(true) {
            findings.broken.push(format!("I8: still locked: {job}"));
        }
        if archived.contains_key(&id_of(job)) {
            findings.broken.push(format!("I2: in both collections: {job}"));
        }
    }
    for worker in database.all("roster", doc! {}).await {
        findings.broken.push(format!("I8: still in the roster: {worker}"));
    }
    let waiting: HashSet<JobId> = scheduled.iter().map(id_of).collect();
    let mut entered: HashMap<JobId, Vec<&Line>> = HashMap::new();
    for line in lines {
        entered.entry(line.execution().0).or_default().push(line);
    }
    findings.executions = lines.iter().filter(|line| line.event == Event::Begin).count();
    // A leader that resumes may send the job of a slot again.
    archived.iter().filter(|(_, job)| job.contains_key("schedule")).for_each(|(id, _)| asked.will_send(*id, Policy::SentAgain));
    // A job that was enqueued in a transaction is acknowledged by the commit, which its effect proves.
    let effects = database.all(EFFECTS, doc! {}).await;
    for child in effects.iter().filter_map(|effect| effect.get_object_id("child").ok()) {
        asked.will_send(child.into(), effects::POLICY);
        asked.was_acknowledged(child.into());
    }
    effects::compare(&archived, &effects, &mut findings);
    let known = asked.sent().clone();
    for (id, sent) in &known {
        let lines = entered.get(id).map_or(&[][..], Vec::as_slice);
        match archived.get(id) {
            Some(job) => judge(job, sent.policy, lines, &mut findings),
            None if waiting.contains(id) => findings.broken.push(format!("never finished: {id}")),
            None if sent.acknowledged.is_some() => findings.lost.push(format!("I1: lost: {id}")),
            None if !lines.is_empty() => findings.unexplained.push(format!("executed and nowhere: {id}")),
            // Refused, without a trace in the database.
            None => {}
        }
    }
    for id in entered.keys().filter(|id| !known.contains_key(id)) {
        findings.unexplained.push(format!("executed, but never enqueued: {id}"));
    }
    for job in scheduled.iter().chain(archived.values()).filter(|job| keeps_a_ledger(job) && !known.contains_key(&id_of(job))) {
        findings.unexplained.push(format!("stored, but never enqueued: {job}"));
    }
    findings.broken.extend(Finished::new(&archived, lines, clock).violations(settings, asked));
    findings
}

/// Whether a job's class is one of [`ledger`](crate::ledger).
fn keeps_a_ledger(job: &Document) -> bool {
    let class = job.get_document("workable").and_then(|workable| workable.get_str("class"));
    class.is_ok_and(|class| [Entry::CLASS, Longer::CLASS, Poison::CLASS, BlockingPoison::CLASS, Settle::CLASS].contains(&class))
}

/// The executions of a job before the last. The last one is `last_execution`; after it has ended, it is in the history
/// as well.
pub fn executions_before_the_last(job: &Document) -> Vec<&Document> {
    let mut all: Vec<&Document> =
        job.get_array("executions").map(|all| all.iter().filter_map(bson::Bson::as_document).collect()).unwrap_or_default();
    all.pop_if(|newest| job.get_document("last_execution").is_ok_and(|last| last == *newest));
    all
}

/// The executions of a job that were started, as far as its document has them.
pub fn history(job: &Document) -> Vec<&Document> {
    let last = job.get_document("last_execution").ok();
    executions_before_the_last(job).into_iter().chain(last).filter(|execution| execution.contains_key("start")).collect()
}

/// Compares the history of an archived job with its lines in the ledger.
fn judge(job: &Document, policy: Policy, lines: &[&Line], findings: &mut Findings) {
    let earlier = executions_before_the_last(job);
    let history = history(job);
    let mut wrong: Vec<&str> = Vec::new();

    // I4, I6: every start is in the history, or was released before its execution began and is counted in
    // `interruptions`.
    let (attempts, interruptions, dropped) = (number(job, "attempts"), number(job, "interruptions"), number(job, "executions_dropped"));
    let interrupted = count(earlier.iter().filter(|execution| class(execution) == Some("interrupted")));
    if dropped == 0 && attempts != count(history.iter()) + interruptions - interrupted {
        wrong.push("I6: attempts are not the starts");
    }
    if dropped == 0 && number(job, "deaths") != count(history.iter().filter(|execution| crashed(execution))) {
        wrong.push("I6: deaths are not counted apart");
    }
    let allowed = match policy {
        Policy::Never | Policy::SentAgain => 1,
        Policy::Again(times) => i64::from(times) + 1,
        Policy::Any => i64::MAX,
    };
    if attempts - interruptions > allowed {
        wrong.push("I6: more starts than its policy allows");
    }
    // The ledger and the history must match one to one.
    let of = |execution: &Document| lines.iter().filter(|line| line.execution().1 == start_of(execution)).collect::<Vec<_>>();
    let begun: Vec<StartId> = lines.iter().filter(|line| line.event == Event::Begin).map(|line| line.execution().1).collect();
    if begun.iter().collect::<HashSet<_>>().len() != begun.len() {
        wrong.push("I5: one start was entered twice");
    }
    if dropped == 0 && begun.iter().any(|start| history.iter().all(|execution| start_of(execution) != *start)) {
        wrong.push("I4: an execution that the history does not know");
    }
    for execution in &history {
        let events: Vec<Event> = of(execution).iter().map(|line| line.event).collect();
        let agrees = if effects::is_settle(job) { agree_in_a_transaction } else { agree };
        if !agrees(class(execution), crashed(execution), &events) {
            wrong.push("I3: the history does not tell what happened");
        }
    }
    // Two executions may overlap only if the worker or the client of the earlier one was declared dead.
    for pair in history.windows(2).filter(|pair| !crashed(pair[0]) && class(pair[0]) != Some(CLIENT_VANISHED)) {
        let ended = of(pair[0]).iter().filter(|line| line.event != Event::Begin).map(|line| line.at_ms).max();
        let begun = of(pair[1]).iter().map(|line| line.at_ms).min();
        if ended.zip(begun).is_some_and(|(ended, begun)| begun < ended) {
            wrong.push("I3: two executions at the same time");
        }
    }
    if matches!(policy, Policy::Never | Policy::SentAgain) {
        let why = job.get_str("why").unwrap_or("none");
        if begun.len() > 1 {
            wrong.push("I5: entered more than once");
        }
        if !["done", "worker-died", "interrupted", "cancelled", "not-scheduled-by-retry-policy"].contains(&why) {
            wrong.push("I5: an end that this policy does not give");
        }
        if history.is_empty() && why != "cancelled" {
            wrong.push("I5: archived without a start");
        }
    }
    findings.deaths += history.iter().filter(|execution| crashed(execution)).count();
    findings.unexplained.extend(wrong.into_iter().map(|promise| format!("{promise}: {job}; ledger: {lines:?}")));
}

/// Whether an execution with this end in its history may have these lines in the ledger.
fn agree(class: Option<&str>, crashed: bool, events: &[Event]) -> bool {
    use Event::{Begin, Done, Failed, Stopped};
    match class {
        // An execution whose worker died may have ended in any way, also successfully.
        _ if crashed => matches!(events, [] | [Begin] | [Begin, Done | Failed | Stopped]),
        None => events == [Begin, Done],
        Some("not-yet") => events == [Begin, Failed],
        // A client may have had the job or not, and may have ended it too late.
        Some(CLIENT_VANISHED) => matches!(events, [] | [Begin] | [Begin, Done]),
        // Asked to stop before its execution began, or while it ran, or interrupted. A failure of one that ignores the request counts as
        // the same.
        Some(failure::INTERRUPTED | failure::CANCELLED) => matches!(events, [] | [Begin] | [Begin, Stopped | Failed]),
        Some(failure::MEMORY_LIMIT) => matches!(events, [Begin] | [Begin, Stopped]),
        // A thread cannot be interrupted: it may end successfully, and late.
        Some(failure::TIMEOUT) => matches!(events, [Begin] | [Begin, Stopped | Done]),
        Some(failure::MALFORMED | failure::PARAMETERS | failure::UNKNOWN_CLASS) => events.is_empty(),
        // No job in the tests ends in another way.
        Some(_) => false,
    }
}

/// The same for an execution that ends its job in a transaction of its own.
fn agree_in_a_transaction(class: Option<&str>, crashed: bool, events: &[Event]) -> bool {
    use Event::{Begin, Done, Failed};
    match class {
        // The commit is the end. Its worker may have died before it recorded the reply.
        None if !crashed => matches!(events, [Begin] | [Begin, Done]),
        // An error of MongoDB.
        Some(_) if !crashed && matches!(events, [Begin, Failed]) => true,
        _ => agree(class, crashed, events),
    }
}

fn class(execution: &Document) -> Option<&str> {
    execution.get_str("class").ok()
}

/// Whether an execution ended with the death of its worker.
pub fn crashed(execution: &Document) -> bool {
    execution.get_bool("crashed").unwrap_or(false)
}

fn count<T>(of: impl Iterator<Item = T>) -> i64 {
    i64::try_from(of.count()).unwrap_or(i64::MAX)
}

/// The id of the start of an execution.
pub fn start_of(execution: &Document) -> StartId {
    execution.get_object_id("start").expect("it was looked for").into()
}

fn id_of(job: &Document) -> JobId {
    job.get_object_id("_id").expect("ids of jobs are ObjectIds").into()
}

/// A number in a document; a missing field counts as zero.
pub fn number(document: &Document, field: &str) -> i64 {
    document.get(field).and_then(|n| n.as_i64().or(n.as_i32().map(i64::from))).unwrap_or(0)
}

/// Continuously reads majority snapshots of both collections: an acknowledged job is in exactly one of them (I1, I2).
#[derive(Debug)]
pub struct Watch {
    task: JoinHandle<()>,
    asked: Asked,
    seen: Arc<Mutex<Seen>>,
}

/// The results of the snapshots.
#[derive(Debug, Default)]
struct Seen {
    looks: usize,
    lost: Vec<String>,
    /// Jobs that were in both collections.
    twice: HashSet<JobId>,
}

/// Minimum and maximum wait between two snapshots.
const LOOK_EVERY: Duration = Duration::from_millis(200);
const LOOK_AGAIN_WITHIN: Duration = Duration::from_secs(5);

impl Watch {
    /// Starts reading.
    pub fn begin(database: &TestDatabase, asked: &Asked) -> Self {
        let seen = Arc::new(Mutex::new(Seen::default()));
        let client = database.database().client().clone();
        let [scheduled, archived, marks] = ["scheduled", "archived", "marks"].map(|name| database.raw(name));
        let (known, findings) = (asked.clone(), Arc::clone(&seen));
        let task = tokio::spawn(async move {
            for mark in 1.. {
                let begin = Instant::now();
                let before = known.acknowledged();
                // Without a primary nothing can be read. That violates no invariant.
                if let Ok(Some([waiting, finished])) = snapshot(&client, &marks, mark, [&scheduled, &archived]).await {
                    let mut seen = findings.lock().unwrap_or_else(PoisonError::into_inner);
                    seen.looks += 1;
                    let lost = before.iter().filter(|id| !waiting.contains(id) && !finished.contains(id));
                    seen.lost.extend(lost.map(|id| format!("I1: in neither collection at one instant: {id}")));
                    seen.twice.extend(waiting.intersection(&finished));
                }
                // Reading must take only a small part of the time, however many jobs there are.
                pause((begin.elapsed() * 10).clamp(LOOK_EVERY, LOOK_AGAIN_WITHIN)).await;
            }
        });
        Self { task, asked: asked.clone(), seen }
    }

    /// Stops reading when the documents were read at least once, and returns the violations.
    pub async fn end(self) -> Findings {
        let seen = || self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        wait_until(SOON, "the oracle reads the documents", async || seen().looks > 0).await;
        self.task.abort();
        let seen = std::mem::take(&mut *seen());
        // Only now is it known which jobs were sent again.
        let known = self.asked.sent();
        let twice = seen.twice.into_iter().filter(|id| known.get(id).is_none_or(|sent| sent.policy != Policy::SentAgain));
        let broken = twice.map(|id| format!("I2: in both collections at one instant: {id}")).collect();
        Findings { lost: seen.lost, broken, ..Findings::default() }
    }
}

/// The ids in both collections at one instant, from a majority snapshot that includes the mark written first. A former
/// primary that has not noticed its loss may return an older snapshot without the mark: then the result is `None`.
async fn snapshot(
    client: &Client,
    marks: &Collection<Document>,
    mark: i64,
    collections: [&Collection<Document>; 2],
) -> Result<Option<[HashSet<JobId>; 2]>, Error> {
    let majority = WriteConcern::builder().w(Acknowledgment::Majority).build();
    marks.update_one(doc! { "_id": 0 }, doc! { "$set": { "mark": mark } }).upsert(true).write_concern(majority).await?;
    let mut session = client.start_session().snapshot(true).await?;
    let mut found = [HashSet::new(), HashSet::new()];
    for (collection, ids) in collections.into_iter().zip(&mut found) {
        let mut cursor = collection.find(doc! {}).projection(doc! { "_id": 1 }).session(&mut session).await?;
        ids.extend(cursor.stream(&mut session).try_collect::<Vec<Document>>().await?.iter().map(id_of));
    }
    let seen = marks.find_one(doc! { "mark": mark }).session(&mut session).await?;
    Ok(seen.map(|_| found))
}
