//! The cancellation of a running job.

use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicBool, Ordering},
};

use tokio_util::sync::CancellationToken;

/// Why a running job should stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Cancellation {
    /// A user or a program cancelled the job.
    Requested,
    /// The job exceeded its time limit.
    TimeLimit,
    /// The worker is stopping and its grace period is over.
    WorkerStopping,
    /// The worker reached its memory limit and the grace period is over. This attempt counts. Otherwise a job that takes every worker to
    /// its memory limit would run for ever.
    MemoryLimit,
    /// The worker no longer holds the job, usually because a cleaner declared the worker dead. The result of this execution will not be
    /// recorded, and the job may already run elsewhere.
    ClaimLost,
}

/// The worker's side of a running job's cancellation.
#[derive(Debug, Default)]
pub(crate) struct Cancel {
    token: CancellationToken,
    why: OnceLock<Cancellation>,
    /// The cancellation of the bundle that this item belongs to.
    bundle: Option<Arc<Cancel>>,
    /// Cancelled when a cancelled execution must end at once.
    at_once: CancellationToken,
    /// Whether a bundle stops before its next item.
    no_more_items: AtomicBool,
    is_claim_lost: AtomicBool,
}

impl Cancel {
    /// For one item of a bundle, which is cancelled with the bundle or alone.
    pub(crate) fn of_item(bundle: &Arc<Self>) -> Self {
        Self { token: bundle.token.child_token(), at_once: bundle.at_once.child_token(), bundle: Some(bundle.clone()), ..Self::default() }
    }

    /// Cancels the execution. The first reason is kept, except that the loss of the claim replaces every other reason, because the job may
    /// then belong to another worker.
    pub(crate) fn cancel(&self, why: Cancellation) {
        if why == Cancellation::ClaimLost {
            self.is_claim_lost.store(true, Ordering::Relaxed);
        }
        let _ = self.why.set(why);
        self.token.cancel();
    }

    /// The reason for the cancellation, of the item or of its bundle.
    pub(crate) fn why(&self) -> Option<Cancellation> {
        if self.is_claim_lost.load(Ordering::Relaxed) {
            return Some(Cancellation::ClaimLost);
        }
        self.why.get().copied().or_else(|| self.bundle.as_ref()?.why())
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.token.is_cancelled()
    }

    pub(crate) async fn cancelled(&self) {
        self.token.cancelled().await;
    }

    /// Makes a cancellation, earlier or later, end the execution at once, without time to clean up.
    pub(crate) fn hurry(&self) {
        self.at_once.cancel();
    }

    /// Resolves when there is no time left to clean up.
    #[cfg(feature = "process")]
    pub(crate) async fn at_once(&self) {
        self.at_once.cancelled().await;
    }

    /// Stops a bundle before its next item. The current item may end, and a single job is not affected.
    pub(crate) fn no_more_items(&self) {
        self.no_more_items.store(true, Ordering::Relaxed);
    }

    /// Whether a bundle may begin another item, and a started job may still wait for the lease.
    pub(crate) fn allows_items(&self) -> bool {
        !self.is_cancelled() && !self.no_more_items.load(Ordering::Relaxed)
    }
}
