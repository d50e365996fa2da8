//! Threads of blocking workables. Each execution has its own thread, outside of the runtime's pools, which other code uses too.
//!
//! A thread cannot be killed: it may outlive the session that started it. Such a thread is abandoned, and reduces the free slots until it
//! ends.

use std::{
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use parking_lot::Mutex;
use tokio::{
    runtime::Handle,
    sync::{Notify, oneshot},
};

/// The threads of a worker's blocking workables.
#[derive(Clone, Debug, Default)]
pub(crate) struct Threads(Arc<Abandoned>);

/// The threads that no caller waits for any more.
#[derive(Debug, Default)]
struct Abandoned {
    count: Mutex<u32>,
    changed: Notify,
}

/// One of the two sides of a thread: the caller, or the thread itself.
struct Side {
    threads: Threads,
    /// Whether the other side is gone.
    is_alone: Arc<AtomicBool>,
    is_thread: bool,
}

impl Threads {
    /// Runs `work` in a thread of its own, within the caller's runtime and span. Returns its result or its panic. Fails if no thread can be
    /// started.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        name: &str,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<thread::Result<T>> {
        let (sender, ended) = oneshot::channel();
        let (runtime, span) = (Handle::current(), tracing::Span::current());
        let (caller, running) = self.sides();
        thread::Builder::new().name(name.to_owned()).spawn(move || {
            let _runtime = runtime.enter();
            let result = span.in_scope(|| catch_unwind(AssertUnwindSafe(work)));
            // Before the result is sent: a thread whose caller waits is never counted.
            drop(running);
            let _ = sender.send(result);
        })?;
        let result = ended.await.map_err(io::Error::other);
        drop(caller);
        result
    }

    /// The number of threads that still run and that no caller waits for.
    pub(crate) fn abandoned(&self) -> u32 {
        *self.0.count.lock()
    }

    /// Waits until the number of abandoned threads has changed.
    pub(crate) async fn changed(&self) {
        self.0.changed.notified().await;
    }

    fn sides(&self) -> (Side, Side) {
        let is_alone = Arc::new(AtomicBool::new(false));
        let side = |is_thread| Side { threads: self.clone(), is_alone: is_alone.clone(), is_thread };
        (side(false), side(true))
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        // First the lock, so that the two sides are dropped one after the other.
        let mut count = self.threads.0.count.lock();
        match (self.is_thread, self.is_alone.swap(true, Ordering::Relaxed)) {
            (false, false) => *count += 1,
            (true, true) => *count -= 1,
            // The thread ended first.
            (true, false) | (false, true) => return,
        }
        self.threads.0.changed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, time::Duration};

    use super::*;

    #[tokio::test]
    async fn work_has_a_thread_of_its_name_in_the_runtime_of_its_caller() {
        let work = || (thread::current().name().map(str::to_owned), Handle::try_current().is_ok());
        assert_eq!(Threads::default().run("CountPrimes", work).await.unwrap().unwrap(), (Some("CountPrimes".into()), true));
        assert!(Threads::default().run("panics", || panic!("a panic that this test wants")).await.unwrap().is_err());
    }

    /// Tokio's pool has one thread here, and it is taken.
    #[test]
    fn work_needs_no_thread_of_the_runtime() {
        let runtime = tokio::runtime::Builder::new_current_thread().max_blocking_threads(1).build().unwrap();
        let (let_go, wait) = mpsc::channel::<()>();
        let taken = runtime.spawn_blocking(move || wait.recv());
        assert_eq!(runtime.block_on(Threads::default().run("x", || 7)).unwrap().unwrap(), 7);
        let_go.send(()).unwrap();
        runtime.block_on(taken).unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_thread_that_nothing_waits_for_counts_until_it_ends() {
        let threads = Threads::default();
        let (let_go, wait) = mpsc::channel::<()>();
        let (started, mut is_started) = oneshot::channel();
        let work = move || {
            let _ = started.send(());
            let _ = wait.recv();
        };
        tokio::select! { _ = threads.run("x", work) => unreachable!("it waits"), _ = &mut is_started => {} }
        assert_eq!(threads.abandoned(), 1);
        threads.changed().await;
        let_go.send(()).unwrap();
        tokio::time::timeout(Duration::from_secs(300), threads.changed()).await.expect("it has ended");
        assert_eq!(threads.abandoned(), 0);
    }
}
