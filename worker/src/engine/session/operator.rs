//! What operators want: a quiet worker, a stop, the cancellation of a job.

use std::time::{Duration, Instant as Monotonic};

use recruiter_common::{
    ids::JobId,
    store::StoreError,
    telemetry::chain,
    workers::{Request, Wanted},
};

use super::Session;
use crate::cancellation::Cancellation;

/// The rules of redaction are read again after this time.
const REDACTION_FOR: Duration = Duration::from_secs(15);

impl Session {
    /// Reads what an operator wants, and does it.
    pub(super) async fn read_request(&mut self) {
        match self.store().wanted(self.id).await {
            Ok(request) => self.obey(request),
            Err(error) => tracing::debug!(error = chain(&error), "failed to read what an operator wants"),
        }
        self.progress();
    }

    /// Reads what of which classes may not be logged, once in a while.
    pub(super) async fn read_redaction(&mut self) {
        if self.redaction_at.elapsed() < REDACTION_FOR {
            return;
        }
        match self.store().refresh_redaction().await {
            Ok(()) => self.redaction_at = Monotonic::now(),
            Err(error) => tracing::debug!(error = chain(&error), "failed to read what is redacted; the last rules hold"),
        }
        self.progress();
    }

    /// Does what an operator wants, if it is not what was wanted before.
    fn obey(&mut self, request: Option<Request>) {
        if wanted(&self.request) == wanted(&request) {
            return;
        }
        match &request {
            None => tracing::info!(worker.id = %self.id, "an operator has resumed this worker: taking jobs again"),
            Some(Request { wanted: Wanted::Quiet, by, .. }) => {
                tracing::info!(worker.id = %self.id, by, "an operator has made this worker quiet: taking no jobs until it is resumed");
            }
            Some(Request { wanted: Wanted::Stop, by, .. }) => {
                tracing::info!(worker.id = %self.id, by, "an operator has stopped this worker");
                self.dependencies().notifier.stopping();
            }
        }
        self.work.set_quiet(request.is_some());
        self.request = request;
    }

    pub(super) fn is_stopped_by_operator(&self) -> bool {
        self.request.as_ref().is_some_and(|request| request.wanted == Wanted::Stop)
    }

    /// Makes a new session quiet, as the last one of this process was.
    pub(crate) async fn stay_quiet(&mut self, request: Request) -> Result<(), StoreError> {
        self.store().ask_worker(self.id, request.wanted, &request.by).await?;
        self.obey(Some(request));
        Ok(())
    }

    /// Finds cancellations whose hint was lost.
    pub(crate) async fn read_cancellations(&self) {
        let jobs = self.environment.held.started();
        if jobs.is_empty() {
            return;
        }
        match self.store().cancel_requests(&jobs).await {
            Ok(jobs) => jobs.into_iter().for_each(|job| self.cancel(job)),
            Err(error) => tracing::debug!(error = chain(&error), "failed to read requests for cancellation"),
        }
    }

    /// Cancels a job, if it runs here.
    pub(crate) fn cancel(&self, job: JobId) {
        if self.environment.held.cancel(job, Cancellation::Requested) {
            tracing::info!(job.id = %job, "cancelling a running job");
        }
    }
}

pub(super) fn wanted(request: &Option<Request>) -> Option<Wanted> {
    request.as_ref().map(|request| request.wanted)
}
