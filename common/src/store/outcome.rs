//! What becomes of a started job, as values: to the archive, or back to be started again; and how batches of them are
//! written when one of them cannot be.
//!
//! Used by the worker for what it executed and by the cleaner for what the dead left.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use bson::{
    Bson, Document, RawArrayBuf, RawBson, RawBsonRef, RawDocument, RawDocumentBuf, doc,
    oid::ObjectId,
    raw::{CStr, cstr},
    rawdoc,
};

use super::{CommitSession, Hint, Store, StoreError, bundles::OUTCOMES, cut};
use crate::{
    failure::{self, Failure},
    ids::{JobId, StartId, WorkerId},
    instant::Instant,
    job::{Claim, CorruptJob, DEFAULT_POLICY, DEFAULT_PRIORITY, Execution, Job, KEPT_EXECUTIONS, Why, roomy},
    telemetry::chain,
};

/// Bytes of BSON that one document may have, less room for what MongoDB adds on the way.
const LARGEST_DOCUMENT: usize = 16 * 1024 * 1024 - 64 * 1024;
/// Bytes in one command or transaction, at most: the server takes 48 MB, and a large one holds everybody up.
pub const BATCH_BYTES: usize = 8 * 1024 * 1024;
/// Stands where there would be a result.
const NO_RESULT: &str = "the result did not fit into the document or cannot be stored";
/// Says in a document that part of it could not be stored.
const REDUCED: &str = "reduced";

/// Whether the outcome of a start was recorded. Losing is no error: the job was rescued meanwhile, and whatever this
/// execution has to say is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Recorded {
    /// It was.
    Yes,
    /// The job is not locked by this start any more.
    ClaimLost,
    /// MongoDB refuses to store it, also reduced to its bare facts: the job stays locked by this start. The caller keeps the outcome
    /// and writes it again later.
    Refused,
}

/// A job on its way from `scheduled` to `archived`.
#[derive(Clone, Debug)]
pub struct Archival {
    pub(super) guard: Guard,
    /// Shared, because a batch of them is kept until it is known that it was written.
    pub(super) document: Arc<RawDocumentBuf>,
}

/// What must still be true of a job for it to be archived.
#[derive(Clone, Debug)]
pub(super) enum Guard {
    /// Locked by this start.
    Claimed(Claim),
    /// Nobody's, and started as often as when it was read.
    Unlocked { job: JobId, attempts: Option<Bson> },
}

impl Guard {
    fn job(&self) -> JobId {
        match self {
            Self::Claimed(claim) => claim.job,
            Self::Unlocked { job, .. } => *job,
        }
    }
}

impl Archival {
    fn new(guard: Guard, document: RawDocumentBuf) -> Self {
        Self { guard, document: Arc::new(document) }
    }

    /// A started job that ended, for `why`.
    pub fn ended(job: &Job, claim: Claim, execution: Execution, why: &Why, result: Option<Bson>) -> Self {
        Self::new(Guard::Claimed(claim), archived_document(job, &execution, why, result))
    }

    /// An unlocked job that is archived without being started: it was cancelled, or its document is not a job.
    pub fn unstarted(job: JobId, document: &RawDocument, why: &Why, failure: &Failure, now: Instant) -> Self {
        let attempts = document.get("attempts").ok().flatten().and_then(|attempts| attempts.try_into().ok());
        let scheduled_at = document.get_datetime("scheduled_at").ok().map(|at| at.to_chrono());
        let execution = Execution { scheduled_at, ..Execution::default() }.ended(now, Some(failure));
        Self::new(Guard::Unlocked { job, attempts }, finished(document, job, &execution, why, &[]))
    }

    /// A document that is locked by the dead and is no job: neither its history nor its policy can be read.
    pub fn undecodable(claim: Claim, holder: WorkerId, document: &RawDocument, error: &CorruptJob, now: Instant) -> Self {
        let execution = Execution { worker: Some(holder), start: Some(claim.start), crashed: Some(true), ..Execution::default() };
        let execution = execution.ended(now, Some(&Failure::new(failure::MALFORMED, error.to_string())));
        Self::new(Guard::Claimed(claim), finished(document, claim.job, &execution, &Why::MALFORMED, &[]))
    }

