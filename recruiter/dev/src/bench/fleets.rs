//! Measures larger and larger fleets: more slots, workers and processes.

use std::{
    io,
    time::{Duration, Instant as Monotonic},
};

use bson::{Bson, Document, doc};
use clap::Args;
use nix::sys::signal::Signal;
use recruiter_common::{
    enqueue::NewJob,
    ids::LeaseTerm,
    shutdown::pause,
    store::{Hint, Store},
    telemetry::chain,
};
use tokio::{task::JoinSet, time::timeout};

use super::{
    Setting, Times, rate,
    stage::{Stage, register},
    usage::{computed, percent_of_a_core},
};
use recruiter::assign_once;

use crate::fleet::Fleet;

/// Number of rounds measured for each simulated roster.
const ROUNDS: usize = 50;
/// Total number of slots, and the number of workers that share them.
const ROSTERS: [(u32, u32); 7] = [(10, 1), (100, 1), (100, 10), (1_000, 10), (1_000, 100), (10_000, 100), (10_000, 500)];
/// Numbers of worker processes, up to the requested maximum.
const PROCESSES: [u32; 8] = [1, 2, 5, 10, 50, 100, 200, 500];
/// Number of runs and rounds measured for each number of processes.
const RUNS: usize = 5;
/// Number of processes started together. Each start needs some hundred milliseconds of a core.
const PORTION: u32 = 10;
/// Number of idle processes while hints for another group are published. Fewer if the maximum is lower.
const HINTED: u32 = 200;
const HINTS_A_SECOND: u32 = 100;
const HINTS_FOR: Duration = Duration::from_secs(10);
/// Longer than any run takes until all slots are free.
const IDLE_WITHIN: Duration = Duration::from_secs(30);
/// Starting and measuring a few hundred processes takes a minute or two on a machine with enough capacity.
const WITHIN: Duration = Duration::from_secs(300);
const LOOK_EVERY: Duration = Duration::from_millis(20);
const GROUP: &str = "measured";

/// The arguments of `scale-workers`: growing numbers of slots, first in a simulated roster, then of real processes.
#[derive(Args, Clone, Copy, Debug)]
pub(super) struct Fleets {
    /// Maximum number of simulated slots
    #[arg(long, env = "RECRUITER_BENCH_SLOTS", value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(10..=10_000))]
    slots: u32,
    /// Maximum number of worker processes; 0 starts none
    #[arg(long, env = "RECRUITER_BENCH_PROCESSES", value_name = "N", default_value_t = 500, value_parser = clap::value_parser!(u32).range(0..=2_000))]
    processes: u32,
    /// Slots of each worker process: jobs that it runs at a time
    #[arg(long, env = "RECRUITER_CONCURRENCY", value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    concurrency: u32,
}

impl Fleets {
    pub(super) async fn measure(self, stage: &Stage, setting: &Setting) -> anyhow::Result<Document> {
        let made_up = self.made_up(stage).await?;
        stage.empty().await?;
        let setting = Setting { workers: self.processes, concurrency: self.concurrency, ..setting.clone() };
        let (processes, hints) = if self.processes > 0 { self.real(stage, &setting).await? } else { (Vec::new(), Bson::Null) };
        // Compares rosters with the same number of slots per worker.
        let cost = |slots: u32, workers: u32| made_up.iter().find(|one| (one.slots, one.workers) == (slots, workers)).map(MadeUp::cost);
        let ratio = cost(10_000, 100).zip(cost(100, 1)).map(|(many, few)| many / few);
        Ok(doc! {
            "benchmark": "scale-workers",
            "fleets": made_up.iter().map(MadeUp::to_document).collect::<Vec<_>>(),
            "cost_per_place_at_10000_over_100": ratio,
            "processes": processes,
            "hints": hints,
            "conditions": stage.conditions(&setting).await?,
        })
    }

