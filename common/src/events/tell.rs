//! What becomes an event.

use bson::{Bson, Document, doc};

use super::{Event, Wanted};
use crate::{
    base::{JobId, WorkerId},
    job::{
        Archival, Recorded,
        effects::Effects,
        notes::{Notes, PROGRESS},
        rescheduling::Rescheduling,
    },
    mongo::Store,
};

/// An enqueued job, as far as its event needs it.
#[derive(Clone, Debug)]
pub(crate) struct ToldJob {
    id: JobId,
    class: String,
    group: String,
}

impl ToldJob {
    pub(crate) fn of(document: &Document) -> Option<Self> {
        let class = document.get_document("workable").ok()?.get_str("class").ok()?;
        Some(Self { id: crate::mongo::id_of(document)?, class: class.into(), group: document.get_str("group").ok()?.into() })
    }
}

impl Store {
    /// Tells that these jobs were enqueued.
    pub(crate) fn tell_enqueued(&self, jobs: &[ToldJob]) {
        let Some(wanted) = self.publisher().wanted() else { return };
        let events = jobs.iter().filter_map(|job| self.job_event(&wanted, "enqueued", job.id, &job.class, &job.group, doc! {}));
        self.tell(events.collect(), Vec::new());
    }

    /// Tells that a job was started.
    pub fn tell_started(&self, job: &crate::job::Job) {
        let Some(wanted) = self.publisher().wanted() else { return };
        let worker = job.last_execution.as_ref().and_then(|execution| execution.worker);
        let details = doc! { "attempt": job.attempts, "worker": worker.map_or(Bson::Null, Bson::from) };
        let event = self.job_event(&wanted, "started", job.id, &job.class, job.settings.group(), details);
        self.tell(event.into_iter().collect(), Vec::new());
    }

    /// Tells that jobs have ended, and which, so that waits for the jobs end at once.
    pub(crate) fn tell_ended<'a>(&self, ends: impl Iterator<Item = &'a Archival>) {
        let Some(wanted) = self.publisher().wanted() else { return };
        let (mut events, mut ended) = (Vec::new(), Vec::new());
        for end in ends {
            if wanted.ends {
                ended.push(end.job());
            }
            if wanted.patterns.is_empty() {
                continue;
            }
            let Effects { class, group, why, error, .. } = &*end.effects;
            let how = match why.as_str() {
                how @ ("done" | "cancelled" | "expired") => how,
                _ => "failed",
            };
            let mut details = doc! { "why": why.as_str() };
            details.extend(error.as_ref().map(|error| ("error".to_owned(), error.into())));
            events.extend(self.job_event(&wanted, how, end.job(), class, group, details));
        }
        self.tell(events, ended);
    }

    /// Tells that jobs will be retried.
    pub(crate) fn tell_rescheduled<'a>(&self, jobs: impl Iterator<Item = &'a Rescheduling>) {
        let Some(wanted) = self.publisher().wanted() else { return };
        let events = jobs.filter(|job| job.history.is_some()).filter_map(|job| {
            let details = doc! { "due": job.due };
            self.job_event(&wanted, "retried", job.claim.job(), &job.class, &job.group, details)
        });
        self.tell(events.collect(), Vec::new());
    }

    /// Tells which progress was recorded.
    pub(crate) fn tell_progress(&self, batch: &[Notes], recorded: &[Recorded]) {
        let Some(wanted) = self.publisher().wanted() else { return };
        let recorded = batch.iter().zip(recorded).filter(|(_, recorded)| **recorded == Recorded::Yes);
        let events = recorded.filter_map(|(notes, _)| {
            let (job, progress) = (notes.job.as_ref()?, notes.set.get_document(PROGRESS).ok()?);
            let details = doc! { "attempt": job.attempts, "progress": progress.clone() };
            self.job_event(&wanted, "progress", job.id, &job.class, job.settings.group(), details)
        });
        self.tell(events.collect(), Vec::new());
    }

    /// Tells what has happened to a worker.
    pub(crate) fn tell_of_worker(&self, what: &str, worker: WorkerId) {
        self.tell_plain(&format!("worker.{what}"), doc! { "worker": worker });
    }

    /// Tells something that happens seldom.
    pub(crate) fn tell_plain(&self, topic: &str, details: Document) {
        let Some(wanted) = self.publisher().wanted() else { return };
        if wanted.has(topic) {
            self.tell(vec![Event { topic: topic.into(), at: self.now(), details }], Vec::new());
        }
    }

    fn job_event(&self, wanted: &Wanted, how: &str, job: JobId, class: &str, group: &str, more: Document) -> Option<Event> {
        let topic = format!("job.{how}.{class}");
        wanted.has(&topic).then(|| {
            let mut details = doc! { "job": job, "class": class, "group": group };
            details.extend(more);
            Event { topic, at: self.now(), details }
        })
    }
}
