//! Which worker gets which job: a pure function.

use std::{cmp::Ordering, collections::HashMap};

use recruiter_common::{
    ids::WorkerId,
    roster::AvailableWorker,
    store::{Assignment, DueJob},
};

/// The most urgent job first, the older one first among equals.
pub(crate) fn in_order(a: &DueJob, b: &DueJob) -> Ordering {
    b.priority.cmp(&a.priority).then(a.scheduled_at.cmp(&b.scheduled_at))
}

/// Gives due jobs, in their order, to workers that work on their group, have their class and have a place free.
///
/// Each to whoever has most places free, so that work spreads. Jobs that nobody can take are passed over.
pub(crate) fn plan_assignments(workers: &[AvailableWorker], due: &[DueJob]) -> Vec<Assignment> {
    let mut free: Vec<u32> = workers.iter().map(|worker| worker.free).collect();
    let mut places: u64 = free.iter().map(|free| u64::from(*free)).sum();
    let mut able: HashMap<(&str, &str), Vec<usize>> = HashMap::new();
    let mut given: HashMap<WorkerId, Assignment> = HashMap::new();
    for job in due {
        if places == 0 {
            break;
        }
        let candidates = able.entry((&job.group, &job.class)).or_insert_with_key(|(group, class)| {
            let fits = |worker: &AvailableWorker| worker.work_on.includes(group) && worker.classes.iter().any(|had| had == class);
            (0..workers.len()).filter(|index| fits(&workers[*index])).collect()
        });
        let Some(index) = candidates.iter().copied().filter(|index| free[*index] > 0).max_by_key(|index| free[*index]) else { continue };
        free[index] -= 1;
        places -= 1;
        let worker = workers[index].id;
        given.entry(worker).or_insert_with(|| Assignment { worker, jobs: Vec::new() }).jobs.push(job.id);
    }
    given.into_values().collect()
}

#[cfg(test)]
mod tests {
    use recruiter_common::{ids::JobId, instant::Instant, roster::WorkOn, store::Channel};

    use super::*;

    fn worker(groups: &[&str], classes: &[&str], free: u32) -> AvailableWorker {
        let work_on = if groups == ["*"] { WorkOn::All } else { WorkOn::Groups(groups.iter().map(ToString::to_string).collect()) };
        AvailableWorker {
            id: WorkerId::new(),
            work_on,
            classes: classes.iter().map(ToString::to_string).collect(),
            free,
            round: None,
            channel: Channel::default(),
        }
    }

    fn job(group: &str, class: &str, priority: i64, age: i64) -> DueJob {
        let scheduled_at = Instant::from_timestamp_millis(1_000_000 - age).expect("a date");
        DueJob { id: JobId::new(), group: group.into(), class: class.into(), priority, scheduled_at }
    }

    /// How many jobs each worker gets, in order.
    fn check(workers: &[AvailableWorker], mut due: Vec<DueJob>, expected: &[usize]) -> Vec<Assignment> {
        due.sort_by(in_order);
        let given = plan_assignments(workers, &due);
        let count = |worker: &AvailableWorker| given.iter().find(|given| given.worker == worker.id).map_or(0, |given| given.jobs.len());
        assert_eq!(workers.iter().map(count).collect::<Vec<_>>(), expected);
        given
    }

    #[test]
    fn workers_get_what_they_can_do_and_no_more_than_fits() {
        let jobs = |n: usize| (0..n).map(|_| job("a", "x", 5, 0)).collect::<Vec<_>>();
        check(&[], jobs(3), &[]);
        check(&[worker(&["*"], &["x"], 2)], vec![], &[0]);
        check(&[worker(&["*"], &["x"], 2)], jobs(3), &[2]);
        check(&[worker(&["a"], &["x"], 2), worker(&["b"], &["x"], 2), worker(&["b", "a"], &["x"], 2)], jobs(9), &[2, 0, 2]);
        check(&[worker(&["*"], &["y"], 2), worker(&["*"], &["y", "x"], 1)], jobs(9), &[0, 1]);
    }

    #[test]
    fn work_spreads_over_free_places() {
        let jobs = |n: usize| (0..n).map(|_| job("a", "x", 5, 0)).collect::<Vec<_>>();
        check(&[worker(&["*"], &["x"], 10), worker(&["*"], &["x"], 10)], jobs(6), &[3, 3]);
        check(&[worker(&["*"], &["x"], 10), worker(&["*"], &["x"], 2)], jobs(8), &[8, 0]);
    }

    #[test]
    fn jobs_nobody_can_take_do_not_stop_the_others() {
        let mut jobs: Vec<DueJob> = (0..50).map(|_| job("a", "unknown", 9, 100)).collect();
        jobs.push(job("a", "x", 0, 0));
        check(&[worker(&["*"], &["x"], 1)], jobs, &[1]);
    }

    #[test]
    fn urgency_comes_before_age_across_groups() {
        let due = vec![job("a", "x", 5, 500), job("b", "x", 6, 1), job("b", "x", 5, 900)];
        let (urgent, oldest) = (due[1].id, due[2].id);
        let given = check(&[worker(&["*"], &["x"], 2)], due, &[2]);
        assert_eq!(given[0].jobs, [urgent, oldest]);
    }
}
