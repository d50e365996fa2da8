//! `recruiter stats`: queue depth, throughput and latency per group and in total, and the reasons why jobs keep
//! waiting.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::Write,
    time::Duration,
};

use clap::Args;
use recruiter_common::{
    Reason,
    store::{COUNTED, ConnectArgs, SAMPLED, Store, Waiting},
};

use super::{
    output::{Format, printable},
    roster::write_overdue,
    view::{Row, Screen, json_line, left, or_dash, right, table},
};
use crate::views::stats::{Blocked, GroupStatistics, LANES, Statistics, Times};

/// Maximum number of reasons shown.
const REASONS: usize = 10;

#[derive(Args, Clone, Copy, Debug)]
pub(super) struct StatsArgs {
    /// Time after which a due job that has not started counts as overdue
    #[arg(long, env = "RECRUITER_STATS_OVERDUE_AFTER", value_name = "DURATION", default_value = "1m", value_parser = humantime::parse_duration)]
    overdue_after: Duration,
    #[command(flatten)]
    format: Format,
}

pub(super) async fn run(args: StatsArgs, connect: &ConnectArgs, out: &mut impl Write) -> anyhow::Result<()> {
    let store = Store::connect_to_ask(connect, "recruiter stats").await?;
    let statistics = Statistics::read(&store, args.overdue_after).await?;
    if args.format.json {
        return Ok(json_line(out, &statistics)?);
    }
    statistics.write(out, Screen::of_stdout())?;
    write_held(out, &statistics.held)?;
    write_untaken(out, &statistics.untaken, statistics.are_all)?;
    write_overdue(out, statistics.unrescued_workers)?;
    Ok(writeln!(out, "{}", statistics.leader_line)?)
}

/// Writes each reason once, with the groups of the jobs that wait for it.
fn write_held(out: &mut impl Write, held: &[Blocked]) -> std::io::Result<()> {
    let mut reasons: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    // The last line says who leads.
    for Blocked { lane, why } in held.iter().filter(|blocked| blocked.why.reason != Reason::NoRecruiter) {
        reasons.entry(&why.text).or_default().insert(&lane.group);
    }
    let reasons = reasons.into_iter().map(|(text, groups)| {
        let groups: Vec<&str> = groups.into_iter().collect();
        format!("jobs wait in {}: {text}", printable(&groups.join(", "), 80))
    });
    write_first(out, reasons.collect(), |more| format!("jobs wait: {more} more reasons"))
}

/// Writes each reason once.
fn write_untaken(out: &mut impl Write, untaken: &[Blocked], are_all: bool) -> std::io::Result<()> {
    let reasons: BTreeSet<&str> = untaken.iter().map(|blocked| blocked.why.text.as_str()).collect();
    let reasons = reasons.into_iter().map(|reason| format!("jobs cannot start: {reason}"));
    write_first(out, reasons.collect(), |more| format!("jobs cannot start: {more} more classes or groups without a worker"))?;
    if !are_all {
        writeln!(out, "only the first {LANES} pairs of group and class were compared with the workers")?;
    }
    Ok(())
}

/// Writes the first of these lines, and how many more there are.
fn write_first(out: &mut impl Write, lines: Vec<String>, more_of_them: impl Fn(usize) -> String) -> std::io::Result<()> {
    lines.iter().take(REASONS).try_for_each(|line| writeln!(out, "{line}"))?;
    match lines.len().checked_sub(REASONS) {
        Some(more @ 1..) => writeln!(out, "{}; --json lists them", more_of_them(more)),
        Some(0) | None => Ok(()),
    }
}

impl Statistics {
    /// Writes two tables: the current state, and the jobs that ended in the window.
    fn write(&self, out: &mut impl Write, screen: Screen) -> std::io::Result<()> {
        let count = |count: u64| if count >= COUNTED { format!("{count}+") } else { count.to_string() };
        let name = |group: &GroupStatistics| group.name.as_ref().map_or_else(|| "(all)".into(), |name| printable(name, 64));
        let groups = || self.groups.iter().chain([&self.total]);
        let present = groups().map(|group| {
            let Waiting { queued, overdue, postponed, waits } = group.waiting;
            Row::from([
                left("NOW", name(group)).cut_to(8),
                right("QUEUED", count(queued)),
                right("OVERDUE", count(overdue)),
                right("POSTPONED", count(postponed)),
                right("WAITS", count(waits)),
                right("RUNNING", group.running),
            ])
        });
        table(out, screen, &present.collect::<Vec<_>>())?;
        writeln!(out)?;
        let times = |times: &Times| or_dash(times.summary().map(|(_, p50, p99)| format!("{p50} {p99}")));
        let ended = groups().filter(|group| group.done + group.failed + group.cancelled + group.not_kept > 0).map(|group| {
            Row::from([
                left("ENDED", name(group)).cut_to(8),
                right("DONE", group.done),
                right("FAILED", group.failed),
                right("CANCELLED", group.cancelled),
                right("DONE/S", format!("{:.2}", group.done_per_second)),
                right("LATENCY MS", times(&group.latency_ms)),
                right("RUNTIME MS", times(&group.execution_ms)),
            ])
        });
        let ended: Vec<Row> = ended.collect();
        let seconds = |milliseconds: i64| f64::from(u32::try_from(milliseconds).unwrap_or(u32::MAX)) / 1_000.0;
        let (seconds, not_kept_seconds) = (seconds(self.window_ms), seconds(self.not_kept_window_ms));
        if ended.is_empty() {
            return writeln!(out, "no job ended in the last {seconds:.1} s");
        }
        table(out, screen, &ended)?;
        let newest = if self.newest_only { format!(", only the newest {SAMPLED} jobs") } else { String::new() };
        writeln!(out, "ended: in the last {seconds:.1} s{newest}")?;
        for group in groups().filter(|group| group.not_kept > 0) {
            let of = group.name.as_ref().map_or_else(|| "all groups".into(), |_| format!("group {}", name(group)));
            writeln!(out, "done and not kept: about {} in the last {not_kept_seconds:.1} s, {of}", group.not_kept)?;
        }
        writeln!(out, "latency (from due to started) and runtime: median and 99th percentile")
    }
}

