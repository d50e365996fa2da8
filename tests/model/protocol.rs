//! The processes: what each of them keeps in mind, and every step that any of them may take.

use stateright::{Model, Property};

use crate::{
    guards::{Guard, Guarded, Guards, KEPT, Promise},
    store::{Claim, Database, Entry, JOBS, Job, Request, WORKERS},
};

const RECRUITERS: usize = 2;

/// The protocol in a world of limited size.
#[derive(Clone, Debug)]
pub(crate) struct Protocol {
    /// The jobs that are assigned: a set, a bit for each.
    pub(crate) jobs: u8,
    pub(crate) faults: u8,
    pub(crate) slots: u8,
    pub(crate) terms: u8,
    pub(crate) guards: Guards,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct State {
    database: Database,
    /// The term of the recruiters' lease.
    lease: u8,
    recruiters: [Recruiter; RECRUITERS],
    arrivals: [Arrival; WORKERS],
    /// What each worker has in its hands, in order.
    workers: [Vec<Attempt>; WORKERS],
    cleaner: Cleaner,
    /// Faults that may still happen.
    faults: u8,
    /// How often the job that must not run again was entered.
    entered: u8,
}

/// What a recruiter believes: that it leads in this term (in none: 0), and whether it has stamped it on the roster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Recruiter {
    term: u8,
    begun: bool,
}

/// How far a worker has come, and the term that it has read, in which it becomes available.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Arrival {
    Unregistered(Option<u8>),
    Registered(Option<u8>),
    Available,
}

/// A job in a worker's hands, as it was read before the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Attempt {
    claim: Claim,
    read: Job,
    phase: Phase,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Phase {
    // The start is on its way.
    Starting { in_lease: bool },
    // There was no answer: asks which jobs carry the start.
    Asking,
    // Locked: looks for the job in the archive.
    Locked,
    // It is there: discards the copy.
    Discarding,
    // In the workable.
    Running,
    // Ended, and the outcome sent without an answer.
    Ended(End),
    // Not entered: handed back once it is seen to be locked by this start.
    Awaited,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum End {
    Archive,
    Retry,
}

/// What the cleaner has seen and not acted upon yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Cleaner {
    Idle,
    // A worker was silent for longer than its lease, and whether it still is.
    Silent { worker: usize, unchanged: bool },
    // The holder of a job is dead.
    Crashed { claim: Claim, job: Job },
}

/// What becomes of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wire {
    Answered,
    /// Carried out, but the answer is lost.
    Unanswered,
    /// Not carried out, or later; the sender does not know and goes on.
    Cut,
}

/// What can become of a call by whose answer the sender decides; of a read; and of a word that is not waited for.
pub(crate) const CALL: [Wire; 3] = [Wire::Answered, Wire::Unanswered, Wire::Cut];
const READ: [Wire; 2] = [Wire::Answered, Wire::Unanswered];
const WORD: [Wire; 2] = [Wire::Answered, Wire::Cut];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Lead { recruiter: usize },
    StampTerm { recruiter: usize },
    Assign { recruiter: usize, worker: usize, jobs: u8 },
    Register { worker: usize },
    ReadTerm { worker: usize },
    MakeAvailable { worker: usize },
    Beat { worker: usize },
    // Takes what is assigned and reads it; or starts none of it, since the lease is over or the read failed.
    Take { worker: usize, starts: bool },
    HearAgain { worker: usize, job: usize },
    TellRoster { worker: usize, wire: Wire },
    // The next call for a job in hand.
    Proceed { worker: usize, attempt: usize, end: End, wire: Wire },
    BeSeenGone { worker: usize },
    FindSilent { worker: usize },
    FindCrashed { job: usize },
    CleanUp { wire: Wire },
    Bury { worker: usize, wire: Wire },
    CleanerForgets,
    Arrive { request: usize },
    SendAgain { job: usize },
    BecomeDue { job: usize },
}

impl State {
    fn works_on(&self, worker: usize, job: usize) -> bool {
        self.workers[worker].iter().any(|attempt| attempt.claim.job == job && attempt.phase != Phase::Awaited)
    }

    /// Whether a worker is in the middle of a start, which it brings to an end before anything else.
    fn is_starting(&self, worker: usize) -> bool {
        self.workers[worker].iter().any(|attempt| !matches!(attempt.phase, Phase::Running | Phase::Ended(_) | Phase::Awaited))
    }

