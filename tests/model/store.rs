//! The documents, and the operations of the store on them, each as one atomic step under its guards.

use crate::guards::{Guard, Guards, Promise};

pub(crate) const JOBS: usize = 2;
pub(crate) const WORKERS: usize = 2;
/// How many starts may count: job 0 must not run again, job 1 may once.
pub(crate) const ALLOWED: [u8; JOBS] = [1, 2];

/// A start of a job, by its fresh id. The id is unlike any that is still named anywhere, which is all that ids are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Claim {
    pub(crate) job: usize,
    pub(crate) worker: usize,
    pub(crate) start: u8,
}

/// A document in `scheduled`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Job {
    pub(crate) locked: bool,
    pub(crate) due: bool,
    pub(crate) attempts: u8,
    /// Starts that were handed back.
    pub(crate) interruptions: u8,
    /// Executions that ended and were recorded.
    pub(crate) executions: u8,
    /// `last_execution`: by whom and by which start.
    pub(crate) last: Option<Claim>,
    /// `last_execution.if_worker_dies`: whether it is tried again.
    pub(crate) retry: bool,
    /// Not in the document: the starts that it has really seen.
    pub(crate) started: u8,
    /// Not in the document: whether it was enqueued after the job had been archived.
    pub(crate) copy: bool,
}

impl Job {
    pub(crate) fn new(copy: bool) -> Self {
        Self { locked: false, due: true, attempts: 0, interruptions: 0, executions: 0, last: None, retry: false, started: 0, copy }
    }

    pub(crate) fn is_held_by(&self, claim: Claim) -> bool {
        self.locked && self.last == Some(claim)
    }

    /// Whether the policy allows another start after the next.
    pub(crate) fn retries_after_next(&self, job: usize) -> bool {
        (self.attempts + 1).saturating_sub(self.interruptions) < ALLOWED[job]
    }
}

/// A document in `roster`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Entry {
    pub(crate) available: bool,
    pub(crate) free: u8,
    /// What was assigned in a round that the worker has not seen: a set, a bit for each job.
    pub(crate) assigned: u8,
    pub(crate) term: u8,
    pub(crate) retired: bool,
}

/// A request to write, as it travels. Its sender may have given it up, or have died, before it is carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Request {
    StartIfUnlocked { claim: Claim, read: Job, in_lease: bool },
    Archive { claim: Claim, death: bool },
    RescheduleIfClaimed { claim: Claim, job: Job, death: bool },
    DiscardIfClaimed { claim: Claim },
    ReportIfUnassignedSince { worker: usize, free: u8, this_round: bool },
    RetireIfSilentSince { worker: usize, unchanged: bool },
    DeleteIfRetired { worker: usize },
    // The second half of an [`Request::Archive`] that is no transaction.
    Insert { job: usize },
}

/// What MongoDB holds, and what has happened.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Database {
    pub(crate) scheduled: [Option<Job>; JOBS],
    pub(crate) archived: [u8; JOBS],
    pub(crate) roster: [Option<Entry>; WORKERS],
    /// Requests whose senders do not wait for an answer any more.
    pub(crate) late: Vec<Request>,
    /// Workers whose process was seen to be gone: they did not fall silent.
    pub(crate) gone: [bool; WORKERS],
    /// The first promise that was broken.
    pub(crate) broken: Option<Promise>,
}

