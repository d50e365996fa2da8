//! The source of a worker's jobs: the recruiter, which assigns them in the roster, or this process itself.
//!
//! Everything else in the engine does the same for both. What only own jobs need is a call here that does nothing for the roster.

pub(crate) mod own;

use std::sync::Arc;

use recruiter_common::{
    ids::JobId,
    store::{Recorded, Store, WorkOn},
    telemetry::chain,
};

use self::own::OwnJobs;
use super::record::{ran::Ran, verdict::Verdict};
use crate::{config::WorkerConfig, handed::Places, registry::Registry};

/// Where the jobs of a worker come from.
pub(crate) enum Source {
    /// The recruiter assigns them.
    Roster,
    /// The recruiter assigns them, and clients of this process execute them.
    Clients(Places),
    /// This process enqueues them and executes them itself. It executes no others.
    Own(Arc<OwnJobs>),
}

impl Source {
    /// Whether the recruiter assigns jobs to this worker.
    pub(crate) fn is_roster(&self) -> bool {
        matches!(self, Self::Roster | Self::Clients(_))
    }

    /// What the recruiter may assign, for the roster: jobs of these groups and classes.
    pub(crate) fn served(&self, config: &WorkerConfig, registry: &Registry) -> (WorkOn, Vec<String>) {
        match self {
            Self::Roster | Self::Clients(_) => (config.work_on(), registry.classes().map(str::to_owned).collect()),
            Self::Own(_) => (WorkOn::Groups(Vec::new()), Vec::new()),
        }
    }

    /// Waits for own jobs.
    pub(crate) async fn next(&self) -> Vec<JobId> {
        match self {
            Self::Roster | Self::Clients(_) => std::future::pending().await,
            Self::Own(own) => own.next().await,
        }
    }

    /// Where clients wait for jobs.
    pub(crate) fn places(&self) -> Option<&Places> {
        match self {
            Self::Clients(places) => Some(places),
            Self::Roster | Self::Own(_) => None,
        }
    }

    /// Waits until the number of clients may have changed.
    pub(crate) async fn clients_changed(&self) {
        match self.places() {
            Some(places) => places.changed().await,
            None => std::future::pending().await,
        }
    }

    /// Takes own jobs under the present settings, unless an operator wants this process to take none.
    pub(crate) async fn open(&self, store: &Store, is_quiet: bool) {
        let Self::Own(own) = self else { return };
        if is_quiet {
            own.close();
            return;
        }
        match store.settings().await {
            Ok(settings) => own.open(settings),
            Err(error) => {
                tracing::debug!(
                    error = chain(&error),
                    "failed to read the settings of groups; taking no own jobs until the next heartbeat"
                );
                own.close();
            }
        }
    }

    /// Notes the end of a job, and whether it is recorded.
    pub(crate) fn note_ended(&self, job: JobId, verdict: &Verdict, recorded: Option<Recorded>) {
        match self {
            Self::Roster => {}
            Self::Clients(places) => places.note_ended(job, recorded),
            Self::Own(own) => own.note_ended(job, Some(verdict).filter(|_| recorded == Some(Recorded::Yes)).and_then(Ran::of)),
        }
    }

    /// Notes that these jobs are not executed here.
    pub(crate) fn give_up<'a>(&self, jobs: impl IntoIterator<Item = &'a JobId>) {
        if let Self::Own(own) = self {
            own.give_up(jobs);
        }
    }

    /// The own jobs, if this process has any.
    pub(crate) fn own(&self) -> Option<&OwnJobs> {
        match self {
            Self::Roster | Self::Clients(_) => None,
            Self::Own(own) => Some(own),
        }
    }

    /// Notes that a session has ended: its jobs have no ends any more.
    pub(crate) fn session_ended(&self) {
        match self {
            Self::Roster => {}
            Self::Clients(places) => places.forget_ends(),
            Self::Own(own) => own.clear(),
        }
    }
}
