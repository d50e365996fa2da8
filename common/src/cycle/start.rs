//! Starts jobs: reads unlocked jobs, locks them with one guarded command, and reads which jobs a start has locked.
//!
//! [`Execution`] defines the fields that a start writes: `start_command` stores them, and [`Start::mark_started`] sets them in the job
//! that was read.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
    time::Instant as Monotonic,
};

use bson::{Bson, Document, RawDocumentBuf, doc};
use futures_util::TryStreamExt;
use mongodb::options::ReadConcern;

use crate::{
    base::{Instant, JobId, StartId, WorkerId},
    job::{Claim, CorruptJob, Execution, IfWorkerDies, Job, JobState, Permit},
    mongo::{CALL_LIMIT, Readable, Store, StoreError, call, id_of, never_started, raw_id_of, start_of},
};

/// Maximum number of due dates with one update statement each. Jobs with more dates share one statement with a pipeline that copies each
/// job's date. It costs a third more per job, but less than many statements.
const MOST_DATES: usize = 8;

/// One bulk start: the data that is written into every job that it locks.
#[derive(Clone, Debug)]
pub struct Start {
    /// New for each bulk start: the fencing token of every outcome.
    pub id: StartId,
    /// The worker that will hold the jobs.
    pub worker: WorkerId,
    /// Machine of the worker.
    pub hostname: String,
    /// Process of the worker.
    pub pid: i32,
    /// End of the worker's lease, by the server's clock: MongoDB refuses the start after it.
    pub lease_until: Instant,
    /// The time of the start, by the estimated server clock.
    pub now: Instant,
}

impl Start {
    /// The execution that begins with this start, of a job that was due at `due`.
    fn execution(&self, due: Instant, verdict: IfWorkerDies, permit: Option<&Permit>) -> Execution {
        Execution {
            scheduled_at: Some(due),
            started_at: Some(due.max(self.now)),
            worker: Some(self.worker),
            start: Some(self.id),
            if_worker_dies: Some(verdict),
            group_permit: permit.filter(|permit| permit.is_of_group()).map(|_| true),
            hostname: Some(self.hostname.clone()),
            pid: Some(self.pid.into()),
            ..Execution::default()
        }
    }

    /// The execution as stored.
    fn stored_execution(&self, due: Instant, verdict: IfWorkerDies, permit: Option<&Permit>) -> Document {
        let raw = self.execution(due, verdict, permit).to_raw();
        let mut execution = Document::try_from(&*raw).expect("an execution is made of dates, ids, texts and numbers");
        // As in earlier releases, the pid has 32 bits at the start and 64 bits at the end.
        execution.insert("pid", self.pid);
        execution
    }

    /// Makes the changes in a job value that [`Store::start_if_unlocked`] has made in its document.
    pub fn mark_started(&self, job: &mut Job, verdict: IfWorkerDies, permit: Option<&Permit>) {
        let JobState::Waiting { at } = job.state else { return };
        job.attempts += 1;
        job.last_execution = Some(self.execution(at, verdict, permit));
    }
}

/// A job to be started, with the values that the decision to start it relied on.
#[derive(Clone, Debug)]
pub struct ToStart {
    /// The job.
    pub job: JobId,
    /// Its group when it was read: the limit of the group admitted it.
    pub group: String,
    /// Its number of starts when it was read.
    pub attempts: u32,
    /// Its due date when it was read.
    pub due: Instant,
    /// The retry policy's verdict for a death in this start.
    pub if_worker_dies: IfWorkerDies,
    /// The permit of a limited job.
    pub permit: Option<Permit>,
    /// Further conditions, for the few jobs that have them.
    pub conditions: Conditions,
}

/// The conditions of a start that only some jobs have. A statement for other jobs does not contain them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Conditions {
    /// The job has an `expires_at`, which must not be over.
    expires: bool,
    /// How often the content of a unique job was replaced before it was read.
    replaced: Option<u32>,
    /// The job is started although it is not due yet.
    early: bool,
}

