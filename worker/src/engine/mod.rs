//! The engine of a worker: takes assigned jobs, runs them, and records their ends.
//!
//! | module | what it is |
//! |---|---|
//! | `session` | one registration: the event loop |
//! | `own` | jobs that this process has enqueued and executes itself |
//! | `table`, `phases` | the jobs that a session holds, and the phase of each |
//! | `work` | takes assignments, starts and runs their jobs, and reports to the roster |
//! | `slots` | the tasks that run jobs, and the number of free slots |
//! | `prefetch` | the queue of jobs to start, and how many jobs are accepted ahead |
//! | `permits` | the permits of limited jobs that this worker holds |
//! | `class_limits` | how many jobs of a class this process holds at a time |
//! | `intake` | decides which assigned jobs can be started, and which locked jobs are run |
//! | `startable` | a job that this worker can start |
//! | `starts` | starts that MongoDB has not answered yet |
//! | `locked_ahead` | jobs that are started before a slot is free |
//! | `reading`, `portion` | assigned jobs, read in portions over a slow connection |
//! | `unconfirmed` | starts whose reply was lost or late |
//! | `skipped` | jobs that were assigned and not run |
//! | `turn` | the reports to the roster |
//! | `attempt` | context, run, verdict, record, hooks |
//! | `bundle`, `items` | many items in one job, on the same parts |
//! | `deadline` | limits, cancellation, panics |
//! | `traces` | the span of an execution in OpenTelemetry |
//! | `snooze` | the cap of snoozes |
//! | `continuation` | the jobs that a job becomes |
//! | `verdict` | what is recorded about an end: a pure function |
//! | `events` | the events and the log line of an attempt |
//! | `ran` | the end of an execution, for a caller |
//! | `solo` | executes a job without a session, for tests of applications |
//! | `recorder` | writes ends and item progress in batches |
//! | `drain` | the end of a session |
//! | `heartbeat`, `lease` | how long this worker may start jobs |
//! | `leader` | a warning when no recruiter leads |
//! | `shortage`, `memory` | limits of the machine |
//! | `dependencies`, `environment` | what all sessions of a process use; what all jobs of a session use |

mod attempt;
mod bundle;
mod class_limits;
mod continuation;
mod deadline;
pub(crate) mod dependencies;
mod drain;
mod environment;
mod events;
mod heartbeat;
mod intake;
mod items;
mod leader;
mod lease;
mod locked_ahead;
pub(crate) mod memory;
pub(crate) mod own;
mod permits;
mod phases;
mod portion;
mod prefetch;
pub(crate) mod ran;
mod reading;
pub(crate) mod recorder;
mod session;
mod shortage;
mod skipped;
mod slots;
mod snooze;
#[cfg(feature = "testing")]
pub mod solo;
mod startable;
mod starts;
mod table;
#[cfg(feature = "opentelemetry")]
mod traces;
mod turn;
mod unconfirmed;
mod verdict;
mod work;

use std::{sync::Arc, time::Duration};

use recruiter_common::{
    shutdown::{Shutdown, pause},
    store::StoreError,
    telemetry::chain,
    workers::Request,
};

use self::{
    dependencies::Dependencies,
    session::{Session, SessionEnd},
};
use crate::{Ended, WorkerError};

/// The time between attempts to register while MongoDB is away.
const REGISTER_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// Runs one session after the other until a stop is requested or the memory limit is reached.
///
/// # Errors
/// When a task of a session panics.
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
    let own = dependencies.own.clone();
    let mut session = Session::register(dependencies).await?;
    let offered = async {
        if let Some(request) = request.clone() {
            session.stay_quiet(request).await?;
        }
        session.offer_slots().await
    };
    let offered = offered.await;
    let wanted = if offered.is_ok() { session.run_jobs(shutdown).await } else { SessionEnd::Stopped };
    if let Some(own) = &own {
        own.close();
    }
    if offered.is_ok() {
        request.clone_from(&session.request);
    }
    let end = drain::drain(session, wanted, shutdown).await;
    if let Some(own) = &own {
        own.clear();
    }
    // A worker that was to stop does not return.
    let end = if (wanted, end) == (SessionEnd::Stopped, SessionEnd::Retired) { SessionEnd::Stopped } else { end };
    offered.map(|()| end)
}
