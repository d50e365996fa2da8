//! Measures latency: how long a job waits.

use std::{
    collections::HashMap,
    time::{Duration, Instant as Monotonic},
};

use bson::{Document, doc, oid::ObjectId};
use clap::Args;
use recruiter_common::{
    enqueue::NewJob,
    ids::JobId,
    instant::{Instant, monotonic_ns},
    job::DEFAULT_GROUP,
    shutdown::pause,
    store::{Channel, Hint, Listener, Store},
};

use super::{Setting, Times, observer::Observer, rate, stage::Stage};

/// A job whose result is the time when it was entered.
fn telling() -> NewJob {
    NewJob::of_class("noop", doc! { "tell": true })
}

/// When the workable was entered, according to the job's result.
fn entered(job: &Document) -> anyhow::Result<i64> {
    job.get_i64("result").map_err(|_| anyhow::anyhow!("a job did not report when it was entered: {job}"))
}

/// The arguments of `latency`: one job at a time.
#[derive(Args, Clone, Copy, Debug)]
pub(super) struct Latency {
    /// Number of jobs
    #[arg(long, short = 'n', env = "RECRUITER_BENCH_JOBS", value_name = "N", default_value_t = 500, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    jobs: u64,
    /// Enqueue each job this long before its date, and measure from its date
    #[arg(long, env = "RECRUITER_BENCH_LATER", value_name = "DURATION", value_parser = humantime::parse_duration)]
    later: Option<Duration>,
    /// Insert each job as a client without the library does: only the document, without a hint
    #[arg(long, env = "RECRUITER_BENCH_WITHOUT_HINT")]
    without_hint: bool,
}

impl Latency {
    pub(super) async fn measure(self, stage: &Stage, setting: &Setting) -> anyhow::Result<Document> {
        let store = &stage.store;
        let mut fleet = stage.ready_fleet(setting).await?;
        stage.progress("jobs", self.jobs);
        // A worker's own hints take its own connection, and these are the hints of an enqueuer.
        let worker = store.with_own_connections("bench-listener")?;
        let (mut hint, mut started, mut archived) = (Times::new(), Times::new(), Times::new());
        for _ in 0..self.jobs {
            stage.go_on()?;
            hint.record(one_hint(store, &worker).await?);
            let (id, from) = self.enqueue(stage).await?;
            let job = loop {
                match store.archived_jobs(&[id]).await?.pop() {
                    Some(job) => break job,
                    None => pause(Duration::from_millis(1)).await,
                }
            };
            archived.record_between(from, monotonic_ns());
            started.record_between(from, entered(&job)?);
            stage.advance(1);
            // Enough time for all processes to update the roster and become idle.
            pause(Duration::from_millis(20)).await;
        }
        fleet.stop().await;
        Ok(doc! {
            "benchmark": "latency",
            "jobs": i64::try_from(self.jobs)?,
            "with_hint": !self.without_hint,
            "later_ms": self.later.map(|later| later.as_secs_f64() * 1_000.0),
            "hint_ms": hint.percentiles(),
            "started_ms": started.percentiles(),
            "archived_ms": archived.percentiles(),
            "conditions": stage.conditions(setting).await?,
        })
    }

    /// Enqueues a job. Returns it with the time from which it is measured: that of its acknowledgement, or of its date.
    async fn enqueue(self, stage: &Stage) -> anyhow::Result<(JobId, i64)> {
        let store = &stage.store;
        let later = self.later.unwrap_or_default();
        store.refresh_clock().await?;
        let (date, date_ns) = (store.now() + later, monotonic_ns() + i64::try_from(later.as_nanos())?);
        let id = if self.without_hint {
            stage.insert_scheduled(telling_of(date)).await?
        } else {
            let job = if self.later.is_some() { telling().at(date) } else { telling() };
            job.enqueue(store).await?.id
        };
        Ok((id, if self.later.is_some() { date_ns } else { monotonic_ns() }))
    }
}

/// Such a job as a client without the library inserts it.
fn telling_of(date: Instant) -> Document {
    doc! {
        "_id": ObjectId::new(),
        "workable": { "class": "noop", "parameters": { "tell": true } },
        "locked": false,
        "group": DEFAULT_GROUP,
        "priority": 5,
        "scheduled_at": date,
    }
}

