//! The duty of dependencies: releases jobs that wait for others, or cancels those that can never be released. It runs beside the rounds.
//!
//! The leader keeps the jobs that wait in memory ([`Table`]), and learns of ends by hints. It then reads these ends from the archive, and
//! releases each job with one write, however many jobs it waited for. No process writes to a job because one of those has ended, so no two
//! writers meet there. Ends never change. So a decision that is made twice, by two leaders or after a crash, is the same.
//!
//! A hint about new jobs that wait names them, and only these are read. A scan finds what hints have missed: it lists the jobs that wait, and
//! looks up the jobs that they wait for. If a scan takes long, the next one is due after [`RARER`] times its duration.

mod table;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    time::{Duration, Instant as Monotonic},
};

use recruiter_common::{
    failure::{self, Failure},
    ids::JobId,
    instant::Instant,
    job::FinishReason,
    shutdown::{Shutdown, pause},
    store::{Archival, CommitSession, End, Hint, Recorded, ScheduledJob, Store, StoreError, WaitingJob, cut},
    telemetry::chain,
};
use tokio::sync::mpsc;

use self::table::{Decision, Table};

/// The next scan is due after this many times the duration of the last one, if that is longer than the poll interval.
const RARER: u32 = 20;
/// Wait after a step that failed in MongoDB.
const RETRY: Duration = Duration::from_millis(500);
/// Maximum number of jobs that are read together.
const BATCH: usize = 1_000;
/// Maximum number of jobs that are released together.
const RELEASED_TOGETHER: usize = 10_000;
/// Maximum number of jobs that are cancelled together, and of bytes of their documents, which are read.
const CANCELLED_TOGETHER: (usize, usize) = (100, 8 * 1024 * 1024);

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

/// What hints have reported and is not taken in yet.
#[derive(Debug, Default)]
struct Pending {
    ended: HashSet<JobId>,
    new: HashSet<JobId>,
}

impl<'a> Dependencies<'a> {
    pub(crate) fn new(store: &'a Store, poll: Duration, news: News, released: mpsc::UnboundedSender<Vec<ScheduledJob>>) -> Self {
        let (table, left_alone, session) = (Table::default(), HashSet::new(), CommitSession::default());
        Self { store, poll, news, released, table, left_alone, scan_at: Monotonic::now(), session }
    }