impl Conditions {
    /// For a job that may be started before its date. The start still repeats that date. In its execution, the job was due at the start.
    #[must_use]
    pub fn early(self) -> Self {
        Self { early: true, ..self }
    }
}

impl From<&Job> for Conditions {
    fn from(job: &Job) -> Self {
        Self { expires: job.expires_at.is_some(), replaced: job.replaced, early: false }
    }
}

impl Store {
    /// The complete documents of those of these jobs that are unlocked, from the primary. A document that is not a valid job is returned
    /// with its error. Over a slow connection, only the jobs that arrive within half of the time limit of a call are returned. The others
    /// stay due.
    ///
    /// Filter: id, unlocked. Index: `_id`. Invariant: I9, a malformed document does not stop other jobs. A local read is enough: when a
    /// majority has acknowledged the start, it also has the earlier writes.
    ///
    /// # Errors
    /// When MongoDB is unreachable, or when no job arrives within the time limit of a call. The caller must then read fewer jobs
    /// ([`Store::sizes_of_unlocked`]).
    pub async fn unlocked(&self, jobs: &[JobId]) -> Result<Vec<Result<Arc<Job>, (JobId, RawDocumentBuf, CorruptJob)>>, StoreError> {
        let scheduled = self.scheduled.clone_with_type::<RawDocumentBuf>();
        let filter = doc! { "_id": { "$in": jobs.to_vec() }, "locked": false };
        let found: Vec<RawDocumentBuf> = call("unlocked", async move {
            let until = Monotonic::now() + CALL_LIMIT / 2;
            let mut cursor = scheduled.find(filter).batch_size(10_000).read_concern(ReadConcern::local()).await?;
            let mut found = Vec::new();
            // MongoDB sends 16 MB at a time. The documents that have arrived are read without a wait.
            while let Ok(next) = tokio::time::timeout(until.saturating_duration_since(Monotonic::now()), cursor.try_next()).await {
                match next? {
                    Some(document) => found.push(document),
                    None => break,
                }
            }
            Ok(found)
        })
        .await?;
        let decode = |document: RawDocumentBuf| {
            let id = raw_id_of(&document)?;
            Some(Job::try_from(document).map(Arc::new).map_err(|(document, error)| (id, document, error)))
        };
        Ok(found.into_iter().filter_map(decode).collect())
    }

    /// The sizes in bytes of those of these jobs that are unlocked, smallest first. They are needed to read jobs in portions over a slow
    /// connection.
    ///
    /// Filter: id, unlocked. Index: `_id`. Invariant: none, [`Store::unlocked`] repeats the filter.
    pub async fn sizes_of_unlocked(&self, jobs: &[JobId]) -> Result<Vec<(JobId, usize)>, StoreError> {
        let scheduled = self.scheduled.clone();
        let filter = doc! { "_id": { "$in": jobs.to_vec() }, "locked": false };
        let found: Vec<Document> = call("sizes_of_unlocked", async move {
            let size = doc! { "size": { "$bsonSize": "$$ROOT" } };
            scheduled.find(filter).projection(size).batch_size(10_000).read_concern(ReadConcern::local()).await?.readable().await
        })
        .await?;
        let size = |document: &Document| document.get_i32("size").ok().and_then(|size| usize::try_from(size).ok()).unwrap_or_default();
        let mut sizes: Vec<(JobId, usize)> = found.iter().filter_map(|document| Some((id_of(document)?, size(document)))).collect();
        sizes.sort_by_key(|(_, size)| *size);
        Ok(sizes)
    }

