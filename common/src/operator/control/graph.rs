//! Changes of whole graphs: cancel all jobs that are not finished, and enqueue again what did not succeed.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use bson::{Document, oid::ObjectId};

use super::{
    BATCH, BATCH_BYTES, Change, Changed, Control, Refusal, Revision,
    again::again,
    operations::{Retrial, RetryNote},
    patiently, patiently_with,
};
use crate::{
    base::{GraphId, Instant, JobId, chain, pause},
    enqueue::{
        NewJob,
        edges::{check_edges, parents_first},
        invalid_graph::InvalidGraph,
    },
    graphs::GraphJob,
    hints::Hint,
    job::{Edge, FinishReason, Job, JobState, Stage, StoredJob, edges_of},
    mongo::{Batches, StoreError, cut},
};

/// Maximum number of passes of a cancellation. Running jobs may add jobs to their graph meanwhile.
const PASSES: u32 = 5;
/// The second pass waits for this time, and each further one longer by it, if a job has changed between each read and write.
const AGAIN_AFTER: Duration = Duration::from_millis(200);

impl Control {
    /// Cancels all jobs of a graph that are not finished. Those that wait come first, so that no job starts because of the end of another.
    ///
    /// # Errors
    /// When MongoDB cannot be used. A repeated call continues.
    pub async fn cancel_graph(&mut self, graph: GraphId) -> Result<Vec<(JobId, Changed)>, StoreError> {
        let mut outcomes: Vec<(JobId, Changed)> = Vec::new();
        if !self.has_jobs().await? {
            return Ok(outcomes);
        }
        for pass in 0..PASSES {
            // A job that was started or rescheduled with each attempt is tried again a little later.
            let before = outcomes.len();
            outcomes.retain(|(_, changed)| *changed != Changed::Refused(Refusal::KeepsChanging));
            if outcomes.len() < before {
                pause(AGAIN_AFTER * pass).await;
            }
            let jobs = patiently(|| self.store.graph(graph)).await?;
            let done: HashSet<JobId> = outcomes.iter().map(|(job, _)| *job).collect();
            let (open, retrying): (Vec<_>, Vec<_>) =
                jobs.iter().filter(|job| job.is_open() && !done.contains(&job.id)).partition(|job| !job.is_retrying);
            let is_all_retried = retrying.is_empty();
            if !is_all_retried && !self.dry_run {
                // A retry that was not completed.
                let retrying: Vec<JobId> = retrying.iter().map(|job| job.id).collect();
                patiently(|| self.store.end_retry(&retrying, None)).await?;
            }
            let (waiting, others): (Vec<_>, Vec<_>) = open.into_iter().partition(|job| job.state == Stage::Waits);
            // A portion of the retry may have come between the read and its end.
            if waiting.is_empty() && others.is_empty() && (is_all_retried || self.dry_run) {
                break;
            }
            for part in [waiting, others] {
                let ids: Vec<JobId> = part.iter().map(|job| job.id).collect();
                outcomes.extend(self.change(&Change::Cancel, &ids).await?);
            }
        }
        Ok(outcomes)
    }

