//! Kills and freezes at random points of transactions. `tests/soak --kills` has more; a seed that ever failed gets a test of its own here.

use recruiter_tests::{
    effects::{Trial, endure},
    report::Row,
};

#[tokio::test(flavor = "multi_thread")]
async fn the_effects_of_a_transaction_happen_once_whatever_is_killed_or_frozen() {
    let seed = rand::random();
    println!("seed {seed}");
    let blows = if recruiter_tests::full_length() { 200 } else { 40 };
    let outcome = endure(Trial { seed, blows, freezes: true }, |line| println!("{line}")).await;
    println!("{outcome}");
    let mut row = Row::new("a worker is killed or frozen at a random point of its transactions");
    row.add(outcome.findings, outcome.recovery);
    row.injected = outcome.done.values().sum();
    row.close();
}