    /// Locks those of these jobs that are still unlocked and due, and have as many starts as when they were read. Returns a claim
    /// for each job that this start has locked.
    ///
    /// Filter: id, unlocked, same attempts, one of the groups that these jobs had, the same `scheduled_at` (if the jobs have few dates), due by
    /// the server's clock, before the end of the worker's lease by that clock, and within the interval of the permit. Of a job that expires: before its `expires_at`. Of a unique
    /// job: its content was not replaced since it was read.
    /// Update: one command, acknowledged by a majority; jobs with the same verdict, attempts, date and conditions share a statement.
    /// Index: `_id`. Invariant: I3 and I5: each start has its own id, and MongoDB refuses a start after the end of the lease. The roster holds
    /// the permits of the worker until it has left or is rescued, so a limited job needs no further condition.
    /// Loses when another start locked the job, or when it was archived. After an error the outcome is unknown: see
    /// [`Store::claims_of_starts_at_majority`]. After a reply the outcome is final: this start locks no further jobs.
    pub async fn start_if_unlocked(&self, start: &Start, jobs: &[ToStart]) -> Result<Vec<Claim>, StoreError> {
        let ids: Vec<JobId> = jobs.iter().map(|job| job.job).collect();
        if self.write("start_if_unlocked", start_command(self.scheduled.name(), start, jobs)).await? == jobs.len() {
            return Ok(ids.into_iter().map(|job| Claim { job, start: start.id }).collect());
        }
        // A majority has acknowledged the start, so no failover undoes it, and a local read of any later primary contains it.
        self.claims_of_starts_with(&HashMap::from([(start.id, ids)]), ReadConcern::local()).await
    }

    /// Those of these jobs that are locked by these starts. A majority read, because a failover may undo a start that got no reply.
    ///
    /// Filter: id, locked, this start. Index: `_id`. Invariant: I3.
    pub async fn claims_of_starts_at_majority(&self, starts: &HashMap<StartId, Vec<JobId>>) -> Result<Vec<Claim>, StoreError> {
        self.claims_of_starts_with(starts, ReadConcern::majority()).await
    }

    /// Those of these jobs that are locked by these starts, in one query. The filter has the start and not the worker. A filter by worker
    /// would also match jobs that an earlier start of this worker has locked, and these would run twice.
    ///
    /// Filter: id, locked, this start. Index: `_id`. Invariant: I3.
    pub(crate) async fn claims_of_starts_with(
        &self,
        starts: &HashMap<StartId, Vec<JobId>>,
        read_concern: ReadConcern,
    ) -> Result<Vec<Claim>, StoreError> {
        if starts.is_empty() {
            return Ok(Vec::new());
        }
        let scheduled = self.scheduled.clone();
        let of_one = |(start, jobs): (&StartId, &Vec<JobId>)| {
            doc! { "_id": { "$in": jobs.clone() }, "locked": true, "last_execution.start": start }
        };
        let filter = doc! { "$or": starts.iter().map(of_one).collect::<Vec<_>>() };
        let found: Vec<Document> = call("claims_of_starts", async move {
            scheduled.find(filter).projection(doc! { "last_execution.start": 1 }).read_concern(read_concern).await?.readable().await
        })
        .await?;
        Ok(found.iter().filter_map(|job| Some(Claim { job: id_of(job)?, start: start_of(job)? })).collect())
    }
}

/// Jobs that share a statement: they are like the first of them.
struct Alike<'a> {
    first: &'a ToStart,
    due: Option<Instant>,
    ids: Vec<JobId>,
    groups: BTreeSet<&'a str>,
}

/// What a statement contains of the permit of its jobs: its interval, and whether it is one of the group.
fn of_permit(job: &ToStart) -> (Option<(Instant, Instant)>, bool) {
    job.permit.as_ref().map_or((None, false), |permit| (permit.between, permit.is_of_group()))
}

