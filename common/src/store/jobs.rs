//! Every operation on the jobs in `scheduled` and `archived`, in the order of a job's life: insert, start, hand back or
//! reschedule, archive, retry, delete, prune. Together, because jobs move between them. What is to be started is found in `search`.
//!
//! Who may write a job: anybody inserts it; unlocked, only a start, a cancellation or the archiving of a document
//! that is no job (each under `locked: false`); locked, only the holder of the start, or a cleaner after its death.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    sync::Arc,
    time::Instant as Monotonic,
};

use bson::{Bson, Document, RawDocument, RawDocumentBuf, doc};
use futures_util::TryStreamExt;
use mongodb::{
    ClientSession, Collection,
    error::{Error, ErrorKind, TRANSIENT_TRANSACTION_ERROR, UNKNOWN_TRANSACTION_COMMIT_RESULT},
    options::{Hint as IndexHint, ReadConcern},
};

use super::{
    CALL_LIMIT, DUPLICATE_KEY, Store, StoreError, call,
    indexes::ARCHIVED_BY_END,
    outcome::{Archival, Guard, Recorded, Rescheduling, filter_of},
};
use crate::{
    ids::{JobId, StartId, WorkerId},
    instant::Instant,
    job::{Claim, CorruptJob, Execution, Held, IfWorkerDies, Job, JobState},
};

/// Documents in one `insert` command: the server's own limit is higher, the progress of a large import finer.
const INSERT_BATCH: usize = 1_000;
/// Jobs that one step of the sweep walks over.
const SWEEP_STEP: u64 = 5_000;
/// How often a transaction is tried again at once when MongoDB says that it was merely unlucky.
const TRANSACTION_TRIES: u32 = 5;

/// One bulk start: what is written into every job it locks.
#[derive(Clone, Debug)]
pub struct Start {
    /// Fresh for each bulk start: the fence of every outcome.
    pub id: StartId,
    /// Who will hold the jobs.
    pub worker: WorkerId,
    /// Machine of the worker.
    pub hostname: String,
    /// Process of the worker.
    pub pid: i32,
    /// By the server's clock: the start is refused later than this.
    pub lease_until: Instant,
    /// The time of the start, by the estimate of the server's clock.
    pub now: Instant,
}

impl Start {
    /// The execution that begins with this start, of a job that was due at `due`.
    fn execution(&self, due: Instant, verdict: IfWorkerDies) -> Execution {
        Execution {
            scheduled_at: Some(due),
            started_at: Some(due.max(self.now)),
            worker: Some(self.worker),
            start: Some(self.id),
            if_worker_dies: Some(verdict),
            hostname: Some(self.hostname.clone()),
            pid: Some(self.pid.into()),
            ..Execution::default()
        }
    }

    /// The same as it is stored.
    fn stored_execution(&self, due: Instant, verdict: IfWorkerDies) -> Document {
        let raw = self.execution(due, verdict).to_raw();
        let mut execution = Document::try_from(&*raw).expect("an execution is made of dates, ids, texts and numbers");
        // 32 bits at the start, 64 at the end: as it has always been stored.
        execution.insert("pid", self.pid);
        execution
    }

    /// Changes a job that was read as [`Store::start_if_unlocked`] has changed its document since.
    pub fn mark_started(&self, job: &mut Job, verdict: IfWorkerDies) {
        let JobState::Scheduled { at } = job.state else { return };
        job.attempts += 1;
        job.last_execution = Some(self.execution(at, verdict));
    }
}

/// A job to be started, with what the decision to start it was made on.
#[derive(Clone, Debug)]
pub struct ToStart {
    /// Which.
    pub job: JobId,
    /// Starts it had when it was read.
    pub attempts: u32,
    /// When it was due, then.
    pub due: Instant,
    /// The retry policy's verdict for a death in this start.
    pub if_worker_dies: IfWorkerDies,
}

/// A session whose transactions archive jobs. Its id stands in the roster before it is used, so that a cleaner can end what
/// a killed worker left open. After a call that was never answered it is another one.
#[derive(Debug, Default)]
pub struct CommitSession(Session);

#[derive(Debug, Default)]
enum Session {
    #[default]
    Closed,
    Open(Box<ClientSession>),
    /// Without an answer: its transaction may hold jobs until MongoDB ends it, a minute later.
    GivenUp(Document),
}

impl CommitSession {
    /// Whether it is to be opened, and announced, before it is used.
    pub fn is_closed(&self) -> bool {
        !matches!(self.0, Session::Open(_))
    }
}