impl Database {
    /// Carries a request out; whether its filter matched.
    pub(crate) fn apply(&mut self, request: Request, guards: &Guards) -> bool {
        match request {
            Request::StartIfUnlocked { claim, read, in_lease } => self.start_if_unlocked(claim, read, in_lease, guards),
            Request::Archive { claim, death } => self.archive(claim, death, guards),
            Request::RescheduleIfClaimed { claim, job, death } => self.reschedule_if_claimed(claim, job, death, guards),
            Request::DiscardIfClaimed { claim } => self.discard_if_claimed(claim, guards),
            Request::ReportIfUnassignedSince { worker, free, this_round } => {
                guards.pass(Guard::ReportRound, this_round) && self.report(worker, free, guards)
            }
            Request::RetireIfSilentSince { worker, unchanged } => guards.pass(Guard::RetireLastSeen, unchanged) && self.retire(worker),
            Request::DeleteIfRetired { worker } => {
                let found = self.roster[worker].is_some_and(|entry| guards.pass(Guard::DeleteRetired, entry.retired));
                if found {
                    self.roster[worker] = None;
                }
                found
            }
            Request::Insert { job } => {
                self.archived[job] += 1;
                true
            }
        }
    }

    fn start_if_unlocked(&mut self, claim: Claim, read: Job, in_lease: bool, guards: &Guards) -> bool {
        let Some(job) = &mut self.scheduled[claim.job] else { return false };
        let matches = guards.pass(Guard::StartLocked, !job.locked)
            && guards.pass(Guard::StartAttempts, job.attempts == read.attempts)
            && guards.pass(Guard::StartDue, job.due)
            && guards.pass(Guard::StartLease, in_lease);
        if !matches {
            return false;
        }
        let early = !job.due;
        let (attempts, retry) = (read.attempts + 1, read.retries_after_next(claim.job));
        *job = Job { locked: true, attempts, last: Some(claim), retry, started: job.started + 1, ..*job };
        self.breaks_if(early, Promise::NotBeforeItsTime);
        self.breaks_if(self.is_dead(claim.worker) && !self.gone[claim.worker], Promise::NotAfterDeath);
        true
    }

    /// Which of the jobs carry this very start.
    pub(crate) fn claims_of_starts(&self, claim: Claim, guards: &Guards) -> bool {
        self.scheduled[claim.job]
            .and_then(|job| job.last.filter(|_| job.locked))
            .is_some_and(|last| last.worker == claim.worker && guards.pass(Guard::ClaimsStart, last == claim))
    }

    fn archive(&mut self, claim: Claim, death: bool, guards: &Guards) -> bool {
        let deleted = self.scheduled[claim.job]
            .is_some_and(|job| guards.pass(Guard::ArchiveLocked, job.locked) && guards.pass(Guard::ArchiveStart, job.last == Some(claim)));
        if !guards.pass(Guard::ArchiveDeleted, deleted) {
            return false;
        }
        if deleted {
            self.note_outcome(claim, death);
            self.scheduled[claim.job] = None;
        }
        if self.archived[claim.job] > 0 && !guards.lack(Guard::ArchiveId) {
            // Not inserted twice: what was deleted was the copy of an archived job.
            return true;
        }
        if guards.lack(Guard::ArchiveTransaction) {
            self.late.push(Request::Insert { job: claim.job });
        } else {
            self.archived[claim.job] += 1;
        }
        true
    }

    fn reschedule_if_claimed(&mut self, claim: Claim, to: Job, death: bool, guards: &Guards) -> bool {
        let Some(job) = self.scheduled[claim.job] else { return false };
        if !guards.pass(Guard::RescheduleLocked, job.locked) || !guards.pass(Guard::RescheduleStart, job.last == Some(claim)) {
            return false;
        }
        self.note_outcome(claim, death);
        self.scheduled[claim.job] = Some(Job { attempts: job.attempts, started: job.started, copy: job.copy, ..to });
        true
    }

    fn discard_if_claimed(&mut self, claim: Claim, guards: &Guards) -> bool {
        let found = self.scheduled[claim.job].is_some_and(|job| guards.pass(Guard::DiscardStart, job.is_held_by(claim)));
        if found {
            self.scheduled[claim.job] = None;
        }
        found
    }

    /// The update of `report_if_unassigned_since`.
    fn report(&mut self, worker: usize, free: u8, guards: &Guards) -> bool {
        match &mut self.roster[worker] {
            Some(entry) if guards.pass(Guard::ReportRetired, !entry.retired) => {
                (entry.available, entry.free) = (free > 0, free);
                true
            }
            _ => false,
        }
    }

