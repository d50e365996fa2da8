//! The leader: a recruiter while it holds the lease.
//!
//! A *term* begins when a recruiter acquires the lease. The leader then renews the lease and, at the same time, assigns jobs and enqueues the
//! jobs of schedules, until another recruiter leads or the process is asked to stop.
//!
//! | module | content |
//! |---|---|
//! | `lease` | the recruiter's lease, and how long this process may trust it |
//! | `database` | the MongoDB operations of a round |
//! | `fleet` | workers that accept jobs |
//! | `book` | where each assigned job is: in the turn of a worker, held ahead, given back, refused and paused |
//! | `admission` | may a job of a lane start now, and with which permit: limits, rates, windows, pauses, weights, ageing |
//! | `lanes` | which lanes have jobs, and the known due jobs: when that knowledge is stale, and the searches that refresh it |
//! | `plan` | in which order jobs are assigned, and which worker gets which |
//! | `rounds` | one round, and the loop of rounds: what makes the next one necessary |
//! | `schedules` | the jobs of schedules, beside the rounds |
//! | `consumers` | messages of consumer groups become jobs, beside the rounds |
//! | `dependencies` | jobs that wait for others are released or cancelled, beside the rounds |
//! | `asked` | parts of the schema are made for processes that may not make them, beside the rounds |
//! | `sampling` | numbers of waiting jobs for metrics, beside the rounds |
//! | `meters` | what is measured |
//! | `model` | tests: the rules of staleness for every order of events |
//! | `simulation` | what rounds cost with very many workers and keys, with a database in memory |

mod admission;
mod asked;
mod book;
mod consumers;
mod database;
mod dependencies;
mod fleet;
mod lanes;
mod lease;
mod meters;
#[cfg(test)]
mod model;
mod plan;
mod rounds;
mod sampling;
mod schedules;
#[cfg(feature = "simulation")]
pub(crate) mod simulation;

use std::time::{Duration, Instant};

use recruiter_common::{
    ids::LeaseTerm,
    service::Watchdog,
    shutdown::Shutdown,
    store::{HintsAt, Store, StoreError},
    telemetry::chain,
};

pub(crate) use self::{lease::Leadership, meters::Meters};
use tokio::sync::mpsc;

use self::{
    admission::Admission,
    consumers::Consumers,
    dependencies::Dependencies,
    rounds::{Rounds, round::Assigning, trigger::Trigger},
    schedules::Schedules,
};

/// Pause after a term that could not begin.
const RETRY: Duration = Duration::from_millis(500);

/// Leads until the process is asked to stop or another recruiter leads. A full scan is due after each `poll`. Other processes
/// exchange hints with the leader at `hints_at`.
pub(crate) async fn lead(
    store: &Store,
    poll: Duration,
    hints_at: &HintsAt,
    leadership: Leadership,
    watchdog: &Watchdog,
    meters: &mut Meters,
    shutdown: &mut Shutdown,
) {
    tracing::info!(lease.term = leadership.term().0, "leading");
    let assigning = match begin(store, leadership.term()).await {
        Ok(assigning) => assigning,
        Err(error) => {
            tracing::warn!(error = chain(&error), "cannot begin the term; releasing the lease");
            recruiter_common::service::not_ready("cannot begin to lead");
            leadership.release(store).await;
            shutdown.sleep(RETRY).await;
            return;
        }
    };
    recruiter_common::service::ready("leading");
    meters.begin(leadership.term());
    let ((ends, news), (release, released)) = (mpsc::unbounded_channel(), mpsc::unbounded_channel());
    let Meters { rounds: of_rounds, schedules: of_schedules, samples, .. } = meters;
    let mut rounds = Rounds { store, poll, hints_at, leadership: &leadership, watchdog, meters: of_rounds, ends, released };
    let mut schedules = Schedules::new(store, poll, &leadership, of_schedules);
    let mut dependencies = Dependencies::new(store, poll, news, release);
    let mut consumers = Consumers::new(store, &leadership);
    let [mut stopping, mut ending, mut finishing, mut leaving, mut making] = std::array::from_fn(|_| shutdown.clone());
    let sampling = async {
        if let Some(samples) = samples {
            samples.run(store, &leadership, &mut leaving).await;
        }
    };
    let duties = async {
        tokio::join!(
            rounds.run(assigning, shutdown),
            schedules.run(&mut stopping),
            dependencies.run(&mut ending),
            consumers.run(&mut finishing),
            asked::run(store, &mut making),
            sampling
        )
    };
    let may_hold_it = tokio::select! {
        ((), (), (), (), (), ()) = duties => true,
        // If the lease is lost during a round, the round is dropped. Its term matches no worker any more.
        may_hold_it = leadership.keep(store) => may_hold_it,
    };
    drop(consumers);
    recruiter_common::service::not_ready("the term is over");
    meters.end();
    if may_hold_it {
        leadership.release(store).await;
    }
}

/// Writes the term into the roster, and then reads the assignments of earlier leaders that are not taken yet.
async fn begin(store: &Store, term: LeaseTerm) -> Result<Assigning, StoreError> {
    store.stamp_term(term).await?;
    if let Err(error) = store.drop_outdated_indexes().await {
        tracing::warn!(error = chain(&error), "cannot drop the indexes of an earlier release; the next term tries again");
    }
    let (settings, held, kept) = tokio::try_join!(store.settings(), store.permit_holders(), store.kept_cells(term))?;
    let mut assigning = Assigning::default();
    assigning.admission = Admission::begin(settings, &held, kept, store.now());
    assigning.inherit(store.assigned_and_not_taken().await?, Instant::now());
    Ok(assigning)
}

/// One round of a leader with empty caches, to measure it. Returns the number of assigned jobs.
///
/// # Errors
/// When MongoDB refuses or cannot be reached.
pub async fn assign_once(store: &Store, term: LeaseTerm) -> Result<usize, StoreError> {
    Ok(Assigning::default().tick(store, term, Trigger::default(), Duration::from_secs(1)).await?.assigned)
}
