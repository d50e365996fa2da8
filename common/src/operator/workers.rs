//! The operator's requests to workers: take no more jobs for a while (*quiet*), take jobs again (*resume*), end (*stop*).
//!
//! Used by `recruiter workers` and by applications that offer the same. A request is written into the roster document of a worker, next to
//! who made it and when. The worker reads it with its next heartbeat, and at once after a hint. So it needs no connection to the machine of
//! the worker. A request concerns one session: a worker process that is started again takes jobs.

pub use super::presence::{Leader, Presence, Worker};
pub use crate::roster::{Request, Wanted, WorkOn};
use bson::Document;

use crate::{
    base::{WorkerId, integer},
    hints::Hint,
    mongo::{Client, Store, StoreError, lossy},
    roster::RegisteredWorker,
};

/// A change of what is wanted of workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(feature = "protocol"), non_exhaustive)]
pub enum WorkerChange {
    /// Take no more jobs until a resume.
    Quiet,
    /// Take jobs again.
    Resume,
    /// Drain and end.
    Stop,
}

/// The workers that a change is for.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Chosen {
    /// These.
    Ids(Vec<WorkerId>),
    /// All workers on the machine with this name.
    Host(String),
    /// All workers in the roster.
    All,
}

/// The outcome of a change for one worker. In a dry run, the outcome that the change would have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(feature = "protocol"), non_exhaustive)]
pub enum Asked {
    /// The request is written.
    Done,
    /// The same was wanted before.
    Already,
    /// Refused: an operator has stopped it, which cannot be undone.
    Stops,
    /// Refused: it is not in the roster, or was declared dead.
    Gone,
    /// Unchanged: its document changed between the read and the write.
    Meanwhile,
}

impl Asked {
    /// The outcome as one word, for programs.
    pub fn word(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Already => "already",
            Self::Stops => "stops",
            Self::Gone => "gone",
            Self::Meanwhile => "changed-meanwhile",
        }
    }

    /// Whether the worker is not in the wanted state, and does not get there.
    pub fn is_refused(self) -> bool {
        matches!(self, Self::Stops | Self::Gone | Self::Meanwhile)
    }
}

/// The outcome for one worker, and where the worker is.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Answer {
    /// The worker.
    pub worker: WorkerId,
    /// Its machine; empty if it is not in the roster.
    pub hostname: String,
    /// Its process.
    pub pid: Option<i64>,
    /// The outcome.
    pub asked: Asked,
}

impl Client {
    /// The workers: list, quiet, resume and stop them.
    pub fn workers(&self) -> Workers {
        Workers(self.store())
    }
}

/// The workers: [`Client::workers`].
#[derive(Clone, Debug)]
pub struct Workers(Store);

impl Workers {
    /// The workers in the roster.
    ///
    /// # Errors
    /// An error of MongoDB.
    pub async fn list(&self) -> Result<Presence, StoreError> {
        Presence::find(&self.0).await
    }

    /// Quiets, resumes or stops workers, and notifies them. Returns the outcome for each chosen worker. In a dry run nothing is written.
    ///
    /// # Errors
    /// An error of MongoDB. Some requests may have been written. The call can be repeated.
    pub async fn change(&self, change: WorkerChange, chosen: &Chosen, by: &str, dry_run: bool) -> Result<Vec<Answer>, StoreError> {
        let roster = if dry_run { self.0.roster_documents().await? } else { self.0.if_set_up(self.0.roster_documents()).await? };
        let roster: Vec<Document> =
            roster.iter().filter(|worker| RegisteredWorker::read(worker).is_some()).map(|worker| lossy(worker)).collect();
        let mut answers = Vec::new();
        for (worker, document) in choose(&roster, chosen) {
            let mut asked = decide(change, document);
            if asked == Asked::Done && !dry_run {
                let is_written = match change {
                    WorkerChange::Quiet => self.0.ask_worker(worker, Wanted::Quiet, by).await?,
                    WorkerChange::Stop => self.0.ask_worker(worker, Wanted::Stop, by).await?,
                    WorkerChange::Resume => self.0.resume_if_quiet(worker).await?,
                };
                asked = if is_written { Asked::Done } else { Asked::Meanwhile };
            }
            let number = |field: &str| document.and_then(|document| integer(document.get(field)));
            let hostname = document.and_then(|document| document.get_str("hostname").ok()).unwrap_or_default().to_owned();
            answers.push(Answer { worker, hostname, pid: number("pid"), asked });
        }
        if !dry_run && answers.iter().any(|answer| answer.asked == Asked::Done) {
            // A worker that misses the hint reads its document with its next heartbeat.
            self.0.announce_hint(Hint::Control).await;
        }
        Ok(answers)
    }
}

