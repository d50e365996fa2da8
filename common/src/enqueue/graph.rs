//! Enqueues jobs that wait for others: all of them in one transaction, after a check that the jobs outside of the call exist.

use std::collections::{BTreeSet, HashSet};

use mongodb::ClientSession;

use super::{EnqueueError, Enqueued, Outcome, Prepared};
use crate::{
    graphs::{InvalidGraph, edges_of},
    ids::JobId,
    store::{Hint, Inserted, Store, schema::Feature},
};

impl Store {
    /// Enqueues jobs of which some wait for others.
    pub(super) async fn enqueue_graph(&self, prepared: Prepared) -> Result<Vec<Enqueued>, EnqueueError> {
        self.prepare_graphs().await?;
        let (parents, prepared) = outside(prepared)?;
        self.note_followed(&parents).await?;
        let outcome = match self.insert_graph(prepared.documents, parents).await? {
            Inserted::New => Outcome::New,
            Inserted::Known => Outcome::KnownId,
            Inserted::Refused(problem) => return Err(problem.into()),
        };
        if outcome == Outcome::New {
            let groups: Vec<String> = prepared.groups.into_keys().collect();
            self.announce_hint(Hint::Jobs { groups, at: prepared.at, jobs: Vec::new() }).await;
            self.announce_hint(Hint::Waiting).await;
        }
        Ok(prepared.ids.into_iter().map(|id| Enqueued::new(id, outcome)).collect())
    }

    /// The same in the caller's transaction.
    pub(super) async fn enqueue_graph_in(&self, session: &mut ClientSession, prepared: Prepared) -> Result<Vec<Enqueued>, EnqueueError> {
        // The indexes cannot be made while the caller's transaction is open.
        if !self.is_in_use(Feature::Graphs).await? {
            return Err(EnqueueError::NotSetUpForGraphs { database: self.database().name().into() });
        }
        let (parents, prepared) = outside(prepared)?;
        let outcome = match self.insert_graph_in(session, prepared.documents, parents).await? {
            Inserted::New => Outcome::New,
            Inserted::Known => Outcome::KnownId,
            Inserted::Refused(problem) => return Err(problem.into()),
        };
        Ok(prepared.ids.into_iter().map(|id| Enqueued::new(id, outcome)).collect())
    }
}

/// The jobs that these jobs wait for and that are not among them.
fn outside(prepared: Prepared) -> Result<(Vec<JobId>, Prepared), InvalidGraph> {
    if !prepared.keyed.is_empty() {
        return Err(InvalidGraph::Unique);
    }
    let new: HashSet<JobId> = prepared.ids.iter().copied().collect();
    let mut parents = BTreeSet::new();
    for job in &prepared.documents {
        let edges = edges_of(job.get("waits_for"))?;
        parents.extend(edges.into_iter().map(|edge| edge.job).filter(|parent| !new.contains(parent)));
    }
    Ok((parents.into_iter().collect(), prepared))
}
