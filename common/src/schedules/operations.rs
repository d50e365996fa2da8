//! What people and the leading recruiter do with declared schedules.

use std::collections::BTreeSet;

use bson::{Document, doc};

use super::{Declared, InvalidSchedule, Run, Schedule, ScheduleError, StoredSchedule, document, runs::Advance};
use crate::{
    base::{JobId, LONGEST_NAME},
    enqueue::{EnqueueError, NewJob},
    mongo::{Client, CommitSession, Store, StoreError, readable},
};

impl Client {
    /// The schedules: declare, list, pause, run and remove them.
    pub fn schedules(&self) -> Schedules {
        Schedules(self.store())
    }
}

/// The schedules: [`Client::schedules`].
#[derive(Clone, Debug)]
pub struct Schedules(Store);

impl Schedules {
    /// Declares a schedule under this name: creates it, or changes what is different. The first run is the first slot after the
    /// declaration, also after a change of the expression, the zone or the interval. A paused schedule stays paused.
    ///
    /// Call it at each start of an application: without a difference it only reads.
    ///
    /// # Errors
    /// [`ScheduleError`]. Nothing is written if the schedule is invalid or belongs to another namespace.
    pub async fn declare(&self, name: &str, schedule: &Schedule) -> Result<Declared, ScheduleError> {
        schedule.declare_or_compare(&self.0, name, false).await
    }

    /// What [`declare`](Self::declare) would change. It writes nothing.
    ///
    /// # Errors
    /// [`ScheduleError`], as `declare`.
    pub async fn compare(&self, name: &str, schedule: &Schedule) -> Result<Declared, ScheduleError> {
        schedule.declare_or_compare(&self.0, name, true).await
    }

    /// All schedules by name. Invalid ones are listed with their problem.
    ///
    /// # Errors
    /// When MongoDB cannot be used.
    pub async fn list(&self) -> Result<Vec<(String, Result<StoredSchedule, InvalidSchedule>)>, StoreError> {
        let found = self.0.all_schedules().await?;
        Ok(found.into_iter().map(|stored| (document::name_of(&readable(&stored)), StoredSchedule::try_from(stored))).collect())
    }

    /// The names of the schedules in a namespace, valid or not.
    ///
    /// # Errors
    /// When MongoDB cannot be used.
    pub async fn names_in(&self, namespace: &str) -> Result<Vec<String>, StoreError> {
        let found = self.0.all_schedules().await?;
        let found = found.iter().map(|stored| readable(stored));
        let in_it = found.filter(|document| document.get_str("source").is_ok_and(|source| source == namespace));
        Ok(in_it.map(|document| document::name_of(&document)).collect())
    }

    /// One schedule.
    ///
    /// # Errors
    /// When there is none with this name, it is invalid, or MongoDB cannot be used.
    pub async fn find(&self, name: &str) -> Result<StoredSchedule, ScheduleError> {
        read(&self.0, name).await
    }

    /// Pauses a schedule: its slots pass without a run. Returns whether it was running; the first pause is kept.
    ///
    /// # Errors
    /// When there is no such schedule, or MongoDB cannot be used.
    pub async fn pause(&self, name: &str, by: &str, reason: &str) -> Result<bool, ScheduleError> {
        for (what, text) in [("person who pauses", by), ("reason for the pause", reason)] {
            if text.len() > 4 * LONGEST_NAME {
                return Err(InvalidSchedule::Name {
                    what,
                    problem: format!("has {} bytes, and {} is the limit", text.len(), 4 * LONGEST_NAME),
                }
                .into());
            }
        }
        self.0.fresh_clock().await?;
        let pause = doc! { "by": by, "reason": reason, "at": self.0.now() };
        let is_paused = self.0.if_set_up(self.0.pause_schedule_if_running(name, pause)).await?;
        if !is_paused {
            exists(&self.0, name).await?;
        }
        Ok(is_paused)
    }

    /// Resumes a paused schedule. The next run is the first slot after this call. Returns whether it was paused.
    ///
    /// # Errors
    /// When there is no such schedule, it is invalid, or MongoDB cannot be used.
    pub async fn resume(&self, name: &str) -> Result<bool, ScheduleError> {
        self.0.fresh_clock().await?;
        let found = read(&self.0, name).await?;
        let counting = found.schedule.counting_from(name, self.0.now());
        Ok(self.0.if_set_up(self.0.resume_schedule_if_paused(name, counting)).await?)
    }

    /// Runs a schedule once, at once and outside of its slots, whether it is paused or not. Returns the job. The history of the schedule shows
    /// the run as manual.
    ///
    /// # Errors
    /// When there is no such schedule, it is invalid, its job cannot be enqueued, or MongoDB cannot be used. After a [`StoreError`] the job may
    /// have been enqueued.
    pub async fn run_now(&self, name: &str) -> Result<JobId, ScheduleError> {
        let found = read(&self.0, name).await?;
        let job = found.schedule.job.ok_or(InvalidSchedule::NoJob)?.of_schedule(doc! { "name": name, "manual": true });
        let enqueued = job.enqueue(&self.0).await.map_err(|source| ScheduleError::Enqueue { name: name.into(), source })?;
        let run = Run { slot: None, job: enqueued.id, at: self.0.now() };
        self.0.add_run(name, run.stored()).await?;
        Ok(enqueued.id)
    }

    /// Removes a schedule. Its jobs stay. With a namespace it is removed only if it belongs to that. Returns whether it was removed.
    ///
    /// # Errors
    /// When MongoDB cannot be used.
    pub async fn remove(&self, name: &str, namespace: Option<&str>) -> Result<bool, StoreError> {
        self.0.if_set_up(self.0.remove_schedule(name, namespace)).await
    }
}

impl Store {
    /// Enqueues the jobs of slots and advances their schedules, in one transaction. Returns whether every schedule was as it was read; if not,
    /// nothing is enqueued.
    ///
    /// # Errors
    /// When a job is invalid, or MongoDB cannot be used.
    pub async fn enqueue_and_advance(
        &self,
        session: &mut CommitSession,
        batch: &[Advance],
        jobs: Vec<NewJob>,
    ) -> Result<bool, EnqueueError> {
        let groups: BTreeSet<String> = jobs.iter().map(|job| job.class_and_group().1.to_owned()).collect();
        let documents: Result<Vec<Document>, EnqueueError> = jobs.into_iter().map(|job| Ok(job.into_document(self.now())?.1)).collect();
        let is_advanced = self.advance_with_jobs(session, batch, documents?).await?;
        self.announce_jobs(groups).await;
        Ok(is_advanced)
    }
}

async fn read(store: &Store, name: &str) -> Result<StoredSchedule, ScheduleError> {
    let found = store.schedules_by_name(&[name.to_owned()]).await?.pop();
    let found = found.ok_or_else(|| ScheduleError::Unknown { name: name.into() })?;
    StoredSchedule::try_from(found).map_err(|problem| ScheduleError::Corrupt { name: name.into(), problem })
}

async fn exists(store: &Store, name: &str) -> Result<(), ScheduleError> {
    match store.schedules_by_name(&[name.to_owned()]).await?.pop() {
        Some(_) => Ok(()),
        None => Err(ScheduleError::Unknown { name: name.into() }),
    }
}
