//! Lanes, and lists of the lanes that have jobs.
//!
//! Except for [`Store::waiting_lanes`], the queries jump in an index from one value to the next. Their cost depends on the number of
//! groups, classes and gates, and not on the number of jobs. Names that are not UTF-8 are left out.

use crate::{
    base::Instant,
    job::{Lane, lane::class_of_entry},
    mongo::{DUE_JOBS, GATED_JOBS, Store, StoreError, any_gate},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use bson::{Bson, Document, RawDocumentBuf, doc};
use futures_util::TryStreamExt;
use mongodb::options::ReadConcern;

/// Maximum time of one walk over the whole index. It is enough for about 250,000 waiting jobs.
pub(crate) const WALK_LIMIT: Duration = Duration::from_millis(250);

impl Store {
    /// The groups that have unlocked jobs without a gate.
    ///
    /// Index: `due_jobs`. Invariant: I9, an invalid document hides no other.
    pub async fn ungated_groups(&self) -> Result<BTreeSet<String>, StoreError> {
        self.values("ungated_groups", DUE_JOBS, doc! { "$sort": { "group": 1 } }, "$group").await
    }

    /// The groups that have unlocked jobs with a gate.
    ///
    /// Index: `gated_jobs`. Invariant: I9, an invalid document hides no other.
    pub async fn gated_groups(&self) -> Result<BTreeSet<String>, StoreError> {
        self.values("gated_groups", GATED_JOBS, doc! { "$sort": { "group": 1 } }, "$group").await
    }

    /// The lanes without a gate in this group that have unlocked jobs: the first `most`, by class. Also returns whether these are all.
    ///
    /// Filter: group, a class after the last one, no gate, unlocked. Index: `due_jobs`, with one query for each class. Invariant: I9, an
    /// invalid document hides no other.
    pub async fn lanes_of(&self, group: &str, most: usize) -> Result<(Vec<Lane>, bool), StoreError> {
        // The empty string sorts before every class.
        let (mut lanes, mut class) = (Vec::new(), String::new());
        loop {
            let (scheduled, index) = (self.scheduled.clone_with_type::<RawDocumentBuf>(), self.index(DUE_JOBS));
            let (fields, is_entry) = self.fields_of_entry(DUE_JOBS);
            let after = doc! { "group": group, "workable.class": { "$gt": &class }, "gate": Bson::Null, "locked": false };
            let found = self
                .indexed("lanes_of", async move {
                    let first = scheduled.find_one(after).sort(doc! { "workable.class": 1 }).projection(fields);
                    first.return_key(is_entry).hint(index).read_concern(ReadConcern::local()).await
                })
                .await?;
            let Some(found) = found else { return Ok((lanes, true)) };
            // A query cannot continue after a class that is not UTF-8.
            let Some(next_class) = class_of_entry(&found) else { return Ok((lanes, false)) };
            if lanes.len() >= most {
                return Ok((lanes, false));
            }
            lanes.push(Lane::new(group, next_class));
            next_class.clone_into(&mut class);
        }
    }

    /// The lanes with a gate in this group that have unlocked jobs.
    ///
    /// Filter: group, class, any gate, unlocked. Index: `gated_jobs`. Invariant: I9, an invalid document hides no other.
    pub async fn gated_lanes_of(&self, group: &str) -> Result<Vec<Lane>, StoreError> {
        let mut lanes = Vec::new();
        let filter = doc! { "group": group, "gate": any_gate(), "locked": false };
        for class in self.values("gated_lanes_of", GATED_JOBS, doc! { "$match": &filter }, "$workable.class").await? {
            let mut filter = filter.clone();
            filter.insert("workable.class", &class);
            let gates = self.values("gated_lanes_of", GATED_JOBS, doc! { "$match": filter }, "$gate").await?;
            lanes.extend(gates.into_iter().map(|gate| Lane { gate: Some(gate), ..Lane::new(group, &class) }));
        }
        Ok(lanes)
    }

    /// Every lane without a gate that has unlocked jobs, with the earliest due date of its jobs.
    ///
    /// This is one walk over the whole index. If it takes too long, it ends with an error ([`StoreError::is_too_slow`]), and the caller
    /// must use [`Store::lanes_of`]. Filter: none. Index: `due_jobs`. Invariant: I9, an invalid document hides no other.
    pub async fn waiting_lanes(&self) -> Result<BTreeMap<Lane, Instant>, StoreError> {
        let (scheduled, index) = (self.scheduled.clone(), self.index(DUE_JOBS));
        let lanes = doc! { "$group": { "_id": { "group": "$group", "class": "$workable.class" }, "first": { "$min": "$scheduled_at" } } };
        let mut stages = vec![doc! { "$sort": { "group": 1, "workable.class": 1 } }, lanes];
        if self.must_scan(DUE_JOBS) {
            stages[0] = doc! { "$match": { "locked": false, "gate": Bson::Null } };
        }
        let found: Vec<RawDocumentBuf> = self
            .indexed("waiting_lanes", async move {
                scheduled
                    .aggregate(stages)
                    .with_type::<RawDocumentBuf>()
                    .hint(index)
                    .batch_size(100_000)
                    .max_time(WALK_LIMIT)
                    .read_concern(ReadConcern::local())
                    .await?
                    .try_collect()
                    .await
            })
            .await?;
        let lane = |found: &RawDocumentBuf| {
            let id = found.get_document("_id").ok()?;
            let lane = Lane::new(id.get_str("group").ok()?, id.get_str("class").ok()?);
            Some((lane, found.get_datetime("first").ok()?.to_chrono()))
        };
        Ok(found.iter().filter_map(lane).collect())
    }

    /// The values of a field in the part of an index that this stage selects.
    ///
    /// In contrast to MongoDB's command `distinct`, the answer has no limit of 16 MiB, and a name that is not UTF-8 does not cause an
    /// error.
    async fn values(
        &self,
        operation: &'static str,
        index: &'static str,
        selection: Document,
        field: &'static str,
    ) -> Result<BTreeSet<String>, StoreError> {
        let (scheduled, hint) = (self.scheduled.clone(), self.index(index));
        let mut stages = vec![selection, doc! { "$group": { "_id": field } }];
        if self.must_scan(index) {
            let gate = if index == DUE_JOBS { Bson::Null } else { any_gate().into() };
            stages.insert(0, doc! { "$match": { "locked": false, "gate": gate } });
        }
        let found: Vec<RawDocumentBuf> = self
            .indexed(operation, async move {
                scheduled
                    .aggregate(stages)
                    .with_type::<RawDocumentBuf>()
                    .hint(hint)
                    .batch_size(10_000)
                    .read_concern(ReadConcern::local())
                    .await?
                    .try_collect()
                    .await
            })
            .await?;
        Ok(found.iter().filter_map(|found| found.get_str("_id").map(str::to_owned).ok()).collect())
    }
}
