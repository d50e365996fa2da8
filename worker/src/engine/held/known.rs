//! What the mutex of [`Held`](super::Held) protects: the map of jobs, and indexes of it that only this file changes.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::Instant as Monotonic,
};

use recruiter_common::{
    ids::JobId,
    store::{ClassSlots, Position},
};
use tokio::sync::oneshot;

use super::{
    Phase,
    pace::Pace,
    permits::{FreePermits, Permits},
    queue::Queue,
    shortage::Shortage,
    startable::Startable,
    unconfirmed::Unconfirmed,
};
use crate::{cancellation::Cancel, handed::Places, threads::Threads};

/// Maximum number of jobs without a slot whose ends are not recorded yet or whose hooks still run; with more slots than this, their number.
const UNRECORDED: u32 = 64;

/// The jobs of a session.
#[derive(Default)]
pub(super) struct Known {
    /// The number of slots.
    pub(super) capacity: u32,
    /// Only as many of them as clients have places, if clients execute the jobs.
    pub(super) places: Option<Places>,
    /// The threads of the worker's blocking jobs.
    threads: Threads,
    /// The classes that have a limit in this process.
    limits: Vec<ClassSlots>,
    jobs: HashMap<JobId, Entry>,
    /// Index: the number of jobs in each phase.
    counts: [u32; Phase::COUNT],
    /// Index: the number of open jobs of each class that has a limit.
    open: Vec<u32>,
    /// Index: the order in which queued jobs start, with what their start needs.
    pub(super) queue: Queue,
    /// Index: the order in which jobs that are locked ahead get slots; with where the slot is sent, once their start is answered.
    ahead: BTreeMap<Position, Option<oneshot::Sender<()>>>,
    pub(super) free_permits: FreePermits,
    pub(super) unconfirmed: Unconfirmed,
    pub(super) shortage: Shortage,
    pub(super) pace: Pace,
    /// The number of executions that have ended since the pace was last measured.
    pub(super) ended: usize,
}

/// A job. It can be cancelled in each phase.
struct Entry {
    phase: Phase,
    position: Position,
    /// Its class among those that have a limit.
    class: Option<usize>,
    permits: Option<Permits>,
    cancel: Arc<Cancel>,
}

impl Known {
    pub(super) fn new(capacity: u32, threads: Threads, limits: Vec<ClassSlots>) -> Self {
        Self { capacity, threads, open: vec![0; limits.len()], limits, ..Self::default() }
    }

    /// Adds a job that was read. Returns it if it is not added: its class has reached its limit, or the session holds it already.
    pub(super) fn add(&mut self, job: Startable, now: Monotonic) -> Option<Startable> {
        let class = self.limits.iter().position(|limit| limit.class == job.job().class);
        if class.is_some_and(|class| self.free_of(class) == 0) || self.jobs.contains_key(&job.id()) {
            return Some(job);
        }
        let phase = if job.waits_for_permits() { Phase::Limited } else { Phase::Queued };
        let permits = job.permits().map(|names| Permits { lane: job.permit_lane(), names: names.to_vec() });
        let freed = (phase == Phase::Limited).then(|| self.free_permits.take(&job.permit_lane())).flatten();
        self.jobs.insert(job.id(), Entry { phase, position: job.position(), class, permits, cancel: Arc::default() });
        self.count(phase, class, 1);
        self.queue.add(job, now);
        self.pass(freed);
        None
    }

    /// Moves a job into a phase, if the session holds it. Returns whether it does.
    pub(super) fn set(&mut self, job: JobId, phase: Phase) -> bool {
        let Some(entry) = self.jobs.get_mut(&job) else { return false };
        let (class, position) = (entry.class, entry.position);
        let freed = entry.permits.take_if(|permits| !phase.needs_permits(permits.lane.1.as_deref()));
        let before = std::mem::replace(&mut entry.phase, phase);
        self.leave(before, class, position);
        self.count(phase, class, 1);
        if phase == Phase::LockedAhead {
            self.ahead.insert(position, None);
        }
        self.pass(freed);
        true
    }

    /// Removes a job. Returns the phase that it was in.
    pub(super) fn remove(&mut self, job: JobId) -> Option<Phase> {
        let Entry { phase, position, class, permits, .. } = self.jobs.remove(&job)?;
        self.leave(phase, class, position);
        self.pass(permits);
        Some(phase)
    }

    /// Removes these jobs, which are no longer in the queue. Returns them.
    pub(super) fn forget(&mut self, jobs: Vec<Startable>) -> Vec<Startable> {
        for job in &jobs {
            self.remove(job.id());
        }
        jobs
    }

