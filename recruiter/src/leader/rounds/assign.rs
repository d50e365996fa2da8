//! Writes the plan of a round with one command, and sends the hints about it.

use std::{
    collections::{BTreeMap, HashSet},
    time::{Duration, Instant as Monotonic},
};

use recruiter_common::{
    ids::{JobId, LeaseTerm, RoundId, WorkerId},
    store::{AssignedJobs, Channel, Hint, Permits, Planned, StoreError},
};

use super::round::Assigning;
use crate::leader::{
    book::{AssignedAs, Turn},
    database::Database,
    fleet::FreeWorker,
    plan::{Given, Plan},
};

/// A full scan sends the hint of an assignment again if the assignment has been in flight for longer than this: the first hint may be lost.
const REMIND_AFTER: Duration = Duration::from_millis(100);

impl Assigning {
    /// Writes a plan and notifies the workers. Returns the assigned jobs; `None`, if this term is over.
    pub(super) async fn assign(
        &mut self,
        store: &impl Database,
        term: LeaseTerm,
        plan: Plan,
    ) -> Result<Option<HashSet<JobId>>, StoreError> {
        if plan.given.is_empty() {
            return Ok(Some(HashSet::new()));
        }
        if plan.permits.values().any(|permit| !permit.names.is_empty()) {
            // Without its index MongoDB would not refuse a permit to a second worker.
            store.prepare_limited_jobs().await?;
        }
        let (cells, fast) = (self.admission.cells.to_keep(), self.admission.cells.fast_to_keep());
        if !cells.is_empty() || fast.is_some() {
            // Before the assignment: the next leader must not take these cells again.
            if !store.keep_cells(term, &cells, fast.as_ref()).await? {
                return Ok(None);
            }
            self.admission.cells.are_kept();
        }
        let round = RoundId::new();
        let workers = self.fleet.workers();
        let planned: Vec<Planned> = plan.given.iter().map(|(worker, jobs)| planned(&workers[*worker], jobs, &plan.permits)).collect();
        let won: HashSet<WorkerId> = store.assign_if_available(term, round, &planned).await?.into_iter().collect();
        let (at, are_all) = (store.monotonic(), won.len() == planned.len());
        let mut by_channel: BTreeMap<Channel, Vec<AssignedJobs>> = BTreeMap::new();
        let mut assigned = HashSet::new();
        for ((worker, jobs), Planned { assignment, .. }) in plan.given.iter().zip(planned) {
            let FreeWorker { id, channel, free, .. } = &workers[*worker];
            if won.contains(id) {
                assigned.extend(&assignment.jobs);
                let turn = Turn::new(round, assignment.clone(), *channel, jobs.len() < *free as usize, at);
                self.book.begin(turn, jobs.iter().map(|job| Some(AssignedAs { due: job.due, lane: job.lane.clone() })));
                by_channel.entry(*channel).or_default().push(assignment);
            } else {
                assignment.permits.iter().for_each(|(job, permit)| self.admission.take_back(*id, *job, permit));
                self.admission.doubt();
            }
        }
        plan.lanes.iter().for_each(|lane| self.lanes.windows.add_recent(lane));
        self.assigned = self.lanes.windows.remove(plan.lanes.iter().map(|lane| &**lane), &assigned);
        if are_all {
            self.fleet.remove(&won);
        } else {
            // The cached roster is stale.
            self.fleet.forget();
        }
        let hints = by_channel.into_iter().map(|(channel, assignments)| (channel, Hint::Assigned { round, assignments })).collect();
        if !store.announce_hints_to(hints).await {
            self.keep_alive.failed(Monotonic::now());
        }
        Ok(Some(assigned))
    }

    /// Sends the hints of assignments in flight again. A worker takes each round only once.
    pub(super) async fn remind(&mut self, store: &impl Database, at: Monotonic) {
        let mut by_round: BTreeMap<(Channel, RoundId), Vec<AssignedJobs>> = BTreeMap::new();
        for turn in self.book.older_than(REMIND_AFTER, at) {
            by_round.entry((turn.channel, turn.round)).or_default().push(turn.assignment.clone());
        }
        let hints = by_round.into_iter().map(|((channel, round), assignments)| (channel, Hint::Assigned { round, assignments }));
        store.announce_hints_to(hints.collect()).await;
    }
}

/// The assignment of these jobs.
fn planned(worker: &FreeWorker, jobs: &[Given], permits: &Permits) -> Planned {
    let permits: Permits = jobs.iter().filter_map(|job| Some((job.id, permits.get(&job.id)?.clone()))).collect();
    let wait_for_permits = permits.values().filter(|permit| permit.is_ahead).count();
    let assignment = AssignedJobs { worker: worker.id, jobs: jobs.iter().map(|job| job.id).collect(), permits };
    Planned { assignment, for_slots: (jobs.len() - wait_for_permits).min(worker.free as usize) }
}
