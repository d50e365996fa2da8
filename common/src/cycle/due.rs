//! The first due jobs of some lanes.
//!
//! A search is a local read of the primary. If it misses a job, the next search finds it. If it finds a job that was started in the
//! meantime, the guard of the start refuses it. The indexes cover the search, so its cost does not depend on the size of the parameters.

use super::lanes::WALK_LIMIT;
use crate::{
    base::Instant,
    job::{Lane, ScheduledJob, lane::Position},
    mongo::{CALL_LIMIT, DUE_JOBS, GATED_JOBS, Store, StoreError},
};
use std::collections::HashSet;

use bson::{Bson, Document, RawDocumentBuf, doc};
use futures_util::TryStreamExt;
use mongodb::options::ReadConcern;

/// Maximum number of lanes in one query. MongoDB merges one index scan for each of them.
const LANES_PER_QUERY: usize = 200;
/// Number of lanes from which on a walk over the index is tried first, and the number of entries for each lane that it reads at most. With
/// more entries the merge of many scans, which reads no more of a lane than is asked for, may cost less.
const WALK_FROM: usize = 3 * LANES_PER_QUERY;
const WALKED_PER_LANE: usize = 10;

/// The answer of a search for due jobs.
#[derive(Clone, Debug, Default)]
pub struct DueJobs {
    /// The jobs, sorted by position.
    pub jobs: Vec<ScheduledJob>,
    /// The position up to which no job is missing. `None`: no job is missing.
    pub end: Option<Position>,
}

impl Store {
    /// The first unlocked jobs of these lanes that are due at `until`, by position: at most `limit`.
    ///
    /// Filter: group, class, gate, unlocked, due. MongoDB merges one index scan for each lane. Each scan is in the order of positions and
    /// skips jobs that are due later. Therefore the cost of a search depends on the number of jobs that it finds, and not on the number of
    /// waiting jobs. For very many lanes with few jobs each, one walk over the index costs less. Index: `due_jobs`, `gated_jobs`. Invariant:
    /// none, the start repeats the conditions.
    pub async fn due_jobs(&self, lanes: &[Lane], until: Instant, limit: usize) -> Result<DueJobs, StoreError> {
        let (gated, mut ordinary): (Vec<&Lane>, Vec<&Lane>) = lanes.iter().partition(|lane| lane.gate.is_some());
        let (mut jobs, mut end): (Vec<ScheduledJob>, Option<Position>) = (Vec::new(), None);
        if let Some(walked) = self.due_in_walk(&ordinary, until).await? {
            jobs = walked;
            jobs.sort_by_key(ScheduledJob::position);
            ordinary.clear();
        }
        if jobs.len() > limit {
            jobs.truncate(limit);
            end = jobs.last().map(ScheduledJob::position);
        }
        let queries = ordinary.chunks(LANES_PER_QUERY).map(|lanes| (lanes, DUE_JOBS));
        for (lanes, index) in queries.chain(gated.chunks(LANES_PER_QUERY).map(|lanes| (lanes, GATED_JOBS))) {
            let found = self.due_in_some(lanes, index, until, limit).await?;
            if found.len() >= limit {
                end = end.into_iter().chain(found.last().map(ScheduledJob::position)).min();
            }
            jobs.extend(found);
            jobs.sort_by_key(ScheduledJob::position);
            if jobs.len() > limit {
                jobs.truncate(limit);
                end = end.into_iter().chain(jobs.last().map(ScheduledJob::position)).min();
            }
        }
        if let Some(end) = end {
            jobs.truncate(jobs.partition_point(|job| job.position() <= end));
        }
        Ok(DueJobs { jobs, end })
    }

    /// The projection of a search that reads the entries of this index, and whether it can: without the index it reads the documents.
    pub(crate) fn fields_of_entry(&self, index: &str) -> (Document, bool) {
        if self.must_scan(index) {
            (doc! { "group": 1, "workable.class": 1, "gate": 1, "priority": 1, "scheduled_at": 1 }, false)
        } else {
            (doc! { "_id": 1 }, true)
        }
    }

