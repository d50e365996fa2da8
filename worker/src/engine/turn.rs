//! The turn of a worker: what the roster is told, and when.
//!
//! A turn begins with an assignment and ends when the roster shows the free slots again. The recruiter assigns only to workers whose turn is
//! over. One task makes all writes of the turn, so that turns cannot overlap.

use std::{
    collections::VecDeque,
    time::{Duration, Instant as Monotonic},
};

use recruiter_common::{
    ids::{RoundId, WorkerId},
    roster::Assignment,
    store::{Hint, Offer, Store},
    telemetry::chain,
};

/// Rounds that are remembered, so that an assignment that arrives both as a hint and from the roster is taken once.
const ROUNDS: usize = 64;

/// The turn of a session.
pub(crate) struct Turn {
    store: Store,
    worker: WorkerId,
    /// The last round that was taken: the turn began with it.
    round: Option<RoundId>,
    /// Rounds seen lately.
    seen: VecDeque<RoundId>,
    /// The duration of a report.
    pub(crate) round_trip: Option<Duration>,
    /// Whether the roster shows other slots than this worker has.
    is_outdated: bool,
    /// The free slots in the roster, if the recruiter may assign jobs to this worker.
    offered: Option<u32>,
}

impl Turn {
    pub(crate) fn new(store: Store, worker: WorkerId) -> Self {
        Self { store, worker, round: None, seen: VecDeque::with_capacity(ROUNDS), round_trip: None, is_outdated: false, offered: None }
    }

    /// Begins a turn. `None` when the assignment was taken before.
    pub(crate) fn begin(&mut self, assignment: Assignment) -> Option<Assignment> {
        if self.seen.contains(&assignment.round) {
            return None;
        }
        if self.seen.len() == ROUNDS {
            self.seen.pop_front();
        }
        self.seen.push_back(assignment.round);
        self.round = Some(assignment.round);
        self.offered = None;
        // The slots that stay free are reported, whatever becomes of the jobs.
        self.is_outdated = true;
        Some(assignment)
    }

    /// Whether the recruiter may assign jobs to this worker, and knows of so many free slots.
    pub(crate) fn offers(&self, slots: u32) -> bool {
        self.offered == Some(slots)
    }

    /// The roster no longer shows the slots and jobs.
    pub(crate) fn mark_outdated(&mut self) {
        self.is_outdated = true;
    }

    pub(crate) fn is_outdated(&self) -> bool {
        self.is_outdated
    }

    /// Compares the roster, as a heartbeat has found it, with the free slots. An earlier report may have been written after a later one.
    pub(crate) fn compare(&mut self, assignment: Option<&Assignment>, offered: u32, free: u32) {
        self.is_outdated |= assignment.is_none_or(|given| self.seen.contains(&given.round)) && offered != free;
    }

    /// Reports the slots and ends the turn. Returns an assignment that the recruiter has written meanwhile: it comes first, and its own turn
    /// reports the slots.
    pub(crate) async fn report(&mut self, offer: &Offer) -> Option<Assignment> {
        let began = Monotonic::now();
        match self.store.report_if_unassigned_since(self.worker, self.round, offer).await {
            Ok(true) => {
                self.round_trip = Some(began.elapsed());
                self.is_outdated = false;
                self.offered = offer.accepts_jobs().then_some(offer.slots);
                if self.offered.is_some() {
                    self.store.announce_hint(Hint::Free).await;
                }
            }
            Ok(false) => match self.store.assignment(self.worker).await {
                // A failover has undone a later assignment. The next report names the earlier round.
                Ok(Some(assignment)) if self.seen.contains(&assignment.round) => self.round = Some(assignment.round),
                Ok(assignment) => return assignment,
                Err(error) => tracing::debug!(error = chain(&error), "failed to read the assignment"),
            },
            Err(error) => tracing::debug!(error = chain(&error), "failed to update the roster; trying again"),
        }
        None
    }

    /// Offers no more slots. An assignment that was written meanwhile is not taken: the recruiter hears that it can assign those jobs elsewhere.
    pub(crate) async fn withdraw(&self) {
        match self.store.withdraw_if_unassigned_since(self.worker, self.round).await {
            Ok(true) => {}
            Ok(false) => self.store.announce_hint(Hint::Left { worker: self.worker }).await,
            Err(error) => tracing::debug!(error = chain(&error), "failed to withdraw from the roster"),
        }
    }
}
