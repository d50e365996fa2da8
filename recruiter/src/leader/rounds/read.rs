//! What a round reads before it searches: the workers that accept jobs, whether assignments were answered, and the settings.

use std::time::Instant as Monotonic;

use recruiter_common::{
    ids::LeaseTerm,
    store::{Hint, Lane, StoreError, line_of_gate, resource_and_number},
};

use super::{round::Assigning, trigger::Trigger};
use crate::leader::{book::Turn, database::Database};

impl Assigning {
    /// Reads what the trigger makes necessary.
    pub(super) async fn read(
        &mut self,
        store: &impl Database,
        term: LeaseTerm,
        trigger: &Trigger,
        at: Monotonic,
    ) -> Result<(), StoreError> {
        if trigger.full_scan || trigger.workers || self.fleet.is_unknown() {
            self.read_roster(store, term, at).await?;
        }
        if trigger.full_scan {
            self.keep_alive.read_channels(store, at).await;
        }
        self.end_turns(store, trigger, at).await?;
        self.read_settings(store, trigger).await
    }

    async fn read_roster(&mut self, store: &impl Database, term: LeaseTerm, at: Monotonic) -> Result<(), StoreError> {
        let workers = store.available_workers(term).await?;
        let returned = self.admission.read(&workers);
        self.note_returned(&returned);
        let has_new_worker = self.fleet.read(workers, at);
        self.book.read_ahead(self.fleet.take_prefetched(), at);
        if has_new_worker {
            self.book.refusals.end_pauses(at);
            self.lanes.windows.end_pauses();
            self.lanes.windows.mark_recent_stale();
        }
        let unlinked = self.fleet.workers().iter().filter(|worker| !store.is_linked(worker.id));
        self.keep_alive.channels.extend(unlinked.map(|worker| worker.channel));
        Ok(())
    }

    /// Ends the turns of workers that have answered, have left, or take too long. Marks lanes as stale in which jobs of these turns may
    /// wait again.
    async fn end_turns(&mut self, store: &impl Database, trigger: &Trigger, at: Monotonic) -> Result<(), StoreError> {
        for turn in self.book.end_answered(self.fleet.workers()) {
            if let Some(travel) = turn.travel(at) {
                self.admission.cells.observe(travel);
            }
            // If the worker did not start one of the jobs that a search has skipped, the hint about it follows.
            turn.skipped_in.iter().for_each(|lane| self.lanes.windows.add_recent(lane));
            turn.due_again_in.iter().for_each(|lane| self.lanes.windows.mark_stale(lane.clone()));
        }
        if !trigger.left.is_empty() {
            self.fleet.remove(&trigger.left.iter().copied().collect());
            for turn in trigger.left.iter().filter_map(|worker| self.book.remove_worker(*worker, at)).collect::<Vec<_>>() {
                self.mark_skipped(&turn);
            }
            self.lanes.windows.mark_recent_stale();
            self.admission.doubt();
        }
        if trigger.full_scan {
            let workers = self.book.workers();
            if !workers.is_empty() {
                let rounds = store.rounds_of(&workers).await?;
                for turn in self.book.expire(&rounds, at) {
                    self.mark_skipped(&turn);
                }
                self.remind(store, at).await;
            }
            self.book.drop_old(at);
            self.lanes.windows.drop_old();
            self.lanes.request_audit();
        }
        let mut is_unsure = trigger.refused;
        for (worker, jobs) in &trigger.returned {
            for lane in self.book.returned(*worker, jobs) {
                match lane {
                    // The job may have another priority now.
                    Some(lane) => self.lanes.windows.mark_stale(Lane { priority: None, ..(*lane).clone() }),
                    None => is_unsure = true,
                }
            }
            jobs.iter().for_each(|job| self.admission.cells.was_not_assigned(*job));
        }
        if is_unsure {
            self.lanes.windows.mark_recent_stale();
        }
        Ok(())
    }

    /// Reads the settings in a full scan and after a change of them, and the permits in use when they are unsure.
    async fn read_settings(&mut self, store: &impl Database, trigger: &Trigger) -> Result<(), StoreError> {
        // Jobs that are assigned ahead must wait if a maintenance window has begun.
        let mut must_recall = self.admission.closures.refresh(store.now());
        if trigger.full_scan || trigger.settings {
            must_recall |= self.admission.change(store.settings().await?, store.now());
            self.lanes.set_ageing(self.admission.ageing.groups());
            self.read_halted_lines(store).await?;
            let groups = self.admission.groups_to_count();
            let without_permit = store.running_without_permit(&groups).await?;
            for group in groups {
                self.admission.set_without_permit(&group, without_permit.get(&group).copied().unwrap_or(0));
            }
        }
        if must_recall {
            // Jobs ahead that a new pause, maintenance window or limit covers must not start.
            let recalls = self.keep_alive.channels.iter().map(|channel| (*channel, Hint::Recall)).collect();
            store.announce_hints_to(recalls).await;
        }
        if self.admission.must_confirm(trigger.full_scan) {
            let returned = self.admission.confirm(&store.permit_holders().await?);
            self.note_returned(&returned);
        }
        Ok(())
    }

    /// Notes that workers have returned these permits: the first jobs of their lines may have ended.
    fn note_returned(&mut self, permits: &[String]) {
        let resources = permits.iter().filter_map(|permit| resource_and_number(permit)).map(|(resource, _)| resource);
        self.lanes.windows.mark_lines_stale(&resources.filter(|resource| line_of_gate(resource).is_some()).collect());
    }

    /// Reads which of the paused lines still are. All lanes of the others are listed.
    async fn read_halted_lines(&mut self, store: &impl Database) -> Result<(), StoreError> {
        self.lanes.windows.mark_every_line_stale();
        let halted = self.admission.halted();
        if !halted.is_empty() {
            let still = store.halted_lines(&halted).await?;
            if self.admission.set_halted(still) {
                self.lanes.request_scan();
            }
        }
        Ok(())
    }

    /// A search has skipped jobs of this turn in these lanes. A job that was not started is still due there.
    fn mark_skipped(&mut self, turn: &Turn) {
        turn.skipped_in.iter().chain(&turn.due_again_in).for_each(|lane| self.lanes.windows.mark_stale(lane.clone()));
    }
}
