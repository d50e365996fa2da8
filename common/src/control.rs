//! The operator's changes to jobs: retry, change, cancel and delete. The same rules apply to single jobs and to bulk changes.
//!
//! Used by `recruiter jobs` and by applications that offer the same changes. Each job is read, and its current state decides the change.
//! The filter of the write repeats the conditions of the decision. A job that changed in between is read again. Every call can be repeated:
//! changes made by an interrupted call are recognised.

mod export;
mod graph;
mod revision;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    ops::ControlFlow,
    sync::{Arc, LazyLock},
    time::{Duration, Instant as Monotonic},
};

use bson::{Bson, Document, RawDocument, RawDocumentBuf};

pub use self::{
    export::{Exported, export},
    revision::{InvalidRevision, Revision},
};
use crate::{
    enqueue::NewJob,
    failure::{CANCELLED, Failure},
    ids::{JobId, WorkerId},
    instant::{DUE_MS, Instant},
    job::{FinishReason, Job, JobState, Priority, bundle::is_done},
    limits::{line_of_gate, resources_in},
    names::check_name,
    shutdown::pause,
    spec::unique_again,
    store::{
        Archival, CommitSession, Hint, JobFilter, Match, Recorded, Retrial, StateFilter, Store, StoreError, StoredJob, Walk,
        batch::{Batches, cut},
    },
    telemetry::chain,
};

/// Maximum number of jobs changed together. A transaction of this size takes a fraction of a second.
const BATCH: usize = 500;
/// Maximum size of the documents that are read together, in bytes.
const BATCH_BYTES: usize = 8 * 1024 * 1024;
/// Maximum number of reads of a job that changes between each read and write.
const READS: u32 = 3;
/// How long a batch is repeated after transient errors. It is longer than MongoDB keeps the open transaction of a
/// killed process, which is one minute.
const TRY_FOR: Duration = Duration::from_secs(75);
/// Pause between two of these attempts.
const TRY_AGAIN_AFTER: Duration = Duration::from_secs(1);
/// Maximum number of cancellations per batch that are sent as hints. Workers find the others with their next heartbeat.
const ANNOUNCED: usize = 64;

/// A change to jobs.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// Enqueues a finished job again under another id, which its archived document stores as `retried_as`. Makes a
    /// waiting job due now.
    Retry {
        /// Whether jobs that were retried before are retried as well.
        again: bool,
        /// What the new job has in place of the former content. A job that is not finished is refused unless this is empty.
        with: Box<Revision>,
    },
    /// Gives waiting jobs another priority, group or date.
    Alter(Alteration),
    /// Archives a waiting job without running it. Asks the worker of a running job to end it.
    Cancel,
    /// Deletes an archived job permanently.
    Delete,
}

/// New values for fields of waiting jobs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Alteration {
    priority: Option<Priority>,
    group: Option<String>,
    at: Option<Instant>,
}

/// Why new values cannot be given to any job.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidAlteration {
    /// No value is given.
    #[error("nothing is to be changed: give a priority, a group or a due date")]
    Nothing,
    /// The name of the group is not valid.
    #[error("the name of the new group {0}")]
    Group(String),
    /// Some programming languages cannot read the date.
    #[error("the jobs would be due outside of the years 1 to 9999: give an earlier date or a shorter delay")]
    Date,
}

impl Alteration {
    /// New values. A job keeps its own value where `None` is given.
    ///
    /// # Errors
    /// When no value is given, or one of them is not valid.
    pub fn new(priority: Option<Priority>, group: Option<String>, at: Option<Instant>) -> Result<Self, InvalidAlteration> {
        if let Some(group) = &group {
            check_name(group).map_err(InvalidAlteration::Group)?;
        }
        if at.is_some_and(|at| !DUE_MS.contains(&at.timestamp_millis())) {
            return Err(InvalidAlteration::Date);
        }
        let alteration = Self { priority, group, at };
        if alteration == Self::default() { Err(InvalidAlteration::Nothing) } else { Ok(alteration) }
    }

    fn to_document(&self) -> Document {
        let mut set = Document::new();
        set.extend(self.priority.map(|priority| ("priority".to_owned(), priority.into())));
        set.extend(self.group.as_ref().map(|group| ("group".to_owned(), group.into())));
        set.extend(self.at.map(|at| ("scheduled_at".to_owned(), bson::DateTime::from_chrono(at).into())));
        set
    }

    /// Whether a job that is due at `at` has these values.
    fn is_in(&self, job: &Job, at: Instant) -> bool {
        let stored = |instant: Instant| instant.timestamp_millis();
        self.priority.is_none_or(|priority| priority == job.priority)
            && self.group.as_ref().is_none_or(|group| *group == job.group)
            && self.at.is_none_or(|wanted| stored(wanted) == stored(at))
    }
}

