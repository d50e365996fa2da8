//! A limit of one: two workers, two jobs with the same gate, and the one permit, from its grant to its return.
//!
//! Recruiters remember and know nothing here either: they grant the permit to any available worker at any time, or send it a job ahead, as if
//! every plan were old, under any leader. What the index refuses is all that keeps two workers apart. A worker that is declared dead is not
//! heard of again, and may run its job for as long as it likes: its process is frozen, or is about to end.
//!
//! Left out: rates, lines, more than one resource, and permits of which a worker has several.

use stateright::{Model, Property};

use crate::{
    guards::{Guard, Guarded, Guards, KEPT, Promise},
    protocol::{CALL, Wire, possible},
};

const WORKERS: usize = 2;
const JOBS: usize = 2;

/// A limit of one in a world of limited size.
#[derive(Clone, Debug)]
pub(crate) struct Limit {
    pub(crate) faults: u8,
    pub(crate) guards: Guards,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct State {
    roster: [Option<Entry>; WORKERS],
    /// Who holds each job that is not finished, if it is locked.
    scheduled: [Option<Option<usize>>; JOBS],
    workers: [Worker; WORKERS],
    late: Vec<Report>,
    faults: u8,
    broken: Option<Promise>,
}

/// A document in `roster`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Entry {
    available: bool,
    /// `held_permits` has the permit.
    holds: bool,
    assigned: Option<Assignment>,
    /// Whether it held the permit before the last grant, if a failover can still take that grant back.
    held_before: Option<bool>,
    retired: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Assignment {
    job: usize,
    /// Granted with the job; if not, the job goes ahead, and waits in the worker for the permit of another one.
    permit: bool,
}

/// A worker's process, with a slot for each job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Worker {
    jobs: [Phase; JOBS],
    /// Which of the jobs use the permit, and whether it is there unused.
    used: [bool; JOBS],
    free: bool,
    /// What it has taken last, which it may hear again.
    heard: Option<Assignment>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum Phase {
    #[default]
    None,
    Ahead,
    Starting,
    Running,
    // The workable has returned, and the end is not recorded yet.
    Ended,
}

impl Worker {
    fn has_permit(&self) -> bool {
        self.free || self.used.contains(&true)
    }

    fn free_permit_of(&mut self, job: usize) {
        (self.used[job], self.free) = (false, true);
    }
}

/// A report on its way, which arrives when its sender does not wait for the answer any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Report {
    worker: usize,
    holds: bool,
    this_round: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Assign { worker: usize, assignment: Assignment },
    Replicate { worker: usize },
    FailOver { worker: usize },
    Take { worker: usize },
    HearAgain { worker: usize },
    // What comes next for a job in the worker's hands.
    Start { worker: usize, job: usize },
    Return { worker: usize, job: usize },
    PassOn { worker: usize, job: usize },
    Record { worker: usize, job: usize, retried: bool },
    Report { worker: usize, drops: bool, wire: Wire },
    Retire { worker: usize },
    Rescue { job: usize },
    Delete { worker: usize },
    Arrive { report: usize },
}

impl State {
    /// Whether a worker was declared dead, and has perhaps been forgotten since.
    fn is_dead(&self, worker: usize) -> bool {
        self.roster[worker].is_none_or(|entry| entry.retired)
    }

    fn is_unlocked(&self, job: usize) -> bool {
        self.scheduled[job] == Some(None)
    }

    /// Whether the index lets this worker hold the permit.
    fn index_allows(&self, worker: usize, guards: &Guards) -> bool {
        let is_held = (0..WORKERS).any(|other| other != worker && self.roster[other].is_some_and(|entry| entry.holds));
        guards.pass(Guard::GrantUnique, !is_held)
    }

    /// Takes an assignment. A job that cannot be started goes back, and its permit with the next report.
    fn take(&mut self, worker: usize, Assignment { job, permit }: Assignment) {
        let is_unlocked = self.is_unlocked(job);
        let process = &mut self.workers[worker];
        if process.jobs[job] == Phase::None && is_unlocked && (permit || process.has_permit()) {
            process.jobs[job] = if permit { Phase::Starting } else { Phase::Ahead };
            process.used[job] = permit;
        }
    }

