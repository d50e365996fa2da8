//! What the protocol promises, and the guards by which it keeps its promises: every condition of a store operation that
//! safety relies on, under the name of the operation.

use stateright::Model;

macro_rules! promises {
    ($($promise:ident $text:literal;)+) => {
        /// What must be true in every state.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub(crate) enum Promise { $($promise),+ }

        impl Promise {
            pub(crate) fn text(self) -> &'static str {
                match self { $(Self::$promise => $text),+ }
            }
        }
    };
}

promises! {
    I1 "I1: an acknowledged job is scheduled or archived";
    I2 "I2: a job is archived once and never in both, but for a copy sent again, which is not run";
    I3 "I3: only the start that holds a job writes its outcome";
    I4 "I4: every start beyond the first is explained, and only the dead have died";
    I5 "I5: a job that must not run again is entered once";
    I6 "I6: attempts are the starts there were, and no more of them count than the policy allows";
    NotBeforeItsTime "a retry is not started before its time";
    NotAfterDeath "a worker that was declared dead for its silence starts nothing";
    ByTurns "who is available has seen what was assigned last";
    WithinSlots "a worker is assigned no more jobs than it has slots";
    RetiredForGood "the retired are not available";
    InOrderOfTerms "once a leader has begun, no earlier one assigns";
    OneLeaderPerTerm "no two lead in one term";
    OneLeaderAtATime "no two trust that they lead";
    WithinLimit "no job of a limit of one is entered while a worker that is not declared dead runs another";
    Nothing "nothing";
}

/// What is looked for in every state. A single property, since the checker takes its time for each.
pub(crate) const KEPT: &str = "every promise is kept";

/// A model whose guards can be removed.
pub(crate) trait Guarded: Model {
    fn guards(&self) -> &Guards;

    /// The first promise that was broken on the way to a state.
    fn broken(state: &Self::State) -> Option<Promise>;
}

/// How much there is in the world that is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum World {
    // The whole protocol: which jobs are assigned (a bit for each), how many faults may happen, how many jobs a worker runs
    // at a time, and how many terms there are: with two, a recruiter takes over while the other goes on.
    Protocol { jobs: u8, faults: u8, slots: u8, terms: u8 },
    // The recruiters' lease by itself.
    Leadership { faults: u8 },
    // The permit of a limit of one.
    Limit { faults: u8 },
}

pub(crate) const fn protocol(jobs: u8, faults: u8, slots: u8, terms: u8) -> World {
    World::Protocol { jobs, faults, slots, terms }
}

pub(crate) const fn leadership(faults: u8) -> World {
    World::Leadership { faults }
}

pub(crate) const fn limit(faults: u8) -> World {
    World::Limit { faults }
}