/// The outcome of a change for one job. In a dry run, the outcome that the change would have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Changed {
    /// It was archived and is enqueued again.
    EnqueuedAgain {
        /// Its new id; `None` in a dry run.
        new: Option<JobId>,
        /// The reason why it is in the archive.
        why: FinishReason,
    },
    /// It was due later and is due now.
    DueNow {
        /// When it was due before.
        instead_of: Instant,
    },
    /// It is waiting and already due.
    AlreadyDue {
        /// Its due date.
        since: Instant,
    },
    /// It is waiting and has the new values.
    Altered,
    /// It is waiting, and had these values before.
    Unchanged,
    /// It was waiting and is archived now.
    Cancelled,
    /// It is running. Its cancellation was requested.
    CancelRequested,
    /// It was archived and is deleted.
    Deleted,
    /// It matched the filter, but its state changed before the write.
    Meanwhile,
    /// It is unchanged.
    Refused(Refusal),
}

impl Changed {
    /// The outcome as one word, for programs and for counts.
    pub fn word(&self) -> &'static str {
        match self {
            Self::EnqueuedAgain { .. } => "enqueued-again",
            Self::DueNow { .. } => "due-now",
            Self::AlreadyDue { .. } => "already-due",
            Self::Altered => "changed",
            Self::Unchanged => "unchanged",
            Self::Cancelled => "cancelled",
            Self::CancelRequested => "asked",
            Self::Deleted => "deleted",
            Self::Meanwhile => "changed-meanwhile",
            Self::Refused(Refusal::RetriedBefore { .. }) => "retried-before",
            Self::Refused(_) => "refused",
        }
    }
}

/// The reason why a job was not changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// There is no job with this id.
    #[error("no job has this id, neither in `scheduled` nor in `archived`")]
    Unknown,
    /// It was retried before.
    #[error("it was retried before, as {new}")]
    RetriedBefore {
        /// The id of the new job.
        new: String,
    },
    /// A running job cannot be retried.
    #[error("it is running in worker {worker}; its retry policy decides when it ends")]
    Running {
        /// The worker that runs it.
        worker: WorkerId,
    },
    /// A running job keeps its priority, its group and its date.
    #[error("it has started: worker {worker} runs it, and only waiting jobs are changed")]
    Started {
        /// The worker that runs it.
        worker: WorkerId,
    },
    /// An archived job can be neither changed nor cancelled.
    #[error("it is archived already, as {why}")]
    Archived {
        /// The reason why it was archived.
        why: String,
    },
    /// A job that is not archived cannot be deleted.
    #[error("it is not archived, and only archived jobs are deleted: cancel it first")]
    NotArchived,
    /// Its document is not a valid job.
    #[error("{0}")]
    Malformed(String),
    /// A job with its unique key is waiting or running.
    #[error("another job with its unique key is waiting or running; cancel that one first, or wait until it is finished")]
    KeyIsTaken,
    /// It waits until another job is finished.
    #[error("it waits until the running job with the unique key `{key}` is finished")]
    WaitsForAnother {
        /// The key.
        key: String,
    },
    /// Only finished jobs are retried with new content.
    #[error("it is not finished, and only finished jobs are retried with new content: use `recruiter jobs change`, or cancel it first")]
    NotFinished,
    /// It waits for other jobs.
    #[error("it waits for other jobs, and cannot be changed until they end; `recruiter jobs why` names them")]
    WaitsForJobs,
    /// It cannot be enqueued again.
    #[error("it cannot be enqueued again: {0}")]
    Unstorable(String),
    /// Its `locked` field is invalid.
    #[error("its field `locked` is neither true nor false; repair the document by hand")]
    NeitherLockedNorNot,
    /// It changed between each read and write.
    #[error("it changed each time it was read; try again")]
    KeepsChanging,
}

impl Refusal {
    /// Whether the job changed its state after it matched: it has started or ended, or was deleted.
    fn is_caused_by_a_change(&self) -> bool {
        matches!(
            self,
            Self::Unknown | Self::Running { .. } | Self::Started { .. } | Self::Archived { .. } | Self::NotArchived | Self::NotFinished
        )
    }
}

/// The reason why a filter cannot match any job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Contradiction {
    /// Only archived jobs have a reason.
    #[error("only archived jobs have a finish reason (`why`): select the state `archived`, or no state")]
    WhyOutsideOfTheArchive,
    /// The period is empty.
    #[error("the period is empty: `since` must be before `until`")]
    EmptyPeriod,
    /// A successful job has no failure.
    #[error("a job that is done has no error class and no failure message; select another finish reason")]
    DoneAndFailed,
    /// A running job cannot be retried.
    #[error("a running job cannot be retried; its retry policy decides when it ends")]
    RetryOfRunning,
    /// A job that is not finished cannot be retried with new content.
    #[error("only finished jobs are retried with new content: use `recruiter jobs change` for waiting ones")]
    RevisionOfWaiting,
    /// A running job cannot be exported.
    #[error("a running job cannot be exported, because it would run twice: select the state `scheduled` or `archived`")]
    ExportOfRunning,
    /// Only waiting jobs can be changed.
    #[error("only waiting jobs are changed: select the state `scheduled`, or no state")]
    AlterOfStarted,
    /// An archived job cannot be cancelled.
    #[error("an archived job cannot be cancelled: it has ended")]
    CancelOfArchived,
    /// Only archived jobs can be deleted.
    #[error("only archived jobs are deleted: cancel the others first")]
    DeleteOfUnfinished,
}

