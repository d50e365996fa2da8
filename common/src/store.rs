//! The operations of the three programs. With the feature `protocol`; nothing of it is for applications, and it changes with each release.

pub use crate::mongo::{Store, current_operation, schema};
pub use crate::{
    base::names::check_trimmed_name,
    consumers::operations::MOST_CONSUMERS,
    cycle::{
        BATCH_BYTES, Conditions, DueJobs, GuardedWrite, HeartbeatReply, LeaderLease, LockedJobs, NotKept, Observed, Offer, Planned,
        Registration, Start, ToStart,
    },
    enqueue::waiting::WaitingJob,
    events::subscribers::RingPart,
    graphs::continuation::continuation,
    hints::{AssignedJobs, EVERY_GROUP, Hint, Hints, HintsAddress, HintsAt, Hub, InvalidHintsAddress, Listener},
    job::{
        StoredJob,
        document::{Held, holder_of},
        edge::{End, Unsatisfiable, edges_of},
        effects::Ending,
        ending::{Archival, Progress, Recorded},
        gate::{
            LONGEST_GATE, Permit, gate_of, gate_of_line, group_of_resource, line_of_gate, permit_name, resource_and_number,
            resource_of_group, resources_in,
        },
        lane::{Lane, Position, ScheduledJob},
        rescheduling::Rescheduling,
    },
    limits::{
        backlogs::GroupBacklog,
        cells::{FastLimits, KeptCells, RateCell},
        refusal::{InUse, LaneLimits, NotAdmitted},
        window::Maintenance,
    },
    lines::Head,
    mongo::{
        Channel, CommitSession, ConnectArgs, ConnectError, DEFAULT_DATABASE, DOCUMENT_FAULTS, DriverError, StoreError, WalkStep, cut,
        is_commit_unknown, lossy,
    },
    operator::{
        COUNTED, Covered, Finished, GroupSample, LaneCounts, Match, OtherClasses, Reasons, Retrial, RetryNote, SAMPLED, Unfinished,
        Waiting, Walk,
        audit::{AuditId, Intended},
        cleaners::{Cleaner, CleanerNote, NOTED_EVERY},
        control::export::Exported,
        doctor::{Check, Finding, State},
        policies_in,
        redaction::{FollowedRedaction, InvalidRedaction, REDACTED, Redaction, RedactionRule},
        select::LOOK_LIMIT,
        why::situation::{Due, Situation, paused_by},
    },
    roster::{
        Assignment, AvailableWorker, ClassSlots, Offered, PermitHolder, Permits, ProcessIdentity, RegisteredWorker, Request, Wanted,
        WorkOn, free_slots_of,
    },
    schedules::{definition::id_of_slot, runs::Advance},
};
