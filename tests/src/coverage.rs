//! Which steps of the protocol the faults have struck, in which ways: printed as a table.
//!
//! Every run of a failure test must keep the promises. Beyond that, each [forced](good_days) operation must have been struck in every way, and
//! most of the steps that are taken often in some way: luck decides which steps a run takes, and by which of its steps an operation is done.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{self, Write as _},
    path::Path,
};

use futures_util::future::join_all;

use crate::{
    cycle::{self, Breaks, Run},
    world::{Role, Step, World},
};

/// Runs without faults: not all of them take the same steps.
const GOOD_DAYS: usize = 3;
/// How often as many more are made while an operation has not been seen: one that a fifth of the runs take is seen in nearly all tests.
const MOST_TURNS: usize = 12;
/// At least so many of a hundred steps that are taken often must have been struck.
const STRUCK_PERCENT: usize = 95;
/// A step is taken often if at least one of so many runs takes it. Whether a rarer one is struck is a matter of luck.
const OFTEN: usize = 5;

/// Operations of the store that a run without faults need not take, by any process or by that of one role, each with the reason.
const NOT_FORCED: &[(&str, &[&str])] = &[
    (
        "an assignment is not answered, or an outcome is unknown",
        &["assigned_and_not_taken", "claims_of_starts", "document_of", "rounds_of", "Worker held_by"],
    ),
    ("MongoDB is slow, or there are very many lanes", &["acknowledges_writes", "lanes_of", "waiting_lanes", "is_alive"]),
    ("two processes meet", &["assigned_in", "hold_permits", "sizes_of_unlocked", "waiting_documents", "halted_lines", "keep_cells"]),
    (
        "on the first use only",
        &["note_in_use", "seed", "hello", "foreign_documents", "open_session", "record_commit_session", "refresh_clock", "announce_relay"],
    ),
    (
        "the cycle has no notes, bundles and files",
        &["record_notes_if_claimed", "record_items_if_claimed", "delete_stored_file", "files_of_chunks", "jobs_of_files"],
    ),
    ("no metrics are served", &["sample_group"]),
    ("no process lacks a right", &["ask_for_schema", "forget_asked"]),
    ("the cycle has no jobs of which nothing is kept", &["count_not_kept", "delete_if_claimed", "prune_covered"]),
    ("the cycle has no unique jobs and no expiry", &["holders_of", "release_orphaned_successors", "release_successors", "expired_jobs"]),
    ("the cycle has no class defaults and no overlaps", &["class_defaults", "declare_class", "running_without_permit", "unfinished_among"]),
    ("the cycle has no consumers and no transactions of workables", &["note_consumer_problem", "record_transaction_session"]),
    (
        "for a person, or a word that is also an operation",
        &["ask_worker", "count_waiting", "job", "jobs", "jobs_by_id", "next_matches", "roster_documents", "running", "wanted", "workers"],
    ),
];

/// The operations that every run takes, by the role of the process, with their steps.
pub type Forced = BTreeMap<(Role, String), BTreeSet<Step>>;

/// Runs without faults, and the operations that all of them took, without those of `NOT_FORCED`.
///
/// # Panics
/// When an operation of the three programs sent no command in these runs and is not in `NOT_FORCED`: a new operation must be part of the
/// [cycle], or be named there with the reason why it is not.
pub async fn good_days() -> (Vec<Run>, Forced) {
    let operations = operations();
    let not_forced: BTreeSet<&str> = NOT_FORCED.iter().flat_map(|(_, names)| names.iter().copied()).collect();
    let gone: Vec<&&str> = not_forced.iter().filter(|name| !operations.contains(name.rsplit(' ').next().unwrap_or_default())).collect();
    assert!(gone.is_empty(), "these are no operations of the three programs: {gone:#?}");
    let (mut runs, mut new): (Vec<Run>, Vec<&String>) = (Vec::new(), Vec::new());
    for _ in 0..MOST_TURNS {
        let turn = (0..GOOD_DAYS).map(async |_| cycle::run_beside_others(World::new().await, Breaks::default()).await);
        runs.extend(join_all(turn).await);
        let seen: BTreeSet<&str> = runs.iter().flat_map(|run| &run.operations).map(|(name, _)| name.as_str()).collect();
        new = operations.iter().filter(|name| !seen.contains(name.as_str()) && !not_forced.contains(name.as_str())).collect();
        if new.is_empty() {
            break;
        }
    }
    assert!(new.is_empty(), "these operations of the store are not part of the cycle that the failure tests break: {new:#?}");
    let mut forced = Forced::new();
    for (name, step) in runs.iter().flat_map(|run| &run.operations).filter(|(name, _)| operations.contains(name)) {
        forced.entry((step.0, name.clone())).or_default().insert(step.clone());
    }
    let takes = |run: &Run, role: Role, name: &str| run.operations.iter().any(|(other, step)| other == name && step.0 == role);
    let is_luck = |role: Role, name: &str| not_forced.contains(name) || not_forced.contains(format!("{role:?} {name}").as_str());
    forced.retain(|(role, name), _| !is_luck(*role, name) && runs.iter().all(|run| takes(run, *role, name)));
    (runs, forced)
}

