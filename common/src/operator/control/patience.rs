//! How long a call is repeated.

use std::time::Duration;

use backon::{ConstantBuilder, RetryableWithContext as _};

use crate::{
    base::{Patience, chain, pause},
    mongo::StoreError,
};

/// How long a batch is repeated after transient errors. It is longer than MongoDB keeps the open transaction of a
/// killed process, which is one minute.
const TRY_FOR: Duration = Duration::from_secs(75);
/// The repetitions until then.
const AGAIN: ConstantBuilder = ConstantBuilder::new().with_delay(Duration::from_secs(1)).without_max_times();

/// Repeats a call after transient errors.
pub(crate) async fn patiently<T, F>(mut call: impl FnMut() -> F) -> Result<T, StoreError>
where
    F: Future<Output = Result<T, StoreError>>,
{
    patiently_with((), |()| {
        let called = call();
        async { ((), called.await) }
    })
    .await
}

/// Repeats a call that changes `on`, and returns it, after transient errors.
pub(crate) async fn patiently_with<T, C, F>(on: C, call: impl FnMut(C) -> F) -> Result<T, StoreError>
where
    F: Future<Output = (C, Result<T, StoreError>)>,
{
    let patience = Patience::new(TRY_FOR);
    let call = call.retry(AGAIN).sleep(pause).context(on);
    let call = call.when(|error: &StoreError| error.may_pass() && !patience.is_over());
    let (_, done) = call.notify(|error, _| tracing::warn!(error = chain(error), "a batch of changes failed; trying again")).await;
    done
}
