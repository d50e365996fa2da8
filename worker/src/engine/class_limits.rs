//! Limits of classes: how many jobs of a class this process holds at a time, queued and running.
//!
//! The roster says how many more jobs of such a class the worker accepts, so the recruiter assigns no others. The worker
//! returns a job beyond the limit, for example one that an operator has assigned by hand.

use std::collections::HashMap;

use recruiter_common::{ids::JobId, roster::ClassSlots};

use super::startable::Startable;
use crate::registry::Registry;

/// The jobs of limited classes that this session holds.
#[derive(Debug, Default)]
pub(crate) struct ClassLimits {
    /// The class of each job. `admit` removes the jobs that are no longer held.
    jobs: HashMap<JobId, String>,
}

impl ClassLimits {
    /// Removes the jobs beyond the limits of their classes from `startable`. Returns their ids.
    pub(crate) fn admit(&mut self, startable: &mut Vec<Startable>, registry: &Registry, is_held: impl Fn(JobId) -> bool) -> Vec<JobId> {
        self.jobs.retain(|job, _| is_held(*job));
        let mut refused = Vec::new();
        startable.retain(|job| {
            let class = &job.job().class;
            let Some(limit) = registry.limit_of(class) else { return true };
            let has_room = self.count(class, |_| true) < limit as usize;
            if has_room {
                self.jobs.insert(job.id(), class.clone());
            } else {
                refused.push(job.id());
            }
            has_room
        });
        refused
    }

    /// How many more jobs of each limited class are accepted.
    pub(crate) fn slots(&self, registry: &Registry, is_held: impl Fn(JobId) -> bool) -> Vec<ClassSlots> {
        let mut slots = registry.class_slots();
        for ClassSlots { class, free } in &mut slots {
            *free = free.saturating_sub(u32::try_from(self.count(class, &is_held)).unwrap_or(u32::MAX));
        }
        slots
    }

    fn count(&self, class: &str, is_held: impl Fn(JobId) -> bool) -> usize {
        self.jobs.iter().filter(|(job, of)| *of == class && is_held(**job)).count()
    }
}

#[cfg(test)]
mod tests {
    use std::{num::NonZeroU32, sync::Arc};

    use bson::{Bson, doc};
    use recruiter_common::{
        DoNotDoItAgain,
        failure::{self, Failure},
        job::Job,
    };

    use super::*;
    use crate::registry::{Handler, Ready};

    struct Nothing;

    impl Handler for Nothing {
        fn decode(&self, _: Bson) -> Result<Arc<dyn Ready>, Failure> {
            Err(Failure::new(failure::UNKNOWN_CLASS, "it is never run"))
        }
    }

    fn jobs(class: &str, count: usize) -> Vec<Startable> {
        let died = Failure::new(failure::WORKER_DIED, "the worker died");
        let now = bson::DateTime::now();
        let job = |_| {
            let job = doc! { "_id": JobId::new(), "locked": false, "group": "g", "workable": { "class": class }, "scheduled_at": now };
            Startable::new(Arc::new(Job::try_from(job).expect("a job")), Ok(Arc::new(DoNotDoItAgain)), None, &died, now.to_chrono())
        };
        (0..count).map(job).collect()
    }

    #[test]
    fn jobs_beyond_the_limit_of_their_class_are_returned_until_others_have_ended() {
        let mut registry = Registry::default();
        for class in ["a", "b", "c"] {
            registry.add(class, Arc::new(Nothing)).expect("a new class");
        }
        let limit = |jobs: u32| NonZeroU32::new(jobs).expect("not zero");
        registry.limit("a", limit(2)).expect("it is registered");
        registry.limit("b", limit(1)).expect("it is registered");
        assert!(registry.limit("x", limit(1)).is_err());
        let mut limits = ClassLimits::default();
        let mut arrived: Vec<Startable> = [jobs("a", 1), jobs("c", 5), jobs("b", 2)].into_iter().flatten().collect();
        let refused = limits.admit(&mut arrived, &registry, |_| true);
        assert_eq!((arrived.len(), refused.len()), (7, 1));
        let free = |limits: &ClassLimits, is_held: &dyn Fn(JobId) -> bool| {
            limits.slots(&registry, is_held).into_iter().map(|slots| (slots.class, slots.free)).collect::<Vec<_>>()
        };
        assert_eq!(free(&limits, &|_| true), [("a".into(), 1), ("b".into(), 0)]);
        let first = arrived[0].id();
        let mut more = jobs("a", 2);
        assert_eq!((limits.admit(&mut more, &registry, |_| true).len(), more.len()), (1, 1));
        assert_eq!(free(&limits, &|job| job != first), [("a".into(), 1), ("b".into(), 0)]);
        let mut more = jobs("a", 2);
        assert_eq!((limits.admit(&mut more, &registry, |job| job != first).len(), more.len()), (1, 1), "the first has ended");
    }
}