macro_rules! guards {
    ($($(#[$doc:meta])+ $guard:ident $name:literal $promise:ident $world:expr;)+) => {
        /// A condition of a store operation. Without it a promise is broken; or nothing is, for a reason that is given.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Guard { $($(#[$doc])+ $guard),+ }

        impl Guard {
            pub(crate) const ALL: &[Self] = &[$(Self::$guard),+];

            /// `operation/condition`.
            pub(crate) fn name(self) -> &'static str {
                match self { $(Self::$guard => $name),+ }
            }

            pub(crate) fn keeps(self) -> Promise {
                match self { $(Self::$guard => Promise::$promise),+ }
            }

            /// A world that is large enough to show it.
            pub(crate) fn shown_in(self) -> World {
                match self { $(Self::$guard => $world),+ }
            }
        }
    };
}

guards! {
    /// A job that is sent again would replace the one that is there, started or not.
    InsertId "insert_jobs/_id" I5 protocol(1, 1, 1, 1);
    /// Nearly covered by the attempts, which every start changes; not for a copy, whose attempts begin anew.
    StartLocked "start_if_unlocked/locked" I4 protocol(2, 1, 1, 1);
    /// The verdict that is written belongs to the attempt that was read.
    StartAttempts "start_if_unlocked/attempts" I6 protocol(2, 0, 1, 1);
    /// An old assignment would start a retry at once.
    StartDue "start_if_unlocked/scheduled_at" NotBeforeItsTime protocol(2, 0, 1, 1);
    /// A start may be on its way when its worker is declared dead.
    StartLease "start_if_unlocked/lease_until" NotAfterDeath protocol(1, 0, 1, 1);
    /// A worker would run jobs that another start of it has locked, and that it releases.
    ClaimsStart "claims_of_starts_at_majority/start" I5 protocol(1, 1, 1, 1);
    /// A copy of an archived job would run.
    ArchivedId "already_archived/_id" I2 protocol(1, 1, 1, 1);
    /// A worker that reads the archive before the start may read it before the job is archived, and start its copy.
    ArchivedAfterStart "already_archived/after start_if_unlocked" I2 protocol(1, 1, 1, 1);
    /// Redundant: only copies of archived jobs are discarded, and any other copy of the job has to go as well.
    DiscardStart "discard_if_claimed/start" Nothing protocol(1, 1, 1, 1);
    /// A worker that was declared dead would end a later start.
    RescheduleStart "reschedule_if_claimed/start" I3 protocol(2, 0, 1, 1);
    /// A start that has been recorded as a death would be recorded again.
    RescheduleLocked "reschedule_if_claimed/locked" I3 protocol(2, 0, 1, 1);
    /// A worker that was declared dead would end a later start.
    ArchiveStart "archive/start" I3 protocol(2, 0, 1, 1);
    /// A start that has been recorded as a death would be recorded again.
    ArchiveLocked "archive/locked" I3 protocol(2, 0, 1, 1);
    /// Between delete and insert the job is nowhere.
    ArchiveTransaction "archive/transaction" I1 protocol(1, 0, 1, 1);
    /// What could not be deleted would be inserted all the same.
    ArchiveDeleted "archive/deleted" I2 protocol(2, 0, 1, 1);
    /// A copy whose worker died would be archived beside the job.
    ArchiveId "archive/_id" I2 protocol(1, 1, 1, 1);
    /// The document of the dead may name what others hold by now.
    HeldByWorker "held_by/worker" I4 protocol(3, 0, 1, 1);
    /// The sweep would end what the living run.
    RegisteredId "locked_jobs/registered" I4 protocol(1, 0, 1, 1);
    /// A cleaner that reads the roster before the locked jobs does not know the workers that have come since.
    RegisteredAfterLocked "locked_jobs/registered is read after" I4 protocol(1, 0, 1, 1);
    /// A worker that was declared dead before it was ready would offer itself.
    MakeAvailableRetired "make_available/retired" RetiredForGood protocol(1, 0, 1, 1);
    /// A leader that has stamped meanwhile would be shut out for an earlier one.
    MakeAvailableMax "make_available/$max" InOrderOfTerms protocol(1, 0, 1, 2);
    /// A leader may stamp the roster in between, and the document that comes then would get an older term.
    MakeAvailableAfterRegister "make_available/after register" InOrderOfTerms protocol(1, 0, 1, 2);
    /// An assignment that was not seen would be lost.
    AssignAvailable "assign_if_available/available" ByTurns protocol(1, 0, 1, 1);
    /// An earlier leader would go on assigning.
    AssignTerm "assign_if_available/term" InOrderOfTerms protocol(1, 0, 1, 2);
    /// The plan may be older than what the worker said last.
    AssignFree "assign_if_available/free" WithinSlots protocol(3, 0, 1, 1);
    /// Redundant: who is retired is not available, by [`Guard::ReportRetired`].
    AssignRetired "assign_if_available/retired" Nothing protocol(1, 1, 1, 1);
    /// An earlier leader would put its own term back.
    StampTerm "stamp_term/term" InOrderOfTerms protocol(1, 0, 1, 2);
    /// A late report from before an assignment would make the worker available before it has read the assignment, which would be lost.
    ReportRound "report_if_unassigned_since/round" ByTurns protocol(1, 0, 1, 1);
    /// A worker that does not know of its death would offer itself.
    ReportRetired "report_if_unassigned_since/retired" RetiredForGood protocol(1, 0, 1, 1);
    /// A worker that does not know of its death would trust itself on.
    HeartbeatRetired "heartbeat/retired" NotAfterDeath protocol(1, 0, 1, 1);
    /// A worker whose document is gone would be back under its old id.
    HeartbeatNoUpsert "heartbeat/no upsert" NotAfterDeath protocol(1, 1, 1, 1);
    /// A worker that gave a sign of life meanwhile is within its lease again.
    RetireLastSeen "retire_if_silent_since/last_seen_at" NotAfterDeath protocol(1, 0, 1, 1);
    /// Redundant: a process asks for it only if it has read `retired`, which no process takes back.
    DeleteRetired "delete_if_retired/retired" Nothing protocol(1, 1, 1, 1);
    /// Two who observed the same would both follow it.
    AcquireTerm "acquire_if_unchanged/term" OneLeaderPerTerm leadership(0);
    /// The holder may have renewed after its silence.
    AcquireRenewals "acquire_if_unchanged/renewals" OneLeaderAtATime leadership(0);
    /// Redundant: a recruiter that has released the lease does not lead any more, and no other takes it back within the term.
    AcquireReleased "acquire_if_unchanged/released" Nothing leadership(1);
    /// An earlier leader would trust itself again. The holder's id and the term say the same.
    RenewHolder "renew_if_held/holder" OneLeaderAtATime leadership(0);
    /// Redundant: a recruiter that has released the lease renews no more, and a late renewal counts on without consequence.
    RenewReleased "renew_if_held/released" Nothing leadership(1);
    /// The late word of an earlier leader would give away what is another's.
    ReleaseHolder "release_if_held/holder" OneLeaderAtATime leadership(1);
    /// A plan may be older than the last grant.
    GrantUnique "assign_if_available/held_permits is unique" WithinLimit limit(0);
    /// A late assignment would grant a worker the permit that one of its jobs uses, and that job's end would not free it.
    GrantNotHeld "assign_if_available/held_permits" WithinLimit limit(0);
    /// A failover would take a permit back that a job uses.
    GrantMajority "assignment/majority" WithinLimit limit(1);
    /// A worker would use a permit again that it has returned.
    TakenOnce "assignment/round" WithinLimit limit(1);
    /// A late report from before a grant would return the permit that is in use.
    PermitRound "report_if_unassigned_since/round of a grant" WithinLimit limit(1);
    /// A report without an answer may have made the permit free.
    DroppedBeforeReport "report_if_unassigned_since/dropped before" WithinLimit limit(1);
    /// The permit of a worker that was declared dead is another's by then.
    LimitedStartLease "start_if_unlocked/lease_until of a limited job" WithinLimit limit(0);
}

/// All guards but those that are removed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Guards {
    pub(crate) removed: Vec<Guard>,
}

impl Guards {
    /// What a guard makes of a condition: without the guard, as if it were met.
    pub(crate) fn pass(&self, guard: Guard, met: bool) -> bool {
        met || self.lack(guard)
    }

    pub(crate) fn lack(&self, guard: Guard) -> bool {
        self.removed.contains(&guard)
    }
}
