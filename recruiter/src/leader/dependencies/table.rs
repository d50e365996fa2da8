//! The jobs that wait for others, as the leader knows them. Pure: the duty reads and writes the database.
//!
//! Rebuilt at the start of a term. The ends of jobs never change, so a decision here is right for ever, and two leaders decide the
//! same.

use std::collections::{HashMap, HashSet};

use recruiter_common::{
    failure::Failure,
    graphs::{Edge, When},
    ids::JobId,
    store::{End, WaitingJob},
};

/// What follows from the end of a job for one that waits.
#[derive(Debug)]
pub(crate) enum Decision {
    /// All of its edges are satisfied.
    Release(WaitingJob),
    /// One of them can never be.
    Cancel(JobId, Failure),
}

/// Jobs that wait, and the jobs whose ends are not known yet.
#[derive(Debug, Default)]
pub(crate) struct Table {
    jobs: HashMap<JobId, Entry>,
    children: HashMap<JobId, HashSet<JobId>>,
}

#[derive(Debug)]
struct Entry {
    job: WaitingJob,
    /// The jobs whose ends are not known yet.
    open: HashMap<JobId, Open>,
}

/// An edge to a job whose end is not known yet.
#[derive(Clone, Copy, Debug)]
struct Open {
    when: When,
    /// The job in the document, which has become this one.
    of: JobId,
}

impl Table {
    /// Whether the job is known.
    pub(crate) fn contains(&self, job: JobId) -> bool {
        self.jobs.contains_key(&job)
    }

    /// Whether a known job waits for the end of this one.
    pub(crate) fn is_awaited(&self, job: JobId) -> bool {
        self.children.contains_key(&job)
    }

    /// The jobs whose ends are not known yet.
    pub(crate) fn awaited(&self) -> Vec<JobId> {
        self.children.keys().copied().collect()
    }

    /// Adds a job that waits. A job without edges is returned by [`free`](Self::free).
    pub(crate) fn add(&mut self, job: WaitingJob, edges: &[Edge]) {
        let id = job.id;
        for edge in edges {
            self.children.entry(edge.job).or_default().insert(id);
        }
        let open = edges.iter().map(|edge| (edge.job, Open { when: edge.when, of: edge.job })).collect();
        self.jobs.insert(id, Entry { job, open });
    }

    /// Forgets all jobs but these: the others wait no longer.
    pub(crate) fn retain(&mut self, waiting: &HashSet<JobId>) {
        self.jobs.retain(|job, _| waiting.contains(job));
        self.children.retain(|_, children| {
            children.retain(|child| waiting.contains(child));
            !children.is_empty()
        });
    }

    /// Takes in the ends of jobs. Returns what follows from them, and removes the jobs that wait no longer. A job that became others is
    /// replaced by those: they are awaited from now on.
    pub(crate) fn decide(&mut self, ends: &HashMap<JobId, End>) -> Vec<Decision> {
        let mut decisions = Vec::new();
        for (parent, end) in ends {
            for child in self.children.remove(parent).unwrap_or_default() {
                decisions.extend(self.take_in(*parent, end, child));
            }
        }
        decisions
    }

    /// Jobs without open edges.
    pub(crate) fn free(&mut self) -> Vec<Decision> {
        let free: Vec<JobId> = self.jobs.iter().filter(|(_, entry)| entry.open.is_empty()).map(|(job, _)| *job).collect();
        free.into_iter().filter_map(|job| self.jobs.remove(&job)).map(|entry| Decision::Release(entry.job)).collect()
    }

