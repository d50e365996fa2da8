//! The rescues that run beside the polls of the roster: how many at a time, in which sessions, and whether they make progress.

use std::{
    collections::HashMap,
    panic::AssertUnwindSafe,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant as Monotonic},
};

use futures_util::{FutureExt as _, future::BoxFuture};
use recruiter_common::{
    ids::WorkerId,
    shutdown::Shutdown,
    store::{CommitSession, StoreError},
};
use tokio::{sync::Semaphore, task::JoinSet};

/// Maximum number of rescues at the same time. The others wait for their turn.
const AT_A_TIME: usize = 4;
/// A rescue hangs if one of its steps takes longer: each call to MongoDB ends far sooner.
const LONGEST_STEP: Duration = Duration::from_secs(60);

/// The rescues that have begun. A worker has one at a time.
pub(crate) struct Rescues {
    shutdown: Shutdown,
    turns: Arc<Semaphore>,
    tasks: JoinSet<Ended>,
    /// The rescues that were not collected yet.
    running: HashMap<WorkerId, Step>,
    /// Workers whose last rescue has failed, and its session: the next attempt uses it again.
    failed: HashMap<WorkerId, CommitSession>,
    /// Sessions for other rescues. The roster lists the sessions of rescues, and another cleaner may end them. Therefore none goes back to
    /// the driver, which would use it for other calls.
    spare: Arc<Mutex<Vec<CommitSession>>>,
}

/// When the present step of a rescue began; `None` while the rescue waits for its turn.
type Step = Arc<Mutex<Option<Monotonic>>>;

/// A rescue, as its code sees it.
pub(crate) struct Rescue {
    pub(crate) session: CommitSession,
    step: Step,
    shutdown: Shutdown,
}

struct Ended {
    worker: WorkerId,
    is_first: bool,
    result: Result<(), (Cause, CommitSession)>,
}

/// A rescue that has failed.
pub(crate) struct Failed {
    pub(crate) worker: WorkerId,
    /// Whether it was the first attempt.
    pub(crate) is_first: bool,
    pub(crate) cause: Cause,
}

pub(crate) enum Cause {
    Store(StoreError),
    /// An error of this program.
    Panic,
}

impl Rescue {
    /// Begins a step. Returns false if a stop is requested: then the rescue must end, and another cleaner continues.
    pub(crate) fn goes_on(&self) -> bool {
        *lock(&self.step) = Some(Monotonic::now());
        !self.shutdown.is_requested()
    }
}

impl Rescues {
    pub(crate) fn new(shutdown: Shutdown) -> Self {
        Self {
            shutdown,
            turns: Arc::new(Semaphore::new(AT_A_TIME)),
            tasks: JoinSet::new(),
            running: HashMap::new(),
            failed: HashMap::new(),
            spare: Arc::default(),
        }
    }

