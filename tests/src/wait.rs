//! Waits for a condition, with a deadline and a description for the report.

use std::{
    panic::Location,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use tokio::time::{interval, timeout};

/// The deadline of what must happen in the end. It is reached only if it never happens: a promise of a shorter time is measured by
/// [`best_of_three`].
pub const SOON: Duration = Duration::from_secs(300);
/// How often a condition is checked.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Waits until `condition` is true; panics with `what` at the deadline.
#[track_caller]
pub fn wait_until(deadline: Duration, what: &str, mut condition: impl AsyncFnMut() -> bool) -> impl Future<Output = ()> {
    wait_for(deadline, what, async move || condition().await.then_some(()))
}

/// Waits until `look` returns a value, and returns it. Panics with `what` at the deadline.
#[track_caller]
pub fn wait_for<T>(deadline: Duration, what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> impl Future<Output = T> {
    let caller = Location::caller();
    async move {
        let looking = pin!(repeat(&mut look));
        timeout(deadline, looking).await.unwrap_or_else(|_| panic!("{caller}: waited {deadline:?} in vain: {what}"))
    }
}

/// Whether `condition` becomes true before the deadline, for a caller that has more to say when it does not.
pub async fn within(deadline: Duration, mut condition: impl AsyncFnMut() -> bool) -> bool {
    timeout(deadline, repeat(&mut async || condition().await.then_some(()))).await.is_ok()
}

/// The shortest of up to three measurements: the first below `bound` counts, because a busy machine only makes them longer. The time for
/// which this process was stopped does not count. Panics with `what` and all three when none is below.
#[track_caller]
pub fn best_of_three(bound: Duration, what: &str, mut measure: impl AsyncFnMut() -> Duration) -> impl Future<Output = Duration> {
    let caller = Location::caller();
    async move {
        let mut took = Vec::new();
        while took.len() < 3 {
            let stops = Stops::counted();
            let time = measure().await.saturating_sub(stops.in_all());
            if time < bound {
                return time;
            }
            took.push(time);
        }
        panic!("{caller}: {what} took {took:?}, each time longer than {bound:?}")
    }
}

/// Counts for how long this process does not run, with a thread that does nothing but tick.
struct Stops {
    lost_ms: Arc<AtomicU64>,
    _counts: mpsc::Sender<()>,
}

impl Stops {
    const TICK: Duration = Duration::from_millis(10);
    /// A tick may be as late as this.
    const LATE: Duration = Duration::from_millis(100);

    fn counted() -> Self {
        let (lost_ms, (counts, ended)) = (Arc::new(AtomicU64::new(0)), mpsc::channel());
        thread::spawn({
            let lost_ms = lost_ms.clone();
            move || loop {
                let since = Instant::now();
                if ended.recv_timeout(Self::TICK) != Err(mpsc::RecvTimeoutError::Timeout) {
                    return;
                }
                let late = since.elapsed().saturating_sub(Self::TICK);
                if late > Self::LATE {
                    lost_ms.fetch_add(u64::try_from(late.as_millis()).unwrap_or(u64::MAX), Ordering::Relaxed);
                }
            }
        });
        Self { lost_ms, _counts: counts }
    }

    fn in_all(&self) -> Duration {
        Duration::from_millis(self.lost_ms.load(Ordering::Relaxed))
    }
}

async fn repeat<T>(look: &mut impl AsyncFnMut() -> Option<T>) -> T {
    let mut ticks = interval(LOOK_EVERY);
    loop {
        ticks.tick().await;
        if let Some(found) = look().await {
            return found;
        }
    }
}