impl JobFilter {
    /// Checks that the filter can match a job.
    ///
    /// # Errors
    /// When parts of the filter exclude each other.
    pub fn check(&self) -> Result<(), Contradiction> {
        let unfinished = matches!(self.state, Some(StateFilter::Scheduled | StateFilter::Running));
        let of_failure = self.error_class.is_some() || self.message.is_some();
        if unfinished && (self.why.is_some() || self.failed) {
            Err(Contradiction::WhyOutsideOfTheArchive)
        } else if self.since.is_some() && self.until.is_some() && self.since >= self.until {
            Err(Contradiction::EmptyPeriod)
        } else if of_failure && self.why.as_deref() == Some(FinishReason::DONE.as_str()) {
            Err(Contradiction::DoneAndFailed)
        } else {
            Ok(())
        }
    }

    /// The jobs of this filter that the change applies to.
    ///
    /// A retry applies to archived jobs unless another state is given, and to failed ones (neither done nor cancelled)
    /// unless a reason is given. New values apply to waiting jobs, a deletion to archived jobs, a cancellation to all others.
    ///
    /// # Errors
    /// When the change is not possible in the given state, or parts of the filter exclude each other.
    pub fn narrowed_to(mut self, change: &Change) -> Result<Self, Contradiction> {
        match (change, self.state) {
            (Change::Retry { .. }, Some(StateFilter::Running)) => return Err(Contradiction::RetryOfRunning),
            (Change::Alter(_), Some(StateFilter::Running | StateFilter::Archived)) => return Err(Contradiction::AlterOfStarted),
            (Change::Alter(_), _) if self.why.is_some() => return Err(Contradiction::AlterOfStarted),
            (Change::Alter(_), Some(StateFilter::Scheduled) | None) => self.state = Some(StateFilter::Scheduled),
            (Change::Cancel, Some(StateFilter::Archived)) => return Err(Contradiction::CancelOfArchived),
            (Change::Cancel, _) if self.why.is_some() => return Err(Contradiction::CancelOfArchived),
            (Change::Delete, Some(StateFilter::Scheduled | StateFilter::Running)) => return Err(Contradiction::DeleteOfUnfinished),
            (Change::Retry { with, .. }, Some(StateFilter::Scheduled)) if !with.is_empty() => return Err(Contradiction::RevisionOfWaiting),
            (Change::Retry { .. }, Some(StateFilter::Scheduled)) | (Change::Cancel, _) => {}
            (Change::Retry { .. }, Some(StateFilter::Archived) | None) => {
                self.state = Some(StateFilter::Archived);
                self.failed = self.why.is_none();
            }
            (Change::Delete, Some(StateFilter::Archived) | None) => self.state = Some(StateFilter::Archived),
        }
        self.check().map(|()| self)
    }
}

/// The progress of a change of many jobs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Number of examined documents, matching or not.
    pub looked_at: u64,
    /// Estimated number of documents to examine.
    pub length: u64,
    /// Number of matching jobs per outcome.
    pub outcomes: BTreeMap<&'static str, u64>,
    /// Whether the caller stopped the change before its end.
    pub is_stopped: bool,
}

impl Report {
    /// Number of jobs that have matched so far.
    pub fn matched(&self) -> u64 {
        self.outcomes.values().sum()
    }

    /// Number of jobs with this outcome.
    pub fn count(&self, word: &str) -> u64 {
        self.outcomes.get(word).copied().unwrap_or(0)
    }
}

/// The next step for one job, decided by its document.
enum Step {
    Enqueue {
        retried_as: Option<Bson>,
        job: Box<Job>,
        why: FinishReason,
    },
    Hasten {
        at: Instant,
        group: String,
    },
    /// A waiting job of this group gets other values.
    Alter {
        group: String,
    },
    Archive(Archival),
    Ask,
    Delete,
    Nothing(Changed),
}

/// Changes jobs.
#[derive(Debug)]
pub struct Control {
    store: Store,
    session: CommitSession,
    dry_run: bool,
}

impl Control {
    /// Changes jobs of this database. In a dry run it only reports the changes that it would make.
    pub fn new(store: &Store, dry_run: bool) -> Self {
        Self { store: store.clone(), session: CommitSession::default(), dry_run }
    }

    /// Changes these jobs. Returns the outcome of each, in the same order.
    ///
    /// # Errors
    /// When MongoDB cannot be used. Some of the jobs may have been changed. A repeated call recognises them.
    pub async fn change(&mut self, change: &Change, jobs: &[JobId]) -> Result<Vec<(JobId, Changed)>, StoreError> {
        let sizes: Vec<Match> = jobs.iter().map(|job| Match { job: *job, bytes: BATCH_BYTES / BATCH }).collect();
        let mut all = Vec::with_capacity(jobs.len());
        for batch in cut(sizes, BATCH, BATCH_BYTES, |found| found.bytes) {
            all.extend(self.change_batch(change, &batch).await?);
        }
        Ok(all)
    }

