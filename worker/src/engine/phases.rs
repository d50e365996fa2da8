//! The phase of each job that a session holds, and the order in which jobs that are locked ahead get slots.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use recruiter_common::{ids::JobId, store::Position};
use tokio::sync::oneshot;

use crate::cancellation::Cancel;

/// The phase of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// The start of the job is on its way, and a slot is reserved for it.
    Reserved,
    /// The job is locked ahead, and gets a slot at this position: its start is on its way, or is answered and the job waits.
    LockedAhead(Position),
    /// The job was locked ahead and is not run: it is released.
    Recalled,
    /// The job runs.
    Running,
    /// The job was executed, and its end is being recorded.
    Ended,
    /// The end of the job is recorded, and its hooks run.
    Recorded,
}

impl Phase {
    fn has_slot(self) -> bool {
        matches!(self, Self::Reserved | Self::Running)
    }
}

/// The jobs of a session by their phase. A job can be cancelled in each phase.
#[derive(Debug, Default)]
pub(crate) struct Phases {
    entries: HashMap<JobId, (Phase, Arc<Cancel>)>,
    /// The number of slots in use.
    in_slots: u32,
    /// The jobs that are locked ahead; with where the slot is sent, once their start is answered.
    ahead: BTreeMap<Position, Option<oneshot::Sender<()>>>,
}

impl Phases {
    /// Sets the phase of a job, which may be new. Returns its cancellation.
    pub(crate) fn set(&mut self, job: JobId, phase: Phase) -> Arc<Cancel> {
        let cancel = self.remove(job).unwrap_or_default();
        self.in_slots += u32::from(phase.has_slot());
        if let Phase::LockedAhead(position) = phase {
            self.ahead.insert(position, None);
        }
        self.entries.insert(job, (phase, cancel.clone()));
        cancel
    }

    /// Sets the phase of a job, if the session holds it. Returns whether it does.
    pub(crate) fn change(&mut self, job: JobId, phase: Phase) -> bool {
        let is_held = self.entries.contains_key(&job);
        if is_held {
            self.set(job, phase);
        }
        is_held
    }

    /// Removes a job. Returns its cancellation.
    pub(crate) fn remove(&mut self, job: JobId) -> Option<Arc<Cancel>> {
        let (phase, cancel) = self.entries.remove(&job)?;
        self.in_slots -= u32::from(phase.has_slot());
        if let Phase::LockedAhead(position) = phase {
            self.ahead.remove(&position);
        }
        Some(cancel)
    }

    pub(crate) fn get(&self, job: JobId) -> Option<(Phase, &Arc<Cancel>)> {
        self.entries.get(&job).map(|(phase, cancel)| (*phase, cancel))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (JobId, Phase, &Arc<Cancel>)> {
        self.entries.iter().map(|(job, (phase, cancel))| (*job, *phase, cancel))
    }

    /// The number of slots in use.
    pub(crate) fn in_slots(&self) -> u32 {
        self.in_slots
    }

    /// The number of jobs that are locked ahead.
    pub(crate) fn locked_ahead(&self) -> u32 {
        u32::try_from(self.ahead.len()).unwrap_or(u32::MAX)
    }

    /// The number of jobs without a slot that do not wait for one: their ends are not recorded, or their hooks still run.
    pub(crate) fn ending(&self) -> u32 {
        u32::try_from(self.entries.len()).unwrap_or(u32::MAX).saturating_sub(self.in_slots).saturating_sub(self.locked_ahead())
    }

    /// The start of a job that is locked ahead is answered. Returns where its slot arrives. That fails if the job is recalled.
    pub(crate) fn wait(&mut self, job: JobId) -> oneshot::Receiver<()> {
        let (sender, slot) = oneshot::channel();
        if let Some((Phase::LockedAhead(position), _)) = self.get(job) {
            self.ahead.insert(position, Some(sender));
        }
        slot
    }

    /// Whether the first job that is locked ahead waits for a slot. Until its start is answered, the others wait behind it.
    pub(crate) fn is_waiting(&self) -> bool {
        self.ahead.first_key_value().is_some_and(|(_, slot)| slot.is_some())
    }

    /// Gives a slot to the first job that is locked ahead.
    pub(crate) fn give_slot(&mut self) {
        if let Some(((_, _, job), slot)) = self.ahead.pop_first() {
            self.set(job, Phase::Running);
            // The task of the job may have stopped waiting. It then reads the phase.
            let _ = slot.map(|slot| slot.send(()));
        }
    }

    /// Recalls all jobs that are locked ahead, also those whose start is on its way.
    pub(crate) fn recall_all(&mut self) {
        while let Some(((_, _, job), _)) = self.ahead.pop_first() {
            self.set(job, Phase::Recalled);
        }
    }

    /// Recalls a job, unless it has a slot. Returns whether it has one.
    pub(crate) fn recall(&mut self, job: JobId) -> bool {
        let has_slot = self.get(job).is_some_and(|(phase, _)| phase.has_slot());
        if !has_slot {
            self.change(job, Phase::Recalled);
        }
        has_slot
    }
}