    fn apply(&mut self, Report { worker, holds, this_round }: Report, guards: &Guards) {
        let is_allowed = !holds || self.index_allows(worker, guards);
        let Some(entry) = &mut self.roster[worker] else { return };
        if guards.pass(Guard::PermitRound, this_round) && !entry.retired && is_allowed {
            (entry.available, entry.holds) = (true, holds);
        }
    }

    /// Sends a report; whether its answer is heard.
    fn report(&mut self, worker: usize, holds: bool, wire: Wire, guards: &Guards) -> bool {
        self.faults -= u8::from(wire != Wire::Answered);
        let report = Report { worker, holds, this_round: true };
        if wire == Wire::Cut {
            self.late.push(report);
        } else {
            self.apply(report, guards);
        }
        wire == Wire::Answered
    }

    /// Starts a job, or frees its permit if the start is refused.
    fn start(&mut self, worker: usize, job: usize, guards: &Guards) {
        if !self.is_unlocked(job) || !guards.pass(Guard::LimitedStartLease, !self.is_dead(worker)) {
            self.workers[worker].jobs[job] = Phase::None;
            self.workers[worker].free_permit_of(job);
            return;
        }
        let runs_one = |other: usize| self.workers[other].jobs.contains(&Phase::Running) && !self.is_dead(other);
        if (0..WORKERS).any(runs_one) {
            self.broken.get_or_insert(Promise::WithinLimit);
        }
        self.scheduled[job] = Some(Some(worker));
        self.workers[worker].jobs[job] = Phase::Running;
    }

    /// Drops what makes no difference any more.
    fn forget(&mut self, guards: &Guards) {
        if !guards.lack(Guard::PermitRound) {
            self.late.retain(|report| report.this_round);
        }
        for worker in 0..WORKERS {
            if !guards.lack(Guard::TakenOnce) {
                self.workers[worker].heard = None;
            }
            if self.is_dead(worker) && !guards.lack(Guard::LimitedStartLease) {
                let jobs = self.workers[worker].jobs.map(|phase| if phase == Phase::Running { phase } else { Phase::None });
                self.workers[worker] = Worker { jobs, ..Worker::default() };
                self.late.retain(|report| report.worker != worker);
                if let Some(entry) = &mut self.roster[worker] {
                    entry.assigned = None;
                }
            }
        }
    }
}

impl Guarded for Limit {
    fn guards(&self) -> &Guards {
        &self.guards
    }

    fn broken(state: &State) -> Option<Promise> {
        state.broken
    }
}

