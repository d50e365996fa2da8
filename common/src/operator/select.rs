//! Selects jobs by the filters of `recruiter jobs`: one page at a time for lists, or step by step over all jobs for
//! bulk changes.
//!
//! `scheduled` has no index for these filters, because each index would slow down every job. A list whose filters no
//! index serves is read from the newest job, and ends with an error after [`LOOK_LIMIT`]. A walk over all jobs has no
//! such limit: each of its steps examines a bounded number of documents.

use crate::{
    base::{Instant, JobId, topics::literally},
    job::{FinishReason, Stage},
    mongo::{ARCHIVED_BY_END, Client, IDS_PER_QUERY, Store, StoreError, call, lossy, raw_id_of},
    roster::ids_in,
};
use std::{collections::HashSet, time::Duration};

use bson::{Bson, Document, RawDocument, RawDocumentBuf, doc, oid::ObjectId};
use futures_util::TryStreamExt;
use mongodb::{Collection, options::Hint as IndexHint};

/// Maximum time for which MongoDB searches for one page.
pub const LOOK_LIMIT: Duration = Duration::from_secs(8);
/// Number of documents that one step of a walk examines.
const STEP: u64 = 5_000;
/// Minimum number of documents in a step, used when MongoDB is slow.
const SMALLEST_STEP: u64 = 50;

/// Where a job is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(feature = "protocol"), non_exhaustive)]
pub enum StateFilter {
    /// Waiting: for other jobs, to be due, or for a worker.
    Waiting,
    /// Running.
    Running,
    /// Finished.
    Archived,
}

/// A selection of jobs. A field that is `None` does not restrict it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(not(feature = "protocol"), non_exhaustive)]
pub struct JobFilter {
    /// Where the job is.
    pub state: Option<StateFilter>,
    /// Its state in one word, at this instant. Without [`state`](Self::state) only where such jobs are.
    pub stage: Option<(Stage, Instant)>,
    /// Its group.
    pub group: Option<String>,
    /// Class of its workable.
    pub class: Option<String>,
    /// One of its tags.
    pub tag: Option<String>,
    /// Its urn.
    pub urn: Option<String>,
    /// The reason why it is in the archive. Without a state, only the archive is searched.
    pub why: Option<String>,
    /// Only jobs in the archive that are neither done nor cancelled.
    pub failed: bool,
    /// Error class of its last execution.
    pub error_class: Option<String>,
    /// Part of the message of its last failure, ignoring case.
    pub message: Option<String>,
    /// An archived job ended at this instant or later; any other job was enqueued then or later.
    pub since: Option<Instant>,
    /// An archived job ended before this instant; any other job was enqueued before it.
    pub until: Option<Instant>,
}

/// Builds a filter, field by field.
macro_rules! setters {
    ($($field:ident: $of:ty,)*) => {
        impl JobFilter {
            $(
                #[doc = concat!("Sets the field [`", stringify!($field), "`](field@Self::", stringify!($field), ").")]
                #[must_use]
                pub fn $field(mut self, $field: impl Into<$of>) -> Self {
                    self.$field = Some($field.into());
                    self
                }
            )*
        }
    };
}

setters! {
    state: StateFilter,
    group: String,
    class: String,
    tag: String,
    urn: String,
    why: String,
    error_class: String,
    message: String,
    since: Instant,
    until: Instant,
}

impl JobFilter {
    /// The same filter for any time.
    #[must_use]
    pub fn whenever(self) -> Self {
        Self { since: None, until: None, ..self }
    }

    /// Only archived jobs that are neither done nor cancelled.
    #[must_use]
    pub fn failed(mut self) -> Self {
        self.failed = true;
        self
    }
}

/// The parameters of one page of a list.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct Page {
    /// Whether to read parameters, result and history as well. Without them the page is small, even if the jobs are
    /// large.
    pub whole: bool,
    /// Maximum number of jobs; 0 counts as 1.
    pub limit: u16,
    /// Only jobs that follow this one, which is the last job of the previous page.
    pub after: Option<JobId>,
}

