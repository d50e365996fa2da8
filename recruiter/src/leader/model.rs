//! A model of the leader's caches. It checks that the rules of staleness (`lanes`) keep invariant I7. All code of a round is the real code.
//! The database and both clocks are in memory.
//!
//! | part | in the model |
//! |---|---|
//! | job | group, class, gate, priority, date; absent, announced and not visible yet, due, or locked |
//! | worker | groups, classes, slots; it takes an assignment, starts all of its jobs or none, offers its slots again, leaves, or does nothing |
//! | ahead | a worker accepts 0 to 4 jobs ahead; it holds them, locks them, returns them, starts them in free slots, and passes permits on to them |
//! | hint | is received before the next round, or is lost; it may announce a job that becomes visible later, or never |
//! | limit | of the gate: none that matters, or one; MongoDB refuses an assignment with a permit that another worker holds |
//! | list | of the lanes: at once, or one group in each step, and one with news, and at most one lane of a group. A step is a round, and events come between steps |
//! | search | asks for `ahead` jobs per free slot beyond the first (0 to 3), so that windows end before their lane does |
//! | time | one millisecond per event; `Wait` advances to the next round that `rounds` would begin |
//!
//! A job is **known** if the recruiter had a full scan or a hint about it after the job was inserted, moved, unlocked, assigned, refused or
//! returned. A full scan that is due while another one is listed in steps does not count. A slot is known if the recruiter had a full scan or
//! a hint about it after it was offered. Jobs in flight and paused jobs (`book`) do not count as waiting.
//!
//! | property, after each round | holds |
//! |---|---|
//! | (a) no known due job waits while a known free slot could take it | exactly, if the round had a full scan or a hint about the job; otherwise except *late* jobs |
//! | (a) the next round begins when a known job becomes due or its pause ends, if a known free slot could take it | except *late* jobs |
//! | (b) a plan gives each job once, to a worker that takes it, in a free slot or ahead, and gives no job that is in flight | exactly |
//! | (c) no worker gets a job, in a slot or ahead, while a more urgent known job that it takes waits | as the first property; limited jobs do not go ahead |
//! | (d) no window has a job after its end | exactly |
//! | (e) no job is in flight for longer than five seconds, or nine if workers hold jobs ahead | exactly |
//! | (f) at most five rounds follow each other at once, and one for each step or lane that wakes | exactly |
//! | (g) no job goes ahead while another worker has a known free slot for it, and no limited job does except to wait for permits | unless that worker has refused the job |
//! | (h) a full scan in steps ends: each job is known when as many full scans were due as there are groups, and one more | exactly |
//!
//! A job is *late* if it became due less than `FRUITLESS_FOR` (100 ms) ago and no hint reported it: after a fruitless search, its lane is
//! not searched for this time. A slot counts as used if it gets a job that was cancelled, or of which the caches have an old date. If a
//! worker refuses or returns a job later than one scan interval after the assignment, or returns it to another leader, its hint does not
//! count: the next full scan finds the job.
//!
//! A hint about a group counts only for jobs without a gate: if a group had no gated lanes at the last full scan, the next full scan finds
//! its new ones.
//!
//! A lane sleeps from two windows on, or from none, instead of a thousand. Property (c) leaves out jobs of sleeping lanes, and of lanes that an
//! announcement has just woken: their order is kept only among the lanes that are awake. Property (a) leaves out jobs of sleeping lanes while
//! as many lanes as may be awake are ready, and for a worker that gets other jobs.
//!
//! A job that a worker holds ahead is not in flight if it has another date than in its assignment, or for a leader that began later.
//!
//! The model does not contain: more jobs than the caches keep (`REMEMBERED`), and searches that take too long. In these cases the next full
//! scan finds the jobs. A new leader, which begins with a full scan, jobs ahead and lists in steps are part of the random walks only.

mod memory;
mod world;

use std::{collections::HashSet, mem, time::Duration};

use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};

use self::{
    memory::{SCAN_AFTER, WorkerSpec},
    world::{Event, Hints, World},
};
use crate::leader::{database::Database as _, lanes::discover::Bounds};

/// Each group is a step of a full scan, and at most one of its lanes is listed.
const STEPS: Bounds = Bounds { pairs: 0, groups: 0, classes: 1, groups_at_once: 1, step: Duration::ZERO };

