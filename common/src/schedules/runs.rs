//! Schedules: documents in `schedulers`.
//!
//! The leading recruiter advances a schedule. All others change its definition, and pause or resume it. A change of the definition has the
//! revision in its filter, and an advance has the last slot. A change that makes the earlier slots invalid changes the last slot, too, so the
//! advance of a leader that has read the schedule before matches nothing.

use std::{collections::HashSet, sync::Arc};

use bson::{Bson, Document, RawDocumentBuf, doc};
use futures_util::{FutureExt as _, TryStreamExt};
use mongodb::options::ReadConcern;

use super::KEPT_RUNS;
use crate::{
    base::{Instant, JobId},
    mongo::{
        CommitSession, Readable, SCHEDULE_REVISIONS, Store, StoreError, call, commit, id_of, readable,
        update::{increased, literally},
        write_in,
    },
};

/// The handling of the slots of one schedule up to an instant.
#[derive(Clone, Debug)]
pub struct Advance {
    /// The schedule.
    pub name: String,
    /// Its last slot when it was read; `None` if it had none.
    pub last_slot: Option<Instant>,
    /// The slots up to this instant are handled.
    pub through: Instant,
    /// When the next run is due.
    pub next_run: Option<Instant>,
    /// New entries of the history.
    pub runs: Vec<Document>,
    /// Number of slots without a run, because an earlier run was not finished.
    pub overlap: i64,
    /// Number of slots without a run, because they were missed.
    pub missed: i64,
}

impl Store {
    /// The name and the revision of every schedule. Names that are not texts, or not UTF-8, are left out.
    ///
    /// Filter: none. Index: `schedule_revisions`, which has all that is read. Invariant: none, the caller reads again before it acts.
    pub async fn schedule_revisions(&self) -> Result<Vec<(String, Option<Bson>)>, StoreError> {
        let (schedulers, index) = (self.schedulers.clone_with_type::<RawDocumentBuf>(), self.index(SCHEDULE_REVISIONS));
        let found: Vec<RawDocumentBuf> = self
            .indexed("schedule_revisions", async move {
                let all = schedulers.find(doc! {}).projection(doc! { "_id": 1, "revision": 1 }).batch_size(10_000);
                all.hint(index).read_concern(ReadConcern::local()).await?.try_collect().await
            })
            .await?;
        let known = |found: &RawDocumentBuf| {
            let revision = readable(found).remove("revision");
            Some((found.get_str("_id").ok()?.to_owned(), revision))
        };
        Ok(found.iter().filter_map(known).collect())
    }

    /// All schedules, by name, as they are stored: one that cannot be decoded does not hide the others.
    ///
    /// Filter: none. Index: `_id`. Invariant: none.
    pub async fn all_schedules(&self) -> Result<Vec<RawDocumentBuf>, StoreError> {
        let schedulers = self.schedulers.clone_with_type::<RawDocumentBuf>();
        call("all_schedules", async move { schedulers.find(doc! {}).sort(doc! { "_id": 1 }).await?.try_collect().await }).await
    }

    /// These schedules, from the primary, as they are stored.
    ///
    /// Filter: these names. Index: `_id`. Invariant: one job for each slot: the leader reads a schedule before it enqueues its jobs.
    pub async fn schedules_by_name(&self, names: &[String]) -> Result<Vec<RawDocumentBuf>, StoreError> {
        let (schedulers, these) = (self.schedulers.clone_with_type::<RawDocumentBuf>(), doc! { "_id": { "$in": names.to_vec() } });
        call("schedules_by_name", async move { schedulers.find(these).read_concern(ReadConcern::local()).await?.try_collect().await }).await
    }