impl Page {
    /// The first page, with at most so many jobs.
    pub const fn first(limit: u16) -> Self {
        Self { whole: false, limit, after: None }
    }

    /// The page that follows this job, the last one of the page before.
    #[must_use]
    pub const fn after(self, job: JobId) -> Self {
        Self { after: Some(job), ..self }
    }

    /// The same page with parameters, results and histories.
    #[must_use]
    pub const fn whole(self) -> Self {
        Self { whole: true, ..self }
    }
}

/// The jobs of one page.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Listed {
    /// The stored documents, including those that are not valid jobs.
    pub jobs: Vec<RawDocumentBuf>,
    /// Whether more jobs follow.
    pub more: bool,
}

/// A job that a walk has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Match {
    /// The id of the job.
    pub job: JobId,
    /// Size of its document, in bytes.
    pub bytes: usize,
}

/// The position of a walk over all matching jobs. See [`Store::next_matches`].
#[derive(Clone, Debug)]
pub struct Walk {
    filter: JobFilter,
    /// The key of the last document that was examined; `None` before the first.
    after: Option<Bson>,
    step: u64,
    is_over: bool,
    /// Number of documents examined so far, matching or not.
    pub looked_at: u64,
}

impl Walk {
    /// A walk over all jobs that match: over `archived` if the filter selects only archived jobs, otherwise over
    /// `scheduled`.
    pub fn new(filter: JobFilter) -> Self {
        Self { filter, after: None, step: STEP, is_over: false, looked_at: 0 }
    }

    /// The indexed field by which the walk proceeds, and its first value.
    fn key(&self) -> (&'static str, Bson) {
        let JobFilter { since, until, .. } = self.filter;
        if self.filter.is_archived() && (since.is_some() || until.is_some()) {
            ("last_execution.ended_at", since.map_or(bson::DateTime::MIN, bson::DateTime::from_chrono).into())
        } else {
            // A comparison in MongoDB only returns values of the same type.
            ("_id", ObjectId::from_bytes([0; 12]).into())
        }
    }

    /// The range of documents after the last examined one, up to the last one of this step.
    fn range(&self, up_to: Option<&Bson>) -> Document {
        let (key, first) = self.key();
        let mut range = match &self.after {
            None => doc! { "$gte": first },
            Some(after) => doc! { "$gt": after.clone() },
        };
        range.extend(up_to.map(|up_to| ("$lte".to_owned(), up_to.clone())));
        doc! { key: range }
    }
}

impl JobFilter {
    /// Whether the filter selects only archived jobs.
    pub fn is_archived(&self) -> bool {
        self.failed || self.why.is_some() || self.state == Some(StateFilter::Archived)
    }

    /// Whether the filter has no restriction except the state.
    pub fn is_empty(&self) -> bool {
        Self { state: None, stage: None, ..self.clone() } == Self::default()
    }

    /// The filter for documents of `archived` or `scheduled`, combined with `more`.
    fn fields(&self, archived: bool, more: Document) -> Document {
        let equal = [
            ("group", &self.group),
            ("workable.class", &self.class),
            ("tags", &self.tag),
            ("urn", &self.urn),
            ("why", &self.why),
            ("last_execution.class", &self.error_class),
        ];
        let mut all: Vec<Document> = equal.into_iter().filter_map(|(field, value)| Some(doc! { field: value.as_ref()? })).collect();
        if self.failed {
            all.push(has_failed());
        }
        all.extend(self.stage.map(|(stage, at)| is_in(stage, at)));
        if let Some(text) = &self.message {
            all.push(doc! { "last_execution.message": { "$regex": literally(text), "$options": "i" } });
        }
        if let Some(period) = between(self.since.map(Bson::from), self.until.map(Bson::from)) {
            if archived {
                all.push(doc! { "last_execution.ended_at": period });
            } else {
                // A job enqueued from another language may have no date except the one in its id.
                let ids = between(self.since.map(first_id), self.until.map(first_id)).unwrap_or_default();
                all.push(doc! { "$or": [{ "created_at": period }, { "created_at": null, "_id": ids }] });
            }
        }
        all.extend((!more.is_empty()).then_some(more));
        if all.is_empty() {
            doc! {}
        } else {
            doc! { "$and": all }
        }
    }

