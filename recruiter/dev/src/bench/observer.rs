//! Observes each job's arrival in the archive, from outside the processes that archive it.
//!
//! A change stream reports documents that a majority has. Polling would add its own load to the measurement.

use std::{collections::HashMap, time::Duration};

use anyhow::Context as _;
use bson::{Document, oid::ObjectId};
use mongodb::change_stream::ChangeStream;
use recruiter_common::{ids::JobId, instant::monotonic_ns, shutdown::pause};
use tokio::{task::JoinSet, time::timeout};

use super::{Times, stage::Stage};

/// Number of writes that measure the delay of the stream.
const PROBES: usize = 20;
/// Maximum wait for the last events, after all jobs are archived.
const LATE_BY_AT_MOST: Duration = Duration::from_secs(30);

/// Observes until all expected jobs have arrived. Dropping it ends it.
pub(super) struct Observer {
    /// Contains one task.
    watching: JoinSet<anyhow::Result<HashMap<JobId, i64>>>,
    /// The delay of the stream after the acknowledgement of a majority write, measured on the idle system.
    pub(super) delay: Times,
}

impl Observer {
    /// Observes the next `jobs` arrivals from now on.
    pub(super) async fn of_archive(stage: &Stage, jobs: usize) -> anyhow::Result<Self> {
        let mut stream = stage.watch().await?;
        let mut delay = Times::new();
        for _ in 0..PROBES {
            stage.go_on()?;
            let acknowledged = async { stage.insert_probe().await.map(|()| monotonic_ns()) };
            let (acknowledged, (_, seen)) = tokio::try_join!(acknowledged, next(&mut stream))?;
            delay.record_between(acknowledged, seen);
            pause(Duration::from_millis(5)).await;
        }
        let mut watching = JoinSet::new();
        watching.spawn(async move {
            let mut seen = HashMap::with_capacity(jobs);
            while seen.len() < jobs {
                let (id, at) = next(&mut stream).await?;
                seen.insert(JobId::from(id), at);
            }
            Ok(seen)
        });
        Ok(Self { watching, delay })
    }

    /// The time at which it observed each job, in nanoseconds of the monotonic clock.
    pub(super) async fn all(mut self) -> anyhow::Result<HashMap<JobId, i64>> {
        let seen = timeout(LATE_BY_AT_MOST, self.watching.join_next()).await.context("the change stream did not report every job")?;
        seen.context("there is one task")??
    }
}

/// The id of the next inserted document, and the time of its event.
async fn next(stream: &mut ChangeStream<Document>) -> anyhow::Result<(ObjectId, i64)> {
    loop {
        if let Some(event) = stream.next_if_any().await? {
            return Ok((event.get_document("documentKey")?.get_object_id("_id")?, monotonic_ns()));
        }
    }
}
