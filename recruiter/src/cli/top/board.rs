//! The state of the view: the last reading, what is selected, and what a key does.

use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use recruiter_common::{
    ids::{JobId, WorkerId},
    workers::{Wanted, Worker, WorkerChange},
};

use super::reading::{Failed, Reading};
use crate::{cli::output::printable, views::counts::GroupCounts};

/// Rows that a page is long.
const PAGE: isize = 10;

/// The three tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pane {
    Groups,
    Workers,
    Failures,
}

impl Pane {
    pub(super) const ALL: [Self; 3] = [Self::Groups, Self::Workers, Self::Failures];
}

/// A change that a key asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Act {
    Pause(String),
    Resume(String),
    Worker(WorkerChange, WorkerId),
    Retry(JobId),
}

/// A change, and the question whether to make it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Asked {
    pub(super) question: String,
    act: Act,
}

/// What follows from a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Stay,
    Leave,
    Act(Act),
}

/// A selected row: what it shows, since others may come before it, and where it was, for when it has gone.
#[derive(Clone, Debug, Default)]
struct Selected {
    id: String,
    row: usize,
}

#[derive(Debug)]
pub(super) struct Board {
    pub(super) database: String,
    pub(super) reading: Option<Reading>,
    /// Why the last reading failed.
    pub(super) problem: Option<String>,
    /// What came of the last change.
    pub(super) said: Option<String>,
    pub(super) asked: Option<Asked>,
    pub(super) pane: Pane,
    pub(super) is_held: bool,
    pub(super) is_acting: bool,
    selected: [Selected; 3],
}

impl Board {
    pub(super) fn new(database: &str) -> Self {
        Self {
            database: database.into(),
            reading: None,
            problem: None,
            said: None,
            asked: None,
            pane: Pane::Groups,
            is_held: false,
            is_acting: false,
            selected: Default::default(),
        }
    }

    /// Shows a new reading, unless the picture is held. A failed one leaves the last one on the screen.
    pub(super) fn take(&mut self, reading: Result<Reading, String>) {
        match reading {
            _ if self.is_held => {}
            Ok(reading) => (self.reading, self.problem) = (Some(reading), None),
            Err(problem) => self.problem = Some(problem),
        }
        for pane in Pane::ALL {
            self.select(pane, self.row(pane).unwrap_or_default());
        }
    }

    pub(super) fn say(&mut self, said: String) {
        self.said = Some(said);
    }

    pub(super) fn groups(&self) -> &[GroupCounts] {
        self.reading.as_ref().map_or(&[], |reading| &reading.groups)
    }

    pub(super) fn workers(&self) -> &[Worker] {
        self.reading.as_ref().map_or(&[], |reading| &reading.workers)
    }

    pub(super) fn failures(&self) -> &[Failed] {
        self.reading.as_ref().map_or(&[], |reading| &reading.failures)
    }

    fn ids(&self, pane: Pane) -> Vec<String> {
        match pane {
            Pane::Groups => self.groups().iter().map(|group| group.name.clone()).collect(),
            Pane::Workers => self.workers().iter().map(|worker| worker.id().map_or_else(String::new, |id| id.to_string())).collect(),
            Pane::Failures => self.failures().iter().map(|failed| failed.job.to_string()).collect(),
        }
    }

    /// The selected row, which stays selected when others come before it.
    pub(super) fn row(&self, pane: Pane) -> Option<usize> {
        let (ids, selected) = (self.ids(pane), &self.selected[pane as usize]);
        let found = ids.iter().position(|id| *id == selected.id);
        found.or_else(|| ids.len().checked_sub(1).map(|last| selected.row.min(last)))
    }

    fn select(&mut self, pane: Pane, row: usize) {
        let id = self.ids(pane).get(row).cloned().unwrap_or_default();
        self.selected[pane as usize] = Selected { id, row };
    }

    fn step(&mut self, rows: isize) {
        let last = self.ids(self.pane).len().saturating_sub(1);
        let row = self.row(self.pane).unwrap_or_default().saturating_add_signed(rows).min(last);
        self.select(self.pane, row);
    }

