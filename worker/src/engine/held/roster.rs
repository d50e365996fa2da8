//! What the roster shows of this worker, derived from the jobs that it holds.

use std::collections::HashSet;

use recruiter_common::{
    ids::JobId,
    store::{Offer, Offered},
};

use super::{Held, Phase, known::Known};

impl Held {
    /// What this worker offers and holds. Queued jobs get the free slots first, and only the remaining slots are offered; none if it accepts
    /// no assignments. Jobs whose start is on its way are listed as prefetched: until they are locked, the recruiter must not assign them to
    /// another worker.
    pub(crate) fn offer(&self, is_accepting: bool) -> Offer {
        let known = self.known.lock();
        let Offered { slots, class_slots } = known.offered(is_accepting);
        let (ready, ahead) = (known.number(&[Phase::Queued]), known.number(&Phase::QUEUED));
        Offer {
            slots,
            class_slots,
            prefetch: if is_accepting { known.pace.room(ahead, known.free().min(ready)) } else { 0 },
            prefetched: known.jobs(Phase::is_prefetched).collect(),
            held_permits: known.permit_names(),
            working_on: known.working_on(),
        }
    }

    /// The names of all permits that are held.
    pub(crate) fn permit_names(&self) -> Vec<String> {
        self.known.lock().permit_names()
    }

    /// The jobs that this worker may have locked before its next report.
    pub(crate) fn working_on(&self) -> Vec<JobId> {
        self.known.lock().working_on()
    }

    /// The jobs that are started, without those whose end is recorded.
    pub(crate) fn started(&self) -> Vec<JobId> {
        self.known.lock().jobs(Phase::is_started).collect()
    }

    /// The number of jobs of which only the hooks still run.
    pub(crate) fn count_recorded(&self) -> u32 {
        self.known.lock().number(&[Phase::Recorded])
    }

    /// The numbers of busy and of free slots.
    pub(crate) fn slots(&self) -> (u32, u32) {
        let known = self.known.lock();
        (known.number(&Phase::IN_SLOTS), known.free())
    }

    /// Whether jobs wait for their start.
    pub(crate) fn has_queued(&self) -> bool {
        self.known.lock().number(&Phase::QUEUED) > 0
    }

    /// What this worker offers.
    pub(crate) fn offered(&self, is_accepting: bool) -> Offered {
        self.known.lock().offered(is_accepting)
    }

    /// What this worker offers, if it needs jobs: slots are free, or it accepts more ahead.
    pub(crate) fn wanted(&self, is_accepting: bool) -> Option<Offered> {
        let known = self.known.lock();
        let is_needed = known.offered_slots(is_accepting) > 0 || known.pace.is_low(known.number(&Phase::QUEUED));
        is_needed.then(|| known.offered(is_accepting))
    }
}

impl Known {
    /// How many jobs this worker accepts in free slots, and of the classes that have a limit.
    fn offered(&self, is_accepting: bool) -> Offered {
        Offered { slots: self.offered_slots(is_accepting), class_slots: self.class_slots() }
    }

    fn offered_slots(&self, is_accepting: bool) -> u32 {
        let before = self.number(&[Phase::Queued, Phase::LockedAhead]);
        if is_accepting { self.free().saturating_sub(before) } else { 0 }
    }

    fn permit_names(&self) -> Vec<String> {
        self.permits().flat_map(|permits| &permits.names).cloned().collect()
    }

    fn working_on(&self) -> Vec<JobId> {
        // Several unconfirmed starts may have a job.
        let jobs: HashSet<JobId> = self.jobs(Phase::is_held).chain(self.unconfirmed.jobs()).collect();
        jobs.into_iter().collect()
    }
}
