//! Effects in transactions, while workers are killed and frozen: `cargo run --release -p recruiter-tests --example effects -- --kills 10000`.

use std::process::ExitCode;

use clap::Parser;
use recruiter_tests::effects::{Trial, endure};

/// Kills and freezes workers at random points of their transactions, and compares jobs and effects in the end.
#[derive(Parser)]
struct Args {
    /// Kills and freezes of workers
    #[arg(long, default_value_t = 10_000)]
    kills: usize,
    /// The seed of everything random; another one each time unless it is given
    #[arg(long)]
    seed: Option<u64>,
}

#[tokio::main]
#[expect(clippy::print_stdout, reason = "it is a program for people")]
async fn main() -> ExitCode {
    let Args { kills, seed } = Args::parse();
    let seed = seed.unwrap_or_else(rand::random);
    println!("seed {seed}");
    let outcome = endure(Trial { seed, blows: kills }, |line| println!("{line}")).await;
    println!("{outcome}");
    let wrong = outcome.findings.all();
    wrong.iter().for_each(|finding| println!("{finding}"));
    if wrong.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
