//! The ceiling: the database operations of the protocol, one after the other, without other processes.
//!
//! Measures the minimum cost of a job for the database: search, assignment, start, check of the archive, transaction
//! and freeing of slots. Each operation handles a batch, and a few lanes run in parallel.

use std::{
    collections::HashMap,
    time::{Duration, Instant as Monotonic},
};

use bson::{Document, doc};
use clap::Args;
use recruiter_common::{
    enqueue::NewJob,
    failure::Failure,
    ids::{JobId, LeaseTerm, RoundId, StartId},
    job::{Execution, FinishReason, IfWorkerDies},
    store::{
        Archival, AssignedJobs, Channel, CommitSession, Conditions, Ending, Hint, Lane, Offer, Planned, ProcessIdentity, Start, Store,
        ToStart,
    },
};

use super::{
    Setting, rate,
    stage::{Stage, register},
};

/// Number of jobs in a batch.
const BATCH: usize = 500;
/// Longer than the benchmark takes.
const LEASE: Duration = Duration::from_secs(3_600);

/// The arguments of `limit`.
#[derive(Args, Clone, Copy, Debug)]
pub(super) struct Limit {
    /// Number of jobs
    #[arg(long, short = 'n', env = "RECRUITER_BENCH_JOBS", value_name = "N", default_value_t = 50_000, value_parser = clap::value_parser!(u64).range(1..=50_000_000))]
    jobs: u64,
    /// Number of batches processed in parallel
    #[arg(long, env = "RECRUITER_BENCH_LANES", value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..=64))]
    lanes: u64,
}

impl Limit {
    pub(super) async fn measure(self, stage: &Stage, setting: &Setting) -> anyhow::Result<Document> {
        let enqueued = stage.enqueue(self.jobs, |number| NewJob::of_class("noop", doc! {}).in_group(lane(number % self.lanes))).await?;
        stage.progress("archived", self.jobs);
        let mut lanes = tokio::task::JoinSet::new();
        for number in 0..self.lanes {
            lanes.spawn(burn_down(stage.store.clone(), lane(number)));
        }
        let begun = Monotonic::now();
        while let Some(done) = lanes.join_next().await {
            stage.go_on()?;
            stage.advance(done??);
        }
        let time = begun.elapsed();
        anyhow::ensure!(stage.store.archived_count().await? == self.jobs, "not every job was archived");
        Ok(doc! {
            "benchmark": "limit",
            "jobs": i64::try_from(self.jobs)?,
            "lanes": i64::try_from(self.lanes)?,
            "jobs_per_second": rate(self.jobs, time),
            "seconds": time.as_secs_f64(),
            "enqueued_per_second": rate(self.jobs, enqueued),
            "conditions": stage.conditions(setting).await?,
        })
    }
}

fn lane(number: u64) -> String {
    format!("lane-{number}")
}

/// Runs all jobs of a group in batches. Returns their number.
async fn burn_down(store: Store, group: String) -> anyhow::Result<u64> {
    let slots = u32::try_from(BATCH)?;
    let worker = register(&store, &group, slots).await?;
    let process = ProcessIdentity::of_this_process()?;
    let mut session = CommitSession::default();
    let lane = Lane::new(group, "noop");
    let mut done = 0;
    loop {
        let now = store.now();
        let due = store.due_jobs(std::slice::from_ref(&lane), now, BATCH).await?.jobs;
        if due.is_empty() {
            return Ok(done);
        }
        let dates: HashMap<JobId, _> = due.iter().map(|job| (job.id, job.scheduled_at)).collect();
        let jobs: Vec<JobId> = due.into_iter().map(|job| job.id).collect();
        let planned = Planned::for_slots(AssignedJobs::new(worker, jobs.clone()));
        let round = RoundId::new();
        store.assign_if_available(LeaseTerm::default(), round, std::slice::from_ref(&planned)).await?;
        store.publish_to(Channel::default(), &Hint::Assigned { round, assignments: vec![planned.assignment] }).await?;
        let read = store.unlocked(&jobs).await?;
        let start =
            Start { id: StartId::new(), worker, hostname: process.hostname.clone(), pid: process.pid, lease_until: now + LEASE, now };
        let verdict = IfWorkerDies::Archive(FinishReason::WORKER_DIED);
        let planned = |job: &JobId| ToStart {
            job: *job,
            group: lane.group.clone(),
            attempts: 0,
            due: dates[job],
            if_worker_dies: verdict.clone(),
            permit: None,
            conditions: Conditions::default(),
        };
        let to_start: Vec<ToStart> = jobs.iter().map(planned).collect();
        let taken = Offer { working_on: jobs.clone(), ..Offer::default() };
        let (claims, is_taken) =
            tokio::join!(store.start_if_unlocked(&start, &to_start), store.report_if_unassigned_since(worker, Some(round), &taken));
        let claims = claims?;
        anyhow::ensure!(is_taken? && claims.len() == jobs.len(), "another process works on this database");
        store.already_archived(&jobs).await?;
        let read: HashMap<JobId, _> = read.into_iter().flatten().map(|job| (job.id, job)).collect();
        let ending = Ending::new(Execution::default().ended(now, None::<&Failure>), FinishReason::DONE);
        let ended = claims.iter().map(|claim| Archival::ended(&read[&claim.job()], *claim, ending.clone()));
        let batch: Vec<Archival> = ended.collect();
        let _ = store.archive(&mut session, &batch).await?;
        store.report_if_unassigned_since(worker, Some(round), &Offer { slots, ..Offer::default() }).await?;
        store.publish(&Hint::Free).await?;
        done += batch.len() as u64;
    }
}
