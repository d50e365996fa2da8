//! Calls into code of users that runs outside of a workable's own task: decoding, policies, listeners, verdicts, destructors.
//!
//! A panic in such code is the failure of one job. It must not end the worker.

use std::{
    any::{Any, type_name},
    ops::Deref,
    panic::{AssertUnwindSafe, catch_unwind},
};

use recruiter_common::failure::{self, Failure};

/// Calls code of users. A panic is a failure of class `panic`.
pub(crate) fn guarded<T>(code: impl FnOnce() -> T) -> Result<T, Failure> {
    catch_unwind(AssertUnwindSafe(code)).map_err(|panic| failure_of(panic.as_ref()))
}

/// The failure that describes a panic.
pub(crate) fn failure_of(panic: &(dyn Any + Send)) -> Failure {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string).or_else(|| panic.downcast_ref::<String>().cloned());
    Failure::new(failure::PANIC, format!("it panicked: {}", text.unwrap_or_else(|| "without a message".into())))
}

/// A value of a user's type. A panic of its destructor is logged, and ends nothing.
pub(crate) struct GuardedDrop<T>(Option<T>);

impl<T> GuardedDrop<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(Some(value))
    }
}

impl<T> Deref for GuardedDrop<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().expect("it is taken only when it is dropped")
    }
}

impl<T> Drop for GuardedDrop<T> {
    fn drop(&mut self) {
        let value = self.0.take();
        if let Err(failure) = guarded(|| drop(value)) {
            tracing::error!(r#type = type_name::<T>(), error = failure.message, "a destructor panicked");
        }
    }
}