    /// Changes all jobs that match, in batches. After each batch `each` gets the progress and the outcomes of the
    /// batch. It can stop the change there.
    ///
    /// # Errors
    /// When MongoDB cannot be used. Reported changes were made. A repeated call continues with the rest.
    pub async fn change_all(
        &mut self,
        change: &Change,
        filter: &JobFilter,
        mut each: impl FnMut(&Report, &[(JobId, Changed)]) -> ControlFlow<()>,
    ) -> Result<Report, StoreError> {
        let mut walk = Walk::new(filter.clone());
        let mut report = Report { length: self.store.walk_length(&walk).await?, ..Report::default() };
        loop {
            if each(&report, &[]).is_break() {
                return Ok(Report { is_stopped: true, ..report });
            }
            let patience = Patience::new();
            let found = loop {
                match self.store.next_matches(&mut walk).await {
                    Err(error) if patience.allows(&error).await => {}
                    found => break found?,
                }
            };
            let Some(found) = found else { return Ok(report) };
            let (before, all) = (report.looked_at, found.len() as u64);
            let ahead = walk.looked_at.min(report.length).saturating_sub(before);
            let mut through = 0;
            for batch in cut(found, BATCH, BATCH_BYTES, |found| found.bytes) {
                let mut changed = self.change_batch(change, &batch).await?;
                through += batch.len() as u64;
                report.looked_at = before + ahead * through / all;
                for (_, changed) in &mut changed {
                    if let Changed::Refused(refusal) = changed
                        && refusal.is_caused_by_a_change()
                    {
                        *changed = Changed::Meanwhile;
                    }
                    *report.outcomes.entry(changed.word()).or_default() += 1;
                }
                if each(&report, &changed).is_break() {
                    return Ok(Report { is_stopped: true, ..report });
                }
            }
            report.looked_at = before + ahead;
        }
    }

    async fn change_batch(&mut self, change: &Change, batch: &[Match]) -> Result<Vec<(JobId, Changed)>, StoreError> {
        let mut outcomes: HashMap<JobId, Changed> = HashMap::new();
        let mut left: Vec<JobId> = batch.iter().map(|found| found.job).collect();
        for _ in 0..READS {
            let now = self.store.now();
            let patience = Patience::new();
            let mut found = loop {
                match self.store.jobs_by_id(&left).await {
                    Err(error) if patience.allows(&error).await => {}
                    found => break found?,
                }
            };
            let steps = left.iter().map(|job| match found.remove(job) {
                Some(stored) => (*job, step(change, *job, stored, now)),
                None => (*job, Step::Nothing(Changed::Refused(Refusal::Unknown))),
            });
            let steps: Vec<(JobId, Step)> = steps.collect();
            outcomes.extend(if self.dry_run {
                steps.into_iter().map(|step| would_become(change, step)).collect()
            } else {
                self.apply(change, steps, now).await?
            });
            left.retain(|job| !outcomes.contains_key(job));
            if left.is_empty() {
                break;
            }
        }
        let outcome = |job: JobId| outcomes.get(&job).cloned().unwrap_or(Changed::Refused(Refusal::KeepsChanging));
        Ok(batch.iter().map(|found| (found.job, outcome(found.job))).collect())
    }

    /// Makes the decided changes, with one command or transaction for each kind of change. The result does not contain jobs
    /// that have changed since they were read.
    async fn apply(&mut self, change: &Change, steps: Vec<(JobId, Step)>, now: Instant) -> Result<HashMap<JobId, Changed>, StoreError> {
        let mut outcomes = HashMap::new();
        let (mut retrials, mut archivals, mut hastened, mut asked, mut deleted) =
            (Vec::new(), Vec::new(), HashMap::new(), Vec::new(), Vec::new());
        let (mut groups, mut altered): (BTreeSet<String>, Vec<JobId>) = Default::default();
        for (id, step) in steps {
            match step {
                Step::Nothing(changed) => drop(outcomes.insert(id, changed)),
                Step::Archive(archival) => archivals.push(archival),
                Step::Ask => asked.push(id),
                Step::Delete => deleted.push(id),
                Step::Alter { group } => {
                    groups.insert(group);
                    altered.push(id);
                }
                Step::Hasten { at, group } => {
                    groups.insert(group);
                    hastened.insert(id, at);
                }
                Step::Enqueue { retried_as, job, why } => {
                    let revision = revision(change);
                    groups.insert(revision.group_of(&job.group));
                    // A job that has halted its line runs before the others of the line.
                    let place = job.halt_on_failure.then(|| bson::DateTime::from_chrono(job.created_at));
                    let new = again(*job, revision).and_then(|new| new.into_document(now).map_err(|error| error.to_string()));
                    let new = new.map(|(id, mut document)| {
                        document.extend(place.map(|place| ("created_at".to_owned(), place.into())));
                        (id, document)
                    });
                    match new {
                        Ok((new, document)) => retrials.push((Retrial { job: id, retried_as, new, document: Arc::new(document) }, why)),
                        Err(problem) => drop(outcomes.insert(id, Changed::Refused(Refusal::Unstorable(problem)))),
                    }
                }
            }
        }
        self.enqueue_again(retrials, &mut outcomes).await?;
        self.archive(archivals, &mut outcomes).await?;
        self.ask(&asked, &mut outcomes).await?;
        if !hastened.is_empty() {
            let jobs: Vec<JobId> = hastened.keys().copied().collect();
            let patience = Patience::new();
            let due = loop {
                match self.store.hasten_if_unlocked(&jobs, now).await {
                    Err(error) if patience.allows(&error).await => {}
                    due => break due?,
                }
            };
            outcomes.extend(due.into_iter().map(|job| (job, Changed::DueNow { instead_of: hastened[&job] })));
        }
        if let Change::Alter(alteration) = change {
            self.alter(alteration, &altered, &mut groups, now, &mut outcomes).await?;
        }
        if !deleted.is_empty() {
            let patience = Patience::new();
            while let Err(error) = self.store.delete_archived(&deleted).await {
                if !patience.allows(&error).await {
                    return Err(error);
                }
            }
            outcomes.extend(deleted.into_iter().map(|job| (job, Changed::Deleted)));
        }
        if !groups.is_empty() {
            self.store.announce_jobs(groups).await;
        }
        Ok(outcomes)
    }