#[cfg(test)]
mod tests {
    use chrono::TimeDelta;
    use recruiter_common::{
        instant::Instant,
        job::FinishReason,
        store::{Finished, NotKept},
    };
    use serde_json::{Value, json};

    use super::*;

    fn job(group: &str, times: [Option<i64>; 2], ended: i64) -> Finished {
        let at = |ms: i64| Instant::UNIX_EPOCH + TimeDelta::milliseconds(ms);
        let [scheduled_at, started_at] = times.map(|time| time.map(at));
        Finished { group: group.into(), why: FinishReason::DONE, scheduled_at, started_at, ended_at: at(ended) }
    }

    fn statistics(now: i64, finished: &[Finished]) -> Value {
        let waiting = BTreeMap::from([
            ("a".to_owned(), Waiting { queued: 3, overdue: 1, postponed: 2, waits: 0 }),
            ("w".to_owned(), Waiting { queued: 4, ..Waiting::default() }),
        ]);
        let running = BTreeMap::from([("a".to_owned(), 1), ("r".to_owned(), 2)]);
        let now = Instant::UNIX_EPOCH + TimeDelta::milliseconds(now);
        let statistics = Statistics::of(now, &waiting, &running, finished, &NotKept::default());
        serde_json::to_value(statistics).unwrap()
    }

    #[test]
    fn groups_are_the_union_of_all_that_is_known() {
        let json = statistics(60_000, &[job("f", [Some(0), Some(100)], 300), job("f", [None, None], 300)]);
        let names: Vec<_> = json["groups"].as_array().unwrap().iter().map(|group| group["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["a", "f", "r", "w"]);
        assert_eq!((&json["total"]["queued"], &json["total"]["running"], &json["total"]["done"]), (&json!(7), &json!(3), &json!(2)));
        let f = &json["groups"][1];
        assert_eq!((&f["latency_ms"], &f["execution_ms"]["p99"]), (&json!({ "avg": 100.0, "p50": 100, "p99": 100 }), &json!(200)));
        assert_eq!(json["groups"][0]["latency_ms"], Value::Null);
    }

    #[test]
    fn more_than_is_looked_at_shortens_the_window() {
        let json = statistics(60_000, &vec![job("f", [Some(0), Some(0)], 50_000); SAMPLED]);
        assert_eq!((&json["window_ms"], &json["newest_only"]), (&json!(10_000), &json!(true)));
        assert_eq!(json["total"]["done_per_second"], json!(1_000.0));
    }

    #[test]
    fn clocks_that_disagree_give_no_negative_times() {
        let json = statistics(1_000, &[job("f", [Some(500), Some(400)], 300)]);
        assert_eq!((&json["total"]["latency_ms"]["p50"], &json["total"]["execution_ms"]["p50"]), (&json!(0), &json!(0)));
    }

    #[test]
    fn failures_are_told_from_successes_on_a_narrow_screen() {
        let (done, failed) = (job("g", [Some(0), Some(1)], 2), FinishReason::custom("not-scheduled-by-retry-policy"));
        let finished = [done.clone(), Finished { why: failed, ..done.clone() }, Finished { why: FinishReason::CANCELLED, ..done }];
        let waiting =
            BTreeMap::from([("x".repeat(100), Waiting { queued: COUNTED, overdue: COUNTED, postponed: COUNTED, waits: COUNTED })]);
        let statistics = Statistics::of(Instant::UNIX_EPOCH, &waiting, &BTreeMap::new(), &finished, &NotKept::default());
        assert_eq!(statistics.groups[0].failed, 1);
        let mut out = Vec::new();
        statistics.write(&mut out, Screen { width: 80, colours: false }).unwrap();
        let shown = String::from_utf8(out).unwrap();
        assert!(shown.lines().all(|line| line.chars().count() <= 80), "{shown}");
        let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        assert!(shown.lines().any(|line| words(line) == ["g", "1", "1", "1", "0.02", "1", "1", "1", "1"]), "{shown}");
        assert!(shown.contains("ended: in the last 60.0 s"), "{shown}");
    }
    #[test]
    fn successes_of_which_nothing_was_kept_are_counted_beside_those_in_the_archive() {
        let now = Instant::UNIX_EPOCH + TimeDelta::milliseconds(64_000);
        let not_kept = NotKept { groups: BTreeMap::from([("n".to_owned(), 640)]), since: Instant::UNIX_EPOCH };
        let statistics = Statistics::of(now, &BTreeMap::new(), &BTreeMap::new(), &[job("f", [None, None], 10_000)], &not_kept);
        let json = serde_json::to_value(&statistics).unwrap();
        let of = |group: &Value| ["done", "not_kept", "done_per_second"].map(|field| group[field].as_f64().unwrap());
        assert_eq!(of(&json["groups"][1]), [0.0, 640.0, 10.0]);
        assert_eq!(of(&json["total"]), [1.0, 640.0, 10.02]);
        assert_eq!(json["not_kept_window_ms"], json!(64_000));
        let mut out = Vec::new();
        statistics.write(&mut out, Screen { width: 80, colours: false }).unwrap();
        let shown = String::from_utf8(out).unwrap();
        assert!(shown.contains("done and not kept: about 640 in the last 64.0 s, group n"), "{shown}");
    }
}
