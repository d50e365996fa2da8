//! A sample of the waiting jobs of a group, for metrics: how many, since when, and in which lanes.

use crate::{
    base::{Instant, never_due},
    job::Lane,
    mongo::{CALL_LIMIT, DUE_JOBS, GATED_JOBS, Store, StoreError, any_gate},
};

use bson::{Bson, Document, RawDocumentBuf, doc};
use futures_util::TryStreamExt;
use mongodb::options::ReadConcern;

/// Maximum number of lanes of a group whose numbers are kept apart: those with the most due jobs.
const LANES: i32 = 100;

/// The waiting jobs of one group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GroupSample {
    /// Those that are due.
    pub due: u64,
    /// Those that are due later.
    pub later: u64,
    /// Those that wait for the ends of other jobs, or for that of the job with their unique key: the index does not tell them apart.
    pub for_jobs: u64,
    /// When the first of the due ones was due.
    pub oldest: Option<Instant>,
    /// The lanes with the most due jobs, and their numbers.
    pub lanes: Vec<(Lane, u64)>,
}

impl Store {
    /// A sample of the waiting jobs of a group at `now`. At most `most` jobs without a gate, and as many with one, are read; the numbers of a
    /// group with more are those of the jobs that were read.
    ///
    /// Filter: group, no gate or any, unlocked. Index: `due_jobs`, `gated_jobs`. Invariant: none, for people.
    pub async fn sample_group(&self, group: &str, now: Instant, most: u32) -> Result<GroupSample, StoreError> {
        let mut sample = GroupSample::default();
        for index in [DUE_JOBS, GATED_JOBS] {
            let (scheduled, hint) = (self.scheduled.clone(), self.index(index));
            let gate = if index == DUE_JOBS { Bson::Null } else { any_gate().into() };
            let filter = doc! { "group": group, "gate": gate, "locked": false };
            let stages = stages(filter, index == GATED_JOBS, now, most);
            let found: Vec<RawDocumentBuf> = self
                .indexed("sample_group", async move {
                    let sampled = scheduled.aggregate(stages).with_type::<RawDocumentBuf>().hint(hint).max_time(CALL_LIMIT / 2);
                    sampled.read_concern(ReadConcern::local()).await?.try_collect().await
                })
                .await?;
            found.iter().for_each(|found| sample.add(group, found));
        }
        Ok(sample)
    }
}

/// One document: the numbers of the group, and its lanes with the most due jobs.
fn stages(filter: Document, has_gates: bool, now: Instant, most: u32) -> Vec<Document> {
    let latest = never_due();
    let count_if = |condition: Document| doc! { "$sum": { "$cond": [condition, 1_i64, 0_i64] } };
    let is_due = doc! { "$lte": ["$scheduled_at", now] };
    let mut lane = doc! { "class": "$workable.class" };
    if has_gates {
        lane.insert("gate", "$gate");
    }
    vec![
        doc! { "$match": filter },
        doc! { "$limit": i64::from(most) },
        doc! { "$group": {
            "_id": lane,
            "due": count_if(is_due.clone()),
            "for_jobs": count_if(doc! { "$gte": ["$scheduled_at", latest] }),
            "all": { "$sum": 1_i64 },
            // `$min` leaves `null` out.
            "oldest": { "$min": { "$cond": [is_due, "$scheduled_at", Bson::Null] } },
        } },
        doc! { "$group": {
            "_id": Bson::Null,
            "due": { "$sum": "$due" },
            "for_jobs": { "$sum": "$for_jobs" },
            "all": { "$sum": "$all" },
            "oldest": { "$min": "$oldest" },
            "lanes": { "$topN": { "n": LANES, "sortBy": { "due": -1, "_id": 1 }, "output": { "lane": "$_id", "due": "$due" } } },
        } },
    ]
}

impl GroupSample {
    fn add(&mut self, group: &str, found: &RawDocumentBuf) {
        let number = |name: &str| found.get_i64(name).ok().and_then(|number| u64::try_from(number).ok()).unwrap_or_default();
        let (due, for_jobs) = (number("due"), number("for_jobs"));
        self.due += due;
        self.for_jobs += for_jobs;
        self.later += number("all").saturating_sub(due + for_jobs);
        let oldest = found.get_datetime("oldest").ok().map(|at| at.to_chrono());
        self.oldest = self.oldest.into_iter().chain(oldest).min();
        let lanes = found.get_array("lanes").into_iter().flatten().filter_map(|lane| {
            let lane = lane.ok()?.as_document()?;
            let due = u64::try_from(lane.get_i64("due").ok()?).ok()?;
            let lane = lane.get_document("lane").ok()?;
            let gate = lane.get_str("gate").ok().map(str::to_owned);
            (due > 0).then_some((Lane { gate, ..Lane::new(group, lane.get_str("class").ok()?) }, due))
        });
        self.lanes.extend(lanes);
    }
}
