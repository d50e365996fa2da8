//! What an execution needs to end its job in a transaction of its own: sessions that the roster knows, and the outcome.

use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use recruiter_common::{ids::WorkerId, mongodb::ClientSession, store::Store};

use crate::outcome::{Done, NotDone};

/// The end of a job in a transaction of its own.
#[derive(Debug, Default)]
pub(crate) struct OwnEnd {
    pub(crate) done: OnceLock<Done>,
    /// Locked while the end and the commit are on their way.
    pub(crate) commit: Arc<tokio::sync::Mutex<()>>,
}

impl OwnEnd {
    /// The result with which the job has ended, once no commit is on its way.
    pub(crate) async fn settled(&self) -> Option<Done> {
        let _no_commit = self.commit.lock().await;
        self.done.get().cloned()
    }
}

/// The sessions of one worker for such transactions.
#[derive(Debug)]
pub(crate) struct Transactions {
    store: Arc<Store>,
    worker: WorkerId,
    free: Mutex<Vec<ClientSession>>,
}

impl Transactions {
    pub(crate) fn new(store: Arc<Store>, worker: WorkerId) -> Self {
        Self { store, worker, free: Mutex::default() }
    }

    /// A session that is in the roster. `None` if the worker was declared dead.
    pub(crate) async fn take(&self) -> Result<Option<ClientSession>, NotDone> {
        if let Some(session) = self.free.lock().pop() {
            return Ok(Some(session));
        }
        let session = self.store.start_session().await?;
        let is_known = self.store.record_transaction_session(self.worker, session.id().clone()).await?;
        Ok(is_known.then_some(session))
    }

    pub(crate) fn give_back(&self, session: ClientSession) {
        self.free.lock().push(session);
    }
}
