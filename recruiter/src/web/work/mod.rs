//! Work by HTTP: clients reserve jobs, and end them. This process is a worker in the roster for each combination of classes and groups that
//! clients name, with as many free slots as clients wait, so that everything holds for their jobs as for those of other workers.
//!
//! | file | content |
//! |---|---|
//! | `contract` | the worker of one combination of classes and groups |
//! | `reservations` | the jobs that clients have, each until the end of its lease |

mod contract;
mod reservations;

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant as Monotonic},
};

use axum::http::StatusCode;
use bson::Bson;
use futures_util::{StreamExt as _, future::join_all, stream::FuturesUnordered};
use parking_lot::Mutex;
use recruiter_common::{shutdown::pause, store::ConnectArgs};
use recruiter_worker::HandedJob;
use tokio::time::timeout;
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

use self::contract::OfContract;
pub(super) use self::{
    contract::Contract,
    reservations::{Ended, Reservations, Reserved},
};
use super::problem::Problem;

/// The most combinations of classes and groups at a time.
const MOST_CONTRACTS: usize = 64;
/// How long a worker without clients stays.
const IDLE: Duration = Duration::from_secs(300);
/// How often leases and idle workers are looked for.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// How long further jobs are waited for after the first of a request.
const GATHER: Duration = Duration::from_millis(10);

/// The workers of this process, and the jobs that their clients have.
pub(super) struct Work {
    connect: ConnectArgs,
    contracts: Mutex<HashMap<Contract, Arc<OfContract>>>,
    pub(super) reservations: Reservations,
    /// No more jobs are handed out.
    closing: CancellationToken,
}

/// Jobs that no client has got yet: if the request ends before, they are due again.
#[derive(Default)]
struct Undelivered(Vec<HandedJob>);

impl Drop for Undelivered {
    fn drop(&mut self) {
        self.0.drain(..).for_each(HandedJob::give_back);
    }
}

impl Work {
    pub(super) fn new(connect: ConnectArgs) -> Self {
        Self { connect, contracts: Mutex::default(), reservations: Reservations::default(), closing: CancellationToken::new() }
    }

    /// Waits for up to `most` jobs, and reserves them. Returns none if none came in time.
    pub(super) async fn reserve(&self, contract: Contract, most: u32, wait: Duration, lease: Duration) -> Result<Vec<Reserved>, Problem> {
        if self.closing.is_cancelled() {
            return Err(Problem::new(StatusCode::SERVICE_UNAVAILABLE, "this process stops: ask again, another one may answer"));
        }
        let worker = self.worker(contract)?;
        let mut jobs = Undelivered::default();
        let mut coming: FuturesUnordered<_> = (0..most).map(|_| worker.places.next()).collect();
        let first = tokio::select! {
            first = timeout(wait, coming.next()) => first.ok().flatten(),
            () = self.closing.cancelled() => None,
        };
        jobs.0.extend(first);
        if jobs.0.is_empty() {
            return if worker.has_ended() { Err(worker.problem()) } else { Ok(Vec::new()) };
        }
        let _ = timeout(GATHER, async {
            while let Some(job) = coming.next().await {
                jobs.0.push(job);
            }
        })
        .await;
        drop(coming);
        // From its end.
        jobs.0.reverse();
        let mut reserved = Vec::with_capacity(jobs.0.len());
        while let Some(job) = jobs.0.last() {
            let inputs = job.context().inputs::<Bson>().await;
            let Some(job) = jobs.0.pop() else { break };
            match inputs {
                Ok(inputs) => reserved.push(self.reservations.add(job, inputs, worker.clone(), Monotonic::now() + lease)),
                Err(error) => drop(tokio::spawn(job.end(Err(error.into())))),
            }
        }
        Ok(reserved)
    }

    /// The worker of this combination, which begins with the first request.
    fn worker(&self, contract: Contract) -> Result<Arc<OfContract>, Problem> {
        let mut contracts = self.contracts.lock();
        contracts.retain(|_, worker| !worker.has_ended());
        if let Some(worker) = contracts.get(&contract) {
            worker.note_used();
            return Ok(worker.clone());
        }
        if contracts.len() >= MOST_CONTRACTS {
            let problem =
                format!("clients name {MOST_CONTRACTS} different combinations of classes and groups already: let them name the same");
            return Err(Problem::new(StatusCode::TOO_MANY_REQUESTS, problem));
        }
        let worker = Arc::new(OfContract::begin(&contract, &self.connect)?);
        contracts.insert(contract, worker.clone());
        Ok(worker)
    }

    /// Ends leases that are over, and workers that no client has used for a while, until it is dropped.
    pub(super) fn look_after(self: &Arc<Self>) -> AbortOnDropHandle<()> {
        let work = self.clone();
        AbortOnDropHandle::new(tokio::spawn(async move {
            loop {
                pause(LOOK_EVERY).await;
                work.reservations.end_leases(Monotonic::now());
                work.contracts.lock().retain(|_, worker| {
                    let is_idle = Arc::strong_count(worker) == 1 && worker.idle_for() > IDLE;
                    if is_idle {
                        worker.stop();
                    }
                    !is_idle
                });
            }
        }))
    }

    /// Hands out no more jobs, and waits for those that clients have, as a worker that stops.
    pub(super) async fn stop(&self) {
        self.closing.cancel();
        let workers: Vec<_> = self.contracts.lock().drain().map(|(_, worker)| worker).collect();
        workers.iter().for_each(|worker| worker.stop());
        join_all(workers.iter().map(|worker| worker.ended())).await;
    }
}