    /// Whether a cleaner can retire a worker by the heartbeat that still stands, after the end of its lease.
    fn is_silent(&self, worker: usize) -> bool {
        let silent = Request::RetireIfSilentSince { worker, unchanged: true };
        self.cleaner == Cleaner::Silent { worker, unchanged: true } || self.database.late.contains(&silent)
    }

    /// Whether a worker's heartbeats are acknowledged.
    fn can_beat(&self, worker: usize, guards: &Guards) -> bool {
        self.database.roster[worker]
            .map_or(guards.lack(Guard::HeartbeatNoUpsert), |entry| guards.pass(Guard::HeartbeatRetired, !entry.retired))
    }

    /// Every start that is named anywhere.
    fn claims(&self) -> impl Iterator<Item = Claim> {
        let scheduled = self.database.scheduled.iter().flatten().map(|job| [None, job.last]);
        let in_hand = self.workers.iter().flatten().map(|attempt| [Some(attempt.claim), attempt.read.last]);
        let late = self.database.late.iter().map(|request| match *request {
            Request::StartIfUnlocked { claim, read: job, .. } | Request::RescheduleIfClaimed { claim, job, .. } => [Some(claim), job.last],
            Request::Archive { claim, .. } | Request::DiscardIfClaimed { claim } => [Some(claim), None],
            Request::ReportIfUnassignedSince { .. }
            | Request::RetireIfSilentSince { .. }
            | Request::DeleteIfRetired { .. }
            | Request::Insert { .. } => [None, None],
        });
        let crashed = if let Cleaner::Crashed { claim, job } = self.cleaner { [Some(claim), job.last] } else { [None, None] };
        scheduled.chain(in_hand).chain(late).chain([crashed]).flatten().flatten()
    }

    /// Reads an assigned job and sends its start.
    fn read(&mut self, worker: usize, job: usize) {
        let Some(read) = self.database.scheduled[job].filter(|job| !job.locked) else { return };
        let mut claim = Claim { job, worker, start: 0 };
        while self.claims().any(|named| named == claim) {
            claim.start += 1;
        }
        let phase = Phase::Starting { in_lease: !self.is_silent(worker) };
        self.workers[worker].push(Attempt { claim, read, phase });
    }

    /// Sends a request; whether its filter matched, if that is heard.
    fn call(&mut self, request: Request, wire: Wire, guards: &Guards) -> Option<bool> {
        self.faults -= u8::from(wire != Wire::Answered);
        if wire == Wire::Cut {
            self.database.late.push(request);
            return None;
        }
        let matched = self.database.apply(request, guards);
        (wire == Wire::Answered).then_some(matched)
    }

    /// Makes the next call for a job in hand, and draws the conclusion from its answer.
    fn proceed(&mut self, worker: usize, attempt: usize, end: End, wire: Wire, guards: &Guards) {
        let Attempt { claim, read, phase } = self.workers[worker].remove(attempt);
        let next = match phase {
            Phase::Starting { in_lease } => match self.call(Request::StartIfUnlocked { claim, read, in_lease }, wire, guards) {
                Some(started) => (started || self.database.claims_of_starts(claim, guards)).then_some(Phase::Locked),
                None => Some(Phase::Asking),
            },
            Phase::Asking | Phase::Locked if wire != Wire::Answered => {
                self.faults -= 1;
                Some(Phase::Awaited)
            }
            Phase::Asking => Some(if self.database.claims_of_starts(claim, guards) { Phase::Locked } else { Phase::Awaited }),
            Phase::Locked => {
                let archived = if guards.lack(Guard::ArchivedAfterStart) { read.copy } else { self.database.archived[claim.job] > 0 };
                let discards = archived && !guards.lack(Guard::ArchivedId);
                if !discards {
                    self.enter(claim.job);
                }
                Some(if discards { Phase::Discarding } else { Phase::Running })
            }
            Phase::Discarding => self.call(Request::DiscardIfClaimed { claim }, wire, guards).is_none().then_some(Phase::Awaited),
            Phase::Running | Phase::Ended(_) => {
                let end = if let Phase::Ended(end) = phase { end } else { end };
                let request = if end == End::Archive { Request::Archive { claim, death: false } } else { retry(claim, read, false) };
                self.call(request, wire, guards).is_none().then_some(Phase::Ended(end))
            }
            Phase::Awaited => {
                let job = Job { interruptions: read.interruptions + 1, ..read };
                let matched = self.call(Request::RescheduleIfClaimed { claim, job, death: false }, wire, guards);
                (matched != Some(true)).then_some(Phase::Awaited)
            }
        };
        self.workers[worker].extend(next.map(|phase| Attempt { claim, read, phase }));
    }

