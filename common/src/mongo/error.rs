//! The errors of MongoDB operations. Refusals are distinguished by MongoDB's error codes and labels.

use bson::{Document, doc};
use mongodb::error::{Error, ErrorKind, WriteFailure};

use super::CALL_LIMIT;
use crate::{base::telemetry::of_mongodb, job::CorruptJob, meters::operations::Problem};

/// An error of the driver, with a `Display` of one line. The driver's own text contains its complete state.
#[derive(Clone, Debug)]
pub struct DriverError(Error);

impl std::fmt::Display for DriverError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&of_mongodb(&self.0))
    }
}

impl std::error::Error for DriverError {}

impl From<Error> for DriverError {
    fn from(error: Error) -> Self {
        Self(error)
    }
}

/// The driver's error itself, with its kind, labels and codes.
impl std::ops::Deref for DriverError {
    type Target = Error;

    fn deref(&self) -> &Error {
        &self.0
    }
}

/// A failed operation. Losing a race is not an error: operations report it in their result.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the fields are")]
#[non_exhaustive]
pub enum StoreError {
    /// MongoDB refused the operation, or could not be reached. The source has the cause.
    #[error("the MongoDB operation `{operation}` failed")]
    Mongo { operation: &'static str, source: DriverError },
    /// There was no reply in time. The outcome of the operation is unknown.
    #[error("MongoDB did not reply to `{operation}` within {} s", CALL_LIMIT.as_secs())]
    TimedOut { operation: &'static str },
    /// The session of the caller has no transaction open.
    #[error("`{operation}` needs a session in which the caller has started a transaction")]
    NoTransaction { operation: &'static str },
    /// Collections of an application have names that Recruiter needs. Nothing was changed.
    #[error(
        "the database has collections that are not of Recruiter, under names that Recruiter needs: {collection}. Nothing was changed. Let Recruiter use another database, or other names (--collection-prefix jobs_, RECRUITER_COLLECTION_PREFIX), or rename these collections"
    )]
    Foreign {
        /// Names of the collections, each in backticks.
        collection: String,
    },
    /// A newer release has made the schema, and says that programs of this release may not work with it. Nothing was changed.
    #[error(
        "a newer release of Recruiter has made the schema of this database (version {found}; this program knows {known}), and this program is too old to work with it. Nothing was changed. Upgrade this program, or restore a backup of before the upgrade"
    )]
    NewerSchema { found: i32, known: i32 },
    /// A document is not valid in its collection.
    #[error("`{operation}` read an invalid document")]
    Corrupt { operation: &'static str, source: CorruptJob },
}

/// MongoDB's error codes.
pub(crate) mod code {
    pub(crate) const UNAUTHORIZED: i32 = 13;
    pub(crate) const NAMESPACE_NOT_FOUND: i32 = 26;
    pub(crate) const INDEX_NOT_FOUND: i32 = 27;
    pub(crate) const NAMESPACE_EXISTS: i32 = 48;
    pub(crate) const MAX_TIME_EXPIRED: i32 = 50;
    /// An index of this name has other keys.
    pub(crate) const INDEX_KEY_SPECS_CONFLICT: i32 = 86;
    /// An index cannot be made at this time. Lock timeout, lock busy, write conflict, conflicting operation, database is being dropped,
    /// election, snapshot unavailable, too many files open, index build aborted, index build in progress, object is busy, storage change,
    /// temporarily unavailable, writes blocked, resources exhausted, queue full, rate limit, disk full.
    pub(crate) const NO_INDEX_YET: [i32; 18] = [24, 46, 112, 117, 215, 216, 246, 264, 276, 285, 314, 355, 365, 371, 402, 433, 449, 14_031];
    /// A tailing cursor has fallen behind: the documents after its position were overwritten.
    pub(crate) const CAPPED_POSITION_LOST: i32 = 136;
    /// A member is no primary any more, not yet, or is shutting down.
    pub(crate) const NO_PRIMARY: [i32; 8] = [91, 189, 10_107, 11_600, 11_602, 13_435, 13_436, 133];
    /// The change stream cannot continue: its event is not in the oplog.
    pub(crate) const CHANGE_STREAM_FATAL: i32 = 280;
    /// The change stream cannot continue: the oplog no longer holds its position.
    pub(crate) const CHANGE_STREAM_HISTORY_LOST: i32 = 286;
    pub(crate) const DUPLICATE_KEY: i32 = 11_000;
    /// Took too long, interrupted, exceeded time limit, no majority snapshot yet, cursor not found, query plan killed, cursor killed.
    pub(crate) const TEMPORARY: [i32; 7] = [50, 11_601, 262, 134, CURSOR_LOST[0], CURSOR_LOST[1], CURSOR_LOST[2]];
    /// Cursor not found, query plan killed, cursor killed: for example because the collection was dropped or replaced during the read.
    pub(crate) const CURSOR_LOST: [i32; 3] = [43, 175, 237];
}

