//! The ranking of workers: what each of them still accepts, and which one of some kinds is the first for the next job.

use std::collections::BTreeSet;

use crate::leader::fleet::{FreeWorker, KindId};

/// A worker among those of its kind. The greatest one is the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank {
    /// Whether its heartbeat is not overdue.
    is_on_time: bool,
    /// Number of free slots.
    pub(super) free: u32,
    /// How many jobs it accepts ahead.
    pub(super) ahead: u32,
    /// Its index.
    pub(super) worker: usize,
}

/// The workers that accept another job, by their kinds.
#[derive(Debug)]
pub(super) struct Ranking {
    ranks: Vec<Rank>,
    kinds: Vec<KindId>,
    /// Those that accept something, for each kind.
    of_kinds: Vec<BTreeSet<Rank>>,
    /// How many jobs all of them accept.
    left: u64,
}

impl Ranking {
    pub(super) fn new(workers: &[FreeWorker]) -> Self {
        let rank = |(index, worker): (usize, &FreeWorker)| Rank {
            is_on_time: !worker.is_overdue,
            free: worker.free,
            ahead: worker.prefetch,
            worker: index,
        };
        let ranks: Vec<Rank> = workers.iter().enumerate().map(rank).collect();
        let kinds: Vec<KindId> = workers.iter().map(|worker| worker.kind).collect();
        let left = ranks.iter().map(Rank::room).sum();
        let mut of_kinds = vec![BTreeSet::new(); kinds.iter().max().map_or(0, |last| last + 1)];
        for rank in ranks.iter().filter(|rank| rank.room() > 0) {
            of_kinds[kinds[rank.worker]].insert(*rank);
        }
        Self { ranks, kinds, of_kinds, left }
    }

    /// Whether no worker accepts another job.
    pub(super) fn is_exhausted(&self) -> bool {
        self.left == 0
    }

    pub(super) fn rank(&self, worker: usize) -> Rank {
        self.ranks[worker]
    }

    /// The workers of these kinds that accept another job, without order.
    pub(super) fn all<'a>(&'a self, kinds: &'a [KindId]) -> impl Iterator<Item = Rank> + 'a {
        self.of(kinds).flatten().copied()
    }

    fn of<'a>(&'a self, kinds: &'a [KindId]) -> impl Iterator<Item = &'a BTreeSet<Rank>> + 'a {
        kinds.iter().filter_map(|kind| self.of_kinds.get(*kind)).filter(|ranks| !ranks.is_empty())
    }

    /// The first one of these kinds that has a free slot, if one is needed, and for which `accepts` is true.
    pub(super) fn first(&self, kinds: &[KindId], needs_free_slot: bool, accepts: impl Fn(usize) -> bool) -> Option<Rank> {
        // Those that are on time come before all that are overdue. In each part the workers without a free slot are at its end.
        let least = |is_on_time| Rank { is_on_time, free: u32::from(needs_free_slot), ahead: 0, worker: 0 };
        let of_kind = |ranks: &BTreeSet<Rank>| {
            let is_first = |rank: &&Rank| accepts(rank.worker);
            let overdue = || ranks.range(least(false)..Rank { free: 0, ..least(true) }).rev().find(is_first);
            ranks.range(least(true)..).rev().find(is_first).or_else(overdue).copied()
        };
        self.of(kinds).filter_map(of_kind).max()
    }

    /// A worker gets a job: in a free slot, or else ahead.
    pub(super) fn give(&mut self, worker: usize) {
        let rank = self.ranks[worker];
        let changed = if rank.free > 0 { Rank { free: rank.free - 1, ..rank } } else { Rank { ahead: rank.ahead - 1, ..rank } };
        self.change(changed);
    }

    /// A worker gets a job ahead.
    pub(super) fn give_ahead(&mut self, worker: usize) {
        let rank = self.ranks[worker];
        self.change(Rank { ahead: rank.ahead - 1, ..rank });
    }

    /// A worker gets no more jobs ahead.
    pub(super) fn close_ahead(&mut self, worker: usize) {
        self.change(Rank { ahead: 0, ..self.ranks[worker] });
    }

    fn change(&mut self, changed: Rank) {
        let before = std::mem::replace(&mut self.ranks[changed.worker], changed);
        self.left = self.left + changed.room() - before.room();
        let of_kind = &mut self.of_kinds[self.kinds[changed.worker]];
        of_kind.remove(&before);
        if changed.room() > 0 {
            of_kind.insert(changed);
        }
    }
}

impl Rank {
    fn room(&self) -> u64 {
        u64::from(self.free) + u64::from(self.ahead)
    }
}

#[cfg(test)]
mod tests {
    use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};

    use super::*;
    use crate::leader::fleet::tests::{available, fleet};

    /// Compares with a look at every worker, while all of them fill up.
    #[test]
    fn the_first_worker_is_the_greatest_of_those_that_accept_the_job() {
        for seed in 0..200 {
            let mut random = StdRng::seed_from_u64(seed);
            let mut below = |n: u32| random.random_range(0..n);
            let classes = ["x", "y", "z"];
            let mut workers = fleet((0..12).map(|_| available(&["*"], &[classes[below(3) as usize]], 1 + below(3))).collect());
            for worker in workers.workers_mut() {
                (worker.is_overdue, worker.free, worker.prefetch) = (below(3) == 0, below(3), below(4));
            }
            let mut ranking = Ranking::new(workers.workers());
            let all: Vec<KindId> = (0..workers.kinds().len()).collect();
            for turn in 0.. {
                let (kinds, needs_free_slot, excluded) = (&all[below(2) as usize..], below(2) == 0, below(12) as usize);
                let accepts = |worker: usize| worker != excluded;
                let slow = ranking.all(kinds).filter(|rank| (!needs_free_slot || rank.free > 0) && accepts(rank.worker)).max();
                let first = ranking.first(kinds, needs_free_slot, accepts);
                assert_eq!(first, slow, "seed {seed}, turn {turn}");
                match first.or_else(|| ranking.all(&all).next()) {
                    Some(rank) if below(9) == 0 => ranking.close_ahead(rank.worker),
                    Some(rank) if rank.ahead > 0 && below(4) == 0 => ranking.give_ahead(rank.worker),
                    Some(rank) => ranking.give(rank.worker),
                    None => break,
                }
                let left: u64 = ranking.all(&all).map(|rank| rank.room()).sum();
                assert_eq!((left, left == 0), (ranking.left, ranking.is_exhausted()));
            }
        }
    }
}
