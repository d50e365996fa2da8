//! Exit codes of the three binaries, for systemd, shell scripts and people.
//!
//! The numbers follow sysexits(3) where it defines one. The units in `systemd/` restart on all codes except `Usage` and
//! `Config`.

use std::io::Write as _;

use super::logging::{InvalidFilter, is_json};
use crate::{
    base::{causes, printable},
    mongo::{ConnectError, StoreError},
};

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[non_exhaustive]
pub enum Exit {
    /// Everything requested was done.
    Success = 0,
    /// A failure without a code of its own. The message describes it.
    Failure = 1,
    /// Wrong flags or values (clap's own code).
    Usage = 2,
    /// The job that was waited for did not succeed.
    JobFailed = 3,
    /// MongoDB cannot be reached.
    Unavailable = 69,
    /// The memory limit was reached, and the running jobs have ended. The service manager should start the process
    /// again.
    MemoryLimit = 75,
    /// MongoDB refuses the process: credentials, rights, a standalone server or one that is too old; or the database is of an application or of
    /// a newer release.
    Refused = 77,
    /// A file that a flag, an argument or the connection string names cannot be used.
    Config = 78,
    /// The job that was waited for has not ended in time.
    TimedOut = 124,
    /// Stopped at once by a second signal.
    Aborted = 130,
}

impl Exit {
    /// Ends the process without dropping its runtime: a blocked read of standard input may never return, and tasks of
    /// the MongoDB driver panic when the runtime drops them. All output must be written before the call.
    pub fn now(self) -> ! {
        std::process::exit(self as i32)
    }
}

/// Prints an error with its causes once. Returns the exit code: an [`Exit`] among the contexts of the error, or the
/// code of a [`ConnectError`].
pub fn report(program: &str, error: &anyhow::Error) -> Exit {
    let said = error.downcast_ref::<Exit>();
    let causes: Vec<String> =
        causes(error.as_ref()).into_iter().filter(|cause| said.is_none_or(|exit| *cause != exit.to_string())).collect();
    let causes = causes.join(": ");
    if is_json() {
        tracing::error!(error = causes, "{program} ends");
    } else {
        // What is quoted may be of others. The terminal may be closed.
        let causes = causes.lines().map(|line| printable(line, usize::MAX)).collect::<Vec<_>>().join("\n");
        let _ = writeln!(std::io::stderr(), "{program}: {causes}");
    }
    let refused = error.downcast_ref::<ConnectError>().map(ConnectError::exit);
    let misunderstood = error.downcast_ref::<InvalidFilter>().map(|_| Exit::Usage);
    said.copied().or(refused).or(misunderstood).unwrap_or(Exit::Failure)
}

impl ConnectError {
    /// The exit code for this error.
    pub fn exit(&self) -> Exit {
        match self {
            Self::InvalidUri(_) | Self::UriOption { .. } | Self::InvalidPrefix(_) => Exit::Usage,
            Self::TlsFile { .. } => Exit::Config,
            Self::Unreachable { .. } | Self::Unusable { .. } => Exit::Unavailable,
            Self::WrongCredentials { .. }
            | Self::UnknownCertificate { .. }
            | Self::Standalone { .. }
            | Self::NotInitiated { .. }
            | Self::WrongSetName { .. }
            | Self::TooOld { .. }
            | Self::NoUser { .. }
            | Self::ReadOnly { .. }
            | Self::Unreadable { .. }
            | Self::NoSchema { .. }
            | Self::Store(StoreError::Foreign { .. } | StoreError::NewerSchema { .. }) => Exit::Refused,
            Self::NoRecruiter { .. } | Self::ForeignClient | Self::Store(_) => Exit::Failure,
        }
    }
}

impl std::fmt::Display for Exit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "exit code {}", *self as u8)
    }
}

impl std::error::Error for Exit {}
