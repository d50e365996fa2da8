//! A reading of MongoDB that all who look at a page share, so that a hundred open pages cost what one does.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use axum::http::StatusCode;
use tokio::sync::Mutex;
use tokio_util::task::TaskTracker;

use super::super::problem::Problem;

/// A reading is not repeated within this time.
const AT_MOST_EVERY: Duration = Duration::from_secs(2);
/// Nor within this many times the time that it took.
const RARER: u32 = 10;

/// The latest reading.
pub(super) struct Latest<T>(Arc<Mutex<Option<Taken<T>>>>);

struct Taken<T> {
    until: Instant,
    /// A reading that failed is not repeated by each of those who wait for it.
    read: Result<Arc<T>, Problem>,
}

impl<T> Default for Latest<T> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<T: Send + Sync + 'static> Latest<T> {
    /// The latest reading, if it is new enough, or the next one. It goes on to its end, also if its reader has gone.
    pub(super) async fn get(
        &self,
        tasks: &TaskTracker,
        read: impl Future<Output = Result<T, Problem>> + Send + 'static,
    ) -> Result<Arc<T>, Problem> {
        let mut taken = self.0.clone().lock_owned().await;
        if let Some(taken) = taken.as_ref().filter(|taken| taken.until > Instant::now()) {
            return taken.read.clone();
        }
        let reading = tasks.spawn(async move {
            let begun = Instant::now();
            let read = read.await.map(Arc::new);
            let pause = if read.is_ok() { (begun.elapsed() * RARER).max(AT_MOST_EVERY) } else { AT_MOST_EVERY };
            *taken = Some(Taken { until: Instant::now() + pause, read: read.clone() });
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
    async fn a_reader_that_goes_does_not_make_the_next_one_read_again() {
        let (latest, (go, gone)) = (Latest::default(), oneshot::channel());
        let impatient =
            tokio::time::timeout(Duration::ZERO, latest.get(&TaskTracker::new(), async move { gone.await.map_err(Problem::bad) })).await;
        assert!(impatient.is_err());
        go.send(1).unwrap();
        assert_eq!(*latest.get(&TaskTracker::new(), async { Ok(2) }).await.unwrap(), 1);
    }
}