    /// Enqueues again the jobs of a graph that failed or were cancelled, each under a new id, with edges between the new jobs. Jobs that are
    /// done are not repeated: their results remain the inputs of those that wait for them. A job that was enqueued again before is left
    /// alone.
    ///
    /// The jobs are read and enqueued in portions, parents first, each portion in one transaction. Until the last one the graph has not ended
    /// ([`GraphJob::is_retrying`]). A cancellation of the graph, or another retry that begins with the same last job, ends this one between two
    /// portions ([`Refusal::GivenUp`]).
    ///
    /// # Errors
    /// When MongoDB cannot be used. A repeated call enqueues the jobs that are left.
    pub async fn retry_graph(&mut self, graph: GraphId) -> Result<Vec<(JobId, Changed)>, StoreError> {
        if !self.has_jobs().await? {
            return Ok(Vec::new());
        }
        let (mut outcomes, mut marked): (BTreeMap<JobId, Changed>, HashSet<JobId>) = Default::default();
        let mut begun = Begun { retry: ObjectId::new(), notes: Vec::new(), is_given_up: false };
        let (mut before, mut fruitless) = (usize::MAX, 0);
        // Those that fail again meanwhile are not among them.
        let mut wanted: Option<HashSet<JobId>> = None;
        // Each pass but the last one has lost a job to another process.
        loop {
            let jobs = patiently(|| self.store.graph(graph)).await?;
            marked.extend(jobs.iter().filter(|job| job.is_retrying).map(|job| job.id));
            let failed: HashSet<JobId> = jobs.iter().filter(|job| job.is_to_repeat()).map(|job| job.id).collect();
            let wanted = wanted.get_or_insert_with(|| failed.clone());
            let left = |job: &JobId| failed.contains(job) && wanted.contains(job) && !outcomes.contains_key(job);
            let left: Vec<JobId> = jobs.iter().map(|job| job.id).filter(left).collect();
            if left.is_empty() {
                break;
            }
            if left.len() >= before {
                // What another process has done may not be visible yet.
                fruitless += 1;
                if fruitless == PASSES {
                    break;
                }
                pause(AGAIN_AFTER * fruitless).await;
            }
            before = left.len();
            self.retry_these(Repetition::new(graph, &jobs, &left), left, &mut outcomes, &mut begun).await?;
            if begun.is_given_up {
                break;
            }
        }
        let refused = |job: &&JobId| matches!(outcomes.get(*job), Some(Changed::Refused(_)));
        let marked: Vec<JobId> = marked.iter().filter(refused).copied().collect();
        let why = if begun.is_given_up { Refusal::GivenUp } else { Refusal::KeepsChanging };
        let lost = wanted.into_iter().flatten().filter(|job| !outcomes.contains_key(job)).collect::<Vec<_>>();
        outcomes.extend(lost.into_iter().map(|job| (job, Changed::Refused(why.clone()))));
        if !self.dry_run {
            // Those of interrupted retries at jobs that cannot be repeated, and its own.
            for (jobs, retry) in [(marked, None), (begun.notes, Some(begun.retry))] {
                if !jobs.is_empty() {
                    patiently(|| self.store.end_retry(&jobs, retry)).await?;
                }
            }
        }
        Ok(outcomes.into_iter().collect())
    }