    /// A started job that cannot be unlocked, because MongoDB refuses every change of its document (it may be older than the
    /// validator): `document` as it is stored, with the history that the refused update would have written.
    fn not_unlockable(refused: Rescheduling, document: &RawDocument, reason: &StoreError, now: Instant) -> Self {
        let mut set = match refused.update.get_document("$set") {
            Ok(set) => set.clone(),
            Err(_) => doc! {},
        };
        let ended = set.remove("last_execution").and_then(|ended| bson::deserialize_from_bson::<Execution>(ended).ok()).unwrap_or_default();
        let mut message = format!("MongoDB refuses to unlock it for another attempt: {}", chain(reason));
        if let (Some(class), Some(said)) = (&ended.class, &ended.message) {
            message.push_str(&format!(" (it ended as `{class}`: {said})"));
        }
        let ended_at = ended.ended_at.unwrap_or(now);
        let execution = ended.ended(ended_at, Some(&Failure::new(failure::MALFORMED, message)));
        let kept: Vec<(&CStr, RawBson)> =
            [cstr!("executions"), cstr!("executions_dropped"), cstr!("interruptions"), cstr!("deaths"), cstr!("item_outcomes")]
                .into_iter()
                .filter_map(|field| Some((field, RawBson::try_from(set.remove(field.as_str())?).ok()?)))
                .collect();
        let kept: Vec<(&CStr, RawBsonRef<'_>)> = kept.iter().map(|(field, value)| (*field, value.as_raw_bson_ref())).collect();
        Self::new(Guard::Claimed(refused.claim), finished(document, refused.claim.job, &execution, &Why::MALFORMED, &kept))
    }

    /// The same end with nothing but what identifies the job, for an outcome that MongoDB refuses.
    fn without_details(self) -> Option<Self> {
        let whole: Document = (&**self.document).try_into().unwrap_or_else(|_| doc! { "_id": self.job() });
        let mut document = Document::new();
        for field in ["_id", "done", "created_at", "locked", "attempts", "interruptions", "deaths", "group", "priority", "why", OUTCOMES] {
            document.extend(whole.get(field).map(|value| (field.to_owned(), value.clone())));
        }
        if let Ok(class) = whole.get_document("workable").and_then(|workable| workable.get_str("class")) {
            document.insert("workable", doc! { "class": class });
        }
        if let Ok(execution) = whole.get_document("last_execution") {
            let kept = execution.iter().filter(|(field, _)| !matches!(field.as_str(), "message" | "trace"));
            document.insert("last_execution", kept.map(|(field, value)| (field.clone(), value.clone())).collect::<Document>());
        }
        document.insert(REDUCED, "MongoDB refused the whole document");
        Some(Self::new(self.guard, RawDocumentBuf::try_from(&document).ok()?))
    }

    /// The job.
    pub fn job(&self) -> JobId {
        self.guard.job()
    }
}

fn archived_document(job: &Job, execution: &Execution, why: &Why, result: Option<Bson>) -> RawDocumentBuf {
    let result = result.map(RawBson::try_from);
    let history = archived_history(job, execution, why);
    let document = |with_result: bool, with_history: bool| {
        let mut more = vec![(cstr!("attempts"), count(job.attempts)), (cstr!("deaths"), count(deaths_with(job, execution)))];
        match &result {
            Some(Ok(result)) if with_result => more.push((cstr!("result"), result.as_raw_bson_ref())),
            Some(_) => more.push((cstr!("result_dropped"), NO_RESULT.into())),
            None => {}
        }
        if let Some((executions, dropped)) = history.as_ref().filter(|_| with_history) {
            more.extend([(cstr!("executions"), RawBsonRef::Array(executions)), (cstr!("executions_dropped"), count(*dropped))]);
        }
        finished(&job.document, job.id, execution, why, &more)
    };
    let fits = |document: &RawDocumentBuf| document.as_bytes().len() <= LARGEST_DOCUMENT;
    let whole = document(true, true);
    if fits(&whole) {
        return whole;
    }
    let without_result = document(false, true);
    if fits(&without_result) { without_result } else { document(false, false) }
}

/// Every attempt that ended, this one included, as far as the history is kept, and how many are not; nothing of a job that was done at
/// its first attempt, of which `last_execution` says it all.
fn archived_history(job: &Job, execution: &Execution, why: &Why) -> Option<(RawArrayBuf, u32)> {
    if *why == Why::DONE && job.executions.is_empty() {
        return None;
    }
    let (executions, dropped) = history_with(job, execution);
    let mut all = RawArrayBuf::new();
    executions.iter().for_each(|execution| all.push(execution.to_raw()));
    Some((all, dropped))
}

/// A finished job as the archive keeps it: what was stored, with `more` and its end, each field in its place, and what is said of a job
/// that says nothing.
///
/// Raw, because this is done for every job. A document that breaks off in the middle, which no driver stores, keeps its id.
fn finished(document: &RawDocument, job: JobId, execution: &Execution, why: &Why, more: &[(&CStr, RawBsonRef<'_>)]) -> RawDocumentBuf {
    let execution = execution.to_raw();
    let end = [
        (cstr!("done"), RawBsonRef::Boolean(*why == Why::DONE)),
        (cstr!("locked"), RawBsonRef::Boolean(false)),
        (cstr!("why"), RawBsonRef::String(why.as_str())),
        (cstr!("last_execution"), RawBsonRef::Document(&execution)),
    ];
    let fields = [more, &end].concat();
    let policy = rawdoc! { "class": DEFAULT_POLICY, "parameters": {} };
    let defaults = [
        (cstr!("created_at"), RawBsonRef::DateTime(bson::DateTime::from_chrono(job.made_at()))),
        (cstr!("attempts"), RawBsonRef::Int32(0)),
        (cstr!("interruptions"), RawBsonRef::Int32(0)),
        (cstr!("deaths"), RawBsonRef::Int32(0)),
        (cstr!("priority"), RawBsonRef::Int32(DEFAULT_PRIORITY.into())),
        (cstr!("retry_policy"), RawBsonRef::Document(&policy)),
    ];
    completed(document, &fields, &defaults).unwrap_or_else(|_| {
        let mut only = RawDocumentBuf::new();
        only.append(cstr!("_id"), ObjectId::from(job));
        fields.iter().for_each(|(field, value)| only.append(field, *value));
        only
    })
}

/// A copy with other values in some fields and others added, and without the date on which it was due.
pub(super) fn replaced(document: &RawDocument, by: &[(&CStr, RawBsonRef<'_>)]) -> bson::error::Result<RawDocumentBuf> {
    completed(document, by, &[])
}

/// The same, with these values where nothing or null is said.
fn completed(
    document: &RawDocument,
    by: &[(&CStr, RawBsonRef<'_>)],
    defaults: &[(&CStr, RawBsonRef<'_>)],
) -> bson::error::Result<RawDocumentBuf> {
    let mut copy = roomy(document.as_bytes().len() + 512);
    let mut new: Vec<bool> = vec![true; by.len()];
    let mut missing: Vec<bool> = defaults.iter().map(|(field, _)| by.iter().all(|(given, _)| given != field)).collect();
    for element in document.iter_elements() {
        let element = element?;
        let key = element.key();
        if let Some(at) = by.iter().position(|(field, _)| *field == key) {
            new[at] = false;
            copy.append(key, by[at].1);
        } else if key != cstr!("scheduled_at") {
            let value = element.value();
            if let Some(at) = defaults.iter().position(|(field, _)| *field == key) {
                if matches!(value, Ok(RawBsonRef::Null)) {
                    continue;
                }
                missing[at] = false;
            }
            match value {
                Ok(value) => copy.append(key, value),
                Err(_) => copy.append(key, element.value_utf8_lossy()?),
            }
        }
    }
    by.iter().zip(new).filter(|(_, new)| *new).for_each(|((field, value), _)| copy.append(field, *value));
    defaults.iter().zip(missing).filter(|(_, missing)| *missing).for_each(|((field, value), _)| copy.append(field, *value));
    Ok(copy)
}

fn count(value: u32) -> RawBsonRef<'static> {
    i32::try_from(value).map_or_else(|_| RawBsonRef::Int64(value.into()), RawBsonRef::Int32)
}

fn stored(execution: &Execution) -> Bson {
    Bson::Document(Document::try_from(&*execution.to_raw()).expect("an execution is made of dates, ids, texts and numbers"))
}

/// What becomes of a started job that is not archived.
#[derive(Clone, Debug)]
pub struct Rescheduling {
    pub(super) claim: Claim,
    pub(super) update: Document,
    group: String,
    due: Instant,
}

impl Rescheduling {
    /// Another attempt at `at`, with the ended `execution` in the history. `counts` is false for an interruption.
    pub fn retry(job: &Job, claim: Claim, execution: &Execution, at: Instant, counts: bool) -> Self {
        let (executions, dropped) = history_with(job, execution);
        let set = doc! {
            "locked": false,
            "scheduled_at": bson::DateTime::from_chrono(at),
            "last_execution": stored(execution),
            "executions": executions.iter().map(stored).collect::<Vec<_>>(),
            "executions_dropped": dropped,
            "interruptions": job.interruptions + u32::from(!counts),
            "deaths": deaths_with(job, execution),
        };
        Self { claim, update: doc! { "$set": set }, group: job.group.clone(), due: at }
    }

    /// As it was before the start, whose workable was never entered: due as before, the start not counted. The execution before
    /// this start is the newest of the history.
    pub fn release(job: &Job, claim: Claim) -> Self {
        let mut set = doc! { "locked": false, "interruptions": job.interruptions + 1 };
        let mut update = doc! {};
        match job.executions.last() {
            Some(previous) => drop(set.insert("last_execution", stored(previous))),
            None => drop(update.insert("$unset", doc! { "last_execution": "" })),
        }
        update.insert("$set", set);
        let was_due = job.last_execution.as_ref().and_then(|execution| execution.scheduled_at);
        let due = job.due().or(was_due).unwrap_or_default();
        Self { claim, update, group: job.group.clone(), due }
    }

    /// The same, but due at `at`: what kept it from being entered may be over by then.
    pub fn release_until(job: &Job, claim: Claim, at: Instant) -> Self {
        let mut released = Self::release(job, claim);
        if let Ok(set) = released.update.get_document_mut("$set") {
            set.insert("scheduled_at", bson::DateTime::from_chrono(at));
        }
        Self { due: at, ..released }
    }

    /// What the recruiter should hear of these.
    pub fn hint<'a>(batch: impl Iterator<Item = &'a Self> + Clone, now: Instant) -> Hint {
        let groups: BTreeSet<String> = batch.clone().map(|job| job.group.clone()).collect();
        let at = batch.map(|job| job.due).min().filter(|due| *due > now);
        Hint::Jobs { groups: groups.into_iter().collect(), at, jobs: Vec::new() }
    }

    /// The same without the history, for an outcome that MongoDB refuses.
    fn without_history(mut self) -> Option<Self> {
        let set = self.update.get_document_mut("$set").ok()?;
        set.remove("executions");
        set.remove("last_execution");
        set.insert(REDUCED, "MongoDB refused the whole history");
        Some(self)
    }
}

/// How often the job's worker has died, this execution included.
fn deaths_with(job: &Job, execution: &Execution) -> u32 {
    job.deaths + u32::from(execution.crashed == Some(true))
}

/// The bounded history with one execution more: the first and the newest stay.
fn history_with(job: &Job, execution: &Execution) -> (Vec<Execution>, u32) {
    let mut executions = job.executions.clone();
    executions.push(execution.clone());
    let excess = executions.len().saturating_sub(KEPT_EXECUTIONS);
    executions.drain(1..=excess);
    (executions, job.executions_dropped + u32::try_from(excess).unwrap_or(u32::MAX))
}

/// Jobs by the condition that still has to hold for them.
pub(super) fn filter_of(batch: &[Archival]) -> Document {
    let mut claimed: HashMap<StartId, Vec<JobId>> = HashMap::new();
    let mut any = Vec::new();
    for archival in batch {
        match &archival.guard {
            Guard::Claimed(claim) => claimed.entry(claim.start).or_default().push(claim.job),
            Guard::Unlocked { job, attempts } => any.push(doc! { "_id": job, "locked": false, "attempts": attempts.clone() }),
        }
    }
    any.extend(claimed.into_iter().map(|(start, jobs)| doc! { "_id": { "$in": jobs }, "locked": true, "last_execution.start": start }));
    doc! { "$or": any }
}

/// The end of a start, or a part of it: written in batches.
pub trait End: Clone + Send + Sync {
    /// Whether it is written in a transaction.
    const NEEDS_SESSION: bool;

    /// Writes a batch that fits; says for each, in order, whether it was recorded.
    fn write(store: &Store, session: &mut CommitSession, batch: &[Self]) -> impl Future<Output = Result<Vec<Recorded>, StoreError>> + Send;

    /// Less of it, for one that MongoDB refuses; nothing when there is nothing to leave out.
    fn reduced(self) -> Option<Self>;

    /// What is done with one that MongoDB refuses also when it is reduced, for this reason.
    ///
    /// # Errors
    /// When MongoDB is away.
    fn refused(
        self,
        store: &Store,
        session: &mut CommitSession,
        reason: &StoreError,
    ) -> impl Future<Output = Result<Recorded, StoreError>> + Send;

    /// The job.
    fn job(&self) -> JobId;

    /// Size on the wire, in bytes, roughly.
    fn size(&self) -> usize;
}

impl End for Archival {
    const NEEDS_SESSION: bool = true;

    async fn write(store: &Store, session: &mut CommitSession, batch: &[Self]) -> Result<Vec<Recorded>, StoreError> {
        store.archive(session, batch).await
    }

    fn reduced(self) -> Option<Self> {
        self.without_details()
    }

    /// Nothing: it is the caller's to keep.
    async fn refused(self, _store: &Store, _session: &mut CommitSession, _reason: &StoreError) -> Result<Recorded, StoreError> {
        Ok(Recorded::Refused)
    }

    fn job(&self) -> JobId {
        self.guard.job()
    }

    fn size(&self) -> usize {
        self.document.as_bytes().len()
    }
}

impl End for Rescheduling {
    const NEEDS_SESSION: bool = false;

    async fn write(store: &Store, _session: &mut CommitSession, batch: &[Self]) -> Result<Vec<Recorded>, StoreError> {
        store.reschedule_if_claimed(batch).await
    }

    fn reduced(self) -> Option<Self> {
        self.without_history()
    }

    /// Archived as malformed, with its history: nobody could ever unlock it.
    async fn refused(self, store: &Store, session: &mut CommitSession, reason: &StoreError) -> Result<Recorded, StoreError> {
        let Some(document) = store.document_of(self.claim.job).await? else { return Ok(Recorded::ClaimLost) };
        let archival = Archival::not_unlockable(self, &document, reason, store.now());
        // Two levels at most: what is archived is refused by nothing but the archive.
        let mut recorded = Box::pin(store.finish(session, &[archival])).await?;
        Ok(recorded.pop().unwrap_or(Recorded::Refused))
    }

    fn job(&self) -> JobId {
        self.claim.job
    }

    fn size(&self) -> usize {
        size_of(&self.update)
    }
}

pub(super) fn size_of(document: &Document) -> usize {
    document.to_vec().map_or(LARGEST_DOCUMENT, |bytes| bytes.len())
}

impl Store {
    /// Writes outcomes in batches that fit; halves one that MongoDB refuses until the one bad outcome stands alone, and
    /// stores less of that. Says for each, in order, whether it was recorded. Harmless to repeat.
    ///
    /// Index: `_id`. Invariant: I9, no outcome stops another.
    ///
    /// # Errors
    /// When MongoDB is away or its answer is lost; part of the batch may be recorded by then, and is recognised when
    /// the same batch is written again.
    pub async fn finish<T: End>(&self, session: &mut CommitSession, batch: &[T]) -> Result<Vec<Recorded>, StoreError> {
        self.finish_in_portions(session, batch, BATCH_BYTES).await
    }

    /// The same with so many bytes in one command or transaction at most, for a slow line.
    ///
    /// Index: `_id`. Invariant: I9, as above.
    ///
    /// # Errors
    /// As above.
    pub async fn finish_in_portions<T: End>(
        &self,
        session: &mut CommitSession,
        batch: &[T],
        most_bytes: usize,
    ) -> Result<Vec<Recorded>, StoreError> {
        let mut recorded = Vec::with_capacity(batch.len());
        let mut pieces = cut(batch.to_vec(), usize::MAX, most_bytes, T::size);
        pieces.reverse();
        while let Some(mut piece) = pieces.pop() {
            match T::write(self, session, &piece).await {
                Ok(done) => recorded.extend(done),
                Err(error) if error.is_transient() => return Err(error),
                Err(error) => match piece.pop() {
                    Some(one) if piece.is_empty() => recorded.push(self.record_less(session, one, error).await?),
                    last => {
                        piece.extend(last);
                        let second = piece.split_off(piece.len() / 2);
                        pieces.extend([second, piece]);
                    }
                },
            }
        }
        Ok(recorded)
    }

    /// What can be stored of one outcome that MongoDB refuses as it is.
    async fn record_less<T: End>(&self, session: &mut CommitSession, whole: T, refusal: StoreError) -> Result<Recorded, StoreError> {
        let job = whole.job();
        tracing::error!(job.id = %job, error = chain(&refusal), "MongoDB refuses an outcome as it is; storing less of it");
        let mut reason = refusal;
        if let Some(reduced) = whole.clone().reduced() {
            match T::write(self, session, &[reduced]).await {
                Ok(recorded) => return Ok(recorded.first().copied().unwrap_or(Recorded::Refused)),
                Err(error) if error.is_transient() => return Err(error),
                Err(error) => reason = error,
            }
        }
        let recorded = whole.refused(self, session, &reason).await?;
        if recorded == Recorded::Refused {
            tracing::error!(
                job.id = %job,
                error = chain(&reason),
                "MongoDB refuses the outcome of a job also without its details: the job stays locked, and its outcome is written again \
                 ever more rarely. Remove the cause, for instance a unique index on `archived`"
            );
        }
        Ok(recorded)
    }
}