/// One statement for each combination of verdict, number of earlier starts, conditions, interval of a permit and, if there are few, due date.
/// Usually there is only one.
fn start_command(scheduled: &str, start: &Start, jobs: &[ToStart]) -> Document {
    let dates: BTreeSet<Instant> = jobs.iter().map(|job| job.due).collect();
    // The filter of a job that is started before its date has that date in place of a comparison with the server's clock.
    let date = |job: &ToStart| (dates.len() <= MOST_DATES || job.conditions.early).then_some(job.due);
    let mut alike: Vec<Alike<'_>> = Vec::new();
    for job in jobs {
        let due = date(job);
        let is_alike = |alike: &&mut Alike<'_>| {
            let (other, date) = (alike.first, alike.due);
            (other.attempts, date, other.conditions) == (job.attempts, due, job.conditions)
                && other.if_worker_dies == job.if_worker_dies
                && of_permit(other) == of_permit(job)
        };
        match alike.iter_mut().find(is_alike) {
            Some(alike) => {
                alike.ids.push(job.job);
                alike.groups.insert(&job.group);
            }
            None => alike.push(Alike { first: job, due, ids: vec![job.job], groups: BTreeSet::from([job.group.as_str()]) }),
        }
    }
    let statement = |alike: Alike<'_>| {
        let update = alike.update(start);
        doc! { "q": alike.filter(start), "u": update, "multi": true }
    };
    doc! {
        "update": scheduled,
        "updates": alike.into_iter().map(statement).collect::<Vec<_>>(),
        "ordered": false,
        "writeConcern": { "w": "majority", "j": true },
    }
}

impl Alike<'_> {
    fn filter(self, start: &Start) -> Document {
        let Self { first: job, due, ids, groups } = self;
        // A job enqueued from another language may have no `attempts`, and no job has `replaced` until its first replacement.
        let as_read = |count: u32| {
            if count == 0 {
                never_started()
            } else {
                doc! { "$eq": count }
            }
        };
        let mut conditions = vec![doc! { "$lt": ["$$NOW", start.lease_until] }];
        if !job.conditions.early {
            // If all jobs of the statement have the same date, MongoDB compares it once and not for each job.
            let scheduled_at = due.map_or_else(|| "$scheduled_at".into(), Bson::from);
            conditions.extend([doc! { "$lte": [scheduled_at, "$$NOW"] }]);
        }
        if let Some((from, until)) = of_permit(job).0 {
            conditions.extend([doc! { "$gte": ["$$NOW", from] }, doc! { "$lte": ["$$NOW", until] }]);
        }
        if job.conditions.expires {
            conditions.extend([doc! { "$lt": ["$$NOW", "$expires_at"] }]);
        }
        let mut filter = doc! {
            "_id": { "$in": ids },
            "locked": false,
            "attempts": as_read(job.attempts),
            "group": { "$in": groups.into_iter().collect::<Vec<_>>() },
            "$expr": { "$and": conditions },
        };
        if let Some(replaced) = job.conditions.replaced {
            filter.insert("replaced", as_read(replaced));
        }
        if let Some(due) = due {
            // The update writes this date into `last_execution`, so the document must still have this date.
            filter.insert("scheduled_at", due);
        }
        filter
    }

    fn update(&self, start: &Start) -> Bson {
        let Self { first: job, due, .. } = self;
        let was_due = due.unwrap_or(start.now);
        let was_due = if job.conditions.early { was_due.min(start.now) } else { was_due };
        let mut execution = start.stored_execution(was_due, job.if_worker_dies.clone(), job.permit.as_ref());
        let set = |execution: Document| doc! { "$set": { "locked": true, "attempts": job.attempts + 1, "last_execution": execution } };
        if due.is_some() {
            return set(execution).into();
        }
        let literally = |(field, value): (String, Bson)| (field, Bson::Document(doc! { "$literal": value }));
        execution = execution.into_iter().map(literally).collect();
        execution.insert("scheduled_at", "$scheduled_at");
        execution.insert("started_at", doc! { "$max": ["$scheduled_at", start.now] });
        vec![doc! { "$unset": "last_execution" }, set(execution)].into()
    }
}
