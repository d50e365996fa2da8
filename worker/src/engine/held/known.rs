//! What the mutex of [`Held`](super::Held) protects: the map of jobs, and indexes of it that only this file changes.

use std::{
    collections::{BTreeSet, HashMap},
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
    startable::{PermitLane, Startable},
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
    /// Index: the order in which jobs that are locked ahead get slots.
    ahead: BTreeSet<Position>,
    /// Index: the order in which jobs that are locked ahead get the permits of each lane.
    limited_ahead: HashMap<PermitLane, BTreeSet<Position>>,
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
    /// The lane whose permits it waits for.
    waits_for: Option<PermitLane>,
    /// Where its slot is sent, if it is locked ahead and its start is answered.
    slot: Option<oneshot::Sender<()>>,
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
        let permits = job.permits().map(|names| Permits::new(job.permit_lane(), names.to_vec()));
        let waits_for = (phase == Phase::Limited).then(|| job.permit_lane());
        let freed = waits_for.as_ref().and_then(|lane| self.free_permits.take(lane));
        let entry = Entry { phase, position: job.position(), class, permits, waits_for, slot: None, cancel: Arc::default() };
        self.jobs.insert(job.id(), entry);
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
        let lane = entry.waits_for.clone();
        if !Phase::WAITS_FOR_PERMITS.contains(&phase) {
            entry.waits_for = None;
        }
        if !Phase::AHEAD.contains(&phase) {
            entry.slot = None;
        }
        if let (Phase::Running, Some(permits)) = (phase, &mut entry.permits) {
            permits.note_running();
        }
        self.leave(before, class, position, lane.as_ref());
        self.count(phase, class, 1);
        match (phase, lane) {
            (Phase::LockedAhead, _) => self.ahead.insert(position),
            (Phase::LimitedAhead, Some(lane)) => self.limited_ahead.entry(lane).or_default().insert(position),
            _ => false,
        };
        self.pass(freed);
        true
    }

    /// Removes a job. Returns the phase that it was in.
    pub(super) fn remove(&mut self, job: JobId) -> Option<Phase> {
        let Entry { phase, position, class, permits, waits_for, .. } = self.jobs.remove(&job)?;
        self.leave(phase, class, position, waits_for.as_ref());
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

    fn leave(&mut self, phase: Phase, class: Option<usize>, position: Position, lane: Option<&PermitLane>) {
        self.count(phase, class, -1);
        if phase == Phase::LockedAhead {
            self.ahead.remove(&position);
        }
        if let (Phase::LimitedAhead, Some(lane)) = (phase, lane)
            && let Some(of_lane) = self.limited_ahead.get_mut(lane)
        {
            of_lane.remove(&position);
            if of_lane.is_empty() {
                self.limited_ahead.remove(lane);
            }
        }
    }

    fn count(&mut self, phase: Phase, class: Option<usize>, change: i32) {
        let counts = &mut self.counts[phase as usize];
        *counts = counts.saturating_add_signed(change);
        if let Some(class) = class.filter(|_| phase.is_open()) {
            self.open[class] = self.open[class].saturating_add_signed(change);
        }
    }

    /// Gives permits that a job no longer needs to the next job of their lane: those that are locked ahead come first. If there is none,
    /// they are kept for a moment.
    fn pass(&mut self, permits: Option<Permits>) {
        let Some(mut permits) = permits else { return };
        permits.note_returned();
        let locked = self.first_ahead(&permits.lane).map(|job| (job, Phase::LockedAhead));
        let Some((job, phase)) = locked.or_else(|| Some((self.queue.give(&permits)?, Phase::Queued))) else {
            return self.free_permits.0.push((permits, Monotonic::now()));
        };
        self.set(job, phase);
        if let Some(entry) = self.jobs.get_mut(&job) {
            entry.permits = Some(permits);
        }
    }

    /// The first of the jobs that are locked ahead of permits of this lane: of those whose start is answered, if there are any.
    fn first_ahead(&self, lane: &PermitLane) -> Option<JobId> {
        let mut jobs = self.limited_ahead.get(lane)?.iter().map(|position| position.2);
        let first = jobs.clone().next();
        let is_answered = |job: &JobId| self.jobs.get(job).is_some_and(|entry| entry.slot.is_some());
        jobs.find(is_answered).or(first)
    }

    /// Takes out of the queue what is locked ahead of permits, until there are up to `most`: of each lane as many as get its permits while a
    /// start is answered. None before half of the last ones have got theirs, nor before a job that is ready and waits for a slot.
    ///
    /// They are started under permits of their lane, and get others of it. Only some of a lane may have one of the group, if that has a limit
    /// since then. Then they are started without it: until they end, the group counts them as jobs that may have none.
    pub(super) fn pop_limited(&mut self, most: u32) -> Vec<Startable> {
        let mut lanes: HashMap<&PermitLane, (f64, &[String])> = HashMap::new();
        for permits in self.permits() {
            let (per_second, names) = lanes.entry(&permits.lane).or_insert((0.0, &permits.names));
            *per_second += permits.per_second();
            if permits.names.len() < names.len() {
                *names = &permits.names;
            }
        }
        let mut wanted: Vec<(Position, PermitLane, Vec<String>, u32)> = lanes
            .into_iter()
            .filter_map(|(lane, (per_second, names))| {
                let first = self.queue.first_of(lane).filter(|first| self.queue.first().is_none_or(|ready| *first < ready))?;
                Some((first, lane.clone(), names.to_vec(), self.pace.to_lock_of(per_second)))
            })
            .collect();
        wanted.sort_unstable_by_key(|(first, ..)| *first);
        let locked = |lane: &PermitLane| self.limited_ahead.get(lane).map_or(0, |jobs| u32::try_from(jobs.len()).unwrap_or(u32::MAX));
        let rooms: Vec<u32> = wanted.iter().map(|(_, lane, _, count)| count.saturating_sub(locked(lane))).collect();
        let of_these: u32 = wanted.iter().map(|(_, lane, ..)| locked(lane)).sum();
        let mut left = rooms.iter().fold(0, |all: u32, room| all.saturating_add(*room));
        left = left.min(most.saturating_sub(self.number(&[Phase::LimitedAhead])));
        let mut jobs = Vec::new();
        if left < of_these {
            return jobs;
        }
        for ((_, lane, names, _), room) in wanted.into_iter().zip(rooms) {
            let (room, before) = (room.min(left), jobs.len());
            jobs.extend((0..room).map_while(|_| self.queue.pop_of(&lane, &names)));
            left -= u32::try_from(jobs.len() - before).unwrap_or(left);
        }
        jobs
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
        if let Some(entry) = self.jobs.get_mut(&job).filter(|entry| Phase::AHEAD.contains(&entry.phase)) {
            entry.slot = Some(sender);
        }
        slot
    }

    /// Gives free slots to the first jobs that are locked ahead. Until the start of the first is answered, the others wait behind it.
    pub(super) fn give_slots(&mut self) {
        while let Some((_, _, job)) = self.ahead.first().copied()
            && self.free() > 0
            && let Some(slot) = self.jobs.get_mut(&job).and_then(|entry| entry.slot.take())
        {
            self.set(job, Phase::Running);
            // The task of the job may have stopped waiting. It then reads the phase.
            let _ = slot.send(());
        }
    }

    /// Recalls all jobs that are locked ahead, also those whose start is on its way.
    pub(super) fn recall(&mut self) {
        let ahead: Vec<JobId> = self.jobs(|phase| Phase::AHEAD.contains(&phase)).collect();
        for job in ahead {
            self.set(job, Phase::Recalled);
        }
    }
}
