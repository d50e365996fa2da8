//! Carries out what ends of jobs bring about: in their transaction, and after it. `job/effects.rs` states what that is.

use std::collections::BTreeSet;

use bson::{Document, RawDocumentBuf};
use mongodb::{ClientSession, error::Result as DriverResult};

use crate::{
    base::{Instant, JobId},
    hints::Hint,
    job::{Archival, Recorded, ScheduledJob, rescheduling::Rescheduling},
    lines::halt_lines_in,
    mongo::{Store, id_of},
};

/// Maximum number of new jobs that a hint describes.
const ANNOUNCED: usize = 16;

impl Store {
    /// Writes the effects that belong to the transaction of these ends, which has deleted the jobs from `scheduled`: archives the jobs of which
    /// something is kept, inserts those that they become, and pauses the lines that halt.
    ///
    /// Index: `_id`. Invariant: I2, and the order of a line: [`Store::heads_of_lines`] reads the pause.
    pub(super) async fn write_effects_in(&self, session: &mut ClientSession, ends: &[Archival]) -> DriverResult<()> {
        let archived: Vec<_> = ends.iter().filter_map(Archival::document).collect();
        if !archived.is_empty() {
            self.archived.clone_with_type::<RawDocumentBuf>().insert_many(archived).session(&mut *session).await?;
        }
        let new: Vec<&Document> = ends.iter().flat_map(|end| end.effects.becomes.iter()).collect();
        if !new.is_empty() {
            self.scheduled.insert_many(new).session(&mut *session).await?;
        }
        halt_lines_in(session, &self.pauses, ends, self.now()).await
    }

    /// What follows after the commit of ends: of the group commit, or of the caller of [`Store::finish_in`]. The ended jobs are announced, and the
    /// jobs that wait for their unique keys are released. None of this can undo an end.
    ///
    /// Index: as the parts. Invariant: none, each part is repeated or looked up if it is lost.
    pub async fn follow(&self, batch: &[Archival], recorded: &[Recorded]) {
        self.announce_ends(batch.iter().zip(recorded).filter(|(_, recorded)| **recorded == Recorded::Yes).map(|(end, _)| end)).await;
        // A job whose end was not recorded may have been ended by another process.
        self.release_successors_soon(batch.iter().filter_map(|end| end.effects.frees.clone()).collect()).await;
    }

    /// The effects of ends after which the jobs run again: subscribers and the recruiter are notified.
    ///
    /// Index: none. Invariant: none, the recruiter finds due jobs without a hint.
    pub(super) async fn follow_rescheduled(&self, jobs: impl Iterator<Item = &Rescheduling> + Clone) {
        self.tell_rescheduled(jobs.clone());
        let Some(due) = jobs.clone().map(|job| job.due).min() else { return };
        let groups: BTreeSet<String> = jobs.map(|job| job.group.clone()).collect();
        let at = Some(due).filter(|due| *due > self.now());
        self.announce_hint(Hint::Jobs { groups: groups.into_iter().collect(), at, jobs: Vec::new() }).await;
    }

    /// Notifies subscribers and those who wait for the jobs of these ends, the recruiter of ended jobs that others wait for, and both of the
    /// jobs that ended jobs have become.
    ///
    /// Index: none. Invariant: none, the recruiter looks them up if the hints are lost.
    async fn announce_ends(&self, ends: impl Iterator<Item = &Archival> + Clone + Send) {
        self.tell_ended(ends.clone());
        let jobs: Vec<JobId> = ends.clone().filter(|end| end.effects.is_followed).map(Archival::job).collect();
        let new: Vec<&Document> = ends.flat_map(|end| end.effects.becomes.iter()).collect();
        if !new.is_empty() {
            self.tell_inserted(new.iter().copied());
            self.announce_hint(new_jobs_hint(&new, self.now())).await;
        }
        let waiting: Vec<JobId> = new.iter().filter(|job| job.contains_key("waiting")).filter_map(|job| id_of(job)).collect();
        if !waiting.is_empty() {
            self.announce_hint(Hint::waiting(waiting)).await;
        }
        if !jobs.is_empty() {
            self.announce_hint(Hint::Ended { jobs }).await;
        }
    }
}

/// The hint about new jobs.
fn new_jobs_hint(jobs: &[&Document], now: Instant) -> Hint {
    let groups: BTreeSet<String> = jobs.iter().filter_map(|job| job.get_str("group").ok().map(str::to_owned)).collect();
    let due = jobs.iter().filter_map(|job| Some(job.get_datetime("scheduled_at").ok()?.to_chrono())).min();
    let at = due.filter(|due| *due > now);
    let few = jobs.len() <= ANNOUNCED && at.is_none();
    let all: Option<Vec<ScheduledJob>> =
        jobs.iter().filter(|job| !job.contains_key("waiting")).map(|job| ScheduledJob::of_document(job)).collect();
    Hint::Jobs { groups: groups.into_iter().collect(), at, jobs: all.filter(|_| few).unwrap_or_default() }
}