    /// All due jobs of these lanes, which have no gate, by one walk over the index. `None` if the lanes are few, or too many jobs wait.
    async fn due_in_walk(&self, lanes: &[&Lane], until: Instant) -> Result<Option<Vec<ScheduledJob>>, StoreError> {
        if lanes.len() < WALK_FROM || lanes.iter().any(|lane| lane.priority.is_some()) {
            return Ok(None);
        }
        let most = lanes.len() * WALKED_PER_LANE;
        let asked = i64::try_from(most).unwrap_or(i64::MAX);
        let (scheduled, index) = (self.scheduled.clone_with_type::<RawDocumentBuf>(), self.index(DUE_JOBS));
        let (fields, is_entry) = self.fields_of_entry(DUE_JOBS);
        let mut due = doc! { "scheduled_at": { "$lte": until }, "locked": false };
        if !is_entry {
            due.insert("gate", Bson::Null);
        }
        let found = self
            .indexed("due_jobs", async move {
                let entries = scheduled.find(due).projection(fields).return_key(is_entry).hint(index);
                let walk = entries.limit(asked).batch_size(100_000).max_time(WALK_LIMIT).read_concern(ReadConcern::local());
                walk.await?.try_collect::<Vec<_>>().await
            })
            .await;
        let entries = match found {
            Ok(entries) if entries.len() < most => entries,
            Ok(_) => return Ok(None),
            Err(error) if error.is_too_slow() => return Ok(None),
            Err(error) => return Err(error),
        };
        let wanted: HashSet<&Lane> = lanes.iter().copied().collect();
        let jobs = entries.iter().filter_map(|entry| ScheduledJob::of_entry(entry));
        Ok(Some(jobs.filter(|job| wanted.contains(&job.lane())).collect()))
    }

    /// The first due jobs of at most [`LANES_PER_QUERY`] lanes: at least `limit`, if there are as many.
    async fn due_in_some(
        &self,
        lanes: &[&Lane],
        index: &'static str,
        until: Instant,
        limit: usize,
    ) -> Result<Vec<ScheduledJob>, StoreError> {
        let mut most = limit;
        loop {
            let asked = i64::try_from(most).unwrap_or(i64::MAX);
            let scheduled = self.scheduled.clone_with_type::<RawDocumentBuf>();
            let (fields, is_entry) = self.fields_of_entry(index);
            let (filter, index) = (due_in(lanes, until), self.index(index));
            let found: Vec<RawDocumentBuf> = self
                .indexed("due_jobs", async move {
                    scheduled
                        .find(filter)
                        .sort(doc! { "priority": -1, "scheduled_at": 1, "_id": 1 })
                        .limit(asked)
                        .batch_size(10_000)
                        // In MongoDB 6 no index covers a search for a missing field, unless the answer is the index entry itself.
                        .projection(fields)
                        .return_key(is_entry)
                        .max_time(CALL_LIMIT / 2)
                        .hint(index)
                        .read_concern(ReadConcern::local())
                        .await?
                        .try_collect()
                        .await
                })
                .await?;
            let jobs: Vec<ScheduledJob> = found.iter().filter_map(|entry| ScheduledJob::of_entry(entry)).collect();
            // Documents that are not jobs must not hide the jobs after them: ask for as many more.
            if found.len() < most || jobs.len() >= limit {
                return Ok(jobs);
            }
            most += found.len() - jobs.len();
        }
    }
}

fn due_in(lanes: &[&Lane], until: Instant) -> Document {
    doc! { "$or": lanes.iter().map(|lane| due_in_lane(lane, until)).collect::<Vec<_>>() }
}

pub(super) fn due_in_lane(lane: &Lane, until: Instant) -> Document {
    let gate = lane.gate.as_ref().map_or(Bson::Null, Bson::from);
    let mut due =
        doc! { "group": &lane.group, "workable.class": &lane.class, "gate": gate, "scheduled_at": { "$lte": until }, "locked": false };
    due.extend(lane.priority.map(|priority| ("priority".to_owned(), priority.into())));
    due
}
