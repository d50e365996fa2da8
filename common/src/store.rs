//! The operations of the three programs.

pub use crate::mongo::{Store, current_operation, schema};
pub use crate::{
    consumers::MOST_CONSUMERS,
    cycle::{
        BATCH_BYTES, Conditions, DueJobs, GuardedWrite, HeartbeatReply, LeaderLease, LockedJobs, NotKept, Observed, Offer, Planned,
        Registration, Start, ToStart,
    },
    events::RingPart,
    files::FilesStep,
    hints::{AssignedJobs, EVERY_GROUP, Hint, Hints, HintsAddress, HintsAt, Hub, InvalidHintsAddress, Listener},
    job::{
        StoredJob,
        effects::Ending,
        ending::{Archival, Progress, Recorded},
        lane::{Lane, Position, ScheduledJob},
        rescheduling::Rescheduling,
    },
    limits::{FastLimits, GroupBacklog, KeptCells, LARGEST_CAP, RateCell},
    lines::Head,
    mongo::{Channel, CommitSession, ConnectArgs, ConnectError, DEFAULT_DATABASE, DOCUMENT_FAULTS, DriverError, StoreError, cut, lossy},
    operator::{
        COUNTED, Covered, Finished, JobFilter, LOOK_LIMIT, LaneCounts, Listed, Match, OtherClasses, Page, Reasons, RetentionPosition,
        RetentionStep, Retrial, SAMPLED, StateFilter, Unfinished, Waiting, Walk,
    },
    schedules::Advance,
};