    fn enter(&mut self, job: usize) {
        self.database.breaks_if(self.database.archived[job] > 0, Promise::I2);
        self.database.breaks_if(job == 0 && self.entered > 0, Promise::I5);
        self.entered += u8::from(job == 0);
    }

    /// A heartbeat: a cleaner that is about to retire the worker will find another heartbeat than it saw.
    fn beat(&mut self, worker: usize) {
        self.database.roster[worker].get_or_insert_default();
        if self.cleaner == (Cleaner::Silent { worker, unchanged: true }) {
            self.cleaner = Cleaner::Silent { worker, unchanged: false };
        }
        let silent = Request::RetireIfSilentSince { worker, unchanged: true };
        for request in self.database.late.iter_mut().filter(|request| **request == silent) {
            *request = Request::RetireIfSilentSince { worker, unchanged: false };
        }
    }

    /// The cleaner has seen a worker silent for so long that its lease is over: all starts that it has sent are too late.
    fn find_silent(&mut self, worker: usize) {
        self.cleaner = Cleaner::Silent { worker, unchanged: true };
        for attempt in &mut self.workers[worker] {
            if let Phase::Starting { in_lease } = &mut attempt.phase {
                *in_lease = false;
            }
        }
        for request in &mut self.database.late {
            if let Request::StartIfUnlocked { claim, in_lease, .. } = request {
                *in_lease &= claim.worker != worker;
            }
        }
    }

    /// Whether a claim does not hold and never will.
    fn is_lost(&self, claim: Claim) -> bool {
        let starts = |attempt: &Attempt| attempt.claim == claim && matches!(attempt.phase, Phase::Starting { .. });
        let late = |request: &Request| matches!(request, Request::StartIfUnlocked { claim: late, .. } if *late == claim);
        let started = self.workers[claim.worker].iter().any(starts) || self.database.late.iter().any(late);
        !started && !self.database.is_held_by(claim)
    }

    /// Whether a late request will be refused whenever it arrives.
    fn is_vain(&self, request: Request) -> bool {
        match request {
            Request::StartIfUnlocked { claim, read, in_lease } => {
                // A copy begins with no attempts again.
                let may_match = self.faults > 0 || self.database.scheduled[claim.job].is_some_and(|job| job.attempts <= read.attempts);
                !in_lease || !may_match
            }
            Request::Archive { claim, .. } | Request::RescheduleIfClaimed { claim, .. } | Request::DiscardIfClaimed { claim } => {
                self.is_lost(claim)
            }
            Request::ReportIfUnassignedSince { worker, this_round: still, .. }
            | Request::RetireIfSilentSince { worker, unchanged: still } => !still || self.database.is_dead(worker),
            Request::DeleteIfRetired { worker } => self.database.roster[worker].is_none(),
            Request::Insert { .. } => false,
        }
    }

    /// Drops what makes no difference any more, as the guards will refuse it for ever. Who has lost a claim was declared dead,
    /// so that its slots do not matter.
    fn forget(&mut self) {
        for worker in 0..WORKERS {
            for index in (0..self.workers[worker].len()).rev() {
                let Attempt { claim, phase, .. } = self.workers[worker][index];
                if phase == (Phase::Starting { in_lease: false }) || self.is_lost(claim) {
                    self.workers[worker].remove(index);
                }
            }
        }
        for index in (0..self.database.late.len()).rev() {
            if self.is_vain(self.database.late[index]) {
                self.database.late.remove(index);
            }
        }
        let in_vain = match self.cleaner {
            Cleaner::Idle => false,
            Cleaner::Silent { unchanged, .. } => !unchanged,
            Cleaner::Crashed { claim, .. } => self.is_lost(claim),
        };
        if in_vain {
            self.cleaner = Cleaner::Idle;
        }
        for entry in self.database.roster.iter_mut().flatten().filter(|entry| entry.retired) {
            (entry.free, entry.assigned) = (0, 0);
        }
        for job in self.database.scheduled.iter_mut().flatten().filter(|job| !job.locked) {
            job.last = None;
        }
    }
}