/// Error codes whose cause is the document, not the connection or the server: invalid values, types, names and keys, nesting, sizes, the
/// validator, a duplicate key. Each code has its name in MongoDB, or `Location` and the code. A test compares the
/// names.
#[doc(hidden)]
pub const DOCUMENT_FAULTS: [(i32, &str); 21] = [
    (2, "BadValue"),
    (9, "FailedToParse"),
    (14, "TypeMismatch"),
    (15, "Overflow"),
    (16, "InvalidLength"),
    (20, "IllegalOperation"),
    (22, "InvalidBSON"),
    (28, "PathNotViable"),
    (52, "DollarPrefixedFieldName"),
    (56, "EmptyFieldName"),
    (57, "DottedFieldName"),
    (121, "DocumentValidationFailure"),
    (257, "TransactionTooLarge"),
    (388, "TransactionTooLargeForCache"),
    (10_334, "BSONObjectTooLarge"),
    (code::DUPLICATE_KEY, "DuplicateKey"),
    (15_947, "Location15947"),
    (17_280, "OBSOLETE_KeyTooLong"),
    (17_419, "Location17419"),
    (17_420, "Location17420"),
    (51_108, "Location51108"),
];

/// Part of MongoDB's message for a query that names a missing index. The error has no code of its own (it is a `BadValue`), so the text
/// identifies it. A test drops an index and expects it to be created again.
const UNKNOWN_HINT: &str = "hint provided does not correspond";

/// The driver's message when a transaction is started in a session that already has an open one. The driver has no other way to detect
/// this. A test of [`Store::finish_in`](super::Store::finish_in) fails if the text changes.
const TRANSACTION_IS_OPEN: &str = "transaction already in progress";

impl StoreError {
    /// Makes the driver's errors into those of this operation.
    pub(crate) fn of(operation: &'static str) -> impl Fn(Error) -> Self + Copy {
        move |source| Self::Mongo { operation, source: source.into() }
    }

    /// MongoDB's code of the first refusal.
    pub(crate) fn code(&self) -> Option<i32> {
        if let Self::Mongo { source, .. } = self { code_of(source) } else { None }
    }

    /// Whether the same call can succeed later without any change: the cause is the connection or the server, not the
    /// documents or arguments of the call.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::TimedOut { .. } => true,
            Self::Corrupt { .. } | Self::NoTransaction { .. } | Self::Foreign { .. } | Self::NewerSchema { .. } => false,
            Self::Mongo { source, .. } => !is_document_fault(source),
        }
    }

    /// Whether to repeat the call for a while: the error is transient, and not about permissions, which people give.
    pub fn may_pass(&self) -> bool {
        self.is_transient() && !self.is_unauthorized()
    }

    /// Whether the connection broke or the primary changed in the middle of a call. A read may be repeated at once.
    pub(crate) fn is_broken_off(&self) -> bool {
        let has_waited = matches!(self, Self::Mongo { source, .. } if matches!(source.kind.as_ref(), ErrorKind::ServerSelection { .. }));
        self.problem() == Problem::Unreachable && !has_waited
    }

    /// Whether nothing was refused: the connection broke, there was no primary, or no reply came in time.
    pub(crate) fn is_unanswered(&self) -> bool {
        self.problem() != Problem::Refused
    }

    /// What is counted about this error.
    pub(crate) fn problem(&self) -> Problem {
        match self {
            Self::TimedOut { .. } => Problem::Unanswered,
            Self::Mongo { source, .. } => problem(source),
            Self::Corrupt { .. } | Self::NoTransaction { .. } | Self::Foreign { .. } | Self::NewerSchema { .. } => Problem::Refused,
        }
    }

    /// Whether MongoDB or the driver has put this label on the error.
    pub(crate) fn has_label(&self, label: &str) -> bool {
        matches!(self, Self::Mongo { source, .. } if source.contains_label(label))
    }

    /// Whether a unique index already contains a key of the document.
    pub(crate) fn is_duplicate(&self) -> bool {
        self.code() == Some(code::DUPLICATE_KEY)
    }

    /// Whether a tailing cursor has fallen so far behind that documents were overwritten before it read them.
    pub(crate) fn is_position_lost(&self) -> bool {
        self.code() == Some(code::CAPPED_POSITION_LOST)
    }

    /// Whether MongoDB has refused a command, and not because its primary changes.
    pub(crate) fn is_refusal(&self) -> bool {
        matches!(self, Self::Mongo { source, .. }
            if matches!(source.kind.as_ref(), ErrorKind::Command(refusal) if !code::NO_PRIMARY.contains(&refusal.code)))
    }

    /// Whether MongoDB has refused a read for now: it took too long, was interrupted, or a majority is not known yet.
    pub fn is_temporary(&self) -> bool {
        self.code().is_some_and(|code| code::TEMPORARY.contains(&code))
    }

    /// Whether MongoDB has ended a read in the middle. The same read may succeed at once.
    pub(crate) fn is_cursor_lost(&self) -> bool {
        self.code().is_some_and(|code| code::CURSOR_LOST.contains(&code))
    }

    /// Whether MongoDB no longer holds the history from which a change stream was to continue.
    pub(crate) fn is_history_lost(&self) -> bool {
        matches!(self.code(), Some(code::CHANGE_STREAM_HISTORY_LOST | code::CHANGE_STREAM_FATAL))
    }

    /// Whether MongoDB aborted a read because it took too long.
    pub fn is_too_slow(&self) -> bool {
        self.code() == Some(code::MAX_TIME_EXPIRED)
    }

    /// Whether the MongoDB user lacks the permission for the operation.
    pub fn is_unauthorized(&self) -> bool {
        self.code() == Some(code::UNAUTHORIZED)
    }

    /// Whether the MongoDB user lacks the permission to make a part of the schema that is missing.
    pub(crate) fn lacks_right_of_schema(&self) -> bool {
        let makes = ["create_collection", "create_index", "drop_index", "replace_collection", "seed"];
        matches!(self, Self::Mongo { operation, .. } if makes.contains(operation)) && self.is_unauthorized()
    }

    /// Whether MongoDB refuses an index for a reason that stays: the other indexes of the collection, or its documents.
    pub(crate) fn is_index_refused(&self) -> bool {
        let is_not_yet = self.code().is_some_and(|code| code::NO_INDEX_YET.contains(&code));
        self.is_refusal() && !self.is_unauthorized() && !self.is_temporary() && !is_not_yet
    }

    /// Whether a query names an index that does not exist.
    pub(crate) fn is_index_missing(&self) -> bool {
        matches!(self, Self::Mongo { source, .. }
            if matches!(source.kind.as_ref(), ErrorKind::Command(refusal) if refusal.message.contains(UNKNOWN_HINT)))
    }
}

