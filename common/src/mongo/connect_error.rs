//! Why a process cannot work with a MongoDB, and what to do.

use std::{path::PathBuf, time::Duration};

use mongodb::error::Error;

use super::{DriverError, StoreError};

/// Oldest server the protocol was tested with.
pub(crate) const OLDEST_SERVER: (i32, i32) = (6, 0);

/// Why a process cannot work with this MongoDB.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the fields are")]
#[non_exhaustive]
pub enum ConnectError {
    /// The connection string is invalid.
    #[error("the MongoDB connection string is not valid: {0}; it looks like mongodb://user:password@host:27017/database?replicaSet=rs0")]
    InvalidUri(DriverError),
    /// The connection string has an option that cannot be ignored.
    #[error("the MongoDB connection string has the option `{option}`: {remedy}")]
    UriOption { option: String, remedy: String },
    /// A file that the connection string names cannot be used.
    #[error("the MongoDB connection string has the option `{option}`: {}: {problem}", file.display())]
    TlsFile { option: String, file: PathBuf, problem: String },
    /// The prefix of the collections' names is not possible.
    #[error(
        "the prefix of collections `{0}` (--collection-prefix, RECRUITER_COLLECTION_PREFIX) is not valid: use at most 64 letters, digits, `_`, `-` and `.`, beginning with a letter or `_`, for example jobs_"
    )]
    InvalidPrefix(String),
    /// No server answers.
    #[error("MongoDB at {hosts} could not be reached within {} ({reason}); check that it runs, the address in MONGODB_URI, and the network", crate::base::text::in_words(*waited))]
    Unreachable { hosts: String, waited: Duration, reason: String },
    /// A server answers, but cannot be used as the connection string says: names of members, TLS.
    #[error("MongoDB at {hosts} cannot be used: {problem}")]
    Unusable { hosts: String, problem: String },
    /// User or password is wrong.
    #[error("MongoDB at {hosts} does not accept the credentials; check user, password and authSource in MONGODB_URI")]
    WrongCredentials { hosts: String },
    /// There is no user of the name that the certificate has.
    #[error(
        "MongoDB at {hosts} has no user for the certificate in tlsCertificateKeyFile: create one in its database $external, with the name that `openssl x509 -in {} -noout -subject -nameopt RFC2253` prints behind `subject=`", file.display()
    )]
    UnknownCertificate { hosts: String, file: PathBuf },
    /// Not a replica set, so there are no transactions.
    #[error(
        "MongoDB at {hosts} is a standalone server, and Recruiter needs a replica set for its transactions: start mongod with --replSet rs0 and run rs.initiate() once in mongosh (one member is enough)"
    )]
    Standalone { hosts: String },
    /// The replica set is not initiated.
    #[error(
        "MongoDB at {hosts} was started as a member of a replica set that does not exist yet: run rs.initiate() once in mongosh (one member is enough)"
    )]
    NotInitiated { hosts: String },
    /// The server belongs to another replica set than the one in the connection string.
    #[error(
        "MongoDB at {hosts} is a member of the replica set `{found}`, and MONGODB_URI has replicaSet={named}: write replicaSet={found}, or remove replicaSet="
    )]
    WrongSetName { hosts: String, named: String, found: String },
    /// The server is older than every tested version.
    #[error("MongoDB at {hosts} is version {found}; {}.{} or newer is needed", OLDEST_SERVER.0, OLDEST_SERVER.1)]
    TooOld { hosts: String, found: String },
    /// MongoDB requires a user, and the connection string names none.
    #[error("MongoDB at {hosts} requires a user, and MONGODB_URI names none: write mongodb://USER:PASSWORD@HOST/DATABASE?authSource=…")]
    NoUser { hosts: String },
    /// The user can read but not write.
    #[error(
        "the MongoDB user may not write to database `{database}`: give it the role readWrite there, or use another user in MONGODB_URI; {refused}"
    )]
    ReadOnly { database: String, refused: String },
    /// The user cannot read.
    #[error(
        "the MongoDB user may not read database `{database}`: give it the role read there, or use another user in MONGODB_URI; {refused}"
    )]
    Unreadable { database: String, refused: String },
    /// Collections or indexes are missing, and the user may not make them.
    #[error(
        "database `{database}` has no schema of this release, and this MongoDB user may not make it: start `recruiter run` of this release, as a user with the role recruiterLeader (or readWrite), then this program; {refused}"
    )]
    NoSchema { database: String, refused: String },
    /// The database has none of Recruiter's collections.
    #[error(
        "database `{database}` of MongoDB at {hosts} has none of the collections `scheduled`, `archived` and `roster`: check the database name in MONGODB_URI, behind the host, and the prefix of collections, if there is one; the first start of `recruiter run` or the first enqueued job creates the collections"
    )]
    NoRecruiter { database: String, hosts: String },
    /// More connections are needed, but the client belongs to the application.
    #[error("a client on the application's own driver cannot open connections of its own: use Client::connect")]
    ForeignClient,
    /// An unexpected error of MongoDB.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl ConnectError {
    /// What a start that waits for MongoDB logs: why it cannot be used yet. `None` if waiting does not help.
    pub(super) fn passing_reason(&self) -> Option<&str> {
        if let Self::Unreachable { reason, .. } | Self::Unusable { problem: reason, .. } = self {
            return Some(reason);
        }
        if matches!(self, Self::Store(error) if error.is_unanswered()) {
            return Some("the connection broke");
        }
        matches!(self, Self::NotInitiated { .. }).then_some("its replica set does not exist yet; run rs.initiate() once in mongosh")
    }
}

/// The driver repeats a scheme or an address that it does not understand. Where a `/` or an `@` is missing, that has the password.
pub(crate) fn invalid(error: Error) -> ConnectError {
    const SCHEME: &str = "it must begin with mongodb:// or mongodb+srv://";
    const ADDRESS: &str =
        "the address of a server in it is wrong: write HOST or HOST:PORT, with a port from 1 to 65535, after an `@` if there is a user";
    let said = error.to_string();
    let problem = [("unsupported connection string scheme", SCHEME), ("invalid server address", ADDRESS)];
    let known = problem.iter().find(|(of_driver, _)| said.contains(of_driver));
    ConnectError::InvalidUri(known.map_or(error, |(_, ours)| Error::from(std::io::Error::other(*ours))).into())
}
