//! Who leads: the recruiters' lease and the terms in the roster, step by step.
//!
//! What is known of time is what the recruiters rely on: a standby that has seen the same renewal for a whole lease knows that
//! its holder does not trust it any more, for that counts from before it asked and trusts it for less.

use stateright::{Model, Property};

use crate::{
    guards::{Guard, Guarded, Guards, KEPT, Promise},
    protocol::{CALL, Wire, possible},
};

const RECRUITERS: usize = 2;
/// So many terms are looked at, and so many renewals in each.
const TERMS: u8 = 3;
const RENEWALS: u8 = 2;

/// The lease with two recruiters and a worker, in a world of limited size.
#[derive(Clone, Debug)]
pub(crate) struct Leadership {
    pub(crate) faults: u8,
    pub(crate) guards: Guards,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct State {
    lease: Option<Lease>,
    recruiters: [Recruiter; RECRUITERS],
    late: Vec<Request>,
    faults: u8,
    broken: Option<Promise>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Lease {
    term: u8,
    renewals: u8,
    released: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Recruiter {
    // What it has observed, and whether for a whole lease.
    StandingBy { observed: Option<Option<Lease>>, whole_lease: bool },
    // Whether it trusts its last renewal.
    Leading { term: u8, trusts: bool },
}

const WATCHFUL: Recruiter = Recruiter::StandingBy { observed: None, whole_lease: false };

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Request {
    AcquireIfUnchanged(Option<Lease>),
    RenewIfHeld { term: u8 },
    ReleaseIfHeld { term: u8 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Observe { recruiter: usize },
    WaitForWholeLease { recruiter: usize },
    Acquire { recruiter: usize, wire: Wire },
    Renew { recruiter: usize, wire: Wire },
    Release { recruiter: usize, wire: Wire },
    Arrive { request: usize },
}

fn next_term(observed: Option<Lease>) -> u8 {
    observed.map_or(0, |lease| lease.term) + 1
}

impl State {
    /// Carries a request out; whether its filter matched.
    fn apply(&mut self, request: Request, guards: &Guards) -> bool {
        let Some(lease) = &mut self.lease else {
            self.lease = (request == Request::AcquireIfUnchanged(None)).then_some(Lease { term: 1, renewals: 0, released: false });
            return self.lease.is_some();
        };
        match request {
            Request::AcquireIfUnchanged(observed) => {
                let like = |is_like: fn(Lease, Lease) -> bool| observed.is_some_and(|observed| is_like(observed, *lease));
                let matches = guards.pass(Guard::AcquireTerm, like(|observed, now| observed.term == now.term))
                    && guards.pass(Guard::AcquireRenewals, like(|observed, now| observed.renewals == now.renewals))
                    && guards.pass(Guard::AcquireReleased, like(|observed, now| observed.released == now.released));
                if matches {
                    *lease = Lease { term: next_term(observed), renewals: 0, released: false };
                }
                matches
            }
            Request::RenewIfHeld { term } => {
                let matches = guards.pass(Guard::RenewHolder, lease.term == term) && guards.pass(Guard::RenewReleased, !lease.released);
                lease.renewals += u8::from(matches);
                matches
            }
            Request::ReleaseIfHeld { term } => {
                let matches = guards.pass(Guard::ReleaseHolder, lease.term == term);
                lease.released |= matches;
                matches
            }
        }
    }

    fn call(&mut self, request: Request, wire: Wire, guards: &Guards) -> Option<bool> {
        self.faults -= u8::from(wire != Wire::Answered);
        if wire == Wire::Cut {
            self.late.push(request);
            return None;
        }
        let matched = self.apply(request, guards);
        (wire == Wire::Answered).then_some(matched)
    }

    fn breaks_if(&mut self, wrong: bool, promise: Promise) {
        if wrong {
            self.broken.get_or_insert(promise);
        }
    }

    fn judge(&mut self) {
        if let [Recruiter::Leading { term: one, trusts, .. }, Recruiter::Leading { term: other, trusts: other_trusts, .. }] =
            self.recruiters
        {
            self.breaks_if(one == other, Promise::OneLeaderPerTerm);
            self.breaks_if(trusts && other_trusts, Promise::OneLeaderAtATime);
        }
    }
}

impl Guarded for Leadership {
    fn guards(&self) -> &Guards {
        &self.guards
    }

    fn broken(state: &State) -> Option<Promise> {
        state.broken
    }
}

impl Model for Leadership {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let recruiters = [WATCHFUL; RECRUITERS];
        vec![State { lease: None, recruiters, late: Vec::new(), faults: self.faults, broken: None }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        if state.broken.is_some() {
            return;
        }
        let calls = || possible(&CALL, state.faults);
        for recruiter in 0..RECRUITERS {
            match state.recruiters[recruiter] {
                Recruiter::StandingBy { observed, whole_lease } => {
                    actions.push(Action::Observe { recruiter });
                    let Some(observed) = observed else { continue };
                    if observed == state.lease && !whole_lease {
                        actions.push(Action::WaitForWholeLease { recruiter });
                    }
                    if next_term(observed) <= TERMS && (whole_lease || observed.is_none_or(|lease| lease.released)) {
                        actions.extend(calls().map(|wire| Action::Acquire { recruiter, wire }));
                    }
                }
                Recruiter::Leading { .. } => {
                    if state.lease.is_some_and(|lease| lease.renewals < RENEWALS) {
                        actions.extend(calls().map(|wire| Action::Renew { recruiter, wire }));
                    }
                    actions.extend(calls().map(|wire| Action::Release { recruiter, wire }));
                }
            }
        }
        actions.extend((0..state.late.len()).map(|request| Action::Arrive { request }));
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let (mut state, guards) = (last.clone(), &self.guards);
        match action {
            Action::Observe { recruiter } => {
                state.recruiters[recruiter] = Recruiter::StandingBy { observed: Some(state.lease), whole_lease: false };
            }
            Action::WaitForWholeLease { recruiter } => {
                state.recruiters[recruiter] = Recruiter::StandingBy { observed: Some(state.lease), whole_lease: true };
                for other in &mut state.recruiters {
                    if let Recruiter::Leading { trusts, .. } = other {
                        *trusts = false;
                    }
                }
            }
            Action::Acquire { recruiter, wire } => {
                let Recruiter::StandingBy { observed: Some(observed), .. } = state.recruiters[recruiter] else { return None };
                let acquired = state.call(Request::AcquireIfUnchanged(observed), wire, guards) == Some(true);
                let leading = Recruiter::Leading { term: next_term(observed), trusts: true };
                state.recruiters[recruiter] = if acquired { leading } else { WATCHFUL };
            }
            Action::Renew { recruiter, wire } => {
                let Recruiter::Leading { term, trusts } = state.recruiters[recruiter] else { return None };
                let held = state.call(Request::RenewIfHeld { term }, wire, guards);
                let leading = Recruiter::Leading { term, trusts: trusts || held == Some(true) };
                state.recruiters[recruiter] = if held == Some(false) { WATCHFUL } else { leading };
            }
            Action::Release { recruiter, wire } => {
                let Recruiter::Leading { term, .. } = state.recruiters[recruiter] else { return None };
                state.recruiters[recruiter] = WATCHFUL;
                state.call(Request::ReleaseIfHeld { term }, wire, guards);
            }
            Action::Arrive { request } => {
                let request = state.late.remove(request);
                state.apply(request, guards);
            }
        }
        state.judge();
        state.late.sort_unstable();
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(KEPT, |_, state: &State| state.broken.is_none()),
            Property::sometimes("another believes that it leads as well", |_, state: &State| {
                state.recruiters.iter().all(|recruiter| matches!(recruiter, Recruiter::Leading { .. }))
            }),
        ]
    }
}
