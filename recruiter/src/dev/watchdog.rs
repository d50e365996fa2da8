//! Ties the life of a program to the life of this process, without unsafe code: a small shell between the two.

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

/// How long a clean end may take. The shell itself uses force after fifteen seconds.
const END_WITHIN: Duration = Duration::from_secs(20);
/// How often an ending program is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Runs `$2…` until it ends by itself or standard input does, which our end of the pipe guarantees even when we are
/// killed; then ends it cleanly, or by force after fifteen seconds: a worker first gives its
/// programs five, and five more between TERM and KILL. With a directory `$1`: by force, and removes that.
///
/// Two shells: one waits for the program, `reader` for the end of input. Whichever comes first ends the other; `reader`
/// leaves with success only when input ended. Standard output carries the program's process id and nothing else, standard
/// error what the program says: the shells themselves say nothing.
const SCRIPT: &str = r#"
exec 3<&0
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

/// A program that ends when this value is dropped and when this process ends, however it ends.
#[derive(Debug)]
pub(crate) struct Watched {
    shell: Child,
    program: Pid,
}

impl Watched {
    /// Starts a program, with its arguments and environment, in a process group of its own: a Ctrl-C in the terminal is not
    /// meant for it. What it writes goes to `output`. `remove_with_owner` is removed, and the program not given time, when
    /// its owner ends it.
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

    /// How the program ended, once it has; an end by a signal is the shell's code for it, 128 and its number.
    pub(crate) fn exit(&mut self) -> Option<ExitStatus> {
        // An error means that somebody else has waited for it.
        self.shell.try_wait().unwrap_or_else(|_| Some(ExitStatus::default()))
    }

    /// Sends a signal to the program itself.
    pub(crate) fn signal(&mut self, signal: Signal) -> io::Result<()> {
        // While the shell runs the process id is not given to another program, but for the instant before it exits.
        if self.is_running() { kill(self.program, signal).map_err(io::Error::from) } else { Err(Errno::ESRCH.into()) }
    }

    /// What happens when this process dies: the shell ends the program. Returns at once.
    pub(crate) fn let_go(&mut self) {
        drop(self.shell.stdin.take());
    }

    /// Waits until the program is gone, its shell reaped and its directory removed if it was to be.
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