fn choose<'a>(roster: &'a [Document], chosen: &Chosen) -> Vec<(WorkerId, Option<&'a Document>)> {
    let id = |worker: &Document| worker.get_object_id("_id").ok().map(WorkerId::from);
    match chosen {
        Chosen::Ids(ids) => ids.iter().map(|wanted| (*wanted, roster.iter().find(|worker| id(worker) == Some(*wanted)))).collect(),
        Chosen::Host(_) | Chosen::All => {
            let is_chosen = |worker: &&Document| match chosen {
                Chosen::Host(host) => worker.get_str("hostname").is_ok_and(|hostname| hostname == host),
                Chosen::Ids(_) | Chosen::All => true,
            };
            roster.iter().filter(is_chosen).filter_map(|worker| Some((id(worker)?, Some(worker)))).collect()
        }
    }
}

/// The outcome of a change, from the worker's document.
fn decide(change: WorkerChange, worker: Option<&Document>) -> Asked {
    let Some(worker) = worker.filter(|worker| !worker.get_bool("retired").unwrap_or(false)) else { return Asked::Gone };
    match (change, Request::of(worker).map(|request| request.wanted)) {
        (WorkerChange::Quiet, Some(Wanted::Quiet)) | (WorkerChange::Stop, Some(Wanted::Stop)) | (WorkerChange::Resume, None) => {
            Asked::Already
        }
        (WorkerChange::Quiet | WorkerChange::Resume, Some(Wanted::Stop)) => Asked::Stops,
        (WorkerChange::Quiet | WorkerChange::Stop, None)
        | (WorkerChange::Stop, Some(Wanted::Quiet))
        | (WorkerChange::Resume, Some(Wanted::Quiet)) => Asked::Done,
    }
}

#[cfg(test)]
mod tests {
    use bson::doc;

    use super::*;

    #[test]
    fn a_change_has_an_outcome_in_every_state() {
        use WorkerChange::{Quiet, Resume, Stop};
        let check = |worker: Document, expected: [Asked; 3]| {
            assert_eq!([Quiet, Resume, Stop].map(|change| decide(change, Some(&worker))), expected, "{worker}");
        };
        check(doc! {}, [Asked::Done, Asked::Already, Asked::Done]);
        check(doc! { "wanted": "quiet" }, [Asked::Already, Asked::Done, Asked::Done]);
        check(doc! { "wanted": "stop" }, [Asked::Stops, Asked::Stops, Asked::Already]);
        check(doc! { "wanted": "sleep" }, [Asked::Done, Asked::Already, Asked::Done]);
        check(doc! { "wanted": "quiet", "retired": true }, [Asked::Gone; 3]);
        assert_eq!(decide(Quiet, None), Asked::Gone);
    }

    #[test]
    fn workers_are_chosen_by_id_by_host_or_all() {
        let ids = [WorkerId::new(), WorkerId::new()];
        let roster = [doc! { "_id": ids[0], "hostname": "a" }, doc! { "_id": ids[1], "hostname": "b" }, doc! { "_id": "no worker" }];
        let chosen = |chosen: Chosen| choose(&roster, &chosen).into_iter().map(|(id, found)| (id, found.is_some())).collect::<Vec<_>>();
        assert_eq!(chosen(Chosen::Host("b".into())), [(ids[1], true)]);
        assert_eq!(chosen(Chosen::Host("c".into())), []);
        assert_eq!(chosen(Chosen::All), [(ids[0], true), (ids[1], true)]);
        let unknown = WorkerId::new();
        assert_eq!(chosen(Chosen::Ids(vec![unknown, ids[0]])), [(unknown, false), (ids[0], true)]);
    }
}
