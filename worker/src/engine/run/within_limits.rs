//! Executes one workable within its limits: time, cancellation, panics.
//!
//! A panic of a workable is caught here. Code of users that runs outside of a workable goes through [`panics`](crate::panics).

use std::{future::poll_fn, panic::AssertUnwindSafe, sync::Arc, task::Poll, time::Duration};

use futures_util::FutureExt as _;
use recruiter_common::{
    failure::{self, Failure},
    shutdown::pause,
};
use tokio::task::JoinError;
use tokio_util::task::AbortOnDropHandle;
use tracing::Instrument as _;

use crate::{
    cancellation::Cancellation,
    context::Context,
    layer::Layers,
    outcome::{Done, NotDone},
    panics,
    registry::Ready,
};

/// How long a cancelled workable may take to stop, unless it sets another time.
const STOPS_WITHIN: Duration = Duration::from_secs(2);

/// How an execution ended: by itself, or in a panic.
type Caught = std::thread::Result<Result<Done, NotDone>>;

/// Executes a workable and waits for its end.
///
/// An execution that never waits ends in this task. Every other execution gets its own task, so that it can be aborted.
pub(super) async fn execute(
    workable: Arc<dyn Ready>,
    context: &Arc<Context>,
    limit: Option<Duration>,
    layers: &Layers,
) -> Result<Done, NotDone> {
    if let Some(limit) = limit {
        context.deadline.begin(limit);
    }
    let (blocks, stops_within) = (workable.blocks(), workable.stops_within());
    let mut execution = {
        let (context, layers) = (context.clone(), layers.clone());
        let in_time = async move {
            let ended = layers.execute(&*workable, &context).await;
            match context.deadline.passed() {
                // The workable returned after its deadline without yielding, so that no timer ran.
                Some(limit) if context.cancel.why().is_none() => Err(timed_out(limit)),
                _ => ended,
            }
        };
        // An execution in its own task also logs in the span of its job.
        AssertUnwindSafe(in_time).catch_unwind().in_current_span().boxed()
    };
    match poll_fn(|task| Poll::Ready(execution.poll_unpin(task))).await {
        Poll::Ready(ended) => without_panic(Ok(ended)),
        Poll::Pending => {
            let task = AbortOnDropHandle::new(tokio::spawn(execution));
            watch(task, context, blocks, stops_within).boxed().await
        }
    }
}

/// Waits for the end of an execution. Cancels it when its time limit passes, and aborts it when it does not stop in time.
async fn watch(
    mut task: AbortOnDropHandle<Caught>,
    context: &Context,
    blocks: bool,
    stops_within: Option<Duration>,
) -> Result<Done, NotDone> {
    let cancel = &context.cancel;
    tokio::select! {
        biased;
        ended = &mut task => return without_panic(ended),
        () = context.deadline.pass() => cancel.cancel(Cancellation::TimeLimit),
        () = cancel.cancelled() => {}
    }
    let ended = if blocks {
        // A thread cannot be killed, and its job must not run twice. When the worker stops, the process ends first.
        without_panic((&mut task).await)
    } else {
        let by_reason = if cancel.why() == Some(Cancellation::TimeLimit) { Duration::ZERO } else { STOPS_WITHIN };
        let patience = stops_within.unwrap_or(by_reason);
        tokio::select! {
            ended = &mut task => without_panic(ended),
            () = pause(patience) => {
                task.abort();
                // The task must be gone before the end of the job is recorded.
                let _ = (&mut task).await;
                Err(NotDone::Stopped(Failure::new(failure::INTERRUPTED, "it did not stop when asked and was broken off")))
            }
        }
    };
    match (cancel.why(), context.deadline.passed()) {
        (Some(Cancellation::TimeLimit), Some(limit)) => Err(timed_out(limit)),
        _ => ended,
    }
}

fn timed_out(limit: Duration) -> NotDone {
    let message = format!("it took longer than its time limit of {}", humantime::format_duration(limit));
    NotDone::Failed(Failure::new(failure::TIMEOUT, message))
}

fn without_panic(joined: Result<Caught, JoinError>) -> Result<Done, NotDone> {
    match joined {
        Ok(Ok(ended)) => ended,
        Ok(Err(panic)) => Err(NotDone::Failed(panics::failure_of(panic.as_ref()))),
        Err(_) => Err(NotDone::Stopped(Failure::new(failure::INTERRUPTED, "it was broken off"))),
    }
}
