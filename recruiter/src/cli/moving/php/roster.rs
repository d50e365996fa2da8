//! Which jobs the living workers of the library have: those that its documents in `roster` name. A worker writes there when it idles, before
//! and after each job, so one that runs a long job is silent; the library declares it dead after `--considered-dead-after` all the same.

use std::{collections::HashMap, io::Write as _, time::Duration};

use anyhow::Context as _;
use bson::{Bson, Document, RawDocumentBuf, doc, oid::ObjectId};
use chrono::TimeDelta;
use futures_util::TryStreamExt as _;
use mongodb::Collection;
use recruiter_common::{instant::Instant, store::lossy};

use super::{
    super::{
        super::{output::printable, view::id_in},
        taking::Reason,
    },
    Left,
};

/// The workers that live, and their jobs.
#[derive(Debug, Default)]
pub(super) struct Roster {
    living: u64,
    /// The worker that has a job.
    holders: HashMap<ObjectId, String>,
}

impl Roster {
    pub(super) async fn read(roster: &Collection<RawDocumentBuf>, now: Instant, dead_after: Duration) -> anyhow::Result<Self> {
        let place = || format!("cannot read {}", roster.namespace());
        let fields = doc! { "last_seen_at": 1, "pid": 1, "assigned_to": 1, "working_on": 1 };
        let mut found = roster.find(doc! {}).projection(fields).await.with_context(place)?;
        let mut read = Self::default();
        while let Some(worker) = found.try_next().await.with_context(place)? {
            read.add(&lossy(&worker), now, dead_after);
        }
        Ok(read)
    }

    /// A worker without a date lives: nothing says that it is dead.
    fn add(&mut self, worker: &Document, now: Instant, dead_after: Duration) {
        let silence = worker.get_datetime("last_seen_at").map(|seen| now - seen.to_chrono());
        if silence.as_ref().is_ok_and(|silence| *silence >= TimeDelta::from_std(dead_after).unwrap_or(TimeDelta::MAX)) {
            return;
        }
        self.living += 1;
        let id = worker.get("_id").map(id_in).unwrap_or_default();
        // The map names the jobs of all workers that were given one together.
        let own = worker.get_document("assigned_to").ok().and_then(|assigned| assigned.get_object_id(&id).ok());
        for job in own.into_iter().chain(worker.get_object_id("working_on").ok()) {
            let pid = worker.get("pid").map(Bson::to_string).unwrap_or_default();
            self.holders.insert(job, format!("{id} (process {})", printable(&pid, 20)));
        }
    }

    /// The workers of the library must be stopped before.
    pub(super) fn warn(&self) -> std::io::Result<()> {
        if self.living == 0 {
            return Ok(());
        }
        let living = self.living;
        writeln!(std::io::stderr(), "warning: {living} workers of the library live; a job that they run after the import runs twice")
    }

    /// Whether no worker of the library has this job. Without living workers the library locks nothing.
    pub(super) fn refuse_held(&self, job: ObjectId, is_locked: bool) -> Result<(), Left> {
        let again = "stop it, and import again when it counts as dead (--dead-after)";
        match self.holders.get(&job) {
            Some(worker) => Err((Reason::Locked, format!("the worker {worker} of the library has it: {again}"))),
            None if is_locked && self.living > 0 => {
                Err((Reason::Locked, format!("it is locked, and a worker of the library lives that may have it: {again}")))
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A worker that was given a job together with another one, so many seconds before `now`.
    fn worker(silent: i64, job: ObjectId, other: ObjectId) -> Document {
        let id = ObjectId::new();
        doc! { "_id": id, "pid": 7, "last_seen_at": date(1_000 - silent), "assigned_to": { ObjectId::new().to_hex(): other, id.to_hex(): job } }
    }

    fn date(seconds: i64) -> bson::DateTime {
        bson::DateTime::from_millis(seconds * 1_000)
    }

    fn roster(workers: &[Document]) -> Roster {
        let mut roster = Roster::default();
        workers.iter().for_each(|worker| roster.add(worker, date(1_000).to_chrono(), Duration::from_secs(60)));
        roster
    }

    #[test]
    fn a_job_of_a_living_worker_is_held_and_every_locked_one_while_one_lives() {
        let (job, other) = (ObjectId::new(), ObjectId::new());
        let living = roster(&[worker(59, job, other)]);
        let (reason, why) = living.refuse_held(job, false).unwrap_err();
        assert!(reason == Reason::Locked && why.contains("(process 7)"), "{why}");
        assert!(living.refuse_held(other, true).unwrap_err().1.contains("may have it"));
        assert!(living.refuse_held(other, false).is_ok(), "the map names all jobs of a round");
        for silent in [roster(&[worker(60, job, other)]), roster(&[])] {
            assert!(silent.refuse_held(job, true).is_ok() && silent.refuse_held(other, true).is_ok());
        }
    }

    #[test]
    fn a_damaged_worker_lives() {
        let job = ObjectId::new();
        for worker in [doc! {}, doc! { "_id": 1, "last_seen_at": "now", "assigned_to": 7 }, doc! { "last_seen_at": date(i64::MAX / 1_000) }]
        {
            assert!(roster(&[worker]).refuse_held(job, true).is_err());
        }
        assert!(roster(&[doc! { "_id": ObjectId::new(), "working_on": job }]).refuse_held(job, false).is_err());
    }
}
