//! What the running jobs of one session share.

use std::sync::Arc;

use super::{dependencies::Dependencies, held::Held, lease::Lease, record::recorder::Recorder};
use crate::context::Transactions;

/// No workable may hold it: the recorder ends when all references to it are dropped, and a workable may never return.
pub(crate) struct Environment {
    pub(crate) dependencies: Arc<Dependencies>,
    pub(crate) held: Arc<Held>,
    pub(crate) lease: Arc<Lease>,
    pub(crate) recorder: Recorder,
    /// The sessions of transactions in which workables end their jobs.
    pub(crate) transactions: Arc<Transactions>,
}
