//! The plan of a round: which worker gets which job. It is computed by a pure function.
//!
//! | module | content |
//! |---|---|
//! | `ranking` | what each worker still accepts, and which one is the first for the next job |

mod ranking;

use std::{
    cell::OnceCell,
    cmp::Reverse,
    collections::{BinaryHeap, HashMap, HashSet},
    iter::Peekable,
    sync::Arc,
};

use recruiter_common::{
    ids::{JobId, WorkerId},
    instant::Instant,
    store::{Lane, NotAdmitted, Permits, Position, ScheduledJob},
};

use self::ranking::{Rank, Ranking};
use super::{
    admission::{Admission, Way, shares::Pass},
    book::Refusals,
    fleet::{FreeWorker, KindId},
    lanes::windows::KnownJobs,
};

/// A job that a worker gets.
#[derive(Clone, Debug)]
pub(crate) struct Given {
    pub(crate) id: JobId,
    pub(crate) due: Instant,
    pub(crate) lane: Arc<Lane>,
}

/// The jobs of each worker.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    /// For each worker, by its index: its jobs, sorted by position.
    pub(crate) given: HashMap<usize, Vec<Given>>,
    /// The permits of those that are limited.
    pub(crate) permits: Permits,
    /// The lanes of these jobs.
    pub(crate) lanes: HashSet<Arc<Lane>>,
}

/// The due jobs of a lane, and the workers that take them.
struct Queue<'a, I: Iterator<Item = &'a ScheduledJob>> {
    lane: &'a Lane,
    due: Peekable<I>,
    kinds: &'a [KindId],
}

impl<'a, I: Iterator<Item = &'a ScheduledJob>> Queue<'a, I> {
    /// The place of the next job among those of all lanes, and the index of this queue.
    fn head(&mut self, index: usize, admission: &Admission, now: Instant) -> Option<(Reverse<Pass>, Reverse<Position>, usize)> {
        let position = admission.ageing.position(self.due.peek()?, now);
        Some((Reverse(admission.pass(&self.lane.group)), Reverse(position), index))
    }
}

/// Gives the jobs that are due at `now` to workers that take the lane and accept another job: in the order of their positions across all
/// lanes, or if groups have weights, first of the group that is furthest behind its share.
///
/// Among the workers that accept a job, these are preferred, in this order:
///
/// 1. workers that have not refused the job;
/// 2. if the last worker did not answer the assignment of the job: the worker whose roster document changed last;
/// 3. workers whose heartbeat is not overdue;
/// 4. the worker with the most free slots, so that jobs are spread. If no worker has a free slot, the one that accepts the most jobs ahead.
///
/// A worker gets no more jobs of a class than it accepts of that class.
///
/// Limited jobs go to free slots only, with permits; so do jobs that age. If no worker has a free slot for such a job, one of them gets no
/// later jobs ahead. While all permits of a resource are held, its jobs go ahead to workers that hold some, unless an earlier job waits for
/// the same resource. If admission refuses a job, all jobs of its lane wait.
///
/// A job is given once, even if its lane has it under two dates. This happens if a search has found the job, and an announcement with an
/// earlier date arrives late.
pub(crate) fn plan<'a>(
    workers: &[FreeWorker],
    lanes: impl Iterator<Item = KnownJobs<'a>>,
    refusals: &Refusals,
    admission: &mut Admission,
    now: Instant,
) -> Plan {
    let queue = |waiting: KnownJobs<'a>| Queue {
        lane: waiting.lane,
        due: waiting.jobs.iter().filter(move |job| job.scheduled_at <= now).peekable(),
        kinds: waiting.able,
    };
    let mut queues: Vec<_> = lanes.filter(|waiting| admission.way(waiting.lane, now).is_ok()).map(queue).collect();
    let mut heads: BinaryHeap<_> = queues.iter_mut().enumerate().filter_map(|(index, queue)| queue.head(index, admission, now)).collect();
    let mut planning = Planning::new(workers, refusals, admission, now);
    while !planning.ranking.is_exhausted()
        && let Some((Reverse(pass), _, index)) = heads.pop()
    {
        let queue = &mut queues[index];
        // If another lane of the group was served in the meantime, this one has its turn later.
        let is_overtaken = pass < planning.admission.pass(&queue.lane.group);
        if is_overtaken || planning.give_next(queue) {
            heads.extend(queue.head(index, planning.admission, now));
        }
    }
    planning.plan
}