    /// One pass. It ends early if another process has enqueued one of the jobs again: the edges of the others then lead to the job of that
    /// process.
    async fn retry_these(
        &mut self,
        mut repetition: Repetition<'_>,
        jobs: Vec<JobId>,
        outcomes: &mut BTreeMap<JobId, Changed>,
        begun: &mut Begun,
    ) -> Result<(), StoreError> {
        let (mut jobs, followed) = match repetition.parents_first(&jobs) {
            Ok(order) => order,
            Err(problem) => {
                outcomes.extend(jobs.into_iter().map(|job| (job, Changed::Refused(Refusal::Unstorable(problem.to_string())))));
                return Ok(());
            }
        };
        // The job with the note was the last one of more jobs, so none of these waits for it.
        let noted = begun.notes.last().copied().filter(|noted| jobs.contains(noted));
        if let Some(noted) = noted {
            jobs.retain(|job| *job != noted);
            jobs.push(noted);
        }
        let Some(last) = jobs.last().copied() else { return Ok(()) };
        let note = RetryNote { last, retry: begun.retry };
        let sizes = patiently(|| self.store.sizes_by_id(&jobs)).await?;
        let portions = cut(jobs, BATCH, BATCH_BYTES, |job| sizes.get(job).copied().unwrap_or(BATCH_BYTES / BATCH));
        // Between the portions, and after those of an earlier pass, the graph is open.
        let mut needs_note = portions.len() > 1 || !begun.notes.is_empty();
        let mut has_note = noted.is_some();
        let mut portions = Batches::new(portions);
        while let Some(mut portion) = portions.next() {
            if needs_note && !has_note && !self.dry_run {
                begun.notes.push(last);
                if !patiently(|| self.store.begin_retry(note)).await? {
                    return Ok(());
                }
                has_note = true;
            }
            let (retrials, reasons) = self.retrials(&portion, &followed, &mut repetition, outcomes).await?;
            portion.retain(|job| repetition.new.contains_key(job));
            let again = |enqueued: Option<&HashSet<JobId>>| {
                let new = |retrial: &Retrial| enqueued.map(|_| retrial.new);
                let all = retrials.iter().zip(reasons).filter(|(retrial, _)| enqueued.is_none_or(|jobs| jobs.contains(&retrial.job)));
                all.map(|(retrial, why)| (retrial.job, Changed::EnqueuedAgain { new: new(retrial), why })).collect::<Vec<_>>()
            };
            if self.dry_run || retrials.is_empty() {
                outcomes.extend(again(None));
                continue;
            }
            match self.enqueue_portion(&retrials, has_note.then_some(note)).await {
                Ok(None) => {
                    begun.is_given_up = true;
                    return Ok(());
                }
                Ok(Some(enqueued)) => {
                    outcomes.extend(again(Some(&enqueued)));
                    if enqueued.len() < retrials.len() {
                        return Ok(());
                    }
                }
                Err(error) if error.is_transient() => return Err(error),
                Err(error) => {
                    // One of them is refused. The halves are two transactions.
                    needs_note = true;
                    if let Some(job) = portions.halve(portion) {
                        repetition.refuse(job, Refusal::Unstorable(chain(&error)), outcomes);
                    }
                }
            }
        }
        Ok(())
    }

    /// Those of these jobs that can be repeated, and the finish reason of each. The others are refused.
    async fn retrials(
        &self,
        portion: &[JobId],
        followed: &HashSet<JobId>,
        repetition: &mut Repetition<'_>,
        outcomes: &mut BTreeMap<JobId, Changed>,
    ) -> Result<(Vec<Retrial>, Vec<FinishReason>), StoreError> {
        let mut found = patiently(|| self.store.jobs_by_id(portion)).await?;
        let (mut retrials, mut reasons) = (Vec::new(), Vec::new());
        for job in portion {
            let stored = found.remove(job).ok_or(Refusal::Unknown);
            match stored.and_then(|stored| repetition.of(stored, followed.contains(job), self.store.now()).map_err(Refusal::Unstorable)) {
                Ok((why, document)) => {
                    retrials.push(Retrial { job: *job, retried_as: None, new: repetition.new[job], document: Arc::new(document) });
                    reasons.push(why);
                }
                Err(refusal) => repetition.refuse(*job, refusal, outcomes),
            }
        }
        Ok((retrials, reasons))
    }

    /// Enqueues these jobs in one transaction. Returns those that no other process has enqueued again; `None`, if the retry is given up.
    async fn enqueue_portion(&mut self, retrials: &[Retrial], note: Option<RetryNote>) -> Result<Option<HashSet<JobId>>, StoreError> {
        let store = &self.store;
        let enqueued = patiently_with(&mut self.session, |session| async move {
            let enqueued = store.retry_all_if_archived(session, retrials, note).await;
            (session, enqueued)
        });
        let enqueued = enqueued.await?;
        if let Some(enqueued) = &enqueued {
            let these = || retrials.iter().filter(|retrial| enqueued.contains(&retrial.job));
            let groups = these().filter_map(|new| new.document.get_str("group").ok().map(str::to_owned)).collect::<HashSet<_>>();
            store.announce_jobs(groups).await;
            store.announce_hint(Hint::waiting(these().map(|retrial| retrial.new).collect())).await;
        }
        Ok(enqueued)
    }
}

/// What a retry has noted at jobs.
struct Begun {
    retry: ObjectId,
    /// The jobs that have got its note.
    notes: Vec<JobId>,
    is_given_up: bool,
}

