//! What the failure tests found, as one table: kept in a file when `RECRUITER_FAILURE_REPORT` names one.

use std::{fs, io::Write as _, time::Duration};

use crate::oracle::Findings;

/// Names the file that rows are added to.
pub const REPORT: &str = "RECRUITER_FAILURE_REPORT";

/// One kind of fault: what was done, how often, and what came of it.
#[derive(Clone, Debug, Default)]
pub struct Row {
    /// The fault, in a few words.
    pub fault: String,
    /// How often it struck.
    pub injected: usize,
    /// What was found wrong, all runs together.
    pub findings: Findings,
    /// How long it took until everything went on, for each.
    pub recovery: Vec<Duration>,
    /// How long it may take: longer is a failure.
    pub within: Duration,
}

impl Row {
    /// An empty row of a fault from which everything recovers within this time.
    pub fn new(fault: impl Into<String>, within: Duration) -> Self {
        Self { fault: fault.into(), within, ..Self::default() }
    }

    /// Adds one fault that struck.
    pub fn add(&mut self, findings: Findings, recovery: Duration) {
        self.add_run(findings, 1, Some(recovery));
    }

    /// Adds a run in which so many faults struck: what was found in it counts even when none did.
    pub fn add_run(&mut self, findings: Findings, struck: usize, recovery: Option<Duration>) {
        self.injected += struck;
        self.findings.add(findings);
        self.recovery.extend(recovery.filter(|_| struck > 0));
    }

    /// Writes the row down and panics if anything was wrong.
    pub fn close(mut self) {
        self.recovery.sort_unstable();
        if let Some(longest) = self.recovery.last().filter(|longest| **longest > self.within) {
            self.findings.broken.push(format!("I7: everything went on after {longest:?} only, and {:?} is the limit", self.within));
        }
        let at = |share: usize| self.recovery.get((self.recovery.len() * share / 100).min(self.recovery.len().saturating_sub(1)));
        let seconds = |time: Option<&Duration>| time.map_or("–".into(), |time| format!("{:.1} s", time.as_secs_f64()));
        let row = format!(
            "| {} | {} | {} | {} | {} | {} | {} |\n",
            self.fault,
            self.injected,
            self.findings.executions,
            self.findings.lost.len(),
            self.findings.unexplained.len(),
            seconds(at(50)),
            seconds(at(100)),
        );
        if let Some(file) = std::env::var_os(REPORT) {
            let mut file = fs::OpenOptions::new().create(true).append(true).open(file).expect("the report can be written");
            file.write_all(row.as_bytes()).expect("the report can be written");
        }
        let wrong = self.findings.all();
        assert!(wrong.is_empty(), "{row}{} promises were broken:\n{}", wrong.len(), wrong.join("\n"));
    }
}
