//! The duty of dependencies: releases jobs that wait for others, or cancels those that can never be released. It runs beside the rounds.
//!
//! The leader keeps the jobs that wait in memory ([`Table`]), and learns of ends by hints. It then reads these ends from the archive, and
//! releases each job with one write, however many jobs it waited for. No process writes to a job because one of those has ended, so no two
//! writers meet there. Ends never change. So a decision that is made twice, by two leaders or after a crash, is the same.
//!
//! A scan finds what hints have missed: it lists the jobs that wait, and looks up the jobs that they wait for. If a scan takes long, the next
//! one is due after [`RARER`] times its duration.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    time::{Duration, Instant as Monotonic},
};

use recruiter_common::{
    failure::{self, Failure},
    graphs::{End, Waiting},
    ids::JobId,
    instant::Instant,
    job::FinishReason,
    shutdown::{Shutdown, pause},
    store::{Archival, CommitSession, Hint, ScheduledJob, Store, StoreError},
    telemetry::chain,
};
use tokio::sync::mpsc;

use super::waiting::{Decision, Table};

/// The next scan is due after this many times the duration of the last one, if that is longer than the poll interval.
const RARER: u32 = 20;
/// Wait after a step that failed in MongoDB.
const RETRY: Duration = Duration::from_millis(500);
/// Maximum number of jobs that are read together.
const BATCH: usize = 1_000;
/// Maximum number of jobs that are cancelled together. Their whole documents are read.
const CANCELLED_TOGETHER: usize = 100;

/// The news for this duty: [`Hint::Ended`], [`Hint::Waiting`], and [`Hint::Seed`] if hints may have been missed.
pub(crate) type News = mpsc::UnboundedReceiver<Hint>;

/// The jobs that wait, and where the released ones are sent.
pub(crate) struct Dependencies<'a> {
    store: &'a Store,
    poll: Duration,
    news: News,
    released: mpsc::UnboundedSender<Vec<ScheduledJob>>,
    table: Table,
    /// Jobs whose documents cannot be released or cancelled. They are not tried again in this term.
    left_alone: HashSet<JobId>,
    scan_at: Monotonic,
    session: CommitSession,
}

impl<'a> Dependencies<'a> {
    pub(crate) fn new(store: &'a Store, poll: Duration, news: News, released: mpsc::UnboundedSender<Vec<ScheduledJob>>) -> Self {
        let (table, left_alone, session) = (Table::default(), HashSet::new(), CommitSession::default());
        Self { store, poll, news, released, table, left_alone, scan_at: Monotonic::now(), session }
    }

    /// Releases and cancels until a stop is requested.
    pub(crate) async fn run(&mut self, shutdown: &mut Shutdown) {
        let mut ended: HashSet<JobId> = HashSet::new();
        while !shutdown.is_requested() {
            if let Err(error) = self.step(&mut ended).await {
                tracing::warn!(error = chain(&error), "cannot release jobs that wait for others; retrying");
                self.scan_at = Monotonic::now();
                shutdown.sleep(RETRY).await;
                continue;
            }
            let until_scan = self.scan_at.saturating_duration_since(Monotonic::now());
            let mut news = tokio::select! {
                news = self.news.recv() => news,
                () = pause(until_scan) => None,
                () = shutdown.requested() => return,
            };
            while let Some(hint) = news {
                if let Hint::Ended { jobs } = hint {
                    ended.extend(jobs.into_iter().filter(|job| self.table.is_awaited(*job)));
                } else {
                    self.scan_at = Monotonic::now();
                }
                news = self.news.try_recv().ok();
            }
        }
    }

    /// Takes in the jobs that are said to have ended, and scans if that is due.
    async fn step(&mut self, ended: &mut HashSet<JobId>) -> Result<(), StoreError> {
        if !ended.is_empty() {
            let ends = self.store.ends_of(&ended.iter().copied().collect::<Vec<_>>()).await?;
            self.follow(ends).await?;
            ended.clear();
        }
        let began = Monotonic::now();
        if began >= self.scan_at {
            if self.store.has_graphs().await? {
                self.scan().await?;
            }
            self.scan_at = Monotonic::now() + self.poll.max(began.elapsed() * RARER);
        }
        Ok(())
    }

