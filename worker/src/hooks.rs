//! Calls hooks, which are code of users, each with a time limit. The end of the job is recorded before, so a hook cannot change it.

use std::{panic::AssertUnwindSafe, time::Duration};

use futures_util::FutureExt as _;

use crate::{context::Context, panics::failure_of};

/// How long one hook may take. The slot of its job is free already. The session counts the job against its limit of unrecorded jobs.
const MAY_TAKE: Duration = Duration::from_secs(60);

/// Calls one hook.
pub(crate) async fn hook(name: &str, job: &Context, call: impl AsyncFnOnce()) {
    hook_within(MAY_TAKE, name, job, call).await;
}

async fn hook_within(limit: Duration, name: &str, job: &Context, call: impl AsyncFnOnce()) {
    // The block also catches a panic before the first wait.
    let called = AssertUnwindSafe(async { call().await }).catch_unwind();
    let (id, item) = (job.job_id(), job.item().map(|item| item.index));
    match tokio::time::timeout(limit, called).await {
        Ok(Ok(())) => {}
        Ok(Err(panic)) => tracing::error!(job.id = %id, item, hook = name, error = failure_of(panic.as_ref()).message, "a hook panicked"),
        Err(_) => tracing::error!(job.id = %id, item, hook = name, "a hook took too long: nothing waits for it any more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_hook_that_panics_or_hangs_ends_alone() {
        let job = Context::for_tests().build();
        hook("panics", &job, async || panic!("a panic that this test wants")).await;
        hook_within(Duration::from_millis(10), "hangs", &job, std::future::pending).await;
    }
}
