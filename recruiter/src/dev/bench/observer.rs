//! Sees each job arrive in the archive, from outside of the processes that put it there.
//!
//! A change stream tells of what a majority has, and is not asked for it again and again: that would be measured as well.

use std::{collections::HashMap, time::Duration};

use anyhow::Context as _;
use bson::{Document, oid::ObjectId};
use mongodb::change_stream::ChangeStream;
use recruiter_common::{ids::JobId, instant::monotonic_ns, shutdown::pause};
use tokio::{task::JoinSet, time::timeout};

use super::{Times, stage::Stage};

/// Writes by which it is measured how late the stream tells.
const PROBES: usize = 20;
/// For the last events, once all jobs are archived.
const LATE_BY_AT_MOST: Duration = Duration::from_secs(30);

/// Watches until it has seen all that it waits for. Dropping it ends it.
pub(super) struct Observer {
    /// One task.
    watching: JoinSet<anyhow::Result<HashMap<JobId, i64>>>,
    /// How late it tells, from the acknowledgement of a majority write on, on the idle system.
    pub(super) delay: Times,
}

impl Observer {
    /// Watches so many jobs arrive from now on.
    pub(super) async fn of_archive(stage: &Stage, jobs: usize) -> anyhow::Result<Self> {
        let mut stream = stage.watch().await?;
        let mut delay = Times::new();
        for _ in 0..PROBES {
            stage.go_on()?;
            let acknowledged = async { stage.insert_probe().await.map(|()| monotonic_ns()) };
            let (acknowledged, (_, seen)) = tokio::try_join!(acknowledged, next(&mut stream))?;
            delay.record(Duration::from_nanos(u64::try_from(seen - acknowledged).unwrap_or(0)));
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

    /// When it saw each of them, in nanoseconds of the monotonic clock.
    pub(super) async fn all(mut self) -> anyhow::Result<HashMap<JobId, i64>> {
        let seen = timeout(LATE_BY_AT_MOST, self.watching.join_next()).await.context("not every job was seen to be archived")?;
        seen.context("there is one task")??
    }
}

/// What was inserted next, and when it is seen.
async fn next(stream: &mut ChangeStream<Document>) -> anyhow::Result<(ObjectId, i64)> {
    loop {
        if let Some(event) = stream.next_if_any().await? {
            return Ok((event.get_document("documentKey")?.get_object_id("_id")?, monotonic_ns()));
        }
    }
}