    /// Releases and cancels until a stop is requested.
    pub(crate) async fn run(&mut self, shutdown: &mut Shutdown) {
        let mut pending = Pending::default();
        let mut stopping = shutdown.clone();
        while !shutdown.is_requested() {
            // A step may be dropped at any point: the next leader decides the same.
            let step = tokio::select! {
                step = self.step(&mut pending) => step,
                () = stopping.requested() => return,
            };
            if let Err(error) = step {
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
                    pending.ended.extend(jobs.into_iter().filter(|job| self.table.is_awaited(*job)));
                } else if let Hint::Waiting { jobs } = hint
                    && !jobs.is_empty()
                {
                    pending.new.extend(jobs);
                } else {
                    // Hints may have been missed, or there are too many jobs to be named.
                    self.scan_at = Monotonic::now();
                }
                news = self.news.try_recv().ok();
            }
        }
    }

    /// Takes in the jobs that are said to have ended and the new ones, and scans if that is due.
    async fn step(&mut self, pending: &mut Pending) -> Result<(), StoreError> {
        if !pending.new.is_empty() {
            let new: Vec<JobId> = pending.new.iter().copied().collect();
            let awaited = self.learn(&new).await?;
            self.look_up(awaited).await?;
            pending.new.clear();
        }
        if !pending.ended.is_empty() {
            let ends = self.store.ends_of(&pending.ended.iter().copied().collect::<Vec<_>>()).await?;
            self.follow(ends).await?;
            pending.ended.clear();
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
        self.table.retain(&waiting.iter().copied().collect());
        self.learn(&waiting).await?;
        self.look_up(self.table.awaited()).await
    }

    /// Reads those of these jobs that wait and are not known yet. Returns the jobs that they wait for.
    async fn learn(&mut self, jobs: &[JobId]) -> Result<Vec<JobId>, StoreError> {
        let new: Vec<JobId> = jobs.iter().copied().filter(|job| !self.table.contains(*job) && !self.left_alone.contains(job)).collect();
        let mut awaited = Vec::new();
        for some in new.chunks(BATCH) {
            let (jobs, invalid) = self.store.waiting_among(some).await?;
            let malformed = |job| (job, Failure::new(failure::MALFORMED, "the document is not a job"));
            let mut refused: Vec<(JobId, Failure)> = invalid.into_iter().map(malformed).collect();
            for job in jobs {
                match job.edges.clone() {
                    Ok(edges) => {
                        awaited.extend(edges.iter().map(|edge| edge.job));
                        self.table.add(job, &edges);
                    }
                    Err(problem) => refused.push((job.id, Failure::new(failure::MALFORMED, problem.to_string()))),
                }
            }
            self.cancel(refused, &FinishReason::MALFORMED).await?;
        }
        let free = self.table.free();
        self.carry_out(free).await?;
        Ok(awaited)
    }

    /// Looks up whether these jobs have ended, or are gone.
    async fn look_up(&mut self, awaited: Vec<JobId>) -> Result<(), StoreError> {
        let ends = self.store.ends_of(&awaited).await?;
        let open: Vec<JobId> = awaited.into_iter().filter(|job| !ends.contains_key(job)).collect();
        self.follow(ends).await?;
        let gone = self.store.gone_among(&open).await?;
        self.follow(gone.into_iter().map(|job| (job, End::Gone)).collect()).await
    }

    /// Carries out what follows from these ends, and from the ends that follow from that: of jobs that became others, of cancelled jobs.
    async fn follow(&mut self, mut ends: HashMap<JobId, End>) -> Result<(), StoreError> {
        let mut seen: HashSet<JobId> = HashSet::new();
        while !ends.is_empty() {
            seen.extend(ends.keys());
            let continued: Vec<JobId> = ends
                .values()
                .filter_map(|end| if let End::ContinuedAs(jobs) = end { Some(jobs.clone()) } else { None })
                .flatten()
                .collect();
            let decisions = self.table.decide(&ends);
            let mut next: Vec<JobId> = self.carry_out(decisions).await?;
            next.extend(continued);
            // No job becomes itself, even if a document says so.
            next.retain(|job| self.table.is_awaited(*job) && !seen.contains(job));
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
    async fn release(&mut self, jobs: Vec<WaitingJob>) -> Result<(), StoreError> {
        let mut left = cut(jobs, RELEASED_TOGETHER, usize::MAX, |_| 0);
        while let Some(mut some) = left.pop() {
            match self.release_some(&some).await {
                Err(error) if error.is_transient() => return Err(error),
                // One of them is refused.
                Err(_) if some.len() > 1 => {
                    let rest = some.split_off(some.len() / 2);
                    left.extend([some, rest]);
                }
                Err(error) => {
                    for job in some {
                        tracing::error!(job.id = %job.id, error = chain(&error), "a job that waits for others cannot be released; leaving it");
                        self.left_alone.insert(job.id);
                    }
                }
                Ok(()) => {}
            }
        }
        Ok(())
    }

    async fn release_some(&self, jobs: &[WaitingJob]) -> Result<(), StoreError> {
        self.store.fresh_clock().await?;
        let now = self.store.now();
        let (mut due, mut alarms): (BTreeMap<Instant, Vec<JobId>>, BTreeMap<Instant, BTreeSet<String>>) = Default::default();
        for job in jobs {
            let at = job.due_after.unwrap_or(now).max(now);
            due.entry(at).or_default().push(job.id);
            if at > now {
                alarms.entry(at).or_default().insert(job.job.group.clone());
            }
        }
        self.store.release_if_waiting(&due.into_iter().collect::<Vec<_>>()).await?;
        let is_due = |job: &&WaitingJob| job.due_after.is_none_or(|at| at <= now);
        let released = jobs.iter().filter(is_due).map(|job| ScheduledJob { scheduled_at: now, ..job.job.clone() }).collect();
        // The rounds end together with this duty.
        let _ = self.released.send(released);
        for (at, groups) in alarms {
            self.store.announce_hint(Hint::Jobs { groups: groups.into_iter().collect(), at: Some(at), jobs: Vec::new() }).await;
        }
        Ok(())
    }

    /// Archives jobs that can never be released.
    async fn cancel(&mut self, jobs: Vec<(JobId, Failure)>, why: &FinishReason) -> Result<(), StoreError> {
        let failures: HashMap<JobId, Failure> = jobs.into_iter().collect();
        let mut sizes = Vec::with_capacity(failures.len());
        for some in failures.keys().copied().collect::<Vec<_>>().chunks(BATCH) {
            // Those that are cancelled or released already are left out.
            sizes.extend(self.store.sizes_of_unlocked(some).await?);
        }
        for some in cut(sizes, CANCELLED_TOGETHER.0, CANCELLED_TOGETHER.1, |(_, bytes)| *bytes) {
            let some: Vec<JobId> = some.into_iter().map(|(job, _)| job).collect();
            let documents = self.store.waiting_documents(&some).await?;
            let now = self.store.now();
            let archivals: Vec<Archival> =
                documents.iter().map(|(job, document)| Archival::unstarted(*job, document, why, &failures[job], now)).collect();
            match self.store.finish(&mut self.session, &archivals).await {
                // The store has logged what MongoDB refuses.
                Ok(recorded) => self.left_alone.extend(
                    archivals.iter().zip(recorded).filter(|(_, recorded)| *recorded == Recorded::Refused).map(|(end, _)| end.job()),
                ),
                Err(error) if error.is_transient() => return Err(error),
                Err(error) => {
                    tracing::error!(
                        error = chain(&error),
                        count = some.len(),
                        "jobs that can never start cannot be archived; leaving them"
                    );
                    self.left_alone.extend(some);
                }
            }
        }
        Ok(())
    }
}
