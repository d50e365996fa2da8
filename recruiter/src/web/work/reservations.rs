//! The jobs that clients have, each until the end of its lease.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant as Monotonic},
};

use axum::http::StatusCode;
use bson::Bson;
use parking_lot::Mutex;
use recruiter_worker::{Context, EndOf, HandedJob, NotDone, TooLate};
use tokio::{sync::watch, time::timeout};

use super::{super::problem::Problem, contract::OfContract};

/// How long the ends of reservations are known, for clients that repeat a request whose answer was lost.
const KNOWN_FOR: Duration = Duration::from_secs(600);
/// How long a request waits until an end is recorded, if MongoDB is away.
const RECORDED_WITHIN: Duration = Duration::from_secs(50);

/// The jobs that clients have.
#[derive(Default)]
pub(crate) struct Reservations(Mutex<HashMap<String, State>>);

/// What has become of an end, once it is known.
type Known = watch::Receiver<Option<Result<EndOf, TooLate>>>;

enum State {
    /// A client has it.
    Taken(Taken),
    /// The client has ended it, like this.
    Ended { like: Ended, at: Monotonic, recorded: Known },
}

struct Taken {
    job: HandedJob,
    until: Monotonic,
    /// Keeps the worker.
    _worker: Arc<OfContract>,
}

/// How a client has ended a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    Committed,
    RolledBack,
}

/// A job that was reserved just now.
pub(crate) struct Reserved {
    /// Names the reservation. Everyone who knows it can end the job.
    pub(crate) id: String,
    pub(crate) until: Monotonic,
    /// The results of the jobs that it has waited for.
    pub(crate) inputs: Vec<Bson>,
}

impl Reservations {
    pub(super) fn add(&self, job: HandedJob, inputs: Vec<Bson>, worker: Arc<OfContract>, until: Monotonic) -> Reserved {
        let id = hex::encode(rand::random::<[u8; 16]>());
        self.0.lock().insert(id.clone(), State::Taken(Taken { job, until, _worker: worker }));
        Reserved { id, until, inputs }
    }

    /// Calls `read` with a job that a client has.
    pub(crate) fn with<T>(&self, id: &str, read: impl FnOnce(&HandedJob, &mut Monotonic) -> T) -> Result<T, Problem> {
        match self.0.lock().get_mut(id) {
            Some(State::Taken(taken)) => Ok(read(&taken.job, &mut taken.until)),
            Some(State::Ended { .. }) => Err(gone("the job of this reservation has been ended")),
            None => Err(unknown()),
        }
    }

    /// Calls `act` with the notes of a job that a client has. The reservation is not ended meanwhile.
    pub(crate) fn note<T>(&self, id: &str, act: impl FnOnce(&Context) -> T) -> Result<T, Problem> {
        self.with(id, |job, _| act(job.context()))
    }

    /// Ends a job, and returns when its end is recorded. The same end may be sent again, also while it is being recorded. That goes on if the
    /// client goes away.
    pub(crate) async fn end(&self, id: &str, like: Ended, outcome: Result<Bson, NotDone>) -> Result<(), Problem> {
        let mut recorded = self.begin_end(id, like, outcome)?;
        let ended = timeout(RECORDED_WITHIN, recorded.wait_for(Option::is_some)).await;
        let ended = ended.ok().and_then(Result::ok).and_then(|ended| *ended).ok_or_else(|| {
            let problem = "the end of the job is not recorded yet; it will be, if this process goes on: repeat the request";
            Problem::new(StatusCode::SERVICE_UNAVAILABLE, problem)
        })?;
        ended.map(drop).map_err(gone)
    }

    fn begin_end(&self, id: &str, like: Ended, outcome: Result<Bson, NotDone>) -> Result<Known, Problem> {
        let mut all = self.0.lock();
        match all.get(id) {
            None => return Err(unknown()),
            Some(State::Ended { like: before, recorded, .. }) if *before == like => return Ok(recorded.clone()),
            Some(State::Ended { .. }) => return Err(gone("the job of this reservation has been ended, in another way")),
            Some(State::Taken(_)) => {}
        }
        let (sender, recorded) = watch::channel(None);
        let ended = State::Ended { like, at: Monotonic::now(), recorded: recorded.clone() };
        if let Some(State::Taken(Taken { job, _worker: worker, .. })) = all.insert(id.to_owned(), ended) {
            tokio::spawn(async move {
                sender.send_replace(Some(job.end(outcome).await));
                drop(worker);
            });
        }
        Ok(recorded)
    }

    /// Ends the reservations whose lease is over: their jobs have failed. Forgets old ends.
    pub(super) fn end_leases(&self, now: Monotonic) {
        let over: Vec<_> = self.0.lock().extract_if(|_, state| state.is_over(now)).collect();
        // Not under the lock.
        for (_, state) in over {
            if let State::Taken(Taken { job, .. }) = state {
                let context = job.context();
                tracing::warn!(job.id = %context.job_id(), job.class = context.class(), "the lease of a client is over: its job has failed");
            }
        }
    }
}

impl State {
    fn is_over(&self, now: Monotonic) -> bool {
        match self {
            Self::Taken(Taken { until, .. }) => now >= *until,
            Self::Ended { at, .. } => now >= *at + KNOWN_FOR,
        }
    }
}

fn gone(why: impl ToString) -> Problem {
    Problem::new(StatusCode::GONE, why)
}

fn unknown() -> Problem {
    gone("there is no such reservation: its lease is over, or another process has given it; this end is not recorded")
}
