//! Bad days by hand, as long as one likes: `cargo run --release -p recruiter-tests --example endurance -- --duration 1h`.

use std::{process::ExitCode, time::Duration};

use clap::Parser;
use recruiter_tests::endurance::{BadDay, endure};

/// Lets a whole fleet on a replica set of three suffer for a while, and accounts for every execution.
#[derive(Parser)]
struct Args {
    /// How long things go on breaking
    #[arg(long, env = "RECRUITER_ENDURANCE_DURATION", default_value = "60s", value_parser = humantime::parse_duration)]
    duration: Duration,
    /// Jobs to enqueue in this time
    #[arg(long, env = "RECRUITER_ENDURANCE_JOBS", default_value_t = 2_000)]
    jobs: usize,
    /// What everything random is made of; another one each time unless it is given
    #[arg(long, env = "RECRUITER_ENDURANCE_SEED")]
    seed: Option<u64>,
}

#[tokio::main]
#[expect(clippy::print_stdout, reason = "it is a program for people")]
async fn main() -> ExitCode {
    let Args { duration, jobs, seed } = Args::parse();
    let seed = seed.unwrap_or_else(rand::random);
    println!("seed {seed}");
    let outcome = endure(BadDay { seed, duration, jobs }, |line| println!("{line}")).await;
    let wrong = outcome.findings.all();
    println!(
        "{} executions, {} of them ended by a death; {:?}, {} enqueues refused; quiet {:?} after the last blow; {} lost, {} unexplained, {} wrong in all",
        outcome.findings.executions,
        outcome.findings.deaths,
        outcome.done,
        outcome.refused,
        outcome.recovery,
        outcome.findings.lost.len(),
        outcome.findings.unexplained.len(),
        wrong.len()
    );
    wrong.iter().for_each(|finding| println!("{finding}"));
    if wrong.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