    /// Makes a registered worker available in the term that it has read.
    pub(crate) fn make_available(&mut self, worker: usize, free: u8, term: u8, guards: &Guards) {
        if let Some(entry) = self.roster[worker].as_mut().filter(|entry| guards.pass(Guard::MakeAvailableRetired, !entry.retired)) {
            let term = if guards.lack(Guard::MakeAvailableMax) { term } else { entry.term.max(term) };
            *entry = Entry { available: true, free, term, ..*entry };
        }
    }

    /// Assigns jobs (a set) in a leader's term.
    pub(crate) fn assign_if_available(&mut self, term: u8, worker: usize, jobs: u8, guards: &Guards) -> bool {
        let Some(entry) = &mut self.roster[worker] else { return false };
        let matches = guards.pass(Guard::AssignAvailable, entry.available)
            && guards.pass(Guard::AssignTerm, entry.term == term)
            && guards.pass(Guard::AssignRetired, !entry.retired)
            && guards.pass(Guard::AssignFree, u32::from(entry.free) >= jobs.count_ones());
        if !matches {
            return false;
        }
        let unseen = entry.assigned != 0;
        (entry.available, entry.assigned) = (false, jobs);
        self.breaks_if(unseen, Promise::ByTurns);
        for request in &mut self.late {
            if let Request::ReportIfUnassignedSince { worker: sender, this_round, .. } = request {
                *this_round &= *sender != worker;
            }
        }
        true
    }

    /// Stamps a leader's term on the roster.
    pub(crate) fn stamp_term(&mut self, term: u8, guards: &Guards) {
        for entry in self.roster.iter_mut().flatten().filter(|entry| guards.pass(Guard::StampTerm, entry.term < term)) {
            entry.term = term;
        }
    }

    pub(crate) fn retire(&mut self, worker: usize) -> bool {
        let Some(entry) = &mut self.roster[worker] else { return false };
        (entry.retired, entry.available) = (true, false);
        true
    }

    /// Whether a worker was declared dead, and has perhaps been forgotten since.
    pub(crate) fn is_dead(&self, worker: usize) -> bool {
        self.roster[worker].is_none_or(|entry| entry.retired)
    }

    pub(crate) fn is_held_by(&self, claim: Claim) -> bool {
        self.scheduled[claim.job].is_some_and(|job| job.is_held_by(claim))
    }

    pub(crate) fn breaks_if(&mut self, wrong: bool, promise: Promise) {
        if wrong {
            self.broken.get_or_insert(promise);
        }
    }

    /// Watches an outcome being written.
    fn note_outcome(&mut self, claim: Claim, death: bool) {
        self.breaks_if(!self.is_held_by(claim), Promise::I3);
        self.breaks_if(death && !self.is_dead(claim.worker), Promise::I4);
    }

    /// Looks whether the documents are as was promised.
    pub(crate) fn judge(&mut self) {
        for (job, allowed) in ALLOWED.into_iter().enumerate() {
            let archived = self.archived[job];
            self.breaks_if(archived > 1, Promise::I2);
            let Some(document) = self.scheduled[job] else {
                self.breaks_if(archived == 0, Promise::I1);
                continue;
            };
            let Job { locked, attempts, interruptions, executions, started, copy, .. } = document;
            self.breaks_if(archived > 0 && !copy, Promise::I2);
            self.breaks_if(started != executions + interruptions + u8::from(locked), Promise::I4);
            self.breaks_if(started != attempts || attempts > allowed + interruptions, Promise::I6);
        }
        for entry in self.roster.into_iter().flatten() {
            self.breaks_if(entry.available && entry.assigned != 0, Promise::ByTurns);
            self.breaks_if(entry.assigned.count_ones() > u32::from(entry.free), Promise::WithinSlots);
            self.breaks_if(entry.available && entry.retired, Promise::RetiredForGood);
        }
    }
}