    /// The first documents that match, one more than fits on the page.
    async fn look(
        &self,
        collection: &Collection<Document>,
        archived: bool,
        page: Page,
        more: Document,
        sort: Document,
    ) -> Result<Vec<RawDocumentBuf>, StoreError> {
        let mut wanted = self.fields(archived, page.after.map_or(doc! {}, |after| doc! { "_id": { "$lt": after } }));
        wanted.extend(more);
        let collection = collection.clone_with_type::<RawDocumentBuf>();
        let limit = i64::from(page.limit.max(1)) + 1;
        let find = async move {
            collection.find(wanted).projection(columns(page)).sort(sort).limit(limit).max_time(LOOK_LIMIT).await?.try_collect().await
        };
        call("jobs", find).await
    }
}

fn has_failed() -> Document {
    doc! { "why": { "$nin": [FinishReason::DONE, FinishReason::CANCELLED] } }
}

/// The condition of a stage, as [`Stage::of`] decides it.
fn is_in(stage: Stage, now: Instant) -> Document {
    let is_requested = doc! { "$type": "date" };
    let waits = || vec![doc! { "waiting": true }, doc! { "unique_after": { "$gte": "" } }];
    match stage {
        Stage::Waits => doc! { "locked": false, "$or": waits() },
        Stage::Postponed => doc! { "locked": false, "scheduled_at": { "$gt": now }, "$nor": waits() },
        Stage::Queued => doc! { "locked": false, "scheduled_at": { "$lte": now }, "$nor": waits() },
        Stage::Running => doc! { "locked": true, "cancel_requested_at": { "$not": is_requested } },
        Stage::Cancelling => doc! { "locked": true, "cancel_requested_at": is_requested },
        Stage::Done => doc! { "why": FinishReason::DONE },
        Stage::Cancelled => doc! { "why": FinishReason::CANCELLED },
        Stage::Failed => has_failed(),
    }
}

fn columns(page: Page) -> Document {
    if page.whole {
        doc! {}
    } else {
        doc! { "workable.parameters": 0, "workable.items": 0, "item_outcomes": 0, "result": 0, "executions": 0, "last_execution.trace": 0, "checkpoint": 0, "log": 0 }
    }
}

fn between(since: Option<Bson>, until: Option<Bson>) -> Option<Document> {
    let mut period = doc! {};
    period.extend(since.map(|since| ("$gte".to_owned(), since)));
    period.extend(until.map(|until| ("$lt".to_owned(), until)));
    (!period.is_empty()).then_some(period)
}

/// The smallest id of the first whole second at or after this instant.
fn first_id(at: Instant) -> Bson {
    let seconds = at.timestamp() + i64::from(at.timestamp_subsec_nanos() > 0);
    let mut bytes = [0; 12];
    bytes[..4].copy_from_slice(&u32::try_from(seconds.max(0)).unwrap_or(u32::MAX).to_be_bytes());
    ObjectId::from_bytes(bytes).into()
}

