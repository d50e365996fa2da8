//! Idle start latency: from the acknowledged enqueue to the entered workable, in separate processes.
//!
//! `cargo run --release -p recruiter-tests --example latency` starts an embedded MongoDB, a recruiter, a cleaner and two
//! workers (this program again, as workers of the library), enqueues jobs one by one with pauses, and prints
//! percentiles, then memory and processor time of the idle processes. Instants are of the machine's monotonic clock,
//! which all processes share.

use std::{process::Command, time::Duration};

use bson::doc;
use clap::Parser;
use nix::time::{ClockId, clock_gettime};
use procfs::process::Process as Procfs;
use recruiter_common::{
    enqueue::Workable,
    shutdown::{Shutdown, pause},
    store::{ConnectArgs, Store},
};
use recruiter_tests::{mongo::TestDatabase, processes::Process};
use recruiter_worker::{Context, Executable, NotDone, Worker, WorkerArgs};
use serde::{Deserialize, Serialize};

const JOBS: usize = 300;
const WORKERS: usize = 2;

/// Measures the idle start latency, memory and processor time.
#[derive(Parser)]
struct Flags {
    /// Be a worker
    #[arg(long)]
    worker: bool,
    #[command(flatten)]
    args: WorkerArgs,
    #[command(flatten)]
    connect: ConnectArgs,
}

/// Returns the time when it was entered.
#[derive(Serialize, Deserialize)]
struct Stamp {}

impl Workable for Stamp {
    const CLASS: &'static str = "Stamp";
    type Output = i64;
}

impl Executable for Stamp {
    type State = ();

    async fn execute(&self, _state: &(), _job: &Context) -> Result<i64, NotDone> {
        Ok(monotonic_us())
    }
}

fn monotonic_us() -> i64 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("Linux has it");
    now.tv_sec() * 1_000_000 + now.tv_nsec() / 1_000
}

#[tokio::main]
#[expect(clippy::print_stdout, reason = "figures are what it is for")]
async fn main() -> anyhow::Result<()> {
    let flags = Flags::parse();
    if flags.worker {
        Worker::new().register::<Stamp>(())?.run(&flags.connect, flags.args, Shutdown::on_signals()?).await?;
        return Ok(());
    }
    let database = TestDatabase::new().await;
    let recruiter = Process::start("recruiter", &["run"], &[("MONGODB_URI", database.uri())]);
    let cleaner = Process::start("recruiter-cleaner", &[], &[("MONGODB_URI", database.uri())]);
    let mut workers = Vec::new();
    for _ in 0..WORKERS {
        let this = std::env::current_exe()?;
        workers.push(Command::new(this).arg("--worker").env("MONGODB_URI", database.uri()).spawn()?);
    }
    let connect = ConnectArgs::to(database.uri());
    let store = Store::connect(&connect, "latency").await?;
    while database.raw("roster").count_documents(doc! { "available": true, "term": { "$gt": 0 } }).await? < WORKERS as u64 {
        pause(Duration::from_millis(50)).await;
    }
    let mut waited = Vec::new();
    for _ in 0..JOBS {
        pause(Duration::from_millis(30)).await;
        let id = Stamp {}.as_job().enqueue(&store).await?.id;
        let acknowledged = monotonic_us();
        let archived = loop {
            match database.raw("archived").find_one(doc! { "_id": id }).await? {
                Some(archived) => break archived,
                None => pause(Duration::from_millis(5)).await,
            }
        };
        waited.push(archived.get_i64("result")? - acknowledged);
    }
    waited.sort_unstable();
    let percentile = |p: usize| waited[(waited.len() - 1) * p / 100] as f64 / 1000.0;
    println!(
        "acknowledged enqueue (hint sent) to entered workable, {JOBS} jobs: p50 {} ms, p90 {} ms, p99 {} ms",
        percentile(50),
        percentile(90),
        percentile(99)
    );

    let pids = [recruiter.pid(), cleaner.pid()].into_iter().chain(workers.iter().map(std::process::Child::id));
    let processes: Vec<Procfs> = pids.map(|pid| Procfs::new(pid.cast_signed())).collect::<Result<_, _>>()?;
    let ticks = || processes.iter().map(|process| process.stat().map(|stat| stat.utime + stat.stime)).sum::<Result<u64, _>>();
    let before = ticks()?;
    pause(Duration::from_secs(20)).await;
    let used = (ticks()? - before) as f64 / procfs::ticks_per_second() as f64 / 20.0;
    println!("idle: recruiter, cleaner and {WORKERS} workers together {:.2} % of one core", used * 100.0);
    for (process, name) in processes.iter().zip(["recruiter", "cleaner", "worker", "worker"]) {
        println!("resident: {name} {:.1} MB", process.statm()?.resident as f64 * procfs::page_size() as f64 / 1e6);
    }
    for mut worker in workers {
        worker.kill()?;
        worker.wait()?;
    }
    Ok(())
}
