//! The turn of a worker: its reports to the roster.
//!
//! A turn begins when the recruiter assigns jobs to the worker, and ends with a report that offers slots or room ahead. Until then the
//! recruiter assigns nothing more to the worker. Only the session writes reports, one after the other.
//!
//! A report that failed is repeated after the next event of the session: a hint, an ended job, a poll or a heartbeat.

use std::{
    collections::VecDeque,
    time::{Duration, Instant as Monotonic},
};

use recruiter_common::{
    ids::{RoundId, WorkerId},
    store::{Assignment, Hint, Offer, Offered, Store},
    telemetry::chain,
};

/// Number of rounds in memory. An assignment can arrive both as a hint and from the roster, and is taken once.
const ROUNDS: usize = 64;

/// The turn of a session.
pub(crate) struct Turn {
    store: Store,
    worker: WorkerId,
    /// The last round that this worker took. Each report names it.
    round: Option<RoundId>,
    /// The last rounds that this worker took.
    seen: VecDeque<RoundId>,
    /// The duration of the last report.
    pub(crate) round_trip: Option<Duration>,
    /// Whether the roster must get a report: slots or jobs have changed since the last one.
    pub(crate) is_outdated: bool,
    /// The free slots in the roster, if the recruiter may assign jobs to this worker.
    offered: Option<Offered>,
    /// Whether the next report returns permits: the roster names some that are no longer held.
    pub(crate) returns_permits: bool,
}

impl Turn {
    pub(crate) fn new(store: Store, worker: WorkerId) -> Self {
        let seen = VecDeque::with_capacity(ROUNDS);
        Self { store, worker, round: None, seen, round_trip: None, is_outdated: false, offered: None, returns_permits: false }
    }

    /// Takes an assignment. `None` if it was taken before.
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
        // A report is due even if no job of the assignment can be started.
        self.is_outdated = true;
        Some(assignment)
    }

    /// Whether the recruiter may assign jobs to this worker, and the roster shows these free slots.
    pub(crate) fn offers(&self, slots: &Offered) -> bool {
        self.offered.as_ref() == Some(slots)
    }

    /// Whether the roster should show what this worker has: there is no assignment that was not taken yet.
    pub(crate) fn is_comparable(&self, assignment: Option<&Assignment>) -> bool {
        assignment.is_none_or(|given| self.seen.contains(&given.round))
    }

    /// Reports what this worker offers and holds. If the recruiter has assigned jobs in the meantime, nothing is written, and that
    /// assignment is returned. The caller takes it, and then reports again.
    pub(crate) async fn report(&mut self, offer: &Offer) -> Option<Assignment> {
        let began = Monotonic::now();
        match self.store.report_if_unassigned_since(self.worker, self.round, offer).await {
            Ok(true) => {
                self.round_trip = Some(began.elapsed());
                self.is_outdated = false;
                self.offered = offer.accepts_jobs().then(|| offer.offered());
                if std::mem::take(&mut self.returns_permits) || self.offered.is_some() {
                    self.store.announce_hint(Hint::Free).await;
                }
            }
            Ok(false) => match self.store.assignment(self.worker).await {
                // A failover has undone a later assignment. The next report names the earlier round.
                Ok(Some(assignment)) if self.seen.contains(&assignment.round) => self.round = Some(assignment.round),
                Ok(assignment) => return assignment,
                Err(error) => tracing::debug!(error = chain(&error), "failed to read the assignment"),
            },
            Err(error) => tracing::debug!(error = chain(&error), "failed to update the roster; the next event of the session repeats it"),
        }
        None
    }

    /// Withdraws the offer. An assignment that was written in the meantime is not taken. A hint then informs the recruiter that it can
    /// assign those jobs to other workers.
    pub(crate) async fn withdraw(&self) {
        match self.store.withdraw_if_unassigned_since(self.worker, self.round).await {
            Ok(true) => {}
            Ok(false) => self.store.announce_hint(Hint::Left { worker: self.worker }).await,
            Err(error) => tracing::debug!(error = chain(&error), "failed to withdraw from the roster"),
        }
    }
}