/// The operations of `common::store` that a recruiter, a cleaner or a worker takes, found in the source: the names that are in the
/// functions that these programs call, and in the functions that those call.
fn operations() -> BTreeSet<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let programs: String = ["recruiter/src/leader", "worker/src/engine", "worker/src/context", "worker/src/transaction", "cleaner/src"]
        .map(|room| sources(&root.join(room)))
        .concat();
    let store = of_the_store();
    let functions: Vec<(&str, &str)> = store.split(" fn ").skip(1).filter_map(|function| function.split_once(['(', '<'])).collect();
    let mut called: BTreeSet<&str> = BTreeSet::new();
    let mut new: BTreeSet<&str> = calls(&programs).filter(|(before, _)| before.ends_with('.')).map(|(_, name)| name).collect();
    while !new.is_empty() {
        called.extend(&new);
        let bodies = functions.iter().filter(|(name, _)| new.contains(name)).map(|(_, body)| *body);
        new = bodies.flat_map(calls).map(|(_, name)| name).filter(|name| !called.contains(name)).collect();
    }
    let text: String = functions.iter().filter(|(name, _)| called.contains(name)).flat_map(|(_, body)| body.split_whitespace()).collect();
    let is_operation = |before: &str, name: &str| {
        let is_called = ["call", "indexed", "write", "values", "transaction"].iter().any(|runs| before.ends_with(runs));
        is_called || functions.iter().any(|(function, _)| *function == name)
    };
    let words = text.match_indices("(\"").filter_map(|(at, mark)| Some((&text[..at], text[at + mark.len()..].split_once("\",")?.0)));
    words.filter(|(before, name)| is_operation(before, name)).map(|(_, name)| name.to_owned()).collect()
}

/// The names of functions that are called in this text, each with the text before it.
fn calls(text: &str) -> impl Iterator<Item = (&str, &str)> {
    let is_part = |letter: char| letter.is_alphanumeric() || letter == '_';
    text.match_indices('(').map(move |(at, _)| text[..at].split_at(text[..at].trim_end_matches(is_part).len()))
}

/// The text of the files that have operations of the store: what sends commands, and what names the index of each.
pub fn of_the_store() -> String {
    let rooms = Path::new(env!("CARGO_MANIFEST_DIR")).join("../common/src");
    let mut text = String::new();
    each_source(&rooms, &mut |file, code| {
        if ["mongo", "hints"].iter().any(|room| file.starts_with(rooms.join(room))) || code.contains("Index: ") {
            // What stands above the first function of a file is not of the last one of another.
            text += " fn top_of_a_file(";
            text += code;
        }
    });
    text
}

/// The text of the source files below a directory.
fn sources(directory: &Path) -> String {
    let mut text = String::new();
    each_source(directory, &mut |_, code| text += code);
    text
}

fn each_source(directory: &Path, with: &mut impl FnMut(&Path, &str)) {
    let mut left = vec![directory.to_owned()];
    while let Some(path) = left.pop() {
        if path.is_dir() {
            left.extend(fs::read_dir(&path).expect("a directory can be listed").map(|entry| entry.expect("it can be listed").path()));
        } else {
            with(&path, &fs::read_to_string(&path).expect("a source file is text"));
        }
    }
}

