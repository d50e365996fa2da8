//! Makes a child program end with this process, without unsafe code: a small shell script runs between the two.

use std::{
    io::{self, BufRead as _, BufReader},
    os::unix::process::CommandExt as _,
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    time::Duration,
};

use nix::{
    errno::Errno,
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tokio::time::{interval, timeout};

/// Maximum duration of an end. The script itself uses force after 15 seconds of its own time: a machine may stand still meanwhile.
const END_WITHIN: Duration = Duration::from_secs(60);
/// How often an ending program is checked.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Runs `$2…` until the program ends or standard input ends. Standard input is a pipe from this process, so it ends
/// even when this process is killed. Then the script ends the program cleanly, or by force after 15 seconds. That is
/// longer than a worker needs: 5 seconds of grace for its programs, and 5 more between TERM and KILL. With a directory
/// `$1` the script ends the program by force at once, and deletes the directory.
///
/// Two shells run: one waits for the program, and `reader` waits for the end of input. The first to finish ends the
/// other. `reader` exits with success only when the input ended. Standard output carries only the program's process id.
/// Standard error carries the program's output; the shells write nothing.
///
/// The program may open as many files as this user is allowed: many systems begin with 1,024, and mongod, which keeps a file for each
/// collection and each index, does not raise the limit and ends when it is reached.
const SCRIPT: &str = r#"
exec 3<&0
ulimit -S -n "$(ulimit -H -n)" 2>/dev/null
remove=$1; shift
"$@" </dev/null >&2 3<&- & program=$!
echo $program; exec >/dev/null 2>&1
(
    read -r line <&3
    trap '' TERM
    [ -z "$remove" ] || kill -KILL $program
    kill -TERM $program; kill -CONT $program
    ticks=0
    while kill -0 $program && [ $ticks -lt 150 ]; do sleep 0.1; ticks=$((ticks + 1)); done
    kill -KILL $program
    exit 0
) & reader=$!
wait $program; status=$?
kill $reader
wait $reader && [ -n "$remove" ] && rm -rf "$remove"
exit $status
"#;

/// A program that ends when this value is dropped, and when this process ends for any reason.
#[derive(Debug)]
pub(crate) struct Watched {
    shell: Child,
    program: Pid,
}

impl Watched {
    /// Starts a program, with its arguments and environment, in a process group of its own, so that a Ctrl-C in the
    /// terminal does not reach it. Its output goes to `output`. With `remove_with_owner` the program is ended by force,
    /// without time for a clean end, and this directory is deleted.
    pub(crate) fn spawn(program: &Command, output: impl Into<Stdio>, remove_with_owner: Option<&Path>) -> io::Result<Self> {
        let mut command = Command::new("sh");
        command.args(["-c", SCRIPT, "recruiter-watchdog"]).arg(remove_with_owner.unwrap_or(Path::new("")));
        command.arg(program.get_program()).args(program.get_args());
        for (name, value) in program.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        let mut shell = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(output).process_group(0).spawn()?;
        let mut pid = String::new();
        BufReader::new(shell.stdout.take().expect("standard output is a pipe")).read_line(&mut pid)?;
        let program = Pid::from_raw(pid.trim().parse().map_err(io::Error::other)?);
        Ok(Self { shell, program })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.program.as_raw().cast_unsigned()
    }

    pub(crate) fn is_running(&mut self) -> bool {
        self.exit().is_none()
    }

    /// The exit status of the program, once it has ended. After an end by a signal it is the shell's code: 128 plus the
    /// signal's number.
    pub(crate) fn exit(&mut self) -> Option<ExitStatus> {
        // An error means that the status was already collected elsewhere.
        self.shell.try_wait().unwrap_or_else(|_| Some(ExitStatus::default()))
    }

    /// Sends a signal to the program, not to the shell.
    pub(crate) fn signal(&mut self, signal: Signal) -> io::Result<()> {
        // While the shell runs, the process id is not reused, except in the moment before the shell exits.
        if self.is_running() { kill(self.program, signal).map_err(io::Error::from) } else { Err(Errno::ESRCH.into()) }
    }

    /// Whether SIGSTOP has taken effect. On a busy machine the program continues for some milliseconds after the signal.
    pub(crate) fn is_stopped(&self) -> bool {
        let stat = procfs::process::Process::new(self.program.as_raw()).and_then(|process| process.stat());
        stat.is_ok_and(|stat| stat.state == 'T')
    }

    /// Closes the pipe, as the death of this process would: the script then ends the program. Returns at once.
    pub(crate) fn let_go(&mut self) {
        drop(self.shell.stdin.take());
    }

    /// Waits until the program has ended, its shell is reaped, and its directory is deleted if requested.
    pub(crate) async fn ended(&mut self) -> io::Result<()> {
        let gone = async {
            let mut look = interval(LOOK_EVERY);
            while self.is_running() {
                look.tick().await;
            }
        };
        timeout(END_WITHIN, gone).await.map_err(io::Error::from)
    }
}

/// How a watched program has ended, for messages.
pub(crate) fn how(status: ExitStatus) -> String {
    let code = status.code().unwrap_or_default();
    match Signal::try_from(code - 128) {
        Ok(signal) => format!("was killed by {signal}"),
        Err(_) => format!("ended with exit code {code}"),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use nix::sys::resource::{Resource, getrlimit, setrlimit};

    use super::*;

    #[tokio::test]
    async fn the_program_may_open_as_many_files_as_its_user() {
        let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).expect("a limit");
        setrlimit(Resource::RLIMIT_NOFILE, hard.min(512), hard).expect("a lower limit");
        let directory = tempfile::tempdir().expect("a directory");
        let found = directory.path().join("limit");
        let mut program = Command::new("sh");
        program.args(["-c", "ulimit -S -n > \"$0\""]).arg(&found);
        Watched::spawn(&program, Stdio::null(), None).expect("it runs").ended().await.expect("it ends");
        assert_eq!(fs::read_to_string(&found).expect("it has written").trim(), hard.to_string());
    }
}
