//! The leader's caches as a model: do the rules of staleness (`lanes`) keep invariant I7? All code of a round is the real code. The database
//! and both clocks are in memory.
//!
//! | part | in the model |
//! |---|---|
//! | job | group, class, gate, priority, date; absent, announced and not visible yet, due, or locked |
//! | worker | groups, classes, slots; it takes an assignment, starts all or nothing of it, offers its slots again, leaves, or is silent |
//! | hint | arrives before the next round or later, or is lost; it may announce a job that becomes visible later, or never |
//! | search | asks for `ahead` jobs per free slot beyond the first (0 to 3), so that windows end before their lane does |
//! | time | one millisecond per event; `Wait` goes on to the next round that `rounds` would begin |
//!
//! A job is **known** if the recruiter had a full scan or a hint about it since it was inserted, moved, unlocked or assigned. A slot is known
//! if the recruiter had a full scan or a hint since it was offered. What is in flight or paused (`past_assignments`) does not wait.
//!
//! | property, after each round | holds |
//! |---|---|
//! | (a) no known due job waits while a known free slot could take it | exactly, if the round had the full scan or a hint about the job; else except *late* jobs |
//! | (a) the next round begins when a known job becomes due or its pause ends, if a known free slot could take it | except *late* jobs |
//! | (b) a plan gives each job once, to a worker that takes it, in a free slot, and none that is in flight | exactly |
//! | (c) no worker gets a job while a more urgent known job that it takes waits | like the first |
//! | (d) no window has a job behind its end | exactly |
//! | (e) no job is in flight for longer than five seconds | exactly |
//! | (f) rounds that ask for another at once come to an end | exactly |
//!
//! *Late* is a job that became due less than `FRUITLESS_FOR` (100 ms) ago without a hint: after a search whose answer was full of later jobs,
//! the lane is not searched again for so long. A slot that gets a job of which the caches have an old date, or that was cancelled, is not idle.
//! A worker that refuses a job later than one full scan after the assignment gives no hint in this sense: the next full scan finds the job.
//!
//! A hint about a group counts for jobs without a gate alone: the gated lanes of a group that had none at the last full scan are found by the
//! next one.
//!
//! Not in the model: more jobs than the caches keep (`REMEMBERED`), searches that take too long, lanes that are listed in steps, and
//! failovers. In all of these the next full scan finds the jobs.

mod memory;
mod world;

use std::{collections::HashSet, mem};

use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};

use self::{
    memory::WorkerSpec,
    world::{Event, Hints, World},
};

/// Two lanes, a worker that takes one of them and a worker that takes both.
fn small(ahead: usize, gate: Option<&str>) -> World {
    let workers: [WorkerSpec<'_>; 2] = [(&["*"], &["a"], 1), (&["*"], &["a", "b"], 1)];
    let mut world = World::new(ahead, &workers, &[("g", "a", None, 5), ("g", "b", None, 5), ("g", "a", gate, 9)]);
    world.step(Event::Join(0), Hints::Heard);
    world.step(Event::Join(1), Hints::Round);
    world
}

/// How many events are explored. A fifth takes minutes.
fn depth() -> usize {
    std::env::var("RECRUITER_MODEL_EVENTS").map_or(4, |events| events.parse().expect("a number of events"))
}

/// Looks at all orders of `depth` of these events, each with and without a round after it, while hints are lost `losses` times. Returns the
/// number of different worlds before the last event.
fn explore(start: World, depth: usize, losses: usize, is_wanted: impl Fn(&Event) -> bool) -> usize {
    let mut seen = HashSet::from([(start.fingerprint(), losses)]);
    let mut worlds = vec![(start, losses)];
    for depth in (0..depth).rev() {
        let mut next = Vec::new();
        for (world, losses) in &worlds {
            for event in world.events().into_iter().filter(&is_wanted) {
                for hints in [Hints::Round, Hints::Heard, Hints::Lost] {
                    let is_lost = hints == Hints::Lost;
                    // The last round is what matters.
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
fn jobs_that_come_find_the_free_slots_in_every_order() {
    let comes = |event: &Event| !matches!(event, Event::Move(..) | Event::Cancel(_) | Event::Retry(..));
    println!("{} worlds", explore(small(0, Some("x")), depth(), 1, comes));
}

#[test]
fn jobs_that_change_find_the_free_slots_in_every_order() {
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
    // After two full scans the lane is not searched for a refusal any more.
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
    // The answer is full of the jobs that are due later.
    world.step(Event::Insert(2), Hints::Round);
    (0..2).for_each(|_| world.step(Event::Wait, Hints::Round));
    assert!((0..2).all(|worker| world.events().contains(&Event::Start(worker))));
}

#[test]
fn free_slots_are_found_in_long_walks_through_larger_worlds() {
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
        .map(|_| (["g", "h"][below(2)], ["a", "b", "c"][below(3)], [None, None, Some("x")][below(3)], [0, 5, 9][below(3)]))
        .collect();
    let all: [WorkerSpec<'_>; 5] =
        [(&["*"], &["a"], 1), (&["*"], &["a", "b"], 2), (&["g"], &["b", "c"], 1), (&["h"], &["a", "b", "c"], 2), (&["g", "h"], &["b"], 1)];
    let workers: Vec<WorkerSpec<'_>> = (0..12).map(|_| all[below(5)]).collect();
    let mut world = World::new(below(4), &workers, &jobs);
    (0..below(60)).for_each(|job| world.step(Event::Insert(job), Hints::Lost));
    for _ in 0..steps {
        let mut events = world.events();
        // All kinds of events are as frequent, except those that end everything soon.
        let mut kinds: Vec<_> = Vec::new();
        events.iter().map(mem::discriminant).for_each(|kind| kinds.extend((!kinds.contains(&kind)).then_some(kind)));
        let kind = kinds[below(kinds.len())];
        events.retain(|event| mem::discriminant(event) == kind);
        if matches!(events[0], Event::Join(_) | Event::Leave(_) | Event::Cancel(_) | Event::Refuse(_)) && below(8) > 0 {
            continue;
        }
        let hints = [Hints::Round, Hints::Round, Hints::Heard, Hints::Lost][below(4)];
        world.step(events[below(events.len())], hints);
    }
    world.memory.cut.take()
}