    /// Inserts a schedule. Returns false if there is one with this name.
    ///
    /// Index: `_id`. Invariant: none.
    pub async fn insert_schedule(&self, name: &str, fields: Document) -> Result<bool, StoreError> {
        let mut document = doc! { "_id": name };
        document.extend(fields);
        let schedulers = self.schedulers.clone();
        match call("insert_schedule", async move { schedulers.insert_one(document).await }).await {
            Ok(_) => Ok(true),
            Err(failed) if failed.is_duplicate() => Ok(false),
            Err(failed) => Err(failed),
        }
    }

    /// Changes these fields of a schedule, and removes those that are null here.
    ///
    /// Filter: name, and the revision as it was read. Index: `_id`. Invariant: none; two people who change it do not mix their changes.
    /// Loses when another process or an operator has changed the schedule.
    pub async fn change_schedule_if_unchanged(&self, name: &str, revision: Option<Bson>, fields: Document) -> Result<bool, StoreError> {
        let (schedulers, as_read, update) = (self.schedulers.clone(), doc! { "_id": name, "revision": revision }, changed(fields));
        let changed = call("change_schedule_if_unchanged", async move { schedulers.update_one(as_read, update).await }).await?;
        Ok(changed.matched_count == 1)
    }

    /// Those of these jobs that are not finished.
    ///
    /// Filter: these ids. Index: `_id`. Invariant: none: `overlap: "skip"` is decided by the leader alone.
    pub async fn unfinished_among(&self, jobs: &[JobId]) -> Result<HashSet<JobId>, StoreError> {
        let (scheduled, these) = (self.scheduled.clone(), doc! { "_id": { "$in": jobs.to_vec() } });
        let found: Vec<Document> = call("unfinished_among", async move {
            scheduled.find(these).projection(doc! { "_id": 1 }).read_concern(ReadConcern::local()).await?.readable().await
        })
        .await?;
        Ok(found.iter().filter_map(id_of).collect())
    }

    /// Records that the slots of schedules are handled, with one command. Returns whether every schedule was as it was read.
    ///
    /// Filter: name, and the last slot as it was read. Index: `_id`. Invariant: one job for each slot: `last_slot` never goes back by an
    /// advance. Harmless to repeat: after an unknown outcome it matches nothing.
    /// Loses when another leader has handled these slots, or the definition has changed.
    pub async fn advance_schedules(&self, batch: &[Advance]) -> Result<bool, StoreError> {
        let command = doc! {
            "update": self.schedulers.name(),
            "updates": batch.iter().map(statement_of).collect::<Vec<_>>(),
            "ordered": false,
            "writeConcern": { "w": "majority", "j": true },
        };
        Ok(self.write("advance_schedules", command).await? == batch.len())
    }

    /// Inserts the jobs of slots and advances their schedules, in one transaction. Returns whether every schedule was as it was read; if
    /// not, nothing is changed.
    ///
    /// Filter: name, and the last slot as it was read. Index: `_id`. Invariant: one job for each slot, also if a job that succeeded leaves
    /// nothing. Harmless to repeat: after an unknown outcome it matches nothing.
    /// Loses when another leader has handled these slots, or a definition has changed.
    pub async fn advance_with_jobs(&self, session: &mut CommitSession, batch: &[Advance], jobs: Vec<Document>) -> Result<bool, StoreError> {
        let (count, jobs) = (batch.len(), Arc::<[Document]>::from(jobs));
        let command = doc! { "update": self.schedulers.name(), "updates": batch.iter().map(statement_of).collect::<Vec<_>>() };
        let with = (self.clone(), jobs.clone(), command, count);
        let inserted = self.transaction("advance_with_jobs", session, with, |open, (store, jobs, command, count)| {
            async move {
                if write_in(open, &store.database, command).await? != count {
                    open.abort_transaction().await?;
                    return Ok(false);
                }
                store.scheduled.insert_many(jobs.iter()).session(&mut *open).await?;
                commit(open).await.map(|()| true)
            }
            .boxed()
        });
        match inserted.await {
            // An operator has put the last slot back, and a job of these slots waits.
            Err(failed) if failed.is_duplicate() && count == 1 => self.advance_schedules(batch).await,
            other => {
                if let Ok(true) = other {
                    self.tell_inserted(jobs.iter());
                }
                other
            }
        }
    }