    /// Enqueues jobs again. Halves a refused batch until the refused job is alone.
    async fn enqueue_again(&mut self, all: Vec<(Retrial, FinishReason)>, outcomes: &mut HashMap<JobId, Changed>) -> Result<(), StoreError> {
        let mut batches = Batches::new(vec![all]);
        while let Some(batch) = batches.next().filter(|batch| !batch.is_empty()) {
            let retrials: Vec<Retrial> = batch.iter().map(|(retrial, _)| retrial.clone()).collect();
            let patience = Patience::new();
            let recorded = loop {
                match self.store.retry_if_archived(&mut self.session, &retrials).await {
                    Err(error) if patience.allows(&error).await => {}
                    recorded => break recorded,
                }
            };
            match recorded {
                Ok(recorded) => {
                    let enqueued = batch.into_iter().zip(recorded).filter(|(_, recorded)| *recorded == Recorded::Yes);
                    outcomes
                        .extend(enqueued.map(|((retrial, why), _)| (retrial.job, Changed::EnqueuedAgain { new: Some(retrial.new), why })));
                }
                Err(error) if error.is_transient() => return Err(error),
                Err(error) => {
                    if let Some((retrial, _)) = batches.halve(batch) {
                        let is_taken = error.is_duplicate() && unique_fields(&retrial.document);
                        let refusal = if is_taken { Refusal::KeyIsTaken } else { Refusal::Unstorable(chain(&error)) };
                        outcomes.insert(retrial.job, Changed::Refused(refusal));
                    }
                }
            }
        }
        Ok(())
    }

    async fn archive(&mut self, archivals: Vec<Archival>, outcomes: &mut HashMap<JobId, Changed>) -> Result<(), StoreError> {
        let patience = Patience::new();
        let recorded = loop {
            match self.store.finish(&mut self.session, &archivals).await {
                Err(error) if patience.allows(&error).await => {}
                recorded => break recorded?,
            }
        };
        let cancelled = archivals.iter().zip(recorded).filter(|(_, recorded)| *recorded == Recorded::Yes);
        outcomes.extend(cancelled.map(|(archival, _)| (archival.job(), Changed::Cancelled)));
        Ok(())
    }

    /// Gives waiting jobs their new values. Their old and new lanes are searched at once, and again when they are due.
    async fn alter(
        &self,
        alteration: &Alteration,
        jobs: &[JobId],
        groups: &mut BTreeSet<String>,
        now: Instant,
        outcomes: &mut HashMap<JobId, Changed>,
    ) -> Result<(), StoreError> {
        if jobs.is_empty() {
            return Ok(());
        }
        let patience = Patience::new();
        let altered = loop {
            match self.store.alter_if_unlocked(jobs, alteration.to_document()).await {
                Err(error) if patience.allows(&error).await => {}
                altered => break altered?,
            }
        };
        outcomes.extend(altered.into_iter().map(|job| (job, Changed::Altered)));
        groups.extend(alteration.group.clone());
        if let Some(at) = alteration.at.filter(|at| *at > now) {
            let groups = groups.iter().cloned().collect();
            self.store.announce_hint(Hint::Jobs { groups, at: Some(at), jobs: Vec::new() }).await;
        }
        Ok(())
    }