/// The time of the hint of a cancellation to a worker: through a capped collection, and from there over the recruiter if the worker is
/// connected to it.
async fn one_hint(store: &Store, listener: &Store) -> anyhow::Result<Duration> {
    // The worker and the job do not exist, so no process reacts.
    let worker = recruiter_common::ids::WorkerId::new();
    let mut hints = listener.hints(Listener::Worker(worker, Channel::default()));
    let cancel = Hint::Cancel { job: JobId::new() };
    // The cursor is open when a first hint arrives.
    loop {
        store.publish(&cancel).await?;
        if tokio::time::timeout(Duration::from_millis(20), hints.next()).await.is_ok() {
            break;
        }
    }
    pause(Duration::from_millis(2)).await;
    while hints.try_next().is_some() {}
    let begun = Monotonic::now();
    let (published, _) = tokio::join!(store.publish(&cancel), hints.next());
    published?;
    Ok(begun.elapsed())
}

/// The arguments of `steady`: jobs at a constant rate, each measured from its acknowledged enqueue until it is entered and
/// until a majority has archived it.
#[derive(Args, Clone, Copy, Debug)]
pub(super) struct Steady {
    /// Jobs per second
    #[arg(long, env = "RECRUITER_BENCH_RATE", value_name = "N", default_value_t = 2_000, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    rate: u64,
    /// Duration of the measurement
    #[arg(long, env = "RECRUITER_BENCH_DURATION", value_name = "DURATION", default_value = "20s", value_parser = humantime::parse_duration)]
    duration: Duration,
}

/// Jobs of a few milliseconds are enqueued in one call, as the many callers of a busy application would do together.
const EVERY: Duration = Duration::from_millis(5);

impl Steady {
    pub(super) async fn measure(self, stage: &Stage, setting: &Setting) -> anyhow::Result<Document> {
        let store = &stage.store;
        let mut fleet = stage.ready_fleet(setting).await?;
        let total = u64::try_from(self.duration.as_nanos() * u128::from(self.rate) / 1_000_000_000)?.max(1);
        let observer = Observer::of_archive(stage, usize::try_from(total)?).await?;
        let delay = observer.delay.percentiles();
        stage.progress("enqueued", total);
        let begun = Monotonic::now();
        let (mut calls, mut sent) = (tokio::task::JoinSet::new(), 0);
        let mut acknowledged: HashMap<JobId, i64> = HashMap::new();
        while sent < total {
            stage.go_on()?;
            let by_now = u64::try_from(begun.elapsed().as_nanos() * u128::from(self.rate) / 1_000_000_000)?.min(total);
            if by_now > sent {
                let (store, count) = (store.clone(), by_now - sent);
                calls.spawn(async move {
                    let enqueued = store.enqueue_many((0..count).map(|_| telling())).await?;
                    Ok::<_, anyhow::Error>((enqueued, monotonic_ns()))
                });
                stage.advance(count);
                sent = by_now;
            }
            pause(EVERY).await;
        }
        while let Some(call) = calls.join_next().await {
            let (enqueued, at) = call??;
            acknowledged.extend(enqueued.into_iter().map(|job| (job.id, at)));
        }
        let time = stage.until_archived(&mut fleet, total).await? - begun;
        let seen = observer.all().await?;
        let (mut started, mut archived) = (Times::new(), Times::new());
        let ids: Vec<JobId> = acknowledged.keys().copied().collect();
        for some in ids.chunks(1_000) {
            for job in store.archived_jobs(some).await? {
                let id = JobId::from(job.get_object_id("_id")?);
                started.record_between(acknowledged[&id], entered(&job)?);
                // A resumed change stream may have reported another document in place of this one.
                if let Some(seen) = seen.get(&id) {
                    archived.record_between(acknowledged[&id], *seen);
                }
            }
        }
        fleet.stop().await;
        Ok(doc! {
            "benchmark": "steady",
            "jobs": i64::try_from(total)?,
            "asked_per_second": i64::try_from(self.rate)?,
            "jobs_per_second": rate(total, time),
            "started_ms": started.percentiles(),
            "archived_ms": archived.percentiles(),
            "archived_is_seen_late_by_ms": delay,
            "conditions": stage.conditions(setting).await?,
        })
    }
}
