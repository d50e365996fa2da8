//! Measures the leader alone, with a database in memory: where one recruiter ends.

use std::{process, time::Duration};

use bson::{Document, doc};
use clap::Args;
use recruiter::{Simulation, Size};

use super::{Setting, Times, rate, stage::Stage, usage::memory};

/// A round in so many has a full scan.
const FULL_SCAN_EACH: usize = 100;

/// The arguments of `scale-rounds`: a fleet and keys that grow.
#[derive(Args, Clone, Copy, Debug)]
pub(super) struct ScaleRounds {
    /// Maximum number of simulated workers
    #[arg(long, env = "RECRUITER_BENCH_FLEET", value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(10..=100_000))]
    fleet: u32,
    /// Maximum number of keys, of each of which one job may run at a time
    #[arg(long, env = "RECRUITER_BENCH_KEYS", value_name = "N", default_value_t = 1_000_000, value_parser = clap::value_parser!(u32).range(10..=5_000_000))]
    keys: u32,
    /// Slots of each simulated worker
    #[arg(long, env = "RECRUITER_BENCH_SLOTS_EACH", value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    slots_each: u32,
    /// Number of rounds at each size, of which one in 100 has a full scan
    #[arg(long, env = "RECRUITER_BENCH_ROUNDS", value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(2..=100_000))]
    rounds: u32,
}

impl ScaleRounds {
    pub(super) async fn measure(self, stage: &Stage, setting: &Setting) -> anyhow::Result<Document> {
        let (fleet, keys) = (self.fleet as usize, self.keys as usize);
        let mut sizes: Vec<(usize, usize)> = [100, 10, 1].map(|part| ((fleet / part).max(1), 0)).into();
        sizes.extend([1_000, 100, 10, 1].map(|part| ((fleet / 10).max(1), (keys / part).max(1))));
        sizes.push((fleet, keys));
        sizes.dedup();
        let mut measured = Vec::new();
        for (workers, keys) in sizes {
            measured.push(self.size(workers, keys).await?);
        }
        Ok(doc! { "benchmark": "scale-rounds", "sizes": measured, "conditions": stage.conditions(setting).await? })
    }

    /// Each tenth of the fleet reports in turn.
    async fn size(self, workers: usize, keys: usize) -> anyhow::Result<Document> {
        let (reports, rounds) = (workers.div_ceil(10), self.rounds as usize);
        let jobs = (rounds + 20) * reports * self.slots_each as usize;
        let mut simulation = Simulation::new(Size { workers, slots: self.slots_each, keys, jobs: jobs.max(keys) });
        let before = resident()?;
        // The first round reads everything, and gives a job to each slot.
        let first = simulation.round(0, true).await?;
        let (mut ordinary, mut scans) = (Times::new(), Times::new());
        let (mut assigned, mut operations, mut took) = (0, 0, Duration::ZERO);
        for number in 1..=rounds {
            let is_full_scan = number % FULL_SCAN_EACH == 0 || number == rounds;
            let round = simulation.round(reports, is_full_scan).await?;
            if is_full_scan { &mut scans } else { &mut ordinary }.record(round.took);
            assigned += round.assigned;
            operations += round.operations;
            took += round.took;
        }
        let of = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        Ok(doc! {
            "workers": of(workers),
            "keys": of(keys),
            "jobs": of(jobs.max(keys)),
            "first_round": { "ms": first.took.as_secs_f64() * 1_000.0, "assigned": of(first.assigned) },
            "round_ms": ordinary.percentiles(),
            "full_scan_ms": scans.percentiles(),
            "assigned_in_each": of(assigned / rounds),
            "assigned_per_second": rate(assigned as u64, took),
            "operations_in_each": of(operations / rounds),
            "memory_grown_by_mb": (resident()? - before).max(0.0),
        })
    }
}

fn resident() -> anyhow::Result<f64> {
    Ok(memory(process::id())?.get_f64("now_mb")?)
}
