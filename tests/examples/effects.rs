//! Effects in transactions, while workers are killed: `tests/soak --kills 10000`.

use std::{process::ExitCode, time::Instant};

use clap::Parser;
use recruiter_tests::effects::{Tally, Trial, endure};

/// Kills in one trial. Each trial has a database of its own, which is compared with its jobs in the end.
const TRIAL: usize = 500;

/// Kills workers at random points of their transactions, and compares jobs and effects after each trial.
#[derive(Parser)]
struct Args {
    /// Kills of workers with open transactions
    #[arg(long, default_value_t = 10_000)]
    kills: usize,
    /// Freeze a tenth of the workers instead, until they were declared dead
    #[arg(long)]
    freezes: bool,
    /// The seed of everything random; another one each time unless it is given
    #[arg(long)]
    seed: Option<u64>,
}

#[tokio::main]
#[expect(clippy::print_stdout, reason = "it is a program for people")]
async fn main() -> ExitCode {
    let Args { kills, freezes, seed } = Args::parse();
    let (begin, mut tally, mut are_wrong) = (Instant::now(), Tally::default(), false);
    while tally.blows < kills && !are_wrong {
        let seed = seed.unwrap_or_else(rand::random);
        println!("seed {seed}");
        let outcome = endure(Trial { seed, blows: TRIAL.min(kills - tally.blows), freezes }, |line| println!("{line}")).await;
        println!("{outcome}");
        let wrong = outcome.findings.all();
        wrong.iter().for_each(|finding| println!("{finding}"));
        are_wrong = !wrong.is_empty();
        tally += outcome.tally;
        let minutes = begin.elapsed().as_secs_f64() / 60.0;
        println!("== {tally}; {minutes:.1} min");
    }
    if are_wrong { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