/// The steps that were taken in a test, and the ways in which they were struck.
#[derive(Debug, Default)]
pub struct Coverage {
    ways: BTreeMap<Step, BTreeMap<String, bool>>,
    runs: usize,
    /// By how many of the runs each step was taken.
    taken: BTreeMap<Step, usize>,
}

impl Coverage {
    /// Records which steps a run took.
    pub fn add_run<'a>(&mut self, steps: impl IntoIterator<Item = &'a Step>) {
        self.runs += 1;
        for step in steps {
            *self.taken.entry(step.clone()).or_default() += 1;
        }
    }

    /// Records a way in which a step is to be struck, and whether it was.
    pub fn add(&mut self, step: &Step, way: &str, struck: bool) {
        *self.ways.entry(step.clone()).or_default().entry(way.to_owned()).or_default() |= struck;
    }

    /// Whether a step was struck in this way.
    pub fn is_struck(&self, step: &Step, way: &str) -> bool {
        self.ways.get(step).and_then(|ways| ways.get(way)).is_some_and(|struck| *struck)
    }

    /// Whether a forced operation that takes this step was not struck in this way yet, by none of its steps.
    pub fn lacks(&self, step: &Step, way: &str, forced: &Forced) -> bool {
        forced.values().any(|steps| steps.contains(step) && !steps.iter().any(|step| self.is_struck(step, way)))
    }

    /// Shows the table, also if the test passes.
    ///
    /// # Panics
    /// When a forced operation was not struck in some way, or too few of the steps that are taken often were struck.
    pub fn close(self, test: &str, forced: &Forced) {
        let is_struck = |ways: &BTreeMap<String, bool>| ways.values().any(|struck| *struck);
        let struck = self.ways.values().filter(|ways| is_struck(ways)).count();
        let mut table =
            format!("{test}: {struck} of {} steps were struck; * are those of the {} forced operations\n", self.ways.len(), forced.len());
        let mut left = Vec::new();
        for (step @ (role, name), ways) in &self.ways {
            let missed: Vec<&str> = ways.iter().filter(|(_, struck)| !**struck).map(|(way, _)| way.as_str()).collect();
            let mark = if forced.values().any(|steps| steps.contains(step)) { "*" } else { " " };
            let not = if missed.is_empty() { String::new() } else { format!(", not {}", missed.join(", ")) };
            let taken = self.taken.get(step).unwrap_or(&0);
            table += &format!("{mark} {role:?} {name}: {} of {} ways{not}; taken by {taken} runs\n", ways.len() - missed.len(), ways.len());
            left.extend(missed.iter().filter(|way| self.lacks(step, way, forced)).map(|way| format!("{role:?} {name}: {way}")));
        }
        // The test runner does not capture this.
        io::stderr().write_all(table.as_bytes()).expect("standard error is open");
        assert!(left.is_empty(), "these steps are of operations that every run takes, and they were not struck: {left:#?}");
        let often: Vec<_> =
            self.ways.iter().filter(|(step, _)| self.taken.get(step).is_some_and(|taken| taken * OFTEN >= self.runs)).collect();
        let struck = often.iter().filter(|(_, ways)| is_struck(ways)).count();
        assert!(struck * 100 >= often.len() * STRUCK_PERCENT, "only {struck} of {} steps that are taken often were struck", often.len());
    }
}

/// Who asks for what of which collection: steps that agree in it are struck in the same ways in the gate.
pub fn kind((role, step): &Step) -> usize {
    *role as usize + step.split(' ').take(2).map(str::len).sum::<usize>()
}

/// Whether the step changes documents.
pub fn writes((_, step): &Step) -> bool {
    ["insert", "update", "delete", "findAndModify", "commitTransaction"].contains(&step.split(' ').next().unwrap_or_default())
}

/// The suites that strike every step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Suite {
    /// A process aborts or freezes at it.
    CrashPoints,
    /// Its outcome is unknown.
    UnknownOutcomes,
}

/// Whether a suite strikes this step. In the gate, what only reads is struck by one of the suites.
pub fn strikes(suite: Suite, step: &Step) -> bool {
    crate::full_length() || writes(step) || kind(step) / 4 % 2 == suite as usize
}