/// Another attempt later, after an execution that is recorded.
fn retry(claim: Claim, job: Job, death: bool) -> Request {
    let job = Job { locked: false, due: false, executions: job.executions + 1, last: Some(claim), retry: false, ..job };
    Request::RescheduleIfClaimed { claim, job, death }
}

impl Guarded for Protocol {
    fn guards(&self) -> &Guards {
        &self.guards
    }

    fn broken(state: &State) -> Option<Promise> {
        state.database.broken
    }
}

impl Model for Protocol {
    type State = State;
    type Action = Action;

    /// Two jobs enqueued and acknowledged; one worker there, another to come; one recruiter leads, another stands by.
    fn init_states(&self) -> Vec<State> {
        let database = Database {
            scheduled: [Some(Job::new(false)); JOBS],
            archived: [0; JOBS],
            roster: [Some(Entry { available: true, free: self.slots, term: 1, ..Entry::default() }), None],
            late: Vec::new(),
            gone: [false; WORKERS],
            broken: None,
        };
        vec![State {
            database,
            lease: 1,
            recruiters: [Recruiter { term: 1, begun: true }, Recruiter { term: 0, begun: false }],
            arrivals: [Arrival::Available, Arrival::Unregistered(None)],
            workers: Default::default(),
            cleaner: Cleaner::Idle,
            faults: self.faults,
            entered: 0,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        if state.database.broken.is_some() {
            return;
        }
        (0..RECRUITERS).for_each(|recruiter| self.recruiter_actions(state, recruiter, actions));
        (0..WORKERS).for_each(|worker| self.worker_actions(state, worker, actions));
        self.cleaner_actions(state, actions);
        actions.extend((0..state.database.late.len()).map(|request| Action::Arrive { request }));
        for (job, scheduled) in state.database.scheduled.iter().enumerate() {
            if scheduled.is_some_and(|document| !document.due) {
                actions.push(Action::BecomeDue { job });
            }
            if state.faults > 0 && self.guards.pass(Guard::InsertId, scheduled.is_none()) {
                actions.push(Action::SendAgain { job });
            }
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let (mut state, guards) = (last.clone(), &self.guards);
        match action {
            Action::Lead { recruiter } => {
                state.lease += 1;
                state.recruiters[recruiter] = Recruiter { term: state.lease, begun: false };
            }
            Action::StampTerm { recruiter } => {
                state.recruiters[recruiter].begun = true;
                state.database.stamp_term(state.recruiters[recruiter].term, guards);
            }
            Action::Assign { recruiter, worker, jobs } => {
                let term = state.recruiters[recruiter].term;
                let assigned = state.database.assign_if_available(term, worker, jobs, guards);
                let deposed = state.recruiters.iter().any(|other| other.begun && other.term > term);
                state.database.breaks_if(assigned && deposed, Promise::InOrderOfTerms);
            }
            Action::Register { worker } => {
                let Arrival::Unregistered(read) = state.arrivals[worker] else { return None };
                state.arrivals[worker] = Arrival::Registered(read);
                state.database.roster[worker] = Some(Entry::default());
            }
            Action::ReadTerm { worker } => {
                let (Arrival::Unregistered(read) | Arrival::Registered(read)) = &mut state.arrivals[worker] else { return None };
                *read = Some(state.lease);
            }
            Action::MakeAvailable { worker } => {
                let Arrival::Registered(Some(term)) = state.arrivals[worker] else { return None };
                state.arrivals[worker] = Arrival::Available;
                state.database.make_available(worker, self.slots, term, guards);
            }
            Action::Beat { worker } => state.beat(worker),
            Action::Take { worker, starts } => {
                let assigned = std::mem::take(&mut state.database.roster[worker].as_mut()?.assigned);
                for job in (0..JOBS).filter(|job| starts && assigned & (1 << job) != 0) {
                    if !state.works_on(worker, job) && self.slots(&state, worker) > 0 {
                        state.read(worker, job);
                    }
                }
            }
            Action::HearAgain { worker, job } => {
                state.faults -= 1;
                state.read(worker, job);
            }
            Action::TellRoster { worker, wire } => {
                let (free, this_round) = (self.slots(&state, worker), state.database.roster[worker]?.assigned == 0);
                let request = Request::ReportIfUnassignedSince { worker, free, this_round };
                state.call(request, wire, guards);
            }
            Action::Proceed { worker, attempt, end, wire } => state.proceed(worker, attempt, end, wire, guards),
            Action::BeSeenGone { worker } => {
                state.faults -= 1;
                state.database.gone[worker] = true;
                state.database.retire(worker);
            }
            Action::FindSilent { worker } => state.find_silent(worker),
            Action::FindCrashed { job } => {
                let job = state.database.scheduled[job]?;
                state.cleaner = Cleaner::Crashed { claim: job.last?, job };
            }
            Action::CleanUp { wire } => {
                let request = match std::mem::replace(&mut state.cleaner, Cleaner::Idle) {
                    Cleaner::Idle => return None,
                    Cleaner::Silent { worker, unchanged } => Request::RetireIfSilentSince { worker, unchanged },
                    Cleaner::Crashed { claim, job } if job.retry => retry(claim, job, true),
                    Cleaner::Crashed { claim, .. } => Request::Archive { claim, death: true },
                };
                state.call(request, wire, guards);
            }
            Action::Bury { worker, wire } => drop(state.call(Request::DeleteIfRetired { worker }, wire, guards)),
            Action::CleanerForgets => state.cleaner = Cleaner::Idle,
            Action::Arrive { request } => {
                let request = state.database.late.remove(request);
                state.database.apply(request, guards);
            }
            Action::SendAgain { job } => {
                state.faults -= 1;
                state.database.scheduled[job] = Some(Job::new(state.database.archived[job] > 0));
            }
            Action::BecomeDue { job } => state.database.scheduled[job].as_mut()?.due = true,
        }
        state.database.judge();
        // Without others it would forget what still matters.
        if matches!(guards.removed[..], [] | [Guard::StartLocked]) {
            state.forget();
        }
        state.workers.iter_mut().for_each(|attempts| attempts.sort_unstable());
        state.database.late.sort_unstable();
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(KEPT, |_, state: &State| state.database.broken.is_none()),
            Property::sometimes("both jobs are archived", |_, state: &State| state.database.archived == [1; JOBS]),
            Property::sometimes("a job is archived that was not entered, since its worker died", |_, state: &State| {
                state.database.archived[0] == 1 && state.entered == 0
            }),
            Property::sometimes("a job runs again after the death of its worker", |_, state: &State| {
                let again = |attempt: &Attempt| attempt.phase == Phase::Running && attempt.read.executions == 1;
                state.database.is_dead(0) && state.workers[1].iter().any(again)
            }),
            Property::sometimes("a job waits again that was handed back", |_, state: &State| {
                state.database.scheduled.iter().flatten().any(|job| !job.locked && job.interruptions > 0)
            }),
            Property::sometimes("a copy is discarded", |_, state: &State| {
                state.workers.iter().flatten().any(|attempt| attempt.phase == Phase::Discarding)
            }),
        ]
    }
}

impl Protocol {
    fn slots(&self, state: &State, worker: usize) -> u8 {
        (0..JOBS).filter(|job| state.works_on(worker, *job)).fold(self.slots, |slots, _| slots.saturating_sub(1))
    }

    fn recruiter_actions(&self, state: &State, recruiter: usize, actions: &mut Vec<Action>) {
        let Recruiter { term, begun } = state.recruiters[recruiter];
        if term < state.lease && state.lease < self.terms {
            actions.push(Action::Lead { recruiter });
        }
        if term > 0 && (!begun || state.database.roster.iter().flatten().any(|entry| entry.term != term)) {
            actions.push(Action::StampTerm { recruiter });
        }
        // What will be refused is not asked for.
        let in_turn = |entry: Entry| self.guards.pass(Guard::AssignAvailable, entry.available);
        for worker in (0..WORKERS).filter(|worker| begun && state.database.roster[*worker].is_some_and(in_turn)) {
            let unfinished = (0..JOBS).filter(|job| state.database.scheduled[*job].is_some()).fold(0, |jobs, job| jobs | 1 << job);
            let sets = (1..1 << JOBS).filter(|jobs| jobs & !(self.jobs & unfinished) == 0);
            actions.extend(sets.map(|jobs| Action::Assign { recruiter, worker, jobs }));
        }
    }

    fn worker_actions(&self, state: &State, worker: usize, actions: &mut Vec<Action>) {
        match state.arrivals[worker] {
            Arrival::Unregistered(read) => {
                actions.push(Action::Register { worker });
                let early = read.is_none() && self.guards.lack(Guard::MakeAvailableAfterRegister);
                return actions.extend(early.then_some(Action::ReadTerm { worker }));
            }
            Arrival::Registered(None) => return actions.push(Action::ReadTerm { worker }),
            Arrival::Registered(Some(_)) => return actions.push(Action::MakeAvailable { worker }),
            Arrival::Available => {}
        }
        let (idle, trusts, free) = (!state.is_starting(worker), state.can_beat(worker, &self.guards), self.slots(state, worker));
        if trusts && (state.is_silent(worker) || state.database.roster[worker].is_none()) {
            actions.push(Action::Beat { worker });
        }
        if let Some(entry) = state.database.roster[worker] {
            if trusts && idle && entry.assigned != 0 {
                actions.extend([true, false].map(|starts| Action::Take { worker, starts }));
            }
            if entry.free != free || entry.available != (free > 0) {
                actions.extend(possible(&WORD, state.faults).map(|wire| Action::TellRoster { worker, wire }));
            }
        }
        if state.faults > 0 && trusts && idle && free > 0 {
            let others = (0..JOBS).filter(|job| self.jobs & (1 << job) != 0 && !state.works_on(worker, *job));
            actions.extend(others.map(|job| Action::HearAgain { worker, job }));
        }
        for (attempt, Attempt { claim, read, phase }) in state.workers[worker].iter().enumerate() {
            if *phase == Phase::Awaited && !(idle && state.database.claims_of_starts(*claim, &self.guards)) {
                continue;
            }
            let wires = if matches!(phase, Phase::Asking | Phase::Locked) { READ.as_slice() } else { &CALL };
            actions.extend(possible(wires, state.faults).map(|wire| Action::Proceed { worker, attempt, end: End::Archive, wire }));
            if *phase == Phase::Running && read.retries_after_next(claim.job) {
                actions.extend(possible(wires, state.faults).map(|wire| Action::Proceed { worker, attempt, end: End::Retry, wire }));
            }
        }
    }

    fn cleaner_actions(&self, state: &State, actions: &mut Vec<Action>) {
        let idle = state.cleaner == Cleaner::Idle;
        for (worker, entry) in state.database.roster.iter().enumerate() {
            let Some(entry) = entry else { continue };
            if entry.retired {
                actions.extend(possible(&WORD, state.faults).map(|wire| Action::Bury { worker, wire }));
            } else if idle {
                actions.push(Action::FindSilent { worker });
                actions.extend((state.faults > 0).then_some(Action::BeSeenGone { worker }));
            }
        }
        if idle {
            let held = state.database.scheduled.iter().flatten().filter(|job| job.locked).filter_map(|job| job.last);
            actions.extend(held.filter(|claim| self.finds_crashed(state, *claim)).map(|claim| Action::FindCrashed { job: claim.job }));
        } else {
            actions.push(Action::CleanerForgets);
            actions.extend(possible(&WORD, state.faults).map(|wire| Action::CleanUp { wire }));
        }
    }

    /// Whether the cleaner finds a job held by the dead: in the name of a retired worker, or in a sweep.
    fn finds_crashed(&self, state: &State, held: Claim) -> bool {
        let retired = |worker: usize| state.database.roster[worker].is_some_and(|entry| entry.retired);
        let named = (0..WORKERS).any(|worker| retired(worker) && self.guards.pass(Guard::HeldByWorker, worker == held.worker));
        // Read before the locked jobs, the roster may be as old as from before the second worker had come.
        let late_comer = self.guards.lack(Guard::RegisteredAfterLocked) && held.worker == 1;
        named || self.guards.pass(Guard::RegisteredId, state.database.roster[held.worker].is_none() || late_comer)
    }
}

/// What can become of a call while so many faults may still happen.
pub(crate) fn possible(wires: &[Wire], faults: u8) -> impl Iterator<Item = Wire> {
    wires.iter().copied().filter(move |wire| faults > 0 || *wire == Wire::Answered)
}
