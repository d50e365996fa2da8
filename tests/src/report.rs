//! The results of the failure tests as one table, which is written to a file when `RECRUITER_FAILURE_REPORT` names one.

use std::{fs, io::Write as _, time::Duration};

use crate::oracle::Findings;

/// Names the variable with the file to which rows are added.
pub const REPORT: &str = "RECRUITER_FAILURE_REPORT";

/// One row of the report: a kind of fault, the number of injections, and the results.
#[derive(Clone, Debug, Default)]
pub struct Row {
    /// The fault, in a few words.
    pub fault: String,
    /// Number of injected faults.
    pub injected: usize,
    /// The violations found in all runs.
    pub findings: Findings,
    /// The time of each recovery.
    pub recovery: Vec<Duration>,
}

impl Row {
    /// An empty row for a fault.
    pub fn new(fault: impl Into<String>) -> Self {
        Self { fault: fault.into(), ..Self::default() }
    }

    /// Adds one fault that struck.
    pub fn add(&mut self, findings: Findings, recovery: Duration) {
        self.add_run(findings, 1, Some(recovery));
    }

    /// Adds a run with this number of faults. Its violations count even if no fault struck.
    pub fn add_run(&mut self, findings: Findings, struck: usize, recovery: Option<Duration>) {
        self.injected += struck;
        self.findings.add(findings);
        self.recovery.extend(recovery.filter(|_| struck > 0));
    }

    /// Writes the row to the file. Panics if there was a violation.
    pub fn close(mut self) {
        self.recovery.sort_unstable();
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
