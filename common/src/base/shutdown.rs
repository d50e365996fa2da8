//! Requests to stop a process, and the only sleep in the loops.
//!
//! Used by the three programs, and by applications that run a worker in their own process. The first TERM, INT or HUP
//! requests a drain. A TERM or INT after it requests an immediate end. A service that reads its settings again at a HUP
//! ([`Shutdown::on_stop_signals`]) does not stop at it. The request is passed as a parameter to every wait and is never a global.

use std::time::Duration;

use tokio::sync::watch;
#[cfg(feature = "process")]
use {
    nix::sys::signal::Signal,
    procfs::process::Process,
    tokio::signal::unix::{Signal as HangUps, SignalKind, signal},
};

/// How urgently to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Level {
    Run,
    /// To take no more work, and to end what there is without a hurry.
    Leave,
    Drain,
    Abort,
}

/// A receiver of a stop request.
#[derive(Clone, Debug)]
pub struct Shutdown(watch::Receiver<Level>);

/// The sender of a stop request. Dropping it never stops anything.
#[derive(Clone, Debug)]
pub struct Trigger(watch::Sender<Level>);

/// Why a sleep ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wake {
    /// The duration has passed.
    Elapsed,
    /// A stop was requested.
    Stop,
}

impl Shutdown {
    /// A request that code in this process makes.
    pub fn manual() -> (Trigger, Self) {
        let (sender, receiver) = watch::channel(Level::Run);
        (Trigger(sender), Self(receiver))
    }

    /// A request made by signals. The first TERM or INT requests a drain, the second an abort. HUP, which a closing
    /// terminal sends, also requests a drain, unless the process was started with HUP ignored (`nohup`). HUP never
    /// aborts, because terminals send it more than once.
    ///
    /// # Errors
    /// When the process may not install signal handlers.
    #[cfg(feature = "process")]
    pub fn on_signals() -> std::io::Result<Self> {
        Self::on(if is_ignored(Signal::SIGHUP) { None } else { Some(signal(SignalKind::hangup())?) })
    }

    /// The same, but HUP requests nothing.
    ///
    /// # Errors
    /// When the process may not install signal handlers.
    #[cfg(feature = "process")]
    pub fn on_stop_signals() -> std::io::Result<Self> {
        Self::on(None)
    }

    #[cfg(feature = "process")]
    fn on(mut hang_up: Option<HangUps>) -> std::io::Result<Self> {
        let (trigger, shutdown) = Self::manual();
        let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        tokio::spawn(async move {
            let hung_up = async {
                match &mut hang_up {
                    Some(hang_up) => drop(hang_up.recv().await),
                    None => std::future::pending().await,
                }
            };
            tokio::select! { _ = terminate.recv() => {} _ = interrupt.recv() => {} () = hung_up => {} }
            tracing::info!("stop requested (send TERM or INT again to stop at once)");
            trigger.drain();
            tokio::select! { _ = terminate.recv() => {} _ = interrupt.recv() => {} }
            tracing::info!("second stop request: stopping at once");
            trigger.abort();
            std::future::pending::<()>().await;
        });
        Ok(shutdown)
    }

    /// A request that follows this one, and that its trigger can make alone. Must be called within a runtime.
    #[must_use]
    pub fn follow(&self) -> (Trigger, Self) {
        let (trigger, shutdown) = Self::manual();
        let (mut followed, follower) = (self.0.clone(), trigger.clone());
        tokio::spawn(async move {
            loop {
                follower.raise(*followed.borrow_and_update());
                tokio::select! {
                    changed = followed.changed() => if changed.is_err() { return },
                    () = follower.0.closed() => return,
                }
            }
        });
        (trigger, shutdown)
    }

    /// Whether a stop was requested.
    pub fn is_requested(&self) -> bool {
        *self.0.borrow() >= Level::Leave
    }

    /// Whether a stop was requested, and only [`Trigger::leave`] has requested it.
    pub fn is_patient(&self) -> bool {
        *self.0.borrow() == Level::Leave
    }

    /// Whether an immediate end was requested.
    pub fn is_aborted(&self) -> bool {
        *self.0.borrow() >= Level::Abort
    }

    /// Resolves when a stop is requested.
    pub async fn requested(&mut self) {
        self.reached(Level::Leave).await;
    }

    /// Resolves when a stop is requested that does not wait for everything.
    pub async fn pressed(&mut self) {
        self.reached(Level::Drain).await;
    }

    /// Resolves when an immediate end is requested.
    pub async fn aborted(&mut self) {
        self.reached(Level::Abort).await;
    }

    async fn reached(&mut self, level: Level) {
        if self.0.wait_for(|now| *now >= level).await.is_err() {
            std::future::pending().await
        }
    }

    /// Sleeps for `duration`, or until a stop is requested.
    pub async fn sleep(&mut self, duration: Duration) -> Wake {
        #[expect(clippy::disallowed_methods, reason = "the one place that sleeps")]
        let sleep = tokio::time::sleep(duration);
        tokio::select! { () = sleep => Wake::Elapsed, () = self.requested() => Wake::Stop }
    }
}

impl Trigger {
    /// Requests a stop as soon as all work has ended, however long that takes.
    pub fn leave(&self) {
        self.raise(Level::Leave);
    }

    /// Requests a drain.
    pub fn drain(&self) {
        self.raise(Level::Drain);
    }

    /// Requests an immediate end.
    pub fn abort(&self) {
        self.raise(Level::Abort);
    }

    fn raise(&self, level: Level) {
        self.0.send_if_modified(|now| std::mem::replace(now, level.max(*now)) < level);
    }
}

/// Whether this process was started with a signal ignored.
#[cfg(feature = "process")]
fn is_ignored(signal: Signal) -> bool {
    let ignored = Process::myself().and_then(|this| this.status()).map_or(0, |status| status.sigign);
    ignored >> (signal as u32 - 1) & 1 == 1
}

/// Sleeps even if a stop is requested. For pauses between attempts at an operation that must complete during the drain.
pub async fn pause(duration: Duration) {
    #[expect(clippy::disallowed_methods, reason = "the one place that sleeps")]
    tokio::time::sleep(duration).await;
}
