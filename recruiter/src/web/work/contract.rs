//! The worker of one combination of classes and groups.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant as Monotonic},
};

use axum::http::StatusCode;
use parking_lot::Mutex;
use recruiter_common::{
    shutdown::{Shutdown, Trigger},
    store::ConnectArgs,
    telemetry::chain,
};
use recruiter_worker::{Places, Worker, WorkerConfig};
use tokio_util::sync::CancellationToken;

use super::super::problem::Problem;

/// The most jobs that the clients of one combination have at a time: as many as there can be connections.
const MOST_JOBS: u32 = 1_000;
/// How long clients may go on with their jobs after a stop was requested.
const GRACE: Duration = Duration::from_secs(10);

/// Which jobs a client takes: of these classes, in these groups; in all groups if it names none.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Contract {
    pub(crate) classes: BTreeSet<String>,
    pub(crate) groups: BTreeSet<String>,
}

/// The worker of a contract, until it has ended.
pub(super) struct OfContract {
    pub(super) places: Places,
    trigger: Trigger,
    ended: CancellationToken,
    used_at: Mutex<Monotonic>,
}

impl OfContract {
    /// Begins to work. While MongoDB is away, the worker waits for it.
    pub(super) fn begin(contract: &Contract, connect: &ConnectArgs) -> Result<Self, Problem> {
        let places = Places::default();
        let worker = Worker::handing_out(&contract.classes, &places).map_err(Problem::impossible)?;
        let config = WorkerConfig::default().groups(&contract.groups).concurrency(MOST_JOBS).grace(GRACE);
        worker.validate(&config).map_err(Problem::impossible)?;
        let ((trigger, shutdown), ended) = (Shutdown::manual(), CancellationToken::new());
        let (running, end) = (worker.run(connect.clone(), config, shutdown), ended.clone().drop_guard());
        let contract = contract.clone();
        tokio::spawn(async move {
            let _end = end;
            match running.await {
                Ok(_) => tracing::debug!(?contract, "a worker for clients has ended"),
                Err(error) => tracing::error!(?contract, error = chain(&error), "a worker for clients has failed"),
            }
        });
        Ok(Self { places, trigger, ended, used_at: Mutex::new(Monotonic::now()) })
    }

    pub(super) fn note_used(&self) {
        *self.used_at.lock() = Monotonic::now();
    }

    pub(super) fn idle_for(&self) -> Duration {
        self.used_at.lock().elapsed()
    }

    pub(super) fn stop(&self) {
        self.trigger.drain();
    }

    pub(super) async fn ended(&self) {
        self.ended.cancelled().await;
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended.is_cancelled()
    }

    /// Why there are no jobs of a worker that has ended.
    pub(super) fn problem(&self) -> Problem {
        Problem::new(StatusCode::SERVICE_UNAVAILABLE, "the worker of these classes has ended, since MongoDB cannot be used; ask again")
    }
}