impl Client {
    /// One page of the jobs that match, newest first. If only the archive is searched, the order is that of the ends of the last
    /// executions; otherwise that of `_id`, whose resolution is one second.
    ///
    /// A document that cannot be decoded hides no other, and a job that moves between the reads is listed once.
    ///
    /// # Errors
    /// When MongoDB cannot be used, or needs more than eight seconds to find them: narrow the filter.
    pub async fn jobs(&self, filter: &JobFilter, page: Page) -> Result<Listed, StoreError> {
        // Running jobs are those that the roster lists. The archive is read last and takes precedence.
        let store = self.store();
        let by_id = doc! { "_id": -1 };
        match filter.state {
            _ if filter.is_archived() => store.finished_jobs(filter, page).await,
            Some(StateFilter::Waiting) => {
                let found = filter.look(&self.scheduled, false, page, doc! { "locked": false }, by_id).await?;
                Ok(newest(found, page))
            }
            Some(StateFilter::Running) => {
                let mut running = Vec::new();
                for jobs in store.held_jobs().await?.chunks(IDS_PER_QUERY) {
                    let held = doc! { "_id": { "$in": jobs.to_vec() }, "locked": true };
                    running.extend(filter.look(&self.scheduled, false, page, held, by_id.clone()).await?);
                }
                Ok(newest(running, page))
            }
            Some(StateFilter::Archived) | None => {
                let mut all = filter.look(&self.scheduled, false, page, doc! {}, by_id.clone()).await?;
                let archived = filter.look(&self.archived, true, page, doc! {}, by_id).await?;
                let moved: HashSet<JobId> = archived.iter().filter_map(|job| raw_id_of(job)).collect();
                all.retain(|job| !raw_id_of(job).is_some_and(|id| moved.contains(&id)));
                all.extend(archived);
                Ok(newest(all, page))
            }
        }
    }
}

impl Store {
    /// One page of archived jobs by their end. Jobs that ended in the same millisecond have the order of the index,
    /// which is stable: a page begins after the last job of the previous page.
    async fn finished_jobs(&self, filter: &JobFilter, page: Page) -> Result<Listed, StoreError> {
        let mut filter = filter.clone();
        if let Some(after) = page.after {
            let last = self.jobs_by_id(&[after]).await?.remove(&after);
            let Some(ended_at) = last.and_then(|job| job.document.get_document("last_execution").ok()?.get_datetime("ended_at").ok())
            else {
                return Ok(Listed::default());
            };
            let behind = ended_at.to_chrono() + chrono::TimeDelta::milliseconds(1);
            filter.until = Some(filter.until.map_or(behind, |until| until.min(behind)));
        }
        let archived = self.archived.clone_with_type::<RawDocumentBuf>();
        let wanted = filter.fields(true, doc! {});
        let most = usize::from(page.limit.max(1));
        call("jobs", async move {
            let find = archived.find(wanted).projection(columns(page)).sort(doc! { "last_execution.ended_at": -1 }).max_time(LOOK_LIMIT);
            let mut found = find.batch_size(u32::from(page.limit) + 1).await?;
            let (mut jobs, mut is_behind) = (Vec::new(), page.after.is_none());
            while let Some(job) = found.try_next().await? {
                if !is_behind {
                    is_behind = raw_id_of(&job) == page.after;
                } else if jobs.len() == most {
                    return Ok(Listed { jobs, more: true });
                } else {
                    jobs.push(job);
                }
            }
            Ok(Listed { jobs, more: false })
        })
        .await
    }