/// Whether the driver refuses to start a transaction because one is open.
pub(crate) fn is_transaction_open(error: &Error) -> bool {
    matches!(error.kind.as_ref(), ErrorKind::Transaction { message, .. } if message == TRANSACTION_IS_OPEN)
}

/// What is counted about an error: whether MongoDB has answered.
pub(crate) fn problem(error: &Error) -> Problem {
    let has_answered = code_of(error).is_some_and(|code| !code::NO_PRIMARY.contains(&code));
    if has_answered || is_document_fault(error) { Problem::Refused } else { Problem::Unreachable }
}

fn is_document_fault(error: &Error) -> bool {
    matches!(error.kind.as_ref(), ErrorKind::Bson(_) | ErrorKind::BsonSerialization(_) | ErrorKind::InvalidArgument { .. })
        || code_of(error).is_some_and(|code| DOCUMENT_FAULTS.iter().any(|(fault, _)| *fault == code))
}

/// The code of the first refusal in an error, wherever the driver puts it.
pub(crate) fn code_of(error: &Error) -> Option<i32> {
    if let ErrorKind::Command(command) = error.kind.as_ref() {
        Some(command.code)
    } else if let ErrorKind::InsertMany(many) = error.kind.as_ref() {
        // A write concern error comes first, so that the call is repeated even if there are other errors.
        if let Some(concern) = &many.write_concern_error {
            return Some(concern.code);
        }
        many.write_errors.as_ref().and_then(|errors| errors.first()).map(|error| error.code)
    } else if let ErrorKind::Write(WriteFailure::WriteError(error)) = error.kind.as_ref() {
        Some(error.code)
    } else {
        None
    }
}

/// The number of documents that a write command has met, from its reply. A refusal that an otherwise successful reply reports is an error.
pub(crate) fn met_by(reply: &Document) -> Result<usize, Error> {
    let failed = |key: &str| reply.get_array(key).is_ok_and(|errors| !errors.is_empty());
    if failed("writeErrors") || reply.contains_key("writeConcernError") {
        // A write concern error comes first: the outcome of every statement is then unknown.
        let first = || reply.get_array("writeErrors").ok().and_then(|errors| errors.first()).and_then(bson::Bson::as_document);
        let refusal = reply.get_document("writeConcernError").ok().or_else(first).cloned().unwrap_or_default();
        let command: mongodb::error::CommandError = bson::deserialize_from_document(doc! {
            "code": refusal.get_i32("code").unwrap_or(0),
            "codeName": refusal.get_str("codeName").unwrap_or("WriteError"),
            "errmsg": refusal.get_str("errmsg").unwrap_or("the write was refused"),
        })
        .map_err(Error::custom)?;
        return Err(ErrorKind::Command(command).into());
    }
    Ok(reply.get_i32("n").ok().and_then(|met| usize::try_from(met).ok()).unwrap_or(0))
}
