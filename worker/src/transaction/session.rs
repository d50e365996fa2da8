//! The session of an open transaction, lent to the body.

use std::{
    ops::{Deref, DerefMut},
    sync::Arc,
};

use parking_lot::Mutex;
use recruiter_common::mongodb::ClientSession;

/// The session of an open transaction. It is a [`ClientSession`], for `.session(&mut *session)`.
///
/// It is a value of its own and not a reference, because the compiler cannot prove yet that a future with a reference of any lifetime may
/// move between threads.
#[derive(Debug)]
pub struct TransactionSession {
    session: Option<ClientSession>,
    owner: Arc<Mutex<Option<ClientSession>>>,
}

impl TransactionSession {
    pub(super) fn new(session: ClientSession) -> (Self, Arc<Mutex<Option<ClientSession>>>) {
        let owner = Arc::new(Mutex::new(None));
        (Self { session: Some(session), owner: owner.clone() }, owner)
    }
}

impl Deref for TransactionSession {
    type Target = ClientSession;

    fn deref(&self) -> &ClientSession {
        self.session.as_ref().expect("it is given back when it is dropped")
    }
}

impl DerefMut for TransactionSession {
    fn deref_mut(&mut self) -> &mut ClientSession {
        self.session.as_mut().expect("it is given back when it is dropped")
    }
}

/// Gives the session back, for the end of the transaction.
impl Drop for TransactionSession {
    fn drop(&mut self) {
        *self.owner.lock() = self.session.take();
    }
}
