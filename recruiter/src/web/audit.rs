//! Changes, each with its entry in the audit: written before the change, and with what came out of it afterwards.
//!
//! A change whose entry cannot be written is refused. One that has begun goes on to its end and is noted, also if its client has gone.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    sync::{Arc, atomic::Ordering},
};

use axum::{
    extract::FromRequestParts,
    http::{StatusCode, request::Parts},
};
use bson::{Document, doc};
use recruiter_common::{control::Change, http::Peer, store::Intended, telemetry::chain, workers::WorkerChange};

use super::{
    Web,
    access::{Caller, address},
    problem::Problem,
};
use crate::views::outcome::Outcome;

/// Who asks for a change.
#[derive(Debug)]
pub(super) struct Actor {
    caller: Caller,
    address: IpAddr,
}

impl FromRequestParts<Arc<Web>> for Actor {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, web: &Arc<Web>) -> Result<Self, Problem> {
        let known = parts.extensions.get::<Caller>().zip(parts.extensions.get::<Peer>());
        let (caller, Peer(peer)) = known.ok_or_else(|| Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "it is not known who asks"))?;
        Ok(Self { caller: caller.clone(), address: address(web, peer.ip(), &parts.headers) })
    }
}

impl Actor {
    /// For those who see a pause or a request.
    pub(super) fn name(&self) -> String {
        self.caller.given_name().map_or_else(|| self.address.to_string(), |name| format!("{name}@{}", self.address))
    }

    /// Something that this client wants changed: what is done, for example `jobs.cancel`, and to what.
    pub(super) fn wants(self, action: &'static str, target: Document, dry_run: bool) -> Action {
        Action { actor: self, action, target, dry_run }
    }
}

/// A change that a client wants.
#[derive(Debug)]
pub(super) struct Action {
    actor: Actor,
    action: &'static str,
    target: Document,
    dry_run: bool,
}

impl Action {
    /// Does it. `change` returns the answer, and what the audit says about it. A dry run has no entry.
    ///
    /// # Errors
    /// Those of the change, and when the entry cannot be written: then nothing is changed.
    pub(super) async fn by<T: Send + 'static>(
        self,
        web: &Arc<Web>,
        change: impl Future<Output = Result<(T, Document), Problem>> + Send + 'static,
    ) -> Result<T, Problem> {
        let done = web.tasks.spawn(self.audited(web.clone(), change)).await;
        done.unwrap_or_else(|died| Err(Problem::new(StatusCode::INTERNAL_SERVER_ERROR, died)))
    }

    async fn audited<T>(self, web: Arc<Web>, change: impl Future<Output = Result<(T, Document), Problem>> + Send) -> Result<T, Problem> {
        let Self { actor: Actor { caller, address }, action, target, dry_run } = self;
        let entry = if dry_run {
            None
        } else {
            Some(web.store.intend(Intended { caller: caller.given_name(), address: address.to_string(), action, target }).await?)
        };
        let done = change.await;
        // Also after an error: it may have been done.
        web.changed.fetch_add(1, Ordering::Relaxed);
        let outcome = match &done {
            Ok((_, outcome)) => outcome.clone(),
            Err(problem) => problem.outcome(),
        };
        tracing::info!(caller = caller.name(), action, %outcome, dry_run, "a client has asked for a change");
        if let Some(entry) = entry
            && let Err(error) = web.store.note_outcome(entry, outcome).await
        {
            tracing::error!(error = chain(&error), action, "the audit does not say what came out of a change");
        }
        done.map(|(answer, _)| answer)
    }
}

/// The name of the change of a job.
pub(super) fn job_action(change: &Change) -> &'static str {
    match change {
        Change::Retry { .. } => "jobs.retry",
        Change::Alter(_) => "jobs.change",
        Change::Cancel => "jobs.cancel",
        Change::Delete => "jobs.delete",
    }
}

/// The name of the change of a worker.
pub(super) fn worker_action(change: WorkerChange) -> &'static str {
    match change {
        WorkerChange::Quiet => "workers.quiet",
        WorkerChange::Resume => "workers.resume",
        WorkerChange::Stop => "workers.stop",
    }
}

/// What came out of the change of a job.
pub(super) fn noted(outcome: &Outcome) -> Document {
    let mut noted = doc! { "outcome": outcome.outcome };
    noted.extend(outcome.new_id.as_ref().map(|id| ("new_id".to_owned(), id.into())));
    noted
}

/// How many times there is each outcome.
pub(super) fn counted<'a>(outcomes: impl Iterator<Item = &'a str>) -> Document {
    let mut counts: BTreeMap<&str, i64> = BTreeMap::new();
    outcomes.for_each(|outcome| *counts.entry(outcome).or_default() += 1);
    let matched: i64 = counts.values().sum();
    doc! { "matched": matched, "outcomes": counts.into_iter().map(|(outcome, count)| (outcome.to_owned(), count.into())).collect::<Document>() }
}