impl Model for Limit {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let entry = Entry { available: true, holds: false, assigned: None, held_before: None, retired: false };
        vec![State {
            roster: [Some(entry); WORKERS],
            scheduled: [Some(None); JOBS],
            workers: [Worker::default(); WORKERS],
            late: Vec::new(),
            faults: self.faults,
            broken: None,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        if state.broken.is_some() {
            return;
        }
        for worker in 0..WORKERS {
            let process = &state.workers[worker];
            if let Some(entry) = state.roster[worker] {
                if entry.available && !entry.retired {
                    let unfinished = (0..JOBS).filter(|job| state.scheduled[*job].is_some());
                    let assigned = unfinished.flat_map(|job| [true, false].map(|permit| Assignment { job, permit }));
                    actions.extend(assigned.map(|assignment| Action::Assign { worker, assignment }));
                }
                if entry.held_before.is_some() {
                    actions.push(Action::Replicate { worker });
                    actions.extend((state.faults > 0).then_some(Action::FailOver { worker }));
                }
                if entry.assigned.is_some() && !entry.retired && self.guards.pass(Guard::GrantMajority, entry.held_before.is_none()) {
                    actions.push(Action::Take { worker });
                }
                // It takes what is assigned before it reports.
                if entry.assigned.is_none() && !entry.retired {
                    let drops = process.free && !process.jobs.contains(&Phase::Ahead);
                    if drops || !entry.available || entry.holds != process.has_permit() {
                        actions.extend(possible(&CALL, state.faults).map(|wire| Action::Report { worker, drops, wire }));
                    }
                }
                actions.push(if entry.retired { Action::Delete { worker } } else { Action::Retire { worker } });
            }
            actions.extend((state.faults > 0 && process.heard.is_some()).then_some(Action::HearAgain { worker }));
            for job in 0..JOBS {
                match process.jobs[job] {
                    Phase::None => {}
                    Phase::Ahead => actions.extend(process.free.then_some(Action::PassOn { worker, job })),
                    Phase::Starting => actions.push(Action::Start { worker, job }),
                    Phase::Running => actions.push(Action::Return { worker, job }),
                    Phase::Ended => actions.extend([true, false].map(|retried| Action::Record { worker, job, retried })),
                }
            }
        }
        let of_the_dead = |job: &usize| state.scheduled[*job].flatten().is_some_and(|worker| state.is_dead(worker));
        actions.extend((0..JOBS).filter(of_the_dead).map(|job| Action::Rescue { job }));
        actions.extend((0..state.late.len()).map(|report| Action::Arrive { report }));
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let (mut state, guards) = (last.clone(), &self.guards);
        match action {
            Action::Assign { worker, assignment } => {
                let is_allowed = !assignment.permit || state.index_allows(worker, guards);
                let entry = state.roster[worker].as_mut().filter(|_| is_allowed)?;
                if assignment.permit && !guards.pass(Guard::GrantNotHeld, !entry.holds) {
                    return None;
                }
                let (holds, held_before) = (entry.holds || assignment.permit, assignment.permit.then_some(entry.holds));
                *entry = Entry { available: false, holds, assigned: Some(assignment), held_before, ..*entry };
                for report in state.late.iter_mut().filter(|report| report.worker == worker) {
                    report.this_round = false;
                }
            }
            Action::Replicate { worker } => state.roster[worker].as_mut()?.held_before = None,
            Action::FailOver { worker } => {
                // What the worker has written since goes with it.
                let entry = state.roster[worker].as_mut()?;
                *entry = Entry { available: true, holds: entry.held_before.take()?, assigned: None, ..*entry };
                state.faults -= 1;
            }
            Action::Take { worker } => {
                let assignment = state.roster[worker].as_mut()?.assigned.take()?;
                state.workers[worker].heard = Some(assignment);
                state.take(worker, assignment);
            }
            Action::HearAgain { worker } => {
                state.faults -= 1;
                let again = state.workers[worker].heard.filter(|_| guards.lack(Guard::TakenOnce))?;
                state.take(worker, again);
            }
            Action::Start { worker, job } => state.start(worker, job, guards),
            Action::Return { worker, job } => {
                state.workers[worker].jobs[job] = Phase::Ended;
                state.workers[worker].free_permit_of(job);
            }
            Action::PassOn { worker, job } => {
                let process = &mut state.workers[worker];
                (process.jobs[job], process.used[job], process.free) = (Phase::Starting, true, false);
            }
            Action::Record { worker, job, retried } => {
                state.workers[worker].jobs[job] = Phase::None;
                if state.scheduled[job] == Some(Some(worker)) {
                    state.scheduled[job] = retried.then_some(None);
                }
            }
            Action::Report { worker, drops, wire } => {
                let holds = state.workers[worker].used.contains(&true) || (state.workers[worker].free && !drops);
                let is_heard = state.report(worker, holds, wire, guards);
                state.workers[worker].free &= !(drops && (is_heard || !guards.lack(Guard::DroppedBeforeReport)));
            }
            Action::Retire { worker } => {
                let entry = state.roster[worker].as_mut()?;
                (entry.retired, entry.available) = (true, false);
            }
            Action::Rescue { job } => state.scheduled[job] = Some(None),
            Action::Delete { worker } => state.roster[worker] = None,
            Action::Arrive { report } => {
                let report = state.late.remove(report);
                state.apply(report, guards);
            }
        }
        state.forget(guards);
        state.late.sort_unstable();
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(KEPT, |_, state: &State| state.broken.is_none()),
            Property::sometimes("a permit goes from one job to the next before the end is recorded", |_, state: &State| {
                state.workers.iter().any(|worker| worker.jobs == [Phase::Ended, Phase::Running])
            }),
            Property::sometimes("a worker runs a job beside one that was declared dead", |_, state: &State| {
                state.workers.iter().all(|worker| worker.jobs.contains(&Phase::Running))
            }),
            Property::sometimes("all jobs of the limit are finished", |_, state: &State| state.scheduled == [None; JOBS]),
        ]
    }
}
