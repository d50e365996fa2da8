//! Enqueues jobs that wait for others: all of them in one transaction, after a check that the jobs outside of the call exist.

use mongodb::ClientSession;

use super::{EnqueueError, Enqueued, Outcome, edges::outside, insert::Prepared, insert_graph::Inserted, invalid_graph::InvalidGraph};
use crate::{
    base::JobId,
    hints::Hint,
    mongo::{Feature, Store},
};

impl Store {
    /// Enqueues jobs of which some wait for others.
    pub(super) async fn enqueue_graph(&self, prepared: Prepared) -> Result<Vec<Enqueued>, EnqueueError> {
        self.prepare_graphs().await?;
        let parents = parents_of(&prepared)?;
        self.note_followed(&parents).await?;
        let outcome = outcome_of(self.insert_graph(prepared.documents, parents).await?)?;
        if outcome == Outcome::New {
            let groups: Vec<String> = prepared.groups.into_keys().collect();
            self.announce_hint(Hint::Jobs { groups, at: prepared.at, jobs: Vec::new() }).await;
            self.announce_hint(Hint::waiting(prepared.ids.clone())).await;
        }
        Ok(prepared.ids.into_iter().map(|id| Enqueued::new(id, outcome)).collect())
    }

    /// The same in the caller's transaction.
    pub(super) async fn enqueue_graph_in(&self, session: &mut ClientSession, prepared: Prepared) -> Result<Vec<Enqueued>, EnqueueError> {
        // The indexes cannot be made while the caller's transaction is open.
        if !self.is_in_use(Feature::Graphs).await? {
            return Err(EnqueueError::NotSetUpForGraphs { database: self.database().name().into() });
        }
        let parents = parents_of(&prepared)?;
        let outcome = outcome_of(self.insert_graph_in(session, prepared.documents, parents).await?)?;
        Ok(prepared.ids.into_iter().map(|id| Enqueued::new(id, outcome)).collect())
    }
}

fn outcome_of(inserted: Inserted) -> Result<Outcome, InvalidGraph> {
    match inserted {
        Inserted::New => Ok(Outcome::New),
        Inserted::Known => Ok(Outcome::KnownId),
        Inserted::Refused(problem) => Err(problem),
    }
}

/// Checks what `connect` cannot see, and returns the jobs outside of the call that these jobs wait for.
fn parents_of(prepared: &Prepared) -> Result<Vec<JobId>, InvalidGraph> {
    if prepared.keyed.is_empty() { outside(&prepared.documents) } else { Err(InvalidGraph::Unique) }
}
