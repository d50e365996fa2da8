//! [`Graph`]: new jobs that wait for each other.

use mongodb::ClientSession;

use crate::{
    base::{GraphId, JobId},
    enqueue::{EnqueueError, Enqueued, NewJob},
    job::Edge,
    mongo::Client,
};

/// New jobs with edges between them, which are enqueued whole or not at all. The ids of its jobs are fixed when they are added. So a call
/// with an unknown outcome can be repeated with a clone: a graph that exists is not enqueued a second time.
#[derive(Clone, Debug)]
#[must_use = "a graph does nothing until it is enqueued"]
pub struct Graph {
    id: GraphId,
    jobs: Vec<NewJob>,
}

impl Default for Graph {
    fn default() -> Self {
        Self::new()
    }
}

impl Graph {
    /// An empty graph.
    pub fn new() -> Self {
        Self::existing(GraphId::new())
    }

    /// Further jobs for a graph that exists, for example that of a running job.
    pub fn existing(id: GraphId) -> Self {
        Self { id, jobs: Vec::new() }
    }

    /// The id of the graph: all its jobs have it in their field `graph`.
    pub fn id(&self) -> GraphId {
        self.id
    }

    /// Adds a job, with the edges that it has ([`NewJob::waits_for`]). Returns its id, for the edges of other jobs.
    pub fn add(&mut self, job: NewJob) -> JobId {
        let mut job = job.in_graph(self.id);
        let id = job.fix_id();
        self.jobs.push(job);
        id
    }

    /// Adds jobs that run in parallel.
    pub fn group(&mut self, jobs: impl IntoIterator<Item = NewJob>) -> Vec<JobId> {
        jobs.into_iter().map(|job| self.add(job)).collect()
    }

    /// Adds a job that runs when all these jobs are done. Their results are its inputs, in this order.
    pub fn when_all(&mut self, jobs: impl IntoIterator<Item = JobId>, then: NewJob) -> JobId {
        self.add(then.waits_for_all(jobs))
    }

    /// Adds jobs of which each runs when the one before it is done. The result of each is the input of the next. Returns their ids.
    pub fn pipeline(&mut self, stages: impl IntoIterator<Item = NewJob>) -> Vec<JobId> {
        let mut ids: Vec<JobId> = Vec::new();
        for stage in stages {
            let stage = stage.waits_for_all(ids.last().copied().map(Edge::done));
            ids.push(self.add(stage));
        }
        ids
    }

    /// Adds a job for each value and one that runs when all of them are done: map and reduce.
    pub fn map_reduce<T>(&mut self, values: impl IntoIterator<Item = T>, map: impl FnMut(T) -> NewJob, reduce: NewJob) -> JobId {
        let mapped = self.group(values.into_iter().map(map));
        self.when_all(mapped, reduce)
    }

    /// The jobs, in the order in which they were added.
    pub fn jobs(&self) -> &[NewJob] {
        &self.jobs
    }

    /// The number of jobs.
    pub fn len(&self) -> usize {
        self.jobs.len()
    }

    /// Whether there is no job.
    pub fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    /// Enqueues all jobs in one transaction, with one result for each job in the order in which they were added.
    ///
    /// # Errors
    /// [`EnqueueError`]; then nothing is enqueued. After a [`StoreError`](crate::mongo::StoreError) the outcome may be unknown: repeat the call
    /// with a clone of the graph.
    pub async fn enqueue(self, client: &Client) -> Result<Vec<Enqueued>, EnqueueError> {
        client.enqueue_many(self.jobs).await
    }

    /// Enqueues all jobs in the caller's transaction. See [`NewJob::enqueue_in`].
    ///
    /// # Errors
    /// As for [`NewJob::enqueue_in`].
    pub async fn enqueue_in(self, client: &Client, session: &mut ClientSession) -> Result<Vec<Enqueued>, EnqueueError> {
        client.enqueue_many_in(session, self.jobs).await
    }
}