    /// The next jobs of a walk over all that match; `None` at the end of the walk.
    ///
    /// Filter: the given one, within the next few thousand documents, fewer when MongoDB is slow. Index: `_id`, or
    /// `archived_by_end` for a period of the archive. Invariant: none, each change repeats its own conditions.
    pub async fn next_matches(&self, walk: &mut Walk) -> Result<Option<Vec<Match>>, StoreError> {
        while !walk.is_over {
            match self.step(walk).await {
                Ok((found, None)) => {
                    walk.is_over = true;
                    walk.looked_at += walk.step;
                    return Ok(Some(found));
                }
                Ok((found, bound)) => {
                    walk.looked_at += walk.step;
                    walk.after = bound;
                    return Ok(Some(found));
                }
                Err(error) if walk.step > SMALLEST_STEP && (error.is_too_slow() || matches!(error, StoreError::TimedOut { .. })) => {
                    walk.step = (walk.step / 4).max(SMALLEST_STEP);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    /// The matches among the next documents, and the key of the last document examined, or `None` if no documents are
    /// left.
    async fn step(&self, walk: &Walk) -> Result<(Vec<Match>, Option<Bson>), StoreError> {
        let archived = walk.filter.is_archived();
        let collection = if archived { &self.archived } else { &self.scheduled };
        let (key, index) = match walk.key().0 {
            "_id" => ("_id", IndexHint::Name("_id_".into())),
            key => (key, self.index(ARCHIVED_BY_END)),
        };
        let (collection, ahead) = (collection.clone_with_type::<RawDocumentBuf>(), walk.range(None));
        let (bounds, step, bounds_index) = (collection.clone(), walk.step, index.clone());
        let bound = self
            .indexed("next_matches", async move {
                let bound = bounds.find_one(ahead).sort(doc! { key: 1 }).skip(step).projection(doc! { key: 1 });
                bound.hint(bounds_index).max_time(LOOK_LIMIT).await
            })
            .await?;
        let bound = bound.and_then(|document| match key {
            "_id" => document.get_object_id("_id").ok().map(Bson::from),
            _ => document.get_document("last_execution").ok()?.get_datetime("ended_at").ok().map(Bson::from),
        });
        let mut wanted = walk.filter.fields(archived, walk.range(bound.as_ref()));
        match walk.filter.state {
            Some(StateFilter::Waiting) => wanted.extend(doc! { "locked": false }),
            Some(StateFilter::Running) => wanted.extend(doc! { "locked": true }),
            Some(StateFilter::Archived) | None => {}
        }
        let found: Vec<RawDocumentBuf> = self
            .indexed("next_matches", async move {
                let found = collection.find(wanted).projection(doc! { "_id": 1, "bytes": { "$bsonSize": "$$ROOT" } });
                found.hint(index).batch_size(10_000).max_time(LOOK_LIMIT).await?.try_collect().await
            })
            .await?;
        let bytes = |job: &RawDocument| usize::try_from(job.get_i32("bytes").unwrap_or(0)).unwrap_or(0);
        let found = found.iter().filter_map(|job| Some(Match { job: raw_id_of(job)?, bytes: bytes(job) })).collect();
        Ok((found, bound))
    }

    /// Estimated number of documents that a walk examines.
    ///
    /// Filter: none. Index: none, MongoDB keeps the number. Invariant: none.
    pub async fn walk_length(&self, walk: &Walk) -> Result<u64, StoreError> {
        let collection = if walk.filter.is_archived() { self.archived.clone() } else { self.scheduled.clone() };
        call("walk_length", async move { collection.estimated_document_count().await }).await
    }

    /// Every job that a worker can have locked, according to the roster.
    pub(crate) async fn held_jobs(&self) -> Result<Vec<JobId>, StoreError> {
        let mut held: Vec<JobId> = Vec::new();
        for worker in self.roster_documents().await? {
            let worker = lossy(&worker);
            let id = worker.get_object_id("_id").map(|id| id.to_hex()).unwrap_or_default();
            held.extend(ids_in(worker.get_document("assigned_to").ok().and_then(|map| map.get(id))));
            held.extend(ids_in(worker.get("working_on")));
        }
        held.sort_unstable();
        held.dedup();
        Ok(held)
    }
}

fn newest(mut jobs: Vec<RawDocumentBuf>, page: Page) -> Listed {
    let most = usize::from(page.limit.max(1));
    jobs.sort_by_key(|job| std::cmp::Reverse(raw_id_of(job)));
    let more = jobs.len() > most;
    jobs.truncate(most);
    Listed { jobs, more }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_searched_for_literally() {
        assert_eq!(literally("a.b (50 %) ü\\"), "a\\.b \\(50 \\%\\) ü\\\\");
    }

    #[test]
    fn a_period_is_cut_at_whole_seconds_for_ids() {
        let id = |ms: i64| first_id(Instant::from_timestamp_millis(ms).expect("a date")).to_string();
        assert!(id(1_000).contains("000000010000000000000000") && id(1_001).contains("000000020000000000000000"), "{}", id(1_001));
        assert!(id(-5).contains("000000000000000000000000"));
    }
}