    async fn ask(&self, jobs: &[JobId], outcomes: &mut HashMap<JobId, Changed>) -> Result<(), StoreError> {
        if jobs.is_empty() {
            return Ok(());
        }
        let patience = Patience::new();
        let asked = loop {
            match self.store.request_cancel_if_started(jobs).await {
                Err(error) if patience.allows(&error).await => {}
                asked => break asked?,
            }
        };
        for job in asked.iter().take(ANNOUNCED) {
            self.store.announce_hint(Hint::Cancel { job: *job }).await;
        }
        outcomes.extend(asked.into_iter().map(|job| (job, Changed::CancelRequested)));
        Ok(())
    }
}

/// The time limit for repeating a call after transient errors.
struct Patience {
    since: Monotonic,
}

impl Patience {
    fn new() -> Self {
        Self { since: Monotonic::now() }
    }

    /// Whether the same call should be repeated. Waits for [`TRY_AGAIN_AFTER`] before it returns true.
    async fn allows(&self, error: &StoreError) -> bool {
        let repeat = error.is_transient() && !error.is_unauthorized() && self.since.elapsed() < TRY_FOR;
        if repeat {
            tracing::warn!(error = chain(error), "a batch of changes failed; trying again");
            pause(TRY_AGAIN_AFTER).await;
        }
        repeat
    }
}

/// Decides the step for a job from its document.
fn step(change: &Change, id: JobId, stored: StoredJob, now: Instant) -> Step {
    let StoredJob { is_archived, document } = stored;
    match change {
        Change::Delete if is_archived => Step::Delete,
        Change::Delete => Step::Nothing(Changed::Refused(Refusal::NotArchived)),
        Change::Alter(alteration) => {
            step_of_alteration(alteration, is_archived, document).unwrap_or_else(|refusal| Step::Nothing(Changed::Refused(refusal)))
        }
        Change::Cancel => step_of_cancel(id, is_archived, &document, now),
        Change::Retry { again, with } => step_of_retry(*again, !with.is_empty(), is_archived, document, now)
            .unwrap_or_else(|refusal| Step::Nothing(Changed::Refused(refusal))),
    }
}

fn step_of_alteration(alteration: &Alteration, is_archived: bool, document: RawDocumentBuf) -> Result<Step, Refusal> {
    if is_archived {
        return Err(Refusal::Archived { why: document.get_str("why").unwrap_or("an unknown reason").to_owned() });
    }
    let job = Job::try_from(document).map_err(|(_, error)| Refusal::Malformed(error.to_string()))?;
    match job.state {
        JobState::Started { worker, .. } => Err(Refusal::Started { worker }),
        JobState::Scheduled { at } if alteration.is_in(&job, at) => Ok(Step::Nothing(Changed::Unchanged)),
        // The recruiter has read what it needs of such a job.
        JobState::Scheduled { .. } if job.is_waiting => Err(Refusal::WaitsForJobs),
        JobState::Scheduled { .. } => match waits_for(&job).filter(|_| alteration.at.is_some()) {
            // It has no date of its own until that job ends.
            Some(key) => Err(Refusal::WaitsForAnother { key }),
            None => Ok(Step::Alter { group: job.group }),
        },
        JobState::Archived { .. } => Err(Refusal::Malformed("it is in `scheduled`, but its document is in a finished state".into())),
    }
}

/// The key of the job whose end this job waits for.
fn waits_for(job: &Job) -> Option<String> {
    job.field("unique_after").and_then(|key| key.as_str().map(str::to_owned))
}

/// Decides by single fields, so that a document that is not a valid job can be cancelled as well.
fn step_of_cancel(id: JobId, is_archived: bool, document: &RawDocument, now: Instant) -> Step {
    let refused = |refusal| Step::Nothing(Changed::Refused(refusal));
    if is_archived {
        return refused(Refusal::Archived { why: document.get_str("why").unwrap_or("an unknown reason").to_owned() });
    }
    match document.get_bool("locked") {
        Ok(true) => Step::Ask,
        Ok(false) => {
            let failure = Failure::new(CANCELLED, "cancelled by hand before it was started");
            Step::Archive(Archival::unstarted(id, document, &FinishReason::CANCELLED, &failure, now))
        }
        Err(_) => refused(Refusal::NeitherLockedNorNot),
    }
}

fn step_of_retry(again: bool, is_revised: bool, is_archived: bool, document: RawDocumentBuf, now: Instant) -> Result<Step, Refusal> {
    let job = Job::try_from(document).map_err(|(_, error)| Refusal::Malformed(error.to_string()))?;
    Ok(match (&job.state, is_archived) {
        (JobState::Archived { why }, true) => {
            let (why, retried_as) = (why.clone(), job.field("retried_as"));
            match &retried_as {
                Some(new) if *new != Bson::Null && !again => {
                    let new = new.as_object_id().map_or_else(|| new.to_string(), |new| new.to_hex());
                    return Err(Refusal::RetriedBefore { new });
                }
                _ => Step::Enqueue { retried_as, job: Box::new(job), why },
            }
        }
        (JobState::Started { worker, .. }, false) => return Err(Refusal::Running { worker: *worker }),
        (JobState::Scheduled { .. }, false) if is_revised => return Err(Refusal::NotFinished),
        (JobState::Scheduled { at }, false) if *at <= now => Step::Nothing(Changed::AlreadyDue { since: *at }),
        (JobState::Scheduled { .. }, false) if job.is_waiting => return Err(Refusal::WaitsForJobs),
        (JobState::Scheduled { .. }, false) if waits_for(&job).is_some() => {
            return Err(Refusal::WaitsForAnother { key: waits_for(&job).unwrap_or_default() });
        }
        (JobState::Scheduled { at }, false) => Step::Hasten { at: *at, group: job.group },
        (_, true) => return Err(Refusal::Malformed("it is in the archive, but its document is not in a finished state".into())),
        (JobState::Archived { .. }, false) => {
            return Err(Refusal::Malformed("it is in `scheduled`, but its document is in a finished state".into()));
        }
    })
}

