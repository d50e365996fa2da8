//! Why the body of a transaction ends without success.

use std::{error::Error, fmt};

use recruiter_common::{
    mongodb::error::{Error as MongoError, TRANSIENT_TRANSACTION_ERROR},
    store::DriverError,
};

use crate::outcome::NotDone;

/// Why the body of a transaction ends without success. `?` converts any error, and [`NotDone`].
///
/// A transaction whose error MongoDB calls transient, such as a write conflict, is repeated.
#[derive(Debug)]
pub struct Abort {
    pub(super) not_done: NotDone,
    pub(super) is_transient: bool,
}

impl fmt::Display for Abort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let failure = self.not_done.failure();
        write!(f, "{}: {}", failure.class, failure.message)
    }
}

impl From<NotDone> for Abort {
    fn from(not_done: NotDone) -> Self {
        Self { not_done, is_transient: false }
    }
}

impl<E: Into<Box<dyn Error + Send + Sync>>> From<E> for Abort {
    fn from(error: E) -> Self {
        let error = error.into();
        let (mut is_transient, mut next) = (false, Some(&*error as &(dyn Error + 'static)));
        while let Some(cause) = next {
            let driver = cause.downcast_ref::<MongoError>().or_else(|| cause.downcast_ref::<DriverError>().map(|error| &**error));
            is_transient |= driver.is_some_and(|error| error.contains_label(TRANSIENT_TRANSACTION_ERROR));
            next = cause.source();
        }
        Self { not_done: NotDone::of::<E>(&*error), is_transient }
    }
}
