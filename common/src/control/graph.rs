//! Changes of whole graphs: cancel all jobs that are not finished, and enqueue again what did not succeed.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use bson::Document;

use super::{
    Control,
    again::again,
    change::{Change, Changed, Refusal},
    patience::Patience,
    revision::Revision,
};
use crate::{
    enqueue::NewJob,
    graphs::{self, Edge, GraphJob, GraphState, NOT_NEEDED, edges_of},
    ids::{GraphId, JobId},
    job::Job,
    shutdown::pause,
    store::{Hint, Recorded, Retrial, StoreError, StoredJob},
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
        for pass in 0..PASSES {
            // A job that was started or rescheduled with each attempt is tried again a little later.
            let before = outcomes.len();
            outcomes.retain(|(_, changed)| *changed != Changed::Refused(Refusal::KeepsChanging));
            if outcomes.len() < before {
                pause(AGAIN_AFTER * pass).await;
            }
            let patience = Patience::new();
            let jobs = loop {
                match self.store.graph(graph).await {
                    Err(error) if patience.allows(&error).await => {}
                    jobs => break jobs?,
                }
            };
            let done: HashSet<JobId> = outcomes.iter().map(|(job, _)| *job).collect();
            let open = jobs.iter().filter(|job| job.state.is_open() && !done.contains(&job.id));
            let (waiting, others): (Vec<_>, Vec<_>) = open.partition(|job| job.state == GraphState::Waits);
            if waiting.is_empty() && others.is_empty() {
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
    /// # Errors
    /// When MongoDB cannot be used. A repeated call recognises the jobs that were enqueued.
    pub async fn retry_graph(&mut self, graph: GraphId) -> Result<Vec<(JobId, Changed)>, StoreError> {
        let jobs = self.store.graph(graph).await?;
        let is_failed = |state: &GraphState| matches!(state, GraphState::Failed { .. } | GraphState::Cancelled);
        let is_needed = |failure: &Option<(String, String)>| failure.as_ref().is_none_or(|(class, _)| class != NOT_NEEDED);
        let failed = jobs.iter().filter(|job| is_failed(&job.state) && is_needed(&job.failure));
        let new: HashMap<JobId, JobId> = failed.map(|job| (job.id, JobId::new())).collect();
        let ids: Vec<JobId> = new.keys().copied().collect();
        let (mut retrials, mut outcomes, mut documents) = (Vec::new(), Vec::new(), Vec::new());
        let known: HashMap<JobId, &GraphJob> = jobs.iter().map(|job| (job.id, job)).collect();
        for (id, stored) in self.store.jobs_by_id(&ids).await? {
            match repeated(stored, graph, &new, &known, self.store.now()) {
                Ok((why, document)) => {
                    retrials.push((id, why));
                    documents.push(document);
                }
                Err(problem) => outcomes.push((id, Changed::Refused(Refusal::Unstorable(problem)))),
            }
        }
        if let Err(problem) = graphs::connect(&mut documents) {
            let refused = |(id, _)| (id, Changed::Refused(Refusal::Unstorable(problem.to_string())));
            return Ok(outcomes.into_iter().chain(retrials.into_iter().map(refused)).collect());
        }
        if self.dry_run {
            outcomes.extend(retrials.into_iter().map(|(id, why)| (id, Changed::EnqueuedAgain { new: None, why })));
            return Ok(outcomes);
        }
        let retrial = |((id, _), document): (&(JobId, _), Document)| Retrial {
            job: *id,
            retried_as: None,
            new: new[id],
            document: Arc::new(document),
        };
        let batch: Vec<Retrial> = retrials.iter().zip(documents).map(retrial).collect();
        let groups: Vec<String> = batch.iter().filter_map(|new| new.document.get_str("group").ok().map(str::to_owned)).collect();
        let recorded = if batch.is_empty() { Vec::new() } else { self.store.retry_if_archived(&mut self.session, &batch).await? };
        outcomes.extend(retrials.into_iter().zip(recorded).map(|((id, why), recorded)| match recorded {
            Recorded::Yes => (id, Changed::EnqueuedAgain { new: Some(new[&id]), why }),
            Recorded::ClaimLost | Recorded::Refused => (id, Changed::Refused(Refusal::KeepsChanging)),
        }));
        self.store.announce_jobs(groups).await;
        self.store.announce_hint(Hint::waiting(new.into_values().collect())).await;
        Ok(outcomes)
    }
}

/// The jobs that stand for a job now: its repetition, or the jobs that it became, or itself.
fn present(job: JobId, new: &HashMap<JobId, JobId>, known: &HashMap<JobId, &GraphJob>) -> Vec<JobId> {
    let (mut present, mut left, mut seen) = (Vec::new(), vec![job], HashSet::new());
    while let Some(job) = left.pop() {
        if !seen.insert(job) {
            continue;
        }
        match (new.get(&job), known.get(&job)) {
            (Some(new), _) => present.push(*new),
            (None, Some(GraphJob { retried_as: Some(next), .. })) => left.push(*next),
            (None, Some(GraphJob { continued_as, .. })) if !continued_as.is_empty() => left.extend(continued_as.iter().rev()),
            (None, _) => present.push(job),
        }
    }
    present
}

/// The new document of a job, with its edges to the new jobs, and the finish reason of the old one.
fn repeated(
    stored: StoredJob,
    graph: GraphId,
    new: &HashMap<JobId, JobId>,
    known: &HashMap<JobId, &GraphJob>,
    now: crate::Instant,
) -> Result<(crate::FinishReason, Document), String> {
    let edges = stored.document.get("waits_for").ok().flatten().and_then(|edges| edges.try_into().ok());
    let edges = edges_of(edges.as_ref()).map_err(|problem| problem.to_string())?;
    let mut seen = HashSet::new();
    let edges: Vec<Edge> = edges
        .into_iter()
        .flat_map(|edge| present(edge.job, new, known).into_iter().map(move |job| Edge { job, ..edge }))
        .filter(|edge| seen.insert(edge.job))
        .collect();
    let job = Job::try_from(stored.document).map_err(|(_, error)| error.to_string())?;
    let why = match &job.state {
        crate::job::JobState::Archived { why } => why.clone(),
        crate::job::JobState::Scheduled { .. } | crate::job::JobState::Started { .. } => return Err("it is not finished any more".into()),
    };
    let id = new[&job.id];
    let job: NewJob = again(job, &Revision::default())?.with_id(id).in_graph(graph).waits_for_all(edges);
    job.into_document(now).map(|(_, document)| (why, document)).map_err(|error| error.to_string())
}