    /// What follows from a key. A question that is not answered with `y` is dropped.
    #[expect(clippy::wildcard_enum_match_arm, reason = "no other key does anything")]
    pub(super) fn key(&mut self, key: KeyEvent) -> Step {
        self.said = None;
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return if key.code == KeyCode::Char('c') { Step::Leave } else { Step::Stay };
        }
        if let Some(asked) = self.asked.take() {
            return if key.code == KeyCode::Char('y') { Step::Act(asked.act) } else { Step::Stay };
        }
        let pane = |turns: usize| Pane::ALL[(self.pane as usize + turns) % Pane::ALL.len()];
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return Step::Leave,
            KeyCode::Char(' ') => self.is_held = !self.is_held,
            KeyCode::Tab | KeyCode::Right => self.pane = pane(1),
            KeyCode::BackTab | KeyCode::Left => self.pane = pane(2),
            KeyCode::Up | KeyCode::Char('k') => self.step(-1),
            KeyCode::Down | KeyCode::Char('j') => self.step(1),
            KeyCode::PageUp => self.step(-PAGE),
            KeyCode::PageDown => self.step(PAGE),
            KeyCode::Home => self.step(isize::MIN),
            KeyCode::End => self.step(isize::MAX),
            KeyCode::Char(key @ ('p' | 'u' | 's' | 'r')) => self.ask(key),
            _ => {}
        }
        Step::Stay
    }

    /// Asks whether to make the change of this key, to the selected row.
    fn ask(&mut self, key: char) {
        let (pane, of) = match key {
            'p' => (Pane::Groups, "a group"),
            'r' => (Pane::Failures, "a failure"),
            _ => (Pane::Workers, "a worker"),
        };
        let asked = self.row(pane).filter(|_| pane == self.pane).and_then(|row| match pane {
            Pane::Groups => self.groups().get(row).map(pause),
            Pane::Workers => change(self.workers().get(row)?, key),
            Pane::Failures => self.failures().get(row).map(retry),
        });
        match asked {
            _ if self.is_acting => self.say("the last change is still being made".into()),
            None => self.say(format!("`{key}` is for {of}: choose one with Tab and the arrows")),
            asked => self.asked = asked,
        }
    }
}

fn pause(group: &GroupCounts) -> Asked {
    let (verb, act): (_, fn(String) -> Act) = if group.is_paused { ("Resume", Act::Resume) } else { ("Pause", Act::Pause) };
    Asked { question: format!("{verb} the group {}?", printable(&group.name, 40)), act: act(group.name.clone()) }
}

/// A worker that is quiet already is resumed.
fn change(worker: &Worker, key: char) -> Option<Asked> {
    let is_quiet = worker.request.as_ref().is_some_and(|request| request.wanted == Wanted::Quiet);
    let (verb, change) = match key {
        's' => ("Stop", WorkerChange::Stop),
        _ if is_quiet => ("Resume", WorkerChange::Resume),
        _ => ("Quiet", WorkerChange::Quiet),
    };
    Some(Asked { question: format!("{verb} the worker {}?", place(worker)), act: Act::Worker(change, worker.id()?) })
}

fn retry(failed: &Failed) -> Asked {
    Asked { question: format!("Retry the job {} of {}?", failed.job, printable(&failed.class, 40)), act: Act::Retry(failed.job) }
}

/// The host and the process id of a worker.
pub(super) fn place(worker: &Worker) -> String {
    let host = worker.document.get_str("hostname").map_or_else(|_| "-".into(), |host| printable(host, 32));
    let pid = worker.document.get("pid").map_or_else(|| "-".into(), |pid| printable(&pid.to_string(), 12));
    format!("{host}:{pid}")
}

#[cfg(test)]
pub(super) mod tests {
    use bson::{doc, oid::ObjectId};
    use recruiter_common::{instant::Instant, workers::Leader};

    use super::*;
    use crate::cli::top::history::Point;

    pub(in crate::cli::top) fn group(name: &str) -> GroupCounts {
        GroupCounts { name: name.into(), ..GroupCounts::default() }
    }

    pub(in crate::cli::top) fn worker(pid: i32, more: bson::Document) -> Worker {
        let mut document = doc! { "_id": ObjectId::new(), "available": true, "work_on": "*", "hostname": "web", "pid": pid, "free": 3,
        "capacity": 4, "last_seen_at": bson::DateTime::from_chrono(Instant::UNIX_EPOCH), "lease_ms": 20_000 };
        document.extend(more);
        Worker::of(document, Instant::UNIX_EPOCH)
    }

    pub(in crate::cli::top) fn failed(error: &str) -> Failed {
        Failed { job: JobId::new(), class: "mail".into(), group: "g".into(), error: error.into(), ended_at: Instant::UNIX_EPOCH }
    }

    pub(in crate::cli::top) fn reading(groups: Vec<GroupCounts>, workers: Vec<Worker>, failures: Vec<Failed>) -> Reading {
        let points = (0..100).map(|n| Point { done: n, failed: 0, p99: Some(7) }).collect();
        let (at, leader, latency) = (Instant::UNIX_EPOCH, Leader::Leads("web:1".into()), Some((3, 12)));
        Reading { at, leader, groups, workers, failures, points, latency }
    }

