//! Which steps of the protocol the faults have struck, in which ways: printed as a table.
//!
//! Every run of a failure test must keep the promises. Beyond that, each [forced](forced) step must have been struck in every way, and
//! most of the others in some way: luck decides which steps a run takes.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use crate::{cycle::Run, world::Step};

/// At least so many of a hundred steps that were taken must have been struck.
const STRUCK_PERCENT: usize = 95;

/// Operations of the store that a run without faults need not take, or may take at different times, each with the reason.
const NOT_FORCED: &[(&str, &str)] = &[];

/// The steps that every one of these runs without faults took by operations that do not depend on luck.
///
/// # Panics
/// When an operation of the three programs sent no command in these runs and is not one that depends on luck: a new operation must be
/// part of the [cycle](crate::cycle), or be named here with the reason why it is not.
pub fn forced(runs: &[Run]) -> BTreeSet<Step> {
    let operations = operations();
    let depends_on_luck = |name: &str| NOT_FORCED.iter().any(|(operation, _)| *operation == name);
    // The operation is the last one that is declared above the place.
    let operation = |place: &str| {
        let (file, line) = place.rsplit_once(':')?;
        let line: usize = line.parse().ok()?;
        operations.iter().filter(|(_, at)| at.0 == file && at.1 <= line).max_by_key(|(_, at)| at.1).map(|(name, _)| name.as_str())
    };
    let taken = |run: &Run| {
        run.operations.iter().filter_map(|(place, step)| Some((operation(place)?.to_owned(), step.clone()))).collect::<Vec<_>>()
    };
    let taken: Vec<Vec<(String, Step)>> = runs.iter().map(taken).collect();
    let seen: BTreeSet<&str> = taken.iter().flatten().map(|(name, _)| name.as_str()).collect();
    let new: Vec<&String> = operations.keys().filter(|name| !seen.contains(name.as_str()) && !depends_on_luck(name)).collect();
    assert!(new.is_empty(), "these operations of the store are not part of the cycle that the failure tests break: {new:#?}");
    let gone: Vec<&str> = NOT_FORCED.iter().map(|(name, _)| *name).filter(|name| !operations.contains_key(*name)).collect();
    assert!(gone.is_empty(), "these are no operations of the three programs: {gone:#?}");
    let steps = |run: Vec<(String, Step)>| run.into_iter().filter(|(name, _)| !depends_on_luck(name)).map(|(_, step)| step).collect();
    taken.into_iter().map(steps).reduce(|all: BTreeSet<Step>, run| &all & &run).unwrap_or_default()
}

/// The operations of `common::store` that a recruiter, a cleaner or a worker calls, with the file and line of their declaration.
fn operations() -> BTreeMap<String, (String, usize)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let callers: String = ["recruiter/src/leader", "worker/src/engine", "cleaner/src"]
        .iter()
        .flat_map(|room| sources(&root.join(room)))
        .map(|(_, text)| text)
        .collect();
    let mut operations = BTreeMap::new();
    for (file, text) in sources(&root.join("common/src/store")) {
        for (line, declaration) in text.lines().enumerate() {
            let name = declaration.split_once("pub async fn ").and_then(|(_, rest)| rest.split(['(', '<']).next());
            if let Some(name) = name.filter(|name| callers.contains(&format!(".{name}("))) {
                operations.insert(name.to_owned(), (file.clone(), line + 1));
            }
        }
    }
    operations
}

/// The source files below a directory, each with its path there and its text.
fn sources(directory: &Path) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut left = vec![directory.to_owned()];
    while let Some(path) = left.pop() {
        if path.is_dir() {
            left.extend(fs::read_dir(&path).expect("a directory can be listed").map(|entry| entry.expect("it can be listed").path()));
        } else {
            let name = path.strip_prefix(directory).expect("it is below").display().to_string();
            found.push((name, fs::read_to_string(&path).expect("a source file is text")));
        }
    }
    found
}

/// The steps that were taken in a test, and the ways in which they were struck.
#[derive(Debug, Default)]
pub struct Coverage(BTreeMap<Step, BTreeMap<String, bool>>);

impl Coverage {
    /// Records that a step was taken, and whether it was struck in this way.
    pub fn add(&mut self, step: &Step, way: &str, struck: bool) {
        *self.0.entry(step.clone()).or_default().entry(way.to_owned()).or_default() |= struck;
    }

    /// Prints the table.
    ///
    /// # Panics
    /// When a forced step was not struck in some way, or too few steps were struck.
    pub fn close(self, forced: &BTreeSet<Step>) {
        let mut left = Vec::new();
        let struck = self.0.values().filter(|ways| ways.values().any(|struck| *struck)).count();
        println!("{struck} of {} steps were struck, {} are forced:", self.0.len(), forced.len());
        for (step @ (role, name), ways) in &self.0 {
            let missed: Vec<&str> = ways.iter().filter(|(_, struck)| !**struck).map(|(way, _)| way.as_str()).collect();
            let is_forced = forced.contains(step);
            let not = if missed.is_empty() { String::new() } else { format!(", not {}", missed.join(", ")) };
            println!("  {} {role:?} {name}: {} of {} ways{not}", if is_forced { "*" } else { " " }, ways.len() - missed.len(), ways.len());
            if is_forced && !missed.is_empty() {
                left.push(format!("{role:?} {name}: {}", missed.join(", ")));
            }
        }
        assert!(left.is_empty(), "these steps are taken in every run and were not struck: {left:#?}");
        assert!(struck * 100 >= self.0.len() * STRUCK_PERCENT, "only {struck} of {} steps were struck", self.0.len());
    }
}
