//! Crash points: a process of ours that aborts or freezes at a given step of its own, before it is asked for or when its
//! answer has just arrived. They are in no released program: `faulty`, a binary of this package, runs the libraries of the
//! three processes under the driver's own command events.

use std::{
    collections::HashMap,
    fmt, fs,
    io::Write as _,
    path::PathBuf,
    str::FromStr,
    sync::{Mutex, PoisonError},
};

use mongodb::event::{EventHandler, command::CommandEvent};
use nix::sys::signal::{Signal, raise};

use crate::steps::step;

/// Names the [`Fault`]s of a faulty process, one a line.
pub const FAULT: &str = "RECRUITER_TEST_FAULT";
/// Names the directory where a faulty process notes the steps it takes, and that its fault has struck.
pub const NOTES: &str = "RECRUITER_TEST_NOTES";

/// How often a step is noted.
const NOTED: u32 = 4;

/// When in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Moment {
    /// Before the command is sent.
    Before,
    /// When its answer has arrived and nobody has looked at it.
    After,
}

/// What happens to the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Blow {
    /// It ends at once (`SIGABRT`).
    Abort,
    /// It stands still (`SIGSTOP`) until somebody lets it go on.
    Freeze,
    /// It is asked to stop (`SIGTERM`) and goes on.
    Terminate,
}

/// A blow at a moment of the `nth` time that a step is taken, counted from one.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Fault {
    /// Which step.
    pub step: String,
    /// When in it.
    pub moment: Moment,
    /// What happens.
    pub blow: Blow,
    /// In which one of them.
    pub nth: u32,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {:?} {} {}", self.blow, self.moment, self.nth, self.step)
    }
}

impl FromStr for Fault {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || format!("{text:?} is no fault: write `Abort Before 1 find roster`");
        let mut words = text.splitn(4, ' ');
        let blow = match words.next() {
            Some("Abort") => Blow::Abort,
            Some("Freeze") => Blow::Freeze,
            Some("Terminate") => Blow::Terminate,
            _ => return Err(wrong()),
        };
        let moment = match words.next() {
            Some("Before") => Moment::Before,
            Some("After") => Moment::After,
            _ => return Err(wrong()),
        };
        let nth = words.next().and_then(|nth| nth.parse().ok()).ok_or_else(wrong)?;
        Ok(Self { step: words.next().ok_or_else(wrong)?.to_owned(), moment, blow, nth })
    }
}

/// What a faulty process does with each command of its own: notes it, and strikes when it is time.
#[derive(Debug)]
struct Striker {
    faults: Vec<Fault>,
    notes: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// How often each step was taken.
    taken: HashMap<String, u32>,
    /// Steps whose answers are on their way, with their numbers.
    open: HashMap<i32, (String, u32)>,
}

/// The handler of command events that a faulty process connects with, as its environment says.
///
/// # Panics
/// When the environment names no directory for notes, or a fault that is none.
pub fn striker() -> EventHandler<CommandEvent> {
    let notes = PathBuf::from(std::env::var_os(NOTES).expect("a faulty process has a directory for its notes"));
    let faults = std::env::var(FAULT).unwrap_or_default();
    let faults = faults.lines().map(|fault| fault.parse().expect("a fault is well-formed")).collect();
    let striker = Striker { faults, notes, state: Mutex::default() };
    EventHandler::callback(move |event| striker.see(event))
}

impl Striker {
    fn see(&self, event: CommandEvent) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (moment, step, nth) = match event {
            CommandEvent::Started(started) => {
                let Some(step) = step(&started.command) else { return };
                let taken = state.taken.entry(step.clone()).or_default();
                *taken += 1;
                let nth = *taken;
                if nth <= NOTED {
                    self.note("steps", &step);
                }
                state.open.insert(started.request_id, (step.clone(), nth));
                (Moment::Before, step, nth)
            }
            CommandEvent::Succeeded(succeeded) => match state.open.remove(&succeeded.request_id) {
                Some((step, nth)) => (Moment::After, step, nth),
                None => return,
            },
            CommandEvent::Failed(failed) => {
                state.open.remove(&failed.request_id);
                return;
            }
            _ => return,
        };
        if let Some(fault) = self.faults.iter().find(|fault| fault.moment == moment && fault.step == step && fault.nth == nth) {
            self.note("struck", &fault.to_string());
            match fault.blow {
                Blow::Abort => std::process::abort(),
                Blow::Freeze => raise(Signal::SIGSTOP).expect("a process may stop itself"),
                Blow::Terminate => raise(Signal::SIGTERM).expect("a process may signal itself"),
            }
        }
    }

    fn note(&self, file: &str, line: &str) {
        let mut file = fs::OpenOptions::new().create(true).append(true).open(self.notes.join(file)).expect("the notes can be written");
        file.write_all(format!("{line}\n").as_bytes()).expect("the notes can be written");
    }
}