impl Store {
    /// Inserts new jobs; says how many were there already under their ids.
    ///
    /// Acknowledged by a majority, unordered: one bad document does not stop its neighbours.
    /// Index: `_id`. Invariant: I1, what was acknowledged is never lost.
    pub(crate) async fn insert_jobs(&self, jobs: Vec<Document>) -> Result<u64, StoreError> {
        let mut already_there = 0;
        for batch in jobs.chunks(INSERT_BATCH) {
            let (scheduled, batch) = (self.scheduled.clone(), batch.to_vec());
            match call("insert_jobs", async move { scheduled.insert_many(batch).ordered(false).await }).await {
                Ok(_) => {}
                Err(StoreError::Mongo { source, .. }) if only_known_ids(&source) => already_there += duplicates(&source),
                Err(failed) => return Err(failed),
            }
        }
        Ok(already_there)
    }

    /// Inserts new jobs as part of the caller's own transaction or session.
    ///
    /// Index: `_id`. Invariant: I1, once the caller's commit is acknowledged.
    pub(crate) async fn insert_jobs_in(&self, session: &mut ClientSession, jobs: Vec<Document>) -> Result<(), StoreError> {
        for batch in jobs.chunks(INSERT_BATCH) {
            let inserted = self.scheduled.insert_many(batch).session(&mut *session).await;
            inserted.map_err(|source| StoreError::Mongo { operation: "insert_jobs_in", source: source.into() })?;
        }
        Ok(())
    }

    /// Which of these ids are in the archive, as the primary has it: a copy that was inserted after the archiving is
    /// rolled back with it.
    ///
    /// Filter: these ids. Index: `_id`. Invariant: I2, an application's late re-send is not run again.
    pub async fn already_archived(&self, jobs: &[JobId]) -> Result<HashSet<JobId>, StoreError> {
        let archived = self.archived.clone();
        let filter = doc! { "_id": { "$in": jobs.to_vec() } };
        let found: Vec<Document> = call("already_archived", async move {
            archived.find(filter).projection(doc! { "_id": 1 }).read_concern(ReadConcern::local()).await?.try_collect().await
        })
        .await?;
        Ok(found.iter().filter_map(id_of).collect())
    }

