//! Why a checkpoint was not stored, or cannot be read.

use recruiter_common::job::notes::LARGEST_CHECKPOINT;

/// Why a checkpoint was not stored, or cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// It is too large.
    #[error("a checkpoint has at most {LARGEST_CHECKPOINT} bytes of BSON, this one has {0}: store the data elsewhere, and its place here")]
    TooLarge(usize),
    /// It cannot be expressed in BSON.
    #[error("the checkpoint cannot be stored: {0}")]
    Unstorable(String),
    /// The stored checkpoint is not of this type.
    #[error("the stored checkpoint cannot be decoded: {0}; read it as a `bson::Bson`, or begin from the start")]
    Undecodable(String),
    /// The job is a bundle.
    #[error("a bundle has no checkpoint: the outcome of each item is stored, and an item that is done does not run again")]
    Bundle,
    /// The worker no longer holds the job, which may already run elsewhere.
    #[error("this execution no longer holds the job, so its checkpoint was not stored: stop")]
    ClaimLost,
    /// MongoDB refuses the checkpoint.
    #[error("MongoDB refuses the checkpoint: the document of the job would be too large, or the value too deeply nested")]
    Refused,
    /// A transaction of this execution is open.
    #[error(
        "a checkpoint cannot be saved while a transaction of the job is open, because the transaction would conflict with it: save it before, \
         or note it with `checkpoint`"
    )]
    InTransaction,
    /// The execution has ended.
    #[error("the execution has ended before its checkpoint was stored")]
    Ended,
}