    /// Adds a manual run to the history.
    ///
    /// Filter: name. Index: `_id`. Invariant: none, the history is for people, and for `overlap: "skip"`.
    pub async fn add_run(&self, name: &str, run: Document) -> Result<(), StoreError> {
        let (schedulers, it) = (self.schedulers.clone(), doc! { "_id": name });
        let update = vec![doc! { "$set": { "runs": with_runs(&[run]) } }];
        call("add_run", async move { schedulers.update_one(it, update).await }).await.map(drop)
    }

    /// Pauses a schedule.
    ///
    /// Filter: name, not paused. Index: `_id`. Invariant: none.
    /// Loses when it is paused, or is not there.
    pub async fn pause_schedule_if_running(&self, name: &str, pause: Document) -> Result<bool, StoreError> {
        let (schedulers, running) = (self.schedulers.clone(), doc! { "_id": name, "paused": null });
        let update = changed(doc! { "paused": pause, "next_run": null });
        Ok(call("pause_schedule_if_running", async move { schedulers.update_one(running, update).await }).await?.matched_count == 1)
    }

    /// Resumes a schedule. `counting` sets its last slot to now, so that it does not make up for the slots of the pause.
    ///
    /// Filter: name, paused. Index: `_id`. Invariant: none.
    /// Loses when it is not paused, or is not there.
    pub async fn resume_schedule_if_paused(&self, name: &str, mut counting: Document) -> Result<bool, StoreError> {
        let (schedulers, paused) = (self.schedulers.clone(), doc! { "_id": name, "paused": { "$ne": null } });
        counting.insert("paused", Bson::Null);
        let update = changed(counting);
        Ok(call("resume_schedule_if_paused", async move { schedulers.update_one(paused, update).await }).await?.matched_count == 1)
    }

    /// Removes a schedule; with a namespace only if it belongs to that.
    ///
    /// Filter: name, and the namespace if one is given. Index: `_id`. Invariant: none.
    pub async fn remove_schedule(&self, name: &str, namespace: Option<&str>) -> Result<bool, StoreError> {
        let mut it = doc! { "_id": name };
        if let Some(namespace) = namespace {
            it.insert("source", namespace);
        }
        let schedulers = self.schedulers.clone();
        Ok(call("remove_schedule", async move { schedulers.delete_one(it).await }).await?.deleted_count == 1)
    }
}

fn statement_of(advance: &Advance) -> Document {
    let as_read = doc! { "_id": &advance.name, "last_slot": advance.last_slot };
    doc! { "q": as_read, "u": update_of(advance) }
}

fn update_of(advance: &Advance) -> Vec<Document> {
    let mut set = doc! { "last_slot": advance.through, "next_run": advance.next_run };
    for (count, by) in [("skipped.overlap", advance.overlap), ("skipped.missed", advance.missed)] {
        if by > 0 {
            set.insert(count, increased(count, by));
        }
    }
    if !advance.runs.is_empty() {
        set.insert("runs", with_runs(&advance.runs));
    }
    vec![doc! { "$set": set }]
}

/// The update that sets these fields, and removes those that are null here. The revision is one more.
fn changed(fields: Document) -> Vec<Document> {
    let mut set = literally(fields);
    set.insert("revision", increased("revision", 1));
    vec![doc! { "$set": set }]
}

/// The history with these runs and without its oldest ones.
fn with_runs(runs: &[Document]) -> Document {
    let kept = i32::try_from(KEPT_RUNS).unwrap_or(i32::MAX);
    let before = doc! { "$cond": [{ "$isArray": "$runs" }, "$runs", []] };
    doc! { "$slice": [{ "$concatArrays": [before, { "$literal": runs }] }, -kept] }
}
