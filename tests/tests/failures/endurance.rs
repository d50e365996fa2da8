//! A minute of random bad days. `--example endurance` has longer ones; a seed that ever failed gets a test of its own here.

use std::time::Duration;

use recruiter_tests::{
    endurance::{BadDay, endure},
    report::Row,
};

#[tokio::test(flavor = "multi_thread")]
async fn after_random_bad_days_every_execution_is_accounted_for() {
    let seed = std::env::var("RECRUITER_ENDURANCE_SEED").map_or_else(|_| rand::random(), |seed| seed.parse().unwrap());
    println!("RECRUITER_ENDURANCE_SEED={seed}");
    let (seconds, jobs) = if recruiter_tests::full_length() { (60, 2_000) } else { (30, 1_000) };
    let outcome = endure(BadDay { seed, duration: Duration::from_secs(seconds), jobs }, |line| println!("{line}")).await;
    println!(
        "{:?}, {} enqueues refused, {} executions, {} deaths",
        outcome.done, outcome.refused, outcome.findings.executions, outcome.findings.deaths
    );
    let mut row = Row::new("random faults");
    row.add(outcome.findings, outcome.recovery);
    row.injected = outcome.done.values().sum();
    row.close();
}
