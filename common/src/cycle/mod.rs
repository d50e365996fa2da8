//! The life of a job and of a worker: every write of the three programs that moves them on.
//!
//! | file | operations |
//! |---|---|
//! | `insert` | new jobs |
//! | `lanes`, `due`, `due_of_each` | lanes that have jobs; the first due jobs of some lanes together, and of each of them |
//! | `assignments` | jobs and permits of workers, in their documents |
//! | `start` | read and lock jobs; the jobs that a start has locked |
//! | `items`, `notes` | outcomes of the items of a running bundle; progress, checkpoint and log of a running job |
//! | `finish` | the outcomes of starts: archive, delete or reschedule |
//! | `effects` | what ends bring about |
//! | `not_kept` | the number of jobs that were deleted after their success |
//! | `rescue` | jobs of dead workers; the sweep |
//! | `roster`, `lease` | one document for each worker; the recruiter's lease |
//!
//! Writers of a job: every enqueuer inserts. An unlocked job is started, changed (date, priority, group), cancelled, replaced or postponed by an
//! enqueuer, made due by the process that takes its own jobs, released when what it waits for has ended, or archived because it has expired or is invalid. Each of these writes has
//! `locked: false` in its filter. Only the holder of the start writes a locked job, or a cleaner after the holder's death. Until that cleaner
//! has written, the holder's outcome counts, also after the holder was declared dead. Everyone may request the cancellation of a job.
//!
//! From the enqueueing to the archive: `enqueue/insert` writes the job (`insert`) and a hint. The leader (`rounds`) finds it by the hint, or in
//! a scan (`lanes`, `due`), and writes the assignment (`assignments`). The worker's session reads that, its `starts` lock the job (`start`), its
//! `run` executes it, and its `record` writes the end: `job/ending` says what is archived, `job/effects` what else the end brings about, and
//! `finish` writes both in one transaction (`effects`).

pub(crate) mod assignments;
pub(crate) mod due;
pub(crate) mod due_of_each;
pub(crate) mod effects;
pub(crate) mod finish;
pub(crate) mod insert;
pub(crate) mod items;
pub(crate) mod lanes;
pub(crate) mod lease;
pub(crate) mod not_kept;
pub(crate) mod notes;
pub(crate) mod rescue;
pub(crate) mod roster;
pub(crate) mod start;

pub(crate) use self::insert::Duplicate;
pub use self::{
    assignments::Planned,
    due::DueJobs,
    finish::{BATCH_BYTES, GuardedWrite},
    lease::{LeaderLease, Observed},
    not_kept::NotKept,
    rescue::LockedJobs,
    roster::{HeartbeatReply, Offer, Registration},
    start::{Conditions, Start, ToStart},
};