fn would_become(change: &Change, (id, step): (JobId, Step)) -> (JobId, Changed) {
    let changed = match step {
        Step::Nothing(changed) => changed,
        Step::Archive(_) => Changed::Cancelled,
        Step::Ask => Changed::CancelRequested,
        Step::Alter { .. } => Changed::Altered,
        Step::Delete => Changed::Deleted,
        Step::Hasten { at, .. } => Changed::DueNow { instead_of: at },
        Step::Enqueue { job, why, .. } => match again(*job, revision(change)) {
            Ok(_) => Changed::EnqueuedAgain { new: None, why },
            Err(problem) => Changed::Refused(Refusal::Unstorable(problem)),
        },
    };
    (id, changed)
}

fn unique_fields(document: &Document) -> bool {
    ["unique", "unique_while_waiting"].iter().any(|field| document.contains_key(*field))
}

/// What retried jobs have in place of their former content.
fn revision(change: &Change) -> &Revision {
    static NONE: LazyLock<Revision> = LazyLock::new(Revision::default);
    match change {
        Change::Retry { with, .. } => with,
        Change::Alter(_) | Change::Cancel | Change::Delete => &NONE,
    }
}

/// The same job under a new id, with its unique key and its limits. A bundle gets only the items that are not done, or all items if all are done.
fn again(job: Job, with: &Revision) -> Result<NewJob, String> {
    let document = |parameters: Bson| {
        let Bson::Document(parameters) = parameters else {
            return Err("its parameters are not a document; enqueue it by hand".to_owned());
        };
        Ok(with.parameters(parameters))
    };
    let unique = unique_again(&job);
    let new = match &job.bundle {
        None => NewJob::of_class(job.class, document(job.parameters)?),
        Some(bundle) => {
            let all_done = bundle.outcomes.iter().all(is_done);
            let items = job.items();
            let wanted = items.iter().zip(&bundle.outcomes).filter(|(_, outcome)| all_done || !is_done(outcome));
            let items: Vec<Document> = wanted.map(|(item, _)| document(item.clone())).collect::<Result<_, _>>()?;
            NewJob::bundle_of_class(job.class, items)
        }
    };
    let new = new.with_id(JobId::new()).in_group(job.group).priority(job.priority);
    let new = job.tags.into_iter().fold(new, NewJob::tag).retry_stored(job.retry_policy).keep(job.keep).recovered_from(job.id);
    let gate = job.gate.unwrap_or_default();
    let new = match line_of_gate(&gate) {
        Some(line) => new.in_line(line),
        None => resources_in(&gate).fold(new, NewJob::limit),
    };
    let new = if job.halt_on_failure { new.halt_on_failure() } else { new };
    let new = match unique {
        Some(unique) => new.unique(unique),
        None => new,
    };
    Ok(with.apply(match job.urn {
        Some(urn) => new.urn(urn),
        None => new,
    }))
}

#[cfg(test)]
mod tests {
    use bson::doc;

    use super::*;

    fn job(more: Document) -> Job {
        let mut document = doc! {
            "_id": bson::oid::ObjectId::from_bytes([7; 12]), "locked": false, "group": "g", "priority": 3, "why": "gave-up",
            "workable": { "class": "c", "parameters": { "a": 1 } }, "retry_policy": { "class": "Mine", "parameters": {} },
        };
        document.extend(more);
        Job::try_from(document).expect("a job")
    }

    #[test]
    fn only_the_items_of_a_bundle_that_are_not_done_are_enqueued_again() {
        let bundle = |outcomes: Vec<Bson>| {
            let items: Vec<Document> = (0..3).map(|n| doc! { "n": n }).collect();
            job(doc! { "workable": { "class": "c", "items": items }, "item_outcomes": outcomes })
        };
        let failed = Bson::from(doc! { "class": "x", "message": "too hot", "why": "gave-up" });
        let done_again = |job: Job| format!("{:?}", again(job, &Revision::default()).expect("a bundle"));
        let rest = done_again(bundle(vec!["done".into(), failed]));
        assert!(!rest.contains("\"n\": Int32(0)") && rest.contains("\"n\": Int32(1)") && rest.contains("\"n\": Int32(2)"), "{rest}");
        assert!(done_again(bundle(vec!["done".into(); 3])).contains("\"n\": Int32(0)"), "all items, if all are done");
    }

