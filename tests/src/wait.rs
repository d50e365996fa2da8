//! Waits for a condition, with a deadline and a description for the report.

use std::{
    ops::RangeInclusive,
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

use recruiter_common::shutdown::pause;
use tokio::time::timeout;

/// The deadline of what must happen in the end. It is reached only if it never happens: a promise of a shorter time is measured by
/// [`best_of_three`].
pub const SOON: Duration = Duration::from_secs(300);
/// The pauses between two checks of a condition.
const PAUSES: RangeInclusive<Duration> = Duration::from_millis(20)..=Duration::from_millis(200);

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

/// The shortest of up to three measurements: the first below `bound` counts, because a busy machine only makes them longer. One during
/// which this process was stopped proves nothing if it is longer. Panics with `what` and all three when none is below.
#[track_caller]
pub fn best_of_three(bound: Duration, what: &str, mut measure: impl AsyncFnMut() -> Duration) -> impl Future<Output = Duration> {
    let caller = Location::caller();
    async move {
        let (mut took, mut tries) = (Vec::new(), 0);
        while took.len() < 3 {
            let whole = Stopwatch::start();
            let time = measure().await;
            if time < bound {
                return time;
            }
            tries += 1;
            pause(Stopwatch::LATE).await;
            if whole.stopped().is_zero() || tries > 9 {
                took.push(time);
            }
        }
        panic!("{caller}: {what} took {took:?}, each time longer than {bound:?}")
    }
}

/// What comes of the first of up to five tries that shows it: a machine that stalls can spoil some. Panics with `what` after the last.
pub async fn in_a_few_tries<T>(what: &str, mut attempt: impl AsyncFnMut() -> Option<T>) -> T {
    for _ in 0..5 {
        if let Some(shown) = attempt().await {
            return shown;
        }
    }
    panic!("not in five tries: {what}")
}

/// Measures a time without that for which this process was stopped. A thread that does nothing but tick notices that.
pub struct Stopwatch {
    since: Instant,
    lost_ms: Arc<AtomicU64>,
    _counts: mpsc::Sender<()>,
}

impl Stopwatch {
    const TICK: Duration = Duration::from_millis(10);
    /// A tick may be as late as this.
    const LATE: Duration = Duration::from_millis(100);

    /// Starts it.
    pub fn start() -> Self {
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
        Self { since: Instant::now(), lost_ms, _counts: counts }
    }

    /// The time since then.
    pub fn elapsed(&self) -> Duration {
        self.since.elapsed().saturating_sub(self.stopped())
    }

    fn stopped(&self) -> Duration {
        Duration::from_millis(self.lost_ms.load(Ordering::Relaxed))
    }
}

/// Looks until there is something. The pauses grow with the time: many tests wait at a time, and each look needs the machine that they share.
async fn repeat<T>(look: &mut impl AsyncFnMut() -> Option<T>) -> T {
    let begin = Instant::now();
    loop {
        if let Some(found) = look().await {
            return found;
        }
        pause((begin.elapsed() / 8).clamp(*PAUSES.start(), *PAUSES.end())).await;
    }
}