    /// Measures the recruiter's round on simulated rosters, with enough jobs for every slot.
    async fn made_up(self, stage: &Stage) -> anyhow::Result<Vec<MadeUp>> {
        let store = &stage.store;
        let rosters: Vec<(u32, u32)> = ROSTERS.into_iter().filter(|(slots, _)| *slots <= self.slots).collect();
        stage.enqueue(u64::from(self.slots) * 2, |_| noop()).await?;
        stage.progress("rounds", (rosters.len() * ROUNDS) as u64);
        let mut measured = Vec::new();
        for (slots, workers) in rosters {
            let mut times = Times::new();
            for _ in 0..ROUNDS {
                stage.go_on()?;
                let mut roster = Vec::new();
                for _ in 0..workers {
                    roster.push(register(store, GROUP, slots / workers).await?);
                }
                times.record(one_round(store, LeaseTerm::default(), slots).await?);
                for worker in roster {
                    store.leave_if_alive(worker).await?;
                }
                stage.advance(1);
            }
            measured.push(MadeUp { slots, workers, times });
        }
        Ok(measured)
    }

    /// Measures increasing numbers of processes, and the cost of hints with many of them.
    async fn real(self, stage: &Stage, setting: &Setting) -> anyhow::Result<(Vec<Document>, Bson)> {
        let mut fleet = stage.fleet_with(setting, &[&format!("--work-on={GROUP}")]).await?;
        let counts = PROCESSES.into_iter().filter(|count| *count < self.processes).chain([self.processes]);
        let (mut measured, mut hints, mut running) = (Vec::new(), Bson::Null, 0);
        for count in counts {
            let slots = count * self.concurrency;
            let one = timeout(WITHIN, of_processes(stage, &mut fleet, [running, count], slots)).await;
            match one.unwrap_or_else(|_| Err(anyhow::anyhow!("not finished within {}", humantime::format_duration(WITHIN)))) {
                Ok(one) => measured.push(one),
                Err(failed) => {
                    stage.go_on()?;
                    // A number of processes that this machine cannot run is a result too. The other results are kept.
                    let why = chain(failed.as_ref());
                    measured.push(doc! { "processes": count, "slots": slots, "failed": why.lines().next() });
                    return Ok((measured, hints));
                }
            }
            running = count;
            if count == HINTED.min(self.processes) {
                until_idle(stage, slots).await?;
                hints = cost_of_hints(stage, count).await?.into();
            }
        }
        stage.progress("leaving", self.processes.into());
        fleet.stop().await;
        Ok((measured, hints))
    }
}

/// The result for one simulated roster.
struct MadeUp {
    slots: u32,
    workers: u32,
    times: Times,
}

impl MadeUp {
    /// Microseconds of a round per slot.
    fn cost(&self) -> f64 {
        self.times.at_ms(0.5) * 1_000.0 / f64::from(self.slots)
    }

    fn to_document(&self) -> Document {
        doc! { "slots": self.slots, "workers": self.workers, "round_ms": self.times.percentiles(), "us_per_place": self.cost() }
    }
}

fn noop() -> NewJob {
    NewJob::of_class("noop", doc! {}).in_group(GROUP)
}

/// Assigns a job to every slot. Returns the duration.
async fn one_round(store: &Store, term: LeaseTerm, slots: u32) -> anyhow::Result<Duration> {
    let begun = Monotonic::now();
    let assigned = assign_once(store, term).await?;
    let time = begun.elapsed();
    anyhow::ensure!(assigned == slots as usize, "{assigned} of {slots} slots got a job");
    Ok(time)
}

/// Starts workers until `count` are running, and waits until they are ready.
async fn start(stage: &Stage, fleet: &mut Fleet, mut running: u32, count: u32) -> anyhow::Result<()> {
    stage.progress("processes started", count.into());
    stage.advance(running.into());
    while running < count {
        stage.go_on()?;
        let portion = PORTION.min(count - running);
        fleet.add_workers(portion)?;
        fleet.ready(&stage.store).await?;
        stage.advance(portion.into());
        running += portion;
    }
    Ok(())
}

/// Measures several runs and rounds with `count` processes.
async fn of_processes(stage: &Stage, fleet: &mut Fleet, [running, count]: [u32; 2], slots: u32) -> anyhow::Result<Document> {
    start(stage, fleet, running, count).await?;
    let (mut archived, mut rounds) = (Times::new(), Times::new());
    for _ in 0..RUNS {
        archived.record(run_all(stage, fleet, slots).await?);
        rounds.record(round_of_real(stage, fleet, slots).await?);
    }
    Ok(doc! {
        "processes": count,
        "slots": slots,
        "archived_ms": archived.percentiles(),
        "round_ms": rounds.percentiles(),
        "us_per_place": rounds.at_ms(0.5) * 1_000.0 / f64::from(slots),
    })
}