    #[test]
    fn a_retried_job_keeps_its_limits_or_its_line() {
        let again = |gate: &str| format!("{:?}", again(job(doc! { "gate": gate }), &Revision::default()).expect("a job"));
        assert!(again("customer:17,printer").contains(r#"limits: ["customer:17", "printer"]"#), "{}", again("customer:17,printer"));
        let line = crate::limits::gate_of_line("k");
        assert!(again(&line).contains(r#"line: Some("k")"#), "{}", again(&line));
    }

    #[test]
    fn a_change_applies_to_the_states_in_which_it_is_possible() {
        let of = |state, why: Option<&str>| JobFilter { state, why: why.map(Into::into), ..JobFilter::default() };
        let retry = Change::Retry { again: false, with: Box::default() };
        let alter = Change::Alter(Alteration::default());
        let check = |filter: JobFilter, change: Change, expected: Result<(Option<StateFilter>, bool), Contradiction>| {
            assert_eq!(filter.clone().narrowed_to(&change).map(|filter| (filter.state, filter.failed)), expected, "{change:?} {filter:?}");
        };
        let (scheduled, running, archived) = (Some(StateFilter::Scheduled), Some(StateFilter::Running), Some(StateFilter::Archived));
        check(of(None, None), retry.clone(), Ok((archived, true)));
        check(of(None, Some("done")), retry.clone(), Ok((archived, false)));
        let revised = Change::Retry { again: false, with: Revision::default().set(doc! { "a": 1 }).into() };
        check(of(None, None), revised.clone(), Ok((archived, true)));
        check(of(scheduled, None), revised, Err(Contradiction::RevisionOfWaiting));
        check(of(scheduled, None), retry.clone(), Ok((scheduled, false)));
        check(of(running, None), retry.clone(), Err(Contradiction::RetryOfRunning));
        check(of(scheduled, Some("done")), retry, Err(Contradiction::WhyOutsideOfTheArchive));
        check(of(None, None), alter.clone(), Ok((scheduled, false)));
        check(of(scheduled, None), alter.clone(), Ok((scheduled, false)));
        for filter in [of(running, None), of(archived, None), of(None, Some("done"))] {
            check(filter, alter.clone(), Err(Contradiction::AlterOfStarted));
        }
        check(of(None, None), Change::Cancel, Ok((None, false)));
        check(of(running, None), Change::Cancel, Ok((running, false)));
        check(of(archived, None), Change::Cancel, Err(Contradiction::CancelOfArchived));
        check(of(None, Some("done")), Change::Cancel, Err(Contradiction::CancelOfArchived));
        check(of(None, None), Change::Delete, Ok((archived, false)));
        check(of(scheduled, None), Change::Delete, Err(Contradiction::DeleteOfUnfinished));
    }

    #[test]
    fn a_job_that_waits_for_another_one_keeps_its_date() {
        let step = |at| {
            let document = doc! {
                "_id": bson::oid::ObjectId::new(), "locked": false, "group": "g", "workable": { "class": "c" }, "unique_after": "k",
                "scheduled_at": bson::DateTime::from_millis(*DUE_MS.end()),
            };
            let document = RawDocumentBuf::try_from(&document).expect("a document");
            let priority = Priority::new(9);
            step_of_alteration(&Alteration::new(priority, None, at).expect("valid"), false, document).map(drop)
        };
        assert_eq!(step(Some(Instant::UNIX_EPOCH)), Err(Refusal::WaitsForAnother { key: "k".into() }));
        assert_eq!(step(None), Ok(()));
    }

    #[test]
    fn new_values_are_checked_before_a_job_is_read() {
        let new = |group: Option<&str>, at| Alteration::new(None, group.map(Into::into), at).map(drop);
        assert_eq!(new(None, None), Err(InvalidAlteration::Nothing));
        assert_eq!(new(Some(""), None), Err(InvalidAlteration::Group("is empty".into())));
        assert_eq!(new(None, Some(Instant::MAX_UTC)), Err(InvalidAlteration::Date));
        assert_eq!((new(Some("g"), None), new(None, Some(Instant::UNIX_EPOCH))), (Ok(()), Ok(())));
    }

    #[test]
    fn a_filter_that_no_job_can_match_is_refused() {
        let at = |ms| Instant::from_timestamp_millis(ms);
        let period = |since, until| JobFilter { since, until, ..JobFilter::default() }.check();
        assert_eq!(period(at(2), at(2)), Err(Contradiction::EmptyPeriod));
        assert_eq!((period(at(1), at(2)), period(at(2), None), period(None, at(1))), (Ok(()), Ok(()), Ok(())));
        let done = JobFilter { why: Some("done".into()), message: Some("x".into()), ..JobFilter::default() };
        assert_eq!(done.check(), Err(Contradiction::DoneAndFailed));
        let running = JobFilter { state: Some(StateFilter::Running), why: Some("gave-up".into()), ..JobFilter::default() };
        assert_eq!(running.check(), Err(Contradiction::WhyOutsideOfTheArchive));
    }
}
