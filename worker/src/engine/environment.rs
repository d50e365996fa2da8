//! What the running jobs of one session share.

use std::{sync::Arc, time::Duration};

use recruiter_common::{instant::Instant, shutdown::pause};

use super::{deadline, dependencies::Dependencies, lease::Lease, recorder::Recorder, snooze, table::Table};
use crate::{
    cancellation::Cancel,
    context::Context,
    context::Transactions,
    event::WorkerEvent,
    outcome::{Done, NotDone},
    panics::guarded,
    registry::Ready,
};

/// Time between two checks of a lease that is over.
const CHECK_LEASE_EVERY: Duration = Duration::from_millis(50);

/// What the running jobs of one session share.
///
/// No workable may hold it: the recorder ends when all references to it are dropped, and a workable may never return.
pub(crate) struct Environment {
    pub(crate) dependencies: Arc<Dependencies>,
    pub(crate) table: Arc<Table>,
    pub(crate) lease: Arc<Lease>,
    pub(crate) recorder: Recorder,
    /// The sessions of transactions in which workables end their jobs.
    pub(crate) transactions: Arc<Transactions>,
}

impl Environment {
    /// Waits while the lease is over: then no job and no item begins, because another worker may be about to run it. Returns false if it
    /// must not begin at all. Asked directly before the workable, so that a process that was frozen after the start does not enter it.
    pub(crate) async fn may_begin(&self, cancel: &Cancel) -> bool {
        while self.lease.is_over() {
            if !cancel.allows_items() {
                return false;
            }
            tokio::select! { () = cancel.cancelled() => {} () = pause(CHECK_LEASE_EVERY) => {} }
        }
        true
    }

    /// Executes a job or an item within its limits.
    pub(crate) async fn execute(&self, workable: Arc<dyn Ready>, context: &Arc<Context>, limit: Option<Duration>) -> Result<Done, NotDone> {
        let ended = snooze::capped(deadline::execute(workable, context, limit, &self.dependencies.layers).await, &context.job);
        if let Err(NotDone::NoResources(failure)) = &ended {
            self.table.note_shortage(&failure.message);
        }
        ended
    }

    /// The time by the clock of the current primary, which decides when retries are due. An estimate if MongoDB does not answer.
    pub(crate) async fn now(&self) -> Instant {
        let _ = self.dependencies.store.fresh_clock().await;
        self.dependencies.store.now()
    }

    /// Reports an event to the application.
    pub(crate) fn emit(&self, event: &WorkerEvent<'_>) {
        if let Some(Err(failure)) = self.dependencies.listener.as_ref().map(|listener| guarded(|| listener(event))) {
            tracing::error!(error = failure.message, "an event listener panicked");
        }
    }
}
