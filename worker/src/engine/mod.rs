//! The engine of a worker: takes assigned jobs, runs them, and records their ends.
//!
//! | module | what it is |
//! |---|---|
//! | `drain` | the end of a session |
//! | `session` | one registration: the event loop |
//! | `turn` | the reports to the roster |
//! | `starts` | reads assigned jobs and locks them |
//! | `run` | runs jobs |
//! | `environment` | what all jobs of a session use |
//! | `lease` | how long this worker may start jobs; its heartbeat |
//! | `held` | the jobs that a session holds, and the phase of each |
//! | `dependencies` | what all sessions of a process use |
//! | `meters` | what is measured |
//! | `outliving` | which classes often outlive the grace period |
//! | `source` | where the jobs come from: the roster, or this process |
//! | `record` | what is recorded about ends, and the task that writes it |
//! | `memory` | the resident memory of this process |
//!
//! A module uses those below it in this list.

pub(crate) mod dependencies;
mod drain;
mod environment;
mod held;
mod lease;
pub(crate) mod memory;
pub(crate) mod meters;
pub(crate) mod outliving;
mod record;
mod run;
mod session;
pub(crate) mod source;
mod starts;
mod turn;

use std::{sync::Arc, time::Duration};

use recruiter_common::{
    shutdown::{Shutdown, pause},
    store::StoreError,
    telemetry::chain,
    workers::Request,
};

pub use self::record::ran::Ran;
#[cfg(feature = "testing")]
pub use self::run::solo;
use self::{
    dependencies::Dependencies,
    session::{Session, SessionEnd},
};
use crate::{Ended, WorkerError};

/// The time between attempts to register while MongoDB is away.
const REGISTER_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// Runs one session after the other until a stop is requested, the memory limit is reached, or a task of a session panics.
pub(crate) async fn run(dependencies: Arc<Dependencies>, mut shutdown: Shutdown) -> Result<Ended, WorkerError> {
    let mut request = None;
    loop {
        dependencies.watchdog.progress();
        match run_session(dependencies.clone(), &mut request, &mut shutdown).await {
            Ok(SessionEnd::Stopped) => return Ok(Ended::Stopped),
            Ok(SessionEnd::MemoryLimit) => return Ok(Ended::MemoryLimit),
            Ok(SessionEnd::Broken) => return Err(WorkerError::Panicked("a task of this worker")),
            Ok(SessionEnd::Retired) if shutdown.is_requested() => return Ok(Ended::Stopped),
            Ok(SessionEnd::Retired) => {}
            Err(error) => {
                tracing::warn!(error = chain(&error), "failed to register; trying again in a second");
                if shutdown.is_requested() {
                    return Ok(Ended::Stopped);
                }
                tokio::select! { () = pause(REGISTER_AGAIN_AFTER) => {} () = shutdown.requested() => {} }
            }
        }
    }
}

/// Runs one session to its end. If the first offer of slots fails, the worker leaves the roster as after a stop. `request` is what an
/// operator wanted of the last session. A worker that was declared dead and returns stays quiet.
async fn run_session(
    dependencies: Arc<Dependencies>,
    request: &mut Option<Request>,
    shutdown: &mut Shutdown,
) -> Result<SessionEnd, StoreError> {
    dependencies.notifier.not_ready("not registered");
    let mut session = Session::register(dependencies.clone()).await?;
    let offered = async {
        if let Some(request) = request.clone() {
            session.stay_quiet(request).await?;
        }
        session.offer_slots().await
    };
    let offered = offered.await;
    let wanted = if offered.is_ok() { session.run_jobs(shutdown).await } else { SessionEnd::Stopped };
    dependencies.source.own().inspect(|own| own.close());
    if offered.is_ok() {
        request.clone_from(&session.request);
    }
    let end = drain::drain(session, wanted, shutdown).await;
    dependencies.source.session_ended();
    // A worker that was to stop does not return.
    let end = if (wanted, end) == (SessionEnd::Stopped, SessionEnd::Retired) { SessionEnd::Stopped } else { end };
    offered.map(|()| end)
}
