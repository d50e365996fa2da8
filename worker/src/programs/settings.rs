//! The settings that all executions of a program share, and what every process of it gets from its worker.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    io,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    time::Duration,
};

use nix::errno::Errno;
use recruiter_common::failure::{self, Failure};
use tokio::process::Command;

use super::group::LINGER;
use crate::outcome::NotDone;

/// Where a program writes messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MessagesOn {
    Nothing,
    /// File descriptor 3, which `RECRUITER_FD` names.
    Descriptor,
    /// Standard error, among other lines.
    StandardError,
}

/// The settings that all executions of a program share.
pub(crate) struct Settings {
    /// The program: absolute, found when the file was loaded.
    pub(crate) path: PathBuf,
    pub(crate) time_limit: Option<Duration>,
    pub(crate) try_again_after: Option<Duration>,
    /// How many times a job may exit with 75; the next time is a failure.
    pub(crate) try_again_limit: u32,
    /// Time between TERM and KILL.
    pub(crate) kill_after: Duration,
    /// Longest result that is kept, in bytes.
    pub(crate) result_limit: usize,
    /// The working directory: absolute.
    pub(crate) directory: PathBuf,
    pub(crate) environment: BTreeMap<String, String>,
    pub(crate) messages: MessagesOn,
    /// Whether standard error goes into the log of the job and of the worker.
    pub(crate) log_stderr: bool,
    /// Whether a result that is JSON stays text.
    pub(crate) keeps_text: bool,
}

impl Settings {
    /// The longest time between TERM and the known end of a program.
    pub(super) fn stops_within(&self) -> Duration {
        self.kill_after.saturating_add(LINGER * 3)
    }

    /// The outcome of an execution whose program could not be started.
    pub(super) fn not_started(&self, error: &io::Error) -> NotDone {
        let program = self.path.display();
        if error.kind() == io::ErrorKind::ArgumentListTooLong {
            let message =
                format!("the arguments for `{program}` are longer than the system allows: let it read the parameters from standard input");
            return NotDone::failed(failure::PARAMETERS, message);
        }
        if is_shortage(error) {
            let message = format!("cannot start `{program}`: {error}; this machine is short of files, processes or memory");
            return NotDone::NoResources(Failure::new("spawn", message));
        }
        let directory = &self.directory;
        let advice = if !directory.is_dir() {
            format!("create its directory `{}`", directory.display())
        } else if error.kind() == io::ErrorKind::NotFound {
            "install it, or the interpreter that its first line names".into()
        } else if error.kind() == io::ErrorKind::PermissionDenied {
            format!("allow the worker's user to execute it, and to enter `{}`", directory.display())
        } else {
            "check it".into()
        };
        NotDone::failed("spawn", format!("cannot start `{program}`: {error}; {advice}, or correct the workables file"))
    }
}

/// Whether a program could not be started because the machine lacks a resource.
fn is_shortage(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw);
    matches!(errno, Some(Errno::EMFILE | Errno::ENFILE | Errno::EAGAIN | Errno::ENOMEM))
}

/// Settings of every program: a process group of its own, its directory, and the environment of the worker without its secrets.
pub(super) fn prepare(command: &mut Command, directory: &Path, environment: &BTreeMap<String, String>) {
    command.process_group(0).kill_on_drop(true);
    for (name, _) in std::env::vars_os().filter(|(name, _)| is_withheld(name)) {
        command.env_remove(name);
    }
    command.envs(environment).current_dir(directory);
}

/// Variables of the worker that a program must not inherit: credentials, settings, systemd's watchdog.
fn is_withheld(name: &OsStr) -> bool {
    let starts_with = |prefix: &str| name.as_bytes().starts_with(prefix.as_bytes());
    name == "MONGODB_URI" || name == "NOTIFY_SOCKET" || starts_with("RECRUITER_") || starts_with("WATCHDOG_")
}
