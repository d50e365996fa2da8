//! The workers of a process, one after the other: at HUP it reads its settings again, and another worker with them begins. The one before
//! takes no more jobs, and ends when those that it runs have ended, however long that takes.
//!
//! So new settings interrupt no job, and no job waits for them. Web servers replace their workers in this way, for example nginx.

use std::sync::Arc;

use recruiter_common::{
    service::{self, Notifier, Replaced},
    shutdown::{Shutdown, Trigger},
    store::{ConnectArgs, Store},
    telemetry::chain,
};
use tokio::{
    signal::unix::Signal,
    sync::mpsc,
    task::{JoinError, JoinHandle, JoinSet},
};

use crate::{Ended, Worker, WorkerError, config::WorkerConfig, engine::source::Source};

/// A worker as the settings describe it.
pub(crate) struct Settled {
    pub(crate) worker: Worker,
    pub(crate) connect: ConnectArgs,
    pub(crate) config: WorkerConfig,
}

/// The workers that new settings describe, each with its connection.
pub(crate) type Reloads = mpsc::Receiver<Connected>;

/// A worker that can begin.
pub(crate) struct Connected {
    worker: Worker,
    store: Store,
    config: WorkerConfig,
}

/// A worker that runs.
struct Generation {
    task: JoinHandle<Result<Ended, WorkerError>>,
    trigger: Trigger,
    replaced: Replaced,
}

/// Reads the settings again at each HUP. Settings that are wrong, or whose MongoDB cannot be used, are logged, and those of before stay.
pub(crate) fn reload_at(mut hang_ups: Signal, read: impl Fn() -> anyhow::Result<Settled> + Send + 'static) -> Reloads {
    let (sender, reloads) = mpsc::channel(1);
    tokio::spawn(async move {
        while hang_ups.recv().await.is_some() {
            service::reloading();
            tracing::info!("reading the settings again");
            let connected = match read() {
                Ok(settled) => settled.connect().await.map_err(anyhow::Error::from),
                Err(error) => Err(error),
            };
            match connected {
                Ok(connected) => drop(sender.send(connected).await),
                Err(error) => {
                    tracing::error!(error = format!("{error:#}"), "the new settings are not used: those of before stay in use");
                    service::ready("the new settings are wrong and not used");
                }
            }
        }
    });
    reloads
}

/// Runs the first worker, and those of `reloads` after it, until the newest one ends or a stop is requested.
pub(crate) async fn run(first: Settled, mut shutdown: Shutdown, mut reloads: Reloads) -> Result<Ended, WorkerError> {
    let first = tokio::select! {
        connected = first.connect() => connected?,
        () = shutdown.requested() => return Ok(Ended::Stopped),
    };
    let (all, every) = shutdown.follow();
    let (mut newest, mut older) = (first.begin(&every), JoinSet::new());
    loop {
        tokio::select! {
            ended = &mut newest.task => {
                all.drain();
                while let Some(ended) = older.join_next().await {
                    note(ended);
                }
                return of_task(ended);
            }
            Some(next) = reloads.recv() => {
                newest.replaced.note();
                let Generation { task, trigger, .. } = std::mem::replace(&mut newest, next.begin(&every));
                trigger.leave();
                older.spawn(task);
                tracing::info!(count = older.len(), "the new settings are in use; workers with older ones end with their jobs");
            }
            Some(ended) = older.join_next() => note(ended),
        }
    }
}

impl Settled {
    async fn connect(self) -> Result<Connected, WorkerError> {
        let Self { worker, connect, config } = self;
        worker.validate(&config)?;
        Ok(Connected { worker, store: Store::connect(connect, "recruiter-worker").await?, config })
    }
}

impl Connected {
    fn begin(self, every: &Shutdown) -> Generation {
        let (Self { worker, store, config }, (trigger, shutdown), replaced) = (self, every.follow(), Replaced::default());
        let running = worker.run_over(Arc::new(store), config, shutdown, Notifier::Process(replaced.clone()), Source::Roster);
        Generation { task: tokio::spawn(running), trigger, replaced }
    }
}

type OfTask = Result<Result<Ended, WorkerError>, JoinError>;

fn of_task(ended: OfTask) -> Result<Ended, WorkerError> {
    ended.unwrap_or(Err(WorkerError::Panicked("a worker")))
}

/// Notes the end of a worker with older settings. A cleaner rescues the jobs of one that has failed.
fn note(ended: Result<OfTask, JoinError>) {
    match ended.map(of_task) {
        Ok(Ok(Ended::Stopped | Ended::MemoryLimit)) => tracing::info!("a worker with older settings has ended"),
        Ok(Err(error)) => tracing::error!(error = chain(&error), "a worker with older settings has failed"),
        Err(error) => tracing::error!(%error, "a worker with older settings has failed"),
    }
}