    /// Reads the jobs that wait and are not known yet, and looks up all jobs whose ends are not known.
    async fn scan(&mut self) -> Result<(), StoreError> {
        let waiting = self.store.waiting_jobs().await?;
        let new: Vec<JobId> = waiting.iter().copied().filter(|job| !self.table.contains(*job) && !self.left_alone.contains(job)).collect();
        self.table.retain(&waiting.into_iter().collect());
        for some in new.chunks(BATCH) {
            let (jobs, invalid) = self.store.waiting_among(some).await?;
            let mut refused: Vec<(JobId, Failure)> = Vec::new();
            refused.extend(invalid.into_iter().map(|job| (job, Failure::new(failure::MALFORMED, "the document is not a job"))));
            for job in jobs {
                match job.edges.clone() {
                    Ok(edges) => self.table.add(job, &edges),
                    Err(problem) => refused.push((job.id, Failure::new(failure::MALFORMED, problem.to_string()))),
                }
            }
            self.cancel(refused, &FinishReason::MALFORMED).await?;
        }
        let free = self.table.free();
        self.carry_out(free).await?;
        let awaited = self.table.awaited();
        let ends = self.store.ends_of(&awaited).await?;
        let open: Vec<JobId> = awaited.into_iter().filter(|job| !ends.contains_key(job)).collect();
        self.follow(ends).await?;
        let gone = self.store.gone_among(&open).await?;
        self.follow(gone.into_iter().map(|job| (job, End::Gone)).collect()).await
    }

    /// Carries out what follows from these ends, and from the ends that follow from that: of jobs that became others, of cancelled jobs.
    async fn follow(&mut self, mut ends: HashMap<JobId, End>) -> Result<(), StoreError> {
        while !ends.is_empty() {
            let continued: Vec<JobId> = ends
                .values()
                .filter_map(|end| if let End::ContinuedAs(jobs) = end { Some(jobs.clone()) } else { None })
                .flatten()
                .collect();
            let decisions = self.table.decide(&ends);
            let mut next: Vec<JobId> = self.carry_out(decisions).await?;
            next.extend(continued);
            next.retain(|job| self.table.is_awaited(*job));
            ends = if next.is_empty() { HashMap::new() } else { self.store.ends_of(&next).await? };
        }
        Ok(())
    }

    /// Releases and cancels jobs. Returns the cancelled ones.
    async fn carry_out(&mut self, decisions: Vec<Decision>) -> Result<Vec<JobId>, StoreError> {
        let (mut released, mut cancelled) = (Vec::new(), Vec::new());
        for decision in decisions {
            match decision {
                Decision::Release(job) => released.push(job),
                Decision::Cancel(job, failure) => cancelled.push((job, failure)),
            }
        }
        self.release(released).await?;
        let ids = cancelled.iter().map(|(job, _)| *job).collect();
        self.cancel(cancelled, &FinishReason::CANCELLED).await?;
        Ok(ids)
    }

    /// Makes jobs due, at once or at the date that they were enqueued with, and passes them on to the rounds.
    async fn release(&mut self, jobs: Vec<Waiting>) -> Result<(), StoreError> {
        if jobs.is_empty() {
            return Ok(());
        }
        self.store.fresh_clock().await?;
        let now = self.store.now();
        let mut due: BTreeMap<Instant, Vec<JobId>> = BTreeMap::new();
        for job in &jobs {
            due.entry(job.due_after.unwrap_or(now).max(now)).or_default().push(job.id);
        }
        let later: Vec<Hint> = jobs
            .iter()
            .filter_map(|job| Some((job.due_after.filter(|at| *at > now)?, &job.job.group)))
            .map(|(at, group)| Hint::Jobs { groups: vec![group.clone()], at: Some(at), jobs: Vec::new() })
            .collect();
        self.store.release_if_waiting(&due.into_iter().collect::<Vec<_>>()).await?;
        let is_due = |job: &Waiting| job.due_after.is_none_or(|at| at <= now);
        let released = jobs.into_iter().filter(is_due).map(|job| ScheduledJob { scheduled_at: now, ..job.job }).collect();
        // The rounds end together with this duty.
        let _ = self.released.send(released);
        for hint in later {
            self.store.announce_hint(hint).await;
        }
        Ok(())
    }

    /// Archives jobs that can never be released.
    async fn cancel(&mut self, jobs: Vec<(JobId, Failure)>, why: &FinishReason) -> Result<(), StoreError> {
        for some in jobs.chunks(CANCELLED_TOGETHER) {
            let failures: HashMap<JobId, &Failure> = some.iter().map(|(job, failure)| (*job, failure)).collect();
            let documents = self.store.waiting_documents(&failures.keys().copied().collect::<Vec<_>>()).await?;
            let now = self.store.now();
            let archivals: Vec<Archival> =
                documents.iter().map(|(job, document)| Archival::unstarted(*job, document, why, failures[job], now)).collect();
            match self.store.finish(&mut self.session, &archivals).await {
                Ok(_) => {}
                Err(error) if error.is_transient() => return Err(error),
                Err(error) => {
                    tracing::error!(
                        error = chain(&error),
                        count = some.len(),
                        "jobs that can never start cannot be archived; leaving them"
                    );
                    self.left_alone.extend(failures.keys());
                }
            }
        }
        Ok(())
    }
}
