//! Crash points: a process that aborts or freezes at a given step, before the command is sent or when its reply has
//! just arrived. No released program has them: `faulty`, a binary of this package, runs the libraries of the three
//! processes and handles the driver's command events.

use std::{
    collections::{HashMap, HashSet},
    fmt, fs,
    io::Write as _,
    path::PathBuf,
    str::FromStr,
    sync::{Mutex, PoisonError},
};

use mongodb::event::{EventHandler, command::CommandEvent};
use nix::sys::signal::{Signal, raise};
use recruiter_common::store::current_operation;

use crate::steps::step;

/// Names the variable with the [`Fault`]s of a faulty process, one per line.
pub const FAULT: &str = "RECRUITER_TEST_FAULT";
/// Names the variable with the directory where a faulty process records its steps, and that its fault has struck.
pub const NOTES: &str = "RECRUITER_TEST_NOTES";

/// How many times each step is recorded.
const NOTED: u32 = 4;

/// The moment of a fault within a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Moment {
    /// Before the command is sent.
    Before,
    /// When its reply has arrived and was not processed yet.
    After,
}

/// The effect on the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Blow {
    /// It ends at once (`SIGABRT`).
    Abort,
    /// It is frozen (`SIGSTOP`) until it is resumed from outside.
    Freeze,
    /// It gets a request to stop (`SIGTERM`) and continues.
    Terminate,
}

/// A fault in the `nth` occurrence of a step, counted from one.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Fault {
    /// The step.
    pub step: String,
    /// The moment within the step.
    pub moment: Moment,
    /// The effect.
    pub blow: Blow,
    /// The number of the occurrence.
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

/// Handles each command of a faulty process: records it, and applies a fault that matches.
#[derive(Debug)]
struct Striker {
    faults: Vec<Fault>,
    notes: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Number of occurrences of each step.
    taken: HashMap<String, u32>,
    /// Steps without a reply so far, with the numbers of their occurrences.
    open: HashMap<i32, (String, u32)>,
    /// The operations of the store, each with its steps.
    operations: HashSet<(&'static str, String)>,
}

/// The handler of command events for a faulty process, configured by its environment.
///
/// # Panics
/// When the environment names no directory for records, or has an invalid fault.
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
                // Several operations may send the same command.
                if let Some(operation) = current_operation().filter(|operation| state.operations.insert((operation, step.clone()))) {
                    self.note("operations", &format!("{operation} {step}"));
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