    fn press(board: &mut Board, code: KeyCode) -> Step {
        board.key(KeyEvent::from(code))
    }

    fn question(board: &Board) -> &str {
        board.asked.as_ref().map_or("", |asked| &asked.question)
    }

    #[test]
    fn a_row_stays_selected_while_others_come_and_go() {
        let mut board = Board::new("x");
        board.take(Ok(reading(vec![group("a"), group("m")], vec![], vec![])));
        press(&mut board, KeyCode::Down);
        board.take(Ok(reading(vec![group("a"), group("b"), group("m")], vec![], vec![])));
        assert_eq!(board.row(Pane::Groups), Some(2));
        press(&mut board, KeyCode::Char('p'));
        assert_eq!(question(&board), "Pause the group m?");
        board.take(Ok(reading(vec![group("a"), group("b")], vec![], vec![])));
        assert_eq!(press(&mut board, KeyCode::Char('y')), Step::Act(Act::Pause("m".into())), "what was asked is what is done");
        assert_eq!(board.row(Pane::Groups), Some(1), "the last one, since it has gone");
        for (key, row) in [(KeyCode::Home, 0), (KeyCode::End, 1), (KeyCode::PageUp, 0), (KeyCode::PageDown, 1), (KeyCode::Down, 1)] {
            press(&mut board, key);
            assert_eq!(board.row(Pane::Groups), Some(row), "{key:?}");
        }
        board.take(Ok(reading(vec![], vec![], vec![])));
        assert_eq!(board.row(Pane::Groups), None);
        press(&mut board, KeyCode::Char('p'));
        assert!(board.asked.is_none() && board.said.is_some());
    }

    #[test]
    fn each_change_is_asked_for_in_its_table_and_made_only_with_y() {
        let paused = GroupCounts { is_paused: true, ..group("mail") };
        let (plain, quiet) = (worker(7, doc! {}), worker(8, doc! { "wanted": "quiet", "wanted_by": "ada" }));
        let (first, second, job) = (plain.id().unwrap(), quiet.id().unwrap(), failed("timeout: slow"));
        let mut board = Board::new("x");
        board.take(Ok(reading(vec![paused], vec![plain, quiet], vec![job.clone()])));
        let mut check = |keys: &[KeyCode], question: &str, act: Act| {
            keys.iter().for_each(|key| assert_eq!(press(&mut board, *key), Step::Stay));
            assert_eq!(super::tests::question(&board), question);
            assert_eq!(press(&mut board, KeyCode::Char('n')), Step::Stay);
            assert_eq!(press(&mut board, KeyCode::Char('y')), Step::Stay, "it was refused");
            press(&mut board, *keys.last().unwrap());
            assert_eq!(press(&mut board, KeyCode::Char('y')), Step::Act(act));
        };
        let key = KeyCode::Char;
        check(&[key('p')], "Resume the group mail?", Act::Resume("mail".into()));
        check(&[KeyCode::Tab, key('u')], "Quiet the worker web:7?", Act::Worker(WorkerChange::Quiet, first));
        check(&[key('s')], "Stop the worker web:7?", Act::Worker(WorkerChange::Stop, first));
        check(&[KeyCode::Down, key('u')], "Resume the worker web:8?", Act::Worker(WorkerChange::Resume, second));
        check(&[KeyCode::Right, key('r')], &format!("Retry the job {} of mail?", job.job), Act::Retry(job.job));
        press(&mut board, key('s'));
        assert_eq!((board.asked.clone(), board.said.as_deref()), (None, Some("`s` is for a worker: choose one with Tab and the arrows")));
        board.is_acting = true;
        press(&mut board, key('r'));
        assert_eq!(board.said.as_deref(), Some("the last change is still being made"));
    }

    #[test]
    fn it_is_left_by_three_keys_and_held_still_by_one() {
        let mut board = Board::new("x");
        for key in [KeyEvent::from(KeyCode::Char('q')), KeyCode::Esc.into(), KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)] {
            assert_eq!(board.key(key), Step::Leave);
        }
        board.take(Err("away".into()));
        assert_eq!(board.problem.as_deref(), Some("away"));
        press(&mut board, KeyCode::Char(' '));
        board.take(Ok(reading(vec![group("a")], vec![], vec![])));
        assert!(board.reading.is_none() && board.is_held);
        press(&mut board, KeyCode::Char(' '));
        board.take(Ok(reading(vec![group("a")], vec![], vec![])));
        assert!(board.reading.is_some() && board.problem.is_none());
    }
}