/// A plan that is being made, and what the workers still accept.
struct Planning<'a> {
    workers: &'a [FreeWorker],
    refusals: &'a Refusals,
    admission: &'a mut Admission,
    now: Instant,
    plan: Plan,
    /// The jobs of the plan, and those that could not be given.
    seen: HashSet<JobId>,
    ranking: Ranking,
    /// The index of each worker, once it is needed.
    indexes: OnceCell<HashMap<WorkerId, usize>>,
    /// How many jobs of the classes that have a limit each worker accepts.
    of_classes: Vec<HashMap<&'a str, u32>>,
    /// The full resources for which a job waits that could not be given.
    wanted: HashSet<String>,
}

impl<'a> Planning<'a> {
    fn new(workers: &'a [FreeWorker], refusals: &'a Refusals, admission: &'a mut Admission, now: Instant) -> Self {
        let of_classes = |worker: &'a FreeWorker| worker.class_slots.iter().map(|slots| (slots.class.as_str(), slots.free)).collect();
        let of_classes = workers.iter().map(of_classes).collect();
        let (ranking, plan, seen, wanted) = (Ranking::new(workers), Plan::default(), HashSet::new(), HashSet::new());
        Self { workers, refusals, admission, now, plan, seen, ranking, indexes: OnceCell::new(), of_classes, wanted }
    }