    fn leave(&mut self, phase: Phase, class: Option<usize>, position: Position) {
        self.count(phase, class, -1);
        if phase == Phase::LockedAhead {
            self.ahead.remove(&position);
        }
    }

    fn count(&mut self, phase: Phase, class: Option<usize>, change: i32) {
        let counts = &mut self.counts[phase as usize];
        *counts = counts.saturating_add_signed(change);
        if let Some(class) = class.filter(|_| phase.is_open()) {
            self.open[class] = self.open[class].saturating_add_signed(change);
        }
    }

    /// Gives permits that a job no longer needs to the next job of their lane. If there is none, they are kept for a moment.
    fn pass(&mut self, permits: Option<Permits>) {
        let Some(permits) = permits else { return };
        match self.queue.give(&permits) {
            Some(job) => {
                self.set(job, Phase::Queued);
                if let Some(entry) = self.jobs.get_mut(&job) {
                    entry.permits = Some(permits);
                }
            }
            None => self.free_permits.0.push((permits, Monotonic::now())),
        }
    }

    pub(super) fn get(&self, job: JobId) -> Option<(Phase, &Arc<Cancel>)> {
        self.jobs.get(&job).map(|entry| (entry.phase, &entry.cancel))
    }

    /// The jobs in these phases.
    pub(super) fn jobs(&self, is_wanted: impl Fn(Phase) -> bool) -> impl Iterator<Item = JobId> {
        self.jobs.iter().filter(move |(_, entry)| is_wanted(entry.phase)).map(|(job, _)| *job)
    }

    pub(super) fn cancels(&self) -> impl Iterator<Item = &Arc<Cancel>> {
        self.jobs.values().map(|entry| &entry.cancel)
    }

    pub(super) fn has_permits(&self, job: JobId) -> bool {
        self.jobs.get(&job).is_some_and(|entry| entry.permits.is_some())
    }

    /// The permits of jobs, and the free ones.
    pub(super) fn permits(&self) -> impl Iterator<Item = &Permits> {
        self.jobs.values().filter_map(|entry| entry.permits.as_ref()).chain(self.free_permits.0.iter().map(|(permits, _)| permits))
    }

    /// The number of jobs in these phases.
    pub(super) fn number(&self, phases: &[Phase]) -> u32 {
        phases.iter().map(|phase| self.counts[*phase as usize]).sum()
    }

    /// The number of free slots. A shortage of a resource, threads of an earlier session, and too many unrecorded ends reduce it.
    pub(super) fn free(&self) -> u32 {
        let slots = self.shortage.allowed(self.capacity, Monotonic::now()).saturating_sub(self.threads.abandoned());
        let slots = self.places.as_ref().map_or(slots, |places| slots.min(places.open()));
        let in_slots = self.number(&Phase::IN_SLOTS);
        let unrecorded = slots.saturating_add(slots.max(UNRECORDED)).saturating_sub(in_slots + self.number(&Phase::ENDING));
        slots.saturating_sub(in_slots).min(unrecorded)
    }

    fn free_of(&self, class: usize) -> u32 {
        self.limits[class].free.saturating_sub(self.open[class])
    }

    /// How many more jobs of each limited class are accepted.
    pub(super) fn class_slots(&self) -> Vec<ClassSlots> {
        let slots = self.limits.iter().enumerate();
        slots.map(|(class, limit)| ClassSlots { class: limit.class.clone(), free: self.free_of(class) }).collect()
    }

    /// The start of a job that is locked ahead is answered. Returns where its slot arrives. That fails if the job is recalled.
    pub(super) fn wait(&mut self, job: JobId) -> oneshot::Receiver<()> {
        let (sender, slot) = oneshot::channel();
        if let Some(Entry { phase: Phase::LockedAhead, position, .. }) = self.jobs.get(&job) {
            self.ahead.insert(*position, Some(sender));
        }
        slot
    }

    /// Gives free slots to the first jobs that are locked ahead. Until the start of the first is answered, the others wait behind it.
    pub(super) fn give_slots(&mut self) {
        while let Some(((_, _, job), slot)) = self.ahead.first_key_value()
            && slot.is_some()
            && self.free() > 0
        {
            let (job, slot) = (*job, self.ahead.pop_first().and_then(|(_, slot)| slot));
            self.set(job, Phase::Running);
            // The task of the job may have stopped waiting. It then reads the phase.
            let _ = slot.map(|slot| slot.send(()));
        }
    }

    /// Recalls all jobs that are locked ahead, also those whose start is on its way.
    pub(super) fn recall(&mut self) {
        while let Some(((_, _, job), _)) = self.ahead.pop_first() {
            self.set(job, Phase::Recalled);
        }
    }
}
