//! The registration of a session: its roster document, and the tasks that it starts.

use std::{sync::Arc, time::Instant as Monotonic};

use recruiter_common::{
    clock::Uptime,
    ids::WorkerId,
    store::{CommitSession, HeartbeatReply, Hint, Listener, Registration, Store, StoreError},
};
use tokio::sync::mpsc;

use super::{Session, leader::Leader, work::Work};
use crate::{
    context::Transactions,
    engine::{
        dependencies::Dependencies,
        environment::Environment,
        held::Held,
        lease::{Lease, heartbeat::Heartbeat},
        memory,
        record::recorder::Recorder,
    },
    registry::Registry,
};

impl Session {
    /// Registers this worker and starts its heartbeat and its recorder.
    pub(crate) async fn register(dependencies: Arc<Dependencies>) -> Result<Self, StoreError> {
        let (store, config) = (&dependencies.store, &dependencies.config);
        let id = WorkerId::new();
        let mut commits = CommitSession::default();
        let session = store.open_session(&mut commits).await?;
        let channel = store.join_channel().await?;
        // Listening begins before the registration, so that no hint is missed.
        let hints = store.hints(Listener::Worker(id, channel));
        let (work_on, classes) = dependencies.source.served(config, &dependencies.registry);
        let registration = Registration {
            id,
            work_on,
            classes,
            policies: dependencies.policies.classes().map(str::to_owned).collect(),
            class_slots: dependencies.registry.class_slots(),
            capacity: config.concurrency,
            lease_ms: i64::try_from(config.lease.as_millis()).unwrap_or(i64::MAX),
            channel,
            session: Some(session),
            process: dependencies.process.clone(),
        };
        declare_classes(store, &dependencies.registry).await?;
        // Before any job runs, whose failure may be logged.
        store.refresh_redaction().await?;
        let redaction_at = Monotonic::now();
        store.register(&registration).await?;
        // Before any slot is offered: a worker without a lease starts no job.
        let (lease, sent) = (Arc::new(Lease::default()), Uptime::now());
        if let HeartbeatReply::Seen { at, .. } = store.heartbeat(id, &[], memory::resident()).await? {
            lease.renew(sent, at, config.lease);
            dependencies.meters.heartbeats.acknowledged(sent, sent, at);
        }
        let (recorder, recording) = Recorder::start(Store::clone(store), id, commits, dependencies.meters.commits.clone());
        let registry = &dependencies.registry;
        let held = Held::new(config.concurrency, registry.threads.clone(), registry.class_slots());
        let held = Arc::new(held.for_clients(dependencies.source.places()));
        dependencies.watchdog.progress();
        let heartbeat = Heartbeat {
            store: dependencies.heartbeat_store.clone(),
            worker: id,
            held: held.clone(),
            lease: lease.clone(),
            every: config.heartbeat,
            lease_for: config.lease,
            watchdog: dependencies.watchdog.clone(),
            meters: dependencies.meters.heartbeats.clone(),
        };
        let (sender, news) = mpsc::channel(4);
        let beating = tokio::spawn(heartbeat.run(sender));
        let leader = Leader::new(config.heartbeat);
        let transactions = Arc::new(Transactions::new(dependencies.store.clone(), id));
        let environment = Arc::new(Environment { dependencies, held, lease, recorder, transactions });
        let work = Work::new(id, environment.clone());
        Ok(Self { id, environment, work, leader, hints, news, recording, beating, request: None, poll_at: Monotonic::now(), redaction_at })
    }

    /// Offers the slots of this worker to the recruiter, unless they are for own jobs.
    pub(crate) async fn offer_slots(&self) -> Result<(), StoreError> {
        if !self.dependencies().source.is_roster() {
            return Ok(());
        }
        let capacity = self.config().concurrency;
        self.store().make_available(self.id, self.work.offer().slots).await?;
        self.store().announce_hint(Hint::Free).await;
        let classes = self.dependencies().registry.classes().collect::<Vec<_>>().join(",");
        tracing::info!(worker.id = %self.id, worker.capacity = capacity, classes, "ready for work");
        self.dependencies().notifier.ready("waiting for jobs");
        Ok(())
    }
}

/// Declares the defaults of the classes of the workables file. Writes only what has changed.
async fn declare_classes(store: &Store, registry: &Registry) -> Result<(), StoreError> {
    if registry.defaults.is_empty() {
        return Ok(());
    }
    let mut declared = store.class_defaults().await?;
    for (class, defaults) in &registry.defaults {
        if declared.remove(class).unwrap_or_default() != *defaults {
            store.declare_class(class, defaults).await?;
        }
    }
    Ok(())
}