    /// Gives the next job of a lane. Returns whether the job behind it can have its turn: not if this one must wait.
    fn give_next<'b>(&mut self, queue: &mut Queue<'b, impl Iterator<Item = &'b ScheduledJob>>) -> bool {
        let Some(job) = queue.due.next() else { return false };
        if !self.seen.insert(job.id) {
            return true;
        }
        match self.admission.way(queue.lane, self.now) {
            Ok(Way::PermitsOfOthers) => self.give_to_holder(queue.lane, queue.kinds, job),
            way => self.give_to_any(queue.lane, queue.kinds, job, way),
        }
    }

    /// Gives a job of a full resource to a worker that holds permits of it: there it waits for one of them.
    fn give_to_holder(&mut self, lane: &Lane, kinds: &[KindId], job: &ScheduledJob) -> bool {
        let is_wanted = self.admission.resources(lane).any(|resource| self.wanted.contains(&resource));
        let holders = if is_wanted { HashSet::new() } else { self.admission.can_wait_in(lane, self.now) };
        let all = || self.workers.iter().enumerate().map(|(index, worker)| (worker.id, index)).collect();
        let indexes = holders.iter().filter_map(|holder| self.indexes.get_or_init(all).get(holder)).copied();
        let has_room = |rank: &Rank| {
            let worker = rank.worker;
            rank.ahead > 0 && kinds.contains(&self.workers[worker].kind) && self.accepts_class(worker, &lane.class)
        };
        let best = indexes.map(|worker| self.ranking.rank(worker)).filter(has_room).max_by_key(|rank| (rank.ahead, rank.worker));
        let Some(Rank { worker, .. }) = best else {
            self.wanted.extend(self.admission.resources(lane));
            return false;
        };
        let permit = self.admission.wait_in(self.workers[worker].id, lane, job);
        self.plan.permits.insert(job.id, permit);
        self.ranking.give_ahead(worker);
        self.give(worker, lane, job);
        true
    }

    /// Gives a job to the best of the workers that have room for it.
    fn give_to_any(&mut self, lane: &Lane, kinds: &[KindId], job: &ScheduledJob, way: Result<Way, NotAdmitted>) -> bool {
        let needs_free_slot = way == Ok(Way::Permits) || self.admission.needs_free_slot(lane, job, self.now);
        let is_limited = way != Ok(Way::Unlimited);
        let accepts = |worker| self.accepts_class(worker, &lane.class);
        let takes = |worker: usize| accepts(worker) && (!is_limited || self.workers[worker].takes_limited);
        // Without one no worker accepts a job of this lane any more: the slots go to other lanes.
        let Some(worker) = self.best(kinds, job, needs_free_slot, takes) else {
            if let Some(worker) = self.best(kinds, job, false, accepts) {
                // It gets no jobs ahead that come later than this one, so that its next free slot is offered.
                self.ranking.close_ahead(worker);
            }
            return false;
        };
        let Ok(permit) = self.admission.admit(self.workers[worker].id, lane, job, self.now) else { return false };
        self.plan.permits.extend(permit.map(|permit| (job.id, permit)));
        self.ranking.give(worker);
        self.give(worker, lane, job);
        true
    }

    /// The preferred one of the workers of these kinds for which `takes` is true. The order is that of [`plan`].
    fn best(&self, kinds: &[KindId], job: &ScheduledJob, needs_free_slot: bool, takes: impl Fn(usize) -> bool) -> Option<usize> {
        if !self.refusals.knows(job.id) {
            return self.ranking.first(kinds, needs_free_slot, takes).map(|rank| rank.worker);
        }
        let unanswered = self.refusals.was_unanswered(job.id);
        let preference = |rank: &Rank| {
            let worker = &self.workers[rank.worker];
            let is_willing = !self.refusals.was_refused_by(job.id, worker.id);
            (is_willing, unanswered.then_some(worker.changed_at), *rank)
        };
        let has_room = |rank: &Rank| (!needs_free_slot || rank.free > 0) && takes(rank.worker);
        self.ranking.all(kinds).filter(has_room).max_by_key(preference).map(|rank| rank.worker)
    }

    /// Whether a worker accepts another job of a class, if it has a limit for that class.
    fn accepts_class(&self, worker: usize, class: &str) -> bool {
        self.of_classes[worker].get(class) != Some(&0)
    }

    /// Gives a job to a worker, which accepts one less of its class.
    fn give(&mut self, worker: usize, lane: &Lane, job: &ScheduledJob) {
        if let Some(free) = self.of_classes[worker].get_mut(lane.class.as_str()) {
            *free -= 1;
        }
        let lane = match self.plan.lanes.get(lane) {
            Some(lane) => lane.clone(),
            None => {
                let lane = Arc::new(lane.clone());
                self.plan.lanes.insert(lane.clone());
                lane
            }
        };
        self.plan.given.entry(worker).or_default().push(Given { id: job.id, due: job.scheduled_at, lane });
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::VecDeque, time::Duration};

    use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
    use recruiter_common::{
        limits::{GroupSettings, Limit, Settings},
        store::{AvailableWorker, ClassSlots, KeptCells},
    };

    use super::*;
    use crate::leader::{
        book::{Book, tests::refuse},
        fleet::{
            Fleet,
            tests::{available, fleet},
        },
    };

    const NOW: Instant = Instant::UNIX_EPOCH;

    fn job(group: &str, class: &str, priority: i64, age: u64) -> ScheduledJob {
        ScheduledJob {
            id: JobId::new(),
            group: group.into(),
            class: class.into(),
            gate: None,
            priority,
            scheduled_at: NOW - Duration::from_millis(age),
        }
    }

    /// The jobs that each worker gets.
    fn given(fleet: &Fleet, jobs: &[ScheduledJob], refusals: &Refusals) -> Vec<Vec<JobId>> {
        let mut lanes: HashMap<Lane, VecDeque<ScheduledJob>> = HashMap::new();
        let mut sorted = jobs.to_vec();
        sorted.sort_by_key(ScheduledJob::position);
        for job in sorted {
            lanes.entry(job.lane()).or_default().push_back(job);
        }
        let able = |lane: &Lane| (0..fleet.kinds().len()).filter(|kind| fleet.kinds()[*kind].takes(lane)).collect::<Vec<_>>();
        let able: HashMap<&Lane, Vec<KindId>> = lanes.keys().map(|lane| (lane, able(lane))).collect();
        let waiting = lanes.iter().map(|(lane, jobs)| KnownJobs { lane, jobs, able: &able[lane] });
        let plan = plan(fleet.workers(), waiting, refusals, &mut Admission::default(), NOW);
        let of = |worker| plan.given.get(&worker).into_iter().flatten().map(|job| job.id).collect();
        (0..fleet.workers().len()).map(of).collect()
    }

    fn check(workers: Vec<AvailableWorker>, jobs: &[ScheduledJob], expected: &[usize]) -> Vec<Vec<JobId>> {
        let given = given(&fleet(workers), jobs, &Refusals::default());
        assert_eq!(given.iter().map(Vec::len).collect::<Vec<_>>(), expected);
        given
    }

    #[test]
    fn workers_get_jobs_that_they_take_and_no_more_than_they_accept() {
        let jobs = |n: usize| (0..n).map(|_| job("a", "x", 5, 0)).collect::<Vec<_>>();
        check(vec![], &jobs(3), &[]);
        check(vec![available(&["*"], &["x"], 2)], &[], &[0]);
        check(vec![available(&["*"], &["x"], 2)], &jobs(3), &[2]);
        check(vec![available(&["a"], &["x"], 2), available(&["b"], &["x"], 2), available(&["b", "a"], &["x"], 2)], &jobs(9), &[2, 0, 2]);
        check(vec![available(&["*"], &["y"], 2), available(&["*"], &["y", "x"], 1)], &jobs(9), &[0, 1]);
        let later = ScheduledJob { scheduled_at: NOW + Duration::from_millis(1), ..job("a", "x", 9, 0) };
        check(vec![available(&["*"], &["x"], 2)], &[later], &[0]);
    }

    #[test]
    fn free_slots_come_before_the_room_ahead_of_any_worker() {
        let jobs = |n: usize| (0..n).map(|_| job("a", "x", 5, 0)).collect::<Vec<_>>();
        let ahead = |free, prefetch| AvailableWorker { prefetch, ..available(&["*"], &["x"], free) };
        check(vec![ahead(1, 9), ahead(4, 0)], &jobs(5), &[1, 4]);
        check(vec![ahead(1, 9), ahead(4, 0)], &jobs(99), &[10, 4]);
        check(vec![ahead(0, 3), ahead(0, 7)], &jobs(6), &[1, 5]);
        let given = check(vec![ahead(1, 3)], &[job("a", "x", 1, 0), job("a", "x", 9, 0)], &[2]);
        assert_eq!(given[0].len(), 2);
    }

    /// In free slots and ahead. The other slots are for other classes.
    #[test]
    fn a_worker_gets_no_more_jobs_of_a_class_than_it_accepts_of_it() {
        let of = |class: &str, count: usize| (0..count).map(|_| job("a", class, 5, 0)).collect::<Vec<_>>();
        let limited = |free| AvailableWorker {
            prefetch: 9,
            class_slots: vec![ClassSlots { class: "x".into(), free }],
            ..available(&["*"], &["x", "y"], 3)
        };
        check(vec![limited(2)], &of("x", 9), &[2]);
        check(vec![limited(2)], &[of("x", 9), of("y", 4)].concat(), &[6]);
        check(vec![limited(1), limited(4)], &of("x", 9), &[1, 4]);
    }

    /// A job that needs a free slot is not overtaken for ever by jobs that are given ahead.
    #[test]
    fn a_job_that_needs_a_free_slot_keeps_later_ones_from_going_ahead() {
        let ages = GroupSettings { ageing: Some(Duration::from_millis(10)), ..GroupSettings::default() };
        let settings = Settings { groups: [("a".into(), ages)].into(), ..Settings::default() };
        let workers = |free| fleet(vec![AvailableWorker { prefetch: 9, ..available(&["*"], &["x"], free) }]);
        let (old, urgent, other) = (job("a", "x", 0, 85), job("b", "x", 9, 0), job("b", "x", 1, 0));
        let given = |free: u32, jobs: &[&ScheduledJob]| {
            let mut admission = Admission::begin(settings.clone(), &[], KeptCells::default(), NOW);
            let lanes: Vec<(Lane, VecDeque<ScheduledJob>)> = jobs.iter().map(|job| (job.lane(), [(*job).clone()].into())).collect();
            let waiting = lanes.iter().map(|(lane, jobs)| KnownJobs { lane, jobs, able: &[0] });
            let plan = plan(workers(free).workers(), waiting, &Refusals::default(), &mut admission, NOW);
            plan.given.get(&0).into_iter().flatten().map(|job| job.id).collect::<Vec<_>>()
        };
        assert_eq!(given(0, &[&old, &urgent]), [urgent.id], "a more urgent one goes ahead");
        assert_eq!(given(0, &[&old, &other]), [], "a less urgent one does not");
        assert_eq!(given(1, &[&old, &urgent]), [urgent.id], "the slot is taken");
        assert_eq!(given(1, &[&old, &other]), [old.id, other.id]);
    }

    /// Two permits, both held by the first worker. The second one accepts more jobs.
    #[test]
    fn jobs_of_a_full_resource_go_ahead_to_its_holders_unless_an_earlier_one_waits_for_it() {
        let capacity = Limit::capacity(2);
        let limits = ["printer", "scanner"].map(|name| (name.to_owned(), capacity)).into();
        let gated = |gate: &str, age| ScheduledJob { gate: Some(gate.into()), ..job("a", "x", 5, age) };
        let given = |jobs: &[ScheduledJob]| {
            let fleet = fleet([2, 9].map(|prefetch| AvailableWorker { prefetch, ..available(&["*"], &["x"], 3) }).into());
            let mut admission =
                Admission::begin(Settings { limits: Clone::clone(&limits), ..Settings::default() }, &[], KeptCells::default(), NOW);
            let printer = gated("printer", 0);
            (0..2).for_each(|_| _ = admission.admit(fleet.workers()[0].id, &printer.lane(), &printer, NOW).unwrap());
            let mut lanes: HashMap<Lane, VecDeque<ScheduledJob>> = HashMap::new();
            jobs.iter().for_each(|job| lanes.entry(job.lane()).or_default().push_back(job.clone()));
            let waiting = lanes.iter().map(|(lane, jobs)| KnownJobs { lane, jobs, able: &[0] });
            let plan = plan(fleet.workers(), waiting, &Refusals::default(), &mut admission, NOW);
            let ahead = plan.permits.values().filter(|permit| permit.is_ahead).count();
            ([0, 1].map(|worker| plan.given.get(&worker).map_or(0, Vec::len)), ahead)
        };
        let of_printer: Vec<ScheduledJob> = (1..9).map(|age| gated("printer", 100 - age)).collect();
        assert_eq!(given(&of_printer), ([2, 0], 2), "as many as it accepts ahead");
        let both = |age| [gated("printer,scanner", age)];
        assert_eq!(given(&[&both(200)[..], &of_printer].concat()), ([0, 0], 0), "the first of them needs a permit that is not passed on");
        assert_eq!(given(&[&of_printer, &both(1)[..]].concat()), ([2, 0], 2));
        let plain: Vec<ScheduledJob> = (0..9).map(|_| gated("scanner", 300)).collect();
        assert_eq!(given(&plain), ([3, 5], 6), "one permit for each, and then four ahead for each permit, as far as they are accepted");
    }

    #[test]
    fn a_worker_of_an_earlier_release_gets_no_limited_jobs() {
        let limits = [("printer".to_owned(), Limit::capacity(2))].into();
        let mut admission = Admission::begin(Settings { limits, ..Settings::default() }, &[], KeptCells::default(), NOW);
        let fleet = fleet(vec![AvailableWorker { held_permits: None, ..available(&["*"], &["x"], 3) }]);
        let limited = ScheduledJob { gate: Some("printer".into()), ..job("a", "x", 5, 0) };
        let jobs = [limited, job("a", "x", 5, 0)].map(|job| (job.lane(), VecDeque::from([job])));
        let waiting = jobs.iter().map(|(lane, jobs)| KnownJobs { lane, jobs, able: &[0] });
        let plan = plan(fleet.workers(), waiting, &Refusals::default(), &mut admission, NOW);
        assert_eq!(plan.given[&0].iter().map(|job| job.id).collect::<Vec<_>>(), [jobs[1].1[0].id]);
    }

    #[test]
    fn work_spreads_over_free_slots() {
        let jobs = |n: usize| (0..n).map(|_| job("a", "x", 5, 0)).collect::<Vec<_>>();
        check(vec![available(&["*"], &["x"], 10), available(&["*"], &["x"], 10)], &jobs(6), &[3, 3]);
        check(vec![available(&["*"], &["x"], 10), available(&["*"], &["x"], 2)], &jobs(8), &[8, 0]);
    }

    #[test]
    fn jobs_that_no_worker_takes_do_not_stop_the_others() {
        let mut jobs: Vec<ScheduledJob> = (0..50).map(|_| job("a", "unknown", 9, 100)).collect();
        jobs.push(job("a", "x", 0, 0));
        check(vec![available(&["*"], &["x"], 1)], &jobs, &[1]);
    }

    #[test]
    fn urgency_comes_before_age_across_lanes_and_among_equals_the_order_of_ids() {
        let jobs = [job("a", "x", 5, 500), job("b", "x", 6, 1), job("b", "y", 5, 900), job("a", "y", 5, 500)];
        let given = check(vec![available(&["*"], &["x", "y"], 4)], &jobs, &[4]);
        assert_eq!(given[0], [jobs[1].id, jobs[2].id, jobs[0].id, jobs[3].id]);
    }

    #[test]
    fn a_worker_that_did_not_start_a_job_or_is_overdue_comes_last() {
        let (large, small) = (available(&["*"], &["x"], 9), available(&["*"], &["x"], 1));
        let (large_id, jobs) = (large.id, [job("a", "x", 5, 0)]);
        let mut fleet = fleet(vec![large, small]);
        let counts = |fleet: &Fleet, refusals: &Refusals| given(fleet, &jobs, refusals).iter().map(Vec::len).collect::<Vec<_>>();
        assert_eq!(counts(&fleet, &Refusals::default()), [1, 0]);
        let mut book = Book::default();
        refuse(&mut book, &jobs[0], large_id, false, std::time::Instant::now());
        assert_eq!(counts(&fleet, &book.refusals), [0, 1]);
        fleet.workers_mut()[0].is_overdue = true;
        assert_eq!(counts(&fleet, &Refusals::default()), [0, 1]);
        fleet.workers_mut()[1].is_overdue = true;
        assert_eq!(counts(&fleet, &Refusals::default()), [1, 0], "both are overdue");
    }

    #[test]
    fn a_job_without_an_answer_goes_to_the_worker_with_the_latest_heartbeat() {
        let workers: Vec<AvailableWorker> = (0..4).map(|_| available(&["*"], &["x"], 5)).collect();
        let (first, jobs, at) = (workers[0].id, [job("a", "x", 5, 0)], std::time::Instant::now());
        let mut fleet = fleet(workers);
        fleet.workers_mut()[2].changed_at = at + Duration::from_secs(4);
        let mut book = Book::default();
        refuse(&mut book, &jobs[0], first, true, at);
        assert_eq!(given(&fleet, &jobs, &book.refusals).iter().map(Vec::len).collect::<Vec<_>>(), [0, 0, 1, 0]);
    }

    /// Compares with a simple plan that handles all jobs one after the other.
    #[test]
    fn the_lanes_are_planned_as_one_queue() {
        let names = ["a", "b", "c", "d"];
        for seed in 0..500 {
            let mut random = StdRng::seed_from_u64(seed);
            let mut below = |n: u32| random.random_range(0..n);
            let mut some = |names: &[&'static str]| names.iter().copied().filter(|_| below(2) == 0).collect::<Vec<_>>();
            let workers: Vec<AvailableWorker> = (0..4).map(|n| available(&some(&names), &some(&names), n)).collect();
            let jobs: Vec<ScheduledJob> =
                (0..below(30)).map(|_| job(names[below(4) as usize], names[below(4) as usize], below(3).into(), below(5).into())).collect();
            let mut sorted: Vec<&ScheduledJob> = jobs.iter().collect();
            sorted.sort_by_key(|job| job.position());
            let mut free: Vec<u32> = workers.iter().map(|worker| worker.free).collect();
            let mut expected = HashSet::new();
            for job in sorted {
                let takes = |worker: &AvailableWorker| worker.work_on.includes(&job.group) && worker.classes.contains(&job.class);
                let able = (0..workers.len()).filter(|worker| free[*worker] > 0 && takes(&workers[*worker]));
                if let Some(worker) = able.max_by_key(|worker| free[*worker]) {
                    free[worker] -= 1;
                    expected.insert(job.id);
                }
            }
            let given: HashSet<JobId> = given(&fleet(workers), &jobs, &Refusals::default()).into_iter().flatten().collect();
            assert_eq!(given, expected, "seed {seed}");
        }
    }
}
