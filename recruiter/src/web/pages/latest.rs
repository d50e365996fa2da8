//! A reading of MongoDB that all who look at a page share, so that a hundred open pages cost what one does.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use axum::http::StatusCode;
use parking_lot::Mutex as QuickMutex;
use tokio::sync::Mutex;
use tokio_util::task::TaskTracker;

use super::super::problem::Problem;

/// A reading is not repeated within this time.
const AT_MOST_EVERY: Duration = Duration::from_secs(2);
/// The same of one that pages repeat a second after an event, which it then shows.
const AFTER_EVENTS: Duration = Duration::from_millis(900);
/// Nor within this many times the time that it took.
const RARER: u32 = 10;
/// The most readings of one kind that are kept.
const MOST: usize = 100;

/// The latest reading.
pub(super) struct Latest<T>(Arc<Mutex<Option<Taken<T>>>>);

struct Taken<T> {
    until: Instant,
    /// How many changes had ended before.
    changed: u64,
    /// A reading that failed is not repeated by each of those who wait for it.
    read: Result<Arc<T>, Problem>,
}

impl<T> Default for Latest<T> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

/// The latest readings of what is asked for by name or filter.
pub(super) struct LatestOf<T>(QuickMutex<HashMap<String, Latest<T>>>);

impl<T> Default for LatestOf<T> {
    fn default() -> Self {
        Self(QuickMutex::default())
    }
}

impl<T> LatestOf<T> {
    /// The one of this name. Where too many are kept, others that look at the same do not share it.
    pub(super) fn of(&self, name: &str) -> Latest<T> {
        let mut kept = self.0.lock();
        kept.retain(|_, latest| latest.is_kept());
        if kept.len() < MOST {
            kept.entry(name.to_owned()).or_default().share()
        } else {
            kept.get(name).map_or_else(Latest::default, Latest::share)
        }
    }
}

impl<T> Latest<T> {
    fn share(&self) -> Self {
        Self(self.0.clone())
    }

    /// Whether somebody reads it, or may share it.
    fn is_kept(&self) -> bool {
        self.0
            .try_lock()
            .map_or(true, |taken| Arc::strong_count(&self.0) > 1 || taken.as_ref().is_some_and(|taken| taken.until > Instant::now()))
    }
}

impl<T: Send + Sync + 'static> Latest<T> {
    /// The latest reading, if it is new enough, or the next one. It goes on to its end, also if its reader has gone.
    pub(super) async fn get(
        &self,
        tasks: &TaskTracker,
        read: impl Future<Output = Result<T, Problem>> + Send + 'static,
    ) -> Result<Arc<T>, Problem> {
        self.read(tasks, (0, AT_MOST_EVERY), read).await
    }

    /// The same for what follows events, and not from before so many changes of this process: who changes something sees it at once.
    pub(super) async fn after(
        &self,
        tasks: &TaskTracker,
        changed: u64,
        read: impl Future<Output = Result<T, Problem>> + Send + 'static,
    ) -> Result<Arc<T>, Problem> {
        self.read(tasks, (changed, AFTER_EVENTS), read).await
    }

    async fn read(
        &self,
        tasks: &TaskTracker,
        (changed, every): (u64, Duration),
        read: impl Future<Output = Result<T, Problem>> + Send + 'static,
    ) -> Result<Arc<T>, Problem> {
        let mut taken = self.0.clone().lock_owned().await;
        if let Some(taken) = taken.as_ref().filter(|taken| taken.changed >= changed && taken.until > Instant::now()) {
            return taken.read.clone();
        }
        let reading = tasks.spawn(async move {
            let begun = Instant::now();
            let read = read.await.map(Arc::new);
            let pause = if read.is_ok() { (begun.elapsed() * RARER).max(every) } else { every };
            *taken = Some(Taken { until: Instant::now() + pause, changed, read: read.clone() });
            read
        });
        reading.await.unwrap_or_else(|died| Err(Problem::new(StatusCode::INTERNAL_SERVER_ERROR, died)))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn those_who_look_at_the_same_time_share_a_reading() {
        let (latest, readings) = (Latest::default(), Arc::new(AtomicUsize::new(0)));
        for _ in 0..100 {
            let readings = readings.clone();
            let read = async move { Ok(readings.fetch_add(1, Ordering::Relaxed)) };
            assert_eq!(*latest.get(&TaskTracker::new(), read).await.unwrap(), 0);
        }
        let failing = Latest::<()>::default();
        for expected in ["first", "second"] {
            let read = async move { Err(Problem::bad(expected)) };
            assert_eq!(failing.get(&TaskTracker::new(), read).await.unwrap_err().into_detail(), "first");
        }
    }

    #[tokio::test]
    async fn a_reading_from_before_a_change_is_not_shown_after_it() {
        let (latest, tasks) = (Latest::default(), TaskTracker::new());
        for (changed, value, expected) in [(3, 1, 1), (3, 2, 1), (4, 3, 3), (3, 4, 3), (0, 5, 3)] {
            assert_eq!(*latest.after(&tasks, changed, async move { Ok(value) }).await.unwrap(), expected);
        }
    }

    #[tokio::test]
    async fn readings_are_shared_by_name_and_no_more_are_kept_than_that() {
        let (all, tasks) = (LatestOf::default(), TaskTracker::new());
        for (name, value, expected) in [("a", 1, 1), ("b", 2, 2), ("a", 3, 1), ("b", 4, 2)] {
            assert_eq!(*all.of(name).get(&tasks, async move { Ok(value) }).await.unwrap(), expected);
        }
        for number in 0..2 * MOST {
            all.of(&number.to_string()).get(&tasks, async { Ok(0) }).await.unwrap();
        }
        assert_eq!(all.0.lock().len(), MOST);
        assert_eq!(*all.of("a").get(&tasks, async { Ok(5) }).await.unwrap(), 1);
        all.0.lock().retain(|_, latest| {
            latest.0.try_lock().unwrap().as_mut().unwrap().until = Instant::now();
            true
        });
        assert_eq!(*all.of("a").get(&tasks, async { Ok(6) }).await.unwrap(), 6);
        assert_eq!(all.0.lock().len(), 1, "those that are too old are not kept");
    }

    #[tokio::test]
    async fn a_reader_that_goes_does_not_make_the_next_one_read_again() {
        let (latest, (go, gone)) = (Latest::default(), oneshot::channel());
        let impatient =
            tokio::time::timeout(Duration::ZERO, latest.get(&TaskTracker::new(), async move { gone.await.map_err(Problem::bad) })).await;
        assert!(impatient.is_err());
        go.send(1).unwrap();
        assert_eq!(*latest.get(&TaskTracker::new(), async { Ok(2) }).await.unwrap(), 1);
    }
}
