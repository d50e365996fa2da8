//! Exit codes: what the three binaries tell whoever started them (systemd, a shell script, a person).
//!
//! Numbers follow sysexits(3) where it has one. The units in `systemd/` restart on all but `Usage` and `Config`.

use std::io::Write as _;

use crate::{
    logging::{InvalidFilter, is_json},
    store::ConnectError,
    telemetry::causes,
};

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// Everything asked for was done.
    Success = 0,
    /// It failed for a reason that fits nowhere else; the message says which.
    Failure = 1,
    /// Wrong flags or values (clap's own code).
    Usage = 2,
    /// MongoDB cannot be reached.
    Unavailable = 69,
    /// The memory limit was reached and the work in hand is finished: start again.
    MemoryLimit = 75,
    /// MongoDB refuses us: credentials, rights, a standalone or too old server.
    Refused = 77,
    /// A configuration file cannot be used.
    Config = 78,
    /// Stopped at once by a second signal.
    Aborted = 130,
}

impl Exit {
    /// Ends the process, without taking its runtime apart: a read of standard input may never return, and tasks of the
    /// MongoDB driver panic when they are dropped under each other. Call it when everything is written.
    pub fn now(self) -> ! {
        std::process::exit(self as i32)
    }
}

/// Prints an error with its causes, one after the other, once; returns the code to end with: an [`Exit`] among the
/// contexts of the error, or what a [`ConnectError`] stands for.
pub fn report(program: &str, error: &anyhow::Error) -> Exit {
    let said = error.downcast_ref::<Exit>();
    let causes: Vec<String> =
        causes(error.as_ref()).into_iter().filter(|cause| said.is_none_or(|exit| *cause != exit.to_string())).collect();
    let causes = causes.join(": ");
    if is_json() {
        tracing::error!(error = causes, "{program} ends");
    } else {
        // The terminal may be gone.
        let _ = writeln!(std::io::stderr(), "{program}: {causes}");
    }
    let refused = error.downcast_ref::<ConnectError>().map(ConnectError::exit);
    let misunderstood = error.downcast_ref::<InvalidFilter>().map(|_| Exit::Usage);
    said.copied().or(refused).or(misunderstood).unwrap_or(Exit::Failure)
}

impl ConnectError {
    /// The exit code that says this.
    pub fn exit(&self) -> Exit {
        match self {
            Self::InvalidUri(_) => Exit::Usage,
            Self::Unreachable { .. } => Exit::Unavailable,
            Self::WrongCredentials { .. }
            | Self::Standalone { .. }
            | Self::NotInitiated { .. }
            | Self::WrongSetName { .. }
            | Self::TooOld { .. }
            | Self::NoUser { .. }
            | Self::ReadOnly { .. }
            | Self::Unreadable { .. } => Exit::Refused,
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