/// The new jobs of one pass. A job that is refused is taken out of it: those that wait for it wait for the old one, which has failed.
struct Repetition<'a> {
    graph: GraphId,
    known: HashMap<JobId, &'a GraphJob>,
    new: HashMap<JobId, JobId>,
}

impl<'a> Repetition<'a> {
    fn refuse(&mut self, job: JobId, refusal: Refusal, outcomes: &mut BTreeMap<JobId, Changed>) {
        self.new.remove(&job);
        outcomes.insert(job, Changed::Refused(refusal));
    }

    fn new(graph: GraphId, known: &'a [GraphJob], jobs: &[JobId]) -> Self {
        let known = known.iter().map(|job| (job.id, job)).collect();
        Self { graph, known, new: jobs.iter().map(|job| (*job, JobId::new())).collect() }
    }

    /// These jobs in an order in which each comes after those that it waits for, and those of them that others wait for.
    fn parents_first(&self, jobs: &[JobId]) -> Result<(Vec<JobId>, HashSet<JobId>), InvalidGraph> {
        let index: HashMap<JobId, usize> = jobs.iter().enumerate().map(|(index, job)| (self.new[job], index)).collect();
        let of = |job: &JobId| self.edges(&self.known[job].waits_for).iter().filter_map(|edge| index.get(&edge.job).copied()).collect();
        let parents: Vec<Vec<usize>> = jobs.iter().map(of).collect();
        let order = parents_first(&parents).map_err(|index| InvalidGraph::Cycle { job: jobs[index] })?;
        Ok((order.into_iter().map(|index| jobs[index]).collect(), parents.into_iter().flatten().map(|index| jobs[index]).collect()))
    }

    /// These edges, to the jobs that stand for the old ones now.
    fn edges(&self, edges: &[Edge]) -> Vec<Edge> {
        let mut seen = HashSet::new();
        let now = edges.iter().flat_map(|edge| self.present(edge.job).into_iter().map(move |job| Edge { job, ..*edge }));
        now.filter(|edge| seen.insert(edge.job)).collect()
    }

    /// The jobs that stand for a job now: its repetition, or the jobs that it became, or itself.
    fn present(&self, job: JobId) -> Vec<JobId> {
        let (mut present, mut left, mut seen) = (Vec::new(), vec![job], HashSet::new());
        while let Some(job) = left.pop() {
            if !seen.insert(job) {
                continue;
            }
            match (self.new.get(&job), self.known.get(&job)) {
                (Some(new), _) => present.push(*new),
                (None, Some(GraphJob { retried_as: Some(next), .. })) => left.push(*next),
                (None, Some(GraphJob { continued_as, .. })) if !continued_as.is_empty() => left.extend(continued_as.iter().rev()),
                (None, _) => present.push(job),
            }
        }
        present
    }

    /// The new document of a job, with its edges to the new jobs, and the finish reason of the old one.
    fn of(&self, stored: StoredJob, is_followed: bool, now: Instant) -> Result<(FinishReason, Document), String> {
        let edges = stored.document.get("waits_for").ok().flatten().and_then(|edges| edges.try_into().ok());
        let edges = edges_of(edges.as_ref()).map_err(|problem| problem.to_string())?;
        let job = Job::try_from(stored.document).map_err(|(_, error)| error.to_string())?;
        let why = match &job.state {
            JobState::Archived { why } => why.clone(),
            JobState::Waiting { .. } | JobState::Locked { .. } => return Err("it is not finished any more".into()),
        };
        let edges = self.edges(&edges);
        // Also by jobs that are refused now, and repeated by a later retry.
        let is_followed = is_followed || job.is_followed;
        let id = self.new[&job.id];
        let job: NewJob = again(job, &Revision::default())?.with_id(id).in_graph(self.graph).waits_for_all(edges.iter().copied());
        let (_, mut document) = job.into_document(now).map_err(|error| error.to_string())?;
        check_edges(&document, &edges).map_err(|problem| problem.to_string())?;
        if is_followed {
            document.insert("followed", true);
        }
        Ok((why, document))
    }
}