/// Two lanes, a worker that takes one of them and a worker that takes both.
fn small(ahead: usize, gate: Option<&str>) -> World {
    let workers: [WorkerSpec<'_>; 2] = [(&["*"], &["a"], 1), (&["*"], &["a", "b"], 1)];
    let mut world = World::new(ahead, &workers, &[("g", "a", None, 5), ("g", "b", None, 5), ("g", "a", gate, 9)]);
    world.step(Event::Join(0), Hints::Heard);
    world.step(Event::Join(1), Hints::Round);
    world
}

/// Number of events in each explored order. Five events take minutes.
fn depth() -> usize {
    std::env::var("RECRUITER_MODEL_EVENTS").map_or(4, |events| events.parse().expect("a number of events"))
}

/// Explores all orders of `depth` of these events, each with and without a round after it. The hints of at most `losses` events are lost.
/// Returns the number of different worlds before the last event.
fn explore(start: World, depth: usize, losses: usize, is_wanted: impl Fn(&Event) -> bool) -> usize {
    let mut seen = HashSet::from([(start.fingerprint(), losses)]);
    let mut worlds = vec![(start, losses)];
    for depth in (0..depth).rev() {
        let mut next = Vec::new();
        for (world, losses) in &worlds {
            for event in world.events().into_iter().filter(&is_wanted) {
                for hints in [Hints::Round, Hints::Heard, Hints::Lost] {
                    let is_lost = hints == Hints::Lost;
                    // The properties are checked in the last round.
                    if depth == 0 && hints != Hints::Round || is_lost && (*losses == 0 || !event.has_hints()) {
                        continue;
                    }
                    let (mut world, losses) = (world.clone(), losses - usize::from(is_lost));
                    world.step(event, hints);
                    if depth > 0 && seen.insert((world.fingerprint(), losses)) {
                        next.push((world, losses));
                    }
                }
            }
        }
        worlds = next;
    }
    seen.len()
}

#[test]
fn inserted_jobs_get_the_free_slots_in_every_order() {
    let is_insert_or_start = |event: &Event| !matches!(event, Event::Move(..) | Event::Cancel(_) | Event::Retry(..));
    println!("{} worlds", explore(small(0, Some("x")), depth(), 1, is_insert_or_start));
}

#[test]
fn inserted_jobs_of_sleeping_lanes_get_the_free_slots_in_every_order() {
    let mut start = small(0, Some("x"));
    start.assigning.lanes.windows.crowd = 0;
    let is_insert_or_start = |event: &Event| !matches!(event, Event::Move(..) | Event::Cancel(_) | Event::Retry(..));
    println!("{} worlds", explore(start, depth(), 1, is_insert_or_start));
}

#[test]
fn changed_jobs_get_the_free_slots_in_every_order() {
    let mut start = small(1, None);
    (0..3).for_each(|job| start.step(Event::Insert(job), Hints::Heard));
    let changes = |event: &Event| !matches!(event, Event::Archive(_) | Event::Retry(_, 0));
    println!("{} worlds", explore(start, depth(), 0, changes));
}

#[test]
fn a_new_worker_ends_a_long_pause() {
    let mut world = World::new(1, &[(&["*"], &["a"], 1), (&["*"], &["a"], 1)], &[("g", "a", None, 5)]);
    world.step(Event::Join(0), Hints::Round);
    world.step(Event::Insert(0), Hints::Round);
    for _ in 0..8 {
        while !world.events().contains(&Event::Refuse(0)) {
            world.step(Event::Wait, Hints::Round);
        }
        world.step(Event::Refuse(0), Hints::Round);
    }
    // After two full scans the lane is no longer a recent one.
    (0..3).for_each(|_| world.step(Event::Wait, Hints::Round));
    world.step(Event::Join(1), Hints::Round);
    assert!(world.events().contains(&Event::Start(1)));
}

#[test]
fn an_announcement_that_is_outdated_gives_no_job_twice() {
    let mut world = small(0, None);
    world.step(Event::InsertAnnounced(0), Hints::Heard);
    world.step(Event::Move(0, 0), Hints::Round);
    world.step(Event::AnnounceAgain(0), Hints::Round);
    assert!(world.events().contains(&Event::Start(0)) != world.events().contains(&Event::Start(1)));
}

#[test]
fn a_fruitless_search_is_repeated() {
    let mut world =
        World::new(0, &[(&["*"], &["a"], 1), (&["*"], &["a"], 1)], &[("g", "a", None, 9), ("g", "a", None, 9), ("g", "a", None, 5)]);
    (0..2).for_each(|worker| world.step(Event::Join(worker), Hints::Round));
    for job in 0..2 {
        world.step(Event::Insert(job), Hints::Lost);
        world.step(Event::Move(job, 60), Hints::Lost);
    }
    // The answer is full of jobs that are due later.
    world.step(Event::Insert(2), Hints::Round);
    (0..2).for_each(|_| world.step(Event::Wait, Hints::Round));
    assert!((0..2).all(|worker| world.events().contains(&Event::Start(worker))));
}

#[test]
fn jobs_behind_a_limit_that_are_due_later_are_waited_for() {
    let mut jobs = vec![("g", "a", Some("x"), 9); 12];
    jobs.push(("g", "a", Some("x"), 5));
    let mut world = World::new(0, &[(&["*"], &["a"], 1), (&["*"], &["a"], 1)], &jobs);
    (0..2).for_each(|worker| world.step(Event::Join(worker), Hints::Round));
    for job in 0..12 {
        world.step(Event::Insert(job), Hints::Lost);
        world.step(Event::Move(job, 60), Hints::Lost);
    }
    // The first answer is full of jobs that are due later, so a second search asks for due ones only.
    world.step(Event::Insert(12), Hints::Round);
    world.step(Event::Wait, Hints::Round);
    assert!((0..2).all(|worker| world.events().contains(&Event::Start(worker))), "when the first of the others becomes due");
}

/// A job that waits for the permits of others, and does so nowhere, leaves the free slots to others.
#[test]
fn jobs_of_a_full_limit_fill_no_slots_of_other_workers() {
    let gated = ("g", "a", Some("x"), 9);
    let workers: [WorkerSpec<'_>; 2] = [(&["*"], &["a"], 1), (&["*"], &["a", "b"], 2)];
    let mut world = World::new(0, &workers, &[&[gated; 2][..], &[("g", "b", None, 5); 6]].concat());
    world.memory.capacity = 1;
    (0..8).for_each(|job| world.step(Event::Insert(job), Hints::Lost));
    for worker in 0..2 {
        world.step(Event::Join(worker), Hints::Round);
        world.step(Event::Start(worker), Hints::Round);
    }
    for job in 2..6 {
        world.step(Event::Archive(job), Hints::Round);
        assert!(world.events().contains(&Event::Start(1)), "after job {job}");
        world.step(Event::Start(1), Hints::Round);
    }
}

#[test]
fn a_job_that_was_assigned_twice_is_in_flight_to_the_last_worker_after_a_failover() {
    let mut world = World::new(0, &[(&["*"], &["a"], 1), (&["*"], &["a"], 1)], &[("g", "a", None, 5)]);
    world.step(Event::Insert(0), Hints::Lost);
    world.step(Event::Join(1), Hints::Round);
    world.step(Event::Join(0), Hints::Round);
    while !world.events().contains(&Event::Start(0)) {
        world.step(Event::Wait, Hints::Round);
    }
    world.step(Event::Failover, Hints::Round);
    world.step(Event::Refuse(1), Hints::Round);
    assert!(!world.events().contains(&Event::Start(1)));
}

#[test]
fn sleeping_lanes_wake_if_those_that_are_awake_have_no_jobs() {
    let workers: [WorkerSpec<'_>; 2] = [(&["*"], &["a", "c"], 3), (&["*"], &["b"], 1)];
    let mut world = World::new(0, &workers, &["a", "c", "b"].map(|class| ("g", class, Some("x"), 9)));
    world.assigning.lanes.windows.crowd = 0;
    (0..3).for_each(|job| world.step(Event::Insert(job), Hints::Lost));
    world.step(Event::Join(0), Hints::Round);
    (0..2).for_each(|_| world.step(Event::Start(0), Hints::Round));
    world.step(Event::Join(1), Hints::Round);
    assert!(world.events().contains(&Event::Start(1)));
}

#[test]
fn no_job_goes_ahead_while_a_slot_is_free() {
    let mut world = World::new(0, &[(&["*"], &["a"], 1), (&["*"], &["a"], 1)], &[("g", "a", None, 5), ("g", "a", None, 5)]);
    world.memory.data.get_mut().workers[0].prefetch = 4;
    world.step(Event::Insert(0), Hints::Lost);
    world.step(Event::Join(0), Hints::Round);
    world.step(Event::Start(0), Hints::Round);
    world.step(Event::Join(1), Hints::Round);
    world.step(Event::Insert(1), Hints::Round);
    assert!(world.events().contains(&Event::Start(1)));
}

#[test]
fn a_new_kind_of_worker_gets_jobs_of_lanes_that_a_scan_in_steps_has_passed() {
    let workers: [WorkerSpec<'_>; 2] = [(&["*"], &["a"], 2), (&["g"], &["b"], 1)];
    let mut world = World::new(0, &workers, &[("g", "b", Some("x"), 5), ("h", "a", None, 5)]);
    world.assigning.lanes.discovery.bounds = STEPS;
    (0..2).for_each(|job| world.step(Event::Insert(job), Hints::Lost));
    world.step(Event::Join(0), Hints::Step);
    world.step(Event::Join(1), Hints::Round);
    assert!(world.events().contains(&Event::Start(1)));
}

/// Nor do they keep the next full scan, or the list for a new kind of worker, from beginning.
#[test]
fn news_of_many_groups_do_not_keep_a_list_in_steps_from_ending() {
    let workers: [WorkerSpec<'_>; 2] = [(&["*"], &["a"], 2), (&["z"], &["b"], 1)];
    let jobs = [("g", "nobody", None, 5), ("h", "nobody", None, 5), ("z", "a", None, 5), ("z", "b", None, 5), ("y", "a", None, 5)];
    let mut world = World::new(0, &workers, &jobs);
    world.assigning.lanes.discovery.bounds = STEPS;
    world.memory.is_walk_slow = true;
    let news = |world: &mut World| {
        world.step(Event::Move(0, 0), Hints::Heard);
        world.step(Event::Move(1, 0), Hints::Step);
    };
    let start_of = |world: &mut World, worker: usize| {
        (0..5).for_each(|_| news(world));
        assert!(world.events().contains(&Event::Start(worker)), "worker {worker}");
        world.step(Event::Start(worker), Hints::Heard);
    };
    (0..4).for_each(|job| world.step(Event::Insert(job), Hints::Lost));
    world.step(Event::Join(0), Hints::Heard);
    start_of(&mut world, 0);
    world.step(Event::Join(1), Hints::Heard);
    start_of(&mut world, 1);
    world.step(Event::Insert(4), Hints::Lost);
    news(&mut world);
    world.memory.data.get_mut().now += SCAN_AFTER;
    news(&mut world);
    assert!(!world.assigning.lanes.windows.needs_scan(world.memory.now()));
    start_of(&mut world, 0);
}

#[test]
fn jobs_get_the_free_slots_in_long_random_walks() {
    let mut cut = 0;
    for seed in 0..60 {
        cut += walk(seed, 300);
    }
    assert!(cut > 500, "windows must end before their lanes do: {cut}");
}

/// Random events. Returns the number of windows that ended before their lane did.
fn walk(seed: u64, steps: usize) -> usize {
    println!("seed {seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let mut below = |n: usize| random.random_range(0..n);
    let jobs: Vec<_> = (0..120)
        .map(|_| (["g", "h", "i"][below(3)], ["a", "b", "c"][below(3)], [None, None, Some("x")][below(3)], [0, 5, 9][below(3)]))
        .collect();
    let all: [WorkerSpec<'_>; 5] =
        [(&["*"], &["a"], 1), (&["*"], &["a", "b"], 2), (&["g"], &["b", "c"], 1), (&["h"], &["a", "b", "c"], 2), (&["g", "h"], &["b"], 1)];
    let workers: Vec<WorkerSpec<'_>> = (0..12).map(|_| all[below(5)]).collect();
    let mut world = World::new(below(4), &workers, &jobs);
    world.assigning.lanes.windows.crowd = [0, 2, usize::MAX][below(3)];
    world.further_rounds = if world.assigning.lanes.windows.crowd < usize::MAX { 12 } else { 3 };
    if below(3) == 0 {
        world.memory.capacity = 1;
    }
    if below(2) == 0 {
        world.memory.data.get_mut().workers.iter_mut().for_each(|worker| worker.prefetch = [0, 1, 2, 4][below(4)]);
    }
    if below(2) == 0 {
        world.assigning.lanes.discovery.bounds = STEPS;
        world.memory.is_walk_slow = below(2) == 0;
    }
    (0..below(60)).for_each(|job| world.step(Event::Insert(job), Hints::Lost));
    for _ in 0..steps {
        if below(50) == 0 {
            world.step(Event::Failover, Hints::Round);
        }
        let mut events = world.events();
        // All kinds of events are equally frequent, except the kinds that soon leave no jobs or workers.
        let mut kinds: Vec<_> = Vec::new();
        events.iter().map(mem::discriminant).for_each(|kind| kinds.extend((!kinds.contains(&kind)).then_some(kind)));
        let kind = kinds[below(kinds.len())];
        events.retain(|event| mem::discriminant(event) == kind);
        if matches!(events[0], Event::Join(_) | Event::Leave(_) | Event::Cancel(_) | Event::Refuse(_)) && below(8) > 0 {
            continue;
        }
        let hints = [Hints::Round, Hints::Round, Hints::Heard, Hints::Lost, Hints::Step][below(5)];
        world.step(events[below(events.len())], hints);
    }
    world.memory.cut.take()
}
