//! How a command ends: usage errors, a stop by a signal, and the exit codes in the help.

use std::{io, path::Path};

use anyhow::anyhow;
use recruiter_common::{exit::Exit, shutdown::Shutdown, spec::InvalidSpec};

/// An error in the user's arguments or input.
pub(crate) fn usage(problem: impl std::fmt::Display) -> anyhow::Error {
    anyhow!("{problem}").context(Exit::Usage)
}

/// What is wrong with a job; with the remedy, if it is an unknown retry policy.
pub(super) fn problem_of(invalid: &InvalidSpec) -> String {
    let hint = if invalid.is_unknown_policy() { "; if your workers know it, add --custom-policy" } else { "" };
    format!("{invalid}{hint}")
}

/// The error of a file that the user has named and that cannot be read.
pub(crate) fn unreadable(path: &Path, error: io::Error) -> anyhow::Error {
    anyhow::Error::new(error).context(format!("cannot read {}", path.display())).context(Exit::Config)
}

/// Runs a read-only command until the first signal. Such a command can be cancelled at any time.
pub(crate) async fn or_stopped(mut shutdown: Shutdown, command: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    tokio::select! {
        done = command => done,
        () = shutdown.requested() => Err(anyhow!("stopped by a signal").context(Exit::Aborted)),
    }
}

/// The exit codes for the end of the help.
pub(super) fn exit_codes() -> String {
    let meanings = [
        (Exit::Success, "success"),
        (Exit::Failure, "failure; the message names it and its cause"),
        (Exit::Usage, "wrong flags or values"),
        (Exit::JobFailed, "the job or graph that was waited for did not succeed"),
        (Exit::Unavailable, "MongoDB cannot be reached, or the mongod of `dev` has ended"),
        (Exit::MemoryLimit, "a worker reached its memory limit; start it again"),
        (Exit::Refused, "MongoDB refuses the process: credentials, rights, server, newer schema"),
        (Exit::Config, "a file cannot be read, or is invalid"),
        (Exit::TimedOut, "the job or graph that was waited for has not ended in time"),
        (Exit::Aborted, "stopped by a signal before the end"),
    ];
    let lines: Vec<String> = meanings.iter().map(|(exit, meaning)| format!("  {:>3}  {meaning}", *exit as u8)).collect();
    format!("Exit codes:\n{}", lines.join("\n"))
}