/// Waits until all slots are free. Returns the term of the leading recruiter.
async fn until_idle(stage: &Stage, slots: u32) -> anyhow::Result<LeaseTerm> {
    let begun = Monotonic::now();
    loop {
        stage.go_on()?;
        let lease = stage.store.observe_lease().await?.ok_or_else(|| anyhow::anyhow!("no recruiter leads"))?;
        let free: u32 = stage.store.available_workers(lease.term).await?.iter().map(|worker| worker.free).sum();
        if free == slots {
            return Ok(lease.term);
        }
        anyhow::ensure!(begun.elapsed() < IDLE_WITHIN, "{free} of {slots} slots are free, and no more become free");
        pause(LOOK_EVERY).await;
    }
}

/// Enqueues a job for every slot. Returns the time until all are archived.
async fn run_all(stage: &Stage, fleet: &mut Fleet, slots: u32) -> anyhow::Result<Duration> {
    until_idle(stage, slots).await?;
    let before = stage.store.archived_count().await?;
    let begun = Monotonic::now();
    stage.store.enqueue_many((0..slots).map(|_| noop())).await?;
    Ok(stage.until_archived(fleet, before + u64::from(slots)).await? - begun)
}

/// Enqueues a job for every slot. Returns the time of the round alone, which runs in this process while the recruiter
/// is stopped.
async fn round_of_real(stage: &Stage, fleet: &mut Fleet, slots: u32) -> anyhow::Result<Duration> {
    let term = until_idle(stage, slots).await?;
    let before = stage.store.archived_count().await?;
    send(fleet, Signal::SIGSTOP)?;
    while fleet.recruiter().is_some_and(|recruiter| !recruiter.is_stopped()) {
        pause(Duration::from_millis(1)).await;
    }
    let measured = async {
        stage.store.enqueue_many((0..slots).map(|_| noop())).await?;
        one_round(&stage.store, term, slots).await
    };
    let measured = measured.await;
    send(fleet, Signal::SIGCONT)?;
    stage.until_archived(fleet, before + u64::from(slots)).await?;
    measured
}

/// Sends a signal to the recruiter.
fn send(fleet: &mut Fleet, signal: Signal) -> io::Result<()> {
    fleet.recruiter().map_or(Ok(()), |recruiter| recruiter.signal(signal))
}

/// Measures mongod's processor time with idle processes: without hints, and with many hints for another group.
async fn cost_of_hints(stage: &Stage, processes: u32) -> anyhow::Result<Document> {
    stage.progress("hints", u64::from(HINTS_A_SECOND) * HINTS_FOR.as_secs());
    let nothing = async {
        pause(HINTS_FOR / 2).await;
        Ok(())
    };
    let ((), without) = of_mongod(stage, nothing).await?;
    let (published, with) = of_mongod(stage, publish_hints(stage)).await?;
    Ok(doc! {
        "idle_processes": processes,
        "asked_per_second": HINTS_A_SECOND,
        "hints_per_second": published,
        "mongod_percent_of_a_core": { "without_hints": without, "with_hints": with },
    })
}

/// Processor time of mongod during `done`, in percent of one core; `None` if mongod is not embedded.
async fn of_mongod<T>(stage: &Stage, done: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<(T, Option<f64>)> {
    let used = || stage.mongod().map(computed).transpose();
    let (before, begun) = (used()?, Monotonic::now());
    let done = done.await?;
    let time = begun.elapsed();
    Ok((done, used()?.zip(before).map(|(after, before)| percent_of_a_core(after - before, time))))
}

/// Publishes hints at a constant rate for a group without workers. Returns the actual rate per second.
async fn publish_hints(stage: &Stage) -> anyhow::Result<f64> {
    let (begun, mut sent, mut calls) = (Monotonic::now(), 0, JoinSet::new());
    while begun.elapsed() < HINTS_FOR {
        stage.go_on()?;
        while begun.elapsed() >= (Duration::from_secs(1) / HINTS_A_SECOND) * sent {
            let store = stage.store.clone();
            calls.spawn(async move { store.publish(&Hint::jobs_in(["nobody's"])).await });
            sent += 1;
            stage.advance(1);
        }
        pause(Duration::from_millis(2)).await;
    }
    while let Some(call) = calls.join_next().await {
        call??;
    }
    Ok(rate(sent.into(), begun.elapsed()))
}
