//! The permits of limited jobs that this worker holds.
//!
//! The recruiter grants permits with the assignment of a job. When the job returns, they are free, and another job of the same group and gate
//! gets them at once, if one was assigned ahead. Permits that no job needs are kept for a moment, because the next assignment may have
//! such a job, and are returned with the next report. The job of a line keeps its permit until its end is recorded: until then no other job
//! is the first of the line.
//!
//! The roster names every permit that is held here. Only a report makes a permit free for other workers, so a permit is dropped here
//! before the report is sent, also if the report then fails.

use std::{
    collections::HashMap,
    time::{Duration, Instant as Monotonic},
};

use recruiter_common::ids::JobId;

use super::startable::{PermitLane, Startable};

/// How long permits that no job needs are kept: about the time of a report and its answer.
const KEPT_FOR: Duration = Duration::from_millis(5);

/// The permits of a session.
#[derive(Debug, Default)]
pub(crate) struct Permits {
    used: HashMap<JobId, (PermitLane, Vec<String>)>,
    /// The permits that no job uses, and since when.
    free: HashMap<PermitLane, Vec<(Vec<String>, Monotonic)>>,
}

impl Permits {
    /// Notes the permits that were granted with this job.
    pub(crate) fn grant(&mut self, job: &Startable) {
        if let Some(names) = job.permits() {
            self.used.insert(job.id(), (job.permit_lane(), names.to_vec()));
        }
    }

    /// Frees the permits of jobs that no longer need them.
    pub(crate) fn free(&mut self, needs_permit: impl Fn(JobId, &PermitLane) -> bool, now: Monotonic) {
        for (_, (lane, names)) in self.used.extract_if(|job, (lane, _)| !needs_permit(*job, lane)) {
            self.free.entry(lane).or_default().push((names, now));
        }
    }

    /// Passes free permits on: `next` returns the next job of a lane that waits for permits, once it has got these.
    pub(crate) fn pass_on(&mut self, mut next: impl FnMut(&PermitLane, &[String]) -> Option<JobId>) {
        self.free.retain(|lane, free| {
            while let Some((names, _)) = free.last()
                && let Some(job) = next(lane, names)
            {
                self.used.extend(free.pop().map(|(names, _)| (job, (lane.clone(), names))));
            }
            !free.is_empty()
        });
    }

    /// Whether any permits of this lane are held.
    pub(crate) fn has_any(&self, lane: &PermitLane) -> bool {
        self.free.contains_key(lane) || self.used.values().any(|(other, _)| other == lane)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.used.is_empty() && self.free.is_empty()
    }

    /// Drops the permits that no job has needed for [`KEPT_FOR`], or all free ones. Returns whether there were any: a report must return
    /// them.
    pub(crate) fn drop_free(&mut self, all: bool, now: Monotonic) -> bool {
        let before = self.free.values().map(Vec::len).sum::<usize>();
        self.free.retain(|_, free| {
            free.retain(|(_, since)| !all && now.duration_since(*since) < KEPT_FOR);
            !free.is_empty()
        });
        self.free.values().map(Vec::len).sum::<usize>() < before
    }

    /// When the first free permits must be returned.
    pub(crate) fn return_at(&self) -> Option<Monotonic> {
        self.free.values().flatten().map(|(_, since)| *since + KEPT_FOR).min()
    }

    /// The names of all permits that are held.
    pub(crate) fn names(&self) -> Vec<String> {
        let used = self.used.values().flat_map(|(_, names)| names);
        used.chain(self.free.values().flatten().flat_map(|(names, _)| names)).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    fn lane(gate: &str) -> PermitLane {
        ("g".into(), Some(gate.into()))
    }

    fn permits(used: &[(JobId, &str, &str)]) -> Permits {
        let used = used.iter().map(|(job, gate, name)| (*job, (lane(gate), vec![(*name).to_owned()])));
        Permits { used: used.collect(), ..Permits::default() }
    }

    #[test]
    fn a_permit_goes_to_the_next_job_of_its_lane_or_is_returned_after_a_moment() {
        let (now, jobs) = (Monotonic::now(), [JobId::new(), JobId::new(), JobId::new()]);
        let mut permits = permits(&[(jobs[0], "a", "a#0"), (jobs[1], "b", "b#0")]);
        permits.free(|_, _| true, now);
        assert!(!permits.drop_free(true, now), "both are used");
        permits.free(|_, _| false, now);
        let mut waiting = VecDeque::from([jobs[2]]);
        permits.pass_on(|of, names| (*of == lane("a") && names == ["a#0"]).then(|| waiting.pop_front())?);
        assert!(permits.used.contains_key(&jobs[2]) && permits.has_any(&lane("a")) && permits.has_any(&lane("b")));
        assert!(permits.return_at() == Some(now + KEPT_FOR) && !permits.drop_free(false, now));
        assert_eq!(permits.names().len(), 2, "the roster still names it");
        assert!(permits.drop_free(false, now + KEPT_FOR));
        assert_eq!((permits.names(), permits.has_any(&lane("b"))), (vec!["a#0".to_owned()], false));
        permits.free(|_, _| false, now);
        assert!(permits.drop_free(true, now) && permits.is_empty(), "a worker that stops keeps none");
    }
}