    /// Begins the rescue of a worker's jobs, unless one is running.
    pub(crate) fn begin<F>(&mut self, worker: WorkerId, rescue: F)
    where
        F: for<'r> FnOnce(&'r mut Rescue) -> BoxFuture<'r, Result<(), StoreError>> + Send + 'static,
    {
        if self.running.contains_key(&worker) {
            return;
        }
        let before = self.failed.remove(&worker);
        let (is_first, step, shutdown) = (before.is_none(), Step::default(), self.shutdown.clone());
        self.running.insert(worker, step.clone());
        let (turns, spare) = (self.turns.clone(), self.spare.clone());
        self.tasks.spawn(async move {
            let _turn = turns.acquire().await;
            let session = before.or_else(|| lock(&spare).pop()).unwrap_or_default();
            let mut this = Rescue { session, step, shutdown };
            let result = if this.goes_on() { AssertUnwindSafe(rescue(&mut this)).catch_unwind().await } else { Ok(Ok(())) };
            let result = match result {
                Ok(Ok(())) => {
                    lock(&spare).push(this.session);
                    Ok(())
                }
                Ok(Err(error)) => Err((Cause::Store(error), this.session)),
                Err(_) => Err((Cause::Panic, this.session)),
            };
            Ended { worker, is_first, result }
        });
    }

    /// Collects the rescues that have ended. Returns those that have failed.
    pub(crate) fn collect(&mut self) -> Vec<Failed> {
        let mut all = Vec::new();
        while let Some(ended) = self.tasks.try_join_next() {
            // A panic was caught, and no task is aborted.
            let Ok(Ended { worker, is_first, result }) = ended else { continue };
            self.running.remove(&worker);
            if let Err((cause, session)) = result {
                self.failed.insert(worker, session);
                all.push(Failed { worker, is_first, cause });
            }
        }
        all
    }

    /// Forgets the failures of other workers than these.
    pub(crate) fn forget_all_but(&mut self, is_known: impl Fn(WorkerId) -> bool) {
        lock(&self.spare).extend(self.failed.extract_if(|worker, _| !is_known(*worker)).map(|(_, session)| session));
    }

    /// Whether one of them hangs.
    pub(crate) fn one_hangs(&self) -> bool {
        self.running.values().any(|step| lock(step).is_some_and(|begun| begun.elapsed() > LONGEST_STEP))
    }

    /// Waits until all have ended.
    pub(crate) async fn end(&mut self) {
        while self.tasks.join_next().await.is_some() {}
    }
}

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::{sync::Notify, task::yield_now};

    use super::*;

    /// Waits until so many rescues are running or waiting for their turn. Returns the failures.
    async fn until(rescues: &mut Rescues, running: usize) -> Vec<Failed> {
        let mut failed = Vec::new();
        while rescues.running.len() > running {
            yield_now().await;
            failed.extend(rescues.collect());
        }
        failed
    }

    #[tokio::test]
    async fn a_rescue_that_hangs_or_panics_holds_up_no_other() {
        let mut rescues = Rescues::new(Shutdown::manual().1);
        let (hangs, panics) = (WorkerId::new(), WorkerId::new());
        let begun = Arc::new(AtomicUsize::new(0));
        for _ in 0..2 {
            let begun = begun.clone();
            rescues.begin(hangs, move |_| {
                begun.fetch_add(1, Ordering::Relaxed);
                std::future::pending().boxed()
            });
        }
        for is_first in [true, false] {
            rescues.begin(panics, |_| async { panic!("a panic that this test wants") }.boxed());
            (0..9).for_each(|_| rescues.begin(WorkerId::new(), |_| async { Ok(()) }.boxed()));
            let failed = until(&mut rescues, 1).await;
            assert!(
                matches!(failed[..], [Failed { worker, is_first: first, cause: Cause::Panic }] if worker == panics && first == is_first)
            );
            assert_eq!(rescues.failed.len(), 1);
            assert!((1..AT_A_TIME).contains(&lock(&rescues.spare).len()), "no more sessions than turns, and each is kept");
        }
        assert_eq!(begun.load(Ordering::Relaxed), 1, "it is running already");
        assert!(!rescues.one_hangs(), "not for long");
        let earlier = Monotonic::now() - LONGEST_STEP - Duration::from_secs(1);
        *lock(&rescues.running[&hangs]) = Some(earlier);
        assert!(rescues.one_hangs());
        rescues.forget_all_but(|worker| worker != panics);
        assert!(rescues.failed.is_empty() && lock(&rescues.spare).len() <= AT_A_TIME);
    }

    #[tokio::test]
    async fn at_a_stop_no_rescue_and_no_step_begins() {
        let (stop, shutdown) = Shutdown::manual();
        let mut rescues = Rescues::new(shutdown);
        let (goes_on, steps) = (Arc::new(Notify::new()), Arc::new(AtomicUsize::new(0)));
        for _ in 0..AT_A_TIME + 2 {
            let (goes_on, steps) = (goes_on.clone(), steps.clone());
            rescues.begin(WorkerId::new(), move |rescue| {
                async move {
                    while rescue.goes_on() {
                        steps.fetch_add(1, Ordering::Relaxed);
                        goes_on.notified().await;
                    }
                    Ok(())
                }
                .boxed()
            });
        }
        while steps.load(Ordering::Relaxed) < AT_A_TIME {
            yield_now().await;
        }
        stop.drain();
        goes_on.notify_waiters();
        rescues.end().await;
        assert_eq!(steps.load(Ordering::Relaxed), AT_A_TIME);
    }
}