    fn take_in(&mut self, parent: JobId, end: &End, child: JobId) -> Option<Decision> {
        let entry = self.jobs.get_mut(&child)?;
        let Open { when, of } = entry.open.remove(&parent)?;
        match (Edge { job: parent, when }.is_satisfied_by(end), end) {
            // Another job that it became can still fail.
            (Err(_), _) if when == When::Failed && entry.open.values().any(|open| open.of == of) => None,
            (Err(failure), _) => {
                self.jobs.remove(&child);
                Some(Decision::Cancel(child, failure))
            }
            (Ok(false), End::ContinuedAs(jobs)) => {
                for job in jobs {
                    entry.open.insert(*job, Open { when, of });
                    self.children.entry(*job).or_default().insert(child);
                }
                None
            }
            (Ok(_), _) => {
                if when == When::Failed {
                    entry.open.retain(|_, open| open.of != of);
                }
                if !entry.open.is_empty() {
                    return None;
                }
                self.jobs.remove(&child).map(|entry| Decision::Release(entry.job))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use recruiter_common::{instant::Instant, job::FinishReason, store::ScheduledJob};

    use super::*;

    fn job(id: JobId) -> WaitingJob {
        let job = ScheduledJob { id, group: "g".into(), class: "c".into(), gate: None, priority: 5, scheduled_at: Instant::default() };
        WaitingJob { id, edges: Ok(vec![]), due_after: None, job }
    }

    fn told(decisions: &[Decision]) -> Vec<(JobId, &str)> {
        let mut told: Vec<(JobId, &str)> = decisions
            .iter()
            .map(|decision| match decision {
                Decision::Release(job) => (job.id, "release"),
                Decision::Cancel(job, failure) => (*job, failure.class.as_str()),
            })
            .collect();
        told.sort_unstable();
        told
    }

    #[test]
    fn a_job_is_released_once_when_all_jobs_have_ended_in_any_order() {
        let (child, parents) = (JobId::new(), [(); 3].map(|()| JobId::new()));
        for order in [[0, 1, 2], [2, 0, 1], [1, 2, 0]] {
            let mut table = Table::default();
            table.add(job(child), &parents.map(Edge::done));
            let mut all = Vec::new();
            for index in order {
                assert!(all.is_empty() && table.is_awaited(parents[index]));
                all = table.decide(&HashMap::from([(parents[index], End::Done)]));
                assert!(!table.is_awaited(parents[index]));
            }
            assert_eq!(told(&all), [(child, "release")]);
            assert!(table.awaited().is_empty() && !table.contains(child));
            assert!(table.decide(&HashMap::from([(parents[0], End::Done)])).is_empty(), "a hint that came twice");
        }
    }

    #[test]
    fn the_first_impossible_edge_cancels_and_continuations_are_followed() {
        let (parent, other, next) = (JobId::new(), JobId::new(), [JobId::new(), JobId::new()]);
        let (strict, tolerant, fallback) = (JobId::new(), JobId::new(), JobId::new());
        let mut table = Table::default();
        table.add(job(strict), &[Edge::done(parent), Edge::done(other)]);
        table.add(job(tolerant), &[Edge::ended(parent)]);
        table.add(job(fallback), &[Edge::failed(parent)]);
        assert!(table.decide(&HashMap::from([(parent, End::ContinuedAs(next.to_vec()))])).is_empty());
        assert!(!table.is_awaited(parent) && next.iter().all(|next| table.is_awaited(*next)));
        let failed = End::Failed(FinishReason::GAVE_UP);
        let first = table.decide(&HashMap::from([(next[0], failed)]));
        assert_eq!(told(&first), [(strict, "parent-failed"), (fallback, "release")]);
        let second = table.decide(&HashMap::from([(next[1], End::Done)]));
        assert_eq!(told(&second), [(tolerant, "release")]);
        assert!(table.decide(&HashMap::from([(other, End::Done)])).is_empty(), "its child was cancelled");
    }

    #[test]
    fn one_failure_among_the_jobs_that_a_job_became_is_a_failure() {
        let (parent, next, fallback) = (JobId::new(), [JobId::new(), JobId::new()], JobId::new());
        let failed = || End::Failed(FinishReason::GAVE_UP);
        for (ends, expected) in
            [([End::Done, failed()], "release"), ([failed(), End::Done], "release"), ([End::Done, End::Done], "not-needed")]
        {
            let mut table = Table::default();
            table.add(job(fallback), &[Edge::failed(parent)]);
            table.decide(&HashMap::from([(parent, End::ContinuedAs(next.to_vec()))]));
            let mut decisions = Vec::new();
            for (job, end) in next.iter().zip(ends) {
                decisions.extend(table.decide(&HashMap::from([(*job, end)])));
            }
            assert_eq!(told(&decisions), [(fallback, expected)]);
        }
    }

    #[test]
    fn jobs_that_wait_no_longer_are_forgotten_and_those_without_edges_are_free() {
        let (parent, kept, gone, free) = (JobId::new(), JobId::new(), JobId::new(), JobId::new());
        let mut table = Table::default();
        table.add(job(kept), &[Edge::done(parent)]);
        table.add(job(gone), &[Edge::done(JobId::new())]);
        table.add(job(free), &[]);
        assert_eq!(told(&table.free()), [(free, "release")]);
        table.retain(&HashSet::from([kept]));
        assert_eq!(table.awaited(), [parent]);
    }
}
