//! The operator's changes to jobs: retry, change, cancel and delete. The same rules apply to single jobs and to bulk changes.
//!
//! Used by `recruiter jobs` and by applications that offer the same changes. Each job is read, and its current state decides the change.
//! The filter of the write repeats the conditions of the decision. A job that changed in between is read again. Every call can be repeated:
//! changes made by an interrupted call are recognised.
//!
//! | file | content |
//! |---|---|
//! | `change`, `alteration` | a change, and its outcome for one job; new values for waiting jobs |
//! | `operations` | writes the changes |
//! | `filter` | which jobs a change applies to |
//! | `step` | what is to be done with one job, decided by its document |
//! | `again`, `revision` | an archived job as a new one; its new content |
//! | `graph` | changes of whole graphs |
//! | `export` | archived jobs as lines of JSON |
//! | `patience` | how long a call is repeated |

pub(crate) mod again;
mod alteration;
mod change;
pub(crate) mod export;
mod filter;
mod graph;
pub(crate) mod operations;
mod patience;
mod revision;
mod step;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    ops::ControlFlow,
    sync::Arc,
};

use bson::Document;

use self::{
    again::again,
    operations::Retrial,
    patience::{patiently, patiently_with},
    step::{Step, revision, step, would_become},
};
pub use self::{
    alteration::{Alteration, InvalidAlteration},
    change::{Change, Changed, Refusal},
    filter::Contradiction,
    revision::Revision,
};
use super::{Match, Walk, select::JobFilter};
pub use crate::enqueue::spec::UnknownPolicies;
use crate::{
    base::{Instant, JobId, chain},
    hints::Hint,
    job::{Archival, FinishReason, Recorded},
    mongo::{Batches, Client, CommitSession, Store, StoreError, cut},
};

/// Maximum number of jobs changed together. A transaction of this size takes a fraction of a second.
const BATCH: usize = 500;
/// Maximum size of the documents that are read together, in bytes.
const BATCH_BYTES: usize = 8 * 1024 * 1024;
/// Maximum number of reads of a job that changes between each read and write.
const READS: u32 = 3;
/// Maximum number of cancellations per batch that are sent as hints. Workers find the others with their next heartbeat.
const ANNOUNCED: usize = 64;

/// The progress of a change of many jobs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
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

impl Client {
    /// Changes of jobs: retry, change, cancel and delete. In a dry run it only reports the changes that it would make.
    pub fn control(&self, dry_run: bool) -> Control {
        Control { store: self.store(), session: CommitSession::default(), dry_run }
    }
}

/// Changes jobs: [`Client::control`].
#[derive(Debug)]
pub struct Control {
    store: Store,
    session: CommitSession,
    dry_run: bool,
}

impl Control {
    /// Changes these jobs. Returns the outcome of each, in the same order.
    ///
    /// # Errors
    /// When MongoDB cannot be used. Some of the jobs may have been changed. A repeated call recognises them.
    pub async fn change(&mut self, change: &Change, jobs: &[JobId]) -> Result<Vec<(JobId, Changed)>, StoreError> {
        if !self.has_jobs().await? {
            return Ok(jobs.iter().map(|job| (*job, Changed::Refused(Refusal::Unknown))).collect());
        }
        let sizes = patiently(|| self.store.sizes_by_id(jobs)).await?;
        let found = jobs.iter().map(|job| Match { job: *job, bytes: sizes.get(job).copied().unwrap_or(BATCH_BYTES / BATCH) });
        let mut all = Vec::with_capacity(jobs.len());
        for batch in cut(found.collect(), BATCH, BATCH_BYTES, |found| found.bytes) {
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
        if !self.has_jobs().await? {
            return Ok(Report::default());
        }
        let mut walk = Walk::new(filter.clone());
        let mut report = Report { length: self.store.walk_length(&walk).await?, ..Report::default() };
        loop {
            if each(&report, &[]).is_break() {
                return Ok(Report { is_stopped: true, ..report });
            }
            let store = &self.store;
            let found = patiently_with(&mut walk, |walk| async move {
                let found = store.next_matches(walk).await;
                (walk, found)
            })
            .await?;
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

    /// Whether there can be jobs to change. Where Recruiter is not set up, `scheduled` and `archived` are an application's.
    async fn has_jobs(&self) -> Result<bool, StoreError> {
        Ok(self.dry_run || patiently(|| self.store.is_set_up()).await?)
    }

    async fn change_batch(&mut self, change: &Change, batch: &[Match]) -> Result<Vec<(JobId, Changed)>, StoreError> {
        let mut outcomes: HashMap<JobId, Changed> = HashMap::new();
        let mut left: Vec<JobId> = batch.iter().map(|found| found.job).collect();
        for _ in 0..READS {
            let now = self.store.now();
            let mut found = patiently(|| self.store.jobs_by_id(&left)).await?;
            let steps = left.iter().map(|job| match found.remove(job) {
                Some(stored) => (*job, step(change, *job, stored, now)),
                None => (*job, Step::Nothing(Changed::Refused(Refusal::Unknown))),
            });
            let steps: Vec<(JobId, Step)> = steps.collect();
            outcomes.extend(if self.dry_run {
                steps.into_iter().map(|step| would_become(change, step, now)).collect()
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
                    groups.insert(revision.settings(&job.settings).group().to_owned());
                    // A job that has halted its line runs before the others of the line.
                    let place = job.settings.halt_on_failure.then_some(job.created_at);
                    // It stays in the graph. Those that waited for the old one will wait for it, if the graph is retried.
                    let graph = job.graph.map(|graph| ("graph".to_owned(), graph.into()));
                    let followed = (job.is_followed || graph.is_some()).then(|| ("followed".to_owned(), bson::Bson::from(true)));
                    let new = again(*job, revision).and_then(|new| new.into_document(now).map_err(|error| error.to_string()));
                    let new = new.map(|(id, mut document)| {
                        document.extend(place.map(|place| ("created_at".to_owned(), place.into())));
                        document.extend(graph.into_iter().chain(followed));
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
            let due = patiently(|| self.store.hasten_if_unlocked(&jobs, now)).await?;
            outcomes.extend(due.into_iter().map(|job| (job, Changed::DueNow { instead_of: hastened[&job] })));
        }
        if let Change::Alter(alteration) = change {
            self.alter(alteration, &altered, &mut groups, now, &mut outcomes).await?;
        }
        if !deleted.is_empty() {
            patiently(|| self.store.delete_archived(&deleted)).await?;
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
            let (store, retrials) = (&self.store, &retrials);
            let recorded = patiently_with(&mut self.session, |session| async move {
                let recorded = store.retry_if_archived(session, retrials).await;
                (session, recorded)
            })
            .await;
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
        let (store, these) = (&self.store, &archivals);
        let recorded = patiently_with(&mut self.session, |session| async move {
            let recorded = store.finish(session, these).await;
            (session, recorded)
        })
        .await?;
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
        let altered = patiently(|| self.store.alter_if_unlocked(jobs, alteration.to_document())).await?;
        outcomes.extend(altered.into_iter().map(|job| (job, Changed::Altered)));
        groups.extend(alteration.settings.group.clone());
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
        let asked = patiently(|| self.store.request_cancel_if_started(jobs)).await?;
        for job in asked.iter().take(ANNOUNCED) {
            self.store.announce_hint(Hint::Cancel { job: *job }).await;
        }
        outcomes.extend(asked.into_iter().map(|job| (job, Changed::CancelRequested)));
        Ok(())
    }
}

fn unique_fields(document: &Document) -> bool {
    ["unique", "unique_while_waiting"].iter().any(|field| document.contains_key(*field))
}
