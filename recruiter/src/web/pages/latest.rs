//! A reading of MongoDB that all who look at a page share, so that a hundred open pages cost what one does.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::sync::Mutex;

use super::super::problem::Problem;

/// A reading is not repeated within this time.
const AT_MOST_EVERY: Duration = Duration::from_secs(2);
/// Nor within this many times the time that it took.
const RARER: u32 = 10;

/// The latest reading.
pub(super) struct Latest<T>(Mutex<Option<Taken<T>>>);

struct Taken<T> {
    until: Instant,
    /// A reading that failed is not repeated by each of those who wait for it.
    read: Result<Arc<T>, Problem>,
}

impl<T> Default for Latest<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T> Latest<T> {
    /// The latest reading, if it is new enough, or the next one.
    pub(super) async fn get(&self, read: impl Future<Output = Result<T, Problem>>) -> Result<Arc<T>, Problem> {
        let mut taken = self.0.lock().await;
        if let Some(taken) = taken.as_ref().filter(|taken| taken.until > Instant::now()) {
            return taken.read.clone();
        }
        let begun = Instant::now();
        let read = read.await.map(Arc::new);
        let pause = if read.is_ok() { (begun.elapsed() * RARER).max(AT_MOST_EVERY) } else { AT_MOST_EVERY };
        *taken = Some(Taken { until: Instant::now() + pause, read: read.clone() });
        read
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn those_who_look_at_the_same_time_share_a_reading() {
        let (latest, mut readings) = (Latest::default(), 0);
        for _ in 0..100 {
            let read = async {
                readings += 1;
                Ok(readings)
            };
            assert_eq!(*latest.get(read).await.unwrap(), 1);
        }
        let failing = Latest::<()>::default();
        for expected in ["first", "first"] {
            let read = async { Err(Problem::bad(expected)) };
            assert_eq!(failing.get(read).await.unwrap_err().into_detail(), "first");
        }
        assert_eq!(readings, 1);
    }
}
