//! The jobs that a session holds: one map, with the phase of each job, behind one mutex.
//!
//! ```text
//! Limited ─┬─▶ Queued ─┬─▶ Starting ───────────────────────┬─▶ Running ─▶ Ended ─▶ Recorded ─▶ removed
//!          │           └─▶ LockedAhead ─┬─ a slot is free ─┘
//!          │                 ▲          └─▶ Recalled ─▶ Ended ─▶ Unlocked ─▶ removed, and returned to the recruiter
//!          └─▶ LimitedAhead ─┴─ without permits in time ─▶ Recalled
//! ```
//!
//! A slot is reserved before a job is locked, unless the job is locked ahead. The slot is free for another job as soon as the first has been
//! executed: a job that is locked ahead gets it at once. The job stays in the map until its end is recorded and its hooks have returned. The
//! number of such jobs is limited. Reports and heartbeats write the jobs of the map into the roster, where a cleaner finds them.
//!
//! Everything else is derived: the free slots, the jobs ahead, the room of a class, the permits, and what the roster shows. The session, its
//! heartbeat and its running jobs share one [`Held`]. No lock is held while something is awaited.

mod intake;
mod known;
mod pace;
mod permits;
mod queue;
mod roster;
mod shortage;
mod slots;
mod startable;
mod unconfirmed;

use parking_lot::Mutex;
use recruiter_common::store::{ClassSlots, line_of_gate};
use tokio::sync::Notify;

use self::known::Known;
pub(crate) use self::{
    intake::Next,
    startable::{Startable, Started},
};
use crate::{handed::Places, threads::Threads};

/// The jobs of a session.
pub(crate) struct Held {
    known: Mutex<Known>,
    /// Notified when a slot or a permit may have become free.
    pub(crate) has_ended: Notify,
}

impl Held {
    /// `threads` are those of the worker's blocking jobs, `limits` its classes that have a limit.
    pub(crate) fn new(capacity: u32, threads: Threads, limits: Vec<ClassSlots>) -> Self {
        Self { known: Mutex::new(Known::new(capacity, threads, limits)), has_ended: Notify::new() }
    }

    /// Opens only the slots for which clients wait at these places.
    pub(crate) fn for_clients(self, places: Option<&Places>) -> Self {
        self.known.lock().places = places.cloned();
        self
    }
}

/// The phase of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The job was read, and waits for the permits of another job.
    Limited,
    /// The job was read, and waits for its start.
    Queued,
    /// The start of the job is on its way, and a slot is reserved for it.
    Starting,
    /// The job gets a slot later: its start is on its way, or is answered and the job waits.
    LockedAhead,
    /// The same, but first it needs the permits of another job.
    LimitedAhead,
    /// The job was locked ahead and is not run: it is being released.
    Recalled,
    /// The job was locked ahead and is released. In the recruiter's view the worker still holds it.
    Unlocked,
    /// The job runs.
    Running,
    /// The job was executed, and its end is being recorded.
    Ended,
    /// The end of the job is recorded, and its hooks run.
    Recorded,
}

impl Phase {
    const COUNT: usize = Self::Recorded as usize + 1;
    /// A job in these waits for its start.
    const QUEUED: [Self; 2] = [Self::Limited, Self::Queued];
    /// A job in these waits for the permits of another job.
    const WAITS_FOR_PERMITS: [Self; 2] = [Self::Limited, Self::LimitedAhead];
    /// A job in these is locked ahead.
    const AHEAD: [Self; 2] = [Self::LockedAhead, Self::LimitedAhead];
    /// A job in these uses a slot.
    const IN_SLOTS: [Self; 2] = [Self::Starting, Self::Running];
    /// A job in these neither uses a slot nor waits for one.
    const ENDING: [Self; 4] = [Self::Recalled, Self::Unlocked, Self::Ended, Self::Recorded];

    /// Whether the job counts against the limit of its class: it is to be run, or runs.
    fn is_open(self) -> bool {
        !Self::ENDING.contains(&self)
    }

    /// Whether the worker may have locked the job before its next report.
    fn is_held(self) -> bool {
        self != Self::Recorded
    }

    /// The same, without jobs whose start is not on its way yet.
    fn is_started(self) -> bool {
        self.is_held() && !Self::QUEUED.contains(&self)
    }

    /// Whether the job is assigned, and the worker has not run it.
    fn is_prefetched(self) -> bool {
        Self::QUEUED.contains(&self) || Self::AHEAD.contains(&self) || matches!(self, Self::Starting | Self::Recalled)
    }

    /// Whether a request can still cancel the job.
    fn is_cancellable(self) -> bool {
        Self::AHEAD.contains(&self) || matches!(self, Self::Starting | Self::Recalled | Self::Running)
    }

    /// Whether the job needs its permits: until it has returned; in a line, until its end is recorded.
    fn needs_permits(self, gate: Option<&str>) -> bool {
        self.is_open() || (self != Self::Recorded && gate.is_some_and(|gate| line_of_gate(gate).is_some()))
    }
}
