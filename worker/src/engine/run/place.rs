//! Where a job is executed: in a slot of a session, or alone.

use std::{
    sync::Arc,
    time::{Duration, Instant as Monotonic},
};

use recruiter_common::{ids::JobId, instant::Instant, store::Store, telemetry::milliseconds};

use super::{snooze, within_limits};
use crate::{
    Worker,
    context::Context,
    engine::environment::Environment,
    outcome::{Done, NotDone},
    registry::{Ready, Registry},
};

/// Where a job is executed.
#[derive(Clone, Copy)]
pub(super) enum Place<'a> {
    /// In a slot of a session.
    Session(&'a Environment),
    /// Outside of a session. Nothing cancels such an execution except its time limit.
    #[cfg_attr(not(feature = "testing"), expect(dead_code, reason = "for the test kit"))]
    Alone(&'a Alone<'a>),
}

/// What an execution outside of a session has.
pub(super) struct Alone<'a> {
    pub(super) worker: &'a Worker,
    pub(super) store: Option<&'a Arc<Store>>,
    pub(super) clock: &'a (dyn Fn() -> Instant + Sync),
}

impl<'a> Place<'a> {
    pub(super) fn registry(self) -> &'a Registry {
        match self {
            Self::Session(environment) => &environment.dependencies.registry,
            Self::Alone(alone) => &alone.worker.registry,
        }
    }

    pub(super) fn store(self) -> Option<&'a Arc<Store>> {
        match self {
            Self::Session(environment) => Some(&environment.dependencies.store),
            Self::Alone(alone) => alone.store,
        }
    }

    pub(super) fn now(self) -> Instant {
        match self {
            Self::Session(environment) => environment.dependencies.store.now(),
            Self::Alone(alone) => (alone.clock)(),
        }
    }

    /// Notes that the workable of a job has ended: its slot is free. Returns the time by the clock of the current primary, which decides when
    /// retries are due; an estimate if MongoDB does not answer.
    pub(super) async fn ended(self, job: JobId) -> Instant {
        if let Self::Session(environment) = self {
            environment.held.note_ended(job);
            let _ = environment.dependencies.store.fresh_clock().await;
        }
        self.now()
    }

    /// Executes the workable of a job or of an item within its limits. Warns if a stop would often interrupt such a job.
    pub(super) async fn execute(self, workable: Arc<dyn Ready>, context: &Arc<Context>, limit: Option<Duration>) -> Result<Done, NotDone> {
        let (layers, time_limit) = match self {
            Self::Session(environment) => (&environment.dependencies.layers, environment.dependencies.config.time_limit),
            Self::Alone(alone) => (&alone.worker.layers, None),
        };
        let began = Monotonic::now();
        let ended = snooze::capped(within_limits::execute(workable, context, limit.or(time_limit), layers).await, &context.job);
        let Self::Session(environment) = self else { return ended };
        if let Err(NotDone::NoResources(failure)) = &ended {
            environment.held.note_shortage(&failure.message);
        }
        let grace = environment.dependencies.config.grace;
        if environment.dependencies.outliving.note(&context.job.class, began.elapsed() > grace) {
            tracing::warn!(
                job.class = context.job.class,
                grace_ms = milliseconds(grace),
                "jobs of this class often run longer than the grace, so that a stop interrupts them: raise --grace and the time that the service manager waits, or let the jobs be shorter or continue from a checkpoint"
            );
        }
        ended
    }
}
