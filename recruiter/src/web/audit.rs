//! Changes, each with its entry in the audit: written before the change, and with what came out of it afterwards.
//!
//! A change whose entry cannot be written is refused. One that has begun goes on to its end and is noted, also if its client has gone.

use std::{net::IpAddr, sync::Arc};

use axum::{
    extract::FromRequestParts,
    http::{StatusCode, request::Parts},
};
use bson::Document;
use recruiter_common::{http::Peer, store::Intended, telemetry::chain};

use super::{Web, access::Caller, problem::Problem};

/// Who asks for a change.
#[derive(Debug)]
pub(super) struct Actor {
    caller: Caller,
    address: IpAddr,
}

impl FromRequestParts<Arc<Web>> for Actor {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &Arc<Web>) -> Result<Self, Problem> {
        let known = parts.extensions.get::<Caller>().zip(parts.extensions.get::<Peer>());
        let (caller, Peer(peer)) = known.ok_or_else(|| Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "it is not known who asks"))?;
        Ok(Self { caller: caller.clone(), address: peer.ip() })
    }
}

impl Actor {
    /// For those who see a pause or a request.
    pub(super) fn name(&self) -> String {
        self.caller.token().map_or_else(|| self.address.to_string(), |name| format!("{name}@{}", self.address))
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
            Some(web.store.intend(Intended { caller: caller.token(), address: address.to_string(), action, target }).await?)
        };
        let done = change.await;
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
