//! The leader: what one recruiter does as long as it holds the lease.
//!
//! A *term* begins with the lease. The leader then keeps the lease and runs its *duties* beside each other, until another recruiter leads or
//! the process is asked to stop. A duty is a type with a `run` that loops until then. Assigning is the only duty so far: `rounds` is its loop, `assign`
//! one round.
//!
//! | module | one noun |
//! |---|---|
//! | `lease` | who leads, and how long that can be trusted |
//! | `rounds` | the duty of assigning: when the next round is due |
//! | `assign` | one round |
//! | `trigger` | what makes a round necessary |
//! | `fleet` | workers with free slots |
//! | `discover` | which lanes have jobs |
//! | `lanes` | the known due jobs, and when that knowledge is stale |
//! | `in_flight` | assigned jobs whose worker has not answered yet |
//! | `past_assignments` | assigned jobs that were not started |
//! | `plan` | which worker gets which job |
//! | `keep_alive` | the message that spares idle workers a query |
//! | `database` | what a round asks of MongoDB |
//! | `model` | tests: the rules of staleness against all that can happen to a job |

mod assign;
mod database;
mod discover;
mod fleet;
mod in_flight;
mod keep_alive;
mod lanes;
mod lease;
#[cfg(test)]
mod model;
mod past_assignments;
mod plan;
mod rounds;
mod trigger;

use std::time::Duration;

use recruiter_common::{
    ids::LeaseTerm,
    service::Watchdog,
    shutdown::Shutdown,
    store::{Store, StoreError},
    telemetry::chain,
};

pub(crate) use self::lease::Leadership;
use self::{assign::Assigning, rounds::Rounds};

/// After a term that could not begin.
const RETRY: Duration = Duration::from_millis(500);

/// Leads until the process is asked to stop or another recruiter leads. A full scan is due after each `poll`.
pub(crate) async fn lead(store: &Store, poll: Duration, leadership: Leadership, watchdog: &Watchdog, shutdown: &mut Shutdown) {
    tracing::info!(lease.term = leadership.term().0, "leading");
    let assigning = match begin(store, leadership.term()).await {
        Ok(assigning) => assigning,
        Err(error) => {
            tracing::warn!(error = chain(&error), "cannot begin the term; releasing the lease");
            leadership.release(store).await;
            shutdown.sleep(RETRY).await;
            return;
        }
    };
    recruiter_common::service::ready("leading");
    let rounds = Rounds { store, poll, leadership: &leadership, watchdog };
    let is_asked_to_stop = tokio::select! {
        () = rounds.run(assigning, shutdown) => true,
        // A round in the middle of which the lease is lost is dropped: its term matches no worker any more.
        () = leadership.keep(store) => false,
    };
    if is_asked_to_stop {
        leadership.release(store).await;
    }
}

/// Stamps the term on the roster, and then reads what an earlier leader has assigned.
async fn begin(store: &Store, term: LeaseTerm) -> Result<Assigning, StoreError> {
    store.stamp_term(term).await?;
    if let Err(error) = store.drop_outdated_indexes().await {
        tracing::warn!(error = chain(&error), "cannot drop the indexes of an earlier release; the next leader tries again");
    }
    let mut assigning = Assigning::default();
    for (round, assignment) in store.assigned_and_not_taken().await? {
        assigning.inherit(round, assignment);
    }
    Ok(assigning)
}

#[cfg(feature = "dev")]
/// One round of a leader that knows nothing yet; returns how many jobs it assigned.
pub(crate) async fn assign_once(store: &Store, term: LeaseTerm) -> Result<usize, StoreError> {
    Ok(Assigning::default().tick(store, term, trigger::Trigger::default(), Duration::from_secs(1)).await?.assigned)
}