    /// The unlocked ones of these jobs, whole, as the primary has them. A document that is no job comes with what is wrong
    /// with it. Over a slow line only those that arrive within half of a call's time: the rest stays due.
    ///
    /// Index: `_id`. Invariant: I9, a malformed document stops none of its neighbours. That a majority has them is the
    /// business of the start, whose own write is after theirs.
    ///
    /// # Errors
    /// When MongoDB is away, or not even the first of them arrive within a call's time: ask for less ([`Store::sizes_of_unlocked`]).
    pub async fn unlocked(&self, jobs: &[JobId]) -> Result<Vec<Result<Arc<Job>, (JobId, RawDocumentBuf, CorruptJob)>>, StoreError> {
        let scheduled = self.scheduled.clone_with_type::<RawDocumentBuf>();
        let filter = doc! { "_id": { "$in": jobs.to_vec() }, "locked": false };
        let found: Vec<RawDocumentBuf> = call("unlocked", async move {
            let until = Monotonic::now() + CALL_LIMIT / 2;
            let mut cursor = scheduled.find(filter).batch_size(10_000).read_concern(ReadConcern::local()).await?;
            let mut found = Vec::new();
            // What has arrived is taken without a wait. Of what has not, MongoDB sends 16 MB at a time.
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

    /// How many bytes each of these jobs has that are unlocked, the smallest first: for what does not arrive at once.
    ///
    /// Filter: id, unlocked. Index: `_id`. Invariant: none, [`Store::unlocked`] asks again.
    pub async fn sizes_of_unlocked(&self, jobs: &[JobId]) -> Result<Vec<(JobId, usize)>, StoreError> {
        let scheduled = self.scheduled.clone();
        let filter = doc! { "_id": { "$in": jobs.to_vec() }, "locked": false };
        let found: Vec<Document> = call("sizes_of_unlocked", async move {
            let size = doc! { "size": { "$bsonSize": "$$ROOT" } };
            scheduled.find(filter).projection(size).batch_size(10_000).read_concern(ReadConcern::local()).await?.try_collect().await
        })
        .await?;
        let size = |document: &Document| document.get_i32("size").ok().and_then(|size| usize::try_from(size).ok()).unwrap_or_default();
        let mut sizes: Vec<(JobId, usize)> = found.iter().filter_map(|document| Some((id_of(document)?, size(document)))).collect();
        sizes.sort_by_key(|(_, size)| *size);
        Ok(sizes)
    }

    /// Locks those of these jobs that are still unlocked, due and as often started as when they were read; returns
    /// proofs of what this start locked.
    ///
    /// Filter: id, unlocked, same attempts, due by the server's clock, and the worker's lease not over by it.
    /// Update: one command, acknowledged by a majority; statements differ by verdict only.
    /// Index: `_id`. Invariant: I3 and I5, a later start has another id, and a late one is refused by the lease.
    /// Loses when somebody else started or archived the job. After an error the outcome is unknown: see
    /// [`Store::claims_of_start`]. After an answer it is known: what was not locked by then never will be.
    pub async fn start_if_unlocked(&self, start: &Start, jobs: &[ToStart]) -> Result<Vec<Claim>, StoreError> {
        let ids: Vec<JobId> = jobs.iter().map(|job| job.job).collect();
        if self.write("start_if_unlocked", start_command(start, jobs)).await? == jobs.len() {
            return Ok(ids.into_iter().map(|job| Claim { job, start: start.id }).collect());
        }
        // A majority has acknowledged the start, so that every primary has it: nothing is missed, and nothing taken back.
        self.claims_of_starts(&HashMap::from([(start.id, ids)]), ReadConcern::local()).await
    }

    /// Which of these jobs carry these very starts, as a majority has them: a start without an answer may still be taken back.
    ///
    /// Index: `_id`. Invariant: I3.
    pub async fn claims_of_start(&self, starts: &HashMap<StartId, Vec<JobId>>) -> Result<Vec<Claim>, StoreError> {
        self.claims_of_starts(starts, ReadConcern::majority()).await
    }

    /// Which of these jobs carry these very starts, in one query. Never asks for the worker: a replayed hint would run a job twice.
    ///
    /// Filter: id, locked, this start. Index: `_id`. Invariant: I3.
    pub(super) async fn claims_of_starts(
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
        let found: Vec<Document> = call("claims_of_start", async move {
            scheduled.find(filter).projection(doc! { "last_execution.start": 1 }).read_concern(read_concern).await?.try_collect().await
        })
        .await?;
        Ok(found.iter().filter_map(|job| Some(Claim { job: id_of(job)?, start: start_of(job)? })).collect())
    }

    /// A job's document as it is, whoever has locked it.
    ///
    /// Filter: id. Index: `_id`. Invariant: none, whatever is then written has a guard of its own.
    pub(super) async fn document_of(&self, job: JobId) -> Result<Option<RawDocumentBuf>, StoreError> {
        let scheduled = self.scheduled.clone_with_type::<RawDocumentBuf>();
        call("document_of", async move { scheduled.find_one(doc! { "_id": job }).read_concern(ReadConcern::local()).await }).await
    }

    /// Deletes started jobs that turned out to be in the archive already.
    ///
    /// Filter: id, locked, this start. Index: `_id`. Invariant: I2, for an application's late re-send.
    pub async fn discard_if_claimed(&self, claims: &[Claim]) -> Result<(), StoreError> {
        let this = |claim: &Claim| doc! { "_id": claim.job, "locked": true, "last_execution.start": claim.start };
        self.discard(doc! { "$or": claims.iter().map(this).collect::<Vec<_>>() }).await
    }

    async fn discard(&self, guarded: Document) -> Result<(), StoreError> {
        let scheduled = self.scheduled.clone();
        call("discard_if_claimed", async move { scheduled.delete_many(guarded).await }).await.map(drop)
    }

    /// Which of these started jobs somebody asked to cancel.
    ///
    /// Filter: id, this start, cancellation asked for. Index: `_id`. Invariant: none, a wish is passed on.
    pub async fn cancel_requests(&self, jobs: &[JobId]) -> Result<Vec<JobId>, StoreError> {
        let scheduled = self.scheduled.clone();
        let filter = doc! { "_id": { "$in": jobs.to_vec() }, "cancel_requested_at": { "$exists": true } };
        let found: Vec<Document> =
            call("cancel_requests", async move { scheduled.find(filter).projection(doc! { "_id": 1 }).await?.try_collect().await }).await?;
        Ok(found.iter().filter_map(id_of).collect())
    }

    /// Unlocks started jobs for another attempt or as they were; says for each, in order, whether it was recorded.
    ///
    /// Filter: id, locked, this start. Update: one command for all, acknowledged by a majority.
    /// Index: `_id`. Invariant: I3, only the latest start writes the outcome; harmless to repeat.
    /// Loses when the job was rescued meanwhile.
    pub async fn reschedule_if_claimed(&self, batch: &[Rescheduling]) -> Result<Vec<Recorded>, StoreError> {
        let statement = |job: &Rescheduling| {
            let filter = doc! { "_id": job.claim.job, "locked": true, "last_execution.start": job.claim.start };
            doc! { "q": filter, "u": job.update.clone() }
        };
        let command = doc! {
            "update": "scheduled",
            "updates": batch.iter().map(statement).collect::<Vec<_>>(),
            "ordered": false,
            "writeConcern": { "w": "majority", "j": true },
        };
        if self.write("reschedule_if_claimed", command).await? == batch.len() {
            return Ok(vec![Recorded::Yes; batch.len()]);
        }
        let scheduled = self.scheduled.clone();
        let jobs: Vec<JobId> = batch.iter().map(|job| job.claim.job).collect();
        let filter = doc! { "_id": { "$in": jobs }, "locked": false };
        let found: Vec<Document> = call("reschedule_if_claimed", async move {
            scheduled.find(filter).projection(doc! { "last_execution.start": 1 }).await?.try_collect().await
        })
        .await?;
        let unlocked: HashSet<(JobId, StartId)> = found.iter().filter_map(|job| Some((id_of(job)?, start_of(job)?))).collect();
        let recorded = |claim: Claim| if unlocked.contains(&(claim.job, claim.start)) { Recorded::Yes } else { Recorded::ClaimLost };
        Ok(batch.iter().map(|job| recorded(job.claim)).collect())
    }

    /// Opens a session for [`Store::archive`], unless it is open; says its id, to be announced.
    ///
    /// # Errors
    /// When MongoDB cannot be reached.
    pub async fn open_session(&self, session: &mut CommitSession) -> Result<Document, StoreError> {
        let open = self.take_session(session).await?;
        let id = open.id().clone();
        session.0 = Session::Open(open);
        Ok(id)
    }

    /// What was given up before is ended first, so that nothing of it stands in the way.
    async fn take_session(&self, session: &mut CommitSession) -> Result<Box<ClientSession>, StoreError> {
        if let Session::GivenUp(id) = &session.0 {
            self.kill_sessions(std::slice::from_ref(id)).await?;
        }
        match std::mem::take(&mut session.0) {
            Session::Open(open) => Ok(open),
            Session::Closed | Session::GivenUp(_) => {
                let store = self.clone();
                call("open_session", async move { store.session().await.map(Box::new) }).await
            }
        }
    }

    /// Moves jobs from `scheduled` to `archived` in one transaction; says for each, in order, whether it was recorded.
    /// All archiving goes through here.
    ///
    /// Filter: each job's guard (its start, or that it is nobody's). The delete comes first: a job whose guard does not
    /// hold any more is found out before anything is inserted, and left out. Index: `_id`.
    /// Invariant: I2, archived exactly once and never in both; I3. Harmless to repeat after an unknown outcome: what
    /// was committed is recognised by its start. Loses when the job was rescued meanwhile.
    pub async fn archive(&self, session: &mut CommitSession, batch: &[Archival]) -> Result<Vec<Recorded>, StoreError> {
        let mut recorded: HashMap<JobId, Recorded> = HashMap::new();
        let mut left = batch.to_vec();
        let mut tries = 0;
        while !left.is_empty() {
            match self.archive_all_or_none(session, &left).await {
                Ok(Attempted::All) => recorded.extend(left.drain(..).map(|archival| (archival.job(), Recorded::Yes))),
                Ok(Attempted::None { held, known }) => {
                    let (keep, gone): (Vec<_>, Vec<_>) = left.into_iter().partition(|archival| held.contains(&archival.job()));
                    if gone.is_empty() {
                        // The majority has not seen yet what the primary has: an earlier commit is on its way.
                        return Err(StoreError::TimedOut { operation: "archive" });
                    }
                    let outcome = |job| if known.contains(&job) { Recorded::Yes } else { Recorded::ClaimLost };
                    recorded.extend(gone.iter().map(|archival| (archival.job(), outcome(archival.job()))));
                    left = keep;
                }
                Err(failed) if left.len() == 1 && failed.is_duplicate() => {
                    let archival = &left[0];
                    if !self.already_archived(&[archival.job()]).await?.contains(&archival.job()) {
                        // Another unique index, of somebody else's: a job is deleted only if it is in the archive.
                        return Err(failed);
                    }
                    // By another execution: this copy is the application's late re-send.
                    self.discard(filter_of(std::slice::from_ref(archival))).await?;
                    recorded.insert(archival.job(), Recorded::ClaimLost);
                    left.clear();
                }
                Err(StoreError::Mongo { source, .. })
                    if source.contains_label(TRANSIENT_TRANSACTION_ERROR) && tries < TRANSACTION_TRIES =>
                {
                    tries += 1;
                }
                Err(failed) => return Err(failed),
            }
        }
        Ok(batch.iter().map(|archival| recorded.get(&archival.job()).copied().unwrap_or(Recorded::ClaimLost)).collect())
    }

    /// The transaction itself, or, when a guard did not hold and nothing was changed, who still holds and who was
    /// archived by the very same start before, in a transaction whose reply was lost.
    ///
    /// All in one causally consistent session: what is read is not older than what the transaction met, whoever is the
    /// primary by now.
    async fn archive_all_or_none(&self, session: &mut CommitSession, batch: &[Archival]) -> Result<Attempted, StoreError> {
        let mut open = self.take_session(session).await?;
        session.0 = Session::GivenUp(open.id().clone());
        let (scheduled, archived) = (self.scheduled.clone(), self.archived.clone());
        let (filter, batch) = (filter_of(batch), batch.to_vec());
        let (open, outcome) = call("archive", async move {
            let outcome = async {
                open.start_transaction().await?;
                let deleted = scheduled.delete_many(filter.clone()).session(&mut *open).await?.deleted_count;
                if usize::try_from(deleted) == Ok(batch.len()) {
                    let documents = batch.iter().map(|archival| archival.document.clone());
                    archived.clone_with_type::<RawDocumentBuf>().insert_many(documents).session(&mut *open).await?;
                    return commit(&mut open).await.map(|()| Attempted::All);
                }
                open.abort_transaction().await?;
                let held = ids_matching(&scheduled, filter, &mut open).await?;
                let before = archived_before(&batch);
                let known = match before {
                    Some(before) => ids_matching(&archived, before, &mut open).await?,
                    None => HashSet::new(),
                };
                Ok(Attempted::None { held, known })
            }
            .await;
            if outcome.is_err() {
                // Nothing to abort when the server has done it already.
                let _ = open.abort_transaction().await;
            }
            Ok((open, outcome))
        })
        .await?;
        session.0 = Session::Open(open);
        outcome.map_err(|source| StoreError::Mongo { operation: "archive", source: source.into() })
    }

    /// What this worker has locked among these.
    ///
    /// Filter: id, locked, this holder. Index: `_id`: the roster says which to look at, so that no index on the holder
    /// is needed. Invariant: none, each is ended under its own start.
    pub async fn held_by(&self, worker: WorkerId, jobs: &[JobId]) -> Result<Vec<Held>, StoreError> {
        let scheduled = self.scheduled.clone_with_type::<RawDocumentBuf>();
        let filter = doc! { "_id": { "$in": jobs.to_vec() }, "locked": true, "last_execution.worker": worker };
        let found: Vec<RawDocumentBuf> = call("held_by", async move { scheduled.find(filter).await?.try_collect().await }).await?;
        Ok(found.into_iter().filter_map(|document| Held::try_from(document).ok()).collect())
    }

    /// One step of the slow sweep: what is locked among the next few thousand jobs after `after`, in order of their ids.
    ///
    /// The locked jobs are read first and the roster second, and that is not older, whoever is the primary by then: a worker
    /// is in the roster before it locks anything and until it holds nothing.
    /// Index: `_id`, walked in bounded steps however few are locked. Invariant: I4, nobody who lives is taken for dead; I5,
    /// not even one whose roster document cannot be understood.
    pub async fn locked_jobs(&self, after: Option<JobId>) -> Result<LockedJobs, StoreError> {
        let (store, scheduled, roster) = (self.clone(), self.scheduled.clone(), self.roster.clone());
        call("locked_jobs", async move {
            // Causally consistent, as every session of the driver.
            let mut session = store.session().await?;
            let mut range = after.map_or(doc! {}, |after| doc! { "$gt": after });
            let from = if range.is_empty() {
                doc! {}
            } else {
                doc! { "_id": range.clone() }
            };
            let bound = scheduled.find_one(from).sort(doc! { "_id": 1 }).skip(SWEEP_STEP).projection(doc! { "_id": 1 });
            let bound = bound.session(&mut session).await?.as_ref().and_then(id_of);
            if let Some(bound) = bound {
                range.insert("$lte", bound);
            }
            let mut filter = doc! { "locked": true };
            if !range.is_empty() {
                filter.insert("_id", range);
            }
            let scheduled = scheduled.clone_with_type::<RawDocumentBuf>();
            let mut locked = scheduled.find(filter).sort(doc! { "_id": 1 }).session(&mut session).await?;
            let documents: Vec<RawDocumentBuf> = locked.stream(&mut session).try_collect().await?;
            let roster = roster.clone_with_type::<RawDocumentBuf>();
            let mut registered = roster.find(doc! {}).projection(doc! { "_id": 1 }).batch_size(10_000).session(&mut session).await?;
            let registered: Vec<RawDocumentBuf> = registered.stream(&mut session).try_collect().await?;
            let registered = registered.iter().filter_map(|worker| Some(WorkerId::from(worker.get_object_id("_id").ok()?))).collect();
            Ok(LockedJobs { documents, registered, next: bound })
        })
        .await
    }

    /// Unlocks a job that is locked by nobody: nobody can have started it, so nothing crashed.
    ///
    /// Filter: id, locked, still without a holder. Index: `_id`. Invariant: I8.
    pub async fn unlock_if_held_by_nobody(&self, job: JobId) -> Result<bool, StoreError> {
        let scheduled = self.scheduled.clone();
        let filter = doc! { "_id": job, "locked": true, "$or": [{ "last_execution.worker": null }, { "last_execution.start": null }] };
        let unlocked =
            call("unlock_if_held_by_nobody", async move { scheduled.update_one(filter, doc! { "$set": { "locked": false } }).await })
                .await?;
        Ok(unlocked.modified_count == 1)
    }

    /// Asks the holders of started jobs to cancel them; returns those that were asked.
    ///
    /// Filter: ids, locked. Index: `_id`. Invariant: none, the holder ends it.
    /// Loses those jobs that are not running (any more).
    pub async fn request_cancel_if_started(&self, jobs: &[JobId]) -> Result<HashSet<JobId>, StoreError> {
        let (scheduled, now) = (self.scheduled.clone(), bson::DateTime::from_chrono(self.now()));
        let filter = doc! { "_id": { "$in": jobs.to_vec() }, "locked": true };
        let asked = call("request_cancel_if_started", async move {
            scheduled.update_many(filter, doc! { "$set": { "cancel_requested_at": now } }).await
        })
        .await?;
        if asked.matched_count == jobs.len() as u64 {
            return Ok(jobs.iter().copied().collect());
        }
        Ok(self.cancel_requests(jobs).await?.into_iter().collect())
    }

    /// Makes waiting jobs due at `at`, unless they are due earlier; returns those that wait.
    ///
    /// Filter: ids, unlocked, due later. Index: `_id`. Invariant: none, a date changes.
    /// Loses those jobs that are running or in the archive.
    pub async fn hasten_if_unlocked(&self, jobs: &[JobId], at: Instant) -> Result<HashSet<JobId>, StoreError> {
        let (scheduled, at) = (self.scheduled.clone(), bson::DateTime::from_chrono(at));
        let later = doc! { "_id": { "$in": jobs.to_vec() }, "locked": false, "scheduled_at": { "$gt": at } };
        let moved =
            call("hasten_if_unlocked", async move { scheduled.update_many(later, doc! { "$set": { "scheduled_at": at } }).await }).await?;
        if moved.matched_count == jobs.len() as u64 {
            return Ok(jobs.iter().copied().collect());
        }
        self.still_waiting(jobs).await
    }

    async fn still_waiting(&self, jobs: &[JobId]) -> Result<HashSet<JobId>, StoreError> {
        let scheduled = self.scheduled.clone();
        let unlocked = doc! { "_id": { "$in": jobs.to_vec() }, "locked": false };
        let found: Vec<Document> =
            call("still_waiting", async move { scheduled.find(unlocked).projection(doc! { "_id": 1 }).await?.try_collect().await }).await?;
        Ok(found.iter().filter_map(id_of).collect())
    }

    /// Enqueues finished jobs again, each under a new id, which its archived document names from then on: all in one
    /// transaction. Says for each, in order, whether it was recorded.
    ///
    /// Filter: id, and retried before as it was when it was read. The archived documents are changed first: when one of them is
    /// not as it was read, the transaction is aborted before anything is inserted, and repeated without that job. Index: `_id`.
    /// Invariant: I1, and a job that is retried by two people at once is enqueued once. Harmless to repeat after an unknown outcome
    /// with the same new ids: what was committed is recognised by them. Loses when somebody else retried the job, or when
    /// retention deleted it.
    pub async fn retry_if_archived(&self, session: &mut CommitSession, batch: &[Retrial]) -> Result<Vec<Recorded>, StoreError> {
        let mut enqueued: HashSet<JobId> = HashSet::new();
        let mut left = batch.to_vec();
        let mut tries = 0;
        while !left.is_empty() {
            match self.retry_all_or_none(session, &left).await {
                Ok(Attempted::All) => enqueued.extend(left.drain(..).map(|retrial| retrial.job)),
                Ok(Attempted::None { held, known }) => {
                    let before = left.len();
                    left.retain(|retrial| held.contains(&retrial.job));
                    if left.len() == before {
                        // The majority has not seen yet what the primary has: an earlier commit is on its way.
                        return Err(StoreError::TimedOut { operation: "retry_if_archived" });
                    }
                    enqueued.extend(known);
                }
                Err(StoreError::Mongo { source, .. })
                    if source.contains_label(TRANSIENT_TRANSACTION_ERROR) && tries < TRANSACTION_TRIES =>
                {
                    tries += 1;
                }
                Err(failed) => return Err(failed),
            }
        }
        let recorded = |retrial: &Retrial| if enqueued.contains(&retrial.job) { Recorded::Yes } else { Recorded::ClaimLost };
        Ok(batch.iter().map(recorded).collect())
    }

    /// The transaction itself; or, when a condition did not hold and nothing was changed, the jobs for which it holds, and those that
    /// were enqueued under these very ids before, in a transaction whose reply was lost.
    async fn retry_all_or_none(&self, session: &mut CommitSession, batch: &[Retrial]) -> Result<Attempted, StoreError> {
        let mut open = self.take_session(session).await?;
        session.0 = Session::GivenUp(open.id().clone());
        let (database, scheduled, archived) = (self.database.clone(), self.scheduled.clone(), self.archived.clone());
        let batch = batch.to_vec();
        let (open, outcome) = call("retry_if_archived", async move {
            let outcome = async {
                open.start_transaction().await?;
                let statement = |retrial: &Retrial| {
                    let as_read = doc! { "_id": retrial.job, "retried_as": retrial.retried_as.clone() };
                    doc! { "q": as_read, "u": { "$set": { "retried_as": retrial.new } } }
                };
                let command = doc! { "update": "archived", "updates": batch.iter().map(statement).collect::<Vec<_>>() };
                let reply = database.run_command(command).session(&mut *open).await?;
                super::write_errors(&reply)?;
                if reply.get_i32("n").ok().and_then(|met| usize::try_from(met).ok()) == Some(batch.len()) {
                    scheduled.insert_many(batch.iter().map(|retrial| &*retrial.document)).session(&mut *open).await?;
                    return commit(&mut open).await.map(|()| Attempted::All);
                }
                open.abort_transaction().await?;
                let (mut held, mut known) = (HashSet::new(), HashSet::new());
                let ids: Vec<JobId> = batch.iter().map(|retrial| retrial.job).collect();
                let mut found =
                    archived.find(doc! { "_id": { "$in": ids } }).projection(doc! { "retried_as": 1 }).session(&mut *open).await?;
                let found: Vec<Document> = found.stream(&mut open).try_collect().await?;
                let now: HashMap<JobId, Option<&Bson>> =
                    found.iter().filter_map(|job| Some((id_of(job)?, job.get("retried_as")))).collect();
                for retrial in &batch {
                    let Some(retried_as) = now.get(&retrial.job) else { continue };
                    if *retried_as == Some(&retrial.new.into()) {
                        known.insert(retrial.job);
                    } else if *retried_as == retrial.retried_as.as_ref() {
                        held.insert(retrial.job);
                    }
                }
                Ok(Attempted::None { held, known })
            }
            .await;
            if outcome.is_err() {
                // Nothing to abort when the server has done it already.
                let _ = open.abort_transaction().await;
            }
            Ok((open, outcome))
        })
        .await?;
        session.0 = Session::Open(open);
        outcome.map_err(|source| StoreError::Mongo { operation: "retry_if_archived", source: source.into() })
    }

    /// Deletes archived jobs for good; says how many.
    ///
    /// Filter: these ids. Index: `_id`. Invariant: none, it is what the operator asked for; what is in the archive never runs again.
    pub async fn delete_archived(&self, jobs: &[JobId]) -> Result<u64, StoreError> {
        let (archived, these) = (self.archived.clone(), doc! { "_id": { "$in": jobs.to_vec() } });
        Ok(call("delete_archived", async move { archived.delete_many(these).await }).await?.deleted_count)
    }

    /// Deletes up to `limit` archived documents that ended before `before`, whatever their ids are; says how many.
    ///
    /// Filter: ended before. Index: `archived_by_end`. Invariant: none, retention is what the operator asked for.
    pub async fn prune_archived(&self, before: Instant, limit: i64) -> Result<u64, StoreError> {
        let archived = self.archived.clone_with_type::<RawDocumentBuf>();
        self.indexed("prune_archived", async move {
            let old = archived
                .find(doc! { "last_execution.ended_at": { "$lt": bson::DateTime::from_chrono(before) } })
                .projection(doc! { "_id": 1 })
                .hint(IndexHint::Name(ARCHIVED_BY_END.into()))
                .limit(limit)
                .await?
                .try_collect::<Vec<RawDocumentBuf>>()
                .await?;
            let id = |document: &RawDocumentBuf| Bson::try_from(document.get("_id").ok()??).ok();
            let ids: Vec<Bson> = old.iter().filter_map(id).collect();
            if ids.is_empty() {
                return Ok(0);
            }
            Ok(archived.delete_many(doc! { "_id": { "$in": ids } }).await?.deleted_count)
        })
        .await
    }
}

/// A finished job that is to be enqueued again.
#[derive(Clone, Debug)]
pub struct Retrial {
    /// The finished job.
    pub job: JobId,
    /// What its document said, when it was read, of an earlier retry.
    pub retried_as: Option<Bson>,
    /// The id under which it is enqueued again.
    pub new: JobId,
    /// The new job. Shared, because a batch is kept until it is known that it was written.
    pub document: Arc<Document>,
}

/// What one step of the sweep has found.
#[derive(Clone, Debug)]
pub struct LockedJobs {
    /// Locked documents.
    pub documents: Vec<RawDocumentBuf>,
    /// Everybody in the roster.
    pub registered: HashSet<WorkerId>,
    /// Where the next step goes on; nothing when this was the last.
    pub next: Option<JobId>,
}

/// What became of a transaction.
enum Attempted {
    All,
    None { held: HashSet<JobId>, known: HashSet<JobId> },
}

/// The archived jobs of these that the very same start has written.
fn archived_before(batch: &[Archival]) -> Option<Document> {
    let same = |archival: &Archival| match &archival.guard {
        Guard::Claimed(claim) => Some(doc! { "_id": claim.job, "last_execution.start": claim.start }),
        Guard::Unlocked { .. } => None,
    };
    let any: Vec<Document> = batch.iter().filter_map(same).collect();
    (!any.is_empty()).then(|| doc! { "$or": any })
}

async fn ids_matching(collection: &Collection<Document>, filter: Document, session: &mut ClientSession) -> Result<HashSet<JobId>, Error> {
    let mut cursor = collection.find(filter).projection(doc! { "_id": 1 }).session(&mut *session).await?;
    let found: Vec<Document> = cursor.stream(session).try_collect().await?;
    Ok(found.iter().filter_map(id_of).collect())
}

/// Commits; while MongoDB says that it does not know whether it did, asks again, which is safe.
async fn commit(session: &mut ClientSession) -> Result<(), Error> {
    let mut tries = 0;
    loop {
        match session.commit_transaction().await {
            Err(error) if error.contains_label(UNKNOWN_TRANSACTION_COMMIT_RESULT) && tries < TRANSACTION_TRIES => tries += 1,
            other => return other,
        }
    }
}

/// Dates for which jobs are started one date to a statement. More of them go into one, as a pipeline that copies each job's own,
/// which costs a third more for each job, and less than many statements.
const DATES: usize = 8;

/// One statement for each verdict, number of earlier starts and, if there are few, date: nearly always a single one.
fn start_command(start: &Start, jobs: &[ToStart]) -> Document {
    let dates: BTreeSet<Instant> = jobs.iter().map(|job| job.due).collect();
    let date = |job: &ToStart| (dates.len() <= DATES).then_some(job.due);
    let mut alike: Vec<(u32, &IfWorkerDies, Option<Instant>, Vec<JobId>)> = Vec::new();
    for job in jobs {
        let due = date(job);
        match alike
            .iter_mut()
            .find(|(attempts, verdict, date, _)| (*attempts, *date) == (job.attempts, due) && **verdict == job.if_worker_dies)
        {
            Some((.., ids)) => ids.push(job.job),
            None => alike.push((job.attempts, &job.if_worker_dies, due, vec![job.job])),
        }
    }
    let lease_until = bson::DateTime::from_chrono(start.lease_until);
    let statement = |(attempts, verdict, due, ids): (u32, &IfWorkerDies, Option<Instant>, Vec<JobId>)| {
        // A job of another language may have no `attempts` yet.
        let attempts_read = if attempts == 0 {
            doc! { "$in": [0, Bson::Null] }
        } else {
            doc! { "$eq": attempts }
        };
        let date = |at: Instant| Bson::DateTime(bson::DateTime::from_chrono(at));
        // One date is compared once, not with each job.
        let scheduled_at = due.map_or_else(|| "$scheduled_at".into(), date);
        let mut filter = doc! {
            "_id": { "$in": ids },
            "locked": false,
            "attempts": attempts_read,
            "$expr": { "$and": [{ "$lte": [scheduled_at, "$$NOW"] }, { "$lt": ["$$NOW", lease_until] }] },
        };
        let execution = start.stored_execution(due.unwrap_or(start.now), verdict.clone());
        let set = |execution: Document| doc! { "$set": { "locked": true, "attempts": attempts + 1, "last_execution": execution } };
        let update = if let Some(due) = due {
            // The update writes this date into `last_execution`: the document must still have it.
            filter.insert("scheduled_at", date(due));
            Bson::Document(set(execution))
        } else {
            let literally = |(field, value): (String, Bson)| (field, Bson::Document(doc! { "$literal": value }));
            let mut execution: Document = execution.into_iter().map(literally).collect();
            execution.insert("scheduled_at", "$scheduled_at");
            execution.insert("started_at", doc! { "$max": ["$scheduled_at", date(start.now)] });
            Bson::Array(vec![doc! { "$unset": "last_execution" }.into(), set(execution).into()])
        };
        doc! { "q": filter, "u": update, "multi": true }
    };
    doc! {
        "update": "scheduled",
        "updates": alike.into_iter().map(statement).collect::<Vec<_>>(),
        "ordered": false,
        "writeConcern": { "w": "majority", "j": true },
    }
}

pub(crate) fn id_of(document: &Document) -> Option<JobId> {
    document.get_object_id("_id").ok().map(JobId::from)
}

fn start_of(document: &Document) -> Option<StartId> {
    document.get_document("last_execution").ok()?.get_object_id("start").ok().map(StartId::from)
}

pub(super) fn raw_id_of(document: &RawDocument) -> Option<JobId> {
    document.get_object_id("_id").ok().map(JobId::from)
}

/// Whether nothing was wrong but that ids were there already. Duplicates in a unique index of somebody else's were not stored.
fn only_known_ids(error: &Error) -> bool {
    let ErrorKind::InsertMany(many) = error.kind.as_ref() else { return false };
    let known = |error: &mongodb::error::IndexedWriteError| error.code == DUPLICATE_KEY && error.message.contains(" index: _id_ ");
    many.write_concern_error.is_none() && many.write_errors.as_ref().is_some_and(|errors| errors.iter().all(known))
}

fn duplicates(error: &Error) -> u64 {
    let ErrorKind::InsertMany(many) = error.kind.as_ref() else { return 0 };
    many.write_errors.as_ref().map_or(0, |errors| errors.len() as u64)
}
